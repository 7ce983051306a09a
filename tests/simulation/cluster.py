"""The simulated cluster of actors: each actor is a process on a host, and calls travel over the simulated network.

A call arrives at most once. Calls of one caller may overtake each other, and the caller of a process that has died
learns of it later, with ActorDied, whether the call was carried out or not.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection
from typing import Any

from rayps_client.errors import ActorDied, ClusterError, NoResources

from rayps.cluster.local import not_free_there, refuse_if_too_large, resolve
from rayps.cluster.notices import Notice, StoredNotice
from rayps.cluster.warm import WarmState
from simulation.kernel import EPOCH, Process, Simulation, Waiters, simulation

TARGETS: dict[str, str] = {}  # actors that are simulated themselves: the product's class -> what stands in for it
LEARN_SECONDS = 0.5  # longest time until the death of a process is known


class SimReply:
    """The reply to a call."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        self._value: tuple[bool, Any] | None = None
        self._waiters = Waiters()

    def set(self, good: bool, value: Any) -> None:
        """Receive the result, or the error."""
        if self._value is None:
            self._value = (good, value)
            self._waiters.wake_all()

    def done(self) -> bool:
        return self._value is not None

    def result(self, timeout: float | None = None) -> Any:
        sim = simulation()
        end = None if timeout is None else sim.now + timeout
        while self._value is None:
            left = None if end is None else end - sim.now
            if left is not None and left <= 0:
                raise TimeoutError
            self._waiters.wait(left)
        good, value = self._value
        if good:
            return value
        raise value


class SimHandle:
    """The handle of an actor."""

    def __init__(self, name: str, actor: Actor) -> None:
        self.name, self.actor = name, actor

    def call(self, method: str, *args: Any) -> SimReply:
        """Send a call."""
        sim = simulation()
        caller = sim.alive().process
        reply = SimReply(self.actor)
        self.actor.call(caller, reply, method, args)
        return reply

    def __reduce__(self) -> Any:
        return _handle_of, (self.name, self.actor.number)


class Actor:
    """An actor: its process, its object, and the calls that wait for its constructor."""

    def __init__(self, cluster: World, name: str, host: str, target: str, args: Any, kwargs: Any) -> None:
        self.cluster, self.name, self.target, self.host = cluster, name, target, host
        self.number = cluster.sim.number()
        self.simulated = target in TARGETS  # it changes nothing that it is given, so nothing is copied
        self.args, self.kwargs = args, kwargs
        self.restarts = 0
        self.detached = False
        self.owner: Process | None = None
        self.bundle: dict[str, float] = {}
        self.object: Any = None
        self.process: Process | None = None
        self.reason: str | None = None  # why the actor is dead for good
        self._waiting: list[Callable[[], None]] = []
        self._open: list[tuple[SimReply, Process]] = []
        cluster.actors[self.number] = self

    def start(self, delay: float) -> None:
        """Start the actor's process."""
        process = self.process = Process(self.cluster.sim, self.name, self.host)
        process.owner = self.owner
        if self.host not in self.cluster.hosts:
            process.dead = self.reason = f"its host {self.host} has ended"
            return
        process.on_death.append(lambda: self._died(process))
        process.start("main", lambda: self._construct(process), delay)

    def _construct(self, process: Process) -> None:
        sim = self.cluster.sim
        sim.log("started", f"{self.name} starts on {self.host}")
        args, kwargs = (self.args, self.kwargs) if self.simulated else copied((self.args, self.kwargs))
        try:
            made = resolve(TARGETS.get(self.target, self.target))(*args, **kwargs)
        except Exception as error:
            sim.log("failed", f"{self.name} cannot start: {error}")
            self.reason = f"its constructor raised {type(error).__name__}: {error}"
            self.restarts = 0
            process.kill(self.reason)
            return
        self.object = made
        waiting, self._waiting = self._waiting, []
        for work in waiting:
            work()

    def _died(self, process: Process) -> None:
        if self.process is not process:
            return
        sim = self.cluster.sim
        self.object, self._waiting = None, []
        reason = process.dead or ""
        open_calls, self._open = self._open, []
        for reply, caller in open_calls:
            self._tell(reply, caller, reason)
        self.cluster.children_of(process)
        if self.restarts and self.reason is None:
            self.process = None
            sim.after(0.5 + sim.rng.random(), lambda: self._again())
            return
        self.reason = self.reason or reason
        if self.cluster.names.get(self.name) is self:
            del self.cluster.names[self.name]

    def _again(self) -> None:
        if self.reason is None:
            self.restarts -= self.restarts > 0
            self.start(0.1)

    def _tell(self, reply: SimReply, caller: Process, reason: str) -> None:
        sim, name = self.cluster.sim, self.name
        error = ActorDied(f"actor {name} died: {reason}", actor=name, reason=reason)
        sim.after(sim.rng.random() * LEARN_SECONDS, lambda: reply.set(False, error))

    def call(self, caller: Process, reply: SimReply, method: str, args: Any) -> None:
        """Send a call to the actor's process."""
        sim, network = self.cluster.sim, self.cluster.network
        if self.reason is not None or self.process is None or self.process.dead is not None:
            self._tell(reply, caller, self.reason or "its process has died")
            return
        self._open.append((reply, caller))
        process, given = self.process, args if self.simulated else copied(args)

        def arrive() -> None:
            if process.dead is None:
                if self.object is None:
                    self._waiting.append(begin)
                else:
                    begin()

        def begin() -> None:
            process.start(method, work)

        def work() -> None:
            try:
                good, value = True, getattr(self.object, method)(*given)
            except Exception as error:
                good, value = False, error
            answer = copied(value) if good and not self.simulated else value
            sim.alive()
            self._open = [entry for entry in self._open if entry[0] is not reply]
            network.deliver(process.host, caller.host, lambda: reply.set(good, answer))

        network.deliver(caller.host, process.host, arrive)

    def kill(self, why: str) -> None:
        """End the actor for good."""
        self.restarts = 0
        if self.reason is None:
            self.reason = why
        if self.cluster.names.get(self.name) is self:
            del self.cluster.names[self.name]
        if self.process is not None:
            self.process.kill(why)


class World:
    """All actors of the simulated cluster, its hosts with their resources, and the map that all actors share."""

    def __init__(self, sim: Simulation, hosts: dict[str, float]) -> None:
        self.sim, self.network, self.hosts = sim, sim.network, hosts
        self.names: dict[str, Actor] = {}
        self.actors: dict[int, Actor] = {}
        self.values: dict[str, bytes] = {}
        self.owners: dict[int, list[Actor]] = {}  # pid of an owner -> its actors, which end with it
        self.held: list[SimReservation] = []
        self.notices: dict[str, StoredNotice] = {}  # announced ones, by key
        self.reservations: dict[str, SimReservation] = {}  # by name
        self.away = False  # the cluster does not answer
        sim.world = self

    def children_of(self, process: Process) -> None:
        """End the actors of a process that has ended."""
        for actor in self.owners.pop(process.pid, []):
            self.sim.after(self.sim.rng.random() * 2.0, lambda actor=actor: actor.kill("its owner has died"))

    def free_by_host(self) -> dict[str, float]:
        """Return each host's CPUs that are not reserved."""
        left = dict(self.hosts)
        for each in self.held:
            for host, bundle in zip(each.places, each.bundles, strict=True):
                if host in left:
                    left[host] -= bundle.get("cpu", 0.0)
        return left

    def free(self) -> dict[str, float]:
        """Return the resources that are not reserved."""
        return {"cpu": max(0.0, sum(self.free_by_host().values())), "gpu": 0.0}

    def place(self, bundles: list[dict[str, float]], avoid: Collection[str] = ()) -> list[str] | None:
        """Return a host with room for each bundle, or None if there is too little room."""
        left, found = self.free_by_host(), []
        for bundle in bundles:
            fitting = [host for host in sorted(left) if left[host] >= bundle.get("cpu", 0.0) and host not in avoid]
            if not fitting:
                return None
            found.append(self.sim.rng.choice(fitting))
            left[found[-1]] -= bundle.get("cpu", 0.0)
        return found

    def end_host(self, host: str) -> None:
        """End a host with all its processes."""
        self.sim.log("fault", f"{host} ends")
        del self.hosts[host]
        for process in [each for each in self.sim.processes if each.host == host and not each.root]:
            process.kill(f"its host {host} has ended")


class SimReservation:
    """Resources that a process has reserved."""

    def __init__(self, world: World, owner: Process | None, bundles: list[dict[str, float]], places: list[str]) -> None:
        self.bundles, self.places, self.released, self._world = bundles, places, False, world
        world.held.append(self)
        if owner is not None:
            owner.on_death.append(lambda: world.sim.after(1.0, self.release))

    def hosts(self) -> list[str]:
        return list(self.places)

    def release(self) -> None:
        self.released = True
        if self in self._world.held:
            self._world.held.remove(self)
        names = self._world.reservations
        for name in [name for name, found in names.items() if found is self]:
            del names[name]


class SimCluster:
    """Stands in for a cluster, in every process."""

    @property
    def _world(self) -> World:
        sim = simulation()
        sim.alive()
        if sim.world.away:
            raise ClusterError("the cluster does not answer")
        return sim.world

    def spawn(
        self,
        target: str,
        *args: Any,
        name: str | None = None,
        cpus: float = 0.0,
        gpus: float = 0.0,
        detached: bool = False,
        here: bool = False,
        gang: SimReservation | None = None,
        index: int | None = None,
        node: str | None = None,
        avoid: Collection[str] = (),
        restarts: int = 0,
        warm: bool = False,
        **kwargs: Any,
    ) -> SimHandle:
        world = self._world
        sim, owner = world.sim, world.sim.alive().process
        name = name or f"{target.rpartition(':')[2]}-{sim.number()}"
        sim.park(sim.rng.random() * 0.01)
        if name in world.names:
            raise ClusterError(f"cannot start actor {name!r}: the name is taken")
        host = owner.host if here and owner.host not in avoid else sim.rng.choice(sorted(set(world.hosts) - {*avoid}))
        if node:
            host = node
        if gang is not None:
            host = gang.hosts()[index or 0]
        actor = Actor(world, name, host, target, args, kwargs)
        actor.restarts, actor.detached, actor.owner = restarts, detached, owner
        world.names[name] = actor
        if not detached:
            world.owners.setdefault(owner.pid, []).append(actor)
        actor.start(0.05 + sim.rng.random() * 0.5)
        return SimHandle(name, actor)

    def find(self, name: str) -> SimHandle | None:
        actor = self._world.names.get(name)
        return None if actor is None else SimHandle(name, actor)

    def kill(self, handle: SimHandle) -> None:
        self._world  # noqa: B018  raises if the cluster does not answer
        handle.actor.kill("it was killed by its owner")

    def free(self) -> dict[str, float]:
        return self._world.free()

    def total(self) -> dict[str, float]:
        return {"cpu": sum(self._world.hosts.values()), "gpu": 0.0}

    def hosts(self, free: bool = True) -> dict[str, dict[str, float]]:
        world = self._world
        return {host: {"cpu": cpus} for host, cpus in (world.free_by_host() if free else world.hosts).items()}

    def keep_warm(self, wanted: int) -> WarmState:
        return WarmState(wanted)

    def share(self, value: Any) -> Any:
        return value

    def last_output(self, handle: Any) -> str:
        return ""

    def held(self) -> None:
        return None

    def host_names(self) -> dict[str, tuple[str, ...]]:
        return {host: (host,) for host in self._world.hosts}

    def reserve(
        self, bundles: list[dict[str, float]], timeout: float, avoid: Collection[str] = ()
    ) -> SimReservation | None:
        world = self._world
        if not any(sum(bundle.values()) for bundle in bundles):
            return None
        refuse_if_too_large(bundles, self.total())
        needed, end = sum(bundle.get("cpu", 0.0) for bundle in bundles), world.sim.now + timeout
        while (places := world.place(bundles, avoid)) is None:
            if world.sim.now >= end:
                raise NoResources(f"{needed:g} CPUs are not free after {timeout:g} s", needed=bundles, free=self.free())
            world.sim.park(0.5)
        return SimReservation(world, world.sim.alive().process, bundles, places)

    def reserve_named(
        self, name: str, bundle: dict[str, float], node: str, timeout: float, *, detached: bool
    ) -> SimReservation:
        world = self._world
        end = world.sim.now + timeout
        while world.free_by_host().get(node, 0.0) < bundle.get("cpu", 0.0):
            if world.sim.now >= end:
                raise not_free_there(bundle, node, timeout)
            world.sim.park(0.5)
        owner = None if detached else world.sim.alive().process
        found = world.reservations[name] = SimReservation(world, owner, [bundle], [node])
        return found

    def reservation(self, name: str) -> SimReservation | None:
        return self._world.reservations.get(name)

    @property
    def node(self) -> str:
        return simulation().alive().process.host

    def notices(self) -> tuple[Notice, ...]:
        now = EPOCH + simulation().now
        return tuple(one.at(now) for one in self._world.notices.values() if not one.over(now))

    def announce(self, notice: Notice) -> None:
        self._world.notices[notice.key] = StoredNotice.of(notice, EPOCH + simulation().now)

    def withdraw(self, notice: Notice) -> None:
        self._world.notices.pop(notice.key, None)

    def close(self) -> None:
        pass

    # ---- the map that all actors share

    def put(self, key: str, value: bytes) -> None:
        self._world.values[key] = value

    def get(self, key: str) -> bytes | None:
        return self._world.values.get(key)

    def delete(self, key: str) -> None:
        self._world.values.pop(key, None)


_CLUSTER = SimCluster()


def _handle_of(name: str, number: int) -> SimHandle:
    return SimHandle(name, simulation().world.actors[number])


def surrounding() -> SimCluster:
    """Stand in for `rayps.cluster.local.surrounding` and `rendezvous`."""
    return _CLUSTER


def host_address() -> str:
    """Stand in for `rayps.cluster.local.host_address`."""
    return simulation().alive().process.host


def copied(value: Any) -> Any:
    """Return a copy, as of a value that travels to another process."""
    if value is None or isinstance(value, (int, str, float, bytes)):
        return value
    return pickle.loads(pickle.dumps(value))

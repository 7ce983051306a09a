"""A cluster whose actors are processes on simulated hosts (`rayps.bench.netns`): for measurements of whole jobs.

Each worker has a host of its own, and so has each server. The driver runs in this process, and reaches the actors by
pipes, which no link shapes.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from rayps_client.errors import ActorDied, ClusterError, RaypsError

from rayps.bench.netns import Hosts, NamespaceActor
from rayps.cluster.local import ActorHandle, Bundle, LocalCluster, Reservation, register_provider, rendezvous, resolve
from rayps.cluster.members import ActorHost
from rayps.cluster.notices import Notice
from rayps.cluster.warm import WarmState

CALL_SECONDS = 600.0  # the longest call of an actor
_CPUS = 64.0  # logical CPUs of the cluster
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class ActorPlace:
    """Where the process of an actor runs."""

    host: str
    address: str  # at which its peers reach it
    cores: tuple[int, ...] = ()  # () means all
    nice: int = 0  # its priority for the kernel, -20 (first) to 19; below 0 needs root


class HostedActor:
    """The process of one actor on a simulated host: it makes the actor, and passes calls on to it."""

    def __init__(self, place: ActorPlace, target: str, packed: bytes) -> None:
        """Make `target(*args, **options)` at `place`.

        `packed` are the pickled (args, options), by value: tensors are not sent as file descriptors.
        """
        if place.cores:
            os.sched_setaffinity(0, place.cores)
        if place.nice:
            os.setpriority(os.PRIO_PROCESS, 0, place.nice)  # this thread's, which the actor's threads inherit
        values, cluster = rendezvous(), LocalCluster()
        register_provider(lambda: (values, cluster, place.address))
        args, options = pickle.loads(packed)
        self._host, self._actor = place.host, resolve(target)(*args, **options)

    def call(self, method: str, packed: bytes) -> bytes:
        """Call a method of the actor with pickled arguments, and return its pickled result.

        In the result of `place` the host is the simulated one.
        """
        found = getattr(self._actor, method)(*pickle.loads(packed))
        return pickle.dumps(ActorHost(self._host, found.pid, found.address) if isinstance(found, ActorHost) else found)


class HostedHandle:
    """The handle of an actor on a simulated host. Its calls run one after the other."""

    def __init__(self, name: str, actor: NamespaceActor) -> None:
        self.name = name
        self._actor = actor
        self._calls: queue.SimpleQueue[tuple[Future[Any], str, Any] | None] = queue.SimpleQueue()
        self._ended = threading.Event()
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    @property
    def pid(self) -> int:
        """The id of the actor's process."""
        return self._actor.pid

    def call(self, method: str, *args: Any) -> Future[Any]:
        """Call a method of the actor; return its reply."""
        reply: Future[Any] = Future()
        if self._ended.is_set():
            reply.set_exception(ActorDied(f"{self.name} has ended", actor=self.name))
        else:
            self._calls.put((reply, method, args))
        return reply

    def kill(self) -> None:
        """End the process."""
        self._ended.set()
        self._actor.kill()
        self._calls.put(None)

    def _serve(self) -> None:
        with contextlib.suppress(ClusterError):
            self._actor.started.result(CALL_SECONDS)
        while (item := self._calls.get()) is not None:
            reply, method, args = item
            try:
                answer = self._actor.call("call", method, pickle.dumps(args)).result(CALL_SECONDS)
                reply.set_result(pickle.loads(answer))
            except RaypsError as error:
                reply.set_exception(error)
            except (OSError, EOFError) as error:
                reply.set_exception(ActorDied(f"{self.name} has ended: {error}", actor=self.name))


class HostCluster:
    """A cluster of processes on `hosts`: see `rayps.cluster.local.Cluster`. Workers are on the first hosts, by rank."""

    def __init__(
        self,
        hosts: Hosts,
        workers: int,
        cores: dict[int, Sequence[int]] | None = None,
        nice: dict[int, int] | None = None,
    ) -> None:
        """`cores` maps a worker's rank to the cores on which its process runs; by default these are all.

        `nice` maps a rank to the priority of its process: see `ActorPlace`.
        """
        self._hosts, self._workers, self._cores, self._nice = hosts, workers, cores or {}, nice or {}
        self.handles: list[HostedHandle] = []
        self._servers = 0

    def spawn(
        self,
        target: str,
        *args: Any,
        name: str | None = None,
        cpus: float = 0.0,
        gpus: float = 0.0,
        detached: bool = False,
        here: bool = False,
        gang: Reservation | None = None,
        index: int | None = None,
        restarts: int = 0,
        warm: bool = False,
        **options: Any,
    ) -> HostedHandle:
        """Start an actor: a worker on the host of its rank, any other actor on one of the further hosts."""
        kind = target.rpartition(":")[2]
        if kind == "WorkerActor":
            host = int(args[0])
        else:
            host = self._workers + self._servers % max(1, len(self._hosts.addresses) - self._workers)
            self._servers += 1
        cores, nice = tuple(self._cores.get(host, ())), self._nice.get(host, 0)
        place = ActorPlace(f"host-{host}", self._hosts.addresses[host], cores, nice)
        actor = self._hosts.spawn(
            host, "benchmarks.network.host_cluster:HostedActor", place, target, pickle.dumps((args, options))
        )
        handle = HostedHandle(name or f"{kind}-{host}", actor)
        self.handles.append(handle)
        return handle

    def find(self, name: str) -> ActorHandle | None:
        """Return None: no actor here outlives its job."""
        return None

    @property
    def node(self) -> str:
        """No id: the caller's process is on none of the hosts."""
        return ""

    def notices(self) -> tuple[Notice, ...]:
        """Return no notice."""
        return ()

    def announce(self, notice: Notice) -> None:
        """Do nothing: nobody is told to leave a host."""

    def withdraw(self, notice: Notice) -> None:
        """Do nothing."""

    def keep_warm(self, wanted: int) -> WarmState:
        """Do nothing."""
        return WarmState(wanted)

    def share(self, value: Value) -> Value:
        """Return the value itself, which each call then sends."""
        return value

    def free(self) -> Bundle:
        """Return all resources."""
        return {"cpu": _CPUS, "gpu": 0.0}

    def total(self) -> Bundle:
        """Return all resources."""
        return self.free()

    def hosts(self, free: bool = True) -> dict[str, Bundle]:
        """Return the resources of each host."""
        return {f"host-{host}": self.free() for host in range(len(self._hosts.addresses))}

    def last_output(self, handle: ActorHandle) -> str:
        """Return "": the actors write to the output of this process."""
        return ""

    def held(self) -> list[Bundle] | None:
        """Return None: reservations use no resources."""
        return None

    def host_names(self) -> dict[str, tuple[str, ...]]:
        """Return the names of each host."""
        return {f"host-{host}": (address,) for host, address in enumerate(self._hosts.addresses)}

    def reserve(self, bundles: list[Bundle], timeout: float, avoid: Collection[str] = ()) -> Reservation | None:
        """Reserve nothing: the hosts have room for all."""
        return None

    def reserve_named(self, name: str, bundle: Bundle, node: str, timeout: float, *, detached: bool) -> Reservation:
        """Raise ClusterError: no server group is started here, and only its servers reserve by name."""
        raise ClusterError(f"the hosts of this measurement hold no reservations, and {name!r} was to be one")

    def reservation(self, name: str) -> None:
        """Return None: nothing is reserved by name."""

    def kill(self, handle: ActorHandle) -> None:
        """End an actor at once."""
        assert isinstance(handle, HostedHandle)
        handle.kill()

    def close(self) -> None:
        """End all actors."""
        for handle in self.handles:
            handle.kill()

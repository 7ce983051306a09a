"""The protocol of a cluster of actors, and a cluster of threads for tests. `ray_cluster` implements it on Ray.

An actor is an instance of a plain class, which is given by its path `module:Class`. Several threads may call its
methods at once. If an actor has a method `close()`, this method is called when the actor is killed.
"""

from __future__ import annotations

import importlib
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeAlias, TypeVar

from rayps_client.errors import ActorDied, ConfigError, NoResources

from rayps.cluster.notices import Notice, StoredNotice
from rayps.cluster.warm import WarmState

_Shared = TypeVar("_Shared")
Bundle = dict[str, float]
PROTOCOL = 1  # version of the calls between a service and actors that outlive it; increment it with each change
FIRST_PROTOCOL = 1  # the PROTOCOL of rayps 0.1.0, whose actors do not report a version
LOCAL_CPUS = 16  # least number of logical CPUs of a Ray that rayps starts
WORKER_NICENESS = "0"  # niceness of workers; at Ray's default, 15, one busy program almost stops the workers


class ActorReply(Protocol):
    """The reply to a call, which arrives later."""

    def done(self) -> bool:
        """Whether the reply has arrived."""

    def result(self, timeout: float | None = None) -> Any:
        """Wait at most `timeout` seconds (None: without limit) for the result, and return it.

        Raises TimeoutError if the wait is too long, ActorDied if the actor died, or the error that the method raised.
        """


class ActorHandle(Protocol):
    """The handle of a running actor."""

    name: str

    def call(self, method: str, *args: Any) -> ActorReply:
        """Call a method of the actor, at most once: a failed call is never repeated."""


class Reservation(Protocol):
    """Resources that were reserved together, as bundles. Each bundle is on one host."""

    def hosts(self) -> list[str]:
        """The host of each bundle."""

    def release(self) -> None:
        """Release the resources."""


class Actors(Protocol):
    """The operations of a cluster on named actors. The service runs these operations in a child process."""

    def spawn(
        self,
        target: str,
        *args: Any,
        name: str | None = None,
        cpus: float = 0.0,
        gpus: float = 0.0,
        detached: bool = False,
        here: bool = False,
        avoid: Sequence[str] = (),
        gang: Reservation | None = None,
        index: int | None = None,
        restarts: int = 0,
        warm: bool = False,
        node: str | None = None,
        **kwargs: Any,
    ) -> ActorHandle:
        """Start an actor, an instance of `target` ("module:Class"), and return its handle.

        `detached`: the actor outlives this process. `here`: the actor runs on this host. `avoid`: nodes on which it
        does not run; with `here`, it runs elsewhere if this host is one of them. A cluster of threads ignores both.
        `gang` and `index`: the actor runs in the bundle `index` of the reservation `gang`. `restarts`: how often the
        cluster starts the actor again, with the same arguments, after its process died (-1: always). A cluster of
        threads ignores `restarts`.
        `warm`: the actor may take a process that `keep_warm` has started, if it has the environment of a new process.
        `node`: the actor runs on the host of this id, one of those that `hosts` returns.
        """

    def find(self, name: str) -> ActorHandle | None:
        """Return the running actor of this name, or None if there is none."""

    def free(self) -> Bundle:
        """Return the free resources: {"cpu": ..., "gpu": ...}."""

    def total(self) -> Bundle:
        """Return all resources."""

    def hosts(self, free: bool = True) -> dict[str, Bundle]:
        """Return the resources of each host: the free ones, or all if `free` is False."""

    def keep_warm(self, wanted: int) -> WarmState:
        """Keep `wanted` processes on this host that wait for an actor: see `rayps.cluster.warm`. Call it repeatedly.

        Return how many there are, and their memory.
        """

    def notices(self) -> tuple[Notice, ...]:
        """Return the notices that hosts or processes will end (see `rayps.cluster.notices`). Return at once.

        A new notice may be returned up to a second late.
        """

    def announce(self, notice: Notice) -> None:
        """Add a notice for every process of the cluster; it replaces an earlier one about the same host or process."""

    def withdraw(self, notice: Notice) -> None:
        """Remove an announced notice about the host or process of `notice`, if there is one."""

    def kill(self, handle: ActorHandle) -> None:
        """End an actor at once."""

    def close(self) -> None:
        """Disconnect from the cluster, and end it if this process started it."""


class Cluster(Actors, Protocol):
    """A cluster on which actors run; it can also share values and reserve resources."""

    @property
    def node(self) -> str:
        """The id of this process's host in the cluster, a Ray node id; "" in a cluster of threads."""

    def share(self, value: _Shared) -> _Shared:
        """Store a value once for several calls. Pass the returned reference to these calls instead of the value."""

    def last_output(self, handle: ActorHandle) -> str:
        """Return the last lines that an actor's process wrote; "" if they are not known on this host.

        The process may have died.
        """

    def held(self) -> list[Bundle] | None:
        """Return the free bundles inside which this process reserves, such as those of a trial of Ray Tune.

        None: it reserves anywhere in the cluster.
        """

    def host_names(self) -> dict[str, tuple[str, ...]]:
        """Return the names and addresses of each host, by its id as in `hosts`."""

    def reserve(self, bundles: list[Bundle], timeout: float, avoid: Collection[str] = ()) -> Reservation | None:
        """Reserve all bundles or none; return None if they need no resources.

        `avoid`: the ids of hosts on which no bundle is reserved. A cluster of threads ignores it.

        Raises NoResources if the cluster is too small, or too few resources are free within `timeout` seconds.
        """

    def reserve_named(self, name: str, bundle: Bundle, node: str, timeout: float, *, detached: bool) -> Reservation:
        """Reserve one bundle on a host, under a name by which `reservation` finds it in any process.

        `detached`: the reservation outlives this process. Raises NoResources if the host has too few free resources
        within `timeout` seconds.
        """

    def reservation(self, name: str) -> Reservation | None:
        """Return the reservation that `reserve_named` made under this name, or None if it was released."""


class KeyValues(Protocol):
    """A small map that all actors of a cluster share, and by which they find each other."""

    def put(self, key: str, value: bytes) -> None:
        """Write or overwrite a key."""

    def get(self, key: str) -> bytes | None:
        """Return a key's value, or None if there is no such key."""

    def delete(self, key: str) -> None:
        """Delete a key and its value."""


def resolve(target: str) -> type:
    """Return the class at `module:Class`.

    Raises:
        ConfigError: there is no such module or class.
    """
    module, _, name = target.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"no actor class {target!r}: {error}") from error
    if not isinstance(found, type):
        raise ConfigError(f"{target!r} is not a class")
    return found


class _LocalKeyValues:
    def __init__(self) -> None:
        self._map: dict[str, bytes] = {}

    def put(self, key: str, value: bytes) -> None:
        self._map[key] = value

    def get(self, key: str) -> bytes | None:
        return self._map.get(key)

    def delete(self, key: str) -> None:
        self._map.pop(key, None)


_local_values = _LocalKeyValues()
Surroundings = tuple[KeyValues, "Cluster", str]  # the shared map, the cluster, this host's address in the cluster
_providers: list[Callable[[], Surroundings | None]] = []


def register_provider(provider: Callable[[], Surroundings | None]) -> None:
    """Register a function that returns the cluster in which this process runs, or None outside of a cluster.

    The module `ray_cluster` registers its function when it is imported.
    """
    _providers.append(provider)


def rendezvous() -> KeyValues:
    """Return the map that the actors of this cluster share: Ray's map inside Ray, else a map in this process."""
    return _surroundings()[0]


def surrounding() -> Cluster:
    """Return the cluster in which this code runs: Ray's cluster inside Ray, else a cluster of threads."""
    return _surroundings()[1]


def host_address() -> str:
    """Return the address at which the cluster's other hosts reach this host; loopback if there are no others."""
    return _surroundings()[2]


def _surroundings() -> Surroundings:
    if not _providers and "ray" in sys.modules:
        importlib.import_module("rayps.cluster.ray_cluster")  # it registers its provider
    for provider in _providers:
        found = provider()
        if found is not None:
            return found
    return _local_values, _local_cluster(), "127.0.0.1"


LocalReply: TypeAlias = Future[Any]  # the result of a method


class _LocalHandle:
    def __init__(self, name: str, actor: Any) -> None:
        self.name = name
        self.actor = actor
        self.dead = threading.Event()
        self._ending = threading.Lock()
        self._calls = ThreadPoolExecutor(16, thread_name_prefix=name)
        self._waiting: set[LocalReply] = set()

    def call(self, method: str, *args: Any) -> LocalReply:
        reply: LocalReply = Future()
        if self.dead.is_set():
            reply.set_exception(ActorDied(f"actor {self.name} is dead", actor=self.name))
            return reply
        self._waiting.add(reply)
        self._calls.submit(self._answer, reply, method, lambda: getattr(self.actor, method)(*args))
        return reply

    def _answer(self, reply: LocalReply, method: str, run: Callable[[], Any]) -> None:
        try:
            value, error = run(), None
        except Exception as raised:  # the caller gets any exception of the method
            value, error = None, raised
        except BaseException as raised:  # on Ray such an exception ends the actor's process
            reason = f"{method}() raised {type(raised).__name__}: {raised}"
            value, error = None, ActorDied(f"actor {self.name} died: {reason}", actor=self.name, reason=reason)
        self._waiting.discard(reply)
        if not reply.done():
            reply.set_exception(error) if error else reply.set_result(value)

    def kill(self) -> None:
        with self._ending:
            if self.dead.is_set():
                return
            self.dead.set()
            for reply in list(self._waiting):
                if not reply.done():
                    reply.set_exception(ActorDied(f"actor {self.name} was killed", actor=self.name))
            if hasattr(self.actor, "close"):
                self.actor.close()
            self._calls.shutdown(wait=False)


class LocalCluster:
    """A cluster for tests. Actors are objects in this process, and each call of an actor runs in a thread."""

    def __init__(self, cpus: float = 64.0, gpus: float = 0.0) -> None:
        self._total = {"cpu": cpus, "gpu": gpus}
        self._handles: dict[str, _LocalHandle] = {}
        self._notices: dict[str, StoredNotice] = {}  # by key
        self._reservations: dict[str, Reservation] = {}  # by name
        self._count = 0

    @property
    def node(self) -> str:
        """No id: all actors are in this process."""
        return ""

    def notices(self) -> tuple[Notice, ...]:
        """Return the notices that were announced and are not over."""
        now = time.time()
        return tuple(one.at(now) for one in list(self._notices.values()) if not one.over(now))

    def announce(self, notice: Notice) -> None:
        """Add a notice; it replaces an earlier one about the same host or process."""
        self._notices[notice.key] = StoredNotice.of(notice, time.time())

    def withdraw(self, notice: Notice) -> None:
        """Remove the notice about this host or process, if there is one."""
        self._notices.pop(notice.key, None)

    def spawn(
        self,
        target: str,
        *args: Any,
        name: str | None = None,
        cpus: float = 0.0,
        gpus: float = 0.0,
        detached: bool = False,
        here: bool = False,
        avoid: Sequence[str] = (),
        gang: Reservation | None = None,
        index: int | None = None,
        restarts: int = 0,
        warm: bool = False,
        node: str | None = None,
        **kwargs: Any,
    ) -> _LocalHandle:
        """Make the object `target(*args, **kwargs)`; the resources and the placement are ignored."""
        self._count += 1
        name = name or f"{target.rpartition(':')[2]}-{self._count}"
        handle = _LocalHandle(name, resolve(target)(*args, **kwargs))
        self._handles[name] = handle
        return handle

    def keep_warm(self, wanted: int) -> WarmState:
        """Do nothing: an actor needs no process."""
        return WarmState(wanted)

    def find(self, name: str) -> _LocalHandle | None:
        """Return the running actor of this name, or None if there is none."""
        handle = self._handles.get(name)
        return None if handle is None or handle.dead.is_set() else handle

    def share(self, value: _Shared) -> _Shared:
        """Return the value itself: all actors are in this process."""
        return value

    def free(self) -> Bundle:
        """Return all resources, because actors use none."""
        return dict(self._total)

    def total(self) -> Bundle:
        """Return the resources that the constructor was given."""
        return dict(self._total)

    def hosts(self, free: bool = True) -> dict[str, Bundle]:
        """Return all resources, as those of one host."""
        return {"here": dict(self._total)}

    def last_output(self, handle: ActorHandle) -> str:
        """Return "": the actors write to the output of this process."""
        return ""

    def held(self) -> list[Bundle] | None:
        """Return None: reservations use no resources."""
        return None

    def host_names(self) -> dict[str, tuple[str, ...]]:
        """Return the names of this process's host."""
        return {name: (socket.gethostname(), "127.0.0.1") for name in self.hosts(free=False)}

    def reserve(self, bundles: list[Bundle], timeout: float, avoid: Collection[str] = ()) -> Reservation:
        """Return a reservation that uses no resources. Raises NoResources if the cluster is too small."""
        refuse_if_too_large(bundles, self._total)
        return _LocalReservation(len(bundles))

    def reserve_named(self, name: str, bundle: Bundle, node: str, timeout: float, *, detached: bool) -> Reservation:
        """Return a reservation that uses no resources. Raises NoResources if the cluster is too small."""
        refuse_if_too_large([bundle], self._total)
        found = self._reservations[name] = _LocalReservation(1, lambda: self._reservations.pop(name, None))
        return found

    def reservation(self, name: str) -> Reservation | None:
        """Return the reservation of this name, or None if it was released."""
        return self._reservations.get(name)

    def kill(self, handle: ActorHandle) -> None:
        """End an actor at once. Its calls that have not returned fail with ActorDied."""
        assert isinstance(handle, _LocalHandle)
        handle.kill()
        self._handles.pop(handle.name, None)

    def close(self) -> None:
        """Kill all actors."""
        for handle in list(self._handles.values()):
            self.kill(handle)


class _LocalReservation:
    def __init__(self, count: int, release: Callable[[], object] = lambda: None) -> None:
        self._count, self._release = count, release

    def hosts(self) -> list[str]:
        """Return the same host for each bundle."""
        return ["here"] * self._count

    def release(self) -> None:
        """Forget the reservation; it used no resources."""
        self._release()


def _local_cluster(cluster: list[LocalCluster] = []) -> LocalCluster:  # noqa: B006  one per process, made at first use
    if not cluster:
        cluster.append(LocalCluster())
    return cluster[0]


def refuse_if_too_large(bundles: list[Bundle], total: Bundle) -> None:
    """Refuse a job that needs more resources than the whole cluster has.

    Raises:
        NoResources: the cluster is too small. The error's data have `needed`, `total` and `kind`.
    """
    for kind in ("cpu", "gpu"):
        needed = sum(bundle.get(kind, 0.0) for bundle in bundles)
        if needed > total.get(kind, 0.0):
            raise NoResources(
                f"the job needs {needed:g} {kind.upper()}s and the cluster has {total.get(kind, 0.0):g} in total:\n"
                "use fewer workers, or less for each (--cpus-per-worker, resources), or join a larger cluster",
                needed=needed,
                total=total,
                kind=kind,
            )


def not_free(bundles: list[Bundle], free: Bundle, timeout: float, avoid: Collection[str] = ()) -> NoResources:
    """Return the error for resources that other jobs still used after a wait of `timeout` seconds.

    `avoid`: hosts of which nothing was reserved, because they will end.
    """
    but = f", also on {len(avoid)} hosts that will end and are not used," if avoid else ""
    return NoResources(
        f"the job needs {sum(b.get('cpu', 0) for b in bundles):g} CPUs at once, and {free['cpu']:g} are free{but} "
        f"after {timeout:g} s:\nwait for other jobs, use fewer workers, or raise timeout",
        needed=bundles,
        free=free,
    )


def not_free_there(bundle: Bundle, node: str, timeout: float) -> NoResources:
    """Return the error for a bundle that was not free on a host within `timeout` seconds."""
    needed = ", ".join(f"{amount:g} {kind.upper()}" for kind, amount in bundle.items())
    return NoResources(
        f"{needed} were not free on host {node} within {timeout:g} s: wait for other jobs, or ask for less",
        needed=[bundle],
        node=node,
    )


def until(ready: Callable[[], bool], timeout: float, pause: float = 0.01) -> bool:
    """Wait until `ready()` returns True or `timeout` seconds have passed; return whether `ready()` returned True.

    The first pause between two calls is `pause` seconds; later pauses grow to 0.2 s.
    """
    deadline = time.monotonic() + timeout
    while not ready():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(pause * 1.5, 0.2)
    return True

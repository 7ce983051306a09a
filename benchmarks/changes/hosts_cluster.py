"""A cluster whose hosts are network namespaces: for measurements of jobs between hosts, without Ray.

Each host has one process that has imported torch and the modules of actors, and forks a process for each actor. The
caller's process is on no host: calls of actors pass through pipes, which no fault of the network cuts.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from typing import Any, TypeVar

from rayps_client.errors import ActorDied, ClusterError

from rayps.bench.netns import Hosts
from rayps.cluster.local import (
    ActorHandle,
    Bundle,
    LocalCluster,
    Reservation,
    refuse_if_too_large,
    register_provider,
    rendezvous,
    resolve,
)
from rayps.cluster.notices import Notice
from rayps.cluster.warm import MODULES, WarmState

_Value = TypeVar("_Value")
_NEW_UTS = 0x04000000  # clone's CLONE_NEWUTS
_DIE_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG
_CPUS = 64.0  # logical CPUs of each host: processes are not limited
_CALLS = 8  # calls of an actor that run at once
_START_SECONDS = 180.0
_PID_BYTES = 8


class HostsCluster:
    """The cluster: see `rayps.cluster.local.Cluster`. Actors of a reservation are on its hosts, others in turn on all.

    Use it as a context manager. It ends its processes, and not the `Hosts`.
    """

    node = ""

    def __init__(self, net: Hosts) -> None:
        """Start one process on each host of `net`."""
        self._forkers = [_Forker(net, host) for host in range(len(net.addresses))]
        self._registry = LocalCluster()  # holds the notices and the named reservations
        self._turn = itertools.count()
        self._down: set[int] = set()
        self.handles: list[ForkedActor] = []

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
        **kwargs: Any,
    ) -> ForkedActor:
        """Start an actor on a host; the resources are ignored."""
        host = gang.places[index] if isinstance(gang, HostsReservation) and index is not None else None
        if host is None or host in self._down:
            host = self._choose_next_host()
        kind = target.rpartition(":")[2]
        handle = ForkedActor(name or f"{kind}-{len(self.handles)}", host, self._forkers[host], (target, args, kwargs))
        self.handles.append(handle)
        return handle

    def _choose_next_host(self) -> int:
        up = [host for host in range(len(self._forkers)) if host not in self._down]
        if not up:
            raise ClusterError("all hosts are lost: the bench has ended the processes of each")
        return up[next(self._turn) % len(up)]

    def lose_host(self, host: int) -> list[int]:
        """Kill all actors of a host, and start no actor there until `return_host`; return the actors' process ids."""
        self._down.add(host)
        doomed = [handle for handle in self.handles if handle.host == host and not handle.gone.is_set()]
        for handle in doomed:
            handle.signal(signal.SIGKILL)
        return [handle.pid for handle in doomed]

    def return_host(self, host: int) -> None:
        """Let actors start on a host again."""
        self._down.discard(host)

    def find(self, name: str) -> ForkedActor | None:
        """Return the running actor of this name, or None if there is none."""
        return next((handle for handle in self.handles if handle.name == name and not handle.gone.is_set()), None)

    def share(self, value: _Value) -> _Value:
        """Return the value itself."""
        return value

    def free(self) -> Bundle:
        """Return all resources, because actors use none."""
        return {"cpu": _CPUS * len(self._forkers), "gpu": 0.0}

    total = free

    def hosts(self, free: bool = True) -> dict[str, Bundle]:
        """Return the resources of each host."""
        return {forker.name: {"cpu": _CPUS, "gpu": 0.0} for forker in self._forkers}

    def last_output(self, handle: ActorHandle) -> str:
        """Return "": the actors write to the output of this process."""
        return ""

    def held(self) -> list[Bundle] | None:
        """Return None: reservations use no resources."""
        return None

    def host_names(self) -> dict[str, tuple[str, ...]]:
        """Return the names of each host."""
        return {forker.name: (forker.name,) for forker in self._forkers}

    def reserve(self, bundles: list[Bundle], timeout: float, avoid: Collection[str] = ()) -> HostsReservation:
        """Return a reservation whose bundles are on the hosts in blocks of about equal size."""
        refuse_if_too_large(bundles, self.free())
        count = len(self._forkers)
        return HostsReservation([number * count // len(bundles) for number in range(len(bundles))], self._forkers)

    def notices(self) -> tuple[Notice, ...]:
        """Return the announced notices."""
        return self._registry.notices()

    def announce(self, notice: Notice) -> None:
        """Add a notice; it replaces an earlier one about the same host or process."""
        self._registry.announce(notice)

    def withdraw(self, notice: Notice) -> None:
        """Remove the notice about this host or process, if there is one."""
        self._registry.withdraw(notice)

    def reserve_named(self, name: str, bundle: Bundle, node: str, timeout: float, *, detached: bool) -> Reservation:
        """Return a reservation that uses no resources, and that `reservation` finds by its name."""
        return self._registry.reserve_named(name, bundle, node, timeout, detached=detached)

    def reservation(self, name: str) -> Reservation | None:
        """Return the reservation of this name, or None if it was released."""
        return self._registry.reservation(name)

    def keep_warm(self, wanted: int) -> WarmState:
        """Do nothing: every process is forked from one that has the modules."""
        return WarmState(wanted)

    def kill(self, handle: ActorHandle) -> None:
        """End an actor at once."""
        assert isinstance(handle, ForkedActor)
        handle.kill()

    def close(self) -> None:
        """Kill all actors, and the hosts' processes."""
        for handle in self.handles:
            handle.kill()
        for forker in self._forkers:
            forker.close()

    def __enter__(self) -> HostsCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class HostsReservation:
    """The hosts of a reservation's bundles, by their numbers."""

    def __init__(self, places: list[int], forkers: list[_Forker]) -> None:
        self.places = places
        self._names = [forkers[place].name for place in places]

    def hosts(self) -> list[str]:
        """Return the name of each bundle's host."""
        return self._names

    def release(self) -> None:
        """Do nothing: nothing was reserved."""


class _Forker:
    """The process of one host that forks actors."""

    def __init__(self, net: Hosts, host: int) -> None:
        self.name, self._lock = f"host-{host}", threading.Lock()
        self._line, theirs = socket.socketpair()
        code = "from benchmarks.changes.hosts_cluster import fork_actors; fork_actors({}, {}, {!r}, {!r})"
        call = code.format(theirs.fileno(), os.getpid(), self.name, net.addresses[host])
        with theirs:
            self._process = subprocess.Popen(
                [*net.enter(host), sys.executable, "-c", call], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
        self._line.settimeout(_START_SECONDS)

    def fork(self, pipe: Connection) -> int:
        """Fork an actor that serves `pipe`; return its process id."""
        with self._lock:
            try:
                socket.send_fds(self._line, [b"+"], [pipe.fileno()])
                found = self._line.recv(_PID_BYTES, socket.MSG_WAITALL)
            except OSError as error:
                raise ClusterError(f"{self.name} starts no actor: {error}", host=self.name) from error
        if len(found) != _PID_BYTES:
            raise ClusterError(f"the process of {self.name} has ended", host=self.name)
        return int.from_bytes(found, "little")

    def close(self) -> None:
        """End the process."""
        self._line.close()
        self._process.kill()
        self._process.wait()


class ForkedActor:
    """The handle of an actor on one of the hosts. Several calls may run at once."""

    def __init__(
        self, name: str, host: int, forker: _Forker, made: tuple[str, tuple[Any, ...], dict[str, Any]]
    ) -> None:
        self.name, self.host, self.gone = name, host, threading.Event()
        self._numbers, self._waiting = itertools.count(), dict[int, Future[Any]]()
        self._lock = threading.Lock()
        self._pipe, theirs = Pipe()
        with theirs:
            self.pid = forker.fork(theirs)
        threading.Thread(target=self._read, name=f"reader of {name}", daemon=True).start()
        self._ask(*made)

    def call(self, method: str, *args: Any) -> Future[Any]:
        """Call a method of the actor, at most once."""
        return self._ask(method, args, {})

    def signal(self, number: int) -> None:
        """Send a signal to the actor's process."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the actor's process. Its calls that have not returned fail with ActorDied."""
        if not self.gone.is_set():
            self.signal(signal.SIGKILL)
            self.gone.wait(_START_SECONDS)

    def _ask(self, what: str, args: tuple[Any, ...], more: dict[str, Any]) -> Future[Any]:
        reply: Future[Any] = Future()
        with self._lock:
            if not self.gone.is_set():
                number = next(self._numbers)
                self._waiting[number] = reply
                with contextlib.suppress(OSError):  # the reader then fails all calls
                    self._pipe.send_bytes(pickle.dumps((number, what, args, more)))
                return reply
        self._fail(reply)
        return reply

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                number, value, error = pickle.loads(self._pipe.recv_bytes())
                with self._lock:
                    reply = self._waiting.pop(number, None)
                if reply is not None:
                    reply.set_exception(error) if error is not None else reply.set_result(value)
        with self._lock:
            self.gone.set()
            waiting, self._waiting = self._waiting, {}
            self._pipe.close()
        for reply in waiting.values():
            self._fail(reply)

    def _fail(self, reply: Future[Any]) -> None:
        reason = f"process {self.pid} has ended"
        reply.set_exception(ActorDied(f"actor {self.name} died: {reason}", actor=self.name, reason=reason))


def fork_actors(descriptor: int, parent: int, name: str, address: str) -> None:
    """Run a host's process: fork an actor for each descriptor that arrives, until the caller closes the line."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        return
    if libc.unshare(_NEW_UTS) == 0:
        socket.sethostname(name)
    for module in MODULES:
        __import__(module)
    cluster = LocalCluster()
    values = rendezvous()  # before the provider is registered: the map of this process
    register_provider(lambda: (values, cluster, address))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system collects ended children
    with socket.socket(fileno=descriptor) as line:
        while True:
            mark, descriptors, _, _ = socket.recv_fds(line, 1, 1)
            if not mark:
                return
            pid = os.fork()
            if pid == 0:
                line.close()
                libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _serve(Connection(descriptors[0]))
            os.close(descriptors[0])
            line.sendall(pid.to_bytes(_PID_BYTES, "little"))


def _serve(pipe: Connection) -> None:
    """Make the actor, answer its calls in threads, and end this process when the pipe closes."""
    lock, pool, actors = threading.Lock(), ThreadPoolExecutor(_CALLS), list[Any]()

    def answer(number: int, what: str, args: tuple[Any, ...], more: dict[str, Any]) -> None:
        try:
            value, error = getattr(actors[0], what)(*args, **more), None
        except Exception as raised:  # sent to the caller
            value, error = None, raised
        try:
            data = pickle.dumps((number, value, error))
        except Exception as fault:  # not every object can be pickled
            data = pickle.dumps((number, None, ClusterError(f"{error or value!r:.300} cannot be sent: {fault}")))
        with lock, contextlib.suppress(OSError):
            pipe.send_bytes(data)

    with contextlib.suppress(EOFError, OSError):
        number, target, args, more = pickle.loads(pipe.recv_bytes())
        try:
            actors.append(resolve(target)(*args, **more))
        except Exception as error:
            pipe.send_bytes(pickle.dumps((number, None, error)))
            os._exit(1)
        while True:
            pool.submit(answer, *pickle.loads(pipe.recv_bytes()))
    os._exit(0)

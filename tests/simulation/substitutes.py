"""What stands in for the modules and classes that the product imports, and the replacement itself.

Only processes, clock, network, store and disk are simulated. In every loaded module of rayps, `installed` replaces
each name that refers to one of the originals in `_ORIGINALS`. All other code of these modules is the product's own.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import queue
import random
import secrets
import select
import socket
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from rayps.cluster import local
from rayps.comm.link import listener, wakeup
from rayps.core import failpoint, memory
from simulation.cluster import host_address, surrounding
from simulation.disk import SimPath
from simulation.kernel import EPOCH, Task, Waiters, simulation
from simulation.network import SimListener, SimPoll, SimWakeup, connect


class SimTime:
    """Stands in for `time`: the virtual clock. The wall clock of a process may be wrong."""

    @staticmethod
    def monotonic() -> float:
        return 1000.0 + simulation().now

    perf_counter = process_time = thread_time = monotonic

    @staticmethod
    def monotonic_ns() -> int:
        return int(1e9 * SimTime.monotonic())

    perf_counter_ns = monotonic_ns

    @staticmethod
    def time() -> float:
        sim = simulation()
        offset = 0.0 if sim.current is None else sim.current.process.wall_offset
        return EPOCH + sim.now + offset

    @staticmethod
    def time_ns() -> int:
        return int(1e9 * SimTime.time())

    @staticmethod
    def sleep(seconds: float) -> None:
        simulation().park(seconds)

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


class SimThread:
    """Stands in for `threading.Thread`: a task of the running process."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., Any] | None = None,
        name: str | None = None,
        args: Any = (),
        kwargs: Any = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self.name = name or "thread"
        self.daemon = bool(daemon)
        self._work = lambda: target(*args, **(kwargs or {})) if target is not None else None
        self._task: Task | None = None

    @property
    def ident(self) -> int | None:
        return None if self._task is None else self._task.ident

    def start(self) -> None:
        self._task = simulation().alive().process.start(self.name, self._work)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.done

    def join(self, timeout: float | None = None) -> None:
        sim, task = simulation(), self._task
        me = sim.alive()
        if task is not None and not task.done and task is not me:
            task.joiners.append((me, me.token))
            sim.park(timeout)


class SimEvent:
    """Stands in for `threading.Event`."""

    def __init__(self) -> None:
        self._set, self._waiters = False, Waiters()

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._waiters.wake_all()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        sim = simulation()
        sim.alive()
        end = None if timeout is None else sim.now + timeout
        while not self._set:
            left = None if end is None else end - sim.now
            if left is not None and left <= 0:
                break
            self._waiters.wait(left)
        return self._set


class SimRLock:
    """Stands in for `threading.Lock` and `RLock`."""

    def __init__(self) -> None:
        self._owner: Task | None = None
        self._count = 0
        self._waiters = Waiters()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        sim = simulation()
        task = sim.current
        if task is None:
            return True  # at the end of a simulation
        end = None if timeout < 0 else sim.now + timeout
        while self._owner is not None and self._owner is not task and not self._owner.done:
            left = None if end is None else end - sim.now
            if not blocking or (left is not None and left <= 0):
                return False
            self._waiters.wait(left)
        self._owner, self._count = task, (self._count + 1 if self._owner is task else 1)
        return True

    def release(self) -> None:
        self._count -= 1
        if self._count <= 0:
            self._owner, self._count = None, 0
            self._waiters.wake_one()

    def locked(self) -> bool:
        return self._owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def free(self) -> int:
        """Release the lock whatever its count, which is returned."""
        count, self._count, self._owner = self._count, 0, None
        self._waiters.wake_one()
        return count

    def take(self, count: int) -> None:
        """Acquire the lock again after `free`."""
        self.acquire()
        self._count = count


class SimCondition:
    """Stands in for `threading.Condition`."""

    def __init__(self, lock: SimRLock | None = None) -> None:
        self._lock = lock or SimRLock()
        self._waiters = Waiters()
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        count = self._lock.free()
        try:
            return self._waiters.wait(timeout)
        finally:
            if simulation().current is not None and simulation().current.process.dead is None:
                self._lock.take(count)

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        sim = simulation()
        end = None if timeout is None else sim.now + timeout
        while not (found := predicate()):
            left = None if end is None else end - sim.now
            if left is not None and left <= 0:
                break
            self.wait(left)
        return found

    def notify(self, n: int = 1) -> None:
        for _ in range(n):
            self._waiters.wake_one()

    def notify_all(self) -> None:
        self._waiters.wake_all()


class SimThreading:
    """Stands in for `threading`."""

    Thread, Event, Lock, RLock, Condition = SimThread, SimEvent, SimRLock, SimRLock, SimCondition

    @staticmethod
    def get_ident() -> int:
        return simulation().alive().ident

    get_native_id = get_ident

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)


class SimQueue:
    """Stands in for `queue.SimpleQueue`."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._waiters = Waiters()

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._waiters.wake_one()

    def empty(self) -> bool:
        return not self._items

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        sim = simulation()
        end = None if timeout is None else sim.now + timeout
        while not self._items:
            left = None if end is None else end - sim.now
            if not block or (left is not None and left <= 0):
                raise queue.Empty
            self._waiters.wait(left)
        return self._items.popleft()

    get_nowait = lambda self: self.get(block=False)  # noqa: E731


class SimQueueModule:
    """Stands in for `queue`."""

    SimpleQueue = Queue = SimQueue

    def __getattr__(self, name: str) -> Any:
        return getattr(queue, name)


class SimSelect:
    """Stands in for `select`."""

    poll = SimPoll

    def __getattr__(self, name: str) -> Any:
        return getattr(select, name)


class _Waker:
    """One end of a socket pair: what one end sends makes the other readable."""

    def __init__(self) -> None:
        self.peer: _Waker = self
        self._wakeup = SimWakeup()

    def setblocking(self, _: bool) -> None:
        pass

    def fileno(self) -> int:
        return self._wakeup.fileno()

    def send(self, _: bytes) -> None:
        self.peer._wakeup.wake()

    def recv(self, _: int) -> bytes:
        self._wakeup.clear()
        return b""

    def close(self) -> None:
        self._wakeup.close()


class SimSocket:
    """Stands in for `socket`."""

    @staticmethod
    def gethostname() -> str:
        return simulation().alive().process.host

    @staticmethod
    def socketpair() -> tuple[_Waker, _Waker]:
        pair = _Waker(), _Waker()
        pair[0].peer, pair[1].peer = pair[1], pair[0]
        return pair

    def __getattr__(self, name: str) -> Any:
        return getattr(socket, name)


PACKAGES = frozenset({"rayps", "rayps_api", "rayps_client"})  # whose modules are simulated
FIRST_DESCRIPTOR = 1 << 30  # of the simulated disk; smaller ones are the system's, for example of shared memory


def _opened(descriptor: int) -> SimPath:
    """Return the file of a descriptor. Raises OSError if the running process has not opened it, or has closed it."""
    process = simulation().alive().process
    owner, path = simulation().disk.opened.get(descriptor, (None, None))
    if owner is not process:
        raise OSError(errno.EBADF, f"{process.name} uses descriptor {descriptor}, which it has not open")
    return path


class SimOs:
    """Stands in for `os`, as far as it concerns processes and files of the simulated disk."""

    @staticmethod
    def getpid() -> int:
        return simulation().alive().process.pid

    @staticmethod
    def _exit(_: int) -> None:
        simulation().alive().process.end()

    @staticmethod
    def open(path: Any, flags: int = 0, mode: int = 0o600) -> int:
        sim = simulation()
        if flags & os.O_CREAT and flags & os.O_APPEND and not path.is_file():
            path.write(b"")
        number = FIRST_DESCRIPTOR + sim.number()
        sim.disk.opened[number] = sim.alive().process, path
        return number

    @staticmethod
    def write(descriptor: int, data: Any) -> int:
        if descriptor < FIRST_DESCRIPTOR:
            return os.write(descriptor, data)
        path = _opened(descriptor)
        path.write((path.read_bytes() if path.is_file() else b"") + bytes(data))
        return len(data)

    @staticmethod
    def pread(descriptor: int, count: int, offset: int) -> bytes:
        return bytes(_opened(descriptor).read_bytes()[offset : offset + count])

    @staticmethod
    def fstat(descriptor: int) -> Any:
        return os.fstat(descriptor) if descriptor < FIRST_DESCRIPTOR else _opened(descriptor).stat()

    @staticmethod
    def close(descriptor: int) -> None:
        if descriptor < FIRST_DESCRIPTOR:  # memory is freed at any time
            os.close(descriptor)
        else:
            _opened(descriptor)
            del simulation().disk.opened[descriptor]

    @staticmethod
    def fdopen(descriptor: int, mode: str = "r", encoding: str | None = None) -> Any:
        path = _opened(descriptor)
        del simulation().disk.opened[descriptor]
        return path.open(mode)

    @staticmethod
    def fsync(file: Any) -> None:
        if isinstance(file, int):  # what `write` has written is on the disk
            simulation().alive()
        else:
            file.sync()

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


class SimSecrets:
    """Stands in for `secrets`: equal seeds have equal secrets."""

    @staticmethod
    def token_bytes(count: int = 32) -> bytes:
        return simulation().rng.randbytes(count)

    @staticmethod
    def token_hex(count: int = 32) -> str:
        return simulation().rng.randbytes(count).hex()

    @staticmethod
    def randbits(count: int) -> int:
        return simulation().rng.getrandbits(count)

    def __getattr__(self, name: str) -> Any:
        return getattr(secrets, name)


class SimUuid:
    """Stands in for `uuid`."""

    @staticmethod
    def uuid4() -> uuid.UUID:
        return uuid.UUID(int=simulation().rng.getrandbits(128), version=4)


class SimRandom:
    """Stands in for `random`, as far as its own generator is used (pauses between retries)."""

    @staticmethod
    def random() -> float:
        return simulation().rng.random()

    @staticmethod
    def uniform(a: float, b: float) -> float:
        return simulation().rng.uniform(a, b)

    def __getattr__(self, name: str) -> Any:
        return getattr(random, name)


def _passing(place: str) -> None:
    simulation().place(place)


_ORIGINALS: list[tuple[Any, Any]] = [
    (time, SimTime()),
    (threading, SimThreading()),
    (queue, SimQueueModule()),
    (select, SimSelect()),
    (socket, SimSocket()),
    (os, SimOs()),
    (secrets, SimSecrets()),
    (uuid, SimUuid()),
    (random, SimRandom()),
    (listener.Listener, SimListener),
    (listener.connect, connect),
    (wakeup.Wakeup, SimWakeup),
    (failpoint.passing, _passing),
    (memory.read_available_bytes, lambda: 1 << 40),
    (memory.read_total_bytes, lambda: 1 << 41),
    (local.surrounding, surrounding),
    (local.rendezvous, surrounding),
    (local.host_address, host_address),
]


@functools.lru_cache(maxsize=8)
def _places_of_originals(names: frozenset[str]) -> list[tuple[Any, str, Any]]:
    """Return (module, attribute, original) of each place in the modules `names` that refers to an original."""
    originals = {id(original) for original, _ in _ORIGINALS}
    return [
        (sys.modules[name], attribute, value)
        for name in sorted(names)
        for attribute, value in vars(sys.modules[name]).items()
        if id(value) in originals and not attribute.startswith("__")
    ]


@contextlib.contextmanager
def installed(more: list[tuple[str, str, Any]] = []) -> Iterator[None]:  # noqa: B006  it is not changed
    """Replace the originals in all loaded modules of the product, and `more`: (module, name, what stands in for it)."""
    by_id = {id(original): simulated for original, simulated in _ORIGINALS}
    product = frozenset(name for name in sys.modules if name.partition(".")[0] in PACKAGES)
    undo = list(_places_of_originals(product))
    changes = [(module, attribute, by_id[id(value)]) for module, attribute, value in undo]
    for name, attribute, value in more:
        module = sys.modules[name]
        *path, attribute = attribute.split(".")
        owner = functools.reduce(getattr, path, module)
        undo.append((owner, attribute, getattr(owner, attribute)))
        changes.append((owner, attribute, value))
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        for owner, attribute, value in changes:
            setattr(owner, attribute, value)
        yield
    finally:
        for owner, attribute, value in reversed(undo):
            setattr(owner, attribute, value)
        logging.disable(disabled)

"""Call Ray from the service through a child process with deadlines.

Guarantee: a Ray that hangs or crashes cannot stop the service. `ClusterProcess` starts
`rayps.service.local_ray.ray_child` and sends requests to this child through a pipe. If Ray misses a deadline, the child
is killed, every pending request fails with ClusterError, and the next view of the cluster starts another child. Actors
do not depend on the child, because they are detached and found by name.
"""

from __future__ import annotations

import itertools
import logging
import os
import pickle
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

from rayps_client.errors import ClusterError, RaypsError

import rayps
from rayps.cluster.local import PROTOCOL, ActorHandle, Bundle, Reservation
from rayps.cluster.notices import Notice
from rayps.cluster.warm import WarmState

log = logging.getLogger(__name__)

RAY = "rayps.cluster.ray_cluster:RayCluster"
JOIN_SECONDS = 120.0  # seconds to import ray and join the cluster, enough for a slow machine
ANSWER_SECONDS = 30.0  # seconds for an operation that normally takes milliseconds
_POLL_SECONDS = 0.25
_DISCONNECT_SECONDS = 5.0  # seconds in which the child must disconnect
_REFUSED = 2  # exit code of a child that refuses this service's protocol
_TAIL = 2000  # bytes of the child's last output that an error shows

Answer: TypeAlias = Future[Any]  # the result of a request: what a method of an actor, or of the cluster, returned


class NamedActor:
    """The handle of a named actor, whose methods are called through the child process."""

    def __init__(self, name: str, process: ClusterProcess) -> None:
        self.name = name
        self._process = process

    def call(self, method: str, *args: Any) -> Answer:
        """Call a method of the actor once; a failed call is not repeated."""
        return self._process.request("call", self.name, method, *args)


class ClusterProcess:
    """A child process that has joined the cluster at `address`.

    `give_up_reason` is called several times a second while an answer is awaited. If it returns a text, the child is
    killed and the call fails with that text.

    Raises:
        ClusterError: the cluster was not joined within `join_seconds`, or cannot be joined.
    """

    def __init__(
        self,
        address: str,
        env: Mapping[str, str] | None = None,
        *,
        cluster: str = RAY,
        give_up_reason: Callable[[], str | None] = lambda: None,
        join_seconds: float = JOIN_SECONDS,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        self.totals = 0  # number of answered calls of total(), which every view makes: it grows while Ray answers
        self._give_up_reason = give_up_reason
        self._answer_seconds = answer_seconds
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Answer] = {}
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._failure: str | None = None
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  the child's output; closed with this object
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", max(1, round(answer_seconds)), 0))
        with theirs:
            self._child = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "rayps.service.local_ray.ray_child",
                    "--pipe",
                    str(theirs.fileno()),
                    "--cluster",
                    cluster,
                    "--address",
                    address,
                    "--protocol",
                    str(PROTOCOL),
                ],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=_make_environment(env or {}),
            )
        self._pipe = Connection(ours.detach())
        joined: Answer = Future()
        self._waiting[0] = joined
        threading.Thread(target=self._read, name="rayps-ray", daemon=True).start()
        try:
            self._await(joined, "join", join_seconds)
        except BaseException:
            self._fail("the cluster was not joined")
            raise

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._child.pid

    @property
    def alive(self) -> bool:
        """Whether the child can still answer."""
        return self._failure is None

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
    ) -> NamedActor:
        """Start an actor, as `Actors.spawn` does. The actor must have a name, be detached, and use no reservation."""
        assert name is not None and detached and gang is None, "the actor must outlive the child"
        self._do(
            "spawn",
            target,
            *args,
            name=name,
            cpus=cpus,
            gpus=gpus,
            detached=True,
            here=here,
            avoid=tuple(avoid),
            restarts=restarts,
            warm=warm,
            node=node,
            **kwargs,
        )
        return NamedActor(name, self)

    def find(self, name: str) -> NamedActor | None:
        """Return the living actor of that name, or None if there is none."""
        return NamedActor(name, self) if self._do("find", name) else None

    def free(self) -> Bundle:
        """Return the cluster's free resources: {"cpu": ..., "gpu": ...}."""
        found: Bundle = self._do("free")
        return found

    def total(self) -> Bundle:
        """Return all resources of the cluster."""
        found: Bundle = self._do("total")
        self.totals += 1
        return found

    def hosts(self, free: bool = True) -> dict[str, Bundle]:
        """Return a dict from host to its resources: the free ones with `free`, else all."""
        found: dict[str, Bundle] = self._do("hosts", free)
        return found

    def keep_warm(self, wanted: int) -> WarmState:
        """Keep processes that wait for an actor, and return their state: see `rayps.cluster.warm`."""
        found: WarmState = self._do("keep_warm", wanted)
        return found

    def notices(self) -> tuple[Notice, ...]:
        """Return the notices that hosts or processes will end: see `rayps.cluster.notices`."""
        found: tuple[Notice, ...] = self._do("notices")
        return found

    def announce(self, notice: Notice) -> None:
        """Add a notice for every process of the cluster."""
        self._do("announce", notice)

    def withdraw(self, notice: Notice) -> None:
        """Remove an announced notice."""
        self._do("withdraw", notice)

    def kill(self, handle: ActorHandle) -> None:
        """End an actor at once."""
        self._do("kill", handle.name)

    def close(self, *, graceful: bool = True) -> None:
        """Kill the child. With `graceful`, first give it a few seconds to disconnect from the cluster."""
        if graceful and self.alive:
            try:
                self.request("close").result(timeout=_DISCONNECT_SECONDS)
            except (RaypsError, TimeoutError, OSError, RuntimeError) as error:
                log.info("the child process did not disconnect from the cluster and is killed: %s", error)
        self._fail("the service has closed the connection", log_exit=False)

    def request(self, operation: str, *args: Any, **named: Any) -> Answer:
        """Send a request to the child; return a future, which fails with ClusterError if the child ends."""
        reply: Answer = Future()
        data = pickle.dumps((number := next(self._numbers), operation, args, named))
        with self._lock:
            failure = self._failure
            if failure is None:
                self._waiting[number] = reply
        if failure is not None:
            reply.set_exception(ClusterError(f"Ray cannot be called: {failure}"))
            return reply
        try:
            with self._sending:
                self._pipe.send_bytes(data)
        except OSError as error:  # the child has ended, or has not read for `answer_seconds`
            self._fail(f"the process that calls Ray takes no requests: {error}")
        return reply

    def _do(self, operation: str, *args: Any, **named: Any) -> Any:
        return self._await(self.request(operation, *args, **named), operation, self._answer_seconds)

    def _await(self, reply: Answer, what: str, seconds: float) -> Any:
        deadline = time.monotonic() + seconds
        while True:
            try:
                return reply.result(timeout=_POLL_SECONDS)
            except TimeoutError as error:
                if reply.done():
                    if isinstance(reply.exception(), TimeoutError):
                        raise ClusterError(f"Ray did not complete the request {what!r}: {error}") from error
                    continue  # the answer has just arrived
                why = self._give_up_reason()
                if why is None and time.monotonic() > deadline:
                    why = f"Ray did not answer the request {what!r} within {seconds:g} s"
                if why is not None:
                    self._fail(why)
                    raise ClusterError(why) from None

    def _read(self) -> None:
        try:
            while True:
                number, value, error = pickle.loads(self._pipe.recv_bytes())
                with self._lock:
                    reply = self._waiting.pop(number, None)
                if reply is not None:
                    reply.set_exception(error) if error is not None else reply.set_result(value)
        except (EOFError, OSError):
            self._fail("the process that calls Ray has ended")
        except Exception as error:  # e.g. an object of a class that this process cannot import
            self._fail(f"an answer cannot be read: {error}")

    def _fail(self, why: str, *, log_exit: bool = True) -> None:
        """Kill the child and let all pending requests fail with `why`."""
        with self._lock:
            first, self._failure = self._failure is None, self._failure or why
            waiting, self._waiting = self._waiting, {}
        if first:
            self._child.kill()
            code = self._child.wait()
            if code == _REFUSED:  # the child runs another version of rayps
                why = f"{why}: {self._read_last_output().rpartition(': error: ')[2]}"
            if log_exit and code not in (0, 1):
                log.warning("the process that calls Ray ended with code %d (%s)%s", code, why, self._read_last_output())
        for reply in waiting.values():
            reply.set_exception(ClusterError(f"Ray did not answer: {why}"))

    def _read_last_output(self) -> str:
        self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, self._output.tell() - _TAIL))
        text = self._output.read().decode(errors="replace").strip()
        return f"; its last output:\n{text}" if text else ""


def _make_environment(more: Mapping[str, str]) -> dict[str, str]:
    found = {**os.environ, **more, "PYTHONPATH": make_python_path()}
    if "RAY_AUTH_TOKEN_PATH" in more:
        found.pop("RAY_AUTH_TOKEN", None)  # another Ray's token; Ray would use it instead of the token file
    return found


def make_python_path() -> str:
    """Return a PYTHONPATH with which a child of the service imports this rayps, also if it is not installed."""
    home = str(Path(rayps.__file__).resolve().parent.parent)
    rest = os.environ.get("PYTHONPATH")
    return home if not rest else f"{home}{os.pathsep}{rest}"

"""The cluster as the service sees it: through a child process, under a deadline, and killed when it misses one.

`ClusterProcess` starts `rayps.service.ray_child` and asks it through a pipe. An operation that Ray does not answer in
time ends the child, and with it all that was asked of it: each request fails with ClusterError, and the next look
starts another child. Actors are detached and known by name, so that nothing of theirs depends on the child.
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
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import rayps
from rayps.cluster.local import PROTOCOL, ActorHandle, Bundle, Reservation
from rayps.core.errors import ClusterError, RaypsError

log = logging.getLogger(__name__)

RAY = "rayps.cluster.ray_cluster:RayCluster"
JOIN_SECONDS = 120.0  # to import ray and join, on a slow machine
ANSWER_SECONDS = 30.0  # for an operation that takes Ray milliseconds
_POLL_SECONDS = 0.25
_GOODBYE_SECONDS = 5.0
_REFUSED = 2  # exit code
_TAIL = 2000  # bytes of the child's last words


class NamedActor:
    """An actor that is known by its name."""

    def __init__(self, name: str, process: ClusterProcess) -> None:
        self.name = name
        self._process = process

    def call(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a method; at most once, never retried."""
        return self._process.request("call", self.name, method, *args, **kwargs)


class ClusterProcess:
    """A child process that has joined the cluster at `address`.

    `hopeless` is asked several times a second while an answer is awaited, and gives why it will not come, or None.

    Raises:
        ClusterError: the cluster cannot be joined, or not within `join_seconds`.
    """

    def __init__(
        self,
        address: str,
        env: Mapping[str, str] | None = None,
        *,
        cluster: str = RAY,
        hopeless: Callable[[], str | None] = lambda: None,
        join_seconds: float = JOIN_SECONDS,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        self.totals = 0  # how often Ray has told its resources, the last thing that a look asks: grows while it is well
        self._hopeless = hopeless
        self._answer_seconds = answer_seconds
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._fault: str | None = None
        self._words = tempfile.TemporaryFile()  # noqa: SIM115  of the child; as long as this object
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", max(1, round(answer_seconds)), 0))
        with theirs:
            self._child = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "rayps.service.ray_child",
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
                stdout=self._words,
                stderr=self._words,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=_environment(env or {}),
            )
        self._pipe = Connection(ours.detach())
        joined: Future[Any] = Future()
        self._waiting[0] = joined
        threading.Thread(target=self._read, name="rayps-ray", daemon=True).start()
        try:
            self._await(joined, "be joined", join_seconds)
        except BaseException:
            self._fail("it was not joined")
            raise

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._child.pid

    @property
    def alive(self) -> bool:
        """Whether the child may still answer."""
        return self._fault is None

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
        **kwargs: Any,
    ) -> NamedActor:
        """See Cluster; the actor needs a name, is detached, and in no gang."""
        assert name is not None and detached and gang is None, "it must outlive the child"
        self._do(
            "spawn",
            target,
            *args,
            name=name,
            cpus=cpus,
            gpus=gpus,
            detached=True,
            here=here,
            restarts=restarts,
            **kwargs,
        )
        return NamedActor(name, self)

    def find(self, name: str) -> NamedActor | None:
        """See Cluster."""
        return NamedActor(name, self) if self._do("find", name) else None

    def free(self) -> Bundle:
        """See Cluster."""
        found: Bundle = self._do("free")
        return found

    def total(self) -> Bundle:
        """See Cluster."""
        found: Bundle = self._do("total")
        self.totals += 1
        return found

    def hosts(self, free: bool = True) -> dict[str, Bundle]:
        """See Cluster."""
        found: dict[str, Bundle] = self._do("hosts", free)
        return found

    def kill(self, handle: ActorHandle) -> None:
        """See Cluster."""
        self._do("kill", handle.name)

    def close(self, *, goodbye: bool = True) -> None:
        """End the child; with `goodbye` it leaves the cluster first, which may have no end where Ray is gone."""
        if goodbye and self.alive:
            try:
                self.request("close").result(timeout=_GOODBYE_SECONDS)
            except (RaypsError, TimeoutError, OSError, RuntimeError) as error:
                log.info("Ray did not take the goodbye: %s", error)
        self._fail("it was closed", tell=False)

    def request(self, operation: str, *args: Any, **named: Any) -> Future[Any]:
        """Ask the child; the answer fails with ClusterError once the child is gone."""
        reply: Future[Any] = Future()
        data = pickle.dumps((number := next(self._numbers), operation, args, named))
        with self._lock:
            fault = self._fault
            if fault is None:
                self._waiting[number] = reply
        if fault is not None:
            reply.set_exception(ClusterError(f"Ray cannot be asked: {fault}"))
            return reply
        try:
            with self._sending:
                self._pipe.send_bytes(data)
        except OSError as error:  # it has ended, or has read nothing for as long as an answer may take
            self._fail(f"the process that asks Ray takes no requests: {error}")
        return reply

    def _do(self, operation: str, *args: Any, **named: Any) -> Any:
        return self._await(self.request(operation, *args, **named), operation, self._answer_seconds)

    def _await(self, reply: Future[Any], what: str, seconds: float) -> Any:
        deadline = time.monotonic() + seconds
        while True:
            try:
                return reply.result(timeout=_POLL_SECONDS)
            except TimeoutError as error:
                if reply.done():
                    if isinstance(reply.exception(), TimeoutError):
                        raise ClusterError(f"Ray did not {what}: {error}") from error
                    continue  # it came just now
                why = self._hopeless()
                if why is None and time.monotonic() > deadline:
                    why = f"Ray did not {what} within {seconds:g} s"
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
            self._fail("the process that asks Ray has ended")
        except Exception as error:  # an answer of a class that is not here: nothing after it can be trusted
            self._fail(f"an answer cannot be read: {error}")

    def _fail(self, why: str, *, tell: bool = True) -> None:
        """End the child; whatever it was asked fails."""
        with self._lock:
            first, self._fault = self._fault is None, self._fault or why
            waiting, self._waiting = self._waiting, {}
        if first:
            self._child.kill()
            code = self._child.wait()
            if code == _REFUSED:  # its arguments are of another version of rayps
                why = f"{why}: {self._last_words().rpartition(': error: ')[2]}"
            if tell and code not in (0, 1):
                log.warning("the process that asks Ray ended with code %d (%s)%s", code, why, self._last_words())
        for reply in waiting.values():
            reply.set_exception(ClusterError(f"Ray did not answer: {why}"))

    def _last_words(self) -> str:
        self._words.seek(0, os.SEEK_END)
        self._words.seek(max(0, self._words.tell() - _TAIL))
        text = self._words.read().decode(errors="replace").strip()
        return f", and said last:\n{text}" if text else ""


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    found = {**os.environ, **more, "PYTHONPATH": python_path()}
    if "RAY_AUTH_TOKEN_PATH" in more:
        found.pop("RAY_AUTH_TOKEN", None)  # of another Ray: it would win over the file
    return found


def python_path() -> str:
    """PYTHONPATH for a child of the service: it finds this rayps, also in a source tree that is not installed."""
    home = str(Path(rayps.__file__).resolve().parent.parent)
    rest = os.environ.get("PYTHONPATH")
    return home if not rest else f"{home}{os.pathsep}{rest}"

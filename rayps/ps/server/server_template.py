"""The template of a group's servers on one host: a process that imports torch once, and forks a process per server.

A server that is forked shares the template's memory and is ready after some milliseconds, where a new process imports
torch for two seconds of a core. `rayps.ps.server.server_host` runs this module and sends it commands, one JSON object
a line:

    {"start": {"server": ..., "secret": ..., "manager": ..., "address": ..., "host": ..., "node": ...}}
    {"end": "server-3"}          kill a server
    {"manager": "ADDRESS"}       the manager has restarted at another address

It answers with {"started": "server-3", "pid": 17} and {"ended": "server-3", "pid": 17, "status": -9}; a server that got
SIGTERM says {"ending": "server-3", "pid": 17, "seconds": 10.0}. When the template's input ends, it kills all servers
and ends. It ignores SIGTERM, which a whole host may get, so that its servers have their grace. The template runs one
thread and never serves, so a fork copies no lock that another thread holds.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import sys
import threading
import traceback
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from rayps_client.machine.loading import without_collection

from rayps.cluster.termination import TermHandler, grace_seconds
from rayps.comm.link import Listener
from rayps.ps.server.server_actor import ALONE_SECONDS, LOOK_SECONDS, load_server, run_quietly

if TYPE_CHECKING:
    from rayps.ps.server.server import GroupServerLoop

log = logging.getLogger(__name__)

GENTLY = "--gently"


@dataclass(frozen=True, slots=True)
class ServerOrder:
    """What a new server needs to know. `address` is the host's, `secret` is in hexadecimal digits."""

    server: str
    secret: str
    manager: str
    address: str
    host: str
    node: str

    def to_json(self) -> dict[str, Any]:
        """Return the order as JSON-ready data."""
        return asdict(self)


class ServerTemplate:
    """The loop of the template: reads commands, forks servers, and reports which have ended."""

    def __init__(self, commands: int, replies: int, kind: type[GroupServerLoop]) -> None:
        """`commands` and `replies` are descriptors. `kind`: the class of a server's loop."""
        self._kind, self._commands, self._replies = kind, commands, replies
        self._children: dict[int, tuple[str, int]] = {}  # process id -> the server, the end of its pipe for addresses
        self._ended, self._waker = os.pipe()  # gets a byte when a child has ended
        self._partial = b""
        os.set_blocking(self._ended, False)
        os.set_blocking(self._waker, False)

    def run(self) -> None:
        """Carry out commands until the input ends; then kill all servers."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # an ignored signal would write no byte
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        self._reply({"ready": os.getpid()})
        while True:
            ready, _, _ = select.select([self._commands, self._ended], [], [])
            if self._ended in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._ended, 4096)
            self._reap()
            if self._commands in ready and not self._read():
                break
        for pid in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _read(self) -> bool:
        data = os.read(self._commands, 1 << 16)
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            command = json.loads(line)
            if "start" in command:
                self._start(ServerOrder(**command["start"]))
            elif "end" in command:
                self._end(command["end"])
            elif "manager" in command:
                for _, writer in self._children.values():
                    with contextlib.suppress(OSError):  # the server has ended
                        os.write(writer, command["manager"].encode() + b"\n")
        return bool(data)

    def _start(self, order: ServerOrder) -> None:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._become(order, reader, writer)
        os.close(reader)
        self._children[pid] = order.server, writer
        self._reply({"started": order.server, "pid": pid})

    def _become(self, order: ServerOrder, reader: int, writer: int) -> NoReturn:
        """Be the server, in its new process, until it ends."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            # a pipe of another server that stayed open here would hide the template's end from that server
            others = [end for _, end in self._children.values()]
            for descriptor in (self._commands, self._ended, self._waker, writer, *others):
                os.close(descriptor)
            body = {"ending": order.server, "pid": os.getpid()}
            TermHandler(lambda seconds: self._reply({**body, "seconds": seconds}), grace_seconds()).install()
            _serve(self._kind, order, reader)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def _end(self, server: str) -> None:
        for pid, (name, _) in self._children.items():
            if name == server:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        for pid, (server, writer) in list(self._children.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                del self._children[pid]
                os.close(writer)
                self._reply({"ended": server, "pid": pid, "status": os.waitstatus_to_exitcode(status)})

    def _reply(self, body: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # the host actor has ended: the input ends too
            os.write(self._replies, json.dumps(body).encode() + b"\n")


def _serve(kind: type[GroupServerLoop], order: ServerOrder, reader: int) -> NoReturn:
    """Serve until there is no manager for `ALONE_SECONDS`, the loop has failed, or the template has ended.

    `kind`: the class of the loop. `reader`: the pipe on which the manager's later addresses arrive; it is closed when
    the template ends.
    """
    manager, secret = order.manager, bytes.fromhex(order.secret)
    listener = Listener(order.server, secret, host=order.address)
    loop = kind(order.server, listener, lambda: manager, secret, host=order.host, node=order.node)
    while loop.alive and loop.alone < ALONE_SECONDS:
        if select.select([reader], [], [], LOOK_SECONDS)[0]:
            lines = os.read(reader, 1 << 16).decode().split()
            if not lines:
                break
            manager = lines[-1]
    os._exit(0)


def main() -> None:
    """Import what a server needs, then run the template. With `--gently` the imports have the lowest priority."""
    commands, replies = os.dup(0), os.dup(1)
    os.dup2(2, 1)  # what a server or a user's module prints must not mix with the replies
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    with without_collection(freeze=True):
        if GENTLY in sys.argv:
            run_quietly(load_server)
        kind = load_server()
    if threading.active_count() > 1:
        log.warning("the template of servers has more than one thread: %s", threading.enumerate())
    ServerTemplate(commands, replies, kind).run()


if __name__ == "__main__":
    main()

"""Several hosts on one machine: network namespaces on one switch, each with a line of a stated rate; actors in them.

Nothing here has a name. Each namespace is held by one small process that ends when this one does, and goes with it,
so that nothing is left whatever happens. Making namespaces needs root, or `unshare --user --map-root-user`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from rayps.cluster.local import resolve
from rayps.core.errors import ActorDied, ClusterError, ConfigError, RaypsError

_TOOLS = ("unshare", "nsenter", "ip", "tc")
_DIE_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_START_SECONDS = 5.0


def bits(rate: str) -> float:
    """Bits per second of a rate such as "100mbit". Raises ConfigError."""
    number, unit = rate[:-4], rate[-4:].lower()
    try:
        return float(number) * _UNITS[unit]
    except (KeyError, ValueError):
        raise ConfigError(f"rate {rate!r} cannot be read: write 100mbit or 1gbit", rate=rate) from None


class Hosts:
    """`count` hosts whose lines carry `rate` each way, some of them the rate in `slow`.

    Use as a context: what was started on them ends with it. Raises ConfigError, ClusterError.
    """

    def __init__(self, count: int, rate: str, *, slow: dict[int, str] | None = None) -> None:
        missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
        if missing:
            raise ClusterError(f"hosts need {', '.join(missing)}: install iproute2 and util-linux")
        if os.geteuid() != 0:
            raise ClusterError(
                "hosts are network namespaces and need root: try again as root, or put "
                "`unshare --user --map-root-user` before the command"
            )
        self.addresses = [f"10.77.{host // 200}.{host % 200 + 11}" for host in range(count)]
        self._holders: list[subprocess.Popen[bytes]] = []
        self._actors: list[NamespaceActor] = []
        try:
            switch = self._hold()
            _run(switch, "ip", "link add switch type bridge\nlink set switch up")
            for host, address in enumerate(self.addresses):
                self._plug(switch, host, address, (slow or {}).get(host, rate))
        except BaseException:
            self.close()
            raise

    def _hold(self) -> int:
        """A new network namespace: the process that keeps it, until its input ends."""
        holder = subprocess.Popen(
            ["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        self._holders.append(holder)
        ours, theirs = Path("/proc/self/ns/net"), Path(f"/proc/{holder.pid}/ns/net")
        deadline = time.monotonic() + _START_SECONDS
        while holder.poll() is None and theirs.readlink() == ours.readlink() and time.monotonic() < deadline:
            time.sleep(0.005)
        if holder.poll() is not None or theirs.readlink() == ours.readlink():
            words = holder.stderr.read().decode().strip() if holder.poll() is not None and holder.stderr else "silence"
            raise ClusterError(f"no network namespace can be made here ({words}): run as root where that is allowed")
        return holder.pid

    def _plug(self, switch: int, host: int, address: str, rate: str) -> None:
        pid = self._hold()
        port = f"port{host}"
        _run(switch, "ip", f"link add {port} type veth peer name eth0 netns {pid}\nlink set {port} master switch up")
        _run(pid, "ip", f"addr add {address}/16 dev eth0\nlink set eth0 up\nlink set lo up")
        self.shape(host, rate)

    def shape(self, host: int, rate: str) -> None:
        """Give a host's line another rate."""
        burst = max(16_000, int(bits(rate) / 8 * 0.002))
        for namespace, device in ((self._holders[0].pid, f"port{host}"), (self._holders[1 + host].pid, "eth0")):
            _run(namespace, "tc", f"qdisc replace dev {device} root tbf rate {rate} burst {burst} latency 50ms")

    def sent(self, host: int) -> int:
        """Bytes that have left the host by its line, as the kernel counts them."""
        for line in Path(f"/proc/{self._holders[1 + host].pid}/net/dev").read_text().splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == "eth0":
                return int(numbers.split()[8])
        raise ClusterError(f"host {host} has no line any more", host=host)

    def spawn(self, host: int, target: str, *args: Any) -> NamespaceActor:
        """Start an actor, an instance of the class `module:Class`, as a process on that host."""
        actor = NamespaceActor(self._holders[1 + host].pid, target, args)
        self._actors.append(actor)
        return actor

    def close(self) -> None:
        """End every actor and every host. Safe to call twice."""
        for actor in self._actors:
            actor.kill()
        for holder in self._holders:
            holder.kill()
            holder.wait()
            for pipe in (holder.stdin, holder.stderr):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
        self._actors, self._holders = [], []

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _run(namespace: int, tool: str, commands: str) -> None:
    """Commands of `ip` or `tc`, one a line, within the namespace of that process."""
    command = ["nsenter", "--target", str(namespace), "--net", tool, "-batch", "-"]
    done = subprocess.run(command, input=commands.encode(), capture_output=True, check=False)
    if done.returncode:
        words = done.stderr.decode().strip().splitlines()
        raise ClusterError(f"`{tool} {commands.splitlines()[-1]}` failed: {words[0] if words else 'no reason given'}")


class NamespaceActor:
    """A process on a host that holds one object; its calls run one after the other."""

    def __init__(self, namespace: int, target: str, args: tuple[Any, ...]) -> None:
        self.name = target
        ours, theirs = Pipe()
        code = f"from rayps.bench.netns import serve; serve({theirs.fileno()}, {os.getpid()})"
        self._process = subprocess.Popen(
            ["nsenter", "--target", str(namespace), "--net", sys.executable, "-c", code], pass_fds=[theirs.fileno()]
        )
        theirs.close()
        self._pipe = ours
        self.started = self.call(target, *args)

    def call(self, method: str, *args: Any) -> HostReply:
        """Call a method; answers come in the order of calls."""
        try:
            self._pipe.send((method, args))
        except OSError as error:
            raise ActorDied(f"{self.name} has ended before {method}") from error
        return HostReply(self._pipe, f"{self.name}.{method}")

    def kill(self) -> None:
        """End the process now."""
        self._process.kill()
        self._process.wait()
        self._pipe.close()


class HostReply:
    """What a call will answer."""

    def __init__(self, pipe: Connection, what: str) -> None:
        self._pipe, self._what = pipe, what

    def result(self, timeout: float) -> Any:
        """The answer. Raises ClusterError, or what the method raised."""
        try:
            if not self._pipe.poll(timeout):
                raise ClusterError(f"{self._what} did not answer within {timeout:g} s", seconds=timeout)
            good, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise ActorDied(f"{self._what}: the process ended without an answer") from error
        if not good:
            raise value
        return value


def serve(descriptor: int, parent: int) -> None:
    """The life of a host's process: make the object, answer calls until the caller is gone."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)  # also in the middle of a call
    if os.getppid() != parent:
        return
    pipe = Connection(descriptor)
    held: Any = None
    with contextlib.suppress(EOFError):
        while True:
            method, args = pipe.recv()
            try:
                value = resolve(method)(*args) if held is None else getattr(held, method)(*args)
            except RaypsError as error:
                pipe.send((False, error))
            except Exception as error:  # the caller gets it in words: not every error travels
                pipe.send((False, ClusterError(f"{method} failed: {type(error).__name__}: {error}")))
            else:
                if held is None:
                    held, value = value, None
                pipe.send((True, value))

"""Simulate several hosts on one machine: network namespaces on one switch, each with a link of a given rate.

After an exit of any kind, nothing remains: the namespaces have no names, and each exists only as long as a small child
process, which ends with this process. To make namespaces needs root, or `unshare --user --map-root-user`.
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

from rayps_client.errors import ActorDied, ClusterError, ConfigError, RaypsError

from rayps.cluster.local import resolve

_TOOLS = ("unshare", "nsenter", "ip", "tc")
_DIE_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_START_SECONDS = 5.0


def bits(rate: str) -> float:
    """Return the bits per second of a rate such as "100mbit". Raises ConfigError if the text is not a rate."""
    number, unit = rate[:-4], rate[-4:].lower()
    try:
        return float(number) * _UNITS[unit]
    except (KeyError, ValueError):
        raise ConfigError(f"rate {rate!r} cannot be read: write 100mbit or 1gbit", rate=rate) from None


class Hosts:
    """`count` hosts whose links have `rate` in each direction; `slow` maps a host's number to another rate.

    Use this class as a context manager: actors and namespaces end with the block.

    Raises:
        ConfigError: a rate cannot be read.
        ClusterError: this machine cannot make network namespaces.
    """

    def __init__(self, count: int, rate: str, *, slow: dict[int, str] | None = None) -> None:
        missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
        if missing:
            raise ClusterError(f"hosts need {', '.join(missing)}: install iproute2 and util-linux")
        if os.geteuid() != 0:
            raise ClusterError(
                "hosts are network namespaces and need root: run the command as root, or put "
                "`unshare --user --map-root-user` before it"
            )
        self.addresses = [f"10.77.{host // 200}.{host % 200 + 11}" for host in range(count)]
        self._namespaces: list[subprocess.Popen[bytes]] = []
        self._actors: list[NamespaceActor] = []
        try:
            switch = self._make_namespace()
            _run(switch, "ip", "link add switch type bridge\nlink set switch up")
            for host, address in enumerate(self.addresses):
                self._attach_host(switch, host, address, (slow or {}).get(host, rate))
        except BaseException:
            self.close()
            raise

    def _make_namespace(self) -> int:
        """Make a network namespace; return the id of a process in it, which ends when its standard input closes."""
        process = subprocess.Popen(
            ["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        self._namespaces.append(process)
        ours, theirs = Path("/proc/self/ns/net"), Path(f"/proc/{process.pid}/ns/net")
        deadline = time.monotonic() + _START_SECONDS
        while process.poll() is None and theirs.readlink() == ours.readlink() and time.monotonic() < deadline:
            time.sleep(0.005)
        if process.poll() is not None or theirs.readlink() == ours.readlink():
            words = (
                process.stderr.read().decode().strip() if process.poll() is not None and process.stderr else "timeout"
            )
            raise ClusterError(f"this machine cannot make network namespaces ({words}): run as root on one that can")
        return process.pid

    def _attach_host(self, switch: int, host: int, address: str, rate: str) -> None:
        pid = self._make_namespace()
        port = f"port{host}"
        _run(switch, "ip", f"link add {port} type veth peer name eth0 netns {pid}\nlink set {port} master switch up")
        _run(pid, "ip", f"addr add {address}/16 dev eth0\nlink set eth0 up\nlink set lo up")
        self.shape(host, rate)

    def shape(self, host: int, rate: str) -> None:
        """Change the rate of a host's link."""
        burst = max(16_000, int(bits(rate) / 8 * 0.002))
        for namespace, device in ((self._namespaces[0].pid, f"port{host}"), (self._namespaces[1 + host].pid, "eth0")):
            _run(namespace, "tc", f"qdisc replace dev {device} root tbf rate {rate} burst {burst} latency 50ms")

    def cut(self, host: int) -> None:
        """Cut a host's link: packets in both directions are lost without a sign, until `join`."""
        _run(self._namespaces[0].pid, "ip", f"link set port{host} down")

    def join(self, host: int) -> None:
        """Join the link of a host that was cut."""
        _run(self._namespaces[0].pid, "ip", f"link set port{host} up")

    def enter(self, host: int) -> list[str]:
        """Return the beginning of a command line whose rest runs on a host."""
        return ["nsenter", "--target", str(self._namespaces[1 + host].pid), "--net"]

    def sent(self, host: int) -> int:
        """Return the bytes that the host has sent on its link so far, by the kernel's counter."""
        for line in Path(f"/proc/{self._namespaces[1 + host].pid}/net/dev").read_text().splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == "eth0":
                return int(numbers.split()[8])
        raise ClusterError(f"host {host} has no network device eth0 any more: its link is gone", host=host)

    def spawn(self, host: int, target: str, *args: Any) -> NamespaceActor:
        """Start an actor, an instance of `module:Class`, as a process on that host."""
        actor = NamespaceActor(self._namespaces[1 + host].pid, target, args)
        self._actors.append(actor)
        return actor

    def close(self) -> None:
        """Kill every actor and remove every host. A second call does nothing."""
        for actor in self._actors:
            actor.kill()
        for process in self._namespaces:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stderr):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
        self._actors, self._namespaces = [], []

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _run(namespace: int, tool: str, commands: str) -> None:
    """Run commands of `ip` or `tc`, one per line, in the network namespace of the process `namespace`."""
    command = ["nsenter", "--target", str(namespace), "--net", tool, "-batch", "-"]
    done = subprocess.run(command, input=commands.encode(), capture_output=True, check=False)
    if done.returncode:
        words = done.stderr.decode().strip().splitlines()
        raise ClusterError(f"`{tool} {commands.splitlines()[-1]}` failed: {words[0] if words else 'no reason given'}")


class NamespaceActor:
    """An actor in a process on one of the `Hosts`. Its calls run one after the other."""

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

    @property
    def pid(self) -> int:
        """The id of the process, which `nsenter` has become."""
        return self._process.pid

    def call(self, method: str, *args: Any) -> HostReply:
        """Call a method; return its reply. Replies arrive in the order of calls."""
        try:
            self._pipe.send((method, args))
        except OSError as error:
            raise ActorDied(f"{self.name} has ended before {method}") from error
        return HostReply(self._pipe, f"{self.name}.{method}")

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()
        self._pipe.close()


class HostReply:
    """The reply to a call of a `NamespaceActor`. It arrives later."""

    def __init__(self, pipe: Connection, what: str) -> None:
        self._pipe, self._what = pipe, what

    def result(self, timeout: float) -> Any:
        """Wait for the reply, and return the method's result.

        Raises:
            ClusterError: there was no reply within `timeout` seconds, or the method failed.
            ActorDied: the process has ended.
            RaypsError: the method raised this error.
        """
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
    """Run a `NamespaceActor` in this process: make the object, and answer calls until the caller closes the pipe."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)  # ends this process also during a call
    if os.getppid() != parent:
        return
    pipe = Connection(descriptor)
    instance: Any = None
    with contextlib.suppress(EOFError):
        while True:
            method, args = pipe.recv()
            try:
                value = resolve(method)(*args) if instance is None else getattr(instance, method)(*args)
            except RaypsError as error:
                pipe.send((False, error))
            except Exception as error:  # sent as text: not every error can be pickled
                pipe.send((False, ClusterError(f"{method} failed: {type(error).__name__}: {error}")))
            else:
                if instance is None:
                    instance, value = value, None
                pipe.send((True, value))

"""A real S3 server process (moto's) behind a TCP proxy that cuts or stalls connections, for the tests of places."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import s3fs

from rayps.tensors.checkpoints.checkpoint_place import CheckpointPlace, unfinished

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_MAX_ATTEMPTS": "2",  # of botocore, below those of s3fs: a place that is lost is reported within seconds
    "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
}


# The server takes a free port and states it: a port chosen here could be another process's before the server has it.
SERVER = """
import threading
from moto.server import ThreadedMotoServer

server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
threading.Event().wait()
"""


@dataclass
class Proxy:
    """Forwards TCP connections to a port of this host, and misbehaves as its fields state.

    `cut_up`, `cut_down`: close a connection after it has carried so many bytes to the server, or from it. `times`: for
    how many connections. `stall_up`: forward nothing more after so many bytes to the server.
    """

    target: int
    cut_up: int | None = None
    cut_down: int | None = None
    stall_up: int | None = None
    times: int = 10**9
    cuts: int = 0
    sent: int = 0  # bytes to the server since the last `pass_on`
    reached: threading.Event = field(default_factory=threading.Event)  # the first cut or stall has happened

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        self._closing = False
        threading.Thread(target=self._accept, daemon=True).start()

    def pass_on(self) -> None:
        """Forward everything from now on."""
        self.cut_up = self.cut_down = self.stall_up = None
        self.times, self.cuts, self.sent = 10**9, 0, 0
        self.reached.clear()

    def close(self) -> None:
        self._closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in self._open:
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(("127.0.0.1", self.target))
        except OSError:
            client.close()
            return
        self._open += [client, server]
        up = down = 0
        try:
            while not self._closing:
                readable, _, _ = select.select([client, server], [], [], 0.2)
                for source in readable:
                    data = source.recv(1 << 16)
                    if not data:
                        return
                    if source is client:
                        up += len(data)
                        self.sent += len(data)
                        if self._exceeded(up, self.cut_up):
                            return
                        if self.stall_up is not None and up > self.stall_up:
                            self.reached.set()
                            while self.stall_up is not None and not self._closing:
                                time.sleep(0.05)
                        server.sendall(data)
                    else:
                        down += len(data)
                        if self._exceeded(down, self.cut_down):
                            return
                        client.sendall(data)
        except (OSError, ValueError):
            return
        finally:
            client.close()
            server.close()

    def _exceeded(self, count: int, limit: int | None) -> bool:
        if limit is None or count <= limit:
            return False
        with self._lock:
            if self.cuts >= self.times:
                return False
            self.cuts += 1
        self.reached.set()
        return True


@dataclass
class S3Site:
    """A server process with its proxy, and the environment with which a process reaches it."""

    process: subprocess.Popen[bytes]
    proxy: Proxy

    @property
    def env(self) -> dict[str, str]:
        return CREDENTIALS | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.proxy.port}"}


@contextlib.contextmanager
def empty_bucket(server: S3Site, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Site]:
    """The server with an empty bucket, its proxy without faults, and the environment of this process."""
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    assert server.process.poll() is None, f"moto's server has ended with exit code {server.process.returncode}"
    server.proxy.pass_on()
    s3fs.S3FileSystem.clear_instance_cache()  # an instance keeps the endpoint and the credentials of its creation
    files = s3fs.S3FileSystem(config_kwargs={"retries": {"total_max_attempts": 10}})  # more than the tests' own
    if files.exists("bucket"):
        for upload in unfinished(CheckpointPlace.of("s3://bucket/run")):
            files.abort_mpu("bucket", upload.url.removeprefix("s3://bucket/"), upload.id)
        files.rm("bucket", recursive=True)
    files.mkdir("bucket")
    try:
        yield server
    finally:
        server.proxy.pass_on()
        s3fs.S3FileSystem.clear_instance_cache()


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Wait until `condition` is true; the deadline only ends a hang."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@contextlib.contextmanager
def s3_site() -> Iterator[S3Site]:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=os.environ | CREDENTIALS
    )
    proxy: Proxy | None = None
    try:
        assert process.stdout is not None
        readable, _, _ = select.select([process.stdout], [], [], 120)
        assert readable, "moto's server does not listen after 120 s"
        port = process.stdout.readline()
        assert port, f"moto's server has ended with exit code {process.wait(30)} before it listened"
        proxy = Proxy(int(port))
        yield S3Site(process, proxy)
    finally:
        if proxy is not None:
            proxy.close()
        process.terminate()
        process.wait(30)
        if process.stdout is not None:
            process.stdout.close()

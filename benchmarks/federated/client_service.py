"""The service of `python -m benchmarks client`: the routes of real clients with one order, and no job behind them."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayps_client.exchange.raw_tensors import RawTensor
from rayps_client.exchange.signed_orders import Key, order_text
from rayps_client.exchange.update_codec import encode_start
from rayps_client.trainers.local_trainer import RoundStart

from rayps.service.processes import die_with_parent

JOB = "0" * 26


@dataclass(slots=True)
class Moments:
    """When the client of one run was seen, by `time.monotonic`."""

    joined: float | None = None
    order: float | None = None
    update: float | None = None


class StandIn(http.server.ThreadingHTTPServer):
    """The service of one run: it gives each client that joins one order, and then the job's end."""

    daemon_threads = True

    def __init__(self, key: Key, width: int) -> None:
        super().__init__(("127.0.0.1", 0), _Routes)
        self.key, self.moments = key, Moments()
        layout = [("weight", [1, width], "float32"), ("bias", [1], "float32")]
        self.start = encode_start(RoundStart(RawTensor("float32", (width + 1,), bytes(4 * (width + 1)))), layout)
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def handle_error(self, request: object, client_address: object) -> None:
        """Write nothing: a client is killed as soon as its update has arrived."""

    @property
    def url(self) -> str:
        """The address of the service."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def order(self) -> str:
        """Return the text of the only order."""
        return order_text(
            {
                "kind": "round",
                "job": JOB,
                "client": 0,
                "name": "one",
                "round": 0,
                "phase": 0,
                "seed": 1,
                "serial": 1,
                "seconds": 100.0,
                "since": 0,
                "starts": [[0, 1]],
                "strategy": {"name": "fedavg", "clients": "remote"},
                "parameters": {"sha256": hashlib.sha256(self.start).hexdigest(), "bytes": len(self.start)},
            }
        )


class _Routes(http.server.BaseHTTPRequestHandler):
    """The routes of real clients, as `rayps_api.routes.routes_clients` has them."""

    protocol_version = "HTTP/1.1"
    server: StandIn

    def do_GET(self) -> None:
        """Answer the key, work, or the parameters."""
        moments, path = self.server.moments, self.path.partition("?")[0]
        if path.endswith("/key"):
            self._send_json({"public_key": self.server.key.public})
        elif path.endswith("/parameters"):
            self._send(self.server.start)
            moments.order = time.monotonic()
        elif moments.update is not None:
            self._send_json({"kind": "end", "status": "SUCCEEDED", "reason": "measured"})
        else:
            text = self.server.order()
            self._send_json({"kind": "round", "order": text, "signature": self.server.key.sign(text)})

    def do_POST(self) -> None:
        """Let a client join or leave."""
        self.rfile.read(int(self.headers["Content-Length"] or 0))
        if self.path.endswith("/join"):
            self.server.moments.joined = time.monotonic()
            self._send_json({"number": 0, "public_key": self.server.key.public, "name": "one", "job": JOB})
        else:
            self._send(b"", 204)

    def do_PUT(self) -> None:
        """Receive the update."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.moments.update = time.monotonic()
        self._send_json({"serial": 1, "again": False}, 201)

    def _send_json(self, value: dict[str, Any], status: int = 200) -> None:
        self._send(json.dumps(value).encode(), status)

    def _send(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Write nothing."""


@contextlib.contextmanager
def start(command: Sequence[str], folder: Path, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process in a session of its own, with its output in the file `log`; end the session afterwards."""
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)

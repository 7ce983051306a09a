"""Flower's SuperNode and its client app as a contender of `python -m benchmarks client`."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rayps_client.errors import ClusterError

from benchmarks.federated.client_service import Moments, start

READY_SECONDS = 60.0
_CLIENT = """
import json, os, sys, time
from pathlib import Path
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()
OUT = Path({out!r})

@app.train()
def train(message, context):
    began = time.monotonic()
    arrays = message.content["arrays"]
{train}
    metrics = MetricRecord({{"num-examples": {rows}, "train_loss": loss}})
    OUT.with_suffix(".order").write_text(str(began))
    return Message(content=RecordDict({{"arrays": arrays, "metrics": metrics}}), reply_to=message)
"""
_NUMPY = """
    import numpy as np
    weight, bias = arrays.to_numpy_ndarrays()
    x = np.random.default_rng(0).normal(size=({rows}, {width})).astype(np.float32)
    y, loss = x.sum(axis=1, keepdims=True), 0.0
    for at in range(0, {rows}, 16):
        error = x[at : at + 16] @ weight.T + bias - y[at : at + 16]
        slope, loss = 2 * error / error.size, float((error**2).mean())
        weight, bias = weight - 0.01 * slope.T @ x[at : at + 16], bias - 0.01 * slope.sum(axis=0)
    arrays = ArrayRecord([weight, bias])
"""
_TORCH = """
    import numpy as np, torch
    net = torch.nn.Linear({width}, 1)
    weight, bias = arrays.to_numpy_ndarrays()
    net.load_state_dict({{"weight": torch.from_numpy(weight.copy()), "bias": torch.from_numpy(bias.copy())}})
    x = torch.from_numpy(np.random.default_rng(0).normal(size=({rows}, {width})).astype(np.float32))
    y, optimizer = x.sum(dim=1, keepdim=True), torch.optim.SGD(net.parameters(), lr=0.01)
    for at in range(0, {rows}, 16):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(net(x[at : at + 16]), y[at : at + 16])
        loss.backward()
        optimizer.step()
    loss = float(loss.detach())
    arrays = ArrayRecord([net.weight.detach().numpy(), net.bias.detach().numpy()])
"""
_SERVER = """
import time
from pathlib import Path
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()
OUT = Path({out!r})

@app.main()
def main(grid, context):
    OUT.with_suffix(".ready").write_text("")
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(0.02)
    OUT.with_suffix(".joined").write_text(str(time.monotonic()))
    arrays = ArrayRecord([np.zeros((1, {width}), dtype=np.float32), np.zeros(1, dtype=np.float32)])
    content = RecordDict({{"arrays": arrays, "config": ConfigRecord({{}})}})
    message = Message(content=content, dst_node_id=nodes[0], message_type="train")
    list(grid.send_and_receive([message]))
    OUT.with_suffix(".update").write_text(str(time.monotonic()))
"""
_PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "bench"
version = "1.0.0"
description = "a benchmark"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "rayps"

[tool.flwr.app.components]
serverapp = "bench.server:app"
clientapp = "bench.client:app"

[tool.flwr.app.config]
"""


@contextlib.contextmanager
def run_flower(
    python: Path, folder: Path, library: str, width: int, rows: int
) -> Iterator[tuple[float, Callable[[], Moments], Callable[[], Sequence[int]]]]:
    """Start Flower's server side, then a SuperNode; yield the SuperNode's start, its moments, and its processes.

    The server app waits before the SuperNode starts: what is measured is the client's side.

    Raises:
        ClusterError: the server side did not start.
    """
    out = folder / "moments"
    _write_app(folder / "app", out, library, width, rows)
    port = _find_free_port()
    home = {"FLWR_HOME": str(folder / "home"), "HOME": str(folder), "FLWR_TELEMETRY_ENABLED": "0"}
    home["PATH"] = f"{python.parent}:{os.environ['PATH']}"  # Flower starts its other programs by their names
    _write_connection(folder / "home", port)
    link = [str(python.with_name("flower-superlink")), "--insecure", "--host", "127.0.0.1", "--port", str(port)]
    node = [str(python.with_name("flower-supernode")), "--insecure", "--superlink", f"127.0.0.1:{port}"]
    node += ["--port", str(_find_free_port())]
    with start(link, folder, **home):
        _submit(python, folder, home, out.with_suffix(".ready"))
        began = time.monotonic()
        with start(node, folder, **home) as process:
            yield began, lambda: _read_moments(out), lambda: _list_session(process.pid)


def _write_app(folder: Path, out: Path, library: str, width: int, rows: int) -> None:
    (folder / "bench").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(_PROJECT)
    (folder / "bench" / "__init__.py").touch()
    train = (_NUMPY if library == "numpy" else _TORCH).format(width=width, rows=rows)
    (folder / "bench" / "client.py").write_text(_CLIENT.format(out=str(out), train=train, rows=rows))
    (folder / "bench" / "server.py").write_text(_SERVER.format(out=str(out), width=width))


def _write_connection(home: Path, port: int) -> None:
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "bench"\n\n[superlink.bench]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )


def _submit(python: Path, folder: Path, home: dict[str, str], ready: Path) -> None:
    """Submit the app until the server side accepts it, and wait until its server app runs."""
    deadline = time.monotonic() + READY_SECONDS
    said = ""
    while time.monotonic() < deadline:
        done = subprocess.run(
            [str(python.with_name("flwr")), "run", str(folder / "app"), "bench"],
            env=os.environ | home,
            capture_output=True,
            text=True,
            timeout=READY_SECONDS,
            check=False,
        )
        said = done.stdout + done.stderr
        if done.returncode == 0:
            break
        time.sleep(0.5)
    while not ready.exists():
        if time.monotonic() > deadline:
            log = (folder / "log").read_text(errors="replace")
            raise ClusterError(
                f"Flower's server side did not start:\n{said[-1500:]}\n{log[-1500:]}", contender="flower"
            )
        time.sleep(0.05)


def _read_moments(out: Path) -> Moments:
    found = {}
    for name in ("update", "joined", "order"):
        with contextlib.suppress(OSError, ValueError):
            found[name] = float(out.with_suffix(f".{name}").read_text())
    return Moments(**found) if len(found) == 3 else Moments()


def _list_session(leader: int) -> list[int]:
    """Return the processes of a session: the SuperNode, and the process of its client app."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                fields = (path / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == leader:
                    found.append(int(path.name))
    return found


def _find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])

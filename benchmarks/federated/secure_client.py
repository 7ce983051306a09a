"""A client process of `python -m benchmarks secure`: the light client with a workload of numpy, which may kill itself.

`python secure_client.py CONFIG` takes part in a job. CONFIG (JSON): url, token, job, name, folder, work, and `dies`, a
stage before whose message the process kills itself, or null. The folder stands for the client's own machine, and the
service never reads it. The process writes there `sent.npy`, its whole numbers before masks, and `cost.json`, the bytes
and the seconds of its messages.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
from rayps_client.client_options import ClientOptions
from rayps_client.exchange.connection import ServiceConnection
from rayps_client.exchange.signed_orders import ClientToken
from rayps_client.load_workload import trainer_of
from rayps_client.machine.client_folder import ClientFolder
from rayps_client.process import ClientProcess
from rayps_client.secure.protocol import Stage
from rayps_client.secure.quantise import Integers, Quantiser, Words


class Network(httpx2.BaseTransport):
    """The network of a client: counts the bytes of the stages, and kills the process before a stage's message."""

    def __init__(self, dies: str | None, folder: Path) -> None:
        self._through, self._dies, self._folder = httpx2.HTTPTransport(), dies, folder
        self._cost: dict[str, float] = {"sent": 0, "received": 0}
        self._began = (0.0, 0.0)

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request."""
        _, _, stage = request.url.path.partition("/stages/")
        if not stage:
            return self._through.handle_request(request)
        sends = request.method == "PUT"
        if sends and stage == self._dies:
            os.kill(os.getpid(), signal.SIGKILL)
        if sends and stage == Stage.ADVERTISE:
            self._began = (time.monotonic(), time.process_time())
        body = request.read()
        answer = self._through.handle_request(request)
        received = answer.read()
        self._cost["sent"] += len(body)
        self._cost["received"] += len(received)
        if sends and stage == Stage.UNMASK:
            seconds = {"seconds": time.monotonic() - self._began[0], "cpu": time.process_time() - self._began[1]}
            (self._folder / "cost.json").write_text(json.dumps(self._cost | seconds))
        return httpx2.Response(answer.status_code, headers=_drop_length(answer.headers), content=received)


def _drop_length(headers: httpx2.Headers) -> list[tuple[str, str]]:
    return [(name, value) for name, value in headers.items() if name.lower() != "content-length"]


def main() -> None:
    """Take part in the job until it ends."""
    config: dict[str, Any] = json.loads(sys.argv[1])
    folder, words = Path(config["folder"]), Quantiser.words

    def kept(quantiser: Quantiser, integers: Integers) -> Words:
        np.save(folder / "sent.npy", integers)
        return words(quantiser, integers)

    Quantiser.words = kept  # type: ignore[method-assign, assignment]
    token = ClientToken.read(config["token"])
    connection = ServiceConnection(
        config["url"], config["token"], 60.0, lambda text: None, Network(config["dies"], folder)
    )
    home = ClientFolder(folder / "state")
    ClientProcess(
        trainer_of(ClientOptions(config["work"])),
        token,
        config["job"],
        connection,
        home,
        name=config["name"],
        report=lambda text: print(text, file=sys.stderr, flush=True),  # noqa: T201  its log
    ).run()


if __name__ == "__main__":
    main()

"""A client process of `python -m benchmarks secure`: numpy, HTTP and `rayps_client`; neither torch nor rayps.

`python secure_client.py CONFIG` takes part in a job. CONFIG (JSON): url, token, job, name, folder, rows, and `dies`, a
stage in which the process kills itself, before it sends its message, or null. After each round the process writes to its
folder, which stands for its own machine: `sent-SERIAL.npy`, its whole numbers before masks, and `cost-SERIAL.json`, the
bytes and seconds of its messages. The service never reads that folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import safetensors.numpy
from rayps_client.errors import Conflict, TrainingError
from rayps_client.secure.protocol import Answer, Stage
from rayps_client.secure.quantise import ClientNumbers, Floats
from rayps_client.secure.release_record import ReleaseRecord
from rayps_client.secure.service_stages import ServiceStages
from rayps_client.secure.take_part import SecureClient, quantiser_of, take_part

CLASSES, FEATURES = 10, 784
_LR, _STEPS, _RETRIES = 0.1, 5, 200


class Connection:
    """A connection that retries while the service is busy."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.http = httpx2.Client(base_url=config["url"], timeout=120.0)
        self.http.headers["Authorization"] = f"Bearer {config['token']}"

    def call(self, method: str, path: str, **options: Any) -> httpx2.Response:
        """Send a request and return the answer. Raises Conflict if the service refuses it as too late."""
        for _ in range(_RETRIES):
            answer = self.http.request(method, path, **options)
            if answer.status_code == 409:
                raise Conflict(answer.text, code="late")
            if answer.status_code != 429 and answer.status_code < 500:
                return answer.raise_for_status()
            time.sleep(float(np.random.default_rng().uniform(0.05, 0.2)))
        raise TrainingError(f"the service was busy {_RETRIES} times")


class Stages(ServiceStages):
    """The stages of a round, in one of which this process may kill itself."""

    dies: Stage | None = None

    def put(self, stage: Stage, message: bytes) -> None:
        """Send a message, or end this process without a trace."""
        if stage is self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        super().put(stage, message)

    def get(self, stage: Stage) -> Answer:
        """Wait for an answer."""
        return super().get(stage)


def train(w: Floats, x: Floats, y: Any) -> tuple[Floats, float]:
    """Return the parameters after a few steps of SGD on the cross-entropy of 784-hidden-10, and the mean loss."""
    hidden = (len(w) - CLASSES) // (FEATURES + 1 + CLASSES)
    sizes = np.cumsum([FEATURES * hidden, hidden, CLASSES * hidden])
    w, losses = w.copy(), []
    for _ in range(_STEPS):
        a, b, c, d = np.split(w, sizes)
        inner = np.maximum(x @ a.reshape(hidden, FEATURES).T + b, 0)
        scores = inner @ c.reshape(CLASSES, hidden).T + d
        scores -= scores.max(axis=1, keepdims=True)
        chances = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
        losses.append(-np.log(chances[np.arange(len(y)), y]).mean())
        chances[np.arange(len(y)), y] -= 1
        error = chances / len(y)
        back = (error @ c.reshape(CLASSES, hidden)) * (inner > 0)
        gradient = [(back.T @ x).ravel(), back.sum(0), (error.T @ inner).ravel(), error.sum(0)]
        w -= _LR * np.concatenate(gradient)
    return w, float(np.mean(losses))


def main() -> None:
    """Take part in the job until it ends."""
    config = json.loads(sys.argv[1])
    folder, name = Path(config["folder"]), str(config["name"])
    folder.mkdir(parents=True, exist_ok=True)
    made = np.random.default_rng(int(hashlib.sha256(name.encode()).hexdigest()[:8], 16))
    x, y = made.random((config["rows"], FEATURES)), made.integers(0, CLASSES, config["rows"])
    connection, record = Connection(config), ReleaseRecord(folder)
    body = {"name": name, "key": name * 20, "job": config["job"]}
    number = int(connection.call("POST", "/api/v1/client/join", json=body).json()["number"])
    headers = {"Rayps-Client": f"{config['job']}:{number}:{name * 20}"}
    done = 0
    while True:
        work = connection.call("GET", "/api/v1/client/work", params={"after": done, "wait": 20}, headers=headers).json()
        if work["kind"] == "end":
            return
        if work["kind"] != "round":
            continue
        order = json.loads(work["order"])
        done = serial = int(order["serial"])
        try:
            raw = connection.call("GET", f"/api/v1/client/rounds/{serial}/parameters", headers=headers).content
            w_t = safetensors.numpy.load(raw)["w"].astype(np.float64)
            w, loss = train(w_t, x, y)
            numbers = ClientNumbers(w - w_t, len(x), loss, _STEPS * len(x))
            stages = Stages(connection, headers, (config["job"], number, serial), lambda text, _: json.loads(text))
            stages.dies = None if config["dies"] is None else Stage(config["dies"])
            np.save(folder / f"sent-{serial}.npy", quantiser_of(order["secure"]).integers(numbers))
            began, cpu = time.monotonic(), time.process_time()
            client = SecureClient(config["job"], number, name, record)
            take_part(client, serial, order["secure"], (numbers, f"{serial}"), stages)
        except (Conflict, TrainingError) as error:
            print(f"{name}: order {serial}: {error}", flush=True)
            continue
        cost = {"sent": stages.sent, "received": stages.received, "cpu": time.process_time() - cpu}
        (folder / f"cost-{serial}.json").write_text(json.dumps({**cost, "seconds": time.monotonic() - began}))


if __name__ == "__main__":
    main()

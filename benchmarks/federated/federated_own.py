"""rayps, and a plain loop on one core, as contenders of `python -m benchmarks federated`: a script.

`python -c "from benchmarks.federated.federated_own import main; main()" CONFIG OUT` runs the rounds of CONFIG (JSON).
For each round it writes to OUT the round's end (seconds by the wall clock), and the CPU time, memory and disk space of
the first worker.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import rayps
from benchmarks.federated.federated_flower import draw_rows, make_model, train_plain_client
from rayps.data import Batch, Data
from rayps.strategies.fedavg import FedAvg
from rayps.strategies.federated import Federated
from rayps.strategies.scaffold import Scaffold
from rayps.workload.base import Workload

NEVER = 1_000_000  # rounds between evaluations and checkpoints, so that there are none, as for the other contenders


class PeerImages(Workload):
    """A workload with the model and the clients' samples of the other contenders."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def model(self) -> nn.Module:
        """Return the model of the other contenders."""
        return make_model(self.config["hidden"])

    def data(self) -> Data:
        """Return the samples of all clients, client by client."""
        each = [draw_rows(client, self.config) for client in range(self.config["clients"])]
        owners = torch.arange(len(each)).repeat_interleave(self.config["rows"])
        return rayps.data.tensors(
            torch.cat([x for x, _ in each]),
            torch.cat([y for _, y in each]),
            client=owners.tolist(),
            batch_size=self.config["batch"],
        )

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the cross-entropy."""
        return functional.cross_entropy(model(batch.x), batch.y)

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        """Return plain SGD."""
        return torch.optim.SGD(params, lr=self.config["lr"])


def read_resident() -> int:
    """Return this process's resident memory in bytes."""
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if pages.exists() else 0


def on_disk() -> int:
    """Return the bytes of the clients' states in the files that this process has open."""
    size = 0
    for fd in Path("/proc/self/fd").glob("*"):
        try:
            if "/rayps-clients-" in str(fd.readlink()):
                size += fd.stat().st_size
        except OSError:  # closed in the meantime
            continue
    return size


class RoundWatch(Federated):
    """A strategy whose first worker records each round's end and its CPU time, memory and disk."""

    log: str  # a file on this host

    def round(self, w: Any) -> None:
        """Run the round as the strategy does; then, on the first worker, append a record to the log."""
        super().round(w)
        if w.rank == 0:
            found = {"stamps": time.time(), "cpu": time.process_time(), "rss": read_resident(), "disk": on_disk()}
            with Path(self.log).open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(found) + "\n")


@dataclass(frozen=True, init=False)
class Watched(RoundWatch, FedAvg):
    """FedAvg that records each round."""

    log: str = ""


@dataclass(frozen=True, init=False)
class WatchedStates(RoundWatch, Scaffold):
    """SCAFFOLD that records each round: each client has a state as large as the model."""

    log: str = ""


@dataclass(frozen=True, init=False)
class Nothing(Watched):
    """FedAvg that records each round, with clients that return the parameters unchanged."""

    def client(self, c: Any) -> None:
        """Do not train: the parameters stay as they are."""


def run_own(config: dict[str, Any], log: Path) -> dict[str, Any]:
    """Run a rayps job in a new private Ray; return its records."""
    kind = WatchedStates if config["states"] else Watched if config["epochs"] else Nothing
    strategy = kind(
        fraction=config["fraction"],
        local_epochs=config["epochs"] or None,
        evaluate_every=NEVER,
        log=str(log),
        privacy=config.get("privacy"),
    )
    rayps.train(
        PeerImages(config),
        strategy=strategy,
        workers=config["workers"],
        epochs=config["rounds"],
        progress=False,
        checkpoint_every=NEVER,
    )
    return read_records(log)


def read_records(log: Path) -> dict[str, Any]:
    """Return the records that a `RoundWatch` wrote to `log`: for each key, the list of all rounds' values."""
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return {key: [line[key] for line in lines] for key in lines[0]}


def run_bare(config: dict[str, Any]) -> dict[str, Any]:
    """Run the same training as a plain loop in one process; every client starts each round with the same model."""
    torch.set_num_threads(1)
    net, samples = make_model(config["hidden"]), [draw_rows(client, config) for client in range(config["clients"])]
    begin = {name: value.clone() for name, value in net.state_dict().items()}
    stamps, cpu = [], []
    for _ in range(config["rounds"]):
        for x, y in samples:
            net.load_state_dict(begin)
            train_plain_client(net, x, y, config)
        stamps.append(time.time())
        cpu.append(time.process_time())
    return {"stamps": stamps, "cpu": cpu}


def main() -> None:
    """Run CONFIG as a rayps job, or as the plain loop if CONFIG has "bare"; write the records to OUT."""
    config, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    out.write_text(json.dumps(run_bare(config) if config.get("bare") else run_own(config, out.with_suffix(".log"))))


if __name__ == "__main__":
    main()

"""Flower's simulation engine as a contender of `python -m benchmarks federated`: a script for its own environment.

The script imports nothing from rayps. `python federated_flower.py CONFIG OUT` runs the rounds of CONFIG (JSON) and
writes the time of each round's end to OUT, in seconds by the wall clock.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional


def make_model(hidden: int) -> nn.Module:
    """Return a network 784-hidden-hidden-10, or for hidden = 0 a model of two numbers, a weight and a bias."""
    if not hidden:
        return nn.Linear(1, 1)
    return nn.Sequential(nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def draw_rows(client: int, config: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a client's samples: random numbers, which need as much computation as real images."""
    generator, count = torch.Generator().manual_seed(client), config["rows"]
    return torch.rand(count, 784 if config["hidden"] else 1, generator=generator), torch.randint(
        10 if config["hidden"] else 1, (count,), generator=generator
    )


def train_plain_client(net: nn.Module, x: torch.Tensor, y: torch.Tensor, config: dict[str, Any]) -> float:
    """Train `net` in a plain loop for one client; return the last loss.

    Each of the `epochs` epochs has batches of `batch` samples in a new order; the optimizer is plain SGD.
    """
    optimizer = torch.optim.SGD(net.parameters(), lr=config["lr"])
    loss: Any = 0.0
    for _ in range(config["epochs"]):
        order = torch.randperm(len(x))
        for at in range(0, len(x), config["batch"]):
            some = order[at : at + config["batch"]]
            optimizer.zero_grad()
            loss = functional.cross_entropy(net(x[some]), y[some])
            loss.backward()
            optimizer.step()
    return float(loss.detach()) if config["epochs"] else 0.0


def make_client_app(config: dict[str, Any]) -> Any:
    """Return Flower's client app. It trains, or returns the received parameters if `epochs` is 0."""
    app, clientapp = importlib.import_module("flwr.app"), importlib.import_module("flwr.clientapp")
    found = clientapp.ClientApp()

    @found.train()  # type: ignore[untyped-decorator]
    def train(message: Any, context: Any) -> Any:
        arrays, loss = message.content["arrays"], 0.0
        if config["epochs"]:
            torch.set_num_threads(1)
            net = make_model(config["hidden"])
            net.load_state_dict(arrays.to_torch_state_dict())
            loss = train_plain_client(net, *draw_rows(context.node_config["partition-id"], config), config)
            arrays = app.ArrayRecord(net.state_dict())
        metrics = app.MetricRecord({"num-examples": config["rows"], "train_loss": loss})
        return app.Message(content=app.RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return found


def make_server_app(config: dict[str, Any], stamps: list[float]) -> Any:
    """Return Flower's server app: FedAvg over all clients, without evaluation.

    The app appends the time of each round's end to `stamps`.
    """
    app, serverapp = importlib.import_module("flwr.app"), importlib.import_module("flwr.serverapp")
    fedavg: Any = importlib.import_module("flwr.serverapp.strategy").FedAvg
    found = serverapp.ServerApp()

    class Timed(fedavg):  # type: ignore[misc]
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            merged = super().aggregate_train(server_round, replies)
            stamps.append(time.time())
            return merged

    @found.main()  # type: ignore[untyped-decorator]
    def main(grid: Any, context: Any) -> None:
        clients = config["clients"]
        strategy = Timed(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
        strategy.start(
            grid=grid,
            initial_arrays=app.ArrayRecord(make_model(config["hidden"]).state_dict()),
            num_rounds=config["rounds"],
        )

    return found


def main() -> None:
    """Run the simulation."""
    config, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    stamps: list[float] = []
    simulation = importlib.import_module("flwr.simulation")
    simulation.run_simulation(
        server_app=make_server_app(config, stamps),
        client_app=make_client_app(config),
        num_supernodes=config["clients"],
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": config["workers"]},
        },
    )
    out.write_text(json.dumps({"stamps": stamps}))


if __name__ == "__main__":
    main()

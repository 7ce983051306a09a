"""Apple's `pfl` as a contender of `python -m benchmarks federated`: a script for its own environment.

The script uses the model and the clients of `federated_flower.py`, which is in the same folder, and imports nothing
from rayps. `python -m torch.distributed.run ... federated_pfl.py CONFIG OUT` writes each round's end time to OUT.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional


def make_learner(base: Any, config: dict[str, Any]) -> Any:
    """Return the model as a module that has a loss and metrics, as pfl requires."""

    class Learner(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = base.model(config["hidden"])

        def forward(self, x: torch.Tensor) -> Any:
            return self.net(x)

        def loss(self, x: torch.Tensor, y: torch.Tensor, eval: bool = False) -> torch.Tensor:
            return functional.cross_entropy(self(x), y)

        @torch.no_grad()
        def metrics(self, x: torch.Tensor, y: torch.Tensor, eval: bool = False) -> dict[str, Any]:
            return {"loss": self.loss(x, y)}

    return Learner()


def main() -> None:
    """Run the simulation in the processes that torch.distributed.run has started. The first process writes OUT."""
    config, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    base = importlib.import_module("federated_flower")  # a file in the folder of this script
    stamps: list[float] = []

    def part(name: str) -> Any:
        return importlib.import_module(f"pfl.{name}")

    class Stamp(part("callback.base").TrainingProcessCallback):  # type: ignore[misc]
        def after_central_iteration(self, *args: Any, **options: Any) -> Any:
            stamps.append(time.time())
            return False, part("metrics").Metrics()

    clients = {k: base.rows(k, config) for k in range(config["clients"])}
    dataset = part("data.federated_dataset").FederatedDataset(
        lambda k: part("data.pytorch").PyTorchTensorDataset(clients[k], user_id=str(k)),
        part("data.sampling").get_user_sampler("minimize_reuse", list(clients)),
    )
    net = make_learner(base, config)
    model = part("model.pytorch").PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
    train = part("hyperparam").NNTrainHyperParams(
        local_num_epochs=config["epochs"], local_learning_rate=config["lr"], local_batch_size=config["batch"]
    )
    params = part("algorithm.base").NNAlgorithmParams(
        central_num_iterations=config["rounds"],
        evaluation_frequency=10**9,
        train_cohort_size=config["clients"],
        val_cohort_size=None,
    )
    backend = part("aggregate.simulate").SimulatedBackend(training_data=dataset, val_data=None)
    part("algorithm.federated_averaging").FederatedAveraging().run(
        params, backend, model, train, part("hyperparam").NNEvalHyperParams(local_batch_size=None), callbacks=[Stamp()]
    )
    if os.environ.get("RANK", "0") == "0":
        out.write_text(json.dumps({"stamps": stamps}))


if __name__ == "__main__":
    main()

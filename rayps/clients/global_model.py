"""The job's parameters on a real client's disk, as the state from which its personal model is made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from rayps_client.errors import WorkloadError
from rayps_client.exchange.global_model import read_global
from rayps_client.exchange.signed_orders import ModelFacts
from rayps_client.trainers.torch_tensors import tensors_of
from torch import Tensor

from rayps.federated.personal_model import GlobalState
from rayps.federated.strategy_interface import FederatedView
from rayps.strategies.catalogue import parse
from rayps.tensors.flat import Layout
from rayps.tensors.learning_rate import Ticks
from rayps.tensors.training_state import below
from rayps.workload.base import Workload
from rayps.workload.model import apart, model_of


@dataclass(frozen=True, slots=True)
class GlobalModel:
    """Parameters and buffers of a checkpoint by name ("model/0.weight", "buffer/1.running_mean"), with its facts."""

    facts: ModelFacts
    tensors: dict[str, Tensor]

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read the parameters in a client's folder. Raises ConfigError if there are none."""
        facts, tensors = read_global(folder)
        return cls(facts, tensors_of(tensors))

    @property
    def strategy(self) -> FederatedView:
        """The job's strategy."""
        found = parse(self.facts["strategy"])[0].strategy
        assert isinstance(found, FederatedView), "the service records federated strategies only"
        return found

    def state(self, workload: Workload) -> GlobalState:
        """Return the state from which the workload's personal models are made.

        Raises:
            WorkloadError: the parameters are of another model.
        """
        with apart():
            model = model_of(workload)
        layout = Layout.of((name, p) for name, p in model.named_parameters() if p.requires_grad)
        given = below("model/", self.tensors)
        for entry in layout.entries:
            shape = tuple(given[entry.name].shape) if entry.name in given else None
            if shape != entry.shape:
                raise WorkloadError(
                    f"the job's model differs from this workload's: the job's {entry.name!r} has shape {shape}, this "
                    f"workload's {entry.shape}:\nuse the workload file, and the versions of its packages, with which "
                    "the job was submitted"
                )
        w = torch.cat([given[name].reshape(-1) for name in layout.names])
        facts, origin = self.facts, self.facts["origin"]
        tick = Ticks((origin[0], origin[1]), facts["steps_per_epoch"]).of(workload.schedule_every, facts["round"])
        begun = facts["round"] - origin[0]
        return GlobalState(self.strategy.federation, facts["seed"], begun, tick, w, below("buffer/", self.tensors), {})

"""The job's parameters on a real client's disk, from which its personal model is made: `global.safetensors`.

The service sends the parameters and buffers of the job's newest checkpoint, and facts of it that it has signed, to
clients that have joined. The file has both, so that a personal model is made without the service.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from rayps.core.errors import ConfigError, Unauthorized, WorkloadError
from rayps.federated.personal_model import GlobalState
from rayps.federated.remote.signed_orders import ModelFacts
from rayps.federated.strategy_interface import FederatedView
from rayps.strategies.catalogue import parse
from rayps.tensors.flat import Layout
from rayps.tensors.learning_rate import Ticks
from rayps.tensors.local_state import below
from rayps.workload.base import Workload
from rayps.workload.model import apart, model_of

FILE = "global.safetensors"


@dataclass(frozen=True, slots=True)
class GlobalModel:
    """Parameters and buffers of a checkpoint by name ("model/0.weight", "buffer/1.running_mean"), with its facts."""

    facts: ModelFacts
    tensors: dict[str, Tensor]

    @property
    def strategy(self) -> FederatedView:
        """The job's strategy."""
        return strategy_in(self.facts)

    @classmethod
    def fetch(cls, facts: ModelFacts, get: Callable[[str], bytes]) -> Self:
        """Download the files of a checkpoint whose `facts` were verified. `get` returns the answer to GET of a path.

        Raises:
            Unauthorized: a file has another hash than the signed one.
            NotFound: a newer checkpoint has replaced this one.
        """
        tensors: dict[str, Tensor] = {}
        for name, expected in facts["files"].items():
            raw = get(f"/api/v1/client/model/{facts['step']}/{name}")
            if hashlib.sha256(raw).hexdigest() != expected["sha256"]:
                raise Unauthorized(
                    f"the received {name} does not have the SHA-256 hash that the service has signed: this client does "
                    "not use it",
                    code="refused",
                )
            tensors |= safetensors.torch.load(raw)
        return cls(facts, tensors)

    def save(self, folder: Path) -> None:
        """Write the file into a client's folder, complete or not at all."""
        part = folder / f".global-{secrets.token_hex(4)}"
        with part.open("wb") as file:
            file.write(safetensors.torch.save(self.tensors, {"facts": json.dumps(self.facts)}))
            file.flush()
            os.fsync(file.fileno())
        part.replace(folder / FILE)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read the file in a client's folder.

        Raises:
            ConfigError: there is no such file.
        """
        path = folder / FILE
        if not path.is_file():
            raise ConfigError(
                f"{path} is not there: a client fetches the job's parameters when the job ends; to fetch the newest "
                "ones now, add --fetch\nwith --url and --token, or check --state, --job and --name",
                field="state",
            )
        with safetensors.safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no dict
            return cls(json.loads(file.metadata()["facts"]), tensors)

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
        return GlobalState(self.strategy, facts["seed"], begun, tick, w, below("buffer/", self.tensors), {})


def strategy_in(facts: ModelFacts) -> FederatedView:
    """Return the strategy that the facts of a checkpoint name."""
    strategy = parse(facts["strategy"])[0].strategy
    assert isinstance(strategy, FederatedView), "the service records federated strategies only"
    return strategy


def keep_global_model(
    facts: ModelFacts, folder: Path, get: Callable[[str], bytes], report: Callable[[str], None]
) -> None:
    """Fetch and store the job's parameters in a client's folder. `get` returns the answer to GET of a path."""
    GlobalModel.fetch(facts, get).save(folder)
    report(
        f"the job's parameters after {facts['round']} rounds are stored with this client's state: `rayps personal` "
        "makes and evaluates its personal model"
    )

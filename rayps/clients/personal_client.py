"""The personal model of a real client, made and evaluated where its rows are. Nothing is sent."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rayps_client.errors import ConfigError
from rayps_client.exchange.upload_coding import without_rest
from rayps_client.machine.client_folder import newest_state
from rayps_client.trainers.torch_tensors import tensors_of
from torch import nn

from rayps.clients.global_model import GlobalModel
from rayps.clients.workload_trainer import rows_of
from rayps.data.base import Data
from rayps.federated.client import ClientRows, Tensors
from rayps.federated.personal_model import GlobalState, evaluated_on, has_personal, personal_model
from rayps.runtime.results.saved_model import save_model
from rayps.workload.base import Workload


@dataclass(frozen=True)
class PersonalClient:
    """A real client with its personal model: `given` and the state in `folder`, and the rows of `data`."""

    workload: Workload
    data: Data
    folder: Path
    given: GlobalModel

    @cached_property
    def state(self) -> Tensors:
        """The strategy's state of this client at the job's newest checkpoint; {} if there is none."""
        facts, name = self.given.facts, self.given.strategy.name
        return tensors_of(without_rest(newest_state(self.folder, facts["round"], name, facts["starts"])))

    @cached_property
    def job(self) -> GlobalState:
        """The state of the job. Raises WorkloadError if it is of another model."""
        return self.given.state(self.workload)

    @cached_property
    def model(self) -> nn.Module:
        """The personal model, in evaluation mode, on the CPU.

        Raises:
            ConfigError: the strategy has no personal models, or this client has none yet.
            WorkloadError, DataError: the user's code or data failed.
        """
        job = self.job
        side = job.federation.client_side
        if not has_personal(side, bool(self.state)):
            why = "no update of this client has counted" if side.measured else "its clients have no models of their own"
            raise ConfigError(
                f"there is no personal model, because {why}: the job's strategy is {self.given.strategy.name}; "
                "personal models are made by ditto, fedper and\nfedrep with private=LAYER, and with finetune=1 or "
                'buffers="keep"',
                field="strategy",
            )
        return personal_model(self.workload, job, self.given.facts["client"], self.state, self._rows)

    def _rows(self) -> ClientRows:
        return rows_of(self.data)

    def global_model(self) -> nn.Module:
        """Return the job's model, in evaluation mode, on the CPU."""
        return self.job.global_model(self.workload)

    def save(self, folder: Path) -> Path:
        """Write the personal model into a new folder that needs no rayps. Return the folder.

        Raises CheckpointError if the folder has files already, or cannot be written.
        """
        return save_model(self.model, folder)

    def metrics(self, model: nn.Module, data: Data) -> dict[str, float]:
        """Return the metrics of a model on this client's rows of evaluation data.

        These are the rows of the client of this name if the data is divided into clients and has it; otherwise all.
        """
        if getattr(data, "divided", False):
            clients = data.clients
            number = clients.find(self.given.facts["name"])
            if number is not None:
                return evaluated_on(self.workload, model, clients.rows(number), clients.batch)
        rows = rows_of(data)
        return evaluated_on(self.workload, model, rows.numbers, rows.take)

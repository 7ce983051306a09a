"""The clients of a federated job that has ended, and their personal models: `Result.client`, `rayps export --client`.

A personal model is made on request, from the job's last state, the client's stored state and, with `finetune`, the
client's rows. It has the bits of the model that the last evaluation measured as `personal_*`, if it is made on the kind
of processor on which the job ran; of a job on GPUs the last digits may differ, because it is made on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from rayps_client.errors import CheckpointError, ConfigError
from rayps_client.values import JsonObject
from torch import Tensor, nn

from rayps.cluster.reservation import torch_threads
from rayps.core.job.user_code import user_code
from rayps.core.spelling import near
from rayps.core.strategy.strategy import Phase, StrategyView
from rayps.core.urls import Location
from rayps.data.base import Data
from rayps.data.clients import Clients
from rayps.federated.client import ClientRows
from rayps.federated.client_states_file import CheckpointStates, StoredStates
from rayps.federated.personal_model import GlobalState, evaluated_on, has_personal, personal_model, threads_of_torch
from rayps.federated.simulated_rows import SimulatedRows
from rayps.federated.strategy_interface import FederatedView
from rayps.runtime.results.saved_model import save_model
from rayps.strategies.catalogue import parse, wire
from rayps.tensors.checkpoints import checkpoint
from rayps.tensors.flat import Layout
from rayps.tensors.learning_rate import Ticks
from rayps.tensors.snapshot import Snapshot
from rayps.workload.base import Workload
from rayps.workload.model import apart, model_of

_RECORD = "federated"  # name, in a checkpoint's JSON data, of what `record_clients` returns
_LISTED = 5  # the largest number of names in an error


def record_clients(strategy: StrategyView, resources: Mapping[str, float]) -> JsonObject:
    """Return what a checkpoint records for its clients' personal models; {} if the strategy is not federated."""
    if not isinstance(strategy, FederatedView):
        return {}
    return {_RECORD: {"strategy": wire([Phase(None, strategy)]), "threads": torch_threads(resources["cpu"])}}


class JobClients:
    """The clients of a job that has ended."""

    def __init__(
        self,
        workload: Workload,
        strategy: FederatedView,
        snapshot: Snapshot,
        states: StoredStates,
        *,
        seed: int,
        threads: int,
    ) -> None:
        """`snapshot` is the job's last state, `states` the clients' states of the same round.

        `threads` is the number of torch's threads in each of the job's workers.
        """
        self.workload, self.snapshot, self.states = workload, snapshot, states
        self.strategy_name, self.federation = strategy.name, strategy.federation
        self.seed, self.threads = seed, threads

    @classmethod
    def of_checkpoint(cls, path: Location, workload: Workload, folder: str | Path | None = None) -> JobClients:
        """Return the clients of the job that wrote a checkpoint. A user's own strategy is searched in `folder`.

        Raises:
            CheckpointError: the checkpoint cannot be read, or is of another model.
            ConfigError: the job has no clients.
        """
        state = checkpoint.load(path)
        facts = state.meta.get(_RECORD)
        if facts is None:
            raise CheckpointError(
                f"{path} does not record a federated strategy: its job had no clients.\nGive a "
                "checkpoint of a federated job"
            )
        strategy = parse(facts["strategy"], folder)[0].strategy
        assert isinstance(strategy, FederatedView), "only federated strategies are recorded"
        snapshot = Snapshot.from_state(state)
        return cls(
            workload, strategy, snapshot, CheckpointStates(path), seed=state.meta["seed"], threads=facts["threads"]
        )

    @cached_property
    def state(self) -> GlobalState:
        """The state from which personal models are made. Raises CheckpointError if it is of another model."""
        snapshot = self.snapshot.loaded()
        with apart():
            named = model_of(self.workload).named_parameters()
        snapshot.check(
            Layout.of((name, p) for name, p in named if p.requires_grad),
            "give the workload that was trained (--workload), with its parameters (--set NAME=VALUE)",
        )
        ticks, round = Ticks(snapshot.origin, snapshot.steps_per_epoch), snapshot.round
        tick = ticks.of(self.workload.schedule_every, round)
        begun = round - snapshot.origin[0]
        return GlobalState(self.federation, self.seed, begun, tick, snapshot.params, snapshot.buffers, snapshot.shared)

    @cached_property
    def data(self) -> Data:
        """The workload's data. Raises DataError or WorkloadError if it cannot be read."""
        with user_code("data"):
            return self.workload.data()

    @property
    def clients(self) -> Clients:
        """The clients of the data."""
        return self.data.clients

    @property
    def names(self) -> list[str]:
        """The names of all clients of the data, by number."""
        return list(self.clients.names)

    @cached_property
    def evaluation_clients(self) -> Clients | None:
        """The clients of the evaluation data; None if it is not divided into clients."""
        with user_code("evaluation_data"):
            data = self.workload.evaluation_data()
        return data.clients if getattr(data, "divided", False) else None

    def client(self, name: str | int) -> ClientResult:
        """Return a client by its name.

        Raises:
            ConfigError: there is no client of this name, it has no personal model, or it is a real client.
        """
        side, name = self.federation.client_side, str(name)
        if self.federation.joining is not None:
            raise ConfigError(
                "the clients of this job are real, and their personal models stay with them: run `rayps personal "
                "WORKLOAD --job ID --name NAME`\non the client's machine",
                field="client",
            )
        if not side.measured:
            raise ConfigError(
                f"{self.strategy_name} keeps no model of each client: use ditto, fedper or fedrep with private=LAYER, "
                'or give finetune=1 or buffers="keep". `model()` is the model of all clients',
                field="client",
            )
        number = self.states.find(name)
        if number is None:
            number = self.clients.find(name)
        if number is None:
            names = self.names
            more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
            raise ConfigError(
                f"there is no client {name!r}{near(name, names)}: the clients are {', '.join(names[:_LISTED])}{more}",
                field="client",
            )
        state = self.states.get(number)
        if not has_personal(side, bool(state)):
            raise ConfigError(
                f"client {name!r} has taken part in no round that counted, so it has no model of its own yet: give "
                "more rounds (epochs) or a larger fraction.\n`model()` is the model with which it would start",
                field="client",
            )
        return ClientResult(self, name, number, state)


class ClientResult:
    """A client of a job that has ended: its personal model, its stored state and its metrics.

    Example:
        result = rayps.train(clients, strategy=rayps.FedAvg(finetune=1), workers=2)  # data with clients
        result.client(result.clients[0]).model()
    """

    def __init__(self, job: JobClients, name: str, number: int, state: dict[str, Tensor]) -> None:
        self.name, self.number = name, number
        # the tensors that the strategy stores for the client, by name, such as Ditto's "v"; {} if it stores none
        self.state = state
        self._job = job

    def __repr__(self) -> str:
        return f"ClientResult({self.name!r})"

    def model(self) -> nn.Module:
        """Return the client's personal model on the CPU, in evaluation mode.

        Raises:
            WorkloadError, DataError: the user's code or data failed.
        """
        job = self._job
        with threads_of_torch(job.threads):
            return personal_model(job.workload, job.state, self.number, self.state, self._read_rows)

    @cached_property
    def metrics(self) -> dict[str, float]:
        """The metrics of the personal model on the client's rows of the evaluation data; {} if there are none.

        Raises:
            WorkloadError, DataError: the user's code or data failed.
        """
        clients = self._job.evaluation_clients
        number = None if clients is None else clients.find(self.name)
        if clients is None or number is None:
            return {}
        model = self.model()
        with threads_of_torch(self._job.threads):
            return evaluated_on(self._job.workload, model, clients.rows(number), clients.batch)

    def save(self, folder: str | Path) -> Path:
        """Write the personal model into a new folder that needs no rayps, as `Result.save` does. Return the folder.

        Raises:
            CheckpointError: the folder has files already, or cannot be written.
        """
        return save_model(self.model(), folder)

    def _read_rows(self) -> ClientRows:
        job = self._job
        return SimulatedRows(job.federation, job.data, job.clients, job.seed).of(self.number)

"""Get the replies of simulated clients for the engine: each worker has the data, and trains its part of the clients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from rayps_client.errors import WorkloadError
from torch import Tensor

from rayps.core.job.user_code import user_code
from rayps.core.metrics import Totals
from rayps.data.base import Data
from rayps.federated.client import ClientReply, Task, Tensors, Trainer
from rayps.federated.personal_metrics import personal
from rayps.federated.population.cohort import Ints, pack
from rayps.federated.population.events import clock_at
from rayps.federated.population.population import Training
from rayps.federated.simulated_rounds import events_of
from rayps.federated.simulated_rows import SimulatedRows, used_rows

if TYPE_CHECKING:
    from rayps.federated.engine import FederatedEngine

_CLOCK = "clock"  # name of the virtual clock in `shared`
_OLD = "version/"  # prefix of the names, in `shared`, of the parameters of older versions
AGAIN = 1_000_003  # difference between the seeds of two trainings of one client from the same version


@dataclass(frozen=True, slots=True)
class TrainingTask:
    """One training of a client."""

    client: int
    version: int  # the training started from the parameters at the start of this round
    staleness: int = 0  # rounds since `version`


@dataclass(slots=True)
class Round:
    """The numbers of a round's clients, and the facts known before their replies. Equal on every worker."""

    sampled: Sequence[int] | Ints  # clients that were asked
    dropped: list[tuple[int, str]]  # (client, reason) of asked clients that do not reply, or reply too late
    begin: float  # seconds
    end: float  # seconds
    cohort: list[int] | None = None  # clients that reply, over all workers; None means all asked clients
    staleness: dict[int, int] | None = None  # from age in rounds to number of replies; None if all have age 0


class SimulatedReplies:
    """The simulated clients of a job. Each worker trains its part of a round's cohort."""

    refused: tuple[tuple[int, str], ...] = ()  # no reply is rejected before the aggregation

    def __init__(self, engine: FederatedEngine) -> None:
        """Prepare the simulation. Raises ConfigError if the strategy's options do not fit these clients."""
        self._engine, w = engine, engine.w
        assert engine.clients is not None, "simulated clients are those of the data"
        self._clients = engine.clients
        self.count = self._clients.count
        self._events = events_of(
            engine.federation,
            used_rows(engine.federation.local, w.batches.data),
            w.plan.seed,
            w.batches.data.batch_size,
            w.workload.accumulate,
        )
        self._costs = self._clients.sizes
        self._mine: list[Training] = []  # this worker's trainings
        self._w_t: Tensor | None = None
        self._buffers: Tensors = {}
        self._evaluation_data: Data | None = None  # once it has been loaded
        self.rows = SimulatedRows(engine.federation, w.batches.data, self._clients, w.plan.seed)

    def names(self, numbers: Iterable[int]) -> list[str]:
        """Return the names of the clients with these numbers."""
        return [self._clients.names[k] for k in numbers]

    def report_rejected(self, rejected: list[tuple[int, str]]) -> None:
        """Do nothing: simulated clients do not use the reasons."""

    def base(self, version: int, w_t: Tensor) -> Tensor:
        """Return the parameters at the start of round `version`; `w_t`: those of the current round."""
        return parameters_of(self._engine.w.shared, version, w_t)

    def summed(self, w_t: Tensor) -> None:
        """Return None: simulated clients reply one by one."""

    def round(self, t: int, w_t: Tensor, shared: dict[str, Tensor], buffers: Tensors) -> Round:
        """Plan round `t`, choose the trainings that this worker runs, and return the round's clients."""
        private = self._engine.private
        hidden = private is not None and private.job.hides_cohorts
        if hidden:  # the time of the slowest client would tell who took part, and no option of such a job uses it
            shared.pop(_CLOCK, None)
        clock = shared[_CLOCK].cpu().numpy() if _CLOCK in shared and t else clock_at()
        plan, clock = self._events.round(t, clock, None if private is None else private.cohort(self._engine.w.position))
        if not hidden:
            shared[_CLOCK] = torch.from_numpy(clock.copy())
        trainings, needed = plan.trainings, set(plan.needed)
        wanted = needed | {each.version for each in trainings}
        if needed:
            shared[f"{_OLD}{t}"] = w_t.clone()
        for name in [name for name in shared if name.startswith(_OLD)]:
            if int(name.removeprefix(_OLD)) not in wanted:
                del shared[name]
        divided = self._divide_trainings(np.asarray([each.client for each in trainings], dtype=np.int64))
        self._mine = [trainings[at] for at in divided[self._engine.w.rank].tolist()]
        self._w_t, self._buffers = w_t, buffers
        return Round(
            plan.sampled,
            plan.dropped,
            plan.begin,
            plan.end,
            [each.client for each in trainings],
            None if self._engine.federation.buffered is None else plan.staleness,
        )

    def evaluate(self, of_job: Totals) -> Totals:
        """Return a dict from `personal_*` metric to its total on this worker's clients.

        A private job has none, because they would be computed from clients' rows without noise.
        """
        engine = self._engine
        if engine.private is not None or not engine.federation.client_side.measured:
            return {}
        if self._evaluation_data is None:
            with user_code("evaluation_data"):
                self._evaluation_data = engine.w.workload.evaluation_data()
        return personal(engine, self._clients, self._evaluation_data, self.rows)

    def _divide_trainings(self, who: Ints) -> list[Ints]:
        """Return the positions in `who` of each worker's trainings.

        A client that has a state is trained by the worker that stores it; other clients are assigned by equal load.
        """
        engine, size = self._engine, self._engine.w.size
        if engine.home_ranks is None:
            return pack(self._costs[who], size)
        return [np.flatnonzero(engine.home_ranks[who] == rank) for rank in range(size)]

    def replies(self) -> Iterator[tuple[TrainingTask, ClientReply]]:
        """Train the clients that are assigned to this worker, one after another, and yield their replies."""
        engine, w = self._engine, self._engine.w
        for each in self._mine:
            state, own = engine.state_of(each.client)
            base = engine.base(each.version)
            task = Task(
                w.plan.seed + AGAIN * each.again,
                each.version,
                each.client,
                base,
                w.shared,
                state,
                self._buffers | own,
                engine.tick(each.version),
            )
            fixed = engine.trainer.fixed_versions() if engine.private is not None else {}
            reply = engine.trainer.train(engine.strategy, task, self.rows.of(each.client))
            must_be_fixed(fixed, engine.trainer)
            yield TrainingTask(each.client, each.version, each.staleness), reply


def must_be_fixed(before: dict[str, int], trainer: Trainer) -> None:
    """Raise WorkloadError if a client's training has changed a parameter that needs no gradient.

    `before` are the parameters' versions before the training. Such a parameter is not in the client's update, and keeps
    its value when the next client is trained, and in checkpoints.
    """
    now = trainer.fixed_versions()
    changed = next((name for name, version in before.items() if now[name] != version), None)
    if changed is not None:
        raise WorkloadError(
            f"loss(model, batch) changed {changed!r} of the model, which needs no gradient: its value would disclose "
            "rows of single clients without noise\nleave it unchanged in training, or leave out privacy",
            parameter=changed,
        )


def parameters_of(shared: dict[str, Tensor], version: int, w_t: Tensor) -> Tensor:
    """Return the parameters at the start of round `version`: from `shared`, or `w_t` if they are not in `shared`."""
    found: Tensor = shared.get(f"{_OLD}{version}", w_t)
    return found

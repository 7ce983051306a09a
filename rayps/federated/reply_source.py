"""Get the replies of simulated clients for the engine: each worker has the data, and trains its part of the clients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rayps.federated.client import ClientReply, ClientRows, Task, Tensors
from rayps.federated.population.cohort import Ints, pack
from rayps.federated.population.events import clock_at
from rayps.federated.population.population import Training
from rayps.federated.simulated_rounds import events_of
from rayps.federated.strategy_interface import attackers_of, is_buffered

if TYPE_CHECKING:
    from rayps.federated.engine import FederatedEngine

_CLOCK = "clock"  # name of the virtual clock in `shared`
_OLD = "version/"  # prefix of the names, in `shared`, of the parameters of older versions
_AGAIN = 1_000_003  # difference between the seeds of two trainings of one client from the same version


@dataclass(frozen=True, slots=True)
class TrainingTask:
    """One training of a client."""

    client: int
    version: int  # the training started from the parameters at the start of this round
    staleness: int = 0  # rounds since then


@dataclass(slots=True)
class Round:
    """The clients of a round, by number, and what is known of them before their replies; equal on every worker."""

    sampled: Sequence[int] | Ints  # clients that were asked
    dropped: list[tuple[int, str]]  # asked clients that do not reply, or reply too late, and why
    begin: float  # seconds
    end: float  # seconds
    cohort: list[int] | None = None  # clients that reply, over all workers; None: all that were asked
    staleness: dict[int, int] | None = None  # number of replies by age in rounds; None: all started in this round


class SimulatedReplies:
    """The simulated clients of a job; each worker trains its part of a round's cohort."""

    refused: tuple[tuple[int, str], ...] = ()  # no reply is rejected before the aggregation

    def __init__(self, engine: FederatedEngine) -> None:
        """Prepare the simulation. Raises ConfigError: the strategy's options do not fit these clients."""
        self._engine, w = engine, engine.w
        assert engine.clients is not None, "simulated clients are those of the data"
        self._clients = engine.clients
        self.count = self._clients.count
        self._events = events_of(engine.strategy, self._clients.sizes, w.plan.seed, w.batches.data.batch_size)
        self._costs = self._clients.sizes
        self._mine: list[Training] = []  # this worker's trainings
        self._w_t: Tensor | None = None
        self._buffers: Tensors = {}
        attack = attackers_of(engine.strategy)
        self._attack = attack if attack is None else attack.settled(self._clients.label_names)
        flips = attack is not None and attack.flips_labels
        self._liars = attack.attackers(w.plan.seed, self.count) if attack is not None and flips else frozenset[int]()

    def names(self, numbers: Iterable[int]) -> list[str]:
        """Return the names of the clients with these numbers."""
        return [self._clients.names[k] for k in numbers]

    def judged(self, rejected: list[tuple[int, str]]) -> None:
        """Do nothing: a simulated client need not know why its reply was rejected."""

    def round(self, t: int, w_t: Tensor, shared: dict[str, Tensor], buffers: Tensors) -> Round:
        """Plan round `t`, choose the trainings that this worker runs, and return what is known of the round."""
        clock = shared[_CLOCK].cpu().numpy() if _CLOCK in shared and t else clock_at()
        plan, clock = self._events.round(t, clock)
        shared[_CLOCK] = torch.from_numpy(clock.copy())
        trainings, needed = plan.trainings, set(plan.needed)
        wanted = needed | {each.version for each in trainings}
        if needed:
            shared[f"{_OLD}{t}"] = w_t.clone()
        for name in [name for name in shared if name.startswith(_OLD)]:
            if int(name.removeprefix(_OLD)) not in wanted:
                del shared[name]
        dealt = self._dealt(np.asarray([each.client for each in trainings], dtype=np.int64))
        self._mine = [trainings[at] for at in dealt[self._engine.w.rank].tolist()]
        self._w_t, self._buffers = w_t, buffers
        return Round(
            plan.sampled,
            plan.dropped,
            plan.begin,
            plan.end,
            [each.client for each in trainings],
            plan.staleness if is_buffered(self._engine.strategy) else None,
        )

    def _dealt(self, who: Ints) -> list[Ints]:
        """Return the positions in `who` of each worker's trainings.

        A client that has a state is trained by the worker that stores it; other clients are assigned by equal load.
        """
        engine, size = self._engine, self._engine.w.size
        if engine.homes is None:
            return pack(self._costs[who], size)
        return [np.flatnonzero(engine.homes[who] == rank) for rank in range(size)]

    def replies(self) -> Iterator[tuple[TrainingTask, ClientReply]]:
        """Train the clients that are assigned to this worker, one after another; yield their replies."""
        engine, w = self._engine, self._engine.w
        for each in self._mine:
            state, own = engine.state_of(each.client)
            base = engine.base(each.version)
            task = Task(
                w.plan.seed + _AGAIN * each.again,
                each.version,
                each.client,
                base,
                w.shared,
                state,
                self._buffers | own,
                engine.tick(each.version),
            )
            reply = engine.trainer.train(engine.strategy, task, self.rows(each.client))
            yield TrainingTask(each.client, each.version, each.staleness), reply

    def rows(self, client: int) -> ClientRows:
        """Return a client's rows; those of an attacker that flips labels have false labels."""
        data, clients = self._engine.w.batches.data, self._clients
        relabel = self._attack.labels if self._attack is not None and client in self._liars else None
        return ClientRows(clients.rows(client), clients.batch, data.batch_size, getattr(data, "shuffle", True), relabel)


def old(shared: dict[str, Tensor], version: int, w_t: Tensor) -> Tensor:
    """Return the parameters at the start of round `version`, from `shared` if they are older than `w_t`."""
    found: Tensor = shared.get(f"{_OLD}{version}", w_t)
    return found

"""Backup workers: the gradients of the first N of N + b workers are the members of a step.

Chen et al., "Revisiting distributed synchronous SGD", ICLR 2016 workshop. The members of a step are agreed before a
gradient is sent, so that nothing is sent while backward continues. A worker that is late abandons its gradient, and
computes the same rows again in a later step. How the members are agreed: `rayps.worker.first_on_ring`,
`rayps.worker.first_at_servers`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from rayps.core.rows.step_members import Members
from rayps.core.rows.step_rows import ByPortion
from rayps.tensors.snapshot import Snapshot
from rayps.worker.abandon import AbandonHooks, StepAbandoned
from rayps.worker.core import Worker
from rayps.worker.exchange.dropped import DropReports
from rayps.worker.members import other_exchange
from rayps.worker.rows.batches import BatchStream

STATE = "portions"  # the key of the state in the values that are equal on all workers

Found = TypeVar("Found")


class FirstArrivals(ABC):
    """What workers on a ring and workers with servers have in common: see `rayps.worker.members.StepMembership`."""

    method: ClassVar[str]  # the worker's, which exchanges the gradient of a step
    choice: ClassVar[str]  # what the workers have chosen, with {shares} for N and {size} for N + b
    _w: Worker

    def __init__(self, w: Worker) -> None:
        """Prepare the steps of a worker that takes portions. Reports the choice on rank 0."""
        plan = w.plan
        self._w, self._portions = w, portions_of(w.batches)
        self._drops = DropReports(w.log, w.size, plan.strategy.topology.late, reports=plan.rank == 0)
        self._hooks = AbandonHooks(w.part.module, self._look, compiled=bool(w.workload.compile))
        if plan.rank == 0:
            shares = self._portions.walk.plan.shares
            message = self.choice.format(shares=shares, size=w.size)
            w.log.choices.append({"kind": "choice", "message": message, "members": shares})

    @abstractmethod
    def _is_late(self) -> bool:
        """Return whether this worker knows that the members of the present step are others."""

    def _look(self) -> bool:
        """Return whether this worker is late. It is asked often while a gradient is computed."""
        return self._is_late()

    def _attempt(self, compute: Callable[[], Found]) -> Found | None:
        """Return what `compute` returns: this worker's gradient. None if it has no rows in this step, or is late."""
        if not self._portions.has_portion or self._is_late():
            return None
        began = time.perf_counter()
        try:
            with self._hooks:
                return compute()
        except StepAbandoned:
            self._w.meter.compute += time.perf_counter() - began
            self._w.flat.drop_grad()
            return None

    def _end_step(self, members: Members, random: Tensor) -> None:
        """Go on to the next step, after one with these members. `random` is torch's random state before it.

        If this worker is no member, its next gradient of the same rows uses the same random numbers.
        """
        w, walk = self._w, self._portions.walk
        if w.rank not in members:
            w.meter.drop_losses()
            torch.set_rng_state(random)
        self._drops.add(walk.now, members, w.position - 1)
        walk.advance(members)

    # ---- for the loop

    def run_round(self, call: Callable[[], None]) -> None:
        """Run the strategy's round. Raises ConfigError if it has not called the worker's exchange."""
        call()
        if self._portions.walk.step != self._w.position:
            raise other_exchange(self.method)

    def end_round(self) -> None:
        """Report the dropped steps at the end of an epoch."""
        batches = self._w.batches
        epoch, index = batches.epoch_of(batches.position)
        if index == 0:
            self._drops.end_epoch(epoch - 1)

    def save(self, shared: dict[str, Tensor]) -> None:
        """Add the portions of all workers, unless they follow from the step: the next step, then the state there."""
        state = self._portions.walk.state
        if state is None:
            shared.pop(STATE, None)
        else:
            shared[STATE] = torch.tensor([self._portions.walk.step, *state])

    def restore(self, snapshot: Snapshot, shared: dict[str, Tensor]) -> None:
        """Continue with the portions that the workers had, if the snapshot is of this run's next round."""
        position, held = self._w.position, shared.pop(STATE, None)
        state = None if held is None else held.tolist()
        known = state is not None and state[0] == snapshot.round == position
        self._portions.begin_at(position, state[1:] if state is not None and known else None)


def portions_of(stream: BatchStream) -> ByPortion:
    """Return the portions of a worker in step with backup workers."""
    assert isinstance(stream.blocks, ByPortion), "a worker with backup workers takes portions"
    return stream.blocks

"""The base class of loops: how a family of strategies runs a round, what its state is, and what is evaluated.

`rayps.worker.loop_of_family` maps a strategy to its loop. A user's strategy may have its own loop. This is a subclass
of `Loop`, or of a family's loop, which `Strategy.loop = "module:Class"` names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from rayps.core.records import Point
from rayps.tensors import optim
from rayps.tensors.local_state import LocalState
from rayps.tensors.snapshot import Snapshot
from rayps.worker.connections import WorkerConnections
from rayps.worker.core import Worker, evaluated
from rayps.worker.plan import WorkerPart, WorkerPlan
from rayps.workload.base import Workload

Companions: TypeAlias = dict[str, Any]  # from "module:Class" to the object that a family stores between generations


class Loop:
    """Runs a strategy's rounds on one worker `w`. The class of `w` is `view`, with the methods of the family."""

    view: ClassVar[type[Worker]] = Worker
    w: Worker

    def __init__(self, workload: Workload, plan: WorkerPlan, peers: WorkerConnections, device: str = "cpu") -> None:
        """Build the worker. Call `load_state_dict` next.

        Raises:
            WorkloadError, DataError: the user's code failed.
        """
        self.w = self.view(workload, plan, peers, device)
        self.w.position = plan.start

    # ---- rounds

    def join(self, companions: Companions) -> None:
        """Receive the objects that families store on this worker between generations: see `WorkerActor.companion`."""

    def begin(self, stopped: Callable[[], bool]) -> None:
        """Prepare the first round. `stopped()` returns whether the plan was ended from outside."""
        self.w.flat.model.train()
        self.w.plan.strategy.begin(self._view())

    def run_round(self) -> None:
        """Run one round: set the learning rates by the schedule, then call the strategy's `round`."""
        if self.w.local is not None:
            self.w.local.at(self.w.position)
        self.w.plan.strategy.round(self._view())

    def finish(self) -> None:
        """End the plan, after which all workers have the consensus. Raises LinkError if a connection fails."""
        self.w.plan.strategy.finish(self._view())
        agreed = self.consensus()
        if agreed is not None:
            self.w.params = agreed

    def retain(self, round: int) -> None:
        """Retain what a checkpoint after `round` contains in addition to the result of `state_dict`."""

    def close(self) -> None:
        """Release the loop's resources. This is also called after an error."""
        if self.w.tables is not None:
            self.w.tables.close()

    def point(self) -> Point:
        """Return the metrics of the last round."""
        w, done = self.w, self.w.position - 1
        point = {"kind": "round", "round": done, "epoch": w.batches.epoch_of(done)[0], **w.meter.point()}
        point |= w.log.take_numbers() | w.part.facts()
        return point | (w.tables.point() if w.tables is not None else {})

    # ---- what is evaluated

    def consensus(self) -> Tensor | None:
        """Return the vector on which the workers would agree if training ended now, or None if it is the parameters.

        This is a collective: all workers call it in the same round. Raises LinkError if a connection fails.
        """
        agreed: Tensor | None = self.w.plan.strategy.consensus(self._view())
        return agreed

    def evaluation_params(self) -> Tensor | None:
        """Return the parameters to evaluate during the plan, or None if these are the worker's own parameters.

        Raises LinkError if a connection fails.
        """
        return self.consensus()

    def evaluate(self, vector: Tensor | None = None) -> dict[str, tuple[float, int]]:
        """Evaluate the model over this worker's share: return a dict from a metric's name to (sum, samples).

        `vector` replaces the worker's parameters first; None means that the parameters do not change.
        """
        if vector is not None:
            self.w.params = vector
        return evaluated(self.w)

    # ---- state

    def state_dict(self, *, together: bool) -> WorkerPart:
        """Return the worker's part of a checkpoint, as copies on the CPU.

        `together`: whether all workers call this method in this round. If so, the part has the consensus. Raises
        LinkError if a connection fails.
        """
        found = self.consensus() if together else None
        return self._part(self.w.flat.vector if found is None else found)

    def load_state_dict(self, snapshot: Snapshot) -> None:
        """Restore a snapshot: parameters, optimizer state, buffers and this rank's random state.

        Raises:
            CheckpointError: the snapshot belongs to another model.
        """
        w = self.w
        snapshot.check(w.flat.layout)
        self._load(snapshot)
        w.shared = {name: value.clone().to(w.device) for name, value in snapshot.shared.items()}
        if w.plan.rank in snapshot.rng:
            torch.set_rng_state(snapshot.rng[w.plan.rank])
        else:  # the workers of a tensor group, which share each layer, draw the same random numbers
            torch.manual_seed(w.plan.seed * 1_000_003 + w.plan.rank - w.plan.place.tensor)

    def buffers(self) -> dict[str, Tensor]:
        """Return a dict from the names of the model's buffers and frozen parameters to copies on the CPU."""
        return {name: value.detach().cpu().clone() for name, value in self.w.part.beside.items()}

    def load_buffers(self, buffers: dict[str, Tensor]) -> None:
        """Copy named buffers into the model. Unknown names are ignored."""
        with torch.no_grad():
            for name, value in self.w.part.beside.items():
                if name in buffers:
                    value.copy_(buffers[name])

    # ---- for subclasses

    def _view(self) -> Any:
        """Return `w` as the argument of the strategy's `round`.

        The type is `Any`, because `WorkerView` declares the methods of all families, and `w` has those of its own.
        """
        return self.w

    def _part(
        self, params: Tensor | None, moments: optim.Moments | None = None, own: LocalState | None = None
    ) -> WorkerPart:
        """Return this worker's part of a checkpoint.

        Only rank 0's part has `params`, `moments`, the buffers and the shared values. If `moments` is None, they are
        those of the worker's optimizer.
        """
        w = self.w
        if w.tables is not None:
            w.tables.settle()
        if w.rank:
            return WorkerPart(w.position, None, {}, {}, torch.get_rng_state(), own, {}, w.done)
        if moments is None:
            moments = {} if w.local is None else w.local.moments()
        shared = {name: value.cpu().clone() for name, value in w.shared.items()}
        held = None if params is None else params.cpu().clone()
        return WorkerPart(w.position, held, moments, self.buffers(), torch.get_rng_state(), own, shared, w.done)

    def _load(self, state: Snapshot | LocalState) -> None:
        """Copy parameters, moments and buffers into the worker."""
        self.w.params = state.params
        self.load_buffers(state.buffers)
        if self.w.local is not None:
            self.w.local.load(state.moments)

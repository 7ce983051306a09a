"""The base class of loops: how a family runs a round, what its state is, and what is evaluated.

`rayps.worker.loop_of_family` maps a strategy to its loop. A user's strategy may bring its own loop: a subclass of
`Loop`, or of a family's loop, named by `Strategy.loop = "module:Class"`.
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

Companions: TypeAlias = dict[str, Any]  # objects that families keep on a worker between generations, by "module:Class"


class Loop:
    """Runs a strategy's rounds on one worker `w`, whose class `view` has the methods of the strategy's family."""

    view: ClassVar[type[Worker]] = Worker
    w: Worker

    def __init__(self, workload: Workload, plan: WorkerPlan, peers: WorkerConnections, device: str = "cpu") -> None:
        """Build the worker; call `load_state_dict` next.

        Raises:
            WorkloadError, DataError: the user's code failed.
        """
        self.w = self.view(workload, plan, peers, device)
        self.w.position = plan.start

    # ---- rounds

    def join(self, companions: Companions) -> None:
        """Receive the objects that families store on this worker between generations.

        Their keys are their classes as "module:Class". See `WorkerActor.companion`.
        """

    def begin(self, stopped: Callable[[], bool]) -> None:
        """Prepare the first round. `stopped()` returns whether the plan was ended from outside."""
        self.w.flat.model.train()
        self.w.plan.strategy.begin(self._view())

    def run_round(self) -> None:
        """Run one round: set the schedule's rates, then call the strategy's `round`."""
        if self.w.local is not None:
            self.w.local.at(self.w.position)
        self.w.plan.strategy.round(self._view())

    def finish(self) -> None:
        """End the plan: all workers then hold the consensus. Raises LinkError."""
        self.w.plan.strategy.finish(self._view())
        agreed = self.consensus()
        if agreed is not None:
            self.w.params = agreed

    def retain(self, round: int) -> None:
        """Retain the values that a checkpoint after `round` contains besides the result of `state_dict`."""

    def close(self) -> None:
        """Release the loop's resources; called after an error too."""
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
        """Return the vector on which the workers would agree if training ended now; None = the parameters as they are.

        A collective: all workers call it in the same round. Raises LinkError.
        """
        agreed: Tensor | None = self.w.plan.strategy.consensus(self._view())
        return agreed

    def evaluation_params(self) -> Tensor | None:
        """Return the parameters to evaluate during the plan; None = the worker's own parameters. Raises LinkError."""
        return self.consensus()

    def evaluate(self, vector: Tensor | None = None) -> dict[str, tuple[float, int]]:
        """Evaluate the model: metric -> (sum, samples) over this worker's share.

        `vector` replaces the parameters first.
        """
        if vector is not None:
            self.w.params = vector
        return evaluated(self.w)

    # ---- state

    def state_dict(self, *, together: bool) -> WorkerPart:
        """Return the worker's part of a checkpoint, as copies on the CPU.

        `together`: all workers call it in this round, so that the part may hold the consensus. Raises LinkError.
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
        else:  # ranks that share a layer draw the same random numbers
            torch.manual_seed(w.plan.seed * 1_000_003 + w.plan.rank - w.plan.place.tensor)

    def buffers(self) -> dict[str, Tensor]:
        """Return the model's buffers and frozen parameters by name, as copies on the CPU."""
        return {name: value.detach().cpu().clone() for name, value in self.w.part.beside.items()}

    def load_buffers(self, buffers: dict[str, Tensor]) -> None:
        """Copy buffers into the model, by name; unknown names are ignored."""
        with torch.no_grad():
            for name, value in self.w.part.beside.items():
                if name in buffers:
                    value.copy_(buffers[name])

    # ---- for subclasses

    def _view(self) -> Any:
        """Return the worker as it is passed to the strategy's `round`.

        `WorkerView` declares the methods of all families; `w` has only those of its own family.
        """
        return self.w

    def _part(
        self, params: Tensor | None, moments: optim.Moments | None = None, own: LocalState | None = None
    ) -> WorkerPart:
        """Return this worker's part of a checkpoint.

        Only rank 0's part has `params`, the `moments` (None = those of the local optimizer), the buffers and the shared
        values.
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

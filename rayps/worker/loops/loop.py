"""The base class of loops: how a family of strategies runs a round, what its state is, and what is evaluated.

`rayps.worker.loops.loop_of_family` maps a strategy to its loop. A user's strategy may have its own loop. This is a
subclass of `Loop`, or of a family's loop, which `Strategy.loop = "module:Class"` names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar, TypeAlias

import torch
from rayps_client.errors import ConfigError
from torch import Tensor

from rayps.core.job.records import Point
from rayps.core.metrics import Totals
from rayps.core.rows.rank_seed import derive_rank_seed, derive_seed_after
from rayps.tensors import optim, weight_average
from rayps.tensors.learning_rate import read_rates
from rayps.tensors.random_state import seed_torch
from rayps.tensors.snapshot import Snapshot
from rayps.tensors.training_state import TrainingState
from rayps.worker.connections import WorkerConnections
from rayps.worker.core import Worker, evaluate_share
from rayps.worker.exchange.step_flags import StepFlags
from rayps.worker.handover import HeldState
from rayps.worker.plan import WorkerPart, WorkerPlan
from rayps.worker.privacy import Privacy
from rayps.worker.rows.batches import cursor_of
from rayps.workload.base import Workload

Companions: TypeAlias = dict[str, Any]  # from "module:Class" to the object that a family stores between generations


class Loop:
    """Runs a strategy's rounds on one worker `w`. The class of `w` is `view`, with the methods of the family."""

    view: ClassVar[type[Worker]] = Worker
    # whether a worker retains its part at each boundary, before the driver asks for one: see
    # `rayps.runtime.results.snapshots`
    retains_unasked: ClassVar[bool] = True
    w: Worker
    # counts the time inside a block as a wait for the peer with this name; set by the run that has the time account
    waits_for: Callable[[str], AbstractContextManager[object]] = nullcontext
    push_rest_at: int | None = None  # the step as which a leaver pushes the rest of its compressed gradients

    def __init__(self, workload: Workload, plan: WorkerPlan, peers: WorkerConnections, device: str = "cpu") -> None:
        """Build the worker. Call `load_state_dict` next.

        Raises:
            WorkloadError, DataError: the user's code failed.
        """
        self.w = self.view(workload, plan, peers, device)
        # after the newest complete round: its number, the buffers and the shared values; None before the first one
        self._kept: tuple[int, dict[str, Tensor], dict[str, Tensor]] | None = None
        self._kept_scaling: dict[str, Tensor] = {}
        self._loaded: dict[str, int] = {}  # from a frozen parameter's name to its version when the state was loaded
        self.w.position = plan.start

    # ---- rounds

    def join(self, companions: Companions) -> None:
        """Receive the objects that families store on this worker between generations: see `WorkerActor.companion`."""

    def begin(self, stopped: Callable[[], bool]) -> None:
        """Prepare the first round. `stopped()` returns whether the plan was ended from outside."""
        w = self.w
        if w.members is not None:
            w.members.begin()
        w.plan.strategy.begin(self._view())
        if w.privacy is not None:
            w.privacy.begin(stopped)
            self._end_by_budget(w.privacy)

    def await_batch(self, stopped: Callable[[], bool]) -> bool:
        """Wait until there is a batch for the next round. Return False if the plan ends before it.

        Raises LinkError if a connection fails, or the driver does not answer.
        """
        return True

    def begin_round(self) -> None:
        """Prepare the flags of the next round."""
        if self.w.batches.agrees:
            self._read_flags().begin()

    def run_round(self) -> None:
        """Run one round: set the learning rates by the schedule, then call the strategy's `round`.

        Raises ConfigError if the worker has members, and the strategy's round has not asked them.
        """
        if self.w.privacy is not None:
            self.w.privacy.seed_step(self.w.position)
        if self.w.local is not None:
            self.w.local.at(self.steps_before_round())
        if self.w.members is None:
            self.w.plan.strategy.round(self._view())
        else:
            self.w.members.run_round(partial(self.w.plan.strategy.round, self._view()))

    def steps_before_round(self) -> int:
        """Return the number by which the schedule knows the next round."""
        skipped = self.w.scaling.skipped if self.w.workload.schedule_every == "step" else 0
        return max(0, self.w.position - skipped)  # a resume may have renumbered the rounds

    def agree(self) -> bool:
        """Exchange what the workers must know to end an epoch together. Return whether they did so in this round.

        Only data without a length needs this. Raises LinkError if a connection fails.
        """
        return False

    def end_round(self) -> None:
        """End the epoch, and the phase after its last epoch, if the data has no length and has ended.

        Under privacy, end the phase if the budget allows no further step.
        """
        w = self.w
        if w.members is not None:
            w.members.end_round()
        if w.privacy is not None:
            self._end_by_budget(w.privacy)
        if not (w.batches.agrees and self.agree() and w.batches.is_over(self._read_flags())):
            return
        epoch = w.batches.end_epoch()
        last = w.plan.last_epoch
        if last is not None and epoch >= last:
            w.done, w.reason = True, f"the data has ended in epoch {epoch}"

    def _end_by_budget(self, privacy: Privacy) -> None:
        """End the phase on all workers in the same round, after the last step that the budget allows."""
        reason = privacy.end_reason(self.w.position)
        if reason is not None:
            self.w.done, self.w.reason = True, reason

    def finish(self) -> None:
        """End the plan, after which all workers have the consensus. Raises LinkError if a connection fails."""
        self.w.plan.strategy.finish(self._view())
        agreed = self.consensus()
        if agreed is not None:
            self.w.params = agreed

    def settle(self) -> None:
        """Wait until the servers, if there are any, have what this worker has sent. Called before a pause."""

    def retain(self, round: int) -> None:
        """Retain what a checkpoint after `round` contains in addition to the result of `state_dict`."""

    def abandon(self) -> None:
        """End what the loop does in the background after its last round. Any thread may call it."""

    def close(self) -> None:
        """Release the loop's resources. This is also called after an error."""
        self.w.batches.close()
        if self.w.members is not None:
            self.w.members.close()
        if self.w.privacy is not None:
            self.w.privacy.close()
        if self.w.tables is not None:
            self.w.tables.close()

    def point(self) -> Point:
        """Return the metrics of the last round."""
        w, done = self.w, self.w.position - 1
        point = {"kind": "round", "round": done, "epoch": w.batches.epoch_of(done)[0], **w.meter.point()}
        point |= w.log.take_numbers() | w.part.facts()
        step = self.step_facts()
        point |= {"step": step} if step else {}
        return point | (w.tables.point() if w.tables is not None else {})

    def step_facts(self) -> dict[str, float]:
        """Return the learning rates of the last round's step, and what is known of the norm of its gradient.

        See `read_rates` and `NormClip.take`. The rows of sparse tables have gradients of their own, so that the norm of
        the whole gradient is not known.
        """
        norm = self.w.clip.take()
        return read_rates(self._read_groups()) | (norm if self.w.tables is None else {})

    def _read_groups(self) -> Sequence[optim.Group]:
        """Return the groups of the optimizer that takes the steps, with the values of the last round."""
        return () if self.w.optimizer is None else self.w.optimizer.param_groups

    # ---- the state in memory, from which other workers continue

    def keep_round(self) -> None:
        """Record, after a complete round, what the next round may change before all workers have completed it."""
        w = self.w
        self._kept = w.position, self.buffers(), {name: value.clone() for name, value in w.shared.items()}
        self._kept_scaling = w.scaling.state()

    @property
    def kept_round(self) -> int | None:
        """The round of the state that `held_state` returns; None if there is none."""
        return None if self._kept is None else self._kept[0]

    def held_state(self) -> HeldState | None:
        """Return the state after the newest complete round, or None if there is none yet.

        A round that has not ended on all workers has changed no parameter: a worker steps after its last exchange.
        """
        w = self.w
        if self._kept is None:
            return None
        round, buffers, shared = self._kept
        moments = {} if w.local is None else w.local.moments()
        shared = {name: value.cpu() for name, value in shared.items()} | self._kept_scaling
        return HeldState(round, TrainingState(self.w.flat.vector.detach().cpu().clone(), moments, buffers, shared))

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

    def evaluate(self, vector: Tensor | None = None) -> Totals:
        """Evaluate the model over this worker's share: return a dict from a metric's name to its `Total`.

        `vector` replaces the worker's parameters first; None means that the parameters do not change.
        """
        if vector is not None:
            self.w.params = vector
        return evaluate_share(self.w)

    # ---- the average of the weights

    def average_weights(self) -> None:
        """Update the workload's average, if it has one, by this worker's parameters after the round."""
        average = self.w.workload.average
        if average is not None:
            buffers, steps = self._read_buffers_of_params(), self._count_steps_of_params()
            weight_average.update(average, self._average_state(), self.w.params, buffers, steps)

    def evaluated_state(self) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Return the vector and the buffers to evaluate during the plan: the workload's average if it has one.

        Without an average, or before its first step, the vector is `evaluation_params()`. Workers in step return the
        buffers of rank 0, which are also saved; other workers have their own. Buffers that the worker has anyway are
        left out. This is a collective: all workers call it in the same round. Raises LinkError if a connection fails.
        """
        params, buffers = self.evaluation_params(), self._read_module_buffers()
        vector, average = self.w.params if params is None else params, self.w.workload.average
        found = weight_average.read_average(average, self._average_state(), vector, buffers, self._count_steps())
        if found is not None:
            params, buffers = self._average_over_job(found[0]), buffers | found[1]
        return params, self.w.of_first_rank(buffers) if self.w.size > 1 else {} if found is None else found[1]

    def _average_state(self) -> dict[str, Any]:
        """Return the dict that has the state of the average: `shared`, because parameters are equal on all workers."""
        return self.w.shared

    def _read_module_buffers(self) -> dict[str, Tensor]:
        """Return the buffers of the worker's part of the model, by name, without a copy."""
        held = self.w.part.beside
        return {name: value for name, value in self.w.part.module.named_buffers() if name in held}

    def _read_buffers_of_params(self) -> dict[str, Tensor]:
        """Return the buffers after the steps that led to the worker's parameters after a round."""
        return self._read_module_buffers()

    def _count_steps_of_params(self) -> int:
        """Return the number of steps that led to the worker's parameters after a round."""
        return self._count_steps()

    def _count_steps(self) -> int:
        """Return the number of rounds without those that all workers skipped."""
        return self.w.position - self.w.scaling.skipped_by_all

    def _average_over_job(self, own: Tensor) -> Tensor:
        """Return the job's average; `own` is this worker's."""
        return own

    # ---- state

    def state_dict(self, *, together: bool) -> WorkerPart:
        """Return the worker's part of a checkpoint, as copies on the CPU.

        `together`: whether all workers call this method in this round. If so, the part has the consensus. Raises
        LinkError if a connection fails.
        """
        found = self.consensus() if together else None
        return self._make_part(self.w.flat.vector if found is None else found)

    def load_state_dict(self, snapshot: Snapshot) -> None:
        """Restore a snapshot: parameters, optimizer state, buffers and this rank's random state.

        Raises:
            CheckpointError: the snapshot belongs to another model.
        """
        w = self.w
        cursor = snapshot.cursors.get(w.rank)
        w.batches.restore(None if cursor is None else cursor_of(cursor))
        snapshot.check(w.layout)
        shared = dict(snapshot.shared)
        w.scaling.take(shared)
        self.load_buffers({name: value for name, value in snapshot.buffers.items() if name in snapshot.frozen})
        self._load(snapshot)
        self._loaded = {name: p._version for name, p in self._read_frozen().items()}
        w.shared = {name: value.clone().to(w.device) for name, value in shared.items()}
        if w.members is not None:
            w.members.restore(snapshot, w.shared)
        average = w.workload.average
        if average is not None and weight_average.STEPS in w.shared:  # servers have stepped after the last pull
            steps = snapshot.clock - w.scaling.skipped_by_all
            weight_average.update(average, w.shared, snapshot.params.to(w.device), self._read_module_buffers(), steps)
        if w.plan.elastic is not None or w.plan.private is not None:
            self.seed_after(w.plan.start)
        elif w.plan.rank in snapshot.rng:
            torch.set_rng_state(snapshot.rng[w.plan.rank])
        else:  # the workers of a tensor group, which share each layer, draw the same random numbers
            torch.manual_seed(derive_rank_seed(w.plan.seed, w.plan.rank - w.plan.place.tensor))

    def seed_after(self, round: int) -> None:
        """Set torch's random state to one that follows from the seed, the rank and `round`, and from nothing else."""
        seed_torch(derive_seed_after(self.w.plan.seed, self.w.plan.rank, round))

    def _read_random_state(self) -> Tensor | None:
        """Return what a checkpoint has of torch's random state. A private job saves none: its draws are secret."""
        return None if self.w.plan.private is not None else torch.get_rng_state()

    def buffers(self) -> dict[str, Tensor]:
        """Return a dict from the names of the model's buffers to copies on the CPU.

        It includes the parameters that need no gradient and that were changed since the state was loaded.
        """
        unchanged = {name for name, p in self._read_frozen().items() if self._loaded.get(name) == p._version}
        beside = self.w.part.beside.items()
        return {name: value.detach().cpu().clone() for name, value in beside if name not in unchanged}

    def frozen_values(self) -> dict[str, Tensor]:
        """Return the parameters that need no gradient, without a copy. Return {} if one of them was changed."""
        found = self._read_frozen()
        same = all(self._loaded.get(name) == p._version for name, p in found.items())
        return {name: p.detach() for name, p in found.items()} if same else {}

    def _read_frozen(self) -> dict[str, Tensor]:
        """Return the model's parameters that need no gradient, by name."""
        beside = self.w.part.beside
        return {name: p for name, p in self.w.part.module.named_parameters() if name in beside}

    def exchange_buffers(self, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy named buffers into the model, and return copies of those that they replace."""
        replaced = {name: value.clone() for name, value in self._read_module_buffers().items() if name in buffers}
        self.load_buffers(buffers)
        return replaced

    def load_buffers(self, buffers: dict[str, Tensor]) -> None:
        """Copy named buffers into the model. Unknown names are ignored."""
        with torch.no_grad():
            for name, value in self.w.part.beside.items():
                if name in buffers:
                    value.copy_(buffers[name])

    # ---- for subclasses

    def _read_flags(self) -> StepFlags:
        """Return the flags that `agree` has exchanged.

        Raises ConfigError if this loop's workers exchange none.
        """
        raise ConfigError(
            f"the data has no length, and the workers of the loop {type(self).__name__} cannot agree on its end: use "
            "a loop derived from SyncGradients or LocalUpdates, or give data with a length"
        )

    def _view(self) -> Any:
        """Return `w` as the argument of the strategy's `round`.

        The type is `Any`, because `WorkerView` declares the methods of all families, and `w` has those of its own.
        """
        return self.w

    def _make_part(
        self, params: Tensor | None, moments: optim.Moments | None = None, own: TrainingState | None = None
    ) -> WorkerPart:
        """Return this worker's part of a checkpoint.

        Only rank 0's part has `params`, `moments`, the buffers and the shared values; if rows are leased, every part
        has them, because there may be no rank 0. If `moments` is None, they are those of the worker's optimizer.
        """
        w = self.w
        if w.tables is not None:
            w.tables.settle()
        if w.members is not None:
            w.members.save(w.shared)
        found = w.batches.cursor()
        cursor = None if found is None else found.to_json()
        if w.rank and not w.plan.leased:
            return WorkerPart(w.position, None, {}, {}, self._read_random_state(), own, {}, w.done, cursor)
        if moments is None:
            moments = {} if w.local is None else w.local.moments()
        shared = {name: value.cpu().clone() for name, value in w.shared.items()} | w.scaling.state()
        held = None if params is None else params.cpu().clone()
        return WorkerPart(
            w.position, held, moments, self.buffers(), self._read_random_state(), own, shared, w.done, cursor
        )

    def _load(self, state: Snapshot | TrainingState) -> None:
        """Copy parameters, moments and buffers into the worker."""
        self.w.params = state.params
        self.load_buffers(state.buffers)
        if self.w.local is not None:
            self.w.local.load(state.moments)

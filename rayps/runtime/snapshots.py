"""Collect, assemble and save the states of a run.

A round may take one millisecond, and the time between polls 100 ms. If members retained only their newest parts, they
would seldom have parts of the same round. Therefore the driver chooses a round that no member has reached yet. If a
member has passed that round before the request arrives, the driver doubles the distance to the next chosen round.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rayps.core.errors import ConfigError, PlaceError
from rayps.core.phase_rounds import Boundary
from rayps.core.strategy_families import ends_together
from rayps.core.urls import Location
from rayps.core.values import JsonObject
from rayps.parallel.division.division import Division
from rayps.ps.server.dense_segment import ShardPart
from rayps.runtime.journal import Journal
from rayps.runtime.phases import RunPlan
from rayps.runtime.unfinished_uploads import report_unfinished
from rayps.strategies.job import JobSpec
from rayps.tensors import checkpoint, optim, weight_average
from rayps.tensors.checkpoint import Meta, SavedState
from rayps.tensors.checkpoint_place import SECONDS, CheckpointPlace
from rayps.tensors.learning_rate import Ticks
from rayps.tensors.snapshot import Snapshot
from rayps.worker.plan import WorkerPart
from rayps.workload import parameters
from rayps.workload.base import Workload
from rayps.workload.model import drawn_apart

if TYPE_CHECKING:
    from rayps.runtime.callbacks import CallbackRunner
    from rayps.runtime.worker_group import WorkerGroup


MISSED = 3  # checkpoints in a row that a remote place may fail to take before the run fails


class Checkpointer:
    """Holds the newest state of a run in memory, and saves it on disk if the run has a folder."""

    def __init__(
        self,
        spec: JobSpec,
        journal: Journal,
        folder: Location | None,
        resume: Location | None,
        callbacks: CallbackRunner,
        workload: Workload,
    ) -> None:
        """Prepare: `folder` is for new checkpoints, `resume` is the checkpoint to start from; None if there is none.

        Each is a path, or a URL of a place that is not local.
        The parameters and the average of `workload` are written to each checkpoint.
        """
        self._callbacks = callbacks
        self._recorded: JsonObject = {
            "params": parameters.effective(workload),
            "average": weight_average.to_json(workload.average),
        }
        self.folder, self.resume, self.saved = folder, resume, resume
        self._place = None if folder is None else CheckpointPlace.of(folder, max(spec.timeout, SECONDS))
        self._unwritten = 0  # checkpoints in a row that a remote place did not take
        self.newest: Snapshot | None = None
        # the states of sparse tables at the end of the run, if no checkpoint has them
        self.tables: dict[str, list[bytes]] = {}
        self._spec, self._journal = spec, journal

    @property
    def snapshot(self) -> Snapshot:
        """The newest state."""
        assert self.newest is not None, "first() comes first"
        return self.newest

    @property
    def round(self) -> int:
        """The round of the newest state; 0 before there is one."""
        return 0 if self.newest is None else self.newest.round

    def first(self, group: WorkerGroup, workload: Workload, plan: RunPlan, *, again: bool = False) -> Snapshot:
        """Return the first state: drawn from the seed, read from files, or copied from the space to branch from.

        `again`: this driver replaces one that died.

        Raises:
            CheckpointError: the checkpoint cannot be used, or belongs to another model.
            NotFound, ConfigError: the space to branch from does not exist, or belongs to another model.
            TrainingError: the state is not finite.
        """
        self._check_place(group)
        # a model that no worker can hold whole is initialized in this process
        draw = partial(drawn_apart, workload) if any(plan.divisions) else group.initial
        found = draw(self._spec.seed)
        if self.resume is not None:
            found = self._resumed(self.resume, found, group, plan, again)
        else:
            if self._spec.branch is not None and group.space is not None:
                drawn, strategy = found, plan.phases[0].strategy
                found = group.space.branch(self._spec.branch, strategy, drawn.layout)
                message = f"the job starts with the current parameters of space {self._spec.branch!r}"
                self._journal.event("branched", message)
                found.buffers = drawn.buffers
            if plan.start is not None:
                plan.start.fill(found)
                if plan.start.tables is not None and group.space is not None and group.space.tables:
                    group.space.load_tables(plan.start.tables, same=False)
                self._journal.event("started_from", plan.start.message, path=str(plan.start.path))
            found.enter_phase(plan.calendar.spans[0])
        self.newest = found
        checkpoint.must_be_finite(found.to_state(), "before the first round")
        return found

    def _check_place(self, group: WorkerGroup) -> None:
        """Refuse sparse tables in a remote place, and report unfinished uploads there."""
        given = [each for each in (self.folder, self.resume) if each is not None and not isinstance(each, Path)]
        if given and group.space is not None and group.space.tables:
            raise ConfigError(
                f"the model has sparse tables, whose rows are saved in local folders only, and {given[0]} is not one:\n"
                "give checkpoint=FOLDER (--checkpoint DIR), a folder that the driver can write",
                field="checkpoint",
            )
        if self._place is not None:
            report_unfinished(self._place, self._journal)

    def _resumed(self, path: Location, drawn: Snapshot, group: WorkerGroup, plan: RunPlan, again: bool) -> Snapshot:
        state = checkpoint.load(path)
        saved = Snapshot.from_state(state)
        round = saved.round
        self._callbacks.restore(state.meta, again=again)
        saved.check(drawn.layout)
        ticks, was = Ticks(saved.origin, saved.steps_per_epoch), state.meta.get("schedule")
        now = plan.schedule.facts(saved.layout, saved.round, ticks, saved.skipped).get("schedule")
        if was != now:
            self._journal.event(
                "warning",
                f"{path} was saved with the schedule {was}, and this run has the schedule {now}: the run continues "
                "with its own schedule",
            )
        before = len(saved.positions)
        saved.resume(plan.calendar)
        phase = plan.phases[plan.calendar.spans.index(plan.calendar.at(saved.round))]
        if ends_together(phase.strategy.topology):
            saved.check_passes(phase.name)
        if saved.round != round:  # this run has another number of rounds per epoch
            self._callbacks.renumber(saved.round)
        if group.space is not None and group.space.tables:
            group.space.load_tables(Path(path) / checkpoint.TABLES, before == len(saved.positions))
        with checkpoint.tables_of(path) as tables:
            group.client_states.read(tables, saved.round)
        self._journal.event("resumed", f"resumed from {path} at round {saved.round}", round=saved.round)
        for warning in of_another(state.meta, self._spec):
            self._journal.event("warning", f"{path} {warning}: is it the right folder?")
        if saved.round >= plan.calendar.rounds:
            self._journal.event(
                "warning",
                f"the checkpoint is of round {saved.round} and the run ends at round {plan.calendar.rounds}: "
                "no training is left, and the checkpoint is only evaluated; give more epochs or steps to train further",
            )
        return saved

    def collect(self, group: WorkerGroup, plan: RunPlan, generation: int) -> None:
        """Fetch a newer state of which every member retains its part, and save it. Do nothing if there is none.

        Raises:
            TrainingError: the state is not finite.
            CheckpointError: the checkpoint cannot be written.
        """
        newer = group.collect(self.snapshot)
        if newer is None:
            return
        ticks = Ticks(newer.origin, newer.steps_per_epoch)
        schedule = plan.schedule.facts(newer.layout, newer.round, ticks, newer.skipped)
        maker = {"workload": self._spec.workload, "strategy": str(self._spec.strategy), "seed": self._spec.seed}
        recorded = self._recorded | self._callbacks.state()
        state = newer.to_state(generation=generation, **maker, **schedule, **recorded)
        checkpoint.must_be_finite(state, f"after round {newer.round - 1}", round=newer.round - 1)
        self.newest = newer
        if self._place is not None:
            self._save(self._place, newer, state, group, last=newer.round >= plan.calendar.rounds)
        group.saved(newer)

    def _save(self, place: CheckpointPlace, newer: Snapshot, state: SavedState, group: WorkerGroup, last: bool) -> None:
        """Write a checkpoint. If a remote place does not take it, the run goes on, at most `MISSED` times in a row.

        Raises:
            CheckpointError: the checkpoint cannot be written. A PlaceError is raised for the run's last state, too.
        """
        write_tables = group.space.write_tables(newer.round) if group.space is not None else group.client_states.writer
        try:
            saved = checkpoint.save(place, newer.round, state, self._spec.keep_checkpoints, write_tables=write_tables)
        except PlaceError as error:
            self._unwritten += 1
            if last or self._unwritten > MISSED:
                raise
            self._journal.event(
                "warning",
                f"the checkpoint of round {newer.round} was not written: {error.message.splitlines()[0]}; the run goes "
                f"on, and tries again with its next checkpoint, at most {MISSED} times in a row",
            )
            return
        self.saved, self._unwritten = saved, 0
        if group.space is not None and isinstance(saved, Path):
            group.space.tables_kept(saved / checkpoint.TABLES)
        self._journal.event("checkpoint", f"saved round {newer.round}", round=newer.round, path=str(saved))
        self._callbacks.saved(saved, newer.round)

    def describe_saved(self, at: int) -> str:
        """Return a text on which checkpoint remains of a run that was stopped at round `at`."""
        if self.folder is None or self.saved is None:
            return "nothing was kept"
        return f"{self.saved} is kept" + (f", of round {self.round}" if self.round < at else "")


def of_another(meta: Meta, spec: JobSpec) -> list[str]:
    """Return a warning for each difference between a checkpoint's workload or seed and those of `spec`."""
    was, now = (str(name).rpartition(":")[2] for name in (meta.get("workload", spec.workload), spec.workload))
    found = [] if was == now else [f"was saved by workload {was}, and this run trains {now}"]
    seed = meta.get("seed", spec.seed)
    if seed != spec.seed:
        found.append(f"was saved with seed {seed}, and this run has {spec.seed}: the order of rows differs")
    return found


class SnapshotSchedule:
    """Chooses the round of the next snapshot: a boundary of the generation or, after `snapshot_soon`, any round."""

    def __init__(self, boundary: Boundary, *, each: bool = False, in_order: bool = False) -> None:
        """Prepare. `each`: a snapshot is taken at every boundary, because workers wait for it.

        `in_order`: of the states that all members retain, the oldest is taken first, because workers wait for the state
        of some rounds that are no boundaries.
        """
        self.each, self.in_order = each, each or in_order
        self.round = 0  # the chosen round; 0 if no round was chosen yet
        self._boundary = boundary
        self._lead = 1  # rounds between the fastest member and the chosen round
        self._soon = False

    def snapshot_soon(self) -> None:
        """Take the next snapshot as soon as possible, also at a round that is not a boundary."""
        if not self._soon:
            self._soon, self.each, self.in_order, self.round = True, False, False, 0

    def choose_round(self, members: list[tuple[int, list[int]]], collected: int) -> int:
        """Choose the round whose parts all members must retain, and return this round.

        `members` has (progress, retained rounds) of each of these members. `collected` is the round of the newest state
        that the driver has.
        """
        if self.each:
            self.round = self._boundary.following(collected + 1)
            return self.round
        if self.round > collected:
            if not any(reached > self.round and self.round not in held for reached, held in members):
                return self.round
            self._lead *= 2  # a member had passed the round before it received the request
        soonest = max(reached for reached, _ in members) + self._lead
        self.round = min(soonest, self._boundary.end) if self._soon else self._boundary.following(soonest)
        return self.round


def columns_of(snapshot: Snapshot, division: Division | None) -> list[Snapshot]:
    """Return the parts of a state, one for each column. If a replica is one worker, return a list of the state only."""
    if division is None:
        return [snapshot]
    return [division.cut(snapshot, column) for column in range(len(division.columns))]


def assemble(base: Snapshot, workers: dict[int, WorkerPart | None], shards: list[ShardPart]) -> Snapshot:
    """Return one snapshot from all members' parts of the same round.

    `workers` is a dict from each rank to that worker's part, which is None if the worker has no part yet. If workers
    run in step, every worker has a part.
    """
    from_shards, lead = bool(shards), next(iter(workers.values()))
    there = [part for part in workers.values() if part is not None]
    if from_shards:
        params = torch.cat([part.params for part in shards])
        moments = optim.join([part.moments for part in shards], base.layout)
    else:
        assert lead is not None, "workers in step all have their part"
        params, moments = _agreed(there), lead.moments
    # at the boundary of a round, each shard has a position of each worker; the smallest one counts
    positions = (
        [min(marks) for marks in zip(*(part.ledger.marks.values() for part in shards), strict=True)]
        if from_shards
        else [part.round for part in there]
    )
    own = {rank: part.own for rank, part in workers.items() if part is not None and part.own is not None}
    shared = {} if lead is None else lead.shared | weight_average.mean_of([state.memory for state in own.values()])
    changed = {} if lead is None else lead.buffers
    parts_of_replicas = enumerate(workers.values())  # in the order of ranks, a column has replicas 0, 1, ...
    cursors = {i: part.cursor for i, part in parts_of_replicas if part is not None and part.cursor is not None}
    found = Snapshot(
        base.layout,
        params,
        moments,
        base.buffers | changed,
        {r: p.rng for r, p in workers.items() if p is not None},
        positions,
        base.steps_per_epoch,
        ring=base.ring,
        ledgers=[(part.lo, part.lo + part.params.numel(), part.ledger) for part in shards],
        origin=base.origin,
        strategy=base.strategy,
        own=own,
        shared=shared,
        frozen=base.frozen,
        frozen_hash=base.frozen_hash,
        cursors=cursors,
    )
    found.thaw(changed)
    return found


def in_columns(
    division: Division,
    base: Snapshot,
    columns: list[int],
    given: list[WorkerPart | None],
    of: list[list[int]],
    held: list[ShardPart],
) -> Snapshot:
    """Return one snapshot as `assemble` does, for replicas of several workers.

    `given` has the part and `columns` the column of each worker. `held` has the shards' parts, and `of` the indices in
    `held` of each column's shards.
    """
    parts = []
    for i, column in enumerate(division.columns):
        workers = {rank: part for rank, part in enumerate(given) if columns[rank] == i}
        shards = [held[index] for index in of[i]] if of else []
        own = replace(base, layout=column.layout, buffers={}, frozen=frozenset(), frozen_hash="")
        parts.append(assemble(own, workers, shards))
    found = division.join(parts, base)
    found.frozen, found.frozen_hash = base.frozen, base.frozen_hash
    found.thaw({name for part in parts for name in part.buffers})
    return found


def _agreed(parts: list[WorkerPart]) -> Tensor:
    """Return the parameters that all workers share, or the mean of the workers' own parameters if these differ.

    They may differ if the parts were not taken at a boundary of the generation, as for the checkpoint at a stop.
    """
    found: Tensor | None = parts[0].params
    if found is not None:
        return found
    return torch.stack([part.own.params for part in parts if part.own is not None]).mean(0)

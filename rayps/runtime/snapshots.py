"""The states of a run: the first state, the round of the next one, how its parts are assembled, where it is saved.

A round may take one millisecond and the time between polls a hundred, so members that retain only their newest parts
would seldom have parts of the same round. Therefore the driver chooses a round that no member has reached yet, and
doubles the distance to that round if a member had passed it before the request arrived.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rayps.core.phase_rounds import Boundary
from rayps.parallel.division.division import Division
from rayps.ps.server.dense_segment import ShardPart
from rayps.runtime.journal import Journal
from rayps.runtime.phases import RunPlan
from rayps.strategies.job import JobSpec
from rayps.tensors import checkpoint, optim
from rayps.tensors.checkpoint import Meta
from rayps.tensors.learning_rate import Ticks
from rayps.tensors.snapshot import Snapshot
from rayps.worker.plan import WorkerPart
from rayps.workload.base import Workload
from rayps.workload.model import drawn_apart

if TYPE_CHECKING:
    from rayps.runtime.worker_group import WorkerGroup


class Checkpointer:
    """The newest state of a run, in memory, and on disk if the run has a folder."""

    def __init__(self, spec: JobSpec, journal: Journal, folder: Path | None, resume: Path | None) -> None:
        """Set the folders: `folder` for checkpoints; `resume` is the checkpoint to start from."""
        self.folder, self.resume, self.saved = folder, resume, resume
        self.newest: Snapshot | None = None
        self.tables: dict[str, list[bytes]] = {}  # states of sparse tables at the end, if no checkpoint has them
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

    def first(self, group: WorkerGroup, workload: Workload, plan: RunPlan) -> Snapshot:
        """Return the first state: drawn from the seed, read from a checkpoint, or taken from the space to branch from.

        Raises:
            CheckpointError: the checkpoint cannot be used, or belongs to another model.
            NotFound, ConfigError: the space to branch from does not exist, or belongs to another model.
            TrainingError: the state is not finite.
        """
        # a model that no worker can hold whole is initialized in this process
        draw = partial(drawn_apart, workload) if any(plan.divisions) else group.initial
        found = draw(self._spec.seed)
        if self.resume is not None:
            found = self._resumed(self.resume, found, group, plan)
        else:
            if self._spec.branch is not None and group.space is not None:
                drawn, strategy = found, plan.phases[0].strategy
                found = group.space.branch(self._spec.branch, strategy, drawn.layout)
                message = f"the job starts with the current parameters of space {self._spec.branch!r}"
                self._journal.event("branched", message)
                found.buffers = drawn.buffers
            found.enter_phase(plan.calendar.spans[0])
        self.newest = found
        checkpoint.must_be_finite(found.to_state(), "before the first round")
        return found

    def _resumed(self, path: Path, drawn: Snapshot, group: WorkerGroup, plan: RunPlan) -> Snapshot:
        state = checkpoint.load(path)
        saved = Snapshot.from_state(state)
        saved.check(drawn.layout)
        ticks, was = Ticks(saved.origin, saved.steps_per_epoch), state.meta.get("schedule")
        now = plan.schedule.facts(saved.layout, saved.round, ticks).get("schedule")
        if was != now:
            self._journal.event(
                "warning",
                f"{path} was saved with the schedule {was}, and this run has the schedule {now}: the run continues "
                "with its own",
            )
        before = len(saved.positions)
        saved.resume(plan.calendar)
        if group.space is not None and group.space.tables:
            group.space.load_tables(path / checkpoint.TABLES, before == len(saved.positions))
        group.client_states.read(path / checkpoint.TABLES, saved.round)
        self._journal.event("resumed", f"resumed from {path} at round {saved.round}", round=saved.round)
        for warning in of_another(state.meta, self._spec):
            self._journal.event("warning", f"{path} {warning}: is it the right folder?")
        if saved.round >= plan.calendar.rounds:
            self._journal.event(
                "warning",
                f"the checkpoint is of round {saved.round} and the run ends at round {plan.calendar.rounds}: "
                "it is only evaluated, as no training is left; give more epochs or steps to train further",
            )
        return saved

    def collect(self, group: WorkerGroup, plan: RunPlan, generation: int) -> None:
        """Fetch a newer state of which every member retains its part, and save it; do nothing if there is none.

        Raises:
            TrainingError: the state is not finite.
            CheckpointError: the checkpoint cannot be written.
        """
        newer = group.collect(self.snapshot)
        if newer is None:
            return
        schedule = plan.schedule.facts(newer.layout, newer.round, Ticks(newer.origin, newer.steps_per_epoch))
        maker = {"workload": self._spec.workload, "strategy": str(self._spec.strategy), "seed": self._spec.seed}
        state = newer.to_state(generation=generation, **maker, **schedule)
        checkpoint.must_be_finite(state, f"after round {newer.round - 1}", round=newer.round - 1)
        self.newest = newer
        if self.folder is not None:
            write_tables = (
                group.space.write_tables(newer.round) if group.space is not None else group.client_states.beside
            )
            self.saved = checkpoint.save(self.folder, newer.round, state, write_tables=write_tables)
            if group.space is not None:
                group.space.tables_kept(self.saved / checkpoint.TABLES)
            message = f"saved round {newer.round}"
            self._journal.event("checkpoint", message, round=newer.round, path=str(self.saved))
        group.saved(newer)

    def kept(self, at: int) -> str:
        """Describe which checkpoint remains of a run that was stopped at round `at`."""
        if self.folder is None or self.saved is None:
            return "nothing was kept"
        return f"{self.saved} is kept" + (f", of round {self.round}" if self.round < at else "")


def of_another(meta: Meta, spec: JobSpec) -> list[str]:
    """Return warnings if a checkpoint was saved by another workload or with another seed than `spec`'s; [] if not."""
    was, now = (str(name).rpartition(":")[2] for name in (meta.get("workload", spec.workload), spec.workload))
    found = [] if was == now else [f"was saved by workload {was}, and this run trains {now}"]
    seed = meta.get("seed", spec.seed)
    if seed != spec.seed:
        found.append(f"was saved with seed {seed}, and this run has {spec.seed}: the order of rows differs")
    return found


class SnapshotSchedule:
    """Chooses the round of the next snapshot: at the generation's boundaries or, after `hurry`, as soon as possible."""

    def __init__(self, boundary: Boundary) -> None:
        self.round = 0  # 0 = no round was chosen yet
        self._boundary = boundary
        self._lead = 1  # rounds between the fastest member and the chosen round
        self._hurry = False

    def hurry(self) -> None:
        """Take the next snapshot at any round from now on."""
        self._hurry, self.round = True, 0

    def look(self, members: list[tuple[int, list[int]]], collected: int) -> int:
        """Choose the round whose parts all members must retain, and return it.

        `members` are (progress, retained rounds) of these members. `collected` is the round of the newest state that
        the driver has.
        """
        if self.round > collected:
            if not any(reached > self.round and self.round not in held for reached, held in members):
                return self.round
            self._lead *= 2  # a member had passed the round before it received the request
        soonest = max(reached for reached, _ in members) + self._lead
        self.round = min(soonest, self._boundary.end) if self._hurry else self._boundary.following(soonest)
        return self.round


def columns_of(snapshot: Snapshot, division: Division | None) -> list[Snapshot]:
    """Return the parts of a state by column; the state itself if a replica is one worker."""
    if division is None:
        return [snapshot]
    return [division.cut(snapshot, column) for column in range(len(division.columns))]


def assemble(base: Snapshot, workers: dict[int, WorkerPart | None], shards: list[ShardPart]) -> Snapshot:
    """Return one snapshot from all members' parts of the same round; `workers` are the workers' parts by rank.

    If workers do not run in step, a worker may have no part yet (None).
    """
    from_shards, lead = bool(shards), next(iter(workers.values()))
    there = [part for part in workers.values() if part is not None]
    if from_shards:
        params = torch.cat([part.params for part in shards])
        moments = optim.join([part.moments for part in shards], base.layout)
    else:
        assert lead is not None, "workers in step all have their part"
        params, moments = _agreed(there), lead.moments
    # shards at a round boundary have each worker's position; the slowest shard counts
    positions = (
        [min(marks) for marks in zip(*(part.ledger.marks.values() for part in shards), strict=True)]
        if from_shards
        else [part.round for part in there]
    )
    return Snapshot(
        base.layout,
        params,
        moments,
        base.buffers if lead is None else lead.buffers,
        {r: p.rng for r, p in workers.items() if p is not None},
        positions,
        base.steps_per_epoch,
        ring=base.ring,
        ledgers=[(part.lo, part.lo + part.params.numel(), part.ledger) for part in shards],
        origin=base.origin,
        strategy=base.strategy,
        own={rank: part.own for rank, part in workers.items() if part is not None and part.own is not None},
        shared={} if lead is None else lead.shared,
    )


def in_columns(
    division: Division,
    base: Snapshot,
    columns: list[int],
    given: list[WorkerPart | None],
    of: list[list[int]],
    held: list[ShardPart],
) -> Snapshot:
    """Return one snapshot as `assemble` does, for replicas of several workers.

    `given` are the workers' parts and `columns` their columns, by rank; `held` are the shards' parts, and `of` has the
    indices of each column's shards in `held`.
    """
    parts = []
    for i, column in enumerate(division.columns):
        workers = {rank: part for rank, part in enumerate(given) if columns[rank] == i}
        shards = [held[index] for index in of[i]] if of else []
        parts.append(assemble(replace(base, layout=column.layout, buffers={}), workers, shards))
    return division.join(parts, base)


def _agreed(parts: list[WorkerPart]) -> Tensor:
    """Return the parameters that workers in step share; the mean of the workers' parameters if these differ.

    They differ if the parts were not taken at one round, as for the checkpoint at a stop.
    """
    found: Tensor | None = parts[0].params
    if found is not None:
        return found
    return torch.stack([part.own.params for part in parts if part.own is not None]).mean(0)

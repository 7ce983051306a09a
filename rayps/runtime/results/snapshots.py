"""Collect, assemble and save the states of a run.

A round may take one millisecond, and the time between polls 100 ms. If members retained only their newest parts, they
would seldom have parts of the same round. Therefore the driver chooses a round that no member has reached yet. If a
member has passed that round before the request arrives, the driver doubles the distance to the next chosen round.
"""

from __future__ import annotations

import contextlib
import socket
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rayps_client import parameters
from rayps_client.errors import ConfigError, PlaceError
from rayps_client.values import JsonObject
from torch import Tensor

from rayps.core.rows.phase_rounds import Boundary
from rayps.core.strategy.strategy import StrategyView
from rayps.core.strategy.strategy_families import ends_together
from rayps.core.strategy.topology import shard_of
from rayps.core.urls import Location, is_url
from rayps.federated.client_states_backup import ClientStatesBackup
from rayps.ps.server.dense_segment import ShardPart
from rayps.runtime.driver.phases import RunPlan
from rayps.runtime.records.journal import Journal
from rayps.runtime.records.state_folder import StateFolder
from rayps.runtime.records.unfinished_uploads import report_unfinished
from rayps.runtime.results.job_clients import record_clients
from rayps.strategies.job import JobSpec
from rayps.tensors import optim, weight_average
from rayps.tensors.checkpoints import checkpoint
from rayps.tensors.checkpoints.checkpoint import Meta, SavedState
from rayps.tensors.checkpoints.checkpoint_parts import make_token, seal, write_part
from rayps.tensors.checkpoints.checkpoint_place import SECONDS, CheckpointPlace
from rayps.tensors.checkpoints.checkpoint_place import name_of as checkpoint_name
from rayps.tensors.division import Division
from rayps.tensors.flat import Layout
from rayps.tensors.learning_rate import Ticks
from rayps.tensors.snapshot import Snapshot, StateSource
from rayps.tensors.state_pieces import find_whole_shapes
from rayps.worker.plan import PartsPlan, WorkerPart
from rayps.workload.base import Workload
from rayps.workload.model import drawn_apart

if TYPE_CHECKING:
    from rayps.runtime.driver.worker_group import WorkerGroup
    from rayps.runtime.results.callbacks import CallbackRunner


MISSED = 3  # checkpoints in a row that a place may fail to take, and
MISSED_SECONDS = 300.0  # seconds from the first of them, before the run fails
_RETRY_SECONDS = 1.0  # seconds between two attempts to write the last checkpoint
LAST_SECONDS = 60.0  # seconds for which a run's last checkpoint is tried again


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
        self._unwritten: list[float] = []  # when a place did not take checkpoints in a row, by time.monotonic
        self.newest: Snapshot | None = None
        # the states of sparse tables at the end of the run, if no checkpoint has them
        self.tables: dict[str, list[bytes]] = {}
        self.clients: ClientStatesBackup | None = None  # the states of clients at the end of the run
        self._spec, self._journal = spec, journal
        # where workers write their parts if there is no folder for checkpoints
        self.scratch: StateFolder | None = None
        self._parts: PartsPlan | None = None  # where the workers of the newest generation write, if they do

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
        sharded = all(shard_of(phase.strategy) is not None for phase in plan.phases)
        if self.resume is not None:
            layout = draw(self._spec.seed).layout if any(plan.divisions) else group.layout()
            found = self._read_resumed(self.resume, layout, group, plan, again=again, stands=sharded)
        elif sharded and plan.start is None:
            found = Snapshot.without_tensors(group.layout(), StateSource())
            found.enter_phase(plan.calendar.spans[0])
        else:
            found = draw(self._spec.seed)
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

    def _read_resumed(
        self, path: Location, layout: Layout, group: WorkerGroup, plan: RunPlan, *, again: bool, stands: bool
    ) -> Snapshot:
        """Return the state of a checkpoint. If `stands`, it is without the tensors that workers read themselves."""
        if stands:
            meta, saved = checkpoint.meta_of(path), Snapshot.standing_for(_make_absolute(path))
        else:
            state = checkpoint.load(path)
            meta, saved = state.meta, Snapshot.from_state(state)
        round = saved.round
        self._callbacks.restore(meta, again=again)
        saved.check(layout)
        ticks, was = Ticks(saved.origin, saved.steps_per_epoch), meta.get("schedule")
        now = plan.schedule.facts(saved.layout, saved.round, ticks, saved.skipped).get("schedule")
        if was != now:
            self._journal.event(
                "warning",
                f"{path} was saved with the schedule {was}, and this run has the schedule {now}: the run continues "
                "with its own schedule",
            )
        before = len(saved.positions)
        plan.changes.resume(saved)
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
        for warning in of_another(meta, self._spec):
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
        try:
            newer = group.collect(self.snapshot)
        except PlaceError as error:  # a worker has not written its part
            self._miss(error, self.round, last=group.is_finished)
            return
        if newer is None:
            return
        plan.changes.collected(newer)
        ticks = Ticks(newer.origin, newer.steps_per_epoch)
        schedule = plan.schedule.facts(newer.layout, newer.round, ticks, newer.skipped)
        maker = {"workload": self._spec.workload, "strategy": str(self._spec.strategy), "seed": self._spec.seed}
        maker |= record_clients(plan.strategy_of(newer), self._spec.resources)
        recorded = self._recorded | self._callbacks.state()
        state = newer.to_state(generation=generation, **maker, **schedule, **recorded)
        checkpoint.must_be_finite(state, f"after round {newer.round - 1}", round=newer.round - 1)
        last = newer.round >= plan.calendar.rounds
        if newer.source is not None:
            self._seal(newer, state, group, last=last)
        else:
            self.newest = newer
            if self._place is not None:
                self._save(self._place, newer, state, group, last=last)
        group.saved(newer)
        plan.changes.saved(newer, group)

    def _save(self, place: CheckpointPlace, newer: Snapshot, state: SavedState, group: WorkerGroup, last: bool) -> None:
        """Write a checkpoint. If its place does not take it (a full disk, a remote place), the run continues.

        Raises:
            CheckpointError: the checkpoint cannot be written.
            PlaceError: its place did not take more than `MISSED` checkpoints in a row in more than `MISSED_SECONDS`, or
                did not take the run's last one within `LAST_SECONDS`.
        """
        write_tables = group.space.write_tables(newer.round) if group.space is not None else group.client_states.writer
        deadline = time.monotonic() + (LAST_SECONDS if last else 0.0)
        while True:
            try:
                keep = self._spec.keep_checkpoints
                saved = checkpoint.save(place, newer.round, state, keep, write_tables=write_tables)
                break
            except PlaceError as error:
                over = time.monotonic() >= deadline
                self._miss(error, newer.round, last=last and over)
                if over:
                    return
                time.sleep(_RETRY_SECONDS)
        self.saved, self._unwritten = saved, []
        if group.space is not None and isinstance(saved, Path):
            group.space.tables_kept(saved / checkpoint.TABLES)
        self._journal.event("checkpoint", f"saved round {newer.round}", round=newer.round, path=str(saved))
        self._callbacks.saved(saved, newer.round)

    def _miss(self, error: PlaceError, round: int, *, last: bool) -> None:
        """Report that a place did not take the checkpoint after `round`, or raise the error: see `_save`."""
        self._unwritten.append(time.monotonic())
        if last or (len(self._unwritten) > MISSED and self._unwritten[-1] - self._unwritten[0] > MISSED_SECONDS):
            raise error
        if len(self._unwritten) > MISSED:  # it was said
            return
        self._journal.event(
            "warning",
            f"the checkpoint of round {round} was not written: {error.message.splitlines()[0]}; the run continues, and "
            f"tries again with its next checkpoint, for at least {MISSED_SECONDS:g} s",
        )

    def _seal(self, newer: Snapshot, state: SavedState, group: WorkerGroup, *, last: bool) -> None:
        """Complete the checkpoint that workers have written, which is the newest state from now on.

        Raises:
            CheckpointError: a worker's file is not there, or the manifest cannot be written. PlaceError: see `_save`.
        """
        parts = group.parts
        assert newer.source is not None, "the workers have written the state"
        assert parts is not None, "the workers have written their parts"
        written = newer.source.written
        whole = find_whole_shapes(newer.layout, [key for facts in written for key in facts.file.offsets])
        whole |= {f"frozen/{name}": shape for facts in written for name, shape in facts.shapes.items()}
        numbers = {name: held for facts in reversed(written) for name, held in facts.numbers.items()}
        meta = state.meta | {"optimizer_numbers": numbers}
        place, round, token, keep = parts.place, newer.round, parts.token, self._spec.keep_checkpoints
        try:
            rest = write_part(place, round, token, "rest.safetensors", state.tensors)
            files = [facts.file for facts in written] + [rest]
            path = seal(place, round, token, files, meta=meta, whole=whole, keep=keep)
        except PlaceError as error:
            self._miss(error, round, last=last)
            return
        self.newest, self._unwritten = newer, []
        newer.source = StateSource(path)
        if self._place is not None:
            self.saved = self._place.at(checkpoint_name(round)).location
            message = f"saved round {round}, in {len(files)} parts"
            self._journal.event("checkpoint", message, round=round, path=str(self.saved))
            self._callbacks.saved(self.saved, round)

    def parts_plan(self, strategy: StrategyView, hosts: set[str]) -> PartsPlan | None:
        """Return where workers write their parts of checkpoints in the next generation; None if the driver writes.

        `hosts` are those of the workers. Raises ConfigError if there is no place that all of them have.
        """
        if shard_of(strategy) is None:
            return None
        place = self.folder
        if place is None and self.scratch is None:
            if hosts - {socket.gethostname()}:
                raise ConfigError(
                    f"the strategy has shard={shard_of(strategy)!r}, workers are on other hosts than the driver, and "
                    "there is no place for their parts of the state: give checkpoint=, a folder that all hosts share "
                    "or an object store such as s3://bucket/run",
                    field="checkpoint",
                )
            self.scratch = StateFolder()
        if place is None:
            assert self.scratch is not None, "it was created above"
            place = self.scratch.path
        self._parts = PartsPlan(_make_absolute(place), make_token())
        return self._parts

    def discard_unfinished(self) -> None:
        """Remove parts that workers have begun and that no one will complete, after the workers have ended."""
        if self._parts is not None:
            with contextlib.suppress(OSError, PlaceError):  # the next checkpoint in this place removes them too
                CheckpointPlace.of(self._parts.place).delete_drafts()

    def load_newest(self) -> None:
        """Load the tensors of the newest state, if workers have them, for a strategy that sends them to its members.

        Raises CheckpointError if the state cannot be read.
        """
        self.newest = self.snapshot.loaded()

    def describe_saved(self, at: int) -> str:
        """Return a text on which checkpoint remains of a run that was stopped at round `at`."""
        if self.folder is None or self.saved is None:
            return "nothing was kept"
        return f"{self.saved} is kept" + (f", of round {self.round}" if self.round < at else "")


def _make_absolute(place: Location) -> Location:
    """Return a place under a name that does not depend on the folder in which a process works."""
    return place if is_url(place) else Path(place).absolute()


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
        self._once: int | None = None  # the round of one further snapshot; 0: to be chosen; None: none is requested

    def snapshot_soon(self) -> None:
        """Take the next snapshot as soon as possible, also at a round that is not a boundary."""
        if not self._soon:
            self._soon, self.each, self.in_order, self.round = True, False, False, 0

    def snapshot_once(self) -> None:
        """Take one further snapshot as soon as possible, at a round that is no boundary, too.

        Nothing changes if workers wait for the states of some rounds, because these are taken in order.
        """
        if not (self._soon or self.each or self.in_order):
            self._once, self.round = 0, 0

    def take_at(self, round: int) -> None:
        """Take the next snapshot after `round`."""
        self.each = self.in_order = False
        self.round = round

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
        if self._once is not None and 0 < self._once <= collected:
            self._once = None
        soonest = max(reached for reached, _ in members) + self._lead
        soon = self._soon or self._once is not None
        self.round = min(soonest, self._boundary.end) if soon else self._boundary.following(soonest)
        if self._once is not None:
            self._once = self.round
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
    from_shards, lead = bool(shards), next(iter(workers.values()), None)
    there = [part for part in workers.values() if part is not None]
    if from_shards:
        params = torch.cat([part.params for part in shards])
        moments = optim.join([part.moments for part in shards], base.layout)
    else:
        assert lead is not None, "workers in step all have their part"
        params, moments = _merge_params(there), lead.moments
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
        {r: p.rng for r, p in workers.items() if p is not None and p.rng is not None},
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
        row_shares=base.row_shares,
        leases=base.leases,
    )
    found.thaw(changed)
    return found


def assemble_written(base: Snapshot, parts: list[WorkerPart]) -> Snapshot:
    """Return the snapshot that stands for a state whose tensors the workers have written: see `Checkpointer.seal`.

    `parts` are those of all workers, in the order of ranks.
    """
    lead = parts[0]
    assert lead.written is not None, "the workers have written the state"
    return replace(
        base,
        params=torch.empty(base.layout.size, dtype=base.layout.dtype, device="meta"),
        moments={},
        buffers=lead.buffers,
        rng={rank: part.rng for rank, part in enumerate(parts) if part.rng is not None},
        positions=[part.round for part in parts],
        ledgers=[],
        own={},
        shared=lead.shared,
        frozen=lead.written.frozen,
        frozen_hash=lead.written.frozen_hash,
        cursors={rank: part.cursor for rank, part in enumerate(parts) if part.cursor is not None},
        source=StateSource(written=tuple(part.written for part in parts if part.written is not None)),
    )


def assemble_columns(
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


def _merge_params(parts: list[WorkerPart]) -> Tensor:
    """Return the parameters that all workers share, or the mean of the workers' own parameters if these differ.

    They may differ if the parts were not taken at a boundary of the generation, as for the checkpoint at a stop.
    """
    found: Tensor | None = parts[0].params
    if found is not None:
        return found
    return torch.stack([part.own.params for part in parts if part.own is not None]).mean(0)

"""What a run begins with: its place on a server group, and parameters: drawn, of a checkpoint, or of another job."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayps.cluster.local import Cluster
from rayps.core.calendar import Calendar
from rayps.core.strategy import StrategyView
from rayps.core.topology import group_of
from rayps.ps.group import find, start
from rayps.ps.job_space import JobSpace
from rayps.ps.protocol.space import Quota, SparseTable
from rayps.runtime.journal import Journal
from rayps.runtime.worker_group import WorkerGroup
from rayps.strategies.job import JobSpec
from rayps.tensors import checkpoint
from rayps.tensors.learning_rate import Recipe, ScheduleRecord, Ticks
from rayps.tensors.optim import Factory
from rayps.tensors.snapshot import Snapshot
from rayps.workload.base import pack


@dataclass(frozen=True, slots=True)
class InitialState:
    """Of a job whose phases have these rounds and epochs. `drawn` gives the state before the first round, from the
    seed; None = rank 0 draws it. `schedule` is where the workload's schedule stands, to compare with a checkpoint's.
    """

    spec: JobSpec
    resume: Path | None
    calendar: Calendar
    drawn: Callable[[int], Snapshot] | None = None
    schedule: ScheduleRecord | None = None

    @property
    def resumed(self) -> bool:
        """Whether it begins with a checkpoint."""
        return self.resume is not None

    def snapshot(self, group: WorkerGroup, strategy: StrategyView, journal: Journal) -> Snapshot:
        """The first state; `strategy` is that of the first phase.

        Raises:
            CheckpointError: the checkpoint cannot be used, or is of another model.
            NotFound, ConfigError: there is no space to branch, or it is of another model.
        """
        drawn = (self.drawn or group.initial)(self.spec.seed)
        if self.resume is not None:
            return self._resumed(self.resume, drawn, group, journal)
        if self.spec.branch is not None and group.space is not None:
            found = group.space.branch(self.spec.branch, strategy, drawn.layout)
            journal.event("branched", f"begins with what space {self.spec.branch!r} holds now")
            found.buffers, drawn = drawn.buffers, found
        drawn.enter(self.calendar.spans[0])
        return drawn

    def _resumed(self, path: Path, drawn: Snapshot, group: WorkerGroup, journal: Journal) -> Snapshot:
        state = checkpoint.load(path)
        saved = Snapshot.from_state(state)
        saved.check(drawn.layout)
        if self.schedule is not None:
            ticks, was = Ticks(saved.origin, saved.steps_per_epoch), state.meta.get("schedule")
            now = self.schedule.facts(saved.layout, saved.round, ticks).get("schedule")
            if was != now:
                journal.event(
                    "warning",
                    f"{path} was made with the schedule at {was}, and this run's is at {now}: the "
                    "run goes on with its own",
                )
        before = len(saved.positions)
        saved.resume(self.calendar)
        same = before == len(saved.positions)
        if group.space is not None and group.space.tables:
            group.space.load_tables(path / checkpoint.TABLES, same)
        group.vault.read(path / checkpoint.TABLES, saved.round)
        journal.event("resumed", f"resumed from {path} at round {saved.round}", round=saved.round)
        for warning in of_another(state.meta, self.spec):
            journal.event("warning", f"{path} {warning}: is it the right folder?")
        if saved.round >= self.calendar.rounds:
            journal.event(
                "warning",
                f"the checkpoint is of round {saved.round} and the run ends at round {self.calendar.rounds}: "
                "it is evaluated, and nothing is left to train; give more epochs or steps",
            )
        return saved


def maker(spec: JobSpec) -> dict[str, Any]:
    """What a checkpoint says of the run that made it."""
    return {"workload": spec.workload, "strategy": str(spec.strategy), "seed": spec.seed}


def of_another(meta: dict[str, Any], spec: JobSpec) -> list[str]:
    """What says that a checkpoint was made by another run than one of `spec`; shapes that differ are an error."""
    was, now = (str(name).rpartition(":")[2] for name in (meta.get("workload", spec.workload), spec.workload))
    found = [] if was == now else [f"was made by workload {was}, and this run trains {now}"]
    seed = meta.get("seed", spec.seed)
    if seed != spec.seed:
        found.append(f"was made with seed {seed}, and this run has {spec.seed}, so rows come in another order")
    return found


def space_of(
    cluster: Cluster,
    spec: JobSpec,
    strategies: list[StrategyView],
    name: str,
    factory: Callable[[], Factory],
    tables: tuple[SparseTable, ...],
) -> JobSpace | None:
    """The space that a job is to have: on the group that it names, or on one of its own; None = it needs none.

    Raises:
        ConfigError: there is no group of that name.
        PeerTimeout: servers of its own did not start.
    """
    quota = None if spec.quota is None else Quota(**_whole(spec.quota))
    if spec.server_group is not None:
        group, own = find(cluster, spec.server_group), False
    else:
        needed = [group_of(each.topology) for each in strategies if each.topology.group_size or tables]
        if not needed:
            return None
        count, replicas = (max(column) for column in zip(*needed, strict=True))
        private = f"of-{name}-{uuid.uuid4().hex[:6]}"
        group, own = start(cluster, private, max(count, replicas + 1), replicas, detached=False), True
    recipe = factory()
    return JobSpace(
        group,
        name,
        spec.workers,
        pack(recipe),
        tables=tables,
        quota=quota,
        own=own,
        timeout=spec.timeout,
        scheduled=isinstance(recipe, Recipe),
    )


def _whole(quota: dict[str, float]) -> dict[str, Any]:
    return {"bytes": int(quota["bytes"]) if "bytes" in quota else None, "operations": quota.get("operations")}

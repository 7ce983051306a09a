"""A whole state and its parts: by column, by worker, by shard."""

from __future__ import annotations

from typing import Any

import torch

from rayps import optim
from rayps.replica.division import Division
from rayps.snapshot import Snapshot


def columns_of(snapshot: Snapshot, division: Division | None) -> list[Snapshot]:
    """The parts of a state by column; the state itself where a replica is one worker."""
    if division is None:
        return [snapshot]
    return [division.cut(snapshot, column) for column in range(len(division.columns))]


def assemble(base: Snapshot, workers: dict[int, Any], shards: list[Any]) -> Snapshot:
    """One snapshot from everyone's parts of the same round, those of workers by rank; out of step a worker may have
    none yet.
    """
    from_shards, lead = bool(shards), next(iter(workers.values()))
    params = torch.cat([part.params for part in shards]) if from_shards else lead.params
    moments = optim.join([part.moments for part in shards], base.layout) if from_shards else lead.moments
    # shards at a round boundary know how far each worker's pushes got; the slowest shard counts
    positions = (
        [min(marks) for marks in zip(*(part.ledger.marks.values() for part in shards), strict=True)]
        if from_shards
        else [part.round for part in workers.values()]
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
    )

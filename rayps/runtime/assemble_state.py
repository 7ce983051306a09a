"""A whole state and its parts: by column, by worker, by shard."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rayps.parallel.division.division import Division
from rayps.tensors import optim
from rayps.tensors.snapshot import Snapshot


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
    params = torch.cat([part.params for part in shards]) if from_shards else _agreed(list(workers.values()))
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
        strategy=base.strategy,
        own={rank: part.own for rank, part in workers.items() if part is not None and part.own is not None},
        shared={} if lead is None else lead.shared,
    )


def in_columns(
    division: Division, base: Snapshot, columns: list[int], given: list[Any], of: list[list[int]], held: list[Any]
) -> Snapshot:
    """As `assemble` where replicas are several workers: `columns` is each worker's, `of` the shards of each column."""
    parts = []
    for i, column in enumerate(division.columns):
        workers = {rank: part for rank, part in enumerate(given) if columns[rank] == i}
        shards = [held[index] for index in of[i]] if of else []
        parts.append(assemble(replace(base, layout=column.layout, buffers={}), workers, shards))
    return division.join(parts, base)


def _agreed(parts: list[Any]) -> Tensor:
    """What workers in step agree on; the mean where they are apart and were not asked together, as for a checkpoint
    on leaving.
    """
    found: Tensor | None = parts[0].params
    if found is not None:
        return found
    return torch.stack([part.own.params for part in parts]).mean(0)

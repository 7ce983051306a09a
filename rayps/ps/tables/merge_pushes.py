"""Merge the pushes of one round: extend each push to the union of all pushed ids. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rayps.ps.protocol.space import SparseTable
from rayps.ps.tables.wire_format import DTYPES, Counts, Ids, TablePush


def unite_pushes(table: SparseTable, pushes: Sequence[TablePush]) -> tuple[Ids, Counts, list[Tensor]]:
    """Return the union of the pushed ids [n], their summed counts [n], and for each push its gradients [n, dim].

    If a push does not contain an id of the union, its gradient of this id is 0. If no push has ids, there are no
    gradients.
    """
    several = [push.ids for push in pushes]
    if not any(len(ids) for ids in several):
        return np.empty(0, np.int64), np.empty(0, np.uint32), []
    if all(np.array_equal(ids, several[0]) for ids in several[1:]):
        total: Counts = np.stack([push.counts for push in pushes]).sum(axis=0, dtype=np.uint32)
        return several[0], total, [push.rows for push in pushes]
    ids = np.unique(np.concatenate(several))
    counts = np.zeros(len(ids), np.uint32)
    values = []
    for push in pushes:
        at = np.searchsorted(ids, push.ids)
        counts[at] += push.counts
        value = torch.zeros(len(ids), table.dim, dtype=DTYPES[table.dtype])
        value[torch.from_numpy(at)] = push.rows
        values.append(value)
    return ids, counts, values

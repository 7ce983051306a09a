"""Which rows some ids need: made unique and sorted once, for the pull and for the push. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayps.core.errors import DataError, WorkloadError
from rayps.ps.protocol.space import SparseTable
from rayps.ps.tables import wire_format


@dataclass(slots=True)
class Lookup:
    """Which rows some ids need: `ids` [n] once each, a segment's together and ascending; `counts` [n] how often."""

    ids: Any
    counts: Any
    bounds: list[int]  # segment s has ids[bounds[s]:bounds[s + 1]]
    inverse: Tensor  # of the ids' shape: which row is each one's
    numbers: Tensor  # of the ids' shape: the same, were the rows in the order of all ids,
    order: Tensor | None = None  # [n]: in which these are the rows; None where the rows are so already

    def places(self, ids: Any) -> tuple[Any, Any]:
        """Where other ids stand in this lookup, and which of them do."""
        if not len(self.ids):
            return np.zeros(len(ids), np.int64), np.zeros(len(ids), bool)
        order = np.arange(len(self.ids)) if self.order is None else self.order.numpy()
        ordered = self.ids[order]
        at = np.searchsorted(ordered, ids)
        at[at == len(ordered)] = 0
        return order[at], ordered[at] == ids


def lookup_of(ids: Tensor, table: SparseTable) -> Lookup:
    """Sort ids, once. Raises DataError, WorkloadError."""
    if ids.dtype is not torch.int64:
        raise WorkloadError(f"the ids of table {table.name!r} are {ids.dtype}: give int64", table=table.name)
    unique, inverse, counts = torch.unique(ids, sorted=True, return_inverse=True, return_counts=True)
    if len(unique) and int(unique[0]) < 0:
        raise DataError(
            f"id {int(unique[0])} of table {table.name!r} is negative: ids are whole numbers from 0 to 2**63 - 1; "
            "give another one for what is missing, or leave it out of the bag",
            table=table.name,
        )
    found, many = unique.numpy(), counts.numpy().astype(np.uint32)
    order, bounds = wire_format.split(found, table.segments)
    if table.segments == 1:
        return Lookup(found, many, bounds, inverse, inverse)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    rank = torch.from_numpy(place)
    return Lookup(found[order], many[order], bounds, rank[inverse], inverse, rank)


def merged(pending: list[tuple[Lookup, Tensor]], table: SparseTable) -> tuple[Lookup, Tensor]:
    """Several lookups' gradients as those of one, summed by id, with the sum of the counts."""
    one = lookup_of(torch.from_numpy(np.concatenate([lookup.ids for lookup, _ in pending])), table)
    grads = torch.zeros(len(one.ids), table.dim, dtype=wire_format.DTYPES[table.dtype])
    grads.index_add_(0, one.inverse, torch.cat([grad for _, grad in pending]).to(grads.dtype))
    counts = np.zeros(len(one.ids), np.uint32)
    np.add.at(counts, one.inverse.numpy(), np.concatenate([lookup.counts for lookup, _ in pending]))
    one.counts = counts
    return one, grads


def spans(lookup: Lookup) -> list[tuple[int, int, int]]:
    """Segment, first row, end; of the segments that have any."""
    bounds = lookup.bounds
    return [(s, bounds[s], bounds[s + 1]) for s in range(len(bounds) - 1) if bounds[s] < bounds[s + 1]]

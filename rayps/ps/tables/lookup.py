"""The unique rows that a batch of ids refers to: computed once, used by the pull and the push. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rayps.core.errors import DataError, WorkloadError
from rayps.ps.protocol.space import SparseTable
from rayps.ps.tables import wire_format
from rayps.ps.tables.wire_format import Counts, Ids, Slots


@dataclass(slots=True)
class Lookup:
    """The unique ids of a batch: `ids` [n], by segment, ascending within; `counts` [n], how often each occurs."""

    ids: Ids
    counts: Counts
    bounds: list[int]  # segment s has ids[bounds[s]:bounds[s + 1]]
    inverse: Tensor  # of the batch's shape: index into `ids`
    numbers: Tensor  # of the batch's shape: index into `ids` sorted over all segments
    order: Tensor | None = None  # [n]: the rows in the order of the sorted ids; None: they are sorted already

    def places(self, ids: Ids) -> tuple[Slots, NDArray[np.bool_]]:
        """The index of other ids in this lookup, int64 [m], and which of them it contains, bool [m]."""
        if not len(self.ids):
            return np.zeros(len(ids), np.int64), np.zeros(len(ids), bool)
        order = np.arange(len(self.ids)) if self.order is None else self.order.numpy()
        ordered = self.ids[order]
        at = np.searchsorted(ordered, ids)
        at[at == len(ordered)] = 0
        return order[at], ordered[at] == ids


def lookup_of(ids: Tensor, table: SparseTable) -> Lookup:
    """Make ids of any shape unique and sort them. Raises DataError (a negative id), WorkloadError (not int64)."""
    if ids.dtype is not torch.int64:
        raise WorkloadError(f"the ids of table {table.name!r} are {ids.dtype}: give int64", table=table.name)
    unique, inverse, counts = torch.unique(ids, sorted=True, return_inverse=True, return_counts=True)
    if len(unique) and int(unique[0]) < 0:
        raise DataError(
            f"id {int(unique[0])} of table {table.name!r} is negative: give ids from 0 to 2**63 - 1; for a missing "
            "value give an id of its own, or leave it out of the bag",
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
    """Merge the gradients of several lookups: gradients and counts are summed by id."""
    one = lookup_of(torch.from_numpy(np.concatenate([lookup.ids for lookup, _ in pending])), table)
    grads = torch.zeros(len(one.ids), table.dim, dtype=wire_format.DTYPES[table.dtype])
    grads.index_add_(0, one.inverse, torch.cat([grad for _, grad in pending]).to(grads.dtype))
    counts = np.zeros(len(one.ids), np.uint32)
    np.add.at(counts, one.inverse.numpy(), np.concatenate([lookup.counts for lookup, _ in pending]))
    one.counts = counts
    return one, grads


def spans(lookup: Lookup) -> list[tuple[int, int, int]]:
    """(segment, first row, end) of each segment that has rows."""
    bounds = lookup.bounds
    return [(s, bounds[s], bounds[s + 1]) for s in range(len(bounds) - 1) if bounds[s] < bounds[s + 1]]

"""The unique ids of a batch, grouped by segment. They are computed once for both the pull and the push. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from rayps_client.errors import DataError, WorkloadError
from torch import Tensor

from rayps.ps.protocol.space import SparseTable
from rayps.ps.tables import wire_format
from rayps.ps.tables.wire_format import Counts, Ids, Slots


@dataclass
class Lookup:
    """The unique ids of a batch: `ids` [n], grouped by segment and ascending within each segment.

    `counts` [n] is how often each id occurs in the batch.
    """

    ids: Ids
    counts: Counts
    bounds: list[int]  # segment s has ids[bounds[s]:bounds[s + 1]]
    inverse: Tensor  # for each id of the batch its index in `ids`; in the batch's shape

    @cached_property
    def order(self) -> Tensor | None:
        """The permutation [n] that sorts `ids` over all segments; None if they are sorted already."""
        return torch.from_numpy(np.argsort(self.ids)) if len(self.bounds) > 2 else None

    @cached_property
    def numbers(self) -> Tensor:
        """For each id of the batch its index in the sorted ids, in the batch's shape."""
        if self.order is None:
            return self.inverse
        return torch.empty_like(self.order).index_copy_(0, self.order, torch.arange(len(self.ids)))[self.inverse]

    def places(self, ids: Ids) -> tuple[Slots, NDArray[np.bool_]]:
        """Return for each of m other ids its index in `self.ids`, int64 [m], and whether it occurs there, bool [m]."""
        if not len(self.ids):
            return np.zeros(len(ids), np.int64), np.zeros(len(ids), bool)
        order = np.arange(len(self.ids)) if self.order is None else self.order.numpy()
        ordered = self.ids[order]
        at = np.searchsorted(ordered, ids)
        at[at == len(ordered)] = 0
        return order[at], ordered[at] == ids


def lookup_of(ids: Tensor, table: SparseTable) -> Lookup:
    """Make ids of any shape unique and group them by segment.

    If segment, id and position fit into 63 bits together, one integer for each id contains all three, and these
    integers are sorted. Otherwise an indirect sort is used, which is slower.

    Raises DataError if an id is negative, WorkloadError if the ids are not int64.
    """
    if ids.dtype is not torch.int64:
        raise WorkloadError(f"the ids of table {table.name!r} are {ids.dtype}: give int64", table=table.name)
    given = ids.reshape(-1).numpy()
    count = len(given)
    if count and int(given.min()) < 0:
        wanted = "ids from 0 to 2**63 - 1; reserve one id for missing values, or leave them out of the bag"
        raise DataError(f"id {given.min()} of table {table.name!r} is negative: give {wanted}", table=table.name)
    width, digits = int(given.max(initial=0)).bit_length(), count.bit_length()
    keys = wire_format.bucket(given, table.segments)
    if width + digits + table.segments.bit_length() <= 63:
        keys <<= width
        keys |= given
        keys <<= digits
        keys |= np.arange(count)
        keys.sort()
        order = keys & ((1 << digits) - 1)
        keys >>= digits
        bounds = np.searchsorted(keys, np.arange(table.segments + 1) << width)
        keys &= (1 << width) - 1
    else:
        order = np.lexsort((given, keys))
        bounds = np.searchsorted(keys[order], np.arange(table.segments + 1))
        keys = given[order]
    first = np.ones(count + 1, bool)  # where an id occurs first: equal ids are adjacent, as they are in one segment
    np.not_equal(keys[1:], keys[:-1], out=first[1:-1])
    starts = np.flatnonzero(first)
    inverse = torch.empty(ids.shape, dtype=torch.int64)
    inverse.view(-1).numpy()[order] = first[:-1].cumsum() - 1
    counts = np.diff(starts).astype(np.uint32)
    return Lookup(keys[starts[:-1]], counts, np.searchsorted(starts, bounds).tolist(), inverse)


def merge_lookups(pending: list[tuple[Lookup, Tensor]], table: SparseTable) -> tuple[Lookup, Tensor]:
    """Merge the gradients of any number of lookups. Gradients and counts of equal ids are summed."""
    ids = np.concatenate([np.empty(0, np.int64), *(lookup.ids for lookup, _ in pending)])
    one = lookup_of(torch.from_numpy(ids), table)
    grads = torch.zeros(len(one.ids), table.dim, dtype=wire_format.DTYPES[table.dtype])
    grads.index_add_(0, one.inverse, torch.cat([grads[:0], *(grad for _, grad in pending)]).to(grads.dtype))
    weights = np.concatenate([np.empty(0, np.uint32), *(lookup.counts for lookup, _ in pending)])
    one.counts = np.bincount(one.inverse.numpy(), weights, len(one.ids)).astype(np.uint32)
    return one, grads


def find_spans(lookup: Lookup) -> list[tuple[int, int, int]]:
    """Return (segment, index of its first row, index after its last row) for each segment with ids in the lookup."""
    bounds = lookup.bounds
    return [(s, bounds[s], bounds[s + 1]) for s in range(len(bounds) - 1) if bounds[s] < bounds[s + 1]]

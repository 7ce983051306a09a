"""Which column owns which part of the model. The driver computes this data once and sends it to all workers.

A *column* is the group of workers, one in each replica, that have the same part of the model. Every trained element is
owned by one column. The pieces that a column owns, in order, are its vector: a strategy treats a column as if it were a
whole model, with its own ring or shards, its own optimizer and its own part of a snapshot. In each step a column
borrows the other parameters that it needs from their owners (tied weights of another stage, parameters that are not
split among tensor ranks): see `rayps.parallel.division.borrowed_parameters`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from rayps.core.grid import Grid
from rayps.core.job.repeated_pushes import merge_ledgers
from rayps.core.strategy.replica import Replica
from rayps.core.strategy.traffic import Sizes
from rayps.tensors.flat import Entry, Layout
from rayps.tensors.layer_split import Plan
from rayps.tensors.optim import Moments, ParamState, StateValue
from rayps.tensors.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A slice of one tensor of the whole model: the ranges `ranges` (lo, hi) along `dim`, in order.

    `name` and `shape` are those of the whole tensor. If `dim` is None, the slice is the whole tensor.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None = None
    ranges: tuple[tuple[int, int], ...] = ()

    @property
    def local(self) -> tuple[int, ...]:
        """The shape of the slice."""
        if self.dim is None:
            return self.shape
        length = sum(hi - lo for lo, hi in self.ranges)
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :])

    @property
    def size(self) -> int:
        """The number of elements of the slice."""
        return torch.Size(self.local).numel()

    def take(self, whole: Tensor) -> Tensor:
        """Return this slice of the tensor `whole`. The result is a copy, unless the slice is the whole tensor."""
        if self.dim is None:
            return whole
        return torch.cat([whole.narrow(self.dim, lo, hi - lo) for lo, hi in self.ranges], self.dim)

    def put(self, part: Tensor, whole: Tensor) -> None:
        """Write `part` to the position of this slice in the tensor `whole`."""
        if self.dim is None:
            whole.copy_(part)
            return
        at = 0
        for lo, hi in self.ranges:
            whole.narrow(self.dim, lo, hi - lo).copy_(part.narrow(self.dim, at, hi - lo))
            at += hi - lo


@dataclass(frozen=True, slots=True)
class Borrowed:
    """A parameter, or slice of one, that a column uses and another column of the same replica owns."""

    piece: TensorSlice
    owner: int  # the owner's column
    tied: bool  # True: a tied weight, whose gradient is added to the owner's; False: a parameter of all tensor ranks


@dataclass(frozen=True)
class Column:
    """One column's part of the model."""

    owned: tuple[TensorSlice, ...]  # trained parameters that this column updates
    borrowed: tuple[Borrowed, ...]  # trained parameters that this column uses and another column updates
    untrained: tuple[TensorSlice, ...]  # buffers, and parameters that need no gradient
    # for each chunk of this column: its first layer, and its last + 1; empty if the model is not cut into layers
    spans: tuple[tuple[int, int], ...]
    dtype: torch.dtype

    @cached_property
    def layout(self) -> Layout:
        """The layout of the owned pieces in the column's vector."""
        entries, lo = [], 0
        for piece in self.owned:
            entries.append(Entry(piece.name, lo, lo + piece.size, piece.local))
            lo += piece.size
        return Layout(tuple(entries), self.dtype)

    @property
    def held(self) -> int:
        """The number of elements of trained parameters, owned and borrowed, in the memory of a worker."""
        return sum(piece.size for piece in self.owned) + sum(borrowed.piece.size for borrowed in self.borrowed)


class Route(NamedTuple):
    """A skip connection between two chunks of the model."""

    name: str
    source: int  # the chunk of the Stash
    target: int  # the chunk of the Unstash


@dataclass(frozen=True)
class Division:
    """How a model is divided: the layout of the whole model, and the columns, in the order of `Grid.column`."""

    replica: Replica
    layout: Layout
    columns: tuple[Column, ...]
    boundaries: tuple[int, ...] = ()  # the first layer of each of the pipeline's chunks, except the first chunk's
    plan: Plan = field(default_factory=dict)  # from layer names to how the layers are split among tensor ranks
    routes: tuple[Route, ...] = ()  # skip connections between chunks

    @property
    def stages(self) -> int:
        """The number of pipeline stages of a replica; 1 without a pipeline."""
        return self.replica.stages

    @property
    def tensor(self) -> int:
        """The number of workers among which each stage's layers are split; 1 without tensor parallelism."""
        return self.replica.tensor

    def place(self, column: int) -> tuple[int, int]:
        """Return the stage and the tensor rank of a column."""
        return divmod(column, self.tensor)

    @cached_property
    def key(self) -> str:
        """A hash of the pieces that each column owns: equal for two divisions whose columns own the same pieces."""
        return hashlib.sha256(repr([column.owned for column in self.columns]).encode()).hexdigest()[:16]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The offset of each column's vector in the concatenation of all columns' vectors, as used in ledgers."""
        found = [0]
        for column in self.columns:
            found.append(found[-1] + column.layout.size)
        return tuple(found[:-1])

    def cut(self, snapshot: Snapshot, column: int) -> Snapshot:
        """Return one column's part of a snapshot of the whole model, without copying tensors if possible."""
        mine, whole = self.columns[column], {entry.name: entry for entry in snapshot.layout.entries}
        params = [
            piece.take(snapshot.params[whole[piece.name].lo : whole[piece.name].hi].view(piece.shape)).reshape(-1)
            for piece in mine.owned
        ]
        lo = self.offsets[column]
        ledgers = [(a - lo, b - lo, each) for a, b, each in snapshot.ledgers if lo <= a < lo + mine.layout.size]
        # a ledger of another division numbers the elements in another order: apply its entries to the whole vector
        if snapshot.divided != self.key and snapshot.ledgers:
            ledgers = [(0, mine.layout.size, merge_ledgers(each for _, _, each in snapshot.ledgers))]
        return Snapshot(
            mine.layout,
            torch.cat([snapshot.params[:0], *params]),
            {
                piece.name: _cut(snapshot.moments[piece.name], piece)
                for piece in mine.owned
                if piece.name in snapshot.moments
            },
            {
                piece.name: piece.take(snapshot.buffers[piece.name])
                for piece in mine.untrained
                if piece.name in snapshot.buffers
            },
            snapshot.rng,
            list(snapshot.positions),
            snapshot.steps_per_epoch,
            snapshot.ring,
            ledgers,
            columns=len(self.columns),
            frozen=snapshot.frozen & {piece.name for piece in mine.untrained},
            frozen_hash=snapshot.frozen_hash and f"{snapshot.frozen_hash}, column {column} of {self.key}",
            cursors=snapshot.cursors,
        )

    def join(self, parts: Sequence[Snapshot], base: Snapshot) -> Snapshot:
        """Return a snapshot of the whole model from the snapshots of all columns, in their order.

        Values that no column has are those of `base`, an earlier snapshot of the whole model.
        """
        layout, params = self.layout, torch.empty(self.layout.size, dtype=self.layout.dtype)
        whole = {entry.name: params[entry.lo : entry.hi].view(entry.shape) for entry in layout.entries}
        moments: Moments = {}
        buffers, rng = dict(base.buffers), dict[int, Tensor]()
        for mine, part in zip(self.columns, parts, strict=True):
            for piece, entry in zip(mine.owned, part.layout.entries, strict=True):
                piece.put(part.params[entry.lo : entry.hi].view(entry.shape), whole[piece.name])
                if piece.name in part.moments:
                    _join(moments.setdefault(piece.name, {}), part.moments[piece.name], piece)
            rng |= part.rng
        # in reverse order, so that the first column's values replace those of the others
        for mine, part in zip(reversed(self.columns), reversed(parts), strict=True):
            for piece in [piece for piece in mine.untrained if piece.name in part.buffers]:
                if piece.dim is None:
                    buffers[piece.name] = part.buffers[piece.name]
                else:
                    whole_one = buffers[piece.name] = buffers[piece.name].clone()
                    piece.put(part.buffers[piece.name], whole_one)
        return Snapshot(
            layout,
            params,
            _sort_moments(moments, layout),
            buffers,
            rng,
            [min(several) for several in zip(*(part.positions for part in parts), strict=True)],
            base.steps_per_epoch,
            base.ring,
            [(a + lo, b + lo, each) for lo, p in zip(self.offsets, parts, strict=True) for a, b, each in p.ledgers],
            divided=self.key,
            columns=len(self.columns),
            cursors={replica: cursor for part in parts for replica, cursor in part.cursors.items()},
        )

    def facts(self) -> list[ColumnFacts]:
        """Return the figures of each column (`ColumnFacts`), in order."""
        width = self.layout.dtype.itemsize
        return [
            {
                "stage": self.place(i)[0],
                "tensor": self.place(i)[1],
                "layers": [list(span) for span in column.spans],
                "owned": column.layout.size,
                "held": column.held,
                "bytes": column.held * width,
            }
            for i, column in enumerate(self.columns)
        ]

    def describe(self) -> str:
        """Describe in one line which layers and how many parameters each worker of a replica has."""
        facts, grid = self.facts(), Grid(1, self.stages, self.tensor)
        width = self.layout.dtype.itemsize
        lines = []
        for column, fact in enumerate(facts):
            has = [f"layer {lo}" if hi - lo == 1 else f"layers {lo} to {hi - 1}" for lo, hi in fact["layers"]]
            has.append(f"{fact['held']:,} parameters ({fact['bytes'] / 1e6:.3g} MB)")
            lines.append(f"{grid.words(column)}: {', '.join(has)}")
        whole = f"{self.layout.size:,} parameters ({self.layout.size * width / 1e6:.3g} MB)"
        return f"each replica of the model ({whole}) is divided among {len(facts)} workers: " + "; ".join(lines)

    def count_elements(self, sizes: Sizes) -> Sizes:
        """Return `sizes` with the numbers of elements that columns own and borrow, which need no measurement."""
        borrowed = [each for column in self.columns for each in column.borrowed]
        return replace(
            sizes,
            owned=tuple(column.layout.size for column in self.columns),
            held=tuple(column.held for column in self.columns),
            tied=sum(each.piece.size for each in borrowed if each.tied),
            shared=sum(each.piece.size for each in borrowed if not each.tied),
        )


class ColumnFacts(TypedDict):
    """The figures of one column, for events and the dashboard."""

    stage: int
    tensor: int  # tensor rank
    layers: list[list[int]]  # for each chunk: its first layer, and its last + 1
    owned: int  # elements of the parameters that the column owns
    held: int  # elements of the parameters that the column owns or borrows
    bytes: int  # bytes of the parameters that the column owns or borrows


def _is_cut(value: StateValue, piece: TensorSlice, key: str, shape: tuple[int, ...]) -> bool:
    """Return whether `value`, the optimizer's state `key`, has one number for each element of a split parameter.

    Such a value has the shape `shape`.
    """
    return piece.dim is not None and isinstance(value, Tensor) and tuple(value.shape) == shape and key != "step"


def _cut(state: ParamState, piece: TensorSlice) -> ParamState:
    return {
        key: piece.take(value) if _is_cut(value, piece, key, piece.shape) else value for key, value in state.items()
    }


def _join(whole: ParamState, part: ParamState, piece: TensorSlice) -> None:
    for key, value in part.items():
        if _is_cut(value, piece, key, piece.local):
            if key not in whole:
                whole[key] = torch.zeros(piece.shape, dtype=value.dtype)
            piece.put(value, whole[key])
        else:
            whole.setdefault(key, value)


def _sort_moments(moments: Moments, layout: Layout) -> Moments:
    return {entry.name: moments[entry.name] for entry in layout.entries if entry.name in moments}


def divide_servers(count: int, sizes: Sequence[int]) -> list[int]:
    """Return how many of `count` servers each column gets: at least one, and more for columns of larger `sizes`."""
    found = [1] * len(sizes)
    for _ in range(count - len(sizes)):
        most = max(range(len(sizes)), key=lambda i: sizes[i] / found[i])
        found[most] += 1
    return found

"""A segment of the dense vector as a server holds it: a `Shard`, pushes and states as bytes, and branches.

What a change is depends on the strategy. Where a push has effect at once, a change is a push. Where a round gathers all
pushes, a change is a closed round: the weighted mean of its pushes if the strategy applies nothing else (its `means`),
which is one vector for any number of workers; otherwise all its pushes in the order of ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rayps.core.calendar import Boundary
from rayps.core.errors import CheckpointError, ConfigError
from rayps.core.ledger import WINDOW, Ledger
from rayps.core.topology import servers_of
from rayps.core.values import Buffer
from rayps.ps.protocol.mailbox import SharedSlice
from rayps.ps.protocol.pieces import DensePiece, Extent, KnownRows
from rayps.ps.protocol.rows import KEPT_LISTS, ShardRows
from rayps.ps.protocol.space import Space
from rayps.ps.server.shard import NEVER, PUSHED, Shard, ShardFacts, ShardPart, ShardState
from rayps.tensors.flat import Layout
from rayps.tensors.optim import Factory, Moments
from rayps.tensors.optim import cut as cut_moments
from rayps.tensors.packing import flat_bytes


class DenseSegment:
    """Elements lo to hi of a space's dense vector. Implements `rayps.ps.protocol.space.ServedSegment`.

    A branch has no shard of its own until it or its base is pushed to: until then it reads the base's memory.
    """

    def __init__(self, space: Space, index: int, factory: Factory, *, base: DenseSegment | None = None) -> None:
        """Begin with zeros, until a state is loaded, or with the values of `base`."""
        if space.layout is None:
            raise ConfigError(f"space {space.name!r} has no dense vector, so no segment {index}", field="segment")
        self.space, self.index, self.factory = space, index, factory
        self.extent = Extent(space.layout, *space.cuts[index])
        self.rows = self.extent.hi - self.extent.lo
        self._known = KnownRows(KEPT_LISTS * space.workers)
        self.operations = 0
        self.copied = True  # whether there are backups; without them changes are empty
        self._boundary = NEVER
        self._checked: tuple[tuple[int, int, float], memoryview | Tensor, DensePiece] | None = (
            None  # the last checked push
        )
        self._base = base
        self._shared = False  # whether workers of this host can read the memory
        self._branches: list[weakref.ref[DenseSegment]] = []
        if base is None:
            zeros = torch.zeros(self.rows, dtype=self.extent.layout.dtype)
            self._become(ShardState(zeros, {}, Ledger([0] * space.workers)), restore=False)

    def _become(self, state: ShardState, *, restore: bool = True) -> None:
        """Replace the shard by one with this state, in memory of its own."""
        self._base = None
        self._shard = Shard(
            self.extent,
            self.space.strategy,
            self.factory,
            state.params,
            state.ledger,
            boundary=self._boundary,
            private=not self._shared,
            ticks=self.space.ticks,
        )
        self._buffer = flat_bytes(self._shard.params).data if self.rows else memoryview(b"")
        if restore:
            self._shard.restore(state)

    # ---- the shard

    @property
    def shard(self) -> Shard:
        """The segment's shard, or its base's, for reading only."""
        return self._shard if self._base is None else self._base.shard

    @property
    def borrows(self) -> bool:
        """Whether the memory is its base's."""
        return self._base is not None

    @property
    def alone(self) -> Shard | None:
        """The shard if workers of this host can read its memory and no other segment uses it; else None."""
        return self._shard if self._shared and self._base is None and not self._branches else None

    def share(self) -> SharedSlice:
        """Move the values into memory that workers of this host can read, and return it."""
        if not self._shared:
            self._shared = True
            self._become(self._shard.state())
        return self._shard.slice

    @property
    def seq(self) -> int:
        """Changes that were applied."""
        return 0 if self._base is not None else self._shard.changes.seq

    @seq.setter
    def seq(self, value: int) -> None:
        self._own().changes.seq = value

    @property
    def version(self) -> int:
        """Steps of the optimizer."""
        return 0 if self._base is not None else self._shard.version

    @property
    def nbytes(self) -> int:
        """Bytes of its own parameters and optimizer state."""
        return 0 if self._base is not None else self._shard.optimizer.nbytes

    # ---- pushes

    def check(self, rank: int, step: int, weight: float, data: memoryview | Tensor) -> None:
        """Raise what `push` would raise: ValueError, ConfigError."""
        self._checked, read = None, self._read_push(data)
        if not 0 <= weight < float("inf"):
            raise ValueError(f"a push of weight {weight}: give the number of samples, 0 or more")
        marks = self.marks()
        if rank not in marks:
            raise ValueError(f"rank {rank} is not one of {len(marks)} workers (0 to {len(marks) - 1})")
        servers = servers_of(self.space.strategy)
        if step - marks[rank] >= WINDOW and not (servers is not None and servers.update.spans):
            raise ValueError(
                f"rank {rank} pushed step {step} before step {marks[rank]}: at most {WINDOW - 1} may be skipped"
            )
        self._checked = (rank, step, weight), data, read

    def _read_push(self, data: memoryview | Tensor) -> DensePiece:
        if not isinstance(data, Tensor):
            return self.extent.read_push(data, self._known)
        if data.dtype == torch.uint8:  # with a head, in the pusher's memory
            return self.extent.read_push(flat_bytes(data).data, self._known)
        if data.numel() not in (0, self.rows):
            raise ValueError(f"a push of {data.numel()} elements does not fit into segment {self.index} of {self.rows}")
        return DensePiece(data)

    def push(self, rank: int, step: int, weight: float, data: memoryview | Tensor) -> list[bytes]:
        """File a push of this segment's elements (no bytes: zeros); return the changes that backups must replay.

        A tensor is in the pusher's memory: `own` must be called before the pusher is answered.
        """
        known = self._checked
        if known is None or known[0] != (rank, step, weight) or known[1] is not data:
            self.check(rank, step, weight, data)
            known = self._checked
        assert known is not None, "check() sets it"
        (value, offset, rows), self._checked = known[2], None
        self.operations += 1
        shard, lent = self._own(), isinstance(data, Tensor)
        if shard.ledger.seen(rank, step):
            return []
        changes = shard.changes
        before, changes.recording = changes.seq, self.copied
        if changes.kind != PUSHED:
            shard.push(rank, step, value, weight, offset, lent, rows)
            return changes.since(before)
        pushed = (flat_bytes(data).data if len(data) else b"") if isinstance(data, Tensor) else data
        change = changes.pushed(rank, step, weight, pushed)  # before the strategy may write into the value
        shard.push(rank, step, value, weight, offset, lent, rows)
        return [change]

    def replay(self, change: memoryview) -> None:
        """Apply one of the changes that `push` returned on the primary. Raises ValueError."""
        self._own().replay(change)

    def promoted(self) -> None:
        """Close, as the new primary, the rounds that all ranks have pushed."""
        if self._base is None:
            self._shard.finish()

    def close(self) -> None:
        """Give up the memory; branches copy it first."""
        self._part_from_branches()

    # ---- pulls

    def may_pull(self, rank: int) -> bool:
        """Return whether a pull of `rank` may be served now."""
        return self._base is not None or self._shard.clock.may_pull(rank)

    def laggards(self) -> list[int]:
        """Return the ranks that pulls wait for."""
        return list(range(self.space.workers)) if self._base is not None else self._shard.clock.laggards()

    def pull(
        self, rank: int, data: memoryview = memoryview(b""), out: memoryview | None = None
    ) -> tuple[Any, int, list[bytes]]:
        """Return what `read` returns, the lead of `rank`, and no changes."""
        return self.read(data), self.pulled(rank), []

    def pulled(self, rank: int) -> int:
        """Count a pull; return by how many rounds `rank` leads the slowest."""
        self.operations += 1
        if rank not in range(self.space.workers):
            raise ValueError(f"rank {rank} is not one of {self.space.workers} workers")
        return 0 if self._base is not None else self._shard.pulled(rank)

    def own(self, rank: int) -> None:
        """Copy the pushes of a rank that are still needed out of the rank's memory."""
        if self._base is None:
            self._shard.own(rank)

    def read(self, data: memoryview | Tensor = memoryview(b"")) -> Any:
        """Return what `data` asks for: all elements or a range, as a view valid until the next push, or rows.

        Raises ValueError, ConfigError: the segment does not have it.
        """
        if self._base is not None:
            return self._base.read(data)
        if not len(data):
            return self._buffer
        area = self.extent.read_pull(flat_bytes(data).data if isinstance(data, Tensor) else data, self._known)
        if isinstance(area, ShardRows):
            return flat_bytes(area.of(self._shard.params)).data
        item = self.extent.layout.dtype.itemsize
        return self._buffer[area[0] * item : area[1] * item]

    def marks(self) -> dict[int, int]:
        """The next step of each rank."""
        return dict.fromkeys(range(self.space.workers), 0) if self._base is not None else self._shard.ledger.marks

    @property
    def ledger(self) -> Ledger:
        """The pushes that were applied or filed; read only."""
        return self._own().ledger

    def durable(self, rank: int) -> int:
        """Return the step below which all pushes of a rank are applied here."""
        if self._base is not None:
            return 0
        shard = self._shard
        return shard.ledger.marks.get(rank, 0) if shard.changes.kind == PUSHED else shard.closed

    # ---- states

    def _state(self) -> ShardState:
        """The state; of a branch without a shard, the base's values with a clock at step 0."""
        if self._base is None:
            return self._shard.state()
        of = self.shard
        return ShardState(of.params, of.optimizer.moments(), Ledger([0] * self.space.workers), of.optimizer.groups())

    def dump(self) -> bytes:
        """Return the whole state, for `load`; see `state_of`."""
        return self._state().pack()

    def load(self, state: Buffer) -> None:
        """Restore what `dump` returned. Raises CheckpointError: it is truncated, or another segment's."""
        found = ShardState.unpack(state)
        if found.params.numel() != self.rows or found.params.dtype != self.extent.layout.dtype:
            raise CheckpointError(
                f"a state of {found.params.numel()} elements {found.params.dtype} was given for segment {self.index} "
                f"of {self.rows} elements {self.extent.layout.dtype}"
            )
        ranks = len(found.ledger.marks)
        if ranks != self.space.workers:
            raise CheckpointError(f"a state of {ranks} workers was given to {self.space.workers} workers")
        self._part_from_branches()
        found.params = found.params.clone()
        self._become(found)

    def begin(self, params: Tensor, ledger: Ledger, moments: Moments, boundary: Boundary) -> None:
        """Restore a part of a snapshot, with moments of whole parameters; retain states at `boundary` from now on."""
        self._part_from_branches()
        self._boundary = boundary
        self._become(ShardState(params.clone(), {}, ledger), restore=False)
        self._shard.optimizer.load(moments, self.extent)

    def facts(self, index: int, wanted: int) -> ShardFacts:
        """Return the facts of shard `index` of a static map, and retain the state after round `wanted`."""
        shard = self._own()
        shard.retained.wanted = wanted
        if wanted > shard.closed:
            shard.retained.requested = {wanted}
        return shard.facts(index)

    def skip(self, rank: int, step: int) -> None:
        """Count a rank's missing pushes below `step` as lost: no worker retains them."""
        self._own().skip(rank, step)

    def keep(self, rounds: Sequence[int]) -> None:
        """Retain a state after each of these rounds."""
        shard = self._own()
        shard.retained.requested.update(r for r in rounds if r > shard.closed)

    def part(self, rounds: int) -> bytes | None:
        """Return the state after `rounds` if it is retained."""
        return None if self._base is not None else self._shard.retained.get(rounds)

    # ---- branches

    def branch(
        self, space: Space | None = None, index: int | None = None, factory: Factory | None = None
    ) -> DenseSegment:
        """Return a segment that begins with the same values.

        It belongs to another space, with workers, a strategy and an optimizer schedule (`factory`) of its own. The
        memory is shared until one of the two is pushed to.
        """
        base = self if self._base is None else self._base
        made = DenseSegment(
            space or self.space, self.index if index is None else index, factory or self.factory, base=base
        )
        base._branches = [ref for ref in base._branches if ref() is not None] + [weakref.ref(made)]
        return made

    def _own(self) -> Shard:
        """The shard for writing: in memory that no other segment reads."""
        self._part_from_branches()
        if self._base is not None:
            self._leave()
        return self._shard

    def _part_from_branches(self) -> None:
        if self._branches:
            branches, self._branches = self._branches, []
            for branch in filter(None, (ref() for ref in branches)):
                if branch._base is self:
                    branch._leave()

    def _leave(self) -> None:
        """Copy the base's state."""
        state = self._state()
        state.params = state.params.clone()
        self._become(state)


def state_of(
    piece: Tensor,
    layout: Layout,
    lo: int,
    *,
    moments: Moments | None = None,
    marks: Ledger | Sequence[int],
    version: int = 0,
) -> bytes:
    """Return a state for `load`: of the elements from `lo` of a vector, given as `piece`.

    `moments` is the optimizer's state of whole parameters by name (other parameters than the piece's are left out);
    `marks` the next step of each rank, or a ledger.
    """
    ledger = marks if isinstance(marks, Ledger) else Ledger(marks)
    return ShardState(piece, cut_moments(moments or {}, layout, lo, lo + piece.numel()), ledger, version=version).pack()


def part_of(state: Buffer, rounds: int, lo: int) -> ShardPart:
    """Return a dense segment's state as a shard's share of a checkpoint. Raises CheckpointError."""
    found = ShardState.unpack(state)
    return ShardPart(rounds, lo, found.params.clone(), found.moments, found.ledger)

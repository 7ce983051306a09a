"""A segment of the dense vector: a `rayps.ps.server.shard.Shard` that says what its copies must apply, and can be one.

What a change is depends on the strategy. Where each push has effect at once, a change is a push. Where a round gathers
all pushes, a change is the close of a round: their weighted mean where the strategy says that only this matters (its
`means`), which is one vector however many workers there are; else everyone's values in the order of ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rayps.core.calendar import Boundary
from rayps.core.errors import CheckpointError, ConfigError
from rayps.core.ledger import WINDOW, Ledger
from rayps.core.topology import servers_of
from rayps.ps.protocol.mailbox import SharedSlice
from rayps.ps.protocol.pieces import DensePiece, Extent
from rayps.ps.protocol.rows import ShardRows
from rayps.ps.protocol.space import Space
from rayps.ps.server.shard import (
    CHANGE,
    MEAN,
    NEVER,
    ONE,
    PUSHED,
    VALUES,
    ReplicatedShard,
    ShardFacts,
    ShardPart,
    changes_by,
)
from rayps.tensors.flat import Layout
from rayps.tensors.optim import Factory, Moments
from rayps.tensors.optim import cut as cut_moments
from rayps.tensors.packing import flat_bytes, full_moments, pack_state, plain_moments, unpack_state


class DenseSegment:
    """Elements lo to hi of a space's dense vector. Implements `rayps.ps.protocol.space.ServedSegment`."""

    def __init__(self, space: Space, index: int, factory: Factory, *, base: DenseSegment | None = None) -> None:
        """Zeros, until a state is loaded; or what `base` holds, in its memory, until one of the two steps."""
        if space.layout is None:
            raise ConfigError(f"space {space.name!r} has no dense vector, so no segment {index}", field="segment")
        self.space, self.index, self.factory = space, index, factory
        self.layout: Layout = space.layout
        self.lo, self.hi = space.cuts[index]
        self.rows = self.hi - self.lo
        self.boundary = NEVER  # rounds after which a state is kept unasked
        self.operations = 0
        self.copied = True  # whether changes go to copies; where not, they come back empty
        self.by = changes_by(space.strategy)
        self._extent = Extent(self.layout, self.lo, self.hi)
        self._checked: tuple[tuple[int, int, float], memoryview | Tensor, DensePiece] | None = (
            None  # the push checked last
        )
        self._base = base
        self._shared = False  # with workers of this host
        self._branches: list[weakref.ref[DenseSegment]] = []
        if base is None:
            self._settle(torch.zeros(self.rows, dtype=self.layout.dtype), Ledger([0] * space.workers))

    def _settle(self, params: Tensor, ledger: Ledger) -> None:
        """Stand on memory of its own."""
        self._base = None
        self._shard = ReplicatedShard(
            self.index,
            self.layout,
            self.lo,
            self.hi,
            params=params,
            factory=self.factory,
            strategy=self.space.strategy,
            start=ledger,
            boundary=self.boundary,
            private=not self._shared,
            ticks=self.space.ticks,
        )
        self._buffer = flat_bytes(self._shard.params).data if self.rows else memoryview(b"")

    # ---- what is the same in both lives

    @property
    def shard(self) -> ReplicatedShard:
        """The shard, of its own or still its parent's: to be read only, where it is the parent's."""
        return self._shard if self._base is None else self._base.shard

    @property
    def borrows(self) -> bool:
        """Whether the memory is still another segment's."""
        return self._base is not None

    @property
    def alone(self) -> ReplicatedShard | None:
        """The shard, where its memory is no other segment's and workers of this host can read it; else None."""
        return self._shard if self._shared and self._base is None and not self._branches else None

    def share(self) -> SharedSlice:
        """The values in memory that workers of this host can read: from now on they lie in such memory."""
        if not self._shared:
            self._shared = True
            self._move(self._shard)
        return self._shard.slice

    def _move(self, shard: ReplicatedShard) -> None:
        head, tensors = unpack_state(self.dump())
        self._settle(shard.params, shard.ledger)
        self._shard.restore(head, tensors)

    @property
    def seq(self) -> int:
        """Changes that were applied."""
        return 0 if self._base is not None else self._shard.seq

    @seq.setter
    def seq(self, value: int) -> None:
        self._own().seq = value

    @property
    def version(self) -> int:
        """Steps that the optimizer has taken here."""
        return 0 if self._base is not None else self._shard.version

    @property
    def nbytes(self) -> int:
        """Bytes of parameters and optimizer state that are its own."""
        return 0 if self._base is not None else self._shard.nbytes

    # ---- pushes

    def check(self, rank: int, step: int, weight: float, data: memoryview | Tensor) -> None:
        """Raises ValueError, ConfigError where `push` would."""
        self._checked, read = None, self._read_push(data)
        if not 0 <= weight < float("inf"):
            raise ValueError(f"a push of weight {weight}: give the number of samples, 0 or more")
        marks = self.marks()
        if rank not in marks:
            raise ValueError(f"rank {rank} is not one of {len(marks)} workers (0 to {len(marks) - 1})")
        servers = servers_of(self.space.strategy)
        if step - marks[rank] >= WINDOW and not (servers is not None and servers.update.spans):
            raise ValueError(f"rank {rank} pushed step {step} before step {marks[rank]}: at most {WINDOW - 1} are kept")
        self._checked = (rank, step, weight), data, read

    def _read_push(self, data: memoryview | Tensor) -> DensePiece:
        if not isinstance(data, Tensor):
            return self._extent.read_push(data)
        if data.numel() not in (0, self.rows):
            raise ValueError(f"a push of {data.numel()} elements does not fit into segment {self.index} of {self.rows}")
        return DensePiece(data)

    def push(self, rank: int, step: int, weight: float, data: memoryview | Tensor) -> list[bytes]:
        """File a push of this segment's elements (or of none: zeros). What copies must apply for it.

        A tensor is in the pusher's memory: good until the pusher is answered, and `own` must come before.
        """
        known = self._checked
        if known is None or known[0] != (rank, step, weight) or known[1] is not data:
            self.check(rank, step, weight, data)
            known = self._checked
        assert known is not None, "check() sets it"
        (value, offset, rows), self._checked = known[2], None
        self.operations += 1
        shard = self._own()
        if shard.ledger.seen(rank, step):
            return []
        lent = isinstance(data, Tensor)
        if shard.by == PUSHED:
            change = b""
            if self.copied:
                pushed = (flat_bytes(data).data if len(data) else b"") if isinstance(data, Tensor) else data
                change = b"".join([CHANGE.pack(PUSHED, rank, step, weight), pushed])
            shard.push(rank, step, value, weight, offset, lent, rows)
            shard.seq += 1
            return [change]
        shard.writes = self.copied
        before = shard.seq
        shard.push(rank, step, value, weight, offset, lent, rows)
        changes, shard.changes = shard.changes, []
        return changes if self.copied else [b""] * (shard.seq - before)

    def replay(self, change: memoryview) -> None:
        """Apply one item of what `push` gave on the primary. Raises ValueError."""
        view = memoryview(change).cast("B")
        what, first, second, weight = CHANGE.unpack_from(view)
        shard, rest = self._own(), view[CHANGE.size :]
        shard.writes = False
        if what == PUSHED:
            value, offset, rows = self._extent.read_push(rest)
            shard.push(first, second, value, weight, offset, rows=rows)
            shard.seq += 1
        elif what == MEAN:
            shard.close_as(first, self._extent.read_push(rest) if second else None)
        elif what == VALUES:
            self._replay_values(shard, first, second, rest)
        else:
            raise ValueError(f"a change of kind {what} is none of a dense segment")

    def promoted(self) -> None:
        """A copy has become the primary: what its state knows of rounds that are complete is applied now."""
        if self._base is None:
            self._shard.catch_up()

    def close(self) -> None:
        """Its memory is given up; who shares it gets memory of its own."""
        self._part_from_branches()

    def _replay_values(self, shard: ReplicatedShard, finished: int, count: int, rest: memoryview) -> None:
        at = count * ONE.size
        for i in range(count):
            rank, size, weight = ONE.unpack_from(rest, i * ONE.size)
            value, offset, rows = self._extent.read_push(rest[at : at + size])
            at += size
            shard.push(rank, finished, value.clone(), weight, offset, rows=rows)  # what a state brought along is known

    # ---- pulls

    def may_pull(self, rank: int) -> bool:
        """Whether the clock allows a pull of `rank`."""
        return self._base is not None or self._shard.may_pull(rank)

    def laggards(self) -> list[int]:
        """The ranks that pulls wait for."""
        return list(range(self.space.workers)) if self._base is not None else self._shard.clock.laggards()

    def pull(
        self, rank: int, data: memoryview = memoryview(b""), out: memoryview | None = None
    ) -> tuple[Any, int, list[bytes]]:
        """What `read` gives; the lead; nothing for copies."""
        return self.read(data), self.pulled(rank), []

    def pulled(self, rank: int) -> int:
        """Count a pull of one who reads the values where they are; by how many rounds `rank` leads the slowest."""
        self.operations += 1
        if rank not in range(self.space.workers):
            raise ValueError(f"rank {rank} is not one of {self.space.workers} workers")
        return 0 if self._base is not None else self._shard.pulled(rank)

    def own(self, rank: int) -> None:
        """Copy what still counts of a rank's pushes out of the rank's own memory."""
        if self._base is None:
            self._shard.own(rank)

    def read(self, data: memoryview = memoryview(b"")) -> Any:
        """What `data` asks for: all elements or a range of them as a view, good until the next push; or rows.

        Raises ValueError, ConfigError: it asks for what is not here.
        """
        if self._base is not None:
            return self._base.read(data)
        if not len(data):
            return self._buffer
        area = self._extent.read_pull(data)
        if isinstance(area, ShardRows):
            return flat_bytes(area.of(self._shard.params)).data
        item = self.layout.dtype.itemsize
        return self._buffer[area[0] * item : area[1] * item]

    def marks(self) -> dict[int, int]:
        """By rank: its next step here."""
        return dict.fromkeys(range(self.space.workers), 0) if self._base is not None else self._shard.ledger.marks

    @property
    def ledger(self) -> Ledger:
        """The pushes that it has, in memory of its own: to be read only."""
        return self._own().ledger

    def durable(self, rank: int) -> int:
        """Below this step all of a rank's pushes are applied."""
        if self._base is not None:
            return 0
        return self._shard.ledger.marks.get(rank, 0) if self.by == PUSHED else self._shard.closed

    # ---- states

    def dump(self) -> bytes:
        """The whole state: what `load` takes, and what `state_of` makes."""
        if self._base is None:
            return self._shard.state()
        shard = self.shard
        return _state(shard.params, shard.moments(), shard.groups(), Ledger([0] * self.space.workers))

    def load(self, state: Any) -> None:
        """Become what `dump` gave. Raises CheckpointError: it is of another segment, or torn."""
        head, tensors = unpack_state(state)
        ledger = Ledger.from_json(head["ledger"])
        params = tensors[0]
        if params.numel() != self.rows or params.dtype != self.layout.dtype:
            raise CheckpointError(
                f"a state of {params.numel()} elements {params.dtype} was given for segment {self.index} "
                f"of {self.rows} elements {self.layout.dtype}"
            )
        if len(ledger.marks) != self.space.workers:
            raise CheckpointError(f"a state of {len(ledger.marks)} workers was given to {self.space.workers} workers")
        self._part_from_branches()
        self._settle(params.clone(), ledger)
        self._shard.restore(head, tensors)

    def begin(self, params: Tensor, ledger: Ledger, moments: Moments, boundary: Boundary) -> None:
        """Become a part of a snapshot, whose moments are of whole parameters; keep states at `boundary` from now on."""
        self._part_from_branches()
        self.boundary = boundary
        self._settle(params.clone(), ledger.copy())
        self._shard.load(moments, self.layout)

    def facts(self, index: int, wanted: int) -> ShardFacts:
        """What the owner of a static map asks shard `index` while it runs; the state after round `wanted` is kept."""
        shard = self._own()
        shard.kept.wanted = wanted
        if wanted > shard.closed:
            shard.wanted = {wanted}
        return replace(shard.facts(), index=index, snapshots=sorted(shard.kept))

    def skip(self, rank: int, step: int) -> None:
        """Give up a rank's pushes below `step`: nobody has them any more."""
        self._own().skip(rank, step)

    def keep(self, rounds: Sequence[int]) -> None:
        """After which rounds to keep a state."""
        self._own().wanted.update(r for r in rounds if r > self._own().closed)

    def part(self, rounds: int) -> bytes | None:
        """The state after `rounds`, if it is kept."""
        return None if self._base is not None else self._shard.kept.get(rounds)

    # ---- branches

    def branch(
        self, space: Space | None = None, index: int | None = None, factory: Factory | None = None
    ) -> DenseSegment:
        """Return another segment that begins with the same values.

        It belongs to another space, with workers, a strategy and an optimizer schedule (`factory`) of its own. The
        memory is shared until one of the two is pushed to.
        """
        base = self if self._base is None else self._base
        made = DenseSegment(
            space or self.space, self.index if index is None else index, factory or self.factory, base=base
        )
        base._branches = [ref for ref in base._branches if ref() is not None] + [weakref.ref(made)]
        return made

    def _own(self) -> ReplicatedShard:
        """The shard, to write to: in memory that nobody else reads."""
        self._part_from_branches()
        if self._base is not None:
            self._leave(self._base)
        return self._shard

    def _part_from_branches(self) -> None:
        if self._branches:
            branches, self._branches = self._branches, []
            for branch in filter(None, (ref() for ref in branches)):
                if branch._base is self:
                    branch._leave(self)

    def _leave(self, base: DenseSegment) -> None:
        head, tensors = unpack_state(self.dump())
        self._settle(base.shard.params.clone(), Ledger([0] * self.space.workers))
        self._shard.restore(head, tensors)


def _state(params: Tensor, moments: Moments, groups: list[dict[str, Any]], ledger: Ledger, version: int = 0) -> bytes:
    tensors = [params.detach().reshape(-1)]
    plain = plain_moments(moments, tensors)
    head = {
        "seq": 0,
        "version": version,
        "ledger": ledger.to_json(),
        "moments": plain,
        "groups": groups,
        "inbox": [],
        "kept": {},
        "wanted": [],
    }
    return pack_state(head, tensors)


def state_of(
    piece: Tensor,
    layout: Layout,
    lo: int,
    *,
    moments: Moments | None = None,
    marks: Ledger | Sequence[int],
    version: int = 0,
) -> bytes:
    """A state to LOAD: of the elements from `lo` of a vector, given as `piece`.

    `moments` is the optimizer's state of whole parameters by name (other parameters than the piece's are left out);
    `marks` the next step of each rank, or a ledger.
    """
    ledger = marks if isinstance(marks, Ledger) else Ledger(marks)
    return _state(piece, cut_moments(moments or {}, layout, lo, lo + piece.numel()), [], ledger, version)


def part_of(state: Any, rounds: int, lo: int) -> ShardPart:
    """A dense segment's state as a shard's share of a checkpoint. Raises CheckpointError."""
    head, tensors = unpack_state(state)
    moments = full_moments(head["moments"], tensors)
    return ShardPart(rounds, lo, tensors[0].clone(), moments, Ledger.from_json(head["ledger"]))

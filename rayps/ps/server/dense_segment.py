"""A segment of the dense vector on a server: its shard, pushes and states as bytes, and branches.

A *change* is what a primary sends to its backups. If the strategy changes the shard on each push, a change is a push.
If it changes the shard only when a round is complete, a change is a closed round. If the strategy applies only the
weighted mean of the round's pushes (`PerRound(means=True)`), the change has this mean, one vector for any number of
workers. Otherwise it has all pushes of the round, in the order of ranks.
"""

from __future__ import annotations

import struct
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from rayps_client.errors import CheckpointError, ConfigError
from rayps_client.values import Buffer
from torch import Tensor
from torch.optim import Adagrad

from rayps.core.failpoint import passing
from rayps.core.job.repeated_pushes import WINDOW, Ledger
from rayps.core.rows.phase_rounds import Boundary
from rayps.core.strategy.apply_pushes import weighted_mean
from rayps.core.strategy.staleness_bound import Clock, MovedBound
from rayps.core.strategy.strategy import ServerHalf
from rayps.core.strategy.topology import Servers, servers_of
from rayps.core.time.member_times import MemberTimes
from rayps.ps.protocol.mailbox import STEPS, SharedSlice
from rayps.ps.protocol.members import MemberChange, MemberChangeKind, explain_left
from rayps.ps.protocol.pieces import DensePiece, Extent, KnownRows, encode_area_piece
from rayps.ps.protocol.rows import KEPT_LISTS, Area, ShardRows, gather, step_rows
from rayps.ps.protocol.space import Space
from rayps.tensors.flat import Layout
from rayps.tensors.learning_rate import Ticks, change_factory, pace_of, skips_ticks
from rayps.tensors.optim import Factory, Moments, SlicedOptimizer, select_fitting
from rayps.tensors.optim import cut as cut_moments
from rayps.tensors.packing import pack_moments, pack_state, tensor_of, unpack_moments, unpack_state, view_bytes
from rayps.tensors.snapshot import RetainedParts

NEVER = Boundary(0, -1)


@dataclass(slots=True)
class ShardPart:
    """A shard's share of a checkpoint, after `round` rounds of the slowest worker."""

    round: int
    lo: int
    params: Tensor
    moments: Moments
    ledger: Ledger

    @property
    def done(self) -> dict[int, int]:
        """For each rank, the number of its pushes that were applied without a gap."""
        return self.ledger.marks


@dataclass(slots=True)
class ShardFacts:
    """The facts about a running shard that the driver polls."""

    index: int
    lo: int
    hi: int
    version: int
    bytes: int
    staleness: dict[int, int]  # number of rounds that a rank was ahead of the slowest -> number of such pulls
    laggards: list[int]  # the slowest ranks
    reached: int  # rounds that the slowest worker has pushed
    snapshots: list[int] = field(default_factory=list)  # rounds after which a state is retained
    ages: dict[int, int] = field(default_factory=dict)  # optimizer steps since the rank's pull -> number of pushes
    lost: int = 0  # acknowledged pushes that no worker retained when this shard was restored
    times: MemberTimes | None = None  # where the time of its process went, about once a second; None in between


# ---- changes: what backups apply

# kind; then rank, step, weight of a push; or round, number of values, and 1 if the round was skipped in fp16, else 0
CHANGE = struct.Struct("<qqqd")
ONE = struct.Struct("<qqd")  # rank, bytes and weight of one value of a round
PUSHED, MEAN, VALUES = 1, 2, 3
MEMBERS = 4  # kind of a change of the ranks that take part


def find_kind_of_change(strategy: ServerHalf) -> int:
    """Return what a change is under this strategy: PUSHED (a push), or a closed round as its MEAN or all its VALUES."""
    servers = servers_of(strategy)
    if servers is None or servers.update.listens:
        return PUSHED
    return MEAN if servers.update.means else VALUES


class OpenPush(NamedTuple):
    """A push of an open round: its elements, its weight, and the area of the shard that these elements cover."""

    value: Tensor
    weight: float
    area: Area

    @property
    def skipped(self) -> bool:
        """Whether a worker sent it in place of a gradient that has overflowed in fp16."""
        return not self.weight and not isinstance(self.area, ShardRows) and self.area[0] == self.area[1]


class ChangeLog:
    """The changes of a shard: their number and, while `recording` is set, their encoding for the backups."""

    def __init__(self, strategy: ServerHalf, size: int) -> None:
        """`size` is the shard's number of elements."""
        self.kind = find_kind_of_change(strategy)
        self.seq = 0
        self.recording = False
        self._size = size
        self._changes: list[bytes] = []
        self._mean = b""

    def pushed(self, rank: int, step: int, weight: float, data: Buffer) -> bytes:
        """Return a push encoded as a change, or b"" unless recording."""
        return b"".join([CHANGE.pack(PUSHED, rank, step, weight), data]) if self.recording else b""

    def stepped(self, grad: Tensor, area: Area) -> None:
        """If changes are means, record the gradient of an optimizer step, which is the round's mean."""
        if self.kind == MEAN:
            self._mean = encode_area_piece(grad, area, self._size)

    def gathered(self, finished: int, pushes: Sequence[tuple[int, OpenPush]]) -> None:
        """If changes have all pushes, record the pushes of a round, as pairs (rank, push)."""
        if self.kind == VALUES:
            values = [encode_area_piece(push.value, push.area, self._size) for _, push in pushes]
            heads = [
                ONE.pack(rank, len(value), push.weight) for (rank, push), value in zip(pushes, values, strict=True)
            ]
            self._changes.append(b"".join([CHANGE.pack(VALUES, finished, len(pushes), 0.0), *heads, *values]))

    def closed(self, finished: int, skipped: bool) -> None:
        """Count a closed round if changes are rounds, and record its mean if changes are means.

        `skipped`: the round is no step of the schedule, because all of its gradients have overflowed in fp16.
        """
        if self.kind != PUSHED:
            self.seq += 1
            if self.recording and self.kind == MEAN:
                self._changes.append(CHANGE.pack(MEAN, finished, bool(self._mean), skipped) + self._mean)
                self._mean = b""

    def since(self, seq: int) -> list[bytes]:
        """Return the changes after number `seq`, and remove them from this log. They are empty unless recording."""
        changes, self._changes = self._changes, []
        return changes if self.recording else [b""] * (self.seq - seq)


# ---- the parts of a shard


class SegmentOptimizer:
    """A segment's parameters and the optimizer that steps them, whole or in part, with its learning-rate schedule."""

    def __init__(
        self, extent: Extent, memory: SharedSlice, factory: Factory, ticks: Ticks, *, params: Tensor | None = None
    ) -> None:
        """Step `params`, which are by default those in `memory`."""
        self.params = memory.params if params is None else params
        self.whole = 0, self.params.numel()
        self.area: Area = self.whole  # what the next step changes; the rest of the segment keeps its values
        self._words = memory.words
        self._sliced = SlicedOptimizer(factory, extent.layout, self.params, extent.lo, extent.hi)
        self._pace = pace_of(factory, extent.layout, self._sliced.optimizer, ticks)

    def begin(self, area: Area, step: int) -> None:
        """Set the area that the next step changes, and the round `step`, which determines the learning rate.

        In fp16 this is the number of the round without the rounds that were skipped (`Shard.tick`).
        """
        self.area = area
        if self._pace is not None:
            self._pace.at(step)

    def step(self, grad: Tensor, scale: float = 1.0, decays: float | None = None) -> None:
        """Apply `scale` times a gradient of the area; see `SlicedOptimizer.step`."""
        area, grad = self.area, self._move_gradient(grad)
        self._words[STEPS] += (
            1  # odd during the step: a worker that reads the memory during the step must read it again
        )
        try:
            if area is self.whole or area == self.whole:
                self._sliced.step(grad, scale, decays)
            elif isinstance(area, ShardRows):
                step_rows(self._sliced, area, grad, scale, decays)
            else:
                self._step_range(grad * scale, *area, abs(scale) if decays is None else decays)
            self._stepped()
        finally:
            self._words[STEPS] += 1

    def mean(self, values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """Return the weighted mean of gradients of the area, sum(w_i v_i) / sum(w_i), valid until the next call."""
        return self._sliced.mean(values, weights) if self.area == self.whole else weighted_mean([*values], [*weights])

    def _move_gradient(self, grad: Tensor) -> Tensor:
        """Return a gradient where the parameters are."""
        return grad

    def _stepped(self) -> None:
        """Handle the end of a step, before other processes may read the new values."""

    def _step_range(self, grad: Tensor, a: int, b: int, decays: float) -> None:
        # an elementwise optimizer may step all elements, if those outside the range are restored afterwards
        params, states = self.params.clone(), {id(t): t.clone() for _, t in self._list_elementwise()}
        self._sliced.step(grad, decays=decays)
        params[a:b] = self.params[a:b]
        self.params.copy_(params)
        for cut, t in self._list_elementwise():
            old = states.get(id(t), torch.zeros_like(t))
            lo, hi = max(a, cut.start) - cut.start, min(b, cut.stop) - cut.start
            if lo < hi:
                old[lo:hi] = t[lo:hi]
            t.copy_(old)

    def _list_elementwise(self) -> list[tuple[slice, Tensor]]:
        """Return the optimizer-state tensors with one number per element, each with the range of elements it covers."""
        state = self._sliced.optimizer.state
        return [
            (cut, t)
            for leaf, cut in self._sliced.leaves()
            for t in state.get(leaf, {}).values()
            if isinstance(t, Tensor) and t.dim() > 0
        ]

    def load(self, moments: Moments, extent: Extent) -> None:
        """Restore this segment's part of an optimizer state that covers whole parameters."""
        self._sliced.load(select_fitting(moments, self._sliced.optimizer), extent.layout)

    def restore(self, moments: Moments, groups: Sequence[Mapping[str, Any]]) -> None:
        """Restore the optimizer state that the methods `moments` and `groups` returned."""
        self._sliced.restore(moments)
        for mine, given in zip(self._sliced.optimizer.param_groups, groups, strict=False):
            mine.update({key: tuple(value) if isinstance(value, list) else value for key, value in given.items()})

    def moments(self) -> Moments:
        """Return a copy of the optimizer's state, by parameter name."""
        return self._sliced.moments()

    def groups(self) -> list[dict[str, Any]]:
        """Return the options of the optimizer's parameter groups, such as `lr`, JSON-ready."""
        plain = (int, float, str, bool, type(None), tuple)
        return [
            {key: value for key, value in group.items() if key != "params" and isinstance(value, plain)}
            for group in self._sliced.optimizer.param_groups
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of parameters and optimizer state."""
        held = [t for state in self._sliced.optimizer.state.values() for t in state.values()]
        return sum(t.numel() * t.element_size() for t in [self.params, *held] if isinstance(t, Tensor))


OptimizerType = Callable[[Extent, SharedSlice, Factory, Ticks], SegmentOptimizer]


class RoundBuffer:
    """The pushes of open rounds, by step and rank."""

    def __init__(self) -> None:
        self._pushes: dict[int, dict[int, OpenPush]] = {}
        self.by_reference: set[tuple[int, int]] = set()  # (step, rank) of pushes in the pusher's memory

    def add_push(self, step: int, rank: int, push: OpenPush, by_reference: bool = False) -> None:
        """Store a push until its round is closed.

        If the push is `by_reference`, it is in the worker's memory: call `copy_pushes` before the worker is answered.
        """
        self._pushes.setdefault(step, {})[rank] = push
        if by_reference:
            self.by_reference.add((step, rank))

    def count(self, step: int) -> int:
        """Return the number of pushes of a round."""
        return len(self._pushes.get(step, ()))

    def copy_pushes(self, rank: int) -> None:
        """Copy the pushes of a rank that were given by reference from the rank's memory into the server's."""
        for key in [key for key in self.by_reference if key[1] == rank]:
            self.by_reference.discard(key)
            push = self._pushes[key[0]][rank]
            self._pushes[key[0]][rank] = push._replace(value=push.value.clone())

    def remove_round(self, step: int) -> list[tuple[int, OpenPush]]:
        """Remove and return the pushes of a round, in the order of ranks."""
        if self.by_reference:
            self.by_reference = {key for key in self.by_reference if key[0] != step}
        return sorted(self._pushes.pop(step, {}).items())

    def __iter__(self) -> Iterator[tuple[int, int, OpenPush]]:
        return ((step, rank, push) for step, pushes in self._pushes.items() for rank, push in pushes.items())


class RetainedStates(RetainedParts[bytes]):
    """A shard's states after the rounds of a boundary and after requested rounds, until the driver fetches them."""

    def __init__(self, boundary: Boundary) -> None:
        super().__init__()
        self._boundary = boundary
        self.requested: set[int] = set()

    def due(self, rounds: int) -> bool:
        """Return whether to retain the state after `rounds` rounds."""
        return rounds in self.requested or rounds in self._boundary

    def retain(self, rounds: int, part: bytes) -> None:
        """Retain the state after `rounds` rounds, and drop older ones (see `RetainedParts`)."""
        super().retain(rounds, part)
        passing("host: state kept, not collected")
        self.requested = {each for each in self.requested if each > rounds}


class ShardCounts:
    """Counters of a shard, for its facts: pulls by the lead of their rank, pushes by age, and lost pushes."""

    def __init__(self) -> None:
        self.leads: Counter[int] = Counter()  # rounds that the rank was ahead of the slowest -> number of such pulls
        self.ages: Counter[int] = Counter()  # optimizer steps since the rank's last pull -> number of such pushes
        self.lost = 0
        self._pulled_at: dict[int, int] = {}  # rank -> the version of its last pull

    def pulled(self, rank: int, version: int, lead: int) -> None:
        """Count a pull."""
        self.leads[lead] += 1
        self._pulled_at[rank] = version

    def pushed(self, rank: int, version: int) -> None:
        """Count a push, if its rank has pulled from this shard."""
        if rank in self._pulled_at:
            self.ages[version - self._pulled_at[rank]] += 1


@dataclass(slots=True)
class ShardState:
    """The complete state of a shard, for a backup, a move, a branch or a checkpoint."""

    params: Tensor
    moments: Moments
    ledger: Ledger
    groups: list[dict[str, Any]] = field(default_factory=list)
    version: int = 0
    seq: int = 0
    pushes: list[tuple[int, int, float, bytes]] = field(default_factory=list)  # open rounds: step, rank, weight, piece
    kept: dict[int, bytes] = field(default_factory=dict)  # round -> retained state
    wanted: list[int] = field(default_factory=list)  # rounds after which a state was requested

    def applied(self) -> Ledger:
        """Return the ledger of the pushes that the parameters contain: without those of open rounds."""
        first = min((step for step, *_ in self.pushes), default=None)
        if first is None:
            return self.ledger
        return Ledger((min(mark, first) for mark in self.ledger.marks.values()), skipped=self.ledger.skipped)

    def pack(self) -> bytes:
        """Encode the state; see `rayps.tensors.packing`."""
        tensors = [self.params.detach().reshape(-1)]
        head = {
            "seq": self.seq,
            "version": self.version,
            "ledger": self.ledger.to_json(),
            "moments": pack_moments(self.moments, tensors),
            "groups": self.groups,
        }
        first = len(tensors)
        head["inbox"] = [[*push[:3], first + i] for i, push in enumerate(self.pushes)]
        head["kept"] = {str(rounds): first + len(self.pushes) + i for i, rounds in enumerate(sorted(self.kept))}
        head["wanted"] = self.wanted
        rest = [*(push[3] for push in self.pushes), *(self.kept[rounds] for rounds in sorted(self.kept))]
        return pack_state(head, tensors + [tensor_of(each, torch.uint8) for each in rest])

    @classmethod
    def unpack(cls, data: Buffer) -> ShardState:
        """Decode what `pack` returned; `params` may be a view of `data`. Raises CheckpointError if it is truncated."""
        head, tensors = unpack_state(data)
        return cls(
            tensors[0],
            unpack_moments(head["moments"], tensors),
            Ledger.from_json(head["ledger"]),
            head.get("groups", []),
            head["version"],
            head["seq"],
            [(step, rank, weight, view_bytes(tensors[i]).tobytes()) for step, rank, weight, i in head["inbox"]],
            {int(rounds): view_bytes(tensors[i]).tobytes() for rounds, i in head["kept"].items()},
            head["wanted"],
        )


# ---- the shard


class Shard:
    """The parameters, optimizer, clock and open rounds of one segment of the dense vector.

    Implements `rayps.core.strategy.strategy.ShardView`, through which the strategy's `on_push` and `on_round` change
    it.
    """

    def __init__(
        self,
        extent: Extent,
        strategy: ServerHalf,
        factory: Factory,
        params: Tensor,
        start: Ledger | Sequence[int],
        *,
        boundary: Boundary = NEVER,
        private: bool = False,
        ticks: Ticks | None = None,
        optimizer: OptimizerType | None = None,
    ) -> None:
        """Begin with `params`, which contain the pushes that `start` lists.

        `start`: a ledger, or the first step that each rank will push. `boundary`: the rounds after which a state is
        retained. With `private`, the shard uses the tensor `params` itself, and other processes cannot read it.
        `ticks`: the epochs of the phase, for a learning-rate schedule that counts epochs. `optimizer`: makes the
        shard's optimizer, such as one on a device; None means `SegmentOptimizer`.
        """
        servers = servers_of(strategy) or Servers()
        self.extent, self.strategy = extent, strategy
        self.slice = SharedSlice(params, private=private)
        self.ledger = start.copy() if isinstance(start, Ledger) else Ledger(start)
        if not skips_ticks(factory):
            self.ledger.skipped = None
        elif self.ledger.skipped is None:
            self.ledger.skipped = dict.fromkeys(self.ledger.marks, 0)
        self.clock = Clock(self.ledger.marks, servers.staleness, self.ledger.active)
        self.closed = self.clock.slowest  # number of closed rounds
        self.rounds = 1  # number of rounds that the current push covers, see ShardView
        self.version = 0  # number of optimizer steps
        self.spans, self._borrows = servers.update.spans, servers.update.borrows
        self._backup = servers.backup  # so many of the workers are no members of a round
        self.changes = ChangeLog(strategy, self.slice.params.numel())
        self.retained = RetainedStates(boundary)
        self._open = RoundBuffer() if servers.update.gathers else None
        self._counts = ShardCounts()
        made = optimizer or SegmentOptimizer
        self.optimizer = made(extent, self.slice, make_optimizer_factory(factory, servers.adagrad), ticks or Ticks())

    @property
    def size(self) -> int:
        """The number of workers that take part."""
        active = self.ledger.active
        return len(self.ledger.marks) if active is None else max(1, len(active.ranks))

    @property
    def params(self) -> Tensor:
        """The parameters: a view, valid until the next push."""
        return self.slice.params

    # ---- steps, by the strategy

    def step(self, grad: Tensor, scale: float = 1.0, decays: float | None = None) -> None:
        """Step the optimizer by `scale` times a gradient of the pushed elements; other elements keep their values.

        `decays`: see `SlicedOptimizer.step`.
        """
        if self.changes.recording:
            self.changes.stepped(grad, self.optimizer.area)
        self.optimizer.step(grad, scale, decays)
        self.version += 1

    def step_mean(self, values: Sequence[Tensor], weights: Sequence[float]) -> None:
        """Step the optimizer by the weighted mean sum(w_i v_i) / sum(w_i) of gradients of the pushed elements."""
        self.step(self.optimizer.mean(values, weights))

    # ---- pushes

    def push(
        self,
        rank: int,
        step: int,
        value: Tensor,
        weight: float,
        offset: int = 0,
        by_reference: bool = False,
        rows: ShardRows | None = None,
    ) -> bool:
        """Record the push of `rank` for `step`; return False, without effect, if it was recorded before.

        `value` has elements of this shard from `offset` on, or those of `rows`; the shard's other elements count as
        zero. With `by_reference`, `value` is in the worker's memory: call `copy_pushes` before the worker is answered.

        Raises:
            ValueError: too many steps were skipped, the rank is unknown, or the value does not fit.
        """
        optimizer, count = self.optimizer, value.numel()
        size = optimizer.whole[1]
        area = (
            optimizer.whole if count == size and not offset and rows is None else _make_area(count, offset, rows, size)
        )
        if self.spans:
            self.rounds = step + 1 - self.ledger.marks.get(rank, 0)
        repeats = self.ledger.is_repeat(rank, step)
        if not (self.ledger.fill(rank, step) if self.spans else self.ledger.add(rank, step)):
            if repeats:  # the push is recorded, although it has no effect
                self.changes.seq += 1
                self.finish()
            return False
        self._counts.pushed(rank, self.version)
        if rows is None and count < size:
            value, by_reference = pad(value, offset, size), False
        elif by_reference and not self._borrows:
            value, by_reference = value.clone(), False
        if count:
            optimizer.begin(area, self.tick(rank, step))
            self.strategy.on_push(self, value, weight)
        if self.ledger.skipped is not None and not count and not weight and self._open is None:
            self.ledger.skipped[rank] += self.rounds
        else:
            self.ledger.count_push()
        if self.changes.kind == PUSHED:
            self.changes.seq += 1
        if self._open is not None:
            self._open.add_push(step, rank, OpenPush(value, weight, area), by_reference)
        if step == self.closed or self.spans:  # otherwise a rank that has not pushed step `closed` keeps the round open
            if self._backup:
                self._spare_others(step)
            self.finish()
        return True

    def _spare_others(self, step: int) -> None:
        """If all members of a round have pushed, count the round as pushed by the other ranks too.

        Only members push: see `rayps.ps.server.backup_rounds`.
        """
        assert self._open is not None, "workers in step have open rounds"
        if self._open.count(step) == self.size - self._backup:
            for rank in self.ledger.marks:
                self.ledger.skip(rank, step + 1)

    def tick(self, rank: int, step: int) -> int:
        """Return round `step` of `rank` as a schedule counts rounds: without the rounds that were skipped in fp16.

        If ranks join and leave, a rank's steps only identify its pushes, and the pushes of all ranks are counted.
        """
        if self.ledger.active is not None:
            return self.ledger.active.pushes.round
        skipped = self.ledger.skipped
        return step if skipped is None else max(0, step - skipped[rank])

    def skip(self, rank: int, step: int) -> None:
        """Count a rank's missing pushes below `step` as lost, because no worker retains them."""
        self._counts.lost += self.ledger.skip(rank, step)
        self.finish()

    def copy_pushes(self, rank: int) -> None:
        """Copy the pushes of a rank that are still needed from the rank's shared memory into the server's memory.

        Call it before the answer to the rank, which overwrites its shared memory afterwards.
        """
        if self._open is not None and self._open.by_reference:
            self._open.copy_pushes(rank)

    def finish(self) -> None:
        """Close the rounds that all ranks that take part have pushed."""
        before, self.closed = self.closed, max(self.closed, self.clock.slowest)
        for finished in range(before, self.closed):
            self._close(finished)

    def change_members(self, change: MemberChange) -> None:
        """Apply a change of the ranks that take part. Raises ValueError if there is no such rank."""
        if change.kind is MemberChangeKind.END and change.step > self.closed:
            self.retained.requested.add(change.step)
        change.apply_to(self.ledger)
        self.clock.active = self.ledger.active
        self.changes.seq += 1
        self.finish()

    def _close(self, finished: int) -> None:
        """Close a round: apply its pushes by the strategy's `on_round`."""
        skipped = False
        if self._open is not None:
            pushes = self._open.remove_round(finished)
            if self.changes.recording:
                self.changes.gathered(finished, pushes)
            values, area = gather([(push.value, push.area) for _, push in pushes], self.optimizer.whole[1])
            if area.elements if isinstance(area, ShardRows) else area[0] < area[1]:
                self.optimizer.begin(area, self.tick(0, finished))
                self.strategy.on_round(self, values, [push.weight for _, push in pushes])
            if self.ledger.skipped is not None:
                skipped = any(push.skipped for _, push in pushes) and not any(push.weight for _, push in pushes)
        self._note_closed(finished, skipped)

    def _note_closed(self, finished: int, skipped: bool) -> None:
        if skipped and self.ledger.skipped is not None:
            self.ledger.skipped = {rank: count + 1 for rank, count in self.ledger.skipped.items()}
        self.changes.closed(finished, skipped)
        if self.retained.due(finished + 1):
            self.retained.retain(finished + 1, self.state(parts=False).pack())

    # ---- as a backup

    def replay(self, change: memoryview) -> None:
        """Apply one change of the primary. Raises ValueError if it is not a change of a dense segment."""
        view = memoryview(change).cast("B")
        kind, first, second, weight = CHANGE.unpack_from(view)
        body = view[CHANGE.size :]
        self.changes.recording = False
        if kind == MEMBERS:
            self.change_members(MemberChange.decode(body))
        elif kind == PUSHED:
            value, offset, rows = self.extent.read_push(body)
            self.push(first, second, value, weight, offset, rows=rows)
        elif kind == MEAN:
            self._close_as(first, self.extent.read_push(body) if second else None, skipped=bool(weight))
        elif kind == VALUES:
            at = second * ONE.size
            for i in range(second):
                rank, size, weight = ONE.unpack_from(body, i * ONE.size)
                value, offset, rows = self.extent.read_push(body[at : at + size])
                at += size
                self.push(rank, first, value.clone(), weight, offset, rows=rows)  # no effect if the state contained it
        else:
            raise ValueError(f"a change has kind {kind}, which a dense segment cannot apply")

    def _close_as(self, finished: int, mean: DensePiece | None, *, skipped: bool) -> None:
        """Close a round with the mean that the primary computed."""
        for rank in self.ledger.marks:
            self.ledger.skip(rank, finished + 1)
        if self._open is not None:
            self._open.remove_round(finished)
        self.closed = finished + 1  # the state may contain pushes of later rounds: later changes close those
        if mean is not None:
            value, area = self._open_push(mean)
            self.optimizer.begin(area, self.tick(0, finished))
            self.step(value)
        self._note_closed(finished, skipped)

    def _open_push(self, piece: DensePiece) -> tuple[Tensor, Area]:
        """Return a piece's elements and area, as in `OpenPush`. A range is extended with zeros to the whole shard."""
        (value, offset, rows), size = piece, self.optimizer.whole[1]
        return (pad(value, offset, size) if rows is None and value.numel() < size else value), piece.area

    # ---- pulls

    def pulled(self, rank: int) -> int:
        """Count a pull; return by how many rounds `rank` is ahead of the slowest rank."""
        lead = self.ledger.marks[rank] - self.closed
        self._counts.pulled(rank, self.version, lead)
        return lead

    def facts(self, index: int) -> ShardFacts:
        """Return the facts that the driver polls."""
        return ShardFacts(
            index,
            self.extent.lo,
            self.extent.hi,
            self.version,
            self.params.numel() * self.params.element_size(),
            dict(self._counts.leads),
            self.clock.laggards(),
            self.clock.slowest,
            sorted(self.retained),
            dict(self._counts.ages),
            self._counts.lost,
        )

    # ---- states

    def state(self, parts: bool = True) -> ShardState:
        """Return the whole state; its parameters are a view. Without `parts`, retained states are left out."""
        size = self.optimizer.whole[1]
        return ShardState(
            self.params,
            self.optimizer.moments(),
            self.ledger,
            self.optimizer.groups(),
            self.version,
            self.changes.seq,
            [(step, rank, p.weight, encode_area_piece(p.value, p.area, size)) for step, rank, p in self._open or ()],
            dict(self.retained) if parts else {},
            sorted(self.retained.requested),
        )

    def restore(self, state: ShardState) -> None:
        """Restore a state, except its parameters and its ledger, which the constructor was given."""
        self.changes.seq, self.version = state.seq, state.version
        self.optimizer.restore(state.moments, state.groups)
        for step, rank, weight, piece in state.pushes if self._open is not None else ():
            value, area = self._open_push(self.extent.read_push(memoryview(bytearray(piece))))
            self._open.add_push(step, rank, OpenPush(value, weight, area))  # type: ignore[union-attr]
        self.retained.update(state.kept)
        self.retained.requested = set(state.wanted)


def make_optimizer_factory(factory: Factory, adagrad: float | None) -> Factory:
    """Return the workload's optimizer factory, or if `adagrad` is given, a factory of Adagrad with this learning rate.

    The workload's learning-rate schedule applies to both.

    Duchi, Hazan and Singer, "Adaptive subgradient methods", JMLR 2011.
    """
    if adagrad is None:
        return factory
    # a parameter group, because a part of a model may have no parameters, and torch refuses an empty list of them
    return change_factory(factory, lambda _: lambda params: Adagrad([{"params": params}], lr=adagrad))


def pad(value: Tensor, offset: int, size: int) -> Tensor:
    """Return `size` elements: zeros, and `value` from `offset` on."""
    whole = torch.zeros(size, dtype=value.dtype)
    whole[offset : offset + value.numel()] = value
    return whole


def _make_area(count: int, offset: int, rows: ShardRows | None, size: int) -> Area:
    if rows is not None and count != rows.elements:
        raise ValueError(f"a push of {count} elements does not fit: its rows have {rows.elements} elements")
    if offset < 0 or count + offset > size:
        raise ValueError(f"a push of {count} elements from {offset} on does not fit into a shard of {size} elements")
    return rows if rows is not None else (offset, offset + count)


# ---- the segment


class DenseSegment:
    """Elements lo to hi of a space's dense vector. Implements `rayps.ps.protocol.space.ServedSegment`.

    A *branch* is a segment that begins with the values of another segment, its base. It has no shard of its own, and
    reads the base's memory, until one of the two receives a push.
    """

    def __init__(
        self,
        space: Space,
        index: int,
        factory: Factory,
        *,
        base: DenseSegment | None = None,
        optimizer: OptimizerType | None = None,
    ) -> None:
        """Begin with the values of `base`, or with zeros until a state is loaded. `optimizer`: see `Shard`."""
        if space.layout is None:
            raise ConfigError(
                f"space {space.name!r} has no dense vector, of which segment {index} could be a part", field="segment"
            )
        self.space, self.index, self.factory, self._optimizer = space, index, factory, optimizer
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
            self._replace_shard(ShardState(zeros, {}, Ledger([0] * space.workers)), restore=False)

    def _replace_shard(self, state: ShardState, *, restore: bool = True) -> None:
        """Replace the shard by a shard with this state, in memory that no other segment uses."""
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
            optimizer=self._optimizer,
        )
        self._shard.clock.move(self.space.bound)
        self._buffer = view_bytes(self._shard.params).data if self.rows else memoryview(b"")
        if restore:
            self._shard.restore(state)

    # ---- the shard

    @property
    def shard(self) -> Shard:
        """The segment's shard, or the base's shard if this is a branch without its own. For reading only."""
        return self._shard if self._base is None else self._base.shard

    @property
    def borrows(self) -> bool:
        """Whether the segment is a branch that still reads its base's memory."""
        return self._base is not None

    @property
    def alone(self) -> Shard | None:
        """The shard if workers of this host can read its memory and no other segment uses it; else None."""
        return self._shard if self._shared and self._base is None and not self._branches else None

    def share(self) -> SharedSlice:
        """Copy the values into memory that workers of this host can read, unless done before; return this memory."""
        if not self._shared:
            self._shared = True
            self._replace_shard(self._shard.state())
        return self._shard.slice

    @property
    def seq(self) -> int:
        """The number of changes that were applied."""
        return 0 if self._base is not None else self._shard.changes.seq

    @seq.setter
    def seq(self, value: int) -> None:
        self._make_shard_writable().changes.seq = value

    @property
    def version(self) -> int:
        """The number of optimizer steps."""
        return 0 if self._base is not None else self._shard.version

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters and optimizer state; 0 while the segment reads its base's memory."""
        return 0 if self._base is not None else self._shard.optimizer.nbytes

    # ---- pushes

    def check(self, rank: int, step: int, weight: float, data: memoryview | Tensor) -> None:
        """Raise the ValueError or ConfigError that `push` would raise. The segment does not change."""
        self._checked, read = None, self._read_push(data)
        if not 0 <= weight < float("inf"):
            raise ValueError(f"a push has weight {weight}: give the number of samples, 0 or more")
        marks = self.marks()
        if rank not in marks:
            raise ValueError(f"rank {rank} does not exist: {len(marks)} workers have the ranks 0 to {len(marks) - 1}")
        if self._base is None and not self._shard.ledger.takes_part(rank):
            raise explain_left(rank)
        servers = servers_of(self.space.strategy)
        if step - marks[rank] >= WINDOW and not (servers is not None and servers.update.spans):
            raise ValueError(
                f"rank {rank} pushed step {step} before step {marks[rank]}: at most {WINDOW - 1} steps may be skipped"
            )
        self._checked = (rank, step, weight), data, read

    def _read_push(self, data: memoryview | Tensor) -> DensePiece:
        if not isinstance(data, Tensor):
            return self.extent.read_push(data, self._known)
        if data.dtype == torch.uint8:  # a piece with a head, in the pusher's memory
            return self.extent.read_push(view_bytes(data).data, self._known)
        if data.numel() not in (0, self.rows):
            raise ValueError(
                f"a push of {data.numel()} elements does not fit into segment {self.index} of {self.rows} elements"
            )
        return DensePiece(data)

    def push(self, rank: int, step: int, weight: float, data: memoryview | Tensor) -> list[bytes]:
        """Record a push of this segment's elements, or of zeros if `data` is empty; return the changes for backups.

        If `data` is a tensor, it is in the worker's memory: call `copy_pushes` before the worker is answered.
        """
        known = self._checked
        if known is None or known[0] != (rank, step, weight) or known[1] is not data:
            self.check(rank, step, weight, data)
            known = self._checked
        assert known is not None, "check() sets it"
        (value, offset, rows), self._checked = known[2], None
        self.operations += 1
        shard, by_reference = self._make_shard_writable(), isinstance(data, Tensor)
        if shard.ledger.seen(rank, step):
            return []
        changes = shard.changes
        before, changes.recording = changes.seq, self.copied
        if changes.kind != PUSHED:
            shard.push(rank, step, value, weight, offset, by_reference, rows)
            return changes.since(before)
        pushed = (view_bytes(data).data if len(data) else b"") if isinstance(data, Tensor) else data
        change = changes.pushed(rank, step, weight, pushed)  # before the strategy may write into the value
        shard.push(rank, step, value, weight, offset, by_reference, rows)
        return [change]

    def replay(self, change: memoryview) -> None:
        """Apply one of the changes that `push` returned on the primary. Raises ValueError if it is none."""
        self._make_shard_writable().replay(change)

    def change_members(self, change: MemberChange) -> list[bytes]:
        """Apply a change of the ranks that take part; return the changes for backups: see `ServedSegment`."""
        shard = self._make_shard_writable()
        if shard.changes.kind != PUSHED:
            raise ConfigError(
                f"the strategy of space {self.space.name!r} applies whole rounds: workers neither join nor leave",
                field="strategy",
            )
        shard.change_members(change)
        return [CHANGE.pack(MEMBERS, change.rank, change.step, 0.0) + change.encode() if self.copied else b""]

    def promoted(self) -> None:
        """Close, as the new primary, the rounds that all ranks have pushed."""
        if self._base is None:
            self._shard.finish()

    def close(self) -> None:
        """Copy this segment's values into the branches that read its memory, so that the memory can be freed."""
        self._separate_branches()

    # ---- pulls

    def may_pull(self, rank: int, step: int | None = None) -> bool:
        """Return whether a pull of `rank`, which counts `step` pushes of its own, may be served now."""
        return self._base is not None or self._shard.clock.may_pull(rank, step)

    def laggards(self) -> list[int]:
        """Return the slowest ranks. Pulls of other ranks wait for the pushes of these ranks."""
        return list(range(self.space.workers)) if self._base is not None else self._shard.clock.laggards()

    def move_bound(self, bound: MovedBound) -> None:
        """Replace the staleness bound from now on."""
        self.space = replace(self.space, bound=bound)
        if self._base is None:
            self._shard.clock.move(bound)

    def pull(
        self, rank: int, data: memoryview = memoryview(b""), out: memoryview | None = None
    ) -> tuple[Any, int, list[bytes]]:
        """Count a pull; return what `read` returns, the lead of `rank` in rounds, and an empty list of changes."""
        return self.read(data), self.pulled(rank), []

    def pulled(self, rank: int) -> int:
        """Count a pull; return by how many rounds `rank` is ahead of the slowest rank."""
        self.operations += 1
        if rank not in range(self.space.workers):
            count = self.space.workers
            raise ValueError(f"rank {rank} does not exist: {count} workers have the ranks 0 to {count - 1}")
        return 0 if self._base is not None else self._shard.pulled(rank)

    def copy_pushes(self, rank: int) -> None:
        """Copy the pushes of a rank that are still needed from the rank's shared memory into the server's memory.

        Call it before the answer to the rank, which overwrites its shared memory afterwards.
        """
        if self._base is None:
            self._shard.copy_pushes(rank)

    def read(self, data: memoryview | Tensor = memoryview(b"")) -> Any:
        """Return the values that `data` requests: all elements (empty `data`), a range of them, or rows.

        All elements and a range are views, valid until the next push. Raises ValueError or ConfigError if the segment
        does not have the requested elements.
        """
        if self._base is not None:
            return self._base.read(data)
        if not len(data):
            return self._buffer
        area = self.extent.read_pull(view_bytes(data).data if isinstance(data, Tensor) else data, self._known)
        if isinstance(area, ShardRows):
            return view_bytes(area.of(self._shard.params)).data
        item = self.extent.layout.dtype.itemsize
        return self._buffer[area[0] * item : area[1] * item]

    @property
    def closed(self) -> int:
        """The number of rounds that all ranks that take part have pushed."""
        return 0 if self._base is not None else self._shard.closed

    def marks(self) -> dict[int, int]:
        """Return for each rank its next step: the pushes of all earlier steps are recorded."""
        return dict.fromkeys(range(self.space.workers), 0) if self._base is not None else self._shard.ledger.marks

    @property
    def ledger(self) -> Ledger:
        """The ledger of the recorded pushes: applied, or waiting for their round to close. For reading only."""
        return self._make_shard_writable().ledger

    def durable(self, rank: int) -> int:
        """Return the step below which all pushes of a rank are applied here."""
        if self._base is not None:
            return 0
        shard = self._shard
        return shard.ledger.marks.get(rank, 0) if shard.changes.kind == PUSHED else shard.closed

    # ---- states

    def _read_state(self) -> ShardState:
        """Return the state. For a branch without its own shard, it has the base's values and a clock at step 0."""
        if self._base is None:
            return self._shard.state()
        of = self.shard
        return ShardState(of.params, of.optimizer.moments(), Ledger([0] * self.space.workers), of.optimizer.groups())

    def dump(self) -> bytes:
        """Return the whole state as bytes, for `load`."""
        return self._read_state().pack()

    def load(self, state: Buffer) -> None:
        """Restore a state that `dump` returned. Raises CheckpointError if it is truncated, or of another segment."""
        found = ShardState.unpack(state)
        if found.params.numel() != self.rows or found.params.dtype != self.extent.layout.dtype:
            raise CheckpointError(
                f"the state has {found.params.numel()} elements of {found.params.dtype}, but segment {self.index} has "
                f"{self.rows} elements of {self.extent.layout.dtype}"
            )
        ranks = len(found.ledger.marks)
        if ranks != self.space.workers:
            raise CheckpointError(
                f"the state is of {ranks} workers, but space {self.space.name!r} has {self.space.workers} workers"
            )
        self._separate_branches()
        found.params = found.params.clone()
        self._replace_shard(found)

    def begin(self, params: Tensor, ledger: Ledger, moments: Moments, boundary: Boundary) -> None:
        """Restore this segment's part of a snapshot, and retain states after the rounds of `boundary` from now on.

        `moments` is the optimizer's state for whole parameters, even if the segment has only a part of a parameter.
        """
        self._separate_branches()
        self._boundary = boundary
        self._replace_shard(ShardState(params.clone(), {}, ledger), restore=False)
        self._shard.optimizer.load(moments, self.extent)

    def resume(self, state: Buffer, boundary: Boundary) -> None:
        """Restore a state that `dump` returned, and retain states after the rounds of `boundary` from now on."""
        self._boundary = boundary
        self.load(state)

    def facts(self, index: int, wanted: int) -> ShardFacts:
        """Return the facts of shard `index` of a static map, and retain the state after round `wanted`."""
        shard = self._make_shard_writable()
        shard.retained.wanted = wanted
        if wanted > shard.closed:
            shard.retained.requested = {wanted}
        return shard.facts(index)

    def skip(self, rank: int, step: int) -> None:
        """Count a rank's missing pushes below `step` as lost, because no worker retains them."""
        self._make_shard_writable().skip(rank, step)

    def keep(self, rounds: Sequence[int]) -> None:
        """Retain the state after each of these rounds that is not closed yet."""
        shard = self._make_shard_writable()
        shard.retained.requested.update(r for r in rounds if r > shard.closed)

    def part(self, rounds: int) -> bytes | None:
        """Return the state after `rounds` rounds, or None if it is not retained."""
        return None if self._base is not None else self._shard.retained.get(rounds)

    # ---- branches

    def branch(
        self, space: Space | None = None, index: int | None = None, *, factory: Factory | None = None
    ) -> DenseSegment:
        """Return a segment that begins with the same values.

        It may belong to another space, with workers, a strategy and an optimizer schedule (`factory`) of its own. Both
        segments share memory until one of them receives a push.
        """
        base = self if self._base is None else self._base
        made = DenseSegment(
            space or self.space,
            self.index if index is None else index,
            factory or self.factory,
            base=base,
            optimizer=self._optimizer,
        )
        base._branches = [ref for ref in base._branches if ref() is not None] + [weakref.ref(made)]
        return made

    # ---- what only tables have

    @property
    def evicted(self) -> int:
        """0: no element is evicted."""
        return 0

    def changed_since(self, version: int) -> bytes:
        """Raise ConfigError: all elements change with every step."""
        raise ConfigError("CHANGES is for tables only: send READ or PART for the dense vector", field="table")

    def _make_shard_writable(self) -> Shard:
        """Return the shard for writing. If other segments share its memory, copy the values first."""
        self._separate_branches()
        if self._base is not None:
            self._copy_base()
        return self._shard

    def _separate_branches(self) -> None:
        if self._branches:
            branches, self._branches = self._branches, []
            for branch in filter(None, (ref() for ref in branches)):
                if branch._base is self:
                    branch._copy_base()

    def _copy_base(self) -> None:
        """Copy the base's state into a new shard, which only this segment uses."""
        state = self._read_state()
        state.params = state.params.clone()
        self._replace_shard(state)


def state_of(
    piece: Tensor,
    layout: Layout,
    lo: int,
    *,
    moments: Moments | None = None,
    marks: Ledger | Sequence[int],
    version: int = 0,
) -> bytes:
    """Return the bytes of a state for `DenseSegment.load`, of the elements `piece` that begin at `lo` of a vector.

    `moments`: the optimizer's state of whole parameters, by parameter name; only the elements of `piece` are used.
    `marks`: the next step of each rank, or a ledger.
    """
    ledger = marks if isinstance(marks, Ledger) else Ledger(marks)
    return ShardState(piece, cut_moments(moments or {}, layout, lo, lo + piece.numel()), ledger, version=version).pack()


def part_of(state: Buffer, rounds: int, lo: int) -> ShardPart:
    """Return a dense segment's state as a shard's share of a checkpoint.

    The parameters do not contain the pushes of open rounds, so the ledger does not count them: workers repeat them.
    Raises CheckpointError if the state is truncated.
    """
    found = ShardState.unpack(state)
    return ShardPart(rounds, lo, found.params.clone(), found.moments, found.applied())

"""One part of the parameters, its optimizer, and the clock that guards it. No sockets, no threads.

A push is (rank, step): the ledger says whether it is new, so it is applied once, whatever is retried. A pull is
served when the clock allows. A `ReplicatedShard` also records how its rounds are closed, so that a copy closes them in
the same way.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adagrad

from rayps.core.calendar import Boundary
from rayps.core.clock import Clock
from rayps.core.failpoint import passing
from rayps.core.ledger import Ledger
from rayps.core.retained_parts import RetainedParts
from rayps.core.server_updates import weighted_mean
from rayps.core.strategy import ServerHalf
from rayps.core.topology import Servers, servers_of
from rayps.ps.protocol.mailbox import STEPS, SharedSlice
from rayps.ps.protocol.pieces import DensePiece, Extent, area_piece
from rayps.ps.protocol.rows import Area, ShardRows, gathered, step_rows
from rayps.tensors.flat import Layout
from rayps.tensors.learning_rate import Ticks, pace_of, within
from rayps.tensors.optim import Factory, Moments, SlicedOptimizer, fitting
from rayps.tensors.packing import flat_bytes, full_moments, pack_state, plain_moments, tensor_of


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
        """The steps that each rank had pushed without a gap."""
        return self.ledger.marks


@dataclass(slots=True)
class ShardFacts:
    """What a shard is asked about while it runs."""

    index: int
    lo: int
    hi: int
    version: int
    bytes: int
    staleness: dict[int, int]
    laggards: list[int]
    reached: int  # rounds that the slowest worker has pushed
    snapshots: list[int] = field(default_factory=list)
    ages: dict[int, int] = field(default_factory=dict)  # pushes by versions between their pull and their application
    lost: int = 0  # acknowledged pushes that nobody had any more when this shard was restored


class Shard:
    """Elements lo to hi of the parameter vector."""

    def __init__(
        self,
        index: int,
        layout: Layout,
        lo: int,
        hi: int,
        *,
        params: Tensor,
        factory: Factory,
        strategy: ServerHalf,
        start: Ledger | Sequence[int],
        boundary: Boundary,
        private: bool = False,
        ticks: Ticks | None = None,
    ) -> None:
        """With `private`, `params` is the shard's own from now on, and not in memory that others can read.

        `ticks`: the epochs of the phase, for a schedule that counts them.
        """
        self.index, self.layout, self.lo, self.hi = index, layout, lo, hi
        self.slice = SharedSlice(params, private=private)
        self.params = self.slice.params
        self.ledger = start.copy() if isinstance(start, Ledger) else Ledger(start)
        self.lost = 0
        self.size = len(self.ledger.marks)  # workers
        self.rounds = 1  # steps of a worker that the push under way stands for
        self.version = 0  # steps that the optimizer has taken here
        self.strategy = strategy
        servers = servers_of(strategy) or Servers()
        update = servers.update
        self._gathers, self._borrows, self._spans = update.gathers, update.borrows, update.spans
        self.clock = Clock(self.ledger.marks, servers.staleness)
        self.staleness: Counter[int] = Counter()
        self.ages: Counter[int] = Counter()
        self._pulled_at: dict[int, int] = {}  # by rank: the version of its last pull
        self._boundary = boundary
        factory = chosen(factory, servers.adagrad)
        self._optimizer = SlicedOptimizer(factory, layout, self.params, lo, hi)
        self._pace = pace_of(factory, layout, self._optimizer.optimizer, ticks or Ticks())
        self._inbox: dict[int, dict[int, tuple[Tensor, float, Area]]] = {}
        self._lent: set[tuple[int, int]] = set()  # step and rank of what lies in the inbox and belongs to its pusher
        self._count = self.params.numel()
        self._whole: Area = (0, self._count)
        self._touched: Area = self._whole
        self._slowest = self.clock.slowest  # rounds that are closed

    def load(self, moments: Moments, layout: Layout) -> None:
        """Take over an optimizer state of whole parameters."""
        self._optimizer.load(fitting(moments, self._optimizer.optimizer), layout)

    def step(self, grad: Tensor, scale: float = 1.0, decays: float | None = None) -> None:
        """Let the optimizer apply `scale` times a gradient slice; what no push has touched stays as it is.

        `decays`: see `SlicedOptimizer.step`.
        """
        touched, words = self._touched, self.slice.words
        words[STEPS] += 1  # odd: whoever reads now reads a mixture
        try:
            if touched is self._whole:
                self._optimizer.step(grad, scale, decays)
            elif isinstance(touched, ShardRows):
                step_rows(self._optimizer, touched, grad, scale, decays)
            elif touched[1] - touched[0] == self._count:
                self._optimizer.step(grad, scale, decays)
            else:
                self._step_range(grad * scale, *touched, abs(scale) if decays is None else decays)
        finally:
            words[STEPS] += 1
        self.version += 1

    def step_mean(self, values: Sequence[Tensor], weights: Sequence[float]) -> None:
        """Let the optimizer apply sum(w_i v_i) / sum(w_i) of gradient slices, which are only read."""
        if self._touched != self._whole:
            self.step(weighted_mean(list(values), list(weights)))
            return
        self.slice.words[STEPS] += 1
        try:
            self._optimizer.step_mean(values, weights)
        finally:
            self.slice.words[STEPS] += 1
        self.version += 1

    def _step_range(self, grad: Tensor, a: int, b: int, decays: float) -> None:
        # an elementwise optimizer may step everything, if what lies outside the range is then put back
        before = self.params.clone()
        held = {id(t): t.clone() for t in self._elementwise_state()}
        self._optimizer.step(grad, decays=decays)
        before[a:b] = self.params[a:b]
        self.params.copy_(before)
        self._restore_state(held, a, b)

    def _elementwise_state(self) -> list[Tensor]:
        return [
            t
            for state in self._optimizer.optimizer.state.values()
            for t in state.values()
            if isinstance(t, Tensor) and t.dim() > 0
        ]

    def _restore_state(self, held: dict[int, Tensor], a: int, b: int) -> None:
        for leaf, cut in self._optimizer.leaves():
            for t in self._optimizer.optimizer.state.get(leaf, {}).values():
                if isinstance(t, Tensor) and t.dim() > 0:
                    old = held.get(id(t), torch.zeros_like(t))
                    lo, hi = max(a, cut.start) - cut.start, min(b, cut.stop) - cut.start
                    if lo < hi:
                        old[lo:hi] = t[lo:hi]
                    t.copy_(old)

    def push(
        self,
        rank: int,
        step: int,
        value: Tensor,
        weight: float,
        offset: int = 0,
        lent: bool = False,
        rows: ShardRows | None = None,
    ) -> bool:
        """File what `rank` pushed for `step`; False, and no effect, when that push was here before.

        `value` covers the elements from `offset` of this shard, or `rows`; what it leaves out counts as zero. Where it
        is `lent`, its memory is the pusher's: good until the pusher is answered, and `own` must come before.

        Raises:
            ValueError: too many steps were skipped, the rank is unknown, or the value does not fit.
        """
        count = value.numel()
        area = self._whole if count == self._count and not offset and rows is None else self._area(count, offset, rows)
        if self._spans:
            self.rounds = step + 1 - self.ledger.marks.get(rank, 0)
        if not (self.ledger.fill(rank, step) if self._spans else self.ledger.add(rank, step)):
            return False
        if rank in self._pulled_at:  # it has pulled from this shard, and not only from one that this one replaces
            self.ages[self.version - self._pulled_at[rank]] += 1
        if rows is None and count < self._count:
            value, lent = padded(value, offset, self._count), False
        elif lent and not self._borrows:
            value, lent = value.clone(), False
        if count:
            self._touched = area
            if self._pace is not None:
                self._pace.at(step)
            self.strategy.on_push(self, value, weight)
        if self._gathers:
            self._inbox.setdefault(step, {})[rank] = (value, weight, area)
            if lent:
                self._lent.add((step, rank))
        if step == self._slowest or self._spans:  # else the slowest is another
            self._finish()
        return True

    def _area(self, count: int, offset: int, rows: ShardRows | None) -> Area:
        if rows is not None and count != rows.elements:
            raise ValueError(f"a push of {count} elements does not fit into rows of {rows.elements}")
        if offset < 0 or count + offset > self._count:
            raise ValueError(f"a push of {count} elements at {offset} does not fit into {self._count}")
        return rows if rows is not None else (offset, offset + count)

    def skip(self, rank: int, step: int) -> None:
        """Give up a rank's pushes below `step`: nobody has them any more."""
        self.lost += self.ledger.skip(rank, step)
        self._finish()

    def own(self, rank: int) -> None:
        """Copy what still counts of a rank's pushes out of the rank's own memory."""
        if not self._lent:
            return
        for step, other in [key for key in self._lent if key[1] == rank]:
            self._lent.discard((step, other))
            if rank in self._inbox.get(step, {}):
                value, weight, area = self._inbox[step][rank]
                self._inbox[step][rank] = value.clone(), weight, area

    def _finish(self) -> None:
        """Close the rounds that everyone has pushed by now."""
        before, self._slowest = self._slowest, self.clock.slowest
        for finished in range(before, self._slowest):
            self._close(finished)

    def _close(self, finished: int) -> None:
        """Do what the strategy does at the end of a round."""
        if self._gathers:
            held = sorted(self._inbox.pop(finished, {}).items())
            if self._lent:
                self._lent = {key for key in self._lent if key[0] != finished}
            values, self._touched = gathered([(value, area) for _, (value, _, area) in held], self._count)
            if _elements(self._touched):
                if self._pace is not None:
                    self._pace.at(finished)
                self.strategy.on_round(self, values, [weight for _, (_, weight, _) in held])

    def may_pull(self, rank: int) -> bool:
        """Whether a pull of `rank` may be served now."""
        return self.clock.may_pull(rank)

    def pull(self, rank: int, lo: int = 0, hi: int | None = None) -> tuple[Tensor, int]:
        """The elements lo to hi of this shard, and by how many rounds `rank` leads the slowest."""
        return self.read(lo, hi), self.pulled(rank)

    def pulled(self, rank: int) -> int:
        """Count a pull; by how many rounds `rank` leads the slowest."""
        lead = self.ledger.marks[rank] - self._slowest
        self.staleness[lead] += 1
        self._pulled_at[rank] = self.version
        return lead

    def read(self, lo: int = 0, hi: int | None = None) -> Tensor:
        """The elements lo to hi, outside the clock: a view, good until the next push."""
        return self.params[lo:hi]

    def facts(self) -> ShardFacts:
        """What the driver and the dashboard ask for."""
        return ShardFacts(
            self.index,
            self.lo,
            self.hi,
            self.version,
            self.params.numel() * self.params.element_size(),
            dict(self.staleness),
            self.clock.laggards(),
            self.clock.slowest,
            ages=dict(self.ages),
            lost=self.lost,
        )


def chosen(factory: Factory, adagrad: float | None) -> Factory:
    """The workload's own; where a rate is given, Adagrad: Duchi, Hazan, Singer, JMLR 2011. Its schedule stays."""
    if adagrad is None:
        return factory
    # a group: a part of a model may own nothing
    return within(factory, lambda _: lambda params: Adagrad([{"params": params}], lr=adagrad))


def _elements(area: Area) -> int:
    return area.elements if isinstance(area, ShardRows) else area[1] - area[0]


def padded(value: Tensor, offset: int, size: int) -> Tensor:
    """A part of `size` elements that begins at `offset`, with zeros around it."""
    whole = torch.zeros(size, dtype=value.dtype)
    whole[offset : offset + value.numel()] = value
    return whole


CHANGE = struct.Struct("<qqqd")  # what it is; then rank, step, weight, or round, number of values, 0
ONE = struct.Struct("<qqd")  # rank, bytes and weight of one value of a round
PUSHED, MEAN, VALUES = 1, 2, 3
NEVER = Boundary(0, -1)


def changes_by(strategy: ServerHalf) -> int:
    """What a change of a segment is under this strategy: PUSHED, MEAN or VALUES."""
    servers = servers_of(strategy)
    if servers is None or servers.update.listens:
        return PUSHED
    return MEAN if servers.update.means else VALUES


class ReplicatedShard(Shard):
    """A shard that writes down how its rounds are closed, and can close them as another one did."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.writes = False  # whether the closes of rounds are written down
        self.changes: list[bytes] = []
        self.by = changes_by(self.strategy)
        self.wanted: set[int] = set()
        self.kept: RetainedParts[bytes] = RetainedParts()
        self.seq = 0
        self._mean: bytes = b""

    @property
    def spans(self) -> bool:
        """Whether a push stands for every step up to its own."""
        return self._spans

    @property
    def closed(self) -> int:
        """Rounds that are closed."""
        return self._slowest

    def step(self, grad: Tensor, scale: float = 1.0, decays: float | None = None) -> None:
        """Step as `Shard.step`; retain the mean gradient of a round where the backups apply it."""
        if self.writes and self.by == MEAN:
            self._mean = area_piece(grad, self._touched, self._count)
        super().step(grad, scale, decays)

    def step_mean(self, values: Sequence[Tensor], weights: Sequence[float]) -> None:
        """Step with the weighted mean of `values`, over the part of the shard that the pushes touched."""
        whole = self._touched == self._whole
        self.step(self._optimizer.mean(values, weights) if whole else weighted_mean(list(values), list(weights)))

    def _close(self, finished: int) -> None:
        write = self.writes and self.by != PUSHED
        if write and self.by == VALUES:
            self.changes.append(self._values(finished))
        super()._close(finished)
        if write and self.by == MEAN:
            self.changes.append(CHANGE.pack(MEAN, finished, bool(self._mean), 0.0) + self._mean)
            self._mean = b""
        if self.by != PUSHED:
            self.seq += 1
        self._keep(finished + 1)

    def _values(self, finished: int) -> bytes:
        held = sorted(self._inbox.get(finished, {}).items())
        values = [area_piece(value, area, self._count) for _, (value, _, area) in held]
        heads = [ONE.pack(rank, len(value), weight) for (rank, (_, weight, _)), value in zip(held, values, strict=True)]
        return b"".join([CHANGE.pack(VALUES, finished, len(held), 0.0), *heads, *values])

    def close_as(self, finished: int, mean: DensePiece | None) -> None:
        """Close a round with the mean that the primary made."""
        for rank in self.ledger.marks:
            self.ledger.skip(rank, finished + 1)
        self._inbox.pop(finished, None)
        self._slowest = finished + 1  # a state may have brought later rounds along: they are closed by later changes
        if mean is not None:
            value, self._touched = self.filed(mean)
            if self._pace is not None:
                self._pace.at(finished)
            self.step(value)
        self.seq += 1
        self._keep(finished + 1)

    def filed(self, piece: DensePiece) -> tuple[Tensor, Area]:
        """A piece as it lies in the inbox: its elements, with zeros where it says nothing, and its area."""
        value, offset, rows = piece
        if rows is None and value.numel() < self._count:
            value = padded(value, offset, self._count)
        return value, piece.area if piece.area != self._whole else self._whole

    def catch_up(self) -> None:
        """Close what nobody else will close now."""
        self.writes = False
        self._finish()

    def _keep(self, rounds: int) -> None:
        if rounds in self.wanted or rounds in self._boundary:
            self.kept.keep(rounds, self.state(parts=False))
            passing("host: state kept, not collected")
            self.wanted = {wanted for wanted in self.wanted if wanted > rounds}

    def state(self, parts: bool = True) -> bytes:
        """All of it; without `parts`, as it is kept."""
        tensors = [self.params]
        moments = plain_moments(self._optimizer.moments(), tensors)
        inbox = []
        for step, of_step in self._inbox.items():
            for rank, (value, weight, area) in of_step.items():
                inbox.append([step, rank, weight, len(tensors)])
                tensors.append(tensor_of(area_piece(value, area, self._count), torch.uint8))
        kept = {}
        for rounds in sorted(self.kept) if parts else []:
            kept[str(rounds)] = len(tensors)
            tensors.append(tensor_of(self.kept[rounds], torch.uint8))
        head = {
            "seq": self.seq,
            "version": self.version,
            "ledger": self.ledger.to_json(),
            "moments": moments,
            "groups": plain_groups(self._optimizer.optimizer.param_groups),
            "inbox": inbox,
            "kept": kept,
            "wanted": sorted(self.wanted),
        }
        return pack_state(head, tensors)

    def restore(self, head: dict[str, Any], tensors: list[Tensor]) -> None:
        """Take over the rest of what `state` gave: all but parameters and ledger."""
        self.seq, self.version = head["seq"], head["version"]
        self._optimizer.restore(full_moments(head["moments"], tensors))
        for mine, given in zip(self._optimizer.optimizer.param_groups, head.get("groups", []), strict=False):
            mine.update({key: tuple(value) if isinstance(value, list) else value for key, value in given.items()})
        extent = Extent(self.layout, self.lo, self.hi)
        for step, rank, weight, number in head["inbox"]:
            value, area = self.filed(extent.read_push(flat_bytes(tensors[number].clone()).data))
            self._inbox.setdefault(step, {})[rank] = (value, weight, area)
        for rounds, number in head["kept"].items():
            self.kept[int(rounds)] = flat_bytes(tensors[number]).tobytes()
        self.wanted = set(head["wanted"])

    def moments(self) -> Moments:
        """The optimizer's state by parameter name; copies."""
        return self._optimizer.moments()

    def groups(self) -> list[dict[str, Any]]:
        """The numbers of the optimizer's groups."""
        return plain_groups(self._optimizer.optimizer.param_groups)

    @property
    def nbytes(self) -> int:
        """Bytes of parameters and optimizer state."""
        held = [t for state in self._optimizer.optimizer.state.values() for t in state.values()]
        return sum(t.numel() * t.element_size() for t in [self.params, *held] if isinstance(t, Tensor))


def plain_groups(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The numbers of an optimizer's groups, JSON-ready."""
    plain = (int, float, str, bool, type(None), tuple)
    return [
        {key: value for key, value in group.items() if key != "params" and isinstance(value, plain)} for group in groups
    ]

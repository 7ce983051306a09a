"""One part of the parameters, its optimizer, and the clock that guards it. No sockets, no threads.

A push is (rank, step): it is applied once, whatever is retried. A pull is served when the clock allows.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rayps.clock import Clock
from rayps.flat import Layout
from rayps.optim import Factory, Moments, SlicedOptimizer
from rayps.server.parts import Parts
from rayps.server.resident import STEPS, Slice
from rayps.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Boundary:
    """After which rounds a snapshot is taken: every `every` rounds, and at `end`."""

    every: int
    end: int

    def __contains__(self, rounds: int) -> bool:
        return rounds == self.end or (self.every > 0 and rounds % self.every == 0)

    def following(self, rounds: int) -> int:
        """The first such round that is not before `rounds`; the end where there is none."""
        return min(self.end, -(-rounds // self.every) * self.every) if self.every > 0 else self.end


@dataclass(slots=True)
class ShardPart:
    """A shard's share of a checkpoint, after `round` rounds of the slowest worker."""

    round: int
    params: Tensor
    moments: Moments
    done: dict[int, int]


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
        strategy: Strategy,
        start: list[int],
        boundary: Boundary,
    ) -> None:
        self.index, self.lo, self.hi = index, lo, hi
        self.slice = Slice(params)
        self.params = self.slice.params
        self.size = len(start)  # workers
        self.version = 0  # steps that the optimizer has taken here
        self.strategy = strategy
        self._gathers, self._borrows = strategy.gathers, strategy.borrows
        self.clock = Clock(range(self.size), strategy.staleness)
        self.clock.done.update(enumerate(start))
        self.staleness: Counter[int] = Counter()
        self.parts: Parts[ShardPart] = Parts()
        self._boundary = boundary
        self._optimizer = SlicedOptimizer(factory, layout, self.params, lo, hi)
        self._inbox: dict[int, dict[int, tuple[Tensor, float]]] = {}
        self._lent: set[tuple[int, int]] = set()  # step and rank of what lies in the inbox and belongs to its pusher
        self._touched: tuple[int, int] | None = None
        self._touched_in: dict[int, tuple[int, int]] = {}

    def load(self, moments: Moments, layout: Layout) -> None:
        """Take over an optimizer state of whole parameters."""
        self._optimizer.load(moments, layout)

    def step(self, grad: Tensor, scale: float = 1.0) -> None:
        """Let the optimizer apply `scale` times a gradient slice; what no push has touched stays as it is."""
        a, b = self._touched or (0, self.params.numel())
        words = self.slice.words
        words[STEPS] += 1  # odd: whoever reads now reads a mixture
        try:
            if b - a == self.params.numel():
                self._optimizer.step(grad, scale)
            else:
                self._step_range(grad * scale, a, b)
        finally:
            words[STEPS] += 1
        self.version += 1

    def _step_range(self, grad: Tensor, a: int, b: int) -> None:
        # an elementwise optimizer may step everything, if what lies outside the range is then put back
        before = self.params.clone()
        held = {id(t): t.clone() for t in self._elementwise_state()}
        self._optimizer.step(grad)
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
        self, rank: int, step: int, value: Tensor, weight: float, offset: int = 0, lent: bool = False
    ) -> bool:
        """File what `rank` pushed for `step`; False, and no effect, when that push was here before.

        `value` covers the elements from `offset` of this shard; what it leaves out counts as zero. Where it is
        `lent`, its memory is the pusher's: good until the pusher is answered, and `own` must come before.

        Raises:
            ValueError: a step was skipped, the rank is unknown, or the value does not fit.
        """
        count, size = value.numel(), self.params.numel()
        if offset < 0 or count + offset > size:
            raise ValueError(f"a push of {count} elements at {offset} does not fit into {size}")
        slowest = self.clock.slowest
        if not self.clock.tick(rank, step):
            return False
        touched = (offset, offset + count)
        if count < size:
            value, lent = _padded(value, offset, size), False
        elif lent and not self._borrows:
            value, lent = value.clone(), False
        if count:
            self._touched = touched
            self.strategy.on_push(self, value, weight)
        if self._gathers:
            self._file(rank, step, value, weight, touched)
            if lent:
                self._lent.add((step, rank))
        if step == slowest:  # else the slowest is another
            for finished in range(slowest, self.clock.slowest):
                self._finish(finished)
        return True

    def own(self, rank: int) -> None:
        """Copy what still counts of a rank's pushes out of the rank's own memory."""
        for step, other in [key for key in self._lent if key[1] == rank]:
            self._lent.discard((step, other))
            if rank in self._inbox.get(step, {}):
                value, weight = self._inbox[step][rank]
                self._inbox[step][rank] = value.clone(), weight

    def _file(self, rank: int, step: int, value: Tensor, weight: float, touched: tuple[int, int]) -> None:
        self._inbox.setdefault(step, {})[rank] = (value, weight)
        a, b = self._touched_in.get(step, touched)
        self._touched_in[step] = (min(a, touched[0]), max(b, touched[1]))

    def _finish(self, finished: int) -> None:
        if self._gathers:
            held = self._inbox.pop(finished, {})
            self._touched = self._touched_in.pop(finished, None)
            ranks = sorted(held)
            if self._touched is None or self._touched[0] < self._touched[1]:
                self.strategy.on_round(self, [held[r][0] for r in ranks], [held[r][1] for r in ranks])
        if finished + 1 in self._boundary or finished + 1 == self.parts.wanted:
            self._snapshot(finished + 1)

    def may_pull(self, rank: int) -> bool:
        """Whether a pull of `rank` may be served now."""
        return self.clock.may_pull(rank)

    def pull(self, rank: int, lo: int = 0, hi: int | None = None) -> tuple[Tensor, int]:
        """The elements lo to hi of this shard, and by how many rounds `rank` leads the slowest."""
        return self.read(lo, hi), self.pulled(rank)

    def pulled(self, rank: int) -> int:
        """Count a pull; by how many rounds `rank` leads the slowest."""
        lead = self.clock.lead(rank)
        self.staleness[lead] += 1
        return lead

    def read(self, lo: int = 0, hi: int | None = None) -> Tensor:
        """The elements lo to hi, outside the clock: a view, good until the next push."""
        return self.params[lo:hi]

    def _snapshot(self, rounds: int) -> None:
        part = ShardPart(rounds, self.params.clone(), self._optimizer.moments(), dict(self.clock.done))
        self.parts.keep(rounds, part)

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
            sorted(self.parts),
        )


def _padded(value: Tensor, offset: int, size: int) -> Tensor:
    whole = torch.zeros(size, dtype=value.dtype)
    whole[offset : offset + value.numel()] = value
    return whole

"""Talk to the shared parameters: what a worker's `pull` and `push` do.

With `defer`, a push leaves with whatever is said next, so that a round of push and pull is one request to each shard
and one answer. A shard that is lost is found again where the strategy allows it, and what it did not acknowledge is
said again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rayps import errors
from rayps.compress import ErrorFeedback
from rayps.errors import LinkError, PeerLost
from rayps.flat import Gradient
from rayps.link import Link
from rayps.link.memory import Memory
from rayps.link.shared import SharedLink
from rayps.server.coded import coded
from rayps.server.messages import CODED, PUSHES, Kind
from rayps.server.resident import AVAILABLE, SLICE, Desk, flat_bytes
from rayps.server.ways import Answer, Ask, ByMemory, ByMessage, Place, Way, together


class Server:
    """The shared parameters as one worker sees them: pull and push, whole or by range.

    Shards on the worker's own host read its gradients where they lie and are read where they are; the others get and
    send messages. `resident=False` sends messages to all.
    """

    def __init__(
        self,
        rank: int,
        dtype: torch.dtype,
        ranges: list[tuple[int, int]],
        links: list[Link],
        *,
        timeout: float,
        step: int = -1,
        relink: Callable[[int], Link] | None = None,
        defer: bool = False,
        consistent: bool = True,
        resident: bool = True,
    ) -> None:
        self.rank = rank
        self.size = ranges[-1][1]
        self.home: Tensor | None = None  # where whole pulls land, e.g. the model's own vector; None = in a new tensor
        self.seconds_waiting = 0.0
        self.bytes_moved = 0  # of parameters and gradients, sent and received
        self.lead = 0  # by how many rounds this worker led the slowest at its last pull
        self.consistent = consistent
        self.dtype = dtype
        self.feedback: ErrorFeedback | None = None  # where pushes are encoded: see `rayps.server.coded`
        self._dtype, self._ranges, self._timeout, self._relink = dtype, ranges, timeout, relink
        self._tag, self._defer, self._resident = 0, defer, resident
        self._posted: _Push | None = None  # a push that has not left yet
        self._landed: tuple[Tensor, list[Place]] | None = None  # where the last whole pull went
        self._desk: Desk | None = None
        self._pieces: list[Tensor] = []  # the desk's gradient, by shard
        self._ways: list[Way] = []
        steps = [self._join(i, link, step) for i, link in enumerate(links)]
        # a push that its former holder cut off between shards is completed by pushing that step again
        self.step = min(steps)

    def pull(
        self, lo: int = 0, hi: int | None = None, *, out: Tensor | None = None, consistent: bool | None = None
    ) -> Tensor:
        """The elements lo to hi of the vector; waits while the clock says so.

        They land in `out` where given (a contiguous CPU tensor of as many elements), else in a new tensor. With
        `consistent` each shard's elements are of one of its versions, never a mixture of before and after a step;
        without, a shard of this host may step while it is read. Default: the server's `consistent`, which is True
        for every staleness but None.

        Raises:
            PeerTimeout: the slowest worker, or a shard, was silent past the deadline.
            PeerLost: a shard died.
        """
        return self._fetch(Kind.PULL, lo, hi, out, self.consistent if consistent is None else consistent)

    def read(self, lo: int = 0, hi: int | None = None) -> Tensor:
        """The elements lo to hi as they are now, outside the clock; each shard's are of one version."""
        return self._fetch(Kind.READ, lo, hi, None, True)

    def push(self, value: Tensor | Gradient, weight: float = 1.0, lo: int = 0) -> None:
        """Push a gradient, or a range of it that begins at element lo; the push counts as one step.

        A Gradient brings its number of samples as its weight. Every shard applies the push once, whatever is
        retried. Deferred, `value` must not change before the next call here has returned (`settle` if there is none).
        """
        vector, weight = (value.vector, float(value.samples)) if isinstance(value, Gradient) else (value, weight)
        count = vector.numel()
        self._must_fit(lo, lo + count)
        self.settle()
        if self.feedback is None:
            laid: Tensor | list[Tensor] = self._laid(vector, lo, count)
            self.bytes_moved += count * self._dtype.itemsize
        else:
            laid = self._coded(self.feedback, vector.detach().reshape(-1), weight, lo)
            self.bytes_moved += sum(len(piece) for piece in laid)
        self._posted = _Push(self.step, weight, lo, count, laid)
        self.step += 1
        if not self._defer:
            self.settle()

    def settle(self) -> None:
        """Return once every push is acknowledged."""
        if self._posted is not None:
            posted, self._posted = self._posted, None
            self._exchange(self._pushes(Kind.PUSH, posted, [None] * len(self._ranges)), True)

    def buffer(self, size: int, dtype: torch.dtype) -> Tensor:
        """Memory of `size` elements, all zero, for gradients: what lies at its beginning is pushed without a copy.

        The shards read it where it lies: from `push` on it may change once the push is acknowledged (`pull` or
        `settle` has returned). Where no shard is on this host, it is ordinary memory.
        """
        if self._desk is None or dtype != self._dtype or size > self._desk.gradient.numel():
            return torch.zeros(size, dtype=dtype)
        return self._desk.gradient[:size]

    def close(self) -> None:
        """Leave; the shards forget the connection, not the rank's clock."""
        for way in self._ways:
            way.close()
        if self._desk is not None:
            self._desk.close()
            self._desk = None

    def _fetch(self, kind: Kind, lo: int, hi: int | None, out: Tensor | None, consistent: bool) -> Tensor:
        hi = self.size if hi is None else hi
        self._must_fit(lo, hi)
        whole = hi - lo == self.size
        if out is None:
            out = self.home if whole and kind is Kind.PULL else None
        out, places = self._landing(out, lo, hi)
        posted = self._posted
        if kind is Kind.PULL and whole and posted is not None and posted.elements == self.size:
            self._posted = None
            asks = self._pushes(Kind.PUSH_PULL, posted, places)
        else:
            self.settle()
            cuts = [(i, max(a, lo) - a, min(b, hi) - a) for i, (a, b) in enumerate(self._ranges)]
            asks = [Ask(i, kind, a, b, place=places[i]) for i, a, b in cuts if a < b]
        answers = self._exchange(asks, consistent)
        if kind is Kind.PULL:
            self.lead = max([answer.lead for answer in answers], default=0)
        self.bytes_moved += (hi - lo) * self._dtype.itemsize
        return out

    def _must_fit(self, lo: int, hi: int) -> None:
        if not 0 <= lo <= hi <= self.size:
            raise errors.ConfigError(f"range {lo} to {hi} is not within the {self.size} parameters")

    # ---- where things lie

    def _laid(self, vector: Tensor, lo: int, count: int) -> Tensor:
        """A gradient where the shards find it: in the desk's memory if there is one."""
        desk = self._desk
        if desk is None:
            return vector.detach().reshape(-1).to("cpu", self._dtype)
        mine = desk.whole if count == self.size else desk.gradient[lo : lo + count]
        if not desk.holds(vector, lo):
            for way in self._ways:
                way.rest()
            mine.copy_(vector.detach() if vector.dim() == 1 else vector.detach().reshape(-1))
        return mine

    def _landing(self, out: Tensor | None, lo: int, hi: int) -> tuple[Tensor, list[Place]]:
        """Where a pull of the elements lo to hi goes, as a tensor and as the bytes of each shard."""
        landed = self._landed
        if landed is not None and landed[0] is out and hi - lo == self.size:
            return landed
        fresh = torch.empty(hi - lo, dtype=self._dtype) if out is None else out
        if out is not None and (out.numel() != hi - lo or out.dtype != self._dtype or not out.is_contiguous()):
            raise errors.ConfigError(
                f"out is {out.dtype} of {out.numel()} elements: give a contiguous CPU tensor of {hi - lo} {self._dtype}"
            )
        whole, item = flat_bytes(fresh), self._dtype.itemsize
        places = [whole[max(0, a - lo) * item : max(0, min(b, hi) - lo) * item] for a, b in self._ranges]
        if out is not None and hi - lo == self.size:
            self._landed = out, places
        return fresh, places

    def _coded(self, memory: ErrorFeedback, vector: Tensor, weight: float, lo: int) -> list[Tensor]:
        """An encoded gradient, a payload for each shard."""
        cuts = [(max(a, lo), min(b, lo + vector.numel())) for a, b in self._ranges]
        return [coded(memory, vector[a - lo : max(a, b) - lo], min(a, self.size), weight) for a, b in cuts]

    # ---- turns

    def _pushes(self, kind: Kind, push: _Push, places: Sequence[Place | None]) -> list[Ask]:
        step, weight, lo, count, vector = push
        if isinstance(vector, list):
            return [
                Ask(i, CODED[kind], step, max(a, lo) - a if max(a, lo) < min(b, lo + count) else 0, weight, 0, *laid)
                for i, ((a, b), laid) in enumerate(zip(self._ranges, zip(vector, places, strict=True), strict=True))
            ]
        if count == self.size:
            pieces = self._pieces if self._desk is not None else [vector[a:b] for a, b in self._ranges]
            return [
                Ask(i, kind, step, 0, weight, b - a, pieces[i], places[i]) for i, (a, b) in enumerate(self._ranges)
            ]
        asks = []
        for i, (a, b) in enumerate(self._ranges):
            start, stop = max(a, lo), min(b, lo + count)
            piece = vector[start - lo : stop - lo] if start < stop else vector[:0]
            asks.append(Ask(i, kind, step, start - a if start < stop else 0, weight, piece.numel(), piece))
        return asks

    def _exchange(self, asks: list[Ask], consistent: bool) -> list[Answer]:
        """Ask several shards at once, then hear them all."""
        began = time.monotonic()
        self._tag = tag = self._tag + 1
        ways, answers, lost = self._ways, [], list[Ask]()
        for ask in asks:
            try:
                ways[ask.shard].ask(tag, ask)
            except LinkError:
                if self._relink is None:
                    raise
                lost.append(ask)
        for way in ways:
            way.ring()
        lines = [(way, ask.place) for ask in asks if isinstance(way := ways[ask.shard], ByMessage)]
        if len(lines) > 1:
            together(lines, tag)
        for ask in asks:
            if lost and any(ask is other for other in lost):
                continue
            try:
                answers.append(ways[ask.shard].hear(tag, ask, consistent))
            except PeerLost:
                if self._relink is None:
                    raise
                lost.append(ask)
        answers += [self._recover(ask, consistent) for ask in lost]
        self.seconds_waiting += time.monotonic() - began
        return answers

    def _recover(self, ask: Ask, consistent: bool) -> Answer:
        """Find a lost shard again and repeat a request; one that had applied it knows, and does not do so again."""
        assert self._relink is not None
        self._ways[ask.shard].close()
        pushes = ask.kind in PUSHES
        self._join(ask.shard, self._relink(ask.shard), ask.a if pushes else self.step)
        self._tag += 1
        self._ways[ask.shard].ask(self._tag, ask)
        self._ways[ask.shard].ring()
        return self._ways[ask.shard].hear(self._tag, ask, consistent)

    def _join(self, i: int, link: Link, step: int) -> int:
        """Say who this is to a shard, and offer it what can be shared; this rank's next step there."""
        box: Memory | None = None
        if self._resident and AVAILABLE and isinstance(link, SharedLink):
            if self._desk is None:
                self._desk = Desk(self.size, self._dtype)
                self._pieces = [self._desk.gradient[a:b] for a, b in self._ranges]
            box = self._desk.offer(link)
        by_message = ByMessage(link, self._timeout)
        way: Way = by_message
        self._ways[i : i + 1] = [way]
        self._tag += 1
        by_message.ask(self._tag, Ask(i, Kind.JOIN, self.rank, step, self._timeout))
        joined = by_message.reply(self._tag).a
        if box is not None and self._desk is not None and isinstance(link, SharedLink) and SLICE in link.memories:
            self._ways[i] = ByMemory(link, box, self._desk, self._timeout)
        return joined


class _Push(NamedTuple):
    """A push that has been made and has not left."""

    step: int
    weight: float
    lo: int
    elements: int
    vector: Tensor | list[Tensor]  # encoded: a payload for each shard

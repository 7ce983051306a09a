"""Talk to the shared parameters: what a worker's `pull` and `push` do.

With `defer`, a push leaves with whatever is said next, so that a round of push and pull is one request to each shard
and one answer. A shard that is lost is found again where the strategy allows it, and what it lacks is said again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rayps.comm.compress import ErrorFeedback
from rayps.comm.link import Link
from rayps.core import errors
from rayps.ps.fixed.coded import coded
from rayps.ps.fixed.messages import CODED, PULLING, ShardMessage
from rayps.ps.fixed.session import ShardSession
from rayps.ps.fixed.transport import Place, ShardCall
from rayps.ps.protocol.rows import IdLists, Listed, ShardRows, piece
from rayps.tensors.flat import Gradient, Layout
from rayps.tensors.packing import flat_bytes

_LOOK_SECONDS = 0.01  # between two looks at how far another worker is


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
        independent: bool = False,
        keep: int = 0,
        layout: Layout | None = None,
    ) -> None:
        """`relink` finds a lost shard again; up to `keep` bytes of pushes are kept to be said to it again.

        `independent` shards step each on its own, so that only a pull that holds them all is of one moment. `layout`
        names the tables whose rows are asked for by id.
        """
        self.rank, self.timeout = rank, timeout
        self.size = ranges[-1][1]
        self.home: Tensor | None = None  # where whole pulls land, e.g. the model's own vector; None = in a new tensor
        self.bytes_moved = 0  # of parameters and gradients, sent and received
        self.lead = 0  # by how many rounds this worker led the slowest at its last pull
        self.consistent = consistent
        self.dtype = dtype
        self.feedback: ErrorFeedback | None = None  # where pushes are encoded: see `rayps.ps.client.compressed`
        self._ranges, self._defer, self._independent = ranges, defer, independent
        self._lists = None if layout is None else IdLists(layout, ranges)
        self._posted: _FixedPush | None = None  # a push that has not left yet
        self._resting: tuple[int, float] | None = None  # the same, whole and in the desk: its step and weight
        self._landed: tuple[Tensor, list[Place]] | None = None  # where the last whole pull went
        self._turns = ShardSession(
            rank, dtype, ranges, links, timeout=timeout, step=step, relink=relink, resident=resident, keep=keep
        )

    def pull(
        self, lo: int = 0, hi: int | None = None, *, out: Tensor | None = None, consistent: bool | None = None
    ) -> Tensor:
        """The elements lo to hi of the vector; waits while the clock says so.

        They land in `out` where given (a contiguous CPU tensor of as many elements), else in a new tensor. With
        `consistent` they are of one moment: every push is in all of them or in none (in step that is so anyway, out of
        step the shards are held for it, which takes four turns instead of one). Without, shards answer independently,
        and one of this host may step while it is read. Default: the server's `consistent`, which is True for every
        staleness but None.

        Raises:
            PeerTimeout: the slowest worker, or a shard, was silent past the deadline.
            PeerLost: a shard died.
        """
        return self._fetch(ShardMessage.PULL, lo, hi, out, self.consistent if consistent is None else consistent)

    def read(self, lo: int = 0, hi: int | None = None) -> Tensor:
        """The elements lo to hi as they are now, outside the clock; each shard's are of one version."""
        return self._fetch(ShardMessage.READ, lo, hi, None, True)

    def push(self, value: Tensor | Gradient, weight: float = 1.0, lo: int = 0, rounds: int = 1) -> None:
        """Push a gradient, or a range of it that begins at element lo; the push counts as one step.

        Where the strategy's pushes are `spans` it counts as `rounds` steps, all that were made since the one before.

        A Gradient brings its number of samples as its weight. Every shard applies the push once, whatever is
        retried. Deferred, `value` must not change before the next call here has returned (`settle` if there is none).
        """
        vector, weight = (value.vector, float(value.samples)) if isinstance(value, Gradient) else (value, weight)
        count = vector.numel()
        self._must_fit(lo, lo + count)
        self.settle()
        first, self.step = self.step, self.step + rounds - 1
        if self._defer and self.feedback is None and count == self.size and self._turns.swift:
            self._laid(vector, 0, count)
            self.bytes_moved += count * self.dtype.itemsize
            self._resting = self._turns.step, weight
            self._turns.step += 1
            return
        if self.feedback is None:
            laid: Tensor | list[Tensor] = self._laid(vector, lo, count)
            self.bytes_moved += count * self.dtype.itemsize
        else:
            laid = self._coded(self.feedback, vector.detach().reshape(-1), weight, lo)
            self.bytes_moved += sum(len(piece) for piece in laid)
        self._post(self._pushes(weight, lo, count, laid), count == self.size, first=first)

    def pull_rows(
        self, ids: Tensor, table: str | None = None, *, out: Tensor | None = None, consistent: bool | None = None
    ) -> Tensor:
        """The rows of a table with these ids, in their order and with their repetitions, as [len(ids), width].

        A table is a parameter of two or more dimensions; `table` is its name, where there are several. The rows land
        in `out` where given. Waits and raises as `pull`, and ConfigError: there is no such table or row.
        """
        self.settle()
        listed = self._listed(ids, table)
        parts = listed.parts
        self._tell(listed, self._naming(listed, [(i, rows) for i, rows in parts if not self._turns.shares(i)]))
        shape = (len(listed.ids.unique), listed.ids.table.width)
        self._must_land(out, len(ids) * shape[1])
        straight = out is not None and listed.ids.sorted
        found = out.view(shape) if out is not None and straight else torch.empty(shape, dtype=self.dtype)
        asks = [
            ShardCall(
                i, ShardMessage.PULL_ROWS, listed.number, 0, place=flat_bytes(found[slice(*listed.cuts[i])]), rows=rows
            )
            for i, rows in parts
        ]
        self._pulled(asks, self.consistent if consistent is None else consistent)
        self.bytes_moved += found.numel() * found.element_size()
        return listed.ids.spread(found, None if out is None else out.view(-1, shape[1]))

    def push_rows(self, ids: Tensor, rows: Tensor, weight: float = 1.0, table: str | None = None) -> None:
        """Push a gradient [len(ids), width] of the rows with these ids; rows of the same id are added up.

        Counts as one step, as `push` does. Out of step the optimizer steps these rows alone, in step all that anybody
        pushed in the round; see `rayps.ps.protocol.rows.step_rows` for what that means to its state.

        Raises:
            ConfigError: there is no such table or row, or the shape is another.
        """
        listed = self._listed(ids, table)
        width, weight = listed.ids.table.width, float(weight)
        if tuple(rows.shape[:1]) != tuple(ids.shape) or rows.numel() != len(ids) * width:
            raise errors.ConfigError(
                f"rows have shape {tuple(rows.shape)}: give [{len(ids)}, {width}], one row for each of the ids"
            )
        self.settle()
        naming = self._naming(listed, listed.parts)
        self._tell(listed, naming)
        summed = listed.ids.summed(rows.detach().reshape(-1, width).to("cpu", self.dtype))
        if self._turns.desk is not None:
            self._turns.rest()
        asks = [
            ShardCall(i, ShardMessage.PUSH, self.step, 0, weight, 0, summed[0][:0]) for i in range(len(self._ranges))
        ]
        for i, part in listed.parts:
            laid = piece(summed, *listed.cuts[i], self._turns.pieces[i] if self._turns.shares(i) else None)
            asks[i] = ShardCall(i, ShardMessage.PUSH_ROWS, self.step, listed.number, weight, part.elements, laid)
            self.bytes_moved += laid.numel() * laid.element_size()
        self._post(asks, False, naming)

    def wait(self, rank: int, rounds: int) -> None:
        """Return once a rank's pushes stand for so many rounds.

        Raises:
            PeerTimeout: it was silent past the deadline; pushes begin it anew.
        """
        self.settle()
        reached, since = -1, time.monotonic()
        while reached < rounds:
            found = self._turns.exchange([ShardCall(0, ShardMessage.REACHED, rank, 0)])[0].version
            if found > reached:
                reached, since = found, time.monotonic()
            elif time.monotonic() - since > self.timeout:
                raise errors.PeerTimeout(
                    f"worker-{rank} has pushed {reached} of the {rounds} rounds that the others wait for, and none in "
                    f"{self.timeout:g} s (the knob is `timeout`)",
                    peer=f"worker-{rank}",
                    seconds=self.timeout,
                )
            else:
                time.sleep(_LOOK_SECONDS)

    def settle(self) -> None:
        """Return once every push is acknowledged."""
        if self._resting is not None:
            (step, weight), self._resting = self._resting, None
            self._turns.exchange(self._whole_pushes(step, weight, self._turns.pieces))
        if self._posted is not None:
            posted, self._posted = self._posted, None
            self._turns.exchange(posted.asks)

    def flush(self) -> None:
        """As `settle`: fixed servers have no copies that more could be waited for."""
        self.settle()

    def buffer(self, size: int, dtype: torch.dtype) -> Tensor:
        """Memory of `size` elements, all zero, for gradients: what lies at its beginning is pushed without a copy.

        The shards read it where it lies: from `push` on it may change once the push is acknowledged (`pull` or
        `settle` has returned). Where no shard is on this host, it is ordinary memory.
        """
        desk = self._turns.desk
        if desk is None or dtype != self.dtype or size > desk.gradient.numel():
            return torch.zeros(size, dtype=dtype)
        return desk.gradient[:size]

    def hang_up(self) -> None:
        """End what another thread waits for in here, as lost; that thread is to `close`. Any thread may call it."""
        self._turns.hang_up()

    def close(self) -> None:
        """Leave; the shards forget the connection, not the rank's clock."""
        self._turns.close()

    def replay(self, shard: int, link: Callable[[], Link], wanted: Callable[[], bool]) -> None:
        """Say again to a replaced shard what it lacks, over a link of its own, if that is still `wanted`; any thread.

        Raises:
            PeerTimeout, PeerLost: it died again.
        """
        self._turns.replay(shard, link, wanted)

    @property
    def shares_memory(self) -> bool:
        """Whether all shards read this worker's gradient in shared memory."""
        return all(self._turns.shares(shard) for shard in range(len(self._ranges)))

    @property
    def step(self) -> int:
        """The number of this rank's next push."""
        return self._turns.step

    @step.setter
    def step(self, step: int) -> None:
        self._turns.step = step

    @property
    def seconds_waiting(self) -> float:
        """How long this worker has waited for answers."""
        return self._turns.seconds_waiting

    def _fetch(self, kind: ShardMessage, lo: int, hi: int | None, out: Tensor | None, consistent: bool) -> Tensor:
        hi = self.size if hi is None else hi
        self._must_fit(lo, hi)
        whole = hi - lo == self.size
        if out is None:
            out = self.home if whole and kind is ShardMessage.PULL else None
        out, places = self._landing(out, lo, hi)
        self.bytes_moved += (hi - lo) * self.dtype.itemsize
        posted = self._posted
        together = self._independent and consistent and len(self._ranges) > 1
        if self._resting is not None and whole and kind is ShardMessage.PULL and not together:
            (step, weight), self._resting = self._resting, None
            self.lead = self._turns.push_pull(step, weight, places, consistent)
            return out
        if kind is ShardMessage.PULL and whole and posted is not None and posted.whole and not together:
            self._posted = None
            asks = [
                ShardCall(i, PULLING[ShardMessage(k)], a, b, weight, elements, piece, places[i])
                for i, k, a, b, weight, elements, piece, _, _ in posted.asks
            ]
        else:
            self.settle()
            cuts = [(i, max(a, lo) - a, min(b, hi) - a) for i, (a, b) in enumerate(self._ranges)]
            asks = [ShardCall(i, kind, a, b, place=places[i]) for i, a, b in cuts if a < b]
        if kind is ShardMessage.PULL:
            self._pulled(asks, consistent)
        else:
            self._turns.exchange(asks, consistent)
        return out

    def _pulled(self, asks: list[ShardCall], consistent: bool) -> None:
        if self._independent and consistent and len(asks) > 1:
            answers = self._turns.read_together(asks)
        else:
            answers = self._turns.exchange(asks, consistent)
        self.lead = max([answer.lead for answer in answers], default=0)

    def _must_fit(self, lo: int, hi: int) -> None:
        if not 0 <= lo <= hi <= self.size:
            raise errors.ConfigError(f"range {lo} to {hi} is not within the {self.size} parameters")

    def _must_land(self, out: Tensor | None, count: int) -> None:
        if out is not None and (out.numel() != count or out.dtype != self.dtype or not out.is_contiguous()):
            raise errors.ConfigError(
                f"out is {out.dtype} of {out.numel()} elements: give a contiguous CPU tensor of {count} {self.dtype}"
            )

    # ---- where things lie

    def _laid(self, vector: Tensor, lo: int, count: int) -> Tensor:
        """A gradient where the shards find it: in the desk's memory if there is one."""
        desk = self._turns.desk
        if desk is None:
            return vector.detach().reshape(-1).to("cpu", self.dtype)
        mine = desk.whole if count == self.size else desk.gradient[lo : lo + count]
        if not desk.holds(vector, lo):
            self._turns.rest()
            desk.lay(vector.detach() if vector.requires_grad else vector, mine)
        return mine

    def _landing(self, out: Tensor | None, lo: int, hi: int) -> tuple[Tensor, list[Place]]:
        """Where a pull of the elements lo to hi goes, as a tensor and as the bytes of each shard."""
        landed = self._landed
        if landed is not None and landed[0] is out and hi - lo == self.size:
            return landed
        self._must_land(out, hi - lo)
        fresh = torch.empty(hi - lo, dtype=self.dtype) if out is None else out
        whole, item = flat_bytes(fresh), self.dtype.itemsize
        places = [whole[max(0, a - lo) * item : max(0, min(b, hi) - lo) * item] for a, b in self._ranges]
        if out is not None and hi - lo == self.size:
            self._landed = out, places
        return fresh, places

    def _coded(self, memory: ErrorFeedback, vector: Tensor, weight: float, lo: int) -> list[Tensor]:
        """An encoded gradient, a payload for each shard."""
        cuts = [(max(a, lo), min(b, lo + vector.numel())) for a, b in self._ranges]
        return [coded(memory, vector[a - lo : max(a, b) - lo], min(a, self.size), weight) for a, b in cuts]

    # ---- what is asked

    def _post(
        self, asks: list[ShardCall], whole: bool, before: dict[int, ShardCall] | None = None, first: int | None = None
    ) -> None:
        """Send a push, now or together with the next request.

        `before` are the requests that a shard must get first to know the push; `first` is the first step that it stands
        for.
        """
        said = [[before[ask.shard], ask] if before and ask.shard in before else [ask] for ask in asks]
        self._turns.keep(self.step if first is None else first, said)
        self._posted = _FixedPush(asks, whole)
        self.step += 1
        if not self._defer:
            self.settle()

    def _pushes(self, weight: float, lo: int, count: int, laid: Tensor | list[Tensor]) -> list[ShardCall]:
        step, kind = self.step, ShardMessage.PUSH
        if isinstance(laid, list):
            return [
                ShardCall(
                    i, CODED[kind], step, max(a, lo) - a if max(a, lo) < min(b, lo + count) else 0, weight, 0, laid[i]
                )
                for i, (a, b) in enumerate(self._ranges)
            ]
        if count == self.size:
            pieces = self._turns.pieces if self._turns.desk is not None else [laid[a:b] for a, b in self._ranges]
            return self._whole_pushes(step, weight, pieces)
        asks = []
        for i, (a, b) in enumerate(self._ranges):
            start, stop = max(a, lo), min(b, lo + count)
            piece = laid[start - lo : stop - lo] if start < stop else laid[:0]
            asks.append(ShardCall(i, kind, step, start - a if start < stop else 0, weight, piece.numel(), piece))
        return asks

    def _whole_pushes(self, step: int, weight: float, pieces: list[Tensor]) -> list[ShardCall]:
        return [
            ShardCall(i, ShardMessage.PUSH, step, 0, weight, b - a, pieces[i]) for i, (a, b) in enumerate(self._ranges)
        ]

    # ---- rows

    def _listed(self, ids: Tensor, table: str | None) -> Listed:
        if self._lists is None:
            raise errors.ConfigError("rows by id need the parameters' layout: this server was made without one")
        return self._lists.find(ids, table)

    def _naming(self, listed: Listed, parts: list[tuple[int, ShardRows]]) -> dict[int, ShardCall]:
        """By shard, what tells these ids to it."""
        return {
            i: ShardCall(
                i, ShardMessage.IDS, listed.number, rows.entry, piece=listed.ids.unique[slice(*listed.cuts[i])]
            )
            for i, rows in parts
        }

    def _tell(self, listed: Listed, naming: dict[int, ShardCall]) -> None:
        """Make sure that these shards know the ids."""
        told = self._turns.told
        if listed.new:
            for known in told:
                known.discard(listed.number)
        unknown = [i for i in naming if listed.number not in told[i]]
        if unknown:
            self._turns.exchange([naming[i] for i in unknown])
            for i in unknown:
                told[i].add(listed.number)


class _FixedPush(NamedTuple):
    """A push that has been made and has not left."""

    asks: list[ShardCall]
    whole: bool  # it covers the whole vector, so that a pull of the whole vector may go with it

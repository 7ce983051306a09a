"""Access to the shared parameters on a server group, for a worker: a `GroupServer` over a `Session`.

With `defer`, a push is sent together with the next request, so that a round of push and pull is one request to each
server. `compress` makes pushes travel in fewer bytes, where that pays.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from rayps.comm.compress import CANDIDATES, MARGIN, ErrorFeedback, choice, codec
from rayps.comm.link.socket_link import EMPTY
from rayps.core.errors import ConfigError, PeerTimeout
from rayps.ps.client.session import SegmentReplies, Session
from rayps.ps.protocol.messages import GroupMessage, read_numbers
from rayps.ps.protocol.pieces import coded_piece, range_piece, rows_piece, rows_push
from rayps.ps.protocol.rows import IdLists, ShardRows
from rayps.ps.protocol.space import Space
from rayps.tensors.flat import Gradient, Layout
from rayps.tensors.packing import flat_bytes

LOOK_SECONDS = 0.01  # seconds between two checks of another worker's progress

Extras = Callable[[], Mapping[int, Any]]


class GroupServer:
    """The dense vector of a space: pull and push, whole or by range.

    `extras` gives a step's pieces of tables, by segment; without it tables are pushed nothing. `step` is the number of
    the next push; -1 goes on where the rank was. `consistent` is what pulls do unless they say otherwise, see `pull`;
    by default they are consistent for every staleness but None.

    Raises:
        PeerTimeout, PeerLost, StaleGeneration: as `Session.join`.
        ConfigError: the space has no dense vector.
    """

    def __init__(
        self,
        talk: Session,
        *,
        defer: bool = True,
        extras: Extras | None = None,
        step: int = -1,
        consistent: bool | None = None,
    ) -> None:
        space = talk.space
        if space.layout is None:
            raise ConfigError(f"space {space.name!r} has tables only: there is no vector to pull", field="space")
        self.talk, self.rank, self.size, self.dtype = talk, talk.rank, space.layout.size, space.layout.dtype
        self.home: Tensor | None = None  # the tensor that receives whole pulls; None = a new tensor each time
        self.bytes_moved = 0  # bytes of parameters and gradients, sent and received
        self._last = SegmentReplies({}, 0, 0, 0)  # replies to the last pull; `durable` also of the last push
        servers = space.servers
        self.consistent = servers.staleness is not None if consistent is None else consistent
        self.feedback: ErrorFeedback | None = None  # where pushes are encoded: see `rayps.ps.client.client`
        self.extras = extras
        self._defer = defer
        self._vector = VectorSegments(space, space.layout)
        self._lists = IdLists(space.layout, space.cuts)
        self._posted: _SentPush | None = None  # a deferred push that is not sent
        # where the last whole pull was written: the tensor, its pieces and landing places
        self._landed: tuple[Tensor, dict[int, Any], dict[int, Any]] | None = None
        marks = talk.join()
        self.step = min(marks.values()) if step < 0 else step

    def pull(
        self, lo: int = 0, hi: int | None = None, *, out: Tensor | None = None, consistent: bool | None = None
    ) -> Tensor:
        """Return the elements lo to hi of the vector; waits while the clock says so.

        The values are written to `out` if it is given (a contiguous CPU tensor of as many elements), else to a new
        tensor. With `consistent` they are of one moment: every push is in all of them or in none (with staleness 0 that
        is so anyway; otherwise pushes wait on the servers meanwhile, and the pull takes four requests instead of one).
        Without `consistent`, segments answer independently, and a segment of this host may step while it is read.

        Raises:
            PeerTimeout: the slowest worker, or a server, was silent past the deadline.
            PeerLost: segments are lost.
        """
        return self._fetch(GroupMessage.PULL, lo, self.size if hi is None else hi, out, consistent)

    def read(self, lo: int = 0, hi: int | None = None) -> Tensor:
        """Return the elements lo to hi as they are now, outside the clock; each segment's are of one version."""
        return self._fetch(GroupMessage.READ, lo, self.size if hi is None else hi, None, False)

    def push(self, value: Tensor | Gradient, weight: float = 1.0, lo: int = 0, rounds: int = 1) -> None:
        """Push a gradient, or a range of it that begins at element lo; the push counts as one step.

        Where the strategy's pushes are `spans` it counts as `rounds` steps, all that were made since the one before.

        A Gradient brings its number of samples as its weight. What a range leaves out is not stepped, unless others
        push it in the same round. Deferred, `value` must not change before the next call here.

        Raises:
            PeerTimeout, PeerLost, StaleGeneration: as `Session.exchange`.
        """
        vector, weight = (value.vector, float(value.samples)) if isinstance(value, Gradient) else (value, float(weight))
        count = vector.numel()
        self._vector.check_range(lo, lo + count)
        self.settle()
        if count == self.size and self.extras is None and self.feedback is None and self._lay(vector, weight, rounds):
            return
        if self.feedback is not None:
            pieces = self._vector.encoded(self.feedback, vector.detach().reshape(-1), weight, lo)
        else:
            pieces = self._vector.pushed(vector.detach().reshape(-1), lo)
        self._post(pieces, weight, rounds)

    def _post(self, pieces: dict[int, Any], weight: float, rounds: int = 1) -> None:
        """Send a push now, or with the next request. Segments that `pieces` lacks are not named."""
        pieces = self._vector.to_all(pieces)
        if self.extras is not None:
            pieces |= self.extras()
        self.bytes_moved += sum(len(piece) for piece in pieces.values())
        self.step += rounds
        self._posted = _SentPush(self.step - 1, weight, pieces)
        if not self._defer:
            self.settle()

    def wait(self, rank: int, rounds: int) -> None:
        """Return when the pushes of a rank stand for `rounds` rounds.

        Raises:
            PeerTimeout: the rank pushed nothing within the deadline, which each push renews.
        """
        self.settle()
        reached, since, timeout = -1, time.monotonic(), self.talk.timeout
        while reached < rounds:
            found = read_numbers(self.talk.exchange(GroupMessage.MARKS, {0: EMPTY}).pieces[0])[rank]
            if found > reached:
                reached, since = found, time.monotonic()
            elif time.monotonic() - since > timeout:
                raise PeerTimeout(
                    f"worker-{rank} has pushed {reached} of the {rounds} rounds that the others wait for, and none in "
                    f"{timeout:g} s (the knob is `timeout`)",
                    peer=f"worker-{rank}",
                    seconds=timeout,
                )
            else:
                time.sleep(LOOK_SECONDS)

    def _lay(self, vector: Tensor, weight: float, rounds: int) -> bool:
        """Push a whole gradient in shared memory; return False if no server is on this host."""
        found = self.talk.shared.buffer()
        if found is None:
            return False
        if not found.holds(vector, 0):
            found.lay(vector.detach() if vector.requires_grad else vector, found.whole)
        self.bytes_moved += self.size * self._vector.item
        self.step += rounds
        self._posted = _SentPush(self.step - 1, weight, self.talk.shared.pieces(found))
        if not self._defer:
            self.settle()
        return True

    def settle(self) -> None:
        """Return once every push is acknowledged."""
        if self._posted is not None:
            posted, self._posted = self._posted, None
            answers = self.talk.exchange(GroupMessage.PUSH, posted.pieces, step=posted.step, weight=posted.weight)
            self._last = self._last._replace(durable=answers.durable)

    def flush(self) -> None:
        """Return when every push is durable: all backups have it, so no failure of one server loses it.

        In step (staleness 0) that is after the other workers have pushed as many rounds.

        Raises:
            PeerTimeout, PeerLost: as `Session.exchange`.
        """
        self.settle()
        self.talk.flush()

    def pull_rows(
        self, ids: Tensor, table: str | None = None, *, out: Tensor | None = None, consistent: bool | None = None
    ) -> Tensor:
        """Return the rows of a table with these ids, in the given order and repetition, [len(ids), width].

        A table is a parameter of two or more dimensions; `table` is its name, if there are several. The rows are
        written to `out` if it is given. Waits and raises as `pull`, and ConfigError: there is no such table or row.
        """
        self.settle()
        listed = self._lists.find(ids, table)
        width = listed.ids.table.width
        self._vector.check_out(out, len(ids) * width)
        shape = (len(listed.ids.unique), width)
        found = out.view(shape) if out is not None and listed.ids.sorted else torch.empty(shape, dtype=self.dtype)
        if not listed.pulls:
            made = {i: rows_piece(rows, self._vector.bytes_of(i)) for i, rows in listed.parts}
            listed.pulls.update({i: self._in_room(each) for i, each in made.items()})
        places = {i: flat_bytes(found[slice(*listed.cuts[i])]) for i, _ in listed.parts}
        self._last = self._pulled(listed.pulls, places, consistent, dict(listed.parts))
        self.bytes_moved += found.numel() * self._vector.item
        return listed.ids.spread(found, None if out is None else out.view(-1, width))

    def push_rows(self, ids: Tensor, rows: Tensor, weight: float = 1.0, table: str | None = None) -> None:
        """Push a gradient [len(ids), width] of the rows with these ids; rows of the same id are added up.

        Counts as one step, as `push` does. Out of step the optimizer steps these rows alone, in step all that anybody
        pushed in the round; see `rayps.ps.protocol.rows.step_rows` for what that means to its state.

        Raises:
            ConfigError: there is no such table or row, or the shape is another.
        """
        listed = self._lists.find(ids, table)
        width = listed.ids.table.width
        if tuple(rows.shape[:1]) != tuple(ids.shape) or rows.numel() != len(ids) * width:
            raise ConfigError(
                f"rows have shape {tuple(rows.shape)}: give [{len(ids)}, {width}], one row for each of the ids"
            )
        self.settle()
        summed = listed.ids.summed(rows.detach().reshape(-1, width).to("cpu", self.dtype))
        pieces = {
            i: rows_push(part, self._vector.bytes_of(i), summed, listed.cuts[i][0], self.talk.room)
            for i, part in listed.parts
        }
        self._post(pieces, float(weight))

    def _in_room(self, piece: bytes) -> Any:
        """Return a copy of a piece in memory that servers of this host can read."""
        found = self.talk.room(len(piece))
        found[:] = np.frombuffer(piece, np.uint8)
        return found

    def buffer(self, size: int, dtype: torch.dtype) -> Tensor:
        """Allocate `size` elements, all zero, for gradients: what is at the beginning is pushed without a copy.

        Servers of this host read this memory: from `push` on it may change only after the push is acknowledged (`pull`
        or `settle` has returned). If no server is on this host, it is ordinary memory.
        """
        found = self.talk.shared.buffer()
        if found is None or dtype != self.dtype or size > found.gradient.numel():
            return torch.zeros(size, dtype=dtype)
        return found.gradient[:size]

    def hang_up(self) -> None:
        """End the waits of another thread in this object with PeerLost; that thread must `close`.

        Any thread may call this.
        """
        self.talk.hang_up()

    def close(self) -> None:
        """Close the connections; the rank's clock stays on the servers.

        Call `flush` before, if pushes must be durable.
        """
        self.talk.close()

    @property
    def lead(self) -> int:
        """The number of rounds that this worker was ahead of the slowest at its last pull."""
        return self._last.lead

    @property
    def version(self) -> int:
        """The number of optimizer steps that the last pulled values contain, the least of the segments."""
        return self._last.version

    @property
    def durable(self) -> int:
        """The step of this rank below which all pushes are durable, as of the last answers."""
        return self._last.durable

    @property
    def shares_memory(self) -> bool:
        """Whether all servers read this worker's gradient in shared memory."""
        return self.talk.shares_memory

    @property
    def seconds_waiting(self) -> float:
        """How long this worker has waited for answers."""
        return self.talk.seconds_waiting

    def _fetch(self, kind: GroupMessage, lo: int, hi: int, out: Tensor | None, consistent: bool | None) -> Tensor:
        self._vector.check_range(lo, hi)
        whole = hi - lo == self.size
        if out is None:
            out = self.home if whole and kind is GroupMessage.PULL else None
        again, landed = whole and out is not None, self._landed
        if out is None:
            out = torch.empty(hi - lo, dtype=self.dtype)
        if landed is not None and again and landed[0] is out:
            pieces, places = landed[1:]
        else:
            self._vector.check_out(out, hi - lo)
            pieces, places = self._vector.pulled(flat_bytes(out), lo, hi)
            if again:
                self._landed = out, pieces, places
        self.bytes_moved += (hi - lo) * self._vector.item
        posted, together = self._posted, self._together(consistent)
        if kind is GroupMessage.PULL and whole and posted is not None and not together:
            self._posted = None
            torn = not (self.consistent if consistent is None else consistent)
            found = self.talk.turn(posted.step, posted.weight, posted.pieces, places, torn=torn)
            answers = found or self.talk.exchange(
                GroupMessage.PUSH_PULL, posted.pieces, step=posted.step, weight=posted.weight, landing=places
            )
        else:
            self.settle()
            if kind is GroupMessage.PULL:
                answers = self._pulled(pieces, places, consistent)
            else:
                answers = self.talk.exchange(kind, pieces, landing=places)
        self._last = answers if kind is GroupMessage.PULL else self._last._replace(version=answers.version)
        return out

    def _pulled(
        self,
        pieces: dict[int, Any],
        places: dict[int, Any],
        consistent: bool | None,
        rows: dict[int, ShardRows] | None = None,
    ) -> SegmentReplies:
        if len(pieces) > 1 and self._together(consistent):
            return self.talk.read_together(pieces, step=self.step, landing=places, rows=rows)
        torn = not (self.consistent if consistent is None else consistent)
        return self.talk.exchange(GroupMessage.PULL, pieces, step=self.step, landing=places, rows=rows, torn=torn)

    def _together(self, consistent: bool | None) -> bool:
        """Return whether a pull must stop all servers at the same pushes."""
        return self._vector.independent and (self.consistent if consistent is None else consistent)


class VectorSegments:
    """The dense vector of a space, cut into segments: splits a push or a pull of a range into pieces by segment."""

    def __init__(self, space: Space, layout: Layout) -> None:
        self.size, self.dtype, self.cuts, self.item = layout.size, layout.dtype, space.cuts, layout.dtype.itemsize
        # segments that apply pushes each on its own: a pull of several may be of several states
        self.independent = not space.servers.in_step and len(space.cuts) > 1
        self._nothing: dict[int, Any] = dict.fromkeys(range(space.segments), EMPTY)

    def bytes_of(self, index: int) -> int:
        """Return the bytes of a segment's elements."""
        a, b = self.cuts[index]
        return (b - a) * self.item

    def to_all(self, pieces: dict[int, Any]) -> dict[int, Any]:
        """Return the pieces of a push to all segments, tables too: empty ones for the segments that `pieces` lacks."""
        return self._nothing | pieces

    def pulled(self, out: Any, lo: int, hi: int) -> tuple[dict[int, Any], dict[int, Any]]:
        """Return the pieces of a pull of the elements lo to hi, and the landing place of each in the bytes `out`."""
        pieces: dict[int, Any] = {}
        places: dict[int, Any] = {}
        for index, (a, b) in enumerate(self.cuts):
            start, stop = max(a, lo), min(b, hi)
            if start < stop:
                whole = stop - start == b - a
                pieces[index] = EMPTY if whole else range_piece(start - a, stop - start, self.bytes_of(index))
                places[index] = out[(start - lo) * self.item : (stop - lo) * self.item]
        return pieces, places

    def pushed(self, vector: Tensor, lo: int) -> dict[int, Any]:
        """Return the pieces of a push of a vector that begins at element `lo`."""
        laid, count, item = flat_bytes(vector.to("cpu", self.dtype)), vector.numel(), self.item
        found: dict[int, Any] = {}
        for index, (a, b) in enumerate(self.cuts):
            start, stop = max(a, lo), min(b, lo + count)
            if start < stop:
                part = laid[(start - lo) * item : (stop - lo) * item]
                whole = stop - start == b - a
                found[index] = part if whole else range_piece(start - a, stop - start, (b - a) * item, part.data)
        return found

    def encoded(self, memory: ErrorFeedback, vector: Tensor, weight: float, lo: int) -> dict[int, Any]:
        """Return the encoded pieces of a push of a vector that begins at element `lo`."""
        cuts = [(i, a, max(a, lo), min(b, lo + vector.numel())) for i, (a, b) in enumerate(self.cuts)]
        return {
            i: coded_piece(memory, vector[start - lo : stop - lo], start, start - a, weight, self.bytes_of(i))
            for i, a, start, stop in cuts
            if start < stop
        }

    def check_range(self, lo: int, hi: int) -> None:
        """Raise ConfigError if there is no such range of elements."""
        if not 0 <= lo <= hi <= self.size:
            raise ConfigError(f"range {lo} to {hi} is not within the {self.size} parameters")

    def check_out(self, out: Tensor | None, count: int) -> None:
        """Raise ConfigError if `count` elements cannot be written into `out`."""
        if out is None:
            return
        if out.numel() != count or out.dtype != self.dtype or not out.is_contiguous() or out.device.type != "cpu":
            raise ConfigError(
                f"out is {out.dtype} of {out.numel()} elements: give a contiguous CPU tensor of {count} {self.dtype}"
            )


class _SentPush(NamedTuple):
    """A deferred push that was not sent yet."""

    step: int
    weight: float
    pieces: dict[int, Any]


PROBE_ELEMENTS = 1 << 20
_TRIES = 3


class PushesWhole(Protocol):
    """The interface of a worker's server that `compress` uses."""

    size: int  # elements
    dtype: torch.dtype
    feedback: ErrorFeedback | None  # where pushes are encoded

    @property
    def shares_memory(self) -> bool:
        """Whether all servers read the worker's gradient in shared memory."""

    def read(self, lo: int = 0, hi: int | None = None) -> Tensor:
        """Return the elements lo to hi as they are now."""


def compress(server: PushesWhole, compression: str) -> dict[str, Any]:
    """Let a server's pushes travel as `compression` says; the choice as an event.

    `auto` leaves them as they are where shards read a worker's gradient in shared memory. Elsewhere it compares what a
    read of up to 2^20 elements takes with what encoding and decoding as many takes, beside the share of the bytes that
    is left: for this worker and its lines, each may choose another.
    """
    if compression != "auto":
        server.feedback = ErrorFeedback(codec(compression), server.size, server.dtype)
        return choice("server", compression, "given")
    if server.shares_memory:
        return choice("server", "off", "all shards are on this host and read them where they lie")
    n = min(server.size, PROBE_ELEMENTS)
    x = torch.randn(n).to(server.dtype)
    line = _seconds(lambda: server.read(0, n))
    seconds = {"off": line} | {name: _coded_seconds(name, x, line) for name in CANDIDATES}
    best = min(CANDIDATES, key=lambda name: seconds[name])
    pays = seconds[best] < MARGIN * seconds["off"]
    if pays:
        server.feedback = ErrorFeedback(codec(best), server.size, server.dtype)
    return choice("server", best if pays else "off", f"{n} elements", seconds)


def _coded_seconds(name: str, x: Tensor, line: float) -> float:
    """Return the seconds of a compressed push: coding on both sides, and sending the remaining bytes."""
    kind, n = codec(name), x.numel()
    memory = ErrorFeedback(kind, n, x.dtype)
    coding = _seconds(lambda: kind.decode(memory.encode(x), n, x.dtype))
    return coding + line * kind.size(n) / (n * x.element_size())


def _seconds(work: Callable[[], Any]) -> float:
    found = []
    for _ in range(_TRIES + 1):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return statistics.median(found[1:])  # the first one touches new pages

"""A worker's access to the dense vector of a space: a `GroupServer`, which sends its requests through a `Session`.

With `defer`, a push is sent together with the next request, so that a push and a pull are one request to each server.
`compress` chooses an encoding of pushes that takes fewer bytes, if that is faster.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from rayps_client.errors import ConfigError, PeerTimeout
from torch import Tensor

from rayps.comm.compress import CANDIDATES, MARGIN, ErrorFeedback, describe_choice, find_codec
from rayps.comm.link.socket_link import EMPTY
from rayps.ps.client.session import SegmentReplies, Session
from rayps.ps.protocol.mailbox import Landing
from rayps.ps.protocol.messages import GroupMessage, read_numbers
from rayps.ps.protocol.pieces import encode_rows_push, make_coded_piece, make_range_piece, make_rows_piece
from rayps.ps.protocol.rows import IdLists, PieceBytes, ShardRows
from rayps.ps.protocol.space import Space
from rayps.tensors.flat import Gradient, Layout
from rayps.tensors.packing import view_bytes

LOOK_SECONDS = 0.01  # seconds between two checks of another worker's progress

Extras = Callable[[], Mapping[int, PieceBytes]]


class GroupServer:
    """A worker's pulls and pushes of the dense vector of a space: all of it, a range, or rows.

    `defer`: a push is sent with the next request. `extras` returns the pieces that a push has for tables, as a dict
    from segment to piece; without `extras`, a push has empty pieces for tables. `step` is the number of the next push;
    -1 means the step after the last push of this rank that the servers have. `consistent` is the default of the
    argument `consistent` of `pull`; None means the option `consistent` of the space's strategy.

    Raises:
        PeerTimeout, PeerLost, StaleGeneration: as `Session.join`.
        ConfigError: the space has no dense vector.
    """

    def __init__(
        self,
        session: Session,
        *,
        defer: bool = True,
        extras: Extras | None = None,
        step: int = -1,
        consistent: bool | None = None,
    ) -> None:
        space = session.space
        if space.layout is None:
            raise ConfigError(f"space {space.name!r} has tables only: there is no vector to pull", field="space")
        self.session, self.rank, self.size, self.dtype = session, session.rank, space.layout.size, space.layout.dtype
        self.home: Tensor | None = None  # the tensor that receives whole pulls; if None, each gets a new tensor
        self.bytes_moved = 0  # bytes of parameters and gradients, sent and received
        self._last = SegmentReplies({}, 0, 0, 0)  # replies to the last pull; `durable` is also updated by a push
        servers = space.servers
        self.consistent = servers.pulls_one_moment if consistent is None else consistent
        self.feedback: ErrorFeedback | None = None  # encodes pushes; None if pushes are not compressed
        self.extras = extras
        self._defer = defer
        self._vector = VectorSegments(space, space.layout)
        self._lists = IdLists(space.layout, space.cuts)
        self._deferred: _DeferredPush | None = None  # the push that is not sent yet
        # the last whole pull, for reuse: the tensor, and by segment the pieces and the parts of the tensor
        self._last_whole_pull: tuple[Tensor, dict[int, PieceBytes], dict[int, PieceBytes]] | None = None
        marks = session.join()
        self.step = min(marks.values()) if step < 0 else step

    def pull(
        self, lo: int = 0, hi: int | None = None, *, out: Tensor | None = None, consistent: bool | None = None
    ) -> Tensor:
        """Return the elements lo to hi of the vector; wait until the space's staleness allows the pull.

        The values are written to `out` if it is given (a contiguous CPU tensor of as many elements), else to a new
        tensor. With `consistent` all values are of one moment: each push is contained in all of them or in none. With
        staleness 0 all pulls are consistent. Otherwise a consistent pull takes four requests instead of one, and
        servers delay pushes until it has ended. Without `consistent`, segments answer independently, and the server may
        update a segment in shared memory while the worker reads it. The values are then of several versions.

        Raises:
            PeerTimeout: the slowest worker, or a server, sent nothing before the deadline.
            PeerLost: segments are lost, or `hang_up` was called.
        """
        return self._fetch(GroupMessage.PULL, lo, self.size if hi is None else hi, out, consistent)

    def pull_to(self, places: dict[int, PieceBytes | Landing]) -> None:
        """Pull the whole vector as `pull` does. `places` has a buffer, or a `Landing`, for each dense segment."""
        self.settle()
        self.bytes_moved += self.size * self._vector.item
        self._last = self._pull_pieces(dict.fromkeys(places, EMPTY), places, None)

    def read(self, lo: int = 0, hi: int | None = None) -> Tensor:
        """Return the elements lo to hi as they are now, without waiting for other workers.

        The elements of one segment are of one version.
        """
        return self._fetch(GroupMessage.READ, lo, self.size if hi is None else hi, None, False)

    def push(self, value: Tensor | Gradient, weight: float = 1.0, lo: int = 0, rounds: int = 1) -> None:
        """Push a gradient, or a range of it that begins at element `lo`. The push counts as one step.

        If the strategy's pushes cover several rounds (`PerPush.spans`), the push counts as `rounds` steps, the number
        of rounds since the worker's last push. A Gradient has its own weight, the number of its samples. Elements
        outside the range are not stepped, unless other workers push them in the same round. An empty range with weight
        0, or a Gradient that was skipped in fp16, is a step that a learning-rate schedule in fp16 does not count. With
        `defer`, `value` must not change before the next call of a method of this object.

        Raises:
            PeerTimeout, PeerLost, StaleGeneration: as `Session.exchange`.
        """
        vector, weight = (value.vector, float(value.samples)) if isinstance(value, Gradient) else (value, float(weight))
        if isinstance(value, Gradient) and value.skipped:
            vector = vector[:0]
        count = vector.numel()
        self._vector.check_range(lo, lo + count)
        self.settle()
        if (
            count == self.size
            and self.extras is None
            and self.feedback is None
            and self._push_shared(vector, weight, rounds)
        ):
            return
        if self.feedback is not None:
            pieces = self._vector.encoded(self.feedback, vector.detach().reshape(-1), weight, lo)
        else:
            pieces = self._vector.pushed(vector.detach().reshape(-1), lo)
        self._send_push(pieces, weight, rounds)

    def push_rest(self, step: int) -> bool:
        """Push, uncompressed and as step `step`, what earlier compressed pushes have left out. Wait for the answers.

        Return False if pushes are not compressed. Raises the errors of `push`.
        """
        if self.feedback is None:
            return False
        feedback, self.feedback = self.feedback, None
        self.settle()
        self.step = step
        self.push(feedback.residual.to(self.dtype))
        self.settle()
        return True

    def _send_push(self, pieces: dict[int, PieceBytes], weight: float, rounds: int = 1) -> None:
        """Send a push now, or with the next request. A segment that `pieces` lacks is sent an empty piece."""
        pieces = self._vector.to_all(pieces)
        if self.extras is not None:
            pieces |= self.extras()
        self.bytes_moved += sum(len(piece) for piece in pieces.values())
        self.step += rounds
        self._deferred = _DeferredPush(self.step - 1, weight, pieces)
        if not self._defer:
            self.settle()

    def wait(self, rank: int, rounds: int) -> None:
        """Wait until the pushes of a rank cover `rounds` rounds.

        Raises:
            PeerTimeout: the rank has pushed nothing for the session's `timeout` in seconds.
        """
        self.settle()
        reached, since, timeout = -1, time.monotonic(), self.session.timeout
        while reached < rounds:
            found = read_numbers(self.session.exchange(GroupMessage.MARKS, {0: EMPTY}).pieces[0])[rank]
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

    def _push_shared(self, vector: Tensor, weight: float, rounds: int) -> bool:
        """Push a whole gradient through shared memory. Return False, without effect, if no server is on this host."""
        found = self.session.shared.buffer()
        if found is None:
            return False
        if not found.holds(vector, 0):
            found.copy_in(vector.detach() if vector.requires_grad else vector, found.whole)
        self.bytes_moved += self.size * self._vector.item
        self.step += rounds
        self._deferred = _DeferredPush(self.step - 1, weight, self.session.shared.pieces(found))
        if not self._defer:
            self.settle()
        return True

    def settle(self) -> None:
        """Send a deferred push, and wait until it is acknowledged."""
        if self._deferred is not None:
            deferred, self._deferred = self._deferred, None
            answers = self.session.exchange(
                GroupMessage.PUSH, deferred.pieces, step=deferred.step, weight=deferred.weight
            )
            self._last = self._last._replace(durable=answers.durable)

    def note(self, answers: SegmentReplies, *, pulled: bool) -> None:
        """Record the answers to a push that the session has streamed. `pulled`: the push had a pull with it."""
        self._last = answers if pulled else self._last._replace(durable=answers.durable)

    def flush(self) -> None:
        """Wait until every push is durable: all backups have it, so the failure of one server does not lose it.

        With staleness 0 a push is durable only after the other workers have pushed as many rounds.

        Raises:
            PeerTimeout, PeerLost: as `Session.exchange`.
        """
        self.settle()
        self.session.flush()

    def pull_rows(
        self, ids: Tensor, table: str | None = None, *, out: Tensor | None = None, consistent: bool | None = None
    ) -> Tensor:
        """Return the rows of a table with these ids, [len(ids), width], in the order of `ids`, which may repeat.

        A table is a parameter of two or more dimensions; `table` is its name, if there are several. The rows are
        written to `out` if it is given. Waits and raises as `pull`, and raises ConfigError if there is no such table or
        row.
        """
        self.settle()
        listed = self._lists.find(ids, table)
        width = listed.ids.table.width
        self._vector.check_out(out, len(ids) * width)
        shape = (len(listed.ids.unique), width)
        found = out.view(shape) if out is not None and listed.ids.sorted else torch.empty(shape, dtype=self.dtype)
        if not listed.pulls:
            made = {i: make_rows_piece(rows, self._vector.bytes_of(i)) for i, rows in listed.parts}
            listed.pulls.update({i: self._copy(each) for i, each in made.items()})
        places: dict[int, PieceBytes] = {i: view_bytes(found[slice(*listed.cuts[i])]) for i, _ in listed.parts}
        self._last = self._pull_pieces(listed.pulls, places, consistent, dict(listed.parts))
        self.bytes_moved += found.numel() * self._vector.item
        return listed.ids.spread(found, None if out is None else out.view(-1, width))

    def push_rows(self, ids: Tensor, rows: Tensor, weight: float = 1.0, table: str | None = None) -> None:
        """Push a gradient [len(ids), width] of the rows with these ids; gradients of the same id are added.

        The push counts as one step. With staleness 0 the optimizer steps all rows that any worker has pushed in the
        round, otherwise only these rows. `rayps.ps.protocol.rows.step_rows` says how the optimizer's state changes.

        Raises:
            ConfigError: there is no such table or row, or `rows` has another shape.
        """
        listed = self._lists.find(ids, table)
        width = listed.ids.table.width
        if tuple(rows.shape[:1]) != tuple(ids.shape) or rows.numel() != len(ids) * width:
            raise ConfigError(
                f"rows have shape {tuple(rows.shape)}: give [{len(ids)}, {width}], one row for each of the ids"
            )
        self.settle()
        summed = listed.ids.summed(rows.detach().reshape(-1, width).to("cpu", self.dtype))
        pieces: dict[int, PieceBytes] = {
            i: encode_rows_push(part, self._vector.bytes_of(i), summed, listed.cuts[i][0], self.session.allocate)
            for i, part in listed.parts
        }
        self._send_push(pieces, float(weight))

    def _copy(self, piece: bytes) -> Any:
        """Return a copy of a piece in memory that servers of this host can read."""
        found = self.session.allocate(len(piece))
        found[:] = np.frombuffer(piece, np.uint8)
        return found

    def buffer(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor of `size` zeros. A gradient that is written into its first elements is pushed without a copy.

        Servers of this host read the tensor's memory. After a `push`, change the tensor only when the push is
        acknowledged (`pull` or `settle` has returned). If no server is on this host, this is ordinary memory.
        """
        found = self.session.shared.buffer()
        if found is None or dtype != self.dtype or size > found.gradient.numel():
            return torch.zeros(size, dtype=dtype)
        return found.gradient[:size]

    def hang_up(self) -> None:
        """End the waits of another thread in this object with PeerLost; that thread must then call `close`.

        Any thread may call this.
        """
        self.session.hang_up()

    def close(self) -> None:
        """Close the connections. The servers retain the number of this rank's steps.

        Call `flush` before, if pushes must be durable.
        """
        self.session.close()

    @property
    def lead(self) -> int:
        """The number of rounds that this worker was ahead of the slowest at its last pull."""
        return self._last.lead

    @property
    def version(self) -> int:
        """The number of optimizer steps that the last pulled values contain: the lowest number of any segment."""
        return self._last.version

    @property
    def durable(self) -> int:
        """The step of this rank below which all pushes are durable, as of the last answers."""
        return self._last.durable

    @property
    def shares_memory(self) -> bool:
        """Whether all servers read this worker's gradient in shared memory."""
        return self.session.shares_memory

    @property
    def seconds_waiting(self) -> float:
        """The seconds for which this worker has waited for answers."""
        return self.session.seconds_waiting

    def _fetch(self, kind: GroupMessage, lo: int, hi: int, out: Tensor | None, consistent: bool | None) -> Tensor:
        self._vector.check_range(lo, hi)
        whole = hi - lo == self.size
        if out is None:
            out = self.home if whole and kind is GroupMessage.PULL else None
        reused, last = whole and out is not None, self._last_whole_pull
        if out is None:
            out = torch.empty(hi - lo, dtype=self.dtype)
        if last is not None and reused and last[0] is out:
            pieces, places = last[1:]
        else:
            self._vector.check_out(out, hi - lo)
            pieces, places = self._vector.pulled(view_bytes(out), lo, hi)
            if reused:
                self._last_whole_pull = out, pieces, places
        self.bytes_moved += (hi - lo) * self._vector.item
        deferred, together = self._deferred, self._must_stop_together(consistent)
        if kind is GroupMessage.PULL and whole and deferred is not None and not together:
            self._deferred = None
            mixed_versions = not (self.consistent if consistent is None else consistent)
            found = self.session.push_pull_whole(
                deferred.step, deferred.weight, deferred.pieces, places, mixed_versions=mixed_versions
            )
            answers = found or self.session.exchange(
                GroupMessage.PUSH_PULL, deferred.pieces, step=deferred.step, weight=deferred.weight, outputs=places
            )
        else:
            self.settle()
            if kind is GroupMessage.PULL:
                answers = self._pull_pieces(pieces, places, consistent)
            else:
                answers = self.session.exchange(kind, pieces, outputs=places)
        self._last = answers if kind is GroupMessage.PULL else self._last._replace(version=answers.version)
        return out

    def _pull_pieces(
        self,
        pieces: dict[int, PieceBytes],
        places: Mapping[int, PieceBytes | Landing],
        consistent: bool | None,
        rows: dict[int, ShardRows] | None = None,
    ) -> SegmentReplies:
        if len(pieces) > 1 and self._must_stop_together(consistent):
            return self.session.read_together(pieces, step=self.step, outputs=places, rows=rows)
        mixed_versions = not (self.consistent if consistent is None else consistent)
        return self.session.exchange(
            GroupMessage.PULL, pieces, step=self.step, outputs=places, rows=rows, mixed_versions=mixed_versions
        )

    def _must_stop_together(self, consistent: bool | None) -> bool:
        """Return whether a pull must first make all segments stop after the same pushes, to be consistent."""
        return self._vector.independent and (self.consistent if consistent is None else consistent)


class VectorSegments:
    """The segments of a space's dense vector. Divides a push or a pull of a range into pieces, one for each segment."""

    def __init__(self, space: Space, layout: Layout) -> None:
        self.size, self.dtype, self.cuts, self.item = layout.size, layout.dtype, space.cuts, layout.dtype.itemsize
        # whether segments apply pushes independently, so that a pull of several may return different states
        self.independent = not space.servers.in_step and len(space.cuts) > 1
        self._nothing: dict[int, PieceBytes] = dict.fromkeys(range(space.segments), EMPTY)

    def bytes_of(self, index: int) -> int:
        """Return the size of a segment's elements in bytes."""
        a, b = self.cuts[index]
        return (b - a) * self.item

    def to_all(self, pieces: dict[int, PieceBytes]) -> dict[int, PieceBytes]:
        """Return `pieces`, with an empty piece for each segment that it lacks, including segments of tables."""
        return self._nothing | pieces

    def pulled(self, out: Any, lo: int, hi: int) -> tuple[dict[int, PieceBytes], dict[int, PieceBytes]]:
        """Return the pieces of a pull of the elements lo to hi, and the parts of the bytes `out` for their values.

        Both are dicts from segment.
        """
        pieces: dict[int, PieceBytes] = {}
        places: dict[int, PieceBytes] = {}
        for index, (a, b) in enumerate(self.cuts):
            start, stop = max(a, lo), min(b, hi)
            if start < stop:
                whole = stop - start == b - a
                pieces[index] = EMPTY if whole else make_range_piece(start - a, stop - start, self.bytes_of(index))
                places[index] = out[(start - lo) * self.item : (stop - lo) * self.item]
        return pieces, places

    def pushed(self, vector: Tensor, lo: int) -> dict[int, PieceBytes]:
        """Return the pieces of a push of a vector that begins at element `lo`."""
        laid, count, item = view_bytes(vector.to("cpu", self.dtype)), vector.numel(), self.item
        found: dict[int, PieceBytes] = {}
        for index, (a, b) in enumerate(self.cuts):
            start, stop = max(a, lo), min(b, lo + count)
            if start < stop:
                part = laid[(start - lo) * item : (stop - lo) * item]
                whole = stop - start == b - a
                found[index] = part if whole else make_range_piece(start - a, stop - start, (b - a) * item, part.data)
        return found

    def encoded(self, memory: ErrorFeedback, vector: Tensor, weight: float, lo: int) -> dict[int, PieceBytes]:
        """Return the compressed pieces of a push of a vector that begins at element `lo`."""
        cuts = [(i, a, max(a, lo), min(b, lo + vector.numel())) for i, (a, b) in enumerate(self.cuts)]
        return {
            i: make_coded_piece(memory, vector[start - lo : stop - lo], start, start - a, weight, self.bytes_of(i))
            for i, a, start, stop in cuts
            if start < stop
        }

    def check_range(self, lo: int, hi: int) -> None:
        """Raise ConfigError if the vector has no elements lo to hi."""
        if not 0 <= lo <= hi <= self.size:
            raise ConfigError(
                f"the range from element {lo} to {hi} is not within the {self.size} elements of the vector"
            )

    def check_out(self, out: Tensor | None, count: int) -> None:
        """Raise ConfigError if `count` elements cannot be written into `out`."""
        if out is None:
            return
        if out.numel() != count or out.dtype != self.dtype or not out.is_contiguous() or out.device.type != "cpu":
            raise ConfigError(
                f"out is {out.dtype} of {out.numel()} elements on {out.device}: give a contiguous CPU tensor of "
                f"{count} elements of {self.dtype}"
            )


class _DeferredPush(NamedTuple):
    """A push that will be sent with the next request."""

    step: int
    weight: float
    pieces: dict[int, PieceBytes]


PROBE_ELEMENTS = 1 << 20  # largest number of elements that `compress` reads and encodes to measure times
_TRIES = 3  # measurements of which the median counts


class PushesWhole(Protocol):
    """The part of the interface of `GroupServer` that `compress` uses."""

    size: int  # elements
    dtype: torch.dtype
    feedback: ErrorFeedback | None  # encodes pushes; None if pushes are not compressed

    @property
    def shares_memory(self) -> bool:
        """Whether all servers read the worker's gradient in shared memory."""

    def read(self, lo: int = 0, hi: int | None = None) -> Tensor:
        """Return the elements lo to hi as they are now."""


def compress(server: PushesWhole, compression: str) -> dict[str, Any]:
    """Set the encoding of a worker's pushes; return the choice as an event.

    `compression` is the name of a codec, or "auto". With "auto" pushes are not compressed if all servers read the
    worker's gradient in shared memory. Otherwise the worker measures how long it takes to read up to 2^20 elements, and
    to encode and decode as many with each codec. It then uses the codec with the shortest time of coding and sending,
    if this is less than MARGIN times the time without a codec. Each worker measures its own connections, so workers may
    choose different codecs.
    """
    if compression != "auto":
        server.feedback = ErrorFeedback(find_codec(compression), server.size, server.dtype)
        return describe_choice("server", compression, f"the option compression={compression} requests it")
    if server.shares_memory:
        return describe_choice("server", "off", "all servers are on this host and read them in shared memory")
    n = min(server.size, PROBE_ELEMENTS)
    x = torch.randn(n).to(server.dtype)
    sending = _time(lambda: server.read(0, n))
    seconds = {"off": sending} | {name: _estimate_coded_seconds(name, x, sending) for name in CANDIDATES}
    best = min(CANDIDATES, key=lambda name: seconds[name])
    pays = seconds[best] < MARGIN * seconds["off"]
    if pays:
        server.feedback = ErrorFeedback(find_codec(best), server.size, server.dtype)
    return describe_choice("server", best if pays else "off", f"{n} elements", seconds)


def _estimate_coded_seconds(name: str, x: Tensor, sending: float) -> float:
    """Estimate the seconds of a compressed push: encoding, decoding, and sending the remaining bytes.

    `sending` is the number of seconds for sending `x` uncompressed.
    """
    kind, n = find_codec(name), x.numel()
    memory = ErrorFeedback(kind, n, x.dtype)
    coding = _time(lambda: kind.decode(memory.encode(x), n, x.dtype))
    return coding + sending * kind.size(n) / (n * x.element_size())


def _time(work: Callable[[], Any]) -> float:
    found = []
    for _ in range(_TRIES + 1):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return statistics.median(found[1:])  # without the first call, which also allocates memory pages

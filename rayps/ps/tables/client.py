"""The client of sparse tables: pull rows by id, push their gradients, prefetch the rows of the next batch.

The ids of a lookup are made unique and sorted once, for both the pull and the push. Each table is cut into segments by
a hash of the id (`rayps.ps.tables.wire_format`). The push of a step includes a piece for every segment, because each
piece advances the clock of its segment.

`Tables.ahead` announces the next batch. A thread then pulls the rows of this batch over separate connections. These
rows lack this worker's newest push, so they are one round older than rows pulled at the beginning of the round. With
staleness 0 this is not allowed: the thread only sorts the ids, and the rows are pulled after the push. When rows are
prefetched, the same thread also sends the pushes, in the order of the rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np
import torch
from rayps_client.values import Buffer
from torch import Tensor

from rayps.data.base import Batch
from rayps.ps.client.session import SegmentReplies
from rayps.ps.protocol.messages import GroupMessage
from rayps.ps.protocol.space import Space
from rayps.ps.tables import wire_format
from rayps.ps.tables.ids import GivenIds
from rayps.ps.tables.local import TableSession
from rayps.ps.tables.lookup import Lookup, find_spans, lookup_of, merge_lookups
from rayps.ps.tables.prefetch import PrefetchCall, Prefetched, Prefetcher
from rayps.ps.tables.row_transfer import RowTransfer, make_row_transfer
from rayps.tensors.checkpoints.uploads import Download
from rayps.tensors.finite import find_not_finite, is_finite
from rayps.tensors.flat import square_of


class TableClient:
    """One worker's client of one table: pulls rows and pushes their gradients. Use it in one thread only."""

    def __init__(self, session: TableSession, space: Space, name: str, half: bool = False) -> None:
        """Use the table `name` of a space over a session.

        `half`: whether to send rows as bfloat16. Raises ConfigError if the space has no such table.
        """
        self.table, self.first = space.table(name)
        self.half = half
        self.prefetched: Callable[[str], Prefetched | None] = lambda name: None
        self.await_push: Callable[[], None] = lambda: None  # waits until no other thread uses the session
        self.seconds = 0.0  # seconds that forward passes have waited for pulls
        self.session = session
        self._lockstep = space.servers.in_step
        self.transfer: RowTransfer | None = None  # copies rows to the device of the ids; None if it is the CPU
        self._pending: list[tuple[Lookup, Tensor]] = []
        self._downloads: list[tuple[Lookup, Download]] = []  # gradients for `_pending` that are on their way
        self._last: tuple[Tensor, Lookup] | None = None

    # ---- ids

    def lookup(self, ids: Tensor | wire_format.Ids) -> Lookup:
        """Return the lookup of int64 ids of any shape. Raises DataError if an id is negative."""
        given = torch.as_tensor(ids).detach().cpu()
        if self._last is None or not np.array_equal(self._last[0].numpy(), given.numpy()):
            self._last = given.clone(), lookup_of(given, self.table)  # cloned, because the caller may change the ids
        return self._last[1]

    # ---- rows

    def rows(self, ids: Tensor, learns: bool = True) -> tuple[Lookup, Tensor]:
        """Return the lookup of a forward pass's ids, and the rows of its n unique ids [n, dim], prefetched if possible.

        The rows are on the device of `ids`. With `learns` (training) or staleness 0, the pull waits for the staleness
        bound; otherwise the servers return the current rows at once. Raises LinkError if the pull fails, DataError if
        an id is negative.
        """
        began, upload = time.perf_counter(), None
        if self.transfer is None:
            self.transfer = make_row_transfer(ids.device, wire_format.DTYPES[self.table.dtype])
        held = self.prefetched(self.table.name) if learns else None
        if held is None:
            lookup = self.lookup(ids)
            found = self.fetch(lookup, GroupMessage.PULL if learns or self._lockstep else GroupMessage.READ)
        else:
            lookup, found = self._from_prefetched(held, ids)
            upload = held.upload if lookup is held.lookup else None
        if self.transfer is not None:
            uploads = self.transfer.uploads
            found = uploads.take(upload or uploads.start(found))
        self.seconds += time.perf_counter() - began
        return lookup, found

    def _from_prefetched(self, held: Prefetched, ids: Tensor) -> tuple[Lookup, Tensor]:
        """Return the lookup and the rows of `ids`. Rows that were not prefetched are pulled."""
        if held.given.shape == ids.shape and torch.equal(held.given, ids.cpu()):
            return held.lookup, held.rows
        lookup = self.lookup(ids)
        places, known = held.lookup.places(lookup.ids)
        found = held.rows[torch.from_numpy(places)] if len(held.rows) else self.room(lookup)
        if not known.all():
            rest = lookup_of(torch.from_numpy(lookup.ids[~known]), self.table)
            found[torch.from_numpy(~known)] = self.fetch(rest)[rest.inverse]
        return lookup, found

    def pull(self, ids: Tensor | wire_format.Ids, counts: bool = False) -> Tensor:
        """Pull the rows of ids of any shape; return them as [*ids.shape, dim].

        With `counts`, the servers also store missing rows and count a use of all rows.
        """
        lookup = self.lookup(ids)
        return self.fetch(lookup, uses=counts)[lookup.inverse]

    def fetch(self, lookup: Lookup, kind: GroupMessage = GroupMessage.PULL, uses: bool = False) -> Tensor:
        """Pull the rows [n, dim] of a lookup, in the order of `lookup.ids`. Raises LinkError if the pull fails."""
        self.await_push()
        rows = self.room(lookup)
        answers = self.session.exchange(kind, self.pull_pieces(lookup, uses), outputs=self.landing(lookup, rows))
        self.convert_answers(lookup, rows, answers)
        return rows

    def room(self, lookup: Lookup) -> Tensor:
        """Allocate a tensor [n, dim] for the rows of a lookup, in memory that servers of this host can write."""
        dtype, n = wire_format.DTYPES[self.table.dtype], len(lookup.ids)
        if not n:
            return torch.empty(0, self.table.dim, dtype=dtype)
        memory = self.session.allocate(n * self.table.dim * dtype.itemsize)
        return torch.from_numpy(memory).view(dtype).view(n, self.table.dim)

    def pull_pieces(self, lookup: Lookup, uses: bool = False) -> dict[int, Buffer]:
        """Return the pieces of a pull, as a dict from each segment with ids of the lookup to its piece."""
        room, found = self._allocate_block(lookup, 0), dict[int, Buffer]()
        for s, lo, hi in find_spans(lookup):
            counts = lookup.counts[lo:hi] if uses else None
            found[self.first + s] = wire_format.encode_pull(lookup.ids[lo:hi], counts, self.half, room).data
        return found

    def _allocate_block(self, lookup: Lookup, row: int) -> wire_format.Allocator:
        """Allocate one block for all pieces of a request, and return an allocator that divides this block.

        `row` is the number of bytes of an id's gradient (0 in a pull).
        """
        size = 40 * (self.table.segments + 1) + len(lookup.ids) * (12 + row)
        return wire_format.make_block_allocator(self.session.allocate, size)

    def landing(self, lookup: Lookup, rows: Tensor) -> dict[int, Buffer] | None:
        """Return a dict from each segment to the part of `rows` into which the session writes the segment's answer.

        Return None if answers are in half precision; `convert_answers` then writes `rows`.
        """
        if self.half:
            return None
        memory = rows.numpy()
        return {self.first + s: memory[lo:hi].data.cast("B") for s, lo, hi in find_spans(lookup)}

    def convert_answers(self, lookup: Lookup, rows: Tensor, answers: SegmentReplies) -> None:
        """Convert answers in half precision and write them to `rows`. Other answers are in `rows` already."""
        if not self.half:
            return
        for s, lo, hi in find_spans(lookup):
            rows[lo:hi] = wire_format.decode_rows(answers.pieces[self.first + s], hi - lo, self.table, half=True)

    # ---- gradients

    def gradient(self, ids: Lookup | Tensor | wire_format.Ids, grads: Tensor) -> None:
        """Add gradients of rows to the next push. `grads` is [n, dim] for a lookup, [*ids.shape, dim] for ids."""
        if not isinstance(ids, Lookup):
            lookup = self.lookup(ids)
            summed = torch.zeros(len(lookup.ids), self.table.dim, dtype=wire_format.DTYPES[self.table.dtype])
            summed.index_add_(0, lookup.inverse.reshape(-1), grads.reshape(-1, self.table.dim).to(summed.dtype))
            ids, grads = lookup, summed
        elif self.transfer is not None:
            self._downloads.append((ids, self.transfer.download(grads.detach())))
            return
        self._pending.append((ids, grads.detach()))

    def _collect_arrived(self) -> list[tuple[Lookup, Tensor]]:
        """Return the gradients of the next push, after the wait for those that are on their way from a device."""
        downloads, self._downloads = self._downloads, []
        self._pending += [(lookup, download.wait()) for lookup, download in downloads]
        return self._pending

    def gradient_fault(self) -> int | None:
        """Return the first id whose gradient in the next push is not finite, or None if all are finite."""
        for lookup, grads in self._collect_arrived():
            if not is_finite(grads):
                return int(lookup.ids[find_not_finite(grads) // self.table.dim])
        return None

    def square(self) -> Tensor:
        """Return the squared Euclidean norm of the next push, in which the gradients of equal ids are summed."""
        if len(self._collect_arrived()) > 1:
            self._pending = [merge_lookups(self._pending, self.table)]
        return sum((square_of(grads) for _, grads in self._pending), torch.zeros((), dtype=torch.float64))

    def scale(self, factor: float) -> None:
        """Multiply the next push by `factor`."""
        self._pending = [(lookup, grads * factor) for lookup, grads in self._collect_arrived()]

    def pieces(self) -> dict[int, Buffer]:
        """Return the next push as a dict from every segment of the table to its piece; then begin an empty push."""
        pending, self._pending = self._collect_arrived(), []
        lookup, grads = pending[0] if len(pending) == 1 else merge_lookups(pending, self.table)
        ids, counts, rows = lookup.ids, lookup.counts, grads.numpy()
        room = self._allocate_block(lookup, rows.itemsize * self.table.dim)
        empty = wire_format.encode_empty_push(self.table, room).data
        found: dict[int, Buffer] = dict.fromkeys(range(self.first, self.first + self.table.segments), empty)
        for s, lo, hi in find_spans(lookup):
            push = wire_format.encode_push(ids[lo:hi], rows[lo:hi], counts[lo:hi], self.half, room)
            found[self.first + s] = push.data
        return found


class Tables:
    """One worker's client of all tables of a space.

    In each round call `begin`, run forward and backward, then call `push`. If the model also has dense parameters on
    servers, call `pieces` instead of `push`, and add the pieces to the push of these parameters. `lookups(batch)`
    returns a dict from each table's name to the batch's ids; if `lookups` is None, nothing is prefetched.
    """

    def __init__(
        self, session: TableSession, space: Space, *, lookups: Callable[[Batch], Mapping[str, GivenIds]] | None = None
    ) -> None:
        self.session, self.space = session, space
        self.clients = {table.name: TableClient(session, space, table.name) for table in space.tables}
        self.step = 0
        self._pushing = 0.0
        self._sent: PrefetchCall | None = None  # the push that the prefetch thread sends
        self._ahead: Prefetcher | None = None
        if lookups is not None:
            self._ahead = Prefetcher(self.clients, session, lookups, pulls=not space.servers.in_step)
            for client in self.clients.values():
                client.prefetched, client.await_push = self._ahead.rows, self.settle
        self._reported = (0.0, 0.0)

    def begin(self, step: int) -> None:
        """Begin the round whose push has the number `step`."""
        self.step = step
        if self._ahead is not None:
            self._ahead.begin(step)

    def ahead(self, batch: Batch | None) -> None:
        """Announce the batch of the next round, so that its rows are prefetched.

        Call `ahead` once for each batch, in the order of the rounds. For the first batch, call it before or after
        `begin`.
        """
        if self._ahead is not None:
            self._ahead.announce(batch)

    def pieces(self) -> dict[int, Buffer]:
        """Return the next push as a dict from every segment of all tables to its piece; then begin an empty push."""
        found: dict[int, Buffer] = {}
        for client in self.clients.values():
            found.update(client.pieces())
        return found

    def gradient_fault(self) -> tuple[str, int] | None:
        """Return the first (table, id) whose gradient in the next push is not finite, or None if all are finite."""
        for name, client in self.clients.items():
            found = client.gradient_fault()
            if found is not None:
                return name, found
        return None

    def square(self) -> Tensor:
        """Return the squared Euclidean norm of the next push of all tables."""
        return sum((client.square() for client in self.clients.values()), torch.zeros((), dtype=torch.float64))

    def scale(self, factor: float) -> None:
        """Multiply the next push of all tables by `factor`."""
        for client in self.clients.values():
            client.scale(factor)

    def push(self, step: int, weight: float) -> None:
        """Push this round's gradients, which are means over `weight` samples.

        Use `push` for a model without dense parameters on servers, and `pieces` for other models. If rows are
        prefetched, the prefetch thread sends the push, and `push` returns before the push is acknowledged. If this push
        fails, the next call raises its error. Raises LinkError if this push or the one before fails.
        """
        began = time.perf_counter()
        self.settle()
        pieces = self.pieces()
        if self._ahead is not None and self._ahead.pulls:
            self._sent = self._ahead.submit(lambda: self._send(pieces, step, weight))
        else:
            self._send(pieces, step, weight)
        self.step = step + 1
        self._pushing += time.perf_counter() - began

    def _send(self, pieces: dict[int, Buffer], step: int, weight: float) -> None:
        self.session.exchange(GroupMessage.PUSH, pieces, step=step, weight=weight)

    def settle(self) -> None:
        """Wait until all pushes are acknowledged. Raises LinkError if one fails."""
        sent, self._sent = self._sent, None
        if sent is not None:
            sent.wait(self.session.timeout)

    @property
    def seconds_waiting(self) -> float:
        """The seconds that the worker has waited for its tables so far."""
        return self._pushing + sum(client.seconds for client in self.clients.values())

    def point(self) -> dict[str, float]:
        """Return two durations in seconds, counted since the last call of `point`.

        `pull` is the duration of all pulls; `pull_hidden` is the part of that duration that overlapped computation.
        """
        waited = sum(client.seconds for client in self.clients.values())
        pulled = waited
        if self._ahead is not None:
            pulled = self._ahead.pulled + sum(client.seconds for client in self.clients.values()) - self._ahead.waited
        before, self._reported = self._reported, (pulled, pulled - waited)
        return {"pull": pulled - before[0], "pull_hidden": max(0.0, pulled - waited - before[1])}

    def close(self) -> None:
        """End the prefetch thread without waiting for its push (call `settle` first). The session stays open."""
        self._sent = None
        if self._ahead is not None:
            self._ahead.close()

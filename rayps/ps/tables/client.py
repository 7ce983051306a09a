"""A worker's tables: rows pulled by id, gradients of rows pushed, the rows of the next batch pulled ahead of time.

The ids of a lookup are made unique and sorted once; the same list serves the pull and the push. Each table is cut into
segments by a hash of the id (`rayps.ps.tables.wire_format`); a step's push names every segment, so that all clocks
advance.

Prefetch: `Tables.ahead` is told the next batch while this one computes, and its rows are pulled by a thread over links
of its own. They are then one round older than those of a pull at the round's begin: they lack this worker's newest
push. With staleness 0 that would not be synchronous: there only the ids are sorted ahead, and the pull comes after the
push. The same thread sends the pushes then, in the order of the rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rayps.ps.protocol.messages import GroupMessage
from rayps.ps.protocol.space import Space
from rayps.ps.tables import wire_format
from rayps.ps.tables.lookup import Lookup, lookup_of, merged, spans
from rayps.ps.tables.prefetch import Foretold, Prefetcher, PrefetchOrder
from rayps.tensors.finite import first_not_finite, is_finite
from rayps.tensors.flat import square_of


class TableClient:
    """One table of a space, seen by one worker. For one thread."""

    def __init__(self, talk: Any, space: Space, name: str, half: bool = False) -> None:
        """`talk` is a `rayps.ps.client.session.Session`; with `half` rows travel as bfloat16. Raises ConfigError."""
        self.table, self.first = space.table(name)
        self.half = half
        self.foretold: Callable[[str], Foretold | None] = lambda name: None
        self.settle: Callable[[], None] = lambda: None  # returns once nobody else uses the talk
        self.seconds = 0.0  # in pulls that a forward waited for
        self.talk = talk
        self._lockstep = space.servers.in_step
        self._pending: list[tuple[Lookup, Tensor]] = []
        self._last: tuple[Tensor, Lookup] | None = None

    # ---- ids

    def look(self, ids: Any) -> Lookup:
        """Sort ids of any shape, an int64 tensor or array. Raises DataError for a negative one."""
        given = torch.as_tensor(ids).detach().cpu()
        if self._last is None or not torch.equal(self._last[0], given):
            self._last = given.clone(), lookup_of(given, self.table)  # the caller may write to its ids
        return self._last[1]

    # ---- rows

    def rows(self, ids: Tensor, learns: bool = True) -> tuple[Lookup, Tensor]:
        """What a forward needs: the lookup and its rows [n, dim]; from what was pulled ahead, if it was.

        Where it `learns`, the rows are those of this round; else those of now. Raises LinkError, DataError.
        """
        began = time.perf_counter()
        held = self.foretold(self.table.name) if learns else None
        if held is None:
            lookup = self.look(ids)
            found = self.fetch(lookup, GroupMessage.PULL if learns or self._lockstep else GroupMessage.READ)
        else:
            lookup, found = self._of(held, ids)
        self.seconds += time.perf_counter() - began
        return lookup, found

    def _of(self, held: Foretold, ids: Tensor) -> tuple[Lookup, Tensor]:
        """Rows out of those that were foretold; what was not is pulled now."""
        if held.given.shape == ids.shape and torch.equal(held.given, ids.cpu()):
            return held.lookup, held.rows
        lookup = self.look(ids)
        places, known = held.lookup.places(lookup.ids)
        found = held.rows[torch.from_numpy(places)] if len(held.rows) else self.room(lookup)
        if not known.all():
            rest = lookup_of(torch.from_numpy(lookup.ids[~known]), self.table)
            found[torch.from_numpy(~known)] = self.fetch(rest)[rest.inverse]
        return lookup, found

    def pull(self, ids: Any, counts: Any = None) -> Tensor:
        """The rows of ids of any shape: [*ids.shape, dim]. With `counts` (True) it makes and counts them."""
        lookup = self.look(ids)
        return self.fetch(lookup, uses=counts is not None)[lookup.inverse]

    def fetch(self, lookup: Lookup, kind: GroupMessage = GroupMessage.PULL, uses: bool = False) -> Tensor:
        """The rows of a lookup, [n, dim], in its order. Raises LinkError."""
        self.settle()
        rows = self.room(lookup)
        self.land(lookup, rows, self.talk.exchange(kind, self.asked(lookup, uses), landing=self.landing(lookup, rows)))
        return rows

    def room(self, lookup: Lookup) -> Tensor:
        """Memory for the rows of a lookup."""
        return torch.empty(len(lookup.ids), self.table.dim, dtype=wire_format.DTYPES[self.table.dtype])

    def asked(self, lookup: Lookup, uses: bool = False) -> dict[int, Any]:
        """The pieces of a pull, by number of segment; none for segments without ids."""
        return {
            self.first + s: wire_format.encode_pull(
                lookup.ids[lo:hi], lookup.counts[lo:hi] if uses else None, self.half
            )
            for s, lo, hi in spans(lookup)
        }

    def landing(self, lookup: Lookup, rows: Tensor) -> dict[int, memoryview] | None:
        """Where in `rows` each segment's answer belongs; None where it comes in another dtype."""
        if self.half:
            return None
        memory: Any = rows.numpy()
        return {self.first + s: memoryview(memory[lo:hi]).cast("B") for s, lo, hi in spans(lookup)}

    def land(self, lookup: Lookup, rows: Tensor, answers: Any) -> None:
        """Put what has not landed yet into `rows`."""
        if not self.half:
            return
        for s, lo, hi in spans(lookup):
            rows[lo:hi] = wire_format.decode_rows(answers.pieces[self.first + s], hi - lo, self.table, half=True)

    # ---- gradients

    def gradient(self, ids: Lookup | Any, grads: Tensor) -> None:
        """Keep gradients of rows for the coming push: [n, dim] of a lookup, or [*ids.shape, dim] of ids."""
        if not isinstance(ids, Lookup):
            lookup = self.look(ids)
            summed = torch.zeros(len(lookup.ids), self.table.dim, dtype=wire_format.DTYPES[self.table.dtype])
            summed.index_add_(0, lookup.inverse.reshape(-1), grads.reshape(-1, self.table.dim).to(summed.dtype))
            ids, grads = lookup, summed
        self._pending.append((ids, grads.detach()))

    def gradient_fault(self) -> int | None:
        """The first id whose gradient of the coming push is not finite; None = all are."""
        for lookup, grads in self._pending:
            if not is_finite(grads):
                return int(lookup.ids[first_not_finite(grads) // self.table.dim])
        return None

    def square(self) -> Tensor:
        """The squared Euclidean norm of the coming push: what is kept is added up by id first."""
        if len(self._pending) > 1:
            self._pending = [merged(self._pending, self.table)]
        return sum((square_of(grads) for _, grads in self._pending), torch.zeros((), dtype=torch.float64))

    def scale(self, factor: float) -> None:
        """Multiply the coming push."""
        self._pending = [(lookup, grads * factor) for lookup, grads in self._pending]

    def drop(self) -> None:
        """Forget the gradients that are kept."""
        self._pending.clear()

    def pieces(self) -> dict[int, Any]:
        """The pieces of the coming push, for every segment of the table; what was kept is taken."""
        empty = wire_format.empty_push(self.table)
        found: dict[int, Any] = {self.first + s: empty for s in range(self.table.segments)}
        if self._pending:
            lookup, grads = self._pending[0] if len(self._pending) == 1 else merged(self._pending, self.table)
            self._pending = []
            for s, lo, hi in spans(lookup):
                found[self.first + s] = wire_format.encode_push(
                    lookup.ids[lo:hi], grads[lo:hi], lookup.counts[lo:hi], self.half
                )
        return found


class Tables:
    """All tables of a space for one worker: what it looks up in a round and pushes at its end.

    `lookups(batch)` foretells ids by table; None = no prefetch. Each round: `begin`, lookups and backward, then either
    `pieces` (which a push of the dense part takes along) or `push`.
    """

    def __init__(self, talk: Any, space: Space, *, lookups: Callable[[Any], Mapping[str, Any]] | None = None) -> None:
        self.talk, self.space = talk, space
        self.clients = {table.name: TableClient(talk, space, table.name) for table in space.tables}
        self.step = 0
        self._pushing = 0.0
        self._sent: PrefetchOrder | None = None  # a push that is under way
        self._ahead: Prefetcher | None = None
        if lookups is not None:
            self._ahead = Prefetcher(self.clients, talk, lookups, pulls=not space.servers.in_step)
            for client in self.clients.values():
                client.foretold, client.settle = self._ahead.rows, self.settle
        self._said = (0.0, 0.0)

    def begin(self, step: int) -> None:
        """A round begins, whose push will be number `step`."""
        self.step = step
        if self._ahead is not None:
            self._ahead.begin(step)

    def ahead(self, batch: Any, model: Any = None) -> None:
        """Tell the batch of a coming round; once for each, in order, the first one's before or after its `begin`."""
        if self._ahead is not None:
            self._ahead.tell(batch)

    def pieces(self) -> dict[int, Any]:
        """The pieces of every table segment for the coming push; what was collected since the last call is taken."""
        found: dict[int, Any] = {}
        for client in self.clients.values():
            found.update(client.pieces())
        return found

    def gradient_fault(self) -> tuple[str, int] | None:
        """The first table and id whose gradient of the coming push is not finite; None = all are."""
        for name, client in self.clients.items():
            found = client.gradient_fault()
            if found is not None:
                return name, found
        return None

    def square(self) -> Tensor:
        """The squared Euclidean norm of all rows of the coming push."""
        return sum((client.square() for client in self.clients.values()), torch.zeros((), dtype=torch.float64))

    def scale(self, factor: float) -> None:
        """Multiply all rows of the coming push."""
        for client in self.clients.values():
            client.scale(factor)

    def push(self, step: int, weight: float) -> None:
        """Push this round's gradients, means over `weight` samples, where no dense part does.

        Where the rows were pulled ahead, the push leaves in that thread, between this pull ahead and the next: one
        may be under way while the worker goes on. What it meets is raised by the next call. Raises LinkError.
        """
        began = time.perf_counter()
        self.settle()
        pieces = self.pieces()
        if self._ahead is not None and self._ahead.pulls:
            self._sent = self._ahead.later(lambda: self._send(pieces, step, weight))
        else:
            self._send(pieces, step, weight)
        self.step = step + 1
        self._pushing += time.perf_counter() - began

    def _send(self, pieces: dict[int, Any], step: int, weight: float) -> None:
        self.talk.exchange(GroupMessage.PUSH, pieces, step=step, weight=weight)

    def settle(self) -> None:
        """Return once everything that was pushed is acknowledged. Raises LinkError."""
        sent, self._sent = self._sent, None
        if sent is not None:
            sent.wait(self.talk.timeout)

    @property
    def seconds_waiting(self) -> float:
        """Seconds that the worker waited for its tables, ever."""
        return self._pushing + sum(client.seconds for client in self.clients.values())

    def point(self) -> dict[str, float]:
        """Since the last call: seconds that pulls took, and how many of these the worker computed meanwhile."""
        waited = sum(client.seconds for client in self.clients.values())
        pulled = waited
        if self._ahead is not None:
            pulled = self._ahead.pulled + sum(client.seconds for client in self.clients.values()) - self._ahead.waited
        before, self._said = self._said, (pulled, pulled - waited)
        return {"pull": pulled - before[0], "pull_hidden": max(0.0, pulled - waited - before[1])}

    def close(self) -> None:
        """End the prefetch, and do not wait for a push that is under way: `settle` does. The talk is its owner's."""
        self._sent = None
        if self._ahead is not None:
            self._ahead.close()

"""The rows of coming batches, pulled by a thread while this batch computes.

Lian et al., "Persia", KDD 2022 (arXiv:2111.05897): the gets of the sparse part overlap the computation of the dense
part. What comes so is one round older than what a pull at the round's begin would give.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from rayps.core.errors import PeerTimeout
from rayps.core.user_code import user_code
from rayps.ps.protocol.messages import GroupMessage
from rayps.ps.tables.ids import ids_of
from rayps.ps.tables.lookup import Lookup, lookup_of

if TYPE_CHECKING:
    from rayps.ps.tables.client import TableClient

GRACE_SECONDS = 10.0  # a talk gives up by itself, and says whom it waited for


class Foretold(NamedTuple):
    """One table's ids as they were told, sorted, and their rows [n, dim] in that order."""

    given: Tensor
    lookup: Lookup
    rows: Tensor


class PrefetchOrder:
    """Something that the thread is to do."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self.run, self.done = run, threading.Event()
        self.error: Exception | None = None

    def wait(self, timeout: float) -> None:
        """Return once it is done. Raises what it met, PeerTimeout."""
        if not self.done.wait(timeout + GRACE_SECONDS):
            raise PeerTimeout(
                f"the servers of the tables did not answer within {timeout:g} s (the knob is `timeout`)",
                peer="servers",
                seconds=timeout,
            )
        if self.error is not None:
            raise self.error


@dataclass(slots=True)
class _Coming:
    """One batch: its ids by table; once its order is done, sorted and, where they are pulled ahead, with their rows."""

    given: dict[str, Tensor]
    lookups: dict[str, Lookup] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)
    order: PrefetchOrder | None = None


class Prefetcher:
    """What was told of coming batches, by their place in the run. `begin`, `tell` and `rows` are for one thread."""

    def __init__(
        self, clients: Mapping[str, TableClient], talk: Any, lookups: Callable[[Any], Mapping[str, Any]], pulls: bool
    ) -> None:
        """`pulls`: rows too, not only the sorting of ids, is done ahead."""
        self._clients, self._talk, self._lookups, self._pulls = clients, talk, lookups, pulls
        self._told, self._begun = 0, 0  # batches, rounds
        self._first: int | None = None
        self._coming: dict[int, _Coming] = {}
        self._queue: queue.SimpleQueue[PrefetchOrder | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._reader: Any = None
        self._closed = False
        self.pulled = 0.0  # seconds that the thread took for it
        self.waited = 0.0  # seconds that the caller of `rows` waited for it

    def begin(self, step: int) -> None:
        """A round begins: what was told of those before it is forgotten."""
        if self._first is None:
            self._first = step
        self._begun = step - self._first
        for place in [place for place in self._coming if place < self._begun]:
            del self._coming[place]

    def tell(self, batch: Any) -> None:
        """The next batch in order; None, or an empty one, has no ids."""
        given: dict[str, Tensor] = {}
        if batch is not None and batch.size:
            with user_code("lookups"):
                found = self._lookups(batch)
            # copies, for the user may write to the batch before its turn has come
            given = {name: ids_of(ids, name).cpu().clone() for name, ids in found.items() if name in self._clients}
        coming = _Coming(given)
        if self._told >= self._begun and given:
            self._coming[self._told] = coming
            coming.order = self.later(lambda: self._prepare(coming))
        self._told += 1

    def later(self, run: Callable[[], Any]) -> PrefetchOrder:
        """Let the thread do something, after all that it was told before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="rayps-ahead")
            self._thread.start()
        order = PrefetchOrder(run)
        self._queue.put(order)
        return order

    @property
    def pulls(self) -> bool:
        """Whether this round's rows were pulled ahead, so that nobody else waits for the talk."""
        return self._pulls and self._begun in self._coming

    def rows(self, name: str) -> Foretold | None:
        """This round's rows of a table, if its ids were told. Raises what the thread met."""
        coming = self._coming.get(self._begun)
        if coming is None or name not in coming.given:
            return None
        began = time.perf_counter()
        assert coming.order is not None
        coming.order.wait(self._talk.timeout)
        self.waited += time.perf_counter() - began
        if not coming.rows:
            self._pull(coming, self._talk)
        return Foretold(coming.given[name], coming.lookups[name], coming.rows[name])

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._queue.put(None)
        if self._reader is not None:
            self._reader.hang_up()
        if self._thread is not None:
            self._thread.join(GRACE_SECONDS)

    def _run(self) -> None:
        while not self._closed:
            order = self._queue.get()
            if order is None:
                break
            try:
                order.run()
            except Exception as error:  # it is for whoever waits for it
                order.error = error
            order.done.set()
        if self._reader is not None:
            self._reader.close()

    def _prepare(self, coming: _Coming) -> None:
        began = time.perf_counter()
        for name, ids in coming.given.items():
            coming.lookups[name] = lookup_of(ids, self._clients[name].table)
        if self._pulls:
            if self._reader is None:
                self._reader = self._talk.reader()
            self._pull(coming, self._reader)
        self.pulled += time.perf_counter() - began

    def _pull(self, coming: _Coming, talk: Any) -> None:
        """The rows of all tables, by one exchange."""
        asked: dict[int, Any] = {}
        landing: dict[int, Any] = {}
        rows: dict[str, Tensor] = {}
        for name, lookup in coming.lookups.items():
            client = self._clients[name]
            rows[name] = client.room(lookup)
            asked |= client.asked(lookup)
            landing |= client.landing(lookup, rows[name]) or {}
        answers = talk.exchange(GroupMessage.PULL, asked, landing=landing)
        for name, lookup in coming.lookups.items():
            self._clients[name].land(lookup, rows[name], answers)
        coming.rows = rows

"""Prefetch: a thread pulls the rows of the next batch while the worker computes the current one.

Prefetched rows are one round older than rows pulled at the beginning of the round. The pulls of the sparse part overlap
the computation of the dense part, as in Lian et al., "Persia", KDD 2022 (arXiv:2111.05897).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from rayps_client.errors import PeerTimeout
from rayps_client.values import Buffer
from torch import Tensor

from rayps.core.job.user_code import user_code
from rayps.ps.client.session import SegmentReplies
from rayps.ps.protocol.messages import GroupMessage
from rayps.ps.tables.ids import GivenIds, ids_of
from rayps.ps.tables.local import TableSession
from rayps.ps.tables.lookup import Lookup, lookup_of
from rayps.tensors.checkpoints.uploads import DeviceUpload

if TYPE_CHECKING:
    from rayps.data.base import Batch
    from rayps.ps.tables.client import TableClient

GRACE_SECONDS = 10.0  # added to the timeout, so that the session raises its error first: that error names the server


class Prefetched(NamedTuple):
    """The ids of one table as the user gave them, their lookup, and the rows [n, dim] in the order of `lookup.ids`.

    `upload` has the rows on the worker's device, or on their way; None if they were not copied ahead.
    """

    given: Tensor
    lookup: Lookup
    rows: Tensor
    upload: DeviceUpload | None = None


class PrefetchCall:
    """A call that was submitted to the prefetch thread. `wait` waits for its end."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.run, self.done = run, threading.Event()
        self.error: Exception | None = None

    def wait(self, timeout: float) -> None:
        """Wait until the call has ended, at most `timeout` seconds and `GRACE_SECONDS`.

        Raises the exception of the call, or PeerTimeout if the call takes longer.
        """
        if not self.done.wait(timeout + GRACE_SECONDS):
            raise PeerTimeout(
                f"the servers of the tables did not answer within {timeout:g} s: raise `timeout` if they need longer",
                peer="servers",
                seconds=timeout,
            )
        if self.error is not None:
            raise self.error


@dataclass(slots=True)
class _AnnouncedBatch:
    """A batch that was announced: its ids for each table.

    Once `call` has ended, also their lookups and, if rows are prefetched, the rows.
    """

    given: dict[str, Tensor]
    lookups: dict[str, Lookup] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)
    uploads: dict[str, DeviceUpload] = field(default_factory=dict)  # the rows on the worker's device
    call: PrefetchCall | None = None


class Prefetcher:
    """The prefetch thread and the announced batches. Call `begin`, `announce` and `rows` from one thread only."""

    def __init__(
        self,
        clients: Mapping[str, TableClient],
        session: TableSession,
        lookups: Callable[[Batch], Mapping[str, GivenIds]],
        pulls: bool,
    ) -> None:
        """Prepare the thread, which starts later. With `pulls` it prefetches rows, else it only sorts the ids."""
        self._clients, self._session, self._lookups, self._pulls = clients, session, lookups, pulls
        self._announced, self._begun = 0, 0  # numbers of batches announced, and of rounds begun
        self._first: int | None = None
        self._coming: dict[int, _AnnouncedBatch] = {}
        self._queue: queue.SimpleQueue[PrefetchCall | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._reader: TableSession | None = None
        self._closed = False
        self.pulled = 0.0  # seconds that the thread spent on prefetches
        self.waited = 0.0  # seconds that callers of `rows` waited

    def begin(self, step: int) -> None:
        """Begin a round: discard the rows that were prefetched for earlier rounds."""
        if self._first is None:
            self._first = step
        self._begun = step - self._first
        for place in [place for place in self._coming if place < self._begun]:
            del self._coming[place]

    def announce(self, batch: Batch | None) -> None:
        """Announce the next batch, in the order of the rounds, and start its prefetch.

        If `batch` is None or empty, nothing is prefetched.
        """
        given: dict[str, Tensor] = {}
        if batch is not None and batch.size:
            with user_code("lookups"):
                found = self._lookups(batch)
            # copies: the user may write to the batch before its round
            given = {name: ids_of(ids, name).cpu().clone() for name, ids in found.items() if name in self._clients}
        coming = _AnnouncedBatch(given)
        if self._announced >= self._begun and given:
            self._coming[self._announced] = coming
            coming.call = self.submit(lambda: self._prepare(coming))
        self._announced += 1

    def submit(self, run: Callable[[], None]) -> PrefetchCall:
        """Run `run` in the thread after all calls that were submitted before; return a handle to wait for its end."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="rayps-prefetch")
            self._thread.start()
        call = PrefetchCall(run)
        self._queue.put(call)
        return call

    @property
    def pulls(self) -> bool:
        """Whether this round's rows are prefetched; the thread may then use the session for a push."""
        return self._pulls and self._begun in self._coming

    def rows(self, name: str) -> Prefetched | None:
        """Return this round's rows of the table `name`, or None if no ids of the table were announced.

        Raises the exception of the prefetch, or PeerTimeout if the prefetch takes too long.
        """
        coming = self._coming.get(self._begun)
        if coming is None or name not in coming.given:
            return None
        began = time.perf_counter()
        assert coming.call is not None
        coming.call.wait(self._session.timeout)
        self.waited += time.perf_counter() - began
        if not coming.rows:
            self._pull(coming, self._session)
        return Prefetched(coming.given[name], coming.lookups[name], coming.rows[name], coming.uploads.get(name))

    def close(self) -> None:
        """End the prefetch thread. A pull that is in progress in the thread fails."""
        self._closed = True
        self._queue.put(None)
        if self._reader is not None:
            self._reader.hang_up()
        if self._thread is not None:
            self._thread.join(GRACE_SECONDS)

    def _run(self) -> None:
        while not self._closed:
            call = self._queue.get()
            if call is None:
                break
            try:
                call.run()
            except Exception as error:  # raised by `PrefetchCall.wait`
                call.error = error
            call.done.set()
        if self._reader is not None:
            self._reader.close()

    def _prepare(self, coming: _AnnouncedBatch) -> None:
        began = time.perf_counter()
        for name, ids in coming.given.items():
            coming.lookups[name] = lookup_of(ids, self._clients[name].table)
        if self._pulls:
            if self._reader is None:
                self._reader = self._session.reader()
            self._pull(coming, self._reader)
        self.pulled += time.perf_counter() - began

    def _pull(self, coming: _AnnouncedBatch, session: TableSession) -> None:
        """Pull the batch's rows of all tables in one exchange."""
        asked: dict[int, Buffer] = {}
        outputs: dict[int, Buffer] = {}
        rows: dict[str, Tensor] = {}
        for name, lookup in coming.lookups.items():
            client = self._clients[name]
            rows[name] = client.room(lookup)
            asked |= client.pull_pieces(lookup)
            outputs |= client.landing(lookup, rows[name]) or {}
        answers: SegmentReplies = session.exchange(GroupMessage.PULL, asked, outputs=outputs)
        for name, lookup in coming.lookups.items():
            client = self._clients[name]
            client.convert_answers(lookup, rows[name], answers)
            if client.transfer is not None:
                coming.uploads[name] = client.transfer.uploads.start(rows[name])
        coming.rows = rows

"""The segments of a push that leave one after another, while the rest of the gradient is still computed.

A segment is *copied* when its values are on their way to the host's memory. It may leave when the copy is done and all
later segments of the vector have left or leave with it: backward computes the last parameters first, and all workers
then push their segments in one order. This order matters: under staleness 0 the answer to a segment's push and pull
waits for the pushes of all workers to that segment. If each worker chose its own order, two workers could wait for each
other. In one order, the worker that has pushed the fewest segments waits for nobody, because all others have pushed
these segments too.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping

from torch import Tensor

from rayps.comm.link.wakeup import Wakeup
from rayps.ps.client.connections import SegmentRequest
from rayps.ps.protocol.mailbox import Landing
from rayps.ps.protocol.messages import GroupMessage
from rayps.ps.protocol.rows import PieceBytes
from rayps.tensors.device import DeviceEvent


class SegmentFeed:
    """The requests of one streamed push, for `Session.stream`. `copied` and `end` may be called by any thread.

    `pieces` has the piece of each dense segment, and `places` the place for its pulled values; with `places` None
    nothing is pulled.
    """

    def __init__(
        self,
        step: int,
        weight: float,
        pieces: Mapping[int, PieceBytes],
        places: Mapping[int, PieceBytes | Landing] | None,
        *,
        largest: Tensor | None = None,
        mixed_versions: bool = False,
    ) -> None:
        """`largest` [segments] has a segment's largest magnitude, once the segment's copy is done.

        A segment must not leave if this is not finite.
        """
        self.step, self.weight, self.mixed_versions = step, weight, mixed_versions
        self.largest = largest
        self.wakeup = Wakeup()
        self._pieces, self._places = pieces, places
        self._lock = threading.Lock()
        self._next = len(pieces) - 1  # the next segment to leave
        self._copies: dict[int, DeviceEvent] = {}
        self._refused = False
        self._ended = False
        self._others: Mapping[int, PieceBytes] = {}

    def copied(self, segment: int, done: DeviceEvent) -> None:
        """Record that a segment's values are in its piece once `done` is done."""
        with self._lock:
            self._copies[segment] = done
        self.wakeup.wake()

    def end(self, others: Mapping[int, PieceBytes] | None = None, *, refused: bool = False) -> None:
        """Record that no more segments follow. `others` are the pieces of the segments of tables.

        With `refused`, the segments that have not left do not leave, because the gradient has failed.
        """
        with self._lock:
            self._ended, self._refused, self._others = True, refused or self._refused, others or {}
        self.wakeup.wake()

    # ---- for `Session.stream`

    @property
    def ended(self) -> bool:
        """Whether `take` will return nothing more."""
        with self._lock:
            return self._ended and (self._refused or (self._next < 0 and not self._others))

    @property
    def copy(self) -> DeviceEvent | None:
        """The event after the copy of the next segment, if the segment is on its way to the host's memory."""
        with self._lock:
            return None if self._refused else self._copies.get(self._next)

    def take(self, *, idle: bool) -> SegmentRequest | None:
        """Return the push of the segments that may leave now, or None if there are none.

        If `idle`, no request is in flight: wait for the copy of the next segment if it has begun.
        """
        found: dict[int, PieceBytes] = {}
        while (done := self.copy) is not None:
            if idle and not found:
                done.wait()
            if not done.done:
                break
            if self.largest is not None and not math.isfinite(self.largest[self._next].item()):
                self._refuse()
                break
            found[self._next] = self._pieces[self._next]
            self._next -= 1
        if found:
            return self._make_request(found)
        with self._lock:
            if self._ended and not self._refused and self._next < 0 and self._others:
                others, self._others = self._others, {}
                return SegmentRequest(GroupMessage.PUSH, self.step, self.weight, dict(others))
        return None

    def close(self) -> None:
        """Close the wakeup, after the session has ended."""
        self.wakeup.close()

    def _refuse(self) -> None:
        with self._lock:
            self._refused = True

    def _make_request(self, pieces: dict[int, PieceBytes]) -> SegmentRequest:
        if self._places is None:
            return SegmentRequest(GroupMessage.PUSH, self.step, self.weight, pieces)
        places = {index: self._places[index] for index in pieces}
        return SegmentRequest(
            GroupMessage.PUSH_PULL, self.step, self.weight, pieces, places, mixed_versions=self.mixed_versions
        )

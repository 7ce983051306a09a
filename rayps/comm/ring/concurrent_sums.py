"""Several sums by the algorithm `ring` at once, so that the line is busy while a rank waits for the end of one sum.

A sum is a collective of its own, with its own number. All ranks start the same sums in the same order, but not at the
same time: a rank sends its data of the next sum while it still waits for data of the one before. The receiver assigns a
message to its sum by the collective's number. A message of a sum that this rank has not started yet is stored. Each sum
has the bits of `rayps.comm.ring.algorithms.ring`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from torch import Tensor

from rayps.comm.link import Message
from rayps.comm.link.wakeup import Wakeup
from rayps.comm.ring.algorithms import Work, add, ring_messages
from rayps.comm.ring.mesh import AHEAD_BYTES, Mesh
from rayps.comm.ring.messages import Arrival, RingMessage, Want, fill
from rayps.core.values import Buffer


class ConcurrentSums:
    """The sums over the ranks of one mesh that are under way. One thread at a time may call `run`."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._left, self._right = (mesh.rank - 1) % mesh.size, (mesh.rank + 1) % mesh.size
        self._sums: dict[int, _Sum] = {}  # by the collective's number
        self._todo: list[tuple[int, int, Buffer]] = []  # a heap of messages: older sums are sent first
        self._early: dict[tuple[int, int], Buffer] = {}  # payloads by the collective's number and the step
        self._sending: set[int] = set()  # numbers of connections with queued bytes
        self._last = 0  # the number of the last sum that all ranks will start
        self._wakeup = Wakeup()
        mesh.at_end(self._wakeup.close)

    def expect(self, count: int) -> None:
        """Announce the next `count` collectives of the mesh as sums. All ranks must make the same call."""
        self._last = self._mesh.number + count

    def start(self, x: Tensor, before: Work, added: Work, copied: Work) -> int:
        """Start a sum of the flat vector `x`, in place; return its number. `run` does the work.

        The functions are those of `ring_messages`. `x` must not change until `run` has returned for this sum, except
        by these functions.
        """
        mesh = self._mesh
        mesh.begin()
        number = mesh.number
        first, arrivals = ring_messages((mesh.rank, mesh.size), x, add, before, added, copied)
        self._sums[number] = made = _Sum(arrivals)
        for buffer in first:
            self._send(number, made, buffer)
        self._take_stored(number, made)
        return number

    def wake(self) -> None:
        """Make `run`, in another thread, call its function `admit`."""
        self._wakeup.wake()

    def run(self, number: int, admit: Callable[[], None]) -> None:
        """Continue all sums until sum `number` is complete, and all data is sent if no other sum is under way.

        `admit` may start further sums. It is called again after each `wake`.

        Raises:
            PeerLost, PeerTimeout: a rank is lost, or did not take part in time. The mesh cannot be used afterwards.
        """
        mesh, wakeup = self._mesh, self._wakeup.fileno()
        with mesh.guarded(), mesh.polling(wakeup):
            while True:
                self._wakeup.clear()
                admit()
                wants = self._receive()
                self._flush()
                done = number not in self._sums
                if done and (self._sums or not (self._todo or self._sending)):
                    return
                if not done or self._sending:
                    mesh.pause(self._sending, wants, wakeup)

    def _receive(self) -> dict[int, Want]:
        """Receive what has arrived; return the awaited messages by the numbers of their connections."""
        wants = dict[int, Want]()
        for connection in self._mesh.streams_to(self._left):
            while self._sums:
                want, head = self._oldest_want(), self._data_head(connection)
                if head is not None and head.tag > self._last:
                    break  # of a collective that follows the sums
                if head is not None and (made := self._sums.get(head.tag)) is not None and made.taken == head.a:
                    want = (RingMessage.DATA, head.tag, head.a, made.arrival[0])
                if head is None or not self._receive_one(connection, head, want):
                    wants[connection] = want
                    break
        return wants

    def _oldest_want(self) -> Want:
        number, made = next(iter(self._sums.items()))
        return RingMessage.DATA, number, made.taken, made.arrival[0]

    def _data_head(self, connection: int) -> Message | None:
        """Process control messages; return the header of the next message with data, or None if none has arrived."""
        link = self._mesh.link(connection)
        head = link.peek()
        if head is not None and head.kind == RingMessage.BYE:
            self._mesh.arrived(connection, self._oldest_want())  # raises PeerLost
        if head is not None and head.kind != RingMessage.DATA:
            self._mesh.listen(connection)
            head = link.peek()
        return head if head is not None and head.kind == RingMessage.DATA else None

    def _receive_one(self, connection: int, head: Message, want: Want) -> bool:
        """Receive the message with the header `head`; return False if it has not arrived completely.

        It is `want`, or a later message, which is stored. Raises LinkError if it is an earlier message.
        """
        _, number, step, _ = want
        if (head.tag, head.a) > (number, step):
            message = self._mesh.link(connection).try_recv()
            if message is not None:
                self._early[head.tag, head.a] = message.payload
            return message is not None
        if not self._mesh.arrived(connection, want):
            return False
        self._take(number, self._sums[number])
        return True

    def _take(self, number: int, made: _Sum) -> None:
        """Process the arrival that has been received, and all stored ones that follow it."""
        self._process(number, made)
        self._take_stored(number, made)

    def _take_stored(self, number: int, made: _Sum) -> None:
        while (payload := self._early.pop((number, made.taken), None)) is not None:
            fill(made.arrival[0], payload, self._left)
            self._process(number, made)

    def _process(self, number: int, made: _Sum) -> None:
        onward = made.arrival[1]()
        if onward is not None:
            self._send(number, made, onward)
        if not made.next():
            del self._sums[number]

    def _send(self, number: int, made: _Sum, buffer: Buffer) -> None:
        heapq.heappush(self._todo, (number, made.gone, buffer))
        made.gone += 1
        self._flush()

    def _flush(self) -> None:
        """Send what the connections accept, and queue as much as may be queued."""
        mesh = self._mesh
        for connection in list(self._sending):
            mesh.link(connection).flush()
        numbers = mesh.streams_to(self._right)
        while self._todo:
            number, step, buffer = self._todo[0]
            connection = numbers[step % len(numbers)]
            if mesh.link(connection).queued >= AHEAD_BYTES:
                break
            heapq.heappop(self._todo)
            mesh.link(connection).queue(Message(RingMessage.DATA, tag=number, a=step), buffer, copy=False)
            self._sending.add(connection)
        self._sending = {connection for connection in self._sending if mesh.link(connection).queued}


class _Sum:
    """One sum: its arrivals in order, and how many messages this rank has taken and sent."""

    def __init__(self, arrivals: Iterator[Arrival]) -> None:
        self._arrivals = arrivals
        self.arrival = next(arrivals)  # the arrival that is awaited
        self.taken = self.gone = 0

    def next(self) -> bool:
        """Go to the next arrival; return False if there is none."""
        self.taken += 1
        found = next(self._arrivals, None)
        if found is not None:
            self.arrival = found
        return found is not None

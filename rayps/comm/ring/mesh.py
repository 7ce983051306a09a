"""The connections between the ranks of a ring, and the operation that every algorithm is built on: `exchange`.

A rank polls all its connections in one thread. It therefore notices the death of any rank at once. A mesh that has
failed cannot be used again. A mesh only sends and receives bytes; `rayps.comm.ring.algorithms` adds numbers.
`rayps.comm.ring.form_mesh` forms a mesh.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from rayps_client.errors import LinkError, PeerLost, PeerTimeout
from rayps_client.values import Buffer

from rayps.comm.link import Link, Message
from rayps.comm.ring.connections import Place, RingConnections
from rayps.comm.ring.messages import (
    EARLY,
    Arrival,
    EarlyMessages,
    Piece,
    RingMessage,
    Want,
    abort_error,
    abort_message,
    format_ranks,
    must_match,
)
from rayps.core.time.member_times import LineFacts

LINGER_SECONDS = 0.25  # seconds during which a rank that closes tries to send its last messages
# the last seconds of a timeout, in which the other ranks must answer an ASK; the error names the ranks that do not
GRACE_SECONDS = 0.5
WATCH_SPIN_SECONDS = 200e-6  # seconds during which a rank yields its core, before it sleeps between two looks
_LISTEN_SECONDS = 1e-3  # seconds between two looks at the connections, while a rank waits for a device
_AHEAD_BYTES = 1 << 20  # bytes that a relay keeps queued, so that data is sent while the rank adds
_IN = select.POLLIN


class Mesh:
    """The connections of one rank to all others."""

    def __init__(self, rank: int, size: int, links: Mapping[Place, Link], timeout: float) -> None:
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.seconds_waiting = 0.0
        self.waits = [0.0] * size  # by rank: the seconds for which this rank has waited for that rank
        self.dead: LinkError | None = None
        self._links = RingConnections(size, links)
        self.early = EarlyMessages()
        self._heard: set[int] = set()
        self._left: set[int] = set()  # ranks that have closed their ring without an error
        self.number = 0  # the number of the current collective
        self._step = 0
        self._sent = 0
        self._quiet = 0.0  # seconds since the last progress
        self._inside = False  # whether a thread is waiting inside the mesh
        self._parted = False
        self.hold = RingLock(lambda: self.dead is not None and not self._parted, self._send_abort_and_close)
        self._at_end: list[Callable[[], None]] = []

    @property
    def bytes_sent(self) -> int:
        """The bytes sent by this rank."""
        return self._sent + sum(link.bytes_sent for link in list(self._links.values()))

    @property
    def lines(self) -> dict[int, LineFacts]:
        """What the kernel counts for the TCP connections, by the peer's rank. Any thread may read it."""
        return self._links.lines

    @property
    def transports(self) -> dict[int, str]:
        """The transport (shm, unix or tcp) to each other rank."""
        return self._links.transports

    @property
    def streams(self) -> int:
        """The number of connections to each rank that is reached by TCP."""
        return self._links.streams

    def use_streams(self, count: int, *, for_good: bool = False) -> None:
        """Use `count` streams between two ranks from now on. With `for_good`, close the surplus streams.

        All ranks must make the same call.
        """
        self.begin()
        self._links.streams = count
        if for_good:
            spare = [self._links.drop(number) for number in list(self._links) if number >= count * self.size]
            try:
                # after the barrier no rank polls the surplus streams, so no rank takes their end for a failure
                self.barrier()
            finally:
                for link in spare:
                    link.close()

    # Exchanging data

    def begin(self) -> None:
        """Number a new collective, so that its messages can be distinguished from those of the previous one."""
        self.check()
        self.number += 1
        self._step = 0

    def exchange(self, sends: Sequence[Piece], receives: Sequence[Piece]) -> None:
        """Send the buffers in `sends`, and fill those in `receives` at the same time.

        Every rank must make the matching call. Raises PeerLost if a rank is lost, PeerTimeout if a rank does not take
        part in time. The error names the rank at fault. The mesh cannot be used afterwards.
        """
        step = self._step
        self._step += 1
        message = Message(RingMessage.DATA, tag=self.number, a=step)
        wants: dict[int, Want] = {
            key: (RingMessage.DATA, self.number, step, into) for key, into in self._links.stripes(receives)
        }
        self._run(message, self._links.stripes(sends), wants)

    def relay(self, right: int, left: int, first: Iterable[Buffer], arrivals: Iterable[Arrival]) -> None:
        """Send the buffers of `first` to rank `right`, and fill the buffers of `arrivals` with data from rank `left`.

        Each arrival is a buffer and a function. When the buffer is filled, the function is called. If the function
        returns a buffer, this buffer is sent to `right` too. Sending continues while arrivals are processed. Every rank
        must make the matching call. Raises the errors of `exchange`.
        """
        todo: deque[Buffer] = deque()
        gone = taken = self._step
        sending: set[int] = set()

        def push() -> None:
            nonlocal gone
            while todo and self._links[key := self._links.stream(right, gone)].queued < _AHEAD_BYTES:
                self._links[key].queue(Message(RingMessage.DATA, tag=self.number, a=gone), todo.popleft(), copy=False)
                gone += 1
                sending.add(key)

        with self.guarded():
            for buffer in first:
                todo.append(buffer)
                push()
            for into, then in arrivals:
                want = (RingMessage.DATA, self.number, taken, into)
                self.finish(sending, {self._links.stream(left, taken): want}, push, drain=False)
                taken += 1
                if (onward := then()) is not None:
                    todo.append(onward)
                    push()
            while todo or sending:
                self.finish(sending, {}, push)
        self._step = max(gone, taken)

    def barrier(self) -> None:
        """Wait until every rank has entered the barrier."""
        nothing = [(peer, memoryview(b"")) for peer in self._links.ranks]
        self.exchange(nothing, nothing)

    def blame(self, words: str) -> LinkError:
        """Return the error for a failure outside of the mesh, such as that of a torch process group.

        `words` describes the failure. The error names the rank that was lost or does not answer, if there is one.
        """
        with self.hold:
            self.check()
            try:
                for peer in self._links:
                    self.listen(peer)
            except LinkError as error:
                return self._abort_of(error)
            found = self._find_silent(set(self._links.ranks))
        return type(found)(f"{found.message}\n{words}", **found.data)

    def send(self, to: int, tag: int, buffer: Buffer) -> None:
        """Send `buffer` to rank `to`; return when all bytes have been sent."""
        self.check()
        self._run(Message(RingMessage.POINT, tag=tag), [(to, buffer)], {})

    def recv(self, source: int, tag: int, into: Buffer) -> None:
        """Fill `into` with the data that rank `source` sent under `tag`, in the order of sending."""
        self.check()
        self._run(Message(RingMessage.POINT), [], {source: (RingMessage.POINT, tag, 0, into)})

    def link(self, peer: int) -> Link:
        """Return the first connection to rank `peer`."""
        return self._links[peer]

    def await_wakeup(self, wakeup: int, absent: Callable[[], set[int]]) -> None:
        """Wait until the eventfd `wakeup` is readable. `absent()` returns the ranks for which this rank waits.

        Raises the errors of `exchange`.
        """
        alone, start = not self._inside, time.perf_counter()
        with self.guarded():
            # within a relay, sending must continue, and all connections are polled below; else this poll is enough
            signalled = alone and self._links.only_wakeup(wakeup, self._find_seconds_before_ask())
            self._quiet = time.perf_counter() - start
            self.seconds_waiting += self._quiet
            if signalled:
                return
            with self._links.polling(wakeup):
                while not (
                    gone := self._left and self._left & absent()
                ):  # a rank that signalled before it left has taken part
                    if not self._pause(set(), {}, wakeup):
                        return
                raise self._explain_gone(min(gone))

    def await_early(self, wakeup: int, done: Callable[[], bool]) -> None:
        """Store early messages of other ranks until `done()` returns True, which may take any time.

        `done` is called after each message, each second, and when the eventfd `wakeup` is readable. It reads the
        eventfd, and may raise a LinkError, which ends the ring. Raises PeerLost if a rank is lost.
        """
        with self.guarded(), self._links.polling(wakeup):
            for peer in self._links.ranks:
                self.listen(peer)
            waited = self.seconds_waiting
            while not done():
                self._sleep(set(), {}, 1.0, wakeup)
            self.seconds_waiting = waited  # no collective is under way

    def watch(self, done: Callable[[], bool]) -> None:
        """Wait until `done()` returns True, e.g. because a device has finished work in which other ranks take part.

        Raises the errors of `exchange`.
        """
        start = now = time.perf_counter()
        listened = start
        with self.guarded():
            while not done():
                if now - start > WATCH_SPIN_SECONDS:
                    time.sleep(WATCH_SPIN_SECONDS / 4)
                else:
                    os.sched_yield()
                if now - listened > _LISTEN_SECONDS:
                    self._sleep(set(), {}, 0)
                    listened = now
                now = time.perf_counter()
                if now - start > self._find_seconds_before_ask():
                    raise self._find_silent(set(self._links.ranks))
        self.seconds_waiting += time.perf_counter() - start

    def check(self) -> None:
        """Raise the error that ended this mesh, if it has ended."""
        if self.dead is not None:
            raise type(self.dead)(self.dead.message, **self.dead.data)

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """End the mesh for all ranks if the code in the block raises an error. Blocks may be nested."""
        with self.hold:
            self.check()
            outer, self._inside = self._inside, True
            self._quiet = 0.0
            try:
                yield
            except LinkError as error:
                raise self.fail(self._abort_of(error)) from error
            except BaseException:
                self.abort()
                raise
            finally:
                self._inside = outer

    def _run(self, message: Message, sends: Iterable[Piece], wants: dict[int, Want]) -> None:
        sending: set[int] = set()
        with self.guarded():
            for key, buffer in sends:
                self._links[key].queue(message, buffer, copy=False)
                if self._links[key].queued:
                    sending.add(key)
            self.finish(sending, wants)

    def finish(
        self, sending: set[int], wants: dict[int, Want], push: Callable[[], None] | None = None, drain: bool = True
    ) -> None:
        """Wait until the messages in `wants` are received and, with `drain`, the data queued on `sending` is sent.

        `sending` are numbers of connections. `push` is called after each progress, and may queue more data.
        """
        while True:
            for key in [key for key, want in wants.items() if self.arrived(key, want)]:
                del wants[key]
            for key in list(sending):
                self._links[key].flush()
                if not self._links[key].queued:
                    sending.discard(key)
            if push is not None:
                push()  # data that `push` queues may be sent at once; then its connection is removed from `sending`
                sending.difference_update([key for key in sending if not self._links[key].queued])
            if not wants and not (drain and sending):
                return
            self._pause(sending, wants)

    def _pause(self, sending: set[int], wants: dict[int, Want], wakeup: int = -1) -> bool:
        """Sleep until a connection or the eventfd `wakeup` is ready.

        Return False if the eventfd, or a connection in `sending` or `wants`, was ready. Raises PeerTimeout if there is
        no progress until the timeout.
        """
        waited = self._sleep(sending, wants, self._find_seconds_before_ask() - self._quiet, wakeup)
        self._quiet = 0.0 if waited < 0 else self._quiet + waited
        if self._quiet >= self._find_seconds_before_ask():
            raise self._find_silent(sending | set(wants))
        return waited >= 0

    def arrived(self, peer: int, want: Want) -> bool:
        """If the message `want` has arrived completely on connection `peer`, receive it; return whether it has."""
        kind, tag, _, into = want
        link = self._links[peer]
        while kind == RingMessage.DATA or not self.early.fetch(peer, want):
            if (head := link.peek()) is None:
                return False
            if head.kind == kind == RingMessage.DATA or (head.kind == kind == RingMessage.POINT and head.tag == tag):
                if kind == RingMessage.DATA:
                    must_match(head, link.pending_bytes, link.peer, want)
                assert not isinstance(into, list), "only a message of kind PARCEL is appended to a list"
                return link.try_recv(into) is not None
            if head.kind == RingMessage.BYE:
                raise self._explain_gone(peer)
            if head.kind == RingMessage.DATA:
                raise LinkError(
                    f"{link.peer} is in a collective while this rank waits for a message with tag {tag} from it: "
                    "all ranks must make the same calls in the same order",
                    peer=link.peer,
                )
            message = link.try_recv()
            if message is None:
                return False
            self._process_unawaited(peer, message)
        return True

    def _process_unawaited(self, peer: int, message: Message) -> None:
        if message.kind in EARLY:
            self.early.put(peer, message)
        elif message.kind == RingMessage.ASK:
            self._links[peer].queue(Message(RingMessage.HERE))
        elif message.kind == RingMessage.ABORT:
            raise abort_error(message, self._links[peer].peer)
        elif message.kind == RingMessage.BYE:
            self._left.add(peer)
        self._heard.add(peer)

    def _explain_gone(self, peer: int) -> PeerLost:
        who = self._links[peer].peer
        return PeerLost(f"{who} has closed the ring, and this rank still waits for data from it", peer=who)

    # Waiting

    def _find_seconds_before_ask(self) -> float:
        return self.timeout - min(GRACE_SECONDS, self.timeout / 4)

    def _sleep(self, sending: set[int], wants: dict[int, Want], seconds: float, wakeup: int = -1) -> float:
        """Sleep at most `seconds`, until a connection or the eventfd `wakeup` is ready; process arrived messages.

        Return -1 if the eventfd, or a connection in `sending` or `wants`, was ready; otherwise the seconds slept.
        """
        for peer, link in self._links.items():
            busy = peer in wants or link.head is None or link.head.kind != RingMessage.DATA
            busy = busy and not link.ended and peer not in self._left
            self._links.watch(peer, (_IN if busy else 0) | (link.interest if link.queued else 0))
        start = time.perf_counter()
        ready = self._links.poll.poll(max(0, math.ceil(seconds * 1000)))
        waited = time.perf_counter() - start
        self.seconds_waiting += waited
        awaited = wants or sending
        for key in awaited:
            self.waits[key % self.size] += waited / len(awaited)
        progress = False
        for fd, _ in ready:
            if fd == wakeup:
                progress = True
                continue
            peer = self._links.at(fd)
            self._links[peer].absorb()
            self._links[peer].flush()
            progress |= peer in wants or peer in sending
            if peer not in wants:
                self.listen(peer)
        return -1 if progress else waited

    def listen(self, peer: int) -> None:
        """Process the control messages on a connection from which this rank awaits no data. Data stays unread."""
        link = self._links[peer]
        while peer not in self._left and (head := link.peek()) is not None and head.kind != RingMessage.DATA:
            message = link.try_recv()
            if message is None:
                return
            self._process_unawaited(peer, message)

    def _find_silent(self, awaited: set[int]) -> LinkError:
        """Send an ASK to all ranks; return the error of a timeout.

        The error names the ranks that do not answer. If all answer, it names the ranks in `awaited`.
        """
        self._heard.clear()
        asked = set(self._links) - self._left
        for peer in asked:
            self._links[peer].queue(Message(RingMessage.ASK))
            self._links.watch(peer, _IN)
        end = time.monotonic() + self.timeout - self._find_seconds_before_ask()
        while (left := end - time.monotonic()) > 0 and asked - self._heard - self._left:
            for fd, _ in self._links.poll.poll(max(1, math.ceil(left * 1000))):
                peer = self._links.at(fd)
                if peer < 0:
                    end = 0.0  # the eventfd was signalled after the timeout: other ranks may have given up already
                elif peer in asked:
                    for message in self._links[peer].feed():
                        self._process_unawaited(peer, message)
        blamed = asked - self._heard - self._left or self._left & awaited or awaited
        who = format_ranks(sorted({key % self.size for key in blamed}))
        return PeerTimeout(
            f"{who} did not take part within {self.timeout:g} s (the knob is `timeout`)", peer=who, seconds=self.timeout
        )

    # Ending

    def _abort_of(self, error: LinkError) -> LinkError:
        """Return the error in the ABORT of the rank that `error` names as lost, or `error` if this rank sent none.

        A rank also closes its connections after another rank has died. Its ABORT then names the rank that died.
        """
        if isinstance(error, PeerLost) and "told_by" not in error.data:
            for peer, link in self._links.items():
                if link.peer != error.data["peer"]:
                    continue
                try:
                    for message in link.feed():
                        if message.kind == RingMessage.ABORT:
                            self._process_unawaited(peer, message)
                except LinkError as found:
                    return found
        return error

    def at_end(self, work: Callable[[], None]) -> None:
        """Register a function that is called once, when the mesh is closed or has failed."""
        self._at_end.append(work)

    def fail(self, error: LinkError) -> LinkError:
        """End the mesh because of `error`, and send `error` to the other ranks.

        Return the error that the caller must raise: the first error that ended the mesh.
        """
        with self.hold:
            if self.dead is None:
                self.dead = error
            if not self._parted:
                self._send_abort_and_close()
            return self.dead

    def _send_abort_and_close(self) -> None:
        assert self.dead is not None
        message, payload = abort_message(self.dead)
        self._send_last_and_close(lambda link: link.queue(message, payload), failed=True)

    def abort(self) -> None:
        """End the ring for all ranks. A rank that waits in it raises PeerLost. Any thread may call this method."""
        self.dead = self.dead or PeerLost(f"rank {self.rank} aborted the ring", peer=f"rank {self.rank}")
        if not self.hold.settle():  # another thread is inside the mesh: wake that thread, which then sends the ABORT
            for link in list(self._links.values()):
                link.hang_up(more_to_send=True)

    def close(self) -> None:
        """Close the mesh on this rank.

        A rank that still waits for data from this rank raises PeerLost. Safe to call twice.
        """
        if not self.hold.settle():
            self.abort()  # another thread waits inside the mesh
        with self.hold:
            if self.dead is None:
                self.dead = LinkError("this ring has been closed on this rank", peer=f"rank {self.rank}")
            if not self._parted:
                self._send_last_and_close(lambda link: link.queue(Message(RingMessage.BYE)), failed=False)

    def _send_last_and_close(self, queue_last: Callable[[Link], None], failed: bool) -> None:
        self._parted = True
        self._sent = self.bytes_sent
        for link in list(self._links.values()):
            with contextlib.suppress(LinkError):  # the other rank has closed already
                queue_last(link)
        end = time.monotonic() + LINGER_SECONDS
        for link in list(self._links.values()):
            with contextlib.suppress(LinkError):
                link.send_last(end, read=failed)
            link.close()
        self._links.clear()
        self.early.clear()
        while self._at_end:
            self._at_end.pop()()


class RingLock:
    """A reentrant lock, held by the thread that is in a method of the ring. It decides which thread ends the ring.

    Connections and file descriptors must not be closed while a thread uses them. A thread that wants to end the ring
    makes `due()` return True, then calls `settle`. If no other thread holds the lock, `settle` calls `end()`; otherwise
    the thread that holds the lock calls `end()` when it releases the lock.
    """

    def __init__(self, due: Callable[[], bool], end: Callable[[], None]) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._due, self._end = due, end

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        within = self._depth > 0
        self._lock.release()
        # checked after the release: a thread that requested the end before the release did not get the lock
        if not within and self._due():
            self.settle()

    def settle(self) -> bool:
        """Call `end()` if `due()` returns True. If another thread holds the lock, do nothing and return False."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._due():
                self._end()
            return True
        finally:
            self._lock.release()

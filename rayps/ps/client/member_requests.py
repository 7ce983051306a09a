"""The driver's requests that let workers join and leave the servers of a space, sent by a thread.

Requests are sent in the order in which they were made. A request is repeated until all segments have answered: a
server that has died is replaced by the driver or by the group's manager.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TypeVar

from rayps_client.errors import LinkError, PeerLost

from rayps.core.rows.leases import Marks, PushId
from rayps.ps.client.session import Session
from rayps.ps.protocol.members import MemberChange, MemberChangeKind
from rayps.ps.protocol.messages import GroupMessage, read_numbers

log = logging.getLogger(__name__)

T = TypeVar("T")
AGAIN_SECONDS = 0.2  # seconds from a failed request to the next attempt


class MemberRequests:
    """Sends changes of the ranks of one space. `meet` opens a session of rank -1 with it.

    Each method returns at once, with the future answer. An answer is never an error, except after `close`.
    """

    def __init__(self, meet: Callable[[], Session]) -> None:
        self._meet = meet
        self._session: Session | None = None
        self._work: queue.SimpleQueue[tuple[Callable[[Session], object], Future[object]] | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="members")
        self._thread.start()

    def admit(self, rank: int, incarnation: int, first: int) -> Future[int]:
        """Let a worker join as `rank`; the answer is its first step, which is the same on all segments.

        The first step is at least `first`. Servers refuse requests of earlier incarnations of the rank.
        """
        return self._submit(lambda session: _admit(session, rank, incarnation, first))

    def remove(self, rank: int) -> Future[Marks]:
        """Let the worker `rank` leave. The answer has its steps on the servers, which do not change afterwards."""
        change = MemberChange(MemberChangeKind.REMOVE, rank)
        return self._submit(lambda session: _marks_of(rank, _ask(session, change)))

    def repeat(self, rank: int, step: int, earlier: Iterable[PushId]) -> Future[bool]:
        """Let the push (`rank`, `step`) repeat the pushes `earlier`. The answer is True."""
        change = MemberChange(MemberChangeKind.REPEAT, rank, step, tuple(earlier))
        return self._submit(lambda session: bool(_ask(session, change)))

    def end(self) -> Future[int]:
        """After all workers have left, retain the last state. The answer is its round, which is above all steps."""
        return self._submit(_end)

    def close(self) -> None:
        """End the thread. Requests that were not answered get PeerLost."""
        self._closed.set()
        self._work.put(None)
        session = self._session
        if session is not None:
            session.hang_up()
        self._thread.join(10.0)

    def _submit(self, send: Callable[[Session], T]) -> Future[T]:
        answer: Future[T] = Future()
        self._work.put((send, answer))  # type: ignore[arg-type]
        return answer

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            send, answer = item
            while not self._closed.is_set() and not answer.done():
                try:
                    if self._session is None:
                        self._session = self._meet()
                        self._session.join()
                    answer.set_result(send(self._session))
                except LinkError as error:
                    log.info("a change of the workers is repeated: %s", error)
                    self._drop_session()
                    self._closed.wait(AGAIN_SECONDS)
                except Exception as error:
                    answer.set_exception(error)
            if not answer.done():
                answer.set_exception(PeerLost("the requests to the servers were closed", peer="server"))
        self._drop_session()

    def _drop_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()


def _ask(session: Session, change: MemberChange, incarnation: int = 0) -> list[list[int]]:
    """Send a change to all segments; return the next step of each rank, for each segment."""
    pieces = dict.fromkeys(range(session.space.segments), change.encode())
    answers = session.exchange(GroupMessage.MEMBERS, pieces, weight=float(incarnation)).pieces
    return [read_numbers(answers[index]) for index in sorted(answers)]


def _marks_of(rank: int, marks: list[list[int]]) -> Marks:
    found = [each[rank] for each in marks]
    return Marks(min(found), max(found))


def _admit(session: Session, rank: int, incarnation: int, first: int) -> int:
    """Admit a rank on all segments, until its first step, at least `first`, is the same on all of them."""
    while True:
        change = MemberChange(MemberChangeKind.ADMIT, rank, first)
        low, first = _marks_of(rank, _ask(session, change, incarnation))
        if low == first:
            return first


def _end(session: Session) -> int:
    answers = session.exchange(GroupMessage.MARKS, dict.fromkeys(range(session.space.segments), b"")).pieces
    last = max(max(read_numbers(piece)) for piece in answers.values()) + 1
    marks = _ask(session, MemberChange(MemberChangeKind.END, step=last))
    return max(max(each) for each in marks)

"""A server of a group: one thread serves segments of many spaces, and keeps backups of them on other servers.

The loop reads the requests that have arrived, divides its time among the spaces (`fair_queue`), answers (`requests`),
and applies the manager's orders (`assignments`). What would block the loop, such as connecting, runs in other threads.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import select
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from rayps.comm.link import Listener, Message
from rayps.comm.link.wakeup import Wakeup
from rayps.core.errors import LinkError, NotFound, StaleGeneration
from rayps.ps.protocol.mailbox import BY_MEMORY, BY_MESSAGE, SharedSlice
from rayps.ps.protocol.messages import GroupMessage, numbers
from rayps.ps.protocol.space import ServedSegment, Space
from rayps.ps.server.assignments import AssignedSegment, AssignedSpace, Assignments, SegmentReport
from rayps.ps.server.connection import PeerRequest, ServerPeer
from rayps.ps.server.fair_queue import FairQueue
from rayps.ps.server.mailboxes import Mailboxes, request_of
from rayps.ps.server.outbound import Address, Load, ManagerSession, Outbound
from rayps.ps.server.replication import Backups, Peer, Replication
from rayps.ps.server.requests import OPERATIONS, RequestHandler

log = logging.getLogger(__name__)

NAP_SECONDS = 0.05  # longest sleep of the loop between two checks of its deadlines
TEND_SECONDS = 0.01  # between two checks of deadlines, connections and the manager, while only mailboxes are served
TURN_SECONDS = 0.002  # longest time of service between two reads of new requests
STRANGE_SECONDS = 5.0  # seconds that a request for an unknown space waits for the space
T = TypeVar("T")
FROM_SERVERS = frozenset({GroupMessage.STATE, GroupMessage.FORWARD})


class GroupServerLoop:
    """The loop of a server: serves requests in one thread until it is closed."""

    def __init__(
        self,
        name: str,
        listener: Listener,
        manager: Address | None,
        secret: bytes,
        *,
        host: str = "",
        heartbeat: float = 0.1,
    ) -> None:
        """Start the loop.

        `manager` is the address of the manager's listener, or a function that returns this address. With `manager=None`
        the server has no manager, and the caller assigns segments to the server with `serve`. `host` is the machine's
        name. `heartbeat` is the time between two heartbeats, in seconds, until the manager sets another.
        """
        warm_up()
        self.name, self.address, self.where = name, listener.address, host or socket.gethostname()
        self._listener, self._secret = listener, secret
        self._fair: FairQueue[PeerRequest] = FairQueue()
        self._copies = Replication(self)
        self._holdings = Assignments(self)
        self._serving = RequestHandler(self._copies, self, name)
        self._command = ManagerSession(self, self._holdings, self._copies, heartbeat)
        self._load = Load()
        self._guests: dict[int, ServerPeer] = {}
        self._paused: set[ServerPeer] = set()
        self._more = False  # whether the last `_serve_all` left requests that can be served
        self._again: set[ServerPeer] = set()  # connections that may have more messages to read
        self._backups = Backups(self._holdings)
        self._strange: dict[int, float] = {}  # by unknown space: since when requests wait for this space
        self._arrived: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._bell = Wakeup()
        self._boxes = Mailboxes(self._bell)
        self._poll = select.poll()
        self._poll.register(listener.fileno(), select.POLLIN)
        self._poll.register(self._bell, select.POLLIN)
        self._closing = threading.Event()
        self._reach = Outbound(name, secret, manager, self._poll, self._later, self._copies, self._command)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the loop runs."""
        return self._thread.is_alive()

    @property
    def alone(self) -> float:
        """Seconds without a connection to the manager; 0 while the manager is connected."""
        since = self._command.alone_since
        return 0.0 if since is None else time.monotonic() - since

    def close(self) -> None:
        """End the loop and close its connections; the listener stays open. Safe to call twice."""
        self._closing.set()
        self._bell.wake()
        self._thread.join()

    def serve(self, space: Space, index: int, generation: int, segment: ServedSegment) -> AssignedSegment:
        """Serve a segment without a manager's orders. Call it in the loop's thread, by `do`."""
        found = self._holdings.hold(space, index, generation, segment)
        self.learnt(space)
        return found

    def do(self, work: Callable[[], T], timeout: float = 60.0) -> T:
        """Run `work` in the loop's thread between two requests, and return its result. Call this from another thread.

        Raises:
            TimeoutError: the loop has ended, or did not run `work` in time.
        """
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)

        self._later(run)
        return done.result(timeout)

    def facts(self) -> dict[str, Any]:
        """Return the server's load as in a heartbeat; `rayps.ps.server.outbound` lists the fields."""
        fair = self._fair
        return self._load.now(self._holdings, len(self._guests), lambda n: (fair.throttled(n), fair.queued(n)))

    # ---- the loop

    def _run(self) -> None:
        tended, asked = 0.0, 0
        try:
            while not self._closing.is_set():
                # after a request the next one may come at once, and a sleep costs more than a check without a wait
                heard = self._look(0.0 if asked else self._patience())
                asked, queued = self._take_out()
                now = time.monotonic()
                if heard or queued or now > tended + TEND_SECONDS:
                    self._serve_all()
                    self._tend()
                    tended = now
                self._boxes.wake()
        except Exception:  # the server ends, and its peers see that their connections close
            log.exception("%s failed", self.name)
            self._listener.close()
        finally:
            for guest in list(self._guests.values()):
                self._lose(guest, "this server is closing")
            self._reach.close()
            self._bell.close()

    def _patience(self) -> float:
        now = time.monotonic()
        if self._again or self._more:
            return 0.0
        wake, beat = self._fair.wake_at(now), NAP_SECONDS
        if self._command.link is not None:
            beat = self._command.next_beat - now
        return max(0.0, min(NAP_SECONDS, beat, NAP_SECONDS if wake is None else wake - now))

    def _look(self, seconds: float) -> bool:
        """Wait at most `seconds` for input, and read it; return whether any came other than requests in mailboxes."""
        again, self._again = self._again, set()
        for guest in again:
            if not guest.gone:
                self._read(guest)
        if again or not seconds:
            ready = self._poll.poll(0)
        else:
            ready = self._poll.poll(int(1000 * seconds + 0.999) if self._boxes.sleeps() else 0)
            self._boxes.awake()
        heard = bool(again) or self._more
        for descriptor, events in ready:
            if descriptor == self._bell.fileno():
                heard |= self._answer_bell()
                continue
            heard = True
            guest_or_none = self._guests.get(descriptor)
            if guest_or_none is not None:
                self._attend(guest_or_none, events)
            elif not self._reach.attend(descriptor):
                self._accept()
        return heard

    def _accept(self) -> None:
        while (link := self._listener.accept_ready()) is not None:
            guest = ServerPeer(link)
            self._guests[guest.descriptor] = guest
            self._poll.register(guest.descriptor, select.POLLIN)
            self._attend(guest, select.POLLIN)  # its first request may have come along with the handshake

    def _attend(self, guest: ServerPeer, events: int) -> None:
        if events & ~select.POLLOUT:
            self._read(guest)
        if not guest.gone:
            self._flush(guest)

    def _read(self, guest: ServerPeer) -> None:
        """Queue the requests that have arrived on a connection; charge the time to its space."""
        began = time.monotonic()
        self._take_in(guest)
        if guest.space in self._holdings.spaces:
            self._fair.spent(guest.space, time.monotonic() - began)

    def _take_in(self, guest: ServerPeer) -> None:
        """Read requests from a connection while the queue of its space has room."""
        try:
            for _ in range(64):
                if not self._fair.room(guest.space):
                    self._paused.add(guest)
                    if not guest.paused:
                        guest.paused = True
                        self._watch(guest)
                    return
                try:
                    message = guest.link.try_recv()
                except StaleGeneration as error:
                    if error.data.get("refused"):
                        raise
                    continue
                if message is None:
                    break
                self._queue(guest, message)
            else:
                self._again.add(guest)
            if guest.paused:
                guest.paused = False
                self._watch(guest)
        except LinkError as error:
            self._lose(guest, str(error))

    def _queue(self, guest: ServerPeer, m: Message) -> None:
        request = PeerRequest(guest, m.kind, m.tag, m.a, m.b, m.weight, m.payload)
        from_server = m.kind in FROM_SERVERS
        if m.kind in (GroupMessage.JOIN, GroupMessage.SEAT) or from_server:
            guest.space = m.a
        number = guest.space
        if number not in self._holdings.spaces and number >= 0 and number not in self._strange:
            self._strange[number] = time.monotonic()
            self._fair.block(number, True)
        counts = m.kind in OPERATIONS
        self._fair.put(number, request, len(m.payload) + 128, counts=counts, urgent=from_server)

    def _take_out(self) -> tuple[int, bool]:
        """Serve the requests in mailboxes, or queue them if other requests wait.

        Return the number of these requests, and whether `_serve_all` and `_tend` must run because of them.
        """
        asked = self._boxes.asked()
        if not asked:
            return 0, False
        spaces, rest, alone, began = self._holdings.spaces, False, None, time.monotonic()
        if len(spaces) == 1:
            [alone] = spaces.values()
            alone = alone if self._fair.free(alone.number) else None
        for guest in asked:
            push = guest.push
            if alone is None or push is None or not self._serving.answer_again(alone, guest, push):
                rest |= self._take_one(guest, alone)
        if alone is not None:
            alone.seconds += time.monotonic() - began
        return len(asked), rest

    def _take_one(self, guest: ServerPeer, alone: AssignedSpace | None) -> bool:
        """Serve the request in a mailbox at once if it is for the space `alone`; queue it otherwise.

        `alone` is the server's only space, given only if no request waits and the space has no limit of operations.
        Return whether `_serve_all` and `_tend` must run because of the request.
        """
        if guest.box is None:
            return False  # the connection was lost while another request was served
        held = self._holdings.spaces.get(guest.space)
        try:
            call, head = self._boxes.take(guest, held)
        except ValueError as error:
            self._refuse_box(guest, error)
            return False
        finally:
            if guest.link.head is not None:  # messages arrived with offered memory: poll() does not report them again
                self._again.add(guest)
        if held is None or head is None:
            self._refuse_strange(request_of(guest, call, None))
            return False
        if held is not alone:
            counts = call.kind in OPERATIONS
            self._fair.put(guest.space, request_of(guest, call, head), 128, counts=counts)
            return True
        if self._serving.answer_whole(held, guest, call, head):
            return False
        self._serve(held, request_of(guest, call, head))
        return True

    def _refuse_box(self, guest: ServerPeer, error: ValueError) -> None:
        assert guest.box is not None
        self._serving.fail(None, PeerRequest(guest, 0, guest.box.open, 0, 0, 0.0, None), error)

    def _serve_all(self) -> None:
        end, self._more = time.monotonic() + TURN_SECONDS, False
        while (found := self._fair.next(began := time.monotonic())) is not None:
            number, request = found
            held = self._holdings.spaces.get(number)
            self._serve(held, request)
            now = time.monotonic()
            self._fair.spent(number, now - began)
            if held is not None:
                held.seconds += now - began
            if now > end:
                self._more = True
                break
        if self._paused:
            ready = {guest for guest in self._paused if self._fair.room(guest.space)}
            self._paused -= ready
            self._again |= ready

    def _serve(self, held: AssignedSpace | None, request: PeerRequest) -> None:
        if held is None:
            self._refuse_strange(request)
        elif request.kind in FROM_SERVERS:
            self._copy(held, request)
        elif not request.guest.gone or request.kind in (GroupMessage.PUSH, GroupMessage.SAVED):
            if request.kind == GroupMessage.JOIN:
                self._boxes.open(request.guest)
            self._serving.answer(held, request)

    def _copy(self, held: AssignedSpace, request: PeerRequest) -> None:
        guest = request.guest
        refused = self._backups.apply(held, request)
        if refused:
            self.say(guest, Message(GroupMessage.STALE, request.tag), numbers(refused))

    def _refuse_strange(self, request: PeerRequest) -> None:
        if request.kind in FROM_SERVERS:
            self.say(request.guest, Message(GroupMessage.STALE, request.tag), numbers([request.b]))
        elif request.guest.space < 0:
            error = ValueError(f"{request.guest.link.peer} has not joined a space: send JOIN first")
            self._serving.fail(None, request, error)
        else:
            self._serving.fail(None, request, NotFound(f"there is no space {request.guest.space} on {self.name}"))

    # ---- acknowledgements, deadlines and the manager

    def _tend(self) -> None:
        now = time.monotonic()
        for guest, tag in self._backups.acknowledged():
            self.say(guest, Message(GroupMessage.COPIED, tag), None)
        for held in list(self._holdings.spaces.values()):
            if held.parked or held.withheld or self._serving.reads(held):
                self._serving.expire(held, now)
        for number, since in list(self._strange.items()):
            if now - since > STRANGE_SECONDS or number in self._holdings.forgotten:
                del self._strange[number]
                for request in self._fair.drop(number):
                    self._refuse_strange(request)
        self._command.turn(now)
        self._reach.flush_peers()
        self._reach.flush_manager()

    # ---- answers and connections

    def say(self, guest: ServerPeer, message: Message, payload: Any) -> None:
        """Queue an answer, whose payload must not change afterwards. A request by mailbox is answered by mailbox."""
        if guest.gone:
            return
        box = guest.box
        by_box = box is not None and message.tag == box.open
        by_message = not by_box or payload is not None or message.kind not in (GroupMessage.ACK, GroupMessage.VALUE)
        try:
            if by_message:
                guest.link.queue(message, payload, copy=False)
                self._flush(guest)
        except LinkError as error:
            self._lose(guest, str(error))
            return
        if box is not None and by_box and not guest.gone:
            box.answer(message.a, message.b, int(message.weight), BY_MESSAGE if by_message else BY_MEMORY)
            self._boxes.answered.append(box)

    def answer(self, guest: ServerPeer, tag: int, version: int, lead: int, durable: int) -> None:
        """Answer a request that came by mailbox and whose values the worker reads in shared memory."""
        box = guest.box
        if box is not None and box.open == tag and not guest.gone:
            box.answer(version, lead, durable)
            self._boxes.answered.append(box)

    def report(self, report: SegmentReport) -> None:
        """Send an event to the manager at the end of this turn."""
        self._command.say(report)

    def _flush(self, guest: ServerPeer) -> None:
        try:
            full = not guest.link.flush()
        except LinkError as error:
            self._lose(guest, str(error))
            return
        if full != guest.full:
            guest.full = full
            self._watch(guest)

    def _watch(self, guest: ServerPeer) -> None:
        events = (0 if guest.paused else select.POLLIN) | (select.POLLOUT if guest.full else 0)
        if events:
            self._poll.register(guest.descriptor, events)
        else:  # also not for the end of the connection, which poll() would report again and again
            self._poll.unregister(guest.descriptor)

    def _lose(self, guest: ServerPeer, why: str) -> None:
        if guest.gone:
            return
        guest.gone = True
        self._paused.discard(guest)
        self._boxes.close(guest)
        log.info("%s: lost the connection of %s: %s", self.name, guest.link.peer, why)
        del self._guests[guest.descriptor]
        with contextlib.suppress(KeyError):  # a paused connection may not be registered
            self._poll.unregister(guest.descriptor)
        held = self._holdings.spaces.get(guest.space)
        if held is not None:
            self._serving.forget(held, guest)
        guest.link.close()

    def offer(self, guest: ServerPeer, segment: int, slice_: SharedSlice) -> None:
        """Give a worker on this host access to a segment's memory, unless the worker has it already."""
        box = guest.box
        if box is not None and box.offered.get(segment) is not slice_ and slice_.memory is not None:
            box.offered[segment] = slice_
            box.offer(segment, slice_.memory)
            self._flush(guest)

    def dial(self, peer: Peer) -> None:
        """Connect to another server; see `Outbound.dial`."""
        self._reach.dial(peer)

    def hang_up(self, peer: Peer) -> None:
        """Close the connection to another server; see `Outbound.hang_up`."""
        self._reach.hang_up(peer)

    # ---- effects of the manager's orders

    def want_copies(self, holding: AssignedSegment, copies: dict[str, str], *, anew: bool) -> None:
        """Keep backups of a segment on these servers and no others; see `Replication.want`."""
        self._copies.want(holding, copies, anew=anew)

    def stop_serving(self, holding: AssignedSegment) -> None:
        """Refuse the parked requests that touch this segment; see `RequestHandler.stop_serving`."""
        self._serving.stop_serving(holding)

    def withdraw(self, holding: AssignedSegment) -> None:
        """Refuse the withheld answers about this segment (see `RequestHandler.withdraw`), and drop its backups."""
        self._serving.withdraw(holding)
        self._copies.drop_all(holding)
        self.settled(holding.space.number, anew=True)

    def settled(self, space: int, *, anew: bool) -> None:
        """Send the withheld answers of a space whose backups have acknowledged; see `PendingReplies.settled`."""
        held = self._holdings.spaces.get(space)
        if held is not None and held.withheld:
            self._serving.settled(held, anew=anew)

    def learnt(self, space: Space) -> None:
        """Handle a new space or new quota: serve the requests that waited, and set this server's share of the quota."""
        if self._strange.pop(space.number, None) is not None:
            self._fair.block(space.number, False)
        most, rate = space.quota.operations, None
        if most is not None:
            mine = len(self._holdings.spaces[space.number].primaries())
            rate = most * max(1, mine) / max(1, space.segments)
        self._fair.limit_rate(space.number, rate, time.monotonic())

    def forgotten(self, number: int) -> None:
        """Handle a closed space: answer its requests with an error."""
        for request in self._fair.drop(number):
            self._refuse_strange(request)

    def _later(self, work: Callable[[], None]) -> None:
        """Let the loop's thread run `work` soon. Any thread may call this."""
        self._arrived.put(work)
        self._bell.wake()

    def _answer_bell(self) -> bool:
        """Run the work that other threads have queued; return whether there was any."""
        self._bell.clear()
        found = False
        while not self._arrived.empty():
            found = True
            self._arrived.get()()
        return found


@functools.cache
def warm_up() -> None:
    """Let torch import what an optimizer's first step needs, which would otherwise delay requests by seconds."""
    for kind in (torch.optim.SGD, torch.optim.Adam):
        param = torch.nn.Parameter(torch.zeros(1))
        param.grad = torch.zeros(1)
        kind([param], lr=0.1).step()

"""A server of a group: one thread serves segments of many spaces, and keeps backups of them on other servers.

The loop reads the requests that have arrived, divides its time among the spaces (`fair_queue`), answers the requests
(`requests`), and applies the manager's orders (`assignments`). Work that would block the loop, such as connecting, runs
in other threads.
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
from dataclasses import replace
from typing import Any, TypeVar

import torch
from rayps_client.errors import LinkError, NotFound, StaleGeneration

from rayps.comm.link import Listener, Message
from rayps.comm.link.wakeup import Wakeup
from rayps.core.time.member_times import MemberTimes
from rayps.core.time.time_account import name_waits
from rayps.ps.protocol.mailbox import BY_MEMORY, BY_MESSAGE, SharedSlice
from rayps.ps.protocol.messages import GroupMessage, Role, pack_numbers
from rayps.ps.protocol.space import ServedSegment, Space
from rayps.ps.server.assignments import AssignedSegment, AssignedSpace, Assignments, SegmentReport
from rayps.ps.server.connection import PeerRequest, ServerPeer
from rayps.ps.server.fair_queue import FairQueue
from rayps.ps.server.mailboxes import Mailboxes, request_of
from rayps.ps.server.outbound import Address, Load, ManagerSession, Outbound
from rayps.ps.server.replication import Backups, BackupServer, Replication
from rayps.ps.server.requests import OPERATIONS, RequestHandler

log = logging.getLogger(__name__)

NAP_SECONDS = 0.05  # longest sleep of the loop between two checks of its deadlines
MAINTAIN_SECONDS = 0.01  # seconds between two calls of `_maintain` while only mailboxes are served
TURN_SECONDS = 0.002  # longest time of service between two reads of new requests
UNKNOWN_SPACE_SECONDS = 5.0  # seconds that a request for an unknown space waits for the space
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
        node: str = "",
        heartbeat: float = 0.1,
    ) -> None:
        """Start the loop.

        `manager` is the address of the manager's listener, or a function that returns this address. With `manager=None`
        the server has no manager, and the caller assigns segments to the server with `serve`. `host` is the machine's
        name, and `node` its id in the cluster. `heartbeat` is the time between two heartbeats, in seconds, until the
        manager sets another time.
        """
        warm_up()
        self.name, self.address = name, listener.address
        self.where, self.node = host or socket.gethostname(), node
        self._listener, self._secret = listener, secret
        self._fair: FairQueue[PeerRequest] = FairQueue()
        self._replication = Replication(self)
        self._assignments = Assignments(self)
        self._handler = RequestHandler(self._replication, self, name)
        self._manager_session = ManagerSession(self, self._assignments, self._replication, heartbeat)
        self._load = Load()
        self._peers: dict[int, ServerPeer] = {}
        self._paused: set[ServerPeer] = set()
        self._has_more = False  # whether the last `_serve_all` left requests that can be served
        self._unread_peers: set[ServerPeer] = set()  # connections that may have more messages to read
        self._backups = Backups(self._assignments)
        self._unknown_spaces: dict[int, float] = {}  # unknown space -> since when requests wait for it
        self._arrived: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wakeup = Wakeup()
        self._mailboxes = Mailboxes(self._wakeup)
        self._poll = select.poll()
        self._poll.register(listener.fileno(), select.POLLIN)
        self._poll.register(self._wakeup, select.POLLIN)
        self._closing = threading.Event()
        self._outbound = Outbound(
            name, secret, manager, self._poll, self._run_soon, self._replication, self._manager_session
        )
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the loop runs."""
        return self._thread.is_alive()

    @property
    def alone(self) -> float:
        """Seconds without a connection to the manager; 0 while the manager is connected."""
        since = self._manager_session.alone_since
        return 0.0 if since is None else time.monotonic() - since

    def close(self) -> None:
        """End the loop and close its connections; the listener stays open. Safe to call twice."""
        self._closing.set()
        self._wakeup.wake()
        self._thread.join()

    def serve(self, space: Space, index: int, generation: int, segment: ServedSegment) -> AssignedSegment:
        """Serve a segment without a manager's orders. Call this in the loop's thread, by `do`."""
        found = self._assignments.assign(space, index, generation, segment)
        self.space_changed(space)
        return found

    def hand_over(self, assigned: AssignedSegment) -> bytes:
        """Refuse requests to a segment from now on, and return its whole state. Call this in the loop's thread."""
        assert assigned.segment is not None, "a primary has a segment"
        assigned.role = Role.LEAVING
        self.stop_serving(assigned)
        return assigned.segment.dump()

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

        self._run_soon(run)
        return done.result(timeout)

    def facts(self) -> dict[str, Any]:
        """Return the server's load as in a heartbeat; `rayps.ps.server.outbound` lists the fields."""
        fair = self._fair
        return self._load.now(self._assignments, len(self._peers), lambda n: (fair.throttled(n), fair.queued(n)))

    def times(self) -> MemberTimes:
        """Return where the loop's time went until now, and for which workers which workers waited here."""
        delays: dict[str, dict[str, float]] = {}
        awaited: dict[str, float] = {}
        for assigned_space in list(self._assignments.spaces.values()):
            for (rank, slowest), seconds in list(assigned_space.delays.items()):
                peer, found = f"worker-{slowest}", delays.setdefault(f"worker-{rank}", {})
                found[peer] = found.get(peer, 0.0) + seconds
                awaited[peer] = awaited.get(peer, 0.0) + seconds
        lines = {each.link.peer: line for each in list(self._peers.values()) if (line := each.link.line) is not None}
        spent = name_waits(self._load.account.seconds(), awaited)
        return replace(MemberTimes.of(spent, None, lines), delays=delays)

    # ---- the loop

    def _run(self) -> None:
        maintained, asked = 0.0, 0
        account = self._load.account
        try:
            while not self._closing.is_set():
                # after a request the next one may come at once, and a sleep costs more than a check without a wait
                account.enter("waiting" if self._is_awaited() else "idle")
                received = self._read_input(0.0 if asked else self._sleep_seconds())
                account.enter("compute")
                asked, queued = self._serve_mailboxes()
                now = time.monotonic()
                if received or queued or now > maintained + MAINTAIN_SECONDS:
                    self._serve_all()
                    self._maintain()
                    maintained = now
                account.enter("communication")
                self._mailboxes.wake()
        except Exception:  # the server ends, and its peers see that their connections close
            log.exception("%s failed", self.name)
            self._listener.close()
        finally:
            for peer in list(self._peers.values()):
                self._lose(peer, "this server is closing")
            self._outbound.close()
            self._wakeup.close()

    def _is_awaited(self) -> bool:
        """Return whether a worker waits here for the push of another worker."""
        return any(assigned_space.parked for assigned_space in list(self._assignments.spaces.values()))

    def _sleep_seconds(self) -> float:
        now = time.monotonic()
        if self._unread_peers or self._has_more:
            return 0.0
        wake, beat = self._fair.wake_at(now), NAP_SECONDS
        if self._manager_session.link is not None:
            beat = self._manager_session.next_beat - now
        return max(0.0, min(NAP_SECONDS, beat, NAP_SECONDS if wake is None else wake - now))

    def _read_input(self, seconds: float) -> bool:
        """Wait at most `seconds` for input, and read it. Return whether there was input other than in mailboxes."""
        again, self._unread_peers = self._unread_peers, set()
        for peer in again:
            if not peer.gone:
                self._read(peer)
        if again or not seconds:
            ready = self._poll.poll(0)
        else:
            ready = self._poll.poll(int(1000 * seconds + 0.999) if self._mailboxes.sleeps() else 0)
            self._mailboxes.awake()
        self._load.account.enter("communication")
        received = bool(again) or self._has_more
        for descriptor, events in ready:
            if descriptor == self._wakeup.fileno():
                received |= self._run_queued_work()
                continue
            received = True
            peer_or_none = self._peers.get(descriptor)
            if peer_or_none is not None:
                self._handle_events(peer_or_none, events)
            elif not self._outbound.handle_events(descriptor):
                self._accept()
        return received

    def _accept(self) -> None:
        while (link := self._listener.accept_ready()) is not None:
            peer = ServerPeer(link)
            self._peers[peer.descriptor] = peer
            self._poll.register(peer.descriptor, select.POLLIN)
            self._handle_events(peer, select.POLLIN)  # its first request may have come along with the handshake

    def _handle_events(self, peer: ServerPeer, events: int) -> None:
        if events & ~select.POLLOUT:
            self._read(peer)
        if not peer.gone:
            self._flush(peer)

    def _read(self, peer: ServerPeer) -> None:
        """Queue the requests that have arrived on a connection, and count the time as service of its space."""
        began = time.monotonic()
        self._read_requests(peer)
        if peer.space in self._assignments.spaces:
            self._fair.spent(peer.space, time.monotonic() - began)

    def _read_requests(self, peer: ServerPeer) -> None:
        """Read requests from a connection while the queue of its space has room."""
        try:
            for _ in range(64):
                if not self._fair.has_room(peer.space):
                    self._paused.add(peer)
                    if not peer.paused:
                        peer.paused = True
                        self._watch(peer)
                    return
                try:
                    message = peer.link.try_recv()
                except StaleGeneration as error:
                    if error.data.get("refused"):
                        raise
                    continue
                if message is None:
                    break
                self._queue(peer, message)
            else:
                self._unread_peers.add(peer)
            if peer.paused:
                peer.paused = False
                self._watch(peer)
        except LinkError as error:
            self._lose(peer, str(error))

    def _queue(self, peer: ServerPeer, m: Message) -> None:
        request = PeerRequest(peer, m.kind, m.tag, m.a, m.b, m.weight, m.payload)
        from_server = m.kind in FROM_SERVERS
        if m.kind in (GroupMessage.JOIN, GroupMessage.TAKE_RANK) or from_server:
            peer.space = m.a
        number = peer.space
        if number not in self._assignments.spaces and number >= 0 and number not in self._unknown_spaces:
            self._unknown_spaces[number] = time.monotonic()
            self._fair.block(number, True)
        counts = m.kind in OPERATIONS
        self._fair.put(number, request, len(m.payload) + 128, counts=counts, urgent=from_server)

    def _serve_mailboxes(self) -> tuple[int, bool]:
        """Serve the requests in mailboxes, or queue them if other requests wait.

        Return the number of these requests, and whether `_serve_all` and `_maintain` must run because of them.
        """
        asked = self._mailboxes.asked()
        if not asked:
            return 0, False
        spaces, rest, alone, began = self._assignments.spaces, False, None, time.monotonic()
        if len(spaces) == 1:
            [alone] = spaces.values()
            alone = alone if self._fair.may_skip(alone.number) else None
        for peer in asked:
            push = peer.push
            if alone is None or push is None or not self._handler.answer_again(alone, peer, push):
                rest |= self._serve_mailbox(peer, alone)
        if alone is not None:
            alone.seconds += time.monotonic() - began
        return len(asked), rest

    def _serve_mailbox(self, peer: ServerPeer, alone: AssignedSpace | None) -> bool:
        """Serve the request in a mailbox now if it is for the space `alone`; queue it otherwise.

        `alone` is the server's only space, or None if there are several, requests wait, or its operations are limited.
        Return whether `_serve_all` and `_maintain` must run because of the request.
        """
        if peer.mailbox is None:
            return False  # the connection was lost while another request was served
        assigned_space = self._assignments.spaces.get(peer.space)
        try:
            call, head = self._mailboxes.read_request(peer, assigned_space)
        except ValueError as error:
            self._refuse_mailbox(peer, error)
            return False
        finally:
            if peer.link.head is not None:  # messages arrived with offered memory: poll() does not report them again
                self._unread_peers.add(peer)
        if assigned_space is None or head is None:
            self._refuse_unknown_space(request_of(peer, call, None))
            return False
        if assigned_space is not alone:
            counts = call.kind in OPERATIONS
            self._fair.put(peer.space, request_of(peer, call, head), 128, counts=counts)
            return True
        if self._handler.answer_whole(assigned_space, peer, call, head):
            return False
        self._serve(assigned_space, request_of(peer, call, head))
        return True

    def _refuse_mailbox(self, peer: ServerPeer, error: ValueError) -> None:
        assert peer.mailbox is not None
        self._handler.fail(None, PeerRequest(peer, 0, peer.mailbox.open, 0, 0, 0.0, None), error)

    def _serve_all(self) -> None:
        end, self._has_more = time.monotonic() + TURN_SECONDS, False
        while (found := self._fair.next(began := time.monotonic())) is not None:
            number, request = found
            assigned_space = self._assignments.spaces.get(number)
            self._serve(assigned_space, request)
            now = time.monotonic()
            self._fair.spent(number, now - began)
            if assigned_space is not None:
                assigned_space.seconds += now - began
            if now > end:
                self._has_more = True
                break
        if self._paused:
            ready = {peer for peer in self._paused if self._fair.has_room(peer.space)}
            self._paused -= ready
            self._unread_peers |= ready

    def _serve(self, assigned_space: AssignedSpace | None, request: PeerRequest) -> None:
        if assigned_space is None:
            self._refuse_unknown_space(request)
        elif request.kind in FROM_SERVERS:
            self._copy(assigned_space, request)
        elif not request.peer.gone or request.kind in (GroupMessage.PUSH, GroupMessage.SAVED):
            if request.kind == GroupMessage.JOIN:
                self._mailboxes.open(request.peer)
            self._handler.answer(assigned_space, request)

    def _copy(self, assigned_space: AssignedSpace, request: PeerRequest) -> None:
        peer = request.peer
        refused = self._backups.apply(assigned_space, request)
        if refused:
            self.send(peer, Message(GroupMessage.STALE, request.tag), pack_numbers(refused))

    def _refuse_unknown_space(self, request: PeerRequest) -> None:
        if request.kind in FROM_SERVERS:
            self.send(request.peer, Message(GroupMessage.STALE, request.tag), pack_numbers([request.b]))
        elif request.peer.space < 0:
            error = ValueError(f"{request.peer.link.peer} has not joined a space: send JOIN first")
            self._handler.fail(None, request, error)
        else:
            self._handler.fail(None, request, NotFound(f"there is no space {request.peer.space} on {self.name}"))

    # ---- acknowledgements, deadlines and the manager

    def _maintain(self) -> None:
        now = time.monotonic()
        for peer, tag in self._backups.acknowledged():
            self.send(peer, Message(GroupMessage.COPIED, tag), None)
        for assigned_space in list(self._assignments.spaces.values()):
            if assigned_space.parked or assigned_space.withheld or self._handler.reads(assigned_space):
                self._handler.expire(assigned_space, now)
        for number, since in list(self._unknown_spaces.items()):
            if now - since > UNKNOWN_SPACE_SECONDS or number in self._assignments.closed_spaces:
                del self._unknown_spaces[number]
                for request in self._fair.drop(number):
                    self._refuse_unknown_space(request)
        self._manager_session.send_due(now)
        self._outbound.flush_peers()
        self._outbound.flush_manager()

    # ---- answers and connections

    def send(self, peer: ServerPeer, message: Message, payload: Any) -> None:
        """Queue an answer; its payload must not change afterwards. A request by mailbox is answered in the mailbox."""
        if peer.gone:
            return
        mailbox = peer.mailbox
        by_mailbox = mailbox is not None and message.tag == mailbox.open
        by_message = not by_mailbox or payload is not None or message.kind not in (GroupMessage.ACK, GroupMessage.VALUE)
        try:
            if by_message:
                peer.link.queue(message, payload, copy=False)
                self._flush(peer)
        except LinkError as error:
            self._lose(peer, str(error))
            return
        if mailbox is not None and by_mailbox and not peer.gone:
            mailbox.answer(message.a, message.b, int(message.weight), BY_MESSAGE if by_message else BY_MEMORY)
            self._mailboxes.answered.append(mailbox)

    def answer(self, peer: ServerPeer, tag: int, version: int, lead: int, durable: int) -> None:
        """Answer a request that came by mailbox. The worker reads the values in shared memory."""
        mailbox = peer.mailbox
        if mailbox is not None and mailbox.open == tag and not peer.gone:
            mailbox.answer(version, lead, durable)
            self._mailboxes.answered.append(mailbox)

    def report(self, report: SegmentReport) -> None:
        """Send an event to the manager before the loop's next wait."""
        self._manager_session.add_report(report)

    def _flush(self, peer: ServerPeer) -> None:
        try:
            full = not peer.link.flush()
        except LinkError as error:
            self._lose(peer, str(error))
            return
        if full != peer.full:
            peer.full = full
            self._watch(peer)

    def _watch(self, peer: ServerPeer) -> None:
        events = (0 if peer.paused else select.POLLIN) | (select.POLLOUT if peer.full else 0)
        if events:
            self._poll.register(peer.descriptor, events)
        else:  # also not for the end of the connection, which poll() would report again and again
            self._poll.unregister(peer.descriptor)

    def _lose(self, peer: ServerPeer, why: str) -> None:
        if peer.gone:
            return
        peer.gone = True
        self._paused.discard(peer)
        self._mailboxes.close(peer)
        log.info("%s: lost the connection of %s: %s", self.name, peer.link.peer, why)
        del self._peers[peer.descriptor]
        with contextlib.suppress(KeyError):  # a paused connection may not be registered
            self._poll.unregister(peer.descriptor)
        assigned_space = self._assignments.spaces.get(peer.space)
        if assigned_space is not None:
            self._handler.forget(assigned_space, peer)
        peer.link.close()

    def offer(self, peer: ServerPeer, segment: int, slice_: SharedSlice) -> None:
        """Give a worker on this host access to a segment's memory, unless the worker has it already."""
        mailbox = peer.mailbox
        if mailbox is not None and mailbox.offered.get(segment) is not slice_ and slice_.memory is not None:
            mailbox.offered[segment] = slice_
            mailbox.offer(segment, slice_.memory)
            self._flush(peer)

    def dial(self, peer: BackupServer) -> None:
        """Connect to another server; see `Outbound.dial`."""
        self._outbound.dial(peer)

    def hang_up(self, peer: BackupServer) -> None:
        """Close the connection to another server; see `Outbound.hang_up`."""
        self._outbound.hang_up(peer)

    # ---- effects of the manager's orders

    def set_backups(self, assigned: AssignedSegment, copies: dict[str, str], *, anew: bool) -> None:
        """Keep backups of a segment on these servers and on no others; see `Replication.set_backups`."""
        self._replication.set_backups(assigned, copies, anew=anew)

    def stop_serving(self, assigned: AssignedSegment) -> None:
        """Refuse the parked requests that touch this segment; see `RequestHandler.stop_serving`."""
        self._handler.stop_serving(assigned)

    def withdraw_answers(self, assigned: AssignedSegment) -> None:
        """Answer STALE in place of the withheld answers about this segment, and drop its backups."""
        self._handler.withdraw_answers(assigned)
        self._replication.drop_all(assigned)
        self.send_withheld(assigned.space.number, anew=True)

    def send_withheld(self, space: int, *, anew: bool) -> None:
        """Send the withheld answers of a space whose backups have acknowledged; see `PendingReplies.send_withheld`."""
        assigned_space = self._assignments.spaces.get(space)
        if assigned_space is not None and assigned_space.withheld:
            self._handler.send_withheld(assigned_space, anew=anew)

    def space_changed(self, space: Space) -> None:
        """Handle a new space, quota or bound: serve the requests that need not wait any more; limit the rate here."""
        if self._unknown_spaces.pop(space.number, None) is not None:
            self._fair.block(space.number, False)
        most, rate = space.quota.operations, None
        if most is not None:
            mine = len(self._assignments.spaces[space.number].primaries())
            rate = most * max(1, mine) / max(1, space.segments)
        self._fair.limit_rate(space.number, rate, time.monotonic())
        self._handler.bound_moved(self._assignments.spaces[space.number])

    def change(self, space: Space) -> None:
        """Replace the options of a space that `serve` has added. Call this in the loop's thread, by `do`."""
        self._assignments.add_space(space)
        self.space_changed(space)

    def space_closed(self, number: int) -> None:
        """Handle a closed space: answer its requests with an error."""
        for request in self._fair.drop(number):
            self._refuse_unknown_space(request)

    def _run_soon(self, work: Callable[[], None]) -> None:
        """Let the loop's thread run `work` soon. Any thread may call this."""
        self._arrived.put(work)
        self._wakeup.wake()

    def _run_queued_work(self) -> bool:
        """Run the work that other threads have queued; return whether there was any."""
        self._wakeup.clear()
        found = False
        while not self._arrived.empty():
            found = True
            self._arrived.get()()
        return found


@functools.cache
def warm_up() -> None:
    """Let torch import what an optimizer's first step needs. Otherwise the first push would take seconds."""
    for kind in (torch.optim.SGD, torch.optim.Adam):
        param = torch.nn.Parameter(torch.zeros(1))
        param.grad = torch.zeros(1)
        kind([param], lr=0.1).step()

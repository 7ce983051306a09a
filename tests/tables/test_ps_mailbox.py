"""Requests through shared memory do what the same requests do as messages; and what is odd about them."""

import gc
import select
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ps_site import SECRET
from rayps_client.errors import ConfigError, PeerTimeout
from small_work import Watched

from rayps.cluster.local import LocalCluster, until
from rayps.comm.link import Listener, connect
from rayps.core.job.user_module import pack
from rayps.ps import group as elastic
from rayps.ps.client import connections
from rayps.ps.client import session as client_session
from rayps.ps.client.client import GroupServer
from rayps.ps.client.connections import SegmentRequest, ServerConnection
from rayps.ps.client.session import Session
from rayps.ps.protocol.mailbox import AVAILABLE, CHUNK_BYTES, WorkerMailbox, WorkerMemory
from rayps.ps.protocol.messages import GroupMessage, read_numbers
from rayps.ps.protocol.rows import cut
from rayps.ps.protocol.space import Space, SparseTable
from rayps.ps.server.dense_segment import state_of
from rayps.ps.server.mailboxes import Mailboxes, WholePush
from rayps.ps.tables.client import TableClient, Tables
from rayps.strategies.downpour import Downpour
from rayps.strategies.parameter_server import ParameterServer
from rayps.tensors.flat import Layout

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="memory is shared on Linux")
SIZE, SECONDS, WORKERS = 600, 60.0, 2


def momentum(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def plain_sgd(params):
    return torch.optim.SGD(params, lr=1.0)


@pytest.fixture(params=[0, 1], ids=["no copies", "one copy"])
def group(request):
    cluster = LocalCluster()
    made = elastic.start(cluster, "boxes", 2, request.param, detached=False, balance=None)
    yield made
    made.stop()
    cluster.close()


def opened(group, name, staleness, tabled=True):
    layout = Layout.of([("w", torch.empty(SIZE))])
    tables = (SparseTable("users", 4, 4, optimizer={"name": "adagrad", "lr": 0.1}),) if tabled else ()
    made = group.open(
        Space(name, 0, WORKERS, ParameterServer(staleness=staleness), layout, cut(layout, 6), pack(momentum), tables)
    )
    session = Session(group.contact(), made, -1, timeout=SECONDS)
    session.exchange(
        GroupMessage.LOAD,
        {i: state_of(torch.ones(b - a), layout, a, marks=[0] * WORKERS) for i, (a, b) in enumerate(made.cuts)},
    )
    session.close()
    return made


def joined(group, made, rank, resident):
    incarnation = group.join(made.number, rank)
    return Session(group.contact(), made, rank, incarnation=incarnation, timeout=SECONDS, resident=resident)


def boxes(session):
    return [line.mailbox for line in session._connections.open.values()]


def rounds(group, made, resident, in_step, count=6):
    """Every rank's last pull, the rows it saw, and whether requests went through memory."""
    found, used = {}, {}

    def work(rank):
        session = joined(group, made, rank, resident)
        chance = torch.Generator().manual_seed(rank)
        tables = Tables(session, made)
        server = GroupServer(session, extras=tables.pieces if made.tables else None)
        rows = torch.empty(0)
        for step in range(count):
            vector = server.pull()
            if made.tables:
                tables.begin(step)
                ids = torch.randint(0, 50, (20,), generator=chance)
                lookup, rows = tables.clients["users"].rows(ids)
                tables.clients["users"].gradient(lookup, torch.rand(rows.shape, generator=chance))
            server.push(torch.rand(SIZE, generator=chance), weight=rank + 1.0)
        server.settle()
        found[rank] = vector, rows.clone()
        used[rank] = [box is not None and box.tag > 0 for box in boxes(session)]
        session.close()

    if in_step:
        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(WORKERS)]
        [thread.start() for thread in threads]
        [thread.join(SECONDS) for thread in threads]
    else:  # one after the other, so that it is the same each time
        [work(rank) for rank in range(WORKERS)]
    return found, used


@pytest.mark.parametrize("tabled", [True, False], ids=["tables too", "one turn a round"])
@pytest.mark.parametrize("staleness", [0, None])
def test_memory_and_messages_give_the_same_to_the_bit(group, staleness, tabled):
    by_memory, used = rounds(group, opened(group, "memory", staleness, tabled), True, staleness == 0)
    by_message, unused = rounds(group, opened(group, "message", staleness, tabled), False, staleness == 0)
    assert all(all(each) for each in used.values()) and not any(any(each) for each in unused.values())
    for rank in range(WORKERS):
        for mine, theirs in zip(by_memory[rank], by_message[rank], strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("tabled", [True, False], ids=["tables too", "one turn a round"])
def test_segments_move_while_workers_push_through_memory(group, tabled):
    made = opened(group, "moving", None, tabled)
    session = joined(group, made, 0, True)
    server, pushes = GroupServer(session), 0
    before = server.pull()
    group.resize(3)
    while "server-2" not in session.map.by_server(range(made.segments)) or not group.settled():
        server.push(torch.zeros(SIZE))
        assert torch.equal(server.pull(), before)
        pushes += 1
        assert pushes < 1_000_000
    assert server.step == pushes
    server.push(torch.full((SIZE,), -WORKERS * 10.0))
    assert torch.allclose(server.pull(), before + 1.0)
    assert all(box is not None for box in boxes(session))
    session.close()


class Died(BaseException):
    """A worker's process ends here."""


def history(group, made, seed, dies):
    """All that two workers see who push and pull in turns, die between two servers and come back, while the group
    grows and shrinks: every pull."""
    chance, seen = torch.Generator().manual_seed(seed), []
    talks = [joined(group, made, rank, True) for rank in range(WORKERS)]
    servers = [GroupServer(session) for session in talks]
    for step in range(40):
        if step in (8, 24):
            group.resize(3 if step == 8 else 2)
        if step in (12, 28):
            group.wait_settled(SECONDS)
        for rank in range(WORKERS):
            gradient = torch.rand(SIZE, generator=chance)
            what = int(torch.randint(0, 4, (1,), generator=chance))
            dies[0] = what == 3 and step % 5 == 0
            try:
                servers[rank].push(gradient, weight=1.0 + rank)
                if what == 1:
                    servers[rank].settle()
                servers[rank].pull(consistent=what == 2)
            except Died:
                talks[rank].close()
                talks[rank] = joined(group, made, rank, True)
                servers[rank] = GroupServer(talks[rank], step=step)
                servers[rank].push(gradient, weight=1.0 + rank)
            dies[0] = False
            seen.append(servers[rank].pull().clone())
    [session.close() for session in talks]
    return seen


@pytest.mark.parametrize("staleness", [1, None], ids=["one round apart", "asynchronous"])
def test_the_short_way_and_the_long_way_give_the_same_bits(group, staleness, monkeypatch):
    dies, taken = [False], {"short": 0, "client": 0}
    passing, apply, turn = client_session.passing, WholePush.apply, Session.push_pull_whole

    def dying(place):
        if dies[0] and place == "session: between servers":
            raise Died
        passing(place)

    def counted(push, step, weight):
        taken["short"] += 1
        apply(push, step, weight)

    def client(self, *args, **more):
        found = turn(self, *args, **more)
        taken["client"] += found is not None
        return found

    monkeypatch.setattr(client_session, "passing", dying)
    monkeypatch.setattr(WholePush, "apply", counted)
    monkeypatch.setattr(Session, "push_pull_whole", client)
    short = history(group, opened(group, "short", staleness, tabled=False), 5, dies)
    assert taken["client"] > 10
    used = dict(taken)
    monkeypatch.setattr(WholePush, "of", classmethod(lambda cls, *args: None))
    long = history(group, opened(group, "long", staleness, tabled=False), 5, dies)
    monkeypatch.setattr(Session, "push_pull_whole", lambda *args, **more: None)
    longest = history(group, opened(group, "longest", staleness, tabled=False), 5, dies)
    assert used["short"] > 0 or group.facts()["replicas"]  # what copies must hear goes the long way
    for one, two, three in zip(short, long, longest, strict=True):
        assert torch.equal(one, two) and torch.equal(one, three)


def test_several_requests_for_one_server_do_not_overwrite_each_other(group):
    """A push with tables and a dense part is two requests for a server: its mailbox holds one."""
    made = opened(group, "two", None)
    session = joined(group, made, 0, True)
    tables = Tables(session, made)
    server = GroupServer(session, extras=tables.pieces)
    for step in range(30):
        tables.begin(step)
        tables.clients["users"].gradient(torch.arange(8), torch.ones(8, 4))
        server.push(torch.zeros(SIZE))
        server.pull()
    assert server.step == 30
    session.close()


def test_pushes_of_several_rounds_are_repeated_in_order_and_before_new_ones():
    """A push that stands for all rounds since the one before would make an earlier one look as if it were known."""
    cluster, layout = Watched(), Layout.of([("w", torch.empty(SIZE))])
    with elastic.start(cluster, "spans", 2, 0, detached=False, balance=None) as group:
        made = group.open(Space("spans", 0, 1, Downpour(n_push=3), layout, cut(layout, 6), pack(plain_sgd)))
        begin = {i: state_of(torch.zeros(b - a), layout, a, marks=[0]) for i, (a, b) in enumerate(made.cuts)}

        def load(segments):
            session = Session(group.contact(), made, -1, timeout=SECONDS)
            session.exchange(GroupMessage.LOAD, {i: begin[i] for i in segments})
            session.close()

        load(begin)
        session = joined(group, made, 0, True)
        server = GroupServer(session, defer=False)
        for _ in range(4):
            server.push(torch.ones(SIZE), rounds=3)
        cluster.kill(cluster.actors["ServerActor", "server-1"])

        def lost():
            [space] = group.facts()["spaces"]
            return [each["index"] for each in space["segments"] if each["state"] == "lost" and each["primary"]]

        assert until(lost, SECONDS)
        gone = lost()
        load(gone)
        group.restored(made.number, gone)
        server.push(torch.ones(SIZE), rounds=3)
        assert torch.equal(server.read(), torch.full((SIZE,), -5.0))
        session.close()
    cluster.close()


def test_messages_that_arrive_with_the_memory_of_a_mailbox_are_served(group, monkeypatch):
    """A server that takes over offered memory reads its socket: the messages behind the offer must be served too."""
    made = opened(group, "behind", None, tabled=False)
    session = joined(group, made, 0, True)
    session.join()
    session.exchange(GroupMessage.PUSH, dict.fromkeys(range(made.segments), b""), step=0)
    sent, waiting, asked = threading.Event(), set(), Mailboxes.asked

    def asked_late(boxes):
        if boxes._open:  # not a server of another test that still ends
            waiting.add(boxes)
            assert sent.wait(SECONDS)
        return asked(boxes)

    monkeypatch.setattr(Mailboxes, "asked", asked_late)
    assert until(lambda: len(waiting) == 2, SECONDS)  # no server reads before all has left
    monkeypatch.setattr(session._connections, "fence", sent.set)  # the client calls it once all its requests have left
    session._connections.memory.retire()  # the next request offers other memory
    pushes = [
        SegmentRequest(
            GroupMessage.PUSH, step, 1.0, {i: np.zeros(4 * (b - a), np.uint8) for i, (a, b) in enumerate(made.cuts)}
        )
        for step in range(1, 6)
    ]
    session._run(pushes)
    assert read_numbers(session.exchange(GroupMessage.MARKS, {0: b""}).pieces[0])[0] == 6
    session.close()


def test_a_worker_does_not_sleep_when_it_has_received_a_message(group, monkeypatch):
    made = opened(group, "received", None, tabled=False)
    incarnation, slept = group.join(made.number, 0), []
    session = Session(group.contact(), made, 0, incarnation=incarnation, timeout=SECONDS, resident=False)

    def readable(line):  # a mailbox reads the link too, for memory that the server has offered
        wait = select.poll()  # `select.select` refuses descriptors above 1,023
        wait.register(line.link, select.POLLIN)
        wait.poll(100)
        line.link.absorb()
        return False

    class Poll:
        def __init__(self):
            self.register = (real := select.poll()).register
            self.poll = lambda most: (
                slept.append([line.link.head for line in session._connections.open.values()]) or real.poll(0)
            )

    monkeypatch.setattr(ServerConnection, "readable", property(readable))
    monkeypatch.setattr(connections, "select", SimpleNamespace(poll=Poll, POLLIN=select.POLLIN, POLLOUT=select.POLLOUT))
    for _ in range(3):
        assert torch.equal(GroupServer(session).pull(), torch.ones(SIZE))
    assert not any(any(each) for each in slept)
    session.close()


def test_a_connection_that_breaks_before_memory_is_offered_is_made_again(group):
    """The short way offers memory before it asks: what it finds broken there is no failure of the worker."""
    made = opened(group, "broken", None, tabled=False)
    session = joined(group, made, 0, True)
    server, out, law = GroupServer(session), torch.empty(SIZE), torch.ones(SIZE, requires_grad=True)
    optimizer = momentum([law])
    for step in range(4):
        law.grad = torch.full((SIZE,), -20.0 / WORKERS)
        optimizer.step()
        server.buffer(SIZE, torch.float32).fill_(-20.0)
        server.push(server.buffer(SIZE, torch.float32))
        assert torch.equal(server.pull(out=out), law), step
        for line in session._connections.open.values():
            line.link.hang_up()
        session._connections.memory.retire()
    assert server.step == 4
    session.close()


def test_a_gradient_in_the_buffer_is_not_copied_and_what_is_pulled_lands_where_it_is_told(group):
    made = opened(group, "buffer", None, tabled=False)
    session = joined(group, made, 0, True)
    server, out = GroupServer(session), torch.empty(SIZE)
    assert server.shares_memory
    gradient = server.buffer(SIZE, torch.float32)
    gradient.fill_(-20.0)
    server.push(gradient)
    gradient.fill_(-40.0)  # the push has not left yet: it is what lies there when it does
    assert server.pull(out=out) is out and torch.allclose(out, torch.full((SIZE,), 3.0))
    assert server.buffer(SIZE, torch.float64).dtype == torch.float64
    server.push(torch.full((SIZE,), -20.0, requires_grad=True))
    assert server.pull(out=out) is out and server.step == 2
    server.close(), session.close()  # twice does no harm
    assert gradient.sum() != 0  # what was given out stays good


def test_what_a_server_refuses_comes_as_an_error_and_the_mailbox_goes_on(group):
    made = opened(group, "refused", None)
    session = joined(group, made, 0, True)
    server, client = GroupServer(session), TableClient(session, made, "users")
    lookup = client.lookup(torch.tensor([3, 4]))
    bad = {i: client.session.allocate(24) for i in client.pull_pieces(lookup)}
    for piece in bad.values():
        piece[:24].view(np.int64)[:] = 5, 0, 0
    with pytest.raises(ConfigError, match="too short for 5 ids"):
        session.exchange(GroupMessage.PULL, bad, outputs=client.landing(lookup, client.room(lookup)))
    server.push(torch.zeros(SIZE))
    assert torch.equal(server.pull(), torch.ones(SIZE)) and client.fetch(lookup).shape == (2, 4)
    session.close()


def test_memory_that_a_server_may_still_write_to_is_not_used_again():
    memory = WorkerMemory()
    block = memory.allocate(100)
    assert memory.place(block) >= 0
    memory.retire()
    assert memory.place(block) < 0 and memory.place(memory.allocate(100)) >= 0
    memory.close()


def test_a_worker_that_gave_up_uses_other_memory(group):
    made = opened(group, "late", 0)
    session = joined(group, made, 0, True)
    session.timeout = 0.5
    server = GroupServer(session)
    server.push(torch.ones(SIZE))
    with pytest.raises(PeerTimeout, match="rank 1"):
        server.pull()
    other = joined(group, made, 1, True)
    there = GroupServer(other)
    there.push(torch.ones(SIZE))
    there.settle()
    assert torch.allclose(server.pull(), torch.full((SIZE,), 0.9))
    session.close(), other.close()


def test_blocks_are_given_back_with_their_last_user():
    memory = WorkerMemory()
    first = memory.allocate(1000)
    place, part = memory.place(first), first[10:20]
    del first
    gc.collect()
    second = memory.allocate(1000)
    assert memory.place(second) != place  # a part of the first is still in use
    del part
    gc.collect()
    assert memory.place(memory.allocate(1000)) == place
    large = memory.allocate(2 * CHUNK_BYTES)
    assert len(memory.chunks) == 2 and memory.place(large[5:]) == memory.place(large) + 5
    assert memory.place(np.zeros(8, np.uint8)) == -1
    memory.close()


def test_a_server_that_takes_no_mailbox_hears_messages():
    listener, memory = Listener("plain", SECRET), WorkerMemory()
    found = []
    thread = threading.Thread(target=lambda: until(lambda: found.append(listener.accept_ready()) or found[-1], SECONDS))
    thread.start()
    link = connect(listener.address, name="worker", secret=SECRET, generation=0, timeout=SECONDS)
    box = WorkerMailbox(link, memory)
    assert box.offer() and not box.ready and box.answered
    thread.join(SECONDS)
    box.close(), link.close(), found[-1].close(), listener.close(), memory.close()

"""Primaries and copies over real links: nothing that was answered is lost, nothing is applied twice."""

import pickle
import random
import threading
import time

import numpy as np
import pytest
import torch
from ps_site import SECONDS, SECRET, Site, space, values
from rayps_client.errors import LinkError
from torch.optim import SGD, Adam

from rayps.cluster.local import until
from rayps.comm.link import Listener, Message, connect
from rayps.ps.protocol.messages import GroupMessage, SegmentPayload, read_numbers
from rayps.ps.server.dense_segment import DenseSegment

SIZE = 12
START = torch.arange(float(SIZE))


def momentum(params):
    return SGD(params, lr=0.1, momentum=0.9)


def adam(params):
    return Adam(params, lr=0.01)


@pytest.fixture
def site():
    with Site("s0", "s1", "s2") as made:
        yield made


def grad(rank, step, size=SIZE // 3):
    return torch.randn(size, generator=torch.Generator().manual_seed(100 * step + rank)).numpy().tobytes()


def opened(site, primary="s0", copies=("s1",), **more):
    one = space(SIZE, 3, **more)
    site.open(one, [primary] * 3, copies=[list(copies)] * 3)
    site.load(one, [primary] * 3, START)
    return one


def pieces(rank, step, generation=1):
    return [SegmentPayload(i, generation, grad(3 * rank + i, step)) for i in range(3)]


def empty(generation=1):
    return [SegmentPayload(i, generation, b"") for i in range(3)]


def law(one, factory, pushes):
    """Naive: one segment after the other, in one process, each push once."""
    found = {}
    for i in range(3):
        segment = DenseSegment(one, i, factory)
        lo, hi = one.cuts[i]
        segment.shard.params.copy_(START[lo:hi])
        for rank, step in pushes:
            segment.push(rank, step, 1.0, memoryview(bytearray(grad(3 * rank + i, step))))
        found[i] = np.frombuffer(bytes(segment.read()), np.float32)
    return found


def promote(site, one, name, generation, copies=(), others=()):
    """`name` is the primary now; who has a copy hears so too."""
    site.manager.orders(name, one.number, [[i, "primary", generation, site.copies(*copies)] for i in range(3)])
    for other in copies:
        site.manager.orders(other, one.number, [[i, "copy", generation, {}] for i in range(3)])
    for other in others:
        site.manager.orders(other, one.number, [[i, "none", generation, {}] for i in range(3)])
    for i in range(3):
        site.manager.heard(name, "ready", one.number, i, generation, "")


def equal(site, one, first, *others):
    for i in range(3):
        for other in others:
            assert until(lambda i=i, other=other: site.segment(other, i).seq == site.segment(first, i).seq, SECONDS)
            assert site.segment(other, i).dump() == site.segment(first, i).dump()


@pytest.mark.parametrize("factory", [momentum, adam])
@pytest.mark.parametrize("staleness", [0, 2, None])
def test_copies_are_the_same_to_the_bit_while_workers_push_at_random(site, staleness, factory):
    one = opened(site, copies=("s1", "s2"), staleness=staleness, factory=factory, workers=3)
    seed = random.randrange(1 << 30)
    print("seed", seed)

    def work(rank):
        rng, guest = random.Random(seed + rank), site.guest("s0", rank=rank)
        for step in range(12):
            time.sleep(rng.random() * 0.004)
            assert guest.ask(GroupMessage.PUSH, pieces(rank, step), a=step, weight=1.0 + rank).kind == GroupMessage.ACK
            if rng.random() < 0.3:  # said again
                assert (
                    guest.ask(GroupMessage.PUSH, pieces(rank, step), a=step, weight=1.0 + rank).kind == GroupMessage.ACK
                )
            assert guest.ask(GroupMessage.PULL, empty(), a=step + 1).kind == GroupMessage.VALUE

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    equal(site, one, "s0", "s1", "s2")
    for i in range(3):
        assert site.segment("s0", i).marks() == dict.fromkeys(range(3), 12)
        assert site.segment("s0", i).version == (12 if staleness == 0 else 36)


def test_an_answer_waits_for_its_copies(site):
    """A copy that takes messages and says nothing, as a slow one: nothing is answered before it speaks."""
    one = opened(site, copies=(), staleness=None)
    quiet = Quiet(site)
    site.manager.orders("s0", 1, [[i, "primary", 1, {"quiet": quiet.address}] for i in range(3)])
    assert until(lambda: len(quiet.heard) == 3, SECONDS)
    worker = site.guest("s0", join=False)
    joining = worker.say(GroupMessage.JOIN, a=1, b=0, payload=b"")
    assert worker.silent()  # what it is told may be lost with this server as long as the copy has not got it
    quiet.acknowledge()
    assert worker.hear(joining).kind == GroupMessage.JOINED
    push = worker.say(GroupMessage.PUSH, pieces(0, 0), a=0, weight=1.0)
    pull = worker.say(GroupMessage.PULL, empty())
    assert until(lambda: len(quiet.heard) == 4, SECONDS)  # small changes go together
    assert worker.silent()
    quiet.acknowledge(upto=3)
    assert worker.silent()
    quiet.acknowledge()
    answer = worker.hear(push)
    assert (answer.kind, answer.weight) == (GroupMessage.ACK, 1.0)
    assert worker.hear(pull).kind == GroupMessage.VALUE
    for i in range(3):
        site.manager.heard("s0", "synced", 1, i, 1, "quiet")
    push = worker.say(GroupMessage.PUSH, pieces(0, 1), a=1, weight=1.0)
    quiet.close()
    for i in range(3):
        site.manager.heard("s0", "copy lost", 1, i, 1, "quiet")
    assert worker.silent()  # the manager alone may say that the copy does not count any more
    site.manager.orders("s0", 1, [[i, "primary", 1, {}] for i in range(3)])
    assert worker.hear(push).kind == GroupMessage.ACK
    assert values(worker.ask(GroupMessage.PULL, empty()))[0] == pytest.approx(
        law(one, lambda p: SGD(p, lr=0.1), [(0, 0), (0, 1)])[0]
    )


def test_a_value_is_of_the_moment_of_its_pull(site):
    """While it waits for the copy, other pushes change the parameters: it must not show what copies may not have."""
    opened(site, copies=(), staleness=None)
    quiet = Quiet(site)
    site.manager.orders("s0", 1, [[i, "primary", 1, {"quiet": quiet.address}] for i in range(3)])
    assert until(lambda: len(quiet.heard) == 3, SECONDS)
    quiet.acknowledge()
    one, other = site.guest("s0", rank=0), site.guest("s0", rank=1)
    both = one.say(GroupMessage.PUSH_PULL, pieces(0, 0), a=0, weight=1.0)
    assert until(lambda: len(quiet.heard) == 4, SECONDS)
    last = other.say(GroupMessage.PUSH_PULL, pieces(1, 0), a=0, weight=1.0)
    assert until(lambda: len(quiet.heard) == 5, SECONDS)
    quiet.acknowledge(upto=4)
    first = values(one.hear(both))
    assert other.silent()
    quiet.acknowledge()
    second = values(other.hear(last))
    assert not np.array_equal(first[0], second[0])
    assert np.allclose(first[0], np.arange(4) - 0.05 * np.frombuffer(grad(0, 0), np.float32))


@pytest.mark.parametrize("staleness", [0, None])
@pytest.mark.parametrize("trial", range(4))
def test_a_promotion_keeps_each_acknowledged_push_exactly_once(site, staleness, trial):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    one = opened(site, staleness=staleness, workers=2, factory=momentum)
    dies = rng.randrange(3, 15)
    acked, orders = {0: 0, 1: 0}, []
    guests = [site.guest("s0", rank=rank) for rank in range(2)]
    for turn in range(20):
        if turn == dies:
            unheard = rng.randrange(2)
            guests[unheard].say(GroupMessage.PUSH, pieces(unheard, acked[unheard]), a=acked[unheard], weight=1.0)
            time.sleep(rng.random() * 0.01)  # it may be applied, forwarded, or not
            site.kill("s0")
            promote(site, one, "s1", 2)
            guests = [site.guest("s1", rank=rank) for rank in range(2)]
            kept = [(rank, step) for rank in range(2) for step in range(acked[rank])]
            for rank, step in kept:  # whatever a client still keeps is said again
                assert (
                    guests[rank].ask(GroupMessage.PUSH, pieces(rank, step, 2), a=step, weight=1.0).kind
                    == GroupMessage.ACK
                )
        rank = turn % 2
        generation = 1 if turn < dies else 2
        answer = guests[rank].ask(GroupMessage.PUSH, pieces(rank, acked[rank], generation), a=acked[rank], weight=1.0)
        assert answer.kind == GroupMessage.ACK
        acked[rank] += 1
        orders.append((rank, acked[rank] - 1))
    segment = site.segment("s1", 0)
    assert segment.marks() == acked == {0: 10, 1: 10}
    assert segment.version == (10 if staleness == 0 else 20)
    if staleness == 0:
        expected = law(one, momentum, orders)
        for i in range(3):
            assert np.array_equal(values(guests[0].ask(GroupMessage.PULL, empty(2), a=10))[i], expected[i])


def test_a_segment_moves_while_it_is_pushed_to(site):
    """STATE, then changes, LEAVING, HANDED, the heir promoted: no push lost, none twice; the optimizer's state too."""
    one = opened(site, copies=(), staleness=None, workers=2, factory=momentum)
    where = {"name": "s0", "generation": 1}
    stop, done, log = threading.Event(), {0: 0, 1: 0}, []

    def work(rank):
        guests, step = {}, 0
        while not stop.is_set():
            name, generation = where["name"], where["generation"]
            if name not in guests:
                guests[name] = site.guest(name, rank=rank)
            answer = guests[name].ask(GroupMessage.PUSH, pieces(rank, step, generation), a=step, weight=1.0)
            if answer.kind == GroupMessage.ACK:
                log.append((rank, step, name))
                step += 1
            else:
                assert answer.kind == GroupMessage.STALE
                time.sleep(0.001)
        done[rank] = step

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    generation = 1
    for source, target in [("s0", "s1"), ("s1", "s2"), ("s2", "s0")]:
        assert until(lambda source=source: sum(name == source for _, _, name in log) > 20, SECONDS)
        if target not in ("s1", "s2"):
            site.manager.orders(target, 1, [[i, "none", generation, {}] for i in range(3)])
        site.manager.tell(target, GroupMessage.SPACE, pickle.dumps(one))
        site.manager.orders(target, 1, [[i, "copy", generation, {}] for i in range(3)])
        site.manager.orders(source, 1, [[i, "primary", generation, site.copies(target)] for i in range(3)])
        for i in range(3):
            site.manager.heard(source, "synced", 1, i, generation, target)
        site.manager.orders(source, 1, [[i, "leaving", generation, site.copies(target)] for i in range(3)])
        for i in range(3):
            site.manager.heard(source, "handed", 1, i, generation, "")
        generation += 1
        promote(site, one, target, generation, others=[source])
        where.update(name=target, generation=generation)
    assert until(lambda: sum(name == "s0" for _, _, name in log) > 60, SECONDS)
    stop.set()
    for thread in threads:
        thread.join(60)
    for i in range(3):
        segment = site.segment("s0", i)
        assert segment.marks() == done
        assert segment.version == sum(done.values())
        assert any(state for state in segment.shard.optimizer.moments().values())
    assert site.hosts["s1"]._assignments.spaces[1].by_index == {}


def test_a_fenced_primary_answers_nothing_and_changes_nothing(site):
    """It is alive, and the manager believes it dead: its copy is the primary now."""
    one = opened(site, staleness=None)
    old, new = site.guest("s0"), None
    assert old.ask(GroupMessage.PUSH, pieces(0, 0), a=0, weight=1.0).kind == GroupMessage.ACK
    promote(site, one, "s1", 2)
    tag = old.say(GroupMessage.PUSH, pieces(0, 1), a=1, weight=1.0)
    for i in range(3):
        site.manager.heard("s0", "copy lost", 1, i, 1, "s1")
    assert old.silent()
    assert site.segment("s1", 0).marks() == {0: 1, 1: 0}
    new = site.guest("s1")
    assert new.marks == {0: 1, 1: 1, 2: 1}
    assert new.ask(GroupMessage.PUSH, pieces(0, 1, 2), a=1, weight=1.0).kind == GroupMessage.ACK
    assert new.ask(GroupMessage.PUSH, pieces(0, 2, 2), a=2, weight=1.0).kind == GroupMessage.ACK
    # the old one comes back as a copy of the new one: what it alone applied is gone
    site.manager.orders("s0", 1, [[i, "copy", 2, {}] for i in range(3)])
    assert old.hear(tag).kind == GroupMessage.STALE
    site.manager.orders("s1", 1, [[i, "primary", 2, site.copies("s0")] for i in range(3)])
    for i in range(3):
        site.manager.heard("s1", "synced", 1, i, 2, "s0")
    equal(site, one, "s1", "s0")


def test_a_copy_that_has_heard_of_a_newer_generation_refuses_the_old_primary(site):
    opened(site, copies=("s1", "s2"), staleness=None)
    site.manager.orders("s2", 1, [[i, "copy", 2, {}] for i in range(3)])
    assert until(lambda: site.hosts["s2"]._assignments.spaces[1].by_index[2].generation == 2, SECONDS)
    worker = site.guest("s0")
    push = worker.say(GroupMessage.PUSH, pieces(0, 0), a=0, weight=1.0)
    for i in range(3):
        site.manager.heard("s0", "copy lost", 1, i, 1, "s2")
    assert worker.silent()
    assert site.segment("s2", 0).marks() == {0: 0, 1: 0}
    site.manager.orders("s0", 1, [[i, "primary", 1, site.copies("s1")] for i in range(3)])
    assert worker.hear(push).kind == GroupMessage.ACK


def test_a_copy_that_a_promotion_names_and_that_cannot_be_reached_is_waited_for(site):
    opened(site, staleness=None)
    with Listener("deaf", SECRET) as deaf:  # nobody takes its calls
        site.kill("s0")
        site.manager.orders("s1", 1, [[i, "primary", 2, {"deaf": deaf.address}] for i in range(3)])
        site.manager.heard("s1", "ready", 1, 2, 2, "")
        reader = site.guest("s1", rank=-1, join=False)
        joining = reader.say(GroupMessage.JOIN, a=1, b=-1, payload=b"")
        assert reader.silent()
        for i in range(3):
            site.manager.heard("s1", "copy lost", 1, i, 2, "deaf")
        assert reader.silent()
        site.manager.orders("s1", 1, [[i, "primary", 2, {}] for i in range(3)])
        assert reader.hear(joining).kind == GroupMessage.JOINED


def test_nothing_is_handed_over_before_the_copy_has_it(site):
    opened(site, copies=(), staleness=None)
    quiet = Quiet(site)
    site.manager.orders("s0", 1, [[i, "primary", 1, {"quiet": quiet.address}] for i in range(3)])
    assert until(lambda: len(quiet.heard) == 3, SECONDS)
    quiet.acknowledge()
    site.manager.heard("s0", "synced", 1, 2, 1, "quiet")
    worker = site.guest("s0")
    push = worker.say(GroupMessage.PUSH, pieces(0, 0), a=0, weight=1.0)
    assert until(lambda: len(quiet.heard) == 4, SECONDS)
    site.manager.orders("s0", 1, [[i, "leaving", 1, {"quiet": quiet.address}] for i in range(3)])
    assert until(lambda: site.hosts["s0"]._assignments.spaces[1].by_index[2].role == "leaving", SECONDS)
    assert read_numbers(worker.ask(GroupMessage.PUSH, pieces(0, 1), a=1, weight=1.0).payload) == [0, 1, 2]
    assert worker.silent()
    assert not any(what == "handed" for _, what, *_ in site.manager.facts)
    quiet.acknowledge()
    for i in range(3):
        site.manager.heard("s0", "handed", 1, i, 1, "")
    assert worker.hear(push).kind == GroupMessage.ACK  # it was applied, and the copy has it
    quiet.close()


def test_who_joins_a_primary_that_steps_down_hears_of_what_is_left(site):
    """JOINED waits for a copy of one segment; that segment's goes on elsewhere."""
    opened(site, copies=(), staleness=None)
    quiet = Quiet(site)
    site.manager.orders("s0", 1, [[1, "primary", 1, {"quiet": quiet.address}]])
    assert until(lambda: len(quiet.heard) == 1, SECONDS)
    worker = site.guest("s0", join=False)
    joining = worker.say(GroupMessage.JOIN, a=1, b=0, payload=b"")
    push = worker.say(GroupMessage.PUSH, pieces(0, 0), a=0, weight=1.0)
    assert worker.silent()
    site.manager.orders("s0", 1, [[1, "copy", 2, {}]])
    answer = worker.hear(joining)
    assert answer.kind == GroupMessage.JOINED
    assert read_numbers(answer.payload)[::2] == [0, 2]
    assert worker.hear(push).kind == GroupMessage.STALE
    quiet.close()


def test_a_primary_that_was_replaced_has_another_mark_though_it_has_as_many_changes(site):
    """Both have applied one change more than the other knows: their numbers agree, their parameters do not."""
    one = opened(site, staleness=None)
    old = site.guest("s0")
    assert old.ask(GroupMessage.PUSH, pieces(0, 0), a=0, weight=1.0).kind == GroupMessage.ACK
    site.manager.orders("s1", 1, [[i, "primary", 2, {}] for i in range(3)])
    site.manager.heard("s1", "ready", 1, 2, 2, "")
    old.say(GroupMessage.PUSH, pieces(0, 1), a=1, weight=1.0)
    new = site.guest("s1", rank=1)
    assert new.ask(GroupMessage.PUSH, pieces(1, 0, 2), a=0, weight=1.0).kind == GroupMessage.ACK
    assert until(lambda: site.segment("s0", 2).seq == site.segment("s1", 2).seq, SECONDS)
    assert site.segment("s0", 2).dump() != site.segment("s1", 2).dump()
    promote(site, one, "s1", 3, copies=["s0"])
    for i in range(3):
        site.manager.heard("s1", "synced", 1, i, 3, "s0")
    equal(site, one, "s1", "s0")


def test_a_heir_says_only_its_mark_to_who_has_everything(site):
    """After HANDED the old primary has what its heir has: it becomes a copy, and no state travels."""
    one = opened(site, copies=("s1", "s2"), staleness=None)
    worker = site.guest("s0")
    assert worker.ask(GroupMessage.PUSH, pieces(0, 0), a=0, weight=1.0).kind == GroupMessage.ACK
    site.manager.orders("s0", 1, [[i, "leaving", 1, site.copies("s1", "s2")] for i in range(3)])
    for i in range(3):
        site.manager.heard("s0", "handed", 1, i, 1, "")
    promote(site, one, "s1", 2, copies=["s0", "s2"])
    for i in range(3):
        for name in ("s0", "s2"):
            site.manager.heard("s1", "synced", 1, i, 2, name)
    assert site.hosts["s1"]._replication.bytes == 0
    worker = site.guest("s1")
    assert worker.ask(GroupMessage.PUSH, pieces(0, 1, 2), a=1, weight=1.0).kind == GroupMessage.ACK
    equal(site, one, "s1", "s0", "s2")
    late = site.guest("s0", rank=1)
    assert late.ask(GroupMessage.PUSH, pieces(1, 0, 1), a=0, weight=1.0).kind == GroupMessage.STALE


def test_the_copies_that_a_promotion_names_are_waited_for(site):
    """The manager counts them as complete from then on: no answer may leave before each has its state."""
    opened(site, staleness=None)
    quiet = Quiet(site)
    site.kill("s0")
    site.manager.orders("s1", 1, [[i, "primary", 2, {"quiet": quiet.address}] for i in range(3)])
    site.manager.heard("s1", "ready", 1, 2, 2, "")
    worker = site.guest("s1", join=False)
    joining = worker.say(GroupMessage.JOIN, a=1, b=0, payload=b"")
    pull = worker.say(GroupMessage.PULL, empty(2))
    assert until(lambda: len(quiet.heard) == 3, SECONDS)
    assert all(len(payload) == 16 for _, payload in quiet.heard)  # the marks
    assert worker.silent()
    quiet.refuse([0, 1, 2])
    assert until(lambda: len(quiet.heard) == 6, SECONDS)
    assert all(len(payload) > 16 for _, payload in quiet.heard[3:])
    quiet.acknowledge(upto=5)
    assert worker.silent()
    quiet.acknowledge()
    assert worker.hear(joining).kind == GroupMessage.JOINED
    assert worker.hear(pull).kind == GroupMessage.VALUE
    quiet.close()


def test_what_waits_for_the_clock_is_refused_when_its_segment_leaves(site):
    one = opened(site, staleness=0)
    worker = site.guest("s0")
    pull = worker.say(GroupMessage.PUSH_PULL, pieces(0, 0), a=0, weight=1.0)
    assert worker.silent()
    site.manager.orders("s0", 1, [[1, "leaving", 1, site.copies("s1")]])
    answer = worker.hear(pull)
    assert answer.kind == GroupMessage.STALE
    assert read_numbers(answer.payload) == [1]
    site.manager.heard("s0", "handed", 1, 1, 1, "")
    site.manager.orders("s1", 1, [[1, "primary", 2, {}]])
    site.manager.heard("s1", "ready", 1, 1, 2, "")
    moved = site.guest("s1")
    again = [SegmentPayload(1, 2, grad(1, 0))]
    tag = moved.say(GroupMessage.PUSH_PULL, again, a=0, weight=1.0)
    assert moved.silent()
    other, there = site.guest("s0", rank=1), site.guest("s1", rank=1)
    rest = [piece for piece in pieces(1, 0) if piece.segment != 1]
    assert other.ask(GroupMessage.PUSH, rest, a=0, weight=1.0).kind == GroupMessage.ACK
    assert there.ask(GroupMessage.PUSH, [SegmentPayload(1, 2, grad(4, 0))], a=0, weight=1.0).kind == GroupMessage.ACK
    expected = law(one, lambda p: SGD(p, lr=0.1), [(0, 0), (1, 0)])
    assert np.array_equal(values(moved.hear(tag))[1], expected[1])


def test_a_pull_after_a_promotion_waits_for_the_push_that_was_not_durable(site):
    one = opened(site, staleness=0)
    worker = site.guest("s0")
    assert (
        worker.ask(GroupMessage.PUSH, pieces(0, 0), a=0, weight=1.0).kind == GroupMessage.ACK
    )  # filed; the round is open
    site.kill("s0")
    promote(site, one, "s1", 2)
    worker = site.guest("s1")
    assert worker.marks == {0: 0, 1: 0, 2: 0}
    pull = worker.say(GroupMessage.PULL, empty(2), a=1)
    assert worker.silent()
    other = site.guest("s1", rank=1)
    assert other.ask(GroupMessage.PUSH, pieces(1, 0, 2), a=0, weight=1.0).kind == GroupMessage.ACK
    assert worker.silent()
    again = worker.say(GroupMessage.PUSH, pieces(0, 0, 2), a=0, weight=1.0)
    assert worker.hear(again).kind == GroupMessage.ACK
    assert worker.hear(pull).a == 1


def test_a_copy_of_what_nobody_loaded_is_not_served_either(site):
    one = space(SIZE, 3)
    site.open(one, ["s0"] * 3, copies=[["s1"]] * 3)
    site.kill("s0")
    promote(site, one, "s1", 2)
    worker = site.guest("s1")
    assert worker.marks == {}
    assert worker.ask(GroupMessage.PUSH, pieces(0, 0, 2), weight=1.0).kind == GroupMessage.STALE
    site.load(one, ["s1"] * 3, START, generation=2)
    assert worker.ask(GroupMessage.PUSH, pieces(0, 0, 2), weight=1.0).kind == GroupMessage.ACK


def test_a_copy_is_loaded_with_its_primary(site):
    one = opened(site, staleness=None)
    worker = site.guest("s0")
    assert worker.ask(GroupMessage.PUSH, pieces(0, 0), a=0, weight=1.0).kind == GroupMessage.ACK
    site.load(one, ["s0"] * 3, 2 * START)
    assert bytes(site.segment("s1", 2).read()) == (2 * START[8:]).numpy().tobytes()
    equal(site, one, "s0", "s1")


class Quiet:
    """A copy that hears, and says only what it is told to."""

    def __init__(self, site):
        self.listener = Listener("quiet", SECRET)
        self.address = self.listener.address
        self.heard, self._link, self._lock = [], None, threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._site = site

    def _run(self):
        self._link = self.listener.accept(0, SECONDS)
        while not self._closing.is_set():
            time.sleep(0.001)
            with self._lock:
                try:
                    self.heard += [(message, bytes(message.payload)) for message in self._link.feed()]
                except LinkError:
                    return

    def acknowledge(self, upto=None):
        with self._lock:
            self._link.send(Message(GroupMessage.COPIED, upto or self.heard[-1][0].tag), timeout=SECONDS)

    def refuse(self, segments):
        with self._lock:
            for message, _ in list(self.heard):
                if message.b in segments:
                    payload = np.array([message.b], np.int64).tobytes()
                    self._link.send(Message(GroupMessage.STALE, message.tag), payload, timeout=SECONDS)

    def close(self):
        self._closing.set()
        self._thread.join()
        if self._link is not None:
            self._link.close()
        self.listener.close()


def test_two_servers_that_call_each_other_at_once(site):
    """Each is primary of some segments and the copy of the others."""
    one = space(SIZE, 3, staleness=None)
    site.open(one, ["s0", "s1", "s2"], copies=[["s1", "s2"], ["s0", "s2"], ["s0", "s1"]])
    site.load(one, ["s0", "s1", "s2"], START)
    for i, name in enumerate(["s0", "s1", "s2"]):
        assert (
            site.guest(name).ask(GroupMessage.PUSH, [SegmentPayload(i, 1, grad(i, 0))], weight=1.0).kind
            == GroupMessage.ACK
        )
    for i, name in enumerate(["s0", "s1", "s2"]):
        for other in {"s0", "s1", "s2"} - {name}:
            assert site.segment(other, i).dump() == site.segment(name, i).dump()


def test_a_stranger_cannot_be_a_primary(site):
    """A change without the state before it is refused, and so is one of an older generation."""
    one = opened(site, staleness=None)
    twin = DenseSegment(one, 0, lambda p: SGD(p, lr=0.1))
    twin.load(site.segment("s0", 0).dump())
    (valid,) = twin.push(0, 0, 1.0, memoryview(bytearray(grad(0, 0))))
    link = connect(site.address("s1"), name="stranger", secret=SECRET, generation=0, timeout=SECONDS)
    change = site.segment("s0", 0)
    before = site.segment("s1", 0).dump()
    link.send(Message(GroupMessage.FORWARD, 1, 1, 0, 1.0), valid, timeout=SECONDS)
    assert link.recv(SECONDS).kind == GroupMessage.STALE
    link.recv(SECONDS)
    link.send(Message(GroupMessage.STATE, 2, 1, 0, 0.0), change.dump(), timeout=SECONDS)
    assert link.recv(SECONDS).kind == GroupMessage.STALE
    link.close()
    assert site.segment("s1", 0).dump() == before


def test_a_state_of_an_earlier_connection_does_not_replace_what_came_later(site):
    """The network delays a state; its primary connects again, sends a newer state and a change, and answers a push."""
    one = opened(site, staleness=None)
    twin = DenseSegment(one, 0, lambda p: SGD(p, lr=0.1))
    old = site.segment("s0", 0).dump()
    twin.load(old)
    (change,) = twin.push(0, 0, 1.0, memoryview(bytearray(grad(0, 0))))
    earlier, later = (
        connect(site.address("s1"), name="s0", secret=SECRET, generation=0, timeout=SECONDS) for _ in range(2)
    )
    first = 100  # above the tags of the connection that `opened` made
    for tag, kind, payload in ((first + 1, GroupMessage.STATE, old), (first + 2, GroupMessage.FORWARD, change)):
        later.send(Message(kind, tag, 1, 0, 1.0), payload, timeout=SECONDS)
        assert later.recv(SECONDS).kind == GroupMessage.COPIED
    assert site.segment("s1", 0).dump() == twin.dump()
    earlier.send(Message(GroupMessage.STATE, first, 1, 0, 1.0), old, timeout=SECONDS)
    assert earlier.recv(SECONDS).kind == GroupMessage.STALE
    assert site.segment("s1", 0).dump() == twin.dump()
    earlier.close()
    later.close()

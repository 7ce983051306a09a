"""Decisions about a server group, without threads: a world of servers that say what real ones say, in any order.

The world knows what each server has of each segment, as a number that pushes count up. What is acknowledged is what
the primary and all copies have that it must wait for, as the protocol says; so a promotion that loses an acknowledged
push is seen.
"""

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from rayps.ps.manager import assign_segments as module
from rayps.ps.manager.assign_segments import (
    BOUND,
    DropCopy,
    GroupFacts,
    HandOver,
    LeaveServer,
    PlaceSegment,
    Promote,
    RetireServer,
    SegmentAssignment,
    ServerFacts,
    ServerState,
    StartCopy,
    StartServers,
    apply,
    apply_report,
    choose_targets,
    decide,
    settled,
)
from rayps.ps.protocol.messages import Event, Role

UP = (ServerState.ALIVE, ServerState.LEAVING)


def group(servers, segments=8, replicas=1, wanted=None, hosts=None, **more):
    """Facts of a group whose segments are not placed yet."""
    named = tuple(ServerFacts(f"server-{i}", (hosts or ["here"] * servers)[i]) for i in range(servers))
    seats = tuple(SegmentAssignment(1, i, f"job/{i}") for i in range(segments))
    return GroupFacts(named, seats, servers if wanted is None else wanted, replicas, **more)


class Copyist:
    """What one server has of one segment."""

    def __init__(self, role, generation, value=0):
        self.role, self.generation, self.value = role, generation, value
        self.copies, self.has = (), set()  # of a primary: whom it must keep, and who has all
        self.must = set()  # whom it waits for before it answers anything


class World:
    """Servers, what they have, and the facts that a manager would know."""

    def __init__(self, servers, segments=8, replicas=1, rng=None, branch=False):
        self.rng = rng or random.Random(0)
        self.states = {f"server-{i}": ServerState.ALIVE for i in range(servers)}
        self.hosts = {name: self.rng.choice("abc") for name in self.states}
        self.seats = {(1, i): SegmentAssignment(1, i, f"job/{i}") for i in range(segments)}
        if branch:
            self.seats |= {(2, i): SegmentAssignment(2, i, f"job/{i}", parent=(1, i)) for i in range(segments)}
        self.wanted, self.replicas, self.next = servers, replicas, servers
        self.starting = []
        self.have = {name: {} for name in self.states}  # by server, by seat
        self.acked = dict.fromkeys(self.seats, 0)
        self.lost = set()
        self.most_busy = 0
        self.generations = dict.fromkeys(self.seats, 0)

    def facts(self):
        servers = tuple(ServerFacts(name, self.hosts[name], state) for name, state in self.states.items())
        return GroupFacts(servers, tuple(self.seats.values()), self.wanted, self.replicas, len(self.starting))

    # ---- the manager's side

    def think(self):
        """Decide until there is nothing to decide, and tell everyone."""
        for _ in range(50):
            decisions = decide(self.facts())
            if not decisions:
                break
            assert len({d.segment for d in decisions if hasattr(d, "segment")}) == sum(
                hasattr(d, "segment") for d in decisions
            )
            for decision in decisions:
                self.do(decision)
        else:
            raise AssertionError(f"no end: {decisions}")
        self.order()
        self.check()

    def do(self, decision):
        match decision:
            case StartServers(count):
                assert count > 0
                for _ in range(count):
                    self.starting.append(f"server-{self.next}")
                    self.next += 1
            case LeaveServer(name):
                assert self.states[name] == ServerState.ALIVE
                self.states[name] = ServerState.LEAVING
            case RetireServer(name):
                assert not any(name in (*seat.holders, seat.successor) for seat in self.seats.values()), "not empty"
                del self.states[name]
                del self.have[name]
            case _:
                before = self.seats[decision.segment]
                if isinstance(decision, Promote) and decision.reason != "back":
                    assert decision.server in before.synced, "promoted although it is not in sync"
                    assert self.states[decision.server] in UP
                if isinstance(decision, (StartCopy, HandOver, PlaceSegment)):
                    assert self.states[decision.server] in UP
                if isinstance(decision, PlaceSegment) and decision.lost:
                    self.lost.add(decision.segment)
                    self.acked[decision.segment] = 0
                after = self.seats[decision.segment] = apply(before, decision)
                if after.primary != before.primary or isinstance(decision, Promote):
                    assert after.generation > before.generation

    def order(self):
        """Every server learns what it is to be."""
        for name, mine in self.have.items():
            if self.states[name] not in UP:
                continue
            for seat in self.seats.values():
                role, now = seat.role(name), mine.get(seat.id)
                if role == Role.NONE:
                    mine.pop(seat.id, None)
                elif role == Role.COPY:
                    if now is None:
                        mine[seat.id] = Copyist(role, -1)  # nothing yet
                    elif now.role != Role.COPY:
                        now.role = Role.COPY
                else:
                    self.lead(mine, seat, role)

    def lead(self, mine, seat, role):
        now = mine.get(seat.id)
        if now is None:
            now = mine[seat.id] = Copyist(role, seat.generation)
        if now.generation != seat.generation or now.role == Role.COPY:
            now.generation, now.has = seat.generation, set()
            now.must = set(seat.copies)  # a new generation answers nothing before these have all
        now.role, now.copies = role, seat.copies
        now.has &= set(seat.copies)
        now.must &= set(seat.copies)

    def check(self):
        primaries = Counter()
        for name, mine in self.have.items():
            for id_, one in mine.items():
                serves = one.role == Role.PRIMARY and one.generation == self.seats[id_].generation
                primaries[id_] += serves and self.states[name] in UP
        assert all(count <= 1 for count in primaries.values()), "two primaries"
        busy = Counter()
        for seat in self.seats.values():
            assert len(set(seat.holders)) == len(seat.holders)
            assert seat.synced <= set(seat.copies)
            assert seat.generation >= self.generations[seat.id]
            self.generations[seat.id] = seat.generation
            if seat.unsynced or seat.successor:
                busy.update([seat.primary, *seat.unsynced])
        self.most_busy = max([self.most_busy, *busy.values()])

    # ---- the servers' side

    def serving(self):
        return [
            (name, id_, one)
            for name, mine in self.have.items()
            for id_, one in mine.items()
            if self.states[name] in UP
            and self.seats[id_].primary == name
            and one.generation == self.seats[id_].generation
        ]

    def step(self):
        """Something happens by itself, and is reported at once; False = nothing can."""
        can = [lambda: self.arrive()] if self.starting else []
        for name, id_, one in self.serving():
            seat = self.seats[id_]
            if not seat.ready:
                can.append(lambda name=name, id_=id_: self.report(name, id_, Event.READY))
            for copy in one.copies:
                if self.states.get(copy) in UP and (copy not in one.has or copy not in seat.synced):
                    can.append(lambda name=name, id_=id_, copy=copy: self.copied(name, id_, copy))
            if one.role == Role.LEAVING and not seat.handed and one.has >= set(one.copies):
                can.append(lambda name=name, id_=id_: self.report(name, id_, Event.HANDED))
        if not can:
            return False
        self.rng.choice(can)()
        return True

    def arrive(self):
        name = self.starting.pop(0)
        self.states[name], self.have[name], self.hosts[name] = ServerState.ALIVE, {}, self.rng.choice("abc")

    def copied(self, name, id_, copy):
        one, other = self.have[name][id_], self.have[copy].get(id_)
        if other is not None and other.role == Role.COPY:
            other.generation, other.value = one.generation, one.value
            one.has.add(copy)
            one.must.discard(copy)
            self.report(name, id_, Event.SYNCED, copy)

    def report(self, name, id_, event, about=""):
        self.seats[id_] = apply_report(self.seats[id_], name, event, self.have[name][id_].generation, about)

    def push(self):
        """A push arrives somewhere, is forwarded to who began, and acknowledged if it may be."""
        serving = [item for item in self.serving() if item[2].role == Role.PRIMARY]
        if serving:
            _, id_, one = self.rng.choice(serving)
            one.value += 1
            reach = [copy for copy in one.has if self.states.get(copy) in UP]
            for copy in reach:
                if id_ in self.have[copy]:
                    self.have[copy][id_].value = one.value
            if not one.must and set(reach) == one.has:
                self.acked[id_] = one.value

    def fail(self, state):
        """A server dies, or says nothing."""
        name = self.rng.choice([name for name, now in self.states.items() if now in UP])
        self.states[name] = state
        if state == ServerState.DEAD:
            self.have[name] = {}

    def settle(self):
        for _ in range(3000):
            self.think()
            if self.rng.random() < 0.3:
                self.push()
            if not self.step():
                self.think()
                if not self.step():
                    return
        raise AssertionError("it does not settle")

    def kept(self):
        """Whether every acknowledged push is in the primary."""
        for seat in self.seats.values():
            assert self.have[seat.primary][seat.id].value >= self.acked[seat.id], seat


def check_settled(world):
    facts = world.facts()
    assert settled(facts), decide(facts)
    alive = [name for name, state in world.states.items() if state == ServerState.ALIVE]
    assert len(alive) == len(world.states) == world.wanted
    placed = choose_targets(facts)
    for seat in world.seats.values():
        assert seat.primary == placed[seat.id][0] and set(seat.copies) == set(placed[seat.id][1:]) == seat.synced
        assert len(seat.copies) == min(world.replicas, len(alive) - 1)
        assert {name for name, mine in world.have.items() if seat.id in mine} == set(seat.holders)
    world.kept()


FAST = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@seed(4)
@FAST
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(0, 2), st.booleans())
def test_any_history_settles_and_keeps_what_is_acknowledged(number, servers, replicas, branch):
    """One failure at a time, at any moment of placing, copying, moving, resizing; silent servers come back."""
    rng = random.Random(number)
    world = World(servers, replicas=replicas, rng=rng, branch=branch)
    for _ in range(rng.randrange(1, 5)):
        for _ in range(rng.randrange(60)):
            world.think()
            world.push()
            world.step()
        what = rng.random()
        alive = sum(state in UP for state in world.states.values())
        if what < 0.4:
            world.wanted = rng.randrange(1, 6)
        elif what < 0.7 and alive > 1:
            world.fail(ServerState.DEAD)
            world.think()
            world.settle()  # one failure at a time: without copies for the next one something is lost, and rightly
        elif alive > 1:
            world.fail(ServerState.SILENT)
            for _ in range(rng.randrange(40)):
                world.think()
                world.push()
                world.step()
            world.states = {
                name: ServerState.ALIVE if state == ServerState.SILENT else state
                for name, state in world.states.items()
            }
    world.settle()
    check_settled(world)
    if replicas and not branch:
        assert not {id_ for id_ in world.lost if world.acked[id_]} or servers == 1
    assert world.most_busy <= 4 + 1  # a promotion may add to what is under way


@seed(5)
@FAST
@given(st.integers(0, 10**6), st.integers(1, 2))
def test_one_death_at_any_moment_loses_nothing(number, replicas):
    rng = random.Random(number)
    world = World(4, replicas=replicas, rng=rng)
    world.settle()
    world.wanted = rng.choice([3, 4, 5, 6])
    for _ in range(rng.randrange(200)):
        world.think()
        world.push()
        world.step()
    world.fail(ServerState.DEAD)
    world.settle()
    check_settled(world)
    assert not world.lost


def test_a_promotion_of_who_is_not_in_sync_would_be_seen(monkeypatch):
    """The world can tell: a decision that takes any copy loses acknowledged pushes."""
    monkeypatch.setattr(
        module._SegmentDecisions,
        "_list_in_sync",
        lambda self, seat: tuple(copy for copy in seat.copies if not self._is_gone(copy)),
    )
    seen = 0
    for number in range(60):
        rng = random.Random(number)
        world = World(4, replicas=2, rng=rng)
        try:
            for _ in range(rng.randrange(10, 30)):
                world.think()
                world.push()
                world.step()
            world.fail(ServerState.DEAD)
            world.settle()
            world.kept()
        except AssertionError:
            seen += 1
    assert seen > 5


def test_everything_is_placed_at_once_and_copied_a_few_at_a_time():
    facts = group(3, segments=24)
    first = decide(facts)
    assert all(isinstance(decision, PlaceSegment) for decision in first) and len(first) == 24
    world = World(3, segments=24)
    world.settle()
    counts = Counter(seat.primary for seat in world.seats.values())
    assert max(counts.values()) <= -(-24 * BOUND // 3)
    assert world.most_busy == 4  # missing copies: `heals`


def test_moves_are_fewer_at_a_time_than_missing_copies():
    world = World(3, segments=48)
    world.settle()
    world.most_busy, world.wanted = 0, 5
    world.settle()
    assert world.most_busy == 2
    check_settled(world)


def test_with_no_server_nothing_is_decided_but_to_start_some():
    assert decide(GroupFacts((), (SegmentAssignment(1, 0, "job/0"),), 2, 1)) == [StartServers(2)]
    assert decide(GroupFacts((), (), 2, 1, starting=2)) == []


def one_seat(**more):
    return SegmentAssignment(1, 0, "job/0", primary="a", generation=3, started=True, ready=True, **more)


def of(seat, states, replicas=1, **more):
    servers = tuple(ServerFacts(name, name, state) for name, state in states.items())
    wanted = sum(state != ServerState.DEAD for state in states.values())
    return [d for d in decide(GroupFacts(servers, (seat,), wanted, replicas, **more)) if hasattr(d, "segment")]


def test_a_dead_primarys_copy_is_promoted_and_a_copy_in_the_making_is_not():
    seat = apply(one_seat(copies=("b",), synced=frozenset("b")), StartCopy((1, 0), "c"))
    dead = {"a": ServerState.DEAD, "b": ServerState.ALIVE, "c": ServerState.ALIVE}
    assert of(seat, dead) == [Promote((1, 0), "b", (), "died")]
    assert of(seat, dead | {"a": ServerState.SILENT}) == [Promote((1, 0), "b", (), "died")]
    assert of(seat, dead | {"b": ServerState.AWAY}) == []  # the manager has just begun again: it may come
    assert isinstance(of(seat, dead | {"b": ServerState.DEAD})[0], PlaceSegment)
    assert of(seat, dead | {"b": ServerState.DEAD})[0].lost
    assert (
        of(seat, dead | {"a": ServerState.SILENT, "b": ServerState.DEAD}) == []
    )  # only it has the segment: it may speak again
    assert of(seat, dead | {"a": ServerState.AWAY}) == []


def test_who_is_gone_is_left_out_of_the_copies_at_once():
    seat = one_seat(copies=("b",), synced=frozenset("b"))
    for state in (ServerState.SILENT, ServerState.DEAD):
        assert of(seat, {"a": ServerState.ALIVE, "b": state, "c": ServerState.ALIVE}) == [DropCopy((1, 0), "b")]


def test_a_handing_over_ends_with_a_promotion_or_goes_back():
    seat = one_seat(copies=("b", "c"), synced=frozenset("bc"), successor="b")
    up = {"a": ServerState.LEAVING, "b": ServerState.ALIVE, "c": ServerState.ALIVE}
    assert of(seat, up) == []
    handed = apply_report(seat, "a", Event.HANDED, 3, "")
    assert of(handed, up) == [Promote((1, 0), "b", ("c",), "moved")]
    assert of(handed, up | {"b": ServerState.DEAD}) == [Promote((1, 0), "a", ("c",), "back")]
    assert of(seat, up | {"b": ServerState.SILENT}) == [Promote((1, 0), "a", ("c",), "back")]
    assert of(seat, up | {"a": ServerState.DEAD})[0].reason == "died"
    assert apply_report(seat, "b", Event.HANDED, 3, "") is seat and apply_report(seat, "a", Event.HANDED, 2, "") is seat


def test_a_copy_waits_until_its_server_has_dropped_the_last_one():
    """The order to drop it would otherwise reach the server after the new copy, and drop that one."""
    seat = one_seat()
    alive = {"a": ServerState.ALIVE, "b": ServerState.ALIVE}
    assert of(seat, alive) == [StartCopy(seat.id, "b")]
    assert of(seat, alive, dropping=frozenset({(seat.id, "b")})) == []
    assert of(seat, alive, dropping=frozenset({((1, 9), "b")})) == [StartCopy(seat.id, "b")]


def test_a_copy_that_failed_just_now_waits():
    seat = one_seat()
    up = {"a": ServerState.ALIVE, "b": ServerState.ALIVE}
    first = choose_targets(GroupFacts((ServerFacts("a", "a"), ServerFacts("b", "b")), (seat,), 2, 1))[1, 0][0]
    assert of(seat, up) == [StartCopy((1, 0), "b")]
    assert of(seat, up, failed_copies=frozenset({("a", "b")})) == []
    assert first in ("a", "b")


def test_whole_segments_wait_for_servers_that_are_on_their_way():
    world = World(2, segments=16)
    world.settle()
    facts = world.facts()
    more = (*facts.servers, ServerFacts("server-2", "b"))
    grown = GroupFacts(more, facts.segments, 4, 1, starting=1)
    assert any(isinstance(d, StartCopy) for d in decide(grown))
    assert decide(GroupFacts(more, facts.segments, 4, 1, starting=1, gathering=True)) == []


def test_reports_that_are_old_change_nothing():
    seat = one_seat(copies=("b",))
    for reporter, event, generation, name in (
        ("a", Event.SYNCED, 2, "b"),
        ("b", Event.SYNCED, 3, "b"),
        ("a", Event.SYNCED, 3, "z"),
        ("a", Event.COPY_LOST, 3, "z"),
        ("a", "nonsense", 3, "b"),
        ("z", Event.ASKED, 3, ""),
    ):
        assert apply_report(seat, reporter, event, generation, name) is seat
    assert apply_report(seat, "a", Event.SYNCED, 3, "b").synced == {"b"}


def test_the_load_may_place_a_primary_elsewhere():
    facts = group(3)
    first = choose_targets(facts)[1, 0]
    other = next(server.name for server in facts.servers if server.name != first[0])
    placed = {(1, 0): other, (1, 1): "server-77"}
    moved = choose_targets(GroupFacts(facts.servers, facts.segments, 3, 1, placed_by_load=placed))
    assert moved[1, 0][0] == other and len(set(moved[1, 0])) == 2
    assert moved[1, 1] == choose_targets(facts)[1, 1]


@pytest.mark.parametrize("servers", [2, 3, 4, 8])
def test_a_server_more_moves_about_its_share(servers):
    shares = []
    for number in range(20):
        named = [ServerFacts(f"server-{i}") for i in range(servers + 1)]
        seats = tuple(SegmentAssignment(1, i, f"job-{number}/{i}") for i in range(32))
        before = choose_targets(GroupFacts(tuple(named[:-1]), seats, servers, 0))
        after = choose_targets(GroupFacts(tuple(named), seats, servers + 1, 0))
        shares.append(sum(before[id_] != after[id_] for id_ in before) / 32)
    share = sum(shares) / len(shares)
    print(f"{servers} -> {servers + 1}: {share:.3f} of the segments move; 1/n is {1 / (servers + 1):.3f}")
    assert 0.7 / (servers + 1) < share < 1.5 / (servers + 1)

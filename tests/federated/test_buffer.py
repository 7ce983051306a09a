"""FedBuff's events on the virtual clock: against events written by hand and a plain loop, resumed anywhere."""

import heapq
import json

import numpy as np
import pytest
from rayps_client.errors import ConfigError, TrainingError

from rayps.federated.population.async_events import AsyncBuffer
from rayps.federated.population.cohort import hashes
from rayps.federated.population.events import clock_at
from rayps.federated.population.population import Population
from rayps.federated.simulated_rounds import events_of
from rayps.strategies.fedavg import FedAvg
from rayps.strategies.fedbuff import FedBuff


def play(buffer, rounds, state=None, begin=0):
    plans, state = [], clock_at() if state is None else state
    for t in range(begin, begin + rounds):
        plan, state = buffer.round(t, state)
        plans.append(plan)
    return plans, state


def short(plan):
    """(client, version, staleness, end) of each update."""
    return [(each.client, each.version, each.staleness, each.end) for each in plan.trainings]


def test_events_by_hand():
    """Clients 0, 1, 2 take 2, 3 and 7 seconds; all three train always; two updates fill the buffer.

    time 0   all begin from version 0
    time 2   0 is done; nobody is free that has not begun from version 0
    time 3   1 is done: version 1; 0 and 1 begin from it
    time 5   0 is done (tau 0)
    time 6   1 is done (tau 0): version 2; both begin
    time 7   2 is done with version 0 (tau 2), begins again, from version 2
    time 8   0 is done (tau 0): version 3; 0 begins
    time 9   1 is done with version 2 (tau 1), begins; time 10: 0 is done (tau 0): version 4
    """
    plans, state = play(AsyncBuffer(Population(0, [1] * 3, speed=[2, 3, 7]), 2, 3), 4)
    assert [short(plan) for plan in plans] == [
        [(0, 0, 0, 2.0), (1, 0, 0, 3.0)],
        [(0, 1, 0, 5.0), (1, 1, 0, 6.0)],
        [(2, 0, 2, 7.0), (0, 2, 0, 8.0)],
        [(1, 2, 1, 9.0), (0, 3, 0, 10.0)],
    ]
    assert [plan.staleness for plan in plans] == [{0: 2}, {0: 2}, {0: 1, 2: 1}, {0: 1, 1: 1}]
    assert [plan.needed for plan in plans] == [(0,), (0,), (2,), (2, 3)]
    assert [(plan.begin, plan.end) for plan in plans] == [(0, 3), (3, 6), (6, 8), (8, 10)]
    assert [sorted(state[1:, 2].tolist()), state[0, 0]] == [[1, 2], 10_000_000]


def test_an_update_that_is_too_old_is_dropped_and_named():
    plans, _ = play(AsyncBuffer(Population(0, [1] * 3, speed=[2, 3, 7]), 2, 3, max_staleness=1), 4)
    assert plans[2].dropped == [(2, "stale")] and plans[3].dropped == []
    kept, _ = play(
        AsyncBuffer(Population(0, [1] * 3, speed=[2, 3, 7]), 2, 3, max_staleness=2), 4
    )  # one that is as old as may be
    assert short(kept[2]) == [(2, 0, 2, 7.0), (0, 2, 0, 8.0)] and kept[2].dropped == []
    assert all(each.staleness <= 1 for plan in plans for each in plan.trainings)


@pytest.mark.parametrize("speed", [1, "lognormal(sigma=1,jitter=0.5)"])
def test_all_clients_at_once_and_in_one_buffer_are_rounds_of_fedavg(speed):
    world = Population(3, [5 + k for k in range(9)], speed=speed)
    plans, _ = play(AsyncBuffer(world, 9, 9), 5)
    now = 0.0
    for t, plan in enumerate(plans):
        sync = world.round(t, now)
        assert sorted(each.client for each in plan.trainings) == sync.trains.tolist() == list(range(9))
        assert {(each.version, each.staleness, each.again) for each in plan.trainings} == {(t, 0, 0)}
        assert (plan.begin, plan.end, plan.needed) == (sync.begin, sync.end, ())
        now = sync.end


def test_who_drops_out_begins_again_where_nobody_else_can():
    plans, _ = play(AsyncBuffer(Population(1, [1] * 4, dropout=0.5, speed=[1, 2, 3, 4]), 4, 4), 40)
    for plan in plans:
        assert len(plan.trainings) == 4 and {reason for _, reason in plan.dropped} <= {"dropout"}
        keys = [(each.client, each.version, each.again) for each in plan.trainings]
        assert len(set(keys)) == 4
    assert any(each.again for plan in plans for each in plan.trainings)


def naive(order, durations, size, concurrency, rounds):
    """The algorithm as it is told, on lists: each round's (client, version) in the order of arrival."""
    now, flight, found = 0, [], []
    for t in range(rounds):
        begun, got = set(), []
        while len(got) < size:
            for client in order[t]:
                if len(flight) < concurrency and client not in begun and client not in [f[1] for f in flight]:
                    heapq.heappush(flight, (now + durations[client], client, t))
                    begun.add(client)
            now = flight[0][0]
            while flight and flight[0][0] == now and len(got) < size:
                _, client, version = heapq.heappop(flight)
                got.append((client, version))
        found.append(got)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_events_equal_a_plain_loop(seed):
    rng = np.random.default_rng(seed)
    seconds = rng.permutation(30) + rng.random(30)  # no two ends at one moment
    size, concurrency = int(rng.integers(1, 8)), int(rng.integers(5, 20))
    print("seed", seed, "size", size, "concurrency", concurrency)
    world = Population(seed, [1] * 30, speed=seconds.tolist())
    plans, _ = play(AsyncBuffer(world, size, concurrency), 25)
    everyone = np.arange(30)
    order = [everyone[np.argsort(hashes(seed, "cohort", everyone, t))].tolist() for t in range(25)]
    exact = np.rint(np.array(seconds) * 1e6).astype(int).tolist()
    assert [[(each.client, each.version) for each in plan.trainings] for plan in plans] == naive(
        order, exact, size, concurrency, 25
    )
    assert len({each.staleness for plan in plans for each in plan.trainings}) > 2


HARD = {"speed": "lognormal(sigma=1)", "dropout": 0.2, "available": "diurnal(share=0.5,day=3)", "deadline": 1.5}


def test_a_run_goes_on_from_any_round_and_keeps_its_promises():
    def buffer():
        return AsyncBuffer(Population(5, [300 + 9 * k for k in range(40)], **HARD), 5, 12, max_staleness=6)

    plans, end = play(buffer(), 30)
    assert {"dropout", "offline", "deadline"} <= {reason for plan in plans for _, reason in plan.dropped}
    for cut in (1, 7, 20):
        _, state = play(buffer(), cut)
        rest, again = play(buffer(), 30 - cut, np.asarray(json.loads(json.dumps(state.tolist()))), cut)
        assert [(plan.trainings, plan.dropped, plan.end) for plan in rest] == [
            (plan.trainings, plan.dropped, plan.end) for plan in plans[cut:]
        ]
        assert again.tolist() == end.tolist()
    kept = set()
    for plan in plans:  # whatever is trained from was still kept
        kept |= {plan.round}
        assert {each.version for each in plan.trainings} <= kept
        kept = set(plan.needed)
    assert len(end) <= 13
    assert any(plan.staleness != {0: 5} for plan in plans)


def test_nobody_is_there_for_a_while():
    world = Population(
        0, [10] * 2, speed=1, available={"name": "trace", "intervals": [[[30, 50]], [[40, 60]]], "period": 100}
    )
    plans, _ = play(AsyncBuffer(world, 1, 2), 3)
    assert short(plans[0]) == [(0, 0, 0, 40.0)] and plans[0].waited == 30
    assert [each.end for plan in plans for each in plan.trainings] == [40.0, 50.0, 50.0]
    late, _ = AsyncBuffer(world, 1, 2).round(0, clock_at(60))
    assert short(late) == [(0, 0, 0, 140.0)] and late.waited == 70


def test_a_buffer_that_can_never_fill_says_so():
    with pytest.raises(TrainingError, match=r"by offline.*`deadline`, `available`"):
        short_days = {"name": "trace", "intervals": [[[0, 5]]], "period": 10}
        AsyncBuffer(Population(0, [10], speed=1, available=short_days), 1).round(0, clock_at())
    with pytest.raises(TrainingError, match="none of 1 clients"):
        AsyncBuffer(Population(0, [10], speed=1, available=[[[0, 5]]]), 1).round(0, clock_at())
    with pytest.raises(ConfigError, match="at most"):
        AsyncBuffer(Population(0, [1] * 3), 2, 4)


def test_a_hundred_thousand_clients():
    plans, state = play(AsyncBuffer(Population(0, [10] * 100_000, speed="lognormal"), 100, 1000), 5)
    assert len(state) == 1000 and sum(len(plan.trainings) for plan in plans) == 500


@pytest.mark.parametrize(
    ("options", "work"),
    [
        ({"local_epochs": 3}, [30, 90]),
        ({"local_steps": 4, "batch_size": 5}, [20, 20]),
        ({}, [10, 30]),
        ({"local_steps": 2}, [20, 40]),
        ({"local_steps": 2, "batch_size": 0}, [20, 60]),
    ],
)
def test_events_of_a_strategy(options, work):
    """Clients of 10 and 30 samples, batches of 20: a training is as long as its samples."""
    events = events_of(FedAvg(speed=1.0, **options).federation, [10, 30], 0, 20)
    plan, clock = events.round(0, clock_at(5))
    assert [each.end for each in plan.trainings] == [5 + samples for samples in work]
    assert (clock.tolist()[0][0], clock.shape) == ((5 + max(work)) * 1_000_000, (1, 7))
    strategy = FedBuff(speed=1.0, buffer=1, concurrency=2, **options)
    plan, clock = events_of(strategy.federation, [10, 30], 0, 20).round(0, clock_at(5))
    assert [each.end for each in plan.trainings] == [5 + min(work)] and clock.shape == (2, 7)

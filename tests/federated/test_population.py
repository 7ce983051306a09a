"""Cohorts, packing and the virtual clock: against hand-written events, by statistics, and the same on every host."""

import json
import statistics

import numpy as np
import pytest
from rayps_client.errors import ConfigError, TrainingError

from rayps.federated.population import options as options_module
from rayps.federated.population.cohort import cohort, cohort_size, hashes, home_ranks, normals, pack, uniforms
from rayps.federated.population.population import Population

KNOWN = [[0, 5, 14, 15, 19], [26216, 27747, 34564, 40586, 47560]]
EVERYONE = np.arange(100_000, dtype=np.int64)


def told(plan):
    """A plan as plain data."""
    return {
        "round": plan.round,
        "sampled": plan.sampled.tolist(),
        "trains": plan.trains.tolist(),
        "dropped": plan.dropped,
        "begin": plan.begin,
        "end": plan.end,
        "waited": plan.waited,
    }


# -- draws


def test_a_hash_is_the_published_splitmix64():
    """The stream of SplitMix64 from the seed 1234567, as in its reference implementation's test."""

    def finalizer(z):
        mask = (1 << 64) - 1
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert [finalizer(1234567 + (k + 1) * 0x9E3779B97F4A7C15 & (1 << 64) - 1) for k in range(5)] == known
    base = _unfinalized(int(hashes(5, "x", np.array([0]), 7)[0]))
    assert [int(h) for h in hashes(5, "x", np.arange(4), 7)] == [
        finalizer(base + k * 0x9E3779B97F4A7C15 & (1 << 64) - 1) for k in range(4)
    ]


def _unfinalized(z):
    """The inverse of SplitMix64's finalizer."""
    mask = (1 << 64) - 1
    z ^= (z >> 31) ^ (z >> 62)
    z = z * pow(0x94D049BB133111EB, -1, 1 << 64) & mask
    z ^= (z >> 27) ^ (z >> 54)
    z = z * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & mask
    return z ^ (z >> 30) ^ (z >> 60)


def test_draws_are_fair():
    for seed in range(3):
        u = uniforms(seed, "a", EVERYONE, 3)
        assert u.min() >= 0 and u.max() < 1
        assert abs(np.histogram(u, 20)[0] - 5000).max() < 5 * 5000**0.5
        z = normals(seed, "a", EVERYONE, 3)
        assert abs(z.mean()) < 0.02 and abs(z.std() - 1) < 0.02 and abs((z**3).mean()) < 0.05
    assert len(np.unique(hashes(0, "a", EVERYONE))) == len(EVERYONE)


def test_draws_of_other_rounds_purposes_and_seeds_have_nothing_in_common():
    base = uniforms(1, "a", EVERYONE, 3)
    for other in (
        uniforms(1, "a", EVERYONE, 4),
        uniforms(1, "b", EVERYONE, 3),
        uniforms(2, "a", EVERYONE, 3),
        uniforms(1, "a", EVERYONE + 1, 3),
        uniforms(1, "a", EVERYONE, 3, 0),
        uniforms(1, "a", EVERYONE, 0, 3),
    ):
        assert abs(np.corrcoef(base, other)[0, 1]) < 0.015
    by_round = np.array([uniforms(1, "a", np.array([17]), t)[0] for t in range(2000)])  # through the rounds
    assert abs(by_round.mean() - 0.5) < 0.03 and abs(np.corrcoef(by_round[1:], by_round[:-1])[0, 1]) < 0.1


# -- cohorts


def test_a_cohort_is_known_bit_for_bit():
    """Written down once: no host, no version of a library may ever draw another."""
    assert cohort(0, 0, 20, 0.25).tolist() == KNOWN[0]
    assert cohort(7, 3, 100_000, 5e-5).tolist() == KNOWN[1]


def test_cohorts_are_sorted_unique_and_fair():
    counts = np.zeros(50, dtype=int)
    together = 0
    for t in range(2000):
        found = cohort(3, t, 50, 0.2)
        assert len(found) == 10 and (np.diff(found) > 0).all() and found.min() >= 0 and found.max() < 50
        counts[found] += 1
        together += 4 in found and 5 in found
    assert abs(counts - 400).max() < 5 * (2000 * 0.2 * 0.8) ** 0.5
    assert abs(together - 2000 * 0.2 * 9 / 49) < 5 * 73.5**0.5
    assert cohort(3, 0, 50, 1.0).tolist() == list(range(50))
    assert len(cohort(3, 0, 50, 0.001)) == 1


@pytest.mark.parametrize(("clients", "fraction", "size"), [(20, 0.5, 10), (20, 0.01, 1), (7, 0.5, 4), (10, 1.0, 10)])
def test_cohort_size(clients, fraction, size):
    assert cohort_size(clients, fraction) == size


@pytest.mark.parametrize("bad", [0, -0.1, 1.01, float("nan")])
def test_a_fraction_outside_of_0_to_1_is_refused(bad):
    with pytest.raises(ConfigError, match="above 0 and up to 1"):
        cohort(0, 0, 10, bad)
    with pytest.raises(ConfigError, match="above 0 and up to 1"):
        Population(0, [1] * 10, fraction=bad)


def test_packing_by_hand():
    """8,7,6,5,4 on two: 8 | 7, 6 to the 7, 5 to the 8, 4 to the 13 that is not 13: ranks alike, the first wins."""
    assert [each.tolist() for each in pack([5, 8, 4, 7, 6], 2)] == [[0, 1, 2], [3, 4]]
    assert [each.tolist() for each in pack([1, 1, 1], 5)] == [[0], [1], [2], [], []]
    assert home_ranks([5, 8, 4, 7, 6], 2).tolist() == [0, 0, 0, 1, 1]


def test_packing_deals_everyone_once_and_evenly():
    costs = np.exp(normals(0, "cost", np.arange(1000)))
    dealt = pack(costs, 7)
    assert sorted(np.concatenate(dealt).tolist()) == list(range(1000))
    loads = [costs[each].sum() for each in dealt]
    assert max(loads) - min(loads) <= costs.min() * 20
    assert all((np.diff(each) > 0).all() for each in dealt)


# -- rounds by hand


def test_deadline_and_late_ones_by_hand():
    """Seconds a sample 1, 2, 3, 4 and 10 samples each: replies at 10, 20, 30, 40."""
    plan = Population(0, [10] * 4, speed=[1, 2, 3, 4], deadline=30).round(0, 5.0)
    assert told(plan) == {
        "round": 0,
        "sampled": [0, 1, 2, 3],
        "trains": [0, 1, 2],
        "dropped": [(3, "deadline")],
        "begin": 5.0,
        "end": 35.0,
        "waited": 0.0,
    }
    plan = Population(0, [10] * 4, speed=[4, 1, 3, 2], enough=2).round(0)
    assert told(plan) == {
        "round": 0,
        "sampled": [0, 1, 2, 3],
        "trains": [1, 3],
        "dropped": [(0, "late"), (2, "late")],
        "begin": 0.0,
        "end": 20.0,
        "waited": 0.0,
    }
    plan = Population(0, [10] * 4, speed=[4, 1, 3, 2], enough=3, deadline=15).round(
        0
    )  # two are missing at the deadline
    assert (plan.trains.tolist(), plan.end) == ([1], 15.0)
    assert plan.dropped == [(0, "deadline"), (2, "deadline"), (3, "deadline")]
    plan = Population(0, [10] * 4, speed=1, enough=2).round(0)  # all at once: those who come first in the cohort
    assert plan.trains.tolist() == [0, 1] and plan.end == 10.0


def test_no_reply_at_all():
    plan = Population(0, [10] * 4, speed=1, deadline=5).round(0, 1.0)
    assert plan.trains.tolist() == [] and plan.end == 6.0 and len(plan.dropped) == 4


def test_a_trace_by_hand():
    """Client 1 leaves while it trains; client 2 comes at 25; client 3 is never available."""
    world = Population(0, [10] * 4, speed=1, available=[[[0, 100]], [[0, 5], [50, 70]], [[25, 60]], []])
    first = world.round(0)
    assert (first.sampled.tolist(), first.trains.tolist(), first.dropped) == ([0, 1], [0], [(1, "offline")])
    assert (first.begin, first.end) == (0.0, 10.0)
    second = world.round(1, 25.0)
    assert (second.sampled.tolist(), second.trains.tolist(), second.end) == ([0, 2], [0, 2], 35.0)
    third = world.round(2, 52.0)
    assert (third.trains.tolist(), third.dropped) == ([0, 1], [(2, "offline")])
    with pytest.raises(TrainingError, match=r"none of 4 clients is available at 100 .*period"):
        world.round(3, 100.0)


def test_nobody_is_there_time_goes_on():
    world = Population(
        0, [10] * 2, speed=1, available={"name": "trace", "intervals": [[[30, 50]], [[40, 60]]], "period": 100}
    )
    early = world.round(0, 0.0)
    assert (early.begin, early.waited, early.trains.tolist()) == (30.0, 30.0, [0])
    again = world.round(1, 260.0)  # both have left; 330 is the next period's
    assert (again.begin, again.waited, again.trains.tolist()) == (330.0, 70.0, [0])
    assert world.round(1, 245.0).sampled.tolist() == [0, 1]


def test_intervals_that_go_on_over_the_end_of_the_period():
    world = Population(
        0, [30], speed=1, available={"name": "trace", "intervals": [[[0, 20], [80, 100]]], "period": 100}
    )
    assert world.round(0, 85.0).trains.tolist() == [0]  # 85 to 115, over 100
    assert world.round(0, 95.0).dropped == [(0, "offline")]  # 95 to 125
    whole = Population(
        0, [300], speed=1, available={"name": "trace", "intervals": [[[0, 50], [50, 100]]], "period": 100}
    )
    assert whole.round(0, 95.0).trains.tolist() == [0]


@pytest.mark.parametrize("seed", range(3))
def test_a_trace_is_what_a_plain_look_at_its_intervals_says(seed):
    rng = np.random.default_rng(seed)
    print("seed", seed)
    traces = []
    for _ in range(12):
        cuts = np.sort(rng.choice(np.arange(1, 100), size=2 * rng.integers(0, 5), replace=False)).tolist()
        traces.append([[a, b] for a, b in zip(cuts[::2], cuts[1::2], strict=True)])
    for period in (None, 100):
        world = Population(0, [7] * 30, speed=1, available={"name": "trace", "intervals": traces, "period": period})
        for now in range(0, 99, 3):
            there = [k for k in range(30) if any(a <= now < b for a, b in traces[k % 12])]
            if there:
                plan = world.round(0, float(now))
                assert plan.sampled.tolist() == there
                stays = [k for k in there if any(a <= now and now + 7 <= b for a, b in traces[k % 12])]
                assert plan.trains.tolist() == stays
            else:
                later = [a for each in traces for a, _ in each if a > now]
                if later:
                    assert world.round(0, float(now)).begin == min(later)


def test_by_day():
    """Each for half of the day; none there in the last quarter where all begin in the first one."""
    world = Population(4, [1] * 1000, speed=0.001, available="diurnal(share=0.5,day=1000,spread=0.25)")
    sizes = [len(world.round(0, now).sampled) for now in (0.0, 250.0, 400.0, 600.0)]
    assert sizes[1] == sizes[2] == 1000 and 500 < sizes[3] < 700
    night = world.round(0, 800.0)
    assert night.waited == pytest.approx(200, abs=2) and 0 < len(night.sampled) < 10
    assert world.round(0, 1250.0).sampled.tolist() == world.round(0, 250.0).sampled.tolist()
    away = Population(4, [1000] * 50, speed=1, available="diurnal(share=0.5,day=1000)").round(0)
    assert all(reason == "offline" for _, reason in away.dropped) and not len(away.trains)


# -- chance


def test_dropouts_and_absences_are_as_frequent_as_said():
    world = Population(5, [1] * 2000, dropout=0.3, available="bernoulli(p=0.6)", fraction=1.0)
    plans = [world.round(t) for t in range(20)]
    asked = sum(len(plan.sampled) for plan in plans)
    lost = sum(len(plan.dropped) for plan in plans)
    assert abs(asked / 40_000 - 0.6) < 0.015 and abs(lost / asked - 0.3) < 0.015
    assert {reason for plan in plans for _, reason in plan.dropped} == {"dropout"}
    often = statistics.mean(0 in plan.sampled for plan in (world.round(t) for t in range(300)))
    assert 0.45 < often < 0.75  # one client now and then, not always or never


def test_rare_clients_are_waited_for():
    world = Population(0, [1] * 3, available="bernoulli(p=0.001,every=10)")
    waits = [world.round(t).waited for t in range(30)]
    assert all(wait % 10 == 0 for wait in waits) and 1000 < statistics.mean(waits) < 10_000
    with pytest.raises(TrainingError, match="in the next 10000 checks"):
        Population(0, [1] * 3, available="bernoulli(p=1e-9)").round(0)


def test_speeds_are_what_their_names_say():
    ends = [Population(seed, [1000], speed="lognormal(sigma=0.5,median=0.01)").round(0).end for seed in range(1000)]
    logs = np.log(ends)
    assert abs(np.median(logs) - np.log(10)) < 0.08 and abs(logs.std() - 0.5) < 0.05
    same = Population(0, [1000] * 5, speed="lognormal(sigma=0.5)")
    assert same.round(0).end == same.round(1).end
    shaken = Population(0, [1000] * 5, speed="lognormal(sigma=0.5,jitter=0.2)")
    assert shaken.round(0).end != shaken.round(1).end
    ends = [Population(seed, [1000], speed="uniform(low=0.01,high=0.02)").round(0).end for seed in range(300)]
    assert 10 <= min(ends) < 10.5 and 19.5 < max(ends) <= 20
    assert Population(0, [1000], speed=0.5).round(0).end == 500.0


def test_over_selection_asks_more_and_ends_with_the_needed():
    world = Population(1, [10] * 100, fraction=0.1, over_selection=0.3, speed="lognormal(sigma=1)")
    plan = world.round(0)
    assert (len(plan.sampled), len(plan.trains)) == (13, 10)
    assert [reason for _, reason in plan.dropped] == ["late"] * 3
    assert plan.end < Population(1, [10] * 100, fraction=0.13, speed="lognormal(sigma=1)").round(0).end
    assert Population(1, [10] * 20, fraction=0.25, over_selection=0.3).asked == 7  # 6.5 of them
    assert Population(1, [10] * 100, over_selection=0.3).enough is None  # there is nobody beyond


# -- the same everywhere

HARD = {
    "fraction": 0.4,
    "speed": "lognormal(sigma=0.7,jitter=0.3)",
    "available": "diurnal(share=0.6,day=3)",
    "dropout": 0.2,
    "deadline": 0.9,
    "over_selection": 1.0,
    "enough": 12,
}


def test_a_round_is_a_function_of_its_number_and_its_beginning():
    world = Population(9, [500 + 5 * k for k in range(40)], **HARD)
    now, plans = 0.0, []
    for t in range(30):
        plans.append(world.round(t, now))
        now = plans[-1].end
    other = Population(9, [500 + 5 * k for k in range(40)], **HARD)
    for t in (29, 3, 17):  # in any order, from a number that has been through JSON
        begin = json.loads(json.dumps(plans[t - 1].end))
        assert told(other.round(t, begin)) == told(plans[t])
    assert told(Population(10, [500 + 5 * k for k in range(40)], **HARD).round(0)) != told(plans[0])
    assert {reason for plan in plans for _, reason in plan.dropped} == {"dropout", "deadline", "offline", "late"}
    for plan in plans:
        everyone = sorted([*plan.trains.tolist(), *(client for client, _ in plan.dropped)])
        assert everyone == plan.sampled.tolist()
        assert plan.begin <= plan.end <= plan.begin + 0.9 + 1e-9


def test_who_drops_out_does_not_change_who_else_is_drawn():
    """Options of one kind leave the draws of another alone."""
    plain = Population(2, [10] * 50, fraction=0.2).round(4)
    lossy = Population(2, [10] * 50, fraction=0.2, dropout=0.5, speed="lognormal").round(4)
    assert plain.sampled.tolist() == lossy.sampled.tolist() == cohort(2, 4, 50, 0.2).tolist()
    assert set(lossy.trains.tolist()) | {client for client, _ in lossy.dropped} == set(plain.trains.tolist())


def test_a_hundred_thousand_clients_are_no_matter():
    world = Population(0, [10] * 100_000, fraction=0.01, **{k: v for k, v in HARD.items() if k != "fraction"})
    assert len(world.round(3).sampled) == 2000


# -- traces as files, options as text


def test_traces_from_files(tmp_path):
    (tmp_path / "speed.csv").write_text("client,seconds\nann,1\nbob,2\n")
    (tmp_path / "there.csv").write_text("client,on,off\nann,0,15\nbob,40,60\nann,20,80\n")
    world = Population(
        0, [10] * 3, speed=f"trace(file={tmp_path}/speed.csv)", available=f"trace(file={tmp_path}/there.csv)"
    )
    first = world.round(0)  # the third client takes ann's traces again
    assert (first.sampled.tolist(), first.trains.tolist(), first.end) == ([0, 2], [0, 2], 10.0)
    assert world.round(1, 40.0).end == 60.0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no line below"),
        ("client,on,off\nann,5,x\n", "line 2"),
        ("client,on,off\nann,7,5\n", "on < off"),
        ("who,on,off\nann,7,nan\n", "line 2"),
        ("client,on,off\nann,0,9\nann,5,20\n", "one after another"),
    ],
)
def test_bad_traces_are_refused(tmp_path, text, words):
    (tmp_path / "there.csv").write_text(text)
    with pytest.raises(ConfigError, match=words):
        Population(0, [1], available=f"trace(file={tmp_path}/there.csv)")


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"speed": "quick"}, r"lognormal\(sigma=0.5"),
        ({"speed": "lognormal(sgima=2)"}, "no option 'sgima'"),
        ({"speed": "lognormal(sigma=-1)"}, "sigma is -1"),
        ({"speed": -1}, "seconds is -1"),
        ({"speed": "trace"}, "either file"),
        ({"speed": "trace(file=/nowhere.csv)"}, "cannot be read"),
        ({"speed": []}, "give a list"),
        ({"speed": [1, "x"]}, "seconds is 'x'"),
        ({"speed": True}, "give one of"),
        ({"speed": "uniform(low=3,high=2)"}, "swap"),
        ({"available": "sometimes"}, "diurnal"),
        ({"available": "bernoulli(p=0)"}, "above 0"),
        ({"available": "bernoulli(p=1.2)"}, "up to 1"),
        ({"available": "diurnal(share=2)"}, "share is 2"),
        ({"available": [[[5, 3]]]}, "on < off"),
        ({"available": [[]]}, "ever available"),
        ({"available": [3]}, "list of"),
        ({"dropout": 1}, "below 1"),
        ({"dropout": "x"}, "dropout"),
        ({"deadline": 0}, "above 0"),
        ({"deadline": "soon"}, "deadline"),
        ({"enough": 0}, "at least 1"),
        ({"enough": 11}, "asks 10 of the 10"),
        ({"over_selection": -1}, "0 to 10"),
        ({"speed": float("nan")}, "seconds is nan"),
        ({"available": {"name": "trace", "intervals": [[[0, 9]]], "period": 5}}, "the period 5"),
    ],
)
def test_bad_options_are_refused_with_what_can_be_given(option, words):
    with pytest.raises(ConfigError, match=words) as caught:
        Population(0, [1] * 10, **option)
    assert caught.value.data["field"] in option
    assert str(caught.value).count("\n") < 3


def test_a_round_that_could_never_count_is_refused():
    with pytest.raises(ConfigError, match="no round would ever change the model"):
        options_module.check_replies(4, 3, 0.0)
    with pytest.raises(ConfigError, match="min_replies is -1"):
        options_module.check_replies(-1, None, 0.0)
    with pytest.raises(ConfigError, match="there are no clients"):
        Population(0, [])

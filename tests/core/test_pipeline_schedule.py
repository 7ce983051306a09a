"""Pipeline schedules: their formulas, exactly; torch's own tables; a validator that no wrong table passes."""

import random
import re
from fractions import Fraction
from graphlib import CycleError, TopologicalSorter
from xml.etree import ElementTree

import pytest
from pipeline_site import to_csv
from rayps_client.errors import ConfigError

from rayps.core.pipeline import gantt
from rayps.core.pipeline import schedule as schedules
from rayps.core.pipeline.schedule import Action, make_table, needs, splits
from rayps.core.pipeline.simulate import simulate
from rayps.core.pipeline.validate import read, to_json, validate, walk
from rayps.core.strategy.replica import SCHEDULES

SIZES = [(p, m) for p in range(1, 9) for m in range(1, 33)]
CHUNKS = {"interleaved": (1, 2, 3)}


def cases(schedule):
    return [(p, m, v) for p, m in SIZES for v in CHUNKS.get(schedule, (1,)) if schedule != "interleaved" or m % p == 0]


# ---- formulas


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_idle_share_makespan_and_peaks(schedule):
    forward, backward = Fraction(3, 7), Fraction(5, 4)
    for p, m in SIZES:
        for seconds in (None, {"F": forward, "B": backward}):
            found = simulate(make_table(schedule, p, m), seconds)
            assert found.idle == Fraction(p - 1, m + p - 1) == schedules.compute_idle(schedule, p, m)
            assert found.makespan == (m + p - 1) * (3 if seconds is None else forward + backward)
            assert found.idles == [found.idle] * p
            assert found.peaks == [m if schedule == "gpipe" else min(m, p - rank) for rank in range(p)]


def test_interleaved_idles_less_and_holds_more():
    for p, m, v in cases("interleaved"):
        found = simulate(make_table("interleaved", p, m, v))
        assert found.idle == Fraction(p - 1, v * m + p - 1) == schedules.compute_idle("interleaved", p, m, v)
        assert found.peaks == [min(v * m, 2 * (p - r - 1) + (v - 1) * p + 1) for r in range(p)]
    assert simulate(make_table("interleaved", 4, 8, 2)).peaks == [11, 9, 7, 5]  # chunks of half the size; 1f1b 4 3 2 1


def test_zero_bubble_waits_for_a_third_of_1f1b_with_the_same_activations():
    for p, m in SIZES:
        found = simulate(make_table("zero_bubble", p, m))
        least = 3 * m + p - 1 if m >= p else 2 * m + 2 * p - 1
        assert found.makespan == least
        assert found.idle == 1 - Fraction(3 * m, least) == schedules.compute_idle("zero_bubble", p, m)
        assert found.peaks == [min(m, p)] * p
        before = simulate(make_table("1f1b", p, m))
        assert max(found.peaks) == max(before.peaks)
        if m >= p:  # waiting per worker: (p-1)(F+B-W) beside (p-1)(F+B+W)
            assert found.makespan - 3 * m == Fraction(before.makespan - 3 * m, 3)


def test_zero_bubble_with_other_times_waits_as_the_paper_says():
    forward, backward, weights = Fraction(5), Fraction(6), Fraction(4)  # W no longer than F and B
    for p, m in [(2, 8), (4, 8), (4, 16), (8, 32)]:
        found = simulate(make_table("zero_bubble", p, m), {"F": forward, "B": backward, "W": weights})
        assert found.rows[0][-1][2] == m * (forward + backward + weights) + (p - 1) * (forward + backward - weights)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_formulas_of_peaks(schedule):
    for p, m, v in cases(schedule):
        found = simulate(make_table(schedule, p, m, v))
        assert found.peaks == [schedules.compute_peak(schedule, p, m, rank, v) for rank in range(p)]


def test_one_micro_batch_is_the_naive_split():
    for p in range(1, 9):
        assert simulate(make_table("gpipe", p, 1)).idle == Fraction(p - 1, p)


def test_a_transfer_delays_what_needs_it_and_occupies_nobody():
    p, m = 4, 1
    assert simulate(make_table("gpipe", p, m), transfer=2).makespan == 3 * p + 2 * 2 * (p - 1)
    near = simulate(make_table("gpipe", 1, 5), transfer=100)
    assert near.makespan == 15 and near.idle == 0  # nothing travels within a worker
    apart = simulate(make_table("gpipe", 2, 3), transfer=Fraction(1, 2))
    assert [start for action, start, _ in apart.rows[1] if action.kind == "F"] == [1.5, 2.5, 3.5]


def test_stages_that_are_not_alike_wait_for_the_slowest():
    slow = 2
    found = simulate(make_table("gpipe", 4, 100), lambda action: 5 if action.chunk == slow else 1)
    assert found.idles[slow] < 0.03 < 0.7 < min(found.idles[:slow] + found.idles[slow + 1 :])


# ---- the tables


def test_torch_makes_the_same_tables():
    """Its GPipe and Interleaved1F1B; its 1F1B listing lacks the last rank's first micro-batch."""
    theirs = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")

    def golden(name, p, m, v):
        rows = theirs.get_schedule_ops(name, p, m, v)
        actions = [[(a.computation_type.value, a.stage_index, a.microbatch_index) for a in row if a] for row in rows]
        return [[action for action in row if action[0] in "FB"] for row in actions]  # it adds gradient scaling

    for p, m in [(1, 1), (2, 1), (2, 2), (4, 8), (8, 3), (8, 32)]:
        assert golden("GPipe", p, m, 1) == make_table("gpipe", p, m)
    for p, m, v in [(2, 2, 2), (2, 8, 2), (4, 8, 2), (4, 16, 3), (3, 6, 2), (8, 16, 2), (8, 32, 4)]:
        assert golden("Interleaved1F1B", p, m, v) == make_table("interleaved", p, m, v)


def test_1f1b_by_hand():
    rows = [" ".join(map(str, row)) for row in make_table("1f1b", 3, 4)]
    assert rows == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_zero_bubble_by_hand():
    rows = [" ".join(map(str, row)) for row in make_table("zero_bubble", 3, 4)]
    assert rows == [
        "0F0 0F1 0F2 0B0 0W0 0F3 0B1 0W1 0B2 0W2 0B3 0W3",
        "1F0 1F1 1B0 1F2 1B1 1W0 1F3 1B2 1W1 1B3 1W2 1W3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2W0 2F3 2B3 2W1 2W2 2W3",
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_table_is_valid_and_goes_through_text(schedule):
    for p, m, v in cases(schedule):
        made = make_table(schedule, p, m, v)
        validate(made, p, m, v)
        assert len(list(walk(made))) == sum(map(len, made))
        if m < 9:
            assert read(to_json(made)) == (made, p, m, v) == read(to_csv(made))


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (("2f2b", 2, 2, 1), "schedule"),
        (("gpipe", 0, 2, 1), "stages"),
        (("gpipe", 2, -1, 1), "micro_batches"),
        (("gpipe", 2, True, 1), "micro_batches"),
        (("gpipe", 2, 2.0, 1), "micro_batches"),
        (("1f1b", 2, 2, 2), "chunks"),
        (("interleaved", 4, 6, 2), "micro_batches"),
        (("interleaved", 4, 8, 0), "chunks"),
    ],
)
def test_numbers_that_make_no_schedule(given, field):
    with pytest.raises(ConfigError) as error:
        make_table(*given)
    assert error.value.data["field"] == field


# ---- the validator


def runs(rows, chunks):
    """Whether the order is possible, found in another way: no cycle in what must come before what."""
    graph = {}
    for row in rows:
        for before, action in zip([None, *row], row, strict=False):
            graph.setdefault(action, set()).update(needs(action, chunks))
            if before is not None:
                graph[action].add(before)
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError:
        return False
    return True


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 4), (3, 3), (4, 8)])
def test_no_mutation_passes(schedule, p, m):
    v = 2 if schedule == "interleaved" else 1
    made = make_table(schedule, p, m, v)
    refused = possible = 0
    for rank, row in enumerate(made):
        for i, action in enumerate(row):
            for changed in (row[:i] + row[i + 1 :], row[: i + 1] + row[i:], [*row, action], [action, *row]):
                with pytest.raises(ConfigError, match=str(action)):
                    validate([*made[:rank], changed, *made[rank + 1 :]], p, m, v)
            for j in range(i + 1, len(row)):
                swapped = row.copy()
                swapped[i], swapped[j] = row[j], row[i]
                rows = [*made[:rank], swapped, *made[rank + 1 :]]
                if runs(rows, p * v):
                    validate(rows, p, m, v)
                    possible += 1
                else:
                    with pytest.raises(ConfigError, match="waits before"):
                        validate(rows, p, m, v)
                    refused += 1
    assert (refused and possible) or (p, m) == (1, 2)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_random_orders_are_judged_right(schedule):
    seed = random.randrange(10**6)
    print("seed", seed)
    order, verdicts = random.Random(seed), set()
    for _ in range(300):
        p = order.choice([2, 3])
        v = 2 if schedule == "interleaved" else 1
        rows = make_table(schedule, p, p, v)
        for row in rows:
            for _ in range(order.choice([0, 1, 2])):
                i, j = order.randrange(len(row)), order.randrange(len(row))
                row[i], row[j] = row[j], row[i]
        good = runs(rows, p * v)
        verdicts.add(good)
        if good:
            validate(rows, p, p, v)
        else:
            with pytest.raises(ConfigError):
                validate(rows, p, p, v)
    assert verdicts == {True, False}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t[:1], "1 rows"),
        (lambda t: [t[1], t[0]], "belongs to stage"),
        (lambda t: [[*t[0], Action("F", 2, 0)], t[1]], "2 chunks"),
        (lambda t: [[*t[0], Action("F", 0, 9)], t[1]], "micro-batches"),
        (lambda t: [[*t[0], Action("X", 0, 0)], t[1]], "not a pass"),
        (lambda t: [[*t[0], Action("W", 0, 0)], t[1]], "0W1 is missing"),  # both halves everywhere, or nowhere
    ],
)
def test_what_the_validator_says(change, says):
    with pytest.raises(ConfigError, match=says):
        validate(change(make_table("1f1b", 2, 2)), 2, 2)


def test_a_deadlock_names_who_waits_for_what():
    rows = [[Action("B", 0, 0), Action("F", 0, 0)], [Action("F", 1, 0), Action("B", 1, 0)]]
    with pytest.raises(ConfigError, match="stage 0 waits before 0B0 for 0F0; stage 1 waits before 1F0 for 0F0"):
        validate(rows, 2, 1)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[", "not JSON"),
        ("{}", "list of lists"),
        ("[]", "list of lists"),
        ("[[]]", "no actions"),
        ("[[1]]", "not an action"),
        ('[["0F0", "0B0"], ["F1"]]', "'F1' is not an action"),
        ('[["0F0", "0B0", "1F0", "1B0", "2F0", "2B0"], []]', "multiple"),
        ('[["0F0"]]', "0B0 is missing"),
        ('[["0B0", "0F0"]]', "waits before 0B0"),
        ("0F0,0B0\n1F0", "1B0 is missing"),
        ('["0F0"]', "list of lists"),
        ('[["0F0","0B99999999"]]', "is not an action"),
    ],
)
def test_tables_that_cannot_be_read(text, says):
    with pytest.raises(ConfigError, match=says):
        read(text)


def test_torchs_padding_is_read():
    made, p, m, v = read(",0F0,,0B0\n")
    assert (p, m, v) == (1, 1, 1) and not splits(made)


# ---- the chart


def test_the_chart_of_a_small_schedule():
    assert gantt.draw_text(simulate(make_table("1f1b", 2, 2))).splitlines() == [
        "stage 0 │F0    F1    ············B0──────────······B1──────────",
        "stage 1 │······F0    B0──────────F1    B1──────────············",
        "        └──────────────────────────────────────────────────────",
        "         0                                                    9",
        "         F3 forward of micro-batch 3, B backward, · idle",
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("width", [40, 100])
def test_charts_keep_their_width_and_columns(schedule, width):
    for p, m in [(1, 1), (2, 4), (4, 8), (3, 27), (8, 64), (12, 240)]:
        timeline = simulate(make_table(schedule, p, m, 2 if schedule == "interleaved" else 1))
        lines = gantt.draw_text(timeline, width).splitlines()
        bars, axis = lines[:p], lines[p]
        assert {len(line) for line in bars} == {len(axis)} and len(axis) <= width
        assert [line.index("│") for line in bars] == [axis.index("└")] * p
        waiting = sum(line.count("·") for line in bars) / sum(len(line) - axis.index("└") - 1 for line in bars)
        assert abs(waiting - float(timeline.idle)) < 0.02 + p * 2 / width  # columns are rounded
        coloured = gantt.draw_text(timeline, width, colour=True)
        assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == "\n".join(lines) != coloured


def test_a_chart_of_seconds_says_so():
    timeline = simulate(make_table("gpipe", 2, 3), {"F": 0.0012, "B": 0.003}, transfer=0.0001)
    assert gantt.draw_text(timeline, unit=" s").splitlines()[3].endswith(f"{timeline.makespan:.4g} s")


def test_the_svg_has_every_action_where_it_belongs():
    timeline = simulate(make_table("interleaved", 2, 4, 2))
    root = ElementTree.fromstring(gantt.draw_svg(timeline, "2 stages < 3 & more"))
    name = "{http://www.w3.org/2000/svg}"
    groups = root.findall(f"{name}g")
    assert len(groups) == sum(map(len, timeline.rows)) == 32
    rects = [group.find(f"{name}rect") for group in groups]
    width = float(root.get("width"))
    places = {(rect.get("x"), rect.get("y")) for rect in rects}
    assert len(places) == 32 and all(float(r.get("x")) + float(r.get("width")) < width for r in rects)
    said = {group.find(f"{name}title").text for group in groups}
    assert "forward of micro-batch 3, chunk 2: 14 to 15" in said
    assert {rect.get("fill") for rect in rects} == {"var(--F0)", "var(--F1)", "var(--B0)", "var(--B1)"}
    assert root.findall(f"{name}text")[0].text == "2 stages < 3 & more"

"""Rules that bear attackers: cases counted by hand, naive loops, guards, order; and what may be asked for."""

import itertools
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from rayps_client.errors import ConfigError

from rayps.federated.population.attack_spec import attack_of, skew
from rayps.federated.rules.aggregation_options import Aggregation
from rayps.federated.rules.robust_rules import RULES, AggregationRule, Bulyan, rule_of
from rayps.federated.rules.rule_arithmetic import (
    aggregate,
    centered_clipping,
    clip_factor,
    distances,
    geometric_median,
    median,
    scores,
)
from rayps.strategies.fedavg import FedAvg

ROBUST = [
    "krum(f=4)",
    "multi_krum(f=4)",
    "multi_krum(f=4,m=3)",
    "trimmed_mean(f=4)",
    "median",
    "geometric_median",
    "bulyan(f=4)",
    "centered_clipping(tau=1.0,iterations=3)",
    "krum(f=1,bucket=3)",
    "median(bucket=2)",
]


def column(*values):
    return np.array(values, dtype=np.float64)[:, None]


def matrix(n=20, width=31, seed=0, dtype=np.float64):
    print("seed", seed)
    return np.random.default_rng(seed).normal(size=(n, width)).astype(dtype)


# ---- counted by hand


def test_krum_by_hand():
    """n 5, f 1: each row's two nearest. Scores 0: 1+4, 1: 1+1, 2: 1+1.. with 2.5 and 10 beside."""
    x = column(0.0, 1.0, 2.0, 2.5, 10.0)
    # squared distances: 0: 1, 4, 6.25, 100; 1: 1, 1, 2.25, 81; 2: 4, 1, .25, 64; 2.5: 6.25, 2.25, .25, 56.25
    assert scores(distances(x), 1).tolist() == [5.0, 2.0, 1.25, 2.5, 56.25 + 64.0]
    assert aggregate(rule_of("krum(f=1)"), x).tolist() == [2.0]
    assert aggregate(rule_of("multi_krum(f=1,m=2)"), x).tolist() == [1.5]
    assert aggregate(rule_of("multi_krum(f=1)"), x).tolist() == [(0 + 1 + 2 + 2.5) / 4]


def test_krum_squares_once():
    """Distances neither unsquared nor squared twice: each would choose another row here."""
    x = column(0.0, 3.0, 4.4, 5.4, 8.4, 50.0, -80.0)  # n 7, f 2: the three nearest
    by_power = {
        power: x[
            np.argmin(
                [
                    sum(sorted(abs(a - b) ** power for j, b in enumerate(x[:, 0]) if j != i)[:3])
                    for i, a in enumerate(x[:, 0])
                ]
            ),
            0,
        ]
        for power in (1, 2, 4)
    }
    assert by_power[2] == aggregate(rule_of("krum(f=2)"), x)[0]
    squares = [sum(sorted((a - b) ** 2 for j, b in enumerate(x[:, 0]) if j != i)[:3]) for i, a in enumerate(x[:, 0])]
    assert scores(distances(x), 2).tolist() == pytest.approx(squares, rel=1e-14)


def test_by_column_by_hand():
    x = np.array([[1.0, 9.0], [2.0, -100.0], [3.0, 7.0], [4.0, 8.0], [1000.0, 6.0]])
    assert aggregate(rule_of("trimmed_mean(f=1)"), x).tolist() == [3.0, 7.0]
    assert aggregate(rule_of("trimmed_mean(f=2)"), x).tolist() == [3.0, 7.0]
    assert aggregate(rule_of("trimmed_mean(f=0)"), x).tolist() == [202.0, -14.0]
    assert aggregate(rule_of("median"), x).tolist() == [3.0, 7.0]
    assert aggregate(rule_of("median"), x[:4]).tolist() == [2.5, 7.5]


def test_geometric_median_by_hand():
    """Of a triangle whose angles are below 120 degrees it sees all sides under 120 degrees (Fermat's point)."""
    x = np.array([[0.0, 0.0], [1.0, 0.0], [0.5, 3.0**0.5 / 2]])
    assert geometric_median(x) == pytest.approx([0.5, 3.0**0.5 / 6], abs=1e-8)
    line = column(0.0, 1.0, 2.0, 3.0, 1000.0)  # on a line it is the median
    assert geometric_median(line) == pytest.approx([2.0], abs=1e-8)
    same = np.array([[1.0, 2.0]] * 3 + [[1e30, -1e30]] * 2)
    assert geometric_median(same).tolist() == [1.0, 2.0]


def sum_of_distances(x, z):
    return float(np.sqrt(np.square(x.astype(np.float64) - z).sum(axis=1)).sum())


@pytest.mark.parametrize("shape", [(5, 2), (7, 3), (4, 5), (20, 2), (6, 1)])
@pytest.mark.parametrize("kind", ["normal", "grid", "outlier", "float32"])
def test_no_row_and_no_nearby_point_has_a_smaller_sum_of_distances(shape, kind):
    """Rows on a grid repeat and lie on lines; the coordinate median is often a row."""
    for seed in range(60):
        draw = np.random.default_rng([seed, *shape])
        x = draw.integers(-3, 4, size=shape).astype(np.float64) if kind == "grid" else draw.normal(size=shape)
        x = x.astype(np.float32) if kind == "float32" else x
        if kind == "outlier":
            x[0] *= 1e6
        z = geometric_median(x)
        least = sum_of_distances(x, z)
        for row in x:
            assert least <= sum_of_distances(x, row) * (1 + 1e-12), f"seed {seed}: row {row} is better than {z}"
        for radius in (1e-4, 1e-2, 0.3):
            for direction in draw.normal(size=(8, shape[1])):
                near = z + radius * direction / np.linalg.norm(direction)
                assert least <= sum_of_distances(x, near) * (1 + 1e-5), f"seed {seed}: {near} is better than {z}"


def test_the_coordinate_median_may_be_a_row_that_is_not_the_geometric_median():
    """The sum of distances is 34.26 at the coordinate median, which is the last row, and 30.94 at the least."""
    x = np.array([[-1.0, 9.0], [9.0, -1.0], [0.5, 9.0], [9.0, 0.5], [0.5, 0.5]])
    assert median(x).tolist() == x[4].tolist() and sum_of_distances(x, x[4]) == pytest.approx(34.2627, abs=1e-4)
    z = geometric_median(x)
    assert z[0] == pytest.approx(z[1], abs=1e-7) and sum_of_distances(x, z) == pytest.approx(30.9357, abs=1e-4)


def test_bulyan_by_hand():
    """n 7, f 1: five chosen by Krum, the mean of the three of them nearest to their median."""
    x = column(0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 100.0)
    # Krum by the 4, 3, 2, 1, 1 nearest: of all 2 (1+1+4+4, as 3, which stands later); of 0 1 3 4 5 100: 3 (1+4+4);
    # of 0 1 4 5 100: 1 (1+9, as 4); of 0 4 5 100: 4 (1, as 5); of 0 5 100: 0 (25, as 5). The median of these: 2
    assert scores(distances(x), 1).tolist()[:4] == [1 + 4 + 9 + 16, 1 + 1 + 4 + 9, 1 + 1 + 4 + 4, 1 + 1 + 4 + 4]
    assert aggregate(rule_of("bulyan(f=1)"), x).tolist() == [2.0]
    x[1] = 1.75  # is nearer now: (1.75 + 2 + 3) / 3 if the same are chosen
    assert aggregate(rule_of("bulyan(f=1)"), x).tolist() == [(1.75 + 2 + 3) / 3]


def test_bulyan_as_its_paper_says_it():
    for seed, f in itertools.product(range(3), (1, 2, 4)):
        x = matrix(4 * f + 4, 7, seed)
        left, chosen = list(range(len(x))), []
        while len(chosen) < len(x) - 2 * f:
            found = []
            for i in left:
                near = sorted(float(((x[i] - x[j]) ** 2).sum()) for j in left if j != i)
                found.append(sum(near[: max(1, len(left) - f - 2)]))
            best = left[found.index(min(found))]
            chosen.append(best)
            left.remove(best)
        law = []
        for values in x[chosen].T:
            middle = np.median(values)
            law.append(np.mean(sorted(values, key=lambda value: abs(value - middle))[: len(x) - 4 * f]))
        assert aggregate(Bulyan(f), x) == pytest.approx(law, rel=1e-12)


def test_centered_clipping_by_hand():
    """From 0 with tau 1: (1, 1, -1 and 0.5 of 0.5) over 4; then from there."""
    x = column(3.0, 5.0, -7.0, 0.5)
    assert centered_clipping(x, 1.0).tolist() == pytest.approx([(1 + 1 - 1 + 0.5) / 4])
    v = 0.375
    assert centered_clipping(x, 1.0, 2).tolist() == pytest.approx([v + (1 + 1 - 1 + 0.125) / 4])
    assert centered_clipping(x, 1.0, 1, np.array([4.0])).tolist() == pytest.approx([4 + (-1 + 1 - 1 - 1) / 4])
    assert centered_clipping(x, 1e9).tolist() == pytest.approx([x.mean()])


def test_clipping():
    assert [clip_factor(norm, 2.0) for norm in (0.0, 1.0, 2.0, 4.0)] == [1.0, 1.0, 1.0, 0.5]
    assert clip_factor(5.0, None) == 1.0


# ---- against naive loops


@pytest.mark.parametrize("seed", range(3))
def test_scores_as_a_loop(seed):
    x = matrix(13, 40, seed, np.float32)
    wide = x.astype(np.float64)
    d = [[float(((a - b) ** 2).sum()) for b in wide] for a in wide]
    assert distances(x) == pytest.approx(np.array(d), rel=1e-13)
    law = [sum(sorted(row[:i] + row[i + 1 :])[: 13 - 3 - 2]) for i, row in enumerate(d)]
    assert scores(distances(x), 3) == pytest.approx(np.array(law), rel=1e-13)


def test_distances_keep_what_a_difference_of_squares_loses():
    x = np.array([[1e4, 1e4], [1e4, 1e4 + 1e-2], [1e4 + 3e-2, 1e4]], dtype=np.float32)
    wide = x.astype(np.float64)
    assert distances(x)[0, 1] == (wide[1, 1] - wide[0, 1]) ** 2 > 0
    short = (x**2).sum(1)[:, None] + (x**2).sum(1) - 2 * x @ x.T
    assert abs(short[0, 1] - distances(x)[0, 1]) >= distances(x)[0, 1], "the test shows nothing"


@pytest.mark.parametrize("text", ROBUST)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_blocks_change_nothing(text, dtype, monkeypatch):
    x = matrix(20, 501, 3, dtype)
    whole = aggregate(rule_of(text), x, seed=5)
    assert whole.dtype == np.float64 and whole.shape == (501,)
    monkeypatch.setattr("rayps.federated.rules.rule_arithmetic._BLOCK", 20 * 16)
    assert aggregate(rule_of(text), x, seed=5) == pytest.approx(whole, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("text", [text for text in ROBUST if "bucket" not in text])
def test_rows_may_come_in_any_order(text):
    x, rule = matrix(seed=4), rule_of(text)
    law = aggregate(rule, x)
    for seed in range(4):
        order = np.random.default_rng(seed).permutation(len(x))
        found = aggregate(rule, x[order])
        if rule.name in ("krum", "trimmed_mean", "median", "bulyan"):
            assert np.array_equal(found, law)
        assert found == pytest.approx(law, rel=1e-9, abs=1e-12)


def test_ties_go_to_the_row_that_stands_first():
    x = np.array([[0.0, 1.0], [1.0, 0.0], [0.0, -1.0], [-1.0, 0.0], [0.0, 0.0]])[[0, 1, 2, 3]]
    x = np.concatenate([x, x + 100])  # two squares: all corners alike
    assert aggregate(rule_of("krum(f=2)"), x).tolist() == [0.0, 1.0]
    assert aggregate(rule_of("krum(f=2)"), x[::-1]).tolist() == [99.0, 100.0]
    assert aggregate(rule_of("multi_krum(f=2,m=2)"), x).tolist() == [0.5, 0.5]


def test_nothing_given_is_changed():
    for text in ROBUST:
        x = matrix(seed=6)
        kept = x.copy()
        aggregate(rule_of(text), x, before=np.zeros(31))
        assert np.array_equal(x, kept)


@pytest.mark.parametrize(
    "text",
    [
        "krum(f=4)",
        "multi_krum(f=4)",
        "trimmed_mean(f=4)",
        "median",
        "geometric_median",
        "bulyan(f=4)",
        "centered_clipping(tau=6.0,iterations=10)",
    ],
)
@pytest.mark.parametrize("poison", [-5.0, 1e6, -1e30])
def test_four_of_twenty_do_not_move_it_far(text, poison):
    """16 honest rows around 1: the mean leaves them, the rule stays."""
    x = 1 + 0.1 * matrix(20, 50, 8)
    honest = x[4:].mean(axis=0)
    x[:4] *= poison
    start = honest + 0.3 if "clipping" in text else None
    assert np.abs(aggregate(rule_of(text), x, start) - honest).max() < 0.9 < np.abs(x.mean(axis=0) - honest).min()


def test_buckets_are_means_drawn_from_the_seed():
    x = matrix(7, 3, 9)
    found = {tuple(aggregate(rule_of("median(bucket=3)"), x, seed=seed)) for seed in range(6)}
    assert len(found) > 1
    assert tuple(aggregate(rule_of("median(bucket=3)"), x, seed=2)) in found
    assert aggregate(rule_of("median(bucket=7)"), x) == pytest.approx(x.mean(axis=0))


# ---- what may be asked for


@pytest.mark.parametrize(
    ("text", "least"),
    [
        ("krum(f=4)", 11),
        ("multi_krum(f=4)", 11),
        ("multi_krum(f=4,m=10)", 14),
        ("trimmed_mean(f=4)", 9),
        ("median", 1),
        ("bulyan(f=4)", 19),
        ("bulyan(f=0)", 3),
        ("geometric_median", 1),
        ("centered_clipping", 1),
        ("mean", 1),
        ("krum(f=1,bucket=2)", 9),
        ("trimmed_mean(f=2,bucket=3)", 13),
    ],
)
def test_guards(text, least):
    rule = rule_of(text)
    assert rule.least == least
    rule.check(least)
    assert rule.lacking(least) is None
    aggregate(rule, matrix(least, 3))
    if least > 1:
        with pytest.raises(ConfigError, match=r"at least \d+ replies \(.*n.*\), but a round asks"):
            rule.check(least - 1)
        assert f"needs {least} replies" in rule.lacking(least - 1) and f"received {least - 1}" in rule.lacking(
            least - 1
        )
        with pytest.raises(ConfigError, match="received"):
            aggregate(rule, matrix(least - 1, 3))
    assert rule.lacking(0) == "no reply came"


@pytest.mark.parametrize(
    ("text", "cohort", "bears"),
    [
        ("krum(f=4)", 20, 4),
        ("bulyan(f=4)", 20, 4),
        ("bulyan(f=4)", 18, 0),
        ("median", 20, 9),
        ("median", 21, 10),
        ("geometric_median(bucket=2)", 20, 4),
        ("mean", 20, 0),
    ],
)
def test_more_attackers_than_it_bears(text, cohort, bears):
    rule = rule_of(text)
    assert rule.count_tolerated(cohort) == bears
    if cohort >= rule.least and rule.robust:
        rule.check(cohort, attack_of(f"nan(clients={bears})"))
        with pytest.raises(ConfigError, match=f"tolerates {bears}"):
            rule.check(cohort, attack_of(f"nan(clients={bears + 1})"))
    else:
        rule_of("mean").check(20, attack_of("sign_flip(clients=4)"))  # it bears none, and says so by what it learns


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("krum", "the number of replies of a round"),
        ("krum(f=-1)", "f is -1"),
        ("krum(f=1.5)", "whole number"),
        ("krum(f=true)", "whole number"),
        ("best(f=1)", "one of mean, krum"),
        ("krumm(4)", r"did you mean 'krum'\?"),
        ({"name": "krumm", "f": 1}, r"rule is 'krumm\(f=1\)' \(did you mean 'krum'\?\)"),
        ("median(5)", "key=value"),
        ("krum(f=1,buckets=2)", r"did you mean 'bucket'\?"),
        ("krum(1,f=2)", "given twice"),
        ("median(f=1)", "no option 'f'"),
        ("centered_clipping(tau=0)", "above 0"),
        ("centered_clipping(tau=none)", "above 0"),
        ("multi_krum(f=1,m=0)", "at least 1"),
        ("geometric_median(iterations=0)", "at least 1"),
        ("krum(f=1,bucket=0)", "at least 1"),
        (5, "text such as"),
    ],
)
def test_rules_that_cannot_be(text, word):
    with pytest.raises(ConfigError, match=word):
        rule_of(text)


def test_text_and_wire_form_say_the_same():
    for text in ROBUST:
        assert rule_of(str(rule_of(text))) == rule_of(text)
    assert rule_of({"name": "krum", "f": 4}) == rule_of("krum(f=4)") == rule_of("krum:f=4") == rule_of("krum(4)")
    assert rule_of("centered_clipping(0.5, iterations=2)") == rule_of("centered_clipping(tau=0.5,iterations=2)")
    assert str(rule_of("multi_krum(f=2)")) == "multi_krum(f=2)" and str(rule_of(None)) == "mean"


@pytest.mark.parametrize("clip", [0, -1, True, float("inf"), float("nan"), "much"])
def test_clips_that_cannot_be(clip):
    with pytest.raises(ConfigError, match="clip"):
        Aggregation(clip=clip)


def test_clips_that_can_be():
    assert Aggregation().clip is None and Aggregation(clip=3).clip == 3.0


def test_what_skewed_data_cost_is_said():
    even, two = [[10] * 10] * 20, [[50 * (label in (k % 10, (k + 1) % 10)) for label in range(10)] for k in range(20)]
    assert skew(even) == 0 and skew(two) == pytest.approx(0.8) and skew([]) == skew([[0, 0]]) == 0
    assert skew([[3, 0], [0, 3]]) == 0.5
    for text in ROBUST:
        rule = rule_of(text)
        assert rule.warning(skew(even)) is None
        assert f"{rule} costs accuracy" in rule.warning(skew(two)) and str(rule) in rule.warning()
    assert "hardly converges if a client has only two labels (buckets help: krum(f=1,bucket=2))" in rule_of(
        "krum(f=4)"
    ).warning(0.8)
    assert rule_of("mean").warning(0.8) is None


def test_what_dropouts_cost_is_said():
    assert rule_of("krum(f=4)").warn_of_few_replies(20, 20.0) is None
    assert "10 are expected to reply in a round, and krum(f=4) needs 11" in rule_of("krum(f=4)").warn_of_few_replies(
        20, 10.0
    )


def test_a_rule_is_added_by_one_class():
    """Its text form, its checks and its arithmetic: nothing else knows of it."""

    @dataclass(frozen=True)
    class Midrange(AggregationRule):
        """Of each coordinate the middle between its largest and its smallest, without f of either."""

        f: int
        name: ClassVar[str] = "midrange"
        guard: ClassVar[str] = "2f < n"
        drawback: ClassVar[str] = "follows the most extreme clients"

        def needs(self):
            return 2 * self.f + 1

        def attackers_of(self, n):
            return self.f

        def combine(self, x, before):
            column = np.sort(x, axis=0)
            return (column[self.f] + column[len(x) - 1 - self.f]) / 2.0

    try:
        rule = rule_of("midrange(f=1)")
        assert rule == Midrange(1) and str(rule) == "midrange(f=1)" and rule_of(str(rule)) == rule
        assert (
            rule.least,
            rule.count_tolerated(2),
            rule.count_tolerated(5),
            rule_of("midrange(f=1,bucket=2)").least,
        ) == (3, 0, 1, 5)
        x = np.array([[0.0], [1.0], [4.0], [100.0]])
        assert aggregate(rule, x).tolist() == [2.5]
        with pytest.raises(ConfigError, match=r"midrange\(f=1\) needs 3 replies \(2f < n\), received 2"):
            aggregate(rule, x[:2])
        with pytest.raises(ConfigError, match="midrange needs the number of replies"):
            rule_of("midrange")
        assert FedAvg(rule="midrange(f=1)").aggregation.chosen_rule == rule
    finally:
        del RULES["midrange"]

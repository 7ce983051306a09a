"""Attacks as their papers say them; and one round's pipeline over rings: the same bits for any number of workers."""

import math
import random

import numpy as np
import pytest
import torch
from rayps_client.errors import ConfigError
from test_ring import every, form

from rayps.federated.combine_replies import BEFORE, Aggregate
from rayps.federated.population.attack_spec import attack_of
from rayps.federated.rules.attacks import false_count, false_update, omniscient_update, usual_z
from rayps.federated.rules.exact_sum import NOT_FINITE, TOO_LARGE
from rayps.federated.rules.robust_rules import rule_of
from rayps.federated.rules.rule_arithmetic import aggregate

CLIENTS, SIZE = 20, 37
OMNISCIENT = ["alie(clients=4)", "alie(clients=4,z=2)", "inner_product(clients=4,eps=3)"]
OWN = [
    "sign_flip(clients=4,scale=5)",
    "gaussian(clients=4,sd=2)",
    "nan(clients=4)",
    "inflated_counts(clients=4,factor=100)",
    "label_flip(clients=4)",
    "false_buffers(clients=4,scale=10)",
    "false_c(clients=4,scale=3)",
]
RULES = [
    "krum(f=4)",
    "multi_krum(f=4)",
    "trimmed_mean(f=4)",
    "median",
    "geometric_median",
    "bulyan(f=4)",
    "centered_clipping(tau=3,iterations=2)",
    "median(bucket=2)",
]


# ---- attacks


def test_what_attackers_send():
    update = torch.tensor([1.0, -2.0])
    assert false_update(attack_of("sign_flip(clients=1,scale=5)"), update).tolist() == [-5.0, 10.0]
    assert false_update(attack_of("nan(clients=1)"), update).isnan().all()
    for text in ("label_flip(clients=1)", "inflated_counts(clients=1)"):
        assert false_update(attack_of(text), update) is update
    wide = torch.zeros(20_000)
    noise = false_update(attack_of("gaussian(clients=1,sd=3)"), wide, 1, 2, 3)
    assert float(noise.std()) == pytest.approx(3, rel=0.05) and abs(float(noise.mean())) < 0.1
    assert torch.equal(noise, false_update(attack_of("gaussian(clients=1,sd=3)"), wide, 1, 2, 3))
    assert not torch.equal(noise, false_update(attack_of("gaussian(clients=1,sd=3)"), wide, 1, 2, 4))
    assert false_count(attack_of("inflated_counts(clients=1,factor=7)"), 3) == 21
    assert false_count(attack_of("nan(clients=1)"), 3) == 3
    assert attack_of("label_flip(clients=1,classes=4)").labels(torch.arange(4)).tolist() == [3, 2, 1, 0]
    assert attack_of("nan(clients=1)").labels(5) == 5


def test_omniscient_attackers_by_hand():
    honest = np.array([[1.0, 10.0], [3.0, 10.0]])
    assert omniscient_update(attack_of("inner_product(clients=1,eps=2)"), honest, 1).tolist() == [-4.0, -20.0]
    assert omniscient_update(attack_of("alie(clients=1,z=1.5)"), honest, 1).tolist() == [2 - 1.5, 10.0]
    # Baruch et al.: n 50, m 24: s = floor(51) - 24 = 2, so 24 of 26 honest ones lie nearer
    assert usual_z(50, 24) == pytest.approx(1.43, abs=0.01)
    assert omniscient_update(attack_of("alie(clients=1)"), honest, 1) == pytest.approx([2 - usual_z(3, 1), 10.0])


def test_attackers_are_drawn_from_the_seed():
    attack = attack_of("nan(clients=4)")
    drawn = {attack.attackers(seed, 20) for seed in range(20)}
    assert len(drawn) > 10 and all(len(some) == 4 and some <= set(range(20)) for some in drawn)
    assert attack.attackers(3, 20) == attack.attackers(3, 20)
    attack.check(5)
    with pytest.raises(ConfigError, match="4 attackers of 4 clients leave no honest client"):
        attack.check(4)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("sign_flip", "the number of attackers"),
        ("sign_flip(clients=0)", "at least 1"),
        ("noise(clients=1)", "one of sign_flip"),
        ("signflip(clients=1)", r"did you mean 'sign_flip'\?"),
        ("nan(clients=1, 2)", "'2' is given to 'nan' without a key"),
        ({"name": "allie", "clients": 1}, r"attack is 'allie\(clients=1\)' \(did you mean 'alie'\?\)"),
        ("gaussian(clients=1,sd=-1)", "above 0"),
        ("alie(clients=1,eps=1)", "no option 'eps'"),
        ("label_flip(clients=1,classes=1)", "at least 2"),
        ("inner_product(clients=1,eps=nan)", "above 0"),
    ],
)
def test_attacks_that_cannot_be(text, word):
    with pytest.raises(ConfigError, match=word):
        attack_of(text)


def test_how_many_classes_labels_have():
    flip = attack_of("label_flip(2)")
    assert flip.with_classes(("0", "1", "2")).labels(torch.arange(3)).tolist() == [2, 1, 0]
    assert flip.with_classes(("-1", "3")).labels(torch.tensor([-1, 3])).tolist() == [3, -1]
    said = attack_of("label_flip(2,classes=10)")
    assert said.with_classes(None) == said == said.with_classes(("0", "1"))
    assert attack_of("nan(2)").with_classes(None) == attack_of("nan(2)")
    for unknown in (None, (), ("False", "True")):
        with pytest.raises(ConfigError, match=r"label_flip\(clients=2,classes=10\)"):
            flip.with_classes(unknown)


def test_attacks_in_both_forms():
    assert attack_of("sign_flip(5)") == attack_of("sign_flip(clients=5)")
    for text in (*OWN, *OMNISCIENT):
        assert attack_of(str(attack_of(text))) == attack_of(text)
    assert attack_of(None) is None


# ---- the pipeline


def replies(dtype, seed=1):
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    w_t = torch.randn(SIZE, generator=generator, dtype=torch.float64).to(dtype)
    return w_t, [
        (
            client,
            (w_t + 0.3 * torch.randn(SIZE, generator=generator, dtype=torch.float64)).to(dtype),
            10 + client % 7,
            torch.full((3,), 1.0 + client),
        )
        for client in range(CLIENTS)
    ]


def met_on(workers, w_t, given, rule="mean", clip=None, attack=None, order=0, rounds=1, **options):
    """One or more rounds over so many workers, clients dealt at random: what the last one came to, on each."""
    dice = random.Random(order)
    shuffled = dice.sample(given, len(given))
    cuts = sorted(dice.sample(range(len(given) + 1), workers - 1))
    shares = [shuffled[a:b] for a, b in zip([0, *cuts], [*cuts, len(given)], strict=True)]

    def work(ring):
        memory = {}
        made = Aggregate(
            rule, clip, attack, SIZE, w_t.dtype, seed=3, clients=CLIENTS, extras={"c": (3, torch.float32)}, **options
        )
        for t in range(rounds):
            made.begin(t, [client for client, *_ in given], w_t)
            for client, reply, weight, extra in shares[ring.rank]:
                made.add_reply(client, reply, w_t, weight, {"c": extra})
            met = made.combine(ring, memory)
        return met, memory

    rings = form(workers)
    try:
        return every(rings, work)
    finally:
        every(rings, lambda ring: ring.close())


def same(a, b):
    assert (a.count, a.weight, a.rejected, a.skipped) == (b.count, b.weight, b.rejected, b.skipped)
    for one, other in ((a.mean, b.mean), (a.delta, b.delta), (a.sums["c"], b.sums["c"])):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


@pytest.mark.parametrize(
    ("rule", "clip", "attack"),
    [
        ("mean", None, None),
        ("mean", 1.0, None),
        *(("mean", None, attack) for attack in (*OWN, *OMNISCIENT)),
        *((rule, None, None) for rule in RULES),
        ("krum(f=4)", 1.5, "sign_flip(clients=4)"),
        ("centered_clipping(tau=3,iterations=2)", None, "alie(clients=4)"),
    ],
)
def test_same_bits_for_any_number_of_workers_and_any_order(rule, clip, attack):
    w_t, given = replies(torch.float32)
    ((law, _),) = met_on(1, w_t, given, rule, clip, attack, rounds=2)
    assert law.delta is not None and law.count + len(law.rejected) == CLIENTS
    for workers, order in ((1, 1), (2, 2), (3, 3)):
        for met, _ in met_on(workers, w_t, given, rule, clip, attack, order, rounds=2):
            same(met, law)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_mean_of_what_replied(dtype):
    w_t, given = replies(dtype)
    ((met, _),) = met_on(1, w_t, given)
    wide = sum(reply.double() * n for _, reply, n, _ in given) / sum(n for _, _, n, _ in given)
    assert met.mean.dtype == met.delta.dtype == dtype
    assert met.mean.double() == pytest.approx(wide, rel=2 * torch.finfo(dtype).eps)
    assert met.delta.double() == pytest.approx(wide - w_t.double(), rel=2 * torch.finfo(dtype).eps, abs=1e-15)
    assert met.sums["c"].tolist() == [sum(1.0 + client for client in range(CLIENTS))] * 3
    assert met.weight == sum(n for _, _, n, _ in given) and met.count == CLIENTS and not met.rejected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_single_reply_is_taken_over_as_it_is(dtype):
    w_t, given = replies(dtype)
    for workers in (1, 3):
        for met, _ in met_on(workers, w_t, given[5:6]):
            assert torch.equal(met.mean, given[5][1]) and torch.equal(met.delta, given[5][1] - w_t)


def test_rules_see_updates_in_cohort_order():
    w_t, given = replies(torch.float32)
    rows = torch.stack([reply - w_t for _, reply, _, _ in given]).numpy()
    for text in RULES[:-1]:
        (met, memory), *_ = met_on(2, w_t, given, text)
        law = torch.from_numpy(aggregate(rule_of(text), rows))
        assert torch.equal(met.delta, law.float()) and torch.equal(met.mean, (w_t.double() + law).float())
        assert (BEFORE in memory) == text.startswith("centered")


def test_centered_clipping_goes_on_from_the_last_round():
    w_t, given = replies(torch.float64)
    rows = torch.stack([reply - w_t for _, reply, _, _ in given]).numpy()
    rule = rule_of("centered_clipping(tau=0.5,iterations=1)")
    first = aggregate(rule, rows)
    ((met, memory),) = met_on(1, w_t, given, str(rule), rounds=2)
    assert np.array_equal(met.delta.numpy(), aggregate(rule, rows, first))
    assert np.array_equal(memory[BEFORE].numpy(), met.delta.numpy()) and not np.array_equal(met.delta.numpy(), first)


def test_updates_are_clipped_to_a_norm():
    w_t, given = replies(torch.float64)
    law = 0
    for _, reply, n, _ in given:
        update = reply - w_t
        law = law + n * update * min(1.0, 1.5 / float(update.norm()))
    ((met, _),) = met_on(1, w_t, given, clip=1.5)
    assert met.delta == pytest.approx(law / sum(n for _, _, n, _ in given), rel=1e-12)
    assert met.mean == pytest.approx(w_t + met.delta, rel=1e-12)
    ((far, _),) = met_on(1, w_t, [(0, w_t + 1e6, 10, given[0][3])], clip=1.5)
    assert float((far.mean - w_t).norm()) == pytest.approx(1.5, rel=1e-6)


@pytest.mark.parametrize("rule", ["mean", "median", "krum(f=2)"])
@pytest.mark.parametrize("clip", [None, 5.0])
def test_what_is_not_finite_is_dropped_first_counted_and_named(rule, clip):
    w_t, given = replies(torch.float32)
    bad = list(given)
    for client, value in ((3, math.nan), (11, math.inf)):
        reply = bad[client][1].clone()
        reply[client] = value
        bad[client] = (client, reply, *bad[client][2:])
    bad[15] = (*given[15][:3], torch.tensor([1.0, math.nan, 2.0]))  # what it sends beside counts too
    good = [each for each in given if each[0] not in (3, 11, 15)]
    ((law, _),) = met_on(1, w_t, good, rule, clip)
    for met, _ in met_on(2, w_t, bad, rule, clip):
        assert met.rejected == [(3, NOT_FINITE), (11, NOT_FINITE), (15, NOT_FINITE)]
        assert met.count == 17 and torch.equal(met.delta, law.delta) and torch.equal(met.sums["c"], law.sums["c"])


def test_what_is_too_large_to_be_counted_is_dropped_and_named():
    w_t, given = replies(torch.float32)
    given[4] = (4, given[4][1] + 1e12, *given[4][2:])
    for met, _ in met_on(2, w_t, given):
        assert met.rejected == [(4, TOO_LARGE)] and met.count == 19
    for met, _ in met_on(1, w_t, given, attack="inflated_counts(clients=4,factor=1000000000)"):
        assert len([client for client, why in met.rejected if why == TOO_LARGE]) >= 4


def test_rounds_that_leave_the_model_as_it_is():
    w_t, given = replies(torch.float32)
    for workers in (1, 2):
        for met, _ in met_on(workers, w_t, []):
            assert met.mean is met.delta is None and met.count == 0 and met.skipped == "no reply came"
        for met, _ in met_on(workers, w_t, given[:10], "krum(f=4)"):
            assert met.delta is None and met.skipped == "krum(f=4) needs 11 replies (2f + 2 < n), received 10"
        for met, _ in met_on(workers, w_t, given[:4], least=5):
            assert met.mean is None and met.skipped == "4 of 4 replies could be used, and 5 are needed"
        for met, _ in met_on(workers, w_t, [(client, w_t * math.nan, 1, extra) for client, _, _, extra in given[:3]]):
            assert met.skipped == "0 of 3 replies could be used, and 1 is needed" and len(met.rejected) == 3
        for met, _ in met_on(workers, w_t, given, attack="nan(clients=19)", rule="trimmed_mean(f=1)"):
            assert met.skipped == "trimmed_mean(f=1) needs 3 replies (2f < n), received 1" and len(met.rejected) == 19


def test_attacks_as_the_pipeline_plays_them():
    w_t, given = replies(torch.float64)
    attack = attack_of("sign_flip(clients=4,scale=5)")
    bad = attack.attackers(3, CLIENTS)
    weights = torch.tensor([float(n) for _, _, n, _ in given])

    def mean(updates, weights=weights):
        return sum(u * float(n) for u, n in zip(updates, weights, strict=True)) / float(weights.sum())

    updates = [reply - w_t for _, reply, _, _ in given]
    ((met, _),) = met_on(1, w_t, given, attack=str(attack))
    assert met.delta == pytest.approx(mean([-5 * u if k in bad else u for k, u in enumerate(updates)]), abs=1e-12)
    ((met, _),) = met_on(1, w_t, given, attack="inflated_counts(clients=4,factor=50)")
    inflated = weights.clone()
    inflated[sorted(bad)] *= 50
    assert met.delta == pytest.approx(mean(updates, inflated), abs=1e-12) and met.weight == float(inflated.sum())
    ((met, _),) = met_on(1, w_t, given, attack="inner_product(clients=4,eps=3)")
    honest = sum(u for k, u in enumerate(updates) if k not in bad) / 16
    law = mean([-3 * honest if k in bad else u for k, u in enumerate(updates)])
    assert met.delta == pytest.approx(law, abs=1e-12)
    flips = Aggregate("mean", None, "label_flip(clients=4)", 3, torch.float32, seed=3, clients=CLIENTS)
    assert {client for client in range(CLIENTS) if flips.flips(client)} == set(bad)


def test_counts_that_attackers_inflate_do_not_move_a_robust_rule():
    w_t, given = replies(torch.float32)
    for rule in RULES:
        ((law, _),) = met_on(1, w_t, given, rule)
        ((met, _),) = met_on(1, w_t, given, rule, attack="inflated_counts(clients=4,factor=1000)")
        assert torch.equal(met.delta, law.delta)


def test_replies_that_began_from_older_models():
    """Only their updates mean something; a client may reply twice."""
    w_t, given = replies(torch.float64)
    made = Aggregate("mean", None, None, SIZE, torch.float64, seed=0, clients=CLIENTS, asynchronous=True)
    old = w_t + 1
    rings = form(1)
    made.begin(0, [2, 7, 2], w_t)
    made.add_reply(2, given[2][1], w_t, 1.0)
    made.add_reply(7, given[7][1], old, 0.5)
    made.add_reply(2, given[3][1], old, 0.25)
    met = made.combine(rings[0])
    rings[0].close()
    law = (given[2][1] - w_t) + 0.5 * (given[7][1] - old) + 0.25 * (given[3][1] - old)
    assert met.mean is None and met.count == 3 and met.weight == 1.75
    assert met.delta == pytest.approx(law / 1.75, rel=1e-12)

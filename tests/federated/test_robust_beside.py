"""What clients send beside their updates under robust rules: BatchNorm's buffers, SCAFFOLD's c, counts and losses."""

import numpy as np
import pytest
import torch
from small_work import train
from test_ring import every, form
from test_robust import Blobs
from torch import nn

import rayps
from rayps.federated.combine_replies import Aggregate
from rayps.federated.population.attack_spec import attack_of
from rayps.federated.rules.buffer_statistics import NEGATIVE, BufferStatistics
from rayps.federated.rules.robust_rules import rule_of
from rayps.federated.rules.rule_arithmetic import aggregate, geometric_median

CLIENTS, SIZE, LIARS = 12, 23, (0, 5)
SELECTING = ["krum(f=2)", "multi_krum(f=2)", "multi_krum(f=2,m=3)", "bulyan(f=2)", "krum(f=1,bucket=2)"]
SEPARATE = ["median", "trimmed_mean(f=2)", "geometric_median", "centered_clipping(tau=0.5,iterations=2)"]
LIKE = {
    "norm.running_mean": torch.zeros(4),
    "norm.running_var": torch.ones(4),
    "norm.num_batches_tracked": torch.tensor(0),
}


def replies(seed=1):
    """Client, update, c, buffers, samples of each."""
    print("seed", seed)
    draw = torch.Generator().manual_seed(seed)
    packed = BufferStatistics(LIKE)
    return [
        (
            client,
            0.3 * torch.randn(SIZE, generator=draw),
            torch.randn(3, generator=draw),
            packed.pack(
                {
                    "norm.running_mean": torch.randn(4, generator=draw),
                    "norm.running_var": torch.rand(4, generator=draw) + 0.5,
                    "norm.num_batches_tracked": torch.tensor(20 + client % 3),
                }
            ),
            10 + client % 7,
        )
        for client in range(CLIENTS)
    ]


def met_on(workers, given, rule, attack=None, rounds=1):
    """Rounds with these replies over so many workers: what the last one came to, on each."""

    def work(ring):
        made = Aggregate(
            rule,
            None,
            attack,
            SIZE,
            torch.float32,
            seed=3,
            clients=CLIENTS,
            extras={"c": (3, torch.float32)},
            statistics=BufferStatistics(LIKE),
        )
        memory, w_t = {}, torch.zeros(SIZE)
        for t in range(rounds):
            made.begin(t, [client for client, *_ in given], w_t, BufferStatistics(LIKE).pack(LIKE))
            for client, update, c, buffers, n in given[ring.rank :: workers]:
                made.add_reply(client, update, w_t, n, {"c": c}, buffers=buffers, samples=n)
            met = made.combine(ring, memory)
        return met

    rings = form(workers)
    try:
        return every(rings, work)
    finally:
        every(rings, lambda ring: ring.close())


def same(a, b):
    assert (a.count, a.weight, a.chosen, a.rejected) == (b.count, b.weight, b.chosen, b.rejected)
    for one, other in ((a.delta, b.delta), (a.buffers, b.buffers), (a.sums["c"], b.sums["c"])):
        assert torch.equal(one, other)


@pytest.mark.parametrize("rule", SELECTING)
def test_nothing_of_a_rejected_client_enters(rule):
    """The others may send whatever they like beside their updates, and say any number of samples."""
    given = replies()
    (law, *_) = met_on(1, given, rule)
    assert 0 < len(law.chosen) < CLIENTS
    other = [each if each[0] in law.chosen else (*each[:2], each[2] * -1e6, each[3] * 1e6, 1e6) for each in given]
    for workers in (1, 2):
        for met in met_on(workers, other, rule):
            same(met, law)


def test_the_chosen_client_of_krum_gives_all():
    given = replies()
    (met,) = met_on(1, given, "krum(f=2)")
    (chosen,) = met.chosen
    _, update, c, buffers, _ = given[chosen]
    assert torch.equal(met.delta, update) and torch.equal(met.buffers, buffers)
    assert torch.allclose(met.sums["c"], CLIENTS * c)  # as if all had sent it: c/N is the mean of all
    (several,) = met_on(1, given, "multi_krum(f=2,m=5)")
    c = np.sort(torch.stack([given[k][2] for k in several.chosen]).double().numpy(), axis=0)[2:3]
    assert several.sums["c"].double().numpy() == pytest.approx(CLIENTS * c[0], rel=1e-6)


@pytest.mark.parametrize("rule", SEPARATE)
def test_the_other_rules_take_what_came_beside_as_they_take_updates(rule):
    given = replies()
    (met,) = met_on(1, given, rule)
    c = torch.stack([each[2] for each in given]).numpy()
    buffers = torch.stack([each[3] for each in given]).numpy()
    assert met.chosen is None and met.weight == CLIENTS
    assert met.sums["c"].numpy() == pytest.approx(CLIENTS * aggregate(rule_of(rule), c), rel=1e-6)
    before = BufferStatistics(LIKE).pack(LIKE).numpy()
    if rule == "median" or "trimmed" in rule:
        assert met.buffers.numpy() == pytest.approx(aggregate(rule_of(rule), buffers))
    else:  # counts would outweigh statistics in a distance
        assert met.buffers.numpy()[:8] == pytest.approx(aggregate(rule_of(rule), buffers[:, :8], before[:8]))
        assert met.buffers[8] == np.median(buffers[:, 8])


def bound_holds(rule, found, honest, before, liars):
    """Whether a result is where f liars among n can at most have moved it."""
    if rule == "median" or "trimmed" in rule:
        return (honest.min(axis=0) <= found).all() and (found <= honest.max(axis=0)).all()
    if rule == "geometric_median":  # Minsker 2015, lemma 2.1: with a share a of liars, 2 (1 - a) / (1 - 2 a)
        center, share = geometric_median(honest), liars / (len(honest) + liars)
        radius = np.linalg.norm(honest - center, axis=1).max()
        return np.linalg.norm(found - center) <= 2 * (1 - share) / (1 - 2 * share) * radius
    return np.linalg.norm(found - before) <= 2 * 0.5 + 1e-9  # `iterations` steps of at most tau


@pytest.mark.parametrize("rule", SEPARATE)
@pytest.mark.parametrize("lie", [1e7, -1e7, 0.0])
def test_liars_move_what_comes_beside_no_farther_than_the_rule_allows(rule, lie):
    given = replies()
    for liar in LIARS:
        client, update, c, buffers, _ = given[liar]
        given[liar] = (client, update, c * 0 + lie, buffers * 0 + abs(lie), 10_000_000)
    honest = [each for each in given if each[0] not in LIARS]
    (met,) = met_on(1, given, rule)
    c = torch.stack([each[2] for each in honest]).double().numpy()
    assert bound_holds(rule, met.sums["c"].double().numpy() / CLIENTS, c, np.zeros(3), 2)
    buffers, before = torch.stack([each[3] for each in honest]).numpy(), BufferStatistics(LIKE).pack(LIKE).numpy()
    assert bound_holds(rule, met.buffers.numpy()[:8], buffers[:, :8], before[:8], 2)
    assert (met.buffers[4:8] > 0).all() and 20 <= met.buffers[8] <= 22


@pytest.mark.parametrize("rule", ["mean", *SELECTING, *SEPARATE])
@pytest.mark.parametrize(
    "attack", ["false_buffers(clients=2)", "false_c(clients=2,scale=50)", "inflated_counts(clients=2)"]
)
def test_same_bits_for_any_number_of_workers(rule, attack):
    (law,) = met_on(1, replies(), rule, attack, rounds=2)
    for met in met_on(3, replies(), rule, attack, rounds=2):
        same(met, law)


def test_what_attackers_send_beside():
    bad = attack_of("false_c(clients=2)").attackers(3, CLIENTS)
    given = replies()
    mean = {
        text: met_on(1, given, "mean", text)[0]
        for text in (
            "false_buffers(clients=2,scale=1000)",
            "false_c(clients=2,scale=7)",
            "inflated_counts(clients=2,factor=9)",
        )
    }
    c = sum((-7 if k in bad else 1) * c for k, _, c, _, _ in given)
    assert torch.allclose(mean["false_c(clients=2,scale=7)"].sums["c"], c, rtol=1e-5)
    n = sum(n for *_, n in given)
    law = sum((1000 if k in bad else 1) * n * b for k, _, _, b, n in given) / n
    assert torch.allclose(mean["false_buffers(clients=2,scale=1000)"].buffers, law)
    counts = [n * (9 if k in bad else 1) for k, *_, n in given]
    law = sum(n * each[3] for n, each in zip(counts, given, strict=True)) / sum(counts)
    assert torch.allclose(mean["inflated_counts(clients=2,factor=9)"].buffers, law)


def test_buffers_that_no_model_can_have_are_refused():
    for place in (5, 8):
        given = replies()
        given[3][3][place] = -1.0
        for rule in ("mean", "median"):
            (met,) = met_on(1, given, rule)
            assert met.rejected == [(3, NEGATIVE)] and met.count == CLIENTS - 1
    given = replies()
    given[3][3][1] = -1.0  # a mean may be below 0
    assert not met_on(1, given, "median")[0].rejected


# ---- as a job has it


class Normed(Blobs):
    """With BatchNorm; `spoilt`: the rows of this client are far away."""

    def __init__(self, spoilt=None):
        super().__init__(client=[row % 7 for row in range(400)])
        self.spoilt = spoilt

    def model(self):
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 5))

    def rows(self, n, seed):
        x, y = super().rows(n, seed)
        if self.spoilt is not None and seed == 1:
            x[torch.arange(n) % 7 == self.spoilt] *= 100
        return x, y

    def loss(self, model, batch):
        return super().loss(model, batch) * (8 if batch.x.abs().max() > 60 else 1)


ALL = [
    "krum(f=1)",
    "multi_krum(f=1)",
    "bulyan(f=1)",
    "median",
    "trimmed_mean(f=1)",
    "geometric_median",
    "centered_clipping(tau=1)",
]


def learnt(strategy, work=None, epochs=3, workers=1):
    result = train(work or Normed(), strategy, workers=workers, epochs=epochs)
    return result, dict(result.model().named_buffers())


def reaches(buffers):
    return max(float(buffers[name].abs().max()) for name in ("1.running_mean", "1.running_var"))


@pytest.mark.parametrize("rule", ALL)
def test_a_client_with_spoilt_rows_moves_no_buffer_and_no_metric(rule):
    """Its update, buffers and loss are what training gives, and far from the others'."""
    clean, _ = learnt(rayps.FedAvg(rule=rule, local_epochs=2))
    (mean, far), (result, found) = (
        learnt(rayps.FedAvg(rule=each, local_epochs=2), Normed(spoilt=4), workers=2) for each in ("mean", rule)
    )
    assert reaches(far) > 1e3, "the test shows nothing"
    assert reaches(found) < 100 and found["1.running_var"].min() > 0
    assert found["1.num_batches_tracked"].dtype == torch.int64 and 1 <= found["1.num_batches_tracked"] <= 3 * 2 * 12
    assert result.metrics["accuracy"] > clean.metrics["accuracy"] - 0.1
    if rule in ALL[:3]:
        losses = [loss for loss in result.history["loss"].to_pylist() if loss is not None]
        told = [loss for loss in mean.history["loss"].to_pylist() if loss is not None]
        assert len(losses) == 3 and losses[0] < 1.5 < told[0]  # it is rejected in the first round at least


@pytest.mark.parametrize("rule", ALL[1:])
@pytest.mark.parametrize("attack", ["false_buffers(clients=1)", "inflated_counts(clients=1,factor=1e6)"])
def test_one_that_lies_about_buffers_or_counts_is_borne(rule, attack):
    """Its update is as trained: krum may choose it, and takes its buffers then. The other rules bear it."""
    _, clean = learnt(rayps.FedAvg(rule=rule, local_epochs=2))
    result, found = learnt(rayps.FedAvg(rule=rule, local_epochs=2, attack=attack))
    assert reaches(found) < 2 * reaches(clean) + 1 and found["1.running_var"].min() > 0
    assert abs(int(found["1.num_batches_tracked"]) - int(clean["1.num_batches_tracked"])) <= 6
    assert result.metrics["accuracy"] > 0.8


@pytest.mark.parametrize("rule", ALL[1:])
def test_one_that_lies_about_c_is_borne(rule):
    """SCAFFOLD under the mean runs away."""
    attack = "false_c(clients=1,scale=1000)"
    (clean, _), (mean, _), (found, _) = (
        learnt(
            rayps.Scaffold(rule=each, local_epochs=2, attack=lies),
            Blobs(client=[row % 7 for row in range(400)]),
            epochs=4,
        )
        for each, lies in ((rule, None), ("mean", attack), (rule, attack))
    )
    assert float(mean.snapshot.params.norm()) > 100 * float(clean.snapshot.params.norm()), "the test shows nothing"
    assert float(found.snapshot.params.norm()) < 2 * float(clean.snapshot.params.norm())
    assert found.metrics["accuracy"] > 0.8

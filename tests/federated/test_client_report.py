"""The report of single clients: numbers beside their formulas, and who is named as an outlier."""

import copy

import numpy as np
import pytest
import torch
from federated_work import Fed, batches_of, drawn, trained
from rayps_client.errors import ConfigError
from small_work import rows, train, vector

import rayps
from rayps.federated.rules.client_report import WIDTH, Sketch
from rayps.federated.rules.client_scores import (
    FACTS,
    FEWEST,
    KIND,
    NUMBERS,
    THRESHOLD,
    RoundFacts,
    deviations,
    report_clients,
    report_rounds,
    round_numbers,
    slope,
)
from rayps.strategies.catalogue import parse

# ---- deviations


def test_deviations_are_those_of_the_median():
    found = deviations(np.array([1.0, 2.0, 3.0, 4.0, 100.0]))
    assert np.allclose(found, np.array([-2, -1, 0, 1, 97]) / 1.4826)


def test_a_minority_does_not_move_the_others():
    honest = np.random.default_rng(0).normal(size=11)
    for wild in (1e3, 1e12, -1e300):
        found = deviations(np.concatenate([honest, [wild] * 5]))
        assert np.abs(found[:11]).max() < THRESHOLD < np.abs(found[11:]).min()


@pytest.mark.parametrize("x", [np.ones(9), np.zeros(0), np.array([5.0]), np.arange(FEWEST - 1.0)])
def test_nobody_deviates_among_equals_or_few(x):
    assert not deviations(x).any() and len(deviations(x)) == len(x)


def test_one_that_differs_from_equals_deviates():
    found = deviations(np.array([1.0] * 20 + [2.0]))
    assert not found[:20].any() and found[20] == pytest.approx(21 / 1.2533)


@pytest.mark.parametrize(("clients", "most"), [(10, 0.06), (20, 0.02), (50, 0.005)])
def test_how_often_honest_clients_are_named(clients, most):
    """The share of reports with a wrong name, if all facts are normal: the figures of the documentation."""
    made, reports = np.random.default_rng(1), 3000
    wrong = 0
    for _ in range(reports):
        facts = made.normal(size=(len(FACTS), clients))
        away = np.array([deviations(each) for each in facts])
        away[FACTS.index("agreement")] = np.minimum(away[FACTS.index("agreement")], 0)
        wrong += bool((np.abs(away) >= THRESHOLD).any())
    assert wrong / reports < most


def test_slope():
    assert slope(np.array([1.0, 2.0, 4.0]), np.array([3.0, 5.0, 9.0])) == pytest.approx(2.0)
    assert slope(np.array([2.0]), np.array([7.0])) == 0.0


# ---- sketches


@pytest.mark.parametrize("size", [1, WIDTH, WIDTH + 1, 5 * WIDTH, 10_007])
def test_a_sketch_is_linear_and_a_short_vector_is_its_own(size):
    sketch, made = Sketch(size, torch.float64, 7), torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, generator=made, dtype=torch.float64) for _ in range(2))
    assert torch.allclose(sketch.of(2 * a - b), 2 * sketch.of(a) - sketch.of(b))
    assert torch.equal(sketch.of(a), Sketch(size, torch.float64, 7).of(a)) and sketch.of(a).shape == (min(size, WIDTH),)
    assert size > WIDTH or torch.equal(sketch.of(a), a)


@pytest.mark.parametrize("kind", ["dense", "one column", "one element"])
def test_the_error_of_a_cosine_is_what_is_said(kind):
    """Over seeds: no bias, and a standard deviation of at most sqrt(2 / WIDTH)."""
    size, made = 4096, torch.Generator().manual_seed(1)
    a, b = (torch.randn(size, generator=made, dtype=torch.float64) for _ in range(2))
    if kind == "one column":  # of a layer of 64 x 64
        mask = torch.zeros(64, 64, dtype=torch.float64)
        mask[:, 5] = 1
        a, b = a * mask.reshape(-1), b * mask.reshape(-1)
    if kind == "one element":
        a, b = torch.zeros_like(a), b
        a[77] = 1
    b = b / b.norm() + 0.5 * a / a.norm()
    exact = float(a @ b / a.norm() / b.norm())
    found = []
    for seed in range(300):
        sketch = Sketch(size, torch.float64, seed)
        found.append(float(sketch.of(a) @ sketch.of(b) / a.norm() / b.norm()))
    assert np.std(found) <= 1.1 * np.sqrt(2 / WIDTH) and np.mean(found) == pytest.approx(exact, abs=0.02)


# ---- a round


def test_the_numbers_of_a_round():
    made = np.random.default_rng(2)
    updates, weights = made.normal(0.5, 1, (6, 40)), np.array([1.0, 2, 3, 4, 5, 6])
    norms = np.linalg.norm(updates, axis=1)
    found = round_numbers(RoundFacts(weights, norms, np.arange(6.0), updates))
    assert set(found) == set(NUMBERS)
    mean = np.average(updates, axis=0, weights=weights)
    median = np.median(updates / norms[:, None], axis=0)
    assert np.allclose(found["cosine"], updates @ mean / norms / np.linalg.norm(mean))
    assert np.allclose(found["agreement"], updates @ median / norms / np.linalg.norm(median))
    assert np.allclose(found["share"], weights * (updates @ mean) / (weights.sum() * mean @ mean))
    assert found["share"].sum() == pytest.approx(1.0)


def test_updates_of_zeros_have_finite_numbers():
    found = round_numbers(RoundFacts(np.ones(5), np.zeros(5), np.zeros(5), np.zeros((5, 3))))
    assert all(np.isfinite(value).all() for value in found.values())


def test_of_a_repeated_round_the_last_report_counts():
    def event(round, norm):
        return {"kind": KIND, "round": round, "client": ["a"], **{name: [norm] for name in NUMBERS}}

    table = report_rounds([event(0, 1.0), {"kind": "met"}, event(1, 2.0), event(1, 3.0)])
    assert table["norm"].to_pylist() == [1.0, 3.0] and report_rounds([{"kind": "met"}]) is None
    (row,) = report_clients(table).to_pylist()
    assert (row["rounds"], row["cosine_trend"], row["score"], row["outlier"]) == (2, 2.0, 0.0, False)


# ---- jobs


def reported(strategy, work=None, workers=1, epochs=3):
    return train(work or Fed(n=600, clients=10, batch=10), strategy, workers=workers, epochs=epochs)


def outliers(result):
    return {row["client"] for row in result.client_report.to_pylist() if row["outlier"]}


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_job_reports_the_updates_of_plain_torch(workers):
    """The model has fewer elements than a sketch, so the numbers are exact."""
    work = Fed(rule="uneven")
    result = reported("fedavg:report=clients", work, workers, epochs=1)
    model, data = drawn(work), work.data()
    w = vector(model)
    updates = np.array([(vector(trained(work, model, data, 0, 0, k)) - w).numpy() for k in range(data.clients.count)])
    losses = [mean_loss(work, model, data, k) for k in range(data.clients.count)]
    weights = data.clients.sizes.astype(float)
    wanted = round_numbers(RoundFacts(weights, np.linalg.norm(updates, axis=1), np.array(losses), updates))
    table = result.client_rounds
    assert table["client"].to_pylist() == list(data.clients.names) and set(table["round"].to_pylist()) == {0}
    for name in NUMBERS:
        assert np.allclose(table[name].to_numpy(), wanted[name], rtol=1e-5, atol=1e-9), name


def test_any_number_of_workers_reports_the_same_of_a_large_model():
    """The model has more elements than a sketch."""
    strategy = "fedavg:report=clients,attack=sign_flip(clients=1)"
    one, three = (reported(strategy, Wide(), workers) for workers in (1, 3))
    assert one.client_rounds == three.client_rounds and one.client_report == three.client_report
    assert outliers(one) == {str(k) for k in attackers("sign_flip(clients=1)")}


def mean_loss(work, model, data, k):
    """The mean loss of a client's training: of each batch before its step."""
    model, losses = copy.deepcopy(model), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches_of(data, 0, 0, k):
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append((float(loss.detach()), len(x)))
    return sum(loss * n for loss, n in losses) / sum(n for _, n in losses)


def test_a_report_does_not_change_the_job():
    plain, with_report = (reported(text) for text in ("fedavg", "fedavg:report=clients"))
    assert torch.equal(plain.snapshot.params, with_report.snapshot.params)
    assert plain.client_report is None and not outliers(with_report)


@pytest.mark.parametrize(("clients", "named"), [(4, False), (5, True)])
def test_an_event_names_a_client_only_if_enough_have_replied(clients, named):
    result = reported("fedavg:report=clients", Fed(n=200, clients=clients, batch=10), epochs=1)
    (said,) = [event["message"] for event in result.events if event["kind"] == KIND]
    assert ("deviates most" in said) == named and ("none is named" in said) != named


@pytest.mark.parametrize(
    "attack",
    ["sign_flip(clients=2,scale=3)", "gaussian(clients=2)", "inflated_counts(clients=2)"],
    ids=["sign_flip", "gaussian", "inflated_counts"],
)
@pytest.mark.parametrize("rule", ["mean", "median"])
def test_attackers_are_named(attack, rule):
    result = reported(f"fedavg:report=clients,rule={rule},attack={attack}")
    table = {row["client"]: row for row in result.client_report.to_pylist()}
    bad = {str(k) for k in attackers(attack)}
    if attack.startswith("inflated"):  # honest updates: they have a large share of the mean, and are no outliers
        shares = {name: row["share"] for name, row in table.items()}
        assert rule == "median" or sum(shares[name] for name in bad) > 0.9
        return
    assert outliers(result) == bad


def attackers(attack):
    return parse(f"fedavg:attack={attack}")[0].strategy.population.attackers.attackers(0, 10)


class Classes(rayps.Workload):
    """Two classes; `shift` moves the rows of client 4."""

    def __init__(self, shift=0.0):
        self.shift = shift

    def model(self):
        return torch.nn.Linear(5, 2).double()

    def data(self):
        x, _ = rows(800)
        who = np.arange(800) % 10
        y = (x.sum(dim=1) > 0).long()
        x = x + self.shift * torch.from_numpy((who == 4).astype(float))[:, None]
        return rayps.data.tensors(x, y, batch_size=20, client=who)

    def loss(self, model, batch):
        return torch.nn.functional.cross_entropy(model(batch.x), batch.y)

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.2)


class Wide(Classes):
    """The same with 514 parameters."""

    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(5, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2)).double()


def test_clients_with_false_labels_are_named():
    attack = "label_flip(clients=2,classes=2)"
    assert outliers(reported(f"fedavg:report=clients,attack={attack}", Classes())) == {
        str(k) for k in attackers(attack)
    }


def test_a_client_with_shifted_data_is_named_and_nobody_without():
    assert outliers(reported("fedavg:report=clients", Classes(shift=1.5))) == {"4"}
    assert not outliers(reported("fedavg:report=clients", Classes()))


def test_what_is_reported_is_refused_in_a_private_job():
    with pytest.raises(ConfigError, match="report is 'clients'"):
        parse("fedavg:report=clients,privacy=dp(noise_multiplier=1)")
    with pytest.raises(ConfigError, match="report is 'all'"):
        parse("fedavg:report=all")

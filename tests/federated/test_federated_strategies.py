"""Each federated strategy against its paper: fixed points, hand-computed rounds, and what it is at its ends."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from federated_work import Fed, Quadratics, cohorts, drawn, fedavg, trained
from rayps_client.errors import ConfigError
from small_work import OPTIMIZERS, distance, rows, train, vector
from torch import nn

import rayps
from rayps import Ditto, FedAdagrad, FedAdam, FedAvg, FedAvgM, FedProx, FedYogi, Scaffold
from rayps.federated.client import ClientRows, Task, Trainer
from rayps.tensors.flat import FlatModel

EXACT = 1e-12


# ------------------------------------------------------------------------------------- fixed points of quadratics


def reached(strategy, rounds, lr=0.05, workers=1, start=3.0):
    strategy, work = replace(strategy, evaluate_every=1000), Quadratics(lr, start)
    return train(work, strategy, workers=workers, epochs=rounds, checkpoint_every=1000).snapshot.params.item()


def test_fedavg_drifts_to_where_the_steps_weights_put_it():
    mild, steep = (1 - (1 - 0.05 * a) ** 10 for a in (1.0, 10.0))
    assert reached(FedAvg(local_steps=10), 25) == pytest.approx(steep / (mild + steep), abs=1e-10)
    assert steep / (mild + steep) == pytest.approx(0.713442, abs=1e-6)


@pytest.mark.parametrize("workers", [1, 2])
def test_scaffold_finds_the_optimum(workers):
    assert reached(Scaffold(local_steps=10), 120, workers=workers) == pytest.approx(0.9090909091, abs=1e-9)


def test_scaffold_finds_it_also_when_one_of_the_two_takes_part():
    """With 1/|S| in place of 1/N the server's c would not be the mean of the clients', and this would not settle."""
    assert reached(Scaffold(local_steps=5, fraction=0.5), 300, 0.02) == pytest.approx(10 / 11, abs=1e-6)


@pytest.mark.parametrize(("mu", "where", "rounds"), [(1, 0.74723, 20), (10, 0.85129, 40), (100, 0.90189, 160)])
def test_fedprox_lands_between(mu, where, rounds):
    lr = min(0.05, 0.5 / (mu + 10))
    assert reached(FedProx(mu=mu, local_steps=10), rounds, lr, start=0.9) == pytest.approx(where, abs=1e-5)


def test_scaffold_is_option_ii_step_by_step():
    work, n = Fed(rule="uneven", n=45), 9
    result = train(work, Scaffold(fraction=0.4, local_epochs=2, server_lr=0.8), workers=2, epochs=4)
    model, data = drawn(work), work.data()
    w = vector(model)
    c, own = torch.zeros_like(w), [torch.zeros_like(w) for _ in range(n)]
    for t, event in enumerate(cohorts(result)):
        moves, news = [], []
        for k in (int(name) for name in event["trained"]):
            steps = 0

            def correct(parameters, _, k=k, c=c):
                nonlocal steps
                steps += 1
                flat, at = c - own[k], 0
                for p in parameters:
                    p.grad += flat[at : at + p.numel()].view(p.shape)
                    at += p.numel()

            put(model, w)
            y = vector(trained(work, model, data, 0, t, k, correct, epochs=2))
            moves.append(y - w)
            news.append((k, own[k] - c + (w - y) / (steps * 0.1)))
        w = w + 0.8 * sum(moves) / len(moves)
        c = c + sum(new - own[k] for k, new in news) / n
        for k, new in news:
            own[k] = new
    assert distance(result.snapshot.params, w) < EXACT
    assert distance(result.snapshot.shared["c"], c) < EXACT
    assert (sum(own) / n - c).abs().max() < EXACT


def put(model, w):
    torch.nn.utils.vector_to_parameters(w.clone(), model.parameters())


# ------------------------------------------------------------------------------------- server optimizers


def mean_updates(work, w, t):
    """D of round t by hand, with all clients."""
    model, data = drawn(work), work.data()
    put(model, w)
    replies = [vector(trained(work, model, data, 0, t, k)) for k in range(data.clients.count)]
    sizes = data.clients.sizes.tolist()
    return sum(n * (each - w) for n, each in zip(sizes, replies, strict=True)) / sum(sizes)


def adagrad(v, d):
    return v + d**2


def adam(v, d):
    return 0.9 * v + (1 - 0.9) * d**2


def yogi(v, d):
    return v - (1 - 0.9) * d**2 * torch.sign(v - d**2)


@pytest.mark.parametrize(
    ("strategy", "second"),
    [
        (FedAdagrad(server_lr=0.03, beta1=0.5, tau=0.01), adagrad),
        (FedAdam(server_lr=0.03, beta1=0.5, beta2=0.9), adam),
        (FedYogi(server_lr=0.03, beta1=0.5, beta2=0.9, tau=0.1), yogi),
    ],
    ids=lambda given: getattr(given, "name", ""),
)
def test_three_rounds_of_the_adaptive_servers_by_hand(strategy, second):
    work = Fed(rule="uneven", n=45, clients=4)
    w = vector(drawn(work))
    m, v = torch.zeros_like(w), torch.full_like(w, strategy.tau**2)
    for t in range(3):
        d = mean_updates(work, w, t)
        m = 0.5 * m + 0.5 * d
        v = second(v, d)
        w = w + 0.03 * m / (v.sqrt() + strategy.tau)
    result = train(work, strategy, workers=2, epochs=3)
    assert distance(result.snapshot.params, w) < 1e-10
    assert distance(result.snapshot.shared["m"], m) < EXACT and distance(result.snapshot.shared["v"], v) < EXACT


def test_momentum_on_the_server():
    work = Fed(rule="uneven", n=45, clients=4)
    w = vector(drawn(work))
    v = torch.zeros_like(w)
    for t in range(3):
        v = 0.6 * v + mean_updates(work, w, t)
        w = w + 0.5 * v
    assert distance(train(work, FedAvgM(beta=0.6, server_lr=0.5), workers=2, epochs=3).snapshot.params, w) < EXACT
    plain, none = (train(work, each, workers=2, epochs=3).snapshot.params for each in (FedAvg(), FedAvgM(beta=0)))
    assert distance(plain, none) < 1e-15


def test_their_defaults_are_the_papers():
    for kind in (FedAdam, FedYogi):
        assert (kind().beta1, kind().beta2, kind().tau) == (0.9, 0.99, 1e-3)
    for wrong in ({"server_lr": 0}, {"beta1": 1.0}, {"beta2": -0.1}, {"tau": 0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            FedAdam(**wrong)


# ------------------------------------------------------------------------------------- models of clients' own


class Judged(Fed):
    """Evaluates on rows that belong to the same clients."""

    def evaluation_data(self):
        x, y = rows(40, seed=1)
        return rayps.data.tensors(x, y, batch_size=8, client=[str(i % self.clients) for i in range(40)])


def alone(work, rounds, k, lam=0.0, server=None):
    """v_k by hand; `server[t]` is w_t."""
    model, data = drawn(work), work.data()
    for t in range(rounds):

        def pull(parameters, _, t=t):
            at = 0
            for p in parameters:
                p.grad += lam * (p.detach() - server[t][at : at + p.numel()].view(p.shape))
                at += p.numel()

        model = trained(work, model, data, 0, t, k, pull if lam else None)
    return model


def error(model, k, clients):
    x, y = rows(40, seed=1)
    mine = torch.arange(40) % clients == k
    with torch.no_grad():
        return (model(x[mine]) - y[mine]).abs().sum().item()


@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
def test_ditto_without_lambda_is_training_alone(optimizer):
    work = Judged(clients=4, n=48, optimizer=optimizer)
    result = train(work, Ditto(lam=0), workers=2, epochs=3)
    assert distance(result.snapshot.params, vector(fedavg(work, 3)[0])) < EXACT
    want = sum(error(alone(work, 3, k), k, 4) for k in range(4)) / 40
    assert result.metrics["personal_error"] == pytest.approx(want, abs=EXACT)
    assert result.metrics["personal_error"] != pytest.approx(result.metrics["error"], abs=1e-3)


def test_ditto_keeps_the_batchnorm_statistics_of_each_clients_model():
    """v_k goes on from its own statistics, not from those that training w_k has left: its law is training alone."""

    class Normed(Judged):
        def model(self):
            return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 1)).double()

    work = Normed(clients=4, n=48, batch=4)
    result = train(work, Ditto(lam=0, local_epochs=1), workers=2, epochs=3)
    models = [alone(work, 3, k).eval() for k in range(4)]
    assert result.metrics["personal_error"] == pytest.approx(
        sum(error(model, k, 4) for k, model in enumerate(models)) / 40, abs=EXACT
    )
    assert all(model[1].num_batches_tracked == 3 * 3 for model in models)


@pytest.mark.parametrize(
    "strategy",
    [
        Scaffold(local_steps=5, fraction=1.0, evaluate_every=1000),
        Scaffold(local_steps=5, fraction=0.5, evaluate_every=1000),
        FedProx(local_steps=5, mu=2.0, evaluate_every=1000),
    ],
    ids=str,
)
def test_with_maximize_a_client_climbs_as_it_would_descend(strategy):
    """The loss with the other sign, maximized: the same bits but for signs."""

    class Climbing(Quadratics):
        def loss(self, model, batch):
            return -super().loss(model, batch)

        def optimizer(self, params):
            return torch.optim.SGD(params, lr=self.lr, maximize=True)

    found, law = (
        train(work, strategy, epochs=60, checkpoint_every=1000).snapshot.params.item()
        for work in (Climbing(0.02), Quadratics(0.02))
    )
    assert found == pytest.approx(law, abs=1e-12) and 0 < found < 1.5


def test_a_state_that_is_not_finite_is_not_kept_and_said():
    work = Judged(clients=4, n=48)
    result = train(work, Ditto(lam=1e200), workers=2, epochs=3)
    assert math.isfinite(result.metrics["personal_error"])
    said = [event for event in result.events if event["kind"] == "warning" and "was dropped" in event["message"]]
    assert sorted(event["client"] for event in said) == ["0", "1", "2", "3"]
    assert "ditto: lam" in said[0]["message"]


def test_dittos_own_models_climb_as_they_would_descend():
    class Climbing(Judged):
        def loss(self, model, batch):
            return -super().loss(model, batch)

        def optimizer(self, params):
            return torch.optim.SGD(params, lr=super().optimizer(params).param_groups[0]["lr"], maximize=True)

    found, law, alone = (
        train(kind(clients=4, n=48), Ditto(lam=lam), workers=2, epochs=3).metrics["personal_error"]
        for kind, lam in ((Climbing, 1.5), (Judged, 1.5), (Judged, 0.0))
    )
    assert found == pytest.approx(law, abs=EXACT)
    assert abs(law - alone) > 1e-4


def test_scaffold_at_a_rate_of_zero_stays_where_it_is():
    result = train(Quadratics(lr=0.0), Scaffold(local_steps=5), epochs=3)
    assert result.snapshot.params.item() == 3.0
    assert [event["replied"] for event in cohorts(result)] == [2, 2, 2]


def test_ditto_is_its_algorithm_and_a_large_lambda_leaves_no_own_way():
    work = Judged(clients=4, n=48)
    server = [vector(fedavg(work, t)[0]) for t in range(4)]
    result = train(work, Ditto(lam=1.5), workers=2, epochs=3)
    want = sum(error(alone(work, 3, k, 1.5, server), k, 4) for k in range(4)) / 40
    assert result.metrics["personal_error"] == pytest.approx(want, abs=EXACT)
    far = []
    for lam, lr in ((0.0, 1e-3), (500.0, 1e-3)):  # eta lam = 1/2

        class Slow(Judged):
            rate = lr

            def optimizer(self, params):
                return torch.optim.SGD(params, lr=self.rate)

        small = Slow(clients=4, n=48)
        trainer = Trainer(FlatModel(drawn(small)), small)
        data, w_t = small.data(), vector(drawn(small)) + 0.3
        task = Task(0, 0, 1, w_t, {}, {"v": w_t + 1.0})
        reply = trainer.train(
            Ditto(lam=lam, local_epochs=5), task, ClientRows(data.clients.rows(1), data.clients.batch, 3)
        )
        far.append((reply.state["v"] - w_t).abs().max().item())
    assert far[0] > 0.5 and far[1] < 0.05


def test_fine_tuning_is_evaluated_on_each_clients_own_rows_and_changes_nothing():
    work = Judged(clients=4, n=48)
    result = train(work, FedAvg(finetune=2, evaluate_every=2), workers=2, epochs=4)
    bare = train(work, FedAvg(), workers=2, epochs=4)
    assert torch.equal(result.snapshot.params, bare.snapshot.params)
    model, data = fedavg(work, 4)[0], work.data()
    want = sum(error(trained(work, model, data, 0, 4, k, epochs=2), k, 4) for k in range(4)) / 40
    assert result.metrics["personal_error"] == pytest.approx(want, abs=EXACT)
    measured = result.history.column("evaluation_personal_error").to_pylist()
    assert [value is not None for value in measured] == [False, True, False, True]
    assert "personal_error" not in bare.metrics


@pytest.mark.parametrize(("strategy", "what"), [(Ditto(), "ditto"), (FedAvg(finetune=2), "finetune=2")], ids=str)
def test_that_nothing_personal_will_be_measured_is_told(strategy, what):
    class Nobodys(Fed):
        def evaluation_data(self):
            return rayps.data.tensors(*rows(40, seed=1), batch_size=8)

    def told(work):
        events = train(work, strategy, epochs=1).events
        return [event["message"] for event in events if "no personal_* metrics" in str(event.get("message"))]

    (said,) = told(Nobodys(clients=4, n=48))
    assert said.startswith(what) and "with_clients" in said and "client=" in said
    assert told(Judged(clients=4, n=48)) == []


def test_who_has_taken_no_part_is_judged_by_w():
    work = Judged(clients=4, n=48)
    result = train(work, Ditto(lam=0, fraction=0.25), workers=2, epochs=1)
    who = int(cohorts(result)[0]["trained"][0])
    model = result.model()
    own = alone(work, 1, who)
    want = sum(error(own if k == who else model, k, 4) for k in range(4)) / 40
    assert result.metrics["personal_error"] == pytest.approx(want, abs=EXACT)


# ------------------------------------------------------------------------------------- the client's view


def view(strategy, kind="sgd", **options):
    work = Fed(rule="uneven", n=45, optimizer=kind)
    trainer = Trainer(FlatModel(drawn(work)), work)
    data, w_t = work.data(), vector(drawn(work))
    task = Task(3, 1, 4, w_t, {}, **options)
    return trainer.train(strategy, task, ClientRows(data.clients.rows(4), data.clients.batch, data.batch_size)), w_t


class Plain(FedAvg):
    """What FedAvg does, with vectors throughout."""

    def client(self, c):
        before = None
        for b in c.batches():
            g = c.grad(b)
            assert torch.equal(g.vector, g + 0.0) and torch.equal(-g, 0.0 - g) and torch.equal(2.0 * g, g * 2)
            if before is not None:
                assert not torch.equal(before.vector, g.vector)  # a gradient stays what it was
            c.step(g.vector)
            before = g


@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
def test_a_gradient_as_a_vector_steps_like_one_that_stays_where_it_is(kind):
    at_once, w_t = view(FedAvg(local_epochs=2), kind)
    moved = at_once.w.clone()
    as_vector, _ = view(Plain(local_epochs=2), kind)
    assert torch.equal(as_vector.w, moved) and not torch.equal(moved, w_t)
    assert math.isfinite(as_vector.loss) and as_vector.samples == 2 * as_vector.n


class Clipped(Fed):
    """Shortens its gradients."""

    clip_norm = 0.01


def test_the_workloads_norm_is_kept_to():
    work = Clipped(clients=1, n=9)
    moved = vector(train(work, FedAvg(local_steps=1), workers=1, epochs=1).model()) - vector(drawn(work))
    assert moved.norm().item() == pytest.approx(0.1 * 0.01, rel=1e-3)


def test_a_dataset_that_cannot_be_cut_is_batched_row_by_row():
    class Words(Fed):
        def data(self):
            x, y = rows(self.n)
            items = [{"name": str(i), "x": x[i], "y": y[i]} for i in range(self.n)]
            return rayps.data.dataset(items, batch_size=3, client=rayps.data.iid(self.clients), collate=self.collate)

        @staticmethod
        def collate(items):
            x = {"names": [item["name"] for item in items], "x": torch.stack([item["x"] for item in items])}
            return x, torch.stack([item["y"] for item in items])

        def loss(self, model, batch):
            assert len(batch.x["names"]) == len(batch.x["x"]) == batch.size
            return ((model(batch.x["x"]) - batch.y) ** 2).mean()

        def evaluate(self, model, batch):
            return {}

    found = train(Words(), FedAvg(local_epochs=2), workers=2, epochs=2)
    other = train(Fed(), FedAvg(local_epochs=2), workers=1, epochs=2)
    assert distance(found.snapshot.params, other.snapshot.params) < EXACT
    assert np.isfinite(found.metrics["loss"])

"""Federated jobs against the identities that define them and a plain torch loop; the same bits on any worker."""

import random
import time

import numpy as np
import pytest
import torch
from federated_work import Dropping, Fed, Normed, Rated, batches_of, cohorts, drawn, fedavg, trained
from rayps_client.errors import ConfigError, DataError, WorkloadError
from small_work import Small, distance, kinds, plain, rows, train, vector
from torch import nn

import rayps
from rayps import AllReduce, Ditto, FedAdam, FedAvg, FedAvgM, FedBuff, FedProx, Scaffold
from rayps.federated.reply_source import SimulatedReplies
from rayps.strategies.catalogue import parse, wire

EXACT = 1e-12
TINY = 1e-300


# ------------------------------------------------------------------------------------- one client is plain SGD


@pytest.mark.parametrize("workers", [1, 2])
def test_one_client_is_plain_sgd_to_the_bit(workers):
    for strategy, options in (
        (FedAvg(), {"epochs": 3}),
        (FedAvg(local_steps=1), {"steps": 14}),
        (FedAvg(local_steps=7), {"steps": 21}),
    ):
        rounds = options.get("epochs") or options["steps"] // (strategy.local_steps or 1)
        result = train(Fed(clients=1), strategy, workers=workers, epochs=rounds)
        assert distance(result.model(), plain(Small(), **options)[0]) < TINY
    result = train(Fed(clients=1), FedAvg(), workers=1, epochs=2)
    assert distance(result.model(), train(Small(), AllReduce(), workers=1, epochs=2).model()) < TINY
    assert result.history.column("loss").to_pylist() == pytest.approx(
        np.reshape(plain(Small(), epochs=2)[1], (2, -1)).mean(axis=1).tolist()
    )


@pytest.mark.parametrize("optimizer", ["momentum", "adam", "adamw_groups"])
def test_a_client_steps_by_the_workloads_optimizer_which_is_fresh_each_round(optimizer):
    work = Fed(clients=1, optimizer=optimizer)
    once = train(work, FedAvg(local_epochs=3), workers=1, epochs=1)
    assert distance(once.model(), plain(Small(optimizer=optimizer), epochs=3)[0]) < TINY
    twice = train(work, FedAvg(local_epochs=2), workers=1, epochs=2)
    model, data = drawn(work), work.data()
    for t in range(2):
        model = trained(work, model, data, 0, t, 0, epochs=2)
    assert distance(twice.model(), model) < TINY
    assert distance(twice.model(), plain(Small(optimizer=optimizer), epochs=4)[0]) > 1e-6


# ------------------------------------------------------------------------------------- the law of a whole job


@pytest.mark.parametrize(
    ("options", "law"),
    [
        ({"fraction": 0.5, "local_epochs": 2, "batch_size": 4}, {"fraction": 0.5, "epochs": 2, "batch": 4}),
        ({"fraction": 0.4, "local_steps": 5}, {"fraction": 0.4, "steps": 5}),
        ({"batch_size": 0}, {"batch": 0}),
    ],
)
def test_a_job_is_algorithm_1(options, law):
    work = Fed(rule="uneven", n=45)
    result = train(work, FedAvg(**options), workers=2, epochs=4, seed=5)
    model, taken = fedavg(work, 4, seed=5, **law)
    assert distance(result.model(), model) < EXACT
    assert [event["trained"] for event in cohorts(result)] == [[str(k) for k in chosen] for chosen in taken]


def test_fedsgd_does_not_depend_on_the_partition():
    x, y = rows(36)
    order = torch.argsort(y[:, 0])
    splits = [np.zeros(36, int), np.arange(36) % 4, np.argsort(order.numpy()) // 6, np.minimum(np.arange(36), 2)]
    curves = []
    for who in splits:
        work = Small(n=36)
        work.data = Divided(x, y, who)
        result = train(work, FedAvg(batch_size=0), workers=2, epochs=8)
        curves.append([*result.history.column("evaluation_loss").to_pylist(), result.metrics["loss"]])
    found = drawn(Small())
    for _ in range(8):
        loss = ((found(x) - y) ** 2).mean()
        found.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in found.parameters():
                p -= 0.1 * p.grad
    assert distance(result.model(), found) < EXACT
    for curve in curves[1:]:
        assert [value for value in curve if value] == pytest.approx([value for value in curves[0] if value], abs=EXACT)


class Divided:
    """data() of a workload: these rows, of these clients."""

    def __init__(self, x, y, who):
        self.x, self.y, self.who = x, y, who

    def __call__(self):
        return rayps.data.tensors(self.x, self.y, batch_size=3, client=self.who)


def test_what_proximal_terms_do():
    work = Fed(n=40)
    plain_one, zero = (train(work, each, workers=2, epochs=3) for each in (FedAvg(), FedProx(mu=0)))
    assert torch.equal(plain_one.snapshot.params, zero.snapshot.params)

    def pull(parameters, begin):
        for p, start in zip(parameters, begin, strict=True):
            p.grad += 0.7 * (p.detach() - start)

    some = train(work, FedProx(mu=0.7), workers=1, epochs=3)
    assert distance(some.model(), fedavg(work, 3, adjust=pull)[0]) < EXACT
    first = drawn(work)
    moved = [
        distance(
            train(Rated(min(0.1, 0.5 / max(mu, 1e-9))), FedProx(mu=mu, local_epochs=4), workers=1, epochs=1).model(),
            first,
        )
        for mu in (0.0, 50.0, 5000.0)
    ]
    assert moved[0] > 10 * moved[1] > 500 * moved[2]


# ------------------------------------------------------------------------------------- the same bits anywhere


ANYWHERE = [
    (Fed, FedAvg(fraction=0.6, dropout=0.3)),
    (Fed, FedAvg(rule="krum(f=1)")),
    (Fed, FedAvg(rule="median", attack="gaussian(clients=2)")),
    (Fed, FedAvg(rule="centered_clipping(tau=0.1)", clip=0.05)),
    (Fed, FedAvg(attack="alie(clients=2)")),
    (Fed, Scaffold(fraction=0.5, local_epochs=2)),
    (Fed, FedAdam(fraction=0.5)),
    (Fed, FedBuff(buffer=3, concurrency=5, speed="lognormal(sigma=1)")),
    (Fed, FedAvg(speed="lognormal(sigma=1)", deadline=0.005, available="bernoulli(p=0.7)")),
    (Normed, FedAvg(fraction=0.6)),
    (Normed, FedAvg(fraction=0.6, buffers="keep")),
    (Normed, Ditto(fraction=0.5)),
]


@pytest.mark.parametrize(
    ("kind", "strategy"),
    ANYWHERE,
    ids=lambda given: (
        getattr(given, "name", given.__name__)
        if isinstance(given, type)
        else f"{given.name}-{given.rule}-{given.attack}"
    ),
)
def test_the_same_bits_on_any_number_of_workers(kind, strategy):
    results = [train(kind(rule="uneven", n=45), strategy, workers=workers, epochs=4) for workers in (1, 2, 3)]
    for other in results[1:]:
        assert torch.equal(other.snapshot.params, results[0].snapshot.params)
        for name, value in results[0].snapshot.buffers.items():
            assert torch.equal(other.snapshot.buffers[name], value), name
        assert [{k: v for k, v in e.items() if k not in ("time", "seq")} for e in cohorts(other)] == [
            {k: v for k, v in e.items() if k not in ("time", "seq")} for e in cohorts(results[0])
        ]
        assert other.metrics == pytest.approx(results[0].metrics, abs=EXACT)


@pytest.mark.parametrize(("kind", "strategy"), [ANYWHERE[0], ANYWHERE[2], ANYWHERE[5], ANYWHERE[9]])
def test_the_same_bits_in_any_order_of_replies(kind, strategy, monkeypatch):
    work = kind(rule="uneven", n=45)
    before = train(work, strategy, workers=2, epochs=4)
    dealt = SimulatedReplies._divide_trainings
    seed = random.getrandbits(32)
    print("seed", seed)
    chance = np.random.default_rng(seed)
    monkeypatch.setattr(
        SimulatedReplies, "_divide_trainings", lambda self, who: [chance.permutation(each) for each in dealt(self, who)]
    )
    after = train(work, strategy, workers=2, epochs=4)
    assert torch.equal(after.snapshot.params, before.snapshot.params)


def test_a_single_reply_is_taken_over_as_it_is():
    work = Fed(rule="uneven", n=45, clients=3)
    for workers in (1, 2):
        result = train(work, FedAvg(fraction=0.3), workers=workers, epochs=3)
        model, data = drawn(work), work.data()
        for t, event in enumerate(cohorts(result)):
            assert event["replied"] == 1
            model = trained(work, model, data, 0, t, int(event["trained"][0]))
        assert distance(result.model(), model) < TINY


def test_random_numbers_of_a_model_belong_to_client_and_round():
    """Each client of a round, and each of its rounds, draws other ones; a worker more changes nothing."""
    work = Dropping(n=24, clients=2)
    result = train(work, FedAvg(fraction=0.5), workers=1, epochs=3)
    again = train(work, FedAvg(fraction=0.5), workers=1, epochs=3)
    assert torch.equal(result.snapshot.params, again.snapshot.params)
    assert distance(result.model(), fedavg(work, 3, fraction=0.5)[0]) > 1e-6


# ------------------------------------------------------------------------------------- who counts


def test_dropouts_and_rounds_without_a_reply():
    work = Fed(n=40, clients=2)
    result = train(work, FedAvg(dropout=0.6, local_epochs=1), workers=2, epochs=12)
    events, points = cohorts(result), result.history
    assert points.column("sampled").to_pylist() == [2] * 12
    assert points.column("replied").to_pylist() == [event["replied"] for event in events]
    empty = [t for t, event in enumerate(events) if not event["replied"]]
    assert empty and len(empty) < 12 and all("is unchanged" in events[t]["message"] for t in empty)
    losses = points.column("evaluation_loss").to_pylist()
    for t in empty:
        if 0 < t < 11:
            assert losses[t] == losses[t - 1]
    for event in events:
        assert sorted([*event["trained"], *(name for name, _ in event["dropped"])]) == ["0", "1"]
        assert all(reason == "dropout" for _, reason in event["dropped"])
    assert losses[10] < losses[0]


def test_nobody_who_replies_leaves_the_model_unchanged():
    work = Fed(n=40, clients=4)
    result = train(work, Scaffold(deadline=1e-6), workers=2, epochs=3)
    assert torch.equal(result.snapshot.params, vector(drawn(work)))
    assert [event["replied"] for event in cohorts(result)] == [0, 0, 0]
    assert {reason for event in cohorts(result) for _, reason in event["dropped"]} == {"deadline"}
    assert "c" not in result.snapshot.shared


def test_a_round_ends_at_its_deadline_with_those_that_are_there():
    speeds = [0.001, 0.001, 0.001, 1.0]
    result = train(Fed(n=40, clients=4), FedAvg(speed=speeds, deadline=0.1), workers=1, epochs=2)
    for event in cohorts(result):
        assert event["trained"] == ["0", "1", "2"] and event["dropped"] == [["3", "deadline"]]
        assert event["seconds"] == pytest.approx(0.1)
    first = train(Fed(n=40, clients=4), FedAvg(speed=speeds, enough=2), workers=1, epochs=2)
    assert [event["trained"] for event in cohorts(first)] == [["0", "1"]] * 2
    assert cohorts(first)[0]["dropped"] == [["2", "late"], ["3", "late"]]


def test_too_few_replies_do_not_count():
    result = train(Fed(n=40, clients=4), FedAvg(speed=[0.001, 1.0], deadline=0.1, min_replies=3), workers=2, epochs=2)
    assert torch.equal(result.snapshot.params, vector(drawn(Fed())))
    assert all(event["skipped"] and "3 are needed" in event["message"] for event in cohorts(result))


def test_what_is_not_finite_is_rejected_by_name():
    work = Fed(rule="uneven", n=45)
    result = train(work, FedAvg(attack="nan(clients=2)"), workers=2, epochs=3)
    named = [sorted(name for name, _ in event["rejected"]) for event in cohorts(result)]
    assert named[0] == named[1] == named[2] and len(named[0]) == 2
    assert all("not finite" in reason for event in cohorts(result) for _, reason in event["rejected"])
    assert result.history.column("rejected").to_pylist() == [2] * 3
    assert torch.isfinite(result.snapshot.params).all()
    honest = [k for k in range(9) if str(k) not in named[0]]
    model, data = drawn(work), work.data()
    replies = [trained(work, model, data, 0, 0, k) for k in honest]
    sizes = data.clients.sizes[honest]
    mean = sum(float(n) * vector(each) for n, each in zip(sizes, replies, strict=True)) / sizes.sum()
    once = train(work, FedAvg(attack="nan(clients=2)"), workers=2, epochs=1)
    assert distance(once.snapshot.params, mean) < EXACT


def test_label_flips_are_learnt_by_those_who_attack():
    class Classes(Fed):
        def model(self):
            return nn.Sequential(nn.Linear(5, 3)).double()

        def data(self):
            x, y = rows(60)
            return rayps.data.tensors(x, (y[:, 0] > 0).long(), batch_size=10, client=rayps.data.iid(6))

        def loss(self, model, batch):
            return nn.functional.cross_entropy(model(batch.x), batch.y)

        def evaluate(self, model, batch):
            return {"accuracy": (model(batch.x).argmax(1) == batch.y).double().mean()}

    clean = train(Classes(), FedAvg(local_epochs=2), workers=2, epochs=16)
    flipped = train(Classes(), FedAvg(local_epochs=2, attack="label_flip(clients=5,classes=2)"), workers=2, epochs=16)
    assert clean.metrics["accuracy"] > 0.65 and flipped.metrics["accuracy"] < 0.45


# ------------------------------------------------------------------------------------- buffers


def test_buffers_are_averaged_by_samples():
    work = Normed(rule="uneven", n=45)
    result = train(work, FedAvg(fraction=0.6), workers=2, epochs=1)
    model, data = drawn(work), work.data()
    who = [int(name) for name in cohorts(result)[0]["trained"]]
    replies = [dict(trained(work, model, data, 0, 0, k).named_buffers()) for k in who]
    sizes = data.clients.sizes[who].tolist()
    for name, value in result.snapshot.buffers.items():
        mean = sum(n * each[name].double() for n, each in zip(sizes, replies, strict=True)) / sum(sizes)
        assert value.dtype == replies[0][name].dtype
        assert (value - (mean if value.is_floating_point() else mean.round())).abs().max() < EXACT, name


def test_kept_buffers_stay_with_their_client():
    work = Normed(clients=3)
    result = train(work, FedAvg(buffers="keep"), workers=2, epochs=2)
    first = drawn(work)
    assert torch.equal(result.snapshot.buffers["1.running_mean"], first[1].running_mean)
    models, data = [], work.data()
    for t in range(2):
        replies = []
        for k in range(3):
            begin = work.model()
            begin.load_state_dict(first.state_dict() | (dict(models[k].named_buffers()) if models else {}))
            replies.append(trained(work, begin, data, 0, t, k))
        models = replies
        with torch.no_grad():
            for parts in zip(first.parameters(), *(each.parameters() for each in models), strict=True):
                parts[0].copy_(sum(int(n) * p for n, p in zip(data.clients.sizes, parts[1:], strict=True)) / 90)
    assert distance(result.model(), first) < EXACT


# ------------------------------------------------------------------------------------- phases, refusals


def test_federated_phases_among_others():
    work = Fed(n=36)
    result = train(work, [(5, FedAvg(fraction=0.5)), (1, AllReduce()), FedProx()], workers=2, epochs=8)
    assert result.snapshot.round == 5 + 6 + 2
    first, _ = fedavg(work, 5, fraction=0.5)
    assert distance(train(work, [(5, FedAvg(fraction=0.5)), AllReduce()], workers=1, epochs=6).model(), first) > 1e-6
    assert kinds(result).count("clients") == 2 and len(cohorts(result)) == 7
    epochs = result.history.column("epoch").to_pylist()
    assert epochs == [0, 1, 2, 3, 4, *[5] * 6, 6, 7]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"fraction": 0}, "fraction"),
        ({"fraction": 1.5}, "fraction"),
        ({"local_epochs": 0}, "local_epochs"),
        ({"local_steps": 2.5}, "local_steps"),
        ({"local_epochs": 1, "local_steps": 1}, "local_steps"),
        ({"batch_size": -1}, "batch_size"),
        ({"rule": "krum"}, "rule"),
        ({"rule": "mode"}, "rule"),
        ({"clip": 0}, "clip"),
        ({"attack": "sign_flip"}, "attack"),
        ({"dropout": 1.0}, "dropout"),
        ({"deadline": 0}, "deadline"),
        ({"min_replies": -1}, "min_replies"),
        ({"speed": "fast"}, "speed"),
        ({"available": "never"}, "available"),
        ({"evaluate_every": 0}, "evaluate_every"),
        ({"buffers": "drop"}, "buffers"),
        ({"finetune": 0}, "finetune"),
    ],
)
def test_options_that_cannot_be(options, field):
    with pytest.raises(ConfigError) as error:
        FedAvg(**options)
    assert error.value.data["field"] == field and field in str(error.value)


def test_jobs_that_cannot_be_are_refused_before_anything_starts():
    class Never:
        def reserve(self, *_):
            raise AssertionError("it was started")

    def refused(work, strategy, **options):
        with pytest.raises((ConfigError, DataError, WorkloadError)) as error:
            rayps.train(work, strategy=strategy, cluster=Never(), progress=False, workers=1, epochs=1, **options)
        return str(error.value)

    assert "client=" in refused(Small(), FedAvg())
    assert "2f + 2 < n" in refused(Fed(clients=9), FedAvg(rule="krum(f=4)"))
    assert "tolerates" in refused(Fed(clients=9), FedAvg(rule="krum(f=1)", attack="nan(clients=3)"))
    assert "min_replies" in refused(Fed(clients=9), FedAvg(fraction=0.3, min_replies=4))
    assert "plain SGD" in refused(Fed(optimizer="momentum"), Scaffold())
    assert "plain SGD" in refused(Fed(optimizer="adam"), Scaffold())
    assert "honest" in refused(Fed(clients=3), FedAvg(attack="nan(clients=3)"))


def test_strategies_in_words_and_back():
    for text in (
        "fedavg:fraction=0.5,local_epochs=5,rule=krum(f=4)",
        "fedprox:mu=0.1",
        "scaffold",
        "fedyogi:tau=0.01",
        "fedavg:attack=sign_flip(clients=4,scale=5),speed=lognormal(sigma=1)",
        "ditto:lam=1",
    ):
        phases = parse(text)
        assert parse(wire(phases)) == phases
    assert parse("fedavgm")[0].strategy == FedAvgM()


def test_who_uses_which_rows():
    """A law of the laws: an epoch has every row of a client once, and rounds do not repeat an order."""
    data = Fed(rule="uneven", n=45).data()
    for k in range(9):
        orders = []
        for t in range(2):
            rows_seen = torch.cat([x for x, _ in batches_of(data, 0, t, k)])
            own = data.x[torch.from_numpy(data.clients.rows(k))]
            assert torch.equal(rows_seen.sort(dim=0).values, own.sort(dim=0).values)
            orders.append(rows_seen)
        if len(own) > 4:
            assert not torch.equal(*orders)


class Reads(Fed):
    """Rows that take a while to read, by number."""

    ahead = False

    def data(self):
        found = rayps.data.dataset(SlowRows(*rows(self.n)), batch_size=self.batch, client=rayps.data.iid(self.clients))
        return found.loaded_by(2) if self.ahead else found

    def evaluation_data(self):
        return rayps.data.tensors(*rows(self.n), batch_size=self.batch)


class SlowRows(torch.utils.data.TensorDataset):
    def __getitem__(self, i):
        time.sleep(0.001)
        return super().__getitem__(i)


def test_the_time_to_read_clients_rows_is_counted_and_loaders_are_warned_of():
    found = train(Reads(), "fedavg", workers=2, epochs=2)
    waits, seconds = (found.history[name].to_pylist() for name in ("data", "seconds"))
    assert all(0.009 < wait < whole for wait, whole in zip(waits, seconds, strict=True))
    assert not any("loaded_by" in event["message"] for event in found.events)
    work = Reads()
    work.ahead = True
    again = train(work, "fedavg", workers=2, epochs=2)
    assert distance(again.model(), found.model()) == 0
    [warning] = [event["message"] for event in again.events if "loaded_by" in event["message"]]
    assert warning.startswith("loaded_by has no effect under fedavg")

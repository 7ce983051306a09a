"""Elastic jobs under all_reduce: workers join, leave and die while it runs, and what is learned does not change."""

from __future__ import annotations

import importlib
import itertools
from collections import Counter, defaultdict
from dataclasses import replace

import pytest
import torch
from rayps_client.errors import CheckpointError, ConfigError, TrainingError
from small_work import Small, Watched, rows
from torch import nn

import rayps
from rayps.cluster.notices import Notice
from rayps.runtime.driver.worker_actor import WorkerActor
from rayps.runtime.size.job_size import Allowance
from rayps.runtime.size.membership import Membership
from rayps.worker.handover import hand_over

ROWS: list[tuple[int, ...]] = []  # (row, tag) of each row whose loss was computed; looked up by import


class Numbered(Small):
    """A regression that records which rows it has seen. The first column of x is the row's number."""

    def data(self):
        x, y = rows(self.n)
        return rayps.data.tensors(torch.cat([torch.arange(self.n).double()[:, None], x], 1), y, batch_size=self.batch)

    def loss(self, model, batch):
        shared = importlib.import_module("test_elastic")
        if model.training:
            shared.ROWS += [(int(row), self.tag) for row in batch.x[:, 0]]
        importlib.import_module("small_work").SEEN[self.tag] += 1
        return ((model(batch.x[:, 1:]) - batch.y) ** 2).mean()

    def evaluate(self, model, batch):
        return {"loss": float(((model(batch.x[:, 1:]) - batch.y) ** 2).sum())}


class Normed(Small):
    """A network with BatchNorm, whose buffers are part of the state."""

    def model(self):
        return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 1)).double()


def train(work, workers, *, epochs=3, cluster=None, **options):
    cluster = cluster or Watched()
    try:
        return rayps.train(
            work, workers=workers, epochs=epochs, seed=5, cluster=cluster, progress=False, timeout=20, **options
        )
    finally:
        cluster.close()


def params(result):
    return result.snapshot.params


def log_of(result):
    return [[event["round"], event["to"]] for event in result.events if event["kind"] == "resized"]


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("kind", [Small, Normed])
def test_without_a_change_it_has_the_bits_of_fixed_workers(kind, optimizer):
    work = kind(optimizer=optimizer)
    assert torch.equal(params(train(work, 2)), params(train(work, (2, 2))))


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_with_a_global_batch_the_number_of_workers_changes_nothing_but_rounding(optimizer):
    work = Small(n=50, batch=4, optimizer=optimizer)
    alone = params(train(work, 1, elastic={"most": 1}, global_batch=8))
    options = {"replay": [[3, 4], [9, 3], [10, 1], [14, 2]]}
    found = train(work, (1, 4), global_batch=8, elastic=options)
    assert log_of(found) == options["replay"]
    torch.testing.assert_close(params(found), alone, rtol=1e-11, atol=1e-13)
    assert found.snapshot.round == 21  # 7 rounds of 8 rows in each of 3 epochs


def test_each_row_once_an_epoch_in_batches_that_scale():
    tag = "rows"
    ROWS.clear()
    found = train(Numbered(n=47, batch=3, tag=tag), (2, 5), elastic={"replay": [[2, 5], [3, 2], [6, 3], [11, 4]]})
    assert log_of(found) == [[2, 5], [3, 2], [6, 3], [11, 4]]
    assert Counter(row for row, mark in ROWS if mark == tag) == Counter(dict.fromkeys(range(47), 3))
    points = list(found.history.to_pylist())
    assert sum(point["samples"] for point in points) == 3 * 47
    assert [point["round"] for point in points] == list(range(len(points)))


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_the_log_of_a_run_repeats_it_to_the_bit(optimizer):
    work = Normed(n=96, batch=4, optimizer=optimizer)
    first = train(work, (2, 4), elastic={"replay": [[2, 4], [7, 3], [9, 4], [12, 2]]})
    again = train(work, (2, 4), elastic={"replay": log_of(first)})
    assert torch.equal(params(first), params(again))
    other = train(work, (2, 4), elastic={"replay": [[3, 4], [7, 3], [9, 4], [12, 2]]})
    assert not torch.equal(params(first), params(other))


class Asking(rayps.Callback):
    """Asks for numbers of workers at rounds, as a user or the service does."""

    def __init__(self, wanted):
        self.wanted = dict(wanted)

    def on_round(self, run, point):
        if point["round"] in self.wanted:
            ALLOWANCES[-1].set(self.wanted[point["round"]], "asked")


ALLOWANCES: list[Allowance] = []


@pytest.fixture
def allowances(monkeypatch):
    created = Allowance.__init__

    def create(self, most):
        created(self, most)
        ALLOWANCES.append(self)

    monkeypatch.setattr(Allowance, "__init__", create)


@pytest.mark.usefixtures("allowances")
def test_it_grows_into_room_and_shrinks_when_asked():
    work = Small(n=240, batch=4, optimizer="adam", pause=0.02)
    found = train(
        work, (1, 3), epochs=4, global_batch=12, elastic={"cooldown": 0, "gain": 0}, callbacks=[Asking({50: 2})]
    )
    sizes = [(event["from"], event["to"], event["reason"]) for event in found.events if event["kind"] == "resized"]
    assert sizes[0] == (1, 3, "there was room for more workers")
    assert sizes[-1][1:] == (2, "asked")
    alone = train(Small(n=240, batch=4, optimizer="adam"), 1, epochs=4, elastic={"most": 1}, global_batch=12)
    torch.testing.assert_close(params(found), params(alone), rtol=1e-9, atol=1e-11)
    assert found.snapshot.round == 80


@pytest.mark.parametrize("victims", [[1], [0], [0, 2]])
@pytest.mark.parametrize("tag", ["deaths"])
def test_the_living_continue_from_memory_after_deaths(victims, tag):
    tag = f"{tag}-{victims}"
    cluster = Watched()
    work = Small(n=120, batch=4, optimizer="adam", tag=tag, pause=0.01)
    killer = cluster.kill_when(tag, 30, *[("WorkerActor", rank) for rank in victims])
    found = train(work, (1, 3), epochs=4, cluster=cluster, global_batch=12, elastic={"replay": [[1, 3]]})
    killer.join()
    events = [event for event in found.events if event["kind"] == "resized"]
    assert (events[-1]["from"], events[-1]["to"]) in {(3, 3 - len(victims)), (2, 1)}
    assert any(event["lost"] for event in events)
    assert not any(event["kind"] in ("restarted", "resumed") for event in found.events)
    alone = train(Small(n=120, batch=4, optimizer="adam"), 1, epochs=4, elastic={"most": 1}, global_batch=12)
    torch.testing.assert_close(params(found), params(alone), rtol=1e-10, atol=1e-12)


def test_a_newcomer_that_dies_while_it_joins_costs_no_round(monkeypatch):
    """The others have the state in memory before and after: nobody returns to the snapshot."""
    cluster, died = Watched(), []

    def dying(plan, rank, base, held, ring):
        if held is None and not died:
            died.append(rank)
            [newcomer] = [handle for (_, number), handle in cluster.actors.items() if number == 2]
            cluster.kill(newcomer)
        return hand_over(plan, rank, base, held, ring)

    monkeypatch.setattr("rayps.worker.run.hand_over", dying)
    work = Small(n=120, batch=4, optimizer="adam", pause=0.01)
    found = train(work, (2, 3), epochs=3, cluster=cluster, global_batch=12, elastic={"replay": [[7, 3]]})
    assert died == [2]
    assert not any(event["kind"] == "restarted" for event in found.events)
    alone = train(Small(n=120, batch=4, optimizer="adam"), 1, epochs=3, elastic={"most": 1}, global_batch=12)
    torch.testing.assert_close(params(found), params(alone), rtol=1e-10, atol=1e-12)


def test_a_replacement_starts_if_fewer_than_the_least_number_live():
    tag = "below"
    cluster = Watched()
    killer = cluster.kill_when(tag, 20, ("WorkerActor", 1))
    work = Small(n=120, batch=4, optimizer="adam", tag=tag, pause=0.01)
    found = train(work, (2, 2), epochs=3, cluster=cluster, global_batch=8)
    killer.join()
    [event] = [event for event in found.events if event["kind"] == "resized"]
    assert (event["from"], event["to"], event["lost"]) == (2, 2, ["worker-1"])
    plain = train(Small(n=120, batch=4, optimizer="adam"), (2, 2), epochs=3, global_batch=8)
    torch.testing.assert_close(params(found), params(plain), rtol=1e-10, atol=1e-12)


def test_if_all_workers_die_they_return_to_the_checkpoint():
    tag = "all"
    cluster = Watched()
    killer = cluster.kill_when(tag, 60, ("WorkerActor", 0), ("WorkerActor", 1))
    work = Small(n=120, batch=4, optimizer="adam", tag=tag, pause=0.01)
    found = train(work, (2, 2), epochs=4, cluster=cluster, global_batch=8)
    killer.join()
    assert [event["kind"] for event in found.events if event["kind"] in ("restarted", "resized")] == ["restarted"]
    plain = train(Small(n=120, batch=4, optimizer="adam"), (2, 2), epochs=4, global_batch=8)
    torch.testing.assert_close(params(found), params(plain), rtol=1e-10, atol=1e-12)


class Announced(rayps.Callback):
    """Announces at a round that the hosts of some workers end."""

    def __init__(self, cluster, at, ranks, seconds=30.0):
        self.cluster, self.at, self.ranks, self.seconds = cluster, at, ranks, seconds

    def on_round(self, run, point):
        if point["round"] == self.at:
            for rank in self.ranks:
                self.cluster.announce(Notice("", f"host-{rank}", self.seconds, "a test preempts it"))


@pytest.fixture
def hosts(monkeypatch):
    """Each worker on threads is on a host of its own, host-0, host-1, ... in the order in which they start."""
    place, numbers = WorkerActor.place, itertools.count()
    names = defaultdict(lambda: f"host-{next(numbers)}")
    monkeypatch.setattr(WorkerActor, "place", lambda self: replace(place(self), host=names[id(self)]))


@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize("ranks", [[2], [0, 1], [0, 1, 2]])
def test_workers_under_notice_leave_and_no_step_is_lost(ranks):
    tag = f"notice-{ranks}"
    cluster = Watched()
    work = Small(n=240, batch=4, optimizer="adam", tag=tag, pause=0.02)
    found = train(
        work,
        (1, 3),
        epochs=3,
        cluster=cluster,
        global_batch=12,
        elastic={"cooldown": 3600},
        callbacks=[Announced(cluster, 45, ranks)],
    )
    assert sum(event["kind"] == "notice" for event in found.events) == len(ranks)
    changes = [event for event in found.events if event["kind"] == "resized"]
    assert changes[0]["to"] == 3  # it grew first
    left = 3 - len(ranks)
    assert [(event["from"], event["to"]) for event in changes[1:]] == [(3, left)] if left else [(3, 4), (4, 1)]
    assert not any(event["lost"] for event in changes)
    assert found.snapshot.round == 60
    alone = train(Small(n=240, batch=4, optimizer="adam"), 1, epochs=3, elastic={"most": 1}, global_batch=12)
    torch.testing.assert_close(params(found), params(alone), rtol=1e-9, atol=1e-11)


def test_too_many_deaths_end_the_job():
    tag = "many"
    cluster = Watched()
    killer = cluster.kill_when(tag, 20, ("WorkerActor", 1))
    with pytest.raises(TrainingError, match="max_failures is 0"):
        train(Small(n=120, tag=tag, pause=0.01), (1, 2), cluster=cluster, max_failures=0, elastic={"replay": [[1, 2]]})
    killer.join()


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_checkpoint_within_an_epoch_is_resumed_by_another_number_of_workers(tmp_path, workers):
    work = Small(n=60, batch=4, optimizer="adam")
    plain = params(train(work, (2, 2), epochs=2, global_batch=12))
    train(work, (2, 3), epochs=None, steps=7, global_batch=12, checkpoint=tmp_path, elastic={"replay": [[3, 3]]})
    found = train(work, (workers, 3), epochs=2, global_batch=12, checkpoint=tmp_path, resume=True)
    assert found.snapshot.round == 10
    torch.testing.assert_close(params(found), plain, rtol=1e-11, atol=1e-13)


def test_a_checkpoint_of_fixed_workers_is_resumed_by_an_elastic_job(tmp_path):
    work = Numbered(n=30, batch=3, tag="half")
    train(work, 2, epochs=None, steps=3, checkpoint=tmp_path)
    ROWS.clear()
    train(work, (3, 3), epochs=1, checkpoint=tmp_path, resume=True)
    seen = [row for row, tag in ROWS if tag == "half"]
    order = work.data().order(5, 0).tolist()
    assert sorted(seen) == sorted(order[18:])
    other = Numbered(n=30, batch=4, tag="half")
    with pytest.raises(CheckpointError, match="another batch size"):
        train(other, (3, 3), epochs=1, checkpoint=tmp_path / "none", resume=sorted(tmp_path.glob("step-*"))[0])


def test_the_learning_rate_follows_the_batch():
    rates = {}

    class Rate(Small):
        def optimizer(self, given):
            return torch.optim.SGD(given, lr=0.1)

    for rule in ("keep", "linear", "sqrt"):
        found = train(Rate(n=48, batch=4), (1, 2), epochs=2, elastic={"replay": [[2, 2]], "lr_scaling": rule})
        rates[rule] = params(found)
    assert not torch.equal(rates["keep"], rates["linear"])
    assert not torch.equal(rates["sqrt"], rates["linear"])
    # the law: a plain run of the two halves
    model, data = Rate(n=48, batch=4).model(), Rate(n=48, batch=4).data()
    first = train(Rate(n=48, batch=4), 1, epochs=None, steps=2)
    torch.manual_seed(0)
    vector = torch.nn.utils.parameters_to_vector(model.parameters())
    assert vector.numel() == params(first).numel()
    model = first.model().train()
    order = [data.order(5, epoch) for epoch in range(2)]
    blocks = [(0, 8 + 8 * i, min(16 + 8 * i, 48), 0.2) for i in range(5)] + [
        (1, 8 * i, 8 * i + 8, 0.2) for i in range(6)
    ]
    for epoch, low, high, rate in blocks:
        batch = data.take(order[epoch][low:high])
        model.zero_grad()
        ((model(batch.x) - batch.y) ** 2).mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= rate * p.grad
    expected = torch.nn.utils.parameters_to_vector(model.parameters())
    torch.testing.assert_close(rates["linear"], expected.detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("strategy", "text"),
    [
        ("all_reduce:replica=pipeline(stages=2,micro_batches=2)", "a replica is several workers"),
        ("admm", "use all_reduce"),
        ("hogwild", "share one vector"),
        ("parameter_server:shards=2,replicas=1", "a group of servers"),
    ],
)
def test_strategies_whose_workers_cannot_change_are_refused(strategy, text):
    with pytest.raises(ConfigError, match=text):
        train(Small(), (2, 4), strategy=strategy)


def test_the_membership_drops_changes_after_a_return():
    found = Membership(rayps.core.strategy.elastic.ElasticWorkers(4), 40, 2, 2)
    found.change(3, 4)
    found.change(5, 3)
    assert found.log == [(0, 2), (3, 4), (5, 3)]
    found.change(4, 2)
    assert found.log == [(0, 2), (3, 4), (4, 2)]
    assert found.current.after(4, 40) == (0, 3 * 4 + 8)


# ---- families whose state the driver takes when the workers stop


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize(
    "strategy",
    [
        "parameter_server:shards=2",
        "parameter_server:shards=1,compression=fp16",
        "all_reduce:shard=optimizer",
        "all_reduce:shard=gradients",
        "local_sgd:period=1",
    ],
)
def test_other_families_continue_from_the_round_in_which_all_stopped(strategy, checkpoint, tmp_path):
    """With one global batch, workers in step learn the same whatever their number."""
    options = {"replay": [[3, 4], [9, 3], [10, 1], [14, 2]]}
    more = {"checkpoint": tmp_path} if checkpoint else {}
    kind = "sgd" if "local" in strategy else "adam"
    work = Small(n=50, batch=4, optimizer=kind)
    found = train(work, (1, 4), strategy=strategy, global_batch=8, elastic=options, **more)
    assert log_of(found) == options["replay"]
    assert found.snapshot.round == 21
    alone = train(Small(n=50, batch=4, optimizer=kind), 1, strategy="all_reduce", elastic={"most": 1}, global_batch=8)
    exact = "fp16" not in strategy
    tolerance = {"rtol": 1e-10, "atol": 1e-12} if exact else {"rtol": 0.05, "atol": 0.02}
    torch.testing.assert_close(found.snapshot.loaded().params, params(alone), **tolerance)


@pytest.mark.parametrize("strategy", ["local_sgd:period=4", "diloco:period=4", "local_sgd:period=4,momentum=reset"])
def test_averaged_workers_change_and_take_each_row_once(strategy):
    tag = strategy
    ROWS.clear()
    options = {"replay": [[3, 4], [6, 2], [11, 3]]}
    found = train(Numbered(n=47, batch=3, tag=tag, optimizer="sgd"), (2, 4), strategy=strategy, elastic=options)
    assert log_of(found) == options["replay"]
    assert Counter(row for row, mark in ROWS if mark == tag) == Counter(dict.fromkeys(range(47), 3))
    again = train(Numbered(n=47, batch=3, tag="again", optimizer="sgd"), (2, 4), strategy=strategy, elastic=options)
    assert torch.equal(params(found), params(again))


@pytest.mark.parametrize("strategy", ["parameter_server:shards=2", "all_reduce:shard=optimizer", "local_sgd:period=1"])
def test_other_families_return_to_the_newest_state_after_a_death(strategy):
    tag = f"death-{strategy}"
    cluster = Watched()
    kind = "sgd" if "local" in strategy else "adam"
    work = Small(n=120, batch=4, optimizer=kind, tag=tag, pause=0.01)
    killer = cluster.kill_when(tag, 60, ("WorkerActor", 1))
    options = {"replay": [[1, 3]]}
    found = train(
        work, (1, 3), strategy=strategy, epochs=4, cluster=cluster, global_batch=12, elastic=options, checkpoint_every=5
    )
    killer.join()
    changes = [event for event in found.events if event["kind"] == "resized"]
    assert [(event["from"], event["to"]) for event in changes] == [(1, 3), (3, 2)]
    assert len(changes[1]["lost"]) == 1
    alone = train(Small(n=120, batch=4, optimizer=kind), 1, epochs=4, elastic={"most": 1}, global_batch=12)
    torch.testing.assert_close(found.snapshot.loaded().params, params(alone), rtol=1e-10, atol=1e-12)


def test_with_copies_of_slices_a_death_of_sharded_state_loses_no_round():
    """The dead worker is replaced, and gets its slice from its neighbour."""
    tag = "copies"
    cluster = Watched()
    work = Small(n=120, batch=4, optimizer="adam", tag=tag, pause=0.01)
    killer = cluster.kill_when(tag, 60, ("WorkerActor", 0))
    strategy = "all_reduce:shard=optimizer,slice_backup=true"
    found = train(
        work, (1, 2), strategy=strategy, epochs=4, cluster=cluster, global_batch=12, elastic={"replay": [[3, 2]]}
    )
    killer.join()
    kinds = [event["kind"] for event in found.events]
    assert kinds.count("mended") == 1
    assert "restarted" not in kinds
    alone = train(Small(n=120, batch=4, optimizer="adam"), 1, epochs=4, elastic={"most": 1}, global_batch=12)
    torch.testing.assert_close(found.snapshot.loaded().params, params(alone), rtol=1e-10, atol=1e-12)


def test_a_change_declares_that_error_feedback_is_dropped():
    options = {"replay": [[3, 2]]}
    found = train(Small(), (1, 2), strategy="all_reduce:compression=int8", global_batch=6, elastic=options)
    [event] = [event for event in found.events if event["kind"] == "resized"]
    assert "error feedback of the compression was dropped" in event["message"]


@pytest.mark.parametrize("strategy", ["fedavg:fraction=0.5", "scaffold"])
def test_federated_workers_change_and_the_result_does_not(strategy):
    class Clients(Small):
        def data(self):
            x, y = rows(60)
            return rayps.data.tensors(x, y, batch_size=4, client=rayps.data.iid(6))

    fixed = train(Clients(optimizer="sgd"), 2, strategy=strategy, epochs=8)
    found = train(Clients(optimizer="sgd"), (1, 3), strategy=strategy, epochs=8, elastic={"replay": [[2, 3], [5, 2]]})
    assert log_of(found) == [[2, 3], [5, 2]]
    assert torch.equal(params(found), params(fixed))

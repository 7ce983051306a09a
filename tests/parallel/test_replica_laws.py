"""The law of replicas of several workers: whatever the layout, the result is that of one process on the union batch."""

import dataclasses

import covers
import pytest
import torch
from small_work import OPTIMIZERS, Small, distance, plain, train, vector
from torch import nn

import rayps
from rayps import AllReduce, ParameterServer
from rayps.core.strategy.replica import Pipeline, TensorParallel
from rayps.core.strategy.topology import servers_of

EXACT = 1e-12


class Deep(Small):
    """Six layers, of which three learn."""

    def __init__(self, n=36, batch=4, **options):
        super().__init__(n=n, batch=batch, **options)

    def model(self):
        return nn.Sequential(
            nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 6), nn.Linear(6, 1)
        ).double()


def losses(result):
    return result.history.column("loss").to_pylist()


def ident(strategy):
    replica = strategy.replica
    inner = f"x{replica.tensor}" if isinstance(replica, Pipeline) and replica.stage else ""
    return f"{strategy.name}-{replica.name}{replica.stages if replica.stages > 1 else replica.tensor}{inner}"


REPLICAS = [
    Pipeline(stages=2),
    Pipeline(stages=3, micro_batches=3, schedule="gpipe"),
    TensorParallel(size=2),
    TensorParallel(size=3),
    Pipeline(stages=2, micro_batches=2, stage=TensorParallel(size=2)),
]
STRATEGIES = [
    *(AllReduce(replica=each) for each in REPLICAS),
    *(ParameterServer(shards=5, replica=each) for each in (REPLICAS[0], REPLICAS[2], REPLICAS[4])),
]


@covers.by(
    lambda strategy, replicas: ident(strategy),
    lambda strategy, replicas: (type(strategy), replicas),
    lambda strategy, replicas: (strategy.replica.name, replicas),
)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=ident)
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_any_composition_equals_one_process_on_the_union_batch(strategy, replicas):
    work = Deep(n=38, optimizer="adam")
    workers = replicas * strategy.grid(strategy.replica.stages * strategy.replica.tensor).columns
    result = train(work, strategy, workers=workers, epochs=2, seed=5)
    model, expected, evaluations = plain(work, replicas, epochs=2, seed=5)
    assert distance(result.model(), model) < EXACT
    assert losses(result) == pytest.approx(expected, abs=EXACT)
    assert result.metrics["loss"] == pytest.approx(evaluations[-1], abs=EXACT)
    assert sum(result.history.column("samples").to_pylist()) == 2 * 38


@pytest.mark.parametrize("strategy", [AllReduce(replica=REPLICAS[0]), AllReduce(replica=REPLICAS[2])], ids=ident)
@pytest.mark.parametrize(("n", "batch"), [(37, 4), (5, 4), (9, 8), (21, 5)])
def test_ragged_data_is_weighted_by_samples(strategy, n, batch):
    work = Deep(n=n, batch=batch, optimizer="momentum")
    result = train(work, strategy, workers=4, epochs=3)
    model, expected, _ = plain(work, 2, epochs=3)
    assert distance(result.model(), model) < EXACT
    assert losses(result) == pytest.approx(expected, abs=EXACT)


class Steps(Deep):
    """One step of it is the gradient."""

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=1.0)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=ident)
def test_the_gradient_is_that_of_the_union_batch(strategy):
    replicas = 2
    work = Steps(n=38, batch=5)
    torch.manual_seed(3)
    start = vector(work.model())
    result = train(work, strategy, workers=replicas * strategy.grid(60).columns, steps=1, seed=3)
    model, _, _ = plain(work, replicas, steps=1, seed=3)
    expected, found = start - vector(model), start - vector(result.model())
    assert (found - expected).norm() < 1e-13 * expected.norm()


class Tied(Deep):
    """The first and the last stage share a weight."""

    def model(self):
        model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6), nn.Linear(6, 1))
        model[4].weight = model[0].weight
        return model.double()


@pytest.mark.parametrize(
    "strategy",
    [
        AllReduce(replica=Pipeline(stages=2)),
        AllReduce(replica=Pipeline(stages=3, micro_batches=2)),
        ParameterServer(shards=3, replica=Pipeline(stages=3, micro_batches=2)),
        AllReduce(replica=Pipeline(stages=2, stage=TensorParallel(size=2, plan={"0": "out", "4": "out"}))),
        AllReduce(replica=TensorParallel(size=2, plan={"0": "out", "4": "out"})),
        AllReduce(replica=Pipeline(stages=2, stage=TensorParallel(size=2, plan={"2": "out"}))),
    ],
    ids=ident,
)
@pytest.mark.parametrize("clip", [None, 0.3])
def test_tied_weights_stay_tied_and_count_once(strategy, clip):
    work = Tied(optimizer="adam")
    work.clip_norm = clip
    replicas = 1 if clip and servers_of(strategy) else 2  # a server is given what each replica has clipped
    result = train(work, strategy, workers=replicas * strategy.grid(60).columns, epochs=2)
    model, expected = clipped(work, replicas, epochs=2)
    assert losses(result) == pytest.approx(expected, abs=EXACT)
    assert distance(result.model(), model) < EXACT


def clipped(work, workers, epochs, seed=0):
    """As `plain`, with the gradient's norm cut by torch's own function."""
    torch.manual_seed(seed)
    model = work.model()
    optimizer, found = work.optimizer(list(model.parameters())), []
    data = work.data()
    for epoch in range(epochs):
        dealt = [list(data.batches(rank=r, size=workers, seed=seed, epoch=epoch)) for r in range(workers)]
        for parts in zip(*dealt, strict=True):
            x, y = torch.cat([b.x for b in parts if b.size]), torch.cat([b.y for b in parts if b.size])
            optimizer.zero_grad()
            loss = ((model(x) - y) ** 2).mean()
            loss.backward()
            if work.clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), work.clip_norm)
            optimizer.step()
            found.append(loss.item())
    return model, found


@pytest.mark.parametrize("strategy", [None, *STRATEGIES[:5]], ids=lambda s: "alone" if s is None else ident(s))
def test_the_norm_counts_everything_once(strategy):
    work = Deep()
    work.clip_norm = 0.05
    strategy = strategy or AllReduce()
    result = train(work, strategy, workers=2 * strategy.grid(60).columns, epochs=2)
    model, expected = clipped(work, 2, epochs=2)
    assert losses(result) == pytest.approx(expected, abs=EXACT)
    assert distance(result.model(), model) < EXACT
    work.clip_norm = None
    assert distance(clipped(work, 2, epochs=2)[0], model) > 1e-3  # it was cut


class Groups(Deep):
    """Groups by number, and Adagrad, whose state is there before its first step."""

    def optimizer(self, params):
        params = list(params)
        return torch.optim.Adagrad([{"params": params[:3], "lr": 0.1}, {"params": params[3:], "lr": 0.01}], lr=0.1)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=ident)
def test_groups_by_number_stay_the_same(strategy):
    result = train(Groups(), strategy, workers=strategy.grid(60).columns, epochs=2)
    model, expected, _ = plain(Groups(), 1, epochs=2)
    assert losses(result) == pytest.approx(expected, abs=EXACT)
    assert distance(result.model(), model) < EXACT


class Normed(Deep):
    """A norm, whose statistics depend on the batches alone, and a layer that does not learn."""

    def model(self):
        model = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6), nn.Linear(6, 1)).double()
        model[3].weight.requires_grad_(False)
        return model


@pytest.mark.parametrize(
    "replica",
    [
        Pipeline(stages=2, micro_batches=1),
        TensorParallel(size=2),
        Pipeline(stages=2, micro_batches=1, stage=TensorParallel(size=2)),
    ],
    ids=str,
)
def test_buffers_and_what_does_not_learn(replica):
    strategy = AllReduce(replica=replica)
    result = train(Normed(n=40), strategy, workers=2 * strategy.grid(60).columns, epochs=2)
    alone = train(Normed(n=40), AllReduce(), workers=2, epochs=2)
    assert losses(result) == pytest.approx(losses(alone), abs=EXACT)
    found, expected = result.model().state_dict(), alone.model().state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name].double(), value.double(), atol=EXACT, rtol=0), name
    assert result.metrics["loss"] == pytest.approx(alone.metrics["loss"], abs=EXACT)


LAYOUTS = [
    (AllReduce(), 1),
    (AllReduce(replica=Pipeline(stages=4)), 4),
    (AllReduce(replica=TensorParallel(size=2)), 2),
    (ParameterServer(shards=3, replica=Pipeline(stages=2)), 2),
    (AllReduce(replica=Pipeline(stages=2, stage=TensorParallel(size=2))), 4),
]


class Four(Deep):
    """Four layers that learn, each with a Tanh of its own."""

    def model(self):
        return nn.Sequential(
            *(nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in ((5, 8), (8, 7), (7, 6))), nn.Linear(6, 1)
        ).double()


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_any_layout_goes_on_from_any_checkpoint(tmp_path, optimizer):
    work = Four(optimizer=optimizer)
    order = [0, 1, 0, 2, 1, 3, 4, 3, 2, 4, 0]
    model, expected, _ = plain(work, 1, steps=4 * len(order))
    for i, number in enumerate(order):
        strategy, workers = LAYOUTS[number]
        result = train(work, strategy, workers=workers, steps=4 * (i + 1), checkpoint=tmp_path, resume=i > 0)
        assert losses(result) == pytest.approx(expected[4 * i : 4 * i + 4], abs=EXACT), f"{i}: {strategy}"
    assert distance(result.model(), model) < EXACT


def test_another_number_of_replicas_goes_on_from_an_epochs_end(tmp_path):
    work = Four(n=32)  # 8 rounds an epoch with one replica, 4 with two
    train(work, AllReduce(replica=Pipeline(stages=4)), workers=4, epochs=1, checkpoint=tmp_path)
    result = train(work, AllReduce(replica=Pipeline(stages=2)), workers=4, epochs=2, checkpoint=tmp_path, resume=True)
    assert result.history.column("round").to_pylist() == [4, 5, 6, 7]
    train(work, AllReduce(replica=Pipeline(stages=2)), workers=4, steps=10, checkpoint=tmp_path, resume=True)
    with pytest.raises(rayps.RaypsError, match="middle of an epoch by 2 replicas"):
        train(work, AllReduce(replica=Pipeline(stages=4)), workers=4, epochs=4, checkpoint=tmp_path, resume=True)


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_the_layout_can_change_during_a_run(optimizer):
    work = Four(n=32, optimizer=optimizer)
    phases = [
        (1, AllReduce(replica=Pipeline(stages=4))),
        (2, AllReduce(replica=TensorParallel(size=2))),
        (1, ParameterServer(shards=3, replica=Pipeline(stages=2))),
        (1, AllReduce()),
        AllReduce(replica=Pipeline(stages=2, stage=TensorParallel(size=2))),
    ]
    result = train(work, phases, workers=4, epochs=6)
    assert result.history.column("round").to_pylist() == list(range(8 + 8 + 4 + 2 + 8))
    assert result.history.column("epoch").to_pylist() == [0] * 8 + [1] * 4 + [2] * 4 + [3] * 4 + [4] * 2 + [5] * 8
    model, expected, evaluations = changing(work, [1, 2, 2, 2, 4, 1])
    assert losses(result) == pytest.approx(expected, abs=EXACT)
    assert distance(result.model(), model) < EXACT
    found = [v for v in result.history.column("evaluation_loss").to_pylist() if v is not None]
    assert found == pytest.approx(evaluations, abs=EXACT)


def changing(work, replicas, seed=0):
    """As `plain`, with another number of replicas in each epoch."""
    torch.manual_seed(seed)
    model = work.model()
    optimizer, data = work.optimizer(list(model.parameters())), work.data()
    found, evaluations = [], []
    for epoch, size in enumerate(replicas):
        dealt = [list(data.batches(rank=r, size=size, seed=seed, epoch=epoch)) for r in range(size)]
        for parts in zip(*dealt, strict=True):
            x, y = torch.cat([b.x for b in parts]), torch.cat([b.y for b in parts])
            optimizer.zero_grad()
            loss = ((model(x) - y) ** 2).mean()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        with torch.no_grad():
            evaluations.append(((model(data.x) - data.y) ** 2).mean().item())
    return model, found, evaluations


@pytest.mark.parametrize("staleness", [1, None])
@pytest.mark.parametrize("replica", [Pipeline(stages=2), TensorParallel(size=2)], ids=str)
def test_out_of_step_a_replica_is_one_worker(replica, staleness):
    work = Four(n=64, batch=4)
    result = train(work, ParameterServer(shards=3, staleness=staleness, replica=replica), workers=4, epochs=4)
    assert result.snapshot.positions == [32, 32]
    assert sum(result.history.column("samples").to_pylist()) == 4 * 64
    assert result.metrics["loss"] == pytest.approx(plain(work, 2, epochs=4)[2][-1], rel=0.3)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_replica_is_plain_torch(optimizer):
    work = Four(optimizer=optimizer)
    result = train(work, Pipeline(stages=3), workers=3, epochs=2)
    model, expected, _ = plain(work, 1, epochs=2)
    assert losses(result) == pytest.approx(expected, abs=EXACT)
    assert distance(result.model(), model) < EXACT


@pytest.mark.parametrize("strategy", [AllReduce(), ParameterServer(shards=2)], ids=lambda s: s.name)
@pytest.mark.parametrize(
    "replica",
    [
        Pipeline(stages=3, boundaries=[1, 3]),  # the middle stage has no parameter
        Pipeline(stages=2, stage=TensorParallel(size=2, plan={"0": "out"})),  # nor has the second one's second rank
    ],
    ids=str,
)
def test_a_part_may_own_nothing(strategy, replica):
    class Wide(Deep):
        def model(self):
            return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Tanh(), nn.Linear(8, 1)).double()

    work = Wide(optimizer="adam")
    strategy = dataclasses.replace(strategy, replica=replica)
    result = train(work, strategy, workers=2 * strategy.grid(60).columns, epochs=2)
    model, expected, _ = plain(work, 2, epochs=2)
    assert losses(result) == pytest.approx(expected, abs=EXACT)
    assert distance(result.model(), model) < EXACT

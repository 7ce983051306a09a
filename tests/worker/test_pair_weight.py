"""A pair (sum, weight) whose weight depends on the model is no pair: `return loss, accuracy` is refused by name."""

import functools
import random

import covers
import numpy as np
import pytest
import torch
from newborn_site import FORMS, GIVEN
from rayps_client.errors import WorkloadError
from rayps_client.trainers.moved_weight import refuse_moved_weight
from rayps_client.trainers.torch_trainer import torch_trainer
from sharded_site import Words, in_processes, loop_on, rounds
from small_work import distance, train
from test_trial import drive
from torch import nn
from torch.nn import functional

import rayps
from rayps.clients.workload_trainer import WorkloadTrainer, own_data
from rayps.core.job.job_status import Status
from rayps.strategies.catalogue import CATALOGUE
from rayps.workload.model_part import WeightCheck

OTHER = {"statistics", "hybrid"}
PRIVATE = {"fedper": "fedper:private=3", "fedrep": "fedrep:private=3"}
STRATEGIES = [
    *((GIVEN | PRIVATE).get(name, name) for name in CATALOGUE if name not in OTHER),
    *(text for text in FORMS if " of " not in text),
]
WORDS = "second value depends on the model"


class Classes(rayps.Workload):
    """Three classes, balanced; `kind` says what the second value of the loss is."""

    def __init__(self, kind, rows=33, batch=4, dropout=0.3):
        self.kind, self.rows, self.batch, self.dropout = kind, rows, batch, dropout
        self.generator = torch.Generator().manual_seed(3)

    def model(self):
        return nn.Sequential(nn.Linear(5, 8), nn.Dropout(self.dropout), nn.ReLU(), nn.Linear(8, 3))

    def data(self):
        x = torch.randn(self.rows, 5, generator=torch.Generator().manual_seed(1))
        return rayps.data.tensors(x, torch.arange(self.rows) % 3, batch_size=self.batch, client=rayps.data.iid(8))

    def loss(self, model, batch):
        scores = model(batch.x)
        losses = functional.cross_entropy(scores, batch.y, reduction="none")
        right = (scores.argmax(1) == batch.y).float()
        if self.kind == "accuracy":
            return losses.mean(), right.mean()
        if self.kind == "accuracy as a number":
            return losses.mean(), right.mean().item()
        if self.kind == "number of right rows":
            return losses.sum(), right.sum()
        if self.kind == "rows":
            return losses.sum(), len(losses)
        if self.kind == "class weights":
            weights = torch.tensor([0.2, 1.5, 0.7])[batch.y]
            return (losses * weights).sum(), weights.sum()
        draws = {
            "torch mask": lambda: torch.rand(len(losses)),
            "numpy mask": lambda: torch.from_numpy(np.random.rand(len(losses))),
            "python mask": lambda: torch.tensor([random.random() for _ in losses]),
            "own generator": lambda: torch.rand(len(losses), generator=self.generator),
        }
        kept = (draws[self.kind]() < 0.6).float()
        return (losses * kept).sum(), kept.sum()

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.01)


MOVES = ["accuracy", "accuracy as a number"]
MASKS = ["torch mask", "numpy mask", "python mask", "own generator"]
STAYS = ["rows", "class weights", *MASKS]


@pytest.mark.parametrize("kind", [*MOVES, "number of right rows"])
@pytest.mark.parametrize("strategy", ["all_reduce", "fedavg"])
def test_it_is_named_before_any_worker_starts(kind, strategy):
    outcome, _, cluster = drive(Classes(kind, rows=60, batch=30), strategy)
    assert outcome.status is Status.FAILED
    assert type(outcome.error) is WorkloadError
    assert WORDS in outcome.message
    assert "{'loss': loss, 'accuracy': accuracy}" in outcome.message
    assert cluster.workers == 0


@pytest.mark.parametrize("kind", ["accuracy", "number of right rows"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_without_a_trial_each_strategy_refuses_a_metric(strategy, kind):
    # threads share torch's random state, by which dropout of one would move the weight of the other
    outcome, _, _ = drive(Classes(kind, rows=60, batch=6, dropout=0.0), strategy, tries=False, epochs=2)
    assert outcome.status is Status.FAILED
    assert WORDS in outcome.message


class Normalized(Classes):
    """With a BatchNorm layer, which workers synchronize."""

    sync_batchnorm = True

    def model(self):
        return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", [*MOVES, "number of right rows"])
def test_synchronized_batchnorm_refuses_a_metric(kind, workers):
    outcome, _, _ = drive(Normalized(kind, rows=60, batch=6), tries=False, workers=workers)
    assert outcome.status is Status.FAILED
    assert (WORDS if workers == 1 else "returned a pair (sum, weight), and sync_batchnorm is True") in outcome.message


class Right(Words):
    """The weight of a loss is the number of rows whose sign the model has found, or their share."""

    def loss(self, model, batch):
        found = model(batch.x)
        right = (found.detach() > 0) == (batch.y > 0)
        errors = (found - batch.y) ** 2
        return errors.sum(), (right.sum() if self.kind_of_weight == "right rows" else right.double().mean())


def train_shards(kind, rank, size, addresses, listener):
    loop, peers = loop_on(rank, size, addresses, listener, Right(kind_of_weight=kind, rows=64, batch=8), 3)
    try:
        rounds(loop, 3)
        loop.finish()
    finally:
        loop.close()
        peers.close()


@pytest.mark.parametrize("kind", ["right rows", "accuracy"])
def test_workers_with_shards_of_the_parameters_refuse_a_metric(kind):
    ended = in_processes(functools.partial(train_shards, kind), 2)
    assert [each.error for each in ended if WORDS in each.text][:1] == ["WorkloadError"], ended


@covers.by(lambda kind, strategy: kind, lambda kind, strategy: (strategy, kind in MASKS))
@pytest.mark.parametrize("kind", STAYS)
@pytest.mark.parametrize("strategy", ["all_reduce", "parameter_server", "fedavg", "pipeline:stages=2,micro_batches=2"])
def test_a_weight_that_the_batch_determines_stays(kind, strategy):
    outcome, _, _ = drive(Classes(kind), strategy, epochs=1)
    assert outcome.status is Status.SUCCEEDED, outcome.message


@pytest.mark.parametrize("kind", [*MOVES, "number of right rows", *STAYS])
def test_an_own_client_answers_before_it_joins(kind):
    work = Classes(kind, batch=30)
    for trainer in (WorkloadTrainer(work, own_data(work, None)), torch_trainer(work, work.data())):
        if kind in STAYS:
            trainer.try_out()
        else:
            with pytest.raises(WorkloadError, match=WORDS):
                trainer.try_out()


def test_the_check_leaves_no_trace():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 3))
    model[3].weight = model[0].weight
    x = torch.randn(6, 3)
    held = [(id(t), t._version, t.clone()) for t in (*model.parameters(), *model.buffers())]
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    calls, draws = [], []

    def weight():
        draws.append((random.random(), np.random.rand(), torch.rand(1).item()))
        calls.append(model(x).sum().item())
        return 6

    refuse_moved_weight(weight, model)
    assert len(set(calls)) == len(calls) > 2  # the parameters were others
    assert len(set(draws)) == 1
    after = [*model.parameters(), *model.buffers()]
    assert [(id(t), t._version) for t in after] == [each[:2] for each in held]
    assert all(t.equal(before) for t, (_, _, before) in zip(after, held, strict=True))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all()
    assert random.getstate() == states[2]


class Penalized(Classes):
    """A pair whose sum has a gradient penalty, and a loss that shrinks a weight once in each step."""

    def loss(self, model, batch):
        if model.training:
            with torch.no_grad():
                model[0].weight.mul_(0.5)
        total, weight = super().loss(model, batch)
        (slope,) = torch.autograd.grad(total, model[0].weight, create_graph=True)
        return total + slope.square().sum(), weight


@pytest.mark.parametrize("strategy", ["all_reduce", "fedavg", "pipeline:stages=2,micro_batches=1"])
def test_a_loss_that_computes_derivatives_and_changes_parameters_is_checked(strategy):
    work = Penalized("class weights", rows=8, dropout=0.0)
    if "pipeline" in strategy:  # which computes no derivatives in the loss, and says so; the check is not in its way
        outcome, _, _ = drive(work, strategy, epochs=1)
        assert "does not require grad" not in outcome.message
        return
    batch = next(work.data().batches(rank=0, size=1, seed=0, epoch=0))
    model = work.model()
    before = model[0].weight.detach().clone()
    WeightCheck(work, model).of(batch)
    assert torch.equal(model[0].weight, before)
    outcome, _, _ = drive(work, strategy, epochs=1)
    assert outcome.status is Status.SUCCEEDED, outcome.message


def test_class_weights_train_as_without_the_check(monkeypatch):
    checked = train(Classes("class weights"), workers=1, epochs=2)
    monkeypatch.setattr("rayps.workload.model_part.WeightCheck.once", lambda *_: None)
    assert distance(checked.model(), train(Classes("class weights"), workers=1, epochs=2).model()) == 0

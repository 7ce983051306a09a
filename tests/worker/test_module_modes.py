"""Each module of a model trains in the mode that `model()` gave it, under every strategy, after evaluations too."""

import covers
import pytest
import torch
from newborn_site import FORMS, GIVEN
from rayps_client.trainers.local_trainer import LocalTask, RoundStart
from rayps_client.trainers.module_modes import evaluating, prepare_to_train
from rayps_client.trainers.torch_tensors import raw_of, raws_of, tensors_of
from rayps_client.trainers.torch_trainer import torch_trainer
from sharded_site import Words, loop_on, results, rounds
from small_work import Small, train
from torch import nn

import rayps
from rayps.clients.workload_trainer import WorkloadTrainer, own_data
from rayps.core.strategy.strategy_families import learns_by_client
from rayps.strategies.catalogue import CATALOGUE, parse

OTHER = {"statistics", "hybrid"}  # they train no such model: one has none, the other needs sparse tables
PRIVATE = {"fedper": "fedper:private=3", "fedrep": "fedrep:private=3"}
STRATEGIES = [
    *((GIVEN | PRIVATE).get(name, name) for name in CATALOGUE if name not in OTHER),
    *(text for text in FORMS if " of " not in text),
    "ditto:lam=0.1,buffers=keep",
    "fedavg:finetune=1",
]


class Modes(Small):
    """A frozen front and a layer that learns, each with running statistics; `modes` says what `model()` does."""

    def __init__(self, modes, **options):
        super().__init__(n=32, batch=4, **options)
        self.modes = modes

    def model(self):
        front = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh()).requires_grad_(False)
        model = nn.Sequential(
            front, nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        )
        if self.modes == "front":
            front.eval()
        elif self.modes == "root":
            model.eval()
        return model.double()

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.01)

    def data(self):
        data = super().data()
        return rayps.data.tensors(data.x, data.y, batch_size=4, client=rayps.data.iid(8))


def moved(buffers):
    """Whether the statistics of the front and of the layer that learns have changed."""
    assert {"0.1.running_mean", "2.running_mean"} <= buffers.keys()
    return bool(buffers["0.1.running_mean"].any()), bool(buffers["2.running_mean"].any())


EXPECTED = {"front": (False, True), "root": (True, True), "": (True, True)}


@covers.by(lambda strategy, modes: (strategy, modes == "front"), lambda strategy, modes: modes)
@pytest.mark.parametrize("modes", EXPECTED)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_statistics_are_those_of_the_modes_that_model_gave(strategy, modes):
    federated = learns_by_client(parse(strategy)[0].strategy)
    result = train(Modes(modes), strategy, workers=2, epochs=3, evaluate_every=None if federated else 1)
    own = result.client(result.clients[0]).model() if "keep" in strategy else result.model()
    buffers = dict(own.named_buffers())
    assert moved(buffers) == EXPECTED[modes]
    assert not any(module.training for module in result.model().modules())


@pytest.mark.parametrize("modes", ["front", "root"])
def test_the_model_of_an_own_client_keeps_its_modes(modes):
    work = Modes(modes)
    for trainer in (WorkloadTrainer(work, own_data(work, None)), torch_trainer(work, work.data())):
        trainer.try_out()
        model = work.model()
        w = torch.cat([p.detach().reshape(-1) for p in model.parameters() if p.requires_grad])
        start = RoundStart(raw_of(w), {}, raws_of(dict(model.named_buffers())))
        task = LocalTask({"name": "fedavg", "local_epochs": 1}, 0, 0, 0, 0, start=start, state={})
        trainer.evaluate(task, "me")
        assert moved(tensors_of(trainer.train(task).buffers)) == EXPECTED[modes]


class Halved(Words):
    """Shards of the parameters, of a model whose dropout is off in one block and on in the other."""

    def model(self):
        model = super().model()
        model.layers[0].eval()
        return model


def modes_of(module):
    return {name: each.training for name, each in module.named_modules()}


def modes_of_shards(rank, size, addresses, listener):
    workload = Halved(net={"dropout": 0.5})
    loop, peers = loop_on(rank, size, addresses, listener, workload, 3)
    try:
        rounds(loop, 2)
        loop.evaluate()
        found = modes_of(loop.w.model.module)
        rounds(loop, 3)
        loop.finish()
    finally:
        loop.close()
        peers.close()
    return found, modes_of(workload.model())


def test_shards_of_the_parameters_keep_the_modes():
    for found, expected in results(modes_of_shards, 2):
        assert found == expected
        assert len(set(found.values())) == 2


# ---- the helper


class Merging(nn.Linear):
    """Adds its second weight to the first in evaluation mode, as layers of LoRA do."""

    def __init__(self):
        super().__init__(2, 2)
        self.delta, self.merged = 0.5, False

    def train(self, mode=True):
        super().train(mode)
        if mode == self.merged:
            with torch.no_grad():
                self.weight.add_(-self.delta if mode else self.delta)
            self.merged = not mode
        return self


class Stubborn(nn.Sequential):
    """Holds its first module in evaluation mode, as many ports of ResNets do."""

    def train(self, mode=True):
        super().train(mode)
        self[0].eval()
        return self


def test_modes_come_back_whatever_train_does():
    shared = nn.Dropout()
    model = nn.Sequential(
        Stubborn(nn.Dropout(), Merging()), nn.Sequential(shared, nn.Dropout()), Merging(), shared
    ).double()
    model.train()
    model[1].eval()
    shared.train()
    before, weight = modes_of(model), model[2].weight.clone()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"), evaluating(model):
            assert not any(modes_of(model).values())
            assert not model[2].weight.equal(weight)
            raise RuntimeError("out of memory")
        assert modes_of(model) == before
        assert torch.allclose(model[2].weight, weight)
        assert not model[0][1].merged


def test_a_model_in_evaluation_mode_is_put_into_training_mode_as_a_whole():
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout())).eval()
    prepare_to_train(model)
    assert all(modes_of(model).values())
    model[1].eval()
    prepare_to_train(model)
    assert list(modes_of(model).values()) == [True, True, False, False]

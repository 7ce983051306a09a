"""Parameter groups by name: under every strategy the result is that of a plain torch loop with the same groups."""

import pytest
import torch
from federated_work import Fed
from rayps_client.errors import WorkloadError
from small_work import Small, distance, plain, train
from torch import nn

from rayps.tensors.flat import FlatModel
from rayps.tensors.named_parameters import NamedFactory, NamedParameters, factory_of
from rayps.tensors.optim import SlicedOptimizer, build


def groups(named):
    decay = [p for name, p in named if name.endswith("weight")]
    rest = [p for name, p in named if not name.endswith("weight")]
    return torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "lr": 0.03}], lr=0.01)


class Grouped(Small):
    """Weight decay for weights, a higher rate for biases; three layers, so that a pipeline can cut them."""

    def model(self):
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 1)).double()

    def optimizer(self, named_parameters):
        return groups(named_parameters)


class Warm(Grouped):
    def schedule(self, optimizer):
        assert len(optimizer.param_groups) == 2
        return lambda step: min(1.0, (step + 1) / 4)


class Law(Small):
    """The same for the plain loop, which calls optimizer(params) without names."""

    model = Grouped.model

    def optimizer(self, params):
        return groups([("weight" if p.dim() > 1 else "bias", p) for p in params])


class WarmLaw(Law):
    schedule = Warm.schedule


@pytest.mark.parametrize(
    ("strategy", "workers"),
    [
        ("all_reduce", 2),
        ("parameter_server:shards=3,staleness=0", 2),
        ("pipeline:stages=2,micro_batches=1", 2),
        ("all_reduce:replica=pipeline(stages=2,micro_batches=1)", 4),
        ("parameter_server:shards=2,staleness=0,replica=pipeline(stages=2,micro_batches=1)", 4),
        ("local_sgd:period=1", 1),
    ],
)
@pytest.mark.parametrize(("work", "law"), [(Grouped, Law), (Warm, WarmLaw)], ids=["constant", "schedule"])
def test_groups_by_name_equal_plain_torch(strategy, workers, work, law):
    replicas = workers // 2 if "pipeline" in strategy else workers
    expected, _, _ = plain(law(), replicas, epochs=2)
    assert distance(train(work(), strategy, workers=workers, epochs=2).model(), expected) < 1e-9


def test_without_groups_the_names_change_nothing():
    class Direct(Small):
        def optimizer(self, named_parameters):
            return torch.optim.Adam(named_parameters, lr=0.01)  # torch takes pairs of name and parameter

    for strategy in ("all_reduce", "parameter_server:staleness=0"):
        assert distance(train(Direct(), strategy, workers=2).model(), plain(Small(optimizer="adam"), 2)[0]) < 1e-9


def test_slices_have_the_groups_of_their_parameters():
    model = Grouped().model()
    layout = FlatModel(model).layout
    factory = factory_of(Grouped().optimizer)
    assert isinstance(factory, NamedFactory)
    whole = build(factory, layout)
    assert [len(group["params"]) for group in whole.param_groups] == [3, 3]
    cut = 20  # within the first weight
    for lo, hi in ((0, cut), (cut, layout.size)):
        sliced = SlicedOptimizer(factory, layout, torch.zeros(hi - lo, dtype=torch.float64), lo, hi)
        assert [group["weight_decay"] for group in sliced.optimizer.param_groups] == [0.1, 0.01]


def test_only_the_argument_called_named_parameters_gets_names():
    work = Small()
    assert factory_of(work.optimizer) == work.optimizer
    assert not isinstance(factory_of(lambda params: None), NamedFactory)
    assert isinstance(factory_of(lambda named_parameters: None), NamedFactory)


def test_parameters_without_names_are_refused():
    with pytest.raises(WorkloadError, match="have no names"):
        factory_of(Grouped().optimizer)([nn.Parameter(torch.zeros(2))])
    with pytest.raises(ValueError, match="1 parameters have 2 names"):
        NamedParameters([nn.Parameter(torch.zeros(2))], ["a", "b"])


@pytest.mark.parametrize("strategy", ["fedavg:fraction=1", "fedprox:mu=0.1"])
def test_clients_get_names(strategy):
    class Named(Fed):
        def optimizer(self, named_parameters):
            return groups(named_parameters)

    class Unnamed(Fed):
        optimizer = Law.optimizer

    first, other = (train(work(), strategy, workers=2, steps=3).model() for work in (Named, Unnamed))
    assert distance(first, other) < 1e-12

"""How a model is cut: layers, parts, skip connections, and what cannot be cut."""

import itertools
import random
import statistics

import pytest
import torch
from rayps_client.errors import ConfigError, WorkloadError
from torch import nn

from rayps.data.base import Batch
from rayps.data.batch_parts import cut_batch
from rayps.parallel.pipeline import cut, loss_proxy
from rayps.parallel.pipeline.skip import Stash, Unstash, routes
from rayps.tensors.division import Route


def names(model):
    return [layer.name for layer in cut.layers(model)]


class Listed(nn.Module):
    """A model that says what its layers are."""

    def __init__(self, forward=None):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)])
        self.last = nn.Linear(4, 2)
        self.way = forward

    def layers(self):
        return [self.first, *self.blocks, self.last]

    def forward(self, x):
        if self.way is not None:
            return self.way(self, x)
        for layer in self.layers():
            x = layer(x)
        return x


def test_sequentials_are_taken_apart_and_others_are_not():
    class Own(nn.Sequential):
        def forward(self, x):
            return x + super().forward(x)

    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Sequential(nn.ReLU())), Own(nn.Linear(4, 4)))
    assert names(model) == ["0", "1.0", "1.1.0", "2"]
    assert [type(layer.module) for layer in cut.layers(model)] == [nn.Linear, nn.Tanh, nn.ReLU, Own]


def test_a_model_may_list_its_layers():
    assert names(Listed()) == [
        "first",
        "blocks.0.0",
        "blocks.0.1",
        "blocks.1.0",
        "blocks.1.1",
        "blocks.2.0",
        "blocks.2.1",
        "last",
    ]


def test_names_hold_for_a_part_whose_other_layers_are_gone():
    model = Listed()
    model.blocks[1] = nn.Identity()
    model.last = nn.Identity()
    assert names(model) == ["first", "blocks.0.0", "blocks.0.1", "blocks.1", "blocks.2.0", "blocks.2.1", "last"]


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (nn.Linear(2, 2), "cannot cut Linear.*nn.Sequential"),
        (nn.Transformer(8, 2, 1, 1, 8), "cannot cut Transformer"),
        (nn.Sequential(), "no layers"),
        (type("Mine", (nn.Sequential,), {"forward": lambda self, x: x})(nn.Tanh()), "forward.. of its own"),
        (nn.Sequential(nn.Tanh(), Stash("a")), r"Unstash\('a'\) is in the model 0 times"),
        (nn.Sequential(Unstash("a"), Stash("a")), "comes before its Stash"),
        (nn.Sequential(Stash("a"), Stash("a"), Unstash("a")), "2 times"),
    ],
)
def test_what_cannot_be_cut_says_the_way_out(model, why):
    with pytest.raises(WorkloadError, match=why):
        cut.layers(model)


def test_what_layers_may_give():
    class Strange(Listed):
        def layers(self):
            return [self.first, nn.Tanh()]

    class No(Listed):
        def layers(self):
            return "first"

    with pytest.raises(WorkloadError, match="number 1, not a part of the model"):
        cut.layers(Strange())
    with pytest.raises(WorkloadError, match="must return a list of modules"):
        cut.layers(No())


# ---------------------------------------------------------------------------------------------- into parts


def best(costs, parts):
    """The naive way: try every cut."""
    ways = itertools.combinations(range(1, len(costs)), parts - 1)

    def key(way):
        sums = [sum(costs[a:b]) for a, b in itertools.pairwise([0, *way, len(costs)])]
        return max(sums), sum(s * s for s in sums)

    return min(key(way) for way in ways), key


def test_shares_are_the_best_cut_there_is():
    rng = random.Random(4)
    for _ in range(150):
        costs = [rng.choice([0, 1, 2, 3, 10]) for _ in range(rng.randint(1, 9))]
        parts = rng.randint(1, len(costs))
        found = cut.shares(costs, parts)
        want, key = best(costs, parts)
        assert len(found) == parts - 1 and key(found) == want, (costs, parts)
        cut.spans(found, len(costs))


def test_more_parts_than_layers():
    with pytest.raises(ConfigError, match=r"3 layers and cannot be cut into 4 parts.*at most 3"):
        cut.shares([1, 1, 1], 4)


@pytest.mark.parametrize("boundaries", [(0,), (3,), (2, 2), (2, 1), (-1,)])
def test_boundaries_that_are_none(boundaries):
    with pytest.raises(ConfigError, match="increasing numbers from 1 to 2"):
        cut.spans(boundaries, 3)
    assert cut.spans((1,), 3) == [(0, 1), (1, 3)]


def test_measured_time_finds_the_heavy_layer():
    model = nn.Sequential(nn.Linear(8, 600), nn.Linear(600, 600), nn.Tanh(), nn.Linear(600, 8), nn.Dropout(0.5))
    x, state = torch.randn(64, 8), torch.get_rng_state()
    tries = [cut.measure(cut.layers(model), [x]) for _ in range(9)]  # other programs may interrupt a measurement
    assert all(len(took) == 5 and all(t > 0 for t in took) for took in tries)
    took = [statistics.median(each) for each in zip(*tries, strict=True)]
    assert max(took[:4]) == took[1]
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


# ---------------------------------------------------------------------------------------------- is the cut the model?


def check(model):
    cut.check(model, cut.layers(model), [torch.randn(3, 4)])


def test_models_that_are_their_layers_pass():
    check(Listed())
    check(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), Stash("s"), nn.Tanh(), Unstash("s")))
    tied = nn.Linear(4, 4)
    check(nn.Sequential(tied, nn.Tanh(), tied))


def test_a_skip_connection_that_a_cut_breaks_names_the_layer():
    def skips(self, x):
        y = self.blocks[0](self.first(x))
        z = self.blocks[1](y)
        return self.last(self.blocks[2](z + y))

    with pytest.raises(WorkloadError, match=r"layer 'blocks.2.0'.*\n.*Stash"):
        check(Listed(skips))


def test_work_before_or_after_the_layers_is_found():
    def after(self, x):
        return self.last(self.blocks[2](self.blocks[1](self.blocks[0](self.first(x))))).softmax(-1)

    with pytest.raises(WorkloadError, match="'last' would break the model: the model's result is not"):
        check(Listed(after))


def test_layers_called_twice_or_never_or_in_another_order():
    def twice(self, x):
        return self.last(self.blocks[2](self.blocks[1](self.blocks[1](self.blocks[0](self.first(x))))))

    def never(self, x):
        return self.last(self.blocks[1](self.blocks[0](self.first(x))))

    def other(self, x):
        return self.last(self.blocks[2](self.blocks[0](self.blocks[1](self.first(x)))))

    for way, words in (
        (twice, "'blocks.1.0'.*calls it 2 times"),
        (never, "'blocks.2.0'.*calls it 0 times"),
        (other, "'blocks.0.0'.*calls 'blocks.1.0' in its place"),
    ):
        with pytest.raises(WorkloadError, match=words):
            check(Listed(way))


def test_layers_that_share_an_attribute():
    class Says(nn.Module):
        def forward(self, x):
            self.said = x * 2
            return x

    class Hears(nn.Module):
        def __init__(self, other):
            super().__init__()
            self.other = [other]

        def forward(self, x):
            return x + self.other[0].said

    says = Says()
    with pytest.raises(WorkloadError, match="layer '2' would break the model"):
        check(nn.Sequential(says, nn.Tanh(), Hears(says)))


def test_check_leaves_the_model_as_it_was():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    model[2].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    check(model)
    assert [module.training for module in model] == [True, True, False]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# ---------------------------------------------------------------------------------------------- skips and proxies


def test_routes_are_the_skips_that_cross_chunks():
    model = nn.Sequential(Stash("a"), Stash("b"), nn.Tanh(), Unstash("b"), nn.Sequential(nn.Tanh(), Unstash("a")))
    modules = [layer.module for layer in cut.layers(model)]
    assert routes(modules, (2,)) == (Route("a", 0, 1), Route("b", 0, 1))
    assert routes(modules, (4, 5)) == (Route("a", 0, 2),)
    assert routes(modules, ()) == ()


def test_stash_in_one_process_and_unstash_alone():
    x = torch.randn(2, 3, requires_grad=True)
    y = nn.Sequential(Stash("s"), nn.Tanh(), Unstash("s"))(x)
    assert torch.equal(y, x.tanh() + x)
    with pytest.raises(WorkloadError, match=r"Stash\('s'\)"):
        Unstash("s")(x)


class Work:
    """A workload's two methods that call the model."""

    def loss(self, model, batch):
        return (model(batch.x[0], scale=2) - batch.y).pow(2).mean()

    def evaluate(self, model, batch):
        return {"mean": model(batch.x[0], scale=2).mean()}


def batch(n=5):
    return Batch((torch.arange(2.0 * n).reshape(n, 2), {"k": torch.arange(n)}), torch.zeros(n, 2), n)


def test_a_batch_in_parts_is_the_batch():
    whole = batch(7)
    for m in (1, 2, 7, 9):
        found = cut_batch(whole, m)
        assert len(found) == m and sum(part.size for part in found) == 7
        assert max(part.size for part in found) - min(part.size for part in found) <= 1
        assert torch.equal(torch.cat([part.x[0] for part in found]), whole.x[0])
        assert torch.equal(torch.cat([part.x[1]["k"] for part in found]), whole.x[1]["k"])
        assert torch.equal(torch.cat([part.y for part in found]), whole.y)
        assert sum(loss_proxy.weights(found)) == pytest.approx(1)
    with pytest.raises(WorkloadError, match=r"shape \(3,\).*must be 4"):
        cut_batch(Batch(torch.zeros(3), None, 4), 2)


def test_what_the_loss_calls_the_model_with_and_what_it_makes_of_the_output():
    one = batch()
    (x,), kwargs = loss_proxy.inputs(Work(), one)
    assert x is one.x[0] and kwargs == {"scale": 2}
    assert loss_proxy.inputs(Work(), one, training=False)[0][0] is x
    assert loss_proxy.loss(Work(), one, torch.ones(5, 2)).total.item() == 1
    assert loss_proxy.metrics(Work(), one, torch.ones(5, 2))["mean"].item() == 1


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (lambda s, model, b: model(b.x[0]).mean() + sum(p.sum() for p in model.parameters()), r"model.parameters\(\)"),
        (lambda s, model, b: model(model(b.x[0])).mean(), "more than once"),
        (lambda s, model, b: model.head(b.x[0]).mean(), "model.head"),
        (lambda s, model, b: model(b.x[0]), r"returned \(5, 2\)"),
        (lambda s, model, b: model(b.x[0]).nothing(), "AttributeError"),
    ],
)
def test_a_loss_that_a_pipeline_cannot_run(loss, why):
    work = type("Other", (Work,), {"loss": loss})()
    with pytest.raises(WorkloadError, match=why):
        loss_proxy.loss(work, batch(), torch.ones(5, 2))


def test_inputs_that_a_pipeline_cannot_find():
    never = type("Never", (Work,), {"loss": lambda s, model, b: b.y.mean()})()
    with pytest.raises(WorkloadError, match="did not call the model"):
        loss_proxy.inputs(never, batch())
    other = type("Differs", (Work,), {"evaluate": lambda s, model, b: {"m": model(b.x[0] + 1, scale=2).mean()}})()
    with pytest.raises(WorkloadError, match="the same input"):
        loss_proxy.inputs(other, batch(), training=False)
    plain = type("Plain", (Work,), {"evaluate": lambda s, model, b: {}})()
    loss_proxy.inputs(plain, batch(), training=False)
    broken = type("Broken", (Work,), {"loss": lambda s, model, b: model(b.x[0][9])})()
    with pytest.raises(WorkloadError, match=r"loss\(\) raised IndexError"):
        loss_proxy.inputs(broken, batch())

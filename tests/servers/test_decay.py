"""Weight decay out of step: a push that counts for a part of a step, or for several, decays as much."""

from dataclasses import replace

import pytest
import torch
from small_work import train
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop

import rayps
from rayps import AllReduce, Downpour, ParameterServer
from rayps.cluster.local import LocalCluster
from rayps.core.strategy.topology import PerRound
from rayps.tensors import optim
from rayps.tensors.flat import Layout

DECAY = 0.5
WORKERS = 4


class Pull(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, x):
        return self.w.expand(len(x), 3)


KINDS = {
    "sgd": lambda p: SGD(p, lr=0.06, weight_decay=DECAY),
    "momentum": lambda p: SGD(p, lr=0.003, momentum=0.9, weight_decay=DECAY),
    "nesterov": lambda p: SGD(p, lr=0.003, momentum=0.9, nesterov=True, weight_decay=DECAY),
    "adagrad": lambda p: Adagrad(p, lr=0.3, weight_decay=DECAY),
    "adam": lambda p: Adam(p, lr=0.02, weight_decay=DECAY),
}


class Quadratic(rayps.Workload):
    """(w - 1)^2 / 2 with an L2 penalty DECAY/2 w^2: least at 1 / (1 + DECAY)."""

    def __init__(self, kind):
        self.kind = kind

    def model(self):
        return Pull()

    def data(self):
        return rayps.data.tensors(torch.ones(16, 1, dtype=torch.float64), torch.ones(16, 1), batch_size=4)

    def loss(self, model, batch):
        return ((model(batch.x) - 1.0) ** 2).sum() / 2 / len(batch.x)

    def optimizer(self, params):
        return KINDS[self.kind](params)


STRATEGIES = [
    AllReduce(),
    ParameterServer(shards=2),
    ParameterServer(shards=2, staleness=2),
    ParameterServer(staleness=None),
    ParameterServer(shards=2, staleness=2, replicas=0),
    ParameterServer(shards=2, staleness=None, replicas=1),
    Downpour(n_push=1, n_fetch=1),
    Downpour(n_push=4, n_fetch=4, shards=2),
]


# each strategy and each optimizer; the law of each optimizer's steps is below
CASES = [(strategy, "sgd") for strategy in STRATEGIES] + [
    (STRATEGIES[number], kind)
    for number, kind in [(3, "momentum"), (4, "nesterov"), (4, "adam"), (7, "adagrad"), (7, "momentum"), (3, "adam")]
]


@pytest.mark.parametrize(("strategy", "kind"), CASES, ids=str)
def test_the_fixed_point_is_the_same_whatever_the_workers_and_the_pushes(strategy, kind):
    result = train(Quadratic(kind), strategy, workers=WORKERS, steps=90 if kind == "sgd" else 180)
    assert result.model().w.tolist() == pytest.approx([1 / (1 + DECAY)] * 3, abs=5e-3)


class Lion(torch.optim.Optimizer):
    """The sign of a running mean, and decay beside it: its step ignores the gradient's size."""

    def __init__(self, params, lr=0.01, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(torch.sign(mean.mul_(0.9).add_(p.grad, alpha=0.1)), alpha=group["lr"])


class SGDW(torch.optim.Optimizer):
    """Decay beside a step that follows the gradient's size."""

    def __init__(self, params, lr=0.01, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(p.grad, alpha=group["lr"])


# by name: an optimizer with this decay, and whether its decay is scaled with the push
MADE = {
    "sgd": (lambda decay: lambda p: SGD(p, lr=0.1, weight_decay=decay), True),
    "momentum": (lambda decay: lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=decay), True),
    "adagrad": (lambda decay: lambda p: Adagrad(p, lr=0.1, weight_decay=decay), True),
    "adam": (lambda decay: lambda p: Adam(p, lr=0.1, weight_decay=decay), True),
    "rmsprop": (lambda decay: lambda p: RMSprop(p, lr=0.01, weight_decay=decay), True),
    "sgdw": (lambda decay: lambda p: SGDW(p, lr=0.1, weight_decay=decay), True),
    "adamw": (lambda decay: lambda p: AdamW(p, lr=0.1, weight_decay=decay), False),
    "nadamw": (
        lambda decay: lambda p: torch.optim.NAdam(p, lr=0.1, weight_decay=decay, decoupled_weight_decay=True),
        False,
    ),
    "lion": (lambda decay: lambda p: Lion(p, lr=0.1, weight_decay=decay), False),
}


def numbers(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("servers", [{"shards": 2}, {"shards": 2, "replicas": 1}], ids=["fixed", "elastic"])
@pytest.mark.parametrize("name", MADE)
def test_a_server_is_torchs_optimizer_on_the_sequence_of_pushes(name, servers):
    made, scaled = MADE[name]
    law = nn.Parameter(numbers(0, 10))
    slow = made(DECAY / WORKERS if scaled else DECAY)([law])
    cluster = LocalCluster()
    try:
        with rayps.ServerGroup(
            numbers(0, 10),
            staleness=None,
            workers=WORKERS,
            optimizer=made(DECAY),
            timeout=60.0,
            cluster=cluster,
            **servers,
        ) as shared:
            ranks = [shared.join(rank) for rank in range(WORKERS)]
            for push in range(12):
                law.grad = numbers(push + 1, 10) / WORKERS
                slow.step()
                one = ranks[push % WORKERS]
                one.push(numbers(push + 1, 10))
                found = one.pull(consistent=False)
            for one in ranks:
                one.close()
    finally:
        cluster.close()
    assert torch.allclose(found, law.detach(), rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", MADE)
def test_a_row_that_all_workers_touch_is_decayed_as_if_it_were_dense(name):
    made, scaled = MADE[name]
    law = nn.Parameter(numbers(0, 4, 3))
    slow = made(DECAY / WORKERS if scaled else DECAY)([law])
    cluster = LocalCluster()
    try:
        with rayps.ServerGroup(
            numbers(0, 4, 3), staleness=None, workers=WORKERS, optimizer=made(DECAY), cluster=cluster
        ) as shared:
            ranks = [shared.server(rank) for rank in range(WORKERS)]
            for push in range(8):
                law.grad = numbers(push + 1, 4, 3) / WORKERS
                slow.step()
                ranks[push % WORKERS].push_rows(torch.arange(4), numbers(push + 1, 4, 3))
                ranks[push % WORKERS].settle()
            found = ranks[0].pull(consistent=False)
            for one in ranks:
                one.close()
    finally:
        cluster.close()
    assert torch.allclose(found.view(4, 3), law.detach(), rtol=0, atol=1e-14)


ROWS = {
    "sgd": lambda p, decay: SGD(p, lr=0.1, weight_decay=decay),
    "momentum": lambda p, decay: SGD(p, lr=0.1, momentum=0.9, weight_decay=decay),
    "adagrad": lambda p, decay: Adagrad(p, lr=0.1, weight_decay=decay),
}


class Halves(ParameterServer):
    """In step, by two steps of different shares: copies of a table must decay by the same ones."""

    @property
    def topology(self):
        return replace(super().topology, update=PerRound())

    def on_round(self, shard, values, weights):
        shard.step(sum(values), 0.5)
        shard.step(values[0], 0.25)


def test_which_decay_is_left_whole():
    layout = Layout.of([("w", torch.zeros(4, 3, dtype=torch.float64))])
    assert {name: not optim.decays_alone(made(DECAY), layout) for name, (made, _) in MADE.items()} == {
        name: scaled for name, (_, scaled) in MADE.items()
    }


def test_a_step_leaves_the_groups_as_they_were():
    layout = Layout.of([("w", torch.zeros(4, 3, dtype=torch.float64))])
    one = optim.SlicedOptimizer(MADE["adam"][0](DECAY), layout, numbers(0, 12), 0, 12)
    one.step(numbers(1, 12), 0.25)
    assert one.optimizer.param_groups[0]["weight_decay"] == DECAY


@pytest.mark.parametrize(("name", "warned"), [("sgd", False), ("adamw", True)])
def test_a_group_warns_of_steps_that_ignore_the_scale(name, warned, caplog):
    cluster = LocalCluster()
    try:
        with rayps.ServerGroup(
            numbers(0, 4), staleness=None, workers=2, optimizer=MADE[name][0](DECAY), cluster=cluster
        ):
            pass
    finally:
        cluster.close()
    assert any("N workers move N times as far" in record.message for record in caplog.records) == warned

"""A loop whose workers all train on the same rows is warned of, once; one that deals them is not."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from user_code_table import wraps

import rayps
from rayps.cluster.local import LocalCluster
from rayps.runtime.records.display import Display
from rayps.strategies.catalogue import CATALOGUE

STRATEGIES = [name for name in CATALOGUE if wraps(name) and name != "statistics"]


@pytest.fixture
def warnings(monkeypatch):
    """The warnings that a run shows."""
    found, shown = [], Display.event
    monkeypatch.setattr(Display, "event", lambda self, event: found.append(event) or shown(self, event), raising=True)
    return lambda: [event["message"] for event in found if event["kind"] == "warning"]


def run(deals, strategy="all_reduce", workers=2):
    options = {"cluster": LocalCluster(), "timeout": 30.0, "progress": True}
    rayps.run(lambda: script(deals, strategy), workers=workers, **options)


def script(deals, strategy, epochs=3):
    """A ported script: `deals` says how its loader takes its rows."""
    here = rayps.world()
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(32, 3, generator=generator), torch.randn(32, 1, generator=generator))
    sampler = DistributedSampler(data, here.size, here.rank) if deals == "sampler" else None
    loader = DataLoader(data, batch_size=4, sampler=sampler, shuffle=deals == "seed", generator=torch.Generator())
    if deals == "batches":
        loader = [(b.x, b.y) for b in rayps.batches(rayps.data.tensors(*data.tensors, batch_size=4))]
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rayps.wrap(model, optimizer, strategy, steps=epochs * len(loader))
    for _ in range(epochs):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():  # all ranks validate on all rows: these are not trained
            model(data.tensors[0])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_strategy_warns_once(warnings, strategy):
    run("no", strategy)
    assert [text for text in warnings() if "same rows" in text] == [warnings()[0]]
    assert "DistributedSampler" in warnings()[0]


@pytest.mark.parametrize("deals", ["seed", "sampler", "batches"])
def test_only_equal_rows_are_warned_of(warnings, deals):
    run(deals)
    assert ["same rows" in text for text in warnings()] == ([True] if deals == "seed" else [])


class Graph(nn.Linear):
    def forward(self, x, graph):
        return torch.sparse.mm(graph, super().forward(x))


def test_sparse_inputs_are_not_compared(warnings):
    def train_fn():
        graph = torch.eye(4).to_sparse()
        model = Graph(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        rayps.wrap(model, optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 3), graph).sum().backward()
            optimizer.step()

    rayps.run(train_fn, workers=2, cluster=LocalCluster(), timeout=30.0)
    assert not warnings()


def test_one_worker_has_all_rows(warnings):
    run("no", workers=1)
    assert not warnings()

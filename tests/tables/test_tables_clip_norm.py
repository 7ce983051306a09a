"""Rows of tables are in the clipped norm, and accumulate over micro-batches."""

import pytest
import torch
from rayps_client.errors import ConfigError
from small_work import distance, train
from test_clip_norm import EXACT, MOST, SERVED, law
from test_hybrid import Films, both
from token_work import joined, steps_of
from torch import nn

import rayps
from rayps import Hybrid, ParameterServer
from rayps.ps.tables import embedding


class Net(nn.Module):
    """Looks the same table up twice, so that an id can come in both."""

    def __init__(self, rule="sgd:lr=0.1"):
        super().__init__()
        self.users = rayps.Embedding(3, "users", optimizer=rule, dtype="float64", init="normal:scale=1.0")
        self.films = rayps.Embedding(3, "films", optimizer=rule, dtype="float64", init="normal:scale=1.0", seed=4)
        self.dense = nn.Linear(3, 1).double()

    def forward(self, x):
        return self.dense(self.users(x[:, 0]) * self.films(x[:, 2]) + self.users(x[:, 1]))[:, 0]


class Twin(nn.Module):
    """The same in plain torch, with dense weights."""

    def __init__(self, net, rows):
        super().__init__()
        with torch.no_grad():
            weights = [table(torch.arange(rows)).clone() for table in (net.users, net.films)]
        self.users, self.films = (nn.Embedding.from_pretrained(weight, freeze=False) for weight in weights)
        self.dense = nn.Linear(3, 1).double()
        self.dense.load_state_dict(net.dense.state_dict())

    forward = Net.forward


class Rated(rayps.Workload):
    """Few users, so that two workers' rows meet."""

    clip_norm = MOST

    def __init__(self, told=False, rows=6):
        self.told, self.rows = told, rows

    def model(self):
        return Net()

    def data(self):
        generator = torch.Generator().manual_seed(5)
        x = torch.randint(0, self.rows, (24, 3), generator=generator)
        return rayps.data.tensors(x, torch.sin(x.sum(1).double()), batch_size=4)

    def loss(self, model, batch):
        return ((model(batch.x) - batch.y) ** 2).mean()

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.1)

    def lookups(self, batch):
        return {"users": batch.x[:, :2], "films": batch.x[:, 2]} if self.told else {}


class Dense(Rated):
    def model(self):
        return Twin(Net(), self.rows)


@pytest.mark.parametrize("told", [False, True], ids=["plain", "prefetch"])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("strategy", SERVED[1:], ids=str)
def test_rows_of_tables_are_in_the_norm_and_are_shortened(strategy, workers, told):
    result = train(Rated(told), strategy, workers=workers, epochs=2)
    twin = law(Dense(), workers, epochs=2, each=True)
    found = Twin(result.model(), 6)
    assert distance(found, twin) < EXACT
    loose = Dense()
    loose.clip_norm = 1e9
    assert distance(law(loose, workers, epochs=2, each=True), twin) > 1e-2


@pytest.mark.parametrize("staleness", [2, None])
def test_out_of_step_rows_are_clipped_too(staleness):
    result = train(Rated(), ParameterServer(shards=2, replicas=0, staleness=staleness), workers=1, epochs=2)
    assert distance(Twin(result.model(), 6), law(Dense(), epochs=2, each=True)) < EXACT


@pytest.mark.parametrize("strategy", [Hybrid(), Hybrid(staleness=0)], ids=str)
def test_hybrid_refuses_and_names_the_way_out(strategy):
    with pytest.raises(ConfigError, match=r"clip_norm.*hybrid.*parameter_server") as caught:
        train(Rated(), strategy, workers=2, epochs=1)
    assert caught.value.data["field"] == "clip_norm"


class Reels(Films):
    accumulate = 2


@pytest.mark.parametrize("told", [False, True], ids=["plain", "prefetch"])
def test_rows_of_tables_accumulate(told):
    work = Reels(told)
    result = train(work, "hybrid:servers=2,staleness=0", workers=2, timeout=60)
    torch.manual_seed(0)
    model = work.model()
    embedding.local(model)
    optimizer = work.optimizer(list(model.parameters()))
    for step in steps_of(work, 2, 0):
        optimizer.zero_grad()
        work.loss(model, joined([part for own in step for part in own])).backward()
        optimizer.step()
        embedding.step(model)
    assert distance(both(result.model()), both(model)) < 1e-9

"""What people write on the first day, and what is said where it is not right."""

import pytest
import torch
from rayps_client.errors import ConfigError, TrainingError, WorkloadError
from small_work import Small, distance, train
from test_module_modes import STRATEGIES
from torch import nn

import rayps


class Rated(Small):
    """A workload with a parameter."""

    rate: float = 0.1

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=self.rate)


def test_train_takes_the_class_with_parameters():
    work = Rated()
    work.rate = 0.03
    assert distance(train(Rated, params={"rate": 0.03}).model(), train(work).model()) == 0
    assert distance(train(Rated).model(), train(Rated()).model()) == 0
    with pytest.raises(ConfigError, match="rate"):
        train(Rated, params={"rat": 0.03})


class Unpacked(Small):
    def loss(self, model, batch):
        x, y = batch
        return ((model(x) - y) ** 2).mean()


def test_a_batch_unpacks():
    assert distance(train(Unpacked(), workers=2).model(), train(Small(), workers=2).model()) == 0


@pytest.mark.parametrize(
    ("call", "given", "meant"), [(rayps.train, "epoch", "epochs"), (rayps.run, "worker", "workers")]
)
def test_a_misspelt_argument_names_the_nearest(call, given, meant):
    with pytest.raises(ConfigError, match=f"no argument '{given}' .did you mean '{meant}'"):
        call(Small(), **{given: 3})


def test_a_relative_import_in_a_file_points_to_its_module(tmp_path, monkeypatch):
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "other.py").write_text("N = 36\n")
    (package / "work.py").write_text("from .other import N\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WorkloadError, match=r"'pkg\.work:Workload'"):
        train("pkg/work.py:W")


class Explodes(Small):
    """The loss grows until the gradient overflows."""

    def model(self):
        return nn.Linear(5, 1, dtype=torch.float64)

    def loss(self, model, batch):
        return ((model(batch.x) - batch.y) ** 4).mean()

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=20.0)


class Root(Small):
    """A gradient that is not finite, of a loss that is."""

    def loss(self, model, batch):
        return (model(batch.x) * 0).abs().sqrt().sum()


@pytest.mark.parametrize("strategy", ["all_reduce", "parameter_server"])
def test_an_exploded_loss_says_lower_the_learning_rate(strategy):
    with pytest.raises(TrainingError, match="lower the learning rate"):
        train(Explodes(), strategy, workers=2, epochs=9, max_failures=0)
    with pytest.raises(TrainingError, match="finite derivative") as raised:
        train(Root(), strategy, workers=2, max_failures=0)
    assert "learning rate" not in str(raised.value)


class Penalty(Small):
    """A gradient penalty, as of physics-informed networks; also in evaluate()."""

    def data(self):
        data = super().data()
        return rayps.data.tensors(data.x, data.y, batch_size=4, client=rayps.data.iid(8))

    def slope(self, model, batch):
        x = batch.x.clone().requires_grad_()
        [slope] = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return slope.square().mean()

    def loss(self, model, batch):
        return super().loss(model, batch) + 0.1 * self.slope(model, batch)

    def evaluate(self, model, batch):
        return {"slope": self.slope(model, batch)}


@pytest.mark.parametrize(
    "strategy", [text for text in STRATEGIES if not text.startswith(("pipeline", "tensor", "admm"))]
)
def test_a_loss_with_derivatives_is_evaluated(strategy):
    if ":private" in strategy:
        strategy = strategy.replace("private=3", "private=2")
    result = train(Penalty(n=32), strategy, workers=2)
    assert result.metrics["slope"] > 0

"""Deliberate mistakes: each ends in a short error that names what was given and the way out, and leaves nothing."""

import importlib
import re
import threading

import pytest
import torch
import torch.nn.functional as F
from rayps_client.error_hints import hint
from rayps_client.errors import DataError, TrainingError, WorkloadError
from torch import nn

import rayps
from benchmarks.runs.leftovers import Leftovers
from benchmarks.runs.mistakes import MISTAKES as NINE
from benchmarks.runs.mistakes import Mistake
from rayps.cluster.local import LocalCluster
from rayps.core.job.user_code import place_of
from rayps.core.job.user_module import pack, unpack
from rayps.core.memory import read_available_bytes, read_total_bytes
from rayps.runtime.driver.model_memory import limit_model, measure_model


class Base(rayps.Workload):
    """Three classes of rows with four features."""

    def model(self):
        return nn.Linear(4, 3)

    def data(self):
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(600, 4, generator=generator), torch.randint(0, 3, (600,), generator=generator)
        return rayps.data.tensors(x, y, batch_size=4)

    def loss(self, model, batch):
        return F.cross_entropy(model(batch.x), batch.y)


class Shapes(Base):
    def model(self):
        return nn.Linear(5, 3)


class Labels(Base):
    def model(self):
        return nn.Linear(4, 2)


class NegativeLabels(Base):
    def data(self):
        return rayps.data.tensors(torch.zeros(600, 4), torch.full((600,), -1), batch_size=4)


class Ids(Base):
    def model(self):
        return nn.Sequential(nn.Embedding(3, 4), nn.Flatten(), nn.Linear(16, 3))

    def data(self):
        return rayps.data.tensors(torch.full((600, 4), 7), torch.zeros(600, dtype=torch.long), batch_size=4)


class FloatLabels(Base):
    def loss(self, model, batch):
        return F.cross_entropy(model(batch.x), batch.y.float())


class Dtype(Base):
    def model(self):
        return nn.Linear(4, 3).double()


class NanAt50(Base):
    steps = 0

    def loss(self, model, batch):
        self.steps += 1
        return super().loss(model, batch) * (float("nan") if self.steps > 50 else 1)


class Import(Base):
    def loss(self, model, batch):
        import not_there_at_all  # noqa: F401

        return super().loss(model, batch)


class Detached(Base):
    def loss(self, model, batch):
        return super().loss(model, batch).detach()


class Unreduced(Base):
    def loss(self, model, batch):
        return F.cross_entropy(model(batch.x), batch.y, reduction="none")


class SeveralLosses(Base):
    def loss(self, model, batch):
        mean = super().loss(model, batch)
        return mean, -mean


class LiveMetric(Base):
    def loss(self, model, batch):
        scores = model(batch.x)
        return F.cross_entropy(scores, batch.y), scores.abs().mean()


class CallsBackward(Base):
    def loss(self, model, batch):
        mean = super().loss(model, batch).square()
        mean.backward()
        return mean


class HalfInLoss(Base):
    def loss(self, model, batch):
        return F.cross_entropy(model.half()(batch.x.half()).float(), batch.y)

    def evaluate(self, model, batch):
        return {"accuracy": (model(batch.x).argmax(1) == batch.y).float().mean()}


class HalfInEvaluate(Base):
    def evaluate(self, model, batch):
        return {"accuracy": (model.half()(batch.x.half()).argmax(1) == batch.y).float().mean()}


class LossesByName(Base):
    def loss(self, model, batch):
        mean = super().loss(model, batch)
        return {"generator": mean, "discriminator": -mean}


class ThreeLosses(Base):
    def loss(self, model, batch):
        return [super().loss(model, batch)] * 3


class SeveralOptimizers(Base):
    def optimizer(self, params):
        return [torch.optim.SGD([p], lr=0.1) for p in params]


class OptimizersByName(Base):
    def optimizer(self, params):
        return {"generator": torch.optim.SGD(params[:1], lr=0.1), "discriminator": torch.optim.SGD(params[1:], lr=0.1)}


class NoParameters(Base):
    def optimizer(self, params):
        return torch.optim.SGD([p for p in params if p.dim() > 7], lr=0.1)


class NothingToTrain(Base):
    def model(self):
        return nn.Flatten()


class Evaluate(Base):
    def evaluate(self, model, batch):
        return {"accuracy": batch.z}


class Empty(Base):
    def data(self):
        return rayps.data.tensors(torch.zeros(0, 4), torch.zeros(0, dtype=torch.long), batch_size=4)


class UnequalLengths(Base):
    def data(self):
        return rayps.data.tensors(torch.zeros(2, 4), torch.zeros(5, dtype=torch.long), batch_size=4)


class Short(torch.utils.data.Dataset):
    """Says 600 rows and has 100."""

    def __len__(self):
        return 600

    def __getitem__(self, i):
        if i >= 100:
            raise IndexError("list index out of range")
        return torch.randn(4), 1


class Lies(Base):
    def data(self):
        return rayps.data.dataset(Short(), batch_size=4)


class Lazy(Base):
    def model(self):
        return nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())


class Huge(Base):
    def model(self):
        return nn.Linear(100_000_000, 1000)


class HugeBatch(Base):
    def loss(self, model, batch):
        return super().loss(model, batch) + torch.randn(len(batch.x), 10_000_000_000).sum()


MISTAKES = [
    (Shapes, WorkloadError, ["loss()", "expects 5 input features and gets 4", "test_mistakes.py"]),
    (Labels, WorkloadError, ["labels of the batch are 0 to 2", "has 2 classes, 0 to 1", "last layer more outputs"]),
    (NegativeLabels, WorkloadError, ["labels of the batch are -1 to -1", "has 3 classes"]),
    (Ids, WorkloadError, ["ids of the batch are 7 to 7", "has 3 rows, 0 to 2", "nn.Embedding"]),
    (FloatLabels, WorkloadError, ["batch.y.long()"]),
    (Dtype, WorkloadError, ["different dtypes", "batch.x.float() or model.float()"]),
    (NanAt50, TrainingError, ["the loss became nan", "round 50", "lower the learning rate"]),
    (Import, WorkloadError, ["install the package not_there_at_all on every machine"]),
    (Detached, WorkloadError, ["without a gradient", "without detach()"]),
    (Unreduced, WorkloadError, ["return one number", "the mean over the batch"]),
    (SeveralLosses, WorkloadError, ["the weight of a pair", "a rayps.wrap(model, optimizer) for each pair"]),
    (LiveMetric, WorkloadError, ["the weight of a pair", '{"loss": ..., "mae": ...}']),
    (CallsBackward, WorkloadError, ["loss()", "rayps itself calls backward", "call no backward() in loss()"]),
    (HalfInLoss, WorkloadError, ["loss(model, batch) has converted the parameter 'weight' from float32 to float16"]),
    (HalfInEvaluate, WorkloadError, ["evaluate(model, batch) has converted the parameter 'weight'", "precision"]),
    (LossesByName, WorkloadError, ["'generator', 'discriminator'", "a rayps.wrap(model, optimizer) for each pair"]),
    (ThreeLosses, WorkloadError, ["returned list", "examples/gan.py"]),
    (SeveralOptimizers, WorkloadError, ["returned list", "rayps.run(train_fn)"]),
    (OptimizersByName, WorkloadError, ["returned dict", "examples/gan.py"]),
    (NoParameters, WorkloadError, ["optimizer()", "the condition that selects them from `params`"]),
    (NothingToTrain, WorkloadError, ["no parameter that requires a gradient"]),
    (Evaluate, WorkloadError, ["evaluate()", "'Batch' object has no attribute 'z'"]),
    (Empty, DataError, ["x has no rows"]),
    (UnequalLengths, DataError, ["x has 2 rows, y has 5: give the same number"]),
    (Lies, DataError, ["of 600 cannot be read", "__len__"]),
    (Lazy, WorkloadError, ["'0.weight' has no shape yet", "call the model once on an example in model()"]),
    (Huge, WorkloadError, ["ran out of memory", "divide it among several"]),
    (HugeBatch, WorkloadError, ["ran out of memory", "smaller batches"]),
]
NAMED = {work.__name__: Mistake(work, kind, tuple(words)) for work, kind, words in MISTAKES} | NINE


@pytest.mark.parametrize("name", NAMED)
def test_a_mistake_ends_in_a_short_error(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    leftovers, threads, mistake = Leftovers(), set(threading.enumerate()), NAMED[name]
    cluster = LocalCluster()
    try:
        check(mistake, mistake.commit(cluster))
    finally:
        cluster.close()
    assert list(tmp_path.iterdir()) == []
    assert leftovers.left() == []
    assert not [each for each in set(threading.enumerate()) - threads if each.name.startswith("worker-")]


def check(mistake, error):
    assert isinstance(error, mistake.error), error
    for each in mistake.words:
        assert each in str(error)
    assert len(str(error).splitlines()) <= 3, error


# ---- models larger than the memory


class Deep(Base):
    """A model of many layers, each of which fits."""

    def model(self):
        return nn.Sequential(nn.Linear(4, 100), *[nn.Linear(100, 100) for _ in range(50)], nn.Linear(100, 3))


class ReadsValues(Deep):
    def model(self):
        found = super().model()
        assert float(found[0].weight.detach().sum()) < 1e9
        return found


@pytest.mark.parametrize("work", [Deep, ReadsValues])
def test_a_model_larger_than_the_memory_is_refused_before_it_is_built(work):
    size = sum(p.nbytes for p in Deep().model().parameters())
    created = []

    class Counts(work):
        def model(self):
            created.append(1)
            return super().model()

    with limit_model(Counts(), lambda: size, large=50_000):
        Counts().model()
    with (
        pytest.raises(WorkloadError, match=r"of parameters.*memory available"),
        limit_model(Counts(), lambda: size - 50_000, large=50_000),
    ):
        Counts().model()
    with limit_model(Counts(), lambda: None, large=0):
        Counts().model()
    assert measure_model(Deep()) == size
    assert measure_model(ReadsValues()) is None


def test_memory_of_the_machine_and_of_a_cgroup(tmp_path):
    assert read_available_bytes(tmp_path) is None and read_total_bytes(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   8 kB\n")
    assert read_available_bytes(tmp_path) == 8192 and read_total_bytes(tmp_path) == 9216
    cgroup = tmp_path / "sys" / "fs" / "cgroup"
    cgroup.mkdir(parents=True)
    (cgroup / "memory.max").write_text("max\n")
    (cgroup / "memory.current").write_text("1000\n")
    assert read_available_bytes(tmp_path) == 8192
    (cgroup / "memory.max").write_text("3000\n")
    assert read_available_bytes(tmp_path) == 2000 and read_total_bytes(tmp_path) == 3000
    (cgroup / "memory.stat").write_text("anon 1\ninactive_file 500\n")  # cached files are dropped when needed
    assert read_available_bytes(tmp_path) == 2500
    assert read_available_bytes() > 0


# ---- hints


def test_an_unknown_error_has_no_hint():
    assert hint(ValueError("anything else")) == ""
    assert hint(KeyError("x")) == ""


def test_a_hint_never_raises():
    class Odd(Exception):
        def __str__(self):
            return "Target 3 is out of bounds."

    assert "a label is 3" in hint(Odd())


# ---- with Ray


@pytest.mark.ray
@pytest.mark.parametrize("name", NINE)
def test_in_worker_processes(ray_cluster, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    leftovers = Leftovers()
    check(NINE[name], NINE[name].commit(ray_cluster))
    assert list(tmp_path.iterdir()) == []
    assert leftovers.left() == []


def test_the_line_of_code_that_was_pickled_by_value_is_named():
    """Its code has no file name: an error of a worker process named `<dynamic-code>`."""
    with pytest.raises(RuntimeError) as caught:
        unpack(pack(Shapes())).loss(nn.Linear(5, 3), rayps.data.Batch(torch.zeros(2, 4), torch.zeros(2), 2))
    assert re.search(r"test_mistakes\.py:\d+\)$", place_of(caught.value))


def test_a_file_below_the_current_directory_is_named_from_there(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "own.py").write_text("def f():\n    raise ValueError\n")
    monkeypatch.syspath_prepend(tmp_path / "sub")
    with pytest.raises(ValueError) as caught:
        importlib.import_module("own").f()
    assert place_of(caught.value) == f" ({tmp_path}/sub/own.py:2)"
    monkeypatch.chdir(tmp_path)
    assert place_of(caught.value) == " (sub/own.py:2)"

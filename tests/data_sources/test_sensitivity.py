"""Sensitivity by experiment: one row that is removed moves a sum before its noise by at most the clip, and one that is
replaced by at most twice the clip, for every source of data, collate, dtype, model and loss that privacy accepts.

A row is six whole numbers. Each source in `SOURCES` gives five of them as x and the last one as y, in its own way.
"""

import csv
import inspect
import json
from collections import UserDict

import datasets
import numpy as np
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from rayps_client.errors import ConfigError, DataError, WorkloadError
from small_work import train, vector
from torch import nn
from torch.utils.data import default_collate

import rayps
from rayps.cluster.local import LocalCluster
from rayps.core.job.job_status import Status
from rayps.core.job.user_module import pack
from rayps.data.base import Batch, Data
from rayps.data.memory import TensorData
from rayps.data.single_rows import stacks_of
from rayps.federated.combine_replies import Aggregate
from rayps.runtime.checks.tried_batch import TrialRequest, try_batch
from rayps.runtime.driver.driver import Driver
from rayps.runtime.driver.workload_job import WorkloadJob
from rayps.runtime.records.journal import Journal
from rayps.strategies.catalogue import parse, wire
from rayps.strategies.job import JobSpec
from rayps.worker.noised_sums import NoisedSums
from rayps.worker.ring_worker import RingWorker
from rayps.workload.clipped_sum import ClippedSum
from rayps.workload.model_part import Whole

CLIP = 1.0
SLACK = 1e-5  # relative: norms and sums are rounded in float32
COUNT = 16
HALF = (torch.bfloat16, torch.float16)


def numbers(count=COUNT):
    """Rows of whole numbers, of which two columns are the same for all rows."""
    found = np.random.default_rng(0).integers(1, 120, (count, 6))
    found[:, 1] = 40
    found[5 % count] = 119, 40, 1, 119, 1, 119  # a large gradient
    return found


def neighbours(rows, which):
    """Pairs of (rows, bound): without one row, and with one row replaced by an extreme one."""
    for row in which:
        yield np.delete(rows, row, axis=0), CLIP
        for value in (1, 250):
            other = rows.copy()
            other[row] = value
            yield other, 2 * CLIP


class Work(rayps.Workload):
    """A linear model of data that a function makes of rows. The steps are as large as the mean gradient."""

    def __init__(self, data, dtype=torch.float64, precision=None, outputs=1):
        self.given, self.dtype, self.precision, self.outputs = data, dtype, precision, outputs

    def model(self):
        torch.manual_seed(0)
        return nn.Linear(5, self.outputs).to(self.dtype)

    def data(self):
        return self.given

    def evaluation_data(self):
        return rayps.data.tensors(torch.ones(2, 5), torch.ones(2), batch_size=2)

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=1.0)

    def rows(self, batch):
        """x [rows, 5] and y [rows], of whatever form the batch is."""
        x = batch.x["x"] if isinstance(batch.x, (dict, UserDict)) else batch.x
        if isinstance(x, list):
            x = [[int(word) for word in line.split()] for line in x]
        x = torch.as_tensor(x).to(self.dtype)
        x = x[:, :, 0].T if x.dim() == 3 and x.shape[-1] == 1 else x  # time first
        x = x.reshape(-1, 5) if x.shape[-1] == 5 else x.mean(-1, keepdim=True).expand(-1, 5)
        return (x - 64) / 4, (batch.y.reshape(len(x), -1)[:, -1].to(self.dtype) - 64) / 4

    def loss(self, model, batch):
        x, y = self.rows(batch)
        return ((model(x).mean(1) - y) ** 2).mean()


def sum_of(work, rows=None, clip=CLIP, slow=False):
    """The sum before the noise, of all rows of a workload's data."""
    data, model = work.data(), work.model()
    sums = ClippedSum(work, Whole(work, model), clip)
    sums.slow = "the test asks for it" if slow else None
    return sums.of(stacks_of(data, np.arange(data.rows()), max(7, data.rows() // 3))).double()


def check(work_of, rows=None, slow=False, which=(0, 5, -1)):
    """Check the bound for a workload that a function makes of rows. Return the largest norm of a change over it."""
    rows = numbers() if rows is None else rows
    whole, worst = sum_of(work_of(rows), slow=slow), 0.0
    assert torch.isfinite(whole).all()
    for other, bound in neighbours(rows, which):
        moved = float((whole - sum_of(work_of(other), slow=slow)).norm())
        worst = max(worst, moved / bound)
    assert 0.4 < worst <= 1 + SLACK  # the rows do move the sum
    return worst


# ---- sources


def columns(rows):
    return {**{f"c{i}": rows[:, i] for i in range(5)}, "y": rows[:, 5]}


CHOICE = {"features": [f"c{i}" for i in range(5)], "label": "y", "batch_size": 4}


def table(rows):
    return pa.table(columns(rows))


def parquet(folder, rows):
    pq.write_table(table(rows), folder / "rows.parquet")
    return rayps.data.parquet(folder / "rows.parquet", **CHOICE)


def csv_file(folder, rows):
    with (folder / "rows.csv").open("w", newline="") as out:
        csv.writer(out).writerows([[*CHOICE["features"], "y"], *rows.tolist()])
    return rayps.data.csv(folder / "rows.csv", **CHOICE)


def json_file(folder, rows):
    found = columns(rows)
    lines = [json.dumps({name: int(found[name][row]) for name in found}) for row in range(len(rows))]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    return rayps.data.json_lines(folder / "rows.jsonl", **CHOICE)


def images(folder, rows):
    for label in ("even", "odd"):  # the label of an image is the number of its class: the classes do not change
        (folder / label).mkdir()
        Image.new("L", (5, 1), 9).save(folder / label / "same.png")
    for number, row in enumerate(rows):
        made = Image.fromarray(row[None, :5].astype(np.uint8))
        made.save(folder / ("odd" if row[5] % 2 else "even") / f"{number:03d}.png")
    return rayps.data.images(folder, grayscale=True, transform=pixels, batch_size=4)


def pixels(image):
    return torch.from_numpy(np.array(image, dtype=np.float32))


def text(folder, rows):
    for number, row in enumerate(rows):
        (folder / f"{number:03d}.txt").write_bytes(row.astype(np.uint8).tobytes())
    return rayps.data.text(folder, window=5, batch_size=4)


def memmap(folder, rows):
    np.save(folder / "x.npy", rows[:, :5].astype(np.float32))
    np.save(folder / "y.npy", rows[:, 5])
    return rayps.data.memmap(folder / "x.npy", folder / "y.npy", batch_size=4)


def hugging_face(folder, rows):
    found = datasets.Dataset.from_dict({"x": rows[:, :5].tolist(), "y": rows[:, 5].tolist()})
    return rayps.data.huggingface(found, label="y", batch_size=4)


def pandas(folder, rows):
    return rayps.data.pandas(table(rows).to_pandas(), **CHOICE)


def polars_frame(folder, rows):
    return rayps.data.polars(polars.from_arrow(table(rows)), **CHOICE)


def pairs(rows):
    return [(torch.from_numpy(row[:5]), int(row[5])) for row in rows]


SOURCES = {
    "arrow": lambda folder, rows: rayps.data.arrow(table(rows), **CHOICE),
    "csv": csv_file,
    "dataset": lambda folder, rows: rayps.data.dataset(pairs(rows), batch_size=4),
    "huggingface": hugging_face,
    "images": images,
    "json_lines": json_file,
    "memmap": memmap,
    "pandas": pandas,
    "parquet": parquet,
    "polars": polars_frame,
    "tensors": lambda folder, rows: rayps.data.tensors(rows[:, :5].astype(np.float32), rows[:, 5], batch_size=4),
    "text": text,
}
REFUSED = {"iterable"}  # see `test_rows_that_cannot_be_drawn_are_refused`
ALIKE = {"ray"}  # makes the class of "arrow", and needs Ray


def test_all_sources_are_here():
    """A new source joins `SOURCES`, or the law does not hold for it."""
    made = {name for name in rayps.data.__all__ if callable(getattr(rayps.data, name))}
    sources = {
        name
        for name in made
        if "batch_size" in "".join(inspect.signature(getattr(rayps.data, name)).parameters)
        or "options" in inspect.signature(getattr(rayps.data, name)).parameters
    }
    assert sources == set(SOURCES) | REFUSED | ALIKE


@pytest.mark.parametrize("name", SOURCES)
def test_sources(name, tmp_path):
    places = (tmp_path / str(number) for number in range(100))

    def work(rows):
        folder = next(places)
        folder.mkdir()
        return Work(SOURCES[name](folder, rows))

    check(work)


# ---- collates


def apart(items):
    x, y = default_collate(items)
    return x.double(), y.double()


def mixup(items):
    x, y = apart(items)
    return 0.7 * x + 0.3 * x.flip(0), 0.7 * y + 0.3 * y.flip(0)


def padded(items):
    x, y = apart(items)
    lengths = (2 + x[:, 0] % 30).long()
    long = torch.zeros(len(x), int(lengths.max()))
    for row, length in enumerate(lengths.tolist()):
        long[row, :length] = x[row].mean()
    return long, y


def centred(items):
    x, y = apart(items)
    return x - x.mean(0) + 60, y


def ranked(items):
    x, y = apart(items)
    return x.argsort(0).argsort(0) * 9.0, y


def with_statistic(items):
    x, y = apart(items)
    return {"x": x * x.mean() / 16, "mean": x.mean()}, y


def sequence_first(items):
    x, y = apart(items)
    return x[None], y


def time_first(items):
    x, y = apart(items)
    return x.T[:, :, None], y


def lines(items):
    return [" ".join(map(str, x.tolist())) for x, _ in items], apart(items)[1]


def encoding(items):
    x, y = apart(items)
    return UserDict(x=x), y


def of_numpy(items):
    x, y = apart(items)
    return x.numpy(), y


def as_batch(items):
    return Batch(*mixup(items), len(items))


COLLATES = {
    each.__name__: each
    for each in (
        default_collate, apart, mixup, padded, centred, ranked, with_statistic, sequence_first, time_first, lines,
        encoding, of_numpy, as_batch,
    )
}  # fmt: skip


@pytest.mark.parametrize("slow", [False, True], ids=["together", "each"])
@pytest.mark.parametrize("name", COLLATES)
def test_collates(name, slow):
    check(lambda rows: Work(rayps.data.dataset(pairs(rows), batch_size=4, collate=COLLATES[name])), slow=slow)


def test_a_collate_that_makes_several_examples_of_a_row_is_refused():
    def twice(items):
        x, y = apart(items)
        return Batch(torch.cat([x, x]), torch.cat([y, y]), 2 * len(x))

    work = Work(rayps.data.dataset(pairs(numbers()), batch_size=4, collate=twice))
    with pytest.raises(DataError, match=r"take\(\[0\]\) of DatasetData returned a batch of size 2"):
        sum_of(work)


class Own(Data):
    """Rows of a user's own class."""

    batch_size = 4

    def __init__(self, rows):
        self.held = torch.from_numpy(rows.astype(np.float64))
        self.memory = torch.zeros(self.held.shape, dtype=torch.float64)

    def check(self):
        pass

    def rows(self):
        return len(self.held)

    def batches(self, *, rank, size, seed, epoch, start=0):
        for at in range(rank + start * size, self.rows(), size):
            yield self.take(np.array([at]))

    has_row_numbers = True

    def order(self, seed, epoch):
        return np.arange(self.rows())

    def take(self, rows):
        found = self.held[rows]
        return Batch(found[:, :5], found[:, 5], len(rows))


class Mixes(Own):
    def take(self, rows):
        found = self.held[rows]
        return Batch(found[:, :5] - found[:, :5].mean(0) + 50, found[:, 5], len(rows))


class UsesItsMemoryAgain(Own):
    def take(self, rows):
        found = self.memory[: len(rows)].copy_(self.held[rows])
        return Batch(found[:, :5], found[:, 5], len(rows))


class LeavesOut(Own):
    def take(self, rows):
        found = self.held[rows]
        found = found[found[:, 0] < 200]
        return Batch(found[:, :5], found[:, 5], len(found))


class Derived(TensorData):
    """A class that is derived from one of rayps, and mixes rows."""

    def __init__(self, rows):
        super().__init__(rows[:, :5].astype(np.float64), rows[:, 5], batch_size=4)

    def _take(self, rows):
        found = super()._take(rows)
        return Batch(found.x - found.x.mean(0) + 50, found.y, found.size)


@pytest.mark.parametrize("kind", [Own, Mixes, UsesItsMemoryAgain, LeavesOut, Derived])
def test_a_user_s_own_data(kind):
    check(lambda rows: Work(kind(rows)))


# ---- dtypes


def tensors(rows):
    return rayps.data.tensors(rows[:, :5].astype(np.float32), rows[:, 5], batch_size=4)


@pytest.mark.parametrize("slow", [False, True], ids=["together", "each"])
@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF])
def test_dtypes(dtype, precision, slow):
    check(lambda rows: Work(tensors(rows), dtype, precision), slow=slow)


@pytest.mark.parametrize("count", [256, 1024, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_many_rows(dtype, count):
    check(lambda rows: Work(tensors(rows), dtype, outputs=64), numbers(count), which=(5,))


def test_large_layers():
    """A norm of millions of elements is as exact as that of few."""

    class Large(Work):
        def model(self):
            return nn.Linear(5, 100_000)

        def loss(self, model, batch):
            x, y = self.rows(batch)
            return (model(x) * y[:, None]).sum()

    assert check(lambda rows: Large(tensors(rows), torch.float32), numbers(3), which=(1,)) > 1 - SLACK


# ---- losses


class ClassWeights(Work):
    def loss(self, model, batch):
        x, y = self.rows(batch)
        return nn.functional.cross_entropy(
            model(x), (4 * y + 64).long() % 3, torch.tensor([1.0, 5.0, 20.0], dtype=x.dtype)
        )


class OfItem(Work):
    def loss(self, model, batch):
        found = super().loss(model, batch)
        return found if found.item() >= 0 else -found


class InDict(Work):
    def loss(self, model, batch):
        found = super().loss(model, batch)
        return {"loss": found, "double": 2 * found}


class OfBatch(Work):
    """Each error is divided by the largest one of the batch."""

    def loss(self, model, batch):
        x, y = self.rows(batch)
        error = (model(x).mean(1) - y) ** 2
        return (error / error.detach().max()).mean() + error.sum()


class Compares(Work):
    """A row is compared with the next one of the batch."""

    def loss(self, model, batch):
        x, y = self.rows(batch)
        found = model(x).mean(1)
        return ((found - found.roll(1) - y) ** 2).mean() + (found * y).mean()


LOSSES = [Work, ClassWeights, OfItem, InDict, OfBatch, Compares]


@pytest.mark.parametrize("slow", [False, True], ids=["together", "each"])
@pytest.mark.parametrize("kind", LOSSES)
def test_losses(kind, slow):
    check(lambda rows: kind(tensors(rows), outputs=3), slow=slow)


# ---- models and their buffers


class Standardizes(nn.Module):
    """Uses the statistics of the batch, as BatchNorm does."""

    def forward(self, x):
        return x - 0.5 * x.mean(0, keepdim=True)


class WithBuffer(nn.Module):
    """Reads and, if a function is given, writes a buffer."""

    def __init__(self, write=None):
        super().__init__()
        self.write = write
        self.register_buffer("mean", torch.full((5,), 0.5))

    def forward(self, x):
        if self.write is not None:
            self.write(self, x.detach())
        return x * self.mean


def frozen():
    layer = nn.Linear(5, 5)
    layer.bias.requires_grad_(False)
    return layer


MODELS = {
    "group_norm": lambda: nn.GroupNorm(1, 5),
    "standardizes": Standardizes,
    "buffer": WithBuffer,
    "frozen": frozen,
}


def with_layer(layer):
    class Layered(Work):
        def model(self):
            torch.manual_seed(0)
            return nn.Sequential(layer(), nn.Linear(5, 1)).to(self.dtype)

    return Layered


@pytest.mark.parametrize("slow", [False, True], ids=["together", "each"])
@pytest.mark.parametrize("name", MODELS)
def test_models(name, slow):
    check(lambda rows: with_layer(MODELS[name])(tensors(rows)), slow=slow)


def added(module, x):
    module.mean.add_(x.mean(0))


def replaced(module, x):
    module.mean = 0.9 * module.mean + x.mean(0)


def through_data(module, x):
    module.mean.data.add_(x.mean(0))


def through_numpy(module, x):
    module.mean.numpy()[:] += x.mean(0).numpy()


def new(module, x):
    module.register_buffer("largest", x.max())


@pytest.mark.parametrize("slow", [False, True], ids=["together", "each"])
@pytest.mark.parametrize("write", [added, replaced, through_data, through_numpy, new])
def test_a_written_buffer_is_refused(write, slow):
    work = with_layer(lambda: WithBuffer(write))(tensors(numbers()))
    with pytest.raises(WorkloadError, match=r"changed '0\.(mean|largest)' of the model"):
        sum_of(work, slow=slow)


# ---- what leaves the workers


class EveryRow:
    """A source that draws every row, and adds no noise."""

    def uniform(self, size, *at):
        return np.zeros(size)

    def normal(self, size, std, *at):
        return np.zeros(size)


STRATEGIES = {"all_reduce": rayps.AllReduce, "parameter_server": rayps.ParameterServer}


def released(monkeypatch, name, work, workers):
    """The parts of a step's sum, as they leave the workers, and what the optimizer gets of them."""
    parts, means, part, mean = [], [], NoisedSums.part, RingWorker.mean_grad

    def recorded(self, batch):
        parts.append(part(self, batch))
        return parts[-1].clone()

    def returned(self, batch):
        means.append(mean(self, batch))
        return means[-1]

    with monkeypatch.context() as patch:
        patch.setattr("rayps.worker.rows.private_rows.source_of", lambda privacy, seed: EveryRow())
        patch.setattr(NoisedSums, "part", recorded)
        patch.setattr(RingWorker, "mean_grad", returned)
        strategy = STRATEGIES[name](privacy=rayps.dp(noise_multiplier=1.0, clip=CLIP, delta=1e-2))
        result = train(work, strategy, workers=workers, steps=1)
    assert len(parts) == workers
    return parts, means, result


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", STRATEGIES)
def test_strategies(name, workers, monkeypatch):
    """A mixing collate on workers, with the rows of a step in several micro-batches."""

    def total(rows):
        work = Work(rayps.data.dataset(pairs(rows), batch_size=3, collate=mixup))
        parts, _, result = released(monkeypatch, name, work, workers)
        whole = sum(parts).double()
        step = (vector(work.model()) - vector(result.model())) * min(len(rows), 3 * workers)
        assert torch.allclose(step, whole, atol=1e-9)
        return whole

    rows = numbers(9)
    whole = total(rows)
    for other, bound in list(neighbours(rows, (5,))):
        assert (whole - total(other)).norm() <= bound * (1 + SLACK)


@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_is_rounded_once_after_the_noise(dtype, monkeypatch):
    work = Work(tensors(numbers(40)), dtype, outputs=64)
    parts, means, _ = released(monkeypatch, "all_reduce", work, 2)
    assert {part.dtype for part in parts} == {torch.float32} and {mean.dtype for mean in means} == {dtype}
    exact = sum(part.double() for part in parts) / 8
    for mean in means:
        assert torch.equal(mean, exact.float().to(dtype))


@pytest.mark.parametrize("dtype", HALF)
def test_parts_that_servers_would_get_in_half_precision_are_refused(dtype):
    strategy = rayps.ParameterServer(privacy=rayps.dp(noise_multiplier=1.0, delta=1e-2))
    with pytest.raises(ConfigError, match=r"'weight' is .*float16, and workers push their parts.*use all_reduce"):
        train(Work(tensors(numbers()), dtype), strategy, workers=2, steps=1)
    train(Work(tensors(numbers()), dtype), strategy, workers=1, steps=1)


def test_rows_that_cannot_be_drawn_are_refused():
    work = Work(rayps.data.iterable(pairs(numbers()), batch_size=4))
    with pytest.raises(ConfigError, match="cannot be drawn by number"):
        train(work, rayps.AllReduce(privacy=rayps.dp(noise_multiplier=1.0)), steps=1)


# ---- losses that do not suit rows alone


class Contrasts(Work):
    """Each row is told from the others of its batch."""

    def loss(self, model, batch):
        found = nn.functional.normalize(model(self.rows(batch)[0]), dim=1)
        return nn.functional.cross_entropy(found @ found.T, torch.arange(len(found)))


class Pairs(Work):
    """The distances of all pairs of different rows, of which one row has none."""

    def loss(self, model, batch):
        found = model(self.rows(batch)[0])
        different = ~torch.eye(len(found), dtype=torch.bool)
        return (found[:, None] - found[None]).pow(2).sum(2)[different].mean()


class Hinge(Work):
    """No row has a gradient, and neither has the batch."""

    def loss(self, model, batch):
        return torch.relu(model(self.rows(batch)[0]) - 1e6).mean()


class Sum(Work):
    def loss(self, model, batch):
        return super().loss(model, batch) * batch.size


class Drops(Work):
    def model(self):
        return nn.Sequential(nn.Linear(5, 40), nn.Dropout(0.5), nn.Linear(40, 3)).to(self.dtype)


VERDICTS = {
    Contrasts: "no gradient",
    Pairs: "no gradient",
    ClassWeights: "the mean of the losses",
    OfBatch: "the mean of the losses",
    Compares: "the mean of the losses",
    Sum: "the mean of the losses",
    Work: None,
    InDict: None,
    OfItem: None,
    Hinge: None,
    Drops: None,
}


def verdict(work, *, private=True):
    return try_batch(TrialRequest(pack(work), 1, 0, private=private))


def test_each_loss_has_a_verdict():
    assert set(LOSSES) <= set(VERDICTS)


@pytest.mark.parametrize("kind", VERDICTS)
def test_a_loss_that_does_not_suit_single_rows_is_refused_or_warned_of(kind):
    found, words = verdict(kind(tensors(numbers(40)), outputs=3)), VERDICTS[kind]
    assert found.skipped is None
    assert (found.error is not None) == (words == "no gradient")
    said = found.warning if found.error is None else found.error.message
    assert said is None if words is None else words in said
    plain = verdict(kind(tensors(numbers(40)), outputs=3), private=False)
    assert plain.error is plain.warning is None


@pytest.mark.parametrize(
    ("dtype", "precision"), [(torch.float32, None), (torch.float32, "bf16"), (torch.bfloat16, None)]
)
def test_rounding_is_no_reason_to_warn(dtype, precision):
    found = verdict(Work(tensors(numbers(40)), dtype, precision))
    assert found.error is found.warning is None


@pytest.mark.parametrize("name", COLLATES)
def test_collates_are_no_reason_to_warn(name):
    """The batch is made of rows that were read alone."""
    found = verdict(Work(rayps.data.dataset(pairs(numbers()), batch_size=4, collate=COLLATES[name])))
    assert found.error is found.warning is found.skipped is None


@pytest.mark.parametrize("kind", [Contrasts, ClassWeights])
def test_workers_wait_for_the_verdict(kind):
    journal, cluster = Journal(), LocalCluster()
    strategy = "all_reduce:privacy=dp(noise_multiplier=1,delta=0.01)"
    spec = JobSpec("x:Work", wire(parse(strategy)), 1, steps=2)
    try:
        outcome = Driver(
            WorkloadJob(kind(tensors(numbers(40)), outputs=3), spec, journal, capture=False, tries=True)
        ).run(cluster)
    finally:
        cluster.close()
    if kind is Contrasts:
        assert outcome.status is Status.FAILED and "no gradient on a batch of one row" in outcome.message
    else:
        said = [event for event in journal.events if event["kind"] == "warning"]
        assert outcome.status is Status.SUCCEEDED
        assert sum("the mean of the losses of these rows" in event["message"] for event in said) == 1


# ---- clients


@pytest.mark.parametrize("count", [16, 256])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF])
def test_clients(dtype, count):
    """A client's update moves the sum of a private federated round by at most the clip, in any dtype."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(400, generator=generator).to(dtype)
    replies = [(w.double() + torch.randn(400, generator=generator) + 0.5).to(dtype) for _ in range(count)]

    def total(held):
        made = Aggregate("mean", CLIP, None, 400, dtype, seed=0, clients=count, divisor=1.0)
        made.begin(0, range(len(held)), w)
        for client, reply in enumerate(held):
            made.add_reply(client, reply, w, 1.0)
        return made._now.sums.main.total(torch.float64)

    whole = total(replies)
    for client in (0, 5, count - 1):
        before, after = replies[:client], replies[client + 1 :]
        assert 0.9 * CLIP < (whole - total([*before, *after])).norm() <= CLIP
        other = (w.double() - 40).to(dtype)
        assert (whole - total([*before, other, *after])).norm() <= 2 * CLIP

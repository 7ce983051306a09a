"""The light client's trainers equal rayps's own: bit for bit with torch, to rounding with numpy."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import rayps_client
import torch
from rayps_client.client_options import ClientOptions
from rayps_client.errors import ConfigError, DataError, WorkloadError
from rayps_client.exchange.raw_tensors import RawTensor
from rayps_client.load_workload import load, trainer_of
from rayps_client.statistics_workload import StatisticsWorkload
from rayps_client.trainers.local_trainer import LocalTask, RoundStart
from rayps_client.trainers.numpy_trainer import numpy_trainer
from rayps_client.trainers.torch_tensors import raw_of, raws_of, tensor_of
from rayps_client.trainers.torch_trainer import torch_trainer
from small_work import train

import rayps
from rayps.clients.workload_trainer import WorkloadTrainer, own_data
from rayps.core.job.user_module import pack
from rayps.strategies.catalogue import parse
from rayps.workload.base import as_workload

ROOT = Path(__file__).resolve().parents[2]
STRATEGIES = {
    "fedavg": "fedavg:local_epochs=2",
    "fedavg, steps": "fedavg:local_steps=7,batch_size=5",
    "fedavg, whole": "fedavg:batch_size=0,local_epochs=3",
    "fedadam": "fedadam:local_epochs=2",
    "fedprox": "fedprox:mu=0.3,local_epochs=2",
    "scaffold": "scaffold:local_steps=4",
    "ditto": "ditto:lam=0.2,local_epochs=2",
    "fedbuff": "fedbuff:local_steps=4",
    "fedper": "fedper:private=*b*,local_epochs=2",  # the biases, of numpy's workload too
    "fedrep": "fedrep:private=*b*,head_epochs=2",
}
GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(23, 5, generator=GENERATOR, dtype=torch.float64)
Y = torch.sin(X.sum(dim=1, keepdim=True))


def net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)).double()


class Plain(rayps.Workload):
    def model(self):
        return net()

    def data(self):
        return rayps.data.tensors(X, Y, batch_size=8)

    def loss(self, model, batch):
        return ((model(batch.x) - batch.y) ** 2).mean()

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.05)


class Momentum(Plain):
    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01)


class Adam(Plain):
    def optimizer(self, named_parameters):
        return torch.optim.AdamW([p for _, p in named_parameters], lr=0.02)


class Normed(Plain):
    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 1)).double()


class Dropping(Plain):
    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Dropout(0.4), torch.nn.Linear(7, 1)).double()


class Clipped(Plain):
    clip_norm = 0.1


class Accumulated(Plain):
    accumulate = 2


class Pairs(Plain):
    accumulate = 3

    def loss(self, model, batch):
        error = (model(batch.x) - batch.y) ** 2
        weights = (batch.x[:, :1] > 0).double()
        return {"loss": ((error * weights).sum(), weights.sum()), "seen": rayps.Sum(weights.sum())}


class Scheduled(Plain):
    def schedule(self, optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


class ByFunction(Plain):
    def schedule(self, optimizer):
        return lambda tick: 1 / (1 + tick)


class Unused(Plain):
    def model(self):
        model = net()
        model.unused = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
        return model

    def loss(self, model, batch):
        return ((model[:3](batch.x) - batch.y) ** 2).mean()


class Rising(Plain):
    def loss(self, model, batch):
        return -super().loss(model, batch)

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.05, maximize=True)


class Single(Plain):
    def model(self):
        return net().float()

    def data(self):
        return rayps.data.tensors(X.float(), Y.float(), batch_size=8, shuffle=False)


def task(strategy: str, work: Any, round: int, state: dict[str, RawTensor], c: float = 0.0) -> LocalTask:
    torch.manual_seed(11)
    model = work.model()
    w = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    shared = raws_of({"c": torch.full_like(w, c)}) if strategy.startswith("scaffold") and c else {}
    start = RoundStart(raw_of(w), shared, raws_of(dict(model.named_buffers())))
    wire = parse(f"{strategy},clients=remote")[0].strategy.to_wire()
    return LocalTask(wire, 9, round, 2, round, start=start, state=state)


def plain(raws: dict[str, RawTensor]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (raw.dtype, raw.shape, bytes(raw.data)) for name, raw in raws.items()}


def outcome(trainer: Any, given: LocalTask) -> dict[str, Any]:
    found = trainer.train(given)
    start = {} if found.start is None else {"start": found.start}
    vectors = {"w": found.w, **start, **found.sums, **{f"b/{k}": v for k, v in found.buffers.items()}}
    counts = (found.n, found.steps, found.samples, found.loss)
    return {"vectors": plain(vectors), "state": plain(found.state), "counts": counts}


def states_of(found: dict[str, Any]) -> dict[str, RawTensor]:
    return {name: RawTensor(*facts) for name, facts in found["state"].items()}


def assert_twins(work: Any, strategy: str) -> None:
    """Three rounds of both trainers, each with the state of the round before."""
    ours, light = WorkloadTrainer(work, work.data()), torch_trainer(work, work.data())
    assert ours.samples == light.samples and list(ours.layout()) == list(light.layout())
    ours.try_out()
    light.try_out()
    state: dict[str, RawTensor] = {}
    for round in range(3):
        given = task(strategy, work, round, state, 0.01 * round)
        one, other = outcome(ours, given), outcome(light, given)
        assert one == other
        assert math.isfinite(one["counts"][3]) and one["counts"][1] > 0
        state = states_of(one)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("work", [Plain, Single, Normed, Dropping], ids=lambda kind: kind.__name__)
def test_light_and_whole_trainers_have_the_same_bits(strategy: str, work: type) -> None:
    assert_twins(work(), STRATEGIES[strategy])


STATISTICS = """
import rayps

class Patients(rayps.StatisticsWorkload):
    queries = {"age": rayps.stats.mean(0, 110), "bmi": rayps.stats.histogram((10, 20, 60))}

    def data(self):
        return rayps.data.parquet("not/here.parquet", features=["age", "bmi"], batch_size=4)
"""


@pytest.mark.parametrize("options", ["by=clients", "by=rows", "by=rows,rows_per_client=5,local_epochs=3"])
def test_a_statistic_of_the_command_s_parquet_file_has_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str
) -> None:
    """Where rayps is installed too, `rayps-client --data` reads the file into the columns of rayps.data.parquet."""
    monkeypatch.chdir(tmp_path)
    Path("patients.py").write_text(STATISTICS)
    pq.write_table(pa.table({"age": np.linspace(1, 120, 11), "bmi": np.linspace(5, 40, 11)}), "ours.parquet")
    work = load("patients.py:Patients", {})
    light = trainer_of(ClientOptions("patients.py:Patients", data="ours.parquet"))
    ours = WorkloadTrainer(work, own_data(work, "ours.parquet"))
    light.try_out()
    given = task(f"statistics:{options}", work, 0, {})
    assert light.samples == 11 and outcome(ours, given) == outcome(light, given)


def test_a_statistic_in_numpy_names_the_columns_of_a_parquet_file(tmp_path: Path) -> None:
    columns = {"age": np.linspace(1, 120, 11), "bmi": np.linspace(5, 40, 11)}
    pq.write_table(pa.table({**columns, "both": [[1.0, 2.0]] * 11}), tmp_path / "ours.parquet")

    def light(features: list[str], **fields: Any) -> Any:
        class Patients(StatisticsWorkload):
            queries = MappingProxyType({"age": rayps.stats.mean(0, 110), "bmi": rayps.stats.mean(0, 60)})

            def data(self):
                return rayps_client.parquet(tmp_path / "ours.parquet", features=features, batch_size=4)

        work = Patients()
        for name, value in fields.items():
            setattr(work, name, value)
        return numpy_trainer(work, work.data())

    assert light(["age", "bmi"]).samples == 11
    for features, fields, why in (
        (["bmi", "age"], {}, "set `columns` to \\('bmi', 'age'\\)"),
        (["age"], {}, "needs the column 'bmi', and the rows have age"),
        (["age", "bmi"], {"queries": {}}, "give a dict from a name to a query"),
        (["age", "bmi"], {"queries": {"bmo": rayps.stats.mean(0, 1)}}, "did you mean 'bmi'"),
    ):
        with pytest.raises((ConfigError, WorkloadError), match=why):
            light(features, **fields)
    light(["both"]).try_out()  # the columns of a list have no names
    with pytest.raises(WorkloadError, match="rows of 3 values, but 2 columns"):
        light(["both", "age"]).try_out()


@pytest.mark.parametrize("strategy", ["fedavg", "fedprox", "ditto", "fedrep"])
@pytest.mark.parametrize(
    "work",
    [Momentum, Adam, Clipped, Accumulated, Pairs, Scheduled, ByFunction, Unused, Rising],
    ids=lambda kind: kind.__name__,
)
def test_every_supported_field_has_the_same_bits(strategy: str, work: type) -> None:
    assert_twins(work(), STRATEGIES[strategy])


@pytest.mark.parametrize("kind", ["fedper", "fedrep"])
def test_private_layers_stay_with_the_light_client_with_their_buffers(kind: str) -> None:
    text = f"{kind}:private=(1,2),local_epochs=1"
    assert_twins(Normed(), text)
    given = task(text, Normed(), 0, {})
    reply = torch_trainer(Normed(), Normed().data()).train(given)
    assert reply.w.shape == (5 * 7 + 7,) and reply.start is not None and reply.start.shape == reply.w.shape
    own = ["1.weight", "1.bias", "2.weight", "2.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert reply.buffers == {} and sorted(reply.state) == sorted(f"private/{name}" for name in own)


def test_private_layers_that_do_not_fit_are_refused_by_name() -> None:
    for wrong, text in (("head", "no parameter of the model has such a name: it has 0.weight"), ("*", "matches all")):
        with pytest.raises(ConfigError, match=text):
            torch_trainer(Plain(), Plain().data()).train(task(f"fedper:private={wrong}", Plain(), 0, {}))


def test_a_schedule_goes_back_with_the_job() -> None:
    work = Scheduled()
    ours, light = WorkloadTrainer(work, work.data()), torch_trainer(work, work.data())
    rates = []
    for round in (2, 0, 1):
        given = task("fedavg:local_epochs=1", work, round, {})
        assert outcome(ours, given) == outcome(light, given)
        rates.append(light.engine.lr)
    assert rates == [0.0125, 0.05, 0.025]


@pytest.mark.parametrize(
    "strategy", ["fedavg", "ditto", "fedavg:finetune=1", "fedavg:buffers=keep", "fedper:private=2"]
)
@pytest.mark.parametrize("work", [Plain, Normed, Dropping], ids=lambda kind: kind.__name__)
def test_light_and_whole_trainers_find_the_same_metrics(strategy: str, work: Any) -> None:
    class Measured(work):  # type: ignore[misc]
        def evaluate(self, model, batch):
            return {"error": (model(batch.x) - batch.y).abs().mean()}

    name, _, options = strategy.partition(":")
    text = f"{name}:local_epochs=1,{options}".removesuffix(",")
    ours, light = WorkloadTrainer(Measured(), work().data()), torch_trainer(Measured(), work().data())
    state = states_of(outcome(ours, task(text, work(), 0, {})))
    if "keep" in strategy:
        kept = outcome(ours, task(text, work(), 0, {}))["vectors"]
        state = {f"buffers/{name[2:]}": RawTensor(*facts) for name, facts in kept.items() if name.startswith("b/")}
    given = task(text, work(), 1, state)
    before = outcome(ours, given), outcome(light, given)
    one, other = ours.evaluate(given, "a"), light.evaluate(given, "a")
    assert one == other and one.shared.keys() == {"loss", "error"} and one.rows == len(X)
    assert bool(one.personal) == (strategy != "fedavg")
    assert strategy in ("fedavg", "fedavg:buffers=keep") or one.personal != one.shared
    assert (outcome(ours, given), outcome(light, given)) == before  # an evaluation leaves nothing behind


# ---- numpy


def of_numpy(lr: float = 0.05, **fields: Any) -> Any:
    class Line(rayps_client.NumpyWorkload):
        def parameters(self):
            return {"w": np.linspace(-1, 1, 15).reshape(5, 3), "b": np.zeros(3)}

        def data(self):
            return rayps_client.tensors(X.numpy(), Y.numpy(), batch_size=8)

        def loss_and_gradient(self, parameters, batch):
            error = batch.x @ parameters["w"] + parameters["b"] - batch.y
            slope = 2 * error / error.size
            return float((error**2).mean()), {"w": batch.x.T @ slope, "b": slope.sum(axis=0)}

        def evaluate(self, parameters, batch):
            return {"error": float(np.abs(batch.x @ parameters["w"] + parameters["b"] - batch.y).mean())}

    for name, value in {"lr": lr, **fields}.items():
        setattr(Line, name, value)
    return Line()


def test_numpy_and_torch_find_the_same_metrics() -> None:
    inside, text = as_workload(of_numpy()), "ditto:local_epochs=1"
    ours, light = WorkloadTrainer(inside, inside.data()), numpy_trainer(work := of_numpy(), work.data())
    state = states_of(outcome(ours, task(text, inside, 0, {})))
    one, other = (trainer.evaluate(task(text, inside, 1, state), "a") for trainer in (ours, light))
    for found, wanted in ((other.shared, one.shared), (other.personal, one.personal)):
        assert found.keys() == wanted.keys() == {"loss", "error"}
        for name, total in wanted.items():
            assert found[name].mean == pytest.approx(total.mean, rel=1e-12)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "fields", [{}, {"momentum": 0.9}, {"clip_norm": 0.2}, {"accumulate": 2}], ids=["sgd", "momentum", "clip", "two"]
)
def test_numpy_equals_torch(strategy: str, fields: dict[str, Any]) -> None:
    inside, text = as_workload(of_numpy(**fields)), STRATEGIES[strategy]
    ours, light = WorkloadTrainer(inside, inside.data()), numpy_trainer(work := of_numpy(**fields), work.data())
    assert list(ours.layout()) == list(light.layout())
    light.try_out()
    state: dict[str, RawTensor] = {}
    for round in range(3):
        given = task(text, inside, round, state, 0.01 * round)
        one, other = outcome(ours, given), outcome(light, given)
        assert one["counts"][:3] == other["counts"][:3]
        assert one["counts"][3] == pytest.approx(other["counts"][3], rel=1e-12)
        for part in ("vectors", "state"):
            assert one[part].keys() == other[part].keys()
            for name, facts in one[part].items():
                found = tensor_of(RawTensor(*other[part][name]))
                torch.testing.assert_close(found, tensor_of(RawTensor(*facts)), rtol=1e-12, atol=1e-12)
        state = states_of(one)


def test_a_numpy_workload_trains_on_a_cluster() -> None:
    """Gradient descent of the whole data on two workers is that of numpy alone."""
    work = of_numpy(lr=0.1)
    result = train(work, "all_reduce", workers=2, epochs=4)
    w = {name: np.array(value) for name, value in work.parameters().items()}
    steps = 0
    twin = rayps.data.tensors(X, Y, batch_size=8)
    for epoch in range(4):
        streams = [list(twin.batches(rank=rank, size=2, seed=0, epoch=epoch)) for rank in (0, 1)]
        for one, other in zip(*streams, strict=True):
            x = torch.cat([one.x, other.x]).numpy()
            y = torch.cat([one.y, other.y]).numpy()
            _, slope = work.loss_and_gradient(w, SimpleNamespace(x=x, y=y))
            w = {name: value - 0.1 * slope[name] for name, value in w.items()}
            steps += 1
    assert steps == 8
    trained = torch.cat([torch.from_numpy(value).reshape(-1) for value in w.values()])
    torch.testing.assert_close(result.snapshot.params, trained, rtol=1e-10, atol=1e-12)
    found = work.evaluate(w, SimpleNamespace(x=X.numpy(), y=Y.numpy()))
    assert result.metrics["error"] == pytest.approx(found["error"], rel=1e-9)


def test_what_is_wrong_with_arrays_is_said() -> None:
    work = of_numpy()
    for made, why in (
        ({}, "no dtype"),
        ({"a": np.zeros(2, dtype=np.int64)}, "int64"),
        ({"a.b": np.zeros(2)}, "without dots"),
    ):
        work.parameters = lambda made=made: made
        with pytest.raises(ConfigError, match=why):
            numpy_trainer(work, work.data())
    for gradient, why in (
        ({"w": np.zeros((5, 3))}, "lacks 'b'"),
        ({"w": np.zeros((5, 3)), "b": np.zeros(3), "c": np.zeros(1)}, "unknown 'c'"),
        ({"w": np.zeros(3), "b": np.zeros(3)}, r"'w' has the shape \(3,\)"),
    ):
        work = of_numpy()
        work.loss_and_gradient = lambda parameters, batch, gradient=gradient: (0.0, gradient)
        with pytest.raises(WorkloadError, match=why):
            numpy_trainer(work, work.data()).try_out()


# ---- what is refused


@pytest.mark.parametrize(
    ("field", "value"),
    [("compile", True), ("checkpoint_activations", True), ("precision", "fp16"), ("sync_batchnorm", True)],
)
def test_what_the_light_client_does_not_train_is_refused_with_the_way_out(field: str, value: Any) -> None:
    work = Plain()
    setattr(work, field, value)
    with pytest.raises(ConfigError, match=f"{field} of Plain is .* install rayps"):
        torch_trainer(work, work.data())


def test_an_unknown_strategy_is_refused_with_the_way_out() -> None:
    work = Plain()
    given = task("fedavg:local_epochs=1", work, 0, {})
    other = LocalTask({"name": "fedown"}, 0, 0, 0, 0, start=given.start, state={})
    with pytest.raises(ConfigError, match=r"strategy is fedown.*install rayps"):
        torch_trainer(work, work.data()).train(other)


def test_trying_out_changes_neither_model_nor_random_numbers() -> None:
    trainer = torch_trainer(Normed(), Normed().data())
    before = {name: value.clone() for name, value in trainer.engine.model.state_dict().items()}
    drawn = torch.get_rng_state()
    trainer.try_out()
    assert all(torch.equal(before[name], value) for name, value in trainer.engine.model.state_dict().items())
    assert torch.equal(drawn, torch.get_rng_state())


def test_errors_of_the_users_code_name_the_line() -> None:
    class Broken(Plain):
        def loss(self, model, batch):
            raise RuntimeError("a bad label")

    class Wide(Plain):
        def data(self):
            return rayps_client.tensors(X[:, :3], Y)

    with pytest.raises(WorkloadError, match=r"loss\(\) raised RuntimeError: a bad label \(.*test_light_trainers.py:"):
        torch_trainer(Broken(), Broken().data()).try_out()
    with pytest.raises(WorkloadError, match=r"shapes cannot be multiplied(.|\n)*expects 5 input features and gets 3"):
        torch_trainer(Wide(), Wide().data()).try_out()
    with pytest.raises(DataError, match="NaN or infinity in row 1"):
        torch_trainer(Plain(), rayps_client.tensors(np.array([[1.0], [np.nan]])))
    with pytest.raises(WorkloadError, match=r"data\(\) of Plain returned list"):
        torch_trainer(Plain(), [])


# ---- data


@pytest.mark.parametrize(
    "options",
    [{}, {"scale": 0.5}, {"dtype": "float64", "label_dtype": "float64"}, {"on_invalid": "drop"}],
    ids=["plain", "scale", "float64", "drop"],
)
def test_parquet_rows_are_those_of_rayps(tmp_path: Any, options: dict[str, Any]) -> None:
    generator = np.random.default_rng(1)
    for name, rows in (("a", 7), ("b", 5)):
        columns: dict[str, Any] = {
            "pixels": pa.FixedSizeListArray.from_arrays(generator.integers(0, 255, rows * 3).astype(np.uint8), 3),
            "y": generator.integers(0, 4, rows),
        }
        if options.get("on_invalid") == "drop":
            columns["pixels"] = pa.array([None, *columns["pixels"].to_pylist()[1:]], pa.list_(pa.uint8()))
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    given = {"features": "pixels", "label": "y", "batch_size": 4, **options}
    from rayps.clients.workload_trainer import rows_of

    ours, light = rows_of(rayps.data.parquet(tmp_path, **given)), rayps_client.parquet(tmp_path, **given)
    light.check()
    assert light.rows() == len(ours.numbers)
    order = np.random.default_rng(0).permutation(light.rows())
    one, other = ours.take(ours.numbers[order]), light.take(order)
    assert (one.x.numpy().dtype, one.y.numpy().dtype) == (other.x.dtype, other.y.dtype)
    assert np.array_equal(one.x.numpy(), other.x) and np.array_equal(one.y.numpy(), other.y)


def test_errors_of_parquet_name_file_column_and_row(tmp_path: Any) -> None:
    pq.write_table(pa.table({"x": [1.0, None], "t": ["a", "b"]}), tmp_path / "a.parquet")
    (tmp_path / "c.parquet").write_bytes(b"no parquet")
    for options, why in (
        ({"features": "z"}, "there is no column 'z'"),
        ({"features": "x"}, "column 'x' is null in row 1"),
        ({"features": "t"}, "text needs a number"),
    ):
        with pytest.raises(DataError, match=why):
            rayps_client.parquet(tmp_path / "a.parquet", **options).check()
    with pytest.raises(DataError, match=r"c.parquet cannot be read as Parquet"):
        rayps_client.parquet(tmp_path / "c.parquet", features="x").check()
    with pytest.raises(ConfigError, match="no option 'windows'"):
        rayps_client.parquet(tmp_path, features="x", windows=3)


# ---- by name


FILE = """
import {package}
import torch
from {package} import Workload

class Small(Workload):
    width: int = 5

    def model(self):
        return torch.nn.Linear(self.width, 1)

    def data(self):
        return {data}.tensors(torch.ones(6, self.width), torch.ones(6, 1), batch_size=2)

    def loss(self, model, batch):
        return ((model(batch.x) - batch.y) ** 2).mean()
"""


@pytest.mark.parametrize(("package", "data"), [("rayps", "rayps.data"), ("rayps_client", "rayps_client")])
def test_a_file_is_a_workload_of_both_packages(
    tmp_path: Any, package: str, data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.py").write_text(FILE.format(package=package, data=data))
    light = trainer_of(ClientOptions("small.py:Small", params={"width": 4}))
    light.try_out()
    assert light.layout()[0] == ("weight", [1, 4], "float32")
    whole = train("small.py:Small", "all_reduce", params={"width": 4}, epochs=2)
    assert whole.snapshot.params.numel() == 5 and whole.params["width"] == 4
    with pytest.raises(ConfigError, match="no parameter 'depth'"):
        load("small.py:Small", {"depth": 3})


def test_an_object_of_the_light_class_can_be_trained() -> None:
    class Light(rayps_client.Workload):
        model, data, loss, optimizer = Plain.model, lambda self: rayps_client.tensors(X, Y), Plain.loss, Plain.optimizer

    one, other = train(Light(), "all_reduce", epochs=2), train(as_workload(Light()), "all_reduce", epochs=2)
    assert torch.equal(one.snapshot.params, other.snapshot.params)


def test_a_light_workload_is_sent_to_workers_by_value(tmp_path: Path) -> None:
    """A process that has neither this file nor its classes trains what it gets."""
    work = as_workload(of_numpy(lr=0.2))
    (tmp_path / "packed").write_bytes(pack(work))
    code = """
from pathlib import Path
import rayps
from rayps.core.job.user_module import unpack
from rayps.clients.workload_trainer import WorkloadTrainer

work = unpack(Path("packed").read_bytes())
assert isinstance(work, rayps.Workload)
trainer = WorkloadTrainer(work, work.data())
trainer.try_out()
print(trainer.samples, trainer.layout()[0][0], work.optimizer(list(work.model().parameters())).param_groups[0]["lr"])
"""
    paths = os.pathsep.join(str(ROOT / name) for name in ("", "api", "client"))
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "23 w 0.2\n", "")


class Whole(Plain):
    """Rows of which each epoch leaves out a smaller last batch."""

    def data(self):
        return rayps.data.tensors(X, Y, batch_size=8, drop_last=True)


class Last(Normed):
    """Rows of which the last batch has one row."""

    options: Mapping[str, Any] = MappingProxyType({})

    def data(self):
        return rayps.data.tensors(X[:17], Y[:17], **{"batch_size": 8} | self.options)


@pytest.mark.parametrize("strategy", ["fedavg:local_epochs=2", "fedavg:local_steps=5", "fedavg:batch_size=7"])
def test_a_smaller_last_batch_is_left_out_by_light_and_whole_trainers(strategy: str) -> None:
    assert_twins(Whole(), strategy)
    trainer = WorkloadTrainer(Whole(), Whole().data())
    expected = {"fedavg:local_epochs=2": 32, "fedavg:local_steps=5": 40, "fedavg:batch_size=7": 21}[strategy]
    assert trainer.train(task(strategy, Whole(), 0, {})).samples == expected


@pytest.mark.parametrize("make", [WorkloadTrainer, torch_trainer], ids=["whole", "light"])
def test_a_client_whose_last_batch_has_one_row_says_so_before_it_joins(make: Any) -> None:
    words = r"the client has 17 rows, of which the last batch of 8 has one row, and a BatchNorm layer(.|\n)*drop_last"
    trainer = make(Last(), Last().data())
    assert re.match(words, trainer.try_out())
    trainer.train(task("fedavg:batch_size=0", Last(), 0, {}))  # a job may have another batch size
    with pytest.raises(WorkloadError, match=r"the batch has one row(.|\n)*drop_last"):
        trainer.train(task("fedavg:local_epochs=1", Last(), 0, {}))
    for options in ({"drop_last": True}, {"batch_size": 9}):
        other = Last()
        other.options = options
        assert make(other, other.data()).try_out() is None
    few = rayps.data.tensors(X[:7], Y[:7], batch_size=8, drop_last=True)
    with pytest.raises(DataError, match="the client has 7 rows, fewer than batch_size=8, and drop_last is True"):
        make(Plain(), few).try_out()

"""Examples: they import, their data is there and small, and they learn what they say, in one process."""

import ast
import copy
import difflib
import importlib.util
import math
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml
from conftest import missing
from folders import lacks

import rayps
from rayps.cluster.local import LocalCluster
from rayps.core.job.user_module import pack
from rayps.strategies.catalogue import parse
from rayps.strategies.job import JobSpec
from rayps.workload.base import Workload, load

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
WORKLOADS = {
    "digits.py:Digits": (10_000, 2_000),
    "flights.py:LateFlight": (60_000, 12_000),
    "recommender.py:LateDeparture": (100_000, 20_000),
}


WORKLOADS = {target: sizes for target, sizes in WORKLOADS.items() if not lacks(f"examples/{target.partition(':')[0]}")}


def module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    spec = importlib.util.spec_from_file_location(f"example_{Path(name).name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


NAMES = [
    "admm",
    "characters",
    "convnet",
    "digits",
    "downpour",
    "fedavg",
    "flights",
    "gan",
    "handwriting",
    "hogwild",
    "language_model",
    "local_sgd",
    "lora",
    "own_loop",
    "recommender",
    "own_actors",
]
NAMES = [name for name in NAMES if not lacks(f"examples/{name}.py")]


@pytest.mark.parametrize("name", NAMES)
def test_it_imports_and_says_what_it_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = module(name, monkeypatch)
    assert callable(made.main) and "expect" in f"{made.__doc__} {Path(str(made.__file__)).read_text()}"
    assert f"`{name}.py`" in (EXAMPLES / "README.md").read_text()


@pytest.mark.parametrize("target", WORKLOADS)
def test_the_data_is_whole(target: str) -> None:
    found = load(target, str(EXAMPLES))
    for source, rows in zip((found.data(), found.evaluation_data()), WORKLOADS[target], strict=True):
        source.check()
        assert source.rows() == rows
    assert len(pack(found)) < 20_000


def test_data_and_workloads_are_small() -> None:
    assert sum(path.stat().st_size for path in EXAMPLES.glob("data/*.parquet")) < 4e6
    for name, _, first in (target.partition(".py:") for target in WORKLOADS):
        tree = ast.parse((EXAMPLES / f"{name}.py").read_text())
        kind = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == first)
        code = sum(1 for line in ast.unparse(kind).splitlines() if line.strip() and '"""' not in line)
        assert code <= 40


def test_the_job_file_is_a_job() -> None:
    spec = JobSpec.from_dict(yaml.safe_load((EXAMPLES / "digits.yaml").read_text()))
    assert parse(spec.strategy) and isinstance(load(spec.workload, str(EXAMPLES)), Workload)


def learned(target: str, epochs: int, workers: int = 4) -> dict[str, float]:
    """What one process learns from the union of the workers' batches, as under all_reduce."""
    torch.manual_seed(0)
    work = load(target, str(EXAMPLES))
    model, source = work.model(), work.data()
    optimizer = work.optimizer(list(model.parameters()))
    for epoch in range(epochs):
        ranks = [source.batches(rank=rank, size=workers, seed=0, epoch=epoch) for rank in range(workers)]
        for batches in zip(*ranks, strict=True):
            optimizer.zero_grad()
            total = sum(batch.size for batch in batches)
            for batch in batches:
                if batch.size:
                    (work.loss(model, batch) * batch.size / total).backward()
            optimizer.step()
    return measured(work, model)


@torch.no_grad()
def measured(work: Workload, model: torch.nn.Module) -> dict[str, float]:
    totals = {"loss": 0.0, "accuracy": 0.0}
    rows = 0
    for batch in work.evaluation_data().batches(rank=0, size=1, seed=0, epoch=0):
        totals["loss"] += float(work.loss(model, batch)) * batch.size
        totals["accuracy"] += float(work.evaluate(model, batch)["accuracy"]) * batch.size
        rows += batch.size
    return {name: value / rows for name, value in totals.items()}


def test_digits_are_learned() -> None:
    assert learned("digits.py:Digits", epochs=2)["accuracy"] >= 0.95


def test_late_flights_are_foretold() -> None:
    found = learned("flights.py:LateFlight", epochs=1)
    assert found["accuracy"] >= 0.895 and found["loss"] < 0.28
    rate = 0.2377  # of late flights in the test set: what one knows without features
    assert found["loss"] < -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate)) / 1.8


@pytest.mark.parametrize("strategy", ["pipeline:stages=2,micro_batches=4", "tensor_parallel:size=2"])
def test_characters_are_learned_alike_in_every_layout(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = module("characters", monkeypatch)
    losses = {}
    for way, workers in (("all_reduce", 1), (strategy, 2)):
        cluster = LocalCluster()
        try:
            result = rayps.train(
                made.Characters(blocks=2), strategy=way, workers=workers, steps=20, cluster=cluster, progress=False
            )
        finally:
            cluster.close()
        losses[way] = [loss for loss in result.history["loss"].to_pylist() if loss is not None]
    assert losses[strategy] == pytest.approx(losses["all_reduce"], rel=1e-4)
    assert losses[strategy][-1] < losses[strategy][0] - 0.5


@pytest.mark.parametrize("strategy", ["downpour:n_push=4,n_fetch=4,shards=2,adagrad=0.01", "hogwild"])
def test_digits_are_learned_out_of_step(strategy: str) -> None:
    cluster = LocalCluster()
    try:
        result = rayps.train(
            load("digits.py:Digits", str(EXAMPLES)),
            strategy=strategy,
            workers=4,
            epochs=1,
            cluster=cluster,
            progress=False,
        )
    finally:
        cluster.close()
    assert result.metrics["accuracy"] > 0.85


def test_clients_that_know_two_digits_learn_more_together(monkeypatch: pytest.MonkeyPatch) -> None:
    made, cluster = module("fedavg", monkeypatch), LocalCluster()
    work = made.Shards()
    assert work.data().clients.sizes.tolist() == [500] * 20
    try:
        result = rayps.train(
            work,
            strategy="fedavg:fraction=0.5,local_epochs=1,batch_size=20",
            workers=2,
            epochs=4,
            cluster=cluster,
            progress=False,
        )
    finally:
        cluster.close()
    best = max(result.history["evaluation_accuracy"].to_pylist())
    assert best > made.accuracy(work, made.alone(work, 0, epochs=1)) + 0.05
    assert made.accuracy(work, result.model()) == pytest.approx(result.metrics["accuracy"], abs=1e-6)


@pytest.mark.parametrize(
    "strategy", ["local_sgd:period=8,warmup=10", "diloco:period=8,outer_momentum=0.5", "parallel_sgd:rounds=2"]
)
def test_digits_are_learned_apart(strategy: str) -> None:
    cluster = LocalCluster()
    try:
        result = rayps.train(
            load("digits.py:Digits", str(EXAMPLES)),
            strategy=strategy,
            workers=2,
            steps=60,
            cluster=cluster,
            progress=False,
        )
    finally:
        cluster.close()
    assert result.metrics["accuracy"] > 0.7
    assert 1 <= sum(met or 0 for met in result.history["met"].to_pylist()) <= 8


def test_help_needs_no_cluster() -> None:
    done = subprocess.run([sys.executable, str(EXAMPLES / "digits.py"), "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--strategy" in done.stdout


def test_ridge_and_lasso_are_solved_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    made, found = module("admm", monkeypatch), {}
    for regularizer in (f"l2({made.RIDGE})", f"l1({made.LASSO})"):
        cluster = LocalCluster()
        try:
            found[regularizer[:2]], meetings = made.solve(regularizer, cluster, relaxation=1.6)
        finally:
            cluster.close()
        assert meetings < 60
    x, y = made.Line().rows()
    ridge = torch.linalg.solve(x.T @ x / 400 + made.RIDGE * torch.eye(30, dtype=x.dtype), x.T @ y / 400)
    assert (found["l2"] - ridge).abs().max() < 1e-8
    slope, on = x.T @ (x @ found["l1"] - y) / 400, found["l1"] != 0
    assert on.sum() == 6 and (slope[on] + made.LASSO * found["l1"][on].sign()).abs().max() < 1e-8
    assert slope.abs().max() <= made.LASSO + 1e-8


def test_porting_a_plain_script_takes_as_many_lines_as_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def lines(name: str) -> list[str]:
        text = (EXAMPLES / name).read_text(encoding="utf-8").partition('"""\n')[2]  # without the docstring
        return [line for line in text.splitlines() if line.strip()]

    compared = list(difflib.ndiff(lines("plain.py"), lines("port_plain.py")))
    page = (EXAMPLES.parent / "docs" / "porting.md").read_text(encoding="utf-8")
    said = {name: int(count) for name, count in re.findall(r"^\| ([\w ]+) \| (\d+) \| `", page, re.MULTILINE)}
    assert "Five lines are new or changed" in page
    assert sum(line.startswith("+ ") for line in compared) == said.pop("rayps") == 5
    assert sum(line.startswith("- ") for line in compared) == 2  # two of the five are changed
    blocks = dict(re.findall(r"^([\w ]+):\n\n```text\n(.*?)```", page, re.MULTILINE | re.DOTALL))
    assert said == {name: len(block.splitlines()) for name, block in blocks.items() if name in said} and len(said) == 3
    alone = module("plain", monkeypatch).train_fn(epochs=8)
    ported = module("port_plain", monkeypatch).train_fn
    losses = rayps.run(ported, workers=2, params={"epochs": 8}, cluster=LocalCluster(), progress=False)
    assert alone < 0.3
    assert max(losses) < 0.6


def trained(work: Workload, **options: object) -> rayps.Result:
    cluster = LocalCluster()
    try:
        return rayps.train(work, cluster=cluster, progress=False, **options)
    finally:
        cluster.close()


def needs(*packages: str) -> None:
    for name in packages:
        if importlib.util.find_spec(name) is None:
            missing(name)


def short(work: Workload, precision: str | None = None) -> Workload:
    """A language model's workload with four steps of two workers in an epoch."""
    work.precision = precision
    work.text = work.text[:9000]
    return work


@pytest.mark.parametrize("strategy", ["all_reduce", "parameter_server:shards=2"])
def test_a_language_model_equals_its_plain_loop(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("transformers")
    made = module("language_model", monkeypatch)
    alone = made.plain(short(made.LanguageModel()), epochs=1, workers=2)
    found = trained(short(made.LanguageModel()), strategy=strategy, workers=2, epochs=1)
    assert found.metrics["loss"] == pytest.approx(alone, rel=1e-5)
    assert alone < 4.0  # the untrained model has 4.2


@pytest.mark.parametrize("strategy", ["all_reduce", "parameter_server:shards=2"])
def test_a_language_model_in_bf16_equals_its_plain_loop(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("transformers")
    made = module("language_model", monkeypatch)
    alone = made.plain(short(made.LanguageModel(), "bf16"), epochs=1, workers=2)
    found = trained(short(made.LanguageModel(), "bf16"), strategy=strategy, workers=2, epochs=1)
    assert found.metrics["loss"] == pytest.approx(alone, rel=2e-3)
    whole = made.plain(short(made.LanguageModel()), epochs=1, workers=2)
    assert alone != whole  # autocast changes something
    assert alone < 4.0


def test_a_language_model_in_a_pipeline_equals_its_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    needs("transformers")
    made = module("language_model", monkeypatch)

    alone = made.plain(short(made.InPipeline()), epochs=1, workers=1)
    way = "pipeline:stages=2,micro_batches=4"
    found = trained(short(made.InPipeline()), strategy=way, workers=2, epochs=1)
    assert found.metrics["loss"] == pytest.approx(alone, rel=1e-5)


def test_lora_learns_the_same_under_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("transformers", "peft")
    made, base = module("lora", monkeypatch), str(tmp_path / "base")
    torch.manual_seed(0)
    made.LanguageModel().model().save_pretrained(base)
    model = made.Capitals(base).model()
    share = sum(p.numel() for p in model.parameters() if p.requires_grad) / sum(p.numel() for p in model.parameters())
    assert share < 1 / 12
    losses = [
        trained(short(made.Capitals(base)), strategy=strategy, workers=2, epochs=1).metrics["loss"]
        for strategy in ("all_reduce", "parameter_server:shards=2")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0] < 4.15


def test_a_convnet_learns_with_statistics_of_all_workers_and_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    made = module("convnet", monkeypatch)
    for synchronized in (True, False):
        work = made.NormedDigits()
        work.sync_batchnorm = synchronized
        assert trained(work, workers=2, steps=40).metrics["accuracy"] > 0.8


def looped(made: ModuleType, strategy: str, steps: int) -> list[object]:
    cluster = LocalCluster()
    try:
        return rayps.run(
            made.train_fn, workers=2, strategy=strategy, params={"steps": steps}, cluster=cluster, progress=False
        )
    finally:
        cluster.close()


def test_a_gan_finds_all_centres(monkeypatch: pytest.MonkeyPatch) -> None:
    made = module("gan", monkeypatch)
    assert made.quality(made.net(made.NOISE, 2)) == (0.0, 0)
    first, second = looped(made, "all_reduce", 400)
    assert first == second
    good, centres = first
    assert good > 0.1 and centres >= 6


def test_a_gan_learns_the_same_from_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    made = module("gan", monkeypatch)
    monkeypatch.setattr(made, "quality", lambda model: [p.detach().clone() for p in model.parameters()])
    # drawn once, because workers that are threads share torch's generator
    nets = {inputs: made.net(inputs, outputs) for inputs, outputs in ((made.NOISE, 2), (2, 1))}
    monkeypatch.setattr(made, "net", lambda inputs, outputs: copy.deepcopy(nets[inputs]))
    rings, servers = (looped(made, way, 20)[0] for way in ("all_reduce", "parameter_server:shards=2"))
    for one, other, first in zip(rings, servers, nets[made.NOISE].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
        assert (one - first).abs().max() > 1e-3

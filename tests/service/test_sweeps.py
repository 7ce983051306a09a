"""Sweeps and comparisons: the cross product, all jobs or none, one table; by REST, the client and the command line."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rayps_client.errors import ConfigError, Conflict, NotFound
from service_site import Site

from rayps.cli import main as cli
from rayps.cli.sparkline import draw_sparkline
from rayps.cli.sweeps import values_of
from rayps.core.job.job_status import Status
from rayps.service import strategy_check
from rayps.service.client import Client
from rayps.service.store import Store
from rayps.service.strategy_check import refuse_params
from rayps.service.sweeps.comparison import BATCH_LOSS, compare_jobs, find_best_row, with_direction
from rayps.service.sweeps.sweep import MOST_JOBS, check_name, make_sweep_jobs, name_job
from rayps.service.sweeps.sweep_client import table_of
from rayps.strategies.job import JobSpec

FILE = """
import rayps

class W(rayps.Workload):
    lr: float = 0.1
    width: int = 4
    def model(self): ...
    def data(self): ...
    def loss(self, model, batch): ...

class Seeded(W):
    seed: int = 0
"""
OWN = """
import rayps

class Own(rayps.AllReduce):
    pass
"""
LOOP = """
def train_fn(rate, lr: float = 0.1, seed: int = 0):
    ...

def anything(**values):
    ...
"""
JOB = {"workload": "digits:Digits", "params": {"width": 8}}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("state"))
    yield site
    site.close()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child process that imports torch on a loaded machine is awaited, and not regarded as one that hangs."""
    monkeypatch.setattr(strategy_check, "PARAMS_SECONDS", 120.0)


@pytest.fixture
def client(site: Site) -> Iterator[Client]:
    with Client(site.url, site.token, timeout=150) as client:
        yield client


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "w.py").write_text(FILE)
    (tmp_path / "loop.py").write_text(LOOP)
    return tmp_path


# ---------------------------------------------------------------------------------------------- decisions


def test_the_cross_product_sets_fields_and_parameters() -> None:
    found = make_sweep_jobs(JOB, {"lr": [0.1, 0.3], "seed": [0, 1, 2]})
    assert [(job.fields["params"], job.fields["seed"]) for job in found] == [
        ({"width": 8, "lr": lr}, seed) for lr in (0.1, 0.3) for seed in (0, 1, 2)
    ]
    assert found[4].label == "lr=0.3 seed=1" and JOB["params"] == {"width": 8}


@pytest.mark.parametrize(
    ("name", "value", "label"),
    [
        ("lr", [[None]], "lr=[[null]]"),
        ("lr", {"name": 3}, 'lr={"name": 3}'),
        ("strategy", [None], "strategy=[null]"),
        ("strategy", [{"strategy": "admm"}, {"epochs": 2}], 'strategy=[{"strategy": "admm"}, {"epochs": 2}]'),
        ("strategy", [{"strategy": "admm", "epochs": 2}, {"strategy": {"name": "s"}}], "strategy=2*admm > s"),
        ("resources", {"gpu": 1}, 'resources={"gpu": 1}'),
    ],
)
def test_each_value_has_a_label(name: str, value: Any, label: str) -> None:
    (one,) = make_sweep_jobs(JOB, {name: [value]})
    assert one.label == label


def test_a_prefix_says_which_of_two_is_meant() -> None:
    one, two = make_sweep_jobs(JOB, {"params.seed": [1, 2], "job.seed": [7]})
    assert one.fields["params"] == {"width": 8, "seed": 1} and two.fields["params"]["seed"] == 2  # type: ignore[index]
    assert one.fields["seed"] == 7
    (one,) = make_sweep_jobs(JOB, {"strategy": [{"name": "parameter_server", "staleness": 3}]})
    assert one.label == "strategy=parameter_server:staleness=3"


@pytest.mark.parametrize(
    ("over", "text"),
    [
        ({}, "at least one name"),
        ({"lr": []}, "lr=\\[\\]: give a list"),
        ({"lr": "0.1"}, "give a list"),
        ({"lr": [0.1, 0.1]}, "lr=0.1 twice"),
        ({"params": [{}]}, "cannot vary 'params'"),
        ({"job.params": [{}]}, "cannot vary 'params'"),
        ({"name": ["a"]}, "cannot vary 'name'"),
        ({"workload": ["a:B"]}, "cannot vary 'workload'"),
        ({"run": ["a:b"]}, "cannot vary 'run': a sweep has one workload or function"),
        ({"code": ["0" * 64]}, "cannot vary 'code'"),
        ({"job.sede": [1]}, "did you mean 'seed'"),
        ({"jobs.seed": [1]}, "params.NAME, job.NAME"),
        ({"lr": [1], "params.lr": [2]}, "one name twice"),
        ({"lr": list(range(MOST_JOBS + 1))}, f"at most {MOST_JOBS}"),
    ],
)
def test_what_is_no_sweep_is_refused(over: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make_sweep_jobs(JOB, over)


@pytest.mark.parametrize("name", ["steps", "epochs"])
def test_a_field_that_a_loop_of_its_own_lacks_is_refused_with_the_name_of_its_argument(name: str) -> None:
    loop = {"run": "loop.py:train_fn"}
    with pytest.raises(ConfigError, match=rf"write params\.{name} for the function's argument"):
        make_sweep_jobs(loop, {"lr": [0.1], name: [5, 10]})
    assert [each.label for each in make_sweep_jobs(loop, {f"params.{name}": [5, 10]})] == [f"{name}=5", f"{name}=10"]


def test_one_and_true_are_two_values() -> None:
    assert len(make_sweep_jobs(JOB, {"flag": [1, True, 1.0]})) == 3


def test_names() -> None:
    assert name_job("Digits", "lr=0.1") == "Digits lr=0.1"
    assert len(name_job("Digits", "x" * 100)) == 64
    assert check_name("a-1.b_c") == "a-1.b_c"
    for bad in ("", "a b", "a/b", "-a", "a" * 65):
        with pytest.raises(ConfigError, match="the sweep's name is"):
            check_name(bad)


def job(job_id: str, params: dict[str, Any], **facts: Any) -> Any:
    return {
        "id": job_id,
        "name": job_id,
        "status": "SUCCEEDED",
        "reason": None,
        "spec": {"workload": "a:B", "seed": 0, "params": params, "name": job_id},
        "params": params,
        "progress": {"round": 4, "rounds": 4, "epochs": 2},
        "metrics": None,
        "started_at": "2026-01-01T00:00:00Z",
        "finished_at": "2026-01-01T00:00:10Z",
        **facts,
    }


def series(losses: list[float | None], evaluations: dict[int, dict[str, float | None]]) -> Any:
    buckets = [
        {"round": i, "round_end": i, "seconds": 0.5, "loss": None if loss is None else {"mean": loss}}
        for i, loss in enumerate(losses)
    ]
    found = [{"round": at, "metrics": found} for at, found in evaluations.items()]
    return {"series": buckets, "evaluations": found, "summaries": {}}


def ends(row: Any, *names: str) -> Any:
    """The last and best value of metrics of a row."""
    return {name: (row["metrics"][name]["last"], row["metrics"][name]["best"]) for name in names or row["metrics"]}


def test_the_table_has_what_differs_and_last_and_best_of_each_metric() -> None:
    jobs = [job("a", {"lr": 0.1, "width": 4}), job("b", {"lr": 0.3, "width": 4})]
    found = compare_jobs(
        jobs,
        {
            "a": series([4.0, 3.0, None, 2.0], {2: {"loss": 1.0, "accuracy": 0.9}, 4: {"loss": 2.0, "accuracy": 0.8}}),
            "b": series([4.0, 1.0], {4: {"loss": 0.5, "accuracy": None}}),
        },
        now=0.0,
    )
    assert found["differing"] == ["lr"] and found["metrics"] == ["loss", "accuracy", BATCH_LOSS]
    assert found["lowest"] == {"loss": True, "accuracy": False, BATCH_LOSS: True}
    one, two = found["rows"]
    assert one["values"] == {"lr": 0.1} and one["rounds"] == 4 and one["seconds"] == 10.0
    assert ends(one) == {"loss": (2.0, 1.0), "accuracy": (0.8, 0.9), BATCH_LOSS: (2.0, 2.0)}
    assert ends(two, "accuracy") == {"accuracy": (None, None)}
    curve = found["curves"]["a"]
    assert curve["loss"] == {"value": [1.0, 2.0], "round": [2, 4], "epoch": [1.0, 2.0], "seconds": [1.0, 2.0]}
    assert curve[BATCH_LOSS]["value"] == [4.0, 3.0, None, 2.0] and curve[BATCH_LOSS]["round"] == [1, 2, 3, 4]
    best = find_best_row(found, "loss")
    assert best is not None and best["id"] == "b"
    best = find_best_row(found, "accuracy")
    assert best is not None and best["id"] == "a"
    assert find_best_row(found, "nothing") is None


def test_a_default_that_is_not_known_yet_differs_only_from_a_given_value() -> None:
    waits = job("a", {}, progress=None, started_at=None, finished_at=None, status="QUEUED")
    runs = job("b", {})
    runs["params"] = {"lr": 0.1, "width": 4}
    empty = {"a": series([], {}), "b": series([], {})}
    assert compare_jobs([waits, runs], empty, 0.0)["differing"] == []
    runs["spec"]["params"] = {"lr": 0.1}
    found = compare_jobs([waits, runs], empty, 0.0)
    assert found["differing"] == ["lr"]
    assert found["rows"][0]["values"] == {} and found["rows"][0]["seconds"] is None and found["metrics"] == []


def test_a_parameter_with_the_name_of_a_field_keeps_its_own_column() -> None:
    jobs = [job("a", {"seed": 1}), job("b", {"seed": 2})]
    found = compare_jobs(jobs, {"a": series([], {}), "b": series([], {})}, 0.0)
    assert found["differing"] == ["params.seed"]


OWN_NAMES = ["id", "name", "status", "rounds", "seconds", "seed", "workload", "lr", "loss", "best loss", "new"]


@pytest.mark.parametrize("metric", OWN_NAMES)
@pytest.mark.parametrize("param", [name for name in OWN_NAMES if name.isidentifier()])
def test_parameters_metrics_and_facts_of_one_name_have_columns_of_their_own(param: str, metric: str) -> None:
    """Whatever a parameter and a metric are named, no column of a table takes the place of another."""
    jobs = [job("a", {param: 1.5}), job("b", {param: 2.5})]
    both = {each["id"]: series([1.0, 2.0], {2: {metric: 7.5, "loss": 7.0}}) for each in jobs}
    found = compare_jobs(jobs, both, 0.0)
    names = [column["name"] for column in found["columns"]]
    assert len(set(names)) == len(names)
    first, second = table_of(found)
    assert list(first) == names
    assert (first["id"], first["name"], first["status"], first["rounds"], first["seconds"]) == (
        "a", "a", "SUCCEEDED", 4, 10.0,
    )  # fmt: skip
    of_job = {"id", "name", "status", "rounds", "seconds", "seed", "workload", "params"}
    as_param = f"params.{param}" if param in of_job else param

    def column(name: str) -> str:
        return f"metrics.{name}" if name in of_job | {as_param, "best loss"} else name

    assert (first[as_param], second[as_param]) == (1.5, 2.5)
    assert first[column(metric)] == (7.0 if metric == "loss" else 7.5)
    assert first[column("loss")] == 7.0 == first["best loss"]


def test_steps_have_no_epochs_and_a_final_metric_is_a_point() -> None:
    one = job("a", {}, progress={"round": 4, "rounds": 4}, metrics={"loss": 0.5})
    found = compare_jobs([one], {"a": series([1.0, 1.0, 1.0, 1.0], {})}, 0.0)
    assert found["curves"]["a"]["loss"] == {"value": [0.5], "round": [4], "epoch": None, "seconds": [2.0]}


def test_epsilon_is_compared_with_its_delta() -> None:
    plain, one, two = job("plain", {}), job("one", {}), job("two", {})
    one["spec"]["strategy"] = {"name": "fedavg", "privacy": {"noise_multiplier": 1.1, "clip": 1.0, "delta": 1e-6}}
    two["spec"]["strategy"] = [{"epochs": 1, "strategy": one["spec"]["strategy"]}, {"strategy": {"name": "fedavg"}}]
    spent = series([None, None], {2: {"loss": 1.0}})
    for bucket, epsilon in zip(spent["series"], (0.5, 0.7), strict=True):
        bucket["numbers"] = {"epsilon": epsilon}
    found = compare_jobs([plain, one, two], {"plain": series([1.0], {}), "one": spent, "two": spent}, 0.0)
    assert found["metrics"][:3] == ["loss", "epsilon", "delta"] and found["lowest"]["delta"] is None
    first, *private = found["rows"]
    assert "delta" not in first["metrics"]
    for row in private:
        assert row["metrics"]["epsilon"]["last"] == 0.7 and ends(row, "delta") == {"delta": (1e-6, None)}
    assert found["curves"]["one"]["delta"]["value"] == [1e-6, 1e-6]


def test_a_name_that_does_not_say_which_value_is_the_best_has_no_best() -> None:
    jobs = [job("a", {"lr": 0.1}), job("b", {"lr": 0.3})]
    both = {
        "a": series([], {2: {"skill": 3.0, "loss": 1.0}, 4: {"skill": 1.0, "loss": 2.0}}),
        "b": series([], {4: {"skill": 2.0, "loss": 3.0}}),
    }
    found = compare_jobs(jobs, both, 0.0)
    assert found["lowest"] == {"skill": None, "loss": True}
    assert ends(found["rows"][0], "skill") == {"skill": (1.0, None)}
    assert [row["best skill"] for row in table_of(found)] == [None, None]
    with pytest.raises(ConfigError, match='give mode="min" or mode="max"'):
        find_best_row(found, "skill")
    for mode, best, of_a, lowest in (("max", "b", 3.0, False), ("min", "a", 1.0, True)):
        row = find_best_row(found, "skill", mode)
        assert row is not None and row["id"] == best
        given = with_direction(found, ["skill"], mode)  # type: ignore[arg-type]
        assert ends(given["rows"][0]) == {"skill": (1.0, of_a), "loss": (2.0, 1.0)}
        assert given["lowest"] == {"skill": lowest, "loss": True}
    assert found["lowest"]["skill"] is None, "the given comparison does not change"


def test_only_jobs_that_ended_with_a_result_can_be_the_best() -> None:
    end = {4: {"loss": 0.1}}
    jobs = [
        job("runs", {}, status="RUNNING"),
        job("failed", {}, status="FAILED", reason="no module 'x'\nin w.py:1"),
        job("stopped", {}, status="STOPPED"),
        job("kept", {}, status="STOPPED", metrics={"loss": 0.2}),
        job("ended", {}),
    ]
    both = {each["id"]: series([], end) for each in jobs}
    both |= {"kept": series([], {4: {"loss": 0.2}}), "ended": series([], {4: {"loss": 0.3}})}
    found = compare_jobs(jobs, both, 0.0)
    assert [row["result"] for row in found["rows"]] == [False, False, False, True, True]
    assert [row["reason"] for row in found["rows"]] == [None, "no module 'x'", None, None, None]
    assert find_best_row(found, "loss")["id"] == "kept"  # type: ignore[index]
    found["rows"][3]["result"] = False
    assert find_best_row(found, "loss")["id"] == "ended"  # type: ignore[index]
    assert find_best_row(compare_jobs(jobs[:3], both, 0.0), "loss") is None


def test_a_sparkline() -> None:
    assert draw_sparkline([0.0, 1.0, 2.0, None, 7.0], 10, 0.0, 7.0) == "▁▂▃ █"
    assert draw_sparkline([0.0, 2.0, 6.0, 8.0], 2, 0.0, 8.0) == "▂█"
    assert draw_sparkline([3.0, 3.0], 5, 3.0, 3.0) == "▁▁" and draw_sparkline([], 5, 0.0, 1.0) == ""
    assert draw_sparkline([float("nan"), float("inf")], 5, 0.0, 1.0) == "  "


def test_values_on_the_command_line_are_yaml() -> None:
    assert values_of(["lr=0.1,1e-3", "flag=true,false", "act=relu,'tanh'", "layers=[1,2],[3]"]) == {
        "lr": [0.1, 0.001],
        "flag": [True, False],
        "act": ["relu", "tanh"],
        "layers": [[1, 2], [3]],
    }
    for bad in (["lr"], ["=1"], ["lr="], ["lr=1", "lr=2"], ["lr=[1"]):
        with pytest.raises(ConfigError, match="--over"):
            values_of(bad)


# ---------------------------------------------------------------------------------------------- a job's parameters


@pytest.mark.parametrize("params", [{"_lr": 1}, {"a-b": 1}, {"": 1}, {"lr": float("nan")}, {"lr": {1: 1}}, [1], "lr"])
def test_a_job_refuses_what_no_parameter_can_be(params: Any) -> None:
    with pytest.raises(ConfigError, match="params"):
        JobSpec("a:B", params=params).check()


def test_a_parameter_of_a_wrong_type_is_refused_by_the_service(client: Client, home: Path) -> None:
    with pytest.raises(ConfigError, match=r"params.lr is '0.3' \(text\), and W.lr is float"):
        client.submit("w.py:W", working_dir=home, params={"lr": "0.3"})
    with pytest.raises(ConfigError, match="did you mean 'width'"):
        client.submit("w.py:W", working_dir=home, params={"widht": 3})
    assert client.jobs() == []
    with pytest.raises(ConfigError, match=r"params.compile is 1 \(an int\)"):
        client.submit("w.py:W", working_dir=home, params={"compile": 1})
    given = {"lr": 1, "width": 3, "compile": {"backend": "eager", "options": {"debug": True}}}
    job = client.submit("w.py:W", working_dir=home, params=given)
    assert job.params == given and job.data["spec"]["params"] == job.params
    assert job.data["sweep"] is None
    job.stop().wait(60).delete()


@pytest.mark.parametrize("upload", [True, False])
def test_arguments_of_a_function_are_checked_by_the_service(client: Client, home: Path, upload: bool) -> None:
    def submit(**params: Any) -> Any:
        return client.submit(run="loop.py:train_fn", working_dir=home, upload=upload, params=params)

    with pytest.raises(ConfigError, match="train_fn has no such argument: its arguments are rate, lr, seed"):
        submit(rate=1, lrr=0.1)
    with pytest.raises(ConfigError, match="params has lr='x'"):
        submit(rate=1, lr="x")
    with pytest.raises(ConfigError, match="needs a value for its argument 'rate'"):
        submit(lr=0.1)
    with pytest.raises(ConfigError, match=r"run 'none.py:f': there is no file"):
        client.submit(run="none.py:f", working_dir=home, upload=upload)
    assert client.jobs() == []
    job = submit(rate=[1, 2], lr=1)
    assert job.data["spec"]["workload"] is None and job.params == {"rate": [1, 2], "lr": 1}
    clear(client)
    client.submit(run="loop.py:anything", working_dir=home, upload=upload, params={"x": 1})
    clear(client)


def test_a_class_that_cannot_be_imported_is_left_to_the_driver(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
    refuse_params("broken.py:W", str(tmp_path), [{"lr": 1}])
    (tmp_path / "hangs.py").write_text("import time\ntime.sleep(1000)\n")
    refuse_params("hangs.py:W", str(tmp_path), [{"lr": 1}], seconds=3.0)


# ---------------------------------------------------------------------------------------------- through the service


def clear(client: Client) -> None:
    for each in client.jobs(limit=1000):
        if not each.status.terminal:
            each.stop().wait(60)
        each.delete()


def test_a_sweep_is_a_group_of_jobs(client: Client, home: Path) -> None:
    sweep = client.sweep({"workload": "w.py:W", "working_dir": str(home)}, name="group", lr=[0.1, 0.3], seed=range(2))
    assert [each.data["name"] for each in sweep.jobs] == [
        f"W lr={lr} seed={seed}" for lr in (0.1, 0.3) for seed in (0, 1)
    ]
    assert {each.data["sweep"] for each in sweep.jobs} == {"group"}
    client.submit("digits:Digits")
    assert [each.id for each in client.jobs(sweep="group")] == [each.id for each in reversed(sweep.jobs)]
    assert client.jobs(sweep="other") == []
    assert [each.id for each in client.open_sweep("group").jobs] == [each.id for each in sweep.jobs]
    rows = sweep.table()
    assert [(row["lr"], row["seed"]) for row in rows] == [(0.1, 0), (0.1, 1), (0.3, 0), (0.3, 1)]
    with pytest.raises(NotFound, match="has the metric 'loss': there are none yet"):
        sweep.best("loss")
    assert sweep.stop().wait(60) is sweep
    assert {each.status for each in sweep.jobs} == {Status.STOPPED}
    with pytest.raises(Conflict, match="all jobs of the sweep 'group' have ended"):
        sweep.stop()
    with pytest.raises(NotFound, match="no sweep 'other'"):
        client.open_sweep("other")
    clear(client)


@pytest.mark.parametrize(
    ("workload", "fields", "over", "text"),
    [
        ("w.py:W", {}, {"lr": [0.1, "x"]}, "params.lr is 'x'"),
        ("w.py:W", {}, {"lrr": [0.1]}, "did you mean 'lr'"),
        ("w.py:W", {}, {"workers": [1, 0]}, "the job with workers=0"),
        ("w.py:W", {}, {"workers": [1, 99]}, "99"),
        ("w.py:W", {}, {"strategy": ["all_reduce", "nothing"]}, "nothing"),
        ("w.py:Seeded", {}, {"seed": [0, 1]}, "write params.seed .*job.seed"),
        ("w.py:W", {"steps": 3}, {"epochs": [1]}, "give only one of them"),
        ("none.py:W", {}, {"lr": [1]}, "there is no file"),
    ],
)
def test_if_one_job_is_refused_none_is_left(
    client: Client, home: Path, workload: str, fields: Any, over: Any, text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        client.sweep({"workload": workload, "working_dir": str(home), **fields}, over=over)
    assert client.jobs() == []


def uploads(client: Client, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which each upload of an archive adds its hash."""
    sent, send = [], client._sent

    def noted(method: str, path: str, **options: Any) -> Any:
        if method == "PUT":
            sent.append(path.rpartition("/")[2])
        return send(method, path, **options)

    monkeypatch.setattr(client, "_sent", noted)
    return sent


def test_the_code_of_a_sweep_is_packed_and_sent_once(
    site: Site, client: Client, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "own.py").write_text(OWN)
    sent = uploads(client, monkeypatch)
    spec = {"workload": str(home / "w.py") + ":W", "working_dir": str(home)}
    sweep = client.sweep(spec, strategy=["all_reduce", f"{home / 'own.py'}:Own"], lr=[0.1, 0.3])
    (code,) = sent
    assert {each.data["spec"]["code"] for each in sweep.jobs} == {code}
    assert {each.data["spec"]["working_dir"] for each in sweep.jobs} == {None}
    assert {each.data["spec"]["workload"] for each in sweep.jobs} == {"w.py:W"}
    assert [each.data["spec"]["strategy"]["name"] for each in sweep.jobs] == ["all_reduce"] * 2 + ["own.py:Own"] * 2
    for each in sweep.jobs:
        found = client.call("GET", f"/api/v1/jobs/{each.id}/code")
        assert found["code"] == code and found["origin"]["files"] == 3 and found["origin"]["folder"] == str(home)
    client.sweep({"workload": "w.py:W", "working_dir": str(home)}, lr=[0.5])
    assert len(sent) == 1, "the service has it"
    archive = site.settings.state_dir / "code" / f"{code}.tar"
    assert archive.is_file()
    clear(client)
    assert not archive.exists()


def test_a_sweep_whose_code_was_deleted_meanwhile_sends_it_again(
    site: Site, client: Client, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, sent = client._send_code, []

    def lost_once(packed: Any) -> None:
        send(packed)
        sent.append(packed.hash)
        if len(sent) == 1:
            site.service.code.remove(packed.hash)

    monkeypatch.setattr(client, "_send_code", lost_once)
    sweep = client.sweep({"workload": "w.py:W", "working_dir": str(home)}, name="lost", lr=[0.1, 0.3])
    assert len(sent) == 2 and len(sweep.jobs) == 2
    clear(client)
    body = {"name": "none", "job": {"workload": "w.py:W", "code": sent[0]}, "over": {"seed": [0, 1]}}
    lacking = site.http.post("/api/v1/sweeps", json=body)
    assert lacking.status_code == 404 and lacking.json()["code"] == "no_code" and client.jobs() == []


def test_a_sweep_with_a_folder_of_the_services_machine(
    client: Client, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = uploads(client, monkeypatch)
    sweep = client.sweep({"workload": "w.py:W", "working_dir": str(home)}, upload=False, lr=[0.1])
    spec = sweep.jobs[0].data["spec"]
    assert spec["working_dir"] == str(home) and spec["code"] is None and sent == []
    clear(client)


def test_a_sweep_of_a_function(client: Client, home: Path) -> None:
    spec = {"run": "loop.py:train_fn", "working_dir": str(home), "params": {"rate": 1}}
    sweep = client.sweep(spec, lr=[0.1, 0.3])
    assert sweep.name.startswith("train_fn-")
    assert [each.data["name"] for each in sweep.jobs] == ["train_fn lr=0.1", "train_fn lr=0.3"]
    assert [row["lr"] for row in sweep.table()] == [0.1, 0.3]
    with pytest.raises(ConfigError, match=r"write params\.seed .*job\.seed"):
        client.sweep(spec, seed=[1, 2])
    with pytest.raises(ConfigError, match="params has lr='x'"):
        client.sweep(spec, lr=[0.1, "x"])
    with pytest.raises(ConfigError, match="spec has no workload"):
        client.sweep({"working_dir": str(home)}, lr=[0.1])
    assert len(client.jobs()) == 2
    clear(client)


def test_the_way_out_of_an_ambiguous_name(client: Client, home: Path) -> None:
    spec = {"workload": "w.py:Seeded", "working_dir": str(home)}
    sweep = client.sweep(spec, over={"params.seed": [3], "job.seed": [4]})
    assert sweep.jobs[0].data["spec"]["params"] == {"seed": 3} and sweep.jobs[0].data["spec"]["seed"] == 4
    assert sweep.name.startswith("Seeded-")
    with pytest.raises(ConfigError, match=r"lr is 0\.1: a sweep needs several values"):
        client.sweep(spec, lr=0.1)  # type: ignore[arg-type]
    clear(client)


def test_a_repeated_request_makes_no_second_sweep(site: Site, client: Client) -> None:
    body = {"name": "again", "job": {"workload": "digits:Digits"}, "over": {"seed": [0, 1]}}
    key = {"Idempotency-Key": uuid.uuid4().hex}
    first = site.http.post("/api/v1/sweeps", json=body, headers=key)
    assert first.status_code == 201 and first.headers["location"] == "/api/v1/sweeps/again"
    second = site.http.post("/api/v1/sweeps", json=body, headers=key)
    assert second.status_code == 200
    assert [each["id"] for each in second.json()["jobs"]] == [each["id"] for each in first.json()["jobs"]]
    other = site.http.post("/api/v1/sweeps", json={**body, "over": {"seed": [0, 2]}}, headers=key)
    assert other.status_code == 422 and "was used for another" in other.json()["detail"]
    taken = site.http.post("/api/v1/sweeps", json=body)
    assert taken.status_code == 409 and "there is a sweep 'again' already" in taken.json()["detail"]
    assert len(client.jobs()) == 2
    clear(client)


def test_the_last_and_best_values_of_a_long_run_are_those_of_rounds(site: Site, client: Client) -> None:
    """20,000 rounds are kept in buckets, and drawn as means; their extremes and the last value are exact."""
    found = client.sweep({"workload": "digits:Digits", "working_dir": None}, name="long", lr=[0.1, 0.3])
    values = [random.Random(7).uniform(0, 1) for _ in range(20_000)]
    for each, sign in zip(found.jobs, (1.0, -1.0), strict=True):
        with (site.start(each.id) / "metrics.jsonl").open("w") as file:
            for at, value in enumerate(values):
                point = {"kind": "round", "round": at, "loss": sign * value, "score": value, "skill": sign * value}
                file.write(json.dumps(point) + "\n")
        site.store("change_status", each.id, Status.SUCCEEDED, message="")
    one, two = found.table()
    assert (one["batch loss"], one["best batch loss"]) == (values[-1], min(values))
    assert (two["batch loss"], two["best batch loss"]) == (-values[-1], -max(values))
    assert (one["score"], one["best score"], one["skill"]) == (values[-1], max(values), values[-1])
    shown = with_direction(found.compare(2), ["skill"], "min")
    assert [row["metrics"]["skill"]["best"] for row in shown["rows"]] == [min(values), -max(values)]
    clear(client)


def test_a_sweep_is_submitted_and_stopped_by_one_request_each(
    site: Site, client: Client, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the number of requests nor that of transactions grows with the number of jobs."""
    asked: list[tuple[str, str]] = []
    call = client.call

    def counted(method: str, path: str, **more: Any) -> Any:
        asked.append((method, path))
        return call(method, path, **more)

    monkeypatch.setattr(client, "call", counted)
    found = client.sweep({"workload": "w.py:W", "working_dir": str(home)}, name="many", upload=False, seed=range(200))
    assert asked == [("POST", "/api/v1/sweeps")] and len(found.jobs) == 200
    rows = [site.settings.jobs_dir / job.id / "job.json" for job in found.jobs]
    assert [json.loads(row.read_text())["id"] for row in rows] == [job.id for job in found.jobs]
    asked.clear()
    before = site.service.store.version
    found.stop()
    assert asked == [("POST", "/api/v1/sweeps/many/stop")]
    assert all(job.data["stop_requested"] for job in found.jobs)
    found.wait(60)
    assert site.service.store.version - before < 20, "transactions: one to request it, and one to end those that wait"
    assert {job.data["status"] for job in found.jobs} == {Status.STOPPED}
    assert {job.data["reason"] for job in found.jobs} == {"stopped before it started"}
    assert [event["kind"] for event in found.jobs[0].events()] == ["queued", "stop_requested", "stopped"]
    with pytest.raises(Conflict, match="ended already"):
        found.stop()


def test_jobs_that_end_or_vanish_meanwhile_are_left_out_of_a_stop(site: Site) -> None:
    ended, queued, running = site.add(), site.add(), site.add()
    site.start(running)
    site.store("change_status", ended, Status.STOPPED, message="")
    assert [job.id for job in site.store("request_stops", [ended, queued, running, "0" * 26])] == [queued, running]
    assert site.store("end_queued", [ended, running, "0" * 26], "late") == []
    assert site.store("get", running).status is Status.STARTING
    site.store("change_status", running, Status.FAILED, message="")


def test_a_strategy_of_the_users_own_is_checked_once_for_a_sweep(
    client: Client, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "own.py").write_text(OWN)
    checked: list[Any] = []
    check = strategy_check.check_in_child

    async def counted(*given: Any) -> Any:
        checked.append(given)
        return await check(*given)

    monkeypatch.setattr(strategy_check, "check_in_child", counted)
    job = {"workload": "w.py:W", "working_dir": str(home), "strategy": "own.py:Own"}
    found = client.sweep(job, upload=False, over={"job.seed": [0, 1, 2], "job.workers": [1, 2]})
    assert len(found.jobs) == 6 and len(checked) == 2
    found.stop()


def test_the_service_compares_jobs_and_sweeps(
    site: Site, client: Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = client.sweep({"workload": "digits:Digits", "working_dir": None}, name="cmp", lr=[0.1, 0.3])
    for each, loss in zip(sweep.jobs, (0.5, 0.25), strict=True):
        points = [{"kind": "round", "round": i, "loss": 1.0 / (i + 1), "seconds": 0.5} for i in range(4)]
        points = [point | {"accuracy": 0.25 * i, "skill": float(i)} for i, point in enumerate(points)]
        points.append({"kind": "evaluation", "round": 4, "time": 0.0, "metrics": {"loss": loss, "skill": 9.0}})
        folder = site.settings.jobs_dir / each.id
        (folder / "metrics.jsonl").write_text("".join(json.dumps(point) + "\n" for point in points))
        progress = {"params": {"lr": each.params["lr"], "width": 4}, "round": 4, "rounds": 4, "epochs": 2}
        (folder / "progress.json").write_text(json.dumps(progress))
    with pytest.raises(NotFound, match=r"no job .* has ended with a result that has the metric 'loss'"):
        sweep.best("loss")
    for each in sweep.jobs:
        site.start(each.id)
        site.store("change_status", each.id, Status.SUCCEEDED, message="")
    assert sweep.best("loss").id == sweep.jobs[1].id
    assert sweep.best("loss", mode="max").id == sweep.jobs[0].id
    with pytest.raises(ConfigError, match='give mode="min" or mode="max"'):
        sweep.best("skill")
    assert sweep.best("skill", mode="max").id == sweep.jobs[0].id
    with pytest.raises(NotFound, match="has the metric 'nothing': there are loss, skill"):
        sweep.best("nothing")
    assert sweep.jobs[1].refresh().params == {"lr": 0.3, "width": 4}
    row = sweep.table()[0]
    assert (row["lr"], row["rounds"], row["loss"], row["best loss"]) == (0.1, 4, 0.5, 0.5) and "width" not in row
    ids = [each.id for each in sweep.jobs]
    monkeypatch.setenv("RAYPS_URL", site.url)
    monkeypatch.setenv("RAYPS_TOKEN", site.token)
    for options, heads in (
        ([], "loss lowest skill accuracy highest batch skill"),
        (["--mode", "min"], "loss lowest skill lowest accuracy highest batch skill lowest"),
        (["--mode", "max", "--metric", "loss"], "loss highest skill accuracy highest batch skill"),
    ):
        assert cli.main(["compare", "cmp", *options]) == 0
        assert heads in " ".join(capsys.readouterr().out.partition("\n")[0].split())
    assert cli.main(["compare", "cmp", "--mode", "max", "-o", "json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["lowest"]["skill"] is False and shown["rows"][0]["metrics"]["batch skill"]["best"] == 3.0
    found = client.call("GET", "/api/v1/comparison", params={"job": ids})
    assert found == sweep.compare()
    assert found["metrics"] == ["loss", "skill", "accuracy", "batch skill", "batch loss"]
    assert ends(found["rows"][0], "accuracy") == {"accuracy": (0.75, 0.75)}
    assert found["curves"][ids[0]]["batch skill"]["value"] == [0.0, 1.0, 2.0, 3.0]
    assert client.call("GET", "/api/v1/comparison", params={"job": [ids[0], ids[0].lower()]})["differing"] == []
    for query in ({}, {"job": ids, "sweep": "cmp"}):
        with pytest.raises(ConfigError, match="give the ids of jobs, or the name of one sweep"):
            client.call("GET", "/api/v1/comparison", params=query)
    clear(client)


def test_a_job_without_a_sweep_is_shown_alone(
    site: Site, client: Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAYPS_URL", site.url)
    monkeypatch.setenv("RAYPS_TOKEN", site.token)
    job = site.add()
    swept = client.sweep({"workload": "digits:Digits", "working_dir": None}, name="other", lr=[0.1])
    assert cli.main(["compare", job[:-1].lower()]) == 0
    found = capsys.readouterr()
    assert job in found.out and f"this is job {job} alone" in found.err and "the ids of other jobs" in found.err
    assert cli.main(["compare", swept.jobs[0].id]) == 0
    assert "or the name of its sweep, other" in capsys.readouterr().err
    assert cli.main(["compare", "nothing"]) == 3
    assert "there is no sweep and no job 'nothing': `rayps ls` lists the jobs" in capsys.readouterr().err
    clear(client)


def test_a_metric_that_no_job_has_is_not_compared() -> None:
    private = series([None, None], {2: {"accuracy": 0.5}})
    assert compare_jobs([job("a", {})], {"a": private}, 0.0)["metrics"] == ["accuracy"]
    both = {"a": private, "b": series([1.0, None], {})}
    assert compare_jobs([job("a", {}), job("b", {})], both, 0.0)["metrics"] == ["accuracy", BATCH_LOSS]


def test_a_comparison_says_why_a_job_failed(
    client: Client, site: Site, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAYPS_URL", site.url)
    monkeypatch.setenv("RAYPS_TOKEN", site.token)
    job = client.submit("w.py:W", working_dir=home, steps=1)
    site.store("change_status", job.id, Status.FAILED, message=None, reason="no module 'x'\nin w.py:1")
    assert cli.main(["compare", job.id, job.id]) == 0
    assert f"{job.id} failed: no module 'x'\n" in capsys.readouterr().out
    clear(client)


def test_the_commands(
    site: Site, client: Client, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAYPS_URL", site.url)
    monkeypatch.setenv("RAYPS_TOKEN", site.token)
    (home / "job.yaml").write_text("workload: w.py:W\nworking_dir: .\nparams: {width: 8}\n")
    spec = str(home / "job.yaml")
    assert cli.main(["sweep", spec, "--over", "lr=0.1,0.3", "--set", "params.width=9", "--name", "cli"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("  ")[2] for line in lines] == ["W lr=0.1", "W lr=0.3"]
    ids = [line.partition(" ")[0] for line in lines]
    assert client.job(ids[0]).params == {"width": 9, "lr": 0.1}
    assert cli.main(["ls", "--sweep", "cli"]) == 0 and ids[0] in capsys.readouterr().out
    assert cli.main(["get", ids[0]]) == 0
    out = capsys.readouterr().out
    assert "sweep            cli" in out and "lr=0.1  width=9" in out
    assert cli.main(["compare", "cli"]) == 0
    assert "0.3" in capsys.readouterr().out
    assert cli.main(["compare", *ids, "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["differing"] == ["lr"]
    assert cli.main(["compare", "cli", "--metric", "x"]) == 2 and "metric is 'x'" in capsys.readouterr().err
    assert cli.main(["submit", spec, "--set", "params.lr=abc"]) == 2
    assert "params.lr is 'abc'" in capsys.readouterr().err
    assert cli.main(["stop", "--sweep", "cli"]) == 0 and "for 2 jobs" in capsys.readouterr().out
    assert cli.main(["stop"]) == 2
    monkeypatch.chdir(home)
    loop = ["sweep", "--run", "loop.py:train_fn", "--set", "params.rate=1", "--over", "lr=0.1,0.3"]
    assert cli.main([*loop, "--no-upload", "--name", "loops"]) == 0
    assert [each.data["spec"]["working_dir"] for each in client.jobs(sweep="loops")] == [str(home)] * 2
    assert [each.data["spec"]["run"] for each in client.jobs(sweep="loops")] == ["loop.py:train_fn"] * 2
    assert cli.main([*loop, spec]) == 2 and "give a job file, or --run" in capsys.readouterr().err
    clear(client)


async def _records(path: Path) -> Any:
    store = await Store.open(path)
    try:
        return await store.page(), await store.page(sweep="x")
    finally:
        await store.close()


def test_a_home_directory_is_packed_only_if_it_is_named(
    site: Site, client: Client, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAYPS_URL", site.url)
    monkeypatch.setenv("RAYPS_TOKEN", site.token)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    (home / "job.yaml").write_text("workload: w.py:W\n")
    for words in (["submit", "job.yaml"], ["sweep", "job.yaml", "--over", "seed=1"]):
        assert cli.main(words) == 2
        error = capsys.readouterr().err
        assert f"the current folder is {home}, the home directory" in error and "--working-dir ." in error
        assert client.jobs() == []
        assert cli.main([*words, "--working-dir", "."]) == 0
        assert cli.main([*words, "--set", "working_dir=."]) == 0
        assert f"packed from {home}" in capsys.readouterr().err
        clear(client)
    (home / "project").mkdir()
    (home / "project" / "w.py").write_text((home / "w.py").read_text())
    assert cli.main(["submit", "job.yaml", "--working-dir", "project"]) == 0
    found = capsys.readouterr()
    assert f"packed from {home / 'project'}" in found.err
    assert cli.main(["submit", "--clone", found.out.strip(), "--working-dir", "."]) == 2
    assert "leave out --working-dir" in capsys.readouterr().err
    clear(client)


def test_what_a_loop_logs_is_compared() -> None:
    one = job("A", {}, spec={"run": "a.py:f", "params": {}}, metrics={"loss": 1.0, "skill": 3.0})
    found = series([4.0, 2.0, 3.0], {})
    for number, bucket in enumerate(found["series"]):
        bucket["numbers"] = {"skill": float(number)}
    shown = compare_jobs([one], {"A": found}, 0.0)
    assert shown["metrics"] == ["skill", "loss"]
    assert ends(shown["rows"][0]) == {"skill": (2.0, None), "loss": (3.0, 2.0)}

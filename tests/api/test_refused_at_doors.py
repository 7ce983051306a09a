"""What does not go together is refused at each front door with the same words: the whole table, each row.

A row becomes a job by `FORMS`, which says how a user writes a feature. A new row joins by itself if both its features
are here.
"""

from __future__ import annotations

import string
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from folders import lacks
from rayps_api.service import Service
from rayps_client.errors import ConfigError
from service_site import Site
from small_work import SCHEDULES, Small, rows
from torch import nn
from typer.testing import CliRunner

import rayps
from rayps.cli.main import app
from rayps.cluster.local import LocalCluster
from rayps.core.job.job_fields import BY_NAME, Where
from rayps.core.refusals.excluded_pair import Door, ExcludedPair
from rayps.core.refusals.table import TABLE, door_of
from rayps.core.strategy.nested_options import options_of
from rayps.core.strategy.text import write_strategy
from rayps.core.urls import location_of
from rayps.runtime.records.ledger_folder import find_ledger_folder
from rayps.strategies.catalogue import CATALOGUE, parse
from rayps.strategies.job import JobSpec

Given = dict[str, Any]
DP = {"noise_multiplier": 1.0, "clip": 1.0, "delta": 1e-5}
PIPELINE = {"name": "pipeline", "stages": 2}
SECRET = {"name": "secagg", "clip": 1.0}
RANGE = {"workers": [2, 4]}
TWO = [{"epochs": 1, "strategy": {"name": "local_sgd"}}, {"strategy": {"name": "all_reduce"}}]


def option(base: str = "", **options: Any) -> Given:
    """A feature that is an option of a strategy; `base`: the name of one that has it, if not any does."""
    return {"options": options, "base": base}


def private(base: str = "", **options: Any) -> Given:
    """A feature that is an option of `dp(...)`."""
    return option(base, privacy=options)


def field(**fields: Any) -> Given:
    """A feature that is a field of a job."""
    return {"job": fields}


FORMS: dict[str, Given] = {
    # options of strategies
    **{name: option(**{name: value}) for name, value in (("backup", 1), ("shard", "optimizer"), ("staleness", 2))},
    **{
        name: option(**{name: value})
        for name, value in (("compression", "int8"), ("bucket_mb", 4.0), ("late_limit", 3))
    },
    **{name: option() for name in ("no backup", "no shard", "no servers", "simulated clients", "no secure")},
    "buckets": option(bucket_mb=4.0),
    "replace_late": option(replace_late=True),
    "replica": option(replica=PIPELINE),
    "replicas": option(replicas=1, shards=2),
    "shard_resources": option(shard_resources={"gpu": 0.5}),
    "slice_backup": option(slice_backup=True),
    "slices of gradients": option(shard="gradients"),
    "slices of parameters": option(shard="parameters"),
    "merge by the best worker": option(merge="best"),
    "hybrid": option("hybrid"),
    "staleness that moves": option(staleness="auto"),
    "backup at servers": option("parameter_server", backup=1),
    "privacy": option("all_reduce", privacy=DP),
    "privacy of any kind": option("all_reduce", privacy=DP),
    "privacy of rows": option("all_reduce", privacy=DP),
    "rounds of rayps alone": option("hogwild"),
    "data or the end of the run": option("admm"),
    # federated ones
    "local_epochs": option(local_epochs=2),
    "local_steps": option(local_steps=2),
    "attack": option(attack={"name": "nan", "clients": 1}),
    "dropout": option(dropout=0.1),
    "speed": option(speed="lognormal"),
    "available": option(available="bernoulli"),
    "deadline": option(deadline=9.0),
    "enough": option(enough=2),
    "over_selection": option(over_selection=0.5),
    "min_replies": option(min_replies=2),
    "rule": option(rule="median"),
    "clip": option("fedavg", clip=2.0),
    "report": option(report="clients"),
    "finetune": option(finetune=1),
    "buffers": option("fedavg", buffers="keep"),
    "metric_bound": option(metric_bound=2.0),
    "metrics in the clear": option(),
    "client_evaluation": option(client_evaluation=True),
    "real clients": option(clients="remote"),
    "secure": option(secure=SECRET),
    "upload": option(upload="int8", clients="remote"),
    "download": option(download="int8"),
    "uploads by top_k": option(upload="top_k:0.1", clients="remote"),
    "asynchronous rounds": option("fedbuff"),
    "fedbuff": option("fedbuff"),
    "ditto": option("ditto"),
    "statistics": option("statistics"),
    "sums without a bound": option("scaffold"),
    "rows_per_client": option(rows_per_client=3),
    "no rows_per_client": option("statistics"),
    "answers of clients": option("statistics"),
    "private answers of rows": private("statistics", **DP) | {"options": {"by": "rows", "privacy": DP}},
    "privacy of clients": private("fedavg", **DP),
    "private layers of simulated clients": option("fedper", private="2"),
    "buffers of simulated clients": option("fedavg", buffers="keep"),
    "states of simulated clients": option("ditto"),
    "a claim for samples": private("fedavg", **DP),
    "a clip of privacy": private("statistics", **DP | {"clip": 2.0}),
    "a budget without noise": private("fedavg", clip=1.0, delta=1e-5, epsilon=8.0),
    "no rounds": option(),
    "noise_multiplier": private(**DP),
    "rounds": private("fedavg", **DP, rounds=9),
    "tree noise": private(**DP, mechanism="tree"),
    "an adaptive clip": private(**DP | {"clip": "adaptive"}),
    "a sample of clients": private(**DP, sampling="poisson"),
    "samples of a fixed size": private("fedavg", **DP, sampling="fixed"),
    "sampling of clients": private(**DP, sampling="all"),
    "honest": private("fedavg", **DP, honest=0.9),
    "noise of the server": option(),
    "noise of clients": private(**DP, noise_by="clients"),
    "seeded noise": private("fedavg", **DP, noise="seeded"),
    "bit_noise": private(**DP, bit_noise=1.0),
    "divisor": private(**DP, divisor=2.0),
    "restart": private(**DP, restart=3),
    "physical_batch": private(**DP, physical_batch=4),
    # a job's fields
    "workload": field(workload="work.py:Work"),
    "run": field(run="loops.py:loop"),
    "a loop of your own": field(run="loops.py:loop"),
    "epochs": field(epochs=2),
    "steps": field(steps=3),
    "checkpoint_every": field(checkpoint_every=3),
    "evaluate_every": field(evaluate_every=3),
    "profile": field(profile=True),
    "start_from": field(start_from="base.safetensors"),
    "elastic": field(**RANGE),
    "server_group": field(server_group="g"),
    "branch": field(branch="b", server_group="g"),
    "quota": field(quota={"bytes": 1e6}),
    "resume": field(resume="job-1"),
    "statement": field(statement="Purpose: research."),
    "several phases": field(strategy=TWO),
    **{name: option() for name in ("no server_group", "no real clients")},
    # elastic workers
    "elastic workers in step": field(**RANGE),
    "elastic workers by leases": field(**RANGE) | option("parameter_server", staleness=2),
    "lr_scaling": field(**RANGE, elastic={"lr_scaling": "linear"}),
    "global_batch": field(**RANGE, elastic={"global_batch": 64}),
    "balance": field(**RANGE, elastic={"balance": True}),
    "replay": field(**RANGE, elastic={"replay": [[3, 3]]}),
    "rows that workers keep": option("parallel_sgd", shuffle=False),
    "one shared vector": option("hogwild"),
    "steps by servers": option("parameter_server"),
    "no mean of one batch": option("local_sgd"),
    "rows of clients": option("fedavg"),
    "phases by client and by row": field(
        strategy=[{"epochs": 1, "strategy": {"name": "fedavg"}}, {"strategy": {"name": "all_reduce"}}]
    ),
    "parameters that workers change": option("downpour"),
}
# rows that a job writes otherwise than by the forms of its two features
FORMS_OF_PAIRS: dict[tuple[str, str], Given] = {
    ("branch", "no server_group"): field(branch="b"),
    ("elastic workers by leases", "several phases"): field(
        **RANGE,
        strategy=[
            {"epochs": 1, "strategy": {"name": "parameter_server", "staleness": 2}},
            {"strategy": {"name": "parameter_server", "staleness": 3}},
        ],
    ),
    ("elastic workers in step", "staleness"): field(
        **RANGE,
        strategy=[
            {"epochs": 1, "strategy": {"name": "all_reduce"}},
            {"strategy": {"name": "parameter_server", "staleness": 3}},
        ],
    ),
    ("upload", "simulated clients"): option("fedavg", upload="int8"),
    ("client_evaluation", "asynchronous rounds"): option("fedbuff", client_evaluation=True, clients="remote"),
    ("client_evaluation", "tree noise"): option(
        "fedavg", client_evaluation=True, clients="remote", privacy=DP | {"mechanism": "tree"}
    ),
    ("noise of clients", "no secure"): private("fedavg", **DP, noise_by="clients"),
    ("secure", "rule"): option("fedavg", secure=SECRET, clients="remote", rule="median"),
    ("secure", "clip"): option("fedavg", secure=SECRET, clients="remote", clip=2.0),
    ("secure", "report"): option("fedavg", secure=SECRET, clients="remote", report="clients"),
    ("secure", "sums without a bound"): option("scaffold", secure=SECRET, clients="remote"),
    ("elastic workers by leases", "parameters that workers change"): field(**RANGE) | option("downpour"),
}
_OF_OWN = "a strategy of a user's own: no job that this test can write has it"
# rows that no job of this test states, and why, or which test has them
NOT_WALKED = {
    ("weights other than samples", "secure"): _OF_OWN,
    ("a loop that is not of rayps", "elastic workers in step"): _OF_OWN,
    ("shard", "servers for tables"): _OF_OWN,
    ("backup", "servers for tables"): _OF_OWN,
    ("backup", "rows of workers"): _OF_OWN,
    ("backup", "a loop of its own"): _OF_OWN,
    ("a server group without a job", "staleness that moves"): "no job: tests/servers/test_moved_bounds.py",
    ("backup at servers", "branch"): "a branch is on a server group, which backup workers exclude before",
}


def merged(one: Given, other: Given) -> Given:
    """Both dicts, and what both have joined in the same way."""
    found = {**one, **other}
    for name in one.keys() & other.keys():
        if isinstance(one[name], dict) and isinstance(other[name], dict):
            changed = {key: value for key, value in other[name].items() if DP.get(key) != value or key not in one[name]}
            found[name] = merged(one[name], changed)
        elif name == "base":
            found[name] = other[name] or one[name]
    return found


def has_all(name: str, options: Given) -> bool:
    return set(options) <= {each.name for each in options_of(CATALOGUE[name])}


def job_of(row: ExcludedPair) -> Given:
    """A job with both features of a row."""
    job = job_of_forms(FORMS_OF_PAIRS.get((row.one, row.other)) or merged(FORMS[row.one], FORMS[row.other]))
    if "run" in job and row.one != "workload":
        del job["workload"]
    return job


def job_of_forms(given: Given) -> Given:
    job: Given = {"workload": "work.py:Work", "workers": 4} | given.get("job", {})
    options, base = given.get("options", {}), given.get("base", "")
    if "strategy" not in job:
        names = [base] if base and has_all(base, options) else [name for name in CATALOGUE if has_all(name, options)]
        job["strategy"] = {"name": names[0], **options}
    return job


def walked(door: Door) -> list[Any]:
    rows = [
        row
        for row in TABLE
        if door in door_of(row) and not {(row.one, row.other), (row.other, row.one)} & set(NOT_WALKED)
    ]
    return [pytest.param(row, id=f"{row.one} with {row.other}") for row in rows]


def refusal(job: Given) -> ConfigError:
    """How a specification of the job is refused."""
    with pytest.raises(ConfigError) as caught:
        JobSpec.from_dict(job, parse(job["strategy"]))
    return caught.value


def is_of(row: ExcludedPair, error: ConfigError) -> bool:
    """Whether an error is that of a row: its words, whatever the values are."""
    at = 0
    for text, *_ in string.Formatter().parse(row.says + row.why + row.way):
        at = error.message.find(text, at)
        if at < 0:
            return False
    return error.data["field"] == row.field


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Service, "loops", lambda _: [])  # no job starts
        running = Site(tmp_path_factory.mktemp("doors") / "state")
        (running.settings.state_dir / "work.py").write_text("class Work: ...\n")
        (running.settings.state_dir / "loops.py").write_text("def loop(): ...\n")
        yield running
        running.close()


@pytest.mark.parametrize("row", walked(Door.REQUEST))
def test_a_job_is_refused_by_its_specification_and_by_the_service(row: ExcludedPair, site: Site) -> None:
    job = job_of(row)
    error = refusal(job)
    assert is_of(row, error), error.message
    answer = site.http.post("/api/v1/jobs", json=job | {"working_dir": str(site.settings.state_dir)})
    assert answer.status_code == 422, answer.text
    assert answer.json()["detail"] == error.message
    assert answer.json()["errors"] == [{"pointer": f"/{row.field}", "message": error.message}]


def arguments(job: Given) -> Given:
    """A job's fields as the arguments of `rayps.train`."""
    found = {name: value for name, value in job.items() if name != "workload"}
    if found.get("profile"):
        found["profile"] = "traces"
    if isinstance(found["workers"], list):
        found["workers"] = tuple(found["workers"])
    return found


@pytest.mark.parametrize("row", [each for each in walked(Door.TRAIN) if Door.REQUEST in door_of(each.values[0])])
def test_a_run_is_refused_with_the_same_words_before_its_workload_is_looked_for(row: ExcludedPair) -> None:
    job = job_of(row)
    with pytest.raises(ConfigError) as caught:
        rayps.train("nowhere.py:Work", progress=False, **arguments(job))
    error = refusal(job)
    assert (caught.value.message, caught.value.data["field"]) == (error.message, error.data["field"])


def command_of(job: Given) -> list[str] | None:
    """A job as a command line; None if the command has no such option."""
    found = ["train", "nowhere.py:Work"]
    for name, value in arguments(job).items():
        if Where.COMMAND not in BY_NAME[name].where:
            return None
        text = (
            write_strategy(value)
            if name == "strategy"
            else f"{value[0]}..{value[1]}"
            if name == "workers" and isinstance(value, tuple)
            else str(value)
        )
        if name == "elastic":
            found += [part for key, given in value.items() for part in ("--elastic", f"{key}={given}")]
            continue
        found += [f"--{name.replace('_', '-')}", text]
    return found


@pytest.mark.parametrize("row", [each for each in walked(Door.TRAIN) if Door.REQUEST in door_of(each.values[0])])
def test_the_command_says_the_same(row: ExcludedPair) -> None:
    command = command_of(job_of(row))
    if command is None:
        assert row.one in ("quota",)
        return
    answer = CliRunner().invoke(app, command)
    assert answer.exit_code == 2 or isinstance(answer.exception, ConfigError), answer.output
    said = answer.exception.message if isinstance(answer.exception, ConfigError) else answer.output
    assert refusal(job_of(row)).message in said


# ---- arguments of rayps.train alone

PRIVATE = {"name": "all_reduce", "privacy": DP}
ARGUMENTS: dict[tuple[str, str], Given] = {
    ("dry_run", "real clients"): {"strategy": "fedavg:clients=remote", "dry_run": True},
    ("dry_run", "privacy of any kind"): {"strategy": PRIVATE, "dry_run": True},
    ("resume of the newest checkpoint", "no folder for checkpoints"): {"resume": True},
    ("server_group", "no address"): {"strategy": "parameter_server", "server_group": "g"},
    ("ledger", "no privacy"): {"ledger": "ledger"},
}
# one needs a checkpoint to resume (tests/runtime/test_dry_run.py), one a store of objects (below)
NOT_HERE = {("dry_run", "resume"), ("privacy of any kind", "checkpoints behind a URL")}


def test_each_pair_of_arguments_is_walked() -> None:
    assert {(row.one, row.other) for row in TABLE if door_of(row) == Door.TRAIN} == set(ARGUMENTS) | NOT_HERE


@pytest.mark.parametrize("pair", ARGUMENTS, ids=str)
def test_arguments_of_a_run_are_refused(pair: tuple[str, str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    [row] = [row for row in TABLE if (row.one, row.other) == pair]
    started = {} if "server_group" in pair else {"cluster": NoCluster()}
    with pytest.raises(ConfigError) as caught:
        rayps.train(Work({}), progress=False, **started, **ARGUMENTS[pair])
    assert is_of(row, caught.value), caught.value.message
    assert list(tmp_path.iterdir()) == []


def test_a_ledger_is_refused_behind_a_url() -> None:
    with pytest.raises(ConfigError, match=r"checkpoint is 's3://bucket/run', and the ledger .* cannot be appended"):
        find_ledger_folder(parse(PRIVATE), None, location_of("s3://bucket/run"), None)


# ---- what is known when the workload is built

TABLES = {"sparse tables", "tables beside a ring"}


def work(**fields: Any) -> Given:
    """A feature that is a field of a workload, or how its model or its data is."""
    return {"work": fields}


FORMS_OF_WORK: dict[str, Given] = {
    "a schedule by epoch": work(schedule_every="epoch"),
    "accumulate": work(accumulate=2),
    "an evaluation of training data": work(),
    "average": work(average=rayps.EMA(0.9)),
    "backup at servers": option("parameter_server", backup=1),
    "checkpoint_activations": work(checkpoint_activations=("0",)),
    "clients": option("fedavg"),
    "clip_norm": work(clip_norm=1.0),
    "compile": work(compile=True),
    "copies of servers' parameters": option("downpour"),
    "data without a length": work(endless=True),
    "epochs of data without a length": work(endless=True),
    "a division of the run": option("parallel_sgd"),
    "fp16": work(precision="fp16"),
    "loaded_by": work(loaded_by=1),
    "no consensus before the end": option("admm"),
    "no ring of whole models": option("parameter_server"),
    "no servers for tables": option("all_reduce"),
    "nothing on servers": option("all_reduce"),
    "one shared vector": option("hogwild"),
    "parts of a model": option(replica=PIPELINE),
    "precision": work(precision="bf16"),
    "rows without numbers": work(endless=True),
    "sparse tables": option("parameter_server") | work(tables=True),
    "stages of a pipeline": option(replica=PIPELINE),
    "steps of plain SGD": option("scaffold"),
    "sync_batchnorm": work(sync_batchnorm=True),
    "tables beside a ring": option("hybrid") | work(tables=True),
    "tensor ranks": option(replica={"name": "tensor_parallel", "size": 2}),
    "workers that end alone": option("parameter_server"),
}
NOT_RUN = {
    ("private", "vectors of the whole model"): _OF_OWN,
    ("privacy", "rows or a loop of its own"): _OF_OWN,
    ("slices of parameters", "sparse tables"): "all_reduce has no servers for tables, which is refused before",
}


class Endless(torch.utils.data.IterableDataset[Any]):
    """Rows whose number is not known."""

    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.zeros(5, dtype=torch.float64), torch.zeros(1, dtype=torch.float64))] * 9)


class Work(Small):
    """A small workload, of which a test sets fields."""

    def __init__(self, fields: Given) -> None:
        super().__init__()
        self.endless, self.tables = fields.pop("endless", False), fields.pop("tables", False)
        self.ahead, self.clients = fields.pop("loaded_by", 0), fields.pop("clients", False)
        for name, value in fields.items():
            setattr(self, name, value)

    def model(self) -> nn.Module:
        table = [rayps.Embedding(5, table="rows", dtype="float64")] if self.tables else []
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1), *table).double()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        found = (model[:3](batch.x) - batch.y).square().mean()
        return found + model[3](torch.zeros(1, dtype=torch.int64)).sum() if self.tables else found

    def data(self) -> Any:
        if self.endless:
            return rayps.data.iterable(Endless(), batch_size=3)
        found = rayps.data.tensors(*rows(36), batch_size=3, client=rayps.data.iid(4) if self.clients else None)
        return found.loaded_by(self.ahead) if self.ahead else found

    def schedule(self, optimizer: Any) -> Any:
        return SCHEDULES["warm"](optimizer)


def run_of(row: ExcludedPair) -> Given:
    """A run with both features of a row: the arguments of `rayps.train`, and its workload's fields."""
    forms = FORMS | FORMS_OF_WORK
    return merged(forms[row.one], forms[row.other])


OF_RUNS = [row for row in TABLE if door_of(row) == Door.RUN and (row.one, row.other) not in NOT_RUN]


@pytest.mark.parametrize("row", OF_RUNS, ids=lambda row: f"{row.one} with {row.other}")
def test_a_workload_is_refused_before_anything_starts(row: ExcludedPair) -> None:
    if TABLES & {row.one, row.other} and lacks("rayps/ps/tables"):
        return
    given = run_of(row)
    job = job_of_forms(given)
    fields = {"clients": CATALOGUE[job["strategy"]["name"]]().rows.by_client} | given.get("work", {})
    with pytest.raises(ConfigError) as caught:
        rayps.train(Work(fields), progress=False, cluster=NoCluster(), **arguments(job))
    assert is_of(row, caught.value), caught.value.message


class NoCluster(LocalCluster):
    """A cluster that starts nothing."""

    def spawn(self, *given: Any, **more: Any) -> Any:
        pytest.fail("an actor was started before the check")


def test_each_exception_and_each_form_is_of_a_row() -> None:
    pairs = {frozenset((row.one, row.other)) for row in TABLE}
    for exceptions in (NOT_WALKED, NOT_RUN, FORMS_OF_PAIRS, ARGUMENTS):
        assert {pair for pair in exceptions if frozenset(pair) not in pairs} == set()
    assert set(FORMS) | set(FORMS_OF_WORK) <= {name for row in TABLE for name in (row.one, row.other)}

"""Strategies of the user's own, by name: found, refused, stored, resumed, sent to other processes, listed."""

import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rayps_client.errors import ConfigError
from service_site import Site
from small_work import Small, distance, kinds, train

from rayps.cli import main as cli
from rayps.cluster.local import LocalCluster
from rayps.core.job.job_status import Status
from rayps.core.strategy.costs import estimate_costs
from rayps.core.strategy.text import write_strategy
from rayps.core.strategy.traffic import Sizes
from rayps.runtime.driver.driver import Driver
from rayps.runtime.driver.workload_job import WorkloadJob
from rayps.runtime.records.journal import Journal
from rayps.service import strategy_check
from rayps.strategies.catalogue import FINDER, own_names, parse, wire
from rayps.strategies.job import JobSpec

ROOT = Path(__file__).resolve().parents[2]
EASGD = (ROOT / "examples" / "easgd.py").read_text(encoding="utf-8")
BROKEN = {
    "raises.py": "import rayps\n1 / 0\nclass S(rayps.Strategy): pass\n",
    "leaves.py": "import rayps, sys\nsys.exit(3)\nclass S(rayps.Strategy): pass\n",
    "nothing.py": "import rayps\nclass Other: pass\n",
    "lacks.py": "import rayps, not_there_at_all\nclass S(rayps.Strategy): pass\n",
    "plain_class.py": "import rayps\nclass S(rayps.Strategy):\n    def round(self, w): pass\n",
    "crashes.py": "import os, rayps\nos._exit(7)\nclass S(rayps.Strategy): pass\n",
    "hangs.py": "import rayps, time\ntime.sleep(3600)\nclass S(rayps.Strategy): pass\n",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory of a user, who is in it."""
    (tmp_path / "easgd.py").write_text(EASGD, encoding="utf-8")
    for name, text in BROKEN.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    FINDER.forget()


def test_the_page_builds_the_example_in_thirty_lines():
    page = (ROOT / "docs" / "write_a_strategy.md").read_text(encoding="utf-8")
    [code] = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class EASGD" in block]
    assert code.rstrip() == EASGD.rstrip()
    body = [line for line in code.partition("@dataclass")[2].splitlines() if line.strip()]
    assert len(body) <= 30


# ---- what it computes


def elastic(work, workers, steps, *, period, beta):
    """The paper's algorithm 1 in plain torch, in step: the center."""
    torch.manual_seed(0)
    first = work.model()
    center = [p.detach().clone() for p in first.parameters()]
    models = [work.model() for _ in range(workers)]
    for model in models:
        model.load_state_dict(first.state_dict())
    optimizers = [work.optimizer(list(model.parameters())) for model in models]
    batches = [list(work.data().batches(rank=r, size=workers, seed=0, epoch=0)) for r in range(workers)]
    for t in range(steps):
        if t % period == 0:
            away = [[p.detach() - c for p, c in zip(m.parameters(), center, strict=True)] for m in models]
            for model, apart in zip(models, away, strict=True):
                for p, d in zip(model.parameters(), apart, strict=True):
                    p.data -= beta / workers * d
            center = [c + beta * torch.stack(ds).mean(0) for c, *ds in zip(center, *away, strict=True)]
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            batch = batches[rank][t]
            optimizer.zero_grad()
            ((model(batch.x) - batch.y) ** 2).mean().backward()
            optimizer.step()
    return center


@pytest.mark.parametrize(("period", "beta"), [(1, 1.0), (3, 0.9)])
def test_by_name_it_is_the_paper(folder, period, beta):
    work = Small(n=48, batch=3)
    text = f"easgd:EASGD:period={period},beta={beta}"
    result = train(work, text, workers=2, steps=8)
    law = elastic(work, 2, 8, period=period, beta=beta)
    got = list(result.model().parameters())
    assert max(float((a.detach() - b).abs().max()) for a, b in zip(got, law, strict=True)) < 1e-12


def test_a_phase_among_others_and_an_object_are_the_same(folder):
    [phase] = parse("easgd.py:EASGD:beta=0.5", folder)
    by_name = train(Small(n=48), "1*all_reduce > easgd.py:EASGD:beta=0.5", workers=2, epochs=2)
    by_object = train(Small(n=48), ["1*all_reduce", phase.strategy], workers=2, epochs=2)
    assert distance(by_name.model(), by_object.model()) == 0.0
    assert [e["strategy"] for e in by_name.events if e["kind"] == "phase"] == ["all_reduce", "EASGD"]


def test_a_job_is_resumed_by_what_was_stored(folder, tmp_path):
    work, stored = Small(n=48, pause=0.004), wire(parse("easgd:EASGD:beta=0.5", folder))
    assert stored == {"name": "easgd:EASGD", "period": 4, "beta": 0.5}

    def drive(home, resume=None):
        job = {"workload": "x:Small", "workers": 2, "epochs": 2, "working_dir": str(folder), "checkpoint_every": 6}
        spec = JobSpec.from_dict(json.loads(json.dumps(job | {"strategy": stored})))
        cluster = LocalCluster()
        try:
            driver = Driver(
                WorkloadJob(work, spec, Journal(), checkpoints=tmp_path / home, resume=resume, capture=False)
            )
            return driver.run(cluster)
        finally:
            cluster.close()

    straight = drive("straight")
    assert straight.status is Status.SUCCEEDED, straight.message
    middle = sorted((tmp_path / "straight").glob("step-*"))[0]
    assert int(middle.name.partition("-")[2]) < straight.snapshot.round
    again = drive("again", resume=middle)
    assert again.status is Status.SUCCEEDED, again.message
    assert torch.equal(again.snapshot.params, straight.snapshot.params)


# ---- names and errors


@pytest.mark.parametrize(
    ("text", "as_wire"),
    [
        ("easgd:EASGD", {"name": "easgd:EASGD", "period": 4, "beta": 0.9}),
        ("easgd.py:EASGD:beta=0.5,period=2", {"name": "easgd.py:EASGD", "period": 2, "beta": 0.5}),
        ("./easgd.py:EASGD(period=2)", {"name": "./easgd.py:EASGD", "period": 2, "beta": 0.9}),
    ],
)
def test_the_three_forms(folder, text, as_wire):
    phases = parse(text, folder)
    assert wire(phases) == as_wire
    assert repr(parse(as_wire, folder)) == repr(parse(write_strategy(as_wire), folder)) == repr(phases)
    assert wire(parse(write_strategy(as_wire), folder)) == as_wire
    assert parse(f"2*{text} > all_reduce", folder)[0].epochs == 2
    assert own_names(f"2*{text} > all_reduce") == own_names(as_wire) == [as_wire["name"]]


REFUSED = [
    ("missing:S", ["missing", "no module"]),
    ("missing.py:S", ["no file"]),
    ("easgd:Easgd", ["no class 'Easgd'", "EASGD"]),
    ("nothing:Other", ["not a strategy", "rayps.Strategy"]),
    ("nothing:S", ["no class 'S'"]),
    ("raises:S", ["ZeroDivisionError", "raises.py:2"]),
    ("leaves:S", ["SystemExit"]),
    ("lacks:S", ["not_there_at_all"]),
    ("easgd:EASGD:betta=1", ["no option 'betta'", "beta"]),
    ("easgd:EASGD:beta=7", ["EASGD()", "ValueError", "beta is 7"]),
    ("plain_class:S:lr=1", ["no option 'lr'", "dataclass"]),
]


@pytest.mark.parametrize(("text", "words"), REFUSED, ids=[text for text, _ in REFUSED])
def test_refused_with_the_reason(folder, text, words):
    with pytest.raises(ConfigError) as caught:
        parse(text, folder)
    assert caught.value.data["field"] == "strategy"
    assert [word for word in words if word not in str(caught.value)] == []


def test_without_a_folder_no_file_is_read(folder):
    with pytest.raises(ConfigError, match="no working directory"):
        parse("raises:S")
    assert own_names("raises:S > all_reduce") == ["raises:S"]
    JobSpec("x:Y", {"name": "raises:S"}, 2).check()
    assert "raises" not in sys.modules


@pytest.mark.parametrize("text", ["parameter_server:staleness", "all-reduce:sum"])
def test_an_option_without_a_value_is_no_class(text):
    assert own_names("all_reduce") == []
    with pytest.raises(ConfigError, match="has no value"):
        parse(text, Path.cwd())


# ---- other processes


def test_another_process_needs_no_file(folder, tmp_path):
    [phase] = parse("easgd.py:EASGD:beta=0.5", folder)
    packed = tmp_path / "packed"
    packed.write_bytes(pickle.dumps(phase))
    code = (
        "import pickle, sys; phase = pickle.load(open(sys.argv[1], 'rb')); s = phase.strategy; "
        "print(type(s).__name__, s.beta, s.loop, s.name, s == pickle.loads(pickle.dumps(s)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(packed)],
        capture_output=True,
        text=True,
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=120,
    )
    assert run.stdout.split() == ["EASGD", "0.5", "local_updates", "EASGD", "True"], run.stderr
    assert pickle.loads(pickle.dumps(phase)) == phase


def test_the_child_checks_what_the_service_stores(folder):
    found = strategy_check.check("1*all_reduce > easgd:EASGD:beta=0.5", str(folder), 2)
    assert found.strategy[1]["strategy"] == {"name": "easgd:EASGD", "period": 4, "beta": 0.5}
    assert [(each.name, each.servers, each.tables) for each in found.phases] == [
        ("all_reduce", False, False),
        ("EASGD", False, False),
    ]
    assert "easgd" not in sys.modules


@pytest.mark.parametrize(
    ("name", "words"), [("raises:S", "ZeroDivisionError"), ("crashes:S", "exit code 7"), ("missing:S", "no module")]
)
def test_the_child_says_what_is_wrong(folder, name, words):
    with pytest.raises(ConfigError, match=words):
        strategy_check.check(name, str(folder), 2)


def test_a_file_that_hangs_is_given_up(folder):
    with pytest.raises(ConfigError, match="has not been imported within 5 s"):
        strategy_check.check("hangs:S", str(folder), 2, seconds=5.0)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    site = Site(tmp_path_factory.mktemp("state"))
    yield site
    site.close()


def test_a_job_with_one_is_stored_by_name(site, folder):
    body = {"workload": "digits:Digits", "workers": 2, "working_dir": str(folder), "strategy": "easgd:EASGD:beta=0.5"}
    answer = site.http.post("/api/v1/jobs", json=body)
    assert answer.status_code == 201, answer.text
    stored = site.http.get(f"/api/v1/jobs/{answer.json()['id']}").json()["spec"]["strategy"]
    assert stored == {"name": "easgd:EASGD", "period": 4, "beta": 0.5}
    assert "easgd" not in sys.modules


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({"strategy": "easgd:EASGD:betta=1"}, "strategy", "no option 'betta'"),
        ({"strategy": {"name": "raises:S"}}, "strategy", "ZeroDivisionError"),
        ({"working_dir": None}, "working_dir", "give working_dir"),
        ({"working_dir": "/not/there"}, "working_dir", "not a directory"),
        ({"strategy": [{"epochs": 1, "strategy": "missing:S"}, {"strategy": "all_reduce"}]}, "strategy", "no module"),
    ],
)
def test_a_job_is_refused_with_the_reason(site, folder, change, field, words):
    body = {"workload": "digits:Digits", "workers": 2, "working_dir": str(folder), "strategy": "easgd:EASGD"} | change
    answer = site.http.post("/api/v1/jobs", json=body)
    assert answer.status_code == 422, answer.text
    assert words in answer.text
    assert field in answer.text


def test_they_are_listed(folder, capsys):
    (folder / "hangs.py").unlink()
    (folder / "crashes.py").unlink()
    assert cli.main(["strategies", "-o", "json"]) == 0
    out, err = capsys.readouterr()
    found = {each["name"]: each for each in json.loads(out)}
    assert {"all_reduce", "fedavg", "easgd.py:EASGD", "plain_class.py:S"} <= set(found)
    assert {option["name"]: option["default"] for option in found["easgd.py:EASGD"]["options"]} == {
        "period": 4,
        "beta": 0.9,
    }
    assert "raises.py:S" in err and "ZeroDivisionError" in err
    assert cli.main(["strategies", "--working-dir", str(ROOT / "examples")]) == 0
    out, _ = capsys.readouterr()
    assert "easgd.py:EASGD: Workers explore" in out and "    period=4, beta=0.9\n" in out
    assert "    the options of fedavg, mu=" in out and max(map(len, out.splitlines())) <= 120


def test_the_command_line_trains_with_one(folder, capsys):
    assert cli.main(["plan", "--strategy", "easgd:EASGD", "--workers", "2", "--parameters", "1000"]) == 0
    assert "EASGD" in capsys.readouterr().out


def test_kinds_of_a_run_by_name(folder):
    assert "phase" in kinds(train(Small(n=12), "easgd:EASGD", workers=2, epochs=1))


def test_what_a_class_sends_in_a_loop_of_its_own_is_not_taken_for_gradients(folder):
    given = Sizes(parameters=1000)
    for name, known in [("all_reduce", True), ("local_sgd:period=4", True), ("easgd.py:EASGD", False)]:
        strategy = parse(name, folder)[0].strategy
        assert (estimate_costs(strategy, 4, given).bytes is not None) is known, name
        assert estimate_costs(strategy, 1, given).bytes == 0

"""The command line: bad input as a table, exit codes, and what it loads."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from rayps_client.errors import ConfigError, NoResources, TrainingError, Unauthorized
from service_site import Site

import rayps
from rayps.cli import doctor, jobs, show
from rayps.cli import main as cli
from rayps.cluster.local import until
from rayps.core.job.job_status import Status
from rayps.service.client import Client
from rayps.service.job_file import load, read
from rayps.service.settings import Settings


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("state"))
    yield site
    site.close()


@pytest.fixture
def at(site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setenv("RAYPS_URL", site.url)
    monkeypatch.setenv("RAYPS_STATE_DIR", str(site.settings.state_dir))
    return site


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(list(arguments))
    out, err = capsys.readouterr()
    return code, out, err


JOB = "workload: a:B\nworkers: 2\n"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--nothing"], 2, "--nothing"),
        (["nothing"], 2, "nothing"),
        (["train"], 2, "TARGET"),
        (["train", "nothing.py:W"], 2, "nothing.py"),
        (["train", "a:B", "--workers", "x"], 2, "workers is 'x'"),
        (["train", "a:B", "--workers", "0"], 2, "workers"),
        (["train", "a:B", "--strategy", "all_redcue"], 2, "did you mean 'all_reduce'"),
        (["train", "a:B", "--strategy", "parameter_server:shards"], 2, "shards=..."),
        (["serve", "--port", "70000"], 2, "65535"),
        (["serve", "--port", "x"], 2, "--port"),
        (["serve", "--cpus", "0"], 2, "--cpus"),
        (["serve", "--host", "0.0.0.0"], 2, "--allow-host"),
        (["serve", "--address", "auto"], 2, "host:port"),
        (["submit", "nothing.yaml"], 2, "no job file"),
        (["submit", "/tmp"], 2, "is a directory: give a regular file"),
        (["get", "nobody"], 3, "nobody"),
        (["logs", "01J00000000000000000000000"], 3, "no job"),
        (["stop", "../etc"], 3, "no job"),
        (["ls", "--status", "GREAT"], 2, "status"),
        (["ls", "-o", "xml"], 2, "xml"),
    ],
)
def test_bad_input(at: Site, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, says: str) -> None:
    found, out, err = run(capsys, *arguments)
    assert (found, out) == (code, "") and says in err
    assert len(err.strip().splitlines()) <= 3 and "Traceback" not in err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "fields such as"),
        ("- a\n", "fields such as"),
        ("workload: [", "line 1"),
        ("workload: a:B\nworkload: c:D\n", "occurs twice"),
        ("workload: a:B\nresources: {cpu: 1, cpu: 2}\n", "occurs twice"),
        ("workload: a:B\nwokers: 2\n", "did you mean 'workers'"),
        ("workload: a:B\nrounds: 2\n", "one round in each epoch; write epochs"),
        ("workers: 2\n", "needs a workload"),
        ("workload: sweep.py:Sweep(lr=0.1)\n", "write sweep.py:Sweep\nand give the arguments"),
        ("workload: ../../etc/passwd:Base\n", "should name a module or file and a class"),
        ("workload: a..b:C\n", "should name a module or file and a class"),
        ("workload: 'sweep.py:'\n", "should name a module or file and a class"),
        ("workload: &a a:B\nname: *a\n", "anchors"),
        ("workload: !!python/object/apply:os.system [echo]\n", "tag"),
        ("workload: a:B\n1: 2\n", "no field 1"),
        pytest.param(
            "workload: " + "[" * 5000, "line 1|nested too deeply", id="deep"
        ),  # by how deep Python may recurse
        pytest.param("#" * 1_000_001, "bytes", id="large"),
    ],
)
def test_bad_job_files(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(ConfigError, match=says) as caught:
        read(tmp_path / "job.yaml")
    assert len(str(caught.value).splitlines()) <= 3


@pytest.mark.parametrize(
    ("text", "reading"),
    [
        ("workers: 1:30", "a number in base 60"),
        ("timeout: 1:30.5", "a number in base 60"),
        ("workers: 010", "in base 8"),
        ("name: no", "true or false"),
        ("name: On", "true or false"),
        ("strategy: {name: all_reduce, x: YES}", "true or"),
        ("name: 2026-11-22", "a date"),
        ("on: 1", "true or false"),
        ("resources: {cpu: [1, 0_10]}", "in base 8"),
    ],
)
def test_what_versions_of_yaml_read_differently_is_refused(tmp_path: Path, text: str, reading: str) -> None:
    (tmp_path / "job.yaml").write_text(f"workload: a:B\n{text}\n")
    with pytest.raises(ConfigError, match=f"line 2: .* {reading}.* quotes"):
        read(tmp_path / "job.yaml")
    (tmp_path / "job.yaml").write_text("workload: a:B\n")
    key, _, value = text.partition(": ")
    with pytest.raises(ConfigError, match=f"--set .*{reading}"):
        read(tmp_path / "job.yaml", [f"{'name' if key == 'on' else key}={'on' if key == 'on' else value}"])


def test_what_all_versions_of_yaml_read_alike_is_read(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        "workload: a:B\nname: 'no'\nworkers: 8\ntimeout: 1e2\nresources: {cpu: 0.5, gpu: 0}\nresume: \"010\"\n"
        "strategy: {name: x, a: true, b: null, c: -3, d: 1.5e-3, e: '1:30', f: 2026-11, g: none, h: 1e-3}\n"
    )
    found = read(tmp_path / "job.yaml")
    assert (found["name"], found["workers"], found["timeout"], found["resume"]) == ("no", 8, 100.0, "010")
    assert found["resources"] == {"cpu": 0.5, "gpu": 0}
    assert found["strategy"] == {
        "name": "x",
        "a": True,
        "b": None,
        "c": -3,
        "d": 0.0015,
        "e": "1:30",
        "f": "2026-11",
        "g": "none",
        "h": 0.001,
    }


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("a pipe", "fifo"),
        ("a device", "/dev/zero"),
        ("a device", "/dev/null"),
        ("a pipe", "link"),
        ("a directory: give a regular file$", "."),
    ],
)
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, kind: str, path: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(tmp_path / "fifo")
    with pytest.raises(ConfigError, match=kind):
        read(tmp_path / path)


def test_job_files_and_changes(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB + "working_dir: sub\nstrategy: {name: parameter_server, staleness: 3}\n")
    found = read(tmp_path / "job.yaml", ["workers=8", "strategy.staleness=none", "name=x"])
    assert found == {
        "workload": "a:B",
        "workers": 8,
        "working_dir": str(tmp_path / "sub"),
        "name": "x",
        "strategy": {"name": "parameter_server", "staleness": "none"},
    }
    for bad in ("workers", "=4", "workload.x=1", "workers=["):
        with pytest.raises(ConfigError):
            read(tmp_path / "job.yaml", [bad])
    (tmp_path / "latin").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="text"):
        read(tmp_path / "latin")
    assert load("a: 1", "x") == {"a": 1}


def test_a_job_from_file_to_stop(at: Site, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    code, out, err = run(capsys, "submit", str(tmp_path / "job.yaml"), "--set", "name=mine")
    job = out.strip()
    assert (code, len(job)) == (0, 26), err
    assert "rayps stop" in err
    home = at.start(job)
    (home / "log.txt").write_text("2026-11-21T06:41:00.000Z worker-0 hello\n")
    (home / "metrics.jsonl").write_text('{"kind": "round", "round": 0, "loss": 0.5}\n')
    assert run(capsys, "logs", job)[1] == "2026-11-21T06:41:00.000Z worker-0 hello\n"
    assert "0.5" in run(capsys, "metrics", job)[1]
    assert json.loads(run(capsys, "metrics", job, "-o", "json")[1])["loss"] == 0.5
    assert "mine" in run(capsys, "ls")[1]
    assert run(capsys, "ls", "--filter", "MINE a:b")[1].count(job) == 1
    assert job not in run(capsys, "ls", "--filter", "mine", "--status", "FAILED")[1]
    assert json.loads(run(capsys, "ls", "-o", "json")[1])[0]["id"] == job
    assert json.loads(run(capsys, "get", job, "-o", "json")[1])["name"] == "mine"
    assert "starting" in run(capsys, "events", job)[1]
    assert "#code=" in run(capsys, "open", "--to", "-")[1]
    assert run(capsys, "stop", job)[0] == 0
    at.store("change_status", job, Status.STOPPED, message="stopped", reason="stopped")
    code, _, err = run(capsys, "stop", job)
    assert code == 5 and "STOPPED" in err
    run(capsys, "submit", str(tmp_path / "job.yaml"), "--set", "name=mine-too")
    assert run(capsys, "ls", "--filter", "mine", "--limit", "1")[2] == (
        "these are the newest 1 of 2 jobs (--limit); in all: 1 QUEUED, 1 STOPPED\n"
    )


@pytest.mark.parametrize(("end", "code"), [(Status.SUCCEEDED, 0), (Status.FAILED, 1)])
def test_follow_ends_with_the_job(
    at: Site, capsys: pytest.CaptureFixture[str], tmp_path: Path, end: Status, code: int
) -> None:
    import threading

    (tmp_path / "job.yaml").write_text(JOB)

    def finish() -> None:
        def find_queued() -> list[dict[str, str]]:
            return at.http.get("/api/v1/jobs?status=QUEUED&limit=1").json()["jobs"]

        assert until(lambda: bool(find_queued()), 60)
        [job] = find_queued()
        at.start(job["id"])
        at.store("change_status", job["id"], end, message="over", reason="over", metrics={"accuracy": 0.97})

    for job in at.http.get("/api/v1/jobs?status=QUEUED&limit=200").json()["jobs"]:
        at.store("change_status", job["id"], Status.STOPPED, message="")
    finisher = threading.Thread(target=finish)
    finisher.start()
    found, out, err = run(capsys, "submit", str(tmp_path / "job.yaml"), "--follow")
    finisher.join()
    assert (found, out) == (code, "accuracy 0.97\n"), err
    assert "was submitted" in err
    assert ("FAILED: over" in err) == (code == 1)


def test_nobody_answers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYPS_URL", "http://127.0.0.1:1")
    code, _, err = run(capsys, "ls")
    assert code == 4 and "rayps serve" in err and len(err.strip().splitlines()) <= 3


def test_a_port_in_use(at: Site, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = run(capsys, "serve", "--port", str(at.port), "--state-dir", str(tmp_path / "other"))
    assert code == 2 and f"port {at.port}" in err and "--port" in err and out == ""
    assert len(err.strip().splitlines()) <= 3


def test_a_state_directory_that_cannot_be(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = run(capsys, "serve", "--state-dir", str(tmp_path / "file"))
    assert code == 2 and "directory" in err
    code, _, err = run(capsys, "serve", "--state-dir", str(tmp_path / "file" / "below"))
    assert code == 2 and "--state-dir" in err


@pytest.mark.parametrize(
    ("error", "code"), [(TrainingError("loss is nan"), 1), (NoResources("too few"), 4), (KeyboardInterrupt(), 130)]
)
def test_train_fails_with_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int
) -> None:
    def train(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(rayps, "train", train, raising=False)
    found, out, err = run(capsys, "train", "a:B")
    assert found == code and out == "" and len(err.strip().splitlines()) <= 1


def test_an_interrupted_train_says_what_was_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt("stopped on request at round 7 of 9: ck/step-7 is kept\n--resume goes on")

    monkeypatch.setattr(rayps, "train", train, raising=False)
    assert run(capsys, "train", "a:B") == (
        130,
        "",
        "rayps: stopped on request at round 7 of 9: ck/step-7 is kept\n--resume goes on\n",
    )


def test_train_passes_everything_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    given: dict[str, Any] = {}

    def train(target: str, **options: Any) -> Any:
        given.update(options, target=target)
        rounds = SimpleNamespace(num_rows=7)
        found = {"metrics": {"accuracy": 0.97}, "history": rounds, "checkpoint": None, "best": None}
        return SimpleNamespace(**found, params={"lr": 0.3})

    monkeypatch.setattr(rayps, "train", train, raising=False)
    options = "--workers 4 --epochs 3 --gpus-per-worker 1 --set lr=0.3 --set flag=true -o json"
    options += " --evaluate-every 50 --keep-checkpoints 3"
    code, out, _ = run(capsys, "train", "a:B", *options.split())
    shown = {"metrics": {"accuracy": 0.97}, "rounds": 7, "checkpoint": None, "best": None}
    shown["params"] = {"lr": 0.3}
    assert code == 0 and json.loads(out) == shown and given["params"] == {"lr": 0.3, "flag": True}
    assert (given["workers"], given["epochs"], given["resources"]) == (4, 3, {"cpu": 1.0, "gpu": 1.0})
    assert (given["evaluate_every"], given["keep_checkpoints"]) == (50, 3)
    assert run(capsys, "train", "a:B")[1] == "accuracy 0.97\n"
    assert (given["evaluate_every"], given["keep_checkpoints"]) == (None, 2)


def test_version_and_doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(capsys, "--version")[1] == f"rayps {rayps.__version__}\n"
    code, out, _ = run(capsys, "doctor")
    assert code == 0 and "torch" in out and "/dev/shm" in out
    assert {"name", "found", "required", "needed_for", "remedy"} == set(
        json.loads(run(capsys, "doctor", "-o", "json")[1])[0]
    )
    monkeypatch.setattr(doctor, "_find_package", lambda name: None)
    code, out, _ = run(capsys, "doctor")
    assert code == 1 and "MISSING" in out and "pip install ray" in out


def test_help_loads_neither_torch_nor_ray_and_names_exit_codes() -> None:
    code = (
        "import sys\nfrom rayps.cli.main import main\ncode = main(['--help'])\n"
        "assert not {'torch', 'ray', 'fastapi', 'sqlalchemy'} & set(sys.modules)\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "Exit codes" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PORT", "x"),
        ("PORT", "-1"),
        ("PORT", "65536"),
        ("CPUS", "0"),
        ("CPUS", "1.5"),
        ("IDLE", "0"),
        ("IDLE", "nan"),
        ("ADDRESS", "auto"),
        ("ADDRESS", "local"),
        ("URL", "127.0.0.1:8420"),
        ("HOST", "a b"),
        ("STATE_DIR", "/dev/null"),
    ],
)
def test_bad_settings(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"RAYPS_{name}"):
        Settings.read({f"RAYPS_{name}": value})


def test_settings(tmp_path: Path) -> None:
    assert Settings.read({}) == Settings() and Settings().logical_cpus >= 16 and Settings().loopback
    assert Settings().cores == os.cpu_count()
    given = Settings.read({"RAYPS_CPUS": "4"})
    assert (given.logical_cpus, given.cores) == (4, None), "all of them may be reserved at once"
    found = Settings.read({"RAYPS_PORT": "1", "RAYPS_ALLOWED_HOSTS": "a, b", "RAYPS_STATE_DIR": str(tmp_path)}, port=2)
    assert (found.port, found.allowed_hosts) == (2, ("a", "b"))
    assert found.prepare().jobs_dir.stat().st_mode & 0o777 == 0o700
    assert not Settings.read({"RAYPS_HOST": "0.0.0.0"}).loopback


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_ids_are_never_cut_and_the_last_column_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.setattr("sys.stdout", out := Terminal())
    long = "parameter_server:staleness=none,shards=4 > all_reduce"
    show.print_table(
        ["id", "strategy", "result"], [["0123456789ABCDEFGHJKMNPQRS", long, "one two three " * 6]], cut={"strategy": 10}
    )
    text = out.getvalue()
    assert "0123456789ABCDEFGHJKMNPQRS" in text
    assert long not in text and long[:8] in text
    assert text.split().count("three") == 6
    assert max(map(len, text.splitlines()[1:])) <= 70  # below the heading, which is bold


def test_metrics_leave_out_columns_that_no_round_has(at: Site, capsys: pytest.CaptureFixture[str]) -> None:
    private = at.add(strategy="fedavg:privacy=dp(noise_multiplier=1.1)")
    points: list[dict[str, Any]] = [
        {"kind": "round", "round": i, "loss": None, "samples": 0, "seconds": 0.5, "epsilon": 1.0 + i, "releases": i + 1}
        for i in range(8)
    ]
    (at.start(private) / "metrics.jsonl").write_text("".join(json.dumps(point) + "\n" for point in points))
    assert cli.main(["metrics", private, "--points", "4"]) == 0
    out, err = capsys.readouterr()
    heads, *rows = [line.split() for line in out.splitlines()]
    assert heads == ["round", "epsilon", "releases"]
    assert rows == [["0-1", "2", "2"], ["2-3", "4", "4"], ["4-5", "6", "6"], ["6-7", "8", "8"]]  # after the last round
    assert "not reported under privacy" in err
    plain = at.add()
    (at.start(plain) / "metrics.jsonl").write_text(
        json.dumps({"kind": "round", "round": 0, "loss": 0.5, "samples": 5, "seconds": 0.5}) + "\n"
    )
    assert cli.main(["metrics", plain]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0].split() == ["round", "loss", "min", "max", "samples/s"] and err == ""
    assert cli.main(["metrics", at.add()]) == 0
    out, err = capsys.readouterr()
    assert out == "" and "has no rounds" in err


HOSTILE = "\x1b[2J\x1b]0;title\x07\x1b]52;c;ZXZpbA==\x07\x9b31m\rover\x08\x00\x7f\u202eevil"


@pytest.mark.parametrize("terminal", [True, False])
def test_what_a_job_printed_does_not_control_the_terminal(
    at: Site, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    job = at.add()
    home = at.start(job)
    line = f"2026-11-21T06:41:00.000Z worker-0 \tone {HOSTILE} två 火\n"
    (home / "log.txt").write_text(line, encoding="utf-8")
    event = {"time": 1.0, "kind": f"k{HOSTILE}", "message": f"m{HOSTILE}", "attempt": 1}
    (home / "events.jsonl").write_text(json.dumps(event) + "\n")
    at.store("set_reason", job, f"because{HOSTILE}")
    monkeypatch.setattr("sys.stdout", out := Terminal() if terminal else io.StringIO())
    monkeypatch.setattr("sys.stderr", Terminal())
    assert [
        cli.main(list(command))
        for command in (("logs", job), ("events", job), ("get", job), ("ls",), ("get", job, "-o", "json"))
    ] == [0] * 5
    shown = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue()) if terminal else out.getvalue()  # headings are bold
    assert "\tone" in shown and "två 火" in shown
    if terminal:
        assert not set(shown) & set(HOSTILE) - set(map(chr, range(32, 127)))
        assert r"\x1b]52;c;ZXZpbA==\x07\x9b31m\x0dover\x08\x00\x7f\u202eevil" in shown
    else:
        assert HOSTILE in shown  # a pipe gets what was printed


def test_a_silent_log_says_so(at: Site, capsys: pytest.CaptureFixture[str]) -> None:
    job = at.add()
    assert cli.main(["logs", job[:20].lower()]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert job in err and "is empty" in err and "rayps events" in err


def test_the_beginning_of_an_id_names_a_job(at: Site, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = at.add(name="one"), at.add(name="two")
    assert cli.main(["get", two]) == 0
    assert "two" in capsys.readouterr().out
    both = next(one[:n] for n in range(26, 3, -1) if one[:n] == two[:n])
    for command in ("get", "logs", "metrics", "events", "stop"):
        assert cli.main([command, both]) == 2, command
        err = capsys.readouterr().err
        assert f"several jobs begin with {both!r}" in err and len(re.findall(r"[0-9A-Z]{26}", err)) == 2
    assert cli.main(["stop", two[: len(both) + 1]]) == 0
    assert at.http.get(f"/api/v1/jobs/{two}").json()["stop_requested"]
    assert not at.http.get(f"/api/v1/jobs/{one}").json()["stop_requested"]


def test_following_says_the_end_once_and_not_every_step(capsys: pytest.CaptureFixture[str]) -> None:
    class Followed:
        id, result = "J", {"accuracy": 0.5}
        data: ClassVar[dict[str, Any]] = {"status": "SUCCEEDED", "reason": "trained to the end"}

        def follow(self) -> Iterator[tuple[str, Any]]:
            yield "job", {"status": "QUEUED", "reason": None, "progress": None}
            yield "events", {"events": [{"kind": "queued", "message": "x was submitted"}]}
            yield "job", {"status": "QUEUED", "reason": "needs 8 CPUs, 2 free", "progress": None}
            for i in range(100):
                yield (
                    "job",
                    {
                        "status": "RUNNING",
                        "reason": None,
                        "progress": {"epoch": i // 50, "epochs": 2, "loss": 1.0 / (i + 1)},
                    },
                )
            progress = {"epoch": 1, "epochs": 2, "loss": 0.01, "metrics": {"loss": 0.25}}
            yield "job", {"status": "RUNNING", "reason": None, "progress": progress}
            yield "job", {"status": "RUNNING", "reason": None, "progress": progress}
            yield "events", {"events": [{"kind": "finished", "message": "trained to the end"}]}
            yield "job", self.data

    assert jobs._follow(Followed(), show.Output.table) == 0  # type: ignore[arg-type]
    out, err = capsys.readouterr()
    assert out == "accuracy 0.5\n"
    assert err.splitlines() == [
        "QUEUED: needs 8 CPUs, 2 free",
        "RUNNING epoch 1 of 2  batch loss 1",
        "RUNNING epoch 2 of 2  batch loss 0.0196",
        "evaluation: loss 0.25",
        "job J is SUCCEEDED: trained to the end",
    ]


def test_where_a_job_learns_and_which_loss_is_shown() -> None:
    spec = {"strategy": {"name": "parameter_server", "shards": 1, "staleness": 3}, "server_group": "shared"}
    job: dict[str, Any] = {"spec": spec, "status": "RUNNING", "metrics": None, "progress": {"loss": 0.5}}
    assert show.strategy_of(job) == "parameter_server:staleness=3 on shared"
    assert show.format_result(job) == "batch loss 0.5"
    servers = [{"state": "alive"}, {"state": "alive"}, {"state": "dead"}]
    job["progress"] |= {"server_group": {"servers": servers, "replicas": 1}, "metrics": {"loss": 0.4}}
    assert show.strategy_of(job) == "parameter_server:staleness=3 on shared (2 servers, 1 replica)"
    assert show.format_result(job) == "evaluation: loss 0.4"
    alone = {"spec": {"strategy": {"name": "parameter_server", "shards": 2}}, "status": "FAILED", "progress": None}
    assert (show.strategy_of(alone), show.format_result(alone)) == ("parameter_server:shards=2", "")


def test_the_text_of_a_strategy_leaves_out_the_defaults_of_its_parts() -> None:
    private = rayps.FedAvg(
        clients="remote(least=2)", privacy=rayps.dp(noise_multiplier=1.1), secure="secagg(clip=1.0,max_weight=1)"
    )
    heads = rayps.FedPer(private=["head_w", "head_b"])
    assert show.format_strategy(heads.to_wire()) == "fedper:private=(head_w,head_b)"
    text = show.format_strategy(private.to_wire())
    assert (
        text == "fedavg:privacy=dp(noise_multiplier=1.1),clients=remote(least=2),secure=secagg(clip=1.0,max_weight=1)"
    )


def test_what_holds_a_job_back_is_in_the_list_and_events_are_in_order(
    at: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    job = at.add(name="starved")
    home = at.start(job)
    at.store("change_status", job, Status.RUNNING, message="runs")
    said = "throttled by its quota of 4 operations a second"
    group = {"servers": [], "held_back": said, "operations_s": 3.9, "quota": {"operations": 4.0}}
    (home / "progress.json").write_text(json.dumps({"loss": 0.5, "round": 3, "server_group": group}))
    events = [{"time": 5e9, "kind": "late", "message": ""}, {"time": 4e9, "kind": "early", "message": ""}]
    (home / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert f"batch loss 0.5, {said}" in run(capsys, "ls")[1]
    assert "operations/s     3.9 (quota 4)" in run(capsys, "get", job)[1]
    out = run(capsys, "events", job)[1]
    assert out.index("early") < out.index("late")


def test_no_token_says_where_it_was_looked_for(at: Site, tmp_path: Path) -> None:
    environ = {"RAYPS_STATE_DIR": str(tmp_path)}
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAYPS_TOKEN", raising=False)
        patch.setenv(*next(iter(environ.items())))
        with pytest.raises(Unauthorized, match=f"no token in {tmp_path}.*RAYPS_STATE_DIR"):
            Client(at.url).jobs()
    with pytest.raises(Unauthorized, match="wrong or revoked"):
        Client(at.url, "rps_no").jobs()


def test_checkpoints_in_a_row_are_shortened_in_the_table_of_events(
    at: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    job = at.add(name="saves")
    kinds = ["checkpoint"] * 5 + ["failure"] + ["checkpoint"] * 2
    home = at.settings.jobs_dir / job
    home.mkdir(exist_ok=True)
    with (home / "events.jsonl").open("w") as file:
        for i, kind in enumerate(kinds):
            file.write(json.dumps({"time": 1.8e9 + i, "kind": kind, "message": f"number {i}"}) + "\n")
    code, out, _ = run(capsys, "events", job)
    assert code == 0
    shown = re.findall(r"number (\d)", out)
    assert shown == ["0", "4", "5", "6", "7"] and "number 4 (and 3 checkpoints before it; all: -o json)" in out
    assert len(re.findall("number", run(capsys, "events", job, "-o", "json")[1])) == 8


def test_an_interrupt_while_modules_are_imported_is_one_line(monkeypatch, capsys):
    from rayps.cli import __main__ as program

    class Interrupt:
        def find_spec(self, name, *_):
            if name == "rayps.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "rayps.cli.main", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupt(), *sys.meta_path])
    assert program.main() == 130
    assert capsys.readouterr().err == "rayps: interrupted\n"


@pytest.mark.parametrize("group", [[], ["servers"], ["bench"], ["token"], ["members"]], ids=" ".join)
def test_a_group_without_a_command_shows_its_help(capsys: pytest.CaptureFixture[str], group: list[str]) -> None:
    code, out, err = run(capsys, *group)
    assert (code, out) == (2, "")
    assert err.strip() == run(capsys, *group, "--help")[1].strip()
    cut = [line for line in err.splitlines() if line.endswith("...")]
    assert not [line for line in cut if "[ARGS]" not in line], "a command's summary does not fit into its line"


def test_arguments_of_a_function_and_parameters_of_a_workload_are_set_by_their_names(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setitem(vars(rayps), "run", lambda target, **options: given.update(options) or [1])
    arguments = ["--set", "lr=0.3", "--set", "epochs=2", "--seed", "7", "--profile", "traces"]
    assert run(capsys, "run", "a.py:f", *arguments) == (0, "worker-0: 1\n", "")
    assert given["params"] == {"lr": 0.3, "epochs": 2} and given["seed"] == 7 and given["profile"] == Path("traces")
    file = tmp_path / "job.yaml"
    file.write_text(JOB)
    assert read(file, ["lr=0.3", "workers=4"]) == {"workload": "a:B", "workers": 4, "params": {"lr": 0.3}}
    with pytest.raises(ConfigError, match=r"did you mean 'workers', or params\.wokers\?"):
        read(file, ["wokers=4"])
    with pytest.raises(ConfigError, match=r"to submit this workload, write `workload: .*line\.py:W` into a YAML"):
        read(tmp_path / "line.py:W")


def test_a_loop_has_the_limits_of_a_private_ray(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text("def f():\n    pass\n")
    code, _, err = run(capsys, "run", f"{tmp_path / 'loop.py'}:f", "--workers", "1000")
    assert code == 2 and "a private Ray on this machine has at most" in err


def test_the_options_of_one_strategy_are_listed_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["strategies", "fedper"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("fedper: ") and "private=none" in out and "fraction=1.0" in out and "fedavg:" not in out
    assert cli.main(["strategies", "fedpr"]) == 2
    assert "did you mean 'fedper'?" in capsys.readouterr().err

"""What the user's code finds in a worker's process: arguments, an output as in a plain process, variables."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import io
import json
import logging
import os
import subprocess
import sys
import traceback

import pytest
import torch
from process_cluster import ProcessCluster
from rayps_client.errors import ActorDied, ConfigError, WorkloadError

import rayps
from rayps.cli.jobs import variables_of
from rayps.cli.main import main
from rayps.cluster.code_folder import JobCode, enter_code
from rayps.strategies.job import JobSpec


def given():
    """Parse the arguments as a script does: what it does not know is an error."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--double", action="store_true")
    return parser.parse_args()


class Parses(rayps.Workload):
    """A workload that parses wherever it is asked for something."""

    def model(self):
        return torch.nn.Linear(1, 1)

    def data(self):
        given()
        return rayps.data.tensors(torch.ones(8, 1), torch.ones(8, 1), batch_size=4)

    def loss(self, model, batch):
        return (model(batch.x) - batch.y).square().mean() * given().lr

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=given().lr)


def test_arguments_are_those_of_the_job_until_its_end(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["ray", "--node-id=1"])
    opened = enter_code(JobCode("", argv=("train.py", "--lr", "0.3")))
    assert sys.argv == ["train.py", "--lr", "0.3"]
    opened.close()
    assert sys.argv == ["ray", "--node-id=1"]
    enter_code(JobCode("")).close()
    assert sys.argv == ["ray", "--node-id=1"]


@pytest.mark.ray
def test_workers_parse_the_callers_arguments(ray_cluster, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "0.3", "--double"])

    def main():
        found = given()
        return sys.argv[0], found.lr, found.double

    assert rayps.run(main, workers=2, cluster=ray_cluster, progress=False) == [("train.py", 0.3, True)] * 2
    trained = rayps.train(Parses(), strategy="parameter_server", workers=2, epochs=1, cluster=ray_cluster)
    assert trained.history.num_rows == 1
    monkeypatch.setattr(sys, "argv", ["train.py", "--momentum", "0.3"])
    with pytest.raises(WorkloadError, match=r"main\(\) raised SystemExit: 2 "):  # as in the caller's own process
        rayps.run(main, workers=1, cluster=ray_cluster, progress=False)


# ---- what a worker writes


@pytest.fixture(params=["processes", pytest.param("ray", marks=pytest.mark.ray)])
def workers(request):
    """Workers as processes: their own file is a temporary one, or Ray's."""
    if request.param == "ray":
        yield request.getfixturevalue("ray_cluster")
        return
    with contextlib.closing(ProcessCluster()) as cluster:
        yield cluster


def shown(capsys, rank=0):
    """The lines of a worker, as the caller sees them."""
    start = f"worker-{rank}: "
    return [line.removeprefix(start) for line in capsys.readouterr().err.split("\n") if line.startswith(start)]


def test_everything_that_a_process_writes_is_in_the_log_in_order(workers, capsys):
    def main():
        out, err, libc = sys.stdout, sys.stderr, ctypes.CDLL(None)
        print("print", end=" ")
        print("and more")
        err.write("stderr\n")
        os.system("echo a shell")
        print("print again")
        subprocess.run([sys.executable, "-c", "print('a child')"], check=True)
        libc.printf(b"printf\n")
        libc.fflush(None)
        out.buffer.write(b"bytes \xff\xc3\xa4\r\n")
        out.reconfigure(line_buffering=True)
        os.write(err.fileno(), b"a descriptor\n\n")
        for done in range(0, 101, 10):
            err.write(f"\r{done}%")
        err.write("\n")
        print("x" * 250_000)
        print("    indented")
        print("no end of line", end="")
        return type(out), out.encoding, out.fileno(), err.fileno(), out.isatty()

    assert rayps.run(main, workers=1, cluster=workers) == [(io.TextIOWrapper, "utf-8", 1, 2, False)]
    lines = shown(capsys)
    expected = ["print and more", "stderr", "a shell", "print again", "a child", "printf", "bytes \ufffdä"]
    expected += ["a descriptor", "", "100%", "x" * 100_000, "x" * 100_000, "x" * 50_000, "    indented"]
    assert lines == [*expected, "no end of line"]


def test_log_records_are_in_the_log_as_the_user_configures_it(workers, capsys):
    def main():
        logging.getLogger("mine.own").info("step %d", 3)
        logging.getLogger("rayps.runtime").info("not the user's")
        logging.getLogger("mine").debug("not asked for")
        try:
            [][1]
        except IndexError:
            logging.getLogger("mine").exception("it failed")
            traceback.print_exc()
        logging.basicConfig(format="%(message)s, configured")
        logging.getLogger("mine").info("later")

    rayps.run(main, workers=1, cluster=workers)
    lines = shown(capsys)
    assert lines[:3] == ["INFO mine.own: step 3", "ERROR mine: it failed", "Traceback (most recent call last):"]
    assert lines[3].startswith('  File "') and lines[4] == "    [][1]"
    assert lines.count("IndexError: list index out of range") == lines.count("    [][1]") == 2
    assert lines[-1] == "later, configured" and not any("not " in line for line in lines)


def test_a_writer_is_never_blocked_and_a_flood_is_counted(workers, capsys):
    def main():
        with_lock = ctypes.PyDLL(None)  # no thread of Python can run during a call, such as one that reads a pipe
        block = b"0123456789\n" * 400_000
        assert with_lock.write(1, block, len(block)) == len(block)
        faulthandler.dump_traceback(all_threads=False)
        print("the last line")

    rayps.run(main, workers=1, cluster=workers, timeout=120.0)
    lines = shown(capsys)
    drops = [int(line.split()[0][1:]) for line in lines if line.endswith("lines dropped]")]
    kept = [line for line in lines if not line.endswith("lines dropped]")]
    told = kept.index(next(line for line in kept if "most recent call first" in line))
    assert sum(drops) + told == 400_000 and set(kept[:told]) == {"0123456789"}
    assert kept[-1] == "the last line" and all(line.startswith("  File ") for line in kept[told + 1 : -1])


def test_a_process_that_a_worker_leaves_behind_does_not_hold_it(workers, capsys):
    def main():
        print("before")
        left = subprocess.Popen(["sleep", "600"])
        return left.pid

    (left,) = rayps.run(main, workers=1, cluster=workers)
    try:
        assert shown(capsys) == ["before"]
    finally:
        with contextlib.suppress(ProcessLookupError):  # Ray may have ended it with its worker
            os.kill(left, 9)


@pytest.mark.ray
def test_the_last_words_before_a_death_are_in_its_error(ray_cluster):
    def main():
        print("python was here")
        os.write(2, b"kernel.cu:12: Assertion `i < n` failed\n")
        os.abort()

    with pytest.raises(ActorDied) as caught:
        rayps.run(main, workers=1, cluster=ray_cluster, progress=False)
    said = str(caught.value).partition("the last output of worker-0:\n")[2].splitlines()
    assert said[:2] == ["python was here", "kernel.cu:12: Assertion `i < n` failed"]


class Speaks(Parses):
    """A workload that prints and logs, to the end."""

    def loss(self, model, batch):
        logging.getLogger("mine").info("a loss")
        return (model(batch.x) - batch.y).square().mean()

    def evaluate(self, model, batch):
        found = {"loss": self.loss(model, batch)}
        os.system("echo evaluated")
        print("without an end", end="")
        return found


@pytest.mark.ray
def test_a_workloads_words_arrive_to_the_last(ray_cluster, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py"])
    rayps.train(Speaks(), workers=1, epochs=2, address=ray_cluster.address, progress=True)
    lines = shown(capsys)
    assert lines[0] == "INFO mine: a loss"
    assert sum("evaluated" in line for line in lines) >= 2 and lines[-1] == "without an end"


# ---- environment variables of a job

ENVIRONMENT = """
import os, subprocess, sys, torch, rayps

def train_fn():
    import argparse
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    found = [os.environ.get(name, "none") for name in ("GIVEN", "FROM_FILE", "PATH_LIKE")]
    print("arguments", sys.argv, parser.parse_args().lr)
    # what is printed is in the log: the lengths here, not the values
    print("lengths", *map(len, found), flush=True)
    subprocess.run(["sh", "-c", 'test "$FROM_FILE" = "$(cat secret)" && echo the child has it'], check=True)
    print("spare", "SPARE" in os.environ)
"""


@pytest.mark.ray
def test_a_jobs_variables_reach_its_workers_and_nobody_sees_their_values(ray_service, tmp_path, monkeypatch, capsys):
    (tmp_path / "secret").write_text("s3cr3t-of-a-file\n")
    (tmp_path / "loop.py").write_text(ENVIRONMENT)
    client = ray_service.client()
    given = {"GIVEN": "g1ven-here", "FROM_FILE": f"@{tmp_path}/secret", "PATH_LIKE": "@@home"}
    job = client.submit(run="loop.py:train_fn", working_dir=tmp_path, upload=False, env=given)
    plain = {"GIVEN": "again-g1ven", "FROM_FILE": "s3cr3t-of-a-file"}
    job.wait(timeout=240)
    assert job.data["status"] == "SUCCEEDED", job.data
    texts = [line["text"] for line in job.logs()]
    assert texts == ["arguments ['loop.py'] 0.1", "lengths 10 16 5", "the child has it", "spare False"]
    assert job.data["spec"]["env"] == ["FROM_FILE", "GIVEN", "PATH_LIKE"]
    answers = [job.data, client.call("GET", "/api/v1/jobs"), list(job.events()), client.call("GET", "/api/v1/cluster")]
    seen = json.dumps(answers) + ray_service.log.read_text()
    for path in (ray_service.state / "jobs" / job.id).rglob("*"):
        if path.is_file() and path.name != "job.json":  # which only the owner can read; it has what was submitted
            seen += path.read_bytes().decode("utf-8", "replace")
    assert "g1ven-here" not in seen and "s3cr3t" not in seen
    row = ray_service.state / "jobs" / job.id / "job.json"
    assert "s3cr3t" not in row.read_text() and row.stat().st_mode & 0o077 == 0
    with pytest.raises(ConfigError, match="FROM_FILE, GIVEN, PATH_LIKE, whose values the service does not tell"):
        client.submit_again(job.id)
    again = client.submit_again(job.id, env=plain)  # in processes that may be warm: nothing of the first job is left
    monkeypatch.setenv("RAYPS_URL", ray_service.url)
    monkeypatch.setenv("RAYPS_STATE_DIR", str(ray_service.state))
    command = ["submit", "--run", "loop.py:train_fn", "--working-dir", str(tmp_path), "--no-upload"]
    capsys.readouterr()
    assert main([*command, "--env", "GIVEN=g1ven=twice", "--env", "PATH_LIKE=x"]) == 0
    told = client.job(capsys.readouterr().out.strip())
    assert main(["get", told.id]) == 0
    said = capsys.readouterr().out
    assert "GIVEN, PATH_LIKE" in said and "g1ven" not in said
    told.stop()
    again.wait(timeout=240)
    assert "lengths 11 16 4" in [line["text"] for line in again.logs()], again.data


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"RAYPS_TOKEN": "geheim"}, "env.RAYPS_TOKEN is refused: RAYPS_"),
        ({"RAY_ADDRESS": None}, "env.RAY_ADDRESS is refused"),
        ({"PATH": "geheim"}, "env.PATH is refused"),
        ({"LD_PRELOAD": "geheim"}, "env.LD_PRELOAD is refused"),
        ({"1A": "geheim"}, "env has the name '1A'"),
        ({"A=B": "geheim"}, "env has the name 'A=B'"),
        ({"TOKEN": 4711}, "env.TOKEN is no text"),
        ({"TOKEN": "geheim\0"}, "env.TOKEN is no text"),
        ({"TOKEN": "@geheim"}, "env.TOKEN names a file by a relative path"),
        (["TOKEN=geheim"], "env is no mapping"),
        ({f"A{i}": "geheim" for i in range(101)}, "env has 101 variables"),
        ({"TOKEN": "geheim" * 20_000}, "give at most 100 of 100000"),
    ],
)
def test_variables_are_refused_by_name_without_their_value(env, says):
    with pytest.raises(ConfigError) as caught:
        JobSpec.from_dict({"run": "loop.py:train_fn", "env": env})
    assert says in str(caught.value)
    assert "geheim" not in str(caught.value) and "4711" not in str(caught.value)


def test_a_variable_that_is_given_twice_is_refused_without_its_values():
    assert variables_of(["A=1", "B", "C=a=b"]) == {"A": "1", "B": None, "C": "a=b"}
    for second in ("A=geheim2", "A", "A=geheim"):
        with pytest.raises(ConfigError, match="--env A was given twice") as caught:
            variables_of(["A=geheim", second])
        assert "geheim" not in str(caught.value)


def test_variables_are_looked_up_where_the_service_is(tmp_path):
    (tmp_path / "key").write_text("of a file\n")
    given = {"A": "text", "B": f"@{tmp_path}/key", "C": None, "D": "@@home", "E": f"@{tmp_path}", "F": None}
    spec = JobSpec.from_dict({"run": "loop.py:train_fn", "env": given, "requirements": ["six"]})
    assert JobSpec.of_stored(json.loads(json.dumps(spec.to_dict()))) == spec
    found = spec.environment.looked_up({"C": "own"})
    assert found == {"A": "text", "B": "of a file", "C": "own", "D": "@home"}
    with pytest.raises(ConfigError, match=rf"env\.E: the file {tmp_path} of the service's machine is no readable text"):
        spec.environment.must_have(found)
    with pytest.raises(ConfigError, match=r"env\.F: the service's environment has no F"):
        spec.environment.must_have(found | {"E": ""})
    assert "text" not in repr(spec) and "of a file" not in repr(JobCode("", variables=tuple(found.items())))


def test_variables_leave_the_process_with_the_job(monkeypatch):
    monkeypatch.setenv("KEPT", "before")
    opened = enter_code(JobCode("", variables=(("KEPT", "of the job"), ("NEW", "of the job"))))
    assert os.environ["KEPT"] == os.environ["NEW"] == "of the job"
    opened.close()
    assert os.environ["KEPT"] == "before" and "NEW" not in os.environ
    assert not JobCode("", variables=(("A", "1"),)).may_be_warm and JobCode("").may_be_warm

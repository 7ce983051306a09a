"""Laws of each kind of job that the driver runs: the rows of its workers, and the traces of its steps."""

import json

import pytest
from small_work import Small

import rayps
from rayps.cluster.local import LocalCluster
from rayps.core.job.job_status import Status
from rayps.core.job.records import WorkerLine
from rayps.runtime.driver.driven_job import DrivenJob
from rayps.runtime.driver.driver import Driver
from rayps.runtime.driver.workload_job import WorkloadJob
from rayps.runtime.own_loop.loop_job import LoopJob
from rayps.runtime.records.journal import Journal
from rayps.strategies.job import JobSpec

STEPS = 12


def train_fn():
    work = Small(n=72)
    model = work.model()
    optimizer = work.optimizer(list(model.parameters()))
    rayps.wrap(model, optimizer)
    for batch in rayps.batches(work.data()):  # 12 of each worker
        optimizer.zero_grad()
        loss = ((model(batch.x) - batch.y) ** 2).mean()
        loss.backward()
        optimizer.step()
        rayps.log(loss=loss, samples=batch.size)


def workload_job(journal, workers, **options):
    spec = JobSpec("small_work:Small", workers=workers, steps=STEPS, timeout=20.0)
    return WorkloadJob(Small(n=72), spec, journal, capture=False, **options)


def loop_job(journal, workers, **options):
    return LoopJob(train_fn, JobSpec(run="test:loop", workers=workers, timeout=20.0), journal, **options)


KINDS = {WorkloadJob: workload_job, LoopJob: loop_job}
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def kinds(base=DrivenJob):
    below = {each for kind in base.__subclasses__() for each in kinds(kind) if each.__module__.startswith("rayps.")}
    return below or {base}


def test_each_kind_is_here():
    assert kinds() == set(KINDS)


@each_kind
def test_a_worker_has_each_column_of_the_table(kind):
    shown = []
    job = KINDS[kind](Journal(on_progress=shown.append), 2)
    assert Driver(job).run(LocalCluster()).status is Status.SUCCEEDED
    lines = shown[-1]["workers"]
    assert [line["rank"] for line in lines] == [0, 1]
    for line in lines:
        assert set(line) == set(WorkerLine.__annotations__) - {"part"}  # that of a replica of several workers
        assert line["host"] and line["pid"] and line["status"] == "finished" and line["round"] == STEPS
        shares = [line["compute"], line["wait"], line["move"], line["data"]]
        assert min(shares) >= 0 and line["compute"] > 0 and 0 < sum(shares) <= 1.001
        assert line["samples_per_second"] > 0


def rounds_in(path):
    names = {str(event.get("name")) for event in json.loads(path.read_text())["traceEvents"]}
    return sorted(int(each.removeprefix("ProfilerStep#")) for each in names if each.startswith("ProfilerStep#")), names


@each_kind
def test_a_trace_has_the_same_steps_with_all_that_they_contain(kind, tmp_path):
    journal = Journal()
    driver = Driver(KINDS[kind](journal, 1, profile=tmp_path))
    assert driver.run(LocalCluster()).status is Status.SUCCEEDED
    [path] = tmp_path.iterdir()
    steps, names = rounds_in(path)
    assert path.name == "rank-0.json" and steps == [3, 4, 5]
    assert {"aten::addmm", "Optimizer.step#SGD.step"} <= names and any("Backward" in name for name in names)
    assert [each["path"] for each in journal.events if each["kind"] == "profiled"] == [str(path)]


@each_kind
def test_a_trace_that_is_there_is_not_written_again(kind, tmp_path):
    (tmp_path / "rank-0.json").write_text("{}")
    job = KINDS[kind](Journal(), 1, profile=tmp_path)
    assert Driver(job).run(LocalCluster()).status is Status.SUCCEEDED
    assert (tmp_path / "rank-0.json").read_text() == "{}"

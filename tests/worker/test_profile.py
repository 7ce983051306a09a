"""`profile=`: a trace of a few rounds for each worker, as Chrome's JSON."""

import gzip
import json

import pytest
from process_cluster import ProcessCluster
from rayps_client.errors import ConfigError
from small_work import Small, distance, train

from rayps.worker.profile import RoundTrace, TracedRounds


def rounds_in(path):
    names = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
    return sorted(int(name.removeprefix("ProfilerStep#")) for name in names if str(name).startswith("ProfilerStep#"))


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [(1, (0, 0, 1)), (2, (0, 1, 1)), (3, (0, 1, 2)), (4, (0, 1, 3)), (5, (1, 1, 3)), (6, (2, 1, 3)), (99, (2, 1, 3))],
)
def test_how_many_rounds_are_traced(rounds, expected):
    assert TracedRounds.of(rounds) == expected


@pytest.mark.parametrize("strategy", ["all_reduce", "parameter_server:shards=2", "local_sgd:period=2", "fedavg"])
def test_a_trace_is_written_and_changes_nothing(tmp_path, strategy):
    from federated_work import Fed

    work = Fed()
    traced = train(work, strategy, steps=8, profile=tmp_path / "traces")
    assert [path.name for path in (tmp_path / "traces").iterdir()] == ["rank-0.json"]
    assert rounds_in(tmp_path / "traces" / "rank-0.json") == [3, 4, 5]
    event = next(each for each in traced.events if each["kind"] == "profiled")
    assert event["path"] == str(tmp_path / "traces" / "rank-0.json")
    assert distance(traced.model(), train(work, strategy, steps=8).model()) == 0


@pytest.mark.parametrize("steps", [1, 3])
def test_a_short_run_has_a_trace(tmp_path, steps):
    train(Small(), steps=steps, profile=tmp_path / "traces")
    assert rounds_in(tmp_path / "traces" / "rank-0.json")


def test_workers_of_one_process_share_one_profiler(tmp_path):
    found = train(Small(), workers=2, steps=8, profile=tmp_path / "traces")
    [trace] = (tmp_path / "traces").iterdir()  # workers in step begin together, so one of them has the profiler
    assert rounds_in(trace) == [3, 4, 5]
    assert [event["path"] for event in found.events if event["kind"] == "profiled"] == [str(trace)]
    other = {"rank-0.json": "worker-1", "rank-1.json": "worker-0"}[trace.name]
    warnings = [event["message"] for event in found.events if event["kind"] == "warning"]
    assert warnings == [f"{other} has no trace: another worker of its process is traced"]
    # the next run has the profiler again
    train(Small(), workers=1, steps=8, profile=tmp_path / "more")
    assert (tmp_path / "more" / "rank-0.json").exists()


def test_each_process_has_a_trace(tmp_path):
    cluster = ProcessCluster()
    try:
        train(Small(), workers=2, steps=8, profile=tmp_path / "traces", cluster=cluster)
    finally:
        cluster.close()
    assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == ["rank-0.json", "rank-1.json"]


def test_an_earlier_trace_is_not_replaced(tmp_path):
    train(Small(), steps=2, profile=tmp_path)
    before = (tmp_path / "rank-0.json").read_bytes()
    with pytest.raises(ConfigError, match="has traces of an earlier run"):
        train(Small(), steps=2, profile=tmp_path)
    assert (tmp_path / "rank-0.json").read_bytes() == before


@pytest.mark.parametrize("given", [True, False, 3])
@pytest.mark.parametrize("strategy", ["all_reduce", "all_reduce:privacy=dp(noise_multiplier=1.1,clip=1.0,delta=1e-5)"])
def test_what_is_no_folder_is_refused(given, strategy):
    with pytest.raises(ConfigError, match=f"profile is {given!r}: give a new folder"):
        train(Small(), strategy, steps=2, profile=given)


def test_a_failed_run_releases_the_profiler(tmp_path):
    class Fails(Small):
        def loss(self, model, batch):
            raise ValueError("no")

    with pytest.raises(Exception, match="no"):
        train(Fails(), steps=8, profile=tmp_path / "failed")
    train(Small(), steps=8, profile=tmp_path / "good")
    assert (tmp_path / "good" / "rank-0.json").exists()


def test_a_trace_that_is_not_begun_does_nothing():
    found, others = [], []
    first, second = RoundTrace(4, found.append), RoundTrace(4, others.append)
    assert (first.started, second.started) == (True, False)
    for _ in range(4):
        second.round_over()
    second.close()
    third = RoundTrace(4, others.append)
    assert not third.started, "the second one has not released the profiler of the first"
    for _ in range(4):
        first.round_over()
    first.close()
    assert len(found) == 1 and others == []
    assert json.loads(gzip.decompress(found[0]))["traceEvents"]
    last = RoundTrace(1, others.append)
    assert last.started, "the first one has released the profiler"
    last.close()

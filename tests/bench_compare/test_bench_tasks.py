"""The table of final losses: strategies in step reach the plain loop's loss, and refusals are told."""

import json

import pytest
from rayps_client.errors import ConfigError
from required_module import required

from benchmarks.__main__ import main
from benchmarks.algorithms.tasks import STRATEGIES, TaskRow, bench_tasks
from rayps.cluster.local import LocalCluster


@pytest.fixture
def cluster():
    found = LocalCluster()
    yield found
    found.close()


def test_a_strategy_in_step_reaches_the_plain_loops_loss(cluster):
    (row,) = bench_tasks(cluster, ["convnet"], ["all_reduce"], steps=4)
    assert row.difference == pytest.approx(0, abs=1e-3) and row.loss < row.first - 0.1


def test_rows_by_id_and_a_refusal(cluster):
    hybrid, pipeline = bench_tasks(cluster, ["recommender"], ["all_reduce", STRATEGIES[4]], steps=3)
    assert hybrid.strategy == "hybrid:servers=1,staleness=0" and hybrid.difference == pytest.approx(0, abs=1e-3)
    assert pipeline.loss is None and pipeline.difference is None and pipeline.refused


def test_micro_batches_weigh_by_their_words(cluster):
    required("transformers")
    (row,) = bench_tasks(cluster, ["lm"], ["all_reduce"], steps=2)
    assert row.difference == pytest.approx(0, abs=1e-2) and row.loss < row.first


def test_a_pipeline_trains_the_language_model_in_batches_of_its_own(cluster):
    required("transformers")
    (row,) = bench_tasks(cluster, ["lm"], [STRATEGIES[4]], steps=2)
    assert not row.refused and row.difference == pytest.approx(0, abs=1e-2) and row.loss < row.first


def test_an_unknown_task_is_refused(cluster):
    with pytest.raises(ConfigError, match="no task 'chess'; use some of convnet, lm, recommender"):
        bench_tasks(cluster, ["chess"])


@pytest.mark.parametrize("option", ["--output=table", "--json"])
def test_the_command_prints_why_a_strategy_is_refused(monkeypatch, capsys, option):
    """A column for it had no room left on a terminal of 80 columns."""
    rows = [TaskRow("lm", "all_reduce", 3, 0.5, 0.5, 1.0), TaskRow("lm", "x", 3, None, None, None, "it has tables")]
    monkeypatch.setattr("rayps.cli.measure.on_cluster", lambda address, cpus, measure: rows)
    assert main(["tasks", option]) == 0
    out = capsys.readouterr().out
    if option == "--json":
        assert [row["refused"] for row in json.loads(out)] == ["", "it has tables"]
    else:
        assert out.splitlines()[-1] == "lm, x: refused: it has tables" and len(out.splitlines()) == 4

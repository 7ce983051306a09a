"""The table of final losses: strategies in step reach the plain loop's loss, and refusals are told."""

import pytest
from required_module import required

from benchmarks.tasks import STRATEGIES, bench_tasks
from rayps.cluster.local import LocalCluster
from rayps.core.errors import ConfigError


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

"""The example of a recommender, whose rows are in a sparse table."""

import pytest
from test_examples import module

import rayps
from rayps.cluster.local import LocalCluster


def test_late_departures_are_foretold_by_servers_as_by_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    made, cluster = module("recommender", monkeypatch), LocalCluster()
    work, steps = made.LateDeparture(), 60
    try:
        result = rayps.train(work, strategy="hybrid:servers=2", workers=2, steps=steps, cluster=cluster, progress=False)
    finally:
        cluster.close()
    found, alone = made.auc(work, result.model()), made.auc(work, made.single(work, 1, 2 * steps))
    assert found > 0.70 and abs(found - alone) < 0.03
    assert made.auc(work, work.model()) == pytest.approx(0.5, abs=0.05)


def test_a_generated_table_is_as_large_as_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made, cluster = module("recommender", monkeypatch), LocalCluster()
    try:
        result = rayps.train(
            made.Generated(25_000), strategy="hybrid:servers=2", workers=2, cluster=cluster, progress=False
        )
    finally:
        cluster.close()
    table = result.model()["rows"]
    assert sum(segment.rows for segment in table._client().session.segments.values()) == 25_000

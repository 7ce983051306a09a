"""`python -m benchmarks admm`: its rows on a few digits, and what it refuses."""

import pytest
from rayps_client.errors import ConfigError

from benchmarks.algorithms.admm import SortedDigits, bench_admm, list_contenders
from benchmarks.federated.robust import FOLDER
from rayps.strategies.catalogue import parse


def test_each_worker_that_keeps_its_rows_has_few_labels():
    data = SortedDigits(FOLDER, 4, 400, 10, 0.1, 0).data()
    data.keeps_rows = True
    held = [labels(data, rank) for rank in range(4)]
    assert max(map(len, held)) <= 5 and set.union(*held) == set(range(10))
    data.keeps_rows = False
    assert len(labels(data, 0)) == 10


def labels(data, rank):
    return {int(y) for batch in data.batches(rank=rank, size=4, seed=0, epoch=1) for y in batch.y}


def test_a_row_for_each_strategy():
    texts = ["all_reduce", "parallel_sgd:rounds=2,shuffle=false", "admm:penalty=1,local_steps=4,balance=false"]
    rows = bench_admm(2, texts, epochs=2, rows=160, batch=10, hidden=0)
    assert [row.strategy for row in rows] == texts and [row.meetings for row in rows] == [16, 2, 4]
    assert [row.rows for row in rows] == ["dealt anew", "sorted by label", "sorted by label"]
    assert [row.moved for row in rows] == [pytest.approx(160 / 2 * 785 / 1e6), 0, 0]
    assert all(0.1 < row.last <= row.best <= 1 and row.bytes > 0 for row in rows)
    assert rows[0].primal is None and rows[2].primal is not None
    assert rows[0].last > rows[1].last


def test_what_it_refuses():
    for wrong in ({"workers": 1}, {"epochs": 0}, {"rows": 0}, {"seeds": 0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            bench_admm(**wrong)
    with pytest.raises(ConfigError, match=r"there is no strategy"):
        bench_admm(2, ["nothing"])
    assert all(parse(text) for text in list_contenders(3, 5, 0.1))

"""Rows and gradients of tables that are not finite."""

import math
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from small_work import kinds, train
from test_finite import TABLES, Spoilt, fails, not_finite_in, reseal
from test_hybrid import Films

from rayps import Hybrid


class SickFilms(Films):
    """As `Sick`, with sparse tables. `rows`: the gradient of the rows is spoilt; else that of the dense part."""

    def __init__(self, at, rows, **options):
        super().__init__(**options)
        self.at, self.rows, self.calls = at, rows, 0

    def loss(self, model, batch):
        self.calls += threading.current_thread().name == "worker-1" and torch.is_grad_enabled()
        if self.calls < self.at:
            return super().loss(model, batch)
        part = model.tables.users if self.rows else model.dense
        hook = part.register_forward_hook(
            lambda module, given, output: Spoilt.apply(output, math.nan) if output.requires_grad else output
        )
        try:
            return super().loss(model, batch)
        finally:
            hook.remove()


@pytest.mark.parametrize("rows", [True, False], ids=["rows", "dense"])
@pytest.mark.parametrize("strategy", TABLES, ids=str)
def test_with_sparse_tables_too(tmp_path, strategy, rows):
    error = fails(SickFilms(5, rows), strategy, tmp_path, steps=5)
    assert (error.data["rank"], error.data["round"]) == (1, 4), error
    assert error.data["parameter"] in str(error)
    if rows:
        assert "users" in error.data["parameter"]
        assert isinstance(error.data["id"], int)
    for path in tmp_path.rglob("rows-*.parquet"):
        assert not_finite_in(path) == []


class LargeFilms(Films):
    def loss(self, model, batch):
        loss = super().loss(model, batch)
        return loss.detach() + 1e200 * (loss - loss.detach())

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.0)


@pytest.mark.parametrize("rule", ["sgd:lr=1e150", "adagrad:lr=0.1"], ids=["row", "state"])
@pytest.mark.parametrize("strategy", TABLES, ids=str)
def test_a_row_that_overflows_is_no_success(tmp_path, strategy, rule):
    workers = 2 if strategy.tables.topology.in_step else 1
    error = fails(LargeFilms(rule=rule), strategy, tmp_path, steps=1, workers=workers)
    assert "table" in str(error)
    assert error.data["round"] == 0
    assert isinstance(error.data["id"], int)


def test_resume_falls_back_where_rows_of_a_table_are_not_finite(tmp_path):
    strategy = Hybrid(staleness=0)
    train(Films(), strategy, workers=2, steps=3, checkpoint=tmp_path)
    train(Films(), strategy, workers=2, steps=6, checkpoint=tmp_path, resume=True)
    newest = tmp_path / "step-00000006"
    for path in newest.rglob("rows-*.parquet"):
        table = pq.read_table(path)
        if len(table):
            width = table["row"].type.list_size
            flat = np.array(table["row"].combine_chunks().flatten())
            flat[0] = math.nan
            column = pa.FixedSizeListArray.from_arrays(pa.array(flat), width)
            pq.write_table(table.set_column(table.schema.get_field_index("row"), "row", column), path)
            break
    reseal(newest)
    result = train(Films(), strategy, workers=2, steps=8, checkpoint=tmp_path, resume=True)
    assert "step-00000003" in next(e for e in result.events if e["kind"] == "resumed")["message"]
    assert "warning" in kinds(result)

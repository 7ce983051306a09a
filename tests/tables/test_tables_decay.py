"""Weight decay of tables' rows."""

import pytest
import torch
from test_decay import DECAY, ROWS, WORKERS, Halves, numbers
from torch import nn

from rayps import ParameterServer
from rayps.ps.protocol.space import SparseTable
from rayps.ps.tables.table_segment import TableSegment
from rayps.ps.tables.wire_format import encode_push


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_tables_are_decayed_by_the_share_of_each_push_that_touches_them(name):
    knobs = {"name": "sgd" if name == "momentum" else name, "lr": 0.1, "weight_decay": DECAY}
    knobs |= {"momentum": 0.9} if name == "momentum" else {}
    table = SparseTable("t", 3, 1, dtype="float64", optimizer=knobs)
    strategy = ParameterServer(staleness=None)
    segment, copy = (TableSegment(table, 0, strategy, WORKERS) for _ in range(2))
    ids = torch.arange(4).numpy()
    start = torch.from_numpy(segment.store.read(ids, segment.store.find(ids)).copy())
    law = nn.Parameter(start.clone())
    slow = ROWS[name]([law], DECAY / WORKERS)
    for push in range(8):
        law.grad = numbers(push + 1, 4, 3) / WORKERS
        slow.step()
        for change in segment.push(push % WORKERS, push // WORKERS, 1.0, encode_push(ids, numbers(push + 1, 4, 3))):
            copy.replay(change)
    for each in (segment, copy):
        found = torch.from_numpy(each.store.read(ids, each.store.find(ids)))
        assert torch.allclose(found, law.detach(), rtol=0, atol=1e-14)


def test_a_copy_of_a_table_decays_as_its_primary():
    table = SparseTable("t", 3, 1, dtype="float64", optimizer={"name": "sgd", "lr": 0.1, "weight_decay": DECAY})
    segment, copy = (TableSegment(table, 0, Halves(), 2) for _ in range(2))
    ids = torch.arange(4).numpy()
    for step in range(3):
        for rank in range(2):
            for change in segment.push(rank, step, 1.0, encode_push(ids, numbers(2 * step + rank, 4, 3))):
                copy.replay(change)
    rows = [each.store.read(ids, each.store.find(ids)) for each in (segment, copy)]
    assert (rows[0] == rows[1]).all()

"""Rows of tables follow the schedule of the learning rate."""

import pytest
import torch
from small_work import SCHEDULES
from test_learning_rate import KNOBS, recipe
from test_ps_job_tables import ROWS as TALLY_ROWS
from test_ps_job_tables import Tally
from test_ps_job_tables import values as tally_values
from torch import nn

import rayps
from rayps import ParameterServer
from rayps.cluster.local import LocalCluster
from rayps.ps.protocol.space import SparseTable
from rayps.ps.tables.row_optimizers import Scheduled
from rayps.ps.tables.table_segment import TableSegment
from rayps.ps.tables.wire_format import encode_push
from rayps.tensors import learning_rate


@pytest.mark.parametrize("staleness", [0, None])
@pytest.mark.parametrize(
    ("kind", "schedule"),
    [
        ("sgd", "onecycle"),
        ("sgd", "warm"),
        ("adagrad", "function"),
        ("adagrad", "cosine"),
        ("adam", "onecycle"),
        ("adam", "cosine"),
    ],
)
def test_rows_of_tables_follow_it_and_so_do_their_copies(kind, schedule, staleness):
    knobs, make = KNOBS[kind]
    table = SparseTable("t", 3, 1, dtype="float64", optimizer=knobs)
    scheduled = Scheduled(recipe(schedule), learning_rate.Ticks())
    segment, copy = (
        TableSegment(table, 0, ParameterServer(staleness=staleness), 1, scheduled=scheduled) for _ in range(2)
    )
    ids = torch.arange(4).numpy()
    law = nn.Parameter(torch.from_numpy(segment.store.read(ids, segment.store.find(ids)).copy()))
    slow = make([law])
    like = torch.optim.Adam([law], lr=0.01) if kind == "adam" else slow
    scheduler = SCHEDULES[schedule](like)
    if not hasattr(scheduler, "step"):
        scheduler = torch.optim.lr_scheduler.LambdaLR(like, scheduler)
    for step in range(9):
        grad = torch.randn(4, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        law.grad = grad.clone()
        if kind == "adam":
            law.grad = torch.sparse_coo_tensor(torch.arange(4).view(1, -1), grad, grad.shape).coalesce()
            slow.param_groups[0].update({key: like.param_groups[0][key] for key in ("lr", "betas")})
        slow.step()
        like._opt_called = True
        scheduler.step()
        for change in segment.push(0, step, 1.0, encode_push(ids, grad)):
            copy.replay(memoryview(change))
        for each in (segment, copy):
            assert torch.equal(torch.from_numpy(each.store.read(ids, each.store.find(ids))), law.detach())


class Falling(Tally):
    def schedule(self, optimizer):
        return (lambda step: 1 / (1 + step)) if "table" in optimizer.param_groups[0] else None


@pytest.mark.parametrize(
    "strategy",
    ["hybrid:servers=2", "hybrid:servers=2,staleness=0", "parameter_server:shards=2,replicas=1,staleness=none"],
)
def test_each_push_of_a_row_is_applied_with_the_rate_of_its_round(strategy):
    work = Falling(segments=3)
    cluster = LocalCluster()
    try:
        result = rayps.train(work, strategy=strategy, cluster=cluster, workers=2, epochs=2, progress=False)
    finally:
        cluster.close()
    law = torch.zeros(TALLY_ROWS, dtype=torch.float64)
    for epoch in range(2):
        for rank in range(2):
            batches = list(work.data().batches(rank=rank, size=2, seed=0, epoch=epoch))
            for index, batch in enumerate(batches):
                law[batch.x] -= 1 / (1 + epoch * len(batches) + index) / 2
    assert torch.allclose(tally_values(result.model()), law.view(-1, 1).expand(-1, 2), atol=1e-14, rtol=0)

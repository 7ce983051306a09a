"""Rows of tables on a device, on the CPU's twin and on a GPU where there is one. The law is the same job without it."""

import pytest
import torch
from small_work import distance
from test_device_server import CLOSE, KINDS, made
from test_hybrid import Films, both, plain

import rayps
from rayps.cluster.local import LocalCluster
from rayps.ps.tables import client, embedding
from rayps.ps.tables.row_transfer import RowTransfer
from rayps.worker.loops import server_steps


@pytest.fixture(params=KINDS)
def device(request):
    return made(request.param)


@pytest.fixture
def on_device(device, monkeypatch):
    """Workers have their vectors and the rows of tables on the device."""
    if device.kind == "cpu":
        monkeypatch.setattr(client, "make_row_transfer", lambda place, dtype: RowTransfer(device, dtype))
        monkeypatch.setattr(server_steps, "transfer_device", lambda name: device)

    def run(work, strategy, workers, epochs=2):
        resources = {"cpu": 1, "gpu": 0.5} if device.kind == "cuda" else {"cpu": 1}
        cluster = LocalCluster(gpus=64.0)
        try:
            return rayps.train(
                work,
                strategy=strategy,
                workers=workers,
                epochs=epochs,
                cluster=cluster,
                resources=resources,
                progress=False,
            )
        finally:
            cluster.close()

    return run


@pytest.mark.parametrize("told", [False, True], ids=["plain", "prefetch"])
@pytest.mark.parametrize("strategy", ["hybrid:servers=2,staleness=0", "parameter_server:shards=2"])
def test_a_job_in_step(on_device, strategy, told):
    work = Films(told)
    found = on_device(work, strategy, workers=2)
    assert distance(both(found.model()), both(plain(work, 2)[0])) < CLOSE


def test_prefetched_rows(on_device):
    """One worker without a bound: rows arrive a round before they are used, by the same thread that pushes."""
    strategy = "hybrid:servers=2,staleness=none"
    found = on_device(Films(True), strategy, workers=1)
    law = rayps.train(
        Films(True),
        strategy=strategy,
        workers=1,
        epochs=2,
        cluster=LocalCluster(),
        resources={"cpu": 1},
        progress=False,
    )
    assert distance(both(found.model()), both(law.model())) < CLOSE


def test_prefetched_rows_beside_a_dense_part_on_servers(on_device):
    """The prefetch may or may not see the push before: the job learns."""
    found = on_device(Films(True), "parameter_server:shards=2,staleness=none", workers=1, epochs=10)
    losses = found.history["loss"].to_pylist()
    epoch = len(losses) // 10
    assert sum(losses[-epoch:]) < 0.8 * sum(losses[:epoch])


def ids_on(device, *ids):
    return torch.tensor(ids, device=device.place)


@pytest.mark.parametrize("kind", ["embedding", "bag"])
def test_a_table_in_this_process(device, monkeypatch, kind):
    """Two lookups in one step, ids that repeat, and a scaled push, against the same on the CPU."""
    results = []
    for there in (True, False):
        with monkeypatch.context() as patch:
            if there and device.kind == "cpu":
                patch.setattr(client, "make_row_transfer", lambda place, dtype: RowTransfer(device, dtype))
            place = device if there else made("cpu")
            torch.manual_seed(0)
            options = {"table": "t", "dtype": "float64", "optimizer": "adagrad:lr=0.1"}
            rows = (
                rayps.Embedding(4, **options) if kind == "embedding" else rayps.EmbeddingBag(4, mode="sum", **options)
            )
            weight = torch.ones(4, dtype=torch.float64, device=place.place, requires_grad=True)
            for step in range(3):
                shape = (2, 2) if kind == "bag" else (4,)
                one = rows(ids_on(place, 3, 1, 3, step).view(shape))
                two = rows(ids_on(place, 1, 7, 7, 9).view(shape))
                assert one.device.type == place.place.type
                ((one * weight).square().sum() + two.sum()).backward()
                table = rows._bound_tables()
                table.scale(0.5)
                assert table.gradient_fault() is None
                results.append(table.square())
                embedding.step(rows)
            results.append(rows(ids_on(place, 0, 1, 2, 3, 7, 9).view(-1, 1)).detach().cpu())
    half = len(results) // 2
    for a, b in zip(results[:half], results[half:], strict=True):
        assert torch.allclose(a, b, rtol=CLOSE if device.kind == "cuda" else 0.0, atol=0.0)


def test_a_gradient_that_is_not_finite_is_found(device, monkeypatch):
    if device.kind == "cpu":
        monkeypatch.setattr(client, "make_row_transfer", lambda place, dtype: RowTransfer(device, dtype))
    rows = rayps.Embedding(4, table="t")
    rows(ids_on(device, 5, 8)).sum().mul(float("inf")).backward()
    assert rows._bound_tables().gradient_fault() == ("t", 5)


@pytest.mark.parametrize("count", [0, 1, 5000])
def test_uploads_of_rows(device, count):
    transfer = RowTransfer(device, torch.float32)
    rows = torch.arange(count * 300.0).view(count, 300)
    law = rows.clone()
    upload = transfer.uploads.start(rows)
    rows.zero_()
    assert torch.equal(transfer.uploads.take(upload).cpu(), law)
    back = transfer.download(law.to(device.place))
    assert torch.equal(back.wait(), law)

"""On a machine with a CUDA device: a worker that asks for one trains on it. Elsewhere skipped, saying so."""

import pytest
import torch

import rayps
from rayps.cluster.ray_cluster import RayCluster

pytestmark = [pytest.mark.gpu, pytest.mark.ray]


class OnDevice(rayps.Workload):
    def model(self):
        return torch.nn.Linear(4, 2)

    def data(self):
        x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
        return rayps.data.tensors(x, (x.sum(1) > 0).long(), batch_size=8)

    def loss(self, model, batch):
        assert batch.x.is_cuda and next(model.parameters()).is_cuda
        return torch.nn.functional.cross_entropy(model(batch.x), batch.y)


@pytest.mark.parametrize(
    "strategy",
    [
        "all_reduce",
        "parameter_server",
        "parameter_server:staleness=none",
        "all_reduce:compression=int8",
        "parameter_server:compression=fp16",
    ],
)
def test_a_worker_that_asks_for_a_gpu_trains_on_it(strategy):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")
    cluster = RayCluster.local(cpus=2, gpus=1)
    try:
        result = rayps.train(
            OnDevice(),
            strategy=strategy,
            workers=2,
            epochs=2,
            resources={"cpu": 1, "gpu": 0.5},
            progress=False,
            cluster=cluster,
        )
    finally:
        cluster.close()
    assert result.metrics["loss"] < 0.7
    assert not next(result.model().parameters()).is_cuda


class NormedOnDevice(OnDevice):
    sync_batchnorm = True

    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))


def test_batchnorm_is_synchronized_on_it():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")
    cluster = RayCluster.local(cpus=2, gpus=1)
    try:
        options = {"resources": {"cpu": 1, "gpu": 0.5}, "progress": False, "cluster": cluster}
        result = rayps.train(NormedOnDevice(), workers=2, epochs=2, **options)
    finally:
        cluster.close()
    assert result.metrics["loss"] < 0.7
    assert not next(result.model().parameters()).is_cuda

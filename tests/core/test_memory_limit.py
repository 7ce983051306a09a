"""A model whose parameters do not fit the memory limit of a worker trains once it is divided among several.

Real processes, each of which limits its own data (RLIMIT_DATA) when it is given the workload, counted from what it
takes by then: the interpreter, torch, threads.
"""

import multiprocessing
import resource
from pathlib import Path

import pytest
import torch
from process_cluster import ProcessCluster
from rayps_client.errors import WorkloadError
from small_work import plain, train
from torch import nn

import rayps
from rayps.core.job.user_code import lacks_memory, user_code

MB = 10**6
LIMIT = 400 * MB  # a whole model of 100 MB takes its parameters, gradients, a snapshot, a part of a checkpoint, ...


def taken():
    """Bytes of this process that RLIMIT_DATA counts."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()


class Limited(rayps.Workload):
    """On each worker there is so much room; about 100 MB of parameters."""

    def __init__(self, limit=LIMIT):
        self.limit = limit

    def __setstate__(self, state):
        self.__dict__.update(state)
        if multiprocessing.parent_process() is not None:  # a worker's process
            most = taken() + self.limit
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))

    def data(self):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
        return rayps.data.tensors(x, x[:, :1].clone(), batch_size=4)

    def loss(self, model, batch):
        return ((model(batch.x) - batch.y) ** 2).mean()

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=1e-7)


class Deep(Limited):
    """Many equal layers."""

    def model(self):
        blocks = [nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(24)]
        return nn.Sequential(nn.Linear(4, 1024), *blocks, nn.Linear(1024, 1))


class Wide(Limited):
    """One layer that alone is too large."""

    def model(self):
        wide = 4_000_000
        return nn.Sequential(nn.Linear(4, wide), nn.ReLU(), nn.Linear(wide, 1))


def run(work, strategy, workers):
    cluster = ProcessCluster()
    try:
        return train(work, strategy, cluster, workers=workers, steps=2)
    finally:
        cluster.close()


@pytest.mark.parametrize("kind,divided", [(Deep, "pipeline:stages=4"), (Wide, "tensor_parallel:size=4")])
def test_a_model_that_does_not_fit_one_worker_fits_four(kind, divided):
    with pytest.raises(WorkloadError, match=r"ran out of memory") as said:
        run(kind(), "all_reduce", 1)
    assert "pipeline:stages=2, tensor_parallel:size=2" in str(said.value)
    assert len(str(said.value).splitlines()) <= 3
    losses = run(kind(), divided, 4).history.column("loss").to_pylist()
    assert losses == pytest.approx(plain(kind(), steps=2)[1], rel=1e-4)  # of float32; this process has no limit


@pytest.mark.parametrize(
    "error,lacks",
    [
        (MemoryError(), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("shapes cannot be multiplied"), False),
        (OSError(2, "no such file"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_errors_that_say_there_is_no_memory(error, lacks):
    assert lacks_memory(error) is lacks
    with pytest.raises(WorkloadError) as said, user_code("loss"):
        raise error
    assert ("pipeline:stages=2" in str(said.value)) is lacks

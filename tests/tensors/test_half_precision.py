"""Meetings of half-precision models against the same job in float32, whatever the counts of samples."""

import pytest
import torch
from small_work import train, vector
from torch import nn

import rayps
from rayps import ADMM
from rayps.strategies.diloco import DiLoCo
from rayps.strategies.local_sgd import LocalSGD
from rayps.strategies.parallel_sgd import ParallelSGD

HALVES = [torch.float16, torch.bfloat16]
ROWS = 280_000  # of which a worker learns 140,000 in a period: float16 ends at 65,504


class Point(nn.Module):
    """Two numbers and a running mean of what was seen."""

    def __init__(self, dtype):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([3.0, -2.0], dtype=dtype))
        self.register_buffer("seen", torch.zeros(2, dtype=dtype))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.seen.lerp_(x.float().mean(dim=0).to(self.seen.dtype), 0.5)
        return (self.w - x).float().square().mean()


class Many(rayps.Workload):
    """Many rows of two numbers in a few large batches; the second worker's rows differ from the first one's."""

    def __init__(self, dtype, rows=ROWS, batch=35_000, optimizer="sgd"):
        self.dtype, self.rows, self.batch, self.kind = dtype, rows, batch, optimizer

    def model(self):
        return Point(self.dtype)

    def data(self):
        x = torch.tensor([[1.0, 0.5], [0.0, -1.0]]).repeat_interleave(self.rows // 2, dim=0)
        return rayps.data.tensors(x.to(self.dtype), torch.zeros(len(x)), batch_size=self.batch, shuffle=False)

    def evaluation_data(self):
        return rayps.data.tensors(torch.zeros(2, 2, dtype=self.dtype), torch.zeros(2), batch_size=2)

    def loss(self, model, batch):
        return model(batch.x)

    def optimizer(self, params):
        if self.kind == "adam":
            return torch.optim.Adam(params, lr=0.01, eps=1e-3)
        return torch.optim.SGD(params, lr=0.25, momentum=0.5)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    "strategy",
    [
        LocalSGD(period=4),
        LocalSGD(period=4, momentum="average"),
        LocalSGD(period=4, compression="fp16"),
        ParallelSGD(rounds=1, momentum="average"),
        DiLoCo(period=4),
        DiLoCo(period=4, momentum="average", buckets=2),
        DiLoCo(period=4, compression="bf16"),
        DiLoCo(period=3, overlap=1),
        ADMM(local_steps=4, momentum="average"),
    ],
    ids=str,
)
def test_meetings_of_half_precision_equal_those_of_float32(strategy, dtype):
    law = train(Many(torch.float32), strategy, workers=2, epochs=2)
    found = train(Many(dtype), strategy, workers=2, epochs=2)
    start = torch.tensor([3.0, -2.0])
    moved = (vector(law.model()) - start).abs()
    assert moved.min() > 0.1, "the test shows nothing"
    assert (vector(found.model()).float() - vector(law.model())).abs().max() < 24 * torch.finfo(dtype).eps
    (buffer,), (same,) = found.model().buffers(), law.model().buffers()
    assert buffer.dtype == dtype and (buffer.float() - same).abs().max() < 24 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_counts_of_steps_stay_whole_numbers_in_a_meeting(dtype):
    """Adam's count of steps is no number of the model's dtype: bfloat16 has no 259."""
    work = Many(dtype, rows=518, batch=1, optimizer="adam")
    result = train(work, LocalSGD(period=259, momentum="average"), workers=2)
    assert {int(own.moments["w"]["step"]) for own in result.snapshot.own.values()} == {259}

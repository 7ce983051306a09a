"""A character transformer trained by workers that share its layers: what one process learns, in every layout."""

import pytest
import torch
from rayps_client.errors import ConfigError, WorkloadError
from small_work import Small, distance, train
from torch import nn
from torch.nn import functional as F

import rayps
from rayps import AllReduce, ParameterServer
from rayps.core.strategy.replica import Pipeline, TensorParallel

TEXT = "the naive version is the law: every fast path keeps a slow twin in the tests and must equal it. " * 3
LETTERS = sorted(set(TEXT))


class Letters(nn.Module):
    def __init__(self, d=12, length=8):
        super().__init__()
        self.words, self.places = nn.Embedding(len(LETTERS), d), nn.Embedding(length, d)

    def forward(self, ids):
        return self.words(ids) + self.places(torch.arange(ids.shape[1]))


class Causal(nn.TransformerEncoderLayer):
    def forward(self, x):
        length = x.shape[1]
        mask = torch.full((length, length), -torch.inf, dtype=x.dtype).triu(1)
        return super().forward(x, src_mask=mask, is_causal=True)


class Text(Small):
    """Which letter comes next."""

    def model(self):
        blocks = [Causal(12, 3, 20, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2)]
        return nn.Sequential(Letters(), *blocks, nn.LayerNorm(12), nn.Linear(12, len(LETTERS))).double()

    def data(self):
        ids = torch.tensor([LETTERS.index(letter) for letter in TEXT])
        x = ids.unfold(0, 9, 8)
        return rayps.data.tensors(x[:, :-1].clone(), x[:, 1:].clone(), batch_size=self.batch)

    def loss(self, model, batch):
        return F.cross_entropy(model(batch.x).transpose(1, 2), batch.y)

    def evaluate(self, model, batch):
        return {"right": (model(batch.x).argmax(-1) == batch.y).double().mean()}


def one_process(work, replicas, epochs, seed):
    """The union of the replicas' batches: model, losses of every round, the share of right letters at the end."""
    torch.manual_seed(seed)
    model, data = work.model(), work.data()
    optimizer, losses = work.optimizer(model.parameters()), []
    for epoch in range(epochs):
        dealt = [data.batches(rank=rank, size=replicas, seed=seed, epoch=epoch) for rank in range(replicas)]
        for parts in zip(*dealt, strict=True):
            x, y = (torch.cat([getattr(part, name) for part in parts if part.size]) for name in "xy")
            optimizer.zero_grad()
            loss = work.loss(model, rayps.data.Batch(x, y, len(x)))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    with torch.no_grad():
        right = work.evaluate(model, rayps.data.Batch(data.x, data.y, len(data.x)))["right"].item()
    return model, losses, right


GIVEN = {"0.words": "rows", "*.self_attn": "heads", "*.linear1": "out", "*.linear2": "in", "4": "out"}


@pytest.mark.parametrize(
    ("strategy", "workers"),
    [
        (AllReduce(replica=TensorParallel(size=2)), 2),
        (AllReduce(replica=TensorParallel(size=3, plan=GIVEN)), 6),
        (AllReduce(replica=Pipeline(stages=2, micro_batches=2, stage=TensorParallel(size=2, plan=GIVEN))), 4),
        (ParameterServer(shards=2, replica=TensorParallel(size=2)), 4),
    ],
    ids=["tensor", "tensor, all given", "pipeline of tensor", "servers"],
)
def test_a_character_transformer_learns_the_same_in_every_layout(strategy, workers):
    work = Text(batch=6)
    replicas = strategy.grid(workers).data
    result = train(work, strategy, workers=workers, epochs=2, seed=3)
    model, losses, right = one_process(work, replicas, epochs=2, seed=3)
    assert distance(result.model(), model) < 1e-12
    assert result.history.column("loss").to_pylist() == pytest.approx(losses, abs=1e-12)
    assert result.metrics["right"] == pytest.approx(right, abs=1e-12)


@pytest.mark.parametrize(
    ("given", "size", "error", "words"),
    [
        ({"blocks.*": "out"}, 2, ConfigError, "the model has no such layer"),
        ({"3": "out"}, 2, WorkloadError, "'3' (LayerNorm) cannot be split"),
        ({"1.self_attn": "heads"}, 4, ConfigError, "has 3 heads"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_before_anything_starts(given, size, error, words):
    with pytest.raises(error) as caught:
        train(Text(), AllReduce(replica=TensorParallel(size=size, plan=given)), workers=size)
    assert words in str(caught.value)

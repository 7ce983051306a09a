"""A small GPT-2 as a training step's workload: many parameters of many sizes (the MLP has a few large ones).

Radford et al., "Language models are unsupervised multitask learners", 2019: pre-norm blocks, learned positions, and
an output layer that shares the embedding's weights. With width 256 it has 4.8 million parameters in 76 tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rayps import data
from rayps.data import Batch, Data
from rayps.workload.base import Workload

_WORDS, _LENGTH, _LAYERS, _HEADS = 6000, 64, 4, 4
_BATCH, _ROUNDS = 4, 64  # sequences per step; steps per epoch


class _Block(nn.Module):
    """Attention and an MLP, each behind a LayerNorm and added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output for `x`; both are [sequences, length, width]."""
        batch, length, width = x.shape
        heads = self.qkv(self.before_attention(x)).view(batch, length, 3, _HEADS, width // _HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        deep: Tensor = self.down(nn.functional.gelu(self.up(self.before_mlp(x)), approximate="tanh"))
        return x + deep


class _Gpt(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(_WORDS, width), nn.Embedding(_LENGTH, width)
        self.blocks = nn.Sequential(*(_Block(width) for _ in range(_LAYERS)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return, for each position of `tokens` [sequences, length], a score of each word as the next word."""
        x = self.words(tokens) + self.places.weight
        return nn.functional.linear(self.norm(self.blocks(x)), self.words.weight)


class Gpt(Workload):
    """A workload: predict each next word in sequences of 64 random words."""

    def __init__(self, hidden: int, size: int) -> None:
        self._hidden, self._rows = hidden, _BATCH * _ROUNDS * size

    def model(self) -> nn.Module:
        """Make the model, with the same weights on each call."""
        torch.manual_seed(1)
        return _Gpt(self._hidden)

    def data(self) -> Data:
        """Return random words, because only the time of a step matters."""
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(0, _WORDS, (self._rows, _LENGTH + 1), generator=generator)
        return data.tensors(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), batch_size=_BATCH)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the cross-entropy, as the mean over all words."""
        return nn.functional.cross_entropy(model(batch.x).view(-1, _WORDS), batch.y.view(-1))

    def optimizer(self, params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """Return AdamW, with which language models are usually trained."""
        return torch.optim.AdamW(params, lr=1e-4)

"""nn.MultiheadAttention with its heads divided among the workers of a tensor group.

Shoeybi et al., "Megatron-LM", 2019, part 3: the projections of q, k and v are split by `out`, head by head, and the
output projection by `in`. The forward pass needs one sum. The backward pass needs one sum for each different input (one
in self-attention). The number of heads need not be a multiple of the number of workers.
"""

from __future__ import annotations

import math

import torch
from rayps_client.errors import WorkloadError
from torch import Tensor, nn
from torch.nn import functional as F

from rayps.parallel.tensor import functions
from rayps.parallel.tensor.layers import InLinear, SplitParameters, TensorRank, cuts, local
from rayps.tensors.layer_split import LayerSplit

_PARAMETERS = ("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight", "bias_k", "bias_v")


class SplitAttention(nn.Module):
    """One worker's heads of an attention layer, with the arguments and results of nn.MultiheadAttention.

    To return the attention weights, the workers exchange them. Pass need_weights=False if the weights are not used.
    """

    in_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None
    q_proj_weight: nn.Parameter
    k_proj_weight: nn.Parameter
    v_proj_weight: nn.Parameter
    bias_k: nn.Parameter | None
    bias_v: nn.Parameter | None

    def __init__(
        self, layer: nn.MultiheadAttention, way: LayerSplit, group: TensorRank, parameters: SplitParameters
    ) -> None:
        super().__init__()
        known = cuts(layer, way, group.size, group.index)
        for name in dict.fromkeys((*layer._parameters, *_PARAMETERS)):  # in the unsplit layer's order
            whole = getattr(layer, name)
            self.register_parameter(name, None if whole is None else local(whole, known.get(name), parameters))
        inner = LayerSplit("in", way.width, way.unit, kept=True)
        self.out_proj = InLinear(layer.out_proj, inner, group, parameters)
        ((lo, hi),) = way.ranges(group.size, group.index)
        self.embed_dim, self.head_dim, self.all_heads = way.width, way.unit, way.units
        self.heads = (lo // way.unit, hi // way.unit)
        self.dropout, self.batch_first, self.add_zero_attn = layer.dropout, layer.batch_first, layer.add_zero_attn
        self._counts = [width // way.unit for width in way.widths(group.size)]
        self._group = group
        self._qkv_same_embed_dim = False  # nn.TransformerEncoderLayer reads this before it bypasses this forward

    @property
    def num_heads(self) -> int:
        """The number of this worker's heads; `all_heads` is the number of heads of the unsplit layer."""
        return self.heads[1] - self.heads[0]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output and the attention weights of nn.MultiheadAttention, for the same arguments.

        `is_causal` is only a hint, as in nn.MultiheadAttention: the mask is `attn_mask`.
        """
        if is_causal and attn_mask is None:
            raise WorkloadError("attention got is_causal=True without attn_mask: pass the causal mask as attn_mask too")
        batched = query.dim() == 3
        q, k, v = self._project(query, key, value, batch_first=batched and self.batch_first, unbatched=not batched)
        if not batched and key_padding_mask is not None:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        k, v, extra = self._lengthen(k, v)
        mask = self._mask(attn_mask, key_padding_mask, q, extra)
        drop = self.dropout if self.training else 0.0
        if need_weights or drop:
            seen, weights = self._attend(q, k, v, mask, drop)
        else:
            seen, weights = F.scaled_dot_product_attention(q, k, v, mask), None
        # [batch, head, target, head_dim] to [target, batch, features], with the strides that the unsplit layer's output
        # has, because a later dropout draws in the order of strides
        output = self.out_proj(seen.permute(2, 0, 1, 3).flatten(2))
        returned = (
            self._returned_weights(weights, average_attn_weights) if need_weights and weights is not None else None
        )
        if not batched:
            return output.squeeze(1), None if returned is None else returned.squeeze(0)
        return (output.transpose(0, 1) if self.batch_first else output), returned

    def _project(
        self, query: Tensor, key: Tensor, value: Tensor, batch_first: bool, unbatched: bool
    ) -> tuple[Tensor, ...]:
        """Return this worker's q, k, v as [batch, head, length, head_dim].

        The inputs are [batch, length, features] if `batch_first`, [length, features] if `unbatched`, and else [length,
        batch, features].
        """
        communicator, width = self._group.communicator, self.num_heads * self.head_dim
        if self.in_proj_weight is not None and query is key and key is value:
            packed = F.linear(functions.spread(query, communicator), self.in_proj_weight, self.in_proj_bias)
            parts = list(torch.split(packed, width, -1))
        else:
            if self.in_proj_weight is not None:
                matrices: list[Tensor] = list(torch.split(self.in_proj_weight, width))
            else:
                matrices = [self.q_proj_weight, self.k_proj_weight, self.v_proj_weight]
            biases = [None] * 3 if self.in_proj_bias is None else list(torch.split(self.in_proj_bias, width))
            shared: dict[int, Tensor] = {}
            for each in (query, key, value):
                if id(each) not in shared:
                    shared[id(each)] = functions.spread(each, communicator)
            parts = [
                F.linear(shared[id(each)], w, b)
                for each, w, b in zip((query, key, value), matrices, biases, strict=True)
            ]
        if unbatched:
            parts = [each.unsqueeze(0) for each in parts]
        elif not batch_first:
            parts = [each.transpose(0, 1) for each in parts]
        return tuple(each.view(*each.shape[:2], -1, self.head_dim).transpose(1, 2) for each in parts)

    def _lengthen(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, int]:
        """Return k and v with the extra positions that bias_k, bias_v and add_zero_attn append, and their number."""
        extra = 0
        if self.bias_k is not None and self.bias_v is not None:
            added = (self.bias_k, self.bias_v)
            more = (each.view(1, -1, 1, self.head_dim).expand(len(k), -1, 1, -1) for each in added)
            k, v = (torch.cat([each, last], 2) for each, last in zip((k, v), more, strict=True))
            extra += 1
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
            extra += 1
        return k, v, extra

    def _mask(self, attn: Tensor | None, padding: Tensor | None, q: Tensor, extra: int) -> Tensor | None:
        """Return what the masks add to the attention scores, or None if there is no mask.

        The result is [batch or 1, this worker's heads or 1, target, source].
        """
        whole: Tensor | None = None
        if attn is not None:
            whole = _additive(attn, q.dtype)
            if whole.dim() == 3:
                whole = whole.view(-1, self.all_heads, *whole.shape[1:])[:, slice(*self.heads)]
            else:
                whole = whole.view(1, 1, *whole.shape)
        if padding is not None:
            keys = _additive(padding, q.dtype)[:, None, None, :]
            whole = keys if whole is None else whole + keys
        return whole if whole is None or not extra else F.pad(whole, (0, extra))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, drop: float) -> tuple[Tensor, Tensor]:
        scores = (q * math.sqrt(1.0 / self.head_dim)) @ k.transpose(-2, -1)
        weights = torch.softmax(scores if mask is None else scores + mask, -1)
        weights = functions.dropout(weights, drop, 1, self.all_heads, [self.heads])
        return weights @ v, weights

    def _returned_weights(self, weights: Tensor, average: bool) -> Tensor:
        if average:
            return functions.total(weights.sum(1) / self.all_heads, self._group.communicator)
        return functions.gather(weights, self._group.communicator, 1, self._counts, self._group.index)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, -math.inf)

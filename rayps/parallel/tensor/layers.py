"""Layers divided among the workers of a tensor group. Parameters keep the names of the unsplit layer.

Shoeybi et al., "Megatron-LM", 2019, part 3. With y = x W^T + b and W [out, in]: split by `out`, a worker computes its
slice of y from the whole x, and backward the gradients of x are summed; split by `in`, it computes a partial sum of y
from its slice of x, the sums are added, and the bias is added once, after the sum. See `rayps.parallel.tensor` for the
names.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rayps.parallel.tensor import functions
from rayps.parallel.tensor.communicator import TensorCommunicator
from rayps.parallel.tensor.functions import take
from rayps.parallel.tensor.layer_split import LayerSplit, Range

Cut = tuple[int, tuple[Range, ...]]  # of a parameter: the dimension, and this worker's ranges along it


@dataclass(slots=True)
class TensorRank:
    """One worker's rank in the group."""

    communicator: TensorCommunicator
    size: int
    index: int


class Region:
    """The random state between split layers in a user's own forward, where workers may draw different amounts.

    In the region each worker draws from its own stream; after it all workers continue from the same state.
    """

    def __init__(self, group: TensorRank) -> None:
        self._group = group
        self._outside: Tensor | None = None

    def enter(self) -> None:
        """Start the region, at the first layer that computes slices."""
        if self._outside is None:
            generator = torch.default_generator
            seed = int(torch.randint(1 << 62, (), generator=generator))
            self._outside = generator.get_state()
            generator.manual_seed(seed + self._group.index)

    def leave(self) -> None:
        """End the region, at the layer that sums the slices."""
        if self._outside is not None:
            torch.default_generator.set_state(self._outside)
            self._outside = None


def cuts(layer: nn.Module, way: LayerSplit, size: int, index: int) -> dict[str, Cut]:
    """Return which of the unsplit layer's parameters are split, and how; the others are whole on every worker."""
    mine = way.ranges(size, index)
    if way.split == "heads":
        return _head_cuts(layer, way.width, mine)
    if way.split == "dropout":
        return {}
    dim = 0 if way.split == "rows" or (way.split == "out" and isinstance(layer, nn.Linear)) else 1
    found: dict[str, Cut] = {"weight": (dim, mine)}
    if dim == 0 and getattr(layer, "bias", None) is not None:
        found["bias"] = (0, mine)
    return found


def _head_cuts(layer: nn.Module, width: int, mine: tuple[Range, ...]) -> dict[str, Cut]:
    thrice = tuple((lo + i * width, hi + i * width) for i in range(3) for lo, hi in mine)
    found: dict[str, Cut] = {
        "in_proj_weight": (0, thrice),
        "in_proj_bias": (0, thrice),
        "out_proj.weight": (1, mine),
        "q_proj_weight": (0, mine),
        "k_proj_weight": (0, mine),
        "v_proj_weight": (0, mine),
        "bias_k": (2, mine),
        "bias_v": (2, mine),
    }
    present = {name for name, _ in layer.named_parameters()}
    return {name: cut for name, cut in found.items() if name in present}


Made = dict[int, nn.Parameter]  # by the id of the whole parameter: tied parameters stay tied


def local(whole: Tensor, cut: Cut | None, made: Made) -> nn.Parameter:
    """Return this worker's part of a parameter, on the device of the whole parameter (meta included)."""
    if cut is None:
        assert isinstance(whole, nn.Parameter)
        return whole
    if id(whole) not in made:
        # contiguous_format: a part must become a contiguous vector
        part = take(whole.detach(), *cut).clone(memory_format=torch.contiguous_format)
        made[id(whole)] = nn.Parameter(part, requires_grad=whole.requires_grad)
    return made[id(whole)]


class SplitLinear(nn.Module):
    """A linear layer that holds a slice of the unsplit layer's outputs (`out`) or inputs (`in`)."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self, layer: nn.Linear, way: LayerSplit, group: TensorRank, made: Made, region: Region | None = None
    ) -> None:
        super().__init__()
        known = cuts(layer, way, group.size, group.index)
        self.weight = local(layer.weight, known.get("weight"), made)
        self.register_parameter("bias", None if layer.bias is None else local(layer.bias, known.get("bias"), made))
        self.out_features, self.in_features = self.weight.shape
        self._way, self._group, self._region = way, group, region
        self._widths = way.widths(group.size)
        self._region = region

    def extra_repr(self) -> str:
        """Describe the slice: this worker's sizes, the split, the whole width."""
        return f"{self.in_features} -> {self.out_features}, {self._way.split} of {self._way.width}"


class OutLinear(SplitLinear):
    """A linear layer that computes a slice of the output, and gathers the slices unless the next layer takes one."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x Wᵀ + b: [..., in] to [..., out], or this worker's slice of the outputs."""
        if self._region is not None and self.training:
            self._region.enter()
        y = F.linear(functions.spread(x, self._group.communicator), self.weight, self.bias)
        if self._way.kept:
            return y
        return functions.gather(y, self._group.communicator, -1, self._widths, self._group.index)


class InLinear(SplitLinear):
    """A linear layer that takes a slice of the input, and sums the workers' partial outputs."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x Wᵀ + b: [..., in], or this worker's slice of the inputs, to [..., out]."""
        if not self._way.kept:
            x = functions.own(x, self._group.communicator, -1, self._widths, self._group.index)
        y = functions.total(F.linear(x, self.weight), self._group.communicator, ours=True)
        if self._region is not None:
            self._region.leave()
        return y if self.bias is None else y.add_(self.bias)


class RowsEmbedding(nn.Module):
    """An embedding that holds a range of the rows. Ids of other ranges give zeros; the workers' outputs are summed."""

    def __init__(self, layer: nn.Embedding, way: LayerSplit, group: TensorRank, made: Made) -> None:
        super().__init__()
        self.weight = local(layer.weight, cuts(layer, way, group.size, group.index)["weight"], made)
        ((self._lo, self._hi),) = way.ranges(group.size, group.index)
        self._group, self._rows = group, way.width
        padding = layer.padding_idx
        self._padding = None if padding is None or not self._lo <= padding < self._hi else padding - self._lo
        self.num_embeddings, self.embedding_dim = self.weight.shape

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of `ids`. Raises IndexError on every worker for an id outside the table."""
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= self._rows):
            raise IndexError(f"index out of range: ids from {int(ids.min())} to {int(ids.max())} of {self._rows} rows")
        outside = (ids < self._lo) | (ids >= self._hi)
        rows = F.embedding((ids - self._lo).masked_fill_(outside, 0), self.weight, self._padding)
        return functions.total(rows.masked_fill(outside.unsqueeze(-1), 0), self._group.communicator, ours=True)


class OutEmbedding(nn.Module):
    """An embedding that holds a slice of every row; the workers' slices are gathered."""

    def __init__(self, layer: nn.Embedding, way: LayerSplit, group: TensorRank, made: Made) -> None:
        super().__init__()
        self.weight = local(layer.weight, cuts(layer, way, group.size, group.index)["weight"], made)
        self._group, self._widths = group, way.widths(group.size)
        self._options = (layer.padding_idx, None, 2.0, layer.scale_grad_by_freq, layer.sparse)
        self.num_embeddings, self.embedding_dim = self.weight.shape

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of `ids`: [...] to [..., embedding_dim]."""
        rows = F.embedding(ids, self.weight, *self._options)
        return functions.gather(rows, self._group.communicator, -1, self._widths, self._group.index)


class SliceDropout(nn.Module):
    """Dropout on slices: it drops the elements that the unsplit layer drops from the same random state."""

    def __init__(self, p: float, way: LayerSplit, group: TensorRank) -> None:
        super().__init__()
        self.p = p
        self._whole, self._ranges = way.width, way.ranges(group.size, group.index)

    def forward(self, x: Tensor) -> Tensor:
        """Return this worker's slice with elements dropped; `x` itself in evaluation."""
        return functions.dropout(x, self.p, -1, self._whole, self._ranges) if self.training else x

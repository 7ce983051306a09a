"""Layers divided among the workers of a tensor group. Parameters keep the names of the unsplit layer.

Shoeybi et al., "Megatron-LM", 2019, part 3. With y = x W^T + b and W [out, in]: in a layer split by `out`, each worker
computes its slice of y from the whole x, and the backward pass sums the workers' gradients of x. In a layer split by
`in`, each worker computes a partial sum of y from its slice of x; the partial sums are added, then the bias is added
once. `rayps.parallel.tensor` compares these names with those of the literature.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rayps.parallel.tensor import functions
from rayps.parallel.tensor.communicator import TensorCommunicator
from rayps.parallel.tensor.functions import take
from rayps.tensors.layer_split import LayerSplit, Range

Cut = tuple[int, tuple[Range, ...]]  # how a parameter is split: the dimension, and this worker's ranges along it


@dataclass(slots=True)
class TensorRank:
    """One worker's place in its tensor group."""

    communicator: TensorCommunicator
    size: int  # workers in the group
    index: int  # this worker's rank in the group


class Region:
    """Sets the random state for the code of a user's own forward() between two split layers.

    That code runs on slices, so the workers may draw different amounts of random numbers. In that code each worker
    draws from its own state. After the second layer all workers continue from the same state.
    """

    def __init__(self, group: TensorRank) -> None:
        self._group = group
        self._outside: Tensor | None = None

    def enter(self) -> None:
        """Start the code on slices: from now on this worker draws from its own state.

        The first split layer calls this.
        """
        if self._outside is None:
            generator = torch.default_generator
            seed = int(torch.randint(1 << 62, (), generator=generator))
            self._outside = generator.get_state()
            generator.manual_seed(seed + self._group.index)

    def leave(self) -> None:
        """End the code on slices: restore the state that is common to all workers. The last split layer calls this."""
        if self._outside is not None:
            torch.default_generator.set_state(self._outside)
            self._outside = None


def cuts(layer: nn.Module, way: LayerSplit, size: int, index: int) -> dict[str, Cut]:
    """Return a dict from the names of a layer's split parameters to their cuts. All other parameters stay whole."""
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


SplitParameters = dict[
    int, nn.Parameter
]  # split parameters by the id of the whole one, so that tied parameters stay tied


def local(whole: Tensor, cut: Cut | None, parameters: SplitParameters) -> nn.Parameter:
    """Return this worker's part of a parameter, on the device of the whole parameter, which may be meta."""
    if cut is None:
        assert isinstance(whole, nn.Parameter)
        return whole
    if id(whole) not in parameters:
        # contiguous_format: a part must become a contiguous vector
        part = take(whole.detach(), *cut).clone(memory_format=torch.contiguous_format)
        parameters[id(whole)] = nn.Parameter(part, requires_grad=whole.requires_grad)
    return parameters[id(whole)]


class SplitLinear(nn.Module):
    """Base class of the split linear layers, with the weights of a slice of the outputs (`out`) or inputs (`in`)."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        layer: nn.Linear,
        way: LayerSplit,
        group: TensorRank,
        parameters: SplitParameters,
        region: Region | None = None,
    ) -> None:
        super().__init__()
        known = cuts(layer, way, group.size, group.index)
        self.weight = local(layer.weight, known.get("weight"), parameters)
        self.register_parameter(
            "bias", None if layer.bias is None else local(layer.bias, known.get("bias"), parameters)
        )
        self.out_features, self.in_features = self.weight.shape
        self._way, self._group, self._region = way, group, region
        self._widths = way.widths(group.size)

    def extra_repr(self) -> str:
        """Describe the layer: this worker's inputs and outputs, the split, and the unsplit layer's width."""
        return f"{self.in_features} -> {self.out_features}, {self._way.split} of {self._way.width}"


class OutLinear(SplitLinear):
    """A linear layer split by `out`. It computes a slice of the output; the slices are gathered unless `kept`."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x Wᵀ + b [..., out] for x [..., in], or only this worker's slice of the outputs if `kept`."""
        if self._region is not None and self.training:
            self._region.enter()
        y = F.linear(functions.spread(x, self._group.communicator), self.weight, self.bias)
        if self._way.kept:
            return y
        return functions.gather(y, self._group.communicator, -1, self._widths, self._group.index)


class InLinear(SplitLinear):
    """A linear layer split by `in`. It sums the partial outputs that workers compute from slices of the input."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x Wᵀ + b [..., out] for x [..., in]. If `kept`, x is this worker's slice of the inputs."""
        if not self._way.kept:
            x = functions.own_slice(x, self._group.communicator, -1, self._widths, self._group.index)
        y = functions.total(F.linear(x, self.weight), self._group.communicator, ours=True)
        if self._region is not None:
            self._region.leave()
        return y if self.bias is None else y.add_(self.bias)


class RowsEmbedding(nn.Module):
    """An embedding with a range of the rows. It returns zeros for other ids, and the workers' outputs are summed."""

    def __init__(self, layer: nn.Embedding, way: LayerSplit, group: TensorRank, parameters: SplitParameters) -> None:
        super().__init__()
        self.weight = local(layer.weight, cuts(layer, way, group.size, group.index)["weight"], parameters)
        ((self._lo, self._hi),) = way.ranges(group.size, group.index)
        self._group, self._rows = group, way.width
        padding = layer.padding_idx
        self._padding = None if padding is None or not self._lo <= padding < self._hi else padding - self._lo
        self.num_embeddings, self.embedding_dim = self.weight.shape

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of `ids` [...], as [..., embedding_dim].

        Raises IndexError on every worker if an id is outside the table.
        """
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= self._rows):
            raise IndexError(f"index out of range: ids from {int(ids.min())} to {int(ids.max())} of {self._rows} rows")
        outside = (ids < self._lo) | (ids >= self._hi)
        rows = F.embedding((ids - self._lo).masked_fill_(outside, 0), self.weight, self._padding)
        return functions.total(rows.masked_fill(outside.unsqueeze(-1), 0), self._group.communicator, ours=True)


class OutEmbedding(nn.Module):
    """An embedding with a slice of every row; the workers' slices are gathered."""

    def __init__(self, layer: nn.Embedding, way: LayerSplit, group: TensorRank, parameters: SplitParameters) -> None:
        super().__init__()
        self.weight = local(layer.weight, cuts(layer, way, group.size, group.index)["weight"], parameters)
        self._group, self._widths = group, way.widths(group.size)
        self._options = (layer.padding_idx, None, 2.0, layer.scale_grad_by_freq, layer.sparse)
        self.num_embeddings, self.embedding_dim = self.weight.shape

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of `ids` [...], as [..., embedding_dim]."""
        rows = F.embedding(ids, self.weight, *self._options)
        return functions.gather(rows, self._group.communicator, -1, self._widths, self._group.index)


class SliceDropout(nn.Module):
    """Dropout on a slice. From the same random state, it drops the same elements as the unsplit layer."""

    def __init__(self, p: float, way: LayerSplit, group: TensorRank) -> None:
        super().__init__()
        self.p = p
        self._whole, self._ranges = way.width, way.ranges(group.size, group.index)

    def forward(self, x: Tensor) -> Tensor:
        """Return the slice `x` with elements dropped, or `x` unchanged in eval mode."""
        return functions.dropout(x, self.p, -1, self._whole, self._ranges) if self.training else x

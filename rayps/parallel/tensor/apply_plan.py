"""Apply a plan: find the part of each parameter that a worker has, and replace the model's layers by split ones."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from rayps.comm.ring import Ring
from rayps.core.errors import WorkloadError
from rayps.parallel.tensor.attention import SplitAttention
from rayps.parallel.tensor.communicator import TensorCommunicator
from rayps.parallel.tensor.layer_split import LayerSplit, Plan
from rayps.parallel.tensor.layers import (
    Cut,
    InLinear,
    Made,
    OutEmbedding,
    OutLinear,
    Region,
    RowsEmbedding,
    SliceDropout,
    TensorRank,
    cuts,
)


def pieces(model: nn.Module, plan: Plan, size: int, index: int) -> dict[str, Cut]:
    """Return, for each parameter that is split, the dimension and the ranges (lo, hi) of worker `index` of `size`.

    Names are those of `model.named_parameters()`; parameters that are not returned are whole on every worker. `model`
    is the unsplit model; it may be on the meta device, and may lack layers of the plan.
    """
    layers = dict(model.named_modules(remove_duplicate=False))
    known = {name for name, _ in model.named_parameters()}
    by_layer = {id(layers[name]): way for name, way in plan.items() if _there(layers.get(name))}
    found: dict[str, Cut] = {}
    for name, layer in layers.items():
        if id(layer) in by_layer:
            for inner, cut in cuts(layer, by_layer[id(layer)], size, index).items():
                found[f"{name}.{inner}" if name else inner] = cut
    return {name: cut for name, cut in found.items() if name in known}


def split(model: nn.Module, plan: Plan, index: int, size: int, ring: Ring | TensorCommunicator | None) -> nn.Module:
    """Replace each layer of the plan by the part of worker `index` of `size`; return the model.

    Parameters keep their names, dtype, device and ties, and of their values only this worker's part. Layers of the plan
    that the model lacks (those of another stage) are skipped. `ring` connects the workers of the group; a
    `TensorCommunicator` also counts the exchanges; with None the model has the right shapes but cannot run.
    """
    if size == 1 or not plan:
        return model
    group = TensorRank(ring if isinstance(ring, TensorCommunicator) else TensorCommunicator(ring), size, index)
    layers = dict(model.named_modules())
    regions: dict[str, Region] = {}
    made: Made = {}
    twins: dict[int, nn.Module] = {}
    for name, way in plan.items():
        layer = layers.get(name)
        if layer is not None and _there(layer):
            region = regions.setdefault(way.region, Region(group)) if way.region else None
            twins[id(layer)] = _twin(name, layer, way, group, made, region)
    for each in list(model.modules()):
        for child, layer in each._modules.items():
            if layer is not None and id(layer) in twins:
                each._modules[child] = twins[id(layer)]
    for each in model.modules():
        _keep_to_forward(each)
    return twins.get(id(model), model)


def _there(layer: nn.Module | None) -> bool:
    return layer is not None and not isinstance(layer, nn.Identity)


def _twin(
    name: str, layer: nn.Module, way: LayerSplit, group: TensorRank, made: Made, region: Region | None
) -> nn.Module:
    makers: dict[tuple[str, type[nn.Module]], Callable[[], nn.Module]] = {
        ("out", nn.Linear): lambda: OutLinear(layer, way, group, made, region),  # type: ignore[arg-type]
        ("in", nn.Linear): lambda: InLinear(layer, way, group, made, region),  # type: ignore[arg-type]
        ("rows", nn.Embedding): lambda: RowsEmbedding(layer, way, group, made),  # type: ignore[arg-type]
        ("out", nn.Embedding): lambda: OutEmbedding(layer, way, group, made),  # type: ignore[arg-type]
        ("heads", nn.MultiheadAttention): lambda: SplitAttention(layer, way, group, made),  # type: ignore[arg-type]
        ("dropout", nn.Dropout): lambda: SliceDropout(layer.p, way, group),  # type: ignore[arg-type]
    }
    for (split_by, kind), make in makers.items():
        if way.split == split_by and isinstance(layer, kind):
            return make().train(layer.training)
    raise WorkloadError(
        f"the plan splits {name!r} by {way.split}, but on this worker the layer is a {type(layer).__name__}: model() "
        "must build the same model each time",
        layer=name,
    )


def _keep_to_forward(layer: nn.Module) -> None:
    """Disable the fused evaluation of torch's transformer layers, which reads weights without calling the layers."""
    held = any(isinstance(each, (OutLinear, InLinear, SplitAttention)) for each in layer.modules())
    if held and isinstance(layer, nn.TransformerEncoderLayer):
        layer.activation_relu_or_gelu = 0  # only the fused path reads this attribute
    if held and isinstance(layer, nn.TransformerEncoder):
        layer.use_nested_tensor = False

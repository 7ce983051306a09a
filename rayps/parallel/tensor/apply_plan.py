"""Apply a plan: find the part of each parameter that a worker has, and replace the model's layers by split ones."""

from __future__ import annotations

from collections.abc import Callable

from rayps_client.errors import WorkloadError
from torch import nn

from rayps.comm.ring import Ring
from rayps.parallel.tensor.attention import SplitAttention
from rayps.parallel.tensor.communicator import TensorCommunicator
from rayps.parallel.tensor.layers import (
    Cut,
    InLinear,
    OutEmbedding,
    OutLinear,
    Region,
    RowsEmbedding,
    SliceDropout,
    SplitParameters,
    TensorRank,
    cuts,
)
from rayps.tensors.layer_split import LayerSplit, Plan


def pieces(model: nn.Module, plan: Plan, size: int, index: int) -> dict[str, Cut]:
    """Return, for each parameter that is split, the dimension and the ranges (lo, hi) of worker `index` of `size`.

    The keys are names of `model.named_parameters()`. Parameters that are not returned are whole on every worker.
    `model` is the unsplit model; it may be on the meta device, and may lack layers of the plan.
    """
    layers = dict(model.named_modules(remove_duplicate=False))
    known = {name for name, _ in model.named_parameters()}
    by_layer = {id(layers[name]): way for name, way in plan.items() if _is_present(layers.get(name))}
    found: dict[str, Cut] = {}
    for name, layer in layers.items():
        if id(layer) in by_layer:
            for inner, cut in cuts(layer, by_layer[id(layer)], size, index).items():
                found[f"{name}.{inner}" if name else inner] = cut
    return {name: cut for name, cut in found.items() if name in known}


def split(model: nn.Module, plan: Plan, index: int, size: int, ring: Ring | TensorCommunicator | None) -> nn.Module:
    """Replace each layer of the plan by the part of worker `index` of `size`; return the model.

    Parameters keep their names, dtype, device and ties; each has only this worker's part of its values. Layers of the
    plan that the model lacks (those of another stage) are skipped. `ring` connects the workers of the group. A
    `TensorCommunicator` also counts the exchanges. If `ring` is None, the model has the right shapes but cannot run.
    """
    if size == 1 or not plan:
        return model
    group = TensorRank(ring if isinstance(ring, TensorCommunicator) else TensorCommunicator(ring), size, index)
    layers = dict(model.named_modules())
    regions: dict[str, Region] = {}
    parameters: SplitParameters = {}
    split_layers: dict[int, nn.Module] = {}
    for name, way in plan.items():
        layer = layers.get(name)
        if layer is not None and _is_present(layer):
            region = regions.setdefault(way.region, Region(group)) if way.region else None
            split_layers[id(layer)] = _split_layer(name, layer, way, group, parameters, region)
    for each in list(model.modules()):
        for child, layer in each._modules.items():
            if layer is not None and id(layer) in split_layers:
                each._modules[child] = split_layers[id(layer)]
    for each in model.modules():
        _disable_fused_forward(each)
    return split_layers.get(id(model), model)


def _is_present(layer: nn.Module | None) -> bool:
    return layer is not None and not isinstance(layer, nn.Identity)


def _split_layer(
    name: str, layer: nn.Module, way: LayerSplit, group: TensorRank, parameters: SplitParameters, region: Region | None
) -> nn.Module:
    makers: dict[tuple[str, type[nn.Module]], Callable[[], nn.Module]] = {
        ("out", nn.Linear): lambda: OutLinear(layer, way, group, parameters, region),  # type: ignore[arg-type]
        ("in", nn.Linear): lambda: InLinear(layer, way, group, parameters, region),  # type: ignore[arg-type]
        ("rows", nn.Embedding): lambda: RowsEmbedding(layer, way, group, parameters),  # type: ignore[arg-type]
        ("out", nn.Embedding): lambda: OutEmbedding(layer, way, group, parameters),  # type: ignore[arg-type]
        ("heads", nn.MultiheadAttention): lambda: SplitAttention(layer, way, group, parameters),  # type: ignore[arg-type]
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


def _disable_fused_forward(layer: nn.Module) -> None:
    """Disable the fused evaluation of torch's transformer layers, which reads weights without calling the layers."""
    has_split = any(isinstance(each, (OutLinear, InLinear, SplitAttention)) for each in layer.modules())
    if has_split and isinstance(layer, nn.TransformerEncoderLayer):
        layer.activation_relu_or_gelu = 0  # only the fused path reads this attribute
    if has_split and isinstance(layer, nn.TransformerEncoder):
        layer.use_nested_tensor = False

"""Refuse adapters such as LoRA (Hu et al., ICLR 2022) on a layer whose weight another layer shares.

Such a layer computes W x + B A x with a frozen W. If W is also the weight of another layer (a tied head and embedding),
the other layer lacks B A, and a merge of B A into W changes it.
"""

from __future__ import annotations

from rayps_client.errors import WorkloadError
from torch import nn


def check_adapters(model: nn.Module) -> None:
    """Refuse an adapter on a tied weight. An adapter is a module with the attribute `base_layer`, as in peft.

    Raises:
        WorkloadError: the error names the adapter's layer, and the layer that shares its weight.
    """
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        weight = module._parameters.get("weight")
        if weight is not None:
            owners.setdefault(id(weight), []).append(name)
    for name, module in model.named_modules():
        base = module._modules.get("base_layer")
        weight = None if base is None else base._parameters.get("weight")
        others = [other for other in owners.get(id(weight), []) if not other.startswith(f"{name}.")]
        if others:
            raise WorkloadError(
                f"the adapter on layer {name!r} is on a weight that {others[0]!r} shares (tied weights): the other "
                "layer would not learn with it\nleave the layer out of target_modules, or untie the weights "
                "(tie_word_embeddings=False)",
                layer=name,
            )

"""Formulas for what split layers exchange: elements and collectives of one forward and backward pass.

For one row of the input (a token, a sample), a linear layer with o outputs and i inputs, and N workers:

| layer                    | forward          | backward         |
|--------------------------|------------------|------------------|
| pair `out`, then `in`    | sum of o (2nd)   | sum of i (1st)   |
| `out` alone              | gather of o      | sum of i         |
| `in` alone               | sum of o         | gather of i      |
| heads (E features)       | sum of E         | sum of E (for each different input) |
| embedding, rows or `out` | sum, gather of E | nothing          |

For a sum of n elements each worker sends at least 2 n (N-1)/N elements, for a gather at least n (N-1)/N.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from rayps.tensors.layer_split import Plan


@dataclass(frozen=True, slots=True)
class Volume:
    """What is exchanged in a forward and a backward pass: elements of whole tensors per row, and collectives."""

    forward: int = 0
    backward: int = 0
    forward_collectives: int = 0
    backward_collectives: int = 0

    def __add__(self, other: Volume) -> Volume:
        return Volume(
            self.forward + other.forward,
            self.backward + other.backward,
            self.forward_collectives + other.forward_collectives,
            self.backward_collectives + other.backward_collectives,
        )


def volume(model: nn.Module, plan: Plan) -> Volume:
    """Return what all layers of the plan exchange in one step.

    The formulas assume that every layer's input needs a gradient, that attention is self-attention which returns no
    weights, and that all layers have the same number of rows. If the model's input needs no gradient, the first layer
    exchanges nothing in the backward pass.
    """
    return sum(by_layer(model, plan).values(), Volume())


def by_layer(model: nn.Module, plan: Plan) -> dict[str, Volume]:
    """Return a dict from the names of the plan's layers to their volumes.

    If several layers split by `out` have the same input, the backward exchange is counted for the first of them.
    """
    layers = dict(model.named_modules())
    seen: set[str] = set()
    found: dict[str, Volume] = {}
    for name, way in plan.items():
        layer = layers[name]
        if isinstance(layer, nn.Embedding):
            found[name] = Volume(layer.embedding_dim, 0, 1, 0)
        elif isinstance(layer, nn.MultiheadAttention):
            found[name] = Volume(way.width, way.width, 1, 1)
        elif isinstance(layer, nn.Linear):
            if way.split == "in":
                gathers = 0 if way.kept else layer.in_features
                found[name] = Volume(layer.out_features, gathers, 1, int(not way.kept))
            elif way.region and way.region in seen:
                found[name] = Volume()
            else:
                seen |= {way.region} if way.region else set()
                gathers = 0 if way.kept else layer.out_features
                found[name] = Volume(gathers, layer.in_features, int(not way.kept), 1)
    return found

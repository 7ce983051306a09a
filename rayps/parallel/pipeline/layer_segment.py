"""A run of layers that autograd treats as one: its forward pass, and its backward pass, whole or split.

A split backward pass (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024) computes the gradient of the input
first, and that of the weights later. Each layer is then a segment of its own, so that the second half computes only
gradients of weights, from the gradient of the layer's output that the first half computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from rayps.comm.ring.p2p import TensorMessage
from rayps.core.user_code import user_code
from rayps.data.base import Nested
from rayps.parallel.pipeline.cut import Layer
from rayps.parallel.pipeline.flatten_values import packed, unpacked
from rayps.parallel.pipeline.loss_proxy import Call
from rayps.parallel.pipeline.skip import Stash, Unstash, aside

Grads = list[Tensor | None]
_run_backward = torch.autograd.Variable._execution_engine.run_backward
_NOTHING = nullcontext()
_IN_PLACE = "a leaf Variable that requires grad"  # torch's error for changing a leaf in place


class Tape(NamedTuple):
    """The leaves and edges of a forward pass from which a backward pass computes gradients, by port.

    A port is an input or an output. An entry is None for a tensor that wants no gradient.
    """

    leaves: list[list[Tensor | None]]  # leaves of the input, then of each stashed value received from other chunks
    edges: list[list[GradientEdge | None]]  # edges of the output, then of each value stashed for other chunks


class WeightBackward(NamedTuple):
    """The deferred computation of the gradients of a segment's weights."""

    edges: list[GradientEdge]
    grads: list[Tensor]
    params: list[nn.Parameter]


class LayerSegment:
    """Layers of the model, by number, that run as one.

    They receive the stashed values `takes` from other chunks, and stash the values `ships` for other chunks.
    """

    def __init__(
        self, layers: Mapping[int, Layer], takes: Sequence[str], ships: Sequence[str], seed: Callable[[int, int], None]
    ) -> None:
        self.layers = dict(layers)
        self.takes, self.ships = list(takes), list(ships)
        self._skips = any(_skip(part) for layer in layers.values() for part in layer.module.modules())
        self._seed = seed
        self._copies = False  # whether the first layer changes its input in place, so that the input is copied
        self._at = ""

    @classmethod
    def of(
        cls, layers: Mapping[int, Layer], takes: set[str], ships: set[str], seed: Callable[[int, int], None]
    ) -> LayerSegment:
        """Return a segment with those skip connections of the chunk that begin or end in `layers`."""
        ends = {
            (type(part), part.name)
            for layer in layers.values()
            for part in layer.module.modules()
            if isinstance(part, (Stash, Unstash))
        }
        return cls(
            layers,
            sorted(name for name in takes if (Unstash, name) in ends),
            sorted(name for name in ships if (Stash, name) in ends),
            seed,
        )

    def forward(
        self,
        micro: int,
        given: TensorMessage | None,
        call: Call | None,
        extra: Mapping[str, TensorMessage],
        train: bool,
    ) -> tuple[Nested, dict[str, Nested], list[list[Tensor | None]]]:
        """Return the layers' output, the stashed values, and the leaves of the inputs, by port.

        `given` is the input from the layer before; for the model's first layer it is None, and `call` has the arguments
        of the model.
        """
        try:
            try:
                return self._forward(micro, given, call, extra, train)
            except RuntimeError as error:
                if self._copies or _IN_PLACE not in str(error):
                    raise
                self._copies = True
            return self._forward(micro, given, call, extra, train)
        except (Exception, SystemExit, KeyboardInterrupt):
            with user_code(f"layer {self._at}"):  # errors name the layer that was running
                raise

    def _forward(
        self,
        micro: int,
        given: TensorMessage | None,
        call: Call | None,
        extra: Mapping[str, TensorMessage],
        train: bool,
    ) -> tuple[Nested, dict[str, Nested], list[list[Tensor | None]]]:
        leaves: list[list[Tensor | None]] = []
        args, kwargs = call or ((), {})
        value: Nested = None
        if given is None:
            leaves.append([])
        else:
            args = (self._opened(given, leaves, train),)
        stash = {name: self._opened(extra[name], leaves, train) for name in self.takes} if self.takes else {}
        with aside(stash) if self._skips else _NOTHING:
            for number, layer in self.layers.items():
                self._at = layer.name
                self._seed(micro, number)
                value = layer.module(*args, **kwargs)
                args, kwargs = (value,), {}
        return value, {name: stash[name] for name in self.ships}, leaves

    def _opened(self, parcel: TensorMessage, ports: list[list[Tensor | None]], train: bool) -> Nested:
        tensors: list[Tensor] = []
        leaves: list[Tensor | None] = []
        ports.append(leaves)
        for t, wants in zip(parcel.tensors, parcel.wants, strict=True):
            leaf = t.detach().requires_grad_() if wants and train else None
            leaves.append(leaf)
            plain = t if leaf is None else leaf
            tensors.append(plain.clone() if self._copies else plain)
        return unpacked(tensors, parcel.form)

    @property
    def last(self) -> str:
        """The name of the segment's last layer."""
        return next(reversed(self.layers.values())).name

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters of the segment that are trained."""
        found = {id(p): p for layer in self.layers.values() for p in layer.module.parameters() if p.requires_grad}
        return list(found.values())


def edge_of(t: Tensor) -> GradientEdge | None:
    """Return the autograd edge of `t`'s gradient; None if `t` wants no gradient.

    The edge holds no reference to the tensor's memory.
    """
    return get_gradient_edge(t) if t.requires_grad else None


def parcel_of(value: Nested, layer: str) -> TensorMessage:
    """Return a layer's output as a message."""
    tensors, form = packed(value, layer)
    return TensorMessage(tensors, [t.requires_grad for t in tensors], form)


def backward(tape: Tape, grads: list[Grads]) -> list[Grads]:
    """Run the whole backward pass: add to the `.grad` of every parameter, return the gradient of every leaf."""
    edges, given = _paired(tape, grads)
    if edges:  # as torch.autograd.backward, whose checks of shapes take longer than a small layer's gradient
        _run_backward(tuple(edges), tuple(given), False, False, (), allow_unreachable=True, accumulate_grad=True)
    return [[None if leaf is None else leaf.grad for leaf in port] for port in tape.leaves]


def input_half(segment: LayerSegment, tape: Tape, grads: list[Grads]) -> tuple[list[Grads], WeightBackward | None]:
    """Return the gradient of every leaf, and the deferred computation for the weights."""
    edges, given = _paired(tape, grads)
    params = segment.params if edges else []
    leaves = [leaf for port in tape.leaves for leaf in port if leaf is not None]
    found: Grads = [None] * len(leaves)
    if edges and leaves:
        found = list(torch.autograd.grad(edges, leaves, given, retain_graph=bool(params), allow_unused=True))
    back = iter(found)
    half = WeightBackward(edges, given, params) if params else None
    return [[None if leaf is None else next(back) for leaf in port] for port in tape.leaves], half


def _paired(tape: Tape, grads: list[Grads]) -> tuple[list[GradientEdge], list[Tensor]]:
    """Return the edges for which a gradient was received, and the gradients."""
    flat = [edge for port in tape.edges for edge in port], [grad for port in grads for grad in port]
    both = [(e, g) for e, g in zip(*flat, strict=True) if e is not None and g is not None]
    return [e for e, _ in both], [g for _, g in both]


def weight_half(half: WeightBackward) -> None:
    """Run the deferred computation: add to the `.grad` of the segment's parameters."""
    torch.autograd.backward(half.edges, half.grads, inputs=half.params)


def split(layers: Mapping[int, Layer], crossing: set[str]) -> list[list[int]]:
    """Return the numbers of the layers of each segment, for split backward passes: one layer each if possible.

    Layers between a Stash and its Unstash stay together unless that skip connection leaves the chunk (`crossing`). A
    layer that changes its input in place stays with the layer before, whose output it changes.
    """
    numbers = list(layers)
    joined = {number for number in numbers[1:] if _in_place(layers[number].module)}
    begins: dict[str, int] = {}
    for number in numbers:
        for part in layers[number].module.modules():
            if isinstance(part, Stash):
                begins[part.name] = number
            elif isinstance(part, Unstash) and part.name not in crossing:
                joined.update(range(begins[part.name] + 1, number + 1))
    found: list[list[int]] = []
    for number in numbers:
        if number in joined and found:
            found[-1].append(number)
        else:
            found.append([number])
    return found


def _skip(part: nn.Module) -> bool:
    return isinstance(part, (Stash, Unstash))


def _in_place(module: nn.Module) -> bool:
    return any(getattr(part, "inplace", False) for part in module.modules())

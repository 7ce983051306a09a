"""A segment is a run of successive layers with one forward pass, and one backward pass, which may be split in two.

A split backward pass (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024) computes the gradient of the input
first, and the gradients of the weights later. Each layer is then a segment of its own: the first half computes the
gradient of every layer's output, and the second half needs only these to compute the gradients of the weights.
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
_IN_PLACE = "a leaf Variable that requires grad"  # part of torch's error for a layer that changes a leaf in place


class Tape(NamedTuple):
    """What a backward pass needs of a segment's forward pass.

    Both lists have one list for each port: a value (input, output, or stashed value) of one or more tensors. An entry
    is None for a tensor that needs no gradient.
    """

    leaves: list[list[Tensor | None]]  # autograd leaves of the input, then of each stashed value that was received
    edges: list[list[GradientEdge | None]]  # autograd edges of the output, then of each value stashed for other chunks


class WeightBackward(NamedTuple):
    """The deferred second half of a segment's backward pass, which computes the gradients of its weights."""

    edges: list[GradientEdge]
    grads: list[Tensor]
    params: list[nn.Parameter]


class LayerSegment:
    """A run of successive layers, by their numbers in the model, with one forward and one backward pass.

    `takes` are the names of the stashed values that these layers receive from other chunks, `ships` the names of those
    that they stash for other chunks. `seed(micro, layer)` seeds the random numbers before each layer.
    """

    def __init__(
        self, layers: Mapping[int, Layer], takes: Sequence[str], ships: Sequence[str], seed: Callable[[int, int], None]
    ) -> None:
        self.layers = dict(layers)
        self.takes, self.ships = list(takes), list(ships)
        self._skips = any(_skip(part) for layer in layers.values() for part in layer.module.modules())
        self._seed = seed
        self._copies = False  # whether the input is copied, because the first layer changes it in place
        self._at = ""  # name of the layer that is running

    @classmethod
    def of(
        cls, layers: Mapping[int, Layer], takes: set[str], ships: set[str], seed: Callable[[int, int], None]
    ) -> LayerSegment:
        """Return a segment of `layers`, which gets those of the chunk's `takes` and `ships` that are used in them."""
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
        """Run the layers; return their output, the values stashed for other chunks, and the leaves of the inputs.

        `given` is the output of the previous layer; for the model's first layer it is None, and `call` has the model's
        arguments. `extra` has the stashed values received from other chunks. The leaves are those of `Tape.leaves`.
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
            with user_code(f"layer {self._at}"):  # adds the name of the layer that was running to the error
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
        """The segment's parameters that need a gradient."""
        found = {id(p): p for layer in self.layers.values() for p in layer.module.parameters() if p.requires_grad}
        return list(found.values())


def edge_of(t: Tensor) -> GradientEdge | None:
    """Return the autograd edge of `t`; None if `t` needs no gradient.

    From the edge a backward pass can start, and it does not keep the memory of `t` alive.
    """
    return get_gradient_edge(t) if t.requires_grad else None


def parcel_of(value: Nested, layer: str) -> TensorMessage:
    """Return `value`, the output of `layer`, as a message for another stage."""
    tensors, form = packed(value, layer)
    return TensorMessage(tensors, [t.requires_grad for t in tensors], form)


def backward(tape: Tape, grads: list[Grads]) -> list[Grads]:
    """Run a whole backward pass from the outputs' gradients `grads`, by port.

    Add to the `.grad` of every parameter, and return the gradient of every leaf.
    """
    edges, given = _paired(tape, grads)
    # like torch.autograd.backward, without its checks of shapes, which take longer than a small layer's gradient
    if edges:
        _run_backward(tuple(edges), tuple(given), False, False, (), allow_unreachable=True, accumulate_grad=True)
    return [[None if leaf is None else leaf.grad for leaf in port] for port in tape.leaves]


def input_half(segment: LayerSegment, tape: Tape, grads: list[Grads]) -> tuple[list[Grads], WeightBackward | None]:
    """Run the first half of a backward pass: return the gradient of every leaf, and the second half (None: not needed).

    `grads` are the gradients of the outputs, by port.
    """
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
    """Return the edges of `tape` for which `grads` has a gradient, and these gradients."""
    flat = [edge for port in tape.edges for edge in port], [grad for port in grads for grad in port]
    both = [(e, g) for e, g in zip(*flat, strict=True) if e is not None and g is not None]
    return [e for e, _ in both], [g for _, g in both]


def weight_half(half: WeightBackward) -> None:
    """Run the deferred second half of a backward pass: add to the `.grad` of the segment's parameters."""
    torch.autograd.backward(half.edges, half.grads, inputs=half.params)


def split(layers: Mapping[int, Layer], crossing: set[str]) -> list[list[int]]:
    """Cut a chunk's layers into segments for split backward passes: one layer in each if possible.

    Return the layers' numbers, by segment. The layers from a Stash to its Unstash are one segment, unless that skip
    connection goes to another chunk (its name is in `crossing`). A layer that changes its input in place is in one
    segment with the layer before it.
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

"""Run a range of successive layers forward and backward. The backward pass may be split in two halves.

A split backward pass (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024) computes the gradient of the input
first, and the gradients of the weights later. Each layer is then a range of its own: the first half computes the
gradient of every layer's output, and the second half needs only these to compute the gradients of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from rayps.comm.ring.p2p import TensorMessage
from rayps.core.job.user_code import user_code
from rayps.data.base import Nested
from rayps.parallel.pipeline.cut import Layer
from rayps.parallel.pipeline.flatten_values import packed, unpacked
from rayps.parallel.pipeline.loss_proxy import Call
from rayps.parallel.pipeline.skip import Stash, Unstash, stash_in

Grads = list[Tensor | None]
_run_backward = torch.autograd.Variable._execution_engine.run_backward
_NOTHING = nullcontext()
_IN_PLACE = "a leaf Variable that requires grad"  # part of torch's error for a layer that changes a leaf in place


class Tape(NamedTuple):
    """What the forward pass of a layer range stores for its backward pass.

    Each value (input, output, or stashed value) has a list with one entry for each of its tensors. An entry is None if
    the tensor needs no gradient.
    """

    leaves: list[list[Tensor | None]]  # autograd leaves of the input, then of each stashed value that was received
    edges: list[list[GradientEdge | None]]  # autograd edges of the output, then of each value stashed for other chunks


class WeightBackward(NamedTuple):
    """The deferred second half of a backward pass, which computes the gradients of the range's weights."""

    edges: list[GradientEdge]
    grads: list[Tensor]
    params: list[nn.Parameter]


class LayerRange:
    """A range of successive layers with one forward and one backward pass.

    `layers` maps the layers' numbers in the model to the layers. `receives` are the names of the stashed values that
    these layers receive from other chunks. `sends` are the names of the values that they stash for other chunks.
    `seed(micro, layer)` seeds the random numbers before each layer. Layers run forward in the context `computing()`.
    """

    def __init__(
        self,
        layers: Mapping[int, Layer],
        receives: Sequence[str],
        sends: Sequence[str],
        seed: Callable[[int, int], None],
        computing: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._computing = computing
        self.layers = dict(layers)
        self.receives, self.sends = list(receives), list(sends)
        self._skips = any(_is_skip(part) for layer in layers.values() for part in layer.module.modules())
        self._seed = seed
        self._copies = False  # whether the input is copied, because the first layer changes it in place
        self._at = ""  # name of the layer that is running

    @classmethod
    def of(
        cls,
        layers: Mapping[int, Layer],
        receives: set[str],
        sends: set[str],
        seed: Callable[[int, int], None],
        computing: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> LayerRange:
        """Return a range of `layers`, with the names of the chunk's `receives` and `sends` that these layers use."""
        ends = {
            (type(part), part.name)
            for layer in layers.values()
            for part in layer.module.modules()
            if isinstance(part, (Stash, Unstash))
        }
        return cls(
            layers,
            sorted(name for name in receives if (Unstash, name) in ends),
            sorted(name for name in sends if (Stash, name) in ends),
            seed,
            computing,
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
        stash = {name: self._opened(extra[name], leaves, train) for name in self.receives} if self.receives else {}
        with stash_in(stash) if self._skips else _NOTHING, self._computing():
            for number, layer in self.layers.items():
                self._at = layer.name
                self._seed(micro, number)
                value = layer.module(*args, **kwargs)
                args, kwargs = (value,), {}
        return value, {name: stash[name] for name in self.sends}, leaves

    def _opened(self, message: TensorMessage, all_leaves: list[list[Tensor | None]], train: bool) -> Nested:
        tensors: list[Tensor] = []
        leaves: list[Tensor | None] = []
        all_leaves.append(leaves)
        for t, wants in zip(message.tensors, message.wants, strict=True):
            leaf = t.detach().requires_grad_() if wants and train else None
            leaves.append(leaf)
            plain = t if leaf is None else leaf
            tensors.append(plain.clone() if self._copies else plain)
        return unpacked(tensors, message.form)

    @property
    def last(self) -> str:
        """The name of the range's last layer."""
        return next(reversed(self.layers.values())).name

    @property
    def params(self) -> list[nn.Parameter]:
        """The range's parameters that need a gradient."""
        found = {id(p): p for layer in self.layers.values() for p in layer.module.parameters() if p.requires_grad}
        return list(found.values())


def edge_of(t: Tensor) -> GradientEdge | None:
    """Return the autograd edge of `t`, or None if `t` needs no gradient.

    A backward pass can start from the edge. The edge does not keep the memory of `t` alive.
    """
    return get_gradient_edge(t) if t.requires_grad else None


def message_of(value: Nested, layer: str) -> TensorMessage:
    """Return `value`, the output of `layer`, as a message for another stage."""
    tensors, form = packed(value, layer)
    return TensorMessage(tensors, [t.requires_grad for t in tensors], form)


def backward(tape: Tape, grads: list[Grads]) -> list[Grads]:
    """Run a whole backward pass: add to the `.grad` of every parameter, and return the gradients of `tape.leaves`.

    `grads` are the gradients of the outputs, in the form of `tape.edges`. The result has the form of `tape.leaves`.
    """
    edges, given = _paired(tape, grads)
    # like torch.autograd.backward, without its checks of shapes, which take longer than a small layer's gradient
    if edges:
        _run_backward(tuple(edges), tuple(given), False, False, (), allow_unreachable=True, accumulate_grad=True)
    return [[None if leaf is None else leaf.grad for leaf in leaves] for leaves in tape.leaves]


def backward_inputs(layers: LayerRange, tape: Tape, grads: list[Grads]) -> tuple[list[Grads], WeightBackward | None]:
    """Run the first half of a backward pass; return the gradients of `tape.leaves`, and the second half or None.

    `grads` are the gradients of the outputs, in the form of `tape.edges`. The returned gradients have the form of
    `tape.leaves`. The second half is None if no parameter needs a gradient.
    """
    edges, given = _paired(tape, grads)
    params = layers.params if edges else []
    leaves = [leaf for value in tape.leaves for leaf in value if leaf is not None]
    found: Grads = [None] * len(leaves)
    if edges and leaves:
        found = list(torch.autograd.grad(edges, leaves, given, retain_graph=bool(params), allow_unused=True))
    back = iter(found)
    half = WeightBackward(edges, given, params) if params else None
    return [[None if leaf is None else next(back) for leaf in value] for value in tape.leaves], half


def _paired(tape: Tape, grads: list[Grads]) -> tuple[list[GradientEdge], list[Tensor]]:
    """Return the edges of `tape` for which `grads` has a gradient, and these gradients."""
    flat = [edge for value in tape.edges for edge in value], [grad for value in grads for grad in value]
    both = [(e, g) for e, g in zip(*flat, strict=True) if e is not None and g is not None]
    return [e for e, _ in both], [g for _, g in both]


def backward_weights(half: WeightBackward) -> None:
    """Run the deferred second half of a backward pass: add to the `.grad` of the range's parameters."""
    torch.autograd.backward(half.edges, half.grads, inputs=half.params)


def split(layers: Mapping[int, Layer], crossing: set[str]) -> list[list[int]]:
    """Cut a chunk's layers into ranges for split backward passes, with one layer in each range if possible.

    Return for each range the numbers of its layers. The layers from a Stash to its Unstash are one range, unless that
    skip connection goes to another chunk (its name is in `crossing`). A layer that changes its input in place is in one
    range with the layer before it.
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


def _is_skip(part: nn.Module) -> bool:
    return isinstance(part, (Stash, Unstash))


def _in_place(module: nn.Module) -> bool:
    return any(getattr(part, "inplace", False) for part in module.modules())

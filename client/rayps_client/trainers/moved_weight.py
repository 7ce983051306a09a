"""Whether the weight that a loss returned depends on the model, as an accuracy does and a number of tokens does not.

`return loss, accuracy` looks like a pair (sum, weight). The weight is therefore computed again with other parameters.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from rayps_client.errors import WorkloadError

_SETS = 6  # of other parameters: an accuracy over few rows may be the same with some of them
_LEAST = 0.1  # standard deviation of a drawn parameter whose own values are all 0, such as a bias
_ROUNDING = 1e-6  # relative difference of two weights that the order of additions explains


def refuse_moved_weight(
    weight: Callable[[], float | None],
    model: nn.Module,
    *,
    replaced: Callable[[int], AbstractContextManager[None]] | None = None,
    most: Callable[[int], int] | None = None,
) -> None:
    """Compute the weight of a loss with several sets of parameters, and check that it is the same with all of them.

    `weight` computes the loss and returns its weight, or None if it has none. All calls see the same random numbers, so
    that a mask that the loss draws is the same. The model's parameters and buffers, and the random states of torch,
    numpy and `random`, are afterwards what they were. A weight that differs with the same parameters, because the loss
    has a generator of its own, is not refused.

    If several processes hold the model's parameters, each calls `weight` equally often: `replaced(n)` is then a block
    in which the parameters are set n (0: their own), and `most(n)` returns the largest n of all processes.

    Raises WorkloadError if the weight depends on the parameters.
    """
    own = most is None  # whether this process holds the whole model
    within = replaced or partial(_other_tensors, model)

    def compute(number: int) -> float | None:
        with within(number):
            random.seed(0)
            np.random.seed(0)
            torch.manual_seed(0)
            with torch.set_grad_enabled(own):  # a loss may compute derivatives itself
                return weight()

    with torch.no_grad(), _random_states(model):
        first = compute(0)
        moved: dict[int, float] = {}  # the weights that differ, by the number of the set
        if first is None and own:
            return
        for number in range(1, _SETS + 1):
            found = None
            # the user's code may fail at such parameters; of several processes none can then go on alone
            with suppress(Exception) if own else nullcontext():
                found = compute(number)
            if not (first is None or found is None or math.isclose(first, found, rel_tol=_ROUNDING)):
                moved[number] = found
        chosen = list(moved) if most is None else [most(max(moved, default=0))]
        for number in chosen if any(chosen) else ():
            again = {(compute(0), compute(number)) for _ in range(_SETS)}
            if number not in moved or again != {(first, moved[number])}:
                continue
            raise WorkloadError(
                "loss(model, batch) returned a pair (sum, weight) whose second value depends on the model: it is "
                f"{first:g} with the model's parameters and {moved[number]:g} with others; a weight is a number that "
                "the batch determines, such as its number of tokens, by which the sum is divided\n"
                "return the loss alone, and a metric such as the accuracy beside it: "
                "{'loss': loss, 'accuracy': accuracy}; if it is the number of rows that count at present, return "
                "the mean over them"
            )


@contextmanager
def _other_tensors(model: nn.Module, number: int) -> Iterator[None]:
    """Replace the buffers by copies inside the block, and the parameters that learn by drawn ones of about their size.

    Number 0 replaces them by copies, which a loss may change in place. Tied parameters stay tied.
    """
    learn = [p for p in model.parameters() if p.requires_grad]
    drawn = {
        id(p): nn.Parameter(drawn_like(p, number, index) if number else p.detach().clone())
        for index, p in enumerate(learn)
    }
    copies = {id(buffer): buffer.clone() for buffer in model.buffers()}
    before = [(module, dict(module._parameters), dict(module._buffers)) for module in model.modules()]
    try:
        for module, parameters, buffers in before:
            module._parameters.update({name: drawn.get(id(p), p) for name, p in parameters.items()})
            module._buffers.update({name: copies.get(id(buffer), buffer) for name, buffer in buffers.items()})
        yield
    finally:
        for module, parameters, buffers in before:
            module._parameters.update(parameters)
            module._buffers.update(buffers)


def drawn_like(values: Tensor, number: int, index: int) -> Tensor:
    """Return random numbers of the shape, dtype, device and about the size of a parameter's values.

    They are those of set `number` for the parameter `index`.
    """
    size = float(values.detach().abs().square().mean().sqrt()) if values.numel() else 0.0
    generator = torch.Generator(values.device).manual_seed(index * (_SETS + 1) + number)
    return (torch.randn(values.shape, generator=generator, device=values.device) * max(size, _LEAST)).to(values)


@contextmanager
def _random_states(model: nn.Module) -> Iterator[None]:
    """Restore the random states of torch, numpy and `random` after the block."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    devices = {p.device.index or 0 for p in model.parameters() if p.is_cuda}
    with torch.random.fork_rng(devices=sorted(devices)):
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)

"""A torch optimizer cut into slices of the parameter vector, and its state as named tensors.

Only an elementwise optimizer gives the same result slice by slice (SGD, Adam, Adagrad: yes; Adafactor,
Muon, L-BFGS: no). Whether one is, is found out by a probe, not by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rayps.errors import WorkloadError
from rayps.flat import Entry, Layout
from rayps.user_code import user_code

Factory = Callable[[list[nn.Parameter]], Optimizer]
Moments = dict[str, dict[str, Any]]  # parameter name -> state key -> tensor (whole or slice) or number


class SlicedOptimizer:
    """The user's optimizer over elements lo to hi of the vector; its parameter groups survive the slicing."""

    def __init__(self, factory: Factory, layout: Layout, params: Tensor, lo: int, hi: int) -> None:
        self.params = params
        self._pieces = layout.pieces(lo, hi)
        self._slices = [slice(piece.lo - lo, piece.hi - lo) for piece in self._pieces]
        leaves = {p.name: nn.Parameter(params[cut]) for p, cut in zip(self._pieces, self._slices, strict=True)}
        self._leaves = [leaves[piece.name] for piece in self._pieces]
        self.optimizer = _retarget(build(factory, layout), layout, leaves, {p.name: p for p in self._pieces})

    def step(self, grad: Tensor) -> None:
        """Apply the gradient slice (same length as `params`)."""
        for leaf, cut in zip(self._leaves, self._slices, strict=True):
            leaf.grad = grad[cut]
        with user_code("optimizer.step"):
            self.optimizer.step()

    def leaves(self) -> list[tuple[nn.Parameter, slice]]:
        """Every piece of a parameter, and where it lies in `params`."""
        return list(zip(self._leaves, self._slices, strict=True))

    def moments(self) -> Moments:
        """The state of every piece, by parameter name; tensors are copies."""
        return {
            piece.name: _copy(self.optimizer.state.get(leaf, {}))
            for piece, leaf in zip(self._pieces, self._leaves, strict=True)
        }

    def load(self, moments: Moments, layout: Layout) -> None:
        """Take over a state of whole parameters; each piece gets its slice."""
        whole = {entry.name: entry for entry in layout.entries}
        for piece, leaf in zip(self._pieces, self._leaves, strict=True):
            if moments.get(piece.name):
                self.optimizer.state[leaf] = _cut_all(moments[piece.name], whole[piece.name], piece)


def made(factory: Factory, params: list[nn.Parameter]) -> Optimizer:
    """The user's optimizer of these parameters.

    Raises:
        WorkloadError: the user's code failed, or did not give an optimizer of them.
    """
    with user_code("optimizer"):
        optimizer = factory(params)
    if not isinstance(optimizer, Optimizer):
        raise WorkloadError(
            f"optimizer(params) gave {type(optimizer).__name__}: return a torch.optim.Optimizer over params"
        )
    known = {id(p) for p in params}
    for group in optimizer.param_groups:
        if any(id(p) not in known for p in group["params"]):
            raise WorkloadError(
                "optimizer(params) holds parameters that it was not given: build it from `params`, "
                "e.g. torch.optim.SGD(params, lr=0.1)"
            )
    return optimizer


def build(factory: Factory, layout: Layout) -> Optimizer:
    """The user's optimizer over stand-ins of the right shapes that take no memory.

    Raises:
        WorkloadError: the user's code failed, or did not give an optimizer.
    """
    stand_ins = [nn.Parameter(torch.zeros((), dtype=layout.dtype).expand(entry.shape)) for entry in layout.entries]
    optimizer = made(factory, stand_ins)
    optimizer.rayps_order = {id(p): i for i, p in enumerate(stand_ins)}  # type: ignore[attr-defined]
    return optimizer


def _retarget(
    optimizer: Optimizer, layout: Layout, leaves: dict[str, nn.Parameter], pieces: dict[str, Entry]
) -> Optimizer:
    order: dict[int, int] = optimizer.rayps_order  # type: ignore[attr-defined]
    state = dict(optimizer.state)
    optimizer.state.clear()
    for group in optimizer.param_groups:
        stand_ins, group["params"] = group["params"], []
        group.pop("param_names", None)
        for stand_in in stand_ins:
            entry = layout.entries[order[id(stand_in)]]
            if entry.name in leaves:
                group["params"].append(leaves[entry.name])
                if stand_in in state:  # Adagrad makes its state at once
                    optimizer.state[leaves[entry.name]] = _cut_all(state[stand_in], entry, pieces[entry.name])
    return optimizer


def _cut_all(state: Mapping[str, Any], entry: Entry, piece: Entry) -> dict[str, Any]:
    return {key: _cut(value, entry, piece, counts=key == "step") for key, value in state.items()}


def _cut(value: Any, entry: Entry, piece: Entry, *, counts: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    if tuple(value.shape) == entry.shape and not counts:  # of a parameter that is a number, the slice is a vector
        return value.reshape(-1)[piece.lo - entry.lo : piece.hi - entry.lo].clone()
    return value.clone()


def _copy(state: Mapping[str, Any], device: torch.device | str = "cpu") -> dict[str, Any]:
    # numbers such as Adam's step stay on the CPU, as torch keeps them
    return {
        key: value.detach().to(device if value.dim() else "cpu", copy=True) if isinstance(value, Tensor) else value
        for key, value in state.items()
    }


def moments(optimizer: Optimizer, layout: Layout, params: list[nn.Parameter]) -> Moments:
    """The state of a whole optimizer by parameter name; tensors are copies."""
    return {entry.name: _copy(optimizer.state.get(p, {})) for entry, p in zip(layout.entries, params, strict=True)}


def load(optimizer: Optimizer, state: Moments, layout: Layout, params: list[nn.Parameter]) -> None:
    """Put a state by parameter name into a whole optimizer."""
    for entry, p in zip(layout.entries, params, strict=True):
        if state.get(entry.name):
            optimizer.state[p] = _copy(state[entry.name], p.device)


def join(parts: list[Moments], layout: Layout) -> Moments:
    """The states of consecutive slices as the state of whole parameters."""
    whole: Moments = {}
    for entry in layout.entries:
        held = [part[entry.name] for part in parts if part.get(entry.name)]
        if held:
            whole[entry.name] = {key: _join([piece[key] for piece in held], entry) for key in held[0]}
    return whole


def _join(values: list[Any], entry: Entry) -> Any:
    first = values[0]
    if isinstance(first, Tensor) and first.dim() > 0 and sum(v.numel() for v in values) == entry.hi - entry.lo:
        return torch.cat([v.reshape(-1) for v in values]).reshape(entry.shape)
    return first


def check_elementwise(factory: Factory, layout: Layout) -> None:
    """Refuse an optimizer whose step on whole parameters differs from its steps on their flat slices.

    It is tried on small stand-ins of the layout's parameters, as many and with as many dimensions.

    Raises:
        WorkloadError: saying why, and what to use instead.
    """
    layout = _probe(layout)
    generator = torch.Generator().manual_seed(17)
    start = torch.randn(layout.size, generator=generator)
    grads = [torch.randn(layout.size, generator=generator) for _ in range(3)]
    name = type(build(factory, layout)).__name__
    widest = max(layout.entries, key=lambda entry: (len(entry.shape) > 1, entry.hi - entry.lo))
    cut = widest.lo + (widest.hi - widest.lo) // 3  # within a parameter, and within a row of it
    try:
        whole = _step_whole(factory, layout, start, grads)
        bounds = ((0, cut), (cut, layout.size))
        sliced = torch.cat([_step_slice(factory, layout, start, grads, lo, hi) for lo, hi in bounds])
        same = torch.equal(whole, sliced)
    except Exception as error:  # the optimizer is the user's: whatever it raises is the reason
        raise WorkloadError(
            f"{name} cannot run on a parameter server, which gives it flat slices: {str(error).partition(chr(10))[0]}\n"
            "use an elementwise optimizer such as SGD, Adam or Adagrad, or the strategy all_reduce"
        ) from error
    if not same:
        raise WorkloadError(
            f"{name} is not elementwise: on slices of the parameters it takes other steps than on the whole.\n"
            "a parameter server needs an elementwise optimizer such as SGD, Adam or Adagrad; "
            "with all_reduce any will do"
        )


def _probe(layout: Layout) -> Layout:
    return Layout.of((e.name, torch.empty([min(extent, 5) for extent in e.shape])) for e in layout.entries)


def _step_whole(factory: Factory, layout: Layout, start: Tensor, grads: list[Tensor]) -> Tensor:
    vector = start.clone()
    params = [nn.Parameter(vector[e.lo : e.hi].view(e.shape)) for e in layout.entries]
    optimizer = factory(params)
    for grad in grads:
        for p, e in zip(params, layout.entries, strict=True):
            p.grad = grad[e.lo : e.hi].view(e.shape).clone()
        optimizer.step()
    return vector


def _step_slice(factory: Factory, layout: Layout, start: Tensor, grads: list[Tensor], lo: int, hi: int) -> Tensor:
    sliced = SlicedOptimizer(factory, layout, start[lo:hi].clone(), lo, hi)
    for grad in grads:
        sliced.step(grad[lo:hi].clone())
    return sliced.params


def ignores_scale(factory: Factory, layout: Layout) -> bool:
    """Whether the first step hardly depends on the gradient's size (Adam-like), so that 1/N is lost on it."""
    layout = _probe(layout)
    grad = torch.randn(layout.size, generator=torch.Generator().manual_seed(17))
    moved: list[float] = []
    for scale in (1.0, 0.25):
        sliced = SlicedOptimizer(factory, layout, torch.zeros(layout.size), 0, layout.size)
        sliced.step(grad * scale)
        moved.append(sliced.params.norm().item())
    return moved[0] > 0 and moved[1] / moved[0] > 0.5

"""A model as one vector: every parameter is a view of a vector, and every gradient is a view of another.

A shard, a bucket and a ring's chunk are slices of such a vector. Buffers (BatchNorm statistics) and parameters that
need no gradient are not part of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from rayps_client.errors import ConfigError, WorkloadError
from torch import Tensor, nn

from rayps.tensors.named_parameters import NamedParameters
from rayps.tensors.weight_watch import WeightWatch

_DOT = 1 << 27  # elements of which one product is computed: cuBLAS counts in 32 bits, and half precision needs a copy


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter's position in the vector: elements lo to hi, of the given shape."""

    name: str
    lo: int
    hi: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """The position of each parameter in the vector. Plain data, equal on every worker and shard."""

    entries: tuple[Entry, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, named: Iterable[tuple[str, Tensor]]) -> Layout:
        """Lay out named tensors, one after another.

        Raises:
            WorkloadError: there are no tensors, their dtypes differ, or one is complex.
        """
        entries: list[Entry] = []
        dtypes: dict[torch.dtype, str] = {}
        lo = 0
        for name, tensor in named:
            if tensor.is_complex():
                raise WorkloadError(
                    f"the parameter {name!r} has complex numbers ({str(tensor.dtype).removeprefix('torch.')}), which "
                    "are not trained:\nkeep a parameter of real numbers of shape "
                    f"{[*tensor.shape, 2]}, and use torch.view_as_complex(parameter) in forward",
                    parameter=name,
                )
            hi = lo + tensor.numel()
            entries.append(Entry(name, lo, hi, tuple(tensor.shape)))
            dtypes.setdefault(tensor.dtype, name)
            lo = hi
        if not entries:
            raise WorkloadError("the model has no parameter that requires a gradient: there is nothing to train")
        if len(dtypes) > 1:
            found = ", ".join(f"{str(dtype).removeprefix('torch.')} ({name})" for dtype, name in dtypes.items())
            raise WorkloadError(
                f"the model's parameters have several dtypes: {found}\nconvert the model to one: model.float()"
            )
        return cls(tuple(entries), next(iter(dtypes)))

    @property
    def size(self) -> int:
        """The number of elements of the vector."""
        return self.entries[-1].hi if self.entries else 0

    @property
    def names(self) -> list[str]:
        """The names of the parameters, in order."""
        return [entry.name for entry in self.entries]

    def pieces(self, lo: int, hi: int) -> list[Entry]:
        """Cut the range [lo, hi) at the borders of parameters; return one entry with a flat shape for each part."""
        cut = ((entry.name, max(lo, entry.lo), min(hi, entry.hi)) for entry in self.entries)
        return [Entry(name, a, b, (b - a,)) for name, a, b in cut if a < b]


@dataclass(slots=True)
class Gradient:
    """The gradient of the mean loss over `samples` samples.

    `packed` [size + 1] is the gradient, followed by one element in which a ring sends the number of samples. If the
    gradient has overflowed in fp16, it is `skipped`: a zero vector of 0 samples.
    """

    packed: Tensor
    samples: float
    loss: float = math.nan
    skipped: bool = False

    @property
    def vector(self) -> Tensor:
        """The gradient itself, [size]: a view of `packed`."""
        return self.packed[:-1]


def find_outside_vector(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model that are not in the vector, by name: buffers, and parameters without gradient."""
    frozen = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
    return frozen | dict(model.named_buffers())


def find_untrained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that need no gradient, with their names."""
    return [(name, p) for name, p in model.named_parameters() if not p.requires_grad]


def refuse_thawed(frozen: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Refuse a parameter that needed no gradient when the model was laid out, and needs one now.

    Raises:
        WorkloadError: the error names the parameter.
    """
    for name, p in frozen:
        if p.requires_grad:
            raise WorkloadError(
                f"the parameter {name!r} needs a gradient now, but needed none when training began "
                "(requires_grad=False), so that no worker steps it:\nlet it need a gradient from the start, in a "
                "parameter group whose learning rate the schedule holds at 0 until then; or train twice, the second "
                "time with start_from",
                parameter=name,
            )


def refuse_frozen(trained: Iterable[tuple[str, nn.Parameter]], strategy: str) -> None:
    """Refuse a parameter that needed a gradient when the model was laid out, and needs none now.

    Call it under a strategy that would still move the parameter. `strategy` is its name.

    Raises:
        WorkloadError: the error names the parameter.
    """
    name = next((name for name, p in trained if not p.requires_grad), None)
    if name is not None:
        raise WorkloadError(
            f"the parameter {name!r} needs no gradient any more (requires_grad=False), but {strategy} steps all "
            "parameters that needed one at the start, by momentum and weight decay too:\nlet it need a gradient, and "
            "set the learning rate of its group to 0 by the schedule; or use all_reduce, whose workers skip it",
            parameter=name,
        )


class FlatModel:
    """A model whose parameters and gradients are views of two vectors."""

    def __init__(
        self,
        model: nn.Module,
        buffer: Callable[[int, torch.dtype], Tensor] | None = None,
        part: tuple[Layout, Sequence[nn.Parameter]] | None = None,
        home: Callable[[int, torch.dtype], Tensor] | None = None,
        *,
        keeps_sparse: bool = False,
        holds_gradient: bool = True,
    ) -> None:
        """Flatten the model in place.

        `buffer(n, dtype)` allocates the gradient vector, e.g. in a ring's memory that peers can read; it must be on the
        model's device. `part` is the layout of the vector and its parameters in order; None means all trained ones.
        `home(n, dtype)` allocates the parameter vector in memory that other processes read or update too. With
        `keeps_sparse`, sparse gradients stay sparse, and a step changes only their rows. Without `holds_gradient` there
        is no gradient vector: gradients stay in `.grad`, and `packed` is empty.
        """
        self.model = model
        self._params = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if part is None:
            self.layout = Layout.of(self._params)
        else:
            self.layout = part[0]
            self._params = [(entry.name, p) for entry, p in zip(part[0].entries, part[1], strict=True)]
        self._untrained = find_untrained(model)
        self._parameters = NamedParameters((p for _, p in self._params), (name for name, _ in self._params))
        device = self._params[0][1].device if self._params else torch.device("cpu")
        self._keeps_sparse = keeps_sparse
        if home is None:
            self.vector = torch.empty(self.layout.size, dtype=self.layout.dtype, device=device)
        elif device.type == "cpu":
            self.vector = home(self.layout.size, self.layout.dtype)
        else:
            raise ConfigError(f"the model is on {device.type}: this strategy needs it on the CPU", field="strategy")
        if not holds_gradient:
            self.packed = torch.empty(0, dtype=self.layout.dtype, device=device)
        elif buffer is not None:
            self.packed = buffer(self.layout.size + 1, self.layout.dtype)
        else:
            self.packed = torch.zeros(self.layout.size + 1, dtype=self.layout.dtype, device=device)
        self.views: list[Tensor] = []  # each parameter's view of the gradient vector
        self._bound: list[Tensor] = []  # each parameter's view of the last other vector that was passed to `bind`
        with torch.no_grad():
            for (_, p), entry in zip(self._params, self.layout.entries, strict=True):
                view = self.vector[entry.lo : entry.hi].view(entry.shape)
                view.copy_(p)
                p.data = view
                # .data has its own version counter: a write to one gradient must not count as a write to all of them
                if holds_gradient:
                    self.views.append(self.packed[entry.lo : entry.hi].view(entry.shape).data)
        for (_, p), view in zip(self._params, self.views, strict=holds_gradient):
            p.grad = view  # zeros; pages that are never written take no memory
        self.watch = WeightWatch(self.vector, self._parameters, self.layout.entries)

    @property
    def parameters(self) -> NamedParameters:
        """The trained parameters with their names, in the model's order."""
        return self._parameters

    def refuse_thawed(self) -> None:
        """Raise WorkloadError if a parameter that is not in the vector needs a gradient now: see `refuse_thawed`."""
        refuse_thawed(self._untrained)

    def refuse_frozen(self, strategy: str) -> None:
        """Raise WorkloadError if a parameter in the vector needs no gradient any more: see `refuse_frozen`."""
        refuse_frozen(self._params, strategy)

    def zero_grad(self) -> None:
        """Zero the gradient vector and make every `.grad` a view of it again."""
        self.packed.zero_()
        for (_, p), view in zip(self._params, self.views, strict=True):
            p.grad = view

    def drop_grad(self) -> None:
        """Set every `.grad` to None. The next backward then creates gradients, which `collect_grad` collects."""
        for _, p in self._params:
            p.grad = None

    def collect_grad(self) -> Tensor:
        """Return the gradient vector [size + 1] after a backward; its last element is spare.

        A `.grad` that autograd has replaced is copied into the vector, and then set to its view of the vector again.
        """
        for (_, p), view in zip(self._params, self.views, strict=True):
            if self._keeps(p.grad):
                continue
            if p.grad is None:
                view.zero_()
            else:
                grad = make_dense(p.grad)
                if grad.data_ptr() != view.data_ptr() or grad.shape != view.shape:
                    view.copy_(grad)
            p.grad = view
        return self.packed

    def collect_used(self) -> None:
        """Collect gradients as `collect_grad` does, but leave the `.grad` of parameters without a gradient None."""
        unused = [p for _, p in self._params if p.grad is None]
        self.collect_grad()
        for p in unused:
            p.grad = None

    @property
    def sparse_grads(self) -> bool:
        """Whether gradients of sparse layout stay in `.grad` and are not copied into the vector."""
        return self._keeps_sparse

    def load_grad(self, vector: Tensor) -> None:
        """Copy `vector` into the gradient vector, and make each `.grad` a view of it, for the optimizer's step."""
        if vector.data_ptr() != self.packed.data_ptr():
            self.packed[:-1].copy_(vector)
        self.bind(self.packed)

    def bind(self, vector: Tensor) -> None:
        """Make each `.grad` a view of `vector`, without a copy, for the optimizer's step."""
        bound = self.views
        if vector.data_ptr() != self.packed.data_ptr():
            bound = self._bound
            if not bound or bound[0].data_ptr() != vector.data_ptr():
                bound = self._bound = [vector[e.lo : e.hi].view(e.shape) for e in self.layout.entries]
        for (_, p), view in zip(self._params, bound, strict=True):
            if not self._keeps(p.grad):
                p.grad = view

    def _keeps(self, grad: Tensor | None) -> bool:
        return self._keeps_sparse and grad is not None and grad.layout is not torch.strided


def make_dense(grad: Tensor) -> Tensor:
    """Return a gradient as a dense tensor without autograd history."""
    grad = grad.detach()
    return grad if grad.layout is torch.strided else grad.to_dense()


def square_quickly(values: Tensor) -> float:
    """Return the squared Euclidean norm in one pass, with the accuracy of the dtype, in float32 for half precision."""
    if not values.numel():
        return 0.0
    flat = values.detach().reshape(-1)
    found = math.fsum(_square_quickly(flat[lo : lo + _DOT]) for lo in range(0, len(flat), _DOT))
    return found if math.isfinite(found) else float(square_of(values))


def _square_quickly(flat: Tensor) -> float:
    wide = flat.float() if flat.dtype in (torch.float16, torch.bfloat16) else flat
    return float(torch.vdot(wide, wide).real if wide.is_complex() else torch.dot(wide, wide))


def square_of(values: Tensor) -> Tensor:
    """Return the squared Euclidean norm, as a float64 number on the CPU."""
    return torch.sum(values.to(torch.float64) ** 2).cpu()

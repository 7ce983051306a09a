"""Cut a model whose forward calls the blocks of one nn.ModuleList in turn, such as a Hugging Face decoder.

Such a model needs no adapter. Its layers are the front (embeddings, masks, positions: all that runs before the blocks),
each block, and the head (what runs after the last block). The front and the head run the model's own forward, in which
the forward methods of the modules that belong to other layers are replaced:

- in the front, each block records its arguments, and the last block ends the forward;
- in the head, the modules of the front return zeros, and each block returns the hidden state that was received.

The value between two layers is a dict: the hidden state, the arguments of the model, and the other arguments of each
block. Each tensor among these (masks, rotary positions) is in the value once.

A module belongs to the front if it is registered before the blocks, and to the head if it is registered after them. A
module without parameters belongs to both.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rayps_client.errors import WorkloadError
from torch import Tensor, nn

from rayps.data.base import Nested

Value = dict[str, Any]  # "hidden", "args", "kwargs", "tensors", "calls" (for each block), "tuple"
LEAST_BLOCKS = 2


class _FrontIsDone(BaseException):
    """Ends the model's forward after the arguments of the last block are recorded. User code must not catch it."""


class StackLayer(nn.Module):
    """A layer of a decoder stack. The model itself is no submodule: only the parameters of the layer are."""

    def __init__(self, model: nn.Module, parts: Sequence[nn.Module]) -> None:
        """Register `parts`, the modules of `model` that this layer uses."""
        super().__init__()
        self._model = (model,)  # in a tuple, so that it is not registered
        self.parts = nn.ModuleList(parts)

    @property
    def model(self) -> nn.Module:
        """The whole model, whose forward the front and the head run."""
        return self._model[0]

    def train(self, mode: bool = True) -> StackLayer:
        """Set the mode of the parts, and of the model, whose forward may depend on it."""
        super().train(mode)
        self.model.training = mode
        return self


class StackFront(StackLayer):
    """What the model computes before its first block."""

    def forward(self, *args: Nested, **kwargs: Nested) -> Value:
        """Return the value for the first block. `args` and `kwargs` are those of the model."""
        model, blocks = self.model, blocks_of(self.model)
        kwargs = _without_cache(model, kwargs)
        hidden: list[Tensor] = []
        calls: list[Any] = []
        tensors: list[Tensor] = []

        def record(number: int) -> Callable[..., Tensor]:
            def forward(given: Tensor, *more: Nested, **named: Nested) -> Tensor:
                hidden.append(given)
                where = f"block {number} of {type(model).__name__}"
                calls.append([_encoded(list(more), tensors, where), _encoded(named, tensors, where)])
                if number == len(blocks) - 1:
                    raise _FrontIsDone
                return given

            return forward

        try:
            with _replaced({block: record(i) for i, block in enumerate(blocks)}):
                model(*args, **kwargs)
        except _FrontIsDone:
            pass
        if len(calls) != len(blocks):
            raise WorkloadError(
                f"a pipeline cannot cut {type(model).__name__}: its forward calls {len(calls)} of its {len(blocks)} "
                "blocks in turn; give the model a method layers(), or make it an nn.Sequential"
            )
        return {
            "hidden": hidden[0],
            "args": list(args),
            "kwargs": dict(kwargs),
            "tensors": tensors,
            "calls": calls,
            "tuple": False,
        }


class StackBlock(StackLayer):
    """Block `number` of the model."""

    def __init__(self, model: nn.Module, number: int) -> None:
        super().__init__(model, [blocks_of(model)[number]])
        self.number = number

    def forward(self, value: Value) -> Value:
        """Return the value with the hidden state after this block."""
        more, named = (_decoded(each, value["tensors"]) for each in value["calls"][self.number])
        found = self.parts[0](value["hidden"], *more, **named)
        is_tuple = isinstance(found, (tuple, list))
        return {**value, "hidden": found[0] if is_tuple else found, "tuple": is_tuple}


class StackHead(StackLayer):
    """What the model computes after its last block."""

    def __init__(self, model: nn.Module, parts: Sequence[nn.Module], front: Sequence[nn.Module]) -> None:
        """Set the modules of the head, and those of the `front`, whose results the head does not need."""
        super().__init__(model, parts)
        self._front = tuple(front)

    def forward(self, value: Value) -> Nested:
        """Return the model's output."""
        hidden: Tensor = value["hidden"]
        model = self.model

        def received(given: Tensor, *_: Nested, **__: Nested) -> Tensor | tuple[Tensor]:
            return (hidden,) if value["tuple"] else hidden

        def zeros(module: nn.Module) -> Callable[..., Tensor]:
            def forward(*given: Tensor, **_: Nested) -> Tensor:
                if isinstance(module, nn.Embedding) and given:
                    return hidden.new_zeros(*given[0].shape, module.embedding_dim)
                return hidden.new_zeros(hidden.shape)

            return forward

        stand_ins: dict[nn.Module, Callable[..., Any]] = dict.fromkeys(blocks_of(model), received)
        stand_ins |= {module: zeros(module) for module in self._front}
        with _replaced(stand_ins):
            output: Nested = model(*value["args"], **value["kwargs"])
        return output


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a decoder stack, or [] if the model is none.

    They are those of the nn.ModuleList with most parameters among the lists of at least two modules of one class that
    are not inside another such list.
    """
    best: tuple[int, list[nn.Module]] = (0, [])
    for each in _stacks(model):
        size = sum(p.numel() for p in each.parameters())
        best = max(best, (size, list(each)), key=lambda found: found[0])
    return best[1]


def stack_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the (name, layer) pairs of a decoder stack, or [] if the model is none."""
    blocks = blocks_of(model)
    if not blocks:
        return []
    names = {module: name for name, module in model.named_modules()}
    front, head, both = _sides(model, blocks[0])
    return [
        ("front", StackFront(model, [*front, *both])),
        *((names[block], StackBlock(model, number)) for number, block in enumerate(blocks)),
        ("head", StackHead(model, [*head, *both], front)),
    ]


def _stacks(module: nn.Module) -> Iterator[nn.ModuleList]:
    for child in module.children():
        alike = isinstance(child, nn.ModuleList) and len(child) >= LEAST_BLOCKS and len({type(m) for m in child}) == 1
        if alike:
            assert isinstance(child, nn.ModuleList)
            yield child
        else:
            yield from _stacks(child)


def _sides(model: nn.Module, first: nn.Module) -> tuple[list[nn.Module], list[nn.Module], list[nn.Module]]:
    """Return the modules that are registered before the blocks, those after them, and those without parameters.

    A module that contains the blocks is divided further. The others are not.
    """
    front: list[nn.Module] = []
    head: list[nn.Module] = []
    both: list[nn.Module] = []
    seen = False

    def visit(module: nn.Module) -> None:
        nonlocal seen
        for child in module.children():
            if any(part is first for part in child.modules()):
                if isinstance(child, nn.ModuleList):
                    seen = True
                else:
                    visit(child)
            elif next(child.parameters(), None) is None:
                both.append(child)
            else:
                (head if seen else front).append(child)

    visit(model)
    return front, head, both


def _without_cache(model: nn.Module, kwargs: Mapping[str, Nested]) -> dict[str, Nested]:
    """Return `kwargs`, with `use_cache=False` if the model takes it: a cache of keys and values is not for training."""
    takes = "use_cache" in inspect.signature(model.forward).parameters
    config = getattr(model, "config", None)
    return {**kwargs, "use_cache": False} if takes or hasattr(config, "use_cache") else dict(kwargs)


@contextmanager
def _replaced(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Replace the forward methods of modules inside the block."""
    before = {module: vars(module).get("forward") for module in forwards}
    for module, forward in forwards.items():
        vars(module)["forward"] = forward
    try:
        yield
    finally:
        for module, own in before.items():
            if own is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = own


def _encoded(value: Any, tensors: list[Tensor], where: str) -> Any:
    """Replace each tensor by ["tensor", its index in `tensors`], and each list or tuple by ["list" or "tuple", ...]."""
    if isinstance(value, Tensor):
        known = next((i for i, each in enumerate(tensors) if each is value), None)
        if known is None:
            known = len(tensors)
            tensors.append(value)
        return ["tensor", known]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return [kind, *(_encoded(item, tensors, where) for item in value)]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _encoded(item, tensors, where) for key, item in value.items()}
    raise WorkloadError(
        f"{where} is called with a {type(value).__name__}, which cannot be sent to another stage: a pipeline sends "
        "tensors, numbers and texts"
    )


def _decoded(value: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(value, dict):
        return {key: _decoded(item, tensors) for key, item in value.items()}
    if not isinstance(value, list):
        return value
    kind, *rest = value
    if kind == "tensor":
        return tensors[rest[0]]
    items = [_decoded(item, tensors) for item in rest]
    return tuple(items) if kind == "tuple" else items


__all__ = ["StackLayer", "blocks_of", "stack_layers"]

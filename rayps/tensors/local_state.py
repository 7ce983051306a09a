"""What each worker has of its own where workers learn apart, and the names of a state's tensors in a checkpoint. Pure.

Between two meetings the workers' parameters differ, and with them moments, buffers and what the strategy remembers. A
checkpoint holds all of it, by rank, so that a run goes on from the middle of a period bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from rayps.tensors.optim import Moments, ParamState

_OPTIM, _BUFFER, _MEMORY, _PARAMS = "optim/", "buffer/", "memory/", "params"  # how the names of tensors begin


@dataclass(slots=True)
class LocalState:
    """One worker's state: parameters as one vector, the optimizer's state, buffers and a strategy's memory by name."""

    params: Tensor
    moments: Moments = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    memory: dict[str, Tensor] = field(default_factory=dict)

    def named(self) -> tuple[dict[str, Tensor], dict[str, ParamState]]:
        """Its tensors by one name each, and its optimizer's numbers by parameter. Nothing is copied."""
        moments, numbers = by_name(self.moments)
        tensors = {_PARAMS: self.params} | moments
        tensors |= {f"{_BUFFER}{name}": value for name, value in self.buffers.items()}
        return tensors | {f"{_MEMORY}{name}": value for name, value in self.memory.items()}, numbers

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], numbers: Mapping[str, ParamState]) -> LocalState:
        """What `named` was given."""
        moments = moments_of(tensors, numbers)
        return cls(tensors[_PARAMS], moments, below(_BUFFER, tensors), below(_MEMORY, tensors))


def below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin so, by the rest of their names."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def by_name(moments: Moments) -> tuple[dict[str, Tensor], dict[str, ParamState]]:
    """An optimizer's state as tensors by one name each, and its numbers by parameter. Nothing is copied."""
    tensors, numbers = dict[str, Tensor](), dict[str, ParamState]()
    for name, state in moments.items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"{_OPTIM}{name}/{key}"] = value
            else:
                numbers.setdefault(name, {})[key] = value
    return tensors, numbers


def moments_of(tensors: Mapping[str, Tensor], numbers: Mapping[str, ParamState]) -> Moments:
    """What `by_name` was given, found among other tensors."""
    found: Moments = {name: dict(values) for name, values in numbers.items()}
    for name, tensor in tensors.items():
        if name.startswith(_OPTIM):
            parameter, _, key = name.removeprefix(_OPTIM).rpartition("/")
            found.setdefault(parameter, {})[key] = tensor
    return found

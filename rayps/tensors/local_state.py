"""The state of each worker if workers train separately, and the names of its tensors in a checkpoint. No I/O.

Between two averages the workers differ in parameters, moments, buffers and the strategy's memory. A checkpoint contains
all of them for each rank. A run that resumes in the middle of a period therefore continues with the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from rayps.tensors.optim import Moments, ParamState, by_name, moments_of

_BUFFER, _MEMORY, _PARAMS = "buffer/", "memory/", "params"  # prefixes of names of tensors


@dataclass(slots=True)
class LocalState:
    """One worker's state: parameters as one vector, the optimizer's state, buffers and a strategy's memory by name."""

    params: Tensor
    moments: Moments = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    memory: dict[str, Tensor] = field(default_factory=dict)

    def named(self) -> tuple[dict[str, Tensor], dict[str, ParamState]]:
        """Return the state's tensors by name, and the optimizer's numbers by parameter. No tensor is copied."""
        moments, numbers = by_name(self.moments)
        tensors = {_PARAMS: self.params} | moments
        tensors |= {f"{_BUFFER}{name}": value for name, value in self.buffers.items()}
        return tensors | {f"{_MEMORY}{name}": value for name, value in self.memory.items()}, numbers

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], numbers: Mapping[str, ParamState]) -> LocalState:
        """Rebuild the state that `named` returned."""
        moments = moments_of(tensors, numbers)
        return cls(tensors[_PARAMS], moments, below(_BUFFER, tensors), below(_MEMORY, tensors))


def below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names begin with `prefix`, under their names without `prefix`."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}

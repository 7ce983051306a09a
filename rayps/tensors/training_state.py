"""The state of one worker between two rounds, and the names of its tensors. No I/O.

A checkpoint of workers that train separately, the state that a worker hands over to others, and the backup that another
worker holds are this state, under the same names. A checkpoint has it for each rank, because between two averages the
workers differ: a run that resumes in the middle of a period therefore continues with the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from rayps.tensors.optim import Moments, ParamState, moments_of, split_moments

PARAMS, RANDOM = "params", "rng"
BUFFER, _MEMORY = "buffer/", "memory/"  # prefixes of names of tensors


@dataclass(slots=True)
class TrainingState:
    """One worker's state: parameters as one vector, the optimizer's state, buffers and a strategy's memory by name.

    `rng`: torch's random state, where it is stored with the other tensors.
    """

    params: Tensor
    moments: Moments = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    memory: dict[str, Tensor] = field(default_factory=dict)
    rng: Tensor | None = None

    def named(self) -> tuple[dict[str, Tensor], dict[str, ParamState]]:
        """Return the state's tensors by name, and the optimizer's numbers by parameter. No tensor is copied."""
        moments, numbers = split_moments(self.moments)
        tensors = {PARAMS: self.params} | moments
        tensors |= {f"{BUFFER}{name}": value for name, value in self.buffers.items()}
        tensors |= {f"{_MEMORY}{name}": value for name, value in self.memory.items()}
        return tensors if self.rng is None else tensors | {RANDOM: self.rng}, numbers

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], numbers: Mapping[str, ParamState]) -> TrainingState:
        """Rebuild the state that `named` returned."""
        moments, buffers, memory = moments_of(tensors, numbers), below(BUFFER, tensors), below(_MEMORY, tensors)
        return cls(tensors[PARAMS], moments, buffers, memory, tensors.get(RANDOM))


def below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names begin with `prefix`, under their names without `prefix`."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}

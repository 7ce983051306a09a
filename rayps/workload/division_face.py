"""What others need of divided models: the functions of `rayps.parallel`, which only jobs with such models load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from rayps.core.rooms import face_of
from rayps.core.strategy.replica import Replica
from rayps.core.strategy.traffic import Sizes
from rayps.data.base import Batch
from rayps.tensors.division import Division
from rayps.workload.base import Workload
from rayps.workload.model_part import ModelPart


@dataclass(frozen=True, slots=True)
class DivisionFace:
    """The functions of the room of divided models. Where they are defined, they say what they raise."""

    divide: Callable[[Workload, Replica, nn.Module, Batch | None], Division]
    model_slice: Callable[..., ModelPart]  # the class of one worker's part
    probe: Callable[[Workload, Division, Sizes, Batch], Sizes]
    time_chunks: Callable[[Workload, Division, Batch], list[float]]


def find_division() -> DivisionFace:
    """Return the functions of divided models. Raises ConfigError if this installation lacks them."""
    found = face_of("divided models")
    assert isinstance(found, DivisionFace)
    return found

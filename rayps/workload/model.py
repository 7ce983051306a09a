"""A user's model, made in a process whose random numbers others use too."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from rayps.core.errors import WorkloadError
from rayps.core.user_code import user_code
from rayps.tensors.flat import FlatModel, beside
from rayps.tensors.snapshot import Snapshot
from rayps.workload.base import Workload

_DRAWING = threading.RLock()  # torch's random numbers are the whole process's: workers that are threads take turns


@contextmanager
def _drawing() -> Iterator[None]:
    """Let this thread alone draw random numbers; the wait for another thread's model() counts as its own."""
    with user_code("model"):
        _DRAWING.acquire()
    try:
        yield
    finally:
        _DRAWING.release()


@contextmanager
def apart() -> Iterator[None]:
    """Draw random numbers without moving the process's own generator."""
    with _drawing(), torch.random.fork_rng(devices=[]):
        yield


def model_of(workload: Workload) -> nn.Module:
    """A new model of the user's. Raises WorkloadError."""
    with _drawing(), user_code("model"):
        model = workload.model()
    if not isinstance(model, nn.Module):
        raise WorkloadError(f"model() gave {type(model).__name__}: return a torch.nn.Module")
    return model


def drawn(workload: Workload, seed: int) -> Snapshot:
    """The state before the first round: parameters drawn from the seed alone, whatever the strategy or size."""
    with _drawing():
        torch.manual_seed(seed)
        model = model_of(workload)
    buffers = {name: value.clone() for name, value in beside(model).items()}
    flat = FlatModel(model)
    return Snapshot(flat.layout, flat.vector.clone(), buffers=buffers)


def drawn_apart(workload: Workload, seed: int) -> Snapshot:
    """As `drawn`; the process's own generator stays where it is."""
    with apart():
        return drawn(workload, seed)


def has_tables(model: nn.Module) -> bool:
    """Whether modules of a model keep their rows in sparse tables (`rayps.embedding`)."""
    return any(getattr(module, "rows_in_table", False) for module in model.modules())

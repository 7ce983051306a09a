"""Build a user's model with reproducible random numbers, although other threads also draw from torch's generator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from rayps_client.errors import WorkloadError
from rayps_client.trainers.module_modes import prepare_to_train
from torch import nn
from torch.nn.parameter import is_lazy

from rayps.core.job.user_code import user_code
from rayps.data.pass_random import GLOBAL_RANDOM
from rayps.tensors.flat import FlatModel, find_outside_vector
from rayps.tensors.snapshot import Snapshot, hash_of
from rayps.workload.base import Workload


@contextmanager
def _drawing() -> Iterator[None]:
    """Hold the lock that lets only one thread at a time draw random numbers.

    The wait for the lock counts as a separate call of the user's code. It does not use the time limit of `model()`.
    """
    with user_code("model"):
        GLOBAL_RANDOM.acquire()
    try:
        yield
    finally:
        GLOBAL_RANDOM.release()


@contextmanager
def apart() -> Iterator[None]:
    """Restore torch's random state after the block. Draws inside the block do not change the caller's later draws."""
    with _drawing(), torch.random.fork_rng(devices=[]):
        yield


def model_of(workload: Workload) -> nn.Module:
    """Return a new model from the user's `model()`, in the modes in which it is trained.

    Raises:
        WorkloadError: the method fails, or returns no Module or one with a lazy layer that has no shape yet.
    """
    with _drawing(), user_code("model"):
        model = workload.model()
    if not isinstance(model, nn.Module):
        raise WorkloadError(f"model() returned {type(model).__name__}: return a torch.nn.Module")
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(value):
            raise WorkloadError(
                f"model() returned a model whose tensor {name!r} has no shape yet, because its layer is lazy: call the "
                "model once on an example in model(), such as model(torch.zeros(1, 3)), and return it then",
                parameter=name,
            )
    prepare_to_train(model)
    return model


def seeded_model(workload: Workload, seed: int) -> nn.Module:
    """Return a new model from the user's `model()`, drawn from `seed`. Raises the errors of `model_of`."""
    with _drawing():
        torch.manual_seed(seed)
        return model_of(workload)


def drawn(workload: Workload, seed: int) -> Snapshot:
    """Return the state before the first round, with parameters drawn from `seed`.

    The state does not depend on the strategy or the number of workers.
    """
    model = seeded_model(workload, seed)
    buffers = {name: value.clone() for name, value in find_outside_vector(model).items()}
    frozen = frozenset(name for name, p in model.named_parameters() if not p.requires_grad)
    of_frozen = hash_of({name: buffers[name] for name in frozen})
    flat = FlatModel(model)
    return Snapshot(flat.layout, flat.vector.clone(), buffers=buffers, frozen=frozen, frozen_hash=of_frozen)


def drawn_apart(workload: Workload, seed: int) -> Snapshot:
    """Return what `drawn` returns, and restore the random state of the process."""
    with apart():
        return drawn(workload, seed)


def has_tables(model: nn.Module) -> bool:
    """Return whether a module of a model stores its rows in a sparse table (`rayps.embedding`)."""
    return any(getattr(module, "rows_in_table", False) for module in model.modules())

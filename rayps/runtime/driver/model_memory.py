"""Refuse a model that is larger than the memory of this machine while it is built, before the system ends processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rayps_client.errors import RaypsError, WorkloadError
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from rayps.core.memory import read_available_bytes
from rayps.core.strategy.costs import format_bytes
from rayps.workload.base import Workload
from rayps.workload.blank_model import blank

LARGE = 2 << 30  # bytes of parameters from which a model is measured


def measure_model(workload: Workload) -> int | None:
    """Return the bytes of a workload's model, built without memory on the meta device; None if that is impossible."""
    with suppress(RaypsError):
        model = blank(workload, only_meta=True)
        return sum(value.nbytes for value in [*model.parameters(), *model.buffers()])
    return None


@contextmanager
def limit_model(
    workload: Workload, available: Callable[[], int | None] = read_available_bytes, large: int = LARGE
) -> Iterator[None]:
    """Watch the parameters that this thread creates inside the block.

    As soon as they exceed `large` bytes, the whole model is measured without memory. If that is impossible, the
    parameters are compared with the memory while they are created.

    Raises:
        WorkloadError: the model is larger than the memory that is available.
    """
    limit, thread = available(), threading.get_ident()
    seen: set[int] = set()
    count, checked, fits = 0, False, False

    def register(module: nn.Module, name: str, p: nn.Parameter | None) -> None:
        nonlocal count, checked, fits
        if limit is None or p is None or p.is_meta or threading.get_ident() != thread or id(p) in seen:
            return
        seen.add(id(p))
        count += p.nbytes
        if count > large and not checked:
            checked = True
            whole = measure_model(workload)
            if whole is not None and whole > limit:
                raise _explain_too_large(f"the model has {format_bytes(whole)} of parameters and buffers", limit)
            fits = whole is not None
        if count > limit and not fits:
            raise _explain_too_large(f"the model has more than {format_bytes(count)} of parameters", limit)

    handle = register_module_parameter_registration_hook(register)
    try:
        yield
    finally:
        handle.remove()


def _explain_too_large(what: str, limit: int) -> WorkloadError:
    return WorkloadError(
        f"{what}, and this machine has {format_bytes(limit)} of memory available:\nuse a smaller model, or machines "
        "with "
        "more memory; the process that starts a run holds the whole model once, also if workers divide it",
        memory=True,
    )

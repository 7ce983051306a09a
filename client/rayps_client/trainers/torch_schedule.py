"""The learning-rate schedule of a light client: a scheduler of torch, or a function from a step to a factor."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from rayps_client.errors import WorkloadError
from rayps_client.user_errors import users_code


class RateSchedule:
    """The values that a schedule sets in an optimizer's groups, at each step of the schedule ("tick")."""

    def __init__(self, workload: object, make: Callable[[], Optimizer]) -> None:
        """Call the workload's `schedule`, if it has one, with an optimizer of `make` that takes no steps.

        Raises WorkloadError if `schedule` fails or does not return a schedule.
        """
        method = getattr(workload, "schedule", None)
        self._function: Callable[[int], float] | None = None
        self._scheduler: LRScheduler | None = None
        self._past: list[list[dict[str, Any]]] = []  # the groups' values at each tick so far
        if method is None or getattr(method, "is_none", False):
            return
        self._skeleton = make()
        with users_code("schedule"):
            found = method(self._skeleton)
        if isinstance(found, LRScheduler) and not isinstance(found, ReduceLROnPlateau):
            self._scheduler = found
            # torch would warn that the scheduler steps before the optimizer
            self._skeleton._opt_called = True  # type: ignore[attr-defined]
        elif callable(found) and not isinstance(found, LRScheduler):
            self._function = found
        elif found is not None:
            raise WorkloadError(
                f"schedule(optimizer) returned {type(found).__name__}: return a torch.optim.lr_scheduler, or a "
                "function from the step to the factor of the rate"
            )

    def apply(self, optimizer: Optimizer, tick: int) -> None:
        """Set the values of a tick in a new optimizer. Raises WorkloadError if the schedule fails."""
        if self._function is not None:
            with users_code("schedule"):
                factor = float(self._function(tick))
            if not math.isfinite(factor):
                raise WorkloadError(f"the function that schedule() returned gives the factor {factor} for {tick}")
            for group in optimizer.param_groups:
                if "lr" in group:
                    _set(group, "lr", float(group["lr"]) * factor)
        if self._scheduler is None:
            return
        while len(self._past) <= tick:
            if self._past:
                with users_code("schedule"):
                    self._scheduler.step()
            self._past.append([_numbers(group) for group in self._skeleton.param_groups])
        for group, values in zip(optimizer.param_groups, self._past[tick], strict=True):
            for key, value in values.items():
                _set(group, key, value)


def _numbers(group: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a group that a scheduler may change: rates, and momenta."""
    found = {key: group[key] for key in ("lr", "momentum", "betas") if key in group}
    return {key: float(value) if isinstance(value, Tensor) else value for key, value in found.items()}


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    if isinstance(group.get(key), Tensor):
        group[key].fill_(value)
    else:
        group[key] = value

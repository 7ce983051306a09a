"""Learning-rate schedules: what a workload's `schedule` makes of an optimizer's groups, by tick. No sockets.

The scheduler never sees an optimizer that steps. Each process evaluates it on a skeleton, an optimizer of the same
groups over stand-ins without memory, and copies what it has moved (rates, and momentum under OneCycleLR) to where
steps are taken. A tick is the number of a round, or of an epoch: a worker's push carries its round, so that a server
finds the rate of that round, however late the push is, and however often it is repeated.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from rayps.core.errors import WorkloadError
from rayps.core.user_code import user_code
from rayps.tensors import optim
from rayps.tensors.flat import Layout
from rayps.tensors.optim import Factory

Maker = Callable[[Optimizer], Any]  # what `Workload.schedule` is
EVERY = ("step", "epoch")
_Cell = tuple[int, str]  # number of the group, name of the value


@dataclass(frozen=True, slots=True)
class Ticks:
    """How rounds become epochs in a phase: its `origin` (first round, first epoch), and the rounds of an epoch."""

    origin: tuple[int, int] = (0, 0)
    steps: int = 1

    def of(self, every: str, number: int) -> int:
        """The tick of the round with this number; `every` is "step" or "epoch"."""
        if every == "step":
            return number
        began, epoch = self.origin
        return epoch + (number - began) // self.steps


@dataclass(frozen=True)
class Recipe:
    """An optimizer factory with a schedule. It is a factory too, for whoever needs no schedule."""

    factory: Factory
    make: Maker
    every: str = "step"

    def __call__(self, params: list[nn.Parameter]) -> Optimizer:
        return self.factory(params)


def recipe_of(workload: Any) -> Factory:
    """The optimizer factory of a workload; a `Recipe` where the workload has a schedule.

    Raises:
        WorkloadError: `schedule_every` is neither "step" nor "epoch".
    """
    if workload.schedule_every not in EVERY:
        raise WorkloadError(f"schedule_every is {workload.schedule_every!r}: give 'step' or 'epoch'")
    own = getattr(workload.schedule, "__func__", workload.schedule)
    if getattr(own, "is_none", False):
        return workload.optimizer  # type: ignore[no-any-return]
    return Recipe(workload.optimizer, workload.schedule, workload.schedule_every)


def within(factory: Factory, change: Callable[[Factory], Factory]) -> Factory:
    """`change(factory)`, with the schedule that the factory has."""
    return replace(factory, factory=change(factory.factory)) if isinstance(factory, Recipe) else change(factory)


class Rates:
    """What a schedule makes of an optimizer's groups, by tick; only the values that it moves."""

    def __init__(self, make: Maker, skeleton: Callable[[], Optimizer]) -> None:
        """Raises WorkloadError: `schedule` failed, or gave no schedule that can be followed."""
        self._optimizer = skeleton()
        self._made = [_plain(group) for group in self._optimizer.param_groups]
        with user_code("schedule"):
            found = make(self._optimizer)
        self._scheduler, self._function = _checked(found, self._optimizer)
        # the stand-ins take no step before the scheduler does, of which torch would warn
        self._optimizer._opt_called = True  # type: ignore[attr-defined]
        self._past: dict[_Cell, Any] = {}  # by what is moved: its value at each tick so far
        self._count = 0  # ticks that are known
        self._file()

    @property
    def made(self) -> list[dict[str, Any]]:
        """The groups' values before the schedule moved any."""
        return self._made

    def at(self, tick: int) -> dict[_Cell, Any]:
        """By number of group and name: the values at this tick.

        Raises WorkloadError: the schedule failed, or gave what is no rate.
        """
        if self._function is not None:
            return self._by_function(self._function, tick)
        while self._scheduler is not None and self._count <= tick:
            with user_code("schedule"):
                self._scheduler.step()
            self._file()
        return {cell: past[tick] for cell, past in self._past.items()}

    def apply(self, groups: Sequence[dict[str, Any]], tick: int) -> None:
        """Put the values of this tick into an optimizer's groups, which are those of the skeleton by number."""
        for (number, key), value in self.at(tick).items():
            group = groups[number]
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)
            else:
                group[key] = value

    def _by_function(self, function: Callable[[int], float], tick: int) -> dict[_Cell, Any]:
        with user_code("schedule"):
            factor = float(function(tick))
        if not math.isfinite(factor):
            raise WorkloadError(f"schedule gave the factor {factor} at {tick}: give a finite number")
        return {(i, "lr"): group["lr"] * factor for i, group in enumerate(self._made) if "lr" in group}

    def _file(self) -> None:
        """Note the groups' values at the next tick."""
        for number, (group, made) in enumerate(zip(self._optimizer.param_groups, self._made, strict=True)):
            for key, first in made.items():
                value, past = _number(group[key]), self._past.get((number, key))
                if past is None and value != first:
                    past = self._past[number, key] = array("d") if isinstance(value, float) else []
                    past.extend([first] * self._count)
                if past is not None:
                    past.append(value)
        self._count += 1


class Pace:
    """A schedule over the groups of one optimizer that steps."""

    def __init__(self, rates: Rates, every: str, ticks: Ticks, groups: Sequence[dict[str, Any]]) -> None:
        self.rates, self._every, self._ticks, self._groups = rates, every, ticks, groups

    def at(self, number: int) -> None:
        """The step that comes is of the round with this number."""
        self.rates.apply(self._groups, self._ticks.of(self._every, number))


class ScheduleRecord:
    """Where a job's schedule stands, as its checkpoints say it. All else follows from the workload."""

    def __init__(self, factory: Factory) -> None:
        self._factory = factory
        self._rates: Rates | None = None

    def facts(self, layout: Layout, done: int, ticks: Ticks) -> dict[str, Any]:
        """In the last of `done` rounds: {"schedule": what it counts, its tick, the values that it has moved by group};
        empty where there is no schedule. Raises WorkloadError.
        """
        if not isinstance(self._factory, Recipe):
            return {}
        if self._rates is None:
            self._rates = rates_of(self._factory, layout)
            assert self._rates is not None
        tick = max(0, ticks.of(self._factory.every, done - 1))
        groups: list[dict[str, Any]] = [{} for _ in self._rates.made]
        for (group, key), value in self._rates.at(tick).items():
            groups[group][key] = list(value) if isinstance(value, tuple) else value
        return {"schedule": {"every": self._factory.every, "tick": tick, "groups": groups}}


def rates_of(factory: Factory, layout: Layout) -> Rates | None:
    """The schedule of a factory over the parameters of `layout`; None = it has none. Raises WorkloadError."""
    if not isinstance(factory, Recipe):
        return None
    return Rates(factory.make, lambda: optim.build(factory, layout))


def pace_of(factory: Factory, layout: Layout, optimizer: Optimizer, ticks: Ticks) -> Pace | None:
    """The schedule of a factory over an optimizer that it made; None = it has none. Raises WorkloadError."""
    rates = rates_of(factory, layout)
    if rates is None or not isinstance(factory, Recipe):
        return None
    return Pace(rates, factory.every, ticks, optimizer.param_groups)


def _checked(found: Any, optimizer: Optimizer) -> tuple[Any, Callable[[int], float] | None]:
    """A scheduler and None, None and a function, or twice None. Raises WorkloadError."""
    if found is None:
        return None, None
    if isinstance(found, ReduceLROnPlateau):
        raise WorkloadError(
            "schedule(optimizer) gave a ReduceLROnPlateau, whose steps need a metric that no worker has: give a "
            "scheduler of the step or the epoch (`schedule_every`), such as CosineAnnealingLR or MultiStepLR"
        )
    if isinstance(found, LRScheduler) or callable(getattr(found, "step", None)):
        if getattr(found, "optimizer", optimizer) is not optimizer:
            raise WorkloadError(
                "schedule(optimizer) gave a scheduler of another optimizer: build it from the one that is given"
            )
        return found, None
    if callable(found):
        return None, found
    raise WorkloadError(
        f"schedule(optimizer) gave {type(found).__name__}: return a torch.optim.lr_scheduler, or a function that gives "
        "the factor of the rate at a step, e.g. lambda step: 0.99 ** step"
    )


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a group, by name: what a schedule may move."""
    return {key: _number(value) for key, value in group.items() if key != "params" and _is_number(value)}


def _is_number(value: Any) -> bool:
    if isinstance(value, tuple):
        return bool(value) and all(_is_number(each) for each in value)
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_number(each) for each in value)
    if isinstance(value, list):
        return tuple(_number(each) for each in value)
    return float(value)

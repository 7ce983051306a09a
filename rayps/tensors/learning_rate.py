"""Learning-rate schedules: the values of an optimizer's groups at each tick, from a workload's `schedule`. No sockets.

A tick is the number of a round or of an epoch. A push contains its round. A server therefore uses the rate of that
round for a late or repeated push too. In fp16, rounds that are skipped are not counted (`Recipe.skips`): servers count
the pushes that workers send in their place, in the ledger, and workers count their skipped steps. Each process
evaluates the scheduler on a skeleton: an optimizer with the same groups, over parameters without memory. The values
that the scheduler changes (rates, and momentum under OneCycleLR) are copied to the optimizer that takes the steps.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, TypedDict, runtime_checkable

from rayps_client.errors import WorkloadError
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from rayps.core.job.user_code import user_code
from rayps.tensors import optim
from rayps.tensors.flat import Layout
from rayps.tensors.named_parameters import factory_of
from rayps.tensors.optim import Factory, Group, StateValue


@runtime_checkable
class RateScheduler(Protocol):
    """A scheduler of torch, or an object with the same method `step`."""

    def step(self) -> None:
        """Advance by one tick."""


class Trainable(Protocol):
    """The methods of a workload that a schedule uses."""

    schedule_every: str
    precision: str | None

    def optimizer(self, params: list[nn.Parameter]) -> Optimizer:
        """Return the optimizer of `params`."""

    def schedule(self, optimizer: Optimizer) -> Schedule:
        """Return the learning-rate schedule of `optimizer`; None leaves the rates constant."""


Function: TypeAlias = Callable[[int], float]
Schedule: TypeAlias = RateScheduler | Function | None
Maker: TypeAlias = Callable[[Optimizer], Schedule]  # the type of `Workload.schedule`
Value: TypeAlias = float | tuple[float, ...]
EVERY = ("step", "epoch")
_Cell = tuple[int, str]  # number of the group, name of the value


@dataclass(frozen=True, slots=True)
class Ticks:
    """Converts rounds to ticks. `origin` is a phase's first round and epoch, `steps` the number of rounds per epoch."""

    origin: tuple[int, int] = (0, 0)
    steps: int = 1

    def of(self, every: str, number: int) -> int:
        """Return the tick of round `number`; `every` is "step" or "epoch"."""
        if every == "step":
            return number
        began, epoch = self.origin
        return epoch + (number - began) // self.steps


@dataclass(frozen=True)
class Recipe:
    """An optimizer factory with a schedule. It can be called like the factory itself.

    `skips`: in fp16, a step that is skipped because its gradient has overflowed is no tick.
    """

    factory: Factory
    make: Maker
    every: str = "step"
    skips: bool = False

    def __call__(self, params: list[nn.Parameter]) -> Optimizer:
        """Return the optimizer of `factory` over `params`."""
        return self.factory(params)


def recipe_of(workload: Trainable, lr_factor: float = 1.0) -> Factory:
    """Return the optimizer factory of a workload; it is a `Recipe` if the workload has a schedule.

    All learning rates are multiplied by `lr_factor`.

    Raises:
        WorkloadError: `schedule_every` is neither "step" nor "epoch".
    """
    if workload.schedule_every not in EVERY:
        raise WorkloadError(f"schedule_every is {workload.schedule_every!r}: give 'step' or 'epoch'")
    method = getattr(workload.schedule, "__func__", workload.schedule)
    if getattr(method, "is_none", False):
        return with_scaled_rates(factory_of(workload.optimizer), lr_factor)
    every = workload.schedule_every
    skips = workload.precision == "fp16" and every == "step"
    return with_scaled_rates(Recipe(factory_of(workload.optimizer), workload.schedule, every, skips), lr_factor)


@dataclass(frozen=True)
class ScaledRates:
    """An optimizer factory whose learning rates are those of `factory` times `factor`."""

    factory: Factory
    factor: float

    def __call__(self, params: list[nn.Parameter]) -> Optimizer:
        """Return the optimizer over `params`."""
        optimizer = self.factory(params)
        for group in optimizer.param_groups if isinstance(optimizer, Optimizer) else ():
            if isinstance(group.get("lr"), Tensor):
                group["lr"] = group["lr"] * self.factor
            elif "lr" in group:
                group["lr"] *= self.factor
        return optimizer


def with_scaled_rates(factory: Factory, factor: float) -> Factory:
    """Return a factory whose learning rates, and those of its schedule, are multiplied by `factor`."""
    if factor == 1:
        return factory
    if isinstance(factory, Recipe):
        return replace(factory, factory=ScaledRates(factory.factory, factor))
    return ScaledRates(factory, factor)


def skips_ticks(factory: Factory) -> bool:
    """Return whether the schedule of a factory does not count the steps that are skipped in fp16."""
    return isinstance(factory, Recipe) and factory.skips


def change_factory(factory: Factory, change: Callable[[Factory], Factory]) -> Factory:
    """Return `change(factory)`, with the schedule of `factory` if it has one."""
    return replace(factory, factory=change(factory.factory)) if isinstance(factory, Recipe) else change(factory)


class Rates:
    """The values that a schedule changes in an optimizer's groups, at each tick."""

    def __init__(self, make: Maker, skeleton: Callable[[], Optimizer]) -> None:
        """Call the user's `schedule` with a skeleton.

        Raises WorkloadError if `schedule` fails or does not return a schedule.
        """
        self._optimizer = skeleton()
        self._made = [_read_values(group) for group in self._optimizer.param_groups]
        with user_code("schedule"):
            found = make(self._optimizer)
        self._scheduler, self._function = _check(found, self._optimizer)
        # torch would warn that the scheduler steps before the optimizer
        self._optimizer._opt_called = True  # type: ignore[attr-defined]
        # the history of each value that has changed at least once: the value at each evaluated tick
        self._past: dict[_Cell, MutableSequence[Any]] = {}
        self._count = 0  # number of ticks evaluated
        self._record_tick()

    @property
    def made(self) -> list[dict[str, Value]]:
        """The values of each group, by name, before the schedule changed them."""
        return self._made

    def at(self, tick: int) -> dict[_Cell, Value]:
        """Return the values at a tick, as a dict from (group's number, value's name) to the value.

        Raises WorkloadError if the schedule fails or returns a factor that is not finite.
        """
        if self._function is not None:
            return self._call_function(self._function, tick)
        while self._scheduler is not None and self._count <= tick:
            with user_code("schedule"):
                self._scheduler.step()
            self._record_tick()
        return {cell: past[tick] for cell, past in self._past.items()}

    def apply(self, groups: Sequence[Group], tick: int) -> None:
        """Write the values of a tick into an optimizer's groups. The groups are in the order of the skeleton's."""
        for (number, key), value in self.at(tick).items():
            group = groups[number]
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)
            else:
                group[key] = value

    def _call_function(self, function: Function, tick: int) -> dict[_Cell, Value]:
        with user_code("schedule"):
            factor = float(function(tick))
        if not math.isfinite(factor):
            raise WorkloadError(
                f"the function that schedule() returned gives the factor {factor} for {tick}: return a finite number"
            )
        rates = [(i, group.get("lr")) for i, group in enumerate(self._made)]
        return {(i, "lr"): rate * factor for i, rate in rates if isinstance(rate, float)}

    def _record_tick(self) -> None:
        """Append the groups' current values to the histories, as those of the next tick."""
        for number, (group, made) in enumerate(zip(self._optimizer.param_groups, self._made, strict=True)):
            for key, first in made.items():
                value = _read_number(group[key])
                past = self._past.get((number, key))
                if past is None and value != first:
                    past = self._begin_history(value, first)
                    self._past[number, key] = past
                if past is not None:
                    past.append(value)
        self._count += 1

    def _begin_history(self, value: Value, first: Value) -> MutableSequence[Any]:
        """Return the history of a value that changes for the first time: `first`, repeated for each earlier tick."""
        past: MutableSequence[Any] = array("d") if isinstance(value, float) else []
        past.extend([first] * self._count)
        return past


class Pace:
    """Writes a schedule's values into the groups of the optimizer that takes the steps."""

    def __init__(self, rates: Rates, every: str, ticks: Ticks, groups: Sequence[Group]) -> None:
        self.rates, self._every, self._ticks, self._groups = rates, every, ticks, groups

    def at(self, number: int) -> None:
        """Set the values of the optimizer's groups for a step of round `number`."""
        self.rates.apply(self._groups, self._ticks.of(self._every, number))


class ScheduleFacts(TypedDict):
    """A schedule's state at one tick: the unit of ticks `every`, the tick, and the changed values of each group."""

    every: str
    tick: int
    groups: list[dict[str, float | list[float]]]


class ScheduleRecord:
    """Computes the state of a job's schedule for checkpoints. A resumed run compares its schedule with this state."""

    def __init__(self, factory: Factory) -> None:
        self._factory = factory
        self._rates: Rates | None = None

    def facts(self, layout: Layout, done: int, ticks: Ticks, skipped: int) -> dict[str, ScheduleFacts]:
        """Return {"schedule": the schedule's state at the last of `done` rounds}, or {} if there is no schedule.

        `skipped` of these rounds were skipped in fp16: the state is that of the last step that was taken. Raises
        WorkloadError if the schedule cannot be evaluated.
        """
        if not isinstance(self._factory, Recipe):
            return {}
        if self._rates is None:
            self._rates = rates_of(self._factory, layout)
            assert self._rates is not None
        last = done - 1 - (skipped if self._factory.skips else 0)
        tick = max(0, ticks.of(self._factory.every, last))
        groups: list[dict[str, float | list[float]]] = [{} for _ in self._rates.made]
        for (group, key), value in self._rates.at(tick).items():
            groups[group][key] = list(value) if isinstance(value, tuple) else value
        return {"schedule": {"every": self._factory.every, "tick": tick, "groups": groups}}


def read_rates(groups: Sequence[Group]) -> dict[str, float]:
    """Return the learning rates of an optimizer's groups: `lr` of the first, and `lr_0`, `lr_1`, ... if they differ."""
    rates = {number: _read_number(group["lr"]) for number, group in enumerate(groups) if _is_number(group.get("lr"))}
    plain = {number: rate for number, rate in rates.items() if isinstance(rate, float)}
    if not plain:
        return {}
    each = {f"lr_{number}": rate for number, rate in plain.items()} if len(set(plain.values())) > 1 else {}
    return {"lr": next(iter(plain.values())), **each}


def rates_of(factory: Factory, layout: Layout) -> Rates | None:
    """Return the values of a factory's schedule for the parameters of `layout`, or None if there is no schedule.

    Raises WorkloadError if the schedule cannot be evaluated.
    """
    if not isinstance(factory, Recipe):
        return None
    return Rates(factory.make, lambda: optim.build(factory, layout))


def pace_of(factory: Factory, layout: Layout, optimizer: Optimizer, ticks: Ticks) -> Pace | None:
    """Return an object that applies a factory's schedule to `optimizer`, or None if the factory has no schedule.

    `optimizer` is one that the factory created. Raises WorkloadError if the schedule cannot be evaluated.
    """
    rates = rates_of(factory, layout)
    if rates is None or not isinstance(factory, Recipe):
        return None
    return Pace(rates, factory.every, ticks, optimizer.param_groups)


def _check(found: Schedule, optimizer: Optimizer) -> tuple[RateScheduler | None, Function | None]:
    """Check the result of schedule(). Return it as (scheduler, None) or (None, function), or as (None, None) for None.

    Raises WorkloadError if the result is not a schedule, or not one of `optimizer`.
    """
    if found is None:
        return None, None
    if isinstance(found, ReduceLROnPlateau):
        raise WorkloadError(
            "schedule(optimizer) returned a ReduceLROnPlateau, whose steps need a metric that workers do not have: "
            "return a scheduler of the step or the epoch (`schedule_every`), such as CosineAnnealingLR or MultiStepLR"
        )
    if isinstance(found, RateScheduler):
        if getattr(found, "optimizer", optimizer) is not optimizer:
            raise WorkloadError(
                "schedule(optimizer) returned a scheduler of another optimizer: build it from `optimizer`"
            )
        return found, None
    if callable(found):
        return None, found
    raise WorkloadError(
        f"schedule(optimizer) returned {type(found).__name__}: return a torch.optim.lr_scheduler, or a function from "
        "the step to the factor of the rate, e.g. lambda step: 0.99 ** step"
    )


def _read_values(group: Group) -> dict[str, Value]:
    """Return the numbers of a group by name: the values that a schedule may change."""
    return {key: _read_number(value) for key, value in group.items() if key != "params" and _is_number(value)}


def _is_number(value: StateValue) -> bool:
    if isinstance(value, tuple):
        return bool(value) and all(_is_number(each) for each in value)
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _read_number(value: Tensor | float | Sequence[float]) -> Value:
    if isinstance(value, (Tensor, int, float)):
        return float(value)
    return tuple(float(each) for each in value)

"""What a function that `rayps.run` calls can call: its place in the run, its parameters, logged numbers, saved states.

Each call works on the `World` of the thread in which the function runs. A worker's process sends what the calls have
produced to the driver: see `rayps.runtime.own_loop.actor`.
"""

from __future__ import annotations

import itertools
import math
import numbers
import threading
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, SupportsFloat

import numpy as np
import torch
from rayps_client.errors import ConfigError, PeerTimeout
from rayps_client.values import Json, JsonObject
from torch import Tensor, nn

from rayps.comm.ring import Ring
from rayps.core.job.records import Event, Point
from rayps.data.loader import Loader
from rayps.runtime.own_loop.state import SavedPart, encode_value
from rayps.runtime.own_loop.step_measure import StepMeasure
from rayps.strategies.catalogue import StrategySpec

# names of a point's fields that `log` does not set
RESERVED = frozenset(
    ["kind", "round", "rank", "epoch", "time", "samples", "seconds", "compute", "data", "wait", "move", "pull"]
) | {"pull_hidden", "bytes", "staleness", "generation", "strategy"}


def _do_nothing() -> None:
    """Do nothing when something has been produced, because no caller watches the loop."""


class WrapState(Protocol):
    """A wrapped optimizer, as far as saves and replacements are concerned."""

    @property
    def is_free(self) -> bool:
        """Whether another process can take this worker's place while the others continue."""

    def state(self) -> JsonObject:
        """Return its state: tensors, numbers, dicts of them."""

    def exclude(self, model: nn.Module, *, apart: bool) -> None:
        """Take note that another optimizer is wrapped with this model. `apart`: its workers do not step together."""


@dataclass(frozen=True, slots=True)
class LoopPlace:
    """The place of a worker in a run, as its driver sets it."""

    rank: int
    size: int
    name: str  # a name of the run and its generation, by which its workers find each other
    timeout: float  # seconds
    start: float  # seconds within which all workers must have begun: `timeout`, and the time to install requirements
    params: dict[str, Json] = field(default_factory=dict)
    strategy: StrategySpec = "all_reduce"  # the strategy of `rayps.wrap`, unless the call names one
    saves: bool = False  # whether the run has a folder for saved states
    seed: int = 0
    traced: bool = False  # whether the worker traces some of its steps


@dataclass(slots=True)
class World:
    """The place of this worker in a `run`: its rank among `size` workers; and what its function has produced."""

    place: LoopPlace
    restored: tuple[SavedPart, SavedPart] | None = None  # this rank's and rank 0's part of the newest saved state
    # functions that are called at the end; the argument is whether the loop failed
    closing: list[Callable[[bool], None]] = field(default_factory=list)
    steps: int = 0  # steps of wrapped optimizers so far
    produced: Callable[[], None] = _do_nothing  # called after a step, a logged point and a save
    points: list[Point] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    parts: list[SavedPart] = field(default_factory=list)
    wrapped: list[WrapState] = field(default_factory=list)
    loaders: dict[int, Loader] = field(default_factory=dict)  # by the id of their data, which they hold
    ring: Ring | None = None  # of `rayps.mean`
    wraps: itertools.count[int] = field(default_factory=itertools.count)
    lock: threading.Condition = field(default_factory=threading.Condition)
    saved: int = 0  # the number of the last save
    logged: int = -1  # the step of the last logged point
    logged_before: int = -1  # the same, of the state from which the function continues
    ended: threading.Event = field(default_factory=threading.Event)  # set when the process is to end at once
    inputs: str | None = None  # a digest of the first inputs of the first wrapped model; None if not known
    measure: StepMeasure = field(default_factory=StepMeasure)  # of the time of this process, and of the steps

    @property
    def rank(self) -> int:
        """The number of this worker, from 0."""
        return self.place.rank

    @property
    def size(self) -> int:
        """The number of workers of the run."""
        return self.place.size

    @property
    def is_free(self) -> bool:
        """Whether another process can take this worker's place: the workers meet on servers alone, and on no ring."""
        return bool(self.wrapped) and self.ring is None and all(each.is_free for each in self.wrapped)

    @property
    def last_logged(self) -> int:
        """The step of the last logged point of the run, also of one before the function was started again."""
        return self.logged_before if self.logged < 0 else self.logged

    @property
    def restores_own(self) -> bool:
        """Whether `restore` returns a state of this rank, and not that of rank 0."""
        return self.restored is None or bool(self.restored[0].content("own"))

    def wrap_states(self, number: int) -> list[JsonObject] | None:
        """Return this rank's and rank 0's saved state of the wrap with this number, or None if there is none."""
        found = [] if self.restored is None else [part.content("wraps") for part in self.restored]
        return [wraps[number] for wraps in found] if found and number < len(found[0]) else None

    def begin_trace(self, steps: int | None = None) -> None:
        """Trace some of the next steps, if the driver wants it. `steps`: how many there are; None: not known."""
        if self.place.traced and not self.measure.begin_trace(steps):
            self.warn(f"worker-{self.rank} has no trace: another worker of its process is traced")

    def warn(self, message: str) -> None:
        """Add a warning to the run's journal."""
        with self.lock:
            self.events.append({"kind": "warning", "message": message})

    def take(self) -> tuple[list[Point], list[Event], list[SavedPart]]:
        """Remove and return what was produced since the last call."""
        with self.lock:
            found = self.points, self.events, self.parts
            self.points, self.events, self.parts = [], [], []
            self.lock.notify_all()
        return found


current: ContextVar[World] = ContextVar("rayps_world")


def world() -> World:
    """Return this worker's `rank`, and `size`, the number of workers, inside a `run`.

    Raises:
        ConfigError: called outside a `run`.

    Example:
        rayps.run(lambda: (rayps.world().rank, rayps.world().size), workers=2)  # [(0, 2), (1, 2)]
    """
    try:
        return current.get()
    except LookupError:
        raise ConfigError(
            "rayps.world(), wrap(), log(), save(), restore(), params(), batches() and mean() work only in a function "
            "that rayps.run calls, in the thread in which it is called: start your loop by rayps.run(train_fn, "
            "workers=4)"
        ) from None


def params() -> dict[str, Json]:
    """Return the parameters of the run: `rayps.run(..., params={"lr": 0.3})`, or those of the job.

    A function with arguments gets them as keyword arguments instead: `def train_fn(lr=0.1)`.

    Raises:
        ConfigError: called outside a `run`.

    Example:
        rayps.run(lambda: rayps.params()["lr"], workers=2, params={"lr": 0.3})  # [0.3, 0.3]
    """
    return dict(world().place.params)


def log(*, step: int | None = None, samples: float | None = None, **numbers: SupportsFloat) -> None:
    """Log named numbers of a step, such as `rayps.log(loss=loss, accuracy=0.9)`.

    A job's history and page show the mean of each number over the ranks that logged it at this step, weighted by
    `samples`, the number of rows of the rank (the ranks count alike without it). `step` is the number of the step,
    which must not decrease; the default is the number of steps that the wrapped optimizers have taken, or the number
    of the call if there is none. A number may be a tensor or a numpy array of one element.

    Raises:
        ConfigError: called outside a `run`, a value is no number, a name is one of rayps's own, or `step` decreases.

    Example:
        def train_fn():
            for step in range(3):
                rayps.log(loss=1 / (step + 1), step=step)

        rayps.run(train_fn, workers=2)
    """
    here = world()
    at = (here.steps or here.last_logged + 1) if step is None else step
    if isinstance(at, bool) or not isinstance(at, int) or at < max(here.logged, 0):
        raise ConfigError(
            f"rayps.log was given step={step!r} after step {here.logged}: give whole numbers that do not decrease",
            field="step",
        )
    weight = None if samples is None or isinstance(samples, bool) else read_number(samples)
    if samples is not None and (weight is None or not 0 <= weight < math.inf):
        raise ConfigError(f"rayps.log was given samples={samples!r}: give a number of at least 0", field="samples")
    found = {name: _check_number(name, value) for name, value in numbers.items()}
    with here.lock:
        seconds, here.logged = here.measure.add_logged(weight), at
        here.points.append(
            {"kind": "round", "rank": here.rank, "round": at, "samples": weight, "seconds": seconds, "numbers": found}
        )
    if not here.wrapped:  # a loop without a wrapped optimizer counts its steps by its logged points
        here.begin_trace()
        here.measure.end_step()
    here.produced()


def save(state: Any = None, *, every_rank: bool = False) -> None:
    """Save `state`, so that the run can continue from here after the death of a worker, or later with resume.

    `state` is a dict of tensors, numbers, texts, lists, tuples and dicts; an object with `state_dict()`, such as a
    module, an optimizer or a scheduler, stands for its state dict. Every worker calls `save`, equally often. Rank 0's
    state is kept, or with `every_rank` each rank's own. In addition the states of wrapped models and optimizers are
    saved, with torch's random state of each rank; `wrap` and `restore` load them again.

    The call copies the tensors and returns. The state counts as saved when the driver has the parts of all workers, and
    has written them into the folder for checkpoints under another name and renamed it. Without a folder the newest
    state is kept in memory, until the run ends.

    Raises:
        ConfigError: called outside a `run`, or the state has an object that cannot be saved. The error names its place.
        PeerTimeout: earlier states of this worker were not fetched in time, because the disk or the driver is slow.

    Example:
        def train_fn():
            begun = rayps.restore() or {"epoch": 0}
            for epoch in range(begun["epoch"], 3):
                rayps.save({"epoch": epoch + 1})

        rayps.run(train_fn, workers=2, max_failures=3)
    """
    here = world()
    with here.measure.account.span("checkpoint"):
        _save(here, state, every_rank=every_rank)
    here.produced()


def _save(here: World, state: object, *, every_rank: bool) -> None:
    tensors: dict[str, Tensor] = {}
    kept = state if every_rank or here.rank == 0 else None
    body = {"state": kept, "own": every_rank or here.rank == 0, "wraps": [each.state() for each in here.wrapped]}
    tree = encode_value(body | {"random": torch.get_rng_state()}, tensors)
    with here.lock:
        # at most two states of a worker wait for the driver: a loop that saves faster than the disk waits here
        if not here.lock.wait_for(lambda: len(here.parts) < 2, here.place.timeout):
            raise PeerTimeout(
                f"the driver has not fetched a saved state of worker-{here.rank} for {here.place.timeout:g} s: save "
                "less often, or raise timeout",
                peer="driver",
                seconds=here.place.timeout,
            )
        here.saved += 1
        here.parts.append(SavedPart(here.saved, here.steps, tensors, tree, here.last_logged))


def restore() -> Any:
    """Return the newest state that `save` kept, or None if the run starts anew. It also sets torch's random state.

    A `state_dict()` is returned in place of its object: load it with `load_state_dict`. Wrapped models and optimizers
    need no loading: `wrap` has done so.

    Raises:
        ConfigError: called outside a `run`.

    Example:
        def train_fn():
            return rayps.restore()

        rayps.run(train_fn, workers=1)  # [None]
    """
    here = world()
    if here.restored is None:
        return None
    own, first = here.restored
    here.logged_before = own.logged
    torch.set_rng_state(own.content("random"))
    return (own if here.restores_own else first).content("state")


def _check_number(name: str, value: Any) -> float:
    if name in RESERVED:
        raise ConfigError(f"rayps.log was given {name}, a name of rayps's own: choose another name", field=name)
    found = read_number(value)
    if found is None:
        raise ConfigError(
            f"rayps.log was given {name} of {type(value).__name__}: give a number, or a tensor of one element",
            field=name,
        )
    return found


def read_number(value: Any) -> float | None:
    """Return a number of Python, numpy or torch as a float, or None if `value` is not one real number."""
    if isinstance(value, (Tensor, np.ndarray)):
        value = value.item() if math.prod(value.shape) == 1 else None
    elif isinstance(value, np.generic):
        value = value.item()
    return float(value) if isinstance(value, numbers.Real) else None

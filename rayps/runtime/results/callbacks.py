"""Call the callbacks of a job at the driver: each round and evaluation once, each call under the time limit.

The state of the callbacks, and which rounds they have seen, is saved together in every checkpoint. After a recovery
without a new driver, the callbacks continue with what they have seen: repeated rounds are not reported again. A new
driver restores both from the checkpoint, and then reports what the journal has in addition.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from rayps_client.errors import ConfigError, RaypsError, WorkloadError
from rayps_client.values import JsonObject

from rayps.core.job.records import Event, OutcomeRecord, Point
from rayps.core.job.returned_rounds import Returns, SeenRounds, select_counted
from rayps.core.job.user_code import await_call, user_code
from rayps.core.metrics import cut_points
from rayps.core.rows.phase_rounds import Calendar
from rayps.core.urls import Location
from rayps.runtime.records.journal import Journal
from rayps.runtime.results.best_checkpoint import BestCheckpoint
from rayps.runtime.results.early_stopping import EarlyStopping, MetricWatch
from rayps.strategies.job import JobSpec
from rayps.tensors.checkpoints import checkpoint
from rayps.workload.base import Workload
from rayps.workload.callback import Callback

_WATCHING = (EarlyStopping, BestCheckpoint)  # the callbacks that need a metric
_JOB_FIELDS = ("workload", "strategy", "workers", "epochs", "steps", "seed")


class RunHandle:
    """The run as callbacks see it (`rayps.workload.callback.RunView`)."""

    def __init__(self, name: str, spec: JobSpec, params: JsonObject, journal: Journal, folder: Location | None) -> None:
        """Prepare. `params` are all parameters of the workload, and `folder` is that for checkpoints."""
        self.name, self.folder = name, folder
        self.round = self.epoch = 0
        self.params: Mapping[str, object] = params.copy()
        given = spec.to_dict()
        self.job: Mapping[str, object] = {field: given[field] for field in _JOB_FIELDS}
        self.stop_reason: str | None = None
        self.stop_round = 0  # the run ends with its first state of this round or a later one
        # the name under which the job's best checkpoint is kept; None: the first kept
        self.best_name: str | None = None
        self.no_value: Sequence[str] = ()  # metrics of the current evaluation that have no value
        self._journal = journal
        self._target: Point | None = None  # what `log` adds to; None between points
        self._reserved: frozenset[str] = frozenset()
        self._waiting: Point = {}  # numbers for the next round
        self._kept: dict[str, Location] = {}

    @property
    def best(self) -> Location | None:
        """The job's best checkpoint: that of the first `BestCheckpoint`, or if there is none, of the first `keep`."""
        if self.best_name is not None:
            return self._kept.get(self.best_name)
        return next(iter(self._kept.values()), None)

    @property
    def events(self) -> Sequence[Event]:
        """The events of the run so far."""
        return tuple(self._journal.events)

    def about(self, target: Point | None) -> None:
        """Let `log` add to `target`, whose present names it may not replace. A round takes the numbers that wait."""
        self._target, self._reserved = target, frozenset(target or ())
        if target is not None and target.get("kind") == "round":
            target |= {name: number for name, number in self._waiting.items() if name not in target}
            self._waiting = {}

    def stop(self, reason: str) -> None:
        """End the run soon. The first reason is reported."""
        if self.stop_reason is None:
            self.stop_reason, self.stop_round = str(reason), self.round

    def log(self, **numbers: float) -> None:
        """Add named numbers to what the callback is told. Raises ConfigError if a name or a number is refused."""
        for name, number in numbers.items():
            if name in self._reserved:
                raise ConfigError(f"run.log has {name!r}, which is a standard metric: give another name", field=name)
            if isinstance(number, bool) or not hasattr(number, "__float__"):
                raise ConfigError(f"run.log has {name}={number!r}: give a number", field=name)
            into = self._waiting if self._target is None else self._target
            into[name] = number if isinstance(number, int) else float(number)

    def warn(self, message: str) -> None:
        """Add a warning to the job's events."""
        self._journal.event("warning", message)

    def keep(self, round: int, name: str, other: Location | None = None) -> Location | None:
        """Keep the checkpoint of `round` in the subfolder `name`; see `RunView`."""
        if self.folder is None:
            raise explain_missing_folder("a callback keeps a checkpoint")
        path = checkpoint.keep(self.folder, round, name, other)
        if path is not None:
            self._kept[name] = path
        return path


def explain_missing_folder(why: str) -> ConfigError:
    """Return the error of a run that needs a folder for checkpoints and has none. `why` begins its text."""
    return ConfigError(
        f"{why}, and there is no folder for checkpoints: give checkpoint=FOLDER (--checkpoint DIR)", field="checkpoint"
    )


class CallbackRunner:
    """All callbacks of one run."""

    def __init__(self, callbacks: Sequence[Callback], run: RunHandle, timeout: float) -> None:
        """Prepare. `timeout` is the time limit of a call in seconds (`rayps.core.job.user_code.await_call`)."""
        self.run = run
        self.evaluated = 0  # the last evaluation that was reported
        self.ended = False  # whether the driver has ended the run after a stop
        self._named = _name_callbacks(callbacks)
        self._timeout = timeout
        self._seen, self._returns = SeenRounds(), Returns()
        self._held: list[Point] = []  # points that were reported after a stop
        self._started = self._restored = False

    @property
    def names(self) -> list[str]:
        """The names of the callbacks, in the order in which they are called."""
        return list(self._named)

    def check_folder(self, spec: JobSpec, calendar: Calendar) -> str | None:
        """Return a warning if the job's `checkpoint_every` has no effect, else None.

        Raises ConfigError if a callback keeps checkpoints, and the run has no folder for them.
        """
        if not self.each_evaluation:
            return None
        if self.run.folder is None:
            raise explain_missing_folder("a BestCheckpoint keeps checkpoints")
        known = spec.evaluate_every is not None or not calendar.open  # the rounds after which the run evaluates
        if spec.checkpoint_every is None or not known:
            return None
        return "checkpoint_every has no effect with a BestCheckpoint: a state is saved at every evaluation"

    def check_metrics(self, metrics: Mapping[str, float]) -> None:
        """Refuse what `on_evaluation` of an EarlyStopping or a BestCheckpoint will refuse. No callback is called.

        Callbacks after one of the user's are not checked: it may log the metric that they watch.

        Raises:
            ConfigError: an evaluation with these metrics lacks the one that a callback watches.
        """
        for watch in self.watches():
            watch.check(metrics)

    def watches(self) -> list[MetricWatch]:
        """Return what the callbacks watch that `check_metrics` can check."""
        found = []
        for callback in self._find_defining("on_evaluation").values():
            method = type(callback).on_evaluation
            if isinstance(callback, _WATCHING) and method in [kind.on_evaluation for kind in _WATCHING]:
                found.append(callback.watch)
            elif not method.__module__.startswith("rayps."):
                break
        return found

    @property
    def each_evaluation(self) -> bool:
        """Whether a checkpoint of every evaluated state is saved."""
        return any(callback.checkpoint_each_evaluation for callback in self._named.values())

    def may_end(self, round: int) -> bool:
        """Return whether a callback has stopped the run, and the state of `round` is one that the run may end with."""
        return self.run.stop_reason is not None and not self.ended and round >= self.run.stop_round

    @property
    def is_stopping(self) -> bool:
        """Whether a callback has stopped the run, and the driver has not ended it yet."""
        return self.run.stop_reason is not None and not self.ended

    def known(self, round: int) -> int:
        """Return the last evaluation, up to `round`, that need not be repeated in a run that resumes from `round`.

        With callbacks this is the last one that was reported to them.
        """
        return min(round, self.evaluated) if self._restored else round

    # ---- calls

    def start(self, round: int, epoch: int) -> None:
        """Call `on_start` of all callbacks."""
        self.run.round, self.run.epoch, self._started = round, epoch, True
        self._call_all("on_start", lambda callback: callback.on_start(self.run))
        if self._restored:  # the run may have had later rounds, which are repeated
            self._call_all("on_return", lambda callback: callback.on_return(self.run, round))

    def deliver(self, points: Sequence[Point]) -> None:
        """Report merged points of rounds and evaluations that were not reported before.

        Numbers that callbacks log are added to the points. Raises WorkloadError if a callback fails.
        """
        if self._named and points:
            self._call_within_limit(partial(self._deliver, points))

    def deliver_earlier(self, points: Sequence[Point], before: int) -> None:
        """Report what earlier drivers have written: evaluations, and rounds below `before`.

        The run does not repeat these, and the restored callbacks may not have seen the last of them.
        """
        self.deliver(
            [point for point in select_counted(points) if point["kind"] == "evaluation" or point["round"] < before]
        )

    def end_at(self, end: int) -> None:
        """After a stop, end the run after round `end`. Report what was held back and is not later."""
        self.ended = True
        held, self._held = self._held, []
        self.deliver(cut_points(held, end))

    def saved(self, path: Location, round: int) -> None:
        """Call `on_checkpoint` of all callbacks."""
        before, self.run.round = self.run.round, round
        self._call_all("on_checkpoint", lambda callback: callback.on_checkpoint(self.run, path))
        self.run.round = before

    def end(self, outcome: OutcomeRecord) -> None:
        """Call `on_end` of all callbacks if they were started. Raises the first error after all were called."""
        if self._started:
            self._started = False
            self._call_within_limit(partial(self._end, outcome))

    def _deliver(self, points: Sequence[Point]) -> None:
        for point in points:
            if self.is_stopping:  # the workers may train beyond the end
                self._held.append(point)
            elif point["kind"] == "round":
                self._deliver_round(point)
            elif point["kind"] == "evaluation" and point["round"] > self.evaluated:
                self.evaluated = point["round"]
                before, self.run.round = self.run.round, point["round"]
                self.run.epoch = point.get("epoch", self.run.epoch)
                self.run.no_value = point.get("no_value", ())
                self._tell("on_evaluation", point["metrics"])
                self.run.round, self.run.no_value = max(before, self.run.round), ()

    def _deliver_round(self, point: Point) -> None:
        """Report a round. One that the run repeats is reported only to callbacks with `on_return`, after that call."""
        back, again = self._returns.of(point), self._find_defining("on_return")
        for name, callback in again.items() if back is not None else ():
            with user_code(f"{name}.on_return"):
                callback.on_return(self.run, int(back or 0))
        new = self._seen.add(point["round"])
        if new or again:
            self.run.round, self.run.epoch = max(self.run.round, point["round"] + 1), point["epoch"]
            self._tell("on_round", point, None if new else again)

    def _tell(self, method: str, target: Point, only: Collection[str] | None = None) -> None:
        """Call `method` of all callbacks, or of `only` these, with a copy of `target`, to which `run.log` adds."""
        self.run.about(target)
        try:
            for name, callback in self._find_defining(method).items():
                if only is not None and name not in only:
                    continue
                with user_code(f"{name}.{method}"):
                    getattr(callback, method)(self.run, dict(target))
        finally:
            self.run.about(None)

    def _call_all(self, method: str, call: Callable[[Callback], None]) -> None:
        those = self._find_defining(method)

        def run() -> None:
            for name, callback in those.items():
                with user_code(f"{name}.{method}"):
                    call(callback)

        if those:
            self._call_within_limit(run)

    def _find_defining(self, method: str) -> dict[str, Callback]:
        """Return the callbacks that define `method`."""
        base = getattr(Callback, method)
        return {name: each for name, each in self._named.items() if getattr(type(each), method, None) is not base}

    def _end(self, outcome: OutcomeRecord) -> None:
        errors: list[RaypsError] = []
        for name, callback in self._find_defining("on_end").items():
            try:
                with user_code(f"{name}.on_end"):
                    callback.on_end(self.run, outcome)
            except RaypsError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _call_within_limit(self, call: Callable[[], None]) -> None:
        await_call(call, self._timeout, where="driver", stopped=lambda: False)

    # ---- state

    def state(self) -> JsonObject:
        """Return the callbacks' states and what they have seen, as JSON-ready data for a checkpoint; {} without any.

        Raises WorkloadError if a state cannot be written as JSON.
        """
        if not self._named:
            return {}
        states: JsonObject = {}

        def collect() -> None:
            for name, callback in self._named.items():
                with user_code(f"{name}.state_dict"):
                    states[name] = callback.state_dict()
                try:
                    json.dumps(states[name])
                except (TypeError, ValueError) as error:
                    raise WorkloadError(
                        f"{name}.state_dict() cannot be written as JSON ({error}): return numbers, text, lists and "
                        "dicts of these"
                    ) from error

        self._call_within_limit(collect)
        run = self.run
        found: JsonObject = {
            "rounds": [self._seen.below, sorted(self._seen.others)],
            "evaluated": self.evaluated,
            "stop": None if run.stop_reason is None else [run.stop_reason, run.stop_round],
            "states": states,
        }
        return {"callbacks": found}

    def restore(self, meta: Mapping[str, object], *, again: bool) -> None:
        """Restore the state of a checkpoint whose JSON data are `meta`.

        `again`: this driver replaces one that died; a stop that was requested then still counts. Raises WorkloadError
        if a callback fails.
        """
        found = meta.get("callbacks")
        if not self._named or not isinstance(found, dict):
            return
        below, others = found["rounds"]
        self._seen, self.evaluated, self._restored = SeenRounds(below, others), found["evaluated"], True
        if again and found["stop"] is not None:
            self.run.stop_reason, self.run.stop_round = found["stop"]
        states = found["states"]

        def load() -> None:
            for name, callback in self._named.items():
                if name in states:
                    with user_code(f"{name}.load_state_dict"):
                        callback.load_state_dict(states[name])

        self._call_within_limit(load)

    def renumber(self, round: int) -> None:
        """Count all rounds before `round` as seen, and no others: a checkpoint's rounds have new numbers."""
        self._seen, self.evaluated = SeenRounds(round), min(self.evaluated, round)
        self.run.stop_round = min(self.run.stop_round, round)


def runner_of(callbacks: Sequence[Callback], workload: Workload, run: RunHandle, timeout: float) -> CallbackRunner:
    """Return the runner of the given callbacks and those of the workload.

    Raises:
        ConfigError, WorkloadError: something that is not a callback was given, two `BestCheckpoint`s have one name, or
            the workload's method failed.
    """
    with user_code("callbacks"):
        own = workload.callbacks()
    for each in [*callbacks, *own]:
        if not isinstance(each, Callback):
            what = f"the class {each.__name__}" if isinstance(each, type) else type(each).__name__
            raise ConfigError(
                f"callbacks has {what}: give instances of classes derived from rayps.Callback", field="callbacks"
            )
    names = [each.name for each in [*callbacks, *own] if isinstance(each, BestCheckpoint)]
    run.best_name = next(iter(names), None)
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise ConfigError(
            f"callbacks has {names.count(twice)} BestCheckpoints of the name {twice!r}, and the checkpoint of one "
            'replaces that of the other: give each another name, e.g. name="best-accuracy"',
            field="callbacks",
        )
    return CallbackRunner([*callbacks, *own], run, timeout)


def _name_callbacks(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """Return the callbacks by the names of their classes, in order; later ones of a class have a number."""
    counts: Counter[str] = Counter()
    named = {}
    for callback in callbacks:
        kind = type(callback).__name__
        counts[kind] += 1
        named[kind if counts[kind] == 1 else f"{kind}-{counts[kind]}"] = callback
    return named

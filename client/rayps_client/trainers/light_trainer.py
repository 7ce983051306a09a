"""Train the client of this process without rayps: what the trainers for torch and for numpy have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

import numpy as np

from rayps_client.errors import WorkloadError
from rayps_client.exchange.random_numbers import number
from rayps_client.exchange.raw_tensors import RawTensor
from rayps_client.row_order import Ints
from rayps_client.rows import Batch, Rows
from rayps_client.trainers.algorithms import OWN_MODEL, PERSONAL, fedavg, half_of
from rayps_client.trainers.client_turn import ClientSteps, Engine, mean_of
from rayps_client.trainers.local_trainer import LayoutRow, LocalReply, LocalTask, RawTensors, RoundStart
from rayps_client.trainers.local_work import try_batches
from rayps_client.trainers.own_metrics import OwnMetrics, OwnTotal, OwnTotals
from rayps_client.trainers.private_layers import PRIVATE, PrivateBytes
from rayps_client.trainers.private_patterns import private_patterns
from rayps_client.user_errors import users_code
from rayps_client.values import JsonObject

V = TypeVar("V")  # vectors: tensors of torch, or arrays of numpy
ROWS = 1024  # rows that are evaluated at once
_OWN = "buffers/"  # prefix, in a client's state, of its own buffers
_BESIDE = "beside/"  # prefix, in a client's state, of the buffers of the client's personal model
_APART = (_OWN, _BESIDE, PRIVATE)  # prefixes of what a strategy's half does not read


class LightEngine(Engine[V], Protocol[V]):
    """An engine whose parameters and buffers can be exchanged as bytes."""

    @property
    def workload(self) -> object:
        """The user's workload."""

    def layout(self) -> Sequence[LayoutRow]:
        """Return the names, shapes and dtypes of the parameters."""

    def load(self, vector: V, buffers: Mapping[str, RawTensor]) -> None:
        """Copy parameters and buffers into the model."""

    def buffers(self) -> RawTensors:
        """Return the model's buffers, which may be the model's memory."""

    def begin(self, tick: int, seed: int) -> None:
        """Set the schedule's rates of step `tick`, and seed random numbers such as those of dropout."""

    def vector_of(self, raw: RawTensor) -> V:
        """Return bytes as a vector of this engine."""

    def raw(self, vector: V) -> RawTensor:
        """Return a vector as bytes, which may be the vector's memory."""

    def metrics(self, batch: Batch) -> OwnTotals:
        """Return the totals of a batch's loss and metrics, of the model in evaluation mode, without gradients."""

    def apart(self) -> AbstractContextManager[object]:
        """Return a context after which random numbers continue as if nothing had been drawn in it."""


class FirstRows:
    """The first `most` rows of a client, in their order: those on which a workload is tried out."""

    def __init__(self, rows: Rows, most: int) -> None:
        self.batch_size, self.shuffle = most, False
        self._rows = rows

    def check(self) -> None:
        """Do nothing: the rows have been checked."""

    def rows(self) -> int:
        """Return the number of rows."""
        return self.batch_size

    def take(self, rows: Ints) -> Batch:
        """Return a batch of the rows with these numbers."""
        return self._rows.take(np.asarray(rows))


class LightTrainer(Generic[V]):
    """Trains the client of this process: a `rayps_client.trainers.local_trainer.LocalTrainer`."""

    def __init__(self, engine: LightEngine[V], rows: Rows, accumulate: int) -> None:
        """Check the rows. Raises DataError if there are none, or a value cannot be used."""
        rows.check()
        self.engine, self._rows, self._accumulate = engine, rows, accumulate
        self._evaluation: Rows | None = None  # the evaluation rows, once they have been loaded
        self._parts: dict[tuple[str, ...], PrivateBytes] = {}  # by the patterns of private layers

    @property
    def samples(self) -> int:
        """The number of the client's rows."""
        return self._rows.rows()

    def layout(self) -> Sequence[LayoutRow]:
        """Return the names, shapes and dtypes of the parameters."""
        return self.engine.layout()

    def try_out(self) -> str | None:
        """Train on one batch to find errors before the client joins; then restore the model and its buffers.

        Return what to tell the user, as `try_batches` does.

        Raises:
            WorkloadError, DataError: the user's code or data failed.
        """
        engine = self.engine
        before, buffers = engine.copy(engine.vector), _copies(engine.buffers())
        start = RoundStart(engine.raw(before), {}, buffers)
        task = LocalTask({"name": "fedavg", "local_steps": 1}, 0, 0, 0, 0, start=start, state={})
        rows, drop_last = self._rows, getattr(self._rows, "drop_last", False)

        def train(most: int) -> None:
            with engine.apart():
                self._train(task, FirstRows(rows, most))

        notice = try_batches(train, self.samples, rows.batch_size, drop_last=drop_last)
        engine.load(before, buffers)
        return notice

    def train(self, task: LocalTask) -> LocalReply:
        """Train the client.

        Raises:
            WorkloadError, DataError: the user's code or data failed.
            ConfigError: the strategy is not known here.
        """
        return self._train(task, self._rows)

    def evaluate(self, task: LocalTask, name: str) -> OwnMetrics:
        """Evaluate the model of a round's start and this client's personal model: `LocalTrainer.evaluate`.

        Rows are not divided into clients here: all rows of `evaluation_data()` are this client's.
        """
        if self._evaluation is None:
            self._evaluation = evaluation_rows(self.engine.workload, self._rows)
        engine, rows, personal = self.engine, self._evaluation, dict[str, OwnTotal]()
        w_t = engine.vector_of(task.start.w)
        with engine.apart():
            engine.load(w_t, task.start.buffers)
            shared = self._totals(rows)
            if self._load_personal(task, w_t):
                personal = self._totals(rows)
        return OwnMetrics(rows.rows(), shared, personal)

    def _load_personal(self, task: LocalTask, w_t: V) -> bool:
        """Set the model to the client's personal model. Return False if the job's clients have none."""
        engine, options = self.engine, task.strategy
        kind, epochs, part = str(options.get("name")), options.get("finetune"), self._private(options)
        own = {name.removeprefix(_OWN): raw for name, raw in task.state.items() if name.startswith(_OWN)}
        buffers = {**task.start.buffers, **own, **part.own_buffers(task.state)}
        if part:
            w_t = engine.vector_of(part.own_start(task.start.w, task.state))
        if isinstance(epochs, int):
            engine.load(w_t, buffers)
            engine.begin(task.tick, number(task.seed, "finetune", task.round, task.client) >> 1)
            strategy = {**options, "local_epochs": epochs, "local_steps": None}
            turn = ClientSteps(engine, replace(task, strategy=strategy), self._rows, self._accumulate, (w_t, {}, {}))
            fedavg(turn, strategy)
        elif kind in PERSONAL and OWN_MODEL[kind] in task.state:
            beside = {name.removeprefix(_BESIDE): raw for name, raw in task.state.items() if name.startswith(_BESIDE)}
            engine.load(engine.vector_of(task.state[OWN_MODEL[kind]]), {**buffers, **beside})
        elif part or kind in PERSONAL or options.get("buffers") == "keep":
            engine.load(w_t, buffers)
        else:
            return False
        return True

    def _totals(self, rows: Rows) -> OwnTotals:
        found: OwnTotals = {}
        count = rows.rows()
        for low in range(0, count, ROWS):
            with users_code("evaluation_data"):
                batch = rows.take(np.arange(low, min(low + ROWS, count)))
            for name, (value, weight, how) in self.engine.metrics(batch).items():
                before = found.get(name, OwnTotal(0.0, 0.0, how))
                found[name] = OwnTotal(before.value + value, before.weight + weight, how)
        return found

    def _private(self, options: JsonObject) -> PrivateBytes:
        """Return what stays with the client. Raises ConfigError if the patterns do not fit the model."""
        patterns = private_patterns(options.get("private"))
        if patterns not in self._parts:
            shapes = ((name, shape) for name, shape, _ in self.engine.layout())
            self._parts[patterns] = PrivateBytes.of(patterns, shapes, self.engine.buffers())
        return self._parts[patterns]

    def _train(self, task: LocalTask, rows: Rows) -> LocalReply:
        engine, options = self.engine, task.strategy
        half, personal = half_of(options), PERSONAL.get(str(options.get("name")))
        part = self._private(options)
        own = {name: value for name, value in task.state.items() if not name.startswith(_APART)}
        start = part.own_start(task.start.w, task.state)
        w_t = engine.vector_of(start)
        shared = {name: engine.vector_of(raw) for name, raw in task.start.shared.items()}
        state = {name: engine.vector_of(raw) for name, raw in own.items()}
        engine.load(w_t, {**task.start.buffers, **part.own_buffers(task.state)})
        engine.begin(task.tick, number(task.seed, "model", task.round, task.client) >> 1)
        layers = (part.parameters, part.shared)
        turn = ClientSteps(engine, task, rows, self._accumulate, (w_t, shared, state), layers)
        half(turn, options)
        steps, (loss, samples) = turn.steps, mean_of(turn.losses)
        w, buffers, kept = engine.raw(engine.vector), engine.buffers(), dict[str, RawTensor]()
        if part:
            kept = part.state_of(w, buffers)
            w, buffers = part.cut(w), part.without_private(buffers)
        if personal is not None:
            w, buffers = _copy(w), _copies(buffers)
            beside = {name.removeprefix(_BESIDE): raw for name, raw in task.state.items() if name.startswith(_BESIDE)}
            engine.load(w_t, {**task.start.buffers, **beside})  # the buffers from before the training of w_k
            personal(turn, options)
            kept |= {f"{_BESIDE}{name}": raw for name, raw in engine.buffers().items()}
        return LocalReply(
            w,
            {name: engine.raw(vector) for name, vector in turn.reply.items()},
            buffers,
            {**{name: engine.raw(vector) for name, vector in turn.state.items()}, **kept},
            n=turn.n,
            steps=steps,
            samples=samples,
            loss=loss,
            start=part.cut(start) if part.parameters else None,
        )


def checked_rows(found: object, workload: object, method: str = "data") -> Rows:
    """Return what `data()`, or another `method`, returned, if a light client can read it.

    Raises:
        WorkloadError: it is another kind of data.
    """
    if isinstance(found, Rows):
        return found
    raise WorkloadError(
        f"{method}() of {type(workload).__name__} returned {type(found).__name__}: return rayps_client.tensors(...) or "
        "rayps_client.parquet(...),\nor install rayps on this machine, and run `rayps client`"
    )


def evaluation_rows(workload: object, otherwise: Rows) -> Rows:
    """Return the rows of a workload's `evaluation_data()`, or those `otherwise` if it has no such method.

    Raises:
        WorkloadError, DataError: a light client cannot read the rows.
    """
    method = getattr(workload, "evaluation_data", None)
    if method is None:
        return otherwise
    with users_code("evaluation_data"):
        found = method()
    rows = checked_rows(found, workload, "evaluation_data")
    rows.check()
    return rows


def own_totals(given: Mapping[str, object], loss: tuple[float, float], rows: int) -> OwnTotals:
    """Return the totals of a batch: its loss as (sum, weight), and the numbers of `evaluate()`, means over its rows.

    A metric that is no plain number, such as `rayps.Sum`, is left out.
    """
    found = {"loss": OwnTotal(*loss)}
    for name, value in given.items():
        try:
            mean = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            continue
        found[name] = OwnTotal(mean * rows, rows)
    return found


def _copy(raw: RawTensor) -> RawTensor:
    return RawTensor(raw.dtype, raw.shape, bytes(raw.data))


def _copies(raws: Mapping[str, RawTensor]) -> RawTensors:
    return {name: _copy(raw) for name, raw in raws.items()}

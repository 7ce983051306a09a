"""A user's own training loop: `run` starts it on several workers, `wrap` gives it a strategy.

A strategy's `round` requests a batch and a gradient, and the user's loop provides them. `wrap` runs the strategy's
rounds in a separate thread. The loop and that thread take turns, and exactly one of them runs at any time.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import math
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, Protocol, TypeVar

import cloudpickle
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rayps.cluster.local import ActorHandle, ActorReply, Cluster, LocalCluster, rendezvous, until
from rayps.comm.ring import Ring
from rayps.comm.ring.compressed_mean import CompressedRing, compressed
from rayps.core.errors import ActorDied, ClusterError, ConfigError, LinkError, PeerTimeout, RaypsError, WorkloadError
from rayps.core.logs import LogBuffer
from rayps.core.strategy import StrategyView
from rayps.core.topology import compression_in, servers_of
from rayps.core.user_code import placed, user_code
from rayps.core.user_module import pack, unpack
from rayps.core.values import Buffer, Json
from rayps.ps.client.client import GroupServer
from rayps.ps.server_group import ServerGroup
from rayps.runtime.display import Display
from rayps.strategies.catalogue import StrategySpec, parse_for_loop
from rayps.tensors.flat import FlatModel, Gradient, outside_vector
from rayps.tensors.gradient_watch import GradWatch
from rayps.tensors.learning_rate import Maker, Pace, Recipe, Ticks, pace_of
from rayps.tensors.optim import Group, plain_values
from rayps.workload.model import has_tables

WAIT_SECONDS = 1.0  # the longest time, in seconds, that a call waits in a worker for a line
END_SECONDS = 10.0  # seconds to wait for the last lines of workers whose function has returned

Line = tuple[float, str, str]  # time, source, text


@dataclass(frozen=True, slots=True)
class LoopOutput:
    """The lines (time, text) that a worker printed since the last call, and its progress."""

    lines: list[tuple[float, str]]
    steps: int  # optimizer steps that the worker has taken
    returned: bool  # whether the worker's function has returned without an error
    over: bool  # whether no more lines will follow


class LoopWatch:
    """Collects the lines that the workers of a `run` print, and describes the death of a worker.

    For each worker, one thread calls the worker's `output`, which waits until there is a line. A line therefore arrives
    before the process ends, unless it is printed immediately before a kill. `show` is called with the lines, by one
    thread at a time.
    """

    def __init__(self, handles: Sequence[ActorHandle], show: Callable[[list[Line]], None]) -> None:
        self._show, self._showing = show, threading.Lock()
        self._latest: dict[int, LoopOutput] = {}
        self._threads = [
            threading.Thread(target=self._follow, args=(rank, handle), daemon=True, name=f"rayps-watch-{rank}")
            for rank, handle in enumerate(handles)
        ]
        for thread in self._threads:
            thread.start()

    def finish(self, ranks: Sequence[int]) -> None:
        """Wait for the last lines of the workers `ranks`, whose function has returned or which have died."""
        deadline = time.monotonic() + END_SECONDS
        for rank in ranks:
            self._threads[rank].join(max(0.0, deadline - time.monotonic()))

    def death_error(self, rank: int, error: ActorDied) -> ActorDied:
        """Return the error of a run whose worker died: the worker, its last step, the reason and what to do."""
        reason = str(error.data.get("reason", error))
        steps = self._latest[rank].steps if rank in self._latest else None
        at = " before it reported its first optimizer step"
        if steps:
            at = f" after {steps} optimizer step{'s'[: steps != 1]}"
        return ActorDied(
            f"worker-{rank} of the run died{at} ({reason}):\n"
            "rayps.run does not replace a worker: save checkpoints in your loop, and call run again to start from the "
            "newest one\n"
            f"find the cause in the last output of worker-{rank}, or in its memory (`rayps doctor`); rayps.train "
            "replaces workers and continues after a failure",
            **error.data | {"rank": rank, "steps": steps},
        )

    def uneven_steps_error(self) -> WorkloadError | None:
        """Return the error of a run in which one worker's function returned and another worker takes more steps.

        Return None if no worker takes more steps than a worker that has returned.
        """
        left = [(rank, output.steps) for rank, output in sorted(self._latest.items()) if output.returned]
        on = [(rank, output.steps) for rank, output in sorted(self._latest.items()) if not output.returned]
        if not left or not on or left[0][1] > on[0][1]:
            return None
        (rank, steps), (other, done) = left[0], on[0]
        return WorkloadError(
            f"train_fn() returned on worker-{rank} after {steps} optimizer step{'s'[: steps != 1]}, while "
            f"worker-{other} was in its step {done + 1}:\nevery worker must call optimizer.step() equally often; give "
            "each rank as many batches as the rank with the fewest has",
            rank=rank,
            steps=steps,
        )

    def _follow(self, rank: int, handle: ActorHandle) -> None:
        while True:
            try:
                output: LoopOutput = handle.call(
                    "output", WAIT_SECONDS
                ).result()  # a worker answers late while it starts
            except ClusterError:  # the worker has ended; the wait for its result raises the reason
                return
            self._latest[rank] = output
            if output.lines:
                with self._showing:
                    self._show([(at, f"worker-{rank}", text) for at, text in output.lines])
            if output.over:
                return


log = logging.getLogger(__name__)

REPORT_SECONDS = 0.1  # the shortest time, in seconds, between two reports of a step
REASON_SECONDS = 3.0  # seconds after the first failure in which another worker may report the cause of that failure


def _nothing() -> None:
    """Do nothing after a step, because no caller watches the loop."""


@dataclass(slots=True)
class World:
    """The place of this worker in a `run`: its rank among `size` workers."""

    rank: int
    size: int
    name: str
    timeout: float
    # functions that are called at the end; the argument is whether the loop failed
    closing: list[Callable[[bool], None]] = field(default_factory=list)
    steps: int = 0  # steps of wrapped optimizers so far
    stepped: Callable[[], None] = _nothing  # called after each of these steps
    wraps: itertools.count[int] = field(default_factory=itertools.count)


_Result = TypeVar("_Result")
_world: ContextVar[World] = ContextVar("rayps_world")


def world() -> World:
    """Return this worker's rank and the number of workers, inside a `run`.

    Raises:
        ConfigError: called outside a `run`.

    Example:
        rayps.run(lambda: (rayps.world().rank, rayps.world().size), workers=2)  # [(0, 2), (1, 2)]
    """
    try:
        return _world.get()
    except LookupError:
        raise ConfigError(
            "rayps.world() and rayps.wrap() work only in a function that rayps.run calls: start your loop by "
            "rayps.run(train_fn, workers=4)"
        ) from None


def run(
    train_fn: Callable[[], _Result],
    *,
    workers: int,
    resources: dict[str, float] | None = None,
    address: str | None = None,
    timeout: float = 60.0,
    cluster: Cluster | None = None,
) -> list[_Result]:
    """Call `train_fn()` on `workers` Ray actors in parallel, and return a list of their results, one for each rank.

    Inside `train_fn`, `rayps.world()` returns rank and size, and `rayps.wrap` gives model and optimizer a strategy.
    Lines that workers print are shown on stderr at once, each after the worker's name. If a worker dies, it is not
    replaced, and the run ends. `address` is the Ray cluster to join, as for `rayps.train`. `timeout` is in seconds.

    Raises:
        ConfigError, ClusterError, NoResources: the workers cannot be started.
        ActorDied: a worker's process died; names the worker, its number of optimizer steps and the reason.
        WorkloadError: `train_fn` raised an exception, or it returned on one worker while another takes more steps.
        RaypsError: the error that the first failing worker raised.

    Example:
        def train_fn():
            return rayps.world().rank

        rayps.run(train_fn, workers=2)  # [0, 1]
    """
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise ConfigError(f"workers is {workers!r}: give a whole number of at least 1", field="workers")
    packed = pack(train_fn)
    wanted = {"cpu": 1.0} | (resources or {})
    opened = cluster if cluster is not None else _open(address, workers, wanted)
    try:
        gang = opened.reserve([wanted] * workers, timeout)
        name = f"run-{time.time_ns()}"
        handles = [
            opened.spawn(
                "rayps.runtime.loop:LoopActor",
                packed,
                World(rank, workers, name, timeout),
                capture=not isinstance(opened, LocalCluster),  # workers that are threads print to this stderr already
                cpus=wanted["cpu"],
                gpus=wanted.get("gpu", 0.0),
                gang=gang,
                index=rank,
            )
            for rank in range(workers)
        ]
        try:
            return _results(handles, LoopWatch(handles, Display(bar=False).lines))
        finally:
            for handle in handles:
                opened.kill(handle)
            if gang is not None:
                gang.release()
    finally:
        if opened is not cluster:
            opened.close()


def _results(handles: list[ActorHandle], watch: LoopWatch) -> list[Any]:
    """Return all results. After the first failure, stop waiting for the other workers, which have lost a peer."""
    replies = [handle.call("run") for handle in handles]
    until(lambda: all(reply.done() for reply in replies) or bool(_failures(replies)), math.inf)
    # the peers of a failed rank fail soon after it, with errors that are not the cause
    until(lambda: all(reply.done() for reply in replies) or bool(_reasons(replies)), REASON_SECONDS)
    watch.finish([rank for rank, reply in enumerate(replies) if reply.done()])
    uneven = None if _reasons(replies) or not _failures(replies) else watch.uneven_steps_error()
    if uneven is not None:
        raise uneven
    for rank, error in [*_reasons(replies), *_failures(replies)]:
        raise watch.death_error(rank, error) if isinstance(error, ActorDied) else error
    return [reply.result(0) for reply in replies]


def _reasons(replies: list[ActorReply]) -> list[tuple[int, RaypsError]]:
    return [(rank, error) for rank, error in _failures(replies) if not isinstance(error, LinkError)]


def _failures(replies: list[ActorReply]) -> list[tuple[int, RaypsError]]:
    found = []
    for rank, reply in enumerate(replies):
        try:
            if reply.done():
                reply.result(0)
        except RaypsError as error:
            found.append((rank, error))
    return found


def _open(address: str | None, workers: int, wanted: dict[str, float]) -> Cluster:
    from rayps.cluster.ray_cluster import RayCluster

    if address is not None:
        return RayCluster.join(address)
    return RayCluster.local(max(1, math.ceil(workers * wanted["cpu"])), None if wanted.get("gpu") else 0)


class _Discard:
    """A file that drops what is written to it."""

    def write(self, data: Buffer) -> int:
        return len(data)


def _check_sendable(result: Any) -> None:
    """Raise WorkloadError if the result of `train_fn` cannot be sent to the caller's process."""
    try:
        cloudpickle.Pickler(_Discard()).dump(result)
    except Exception as error:  # the user's objects may raise anything
        raise WorkloadError(
            f"train_fn() returned {type(result).__name__}, which cannot be sent to the caller:\n"
            f"{type(error).__name__}: {error}\nreturn data such as numbers, tensors or model.state_dict()"
        ) from error


class LoopActor:
    """One worker's process of a `run`."""

    def __init__(self, packed: bytes, place: World, *, capture: bool = False) -> None:
        self._packed, self._place = packed, place
        self._logs, self._returned, self._over = LogBuffer(), False, False
        self._sends = capture  # whether lines are sent to another process
        self._reported_at = 0.0  # the time of the last report of a step
        place.stepped = self._stepped
        if capture:  # log records reach stderr by the user's own handlers, as in a plain process
            self._logs.capture(records=False)
        torch.set_num_threads(1)

    def run(self) -> Any:
        """Call the user's function in its `World`."""
        _world.set(self._place)
        failed = True
        try:
            with user_code("train_fn"):
                result = unpack(self._packed)()
            if self._sends:
                _check_sendable(result)
            self._returned, failed = True, False
        except WorkloadError as error:
            place = self._place
            message = placed(error.message, f"on worker-{place.rank}, after {place.steps} optimizer steps")
            raise WorkloadError(message, **error.data | {"rank": place.rank}) from error
        finally:
            try:
                for close in reversed(self._place.closing):
                    close(failed)
            finally:
                self._logs.release()
                self._over = True  # no more lines follow
                self._logs.release()
        return result

    def _stepped(self) -> None:
        """Report the step to the caller, at most every tenth of a second, for the error of a worker's death."""
        now = time.monotonic()
        if now - self._reported_at >= REPORT_SECONDS:
            self._reported_at = now
            self._logs.wake()

    def output(self, seconds: float) -> LoopOutput:
        """Return the output since the last call. If there is none, wait for a line or a step, at most `seconds`."""
        if not self._over:
            self._logs.wait(seconds)
        over = self._over
        return LoopOutput(self._logs.drain(), self._place.steps, self._returned, over)


def wrap(
    model: nn.Module, optimizer: Optimizer, strategy: StrategySpec = "all_reduce", *, schedule: Maker | None = None
) -> tuple[nn.Module, Optimizer]:
    """Make `optimizer.step()` one round of a strategy. All workers start with rank 0's parameters.

    The loop is written as in plain torch: zero_grad, loss, backward, step. Nothing is sent before `step`, so that
    several backward passes can be accumulated. Set `optimizer.samples` to the number of samples in the batch (default
    1). This number is the worker's weight in means over the workers.

    `schedule` is a function such as `Workload.schedule`, which returns a scheduler, for example
    `rayps.wrap(model, optimizer, schedule=lambda optimizer: CosineAnnealingLR(optimizer, T_max=1000))`. This scheduler
    is stepped once per step, under every strategy. A scheduler in the loop also works if the worker's optimizer takes
    the steps. Under a parameter server the shards take the steps, and a change of the optimizer's groups on the worker
    is an error at the next step.

    Call `optimizer.clip_grad_norm_(max_norm)` between the last backward and `step` to clip the mean gradient over all
    workers, as `torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)` clips one gradient. The method computes
    this mean, and `step` does not compute it again. All workers must call it with the same arguments. It returns the
    norm, which is equal on all workers. If gradients are pushed to servers, the method clips this worker's push, and
    returns the norm of the push.

    torch's own function would clip one worker's gradient only. Therefore a change of `.grad` between backward and
    `step` is an error. In all other respects gradients are as in plain torch: zero_grad, several backward passes,
    parameters without a gradient.

    Raises:
        ConfigError: `wrap` is called outside a `run`, the strategy is a list of phases or works only in `train`, or
            the model has sparse tables.

    Example:
        def train_fn():
            model = torch.nn.Linear(3, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer = rayps.wrap(model, optimizer, "all_reduce")
            for _ in range(5):
                optimizer.zero_grad()
                model(torch.randn(8, 3)).square().mean().backward()
                optimizer.step()

        rayps.run(train_fn, workers=2)
    """
    here = world()
    chosen = parse_for_loop(strategy)
    if has_tables(model):
        raise ConfigError("wrap takes no model with sparse tables: use rayps.train, which gives them servers")
    name = f"{here.name}/{next(here.wraps)}"
    flat = FlatModel(model)
    flat.drop_grad()  # no gradient yet, as in plain torch: a parameter without a gradient after backward was not used
    ring = Ring.join(name, here.rank, here.size, timeout=here.timeout)
    if here.rank == 0 and here.size > 1:
        log.info(ring.choice)
    for value in [flat.vector, *outside_vector(model).values()]:
        ring.broadcast(value)
    factory = _optimizer_factory(optimizer, flat)
    if schedule is not None:
        factory = Recipe(factory, schedule)
    servers = servers_of(chosen)
    pace = None if servers is not None else pace_of(factory, flat.layout, optimizer, Ticks())
    group, server = None, None
    if servers is not None:
        group = _shared_group(
            name,
            here,
            lambda: ServerGroup(
                dict(zip((e.name for e in flat.layout.entries), flat.parameters, strict=True)),
                shards=servers.count,
                replicas=servers.replicas,
                staleness=servers.staleness,
                compression=servers.compression,
                workers=here.size,
                timeout=here.timeout,
                optimizer=factory,
            ),
        )
        server = group.server(here.rank)
    collective: Ring | CompressedRing = ring
    compression = compression_in(chosen)
    if compression is not None and server is None:
        collective, choice = compressed(ring, compression, Gradient(flat.packed, 0))
        log.info(choice["message"])
    rounds = _RoundThread(chosen, flat, _Stepper(optimizer, pace, servers is not None), here, collective, server)
    here.closing.append(lambda failed: _disconnect(rounds, ring, server, group, failed))
    optimizer.samples = 1  # type: ignore[attr-defined]

    def step(self: _Wrapped, closure: Callable[[], float] | None = None) -> float | None:
        loss = rounds.step(closure, self.samples)
        here.steps += 1
        here.stepped()
        return loss

    def clip_grad_norm_(self: _Wrapped, max_norm: float) -> Tensor:
        return rounds.clip(_norm(max_norm), self.samples, [p for group in self.param_groups for p in group["params"]])

    # a bound method, as torch's learning-rate schedulers expect
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
    optimizer.clip_grad_norm_ = MethodType(clip_grad_norm_, optimizer)  # type: ignore[attr-defined]
    rounds.start()
    return model, optimizer


def _disconnect(
    rounds: _RoundThread, ring: Ring, server: GroupServer | None, group: ServerGroup | None, failed: bool
) -> None:
    if failed:
        ring.abort()  # the other ranks must not wait for this one
    rounds.close()
    if server is not None:
        server.close()
    if not failed:
        ring.barrier()  # the shards must not end before all workers have disconnected
    ring.close()
    if group is not None:
        group.close()


def _shared_group(name: str, here: World, make: Callable[[], ServerGroup]) -> ServerGroup:
    """Create the server group on rank 0; on the other ranks, wait until rank 0 has created it. Return the group."""
    values, key = rendezvous(), f"rayps/group/{name}"
    if here.rank == 0:
        group = make()
        values.put(key, pickle.dumps(group))
        return group
    if not until(lambda: values.get(key) is not None, here.timeout):
        raise PeerTimeout(
            f"worker-0 did not start the run's shards within {here.timeout:g} s: raise timeout",
            peer="worker-0",
            seconds=here.timeout,
        )
    shared: ServerGroup = pickle.loads(values.get(key) or b"")
    return shared


def _optimizer_factory(optimizer: Optimizer, flat: FlatModel) -> Callable[[list[nn.Parameter]], Optimizer]:
    """Return a function that makes an optimizer like `optimizer`, with its groups, for slices of the parameters."""
    order = {id(p): i for i, p in enumerate(flat.parameters)}
    kind = type(optimizer)
    # not every default is an argument: AdamW has decoupled_weight_decay, and its groups carry it
    defaults = {key: value for key, value in optimizer.defaults.items() if key in inspect.signature(kind).parameters}
    groups = [
        (
            {key: value for key, value in group.items() if key not in ("params", "param_names")},
            [order[id(p)] for p in group["params"] if id(p) in order],
        )
        for group in optimizer.param_groups
    ]

    def build(params: list[nn.Parameter]) -> Optimizer:
        return kind([{**options, "params": [params[i] for i in members]} for options, members in groups], **defaults)

    return build


def _norm(given: Json) -> float:
    """Return `max_norm` as a number. Raises ConfigError if it is not a number above 0."""
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not given > 0:
        raise ConfigError(
            f"max_norm is {given!r}: give a number above 0 (inf: measure the norm without clipping)", field="max_norm"
        )
    return float(given)


class _Wrapped(Protocol):
    """The user's optimizer after `wrap`."""

    samples: int
    param_groups: list[Group]


class _Ended(Exception):
    pass


class _Stepper:
    """Takes the steps of the user's optimizer, and sets the rates of its schedule.

    If servers take the steps (`remote`), `check` raises an error after a change of the optimizer's groups.
    """

    def __init__(self, optimizer: Optimizer, pace: Pace | None, remote: bool) -> None:
        self._step, self._pace, self._optimizer, self._number = optimizer.step, pace, optimizer, 0
        self._groups_at_wrap = [plain_values(group) for group in optimizer.param_groups] if remote else []

    def __call__(self) -> None:
        """Take a step with the current gradients."""
        if self._pace is not None:
            self._pace.at(self._number)
        self._number += 1
        self._step()

    def check(self) -> None:
        """Raise ConfigError if servers take the steps and this worker has changed the optimizer's groups."""
        for at_wrap, group in zip(self._groups_at_wrap, self._optimizer.param_groups, strict=False):
            now = plain_values(group)
            for key, value in at_wrap.items():
                if now.get(key) != value:
                    raise ConfigError(
                        f"{key} of the optimizer was changed from {value!r} to {now.get(key)!r}, but under a parameter "
                        "server the shards take the steps, with the groups as they were at wrap: give the schedule as "
                        "rayps.wrap(..., schedule=lambda optimizer: SomeLR(optimizer, ...)), and step no scheduler in "
                        "the loop; or use all_reduce",
                        field="schedule",
                    )


class _RoundThread:
    """Runs a strategy's rounds in a thread, with batches and gradients from the user's loop.

    This thread and the user's thread take turns.
    """

    def __init__(
        self,
        strategy: StrategyView,
        flat: FlatModel,
        own_step: _Stepper,
        here: World,
        ring: Ring | CompressedRing,
        server: GroupServer | None,
    ) -> None:
        self.rank, self.size, self.ring, self.server = here.rank, here.size, ring, server
        self._strategy, self._flat, self._own_step = strategy, flat, own_step
        self._gradient: Gradient | None = None
        self._used: list[bool] = []  # which parameters have a gradient
        self._unused: list[int] = []  # parameters that no rank has used
        self._user_may_run = threading.Semaphore(0)  # the user's turn
        self._round_may_run = threading.Semaphore(0)  # the round's turn
        self._error: BaseException | None = None
        self._ending = False
        self._watch = GradWatch(flat)
        # the state of clip_grad_norm_ in the current step. "": not called. "asked": it waits for the mean gradient.
        # "held": the mean is in `.grad`. "dropped": the loop did not step, and has computed another gradient.
        self._clip = ""
        self._thread = threading.Thread(target=self._run, name="rayps-round", daemon=True)

    # ---- the user's side

    def start(self) -> None:
        """Start the strategy's first round, and return when the round requests a batch."""
        self._thread.start()
        self._wait()

    def step(self, closure: Callable[[], float] | None, samples: int) -> float | None:
        """Pass the gradient in `.grad` to the strategy's round, and return when the next round requests a batch."""
        self._own_step.check()
        loss = closure() if closure is not None else None
        if self._mean_is_held():
            self._round_may_run.release()
        else:
            self._offer(samples)
        self._wait()
        self._watch.clear()
        return loss

    def clip(self, max_norm: float, samples: int, params: list[nn.Parameter]) -> Tensor:
        """Clip the gradient that the optimizer will use, and return its norm.

        The mean gradient is computed first, unless this step has done so already.
        """
        if self.server is not None:
            self._check_unchanged()
            self._flat.collect_used()
        elif not self._mean_is_held():
            self._clip = "asked"
            self._offer(samples)
            self._wait()
            if self._clip != "held":
                self._clip = ""
                raise ConfigError(
                    f"clip_grad_norm_ found no gradient to clip: {type(self._strategy).__name__} takes no step of this "
                    "worker's optimizer",
                    field="strategy",
                )
        norm = nn.utils.clip_grad_norm_(params, max_norm)
        self._watch.record()
        return norm

    def _mean_is_held(self) -> bool:
        """Return whether the mean gradient of this step is in `.grad`. Raises ConfigError if `.grad` was changed."""
        held = self._clip == "held" and not self._watch.replaced()
        self._check_unchanged(held)
        if self._clip == "held" and not held:  # the step was skipped, and there is a new gradient
            self._clip = "dropped"
            self._round_may_run.release()
            self._wait()
        return held

    def _check_unchanged(self, held: bool = False) -> None:
        name = self._watch.changed_since_record() if held else self._watch.changed()
        if name is not None:
            raise ConfigError(
                f"the gradient of {name!r} was changed between {'clip_grad_norm_' if held else 'backward'} and "
                "optimizer.step(), not by the wrapped optimizer:\nuntil step() averages the gradients of all workers, "
                "`.grad` is this worker's own; to clip the mean, call optimizer.clip_grad_norm_(max_norm) on the "
                "wrapped optimizer after the last backward; to scale the gradient, scale the loss",
                parameter=name,
            )

    def _offer(self, samples: int) -> None:
        """Pass the gradient in `.grad` to the strategy's round, and let the round continue."""
        self._used, self._unused = [p.grad is not None for p in self._flat.parameters], []
        self._gradient = Gradient(self._flat.collect_grad(), samples)
        self._round_may_run.release()

    def close(self) -> None:
        """End the thread, in which a round is waiting for a batch."""
        self._ending = True
        self._watch.close()
        self._round_may_run.release()
        self._thread.join()

    def _wait(self) -> None:
        self._user_may_run.acquire()  # the round's own waits have deadlines
        if self._error is not None:
            raise self._error

    # ---- the strategy's side

    @property
    def params(self) -> Tensor:
        """The parameters as one vector."""
        return self._flat.vector

    @params.setter
    def params(self, vector: Tensor) -> None:
        with torch.no_grad():
            self._flat.vector.copy_(vector)

    def batch(self) -> None:
        """Let the user's loop run until it provides a gradient."""
        self._user_may_run.release()
        self._round_may_run.acquire()
        if self._ending:
            raise _Ended

    def grad(self, batch: None) -> Gradient:
        """Return the gradient that the user's loop has computed."""
        assert self._gradient is not None
        return self._gradient

    def mean_grad(self, batch: None) -> Tensor:
        """Return the mean of all workers' gradients. The next step skips the parameters that no rank used."""
        mean: Tensor = self.ring.mean(self.grad(batch))
        used = self.ring.max(torch.tensor(self._used, dtype=torch.uint8))
        self._unused = [i for i, some in enumerate(used.tolist()) if not some]
        return mean

    def step_own(self, grad: Gradient | Tensor) -> None:
        """Apply a gradient with the user's optimizer."""
        self._flat.load_grad(grad.vector if isinstance(grad, Gradient) else grad)
        for i in self._unused:
            self._flat.parameters[i].grad = None
        if self._clip == "asked":
            self._clip = "held"
            self.batch()  # the user's turn, until it steps
            dropped, self._clip = self._clip == "dropped", ""
            if dropped:
                return
        self._own_step()

    def _run(self) -> None:
        try:
            while True:
                view: Any = _RoundView(self)  # the part of a WorkerView that strategies under `wrap` need
                self._strategy.round(view)
        except _Ended:
            return
        except BaseException as error:  # any exception is raised again in the user's thread
            self._error = error
            self._user_may_run.release()


class _RoundView:
    """A view of `_RoundThread` with the names that a strategy uses."""

    def __init__(self, rounds: _RoundThread) -> None:
        self.rank, self.size, self.ring, self.server = rounds.rank, rounds.size, rounds.ring, rounds.server
        self.batch, self.grad, self.mean_grad, self.step = rounds.batch, rounds.grad, rounds.mean_grad, rounds.step_own
        self._rounds = rounds

    @property
    def params(self) -> Tensor:
        return self._rounds.params

    @params.setter
    def params(self, vector: Tensor) -> None:
        self._rounds.params = vector


__all__ = ["LoopActor", "World", "run", "world", "wrap"]

"""Run one loop of a user to its end: start its workers, collect what they produce, restart them after a death.

The decisions are those of `rayps.runtime.driver.decide_recovery.decide`: a failure restarts all workers, from the
newest saved state, at most `max_failures` times. A process that dies while it starts counts as any other.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from rayps_client.errors import ActorDied, LinkError, PeerTimeout, RaypsError, TrainingError

from rayps.cluster.code_folder import JobCode
from rayps.cluster.local import ActorHandle, ActorReply, Cluster, LocalCluster, Reservation
from rayps.cluster.members import ActorHost
from rayps.cluster.reservation import torch_threads
from rayps.cluster.user_packages import install_seconds
from rayps.core.job.job_status import Status
from rayps.core.job.records import Event, Point, ProgressRecord, WorkerLine
from rayps.core.job.user_module import pack
from rayps.core.metrics import Throughput
from rayps.core.urls import Location
from rayps.runtime.driver.decide_recovery import (
    Continue,
    Decision,
    Fail,
    FailureCount,
    Finish,
    Restart,
    RunFacts,
    Stop,
    decide,
)
from rayps.runtime.own_loop.actor import LoopOutput
from rayps.runtime.own_loop.log_points import LogPoints, numbers_of
from rayps.runtime.own_loop.named import all_params, arguments
from rayps.runtime.own_loop.same_rows import SAME_ROWS
from rayps.runtime.own_loop.state import PartsBySave, SavedPart, checkpoint_of, parts_of
from rayps.runtime.own_loop.watch import LoopWatch, death_error, uneven_steps_error, with_activities
from rayps.runtime.own_loop.world import LoopPlace
from rayps.runtime.records.journal import Journal
from rayps.runtime.records.status import Outcome
from rayps.runtime.records.unfinished_uploads import report_unfinished
from rayps.strategies.job import JobSpec
from rayps.tensors.checkpoints import checkpoint
from rayps.tensors.checkpoints.checkpoint_place import CheckpointPlace

log = logging.getLogger(__name__)

POLL_SECONDS = 0.02
LEAVE_SECONDS = 10.0  # seconds in which a run that is asked to stop may save once more, if it has saved before


class _Group:
    """The workers of one generation: their handles, the replies of their functions, and what they produce."""

    def __init__(
        self, handles: list[ActorHandle], states: list[SavedPart] | None, receive: Callable[[int, LoopOutput], None]
    ) -> None:
        self.handles = handles
        self.places = [handle.call("place") for handle in handles]
        given: list[tuple[SavedPart, ...]] = [()] * len(handles)
        if states is not None:
            given = [(own, states[0]) for own in states]
        self.replies = [handle.call("run", *parts) for handle, parts in zip(handles, given, strict=True)]
        self.began = states[0].steps if states else 0  # optimizer steps at the start of the generation
        self.watch = LoopWatch(handles, receive)
        self.error_at: float | None = None  # when the first error was seen
        self._timeouts: dict[int, PeerTimeout] = {}  # by rank, with what the others were doing when it was seen

    def ended(self) -> list[int]:
        """Return the ranks whose function has ended, or whose process has died."""
        return [rank for rank, reply in enumerate(self.replies) if reply.done()]

    def facts(self) -> tuple[list[int], list[tuple[str, Exception]], list[tuple[str, str]]]:
        """Return the ranks that have returned, the errors (worker, error), and the deaths (worker, reason)."""
        returned, dead = list[int](), list[tuple[str, str]]()
        errors: list[tuple[str, Exception]] = []
        for rank in self.ended():
            try:
                self.replies[rank].result(0)
                returned.append(rank)
            except ActorDied as error:
                if error.data.get("actor") == self.handles[rank].name:
                    dead.append((f"worker-{rank}", str(error.data.get("reason", error))))
                else:  # a server that the worker has started
                    errors.append((f"worker-{rank}", error))
            except PeerTimeout as error:
                found = self._timeouts.setdefault(rank, with_activities(error, self.watch.latest))
                errors.append((f"worker-{rank}", found))
            except Exception as error:  # what a user's function raises in a thread of this process
                errors.append((f"worker-{rank}", error))
        if errors and self.error_at is None:
            self.error_at = time.monotonic()
        return returned, errors, dead

    @property
    def has_progressed(self) -> bool:
        """Whether a worker has reported a new optimizer step."""
        return any(output.steps > self.began for output in self.watch.latest.values())

    def lines(self) -> list[WorkerLine]:
        """Return the workers' lines of the progress."""
        found: list[WorkerLine] = []
        for rank, place in enumerate(self.places):
            at = _place(place)
            output = self.watch.latest.get(rank)
            status = "starting" if output is None else "finished" if output.returned else "running"
            found.append(
                {
                    "rank": rank,
                    "host": at.host if at else None,
                    "pid": at.pid if at else None,
                    "status": status,
                    "round": output.steps if output else 0,
                }
            )
        return found


class LoopDriver:
    """Runs one loop from start to end. `run()` blocks; `stop()` may be called from another thread."""

    def __init__(
        self,
        function: Callable[..., Any],
        spec: JobSpec,
        journal: Journal,
        *,
        checkpoints: Location | None = None,
        resume: Location | None = None,
        capture: bool = True,
        failures: int = 0,
        sends: bool = True,
        code: JobCode | None = None,
    ) -> None:
        """Prepare a driver of `function`.

        `checkpoints` is the folder for saved states, and `resume` the checkpoint to start from. `capture`: whether the
        workers' output becomes log lines. `failures`: the failures under earlier drivers of the job. `sends`: whether
        the results of the function are wanted. `code`: what the workers import the user's modules from, unless it is
        the folder `spec.working_dir`.
        """
        self.spec, self.journal, self.status = spec, journal, Status.STARTING
        self.results: list[Any] = []
        self._function, self._folder, self._resume = function, checkpoints, resume
        self._capture, self._failures, self._sends = capture, FailureCount(failures), sends
        self._code = code or JobCode.of_caller(spec.working_dir)
        self._stop = threading.Event()
        self._generation, self._message = 0, ""
        self._group: _Group | None = None
        self._lock, self._writing = threading.Lock(), threading.Lock()  # of the journal and facts; of the folder
        self._points, self._gathering = LogPoints(spec.workers, _name(spec)), PartsBySave(spec.workers)
        self._newest: list[SavedPart] | None = None  # the newest saved state, if there is no folder
        self._saved: tuple[int, int, Location | None] | None = None  # number, steps and path of the newest saved state
        self._progress: ProgressRecord = {"loss": None, "staleness": {}, "shards": []}
        self._progress["params"] = all_params(function, spec.params)
        self._throughput = Throughput()
        self._fault: Exception | None = None  # an error of this driver, such as a full disk

    @property
    def saves(self) -> bool:
        """Whether there is a folder for saved states."""
        return self._folder is not None

    def stop(self) -> None:
        """Request the end of the run. If the loop has saved before, it may save once more first."""
        self._stop.set()

    def close(self) -> None:
        """Do nothing: this driver has no child process."""

    def preflight(self) -> bool:
        """Check the function's parameters and the state to start from before any worker starts. Return True.

        Raises:
            ConfigError, WorkloadError, CheckpointError: an argument is wrong. The text says how to fix it.
        """
        arguments(self._function, self.spec.params)
        if self._resume is not None and self._saved is None:
            parts = parts_of(checkpoint.load(self._resume), self.spec.workers, str(self._resume))
            self._newest = parts
            self._saved = parts[0].number, parts[0].steps, self._resume
        return True

    def run(self, cluster: Cluster) -> Outcome:
        """Run the loop to its end and return the outcome, which also contains an error. Nothing is raised."""
        gang: Reservation | None = None
        try:
            self.preflight()
            if self._folder is not None:
                report_unfinished(CheckpointPlace.of(self._folder), self.journal)
            packed = pack(self._function)
            wanted = {"cpu": 1.0} | self.spec.resources
            gang = cluster.reserve([wanted] * self.spec.workers, self.spec.timeout)
            code = cluster.share(self._code)  # an archive is then kept once on each host
            decision: Decision = Restart((), "")
            while isinstance(decision, Restart):
                self._begin(cluster, packed, code, gang)
                try:
                    decision = self._follow(cluster)
                finally:
                    self._end(cluster)
                if isinstance(decision, Restart):
                    self._report_restart(decision)
                    if self._stop.wait(decision.pause):
                        decision = Stop()
            outcome = self._outcome(decision)
        except RaypsError as error:
            outcome = Outcome(Status.FAILED, str(error), error=error)
        except Exception as error:  # a bug of rayps must end the job with a reason, not only its thread
            log.exception("the driver failed")
            outcome = Outcome(Status.FAILED, f"rayps failed: {type(error).__name__}: {error}", error=error)
        finally:
            if gang is not None:
                gang.release()
        return self._written(outcome)

    # ---- one generation

    def _begin(self, cluster: Cluster, packed: bytes, code: JobCode, gang: Reservation | None) -> None:
        spec = self.spec
        self._generation += 1
        self._points.restart(self._generation)
        self._gathering = PartsBySave(spec.workers)
        states = self._states()
        if states is not None:
            self._gathering.counts = [states[0].number] * spec.workers
            self._gathering.complete = states[0].number
        self._set_status(Status.STARTING if self._generation == 1 else Status.RECOVERING, "starting workers")
        wanted = {"cpu": 1.0} | spec.resources
        name = f"run-{time.time_ns()}"
        start = spec.timeout + (install_seconds() if self._code.requirements else 0.0)
        handles: list[ActorHandle] = []
        for rank in range(spec.workers):
            place = LoopPlace(
                rank, spec.workers, name, spec.timeout, start, dict(spec.params), spec.strategy, self.saves, spec.seed
            )
            handles.append(
                cluster.spawn(
                    "rayps.runtime.own_loop.actor:LoopActor",
                    packed,
                    place,
                    code=code,
                    capture=self._capture and not isinstance(cluster, LocalCluster),
                    sends=self._sends,
                    threads=torch_threads(wanted["cpu"]),
                    cpus=wanted["cpu"],
                    gpus=wanted.get("gpu", 0.0),
                    gang=gang,
                    index=rank,
                    warm=self._code.may_be_warm,
                )
            )
        generation = self._generation
        self._group = _Group(handles, states, lambda rank, output: self._receive(generation, rank, output))
        self._set_status(Status.RUNNING, "")

    def _states(self) -> list[SavedPart] | None:
        """Return the ranks' parts of the newest saved state, or None if there is none."""
        if self._newest is None and self._saved is not None and self._saved[2] is not None:
            path = self._saved[2]
            return parts_of(checkpoint.load(path), self.spec.workers, str(path))
        found, self._newest = self._newest, self._newest if self._folder is None else None
        return found

    def _follow(self, cluster: Cluster) -> Decision:
        """Wait until the generation has ended or the run is stopped, and return what follows."""
        group = self._group
        assert group is not None
        while True:
            facts = self._facts(group, cluster)
            decision = decide(facts)
            if isinstance(decision, Continue):
                self._report(group.ended() if len(facts.finished) == self.spec.workers else ())
                self._stop.wait(POLL_SECONDS)
                continue
            group.watch.finish(group.ended())
            if isinstance(decision, Finish) and self._fault is not None:
                continue  # the last saved state could not be written
            self._report(range(self.spec.workers))
            if isinstance(decision, Stop):
                self._leave()
            if isinstance(decision, Restart):
                self._failures.add()
            return self._explained(decision, facts, group)

    def _facts(self, group: _Group, cluster: Cluster) -> RunFacts:
        returned, errors, dead = group.facts()
        if group.has_progressed:
            self._failures.progressed()
        if self._fault is not None:
            errors.append(("driver", self._fault))
        age = 0.0 if group.error_at is None else time.monotonic() - group.error_at
        return RunFacts(
            size=self.spec.workers,
            finished=frozenset(f"worker-{rank}" for rank in returned),
            errors=tuple(errors),
            dead=tuple(dead),
            error_age=age,
            failures=self._failures.failures,
            max_failures=self.spec.max_failures,
            in_row=self._failures.in_row,
            outputs={name: cluster.last_output(group.handles[_rank(name)]) for name, _ in dead},
            stop=self._stop.is_set(),
            positions={f"worker-{rank}": output.steps for rank, output in sorted(group.watch.latest.items())},
        )

    def _explained(self, decision: Decision, facts: RunFacts, group: _Group) -> Decision:
        """Return the decision with the error that explains it best."""
        only_lost = not facts.dead and all(isinstance(error, LinkError) for _, error in facts.errors)
        if facts.errors and only_lost and isinstance(decision, (Restart, Fail)):
            uneven = uneven_steps_error(group.watch.latest)
            if uneven is not None:
                return Fail(uneven, str(uneven))
        if isinstance(decision, Fail) and decision.error is None and not self.spec.max_failures:
            if facts.dead:
                name, reason = facts.dead[0]
                output = group.watch.latest.get(_rank(name))
                steps = output.steps if output else None
                error: Exception = death_error(_rank(name), steps, reason, facts.outputs[name])
            else:
                error = facts.errors[0][1]
            return Fail(error, str(error))
        return decision

    def _leave(self) -> None:
        """After a stop request, wait for one more saved state, if the loop saves at all."""
        if self._folder is None or self._saved is None or self._group is None:
            return
        self._set_status(Status.STOPPING, "waiting for the next rayps.save")
        before, deadline = self._saved, time.monotonic() + LEAVE_SECONDS
        while self._saved == before and time.monotonic() < deadline and not self._group.ended():
            time.sleep(POLL_SECONDS)

    def _end(self, cluster: Cluster) -> None:
        group = self._group
        if group is None:
            return
        if all(reply.done() for reply in group.replies) and self._sends:
            self.results = [_result(reply) for reply in group.replies]
        group.watch.close()
        for handle in group.handles:
            cluster.kill(handle)

    def _report_restart(self, decision: Restart) -> None:
        if self._saved is not None:
            number, steps, _ = self._saved
            where = f"continue from saved state {number} (after {steps} optimizer steps)"
        else:
            where = "start anew, because rayps.save has kept no state yet"
        message = f"{decision.reason}; all {self.spec.workers} workers start again and {where}"
        with self._lock:
            self.journal.event("restarted", message, lost=list(decision.lost), failures=self._failures.failures)
        self._set_status(Status.RECOVERING, decision.reason)

    # ---- what workers produce

    def _receive(self, generation: int, rank: int, output: LoopOutput) -> None:
        """Take over one worker's output. Called in the thread of the rank."""
        with self._lock:
            if generation != self._generation:
                return
            if output.lines and self._capture:
                self.journal.lines([(at, f"worker-{rank}", text) for at, text in output.lines])
            for event in output.events:
                if event["kind"] != "wrapped" or self._takes(event):
                    self.journal.event(**event)
            self._points.add(output.points, time.monotonic())
            complete = [held for part in output.parts if (held := self._gathering.add(rank, part)) is not None]
            if complete:  # first the points: a driver that continues from the state does not repeat its steps
                self._write_points(saved=max(part.logged for parts in complete for part in parts.values()))
        for parts in complete:
            try:
                self._keep(parts)
            except Exception as error:  # reported as the run's error
                self._fault = error

    def _takes(self, event: Event) -> bool:
        """Record the strategy that the loop gave to `rayps.wrap`. Return whether it is new: a restart repeats it."""
        before = self._progress.get("wrapped", [])
        found = [*before[: event["number"]], event["strategy"], *before[event["number"] + 1 :]]
        self._progress["wrapped"] = found
        self._points.strategy = " + ".join(dict.fromkeys(str(each["name"]) for each in found))
        return found != before

    def _keep(self, parts: dict[int, SavedPart]) -> None:
        """Write a complete saved state into the folder, or keep it in memory if there is none."""
        ordered = [parts[rank] for rank in range(self.spec.workers)]
        number, steps = ordered[0].number, ordered[0].steps
        with self._writing:
            if self._saved is not None and number <= self._saved[0]:
                return
            if self._folder is None:
                self._newest, self._saved = ordered, (number, steps, None)
                return
            path = checkpoint.save(self._folder, number, checkpoint_of(parts), self.spec.keep_checkpoints)
            self._saved = number, steps, path
        with self._lock:
            self.journal.event(
                "checkpoint", f"saved state {number} (after {steps} optimizer steps): {path}", round=steps
            )

    def _report(self, ended: range | list[int] | tuple[int, ...]) -> None:
        """Write the points of complete steps, and the progress. `ended`: ranks that log nothing more."""
        with self._lock:
            self._write_points(ended)
            if self._group is not None and self._group.watch.same_rows():
                self.journal.event("warning", SAME_ROWS)
        self._show()

    def _write_points(self, ended: Collection[int] = (), *, saved: int = -1) -> None:
        merged = self._points.merged(time.monotonic(), ended, saved=saved)
        for point in merged:
            self._add(point)
        self.journal.add_points(merged)

    def _add(self, point: Point) -> None:
        point["time"] = time.time()
        self._throughput.add(point["samples"], time.monotonic())
        numbers = numbers_of(point)
        self._warn_of_numbers(numbers, point["round"])
        self._progress["loss"] = numbers.pop("loss", self._progress.get("loss"))
        self._progress["metrics"] = self._progress.get("metrics", {}) | numbers
        self._progress["round"] = point["round"]

    def _warn_of_numbers(self, numbers: dict[str, float], step: int) -> None:
        """Add one event if a number that the loop logs is not finite. The loop decides whether it goes on."""
        odd = next((name for name, value in numbers.items() if not math.isfinite(value)), None)
        if odd is not None and not self._points.warned:
            self._points.warned = True
            self.journal.event(
                "warning",
                f"{odd} is {numbers[odd]} in rayps.log of step {step}: lower the learning rate, clip gradients by "
                "optimizer.clip_grad_norm_(max_norm), or raise an error in the loop to end the run there",
                round=step,
            )

    def _set_status(self, status: Status, message: str) -> None:
        self.status, self._message = status, message
        self._show(now=True)

    def _show(self, *, now: bool = False) -> None:
        group = self._group
        with self._lock:
            progress: ProgressRecord = {
                **self._progress,
                "time": time.time(),
                "status": self.status,
                "message": self._message,
                "generation": self._generation,
                "failures": self._failures.failures,
                "samples_per_second": self._throughput.rate or None,  # None if the loop logs no samples
            }
            if group is not None:
                progress["workers"] = group.lines()
                steps = min((line["round"] for line in progress["workers"]), default=0)
                progress["round"] = max(steps, self._progress.get("round", 0))
            self.journal.progress(progress, now=now)

    # ---- the end

    def _outcome(self, decision: Decision) -> Outcome:
        metrics = dict(self._progress.get("metrics", {}))
        if self._progress.get("loss") is not None:
            metrics = {"loss": float(self._progress["loss"] or 0.0)} | metrics
        if isinstance(decision, Finish):
            uneven = self._gathering.uneven()
            if uneven is not None:
                self.journal.event("warning", uneven)
            return Outcome(Status.SUCCEEDED, "the function returned on all workers", metrics)
        if isinstance(decision, Stop):
            kept = "nothing was saved" if self._saved is None else f"saved state {self._saved[0]} is kept"
            if self._saved is not None and self._saved[2] is not None:
                kept = f"{self._saved[2]} is kept"
            return Outcome(Status.STOPPED, f"stopped on request: {kept}", metrics)
        assert isinstance(decision, Fail), "a loop restarts as a whole"
        error = decision.error
        if not isinstance(error, RaypsError):
            return Outcome(Status.FAILED, decision.reason, error=TrainingError(decision.reason))
        return Outcome(Status.FAILED, str(error), error=error)

    def _written(self, outcome: Outcome) -> Outcome:
        """Write the outcome to the journal, once."""
        outcome.checkpoint = None if self._saved is None else self._saved[2]
        kind = {Status.SUCCEEDED: "finished", Status.STOPPED: "stopped"}.get(outcome.status, "failed")
        event: Event = {"metrics": outcome.metrics}
        self.journal.event(kind, outcome.message, **event)
        self._set_status(outcome.status, outcome.message)
        self.journal.write_outcome(outcome.to_dict())
        return outcome


def _name(spec: JobSpec) -> str:
    """Return the name of the strategy that `wrap` uses by default."""
    found = spec.strategy
    return str(found.get("name", "")) if isinstance(found, dict) else str(found).partition(":")[0]


def _rank(worker: str) -> int:
    return int(worker.removeprefix("worker-"))


def _place(reply: ActorReply) -> ActorHost | None:
    try:
        found: ActorHost | None = reply.result(0) if reply.done() else None
    except Exception:  # the worker has died; its function's reply has the reason
        return None
    return found


def _result(reply: ActorReply) -> Any:
    try:
        return reply.result(0)
    except Exception:  # the run has failed, and the decision has the error
        return None

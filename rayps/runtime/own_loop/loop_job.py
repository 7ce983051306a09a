"""A loop of a user, as its driver runs it: start its workers, collect what they produce, save their states.

The driver decides (`rayps.runtime.driver.driver`): a failure restarts all workers, from the newest saved state, at most
`max_failures` times; or a dead worker alone, if the others go on without it (`rayps.runtime.own_loop.loop_recovery`). A
process that dies while it starts counts as any other.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rayps_client.errors import ActorDied, LinkError, PeerTimeout

from rayps.cluster.code_folder import JobCode
from rayps.cluster.local import ActorReply, Bundle, Cluster, LocalCluster, Reservation
from rayps.cluster.members import ActorHost, GroupMember
from rayps.cluster.reservation import torch_threads
from rayps.cluster.user_packages import install_seconds
from rayps.core.job.job_status import Status
from rayps.core.job.records import Event, Point, ProgressRecord, WorkerLine
from rayps.core.job.user_module import pack
from rayps.core.metrics import Throughput
from rayps.core.strategy.strategy_families import Recovery
from rayps.core.time.member_times import MemberTimes
from rayps.core.urls import Location
from rayps.runtime.driver.decide_recovery import (
    BeginGeneration,
    Continue,
    Decision,
    Fail,
    Findings,
    Recover,
    Replace,
    Restart,
    RunEnded,
    RunFacts,
)
from rayps.runtime.driver.driven_job import DrivenJob, JobRun
from rayps.runtime.own_loop.actor import LoopOutput
from rayps.runtime.own_loop.log_points import LogPoints, numbers_of
from rayps.runtime.own_loop.loop_recovery import recovery_of_loop
from rayps.runtime.own_loop.named import add_defaults, choose_arguments
from rayps.runtime.own_loop.same_rows import SAME_ROWS
from rayps.runtime.own_loop.state import PartsBySave, SavedPart, checkpoint_of, parts_of
from rayps.runtime.own_loop.step_measure import StepRates
from rayps.runtime.own_loop.watch import LoopWatch, explain_death, explain_uneven_steps, with_activities
from rayps.runtime.own_loop.world import LoopPlace
from rayps.runtime.records.journal import Journal
from rayps.runtime.records.status import Outcome, RunRecord
from rayps.runtime.records.unfinished_uploads import report_unfinished
from rayps.strategies.job import JobSpec
from rayps.tensors.checkpoints import checkpoint
from rayps.tensors.checkpoints.checkpoint_place import CheckpointPlace

POLL_SECONDS = 0.02
LEAVE_SECONDS = 10.0  # seconds in which a run that is asked to stop may save once more, if it has saved before


@dataclass(frozen=True, slots=True)
class _Started:
    """What all generations of the workers share: the cluster, the packed function, the code, and the resources."""

    cluster: Cluster
    packed: bytes
    code: JobCode  # as `Cluster.share` returned it
    gang: Reservation | None


@dataclass(slots=True)
class _LoopFacts:
    """What the record of the run reads of a worker."""

    position: int = 0  # optimizer steps that the worker has taken
    times: MemberTimes | None = None  # a report that is not in the record yet
    trace: bytes | None = None  # a trace that is not written yet
    rates: StepRates | None = None  # of its newest steps


class _Group:
    """The workers of one generation: their members, the replies of their functions, and what they produce."""

    def __init__(self, name: str, members: list[GroupMember], states: list[SavedPart] | None) -> None:
        self.name, self.members = name, members
        self._places = [member.handle.call("place") for member in members]
        self.replies = [_called(member, states) for member in members]
        self.began = states[0].steps if states else 0  # optimizer steps at the start of the generation
        self.watch = LoopWatch([member.handle for member in members])
        self.over = False  # whether its workers were ended
        self.error_at: float | None = None  # when the first error was seen
        self._timeouts: dict[int, PeerTimeout] = {}  # by rank, with what the others were doing when it was seen
        self._failed = set[int]()  # the ranks whose function has raised an error

    def take(self) -> list[tuple[int, LoopOutput]]:
        """Return what the workers have produced since the last call, each with the rank, and note where they are."""
        found = self.watch.take()
        for rank, output in found:
            before = self.members[rank].facts or _LoopFacts()
            times, trace = output.times or before.times, output.trace or before.trace
            self.members[rank].facts = _LoopFacts(output.steps, times, trace, output.rates or before.rates)
        for member, reply in zip(self.members, self._places, strict=True):
            member.place = member.place or _read_place(reply)
        return found

    def replace(self, member: GroupMember, states: list[SavedPart] | None) -> None:
        """Let a new process take the place of a dead one, from the saved states of all ranks if there are some."""
        rank = member.rank
        self.members[rank], self._places[rank] = member, member.handle.call("place")
        self.replies[rank] = _called(member, states)
        self.watch.replace(rank, member.handle)

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
                if error.data.get("actor") == self.members[rank].handle.name:
                    reason = self.members[rank].dead = str(error.data.get("reason", error))
                    dead.append((f"worker-{rank}", reason))
                else:  # a server that the worker has started
                    errors.append((f"worker-{rank}", error))
            except PeerTimeout as error:
                found = self._timeouts.setdefault(rank, with_activities(error, self.watch.latest))
                errors.append((f"worker-{rank}", found))
            except Exception as error:  # what a user's function raises in a thread of this process
                errors.append((f"worker-{rank}", error))
        self._failed = {_parse_rank(worker) for worker, _ in errors}
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
        for rank, member in enumerate(self.members):
            at, output, rates = member.place, self.watch.latest.get(rank), (member.facts or _LoopFacts()).rates
            status = "starting" if output is None else "finished" if output.returned else "running"
            line: WorkerLine = {
                "rank": rank,
                "host": at.host if at else None,
                "pid": at.pid if at else None,
                "status": "dead" if member.dead else "failed" if rank in self._failed else status,
                "round": output.steps if output else 0,
            }
            found.append(line if rates is None else rates.added_to(line))
        return found


class LoopJob(DrivenJob):
    """A job of a user's own loop: a function that each worker calls."""

    saves_on_request: ClassVar[bool] = False

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
        profile: Path | None = None,
        code: JobCode | None = None,
    ) -> None:
        """Prepare a job of `function`.

        `checkpoints` is the folder for saved states, and `resume` the checkpoint to start from. `capture`: whether the
        workers' output becomes log lines. `failures`: the failures under earlier drivers of the job. `sends`: whether
        the results of the function are wanted. `profile` is the folder for traces of a few steps; None if there are
        none. `code`: what the workers import the user's modules from, unless it is the folder `spec.working_dir`.
        """
        record = RunRecord(journal, spec.workers, self._read_round_and_facts)
        record.trace_into(profile)
        self.run = JobRun(spec, journal, record, failures)
        self.results: list[Any] = []
        self._function, self._folder, self._resume = function, checkpoints, resume
        self._capture, self._sends = capture, sends
        self._code = code or JobCode.of_caller(spec.working_dir)
        self._started: _Started | None = None
        self._group: _Group | None = None
        self._points, self._gathering = LogPoints(spec.workers, _read_strategy_name(spec)), PartsBySave(spec.workers)
        self._newest: list[SavedPart] | None = None  # the newest saved state, if there is no folder
        self._saved: tuple[int, int, Location | None] | None = None  # number, steps and path of the newest saved state
        self._progress: ProgressRecord = {"loss": None, "params": add_defaults(function, spec.params)}
        self._throughput = Throughput()
        self._last: tuple[int, float] | None = None  # the number of the newest save at a stop request; the deadline

    @property
    def saves(self) -> bool:
        """Whether there is a folder for saved states."""
        return self._folder is not None

    def allow(self, workers: int, reason: str) -> None:
        """Do nothing: the workers are a fixed number."""

    def close(self) -> None:
        """Do nothing: no child process was started."""

    def preflight(self) -> bool:
        """Check the function's parameters and the state to start from before any worker starts. Return True.

        Raises:
            ConfigError, WorkloadError, CheckpointError: an argument is wrong. The text says how to fix it.
        """
        choose_arguments(self._function, self.run.spec.params)
        if self._resume is not None and self._saved is None:
            parts = parts_of(checkpoint.load(self._resume), self.run.spec.workers, str(self._resume))
            self._newest = parts
            self._saved = parts[0].number, parts[0].steps, self._resume
        return True

    # ---- the start

    def start(self, cluster: Cluster) -> RunFacts | None:
        """Reserve the resources of all workers."""
        if self._folder is not None:
            report_unfinished(CheckpointPlace.of(self._folder), self.run.journal)
        packed, spec = pack(self._function), self.run.spec
        gang = cluster.reserve([self._resources] * spec.workers, spec.timeout)
        self._started = _Started(cluster, packed, cluster.share(self._code), gang)
        return None

    @property
    def _resources(self) -> Bundle:
        """The resources of one worker."""
        return {"cpu": 1.0} | self.run.spec.resources

    def enter_phase(self, number: int) -> Findings:
        """Enter the only phase, or end it."""
        return Findings(phases=1)

    def begin_generation(self, state: BeginGeneration) -> Findings | RunFacts:
        """Start all workers from the newest saved state."""
        spec, record = self.run.spec, self.run.record
        if self.run.stopping.is_set():
            return Findings(stopped=True)
        self.run.generation += 1
        self._points.restart(self.run.generation)
        self._gathering = PartsBySave(spec.workers)
        states = self._load_states()
        if states is not None:
            self._gathering.counts = [states[0].number] * spec.workers
            self._gathering.complete = states[0].number
        record.set_status(Status.STARTING if self.run.generation == 1 else Status.RECOVERING, "starting workers")
        recovers, _ = record.times.begin_generation(spec.workers)
        name = f"run-{time.time_ns()}"
        members = [self._spawn(rank, name, recovers=recovers) for rank in range(spec.workers)]
        self._group = _Group(name, members, states)
        record.set_status(Status.RUNNING, "")
        if self.run.generation == 1:
            self.run.move.report_arrival(0 if states is None else states[0].steps)
        return Findings()

    def _spawn(self, rank: int, name: str, *, recovers: bool) -> GroupMember:
        """Start the process of a worker of the generation `name`. `recovers`: it starts because of a failure."""
        spec, started = self.run.spec, self._started
        assert started is not None, "the resources are reserved first"
        wanted, traced = self._resources, self.run.record.ranks_to_trace(spec.workers)
        place = LoopPlace(
            rank,
            spec.workers,
            name,
            spec.timeout,
            spec.timeout + (install_seconds() if self._code.requirements else 0.0),
            dict(spec.params),
            spec.strategy,
            self.saves,
            spec.seed,
            rank in traced,
        )
        began = time.monotonic()
        handle = started.cluster.spawn(
            "rayps.runtime.own_loop.actor:LoopActor",
            started.packed,
            place,
            code=started.code,
            capture=self._capture and not isinstance(started.cluster, LocalCluster),
            sends=self._sends,
            recovers=recovers,
            threads=torch_threads(wanted["cpu"]),
            cpus=wanted["cpu"],
            gpus=wanted.get("gpu", 0.0),
            gang=started.gang,
            index=rank,
            warm=self._code.may_be_warm,
        )
        return GroupMember(f"worker-{rank}", handle, spawned=began)

    def _load_states(self) -> list[SavedPart] | None:
        """Return the ranks' parts of the newest saved state, or None if there is none."""
        if self._newest is None and self._saved is not None and self._saved[2] is not None:
            path = self._saved[2]
            return parts_of(checkpoint.load(path), self.run.spec.workers, str(path))
        found, self._newest = self._newest, self._newest if self._folder is None else None
        return found

    # ---- each poll

    @property
    def _workers(self) -> _Group:
        assert self._group is not None, "a generation begins first"
        return self._group

    def poll(self) -> None:
        """Take over what the workers have produced."""
        group = self._workers
        for rank, output in group.take():
            self._receive(rank, output)
        self.run.record.times.add(group.members)
        self.run.record.collect_traces(group.members)
        if group.has_progressed:
            self.run.failures.progressed()

    def find_facts(self, phase: int) -> RunFacts:
        """Return which workers have returned, failed or died."""
        group, run, started = self._workers, self.run, self._started
        assert started is not None, "the resources are reserved first"
        returned, errors, dead = group.facts()
        age = 0.0 if group.error_at is None else time.monotonic() - group.error_at
        return RunFacts(
            size=run.spec.workers,
            finished=frozenset(f"worker-{rank}" for rank in returned),
            errors=tuple(errors),
            dead=tuple(dead),
            error_age=age,
            failures=run.failures.failures,
            max_failures=run.spec.max_failures,
            in_row=run.failures.in_row,
            recovery=self._recovery(group, dead, errors),
            outputs={name: started.cluster.last_output(group.members[_parse_rank(name)].handle) for name, _ in dead},
            stop=run.stopping.is_set(),
            positions={f"worker-{rank}": output.steps for rank, output in sorted(group.watch.latest.items())},
        )

    def _recovery(self, group: _Group, dead: list[tuple[str, str]], errors: list[tuple[str, Exception]]) -> Recovery:
        """Return how the run recovers from a death now."""
        free = [rank for rank, output in group.watch.latest.items() if output.is_free]
        return recovery_of_loop([_parse_rank(name) for name, _ in dead], free, errors=bool(errors))

    def follow(self, phase: int, decision: Decision, facts: RunFacts) -> Findings:
        """Report the points of complete steps. If the generation ends, wait for the last output of its workers."""
        group, workers = self._workers, self.run.spec.workers
        if isinstance(decision, Continue):
            self._report(group.ended() if len(facts.finished) == workers else ())
            self.run.stopping.wait(POLL_SECONDS)
            return Findings(decision=decision)
        if isinstance(decision, Replace):
            group.watch.finish([_parse_rank(name) for name in decision.lost], self.poll)
            self._report(())
            return Findings(decision=decision)
        group.watch.finish(group.ended(), self.poll)
        self._report(range(workers))
        return Findings(decision=self._explain(decision, facts, group), complete=True)

    def _explain(self, decision: Decision, facts: RunFacts, group: _Group) -> Decision:
        """Return the decision with the error that explains it best."""
        only_lost = not facts.dead and all(isinstance(error, LinkError) for _, error in facts.errors)
        if facts.errors and only_lost and isinstance(decision, (Restart, Fail)):
            uneven = explain_uneven_steps(group.watch.latest)
            if uneven is not None:
                return Fail(uneven, str(uneven))
        if isinstance(decision, Fail) and decision.error is None and not self.run.spec.max_failures:
            if facts.dead:
                name, reason = facts.dead[0]
                output = group.watch.latest.get(_parse_rank(name))
                steps = output.steps if output else None
                error: Exception = explain_death(_parse_rank(name), steps, reason, facts.outputs[name])
            else:
                error = facts.errors[0][1]
            return Fail(error, str(error))
        return decision

    # ---- failures, and the end

    def recover(self, state: Recover) -> Findings:
        """End all workers, which start again from the newest saved state after a pause."""
        decision, run = state.decision, self.run
        self._end_generation()
        if self._saved is not None:
            number, steps, _ = self._saved
            where = f"continue from saved state {number} (after {steps} optimizer steps)"
        else:
            where = "start anew, because rayps.save has kept no state yet"
        message = f"{decision.reason}; all {run.spec.workers} workers start again and {where}"
        run.journal.event("restarted", message, lost=list(decision.lost), failures=run.failures.failures)
        run.stopping.wait(decision.pause)
        return Findings()

    def replace_members(self, decision: Replace) -> None:
        """Start new processes for the lost workers alone, from the newest saved state if there is one."""
        group, states, started = self._workers, self._load_states(), self._started
        assert started is not None, "the resources are reserved first"
        for rank in map(_parse_rank, decision.lost):
            started.cluster.kill(group.members[rank].handle)
            group.replace(self._spawn(rank, group.name, recovers=True), states)
            self._gathering.continue_alone(rank)
        where = "anew" if states is None else f"from saved state {states[0].number}"
        message = f"{decision.reason}: {' and '.join(decision.lost)} starts again alone, {where}; the others continue"
        self.run.journal.event("replaced", message, lost=list(decision.lost), round=states[0].steps if states else 0)

    def can_save_last(self, phase: int) -> bool:
        """Return whether the loop saves at all, so that it may save once more."""
        return self._folder is not None and self._saved is not None

    def request_checkpoint(self, phase: int, seconds: float) -> None:
        """Wait for the next `rayps.save`, for `seconds` at most."""
        self._last = self._saved_number, time.monotonic() + min(seconds, LEAVE_SECONDS)

    def await_checkpoint(self, phase: int) -> bool:
        """Take over what the workers produce, until one more state is saved, one of them ends, or the time is over."""
        assert self._last is not None, "it was requested"
        before, deadline = self._last
        self.poll()
        self._report(())
        if self._saved_number != before or time.monotonic() >= deadline or self._workers.ended():
            return False
        time.sleep(POLL_SECONDS)
        return True

    @property
    def _saved_number(self) -> int:
        return 0 if self._saved is None else self._saved[0]

    def _end_generation(self) -> None:
        """End the workers, and keep the results of those that have returned."""
        group, started = self._group, self._started
        if group is None or started is None or group.over:
            return
        group.over = True
        if all(reply.done() for reply in group.replies) and self._sends:
            self.results = [_read_result(reply) for reply in group.replies]
        group.watch.close()
        for member in group.members:
            started.cluster.kill(member.handle)

    def end(self) -> None:
        """End the workers, and release what they had."""
        if self._group is not None and not self._group.over:
            self.run.record.times.end(self._group.members)
        self._end_generation()
        if self._started is not None and self._started.gang is not None:
            self._started.gang.release()

    # ---- what workers produce

    def _receive(self, rank: int, output: LoopOutput) -> None:
        """Take over one worker's output."""
        journal = self.run.journal
        if output.lines and self._capture:
            journal.lines([(at, f"worker-{rank}", text) for at, text in output.lines])
        for event in output.events:
            if event["kind"] != "wrapped" or self._takes(event):
                journal.event(**event)
        self._points.add(output.points, time.monotonic())
        complete = [held for part in output.parts if (held := self._gathering.add(rank, part)) is not None]
        if complete:  # first the points: a driver that continues from the state does not repeat its steps
            self._write_points(saved=max(part.logged for parts in complete for part in parts.values()))
        for parts in complete:
            self._keep(parts)

    def _takes(self, event: Event) -> bool:
        """Record the strategy that the loop gave to `rayps.wrap`. Return whether it is new: a restart repeats it."""
        before = self._progress.get("wrapped", [])
        found = [*before[: event["number"]], event["strategy"], *before[event["number"] + 1 :]]
        self._progress["wrapped"] = found
        self._points.strategy = " + ".join(dict.fromkeys(str(each["name"]) for each in found))
        return found != before

    def _keep(self, parts: dict[int, SavedPart]) -> None:
        """Write a complete saved state into the folder, or keep it in memory if there is none."""
        spec = self.run.spec
        ordered = [parts[rank] for rank in range(spec.workers)]
        number, steps = ordered[0].number, ordered[0].steps
        if number <= self._saved_number:
            return
        if self._folder is None:
            self._newest, self._saved = ordered, (number, steps, None)
            return
        path = checkpoint.save(self._folder, number, checkpoint_of(parts), spec.keep_checkpoints)
        self._saved = number, steps, path
        message = f"saved state {number} (after {steps} optimizer steps): {path}"
        self.run.journal.event("checkpoint", message, round=steps)

    def _report(self, ended: range | list[int] | tuple[int, ...]) -> None:
        """Write the points of complete steps, and the progress. `ended`: ranks that log nothing more."""
        self._write_points(ended)
        if self._workers.watch.same_rows():
            self.run.journal.event("warning", SAME_ROWS)
        self.run.record.show_progress()

    def _write_points(self, ended: Collection[int] = (), *, saved: int = -1) -> None:
        merged = self._points.merged(time.monotonic(), ended, saved=saved)
        for point in merged:
            self._add(point)
        self.run.journal.add_points(merged)

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
            self.run.journal.event(
                "warning",
                f"{odd} is {numbers[odd]} in rayps.log of step {step}: lower the learning rate, clip gradients by "
                "optimizer.clip_grad_norm_(max_norm), or raise an error in the loop to end the run there",
                round=step,
            )

    def _read_round_and_facts(self) -> tuple[int, ProgressRecord]:
        facts: ProgressRecord = {
            **self._progress,
            "generation": self.run.generation,
            "failures": self.run.failures.failures,
            "samples_per_second": self._throughput.rate or None,  # None if the loop logs no samples
        }
        if self._group is not None:
            facts["workers"] = self._group.lines()
            steps = min((line["round"] for line in facts["workers"]), default=0)
            facts["round"] = max(steps, self._progress.get("round", 0))
        return facts.get("round", 0), facts

    # ---- the end

    def conclude(self, state: RunEnded) -> Outcome:
        """Return the outcome, with the newest numbers that the loop has logged unless it has failed."""
        outcome = Outcome(state.status, state.reason, error=state.error)
        path = outcome.checkpoint = None if self._saved is None else self._saved[2]
        if state.status is Status.FAILED:
            return outcome
        outcome.metrics = dict(self._progress.get("metrics", {}))
        if self._progress.get("loss") is not None:
            outcome.metrics = {"loss": float(self._progress["loss"] or 0.0)} | outcome.metrics
        if state.status is Status.SUCCEEDED:
            uneven = self._gathering.uneven()
            if uneven is not None:
                self.run.journal.event("warning", uneven)
            outcome.message = "the function returned on all workers"
        elif self.run.move.reason is not None:
            saved = 0 if self._saved is None else self._saved[1]
            latest = {} if self._group is None else self._group.watch.latest
            outcome.message = self.run.depart(saved, max((max(0, o.steps - saved) for o in latest.values()), default=0))
        else:
            kept = "nothing was saved" if self._saved is None else f"saved state {self._saved[0]} is kept"
            outcome.message = f"stopped on request: {kept if path is None else f'{path} is kept'}"
        return outcome


def _read_strategy_name(spec: JobSpec) -> str:
    """Return the name of the strategy that `wrap` uses by default."""
    found = spec.strategy
    return str(found.get("name", "")) if isinstance(found, dict) else str(found).partition(":")[0]


def _called(member: GroupMember, states: list[SavedPart] | None) -> ActorReply:
    """Call the user's function in a worker. It continues from the saved states of all ranks, if there are some."""
    return member.handle.call("run", *(() if states is None else (states[member.rank], states[0])))


def _parse_rank(worker: str) -> int:
    return int(worker.removeprefix("worker-"))


def _read_place(reply: ActorReply) -> ActorHost | None:
    try:
        found: ActorHost | None = reply.result(0) if reply.done() else None
    except Exception:  # the worker has died; its function's reply has the reason
        return None
    return found


def _read_result(reply: ActorReply) -> Any:
    try:
        return reply.result(0)
    except Exception:  # the run has failed, and the decision has the error
        return None

"""The states of a run: every state with every finding, and the nested loops of which they are the flat form."""

import itertools

import pytest
from rayps_client.errors import TrainingError, WorkloadError

from rayps.core.job.continuation import Continuation
from rayps.core.job.job_status import Status
from rayps.runtime.driver.decide_recovery import (
    AwaitCheckpoint,
    BeginGeneration,
    Continue,
    EnterPhase,
    Evaluate,
    Fail,
    Findings,
    Finish,
    RebuildLost,
    Recover,
    Replace,
    ReplaceMembers,
    RequestCheckpoint,
    Restart,
    RunEnded,
    StartWorkers,
    Stop,
    Train,
    find_next_state,
)

PHASES = 2
REBUILD = Continuation(7, (0, 1), keeps_places=True)
HANDOVER = Continuation(7, (0,))
RESTART, REBUILD_LOST, REPLACE = (kind(("worker-1",), "worker-1 died") for kind in (Restart, RebuildLost, Replace))
USERS = WorkloadError("loss() raised ValueError")
DECISIONS = [
    Continue(),
    Finish(),
    Stop(),
    Fail(USERS, "worker-0: x"),
    Fail(None, "too often"),
    RESTART,
    REBUILD_LOST,
    REPLACE,
]
STATES = [
    StartWorkers(),
    *(EnterPhase(n) for n in range(PHASES + 1)),
    *(BeginGeneration(n, rebuild) for n in range(PHASES) for rebuild in (None, REBUILD)),
    *(
        Recover(n, d, evaluating)
        for n in range(PHASES)
        for d in (RESTART, REBUILD_LOST)
        for evaluating in (False, True)
    ),
    *(ReplaceMembers(n, REPLACE) for n in range(PHASES)),
    *(kind(n) for kind in (Train, Evaluate, RequestCheckpoint, AwaitCheckpoint) for n in range(PHASES)),
    RunEnded(Status.SUCCEEDED, "trained to the end"),
    RunEnded(Status.FAILED, "x", USERS),
    RunEnded(Status.STOPPED),
]
FLAGS = [False, True]
EVERY = [
    Findings(stopped, PHASES, work, decision, complete, waiting, continues, saving)
    for stopped, work, decision, complete, waiting, continues, saving in itertools.product(
        FLAGS, FLAGS, [None, *DECISIONS], FLAGS, FLAGS, [None, REBUILD, HANDOVER], FLAGS
    )
]


def law(state, found):
    """The same transitions, said once more as a table: the kind of the next state."""
    decision = type(found.decision)
    after_poll = {
        Stop: RequestCheckpoint,
        Fail: RunEnded,
        Restart: Recover,
        RebuildLost: Recover,
        Replace: ReplaceMembers,
    }
    lost = dict.fromkeys((Restart, RebuildLost, Replace), Recover)
    return {
        StartWorkers: {Stop: RunEnded, Fail: RunEnded, **dict.fromkeys(lost, StartWorkers)}.get(
            decision, RunEnded if found.stopped else EnterPhase
        ),
        EnterPhase: BeginGeneration if found.work else EnterPhase,
        BeginGeneration: RunEnded
        if found.stopped or (decision is Stop and not found.waiting)
        else BeginGeneration
        if found.waiting
        else Evaluate
        if decision is Finish and found.complete
        else after_poll.get(decision, Train),
        Train: Evaluate if decision is Finish and found.complete else after_poll.get(decision, Train),
        Recover: BeginGeneration,
        ReplaceMembers: Train,
        Evaluate: {type(None): EnterPhase, Stop: RunEnded, Fail: RunEnded, **lost}.get(decision, Evaluate),
        RequestCheckpoint: AwaitCheckpoint if found.saving else RunEnded,
        AwaitCheckpoint: AwaitCheckpoint if found.saving else RunEnded,
        RunEnded: RunEnded,
    }[type(state)]


def test_every_state_with_every_finding():
    reached = set()
    for state, found in itertools.product(STATES, EVERY):
        after = find_next_state(state, found)
        last = isinstance(state, EnterPhase) and state.phase == PHASES
        assert type(after) is (RunEnded if last else law(state, found)), (state, found)
        assert after.terminal is isinstance(after, RunEnded)
        reached.add(type(after))
    assert reached == {type(state) for state in STATES}


def test_what_is_handed_on():
    for state, found in itertools.product(STATES, EVERY):
        after = find_next_state(state, found)
        if state.terminal:
            assert after is state
        if hasattr(state, "phase") and hasattr(after, "phase"):  # a phase is left by its evaluation, or skipped
            leaves = isinstance(after, EnterPhase)
            assert after.phase == state.phase + leaves
        if isinstance(after, Recover):
            assert after.evaluating is isinstance(state, Evaluate)
            assert (after.decision.lost, after.decision.reason) == (("worker-1",), "worker-1 died")
            assert not after.evaluating or isinstance(after.decision, Restart)  # no state of a peer is newer
        if isinstance(after, BeginGeneration):
            waits = isinstance(state, BeginGeneration)
            assert after.continues is (found.continues if isinstance(state, Recover) or waits else None)
        if isinstance(after, RunEnded) and not state.terminal:
            asked = found.stopped or isinstance(found.decision, Stop) or "Checkpoint" in type(state).__name__
            assert (after.status is Status.SUCCEEDED) == (state == EnterPhase(PHASES))
            assert after.status is not Status.STOPPED or asked
            if after.status is Status.FAILED:
                assert after.error is USERS or type(after.error) is TrainingError
                assert after.reason == str(after.error)


DIED = [Findings(decision=decision) for decision in (RESTART, DECISIONS[4])]


def matters(state):
    """The findings that a state can tell apart, one of each."""
    match state:
        case StartWorkers():
            return [Findings(), Findings(stopped=True), *DIED]
        case EnterPhase(n):
            return [Findings(phases=PHASES, work=work) for work in (FLAGS if n < PHASES else [True])]
        case Train():
            polls = [Findings(decision=decision) for decision in DECISIONS]
            return [*polls, Findings(decision=Finish(), complete=True)]
        case Evaluate():
            return [Findings(decision=decision) for decision in [None, Stop(), DECISIONS[4], RESTART]]
        case BeginGeneration(_, rebuild):
            waits = [Findings(waiting=True, continues=each) for each in ([None, rebuild] if rebuild else [None])]
            return [Findings(), Findings(stopped=True), *waits, *DIED]
        case Recover(_, RebuildLost()):
            return [Findings(), Findings(continues=REBUILD)]
        case RequestCheckpoint() | AwaitCheckpoint():
            return [Findings(saving=saving) for saving in FLAGS]
    return [Findings()]


def test_a_run_can_end_from_every_state_that_it_can_reach():
    found, after = {repr(StartWorkers()): StartWorkers()}, {}
    while todo := found.keys() - after.keys():
        for name in todo:
            next_ones = [find_next_state(found[name], findings) for findings in matters(found[name])]
            after[name] = {repr(state) for state in next_ones}
            found |= {repr(state): state for state in next_ones}
    assert {type(state) for state in found.values()} == {type(state) for state in STATES}
    ending = {name for name, state in found.items() if state.terminal}
    assert {found[name].status for name in ending} == {Status.SUCCEEDED, Status.FAILED, Status.STOPPED}
    while more := {name for name in after if name not in ending and after[name] & ending}:
        ending |= more
    assert ending == found.keys()


class Nested:
    """The run as three nested loops, with an evaluation that calls the training of its phase again: the slow twin."""

    def __init__(self, script):
        self.script, self.trace = iter(script), []

    def find(self, state):
        self.trace.append(state)
        return next(self.script)

    def run(self):
        while (found := self.find(StartWorkers())).decision is not None:
            if isinstance(found.decision, Fail):
                return Status.FAILED
        if found.stopped:
            return Status.STOPPED
        for phase in range(PHASES):
            if self.find(EnterPhase(phase)).work:
                ended = self.train(phase) or self.evaluate(phase)
                if ended:
                    return ended
        self.find(EnterPhase(PHASES))
        return Status.SUCCEEDED

    def train(self, phase):
        rebuild = None
        while True:
            found = self.find(BeginGeneration(phase, rebuild))
            if found.stopped:
                return Status.STOPPED
            if found.waiting:
                rebuild = found.continues
                continue
            if isinstance(found.decision, Fail):
                return Status.FAILED
            broken = found.decision or self.watch(phase)
            if not isinstance(broken, (Restart, RebuildLost)):
                return broken
            rebuild = self.find(Recover(phase, broken)).continues

    def watch(self, phase):
        """None: the phase is trained; a decision: everyone must begin again; else how the run ends."""
        while True:
            found = self.find(Train(phase))
            match found.decision:
                case Finish() if found.complete:
                    return None
                case Fail():
                    return Status.FAILED
                case Stop():
                    return self.leave(phase)
                case Restart() | RebuildLost():
                    return found.decision
                case Replace():
                    self.find(ReplaceMembers(phase, found.decision))

    def leave(self, phase):
        if self.find(RequestCheckpoint(phase)).saving:
            while self.find(AwaitCheckpoint(phase)).saving:
                pass
        return Status.STOPPED

    def evaluate(self, phase):
        while True:
            match self.find(Evaluate(phase)).decision:
                case None:
                    return None
                case Stop():
                    return Status.STOPPED
                case Fail():
                    return Status.FAILED
                case Restart() as lost:
                    self.find(Recover(phase, lost, evaluating=True))
            ended = self.train(phase)
            if ended:
                return ended


def scripts(state, length):
    """Every course of findings from a state on, up to so many."""
    if not length or state.terminal:
        yield [], [], state
        return
    for found in matters(state):
        for rest, trace, end in scripts(find_next_state(state, found), length - 1):
            yield [found, *rest], [state, *trace], end


@pytest.mark.parametrize("length", [3, 6, 9])
def test_the_loop_takes_the_same_course_as_nested_loops(length):
    seen = 0
    for script, trace, end in scripts(StartWorkers(), length):
        twin = Nested(script)
        try:
            ended = twin.run()
        except StopIteration:  # the script ends before the run
            assert twin.trace[:-1] == trace
            assert twin.trace[-1] == end
        else:
            assert twin.trace == trace
            assert end.status is ended
        seen += 1
    assert seen > {3: 3, 6: 40, 9: 1000}[length]

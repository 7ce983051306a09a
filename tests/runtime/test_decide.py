import itertools
from dataclasses import replace

import pytest
from rayps_client.errors import (
    ActorDied,
    CheckpointError,
    ClusterError,
    ConfigError,
    LinkError,
    NoResources,
    PeerLost,
    PeerTimeout,
    RaypsError,
    StaleGeneration,
    TrainingError,
    WorkloadError,
)

from rayps.core.strategy.strategy_families import Rebuild, RegroupLiving, ReplaceOne, RestartAll
from rayps.runtime.driver.decide_recovery import (
    GRACE_SECONDS,
    LONGEST_PAUSE,
    PAUSE_SECONDS,
    Continue,
    Fail,
    FailureCount,
    Finish,
    RebuildLost,
    RecoveryFacts,
    Regroup,
    Replace,
    Restart,
    RunFacts,
    Stop,
    choose_recovery,
    death_of,
    decide,
    pause_before,
)

LOST = PeerLost("worker-1 closed the connection", peer="worker-1")
SLOW = PeerTimeout("worker-1 was silent", peer="worker-1", seconds=5)
STALE = StaleGeneration("refused", peer="worker-0")
GONE = ActorDied("a server of the loop died", actor="shard", reason="killed")
USERS = WorkloadError("loss() raised ValueError")
NAN = TrainingError("the loss became nan", rank=0, round=3)

FINISHED = [frozenset(), frozenset({"worker-0"}), frozenset({"worker-0", "worker-1"})]
ERRORS = [
    (),
    (("worker-0", LOST),),
    (("worker-0", SLOW),),
    (("worker-0", STALE),),
    (("worker-0", GONE),),
    (("worker-0", USERS),),
    (("worker-0", LOST), ("worker-1", NAN)),
]
MANAGER = "manager of a group"
DEAD = [
    (),
    (("worker-1", "killed"),),
    (("shard-0", "killed"),),
    (("worker-1", "killed"), ("shard-0", "gone")),
    ((MANAGER, "killed"),),
]
RECOVERIES = [RestartAll(), ReplaceOne(), Rebuild(), RegroupLiving()]
EVERY = list(
    itertools.product(
        FINISHED, ERRORS, DEAD, [0.0, GRACE_SECONDS], [0, 2, 3], RECOVERIES, [True, False], [True, False], [0, 1, 3]
    )
)


def law(facts):
    """The same rules, said once more in another way: the kind of decision that is right."""
    hopeless = [e for _, e in facts.errors if not isinstance(e, (LinkError, ActorDied))]
    waits = facts.error_age < GRACE_SECONDS  # for the death behind a lost connection, and for all who lost it
    trouble = bool(facts.dead) or (bool(facts.errors) and not waits)
    if facts.stop:
        return Stop
    if hopeless:
        return Fail
    if trouble:
        if facts.failures >= facts.max_failures:
            return Fail
        alone = facts.planned and MANAGER not in dict(facts.dead)  # one member can be replaced
        return {
            RestartAll(): Restart,
            ReplaceOne(): Replace if alone else Restart,
            Rebuild(): RebuildLost,
            RegroupLiving(): Regroup,
        }[facts.recovery]
    return Finish if len(facts.finished) == facts.size else Continue


def test_every_combination_of_facts():
    kinds = set()
    for finished, errors, dead, broken, failures, recovery, stop, planned, in_row in EVERY:
        facts = RunFacts(2, finished, errors, dead, broken, failures, 3, recovery, stop, planned=planned, in_row=in_row)
        decision = decide(facts)
        assert type(decision) is law(facts), facts
        kinds.add(type(decision))
        if isinstance(decision, (Restart, RebuildLost)):
            assert decision.pause == pause_before(in_row)
        if isinstance(decision, (Restart, RebuildLost, Replace, Regroup)):
            members = {name for name, _ in dead}
            assert set(decision.lost) == members if dead else True
            assert decision.reason
        if isinstance(decision, Fail):
            assert len(decision.reason.splitlines()) <= 3
    assert kinds == {Continue, Finish, Stop, Restart, RebuildLost, Replace, Regroup, Fail}


def test_restarts_in_a_row_wait_longer_each_time():
    pauses = [pause_before(restarts) for restarts in range(100)]
    assert pauses[:4] == [0.0, PAUSE_SECONDS, 2 * PAUSE_SECONDS, 4 * PAUSE_SECONDS]
    assert pauses == sorted(pauses) and pauses[-1] == LONGEST_PAUSE
    count = FailureCount(2)
    count.add(), count.add()
    assert (count.failures, count.in_row) == (4, 2)
    count.progressed()
    assert (count.failures, count.in_row) == (4, 0)


@pytest.mark.parametrize(
    ("error", "who"),
    [
        (ActorDied("actor x died: killed", actor="worker-1", reason="killed"), ("worker-1", "killed")),
        (ActorDied("it is dead"), ("a process of the job", "it is dead")),
        (PeerLost("closed", peer="worker:1"), ("worker-1", "closed")),
        (SLOW, ("worker-1", "worker-1 was silent")),
        (USERS, None),
        (NAN, None),
        (ConfigError("x"), None),
        (CheckpointError("x"), None),
        (NoResources("x"), None),
        (ClusterError("actor x did not start: ConfigError: no"), None),
    ],
    ids=str,
)
def test_a_start_that_failed_names_who_died_and_a_refusal_is_nobodys_death(error, who):
    assert death_of(error) == who


def test_the_last_failure_quotes_what_the_dead_process_wrote():
    dead = (("worker-0", "killed"), ("worker-1", "killed"))
    facts = RunFacts(2, dead=dead, failures=3, planned=False, outputs={"worker-0": "", "worker-1": "no such device"})
    assert decide(facts).reason.endswith("the last output of worker-1:\nno such device")
    assert "worker-0 died while the members started (killed)" in decide(facts).reason
    assert "no such device" not in decide(replace(facts, failures=2)).reason


@pytest.mark.parametrize(
    ("facts", "now"),
    [
        (RecoveryFacts(RestartAll()), RestartAll()),
        (RecoveryFacts(RestartAll(), holds_tables=True), ReplaceOne()),
        (RecoveryFacts(ReplaceOne()), ReplaceOne()),
        (RecoveryFacts(ReplaceOne(), holds_tables=True), ReplaceOne()),
        (RecoveryFacts(Rebuild()), Rebuild()),
        (RecoveryFacts(Rebuild(from_servers=True), rejoins=True), ReplaceOne()),
        (RecoveryFacts(Rebuild(from_servers=True)), RestartAll()),
        (RecoveryFacts(RestartAll(), regroups=True), RegroupLiving()),
        (RecoveryFacts(RestartAll(), regroups=True, server_died=True), RestartAll()),
        (RecoveryFacts(Rebuild(), regroups=True), Rebuild()),
        (RecoveryFacts(ReplaceOne(), servers_end=True), ReplaceOne()),
        (RecoveryFacts(ReplaceOne(), servers_end=True, server_died=True), RestartAll()),
        (RecoveryFacts(Rebuild(), open_data=True), RestartAll()),
        (RecoveryFacts(ReplaceOne(), open_data=True), ReplaceOne()),
    ],
)
def test_what_is_declared_decides_what_a_death_brings_about(facts, now):
    assert choose_recovery(facts) == now


def recovery_law(facts):
    """The same rules, said once more: which recoveries are impossible, and the best of those that are left."""
    from_copies, from_servers = facts.declared == Rebuild(), facts.declared == Rebuild(from_servers=True)
    rebuilds = from_copies or from_servers
    if facts.server_died and not rebuilds and (facts.regroups or facts.servers_end):
        return RestartAll()  # no memory has what the server had
    if facts.regroups and not rebuilds:
        return RegroupLiving()
    if rebuilds and (facts.open_data or (facts.server_died and facts.servers_end)):
        return RestartAll()
    if from_copies:
        return Rebuild()
    alone = facts.rejoins if from_servers else facts.holds_tables or facts.declared == ReplaceOne()
    return ReplaceOne() if alone else RestartAll()


def test_every_combination_of_what_bends_a_recovery():
    declared = [RestartAll(), ReplaceOne(), Rebuild(), Rebuild(from_servers=True)]
    found = set()
    for each, *others in itertools.product(declared, *[[False, True]] * 6):
        facts = RecoveryFacts(each, *others)
        assert choose_recovery(facts) == recovery_law(facts), facts
        found.add(choose_recovery(facts))
    assert found == {RestartAll(), ReplaceOne(), Rebuild(), RegroupLiving()}


@pytest.mark.parametrize("error", [USERS, NAN, RaypsError("x"), ClusterError("y")])
def test_what_no_retry_can_mend_is_not_tried_again(error):
    decision = decide(RunFacts(2, errors=(("worker-1", error),), recovery=ReplaceOne()))
    assert decision == Fail(error, f"worker-1: {error}")


@pytest.mark.parametrize("stop", [False, True])
def test_the_users_wish_comes_first(stop):
    facts = RunFacts(1, finished=frozenset({"worker-0"}), errors=(("worker-0", USERS),), stop=stop)
    assert isinstance(decide(facts), Stop if stop else Fail)


def test_a_death_is_the_reason_not_the_lost_connections_behind_it():
    decision = decide(RunFacts(3, errors=(("worker-0", LOST), ("worker-2", LOST)), dead=(("worker-1", "SIGKILL"),)))
    assert decision == Restart(("worker-1",), "worker-1 died (SIGKILL)")


def test_the_silent_one_is_replaced_in_step():
    for peer, lost in [("worker-1", "worker-1"), ("worker:1", "worker-1"), ("shard-0", "shard-0")]:
        slow = PeerTimeout("silent", peer=peer, seconds=5)
        decision = decide(RunFacts(3, errors=(("worker-0", slow), ("worker-2", slow)), error_age=GRACE_SECONDS))
        assert isinstance(decision, Restart)
        assert decision.lost == (lost,)


def test_nobody_is_blamed_without_a_name():
    slow = PeerTimeout("silent", peer="anyone", seconds=5)
    for error in (slow, LOST, STALE):
        decision = decide(RunFacts(3, errors=(("worker-0", error),), error_age=GRACE_SECONDS))
        assert isinstance(decision, Restart)
        assert decision.lost == ()


def test_out_of_step_all_who_lost_a_connection_begin_anew_together():
    decision = decide(RunFacts(3, errors=(("worker-2", LOST),), error_age=GRACE_SECONDS, recovery=ReplaceOne()))
    assert isinstance(decision, Replace)
    assert decision.lost == ("worker-2",)


def test_servers_that_keep_the_last_states_are_a_failure_once_all_workers_have_finished():
    silent = PeerTimeout("server 'server-1' did not answer", peer="server-1", seconds=5)
    facts = RunFacts(1, recovery=ReplaceOne(), unanswered=silent)
    assert decide(facts) == Continue()
    finished = replace(facts, finished=frozenset({"worker-0"}))
    assert decide(finished) == Restart((), "server 'server-1' did not answer")
    assert isinstance(decide(replace(finished, failures=3)), Fail)


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_failures_are_bounded(limit):
    for failures in range(limit + 1):
        decision = decide(RunFacts(2, dead=(("shard-0", "gone"),), failures=failures, max_failures=limit))
        assert isinstance(decision, Fail if failures == limit else Restart)
    assert f"failure {limit + 1}" in decision.reason
    assert f"max_failures is {limit}" in decision.reason


@pytest.mark.parametrize(
    ("why", "told"), [("", "no reason given"), ("one\ntwo", "(one)"), ("x" * 500, "x" * 197 + "...")]
)
def test_reasons_are_short(why, told):
    decision = decide(RunFacts(2, dead=(("worker-0", why),)))
    assert told in decision.reason
    assert "\n" not in decision.reason


def test_a_death_names_the_round_where_it_is_known():
    dead = (("worker-1", "SIGKILL"), ("shard-0", "gone"))
    decision = decide(RunFacts(2, dead=dead, positions={"worker-0": 7, "worker-1": 4}))
    assert decision == Restart(
        ("worker-1", "shard-0"), "worker-1 died after it had reported round 4 (SIGKILL); shard-0 died (gone)"
    )

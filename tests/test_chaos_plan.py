"""The plan of faults is a function of its seed and of what there is; nothing that was not allowed is in it."""

import itertools

import pytest

from rayps.chaos.faults import ALL_FAULTS, KINDS, FaultOn, FaultRole, Scope, parse_faults, parse_scopes, scope_of
from rayps.chaos.plan import ChaosFacts, draw_plan, why_not
from rayps.core.errors import ConfigError

ALL = frozenset(Scope)
MANY = dict.fromkeys(FaultRole, 1) | {FaultRole.WORKER: 3, FaultRole.SERVER: 2}
TIMES = (10.0, 600.0)


@pytest.mark.parametrize("seed", range(20))
def test_a_seed_draws_one_plan_that_keeps_its_rules(seed):
    facts = ChaosFacts(MANY)
    plan = draw_plan(seed, ALL_FAULTS, facts, ALL, TIMES)
    assert plan == draw_plan(seed, ALL_FAULTS, facts, ALL, TIMES)
    assert plan.faults != draw_plan(seed + 1, ALL_FAULTS, facts, ALL, TIMES).faults
    assert not plan.left_out
    for planned in plan.faults:
        low, high = KINDS[planned.fault.kind].seconds
        assert 0 < planned.at < 600 and low <= planned.seconds <= high
        assert planned.fault.role in KINDS[planned.fault.kind].roles
        assert 0 <= planned.number < MANY[planned.fault.role]
        assert bool(planned.amount) == (planned.fault.kind == "clock")
    for before, after in itertools.pairwise(plan.faults):
        assert after.at >= before.at + before.seconds  # one ends before the next begins
    first = [planned.fault for planned in plan.faults[: len(ALL_FAULTS)]]
    assert sorted(first) == sorted(ALL_FAULTS)[: len(first)] or len(set(first)) == len(first)  # each before any again


def test_the_mean_time_between_faults_is_as_asked():
    plan = draw_plan(1, (FaultOn("kill", FaultRole.WORKER),), ChaosFacts(MANY), ALL, (10.0, 10_000.0))
    assert len(plan.faults) == pytest.approx(1000, rel=0.05)


def test_what_is_not_allowed_or_not_there_is_left_out_with_the_reason():
    counts = {
        FaultRole.WORKER: 2,
        FaultRole.DRIVER: 1,
        FaultRole.RAYLET: 1,
        FaultRole.GCS: 1,
        FaultRole.SERVICE: 1,
        FaultRole.MACHINE: 1,
    }
    clock = FaultOn("clock", FaultRole.SERVICE)
    facts = ChaosFacts(counts, cannot={clock: "no clock"})
    plan = draw_plan(0, ALL_FAULTS, facts, frozenset([Scope.JOB]), TIMES)
    assert {planned.fault.role for planned in plan.faults} == {FaultRole.WORKER, FaultRole.DRIVER}
    assert "--allow ray" in plan.left_out[FaultOn("kill", FaultRole.GCS)]
    assert "--allow machine" in plan.left_out[FaultOn("burn", FaultRole.MACHINE)]
    assert "no server" in plan.left_out[FaultOn("kill", FaultRole.SERVER)]
    assert why_not(clock, facts, ALL) == "no clock"
    assert why_not(FaultOn("kill", FaultRole.RAYLET), facts, ALL) is None


def test_servers_that_jobs_share_need_a_permission():
    mine, shared = ChaosFacts(MANY), ChaosFacts(MANY, shared_group=True)
    kill = FaultOn("kill", FaultRole.SERVER)
    assert why_not(kill, mine, frozenset([Scope.JOB])) is None
    assert "--allow group" in why_not(kill, shared, frozenset([Scope.JOB]))
    assert scope_of(FaultRole.MANAGER, shared_group=True) is Scope.GROUP


@pytest.mark.parametrize("times", [(0.0, 10.0), (10.0, 0.0), (-1.0, 10.0)])
def test_times_that_are_none(times):
    with pytest.raises(ConfigError, match="above 0"):
        draw_plan(0, ALL_FAULTS, ChaosFacts(MANY), ALL, times)


def test_a_plan_without_any_fault_is_refused():
    with pytest.raises(ConfigError, match="no fault can be injected"):
        draw_plan(0, ALL_FAULTS, ChaosFacts({}), ALL, TIMES)


def test_faults_and_permissions_are_read_as_they_are_written():
    assert parse_faults("all") == ALL_FAULTS
    assert parse_faults("kill:worker, kill:worker") == (FaultOn("kill", FaultRole.WORKER),)
    assert parse_faults("clock") == (FaultOn("clock", FaultRole.SERVICE),)
    assert parse_scopes("") == {Scope.JOB}
    assert parse_scopes("ray,service") == {Scope.JOB, Scope.RAY, Scope.SERVICE}
    with pytest.raises(ConfigError, match="did you mean 'kill'"):
        parse_faults("kil")
    with pytest.raises(ConfigError, match="cannot hit 'worker'"):
        parse_faults("clock:worker")
    with pytest.raises(ConfigError, match="--allow 'disk'"):
        parse_scopes("disk")


def test_the_words_name_target_and_duration():
    plan = draw_plan(3, parse_faults("stop:worker"), ChaosFacts(MANY), ALL, TIMES)
    words = plan.faults[0].words
    assert words.startswith("worker-") and "SIGSTOP" in words and words.endswith(" s")

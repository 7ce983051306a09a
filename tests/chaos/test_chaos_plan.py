"""The plan of faults is a function of its seed and of what there is; nothing that was not allowed is in it."""

import itertools
import math

import pytest
from rayps_chaos.expected_processes import expected_facts, possible_facts
from rayps_chaos.faults import (
    ALL_FAULTS,
    KINDS,
    NEWBORN,
    NEWBORN_SECONDS,
    FaultOn,
    FaultRole,
    Scope,
    parse_faults,
    parse_scopes,
    scope_of,
)
from rayps_chaos.inject import cannot_inject
from rayps_chaos.plan import USUAL_FAULTS, ChaosFacts, draw_newborn_plan, draw_plan, too_many_failures, why_not
from rayps_chaos.run import ChaosOptions
from rayps_chaos.soak import SoakOptions
from rayps_client.errors import ConfigError

from rayps.strategies.catalogue import parse
from rayps.strategies.job import JobSpec

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


BAD_SECONDS = (0.0, -1.0, math.inf, -math.inf, math.nan)


@pytest.mark.parametrize("wrong", BAD_SECONDS, ids=str)
@pytest.mark.parametrize("option", ["--every", "--for"])
def test_times_that_are_none(option, wrong):
    times = (wrong, 10.0) if option == "--every" else (10.0, wrong)
    with pytest.raises(ConfigError, match=f"^{option} is .*above 0") as error:
        draw_plan(0, ALL_FAULTS, ChaosFacts(MANY), ALL, times)
    assert error.value.data["field"] == option.removeprefix("--")


@pytest.mark.parametrize("wrong", BAD_SECONDS, ids=str)
@pytest.mark.parametrize("name", ["every", "seconds", "deadline", "longest_gap"])
def test_each_time_of_a_run_is_checked_with_the_name_of_its_option(name, wrong):
    option = {"seconds": "--for"}.get(name, f"--{name.replace('_', '-')}")
    with pytest.raises(ConfigError, match=f"^{option} is .*above 0"):
        ChaosOptions(0, ALL_FAULTS, ALL, **{name: wrong})
    for each in ("every", "every_service"):
        with pytest.raises(ConfigError, match=f"^--{each.replace('_', '-')} is .*above 0"):
            SoakOptions(60.0, 0, ALL_FAULTS, **{each: wrong})


def test_a_plan_without_an_end_has_twenty_faults_and_begins_every_longer_plan():
    facts = ChaosFacts(MANY)
    first = draw_plan(5, ALL_FAULTS, facts, ALL, (10.0, None)).faults
    assert len(first) == USUAL_FAULTS == 20
    assert draw_plan(5, ALL_FAULTS, facts, ALL, (10.0, 5000.0)).faults[:20] == first


def test_a_time_too_short_for_a_fault_is_refused():
    short = ChaosOptions(0, ALL_FAULTS, ALL, every=15.0, seconds=2.0)
    with pytest.raises(ConfigError, match="no fault fits into --for 2 with --every 15"):
        short.draw(ChaosFacts(MANY), 3)


@pytest.mark.parametrize(
    ("text", "manager", "counted"),
    [
        ("kill:worker", 0, True),
        ("kill:server", 0, True),
        ("kill:server", 1, False),  # the manager replaces it
        ("kill:driver", 0, True),  # the service counts the loss of a driver
        ("kill:gcs", 0, True),
        ("kill:raylet", 0, True),
        ("kill:manager", 1, False),
        ("kill:service", 0, False),
        ("stop:worker", 0, False),
        ("burn:machine", 0, False),
    ],
)
def test_more_failures_than_the_job_survives_are_told_with_both_numbers(text, manager, counted):
    facts = ChaosFacts(MANY | {FaultRole.MANAGER: manager})
    plan = draw_plan(0, parse_faults(text), facts, ALL, (10.0, None))
    told = too_many_failures(plan, facts, 3)
    assert (told is not None) is counted
    assert too_many_failures(plan, facts, 20) is None  # as many as there are
    if told is not None:
        assert told.startswith("20 of the planned faults") and "max_failures is 3" in told
        assert all(way in told for way in ("--faults", "--every", "at least 20"))
        assert too_many_failures(plan, facts, 19) is not None


@pytest.mark.parametrize(
    ("strategy", "servers", "manager"),
    [
        ("all_reduce", 0, 0),
        ("hogwild", 0, 0),
        ("parameter_server:shards=3", 3, 0),
        ("parameter_server:shards=2,replicas=1", 2, 1),
        ("hybrid", 2, 1),  # for its tables
        ("1*all_reduce > parameter_server:shards=2", 2, 0),
    ],
)
def test_the_processes_of_a_job_follow_from_its_specification(strategy, servers, manager):
    spec = JobSpec("a:B", strategy, workers=3)
    facts = expected_facts(spec, [phase.strategy for phase in parse(strategy)], {})
    assert set(facts.counts) == set(FaultRole) and not facts.shared_group
    assert facts.counts == MANY | {FaultRole.WORKER: 3, FaultRole.SERVER: servers, FaultRole.MANAGER: manager}
    kill = FaultOn("kill", FaultRole.SERVER)
    assert (why_not(kill, possible_facts(spec, facts), ALL) is None) is bool(servers)


def test_servers_that_a_specification_does_not_exclude_are_possible():
    loop = JobSpec("", "all_reduce", run="a.py:f")
    facts = expected_facts(loop, [phase.strategy for phase in parse("all_reduce")], {})
    assert facts.counts[FaultRole.SERVER] == 0 and possible_facts(loop, facts).counts[FaultRole.SERVER] == 1
    shared = JobSpec("a:B", "parameter_server", server_group="g")
    facts = expected_facts(shared, [phase.strategy for phase in parse("parameter_server")], {})
    assert facts.shared_group and facts.counts[FaultRole.SERVER] and facts.counts[FaultRole.MANAGER]


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


@pytest.mark.parametrize("seed", range(20))
def test_newborn_faults_hit_each_attempt_in_its_first_seconds(seed):
    wanted, facts = parse_faults(NEWBORN), ChaosFacts(MANY | {FaultRole.MANAGER: 0})
    plan = draw_newborn_plan(seed, wanted, facts, ALL, 3)
    assert plan == draw_newborn_plan(seed, wanted, facts, ALL, 3) != draw_newborn_plan(seed + 1, wanted, facts, ALL, 3)
    assert list(plan.left_out) == [FaultOn(NEWBORN, FaultRole.MANAGER)]
    assert len(plan.faults) == 3
    for planned in plan.faults:
        assert 0 <= planned.at <= NEWBORN_SECONDS
        assert planned.fault.kind == NEWBORN and 0 <= planned.number < MANY[planned.fault.role]
    assert too_many_failures(plan, facts, 3) is None


def test_newborn_faults_come_alone_and_with_a_job_file():
    assert parse_faults("newborn:worker") == (FaultOn(NEWBORN, FaultRole.WORKER),)
    assert not any(fault.kind == NEWBORN for fault in parse_faults("all"))
    with pytest.raises(ConfigError, match="give newborn alone"):
        parse_faults("kill,newborn")
    with pytest.raises(ConfigError, match="max_failures of the job is 0"):
        draw_newborn_plan(0, parse_faults(NEWBORN), ChaosFacts(MANY), ALL, 0)
    facts = ChaosFacts(MANY, cannot=cannot_inject(own_service=False))
    with pytest.raises(ConfigError, match="give a job file"):
        draw_newborn_plan(0, parse_faults(NEWBORN), facts, ALL, 3)
    with pytest.raises(ConfigError, match="--soak has no newborn faults"):
        SoakOptions(60.0, 0, parse_faults(NEWBORN))

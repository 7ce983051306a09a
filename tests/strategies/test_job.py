import itertools
import json
import math

import pytest
from rayps_client.errors import ConfigError

from rayps.core.job.job_status import MOVES, Status, may_move
from rayps.strategies.job import JobSpec

BAD = [
    ({"workers": 0}, "workers", ["0", "at least 1"]),
    ({"workers": -1}, "workers", ["-1"]),
    ({"workers": 1.5}, "workers", ["1.5", "whole number"]),
    ({"workers": True}, "workers", ["True"]),
    ({"workers": "4"}, "workers", ["'4'"]),
    ({"workers": None}, "workers", ["None"]),
    ({"epochs": 0}, "epochs", ["0", "at least 1"]),
    ({"epochs": "3"}, "epochs", ["'3'"]),
    ({"steps": 0}, "steps", ["0", "at least 1"]),
    ({"steps": 2.0}, "steps", ["2.0"]),
    ({"epochs": 1, "steps": 1}, "epochs", ["epochs is 1", "one of them"]),
    ({"checkpoint_every": 0}, "checkpoint_every", ["0"]),
    ({"workload": "digits"}, "workload", ["'digits'", "digits:Digits"]),
    ({"workload": ""}, "workload", ["''"]),
    ({"workload": None}, "workload", ["None"]),
    ({"max_failures": -1}, "max_failures", ["-1", "at least 0"]),
    ({"max_failures": "3"}, "max_failures", ["'3'"]),
    ({"max_failures": 1.5}, "max_failures", ["1.5"]),
    ({"max_failures": None}, "max_failures", ["None"]),
    ({"timeout": 0}, "timeout", ["0", "above 0"]),
    ({"timeout": -3.0}, "timeout", ["-3.0"]),
    ({"timeout": math.nan}, "timeout", ["nan"]),
    ({"timeout": math.inf}, "timeout", ["inf", "finite"]),
    ({"timeout": "60"}, "timeout", ["'60'"]),
    ({"timeout": None}, "timeout", ["None"]),
    ({"seed": "x"}, "seed", ["'x'", "whole number"]),
    ({"seed": 1.5}, "seed", ["1.5"]),
    ({"seed": None}, "seed", ["None"]),
    ({"resources": {"cpus": 1}}, "resources", ["cpus", "cpu, gpu or memory"]),
    ({"resources": {"cpu": -1}}, "resources", ["-1"]),
    ({"resources": {"cpu": "1"}}, "resources", ["'1'"]),
    ({"resources": {"gpu": None}}, "resources", ["None"]),
    ({"resources": {"cpu": math.nan}}, "resources", ["nan"]),
    ({"resources": {"cpu": math.inf}}, "resources", ["inf"]),
    ({"resources": [1]}, "resources", ["[1]"]),
    ({"resources": None}, "resources", ["None"]),
    (
        {"workers": 3, "strategy": {"name": "all_reduce", "replica": {"name": "pipeline", "stages": 2}}},
        "workers",
        ["is 3", "2 stages", "multiple of 2"],
    ),
    (
        {
            "workers": 4,
            "strategy": [
                {"epochs": 1, "strategy": {"name": "all_reduce"}},
                {"epochs": 1, "strategy": {"name": "all_reduce", "replica": {"name": "tensor_parallel", "size": 2}}},
                {"strategy": {"name": "downpour", "replica": {"name": "pipeline", "stages": 3}}},
            ],
        },
        "workers",
        ["strategy 3 of 3", "is 4", "multiple of 3"],
    ),
]


@pytest.mark.parametrize(("fields", "field", "words"), BAD, ids=str)
def test_what_can_never_run_is_refused(fields, field, words):
    with pytest.raises(ConfigError) as caught:
        JobSpec(**{"workload": "a:B", **fields}).check()
    assert caught.value.data["field"] == field
    for word in [field, *words]:
        assert word in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 3


GOOD = [
    {},
    {"workers": 100},
    {"epochs": 1},
    {"steps": 10**9},
    {"max_failures": 0},
    {"timeout": 0.5},
    {"timeout": 3},
    {"resources": {"cpu": 0.5, "gpu": 1, "memory": 10**9}},
    {"resources": {}},
    {"seed": 0},
    {"seed": 2**63},
    {"workers": 4, "strategy": {"name": "all_reduce", "replica": {"name": "pipeline", "stages": 2}}},
    {"workers": 3, "strategy": {"name": "of one's own"}},
    {"seed": -1},
    {"checkpoint_every": 1},
    {"name": "mine"},
    {"resume": "x/step-00000001"},
]


@pytest.mark.parametrize("fields", GOOD, ids=str)
def test_a_good_spec_survives_json(fields):
    spec = JobSpec(**{"workload": "a.py:B", **fields}).check()
    assert JobSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


@pytest.mark.parametrize(
    ("data", "words"),
    [({"workload": "a:B", "worker": 3}, ["'worker'", "workers"]), ({"workers": 3}, ["workload"]), ({}, ["workload"])],
)
def test_a_spec_from_data(data, words):
    with pytest.raises(ConfigError) as caught:
        JobSpec.from_dict(data)
    for word in words:
        assert word in str(caught.value)


ENDS = {Status.SUCCEEDED, Status.FAILED, Status.STOPPED}


def test_an_end_is_the_end():
    assert {status for status in Status if status.terminal} == ENDS
    for old, new in itertools.product(ENDS, Status):
        assert not may_move(old, new)


def test_every_status_can_come_to_an_end_and_none_moves_to_itself():
    assert set(MOVES) == set(Status)
    for status in set(Status) - ENDS:
        assert may_move(status, Status.FAILED)
        assert may_move(status, Status.STOPPED)
        assert not may_move(status, status)


def test_nobody_moves_back_into_the_queue_and_a_queued_job_starts_first():
    assert not any(Status.QUEUED in new for new in MOVES.values())
    assert MOVES[Status.QUEUED] == {Status.STARTING, Status.STOPPED, Status.FAILED}
    assert Status.RUNNING not in MOVES[Status.STOPPING]
    assert Status.UNKNOWN in MOVES[Status.RUNNING]  # a failed look is not a failed job
    assert Status.RUNNING in MOVES[Status.UNKNOWN]


def test_a_status_is_its_word():
    assert json.dumps({"status": Status.RUNNING}) == '{"status": "RUNNING"}'
    assert Status("STOPPED") is Status.STOPPED

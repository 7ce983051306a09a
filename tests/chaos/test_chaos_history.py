"""The checks of a job's records: each finds the violation it is for, and nothing in a history without one."""

import json
from dataclasses import replace

import pytest
import torch
from rayps_chaos.compare_results import check_slots, compare_metrics, compare_parameters, promises_bits
from rayps_chaos.faults import FaultOn, FaultRole
from rayps_chaos.history import (
    HistoryBounds,
    JobHistory,
    check_acknowledged,
    check_history,
    check_success,
    read_history,
)
from rayps_chaos.measure_recovery import InjectedFault, by_kind, costs, quantile, usual_gap, usual_round
from rayps_chaos.plan import PlannedFault
from rayps_chaos.report import make_report, pace

from rayps.strategies.job import JobSpec

BOUNDS = HistoryBounds(1000.0, 60.0, frozenset(["J"]))


def points(*runs, start=1.0, every=1.0):
    """Points of rounds, one a second; each run is (generation, first round, end)."""
    numbers = [(generation, number) for generation, low, high in runs for number in range(low, high)]
    return [
        {"kind": "round", "generation": generation, "round": number, "time": start + every * at}
        for at, (generation, number) in enumerate(numbers)
    ]


def history(found, *, status="SUCCEEDED", events=(), rounds=10, ended=30.0, outcome="SUCCEEDED"):
    written = [{"kind": kind, "time": at, "message": "", **facts} for kind, at, facts in events]
    end = [] if status is None else [{"kind": "finished", "time": ended, "message": ""}]
    record = None if outcome is None else {"status": outcome}
    return JobHistory("J", status, [*written, *end], found, record, rounds, 0.0, ended)


def failed(found):
    return {check.name for check in check_history(found, BOUNDS) if not check.good}


def test_a_whole_history_passes():
    assert failed(history(points((1, 0, 10)))) == set()


def test_a_restart_from_a_checkpoint_passes_with_its_event():
    found = points((1, 0, 7), (2, 5, 10))
    assert failed(history(found, events=[("restarted", 8.0, {})])) == set()
    assert failed(history(found)) == {"repeated with a reason"}


def test_rounds_that_a_dead_rank_did_not_report_are_written_late():
    assert failed(history(points((1, 0, 7), (1, 9, 10), (1, 7, 9)))) == set()


def test_a_driver_that_is_started_again_counts_its_generations_anew():
    found = points((2, 0, 7), (1, 5, 10))
    assert failed(history(found, events=[("driver_restarted", 8.0, {}), ("resumed", 8.5, {})])) == set()


@pytest.mark.parametrize(
    ("found", "more", "check"),
    [
        (points((1, 0, 4), (1, 5, 10)), {}, "every round"),  # round 4 was left out
        (points((1, 0, 9)), {}, "every round"),  # the last one was
        (points((1, 0, 4), (2, 6, 10)), {"events": [("restarted", 5.0, {})]}, "every round"),
        (points((1, 0, 5), (1, 4, 10)), {}, "repeated with a reason"),  # round 4 twice
        (points((1, 0, 10)), {"status": "RUNNING", "outcome": None}, "ended once"),
        (points((1, 0, 10)), {"status": "RUNNING", "outcome": None}, "the job succeeded"),
        (points((1, 0, 10)), {"status": None}, "the job succeeded"),
        (points((1, 0, 10)), {"outcome": "FAILED"}, "ended once"),
        (points((1, 0, 10)), {"events": [("finished", 11.0, {})]}, "ended once"),
        (points((1, 0, 10)), {"outcome": None}, "ended once"),
        (points((1, 0, 10)), {"ended": 200.0}, "no hang"),
        (points((1, 0, 10), every=70.0), {"ended": 701.0}, "no hang"),
        (points((1, 0, 10)), {"events": [("lost", 3.0, {"pushes": 2})]}, "no push lost"),
        (points((1, 0, 10)), {"status": None}, "no acknowledged job lost"),
    ],
)
def test_each_violation_is_found(found, more, check):
    assert check in failed(history(found, **more))


def test_a_run_that_ended_early_lacks_no_round():
    assert failed(history(points((1, 0, 6)), events=[("ended_early", 7.0, {})])) == set()


def test_a_job_that_failed_does_not_pass_and_its_reason_is_told():
    found = history(points((1, 0, 6)), status="FAILED", outcome="FAILED")
    assert failed(found) == {"the job succeeded"}
    words = check_success(replace(found, reason="worker-1 died\nthat was failure 4, and max_failures is 3")).words
    assert words == "FAILED: worker-1 died; that was failure 4, and max_failures is 3"
    assert not make_report(found, [], check_history(found, BOUNDS), seed=0, strategy="s").good
    assert failed(history(points((1, 0, 6)), status="STOPPED", outcome="STOPPED")) == set()


def test_acknowledged_jobs():
    assert check_acknowledged(["a", "b"], ["a"]).good
    found = check_acknowledged(["b"], ["a", "b"])
    assert not found.good and "1 lost: a" in found.words


def test_what_is_read_is_what_was_written(tmp_path):
    folder = tmp_path / "J"
    folder.mkdir()
    assert read_history(folder, None, [], begun=0.0, ended=1.0).points == []
    text = "\n".join(json.dumps(point) for point in points((1, 0, 3)))
    (folder / "metrics.jsonl").write_text(f'{text}\n{{"kind": "rou')  # the writer was killed
    (folder / "outcome.json").write_text('{"status": "STOPPED", "message": "by the user"}')
    (folder / "progress.json").write_text('{"rounds": 3}')
    found = read_history(folder, {"status": "STOPPED"}, [], begun=0.0, ended=1.0)
    assert found.numbers == [(1, 0), (1, 1), (1, 2)] and found.rounds == 3
    assert found.status == "STOPPED" and found.outcome == {"status": "STOPPED", "message": "by the user"}
    assert found.reason == "by the user"
    row = {"status": "STOPPED", "reason": "of the service"}
    assert read_history(folder, row, [], begun=0.0, ended=1.0).reason == "of the service"


def fault(at, kind="kill", role=FaultRole.WORKER, **more):
    return InjectedFault(PlannedFault(at, FaultOn(kind, role), 0, 0.0), at, at, "done", **more)


def test_the_recovery_ends_with_the_first_round_beyond_those_at_the_fault():
    found = [*points((1, 0, 6)), *points((2, 3, 10), start=12.0)]  # round 5 at 6 s; round 3 again at 12 s, 6 at 15 s
    whole = history(found, events=[("restarted", 10.0, {})])
    assert usual_round(whole) == 1.0 and usual_gap(whole) == 1.0
    (cost,) = costs(whole, [fault(6.5)])
    assert cost.recovery == pytest.approx(15.0 - 6.5 - 1.0)
    assert cost.repeated == 3 and cost.followed == ("restarted",)
    assert cost.lost == pytest.approx(30.0 - 6.5 - 4.0)  # until the end, with four new rounds of a second each


def test_a_fault_that_costs_nothing_and_one_after_which_nothing_follows():
    going = history(points((1, 0, 10)), status="FAILED", outcome="FAILED")
    first, last = costs(going, [fault(2.5), fault(20.0), fault(21.0, skipped="gone")])
    assert first.recovery == 0.0 and first.followed == () and last.recovery is None
    after = history(points((1, 0, 10)), ended=22.0)
    assert costs(after, [fault(20.0)])[0].recovery == pytest.approx(1.0)  # until the end of the job


def test_a_fault_after_which_only_rounds_are_repeated_has_the_time_to_the_first_of_them():
    """Rounds 0 to 9 until 10 s, then each restart repeats the first five rounds, until the job fails."""
    found = [*points((1, 0, 10)), *points((2, 0, 5), start=13.0), *points((3, 0, 5), start=23.0)]
    events = [("restarted", 12.0, {}), ("restarted", 22.0, {})]
    whole = history(found, status="FAILED", outcome="FAILED", events=events)
    rows = costs(whole, [fault(9.5), fault(19.5), fault(28.0)])
    assert [row.recovery for row in rows] == [None, None, None]
    assert rows[1].followed == ("restarted",) and rows[1].trained_again == pytest.approx(23.0 - 19.5)
    assert rows[2].trained_again is None  # nothing followed
    late = [{"kind": "round", "generation": 2, "round": 5, "time": 19.8}]  # complete before the kill, reported after it
    late = replace(whole, points=[*found[:15], *late, *found[15:]])
    assert costs(late, [fault(19.5)])[0].trained_again == pytest.approx(23.0 - 19.5)
    first = costs(late, [fault(9.5), fault(19.5)])[0]  # round 9, at 10 s, was complete before the restart at 12 s
    assert first.recovery is None and first.trained_again == pytest.approx(13.0 - 9.5)


def test_the_fault_that_ended_the_job_has_no_recovery_although_rounds_were_reported_after_it():
    found = history(points((1, 0, 10)), status="FAILED", outcome="FAILED", events=[("failed", 10.5, {})], ended=10.5)
    (cost,) = costs(found, [fault(8.5)])
    assert cost.recovery is None and cost.trained_again is None
    assert costs(history(points((1, 0, 10))), [fault(2.5)])[0].trained_again is None  # its recovery is known


def test_rounds_that_are_reported_together_have_the_usual_time_of_their_stretch():
    found = [{**point, "time": 10.0 * (point["round"] // 10 + 1)} for point in points((1, 0, 200))]
    whole = history(found, rounds=200, ended=201.0)
    assert usual_round(whole) == 1.0 and usual_gap(whole) == 10.0
    (cost,) = costs(whole, [fault(95.0)])
    assert cost.recovery == 0.0 and cost.lost == 0.0


def test_costs_by_kind():
    found = history([*points((1, 0, 6)), *points((2, 3, 10), start=12.0)])
    rows = by_kind(costs(found, [fault(0.5), fault(6.5), fault(16.2, "stop")]))
    assert [(row.kind, row.count) for row in rows] == [("kill:worker", 2), ("stop:worker", 1)]
    assert rows[0].worst == pytest.approx(7.5) and rows[0].p95 == rows[0].worst
    assert [quantile([3, 1, 2], share) for share in (0.0, 0.5, 0.95, 1.0)] == [1, 2, 3, 3]


def test_the_report_has_the_share_of_the_pace_and_survives_json():
    slow = history(points((1, 0, 10), every=2.0))
    checks = check_history(slow, BOUNDS)
    found = make_report(slow, [fault(2.5)], checks, seed=7, strategy="s", without_faults=history(points((1, 0, 10))))
    assert found.good and found.goodput == pytest.approx(0.5) and pace(slow) == pytest.approx(0.5)
    assert json.loads(json.dumps(found.to_dict()))["faults"][0]["fault"] == "kill:worker"
    assert pace(history([])) is None


def test_results_are_compared_by_what_the_strategy_promises():
    law = {"model/a": torch.tensor([1.0, 2.0]), "model/b": torch.zeros(0)}
    assert compare_parameters(law, law).good and "bits" in compare_parameters(law, law).words
    near = {**law, "model/a": torch.tensor([1.0, 2.0000005])}
    assert compare_parameters(near, law).good and "bits" not in compare_parameters(near, law).words
    assert not compare_parameters({**law, "model/a": torch.tensor([1.0, 2.1])}, law).good
    assert not compare_parameters({**law, "model/a": torch.zeros(3)}, law).good
    assert not compare_parameters({"model/a": law["model/a"]}, law).good
    assert (
        compare_metrics({"loss": 1.05}, {"loss": 1.0}).good and not compare_metrics({"loss": 1.2}, {"loss": 1.0}).good
    )
    assert not compare_metrics({}, {"loss": 1.0}).good and compare_metrics(None, None).good
    assert check_slots({"model/slots": torch.full((3,), 2.0)}, 2).good
    for wrong, word in (([2.0, 1.0], "1 have fewer"), ([2.0, 3.0], "1 have more")):
        found = check_slots({"model/slots": torch.tensor(wrong)}, 2)
        assert not found.good and word in found.words


@pytest.mark.parametrize(
    ("strategy", "bits"),
    [
        ({"name": "all_reduce"}, True),
        ({"name": "parameter_server", "staleness": 0}, True),
        ({"name": "parameter_server", "staleness": 2}, False),
        ({"name": "parameter_server", "staleness": None}, False),
        ({"name": "own.py:Strategy"}, False),
    ],
)
def test_which_strategies_promise_bits(strategy, bits):
    assert promises_bits(JobSpec("a:B", strategy)) is bits
    assert not promises_bits(JobSpec("", strategy, run="a.py:f"))

"""A job's time from its lines: totals over processes and drivers, the timeline, who waited for whom."""

import itertools
import json

import pytest

from rayps.cli.report import draw_bar, write_lines
from rayps.cli.report_page import write_page
from rayps.core.time.goodput import MOST_SLICES, ProcessTimes, TimeEvent, job_time, read_job_time
from rayps.core.time.machine_waits import MachineWaits
from rayps.core.time.member_times import MemberTimes
from rayps.core.time.time_account import PARTS
from rayps.core.time.time_report import COLOURS, report_of


def line(name, began, waits=None, delays=None, rounds=0, host="h", replaces=False, **parts):
    times = MemberTimes(parts, waits or {}, rounds=rounds, delays=delays or {})
    return ProcessTimes(name, began, sum(parts.values()), times, host, replaces).to_json()


def test_the_last_line_of_a_process_stands_for_all_before_it():
    found = job_time([line("worker-0", 10.0, start=1.0), line("worker-0", 10.0, start=1.0, compute=3.0, idle=1.0)])
    [member] = found.members
    assert member.parts == {"start": 1.0, "compute": 3.0, "idle": 1.0} and member.wall == 5.0
    assert found.goodput == pytest.approx(0.6) and found.shares == {"compute": 0.6, "start": 0.2, "idle": 0.2}


def test_the_time_between_two_processes_of_a_worker_is_recovery():
    found = job_time(
        [
            line("worker-0", 0.0, compute=10.0, rounds=5),
            line("worker-0", 14.0, start=1.0, compute=5.0, rounds=2, replaces=True),  # perhaps under another driver
        ]
    )
    [member] = found.members
    assert member.parts == {"compute": 15.0, "recovery": 4.0, "start": 1.0}
    assert member.counted == member.wall == 20.0 and (member.processes, member.times.rounds) == (2, 7)


def test_the_time_between_a_worker_that_left_and_one_that_joined_is_nobodys():
    found = job_time([line("worker-1", 0.0, compute=10.0), line("worker-1", 100.0, compute=5.0)])
    [member] = found.members
    assert member.parts == {"compute": 15.0} and member.wall == 15.0
    assert [each.begin for each in found.timeline["worker-1"]] == [0.0, 100.0]


def test_members_are_in_the_order_of_ranks_workers_first():
    found = job_time(
        [line(name, 0.0, idle=1.0) for name in ("shard-0", "worker-10", "worker-2.2", "worker-2", "worker-0")]
    )
    names = ["worker-0", "worker-2", "worker-2.2", "worker-10", "shard-0"]
    assert [each.name for each in found.members] == names
    assert [each.name for each in found.servers] == ["shard-0"]


def test_goodput_counts_workers_only():
    found = job_time([line("worker-0", 0.0, compute=1.0, idle=1.0), line("shard-0", 0.0, idle=100.0)])
    assert found.goodput == 0.5 and job_time([]).goodput is None and job_time([]).seconds == 0.0


def test_a_wait_for_servers_names_the_worker_for_whose_push_they_waited():
    found = job_time(
        [
            line("worker-0", 0.0, {"servers": 10.0}, compute=5.0, waiting=10.0),
            line("worker-1", 0.0, {"servers": 2.0}, compute=13.0, waiting=2.0),
            line("shard-0", 0.0, delays={"worker-0": {"worker-1": 7.0}}, idle=15.0),
            line("shard-1", 0.0, delays={"worker-0": {"worker-1": 8.0}}, idle=15.0),
        ]
    )
    first, second = found.workers
    assert first.times.waits == {"worker-1": 8.0}  # the servers work at the same time
    assert first.parts == {"compute": 5.0, "waiting": 8.0, "communication": 2.0}
    assert second.times.waits == {} and second.parts["communication"] == 2.0
    assert first.counted == 15.0
    [piece] = found.timeline["worker-0"]
    assert piece.parts == pytest.approx({"compute": 5.0, "waiting": 8.0, "communication": 2.0})
    assert found.timeline["worker-1"][0].parts == pytest.approx({"compute": 13.0, "waiting": 0.0, "communication": 2.0})


def test_servers_cannot_have_delayed_a_worker_for_longer_than_it_waited():
    delays = {"worker-0": {"worker-1": 30.0, "worker-2": 10.0}}
    found = job_time([line("worker-0", 0.0, {"servers": 8.0}, waiting=8.0), line("shard-0", 0.0, delays=delays)])
    assert found.workers[0].times.waits == {"worker-1": 6.0, "worker-2": 2.0}
    assert found.workers[0].parts == {"waiting": 8.0, "communication": 0.0}


def test_the_timeline_has_the_differences_between_reports():
    found = job_time(
        [
            line("worker-0", 0.0, start=2.0),
            line("worker-0", 0.0, start=2.0, compute=3.0),
            line("worker-0", 7.0, compute=1.0, replaces=True),
        ]
    )
    assert [(each.begin, each.end, each.parts) for each in found.timeline["worker-0"]] == [
        (0.0, 2.0, {"start": 2.0}),
        (2.0, 5.0, {"compute": 3.0}),
        (5.0, 7.0, {"recovery": 2.0}),
        (7.0, 8.0, {"compute": 1.0}),
    ]


@pytest.mark.parametrize("count", [5, 3 * MOST_SLICES])
def test_the_timeline_has_the_rounds_and_the_machines_waits_of_each_slice(count):
    reports = []
    for at in range(1, count + 1):
        times = MemberTimes({"compute": float(at)}, machine=MachineWaits(at / 2, at / 4, at / 8, at), rounds=3 * at)
        reports.append(ProcessTimes("worker-0", 0.0, float(at), times).to_json())
    slices = job_time(reports).timeline["worker-0"]
    each = count // len(slices)
    assert {one.rounds for one in slices} == {3 * each}
    assert {one.machine for one in slices} == {MachineWaits(each / 2, each / 4, each / 8, each)}


@pytest.mark.parametrize("count", [MOST_SLICES - 1, MOST_SLICES, MOST_SLICES + 1, 10 * MOST_SLICES])
def test_a_long_timeline_is_thinned_without_losing_time(count):
    found = job_time([line("worker-0", 0.0, compute=float(at + 1)) for at in range(count)])
    slices = found.timeline["worker-0"]
    assert len(slices) <= MOST_SLICES
    assert sum(each.parts["compute"] for each in slices) == pytest.approx(count)
    assert all(a.end == b.begin for a, b in itertools.pairwise(slices))


def test_half_a_line_of_a_killed_driver_is_left_out(tmp_path):
    path = tmp_path / "time.jsonl"
    whole = json.dumps(line("worker-0", 0.0, compute=1.0))
    path.write_text(f'{whole}\n{whole[: len(whole) // 2]}\n[1]\n{{"x": 1}}\n{whole}')
    assert read_job_time(path).members[0].parts == {"compute": 1.0}


# ---- the report


def example():
    return job_time(
        [
            line("worker-0", 100.0, {"worker-1": 6.0}, compute=4.0, waiting=6.0, rounds=10),
            line("worker-1", 100.0, compute=10.0, rounds=10, host="<b>"),
            TimeEvent(105.0, "restarted", "worker-1 <died>").to_json(),
        ]
    )


def test_the_report_in_text_has_goodput_verdict_bars_and_waits():
    text = write_lines(report_of(example(), "a"))
    assert text[0] == "goodput: 70.0% of the workers' time was useful"
    assert text[2].startswith("verdict: worker-1 on <b> holds up the others")
    assert any(each.startswith("worker-0 ################wwwwwwwwwwwwwwwwwwwwwwww") for each in text)
    assert text[-1] == "worker-0 waited for worker-1 6.0 s"
    assert write_lines(report_of(job_time([])))[0] == "goodput: no worker has reported yet"


def test_the_page_needs_nothing_from_elsewhere_and_shows_text_as_text():
    text = write_page(report_of(example(), "a <script>"))
    assert text.count("<svg") == 2 and "70.0%" in text and "worker-1 &lt;died&gt;" in text
    assert "<script" not in text and "<b>&lt;" not in text and "on <b>" not in text
    for word in ("http://", "https://", "src=", "href=", "@import", "url("):
        assert word not in text
    assert write_page(report_of(job_time([]))).startswith("<!doctype html>")


def test_each_part_has_a_colour_and_a_letter():
    assert set(COLOURS) == set(PARTS) and len(set(COLOURS.values())) == len(PARTS)
    letters = {draw_bar({part: 1.0})[0] for part in PARTS}
    assert len(letters) == len(PARTS)


def test_a_bar_has_its_width_whatever_the_shares():
    for shares in ({}, {"compute": 1.0}, dict.fromkeys(PARTS, 0.1), {"compute": 0.999, "data": 0.001}):
        assert len(draw_bar(shares)) == 40

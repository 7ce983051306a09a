"""The verdict on a job's time: for each thing that can be slow, its name, the worker, and what to change."""

import itertools

import pytest

from rayps.core.time.goodput import JobTime, MemberTotals, ProcessTimes, TimeEvent, TimeSlice, job_time
from rayps.core.time.machine_waits import MachineWaits
from rayps.core.time.member_times import LineFacts, MemberTimes
from rayps.core.time.time_together import find_common_spans
from rayps.core.time.time_verdict import FAILED, TimeVerdict, find_slow_ends, rates_of, reach_verdict

MB = 1e6


def member(name, machine=None, lines=None, rounds=100, waits=None, host="", **parts):
    times = MemberTimes(parts, waits or {}, machine or MachineWaits(), lines or {}, rounds)
    kind = "worker" if name.startswith("worker-") else "server"
    return MemberTotals(name, kind, host, 0.0, sum(parts.values()), times)


def job(*members):
    return JobTime(members)


def line(rate, busy=2.0):
    return LineFacts(int(rate * busy), busy)


SLOWER = {  # what the slow worker does longer than the others, 40 s in 100 rounds: the verdict
    "cpu": ({"compute": 50.0}, MachineWaits(cpu=10.0, cpu_wait=38.0)),
    "code": ({"compute": 50.0}, MachineWaits(cpu=48.0, cpu_wait=1.0)),
    "blocked": ({"compute": 50.0}, MachineWaits(cpu=10.0, cpu_wait=4.0)),
    "disk": ({"compute": 10.0, "data": 40.0}, MachineWaits(cpu=10.0, disk=35.0)),
    "data": ({"compute": 10.0, "data": 40.0}, MachineWaits(cpu=10.0, disk=2.0)),
    "exchange": ({"compute": 10.0, "communication": 40.0}, MachineWaits(cpu=10.0)),
}


@pytest.mark.parametrize("part", ["waiting", "idle"])
@pytest.mark.parametrize("workers", [2, 3, 5])
@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("cause", SLOWER)
def test_one_slow_worker_is_named_with_its_reason(cause, slow, workers, part):
    parts, machine = SLOWER[cause]
    usual = MachineWaits(cpu=10.0)
    members = [
        member(f"worker-{rank}", machine, **parts)
        if rank == slow
        else member(f"worker-{rank}", usual, compute=10.0, **{part: 40.0})
        for rank in range(workers)
    ]
    found = reach_verdict(job(*members))
    assert (found.cause, found.guilty) == (cause, (f"worker-{slow}",))
    assert f"worker-{slow} holds up the others" in found.summary
    assert f"worker-{slow}" in found.findings[0].advice
    assert found.findings[0].cost == pytest.approx(0.8)
    assert any("needs 500 ms of its own for a round" in each for each in found.findings[0].evidence)


@pytest.mark.parametrize("rounds", [50, 200])
def test_a_worker_is_compared_by_its_seconds_for_a_round(rounds):
    """Asynchronous workers do different numbers of rounds in the same time."""
    slow = member("worker-1", MachineWaits(cpu=10.0), rounds=rounds // 5, compute=50.0)
    found = reach_verdict(job(member("worker-0", MachineWaits(cpu=10.0), rounds=rounds, compute=10.0, idle=40.0), slow))
    assert found.guilty == ("worker-1",)


def test_alike_workers_are_not_blamed():
    found = reach_verdict(job(*(member(f"worker-{rank}", compute=98.0, waiting=2.0) for rank in range(3))))
    assert found == TimeVerdict((), pytest.approx(0.98)) and found.cause == "none" and found.guilty == ()
    assert found.summary == "98% of the workers' time was useful, and no cause costs more than 5%"


def test_without_a_report_there_is_no_verdict():
    assert reach_verdict(JobTime()).summary == "no worker has reported its time yet"
    assert reach_verdict(job(member("worker-0", start=0.0))).cause == "none"


ALL = {  # what all workers do in 40 of 100 seconds: the verdict
    "data": ({"data": 40.0}, MachineWaits(disk=3.0)),
    "disk": ({"data": 40.0}, MachineWaits(disk=30.0)),
    "exchange": ({"waiting": 20.0, "communication": 20.0}, MachineWaits()),
    "evaluation": ({"evaluation": 40.0}, MachineWaits()),
    "checkpoint": ({"checkpoint": 40.0}, MachineWaits()),
    "recovery": ({"recovery": 25.0, "again": 15.0}, MachineWaits()),
    "idle": ({"idle": 40.0}, MachineWaits()),
}


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("cause", ALL)
def test_what_all_workers_lose_is_named_without_a_worker(cause, workers):
    parts, machine = ALL[cause]
    found = reach_verdict(job(*(member(f"worker-{rank}", machine, compute=60.0, **parts) for rank in range(workers))))
    assert (found.cause, found.guilty) == (cause, ())
    assert found.findings[0].cost == pytest.approx(0.4)
    assert found.findings[0].advice


def test_waits_for_real_clients_are_no_exchange():
    found = reach_verdict(job(member("worker-0", start=5.0, compute=20.0, waiting=80.0, waits={"clients": 80.0})))
    assert [(each.cause, each.cost) for each in found.findings] == [("clients", pytest.approx(0.8))]
    assert found.guilty == () and "waits for clients" in found.summary and "rayps joined" in found.findings[0].advice
    both = member("worker-0", compute=40.0, waiting=50.0, communication=10.0, waits={"clients": 30.0, "worker-1": 20.0})
    assert {each.cause: round(each.cost, 6) for each in reach_verdict(job(both)).findings} == {
        "clients": 0.3,
        "exchange": 0.3,
    }


def test_a_host_with_too_few_cpus_is_named():
    members = [member(f"worker-{rank}", MachineWaits(cpu=60.0, cpu_wait=30.0), compute=100.0) for rank in range(2)]
    found = reach_verdict(job(*members))
    assert found.cause == "cpu" and "reserve more CPUs" in found.findings[0].advice


def test_busy_servers_are_named():
    workers = [member(f"worker-{rank}", compute=50.0, communication=50.0) for rank in range(2)]
    idle = member("shard-0", rounds=0, compute=10.0, idle=90.0)
    busy = member("shard-1", rounds=0, compute=70.0, communication=20.0, idle=10.0)
    found = reach_verdict(job(*workers, idle, busy))
    assert (found.cause, found.guilty) == ("servers", ("shard-1",)) and "shards=" in found.findings[0].advice


def test_the_start_is_named_last_and_only_if_it_is_most_of_the_time():
    def work(start):
        return reach_verdict(job(*(member(f"worker-{rank}", start=start, compute=8.0, data=2.0) for rank in range(2))))

    assert [each.cause for each in work(90.0).findings] == ["data", "start"]
    assert [each.cause for each in work(5.0).findings] == ["data"]
    assert work(90.0).findings[0].cost == pytest.approx(0.2)  # of the time after the start


def with_straggler(cost, **more):
    """Two workers of 100 s, of which worker-1 holds up worker-0 in `cost` seconds, and both lose `more`."""
    left = 100.0 - cost - sum(more.values())
    return reach_verdict(
        job(
            member("worker-0", MachineWaits(cpu=left), compute=left, waiting=cost, **more),
            member("worker-1", MachineWaits(cpu=left), compute=left + cost, **more),
        )
    )


@pytest.mark.parametrize(
    ("cost", "more", "causes"),
    [
        (13.0, {}, ["blocked"]),
        (13.0, {"recovery": 20.0}, ["blocked", "recovery"]),  # more than half
        (11.0, {"recovery": 24.0}, ["recovery", "blocked"]),  # less than half
        (9.0, {"recovery": 10.0}, ["recovery", "blocked"]),  # less than `NAMED_COST`
        (13.0, {"recovery": 50.0, "idle": 20.0}, ["recovery", "blocked", "idle"]),
    ],
)
def test_a_worker_that_can_be_named_comes_before_a_cost_of_at_most_twice_its_own(cost, more, causes):
    found = with_straggler(cost, **more)
    assert [each.cause for each in found.findings] == causes
    assert found.guilty == (("worker-1",) if causes[0] == "blocked" else ())


def test_waits_of_all_for_a_cpu_do_not_come_before_a_worker():
    waits = MachineWaits(cpu=10.0, cpu_wait=80.0)
    found = reach_verdict(
        job(member("worker-0", waits, compute=80.0, waiting=20.0), member("worker-1", waits, compute=100.0))
    )
    assert [(each.cause, each.guilty) for each in found.findings] == [("blocked", ("worker-1",)), ("cpu", ())]
    assert found.findings[1].cost > 2 * found.findings[0].cost


def test_the_largest_cost_comes_first():
    for costs in itertools.permutations((30.0, 20.0, 10.0)):
        parts = dict(zip(("data", "evaluation", "checkpoint"), costs, strict=True))
        found = reach_verdict(job(member("worker-0", compute=40.0, **parts)))
        assert [each.cause for each in found.findings] == sorted(parts, key=lambda part: -parts[part])


# ---- lines


def ring(ranks, slow, rate=100 * MB, low=5 * MB):
    """The lines of a ring in which a rank sends to the next, `slow(a, b)` those with the low rate."""
    pairs = [(f"worker-{a}", f"worker-{(a + 1) % ranks}") for a in range(ranks)]
    return {pair: line(low if slow(*pair) else rate) for pair in pairs}


def mesh(ranks, slow, rate=100 * MB, low=5 * MB):
    pairs = [(f"worker-{a}", f"worker-{b}") for a in range(ranks) for b in range(ranks) if a != b]
    return {pair: line(low if slow(*pair) else rate) for pair in pairs}


@pytest.mark.parametrize("shape", [ring, mesh])
@pytest.mark.parametrize("ranks", [3, 4, 6])
def test_the_host_on_a_slow_line_is_named(shape, ranks):
    for rank in range(ranks):
        name = f"worker-{rank}"
        assert find_slow_ends(shape(ranks, lambda a, b, name=name: name in (a, b))) == (name,)


@pytest.mark.parametrize("shape", [ring, mesh])
def test_one_slow_line_is_named_by_its_two_ends(shape):
    lines = shape(4, lambda a, b: (a, b) == ("worker-2", "worker-3"))
    assert find_slow_ends(lines) == ("worker-2", "worker-3")


@pytest.mark.parametrize("shape", [ring, mesh])
def test_lines_that_are_alike_name_nobody(shape):
    assert find_slow_ends(shape(4, lambda a, b: False)) == ()
    assert find_slow_ends(shape(4, lambda a, b: True)) == ()


def test_with_two_members_the_line_between_them_is_named():
    assert find_slow_ends(mesh(2, lambda a, b: False)) == ("worker-0", "worker-1")


def test_a_worker_far_from_the_servers_is_named():
    lines = {}
    for rank in range(3):
        for shard in range(2):
            rate = line(5 * MB if rank == 2 else 100 * MB)
            lines |= {(f"worker-{rank}", f"shard-{shard}"): rate, (f"shard-{shard}", f"worker-{rank}"): rate}
    assert find_slow_ends(lines) == ("worker-2",)


def test_a_line_with_little_traffic_has_no_rate():
    lines = {("a", "b"): LineFacts(100, 5.0), ("b", "a"): LineFacts(1 << 20, 0.001), ("b", "c"): line(10 * MB)}
    assert rates_of(lines) == {("b", "c"): 10 * MB}


def test_a_slow_network_is_told_from_slow_workers():
    lines = ring(3, lambda a, b: "worker-1" in (a, b))
    members = [
        member(
            f"worker-{rank}",
            lines={b: found for (a, b), found in lines.items() if a == f"worker-{rank}"},
            compute=2.0,
            waiting=3.0,
        )
        for rank in range(3)
    ]
    found = reach_verdict(job(*members))
    assert (found.cause, found.guilty) == ("network", ("worker-1",))
    assert found.summary == "the network line of worker-1 is slow: every line to and from it is"
    assert any("worker-0 sends to worker-1 at 5 MB/s" in each for each in found.findings[0].evidence)


def test_a_network_that_limits_all_alike_names_nobody():
    lines = ring(3, lambda a, b: False)
    members = [
        member(
            f"worker-{rank}",
            lines={b: found for (a, b), found in lines.items() if a == f"worker-{rank}"},
            compute=2.0,
            waiting=3.0,
        )
        for rank in range(3)
    ]
    found = reach_verdict(job(*members))
    assert (found.cause, found.guilty) == ("network", ()) and "all lines alike" in found.summary


# ---- one worker that communicates longer


def communicating(hosts, lines):
    """Three workers, of which worker-1 communicates for 40 of 50 s in 100 rounds. `lines`: between any two members."""
    names = [f"worker-{rank}" for rank in range(3)]
    own = {name: {b: found for (a, b), found in lines.items() if a == name} for name in names}
    slow = {"compute": 10.0, "communication": 40.0}
    return reach_verdict(
        job(
            *(
                member(name, lines=own[name], host=host, **(slow if rank == 1 else {"compute": 10.0, "waiting": 40.0}))
                for rank, (name, host) in enumerate(zip(names, hosts, strict=True))
            )
        )
    )


ALIKE = {pair: line(100 * MB, 2.0) for pair in ring(3, lambda a, b: False)}
BUSY = {pair: line(100 * MB, 30.0) for pair in ring(3, lambda a, b: False)}
SLOW = ring(3, lambda a, b: "worker-1" in (a, b))


@pytest.mark.parametrize(
    ("hosts", "lines", "cause"),
    [
        ("aaa", {}, "exchange"),
        ("aba", {}, "exchange"),
        ("aaa", ALIKE, "exchange"),
        ("aba", ALIKE, "exchange"),
        ("aaa", BUSY, "exchange"),  # of one host: processes without a CPU read late
        ("aba", BUSY, "network"),
        ("abb", BUSY, "exchange"),  # worker-2 is on the same host
        ("aaa", SLOW, "network"),
        ("abc", SLOW, "network"),
    ],
)
def test_a_network_line_is_blamed_only_if_it_is_measured(hosts, lines, cause):
    found = communicating(hosts, lines)
    assert (found.cause, found.guilty) == (cause, ("worker-1",))
    [finding] = [each for each in found.findings if each.guilty == ("worker-1",)]
    assert ("its network line is slow" in finding.summary) == (cause == "network")
    assert any("per round, it spends 400 ms more in communication" in each for each in finding.evidence)
    assert any("network connections are not known" in each for each in finding.evidence) == (not lines)
    assert any("data is under way for" in each for each in finding.evidence) == bool(lines)
    assert "worker-1" in finding.advice


# ---- workers that join and leave


def reports(name, began, *seconds, start=0.0, replaces=False):
    """Return the lines of a process that reports after each second: (rounds, parts) of this second."""
    found, total, rounds, parts = [], start, 0, {"start": start}
    for more, spent in seconds:
        total, rounds = total + sum(spent.values()), rounds + more
        parts = {part: parts.get(part, 0.0) + spent.get(part, 0.0) for part in {**parts, **spent}}
        times = MemberTimes(dict(parts), rounds=rounds)
        found.append(ProcessTimes(name, began, total, times, "vm", replaces).to_json())
    return found


def resized(at, lost=False):
    return TimeEvent(at, "resized", "the job has other workers", lost).to_json()


ALONE = (1, {"compute": 0.95, "waiting": 0.05})  # all rows of a round in each second
SHARED = (3, {"compute": 0.85, "waiting": 0.15})  # a third of them
SLOWED = (3, {"compute": 1.0})
HELD = (3, {"compute": 0.3, "waiting": 0.7})


def test_a_worker_that_was_alone_for_a_while_is_not_slower():
    rest = [(3, {"compute": 0.8, "waiting": 0.2})] * 30
    lines = [*reports("worker-0", 0.0, *[ALONE] * 90, *[SHARED] * 30), resized(90.0)]
    lines += reports("worker-1", 80.0, *rest, start=10.0) + reports("worker-2", 80.0, *rest, start=10.0)
    assert not any(each.guilty for each in reach_verdict(job_time(lines)).findings)
    # the totals alone would name it: the event says that the workers have changed
    unchanged = reach_verdict(job_time([each for each in lines if "event" not in each]))
    assert ("worker-0",) in [each.guilty for each in unchanged.findings]


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_a_slow_worker_of_an_elastic_job_is_found_while_it_is_with_others(slow):
    seconds = [[SLOWED if rank == slow else HELD] * 30 for rank in range(3)]
    lines = [*reports("worker-0", 0.0, *[ALONE] * 30, *seconds[0]), resized(30.0)]
    lines += [each for rank in (1, 2) for each in reports(f"worker-{rank}", 20.0, *seconds[rank], start=10.0)]
    found = reach_verdict(job_time(lines))
    assert found.guilty == (f"worker-{slow}",)
    assert found.findings[0].cost == pytest.approx(0.7 * 90 / 120, rel=0.01)
    assert any("measured in 75% of the workers' time" in each for each in found.findings[0].evidence)


def test_the_costs_of_a_slow_worker_before_and_after_a_change_add_up():
    lines = [*reports("worker-0", 0.0, *[HELD] * 80), *reports("worker-1", 0.0, *[SLOWED] * 80), resized(40.0)]
    lines += reports("worker-2", 30.0, *[HELD] * 40, start=10.0)
    found = reach_verdict(job_time(lines))
    assert found.guilty == ("worker-1",) and found.findings[0].cost == pytest.approx(0.7, rel=0.01)


def test_a_worker_that_left_is_not_compared_with_those_that_had_more_rows_later():
    lines = [*reports("worker-0", 0.0, *[SHARED] * 20, *[ALONE] * 40), resized(20.0)]
    lines += [each for rank in (1, 2) for each in reports(f"worker-{rank}", 0.0, *[SHARED] * 20)]
    assert not any(each.guilty for each in reach_verdict(job_time(lines)).findings)


@pytest.mark.parametrize("changed", [False, True])
def test_a_slow_worker_whose_process_was_replaced_is_found(changed):
    lines = [*reports("worker-0", 0.0, *[HELD] * 45), *reports("worker-1", 0.0, *[SLOWED] * 20)]
    lines += reports("worker-1", 25.0, *[SLOWED] * 20, replaces=True)
    found = reach_verdict(job_time([*lines, resized(25.0)] if changed else lines))
    assert found.guilty == ("worker-1",)


def test_the_spans_of_a_job_have_each_slice_at_most_once():
    lines = [*reports("worker-0", 0.0, *[HELD] * 50), resized(20.0)]
    lines += reports("worker-1", 0.0, *[HELD] * 20) + reports("worker-1", 30.0, *[HELD] * 20)
    lines += reports("worker-2", 10.3, *[HELD] * 30)
    time = job_time(lines)
    spans = find_common_spans(time)
    assert [[each.name for each in span.workers] for span in spans] == [
        ["worker-0", "worker-1"],
        ["worker-0", "worker-1", "worker-2"],
        ["worker-0", "worker-2"],
        ["worker-0", "worker-1", "worker-2"],
        ["worker-0", "worker-1"],
    ]
    for worker in time.workers:
        rounds = sum(each.times.rounds for span in spans for each in span.workers if each.name == worker.name)
        assert worker.times.rounds - 6 * 3 < rounds <= worker.times.rounds  # a slice at each edge may be left out
    assert sum(span.share for span in spans) <= 1


PLANNED = [("resized", False)]


@pytest.mark.parametrize(
    ("events", "planned"),
    [
        (PLANNED, True),
        ([*PLANNED, ("notice", False), ("checkpoint", False)], True),
        ([], False),
        ([("resized", True)], False),
        ([*PLANNED, ("resized", True)], False),
        *([([*PLANNED, (kind, False)], False) for kind in sorted(FAILED)]),
    ],
)
def test_planned_changes_of_the_workers_are_told_from_failures(events, planned):
    members = tuple(member(f"worker-{rank}", compute=12.0, recovery=88.0) for rank in range(2))
    slices = {each.name: (TimeSlice(0.0, 100.0, each.parts, 100),) for each in members}
    found = reach_verdict(JobTime(members, slices, tuple(TimeEvent(5.0, kind, "", lost) for kind, lost in events)))
    assert found.cause == "recovery" and found.findings[0].cost == pytest.approx(0.88)
    assert ("changes of the number of workers" in found.summary) == planned
    assert ("failures" in found.summary) != planned
    assert ("rayps serve --warm" in found.findings[0].advice) == planned

"""The verdict on a job's time: for each thing that can be slow, its name, the worker, and what to change."""

import itertools

import pytest

from rayps.core.goodput import JobTime, MemberTotals
from rayps.core.machine_waits import MachineWaits
from rayps.core.member_times import LineFacts, MemberTimes
from rayps.core.time_verdict import TimeVerdict, rates_of, slow_ends, verdict

MB = 1e6


def member(name, machine=None, lines=None, rounds=100, waits=None, **parts):
    times = MemberTimes(parts, waits or {}, machine or MachineWaits(), lines or {}, rounds)
    kind = "worker" if name.startswith("worker-") else "server"
    return MemberTotals(name, kind, "", 0.0, sum(parts.values()), times)


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
    "network": ({"compute": 10.0, "communication": 40.0}, MachineWaits(cpu=10.0)),
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
    found = verdict(job(*members))
    assert (found.cause, found.guilty) == (cause, (f"worker-{slow}",))
    assert f"worker-{slow} holds up the others" in found.summary
    assert f"worker-{slow}" in found.findings[0].advice
    assert found.findings[0].cost == pytest.approx(0.8)
    assert any("needs 500 ms of its own for a round" in each for each in found.findings[0].evidence)


@pytest.mark.parametrize("rounds", [50, 200])
def test_a_worker_is_compared_by_its_seconds_for_a_round(rounds):
    """Asynchronous workers do different numbers of rounds in the same time."""
    slow = member("worker-1", MachineWaits(cpu=10.0), rounds=rounds // 5, compute=50.0)
    found = verdict(job(member("worker-0", MachineWaits(cpu=10.0), rounds=rounds, compute=10.0, idle=40.0), slow))
    assert found.guilty == ("worker-1",)


def test_alike_workers_are_not_blamed():
    found = verdict(job(*(member(f"worker-{rank}", compute=98.0, waiting=2.0) for rank in range(3))))
    assert found == TimeVerdict((), pytest.approx(0.98)) and found.cause == "none" and found.guilty == ()
    assert found.summary == "98% of the workers' time was useful, and no cause costs more than 5%"


def test_without_a_report_there_is_no_verdict():
    assert verdict(JobTime()).summary == "no worker has reported its time yet"
    assert verdict(job(member("worker-0", start=0.0))).cause == "none"


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
    found = verdict(job(*(member(f"worker-{rank}", machine, compute=60.0, **parts) for rank in range(workers))))
    assert (found.cause, found.guilty) == (cause, ())
    assert found.findings[0].cost == pytest.approx(0.4)
    assert found.findings[0].advice


def test_a_host_with_too_few_cpus_is_named():
    members = [member(f"worker-{rank}", MachineWaits(cpu=60.0, cpu_wait=30.0), compute=100.0) for rank in range(2)]
    found = verdict(job(*members))
    assert found.cause == "cpu" and "reserve more CPUs" in found.findings[0].advice


def test_busy_servers_are_named():
    workers = [member(f"worker-{rank}", compute=50.0, communication=50.0) for rank in range(2)]
    idle = member("shard-0", rounds=0, compute=10.0, idle=90.0)
    busy = member("shard-1", rounds=0, compute=70.0, communication=20.0, idle=10.0)
    found = verdict(job(*workers, idle, busy))
    assert (found.cause, found.guilty) == ("servers", ("shard-1",)) and "shards=" in found.findings[0].advice


def test_the_start_is_named_last_and_only_if_it_is_most_of_the_time():
    def work(start):
        return verdict(job(*(member(f"worker-{rank}", start=start, compute=8.0, data=2.0) for rank in range(2))))

    assert [each.cause for each in work(90.0).findings] == ["data", "start"]
    assert [each.cause for each in work(5.0).findings] == ["data"]
    assert work(90.0).findings[0].cost == pytest.approx(0.2)  # of the time after the start


def test_the_largest_cost_comes_first():
    for costs in itertools.permutations((30.0, 20.0, 10.0)):
        parts = dict(zip(("data", "evaluation", "checkpoint"), costs, strict=True))
        found = verdict(job(member("worker-0", compute=40.0, **parts)))
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
        assert slow_ends(shape(ranks, lambda a, b, name=name: name in (a, b))) == (name,)


@pytest.mark.parametrize("shape", [ring, mesh])
def test_one_slow_line_is_named_by_its_two_ends(shape):
    lines = shape(4, lambda a, b: (a, b) == ("worker-2", "worker-3"))
    assert slow_ends(lines) == ("worker-2", "worker-3")


@pytest.mark.parametrize("shape", [ring, mesh])
def test_lines_that_are_alike_name_nobody(shape):
    assert slow_ends(shape(4, lambda a, b: False)) == ()
    assert slow_ends(shape(4, lambda a, b: True)) == ()


def test_with_two_members_the_line_between_them_is_named():
    assert slow_ends(mesh(2, lambda a, b: False)) == ("worker-0", "worker-1")


def test_a_worker_far_from_the_servers_is_named():
    lines = {}
    for rank in range(3):
        for shard in range(2):
            rate = line(5 * MB if rank == 2 else 100 * MB)
            lines |= {(f"worker-{rank}", f"shard-{shard}"): rate, (f"shard-{shard}", f"worker-{rank}"): rate}
    assert slow_ends(lines) == ("worker-2",)


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
    found = verdict(job(*members))
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
    found = verdict(job(*members))
    assert (found.cause, found.guilty) == ("network", ()) and "all lines alike" in found.summary

"""The account of time: whatever the calls, each second is in one part, and the parts add up to the wall time."""

import threading
from random import Random

import pytest

from rayps.core.time.machine_waits import MachineWaits, ThreadWaits
from rayps.core.time.member_times import LineFacts, MemberTimes, read_member_times
from rayps.core.time.time_account import CONTAINERS, PARTS, LoopAccount, TimeAccount, name_waits


class Watch:
    """A clock that a test moves."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def parts_of(account):
    return MemberTimes.of(account.seconds()).parts


def test_the_time_is_in_the_part_that_was_entered_last():
    watch = Watch()
    account = TimeAccount(clock=watch)
    for part, seconds in (("data", 2), ("compute", 3), ("data", 4), ("idle", 5)):
        watch.now += 1
        account.enter(part)
        watch.now += seconds - 1
    assert parts_of(account) == {"start": 1, "data": 2 + 4, "compute": 3, "idle": 4}


def test_inside_a_round_the_innermost_span_counts():
    watch = Watch()
    account = TimeAccount("compute", clock=watch)
    with account.span("communication"):
        watch.now += 1
        with account.span("waiting", "worker-2"):
            watch.now += 5
        watch.now += 1
    watch.now += 3
    found = account.seconds()
    assert found == {("compute", ""): 3, ("communication", ""): 2, ("waiting", "worker-2"): 5}


@pytest.mark.parametrize("outer", sorted(CONTAINERS))
@pytest.mark.parametrize("inner", PARTS)
def test_a_container_holds_all_that_happens_in_it(outer, inner):
    watch = Watch()
    account = TimeAccount("compute", clock=watch)
    with account.span(outer):
        watch.now += 1
        with account.span(inner, "worker-1"):
            watch.now += 5
    assert account.seconds().get((outer, ""), 0) == 6


def test_a_repeated_round_is_work_done_again_as_a_whole():
    watch = Watch()
    account = TimeAccount(clock=watch)
    account.enter("again")
    with account.span("evaluation"):
        watch.now += 2
    watch.now += 3
    account.divide({"waiting": 1.0, "data": 1.0})
    assert parts_of(account) == {"again": 5, "start": 0}


def test_measured_seconds_are_taken_from_the_round_in_order_and_never_more_than_there_are():
    watch = Watch()
    account = TimeAccount(clock=watch)
    account.enter("compute")
    watch.now += 10
    account.divide({"communication": 4.0, "waiting": 5.0, "data": 3.0})
    assert parts_of(account) == {"start": 0, "compute": 0, "data": 3, "waiting": 5, "communication": 2}
    account.divide({"waiting": 5.0})  # of this round nothing is left
    assert parts_of(account)["waiting"] == 5


def test_time_in_spans_is_not_divided_a_second_time():
    watch = Watch()
    account = TimeAccount(clock=watch)
    account.enter("compute")
    watch.now += 2
    with account.span("evaluation"):
        watch.now += 7
    account.divide({"waiting": 9.0})
    assert parts_of(account) == {"start": 0, "compute": 0, "evaluation": 7, "waiting": 2}


def test_an_unknown_part_is_refused_by_name():
    account = TimeAccount()
    with pytest.raises(ValueError, match=r"no part .sleeping.*compute, data"):
        account.enter("sleeping")
    with pytest.raises(ValueError, match="no part 'sleeping'"), account.span("sleeping"):
        pass


def test_a_thread_of_an_earlier_generation_writes_nothing():
    watch = Watch()
    account = TimeAccount(clock=watch)
    old = account.turn()
    old.enter("compute")
    new = account.turn()
    new.enter("data")
    with old.span("evaluation"):
        watch.now += 1
    old.enter("idle")
    old.divide({"waiting": 1.0})
    watch.now += 1
    assert parts_of(account) == {"start": 0, "compute": 0, "data": 2}
    with new.span("evaluation"):
        watch.now += 1
    new.divide({"waiting": 0.5})
    assert parts_of(account)["evaluation"] == 1 and parts_of(account)["waiting"] == 0.5


def test_a_start_that_turns_out_to_be_a_recovery_is_renamed():
    watch = Watch()
    account = TimeAccount(clock=watch)
    watch.now += 3
    account.rename("start", "recovery")
    account.enter("recovery")
    watch.now += 1
    assert parts_of(account) == {"recovery": 4, "start": 0}


def any_shares(random):
    return {part: random.uniform(-1, 10) for part in random.sample(PARTS, random.randrange(4))}


def test_whatever_the_calls_the_parts_add_up_to_the_wall_time():
    for seed in range(300):
        random, watch = Random(seed), Watch()
        account, spans = TimeAccount(clock=watch), []
        for _ in range(random.randrange(30)):
            watch.now += random.choice([0.0, random.uniform(0, 5)])
            move, part = random.choice(["enter", "open", "close", "divide", "rename", "read"]), random.choice(PARTS)
            if move == "enter":
                account.enter(part, "worker-1")
            elif move == "open":
                spans.append(account.span(part))
                spans[-1].__enter__()
            elif move == "close" and spans:
                spans.pop(random.randrange(len(spans))).__exit__(None, None, None)
            elif move == "divide":
                account.divide(any_shares(random))
            elif move == "rename":
                account.rename(part, "recovery")
            found = account.seconds()
            assert sum(found.values()) == pytest.approx(watch.now - 100.0, abs=1e-9), seed
            assert all(value >= -1e-9 for value in found.values()), seed


def test_the_account_of_a_loop_is_that_of_its_slow_twin():
    for seed in range(50):
        random, watch = Random(seed), Watch()
        loop, twin = LoopAccount(watch), TimeAccount(clock=watch)
        for _ in range(20):
            watch.now += random.uniform(0, 5)
            part = random.choice(PARTS)
            loop.enter(part)
            twin.enter(part)
        watch.now += 1
        assert loop.seconds() == pytest.approx({place: value for place, value in twin.seconds().items() if value})


def test_spans_of_two_threads_end_in_any_order():
    watch = Watch()
    account = TimeAccount("idle", clock=watch)
    first, second = account.span("evaluation"), account.span("checkpoint")
    first.__enter__()
    ended = threading.Thread(target=second.__enter__)
    ended.start()
    ended.join()
    watch.now += 1
    first.__exit__(None, None, None)
    watch.now += 2
    second.__exit__(None, None, None)
    watch.now += 4
    assert parts_of(account) == {"idle": 4, "evaluation": 1, "checkpoint": 2}


def test_waits_without_a_name_are_divided_as_the_measured_waits():
    seconds = {("waiting", ""): 6.0, ("waiting", "driver"): 1.0, ("compute", ""): 3.0}
    found = name_waits(seconds, {"worker-1": 8.0, "worker-2": 4.0, "worker-3": 0.0})
    assert found == {
        ("waiting", "driver"): 1.0,
        ("waiting", "worker-1"): 4.0,
        ("waiting", "worker-2"): 2.0,
        ("compute", ""): 3.0,
    }
    assert name_waits(seconds, {}) == seconds


# ---- the report


def test_a_report_survives_json():
    report = MemberTimes(
        {"compute": 1.5, "waiting": 2.0},
        {"worker-1": 2.0},
        MachineWaits(1.0, 0.5, 0.25, 4096, False),
        {"worker-1": LineFacts(1000, 0.5, 3, 0.001)},
        7,
        {"worker-0": {"worker-1": 2.0}},
    )
    assert read_member_times(report.to_json()) == report
    assert read_member_times({"parts": {"compute": "x", "data": 1.0}, "lines": None}) == MemberTimes({"data": 1.0})


def test_reports_of_two_generations_add_up():
    first = MemberTimes({"compute": 1.0}, {"a": 1.0}, MachineWaits(1.0), {"a": LineFacts(10, 1.0, 1, 0.1)}, 2)
    second = MemberTimes({"compute": 2.0, "data": 1.0}, {}, MachineWaits(2.0), {"a": LineFacts(5, 1.0, 1, 0.2)}, 3)
    assert first.plus(second) == MemberTimes(
        {"compute": 3.0, "data": 1.0}, {"a": 1.0}, MachineWaits(3.0), {"a": LineFacts(15, 2.0, 2, 0.2)}, 5
    )


# ---- the machine's waits


def write_proc(root, *, run=0, wait=0, state="R", ticks=0, read=0, counted=0):
    task = root / "self/task/7"
    task.mkdir(parents=True, exist_ok=True)
    (task / "schedstat").write_text(f"{run} {wait} 5\n")
    fields = [state, *(["0"] * 38), str(ticks), "0"]
    (task / "stat").write_text(f"7 (a (odd) name) {' '.join(fields)}\n")
    (root / "self/io").write_text(f"rchar: 1\nread_bytes: {read}\n")
    (root / "sys/kernel").mkdir(parents=True, exist_ok=True)
    (root / "sys/kernel/task_delayacct").write_text(f"{counted}\n")


def test_cpu_waits_and_bytes_are_those_since_the_first_look(tmp_path):
    write_proc(tmp_path, run=5_000_000_000, wait=1_000_000_000, read=100)
    waits = ThreadWaits(7, tmp_path, Watch())
    write_proc(tmp_path, run=7_500_000_000, wait=1_250_000_000, read=4196)
    assert waits.read() == MachineWaits(2.5, 0.25, 0.0, 4096, True)


def test_a_wait_for_a_disk_is_sampled_by_the_threads_state(tmp_path):
    watch = Watch()
    write_proc(tmp_path, state="D")
    waits = ThreadWaits(7, tmp_path, watch)
    for state in "DSDR":
        watch.now += 0.1
        write_proc(tmp_path, state=state)
        waits.read()
    assert waits.read().disk == pytest.approx(0.2) and waits.read().sampled
    watch.now += 50  # one look does not stand for a long time
    write_proc(tmp_path, state="D")
    assert waits.read().disk == pytest.approx(1.2)


def test_a_wait_for_a_disk_is_the_kernels_where_it_counts(tmp_path):
    write_proc(tmp_path, state="D", ticks=10, counted=1)
    waits = ThreadWaits(7, tmp_path, Watch())
    write_proc(tmp_path, state="D", ticks=60, counted=1)
    found = waits.read()
    assert found.disk == pytest.approx(0.5) and not found.sampled


def test_after_the_end_of_the_thread_the_last_values_stay(tmp_path):
    write_proc(tmp_path, run=0)
    waits = ThreadWaits(7, tmp_path, Watch())
    write_proc(tmp_path, run=3_000_000_000)
    last = waits.read()
    (tmp_path / "self/task/7/schedstat").unlink()
    assert waits.read() == last


def test_without_proc_nothing_is_known(tmp_path):
    assert ThreadWaits(7, tmp_path, Watch()).read() == MachineWaits()

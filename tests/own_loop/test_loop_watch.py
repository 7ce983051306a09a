"""What a loop of one's own prints is shown by rank on the caller's stderr, and a death in it names rank and step."""

import contextlib
import functools
import gc
import importlib
import inspect
import os
import re
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from process_cluster import ProcessCluster
from rayps_client.errors import ActorDied, PeerTimeout, WorkloadError
from small_work import GATES
from torch import nn

import rayps
from rayps.cli.run import run as run_command
from rayps.cluster.local import LocalCluster, until
from rayps.runtime.own_loop.activity import activity_of
from rayps.runtime.own_loop.watch import LoopWatch
from rayps.strategies.job import LOOP_TIMEOUT


@pytest.fixture
def processes():
    with contextlib.closing(ProcessCluster()) as cluster:
        yield cluster


def said(capsys, *lines):
    shown = capsys.readouterr().err.splitlines()
    for line in lines:
        assert line in shown
    return shown


def test_every_line_is_shown_once_and_by_rank(processes, capsys):
    def train_fn():
        rank = rayps.world().rank
        for number in range(300):
            print(f"line {number} of {rank}")
        print("a warning", file=sys.stderr)
        print("no end of line", end="")
        return rank

    assert rayps.run(train_fn, workers=2, cluster=processes) == [0, 1]
    shown = said(capsys)
    for rank in (0, 1):
        mine = [line for line in shown if line.startswith(f"worker-{rank}: ")]
        lines = [line for line in mine if not line.endswith("a warning")]
        expected = [f"worker-{rank}: line {number} of {rank}" for number in range(300)]
        assert lines == [*expected, f"worker-{rank}: no end of line"]
        assert len(mine) == len(lines) + 1


def test_outputs_that_arrive_while_the_driver_reads_them():
    """Each thread of a watch adds its worker's output to what the driver walks through."""

    class Told:  # a worker that has reported once
        def call(self, method, seconds):
            return self

        def result(self):
            return SimpleNamespace(steps=1, over=True)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(20):
            watch, taken = LoopWatch([Told()] * 50), []
            while len(watch.latest) < 50:
                assert all(output.steps for output in watch.latest.values())
            watch.finish(range(50), lambda taken=taken, watch=watch: taken.extend(watch.take()))
            assert sorted(rank for rank, _ in taken) == list(range(50))
    finally:
        sys.setswitchinterval(interval)


def test_what_a_failing_worker_printed_is_shown_before_its_error(processes, capsys):
    def train_fn():
        print("before the mistake")
        if rayps.world().rank == 1:
            raise ValueError("my own mistake")

    with pytest.raises(WorkloadError, match=r"(?s)my own mistake.*on worker-1, after 0 optimizer steps") as caught:
        rayps.run(train_fn, workers=2, cluster=processes)
    assert caught.value.data["rank"] == 1
    said(capsys, "worker-1: before the mistake")


def test_a_result_that_cannot_be_sent_is_the_functions_error(processes):
    def train_fn():
        return threading.Lock()

    with pytest.raises(WorkloadError, match=r"(?s)returned lock, .* be sent to the caller on worker-[01].*state_dict"):
        rayps.run(train_fn, workers=2, cluster=processes)


@pytest.mark.parametrize(
    ("strategy", "early"), [("all_reduce", 0), ("all_reduce", 1), ("parameter_server:shards=2", 0)]
)  # servers: known after the timeout
def test_workers_that_take_unequal_numbers_of_steps_are_named(strategy, early):
    def train_fn():
        rank, model = rayps.world().rank, nn.Linear(3, 1)
        model, optimizer = rayps.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
        for _ in range(2 if rank == early else 4):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).mean().backward()
            optimizer.step()

    says = (
        rf"returned on worker-{early} after 2 optimizer steps, while worker-{1 - early} was in its step 3:\n.*"
        r"optimizer.step\(\) equally often"
    )
    with pytest.raises(WorkloadError, match=says) as caught:
        rayps.run(train_fn, workers=2, cluster=LocalCluster(), timeout=15.0)
    assert caught.value.data == {"rank": early, "steps": 2}


@pytest.mark.parametrize("strategy", ["all_reduce", "all_reduce:compression=int8"])
@pytest.mark.parametrize("more", [0, 1])
def test_a_worker_that_calls_backward_once_more_in_its_last_step_is_named(strategy, more):
    def train_fn():
        rank, model = rayps.world().rank, nn.Linear(3, 1)
        model, optimizer = rayps.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
        for step in range(2):
            optimizer.zero_grad()
            for _ in range(2 if rank == more and step == 1 else 1):
                model(torch.ones(2, 3)).mean().backward()
            optimizer.step()

    says = (
        rf"returned on worker-{1 - more} after 2 .*worker-{more} had called backward in its step 2.*\n.*equally often"
    )
    with pytest.raises(WorkloadError, match=says):
        rayps.run(train_fn, workers=2, cluster=LocalCluster(), timeout=15.0)


def test_a_death_names_the_worker_and_the_way_out(processes):
    def train_fn():
        if rayps.world().rank == 1:
            os._exit(3)

    with pytest.raises(ActorDied) as caught:
        rayps.run(train_fn, workers=3, cluster=processes)
    message = str(caught.value)
    assert message.startswith("worker-1 of the run died before it reported its first optimizer step (its process")
    assert all(words in message for words in ("rayps.save", "rayps doctor", "max_failures"))
    assert caught.value.data["rank"] == 1


@pytest.mark.ray
def test_on_ray_lines_are_shown_and_a_death_names_the_step(ray_cluster, capsys, tmp_path):
    gate = tmp_path / "gate"

    def train_fn():
        rank = rayps.world().rank
        model = torch.nn.Linear(2, 1)
        _, optimizer = rayps.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(5):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            print(f"step {step} on {rank}", flush=True)
        if rank == 1:
            while not gate.exists():  # until the caller has seen the fifth line
                pass
            os._exit(3)
        optimizer.zero_grad()
        optimizer.step()

    class Gate:
        """The caller's stderr, which opens the gate once rank 1's last line is there."""

        def __init__(self, through):
            self.through, self.seen = through, ""

        def write(self, text):
            self.seen += text
            if "worker-1: step 4 on 1" in self.seen:
                gate.touch()
            return self.through.write(text)

        def __getattr__(self, name):
            return getattr(self.through, name)

    with contextlib.redirect_stderr(Gate(sys.stderr)), pytest.raises(ActorDied) as caught:
        rayps.run(train_fn, workers=2, cluster=ray_cluster, timeout=120.0)
    assert str(caught.value).startswith("worker-1 of the run died after ")
    assert caught.value.data["steps"] == 5
    said(capsys, *(f"worker-1: step {step} on 1" for step in range(5)))


def test_a_death_between_two_lines_names_the_steps(processes):
    def train_fn():
        model = nn.Linear(3, 1)
        model, optimizer = rayps.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).mean().backward()
            optimizer.step()
            time.sleep(0.5)  # longer than a step waits until it is told, and shorter than a question waits for a line
        os._exit(3)

    with pytest.raises(ActorDied, match=r"worker-0 of the run died after 3 optimizer steps") as caught:
        rayps.run(train_fn, workers=1, cluster=processes)
    assert caught.value.data["steps"] == 3


# ---- a worker that does something else while the others wait


def validate():
    importlib.import_module("small_work").GATES["validates"].wait()


def wrapped_loop(steps=3, *, more=1):
    """A loop in which rank 0 validates after its steps, and rank 1 takes `more` steps, or returns."""
    here = rayps.world()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rayps.wrap(model, optimizer)
    for step in range(steps + more):
        if here.rank == 0 and step == steps:
            validate()
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    if here.rank == 0 and not more:
        validate()


@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize("saves", [False, True])
def test_a_timeout_says_what_the_other_worker_is_doing(tmp_path, saves, more):
    GATES["validates"] = threading.Event()
    options = {"checkpoint": tmp_path, "max_failures": 0} if saves else {}
    try:
        with pytest.raises(PeerTimeout) as raised:
            loop = functools.partial(wrapped_loop, more=more)
            rayps.run(loop, workers=2, cluster=LocalCluster(), timeout=3.0, progress=False, **options)
    finally:
        GATES.pop("validates").set()
    line = validate.__code__.co_firstlineno + 1
    first, second, third = str(raised.value).splitlines()
    assert "rank 0 did not take part within 3 s" in first
    found = re.fullmatch(r"worker-0 is in validate\(\) at (.*):(\d+), (\d+) s after its optimizer step 3", second)
    assert found[1].endswith("test_loop_watch.py")
    assert int(found[2]) == line
    assert "raise timeout" in third


def test_a_worker_that_waits_in_rayps_is_not_blamed():
    gate, seen = threading.Event(), []

    def here():
        gate.wait()

    thread = threading.Thread(target=here)
    thread.start()
    seen.append(activity_of(thread.ident, 2.0))
    gate.set()
    thread.join()
    assert (seen[0].where.partition("() at ")[0], seen[0].waits, seen[0].seconds) == ("here", False, 2.0)
    assert activity_of(thread.ident, 2.0) is None
    assert activity_of(None, 2.0) is None
    lock = threading.Condition()
    with lock:
        user = threading.Thread(target=lambda: until(lambda: gate.wait(0.01) and lock.acquire(False), 30.0))
        gate.clear()
        user.start()
        found = activity_of(user.ident, 1.0)
        while not found.waits:
            found = activity_of(user.ident, 1.0)
        gate.set()
    user.join()


def test_the_default_patience_is_ten_minutes_in_every_way_to_start_a_loop():
    assert inspect.signature(rayps.run).parameters["timeout"].default == LOOP_TIMEOUT == 600.0
    assert inspect.signature(run_command).parameters["timeout"].default == LOOP_TIMEOUT


def test_no_garbage_is_collected_while_the_frames_are_listed(monkeypatch):
    """Python 3.11 could lock itself up: see `rayps.runtime.own_loop.activity`."""
    listed, enabled = sys._current_frames, []

    def frames():
        enabled.append(gc.isenabled())
        return listed()

    monkeypatch.setattr(sys, "_current_frames", frames)
    for collects in (True, False):
        (gc.enable if collects else gc.disable)()
        try:
            assert activity_of(threading.get_ident(), 1.0) is not None
            assert gc.isenabled() is collects
        finally:
            gc.enable()
    assert enabled == [False, False]

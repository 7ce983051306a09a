"""The driver on a cluster of threads: deaths, the user's mistakes, stopping, the record, and what is left."""

import gc
import importlib
import json
import math
import os
import sys
import threading
import time
import traceback
from collections import Counter
from pathlib import Path

import pytest
import torch
from rayps_client.errors import CheckpointError, ClusterError, ConfigError, DataError, TrainingError, WorkloadError
from small_work import SEEN, Small, Watched, distance, kinds, plain, train

import rayps
from rayps import AllReduce, ParameterServer
from rayps.cluster.local import PROTOCOL, LocalCluster, surrounding, until
from rayps.comm.link import Listener
from rayps.comm.ring import form_mesh
from rayps.core.job.job_status import Status
from rayps.runtime.driver.driver import Driver
from rayps.runtime.driver.driver_actor import DriverActor
from rayps.runtime.driver.workload_job import WorkloadJob
from rayps.runtime.records.journal import Journal
from rayps.service import processes
from rayps.strategies.catalogue import parse, wire
from rayps.strategies.job import JobSpec

EXACT = 1e-12
IN_STEP = [AllReduce(), ParameterServer(shards=2)]
LOOSE = [ParameterServer(shards=2, staleness=2), ParameterServer(shards=2, staleness=None)]


@pytest.fixture
def tag(request):
    SEEN.clear()
    return request.node.nodeid


def rounds(result):
    return result.history.column("round").to_pylist()


# ------------------------------------------------------------------------------------------- deaths


@pytest.mark.parametrize("strategy", IN_STEP, ids=str)
@pytest.mark.parametrize("at", [3, 40, 100])
def test_in_step_a_dead_worker_means_going_on_from_the_last_snapshot(tag, strategy, at):
    work = Small(n=60, optimizer="adam", pause=0.004, tag=tag)
    cluster = Watched()
    killer = cluster.kill_when(tag, at, ("WorkerActor", 1))
    result = train(work, strategy, cluster, workers=3, epochs=3)
    killer.join()
    law, losses, _ = plain(work, 3, epochs=3)
    assert distance(result.model(), law) < EXACT
    assert result.history.column("loss").to_pylist() == pytest.approx(losses, abs=EXACT)
    assert rounds(result) == list(range(21))
    restarted = [e for e in result.events if e["kind"] == "restarted"]
    assert [e["lost"] for e in restarted] == [["worker-1"]]
    assert "worker-1 died" in restarted[0]["message"]
    assert cluster.spawned["WorkerActor", 1] == 2
    assert cluster.spawned["WorkerActor", 0] == 1


@pytest.mark.parametrize("index", [0, 1])
def test_in_step_a_dead_shard_means_going_back_together(tag, index):
    work = Small(n=60, optimizer="momentum", pause=0.004, tag=tag)
    cluster = Watched()
    cluster.kill_when(tag, 70, ("ShardActor", index))
    result = train(work, ParameterServer(shards=2), cluster, workers=3, epochs=3)
    assert distance(result.model(), plain(work, 3, epochs=3)[0]) < EXACT
    assert rounds(result) == list(range(21))
    assert cluster.spawned["ShardActor", index] == 2


def test_several_die_at_once_and_that_is_one_failure(tag):
    work = Small(n=60, pause=0.004, tag=tag)
    cluster = Watched()
    cluster.kill_when(tag, 50, ("WorkerActor", 0), ("WorkerActor", 2))
    result = train(work, AllReduce(), cluster, workers=3, epochs=2, max_failures=2)
    assert distance(result.model(), plain(work, 3, epochs=2)[0]) < EXACT


def two_deaths(tag, cluster):
    """A job of three whose worker 0 dies; the test ends worker 2 while the next generation forms its ring."""
    work = Small(n=60, pause=0.004, tag=tag)
    cluster.kill_when(tag, 50, ("WorkerActor", 0))
    result = train(work, AllReduce(), cluster, workers=3, epochs=2, max_failures=2)
    assert kinds(result).count("restarted") <= 2
    assert distance(result.model(), plain(work, 3, epochs=2)[0]) < EXACT


class SecondDeath(Watched):
    """Ends worker 2 when worker 0 has been replaced."""

    def spawn(self, target, *args, **kwargs):
        handle = super().spawn(target, *args, **kwargs)
        if self.spawned["WorkerActor", 0] == 2 and self.spawned["WorkerActor", 2] == 1:
            threading.Thread(target=self.kill, args=(self.actors["WorkerActor", 2],), daemon=True).start()
        return handle


def test_a_worker_that_dies_while_the_next_generation_forms_its_ring_is_one_failure(tag):
    """The ranks that wait for it in that ring must not take the connections of the generation after it."""
    two_deaths(tag, SecondDeath())


def test_a_thread_that_accepts_after_its_generation_has_ended_disturbs_no_ring(tag, monkeypatch):
    """The same two deaths, in the one order of threads that was a third failure."""
    cluster, begun = Watched(), threading.Event()
    connect, begin = form_mesh.connect, Listener.begin_generation

    def held(address, *, name, generation, **options):
        link = connect(address, name=name, generation=generation, **options)
        if (name, generation) == ("worker:1", 2):
            cluster.kill(cluster.actors["WorkerActor", 2])
            assert begun.wait(60)
        return link

    def begins(listener, generation):
        begin(listener, generation)
        if (listener.name, generation) == ("worker-1", 3):
            begun.set()

    monkeypatch.setattr(form_mesh, "connect", held)
    monkeypatch.setattr(Listener, "begin_generation", begins)
    two_deaths(tag, cluster)
    assert begun.is_set()


@pytest.mark.parametrize("strategy", LOOSE, ids=str)
def test_out_of_step_a_dead_worker_is_replaced_while_the_others_go_on(tag, strategy):
    work = Small(n=120, pause=0.004, tag=tag)
    cluster = Watched()
    cluster.kill_when(tag, 40, ("WorkerActor", 1))
    result = train(work, strategy, cluster, workers=3, epochs=2)
    assert "restarted" not in kinds(result)
    replaced = [e for e in result.events if e["kind"] == "replaced"]
    assert [e["lost"] for e in replaced] == [["worker-1"]]
    assert rounds(result) == list(range(28))
    assert cluster.spawned["WorkerActor", 1] == 2
    assert cluster.spawned["ShardActor", 0] == 1
    if strategy.staleness is not None:
        assert max(result.history.column("staleness").to_pylist()) <= strategy.staleness


@pytest.mark.parametrize("strategy", LOOSE, ids=str)
@pytest.mark.parametrize("at", [30, 100])
def test_out_of_step_a_dead_shard_is_restored_while_the_workers_go_on(tag, strategy, at):
    work = Small(n=120, pause=0.004, tag=tag)
    cluster = Watched()
    cluster.kill_when(tag, at, ("ShardActor", 1))
    result = train(work, strategy, cluster, workers=3, epochs=3)
    assert "restarted" not in kinds(result)
    assert [e["lost"] for e in result.events if e["kind"] == "replaced"] == [["shard-1"]]
    assert rounds(result) == list(range(42))
    assert cluster.spawned["ShardActor", 1] == 2
    assert sum(cluster.spawned["WorkerActor", r] for r in range(3)) == 3


def test_the_last_failure_that_is_allowed_and_the_one_after(tag):
    work = Small(n=60, pause=0.004, tag=tag)
    cluster = Watched()
    cluster.kill_when(tag, 20, ("WorkerActor", 1))
    with pytest.raises(TrainingError, match="max_failures is 0") as caught:
        train(work, AllReduce(), cluster, workers=2, epochs=3, max_failures=0)
    assert "worker-1 died" in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 3
    cluster = Watched()
    cluster.kill_when(tag, SEEN[tag] + 20, ("WorkerActor", 1))
    assert train(work, AllReduce(), cluster, workers=2, epochs=3, max_failures=1)


@pytest.mark.parametrize(("before", "ends"), [(1, Status.SUCCEEDED), (2, Status.FAILED)])
def test_failures_are_counted_for_the_job_whatever_drivers_it_had(tag, before, ends):
    cluster, journal = Watched(), Journal()
    cluster.kill_when(tag, 20, ("WorkerActor", 1))
    spec = JobSpec("x:Small", {"name": "all_reduce"}, 2, epochs=3, max_failures=2)
    seen = []
    journal = Journal(on_progress=lambda progress: seen.append(progress["failures"]))
    outcome = Driver(WorkloadJob(Small(n=60, pause=0.004, tag=tag), spec, journal, capture=False, failures=before)).run(
        cluster
    )
    assert outcome.status is ends
    assert seen[0] == before
    if ends is Status.FAILED:
        assert "failure 3, and max_failures is 2" in outcome.message
    else:
        assert seen[-1] == 2


def test_a_worker_that_is_killed_again_and_again(tag):
    work = Small(n=60, pause=0.004, tag=tag)
    cluster = Watched()
    killers = [cluster.kill_when(tag, at, ("WorkerActor", 0)) for at in (10, 70, 130)]
    result = train(work, AllReduce(), cluster, workers=2, steps=60, checkpoint_every=5)
    for killer in killers:
        killer.join()
    assert distance(result.model(), plain(work, 2, steps=60)[0]) < EXACT
    assert kinds(result).count("restarted") == 3
    assert rounds(result) == list(range(60))


@pytest.mark.parametrize("strategy", [*IN_STEP, *LOOSE], ids=str)
def test_checkpoints_come_although_rounds_are_faster_than_questions(tmp_path, strategy):
    result = train(Small(n=900), strategy, workers=3, steps=1000, checkpoint_every=1, checkpoint=tmp_path)
    saved = [e["round"] for e in result.events if e["kind"] == "checkpoint"]
    assert saved[0] < 1000
    assert saved[-1] == 1000
    assert saved == sorted(saved)


class Fails(Small):
    def loss(self, model, batch):
        raise ArithmeticError("no loss")


def test_a_run_that_fails_before_its_first_checkpoint_leaves_no_folder(tmp_path):
    with pytest.raises(rayps.RaypsError, match="no loss"):
        train(Fails(), AllReduce(), workers=1, epochs=1, checkpoint=tmp_path / "runs" / "one")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("folder", ["x" * 300, "file/below"])  # a name that is too long, and a folder in a file
def test_a_checkpoint_folder_that_cannot_be_is_refused_at_the_start(tmp_path, folder):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot be written to .*\ngive a folder that can be written"):
        train(Small(), AllReduce(), workers=1, epochs=1, checkpoint=tmp_path / folder)


class Evaluates(Small):
    """Takes its time to evaluate, and counts that."""

    def evaluate(self, model, batch):
        shared = importlib.import_module("small_work")
        shared.SEEN["evaluating"] += 1
        time.sleep(0.02)
        return super().evaluate(model, batch)


@pytest.mark.parametrize("strategy", [*IN_STEP, *LOOSE], ids=str)
@pytest.mark.parametrize("at", [2, 8, 14])  # in the evaluation after the first, the second, the last of three epochs
def test_an_evaluation_that_a_death_interrupts_is_made_up(tag, strategy, at):
    work, cluster = Evaluates(n=36, pause=0.004, tag=tag), Watched()
    killer = cluster.kill_when("evaluating", at, ("WorkerActor", 1))
    result = train(work, strategy, cluster, workers=6, epochs=3, max_failures=1)
    killer.join()
    assert rounds(result) == list(range(6))
    assert {"restarted", "replaced"} & set(kinds(result))
    errors = result.history.column("evaluation_error").to_pylist()
    evaluated = [n for n, value in enumerate(errors) if value is not None]
    assert evaluated == [1, 3, 5]
    if strategy.topology.in_step:
        _, _, losses = plain(work, 6, epochs=3)
        found = result.history.column("evaluation_loss").to_pylist()
        assert [found[n] for n in evaluated] == pytest.approx(losses, abs=EXACT)


def test_a_death_in_the_last_evaluation_counts_as_a_failure(tag):
    cluster = Watched()
    cluster.kill_when("evaluating", 2, ("WorkerActor", 1))
    with pytest.raises(TrainingError, match="max_failures is 0"):
        train(Evaluates(n=36, tag=tag), AllReduce(), cluster, workers=6, epochs=1, max_failures=0)


class Silent(Small):
    """Rank 1's first loss of round 2 hangs for longer than the deadline."""

    def loss(self, model, batch):
        shared = importlib.import_module("small_work")
        if threading.current_thread().name == "worker-1" and shared.SEEN[self.tag] >= 6 and not shared.SEEN["slept"]:
            shared.SEEN["slept"] = 1
            time.sleep(3.0)
        return super().loss(model, batch)


@pytest.mark.parametrize("strategy", [*IN_STEP, LOOSE[0]], ids=str)
def test_a_silent_worker_is_named_and_replaced(tag, strategy, monkeypatch):
    monkeypatch.setattr("rayps.runtime.driver.decide_recovery.GRACE_SECONDS", 0.2)
    work = Silent(n=36, pause=0.002, tag=tag)
    cluster = Watched()
    result = train(work, strategy, cluster, workers=3, epochs=3, timeout=1.0)
    told = [e for e in result.events if e["kind"] in ("restarted", "replaced")]
    assert told
    assert any("worker-1" in e["message"] or "worker:1" in e["message"] or "rank 1" in e["message"] for e in told)
    assert rounds(result) == list(range(12))


class Slow(Small):
    """Rank 0's fifth loss takes long, whatever happens to the others meanwhile."""

    def loss(self, model, batch):
        shared = importlib.import_module("small_work")
        if threading.current_thread().name == "worker-0":
            shared.SEEN["mine"] += 1
            if shared.SEEN["mine"] == 5:
                time.sleep(1.5)
        return super().loss(model, batch)


@pytest.mark.parametrize("strategy", IN_STEP, ids=str)
def test_a_thread_that_ends_late_does_not_end_the_next_generation(tag, strategy, monkeypatch):
    monkeypatch.setattr("rayps.runtime.driver.worker_actor.JOIN_SECONDS", 0.1)
    cluster = Watched()
    cluster.kill_when("mine", 5, ("WorkerActor", 1))
    result = train(Slow(pause=0.1, n=60, tag=tag), strategy, cluster, workers=2, steps=20, max_failures=1)
    assert kinds(result).count("restarted") == 1
    assert rounds(result) == list(range(20))


# ------------------------------------------------------------------------------- the user's mistakes


class Broken(Small):
    """Fails in one of its methods, in training at round 4 on one rank."""

    def __init__(self, where, error="boom", **options):
        super().__init__(**options)
        self.where, self.error, self.calls = where, error, 0

    def fail(self):
        raise ValueError(self.error)

    def model(self):
        return self.fail() if self.where == "model" else super().model()

    def data(self):
        return self.fail() if self.where == "data" else super().data()

    def evaluation_data(self):
        return self.fail() if self.where == "evaluation_data" else super().evaluation_data()

    def evaluate(self, model, batch):
        return self.fail() if self.where == "evaluate" else super().evaluate(model, batch)

    def loss(self, model, batch):
        if self.where == "loss" and model.training and threading.current_thread().name == "worker-1":
            self.calls += 1
            if self.calls == 4:
                self.fail()
        return super().loss(model, batch)

    def optimizer(self, params):
        if self.where == "optimizer":
            self.fail()
        if self.where == "step":
            return FailsLater(params, self)
        return super().optimizer(params)


class FailsLater(torch.optim.SGD):
    def __init__(self, params, work):
        super().__init__(params, lr=0.1)
        self.work, self.steps = work, 0

    def step(self, closure=None):
        self.steps += 1
        if self.steps == 5:
            self.work.fail()
        return super().step(closure)


@pytest.mark.parametrize("strategy", [*IN_STEP, *LOOSE], ids=str)
@pytest.mark.parametrize("where", ["model", "loss", "data", "evaluation_data", "optimizer", "step", "evaluate"])
def test_the_users_exception_ends_the_run_with_its_place(where, strategy):
    with pytest.raises(WorkloadError) as caught:  # before any deadline
        train(Broken(where), strategy, workers=2, epochs=2, timeout=600.0)
    message = str(caught.value)
    assert {"step": "optimizer"}.get(where, where) in message
    assert "boom" in message
    assert f"{Path(__file__).name}:" in message
    assert len(message.splitlines()) <= 3


@pytest.mark.parametrize("strategy", [*IN_STEP, *LOOSE], ids=str)
def test_the_users_exception_is_not_tried_again(strategy):
    journal = Journal()
    spec = JobSpec("x:Broken", wire(parse(strategy)), 2, epochs=2)
    outcome = Driver(WorkloadJob(Broken("loss"), spec, journal, capture=False)).run(LocalCluster())
    assert outcome.status is Status.FAILED
    assert [e["kind"] for e in journal.events][-1] == "failed"
    assert not {"restarted", "replaced"} & {e["kind"] for e in journal.events}


class NoNumber(Small):
    """Rank 1's loss is bad in its fourth batch."""

    def __init__(self, value, **options):
        super().__init__(**options)
        self.value, self.calls = value, 0

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        if model.training and threading.current_thread().name == "worker-1":
            self.calls += 1
            if self.calls == 4:
                return loss * self.value
        return loss


@pytest.mark.parametrize("strategy", [*IN_STEP, *LOOSE], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_named_with_round_and_rank(strategy, value):
    with pytest.raises(TrainingError) as caught:
        train(NoNumber(value), strategy, workers=2, epochs=2)
    assert caught.value.data["rank"] == 1
    assert caught.value.data["round"] == 3
    assert all(word in str(caught.value) for word in ("worker-1", "round 3", "epoch 1", "learning rate"))


class Odd(Small):
    """Gives the wrong kind of thing from one method."""

    def __init__(self, where, value, **options):
        super().__init__(**options)
        self.where, self.value = where, value

    def model(self):
        return self.value() if self.where == "model" else super().model()

    def data(self):
        return self.value() if self.where == "data" else super().data()

    def evaluation_data(self):
        return self.value() if self.where == "evaluation_data" else super().evaluation_data()

    def evaluate(self, model, batch):
        return self.value() if self.where == "evaluate" else super().evaluate(model, batch)

    def loss(self, model, batch):
        return self.value(super().loss(model, batch)) if self.where == "loss" else super().loss(model, batch)

    def optimizer(self, params):
        return self.value(params) if self.where == "optimizer" else super().optimizer(params)


def mixed():
    return torch.nn.Sequential(torch.nn.Linear(5, 5).double(), torch.nn.Linear(5, 1))


def all_frozen():
    return torch.nn.Linear(5, 1).double().requires_grad_(False)


def empty():
    return rayps.data.tensors(torch.zeros(0, 5), torch.zeros(0, 1))


ODD = [
    ("model", lambda: None, WorkloadError, ["model()", "NoneType", "torch.nn.Module"]),
    ("model", torch.nn.Tanh, WorkloadError, ["no parameter"]),
    ("model", all_frozen, WorkloadError, ["no parameter", "gradient"]),
    ("model", mixed, WorkloadError, ["several dtypes", "float64", "float32"]),
    ("data", lambda: [1, 2], ConfigError, ["data()", "list", "rayps.data."]),
    ("data", empty, DataError, ["no rows"]),
    ("evaluation_data", lambda: None, ConfigError, ["evaluation_data()", "NoneType"]),
    ("evaluation_data", empty, DataError, ["no rows"]),
    ("loss", lambda loss: None, WorkloadError, ["loss(", "NoneType"]),
    ("loss", lambda loss: loss.item(), WorkloadError, ["loss(", "float"]),
    ("loss", lambda loss: loss.expand(3), WorkloadError, ["loss(", "(3,)", "mean"]),
    ("loss", lambda loss: loss.detach(), WorkloadError, ["loss", "grad"]),
    ("optimizer", lambda params: None, WorkloadError, ["optimizer(params)", "NoneType", "torch.optim"]),
    ("optimizer", lambda params: "sgd", WorkloadError, ["optimizer(params)", "str", "torch.optim"]),
    (
        "optimizer",
        lambda params: torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1),
        WorkloadError,
        ["optimizer(params)", "params"],
    ),
    ("evaluate", lambda: None, WorkloadError, ["evaluate", "NoneType", "dict"]),
    ("evaluate", lambda: {"accuracy": "good"}, WorkloadError, ["evaluate", "accuracy"]),
    ("evaluate", lambda: {"accuracy": torch.ones(2)}, WorkloadError, ["evaluate", "accuracy"]),
]


@pytest.mark.parametrize("strategy", IN_STEP, ids=str)
@pytest.mark.parametrize(("where", "value", "error", "words"), ODD, ids=lambda v: v if isinstance(v, str) else "")
def test_what_a_method_must_give(where, value, error, words, strategy):
    with pytest.raises(error) as caught:
        train(Odd(where, value), strategy, workers=2, epochs=1, timeout=60.0)
    for word in words:
        assert word in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 3


class OwnClosure(torch.optim.SGD):
    def step(self, closure):
        return super().step(closure)


@pytest.mark.parametrize("strategy", [*IN_STEP, *LOOSE], ids=str)
@pytest.mark.parametrize("kind", [torch.optim.LBFGS, OwnClosure])
def test_an_optimizer_whose_step_needs_a_closure_is_refused_before_anything_starts(kind, strategy):
    cluster = Watched()
    with pytest.raises(WorkloadError, match=f"{kind.__name__}.*closure") as caught:
        train(Odd("optimizer", kind), strategy, cluster, workers=2, epochs=1)
    assert "all_reduce" not in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 3
    assert not cluster.spawned


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_an_optimizer_that_is_not_elementwise_is_refused_by_servers_only(name):
    kind = getattr(torch.optim, name, None)
    if kind is None:
        pytest.skip(f"this torch has no {name}")
    work = Odd("optimizer", kind)
    with pytest.raises(WorkloadError, match=name):
        train(work, ParameterServer(), workers=2, epochs=1)
    if name == "Adafactor":
        assert train(work, AllReduce(), workers=2, epochs=1)


@pytest.mark.parametrize("strategy", [*IN_STEP, *LOOSE], ids=str)
def test_an_optimizer_that_names_its_parameters_by_number(strategy):
    work = Odd(
        "optimizer",
        lambda params: torch.optim.SGD([{"params": params[:3]}, {"params": [params[3]], "lr": 0.01}], lr=0.1),
    )
    result = train(work, strategy, workers=1, epochs=1)
    assert distance(result.model(), plain(work, epochs=1)[0]) < EXACT


def test_optimizers_that_ignore_the_scale_are_warned_of():
    for strategy, optimizer, warned in [
        (LOOSE[0], "adam", True),
        (LOOSE[1], "adamw_groups", True),
        (LOOSE[0], "sgd", False),
        (LOOSE[1], "momentum", False),
        (IN_STEP[1], "adam", False),
    ]:
        result = train(Small(optimizer=optimizer), strategy, workers=2, epochs=1)
        assert any("1/N" in e["message"] for e in result.events) is warned
    assert "warning" not in kinds(train(Small(optimizer="adam"), LOOSE[0], workers=1, epochs=1))


# -------------------------------------------------------------------------------------- the record


@pytest.mark.parametrize("strategy", [*IN_STEP, *LOOSE], ids=str)
def test_every_round_is_told_once_and_whole(strategy):
    result = train(Small(n=100, batch=2), strategy, workers=4, epochs=2)
    assert rounds(result) == list(range(26))
    assert sum(result.history.column("samples").to_pylist()) == 200
    assert result.history.column("epoch").to_pylist() == [0] * 13 + [1] * 13


@pytest.mark.parametrize("steps", [1, 5, 13])
def test_steps_count_batches_of_each_worker(steps):
    result = train(Small(), AllReduce(), workers=2, steps=steps)
    assert rounds(result) == list(range(steps))
    assert distance(result.model(), plain(Small(), 2, steps=steps)[0]) < EXACT


def test_stop_ends_the_run_and_keeps_its_checkpoint(tmp_path, tag):
    work = Small(n=6000, pause=0.004, tag=tag)  # the first epoch is never at its end here
    journal = Journal(tmp_path)
    spec = JobSpec("x:Small", {"name": "all_reduce"}, 2, epochs=2)
    driver = Driver(WorkloadJob(work, spec, journal, checkpoints=tmp_path / "checkpoints", capture=False))
    thread = threading.Thread(target=lambda: outcomes.append(driver.run(LocalCluster())))
    outcomes = []
    thread.start()
    assert until(lambda: SEEN[tag] > 60, 60)
    driver.stop()
    thread.join(60)
    assert outcomes[0].status is Status.STOPPED
    assert outcomes[0].checkpoint is not None
    assert outcomes[0].checkpoint.is_dir()
    assert 0 < int(outcomes[0].checkpoint.name[5:]) < 1000  # not of an epoch's end: it was made for the stop
    assert str(outcomes[0].checkpoint) in outcomes[0].message
    sealed = json.loads((tmp_path / "outcome.json").read_text())
    assert sealed["status"] == "STOPPED"
    assert sealed["checkpoint"] == str(outcomes[0].checkpoint)
    progress = json.loads((tmp_path / "progress.json").read_text())
    assert progress["status"] == "STOPPED"
    journal.close()


def test_progress_says_where_the_run_stands(tag):
    seen = []
    train(Small(n=240, batch=2, pause=0.01, tag=tag), LOOSE[0], workers=3, epochs=2, progress=seen.append)
    running = [p for p in seen if p["status"] == "RUNNING" and p.get("workers")]
    last = seen[-1]
    assert last["status"] == "SUCCEEDED"
    assert last["rounds"] == last["round"] == 80
    assert last["epochs"] == 2
    assert {w["rank"] for w in running[-1]["workers"]} == {0, 1, 2}
    assert all(w["pid"] == os.getpid() for w in running[-1]["workers"])
    assert [(s["lo"], s["hi"]) for s in running[-1]["shards"]] == [(0, 25), (25, 50)]
    assert set(map(int, running[-1]["staleness"])) <= {0, 1, 2}
    assert 0 < running[-1]["samples_per_second"] < 1e5


# --------------------------------------------------------------------------------------- the actor


SPEC = {"workload": "work.py:Line", "strategy": {"name": "all_reduce"}, "workers": 2, "epochs": 2}
LINE = """
import torch, rayps
class Line(rayps.Workload):
    def model(self):
        return torch.nn.Linear(3, 1)
    def data(self):
        return rayps.data.tensors(torch.ones(8, 3), torch.ones(8, 1), batch_size=2)
    def loss(self, model, batch):
        return ((model(batch.x) - batch.y) ** 2).mean()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "work.py").write_text(LINE)
    before = set(threading.enumerate())
    yield tmp_path

    def left():
        return [each for each in threading.enumerate() if each.name == "rayps-driver" and each not in before]

    # an actor ends the actor of its name: one that still ends would end that of the next test
    assert until(lambda: not left(), 60), stacks()


def driver_actor(folder, attempt=1, **changes):
    return DriverActor(SPEC | {"working_dir": str(folder)} | changes, str(folder / "job"), attempt)


def test_the_actor_writes_the_whole_folder(folder):
    assert driver_actor(folder).run() == Status.SUCCEEDED
    job = folder / "job"
    lines = [json.loads(line) for line in (job / "metrics.jsonl").read_text().splitlines()]
    assert [p["round"] for p in lines if p["kind"] == "round"] == [0, 1, 2, 3]
    events = [json.loads(line) for line in (job / "events.jsonl").read_text().splitlines()]
    assert [e["seq"] for e in events] == list(range(len(events)))
    assert events[-1]["kind"] == "finished"
    outcome = json.loads((job / "outcome.json").read_text())
    assert outcome["status"] == "SUCCEEDED"
    assert outcome["metrics"]["loss"] < 2
    assert json.loads((job / "progress.json").read_text())["status"] == "SUCCEEDED"
    assert outcome["checkpoint"].endswith("step-00000004")


def test_the_actor_started_again_goes_on_from_its_checkpoint(folder):
    driver_actor(folder, epochs=1).run()
    (folder / "job" / "outcome.json").unlink()
    assert driver_actor(folder, attempt=2).run() == Status.SUCCEEDED
    lines = [json.loads(line) for line in (folder / "job" / "metrics.jsonl").read_text().splitlines()]
    assert [p["round"] for p in lines if p["kind"] == "round"] == [0, 1, 2, 3]
    kinds = [json.loads(line)["kind"] for line in (folder / "job" / "events.jsonl").read_text().splitlines()]
    assert "resumed" in kinds
    assert "began_again" not in kinds


def test_the_actor_started_again_without_a_checkpoint_says_so(folder):
    assert driver_actor(folder, attempt=2).run() == Status.SUCCEEDED
    kinds = [json.loads(line)["kind"] for line in (folder / "job" / "events.jsonl").read_text().splitlines()]
    assert "began_again" in kinds


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"workload": "nowhere.py:Line"}, ["no file"]),
        ({"workload": "work.py:Lime"}, ["Lime", "Line"]),
        ({"resume": "/nowhere"}, ["/nowhere"]),
        ({"workers": 1000}, ["1000", "CPU"]),
    ],
)
def test_a_job_that_cannot_begin_says_why_in_its_folder(folder, changes, words):
    assert driver_actor(folder, **changes).run() == Status.FAILED
    outcome = json.loads((folder / "job" / "outcome.json").read_text())
    assert outcome["status"] == "FAILED"
    for word in words:
        assert word in outcome["message"]


def stacks():
    """Where every thread is."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames().items()
    return "\n".join(f"{names.get(ident)}:\n{''.join(traceback.format_stack(frame))}" for ident, frame in frames)


def test_the_actor_begins_by_itself_and_ends_itself(folder):
    """Whoever created it may be killed at once: no further call is needed for the job to run and to leave nothing."""
    cluster = surrounding()
    spec = SPEC | {"working_dir": str(folder)}
    job = folder / "begins"  # a name of its own: an actor ends the living actor of its name
    cluster.spawn("rayps.runtime.driver.driver_actor:DriverActor", spec, str(job), 1, 0, name="driver-begins")
    assert until(lambda: (job / "outcome.json").exists(), 60), stacks()
    assert json.loads((job / "outcome.json").read_text())["status"] == "SUCCEEDED"
    assert until(lambda: cluster.find("driver-begins") is None, 60), stacks()
    begun = json.loads((job / "driver.json").read_text())
    started = processes.start_time(os.getpid())
    assert begun == {"attempt": 1, "pid": os.getpid(), "started": started, "protocol": PROTOCOL}


def test_a_crash_of_the_actor_is_told_in_its_folder(folder, monkeypatch):
    gate = folder / "gate"  # threads, unlike Ray, know an actor by its name only once it was created
    (folder / "work.py").write_text(
        f"{LINE}\nimport pathlib, time\nwhile not pathlib.Path({str(gate)!r}).exists():\n    time.sleep(0.01)\n"
        "raise KeyboardInterrupt('no outcome tells this')\n"
    )
    monkeypatch.setattr(threading, "excepthook", lambda *_: None)
    cluster = surrounding()
    spec = SPEC | {"working_dir": str(folder)}
    job = folder / "crashes"
    job.mkdir()
    (job / "progress.json").write_text('{"status": "RUNNING"}')
    cluster.spawn("rayps.runtime.driver.driver_actor:DriverActor", spec, str(job), 2, 0, name="driver-crashes")
    assert until(lambda: (job / "driver.json").exists(), 60), stacks()
    gate.touch()
    assert until(lambda: cluster.find("driver-crashes") is None, 60), stacks()
    begun = json.loads((job / "driver.json").read_text())
    assert begun["attempt"] == 2 and begun["crash"] == "KeyboardInterrupt: no outcome tells this"
    assert not (job / "outcome.json").exists() and not (job / "progress.json").exists()


@pytest.mark.parametrize("name", ["driver.json", "launch.json"])
def test_an_attempt_does_not_begin_after_a_later_one(folder, name):
    """Its process was stopped before it had begun, so nobody could end it. When it goes on, it leaves the folder."""
    job = folder / "job"
    job.mkdir()
    later = json.dumps({"attempt": 3, "pid": 1, "started": 1, "protocol": PROTOCOL})
    (job / name).write_text(later)
    (job / "progress.json").write_text('{"status": "RUNNING"}')
    driver_actor(folder, attempt=2).run()
    assert sorted(path.name for path in job.iterdir()) == sorted([name, "progress.json"])
    assert (job / name).read_text() == later


@pytest.mark.parametrize("known", [True, False])
def test_an_actor_that_cannot_end_itself_by_ray_ends_its_process(folder, monkeypatch, known):
    """Ray does not answer, or has lost the actor: an idle process would let its job run for ever."""

    class Ray:
        def find(self, name):
            if known:
                raise ClusterError("Ray does not answer")

    exits = []
    monkeypatch.setattr("rayps.runtime.driver.driver_actor.surrounding", Ray)
    monkeypatch.setattr(os, "_exit", exits.append)
    (folder / "job").mkdir()
    (folder / "job" / "launch.json").write_text('{"attempt": 3}')  # the run is over at once
    driver_actor(folder, attempt=2).run()
    assert exits == [0]


def test_a_stop_before_the_start_is_not_forgotten(folder):
    actor = driver_actor(folder, epochs=100_000)
    actor.stop()
    assert actor.run() == Status.STOPPED


# ---------------------------------------------------------------------------------- what is left


def test_nothing_is_left_after_many_runs():
    def things():
        gc.collect()
        links = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        return threading.active_count(), len(links), Counter(link.partition(":")[0] for link in links)

    others = threading.active_count()  # what other tests of this process have left to end by itself
    for strategy in [*IN_STEP, *LOOSE]:
        train(Small(n=12), strategy, workers=3, epochs=1)
    assert until(lambda: threading.active_count() < others + 30, 60)
    before = things()
    for i in range(20):
        train(Small(n=12), [*IN_STEP, *LOOSE][i % 4], workers=3, epochs=1)
        with pytest.raises(WorkloadError):
            train(Broken("loss", n=12), [*IN_STEP, *LOOSE][i % 4], workers=2, epochs=2)
    assert until(lambda: things()[0] <= before[0] and things()[1] <= before[1], 60), (before, things())


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    train(Small(), workers=1, steps=2, checkpoint=tmp_path)

    class Wider(Small):
        def model(self):
            return torch.nn.Linear(5, 1).double()

    with pytest.raises(CheckpointError, match="another model"):
        train(Wider(), workers=1, steps=4, checkpoint=tmp_path, resume=True)


def test_a_checkpoint_of_another_workload_or_seed_is_gone_on_from_with_a_warning(tmp_path):
    def warned(result):
        return [event["message"] for event in result.events if event["kind"] == "warning"]

    class Alike(Small):
        pass

    train(Small(), workers=2, steps=2, seed=3, checkpoint=tmp_path)
    same = train(Small(), workers=2, steps=4, seed=3, checkpoint=tmp_path, resume=True)
    assert warned(same) == []
    first, second = warned(train(Alike(), workers=2, steps=6, seed=4, checkpoint=tmp_path, resume=True))
    assert "was saved by workload Small, and this run trains" in first
    assert "Alike: is it the right folder?" in first
    assert "was saved with seed 3, and this run has 4" in second

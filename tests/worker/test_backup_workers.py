"""Backup workers: the result is that of a plain loop on the rows that were applied, each of which was applied once."""

import copy
import dataclasses
import importlib
import pickle
import random
import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from rayps_client.errors import ConfigError
from small_work import GATES, SEEN, Small, Watched, distance, kinds, train
from torch import nn

import rayps
from rayps import AllReduce, ParameterServer
from rayps.comm.ring.agree_members import MemberAgreement
from rayps.core.rows.backup_portions import Portions
from rayps.core.rows.phase_rounds import Boundary
from rayps.core.rows.step_rows import RowBlock
from rayps.core.strategy.topology import Peers
from rayps.ps.client.round_arrivals import RoundArrivals
from rayps.runtime.driver.recover import RecoveryExecutor
from rayps.runtime.size.late_workers import LateReplacements
from rayps.strategies.catalogue import check_for_loop, parse
from rayps.worker.abandon import AbandonHooks, StepAbandoned
from rayps.worker.connections import WorkerConnections
from rayps.worker.core import Meter, RoundLog
from rayps.worker.exchange.dropped import DropReports
from rayps.worker.first_at_servers import FirstAtServers
from rayps.worker.plan import EvaluationPlan, PeerAddresses, SnapshotPlan, WorkerPlan
from rayps.worker.rows.make_stream import make_jumping_reader, make_stream

EXACT = 1e-12
BOTH = [AllReduce(backup=1), ParameterServer(backup=1), ParameterServer(shards=3, backup=1)]


def name_of(strategy):
    return f"{strategy.name}{getattr(strategy, 'shards', '') or ''}"


@pytest.fixture
def tag(request):
    SEEN.clear()
    return request.node.nodeid


@pytest.fixture
def log(monkeypatch):
    """The members of each step, as rank 0 has applied them."""
    found, add = {}, DropReports.add

    def recorded(self, portions, members, round):
        if self._reports:
            found[round] = members
        add(self, portions, members, round)

    monkeypatch.setattr(DropReports, "add", recorded)
    return found


@pytest.fixture
def script(monkeypatch):
    """Replaces arrivals on a ring: `script[step]` are the members of a step, or all that count if it is not there."""
    given, agree = {}, MemberAgreement.agree

    def agreed(self, step, needed, ready):
        if step not in given:
            return agree(self, step, needed, ready)
        if self._mesh.rank in given[step]:
            self._mesh.await_early(self._wakeup.fileno(), lambda: (self._wakeup.clear(), ready())[1])
        if self._decides is not None:
            self._decides.step = step + 1
        return given[step]

    monkeypatch.setattr(MemberAgreement, "agree", agreed)
    return given


def replayed(work, members, shares, workers, *, seed=0):
    """One process, on the rows that the members of each step had: model, losses, and how often each row was applied.

    `members` is a dict from the step to its members.
    """
    torch.manual_seed(seed)
    model, counts, losses = work.model(), Counter(), []
    optimizer = work.optimizer(list(model.parameters()))
    data = work.data()
    steps = data.steps(shares)
    for step in sorted(members):
        epoch, index = divmod(step, steps)
        if index == 0:
            portions = Portions.at(0, shares=shares, workers=workers, steps=steps)
            read = [list(data.batches(rank=r, size=shares, seed=seed, epoch=epoch)) for r in range(shares)]
        parts = [read[portions.held[rank] % shares][portions.held[rank] // shares] for rank in members[step]]
        whole = [part for part in parts if part.size]
        x, y = torch.cat([part.x for part in whole]), torch.cat([part.y for part in whole])
        counts.update((epoch, *row) for row in x.tolist())
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        portions = portions.after(members[step])
    return model, losses, counts


def losses(result):
    return result.history.column("loss").to_pylist()


def of(strategy, backup):
    return dataclasses.replace(strategy, backup=backup)


# ---- the law


@pytest.mark.parametrize("strategy", BOTH, ids=name_of)
@pytest.mark.parametrize(
    ("workers", "backup", "n", "optimizer"), [(4, 1, 36, "momentum"), (5, 2, 50, "adam"), (3, 1, 4, "adam")]
)
def test_the_result_is_that_of_the_rows_that_were_applied(log, strategy, optimizer, workers, backup, n):
    work = Small(n=n, batch=3, optimizer=optimizer, jitter=0.003)
    result = train(work, of(strategy, backup), workers=workers, epochs=2, seed=5)
    model, expected, counts = replayed(work, log, workers - backup, workers, seed=5)
    assert distance(result.model(), model) < EXACT
    assert losses(result) == pytest.approx(expected, abs=EXACT)
    assert len(counts) == 2 * n and set(counts.values()) == {1}  # the ledger: each row once in each epoch
    assert sum(result.history.column("samples").to_pylist()) == 2 * n
    with torch.no_grad():
        x, y = work.data().x, work.data().y
        at_the_end = ((model(x) - y) ** 2).mean().item()
    assert result.metrics["loss"] == pytest.approx(at_the_end, abs=EXACT)


@pytest.mark.parametrize("strategy", [AllReduce, ParameterServer], ids=lambda kind: kind.name)
def test_no_backup_workers_is_the_plain_strategy_to_the_bit(strategy):
    work = Small(optimizer="adam")
    one, other = (train(work, strategy(backup=given), workers=3, epochs=2) for given in (None, 0))
    assert distance(one.model(), other.model()) == 0
    assert strategy(backup=0).topology == strategy().topology and strategy(backup=0).loop == strategy().loop


def test_a_worker_that_is_always_late_leaves_a_run_of_n_workers(script, log):
    """Worker 3 has one portion all along; the others have those of three workers, in the order of three workers."""
    work = Small(n=36, batch=3, optimizer="momentum")
    script.update(dict.fromkeys(range(3), (0, 1, 2)))
    result = train(work, AllReduce(backup=1), workers=4, epochs=1)
    model, expected, counts = replayed(work, log, 3, 4)
    assert distance(result.model(), model) < EXACT and losses(result) == pytest.approx(expected, abs=EXACT)
    assert set(counts.values()) == {1} and 3 in log[3]  # the last step waits for it
    assert result.history.column("dropped").to_pylist() == [1, 1, 1, 0]
    # the same without the late worker: three workers on the same rows
    alone = {step: members for step, members in log.items() if step < 3}
    again = train(work, AllReduce(), workers=3, steps=1)  # the first step has the rows of three workers
    first, _, _ = replayed(work, {0: alone[0]}, 3, 4)
    assert distance(again.model(), first) < EXACT


@pytest.mark.parametrize("seed", [0, 1])
def test_workers_that_are_late_at_random_apply_each_row_once(script, log, seed):
    draw, work = random.Random(seed), Small(n=54, batch=3, optimizer="adam")
    for epoch in range(2):
        for index in range(5):  # the sixth and last step of an epoch has no choice
            script[6 * epoch + index] = tuple(sorted(draw.sample(range(4), 3)))
    result = train(work, AllReduce(backup=1), workers=4, epochs=2, seed=seed)
    model, expected, counts = replayed(work, log, 3, 4, seed=seed)
    assert {step: members for step, members in log.items() if step in script} == script
    assert distance(result.model(), model) < EXACT and losses(result) == pytest.approx(expected, abs=EXACT)
    assert set(counts.values()) == {1} and len(counts) == 108


class Touching(Small):
    """Its model has a buffer, and its loss rounds the parameters in place, by less than 1e-6 of their values."""

    def model(self):
        model = super().model()
        model.register_buffer("scale", torch.ones(1))
        return model

    def loss(self, model, batch):
        with torch.no_grad():
            for p in model.parameters() if model.training else ():
                p.copy_(p.float())
        return super().loss(model, batch)


def test_no_other_collective_runs_beside_the_steps(log):
    """Workers in step compare parameters that a loss has written, and evaluate the buffers of rank 0: not these."""
    work = Touching(n=36, batch=3, optimizer="adam", jitter=0.002)
    result = train(work, AllReduce(backup=1), workers=4, epochs=3, timeout=10.0, max_failures=0)
    model, expected, counts = replayed(work, log, 3, 4)
    assert distance(result.model(), model) < 1e-5 and losses(result) == pytest.approx(expected, abs=1e-5)
    assert set(counts.values()) == {1}


def test_rows_in_micro_batches_are_applied_once(log):
    work = Small(n=48, batch=2, optimizer="momentum", jitter=0.002)
    work.accumulate = 2
    result = train(work, AllReduce(backup=1), workers=4, epochs=2)
    assert sum(result.history.column("samples").to_pylist()) == 96
    whole = Small(n=48, batch=2, optimizer="momentum")
    assert result.history.num_rows == 2 * -(-whole.data().steps(3) // 2)


# ---- states


@pytest.mark.parametrize("strategy", BOTH[:2], ids=name_of)
@pytest.mark.parametrize("at", [2, 7])
def test_a_resumed_run_goes_on_with_the_rows_that_each_worker_had(tmp_path, log, strategy, at):
    work = Small(n=45, batch=3, optimizer="adam", jitter=0.002)  # 5 steps an epoch
    train(work, strategy, workers=4, steps=at, checkpoint=tmp_path)
    result = train(work, strategy, workers=4, steps=10, checkpoint=tmp_path, resume=True)
    model, expected, counts = replayed(work, log, 3, 4)
    assert sorted(log) == list(range(10))
    assert distance(result.model(), model) < EXACT
    assert losses(result) == pytest.approx(expected[at:], abs=EXACT)
    assert set(counts.values()) == {1} and len(counts) == 90


def test_a_change_of_strategy_keeps_the_parameters():
    work = Small(n=36, batch=3, optimizer="momentum", jitter=0.002)
    first = train(work, [(1, AllReduce(backup=1)), (1, ParameterServer(backup=1)), AllReduce()], workers=4, epochs=3)
    assert first.history.column("round").to_pylist() == list(range(4 + 4 + 3))
    assert sum(first.history.column("samples").to_pylist()) == 3 * 36


# ---- a late worker


class Held(Small):
    """Worker 3 waits in its second layer until the gate `held` opens, and the others until it waits there.

    Counts the training calls of worker 3's last layer.
    """

    def model(self):
        class Gate(nn.Module):
            def forward(self, x):
                shared = importlib.import_module("small_work")
                if self.training and threading.current_thread().name == "worker-3":
                    shared.SEEN["gate"] += 1
                    shared.GATES["reached"].set()
                    shared.GATES["held"].wait(20)
                elif self.training:
                    shared.GATES["reached"].wait(20)
                return x

        class Counted(nn.Linear):
            def forward(self, x):
                late = threading.current_thread().name == "worker-3"
                importlib.import_module("small_work").SEEN["last layer"] += self.training and late
                return super().forward(x)

        return nn.Sequential(nn.Linear(5, 7), Gate(), nn.Tanh(), Counted(7, 1)).double()


@pytest.fixture
def gate(monkeypatch, log):
    """The gate `held`, which opens when rank 0 has applied step 2."""
    GATES["held"] = opened = threading.Event()
    GATES["reached"] = threading.Event()
    SEEN["gate"] = SEEN["last layer"] = 0
    add = DropReports.add

    def counted(self, portions, members, round):
        add(self, portions, members, round)
        if self._reports and round == 2:
            opened.set()

    monkeypatch.setattr(DropReports, "add", counted)
    yield opened
    opened.set()


@pytest.mark.parametrize("strategy", [AllReduce(backup=1), ParameterServer(shards=2, backup=1)], ids=name_of)
def test_a_late_worker_abandons_its_step_and_the_others_do_not_wait(gate, log, strategy):
    work = Held(n=36, batch=3, optimizer="momentum")  # 4 steps with 3 members
    result = train(work, strategy, workers=4, epochs=1)
    assert [log[step] for step in range(3)] == [(0, 1, 2)] * 3 and 3 in log[3]
    assert SEEN["gate"] == 2 and SEEN["last layer"] == 1  # one gradient ended in the second layer; its rows came again
    model, expected, counts = replayed(work, log, 3, 4)
    assert distance(result.model(), model) < EXACT and losses(result) == pytest.approx(expected, abs=EXACT)
    assert set(counts.values()) == {1}
    dropped = [event for event in result.events if event["kind"] == "dropped"]
    assert [(event["epoch"], event["ranks"]) for event in dropped] == [(0, {"3": 3})]
    assert "worker-3 in 3 of 4 steps" in dropped[0]["message"]


@pytest.mark.parametrize("strategy", [AllReduce(backup=1), ParameterServer(backup=1)], ids=name_of)
def test_a_worker_that_dies_late_returns_with_its_rows(tag, log, strategy):
    work, cluster = Small(n=60, batch=3, optimizer="momentum", jitter=0.004, tag=tag), Watched()
    cluster.kill_when(tag, 50, ("WorkerActor", 3))
    result = train(work, strategy, cluster, workers=4, epochs=3)
    model, _, counts = replayed(work, log, 3, 4)
    assert [event["lost"] for event in result.events if event["kind"] == "restarted"] == [["worker-3"]]
    assert distance(result.model(), model) < EXACT
    assert set(counts.values()) == {1} and len(counts) == 180


def test_a_worker_that_connects_after_the_first_rounds_goes_through_them(gate, log, monkeypatch):
    form = WorkerConnections.form

    def formed(self, plan, *more):
        if plan.rank == 3:
            gate.wait(20)
        form(self, plan, *more)

    monkeypatch.setattr(WorkerConnections, "form", formed)
    work = Small(n=60, batch=3, optimizer="adam")  # 7 steps
    result = train(work, ParameterServer(backup=1), workers=4, epochs=1)
    model, expected, counts = replayed(work, log, 3, 4)
    assert distance(result.model(), model) < EXACT and losses(result) == pytest.approx(expected, abs=EXACT)
    assert [3 in log[step] for step in range(3)] == [False] * 3 and set(counts.values()) == {1}


def test_a_worker_that_is_late_in_a_row_is_named(gate):
    result = train(Held(n=36, batch=3), AllReduce(backup=1, late_limit=2), workers=4, epochs=1)
    late = [event for event in result.events if event["kind"] == "late"]
    assert [(event["rank"], event["steps"]) for event in late] == [(3, 2)]
    assert "worker-3 was dropped in 2 steps in a row" in late[0]["message"]
    assert "restarted" not in kinds(result)


class HeldTwo(Small):
    """Workers 1 and 2 wait in their losses until the gate `held` opens."""

    def loss(self, model, batch):
        if threading.current_thread().name in ("worker-1", "worker-2"):
            importlib.import_module("small_work").GATES["held"].wait(20)
        return super().loss(model, batch)


@pytest.mark.parametrize("strategy", [AllReduce(backup=1), ParameterServer(backup=1)], ids=name_of)
def test_workers_that_do_not_arrive_in_time_are_named_if_too_few_do(strategy, log, monkeypatch):
    GATES["held"] = opened = threading.Event()
    report = RecoveryExecutor.report_restart

    def reported(self, *given):
        opened.set()
        report(self, *given)

    monkeypatch.setattr(RecoveryExecutor, "report_restart", reported)
    monkeypatch.setattr("rayps.runtime.driver.decide_recovery.GRACE_SECONDS", 0.1)
    monkeypatch.setattr("rayps.runtime.driver.worker_actor.JOIN_SECONDS", 0.1)
    work = HeldTwo(n=24, batch=3, optimizer="momentum")
    result = train(work, strategy, workers=3, epochs=1, timeout=1.0)
    restarted = [event for event in result.events if event["kind"] == "restarted"]
    assert "worker-1, worker-2" in restarted[0]["message"] and restarted[0]["lost"] == ["worker-1"]
    assert "complete a gradient" in restarted[0]["message"]
    model, _, counts = replayed(work, log, 2, 3)
    assert distance(result.model(), model) < EXACT and set(counts.values()) == {1}


class SlowFirst(Small):
    """The first process of worker 2 is slow in each gradient."""

    def loss(self, model, batch):
        shared = importlib.import_module("small_work")
        if threading.current_thread().name == "worker-2":
            slow = shared.SEEN.setdefault("slow thread", threading.get_ident())
            time.sleep(0.05 if slow == threading.get_ident() else 0)
        time.sleep(0.004)
        return super().loss(model, batch)


@pytest.mark.parametrize("strategy", [AllReduce(backup=1), ParameterServer(backup=1)], ids=name_of)
def test_a_worker_that_is_late_in_a_row_is_replaced_once(tag, log, strategy):
    work, cluster = SlowFirst(n=400, batch=2, optimizer="momentum", tag=tag), Watched()
    given = dataclasses.replace(strategy, late_limit=6, replace_late=True)
    result = train(work, given, cluster, workers=3, epochs=1)
    restarted = [event for event in result.events if event["kind"] == "restarted"]
    assert restarted[0]["lost"] == ["worker-2"]  # on a busy machine another one may also be late in a row
    assert restarted[0]["round"] > 0  # from a snapshot that was taken for this
    assert "dropped in 6 steps in a row" in restarted[0]["message"]
    assert cluster.spawned["WorkerActor", 2] == 2
    model, _, counts = replayed(work, log, 2, 3)
    assert distance(result.model(), model) < EXACT and set(counts.values()) == {1}


def test_a_late_worker_is_replaced_once_after_a_snapshot_and_never_beyond_the_failures_that_are_allowed():
    def late(rank, round, replace=True):
        return {"kind": "late", "rank": rank, "round": round, "steps": 10, "replace": replace}

    found = LateReplacements()
    assert found.add([{"kind": "dropped"}, late(1, 20, replace=False)]) is False
    assert found.add([late(1, 20), late(2, 21)]) is True
    assert found.take_due(20, allowed=True) == {}
    reason = "the driver ended it, because it was dropped in 10 steps in a row"
    assert found.take_due(21, allowed=True) == {1: reason}
    assert found.add([late(1, 60)]) is False  # once
    assert found.take_due(70, allowed=False) == {} and found.take_due(70, allowed=True) == {}


class SingleRows(rayps.Workload):
    def model(self):
        return nn.Linear(1, 1)

    def data(self):
        return rayps.data.tensors(torch.zeros(99, 1), batch_size=1)

    def loss(self, model, batch):
        return model(batch.x).mean()


def test_a_dropped_gradient_leaves_no_trace_in_the_random_numbers(monkeypatch):
    """In a worker of its own process. Of three rounds it is a member of the last."""

    class Alone:
        rank, size, part, workload = 1, 3, SimpleNamespace(module=nn.Linear(1, 1)), SimpleNamespace(compile=True)

        def __init__(self):
            self.plan = WorkerPlan(
                1,
                1,
                3,
                ParameterServer(backup=1),
                PeerAddresses(),
                0,
                0,
                9,
                SnapshotPlan(Boundary(0, -1)),
                EvaluationPlan(0),
                1.0,
            )
            self.batches = make_stream(SingleRows(), self.plan)
            self.log, self.meter, self.server, self.pushed, self.missed = RoundLog(), Meter(), self, [], 0

        @property
        def position(self):
            return self.batches.position

        def grad(self, batch):
            return torch.rand(3).tolist()

        def push(self, gradient):
            self.pushed.append(gradient)

        def send(self, batch):
            assert batch is None
            self.missed += 1

    def arrive(self, round, needed):
        return [(0, 2) if round < 2 else (0, 1)]

    monkeypatch.setattr(RoundArrivals, "arrive", arrive)
    w = Alone()
    first_arrivals = FirstAtServers(w, SimpleNamespace(session=w))
    torch.manual_seed(1)
    first = torch.rand(3)
    torch.manual_seed(1)
    for _ in range(3):
        first_arrivals.exchange(w.batches.take(9), w.send)
    assert w.pushed == [first.tolist()] and w.missed == 2
    assert torch.rand(1) != first[0]


def test_an_abandoned_computation_passes_the_users_except():
    model, useless = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), [False]
    hooks = AbandonHooks(model, lambda: useless[0], compiled=False)
    with hooks:
        total = model(torch.ones(1, 2)).sum()
        useless[0] = True
        with pytest.raises(StepAbandoned):
            total.backward()
    model(torch.ones(1, 2))  # outside of the block nothing is abandoned
    with hooks:
        copy.deepcopy(model)(torch.ones(1, 2)), pickle.loads(pickle.dumps(model))(torch.ones(1, 2))  # have no hooks
    seen = []
    with pytest.raises(StepAbandoned), hooks:
        try:
            model(torch.ones(1, 2))
        except Exception as error:  # what a user's loss may contain
            seen.append(error)
    assert not seen


# ---- what cannot be combined

REFUSED = [
    (lambda: AllReduce(backup=-1), "backup is -1: give a whole number of at least 0, or none"),
    (lambda: AllReduce(backup=True), "backup is True"),
    (lambda: AllReduce(late_limit=5), "late_limit is 5 without backup workers"),
    (lambda: ParameterServer(replace_late=True), "replace_late is True without backup workers"),
    (lambda: AllReduce(backup=1, late_limit=0), "late_limit is 0: give a whole number of at least 1, or none"),
    (lambda: AllReduce(backup=1, compression="fp16"), "compression fp16: a late worker has no error to feed back"),
    (lambda: AllReduce(backup=1, shard="optimizer"), "shard optimizer: each worker is needed for its slice"),
    (lambda: AllReduce(backup=1, bucket_mb=4), "bucket_mb 4: nothing is sent before the members"),
    (lambda: AllReduce(backup=1, replica=rayps.Pipeline()), "replica pipeline"),
    (lambda: ParameterServer(backup=1, staleness=2), "staleness 2: no worker waits for all others"),
    (lambda: ParameterServer(backup=1, staleness=None), "staleness none"),
    (lambda: ParameterServer(shards=2, backup=1, replicas=1), "replicas 1: the members of a round are known to fixed"),
    (lambda: AllReduce(backup=1).grid(2), "backup is 1 and there are 2 workers: .* at least 3 workers"),
    (lambda: ParameterServer(backup=2).grid(4), "backup is 2 and there are 4 workers"),
    (lambda: check_for_loop(parse("all_reduce:backup=1")), "wrap cannot run all_reduce with backup"),
]


@pytest.mark.parametrize(("make", "words"), REFUSED, ids=[words[:24] for _, words in REFUSED])
def test_options_that_cannot_be_combined_are_refused(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


def test_one_bucket_may_be_given():
    assert AllReduce(backup=1, bucket_mb=0).topology.backup == 1
    assert parse("parameter_server:backup=2,shards=3")[0].strategy == ParameterServer(3, backup=2)


class Ahead(Small):
    def data(self):
        return super().data().loaded_by(0)


class Together(Small):
    sync_batchnorm = True


class Averaged(Small):
    average = rayps.EMA(0.9)


class Means(rayps.Strategy):
    topology = Peers(backup=1)

    def round(self, w):
        w.step(w.ring.mean(w.grad(w.batch())))


class Pushes(ParameterServer):
    def round(self, w):
        w.params = w.server.pull()
        w.server.push(w.grad(w.batch()))


class Other(rayps.Strategy):
    """Calls another collective beside `mean_grad`."""

    topology = Peers(backup=1)

    def __init__(self, call):
        self.call = call

    def round(self, w):
        w.step(w.mean_grad(w.batch()))
        self.call(w)


def average_momentum(w):
    w.sync_optimizer_and_buffers(1.0, momentum="average", buffers="keep")


class Idle(rayps.Strategy):
    topology = Peers(backup=1)

    def round(self, w):
        w.batch()


MISFITS = [
    (Ahead(), AllReduce(backup=1), "cannot be combined with loaded_by"),
    (Together(), AllReduce(backup=1), "cannot be combined with sync_batchnorm"),
    (Averaged(), ParameterServer(backup=1), "a late worker does not pull the parameters of every step"),
    (Small(), Pushes(backup=1), r"calls push_grad\(batch\) once"),
    (Small(), Idle(), r"calls mean_grad\(batch\) once, and no other exchange"),
    (Small(), Means(), r"calls mean_grad\(batch\) once"),
    (Small(), Other(lambda w: w.mean(w.params)), r"calls mean_grad\(batch\) once, and no other exchange"),
    (Small(), Other(lambda w: w.mean_later(w.params)), r"calls mean_grad\(batch\) once, and no other exchange"),
    (Small(), Other(lambda w: w.ring.sum(w.params)), r"calls mean_grad\(batch\) once, and no other exchange"),
    (Small(), Other(average_momentum), r"calls mean_grad\(batch\) once, and no other exchange"),
]


@pytest.mark.parametrize(("work", "strategy", "words"), MISFITS, ids=[words[:24] for *_, words in MISFITS])
def test_a_workload_or_a_strategy_that_does_not_fit_is_refused(work, strategy, words):
    with pytest.raises(rayps.RaypsError, match=words):
        train(work, strategy, workers=3, epochs=1)


# ---- rows


class Sequential(rayps.data.Data):
    """Data whose batches can only be read in order, and which counts them."""

    def __init__(self, rows):
        self.inner, self.batch_size, self.read, self.opened = rows, rows.batch_size, 0, 0

    def check(self):
        self.inner.check()

    def rows(self):
        return self.inner.rows()

    def batches(self, **place):
        self.opened += 1
        for batch in self.inner.batches(**place):
            self.read += 1
            yield batch


@pytest.mark.parametrize("accumulate", [1, 2])
def test_portions_are_the_batches_of_n_ranks_however_they_are_read(accumulate):
    data = rayps.data.tensors(torch.arange(50.0).reshape(50, 1), batch_size=3)
    ordered = Sequential(data)
    readers = [make_jumping_reader(each, 7, accumulate) for each in (data, ordered)]
    steps = -(-data.steps(3) // accumulate)
    for epoch in range(2):
        read = [list(data.batches(rank=r, size=3, seed=7, epoch=epoch)) for r in range(3)]
        for number in range(steps):
            for share in (number % 3, (number + 1) % 3):  # not each batch of each share
                expected = read[share][number * accumulate : (number + 1) * accumulate]
                for reader in readers:
                    found = reader.read(RowBlock(0, epoch, number, share, 3))
                    parts = found.parts if accumulate > 1 else (found,)
                    assert [part.x.tolist() for part in parts] == [part.x.tolist() for part in expected]
    assert ordered.opened == 6 and ordered.read <= 2 * 3 * data.steps(3)  # each share was opened once in an epoch

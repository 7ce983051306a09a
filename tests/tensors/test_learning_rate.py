"""Learning-rate schedules: under every strategy the rate of a step is the one that plain torch has at that step."""

import importlib
import json
import struct
from dataclasses import replace

import pytest
import torch
from rayps_client.errors import WorkloadError
from small_work import SCHEDULES, Paced, Small, Watched, distance, plain, train
from torch import nn

import rayps
from rayps import ADMM, AllReduce, DiLoCo, Downpour, FedAvg, Hogwild, LocalSGD, ParameterServer, Pipeline
from rayps.core.job.repeated_pushes import Ledger
from rayps.core.rows.phase_rounds import Boundary
from rayps.core.strategy.topology import Servers, servers_of
from rayps.ps.protocol.pieces import Extent
from rayps.ps.protocol.space import Space
from rayps.ps.server.dense_segment import DenseSegment, Shard, part_of
from rayps.strategies.base import Strategy
from rayps.tensors import learning_rate
from rayps.tensors.checkpoints import checkpoint
from rayps.tensors.checkpoints.checkpoint import SavedState
from rayps.tensors.flat import Layout
from rayps.tensors.snapshot import Snapshot

EXACT = 1e-12
FIXED = ParameterServer(shards=2)
ELASTIC = ParameterServer(shards=2, replicas=1)
IN_STEP = [AllReduce(), FIXED, ELASTIC]
PUSHES: list[tuple[float, float]] = []  # of `Traced`: what was pushed, and the rate it was applied with


# ---- in step


@pytest.mark.parametrize("strategy", IN_STEP, ids=str)
@pytest.mark.parametrize(
    ("schedule", "optimizer"),
    [
        ("cosine", "sgd"),
        ("onecycle", "momentum"),
        ("onecycle", "adamw_groups"),
        ("warm", "adam"),
        ("chained", "momentum"),
        ("restarts", "sgd"),
        ("function", "adamw_groups"),
    ],
)
def test_in_step_it_is_torchs_scheduler(strategy, schedule, optimizer):
    work = Paced(schedule, n=30, optimizer=optimizer)
    result = train(work, strategy, workers=2, epochs=3)
    assert distance(result.model(), plain(work, 2, epochs=3)[0]) < EXACT
    assert distance(result.model(), plain(Small(n=30, optimizer=optimizer), 2, epochs=3)[0]) > 1e-4


@pytest.mark.parametrize(
    "strategy",
    [
        *IN_STEP,
        ParameterServer(staleness=2),
        ParameterServer(staleness=None, replicas=0),
        Downpour(),
        Hogwild(),
        LocalSGD(period=3),
        ParameterServer(staleness=None),
    ],
    ids=str,
)
@pytest.mark.parametrize("schedule", ["onecycle", "function"])
def test_one_worker_is_plain_torch_with_its_scheduler(strategy, schedule):
    work = Paced(schedule, n=24, optimizer="momentum")
    result = train(work, strategy, workers=1, epochs=3)
    assert distance(result.model(), plain(work, epochs=3)[0]) < EXACT


def test_in_step_it_is_torchs_scheduler_to_the_bit():
    work = Paced("onecycle", n=24, optimizer="momentum")
    assert distance(train(work, AllReduce(), workers=1, epochs=3).model(), plain(work, epochs=3)[0]) == 0


@pytest.mark.parametrize("strategy", [AllReduce(), FIXED, ELASTIC, LocalSGD(period=1)], ids=str)
def test_a_schedule_of_epochs(strategy):
    work = Paced("restarts", every="epoch", n=24)
    result = train(work, strategy, workers=2, epochs=5)
    assert distance(result.model(), plain(work, 2, epochs=5)[0]) < EXACT


def test_workers_of_a_pipeline_follow_it():
    work = Paced("onecycle", n=24, batch=4, optimizer="adamw_groups")
    law = train(work, AllReduce(), workers=1, epochs=2)
    result = train(work, AllReduce(replica=Pipeline(stages=2, micro_batches=1)), workers=2, epochs=2)
    assert distance(result.model(), law.model()) < EXACT
    served = train(work, ParameterServer(shards=2, replica=Pipeline(stages=2, micro_batches=1)), workers=2, epochs=2)
    assert distance(served.model(), law.model()) < EXACT


# ---- resume, phases, deaths


@pytest.mark.parametrize("strategy", IN_STEP, ids=str)
@pytest.mark.parametrize(("schedule", "every"), [("onecycle", "step"), ("restarts", "epoch")])
def test_a_resumed_run_goes_on_counting(tmp_path, strategy, schedule, every):
    work = Paced(schedule, every, optimizer="momentum")  # 6 rounds an epoch with two workers
    train(work, strategy, workers=2, steps=9, checkpoint=tmp_path)
    resumed = train(work, strategy, workers=2, steps=18, checkpoint=tmp_path, resume=True)
    assert distance(resumed.model(), plain(work, 2, steps=18)[0]) < EXACT


@pytest.mark.parametrize("strategy", [LocalSGD(period=3), DiLoCo(period=3)], ids=lambda s: s.name)
@pytest.mark.parametrize("kind", [Paced, lambda optimizer: Hooked(optimizer=optimizer)], ids=["schedule", "hook"])
def test_workers_that_learn_apart_go_on_counting(tmp_path, strategy, kind):
    work = kind(optimizer="momentum")
    whole = train(work, strategy, workers=2, steps=18)
    train(work, strategy, workers=2, steps=9, checkpoint=tmp_path)  # the end of a run is a meeting, as here any third
    resumed = train(work, strategy, workers=2, steps=18, checkpoint=tmp_path, resume=True)
    assert distance(resumed.model(), whole.model()) < EXACT


@pytest.mark.parametrize("schedule", [("cosine", "step"), ("restarts", "epoch")])
def test_a_later_phase_goes_on_counting(schedule):
    work = Paced(*schedule, optimizer="momentum")
    law = plain(work, 2, epochs=4)[0]
    for phases in ([(1, FIXED), (1, AllReduce()), (1, ELASTIC), AllReduce()], [(2, AllReduce()), (1, ELASTIC), FIXED]):
        assert distance(train(work, phases, workers=2, epochs=4).model(), law) < EXACT


def died(work, strategy, victim, steps):
    """The result of a run in which somebody dies."""
    cluster = Watched()
    try:
        killer = cluster.kill_when(work.tag, steps * 2 // 3, (victim, 1))
        result = train(work, strategy, cluster, workers=2, steps=steps, checkpoint_every=4)
        killer.join(60)
    finally:
        cluster.close()
    assert not killer.is_alive()
    return result


@pytest.mark.parametrize(
    ("strategy", "victim"),
    [
        (AllReduce(), "WorkerActor"),
        (FIXED, "WorkerActor"),
        (FIXED, "ShardActor"),
        (ELASTIC, "WorkerActor"),
        (LocalSGD(period=3), "WorkerActor"),
        (ADMM(local_steps=4), "WorkerActor"),
    ],
    ids=str,
)
@pytest.mark.parametrize("hook", [False, True], ids=["schedule", "hook"])
def test_a_death_changes_nothing(strategy, victim, hook):
    options = {"optimizer": "momentum", "pause": 0.005, "tag": f"paced-{hook}-{strategy}-{victim}"}
    work = Hooked(**options) if hook else Paced("onecycle", **options)
    law = train(
        Hooked(optimizer="momentum") if hook else Paced("onecycle", optimizer="momentum"), strategy, workers=2, steps=24
    )
    result = died(work, strategy, victim, 24)
    assert distance(result.model(), law.model()) < EXACT, result.events


class Hooked(Small):
    """A step hook that lowers the rate."""

    def optimizer(self, params):
        optimizer = super().optimizer(params)

        def lower(optimizer, args, kwargs):
            for group in optimizer.param_groups:
                group["lr"] *= 0.9

        optimizer.register_step_post_hook(lower)
        return optimizer


@pytest.mark.parametrize("strategy", IN_STEP, ids=str)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw_groups"])
def test_a_hook_that_edits_groups_survives_resume_and_phase(tmp_path, strategy, optimizer):
    work = Hooked(optimizer=optimizer)
    law = plain(work, 2, steps=18)[0]
    train(work, strategy, workers=2, steps=9, checkpoint=tmp_path)
    resumed = train(work, strategy, workers=2, steps=18, checkpoint=tmp_path, resume=True)
    assert distance(resumed.model(), law) < EXACT
    phases = [(1, strategy), (1, AllReduce()), strategy]
    assert distance(train(work, phases, workers=2, steps=18).model(), law) < EXACT


def test_a_checkpoint_says_where_the_schedule_stands_and_what_the_groups_hold(tmp_path):
    work = Paced("onecycle", optimizer="momentum")
    train(work, FIXED, workers=2, steps=9, checkpoint=tmp_path / "paced")
    meta = checkpoint.load(tmp_path / "paced" / "step-00000009").meta
    expected = learning_rate.rates_of(learning_rate.recipe_of(work), Layout.of([("w", torch.zeros(1))])).at(8)
    assert meta["schedule"] == {
        "every": "step",
        "tick": 8,
        "groups": [{"lr": expected[0, "lr"], "momentum": expected[0, "momentum"]}],
    }
    train(Hooked(), FIXED, workers=2, steps=3, checkpoint=tmp_path / "hooked")
    meta = checkpoint.load(tmp_path / "hooked" / "step-00000003").meta
    edits = {name: numbers["group edits"] for name, numbers in meta["optimizer_numbers"].items()}
    assert edits.keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert list(edits.values()) == [[["lr", 0.1, 0.1 * 0.9 * 0.9 * 0.9]]] * 4


def test_a_resume_with_another_schedule_is_said_and_goes_on_with_its_own(tmp_path):
    train(Paced("onecycle"), workers=2, steps=6, checkpoint=tmp_path)
    result = train(Paced("function"), workers=2, steps=9, checkpoint=tmp_path, resume=True)
    assert any("was saved with the schedule" in event["message"] for event in result.events)
    train(Paced("function"), workers=2, steps=6, checkpoint=tmp_path / "same")
    same = train(Paced("function"), workers=2, steps=9, checkpoint=tmp_path / "same", resume=True)
    assert not any("was saved with the schedule" in event["message"] for event in same.events)


def test_a_checkpoint_without_such_entries_still_opens(tmp_path):
    work = Small(optimizer="momentum")
    train(work, workers=2, steps=6, checkpoint=tmp_path)
    meta = checkpoint.load(tmp_path / "step-00000006").meta
    assert "schedule" not in meta and not meta["optimizer_numbers"]
    resumed = train(work, workers=2, steps=9, checkpoint=tmp_path, resume=True)
    assert distance(resumed.model(), plain(work, 2, steps=9)[0]) < EXACT


class Other(Small):
    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.02)


def test_a_rate_that_the_workload_changes_between_two_runs_is_the_new_one(tmp_path):
    train(Hooked(), AllReduce(), workers=1, steps=4, checkpoint=tmp_path)
    before = train(Other(), AllReduce(), workers=1, steps=4, checkpoint=tmp_path, resume=True).model()
    after = train(Other(), AllReduce(), workers=1, steps=5, checkpoint=tmp_path, resume=True).model()
    batches = [b for epoch in range(1) for b in Other().data().batches(rank=0, size=1, seed=0, epoch=epoch)]
    batch = batches[4]
    optimizer = torch.optim.SGD(before.parameters(), lr=0.02)
    ((before(batch.x) - batch.y) ** 2).mean().backward()
    optimizer.step()
    assert distance(before, after) < EXACT


# ---- out of step: each push is applied with the rate of its round


class One(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))


class Tracing(torch.optim.SGD):
    """Plain SGD that writes down what it is given."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                importlib.import_module("test_learning_rate").PUSHES.append((p.grad.sum().item(), group["lr"]))
        super().step()


class Traced(rayps.Workload):
    """Row i has the gradient 2^i: the sum of a push says which rows are in it."""

    rows, workers = 40, 4

    def model(self):
        return One()

    def data(self):
        x = 2.0 ** torch.arange(self.rows, dtype=torch.float64).view(-1, 1)
        return rayps.data.tensors(x, x, batch_size=1)

    def loss(self, model, batch):
        return (model.w * batch.x).sum()

    def evaluate(self, model, batch):
        return {}

    def optimizer(self, params):
        return Tracing(params, lr=1.0)

    def schedule(self, optimizer):
        return lambda step: 1 / (1 + step)


@pytest.mark.parametrize(
    ("strategy", "scale"),
    [
        (ParameterServer(staleness=2), 4),
        (ParameterServer(shards=1, staleness=None), 4),
        (ParameterServer(staleness=2, replicas=0), 4),
        (ParameterServer(shards=2, staleness=None, replicas=1), 4),
        (Downpour(n_push=1), 1),
        (Downpour(n_push=3, n_fetch=4), 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("n_epochs", [2])
def test_a_push_is_applied_with_the_rate_of_its_last_round(strategy, scale, n_epochs):
    work = Traced()
    PUSHES.clear()
    train(work, strategy, workers=4, epochs=n_epochs)
    ends = {}  # by the rows of some rounds in a row of one worker: which of them are the last
    for rank in range(4):
        rows = [
            round(batch.x.item())
            for epoch in range(n_epochs)
            for batch in work.data().batches(rank=rank, size=4, seed=0, epoch=epoch)
        ]
        for end in range(len(rows)):
            for begin in range(max(0, end - 2), end + 1):
                ends.setdefault(sum(rows[begin : end + 1]), set()).add(end)
    scaled = [(total * scale, rate) for total, rate in PUSHES]
    pushes = [(rows, rate) for rows, rate in scaled if rows >= 1 and rows == int(rows)]  # not those of a probe
    assert len(pushes) >= (80 if scale == 4 else 24)
    for rows, rate in pushes:
        assert rate in {1 / (1 + end) for end in ends[int(rows)]}


def recipe(kind="function", optimizer=lambda p: torch.optim.SGD(p, lr=1.0)):
    return learning_rate.Recipe(optimizer, SCHEDULES[kind])


@pytest.mark.parametrize("elastic", [False, True])
def test_late_and_repeated_pushes_get_the_rate_of_their_round(elastic):
    """In any order, and said twice: w is minus the sum of what each push says times the rate of its round."""
    layout = Layout.of([("w", torch.zeros(1, dtype=torch.float64))])
    strategy = ParameterServer(staleness=None)
    if elastic:
        space = Space("s", 0, 2, strategy, layout, ((0, 1),))
        one, copy = (DenseSegment(space, 0, recipe()) for _ in range(2))
    else:
        one = Shard(Extent(layout, 0, 1), strategy, recipe(), torch.zeros(1, dtype=torch.float64), [0, 0])
    order = [(0, 0), (0, 2), (1, 0), (0, 1), (0, 2), (0, 3), (1, 2), (0, 1), (1, 1), (1, 0)]
    for rank, step in order:
        value = torch.full((1,), 2.0 + rank + step, dtype=torch.float64)
        if elastic:
            for change in one.push(rank, step, 1.0, memoryview(bytearray(value.numpy().tobytes()))):
                copy.replay(memoryview(change))
        else:
            one.push(rank, step, value, 1.0)
    law = -sum((2.0 + rank + step) / 2 * 0.9**step for rank, step in set(order))
    shards = [one.shard, copy.shard] if elastic else [one]
    for shard in shards:
        assert shard.params.item() == pytest.approx(law, abs=1e-14)


class SumOf(Strategy):
    """Needs each push of a round: its step is the sum of those with a weight."""

    topology = Servers()

    def on_round(self, shard, values, weights):
        found = [value for value, weight in zip(values, weights, strict=True) if weight]
        if found:
            shard.step(sum(found))


@pytest.mark.parametrize(
    "strategy",
    [ParameterServer(staleness=0), SumOf(), ParameterServer(staleness=3), ParameterServer(staleness=None), Downpour()],
    ids=["synchronous", "the sum of a round", "staleness 3", "asynchronous", "downpour"],
)
def test_a_segment_counts_the_steps_that_are_skipped_in_fp16_wherever_it_is(strategy):
    """A backup that begins at any push, a segment that is moved after each, and a checkpoint give the same rates."""
    layout = Layout.of([("w", torch.zeros(1, dtype=torch.float64))])
    space = Space("s", 0, 2, strategy, layout, ((0, 1),))
    made = replace(recipe(), skips=True)
    pairs = (
        "grad grad, skip skip, grad skip, none grad, skip none, none none, grad skip, skip skip, skip grad, grad grad"
    )
    rounds = [pair.split() for pair in pairs.split(", ")]  # of ranks 0 and 1; "none": a batch without rows
    one, moved = DenseSegment(space, 0, made), DenseSegment(space, 0, made)
    one.keep([4, 9])
    copies, law, skipped = [], 0.0, [0, 0]
    in_step = servers_of(strategy).in_step
    for step, kinds in enumerate(rounds):
        values = {rank: 2.0 + rank + step for rank, kind in enumerate(kinds) if kind == "grad"}
        if in_step:
            total = sum(values.values()) / (1 if isinstance(strategy, SumOf) else max(1, len(values)))
            law -= total * 0.9 ** (step - skipped[0])
            skipped = [count + ("skip" in kinds and not values) for count in skipped]
        for rank, kind in enumerate(kinds):
            if not in_step and kind == "grad":
                law -= values[rank] / (1 if isinstance(strategy, Downpour) else 2) * 0.9 ** (step - skipped[rank])
            data = b"" if kind == "skip" else struct.pack("d", values.get(rank, 0.0))
            copies.append(DenseSegment(space, 0, made))
            copies[-1].load(one.dump())
            for change in one.push(rank, step, float(kind == "grad"), memoryview(bytearray(data))):
                for copy in copies:
                    copy.replay(memoryview(change))
            moved.push(rank, step, float(kind == "grad"), memoryview(bytearray(data)))
            state, moved = moved.dump(), DenseSegment(space, 0, made)
            moved.load(state)
            skipped[rank] += not in_step and kind == "skip"
    counts = dict(enumerate(skipped))
    for segment in (one, moved, *copies):
        assert segment.shard.params.item() == pytest.approx(law, abs=1e-12)
        assert segment.ledger.skipped == counts
    for kept in (4, 9):
        part = part_of(one.part(kept), kept, 0)
        snapshot = Snapshot(layout, part.params, part.moments, positions=[kept] * 2, ledgers=[(0, 1, part.ledger)])
        state = SavedState(snapshot.to_state().tensors, json.loads(json.dumps(snapshot.to_state().meta)))
        snapshot = Snapshot.from_state(state)
        again = DenseSegment(space, 0, made)
        again.begin(snapshot.params, snapshot.ledger(0, 1), snapshot.moments, Boundary(0, -1))
        assert snapshot.skipped == again.ledger.skipped[0]
        for step, kinds in list(enumerate(rounds))[kept:]:
            for rank, kind in enumerate(kinds):
                data = b"" if kind == "skip" else struct.pack("d", 2.0 + rank + step if kind == "grad" else 0.0)
                again.push(rank, step, float(kind == "grad"), memoryview(bytearray(data)))
        assert again.shard.params.item() == pytest.approx(law, abs=1e-12) and again.ledger.skipped == counts


def test_servers_of_another_schedule_count_no_steps():
    layout = Layout.of([("w", torch.zeros(1, dtype=torch.float64))])
    space = Space("s", 0, 1, ParameterServer(), layout, ((0, 1),))
    for factory in (recipe(), lambda p: torch.optim.SGD(p, lr=1.0)):
        one = DenseSegment(space, 0, factory)
        one.begin(torch.zeros(1, dtype=torch.float64), Ledger([3], skipped={0: 2}), {}, Boundary(0, -1))
        one.push(0, 3, 0.0, memoryview(b""))
        assert one.ledger == Ledger([4])
    assert not learning_rate.recipe_of(Paced()).skips
    for precision, every, skips in (("fp16", "step", True), ("fp16", "epoch", False), ("bf16", "step", False)):
        work = Paced(every=every)
        work.precision = precision
        assert learning_rate.recipe_of(work).skips is skips


# ---- apart, federated, tables


def test_local_steps_are_counted_across_meetings():
    work = Paced("cosine", n=24)
    law = plain(work, 2, epochs=3)[0]
    assert distance(train(work, LocalSGD(period=1), workers=2, epochs=3).model(), law) < EXACT


class Clients(Paced):
    def data(self):
        data = super().data()
        return rayps.data.tensors(data.x, data.y, batch_size=self.batch, client=[i % 3 for i in range(self.n)])

    def evaluation_data(self):
        return super().data()


@pytest.mark.parametrize(("schedule", "every"), [("onecycle", "step"), ("function", "step"), ("cosine", "epoch")])
def test_federated_rounds(schedule, every):
    work = Clients(schedule, every, n=30)
    result = train(work, FedAvg(local_steps=1, batch_size=0), workers=2, epochs=6)
    torch.manual_seed(0)
    model = work.model()
    optimizer = work.optimizer(list(model.parameters()))
    scheduler = work.schedule(optimizer)
    scheduler = scheduler if hasattr(scheduler, "step") else torch.optim.lr_scheduler.LambdaLR(optimizer, scheduler)
    data = work.data()
    for _ in range(6):
        optimizer.zero_grad()
        ((model(data.x) - data.y) ** 2).mean().backward()
        rate = {**optimizer.param_groups[0]}  # each client begins a round with a fresh optimizer
        torch.optim.SGD(model.parameters(), lr=rate["lr"]).step()
        optimizer._opt_called = True
        scheduler.step()
    assert distance(result.model(), model) < 1e-9


KNOBS = {
    "sgd": (
        {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    ),
    "adagrad": ({"name": "adagrad", "lr": 0.1}, lambda p: torch.optim.Adagrad(p, lr=0.1)),
    "adam": ({"name": "adam", "lr": 0.01}, lambda p: torch.optim.SparseAdam(p, lr=0.01)),
}


# ---- what cannot be


class Bad(Small):
    def __init__(self, given, every="step"):
        super().__init__()
        self.given, self.schedule_every = given, every

    def schedule(self, optimizer):
        return self.given(optimizer)


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (
            Bad(lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o)),
            ["ReduceLROnPlateau", "metric", "CosineAnnealing"],
        ),
        (Bad(lambda o: 0.1), ["schedule(optimizer) returned float", "lambda step"]),
        (Bad(lambda o: lambda step: float("nan")), ["factor nan"]),
        (Bad(lambda o: 1 / 0), ["schedule() raised ZeroDivisionError"]),
        (Bad(lambda o: None, every="round"), ["schedule_every is 'round'", "'step' or 'epoch'"]),
        (
            Bad(lambda o: torch.optim.lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1), 2)),
            ["another optimizer"],
        ),
    ],
)
def test_a_schedule_that_cannot_be(work, words):
    with pytest.raises(WorkloadError) as caught:
        train(work, AllReduce(), workers=1, steps=2)
    for word in words:
        assert word in str(caught.value)


class Within(Small):
    def optimizer(self, params):
        optimizer = super().optimizer(params)
        torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return optimizer


@pytest.mark.parametrize("strategy", [AllReduce(), FIXED], ids=str)
def test_a_scheduler_made_in_optimizer_is_answered_with_schedule(strategy):
    with pytest.raises(WorkloadError, match=r"schedule\(self, optimizer\)"):
        train(Within(), strategy, workers=1, steps=2)


def test_a_schedule_that_ends_before_the_run_says_so():
    with pytest.raises(WorkloadError, match=r"schedule\(\) raised ValueError"):
        train(
            Bad(lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=3)),
            AllReduce(),
            workers=1,
            steps=8,
        )


def test_only_what_moves_is_kept_and_any_tick_can_be_asked_for():
    layout = Layout.of([("w", torch.zeros(4))])
    found = learning_rate.rates_of(recipe("onecycle", lambda p: torch.optim.Adam(p, lr=0.1)), layout)
    late = found.at(30)
    assert {key for _, key in late} == {"lr", "betas"}
    assert found.at(0) == {cell: found.at(0)[cell] for cell in late}
    assert found.at(30) == late

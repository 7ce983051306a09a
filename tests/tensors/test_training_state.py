"""Workers that learn apart: their states in checkpoints, resumed in the middle of a period and after deaths; phases
that end early; what a strategy says.
"""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from local_work import Loop, Normed
from process_cluster import ProcessCluster
from rayps_client.errors import ConfigError
from small_work import Small, Watched, distance, kinds, train

import rayps
from rayps.cluster.local import LocalCluster
from rayps.core.job.job_status import Status
from rayps.core.metrics import Rounds, make_history
from rayps.core.rows.phase_rounds import Calendar
from rayps.core.strategy.strategy import Phase
from rayps.core.strategy.strategy_families import LOCAL_UPDATES
from rayps.runtime.driver.driver import Driver
from rayps.runtime.driver.workload_job import WorkloadJob
from rayps.runtime.records.journal import Journal
from rayps.runtime.results.snapshots import assemble
from rayps.strategies.all_reduce import AllReduce
from rayps.strategies.base import Strategy
from rayps.strategies.catalogue import parse, parse_for_loop
from rayps.strategies.diloco import DiLoCo
from rayps.strategies.job import JobSpec
from rayps.strategies.local_sgd import LocalSGD
from rayps.strategies.parallel_sgd import ParallelSGD
from rayps.tensors.checkpoints import checkpoint
from rayps.tensors.flat import Layout
from rayps.tensors.snapshot import Snapshot
from rayps.tensors.training_state import TrainingState
from rayps.worker.plan import WorkerPart

EXACT = 1e-12
STRATEGIES = [
    LocalSGD(period=4),
    LocalSGD(period=7, momentum="average", compression="int8"),
    LocalSGD(period=7, momentum="reset", buffers="keep", warmup=9),
    ParallelSGD(rounds=3, compression="top_k:0.3"),
    ParallelSGD(rounds=2, merge="best", shuffle=False),
    DiLoCo(period=4, overlap=3, buckets=3),
    DiLoCo(period=7, overlap=2, buckets=2, compression="int8"),
]


def same(one, other):
    """Everything that a run goes on from, to the bit."""
    assert torch.equal(one.params, other.params)
    assert one.positions == other.positions and one.strategy == other.strategy and one.own.keys() == other.own.keys()
    for rank, mine in one.own.items():
        tensors, numbers = mine.named()
        others, other_numbers = other.own[rank].named()
        assert tensors.keys() == others.keys() and numbers == other_numbers
        for name, value in tensors.items():
            assert torch.equal(value, others[name]), (rank, name)
    assert one.shared.keys() == other.shared.keys()
    assert all(torch.equal(value, other.shared[name]) for name, value in one.shared.items())


# ------------------------------------------------------------------------------------------- resume


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_run_resumed_in_the_middle_of_a_period_is_the_whole_run(tmp_path, strategy):
    work = Normed(n=66, optimizer="momentum")  # 11 rounds an epoch
    whole = train(work, strategy, workers=2, epochs=2)
    kept = {}
    save = checkpoint.save

    def keep_all(folder, step, state, keep=2, **more):
        kept[step] = save(tmp_path / str(step), step, state, keep, **more)
        return kept[step]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "save", keep_all)
        slow = Normed(n=66, optimizer="momentum", pause=0.003)  # for the driver to ask in time
        again = train(slow, strategy, workers=2, epochs=2, checkpoint=tmp_path / "all", checkpoint_every=5)
    same(whole.snapshot, again.snapshot)  # checkpoints do not disturb
    assert min(kept) < 22
    for path in kept.values():
        resumed = train(work, strategy, workers=2, epochs=2, checkpoint=tmp_path / f"on-{path.name}", resume=str(path))
        same(whole.snapshot, resumed.snapshot)


def test_an_optimizers_numbers_and_steps_come_along(tmp_path):
    work = Small(n=60, optimizer="adamw_groups")
    whole = train(work, LocalSGD(period=7), workers=3, epochs=2)
    train(work, LocalSGD(period=7), workers=3, epochs=1, checkpoint=tmp_path)
    # an end is a meeting: so is the beginning of the second run
    loop = Loop(work, 3, 2)
    while loop.done < loop.total:
        loop.turn()
        if loop.done in (7, 14) or loop.done % 7 == 0:
            loop.meet()
    resumed = train(work, LocalSGD(period=7), workers=3, epochs=2, checkpoint=tmp_path, resume=True)
    assert resumed.snapshot.round == whole.snapshot.round == 14
    same(whole.snapshot, resumed.snapshot)
    assert distance(whole.model(), loop.models[0]) < EXACT


def test_with_another_number_of_workers_all_go_on_from_what_they_agreed_on(tmp_path):
    work = Small(n=60, optimizer="momentum")
    strategy = DiLoCo(period=8)
    first = train(work, strategy, workers=2, epochs=1, checkpoint=tmp_path)
    assert set(first.snapshot.own) == {0, 1}
    resumed = train(work, strategy, workers=3, epochs=2, checkpoint=tmp_path, resume=True)
    assert set(resumed.snapshot.own) == {0, 1, 2} and set(resumed.snapshot.shared) == {"theta", "v"}
    other = train(work, AllReduce(), workers=2, epochs=2, checkpoint=tmp_path / "other", resume=str(first.checkpoint))
    assert not other.snapshot.own and not other.snapshot.shared


def test_an_older_checkpoint_still_loads():
    layout = Layout.of([("w", torch.zeros(3))])
    state = Snapshot(layout, torch.arange(3.0), positions=[4, 4]).to_state()
    del state.meta["apart"]
    found = Snapshot.from_state(state)
    assert found.own == {} and found.shared == {} and found.ended == [] and found.strategy == ""


def test_states_of_workers_on_disk(tmp_path):
    layout = Layout.of([("a.w", torch.zeros(2)), ("a.b", torch.zeros(1))])
    own = {
        rank: TrainingState(
            torch.rand(3),
            {"a.w": {"m": torch.rand(2), "step": 3}, "a.b": {"m": torch.rand(1)}},
            {"n/x": torch.rand(4)},
            {"u": torch.rand(3), "n": torch.tensor(2.0)},
        )
        for rank in (0, 1, 11)
    }
    given = Snapshot(
        layout, torch.rand(3), positions=[1] * 3, strategy="mine", own=own, shared={"z": torch.rand(3)}, ended=[(10, 7)]
    )
    path = checkpoint.save(tmp_path, 1, given.to_state())
    found = Snapshot.from_state(checkpoint.load(path))
    same(given, found)
    assert found.ended == [(10, 7)]


# ------------------------------------------------------------------------------------------- deaths


@pytest.mark.chaos
@pytest.mark.parametrize("strategy", [LocalSGD(period=7, compression="int8"), DiLoCo(period=7, overlap=3)], ids=str)
def test_after_a_real_death_it_is_the_same_run(strategy):
    work = Small(n=150, optimizer="momentum", pause=0.03)  # 25 rounds an epoch
    whole = train(work, strategy, workers=2, epochs=2)
    cluster = ProcessCluster()

    def kill(progress):
        if progress.get("round", 0) >= 8 and not killed:
            killed.append(cluster.handles[1])
            cluster.kill(cluster.handles[1])

    killed = []
    try:
        result = rayps.train(
            work,
            strategy=strategy,
            workers=2,
            epochs=2,
            cluster=cluster,
            checkpoint_every=5,
            progress=kill,
            timeout=60.0,
        )
    finally:
        cluster.close()
    assert killed and kinds(result).count("restarted") == 1
    same(whole.snapshot, result.snapshot)


def test_a_death_among_threads():
    whole = train(Small(n=120, optimizer="adam"), DiLoCo(period=6, overlap=2), workers=2, epochs=2)
    work = Small(n=120, optimizer="adam", pause=0.003, tag="apart-death")
    cluster = Watched()
    cluster.kill_when(work.tag, 30, ("WorkerActor", 1))
    result = train(work, DiLoCo(period=6, overlap=2), cluster, workers=2, epochs=2, checkpoint_every=5)
    assert kinds(result).count("restarted") == 1
    same(whole.snapshot, result.snapshot)


# ------------------------------------------------------------------------------------------- ends early, and says


@dataclass(frozen=True)
class UntilRound(Strategy):
    """Local steps until a round; says how far it is."""

    last: int = 5
    name: ClassVar[str] = "until_round"
    loop: ClassVar[str] = LOCAL_UPDATES

    def round(self, w):
        w.step(w.grad(w.batch()))
        w.say(left=self.last - w.position, half=0.5)
        if w.rank == 0 and w.position == 2:
            w.event("told", "from rank 0", number=7)
        if w.position >= self.last:
            w.done, w.reason = True, "that is enough"

    def consensus(self, w):
        return w.mean(w.params, exact=True)


def test_a_strategy_may_be_done_before_the_end():
    work = Small(n=60)
    result = train(work, UntilRound(7), workers=2, epochs=3)
    assert result.history.num_rows == 7 and result.snapshot.round == 7 and result.snapshot.ended == [(30, 7)]
    met = next(event for event in result.events if event["kind"] == "met")
    assert "that is enough" in met["message"] and (met["round"], met["end"]) == (7, 30)
    assert result.history.column("left").to_pylist() == list(range(6, -1, -1))
    assert result.history.column("half").to_pylist() == [0.5] * 7
    told = [event for event in result.events if event["kind"] == "told"]
    assert len(told) == 1 and told[0]["message"] == "from rank 0" and told[0]["number"] == 7
    loop = Loop(work, 2, 1)
    for _ in range(7):
        loop.turn()
    assert distance(result.model(), loop.mean(loop.vectors(), [1, 1])) < EXACT
    assert result.metrics["loss"] == pytest.approx(
        ((result.model()(work.data().x) - work.data().y) ** 2).mean().item(), abs=EXACT
    )


def test_the_next_phase_begins_where_one_was_done(tmp_path):
    work = Small(n=60)
    phases = [(2, UntilRound(7)), (1, AllReduce())]
    result = train(work, phases, workers=2, checkpoint=tmp_path)
    assert result.snapshot.round == 17 and result.history.num_rows == 17
    assert result.history.column("strategy").to_pylist() == ["until_round"] * 7 + ["all_reduce"] * 10
    assert result.history.column("epoch").to_pylist() == [0] * 7 + [2] * 10
    halfway = train(work, phases, workers=2, checkpoint=tmp_path / "half", checkpoint_every=4)
    assert torch.equal(halfway.snapshot.params, result.snapshot.params)
    at = [path for path in (tmp_path / "half").glob("step-*") if path.name != "step-00000017"]
    assert at
    for path in at:
        resumed = train(work, phases, workers=2, checkpoint=tmp_path / path.name, resume=str(path))
        assert torch.equal(resumed.snapshot.params, result.snapshot.params) and resumed.snapshot.round == 17


def test_a_run_that_was_done_has_nothing_left_unless_it_gets_more(tmp_path):
    work = Small(n=60)
    first = train(work, UntilRound(7), workers=2, epochs=3, checkpoint=tmp_path)
    again = train(work, UntilRound(7), workers=2, epochs=3, checkpoint=tmp_path, resume=True)
    assert again.metrics == first.metrics and again.history.num_rows == 0
    more = train(work, UntilRound(9), workers=2, epochs=4, checkpoint=tmp_path, resume=True)
    assert more.history.num_rows == 2 and more.snapshot.round == 9


def test_a_calendar_that_is_cut():
    phases = [Phase(2, AllReduce()), Phase(1, LocalSGD()), Phase(None, AllReduce())]
    calendar = Calendar(phases, [10, 10, 10], 2, epochs=5, rounds=None)
    assert calendar.cut(20, 13) and not calendar.cut(20, 13)
    assert [(span.begin, span.end, span.epoch) for span in calendar.spans] == [(0, 13, 0), (13, 23, 2), (23, 43, 3)]
    assert calendar.rounds == 43 and calendar.epochs == 5
    assert calendar.at(13) is calendar.spans[1] and calendar.epoch_of(12) == 1 and calendar.epoch_of(13) == 2


def test_what_is_said_stands_beside_what_is_known():
    rounds = Rounds(2, 1, "mine")
    point = {
        "kind": "round",
        "round": 0,
        "epoch": 0,
        "loss": 1.0,
        "samples": 3,
        "seconds": 0.1,
        "compute": 0.1,
        "data": 0.0,
        "wait": 0.0,
        "move": 0.0,
        "bytes": 8,
        "lead": None,
        "said": {"loss": 9, "primal": 0.25},
    }
    merged = rounds.add([{**point, "rank": rank} for rank in (0, 1)])
    assert merged[0]["primal"] == 0.25 and merged[0]["loss"] == 1.0
    other = {**merged[0], "round": 1}
    del other["primal"]
    table = make_history([*merged, other])
    assert table.column("primal").to_pylist() == [0.25, None]


# ------------------------------------------------------------------------------------------- parts


def test_who_was_not_asked_together_gives_the_mean():
    """A checkpoint on leaving is of any round, at which not all may come."""
    layout = Layout.of([("w", torch.zeros(2))])
    parts = {
        rank: WorkerPart(3, None, {}, {}, torch.zeros(1), TrainingState(torch.tensor([float(rank), 1.0])))
        for rank in (0, 1, 2)
    }
    found = assemble(Snapshot(layout, torch.zeros(2)), parts, [])
    assert torch.equal(found.params, torch.tensor([1.0, 1.0])) and found.own.keys() == {0, 1, 2}


def test_a_job_that_is_stopped_goes_on_where_each_worker_was(tmp_path):
    """A stop may come in the middle of a period."""
    work = Small(n=300, optimizer="momentum", pause=0.02)
    strategy = LocalSGD(period=40)
    whole = train(work, strategy, workers=2, epochs=1)

    driver = Driver(
        WorkloadJob(
            work,
            JobSpec("x:Small", workers=2, epochs=1),
            Journal(on_progress=lambda at: driver.stop() if at.get("round", 0) >= 5 else None),
            checkpoints=tmp_path,
            phases=parse(strategy),
        )
    )
    cluster = LocalCluster()
    outcome = driver.run(cluster)
    cluster.close()
    assert outcome.status is Status.STOPPED, outcome.message
    saved = Snapshot.from_state(checkpoint.load(checkpoint.newest(tmp_path)))
    assert saved.round % 40 and 5 <= saved.round < 50
    assert torch.equal(saved.params, torch.stack([own.params for own in saved.own.values()]).mean(0))
    resumed = train(work, strategy, workers=2, epochs=1, checkpoint=tmp_path, resume=True)
    same(whole.snapshot, resumed.snapshot)


@pytest.mark.parametrize("text", ["parallel_sgd", "admm", "hogwild", "fedavg"])
def test_a_loop_of_ones_own_cannot_follow_it(text):
    with pytest.raises(ConfigError, match=rf"wrap cannot run {text}.*use rayps\.train"):
        parse_for_loop(text)


def test_a_strategys_state_does_not_go_to_another():
    layout = Layout.of([("w", torch.zeros(2))])
    given = Snapshot(
        layout,
        torch.zeros(2),
        positions=[1, 1],
        strategy="a",
        own={0: TrainingState(torch.zeros(2)), 1: TrainingState(torch.zeros(2))},
        shared={"z": torch.zeros(2)},
    )
    for strategy, workers, own, shared in (("a", 2, True, True), ("a", 3, False, True), ("b", 2, False, False)):
        state = dataclasses.replace(given)
        state.enter_strategy(strategy, workers)
        assert (bool(state.own), bool(state.shared), state.strategy) == (own, shared, strategy)


def test_the_catalogue_has_them():
    for text in ("2*all_reduce > local_sgd:period=8", "parallel_sgd:rounds=4", "diloco:period=100,compression=int8"):
        assert parse(text)[-1].strategy.loop == LOCAL_UPDATES

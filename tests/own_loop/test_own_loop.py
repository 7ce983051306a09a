"""A loop of one's own as a run with a record: numbers, saved states, parameters, deaths; on threads and processes."""

import contextlib
import functools
import importlib
import math
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from process_cluster import ProcessCluster
from rayps_client.errors import ActorDied, CheckpointError, ClusterError, ConfigError, TrainingError, WorkloadError
from small_work import SEEN, Small, distance, plain, vector

import rayps
from rayps.cli import main as cli
from rayps.cluster.code_folder import JobCode
from rayps.cluster.local import LocalCluster
from rayps.comm.ring.bucketed_mean import SentBuckets, SharedMemoryMean
from rayps.core.job.job_status import Status
from rayps.runtime.driver.driver import Driver
from rayps.runtime.own_loop.log_points import LATE_SECONDS, OPEN, QUIET_SECONDS, LogPoints, numbers_of
from rayps.runtime.own_loop.loop_job import LoopJob
from rayps.runtime.own_loop.named import add_defaults, choose_arguments
from rayps.runtime.own_loop.rounds import RoundThread
from rayps.runtime.own_loop.same_rows import SAME_ROWS
from rayps.runtime.own_loop.state import PartsBySave, SavedPart, checkpoint_of, decode_value, encode_value, parts_of
from rayps.runtime.records.journal import Journal
from rayps.strategies.job import JobSpec
from rayps.tensors.checkpoints import checkpoint
from rayps.worker.exchange.buckets import Buckets

EXACT = 1e-12


class Death(BaseException):
    """What ends a worker that is a thread, as a kill ends a process."""


class Fixed(Small):
    """Its first parameters depend on nothing that threads share."""

    def model(self):
        model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)).double()
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / 3)
        return model


def run(function, workers=2, **options):
    options = {"cluster": LocalCluster(), "timeout": 20.0, "progress": False} | options
    return rayps.run(function, workers=workers, **options)


def loop(work, strategy=None, *, steps=None, save=True, die=None, marks=None, back=None, schedule=None, end=None):
    """A loop over one epoch that logs and saves each step; `die` is (rank, step) of a death, once."""

    def train_fn():
        here = rayps.world()
        model = work.model()
        optimizer = work.optimizer(list(model.parameters()))
        rayps.wrap(model, optimizer, strategy, steps=steps, schedule=schedule)
        begun = (rayps.restore() or {"step": 0})["step"]
        if marks is not None:
            with marks.open("a") as file:
                file.write(f"{begun} ")
        for step, batch in enumerate(work.data().batches(rank=here.rank, size=here.size, seed=0, epoch=0)):
            if step < begun:
                continue
            if step == end:
                break
            optimizer.zero_grad()
            optimizer.samples = batch.size
            if batch.size:
                loss = ((model(batch.x) - batch.y) ** 2).mean()
                if back is None:
                    loss.backward()
                else:
                    back(optimizer, model, batch)
                rayps.log(loss=loss, samples=batch.size, step=step)
            optimizer.step()
            if save:
                rayps.save({"step": step + 1})
            if die is not None and (here.rank, step) == die[:2] and not Path(die[2]).exists():
                Path(die[2]).touch()
                while len(die) > 3 and not list(die[3].glob("step-0000000[2-9]")):  # the driver knows the first state
                    time.sleep(0.02)
                raise Death("a worker's death")
        return vector(model)

    return train_fn


# ---- state


def test_a_state_is_the_same_after_the_file():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    given = {
        "model": model,
        "optimizer": optimizer,
        "nested": [1, 2.5, None, "text", (True, float("inf"))],
        3: {"half": torch.ones(2, dtype=torch.bfloat16), "view": torch.arange(6.0)[::2]},
    }
    tensors = {}
    found = decode_value(encode_value(given, tensors), tensors)
    assert found["nested"] == given["nested"]
    assert torch.equal(found[3]["half"], given[3]["half"])
    assert torch.equal(found[3]["view"], given[3]["view"])
    other = torch.optim.Adam(torch.nn.Linear(2, 2).parameters())
    other.load_state_dict(found["optimizer"])
    assert str(other.state_dict()) == str(optimizer.state_dict())
    assert all(torch.equal(found["model"][k], v) for k, v in model.state_dict().items())


def test_what_cannot_be_saved_is_named():
    with pytest.raises(ConfigError, match=r"cannot save state\.a\.1, which is lock"):
        encode_value({"a": [0, threading.Lock()]}, {})


def test_a_checkpoint_has_the_parts_of_all_ranks(tmp_path):
    parts = {}
    for rank in range(2):
        tensors = {}
        tree = encode_value({"x": torch.full((2,), float(rank))}, tensors)
        parts[rank] = SavedPart(4, 7, tensors, tree)
    path = checkpoint.save(tmp_path, 4, checkpoint_of(parts))
    found = parts_of(checkpoint.load(path), 2, str(path))
    assert [(part.number, part.steps, part.content("x").tolist()) for part in found] == [
        (4, 7, [0.0, 0.0]),
        (4, 7, [1.0, 1.0]),
    ]
    with pytest.raises(CheckpointError, match="saved by 2 workers, and this run has 3"):
        parts_of(checkpoint.load(path), 3, str(path))


def test_a_save_is_complete_with_all_parts():
    gathering = PartsBySave(2)
    assert gathering.add(0, SavedPart(1, 1)) is None
    assert gathering.add(0, SavedPart(2, 2)) is None
    assert set(gathering.add(1, SavedPart(1, 1))) == {0, 1}
    assert "2 times on worker-0 and 1 times on worker-1" in gathering.uneven()
    assert set(gathering.add(1, SavedPart(2, 2))) == {0, 1}
    assert gathering.uneven() is None


# ---- numbers


def point(rank, step, samples=1.0, **numbers):
    return {"kind": "round", "rank": rank, "round": step, "samples": samples, "seconds": 0.5, "numbers": numbers}


@pytest.mark.parametrize(("ahead", "paired"), [(8, 4), (9, 12), (30, 33)])
def test_a_rank_that_is_replaced_far_behind_completes_states_again(ahead, paired):
    saves = PartsBySave(3)
    for number in range(1, 4):
        assert [saves.add(rank, SavedPart(number, 0)) is not None for rank in range(3)] == [False, False, True]
    saves.continue_alone(1)
    for number in range(4, 4 + ahead):
        assert saves.add(0, SavedPart(number, 0)) is None and saves.add(2, SavedPart(number, 0)) is None
    found = saves.add(1, SavedPart(4, 0))  # its first save after the state 3, from which it continues
    assert {rank: part.number for rank, part in found.items()} == dict.fromkeys(range(3), saves.complete)
    assert saves.complete == paired, "at most eight states wait for a rank"
    for rank in (0, 2):
        saves.add(rank, SavedPart(paired + 1, 0))
    assert saves.add(1, SavedPart(5, 0)) is not None and saves.complete == paired + 1
    for number in range(6, saves.counts[0] + 1):
        saves.add(1, SavedPart(number, 0))
    assert saves.uneven() is None, "the saves of a rank are counted as it called them"


def test_logged_numbers_are_means_weighted_by_samples():
    points = LogPoints(2, "all_reduce")
    points.add([point(0, 0, 1, loss=1.0, only=5.0)], 0.0)
    points.add([point(1, 1, 3, loss=9.0)], 0.0)
    [first] = points.merged(0.0)  # worker-1 has gone past step 0
    assert numbers_of(first) == {"loss": 1.0, "only": 5.0}
    points.add([point(0, 1, 1, loss=1.0)], 0.0)
    [second] = points.merged(0.0)
    assert numbers_of(second) == {"loss": 7.0}
    assert second["samples"] == 4


@pytest.mark.parametrize(("requirements", "more"), [((), 0.0), (("einops==0.8.0",), 900.0)])
def test_workers_get_one_shared_code_and_the_time_to_install_requirements(tmp_path, requirements, more):
    """Each worker got the archive by itself, and the ring gave up while the other hosts installed packages."""
    shared, given = [], []

    class Recording(LocalCluster):
        def share(self, value):
            shared.append(value)
            return value

        def spawn(self, target, packed, place, *, code, **options):
            given.append((place, code))
            if len(given) == 2:
                raise ClusterError("recorded")

    code = JobCode("job", archive=b"1", requirements=requirements)
    driver = Driver(
        LoopJob(lambda: None, JobSpec(run="test:loop", workers=2, timeout=7.0), Journal(tmp_path), code=code)
    )
    assert driver.run(Recording()).message == "recorded"
    assert shared == [code] and all(found is code for _, found in given)
    assert [(place.timeout, place.start) for place, _ in given] == [(7.0, 7.0 + more)] * 2


def test_a_number_that_is_not_finite_is_one_warning():
    def train_fn():
        for step in range(5):
            rayps.log(loss=float("nan") if step > 2 else 1.0, step=step)

    journal = Journal()
    driver = Driver(LoopJob(train_fn, JobSpec(run="test:loop", workers=2, timeout=20.0), journal))
    assert driver.run(LocalCluster()).status is Status.SUCCEEDED
    [event] = [event for event in journal.events if event["kind"] == "warning"]
    assert "loss is nan in rayps.log of step 3" in event["message"]
    assert [point["samples"] for point in journal.points] == [0] * 5


def test_ranks_count_alike_without_samples():
    points = LogPoints(2, "all_reduce")
    points.add([point(0, 0, None, loss=1.0), point(1, 0, None, loss=4.0)], 0.0)
    [merged] = points.merged(0.0)
    assert (merged["loss"], merged["samples"]) == (2.5, 0)


def test_the_parameters_of_a_run_have_the_defaults():
    def train_fn(n, lr: float = 0.1, epochs: int = 6, other=object()):
        pass

    assert add_defaults(train_fn, {"n": 3, "lr": 0.3}) == {"n": 3, "lr": 0.3, "epochs": 6}


def test_only_one_rank_may_log_and_a_late_number_gives_the_step_again():
    points = LogPoints(2, "all_reduce")
    points.add([point(0, 0, loss=1.0)], 10.0)
    assert points.merged(10.0) == []
    assert len(points.merged(10.0 + QUIET_SECONDS)) == 1
    points.add([point(1, 0, loss=3.0)], 20.0)
    [again] = points.merged(20.0)
    assert again["loss"] == 2.0


def test_numbers_of_numpy_and_torch_are_logged():
    def train_fn():
        rayps.log(a=np.float32(0.5), b=np.array(2.0), c=torch.tensor([3]), d=np.int64(4), samples=np.float32(8), step=0)
        for value in (np.ones(2), "1", 1j, np.array("a")):
            with pytest.raises(ConfigError, match="give a number"):
                rayps.log(e=value)

    journal = Journal()
    driver = Driver(LoopJob(train_fn, JobSpec(run="test:loop", workers=1, timeout=20.0), journal))
    assert driver.run(LocalCluster()).status is Status.SUCCEEDED
    [point] = journal.points
    assert [point[name] for name in "abcd"] == [0.5, 2.0, 3.0, 4.0]
    assert point["samples"] == 8


def test_a_rank_that_stops_logging_does_not_hold_back_the_history():
    points = LogPoints(2, "all_reduce")
    points.add([point(0, 0, loss=1.0), point(1, 0, loss=3.0)], 0.0)
    assert [p["loss"] for p in points.merged(0.0)] == [2.0]
    points.add([point(0, 1, loss=1.0)], 0.0)
    assert points.merged(LATE_SECONDS - 1) == []
    assert [p["round"] for p in points.merged(LATE_SECONDS)] == [1]
    points.add([point(0, step, loss=1.0) for step in range(2, 1000)], 20.0)
    assert [p["round"] for p in points.merged(20.0)] == list(range(2, 1000 - OPEN))
    points.add([point(1, 900, loss=3.0)], 20.0)  # late, and of a step that is kept
    assert [(p["round"], p["loss"]) for p in points.merged(20.0)] == [(900, 2.0)]
    points.add([point(1, 5, loss=3.0)], 20.0)  # too late: the point of step 5 keeps the number of rank 0
    assert points.merged(20.0) == []
    assert [p["round"] for p in points.merged(30.0)] == list(range(1000 - OPEN, 1000))


# ---- parameters


def test_parameters_are_checked_before_any_worker_starts():
    def train_fn(lr: float = 0.1, name: str = "a"):
        return lr, name

    assert run(train_fn, params={"lr": 1}) == [(1, "a")] * 2
    assert run(lambda: rayps.params()["lr"], params={"lr": 0.5}) == [0.5] * 2
    for params, words in [({"rate": 1}, "its arguments are lr, name"), ({"lr": "x"}, "type float")]:
        with pytest.raises(ConfigError, match=words):
            choose_arguments(train_fn, params)
    with pytest.raises(ConfigError, match="needs a value for its argument 'steps'"):
        run(lambda steps: steps)


# ---- the law: saved each step, a death changes nothing


@pytest.mark.parametrize(
    "strategy", ["all_reduce", "all_reduce:compression=top_k:0.5", "local_sgd:period=3", "diloco:period=3"]
)
@pytest.mark.parametrize("folder", [True, False])
def test_after_a_death_the_result_is_the_same(strategy, folder, tmp_path):
    work = Fixed(n=40, batch=4, optimizer="adam")
    whole = run(loop(work, strategy, steps=5), workers=2)
    marks = tmp_path / "marks"
    died = loop(work, strategy, steps=5, die=(1, 2, str(tmp_path / "died")), marks=marks)
    found = run(died, workers=2, max_failures=1, checkpoint=tmp_path / "states" if folder else None)
    assert all(torch.equal(a, b) for a, b in zip(found, whole, strict=True))
    begun = [int(each) for each in marks.read_text().split()]
    assert begun[:2] == [0, 0]
    assert len(begun) == 4
    assert begun[2] == begun[3] <= 3


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize(
    "strategy",
    [
        "parameter_server",
        "parameter_server:shards=2",
        "parameter_server:shards=2,replicas=1",
        "parameter_server:compression=top_k:0.5",
        "all_reduce",
        "downpour:n_push=2,n_fetch=3",
    ],
)
def test_after_a_death_schedules_and_the_optimizers_of_servers_continue(strategy, optimizer, tmp_path):
    workers = 1 if "downpour" in strategy else 2  # several workers of downpour push in any order
    work = Fixed(n=40, batch=4, optimizer=optimizer)
    schedule = functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.7)
    whole = run(loop(work, strategy, steps=5, schedule=schedule), workers=workers)
    marks, die = tmp_path / "marks", (workers - 1, 2, str(tmp_path / "died"), tmp_path / "states")
    died = loop(work, strategy, steps=5, die=die, marks=marks, schedule=schedule)
    found = run(died, workers=workers, max_failures=1, checkpoint=tmp_path / "states")
    assert 1 <= int(marks.read_text().split()[-1]) <= 3
    assert all(torch.equal(a, b) for a, b in zip(found, whole, strict=True))


def test_a_resumed_run_has_the_state_of_other_servers(tmp_path):
    work = Fixed(n=40, batch=4, optimizer="adam")
    whole = run(loop(work, "parameter_server:shards=3"))
    run(loop(work, "parameter_server:shards=2", end=2), checkpoint=tmp_path / "states")
    found = run(loop(work, "parameter_server:shards=3"), checkpoint=tmp_path / "states", resume=True)
    assert all(distance(a, b) < EXACT for a, b in zip(found, whole, strict=True))


def test_without_a_save_it_starts_anew_and_says_so(tmp_path):
    work = Fixed(n=24, batch=4)
    spec = JobSpec(run="test:loop", workers=2, timeout=20.0)
    journal = Journal()
    died = loop(work, "all_reduce", save=False, die=(0, 1, str(tmp_path / "died")))
    driver = Driver(LoopJob(died, spec, journal))
    outcome = driver.run(LocalCluster())
    assert outcome.status is Status.SUCCEEDED
    [event] = [event for event in journal.events if event["kind"] == "restarted"]
    assert "start anew, because rayps.save has kept no state yet" in event["message"]
    assert distance(driver.job.results[0], plain(work, 2, epochs=1)[0]) < EXACT
    assert [p["round"] for p in journal.points][-1] == 2


def test_a_loop_without_wrap_goes_on_in_its_history(tmp_path):
    def train_fn(folder):
        begun = (rayps.restore() or {"step": 0})["step"]
        for step in range(begun, 6):
            rayps.log(loss=float(step))
            rayps.save({"step": step + 1})
            if step == 3 and not (folder / "died").exists() and rayps.world().rank == 1:
                while not list((folder / "states").glob("step-0000000[3-9]")):
                    time.sleep(0.02)
                (folder / "died").touch()
                raise Death("a worker's death")

    journal = Journal()
    spec = JobSpec(run="test:loop", workers=2, timeout=20.0, max_failures=1)
    driver = Driver(LoopJob(functools.partial(train_fn, tmp_path), spec, journal, checkpoints=tmp_path / "states"))
    assert driver.run(LocalCluster()).status is Status.SUCCEEDED
    assert [event["kind"] for event in journal.events].count("restarted") == 1
    newest = {point["round"]: point["loss"] for point in journal.points}
    assert newest == {step: float(step) for step in range(6)}


@pytest.mark.parametrize("ranks", [(0, 1), (0,)])
def test_the_numbers_of_a_saved_state_are_in_the_history_before_it(tmp_path, monkeypatch, ranks):
    """A driver that is killed after it has written a state continues from there, and repeats no earlier step."""

    def train_fn():
        for step in range(4):
            if rayps.world().rank in ranks:
                rayps.log(loss=float(step))
            rayps.save({"step": step + 1})

    def save(folder, number, *args):
        found.append((number, len({point["round"] for point in journal.points})))
        return write(folder, number, *args)

    journal, found, write = Journal(), [], checkpoint.save
    monkeypatch.setattr(checkpoint, "save", save)
    spec = JobSpec(run="test:loop", workers=2, timeout=20.0)
    assert Driver(LoopJob(train_fn, spec, journal, checkpoints=tmp_path)).run(LocalCluster()).status is Status.SUCCEEDED
    assert found and all(rounds >= number for number, rounds in found), found
    assert [point["round"] for point in journal.points] == list(range(4)), "each once"


def test_a_loop_that_starts_anew_may_log_its_first_steps_again(tmp_path):
    def train_fn():
        for step in range(3):
            rayps.log(loss=1.0, step=step)
            rayps.save({"best": step})

    for resume in (False, True):
        run(train_fn, workers=1, checkpoint=tmp_path, resume=resume)


def test_a_job_keeps_as_many_states_as_it_says_and_has_its_seed_and_threads(tmp_path):
    def train_fn():
        for n in range(4):
            rayps.save({"n": n})
        return torch.rand(2), torch.get_num_threads()

    before, found = torch.get_num_threads(), []
    try:
        for seed in (0, 0, 7):
            spec = JobSpec(run="test:loop", timeout=20.0, seed=seed, keep_checkpoints=3, resources={"cpu": 2.0}).check()
            driver = Driver(LoopJob(train_fn, spec, Journal(), checkpoints=tmp_path / f"{len(found)}"))
            assert driver.run(LocalCluster()).status is Status.SUCCEEDED
            assert len(list((tmp_path / f"{len(found)}").glob("step-????????"))) == 3
            found += driver.job.results
    finally:
        torch.set_num_threads(before)
    (first, threads), (second, _), (other, _) = found
    assert threads == 2
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_too_many_deaths_end_the_run(tmp_path):
    def train_fn():
        if rayps.world().rank == 1:
            raise Death("a worker's death")

    with pytest.raises(TrainingError, match="that was failure 2, and max_failures is 1"):
        run(train_fn, max_failures=1)
    with pytest.raises(ActorDied, match="worker-1 of the run died"):
        run(train_fn)


def test_a_run_resumes_from_its_folder(tmp_path):
    def train_fn(upto: int = 0):
        begun = rayps.restore() or {"n": 0}
        for n in range(begun["n"], upto):
            rayps.save({"n": n + 1, "x": torch.full((3,), float(n))})
        return begun["n"], rayps.restore() is None

    folder = tmp_path / "states"
    assert run(train_fn, checkpoint=folder, params={"upto": 3}) == [(0, True)] * 2
    assert run(train_fn, checkpoint=folder, params={"upto": 5}, resume=True) == [(3, False)] * 2
    with pytest.raises(CheckpointError, match="earlier run"):
        run(train_fn, checkpoint=folder)


def test_a_mistake_is_not_repeated(tmp_path):
    calls = tmp_path / "calls"

    def train_fn():
        with calls.open("a") as file:
            file.write("called ")
        raise ValueError("my own mistake")

    with pytest.raises(WorkloadError, match="my own mistake"):
        run(train_fn, workers=1, max_failures=3)
    assert calls.read_text() == "called "


def test_an_iterator_that_has_ended_is_named():
    def train_fn():
        batches = iter([1])
        while True:
            next(batches)

    with pytest.raises(WorkloadError, match=r"(?s)train_fn\(\) raised StopIteration \(.*iter\(loader\)"):
        run(train_fn, workers=1)


def test_kill_9_of_a_worker_changes_nothing(tmp_path):
    gone = tmp_path / "gone"

    def train_fn(dies: bool):
        import signal

        begun = rayps.restore() or {"step": 0, "x": torch.ones(3)}
        x = begun["x"]
        for step in range(begun["step"], 6):
            x = x * 1.5 + step + torch.rand(3)
            rayps.save({"step": step + 1, "x": x}, every_rank=True)
            if dies and step == 3 and rayps.world().rank == 1 and not gone.exists():
                gone.touch()
                while not list((tmp_path / "states").glob("step-????????")):  # until a state is complete
                    time.sleep(0.05)
                os.kill(os.getpid(), signal.SIGKILL)
        return x, begun["step"]

    with contextlib.closing(ProcessCluster()) as cluster:
        options = {"cluster": cluster, "timeout": 60.0}
        whole = run(train_fn, params={"dies": False}, **options)
        folder = tmp_path / "states"
        found = run(train_fn, params={"dies": True}, checkpoint=folder, max_failures=1, **options)
        assert gone.exists()
        for (x, _), (undisturbed, _) in zip(found, whole, strict=True):
            assert torch.equal(x, undisturbed)
        assert not torch.equal(found[0][0], found[1][0])  # each rank has random numbers of its own
        assert {begun for _, begun in found} <= {1, 2, 3, 4}
        assert len({begun for _, begun in found}) == 1
    assert checkpoint.newest(tmp_path / "states").name == "step-00000006"


# ---- means and modules


@pytest.mark.parametrize("workers", [1, 3])
def test_a_mean_over_workers_is_equal_on_all(workers):
    def train_fn():
        rank = rayps.world().rank
        return rayps.mean(rank), rayps.mean(torch.tensor(float(rank)), samples=rank), rayps.mean(1, samples=0)

    for plain_mean, weighted, empty in run(train_fn, workers=workers):
        assert plain_mean == (workers - 1) / 2
        assert weighted == pytest.approx(5 / 3) if workers > 1 else math.isnan(weighted)
        assert math.isnan(empty)
    for value, samples in [("1", 1), (torch.ones(2), 1), (1.0, -1), (1.0, float("nan"))]:
        with pytest.raises(ConfigError, match=r"rayps\.mean was given"):
            run(lambda value=value, samples=samples: rayps.mean(value, samples=samples), workers=1)


def test_a_worker_that_fails_ends_the_mean_of_the_others():
    def train_fn():
        rayps.mean(1.0)
        if rayps.world().rank:
            raise ValueError("my own mistake")
        rayps.mean(2.0)

    with pytest.raises(WorkloadError, match="my own mistake"):
        run(train_fn)


@pytest.mark.parametrize("strategy", ["all_reduce", "parameter_server:shards=2", "local_sgd:period=1"])
def test_the_modules_of_a_saved_state_are_exported(strategy, tmp_path, capsys):
    def make():
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))

    def train_fn():
        model, average = make(), make()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        rayps.wrap(model, optimizer, strategy, steps=3)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 3)).square().mean().backward()
            optimizer.step()
        rayps.save({"nets": {"average": average}, "optimizer": optimizer, "step": 3})
        return model.state_dict(), average.state_dict()

    found = run(train_fn, checkpoint=tmp_path / "states")
    assert cli.main(["export", str(tmp_path / "states"), str(tmp_path / "out")]) == 0
    assert "model" in capsys.readouterr().err
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "model.safetensors",
        "nets.average.safetensors",
    ]
    for name, expected in (("out", found[0][0]), ("out/nets.average.safetensors", found[0][1])):
        read = rayps.load_state(make(), tmp_path / name).state_dict()
        assert all(torch.equal(read[key], value) for key, value in expected.items())
    with pytest.raises(CheckpointError, match=r"rayps export .*step-00000001 FOLDER"):
        rayps.load_state(make(), tmp_path / "states" / "step-00000001")
    assert cli.main(["export", str(tmp_path / "states"), str(tmp_path / "no"), "--workload", "a.py:A"]) == 2
    assert "leave --workload out" in capsys.readouterr().err


def test_a_state_without_a_module_is_not_exported(tmp_path, capsys):
    run(lambda: rayps.save({"step": 1}), checkpoint=tmp_path / "states")
    assert cli.main(["export", str(tmp_path / "states"), str(tmp_path / "out")]) == 2
    assert "has no module: save one in the loop" in capsys.readouterr().err


# ---- data


@pytest.mark.parametrize("ahead", [None, 0, 2])
def test_a_loop_reads_ahead_as_its_data_says(ahead):
    data = rayps.data.tensors(torch.arange(20.0), batch_size=3)
    loaded = data if ahead is None else data.loaded_by(ahead)

    def train_fn():
        here = rayps.world()
        found = [[batch.x.tolist() for batch in rayps.batches(loaded, epoch=epoch, start=epoch)] for epoch in range(2)]
        return found, [pid for loader in here.loaders.values() for pid in loader.pids], here.rank

    for found, pids, rank in run(train_fn, timeout=60.0):
        plain_ones = [
            [batch.x.tolist() for batch in data.batches(rank=rank, size=2, seed=0, epoch=epoch, start=epoch)]
            for epoch in range(2)
        ]
        assert found == plain_ones
        assert len(pids) == (ahead or 0)
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)  # they have ended with the function
    with pytest.raises(ConfigError, match=r"rayps\.run"):
        rayps.batches(data)


# ---- wrap


def halves(optimizer, model, batch, quiet=True):
    """Two backward passes over the halves of a batch, the first of them in no_sync."""
    cut = batch.size // 2
    first = ((model(batch.x[:cut]) - batch.y[:cut]) ** 2).sum() / batch.size
    with optimizer.no_sync() if quiet else contextlib.nullcontext():
        first.backward()
    (((model(batch.x[cut:]) - batch.y[cut:]) ** 2).sum() / batch.size).backward()


def loud(optimizer, model, batch):
    halves(optimizer, model, batch, quiet=False)


def changing(optimizer, model, batch):
    """In every other step a pass that zero_grad drops."""
    if rayps.world().steps % 2:
        ((model(batch.x) - batch.y) ** 2).mean().backward()
        optimizer.zero_grad(set_to_none=bool(rayps.world().rank))
    loud(optimizer, model, batch)


def quiet_last(optimizer, model, batch):
    """All passes in no_sync: everything leaves at the step."""
    with optimizer.no_sync():
        halves(optimizer, model, batch)


@pytest.mark.parametrize("back", [None, halves, loud, changing, quiet_last])
@pytest.mark.parametrize("strategy", ["all_reduce:bucket_mb=0.0001", "parameter_server:shards=2"])
def test_gradients_that_leave_during_backward_equal_plain_torch(back, strategy):
    work = Fixed(n=31, batch=4, optimizer="adam")
    for found in run(loop(work, strategy, save=False, back=back), workers=3):
        assert distance(found, plain(work, 3, epochs=1)[0]) < EXACT


@pytest.mark.parametrize(
    ("strategy", "early"), [("all_reduce:bucket_mb=0.0001", True), ("all_reduce:bucket_mb=0", False)]
)
def test_buckets_leave_before_backward_has_ended(strategy, early, monkeypatch):
    SEEN.clear()

    def watch(kind):
        submit = kind.submit

        def watched(self, i):
            SEEN["in backward" if SEEN["backward", threading.get_ident()] else "after it"] += 1
            submit(self, i)

        monkeypatch.setattr(kind, "submit", watched)

    for kind in (SharedMemoryMean, SentBuckets):
        watch(kind)
    finish = Buckets.finish

    def after_backward(self):
        SEEN["backward", threading.get_ident()] = 0
        return finish(self)

    monkeypatch.setattr(Buckets, "finish", after_backward)

    def train_fn():
        seen, thread = importlib.import_module("small_work").SEEN, threading.get_ident()  # the function is a copy
        model = Fixed().model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        rayps.wrap(model, optimizer, strategy)
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 5, dtype=torch.float64)).mean()
            seen["backward", thread] = 1
            loss.backward()
            optimizer.step()

    run(train_fn)
    # 2 ranks send 2 buckets in each of 4 steps, of which the first finds out how many gradients there are
    assert (SEEN["in backward"], SEEN["after it"]) == ((12, 4) if early else (0, 8))


@pytest.mark.parametrize(
    "strategy", ["all_reduce", "all_reduce:bucket_mb=0.0001", "parameter_server", "local_sgd:period=1"]
)
@pytest.mark.parametrize("weights", [(0.5, 0.5), (0.25, 0.75), (1.5, 0.5), (1, 0)])
def test_samples_are_a_weight_that_may_be_a_fraction(strategy, weights):
    def train_fn():
        here = rayps.world()
        model = torch.nn.Linear(1, 1, bias=False).double()
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        rayps.wrap(model, optimizer, strategy, steps=2)
        for _ in range(2):
            optimizer.zero_grad()
            optimizer.samples = weights[here.rank]
            (model.weight.sum() * (1.0, 3.0)[here.rank]).backward()  # the gradients are 1 and 3
            optimizer.step()
        return model.weight.item()

    mean = (weights[0] + 3 * weights[1]) / sum(weights)
    assert run(train_fn) == pytest.approx([-2 * mean] * 2, abs=EXACT)


def test_a_worker_that_fails_before_its_first_round_gives_its_own_reason(monkeypatch):
    def no_start(self, view):
        raise ConfigError("the reason")

    def train_fn():
        model = torch.nn.Linear(1, 1)
        rayps.wrap(model, torch.optim.SGD(model.parameters(), lr=1.0))

    monkeypatch.setattr(RoundThread, "start", no_start)
    with pytest.raises(ConfigError, match="the reason"):
        run(train_fn)


def test_a_workload_in_place_of_a_function_is_told_where_it_belongs():
    class Work(rayps.Workload):
        data = loss = model = None

    with pytest.raises(ConfigError, match=r"train_fn is an object of Work, .*for a workload, call rayps\.train"):
        rayps.run(Work(), workers=2)


@pytest.mark.parametrize("samples", [-1, float("nan"), float("inf"), "8", None, True])
def test_samples_that_are_no_weight_are_refused(samples):
    def train_fn():
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        rayps.wrap(model, optimizer)
        optimizer.samples = samples
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()

    with pytest.raises(ConfigError, match=r"optimizer\.samples is .*: give the weight of the batch"):
        run(train_fn)


@pytest.mark.parametrize(
    "strategy",
    [
        "local_sgd:period=3",
        "local_sgd:period=2,momentum=average",
        "diloco:period=3,overlap=1",
        "local_sgd:period=2,warmup=2",
    ],
)
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_strategies_whose_workers_train_separately_equal_train(strategy, optimizer):
    work = Fixed(n=40, batch=4, optimizer=optimizer)
    result = rayps.train(work, strategy=strategy, workers=2, epochs=1, cluster=LocalCluster(), progress=False)
    for found in run(loop(work, strategy, steps=5, save=False), workers=2):
        assert distance(found, result.snapshot.params) < EXACT


@pytest.mark.parametrize("n_push", [1, 2])
def test_downpour_of_one_worker_equals_train(n_push):
    work = Fixed(n=40, batch=4)
    strategy = f"downpour:n_push={n_push},n_fetch={n_push}"
    result = rayps.train(work, strategy=strategy, workers=1, epochs=1, cluster=LocalCluster(), progress=False)
    [found] = run(loop(work, strategy, steps=10, save=False), workers=1)
    assert distance(found, result.snapshot.params) < EXACT


@pytest.mark.parametrize("steps", [None, 10, 4])
@pytest.mark.parametrize(
    "strategy",
    [
        "local_sgd:period=4",
        "local_sgd:period=50",
        "diloco:period=50",
        "diloco:period=5,overlap=2",
        "downpour:n_push=50,n_fetch=50",
        "downpour:n_push=4,n_fetch=4",
    ],
)
def test_a_loop_that_ends_within_a_period_is_averaged_at_the_end_and_warned(strategy, steps):
    def train_fn():
        here = rayps.world()
        model = Fixed().model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        rayps.wrap(model, optimizer, strategy, steps=steps)
        for step in range(10):
            optimizer.zero_grad()
            x = torch.full((2, 5), 1.0 + here.rank + step, dtype=torch.float64)
            model(x).square().mean().backward()
            optimizer.step()
        return model, vector(model)  # the model itself is read when the run has ended

    journal = Journal()
    driver = Driver(LoopJob(train_fn, JobSpec(run="test:loop", workers=2, timeout=20.0), journal))
    assert driver.run(LocalCluster()).status is Status.SUCCEEDED, driver.status
    (first, before), (second, other) = driver.job.results
    warnings = [event["message"] for event in journal.events if event["kind"] == "warning"]
    if steps == 10:  # the last step ended the period
        assert warnings == []
        assert torch.equal(vector(first), before)
        if "downpour" not in strategy:
            assert torch.equal(before, other)
        return
    assert torch.equal(vector(first), vector(second))
    assert distance(before, other) > 0
    if "downpour" not in strategy:
        assert distance(vector(first), (before + other) / 2) < EXACT
    [warning] = warnings
    assert "steps=10" in warning
    assert ("n_push" if "downpour" in strategy else "period") in warning


def test_unequal_numbers_of_steps_within_a_period_are_warned():
    def train_fn():
        model = Fixed().model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        rayps.wrap(model, optimizer, "local_sgd:period=2")
        for _ in range(2 + rayps.world().rank):
            model(torch.ones(2, 5, dtype=torch.float64)).mean().backward()
            optimizer.step()

    journal = Journal()
    driver = Driver(LoopJob(train_fn, JobSpec(run="test:loop", workers=2, timeout=20.0), journal))
    assert driver.run(LocalCluster()).status is Status.SUCCEEDED
    warnings = [event["message"] for event in journal.events if event["kind"] == "warning"]
    [warning] = [each for each in warnings if each != SAME_ROWS]
    assert "unequal numbers of steps" in warning


def test_a_change_after_the_last_step_is_warned_of_under_servers():
    def train_fn():
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rayps.wrap(model, optimizer, "parameter_server")
        rayps.save({})
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            model.bias.fill_(3.0)
        rayps.save({})

    journal = Journal()
    driver = Driver(LoopJob(train_fn, JobSpec(run="test:loop", workers=1, timeout=20.0), journal))
    assert driver.run(LocalCluster()).status is Status.SUCCEEDED
    warnings = [event["message"] for event in journal.events if event["kind"] == "warning"]
    found = [message for message in warnings if "'bias'" in message and "copy.deepcopy" in message]
    assert ["rayps.save" in message for message in found] == [True, False], warnings


@pytest.mark.parametrize("strategy", ["hogwild", "admm", "parallel_sgd", "fedavg"])
def test_other_strategies_are_refused_with_the_way_out(strategy):
    with pytest.raises(ConfigError, match=r"use rayps\.train.* or one of all_reduce, parameter_server"):
        run(lambda: 0, strategy=strategy)


def test_the_last_step_may_be_skipped():
    def train_fn():
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rayps.wrap(model, optimizer)
        for step in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            if step < 2:
                optimizer.step()
        return vector(model)

    first, second = run(train_fn)
    assert torch.equal(first, second)


# ---- the specification


def test_a_job_has_a_workload_or_a_function():
    assert JobSpec.from_dict({"run": "a.py:f", "workload": None}).target == "a.py:f"
    assert JobSpec.from_dict({"run": "a.py:f", "profile": True}).profile
    for data, words in [
        ({}, "a job needs a workload"),
        ({"run": "a.py:f", "workload": "b.py:B"}, "give one of the two"),
        ({"run": "f"}, "a module or file and a function"),
        ({"run": "a.py:f", "epochs": 2}, "the loop decides about it: make it an argument"),
        ({"run": "a.py:f", "evaluate_every": 2}, "decides when it evaluates"),
        ({"run": "a.py:f", "checkpoint_every": 2}, r"when it calls rayps\.save"),
        ({"run": "a.py:f", "start_from": "x.safetensors"}, r"rayps\.load_state"),
        ({"run": "a.py:f", "server_group": "g"}, r"rayps\.ServerGroup\(parameters, group=NAME"),
        ({"run": "a.py:f", "strategy": "fedavg"}, r"cannot run fedavg: use rayps\.train"),
        ({"run": "a.py:f", "strategy": "hogwild", "workers": 2}, "cannot run hogwild"),
        ({"run": "a.py:f", "strategy": "admm"}, "cannot run admm"),
        (
            {"run": "a.py:f", "workers": 2, "strategy": {"name": "all_reduce", "replica": {"name": "pipeline"}}},
            "a replica of several workers",
        ),
        ({"run": "a.py:f", "strategy": [{"epochs": 1, "strategy": "all_reduce"}, "local_sgd"]}, "takes one strategy"),
    ]:
        with pytest.raises(ConfigError, match=words):
            JobSpec.from_dict(data)

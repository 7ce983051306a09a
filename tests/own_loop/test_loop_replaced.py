"""A worker of a user's own loop dies: it is replaced alone where the workers meet on servers only, else all restart."""

import itertools
import threading
import time

import pytest
import torch

import rayps
from rayps.cluster.local import LocalCluster, until
from rayps.core.job.job_status import Status
from rayps.core.strategy.strategy_families import ReplaceOne, RestartAll
from rayps.runtime.driver.driver import Driver
from rayps.runtime.own_loop.free_worker import FreeWorker
from rayps.runtime.own_loop.loop_job import LoopJob
from rayps.runtime.own_loop.loop_recovery import recovery_of_loop
from rayps.runtime.own_loop.world import LoopPlace, World
from rayps.runtime.records.journal import Journal
from rayps.strategies.job import JobSpec

STEPS, WORKERS, RATE = 10, 3, 0.25
FREE = ["parameter_server:staleness=none", "parameter_server:staleness=2,shards=2"]


class Death(BaseException):
    """What ends a worker that is a thread, as a kill ends a process."""


def counting(folder, strategy, deaths, *, save=1, moment="after", mean=False, own=True, slow=0.0):
    """A loop whose gradient is always one, so that the parameters say how often pushes count: -RATE * STEPS.

    `deaths` are pairs (rank, step), each of which happens once. `save`: the steps between two saved states (0: none),
    which are each rank's `own`, or rank 0's. `slow`: seconds that rank 1 sleeps in a step.
    """

    def die(rank, step, now):
        mark, asks, may_die = (folder / f"{what}-{rank}-{step}" for what in ("died", "asks", "may-die"))
        if now == moment and (rank, step) in deaths and not mark.exists():
            while save and step > 4 and not list(folder.glob("states/step-*")):
                time.sleep(0.01)  # the driver has a state to continue from
            asks.touch()
            assert until(may_die.exists, 30.0)
            mark.touch()
            raise Death("a worker's death")

    def train_fn():
        here = rayps.world()
        with (folder / f"calls-{here.rank}").open("a") as file:
            file.write("x")
        model = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        rayps.wrap(model, optimizer, strategy)
        begun = (rayps.restore() or {"step": 0})["step"]
        if mean:
            rayps.mean(1.0)
        for step in range(begun, STEPS):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            die(here.rank, step, "before")
            optimizer.step()
            rayps.log(number=1.0)
            if save and not (step + 1) % save:
                rayps.save({"step": step + 1}, every_rank=own)
            die(here.rank, step, "after")
            time.sleep(0.01 + slow * (here.rank == 1))
        (folder / f"ended-{here.rank}").touch()
        until(lambda: here.rank > 0 or len(list(folder.glob("ended-*"))) == WORKERS, 10.0)
        optimizer.zero_grad()
        optimizer.samples = 0  # a push that does not count: the pull after it has all others
        optimizer.step()
        return model.weight.detach().clone()

    return train_fn


def permit_deaths(folder, job, journal, over, free):
    """Let one worker die after the other, each when the driver knows whether it can be replaced alone.

    It knows this from the first report that says so (`free`), else from a report that began after the worker asked.
    """
    permitted = 0
    while not over.is_set():
        time.sleep(0.01)
        waiting = [path for path in folder.glob("asks-*") if not path.with_name(f"may-die{path.name[4:]}").exists()]
        recovered = [event for event in journal.events if event["kind"] in ("replaced", "restarted")]
        if not waiting or job._group is None or len(recovered) < permitted:
            continue
        rank, seen = int(waiting[0].name.split("-")[1]), []

        def known(rank=rank, seen=seen):
            output = job._group.watch.latest.get(rank)
            if output is not None and all(output is not each for each in seen):
                seen.append(output)
            return over.is_set() or len(seen) > 2 or (free and output is not None and output.is_free)

        until(known, 30.0)
        permitted += 1
        waiting[0].with_name(f"may-die{waiting[0].name[4:]}").touch()


def run(folder, train_fn, max_failures=3, free=True):
    """Run to the end; return the outcome, rank 0's parameters, the kinds of events, and the calls by rank."""
    journal, over = Journal(), threading.Event()
    spec = JobSpec(run="test:loop", workers=WORKERS, timeout=20.0, max_failures=max_failures)
    job = LoopJob(train_fn, spec, journal, checkpoints=folder / "states")
    deaths = threading.Thread(target=permit_deaths, args=(folder, job, journal, over, free))
    deaths.start()
    try:
        outcome = Driver(job).run(LocalCluster())
    finally:
        over.set()
        deaths.join()
    calls = [len(path.read_text()) for path in sorted(folder.glob("calls-*"))]
    return outcome, job.results, [event["kind"] for event in journal.events], calls


@pytest.mark.parametrize("strategy", FREE)
@pytest.mark.parametrize("save", [0, 1, 3])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_worker_is_replaced_alone_and_each_push_counts_once(tmp_path, strategy, save, moment):
    loop = counting(tmp_path, strategy, {(1, 5)}, save=save, moment=moment)
    outcome, results, kinds, calls = run(tmp_path, loop)
    assert outcome.status is Status.SUCCEEDED, outcome
    assert kinds.count("replaced") == 1 and "restarted" not in kinds
    assert calls == [1, 2, 1], "the others continue"
    assert results[0].tolist()[0] == pytest.approx([-RATE * STEPS] * 2), "each push of each worker counts once"


@pytest.mark.parametrize("strategy", FREE)
def test_a_slow_worker_continues_after_the_steps_of_the_saved_state_and_nobody_waits_for_more(tmp_path, strategy):
    loop = counting(tmp_path, strategy, {(1, 3), (1, 8)}, own=False, slow=0.05)
    outcome, results, kinds, calls = run(tmp_path, loop)
    assert outcome.status is Status.SUCCEEDED, outcome
    assert kinds.count("replaced") == calls[1] - 1 > 0 and "restarted" not in kinds and calls[::2] == [1, 1]
    assert -RATE * STEPS - 1e-5 <= results[0].min().item() < -RATE * STEPS * (WORKERS - 1) / WORKERS


def test_several_deaths_are_replaced_one_after_another(tmp_path):
    loop = counting(tmp_path, FREE[0], {(1, 2), (1, 6), (2, 4)}, save=0)
    outcome, results, kinds, calls = run(tmp_path, loop)
    assert outcome.status is Status.SUCCEEDED, outcome
    assert kinds.count("replaced") == 3 and "restarted" not in kinds and calls == [1, 3, 2]
    assert results[0].tolist()[0] == pytest.approx([-RATE * STEPS] * 2)


def test_after_a_replacement_all_can_start_again(tmp_path):
    loop = counting(tmp_path, FREE[0], {(1, 5), (0, 8)})
    outcome, _, kinds, _ = run(tmp_path, loop)
    assert outcome.status is Status.SUCCEEDED, outcome
    assert kinds.count("replaced") == kinds.count("restarted") == 1


def test_replacements_count_as_failures(tmp_path):
    outcome, _, kinds, _ = run(tmp_path, counting(tmp_path, FREE[0], {(1, 2), (1, 4)}, save=0), max_failures=1)
    assert outcome.status is Status.FAILED and kinds.count("replaced") == 1
    assert "that was failure 2, and max_failures is 1" in outcome.message


@pytest.mark.parametrize(
    ("strategy", "rank", "mean"),
    [
        (FREE[0], 0, False),  # worker-0 holds the servers
        (FREE[0], 1, True),  # the others wait for it on a ring
        ("parameter_server", 1, False),
        ("downpour:n_push=2,n_fetch=2", 1, False),  # its own steps since the last push are lost with it
        ("all_reduce", 1, False),
        ("local_sgd:period=2", 1, False),
    ],
)
def test_otherwise_all_start_again(tmp_path, strategy, rank, mean):
    outcome, _, kinds, calls = run(tmp_path, counting(tmp_path, strategy, {(rank, 5)}, mean=mean), free=False)
    assert outcome.status is Status.SUCCEEDED, outcome
    assert kinds.count("restarted") == 1 and "replaced" not in kinds and calls == [2, 2, 2]


class Pushes:
    """The servers' count of one rank's pushes."""

    def __init__(self, step):
        self.step = step

    def push(self, value, weight):
        assert value.numel() == weight == 0
        self.step += 1


def test_the_pushes_of_a_rank_are_as_many_as_the_steps_of_its_function():
    for number, (start, pushed, saved, more) in enumerate(itertools.product((0, 7), range(5), range(5), range(5))):
        here, nothing = World(LoopPlace(1, 2, "a run", 5.0, 5.0)), torch.zeros(0)
        server = Pushes(start + 3)  # as a state of three more pushes than steps was resumed
        assert FreeWorker(f"law-{number}", here).begin(server, start, nothing) == 0
        server.step += pushed
        worker = FreeWorker(f"law-{number}", here)  # it takes the place of the first
        assert worker.follows
        behind = worker.begin(server, start + saved, nothing)
        server.step += max(0, more - behind)
        assert server.step == start + 3 + max(pushed, saved + more)
    server = Pushes(0)
    assert FreeWorker("law-0", here).begin(server, 9, None) == 0 and server.step == 0, "nobody ever waits"


def test_what_decides():
    ranks = (0, 1, 2)
    subsets = [set(each) for count in range(4) for each in itertools.combinations(ranks, count)]
    for dead, free, errors in itertools.product(subsets, subsets, (False, True)):
        alone = recovery_of_loop(dead, free, errors=errors) == ReplaceOne()
        assert alone is (not errors and 0 not in dead and dead <= free)
        assert alone or recovery_of_loop(dead, free, errors=errors) == RestartAll()

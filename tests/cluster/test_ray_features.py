"""Features whose other tests run on threads, each once on real Ray processes, by the identity that defines it."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hospital_work
import pytest
import torch
from client_site import Hospitals
from hospital_work import All
from real_service import Serve, until
from small_work import Small, distance, plain
from small_work import train as on_threads
from test_backup_workers import replayed
from test_exactly_once import ROWS, SHARDS, Tally

import rayps
from rayps.core.rows.balanced_shares import WINDOW
from rayps.core.strategy.adaptive_staleness import FIRST, LADDER

pytestmark = pytest.mark.ray
EXACT = 1e-12
SECONDS = 300.0  # ends a hang


# ---- real clients


@pytest.fixture
def home(ray_service: Serve, tmp_path: Path) -> Iterator[Hospitals]:
    """A user of the shared service, whose jobs know the model, and the clients, which have the rows."""
    shutil.copy(hospital_work.__file__, tmp_path)
    made = Hospitals(tmp_path, ray_service.client())
    yield made
    made.close()


def submit(home: Hospitals, strategy: str, rounds: int) -> Any:
    return home.user.submit(
        "hospital_work.py:Server", working_dir=home.path, strategy=strategy, epochs=rounds, seed=5, workers=1
    )


def test_real_clients_learn_what_simulated_ones_learn(home: Hospitals) -> None:
    """The bits of the same job with the clients' rows in one process, which has no rows in this job."""
    job = submit(home, "fedavg:local_epochs=2,clients=remote(least=3,wait=200)", 3)
    clients = home.hospitals(job, 3)
    learnt = home.trained(job, SECONDS)
    assert torch.equal(learnt, on_threads(All(3), "fedavg:local_epochs=2", epochs=3, seed=5).snapshot.params)
    assert [client.over().ended.rounds for client in clients] == [3, 3, 3]
    assert {name: each["samples"] for name, each in home.joined(job).items()} == {"h0": 20, "h1": 25, "h2": 30}


def test_a_secure_sum_is_the_plain_sum_and_no_update_is_on_the_services_side(home: Hospitals) -> None:
    """It differs from the plain mean by the quantisation alone: half a step for each client, over their samples."""
    clip, bits = 5, 20
    secure = f"secure=secagg(clip={clip},bits={bits}),deadline=500,clients=remote(least=3,wait=200)"
    job = submit(home, f"fedavg:local_epochs=2,{secure}", 1)
    clients = home.hospitals(job, 3)
    learnt = home.trained(job, SECONDS)
    exact = on_threads(All(3), "fedavg:local_epochs=2", epochs=1, seed=5).snapshot.params
    step = clip / (2 ** (bits - 1) - 1)
    assert 0 < distance(learnt, exact) <= step / 2 * 3 / sum(hospital_work.SIZES) * 1.001
    assert [client.over().ended.rounds for client in clients] == [1, 1, 1]
    assert [each["samples"] for each in home.joined(job).values()] == [0, 0, 0]  # they are in the sum alone
    (event,) = (event for event in job.events() if event["kind"] == "cohort")
    assert (event["replied"], event["trained"], event["dropped"]) == (3, ["h0", "h1", "h2"], [])


# ---- workers of unequal speed


def rank() -> int:
    return int(threading.current_thread().name.removeprefix("worker-"))


class Held(Small):
    """Worker 2 waits in its first gradient until worker 0 begins its fourth step."""

    def __init__(self, gate: Path, **options: Any) -> None:
        super().__init__(**options)
        self.gate, self.calls = gate, 0

    def loss(self, model, batch):
        if model.training:
            self.calls += 1
            if rank() == 0 and self.calls == 4:
                self.gate.touch()
            if rank() == 2:
                until(self.gate.exists, 120)
        return super().loss(model, batch)


def test_backup_workers_do_not_wait_for_a_late_one(ray_cluster, tmp_path: Path) -> None:
    """Three steps are applied without it, the last one has its rows: each row once, as one process would."""
    work = Held(tmp_path / "gate", n=24, batch=3, optimizer="momentum")
    result = rayps.train(
        work, strategy="all_reduce:backup=1", workers=3, epochs=1, cluster=ray_cluster, progress=False, timeout=SECONDS
    )
    assert result.history.column("dropped").to_pylist() == [1, 1, 1, 0]
    (dropped,) = (event for event in result.events if event["kind"] == "dropped")
    assert dropped["ranks"] == {"2": 3}
    members = {0: (0, 1), 1: (0, 1), 2: (0, 1), 3: (0, 2)}  # worker 1 has none of the last two portions
    model, losses, counts = replayed(Small(n=24, batch=3, optimizer="momentum"), members, 2, 3)
    assert distance(result.model(), model) < EXACT
    assert result.history.column("loss").to_pylist() == pytest.approx(losses, abs=EXACT)
    assert len(counts) == 24 and set(counts.values()) == {1}


class Uneven(Tally):
    """Worker 1 is slow, the other one waits for nothing but the bound."""

    def loss(self, model, batch):
        if model.training and rank() == 1:
            time.sleep(0.06)
        return super().loss(model, batch)


def test_an_automatic_bound_rises_while_workers_wait_for_a_slow_one(ray_cluster) -> None:
    """The servers follow: the fast worker gets further ahead than the first bound allows. Each push is applied once."""
    lead = [0]

    def progress(facts: dict[str, Any]) -> None:
        rounds = [worker["round"] or 0 for worker in facts["workers"]]
        lead.append(max(rounds) - min(rounds) if len(rounds) == 2 else 0)

    result = rayps.train(
        Uneven(scale=2),
        strategy="parameter_server:staleness=auto,shards=2",
        workers=2,
        epochs=3,
        cluster=ray_cluster,
        progress=progress,
        timeout=SECONDS,
    )
    moves = [(event["old"], event["new"]) for event in result.events if event["kind"] == "staleness"]
    assert moves[0] == (FIRST, LADDER[LADDER.index(FIRST) + 1])
    assert max(lead) > FIRST + 1
    assert torch.equal(result.snapshot.params, torch.full((SHARDS * ROWS,), 3.0, dtype=torch.float64))


class ByRow(Small):
    """Each row costs worker 1 ten times what it costs worker 0."""

    def loss(self, model, batch):
        if model.training:
            time.sleep(batch.size * (0.002, 0.02)[rank()])
        return super().loss(model, batch)


def test_balanced_shares_follow_the_speeds_of_the_workers(ray_cluster) -> None:
    """The global batches, and with them the training, are those of even shares."""
    work, n = ByRow(n=8 * 3 * WINDOW, batch=4, optimizer="momentum"), 8 * 3 * WINDOW
    result = rayps.train(work, workers=2, epochs=1, balance=True, cluster=ray_cluster, progress=False, timeout=SECONDS)
    changes = [event for event in result.events if event["kind"] == "shares"]
    assert changes[0]["before"] == [4, 4] and changes[0]["round"] >= WINDOW
    assert all(sum(event["shares"]) == 8 and event["shares"][0] > event["shares"][1] for event in changes)
    slower = changes[0]["seconds_per_row"]
    assert slower[1] > slower[0]
    model, losses, _ = plain(Small(n=n, batch=4, optimizer="momentum"), 2)
    assert distance(result.model(), model) < EXACT
    assert result.history.column("loss").to_pylist() == pytest.approx(losses, abs=EXACT)
    assert result.history.column("samples").to_pylist() == [8] * (n // 8)


# ---- what the cluster has


class Occupant:
    """An actor that does nothing but hold CPUs."""

    def pid(self) -> int:
        return os.getpid()


class Leaves(rayps.Callback):
    """Frees the CPUs once the job has had the workers that there was room for, for some rounds."""

    def __init__(self, cluster, occupant) -> None:
        self.cluster, self.occupant, self.sizes, self.held = cluster, occupant, [], 0

    def on_round(self, run, point) -> None:
        sizes = [event["to"] for event in run.events if event["kind"] == "resized"]
        self.held += sizes[-1:] == [2]
        if self.held == 20 and self.occupant is not None:
            self.sizes, occupant, self.occupant = sizes, self.occupant, None
            self.cluster.kill(occupant)
        if self.occupant is None and sizes[-1] == 3:
            run.stop("it has followed")


def test_the_number_of_workers_follows_what_the_cluster_has(ray_cluster) -> None:
    """With room for two it has two; when others leave, it takes what they had. The result is that of one worker."""
    room = int(ray_cluster.total()["cpu"])
    until(lambda: ray_cluster.free()["cpu"] == room)  # Ray has released what earlier tests held
    occupant = ray_cluster.spawn("test_ray_features:Occupant", name="occupant", cpus=room - 2)
    occupant.call("pid").result(60)
    leaves = Leaves(ray_cluster, occupant)
    job = {"global_batch": 12, "epochs": 2000, "seed": 5}  # until it has followed, however long a worker takes to start
    result = rayps.train(
        Small(n=120, batch=4, optimizer="adam", pause=0.01),
        workers=(1, 3),
        elastic={"cooldown": 0, "gain": 0},
        cluster=ray_cluster,
        progress=False,
        callbacks=[leaves],
        timeout=SECONDS,
        **job,
    )
    assert leaves.sizes[-1] == 2 and max(leaves.sizes) == 2
    assert [event["to"] for event in result.events if event["kind"] == "resized"][-1] == 3
    steps = result.snapshot.round
    alone = on_threads(Small(n=120, batch=4, optimizer="adam"), workers=1, **{**job, "epochs": None, "steps": steps})
    torch.testing.assert_close(result.snapshot.params, alone.snapshot.params, rtol=1e-9, atol=1e-11)

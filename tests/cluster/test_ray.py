"""Training on real Ray actors, all on one shared cluster: few tests, since each actor costs seconds."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from ipaddress import ip_address

import psutil
import pytest
import ray
import torch
from folders import PYTHONPATH, TESTS
from small_work import Small, distance, plain, vector
from traces import Traces

import rayps
from rayps import AllReduce, ParameterServer, Ring, ServerGroup
from rayps.cluster.local import host_address
from rayps.cluster.ray_cluster import cause_of_death
from rayps.ps.group import start

pytestmark = pytest.mark.ray
EXACT = 1e-12


@pytest.mark.parametrize("strategy", [AllReduce(), [(1, ParameterServer(shards=2)), AllReduce()]], ids=["ring", "both"])
def test_in_step_equals_one_process(ray_cluster, strategy):
    work = Small(n=31, batch=3, optimizer="adam")
    seen = []
    result = rayps.train(work, strategy=strategy, workers=3, epochs=2, cluster=ray_cluster, progress=seen.append)
    law, losses, _ = plain(work, 3, epochs=2)
    assert distance(result.model(), law) < EXACT
    assert result.history.column("loss").to_pylist() == pytest.approx(losses, abs=EXACT)
    pids = {worker["pid"] for worker in seen[-1]["workers"]}
    assert len(pids) == 3


def test_bounded_staleness(ray_cluster):
    work = Small(n=120, batch=3, jitter=0.005)
    result = rayps.train(
        work, strategy=ParameterServer(shards=2, staleness=2), workers=3, epochs=3, cluster=ray_cluster, progress=False
    )
    assert result.history.num_rows == 42
    assert max(result.history.column("staleness").to_pylist()) <= 2
    assert result.metrics["loss"] == pytest.approx(plain(work, 3, epochs=3)[2][-1], rel=0.25)


def test_workers_run_at_ordinary_priority(ray_cluster):
    """Ray would give way to every other program of the machine, at a niceness of 15."""

    @ray.remote(num_cpus=0)
    def niceness():
        return os.nice(0)

    assert ray.get(niceness.remote(), timeout=60) == os.nice(0) + int(os.environ["RAY_worker_niceness"])  # noqa: SIM112


def test_it_listens_on_the_loopback_address_only(ray_cluster):
    """All of its processes: the gcs, the raylet, its agents, the workers, and this driver."""

    @ray.remote(num_cpus=0)
    def addresses():
        return ray.util.get_node_ip_address(), host_address()

    assert ray.get(addresses.remote(), timeout=60) == ("127.0.0.1", "127.0.0.1")
    driver = psutil.Process()
    listening = {}
    for process in [driver, *driver.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            for found in process.net_connections("inet"):
                if found.status == psutil.CONN_LISTEN:
                    listening.setdefault(found.laddr.ip, set()).add(process.name())
    loopback = {each for each in listening if ip_address(each.removeprefix("::ffff:")).is_loopback}
    assert {"gcs_server", "raylet"} <= set().union(*(listening[each] for each in loopback))
    assert set(listening) == loopback, listening


def own_actor():
    """A class of the user's own, with nothing of rayps in it but what it calls."""

    @ray.remote(num_cpus=0)
    class Own:
        def add(self, rank, size):
            with Ring.join("own", rank, size, timeout=60) as ring:
                return ring.sum(torch.full((1000,), float(rank))), ring.all_gather(torch.tensor([rank]))

        def share(self, group, rank):
            server = group.join(rank)
            before = server.pull(2, 5)
            server.push(torch.full((3,), rank + 1.0), lo=2)
            return before, server.pull()

    return Own


def test_ring_and_server_group_between_a_users_own_actors(ray_cluster):
    actors = [own_actor().remote() for _ in range(3)]
    for total, ranks in ray.get([actor.add.remote(rank, 3) for rank, actor in enumerate(actors)], timeout=120):
        assert torch.equal(total, torch.full((1000,), 3.0))
        assert ranks.flatten().tolist() == [0, 1, 2]
    with ServerGroup(torch.zeros(8), shards=3, workers=3) as group:
        found = ray.get([actor.share.remote(group, rank) for rank, actor in enumerate(actors)], timeout=120)
    for before, after in found:
        assert torch.equal(before, torch.zeros(3))
        assert torch.allclose(after, torch.tensor([0.0, 0, -2, -2, -2, 0, 0, 0]))
    for actor in actors:
        ray.kill(actor)


def test_a_job_on_an_elastic_group_notices_neither_a_killed_server_nor_a_new_one(ray_cluster):
    work = Small(n=120, batch=3, optimizer="adam", pause=0.05)
    killed = []

    def harm(progress):
        if progress.get("round", 0) > 4 and not killed:
            server = next(server for server in group.facts()["servers"] if server["primaries"])
            killed.append(server["name"])
            os.kill(server["pid"], signal.SIGKILL)

    with start(ray_cluster, "prod", servers=2, replicas=1, detached=False) as group:
        result = rayps.train(
            work,
            strategy=ParameterServer(),
            workers=2,
            epochs=2,
            cluster=ray_cluster,
            server_group="prod",
            name="job",
            progress=harm,
        )
        assert group.facts()["spaces"] == []
    law, losses, _ = plain(work, 2, epochs=2)
    assert distance(result.model(), law) < EXACT
    assert result.history.column("loss").to_pylist() == pytest.approx(losses, abs=EXACT)
    told = [event for event in result.events if event["kind"] in ("server_lost", "restarted", "replaced")]
    assert [(event["kind"], event.get("server")) for event in told] == [("server_lost", killed[0])]


def test_a_loop_of_ones_own_equals_one_process(ray_cluster):
    work = Small(n=31, batch=4, optimizer="adamw_groups")

    def train_fn():
        world, found = rayps.world(), []
        for strategy in ("all_reduce", "parameter_server:shards=2"):
            torch.manual_seed(world.rank)
            model = work.model()
            optimizer = work.optimizer(list(model.parameters()))
            rayps.wrap(model, optimizer, strategy)
            for epoch in range(2):
                for batch in work.data().batches(rank=world.rank, size=world.size, seed=0, epoch=epoch):
                    optimizer.zero_grad()
                    optimizer.samples = batch.size
                    if batch.size:
                        ((model(batch.x) - batch.y) ** 2).mean().backward()
                    optimizer.step()
            found.append(vector(model))
        return found

    law = plain(work, 3, epochs=2)[0]
    for found in rayps.run(train_fn, workers=3, cluster=ray_cluster):
        assert all(distance(model, law) < EXACT for model in found)


ALONE = """
    import rayps
    from small_work import Small
    result = rayps.train(Small({options}), strategy={strategy!r}, workers=2, epochs=1, progress=False)
    print(result.history.num_rows)
"""


def alone(strategy, options=""):
    script = textwrap.dedent(ALONE.format(strategy=strategy, options=options))
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=TESTS.parent,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
    )


def test_a_run_on_its_own_ray_leaves_nothing():
    traces = Traces()
    run = alone("parameter_server:shards=2")
    assert run.stdout == "6\n", run.stderr
    failed = alone("all_reduce", "n=0")
    assert failed.returncode != 0
    assert "no rows" in failed.stderr
    assert not traces.left()


REPORT = """The actor died unexpectedly before finishing this task.
\tclass_name: WorkerActor
\tactor_id: 5e1c
\tpid: 4711
\tnamespace: n
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: """


@pytest.mark.parametrize(
    ("report", "law"),
    [
        (f"{REPORT}End of file. There are some potential root causes. (1) OOM", "process 4711: End of file"),
        (f"{REPORT}Code 2. End of file. Some common causes include: (1)", "process 4711: Code 2. End of file"),
        (f"{REPORT}Worker exits with an exit code 3.", "process 4711: Worker exits with an exit code 3"),
        (
            f"{REPORT}Worker exits with an exit code 3.\nmore".replace("\tpid: 4711\n", ""),
            "Worker exits with an exit code 3",
        ),
        ("\n  The actor's node died. \n more", "The actor's node died."),
        (" \n", "Ray gives no reason"),
    ],
)
def test_a_cause_of_death_is_one_line(report, law):
    assert cause_of_death(report) == law

"""Jobs on an elastic server group, on a cluster of threads: results, deaths, branches, resumes, and what is left."""

import importlib
import json
import threading
import time

import pytest
import torch
from rayps_client.errors import ConfigError, NotFound, RaypsError, WorkloadError
from small_work import SEEN, Small, Watched, distance, kinds, plain

import rayps
from rayps import AllReduce, ParameterServer, Pipeline, TensorParallel
from rayps.cluster.local import until
from rayps.core.job.job_status import Status
from rayps.core.job.repeated_pushes import Ledger
from rayps.core.job.user_module import pack
from rayps.ps.client import session
from rayps.ps.column_space import Collector, make_first_state
from rayps.ps.group import start
from rayps.ps.job_space import JobSpace
from rayps.ps.protocol.space import Space
from rayps.ps.server.dense_segment import part_of
from rayps.ps.server.requests import RequestHandler
from rayps.runtime.driver.driver import Driver
from rayps.runtime.driver.workload_job import WorkloadJob
from rayps.runtime.records.journal import Journal
from rayps.strategies.job import JobSpec
from rayps.tensors.flat import Layout
from rayps.tensors.snapshot import Snapshot

EXACT = 1e-12
PRIVATE = ParameterServer(shards=3, replicas=1)


@pytest.fixture
def tag(request):
    SEEN.clear()
    return request.node.nodeid


@pytest.fixture
def cluster():
    found = Watched()
    yield found
    found.close()


@pytest.fixture
def group(cluster):
    with start(cluster, "main", servers=3, replicas=1, detached=False) as found:
        yield found


def train(work, strategy, cluster, **options):
    options = {"workers": 3, "epochs": 2, "progress": False, "timeout": 30.0} | options
    return rayps.train(work, strategy=strategy, cluster=cluster, **options)


def same(a, b):
    return torch.equal(a.snapshot.params, b.snapshot.params)


def spaces(group):
    return [space["name"] for space in group.facts()["spaces"]]


# ----------------------------------------------------------------------------------------- results


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_in_step_the_result_is_that_of_fixed_servers_to_the_bit(cluster, group, optimizer):
    work = Small(n=36, optimizer=optimizer)
    fixed = train(work, ParameterServer(shards=2), cluster)
    private = train(work, PRIVATE, cluster)
    named = train(work, ParameterServer(), cluster, server_group="main", name="job")
    assert same(fixed, private) and same(fixed, named)
    law, losses, evaluations = plain(work, 3, epochs=2)
    assert distance(named.model(), law) < EXACT
    assert named.history.column("loss").to_pylist() == pytest.approx(losses, abs=EXACT)
    assert named.metrics["loss"] == pytest.approx(evaluations[-1], abs=EXACT)
    assert spaces(group) == []


def test_encoded_pushes_give_what_they_give_on_fixed_servers_to_the_bit(cluster, group):
    work = Small(n=36, optimizer="adam")
    fixed = train(work, ParameterServer(shards=2, compression="fp16"), cluster)
    assert not same(fixed, train(work, ParameterServer(shards=2), cluster))
    assert same(fixed, train(work, ParameterServer(shards=3, replicas=1, compression="fp16"), cluster))
    assert same(fixed, train(work, ParameterServer(compression="fp16"), cluster, server_group="main"))


class OneMoment(Small):
    """Each push adds as much everywhere, so that parameters of one moment are all alike."""

    def model(self):
        return Slots()

    def loss(self, model, batch):
        super().loss(torch.nn.Flatten(), batch)
        if torch.is_grad_enabled():
            assert bool((model.slots == model.slots[0]).all()), model.slots
        return -model.slots.sum()

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=3.0)

    def evaluate(self, model, batch):
        return {}


def test_out_of_step_workers_pull_one_moment_while_the_group_grows_and_shrinks(cluster, group, tag):
    sizes = [2, 4]

    def resize(progress):
        if sizes and SEEN[tag] > 20 and group.settled():
            group.resize(sizes.pop())

    work = OneMoment(n=90, pause=0.004, tag=tag)
    strategy = ParameterServer(staleness=2, consistent=True)
    result = train(work, strategy, cluster, server_group="main", epochs=6, progress=resize)
    assert not sizes
    assert until(lambda: group.facts()["counts"]["moves"] > 0, 60)  # the workers may end before them
    assert torch.equal(result.snapshot.params, torch.full((60,), 180.0, dtype=torch.float64))


@pytest.mark.parametrize("staleness", [2, None])
def test_out_of_step_every_round_is_told_once(cluster, group, staleness):
    result = train(Small(n=120), ParameterServer(staleness=staleness), cluster, server_group="main")
    assert result.history.column("round").to_pylist() == list(range(28))
    if staleness is not None:
        assert max(result.history.column("staleness").to_pylist()) <= staleness
    assert spaces(group) == []


def test_the_strategy_may_change_between_epochs(cluster, group):
    work = Small(n=36, optimizer="momentum")
    phases = [(1, ParameterServer()), (1, AllReduce()), (1, ParameterServer(staleness=0))]
    result = train(work, phases, cluster, server_group="main", epochs=None)
    assert distance(result.model(), plain(work, 3, epochs=3)[0]) < EXACT


def test_two_jobs_on_one_group_each_equal_their_result_alone(cluster, group):
    works = {"one": Small(n=60, optimizer="adam", pause=0.002), "two": Small(n=48, optimizer="momentum", pause=0.002)}
    alone = {name: train(work, ParameterServer(shards=2), cluster) for name, work in works.items()}
    found, both = {}, threading.Event()

    def meet(name):  # a driver that waits here keeps its space open: the two are there at once, however slow one begins
        deadline = time.monotonic() + 30
        while name in spaces(group) and not both.is_set() and time.monotonic() < deadline:
            if set(spaces(group)) == set(works):
                both.set()
            time.sleep(0.01)

    def run(name):
        found[name] = train(
            works[name], ParameterServer(), cluster, server_group="main", name=name, progress=lambda _: meet(name)
        )

    threads = [threading.Thread(target=run, args=(name,)) for name in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(same(found[name], alone[name]) for name in works)
    assert both.is_set()
    assert spaces(group) == []


def test_a_group_that_grows_and_shrinks_meanwhile_changes_nothing(cluster, group, tag):
    work = Small(n=90, optimizer="adam", pause=0.01, tag=tag)
    sizes = [2, 4]

    def resize(progress):
        if sizes and SEEN[tag] > 20 and group.settled():
            group.resize(sizes.pop())

    result = train(work, ParameterServer(), cluster, server_group="main", epochs=15, progress=resize)
    assert not sizes
    assert group.facts()["counts"]["moves"] > 0
    assert same(result, train(work, ParameterServer(shards=2), cluster, epochs=15))


# ------------------------------------------------------------------------------------------ deaths


def test_a_server_that_dies_is_no_restart(cluster, tag):
    work = Small(n=90, optimizer="adam", pause=0.008, tag=tag)
    fixed = train(work, ParameterServer(shards=2), cluster, epochs=4)
    SEEN.clear()
    cluster.kill_when(tag, 30, ("ServerActor", "server-1"))
    result = train(work, PRIVATE, cluster, epochs=4)
    assert same(result, fixed)
    assert not {"restarted", "replaced"} & set(kinds(result))
    lost = [event for event in result.events if event["kind"] == "server_lost"]
    assert [event["server"] for event in lost] == ["server-1"]
    assert lost[0]["longest_wait"] > 0 and "longest" in lost[0]["message"]
    assert sum(cluster.spawned["WorkerActor", rank] for rank in range(3)) == 6  # of both runs


@pytest.mark.parametrize("staleness", [0, None])
def test_servers_that_never_send_the_last_state_are_no_endless_wait(cluster, group, monkeypatch, staleness):
    monkeypatch.setattr(session, "GRACE_SECONDS", 0.5)
    serve, opened = RequestHandler._serve_part, set()

    def silent(handler, request, touched):  # the servers of the job's first space answer no request for a state
        opened.add(touched[0].space.number)
        return touched[0].space.number != min(opened) and serve(handler, request, touched)

    monkeypatch.setattr(RequestHandler, "_serve_part", silent)
    work = Small(n=36)
    result = train(work, ParameterServer(staleness=staleness), cluster, server_group="main", timeout=2.0)
    [restarted] = [event for event in result.events if event["kind"] == "restarted"]
    assert "did not answer requests to segment" in restarted["message"]
    if staleness == 0:
        assert distance(result.model(), plain(work, 3, epochs=2)[0]) < EXACT


def test_servers_that_never_send_the_last_state_end_the_job_with_their_names(cluster, group, monkeypatch):
    monkeypatch.setattr(session, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(RequestHandler, "_serve_part", lambda handler, request, touched: False)
    with pytest.raises(RaypsError, match=r"server 'server-\d' did not answer requests(.|\n)*max_failures is 0"):
        train(Small(n=36), ParameterServer(), cluster, server_group="main", timeout=1.0, max_failures=0)


@pytest.mark.parametrize("error", [ValueError, RaypsError])  # the second is what a request that comes too late gets
def test_servers_that_refuse_the_last_state_end_the_job_with_the_reason(cluster, group, monkeypatch, error):
    def fails(handler, request, touched):
        raise error("the state cannot be written")

    monkeypatch.setattr(RequestHandler, "_serve_part", fails)
    with pytest.raises(RaypsError, match=r"the state cannot be written(.|\n)*max_failures is 0"):
        train(Small(n=36), ParameterServer(), cluster, server_group="main", timeout=1.0, max_failures=0)


def test_a_thread_for_checkpoints_that_has_failed_ends_the_job_with_the_reason(cluster, group, monkeypatch):
    def fails(collector, session, rounds):
        raise ArithmeticError("no such number")

    monkeypatch.setattr(Collector, "_fetch", fails)
    with pytest.raises(RaypsError, match=r"ArithmeticError: no such number(.|\n)*max_failures is 0"):
        train(Small(n=36), ParameterServer(), cluster, server_group="main", max_failures=0)


@pytest.mark.parametrize("staleness", [0, None])
def test_without_copies_what_is_lost_comes_back_from_the_last_checkpoint_and_the_workers(cluster, tag, staleness):
    work = Small(n=90, pause=0.008, tag=tag)
    fixed = train(work, ParameterServer(shards=2), cluster, checkpoint_every=4, epochs=4)
    SEEN.clear()
    cluster.kill_when(tag, 45, ("ServerActor", "server-1"))
    strategy = ParameterServer(shards=2, staleness=staleness, replicas=0)
    result = train(work, strategy, cluster, checkpoint_every=4, epochs=4)
    assert {"segment_lost", "restored"} <= set(kinds(result))
    assert result.history.column("round").to_pylist() == list(range(40))
    if staleness == 0:
        assert same(result, fixed)


class Uneven(Small):
    """In each round the third call of `loss` takes longer, so that two workers have pushed when the third begins."""

    def loss(self, model, batch):
        seen = importlib.import_module("small_work").SEEN
        if seen[self.tag] % 3 == 2:
            time.sleep(0.05)
        return super().loss(model, batch)


def test_a_checkpoint_in_the_middle_of_a_round_restores_lost_segments_exactly(cluster, tag, monkeypatch):
    fetch = Collector._fetch

    def late(collector, session, rounds):  # the request arrives after two of the three pushes of the next round
        assert until(lambda: SEEN[tag] >= 3 * rounds + 2, 30)
        time.sleep(0.02)
        fetch(collector, session, rounds)

    work = Uneven(n=90, tag=tag)
    fixed = train(work, ParameterServer(shards=2), cluster, epochs=4)
    SEEN.clear()
    monkeypatch.setattr(Collector, "_fetch", late)
    cluster.kill_when(tag, 24, ("ServerActor", "server-1"))
    strategy = ParameterServer(shards=2, staleness=0, replicas=0)
    result = train(work, strategy, cluster, checkpoint_every=2, epochs=4)
    assert "restored" in kinds(result)
    assert same(result, fixed)


class Slots(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.slots = torch.nn.Parameter(torch.zeros(60, dtype=torch.float64))


class Tally(Small):
    """Each push, of one row of the data, adds one to that row's slot."""

    def model(self):
        return Slots()

    def data(self):
        return rayps.data.tensors(torch.arange(60), torch.zeros(60), batch_size=1)

    def loss(self, model, batch):
        importlib.import_module("small_work").SEEN[self.tag] += 1
        time.sleep(self.pause)
        return -model.slots[batch.x].sum()

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=3.0)  # of three workers, each push is scaled by a third

    def evaluate(self, model, batch):
        return {}


@pytest.mark.chaos
@pytest.mark.parametrize("replicas", [0, 1])
@pytest.mark.parametrize("staleness", [2, None])
def test_out_of_step_each_push_is_applied_once_whoever_dies(cluster, tag, staleness, replicas):
    cluster.kill_when(tag, 60, ("ServerActor", "server-1"))
    cluster.kill_when(tag, 300, ("ServerActor", "server-2"))
    strategy = ParameterServer(shards=3, staleness=staleness, replicas=replicas)
    result = train(Tally(pause=0.01, tag=tag), strategy, cluster, epochs=8, checkpoint_every=7)
    assert torch.equal(result.snapshot.params, torch.full((60,), 8.0, dtype=torch.float64))
    assert kinds(result).count("server_lost") == 2
    assert ("restored" in kinds(result)) is (replicas == 0)


def test_in_step_what_nobody_has_any_more_means_going_back_to_the_last_snapshot(cluster, tag):
    work = Small(n=90, pause=0.008, tag=tag)
    cluster.kill_when(tag, 45, ("ServerActor", "server-1"))
    strategy = ParameterServer(shards=2, replicas=0, replay_mb=0)
    result = train(work, strategy, cluster, checkpoint_every=100, timeout=3.0, epochs=4)
    assert "restored" in kinds(result) and "restarted" in kinds(result)
    assert distance(result.model(), plain(work, 3, epochs=4)[0]) < EXACT
    assert result.history.column("round").to_pylist() == list(range(40))


def test_in_step_a_dead_worker_means_going_on_from_the_last_snapshot(cluster, tag):
    work = Small(n=60, optimizer="adam", pause=0.004, tag=tag)
    cluster.kill_when(tag, 40, ("WorkerActor", 1))
    result = train(work, PRIVATE, cluster, epochs=3)
    assert distance(result.model(), plain(work, 3, epochs=3)[0]) < EXACT
    assert result.history.column("round").to_pylist() == list(range(21))
    assert [event["lost"] for event in result.events if event["kind"] == "restarted"] == [["worker-1"]]


def test_out_of_step_a_dead_worker_is_replaced_while_the_others_go_on(cluster, tag):
    cluster.kill_when(tag, 40, ("WorkerActor", 1))
    work = Small(n=120, pause=0.004, tag=tag)
    result = train(work, ParameterServer(shards=3, replicas=1, staleness=2), cluster)
    assert [event["lost"] for event in result.events if event["kind"] == "replaced"] == [["worker-1"]]
    assert "restarted" not in kinds(result)
    assert result.history.column("round").to_pylist() == list(range(28))


def test_a_segment_begins_with_the_pushes_that_its_elements_hold_and_gives_up_what_nobody_has():
    layout = Layout.of([("a", torch.zeros(8))])
    space = Space("s", 1, 2, ParameterServer(staleness=None), layout, ((0, 4), (4, 8)))
    ledgers = [(0, 4, Ledger([5, 9], {0: [7]})), (4, 8, Ledger([6, 9]))]
    snapshot = Snapshot(layout, torch.arange(8.0), positions=[5, 9], ledgers=ledgers)
    for index, (_, _, ledger) in enumerate(ledgers):
        state, missing = make_first_state(space, index, snapshot, [0, 0])
        part = part_of(state, 0, 4 * index)
        assert part.ledger == ledger and missing == 0
        assert torch.equal(part.params, snapshot.params[4 * index : 4 * index + 4])
    state, missing = make_first_state(space, 0, snapshot, [0, 0], skips={0: 20, 1: 4})
    assert part_of(state, 0, 0).ledger == Ledger([20, 9])
    assert missing == 14  # steps 5 to 19, of which 7 is there


# -------------------------------------------------------------------------------- branch and resume


def test_a_job_may_begin_with_what_another_holds(cluster, group, tag):
    work = Small(n=36, optimizer="momentum", pause=0.01, tag=tag)
    found = {}

    def first():
        found["first"] = train(work, ParameterServer(), cluster, server_group="main", name="first", epochs=8)

    thread = threading.Thread(target=first)
    thread.start()
    assert until(lambda: SEEN[tag] > 40, 60)
    branch = train(
        work,
        ParameterServer(staleness=1),
        cluster,
        server_group="main",
        name="second",
        workers=2,
        branch="first",
        epochs=1,
    )
    thread.join(60)
    assert distance(found["first"].model(), plain(work, 3, epochs=8)[0]) < EXACT  # it never noticed
    losses = branch.history.column("loss").to_pylist()
    assert losses[0] < 0.8 * plain(work, 2, epochs=1)[1][0]  # it did not begin anew
    assert "branched" in kinds(branch)
    assert spaces(group) == []


class Wider(Small):
    def model(self):
        return torch.nn.Linear(5, 1).double()


def test_a_branch_of_nothing_or_of_another_model(cluster, group, tag):
    with pytest.raises(NotFound, match="nobody"):
        train(Small(), ParameterServer(), cluster, server_group="main", branch="nobody")
    stopped, thread = running(cluster, Small(n=6000, pause=0.004, tag=tag), "first")
    assert until(lambda: SEEN[tag] > 6, 60)
    with pytest.raises(ConfigError, match="another model"):
        train(Wider(), ParameterServer(), cluster, server_group="main", branch="first")
    assert spaces(group) == ["first"]
    stopped.stop()
    thread.join(60)
    assert spaces(group) == []


def test_a_checkpoint_of_two_servers_goes_on_with_three(cluster, tmp_path):
    work = Small(n=36, optimizer="adam")
    train(work, ParameterServer(shards=2, replicas=0), cluster, epochs=1, checkpoint=tmp_path)
    result = train(work, PRIVATE, cluster, epochs=3, checkpoint=tmp_path, resume=True)
    assert "resumed" in kinds(result)
    assert distance(result.model(), plain(work, 3, epochs=3)[0]) < EXACT


PIPE, WIDE = Pipeline(stages=2, micro_batches=2), TensorParallel(size=2)


@pytest.mark.parametrize("replica", [PIPE, WIDE], ids=lambda replica: replica.name)
def test_a_checkpoint_goes_from_fixed_servers_to_a_divided_model_on_a_group_and_back(cluster, group, tmp_path, replica):
    """Also in the middle of an epoch, and with another division: the result is that of one process."""
    work = Small(n=72, batch=3, optimizer="adam")  # 12 rounds an epoch
    ways = [
        (ParameterServer(shards=2), {"workers": 2}, 7),
        (ParameterServer(shards=3, replicas=1, replica=replica), {"workers": 4}, 12),
        (ParameterServer(shards=2, replica=replica), {"workers": 4}, 18),
        (ParameterServer(replica=replica), {"workers": 4, "server_group": "main"}, 24),
        (ParameterServer(shards=3, replicas=0, replica=WIDE), {"workers": 4}, 30),
        (ParameterServer(shards=2), {"workers": 2}, 36),
    ]
    for at, (strategy, options, steps) in enumerate(ways):
        result = train(work, strategy, cluster, epochs=None, steps=steps, checkpoint=tmp_path, resume=at > 0, **options)
        assert result.snapshot.round == steps
    assert distance(result.model(), plain(work, 2, epochs=3)[0]) < EXACT
    assert spaces(group) == []


def test_a_divided_job_has_a_space_for_each_column_and_one_quota(cluster, group, tag):
    seen = []

    def look(progress):
        known = {space["name"]: space for space in group.facts()["spaces"]}
        if len(known) == 2 and not seen:
            seen.append(known)

    work = Small(n=48, pause=0.004, tag=tag)
    strategy = ParameterServer(replica=PIPE)
    quota = {"bytes": 100_000, "operations": 10_000}
    train(work, strategy, cluster, workers=4, server_group="main", name="job", quota=quota, epochs=4, progress=look)
    [known] = seen
    assert sorted(known) == ["job", "job/1"] and {space["workers"] for space in known.values()} == {2}
    for key in quota:
        shares = [space["quota"][key] for space in known.values()]
        assert all(share > 0 for share in shares) and sum(shares) == pytest.approx(quota[key], abs=2)
    assert spaces(group) == []


def test_a_later_driver_drops_every_space_of_a_divided_job(cluster, group):
    layout = Layout.of([("a", torch.zeros(4))])
    for name in ("job", "job/1", "job/2", "job/x", "other/1"):
        group.open(Space(name, 0, 1, ParameterServer(), layout, ((0, 4),), pack(Small().optimizer)))
    JobSpace(group, "job", 4, b"").take_over()
    assert sorted(spaces(group)) == ["job/x", "other/1"]


def test_a_divided_job_may_begin_with_what_another_holds(cluster, group, tag):
    """The other job's space is of the whole model; that of a part of one is refused."""
    work = Small(n=36, pause=0.01, tag=tag)
    found = {}

    def run(name, strategy, workers):
        found[name] = train(work, strategy, cluster, server_group="main", name=name, workers=workers, epochs=8)

    threads = [
        threading.Thread(target=run, args=("whole", ParameterServer(), 2)),
        threading.Thread(target=run, args=("parts", ParameterServer(replica=PIPE), 4)),
    ]
    [thread.start() for thread in threads]
    assert until(lambda: {"whole", "parts", "parts/1"} <= set(spaces(group)) and SEEN[tag] > 80, 60)
    divided = ParameterServer(replica=WIDE)
    branch = train(work, divided, cluster, server_group="main", name="branch", workers=2, branch="whole", epochs=1)
    with pytest.raises(ConfigError, match="parts"):
        train(work, divided, cluster, server_group="main", name="refused", workers=2, branch="parts", epochs=1)
    [thread.join(60) for thread in threads]
    assert branch.history.column("loss").to_pylist()[0] < 0.8 * plain(work, 2, epochs=1)[1][0]
    assert "branched" in kinds(branch)
    assert same(found["whole"], found["parts"]) or distance(found["whole"].model(), found["parts"].model()) < EXACT
    assert spaces(group) == []


def test_checkpoints_come_although_rounds_are_fast(cluster, tmp_path):
    result = train(Small(n=9), PRIVATE, cluster, steps=600, epochs=None, checkpoint_every=1, checkpoint=tmp_path)
    saved = [event["round"] for event in result.events if event["kind"] == "checkpoint"]
    assert saved[0] < 600 and saved[-1] == 600 and saved == sorted(saved)


# -------------------------------------------------------------------------------- what ends, and how


def running(cluster, work, name, tmp_path=None, **more):
    spec = JobSpec("x:Small", {"name": "parameter_server"}, 2, epochs=2, server_group="main", **more)
    driver = Driver(
        WorkloadJob(
            work,
            spec,
            Journal(tmp_path),
            capture=False,
            name=name,
            checkpoints=tmp_path / "checkpoints" if tmp_path else None,
        )
    )
    thread = threading.Thread(target=lambda: outcomes.append(driver.run(cluster)))
    driver.outcomes = outcomes = []
    thread.start()
    return driver, thread


def test_a_stop_frees_the_space_and_keeps_a_checkpoint(cluster, group, tag, tmp_path):
    driver, thread = running(cluster, Small(n=6000, pause=0.004, tag=tag), "job", tmp_path)
    assert until(lambda: SEEN[tag] > 60, 60)
    assert spaces(group) == ["job"]
    driver.stop()
    thread.join(60)
    assert driver.outcomes[0].status is Status.STOPPED
    assert 0 < int(driver.outcomes[0].checkpoint.name[5:]) < 1000
    assert spaces(group) == []
    progress = json.loads((tmp_path / "progress.json").read_text())["server_group"]
    assert (progress["name"], progress["space"], progress["replicas"]) == ("main", "job", 1)
    assert sum(server["segments"] for server in progress["servers"]) == progress["segments"] == 8
    driver.journal.close()


class Fails(Small):
    def loss(self, model, batch):
        if importlib.import_module("small_work").SEEN[self.tag] > 20:
            raise ValueError("boom")
        return super().loss(model, batch)


def test_a_failure_frees_the_space(cluster, group, tag):
    with pytest.raises(WorkloadError, match="boom"):
        train(Fails(n=60, tag=tag), ParameterServer(), cluster, server_group="main")
    assert spaces(group) == []


def test_nothing_of_a_private_group_is_left(cluster):
    train(Small(n=12), PRIVATE, cluster, epochs=1)
    assert until(lambda: not [name for name in cluster._handles if "rayps-server" in name], 60), cluster._handles
    names = [thread.name for thread in threading.enumerate()]
    assert until(lambda: not any(t.name.startswith(("looker", "collector")) for t in threading.enumerate()), 60), names


# ------------------------------------------------------------------------------------- clear errors


def test_a_group_that_is_not_there(cluster, group):
    with pytest.raises(ConfigError, match="'main'") as caught:
        train(Small(), ParameterServer(), cluster, server_group="prod")
    assert "rayps servers start prod" in str(caught.value)
    assert not cluster.spawned["WorkerActor", 0]


@pytest.mark.parametrize(
    ("strategy", "options", "word"),
    [
        (AllReduce(), {"server_group": "main"}, "needs no servers"),
        (ParameterServer(), {"branch": "other"}, "server_group"),
        (
            [(1, AllReduce()), (1, ParameterServer())],
            {"server_group": "main", "branch": "other", "epochs": None},
            "branch",
        ),
        (ParameterServer(), {"server_group": "main", "quota": {"rows": 3}}, "quota"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(cluster, strategy, options, word):
    with pytest.raises(ConfigError, match=word):
        train(Small(), strategy, cluster, **options)
    assert not cluster.spawned


def test_a_name_that_is_open_is_refused(cluster, group, tag):
    driver, thread = running(cluster, Small(n=6000, pause=0.004, tag=tag), "job")
    assert until(lambda: SEEN[tag] > 6, 60)
    with pytest.raises(RaypsError, match="job"):
        train(Small(), ParameterServer(), cluster, server_group="main", name="job")
    assert spaces(group) == ["job"]
    before = SEEN[tag]
    assert until(lambda: SEEN[tag] > before + 10, 60)
    driver.stop()
    thread.join(60)


def test_a_quota_of_bytes_is_an_error_with_the_knob_and_nobody_else_notices(cluster, group, tag):
    driver, thread = running(cluster, Small(n=6000, pause=0.004, tag=tag), "other")
    assert until(lambda: SEEN[tag] > 6, 60)
    with pytest.raises(RaypsError, match="quota"):
        train(Small(), ParameterServer(), cluster, server_group="main", name="job", quota={"bytes": 100})
    before = SEEN[tag]
    assert until(lambda: SEEN[tag] > before + 10, 60)
    assert spaces(group) == ["other"]
    driver.stop()
    thread.join(60)


def test_a_quota_of_operations_slows_a_job_and_changes_nothing(cluster, group):
    work = Small(n=36, optimizer="adam")
    free = train(work, ParameterServer(), cluster, server_group="main")
    seen = []
    held = train(work, ParameterServer(), cluster, server_group="main", quota={"operations": 60}, progress=seen.append)
    assert same(free, held)
    assert seen[-1]["server_group"]["quota"]["operations"] == 60

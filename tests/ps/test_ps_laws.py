"""An elastic group is what fixed servers are, and one process: to the bit, whatever happens to its servers."""

import random
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import covers
import pytest
import torch
from torch.optim import SGD, Adagrad, Adam

import rayps
from rayps.cluster.local import LocalCluster, until
from rayps.ps import group as elastic

STEPS, SIZE = 12, 203


def gradient(rank, step, params):
    """Of params, so that an error would grow; in eighths, so that a mean of 2 or 4 is exact in float64."""
    noise = torch.randint(-8, 9, (SIZE,), generator=torch.Generator().manual_seed(1000 * rank + step)).double()
    return torch.round(params) + noise / 8


def weight(rank, step):
    return float(1 + (rank + step) % 2 * 2)


def start():
    return torch.arange(SIZE).double() / 7


def momentum(params):
    return SGD(params, lr=0.25, momentum=0.5)


def adam(params):
    return Adam(params, lr=0.01)


def alone(workers, optimizer, steps=STEPS):
    """One process on the union of all batches."""
    w = torch.nn.Parameter(start())
    own = optimizer([w])
    for step in range(steps):
        pulled = w.detach().clone()
        grads = [weight(rank, step) * gradient(rank, step, pulled) for rank in range(workers)]
        w.grad = sum(grads) / sum(weight(rank, step) for rank in range(workers))
        own.step()
    return w.detach()


def trained(shared, workers, events=None, steps=STEPS):
    """Every worker's last pull, all in step. `events` are called by rank 0 before that step's push."""
    events = events or {}

    def work(rank):
        server = shared.join(rank)
        try:
            for step in range(steps):
                params = server.pull()
                if rank == 0 and step in events:
                    events[step]()
                server.push(gradient(rank, step, params), weight=weight(rank, step))
            return server.pull()
        finally:
            server.close()

    with ThreadPoolExecutor(workers) as pool:
        found = [call.result(120) for call in [pool.submit(work, rank) for rank in range(workers)]]
    assert all(torch.equal(found[0], other) for other in found)
    return found[0]


@pytest.fixture
def cluster():
    found = LocalCluster()
    yield found
    found.close()

    def left():
        return [thread.name for thread in threading.enumerate() if "server-" in thread.name]

    assert until(lambda: not left(), 60), left()


def group(cluster, workers, **options):
    return rayps.ServerGroup(start(), workers=workers, timeout=60.0, cluster=cluster, **options)


@pytest.mark.parametrize(
    ("servers", "replicas", "segments", "workers", "optimizer"),
    [
        (1, 0, 1, 2, momentum),
        (2, 0, 7, 3, adam),
        (2, 1, 8, 2, momentum),
        (3, 1, None, 4, momentum),
        (3, 1, None, 4, adam),
        (3, 2, 5, 3, momentum),
        (4, 1, SIZE, 2, adam),
    ],
)
def test_in_step_it_is_what_fixed_servers_are_and_one_process(cluster, servers, replicas, segments, workers, optimizer):
    with group(cluster, workers, shards=2, optimizer=optimizer) as fixed:
        law = trained(fixed, workers)
    with group(cluster, workers, shards=servers, replicas=replicas, segments=segments, optimizer=optimizer) as shared:
        found = trained(shared, workers)
    assert torch.equal(found, law)
    assert torch.allclose(found, alone(workers, optimizer), atol=1e-12)
    if workers != 3 and optimizer is momentum:
        assert torch.equal(found, alone(workers, optimizer))


@pytest.mark.parametrize("workers", [1, 3])
def test_resizes_in_the_middle_change_no_bit(cluster, workers):
    with group(cluster, workers, shards=2, optimizer=adam) as fixed:
        law = trained(fixed, workers, steps=30)
    with group(cluster, workers, shards=2, replicas=1, optimizer=adam) as shared:

        def settle():
            shared.wait_settled(30)

        found = trained(
            shared, workers, {4: lambda: shared.resize(4), 14: settle, 15: lambda: shared.resize(3)}, steps=30
        )
        settle()
        facts = shared.facts()
    assert torch.equal(found, law)
    assert len([each for each in facts["servers"] if each["state"] == "alive"]) == 3
    assert facts["counts"]["moves"] > 0 and facts["moves"] == []


def kill_one(cluster, shared):
    """The server that holds the most, without a word."""
    facts = shared.facts()
    worst = max((each for each in facts["servers"] if each["state"] == "alive"), key=lambda each: each["primaries"])
    handle = next(handle for name, handle in cluster._handles.items() if name.endswith(worst["name"]))
    cluster.kill(handle)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_death_in_the_middle_changes_no_bit(cluster, workers):
    with group(cluster, workers, shards=2, optimizer=adam) as fixed:
        law = trained(fixed, workers)
    with group(cluster, workers, shards=3, replicas=1, optimizer=adam) as shared:
        found = trained(shared, workers, {3: lambda: kill_one(cluster, shared), 8: lambda: shared.wait_settled(30)})
        counts = shared.facts()["counts"]
    assert torch.equal(found, law)
    assert counts["deaths"] == 1 and counts["promotions"] > 0 and counts["lost"] == 0


def test_one_asynchronous_worker_is_a_single_process(cluster):
    with group(cluster, 1, shards=3, replicas=1, staleness=None, optimizer=momentum) as shared:
        found = trained(shared, 1, {2: lambda: shared.resize(4), 7: lambda: kill_one(cluster, shared)})
    assert torch.equal(found, alone(1, momentum))


def test_two_spaces_on_one_group_do_not_hear_of_each_other(cluster):
    name = f"both-{secrets.token_hex(4)}"
    running = elastic.start(cluster, name, 3, 1, detached=False)
    try:
        with (
            group(cluster, 2, group=name, name="one", optimizer=adam) as one,
            group(cluster, 3, group=running, name="two", optimizer=momentum) as two,
        ):
            with ThreadPoolExecutor(2) as pool:
                calls = [pool.submit(trained, one, 2, {5: lambda: one.resize(4)}), pool.submit(trained, two, 3)]
                found = [call.result(120) for call in calls]
            assert {space["name"] for space in one.facts()["spaces"]} == {"one", "two"}
        assert running.facts()["spaces"] == []
    finally:
        running.stop()
    assert torch.allclose(found[0], alone(2, adam), atol=1e-12)
    assert torch.allclose(found[1], alone(3, momentum), atol=1e-12)


def test_a_branch_goes_its_own_way(cluster):
    with group(cluster, 2, shards=2, replicas=1, optimizer=momentum) as shared:
        law = trained(shared, 2)
        with shared.branch() as other:
            one = other.join(0)
            assert torch.equal(one.read(), law)
            two = other.join(1)
            one.push(torch.ones(SIZE).double())
            two.push(torch.ones(SIZE).double())
            changed = one.pull()
            assert not torch.equal(changed, law)
            assert torch.equal(shared.join(0).read(), law)
        assert torch.equal(shared.join(0).read(), law)
        assert len(shared.facts()["spaces"]) == 1


# ---- what a push may be: rows, ranges

ROWS, WIDTH = 200, 3
OUTSIDE = {"head": torch.zeros(7).double(), "tail": torch.zeros(4).double()}


def with_table():
    return {**OUTSIDE, "table": torch.arange(ROWS * WIDTH).double().view(ROWS, WIDTH) / 9}


def mixed_pushes(shared, workers, events=None, steps=STEPS):
    """What is there at the end, when each worker pushes rows, a range, or everything in turn. Events as `trained`."""
    events = events or {}

    def work(rank):
        server = shared.join(rank)
        try:
            for step in range(steps):
                made = torch.Generator().manual_seed(1000 * rank + step)
                ids = torch.randint(0, ROWS, (11,), generator=made)
                rows = torch.randn(11, WIDTH, generator=made).double()
                server.pull(ids)
                if rank == 0 and step in events:
                    events[step]()
                match (rank + step) % 4:
                    case 0:
                        lo = 10 * rank + step
                        server.push(torch.randn(40, generator=made).double(), lo=lo, weight=weight(rank, step))
                    case 1:
                        table = torch.zeros(ROWS, WIDTH).double().index_add_(0, ids, rows)
                        server.push({**OUTSIDE, "table": table}, weight=weight(rank, step))
                    case _:
                        server.push(ids, rows, weight=weight(rank, step))
        finally:
            server.close()

    with ThreadPoolExecutor(workers) as pool:
        for call in [pool.submit(work, rank) for rank in range(workers)]:
            call.result(120)
    return shared.join(0).read()


def adagrad(params):
    return Adagrad(params, lr=0.25)


@pytest.mark.parametrize(
    ("workers", "staleness", "optimizer"), [(3, 0, momentum), (3, 0, adam), (1, None, adam), (1, None, adagrad)]
)
def test_rows_and_ranges_are_what_they_are_on_fixed_servers_whoever_dies(cluster, workers, staleness, optimizer):
    options = {"workers": workers, "timeout": 60.0, "cluster": cluster, "optimizer": optimizer, "staleness": staleness}
    with rayps.ServerGroup(with_table(), shards=5, **options) as fixed:
        law = mixed_pushes(fixed, workers)
    with rayps.ServerGroup(with_table(), shards=3, replicas=1, segments=5, **options) as shared:
        events = {2: lambda: shared.resize(4), 5: lambda: kill_one(cluster, shared), 9: lambda: shared.wait_settled(30)}
        found = mixed_pushes(shared, workers, events)
        counts = shared.facts()["counts"]
    for name, value in law.items():
        assert torch.equal(found[name], value), name
    assert counts["deaths"] == 1 and counts["lost"] == 0


# ---- pushes in fewer bytes


@covers.values
@pytest.mark.parametrize("compression", ["fp16", "int8", "top_k:0.1"])
@pytest.mark.parametrize(("workers", "staleness"), [(3, 0), (1, None)])
def test_encoded_pushes_and_what_they_left_out_survive_the_death_of_a_server(cluster, workers, staleness, compression):
    options = {"optimizer": adam, "staleness": staleness, "compression": compression}
    with group(cluster, workers, shards=5, **options) as fixed:
        law = trained(fixed, workers)
    with group(cluster, workers, shards=3, replicas=1, segments=5, **options) as shared:
        events = {2: lambda: shared.resize(4), 5: lambda: kill_one(cluster, shared), 9: lambda: shared.wait_settled(30)}
        found = trained(shared, workers, events)
        counts = shared.facts()["counts"]
    assert torch.equal(found, law)  # a server's death, and a push that is repeated, change no bit
    assert counts["deaths"] == 1 and counts["lost"] == 0
    plain = alone(workers, adam)
    assert torch.allclose(found, plain, atol=0.2)
    assert compression == "fp16" or not torch.equal(found, plain)  # a gradient in eighths fits into fp16


# ---- pulls of one moment, out of step


@pytest.mark.parametrize("staleness", [2, None])
@pytest.mark.parametrize("moving", [False, True])
def test_out_of_step_a_consistent_pull_is_of_one_moment_although_segments_move(cluster, staleness, moving):
    """Each push adds one everywhere: a pull that has a push has it in all elements."""
    options = {"staleness": staleness, "segments": 7, "optimizer": lambda p: SGD(p, lr=3.0)}
    with rayps.ServerGroup(
        torch.zeros(SIZE).double(), workers=3, shards=3, replicas=1, timeout=60.0, cluster=cluster, **options
    ) as shared:
        events = {5: lambda: shared.resize(4), 12: lambda: kill_one(cluster, shared)} if moving else {}

        def work(rank):
            server = shared.join(rank)
            try:
                for step in range(20):
                    time.sleep(random.random() * 0.002)
                    if rank == 0 and step in events:
                        events[step]()
                    found = server.pull(consistent=True)
                    assert (found == found[0]).all(), found
                    assert found[0] <= -step  # its own pushes are there
                    server.push(torch.ones(SIZE).double())
                server.flush()
            finally:
                server.close()

        with ThreadPoolExecutor(3) as pool:
            for call in [pool.submit(work, rank) for rank in range(3)]:
                call.result(240)
        assert torch.equal(shared.join(0).read(), torch.full((SIZE,), -60.0).double())
        if moving:
            assert until(lambda: shared.facts()["counts"]["moves"] > 0, 60)  # the workers may end before them
            counts = shared.facts()["counts"]
            assert counts["deaths"] == 1 and counts["lost"] == 0


def test_a_reader_that_vanishes_or_stays_too_long_lets_the_servers_go(cluster):
    options = {"staleness": None, "shards": 2, "replicas": 0, "cluster": cluster}
    with rayps.ServerGroup(torch.zeros(64), workers=2, timeout=1.0, **options) as shared:
        slow, pusher = shared.server(0), shared.server(1)
        slow.session._stop_segments(0)
        pusher.push(torch.ones(64))
        pusher.settle()  # once the reader's time was over
        slow.session._stop_segments(0)
        slow.session.hang_up()
        slow.close()  # dies while it holds them
        pusher.push(torch.ones(64))
        assert torch.equal(pusher.pull(consistent=True), torch.full((64,), -1.0))

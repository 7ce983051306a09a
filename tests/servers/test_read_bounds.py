"""The staleness bound is of each read (Ho et al., NIPS 2013, section 3): each shard's values are within it.

The table has a column for each worker, and a worker's push adds one to its column: a read tells how many pushes of
each worker each shard has applied.
"""

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from rayps_client.errors import ConfigError
from torch.optim import SGD

import rayps
from rayps.cluster.local import LocalCluster
from rayps.core.strategy.apply_pushes import PlainServers, plain_servers
from rayps.ps.client.session import Session
from rayps.strategies.catalogue import parse

WORKERS, SHARDS, ROWS, STEPS = 3, 3, 6, 25  # two rows of the table on each shard
FIRST_ROWS = torch.arange(SHARDS) * ROWS // SHARDS
ELEMENTS = WORKERS * ROWS // SHARDS  # of a shard
READS = {
    "whole": lambda server: server.pull()[FIRST_ROWS],
    "ranges": lambda server: torch.stack([server.pull(ELEMENTS * k, ELEMENTS * k + WORKERS) for k in range(SHARDS)]),
    "rows": lambda server: server.pull(FIRST_ROWS),
    "one moment": lambda server: server.pull(consistent=True)[FIRST_ROWS],
}


@pytest.fixture
def cluster():
    found = LocalCluster()
    yield found
    found.close()


def group(cluster, staleness, replicas=None, consistent=False):
    return rayps.ServerGroup(
        torch.zeros(ROWS, WORKERS),
        shards=SHARDS,
        replicas=replicas,
        segments=None if replicas is None else SHARDS,
        topology=plain_servers(SHARDS, staleness, replicas=replicas, consistent=consistent),
        optimizer=lambda params: SGD(params, lr=float(WORKERS)),  # a push is scaled by 1 / WORKERS
        workers=WORKERS,
        cluster=cluster,
    )


def read_and_push(shared, rank, read):
    """Return, for each step of this worker, how many pushes of each worker each shard had: [STEPS, SHARDS, WORKERS]."""
    server, ones, seen = shared.join(rank), torch.zeros(ROWS, WORKERS), []
    ones[:, rank] = -1.0
    try:
        for _ in range(STEPS):
            time.sleep(random.random() * 0.002 * (rank == 0))  # worker 0 is slow
            seen.append(read(server).clone())
            server.push(ones)
        return torch.stack(seen)
    finally:
        server.close()


def read_all(shared, read):
    with ThreadPoolExecutor(WORKERS) as pool:
        calls = [pool.submit(read_and_push, shared, rank, read) for rank in range(WORKERS)]
        return [call.result(120) for call in calls]


@pytest.mark.parametrize("replicas", [None, 0, 1], ids=["fixed", "group", "backups"])
@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("way", READS)
def test_what_each_shard_returns_is_within_the_bound(cluster, way, staleness, replicas):
    with group(cluster, staleness, replicas) as shared:
        found = read_all(shared, READS[way])
    for rank, counts in enumerate(found):
        steps = torch.arange(STEPS)[:, None]
        assert (counts[:, :, rank] == steps).all(), "a worker reads its own pushes, on every shard"
        for other in set(range(WORKERS)) - {rank}:
            assert (counts[:, :, other] >= steps - staleness).all()
            assert (counts[:, :, other] <= steps + staleness + 1).all()
        if way == "one moment" or staleness == 0:
            assert (counts == counts[:, :1]).all()


@pytest.mark.parametrize("staleness", [1, 3, None])
@pytest.mark.parametrize("consistent", [False, True])
def test_a_pull_is_of_one_moment_where_the_strategy_says_so(cluster, monkeypatch, staleness, consistent):
    stops, stop = [], Session._stop_segments
    monkeypatch.setattr(Session, "_stop_segments", lambda self, step: stops.append(step) or stop(self, step))
    with group(cluster, staleness, consistent=consistent) as shared:
        found = read_all(shared, READS["whole"])
    assert len(stops) == consistent * WORKERS * STEPS  # by default servers are not stopped for a pull
    if consistent:
        assert all((counts == counts[:, :1]).all() for counts in found)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", True),  # in step
        (",staleness=3", False),
        (",staleness=3,consistent=true", True),
        (",staleness=auto", False),
        (",staleness=auto,consistent=true", True),
        (",staleness=none", False),
    ],
)
def test_the_option_travels_to_a_group(options, expected):
    strategy = parse(f"parameter_server:shards=2{options}")[0].strategy
    assert strategy.topology.pulls_one_moment is expected
    assert PlainServers.from_wire(strategy.server_half.to_wire()).topology == strategy.topology


def test_an_option_that_is_no_flag_is_refused():
    with pytest.raises(ConfigError, match="consistent is 'yes': give true or false"):
        rayps.ParameterServer(staleness=3, consistent="yes")

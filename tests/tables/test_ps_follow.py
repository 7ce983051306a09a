"""A table is followed while it is trained: a serving system has what the servers have, through moves and deaths."""

import random

import numpy as np
import pytest
from rayps_client.errors import ConfigError

from rayps.cluster.local import LocalCluster
from rayps.ps.client.session import Session
from rayps.ps.group import start
from rayps.ps.protocol.messages import GroupMessage
from rayps.ps.protocol.space import Space, SparseTable
from rayps.ps.tables.wire_format import decode_rows, encode_pull, encode_push, split
from rayps.strategies.parameter_server import ParameterServer

TABLE = SparseTable(
    "users", 2, segments=6, init={"name": "zeros"}, optimizer={"name": "sgd", "lr": 1.0}, policy={"ttl": 5}
)


@pytest.fixture
def group():
    cluster = LocalCluster()
    found = start(cluster, "followed", 2, 1, balance=None)
    found.cluster = cluster
    yield found
    found.stop()
    cluster.close()


def pushed(session, step, ids):
    order, bounds = split(ids, TABLE.segments)
    pieces = dict.fromkeys(range(TABLE.segments), b"")
    rows = np.full((len(ids), 2), -float(step + 1), np.float32)
    for i in range(TABLE.segments):
        mine = order[bounds[i] : bounds[i + 1]]
        if len(mine):
            pieces[i] = encode_push(ids[mine], rows[mine])
    session.exchange(GroupMessage.PUSH, pieces, step=step, weight=1.0)


def read(session, ids):
    """What the servers have."""
    order, bounds = split(ids, TABLE.segments)
    found = np.zeros((len(ids), 2), np.float32)
    for i in range(TABLE.segments):
        mine = order[bounds[i] : bounds[i + 1]]
        if len(mine):
            answer = session.exchange(GroupMessage.READ, {i: encode_pull(ids[mine])}).pieces[i]
            found[mine] = decode_rows(answer, len(mine), TABLE).numpy()
    return found


def test_a_table_is_followed_through_moves_and_deaths(group):
    seed = random.getrandbits(32)
    print("seed", seed)
    chance = np.random.default_rng(seed)
    space = group.open(Space("job", 0, 1, ParameterServer(staleness=None), tables=(TABLE,)))
    session = Session(group.contact(), space, 0, incarnation=group.join(space.number, 0), timeout=60.0)
    session.join()
    rows, everything = group.follow("job", "users", timeout=60.0), np.arange(40)
    assert rows.update() == 0 and len(rows) == 0
    changed = []
    for step in range(30):
        ids = np.unique(chance.integers(0, 40, 6))
        pushed(session, step, ids)
        if step == 8:
            group.resize(3)
        if step == 20:
            group.wait_settled(30)
            first = next(server["name"] for server in group.facts()["servers"] if server["primaries"])
            group.cluster.kill(next(h for name, h in group.cluster._handles.items() if name.endswith(first)))
        if step % 3 == 2:
            changed.append(rows.update())
            assert (rows.get(everything) == read(session, everything)).all()
    assert max(changed) < 40  # what changed, not all there is
    assert 0 < len(rows) < 40  # rows that nobody used for 5 steps are gone here, too
    assert rows.update() == 0
    rows.close()
    session.close()
    with pytest.raises(ConfigError, match="no table 'movies'; the tables are 'users'"):
        group.follow("job", "movies")


def test_a_table_that_cannot_be_is_refused_when_its_space_is_opened(group):
    wrong = SparseTable("users", 2, policy={"evict": "lru"})
    with pytest.raises(ConfigError, match="'users': evict is 'lru', and capacity is missing: give capacity"):
        group.open(Space("job", 0, 1, ParameterServer(staleness=None), tables=(wrong,)))
    assert group.facts()["spaces"] == []

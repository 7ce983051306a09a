"""A hot table of a server group."""

import time

import numpy as np
import test_ps_group
from test_ps_group import SECONDS, rows_by_server

from rayps.ps import group as elastic
from rayps.ps.client.session import Session
from rayps.ps.manager.assign_segments import Balance, measure_skew
from rayps.ps.protocol.space import Space, SparseTable
from rayps.ps.tables.client import TableClient
from rayps.strategies.parameter_server import ParameterServer

cluster = test_ps_group.cluster


def tabled(group, name, segments=32, workers=1):
    table = SparseTable("users", 4, segments, optimizer={"name": "sgd", "lr": 0.5}, init={"name": "zeros"})
    return group.open(Space(name, 0, workers, ParameterServer(staleness=None), tables=(table,)))


def test_a_hot_table_is_spread_over_the_servers(cluster):
    """Ids by Zipf's law, each batch of one id, so that a hot id is a hot segment."""
    balance = Balance(hot=1.2, cool=1.1, every=0.2, patience=2, floor=10.0, rest=3.0)
    with elastic.start(cluster, "hot", 4, 1, detached=False, balance=balance) as group:
        space = tabled(group, "job")
        session = Session(
            group.contact(), space, 0, incarnation=group.join(space.number, 0), timeout=SECONDS, name="worker-0"
        )
        session.join()
        client = TableClient(session, space, "users")
        chance, skews, pushed, begun = np.random.default_rng(3), [], {}, time.monotonic()
        while time.monotonic() - begun < 12.0:
            ids = (chance.zipf(1.2, 64) - 1) % 10_000
            for id_ in ids.tolist():
                client.pull([id_])
                pushed[id_] = pushed.get(id_, 0)
            loads = [server["operations_s"] for server in rows_by_server(group)]
            if sum(loads):
                skews.append(measure_skew(loads))
        facts = group.facts()
        print(f"skew {np.mean(skews[:10]):.2f} -> {np.mean(skews[-10:]):.2f}, {facts['counts']['moves']} moves")
        assert facts["counts"]["moves"] > 0 and np.mean(skews[-10:]) < np.mean(skews[:10])
        session.close()

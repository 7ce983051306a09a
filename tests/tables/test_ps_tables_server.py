"""A server with segments of tables."""

import dataclasses

import numpy as np
import pytest
import test_ps_manager
import test_ps_server
from ps_site import error, space
from rayps_client.errors import Conflict

from rayps.ps.protocol.messages import GroupMessage, SegmentPayload
from rayps.ps.protocol.space import Quota, Space, SparseTable
from rayps.ps.tables.wire_format import bucket, encode_push
from rayps.strategies.parameter_server import ParameterServer

site = test_ps_server.site

make = test_ps_manager.make


def test_a_quota_of_bytes_for_tables(site):
    table = SparseTable("users", dim=4, segments=2)
    one = dataclasses.replace(space(), layout=None, cuts=(), tables=(table,), quota=Quota(bytes=20_000))
    site.open(one, ["s0", "s0"])
    worker = site.guest("s0")
    ids = np.arange(400, dtype=np.int64)
    where = bucket(ids, 2)
    for step in range(2):
        pieces = [
            SegmentPayload(i, 1, encode_push(mine := ids[where == i], np.ones((len(mine), 4), np.float32)))
            for i in range(2)
        ]
        answer = worker.ask(GroupMessage.PUSH, pieces, a=step, weight=1.0)
        assert answer.kind == (GroupMessage.ACK if step == 0 else GroupMessage.ERROR)
    assert error(answer)["data"]["field"] == "quota.bytes"
    assert site.segment("s0", 0).marks() == {0: 1, 1: 0}


def test_a_space_with_other_tables_is_refused(make):
    def tabled(workers, segments):
        return Space("job", 0, workers, ParameterServer(), tables=(SparseTable("users", 4, segments),))

    manager = make()
    manager.open(tabled(2, 16))
    with pytest.raises(Conflict, match="another number of workers, another set of tables"):
        manager.open(tabled(5, 3))

"""Prefetch on a session that ends."""

import pytest
import test_ps_session
import torch
from rayps_client.errors import PeerLost
from test_ps_session import later

from rayps.cluster.local import until
from rayps.ps.client.client import GroupServer
from rayps.ps.protocol.messages import GroupMessage
from rayps.ps.protocol.space import SparseTable
from rayps.ps.tables.prefetch import Prefetcher

make = test_ps_session.make


def test_a_hang_up_reaches_who_pulls_ahead(make):
    """An aborted worker must not wait for a prefetch that nobody answers."""
    group, session = make()
    GroupServer(session)
    group.parks = True
    tables = Prefetcher({"users": Client()}, session, lambda batch: {"users": batch}, pulls=True)
    tables.begin(0)
    tables.announce(torch.arange(3).numpy())
    assert until(lambda: tables._reader is not None, 60)
    later(0.1, session.hang_up)
    with pytest.raises(PeerLost, match="ended its own connections"):
        tables.rows("users")
    tables.close()
    with pytest.raises(PeerLost):  # one that is made too late
        session.reader().exchange(GroupMessage.PULL, dict.fromkeys(range(4), b""))


class Client:
    """As much of a TableClient as pulling ahead needs: it asks for the dense vector."""

    table = SparseTable("users", 1, 1)

    def room(self, lookup):
        return torch.zeros(1)

    def pull_pieces(self, lookup):
        return dict.fromkeys(range(4), b"")

    def landing(self, lookup, rows):
        return None

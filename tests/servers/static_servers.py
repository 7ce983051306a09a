"""Servers with a static map in this process, and the workers that join them by real links."""

import functools
import threading
from unittest import mock

import torch

from rayps.comm import link
from rayps.core.job.user_module import pack
from rayps.core.partition import cut_slices
from rayps.core.rows.phase_rounds import Boundary
from rayps.ps.client import connections
from rayps.ps.client.client import GroupServer
from rayps.ps.client.session import Session
from rayps.ps.protocol.segment_map import StaticMap
from rayps.ps.protocol.space import Space
from rayps.ps.server.shard_actor import ShardActor, ShardPlan
from rayps.tensors.flat import Layout
from rayps.tensors.snapshot import Snapshot

SECRET = b"s" * 32
_CONNECTING = threading.RLock()


class Served:
    """One server, in this process."""

    device = "cpu"

    def __init__(self, house, index, generation=1):
        self.actor = ShardActor(index, SECRET, pack(house.factory), device=self.device)
        plan = ShardPlan(house.space, index, generation, house.boundary)
        self.actor.begin(plan, Snapshot(house.space.layout, house.start, positions=[0] * house.workers))
        self.address = self.actor.place().address

    @property
    def segment(self):
        return self.actor._assigned.segment

    @property
    def shard(self):
        return self.segment.shard

    @property
    def loop(self):
        return self.actor._loop

    def do(self, work):
        """Between two requests, in the server's thread: what `work` does to the shard."""
        return self.loop.do(lambda: work(self.shard))

    def facts(self):
        return self.actor.poll(0)

    def boxes(self):
        """The workers that share memory."""
        return [guest for guest in list(self.loop._peers.values()) if guest.mailbox is not None]

    def close(self):
        self.actor.close()


class House:
    """Some servers, and the way to them."""

    def __init__(self, layout, start, shards, workers, strategy, factory, boundary=None):
        self.start, self.workers, self.factory, self.strategy = start, workers, factory, strategy
        self.boundary = boundary or Boundary(0, -1)
        self.ranges = [(cut.start, cut.stop) for cut in cut_slices(layout.size, shards)]
        self.space = Space("house", 1, workers, strategy, layout, tuple(self.ranges))
        self.loops = [Served(self, i) for i in range(shards)]
        self.maps, self.servers = [], []
        self.now = self.map(final=True).map

    def map(self, final):
        found = StaticMap.of({f"shard-{i}": served.address for i, served in enumerate(self.loops)}, SECRET, final=final)
        self.maps.append(found)
        return found

    def restart(self, i):
        """A server dies, and its replacement begins from the beginning."""
        self.loops[i].close()
        generation = self.now.holders[i].generation + 1
        self.loops[i] = Served(self, i, generation)
        for each in self.maps:
            each.publish(each.moved(i, self.loops[i].address))
        self.now = self.maps[0].map

    def join(
        self,
        rank,
        *,
        timeout=60.0,
        defer=False,
        resident=True,
        consistent=False,
        relink=False,
        keep=0,
        prefer="auto",
        layout=None,
    ):
        """A worker; with `relink` it waits for the replacement of a server that is lost."""
        found = self.map(final=not relink)
        found.publish(self.now)
        incarnation = connections.take_rank(found, self.space, rank, 60.0)
        calls = functools.partial(link.connect, prefer=prefer)
        with _CONNECTING, mock.patch.object(connections, "connect", calls):
            session = Session(
                found, self.space, rank, incarnation=incarnation, timeout=timeout, keep=keep, resident=resident
            )
            try:
                server = GroupServer(session, defer=defer, consistent=consistent)
            except BaseException:
                session.close()
                raise
        self.servers.append(server)
        return server

    def close(self):
        for server in self.servers:
            server.close()
        for loop in self.loops:
            loop.close()


def vector_layout(n, dtype=torch.float64):
    return Layout.of([("w", torch.empty(n, dtype=dtype))])


def lines(server):
    """A worker's connections, by server."""
    return server.session._connections.open

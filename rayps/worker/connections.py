"""A worker's connections in one generation: to a ring, to servers, to a space of a server group."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from rayps.comm.link import Link, Listener, connect
from rayps.comm.ring import Ring
from rayps.core.errors import LinkError, PeerLost, PeerTimeout
from rayps.core.topology import Servers, servers_of
from rayps.ps.client.client import GroupServer
from rayps.ps.client.session import Session
from rayps.ps.fixed import Server
from rayps.tensors.flat import Layout
from rayps.tensors.snapshot import Snapshot
from rayps.worker.plan import WorkerPlan

log = logging.getLogger(__name__)

TRY_SECONDS = 1.0  # to connect to a replaced shard, before its address is looked up again


class WorkerConnections:
    """Hold the connections of one generation. `shards` are the addresses of fixed servers, `ranges` their slices.

    A thread of an earlier generation that ends late cannot close the connections of the next.
    """

    def __init__(self, shards: list[str], ranges: list[tuple[int, int]]) -> None:
        self.ring: Ring | None = None
        self.rings: dict[str, Ring] = {}  # within a replica of several workers, by axis
        self.server: Server | GroupServer | None = None
        self.talk: Session | None = None  # with the job's space on a server group
        self._shards, self._ranges = Addresses(shards), ranges
        self._link: Callable[[int], Link] | None = None

    def form(self, plan: WorkerPlan, snapshot: Snapshot, listener: Listener) -> None:
        """Connect to all peers of the plan.

        Raises:
            PeerTimeout, PeerLost, StaleGeneration: a peer did not connect, or this generation has ended.
        """
        servers, seat = servers_of(plan.strategy), plan.peers.seat
        if seat is not None:
            # in step an open round is retained whole, whatever its size: no worker goes back when a server dies
            held = seat.space.servers
            keep = max(held.group_replay_bytes, 4 * _bytes(snapshot.layout) if held.in_step else 0)
            self.talk = Session(
                seat.door,
                seat.space,
                plan.place.data,
                incarnation=seat.incarnation,
                timeout=plan.timeout,
                name=f"worker-{plan.rank}",
                keep=keep,
            )
        if servers is None:
            self.ring = self._ring(plan, "data", plan.peers.ring, listener, snapshot)
        elif self.talk is not None:
            self.server = GroupServer(self.talk)
        else:
            self.server = self._join(plan, servers, snapshot)
        if self.ring is not None and self.talk is not None:
            self.talk.join()
        for axis, addresses in plan.peers.axes.items():
            self.rings[axis] = self._ring(plan, axis, addresses, listener, snapshot)

    def _ring(self, plan: WorkerPlan, axis: str, addresses: list[str], listener: Listener, snapshot: Snapshot) -> Ring:
        """Form a ring of all ranks that differ from this one along `axis` only."""
        place = plan.place
        label, table = "worker", snapshot.ring
        if plan.division is not None:
            label = place.line(axis)
            table = (snapshot.ring or {}).get(label)
            label += f"#{plan.peers.attempt}"  # callers of an earlier attempt are refused
        pairs = axis == "stage"  # stages exchange in pairs: no algorithm to choose
        return Ring.form(
            getattr(place, axis),
            addresses,
            listener,
            secret=plan.peers.secret,
            generation=plan.generation,
            timeout=plan.timeout,
            label=label,
            table=table,
            algorithm="ring" if pairs else "auto",
            streams=int(pairs),
        )

    def rewire(self, shard: int, address: str) -> None:
        """Connect to the replacement of a fixed shard, and send again what it lacks from this worker.

        Any thread may call it.
        """
        self._shards.change(shard, address)
        server, link = self.server, self._link
        if isinstance(server, Server) and link is not None:
            try:
                # at once: the plan's thread may wait for another shard or have ended, and others need its pushes
                server.replay(shard, lambda: link(shard), lambda: shard in self._shards.unseen())
            except LinkError as error:  # it died again; `rewire` is called for its next replacement
                log.info("%s", str(error))

    def part(self) -> None:
        """Break all connections, so that peers that wait for this worker get PeerLost. Any thread may call it."""
        self._shards.close()
        for tie in self._all():
            tie.abort() if isinstance(tie, Ring) else tie.hang_up()

    def close(self) -> None:
        """Close all connections, after the plan's thread has ended."""
        for tie in self._all():
            tie.close()

    def steps(self) -> tuple[int, int]:
        """The least and the most of this rank's next step, as its servers know it. Raises as `Session.join`."""
        assert self.server is not None, "the parameters are on servers"
        marks = [self.server.step] if self.talk is None else self.talk.join().values()
        return min(marks), max(marks)

    def _all(self) -> list[Ring | Server | GroupServer | Session]:
        return [tie for tie in (self.ring, *self.rings.values(), self.server, self.talk) if tie is not None]

    # ---- fixed shards

    def _join(self, plan: WorkerPlan, servers: Servers, snapshot: Snapshot) -> Server:
        def link(shard: int, timeout: float = TRY_SECONDS) -> Link:
            return connect(
                self._shards.current(shard),
                name=f"worker-{plan.rank}",
                secret=plan.peers.secret,
                generation=plan.generation,
                timeout=timeout,
            )

        self._link = link
        links = [link(i, plan.timeout) for i in range(len(self._ranges))]
        relink = None if servers.in_step else lambda shard: self._relink(plan, shard, link)
        return Server(
            plan.place.data,
            snapshot.layout.dtype,
            self._ranges,
            links,
            timeout=plan.timeout,
            step=plan.start,
            relink=relink,
            defer=True,
            consistent=servers.staleness is not None,
            independent=not servers.in_step,
            keep=servers.replay_bytes,
            layout=snapshot.layout,
        )

    def _relink(self, plan: WorkerPlan, shard: int, link: Callable[[int], Link]) -> Link:
        log.info("worker-%d lost shard-%d: waiting for its replacement", plan.rank, shard)
        deadline = time.monotonic() + plan.timeout
        self._shards.changed(shard, plan.timeout)
        while True:
            try:
                return link(shard)
            except PeerLost:  # the replacement may have died too, and been replaced
                if time.monotonic() > deadline:
                    raise
                if shard in self._shards.unseen():
                    self._shards.changed(shard, plan.timeout)


def _bytes(layout: Layout) -> int:
    return layout.size * layout.dtype.itemsize


class Addresses:
    """Hold the shards' addresses as given by the driver; wait for the new address of a lost shard."""

    def __init__(self, addresses: list[str] | None = None) -> None:
        self._addresses = addresses or []
        self._news = threading.Condition()
        self._changes = [0] * len(self._addresses)
        self._seen = [0] * len(self._addresses)
        self._closed = False

    def current(self, shard: int) -> str:
        """Return the address of a shard."""
        return self._addresses[shard]

    def change(self, shard: int, address: str) -> None:
        """Set the new address of a shard."""
        with self._news:
            self._addresses[shard] = address
            self._changes[shard] += 1
            self._news.notify_all()

    def unseen(self) -> list[int]:
        """Return the shards whose new address has not been read yet."""
        with self._news:
            return [i for i, count in enumerate(self._changes) if count > self._seen[i]]

    def changed(self, shard: int, timeout: float) -> str:
        """Wait for and return a shard's new address.

        Raises:
            PeerTimeout: it was not replaced within `timeout` seconds.
            PeerLost: this worker was ended meanwhile.
        """
        with self._news:
            if not self._news.wait_for(lambda: self._closed or self._changes[shard] > self._seen[shard], timeout):
                raise PeerTimeout(
                    f"shard-{shard} died and was not replaced within {timeout:g} s: raise timeout",
                    peer=f"shard-{shard}",
                    seconds=timeout,
                )
            if self._closed:
                raise PeerLost(
                    f"shard-{shard} died, and this worker's run was ended before a replacement", peer=f"shard-{shard}"
                )
            self._seen[shard] = self._changes[shard]
            return self._addresses[shard]

    def close(self) -> None:
        """End all waits."""
        with self._news:
            self._closed = True
            self._news.notify_all()

"""A worker's connections in one generation: to rings, to servers, to a space of a server group."""

from __future__ import annotations

import logging
import threading

from rayps_client.errors import RaypsError

from rayps.comm.link import Listener
from rayps.comm.ring import Ring
from rayps.comm.ring.form_mesh import Formation
from rayps.core.strategy.topology import servers_of
from rayps.core.time.member_times import SERVERS, LineFacts
from rayps.ps.client.client import GroupServer
from rayps.ps.client.session import Session
from rayps.ps.protocol.segment_map import SpaceMap, StaticMap
from rayps.ps.protocol.space import SpaceRank
from rayps.tensors.flat import Layout
from rayps.tensors.snapshot import Snapshot
from rayps.worker.plan import WorkerPlan

log = logging.getLogger(__name__)


class WorkerConnections:
    """The connections of one generation. `seat` is the worker's place in a space on servers.

    Each generation has an object of its own, so that a thread of an earlier generation that ends late cannot close the
    connections of the next one.
    """

    def __init__(self, seat: SpaceRank | None) -> None:
        self.ring: Ring | None = None
        self.rings: dict[str, Ring] = {}  # from an axis to the ring of the replica's workers along this axis
        self.server: GroupServer | None = None  # the servers that hold the parameters
        self.session: Session | None = None  # the session with the job's space
        self._formation = Formation()
        self._map = seat.source if seat is not None and isinstance(seat.source, StaticMap) else None

    def form(self, plan: WorkerPlan, snapshot: Snapshot, listener: Listener, device: str = "cpu") -> None:
        """Connect to all peers of the plan. `device` is where this worker's tensors are.

        Raises:
            PeerTimeout, PeerLost, StaleGeneration: a peer did not connect, or this generation or `abort` has ended it.
        """
        servers, seat = servers_of(plan.strategy), plan.peers.seat
        if seat is not None:
            held, keep = seat.space.servers, seat.space.servers.replay_bytes
            if self._map is None:
                # if workers run in step, the pushes of the current round must be retained, whatever their size,
                # because no worker returns to an earlier round when a server dies
                keep = max(held.group_replay_bytes, 4 * _count_bytes(snapshot.layout) if held.in_step else 0)
            self.session = Session(
                seat.source,
                seat.space,
                plan.place.data,
                incarnation=seat.incarnation,
                timeout=plan.timeout,
                name=f"worker-{plan.rank}",
                keep=keep,
            )
            self._formation.check()  # after the assignment: an `abort` at the same time hangs it up, or is seen here
        if servers is None:
            self.ring = self._form_ring(plan, "data", plan.peers.ring, listener, snapshot, device)
        else:
            assert self.session is not None, "the plan of a strategy with servers has a seat"
            self.server = GroupServer(self.session)
        if self.ring is not None and self.session is not None:
            self.session.join()
        for axis, addresses in plan.peers.axes.items():
            self.rings[axis] = self._form_ring(plan, axis, addresses, listener, snapshot, device)

    def _form_ring(
        self, plan: WorkerPlan, axis: str, addresses: list[str], listener: Listener, snapshot: Snapshot, device: str
    ) -> Ring:
        """Form a ring of all ranks that differ from this one along `axis` only."""
        place = plan.place
        label, table = "worker", snapshot.ring
        if plan.division is not None:
            label = place.line(axis)
            table = (snapshot.ring or {}).get(label)
            label += f"#{plan.peers.attempt}"  # callers of an earlier attempt are refused
        pairs = axis == "stage"  # stages exchange in pairs, and no algorithm has to be chosen
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
            device="cpu" if pairs else device,
            formation=self._formation,
        )

    def waits(self, plan: WorkerPlan) -> dict[str, float]:
        """Return the seconds waited for each peer in this generation, also in the background, by the peer's name."""
        found: dict[str, float] = {}
        for axis, ring in self._list_rings().items():
            for name, seconds in zip(_list_names(plan, axis), ring.waits, strict=True):
                found[name] = found.get(name, 0.0) + seconds
        if self.session is not None:
            found[SERVERS] = self.session.seconds_waiting
        return {name: seconds for name, seconds in found.items() if seconds}

    def lines(self, plan: WorkerPlan) -> dict[str, LineFacts]:
        """Return what the kernel counts for the TCP connections of this generation, by the peer's name."""
        found = {} if self.session is None else self.session.lines
        for axis, ring in self._list_rings().items():
            names = _list_names(plan, axis)
            for rank, line in ring.lines.items():
                found[names[rank]] = line.plus(found[names[rank]]) if names[rank] in found else line
        return found

    def _list_rings(self) -> dict[str, Ring]:
        return dict(self.rings) if self.ring is None else {"data": self.ring, **self.rings}

    def rewire(self, found: SpaceMap) -> None:
        """Use the map `found`, in which a server is replaced, and repeat the pushes that the new server lacks.

        Any thread may call this method.
        """
        if self._map is not None:
            self._map.publish(found)
            # push at once, because other workers may wait for these pushes while the plan's thread computes or has
            # ended; push in another thread, because a running exchange may wait for a worker that lacks this map
            threading.Thread(target=self._catch_up, daemon=True, name="catch-up").start()

    def _catch_up(self) -> None:
        try:
            if self.session is not None:
                self.session.catch_up()
        except RaypsError as error:  # the new server has died too; `rewire` will be called with its replacement
            log.info("%s", str(error))

    def abort(self) -> None:
        """Break off all exchanges, also those by which connections are formed. Any thread may call this method.

        Peers that wait for this worker get an error.
        """
        self._formation.abort()
        for each in (self.server, self.session):
            if each is not None:
                each.hang_up()

    def close(self) -> None:
        """Close all connections, after the plan's thread has ended."""
        for each in self._list_all():
            each.close()

    def steps(self) -> tuple[int, int]:
        """Return the smallest and the largest of the next steps of this rank that its servers report.

        Raises LinkError if a server does not answer: see `Session.join`.
        """
        assert self.server is not None, "the parameters are on servers"
        marks = [self.server.step] if self.session is None else self.session.join().values()
        return min(marks), max(marks)

    def _list_all(self) -> list[Ring | GroupServer | Session]:
        return [each for each in (self.ring, *self.rings.values(), self.server, self.session) if each is not None]


def _list_names(plan: WorkerPlan, axis: str) -> list[str]:
    """Return the names of the workers of the ring along `axis`, in the order of the ring's ranks."""
    return [f"worker-{rank}" for rank in plan.grid.along(axis, plan.rank)]


def _count_bytes(layout: Layout) -> int:
    return layout.size * layout.dtype.itemsize

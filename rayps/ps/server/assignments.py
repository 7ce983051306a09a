"""The segments that a server holds, each with a role and a generation, and how the manager's orders change them.

No sockets and no threads. Orders describe the state that the server must reach: the server changes what differs, and
reports it to the manager. A repeated order changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from rayps_client.errors import WorkloadError

from rayps.ps.client.table_face import find_tables
from rayps.ps.protocol.messages import Event, Role, SegmentOrder
from rayps.ps.protocol.space import ServedSegment, Space
from rayps.ps.server.dense_segment import DenseSegment
from rayps.tensors.optim import Factory


class SegmentReport(NamedTuple):
    """An event about a segment, which is sent to the manager. `name`: the backup's server if it is about a backup."""

    space: int
    event: Event
    segment: int
    generation: int
    name: str = ""


@dataclass(slots=True, eq=False)
class AssignedSegment:
    """One segment that this server holds, as primary or as backup."""

    space: AssignedSpace
    index: int
    role: Role
    generation: int
    segment: ServedSegment | None = None  # None if this is a backup that has not received a state yet
    usable: bool = True  # False until a state is loaded, here or on the primary that sent its state
    copies: dict[str, Any] = field(default_factory=dict)  # server -> `rayps.ps.server.replication.ReplicaCopy`
    state_generation: int = 0  # the generation of its last change or state; a part of the mark (see `replication`)
    source: object = None  # if this is a backup: the connection on which its state came
    # if this is a backup: generation and tag of the last state or change of its primary that it has applied
    last_copied: tuple[int, int] = (-1, 0)
    since: float = 0.0  # when its present role began
    handed: bool = False  # whether HANDED was reported
    saved: dict[int, int] = field(default_factory=dict)  # rank -> number of its steps in the state stored elsewhere
    saving: dict[int, dict[int, int]] = field(default_factory=dict)  # round -> as `saved`, for states to be stored

    @property
    def serves(self) -> bool:
        """Whether this server answers requests to the segment."""
        return self.role == Role.PRIMARY

    def durable(self, rank: int) -> int:
        """Return the step of a rank below which no push is lost if this server dies after it has answered.

        If the segment has backups, these are all applied pushes, because an answer waits for the backups. If it has no
        backups, these are only the pushes in a state that is stored elsewhere.
        """
        assert self.segment is not None
        saved = None if self.copies else self.saved.get(rank, 0)
        if saved == 0:
            return 0
        applied = self.segment.durable(rank)
        return applied if saved is None else min(applied, saved)

    def marks(self) -> dict[int, int]:
        """Return a dict from each rank to its next step. The pushes of all earlier steps are recorded."""
        assert self.segment is not None
        return self.segment.marks()

    def record_saved_state(self, rounds: int) -> None:
        """Record that the state after `rounds` rounds is stored elsewhere."""
        marks = self.saving.get(rounds)
        if marks is not None:
            self.saved = {rank: max(step, self.saved.get(rank, 0)) for rank, step in marks.items()}
            self.saving = {number: each for number, each in self.saving.items() if number > rounds}


class AssignedSpace:
    """A space of which this server holds segments."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.static = False  # whether the space has no manager and no backups, so that no other server takes over
        self.by_index: dict[int, AssignedSegment] = {}
        self.incarnations: dict[int, int] = {}  # rank -> the highest incarnation that has joined
        self.parked: list[Any] = []  # requests that wait for the clock
        # from (a rank, the rank whose push it awaited) to the seconds for which requests were parked
        self.delays: dict[tuple[int, int], float] = {}
        self.withheld: list[Any] = []  # answers that wait for backups
        self.unplaced_branches: set[tuple[int, int]] = (
            set()
        )  # (segment, generation) that could not begin here as a branch
        self.operations = 0
        self.rejected = 0
        self.seconds = 0.0
        self._factory: Factory | None = None

    @property
    def number(self) -> int:
        """The number that the manager gave the space."""
        return self.space.number

    @property
    def factory(self) -> Factory:
        """The optimizer factory of the dense vector. Raises WorkloadError if it cannot be unpacked."""
        if self._factory is None:
            try:
                self._factory = self.space.unpack_factory()
            except Exception as error:
                raise WorkloadError(
                    f"the optimizer of space {self.space.name!r} cannot be unpacked on a server: "
                    f"{type(error).__name__}: {error}\n"
                    "install the package that it needs on every machine of the cluster"
                ) from error
        return self._factory

    def primaries(self) -> list[AssignedSegment]:
        """Return the space's segments of which this server is primary."""
        return [assigned for assigned in self.by_index.values() if assigned.serves]

    def make(self, index: int) -> ServedSegment:
        """Create segment `index` of the space, of the dense vector or of a table, without values."""
        if self.space.table_of(index) is None:
            return DenseSegment(self.space, index, self.factory)
        made = find_tables().make_segment(self.space, index, self.given_factory)
        if self.space.bound is not None:
            made.move_bound(self.space.bound)
        return made

    @property
    def given_factory(self) -> Factory | None:
        """The job's optimizer factory, or None if the space has none. Raises WorkloadError if it cannot be unpacked."""
        return self.factory if self.space.factory else None

    @property
    def nbytes(self) -> int:
        """Bytes of the space's segments of which this server is primary."""
        return sum(assigned.segment.nbytes for assigned in self.primaries() if assigned.segment is not None)


class OrderActions(Protocol):
    """What `Assignments` calls on the server when an order also concerns backups, requests or the manager."""

    def report(self, report: SegmentReport) -> None:
        """Send an event to the manager."""

    def set_backups(self, assigned: AssignedSegment, copies: dict[str, str], *, anew: bool) -> None:
        """Keep backups of a segment on these servers (name -> address) and on no others.

        `anew`: this is the first order of a new generation of the segment.
        """

    def stop_serving(self, assigned: AssignedSegment) -> None:
        """Refuse the parked requests that touch this segment."""

    def withdraw_answers(self, assigned: AssignedSegment) -> None:
        """Answer STALE in place of the withheld answers about this segment, and drop its backups."""


class Assignments:
    """The spaces of which a server holds segments, and the changes that orders make to these segments."""

    def __init__(self, actions: OrderActions) -> None:
        self.spaces: dict[int, AssignedSpace] = {}
        self.closed_spaces: set[int] = set()  # numbers of closed spaces
        self._actions = actions

    def add_space(self, space: Space) -> AssignedSpace:
        """Add a space before its segments are assigned. If it is known, replace its options: quota and bound."""
        assigned_space = self.spaces.get(space.number)
        if assigned_space is None:
            assigned_space = self.spaces[space.number] = AssignedSpace(space)
            self.closed_spaces.discard(space.number)
        else:
            moved = space.bound is not None and space.bound != assigned_space.space.bound
            assigned_space.space = space
            if moved and space.bound is not None:
                for assigned in assigned_space.by_index.values():
                    if assigned.segment is not None:
                        assigned.segment.move_bound(space.bound)
        return assigned_space

    def assign(self, space: Space, index: int, generation: int, segment: ServedSegment) -> AssignedSegment:
        """Make this server the primary of `segment`, which has its state already. For a server without a manager."""
        assigned_space = self.add_space(space)
        assigned_space.static = True
        found = AssignedSegment(
            assigned_space, index, Role.PRIMARY, generation, segment, state_generation=generation, since=_read_clock()
        )
        assigned_space.by_index[index] = found
        return found

    def drop_space(self, number: int) -> None:
        """Drop a closed space and its segments."""
        self.closed_spaces.add(number)
        assigned_space = self.spaces.get(number)
        if assigned_space is not None:
            for assigned in list(assigned_space.by_index.values()):
                self._end(assigned)
            del self.spaces[number]

    def apply_orders(self, assigned_space: AssignedSpace, orders: Iterable[SegmentOrder]) -> None:
        """Apply the manager's orders to the segments of a space."""
        for order in orders:
            assigned = assigned_space.by_index.get(order.segment)
            if assigned is not None and order.generation < assigned.generation:
                continue  # the order is of an earlier generation
            match order.role:
                case Role.PRIMARY:
                    self._assign_primary(assigned_space, assigned, order)
                case Role.LEAVING:
                    self._assign_leaving(assigned, order)
                case Role.COPY:
                    self._copy(assigned_space, assigned, order)
                case Role.NONE:
                    if assigned is not None:
                        self._end(assigned)
                    report = SegmentReport(assigned_space.number, Event.DROPPED, order.segment, order.generation)
                    self._actions.report(report)

    def branch(self, assigned_space: AssignedSpace, parent: AssignedSpace, index: int, generation: int) -> bool:
        """Begin a branch's segment with the values of its parent's segment.

        Return False if this server does not serve the parent's segment.
        """
        base = parent.by_index.get(index)
        if base is None or base.segment is None or not base.serves or not base.usable:
            assigned_space.unplaced_branches.add((index, generation))
            return False
        known = assigned_space.by_index.get(index)
        if known is not None and known.generation >= generation and known.usable:
            return True
        segment = base.segment.branch(assigned_space.space, factory=assigned_space.given_factory)
        assigned_space.by_index[index] = AssignedSegment(
            assigned_space, index, Role.PRIMARY, generation, segment, state_generation=generation, since=_read_clock()
        )
        self._actions.report(SegmentReport(assigned_space.number, Event.READY, index, generation))
        return True

    def become_copy(
        self, assigned_space: AssignedSpace, index: int, generation: int, source: object
    ) -> AssignedSegment | None:
        """Make this server a backup of a segment, because the primary of this generation sends a state over `source`.

        The state may arrive before the manager's order. It means the same as the order, because only the manager
        assigns generations. Return None if this server has a later generation of the segment, or is itself the primary
        of this generation.
        """
        assigned = assigned_space.by_index.get(index)
        if assigned is not None and (
            generation < assigned.generation or (assigned.serves and generation == assigned.generation)
        ):
            return None
        self._copy(assigned_space, assigned, SegmentOrder(index, Role.COPY, generation, {}))
        assigned = assigned_space.by_index[index]
        assigned.source = source
        return assigned

    # ---- roles

    def _assign_primary(
        self, assigned_space: AssignedSpace, assigned: AssignedSegment | None, order: SegmentOrder
    ) -> None:
        anew = assigned is None or assigned.generation < order.generation or assigned.role != Role.PRIMARY
        if assigned is None and (order.segment, order.generation) in assigned_space.unplaced_branches:
            return
        if assigned is None:
            dense = assigned_space.space.table_of(order.segment) is None
            usable = not dense and not order.lost
            assigned = AssignedSegment(
                assigned_space,
                order.segment,
                Role.PRIMARY,
                order.generation,
                assigned_space.make(order.segment),
                usable,
            )
            assigned.state_generation = order.generation
            assigned_space.by_index[order.segment] = assigned
        elif assigned.segment is None:
            self._actions.report(SegmentReport(assigned_space.number, Event.ASKED, order.segment, order.generation))
            return
        elif anew:
            if assigned.serves:  # the parked requests named an older generation
                self._actions.stop_serving(assigned)
            elif assigned.role == Role.COPY:
                getattr(assigned.segment, "promoted", _do_nothing)()
            assigned.role, assigned.generation, assigned.handed = Role.PRIMARY, order.generation, False
            assigned.source = None
        if anew:
            assigned.since = _read_clock()
            self._actions.report(SegmentReport(assigned_space.number, Event.READY, order.segment, order.generation))
        self._actions.set_backups(assigned, order.copies, anew=anew)

    def _assign_leaving(self, assigned: AssignedSegment | None, order: SegmentOrder) -> None:
        if assigned is None or assigned.segment is None or assigned.role == Role.COPY:
            return  # this server has nothing to hand over
        if assigned.role != Role.LEAVING:
            assigned.role, assigned.handed, assigned.since = Role.LEAVING, False, _read_clock()
            self._actions.stop_serving(assigned)
        assigned.generation = order.generation
        self._actions.set_backups(assigned, order.copies, anew=False)

    def _copy(self, assigned_space: AssignedSpace, assigned: AssignedSegment | None, order: SegmentOrder) -> None:
        if assigned is None:
            assigned_space.by_index[order.segment] = AssignedSegment(
                assigned_space, order.segment, Role.COPY, order.generation, since=_read_clock()
            )
            return
        if assigned.role != Role.COPY:
            self._actions.stop_serving(assigned)
            self._actions.withdraw_answers(assigned)
            if not assigned.usable:
                assigned.segment = None
            assigned.role, assigned.since = Role.COPY, _read_clock()
        assigned.generation = order.generation

    def _end(self, assigned: AssignedSegment) -> None:
        self._actions.stop_serving(assigned)
        self._actions.withdraw_answers(assigned)
        getattr(assigned.segment, "close", _do_nothing)()
        del assigned.space.by_index[assigned.index]


def _do_nothing() -> None:
    """Do nothing. Called in place of an optional method that a segment does not have."""


def _read_clock() -> float:
    return time.monotonic()

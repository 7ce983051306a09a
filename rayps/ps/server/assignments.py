"""The segments that a server holds, each with a role and a generation, and how the manager's orders change them.

No sockets and no threads. Orders describe the state that the server must reach: the server changes what differs, and
reports it to the manager. A repeated order changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from rayps.core.errors import WorkloadError
from rayps.ps.protocol.messages import Event, Role, SegmentOrder
from rayps.ps.protocol.space import ServedSegment, Space
from rayps.ps.server.dense_segment import DenseSegment
from rayps.ps.tables.row_optimizers import Scheduled
from rayps.ps.tables.table_segment import TableSegment
from rayps.tensors.learning_rate import Recipe
from rayps.tensors.optim import Factory


class SegmentReport(NamedTuple):
    """An event about a segment, to be sent to the manager. `name`: the backup's server, for an event about a backup."""

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
    segment: ServedSegment | None = None  # None: a backup that has not received a state yet
    usable: bool = True  # False until a state is loaded, here or on the primary that sent its state
    copies: dict[str, Any] = field(default_factory=dict)  # by server: `rayps.ps.server.replication.ReplicaCopy`
    line: int = 0  # the generation of its last change or state, a part of the mark (see `replication`)
    source: object = None  # of a backup: the connection on which its state came
    since: float = 0.0  # when its present role began
    handed: bool = False  # whether HANDED was reported
    saved: dict[int, int] = field(default_factory=dict)  # by rank: number of steps in the state stored elsewhere
    saving: dict[int, dict[int, int]] = field(default_factory=dict)  # by round: as `saved`, of states to be stored

    @property
    def serves(self) -> bool:
        """Whether this server answers requests to the segment."""
        return self.role == Role.PRIMARY

    def durable(self, rank: int) -> int:
        """Return the step of a rank below which no push is lost if this server dies after an answer.

        If the segment has backups, all applied pushes count, because an answer waits for the backups anyway. If it has
        none, only the pushes in a state that is stored elsewhere count.
        """
        assert self.segment is not None
        saved = None if self.copies else self.saved.get(rank, 0)
        if saved == 0:
            return 0
        applied = self.segment.durable(rank)
        return applied if saved is None else min(applied, saved)

    def marks(self) -> dict[int, int]:
        """Return for each rank its next step: the pushes of all earlier steps are recorded."""
        assert self.segment is not None
        return self.segment.marks()

    def state_is_kept(self, rounds: int) -> None:
        """Record that the state after `rounds` rounds is stored elsewhere."""
        marks = self.saving.get(rounds)
        if marks is not None:
            self.saved = {rank: max(step, self.saved.get(rank, 0)) for rank, step in marks.items()}
            self.saving = {number: held for number, held in self.saving.items() if number > rounds}


class AssignedSpace:
    """A space of which this server holds segments."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.static = False  # whether the space has no manager and no backups, so that no other server takes over
        self.holdings: dict[int, AssignedSegment] = {}
        self.incarnations: dict[int, int] = {}  # by rank: the highest incarnation that has joined
        self.parked: list[Any] = []  # requests that wait for the clock
        self.withheld: list[Any] = []  # answers that wait for backups
        self.unborn: set[tuple[int, int]] = set()  # segment, generation: of a branch whose parent's segment is not here
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
        """The optimizer factory of the dense vector. Raises WorkloadError: it cannot be unpacked."""
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
        return [holding for holding in self.holdings.values() if holding.serves]

    def make(self, index: int) -> ServedSegment:
        """Create segment `index` of the space, without values: of the dense vector or of a table."""
        found = self.space.table_of(index)
        if found is None:
            return DenseSegment(self.space, index, self.factory)
        return TableSegment(found[0], found[1], self.space.strategy, self.space.workers, scheduled=self.scheduled)

    @property
    def scheduled(self) -> Scheduled | None:
        """The learning-rate schedule of the tables' optimizers; None if the job has none. Raises WorkloadError."""
        found = self.factory if self.space.factory else None
        return Scheduled(found, self.space.ticks) if isinstance(found, Recipe) else None

    @property
    def nbytes(self) -> int:
        """Bytes of the space's segments of which this server is primary."""
        return sum(holding.segment.nbytes for holding in self.primaries() if holding.segment is not None)


class OrderActions(Protocol):
    """What `Assignments` calls on the server when an order also concerns backups, requests or the manager."""

    def report(self, report: SegmentReport) -> None:
        """Send an event to the manager."""

    def want_copies(self, holding: AssignedSegment, copies: dict[str, str], *, anew: bool) -> None:
        """Keep backups of a segment on these servers (name -> address) and no others.

        `anew`: this is the first order of a generation.
        """

    def stop_serving(self, holding: AssignedSegment) -> None:
        """Refuse the parked requests that touch this segment."""

    def withdraw(self, holding: AssignedSegment) -> None:
        """Refuse the withheld answers about this segment, and drop its backups."""


class Assignments:
    """The spaces of which a server holds segments, and the changes that orders make to these segments."""

    def __init__(self, acts: OrderActions) -> None:
        self.spaces: dict[int, AssignedSpace] = {}
        self.forgotten: set[int] = set()  # numbers of closed spaces
        self._acts = acts

    def learn(self, space: Space) -> AssignedSpace:
        """Add a space, before its segments are assigned; of a known space, replace the options (a new quota)."""
        held = self.spaces.get(space.number)
        if held is None:
            held = self.spaces[space.number] = AssignedSpace(space)
            self.forgotten.discard(space.number)
        else:
            held.space = space
        return held

    def hold(self, space: Space, index: int, generation: int, segment: ServedSegment) -> AssignedSegment:
        """Make this server primary of a segment that has its state already. For a server without a manager."""
        held = self.learn(space)
        held.static = True
        found = AssignedSegment(held, index, Role.PRIMARY, generation, segment, line=generation, since=_now())
        held.holdings[index] = found
        return found

    def forget(self, number: int) -> None:
        """Drop a closed space and its segments."""
        self.forgotten.add(number)
        held = self.spaces.get(number)
        if held is not None:
            for holding in list(held.holdings.values()):
                self._end(holding)
            del self.spaces[number]

    def obey(self, held: AssignedSpace, orders: Iterable[SegmentOrder]) -> None:
        """Apply the manager's orders to the segments of a space."""
        for order in orders:
            holding = held.holdings.get(order.segment)
            if holding is not None and order.generation < holding.generation:
                continue  # the order is of an earlier generation
            match order.role:
                case Role.PRIMARY:
                    self._primary(held, holding, order)
                case Role.LEAVING:
                    self._leaving(holding, order)
                case Role.COPY:
                    self._copy(held, holding, order)
                case Role.NONE:
                    if holding is not None:
                        self._end(holding)

    def branch(self, held: AssignedSpace, parent: AssignedSpace, index: int, generation: int) -> bool:
        """Begin a branch's segment with the values of its parent's segment.

        Return False if this server does not serve the parent's segment.
        """
        base = parent.holdings.get(index)
        if base is None or base.segment is None or not base.serves or not base.usable:
            held.unborn.add((index, generation))
            return False
        known = held.holdings.get(index)
        if known is not None and known.generation >= generation and known.usable:
            return True
        segment: ServedSegment
        if isinstance(base.segment, DenseSegment):
            segment = base.segment.branch(held.space, factory=held.factory)
        elif isinstance(base.segment, TableSegment):
            segment = base.segment.branch(held.space.workers, held.space.strategy, held.scheduled)
        else:
            segment = base.segment.branch()
        held.holdings[index] = AssignedSegment(
            held, index, Role.PRIMARY, generation, segment, line=generation, since=_now()
        )
        self._acts.report(SegmentReport(held.number, Event.READY, index, generation))
        return True

    def is_to_be_copy(self, held: AssignedSpace, index: int, generation: int, source: object) -> AssignedSegment | None:
        """Make this server a backup of a segment, because the primary of this generation sends a state over `source`.

        The state may arrive before the manager's order. It means the same, because only the manager assigns
        generations. Return None if this server has a later generation, or is itself the primary of this one.
        """
        holding = held.holdings.get(index)
        if holding is not None and (
            generation < holding.generation or (holding.serves and generation == holding.generation)
        ):
            return None
        self._copy(held, holding, SegmentOrder(index, Role.COPY, generation, {}))
        holding = held.holdings[index]
        holding.source = source
        return holding

    # ---- roles

    def _primary(self, held: AssignedSpace, holding: AssignedSegment | None, order: SegmentOrder) -> None:
        anew = holding is None or holding.generation < order.generation or holding.role != Role.PRIMARY
        if holding is None and (order.segment, order.generation) in held.unborn:
            return
        if holding is None:
            dense = held.space.table_of(order.segment) is None
            usable = not dense and not order.lost
            holding = AssignedSegment(
                held, order.segment, Role.PRIMARY, order.generation, held.make(order.segment), usable
            )
            holding.line = order.generation
            held.holdings[order.segment] = holding
        elif holding.segment is None:
            self._acts.report(SegmentReport(held.number, Event.ASKED, order.segment, order.generation))
            return
        elif anew:
            if holding.serves:  # the parked requests named an older generation
                self._acts.stop_serving(holding)
            elif holding.role == Role.COPY:
                getattr(holding.segment, "promoted", _nothing)()
            holding.role, holding.generation, holding.handed = Role.PRIMARY, order.generation, False
            holding.source = None
        if anew:
            holding.since = _now()
            self._acts.report(SegmentReport(held.number, Event.READY, order.segment, order.generation))
        self._acts.want_copies(holding, order.copies, anew=anew)

    def _leaving(self, holding: AssignedSegment | None, order: SegmentOrder) -> None:
        if holding is None or holding.segment is None or holding.role == Role.COPY:
            return  # this server has nothing to hand over
        if holding.role != Role.LEAVING:
            holding.role, holding.handed, holding.since = Role.LEAVING, False, _now()
            self._acts.stop_serving(holding)
        holding.generation = order.generation
        self._acts.want_copies(holding, order.copies, anew=False)

    def _copy(self, held: AssignedSpace, holding: AssignedSegment | None, order: SegmentOrder) -> None:
        if holding is None:
            held.holdings[order.segment] = AssignedSegment(
                held, order.segment, Role.COPY, order.generation, since=_now()
            )
            return
        if holding.role != Role.COPY:
            self._acts.stop_serving(holding)
            self._acts.withdraw(holding)
            if not holding.usable:
                holding.segment = None
            holding.role, holding.since = Role.COPY, _now()
        holding.generation = order.generation

    def _end(self, holding: AssignedSegment) -> None:
        self._acts.stop_serving(holding)
        self._acts.withdraw(holding)
        getattr(holding.segment, "close", _nothing)()
        del holding.space.holdings[holding.index]


def _nothing() -> None:
    """Do nothing. Called in place of an optional method that a segment does not have."""


def _now() -> float:
    return time.monotonic()

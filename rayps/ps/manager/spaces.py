"""Opening, branching and closing the spaces of a group: what is asked for is checked here."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from rayps.core.errors import ConfigError, Conflict, NotFound
from rayps.ps.manager.assignment import SegmentAssignment
from rayps.ps.manager.group_state import GroupState
from rayps.ps.protocol.space import Quota, Space
from rayps.ps.tables.table_segment import check_table


def find(keeper: GroupState, name: str) -> Space:
    """An open space. Raises NotFound."""
    for space in keeper.record.spaces.values():
        if space.name == name:
            return space
    known = ", ".join(sorted(repr(space.name) for space in keeper.record.spaces.values())) or "none"
    raise NotFound(
        f"there is no space {name!r} on server group {keeper.record.name!r}; the open ones are: {known}",
        status=404,
        space=name,
    )


def opened(keeper: GroupState, space: Space) -> Space:
    """A new space with its number, not placed yet. Raises ConfigError, Conflict."""
    _check(space)
    _refuse_if_open(keeper, space)
    return _add(keeper, dataclasses.replace(space, number=0, quota=quota_of(space.quota)), None)


def branched(
    keeper: GroupState,
    parent: Space,
    name: str,
    quota: Quota | dict[str, Any] | None,
    workers: int | None,
    strategy: Any,
    factory: bytes | None,
) -> Space:
    """A space that begins as another one, not placed yet. Raises ConfigError, Conflict."""
    space = dataclasses.replace(
        parent,
        name=name,
        number=0,
        workers=parent.workers if workers is None else workers,
        strategy=parent.strategy if strategy is None else strategy,
        factory=parent.factory if factory is None else factory,
        quota=quota_of(quota),
        branch_of=parent.name,
    )
    _check(space)
    _refuse_if_open(keeper, space)
    return _add(keeper, space, parent)


def drop(keeper: GroupState, name: str) -> None:
    """Close a space. Raises NotFound."""
    number = find(keeper, name).number
    record = keeper.record
    del record.spaces[number]
    for by_space in (record.versions, record.incarnations, record.seats):
        by_space.pop(number, None)
    keeper.seats = {id_: seat for id_, seat in keeper.seats.items() if id_[0] != number}
    keeper.begun = {key: at for key, at in keeper.begun.items() if key[0][0] != number}
    keeper.forget_sizes(number)
    keeper.tongue.close_space(number)
    for member in keeper.members.values():
        if number in member.spaces or any(space == number for space, _ in member.told):
            keeper.tongue.forget(member, number)
        member.forget(number)
    keeper.event("space_dropped", f"space {name!r} is closed", space=name)
    keeper.changed = True


def limit(keeper: GroupState, name: str, quota: Quota | dict[str, Any]) -> None:
    """Another quota. Raises NotFound, ConfigError."""
    space = find(keeper, name)
    keeper.record.spaces[space.number] = dataclasses.replace(space, quota=quota_of(quota))
    keeper.changed = True


def restored(keeper: GroupState, number: int, segments: list[int]) -> None:
    """Segments that were lost are there again."""
    for index in segments:
        seat = keeper.seats.get((number, index))
        if seat is not None and seat.lost:
            keeper.seats[seat.id] = dataclasses.replace(seat, lost=False)
            keeper.changed = True


def joined(keeper: GroupState, number: int, rank: int) -> int:
    """The incarnation of a rank's next holder. Raises NotFound, ConfigError."""
    space = keeper.record.spaces.get(number)
    if space is None:
        raise NotFound(f"group {keeper.record.name!r} has no open space number {number}", status=404)
    if isinstance(rank, bool) or not isinstance(rank, int) or not -1 <= rank < space.workers:
        raise ConfigError(f"rank {rank!r} is not one of the {space.workers} workers of {space.name!r}", field="rank")
    ranks = keeper.record.incarnations.setdefault(number, {})
    ranks[rank] = ranks.get(rank, 0) + 1
    return ranks[rank]


def quota_of(given: Any) -> Quota:
    """A quota from what was given: a Quota, its fields as a dict, or None = no limit. Raises ConfigError."""
    if given is None:
        return Quota()
    if isinstance(given, dict):
        unknown = sorted(given.keys() - {"bytes", "operations"})
        if unknown:
            raise ConfigError(f"a quota has no {unknown[0]!r}: give bytes and operations", field="quota")
        given = Quota(given.get("bytes"), given.get("operations"))
    if not isinstance(given, Quota):
        raise ConfigError(f"{given!r} is not a quota: give bytes and operations (a second)", field="quota")
    for name, value in (("bytes", given.bytes), ("operations", given.operations)):
        good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
        if value is not None and not good:
            raise ConfigError(f"a quota of {value!r} {name}: give a number above 0, or None (no limit)", field="quota")
    return given


def _check(space: Space) -> None:
    if not isinstance(space, Space):
        raise ConfigError(f"a {type(space).__name__} is not a Space", field="space")
    if not isinstance(space.name, str) or not space.name.strip() or len(space.name) > 200:
        raise ConfigError(f"{space.name!r} cannot name a space: give 1 to 200 characters", field="name")
    if isinstance(space.workers, bool) or not isinstance(space.workers, int) or space.workers < 1:
        raise ConfigError(f"space {space.name!r} has {space.workers!r} workers: give at least 1", field="workers")
    if space.segments < 1:
        raise ConfigError(f"space {space.name!r} has neither a dense vector nor a table", field="space")
    names = [table.name for table in space.tables]
    if len(set(names)) < len(names):
        raise ConfigError(f"space {space.name!r} has two tables of one name: {sorted(names)}", field="tables")
    for table in space.tables:
        check_table(table)


def _refuse_if_open(keeper: GroupState, space: Space) -> None:
    for other in keeper.record.spaces.values():
        if other.name == space.name:
            differs = _differences(other, space)
            how = f" with another {', another '.join(differs)}" if differs else ""
            raise Conflict(
                f"space {space.name!r} is open on server group {keeper.record.name!r} already{how}: drop it first, "
                "give another name, or join it as it is",
                status=409,
                space=space.name,
                differs=differs,
            )


def _differences(one: Space, other: Space) -> list[str]:
    shown = {
        "workers": "number of workers",
        "strategy": "strategy",
        "layout": "shape",
        "cuts": "cut into segments",
        "tables": "set of tables",
    }
    return [text for name, text in shown.items() if getattr(one, name) != getattr(other, name)]


def _add(keeper: GroupState, space: Space, parent: Space | None) -> Space:
    space.to_json()  # refuses what the record cannot keep, before anything has changed
    record = keeper.record
    number = record.next_space
    record.next_space += 1
    space = record.spaces[number] = dataclasses.replace(space, number=number)
    for index in range(space.segments):
        above = None if parent is None else (parent.number, index)
        # a branch stands where its parent does, so that what they share is shared in memory
        key = f"{space.name}/{index}" if above is None else keeper.seats[above].key
        keeper.seats[number, index] = SegmentAssignment(number, index, key, parent=above)
    keeper.event("space_opened", f"space {space.name!r} has {space.segments} segments", space=space.name)
    keeper.changed = True
    return space

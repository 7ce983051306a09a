"""Open, branch and close the spaces of a group, and check these calls. `decide` then places the spaces' segments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rayps_client.errors import ConfigError, Conflict, NotFound
from rayps_client.values import is_number

from rayps.core.strategy.staleness_bound import MovedBound
from rayps.ps.client.table_face import find_tables
from rayps.ps.manager.assign_segments import SegmentAssignment
from rayps.ps.manager.group_state import GroupState
from rayps.ps.protocol.space import Quota, Space


def find(state: GroupState, name: str) -> Space:
    """Return an open space. Raises NotFound: no open space has the name."""
    for space in state.record.spaces.values():
        if space.name == name:
            return space
    known = ", ".join(sorted(repr(space.name) for space in state.record.spaces.values())) or "none"
    raise NotFound(
        f"there is no space {name!r} on server group {state.record.name!r}; the open spaces are: {known}",
        status=404,
        space=name,
    )


def of_number(state: GroupState, number: int) -> Space:
    """Return an open space. Raises NotFound: no open space has the number."""
    space = state.record.spaces.get(number)
    if space is None:
        raise NotFound(f"group {state.record.name!r} has no open space number {number}", status=404)
    return space


def open_space(state: GroupState, space: Space) -> Space:
    """Add a space, whose segments are not placed yet; return it with its number.

    Raises ConfigError if the space is not valid, and Conflict if a space of this name is open.
    """
    _check(space)
    return _add(state, replace(space, quota=quota_of(space.quota)), None)


def branch_space(
    state: GroupState, parent: Space, name: str, quota: Quota | dict[str, Any] | None, changes: dict[str, Any]
) -> Space:
    """Add a space that begins with the values of `parent`; return it with its number. Its segments are not placed yet.

    `changes`: the fields in which the space differs from its parent. Raises as `open_space`.
    """
    space = replace(parent, name=name, quota=quota_of(quota), branch_of=parent.name, **changes)
    _check(space)
    return _add(state, space, parent)


def drop(state: GroupState, name: str) -> None:
    """Close a space. Raises NotFound if there is no open space of this name."""
    state.close_space(find(state, name).number)
    state.event("space_dropped", f"space {name!r} is closed", space=name)


def set_quota(state: GroupState, name: str, quota: Quota | dict[str, Any]) -> None:
    """Replace a space's quota.

    Raises NotFound if there is no open space of this name, and ConfigError if the quota is not valid.
    """
    space = find(state, name)
    state.record.spaces[space.number] = replace(space, quota=quota_of(quota))


def move_bound(state: GroupState, number: int, bound: MovedBound) -> None:
    """Replace a space's staleness bound. Raises NotFound if there is no open space with this number."""
    state.record.spaces[number] = replace(of_number(state, number), bound=bound)


def mark_restored(state: GroupState, number: int, segments: list[int]) -> None:
    """Record that lost segments have been loaded."""
    for index in segments:
        segment = state.segments.get((number, index))
        if segment is not None:
            state.segments[segment.id] = replace(segment, lost=False)


def join_rank(state: GroupState, number: int, rank: int) -> int:
    """Return the incarnation of the next process that has this rank.

    Raises NotFound if there is no open space with this number, and ConfigError if the space has no such rank.
    """
    space = of_number(state, number)
    if isinstance(rank, bool) or not isinstance(rank, int) or not -1 <= rank < space.workers:
        raise ConfigError(
            f"rank {rank!r} does not exist in space {space.name!r}: give a number from 0 to "
            f"{space.workers - 1}, or -1 for a reader",
            field="rank",
        )
    ranks = state.record.incarnations.setdefault(number, {})
    ranks[rank] = ranks.get(rank, 0) + 1
    return ranks[rank]


def quota_of(given: Any) -> Quota:
    """Return a Quota from a Quota, from a dict of its fields, or from None, which means no limits.

    Raises ConfigError if `given` is something else, or a limit is not a number above 0.
    """
    if given is None:
        return Quota()
    if isinstance(given, dict):
        unknown = sorted(given.keys() - {"bytes", "operations"})
        if unknown:
            raise ConfigError(f"a quota has no field {unknown[0]!r}: give bytes and operations", field="quota")
        given = Quota(given.get("bytes"), given.get("operations"))
    if not isinstance(given, Quota):
        raise ConfigError(f"{given!r} is not a quota: give bytes and operations (per second)", field="quota")
    for name, value in (("bytes", given.bytes), ("operations", given.operations)):
        if value is not None and not (is_number(value) and value > 0):
            raise ConfigError(
                f"the quota has {name}={value!r}: give a number above 0, or None (no limit)", field="quota"
            )
    return given


def _check(space: Space) -> None:
    if not isinstance(space, Space):
        raise ConfigError(f"a {type(space).__name__} was given: give a Space", field="space")
    if not isinstance(space.name, str) or not space.name.strip() or len(space.name) > 200:
        raise ConfigError(
            f"the name of a space is {space.name!r}: give a name of 1 to 200 characters, not only blanks", field="name"
        )
    if isinstance(space.workers, bool) or not isinstance(space.workers, int) or space.workers < 1:
        raise ConfigError(
            f"space {space.name!r} has workers={space.workers!r}: give a whole number, at least 1", field="workers"
        )
    if space.segments < 1:
        raise ConfigError(
            f"space {space.name!r} has neither a dense vector nor a table: give it at least one of them", field="space"
        )
    names = [table.name for table in space.tables]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"space {space.name!r} has two tables with the same name, among {sorted(names)}: rename one of them",
            field="tables",
        )
    for table in space.tables:
        find_tables().check(table)


_SHOWN = {
    "workers": "number of workers",
    "strategy": "strategy",
    "layout": "shape",
    "cuts": "cut into segments",
    "tables": "set of tables",
}


def _add(state: GroupState, space: Space, parent: Space | None) -> Space:
    record = state.record
    other = next((other for other in record.spaces.values() if other.name == space.name), None)
    if other is not None:
        differs = [text for name, text in _SHOWN.items() if getattr(other, name) != getattr(space, name)]
        how = f" with another {', another '.join(differs)}" if differs else ""
        raise Conflict(
            f"space {space.name!r} is open on server group {record.name!r} already{how}: drop it first, give another "
            "name, or join it as it is",
            status=409,
            space=space.name,
            differs=differs,
        )
    space = replace(space, number=record.next_space)
    space.to_json()  # raises, before anything has changed, if the record cannot store the space
    record.next_space += 1
    record.spaces[space.number] = space
    for index in range(space.segments):
        above = None if parent is None else (parent.number, index)
        # a branch's segment is placed with its parent's segment, so that both share the memory of equal values
        key = f"{space.name}/{index}" if above is None else state.segments[above].key
        state.segments[space.number, index] = SegmentAssignment(space.number, index, key, parent=above)
    state.event("space_opened", f"space {space.name!r} is open, with {space.segments} segments", space=space.name)
    return space

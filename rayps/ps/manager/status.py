"""What a group looks like from outside: plain data for the API, the command line and the dashboard."""

from __future__ import annotations

import time
from typing import Any

from rayps.ps.manager.assignment import SegmentAssignment, ServerMember, ServerState
from rayps.ps.manager.group_state import GroupState
from rayps.ps.protocol.space import Space

DEAD_SHOWN_SECONDS = 60.0  # how long a dead server is listed after nothing refers to it any more
_STATES = {ServerState.ALIVE: "alive", ServerState.LEAVING: "leaving", ServerState.AWAY: "alive"}
COUNTS = ("moves", "moved_bytes", "promotions", "deaths", "copies_made", "copied_bytes", "lost")


def facts_of(keeper: GroupState) -> dict[str, Any]:
    """The group's facts."""
    record = keeper.record
    return {
        "name": record.name,
        "status": _status(keeper),
        "wanted": record.wanted,
        "replicas": record.replicas,
        "since": record.born,
        "resizing": list(record.resizing) if record.resizing is not None else None,
        "servers": _servers(keeper),
        "spaces": [_space(keeper, space) for space in record.spaces.values()],
        "moves": _moves(keeper),
        "counts": {name: record.counts.get(name, 0) for name in COUNTS},
        "events": list(keeper.events),
    }


def _status(keeper: GroupState) -> str:
    seats = list(keeper.seats.values())
    served = {
        name
        for name, m in keeper.members.items()
        if m.state in (ServerState.ALIVE, ServerState.LEAVING, ServerState.AWAY)
    }
    if _starts(keeper):
        return "starting"
    if not served or any(seat.lost or (seat.born and seat.primary not in served) for seat in seats):
        return "degraded" if keeper.members else "healing"
    if keeper.record.resizing is not None:
        return "resizing"
    return "ready" if keeper.settled() else "healing"


def _starts(keeper: GroupState) -> bool:
    """Whether its first servers are on their way: nothing is healed where nothing was hurt."""
    record, first = keeper.record, len(keeper.members) + len(keeper.pending) == keeper.record.next_server
    return bool(keeper.pending) and first and record.resizing is None and not record.counts.get("deaths")


def _servers(keeper: GroupState) -> list[dict[str, Any]]:
    old = time.time() - DEAD_SHOWN_SECONDS
    found = list(keeper.members.values()) + [member for at, member in keeper.departed if at > old]
    return [_server(keeper, member) for member in found]


def _server(keeper: GroupState, member: ServerMember) -> dict[str, Any]:
    seats = keeper.seats.values()
    gone = member.name not in keeper.members
    return {
        "name": member.name,
        "address": member.address,
        "host": member.host,
        "pid": member.pid,
        "state": "dead" if gone else _STATES.get(member.state, "dead"),
        **_load(member, gone or member.state not in _STATES),
        "seen_s": round(time.monotonic() - member.heard, 3) if member.heard else None,
        "primaries": sum(seat.primary == member.name for seat in seats),
        "copies": sum(member.name in seat.copies for seat in seats),
    }


def _load(member: ServerMember, dead: bool) -> dict[str, Any]:
    """What it holds and does; of a dead one nobody knows."""
    if dead:
        return dict.fromkeys(("bytes", "rows", "operations_s", "cpu"))
    spaces = member.load.get("spaces", {})
    return {
        "bytes": int(member.load.get("bytes", 0)),
        "rows": sum(int(facts.get("rows", 0)) for facts in spaces.values()),
        "operations_s": round(sum(member.rate(number) for number in spaces), 1),
        "cpu": float(member.load.get("cpu", 0.0)),
    }


def _space(keeper: GroupState, space: Space) -> dict[str, Any]:
    seats = [seat for seat in keeper.seats.values() if seat.space == space.number]
    there = [member for member in keeper.members.values() if member.state in _STATES]
    loads = [member.load.get("spaces", {}).get(space.number, {}) for member in there]
    rows = [_segment(keeper, space, seat) for seat in seats]
    return {
        "name": space.name,
        "number": space.number,
        "workers": space.workers,
        "version": keeper.record.versions.get(space.number, 0),
        "bytes": sum(row["bytes"] for row in rows),
        "rows": sum(row["rows"] for row in rows if row["table"] is not None),
        "evicted": sum(int(facts.get("evicted", 0)) for facts in loads),
        "operations_s": round(sum(member.rate(space.number) for member in there), 1),
        "rejected": sum(int(facts.get("rejected", 0)) for facts in loads),
        "throttled": sum(int(facts.get("throttled", 0)) for facts in loads),
        "seconds_s": round(sum(member.busy_rate(space.number) for member in there), 4),
        "quota": {"bytes": space.quota.bytes, "operations": space.quota.operations},
        "branch_of": space.branch_of,
        "tables": [table.name for table in space.tables],
        "segments": rows,
    }


def _segment(keeper: GroupState, space: Space, seat: SegmentAssignment) -> dict[str, Any]:
    table = space.table_of(seat.index)
    member = keeper.members.get(str(seat.primary))
    return {
        "index": seat.index,
        "table": None if table is None else table[0].name,
        "primary": seat.primary,
        "copies": [name for name in seat.copies if name in seat.synced],
        "generation": seat.generation,
        "bytes": keeper.size(seat) if seat.born else 0,
        "rows": 0 if member is None else member.rows(seat.id),
        "operations_s": 0.0 if member is None else round(member.rate(*seat.id), 1),
        "state": _state(keeper, seat, member),
    }


def _state(keeper: GroupState, seat: SegmentAssignment, member: ServerMember | None) -> str:
    if seat.lost or (seat.born and (member is None or member.state == ServerState.DEAD)):
        return "lost"
    if seat.heir is not None or not seat.ready:
        return "moving"
    return "copying" if seat.making else "ready"


def _moves(keeper: GroupState) -> list[dict[str, Any]]:
    now, found = time.monotonic(), []
    for seat in keeper.seats.values():
        ends = [(name, "copying") for name in seat.making] + ([(seat.heir, "handing")] if seat.heir else [])
        for name, phase in ends:
            found.append(
                {
                    "space": keeper.record.spaces[seat.space].name,
                    "segment": seat.index,
                    "from": seat.primary,
                    "to": name,
                    "phase": phase,
                    "seconds": round(now - keeper.begun.get((seat.id, name), now), 3),
                    "bytes": keeper.size(seat),
                }
            )
    return found

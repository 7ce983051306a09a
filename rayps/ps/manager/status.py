"""The facts of a server group: plain data for the API, the command line and the dashboard."""

from __future__ import annotations

import os
import time
from typing import Any

from rayps.ps.manager.assign_segments import SegmentAssignment, ServerState
from rayps.ps.manager.group_state import GroupState
from rayps.ps.manager.members import SegmentLoad, ServerMember
from rayps.ps.protocol.space import Space

DEAD_SHOWN_SECONDS = 60.0  # seconds that a dead server stays in the list after its removal from the group
_STATES = {ServerState.ALIVE: "alive", ServerState.LEAVING: "leaving", ServerState.AWAY: "alive"}
COUNTS = ("moves", "moved_bytes", "promotions", "deaths", "copies_made", "copied_bytes", "lost")
_NO_LOAD = SegmentLoad(0, 0, 0, 0)


def facts_of(state: GroupState) -> dict[str, Any]:
    """Return the facts of a group, its servers, its spaces and its moves."""
    record, old = state.record, time.time() - DEAD_SHOWN_SECONDS
    members = [*state.members.values(), *(member for at, member in state.departed if at > old)]
    return {
        "name": record.name,
        "pid": os.getpid(),
        "status": _summarize(state),
        "wanted": record.wanted,
        "replicas": record.replicas,
        "since": record.born,
        "range": list(record.range) if record.range is not None else None,
        "pinned": record.pinned,
        "resizing": list(record.resizing) if record.resizing is not None else None,
        "servers": [_describe_server(state, member) for member in members],
        "spaces": [_describe_space(state, space) for space in record.spaces.values()],
        "moves": list_moves(state),
        "counts": {name: record.counts.get(name, 0) for name in COUNTS},
        "events": list(state.events),
    }


def loads_of(state: GroupState) -> dict[str, dict[str, Any]]:
    """Return for each server that serves the spaces in its last heartbeat, as plain data."""
    serving = (member for member in state.members.values() if member.state in _STATES)
    return {member.name: {str(number): facts for number, facts in member.load.spaces.items()} for member in serving}


def _summarize(state: GroupState) -> str:
    record, segments = state.record, state.segments.values()
    serving = {name for name, member in state.members.items() if member.state in _STATES}
    first = len(state.members) + len(state.pending) == record.next_server
    if state.pending and first and record.resizing is None and not record.counts.get("deaths"):
        return "starting"  # only the group's first servers are pending, and none has failed
    if not serving or any(each.lost or (each.started and each.primary not in serving) for each in segments):
        return "degraded" if state.members else "healing"
    if record.resizing is not None:
        return "resizing"
    return "ready" if state.settled() else "healing"


def _describe_server(state: GroupState, member: ServerMember) -> dict[str, Any]:
    segments, record, load = state.segments.values(), member.record, member.load
    shown = _STATES.get(member.state, "dead") if member.name in state.members else "dead"
    return {
        "name": member.name,
        "address": record.address,
        "host": record.host,
        "pid": record.pid,
        "state": shown,
        "bytes": None if shown == "dead" else load.bytes,
        "rows": None if shown == "dead" else sum(int(facts.get("rows", 0)) for facts in load.spaces.values()),
        "operations_s": None if shown == "dead" else round(sum(map(load.rate, load.spaces)), 1),
        "cpu": None if shown == "dead" else load.cpu,
        "account": load.account,
        "busy": None if shown == "dead" else round(load.busy, 3),
        "node": record.node,
        "seen_s": round(time.monotonic() - member.last_message, 3) if member.last_message else None,
        "primaries": sum(segment.primary == member.name for segment in segments),
        "copies": sum(member.name in segment.copies for segment in segments),
    }


def _describe_space(state: GroupState, space: Space) -> dict[str, Any]:
    loads = [member.load for member in state.members.values() if member.state in _STATES]
    facts = [load.spaces.get(space.number, {}) for load in loads]
    rows = [_describe_segment(state, space, segment) for segment in state.of_space(space.number)]
    return {
        "name": space.name,
        "number": space.number,
        "workers": space.workers,
        "version": state.record.versions.get(space.number, 0),
        "bytes": sum(row["bytes"] for row in rows),
        "rows": sum(row["rows"] for row in rows if row["table"] is not None),
        **{name: sum(int(each.get(name, 0)) for each in facts) for name in ("evicted", "rejected", "throttled")},
        "operations_s": round(sum(load.rate(space.number) for load in loads), 1),
        "seconds_s": round(sum(load.rate(space.number, "seconds") for load in loads), 4),
        # by server: [rank, rank whose push it awaited, seconds]
        "delays": {
            member.name: member.load.spaces.get(space.number, {}).get("delays", []) for member in state.members.values()
        },
        "quota": {"bytes": space.quota.bytes, "operations": space.quota.operations},
        "branch_of": space.branch_of,
        "tables": [table.name for table in space.tables],
        "segments": rows,
    }


def _describe_segment(state: GroupState, space: Space, segment: SegmentAssignment) -> dict[str, Any]:
    table = space.table_of(segment.index)
    member = state.members.get(str(segment.primary))
    return {
        "index": segment.index,
        "table": None if table is None else table[0].name,
        "primary": segment.primary,
        "copies": [name for name in segment.copies if name in segment.synced],
        "generation": segment.generation,
        "bytes": state.size(segment) if segment.started else 0,
        "rows": 0 if member is None else member.load.segments.get(segment.id, _NO_LOAD).rows,
        "operations_s": 0.0 if member is None else round(member.load.rate(*segment.id), 1),
        "state": _describe_state(segment, member),
    }


def _describe_state(segment: SegmentAssignment, member: ServerMember | None) -> str:
    if segment.lost or (segment.started and (member is None or member.state == ServerState.DEAD)):
        return "lost"
    if segment.successor is not None or not segment.ready:
        return "moving"
    return "copying" if segment.unsynced else "ready"


def list_moves(state: GroupState) -> list[dict[str, Any]]:
    """Return the copies and handovers in progress."""
    now = time.monotonic()
    return [
        {
            "space": state.record.spaces[segment.space].name,
            "segment": segment.index,
            "from": segment.primary,
            "to": name,
            "phase": phase,
            "seconds": round(now - state.begun.get((segment.id, name), now), 3),
            "bytes": state.size(segment),
        }
        for segment in state.segments.values()
        for name, phase in [*((copy, "copying") for copy in segment.unsynced), (segment.successor, "handing")]
        if name is not None
    ]

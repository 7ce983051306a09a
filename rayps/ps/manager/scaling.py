"""Change a group's servers for reasons that come from outside of `decide`: a call, the load, and notices.

`GroupScaling.tick` reads the notices that hosts or processes end, and the load of the servers. A server under notice
leaves: its segments move to other servers, and a server on another host replaces it. For the load, see `decide_scale`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace

from rayps.cluster.members import ActorHost
from rayps.cluster.notices import Notice
from rayps.ps.manager.assign_segments import ServerState
from rayps.ps.manager.decide_scale import ScaleFacts, ScaleRule, ServerScaler, ServerUse
from rayps.ps.manager.group_state import GroupState
from rayps.ps.manager.members import ServerMember

log = logging.getLogger(__name__)

LISTEN_SECONDS = 0.5  # seconds between two reads of the notices
SHARE_FOR_START = 0.25  # the share of the time until a notice's deadline in which its server's replacement must start


def begin_resize(state: GroupState, servers: int, why: str = "") -> None:
    """Set the wanted number of servers, and apply what follows."""
    record = state.record
    reason = f": {why}" if why else ""
    message = f"the group is being resized from {record.wanted} to {servers} servers{reason}"
    state.event("resizing", message, servers=servers, reason=why)
    record.resizing = (record.wanted, servers)
    record.wanted = servers
    state.gather()
    state.apply_decisions()


class GroupScaling:
    """Scales a group by its load, and moves segments away from servers that will end."""

    def __init__(self, state: GroupState, rule: ScaleRule | None, notices: Callable[[], tuple[Notice, ...]]) -> None:
        """`rule`: everything but the range, which the group's record has; None means the usual rule."""
        self._state, self._rule, self._notices = state, rule or ScaleRule(1, 1), notices
        self._scaler = ServerScaler()
        self._listened = -math.inf

    def tick(self, now: float) -> None:
        """Act on notices and on the load. `now`: seconds, as `time.monotonic` counts them."""
        if now - self._listened >= LISTEN_SECONDS:
            self._listened = now
            self._heed(self._notices())
        found, record = self._state.record.range, self._state.record
        if found is not None and not record.pinned:
            rule = replace(self._rule, least=found[0], most=found[1])
            if self._scaler.due(rule, now):
                self._scale(rule, now)

    def resized(self) -> None:
        """Record that a call has changed the number of servers or the range: a cooldown begins."""
        self._scaler.resized(time.monotonic())

    # ---- notices

    def _heed(self, notices: tuple[Notice, ...]) -> None:
        state = self._state
        state.ending = frozenset(one.node for one in notices if one.node and one.pid is None)
        for member in list(state.members.values()):
            record = member.record
            place = ActorHost(record.host, record.pid, record.address, record.node)
            notice = place.notice(notices) if member.state == ServerState.ALIVE else None
            if notice is not None:
                self._leave(member, notice)

    def _leave(self, member: ServerMember, notice: Notice) -> None:
        state, record = self._state, self._state.record
        when = "soon" if notice.seconds is None else f"within {notice.seconds:.0f} s"
        state.event(
            "notice",
            f"{member.name} on {member.record.host or 'its host'} will end {when} ({notice.reason}): its segments move "
            "to other servers",
            server=member.name,
            seconds=notice.seconds,
            reason=notice.reason,
        )
        seconds = math.inf if notice.seconds is None else SHARE_FOR_START * notice.seconds
        state.leave(member.name, seconds=seconds)
        least = max(record.replicas + 1, record.range[0] if record.range is not None else record.wanted)
        if state.launcher.room < 1 and record.wanted > least and not record.pinned:
            record.wanted -= 1  # there is no room for a replacement
        self._scaler.resized(time.monotonic())
        state.changed = True

    # ---- load

    def _scale(self, rule: ScaleRule, now: float) -> None:
        state, record = self._state, self._state.record
        members = [member for member in state.members.values() if member.state == ServerState.ALIVE]
        full = {member.record.node for member in members if member.load.memory > rule.memory}
        state.launcher.look({name: each.record.node for name, each in state.members.items()}, state.ending | full)
        facts = ScaleFacts(
            tuple(_use(member) for member in members),
            record.wanted,
            record.replicas,
            state.launcher.room,
            settled=record.resizing is None and self._is_steady(),
        )
        found = self._scaler.decide(rule, facts, now)
        if found is not None:
            begin_resize(state, found.servers, found.reason)

    def _is_steady(self) -> bool:
        """Return whether the wanted number of servers is alive, and no server starts or leaves."""
        members = self._state.members.values()
        alive = all(member.state == ServerState.ALIVE for member in members)
        return alive and len(members) == self._state.record.wanted and not self._state.pending


def _use(member: ServerMember) -> ServerUse:
    load = member.load
    return ServerUse(load.busy, load.touches, load.bytes, load.memory, load.host_bytes)

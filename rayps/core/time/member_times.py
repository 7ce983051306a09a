"""What a worker or a server reports of its time: its account, its waits for the machine, its network connections."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from rayps_client.values import Json, JsonObject

from rayps.core.time.machine_waits import MachineWaits
from rayps.core.time.time_account import Seconds

CLIENTS = "clients"  # the name of the peer in waits for a federation's real clients: to join, and for their replies
SERVERS = "servers"  # the name of the peer in waits for servers, whose own reports say for whose push they waited


@dataclass(frozen=True, slots=True)
class LineFacts:
    """What the kernel counted for the TCP connections to one peer (`struct tcp_info` of Linux)."""

    bytes: int = 0  # sent and acknowledged
    busy: float = 0.0  # seconds in which sent data was under way, without those in which the peer did not read
    retransmits: int = 0  # segments that were sent again
    rtt: float = 0.0  # seconds of a round trip, smoothed

    def plus(self, other: LineFacts) -> LineFacts:
        """Return the facts of two connections to one peer: the longer of the times, which overlap."""
        return LineFacts(
            self.bytes + other.bytes,
            max(self.busy, other.busy),
            self.retransmits + other.retransmits,
            max(self.rtt, other.rtt),
        )

    def since(self, begin: LineFacts) -> LineFacts:
        """Return what was counted after `begin`, of the same connections."""
        return LineFacts(
            max(0, self.bytes - begin.bytes),
            max(0.0, self.busy - begin.busy),
            max(0, self.retransmits - begin.retransmits),
            self.rtt,
        )

    def after(self, earlier: LineFacts) -> LineFacts:
        """Return the facts of the connections of one generation, added to those of an earlier generation."""
        return LineFacts(
            self.bytes + earlier.bytes, self.busy + earlier.busy, self.retransmits + earlier.retransmits, self.rtt
        )


@dataclass(frozen=True, slots=True)
class MemberTimes:
    """The totals of one process since its start. A later report of the process replaces an earlier one."""

    parts: dict[str, float] = field(default_factory=dict)  # seconds by part: see `rayps.core.time.time_account`
    waits: dict[str, float] = field(default_factory=dict)  # seconds of the part `waiting`, by the peer's name
    machine: MachineWaits = field(default_factory=MachineWaits)
    lines: dict[str, LineFacts] = field(default_factory=dict)  # by the peer's name
    rounds: int = 0  # rounds that the process has completed, repeated ones too
    # of a server: for how many seconds the first worker's requests waited for a push of the second worker
    delays: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def wall(self) -> float:
        """Seconds in all parts."""
        return sum(self.parts.values())

    def plus(self, other: MemberTimes) -> MemberTimes:
        """Return the sums of both, of two spans of time that follow each other."""
        lines = {peer: line.after(self.lines.get(peer, LineFacts())) for peer, line in other.lines.items()}
        return MemberTimes(
            add_seconds(self.parts, other.parts),
            add_seconds(self.waits, other.waits),
            self.machine.plus(other.machine),
            self.lines | lines,
            self.rounds + other.rounds,
            {
                who: add_seconds(self.delays.get(who, {}), other.delays.get(who, {}))
                for who in {**self.delays, **other.delays}
            },
        )

    @classmethod
    def of(
        cls, seconds: Seconds, machine: MachineWaits | None = None, lines: dict[str, LineFacts] | None = None
    ) -> MemberTimes:
        """Return the report of an account's seconds."""
        parts: dict[str, float] = {}
        waits: dict[str, float] = {}
        for (part, peer), value in seconds.items():
            parts[part] = parts.get(part, 0.0) + value
            if part == "waiting":
                waits[peer] = waits.get(peer, 0.0) + value
        return cls(parts, waits, machine or MachineWaits(), lines or {})

    def to_json(self) -> JsonObject:
        """Return the report as JSON data, with seconds to a tenth of a millisecond."""
        return {
            "parts": {part: round(value, 4) for part, value in self.parts.items()},
            "waits": {peer: round(value, 4) for peer, value in self.waits.items()},
            "machine": {name: _round(value) for name, value in asdict(self.machine).items()},
            "lines": {
                peer: {name: _round(value) for name, value in asdict(line).items()} for peer, line in self.lines.items()
            },
            "rounds": self.rounds,
            **(
                {
                    "delays": {
                        who: {peer: round(value, 4) for peer, value in by.items()} for who, by in self.delays.items()
                    }
                }
                if self.delays
                else {}
            ),
        }


def add_seconds(first: dict[str, float], second: dict[str, float]) -> dict[str, float]:
    """Return the sums of two dicts, key by key."""
    return {key: first.get(key, 0.0) + second.get(key, 0.0) for key in {**first, **second}}


def read_member_times(given: JsonObject) -> MemberTimes:
    """Return the report that `MemberTimes.to_json` wrote. What is no number, or not known, is left out."""
    machine, rounds = _keep_numbers(given.get("machine")), given.get("rounds")
    return MemberTimes(
        _keep_numbers(given.get("parts")),
        _keep_numbers(given.get("waits")),
        MachineWaits(
            machine.get("cpu", 0.0),
            machine.get("cpu_wait", 0.0),
            machine.get("disk", 0.0),
            int(machine.get("read_bytes", 0)),
            bool(machine.get("sampled", True)),
        ),
        {peer: _read_line(_keep_numbers(line)) for peer, line in _read_dict(given.get("lines")).items()},
        int(rounds) if isinstance(rounds, (int, float)) else 0,
        {who: _keep_numbers(by) for who, by in _read_dict(given.get("delays")).items()},
    )


def _read_line(given: dict[str, float]) -> LineFacts:
    sent, again = int(given.get("bytes", 0)), int(given.get("retransmits", 0))
    return LineFacts(sent, given.get("busy", 0.0), again, given.get("rtt", 0.0))


def _keep_numbers(value: Json) -> dict[str, float]:
    return {key: item for key, item in _read_dict(value).items() if isinstance(item, (int, float))}


def _read_dict(value: Json) -> JsonObject:
    return value if isinstance(value, dict) else {}


def _round(value: float) -> float:
    return round(value, 6) if isinstance(value, float) else value

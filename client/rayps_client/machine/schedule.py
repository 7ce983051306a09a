"""When a client takes part: hours of the day, and whether the machine is on charge. Pure, except `read_supplies`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rayps_client.errors import ConfigError

POWER_SUPPLIES = Path("/sys/class/power_supply")
DAY = 24 * 60  # minutes
_HOURS = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)-([01]?\d|2[0-3]|24):([0-5]\d)")
_CHARGED = ("Charging", "Full", "Not charging")  # states of a battery that is not being emptied


@dataclass(frozen=True, slots=True)
class Hours:
    """A part of each day in local time, in minutes since midnight. If `end` is before `begin`, it crosses midnight."""

    begin: int
    end: int

    def contains(self, minute: float) -> bool:
        """Return whether a minute of the day is in this part; `end` itself is not."""
        if self.begin < self.end:
            return self.begin <= minute < self.end
        return minute >= self.begin or minute < self.end

    def __str__(self) -> str:
        return "-".join(f"{minute // 60:02}:{minute % 60:02}" for minute in (self.begin, self.end))


def hours_of(text: str) -> Hours:
    """Parse a part of the day such as `22:00-06:00`. Raises ConfigError if the text has another form."""
    found = _HOURS.fullmatch(text.strip())
    begin, end = (-1, -1) if found is None else _minutes(found)
    if begin == end or end > DAY:
        raise ConfigError(
            f"between is {text!r}: give a part of the day in local time, such as 22:00-06:00", field="between"
        )
    return Hours(begin, end)


def _minutes(found: re.Match[str]) -> tuple[int, int]:
    a, b, c, d = (int(number) for number in found.groups())
    return a * 60 + b, c * 60 + d


def is_within(hours: Sequence[Hours], minute: float) -> bool:
    """Return whether a client with these hours takes part at this minute of the day; without hours it always does."""
    return not hours or any(part.contains(minute) for part in hours)


def minutes_until(hours: Sequence[Hours], minute: float) -> float:
    """Return the minutes until a client with these hours takes part, 0 if it does now."""
    return 0.0 if is_within(hours, minute) else min((part.begin - minute) % DAY for part in hours)


@dataclass(frozen=True, slots=True)
class Supply:
    """A power supply of this machine, as Linux names it."""

    kind: str  # Mains, USB, Battery, ...
    online: bool = False  # whether it gives power; of Mains and USB
    status: str = ""  # Charging, Discharging, Full, ...; of Battery


def is_on_charge(supplies: Sequence[Supply]) -> bool:
    """Return whether a machine does not use its battery. A machine without a battery never does."""
    batteries = [supply for supply in supplies if supply.kind == "Battery"]
    if not batteries or any(supply.online for supply in supplies if supply.kind != "Battery"):
        return True
    return all(supply.status in _CHARGED for supply in batteries)


def read_supplies(folder: Path = POWER_SUPPLIES) -> list[Supply]:
    """Return the power supplies of this machine, without those of a mouse or another device."""
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        facts = {name: _text(path / name) for name in ("type", "scope", "online", "status")}
        if facts["type"] and facts["scope"] != "Device":
            found.append(Supply(facts["type"], facts["online"] == "1", facts["status"]))
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def why_away(hours: Sequence[Hours], minute: float, supplies: Sequence[Supply] | None) -> str | None:
    """Return why a client does not take part at this minute of the day, or None if it does.

    `supplies` are the machine's power supplies; None means that the client takes part on battery too.
    """
    if not is_within(hours, minute):
        return f"it takes part between {', '.join(map(str, hours))}"
    if supplies is not None and not is_on_charge(supplies):
        return "the machine uses its battery (--on-charge)"
    return None

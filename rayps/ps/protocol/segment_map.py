"""Which server holds which segment of a space: plain data, passed around as JSON. Pure.

A space's map is made by the manager alone. Workers keep a copy, and name in each request the generation of each segment
that it touches: a server that holds the segment in another generation, or not at all, refuses the whole request.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class SegmentHolders:
    """Who holds one segment. `copies` hold every acknowledged push; a new primary begins a new generation."""

    primary: str | None  # None: lost, or not placed yet
    copies: tuple[str, ...] = ()
    generation: int = 0


@dataclass(frozen=True, slots=True)
class SpaceMap:
    """The holdings of one space, by number of segment, and where its servers are. A later map has a higher version."""

    version: int
    holdings: tuple[SegmentHolders, ...]
    addresses: dict[str, str] = field(default_factory=dict)  # server -> address

    def by_server(self, segments: Iterable[int]) -> dict[str | None, list[int]]:
        """These segments by their primaries, in order; under None those that nobody holds."""
        found: dict[str | None, list[int]] = {}
        for index in segments:
            found.setdefault(self.holdings[index].primary, []).append(index)
        return found

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "version": self.version,
            "holdings": [[each.primary, list(each.copies), each.generation] for each in self.holdings],
            "addresses": self.addresses,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Read back what `to_json` gave."""
        holdings = tuple(SegmentHolders(primary, tuple(copies), number) for primary, copies, number in data["holdings"])
        return cls(data["version"], holdings, dict(data["addresses"]))

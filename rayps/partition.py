"""Who holds which part of a flat vector. Pure arithmetic: no tensors, no I/O.

A shard, a ring chunk and a bucket are all slices of one vector; this module cuts them.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Sequence

from rayps.errors import ConfigError


def part(n: int, parts: int, i: int) -> tuple[int, int]:
    """The bounds of the i-th of the `slices` of `n` elements."""
    return n * i // parts, n * (i + 1) // parts


def slices(n: int, parts: int) -> list[slice]:
    """Cut `n` elements into `parts` contiguous slices whose lengths differ by at most one.

    Part i is `[n*i//parts, n*(i+1)//parts)`; parts beyond `n` elements are empty. Raises ConfigError.
    """
    if parts < 1:
        raise ConfigError(f"cannot cut a vector into {parts} parts; give parts >= 1", parts=parts)
    if n < 0:
        raise ConfigError(f"a vector cannot have {n} elements; give n >= 0", n=n)
    return [slice(n * i // parts, n * (i + 1) // parts) for i in range(parts)]


def place(segments: Sequence[str], servers: Sequence[str], points: int = 128) -> list[int]:
    """Which server holds each segment: the index of its server on a consistent-hash ring.

    Every server stands at `points` places of the ring, a segment belongs to the next server clockwise. A server that
    joins or leaves moves about 1/n of the segments, and only to or from itself; the same names always give the same
    places, on every machine. Karger et al., Consistent hashing and random trees, 1997. Raises ConfigError.
    """
    if not servers or len(set(servers)) != len(servers):
        raise ConfigError(f"segments need servers of different names, got {list(servers)!r}", servers=list(servers))
    if points < 1:
        raise ConfigError(f"a server needs a place on the ring; give points >= 1, not {points}", points=points)
    ring = sorted((_hash(f"{name}#{point}"), i) for i, name in enumerate(servers) for point in range(points))
    places = [at for at, _ in ring]
    return [ring[bisect.bisect_right(places, _hash(segment)) % len(ring)][1] for segment in segments]


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")

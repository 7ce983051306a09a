"""Cut a flat vector into slices, and choose the servers that hold named segments. Pure: no tensors, no I/O.

A shard, a ring's chunk and a bucket are all slices of one vector; this module computes their bounds.
"""

from __future__ import annotations

import bisect
import hashlib
import math
from collections.abc import Sequence

from rayps_client.errors import ConfigError


def find_bounds(n: int, parts: int, i: int) -> tuple[int, int]:
    """Return the bounds (begin, end) of slice `i` of `cut_slices(n, parts)`."""
    return n * i // parts, n * (i + 1) // parts


def cut_slices(n: int, parts: int) -> list[slice]:
    """Cut `n` elements into `parts` contiguous slices whose lengths differ by at most one.

    Slice i is `[n*i//parts, n*(i+1)//parts)`; if `parts` > `n`, some slices are empty.

    Raises:
        ConfigError: `parts` is below 1, or `n` is below 0.
    """
    if parts < 1:
        raise ConfigError(f"cannot cut a vector into {parts} parts; give parts >= 1", parts=parts)
    if n < 0:
        raise ConfigError(f"a vector cannot have {n} elements; give n >= 0", n=n)
    return [slice(n * i // parts, n * (i + 1) // parts) for i in range(parts)]


def place(segments: Sequence[str], servers: Sequence[str], points: int = 128, bound: float | None = None) -> list[int]:
    """Place segments on servers: return for each segment the index of its server on a consistent-hash ring.

    Every server is at `points` positions of the ring, and a segment belongs to the next server clockwise. When one of n
    servers joins or leaves, only about 1/n of the segments move, each of them to or from that server. The same names
    give the same positions on every machine. Karger et al., Consistent hashing and random trees, 1997.

    With `bound` no server holds more than `bound` times the mean number of segments (rounded up): a segment skips full
    servers. When a server joins or leaves, a few segments then also move between two other servers. Mirrokni et al.,
    Consistent hashing with bounded loads, SODA 2018.

    Raises:
        ConfigError: there is no server, two servers have one name, or `points` or `bound` is below 1.
    """
    return [found[0] for found in place_with_backups(segments, servers, 0, points=points, bound=bound)]


def place_with_backups(
    segments: Sequence[str],
    servers: Sequence[str],
    replicas: int,
    *,
    hosts: Sequence[str] | None = None,
    points: int = 128,
    bound: float | None = None,
) -> list[tuple[int, ...]]:
    """Place segments as `place` does, and place the `replicas` backups of each segment on the next servers clockwise.

    Return for each segment the indices of its server and of its backups' servers. `hosts` names each server's machine:
    a segment and its backups are placed on as many different machines as possible. If there are too few servers, a
    segment has fewer backups. With `bound`, a server that has `bound` times the mean number of backups is skipped too,
    unless skipping the server would put the segment on fewer machines.

    Raises:
        ConfigError: there is no server, two servers have one name, or `points` or `bound` is below 1.
    """
    if not servers or len(set(servers)) != len(servers):
        raise ConfigError(
            f"servers is {list(servers)!r}: give at least one server, and a different name for each",
            servers=list(servers),
        )
    if points < 1:
        raise ConfigError(f"points is {points}: give each server at least 1 position on the hash ring", points=points)
    if bound is not None and bound < 1:
        raise ConfigError(
            f"bound is {bound:g}: give at least 1, because the servers must be able to hold all segments", bound=bound
        )
    ring = sorted((_hash(f"{name}#{point}"), i) for i, name in enumerate(servers) for point in range(points))
    places = [at for at, _ in ring]
    room = len(segments) if bound is None else math.ceil(bound * len(segments) / len(servers))
    most = math.inf if bound is None else math.ceil(bound * len(segments) * replicas / len(servers))
    held, copied = [0] * len(servers), [0] * len(servers)
    found: list[tuple[int, ...]] = [()] * len(segments)
    # in the order of the ring: the result does not depend on the order of the arguments
    for at, _, number in sorted((_hash(segment), segment, number) for number, segment in enumerate(segments)):
        first = bisect.bisect_right(places, at)
        around = _order_clockwise(ring, first, len(servers) if replicas or bound is not None else 1)
        owner = next(server for server in around if held[server] < room)
        held[owner] += 1
        found[number] = (owner, *_choose_copies(owner, around, replicas, hosts, [count >= most for count in copied]))
        for server in found[number][1:]:
            copied[server] += 1
    return found


def _order_clockwise(ring: list[tuple[int, int]], first: int, servers: int) -> list[int]:
    """Return the servers in clockwise order from position `first` of the ring."""
    found: dict[int, None] = {}
    for step in range(len(ring)):
        found.setdefault(ring[(first + step) % len(ring)][1])
        if len(found) == servers:
            break
    return list(found)


def _choose_copies(
    owner: int, around: list[int], replicas: int, hosts: Sequence[str] | None, full: Sequence[bool]
) -> list[int]:
    left, taken = [server for server in around if server != owner], [owner]
    while left and len(taken) <= replicas:
        used = set() if hosts is None else {hosts[server] for server in taken}
        best = min(left, key=lambda server: (hosts is not None and hosts[server] in used, full[server]))
        left.remove(best)
        taken.append(best)
    return taken[1:]


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")

"""Connect the ranks of a ring once all addresses are known: the higher rank calls the lower one."""

from __future__ import annotations

import time

from rayps.comm.link import Link, Listener, Prefer, connect
from rayps.comm.link.socket_link import deadline_left
from rayps.comm.ring.connections import Place
from rayps.comm.ring.mesh import Mesh
from rayps.comm.ring.messages import ranks
from rayps.core.errors import ConfigError, LinkError, PeerTimeout

MOST_STREAMS = 16
TRIED_STREAMS = 4  # opened if their number is to be measured


def link_up(
    rank: int,
    addresses: list[str],
    listener: Listener,
    *,
    secret: bytes,
    generation: int,
    timeout: float,
    label: str,
    prefer: Prefer,
    streams: int,
) -> Mesh:
    """Return a connection to every rank, and `streams` of them if TCP (0: as many as may be worth a trial).

    Raises PeerTimeout (which names the missing), PeerLost, StaleGeneration, ConfigError.
    """
    size = len(addresses)
    if not 0 <= rank < size:
        raise ConfigError(f"rank {rank} is not one of {size} ranks (0 to {size - 1})", rank=rank)
    if not 0 <= streams <= MOST_STREAMS:
        raise ConfigError(f"streams is {streams}: give 1 to {MOST_STREAMS}, or 0 to measure", streams=streams)
    listener.generation = generation
    links: dict[Place, Link] = {}
    deadline = time.monotonic() + timeout
    streams = streams or TRIED_STREAMS

    def call(peer: int, stream: int) -> Link:
        return connect(
            addresses[peer],
            name=_name(label, rank, stream),
            secret=secret,
            generation=generation,
            timeout=deadline_left(deadline),
            prefer="tcp" if stream else prefer,
        )

    try:
        for peer in range(rank):
            links[peer, 0] = call(peer, 0)
            if links[peer, 0].transport == "tcp":
                links.update({(peer, stream): call(peer, stream) for stream in range(1, streams)})
        _accept_above(range(rank + 1, size), links, listener, deadline, (label, timeout, streams))
    except BaseException:
        for link in links.values():
            link.close()
        raise
    return Mesh(rank, size, links, timeout)


def _name(label: str, rank: int, stream: int) -> str:
    return f"{label}:{rank}" + (f":{stream}" if stream else "")


def _accept_above(
    above: range, links: dict[Place, Link], listener: Listener, deadline: float, whom: tuple[str, float, int]
) -> None:
    """Accept the calls of the ranks above this one. Raises PeerTimeout, which names the missing."""
    label, timeout, streams = whom
    names: dict[str, Place] = {_name(label, peer, 0): (peer, 0) for peer in above}
    while missing := sorted({place[0] for place in names.values() if place not in links}):
        try:
            link = listener.accept(deadline_left(deadline), names.__contains__)
        except PeerTimeout as error:
            raise PeerTimeout(
                f"ring {label!r}: {ranks(missing)} did not join within {timeout:g} s (the knob is `timeout`)",
                peer=ranks(missing),
                seconds=timeout,
                missing=missing,
            ) from error
        peer, stream = names[link.peer]
        if (peer, stream) in links:
            link.close()
            raise LinkError(
                f"ring {label!r}: rank {peer} connected twice: two workers have the same rank", peer=f"rank {peer}"
            )
        links[peer, stream] = link
        if stream == 0 and link.transport == "tcp":
            names.update({_name(label, peer, more): (peer, more) for more in range(1, streams)})

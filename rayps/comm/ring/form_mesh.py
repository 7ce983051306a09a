"""Form a mesh from the ranks' addresses: of two ranks, the higher one connects to the lower one."""

from __future__ import annotations

import time
from collections.abc import Callable

from rayps_client.errors import ConfigError, LinkError, PeerTimeout, StaleGeneration

from rayps.comm.link import Link, Listener, Prefer, connect
from rayps.comm.link.socket_link import measure_time_left
from rayps.comm.ring.connections import Place
from rayps.comm.ring.mesh import Mesh
from rayps.comm.ring.messages import format_ranks

MOST_STREAMS = 16
TRIED_STREAMS = 4  # number of streams that are opened between two ranks to measure the best number


class Formation:
    """The forming of the rings of one generation, and these rings. Any thread may end them by `abort`.

    Waits of `Ring.form` then raise StaleGeneration, or PeerLost where ranks measure algorithms. Waits in a ring that is
    formed raise PeerLost.
    """

    def __init__(self) -> None:
        self._ended = False
        self._meshes: list[Mesh] = []

    def check(self) -> None:
        """Raise StaleGeneration if `abort` has been called."""
        if self._ended:
            raise StaleGeneration("the generation was ended while its connections were formed", peer="driver")

    def add(self, mesh: Mesh) -> None:
        """Add a mesh that `abort` ends. Raises StaleGeneration if `abort` has been called."""
        self._meshes.append(mesh)
        self.check()  # after the append: an `abort` at the same time ends the mesh, or is seen here

    def abort(self) -> None:
        """End the rings, and raise an error in the thread that forms one."""
        self._ended = True
        for mesh in list(self._meshes):
            mesh.abort()


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
    formation: Formation,
) -> Mesh:
    """Form a mesh: connect this rank to every other rank.

    A rank that is reached by TCP gets `streams` connections. If `streams` is 0, it gets `TRIED_STREAMS` connections, of
    which the backend later keeps the best number.

    Raises:
        PeerTimeout: a rank did not join within `timeout` seconds. The error names the missing ranks.
        PeerLost: there is no listener at the address of a rank.
        StaleGeneration: a rank has another generation, a later one has begun at `listener`, or `formation` was ended.
        ConfigError: `rank` or `streams` is out of range.
    """
    size = len(addresses)
    if not 0 <= rank < size:
        raise ConfigError(f"rank {rank} is not one of {size} ranks (0 to {size - 1})", rank=rank)
    if not 0 <= streams <= MOST_STREAMS:
        raise ConfigError(
            f"streams is {streams}: give a number from 1 to {MOST_STREAMS}, or 0 to measure the best number",
            streams=streams,
        )
    listener.begin_generation(generation)
    links: dict[Place, Link] = {}
    deadline = time.monotonic() + timeout
    streams = streams or TRIED_STREAMS

    def call(peer: int, stream: int) -> Link:
        return connect(
            addresses[peer],
            name=_name_peer(label, rank, stream),
            secret=secret,
            generation=generation,
            timeout=measure_time_left(deadline),
            prefer="tcp" if stream else prefer,
            check=formation.check,
        )

    def accept(want: Callable[[str], bool]) -> Link:
        return listener.accept(generation, measure_time_left(deadline), want, formation.check)

    try:
        for peer in range(rank):
            links[peer, 0] = call(peer, 0)
            if links[peer, 0].transport == "tcp":
                links.update({(peer, stream): call(peer, stream) for stream in range(1, streams)})
        _accept_above(range(rank + 1, size), links, accept, (label, timeout, streams))
    except BaseException:
        for link in links.values():
            link.close()
        raise
    return Mesh(rank, size, links, timeout)


def _name_peer(label: str, rank: int, stream: int) -> str:
    return f"{label}:{rank}" + (f":{stream}" if stream else "")


def _accept_above(
    above: range,
    links: dict[Place, Link],
    accept: Callable[[Callable[[str], bool]], Link],
    whom: tuple[str, float, int],
) -> None:
    """Accept the connections of all ranks in `above`. Raises PeerTimeout, which names the missing ranks."""
    label, timeout, streams = whom
    names: dict[str, Place] = {_name_peer(label, peer, 0): (peer, 0) for peer in above}
    while missing := sorted({place[0] for place in names.values() if place not in links}):
        try:
            link = accept(names.__contains__)
        except PeerTimeout as error:
            raise PeerTimeout(
                f"ring {label!r}: {format_ranks(missing)} did not join within {timeout:g} s (the knob is `timeout`)",
                peer=format_ranks(missing),
                seconds=timeout,
                missing=missing,
            ) from error
        peer, stream = names[link.peer]
        if (peer, stream) in links:
            link.close()
            raise LinkError(
                f"ring {label!r}: two workers connected as rank {peer}: give each worker another rank",
                peer=f"rank {peer}",
            )
        links[peer, stream] = link
        if stream == 0 and link.transport == "tcp":
            names.update({_name_peer(label, peer, more): (peer, more) for more in range(1, streams)})

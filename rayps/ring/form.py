"""How the ranks of a ring link up once everyone's address is known: the higher rank calls the lower one."""

from __future__ import annotations

import time

from rayps.errors import ConfigError, LinkError, PeerTimeout
from rayps.link import Link, Listener, Prefer, connect
from rayps.link.wire import deadline_left
from rayps.ring.mesh import Mesh
from rayps.ring.messages import ranks


def link_up(
    rank: int, addresses: list[str], listener: Listener, *, secret: bytes, generation: int, timeout: float,
    label: str, prefer: Prefer,
) -> Mesh:  # fmt: skip
    """A link to everyone. Raises PeerTimeout (which names the missing), PeerLost, StaleGeneration, ConfigError."""
    size = len(addresses)
    if not 0 <= rank < size:
        raise ConfigError(f"rank {rank} is not one of {size} ranks (0 to {size - 1})", rank=rank)
    listener.generation = generation
    links: list[Link | None] = [None] * size
    deadline = time.monotonic() + timeout
    try:
        for peer in range(rank):
            links[peer] = connect(
                addresses[peer], name=f"{label}:{rank}", secret=secret, generation=generation,
                timeout=deadline_left(deadline), prefer=prefer,
            )  # fmt: skip
        _accept_above(rank, links, listener, deadline, (label, timeout))
    except BaseException:
        for link in links:
            if link is not None:
                link.close()
        raise
    return Mesh(rank, links, timeout)


def _accept_above(
    rank: int, links: list[Link | None], listener: Listener, deadline: float, whom: tuple[str, float]
) -> None:
    """Wait for the calls of the ranks above this one. Raises PeerTimeout, which names the missing."""
    label, timeout = whom
    names = {f"{label}:{peer}": peer for peer in range(rank + 1, len(links))}
    while missing := [peer for peer in names.values() if links[peer] is None]:
        try:
            link = listener.accept(deadline_left(deadline), names.__contains__)
        except PeerTimeout as error:
            raise PeerTimeout(
                f"ring {label!r}: {ranks(missing)} did not join within {timeout:g} s (the knob is `timeout`)",
                peer=ranks(missing), seconds=timeout, missing=missing,
            ) from error  # fmt: skip
        peer = names[link.peer]
        if links[peer] is not None:
            link.close()
            raise LinkError(f"ring {label!r}: rank {peer} came twice", peer=f"rank {peer}")
        links[peer] = link

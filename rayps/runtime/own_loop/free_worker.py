"""A worker of a user's loop whose place another process can take while the others continue.

Its workers meet on servers alone, which keep the number of each rank's pushes. They form a ring only to begin. A
process that takes the place of a dead one begins alone, with the newest saved state; it repeats the steps since that
state, and the pushes that the servers have from the dead process are left out, so that each counts once.
"""

from __future__ import annotations

import json
from typing import Protocol

from rayps_client.errors import PeerTimeout
from torch import Tensor

from rayps.cluster.local import rendezvous, until
from rayps.core.strategy.apply_pushes import PlainServers
from rayps.core.strategy.strategy import StrategyView
from rayps.core.strategy.strategy_families import LOCAL_UPDATES, ReplaceOne
from rayps.core.strategy.topology import servers_of
from rayps.runtime.own_loop.world import World


def is_free(strategy: StrategyView) -> bool:
    """Return whether a worker can be replaced alone under a strategy.

    A worker with parameters of its own between two rounds cannot: what it has not pushed is lost with it.
    """
    servers = servers_of(strategy)
    apart = strategy.loop == LOCAL_UPDATES or servers is None or servers.own_copies
    return isinstance(strategy.recovery, ReplaceOne) and isinstance(strategy.server_half, PlainServers) and not apart


class CountedPushes(Protocol):
    """The connection of a worker to the servers, as far as its pushes are counted."""

    @property
    def step(self) -> int:
        """The number of this rank's pushes."""

    def push(self, value: Tensor, weight: float) -> None:
        """Push a gradient."""


class FreeWorker:
    """The place of this worker in one `wrap`, whose `name` is that of the wrap in this generation of the run."""

    def __init__(self, name: str, here: World) -> None:
        self._name, self._here = name, here
        # where the first process of this rank began: its pushes and its steps; None if this is the first
        self._before = rendezvous().get(self._key("began", here.rank))

    def _key(self, what: str, rank: int) -> str:
        return f"rayps/wrap/{self._name}/{what}/{rank}"

    @property
    def follows(self) -> bool:
        """Whether this process takes the place of another one, so that the others have begun without it."""
        return self._before is not None

    def begin(self, server: CountedPushes, position: int, nothing: Tensor | None) -> int:
        """Begin after `position` steps. Return how many of the next steps have pushes that the servers have already.

        If the function continues after steps that were never pushed, because the saved state is that of a faster
        worker, `nothing`, an empty gradient, is pushed for each of them, so that the others do not wait for them. It is
        None if nobody ever waits.
        """
        if self._before is None:
            rendezvous().put(self._key("began", self._here.rank), f"{server.step} {position}".encode())
            return 0
        began, first = map(int, self._before.split())
        behind = server.step - began - (position - first)
        if nothing is not None:
            for _ in range(-behind):
                server.push(nothing, 0.0)
        return max(0, behind)

    def leave(self, changed: str | None, steps: int, digest: str) -> str | None:
        """Note that this worker has disconnected from the servers. Worker-0, which holds them, waits for all workers.

        `changed` is the name of a parameter that the loop has changed after its last step, and `digest` stands for the
        parameters. Return the name of a changed parameter, at worker-0, if no worker has taken a step and the workers'
        parameters differ; else None.

        Raises:
            PeerTimeout: a worker has not disconnected within the run's timeout.
        """
        here, values = self._here, rendezvous()
        values.put(self._key("left", here.rank), json.dumps([changed, steps, digest]).encode())
        if here.rank:
            return None
        found = [values.get(self._key("left", rank)) for rank in range(here.size)]

        def all_left() -> bool:
            found[:] = [value or values.get(self._key("left", rank)) for rank, value in enumerate(found)]
            return None not in found or here.ended.is_set()

        until(all_left, here.place.timeout)
        notes = [json.loads(value) for value in found if value is not None]
        if len(notes) < here.size:
            late = f"worker-{found.index(None)}"
            raise PeerTimeout(
                f"{late} has not ended its function {here.place.timeout:g} s after worker-0, which holds the servers: "
                "raise timeout",
                peer=late,
                seconds=here.place.timeout,
            )
        for rank in range(here.size):
            values.delete(self._key("left", rank))
            values.delete(self._key("began", rank))
        names = [name for name, _, _ in notes if name is not None]
        stepped, differ = any(count for _, count, _ in notes), len({each for _, _, each in notes}) > 1
        return names[0] if names and differ and not stepped else None

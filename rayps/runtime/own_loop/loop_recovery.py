"""Decide how a user's loop recovers from a death: all workers start again, or one of them alone. Pure."""

from __future__ import annotations

from collections.abc import Collection

from rayps.core.strategy.strategy_families import Recovery, ReplaceOne, RestartAll


def recovery_of_loop(dead: Collection[int], free: Collection[int], *, errors: bool) -> Recovery:
    """Return how a loop recovers from the death of the ranks `dead`.

    `free` are the ranks whose newest report says that the others go on without them: see `World.is_free`. Rank 0 has
    started the servers, which end with it. `errors`: whether functions have raised errors, so that they have ended.
    """
    alone = not errors and 0 not in dead and all(rank in free for rank in dead)
    return ReplaceOne() if alone else RestartAll()

"""`rayps.mean`: the mean of a number over the workers of a run, for decisions that all of them take alike."""

from __future__ import annotations

import math
from typing import SupportsFloat

import torch
from rayps_client.errors import ConfigError

from rayps.comm.ring import Ring
from rayps.runtime.own_loop.world import World, read_number, world


def mean(value: SupportsFloat, *, samples: float = 1.0) -> float:
    """Return the mean of a number over all workers of a run, weighted by each worker's `samples`.

    All workers call it, equally often, and get equal results: a decision by it, such as the end of the loop, is the
    same on all. `value` may be a tensor of one element. The mean is nan if no worker has samples.

    Raises:
        ConfigError: called outside a `run`, `value` is no number, or `samples` is not a finite number of at least 0.
        LinkError: another worker died, or did not call `mean` within the run's `timeout`.

    Example:
        rayps.run(lambda: rayps.mean(rayps.world().rank), workers=2)  # [0.5, 0.5]
    """
    here = world()
    number, weight = read_number(value), read_number(samples)
    if number is None:
        raise ConfigError(f"rayps.mean was given {type(value).__name__}: give a number, or a tensor of one element")
    if weight is None or not 0 <= weight < math.inf:
        raise ConfigError(f"rayps.mean was given samples={samples!r}: give a number of at least 0", field="samples")
    pair = torch.tensor([number * weight if weight else 0.0, weight], dtype=torch.float64)
    with here.measure.account.span("waiting"):
        total, count = _join_ring(here).sum(pair).tolist()
    return total / count if count else math.nan


def _join_ring(here: World) -> Ring:
    """Return the ring of the means, which all workers join at their first mean."""
    if here.ring is not None:
        return here.ring
    here.ring = ring = Ring.join(f"{here.place.name}/means", here.rank, here.size, timeout=here.place.timeout)

    def close(failed: bool) -> None:
        if failed:
            ring.abort()  # the other ranks must not wait for this one
        else:
            ring.barrier()
        ring.close()

    here.closing.append(close)
    return ring


__all__ = ["mean"]

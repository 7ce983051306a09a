"""What strategies share whose workers take steps of their own and meet now and then."""

from __future__ import annotations

from typing import Any

from rayps.errors import ConfigError
from rayps.strategies.base import WorkerView, compression_of

MOMENTUM, BUFFERS = ("keep", "reset", "average"), ("keep", "average")


def local_step(w: WorkerView) -> None:
    """One step on this worker's next batch; an empty one is none. Counts samples and rounds since the last meeting."""
    g = w.grad(w.batch())
    if g.samples:
        w.step(g)
    w.memory["samples"] = samples(w) + g.samples
    w.memory["rounds"] = rounds(w) + 1


def samples(w: WorkerView) -> float:
    """Since the last meeting, of this worker."""
    return float(w.memory.get("samples", 0))


def rounds(w: WorkerView) -> int:
    """Since the last meeting; the same on all workers."""
    return int(w.memory.get("rounds", 0))


def have_met(w: WorkerView, **facts: float) -> None:
    """Count anew, and say that there was a meeting."""
    w.memory |= {"samples": 0, "rounds": 0}
    w.say(met=1, **facts)


def done(w: WorkerView) -> int:
    """Rounds of this phase, with the one under way once it has its batch."""
    return w.position - int(w.plan.origin[0])


def check_meetings(strategy: Any) -> None:
    """Check the options `momentum`, `buffers` and `compression`. Raises ConfigError."""
    for field, known in (("momentum", MOMENTUM), ("buffers", BUFFERS)):
        given = getattr(strategy, field)
        if given not in known:
            raise ConfigError(f"{field} is {given!r}: give {' or '.join(known)}", field=field)
    if strategy.compression is not None:
        compression_of(strategy.compression)


def check_count(strategy: Any, field: str, least: int) -> None:
    """Check an option that is a whole number. Raises ConfigError."""
    given = getattr(strategy, field)
    if isinstance(given, bool) or not isinstance(given, int) or given < least:
        raise ConfigError(f"{field} is {given!r}: give a whole number of at least {least}", field=field)

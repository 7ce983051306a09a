"""What strategies share whose workers take steps of their own and meet now and then."""

from __future__ import annotations

from rayps.core import options
from rayps.core.compression import compression_of
from rayps.core.strategy import StrategyView, WorkerView


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


def check_meetings(strategy: StrategyView) -> None:
    """Check the options `momentum`, `buffers` and `compression`. Raises ConfigError."""
    options.choice(strategy, "momentum", ("keep", "reset", "average"))
    options.choice(strategy, "buffers", ("keep", "average"))
    compression = strategy.topology.compression
    if compression is not None:
        compression_of(compression)

"""Functions for strategies whose workers train separately and average periodically."""

from __future__ import annotations

from rayps.core.strategy import options
from rayps.core.strategy.compression import compression_of
from rayps.core.strategy.strategy import StrategyView, WorkerView


def local_step(w: WorkerView) -> None:
    """Take one step on this worker's next batch (no step if the batch is empty). Count its samples and the round."""
    g = w.grad(w.batch())
    if g.samples:
        w.step(g)
    w.memory["samples"] = samples(w) + g.samples
    w.memory["rounds"] = rounds(w) + 1


def samples(w: WorkerView) -> float:
    """Return the number of samples that this worker has used since the last average."""
    return float(w.memory.get("samples", 0))


def rounds(w: WorkerView) -> int:
    """Return the number of rounds since the last average. It is equal on all workers."""
    return int(w.memory.get("rounds", 0))


def report_average(w: WorkerView, **facts: float) -> None:
    """Reset the counts of samples and rounds, and add the average and these `facts` to the round's point."""
    w.memory |= {"samples": 0, "rounds": 0}
    w.say(met=1, **facts)


def rounds_done(w: WorkerView) -> int:
    """Return the number of completed rounds of this phase, and of the current round once its batch has been taken."""
    return w.position - int(w.plan.origin[0])


def check_averaging(strategy: StrategyView) -> None:
    """Raise ConfigError if one of a strategy's options `momentum`, `buffers` and `compression` is invalid."""
    options.choice(strategy, "momentum", ("keep", "reset", "average"))
    options.choice(strategy, "buffers", ("keep", "average"))
    compression = strategy.topology.compression
    if compression is not None:
        compression_of(compression)

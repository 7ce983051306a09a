"""Draw which workers take part in an average that tolerates absent workers. Pure: a function of the seed."""

from __future__ import annotations

import random


def attends(seed: int, meeting: int, rank: int, probability: float) -> bool:
    """Return whether `rank` takes part; independent over averages and ranks, equal for equal arguments."""
    return probability >= 1 or random.Random(f"attends {seed} {meeting} {rank}").random() < probability

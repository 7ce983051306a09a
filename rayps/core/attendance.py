"""Who takes part in a meeting of workers that may be absent: a function of the seed, so that a run can be repeated."""

from __future__ import annotations

import random


def attends(seed: int, meeting: int, rank: int, probability: float) -> bool:
    """Whether `rank` is there; independent over meetings and ranks, and the same for the same arguments, always."""
    return probability >= 1 or random.Random(f"attends {seed} {meeting} {rank}").random() < probability

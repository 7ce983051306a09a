"""Draw which workers take part in an average that tolerates absent workers. Pure: a function of the seed."""

from __future__ import annotations

import random


def attends(seed: int, meeting: int, rank: int, probability: float) -> bool:
    """Draw whether worker `rank` takes part in the average with number `meeting`: True with `probability`.

    The draws of different averages and ranks are independent; equal arguments always give the same result.
    """
    return probability >= 1 or random.Random(f"attends {seed} {meeting} {rank}").random() < probability

"""Draw which workers take part in an average that tolerates absent workers. Pure: a function of the seed."""

from __future__ import annotations

import random


def takes_part(seed: int, average: int, rank: int, probability: float) -> bool:
    """Draw whether worker `rank` takes part in the average with the number `average`.

    The result is True with `probability`. The draws of different averages and ranks are independent. Equal arguments
    always give the same result.
    """
    return probability >= 1 or random.Random(f"attends {seed} {average} {rank}").random() < probability

"""How many clients a round asks for. Without numpy: the service computes it too."""

from __future__ import annotations


def cohort_size(clients: int, fraction: float) -> int:
    """Return how many clients a round needs: max(1, `fraction` * `clients`) (McMahan et al. 2017, algorithm 1)."""
    return min(clients, max(1, int(fraction * clients + 0.5)))

"""Tree noise for running sums: DP-FTRL.

Kairouz, McMahan, Song, Thakkar, Thakurta, Xu, "Practical and Private (Deep) Learning without Sampling or Shuffling",
ICML 2021, algorithm 1; Dwork, Naor, Pitassi, Rothblum, "Differential privacy under continual observation", STOC 2010.

The leaves of a binary tree are the rounds' sums g_1, g_2, ... Each node has independent noise N(0, (z clip)^2). The
running sum g_1 + ... + g_t is released with the noise of the at most log2(t) + 1 nodes that cover the rounds 1 to t, so
a unit that takes part once in a tree changes at most log2(restart) + 1 noised values. A round here releases
the difference of two running sums, from which the running sums follow, and nothing else:

    g_t + (noise of rounds 1 to t) - (noise of rounds 1 to t - 1)

The noise of a node is a function of a secret key, the tree and the node, so nothing but the key must be stored.
"""

from __future__ import annotations

import numpy as np

from rayps.privacy.noise import Floats, NoiseSource


def nodes(leaves: int) -> list[tuple[int, int]]:
    """Return the nodes that cover the first `leaves` leaves, each as (level, index): its leaves start at index 2^level.

    Example:
        nodes(6) == [(2, 0), (1, 2)]  # leaves 0 to 3, and 4 to 5
    """
    found, begin = list[tuple[int, int]](), 0
    for level in range(leaves.bit_length() - 1, -1, -1):
        if leaves >> level & 1:
            found.append((level, begin >> level))
            begin += 1 << level
    return found


def tree_noise(source: NoiseSource, size: int, std: float, *, tree: int, leaf: int) -> Floats:
    """Return the noise [size] of the release of leaf `leaf` (from 0) of tree `tree`; a node's noise has `std`."""
    before, now = set(nodes(leaf)), set(nodes(leaf + 1))
    found = np.zeros(size)
    for level, index in sorted(now - before):
        found += source.normal(size, std, tree, level, index)
    for level, index in sorted(before - now):
        found -= source.normal(size, std, tree, level, index)
    return found

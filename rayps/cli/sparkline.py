"""Curves as lines of block characters, for a terminal. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

_BLOCKS = "▁▂▃▄▅▆▇█"


def draw_sparkline(values: Sequence[float | None], width: int, low: float, high: float) -> str:
    """Return values as at most `width` block characters; `low` is the lowest block and `high` the highest.

    More values than `width` are averaged in `width` groups. A group without a finite value is a space.
    """
    count = min(width, len(values))
    text = []
    for index in range(count):
        begin, end = index * len(values) // count, (index + 1) * len(values) // count
        known = [value for value in values[begin:end] if value is not None and math.isfinite(value)]
        text.append(_choose_block(sum(known) / len(known), low, high) if known else " ")
    return "".join(text)


def _choose_block(value: float, low: float, high: float) -> str:
    share = (value - low) / (high - low) if high > low else 0.0
    return _BLOCKS[max(0, min(len(_BLOCKS) - 1, int(share * len(_BLOCKS))))]

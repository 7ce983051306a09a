"""How the columns of a table fit into the width of a terminal. Pure.

A table that is too wide is changed in this order: columns that may be shortened are, columns that may be omitted are,
and what still does not fit continues in further blocks below, each of which begins with the first column.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

_GAP = 2  # spaces between two columns
_LAST = 20  # the least width of the table's last column, whose text wraps


@dataclass(frozen=True, slots=True)
class Block:
    """Columns that stand beside each other: their numbers, and the width of each; the text of the last one wraps."""

    columns: tuple[int, ...]
    widths: tuple[int, ...]


def fit_columns(
    widths: Sequence[int], room: int, cut: Mapping[int, int], omit: Sequence[int] = (), beside: Collection[int] = ()
) -> list[Block]:
    """Return the blocks of a table whose columns need `widths` characters, on a terminal that has `room`.

    `cut`: from a column that may be shortened to its least width. `omit`: columns that may be left out, the least
    important first. `beside`: columns that stay in the block of the column before them.
    """
    least = [min(width, cut.get(at, _LAST if at == len(widths) - 1 else width)) for at, width in enumerate(widths)]
    kept = list(range(len(widths)))
    for column in omit:
        if _add_up([least[at] for at in kept]) > room:
            kept.remove(column)
    blocks: list[list[int]] = [[kept[0]]]
    for unit in _group_columns(kept[1:], beside):
        if len(blocks[-1]) > 1 and _add_up([least[at] for at in [*blocks[-1], *unit]]) > room:
            blocks.append([kept[0]])
        blocks[-1] += unit
    return [_widen(block, widths, least, room) for block in blocks]


def _group_columns(columns: Sequence[int], beside: Collection[int]) -> list[list[int]]:
    """Return the columns in groups that stay in one block."""
    found: list[list[int]] = []
    for at in columns:
        if found and at in beside:
            found[-1].append(at)
        else:
            found.append([at])
    return found


def _widen(block: Sequence[int], widths: Sequence[int], least: Sequence[int], room: int) -> Block:
    """Return a block in which the columns that are narrower than their texts share the room that is left."""
    found = {at: least[at] for at in block}
    left = room - _add_up(list(found.values()))
    narrow = sorted((at for at in block if widths[at] > least[at]), key=lambda at: widths[at] - least[at])
    for number, at in enumerate(narrow):
        more = max(0, min(widths[at] - found[at], left // (len(narrow) - number)))
        found[at], left = found[at] + more, left - more
    found[block[-1]] = max(1, found[block[-1]] + min(left, 0))  # the room is too small for one column beside the first
    return Block(tuple(block), tuple(found[at] for at in block))


def _add_up(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)

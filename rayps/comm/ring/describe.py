"""What a ring chose, in words: for a run's events and its log."""

from __future__ import annotations

from typing import Any


def in_words(choices: dict[str, Any]) -> str:
    """`all-reduce between 4 ranks over shm: one_shot up to 262 KB, two_shot above; measured ...`."""
    over = choices["transport"]
    if "tcp" in over and "streams" in choices:
        over += f" ({choices['streams']} stream{'s' if choices['streams'] > 1 else ''} between two ranks)"
    head = f"all-reduce between {choices['ranks']} ranks over {over}: "
    table = choices.get("table")
    if not table:
        return f"{head}{choices['algorithm']}, as {choices.get('why', 'given')}"
    last = [row for i, row in enumerate(table) if i + 1 == len(table) or table[i + 1]["algorithm"] != row["algorithm"]]
    named = [
        f"{row['algorithm']} up to {_size(row['up_to'])}" if row["up_to"] else f"{row['algorithm']} above"
        for row in last
    ]
    if len(named) == 1:
        named = [f"{last[0]['algorithm']} for every size"]
    seen = ", ".join(f"{name} {1000 * seconds:.2g} ms" for name, seconds in table[-1]["seconds"].items())
    return f"{head}{', '.join(named)}; {choices['why']} (the largest probe took {seen})"


def _size(count: int) -> str:
    for unit, size in (("MB", 1 << 20), ("KB", 1 << 10)):
        if count >= size:
            return f"{count / size:g} {unit}"
    return f"{count} bytes"

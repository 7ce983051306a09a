"""Describe a ring's choices in text, for events and logs."""

from __future__ import annotations

from typing import TypedDict


class ProbeRow(TypedDict):
    """The algorithm for vectors of up to `up_to` bytes, and the measured seconds of each candidate.

    `up_to` is None in the last row, which is for all larger vectors.
    """

    up_to: int | None
    algorithm: str
    seconds: dict[str, float]


class DeviceChoice(TypedDict):
    """The transport of tensors between the ranks' devices, and the reason."""

    transport: str
    why: str


class RingChoices(TypedDict, total=False):
    """The algorithm and transport of a ring, and the reason for them. `Ring.form` accepts it as `table`."""

    algorithm: str
    transport: str
    ranks: int
    hosts: list[list[int]]
    streams: int
    streams_seconds: dict[int, float]
    table: list[ProbeRow]
    why: str
    device: DeviceChoice


def describe(choices: RingChoices) -> str:
    """Return a ring's choices as one line of text.

    Example: `all-reduce between 4 ranks over shm: one_shot up to 262 KB, two_shot above; measured ...`.
    """
    device = choices.get("device")
    more = "" if device is None else f"; tensors on devices by {device['transport']}: {device['why']}"
    return _describe_algorithms(choices) + more


def _describe_algorithms(choices: RingChoices) -> str:
    over = choices["transport"]
    if "tcp" in over and "streams" in choices:
        over += f" ({choices['streams']} stream{'s' if choices['streams'] > 1 else ''} between two ranks)"
    head = f"all-reduce between {choices['ranks']} ranks over {over}: "
    table = choices.get("table")
    if not table:
        return f"{head}{choices['algorithm']}, as {choices.get('why', 'given')}"
    last = [row for i, row in enumerate(table) if i + 1 == len(table) or table[i + 1]["algorithm"] != row["algorithm"]]
    named = [
        f"{row['algorithm']} up to {_format_size(row['up_to'])}" if row["up_to"] else f"{row['algorithm']} above"
        for row in last
    ]
    if len(named) == 1:
        named = [f"{last[0]['algorithm']} for every size"]
    seen = ", ".join(f"{name} {1000 * seconds:.2g} ms" for name, seconds in table[-1]["seconds"].items())
    return f"{head}{', '.join(named)}; {choices['why']} (the largest probe took {seen})"


def _format_size(count: int) -> str:
    for unit, size in (("MB", 1 << 20), ("KB", 1 << 10)):
        if count >= size:
            return f"{count / size:g} {unit}"
    return f"{count} bytes"

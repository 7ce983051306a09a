"""Pipeline schedules as data: the order of actions of each stage's worker. Pure.

With p stages, m micro-batches and v chunks of the model on each worker there are p * v chunks in order. Chunk c is on
worker c % p. An action is the forward pass (F) of one chunk on one micro-batch, its backward pass (B), or, where the
backward pass is split, the gradient of its input (B) and that of its weights (W).

gpipe: Huang et al., NeurIPS 2019. 1f1b and interleaved: Narayanan et al., SC 2021, section 2.2. zero_bubble: the ZB-H1
of Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.3.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

from rayps_client.errors import ConfigError

KINDS = ("F", "B", "W")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")


class Action(NamedTuple):
    """One pass of one chunk over one micro-batch."""

    kind: str  # F forward; B backward (if the table has W: gradient of the input only); W gradient of the weights
    chunk: int  # of the whole model, 0 .. stages * chunks - 1
    micro: int

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind}{self.micro}"


Table = list[list[Action]]  # one row per stage's worker, in order of execution


def make_table(schedule: str, stages: int, micro_batches: int, chunks: int = 1) -> Table:
    """Return the actions of each of `stages` workers in one step.

    Raises:
        ConfigError: the schedule is unknown, or does not allow these numbers.
    """
    check(schedule, stages, micro_batches, chunks)
    return [_build_row(schedule, stages, micro_batches, chunks, rank) for rank in range(stages)]


def needs(action: Action, chunks: int) -> Iterator[Action]:
    """Return the actions that must be complete before `action`, on its own worker or on a neighbour.

    `chunks` is the number of chunks of the whole model.
    """
    kind, chunk, micro = action
    if kind == "F":
        if chunk > 0:
            yield Action("F", chunk - 1, micro)
    elif kind == "B":
        yield Action("F", chunk, micro)
        if chunk < chunks - 1:
            yield Action("B", chunk + 1, micro)
    else:
        yield Action("B", chunk, micro)


def splits(found: Table) -> bool:
    """Return whether the table's backward passes are split into B and W."""
    return any(action.kind == "W" for row in found for action in row)


def compute_idle(schedule: str, stages: int, micro_batches: int, chunks: int = 1) -> Fraction:
    """Return the share of the workers' time that is idle, by formula.

    The formula assumes equal stages, a B that takes twice as long as an F, and no time for transfers.

    gpipe, 1f1b (p-1)/(m+p-1); interleaved (p-1)/(vm+p-1). zero_bubble, with F = B = W = 1: for m >= p, the paper's
    ZB-H1 idles (p-1)(F+B-W) and works m(F+B+W), so it idles (p-1)/(3m+p-1) of the time. With fewer micro-batches the
    first worker waits 2p-1 for the round trip of the first micro-batch, and then runs all its m B and m W, so a step
    takes 2m+2p-1. Both cases together: 1 - 3m / max(3m+p-1, 2m+2p-1).
    """
    check(schedule, stages, micro_batches, chunks)
    p, m = stages, micro_batches
    if schedule == "zero_bubble":
        return 1 - Fraction(3 * m, max(3 * m + p - 1, 2 * m + 2 * p - 1))
    return Fraction(p - 1, chunks * m + p - 1)


def write_idle_formula(schedule: str) -> str:
    """Return the formula of `compute_idle` as text."""
    return {"interleaved": "(p-1)/(vm+p-1)", "zero_bubble": "1 - 3m/max(3m+p-1, 2m+2p-1)"}.get(
        schedule, "(p-1)/(m+p-1)"
    )


def compute_peak(schedule: str, stages: int, micro_batches: int, rank: int, chunks: int = 1) -> int:
    """Return the most activations (of a micro-batch in a chunk) that worker `rank` holds at once, by formula.

    An activation is held from its F to its B, or to its W if the backward pass is split.

    gpipe m; 1f1b min(m, p-rank); interleaved min(vm, 2(p-rank-1) + (v-1)p + 1), where a chunk is 1/v of a stage.
    zero_bubble min(m, p) on every worker. Its first worker holds as many as under 1f1b; later workers hold more,
    because they delay their W to fill the end.
    """
    check(schedule, stages, micro_batches, chunks)
    most = {"gpipe": micro_batches, "zero_bubble": stages}.get(schedule)
    return min(chunks * micro_batches, _count_ahead(schedule, stages, chunks, rank) + 1 if most is None else most)


def check(schedule: str, stages: int, micro_batches: int, chunks: int) -> None:
    """Raise ConfigError if the schedule is unknown, or does not allow these numbers."""
    if schedule not in SCHEDULES:
        raise ConfigError(f"schedule is {schedule!r}: give one of {', '.join(SCHEDULES)}", field="schedule")
    for field, given in (("stages", stages), ("micro_batches", micro_batches), ("chunks", chunks)):
        if isinstance(given, bool) or not isinstance(given, int) or given < 1:
            raise ConfigError(f"{field} is {given!r}: give a whole number of at least 1", field=field)
    if chunks > 1 and schedule != "interleaved":
        raise ConfigError(
            f"chunks is {chunks}, and {schedule} has 1 chunk per worker: give 1, or use interleaved", field="chunks"
        )
    if schedule == "interleaved" and micro_batches % stages:
        raise ConfigError(
            f"micro_batches is {micro_batches}, and interleaved needs a multiple of its {stages} stages: "
            f"give {-(-micro_batches // stages) * stages}, or use 1f1b",
            field="micro_batches",
        )


def _build_row(schedule: str, p: int, m: int, v: int, rank: int) -> list[Action]:
    """Build a worker's row: first some F (all F under gpipe), then F and B alternately, then the remaining B.

    In a split backward pass each W follows its B after `behind` more B.
    """
    block = p if schedule == "interleaved" else m  # micro-batches that pass one chunk before the next chunk's turn
    turns = [range(at, min(at + block, m)) for at in range(0, m, block)]
    forwards = [Action("F", j * p + rank, i) for turn in turns for j in range(v) for i in turn]
    backwards = [Action("B", j * p + rank, i) for turn in turns for j in reversed(range(v)) for i in turn]
    ahead = len(forwards) if schedule == "gpipe" else min(len(forwards), _count_ahead(schedule, p, v, rank))
    row, left = forwards[:ahead], forwards[ahead:]
    behind = rank if schedule == "zero_bubble" else len(backwards)
    for n, backward in enumerate(backwards):
        row += left[n : n + 1]
        row.append(backward)
        if n >= behind:
            row.append(backwards[n - behind]._replace(kind="W"))
    if schedule == "zero_bubble":
        row += [each._replace(kind="W") for each in backwards[max(0, m - rank) :]]
    return row


def _count_ahead(schedule: str, p: int, v: int, rank: int) -> int:
    return 2 * (p - rank - 1) + (v - 1) * p if schedule == "interleaved" else p - rank - 1

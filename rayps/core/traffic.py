"""Formulas of traffic: bytes and messages that a step sends. Pure.

N workers hold a vector of V bytes (a column's, where the model is on several workers: `rayps.core.grid`). Formulas
say what all workers together send in a step, evaluation and snapshots apart; traffic with servers counts both ways.
A strategy's `cost` is made of these.
"""

from __future__ import annotations

from dataclasses import dataclass

from rayps.core.grid import Grid

_FACTORS = {"fp16": "2/w", "bf16": "2/w", "int8": "1/w"}  # what a compressed element takes of its w bytes


@dataclass(frozen=True, slots=True)
class Crossing:
    """What goes from one chunk of a pipeline to another for one sample: bytes there, and bytes of gradients back."""

    source: int
    target: int
    forward: float
    backward: float


@dataclass(frozen=True, slots=True)
class Sizes:
    """What costs depend on beside the strategy: numbers of the model and of a replica's batch, as far as known."""

    parameters: int  # elements of the whole model
    width: int = 4  # bytes of an element
    owned: tuple[int, ...] = ()  # elements that each column steps; () = all columns are alike
    held: tuple[int, ...] = ()  # elements in each column's memory: its own and borrowed ones
    tied: int = 0  # elements that stages borrow from each other
    shared: int = 0  # elements that tensor ranks borrow from the first one, over all stages
    states: float = 0.0  # numbers that the optimizer keeps for each element: 1 with momentum, 2 for Adam
    batch: int = 0  # rows of a replica's batch; 0 = not known
    crossings: tuple[Crossing, ...] = ()  # between chunks
    kept: tuple[float, ...] = ()  # bytes that each chunk keeps for its backward pass, for one sample
    summed: tuple[float, ...] = ()  # of each stage: bytes that its tensor ranks sum for one sample (whole tensors)
    gathered: tuple[float, ...] = ()  # the same of what they put side by side
    exchanges: tuple[int, ...] = ()  # of each stage: sums and gathers of one forward and backward pass

    @property
    def columns(self) -> tuple[int, ...]:
        """Elements that each column steps."""
        return self.owned or (self.parameters,)


@dataclass(frozen=True, slots=True)
class TrafficCost:
    """One kind of traffic of a step. `bytes` and `messages` are those of all workers; None = no formula gives them."""

    what: str
    formula: str  # in words and symbols
    bytes: float | None
    messages: float | None
    busiest: float | None = None  # bytes of the worker that sends most of it
    axis: str = "data"  # of the grid
    hidden: str = "no"  # behind which computing


def ring_mean(grid: Grid, sizes: Sizes, compression: str | None, *, overlaps: bool) -> list[TrafficCost]:
    """A mean of gradients around the ring of each column, in each step. `overlaps`: most of it is behind backward."""
    n, vectors = grid.data, [size * sizes.width for size in sizes.columns]
    if n == 1:
        return [one_replica()]
    each = f" in each of {len(vectors)} columns" if len(vectors) > 1 else ""
    share, why = compressed(compression, sizes.width)
    return [
        TrafficCost(
            f"gradients around the ring of {n}{each}",
            f"2(N-1)/N V{why} from each of N = {n}, in 2(N-1) messages a bucket",
            None if share is None else 2 * (n - 1) * sum(vectors) * share,
            2 * (n - 1) * n * len(vectors),
            None if share is None else 2 * (n - 1) / n * max(vectors) * share,
            hidden="behind backward, but for the last bucket" if overlaps else "no",
        )
    ]


def one_replica() -> TrafficCost:
    """What a single replica sends."""
    return TrafficCost("gradients between replicas", "0: there is one", 0, 0, 0)


def table_rows() -> TrafficCost:
    """Rows of sparse tables between workers and servers."""
    return TrafficCost("rows of sparse tables", "2 x the distinct rows that a batch touches", None, None)


def periodic_mean(
    grid: Grid, sizes: Sizes, compression: str | None, every: int | None, *, moments: bool = False
) -> list[TrafficCost]:
    """A mean of the parameters every `every` steps (None: not known), spread over the steps between.

    `moments`: those of the optimizer are averaged with them, uncompressed.
    """
    n, vector = grid.data, sum(size * sizes.width for size in sizes.columns)
    if n == 1:
        return [one_replica()]
    share, why = compressed(compression, sizes.width)
    also = sizes.states if moments else 0.0
    found = None if share is None or every is None else 2 * (n - 1) * vector * (share + also) / every
    when = f"every {every} steps" if every is not None else "at the end of each part, spread over its steps"
    return [
        TrafficCost(
            f"parameters around the ring of {n}, {when}",
            f"2(N-1)/N V{why}{f' + {also:g}V of moments' if also else ''} / {every or 'the steps of a part'} from each "
            f"of N = {n}, in 2(N-1) messages a meeting",
            found,
            None if every is None else 2 * (n - 1) * n / every,
            None if found is None else found / n,
        )
    ]


def summed_replies(grid: Grid, sizes: Sizes, beside: int) -> TrafficCost:
    """Sums of clients' replies, in fixed point, around the ring once a round; `beside` vectors more as long as w."""
    n = grid.data
    longer = (3 if sizes.width == 8 else 2) * 8 / sizes.width * (1 + beside)  # than the vector
    digits = longer * sizes.parameters * sizes.width
    return TrafficCost(
        f"sums of replies around the ring of {n}",
        f"2(N-1)/N of {longer:g} V (fixed point) from each of N = {n}, once a round",
        2.0 * (n - 1) * digits,
        2 * (n - 1) * n,
        2 * (n - 1) / n * digits,
    )


def push_pull(
    grid: Grid, sizes: Sizes, shards: int, compression: str | None, *, push_every: int, pull_every: int, overlaps: bool
) -> list[TrafficCost]:
    """Pulls from and pushes to `shards` servers. `overlaps`: a push is behind the next step."""
    share, why = compressed(compression, sizes.width)
    what, each = f"{shards} shard{'s'[: shards != 1]}", f"V/{shards} to each shard"
    parts = []
    for verb, every, factor, words in (("pull from", pull_every, 1.0, ""), ("push to", push_every, share, why)):
        often = f" / {every}" if every > 1 else ""
        parts.append(
            TrafficCost(
                f"{verb} {what}",
                f"V{words}{often} for each of N = {grid.data} ({each})",
                None if factor is None else grid.data * sizes.parameters * sizes.width * factor / every,
                round(grid.data * shards / every),
                None if factor is None else max(sizes.columns) * sizes.width * factor / every,
                hidden="behind the next step" if verb == "push to" and overlaps else "no",
            )
        )
    return parts


def compressed(compression: str | None, width: int) -> tuple[float | None, str]:
    """The fraction of a vector's bytes that travels, and how to write it; None where only a run can tell."""
    if compression is None:
        return 1.0, ""
    if compression in _FACTORS:
        return int(_FACTORS[compression][0]) / width, f" x {_FACTORS[compression][0]}/{width} ({compression})"
    return None, f", compressed by {compression}"

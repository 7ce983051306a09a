"""Formulas of traffic: bytes and messages that a step sends. Pure.

N workers hold a vector of V bytes: the parameters, or one column's part of the parameters if the model is divided (see
`rayps.core.grid`). A formula gives what all workers together send in a step, without evaluation and snapshots. For
traffic with servers, a formula counts both directions. A strategy's `cost` returns a list of such costs.
"""

from __future__ import annotations

from dataclasses import dataclass

from rayps.core.grid import Grid

_FACTORS = {"fp16": "2/w", "bf16": "2/w", "int8": "1/w"}  # bytes of a compressed element / its w bytes before


@dataclass(frozen=True, slots=True)
class Crossing:
    """The bytes per sample that two chunks of a pipeline send to each other."""

    source: int  # number of the chunk that sends activations
    target: int  # number of the chunk that receives activations
    forward: float  # bytes of activations
    backward: float  # bytes of gradients


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of the model and of a replica's batch on which costs depend. 0 or () means not known."""

    parameters: int  # elements of the whole model
    width: int = 4  # bytes of an element
    owned: tuple[int, ...] = ()  # elements that each column steps; () means that all columns are equal
    held: tuple[int, ...] = ()  # elements in each column's memory, including borrowed elements
    tied: int = 0  # elements that stages borrow from each other
    shared: int = 0  # elements that tensor ranks borrow from the first one, over all stages
    states: float = 0.0  # numbers in the optimizer's state per element: 1 with momentum, 2 for Adam
    batch: int = 0  # rows of a replica's batch
    crossings: tuple[Crossing, ...] = ()  # what neighbouring chunks send to each other
    kept: tuple[float, ...] = ()  # bytes that each chunk stores for its backward pass, for one sample
    summed: tuple[float, ...] = ()  # per stage: bytes that its tensor ranks sum for one sample (whole tensors)
    gathered: tuple[float, ...] = ()  # per stage: bytes that its tensor ranks gather for one sample
    exchanges: tuple[int, ...] = ()  # per stage: sums and gathers of one forward and backward pass

    @property
    def columns(self) -> tuple[int, ...]:
        """The number of elements that each column steps."""
        return self.owned or (self.parameters,)


@dataclass(frozen=True, slots=True)
class TrafficCost:
    """One kind of traffic of a step. `bytes` and `messages` are those of all workers; None means not known."""

    what: str
    formula: str  # the formula as text
    bytes: float | None
    messages: float | None
    busiest: float | None = None  # bytes of the worker that sends most
    axis: str = "data"  # axis of the grid
    hidden: str = "no"  # the computation with which the transfer overlaps


def ring_mean(grid: Grid, sizes: Sizes, compression: str | None, *, overlaps: bool) -> list[TrafficCost]:
    """Return the cost per step of the mean of gradients around the ring of each column.

    With `overlaps`, most of the gradient is sent during backward.
    """
    n, vectors = grid.data, [size * sizes.width for size in sizes.columns]
    if n == 1:
        return [one_replica()]
    each = f" in each of {len(vectors)} columns" if len(vectors) > 1 else ""
    share, why = describe_compressed(compression, sizes.width)
    return [
        TrafficCost(
            f"gradients around the ring of {n}{each}",
            f"2(N-1)/N V{why} from each of N = {n}, in 2(N-1) messages a bucket",
            None if share is None else 2 * (n - 1) * sum(vectors) * share,
            2 * (n - 1) * n * len(vectors),
            None if share is None else 2 * (n - 1) / n * max(vectors) * share,
            hidden="backward, except the last bucket" if overlaps else "no",
        )
    ]


def sharded_step(grid: Grid, sizes: Sizes, shard: str, compression: str | None, *, overlaps: bool) -> list[TrafficCost]:
    """Return the cost per step of workers that hold slices of the state: see `Peers.shard`.

    Gradients are summed to their owners, and parameters are sent from their owners: each half of a ring's traffic. With
    compression, every worker gets the whole mean gradient. With `shard` "parameters", parameters are sent twice: for
    the forward pass and for the backward pass.
    """
    n, size = grid.data, sizes.parameters * sizes.width
    if n == 1:
        return [one_replica()]
    half = (n - 1) * size
    gradients = TrafficCost(
        f"gradients to their owners among {n}",
        f"(N-1)/N V from each of N = {n}, in N-1 messages a bucket",
        half,
        (n - 1) * n,
        half / n,
        hidden="backward, except the last bucket" if overlaps else "no",
    )
    if compression is not None:
        [gradients] = ring_mean(grid, sizes, compression, overlaps=False)
    times = 2 if shard == "parameters" else 1
    parameters = TrafficCost(
        "parameters from their owners",
        f"{'2 x ' if times == 2 else ''}(N-1)/N V from each of N = {n}",
        times * half,
        times * (n - 1) * n,
        times * half / n,
    )
    return [gradients, parameters]


def one_replica() -> TrafficCost:
    """Return the cost of gradients between replicas if there is one replica: nothing is sent."""
    return TrafficCost("gradients between replicas", "0: there is one replica", 0, 0, 0)


def undeclared(grid: Grid) -> TrafficCost:
    """Return the cost of a user's strategy that does not define `cost`: unknown, unless there is one replica."""
    if grid.data == 1:
        return one_replica()
    return TrafficCost(
        "what the strategy's own code sends", "not known: the class does not define `cost`", None, None, hidden=""
    )


def table_rows() -> TrafficCost:
    """Return the cost of rows of sparse tables between workers and servers."""
    return TrafficCost("rows of sparse tables", "2 x the distinct rows that a batch touches", None, None)


def periodic_mean(
    grid: Grid, sizes: Sizes, compression: str | None, every: int | None, *, moments: bool = False
) -> list[TrafficCost]:
    """Return the cost per step of a mean of the parameters every `every` steps.

    If `every` is None, the mean is taken at the end of each part of a phase; the number of steps of a part is not
    known here. With `moments` the optimizer's moments are averaged too, uncompressed.
    """
    n, vector = grid.data, sum(size * sizes.width for size in sizes.columns)
    if n == 1:
        return [one_replica()]
    share, why = describe_compressed(compression, sizes.width)
    also = sizes.states if moments else 0.0
    found = None if share is None or every is None else 2 * (n - 1) * vector * (share + also) / every
    when = f"every {every} steps" if every is not None else "at the end of each part of the phase, per step of a part"
    return [
        TrafficCost(
            f"parameters around the ring of {n}, {when}",
            f"2(N-1)/N V{why}{f' + {also:g}V of moments' if also else ''} / {every or 'the steps of a part'} from each "
            f"of N = {n}, in 2(N-1) messages per average",
            found,
            None if every is None else 2 * (n - 1) * n / every,
            None if found is None else found / n,
        )
    ]


def summed_replies(grid: Grid, sizes: Sizes, extra: int) -> TrafficCost:
    """Return the cost of summing clients' replies, in fixed point, around the ring once a round.

    A reply has the parameters and `extra` more vectors of the same size.
    """
    n = grid.data
    longer = (3 if sizes.width == 8 else 2) * 8 / sizes.width * (1 + extra)  # bytes of the sums / bytes of the vector
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
    """Return the cost of pulls from and pushes to `shards` servers. With `overlaps`, a push overlaps the next step."""
    share, why = describe_compressed(compression, sizes.width)
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


def describe_compressed(compression: str | None, width: int) -> tuple[float | None, str]:
    """Return the fraction of a vector's bytes that is sent, and text for a formula.

    The fraction is None if it depends on the data.
    """
    if compression is None:
        return 1.0, ""
    if compression in _FACTORS:
        return int(_FACTORS[compression][0]) / width, f" x {_FACTORS[compression][0]}/{width} ({compression})"
    return None, f", compressed by {compression}"

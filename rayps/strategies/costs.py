"""What a strategy costs: bytes and messages a step, waiting, memory, by formula. Pure.

N workers hold a vector of V bytes (a column's, where the model is on several workers: `rayps.core.grid`). Formulas
say what all workers together send in a step, evaluation and snapshots apart; traffic with servers counts both ways.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from rayps.core.grid import Grid
from rayps.core.partition import slices
from rayps.core.pipeline.schedule import Action, Table, idle, idle_words, peak, splits, table
from rayps.strategies.base import Strategy
from rayps.strategies.pipeline import Pipeline

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


@dataclass(frozen=True, slots=True)
class Costs:
    """All of a strategy's costs on a grid."""

    grid: Grid
    traffic: list[TrafficCost]
    idle: Fraction | None = None  # the pipeline's, by formula
    idle_formula: str = ""
    peaks: list[int] = field(default_factory=list)  # activations held at most by each stage
    memory: list[dict[str, float]] = field(default_factory=list)  # bytes of each column's worker, by what they are for

    @property
    def bytes(self) -> float | None:
        """Of all workers in a step; None where a part is not known."""
        known = [cost.bytes for cost in self.traffic if cost.bytes is not None]
        return sum(known) if len(known) == len(self.traffic) else None

    @property
    def messages(self) -> float | None:
        """Of all workers in a step; None where a part is not known."""
        known = [cost.messages for cost in self.traffic if cost.messages is not None]
        return sum(known) if len(known) == len(self.traffic) else None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "bytes": self.bytes,
            "messages": self.messages,
            "traffic": [
                {
                    "what": c.what,
                    "axis": c.axis,
                    "formula": c.formula,
                    "bytes": c.bytes,
                    "messages": c.messages,
                    "busiest": c.busiest,
                    "hidden": c.hidden,
                }
                for c in self.traffic
            ],
            "idle": None if self.idle is None else float(self.idle),
            "idle_formula": self.idle_formula,
            "activations": self.peaks,
            "memory": self.memory,
        }


def costs(strategy: Strategy, workers: int, sizes: Sizes, rows: Table | None = None) -> Costs:
    """What a step of `strategy` costs. `rows` is a schedule's table of the user's own.

    Raises:
        ConfigError: so many workers are no whole number of replicas.
    """
    grid, replica = strategy.grid(workers), strategy.replica
    if not sizes.owned and grid.columns > 1:  # as if all columns were alike
        owned = tuple(cut.stop - cut.start for cut in slices(sizes.parameters, grid.columns))
        sizes = replace(sizes, owned=owned, held=owned)
    traffic = _data(strategy, grid, sizes)
    if replica is None:
        return Costs(grid, traffic, memory=[_memory(strategy, sizes, 0, sum(sizes.kept) * sizes.batch)])
    pipeline = replica if isinstance(replica, Pipeline) and grid.stage > 1 else None
    if pipeline is not None:
        traffic.append(_stages(pipeline, grid, sizes))
    if grid.tensor > 1:
        traffic += _tensor(grid, sizes, 1 if pipeline is None else pipeline.micro_batches)
    traffic += _lent(grid, sizes)
    if pipeline is None:
        kept = sizes.kept[0] * sizes.batch if sizes.kept else 0.0
        return Costs(grid, traffic, memory=[_memory(strategy, sizes, i, kept) for i in range(grid.columns)])
    p, m, v = pipeline.stages, pipeline.micro_batches, pipeline.chunks
    found = table(pipeline.schedule, p, m, v) if rows is None else rows
    kept_at = [held_bytes(row, sizes, m, splits(found)) for row in found]
    return Costs(
        grid,
        traffic,
        idle(pipeline.schedule, p, m, v),
        idle_words(pipeline.schedule),
        [peak(pipeline.schedule, p, m, rank, v) for rank in range(p)],
        [_memory(strategy, sizes, i, kept_at[i // grid.tensor]) for i in range(grid.columns)],
    )


def held_bytes(row: list[Action], sizes: Sizes, micro_batches: int, split: bool) -> float:
    """The most bytes of activations that a stage which does these actions holds at once; 0 where they are not known."""
    if not sizes.kept:
        return 0.0
    counts = [cut.stop - cut.start for cut in slices(sizes.batch, micro_batches)]
    held = most = 0.0
    for kind, chunk, micro in row:
        size = sizes.kept[chunk] * counts[micro]
        held += size if kind == "F" else -size if kind == ("W" if split else "B") else 0
        most = max(most, held)
    return most


def amount(count: float) -> str:
    """Bytes, in one unit."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} bytes"


def _data(strategy: Strategy, grid: Grid, sizes: Sizes) -> list[TrafficCost]:
    """Between replicas: through a ring, or through servers."""
    if strategy.name == "hogwild":
        return [TrafficCost("gradients on a vector that all share", "0: everyone writes into the same memory", 0, 0, 0)]
    if strategy.shards:
        return _servers(strategy, grid, sizes)
    n, vectors = grid.data, [size * sizes.width for size in sizes.columns]
    if strategy.federated:
        return [_replies(strategy, n, sizes)]
    if n == 1:
        return [TrafficCost("gradients between replicas", "0: there is one", 0, 0, 0)]
    each = f" in each of {len(vectors)} columns" if len(vectors) > 1 else ""
    share, why = _compressed(strategy, sizes.width)
    if strategy.apart:
        return [_meetings(strategy, n, sum(vectors), share, why, sizes.states)]
    found = None if share is None else 2 * (n - 1) * sum(vectors) * share
    ring = TrafficCost(
        f"gradients around the ring of {n}{each}",
        f"2(N-1)/N V{why} from each of N = {n}, in 2(N-1) messages a bucket",
        found,
        2 * (n - 1) * n * len(vectors),
        None if share is None else 2 * (n - 1) / n * max(vectors) * share,
        hidden="behind backward, but for the last bucket" if _buckets(strategy) else "no",
    )
    if strategy.name == "hybrid":
        return [ring, TrafficCost("rows of sparse tables", "2 x the distinct rows that a batch touches", None, None)]
    return [ring]


def _meetings(strategy: Strategy, n: int, vector: int, share: float | None, why: str, states: float) -> TrafficCost:
    """A mean of the parameters now and then, spread over the steps between."""
    every = strategy.meets_every
    also = states if getattr(strategy, "momentum", "keep") == "average" else 0.0  # these travel as they are
    found = None if share is None or every is None else 2 * (n - 1) * vector * (share + also) / every
    when = f"every {every} steps" if every is not None else "at the end of each part, spread over its steps"
    return TrafficCost(
        f"parameters around the ring of {n}, {when}",
        f"2(N-1)/N V{why}{f' + {also:g}V of moments' if also else ''} / {every or 'the steps of a part'} from each of "
        f"N = {n}, in 2(N-1) messages a meeting",
        found,
        None if every is None else 2 * (n - 1) * n / every,
        None if found is None else found / n,
    )


def _replies(strategy: Any, n: int, sizes: Sizes) -> TrafficCost:
    """A federated round's meeting: of what N workers have added up of their clients' replies."""
    if n == 1 or strategy.remote:
        return TrafficCost("replies between workers", "0: there is one", 0, 0, 0)
    if strategy.rule != "mean":
        return TrafficCost(f"replies gathered by {n} workers", "V of each reply to each other worker", None, None)
    longer = (3 if sizes.width == 8 else 2) * 8 / sizes.width * (1 + len(strategy.sums))  # than the vector
    digits = longer * sizes.parameters * sizes.width
    return TrafficCost(
        f"sums of replies around the ring of {n}",
        f"2(N-1)/N of {longer:g} V (fixed point) from each of N = {n}, once a round",
        2.0 * (n - 1) * digits,
        2 * (n - 1) * n,
        2 * (n - 1) / n * digits,
    )


def _servers(strategy: Strategy, grid: Grid, sizes: Sizes) -> list[TrafficCost]:
    push, fetch = getattr(strategy, "n_push", 1), getattr(strategy, "n_fetch", 1)
    shards = max(strategy.shards, len(sizes.columns))
    share, why = _compressed(strategy, sizes.width)
    what, each = f"to {shards} shard{'s'[: shards != 1]}", f"V/{shards} to each shard"
    parts = []
    for verb, every, factor, words in (("pull", fetch, 1.0, ""), ("push", push, share, why)):
        often = f" / {every}" if every > 1 else ""
        whole = None if factor is None else grid.data * sizes.parameters * sizes.width * factor / every
        most = None if factor is None else max(sizes.columns) * sizes.width * factor / every
        parts.append(
            TrafficCost(
                f"{verb} {what if verb == 'push' else 'from' + what[2:]}",
                f"V{words}{often} for each of N = {grid.data} ({each})",
                whole,
                round(grid.data * shards / every),
                most,
                hidden="behind the next step" if verb == "push" and not strategy.lockstep else "no",
            )
        )
    return parts


def _stages(replica: Pipeline, grid: Grid, sizes: Sizes) -> TrafficCost:
    """Activations forward, their gradients back, between every two chunks that are neighbours."""
    p, v = replica.stages, replica.chunks
    m = min(replica.micro_batches, sizes.batch) if sizes.batch else replica.micro_batches
    lines = grid.data * grid.tensor
    cuts = sizes.crossings
    forward, back = sum(c.forward for c in cuts), sum(c.backward for c in cuts)
    busiest = [0.0] * p
    for cut in cuts:
        busiest[cut.source % p] += cut.forward * sizes.batch
        busiest[cut.target % p] += cut.backward * sizes.batch
    known = bool(cuts and sizes.batch)
    messages = m * sum(1 + (cut.backward > 0) for cut in cuts) if cuts else 2 * m * (p * v - 1)
    chunks = f"{p} x {v}" if v > 1 else f"{p}"
    return TrafficCost(
        f"activations between {chunks} chunks" if v > 1 else f"activations between {p} stages",
        f"2m({'pv' if v > 1 else 'p'}-1) messages of A/m, A = a batch's activations at a cut, m = {m}",
        lines * sizes.batch * (forward + back) if known else None,
        lines * messages,
        max(busiest) if known else None,
        "stage",
        "behind other micro-batches",
    )


def _tensor(grid: Grid, sizes: Sizes, micro_batches: int) -> list[TrafficCost]:
    """Sums and gathers inside layers."""
    n, lines, stages = grid.tensor, grid.data, len(sizes.summed)
    known = bool(sizes.summed and sizes.batch)
    summed, gathered = sum(sizes.summed) * sizes.batch, sum(sizes.gathered) * sizes.batch
    each = [(2 * a + b) * (n - 1) / n * sizes.batch for a, b in zip(sizes.summed, sizes.gathered, strict=True)]
    found = [
        TrafficCost(
            f"sums inside layers of {n} tensor ranks",
            "2(N-1)/N T from each of N in 2(N-1) messages a sum, T = bd for each split block forward, and backward",
            2 * (n - 1) * summed * lines if known else None,
            2 * (n - 1) * n * sum(sizes.exchanges) * micro_batches * lines if sizes.exchanges else None,
            max(each) if known and stages else None,
            "tensor",
        )
    ]
    if gathered:
        words = "(N-1)/N T from each of N, T = bytes put side by side"
        found.append(TrafficCost("gathers inside layers", words, (n - 1) * gathered * lines, 0, axis="tensor"))
    return found


def _lent(grid: Grid, sizes: Sizes) -> list[TrafficCost]:
    """What columns borrow from each other at the beginning of a step."""
    found = []
    if sizes.tied:
        whole = 2 * sizes.tied * sizes.width * grid.data
        found.append(
            TrafficCost("tied weights between stages", "values there, gradients back: 2 x their bytes", whole, None)
        )
    if sizes.shared:
        whole = sizes.shared * sizes.width * grid.data
        found.append(
            TrafficCost("weights that tensor ranks hold whole", "(N-1) x their bytes, from the first", whole, None)
        )
    return found


def _buckets(strategy: Strategy) -> bool:
    """Whether gradients leave while backward goes on."""
    whole = strategy.replica is None and strategy.compression is None
    return whole and getattr(strategy, "bucket_mb", None) != 0


def _compressed(strategy: Strategy, width: int) -> tuple[float | None, str]:
    """The share of a vector's bytes that travels, and how to write it; None where only a run can tell."""
    given = strategy.compression
    if given is None:
        return 1.0, ""
    if given in _FACTORS:
        return int(_FACTORS[given][0]) / width, f" x {_FACTORS[given][0]}/{width} ({given})"
    return None, f", compressed by {given}"


def _memory(strategy: Strategy, sizes: Sizes, column: int, activations: float) -> dict[str, float]:
    """Bytes of one worker of a column."""
    own = sizes.columns[column] * sizes.width
    held = (sizes.held[column] if sizes.held else sizes.columns[column]) * sizes.width
    steps = strategy.shards == 0 or getattr(strategy, "steps_locally", False)
    found = {
        "parameters": float(held),
        "gradients": float(held),
        "optimizer": own * sizes.states if steps else 0.0,
        "activations": activations,
    }
    return found | {"all": sum(found.values())}

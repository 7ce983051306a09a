"""The cost of a strategy on a grid, by formula: bytes and messages per step, waiting, memory. Pure.

The strategy's `cost` gives the traffic between replicas (formulas of `rayps.core.strategy.traffic`). This module adds
the traffic inside a divided replica, the idle time of a pipeline, and the memory of a worker.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from fractions import Fraction

from rayps_client.values import JsonObject

from rayps.core.grid import Grid
from rayps.core.partition import cut_slices
from rayps.core.pipeline.schedule import (
    Action,
    Table,
    compute_idle,
    compute_peak,
    make_table,
    splits,
    write_idle_formula,
)
from rayps.core.strategy.replica import Pipeline, pipeline_of
from rayps.core.strategy.strategy import StrategyView
from rayps.core.strategy.topology import AUTO_BUCKET_MB, Peers, Servers, Topology
from rayps.core.strategy.traffic import Sizes, TrafficCost


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of a strategy on a grid, by formula: traffic and idle time of a step, and memory."""

    grid: Grid
    traffic: list[TrafficCost]
    idle: Fraction | None = None  # idle share of the pipeline's time
    idle_formula: str = ""
    peaks: list[int] = field(default_factory=list)  # most activations that each stage holds at once
    memory: list[dict[str, float]] = field(default_factory=list)  # bytes of each column's worker, by purpose
    memory_formula: str = ""  # the formula of the memory, if workers hold slices of the state

    @property
    def bytes(self) -> float | None:
        """Bytes that all workers send in a step; None if the bytes of one kind of traffic are not known."""
        known = [cost.bytes for cost in self.traffic if cost.bytes is not None]
        return sum(known) if len(known) == len(self.traffic) else None

    @property
    def messages(self) -> float | None:
        """Messages that all workers send in a step; None if the messages of one kind of traffic are not known."""
        known = [cost.messages for cost in self.traffic if cost.messages is not None]
        return sum(known) if len(known) == len(self.traffic) else None

    def to_dict(self) -> JsonObject:
        """Return the costs as JSON-ready data."""
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
            "memory_formula": self.memory_formula,
        }


def estimate_costs(strategy: StrategyView, workers: int, sizes: Sizes, rows: Table | None = None) -> Costs:
    """Return the costs of `strategy` on `workers`.

    `rows` is the table of a user's own pipeline schedule; None means the table of the strategy's schedule.

    Raises:
        ConfigError: `workers` is not a whole number of replicas.
    """
    topology = strategy.topology
    grid, replica = topology.grid(workers), topology.replica
    if not sizes.owned and grid.columns > 1:  # the columns' sizes are not known: assume equal ones
        owned = tuple(cut.stop - cut.start for cut in cut_slices(sizes.parameters, grid.columns))
        sizes = replace(sizes, owned=owned, held=owned)
    traffic = strategy.cost(grid, sizes)
    if replica is None:
        memory = _estimate_memory(topology, sizes, 0, sum(sizes.kept) * sizes.batch, grid.data)
        return Costs(grid, traffic, memory=[memory], memory_formula=_write_formula(topology))
    pipeline = pipeline_of(replica)
    if pipeline is not None:
        traffic.append(_cost_stages(pipeline, grid, sizes))
    if grid.tensor > 1:
        traffic += _cost_tensor(grid, sizes, 1 if pipeline is None else pipeline.micro_batches)
    traffic += _cost_borrowed(grid, sizes)
    if pipeline is None:
        kept = sizes.kept[0] * sizes.batch if sizes.kept else 0.0
        return Costs(grid, traffic, memory=[_estimate_memory(topology, sizes, i, kept) for i in range(grid.columns)])
    p, m, v = pipeline.stages, pipeline.micro_batches, pipeline.chunks
    found = make_table(pipeline.schedule, p, m, v) if rows is None else rows
    kept_at = [estimate_held_bytes(row, sizes, m, splits(found)) for row in found]
    return Costs(
        grid,
        traffic,
        compute_idle(pipeline.schedule, p, m, v),
        write_idle_formula(pipeline.schedule),
        [compute_peak(pipeline.schedule, p, m, rank, v) for rank in range(p)],
        [_estimate_memory(topology, sizes, i, kept_at[i // grid.tensor]) for i in range(grid.columns)],
    )


def estimate_held_bytes(row: list[Action], sizes: Sizes, micro_batches: int, split: bool) -> float:
    """Return the most bytes of activations that a stage with these actions holds at once, or 0 if not known."""
    if not sizes.kept:
        return 0.0
    counts = [cut.stop - cut.start for cut in cut_slices(sizes.batch, micro_batches)]
    held = most = 0.0
    for kind, chunk, micro in row:
        size = sizes.kept[chunk] * counts[micro]
        held += size if kind == "F" else -size if kind == ("W" if split else "B") else 0
        most = max(most, held)
    return most


def format_bytes(count: float) -> str:
    """Format a number of bytes, such as `1.5 MB`."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} bytes"


def _cost_stages(replica: Pipeline, grid: Grid, sizes: Sizes) -> TrafficCost:
    """Return the cost of sending activations and their gradients between neighbouring chunks."""
    p, v = replica.stages, replica.chunks
    m = min(replica.micro_batches, sizes.batch) if sizes.batch else replica.micro_batches
    pipelines = grid.data * grid.tensor
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
        pipelines * sizes.batch * (forward + back) if known else None,
        pipelines * messages,
        max(busiest) if known else None,
        "stage",
        "computation of other micro-batches",
    )


def _cost_tensor(grid: Grid, sizes: Sizes, micro_batches: int) -> list[TrafficCost]:
    """Return the cost of the sums and gathers that tensor ranks compute together inside layers."""
    n, replicas, stages = grid.tensor, grid.data, len(sizes.summed)
    known = bool(sizes.summed and sizes.batch)
    summed, gathered = sum(sizes.summed) * sizes.batch, sum(sizes.gathered) * sizes.batch
    each = [(2 * a + b) * (n - 1) / n * sizes.batch for a, b in zip(sizes.summed, sizes.gathered, strict=True)]
    found = [
        TrafficCost(
            f"sums inside layers of {n} tensor ranks",
            "2(N-1)/N T from each of N in 2(N-1) messages per sum, T = bd (batch rows b, width d), one sum per split "
            "block forward and one backward",
            2 * (n - 1) * summed * replicas if known else None,
            2 * (n - 1) * n * sum(sizes.exchanges) * micro_batches * replicas if sizes.exchanges else None,
            max(each) if known and stages else None,
            "tensor",
        )
    ]
    if gathered:
        words = "(N-1)/N T from each of N, T = bytes gathered"
        found.append(TrafficCost("gathers inside layers", words, (n - 1) * gathered * replicas, 0, axis="tensor"))
    return found


def _cost_borrowed(grid: Grid, sizes: Sizes) -> list[TrafficCost]:
    """Return the cost of parameters that columns borrow from each other at the start of a step."""
    found = []
    if sizes.tied:
        whole = 2 * sizes.tied * sizes.width * grid.data
        found.append(
            TrafficCost(
                "tied weights between stages",
                "values to the stage that borrows them, gradients back: 2 x their bytes",
                whole,
                None,
            )
        )
    if sizes.shared:
        whole = sizes.shared * sizes.width * grid.data
        found.append(
            TrafficCost(
                "weights that no tensor rank splits", "(N-1) x their bytes, sent by the first rank", whole, None
            )
        )
    return found


def _estimate_memory(
    topology: Topology, sizes: Sizes, column: int, activations: float, workers: int = 1
) -> dict[str, float]:
    """Return the memory in bytes of one worker of `column`, by purpose."""
    own = sizes.columns[column] * sizes.width
    held = (sizes.held[column] if sizes.held else sizes.columns[column]) * sizes.width
    steps = not isinstance(topology, Servers) or topology.own_copies
    found = {
        "parameters": float(held),
        "gradients": float(held),
        "optimizer": own * sizes.states if steps else 0.0,
        "activations": activations,
    }
    if isinstance(topology, Peers) and topology.shard is not None:
        found |= estimate_sharded_memory(topology, own, sizes.states, workers)
    return found | {"all": sum(found.values())}


def _write_formula(topology: Topology) -> str:
    if not isinstance(topology, Peers) or topology.shard is None:
        return ""
    gradients = {"optimizer": "V", "gradients": "V/N + a bucket", "parameters": "V/N"}[topology.shard]
    parameters = "V/N and the largest unit, not counted here" if topology.shard == "parameters" else "V"
    copies = ", copies 2(1 + k) V/N" if topology.slice_backup else ""
    return (
        f"formula      parameters {parameters}, gradients {gradients}, optimizer kV/N{copies}; V = bytes of the "
        "parameters, N = workers, k = numbers in the optimizer's state for each element (2 for Adam)"
    )


def estimate_sharded_memory(topology: Peers, vector: float, states: float, workers: int) -> dict[str, float]:
    """Return the memory in bytes of one of N workers that hold slices of the state, by purpose, without activations.

    V is the bytes of the parameters (`vector`), k the numbers in the optimizer's state for each element (`states`), and
    B the bytes of a bucket.

        shard         parameters   gradients   optimizer
        optimizer     V            V           kV/N
        gradients     V            V/N + B     kV/N
        parameters    V/N          V/N         kV/N

    With `slice_backup`, a worker also has its slice (1 + k) V/N twice in shared memory, for the newest two rounds. A
    worker of another host that holds the copy has as much again.
    """
    part = vector / workers
    bucket = min(vector, 1e6 * (AUTO_BUCKET_MB if topology.bucket_mb is None else topology.bucket_mb or math.inf))
    gradients = {"optimizer": vector, "gradients": part + bucket, "parameters": part}
    found = {
        "parameters": part if topology.shard == "parameters" else vector,
        "gradients": gradients[topology.shard or "optimizer"],
        "optimizer": states * part,
    }
    return found | ({"copies": 2 * (1 + states) * part} if topology.slice_backup else {})

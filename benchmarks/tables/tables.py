"""Measure a sparse table's segments in one process, and a table's size in memory and on disk.

A sparse table is compared with torch on a dense table with the same ids: index_select for a pull, index_add_ for a
push, and the same optimizer's arithmetic on dense state. Times are CPU times of one thread, so that other processes
have little influence.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from rayps_client.errors import ConfigError

from rayps.bench.rows import Ids
from rayps.bench.table import BenchRow
from rayps.ps.protocol.space import SparseTable
from rayps.ps.tables import parquet
from rayps.ps.tables.table_segment import TableSegment, check_table
from rayps.ps.tables.wire_format import bucket, encode_pull, encode_push, split
from rayps.strategies.parameter_server import ParameterServer

OPTIMIZERS = ("sgd", "adagrad", "adam")
_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class TableRow(BenchRow):
    """One optimizer with one number of segments. Figures are medians; rates are rows per second."""

    columns: ClassVar[str] = (
        "optimizer | segments | ids | pull: pulled/s | push: pushed/s | torch_pull: select/s | "
        "torch_push: add/s | of_limit: of limit | torch_step: step/s | of_same: of the same | "
        "row_bytes: bytes a row | made: made/s"
    )

    rows: int
    ids: int  # ids of one batch, all different
    dim: int
    segments: int
    optimizer: str
    zipf: float | None
    repeats: int
    pull: float  # rows per second that the table's segments return
    push: float  # rows per second that the table's segments update
    torch_pull: float  # rows per second of index_select
    torch_push: float  # rows per second of index_add_
    of_limit: float  # torch's time for index_select and index_add_ / the table's time for a pull and a push
    torch_step: float  # rows per second of torch's step of this optimizer, by id, on dense state
    of_same: float  # torch's time for index_select and this step / the table's time for a pull and a push
    row_bytes: float  # bytes of memory per row
    made: float  # rows per second that are created from seed and id


@dataclass(frozen=True, slots=True)
class FilesRow(BenchRow):
    """The size of a table in memory and as Parquet files, and the time to save and to load it."""

    columns: ClassVar[str] = (
        "rows | segments | loaded_on: loaded on | row_bytes: bytes a row | file_bytes: on disk | "
        "save: save s | load: load s | save_cpu: cpu s | load_cpu: cpu s"
    )

    rows: int
    dim: int
    segments: int
    loaded_on: int  # number of segments onto which the files were loaded
    row_bytes: float  # bytes of memory per row
    file_bytes: float  # bytes on disk per row
    save: float  # seconds
    load: float
    save_cpu: float  # CPU seconds
    load_cpu: float


def bench_tables(
    rows: int,
    ids: int,
    dim: int,
    segments: Sequence[int],
    optimizers: Sequence[str],
    *,
    zipf: float | None = None,
    repeats: int = 15,
) -> list[TableRow]:
    """Measure batches of `ids` different ids of a table with `rows` rows.

    If `zipf` is given, a batch has the different ids among `ids` draws from a Zipf distribution with this exponent.

    Raises:
        ConfigError: there is no such optimizer, or a number is below 1.
    """
    if rows < 1 or ids < 1 or repeats < 1:
        raise ConfigError(f"ids is {ids}, rows {rows}, repeats {repeats}: give at least 1 of each", field="rows")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [
            _measure(_make_table(rows, dim, count, name), rows, ids, zipf, repeats)
            for name, count in itertools.product(optimizers, segments)
        ]
    finally:
        torch.set_num_threads(before)


def _make_table(rows: int, dim: int, segments: int, optimizer: str) -> SparseTable:
    table = SparseTable("bench", dim, segments, optimizer={"name": optimizer, "lr": 0.1})
    check_table(table)
    return table


def fill_segments(table: SparseTable, rows: int) -> tuple[list[TableSegment], float]:
    """Make a table's segments with the rows 0 to `rows` - 1; return the segments and the CPU seconds."""
    found = [TableSegment(table, index, ParameterServer(staleness=None), 1) for index in range(table.segments)]
    began = time.thread_time()
    for lo in range(0, rows, _CHUNK):
        ids = np.arange(lo, min(rows, lo + _CHUNK))
        order, bounds = split(ids, table.segments)
        for segment, (a, b) in zip(found, itertools.pairwise(bounds), strict=True):
            segment.copied = False
            if a < b:
                with segment.store.lock:
                    segment.store.make(ids[order[a:b]], np.ones(b - a, np.int64), 0)
    return found, time.thread_time() - began


class Dense:
    """A dense table in torch with an optimizer. A step gathers the state of some ids, and updates state and rows.

    The arithmetic is that of the sparse table. With SGD a step is one index_add_.
    """

    def __init__(self, rows: int, dim: int, optimizer: str, lr: float) -> None:
        self.rows, self._name, self._lr = torch.zeros(rows, dim), optimizer, lr
        self._state = {"sgd": 0, "adagrad": 1, "adam": 2}[optimizer]
        self._held = [torch.zeros(rows, dim) for _ in range(self._state)]
        self._steps = torch.zeros(rows if optimizer == "adam" else 0, dtype=torch.int64)

    def step(self, ids: torch.Tensor, grad: torch.Tensor) -> None:
        """Apply an optimizer step with the gradient `grad` [n, dim] to the rows of `ids` [n], which are unique."""
        if self._name == "sgd":
            self.rows.index_add_(0, ids, grad * -self._lr)  # index_add_'s own factor, `alpha`, is four times as slow
            return
        values = [held.index_select(0, ids) for held in self._held]
        if self._name == "adagrad":
            total = values[0].addcmul_(grad, grad)
            self.rows.index_add_(0, ids, (grad * -self._lr).div_(total.sqrt().add_(1e-10)))
        else:
            mean, square = values[0].lerp_(grad, 0.1), values[1].mul_(0.999).addcmul_(grad, grad, value=0.001)
            taken = self._steps.index_select(0, ids).add_(1)
            self._steps.index_copy_(0, ids, taken)
            times = taken.to(grad.dtype)
            size = ((1 - 0.999**times).sqrt_() / (1 - 0.9**times)).unsqueeze(1)
            self.rows.index_add_(0, ids, (mean * size.mul_(-self._lr)).div_(square.sqrt().add_(1e-8)))
        for held, value in zip(self._held, values, strict=True):
            held.index_copy_(0, ids, value)


def _measure(table: SparseTable, rows: int, ids: int, zipf: float | None, repeats: int) -> TableRow:
    segments, making = fill_segments(table, rows)
    dense, chance = Dense(rows, table.dim, table.optimizer["name"], 0.1), np.random.default_rng(0)
    times: list[tuple[int, list[float]]] = []
    for step in range(repeats + 2):
        batch = _draw_batch(chance, rows, ids, zipf)
        times.append((len(batch), _turn(segments, dense, batch, step)))
    found = times[2:]  # without two warm-up turns, in which the process's memory grows
    rates = [statistics.median(count / each[k] for count, each in found) for k in range(5)]
    share = statistics.median((each[0] + each[1]) / (each[3] + each[4]) for _, each in found)
    same = statistics.median((each[0] + each[2]) / (each[3] + each[4]) for _, each in found)
    memory = sum(segment.nbytes for segment in segments) / rows
    return TableRow(
        rows,
        int(statistics.median(count for count, _ in found)),
        table.dim,
        table.segments,
        table.optimizer["name"],
        zipf,
        repeats,
        rates[3],
        rates[4],
        rates[0],
        rates[1],
        share,
        rates[2],
        same,
        memory,
        rows / making,
    )


def _draw_batch(chance: np.random.Generator, rows: int, ids: int, zipf: float | None) -> Ids:
    if zipf is not None:
        return np.unique((chance.zipf(zipf, ids) - 1) % rows)
    return np.sort(chance.choice(rows, min(ids, rows), replace=False))


def _turn(segments: list[TableSegment], dense: Dense, ids: Ids, step: int) -> list[float]:
    """Return the CPU seconds of one batch for: index_select, index_add_, torch's step, the pulls, the pushes."""
    table = segments[0].table
    grad, order_bounds, places = torch.rand(len(ids), table.dim), split(ids, table.segments), torch.from_numpy(ids)
    order, bounds = order_bounds
    parts = [order[a:b] for a, b in itertools.pairwise(bounds)]
    pulls = [encode_pull(ids[part]).data for part in parts]
    pushes = [encode_push(ids[part], grad[part], np.ones(len(part), np.uint32)).data for part in parts]
    times = [time.thread_time()]
    dense.rows.index_select(0, places)
    times.append(time.thread_time())
    dense.rows.index_add_(0, places, grad)
    times.append(time.thread_time())
    dense.step(places, grad)
    times.append(time.thread_time())
    for segment, piece in zip(segments, pulls, strict=True):
        segment.pull(0, piece)
    times.append(time.thread_time())
    for segment, piece in zip(segments, pushes, strict=True):
        segment.check(0, step, 1.0, piece)
        segment.push(0, step, 1.0, piece)
    times.append(time.thread_time())
    return [b - a for a, b in itertools.pairwise(times)]


def bench_files(rows: int, dim: int, segments: int, loaded_on: int, folder: Path | None = None) -> FilesRow:
    """Save a table of `rows` rows with Adagrad as Parquet, and load it onto `loaded_on` segments.

    Raises:
        ConfigError: there are no rows, or no segments.
    """
    if rows < 1 or loaded_on < 1:
        raise ConfigError(f"rows is {rows} and segments is {loaded_on}: give at least 1 of each", field="rows")
    table = _make_table(rows, dim, segments, "adagrad")
    held, _ = fill_segments(table, rows)
    memory = sum(segment.nbytes for segment in held) / rows
    with tempfile.TemporaryDirectory(dir=folder) as place:
        began, used = time.perf_counter(), time.process_time()
        written = parquet.write(place, table, (segment.dump() for segment in held))
        saving = time.perf_counter() - began, time.process_time() - used
        size = sum(path.stat().st_size for path in written) / rows
        del held
        again = replace(table, segments=loaded_on)
        began, used, count = time.perf_counter(), time.process_time(), 0
        kept = []
        for index, state in parquet.read(place, again, workers=1):
            segment = TableSegment(again, index, ParameterServer(staleness=None), 1)
            segment.load(state)
            kept.append(segment)
            count += segment.rows
        loading = time.perf_counter() - began, time.process_time() - used
    if count != rows:
        raise RuntimeError(f"{count} of {rows} rows were loaded")
    return FilesRow(rows, dim, segments, loaded_on, memory, size, saving[0], loading[0], saving[1], loading[1])


def measure_skew(rows: int, ids: int, zipf: float, segments: int) -> float:
    """Return a Zipf batch's imbalance: the rows of the segment with the most rows, divided by the mean per segment."""
    held = np.bincount(bucket(_draw_batch(np.random.default_rng(0), rows, ids, zipf), segments), minlength=segments)
    return float(held.max() / held.mean())

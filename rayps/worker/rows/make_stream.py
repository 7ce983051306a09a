"""Which batches a worker takes under a plan: the one place that chooses between the kinds of rows."""

from __future__ import annotations

from rayps.core.job.user_code import START_SECONDS, user_code
from rayps.core.rooms import load
from rayps.core.rows.backup_portions import PortionsPlan
from rayps.core.rows.phase_rounds import OPEN
from rayps.core.rows.row_shares import RowShares
from rayps.core.rows.step_rows import ByPortion, ByRank, EvenCut
from rayps.core.strategy.strategy_families import Rows, ends_together
from rayps.core.strategy.topology import backup_in
from rayps.data.base import Data
from rayps.data.dealt_rows import DealtRows, must_have_row_numbers
from rayps.worker.loops.loop_of_family import ROW_DRAWS
from rayps.worker.plan import WorkerPlan
from rayps.worker.rows.batches import BatchStream, OpenPass
from rayps.worker.rows.block_readers import BlockReader, NumberReader, SequenceReader, StackReader
from rayps.worker.rows.lease_book import LeaseBook
from rayps.workload.base import Workload


def make_stream(workload: Workload, plan: WorkerPlan) -> BatchStream:
    """Return the batches of a worker under a plan.

    Raises:
        DataError, WorkloadError: the data fails.
        ConfigError: the rows must be taken by number, and cannot be.
    """
    with user_code("data"):
        rows = plan.strategy.rows
        data = rows.source(workload)
        if plan.private is not None and plan.private.rows is not None:
            return _read_drawn(data, plan, rows)
        if backup_in(plan.strategy):
            return _read_by_portion(data, plan, rows, workload.accumulate)
        if plan.leased:
            return _read_leased(data, plan, rows, workload.accumulate)
        return _read_by_rank(data, plan, rows, workload.accumulate)


def deal_shares(stream: BatchStream, shares: RowShares) -> None:
    """Take other shares of the rows from the next round on. The rows of a round over all workers stay the same."""
    data = stream.data
    assert isinstance(data, DealtRows), "the rows of this job are dealt by shares"
    with user_code("data"):
        dealt = data.dealt_by(shares)
        reader = SequenceReader(dealt, stream.seed, dealt.micro_batches)
    stream.change_shares(dealt, reader, dealt.micro_batches)


def _read_by_rank(data: Data, plan: WorkerPlan, rows: Rows, accumulate: int) -> BatchStream:
    rank, size = _find_place(plan)
    if plan.elastic is not None and not rows.by_client:
        data = DealtRows(data, plan.elastic.rows)
        accumulate = data.micro_batches
    steps = rows.rounds(data, size, accumulate)
    reader = SequenceReader(data, plan.seed, accumulate)
    alone = not ends_together(plan.strategy.topology)
    return BatchStream(
        data,
        ByRank(rank, size, steps, plan.origin),
        reader,
        (rank, size),
        plan.seed,
        steps,
        accumulate=accumulate,
        open_pass=OpenPass(reader, (plan.origin,), alone=alone) if steps >= OPEN else None,
    )


def _read_by_portion(data: Data, plan: WorkerPlan, rows: Rows, accumulate: int) -> BatchStream:
    rank, size = _find_place(plan)
    shares = size - backup_in(plan.strategy)
    steps = rows.rounds(data, shares, accumulate)
    blocks = ByPortion(rank, PortionsPlan(shares, size, steps, plan.origin), max(plan.start, 0))
    reader = make_jumping_reader(data, plan.seed, accumulate)
    return BatchStream(data, blocks, reader, (rank, size), plan.seed, steps, accumulate=accumulate)


def _read_leased(data: Data, plan: WorkerPlan, rows: Rows, accumulate: int) -> BatchStream:
    must_have_row_numbers(data)
    place, steps = _find_place(plan), rows.rounds(data, 1, accumulate)
    # the driver may wait between two polls: for a server that does not answer, then for its successor
    leases = LeaseBook(place[0], plan.timeout + START_SECONDS)
    reader = make_jumping_reader(data, plan.seed, accumulate)
    stream = BatchStream(data, leases, reader, place, plan.seed, steps, accumulate=accumulate)
    stream.leases = leases
    return stream


def _read_drawn(data: Data, plan: WorkerPlan, rows: Rows) -> BatchStream:
    draws, most = load(ROW_DRAWS)(data, plan)
    (rank, size), steps = _find_place(plan), rows.rounds(data, plan.grid.data)
    blocks, reader = ByRank(rank, size, steps, plan.origin), StackReader(data, draws, most)
    return BatchStream(data, blocks, reader, (rank, size), plan.seed, steps)


def make_jumping_reader(data: Data, seed: int, accumulate: int) -> BlockReader:
    """Return a reader of blocks in any order: by number if the data has row numbers and is not read ahead."""
    if data.has_row_numbers and data.ahead is None:
        cut = EvenCut(data.rows(), data.batch_size, accumulate, data.drop_last)
        return NumberReader(data, cut, seed, accumulate)
    return SequenceReader(data, seed, accumulate, jumps=data.has_row_numbers)


def _find_place(plan: WorkerPlan) -> tuple[int, int]:
    return plan.place.data, plan.grid.data

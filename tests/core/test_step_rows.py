"""Which rows a worker takes in each step: each place of an epoch once, for each kind of rows, by all small cases."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch

import rayps
from rayps.core.rows.backup_portions import PortionsPlan
from rayps.core.rows.leases import BlockRange, RowLease
from rayps.core.rows.row_shares import RowShares, cut_evenly
from rayps.core.rows.step_rows import ByLease, ByPortion, ByRank, EvenCut, Places, RowBlock, RowCut, ShareCut, StepRows

CASES = list(itertools.product((1, 2, 7, 12, 13), (1, 2, 3), (1, 2, 4), (1, 2, 3), (False, True)))
EPOCHS = 2


def rows_of(rows: StepRows, cut: RowCut, step: int) -> tuple[int, tuple[Places, ...]]:
    """Return the epoch of a step, and for each of its micro-batches the places of its rows in the epoch's order."""
    block = rows.block(step)
    return (rows.epoch_of(step)[0], ()) if block is None else (block.epoch, cut.places(block))


def _taken(workers: list[StepRows], cuts: list[RowCut], steps: int) -> dict[int, Counter[int]]:
    """Return how often each place of each epoch is taken in `steps` steps of all workers."""
    found: dict[int, Counter[int]] = {}
    for step in range(steps):
        for rows, cut in zip(workers, cuts, strict=True):
            epoch, parts = rows_of(rows, cut, step)
            found.setdefault(epoch, Counter()).update(itertools.chain(*parts))
    return found


def _steps(rows: int, size: int, batch: int, accumulate: int, drop_last: bool) -> int:
    most = -(-rows // size)
    batches = most // batch if drop_last else -(-most // batch)
    return -(-batches // accumulate)


@pytest.mark.parametrize(("rows", "size", "batch", "accumulate", "drop_last"), CASES)
def test_by_rank_is_what_data_yields(rows: int, size: int, batch: int, accumulate: int, drop_last: bool) -> None:
    steps = _steps(rows, size, batch, accumulate, drop_last)
    if not steps:
        return
    cut = EvenCut(rows, batch, accumulate, drop_last)
    data = rayps.data.tensors(torch.arange(rows), batch_size=batch, drop_last=drop_last)
    for rank in range(size):
        by_rank = ByRank(rank, size, steps, (5, 1))
        for epoch in range(EPOCHS):
            order = data.order(3, 1 + epoch)
            found = []
            for index in range(steps):
                step = 5 + epoch * steps + index
                assert by_rank.epoch_of(step) == (1 + epoch, index)
                taken, parts = rows_of(by_rank, cut, step)
                assert taken == 1 + epoch and len(parts) <= accumulate
                found += [order[list(part)].tolist() for part in parts]
            assert found == [each.x.tolist() for each in data.batches(rank=rank, size=size, seed=3, epoch=1 + epoch)]


@pytest.mark.parametrize(("rows", "size", "batch", "accumulate", "drop_last"), CASES)
def test_leases_take_each_place_once_whoever_has_them(
    rows: int, size: int, batch: int, accumulate: int, drop_last: bool
) -> None:
    blocks = _steps(rows, 1, batch, accumulate, drop_last)
    cut = EvenCut(rows, batch, accumulate, drop_last)
    leases: list[list[RowLease]] = [[] for _ in range(size)]
    for number, (epoch, block) in enumerate(itertools.product(range(EPOCHS), range(blocks))):
        own = leases[number * 7 % size]
        own.append(RowLease(own[-1].end if own else 0, BlockRange(epoch, block, block + 1)))
    found: dict[int, Counter[int]] = {}
    for own in leases:
        by_lease = ByLease(tuple(own))
        assert not by_lease.is_known(len(own)) and by_lease.epoch_of(len(own) + 9) == by_lease.epoch_of(len(own) - 1)
        for epoch, taken in _taken([by_lease], [cut], len(own)).items():
            assert all(map(by_lease.is_known, range(len(own))))
            found.setdefault(epoch, Counter()).update(taken)
    whole = rows // batch * batch if drop_last else rows
    assert all(found[epoch] == Counter(range(whole)) for epoch in range(EPOCHS if blocks else 0))


@pytest.mark.parametrize(("rows", "size", "batch", "accumulate", "drop_last"), CASES)
def test_portions_take_each_place_once_whoever_is_dropped(
    rows: int, size: int, batch: int, accumulate: int, drop_last: bool
) -> None:
    """With one backup worker, of which in each step another one is late."""
    steps = _steps(rows, size, batch, accumulate, drop_last)
    if not steps:
        return
    cut = EvenCut(rows, batch, accumulate, drop_last)
    workers = [ByPortion(rank, PortionsPlan(size, size + 1, steps, (0, 0)), 0) for rank in range(size + 1)]
    found: dict[int, Counter[int]] = {}
    last: dict[int, RowBlock] = {}
    for step in range(EPOCHS * steps):
        now = workers[0].walk.now
        late = now.holders[step % len(now.holders)] if len(now.holders) > size else None
        members = [rank for rank in now.holders if rank != late]
        for rank, worker in enumerate(workers):
            block = worker.block(step)
            assert (block is not None) == worker.has_portion == (rank in now.holders)
            assert worker.epoch_of(step) == divmod(step, steps) and not worker.is_known(step + 1)
            if rank in members:
                epoch, parts = rows_of(worker, cut, step)
                found.setdefault(epoch, Counter()).update(itertools.chain(*parts))
            if block is not None and rank in last:
                assert block.has_rows_of(last[rank])  # it was dropped, and takes the same rows again
            last.pop(rank, None)
            if rank == late and block is not None:
                last[rank] = block
        for worker in workers:
            worker.walk.advance(members)
    alone = [place for rank in range(size) for part in _all(cut, rank, size, steps) for place in part]
    assert all(found[epoch] == Counter(alone) for epoch in range(EPOCHS))


def _all(cut: EvenCut, rank: int, size: int, steps: int) -> list[range]:
    return [part for index in range(steps) for part in cut.places(RowBlock(index, 0, index, rank, size))]


@pytest.mark.parametrize(("rows", "size", "batch", "accumulate", "drop_last"), CASES)
def test_shares_take_each_place_once(rows: int, size: int, batch: int, accumulate: int, drop_last: bool) -> None:
    for shares in (cut_evenly(batch * size, size), tuple(range(1, size + 1))):
        dealt = RowShares(0, 0, 0, shares, drop_last)
        steps = dealt.rounds(rows)
        if not steps:
            continue
        cut = ShareCut(rows, batch, dealt)
        found = _taken([ByRank(rank, size, steps) for rank in range(size)], [cut] * size, EPOCHS * steps)
        whole = rows // dealt.block * dealt.block if drop_last else rows
        assert all(found[epoch] == Counter(range(whole)) for epoch in range(EPOCHS))
        for rank, index in itertools.product(range(size), range(steps)):
            parts = cut.places(RowBlock(index, 0, index, rank, size))
            assert len(parts) == cut.accumulate and all(len(part) <= batch for part in parts)


def test_a_worker_without_a_portion_takes_nothing() -> None:
    last = ByPortion(2, PortionsPlan(2, 3, 1, (0, 0)), 0)
    assert rows_of(last, EvenCut(4, 2), 0) == (0, ())

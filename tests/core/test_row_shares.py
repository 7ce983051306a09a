"""Rows of workers in step whose number changes: each row once an epoch, and equal to fixed workers without changes."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rayps_client.errors import ConfigError

import rayps
from rayps.core.grid import Grid
from rayps.core.rows.phase_rounds import Calendar
from rayps.core.rows.row_shares import RowShares, cut_evenly, deal_places
from rayps.core.strategy.elastic import ElasticWorkers, range_of, workers_of_text
from rayps.data.base import Data
from rayps.data.dealt_rows import DealtRows
from rayps.strategies.job import JobSpec, elastic_fields


def _rows(data: Data, rank: int, size: int, epoch: int, start: int = 0) -> list[list[int]]:
    return [batch.x.tolist() for batch in data.batches(rank=rank, size=size, seed=3, epoch=epoch, start=start)]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("rows", "size", "batch"), list(itertools.product((1, 7, 24, 25), (1, 2, 3, 5), (1, 4))))
def test_equal_shares_are_the_rows_of_a_fixed_number_of_workers(
    rows: int, size: int, batch: int, shuffle: bool
) -> None:
    data = rayps.data.tensors(torch.arange(rows), batch_size=batch, shuffle=shuffle)
    shared = DealtRows(data, RowShares(0, 0, 0, (batch,) * size))
    assert shared.steps(size) == data.steps(size)
    for rank, epoch in itertools.product(range(size), (0, 1)):
        assert _rows(shared, rank, size, epoch) == _rows(data, rank, size, epoch)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(any))
def test_places_are_dealt_once_and_in_turn(shares: list[int]) -> None:
    places = [deal_places(shares, rank) for rank in range(len(shares))]
    assert sorted(itertools.chain(*places)) == list(range(sum(shares)))
    assert [len(own) for own in places] == shares
    turns = [[rank for rank, share in enumerate(shares) if share > turn] for turn in range(max(shares))]
    order = list(itertools.chain(*turns))  # the naive version: one place after the other
    assert places == [[at for at, who in enumerate(order) if who == rank] for rank in range(len(shares))]


@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(1, 60),
    memberships=st.lists(
        st.tuples(st.integers(0, 9), st.lists(st.integers(1, 5), min_size=1, max_size=5)), min_size=1, max_size=6
    ),
)
def test_each_row_once_an_epoch_whatever_the_changes(rows: int, memberships: list[tuple[int, list[int]]]) -> None:
    """Memberships with the rounds that each lasts. Every epoch that has ended has each row of its order once."""
    data = rayps.data.tensors(torch.arange(rows), batch_size=2)
    now = RowShares(0, 0, 0, tuple(memberships[0][1]))
    taken: dict[int, list[int]] = {}
    at = 0
    for number, (rounds, shares) in enumerate(memberships):
        if number:
            now = now.followed_by(at, shares, rows)
        size, began = len(shares), now.origin(rows)
        per_epoch = now.rounds(rows)
        for at in range(at, at + rounds):  # noqa: B020  the next membership continues at this round
            epochs, index = divmod(at - began[0], per_epoch)
            epoch = began[1] + epochs
            shared = DealtRows(data, now)
            for rank in range(size):
                parts = shared.batches(rank=rank, size=size, seed=3, epoch=epoch, start=index * shared.micro_batches)
                for batch in itertools.islice(parts, shared.micro_batches):
                    assert len(batch.x) <= data.batch_size
                    taken.setdefault(epoch, []).extend(batch.x.tolist())
            low, high = now.bounds(epoch, index, rows)
            assert 0 <= low < high <= rows
        at = at + 1 if rounds else at
    for epoch, found in taken.items():
        order = data.order(3, epoch).tolist()
        assert len(set(found)) == len(found)
        assert set(found) == set(order[: len(found)])  # the rows consumed are always a prefix
        if epoch < max(taken):
            assert len(found) == rows


def test_a_global_batch_takes_the_same_rows_with_any_number_of_workers() -> None:
    data = rayps.data.tensors(torch.arange(50), batch_size=3)
    for size in (1, 2, 3, 5, 7):
        shared = DealtRows(data, RowShares(0, 0, 0, cut_evenly(10, size)))
        for index in range(5):
            found = [
                row
                for rank in range(size)
                for batch in itertools.islice(
                    shared.batches(rank=rank, size=size, seed=3, epoch=0, start=index * shared.micro_batches),
                    shared.micro_batches,
                )
                for row in batch.x.tolist()
            ]
            assert sorted(found) == sorted(data.order(3, 0)[index * 10 : (index + 1) * 10].tolist())


def test_micro_batches_are_as_equal_as_possible() -> None:
    data = rayps.data.tensors(torch.arange(40), batch_size=4)
    shared = DealtRows(data, RowShares(0, 0, 0, (5, 9, 4, 0)))
    sizes = [
        [batch.size for batch in itertools.islice(shared.batches(rank=rank, size=4, seed=0, epoch=0), 3)]
        for rank in range(4)
    ]
    assert sizes == [[3, 2, 0], [3, 3, 3], [4, 0, 0], [0, 0, 0]]


def test_rows_in_the_wire_form() -> None:
    rows = RowShares(4, 1, 12, (3, 2))
    assert RowShares.from_json(rows.to_json()) == rows


def test_an_iterable_data_set_is_refused() -> None:
    data = rayps.data.iterable([1, 2, 3], batch_size=1)
    with pytest.raises(ConfigError, match="cannot be taken by number"):
        DealtRows(data, RowShares(0, 0, 0, (1,)))


# ---- what a user gives


def test_a_range_of_workers() -> None:
    assert range_of(3) is None
    assert range_of([2, 8]) == (2, 8)
    for wrong in (True, "4", (3, 2), (0, 2), (1, 2, 3), (1.5, 2)):
        with pytest.raises(ConfigError, match="least and the most"):
            range_of(wrong)


def test_workers_as_text() -> None:
    assert workers_of_text("4") == 4
    assert workers_of_text("2..8") == (2, 8)
    for wrong in ("two", "2..", "8..2", "0..3", ""):
        with pytest.raises(ConfigError, match="workers is"):
            workers_of_text(wrong)


def test_an_elastic_job_in_the_wire_form() -> None:
    spec = JobSpec.from_dict({"workload": "a.py:A", "workers": [2, 8], "elastic": {"global_batch": 64}})
    assert (spec.workers, spec.elastic) == (2, ElasticWorkers(8, 64))
    assert JobSpec.from_dict(spec.to_dict()) == spec
    assert spec.to_dict()["elastic"] == {"most": 8, "global_batch": 64}
    assert JobSpec.from_dict({"workload": "a.py:A", "workers": 2}).elastic is None


@pytest.mark.parametrize(
    ("workers", "elastic", "text"),
    [
        ([2, 8], {"most": 4}, "leave out elastic.most"),
        (2, {"cooldown": 4}, "lacks most"),
        ([2, 8], {"globl_batch": 4}, "did you mean 'global_batch'"),
        ([2, 8], [1], "give a mapping"),
        ([2, 8], {"global_batch": 7}, "at least 8"),
        ([2, 8], {"lr_scaling": "cubic"}, "keep, linear, sqrt"),
        ([2, 8], {"lr_scaling": "linear", "global_batch": 64}, "leave out one"),
        ([2, 8], {"cooldown": -1}, "at least 0"),
        ([2, 8], {"gain": 1.5}, "at most 1"),
        ([2, 8], {"replay": [[4, 2], [4, 3]]}, "increasing rounds"),
        ([2, 8], {"replay": 3}, "pairs"),
        ([2, 8], {"balance": "yes"}, "True or False"),
        ([2, 8], {"replay": [[4, 9]]}, "raise the most"),
        (4, {"most": 2}, "in this order"),
    ],
)
def test_options_that_are_wrong(workers: object, elastic: object, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        JobSpec("a.py:A", **elastic_fields(workers, elastic)).check()


def test_the_learning_rate_follows_the_rows() -> None:
    assert ElasticWorkers(8).lr_factor(64, 16) == 1
    assert ElasticWorkers(8, lr_scaling="linear").lr_factor(64, 16) == 4
    assert ElasticWorkers(8, lr_scaling="sqrt").lr_factor(64, 16) == 2


# ---- the calendar of a run whose workers change


class _Phase:
    def __init__(self, epochs: int | None) -> None:
        self.epochs = epochs

    def grid(self, workers: int) -> Grid:
        return Grid(workers)


@given(
    rows=st.integers(1, 60),
    shares=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=2, max_size=4),
    epochs=st.integers(1, 4),
    data=st.data(),
)
def test_the_calendar_counts_the_rounds_that_the_rows_need(
    rows: int, shares: list[list[int]], epochs: int, data: st.DataObject
) -> None:
    """The naive version: walk round by round through the rows of all epochs."""
    now = RowShares(0, 0, 0, tuple(shares[0]))
    calendar = Calendar([_Phase(None)], [now.rounds(rows)], len(shares[0]), epochs=epochs, rounds=None)
    epoch = taken = at = 0
    left = list(shares[1:])
    while epoch < epochs:
        if left and data.draw(st.booleans()):
            now = now.followed_by(at, left.pop(0), rows)
            calendar.recount(at, now.origin(rows), now.rounds(rows), len(now.shares))
        assert calendar.rounds > at
        assert calendar.epoch_of(at) == epoch
        assert now.after(at, rows) == (epoch, taken)
        at, taken = at + 1, taken + now.block
        if taken >= rows:
            epoch, taken = epoch + 1, 0
    assert calendar.rounds == at
    assert calendar.epochs == epochs


def test_a_run_that_ends_with_a_round_keeps_it() -> None:
    calendar = Calendar([_Phase(2), _Phase(None)], [10, 10], 2, epochs=None, rounds=50)
    rows = RowShares(0, 0, 0, (2, 2)).followed_by(5, (2, 2, 2, 2), 40)
    calendar.recount(5, rows.origin(40), rows.rounds(40), 4)
    assert [(span.end, span.steps) for span in calendar.spans] == [(5 + 3 + 5, 5), (50, 5)]

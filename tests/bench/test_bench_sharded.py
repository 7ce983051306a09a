"""The benchmark of sharded state: which step is of which kind, what is expected, and what is refused."""

import os

import pytest
from rayps_client.errors import ConfigError

from benchmarks.runs.recorded_layers import RecordedLayers, StepBegin, read_recorded, record
from benchmarks.runs.sharded import (
    bench_background_write,
    bench_memory_of_driver,
    bench_memory_of_workers,
    compute_formula,
    read_step_times,
    resident_of,
    writes,
)


def begins(*steps):
    return [StepBegin(float(at), bool(writing)) for at, writing in steps]


def test_a_step_is_of_the_kind_that_its_ends_say():
    steps = begins((0, 0), (9, 0), (10, 0), (11, 0), (13, 1), (14, 1), (15, 0), (16, 0))
    kinds = [("otherwise", 1.0), ("begin", 2.0), ("writing", 1.0), ("end", 1.0), ("otherwise", 1.0)]
    assert read_step_times(steps) == kinds
    assert writes(steps) == [2.0]
    assert writes(steps[:6]) == []  # it has not ended
    assert read_step_times(steps[:3]) == []


def test_steps_are_recorded_by_process_and_a_line_that_is_being_written_is_left_out(tmp_path):
    record(tmp_path)
    record(tmp_path)
    with (tmp_path / str(os.getpid())).open("a") as file:
        file.write("17.")
    [(pid, steps)] = read_recorded(tmp_path).items()
    assert pid == os.getpid()
    assert [step.writing for step in steps] == [False, False]
    assert steps[0].time <= steps[1].time


def test_the_formula_is_that_of_the_costs():
    size = 100_000_000
    assert compute_formula("all_reduce", 2, size) == 4 * size
    assert compute_formula("all_reduce:shard=optimizer", 2, size) == 3 * size
    assert compute_formula("all_reduce:shard=gradients", 2, size) == 2.5 * size + 4e6
    assert compute_formula("all_reduce:shard=gradients,slice_backup=true", 2, size) == 5.5 * size + 4e6
    assert compute_formula("all_reduce:shard=gradients", 4, size) == 1.75 * size + 4e6


@pytest.mark.parametrize("size", [1, 5_000_000, 100_000_000])
def test_the_model_has_about_the_bytes_that_are_wanted(size):
    work = RecordedLayers()
    work.bytes_ = size
    found = sum(p.nbytes for p in work.model().parameters())
    assert found == (16384 if size == 1 else pytest.approx(size, rel=0.2))


def test_memory_is_that_of_a_living_process():
    assert 1e6 < resident_of(os.getpid()) < 1e12
    assert resident_of(2**22 + 1) == 0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: bench_memory_of_workers(workers=0), "workers is 0"),
        (lambda: bench_memory_of_workers(steps=2), "steps is 0"),
        (lambda: bench_memory_of_driver(sizes=()), "sizes is 0"),
        (lambda: bench_background_write(steps=10, every=10), "steps is 0"),
    ],
)
def test_numbers_that_are_too_small_are_refused(call, words):
    with pytest.raises(ConfigError, match=words):
        call()


@pytest.mark.ray
def test_the_peak_of_a_driver_is_measured():
    [row] = bench_memory_of_driver(workers=1, sizes=[1])
    assert row.grown == 0
    assert row.peak > 1e7

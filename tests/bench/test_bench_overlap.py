"""The bench of communication that hides behind backward: its bound, its calibration, and a short run."""

import itertools
import json
import os
import shutil

import pytest
import torch
from rayps_client.errors import ConfigError
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.network.overlap import bench_overlap
from benchmarks.network.overlap_bound import (
    StepTimes,
    compute_bound,
    compute_hidden,
    compute_line_seconds,
    find_slowest,
    scale_rows,
)
from benchmarks.network.paced import LAYERS, NO_BATCH, MatmulWork, SleepWork, width_of
from rayps.comm.ring.choose_algorithm import choose_fastest, speed_of
from rayps.worker.exchange.buckets import find_best_size

hosts_here = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc", "unshare", "nsenter"))),
    reason="network namespaces need root, iproute2 and util-linux",
)


def simulated(times, buckets, lines, tick=0.25):
    """The law of `bound`: a line that sends in ticks, and takes the next bucket as soon as it is ready and free."""
    now, queue = 0.0, list(zip(buckets, lines, strict=True))
    while queue:
        members, left = queue.pop(0)
        while now < max(times.ready[i] for i in members):
            now += tick
        while left > 0:
            now, left = now + tick, left - tick
    return max(now, times.backward[1]) + times.after


def test_the_bound_is_a_simulated_line():
    times = StepTimes((4.0, 3.0, 2.0, 1.5), (1.0, 4.0), 4.5)
    buckets = {1: [[3, 2, 1, 0]], 2: [[3, 2], [1, 0]], 3: [[3], [2, 1], [0]], 4: [[3], [2], [1], [0]]}
    for count, cut in buckets.items():
        for lines in itertools.product([0.0, 0.25, 1.0, 2.5], repeat=count):
            assert compute_bound(times, cut, lines) == simulated(times, cut, lines)


def test_the_bound_of_equal_layers_is_the_larger_of_both_and_the_last_bucket():
    for count, each, line in itertools.product([1, 2, 4, 16], [0.5, 1.0], [0.25, 0.5, 1.0, 2.0]):
        forward, after = 3.0, 0.5
        ready = tuple(forward + each * (count - i) for i in range(count))
        times = StepTimes(ready, (forward, forward + each * count), forward + each * count + after)
        found = compute_bound(times, [[i] for i in reversed(range(count))], [line] * count)
        if line <= each:  # the last bucket follows backward
            assert found == forward + each * count + line + after
        else:  # the line starts after the first bucket's backward, and is never free
            assert found == forward + each + line * count + after
        late = compute_bound(times, [list(range(count))], [line * count], early=False)
        assert late == forward + each * count + line * count + after
        assert found <= late


def test_what_is_late_on_one_rank_is_late():
    one, other = StepTimes((2.0, 1.0), (0.5, 2.0), 2.5), StepTimes((1.5, 1.25), (0.75, 1.5), 2.75)
    assert find_slowest([one, other]) == StepTimes((2.0, 1.25), (0.75, 2.0), 2.75)


@pytest.mark.parametrize(("step", "share"), [(10.0, 1.0), (9.0, 1.0), (15.0, 0.5), (20.0, 0.0), (25.0, 0.0)])
def test_the_hidden_share(step, share):
    assert compute_hidden(step, alone=10.0, line=10.0) == share


@pytest.mark.parametrize(
    ("rows", "seconds", "wanted", "found"), [(100, 1.0, 2.0, 200), (100, 2.0, 1.0, 50), (3, 9.0, 1.0, 1)]
)
def test_rows_are_scaled_to_the_wanted_seconds(rows, seconds, wanted, found):
    assert scale_rows(rows, seconds, wanted) == found


def test_the_line_carries_headers_too():
    assert compute_line_seconds(1448, 2, 8 * 1514) == 1.0
    assert compute_line_seconds(1448, 4, 8 * 1514) == 1.5


@pytest.mark.parametrize("size", [64, 4_000, 17_000_000])
def test_both_models_have_the_size(size):
    width = width_of(size)
    for work in (SleepWork(width, 2, 0.0), MatmulWork(width, 2, 3)):
        model = work.model()
        assert [p.shape for p in model.parameters()] == [(width, width)] * LAYERS
        assert abs(4 * sum(p.numel() for p in model.parameters()) / size - 1) < 0.03
        work.loss(model, NO_BATCH).backward()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_the_best_size_of_buckets_is_the_least_of_the_sum():
    for size, seconds, rate in itertools.product([1e4, 1e6, 1e8], [1e-4, 1e-3], [1e6, 1e8, 1e10]):

        def exposed(bucket, size=size, seconds=seconds, rate=rate):
            return size / bucket * seconds + bucket / rate

        best = find_best_size(size, seconds, rate)
        assert all(exposed(best) <= exposed(best * factor) for factor in (0.5, 0.9, 1.1, 2.0))


def test_the_speed_of_a_ring_is_in_its_table():
    table = [
        {"up_to": 2048, "algorithm": "tree", "seconds": {"ring": 2e-3, "tree": 1e-3}},
        {"up_to": None, "algorithm": "ring", "seconds": {"ring": 0.5, "tree": 1.0}},
    ]
    assert speed_of({"hosts": [[0], [1]], "table": table}) == (1e-3, (4 << 20) / 0.5)
    assert speed_of({"hosts": [[0, 1]], "table": table}) is None
    assert speed_of({"hosts": [[0], [1]], "algorithm": "ring"}) is None


@pytest.mark.parametrize(
    ("seconds", "preferred", "name"),
    [
        ({"ring": 1.0, "one_shot": 1.1}, "one_shot", "one_shot"),
        ({"ring": 1.0, "one_shot": 1.2}, "one_shot", "ring"),
        ({"ring": 1.0, "one_shot": 0.9}, "one_shot", "one_shot"),
        ({"ring": 1.0, "one_shot": 1.1}, None, "ring"),
        ({"ring": 1.0}, "one_shot", "ring"),
    ],
)
def test_a_candidate_that_is_about_as_fast_may_be_preferred(seconds, preferred, name):
    assert choose_fastest(seconds, preferred) == name


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hosts": 1}, "hosts is 1: give at least 2"),
        ({"compute": "gpu"}, "no compute 'gpu'; use one of sleep, torch"),
        ({"size": 10}, "size is 10 bytes: give at least 64"),
        ({"buckets": ["big"]}, "buckets 'big' cannot be read"),
        ({"buckets": ["-1"]}, "buckets '-1' cannot be read"),
        ({"rate": "fast"}, "rate 'fast' cannot be read"),
    ],
)
def test_what_cannot_be_measured_is_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        bench_overlap(**options)


@hosts_here
@pytest.mark.bench
@pytest.mark.parametrize("compute", ["sleep", "torch"])
def test_a_step_between_two_hosts(compute):
    command = f"overlap --hosts 2 --compute {compute} --size 200KB --buckets 0,0.05,auto --steps 1 --repeats 1 --json"
    done = CliRunner().invoke(app, command.split())
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    names = [(row["contender"], row["bucket"]) for row in rows]
    sizes = ["0", "0.05", "auto"]
    assert names == [("alone", ""), ("own_line", ""), ("gloo_line", "")] + [("own", each) for each in sizes] + [
        ("ddp", each) for each in sizes[1:]
    ]
    assert all(
        row["step"] > 0 and row["line"] == pytest.approx(1000 * compute_line_seconds(row["bytes"], 2, 1e9))
        for row in rows
    )
    own = [row for row in rows if row["contender"] == "own"]
    assert [row["buckets"] for row in own[:2]] == [1, 4] and own[1]["bound"] < own[0]["bound"]
    assert all(row["of_bound"] == pytest.approx(row["bound"] / row["step"]) for row in own)
    assert all(0 <= row["hidden"] <= 1 and row["times_ddp"] > 0 for row in rows if row["contender"] in ("own", "ddp"))

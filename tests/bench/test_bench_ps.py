"""The benches of an elastic group measure what they say, on clusters of threads and processes; nothing is timed."""

import pytest
import torch
from process_cluster import ProcessCluster
from rayps_client.errors import ConfigError

from benchmarks.__main__ import main
from benchmarks.changes import resize
from benchmarks.changes.faults import bench_faults
from benchmarks.changes.group_load import (
    KINDS,
    SEGMENTS,
    Pushed,
    find_longest_gap,
    find_slots,
    find_wrong_slots,
    make_number,
    measure_rate,
)
from benchmarks.changes.neighbours import bench_jobs
from benchmarks.changes.resize import bench_resize
from rayps.cluster.local import LocalCluster


def values(workers, pushes):
    found = torch.zeros(SEGMENTS * KINDS * workers, dtype=torch.float64)
    for rank in range(workers):
        for step in range(pushes):
            counts, sums = find_slots(len(found), workers, rank)
            found[counts] += 1
            found[sums] += make_number(rank, step)
    return found


def test_a_push_that_is_lost_or_doubled_is_seen():
    done = [Pushed(rank, 20) for rank in range(3)]
    right = values(3, 20)
    assert find_wrong_slots(right, 3, done) == []
    lost = right.clone()
    lost[0] -= 1
    assert "segment 0" in find_wrong_slots(lost, 3, done)[0]
    swapped = right.clone()  # one lost, another twice: as many as before
    swapped[find_slots(len(right), 3, 1)[1][5]] += make_number(1, 3) - make_number(1, 4)
    assert find_wrong_slots(swapped, 3, done) == ["rank 1 pushed 20, segment 5 has 20"]


def test_gaps_and_rates():
    done = [Pushed(0, 5, [0.0, 1.0, 1.5, 4.0, 5.0]), Pushed(1, 3, [0.5, 2.0, 6.0])]
    assert find_longest_gap(done, 1.2, 1.4) == 1.5
    assert find_longest_gap(done, 1.0, 3.0) == 4.0
    assert find_longest_gap(done[:1], 4.5, 9.0) == 1.0
    assert measure_rate(done, 0.0, 2.0) == 2.0


class Both:
    """Servers are processes, all else is threads."""

    def __init__(self):
        self.local, self.processes = LocalCluster(), ProcessCluster()

    def spawn(self, target, *args, **options):
        where = self.processes if target.endswith(":ServerActor") else self.local
        return where.spawn(target, *args, **options)

    def kill(self, handle):
        (self.processes if hasattr(handle, "gone") else self.local).kill(handle)

    def __getattr__(self, name):
        return getattr(self.local, name)

    def close(self):
        self.local.close()
        self.processes.close()


@pytest.fixture
def both():
    found = Both()
    yield found
    found.close()


def test_faults(both):
    row = bench_faults(both, kills=1, servers=2, workers=2, size=4000, seed=7, warm=0.5)
    assert row.ledger_exact, row.wrong
    assert row.kills == 1 == len(row.gaps) and row.worst_gap_s == max(row.gaps) >= row.median_gap_s > 0
    assert row.pushes > 0 and row.pushes_s_before > 0 and row.pushes_s_after > 0 and row.seed == 7, row


def test_resize(both, monkeypatch):
    monkeypatch.setattr(resize, "CALM_SECONDS", 0.6)
    rows = bench_resize(both, sizes=(2, 3), workers=2, size=4000, seconds=3.0)
    assert [(row.before, row.after) for row in rows] == [(2, 3)]
    assert all(row.same_bits and row.same_curve for row in rows)
    assert rows[0].moved > 0 and rows[0].by_the_book == pytest.approx(1 / 3)


def test_jobs(both):
    row = bench_jobs(both, workers=2, flooders=1, size=4000, rounds=20)
    assert row.same_first and row.same_second and row.same_flooded
    assert row.group_bytes_with > row.group_bytes_before == row.group_bytes_after
    assert row.flood_pushes_s > 0


def test_what_cannot_be_measured():
    for call in (
        lambda: bench_faults(LocalCluster(), kills=0),
        lambda: bench_faults(LocalCluster(), replicas=0),
        lambda: bench_resize(LocalCluster(), sizes=(2,)),
        lambda: bench_jobs(LocalCluster(), servers=1),
    ):
        with pytest.raises(ConfigError):
            call()


@pytest.mark.parametrize(
    "arguments", [("faults", "--staleness", "often"), ("resize", "--sizes", "2,x"), ("faults", "--workers", "0")]
)
def test_bad_input_of_the_commands(arguments, capsys):
    assert main([*arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("benchmarks: ") and len(error.splitlines()) <= 3

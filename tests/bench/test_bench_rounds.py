"""`python -m benchmarks rounds`: a row for each contender, in turns."""

from benchmarks.__main__ import main
from benchmarks.servers.rounds import PLAIN, STRATEGIES, bench_rounds
from rayps.cluster.local import LocalCluster


def test_rows_of_rounds_on_threads():
    cluster = LocalCluster(cpus=2)
    try:
        rows = bench_rounds(cluster, 2, 8, STRATEGIES, rounds=6, turns=2)
    finally:
        cluster.close()
    assert [row.contender for row in rows] == [PLAIN, *STRATEGIES]
    assert {row.parameters for row in rows} == {64 * 8 + 8 + 8 * 8 + 8 + 8 * 10 + 10}
    assert all(0 < row.lowest <= row.rate <= row.highest for row in rows)
    assert next(row.share for row in rows if row.contender == STRATEGIES[0]) == 1


def test_no_workers_are_refused(capsys):
    assert main(["rounds", "--workers", "0"]) == 2
    assert "workers is 0" in capsys.readouterr().err

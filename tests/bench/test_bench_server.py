"""The server's bench measures what it says, on a cluster of threads; nothing here is timed."""

import pytest
from rayps_client.errors import ConfigError

from rayps.bench.server import CONTENDERS, bench_server
from rayps.cli.main import main
from rayps.cluster.local import LocalCluster


def test_each_contender_gives_a_row_for_each_size():
    cluster = LocalCluster()
    rows = bench_server(cluster, 2, 2, [400, 4000], repeats=1)
    cluster.close()
    assert [(row.bytes, row.contender) for row in rows] == [(size, name) for size in (400, 4000) for name in CONTENDERS]
    for row in rows:
        assert row.workers == 2 and row.shards == 2
        assert row.bandwidth == pytest.approx(2 * row.bytes * row.turns)
    assert all(row.times_ray == 1.0 for row in rows if row.contender == "ray")


def test_an_unknown_contender_is_named():
    with pytest.raises(ConfigError, match=r"'mpi'.*own, resident, message, ray"):
        bench_server(LocalCluster(), 1, 1, [4], ["mpi"])


@pytest.mark.parametrize(
    "arguments", [("ring", "--sizes", "1XB"), ("server", "--sizes", ""), ("ring", "--workers", "0")]
)
def test_bad_input_of_the_command(arguments, capsys):
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("rayps: ") and len(error.splitlines()) <= 3

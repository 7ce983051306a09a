import importlib.util
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree
from pathlib import Path

import pytest
from rayps_client.errors import ClusterError, ConfigError

from benchmarks.network.laws import ALGORITHMS, LawRow, bench_laws, compute_law, draw
from benchmarks.picture import Chart, ChartLine, draw_page
from rayps.bench.hosts import bench_hosts
from rayps.bench.netns import Hosts, bits
from rayps.bench.ring import bench_ring
from rayps.cluster.local import LocalCluster


def test_rows_name_size_contender_and_transport():
    cluster = LocalCluster()
    try:
        rows = bench_ring(cluster, 2, [1000, 300_000], ["auto", "ring", "resident", "gloo"], repeats=2, timeout=60)
    finally:
        cluster.close()
    assert [(r.bytes, r.algorithm) for r in rows] == [
        (size, name) for size in (1000, 300_000) for name in ("auto", "ring", "resident", "gloo")
    ]
    assert {r.transport for r in rows} == {"shm", "gloo"}
    for row in rows:
        assert row.seconds > 0 and row.bandwidth == row.bytes / row.seconds and row.ratio > 0
        assert row.times_gloo is not None and row.workers == row.repeats == 2


def test_unknown_contenders_are_refused():
    with pytest.raises(ConfigError, match="no contender 'mpi'; use some of auto"):
        bench_ring(LocalCluster(), 2, [1000], ["mpi"])
    with pytest.raises(ConfigError, match="workers is 0"):
        bench_ring(LocalCluster(), 0, [1000], ["auto"])


# MPICH


def test_mpich_that_is_not_there_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"mpich needs mpi4py and MPICH: pip install 'rayps\[bench\]'"):
        bench_ring(LocalCluster(), 2, [1000], ["auto", "mpich"])


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="needs mpi4py: pip install 'rayps[bench]'")
def test_mpich_takes_its_turns():
    cluster = LocalCluster()
    try:
        rows = bench_ring(cluster, 2, [1000, 3_000_000], ["auto", "mpich"], repeats=2, timeout=60)
    finally:
        cluster.close()
    assert [(row.algorithm, row.transport) for row in rows] == [("auto", "shm"), ("mpich", "mpich")] * 2
    for row in rows:
        assert row.seconds > 0 and row.times_gloo is None and row.copy_bandwidth > 0
        assert (row.times_mpich == 1) == (row.algorithm == "mpich")


# The textbook and the picture


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_the_textbook(n):
    size = 1000.0
    ring, star, all_to_all = (compute_law(way, n, size) for way in ("ring", "star", "one_shot"))
    assert ring.busiest == pytest.approx(2 * (n - 1) / n * size) and ring.busiest < 2 * size
    assert star.busiest == (n - 1) * size and star.total == ring.total == pytest.approx(n * ring.busiest)
    assert all_to_all.total == n * all_to_all.busiest == n * (n - 1) * size
    assert compute_law("tree", n, size).busiest == math.ceil(math.log2(n)) * size
    for shards in (1, 2, 4):
        server = compute_law("server", n, size, shards)
        assert server.busiest * shards == n * size == server.total / 2
        assert server.line == 2 * max(server.busiest, size)  # a worker's own line carries everything twice
    with pytest.raises(ConfigError, match="no formula for 'gossip'"):
        compute_law("gossip", n, size)


def test_a_picture_has_every_point_where_it_belongs():
    chart = Chart(
        "A <law>",
        "workers",
        "MB",
        [ChartLine("linear", [(2, 2.0), (4, 4.0), (8, 8.0)], [(2, 2.0), (8, 8.0)]), ChartLine("none", [(2, 0.0)], [])],
    )
    root = xml.etree.ElementTree.fromstring(draw_page([chart, Chart("Empty", "x", "y", [])]))
    svg = "{http://www.w3.org/2000/svg}"
    dots = [(float(dot.get("cx")), float(dot.get("cy"))) for dot in root.iter(f"{svg}circle")]
    (x0, y0), (x1, y1), (x2, y2) = dots
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2) and y0 - y1 == pytest.approx(y1 - y2, abs=0.2)  # doubling
    assert root.find(f".//{svg}polyline").get("points") == f"{x0},{y0} {x2},{y2}"
    words = [text.text for text in root.iter(f"{svg}text")]
    assert {"A <law>", "linear", "2", "8", "Empty: nothing was measured"} <= set(words)


def test_the_picture_of_laws_has_a_line_for_each_way():
    rows = [
        LawRow(way, n, shards, 8, slow, 1.0 * n, 2.0, 3.0, 4.0, 5.0, 6.0, 1.0)
        for n in (2, 4)
        for way, shards, slow in [("ring", 0, ""), ("star", 0, ""), ("ring", 0, "1mbit"), ("server", 2, "")]
    ]
    words = [text.text for text in xml.etree.ElementTree.fromstring(draw(rows)).iter() if text.text]
    assert {"ring", "star", "2 shards", "all alike", "one at 1mbit"} <= set(words)


def test_rates_and_numbers_that_make_no_sense_are_refused():
    assert bits("1gbit") == 1e9 and bits("2.5mbit") == 2.5e6
    for wrong in ("fast", "10", "mbit", "10MB"):
        with pytest.raises(ConfigError, match="cannot be read: write 100mbit"):
            bits(wrong)
    with pytest.raises(ConfigError, match="no algorithm 'gloo'"):
        bench_hosts(2, 1, "1gbit", [1000], ["gloo"])
    with pytest.raises(ConfigError, match="at least 2 hosts"):
        bench_hosts(1, 1, "1gbit", [1000], ["ring"])
    with pytest.raises(ConfigError, match="give at least 2 workers, 1 shard and 1 repeat"):
        bench_laws([1, 2])


# Hosts


hosts_here = pytest.mark.skipif(
    os.geteuid() != 0 or None in map(shutil.which, ("unshare", "nsenter", "ip", "tc")),
    reason="network namespaces need root, iproute2 and util-linux",
)


def test_hosts_without_root_say_how(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda tool: tool)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match="unshare --user --map-root-user"):
        Hosts(2, "1gbit")
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    with pytest.raises(ClusterError, match="install iproute2"):
        Hosts(2, "1gbit")


@hosts_here
def test_rows_of_hosts_tell_the_line_from_the_host():
    rows = bench_hosts(2, 2, "400mbit", [2_000_000], ["ring", "hierarchical"], streams=2, repeats=2, timeout=60)
    assert [row.algorithm for row in rows] == ["ring", "hierarchical"]
    for row in rows:
        assert (row.hosts, row.ranks, row.streams, row.transport) == (2, 2, 2, "shm+tcp")
        assert row.limit == pytest.approx(2_000_000 / 50e6) and 0 < row.share < 1.2


@hosts_here
def test_bytes_at_the_lines_follow_the_textbook():
    rows = bench_laws([2, 3], [2], size=400_000, rate="400mbit", slow_link="100mbit", repeats=2)
    ways = [(way, n, 0, "") for n in (2, 3) for way in ALGORITHMS]
    ways += [("ring", n, 0, "100mbit") for n in (2, 3)] + [("server", n, 2, "") for n in (2, 3)]
    assert [(row.way, row.workers, row.shards, row.slow) for row in rows] == ways
    for row in rows:  # headers and acknowledgements come on top
        assert row.busiest_law < row.busiest < 1.3 * row.busiest_law + 50_000
        assert row.total_law < row.total < 1.3 * row.total_law + 100_000
        assert row.seconds > 0 and row.times_law == row.seconds / row.seconds_law


@hosts_here
def test_hosts_are_gone_even_when_their_maker_is_killed():
    code = (
        "import time\nfrom rayps.bench.netns import Hosts\nhosts = Hosts(2, '1gbit')\n"
        "actor = hosts.spawn(1, 'rayps.bench.hosts:HostRank', 0, '127.0.0.1', b'x', 5.0)\n"
        "actor.started.result(60)\n"
        "print(actor._process.pid, *[process.pid for process in hosts._namespaces], flush=True)\ntime.sleep(600)"
    )
    maker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        left = [int(word) for word in maker.stdout.readline().split()]
        assert len(left) == 4 and all(Path(f"/proc/{pid}").exists() for pid in left)
    finally:
        maker.send_signal(signal.SIGKILL)
        maker.wait()
        maker.stdout.close()
    deadline = time.monotonic() + 10
    while (alive := [pid for pid in left if _lives(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive == []


def _lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

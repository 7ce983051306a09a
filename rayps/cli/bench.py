"""`rayps bench`: the benchmarks that measure a user's own machines."""

from __future__ import annotations

from rayps.bench.table import Benchmark
from rayps.cli.measure import make_group

TABLE = {
    "ring": Benchmark(
        "rayps.bench.ring:bench_ring",
        "All-reduce between Ray actors.\n\n"
        "The table has the time, the bandwidth, its share of the machine's memory copy bandwidth, and the speed "
        "relative to gloo.",
    ),
    "server": Benchmark(
        "rayps.bench.servers:bench_servers",
        "Asynchronous pushes and pulls between Ray actors.\n\n"
        "The table has turns (a push and a pull) per second, also relative to plain Ray actor calls.",
    ),
    "step": Benchmark(
        "rayps.bench.step:bench_step",
        "A training step, beside torch's DDP.\n\n"
        "By default, Ray actors train with AllReduce, with DDP on gloo, and without communication.",
    ),
    "hosts": Benchmark(
        "rayps.bench.hosts:bench_ranks",
        "All-reduce between hosts on slow links.\n\nThe least time for H hosts is 2(H-1)/H x bytes / rate seconds.",
    ),
    "service": Benchmark(
        "rayps.bench.service:bench_service",
        "The CPU time of a service with waiting jobs, and the time to stop one of them.",
    ),
}
MOVED = {  # what was a command here, or an option of one: the command of `python -m benchmarks`
    **{
        name: name
        for name in (
            *("balance", "causes", "compression", "device", "elastic", "faults", "jobs", "resize"),
            *("sharded", "shards", "staleness", "start", "stragglers", "tables"),
        )
    },
    "step --hosts": "overlap",
    "step --memory": "memory",
}

app = make_group(TABLE, "Measure how fast rayps is on your machines.", MOVED)

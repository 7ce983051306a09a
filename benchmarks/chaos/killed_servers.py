"""`python -m benchmarks faults`: servers that are killed under load, or a whole job under faults between hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from rayps_client.errors import ConfigError

from benchmarks.changes.faults import bench_faults
from benchmarks.chaos.fault_costs import FAULTS, bench_fault_costs
from rayps.bench.table import BenchRow, Opt, Servers, Workers, read_megabytes
from rayps.cluster.local import Cluster

KINDS = tuple(kind for kind in FAULTS if kind != "none:host")


def read_staleness(text: str, field: str) -> int | None:
    """Return a staleness as a number of rounds; None for `none`. Raises ConfigError if it is neither."""
    if text.strip().lower() == "none":
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"staleness {text!r} cannot be read: write 0, a number of rounds, or none", field=field
        ) from None


def bench_killed_servers(
    cluster: Cluster | None,
    kills: Annotated[int, Opt("How many servers are killed, one after the other.")] = 50,
    servers: Servers = 3,
    workers: Workers = 4,
    replicas: Annotated[int, Opt("Backups of each segment on other servers.")] = 1,
    staleness: Annotated[
        int | None,
        Opt("0 (synchronous), a number of rounds, or none (asynchronous).", read=read_staleness, text="none"),
    ] = None,
    size: Annotated[
        int, Opt("Size of the parameters, in 10^6 bytes.", "--mb", read=read_megabytes, text="1")
    ] = 1_000_000,
    seed: Annotated[int | None, Opt("Seed of the random moments and servers; default: a new one.")] = None,
    hosts: Annotated[
        int, Opt("Measure a whole job on this number of hosts instead (network namespaces, which need root).")
    ] = 0,
    strategy: Annotated[str, Opt("With --hosts: the job's strategy.")] = "all_reduce",
    kinds: Annotated[Sequence[str], Opt("With --hosts: kinds of faults.")] = KINDS,
    every: Annotated[float, Opt("With --hosts: seconds between two faults.")] = 15.0,
    repeats: Annotated[int, Opt("With --hosts: how often each kind is injected.")] = 5,
    rate: Annotated[str, Opt("With --hosts: the rate of each host's link.")] = "1gbit",
) -> BenchRow:
    """Measure one of the two. Raises the errors of the measurement."""
    if hosts or cluster is None:
        return bench_fault_costs(
            strategy, kinds, hosts=hosts, workers=workers, rate=rate, repeats=repeats, every=every, seed=seed or 0
        )
    return bench_faults(
        cluster,
        kills=kills,
        servers=servers,
        workers=workers,
        replicas=replicas,
        staleness=staleness,
        size=size,
        seed=seed,
    )

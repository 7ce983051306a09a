"""`rayps bench server`: pushes and pulls of vectors, of a table's rows, or of all servers as of one moment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from rayps.bench.reads import bench_reads
from rayps.bench.rows import CONTENDERS, bench_rows
from rayps.bench.server import bench_server
from rayps.bench.table import BenchRow, Opt, Workers, read_sizes
from rayps.cluster.local import Cluster

_USUAL = ("own", "ray")


def bench_servers(
    cluster: Cluster,
    workers: Workers = 4,
    shards: Annotated[int, Opt("Servers.")] = 2,
    sizes: Annotated[
        Sequence[int],
        Opt("Sizes of the vector, e.g. 10KB,1MB (1 KB = 1000 bytes).", read=read_sizes, text="10KB,1MB,40MB"),
    ] = (10_000, 1_000_000, 40_000_000),
    transports: Annotated[Sequence[str], Opt("Contenders: own, resident, message, ray.")] = _USUAL,
    rows: Annotated[
        int,
        Opt(
            "Instead of vectors, pull and push this many rows of a table by id; "
            "contenders: own (the same ids each time), fresh (new ids each time), ray."
        ),
    ] = 0,
    dim: Annotated[int, Opt("Elements of a row.")] = 16,
    reads: Annotated[
        bool, Opt("Compare pulls that read all servers as of one moment with pulls that do not, under staleness 8.")
    ] = False,
) -> Sequence[BenchRow]:
    """Measure one of the three. Raises the errors of the measurement."""
    if rows:
        names = CONTENDERS if tuple(transports) == _USUAL else transports
        return bench_rows(cluster, workers, shards, rows, dim, names)
    if reads:
        return bench_reads(cluster, workers, shards, sizes)
    return bench_server(cluster, workers, shards, sizes, transports)

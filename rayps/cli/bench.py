"""`rayps bench`: measure communication and training steps of rayps and of other systems on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rayps.cli.bench_balance import balance
from rayps.cli.bench_causes import causes
from rayps.cli.bench_changes import elastic
from rayps.cli.bench_device import device
from rayps.cli.bench_elastic import faults, jobs, resize
from rayps.cli.bench_overlap import show_overlap
from rayps.cli.bench_service import service
from rayps.cli.bench_sharded import sharded
from rayps.cli.bench_staleness import staleness
from rayps.cli.bench_start import start
from rayps.cli.bench_tables import tables
from rayps.cli.measure import Address, Format, Json, run, show_rows, sizes_of, whole_numbers
from rayps.cli.show import Output

app = typer.Typer(no_args_is_help=True, help="Measure how fast rayps is on your machines.")
app.command()(tables)
for command in (faults, resize, jobs, device, service, sharded, start, causes, staleness, balance, elastic):
    app.command()(command)

Sizes = Annotated[str, typer.Option(help="Sizes of the vector, e.g. 10KB,1MB (1 KB = 1000 bytes).")]


@app.command()
def ring(
    workers: Annotated[int, typer.Option(help="The number of ranks.")] = 4,
    sizes: Sizes = "1KB,100KB,1MB,10MB,100MB",
    algorithms: Annotated[
        str,
        typer.Option(
            help="Contenders: auto, resident, ring, tree, one_shot, two_shot, star, hierarchical, gloo, nccl, mpich."
        ),
    ] = "auto,resident,ring,tree,one_shot,gloo",
    address: Address = None,
    output: Format = Output.table,
    as_json: Json = False,
) -> None:
    """Measure all-reduce between Ray actors.

    The table has the time, the bandwidth, its share of the machine's memory copy bandwidth, and the speed relative to
    gloo.
    """
    found = sizes_of(sizes)
    from rayps.bench.ring import bench_ring

    rows = run(address, workers, lambda cluster: bench_ring(cluster, workers, found, algorithms.split(",")))
    show_rows(
        Output.json if as_json else output,
        rows,
        {
            "bytes": "bytes",
            "algorithm": "algorithm",
            "transport": "over",
            "seconds": "seconds",
            "bandwidth": "bytes/s",
            "copy_bandwidth": "machine's copy",
            "ratio": "of copy",
            "times_gloo": "x gloo",
            "times_mpich": "x mpich",
        },
    )


@app.command()
def server(
    workers: Annotated[int, typer.Option(help="Workers.")] = 4,
    shards: Annotated[int, typer.Option(help="Servers.")] = 2,
    sizes: Sizes = "10KB,1MB,40MB",
    transports: Annotated[str, typer.Option(help="Contenders: own, resident, message, ray.")] = "own,ray",
    rows: Annotated[
        int,
        typer.Option(
            help="Instead of vectors, pull and push this many rows of a table by id; "
            "contenders: own (the same ids each time), fresh (new ids each time), ray."
        ),
    ] = 0,
    dim: Annotated[int, typer.Option(help="Elements of a row.")] = 16,
    reads: Annotated[
        bool,
        typer.Option(
            "--reads",
            help="Compare pulls that read all servers as of one moment with pulls that do not, under staleness 8.",
        ),
    ] = False,
    address: Address = None,
    output: Format = Output.table,
    as_json: Json = False,
) -> None:
    """Measure asynchronous pushes and pulls between Ray actors.

    The table has turns (a push and a pull) per second, also relative to plain Ray actor calls.
    """
    found, form = sizes_of(sizes), Output.json if as_json else output
    if rows:
        from rayps.bench.rows import CONTENDERS, bench_rows

        names = CONTENDERS if transports == "own,ray" else tuple(transports.split(","))
        table = run(address, workers, lambda cluster: bench_rows(cluster, workers, shards, rows, dim, names))
        show_rows(
            form,
            table,
            {
                "rows": "rows",
                "dim": "dim",
                "contender": "ids",
                "turns": "turns/s",
                "bandwidth": "bytes/s",
                "times_ray": "x ray",
            },
        )
        return
    if reads:
        from rayps.bench.reads import bench_reads

        measured = run(address, workers, lambda cluster: bench_reads(cluster, workers, shards, found))
        show_rows(
            form, measured, {"bytes": "bytes", "contender": "pulls", "turns": "turns/s", "share": "of independent"}
        )
        return
    from rayps.bench.server import bench_server

    names = tuple(transports.split(","))
    servers = run(address, workers, lambda cluster: bench_server(cluster, workers, shards, found, names))
    show_rows(
        form,
        servers,
        {"bytes": "bytes", "contender": "transport", "turns": "turns/s", "bandwidth": "bytes/s", "times_ray": "x ray"},
    )


@app.command()
def step(
    workers: Annotated[int, typer.Option(help="Workers.")] = 2,
    contenders: Annotated[
        str,
        typer.Option(
            help="Contenders: own (AllReduce), one_bucket (AllReduce without overlap), alone (no communication), "
            "ddp, ddp_plain (DDP in plain processes), ray_train."
        ),
    ] = "own,one_bucket,alone,ddp",
    model: Annotated[str, typer.Option(help="mlp, or lm (a small GPT-2: many parameters of many sizes).")] = "mlp",
    hidden: Annotated[
        int | None,
        typer.Option(help="Width of the layers: 2048 (4.3 million parameters) for mlp, 256 (4.7 million) for lm."),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Number of measurements for each contender, of 20 steps each.")] = 9,
    memory: Annotated[bool, typer.Option("--memory", help="Measure the memory of a step instead of its time.")] = False,
    host_count: Annotated[
        int,
        typer.Option(
            "--hosts",
            help="Instead, measure how much of the transfer between this many hosts hides behind backward, by the size "
            "of the buckets. The hosts are network namespaces, which need root. Only the options below, --repeats and "
            "--output apply.",
        ),
    ] = 0,
    rate: Annotated[str, typer.Option(help="With --hosts: the rate of each host's link, e.g. 1gbit.")] = "1gbit",
    compute: Annotated[
        str, typer.Option(help="With --hosts: sleep (layers sleep), or torch (layers multiply matrices).")
    ] = "sleep",
    size: Annotated[str, typer.Option(help="With --hosts: the size of the gradient.")] = "17MB",
    buckets: Annotated[
        str, typer.Option(help="With --hosts: sizes of buckets in MB; 0 (one, after backward); auto (own choice).")
    ] = "0,1,4,16,auto",
    steps: Annotated[int, typer.Option(help="With --hosts: steps of a measurement.")] = 3,
    address: Address = None,
    output: Format = Output.table,
    as_json: Json = False,
) -> None:
    """Measure a training step and compare it with torch's DDP.

    By default, Ray actors train with AllReduce, with DDP on gloo, and without communication.
    """
    names, form = contenders.split(","), Output.json if as_json else output
    if host_count:
        (total,) = sizes_of(size)
        show_overlap(
            form, host_count, rate=rate, compute=compute, size=total, buckets=buckets, steps=steps, repeats=repeats
        )
        return
    if memory:
        from rayps.bench.memory import bench_memory

        rows = run(address, workers, lambda cluster: bench_memory(cluster, workers, names, hidden=hidden or 2048))
        show_rows(
            form,
            rows,
            {
                "contender": "contender",
                "model_bytes": "bytes of the model",
                "grown": "grown by",
                "extra": "beyond alone",
                "extra_gradients": "in gradients",
            },
        )
        return
    from rayps.bench.step import bench_step

    rows_of_steps = run(
        address,
        workers,
        lambda cluster: bench_step(cluster, workers, names, model=model, hidden=hidden, repeats=repeats),
    )
    show_rows(
        form,
        rows_of_steps,
        {
            "contender": "contender",
            "rate": "steps/s",
            "step": "ms a step",
            "cpu": "cpu ms",
            "compute": "compute",
            "data": "batches",
            "waiting": "waiting",
            "moving": "moving",
            "times_ddp": "x ddp",
            "of_alone": "of alone",
            "load": "load",
        },
    )


@app.command()
def hosts(
    count: Annotated[
        int, typer.Option("--hosts", help="Number of hosts; they are network namespaces, which need root.")
    ] = 2,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks on each host to measure, e.g. 1,2.")] = "1,2",
    rate: Annotated[str, typer.Option(help="The rate of each host's network link, in each direction.")] = "1gbit",
    sizes: Sizes = "100MB",
    algorithms: Annotated[
        str, typer.Option(help="auto, ring, hierarchical, two_shot, tree, one_shot, star.")
    ] = "ring,hierarchical,auto",
    streams: Annotated[
        int,
        typer.Option(
            help="TCP connections between two ranks; 0: as many as a measurement finds necessary to fill the link."
        ),
    ] = 0,
    stream_rate: Annotated[
        str | None, typer.Option(help="The largest rate of one TCP connection, e.g. 300mbit.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Number of measurements of each algorithm and size.")] = 5,
    output: Format = Output.table,
    as_json: Json = False,
) -> None:
    """Measure all-reduce between hosts on slow links.

    The least time for H hosts is 2(H-1)/H x bytes / rate seconds.
    """
    found = sizes_of(sizes)
    from rayps.bench.hosts import bench_hosts

    rows = [
        row
        for each in whole_numbers(ranks, "ranks")
        for row in bench_hosts(
            count, each, rate, found, algorithms.split(","), streams=streams, stream_rate=stream_rate, repeats=repeats
        )
    ]
    show_rows(
        Output.json if as_json else output,
        rows,
        {
            "bytes": "bytes",
            "algorithm": "algorithm",
            "transport": "over",
            "hosts": "hosts",
            "ranks": "ranks a host",
            "streams": "streams",
            "seconds": "seconds",
            "bandwidth": "bytes/s",
            "limit": "link's limit",
            "share": "of limit",
        },
    )


@app.command()
def stragglers(
    workers: Annotated[int, typer.Option(help="Workers.")] = 4,
    scenes: Annotated[
        str,
        typer.Option(
            help="come_and_go (each worker takes 5 times as long in a random tenth of its "
            "rounds), one_slow (worker 0 takes 3 times as long)."
        ),
    ] = "come_and_go,one_slow",
    pace: Annotated[float, typer.Option(help="Seconds of an ordinary round, in which the worker sleeps.")] = 0.1,
    repeats: Annotated[int, typer.Option(help="Number of runs of each scene and staleness, with different seeds.")] = 3,
    data: Annotated[Path | None, typer.Option(help="Folder with digits.parquet; default: examples/data.")] = None,
    backup: Annotated[
        int, typer.Option(help="Backup workers: if above 0, measure a step with and without them instead.")
    ] = 0,
    strategy: Annotated[
        str, typer.Option(help="The strategy with backup workers: all_reduce or parameter_server.")
    ] = "all_reduce",
    steps: Annotated[int, typer.Option(help="Steps of each run with backup workers.")] = 300,
    address: Address = None,
    output: Format = Output.table,
    as_json: Json = False,
) -> None:
    """Measure the time to equal accuracy with slow workers, or what backup workers save.

    The workers train under staleness 0, 8 and none (asynchronous). With --backup b, the time of a step is measured for
    N workers, for N of N + b, and for N + b workers, if each gradient takes 5 times as long with probability 0.1.
    """
    if backup:
        _backup_workers(address, workers, backup, strategy, pace, steps, Output.json if as_json else output)
        return
    from rayps.bench.stragglers import bench_stragglers

    rows = run(
        address,
        workers,
        lambda cluster: bench_stragglers(cluster, workers, scenes.split(","), pace=pace, repeats=repeats, folder=data),
    )
    show_rows(
        Output.json if as_json else output,
        rows,
        {
            "scene": "scene",
            "staleness": "staleness",
            "seconds": "seconds",
            "rounds": "rounds",
            "idle": "idle share",
            "times_synchronous": "x synchronous",
        },
    )


def _backup_workers(
    address: str | None, workers: int, backup: int, strategy: str, pace: float, steps: int, output: Output
) -> None:
    from rayps.bench.backup_workers import bench_backup_workers

    rows = run(
        address,
        workers + backup,
        lambda cluster: bench_backup_workers(cluster, workers, backup, strategy=strategy, pace=pace, steps=steps),
    )
    show_rows(
        output,
        rows,
        {
            "strategy": "strategy",
            "workers": "workers",
            "backup": "backup",
            "seconds": "seconds a step",
            "formula": "formula",
            "dropped": "late a step",
            "times_none": "x members alone",
            "times_formula": "by formula",
            "times_finishing": "if late ones finish",
            "times_all": "x all workers",
        },
    )


@app.command()
def shards(
    counts: Annotated[str, typer.Option(help="Numbers of shards to measure; each shard has its own host.")] = "1,2,4",
    workers: Annotated[int, typer.Option(help="Workers, all on one host with a fast link.")] = 1,
    rate: Annotated[str, typer.Option(help="The rate of each shard's network link, in each direction.")] = "100mbit",
    size: Annotated[str, typer.Option(help="Size of the parameters.")] = "20MB",
    repeats: Annotated[int, typer.Option(help="Number of measurements for each number of shards.")] = 5,
    output: Format = Output.table,
    as_json: Json = False,
) -> None:
    """Measure pushes and pulls with shards on several hosts.

    Each host has a slow link. The hosts are network namespaces, which need root.
    """
    found = sizes_of(size)
    from rayps.bench.shards import bench_shards

    rows = bench_shards(whole_numbers(counts, "counts"), rate=rate, size=found[0], workers=workers, repeats=repeats)
    show_rows(
        Output.json if as_json else output,
        rows,
        {
            "bytes": "bytes",
            "shards": "shards",
            "workers": "workers",
            "rate": "link",
            "seconds": "seconds",
            "limit": "link's limit",
            "of_limit": "of limit",
            "times_first": "x first",
            "memory": "bytes a shard",
        },
    )


@app.command()
def compression(
    count: Annotated[
        int, typer.Option("--hosts", help="Number of hosts; they are network namespaces, which need root.")
    ] = 2,
    ranks: Annotated[int, typer.Option(help="Ranks on each host.")] = 1,
    rate: Annotated[str, typer.Option(help="The rate of each host's network link, in each direction.")] = "100mbit",
    size: Annotated[str, typer.Option(help="Size of the gradient.")] = "10MB",
    names: Annotated[
        str, typer.Option(help="fp16, bf16, int8, top_k, top_k:FRACTION, auto; off is always measured.")
    ] = "fp16,bf16,int8,top_k,auto",
    repeats: Annotated[int, typer.Option(help="Number of measurements of each compression.")] = 5,
    output: Format = Output.table,
    as_json: Json = False,
) -> None:
    """Measure compressed all-reduce on slow links.

    All-reduce without compression is measured too. The table shows which compression `auto` chooses.
    """
    found = sizes_of(size)
    from rayps.bench.compression import bench_compression

    rows = bench_compression(count, ranks, rate, found[0], names.split(","), repeats=repeats)
    show_rows(
        Output.json if as_json else output,
        rows,
        {
            "compression": "compression",
            "seconds": "seconds",
            "sent": "bytes sent",
            "times_off": "x off",
            "picked": "picked",
            "why": "why",
        },
    )

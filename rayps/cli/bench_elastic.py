"""`rayps bench faults`, `resize` and `jobs`: measure a server group under kills, under resizes, and with two jobs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer
from rayps_client.errors import ConfigError

from rayps.cli import show
from rayps.cli.measure import Address, Format, Json, run, show_rows
from rayps.cli.show import Output

if TYPE_CHECKING:
    from rayps.bench.fault_costs import FaultRun

Servers = Annotated[int, typer.Option(help="Servers of the group.")]
Workers = Annotated[int, typer.Option(help="Workers.")]
Megabytes = Annotated[float, typer.Option("--mb", help="Size of the parameters, in 10^6 bytes.")]


def faults(
    kills: Annotated[int, typer.Option(help="How many servers are killed, one after the other.")] = 50,
    servers: Servers = 3,
    workers: Workers = 4,
    replicas: Annotated[int, typer.Option(help="Backups of each segment on other servers.")] = 1,
    staleness: Annotated[
        str, typer.Option(help="0 (synchronous), a number of rounds, or none (asynchronous).")
    ] = "none",
    megabytes: Megabytes = 1.0,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the random moments and servers; default: a new one.")
    ] = None,
    hosts: Annotated[
        int,
        typer.Option(help="Measure a whole job on this number of hosts instead (network namespaces, which need root)."),
    ] = 0,
    strategy: Annotated[str, typer.Option(help="With --hosts: the job's strategy.")] = "all_reduce",
    kinds: Annotated[
        str, typer.Option(help="With --hosts: kinds of faults.")
    ] = "kill:worker,kill:server,stop:worker,throttle:worker,lose:host,cut:host,slow:host",
    every: Annotated[float, typer.Option(metavar="SECONDS", help="With --hosts: time between two faults.")] = 15.0,
    repeats: Annotated[int, typer.Option(help="With --hosts: how often each kind is injected.")] = 5,
    rate: Annotated[str, typer.Option(help="With --hosts: the rate of each host's link.")] = "1gbit",
    address: Address = None,
    output: Format = Output.table,
    as_json: Json = False,
) -> None:
    """Measure what faults cost: kill servers under load.

    With --hosts, measure what each kind of fault costs a job.

    The table shows whether each push was applied exactly once, and how long pushes waited. With --hosts it shows for
    each kind of fault the pause, the time that was lost until the next fault, and the useful share of the time with a
    fault in every 15 and in every 300 seconds; `none:host` is the noise of the machine.
    """
    form = Output.json if as_json else output
    if hosts:
        from rayps.bench.fault_costs import bench_fault_costs

        found = bench_fault_costs(
            strategy,
            kinds.split(","),
            hosts=hosts,
            workers=workers,
            rate=rate,
            repeats=repeats,
            every=every,
            seed=seed or 0,
        )
        _show_costs(form, found)
        return
    stale = _staleness(staleness)
    from rayps.bench.faults import bench_faults

    row = run(
        address,
        workers,
        lambda cluster: bench_faults(
            cluster,
            kills=kills,
            servers=servers,
            workers=workers,
            replicas=replicas,
            staleness=stale,
            size=int(megabytes * 1e6),
            seed=seed,
        ),
    )
    if form is Output.json:
        show.dump(dataclasses.asdict(row))
        return
    show_rows(
        output,
        [row],
        {
            "kills": "kills",
            "ledger_exact": "ledger exact",
            "median_gap_s": "median gap s",
            "worst_gap_s": "worst gap s",
            "calm_gap_s": "without kills",
            "pushes_s_before": "pushes/s before",
            "pushes_s_after": "after",
            "settled_s": "whole again s",
            "pushes": "pushes",
        },
    )


def resize(
    sizes: Annotated[
        str, typer.Option(help="Numbers of servers: start with the first, then resize to the others in order.")
    ] = "2,4,3",
    workers: Workers = 2,
    replicas: Annotated[int, typer.Option(help="Backups of each segment on other servers.")] = 1,
    megabytes: Megabytes = 4.0,
    seconds: Annotated[float, typer.Option(min=5.0, help="Length of the run, in seconds.")] = 20.0,
    address: Address = None,
    output: Format = Output.table,
    as_json: Json = False,
) -> None:
    """Resize a group during a synchronous run.

    The table shows the bytes migrated, the loss of speed, and whether the result changed.
    """
    try:
        counts = tuple(int(part) for part in sizes.split(","))
    except ValueError:
        raise ConfigError(f"sizes {sizes!r} cannot be read: write whole numbers such as 2,4,3", field="sizes") from None
    from rayps.bench.resize import bench_resize

    rows = run(
        address,
        workers,
        lambda cluster: bench_resize(
            cluster, sizes=counts, workers=workers, replicas=replicas, size=int(megabytes * 1e6), seconds=seconds
        ),
    )
    show_rows(
        Output.json if as_json else output,
        rows,
        {
            "before": "servers",
            "after": "then",
            "moved": "moved",
            "by_the_book": "by the book",
            "moved_bytes": "bytes",
            "seconds": "seconds",
            "rounds_s": "rounds/s",
            "dip": "dip",
            "dip_seconds": "below 0.8 for s",
            "calm_dip_seconds": "without resize",
            "same_bits": "same bits",
            "same_curve": "same curve",
        },
    )


def jobs(
    servers: Servers = 2,
    workers: Workers = 2,
    flooders: Annotated[int, typer.Option(help="Workers that push as fast as they can.")] = 2,
    megabytes: Megabytes = 1.0,
    rounds: Annotated[int, typer.Option(help="Rounds of each run.")] = 300,
    address: Address = None,
    output: Format = Output.table,
    as_json: Json = False,
) -> None:
    """Run two jobs on one group.

    The table shows whether the results equal those of each job alone, how much a flood of pushes slows a job, and
    whether the memory of the flood is freed.
    """
    from rayps.bench.neighbours import bench_jobs

    row = run(
        address,
        2 * workers + 2 * flooders,
        lambda cluster: bench_jobs(
            cluster, servers=servers, workers=workers, flooders=flooders, size=int(megabytes * 1e6), rounds=rounds
        ),
    )
    if as_json or output is Output.json:
        show.dump(row.to_dict())
        return
    show_rows(
        output,
        [row],
        {
            "same_first": "first same",
            "same_second": "second same",
            "same_flooded": "flooded same",
            "rounds_s_alone": "rounds/s alone",
            "slowdown_together": "together x",
            "slowdown_flooded": "flooded x",
            "slowdown_busy": "busy machine x",
            "group_bytes_before": "bytes before",
            "group_bytes_with": "with flood",
            "group_bytes_after": "after",
        },
    )


def _show_costs(output: Output, run: FaultRun) -> None:
    if output is Output.json:
        show.dump(dataclasses.asdict(run))
        return
    show_rows(
        output,
        run.rows,
        {
            "fault": "fault",
            "times": "times",
            "recovery_median": "pause s",
            "recovery_p95": "p95 s",
            "recovery_worst": "worst s",
            "repeated": "rounds again",
            "lost": "lost s",
            "goodput_often": "useful, 4 a minute",
            "goodput_seldom": "1 in 5 minutes",
        },
    )
    show.line(
        f"{run.strategy}, {run.workers} workers on {run.hosts} hosts: {run.faults} faults, one in {run.every:g} s; "
        f"{run.rounds} rounds of {run.usual_round:.3f} s in {run.seconds:.0f} s, useful {run.goodput:.1%}; each push "
        f"was applied {'exactly once' if run.ledger_exact else 'NOT exactly once'}"
    )


def _staleness(text: str) -> int | None:
    if text.strip().lower() == "none":
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"staleness {text!r} cannot be read: write 0, a number of rounds, or none", field="staleness"
        ) from None

"""`rayps bench step --hosts`: measure how much of a gradient's transfer between hosts hides behind backward."""

from __future__ import annotations

from rayps.cli.measure import show_rows
from rayps.cli.show import Output


def show_overlap(
    form: Output, hosts: int, *, rate: str, compute: str, size: int, buckets: str, steps: int, repeats: int
) -> None:
    """Measure and print the rows of `rayps.bench.overlap.bench_overlap`."""
    from rayps.bench.overlap import bench_overlap

    rows = bench_overlap(
        hosts=hosts, rate=rate, compute=compute, size=size, buckets=buckets.split(","), steps=steps, repeats=repeats
    )
    show_rows(
        form,
        rows,
        {
            "contender": "contender",
            "bucket": "bucket MB",
            "buckets": "buckets",
            "step": "ms a step",
            "cpu": "cpu ms",
            "backward": "backward",
            "line": "line",
            "bound": "bound",
            "of_bound": "of bound",
            "hidden": "hidden",
            "times_ddp": "x ddp",
            "load": "load",
        },
    )

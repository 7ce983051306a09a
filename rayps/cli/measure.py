"""Functions for the commands of `rayps bench`: start a cluster, parse lists of numbers, print rows as table or JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rayps_client.errors import ConfigError

from rayps.cli import show
from rayps.cli.show import Output
from rayps.cli.sizes import size as size_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from rayps.cluster.local import Cluster

T = TypeVar("T")
Address = Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Measure on this Ray cluster.")]
Format = Annotated[Output, typer.Option("--output", "-o", help="table or json.")]
Json = Annotated[bool, typer.Option("--json", help="The same as --output json.")]


def run(address: str | None, workers: int, measure: Callable[[Cluster], T]) -> T:
    """Return `measure(cluster)`. The cluster is the one at `address`, or a new local one if `address` is None.

    Raises:
        ConfigError: `workers` is below 1.
    """
    if workers < 1:
        raise ConfigError(f"workers is {workers}: give at least 1", field="workers")
    from rayps.cluster.ray_cluster import RayCluster

    cluster = RayCluster.join(address) if address else RayCluster.local(cpus=workers)
    try:
        return measure(cluster)
    finally:
        cluster.close()


def show_rows(output: Output, rows: Sequence[DataclassInstance], columns: dict[str, str]) -> None:
    """Print rows: as JSON with all fields, or as a table. `columns` maps the fields to show to their headings."""
    if output is Output.json:
        show.dump([dataclasses.asdict(row) for row in rows])
        return
    show.table(list(columns.values()), [[show.number(getattr(row, name)) for name in columns] for row in rows])


def whole_numbers(text: str, field: str) -> list[int]:
    """Parse whole numbers such as `1,16`.

    Raises:
        ConfigError: the text is not such a list. The error names `field`.
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{field} {text!r} cannot be read: write whole numbers such as 1,16", field=field) from None


def sizes_of(text: str) -> list[int]:
    """Parse sizes such as `10KB,1MB`; return numbers of bytes. Raises ConfigError if a size cannot be read."""
    return [int(size_of(part, "sizes")) for part in text.split(",")]

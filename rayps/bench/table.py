"""What a benchmark declares: where its function is, the options of the function's parameters, the columns of its rows.

A table maps a benchmark's name to a `Benchmark`. A parameter of the function that is annotated with an `Opt` is an
option of the command line. Its type and its default are those of the parameter:

    def bench_ring(cluster: Cluster, workers: Annotated[int, Opt("The number of ranks.")] = 4) -> list[RingRow]: ...

A function whose first parameter is `cluster` gets one. Rows derive from `BenchRow`, which says what a table shows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, TypeAlias, cast

from rayps_client.values import JsonObject

from rayps.core.sizes import parse_size as size_of

Values: TypeAlias = Mapping[str, Any]  # the values of a command's options, by the name of the parameter


@dataclass(frozen=True, slots=True)
class Opt:
    """One option of a benchmark.

    `flag` is its name on the command line, if it is not that of the parameter; "" means that name. `read` makes the
    value from (text, name of the parameter); `text` is then the default as text. `split` separates the items of a
    sequence; "" means that the option is repeated. `argument`: it is an argument instead. `least`: the least value.
    """

    help: str
    flag: str = ""
    read: Callable[[str, str], object] | None = None
    text: str = ""
    split: str = ","
    argument: bool = False
    least: float | None = None


def count_workers(values: Values) -> int:
    """Return the number of CPUs of a cluster for one worker each."""
    return int(values["workers"])


class Benchmark(NamedTuple):
    """A benchmark: its function as "module:function", what it measures, and for how many CPUs a cluster is started.

    `cpus` returns 0 if the benchmark needs no cluster with these options.
    """

    target: str
    help: str
    cpus: Callable[[Values], int] = count_workers


class BenchRow:
    """A row of a benchmark's table; a dataclass derives from it.

    `columns` lists what a table shows, as "field | field: heading". JSON has all fields.
    """

    __slots__ = ()
    columns: ClassVar[str]

    @property
    def note(self) -> str:
        """What is printed when the row is measured."""
        return ""

    @property
    def remark(self) -> str:
        """What is printed below the table; "" for nothing."""
        return ""

    @property
    def failed(self) -> bool:
        """Whether the row shows a defect, so that the command's exit code is 1."""
        return False

    def to_dict(self) -> JsonObject:
        """Return the fields for JSON."""
        return dataclasses.asdict(cast(Any, self))


class BenchRun(BenchRow):
    """The facts of a whole measurement, beside the rows of its table, which are in `rows`."""

    __slots__ = ()
    columns = ""
    rows: Sequence[BenchRow]


Found: TypeAlias = Sequence[BenchRow] | BenchRow | Mapping[str, Sequence[BenchRow]]  # what a benchmark returns


def split_columns(columns: str) -> dict[str, str]:
    """Return the heading of each field that a table shows."""
    pairs = (column.partition(":") for column in columns.split(" | "))
    return {field.strip(): heading.strip() or field.strip() for field, _, heading in pairs}


def read_sizes(text: str, field: str) -> list[int]:
    """Parse sizes such as `10KB,1MB`; return numbers of bytes. Raises ConfigError if a size cannot be read."""
    return [read_size(part, field) for part in text.split(",")]


def read_size(text: str, field: str) -> int:
    """Parse a size such as 10KB; return the number of bytes. Raises ConfigError if it cannot be read."""
    return int(size_of(text, field))


def read_megabytes(text: str, field: str) -> int:
    """Parse a number of 10^6 bytes; return the number of bytes. Raises ConfigError if it cannot be read."""
    return int(size_of(f"{text} MB", field))


Workers = Annotated[int, Opt("Workers.")]
Servers = Annotated[int, Opt("Servers of the group.")]
Strategies = Annotated[
    Sequence[str],
    Opt("A strategy; repeat the option for more. All others are compared with the first.", "--strategy", split=""),
]
ImagesFolder = Annotated[
    Path | None,
    Opt(
        "A folder with MNIST's four files, or with digits.parquet and digits_test.parquet. By default examples/data.",
        "--data",
    ),
]

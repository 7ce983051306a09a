"""The tables of benchmarks: each entry is a command with the options of its function, and what has moved says where."""

import importlib
import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import pytest
from rayps_client.errors import ConfigError
from typer.testing import CliRunner

from benchmarks.__main__ import TABLE as OTHERS
from benchmarks.__main__ import app as others
from rayps.bench.table import Benchmark, BenchRow, Opt, read_sizes, split_columns
from rayps.cli.bench import MOVED
from rayps.cli.bench import TABLE as OWN
from rayps.cli.bench import app as own
from rayps.cli.main import main
from rayps.cli.measure import make_group


@pytest.mark.parametrize("name", [*OWN, *OTHERS])
def test_each_benchmark_is_a_command_that_needs_no_option_but_its_arguments(name):
    found = CliRunner().invoke(own if name in OWN else others, [name.replace("_", "-"), "--help"])
    assert found.exit_code == 0 and "--output" in found.output, found.output
    module, _, function = (OWN | OTHERS)[name].target.partition(":")
    parameters = inspect.signature(getattr(importlib.import_module(module), function)).parameters
    without = [p.name for p in parameters.values() if p.default is p.empty]
    assert set(without) <= {"cluster", "text"}, without


@pytest.mark.parametrize("words", MOVED)
def test_what_has_moved_names_the_new_command(words, capsys):
    assert MOVED[words] in OTHERS
    assert main(["bench", *words.split(), "2"]) == 2
    said = f"`rayps bench {words}` is now `python -m benchmarks {MOVED[words]}`, in a checkout of rayps"
    assert said in capsys.readouterr().err


@dataclass(frozen=True)
class Row(BenchRow):
    """What a measurement was given."""

    columns: ClassVar[str] = "names | sizes: bytes | least"

    names: Sequence[str]
    sizes: Sequence[int]
    numbers: Sequence[int]
    least: int
    listed: Sequence[str]

    @property
    def remark(self):
        return "a remark"

    @property
    def failed(self):
        return self.least > 5


def measure(
    names: Annotated[Sequence[str], Opt("Names.")] = ("a", "b"),
    sizes: Annotated[Sequence[int], Opt("Sizes.", read=read_sizes, text="1KB")] = (1000,),
    numbers: Annotated[Sequence[int], Opt("Numbers.", split=" ")] = (1, 2),
    least: Annotated[int, Opt("A number.", "--low", least=1)] = 1,
    listed: Annotated[Sequence[str], Opt("A word; repeat it.", "--word", split="")] = ("x",),
    hidden: int = 3,
):
    """Return what was given."""
    return [Row(names, sizes, numbers, least, listed)]


APP = make_group({"measure_it": Benchmark(f"{__name__}:measure", "Measure.\n\nMore.")}, "All.")


def run(*arguments):
    return CliRunner().invoke(APP, ["measure-it", *arguments])


def test_values_are_read_by_the_types_of_the_parameters():
    assert json.loads(run("--json").stdout) == [
        {"names": ["a", "b"], "sizes": [1000], "numbers": [1, 2], "least": 1, "listed": ["x"]}
    ]
    given = ["--names=c", "--sizes=2KB,3", "--low=4", "--word=y", "--word=z", "-o", "json"]
    assert json.loads(run(*given, "--numbers", "7 8").stdout) == [
        {"names": ["c"], "sizes": [2000, 3], "numbers": [7, 8], "least": 4, "listed": ["y", "z"]}
    ]


def test_a_table_has_the_columns_of_its_rows_and_the_remark():
    shown = run()
    assert shown.exit_code == 0 and shown.stdout.splitlines()[0].split() == ["names", "bytes", "least"]
    assert shown.stdout.splitlines()[-1] == "a remark"
    assert run("--low", "6").exit_code == 1  # the row shows a defect
    assert split_columns("a | b: c d | e: f (g: h)") == {"a": "a", "b": "c d", "e": "f (g: h)"}


def test_bad_values_are_refused_by_name():
    assert run("--low", "0").exit_code == 2 and run("--hidden", "1").exit_code == 2
    for given, words in (("--numbers=1 x", "numbers '1 x' cannot be read"), ("--sizes=1XB", "sizes")):
        error = run(given).exception
        assert isinstance(error, ConfigError) and words in str(error)

"""Commands of benchmarks, made from a table of them: their options are those that each function declares."""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Union, get_args, get_origin

import typer
import typer.core
import typer.main
from rayps_client.errors import ConfigError

from rayps.bench.table import Benchmark, BenchRow, BenchRun, Found, Opt, split_columns
from rayps.cli import show
from rayps.cli.show import Output

_ADDRESS = Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Measure on this Ray cluster.")]
_FORMAT = Annotated[Output, typer.Option("--output", "-o", help="table or json.")]
_JSON = Annotated[bool, typer.Option("--json", help="The same as --output json.")]


def make_group(
    table: Mapping[str, Benchmark], text: str, moved: Mapping[str, str] = types.MappingProxyType({})
) -> typer.Typer:
    """Return the commands of a table, with the help `text`. A benchmark is imported when its command runs.

    `moved` maps a command, or a command with an option, to the benchmark that has taken its place: it is refused.
    """

    class Group(typer.core.TyperGroup):
        def list_commands(self, ctx: Any) -> list[str]:
            return [name.replace("_", "-") for name in table]

        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            for words, target in moved.items():
                name, *options = words.split()
                if args[:1] == [name] and set(options) <= {word.partition("=")[0] for word in args}:
                    raise ConfigError(
                        f"`rayps bench {words}` is now `python -m benchmarks {target}`, in a checkout of rayps",
                        field="command",
                    )
            return super().resolve_command(ctx, args)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            found = table.get(cmd_name.replace("-", "_"))
            return None if found is None else make_command(cmd_name, found)

        def format_commands(self, ctx: Any, formatter: Any) -> None:
            with formatter.section("Commands"):
                formatter.write_dl(
                    [(name.replace("_", "-"), found.help.partition("\n")[0]) for name, found in table.items()]
                )

    app = typer.Typer(cls=Group, add_completion=False, no_args_is_help=True, help=text, rich_markup_mode=None)
    app.callback()(lambda: None)
    return app


def make_command(name: str, benchmark: Benchmark) -> Any:
    """Return the command of one benchmark, with the options that its function declares."""
    module, _, attribute = benchmark.target.partition(":")
    function = getattr(importlib.import_module(module), attribute)
    options = _read_options(function)

    def call(**given: Any) -> None:
        form = Output.json if given.pop("as_json") else given.pop("output")
        given.pop("output", None)
        address = given.pop("address", None)
        workers = given.get("workers")
        if isinstance(workers, int) and workers < 1:
            raise ConfigError(f"workers is {workers}: give at least 1", field="workers")
        values = {key: value for key, option in options.items() if (value := option.value(given[key])) is not _ABSENT}
        if "report" in inspect.signature(function).parameters:
            values["report"] = lambda row: show.print_note(row.note)
        if _takes_cluster(function):
            found = on_cluster(address, benchmark.cpus(values), lambda cluster: function(cluster, **values))
        else:
            found = function(**values)
        show_found(form, found)
        if any(row.failed for row in _list_rows(found)):
            raise typer.Exit(1)

    parameters = {key: option.parameter() for key, option in options.items()}
    if _takes_cluster(function):
        parameters["address"] = ("address", _ADDRESS, None)
    parameters |= {"output": ("output", _FORMAT, Output.table), "as_json": ("as_json", _JSON, False)}
    # typer reads a command's options from the signature of its function
    call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            for key, kind, default in parameters.values()
        ]
    )
    call.__annotations__ = {key: kind for key, kind, _ in parameters.values()}
    call.__doc__ = benchmark.help
    one = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    one.command(name)(call)
    return typer.main.get_command(one)


_ABSENT = object()  # an option that was not given, whose value is the function's own default


class _Option:
    """One option of a command: a parameter of the benchmark's function."""

    def __init__(self, parameter: inspect.Parameter, kind: Any, opt: Opt) -> None:
        self.name, self.default, self.opt = parameter.name, parameter.default, opt
        inner = [each for each in get_args(kind) if each is not type(None)]
        self.kind = inner[0] if get_origin(kind) in (Union, types.UnionType) else kind
        self.is_sequence = get_origin(self.kind) is Sequence
        self.is_required = parameter.default is inspect.Parameter.empty

    def parameter(self) -> tuple[str, Any, Any]:
        """Return (name, annotation, default) for typer."""
        opt, default, kind = self.opt, self.default, self.kind
        if self.is_sequence and not opt.split:
            kind, default = list[str] | None, None
        elif self.is_sequence or opt.read is not None:
            shown = opt.split.join(map(str, default)) if self.is_sequence and default is not None else default
            kind, default = str, opt.text or (None if default is None else str(shown))
        if default is None and not (self.is_sequence and not opt.split):
            kind = kind | None
        if opt.argument:
            asked: Any = typer.Argument(help=opt.help)
        else:
            flag = opt.flag or "--" + self.name.replace("_", "-")
            asked = typer.Option(flag, help=opt.help, min=opt.least)
        return self.name, Annotated[kind, asked], ... if self.is_required else default

    def value(self, given: Any) -> Any:
        """Return the value of the parameter from what typer has parsed; `_ABSENT` for the function's own default."""
        if given is None or (self.is_sequence and not self.opt.split and not given):
            return _ABSENT
        if self.opt.read is not None:
            return self.opt.read(given, self.name)
        if not self.is_sequence or not self.opt.split:
            return given
        (kind,) = get_args(self.kind)
        try:
            return [kind(part.strip()) for part in given.split(self.opt.split) if part]
        except ValueError:
            raise ConfigError(
                f"{self.name} {given!r} cannot be read: write {'whole ' if kind is int else ''}numbers such as 1,16",
                field=self.name,
            ) from None


def _read_options(function: Callable[..., Any]) -> dict[str, _Option]:
    """Return the options that the parameters of a benchmark's function declare."""
    found = {}
    for name, parameter in inspect.signature(function).parameters.items():
        kind = parameter.annotation
        if isinstance(kind, str) and name not in ("cluster", "report"):
            # one by one: names of other annotations may be known to the type checker only
            kind = eval(kind, vars(sys.modules[function.__module__]))
        if get_origin(kind) is Annotated:
            inner, opt = get_args(kind)[:2]
            found[name] = _Option(parameter, inner, opt)
    return found


def _takes_cluster(function: Callable[..., Any]) -> bool:
    return next(iter(inspect.signature(function).parameters)) == "cluster"


def on_cluster(address: str | None, cpus: int, measure: Callable[[Any], Found]) -> Found:
    """Return `measure(cluster)`. The cluster is the one at `address`, or a new local one; None if `cpus` is 0."""
    if cpus == 0:
        return measure(None)
    from rayps.cluster.ray_cluster import RayCluster

    cluster = RayCluster.join(address) if address else RayCluster.local(cpus=cpus)
    try:
        return measure(cluster)
    finally:
        cluster.close()


def _list_rows(found: Found) -> list[BenchRow]:
    if isinstance(found, BenchRun):
        return list(found.rows)
    if isinstance(found, BenchRow):
        return [found]
    return [row for rows in (found.values() if isinstance(found, Mapping) else [found]) for row in rows]


def show_found(output: Output, found: Found) -> None:
    """Print what a benchmark has found: as JSON with all fields, or as a table with the columns of its rows."""
    if output is Output.json:
        if isinstance(found, BenchRow):
            show.dump(found.to_dict())
        elif isinstance(found, Mapping):
            show.dump({name: [row.to_dict() for row in rows] for name, rows in found.items()})
        else:
            show.dump([row.to_dict() for row in found])
        return
    for rows in found.values() if isinstance(found, Mapping) else [_list_rows(found)]:
        if rows:
            headings = split_columns(rows[0].columns)
            cells = [[show.format_number(getattr(row, name)) for name in headings] for row in rows]
            show.print_table(list(headings.values()), cells)
    for row in [found] if isinstance(found, BenchRun) else _list_rows(found):
        if row.remark:
            show.print_line(row.remark)

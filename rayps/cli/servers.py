"""`rayps servers`: server groups that jobs share: start, ls, show, resize, drain, stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, TypeVar

import typer
from rayps_client.errors import ConfigError, ServiceError
from rich.text import Text

from rayps.cli import show
from rayps.cli.show import Output
from rayps.service.client import Client
from rayps.service.remote_group import RemoteGroup, summarize
from rayps.service.rest_answers import GroupAnswer, SegmentLine, ServerLine, SpaceAnswer

app = typer.Typer(
    name="servers",
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Start and manage server groups. The servers run as long as the cluster; several jobs can share a group.",
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The group's name, as `rayps servers ls` shows it.")]
Space = Annotated[str, typer.Argument(metavar="SPACE", help="The space's name (its job's id), or its beginning.")]
Format = Annotated[Output, typer.Option("--output", "-o", help="table or json.")]
Json = Annotated[bool, typer.Option("--json", help="The same as --output json.")]
Wait = Annotated[bool, typer.Option("--wait", help="Wait until all servers are ready and no segment moves.")]
Timeout = Annotated[float, typer.Option(metavar="SECONDS", min=0, help="How long --wait waits.")]
_COLOURS = {"ready": "green", "alive": "green", "dead": "red", "degraded": "red", "unreachable": "red"}
_EVENTS = 5
_Line = TypeVar("_Line")


@app.command()
def start(
    name: Name,
    servers: Annotated[
        str, typer.Option(metavar="N|N..M", help="How many servers, or a range such as 2..8: the load chooses.")
    ] = "2",
    replicas: Annotated[
        int,
        typer.Option(
            min=0,
            help="Backups of each segment on other servers. With 1, the group survives the death of any one server.",
        ),
    ] = 1,
    silence: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="A server that does not report for this time counts as dead (default: 10). The end of a process is "
            "detected at once.",
        ),
    ] = None,
    cpus: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="CPUs that each server reserves (default: 1 in a joined cluster; 0 in the Ray that `rayps serve` "
            "has started).",
        ),
    ] = None,
    wait: Wait = False,
    timeout: Timeout = 300.0,
    output: Format = Output.table,
    as_json: Json = False,
) -> None:
    """Start a server group. A job uses it with `rayps submit job.yaml --server-group NAME`."""
    with Client() as client:
        group = client.start_servers(
            name, servers=parse_server_count(servers), replicas=replicas, silence=silence, cpus=cpus
        )
        _show_result(group, wait, timeout, _choose_format(output, as_json))


@app.command()
def ls(output: Format = Output.table, as_json: Json = False) -> None:
    """List the server groups."""
    with Client() as client:
        found = client.server_groups()
    if _choose_format(output, as_json) is Output.json:
        show.dump(found)
        return
    if not found:
        show.print_note("there is no server group yet: `rayps servers start NAME --servers 3 --replicas 1` starts one")
    show.print_table(
        ["name", "status", "servers", "replicas", "spaces", "bytes", "operations/s", "jobs", "age", ""],
        [
            [
                g["name"],
                _colour_state(g["status"]),
                f"{g['alive']} of {g['wanted']}",
                g["replicas"],
                g["spaces"],
                format_size(g["bytes"]),
                show.format_number(float(g["operations_s"])),
                g["jobs"],
                show.format_age(g["created_at"]),
                g["reason"] or "",
            ]
            for g in found
        ],
    )


@app.command("show")
def show_one(name: Name, output: Format = Output.table, as_json: Json = False) -> None:
    """Show one group: its servers, spaces, moves and events."""
    with Client() as client:
        data = client.servers(name).data
    if _choose_format(output, as_json) is Output.json:
        show.dump(data)
        return
    _print_tables(data)


@app.command()
def resize(
    name: Name,
    servers: Annotated[
        str,
        typer.Argument(
            metavar="N|N..M", help="The new number of servers, which stays; or a range from which the load chooses it."
        ),
    ],
    wait: Wait = False,
    timeout: Timeout = 300.0,
    output: Format = Output.table,
    as_json: Json = False,
) -> None:
    """Grow or shrink a group while its jobs continue."""
    with Client() as client:
        _show_result(
            client.servers(name).resize(parse_server_count(servers)), wait, timeout, _choose_format(output, as_json)
        )


@app.command()
def drain(
    name: Name,
    server: Annotated[
        str, typer.Argument(metavar="SERVER", help="The server's name, as `rayps servers show` prints it.")
    ],
    wait: Wait = False,
    timeout: Timeout = 300.0,
    output: Format = Output.table,
    as_json: Json = False,
) -> None:
    """Move all segments of one server to others, then stop it."""
    with Client() as client:
        _show_result(client.servers(name).drain(server), wait, timeout, _choose_format(output, as_json))


@app.command("quota")
def set_quota(
    name: Name,
    space: Space,
    most: Annotated[
        int | None,
        typer.Option(
            "--bytes",
            min=1,
            help="Bytes of parameters, optimizer state and rows on all servers, without replicas. A push that would "
            "create rows beyond this quota is refused; existing data stays.",
        ),
    ] = None,
    operations: Annotated[
        float | None,
        typer.Option(
            help="Operations per second over all servers: a push or pull is one operation at each server that it "
            "reaches. Operations beyond this quota wait."
        ),
    ] = None,
    output: Format = Output.table,
    as_json: Json = False,
) -> None:
    """Limit a job's memory and operations on a group. An omitted option means no limit."""
    with Client() as client:
        before = client.servers(name).data["spaces"]
        data = client.servers(name).set_quota(space, bytes=most, operations=operations).data
    if _choose_format(output, as_json) is Output.json:
        show.dump(data)
        return
    full, held = _find_space(before, space)
    show.print_line(f"{full}: quota {describe_quota({'bytes': most, 'operations': operations}, none='none')}")
    if most is not None and held > most:
        show.print_note(
            f"the space has {format_size(held)} now, more than the quota. Nothing is deleted, but its job fails if a "
            "push "
            "would create rows,\nor if the job restarts and loads its parameters again: raise --bytes, or stop the job"
        )


@app.command()
def drop(name: Name, space: Space, output: Format = Output.table, as_json: Json = False) -> None:
    """Delete the space of a job that has ended, or a branch."""
    with Client() as client:
        before = client.servers(name).data["spaces"]
        data = client.servers(name).drop(space).data
    if _choose_format(output, as_json) is Output.json:
        show.dump(data)
    else:
        show.print_line(f"{_find_space(before, space)[0]} is deleted")


@app.command()
def stop(
    name: Name,
    force: Annotated[
        bool, typer.Option("--force", help="Stop the group even if jobs use it; these jobs fail.")
    ] = False,
    wait: Wait = False,
    timeout: Timeout = 300.0,
    output: Format = Output.table,
    as_json: Json = False,
) -> None:
    """Stop a group. Its parameters are lost."""
    with Client() as client:
        _show_result(client.servers(name).stop(force=force), wait, timeout, _choose_format(output, as_json))


def parse_server_count(text: str) -> int | tuple[int, int]:
    """Return the number of servers, or for N..M the pair of both. Raises ConfigError if the text is neither."""
    least, dots, most = text.partition("..")
    try:
        found = int(least), int(most) if dots else 1
    except ValueError:
        found = 0, 0
    if min(found) < 1:
        raise ConfigError(
            f"servers {text!r} cannot be read: write a number such as 3, or a range such as 2..8", field="servers"
        )
    return found if dots else found[0]


def format_size(value: float | None) -> str:
    """Return a number of bytes as text, in B, KiB, MiB, GiB or TiB."""
    rest, units = float(value or 0), ["B", "KiB", "MiB", "GiB", "TiB"]
    while rest >= 1024 and len(units) > 1:
        rest, units = rest / 1024, units[1:]
    return f"{rest:.0f} B" if units[0] == "B" else f"{rest:.1f} {units[0]}"


def _find_space(spaces: list[SpaceAnswer], text: str) -> tuple[str, int]:
    """Return the full name and the bytes of the space whose name is `text` or begins with it; else `text` and 0."""
    exact = [each for each in spaces if each["name"] == text]
    near = exact or [each for each in spaces if str(each["name"]).upper().startswith(text.upper())]
    return (str(near[0]["name"]), int(near[0].get("bytes") or 0)) if near else (text, 0)


def _choose_format(output: Output, as_json: bool) -> Output:
    return Output.json if as_json else output


def _show_result(group: RemoteGroup, wait: bool, timeout: float, form: Output) -> None:
    ending = group.data["status"] == "stopping"
    if wait:
        try:
            group.wait(timeout)
        except TimeoutError as error:
            raise ServiceError(str(error)) from error
    if form is Output.json:
        show.dump(group.data)
    elif ending:
        show.print_line(f"{group.name} {'has stopped' if wait else 'will stop'}")
    else:
        show.print_line(f"{group.name} is {summarize(group.data)}")
        if not wait:
            show.print_note(f"to see the group's status: `rayps servers show {group.name}`")


def _print_tables(data: GroupAnswer) -> None:
    show.print_facts(
        [
            ("name", data["name"]),
            ("status", summarize(data)),
            ("replicas", data["replicas"]),
            ("started", data["created_at"]),
            ("counts", show.measures(data["counts"])),
            ("jobs", ", ".join(f"{job['id']} ({job['name']})" for job in data["jobs"])),
        ]
    )
    columns = ["server", "state", "host", "pid", "primaries", "copies", "bytes", "operations/s", "busy", "cpu"]
    _print_section(
        "servers",
        columns,
        data["servers"],
        lambda s: [
            s["name"],
            _colour_state(s["state"]),
            s.get("host"),
            s.get("pid"),
            s.get("primaries"),
            s.get("copies"),
            *_format_server_load(s),
        ],
    )
    columns = [
        "space",
        "workers",
        "segments",
        "tables",
        "bytes",
        "rows",
        "evicted",
        "operations/s",
        "throttled",
        "quota",
    ]
    _print_section(
        "spaces",
        columns,
        data["spaces"],
        lambda s: [
            s["name"],
            s.get("workers"),
            _count_ready_segments(s["segments"]),
            ", ".join(s.get("tables") or []) or "-",
            format_size(s.get("bytes")),
            *([s.get("rows"), s.get("evicted")] if s.get("tables") else "--"),
            show.format_number(s.get("operations_s")),
            s.get("throttled", s.get("rejected")),
            describe_quota(s.get("quota")),
        ],
    )
    _print_section(
        "moves",
        ["space", "segment", "from", "to", "phase", "seconds", "bytes"],
        data["moves"],
        lambda m: [
            m.get("space"),
            m.get("segment"),
            m.get("from") or "-",
            m.get("to"),
            m.get("phase"),
            show.format_number(m.get("seconds")),
            format_size(m.get("bytes")),
        ],
    )
    newest = data["events"][-_EVENTS:]
    rest = len(data["events"]) - len(newest)
    title = f"events (the last {_EVENTS} of {rest + _EVENTS}; --json has all)" if rest else "events"
    _print_section(
        title, ["when", "what", ""], newest, lambda e: [show.format_clock(e["time"]), e["kind"], e["message"]]
    )


def _format_server_load(server: ServerLine) -> list[show.Cell]:
    if server["state"] == "dead":
        return ["-"] * 4
    rate, busy, cpu = server.get("operations_s"), server.get("busy"), server.get("cpu")
    return [format_size(server.get("bytes")), show.format_number(rate), _format_percent(busy), _format_percent(cpu)]


def _print_section(
    title: str, columns: list[str], found: Sequence[_Line], row: Callable[[_Line], Sequence[show.Cell]]
) -> None:
    if found:
        show.print_line(f"\n{title}")
        show.print_table(columns, [["" if cell is None else cell for cell in row(each)] for each in found])


def _count_ready_segments(segments: list[SegmentLine]) -> str:
    ready = sum(segment.get("state") == "ready" for segment in segments)
    return str(len(segments)) if ready == len(segments) else f"{ready} of {len(segments)} ready"


def describe_quota(given: Mapping[str, float | None] | None, none: str = "-") -> str:
    """Return a quota as text, or `none` if there is no quota."""
    found = given or {}
    parts = [
        format_size(found["bytes"]) if found.get("bytes") is not None else "",
        f"{found['operations']:g}/s" if found.get("operations") is not None else "",
    ]
    return ", ".join(part for part in parts if part) or none


def _format_percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _colour_state(word: str) -> Text:
    return Text(word, style=_COLOURS.get(word, "yellow"))

"""`rayps personal`: evaluate and export the personal model of a real federated client, where its rows are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rayps_client.errors import ConfigError

from rayps.cli import show
from rayps.cli.show import Output
from rayps.service.job_file import parse_assignments
from rayps.service.settings import Settings

if TYPE_CHECKING:
    from rayps_client.command import Identity

_PATIENCE = 60.0  # seconds


def personal(
    target: Annotated[
        str, typer.Argument(metavar="WORKLOAD", help="file.py:Class or module:Class, as for `rayps client`.")
    ],
    job: Annotated[str | None, typer.Option(metavar="ID", help="The job (default: that of the token).")] = None,
    name: Annotated[str | None, typer.Option(help="This client's name (default: that of the token).")] = None,
    state: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The folder of the client's state, DIR/JOB/NAME (~/.rayps/clients)."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="A Parquet file or folder to read the columns of the workload's data() from."
        ),
    ] = None,
    evaluate: Annotated[
        bool, typer.Option("--evaluate", help="Evaluate the personal model and the job's on this client's rows.")
    ] = False,
    evaluation_data: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="A Parquet file or folder to read the columns of evaluation_data() from."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write the personal model into this new folder.")
    ] = None,
    fetch: Annotated[
        bool, typer.Option("--fetch", help="Fetch the job's newest parameters first: with --url and a token.")
    ] = False,
    url: Annotated[str | None, typer.Option(help="The job service's address, for --fetch (RAYPS_URL).")] = None,
    token: Annotated[
        str | None, typer.Option(help="The client's token, or @FILE, or RAYPS_CLIENT_TOKEN, for --fetch.")
    ] = None,
    member: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The client's certificate (PEM), for --fetch, beside or without a token."),
    ] = None,
    member_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Its private key (default: NAME.key beside NAME.pem).")
    ] = None,
    service_key: Annotated[
        str | None, typer.Option(metavar="FINGERPRINT", help="The service's key, if there is no token.")
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Set a parameter of the workload, as the job has it."),
    ] = None,
    output: Annotated[Output, typer.Option("--output", "-o", help="table or json.")] = Output.table,
) -> None:
    """Make a real client's personal model; evaluate it or save it.

    Nothing is sent. `rayps client` stores the job's parameters when the job ends. The model is made from them, from
    this client's state and, with finetune, by training a copy on this client's rows.
    """
    from rayps_client.client_options import ClientOptions
    from rayps_client.command import identity_of_options
    from rayps_client.members.membership_options import MembershipOptions

    from rayps.clients.global_model import GlobalModel
    from rayps.clients.personal_client import PersonalClient
    from rayps.clients.workload_trainer import evaluation_of, own_data
    from rayps.workload.base import load

    if not evaluate and out is None:
        raise ConfigError("nothing is asked for: give --evaluate, or --out FOLDER, or both", field="out")
    found = None
    if fetch:
        membership = MembershipOptions(member, member_key, service_key)
        options = ClientOptions(target, url=url, token=token, name=name, job=job, membership=membership)
        found = identity_of_options(options)
    which = job or (None if found is None else found.job)
    who = name or (None if found is None else found.name)
    if which is None or who is None:
        missing = "--job ID" if which is None else "--name NAME"
        raise ConfigError(f"give {missing}, as for `rayps client`", field="job" if which is None else "name")
    workload = load(target, params=parse_assignments(changes or []))
    folder = (state or Settings.read().state_dir / "clients") / which / who
    if found is not None:
        _fetch(found, folder)
    client = PersonalClient(workload, own_data(workload, data), folder, GlobalModel.load(folder))
    model = client.model
    if evaluate:
        rows = evaluation_of(workload, evaluation_data)
        measured = {"global": client.metrics(client.global_model(), rows), "personal": client.metrics(model, rows)}
        if output is Output.json:
            show.dump({"client": who, "rounds": client.given.facts["round"], **measured})
        else:
            names = measured["personal"]
            cells = [[key, *(show.format_number(each.get(key)) for each in measured.values())] for key in names]
            show.print_table(["metric", "global", "personal"], cells)
    if out is not None:
        client.save(out)
        show.print_line(str(out))


def _fetch(client: Identity, folder: Path) -> None:
    """Fetch the job's newest parameters into the folder of a client that has joined."""
    from rayps_client.exchange.connection import Line, ServiceConnection
    from rayps_client.exchange.global_model import fetch_global
    from rayps_client.machine.client_folder import identity_of

    number, key = identity_of(folder)
    line = Line(auth=client.membership.auth(client.token.fingerprint))
    connection = ServiceConnection(client.url, client.bearer, _PATIENCE, show.print_note, line=line)
    try:
        fetch_global(connection, client.token, {"Rayps-Client": f"{client.job}:{number}:{key}"}, folder)
    finally:
        connection.close()


def add(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("personal")(personal)

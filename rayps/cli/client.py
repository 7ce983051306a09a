"""`rayps client`: take part in a federated job from outside its cluster; `rayps token`: manage access tokens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import typer
from rayps_client.client_options import PATIENCE, ClientOptions
from rayps_client.errors import ConfigError
from rayps_client.machine.termination import EXIT_CODE, MESSAGE, Terminated, sigterm_raises
from rayps_client.members.membership_options import MembershipOptions

from rayps.cli import show
from rayps.cli.show import Output
from rayps.service.client import Client
from rayps.service.job_file import parse_assignments
from rayps.service.rest_answers import TokenAnswer

if TYPE_CHECKING:
    from rayps.clients.workload_trainer import WorkloadTrainer

Format = Annotated[Output, typer.Option("--output", "-o", help="table or json.")]
TokenId = Annotated[
    str, typer.Argument(metavar="ID", help="The id in `rayps token ls`; local means the service's own token.")
]
CLIENT_TOKENS, USER_TOKENS = "/api/v1/client-tokens", "/api/v1/tokens"
LOCAL = "local"
token_app = typer.Typer(no_args_is_help=True, help="Tokens of users and of real federated clients.")


def client(
    target: Annotated[
        str,
        typer.Argument(
            metavar="WORKLOAD",
            help="file.py:Class or module:Class; its data() returns this client's data, which stays on this machine.",
        ),
    ],
    url: Annotated[str | None, typer.Option(help="The job service's address, https://... (RAYPS_URL).")] = None,
    token: Annotated[
        str | None, typer.Option(help="The token of `rayps token create`, or @FILE, or RAYPS_CLIENT_TOKEN.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="This client's name, e.g. hospital-a, unless the token has one.")
    ] = None,
    job: Annotated[str | None, typer.Option(metavar="ID", help="The job, if the token is valid for any job.")] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="A Parquet file or folder to read the columns of the workload's data() from."
        ),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="The folder of this client's key and of its strategy's state, in DIR/JOB/NAME (~/.rayps/clients).",
        ),
    ] = None,
    patience: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.0, help="How long to wait for a service that does not answer.")
    ] = PATIENCE,
    device: Annotated[str, typer.Option(help="The device to train on: cpu, cuda.")] = "cpu",
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Set a parameter of the workload, as the job has it."),
    ] = None,
    member: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="This institution's certificate (PEM), beside or in place of a token."),
    ] = None,
    member_key: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The certificate's private key (PEM); by default NAME.key beside NAME.pem."),
    ] = None,
    service_key: Annotated[
        str | None,
        typer.Option(
            metavar="FINGERPRINT",
            help="The fingerprint of the service's key, which `rayps members service` shows; a token contains it.",
        ),
    ] = None,
    accept_statement: Annotated[
        str | None,
        typer.Option(
            metavar="HASH|FILE",
            help="Follow only orders with this data-use statement, and sign it for each update with the certificate's "
            "key.",
        ),
    ] = None,
    show_statement: Annotated[
        bool, typer.Option("--show-statement", help="Show the job's data-use statement and its hash, and end.")
    ] = False,
    members_ca: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="As --peers, but the clients' keys are those of certificates that this authority (PEM) has issued.",
        ),
    ] = None,
    members_revoked: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The certificates that this authority has revoked: its list, or serials."),
    ] = None,
    peers: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The keys of all clients, a line `NAME KEY` each: this client then takes part in secure rounds only, "
            "and checks in them that the service has exchanged no key and shows all clients the same survivors.",
        ),
    ] = None,
    certificate: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The only certificates (PEM) that are trusted for https.")
    ] = None,
    pin: Annotated[
        list[str] | None,
        typer.Option(metavar="SHA256", help="The hash of the service's certificate, which alone is then accepted."),
    ] = None,
    proxy: Annotated[
        str | None, typer.Option(metavar="URL", help="The proxy; by default HTTPS_PROXY and NO_PROXY decide.")
    ] = None,
    between: Annotated[
        list[str] | None,
        typer.Option(metavar="HH:MM-HH:MM", help="Take part in these hours only (local time), e.g. 22:00-06:00."),
    ] = None,
    on_charge: Annotated[
        bool, typer.Option("--on-charge", help="Take part only while the machine does not use its battery.")
    ] = False,
    cpus: Annotated[int | None, typer.Option(metavar="N", help="Use N processors at most.")] = None,
    memory: Annotated[
        float | None, typer.Option(metavar="MB", help="Refuse rounds that need more memory than this.")
    ] = None,
    traffic: Annotated[
        float | None, typer.Option(metavar="MB", help="Send and receive at most this much a day.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(metavar="KB/S", help="Send and receive at most this much a second.")
    ] = None,
) -> None:
    """Train on this machine's data in a federated job. Only parameters, counts and the mean loss leave this machine.

    Exit codes: 0 the job succeeded, also before this start; 1 it failed or was stopped; 2 this client's data, model or
    options cannot be used; 3 there is no such job; 4 the token was revoked, an order was not signed by the service, or
    the service did not answer for too long; 5 another process is this client; 130 Ctrl-C; 143 SIGTERM. Run the command
    again to continue. The package rayps-client has the same command, `rayps-client`, without Ray.
    """
    from rayps_client import command

    options = ClientOptions(
        target,
        url=url,
        token=token,
        name=name,
        job=job,
        data=data,
        state=state,
        patience=patience,
        device=device,
        params=parse_assignments(changes or []),
        certificate=certificate,
        pins=pin or (),
        proxy=proxy,
        between=between or (),
        on_charge=on_charge,
        cpus=cpus,
        memory=memory,
        traffic=traffic,
        rate=rate,
        peers=peers,
        membership=MembershipOptions(
            member, member_key, service_key, members_ca, members_revoked, accept_statement, show_statement
        ),
    )
    if show_statement:
        command.show_statement(options, show.print_line)
        return
    try:
        with sigterm_raises():
            ended = command.run_client(options, _make_trainer, show.print_note)
    except Terminated:
        show.print_note(f"rayps: {MESSAGE}")
        raise typer.Exit(EXIT_CODE) from None
    if not ended.succeeded:
        raise typer.Exit(1)


def _make_trainer(options: ClientOptions) -> WorkloadTrainer:
    """Return the trainer of the command's workload."""
    from rayps.clients.workload_trainer import WorkloadTrainer, own_data
    from rayps.workload.base import load

    workload = load(options.target, params=options.params)
    return WorkloadTrainer(workload, own_data(workload, options.data), options.device)


@token_app.command()
def create(
    job: Annotated[str | None, typer.Option(metavar="ID", help="Valid for clients of this job only.")] = None,
    name: Annotated[str | None, typer.Option(help="Valid for the client of this name only.")] = None,
    user: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Create a token with full access for a user instead. NAME is the user or the purpose, e.g. laptop.",
        ),
    ] = None,
    days: Annotated[
        float | None, typer.Option(min=0.0, help="Valid for this many days (default: until it is revoked).")
    ] = None,
    to: show.To = None,
    output: Format = Output.table,
) -> None:
    """Create a token for a user or for a job's clients. The token is shown once."""
    if user is not None and (job, name) != (None, None):
        raise ConfigError("--user creates a token with full access: omit --job and --name", field="user")
    show.refuse_secret(to)
    show.refuse_existing(to)
    given = (("job", job), ("days", days), ("name", name if user is None else user))
    body = {key: value for key, value in given if value is not None}
    with Client() as service:
        found = service.call("POST", CLIENT_TOKENS if user is None else USER_TOKENS, json=body)
    _show_token(found, to, output)


def _show_token(found: TokenAnswer, to: str | None, output: Output) -> None:
    if output is Output.json and to in (None, "-"):
        show.dump(found)
        return
    show.print_secret(found["token"], to)
    if output is Output.json:
        show.dump({key: value for key, value in found.items() if key != "token"})
        return
    access = "has full access, as the service's user" if _of_user(found) else "can take part as a client"
    show.print_note(
        f"token {found['id']} is for {_describe_holder(found)}. Its secret is shown only now: save it. Whoever has "
        "the secret "
        f"{access}: send the secret over a secure channel.\nTo revoke the token: `rayps token revoke {found['id']}`"
    )


@token_app.command("ls")
def list_tokens(
    job: Annotated[
        str | None, typer.Option(metavar="ID", help="Only tokens of clients that are valid for this job.")
    ] = None,
    output: Format = Output.table,
) -> None:
    """List the tokens of users and clients, newest first."""
    with Client() as service:
        found = service.call("GET", CLIENT_TOKENS, params={} if job is None else {"job": job})["tokens"]
        if job is None:
            found = service.call("GET", USER_TOKENS)["tokens"] + found
    if output is Output.json:
        show.dump(found)
        return
    show.print_table(
        ["id", "for", "made", "until", ""],
        [
            [
                t["id"],
                _describe_holder(t),
                show.format_age(t["created_at"]),
                t["expires_at"] or "",
                "revoked" if t["revoked_at"] else "",
            ]
            for t in found
        ],
    )


@token_app.command()
def rotate(token_id: TokenId, to: show.To = None, output: Format = Output.table) -> None:
    """Replace a token: the old one is refused from now on.

    The service's own token is also written to its file. Rotating a user's token ends all browser sessions; `rayps open`
    starts another.
    """
    own = token_id == LOCAL
    if not own:
        show.refuse_secret(to)
    show.refuse_existing(to)
    with Client() as service:
        found = service.call("POST", f"{_find_path(service, token_id)}/rotate")
    if own and to is None:
        found.pop("token")
        if output is Output.json:
            show.dump(found)
        else:
            show.print_line(
                f"{found['id']} is the service's own token now; it is in the file `token` of the state directory"
            )
        return
    _show_token(found, to, output)


@token_app.command()
def revoke(token_id: TokenId, output: Format = Output.table) -> None:
    """Revoke a token at once.

    When a client token is revoked, its clients stop, and their updates of an open round do not count. When a user token
    is revoked, all browser sessions end.
    """
    with Client() as service:
        found = service.call("DELETE", _find_path(service, token_id))
    if output is Output.json:
        show.dump(found)
    else:
        show.print_line(f"{found['id']} is revoked; it was for {_describe_holder(found)}")


def _find_path(service: Client, token_id: str) -> str:
    """Return the REST path of a user's or a client's token."""
    known = [each["id"] for each in service.call("GET", USER_TOKENS)["tokens"]]
    return f"{USER_TOKENS if token_id in (*known, LOCAL) else CLIENT_TOKENS}/{quote(token_id, safe='')}"


def joined(
    job_id: Annotated[str, typer.Argument(metavar="ID", help="The job's id, or its beginning.")],
    output: Format = Output.table,
) -> None:
    """Show the real clients that have joined a job.

    If the job waits for clients, or has ended, a note says so.
    """
    with Client() as service:
        found = service.call("GET", f"/api/v1/jobs/{service.job(job_id).id}/clients")
    if output is Output.json:
        show.dump(found)
        return
    show.print_table(
        ["client", "name", "state", "samples", "seen", ""],
        [
            [
                c["number"],
                c["name"],
                c["state"],
                c["samples"] or "secret",
                "" if c["seen_seconds"] is None else f"{c['seen_seconds']:.0f} s ago",
                c["doing"],
            ]
            for c in found["clients"]
        ],
    )
    if note := found.get("ended") or found["waits"]:  # an older service has no `ended`
        show.print_note(note)


def _of_user(token: TokenAnswer) -> bool:
    return "job" not in token


def _describe_holder(token: TokenAnswer) -> str:
    if _of_user(token):
        return "the service's own command line" if token["name"] == LOCAL else f"the user {token['name']}"
    client = f"the client {token['name']}" if token["name"] else "any client"
    return f"{client} of {'any job' if token['job'] is None else 'job ' + token['job']}"


def add(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command()(client)
    app.command()(joined)
    app.add_typer(token_app, name="token")

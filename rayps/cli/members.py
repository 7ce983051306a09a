"""`rayps members`: certificates of a federation's institutions; `rayps statements`: what its members have signed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rayps_client.errors import ConfigError, Conflict
from rayps_client.members.acceptance import Acceptance, CheckedAcceptance, check_record
from rayps_client.members.acceptance_file import Receipt, read_lines
from rayps_client.members.consent import TEXT
from rayps_client.members.member_certificates import MembersCa
from rayps_client.members.membership_options import FINGERPRINT, service_fingerprint

from rayps.cli import show
from rayps.cli.show import Output
from rayps.core.job.statement import read_statement
from rayps.service.client import Client
from rayps.service.settings import Settings

Format = Annotated[Output, typer.Option("--output", "-o", help="table or json.")]
Authority = Annotated[Path, typer.Argument(metavar="FOLDER", help="The authority's folder, on a machine of its own.")]
MOST_DAYS = 36_500  # of a certificate; a date after the year 9999 cannot be written
members_app = typer.Typer(no_args_is_help=True, help="Certificates of the institutions of a federation.")


@members_app.command()
def ca(
    folder: Authority,
    name: Annotated[str, typer.Option(help="The federation's name, in all certificates.")] = "rayps federation",
    days: Annotated[int, typer.Option(min=1, max=MOST_DAYS, help="Valid for this many days.")] = 3650,
) -> None:
    """Create the authority of a federation.

    RAYPS_MEMBER_PASSPHRASE encrypts the key. Who has the key and its passphrase decides who is a member. Let it be
    another party, or at least another machine, than the service's.
    """
    from rayps.service.tokens.member_authority import create_authority

    create_authority(folder, name, days)
    show.print_line(str(folder / "ca.pem"))
    show.print_note(
        f"give {folder / 'ca.pem'} to the service and to all members; {folder / 'ca.key'} stays here, secret"
    )
    _note_plain_key()


@members_app.command()
def request(
    name: Annotated[str, typer.Argument(help="The client's name, e.g. hospital-a.")],
    to: Annotated[Path, typer.Option(metavar="FOLDER", help="The folder of the new files.")] = Path(),
) -> None:
    """Create an institution's key, and its request.

    The institution does this itself, and sends the request for a certificate to the authority.
    RAYPS_MEMBER_PASSPHRASE encrypts the key.
    """
    from rayps.service.tokens.member_authority import create_request

    key, asked = to / f"{name}.key", to / f"{name}.csr"
    create_request(name, key, asked)
    show.print_line(str(asked))
    show.print_note(f"send {asked} to the federation's authority; {key} stays here, secret")
    _note_plain_key()


def _note_plain_key() -> None:
    from rayps_client.members.member_key import PASSPHRASE

    if not os.environ.get(PASSPHRASE):
        show.print_note(f"the key is not encrypted: {PASSPHRASE} was not set")


@members_app.command()
def issue(
    folder: Authority,
    asked: Annotated[Path, typer.Argument(metavar="REQUEST", help="The institution's request (.csr).")],
    days: Annotated[float, typer.Option(min=1.0, max=MOST_DAYS, help="Valid for this many days.")] = 365.0,
    to: Annotated[Path | None, typer.Option(metavar="FILE", help="The certificate (by default NAME.pem).")] = None,
) -> None:
    """Issue the certificate that an institution has requested.

    Make sure before who has sent the request.
    """
    from cryptography.hazmat.primitives.serialization import Encoding

    from rayps.service.tokens.member_authority import check_authority, others_of, read_requested_name, was_issued
    from rayps.service.tokens.member_authority import issue as issued_to

    check_authority(folder)
    path = to or asked.with_name(f"{read_requested_name(asked)}.pem")
    if path.exists() and not was_issued(folder, path):
        raise Conflict(
            f"{path} exists, is no certificate of the authority in {folder}, and is not overwritten: give another --to",
            code="exists",
        )
    member = issued_to(folder, asked, days)
    path.write_bytes(member.certificate.public_bytes(Encoding.PEM))
    show.print_line(str(path))
    show.print_note(f"{member.name} has the certificate {member.serial}; give {path} to it, which is no secret")
    for other in others_of(folder, member):
        until = f"{other.certificate.not_valid_after_utc:%Y-%m-%d}"
        show.print_note(
            f"it also has the certificate {other.serial}, valid until {until}: "
            f"to end that one, `rayps members revoke {folder} {other.serial}`"
        )


@members_app.command()
def revoke(
    folder: Authority,
    which: Annotated[str, typer.Argument(metavar="NAME|SERIAL", help="A member, or one certificate.")],
) -> None:
    """Revoke certificates of a member.

    The authority's list is written anew. The service reads its copy of the list within a second.
    """
    from rayps.service.tokens.member_authority import revoke as revoked_by

    for member in revoked_by(folder, which):
        show.print_line(f"{member.serial} of {member.name} is revoked")
    show.print_note(f"the list is {folder / 'revoked.pem'}: put it where `rayps serve --members-revoked` reads it")


@members_app.command("ls")
def list_members(folder: Authority, output: Format = Output.table) -> None:
    """List the certificates that an authority has issued."""
    from rayps.service.tokens.member_authority import with_ends

    rows = [
        {
            "name": each.name,
            "serial": each.serial,
            "until": f"{each.certificate.not_valid_after_utc:%Y-%m-%d}",
            "state": ended or "",
        }
        for each, ended in with_ends(folder)
    ]
    if output is Output.json:
        show.dump(rows)
    else:
        show.print_table(["name", "serial", "until", ""], [list(row.values()) for row in rows])


@members_app.command()
def service() -> None:
    """Show the fingerprint of the service's key.

    Clients without a token are given it: --service-key FINGERPRINT.
    """
    from rayps_client.exchange.signed_orders import Key

    path = Settings.read().client_key
    if not path.exists():
        raise ConfigError(
            f"there is no key {path}: run this on the service's machine, with its --state-dir as RAYPS_STATE_DIR, "
            "after the first `rayps serve`",
            field="state_dir",
        )
    show.print_line(f"{FINGERPRINT}{Key.load_or_create(path).fingerprint}")


@dataclass(frozen=True)
class _Record:
    """What the clients of one job have signed, from the service or a file."""

    job: str | None
    statement: str | None
    clients: Sequence[Sequence[Acceptance]]
    receipts: Mapping[str, Receipt] = field(default_factory=dict)


def statements(
    source: Annotated[
        str,
        typer.Argument(
            metavar="JOB|FILE",
            help="The job's id, or its beginning; or, without a service, an exported file or a client's "
            "statements.jsonl.",
        ),
    ],
    verify: Annotated[
        bool, typer.Option("--verify", help="Check every signature and that nothing is missing; exit code 1 if not.")
    ] = False,
    members_ca: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Check also that this authority (PEM) has certified the keys.")
    ] = None,
    service_key: Annotated[
        str | None,
        typer.Option(metavar="FINGERPRINT", help="Check also that this service has signed the receipts of a client."),
    ] = None,
    statement: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Check that this text was accepted (default: the job's).")
    ] = None,
    to: Annotated[
        Path | None, typer.Option("--to", metavar="FILE", help="Write all of it into this file, which can be verified.")
    ] = None,
    output: Format = Output.table,
) -> None:
    """Show and verify what the members of a job have signed.

    A member signs each of its updates under the job's data-use statement. The table has a line for each client and,
    with --verify, one for each acceptance that is wrong; -o json has each acceptance.
    """
    found = _read(Path(source)) if Path(source).exists() else _of_service(source)
    text = found.statement if statement is None else read_statement(statement)
    trusted = None if members_ca is None else MembersCa.load(members_ca)
    checked = [each for record in found.clients for each in check_record(record, text, trusted, found.job)]
    if to is not None:
        clients = [[each.to_json() for each in record] for record in found.clients]
        to.write_text(json.dumps({"job": found.job, "statement": text, "clients": clients}), encoding="utf-8")
    known = None if service_key is None else service_fingerprint(service_key)
    wrong = [_explain_wrong(each, found.receipts, known) for each in checked]
    rows = [_make_row(each, why if verify else None) for each, why in zip(checked, wrong, strict=True)]
    if output is Output.json:
        show.dump([row._asdict() for row in rows])
    else:
        show.print_table(list(_SUMMARY), _group_by_client(rows, wrong if verify else []))
        for row, why in zip(rows, wrong, strict=True):
            if verify and why:
                show.print_line(f"{row.client or 'unknown client'}, round {row.round}: {why}")
    if not verify:
        return
    bad = sum(bool(why) for why in wrong)
    show.print_note(f"{len(checked)} acceptances of {len(found.clients)} clients; wrong: {bad}")
    if trusted is None:
        show.print_note("not checked: who has issued the certificates; give --members-ca FILE")
    if text is None:
        show.print_note("not checked: the text of the statement; give --statement FILE")
    if bad:
        raise typer.Exit(1)


class _Row(NamedTuple):
    """One acceptance. Only `check` is known of one that cannot be read; the rest is then empty."""

    client: str = ""
    round: int | str = ""
    order: int | str = ""
    signed: str = ""
    statement: str = ""
    update: str = ""
    check: str = ""


def _make_row(checked: CheckedAcceptance, wrong: str | None) -> _Row:
    try:
        facts = checked.acceptance.facts()
    except ValueError:
        return _Row(check=checked.wrong)
    signed = f"{datetime.fromtimestamp(facts.time, UTC):%Y-%m-%d %H:%M:%S}"
    check = "" if wrong is None else wrong or "valid"
    return _Row(facts.name, facts.round, facts.serial, signed, facts.statement, facts.sent, check)


_SUMMARY = ("client", "updates", "rounds", "first", "last", "statement", "check")
_HASH = 12  # letters of a hash that the table shows; -o json has it whole


def _group_by_client(rows: Sequence[_Row], wrong: Sequence[str]) -> list[list[int | str]]:
    """Return a line for each client and statement: what it has signed, from when to when. `wrong`: of each row, why."""
    groups: dict[tuple[str, str], list[int]] = {}
    for at, row in enumerate(rows):
        groups.setdefault((row.client, row.statement), []).append(at)
    found: list[list[int | str]] = []
    for (client, statement), numbers in groups.items():
        mine = [rows[at] for at in numbers]
        rounds, signed = [row.round for row in mine if isinstance(row.round, int)], sorted(row.signed for row in mine)
        bad = sum(bool(wrong[at]) for at in numbers) if wrong else 0
        check = (f"{bad} wrong" if bad else "valid") if wrong else ""
        span = "" if len(rounds) < len(mine) else f"{min(rounds)} to {max(rounds)}"
        found.append([client, len(mine), span, signed[0], signed[-1], statement[:_HASH], check])
    return found


def _explain_wrong(checked: CheckedAcceptance, receipts: Mapping[str, Receipt], service_key: str | None) -> str:
    receipt = receipts.get(checked.acceptance.digest)
    if not checked.wrong and receipt is not None and not receipt.is_valid(service_key):
        return "the service's receipt is not signed with its key"
    return checked.wrong


def _of_service(job: str) -> _Record:
    with Client() as service:
        found = service.call("GET", f"/api/v1/jobs/{service.job(job).id}/acceptances")
    return _of_json(found, job)


def _read(path: Path) -> _Record:
    """Read an exported file, or a client's own record with the statement beside it."""
    try:
        raw = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", field="source") from error
    try:
        found = json.loads(raw)
    except ValueError:
        found = None  # several lines
    if isinstance(found, dict) and "clients" in found:
        return _of_json(found, str(path))
    lines, receipts = read_lines(path)
    beside = path.with_name(TEXT)
    return _Record(None, read_statement(beside) if beside.exists() else None, [lines], receipts)


def _of_json(found: Mapping[str, Any], source: str) -> _Record:
    try:
        clients = [[Acceptance.of_json(each) for each in record] for record in found["clients"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{source} is not a record that `rayps statements --to FILE` has written: {error}", field="source"
        ) from error
    return _Record(found.get("job"), found.get("statement"), clients)


def add(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.add_typer(members_app, name="members")
    app.command()(statements)

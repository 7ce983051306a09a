"""What the commands `rayps client` and `rayps-client` do with their options. Each of them passes its own trainer."""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from rayps_client.client_options import ClientOptions
from rayps_client.errors import ConfigError
from rayps_client.exchange.connection import Line, ServiceConnection
from rayps_client.exchange.signed_orders import JOB_ID, NAME, ClientToken
from rayps_client.machine.certificates import trusted
from rayps_client.machine.client_folder import ClientFolder
from rayps_client.machine.limits import MEGABYTE, DailyTraffic, LineMeter, Pace, use_cpus
from rayps_client.machine.participation import Participation
from rayps_client.machine.private_file import read_token
from rayps_client.machine.schedule import hours_of
from rayps_client.members.consent import Consent, fetch_statement, shown
from rayps_client.members.membership_options import Membership
from rayps_client.process import ClientProcess, Ended
from rayps_client.secure.pinned_keys import PeerKeys, pinned_keys
from rayps_client.trainers.local_trainer import LocalTrainer
from rayps_client.values import Json


def run_client(
    options: ClientOptions, make_trainer: Callable[[ClientOptions], LocalTrainer], report: Callable[[str], None]
) -> Ended:
    """Take part in a job until it has ended.

    Raises:
        ConfigError: an option is invalid.
        WorkloadError, DataError, Unauthorized, Unreachable, Conflict: see `ClientProcess.run` and `ClientFolder`.
    """
    found = identity_of_options(options)
    token, url, job, name, membership = found.token, found.url, found.job, found.name, found.membership
    hours = [hours_of(text) for text in options.between]
    for field_name in ("memory", "traffic", "rate"):
        value = getattr(options, field_name)
        if value is not None and value <= 0:
            raise ConfigError(f"{field_name} is {value:g}: give a number above 0", field=field_name)
    trust, proxy = _trust(options, url), proxy_address(options.proxy)
    if options.cpus is not None:
        use_cpus(options.cpus)
    trainer = make_trainer(options)
    clients = options.state or state_folder() / "clients"
    pinned: PeerKeys | None = membership.peers
    if options.peers is not None:
        if pinned is not None:
            raise ConfigError(
                "--peers and --members-ca were both given, and each says whom to trust: give one", field="peers"
            )
        pinned = pinned_keys(options.peers, name, clients / f"{name}.key")
    folder = ClientFolder(clients / job / name)
    traffic = DailyTraffic(folder, _bytes(options.traffic, MEGABYTE))
    pace = None if options.rate is None else Pace(options.rate * 1000)
    line = Line(trust, proxy, membership.auth(token.fingerprint), LineMeter(traffic, pace))
    connection = ServiceConnection(url, found.bearer, options.patience, report, line=line)
    consent = Consent(folder.folder, connection, membership.key, membership.accepted)
    conditions = Participation(hours, options.on_charge, traffic, _bytes(options.memory, MEGABYTE))
    process = ClientProcess(
        trainer,
        token,
        job,
        connection,
        folder,
        name=name,
        report=report,
        conditions=conditions,
        pinned=pinned,
        consent=consent,
    )
    try:
        ended = process.run()
    finally:
        connection.close()
        traffic.save()
        folder.close()
    updates = (
        f"{ended.rounds} update{'' if ended.rounds == 1 else 's'} sent since this start, without the rejected ones"
    )
    report(f"job {job} is {ended.status}: {ended.reason} ({updates})")
    return ended


def show_statement(options: ClientOptions, report: Callable[[str], None]) -> None:
    """Show the job's data-use statement, its hash, and the option that accepts it.

    Raises:
        ConfigError: an option is invalid. Unauthorized, Unreachable, NotFound: see `ServiceConnection.call`.
    """
    found = identity_of_options(options)
    proxy = proxy_address(options.proxy)
    line = Line(_trust(options, found.url), proxy, found.membership.auth(found.token.fingerprint))
    connection = ServiceConnection(found.url, found.bearer, options.patience, report, line=line)
    try:
        report(shown(fetch_statement(connection, found.job)))
    finally:
        connection.close()


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a client is, and for which job of which service, as its options say."""

    token: ClientToken  # without a token: the service's fingerprint and the name in the certificate, and no secret
    bearer: str  # the token's text, or "" without one
    url: str
    job: str
    name: str
    membership: Membership


def identity_of_options(options: ClientOptions) -> Identity:
    """Return who the client is: by its token, its certificate, or both.

    Raises:
        ConfigError: an option is invalid, is missing, or contradicts another.
    """
    member_only = options.membership.member is not None and not _has_token(options.token)
    bearer = "" if member_only else token_text(options.token)
    membership = options.membership.load(bearer or None)
    who = None if membership.key is None else membership.key.name
    if member_only:
        token = ClientToken("", options.job, options.membership.service or "", who)
        if options.job is None:
            raise ConfigError("a certificate is valid for any job: give the job with --job ID", field="job")
    else:
        token = ClientToken.read(bearer)
    if options.membership.service not in (None, token.fingerprint):
        raise ConfigError(
            "the token was made by another service than that of --service-key: check the token and the fingerprint "
            "with its issuer",
            field="service_key",
        )
    for given in (options.name, token.name):
        if who is not None and given not in (None, who):
            raise ConfigError(f"the certificate is of {who!r}, not of {given!r}: omit --name", field="name")
    name = _name(token, options.name or who)
    return Identity(token, bearer, service_address(options.url), _job(token, options.job), name, membership)


def _has_token(given: str | None) -> bool:
    return bool(given or os.environ.get("RAYPS_CLIENT_TOKEN", ""))


def _trust(options: ClientOptions, url: str) -> ssl.SSLContext | None:
    trust = trusted(options.certificate, options.pins)
    if trust is not None and not url.startswith("https://"):
        raise ConfigError(f"--certificate and --pin need an address with https://, and url is {url}", field="url")
    return trust


def service_address(given: str | None) -> str:
    """Return the address of the job service: `given`, or RAYPS_URL. Raises ConfigError if there is none."""
    name, found = ("--url", given) if given else ("RAYPS_URL", os.environ.get("RAYPS_URL", "").strip())
    if not found:
        raise ConfigError("give the job service's address: --url, or RAYPS_URL", field="url")
    if not found.startswith(("http://", "https://")) or not urlsplit(found).netloc:
        raise ConfigError(f"{name} is {found!r}: give an address such as https://train.example.org", field="url")
    return found.rstrip("/")


def proxy_address(given: str | None) -> str | None:
    """Return the address of the proxy. Raises ConfigError if it is not one of http:// or https://."""
    if given is None:
        return None
    try:
        found = urlsplit(given)
        valid = found.scheme in ("http", "https") and bool(found.hostname) and found.port != 0
    except ValueError:  # the port is not a number
        valid = False
    if not valid:
        raise ConfigError(f"--proxy is {given!r}: give an address such as http://proxy.example.org:3128", field="proxy")
    return given


def state_folder() -> Path:
    """Return the folder of rayps's state on this machine: RAYPS_STATE_DIR, or `~/.rayps`."""
    return Path(os.environ.get("RAYPS_STATE_DIR", "").strip() or "~/.rayps").expanduser()


def assignments_of(changes: Sequence[str]) -> dict[str, Json]:
    """Return the parameters in texts such as `lr=0.3`: JSON, or else text. Raises ConfigError if one has no name."""
    found: dict[str, Json] = {}
    for change in changes:
        name, equals, text = change.partition("=")
        if not equals or not name.strip().isidentifier():
            raise ConfigError(f"--set {change!r}: give NAME=VALUE, e.g. lr=0.3", field="params")
        try:
            found[name.strip()] = json.loads(text)
        except ValueError:
            found[name.strip()] = text
    return found


def _bytes(given: float | None, unit: int) -> int | None:
    return None if given is None else int(given * unit)


def _job(token: ClientToken, given: str | None) -> str:
    which = token.job or given
    if which is None:
        raise ConfigError("this token is valid for any job: give the job with --job ID", field="job")
    if given not in (None, which):
        raise ConfigError(f"this token is for job {which}, not for {given}: omit --job", field="job")
    if not JOB_ID.fullmatch(which):
        raise ConfigError(
            f"job is {which!r}: give the whole id of 26 letters (A-Z) and digits, as `rayps submit` prints it",
            field="job",
        )
    return which


def _name(token: ClientToken, given: str | None) -> str:
    if given is not None and not NAME.fullmatch(given):
        raise ConfigError(
            f"name is {given!r}: give at most 64 characters: letters (A-Z, a-z), digits, spaces and _ . -, with a "
            "letter or a digit first and last",
            field="name",
        )
    if given is not None and token.name not in (None, given):
        raise ConfigError(f"this token is for the client {token.name!r}, not for {given!r}: omit --name", field="name")
    who = given or token.name
    if who is None:
        raise ConfigError(
            "this token is valid for any client: give this client's name with --name, e.g. hospital-a", field="name"
        )
    return who


def token_text(given: str | None) -> str:
    """Return the text of a client's token: `given`, RAYPS_CLIENT_TOKEN, or what the file after an @ contains.

    Raises ConfigError if there is none.
    """
    source = "--token" if given else "RAYPS_CLIENT_TOKEN"
    text = read_token(given or os.environ.get("RAYPS_CLIENT_TOKEN", ""), source)
    if not text:
        raise ConfigError(
            "there is no token: set --token or RAYPS_CLIENT_TOKEN to the token that you received, or give a "
            "certificate with --member FILE",
            field="token",
        )
    return text

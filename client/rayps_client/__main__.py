"""`rayps-client`, or `python -m rayps_client`: take part in a federated job, without rayps on this machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import rayps_client
from rayps_client.client_options import PATIENCE, ClientOptions
from rayps_client.errors import RaypsError
from rayps_client.machine.terminal_text import plain
from rayps_client.machine.termination import EXIT_CODE, MESSAGE, Terminated, sigterm_raises
from rayps_client.members.membership_options import MembershipOptions

_EPILOG = (
    "Exit codes: 0 the job succeeded, also before this start; 1 it failed or was stopped; 2 this client's data, model "
    "or options cannot be used; 3 there is no such job; 4 the token was revoked, an order was not signed by the "
    "service, or the service did not answer for too long; 5 another process is this client; 130 Ctrl-C; 143 SIGTERM. "
    "Run the command again to continue."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code. Errors are at most three lines on stderr."""
    options = options_of(arguments)
    from rayps_client.command import run_client, show_statement
    from rayps_client.load_workload import trainer_of

    try:
        with sigterm_raises():
            if options.membership.show_statement:
                show_statement(options, _note)
                return 0
            return 0 if run_client(options, trainer_of, _note).succeeded else 1
    except RaypsError as error:
        _note("rayps-client: " + "\n".join([line for line in str(error).splitlines() if line.strip()][:3]))
        return error.exit_code
    except Terminated:
        _note(f"rayps-client: {MESSAGE}")
        return EXIT_CODE
    except KeyboardInterrupt:
        _note("rayps-client: interrupted")
        return 130


def options_of(arguments: Sequence[str] | None) -> ClientOptions:
    """Return the options in a command's arguments. Exits with code 2 if one is unknown."""
    parser = argparse.ArgumentParser(
        "rayps-client",
        description="Train on this machine's data in a federated job. Only parameters, counts and the mean loss leave "
        "this machine.",
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"rayps-client {rayps_client.__version__}")
    parser.add_argument("target", metavar="WORKLOAD", help="file.py:Class or module:Class")
    parser.add_argument("--url", help="the job service's address, https://... (RAYPS_URL)")
    parser.add_argument("--token", help="the token of `rayps token create`, or @FILE, or RAYPS_CLIENT_TOKEN")
    parser.add_argument("--name", help="this client's name, e.g. hospital-a, unless the token has one")
    parser.add_argument("--job", metavar="ID", help="the job, if the token is valid for any job")
    parser.add_argument("--data", metavar="FILE", help="a Parquet file or folder in place of that of data()")
    parser.add_argument("--state", type=Path, metavar="DIR", help="this client's folder (below ~/.rayps/clients)")
    parser.add_argument(
        "--patience",
        type=_seconds,
        default=PATIENCE,
        metavar="SECONDS",
        help="how long to wait for a service that does not answer",
    )
    parser.add_argument("--device", default="cpu", help="the device to train on: cpu, cuda")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a parameter of the workload")
    parser.add_argument("--certificate", type=Path, metavar="FILE", help="the only certificates (PEM) that are trusted")
    parser.add_argument(
        "--pin", action="append", default=[], metavar="SHA256", help="the hash of the service's certificate"
    )
    parser.add_argument("--proxy", metavar="URL", help="the proxy; by default HTTPS_PROXY and NO_PROXY decide")
    parser.add_argument(
        "--between", action="append", default=[], metavar="HH:MM-HH:MM", help="hours (local time), e.g. 22:00-06:00"
    )
    parser.add_argument("--on-charge", action="store_true", help="only while the machine does not use its battery")
    parser.add_argument("--cpus", type=int, metavar="N", help="use N processors at most")
    parser.add_argument("--memory", type=float, metavar="MB", help="refuse rounds that need more memory than this")
    parser.add_argument("--traffic", type=float, metavar="MB", help="send and receive at most this much a day")
    parser.add_argument("--rate", type=float, metavar="KB/S", help="send and receive at most this much a second")
    parser.add_argument(
        "--peers", type=Path, metavar="FILE", help="the keys of all clients, by which they check each other"
    )
    _add_membership(parser)
    found = vars(parser.parse_args(arguments))
    from rayps_client.command import assignments_of

    try:
        params = assignments_of(found.pop("set"))
    except RaypsError as error:
        parser.error(str(error))
    pins = found.pop("pin")
    membership = MembershipOptions(**{name: found.pop(name) for name in MembershipOptions.__dataclass_fields__})
    return ClientOptions(**found, pins=pins, params=params, membership=membership)


def _add_membership(parser: argparse.ArgumentParser) -> None:
    """Add the options of a member of a federation."""
    add = parser.add_argument
    add("--member", type=Path, metavar="FILE", help="this institution's certificate (PEM), beside or without a token")
    add("--member-key", type=Path, metavar="FILE", help="its private key (PEM); by default NAME.key beside NAME.pem")
    add(
        "--service-key", metavar="FINGERPRINT", help="the service's key, if there is no token (`rayps members service`)"
    )
    add("--members-ca", type=Path, metavar="FILE", help="as --peers, with the certificates of this authority as keys")
    add("--members-revoked", type=Path, metavar="FILE", help="the certificates that this authority has revoked")
    add("--accept-statement", metavar="HASH|FILE", help="follow orders with this data-use statement only, and sign it")
    add("--show-statement", action="store_true", help="show the job's data-use statement and its hash, and end")


def _seconds(text: str) -> float:
    value = float(text)
    if value < 0:
        raise argparse.ArgumentTypeError("give a number of seconds, at least 0")
    return value


def _note(text: str) -> None:
    sys.stderr.write(f"{plain(text)}\n")  # it may quote the service
    sys.stderr.flush()


if __name__ == "__main__":
    raise SystemExit(main())

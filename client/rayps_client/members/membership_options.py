"""The options by which a client takes part as a member of a federation, of `rayps client` and `rayps-client`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from rayps_client.errors import ConfigError
from rayps_client.members.certified_keys import CertifiedKeys
from rayps_client.members.consent import accepted_hash
from rayps_client.members.member_certificates import MembersCa
from rayps_client.members.member_key import MemberKey
from rayps_client.members.revocations import Revocations
from rayps_client.members.signed_requests import SignedRequests

FINGERPRINT = "sha256:"  # before a fingerprint on the command line, which could begin with a - otherwise
_FORM = re.compile(r"[A-Za-z0-9_-]{43}")  # a SHA-256 in base64
_HEX = re.compile(r"[0-9A-Fa-f:]{64,95}")


def service_fingerprint(given: str) -> str:
    """Return the fingerprint in the option --service-key, without its prefix.

    Raises ConfigError if it has another form than `rayps members service` shows.
    """
    text = given.strip().removeprefix(FINGERPRINT)
    if _FORM.fullmatch(text):
        return text
    shape = "a hash in hex, as --pin takes it," if _HEX.fullmatch(text) else f"{len(text)} characters"
    raise ConfigError(
        f"--service-key is no fingerprint of a service's key: {shape} after {FINGERPRINT}, and it has 43 letters, "
        "digits, - and _.\n`rayps members service` shows it where the service runs",
        field="service_key",
    )


@dataclass(frozen=True, slots=True)
class MembershipOptions:
    """The options of the command. None means that an option is not given."""

    member: Path | None = None  # this client's certificate (PEM)
    member_key: Path | None = None  # its private key; None: NAME.key beside NAME.pem
    service_key: str | None = None  # the fingerprint of the service's key, if there is no token that has it
    members_ca: Path | None = None  # the authorities whose certificates other clients must have in secure rounds
    members_revoked: Path | None = None  # the revoked ones of these certificates
    accept_statement: str | None = None  # the hash of the accepted data-use statement, or a file with its text
    show_statement: bool = False  # show the job's statement and end

    @property
    def service(self) -> str | None:
        """The fingerprint of the service's key, without its prefix. Raises ConfigError if it has another form."""
        return None if self.service_key is None else service_fingerprint(self.service_key)

    def load(self, token: str | None) -> Membership:
        """Read the files. `token`: the text of the client's token, if it has one.

        Raises:
            ConfigError: a file cannot be read, or an option lacks another.
        """
        if self.member is None:
            for name in ("member_key", "members_ca", "accept_statement"):
                if getattr(self, name) is not None:
                    raise ConfigError(
                        f"--{name.replace('_', '-')} needs a certificate: give the file that the federation's "
                        "authority has issued with --member FILE",
                        field=name,
                    )
        if token is None and self.member is not None and self.service_key is None:
            raise ConfigError(
                "without a token the service must be known by its key: give --service-key FINGERPRINT, which "
                "`rayps members service` shows where the service runs",
                field="service_key",
            )
        if self.members_revoked is not None and self.members_ca is None:
            raise ConfigError("--members-revoked needs the authority: give --members-ca FILE", field="members_ca")
        key = None if self.member is None else MemberKey.load(self.member, self.member_key)
        accepted = None if self.accept_statement is None else accepted_hash(self.accept_statement)
        return Membership(key, accepted, self._peers(key))

    def _peers(self, key: MemberKey | None) -> CertifiedKeys | None:
        if self.members_ca is None or key is None:
            return None
        trusted = MembersCa.load(self.members_ca)
        return CertifiedKeys(key, trusted, Revocations(self.members_revoked, trusted.authorities))


@dataclass(frozen=True, slots=True)
class Membership:
    """What the options have named: this client's key, the accepted statement's hash, and the keys of the others."""

    key: MemberKey | None = None
    accepted: str | None = None
    peers: CertifiedKeys | None = None

    def auth(self, service: str) -> SignedRequests | None:
        """Return what signs the requests to the service with this fingerprint; None without a certificate."""
        return None if self.key is None else SignedRequests(self.key, service)

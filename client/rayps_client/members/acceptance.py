"""Acceptances: a member's signature, for each update that it sends, that it agrees to the job's data-use statement.

A statement is a text: purpose, legal basis, data used, retention, contact. Its SHA-256 hash is in every signed order of
the job. Before a client sends an update, it signs what it agrees to and what it sends: the hashes of the statement, of
the parameters from which it has trained, and of the update. Each acceptance names the hash of the one before, so that
none can be left out or changed later without a trace (except at the end, for which the service's receipts are kept).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Self

from rayps_client.errors import Unauthorized
from rayps_client.exchange.signed_orders import bytes_of, text_of
from rayps_client.members.member_certificates import MemberCertificate, MembersCa
from rayps_client.members.member_key import MemberKey
from rayps_client.values import Json, JsonObject

_DOMAIN = b"rayps: a member accepts a data-use statement, 1\n"


def statement_hash(statement: str | bytes) -> str:
    """Return the SHA-256 hash of a statement, in hex, as `sha256sum` prints it for the file."""
    return hashlib.sha256(statement.encode() if isinstance(statement, str) else statement).hexdigest()


@dataclass(frozen=True, slots=True)
class AcceptanceFacts:
    """What a member agrees to for one update."""

    job: str
    client: int  # the client's number
    name: str
    serial: int  # the order's number
    round: int
    statement: str  # SHA-256 of the statement
    parameters: str  # SHA-256 of the parameters from which the client has trained
    sent: str  # SHA-256 of the update; in a secure round, of the masked update
    time: float  # seconds since the epoch, by the client's clock
    previous: str  # SHA-256 of the text of this client's acceptance before; "" for the first one

    def text(self) -> str:
        """Return the canonical text, which is signed."""
        return json.dumps({"kind": "acceptance", **asdict(self)}, sort_keys=True, separators=(",", ":"))

    @classmethod
    def read(cls, text: str) -> Self:
        """Parse what `text` returned. Raises ValueError if it has another form."""
        found = json.loads(text)
        if not isinstance(found, dict) or found.pop("kind", None) != "acceptance":
            raise ValueError("it is not an acceptance")
        kinds: dict[str, type | tuple[type, ...]] = {"client": int, "serial": int, "round": int, "time": (int, float)}
        if found.keys() != set(cls.__dataclass_fields__) or not all(
            isinstance(value, kinds.get(key, str)) and not isinstance(value, bool) for key, value in found.items()
        ):
            raise ValueError("its fields are not those of an acceptance: use the same version of rayps")
        return cls(**found)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """A signed acceptance, with the certificate of the key that has signed it."""

    text: str
    certificate: bytes  # DER
    signature: bytes

    @classmethod
    def sign(cls, facts: AcceptanceFacts, key: MemberKey) -> Self:
        """Sign what a member agrees to."""
        text = facts.text()
        return cls(text, key.member.der, key.sign(_DOMAIN + text.encode()))

    @property
    def digest(self) -> str:
        """The SHA-256 of the text, by which the next acceptance names this one."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def facts(self) -> AcceptanceFacts:
        """Return what was signed. Raises ValueError if the text has another form."""
        return AcceptanceFacts.read(self.text)

    def checked(self) -> tuple[AcceptanceFacts, MemberCertificate]:
        """Return what was signed and by whom, after checking the signature.

        Raises:
            Unauthorized: the signature is wrong, or the certificate is for another name. Not checked: whether the
                certificate is trusted.
        """
        try:
            facts = self.facts()
        except ValueError as error:
            raise _refused(f"the acceptance cannot be read: {error}") from error
        member = MemberCertificate.read(self.certificate)
        if not member.verify(_DOMAIN + self.text.encode(), self.signature):
            raise _refused("the signature is not that of the certificate's key: the acceptance was changed")
        if member.name != facts.name:
            raise _refused(f"it is of {facts.name}, and is signed with the certificate of {member.name}")
        return facts, member

    def to_json(self) -> JsonObject:
        """Return the acceptance as JSON-ready data."""
        return {"text": self.text, "certificate": text_of(self.certificate), "signature": text_of(self.signature)}

    @classmethod
    def of_json(cls, found: Mapping[str, Json]) -> Self:
        """Read what `to_json` returned. Raises ValueError if it has another form."""
        text, certificate, signature = (found.get(key) for key in ("text", "certificate", "signature"))
        if not isinstance(text, str) or not isinstance(certificate, str) or not isinstance(signature, str):
            raise ValueError("text, certificate or signature is missing")
        return cls(text, bytes_of(certificate), bytes_of(signature))


@dataclass(frozen=True, slots=True)
class CheckedAcceptance:
    """An acceptance of a record, and what is wrong with it ("" for nothing)."""

    acceptance: Acceptance
    wrong: str


def check_record(
    record: Iterable[Acceptance], statement: str | None, trusted: MembersCa | None, job: str | None = None
) -> list[CheckedAcceptance]:
    """Check the acceptances of one client in one job, in the order of the record.

    `statement`: the text that was accepted; None leaves it out. `trusted`: the authorities at the time; None leaves out
    who has certified the keys. `job`: the job that all must be of; None: that of the first one.
    """
    found: list[CheckedAcceptance] = []
    last: tuple[AcceptanceFacts, str] | None = None
    for acceptance in record:
        try:
            facts, member = acceptance.checked()
            wrong = _wrong(facts, last, statement, job)
            if trusted is not None:
                trusted.check(member, facts.time)
            last = facts, acceptance.digest
        except Unauthorized as error:
            wrong = error.message
        found.append(CheckedAcceptance(acceptance, wrong))
    return found


def _wrong(
    facts: AcceptanceFacts, last: tuple[AcceptanceFacts, str] | None, statement: str | None, job: str | None
) -> str:
    """Return what is wrong with an acceptance after the one before it, or ""."""
    if facts.job != (job or (last[0].job if last else facts.job)):
        return f"it is of job {facts.job}"
    if statement is not None and facts.statement != statement_hash(statement):
        return f"it accepts the statement {facts.statement[:16]}, not the given one ({statement_hash(statement)[:16]})"
    if facts.previous != (last[1] if last else ""):
        return "the acceptance before it is missing, or was changed"
    if last is not None and (
        facts.serial < last[0].serial or (facts.client, facts.name) != (last[0].client, last[0].name)
    ):
        return "it does not follow the one before: an older order, or another client"
    return ""


def _refused(why: str) -> Unauthorized:
    return Unauthorized(why, status=401, code="acceptance_refused")

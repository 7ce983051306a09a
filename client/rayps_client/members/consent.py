"""A client's consent to a job's data-use statement: which one it has accepted, and its signature for each update."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rayps_client.errors import ConfigError, Unauthorized
from rayps_client.machine.private_file import private_write
from rayps_client.members.acceptance import Acceptance, AcceptanceFacts, statement_hash
from rayps_client.members.acceptance_file import AcceptanceFile
from rayps_client.members.member_key import MemberKey
from rayps_client.secure.service_stages import Connection
from rayps_client.values import JsonObject

RECORD = "statements.jsonl"  # in the client's folder
TEXT = "statement.txt"  # the accepted statement, beside the record
_MOST_SENT = 100  # acceptances in one request
_HASH = re.compile(r"[0-9a-f]{64}")


class Consent:
    """The consent of one client in one job. Without `accepted`, the client follows no order that has a statement."""

    def __init__(
        self, folder: Path, connection: Connection, member: MemberKey | None = None, accepted: str | None = None
    ) -> None:
        """`folder`: the client's folder. `accepted`: the hash of the accepted statement."""
        self._folder, self._connection, self._member, self._accepted = folder, connection, member, accepted
        self._record = AcceptanceFile(folder / RECORD)

    def check(self, statement: str | None) -> None:
        """Check that this client has accepted a statement, given by its hash; None: there is none.

        Raises:
            Unauthorized: it has accepted another one, or none.
        """
        if statement == self._accepted:
            return
        if statement is None:
            why = f"the job has no data-use statement, and this client has accepted {self._accepted}: it sends nothing"
            way = "ask whoever has submitted the job for its statement, or leave --accept-statement out"
        else:
            has = "none" if self._accepted is None else self._accepted
            why = f"the job's data-use statement is {statement}, and this client has accepted {has}: it sends nothing"
            way = "read it with --show-statement; if you agree, start with --accept-statement " + statement
        raise Unauthorized(f"{why}\n{way}", code="statement")

    def keep_text(self, job: str) -> None:
        """Store the text of the accepted statement in the client's folder.

        Raises:
            Unauthorized: the service's text is not the accepted one. ConfigError: this client has no certificate.
        """
        if self._accepted is None:
            return
        if self._member is None:
            raise ConfigError(
                "--accept-statement needs a certificate, whose key signs the acceptances: give --member FILE",
                field="member",
            )
        path = self._folder / TEXT
        if path.exists() and statement_hash(path.read_bytes()) == self._accepted:
            return
        text = fetch_statement(self._connection, job)
        self.check(None if text is None else statement_hash(text))
        if text is not None:
            private_write(path, text)

    def record(
        self,
        order: Mapping[str, Any],
        sent: bytes,
        headers: Mapping[str, str],
        verify: Callable[[str, str], Mapping[str, Any]],
    ) -> None:
        """Sign that `sent` goes to the service under the order's statement, and give the signature to the service.

        `headers` name this client in requests; `verify` checks the service's signature of a text and returns the facts
        in it. An order without a statement needs nothing.

        Raises:
            Unauthorized: the statement was not accepted, or the service's receipt is not for this acceptance.
            Conflict: the round is closed.
        """
        statement = order.get("statement")
        self.check(statement)
        if statement is None or self._member is None:
            return
        before = self._record.acceptances()
        facts = AcceptanceFacts(
            order["job"],
            order["client"],
            order["name"],
            order["serial"],
            order["round"],
            statement,
            order["parameters"]["sha256"],
            hashlib.sha256(sent).hexdigest(),
            round(time.time(), 3),
            before[-1].digest if before else "",
        )
        acceptance = Acceptance.sign(facts, self._member)
        self._record.add([acceptance])
        body: JsonObject = {"acceptances": [each.to_json() for each in self._record.unconfirmed()[-_MOST_SENT:]]}
        path = f"/api/v1/client/rounds/{facts.serial}/acceptances"
        found = self._connection.call("POST", path, json=body, headers=headers).json()
        for each in found["receipts"]:
            receipt = verify(str(each["receipt"]), str(each["signature"]))
            if receipt.get("kind") != "receipt" or receipt.get("job") != facts.job:
                raise Unauthorized("the service's receipt is not for an acceptance of this job", code="refused")
            self._record.confirm(str(each["receipt"]), str(each["signature"]))
        if any(each.digest == acceptance.digest for each in self._record.unconfirmed()):
            raise Unauthorized("the service has given no receipt for this client's acceptance", code="refused")


def accepted_hash(given: str) -> str:
    """Return the hash that --accept-statement names: 64 hex digits, or that of a file.

    Raises:
        ConfigError: it is neither.
    """
    text = given.strip().lower().removeprefix("sha256:")
    if _HASH.fullmatch(text):
        return text
    try:
        return statement_hash(Path(given).expanduser().read_bytes())
    except OSError as error:
        raise ConfigError(
            f"accept_statement is {given!r:.200}, which is neither a hash of 64 hex digits nor a file that can be "
            "read: read the job's statement with --show-statement, which shows its hash",
            field="accept_statement",
        ) from error


def fetch_statement(connection: Connection, job: str) -> str | None:
    """Return the job's statement, as the service shows it; None if the job has none."""
    found = connection.call("GET", "/api/v1/client/statement", params={"job": job}).json()["statement"]
    return None if found is None else str(found)


def shown(statement: str | None) -> str:
    """Return a job's statement as text for a person, with the option that accepts it."""
    if statement is None:
        return "this job has no data-use statement"
    digest = statement_hash(statement)
    return f"{statement.rstrip()}\n\nSHA-256 {digest}\nto accept this statement: --accept-statement {digest}"

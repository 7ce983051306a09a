"""The record of a client's acceptances: a file to which lines are only added, on the client and at the service.

Each line is JSON: an acceptance (`text`, `certificate`, `signature`), or the service's receipt for one (`receipt`,
`signature`). A line is on the disk before anything is sent. If the machine fails while a line is written, its torn end
is dropped when the next line is added: what it said was not sent yet.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rayps_client.errors import DataError, Unauthorized
from rayps_client.exchange.signed_orders import fingerprint, verified
from rayps_client.members.acceptance import Acceptance
from rayps_client.values import Json, JsonObject


class AcceptanceFile:
    """The record of one client in one job."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def acceptances(self) -> list[Acceptance]:
        """Return all acceptances, the oldest first. Raises DataError if a whole line cannot be read."""
        return read_lines(self.path)[0]

    def unconfirmed(self) -> list[Acceptance]:
        """Return the acceptances for which the file has no receipt of the service, the oldest first."""
        found, receipts = read_lines(self.path)
        return [each for each in found if each.digest not in receipts]

    def add(self, new: Sequence[Acceptance]) -> list[Acceptance]:
        """Add those acceptances that the file does not have yet; return them."""
        with _Locked(self.path) as descriptor:
            known = {each.digest for each in self.acceptances()}
            added = [each for each in new if each.digest not in known]
            _write_lines(descriptor, [each.to_json() for each in added])
        return added

    def confirm(self, receipt: str, signature: str) -> None:
        """Add the service's receipt for an acceptance, after its signature was checked."""
        with _Locked(self.path) as descriptor:
            _write_lines(descriptor, [{"receipt": receipt, "signature": signature}])


@dataclass(frozen=True, slots=True)
class Receipt:
    """The service's receipt for an acceptance."""

    text: str
    signature: str

    def is_valid(self, service: str | None) -> bool:
        """Return whether the service has signed the receipt.

        `service`: the fingerprint of its key; None: any key will do, and the receipt is only known to be unchanged.
        """
        try:
            public = str(json.loads(self.text)["public_key"])
            verified(self.text, self.signature, public, service or fingerprint(public))
        except (Unauthorized, ValueError, KeyError, TypeError):
            return False
        return True


def read_lines(path: Path) -> tuple[list[Acceptance], dict[str, Receipt]]:
    """Return the acceptances in a file, and from an acceptance's digest to its receipt; a torn last line is left out.

    Raises:
        DataError: a line has another form.
    """
    found: list[Acceptance] = []
    receipts: dict[str, Receipt] = {}
    for count, line in enumerate(_whole(path).splitlines(), 1):
        try:
            facts: dict[str, Json] = json.loads(line)
            if "receipt" in facts:
                receipt = Receipt(str(facts["receipt"]), str(facts["signature"]))
                receipts[str(json.loads(receipt.text)["acceptance"])] = receipt
            else:
                found.append(Acceptance.of_json(facts))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path}, line {count} is not a line of a record of acceptances: {error}") from error
    return found, receipts


def receipt_text(acceptance: Acceptance, time: float, public_key: str) -> str:
    """Return the canonical text of the service's receipt for an acceptance, which it signs like orders with its key."""
    facts: JsonObject = {
        "kind": "receipt",
        "job": acceptance.facts().job,
        "time": time,
        "acceptance": acceptance.digest,
        "public_key": public_key,
    }
    return json.dumps(facts, sort_keys=True, separators=(",", ":"))


class _Locked:
    """The file, open for adding and locked; a torn last line is cut off."""

    def __init__(self, path: Path) -> None:
        self._path, self._descriptor = path, -1

    def __enter__(self) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        whole = len(_whole(self._path))
        if os.fstat(self._descriptor).st_size > whole:
            os.ftruncate(self._descriptor, whole)
        return self._descriptor

    def __exit__(self, *error: object) -> None:
        os.close(self._descriptor)


def _whole(path: Path) -> bytes:
    """Return the whole lines of a file; b"" if there is none."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return b""
    return raw[: raw.rfind(b"\n") + 1]


def _write_lines(descriptor: int, lines: Sequence[JsonObject]) -> None:
    raw = b"".join(json.dumps(line, sort_keys=True).encode() + b"\n" for line in lines)
    while raw:
        raw = raw[os.write(descriptor, raw) :]
    os.fsync(descriptor)

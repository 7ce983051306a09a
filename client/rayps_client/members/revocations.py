"""Which certificates were revoked: a file that is read again when it changes, without a restart.

The file is a certificate revocation list of the authority (PEM, RFC 5280), or text with one serial number a line, in
hex as `openssl x509 -serial` prints it; a line may be empty or a # comment. A file without any text is refused: it
may be a copy that was cut off.

A list of the authority says until when it is current. After that date it still holds, and a warning is logged once:
what the authority has revoked since then is unknown here.
"""

from __future__ import annotations

import datetime
import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from rayps_client.errors import ConfigError
from rayps_client.members.member_certificates import serial_text

log = logging.getLogger(__name__)

_CRL = b"-----BEGIN X509 CRL-----"
_SERIAL = re.compile(r"[0-9a-f]{1,40}")
_Stamp = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class RevokedList:
    """What a file says: the serial numbers, and when the authority was to issue the next list (None: not said)."""

    serials: frozenset[str] = frozenset()
    due: datetime.datetime | None = None


class Revocations:
    """The serial numbers of revoked certificates. If the file cannot be read any more, what was read last holds."""

    def __init__(
        self, path: Path | None, authorities: Sequence[x509.Certificate], clock: Callable[[], float] = time.time
    ) -> None:
        """Read the file. `path` None: nothing is revoked.

        Raises ConfigError if the file cannot be read, or is a list that no authority has signed.
        """
        self._path, self._authorities, self._clock = path, authorities, clock
        self._lock, self._stamp = threading.Lock(), _stamp(path)
        self._list = RevokedList() if path is None else read_revoked(path, authorities)
        self._warned: RevokedList | None = None

    def revoked(self) -> frozenset[str]:
        """Return the serial numbers of all revoked certificates, as the file says now."""
        path = self._path
        if path is None:
            return self._list.serials
        with self._lock:
            stamp = _stamp(path)
            if stamp != self._stamp:
                self._stamp = stamp
                try:
                    self._replace(read_revoked(path, self._authorities))
                except ConfigError as error:
                    log.error("%s; the list that was read before still holds", error.message)
            self._warn_if_late(path)
            return self._list.serials

    def _replace(self, found: RevokedList) -> None:
        before, self._list = self._list, found
        added, removed = found.serials - before.serials, before.serials - found.serials
        log.info("%s: %d certificates are revoked, of which %d are new", self._path, len(found.serials), len(added))
        if removed:
            log.warning(
                "%s: %d certificates that were revoked are accepted again: %s",
                self._path,
                len(removed),
                ", ".join(sorted(removed)),
            )

    def _warn_if_late(self, path: Path) -> None:
        found = self._list
        if found.due is not None and found.due.timestamp() < self._clock() and self._warned is not found:
            self._warned = found
            log.warning(
                "the list of revoked certificates %s was to be replaced by %s: certificates that were revoked after "
                "it was issued are accepted; fetch the authority's newest list",
                path,
                found.due.isoformat(timespec="seconds"),
            )


def read_revoked(path: Path, authorities: Sequence[x509.Certificate]) -> RevokedList:
    """Return what a file says.

    Raises:
        ConfigError: the file cannot be read, has a line that is no serial number, or no authority has signed the list.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"the list of revoked certificates {path} cannot be read: {error.strerror or error}",
            field="members_revoked",
        ) from error
    if not raw.strip():
        raise ConfigError(
            f"the list of revoked certificates {path} is empty: if none is revoked, write a line that begins with #",
            field="members_revoked",
        )
    if raw.lstrip().startswith(_CRL):
        return _of_list(path, raw, authorities)
    found = set[str]()
    for count, line in enumerate(raw.decode("utf-8", "replace").splitlines(), 1):
        text = line.partition("#")[0].strip().lower().removeprefix("serial=").removeprefix("0x").replace(":", "")
        if not text:
            continue
        if not _SERIAL.fullmatch(text):
            raise ConfigError(
                f"{path}, line {count}: {line!r:.100} is not a serial number: give hex digits, as `openssl x509 -noout "
                "-serial` prints them",
                field="members_revoked",
            )
        found.add(text.lstrip("0") or "0")
    return RevokedList(frozenset(found))


def _of_list(path: Path, raw: bytes, authorities: Sequence[x509.Certificate]) -> RevokedList:
    try:
        found = x509.load_pem_x509_crl(raw)
    except ValueError as error:
        raise ConfigError(
            f"{path} is not a revocation list that can be read: {error}", field="members_revoked"
        ) from error
    if not any(_signed(found, each) for each in authorities):
        raise ConfigError(
            f"the revocation list {path} is not signed by an authority of this federation: give the list that belongs "
            "to --members-ca",
            field="members_revoked",
        )
    return RevokedList(frozenset(serial_text(each.serial_number) for each in found), found.next_update_utc)


def _signed(found: x509.CertificateRevocationList, authority: x509.Certificate) -> bool:
    key = authority.public_key()
    try:
        return found.issuer == authority.subject and found.is_signature_valid(key)  # type: ignore[arg-type]
    except (TypeError, ValueError, InvalidSignature):
        return False


def _stamp(path: Path | None) -> _Stamp | None:
    if path is None:
        return None
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_mtime_ns, facts.st_size, facts.st_ino

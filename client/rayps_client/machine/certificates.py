"""Which certificates of a service a client trusts: those of a file, or those with a known SHA-256 hash."""

from __future__ import annotations

import hashlib
import re
import secrets
import ssl
from collections.abc import Collection
from pathlib import Path

from rayps_client.errors import ConfigError

_PIN = re.compile(r"[0-9a-f]{64}")


def trusted(certificate: Path | None, pins: Collection[str] = ()) -> ssl.SSLContext | None:
    """Return the TLS settings of a client, or None for those of every browser: the certificates of known authorities.

    `certificate`: a file with the only certificates that are trusted (PEM): the service's own, or its authority's.
    `pins`: SHA-256 hashes of the service's certificate (of its DER form, in hex, as `openssl x509 -fingerprint
    -sha256` prints it). With `pins` alone, neither the name nor the authority of the certificate counts.

    Raises:
        ConfigError: the file cannot be read, or a pin is not such a hash.
    """
    known = frozenset(pin_of(pin) for pin in pins)
    if certificate is None and not known:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # checks certificates and names
    if certificate is not None:
        try:
            context.load_verify_locations(cafile=str(certificate.expanduser()))
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"{certificate} has no certificates that can be read ({error}): give a PEM file", field="certificate"
            ) from error
    else:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE  # the pin is checked in its place, at the end of each handshake
    if known:
        context.sslsocket_class = _pinned(known)
    return context


def pin_of(text: str) -> str:
    """Return a pin as 64 hex digits. Raises ConfigError if the text is not a SHA-256 hash."""
    found = text.strip().lower().removeprefix("sha256:").removeprefix("sha256 fingerprint=").replace(":", "")
    if not _PIN.fullmatch(found):
        raise ConfigError(
            f"pin is {text!r}: give the SHA-256 hash of the service's certificate, 64 hex digits; `openssl x509 -in "
            "cert.pem -noout -fingerprint -sha256` prints it",
            field="pin",
        )
    return found


def _pinned(known: frozenset[str]) -> type[ssl.SSLSocket]:
    """Return a class of TLS sockets that refuse a peer whose certificate has none of these hashes."""

    class PinnedSocket(ssl.SSLSocket):
        def do_handshake(self, block: bool = False) -> None:
            super().do_handshake(block)
            found = hashlib.sha256(self.getpeercert(binary_form=True) or b"").hexdigest()
            if not any(secrets.compare_digest(found, pin) for pin in known):
                raise ssl.SSLCertVerificationError(
                    f"its SHA-256 hash is {found}, and --pin names {', '.join(sorted(known))}"
                )

    return PinnedSocket

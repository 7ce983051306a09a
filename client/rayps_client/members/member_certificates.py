"""The certificates of a federation's members, and which of them are trusted.

A member is an institution with a certificate (X.509, RFC 5280) that the federation's authority has issued. The
certificate's common name is the name of the client. Its key is Ed25519 (RFC 8032) or ECDSA on P-256 with SHA-256 (FIPS
186-5). A certificate is trusted if a certificate in the authority's file has issued it directly; an authority below
another one is trusted by its own certificate in that file.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeAlias

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from rayps_client.errors import ConfigError, Unauthorized
from rayps_client.exchange.signed_orders import NAME

PrivateKey: TypeAlias = Ed25519PrivateKey | ec.EllipticCurvePrivateKey
PublicKey: TypeAlias = Ed25519PublicKey | ec.EllipticCurvePublicKey
_ECDSA = ec.ECDSA(hashes.SHA256())
_CHECKED = (x509.BasicConstraints.oid, x509.KeyUsage.oid, x509.ExtendedKeyUsage.oid)  # extensions that may be critical
MOST_BYTES = 8000  # of a member's certificate


@dataclass(frozen=True, slots=True)
class MemberCertificate:
    """A certificate that has the form of a member's. Whether it is trusted, `MembersCa.check` says."""

    name: str  # the common name, which is the client's name
    certificate: x509.Certificate
    key: PublicKey

    @classmethod
    def of(cls, certificate: x509.Certificate) -> Self:
        """Return the member of a certificate. Raises Unauthorized if the certificate is not for a client."""
        names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        name = str(names[0].value) if len(names) == 1 else ""
        if not NAME.fullmatch(name):
            raise _refused(
                f"the certificate has no common name that is a client's name ({name!r:.100}): let the authority issue "
                "one for at most 64 letters, digits, spaces and _ . -"
            )
        key = certificate.public_key()
        if not isinstance(key, Ed25519PublicKey) and not (
            isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1)
        ):
            raise _refused(
                f"the certificate of {name} has another kind of key: let the authority certify an Ed25519 or "
                "a P-256 key"
            )
        try:
            _check_use(certificate, name)
        except (ValueError, x509.DuplicateExtension) as error:
            raise _refused(f"the certificate of {name} has extensions that cannot be read: {error}") from error
        return cls(name, certificate, key)

    @classmethod
    def read(cls, der: bytes) -> Self:
        """Read a certificate in DER form. Raises Unauthorized if it is none, or is not for a client."""
        try:
            if len(der) > MOST_BYTES:
                raise ValueError(f"it has {len(der)} bytes, and {MOST_BYTES} are allowed")
            return cls.of(x509.load_der_x509_certificate(der))
        except ValueError as error:
            raise _refused(f"the certificate cannot be read: {error}") from error

    @property
    def serial(self) -> str:
        """The serial number in hex, as `openssl x509 -serial` prints it, in small letters."""
        return serial_text(self.certificate.serial_number)

    @property
    def der(self) -> bytes:
        """The certificate in DER form."""
        return self.certificate.public_bytes(serialization.Encoding.DER)

    @property
    def ends(self) -> float:
        """The end of the certificate's validity, in seconds since the epoch."""
        return self.certificate.not_valid_after_utc.timestamp()

    def verify(self, text: bytes, signature: bytes) -> bool:
        """Return whether the certificate's key has signed `text`."""
        try:
            if isinstance(self.key, Ed25519PublicKey):
                self.key.verify(signature, text)
            else:
                self.key.verify(signature, text, _ECDSA)
        except InvalidSignature:
            return False
        return True


def _check_use(certificate: x509.Certificate, name: str) -> None:
    """Check that a certificate may sign for a client.

    Raises:
        Unauthorized: it may not. ValueError: an extension cannot be read.
    """
    for extension in certificate.extensions:
        if extension.critical and extension.oid not in _CHECKED:
            raise _refused(
                f"the certificate of {name} has a critical extension {extension.oid.dotted_string} that rayps does not "
                "know: let the authority issue one without it"
            )
        value = extension.value
        if isinstance(value, x509.BasicConstraints) and value.ca:
            raise _refused(
                f"the certificate of {name} is an authority's own: give the one that it has issued to {name}"
            )
        if isinstance(value, x509.KeyUsage) and not value.digital_signature:
            raise _refused(f"the certificate of {name} is not for signatures: it needs the key usage digitalSignature")
        if isinstance(value, x509.ExtendedKeyUsage) and ExtendedKeyUsageOID.CLIENT_AUTH not in value:
            raise _refused(f"the certificate of {name} is not for clients: it needs the extended key usage clientAuth")


class MembersCa:
    """The authorities whose members are trusted."""

    def __init__(self, authorities: list[x509.Certificate]) -> None:
        self.authorities = authorities

    @classmethod
    def load(cls, path: Path, field: str = "members_ca") -> Self:
        """Read the certificates in a PEM file.

        Raises:
            ConfigError: the file cannot be read, or has a certificate that is not an authority's.
        """
        try:
            found = x509.load_pem_x509_certificates(path.expanduser().read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{path} has no certificates that can be read ({error}): give the PEM file of the federation's "
                "authority (`rayps members ca` makes one)",
                field=field,
            ) from error
        for each in found:
            if not _is_authority(each):
                raise ConfigError(
                    f"{path} has a certificate that is not an authority's ({each.subject.rfc4514_string()}): give the "
                    "certificates of authorities only",
                    field=field,
                )
        return cls(found)

    def check(self, member: MemberCertificate, now: float) -> None:
        """Check that an authority has issued a certificate, and that it is valid at the time `now` (since the epoch).

        Raises:
            Unauthorized: it was not issued by these authorities, or is not valid at that time.
        """
        at = datetime.datetime.fromtimestamp(now, datetime.UTC)
        issuer = next((each for each in self.authorities if _issued(member.certificate, each)), None)
        if issuer is None:
            same = any(each.subject == member.certificate.issuer for each in self.authorities)
            raise _refused(
                f"the certificate of {member.name} was issued by {member.certificate.issuer.rfc4514_string()!r:.200}, "
                "which is not an authority of this federation"
                + (" (the federation's has the same name and another key)" if same else "")
                + ": ask it for a certificate"
            )
        for what, each in (("certificate", member.certificate), ("authority's certificate", issuer)):
            if at < each.not_valid_before_utc:
                raise _refused(
                    f"the {what} of {member.name} is not valid before {each.not_valid_before_utc:%Y-%m-%d %H:%M} UTC: "
                    "check the clock, or wait until then"
                )
            if at > each.not_valid_after_utc:
                raise _refused(
                    f"the {what} of {member.name} has expired at {each.not_valid_after_utc:%Y-%m-%d %H:%M} UTC: ask "
                    "the federation's authority for another"
                )


def _is_authority(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (x509.ExtensionNotFound, ValueError):
        return False


def _issued(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def sign_with(key: PrivateKey, text: bytes) -> bytes:
    """Return the signature of a text by a member's private key."""
    return key.sign(text) if isinstance(key, Ed25519PrivateKey) else key.sign(text, _ECDSA)


def serial_text(serial: int) -> str:
    """Return a serial number as text: hex digits without a prefix, in small letters."""
    return f"{serial:x}"


def _refused(why: str) -> Unauthorized:
    return Unauthorized(why, status=401, code="certificate_refused")

"""A member's own certificate and private key, from its PEM files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes

from rayps_client.errors import ConfigError, Unauthorized
from rayps_client.members.member_certificates import MemberCertificate, PrivateKey, sign_with

PASSPHRASE = "RAYPS_MEMBER_PASSPHRASE"  # the variable with the passphrase of an encrypted key


@dataclass(frozen=True, slots=True)
class MemberKey:
    """A certificate and the private key that belongs to it. The key never leaves this machine."""

    member: MemberCertificate
    private: PrivateKey

    @property
    def name(self) -> str:
        """The client's name."""
        return self.member.name

    def sign(self, text: bytes) -> bytes:
        """Return the signature of a text."""
        return sign_with(self.private, text)

    @classmethod
    def load(cls, certificate: Path, key: Path | None = None) -> Self:
        """Read a certificate and its key. Without `key`, the key is in the file NAME.key beside NAME.pem.

        Raises:
            ConfigError: a file cannot be read, or the key is not that of the certificate.
        """
        path = certificate.expanduser()
        try:
            member = MemberCertificate.of(x509.load_pem_x509_certificate(path.read_bytes()))
        except (OSError, ValueError, Unauthorized) as error:
            raise ConfigError(
                f"{certificate} has no certificate of a member ({error}): give the PEM file that the federation's "
                "authority has issued",
                field="member",
            ) from error
        beside = path.with_suffix(".key") if key is None else key.expanduser()
        private = read_private(beside, "give its PEM file with --member-key")
        if _public(private) != _public_of(member):
            raise ConfigError(
                f"the key in {beside} is not that of the certificate of {member.name}: give its key with --member-key",
                field="member_key",
            )
        return cls(member, private)


def read_private(path: Path, advice: str) -> PrivateKey:
    """Read a private key in PEM form, with the passphrase in RAYPS_MEMBER_PASSPHRASE if the key is encrypted.

    `advice`: how to give another key, for the error's text.

    Raises:
        ConfigError: the key cannot be read or is of another kind.
    """
    secret = os.environ.get(PASSPHRASE)  # an empty one is none
    try:
        found = _decrypted(path.read_bytes(), secret.encode() if secret else None)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{path} has no private key that can be read ({error}): {advice}; the passphrase of an encrypted key is in "
            f"{PASSPHRASE}",
            field="member_key",
        ) from error
    if isinstance(found, Ed25519PrivateKey):
        return found
    if isinstance(found, ec.EllipticCurvePrivateKey) and isinstance(found.curve, ec.SECP256R1):
        return found
    raise ConfigError(f"{path} has another kind of key: give an Ed25519 or a P-256 key", field="member_key")


def _decrypted(raw: bytes, secret: bytes | None) -> PrivateKeyTypes:
    """Return the key in a PEM text. A key that is not encrypted is read although a passphrase is set."""
    try:
        return serialization.load_pem_private_key(raw, secret)
    except TypeError:
        if secret is None:
            raise
        return serialization.load_pem_private_key(raw, None)


def _public(key: PrivateKey) -> bytes:
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_key().public_bytes(serialization.Encoding.DER, form)


def _public_of(member: MemberCertificate) -> bytes:
    return member.key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)

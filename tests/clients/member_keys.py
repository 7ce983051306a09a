"""Authorities and members for tests, in memory."""

from __future__ import annotations

import datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from rayps_client.members.member_certificates import MemberCertificate, MembersCa, PrivateKey
from rayps_client.members.member_key import MemberKey

NOW = 1_800_000_000.0
DAY = 86400.0


def at(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC)


def signing(key: PrivateKey) -> hashes.SHA256 | None:
    return None if isinstance(key, Ed25519PrivateKey) else hashes.SHA256()


class TestAuthority:
    """An authority whose certificates may be wrong in any way."""

    __test__ = False

    def __init__(self, name: str = "federation", *, now: float = NOW, days: float = 100.0, p256: bool = False) -> None:
        self.key: PrivateKey = ec.generate_private_key(ec.SECP256R1()) if p256 else Ed25519PrivateKey.generate()
        self.now, self.name = now, x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.certificate = self.sign(self.builder(self.name, self.key, 0, days), authority=True)
        self.trusted = MembersCa([self.certificate])

    def builder(self, subject: x509.Name, key: PrivateKey, begins: float, ends: float) -> x509.CertificateBuilder:
        made = x509.CertificateBuilder().subject_name(subject).issuer_name(self.name).public_key(key.public_key())
        begin, end = at(self.now + (begins - 1) * DAY), at(self.now + ends * DAY)
        return made.serial_number(x509.random_serial_number()).not_valid_before(begin).not_valid_after(end)

    def sign(self, made: x509.CertificateBuilder, *, authority: bool = False) -> x509.Certificate:
        made = made.add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        return made.sign(self.key, signing(self.key))

    def member(
        self,
        name: str,
        begins: float = 0,
        ends: float = 10,
        *,
        key: PrivateKey | None = None,
        more: tuple[x509.ExtensionType, ...] = (),
        authority: bool = False,
    ) -> MemberKey:
        """A member whose certificate is valid from a day before `begins` until `ends`, in days from now."""
        own = key or Ed25519PrivateKey.generate()
        made = self.builder(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), own, begins, ends)
        for extension in more:
            made = made.add_extension(extension, critical=True)
        return MemberKey(MemberCertificate.of(self.sign(made, authority=authority)), own)

    def revocation_list(self, *members: MemberKey) -> bytes:
        from cryptography.hazmat.primitives.serialization import Encoding

        made = x509.CertificateRevocationListBuilder().issuer_name(self.name)
        made = made.last_update(at(self.now)).next_update(at(self.now + DAY))
        for each in members:
            serial = each.member.certificate.serial_number
            entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(at(self.now))
            made = made.add_revoked_certificate(entry.build())
        return made.sign(self.key, signing(self.key)).public_bytes(Encoding.PEM)


CLIENTS_ONLY = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])
SERVERS_ONLY = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])

"""The authority of a federation: its key, the certificates that it issues, and its list of revoked ones.

    ca.pem          the authority's certificate, which everybody may have
    ca.key          its private key, mode 0600; encrypted if a passphrase is given
    issued/SERIAL.pem   each certificate that was issued
    revoked.pem     the revocation list (RFC 5280), signed anew with each revocation

An institution makes its key and its request itself; the key never leaves it.
"""

from __future__ import annotations

import datetime
import os
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from rayps_client.errors import ConfigError, Conflict, NotFound, Unauthorized
from rayps_client.exchange.signed_orders import NAME
from rayps_client.machine.private_file import private_write
from rayps_client.members.member_certificates import MemberCertificate, PrivateKey
from rayps_client.members.member_key import PASSPHRASE, read_private

_SLACK = datetime.timedelta(minutes=5)  # a certificate is valid from a little earlier on: clocks differ
_NAMES = (
    "give at most 64 characters: letters (A-Z, a-z), digits, spaces and _ . -, with a letter or a digit first and last"
)
_LIST_DAYS = 3650  # of the revocation list, which rayps reads whenever it changes


def create_authority(folder: Path, name: str, days: int) -> x509.Certificate:
    """Create an authority in an empty or new folder; return its certificate.

    Raises:
        Conflict: the folder has an authority.
    """
    if (folder / "ca.key").exists() or (folder / "ca.pem").exists():
        raise Conflict(f"{folder} has an authority already: give another folder", code="exists")
    (folder / "issued").mkdir(parents=True, exist_ok=True, mode=0o700)
    key, subject = Ed25519PrivateKey.generate(), _make_name(name)
    made = (
        _make_builder(subject, subject, days)
        .public_key(key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_make_usage(authority=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, None)
    )
    private_write(folder / "ca.key", _pem_of(key))
    _write(folder / "ca.pem", made)
    _write_list(folder, [])
    return made


def create_request(name: str, key: Path, request: Path) -> None:
    """Create a member's private key, and the request for its certificate, in two new files.

    Folders that do not exist are created, and only their owner can enter them.

    Raises:
        ConfigError: the name is not a client's name, or a folder cannot be created. Conflict: a file exists.
    """
    if not NAME.fullmatch(name):
        raise ConfigError(f"name is {name!r}: {_NAMES}", field="name")
    for path in (key, request):
        if path.exists():
            raise Conflict(f"{path} exists and is not overwritten: give another --to, or remove it", code="exists")
        _make_folder(path.parent)
    private = Ed25519PrivateKey.generate()
    private_write(key, _pem_of(private))
    asked = x509.CertificateSigningRequestBuilder().subject_name(_make_name(name)).sign(private, None)
    request.write_bytes(asked.public_bytes(serialization.Encoding.PEM))


def issue(folder: Path, request: Path, days: float, starts: datetime.datetime | None = None) -> MemberCertificate:
    """Issue the certificate that a request asks for, valid from `starts` (now) on; return it.

    Raises:
        ConfigError: the request or the authority's key cannot be read, or asks for something else.
        Conflict: a valid certificate of that name exists.
    """
    ca, key = _read_authority(folder)
    asked = _read_request(request)
    public = asked.public_key()
    made = (
        _make_builder(_make_name(_read_name(asked, request)), ca.subject, days, starts)
        .public_key(public)  # MemberCertificate checks its kind
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_make_usage(authority=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
        .sign(key, None if isinstance(key, Ed25519PrivateKey) else _hash())
    )
    try:
        member = MemberCertificate.of(made)
    except Unauthorized as error:
        raise ConfigError(f"{request}: {error.message}", field="request") from error
    for other in _list_valid(folder):
        if other.name == member.name and other.key != member.key:
            raise Conflict(
                f"{member.name} has a valid certificate with another key (serial number {other.serial}): revoke that "
                f"one first, with `rayps members revoke {folder} {other.serial}`",
                code="name_taken",
            )
    _write(folder / "issued" / f"{member.serial}.pem", made)
    return member


def read_requested_name(request: Path) -> str:
    """Return the name for which a request asks. Raises ConfigError if it cannot be read or is not a client's name."""
    return _read_name(_read_request(request), request)


def was_issued(folder: Path, path: Path) -> bool:
    """Return whether a file has a certificate that this authority has issued."""
    try:
        found = x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError):
        return False
    return any(each.certificate == found for each in list_issued(folder))


def others_of(folder: Path, member: MemberCertificate) -> list[MemberCertificate]:
    """Return the other certificates of a member's name that are valid now."""
    return [each for each in _list_valid(folder) if each.name == member.name and each.serial != member.serial]


def _list_valid(folder: Path) -> list[MemberCertificate]:
    """Return the certificates that an authority has issued and that are valid now, the oldest first."""
    return [each for each, ended in with_ends(folder) if ended is None]


def with_ends(folder: Path) -> list[tuple[MemberCertificate, str | None]]:
    """Return all certificates that an authority has issued, the oldest first, and why each is not valid any more.

    The reason is "revoked" or "expired", or None if the certificate is valid.
    """
    found, now = list_issued(folder), datetime.datetime.now(datetime.UTC)
    revoked = {serial for serial, _ in _read_revoked(folder)}
    return [(each, _end(each.certificate, revoked, now)) for each in found]


def _end(certificate: x509.Certificate, revoked: set[int], now: datetime.datetime) -> str | None:
    if certificate.serial_number in revoked:
        return "revoked"
    return "expired" if certificate.not_valid_after_utc < now else None


def _read_name(asked: x509.CertificateSigningRequest, request: Path) -> str:
    names = asked.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if not names:
        raise ConfigError(
            f"{request} has no common name (CN), which is the client's name: make the request with `rayps members "
            "request NAME`, or `openssl req -new ... -subj /CN=NAME`",
            field="request",
        )
    name = str(names[0].value)
    if not NAME.fullmatch(name):
        raise ConfigError(f"the common name (CN) in {request} is {name!r}: {_NAMES}", field="request")
    return name


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the folder {folder} cannot be created ({error.strerror}): give another --to", field="to"
        ) from error


def _read_request(request: Path) -> x509.CertificateSigningRequest:
    try:
        asked = x509.load_pem_x509_csr(request.read_bytes())
        if not asked.is_signature_valid:
            raise ValueError("its signature is wrong")
    except (OSError, ValueError, InvalidSignature) as error:
        raise ConfigError(
            f"{request} is not a request for a certificate ({error}): give the file that `rayps members request` or "
            "`openssl req` has made",
            field="request",
        ) from error
    return asked


def revoke(folder: Path, which: str) -> list[MemberCertificate]:
    """Revoke the certificate with a serial number, or all of a name; return those that were revoked now.

    Raises:
        NotFound: no such certificate was issued.
    """
    wanted = which.strip().lower().replace(":", "").lstrip("0")
    found = [each for each in list_issued(folder) if each.name == which or each.serial == wanted]
    if not found:
        raise NotFound(f"{folder} has issued no certificate {which!r:.100}: `rayps members ls {folder}` lists them")
    known = _read_revoked(folder)
    before = {serial for serial, _ in known}
    new = [each for each in found if each.certificate.serial_number not in before]
    now = datetime.datetime.now(datetime.UTC)
    _write_list(folder, [*known, *((each.certificate.serial_number, now) for each in new)])
    return new


def list_issued(folder: Path) -> list[MemberCertificate]:
    """Return all certificates that an authority has issued, the oldest first.

    Raises:
        ConfigError: the folder has no authority.
    """
    check_authority(folder)
    paths = (folder / "issued").glob("*.pem")
    found = [MemberCertificate.of(x509.load_pem_x509_certificate(path.read_bytes())) for path in paths]
    return sorted(found, key=lambda each: (each.certificate.not_valid_before_utc, each.serial))


def check_authority(folder: Path) -> x509.Certificate:
    """Return the certificate of the authority in a folder. Raises ConfigError if it has none."""
    try:
        return x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder} has no authority ({error}): make one with `rayps members ca {folder}`", field="folder"
        ) from error


def _read_authority(folder: Path) -> tuple[x509.Certificate, PrivateKey]:
    return check_authority(folder), read_private(folder / "ca.key", "it is to be the authority's key")


def _read_revoked(folder: Path) -> list[tuple[int, datetime.datetime]]:
    path = folder / "revoked.pem"
    try:
        found = x509.load_pem_x509_crl(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} is not the list of revoked certificates ({error}): restore it, e.g. from the copy that "
            "`rayps serve --members-revoked` reads",
            field="folder",
        ) from error
    return [(each.serial_number, each.revocation_date_utc) for each in found]


def _write_list(folder: Path, revoked: list[tuple[int, datetime.datetime]]) -> None:
    ca, key = _read_authority(folder)
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateRevocationListBuilder().issuer_name(ca.subject).last_update(now)
    builder = builder.next_update(now + datetime.timedelta(days=_LIST_DAYS))
    for serial, at in revoked:
        each = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(at).build()
        builder = builder.add_revoked_certificate(each)
    _write(folder / "revoked.pem", builder.sign(key, None if isinstance(key, Ed25519PrivateKey) else _hash()))


def _make_builder(
    subject: x509.Name, issuer: x509.Name, days: float, starts: datetime.datetime | None = None
) -> x509.CertificateBuilder:
    begins = starts or datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins - _SLACK)
        .not_valid_after(begins + datetime.timedelta(days=days))
    )


def _make_usage(authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _make_name(name: str) -> x509.Name:
    try:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    except ValueError as error:
        raise ConfigError(f"name is {name!r}: give 1 to 64 characters", field="name") from error


def _pem_of(key: Ed25519PrivateKey) -> str:
    secret = os.environ.get(PASSPHRASE)
    how: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if secret:
        how = serialization.BestAvailableEncryption(secret.encode())
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, how).decode()


def _write(path: Path, made: x509.Certificate | x509.CertificateRevocationList) -> None:
    """Write a PEM file atomically: a service reads the revocation list at any moment."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    part.replace(path)


def _hash() -> hashes.SHA256:
    return hashes.SHA256()

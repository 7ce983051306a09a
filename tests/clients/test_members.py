"""Membership by certificate: which certificates are trusted, what a request proves, what is refused with which text."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
from pathlib import Path
from typing import Any

import httpx2
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from member_keys import CLIENTS_ONLY, DAY, NOW, SERVERS_ONLY, TestAuthority
from rayps_client.client_options import ClientOptions
from rayps_client.command import identity_of_options
from rayps_client.errors import ConfigError, ServiceError, Unauthorized
from rayps_client.exchange.signed_orders import ClientToken, Key
from rayps_client.members.certified_keys import CertifiedKeys
from rayps_client.members.member_certificates import MemberCertificate, MembersCa
from rayps_client.members.member_key import MemberKey
from rayps_client.members.membership_options import MembershipOptions
from rayps_client.members.revocations import Revocations
from rayps_client.members.signed_requests import HEADER, WINDOW_SECONDS, Proof, RequestFacts, SignedRequests
from rayps_client.secure.protocol import RoundName, VoidRound, decode
from rayps_client.secure.secure_turn import SecureTurn, TurnRules
from test_secure_protocol import Memory

from rayps.cli.main import main
from rayps.federated.remote.join_options import joining_of
from rayps.service.members import Members, SeenNonces
from rayps.service.tokens.member_authority import (
    create_authority,
    create_request,
    issue,
    list_issued,
    others_of,
    revoke,
    with_ends,
)

JOIN = "/api/v1/client/join?job=A"
SERVICE = "the-fingerprint-of-a-service".ljust(43, "_")


class Clock:
    def __init__(self, now: float = NOW) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def authority() -> TestAuthority:
    return TestAuthority()


def members_of(authority: TestAuthority, clock: Clock, revoked: Path | None = None) -> Members:
    revocations = Revocations(revoked, authority.trusted.authorities)
    return Members(authority.trusted, revocations, SERVICE, SeenNonces(), clock, clock.now - 100)


def signed(
    key: MemberKey,
    clock: Clock,
    method: str = "POST",
    path: str = "/api/v1/client/join?job=A",
    body: bytes = b"{}",
    **headers: str,
) -> httpx2.Request:
    request = httpx2.Request(method, f"https://proxy.example.org/prefix{path}", content=body, headers=headers)
    return next(SignedRequests(key, SERVICE, clock).auth_flow(request))


def facts_of(request: httpx2.Request, **changed: Any) -> RequestFacts:
    """What a service behind a proxy that removes /prefix sees of a request."""
    target = request.url.raw_path.decode().removeprefix("/prefix")
    headers = {name.lower(): value for name, value in request.headers.items()}
    return dataclasses.replace(
        RequestFacts(request.method, target, headers, hashlib.sha256(b"{}").hexdigest()), **changed
    )


def admitted(members: Members, request: httpx2.Request, facts: RequestFacts | None = None) -> Any:
    return members.complete(members.begin(request.headers[HEADER]), facts or facts_of(request))


# ---- certificates


@pytest.mark.parametrize("p256", [False, True])
def test_a_certificate_of_the_authority_is_trusted(p256: bool) -> None:
    authority, key = TestAuthority(p256=p256), ec.generate_private_key(ec.SECP256R1()) if p256 else None
    member = authority.member("hospital-a", key=key, more=(CLIENTS_ONLY,))
    authority.trusted.check(member.member, NOW)
    assert member.member.verify(b"text", member.sign(b"text"))
    assert not member.member.verify(b"other", member.sign(b"text"))


@pytest.mark.parametrize(
    ("begins", "ends", "says"),
    [(3, 10, "is not valid before"), (-20, -1, "has expired"), (0, 10, "which is not an authority of this federation")],
    ids=["not yet valid", "expired", "wrong authority"],
)
def test_a_certificate_is_refused_with_its_reason(authority: TestAuthority, begins: int, ends: int, says: str) -> None:
    """The other authority has the same name: the signature decides."""
    issuer = TestAuthority() if "authority" in says else authority
    with pytest.raises(Unauthorized, match=says):
        authority.trusted.check(issuer.member("hospital-a", begins, ends).member, NOW)


def test_an_expired_authority_is_not_trusted() -> None:
    authority = TestAuthority(days=1)
    with pytest.raises(Unauthorized, match="the authority's certificate of hospital-a has expired"):
        authority.trusted.check(authority.member("hospital-a").member, NOW + 2 * DAY)


def test_a_certificate_for_something_else_is_no_member(authority: TestAuthority) -> None:
    with pytest.raises(Unauthorized, match="not for clients: it needs the extended key usage clientAuth"):
        authority.member("hospital-a", more=(SERVERS_ONLY,))
    with pytest.raises(Unauthorized, match="no common name that is a client's name"):
        authority.member("../hospital-a")
    with pytest.raises(Unauthorized, match="is an authority's own"):
        authority.member("hospital-a", authority=True)
    with pytest.raises(Unauthorized, match="another kind of key"):
        authority.member("hospital-a", key=ec.generate_private_key(ec.SECP384R1()))
    with pytest.raises(Unauthorized, match=r"critical extension 2\.5\.29\.54"):
        authority.member("hospital-a", more=(x509.InhibitAnyPolicy(0),))
    with pytest.raises(Unauthorized, match="the certificate cannot be read"):
        MemberCertificate.read(b"no certificate")


def test_a_member_can_issue_no_certificates(authority: TestAuthority) -> None:
    between = TestAuthority("hospital-a")
    between.key = authority.member("hospital-a").private
    with pytest.raises(Unauthorized, match="not an authority of this federation"):
        authority.trusted.check(between.member("hospital-b").member, NOW)


def test_the_file_of_authorities_has_authorities_only(authority: TestAuthority, tmp_path: Path) -> None:
    path = tmp_path / "ca.pem"
    path.write_bytes(authority.member("hospital-a").member.certificate.public_bytes(Encoding.PEM))
    with pytest.raises(ConfigError, match="not an authority's"):
        MembersCa.load(path)
    path.write_text("nothing")
    with pytest.raises(ConfigError, match="no certificates that can be read"):
        MembersCa.load(path)


# ---- requests


def test_a_signed_request_is_admitted_once(authority: TestAuthority) -> None:
    clock = Clock()
    members, request = members_of(authority, clock), signed(authority.member("hospital-a"), clock)
    grant = admitted(members, request)
    assert (grant.name, grant.job) == ("hospital-a", None)
    with pytest.raises(Unauthorized, match="was received before: somebody repeats it"):
        admitted(members, request)
    clock.now += 2 * WINDOW_SECONDS  # its nonce is forgotten later than its time is refused
    with pytest.raises(Unauthorized, match="600 s ago by this service's clock"):
        admitted(members, request)


@pytest.mark.parametrize("away", [WINDOW_SECONDS + 2, -WINDOW_SECONDS - 2])
def test_a_request_of_another_time_is_refused(authority: TestAuthority, away: float) -> None:
    request = signed(authority.member("hospital-a"), Clock())
    with pytest.raises(Unauthorized, match="set the clock of the client's machine"):
        admitted(members_of(authority, Clock(NOW + away)), request)


@pytest.mark.parametrize(
    "changed",
    [
        {"body": "0" * 64},
        {"method": "DELETE"},
        {"target": "/api/v1/client/join?job=B"},
        {"target": "/api/v1/client/leave"},
        {"headers": {"rayps-client": "another client"}},
        {"headers": {"range": "bytes=5-"}},
    ],
    ids=["body", "method", "query", "path", "client", "range"],
)
def test_a_stolen_header_serves_no_other_request(authority: TestAuthority, changed: dict[str, Any]) -> None:
    clock = Clock()
    members, request = members_of(authority, clock), signed(authority.member("hospital-a"), clock)
    with pytest.raises(Unauthorized, match="the signature does not belong to this request"):
        admitted(members, request, facts_of(request, **changed))
    admitted(members, request)  # its nonce was not used up by the refused one


def test_a_request_for_another_service_is_refused(authority: TestAuthority) -> None:
    clock = Clock()
    request = signed(authority.member("hospital-a"), clock)
    with pytest.raises(Unauthorized, match=r"was made for another service, (.|\n)*--service-key"):
        admitted(dataclasses.replace(members_of(authority, clock), service="another"), request)


def test_a_certificate_without_its_key_is_refused(authority: TestAuthority) -> None:
    clock, thief = Clock(), authority.member("hospital-b").private
    stolen = MemberKey(authority.member("hospital-a").member, thief)
    with pytest.raises(Unauthorized, match="the signature does not belong"):
        admitted(members_of(authority, clock), signed(stolen, clock))


def test_a_body_in_parts_is_named_by_the_hash_of_the_whole(authority: TestAuthority) -> None:
    clock, path = Clock(), "/api/v1/client/rounds/3/update"
    request = signed(authority.member("a"), clock, "PUT", path, b"part", **{"Rayps-Sha256": "a" * 64})
    members = members_of(authority, clock)
    with pytest.raises(Unauthorized, match="does not belong"):
        admitted(members, request, facts_of(request, body="", headers={"rayps-sha256": "b" * 64}))
    facts = dataclasses.replace(facts_of(request), body="")
    assert admitted(members, request, facts).name == "a"


def test_after_a_start_the_service_asks_for_a_new_signature(authority: TestAuthority) -> None:
    clock = Clock()
    request = signed(authority.member("hospital-a"), clock)
    with pytest.raises(ServiceError, match="sign another") as caught:
        admitted(dataclasses.replace(members_of(authority, clock), started=clock.now + 2), request)
    assert caught.value.data["status"] == 503  # which the client repeats


@pytest.mark.parametrize("header", ["", "a.b", "AAAA.1.0123456789abcdef.AA", "AAAA.-1.0123456789abcdef.AA", "..."])
def test_a_malformed_header_is_refused(header: str) -> None:
    with pytest.raises(Unauthorized):
        Proof.read(header)


# ---- revocation


@pytest.mark.parametrize("form", ["list", "serials"])
def test_a_revoked_certificate_is_refused_without_a_restart(
    authority: TestAuthority, form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, two, path, clock = authority.member("one"), authority.member("two"), tmp_path / "revoked", Clock()

    def text(*revoked: MemberKey) -> bytes:
        if form == "list":
            return authority.revocation_list(*revoked)
        return b"# revoked\n" + b"".join(b"serial=%s\n" % each.member.serial.upper().encode() for each in revoked)

    path.write_bytes(text())
    members = members_of(authority, clock, path)
    admitted(members, signed(one, clock))
    path.write_bytes(text(one))
    with pytest.raises(Unauthorized, match=r"the certificate of one .* was revoked"):
        admitted(members, signed(one, clock))
    admitted(members, signed(two, clock))
    path.write_bytes(b"\n")  # a copy that was cut off: nobody is admitted again
    with pytest.raises(Unauthorized, match="was revoked"):
        admitted(members, signed(one, clock))
    assert "is empty" in caplog.text
    path.write_bytes(b"neither serials nor a list")
    with pytest.raises(Unauthorized, match="was revoked"):
        admitted(members, signed(one, clock))
    assert "the list that was read before still holds" in caplog.text
    path.write_bytes(text())
    admitted(members, signed(one, clock))
    assert f"1 certificates that were revoked are accepted again: {one.member.serial}" in caplog.text


def test_a_list_of_another_authority_is_refused(authority: TestAuthority, tmp_path: Path) -> None:
    path = tmp_path / "revoked.pem"
    path.write_bytes(TestAuthority().revocation_list())
    with pytest.raises(ConfigError, match="not signed by an authority of this federation"):
        Revocations(path, authority.trusted.authorities)


def test_a_list_past_its_date_still_holds_and_warns_once(
    authority: TestAuthority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, clock = tmp_path / "revoked.pem", Clock()
    one = authority.member("one")
    path.write_bytes(authority.revocation_list(one))
    due = x509.load_pem_x509_crl(path.read_bytes()).next_update_utc
    assert due is not None
    revocations = Revocations(path, authority.trusted.authorities, clock)
    clock.now = due.timestamp() - 1
    assert revocations.revoked() == {one.member.serial} and not caplog.records
    clock.now = due.timestamp() + 1
    assert revocations.revoked() == revocations.revoked() == {one.member.serial}
    (warning,) = caplog.records
    assert f"was to be replaced by {due.isoformat()}" in warning.getMessage()


# ---- keys of the other clients in secure rounds


def test_certificates_are_the_keys_by_which_clients_check_each_other(authority: TestAuthority, tmp_path: Path) -> None:
    path, clock = tmp_path / "revoked.pem", Clock()
    path.write_bytes(authority.revocation_list())
    a, b = authority.member("a"), authority.member("b")
    keys = CertifiedKeys(a, authority.trusted, Revocations(path, authority.trusted.authorities), clock)
    other = CertifiedKeys(b, authority.trusted, Revocations(None, ()), clock)
    signature = other.sign(b"text")
    assert keys.verify("b", b"text", signature)
    assert not keys.verify("a", b"text", signature) and not keys.verify("b", b"other", signature)
    assert not any(keys.verify("b", b"text", signature[:count]) for count in (0, 1, 2, 50, len(signature) - 1))
    lying = TestAuthority()  # a service that lies makes a key and a certificate for the name b
    forged = CertifiedKeys(lying.member("b"), lying.trusted, Revocations(None, ())).sign(b"text")
    assert not keys.verify("b", b"text", forged)
    path.write_bytes(authority.revocation_list(b))
    assert not keys.verify("b", b"text", signature)


def test_one_member_under_two_numbers_is_refused(authority: TestAuthority) -> None:
    name, nobody = RoundName("job", 1), Revocations(None, ())

    def turn(number: int, who: str) -> SecureTurn:
        keys = CertifiedKeys(authority.member(who), authority.trusted, nobody, Clock())
        return SecureTurn(TurnRules(name, number, who, 0.5, 2, keys), Memory())

    turns = {number: turn(number, who) for number, who in enumerate(["a", "b", "b"])}
    messages = {str(number): decode(turn.advertise()) for number, turn in turns.items()}
    answer = {"neighbours": {number: facts for number, facts in messages.items() if number != "0"}}
    with pytest.raises(VoidRound, match="a name that another client has too"):
        turns[0].share(answer)


# ---- the federation's authority, and files


def test_the_authority_issues_and_revokes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "ca"
    monkeypatch.setenv("RAYPS_MEMBER_PASSPHRASE", "secret")  # of the keys
    create_authority(folder, "federation", 100)
    create_request("hospital-a", tmp_path / "a.key", tmp_path / "a.csr")
    member = issue(folder, tmp_path / "a.csr", 10)
    (tmp_path / "a.pem").write_bytes(member.certificate.public_bytes(Encoding.PEM))
    key = MemberKey.load(tmp_path / "a.pem")
    assert key.name == "hospital-a" and b"ENCRYPTED" in (tmp_path / "a.key").read_bytes()
    now = member.certificate.not_valid_before_utc.timestamp() + 1
    MembersCa.load(folder / "ca.pem").check(member, now)
    again = issue(folder, tmp_path / "a.csr", 10)  # renewed: the same key
    create_request("hospital-a", tmp_path / "b.key", tmp_path / "b.csr")
    with pytest.raises(ServiceError, match="has a valid certificate with another key"):
        issue(folder, tmp_path / "b.csr", 10)
    old = issue(folder, tmp_path / "a.csr", 1, datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=2))
    ends = {each.serial: ended for each, ended in with_ends(folder)}
    assert ends == {old.serial: "expired", member.serial: None, again.serial: None}
    assert [each.serial for each in others_of(folder, again)] == [member.serial]
    revoked = {each.serial for each in revoke(folder, "hospital-a")}
    assert revoked == {old.serial, member.serial, again.serial} and others_of(folder, again) == []
    assert {ended for _, ended in with_ends(folder)} == {"revoked"}
    other = issue(folder, tmp_path / "b.csr", 10)
    assert other.serial in {each.serial for each in list_issued(folder)} and revoke(folder, member.serial) == []
    authorities = MembersCa.load(folder / "ca.pem").authorities
    assert Revocations(folder / "revoked.pem", authorities).revoked() == revoked
    with pytest.raises(ConfigError, match="not that of the certificate"):
        MemberKey.load(tmp_path / "a.pem", tmp_path / "b.key")
    monkeypatch.delenv("RAYPS_MEMBER_PASSPHRASE")
    with pytest.raises(ConfigError, match="RAYPS_MEMBER_PASSPHRASE"):
        MemberKey.load(tmp_path / "a.pem")


def test_the_commands_of_the_authority(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(tmp_path / "ca")
    assert main(["members", "ca", folder]) == 0
    assert main(["members", "request", "hospital-a", "--to", str(tmp_path)]) == 0
    assert main(["members", "issue", folder, str(tmp_path / "hospital-a.csr")]) == 0
    assert MemberKey.load(tmp_path / "hospital-a.pem").name == "hospital-a"
    assert (tmp_path / "hospital-a.key").stat().st_mode & 0o777 == 0o600
    capsys.readouterr()
    assert main(["members", "issue", folder, str(tmp_path / "hospital-a.csr")]) == 0
    assert "it also has the certificate" in capsys.readouterr().err
    monkeypatch.setenv("RAYPS_MEMBER_PASSPHRASE", "")
    assert main(["members", "ca", str(tmp_path / "rogue")]) == 0
    assert "the key is not encrypted" in capsys.readouterr().err
    kept = (tmp_path / "hospital-a.pem").read_bytes()
    assert main(["members", "issue", str(tmp_path / "rogue"), str(tmp_path / "hospital-a.csr")]) == 5
    assert "is no certificate of the authority" in capsys.readouterr().err
    assert (tmp_path / "hospital-a.pem").read_bytes() == kept
    assert main(["members", "revoke", folder, "hospital-a"]) == 0
    capsys.readouterr()
    assert main(["members", "ls", folder]) == 0
    assert capsys.readouterr().out.count("revoked") == 2
    assert main(["members", "revoke", folder, "hospital-b"]) == 3
    assert main(["members", "ca", folder]) == 5


def test_options_of_a_member(authority: TestAuthority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAYPS_CLIENT_TOKEN", raising=False)
    member, path = authority.member("hospital-a"), tmp_path / "a.pem"
    path.write_bytes(member.member.certificate.public_bytes(Encoding.PEM))
    path.with_suffix(".key").write_bytes(
        member.private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
    plain = ClientOptions("w.py:W", url="http://x", job="A" * 26)

    def identity(token: str | None = None, **options: Any) -> Any:
        return identity_of_options(dataclasses.replace(plain, token=token, membership=MembershipOptions(**options)))

    found = identity(member=path, service_key=SERVICE)
    assert (found.name, found.bearer, found.token.fingerprint) == ("hospital-a", "", SERVICE)
    with pytest.raises(ConfigError, match="job is 'A0': give the whole id"):
        identity_of_options(
            dataclasses.replace(
                plain, job="A0", token=None, membership=MembershipOptions(member=path, service_key=SERVICE)
            )
        )
    with pytest.raises(ConfigError, match="give --service-key FINGERPRINT"):
        identity(member=path)
    token = ClientToken("secret", "A" * 26, SERVICE, "hospital-b")
    with pytest.raises(ConfigError, match="the certificate is of 'hospital-a', not of 'hospital-b'"):
        identity(str(token), member=path)
    with pytest.raises(ConfigError, match="made by another service"):
        identity(str(dataclasses.replace(token, name="hospital-a")), member=path, service_key="sha256:" + "B" * 43)
    for wrong, shape in (
        ("sha256:abc", "3 characters"),
        ("ab" * 32, "in hex, as --pin takes it"),
        (SERVICE + "=", "44"),
    ):
        with pytest.raises(ConfigError, match=f"--service-key is no .* {shape}.*43 .*\n`rayps members service`"):
            identity(member=path, service_key=wrong)
    with pytest.raises(
        Unauthorized, match=f"--service-key is sha256:{SERVICE}, and .* has the key sha256:.*\n.*rayps m"
    ):
        found.token.check(Key.load_or_create(tmp_path / "service.key").public)
    with pytest.raises(ConfigError, match="--accept-statement needs a certificate"):
        identity(str(token), accept_statement="a" * 64)
    with pytest.raises(ConfigError, match="neither a hash of 64 hex digits nor a file"):
        identity(member=path, service_key=SERVICE, accept_statement="nowhere.txt")


def test_the_option_members() -> None:
    assert joining_of("remote(members=true)").members and not joining_of("remote").members
    with pytest.raises(ConfigError, match="members is 3: give true or false"):
        joining_of("remote(members=3)")


def test_a_fingerprint_on_the_command_line_never_looks_like_an_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAYPS_STATE_DIR", str(tmp_path))
    assert main(["members", "service"]) == 2
    key = Key.load_or_create(tmp_path / "clients.key")
    capsys.readouterr()
    assert main(["members", "service"]) == 0
    shown = capsys.readouterr().out.strip()
    assert shown == f"sha256:{key.fingerprint}" and MembershipOptions(service_key=shown).service == key.fingerprint


def test_commands_of_an_authority_that_does_not_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nowhere, asked = tmp_path / "nofed", tmp_path / "new" / "h2" / "hospital-a.csr"
    assert main(["members", "request", "hospital-a", "--to", str(asked.parent)]) == 0
    assert asked.parent.stat().st_mode & 0o777 == 0o700
    assert main(["members", "request", "hospital-b", "--to", str(asked)]) == 2
    assert "cannot be created" in capsys.readouterr().err
    asked.with_suffix(".pem").write_text("something else")
    for command in (["ls"], ["revoke", "hospital-a"], ["issue", str(asked)]):
        assert main(["members", command[0], str(nowhere), *command[1:]]) == 2
        assert f"{nowhere} has no authority" in capsys.readouterr().err


def test_what_an_authority_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, asked = str(tmp_path / "federation"), tmp_path / "hospital-a.csr"
    monkeypatch.setenv("RAYPS_MEMBER_PASSPHRASE", "secret")
    assert main(["members", "ca", folder]) == 0
    assert main(["members", "request", "hospital-a", "--to", str(tmp_path)]) == 0
    for days in ("0", "0.5", "9999999"):
        assert main(["members", "issue", folder, str(asked), "--days", days]) == 2
    assert not asked.with_suffix(".pem").exists()
    key = ec.generate_private_key(ec.SECP256R1())
    for names, text in (
        ([], "has no common name (CN)"),
        ([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a/b")], "is 'a/b': give at most"),
    ):
        made = x509.CertificateSigningRequestBuilder().subject_name(x509.Name(names)).sign(key, hashes.SHA256())
        (tmp_path / "x.csr").write_bytes(made.public_bytes(Encoding.PEM))
        capsys.readouterr()
        assert main(["members", "issue", folder, str(tmp_path / "x.csr")]) == 2
        assert text in capsys.readouterr().err
    monkeypatch.setenv("RAYPS_MEMBER_PASSPHRASE", "wrong")
    assert main(["members", "issue", folder, str(asked)]) == 2
    shown = capsys.readouterr().err
    assert "RAYPS_MEMBER_PASSPHRASE" in shown and "--member-key" not in shown


def test_a_key_that_is_not_encrypted_needs_no_passphrase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAYPS_MEMBER_PASSPHRASE", raising=False)
    folder = tmp_path / "federation"
    create_authority(folder, "federation", 10)
    create_request("hospital-a", tmp_path / "a.key", tmp_path / "a.csr")
    monkeypatch.setenv("RAYPS_MEMBER_PASSPHRASE", "secret")
    (tmp_path / "a.pem").write_bytes(issue(folder, tmp_path / "a.csr", 5).certificate.public_bytes(Encoding.PEM))
    assert MemberKey.load(tmp_path / "a.pem").name == "hospital-a"

"""Institutions over real HTTP: members with certificates, and a data-use statement that they sign for each update."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from client_site import All, Clinic, until
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from member_keys import TestAuthority
from rayps_client.errors import ConfigError, Conflict, DataError, Unauthorized
from rayps_client.exchange.signed_orders import ClientToken, Key, verified
from rayps_client.members.acceptance import Acceptance, AcceptanceFacts, check_record, statement_hash
from rayps_client.members.acceptance_file import AcceptanceFile, read_lines, receipt_text
from rayps_client.members.certified_keys import CertifiedKeys
from rayps_client.members.consent import Consent
from rayps_client.members.member_key import MemberKey
from rayps_client.members.revocations import Revocations
from rayps_client.members.signed_requests import HEADER, SignedRequests
from small_work import train
from test_light_process import LINE, alone, said

from rayps.cli.main import main
from rayps.service.job_file import read
from rayps.strategies.job import JobSpec

TEXT = "Purpose: digits.\r\nLegal basis: consent.\nData: images. Retention: 30 days. Contact: dpo@example.org\n"
ACCEPTED = statement_hash(TEXT)
ONE_STEP = "fedavg:local_steps=1,clients=remote(least={least},wait=100{more})"


class Federation(Clinic):
    """A service that trusts an authority, and its members."""

    def __init__(self, path: Path) -> None:
        self.authority = TestAuthority(now=time.time())
        self.revoked = path / "revoked.pem"
        (path / "ca.pem").write_bytes(self.authority.certificate.public_bytes(Encoding.PEM))
        self.revoked.write_bytes(self.authority.revocation_list())
        super().__init__(path, members_ca=path / "ca.pem", members_revoked=self.revoked)
        self.fingerprint = self.service.client_tokens.key.fingerprint
        with self.line(self.authority.member("h0")) as line:  # requests of the second of its start are refused
            until(lambda: line.get("/api/v1/client/key").status_code != 503)

    def identity(self, job: Any, member: MemberKey) -> ClientToken:
        """What a client with a certificate alone knows of the service."""
        return ClientToken("", job.id, self.fingerprint, member.name)

    def begin(self, job: Any, k: int, **options: Any) -> Any:
        member = self.authority.member(f"h{k}")
        return self.hospital(job, k, self.identity(job, member), member=member, **options).begin()

    def files(self, folder: Path, member: MemberKey) -> list[str]:
        """The options of a client with a certificate alone, whose files are made."""
        path = folder / f"{member.name}.pem"
        path.write_bytes(member.member.certificate.public_bytes(Encoding.PEM))
        raw = member.private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        path.with_suffix(".key").write_bytes(raw)
        return ["--member", str(path), "--service-key", f"sha256:{self.fingerprint}"]

    def line(self, member: MemberKey | None, token: str = "") -> httpx2.Client:
        auth = None if member is None else SignedRequests(member, self.fingerprint)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return httpx2.Client(base_url=self.url, auth=auth, headers=headers, timeout=60, trust_env=False)


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    made = Federation(tmp_path_factory.mktemp("federation"))
    yield made
    made.close()


def join_body(job: Any, name: str | None = None) -> dict[str, Any]:
    return {"job": job.id, "key": "k" * 20, "samples": 5, **({"name": name} if name else {})}


# ---- members


def test_who_is_no_member_is_refused_and_has_no_effect(federation: Federation) -> None:
    job = federation.job(ONE_STEP.format(least=9, more=",members=true"))
    authority, token = federation.authority, federation.invite(job, name="h0")["token"]
    other = TestAuthority(now=time.time())
    cases: list[tuple[MemberKey | None, str, str, int, str]] = [
        (other.member("h0"), "", "", 401, "not an authority of this federation"),
        (authority.member("h0", -20, -1), "", "", 401, "has expired"),
        (authority.member("h0", 3, 9), "", "", 401, "is not valid before"),
        (authority.member("h1"), token, "", 401, "the certificate is of h1, and the token is for the client 'h0'"),
        (authority.member("h1"), "", "h0", 422, "this token is for the client 'h1', not for 'h0'"),
        (None, token, "", 403, "has members=true, and a token is not enough"),
        (None, "", "", 401, "the token is missing"),
    ]
    for member, bearer, name, status, says in cases:
        with federation.line(member, bearer) as line:
            answer = line.post("/api/v1/client/join", json=join_body(job, name))
        assert (answer.status_code, says in answer.json()["detail"]) == (status, True), answer.json()
    with federation.line(authority.member("h1")) as line:
        assert line.get(f"/api/v1/jobs/{job.id}").json()["code"] == "client_only"
    assert federation.joined(job) == {}
    job.stop()


def test_a_repeated_or_changed_request_is_refused(federation: Federation) -> None:
    job = federation.job(ONE_STEP.format(least=9, more=""))
    sent = list[httpx2.Request]()
    with federation.line(federation.authority.member("h0")) as line:
        line.event_hooks = {"request": [sent.append]}
        assert line.get("/api/v1/client/key", params={"job": job.id}).json()["secure"] is False
        until(lambda: line.post("/api/v1/client/join", json=join_body(job)).status_code == 200)
        member = federation.authority.member("h0")
    with federation.line(None) as thief:
        headers = {HEADER: sent[-1].headers[HEADER], "Content-Type": "application/json"}
        again = thief.post("/api/v1/client/join", content=sent[-1].content, headers=headers)
        assert (again.status_code, again.json()["code"]) == (401, "replayed")
        stolen = line.build_request("POST", "/api/v1/client/join", json=join_body(job))
        next(SignedRequests(member, federation.fingerprint).auth_flow(stolen))
        other = json.dumps(join_body(job) | {"key": "t" * 20}).encode()
        headers = {HEADER: stolen.headers[HEADER], "Content-Type": "application/json"}
        changed = thief.post("/api/v1/client/join", content=other, headers=headers)
        assert (changed.status_code, changed.json()["code"]) == (401, "request_changed")
    with federation.line(member) as line:  # another certificate for the same name, from another machine
        taken = line.post("/api/v1/client/join", json=join_body(job) | {"key": "o" * 20})
        assert (taken.status_code, taken.json()["code"]) == (409, "name_taken")
    assert list(federation.joined(job)) == ["h0"]
    job.stop()


def test_a_revoked_member_is_withdrawn_at_once(federation: Federation) -> None:
    job = federation.job(ONE_STEP.format(least=2, more=",members=true"), rounds=400)
    staying, leaving = federation.begin(job, 0), federation.authority.member("h1")
    revoked = federation.hospital(job, 1, federation.identity(job, leaving), member=leaving, pause=0.05).begin()
    federation.revoked.write_bytes(federation.authority.revocation_list(leaving))
    assert "was revoked" in str(revoked.over().error)
    until(lambda: federation.joined(job)["h1"]["state"] == "revoked")
    assert federation.joined(job)["h0"]["state"] == "here" and staying.error is None
    token = federation.invite(job)["token"]  # it may have been given one too
    with federation.line(None, token) as line:
        named = {"Rayps-Client": f"{job.id}:1:{revoked.folder.key}"}
        refused = line.get("/api/v1/client/work", headers=named)
    assert "has joined with its certificate, and a token alone is not enough" in refused.json()["detail"]
    serial = leaving.member.serial
    (told,) = until(lambda: [event["message"] for event in job.events() if event["kind"] == "revoked"])
    assert told.startswith(f"the certificate (serial number {serial}) of the client h1 was revoked: no round asks it")
    job.stop()


# ---- statements


def test_members_sign_the_statement_for_each_update(
    federation: Federation, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = federation.job(ONE_STEP.format(least=2, more=""), rounds=3, seed=5, statement=TEXT)
    members, hospitals = [federation.authority.member(f"h{k}") for k in range(2)], []
    for k, member in enumerate(members):
        state = tmp_path / "state" / job.id / f"h{k}"
        given = {"member": member, "accepted": ACCEPTED, "state": state}
        hospitals.append(federation.hospital(job, k, federation.identity(job, member), **given).begin())
    learnt = federation.trained(job)
    assert torch.equal(learnt, train(All(2), "fedavg:local_steps=1", epochs=3, seed=5).snapshot.params)
    found = federation.user.call("GET", f"/api/v1/jobs/{job.id}/acceptances")
    assert found["statement"] == TEXT and [len(record) for record in found["clients"]] == [3, 3]
    ca, exported = str(federation.path / "ca.pem"), tmp_path / "all.json"
    monkeypatch.setenv("RAYPS_URL", federation.url)
    monkeypatch.setenv("RAYPS_TOKEN", federation.token)
    assert main(["statements", job.id, "--verify", "--members-ca", ca, "--to", str(exported)]) == 0
    out, err = capsys.readouterr()
    assert "6 acceptances of 2 clients; wrong: 0" in err
    assert [line.split()[:5] for line in out.splitlines()[1:]] == [[f"h{k}", "3", "0", "to", "2"] for k in (0, 1)]
    for hospital in hospitals:
        record = hospital.over().folder.folder / "statements.jsonl"
        lines, receipts = read_lines(record)
        assert [each.facts().round for each in lines] == [0, 1, 2] and len(receipts) == 3
        key = ["--service-key", f"sha256:{federation.fingerprint}"]
        assert main(["statements", str(record), "--verify", "--members-ca", ca, *key]) == 0
        assert main(["statements", str(record), "--verify", "--service-key", "A" * 43]) == 1
        assert (record.parent / "statement.txt").read_bytes() == TEXT.encode()
    fetched = ["personal", "work.py:Slow", "--job", job.id, "--name", "h0", "--state", str(tmp_path / "state")]
    fetched += ["--fetch", "--url", federation.url, "--evaluate", *federation.files(tmp_path, members[0])]
    monkeypatch.chdir(federation.path)
    monkeypatch.setenv("HOSPITAL", "0")
    main(fetched)  # fedavg has no personal model
    assert (tmp_path / "state" / job.id / "h0" / "global.safetensors").is_file()
    changed = exported.read_text().replace('\\"round\\":1', '\\"round\\":9', 1)
    exported.write_text(changed)
    capsys.readouterr()
    assert main(["statements", str(exported), "--verify"]) == 1
    assert "the signature is not that of the certificate's key" in capsys.readouterr().out
    assert main(["statements", str(exported), "--verify", "-o", "json"]) == 1
    wrong = [row["check"] for row in json.loads(capsys.readouterr().out) if row["check"] != "valid"]
    assert wrong[0].startswith("the signature is not that of the certificate's key") and len(wrong) == 1 + 1


def test_metrics_that_a_member_sends_are_signed_for_too(federation: Federation) -> None:
    text = "fedavg:local_steps=1,client_evaluation=true,clients=remote(least=1,wait=100)"
    job = federation.job(text, rounds=1, statement=TEXT)
    hospital = federation.begin(job, 0, accepted=ACCEPTED)
    federation.trained(job)
    assert hospital.over().error is None
    (found,) = federation.user.call("GET", f"/api/v1/jobs/{job.id}/acceptances")["clients"]
    lines = [Acceptance.of_json(each) for each in found]
    assert wrong(lines, job=job.id) == ["", ""] and len({each.facts().serial for each in lines}) == 2


@pytest.mark.parametrize("accepted", [None, "a" * 64], ids=["none", "another"])
def test_a_client_that_has_not_accepted_the_statement_does_not_join(
    federation: Federation, accepted: str | None
) -> None:
    job = federation.job(ONE_STEP.format(least=9, more=""), statement=TEXT)
    hospital = federation.begin(job, 0, accepted=accepted).over()
    assert isinstance(hospital.error, Unauthorized) and hospital.error.data["code"] == "statement"
    assert f"the job's data-use statement is {ACCEPTED}, and this client has accepted {accepted or 'none'}" in str(
        hospital.error
    )
    assert federation.joined(job) == {}
    job.stop()


def test_the_service_takes_no_update_without_its_own_acceptance(federation: Federation) -> None:
    job = federation.job(ONE_STEP.format(least=1, more=""), statement=TEXT)
    member, other = federation.authority.member("h0"), federation.authority.member("h9")
    with federation.line(member) as line:
        joined = until(lambda: line.post("/api/v1/client/join", json=join_body(job)).json())
        line.headers["Rayps-Client"] = f"{job.id}:{joined['number']}:{'k' * 20}"
        order = json.loads(until(lambda: line.get("/api/v1/client/work", params={"wait": 5}).json().get("order")))
        assert order["statement"] == ACCEPTED
        raw, path = b"an update", f"/api/v1/client/rounds/{order['serial']}"
        digest = hashlib.sha256(raw).hexdigest()
        refused = line.put(f"{path}/update", content=raw, headers={"Rayps-Sha256": digest})
        assert (refused.status_code, refused.json()["code"]) == (409, "statement")
        facts = AcceptanceFacts(
            job.id, 0, "h0", order["serial"], 0, ACCEPTED, order["parameters"]["sha256"], digest, time.time(), ""
        )

        def answer(key: MemberKey, **changed: Any) -> tuple[int, str]:
            given = Acceptance.sign(AcceptanceFacts(**{**_fields(facts), **changed}), key)
            found = line.post(f"{path}/acceptances", json={"acceptances": [given.to_json()]})
            return found.status_code, str(found.json().get("detail", ""))

        for key, changed, says in (
            (other, {"name": "h9"}, "a member signs for itself only"),
            (other, {}, "is signed with the certificate of h9"),
            (member, {"statement": "0" * 64}, "of the statement 000"),
            (member, {"parameters": "0" * 64}, "not for order"),
            (member, {"client": 7}, "a member signs for itself only"),
            (TestAuthority(now=time.time()).member("h0"), {}, "not an authority of this federation"),
            (federation.authority.member("h0"), {}, "signed with another key than the request"),
        ):
            status, text = answer(key, **changed)
            assert status in (401, 409) and says in text, text
        assert federation.user.call("GET", f"/api/v1/jobs/{job.id}/acceptances")["clients"] == []
        assert answer(member)[0] == 201
        assert line.put(f"{path}/update", content=raw, headers={"Rayps-Sha256": digest}).status_code == 201
    job.stop()


def _fields(facts: AcceptanceFacts) -> dict[str, Any]:
    return {name: getattr(facts, name) for name in AcceptanceFacts.__dataclass_fields__}


def test_a_secure_round_with_certificates_and_a_statement(federation: Federation) -> None:
    """The keys are those of certificates that the clients themselves trust; what is signed is the masked update."""
    text = "fedavg:local_steps=1,secure=secagg(clip=1.0,verify=true),clients=remote(least=3,wait=100)"
    job = federation.job(text, rounds=1, statement=TEXT)
    hospitals = []
    for k in range(3):
        member = federation.authority.member(f"h{k}")
        keys = CertifiedKeys(member, federation.authority.trusted, Revocations(None, ()))
        given = {"member": member, "accepted": ACCEPTED, "pinned": keys}
        hospitals.append(federation.hospital(job, k, federation.identity(job, member), **given).begin())
    federation.trained(job)
    assert [hospital.over().ended.rounds for hospital in hospitals] == [1, 1, 1]
    found = federation.user.call("GET", f"/api/v1/jobs/{job.id}/acceptances")["clients"]
    assert [len(record) for record in found] == [1, 1, 1]


# ---- records, without a service


@pytest.fixture(scope="module")
def member() -> MemberKey:
    return TestAuthority().member("h0")


def record(member: MemberKey, count: int = 3) -> list[Acceptance]:
    found: list[Acceptance] = []
    for serial in range(1, count + 1):
        previous = found[-1].digest if found else ""
        facts = AcceptanceFacts("J", 0, "h0", serial, serial - 1, ACCEPTED, "p" * 64, "s" * 64, 1.0 * serial, previous)
        found.append(Acceptance.sign(facts, member))
    return found


def wrong(found: list[Acceptance], statement: str | None = TEXT, job: str | None = None) -> list[str]:
    return [each.wrong for each in check_record(found, statement, None, job)]


def test_a_record_shows_what_was_left_out_or_changed(member: MemberKey) -> None:
    found = record(member)
    assert wrong(found) == ["", "", ""]
    assert wrong([found[0], found[2]])[1] == "the acceptance before it is missing, or was changed"
    assert wrong(found[1:])[0] == "the acceptance before it is missing, or was changed"
    assert "missing" in wrong([found[1], found[0]])[0]
    assert wrong(found, "another text")[0].startswith("it accepts the statement")
    assert wrong(found, job="K") == ["it is of job J"] * 3
    forged = Acceptance(found[0].text.replace('"round":0', '"round":5'), found[0].certificate, found[0].signature)
    assert "the acceptance was changed" in wrong([forged])[0]
    assert "cannot be read" in wrong([Acceptance("{}", found[0].certificate, found[0].signature)])[0]


def test_a_torn_line_is_cut_off_and_lines_are_added_once(member: MemberKey, tmp_path: Path) -> None:
    file, found = AcceptanceFile(tmp_path / "statements.jsonl"), record(member)
    assert file.acceptances() == [] and file.add(found[:2]) == found[:2]
    whole = file.path.read_bytes()
    for cut in (1, 40, whole.index(b"\n")):
        file.path.write_bytes(whole + whole[:cut])
        assert file.acceptances() == found[:2]
    assert file.add(found) == found[2:]
    assert file.acceptances() == found and file.path.read_bytes().startswith(whole)
    assert file.path.stat().st_mode & 0o777 == 0o600
    file.path.write_bytes(whole + b"no JSON\n")
    with pytest.raises(DataError, match="line 3 is not a line of a record"):
        file.acceptances()


class Deaf:
    """A connection on which nothing may be sent."""

    def call(self, method: str, path: str, **options: Any) -> Any:
        raise AssertionError(f"{method} {path} was sent")


def test_a_changed_statement_stops_a_client_and_nothing_is_signed(member: MemberKey, tmp_path: Path) -> None:
    consent = Consent(tmp_path, Deaf(), member, ACCEPTED)
    order = {"statement": "b" * 64, "serial": 2}
    with pytest.raises(
        Unauthorized, match=f"statement is {'b' * 64}, and this client has accepted {ACCEPTED}"
    ) as caught:
        consent.record(order, b"update", {}, lambda text, signature: {})
    assert f"--accept-statement {'b' * 64}" in str(caught.value)
    with pytest.raises(Unauthorized, match="has no data-use statement"):
        consent.check(None)
    assert list(tmp_path.iterdir()) == []
    Consent(tmp_path, Deaf()).record({"serial": 1}, b"update", {}, lambda text, signature: {})  # no statement: nothing
    with pytest.raises(ConfigError, match="--accept-statement needs a certificate"):
        Consent(tmp_path, Deaf(), None, ACCEPTED).keep_text("J")


class Answers(Deaf):
    """A service that has the key of its receipts, and closes the first round too early."""

    def __init__(self) -> None:
        self.key, self.received = Key(Ed25519PrivateKey.generate()), list[list[Acceptance]]()

    def call(self, method: str, path: str, **options: Any) -> Any:
        given = [Acceptance.of_json(each) for each in options["json"]["acceptances"]]
        self.received.append(given)
        if len(self.received) == 1:
            raise Conflict("the round is closed", code="late")
        texts = [receipt_text(each, 1.0, self.key.public) for each in given]
        body = {"receipts": [{"receipt": text, "signature": self.key.sign(text)} for text in texts]}
        return httpx2.Response(201, json=body)

    def verify(self, text: str, signature: str) -> Any:
        return verified(text, signature, self.key.public, self.key.fingerprint)


def test_what_the_service_has_not_confirmed_is_sent_again(member: MemberKey, tmp_path: Path) -> None:
    service = Answers()
    consent = Consent(tmp_path, service, member, ACCEPTED)
    order = {"job": "J", "client": 0, "name": "h0", "statement": ACCEPTED, "parameters": {"sha256": "p" * 64}}
    with pytest.raises(Conflict):
        consent.record({**order, "serial": 1, "round": 0}, b"one", {}, service.verify)
    consent.record({**order, "serial": 2, "round": 1}, b"two", {}, service.verify)
    consent.record({**order, "serial": 3, "round": 2}, b"three", {}, service.verify)
    assert [len(given) for given in service.received] == [1, 2, 1]
    sent = [each.facts().sent for given in service.received[1:] for each in given]
    assert sent == [hashlib.sha256(raw).hexdigest() for raw in (b"one", b"two", b"three")]
    lines, receipts = read_lines(tmp_path / "statements.jsonl")
    assert wrong(lines, job="J") == ["", "", ""] and all(receipts[each.digest].is_valid(None) for each in lines)
    receipt = receipts[lines[0].digest]
    assert receipt.is_valid(service.key.fingerprint) and not receipt.is_valid("A" * 43)
    service.key = Key(Ed25519PrivateKey.generate())  # another service

    def verify(text: str, signature: str) -> Any:
        raise Unauthorized("not the service's key", code="forged")

    with pytest.raises(Unauthorized, match="not the service's key"):
        consent.record({**order, "serial": 4, "round": 3}, b"four", {}, verify)


# ---- the light client


def test_the_light_client_is_a_member_and_signs(federation: Federation, tmp_path: Path) -> None:
    member = federation.authority.member("h0")
    (federation.path / "line.py").write_text(LINE)
    strategy = ONE_STEP.format(least=1, more=",members=true")
    job = federation.user.submit(
        "line.py:Line", working_dir=federation.path, strategy=strategy, epochs=1, statement=TEXT
    )
    given = ["line.py:Line", "--url", federation.url, "--job", job.id, "--state", str(tmp_path / "state")]
    given += federation.files(tmp_path, member)
    code = "from rayps_client.__main__ import main\n"
    code += f"print(main({[*given, '--show-statement']!r}), main({[*given, '--accept-statement', ACCEPTED]!r}))"
    status, out, error = said(alone(code, cwd=federation.path, env={"HOSPITAL": "0"}))
    assert (status, out) == (0, "0 0\n"), error
    assert f"to accept this statement: --accept-statement {ACCEPTED}" in error
    record = tmp_path / "state" / job.id / "h0" / "statements.jsonl"
    assert wrong(read_lines(record)[0], job=job.id) == [""]


def test_a_job_file_names_the_statement(tmp_path: Path) -> None:
    (tmp_path / "why.txt").write_bytes(TEXT.encode())
    (tmp_path / "job.yaml").write_text("workload: w.py:W\nstrategy: fedavg:clients=remote\nstatement: why.txt\n")
    assert read(tmp_path / "job.yaml")["statement"] == TEXT
    (tmp_path / "job.yaml").write_text("workload: w.py:W\nstatement: nowhere.txt\n")
    with pytest.raises(ConfigError, match=r"nowhere\.txt cannot be read"):
        read(tmp_path / "job.yaml")
    with pytest.raises(ConfigError, match="no real clients to accept it"):
        JobSpec("w.py:W", "fedavg", statement=TEXT).check()  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="at most 20000 bytes"):
        JobSpec("w.py:W", "fedavg:clients=remote", statement="x" * 20_001).check()  # type: ignore[arg-type]

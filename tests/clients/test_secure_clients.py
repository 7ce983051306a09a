"""Secure aggregation with real clients: real HTTP, real files, and no update on the service's side."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from client_site import All, Clinic, Own, cohorts, until
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from rayps_api.routes import routes_clients
from rayps_api.update_parts import PartWriter
from rayps_client.errors import ConfigError, Conflict, Unauthorized
from rayps_client.secure import lease
from rayps_client.secure.noise import NoiseSource
from rayps_client.secure.pinned_keys import PinnedKeys, pinned_keys, public_text, read_peers
from rayps_client.secure.protocol import Stage
from rayps_client.secure.quantise import EXTRAS, Quantiser
from rayps_client.secure.secure_replies import SecureReplies
from rayps_client.secure.secure_turn import SecureTurn
from small_work import train

from rayps.cli.main import main
from rayps.clients.workload_trainer import WorkloadTrainer
from rayps.federated import remote_replies, secure_rounds
from rayps.federated.population.cohort import cohort_size
from rayps.federated.remote import mailbox, stage_folder
from rayps.federated.remote.mailbox import Mailbox
from rayps.federated.remote.secure_options import secure_of
from rayps.federated.remote.stage_folder import StageFolder
from rayps.federated.secure_rounds import SecureRounds
from rayps.privacy.accountant import epsilon
from rayps.privacy.mechanism import Mechanism, Spent
from rayps.privacy.noise_shares import share_noise
from rayps.strategies.catalogue import parse

PLAIN = "fedavg:local_epochs=2,deadline=500"
given_pause = remote_replies._VOID_PAUSE
STEP = 5 / (2**19 - 1)


@pytest.fixture(autouse=True)
def brief_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Void rounds follow each other at once."""
    monkeypatch.setattr(remote_replies, "_VOID_PAUSE", 0.02)


def secure(least: int, more: str = "") -> str:
    return f"{PLAIN},secure=secagg(clip=5,bits=20{more}),clients=remote(least={least},wait=100)"


def simulated(clients: int, rounds: int, **options: Any) -> torch.Tensor:
    return train(All(clients), "fedavg:local_epochs=2", epochs=rounds, **options).snapshot.params


# ---- the law, and what the service holds


def test_masked_sums_are_the_plain_mean_and_nothing_else_leaves(
    clinic: Clinic, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, written = list[bytes](), list[bytes]()

    def keep(self: StageFolder) -> None:
        held.extend(path.read_bytes() for path in self._folder.rglob("*") if path.is_file())
        delete(self)

    def words(self: Quantiser, integers: Any) -> Any:
        written.append(plain(self, integers).tobytes())
        return plain(self, integers)

    delete, plain = StageFolder.delete, Quantiser.words
    monkeypatch.setattr(StageFolder, "delete", keep)
    monkeypatch.setattr(Quantiser, "words", words)
    job = clinic.job(secure(3), rounds=1, seed=5)
    hospitals = clinic.hospitals(job, 3)
    learnt = clinic.trained(job)
    error = (learnt - simulated(3, 1, seed=5)).abs().max().item()
    assert 0 < error <= STEP / 2 * 3 / 75 * 1.001  # half a step times clients over the sum of their 75 samples
    (event,) = cohorts(job)
    assert (event["replied"], event["trained"], event["dropped"]) == (3, ["h0", "h1", "h2"], [])
    assert all("20 samples, which are not sent" in h.over().said[0] for h in hospitals[:1])
    assert [each["samples"] for each in clinic.joined(job).values()] == [0, 0, 0]
    assert [each["doing"] for each in clinic.joined(job).values()] == ["has sent round 0"] * 3
    (point,) = (point for point in job.metrics() if point.get("kind") == "round")
    assert 0.5 < point["loss"] < 1.2 and point["samples"] == 2 * 75  # the mean loss and the samples were in the sum
    files = [*held, *(path.read_bytes() for path in clinic.service.folder(job.id).rglob("*") if path.is_file())]
    vectors = [raw for raw in held if len(raw) == 4 * 53]
    assert len(written) == 3 and len(vectors) == 3 and len(files) > 20
    for raw in written:  # neither the vector, nor its beginning, nor as text
        for part in (raw[:40], base64.b64encode(raw[:39]), str(np.frombuffer(raw, "<i4")[:3].tolist()).encode()):
            assert not any(part in each for each in files)
    assert not any(b'"samples": 20' in each or b'"samples":20' in each for each in files)
    assert not list((clinic.service.mailbox(job.id).folder / "rounds").glob("*/stages"))  # and all of it is deleted


@pytest.mark.parametrize("strategy", ["fedper:private=2", "fedrep:private=2,head_epochs=1"])
def test_private_layers_stay_and_the_sum_is_that_of_the_shared_layers(
    clinic: Clinic, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    sent, plain_words = list[Any](), Quantiser.words

    def words(self: Quantiser, integers: Any) -> Any:
        sent.append(integers.copy())
        return plain_words(self, integers)

    monkeypatch.setattr(Quantiser, "words", words)
    options = "deadline=500,secure=secagg(clip=5,bits=20),clients=remote(least=3,wait=100)"
    job = clinic.job(f"{strategy},local_epochs=2,{options}", rounds=1, seed=5)
    clinic.hospitals(job, 3)
    learnt = clinic.trained(job)
    plain = train(All(3), f"{strategy},local_epochs=2", epochs=1, seed=5).snapshot.params
    shared = 5 * 7 + 7  # the layer "2" comes after them
    assert torch.equal(learnt[shared:], plain[shared:])
    assert 0 < (learnt - plain)[:shared].abs().max() <= STEP / 2 * 3 / 75 * 1.001
    (stored,) = clinic.service.folder(job.id).rglob("*.sum")
    total = np.frombuffer(stored.read_bytes(), dtype="<i4")
    assert len(sent) == 3 and len(total) == shared + EXTRAS
    assert np.array_equal(total, sum(sent))


class Dies(httpx2.BaseTransport):
    """A client's network, which ends the client before it sends the message of a stage."""

    def __init__(self, stage: Stage, after: int = 1) -> None:
        """`after`: which message of this stage is not sent any more, the first or a later one."""
        self._through, self._stage, self._left = httpx2.HTTPTransport(), stage, after

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.method == "PUT" and request.url.path.endswith(self._stage):
            self._left -= 1
            if self._left > 0:
                return self._through.handle_request(request)
            raise RuntimeError(f"dies at {self._stage}")
        return self._through.handle_request(request)


@pytest.mark.parametrize("stage", [stage for stage in Stage if stage is not Stage.CONFIRM])
def test_a_client_that_ends_in_a_stage_leaves_the_sum_exact(clinic: Clinic, stage: Stage) -> None:
    job = clinic.job(secure(4), rounds=1, seed=5)
    for k in range(4):
        clinic.hospital(job, k, transport=Dies(stage) if k == 3 else None).begin()
    learnt, counted = clinic.trained(job), 4 if stage is Stage.UNMASK else 3
    (event,) = cohorts(job)
    assert event["dropped"] == ([] if stage is Stage.UNMASK else [["h3", f"left at {stage}"]])
    assert event["replied"] == counted
    done = "has sent round 0" if stage is Stage.UNMASK else f"dropped out of round 0: left at {stage}"
    assert [each["doing"] for each in clinic.joined(job).values()] == ["has sent round 0"] * 3 + [done]
    assert (learnt - simulated(counted, 1, seed=5)).abs().max() <= STEP / 2 * 4 / 75 * 1.001


class Killed(Dies):
    """A client's network, which ends the client without a word, its threads too."""

    dead = False

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        self.dead = self.dead or (request.method == "PUT" and request.url.path.endswith(self._stage))
        if self.dead:
            raise RuntimeError(f"killed at {self._stage}")
        return self._through.handle_request(request)


class Waits(httpx2.BaseTransport):
    """A client's network, which retains its message of a stage until the test says otherwise."""

    def __init__(self, stage: Stage) -> None:
        self._through, self._stage = httpx2.HTTPTransport(), stage
        self.begun, self.goes_on = threading.Event(), threading.Event()

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.method == "PUT" and request.url.path.endswith(self._stage):
            self.begun.set()
            self.goes_on.wait(60)
        return self._through.handle_request(request)


def test_a_stage_does_not_wait_for_a_killed_client_until_its_deadline(
    clinic: Clinic, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (lease, stage_folder):
        monkeypatch.setattr(module, "RENEW_SECONDS", 0.5)
    monkeypatch.setattr(secure_rounds, "_LOOK_SECONDS", 0.05)
    masked, slow = SecureTurn.mask, list[int]()

    def mask(self: SecureTurn, *given: Any) -> Any:
        if self._rules.number == 1:  # it computes for long, and is there
            slow.append(1)
            time.sleep(4)
        return masked(self, *given)

    monkeypatch.setattr(SecureTurn, "mask", mask)
    job = clinic.job(secure(4).replace("deadline=500", "deadline=5000"), rounds=1, seed=5)
    for k in range(4):  # the last one trains for long
        clinic.hospital(job, k, transport=Killed(Stage.MASK) if k == 3 else None, pause=0.5 if k == 2 else 0.0).begin()
    learnt = clinic.trained(job)
    (event,) = cohorts(job)
    assert slow == [1]
    assert event["dropped"] == [["h3", "silent at masked_input"]] and event["replied"] == 3
    assert (learnt - simulated(3, 1, seed=5)).abs().max() <= STEP / 2 * 4 / 75 * 1.001


@pytest.mark.parametrize("stage", [Stage.ADVERTISE, Stage.MASK])
def test_the_end_of_the_job_ends_its_clients_in_a_stage(clinic: Clinic, stage: Stage) -> None:
    late = Waits(stage)
    job = clinic.job(secure(3), rounds=1)
    hospitals = [clinic.hospital(job, k, transport=late if k == 2 else None).begin() for k in range(3)]
    until(late.begun.is_set)
    until(lambda: f"2 of 3 have sent the message of the stage {stage}" in str(clinic.standing(job)))
    job.stop().wait(30)
    for hospital in hospitals[:2]:  # they wait for an answer of the stage
        assert hospital.over().ended.status == "STOPPED" and hospital.error is None
    late.goes_on.set()
    last = hospitals[2].over()
    assert last.ended.status == "STOPPED" and last.error is None
    for hospital in hospitals:
        assert any(f"not in the sum: job {job.id} has ended: STOPPED" in text for text in hospital.said), hospital.said
    found = clinic.user.call("GET", f"/api/v1/jobs/{job.id}/clients")
    assert found["waits"] is None and found["ended"].startswith("the job has ended: STOPPED: ")
    done = "sent nothing in round 0" if stage is Stage.ADVERTISE else "has sent round 0"
    shown = [(each["state"], each["doing"]) for each in found["clients"]]
    assert shown == [("ended", done)] * 2 + [("ended", "sent nothing in round 0")]


def test_too_few_survivors_make_the_round_void(clinic: Clinic) -> None:
    job = clinic.job(secure(3), rounds=1, seed=5)
    hospitals = [clinic.hospital(job, k, transport=Dies(Stage.MASK) if k else None).begin() for k in range(3)]
    done = job.wait(60).data
    (event,) = cohorts(job)
    assert (event["replied"], event["skipped"]) == (0, True)
    why = "secure aggregation: 1 client has sent its masked update, and 2 are needed"
    assert event["message"].endswith(f"h2 (left at masked_input): the model is unchanged, because {why}")
    assert clinic.joined(job)["h0"]["doing"] == "took part in round 0, which is void"
    assert clinic.joined(job)["h1"]["doing"] == "dropped out of round 0: left at masked_input"
    told = hospitals[0].over()
    assert f"round 0: this client's update is not in the sum: round 0 is void: {why}" in told.said
    assert done["status"] == "FAILED" and not told.ended.succeeded  # no round has trained the model
    assert done["reason"].startswith(f"every round was void, and the model was not trained; the last one because {why}")


def test_a_job_with_a_round_that_counts_succeeds_though_the_last_is_void(clinic: Clinic) -> None:
    job = clinic.job(secure(2), rounds=2, seed=5)
    for k in range(2):
        clinic.hospital(job, k, transport=Dies(Stage.MASK, 2) if k else None).begin()
    clinic.trained(job)
    assert [event["skipped"] for event in cohorts(job)] == [False, True]


class Bad(Own):
    """A client whose updates are not finite."""

    def loss(self, model: Any, batch: Any) -> Any:
        return super().loss(model, batch) * float("nan")


def test_a_client_without_a_usable_update_takes_no_part(clinic: Clinic) -> None:
    job = clinic.job(secure(4), rounds=1, seed=5)
    hospitals = [clinic.hospital(job, k) for k in range(4)]
    hospitals[3].outside.trainer = WorkloadTrainer(Bad(3), Bad(3).data())
    for hospital in hospitals:
        hospital.begin()
    assert torch.isfinite(clinic.trained(job)).all()
    (event,) = cohorts(job)
    assert event["dropped"] == [["h3", "its update or loss contains values that are not finite"]]


class Works(Own):
    """A client that trains, or evaluates, until the test says otherwise."""

    def __init__(self, k: int, kind: str, gate: threading.Event) -> None:
        super().__init__(k)
        self.kind, self.goes_on, self.begun = kind, gate, threading.Event()

    def loss(self, model: Any, batch: Any) -> Any:
        if self.calls >= self.tries:
            self._wait("training")
        return super().loss(model, batch)

    def evaluate(self, model: Any, batch: Any) -> Any:
        self._wait("evaluation")
        return super().evaluate(model, batch)

    def _wait(self, kind: str) -> None:
        if kind == self.kind:
            self.begun.set()
            assert self.goes_on.wait(60)


@pytest.mark.parametrize("kind", ["training", "evaluation"])
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "secure"])
def test_a_client_that_works_is_present(
    clinic: Clinic, monkeypatch: pytest.MonkeyPatch, masked: bool, kind: str
) -> None:
    monkeypatch.setattr(lease, "PRESENT_SECONDS", 0.2)
    monkeypatch.setattr(mailbox, "AWAY_SECONDS", 3.0)
    monkeypatch.setattr(routes_clients, "_SEEN_SECONDS", 0.2)
    more = f"{PLAIN},client_evaluation=true,clients=remote(least=2,wait=100)"
    job, gate = (
        clinic.job(f"{more},secure=secagg(clip=5,bits=20)" if masked else more, rounds=1, seed=5),
        threading.Event(),
    )
    works = [Works(k, kind, gate) for k in range(2)]
    for k, work in enumerate(works):
        hospital = clinic.hospital(job, k)
        hospital.outside.trainer = WorkloadTrainer(work, work.data())
        hospital.begin()
    box = clinic.service.mailbox(job.id)

    def states() -> set[str]:
        return {str(each["state"]) for each in clinic.joined(job).values()}

    def last_request(number: int) -> float:
        return (box.folder / "seen" / str(number)).stat().st_mtime

    try:
        # threads of one process evaluate one after another
        until(lambda: sum(work.begun.is_set() for work in works) == (2 if kind == "training" else 1))
        begun = time.time()  # from now on they send no other request, for longer than `AWAY_SECONDS`
        until(lambda: all(last_request(k) > begun + 3.5 for k in range(2)) or "away" in states())
        assert states() == {"here"}
    finally:
        gate.set()
    clinic.trained(job)
    assert [event["dropped"] for event in cohorts(job)] == [[]]


def test_void_rounds_pause_before_the_next(clinic: Clinic, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_replies, "_VOID_PAUSE", 0.2)
    said, write = list[str](), Mailbox.write_waits

    def keep(self: Mailbox, waits: str | None) -> None:
        if waits and "void" in waits and (not said or said[-1] != waits):
            said.append(waits)
        write(self, waits)

    monkeypatch.setattr(Mailbox, "write_waits", keep)
    job = clinic.job(secure(2), rounds=4, seed=5)
    clinic.hospital(job, 0).begin()
    other = clinic.hospital(job, 1)
    other.outside.trainer = WorkloadTrainer(Bad(1), Bad(1).data())
    other.begin()
    assert job.wait(60).data["status"] == "FAILED"
    assert said == [
        "round 1 begins 0.2 s after the last one, because a round was void",
        "round 2 begins 0.4 s after the last one, because 2 rounds were void",
        "round 3 begins 0.8 s after the last one, because 3 rounds were void",
    ]


def test_void_rounds_last_for_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_replies, "_VOID_PAUSE", given_pause)
    pauses = [remote_replies.pause_after(voids) for voids in range(5000)]
    assert pauses[:4] == [0, 1, 2, 4] and pauses == sorted(pauses) and pauses[-1] == 60
    assert sum(pauses[:30]) > 20 * 60


# ---- whatever is killed


def test_a_worker_that_dies_in_a_secure_round_goes_on_with_it(clinic: Clinic) -> None:
    job, gate = clinic.job(secure(3), rounds=1, seed=5), threading.Event()
    hospitals = [clinic.hospital(job, k, gate=gate if k == 2 else None).begin() for k in range(3)]
    stages = clinic.service.mailbox(job.id).stages(1)
    until(lambda: stages.arrived(Stage.ADVERTISE) == {0, 1})
    assert clinic.joined(job)["h0"]["doing"] == "works on round 0"
    until(lambda: "waits for h2: 2 of 3 have sent the message of the stage advertise_keys" in clinic.reason(job))
    clinic.kill_workers()
    gate.set()
    learnt = clinic.trained(job)
    assert (learnt - simulated(3, 1, seed=5)).abs().max() <= STEP
    assert [hospital.over().ended.rounds for hospital in hospitals] == [1, 1, 1]
    assert clinic.service.mailbox(job.id).newest().serial == 1


def test_a_repeated_round_uses_the_stored_sum(clinic: Clinic, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker dies after it has learnt a sum and before it saves it: nobody is asked for a second sum."""
    real, calls = remote_replies.aggregate_of, list[int]()

    def dies(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            clinic.kill_workers()
        return real(*given)

    monkeypatch.setattr(remote_replies, "aggregate_of", dies)
    job = clinic.job(secure(3), rounds=1, seed=5)
    hospitals = clinic.hospitals(job, 3)
    learnt = clinic.trained(job)
    assert len(calls) == 2 and (learnt - simulated(3, 1, seed=5)).abs().max() <= STEP
    assert clinic.service.mailbox(job.id).newest().serial == 1
    assert [hospital.over().ended.rounds for hospital in hospitals] == [1, 1, 1]


# ---- with noise


def test_noise_after_unmasking_gives_what_noise_on_plain_updates_gives(clinic: Clinic) -> None:
    dp = "privacy=dp(noise_multiplier=0.5,clip=5,noise=seeded)"
    learnt = []
    for more in ("", ",secure=secagg(clip=5,bits=26,max_weight=1)"):
        job = clinic.job(f"fedavg:deadline=500,{dp}{more},clients=remote(least=3,wait=100)", rounds=1, seed=5)
        clinic.hospitals(job, 3)
        learnt.append(clinic.trained(job))
    step = 5 / (2**25 - 1)
    assert 0 < (learnt[0] - learnt[1]).abs().max() < 10 * step  # rounded, and scaled down for the rounding
    claim = next(event for event in job.events() if event["kind"] == "privacy")
    assert claim["trusted"].startswith("The server sees only the sum of the clients' updates")
    assert cohorts(job) == []
    assert not any("samples" in point and point.get("kind") == "round" and point["samples"] for point in job.metrics())


NOISED = "privacy=dp(noise_multiplier=0.5,clip=5,noise_by=clients),secure=secagg(clip=5,bits=12,max_weight=1)"


def test_the_sum_has_the_clients_updates_and_their_noise_and_is_charged_before_it_is_unmasked(
    clinic: Clinic, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, sent, recorded, started = list[Any](), list[Any](), list[tuple[Stage, int]](), list[torch.Tensor]()
    gaussian, words, opened, real = NoiseSource.gaussian, Quantiser.words, StageFolder.open, remote_replies.aggregate_of

    def draw(self: NoiseSource, size: int, sigma: int) -> Any:
        drawn.append((sigma, gaussian(self, size, sigma)))
        return drawn[-1][1]

    def write(self: Quantiser, integers: Any) -> Any:
        sent.append(integers.copy())
        return words(self, integers)

    def open_(self: StageFolder, stage: Stage) -> None:
        recorded.append((stage, lines()))
        opened(self, stage)

    def start(total: Any, w_t: torch.Tensor) -> Any:
        started.append(w_t.clone())
        return real(total, w_t)

    def lines() -> int:
        ledger = clinic.service.folder(job.id) / "privacy" / "ledger.jsonl"
        return ledger.read_text().count("\n") if ledger.exists() else 0

    monkeypatch.setattr(NoiseSource, "gaussian", draw)
    monkeypatch.setattr(Quantiser, "words", write)
    monkeypatch.setattr(remote_replies, "aggregate_of", start)
    job = clinic.job(f"fedavg:deadline=500,{NOISED},clients=remote(least=3,wait=100)", rounds=1, seed=5)
    monkeypatch.setattr(StageFolder, "open", open_)
    clinic.hospitals(job, 3)
    learnt = clinic.trained(job)
    step, plain = 5 / 2047, sum(sent) - sum(np.pad(noise, (0, 3)) for _, noise in drawn)
    assert {sigma for sigma, _ in drawn} == {1024} and len(drawn) == len(sent) == 3  # 0.5 x 2047 of one client
    assert torch.allclose(learnt, started[0] + torch.from_numpy(sum(sent)[:-3]).double() * step / 3, rtol=0, atol=1e-12)
    assert np.linalg.norm(plain[:-3]) <= 3 * 2047 and plain[-3] == 3
    assert dict(recorded)[Stage.MASK] == 0 and dict(recorded)[Stage.UNMASK] == 1 == lines()
    claims = [event for event in job.events() if event["kind"] == "privacy"]
    shares = {"sigma": 1024, "count": 1, "asked": 3, "least": 2, "norm": 2047, "size": len(learnt)}
    assert claims[0]["mechanism"]["shares"] == shares
    assert claims[0]["trusted"].startswith("The clients are trusted to add the noise: of the 3 that a round asks, at")
    assert "up to 1 client of a round" in claims[0]["holds_against"][-1]
    assert claims[-1]["releases"] == 1 and claims[-1]["epsilon"] == pytest.approx(
        epsilon({Mechanism("all", 1024 / 2047): Spent(1)}, 1e-5), rel=0.2
    )


def test_a_worker_that_dies_while_noised_updates_are_unmasked_is_charged_once(
    clinic: Clinic, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, dead = StageFolder.open, list[Stage]()

    def open_(self: StageFolder, stage: Stage) -> None:
        opened(self, stage)
        if stage is Stage.UNMASK and not dead:
            dead.append(stage)
            clinic.kill_workers()

    monkeypatch.setattr(StageFolder, "open", open_)
    job = clinic.job(f"fedavg:deadline=500,{NOISED},clients=remote(least=3,wait=100)", rounds=1, seed=5)
    clinic.hospitals(job, 3)
    clinic.trained(job)
    assert dead and (clinic.service.folder(job.id) / "privacy" / "ledger.jsonl").read_text().count("\n") == 1
    assert [event["releases"] for event in job.events() if event["kind"] == "privacy" and "releases" in event][-1] == 1


def test_a_void_round_of_noised_updates_is_not_charged(clinic: Clinic) -> None:
    job = clinic.job(f"fedavg:deadline=500,{NOISED},clients=remote(least=3,wait=100)", rounds=1, seed=5)
    for k in range(3):
        clinic.hospital(job, k, transport=Dies(Stage.MASK) if k else None).begin()
    assert "every round was void" in job.wait(60).data["reason"]
    assert (clinic.service.folder(job.id) / "privacy" / "ledger.jsonl").read_text() == ""
    (event,) = (event for event in job.events() if event["kind"] == "warning" and "void" in event)
    assert (event["round"], event["dropped"]) == (0, ["h1", "h2"])
    why = "secure aggregation: 1 client has sent its masked update, and 2 are needed"
    assert event["message"].startswith(f"round 0 is void, and the model is unchanged, because {why}; 2 of 3 clients")


# ---- the routes


class ByHand:
    """A client by hand, which may send anything."""

    def __init__(self, clinic: Clinic, job: Any, name: str) -> None:
        token = clinic.invite(job)["token"]
        self.http = httpx2.Client(base_url=clinic.url, headers={"Authorization": f"Bearer {token}"})
        body = {"name": name, "key": name * 20, "samples": 20}
        number = self.http.post("/api/v1/client/join", json=body).raise_for_status().json()["number"]
        self.http.headers["Rayps-Client"] = f"{job.id}:{number}:{name * 20}"

    def put(self, path: str, raw: bytes, digest: str | None = None) -> httpx2.Response:
        headers = {"Rayps-Sha256": digest or hashlib.sha256(raw).hexdigest()}
        return self.http.put(f"/api/v1/client/rounds/{path}", content=raw, headers=headers)


def test_what_does_not_belong_into_a_stage_is_refused_unread(clinic: Clinic) -> None:
    job = clinic.job(secure(3), rounds=1, seed=5)
    hand = ByHand(clinic, job, "hand")
    clinic.hospitals(job, 2)
    until(lambda: hand.http.get("/api/v1/client/work", params={"wait": 5}).json()["kind"] == "round")
    plain = hand.put("1/update", b"an update in clear")
    assert (plain.status_code, plain.json()["code"]) == (409, "secure")
    assert hand.put("1/stages/masked_input", b"0" * 212).status_code == 409  # no such stage yet
    assert hand.put("1/stages/elsewhere", b"").status_code == 422
    assert hand.put("1/stages/advertise_keys", b"{}", "0" * 64).status_code == 422
    assert hand.put("1/stages/advertise_keys", b"0" * (1 << 20)).status_code == 413
    assert hand.put("2/stages/advertise_keys", b"{}").status_code == 409
    large = hand.put("2/stages/masked_input", bytes(1_500_000))  # 375,000 parameters, more than a body of other routes
    assert (large.status_code, large.json()["code"]) == (409, "late")
    assert hand.put("1/stages/advertise_keys", b"{}").status_code == 201
    again = hand.put("1/stages/advertise_keys", b"[]")
    assert again.status_code == 200 and again.json()["again"]
    clinic.trained(job)  # the round goes on without it
    late = hand.put("1/stages/masked_input", b"0" * 212)
    assert (late.status_code, late.json()["code"]) == (409, "late")
    (event,) = cohorts(job)
    assert (event["replied"], event["dropped"]) == (2, [["hand", "its message cannot be read"]])
    assert hand.http.post("/api/v1/client/rounds/1/withdraw", json={"reason": "too late"}).status_code == 204


@pytest.mark.parametrize("kind", ["stage", "update"])
@pytest.mark.parametrize("moment", ["between two blocks", "after the last block", "before the hash is checked"])
def test_whatever_arrives_as_its_round_closes_is_late_and_nothing_else(
    clinic: Clinic, monkeypatch: pytest.MonkeyPatch, kind: str, moment: str
) -> None:
    job = clinic.job(secure(2) if kind == "stage" else f"{PLAIN},clients=remote(least=2,wait=100)", rounds=1, seed=5)
    hands = [ByHand(clinic, job, name) for name in ("one", "two")]
    hand = hands[0]
    until(
        lambda: all(one.http.get("/api/v1/client/work", params={"wait": 5}).json()["kind"] == "round" for one in hands)
    )
    box, raw, written = clinic.service.mailbox(job.id), b"x" * 276, list[int]()

    def close() -> None:  # as the worker does
        if kind == "stage":
            box.stages(1).close(Stage.ADVERTISE)
        elif box.close_round(1) is not None:
            box.write_verdicts(1, {})

    def write(self: PartWriter, at: int, block: bytes) -> None:
        kept(self, at, block)
        written.append(at + len(block))
        if moment == "after the last block" and block and written[-1] == len(raw):
            close()
        if moment == "before the hash is checked" and not block:  # the empty block at the end of a request
            close()

    def body() -> Any:
        yield raw[:200]
        until(lambda: written)
        if moment == "between two blocks":
            close()
        yield raw[200:]

    kept = PartWriter.write
    monkeypatch.setattr(PartWriter, "write", write)
    named = {"Rayps-Sha256": hashlib.sha256(raw).hexdigest(), "Content-Range": "bytes 0-275/276"}
    path = "1/stages/advertise_keys" if kind == "stage" else "1/update"
    found = hand.http.put(f"/api/v1/client/rounds/{path}", content=body(), headers=named)
    assert (found.status_code, found.json()["code"]) == (409, "late"), found.text
    assert not [path for path in box.round_folder(1).rglob("*") if named["Rayps-Sha256"] in path.name]
    job.stop().wait(30)


class CutOnce(httpx2.BaseTransport):
    """A client's network, which is cut once, when the first 100 bytes of its masked update have arrived."""

    def __init__(self, clinic: Clinic, job: Any, number: int) -> None:
        self._through, self._clinic, self._job, self._number = httpx2.HTTPTransport(), clinic, job, number
        self.sent: list[tuple[str, bytes, str]] = []  # the range, the body and the hash of each request

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.method == "PUT" and request.url.path.endswith(Stage.MASK):
            body, digest = request.read(), request.headers["rayps-sha256"]
            self.sent.append((request.headers["content-range"], body, digest))
            if len(self.sent) == 1:
                stages = self._clinic.service.mailbox(self._job.id).stages(1)
                stages.part(Stage.MASK, self._number, digest).write_bytes(body[:100])
                raise httpx2.WriteError("cut")
        return self._through.handle_request(request)


def test_a_masked_update_continues_after_a_cut_with_the_same_mask(clinic: Clinic) -> None:
    job = clinic.job(secure(3), rounds=1, seed=5)
    line = CutOnce(clinic, job, 2)
    for k in range(3):
        clinic.hospital(job, k, transport=line if k == 2 else None).begin()
    assert (clinic.trained(job) - simulated(3, 1, seed=5)).abs().max() <= STEP
    (_, whole, digest), (span, rest, again) = line.sent
    assert rest == whole[100:] and again == digest == hashlib.sha256(whole).hexdigest()
    assert span == f"bytes 100-{len(whole) - 1}/{len(whole)}" and len(whole) == 4 * 53


def test_what_has_arrived_of_a_message_is_retained_until_the_stage_is_closed(clinic: Clinic) -> None:
    job = clinic.job(secure(2), rounds=1, seed=5)
    hand, gate = ByHand(clinic, job, "hand"), threading.Event()
    clinic.hospital(job, 0, gate=gate).begin()  # the stage waits for its training
    until(lambda: hand.http.get("/api/v1/client/work", params={"wait": 5}).json()["kind"] == "round")
    raw, path = b"x" * 300, "/api/v1/client/rounds/1/stages/advertise_keys"
    named = {"Rayps-Sha256": hashlib.sha256(raw).hexdigest()}

    def put(begin: int, body: bytes) -> int:
        span = {"Content-Range": f"bytes {begin}-{len(raw) - 1}/{len(raw)}"}
        return hand.http.put(path, content=body, headers={**named, **span}).status_code

    def received(digest: str = named["Rayps-Sha256"]) -> int:
        return int(hand.http.get(f"{path}/received", headers={"Rayps-Sha256": digest}).json()["received"])

    assert put(0, raw[:200]) == 400 and received() == 200
    assert received("0" * 64) == 0 and received() == 0  # one message of a client at a time
    assert put(0, raw[:200]) == 400 and put(200, raw[200:]) == 201 and received() == 300
    gate.set()
    job.stop().wait(30)


def test_a_closed_stage_has_no_parts_and_takes_none(tmp_path: Path) -> None:
    stages = StageFolder(tmp_path)
    stages.open(Stage.ADVERTISE)
    writer = PartWriter(stages.part(Stage.ADVERTISE, 0, "a" * 64))
    writer.write(0, b"a part of a message")
    other = stages.part(Stage.ADVERTISE, 1, "b" * 64)
    other.write_bytes(b"whole")
    stages.revoke(0, "token (T)")
    assert not writer.path.exists() and other.exists()
    writer.write(0, b"a part of a message")
    stages.close(Stage.ADVERTISE)
    assert not list((tmp_path / "stages" / Stage.ADVERTISE).glob("parts"))
    with pytest.raises(FileNotFoundError):
        writer.write(10, b"more")
    with pytest.raises(Conflict, match="goes on without"):
        stages.deliver(Stage.ADVERTISE, 1, other)
    with pytest.raises(Conflict, match="goes on without"):
        stages.part(Stage.ADVERTISE, 0, "a" * 64)


def test_a_stage_that_closes_while_a_part_is_named_is_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = StageFolder(tmp_path)
    stages.open(Stage.ADVERTISE)
    glob = Path.glob

    def closes(path: Path, pattern: str) -> Any:
        if path.name == "parts":
            stages.close(Stage.ADVERTISE)
            raise FileNotFoundError  # as a folder that is gone does
        return glob(path, pattern)

    monkeypatch.setattr(Path, "glob", closes)
    with pytest.raises(Conflict, match="goes on without"):
        stages.part(Stage.ADVERTISE, 0, "0" * 64)


def test_a_client_that_has_dropped_out_is_late_in_each_later_stage(tmp_path: Path) -> None:
    box = Mailbox(tmp_path / "job" / "clients")
    box.prepare()
    stages = box.stages(1)
    with pytest.raises(Exception, match="goes on without"):
        stages.part(Stage.ADVERTISE, 0, "0" * 64)
    stages.open(Stage.ADVERTISE)
    part = stages.part(Stage.ADVERTISE, 0, "0" * 64)
    part.write_bytes(b"keys")
    late = stages.part(Stage.ADVERTISE, 1, "0" * 64)
    late.write_bytes(b"late keys")
    assert stages.deliver(Stage.ADVERTISE, 0, part) and stages.answer(Stage.ADVERTISE, 0) is None
    assert {number: path.read_bytes() for number, path in stages.close(Stage.ADVERTISE).items()} == {0: b"keys"}
    assert stages.close(Stage.ADVERTISE).keys() == {0}  # by a second worker
    with pytest.raises(Exception, match="goes on without"):
        stages.deliver(Stage.ADVERTISE, 1, late)
    assert not late.exists()
    stages.open(Stage.SHARE)
    stages.publish(Stage.ADVERTISE, {0: {"x": 1}})
    stages.publish(Stage.ADVERTISE, {0: {"x": 2}, 1: {}})  # a second worker's answers do not replace the first's
    assert stages.answer(Stage.ADVERTISE, 0) == {"x": 1}
    for refused in (lambda: stages.answer(Stage.ADVERTISE, 1), lambda: stages.part(Stage.SHARE, 1, "0" * 64)):
        with pytest.raises(Exception, match="goes on without"):
            refused()
    part = stages.part(Stage.SHARE, 0, "0" * 64)
    part.write_bytes(b"")
    stages.deliver(Stage.SHARE, 0, part)
    stages.revoke(0, "token (T)")
    assert stages.arrived(Stage.SHARE) == set() and stages.withdrawn() == {0: "its token (T) was revoked"}
    stages.delete()
    stages.withdraw(0, "too late")
    assert not (tmp_path / "job" / "clients" / "rounds" / "1" / "stages").exists()


def test_an_answer_that_is_published_while_a_client_asks_is_no_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = StageFolder(tmp_path)
    stages.open(Stage.ADVERTISE)
    read = Path.read_bytes

    def late(path: Path) -> bytes:
        if not (tmp_path / "stages" / Stage.ADVERTISE / "answers").is_dir():
            stages.publish(Stage.ADVERTISE, {0: {"x": 1}})
            raise FileNotFoundError  # the answer was not there when the service looked
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", late)
    assert stages.answer(Stage.ADVERTISE, 0) is None and stages.answer(Stage.ADVERTISE, 0) == {"x": 1}


# ---- clients that check each other


def test_clients_with_pinned_keys_check_each_other(clinic: Clinic, tmp_path: Path) -> None:
    peers, pinned = tmp_path / "peers", dict[int, PinnedKeys]()
    for k in range(3):
        with pytest.raises(ConfigError, match=f"h{k} ") as shown:
            pinned_keys(peers, f"h{k}", tmp_path / f"h{k}.key")
        with peers.open("a") as file:
            file.write(str(shown.value).splitlines()[-1] + "\n")
    for k in range(3):
        pinned[k] = pinned_keys(peers, f"h{k}", tmp_path / f"h{k}.key")
    job = clinic.job(secure(3, ",verify=true"), rounds=1, seed=5)
    for k in range(3):
        clinic.hospital(job, k, pinned=pinned[k]).begin()
    assert (clinic.trained(job) - simulated(3, 1, seed=5)).abs().max() <= STEP
    assert cohorts(job)[0]["replied"] == 3 and len(read_peers(peers)) == 3
    for strategy, why in ((secure(2), "verify=true"), (f"{PLAIN},clients=remote(wait=100)", "show its updates")):
        job = clinic.job(strategy, rounds=1)
        hospital = clinic.hospital(job, 0, pinned=pinned[0], name="h0")
        hospital.start()
        if "secagg" in strategy:
            clinic.hospital(job, 1).start()
        hospital.over()
        assert isinstance(hospital.error, ConfigError) and why in str(hospital.error)
        job.stop().wait(30)


def test_a_file_of_peers_with_two_keys_for_one_name_or_none_is_refused(tmp_path: Path) -> None:
    keys = [public_text(Ed25519PrivateKey.generate()) for _ in range(2)]
    peers = tmp_path / "peers"
    peers.write_text(f"h1 {keys[0]}\nh1 {keys[0]}\n# two\n\nh1 {keys[1]}\n")
    with pytest.raises(ConfigError, match=r"peers, lines 1 and 5: there are two different keys for the client 'h1'"):
        read_peers(peers)
    with pytest.raises(ConfigError, match=r"there is no file .*nofile\.txt.*\n.*\nh0 \S+$"):
        pinned_keys(tmp_path / "nofile.txt", "h0", tmp_path / "h0.key")


def test_a_client_with_unknown_keys_makes_rounds_void_and_ends_no_other_client(clinic: Clinic) -> None:
    private = [Ed25519PrivateKey.generate() for _ in range(4)]
    known = {f"h{k}": key.public_key() for k, key in enumerate(private[:3])}
    job = clinic.job(secure(3, ",verify=true"), rounds=2, seed=5)
    without = clinic.hospital(job, 2).begin().over()
    assert isinstance(without.error, ConfigError) and "Start it with --peers FILE, or with --members-ca FILE" in str(
        without.error
    )
    without.end()
    assert clinic.joined(job) == {}  # it has refused before it joined
    keys = [PinnedKeys(private[k], known) for k in (0, 1, 3)]  # the third is not the key that the others know of h2
    hospitals = [clinic.hospital(job, k, pinned=each).begin() for k, each in enumerate(keys)]
    job.wait(60)
    why = "the keys of the client 'h2' are not signed with its key"
    for hospital in hospitals[:2]:
        assert hospital.over().ended.rounds == 0 and hospital.error is None
        for at in (0, 1):
            assert any(f"round {at}: this client's update is not in the sum: {why}" in text for text in hospital.said)
    for event in cohorts(job):
        assert event["replied"] == 0 and [(name, why in said) for name, said in event["dropped"][:2]] == [
            ("h0", True),
            ("h1", True),
        ]
    assert len(cohorts(job)) == 2


@pytest.mark.parametrize("how", ["key", "peers", "shares"])
def test_a_client_that_makes_every_round_void_is_asked_no_more(
    clinic: Clinic, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The others do not know its key, or cannot open its shares, or it knows no other: it is against the majority."""
    private = [Ed25519PrivateKey.generate() for _ in range(4)]
    known = {f"h{k}": key.public_key() for k, key in enumerate(private[:3])}
    stranger = PinnedKeys(private[3], known)
    if how == "peers":
        stranger = PinnedKeys(private[2], {"h2": private[2].public_key()})
    keys: list[PinnedKeys | None] = [PinnedKeys(private[0], known), PinnedKeys(private[1], known), stranger]
    if how == "shares":
        sealed, keys = SecureTurn._sealed, [None] * 3

        def seal(self: SecureTurn, to: int, shares: bytes) -> bytes:
            return bytes(100) if self._rules.name == "h2" else sealed(self, to, shares)

        monkeypatch.setattr(SecureTurn, "_sealed", seal)
    verify = "" if how == "shares" else ",verify=true"
    job = clinic.job(secure(2, f"{verify},threshold=0.7"), rounds=6, seed=5)
    hospitals = [clinic.hospital(job, k, pinned=each) for k, each in enumerate(keys)]
    for hospital in (hospitals[2], hospitals[0], hospitals[1]):
        hospital.begin()
    clinic.trained(job)
    rounds = [(event["replied"], event["sampled"]) for event in cohorts(job)]
    alone = rounds.count((0, 2))  # a round that has begun before the third had joined: its void is undecided
    assert alone <= 1 and rounds[alone:] == [(0, 3)] * 3 + [(2, 2)] * (3 - alone)
    done = {
        "key": "h0, h1 refused its message (share_keys)",
        "peers": "it refused h0, h1 (share_keys)",
        "shares": "h0, h1 refused its message (masked_input)",
    }[how]
    if how == "peers":
        said = "the file of --peers has no line for the client 'h0' (and 1 more), so that its keys cannot be checked"
        assert any(said in text for text in hospitals[2].said), hospitals[2].said
    why = f"is asked no more: 3 rounds were void because of it; in the last one {done}"
    (event,) = (event for event in job.events() if "excluded" in event)
    assert (event["kind"], event["excluded"], event["round"]) == ("warning", "h2", 2 + alone)
    assert event["message"] == f"h2 {why}. It is asked again when it joins with another token or certificate"
    shown = clinic.joined(job)
    assert [(shown[name]["state"], shown[name]["doing"]) for name in ("h0", "h2")] == [
        ("ended", "has sent round 5"),
        ("excluded", why),
    ]


def test_an_excluded_client_is_told_why_at_once(clinic: Clinic) -> None:
    job = clinic.job(secure(2), rounds=1)
    hand, box = ByHand(clinic, job, "hand"), clinic.service.mailbox(job.id)
    box.exclude(0, "its rounds were void")
    for params in ({"wait": 30}, {"wait": 0, "away": True}):
        found = hand.http.get("/api/v1/client/work", params=params).json()
        assert (found["kind"], found["reason"]) == ("wait", "this client is asked no more: its rounds were void")
    withdraw = "/api/v1/client/rounds/1/withdraw"
    for refused, status in ((["h1"], 422), ([1, 2], 204)):
        assert hand.http.post(withdraw, params={"refuses": refused}, json={"reason": "x"}).status_code == status


def test_two_clients_that_refuse_each_other_are_both_asked_again(
    clinic: Clinic, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    private = [Ed25519PrivateKey.generate() for _ in range(3)]
    known = {f"h{k}": key.public_key() for k, key in enumerate(private[:2])}
    job = clinic.job(secure(2, ",verify=true"), rounds=4, seed=5)
    for k, key in enumerate((private[0], private[2])):
        clinic.hospital(job, k, pinned=PinnedKeys(key, known)).begin()
    assert job.wait(60).data["status"] == "FAILED"
    assert "clients refuse each other: h0 refused h1 (share_keys). Compare their keys" in clinic.reason(job)
    assert "deadline" not in clinic.reason(job)
    monkeypatch.setenv("RAYPS_URL", clinic.url)
    monkeypatch.setenv("RAYPS_TOKEN", clinic.token)
    assert main(["report", job.id, "--clients"]) == 2
    said = capfd.readouterr().err
    assert "summed under masks" in said and "fedavg:report=clients" not in said
    assert len(cohorts(job)) == 4
    points = [point for point in job.metrics() if point.get("kind") == "round"]
    assert [(point["loss"], point["void"]) for point in points] == [(None, 1)] * 4
    (event,) = (event for event in job.events() if "excluded" in event)
    assert event["excluded"] is None and event["round"] == 2
    assert (
        "it is undecided which of them is wrong, so that none is excluded: h0 refused h1 (share_keys)"
        in (event["message"])
    )


def test_an_excluded_client_is_asked_again_with_another_token_alone(tmp_path: Path) -> None:
    box = Mailbox(tmp_path / "job" / "clients")
    box.prepare()
    number = box.join("h", "key" * 9, "first", 1).number
    box.exclude(number, "its rounds were void")
    assert box.state(number) == "excluded" and box.takes_no_part(number)
    box.join("h", "key" * 9, "first", 1)
    assert box.exclusion(number) == "its rounds were void"
    box.join("h", "key" * 9, "second", 1)
    assert box.state(number) == "here" and box.exclusion(number) is None
    box.exclude(number, "again")
    for token, why in (("first", "again"), ("second", "again"), ("third", None)):
        box.join("h", "key" * 9, token, 1)
        assert box.exclusion(number) == why


def test_a_client_of_a_secure_job_follows_no_plain_order(tmp_path: Path) -> None:
    replies = SecureReplies(None, tmp_path)  # type: ignore[arg-type]
    replies.read_key({"public_key": ""})
    assert not replies.required and not replies.expects({})
    replies.read_key({"secure": True})
    assert replies.required and replies.expects({"secure": {"verify": False}})
    with pytest.raises(Unauthorized, match="would show the client's update"):
        replies.expects({})
    with pytest.raises(ConfigError, match="Start it with --peers FILE"):  # an older service names it in orders only
        replies.expects({"secure": {"verify": True}})


# ---- options


@pytest.mark.parametrize(
    ("strategy", "why"),
    [
        ("fedavg:secure=secagg(clip=1)", "simulated here"),
        ("fedavg:clients=remote,secure=secagg", "needs clip"),
        ("fedavg:clients=remote,secure=secagg(clip=none)", "needs clip"),
        ("fedavg:clients=remote,secure=other(clip=1)", "give secagg"),
        ("fedavg:clients=remote,secure=secagg(clip=0)", "clip is 0"),
        ("fedavg:clients=remote,secure=secagg(clip=1,bits=40)", "from 2 to 32"),
        ("fedavg:clients=remote,secure=secagg(clip=1,threshold=0.3)", "from 0.5 to below 1"),
        ("fedavg:clients=remote,secure=secagg(clip=1,verify=2)", "true or false"),
        ("fedavg:clients=remote,secure=secagg(clip=1,neighbours=1)", "or auto"),
        ("fedavg:clients=remote(least=10),secure=secagg(clip=1,neighbours=2)", "each needs 9 .* neighbours=9 or more"),
        ("fedavg:clients=remote(least=200),secure=secagg(clip=1,neighbours=60)", "neighbours=[67][0-9] or more"),
        ("fedavg:clients=remote,secure=secagg(clip=1,top_k=3)", "no option 'top_k'"),
        ("fedavg:clients=remote,rule=median,secure=secagg(clip=1)", "robust rule"),
        ("fedavg:clients=remote,clip=1,secure=secagg(clip=1)", "clips updates itself"),
        ("fedavg:clients=remote,privacy=dp(noise_multiplier=1),secure=secagg(clip=2,max_weight=1)", "the same number"),
        ("fedavg:clients=remote,privacy=dp(noise_multiplier=1,clip=2),secure=secagg(clip=2)", "max_weight=1"),
        (
            "fedavg:clients=remote,privacy=dp(noise_multiplier=1,clip=adaptive),secure=secagg(clip=2,max_weight=1)",
            "the same number",
        ),
        ("fedavg:clients=remote,privacy=dp(noise_multiplier=1,noise_by=clients)", "does not protect it"),
        ("scaffold:clients=remote,secure=secagg(clip=1)", "sums vectors without a bound"),
        ("fedbuff:clients=remote,secure=secagg(clip=1)", "asynchronous"),
        ("1*fedavg:clients=remote > fedavg:clients=remote(least=2),secure=secagg(clip=1)", "others are not"),
        ("fedavg:clients=remote,secure=secagg(clip=1)", r"least=1 a round .*; give clients=remote\(least=2\) or more"),
        ("fedavg:clients=remote(least=2),fraction=0.5,secure=secagg(clip=1)", r"fraction=0.5 .*remote\(least=3\)"),
    ],
)
def test_what_secure_sums_cannot_do_is_refused_with_a_way_out(strategy: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse(strategy)


def test_the_smallest_allowed_least_asks_two_clients() -> None:
    for fraction in (0.05, 0.1, 0.3, 0.5, 0.7, 1.0):
        for least in range(1, 40):
            text = f"fedavg:clients=remote(least={least}),fraction={fraction},secure=secagg(clip=1)"
            if cohort_size(least, fraction) < 2:
                with pytest.raises(ConfigError, match="least="):
                    parse(text)
            else:
                parse(text)


def test_options_become_the_facts_of_an_order(tmp_path: Path) -> None:
    options = secure_of("secagg(clip=2,bits=8,max_weight=1,neighbours=6,verify=true)")
    assert options is not None and options.degree == 6 and secure_of(None) is None
    facts = options.facts(clients=10, least=1)
    numbers = {"clip": 2, "bits": 8, "max_weight": 1, "clients": 10, "threshold": 0.5, "least": 2, "verify": True}
    assert facts == {**numbers, "norm": 2, "counts": True, "noise": 0}
    private = secure_of("secagg(clip=2,bits=16,max_weight=1)")
    assert private is not None
    shares = share_noise(1.0, (10, 6, 0.8), 32767, 10_000)
    of_clients = private.facts(10, 1, 10_000, shares)
    assert (of_clients["noise"], of_clients["least"], shares.colluding) == (16384, 6, 2)
    noised = private.facts(10, 1, private_size=10_000)
    assert noised["norm"] == 2 - 2 / 32767 * 100 / 2 and not noised["counts"]
    with pytest.raises(ConfigError, match="raise bits"):
        options.facts(10, 1, private_size=10**6)
    with pytest.raises(ConfigError, match="64 bits"):
        secure_of("secagg(clip=1,bits=32,max_weight=1048576)").facts(10_000, 1)  # type: ignore[union-attr]
    rounds = SecureRounds(Mailbox(tmp_path), options, 3, 1000)
    assert rounds.facts(10)["least"] == 3 and rounds.most_bytes(rounds.facts(10)) == (1 << 16) + 5120
    assert json.dumps(facts)


def test_a_model_with_statistics_is_refused_unless_clients_keep_them(clinic: Clinic) -> None:
    (clinic.path / "normed.py").write_text(
        "import client_site, torch\n\nclass Server(client_site.Server):\n    def model(self):\n"
        "        return torch.nn.Sequential(torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1)).double()\n"
    )
    job = clinic.user.submit("normed.py:Server", working_dir=clinic.path, strategy=secure(2), epochs=1).wait(60)
    assert job.data["status"] == "FAILED" and "buffers=keep" in job.data["reason"]

"""Federated learning with clients that are processes of their own: real HTTP, real files, their own rows."""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch
from client_site import All, Clinic, Own, Process, Tap, cohorts, rows, until
from rayps_client.errors import ConfigError, Conflict, DataError, Unauthorized, WorkloadError
from rayps_client.exchange.signed_orders import ClientToken, Key, order_text, verified
from rayps_client.machine.client_folder import ClientFolder
from rayps_client.process import ClientProcess
from rayps_client.trainers.torch_tensors import raw_of, tensor_of
from small_work import train

import rayps
from rayps.cli.main import main
from rayps.clients.workload_trainer import WorkloadTrainer, own_data, rows_of
from rayps.federated import remote_replies
from rayps.federated.remote.mailbox import Mailbox
from rayps.federated.rules.client_scores import report_rounds

FEDAVG = "fedavg:local_epochs=2,clients=remote(least={least},wait=100)"


def simulated(strategy: str, clients: int, rounds: int = 3, **options: Any) -> torch.Tensor:
    result = train(All(clients), strategy, epochs=rounds, **options)
    return result.snapshot.params


# ---- the law


@pytest.mark.parametrize(
    ("strategy", "clients"),
    [
        ("fedavg:local_epochs=2", 3),
        ("fedavg:fraction=0.67,local_steps=5,batch_size=4", 3),
        ("scaffold:local_steps=4", 3),
        ("fedadam:server_lr=0.05", 2),
        ("ditto:lam=0.3", 2),
        ("fedavg:rule=median", 3),
    ],
)
def test_real_clients_learn_what_simulated_ones_learn(clinic: Clinic, strategy: str, clients: int) -> None:
    name, _, options = strategy.partition(":")
    job = clinic.job(f"{name}:{options},clients=remote(least={clients},wait=100)", seed=5)
    hospitals = clinic.hospitals(job, clients)
    learnt = clinic.trained(job)
    assert torch.equal(learnt, simulated(strategy, clients, seed=5))
    taken = [hospital.over().ended.rounds for hospital in hospitals]
    assert sum(taken) == sum(event["replied"] for event in cohorts(job))
    summary = next(event for event in job.events() if event["kind"] == "clients")
    assert (summary["names"], summary["rows"]) == ([f"h{k}" for k in range(clients)], sum((20, 25, 30)[:clients]))


@pytest.mark.parametrize("private", ["sampling=all", "mechanism=tree"])
def test_a_private_job_with_real_clients_learns_what_simulated_ones_learn(
    clinic: Clinic, private: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    text = f"fedavg:{{}}privacy=dp(noise_multiplier=0.5,clip=0.2,noise=seeded,{private})"
    job = clinic.job(text.format("clients=remote(least=2,wait=100),"), seed=5)
    hospitals = clinic.hospitals(job, 2)
    learnt = clinic.trained(job)
    assert torch.equal(learnt, simulated(text.format(""), 2, seed=5))
    assert [hospital.over().ended.rounds for hospital in hospitals] == [3, 3]
    said = [event for event in job.events() if event["kind"] in ("cohort", "clients", "privacy")]
    assert [event["kind"] for event in said] == ["privacy"] * 2 and said[1]["releases"] == 3
    assert (clinic.path / "state" / "jobs" / job.id / "privacy" / "ledger.jsonl").read_text().count("\n") == 3
    monkeypatch.setenv("RAYPS_URL", clinic.url)
    monkeypatch.setenv("RAYPS_TOKEN", clinic.token)
    assert main(["get", job.id]) == 0
    out = capfd.readouterr().out
    assert re.search(r"^privacy +epsilon \S+ at delta 1e-05 for each client, after 3 releases; it proves", out, re.M)
    assert "batch loss" not in out


def test_a_report_of_real_clients_is_that_of_simulated_ones(
    clinic: Clinic, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    job = clinic.job("fedavg:report=clients,clients=remote(least=3,wait=100)", 2, seed=5)
    clinic.hospitals(job, 3)
    clinic.trained(job)
    result = train(All(3), "fedavg:report=clients", epochs=2, seed=5)
    found, wanted = report_rounds(job.events()), result.client_rounds
    assert found is not None and wanted is not None and found.num_rows == 6
    assert found["client"].to_pylist() == ["h0", "h1", "h2"] * 2
    assert found.drop_columns("client") == wanted.drop_columns("client")
    monkeypatch.setenv("RAYPS_URL", clinic.url)
    monkeypatch.setenv("RAYPS_TOKEN", clinic.token)
    assert main(["report", job.id, "--clients"]) == 0
    said = capfd.readouterr()
    assert re.search(r"^h1 +2 +0\.\d", said.out, re.MULTILINE) and "outliers (score of at least 6): none" in said.err


# ---- what leaves


def test_no_row_leaves_and_a_client_that_is_killed_comes_back(clinic: Clinic) -> None:
    job = clinic.job(FEDAVG.format(least=2), rounds=3)
    token, tap = clinic.invite(job)["token"], Tap(clinic.port)
    process = Process(clinic, job, 0, token, tap.url, pause=0.15)
    try:
        until(lambda: clinic.joined(job), 90)
        clinic.hospital(job, 1).begin()
        until(
            lambda: [each["doing"] for each in clinic.joined(job).values()] == ["works on round 1", "has sent round 1"]
        )
        process.kill()  # in the middle of a round, which waits for it
        until(lambda: "round 1 waits for h0: 1 of 2 have replied" in clinic.reason(job))
        process.start()
        learnt = clinic.trained(job)
        code, said = process.end()
    finally:
        process.kill()
        tap.close()
    assert code == 0 and "client 0" in said and "SUCCEEDED" in said
    assert torch.equal(learnt, simulated("fedavg:local_epochs=2", 2))
    assert [event["replied"] for event in cohorts(job)] == [2, 2, 2]
    sent = bytes(tap.sent)
    x, y = rows(0)
    assert b"HTTP/1.1" in sent and b'"samples":20' in sent.replace(b" ", b"")
    assert len(sent) > 3 * 50 * 8  # three updates of 50 parameters have passed here
    for value in torch.cat([x.reshape(-1), y.reshape(-1)]).tolist():
        for form in ("<d", ">d", "<f"):
            assert struct.pack(form, value) not in sent
        assert repr(value).encode() not in sent


class CutAt(httpx2.BaseTransport):
    """A client's network that ends the client, without a word, when a part of its update has arrived."""

    def __init__(self, clinic: Clinic, job: Any, most: int) -> None:
        self._through, self._clinic, self._job, self._most = httpx2.HTTPTransport(), clinic, job, most
        self.dead = False

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.method == "PUT" and not self.dead:
            self.dead = True
            part = self._clinic.service.mailbox(self._job.id).part(1, 0, request.headers["rayps-sha256"])
            part.write_bytes(request.read()[: self._most])
        if self.dead:
            raise RuntimeError("killed")
        return self._through.handle_request(request)


class Watched(httpx2.BaseTransport):
    """A client's network, which keeps what the client has asked for."""

    def __init__(self) -> None:
        self._through, self.asked = httpx2.HTTPTransport(), list[tuple[str, str, str]]()

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        self.asked.append((request.method, request.url.path[15:], request.headers.get("content-range", "")))
        return self._through.handle_request(request)


@pytest.mark.parametrize("strategy", ["fedavg", "ditto:lam=0.3"])
def test_a_client_that_is_killed_while_it_sends_an_update_sends_the_rest_and_does_not_train_again(
    clinic: Clinic, tmp_path: Path, strategy: str
) -> None:
    name, _, options = strategy.partition(":")
    more = f"{options}," if options else ""
    job = clinic.job(f"{name}:{more}local_epochs=2,clients=remote(least=1,wait=100)", rounds=2, seed=5)
    first = clinic.hospital(job, 0, transport=CutAt(clinic, job, 300), state=tmp_path / "own").begin().over()
    assert "killed" in str(first.error) and len(list((tmp_path / "own").glob("update-1"))) == 1
    first.end()
    watched = Watched()
    again = clinic.hospital(job, 0, transport=watched, state=tmp_path / "own").begin()
    learnt = clinic.trained(job)
    assert torch.equal(learnt, simulated(f"{name}:{more}local_epochs=2", 1, 2, seed=5))
    again.over()
    assert again.ended.rounds == 2 and "round 0: the update from before this client's restart is sent" in again.said
    of_round = [each for each in watched.asked if each[1].startswith("rounds/1/") and not each[1].endswith("/lease")]
    assert [each[:2] for each in of_round] == [("GET", "rounds/1/update"), ("PUT", "rounds/1/update")]
    assert of_round[1][2].startswith("bytes 300-")
    assert not list((tmp_path / "own").glob("*update-*"))


def test_an_update_that_was_not_kept_whole_is_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ClientFolder(tmp_path / "own")
    folder.keep_update(3, b"an update")
    assert folder.kept_update(3) == b"an update" and folder.kept_update(4) is None
    (path,) = (tmp_path / "own").glob("update-*")
    assert path.stat().st_mode & 0o077 == 0
    path.write_bytes(path.read_bytes()[:-1])
    assert folder.kept_update(3) is None
    folder.keep_update(4, b"the next one")
    assert folder.kept_update(4) == b"the next one" and not path.exists()
    folder.finish_order(4, None)
    assert folder.kept_update(4) is None
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("no space left")))
        folder.keep_update(5, b"too large")
    assert folder.kept_update(5) is None and not list((tmp_path / "own").glob(".update-*"))
    folder.close()


def test_the_tap_would_see_a_row(clinic: Clinic) -> None:
    tap = Tap(clinic.port)
    host, _, port = tap.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(rows(0)[0].numpy().tobytes())
        until(lambda: struct.pack("<d", rows(0)[0][3, 2].item()) in bytes(tap.sent))
    tap.close()


# ---- who waits for whom


def causes(job: Any) -> list[str]:
    """What costs most of a job's time, as its report says."""
    return [each["cause"] for each in job.report()["verdict"]["findings"]]


def test_the_job_says_whom_it_waits_for_and_gives_up_with_words(clinic: Clinic) -> None:
    job = clinic.job("fedavg:clients=remote(least=2,wait=5)", 1)
    until(lambda: "round 0 waits for 2 more of 2 clients; connected: none" in clinic.reason(job))
    clinic.hospital(job, 0).begin()
    until(lambda: "waits for 1 more of 2 clients; connected: h0" in clinic.reason(job))
    job.wait(30)
    assert job.data["status"] == "FAILED"
    assert "has waited 5 s" in job.data["reason"] and "rayps client" in job.data["reason"]
    assert "clients" in causes(job)


def test_who_is_late_does_not_count_and_is_told(clinic: Clinic) -> None:
    job, gate = clinic.job("fedavg:deadline=3,clients=remote(least=2,wait=100)", 1), threading.Event()
    slow = clinic.hospital(job, 1, gate=gate).begin()
    clinic.hospital(job, 0).begin()
    job.wait(30)
    gate.set()
    (event,) = cohorts(job)
    assert (event["trained"], event["dropped"]) == (["h0"], [["h1", "deadline"]])
    assert event["seconds"] >= 3 and "clients" in causes(job)
    assert event["message"] == "round 0: 1 of 2 clients replied; 1 dropped: h1 (deadline)"
    said = " ".join(slow.over().said)
    assert re.search(
        r"the update was too late and not counted: training took \d.* deadline of 3 s. In the job.s strategy, raise",
        said,
    )
    assert slow.ended.rounds == 0


@pytest.mark.parametrize("how", ["an error", "Ctrl-C"])
def test_no_round_waits_for_one_that_has_ended(clinic: Clinic, how: str) -> None:
    class Bad(Own):
        def loss(self, model, batch):
            if self.calls >= self.tries:
                raise KeyboardInterrupt if how == "Ctrl-C" else RuntimeError("a bad label")
            return super().loss(model, batch)

    job = clinic.job("fedavg:deadline=500,clients=remote(least=2,wait=100)", 1)
    good, bad = clinic.hospital(job, 0).begin(), clinic.hospital(job, 1)
    client = ClientProcess(
        WorkloadTrainer(Bad(1), rows_data(1)),
        bad.outside.token,
        job.id,
        bad.connection,
        bad.folder,
        name="h1",
        report=bad.said.append,
    )
    with pytest.raises(KeyboardInterrupt if how == "Ctrl-C" else WorkloadError):
        client.run()
    assert clinic.joined(job)["h1"]["state"] == "left"
    job.wait(60)  # and not 500 s
    (event,) = cohorts(job)
    assert (event["trained"], event["dropped"]) == (["h0"], [["h1", "left"]]) and good.over().ended.rounds == 1


def test_sigterm_in_a_training_ends_a_client_that_can_come_back(clinic: Clinic) -> None:
    job = clinic.job("fedavg:deadline=500,clients=remote(least=2,wait=100)", 2)
    good, other = clinic.hospital(job, 0).begin(), Process(clinic, job, 1, clinic.invite(job)["token"], pause=0.2)
    until(lambda: "has sent" in clinic.joined(job)["h0"]["doing"])  # the round waits for the other
    other.process.terminate()
    code, told = other.end()
    assert code == 143 and "rayps: ended by SIGTERM: " in told and "Traceback" not in told, told
    assert clinic.joined(job)["h1"]["state"] == "left"
    until(lambda: len(cohorts(job)) == 1)  # and does not wait 500 s
    other.environment["PAUSE"] = "0"
    other.start()
    assert other.end()[0] == 0 and good.over().ended.rounds == 2
    assert [event["trained"] for event in cohorts(job)] == [["h0"], ["h0", "h1"]]


def test_a_client_of_a_job_that_has_ended_ends_as_the_job(clinic: Clinic) -> None:
    job = clinic.job("fedavg:clients=remote(wait=100)", 1)
    clinic.hospital(job, 0).begin()
    clinic.trained(job)
    stopped = clinic.job("fedavg:clients=remote(least=2,wait=100)", 1)
    stopped.stop().wait(60)
    for over, succeeded in ((job, True), (stopped, False)):
        late = clinic.hospital(over, 1)
        late.start()
        late.over()
        assert late.error is None and (late.ended.succeeded, late.ended.rounds) == (succeeded, 0), late.error
        assert (late.ended.status, late.ended.reason) == (over.refresh().data["status"], over.data["reason"] or "")


def rows_data(k: int, width: int = 5) -> Any:
    x, y = rows(k)
    return rayps.data.tensors(x[:, :width], y, batch_size=8)


def test_what_does_not_fit_is_found_before_joining(clinic: Clinic) -> None:
    job = clinic.job("fedavg:clients=remote(wait=100)", 1)
    hospital = clinic.hospital(job, 0)
    client = ClientProcess(
        WorkloadTrainer(Own(0), rows_data(0, 3)),
        hospital.outside.token,
        job.id,
        hospital.connection,
        hospital.folder,
        name="h0",
    )
    with pytest.raises(WorkloadError, match=r"loss\(\) raised .* shapes cannot be multiplied"):
        client.run()
    assert clinic.joined(job) == {}
    job.stop().wait(30)


def no_thread_draws() -> bool:
    """Whether the job's driver, a thread of this process, draws no random numbers any more."""
    drawn = torch.get_rng_state()
    time.sleep(0.5)
    return torch.equal(drawn, torch.get_rng_state())


def test_trying_out_leaves_the_model_as_it_was() -> None:
    class Normed(Own):
        def model(self):
            return torch.nn.Sequential(torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1)).double()

    trainer = WorkloadTrainer(Normed(0), rows_data(0))
    until(no_thread_draws)
    model = trainer.trainer.flat.model
    before, drawn = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    trainer.try_out()
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert torch.equal(drawn, torch.get_rng_state()) and trainer.workload.calls == 1


def test_who_joins_later_is_told_of(clinic: Clinic) -> None:
    job, gate = clinic.job("fedavg:clients=remote(wait=100)", 3), threading.Event()
    clinic.hospital(job, 0, gate=gate).begin()
    until(lambda: clinic.joined(job)["h0"]["doing"] == "works on round 0")
    clinic.hospital(job, 1).begin()
    gate.set()
    job.wait(30)
    reported = [(event["names"], event["sizes"], event["rows"]) for event in job.events() if event["kind"] == "clients"]
    assert reported == [(["h0"], [20], 20), (["h0", "h1"], [20, 25], 45)]


# ---- nothing counts twice, whatever is killed


def test_a_worker_that_dies_in_a_round_goes_on_with_it(clinic: Clinic) -> None:
    job = clinic.job(FEDAVG.format(least=2), rounds=3)
    fast = clinic.hospital(job, 0).begin()
    slow = clinic.hospital(job, 1, pause=0.3).begin()
    until(lambda: clinic.joined(job)["h0"]["doing"] == "has sent round 1")
    until(lambda: any(event["kind"] == "checkpoint" for event in job.events()))
    clinic.kill_workers()
    learnt = clinic.trained(job)
    assert torch.equal(learnt, simulated("fedavg:local_epochs=2", 2))
    assert [event["kind"] for event in job.events()].count("restarted") == 1
    assert [event["replied"] for event in cohorts(job)][-1] == 2
    # round 1 was asked once: what had come still counted
    assert (fast.over().ended.rounds, slow.over().ended.rounds) == (3, 3)
    assert clinic.service.mailbox(job.id).newest().serial == 3


def test_a_service_that_is_started_again_in_a_round(tmp_path: Path) -> None:
    clinic = Clinic(tmp_path)
    job = clinic.job(FEDAVG.format(least=2), rounds=4)
    hospitals = [clinic.hospital(job, 0), clinic.hospital(job, 1, pause=0.05)]
    for hospital in hospitals:
        hospital.begin()
    until(lambda: clinic.joined(job)["h0"]["doing"] == "has sent round 1")
    port = clinic.port
    super(Clinic, clinic).close()  # the service alone: jobs and clients go on
    again = Clinic(tmp_path, port)
    try:
        learnt = again.trained(again.user.job(job.id))
        for hospital in hospitals:
            assert hospital.over().ended is not None, hospital.error
    finally:
        again.close()
    assert torch.equal(learnt, simulated("fedavg:local_epochs=2", 2, rounds=4))


def test_a_round_that_is_drawn_again_takes_nothing_of_the_old_one(tmp_path: Path) -> None:
    box = Mailbox(tmp_path)
    box.prepare()
    for name in ("a", "b"):
        box.join(name, name * 20, "t", 5)
    facts = {"round": 0, "strategy": {}}
    first = box.open_round({**facts, "starts": box.starts(0, True)}, {0: "a", 1: "b"}, 60.0, 100, b"model")
    assert box.deliver(first.serial, 0, _part(box, first.serial, 0)) and box.arrived(first.serial) == {0}
    assert not box.deliver(first.serial, 0, _part(box, first.serial, 0, b"other"))  # the first one stays
    same = box.open_round({**facts, "starts": box.starts(0, True)}, {0: "a"}, 60.0, 100, b"model")
    assert same.serial == first.serial and box.arrived(first.serial) == {0}
    other = box.open_round({**facts, "starts": box.starts(0, True)}, {0: "a", 1: "b"}, 60.0, 100, b"another model")
    assert other.serial == first.serial + 1 and box.arrived(other.serial) == set()
    with pytest.raises(Conflict, match="too late"):
        box.part(first.serial, 1, "a" * 64)
    part = box.part(other.serial, 1, "a" * 64)
    part.write_bytes(b"update")
    assert (
        set(box.close_round(other.serial)) == set() and box.close_round(other.serial) == {}
    )  # only one may take a round
    with pytest.raises(Conflict, match="does not count"):
        box.deliver(other.serial, 1, part)
    assert not part.exists()
    box.write_verdicts(other.serial, {1: "not finite"})
    assert (box.verdict(other.serial, 1), box.verdict(other.serial, 0)) == ("not finite", None)


def _part(box: Mailbox, serial: int, number: int, raw: bytes = b"update") -> Path:
    part = box.part(serial, number, hashlib.sha256(raw).hexdigest())
    part.write_bytes(raw)
    return part


def test_states_of_rounds_that_were_drawn_again_are_void(clinic: Clinic, tmp_path: Path) -> None:
    job = clinic.job("fedavg:clients=remote", 1)
    folder = clinic.hospital(job, 0, state=tmp_path).folder
    job.stop()
    for round, serial in ((0, 1), (1, 2), (2, 3)):
        folder.save_state(round, serial, "scaffold", {"c": raw_of(torch.tensor([float(serial)]))}, since=0)
    starts = [(0, 1)]
    assert tensor_of(folder.load_state(2, "scaffold", starts)["c"]).item() == 2.0
    assert folder.load_state(3, "ditto", starts) == {}  # another strategy's
    starts.append((1, 4))  # the job went back to round 1: what was learnt there before is no more
    assert tensor_of(folder.load_state(2, "scaffold", starts)["c"]).item() == 1.0
    folder.save_state(2, 5, "scaffold", {"c": raw_of(torch.tensor([9.0]))}, since=2)
    folder.save_state(3, 6, "scaffold", {"c": raw_of(torch.tensor([10.0]))}, since=3)
    assert tensor_of(folder.load_state(4, "scaffold", starts)["c"]).item() == 10.0
    assert sorted(path.name for path in tmp_path.glob("state-*")) == ["state-2.safetensors", "state-3.safetensors"]


# ---- updates that cannot be used


class Hand:
    """A client by hand, which may send anything."""

    def __init__(self, clinic: Clinic, job: Any, name: str, token: str | None = None) -> None:
        self.token = token or clinic.invite(job)["token"]
        self.http = httpx2.Client(base_url=clinic.url, headers={"Authorization": f"Bearer {self.token}"})
        body = {"name": name, "key": name * 20, "samples": 20}
        self.facts = self.http.post("/api/v1/client/join", json=body).raise_for_status().json()
        self.http.headers["Rayps-Client"] = f"{job.id}:{self.facts['number']}:{name * 20}"

    def work(self, after: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = self.http.get("/api/v1/client/work", params={"after": after, "wait": 10}).json()
        return found

    def order(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(until(lambda: self.work()["order"]))
        return found

    def send(self, serial: int, raw: bytes, digest: str | None = None) -> httpx2.Response:
        headers = {"Rayps-Sha256": digest or hashlib.sha256(raw).hexdigest()}
        return self.http.put(f"/api/v1/client/rounds/{serial}/update", content=raw, headers=headers)


def an_update(w: torch.Tensor, n: Any = 20, **more: torch.Tensor) -> bytes:
    counts = json.dumps({"n": n, "steps": 3, "samples": 20, "loss": 0.5})
    return safetensors.torch.save({"w": w, **more}, {"counts": counts})


def _header(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


BAD = {
    "nan": (an_update(torch.full((50,), torch.nan, dtype=torch.float64)), "finite"),
    "short": (an_update(torch.zeros(49, dtype=torch.float64)), r"'w' is float64 \(49,\), but float64 \(50,\)"),
    "single": (an_update(torch.zeros(50)), "float32"),
    "many": (an_update(torch.zeros(50, dtype=torch.float64), n=10**9), "1000000000 samples, but joined with 20"),
    "none": (an_update(torch.zeros(50, dtype=torch.float64), n=0), "reports 0 samples"),
    "more": (an_update(torch.zeros(50, dtype=torch.float64), c=torch.zeros(3)), "unknown 'c'"),
    "noise": (os.urandom(200), "cannot be read"),
    "deep": (_header('{"__metadata__":' + "[" * 100_000), "cannot be read"),
    "loss": (
        _header(
            json.dumps({"__metadata__": {"counts": json.dumps({"n": 20, "steps": 1, "samples": 20, "loss": 10**400})}})
        ),
        "cannot be read",
    ),
}


def test_what_cannot_be_used_is_rejected_by_name_and_changes_nothing(clinic: Clinic) -> None:
    job = clinic.job(FEDAVG.format(least=2 + len(BAD)), rounds=1)
    clinic.hospitals(job, 2)
    hands = {name: Hand(clinic, job, name) for name in BAD}
    serial = 1
    threads = [threading.Thread(target=hand.order) for hand in hands.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for name, hand in hands.items():
        assert hand.send(serial, BAD[name][0]).status_code == 201
        again = hand.send(serial, BAD[name][0])
        assert again.status_code == 200 and again.json()["again"]
    learnt = clinic.trained(job)
    (event,) = cohorts(job)
    assert torch.equal(learnt, simulated("fedavg:local_epochs=2", 2, rounds=1))
    assert (event["replied"], event["trained"][:2], event["dropped"]) == (2, ["h0", "h1"], [])
    rejected = dict(event["rejected"])
    assert rejected.keys() == BAD.keys()
    for name, (_, why) in BAD.items():
        assert re.search(why, rejected[name]), (name, rejected[name])
    reported = hands["nan"].work(after=serial)
    assert reported["kind"] == "end" and "finite" in reported["verdict"]


@pytest.mark.parametrize("end", [False, True])
def test_a_client_that_waits_is_told_why_its_update_did_not_count(clinic: Clinic, end: bool) -> None:
    job = clinic.job(FEDAVG.format(least=2), rounds=1 if end else 2)
    bad, good = Hand(clinic, job, "nan"), Hand(clinic, job, "good")
    serial = int(bad.order()["serial"])
    assert bad.send(serial, BAD["nan"][0]).status_code == 201
    seen = clinic.service.mailbox(job.id).folder / "seen" / str(bad.facts["number"])
    before = seen.stat().st_mtime_ns
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(bad.work, serial)  # asks while the round is open, as a client does
        until(lambda: seen.stat().st_mtime_ns > before)
        assert good.send(serial, an_update(torch.zeros(50, dtype=torch.float64))).status_code == 201
        reported = waits.result(60)
    while reported["kind"] == "wait":
        reported = bad.work(serial)
    assert reported["kind"] == ("end" if end else "round") and "finite" in str(reported["verdict"])
    clinic.user.call("POST", f"/api/v1/jobs/{job.id}/stop") if not end else job.wait(60)


def test_what_is_too_large_or_was_changed_on_its_way_is_refused_at_once(clinic: Clinic) -> None:
    job = clinic.job("fedavg:clients=remote(wait=100)", 1)
    hand = Hand(clinic, job, "hand")
    serial = hand.order()["serial"]
    good = an_update(torch.zeros(50, dtype=torch.float64))
    assert hand.send(serial, b"0" * (3 << 20)).status_code == 413
    assert hand.send(serial, good, hashlib.sha256(b"other").hexdigest()).status_code == 422
    assert hand.send(serial + 1, good).status_code == 404
    box = clinic.service.mailbox(job.id)
    assert box.arrived(serial) == set() and not list((box.folder / "rounds" / str(serial)).glob(".*"))
    assert hand.send(serial, good).status_code == 201
    job.wait(20)


# ---- trust


class Meddler(httpx2.BaseTransport):
    """Somebody between a client and its service."""

    def __init__(self) -> None:
        self._through = httpx2.HTTPTransport()
        self.orders: list[dict[str, Any]] = []
        self.change = lambda path, body: body

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        answer = self._through.handle_request(request)
        body = answer.read()
        if request.url.path.endswith("/work") and json.loads(body).get("order"):
            self.orders.append(json.loads(body))
        changed = self.change(request.url.path, body)
        headers = [(k, v) for k, v in answer.headers.items() if k.lower() != "content-length"]
        return httpx2.Response(answer.status_code, headers=headers, stream=httpx2.ByteStream(changed))


def in_order(path: str, body: bytes, **facts: Any) -> bytes:
    found = json.loads(body) if path.endswith("/work") else {}
    if not found.get("order"):
        return body
    found["order"] = order_text({**json.loads(found["order"]), **facts})
    return json.dumps(found).encode()


MEDDLING = {
    "another round": (lambda path, body: in_order(path, body, round=7), "without the service's signature"),
    "another rate": (lambda path, body: in_order(path, body, strategy={"name": "fedprox", "mu": 9.0}), "signature"),
    "another model": (
        lambda path, body: body[:-8] + struct.pack("<d", 1e6) if path.endswith("/parameters") else body,
        "do not have the SHA-256 hash",
    ),
    "another key": (
        lambda path, body: (
            json.dumps(json.loads(body) | {"public_key": "A" * 43}).encode() if path.endswith("/key") else body
        ),
        "not the service that made this token",
    ),
    "another key then": (
        lambda path, body: (
            json.dumps(json.loads(body) | {"public_key": "A" * 43}).encode() if path.endswith("/join") else body
        ),
        "not the service that made this token",
    ),
}


def test_a_service_without_an_authority_refuses_jobs_that_need_certificates(clinic: Clinic) -> None:
    """No client could join them, and the statement would be signed by nobody."""
    with pytest.raises(
        ConfigError, match=r"statement, .*this service admits none: .*--members-ca FILE(.|\n)*statement"
    ):
        clinic.job("fedavg:clients=remote(wait=100)", statement="Purpose: digits.")
    with pytest.raises(ConfigError, match=r"members=true: .*this service admits none: .*--members-ca FILE"):
        clinic.job("fedavg:clients=remote(wait=100,members=true)")


@pytest.mark.parametrize("what", MEDDLING)
def test_a_client_refuses_what_somebody_has_changed(clinic: Clinic, what: str) -> None:
    job = clinic.job("fedavg:clients=remote(wait=100)", 1)
    meddler = Meddler()
    meddler.change, why = MEDDLING[what]
    hospital = clinic.hospital(job, 0, transport=meddler)
    hospital.start()
    hospital.over()
    assert isinstance(hospital.error, Unauthorized) and why in str(hospital.error) and hospital.error.exit_code == 4
    assert not any("sent" in connection for connection in hospital.said)
    states = [each["state"] for each in clinic.joined(job).values()]
    assert states == ([] if what == "another key" else ["left"])
    job.stop().wait(30)


def test_a_client_refuses_orders_that_are_played_again_or_are_of_another_job(clinic: Clinic, tmp_path: Path) -> None:
    job = clinic.job("fedavg:clients=remote(wait=100)", 2)
    meddler = Meddler()
    hospital = clinic.hospital(job, 0, transport=meddler)
    hospital.start()
    job.wait(30)
    hospital.over()
    client, (first, second) = hospital.outside, meddler.orders
    for old in (first, second):
        with pytest.raises(Unauthorized, match="is a replay"):
            client.verified_order(old)
    key = clinic.service.client_tokens.key
    good = json.loads(second["order"]) | {"serial": 9}

    def signed(**facts: Any) -> dict[str, Any]:
        text = order_text(good | facts)
        return {"order": text, "signature": key.sign(text)}

    assert client.verified_order(signed())["serial"] == 9
    for facts, why in (
        ({"job": "0" * 26}, "the job of the order is"),
        ({"client": 5}, "the client of the order is 5"),
        ({"name": "x"}, "name"),
        ({"kind": "other"}, "kind"),
    ):
        with pytest.raises(Unauthorized, match=why):
            client.verified_order(signed(**facts))
    other = Key.load_or_create(tmp_path / "key")
    with pytest.raises(Unauthorized, match="signature"):
        client.verified_order({**signed(), "signature": other.sign(signed()["order"])})
    with pytest.raises(Unauthorized, match="its key differs"):
        verified(signed()["order"], other.sign(signed()["order"]), other.public, key.fingerprint)
    with pytest.raises(Unauthorized, match="order 9 was received before"):
        client._folder.start_order(9)
        client.verified_order(signed(serial=8))


def test_a_revoked_token_is_refused_at_once_and_its_update_is_withdrawn(clinic: Clinic) -> None:
    job = clinic.job(FEDAVG.format(least=2), rounds=1)
    invited = clinic.invite(job)
    bad = clinic.hospital(job, 0, invited["token"]).begin()
    clinic.hospital(job, 1, pause=0.1).begin()
    until(lambda: clinic.joined(job)["h0"]["doing"] == "has sent round 0")
    clinic.user.call("DELETE", f"/api/v1/client-tokens/{invited['id']}")
    bad.over()
    assert isinstance(bad.error, Unauthorized) and bad.error.exit_code == 4 and "revoked" in str(bad.error)
    job.wait(30)
    (event,) = cohorts(job)
    assert (event["trained"], event["dropped"]) == (["h1"], [["h0", "revoked"]])
    (told,) = (event["message"] for event in job.events() if event["kind"] == "revoked")
    assert told.startswith(f"the token ({invited['id']}) of the client h0 was revoked: no round asks it")
    with pytest.raises(httpx2.HTTPStatusError, match="401"):
        Hand(clinic, job, "again", invited["token"])
    known = {token["id"]: token for token in clinic.user.call("GET", "/api/v1/client-tokens")["tokens"]}
    assert known[invited["id"]]["revoked_at"] and "token" not in known[invited["id"]]


def test_a_client_may_do_what_is_a_clients_and_nothing_else(clinic: Clinic) -> None:
    job, other = clinic.job("fedavg:clients=remote(wait=100)"), clinic.job("fedavg:clients=remote(wait=100)")
    hand = Hand(clinic, job, "hand")
    for method, path in (
        ("GET", "/api/v1/jobs"),
        ("POST", f"/api/v1/jobs/{job.id}/stop"),
        ("GET", "/metrics"),
        ("POST", "/api/v1/client-tokens"),
        ("GET", f"/api/v1/jobs/{job.id}/logs"),
        ("POST", "/api/v1/codes"),
        ("GET", f"/api/v1/jobs/{job.id}/clients"),
    ):
        assert hand.http.request(method, path, json={} if method == "POST" else None).status_code == 403, path
    assert (
        clinic.http.get("/api/v1/client/work", headers={"Rayps-Client": hand.http.headers["Rayps-Client"]}).status_code
        == 403
    )  # nor may a user pass for a client
    for who in (f"{other.id}:0:{'hand' * 20}",):
        assert hand.http.get("/api/v1/client/work", headers={"Rayps-Client": who}).status_code == 403
    for who in (f"{job.id}:0:{'x' * 20}", f"{job.id}:7:{'hand' * 20}"):
        assert hand.http.get("/api/v1/client/work", headers={"Rayps-Client": who}).status_code == 401
    taken = hand.http.post("/api/v1/client/join", json={"name": "hand", "key": "y" * 20, "samples": 3})
    assert taken.status_code == 409 and taken.json()["code"] == "name_taken"
    named = clinic.user.call("POST", "/api/v1/client-tokens", json={"name": "only-me", "days": 1})
    join = {"key": "k" * 20, "samples": 3}
    http = httpx2.Client(base_url=clinic.url, headers={"Authorization": f"Bearer {named['token']}"})
    assert http.post("/api/v1/client/join", json=join).status_code == 422  # which job?
    assert http.post("/api/v1/client/join", json={**join, "job": job.id, "name": "else"}).status_code == 422
    assert http.post("/api/v1/client/join", json={**join, "job": job.id}).json()["name"] == "only-me"
    for each in (job, other):
        each.stop()


# ---- what cannot be


@pytest.mark.parametrize(
    ("strategy", "workers", "why"),
    [
        ("fedavg:clients=remote,dropout=0.5", 1, "dropout is 0.5"),
        ("fedavg:clients=remote,speed=0.1", 1, "speed"),
        ("fedavg:clients=here", 1, "remote"),
        ("fedavg:clients=remote(most=3)", 1, "least, wait and members"),
        ("fedavg:clients=remote(least=0)", 1, "least is 0"),
        ("fedavg:clients=remote(wait=-1)", 1, "wait is -1"),
        ("fedbuff:clients=remote,rule=median", 1, "rule is 'median', which fedbuff does not support"),
        ("fedbuff:clients=remote,privacy=dp(noise_multiplier=1)", 1, "cannot be proven under fedbuff"),
        ("fedavg:clients=remote", 2, "workers is 2"),
        ("fedavg:clients=remote", 1, "job service"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(strategy: str, workers: int, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        train(All(2), strategy, workers=workers)


@pytest.mark.parametrize(
    ("strategy", "why"),
    [
        ("fedavg:rule=krum(f=1),clients=remote(least=4)", "needs a round of at least 5"),
        ("fedavg:min_replies=3,fraction=0.5,clients=remote(least=4)", "may start with 4 clients and then asks 2"),
    ],
)
def test_what_the_fewest_clients_could_not_do_is_refused(clinic: Clinic, strategy: str, why: str) -> None:
    job = clinic.job(strategy).wait(30)
    assert job.data["status"] == "FAILED" and why in job.data["reason"]


def test_the_same_columns_of_another_file(tmp_path: Path) -> None:
    for name, low in (("a", 0.0), ("b", 50.0)):
        table = pa.table({"x": [low + i for i in range(6)], "y": [1.0] * 6, "client": ["c", "d"] * 3})
        pq.write_table(table, tmp_path / f"{name}.parquet")

    class Table(Own):
        def data(self):
            return rayps.data.parquet(tmp_path / "a.parquet", features="x", label="y", batch_size=4, client="client")

    data = own_data(Table(), str(tmp_path / "b.parquet"))
    found = rows_of(data)
    assert (found.batch_size, found.take(found.numbers).x.reshape(-1).tolist()) == (4, [50.0 + i for i in range(6)])
    assert len(rows_of(own_data(Table(), None)).numbers) == 6  # a file that has clients is all this client's here
    with pytest.raises(DataError, match="is not Parquet"):
        own_data(Own(), str(tmp_path / "b.parquet"))


def test_the_commands(clinic: Clinic, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYPS_URL", clinic.url)
    monkeypatch.setenv("RAYPS_TOKEN", clinic.token)

    def say(*arguments: str) -> tuple[int, str, str]:
        code = main(list(arguments))
        return code, *capsys.readouterr()

    job = clinic.job("fedavg:clients=remote(least=2,wait=100)", 1)
    code, token, note = say("token", "create", "--job", job.id, "--name", "h0", "--days", "3", "--to", "-")
    assert code == 0 and token.startswith(f"rpc.{job.id}.") and "rayps token revoke" in note
    made = ClientToken.read(token)
    assert made.name == "h0"
    clinic.hospital(job, 0, str(made)).begin()
    until(lambda: "round 0 waits for 1 more" in clinic.reason(job))
    code, listed, note = say("joined", job.id[:20])
    assert "h0" in listed and "round 0 waits for 1 more" in note
    identity = json.loads(say("token", "ls", "--job", job.id, "-o", "json")[1])[0]["id"]
    path = clinic.path / "rotated"
    code, said, note = say("token", "rotate", identity, "--to", str(path))
    rotated = ClientToken.read(path.read_text().strip())
    assert code == 0 and said == "" and (rotated.job, rotated.name) == (job.id, "h0") and str(rotated) not in note
    assert httpx2.get(f"{clinic.url}/api/v1/client/key", headers={"Authorization": f"Bearer {made}"}).status_code == 401
    identity = json.loads(say("token", "ls", "--job", job.id, "-o", "json")[1])[0]["id"]
    assert say("token", "revoke", identity)[0] == 0 and "revoked" in say("token", "ls")[1]
    refused = say("token", "rotate", identity, "--to", "-")
    assert refused[0] == 5 and "was revoked" in refused[2]
    assert say("token", "revoke", "nothing")[0] == 3
    monkeypatch.setenv("RAYPS_STATE_DIR", str(clinic.path / "home"))
    monkeypatch.setenv("HOSPITAL", "0")
    monkeypatch.chdir(clinic.path)
    free = str(ClientToken(made.secret, made.job, made.fingerprint))
    for arguments, why in (
        (("--token", "rps_x"), "not a client token"),
        (("--token", "@/nowhere"), "cannot be read"),
        (("--token", str(made), "--job", "other"), "not for other"),
        (("--token", str(made), "--name", "../x"), "at most 64 characters"),
        (("--token", str(made), "--name", "h1"), "for the client 'h0', not for 'h1'"),
        (("--token", free), "give this client's name"),
        (("--token", str(made), "--device", "cuda:99"), "Give --device cpu"),
        ((), "RAYPS_CLIENT_TOKEN"),
    ):
        code, _, note = say("client", *arguments, "work.py:Slow")
        assert code == 2 and why in note and len(note.strip().splitlines()) <= 3, note
    assert not (clinic.path / "home" / "clients").exists()  # a client that cannot begin leaves no folder
    job.stop()


def test_a_token_needs_a_job_that_has_real_clients(clinic: Clinic) -> None:
    job = clinic.user.submit("work.py:Server", working_dir=clinic.path, strategy="all_reduce")
    with pytest.raises(ConfigError, match="clients=remote"):
        clinic.invite(job)
    with pytest.raises(ConfigError, match="a job, a client's name, or both"):
        clinic.user.call("POST", "/api/v1/client-tokens", json={})
    whole = str(ClientToken("s", None, "f", "Ward 7"))
    assert ClientToken.read(whole).name == "Ward 7" and ClientToken.read("rpc.any.s.f").name is None
    for text in ("rps_something", str(ClientToken("s", None, "f", "../up")), f"{whole}.more", "rpc.any.s.f."):
        with pytest.raises(ConfigError, match="not a client token"):
            ClientToken.read(text)
    job.wait(30)


def test_a_worker_that_does_not_have_the_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="file system that all machines share"):
        remote_replies.mailbox_of(str(tmp_path / "elsewhere"))


def test_a_client_with_another_model_is_told(clinic: Clinic) -> None:
    job = clinic.job("fedavg:clients=remote(wait=100)", 1)
    hospital = clinic.hospital(job, 0)

    class Wider(Own):
        def model(self):
            return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()

    outside = hospital.outside
    fresh = type(outside)(
        WorkloadTrainer(Wider(0), Own(0).data()), outside.token, job.id, hospital.connection, hospital.folder, name="h0"
    )
    with pytest.raises(
        WorkloadError, match=r"the job has 0.weight \[\[7, 5\], 'float64'\], this workload has \[\[8, 5\]"
    ):
        fresh.run()
    job.stop().wait(30)

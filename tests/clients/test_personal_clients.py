"""Personal models of real clients: made where the rows are, with the bits of the simulation; nothing is sent."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from typing import Any

import httpx2
import pytest
import safetensors.torch
import torch
from client_site import All, Clinic, Hospital, Own
from rayps_client.errors import ConfigError, Unauthorized, WorkloadError
from rayps_client.exchange.global_model import GLOBAL_FILE
from rayps_client.exchange.signed_orders import order_text
from small_work import train

import rayps
from rayps.cli.main import main
from rayps.clients.global_model import GlobalModel
from rayps.clients.personal_client import PersonalClient

REMOTE = "clients=remote(least=2,wait=100)"


class Recorder(httpx2.BaseTransport):
    """Keeps what a client sends and receives."""

    def __init__(self) -> None:
        self.sent, self.asked = list[bytes](), list[str]()
        self._inner = httpx2.HTTPTransport()

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        self.asked.append(f"{request.method} {request.url.path}")
        self.sent.append(bytes(request.read()))
        return self._inner.handle_request(request)

    def updates(self) -> list[bytes]:
        return [raw for path, raw in zip(self.asked, self.sent, strict=True) if path.endswith("/update")]


def personal(hospital: Hospital, k: int) -> PersonalClient:
    folder = hospital.folder.folder
    return PersonalClient(Own(k), Own(k).data(), folder, GlobalModel.load(folder))


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in mine.items())


@pytest.mark.parametrize(
    "strategy", ["ditto:lam=0.3", "fedper:private=2", "fedrep:private=2,head_epochs=2", "fedavg:finetune=2"]
)
def test_the_models_are_those_of_the_simulation_and_stay_where_they_are(clinic: Clinic, strategy: str) -> None:
    job = clinic.job(f"{strategy},{REMOTE}", rounds=3, seed=5)
    wires = [Recorder(), Recorder()]
    hospitals = [clinic.hospital(job, k, transport=wires[k]).begin() for k in range(2)]
    learnt = clinic.trained(job)
    law = train(All(2), strategy, epochs=3, seed=5)
    assert torch.equal(learnt, law.snapshot.params)
    for k, hospital in enumerate(hospitals):
        assert hospital.over().ended.rounds == 3
        mine = personal(hospital, k)
        found, want = mine.model, law.client(str(k)).model()
        assert same(found, want) and not same(found, law.model())
        assert same(mine.global_model(), law.model())
        rows = Own(k).evaluation_data()
        assert mine.metrics(found, rows)["error"] != mine.metrics(mine.global_model(), rows)["error"]
        updates = wires[k].updates()
        assert len(updates) == 3
        size = 5 * 7 + 7 if strategy.startswith("fed") and "private" in strategy else 50
        for raw in updates:
            assert {name: len(value) for name, value in safetensors.torch.load(raw).items()} == {"w": size}
        own = [value for name, value in mine.state.items() if name.startswith(("private/", "v"))]
        assert bool(own) == ("finetune" not in strategy)
        everything = b"".join(wires[k].sent)
        for value in torch.cat([value.reshape(-1) for value in own]).tolist() if own else []:
            assert struct.pack("<d", value) not in everything
        for value in found[2].weight.reshape(-1).tolist():
            assert struct.pack("<d", value) not in everything


def test_a_job_without_personal_models_fetches_nothing_at_its_end(clinic: Clinic) -> None:
    job, wire = clinic.job("fedavg:clients=remote(wait=100)", rounds=1), Recorder()
    hospital = clinic.hospital(job, 0, transport=wire).begin().over()
    assert not any("model" in path for path in wire.asked)
    with pytest.raises(ConfigError, match="add --fetch"):
        personal(hospital, 0)


def test_who_can_have_no_model_is_told_why(clinic: Clinic) -> None:
    job = clinic.job("ditto:clients=remote(wait=100)", rounds=1)
    hospital = clinic.hospital(job, 0).begin().over()
    mine = personal(hospital, 0)
    assert mine.model is not None
    for path in hospital.folder.folder.glob("state-*"):
        path.unlink()
    with pytest.raises(ConfigError, match="no update of this client has counted"):
        _ = personal(hospital, 0).model
    tensors = {name: value for name, value in mine.given.tensors.items() if name != "model/2.bias"}
    with pytest.raises(WorkloadError, match=r"'2\.bias' has shape None, this workload's \(1,\)"):
        _ = replace(mine, given=GlobalModel(mine.given.facts, tensors)).model


def test_parameters_that_somebody_changed_are_not_used(clinic: Clinic) -> None:
    class Meddler(Recorder):
        def __init__(self, change: Any) -> None:
            super().__init__()
            self.change = change

        def handle_request(self, request: httpx2.Request) -> httpx2.Response:
            answer = super().handle_request(request)
            raw = self.change(request.url.path, answer.read())
            headers = [(key, value) for key, value in answer.headers.items() if key.lower() != "content-length"]
            return httpx2.Response(answer.status_code, headers=headers, stream=httpx2.ByteStream(raw))

    def other_bytes(path: str, raw: bytes) -> bytes:
        return raw[:-1] + bytes([raw[-1] ^ 1]) if path.endswith("/model.safetensors") else raw

    def other_facts(path: str, raw: bytes) -> bytes:
        if not path.endswith("/client/model"):
            return raw
        found = json.loads(raw)
        return json.dumps({**found, "model": order_text({**json.loads(found["model"]), "seed": 7})}).encode()

    for change, why in ((other_bytes, "SHA-256"), (other_facts, "without the service's signature")):
        job = clinic.job("ditto:clients=remote(wait=100)", rounds=1)
        hospital = clinic.hospital(job, 0, transport=Meddler(change)).begin().over()
        assert isinstance(hospital.error, Unauthorized) and why in str(hospital.error)
        assert not (hospital.folder.folder / GLOBAL_FILE).exists()


def test_only_joined_clients_get_the_parameters(clinic: Clinic) -> None:
    job = clinic.job("fedper:private=2,clients=remote(wait=100)", rounds=1)
    wire = Recorder()
    hospital = clinic.hospital(job, 0, transport=wire).begin().over()
    token = clinic.invite(job)["token"]
    http = httpx2.Client(base_url=clinic.url, headers={"Authorization": f"Bearer {token}"})
    mine = {"Rayps-Client": f"{job.id}:0:{hospital.folder.key}"}
    facts = json.loads(http.get("/api/v1/client/model", headers=mine).json()["model"])
    path = f"/api/v1/client/model/{facts['step']}/model.safetensors"
    assert (facts["client"], facts["name"], facts["round"]) == (0, "h0", 1)
    for address in ("/api/v1/client/model", path):
        assert http.get(address, headers=mine).status_code == 200
        assert http.get(address, headers={"Rayps-Client": f"{job.id}:0:{'x' * 20}"}).status_code == 401
        assert http.get(address).status_code == 422
        assert clinic.http.get(address, headers=mine).status_code == 403  # a user is not a client
    for other in ("manifest.json", "shared.safetensors", "..%2Fmanifest.json"):
        assert http.get(path.replace("model.safetensors", other), headers=mine).status_code == 404
    assert http.get(path.replace(f"/{facts['step']}/", "/99/"), headers=mine).status_code == 404


def test_the_command(clinic: Clinic, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    job = clinic.job(f"fedper:private=2,{REMOTE}", rounds=2)
    state = clinic.path / "homes"
    hospitals = [clinic.hospital(job, k, state=state / job.id / f"h{k}").begin() for k in range(2)]
    clinic.trained(job)
    (said,) = [text for text in hospitals[0].over().said if "rayps personal" in text]
    assert said.startswith("the job's parameters after 2 rounds are stored")
    monkeypatch.setenv("HOSPITAL", "0")
    monkeypatch.chdir(clinic.path)
    base = ["personal", "work.py:Slow", "--state", str(state), "--job", job.id, "--name", "h0"]

    def say(*arguments: str) -> tuple[int, str, str]:
        code = main([*base, *arguments])
        return code, *capsys.readouterr()

    code, out, _ = say("--evaluate", "--out", "mine", "-o", "json")
    assert code == 0
    measured = json.loads(out[: out.rindex("}") + 1])
    model = personal(hospitals[0], 0).model
    assert same(rayps.load_state(Own().model(), clinic.path / "mine"), model)
    assert measured["personal"]["error"] != measured["global"]["error"] and measured["rounds"] == 2
    code, out, _ = say("--evaluate")
    assert code == 0 and "personal" in out and "error" in out
    assert say()[0] == 2
    (state / job.id / "h0" / GLOBAL_FILE).unlink()
    code, _, note = say("--evaluate")
    assert code == 2 and "add --fetch" in note
    assert say("--evaluate", "--fetch", "--url", clinic.url, "--token", clinic.invite(job)["token"])[0] == 0
    nobody = [*base[:-1], "h7", "--evaluate", "--fetch", "--url", clinic.url, "--token", clinic.invite(job)["token"]]
    assert main(nobody) == 2 and "has joined" in capsys.readouterr().err

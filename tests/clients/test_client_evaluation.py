"""Real clients evaluate models on their own rows: the metrics are those of one evaluation of all rows."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from client_site import SIZES, Clinic, Hospital, Own, Server, rows
from rayps_client.errors import ConfigError, DataError
from rayps_client.secure.quantise import ClientNumbers, Quantiser
from rayps_client.trainers.own_metrics import (
    OwnMetrics,
    OwnTotal,
    VectorLayout,
    decode_metrics,
    encode_metrics,
    totals_of_sum,
    vector_of,
)
from small_work import train

import rayps
from rayps.clients.workload_trainer import WorkloadTrainer
from rayps.core.metrics import Total
from rayps.federated.client_evaluation import cut_metrics, summed
from rayps.strategies.catalogue import parse
from rayps.tensors.flat import FlatModel


class Evaluated(Own):
    """A hospital with evaluation rows of its own: those of the hospital after it."""

    def evaluation_data(self):
        return rayps.data.tensors(*rows(self.k + 1), batch_size=8)


class Without(Own):
    def evaluation_data(self):
        raise RuntimeError("no such rows here")


def join(clinic: Clinic, job: Any, kinds: list[type[Own]]) -> list[Hospital]:
    found = []
    for k, kind in enumerate(kinds):
        hospital = clinic.hospital(job, k)
        hospital.outside.trainer = WorkloadTrainer(kind(k), kind(k).data())
        found.append(hospital.begin())
    return found


def law(learnt: torch.Tensor, hospitals: list[int]) -> dict[str, float]:
    """One evaluation of all rows of these hospitals, with the parameters at the end of the job."""
    work = Server()
    flat = FlatModel(work.model())
    flat.vector.copy_(learnt)
    x, y = (torch.cat(each) for each in zip(*(rows(k + 1) for k in hospitals), strict=True))
    with torch.no_grad():
        off = flat.model(x) - y
    return {"loss": float((off**2).mean()), "error": float(off.abs().mean())}


def metrics_of(job: Any) -> list[dict[str, float]]:
    return [point["metrics"] for point in job.metrics() if point["kind"] == "evaluation"]


PLAIN = "fedavg:local_epochs=1,deadline=500,client_evaluation=true,clients=remote(least={},wait=100){}"


def test_clients_metrics_are_those_of_one_evaluation_of_all_their_rows(clinic: Clinic) -> None:
    job = clinic.job(PLAIN.format(3, ""), rounds=2, seed=5)
    hospitals = join(clinic, job, [Evaluated, Evaluated, Without])
    learnt, found = clinic.trained(job), metrics_of(job)
    assert len(found) == 2 and found[0]["client_error"] != found[1]["client_error"]
    for name, value in law(learnt, [0, 1]).items():
        assert found[-1][f"client_{name}"] == pytest.approx(value, rel=1e-12)
    assert found[-1]["client_replies"] == 2 and "personal_error" not in found[-1]
    assert [hospital.over().ended.rounds for hospital in hospitals] == [2, 2, 2]
    assert any(f"evaluated on {SIZES[1]} rows; sent" in text for text in hospitals[0].said)
    assert any("no metrics of this client count" in text and "no such rows" in text for text in hospitals[2].said)


def test_under_masks_the_metrics_are_the_same_and_nobody_is_seen(
    clinic: Clinic, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads = list[str]()
    monkeypatch.setattr("rayps_client.process.encode_metrics", lambda found: uploads.append("in clear") or b"")
    more = ",metric_bound=4,secure=secagg(clip=5,bits=24,max_weight=100)"
    job = clinic.job(PLAIN.replace("fedavg", "ditto").format(3, more), rounds=1, seed=5)
    hospitals = join(clinic, job, [Evaluated, Evaluated, Without])
    learnt, (found,) = clinic.trained(job), metrics_of(job)
    for name, value in law(learnt, [0, 1]).items():
        assert value < 4 and found[f"client_{name}"] == pytest.approx(value, abs=4 * 3 / 2**22)
    assert 0 < found["personal_error"] < 4 and found["client_replies"] == 2 and not uploads
    files = [path.read_bytes() for path in clinic.service.folder(job.id).rglob("*") if path.is_file()]
    assert not any(b"no such rows" in each for each in files)  # what a client says of its rows stays with it
    assert [hospital.over().ended.rounds for hospital in hospitals] == [1, 1, 1]


@pytest.mark.parametrize("strategy", ["ditto:local_epochs=1", "fedavg:finetune=1", "fedper:private=2"])
def test_a_personal_metric_is_that_of_the_simulation(clinic: Clinic, strategy: str) -> None:
    class All(Server):
        def data(self):
            return self._of([rows(k) for k in range(2)])

        def evaluation_data(self):
            return self._of([rows(k + 1) for k in range(2)])

        def _of(self, parts):
            who = np.concatenate([np.full(len(x), k) for k, (x, _) in enumerate(parts)])
            x, y = (torch.cat(each) for each in zip(*parts, strict=True))
            return rayps.data.tensors(x, y, batch_size=8, client=who)

    told = f"{strategy},deadline=500,client_evaluation=true,clients=remote(least=2,wait=100)"
    job = clinic.job(told, rounds=1, seed=5)
    join(clinic, job, [Evaluated, Evaluated])
    clinic.trained(job)
    result, (found,) = train(All(), strategy, epochs=1, seed=5), metrics_of(job)
    assert found["personal_error"] == pytest.approx(result.metrics["personal_error"], rel=1e-12)
    assert found["client_error"] == pytest.approx(result.metrics["error"], rel=1e-12)


@pytest.mark.parametrize(
    ("more", "noise"),
    [
        ("", "server"),
        ("secure=secagg(clip=5,max_weight=1),", "server"),
        ("secure=secagg(clip=5,max_weight=1),", "clients"),
    ],
    ids=["clear", "masked", "by clients"],
)
def test_a_private_job_releases_noised_metrics_and_charges_them(clinic: Clinic, more: str, noise: str) -> None:
    private = f"privacy=dp(noise_multiplier=0.001,clip=5,noise_by={noise}),{more}metric_bound=4"
    told = f"fedavg:deadline=500,client_evaluation=true,{private},clients=remote(least=2,wait=100)"
    job = clinic.job(told, rounds=1, seed=5)
    join(clinic, job, [Evaluated, Evaluated])
    learnt, (found,) = clinic.trained(job), metrics_of(job)
    each = [law(learnt, [k])["error"] for k in range(2)]  # both count equally
    assert 0 < abs(found["client_error"] - sum(each) / 2) < 0.05 and "client_replies" not in found
    assert (clinic.service.folder(job.id) / "privacy" / "ledger.jsonl").read_text().count("\n") == 2
    last = [event for event in job.events() if event["kind"] == "privacy"][-1]
    assert last["releases"] == 2  # the round, and the evaluation


# ---- without HTTP


A = OwnMetrics(30, {"loss": OwnTotal(45.0, 30.0), "top": OwnTotal(0.9, 30.0, "max")}, {"loss": OwnTotal(30.0, 30.0)})
B = OwnMetrics(10, {"loss": OwnTotal(5.0, 10.0), "top": OwnTotal(0.7, 10.0, "max")})


def test_totals_of_clients_add_up() -> None:
    assert summed([A, B]) == {
        "client_loss": Total(50.0, 40.0),
        "client_top": Total(0.9, 40.0, "max"),
        "personal_loss": Total(30.0, 30.0),
        "client_replies": Total(2, 0.0, "sum"),
    }
    assert decode_metrics(encode_metrics(A)) == A


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"\xff", "cannot be read"),
        (b"[]", "cannot be read"),
        (json.dumps({"rows": -1, "shared": {}, "personal": {}}).encode(), "reports -1 rows"),
        (json.dumps({"rows": 1, "shared": {"a": [math.nan, 1, "mean"]}, "personal": {}}).encode(), "cannot be read"),
        (json.dumps({"rows": 1, "shared": {"a": [1, -1, "mean"]}, "personal": {}}).encode(), "cannot be read"),
        (json.dumps({"rows": 1, "shared": {"a": [1, 1, "median"]}, "personal": {}}).encode(), "cannot be read"),
        (json.dumps({"rows": 1, "shared": {"a": ["1", 1, "mean"]}, "personal": {}}).encode(), "cannot be read"),
    ],
    ids=["bytes", "list", "rows", "nan", "weight", "how", "text"],
)
def test_metrics_that_cannot_be_used_are_named(raw: bytes, why: str) -> None:
    found = decode_metrics(raw)
    assert isinstance(found, str) and why in found


@pytest.mark.parametrize("personal", [False, True])
def test_the_sum_of_vectors_gives_the_weighted_means(personal: bool) -> None:
    names, bound, most = ["loss"], 2.0, 20
    layout = VectorLayout(names, bound, personal)
    quantiser = Quantiser(bound * math.sqrt(layout.size), 24, most, 2, counts=False)
    integers = sum(quantiser.integers(ClientNumbers(vector_of(each, layout), each.rows, 0.0, 0)) for each in (A, B))
    found = quantiser.read_sum(quantiser.words(np.asarray(integers)))
    shared, own = totals_of_sum(found.update, found.weight, layout)
    assert found.weight == 30  # of A's 30 rows, 20 count
    assert shared["loss"].mean == pytest.approx((20 * 1.5 + 10 * 0.5) / 30, abs=1e-5)
    assert own.keys() == ({"loss"} if personal else set())
    if personal:  # B has no model of its own
        assert own["loss"].mean == pytest.approx(1.0, abs=1e-5) and own["loss"].weight == pytest.approx(20, abs=1e-4)


def test_metrics_are_limited_and_missing_ones_refused() -> None:
    assert vector_of(A, VectorLayout(["loss"], 1.0, False)).tolist() == [1.0]
    with pytest.raises(DataError, match="no metric 'accuracy'"):
        vector_of(A, VectorLayout(["loss", "accuracy"], 1.0, False))
    with pytest.raises(DataError, match="not finite"):
        vector_of(OwnMetrics(1, {"loss": OwnTotal(math.inf, 1.0)}), VectorLayout(["loss"], 1.0, False))


@pytest.mark.parametrize(
    ("strategy", "why"),
    [
        ("fedavg:client_evaluation=true", "clients are simulated"),
        ("fedavg:client_evaluation=2,clients=remote", "client_evaluation is 2"),
        ("fedavg:metric_bound=0,clients=remote", "metric_bound is 0"),
        ("fedavg:metric_bound=2,client_evaluation=true,clients=remote", "under masks or with noise"),
        ("fedavg:client_evaluation=true,clients=remote,privacy=dp(noise_multiplier=1,mechanism=tree)", "once in a"),
    ],
)
def test_what_clients_cannot_evaluate_is_refused(strategy: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse(strategy)


def test_a_metric_that_the_bound_cuts_is_named() -> None:
    own = {"loss": Total(46.0, 20.0), "accuracy": Total(18.0, 20.0), "worst": Total(9.0, 0.0, "max")}
    found = {f"client_{name}": Total(20.0, 20.0) for name in own}
    text = cut_metrics(own, found, 1.0)
    assert "from -1 to 1, which cuts client_loss (the job's own loss is 2.3): give a metric_bound" in text
    assert "accuracy" not in text and "worst" not in text
    assert cut_metrics(own, found, 2.5) == cut_metrics(own, {}, 1.0) == cut_metrics({}, found, 1.0) == ""

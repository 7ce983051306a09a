"""Made-up jobs of the stand-in service whose workers or clients learn apart: federated, ADMM, local SGD."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from typing import Any

from fake_jobs import FakeJob, spec

Say = Callable[[int, random.Random], dict[str, Any]]

DITTO = {"name": "ditto", "fraction": 0.5, "local_epochs": 5, "local_steps": None, "batch_size": 10, "rule": "krum(f=2)",
         "attack": "sign_flip(clients=2,scale=5)", "dropout": 0.2, "min_replies": 1, "evaluate_every": 1, "weight": 0.1}
FEDBUFF = {"name": "fedbuff", "fraction": 1.0, "local_epochs": 1, "rule": "mean", "buffer": 10, "max_staleness": 8}
ADMM = {"name": "admm", "penalty": 10.0, "local_steps": 20, "relaxation": 1.6, "balance": True}
REMOTE = {"name": "fedavg", "fraction": 1.0, "local_epochs": 2, "rule": "mean", "clients": {"name": "remote", "least": 3}}
DILOCO = {"name": "diloco", "period": 50, "outer_lr": 0.7, "outer_momentum": 0.9}


def apart_jobs() -> list[FakeJob]:
    """One job of each kind that has a card of its own."""
    now = time.time()
    asked = (
        ("01JD8PV0DITTO", "digits-ditto", DITTO, 40, _ditto(20)),
        ("01JD8PV1FEDBUFF", "writers-fedbuff", FEDBUFF, 400, _fedbuff(1000)),
        ("01JD8PV4REMOTE", "wards-fedavg", REMOTE, 12, _remote),
        ("01JD8PV2ADMM", "lasso-admm", ADMM, 84, _admm),
        ("01JD8PV3DILOCO", "text-diloco", DILOCO, 600, _diloco),
    )
    return [_job(*each, now - 91_000 - 60 * i) for i, each in enumerate(asked)]


def _job(name_id: str, name: str, strategy: dict[str, Any], rounds: int, say: Say, begin: float) -> FakeJob:
    workers = 1 if "clients" in strategy else 4
    job = FakeJob(name_id, name, spec("examples/digits.py:Digits", strategy, workers, epochs=rounds), begin, rounds=rounds,
                  straggler=2 if strategy is DITTO else None)
    job.start(begin + 3)
    federated = strategy["name"] in ("ditto", "fedbuff", "fedavg")
    if "clients" in strategy:
        job.event(begin + 3, "clients", "3 clients have joined", **_joined(3))
    elif federated:
        clients = 20 if strategy["name"] == "ditto" else 1000
        job.event(begin + 3, "clients", f"{clients} clients hold 10,000 rows", **_map(clients))
    for number in range(1, rounds + 1):
        when = begin + 3 + 0.3 * number
        told = say(number, job.rng)
        loss = 2.1 * math.exp(-number / (rounds * 0.2)) + 0.1 + 0.02 * job.rng.random()
        job.round = number
        if "clients" in strategy and number == 5:
            job.event(when, "clients", "4 clients have joined", **_joined(4))
        stale = told.pop("staleness", {})
        event = told.pop("event", None)
        found = told.pop("metrics", None)
        moved = told.pop("bytes", 1_600_000)
        job.metrics.append({
            "kind": "round", "round": number - federated, "epoch": number - 1, "time": when, "loss": loss, "samples": 2500, "seconds": 0.3,
            "compute": 0.26, "wait": 0.02, "move": 0.02, "bytes": moved, "staleness": stale, "generation": 1,
            "strategy": strategy["name"], **told})
        if event:
            job.event(when, "cohort", f"round {number - 1}", round=number - 1, **event)
        if found:
            job.metrics.append({"kind": "evaluation", "round": number, "epoch": number, "time": when, "metrics": found})
    if strategy is DITTO:  # no formula gives a robust rule's bytes
        job.event(begin + 3 + 0.3 * rounds, "costs", "a round sends 1.60 MB", measured={"bytes": 1_600_000, "imbalance": 0.06},
                  formula={"bytes": None, "traffic": []})
    job.end("SUCCEEDED", begin + 3 + 0.3 * rounds, None)
    return job


def _joined(clients: int) -> dict[str, Any]:
    sizes = [410, 95, 1200, 333][:clients]
    return {"clients": clients, "rows": sum(sizes), "names": [f"ward-{k}" for k in "abcd"[:clients]], "sizes": sizes,
            "labels": [], "counts": [], "smallest": min(sizes), "median": sorted(sizes)[clients // 2], "largest": max(sizes)}


def _remote(number: int, chance: random.Random) -> dict[str, Any]:
    names = [f"ward-{k}" for k in "abcd"[:3 if number < 5 else 4]]
    return {
        "sampled": len(names), "replied": len(names), "dropped": 0, "rejected": 0,
        "event": {"sampled": len(names), "replied": len(names), "trained": names, "dropped": [], "rejected": [],
                  "seconds": 0.5 + 0.4 * chance.random()},
        "metrics": {"accuracy": 0.95 - 0.8 * math.exp(-number / 4)},
    }


def _map(clients: int) -> dict[str, Any]:
    chance = random.Random(3)
    shown = min(clients, 60)
    names = [f"client-{k}" if clients == 20 else f"writer-{k:04d}" for k in range(shown)]
    counts = [[0] * 10 for _ in names]
    for row in counts:
        if clients == 20:
            for label in chance.sample(range(10), 2):
                row[label] = 250
        else:
            mass = [chance.gammavariate(0.4, 1) for _ in range(10)]
            rows = chance.randint(19, 131)
            row[:] = [round(rows * m / sum(mass)) for m in mass]
    sizes = [sum(row) for row in counts]
    return {"clients": clients, "rows": 10_000 if clients == 20 else 74_300, "names": names, "sizes": sizes,
            "labels": [str(k) for k in range(10)], "counts": counts, "smallest": min(sizes),
            "median": sorted(sizes)[shown // 2], "largest": max(sizes)}


def _ditto(clients: int) -> Say:
    def say(number: int, chance: random.Random) -> dict[str, Any]:
        drawn = sorted(chance.sample(range(clients), clients // 2))
        dropped = [[f"client-{k}", chance.choice(["dropped out", "34.2 s, past the deadline of 30 s"])]
                   for k in drawn if chance.random() < 0.2]
        gone = {name for name, _ in dropped}
        rejected = [[f"client-{k}", "update is not finite"] for k in drawn if k in (3, 11) and f"client-{k}" not in gone]
        out = gone | {name for name, _ in rejected}
        trained = [f"client-{k}" for k in drawn if f"client-{k}" not in out]
        score = 0.93 - 0.8 * math.exp(-number / 9) + chance.gauss(0, 0.015)
        return {
            "sampled": len(drawn), "replied": len(trained), "dropped": len(dropped), "rejected": len(rejected),
            "event": {"sampled": len(drawn), "replied": len(trained), "trained": trained, "dropped": dropped,
                      "rejected": rejected, "seconds": 30.0 if dropped else 12 + 9 * chance.random()},
            "metrics": {"accuracy": score, "loss": 1 - score, "personal_accuracy": 0.985 - 0.5 * math.exp(-number / 4)},
        }

    return say


def _fedbuff(clients: int) -> Say:
    def say(number: int, chance: random.Random) -> dict[str, Any]:
        drawn = chance.sample(range(clients), 10)
        ages = [min(8, int(chance.expovariate(0.5))) for _ in drawn]
        late = 1 if chance.random() < 0.1 else 0
        names = [f"writer-{k:04d}" for k in drawn]
        return {
            "sampled": 10, "replied": 10 - late, "dropped": 0, "rejected": late,
            "staleness": {str(age): ages.count(age) for age in set(ages)},
            "event": {"sampled": 10, "replied": 10 - late, "trained": names[late:], "dropped": [],
                      "rejected": [[name, "9 versions old, the most is 8"] for name in names[:late]],
                      "seconds": 4 + 3 * chance.random()},
            "metrics": {"accuracy": 0.95 - 0.8 * math.exp(-number / 70) + chance.gauss(0, 0.01)} if number % 5 == 0 else None,
        }

    return say


def _admm(number: int, chance: random.Random) -> dict[str, Any]:
    shrink = 0.78**number
    penalty = 10.0 * 2 ** min(2, number // 9)
    return {"met": 1, "primal": 40 * shrink * chance.lognormvariate(0, 0.1), "dual": 260 * shrink * chance.lognormvariate(0, 0.15),
            "primal_stop": 3e-7, "dual_stop": 2e-6, "penalty": penalty, "bytes": 12_800}


def _diloco(number: int, chance: random.Random) -> dict[str, Any]:
    met = int(number % 50 == 0)
    found = {"bits": 3.9 * math.exp(-number / 160) + 2.0} if met else None
    return {"met": met, "bytes": 6_600_000 * met, "metrics": found}

"""The made-up jobs of the stand-in service: their rounds are drawn from a seeded generator."""

from __future__ import annotations

import math
import random
import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from fake_schedule import facts

ENDS = {"SUCCEEDED", "FAILED", "STOPPED"}
ASYNC = {"name": "parameter_server", "shards": 2, "staleness": None}
SSP = {"name": "parameter_server", "shards": 3, "staleness": 3}
HYBRID = {"name": "hybrid", "servers": 3, "staleness": None, "replicas": 1, "prefetch": True, "compression": None,
          "bucket_mb": None}
PIPED = {"name": "all_reduce", "replica": {"name": "pipeline", "stages": 4, "micro_batches": 8, "schedule": "1f1b"}}
PHASED = [{"epochs": 2, "strategy": ASYNC}, {"strategy": {"name": "all_reduce"}}]


def iso(moment: float | None) -> str | None:
    """Unix seconds as the service writes a time."""
    return None if moment is None else datetime.fromtimestamp(moment, UTC).isoformat().replace("+00:00", "Z")


@dataclass
class FakeJob:
    """A job whose rounds are drawn from a seeded generator."""

    id: str
    name: str
    spec: dict[str, Any]
    created: float
    status: str = "RUNNING"
    reason: str | None = None
    rounds: int = 1710
    speed: float = 12.0  # rounds a second
    nan_at: int | None = None
    fails_at: int | None = None
    straggler: int | None = None
    loses_worker_at: int | None = None
    round: int = 0
    generation: int = 1
    started: float | None = None
    finished: float | None = None
    stop_requested: bool = False
    final: dict[str, float] | None = None
    metrics: list[dict[str, Any]] = field(default_factory=list)
    logs: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    staleness: dict[str, int] = field(default_factory=dict)
    version: int = 0
    rng: random.Random = field(default_factory=lambda: random.Random(7))

    def strategy_at(self, number: int) -> dict[str, Any]:
        """The strategy at work in a round."""
        spec = self.spec["strategy"]
        if isinstance(spec, dict):
            return spec
        return spec[0]["strategy"] if number <= self.rounds * 2 // 3 else spec[-1]["strategy"]

    def log(self, when: float, source: str, text: str) -> None:
        """One line of the job's log."""
        self.logs.append({"time": iso(when), "source": source, "text": text})

    def event(self, when: float, kind: str, message: str, **facts: Any) -> None:
        """One event of the job."""
        self.events.append({"seq": len(self.events), "time": when, "kind": kind, "message": message, **facts})

    def start(self, when: float) -> None:
        """The first moment of the run."""
        self.started = when
        self.status = "RUNNING"
        self.event(when, "started", f"{self.spec['workers']} workers on 1 host, generation 1")
        for rank in range(self.spec["workers"]):
            self.log(when, f"worker-{rank}", f"rank {rank} of {self.spec['workers']}: 1,797 samples in shard {rank}")

    def step(self, when: float) -> None:
        """One round."""
        self.round += 1
        number = self.round
        now = self.strategy_at(number)
        if number > 1 and now["name"] != self.strategy_at(number - 1)["name"]:
            self.event(when, "phase", f"from round {number}: {now['name']}; parameters and optimizer state carried over")
        base = 2.3 * math.exp(-number / (self.rounds * 0.16)) + 0.06
        loss: float | None = base * self.rng.lognormvariate(0, 0.22) + 0.01 * self.rng.random()
        if self.nan_at is not None and number >= self.nan_at:
            loss = None
        slow = 1.55 if self.straggler is not None and now["name"] == "all_reduce" else 1.0
        seconds = self.rng.gauss(0.052, 0.004) * slow
        stale = {}
        if now["name"] == "parameter_server":
            bound = now["staleness"] if now["staleness"] is not None else 6
            for _ in range(self.spec["workers"]):
                age = min(bound, int(self.rng.expovariate(0.9)))
                stale[str(age)] = stale.get(str(age), 0) + 1
                self.staleness[str(age)] = self.staleness.get(str(age), 0) + 1
        self.metrics.append({
            "kind": "round", "round": number, "epoch": self.epoch(), "time": when, "loss": loss, "samples": 256,
            "seconds": seconds, "compute": seconds * 0.62, "wait": seconds * 0.27, "move": seconds * 0.11,
            "bytes": 154_000, "staleness": stale, "generation": self.generation, "strategy": now["name"],
        })
        if number % 57 == 0:
            score = 0.975 - 0.85 * math.exp(-number / (self.rounds * 0.14)) + self.rng.gauss(0, 0.003)
            self.metrics.append({"kind": "evaluation", "round": number, "epoch": self.epoch(), "time": when,
                                 "metrics": {"accuracy": score, "loss": (loss or 0) * 1.1}})
            self.log(when, "driver", f"round {number}: accuracy {score:.4f}")
        if number % 9 == 0:
            rank = self.rng.randrange(self.spec["workers"])
            self.log(when, f"worker-{rank}", f"round {number} loss {loss} compute {seconds * 620:.1f} ms")
        if number % 400 == 0:
            self.log(when, "worker-1", "warning: the data loader fell behind for 0.3 s")
        if number % 285 == 0:
            self.event(when, "checkpoint", f"checkpoints/step-{number:08d} written, 154 KB")
        if self.loses_worker_at == number:
            self.loses_worker_at = None
            self.event(when, "worker_lost", "worker 1 (pid 4312) died: killed by signal 9")
            self.generation += 1
            self.round = (number // 285) * 285
            self.event(when, "restarted", f"generation 2 goes on from round {self.round}")
        self.version += 1
        if self.fails_at == number:
            self.end("FAILED", when, "The loss is not a number since round 312. Lower the learning rate, or look at the data of that round.")
        elif number >= self.rounds:
            self.end("SUCCEEDED", when, None)

    def end(self, status: str, when: float, reason: str | None) -> None:
        """The job's last moment."""
        self.status, self.reason, self.finished = status, reason, when
        if status == "SUCCEEDED":
            self.final = {"accuracy": 0.9722, "loss": 0.0713}
        self.event(when, {"SUCCEEDED": "finished", "FAILED": "failed"}.get(status, "stopped"), reason or f"the job is {status}")
        self.version += 1

    def epoch(self) -> int:
        """The epoch of the present round, from 0."""
        return min(2, (self.round - 1) * 3 // self.rounds)

    def account(self) -> dict[str, Any]:
        """Where the time of the workers went, as progress shows it."""
        members = {}
        for rank in range(self.spec["workers"]):
            slow = rank == self.straggler
            parts = {"compute": 0.8 if slow else 0.5, "waiting": 0.02 if slow else 0.3, "data": 0.03, "evaluation": 0.05}
            seconds = self.round / self.speed
            members[f"worker-{rank}"] = {"start": 4.0, "idle": 0.1 * seconds} | {
                part: share * seconds for part, share in parts.items()
            }
        whole = sum(sum(parts.values()) for parts in members.values())
        guilty = [] if self.straggler is None else [f"worker-{self.straggler}"]
        return {
            "goodput": sum(parts["compute"] for parts in members.values()) / whole,
            "members": members,
            "guilty": guilty,
            "verdict": f"{guilty[0]} holds up the others: it computes longer, on a CPU" if guilty else
            "56% of the workers' time was useful, and no cause costs more than 5%",
        }

    def worker_rows(self) -> list[dict[str, Any]]:
        """The workers as progress shows them."""
        rows = []
        in_step = self.strategy_at(self.round)["name"] == "all_reduce"
        for rank in range(self.spec["workers"]):
            slow = rank == self.straggler
            own = (0.88 if slow else 0.5 + 0.02 * rank) * self.rng.gauss(1, 0.04)
            rate = 1230.0 if in_step or not slow else 720.0
            rows.append({"rank": rank, "host": "node-a" if rank < 2 else "node-b", "pid": 4311 + rank, "status": "running",
                         "round": self.round, "samples_per_second": rate * self.rng.gauss(1, 0.02),
                         "compute": min(0.95, own), "move": 0.08, "wait": max(0.02, 0.92 - own)})
        return rows

    def shard_rows(self) -> list[dict[str, Any]]:
        """The shards as progress shows them."""
        now = self.strategy_at(self.round)
        if now["name"] != "parameter_server":
            return []
        count, size = now["shards"], 38_410
        cuts = [size * i // count for i in range(count + 1)]
        return [{"index": i, "host": "node-a", "pid": 4400 + i, "lo": cuts[i], "hi": cuts[i + 1], "version": self.round * 4 - i,
                 "bytes": (cuts[i + 1] - cuts[i]) * 12, "ages": self.ages(i)} for i in range(count)]

    def ages(self, shard: int) -> dict[str, int]:
        """How old the pushes were that a shard has applied, in versions."""
        bound = self.strategy_at(self.round).get("staleness")
        most = 6 if bound is None else bound
        return {str(age): int(self.round * 4 * 0.55**age * (1 + 0.1 * shard)) for age in range(most + 1)}

    def to_json(self) -> dict[str, Any]:
        """The job as the service sends it."""
        last = next((point for point in reversed(self.metrics) if point["kind"] == "round"), None)
        evaluated = next((point["metrics"] for point in reversed(self.metrics) if point["kind"] == "evaluation"), {})
        progress = None
        if last:
            progress = {
                "status": self.status, "message": "", "time": last["time"], "round": self.round, "rounds": self.rounds,
                "epoch": self.epoch(), "epochs": 3, "loss": last["loss"], "samples_per_second": 256 / last["seconds"],
                "eta_seconds": (self.rounds - self.round) / self.speed, "generation": self.generation,
                "failures": self.generation - 1, "strategy": self.strategy_at(self.round), "staleness": self.staleness,
                "workers": self.worker_rows(), "shards": self.shard_rows(), "account": self.account(),
            }
            if self.spec.get("server_group"):
                rows = [{"name": f"server-{i}", "host": "node-a", "state": "alive", "bytes": 31_000_000 + i * 900_000,
                         "operations_s": 401.5 + i, "cpu": 0.21, "segments": 18 + i} for i in range(3)]
                progress["server_group"] = {
                    "name": self.spec["server_group"], "own": False, "space": self.id, "status": "ready", "replicas": 1,
                    "segments": 56, "servers": rows, "moves": 0, "bytes": 93_000_000, "rows": 1_190_000}
        return {
            "id": self.id, "name": self.name, "status": self.status, "reason": self.reason, "spec": self.spec, "attempt": 1,
            "created_at": iso(self.created), "started_at": iso(self.started), "finished_at": iso(self.finished),
            "progress": progress, "metrics": self.final,
            "lowest": {name: name.endswith("loss") for name in evaluated},
            "checkpoint": f"/var/lib/rayps/jobs/{self.id}/checkpoints/step-{self.round:08d}" if self.final else None,
            "stop_requested": self.stop_requested,
        }


class World:
    """All jobs, and the thread that moves them on."""

    def __init__(self, jobs: list[FakeJob]) -> None:
        self.jobs = {job.id: job for job in jobs}
        self.lock = threading.Lock()
        self.offline_until = 0.0
        threading.Thread(target=self._run, daemon=True).start()

    def offline(self) -> bool:
        """Whether the service plays dead at the moment."""
        return time.time() < self.offline_until

    def _run(self) -> None:
        while True:
            time.sleep(0.1)
            with self.lock:
                for job in self.jobs.values():
                    self._move(job)

    @staticmethod
    def _move(job: FakeJob) -> None:
        if job.status == "STOPPING":
            job.end("STOPPED", time.time(), "Stopped by request.")
        if job.status != "RUNNING" or job.started is None:
            return
        for _ in range(max(1, round(job.speed / 10))):
            if job.status == "RUNNING":
                job.step(time.time())


def spec(workload: str, strategy: Any, workers: int = 4, **more: Any) -> dict[str, Any]:
    """A whole spec, as the service returns it."""
    return {"workload": workload, "strategy": strategy, "workers": workers, "epochs": 3, "steps": None, "seed": 0,
            "resources": {"cpu": 1}, "working_dir": None, "checkpoint_every": 285, "max_failures": 3, "timeout": 60.0,
            "resume": None, "name": None, **more}


def sample_jobs(speed: float) -> list[FakeJob]:
    """One job for each state that the page must show."""
    now = time.time()
    digits = "examples/digits.py:Digits"
    live = FakeJob("01JD8Q4V7M3K2X9A5T6B8C0DEF", "digits-phased", spec(digits, PHASED), now - 101, straggler=2, speed=speed,
                   loses_worker_at=700)
    done = FakeJob("01JD8Q1B5N7P9R2S4T6V8W0XYZ", "digits-ssp", spec(digits, SSP), now - 1260)
    on_group = FakeJob("01JD8Q0A4M6N8P0Q2R4S6T8UVW", "flights-hybrid", spec(
        "examples/recommender.py:Flights", HYBRID, server_group="shared"), now - 1500)
    failed = FakeJob("01JD8PZ3C5D7E9F1G3H5J7K9LM", "income-adam", spec("examples/income.py:Income", {"name": "all_reduce"}, 2),
                     now - 3900, nan_at=312, fails_at=340)
    queued = FakeJob("01JD8Q5W1X3Y5Z7A9B1C3D5EFG", "digits-wide", spec(digits, {"name": "all_reduce"}, 32), now - 22,
                     status="QUEUED", reason="needs 32 CPUs, 12 free")
    stopped = FakeJob("01JD8PX7Y9Z1A3B5C7D9E1F3GH", "income-async", spec("examples/income.py:Income", ASYNC, 8), now - 86_000)
    plain = FakeJob("01JD8PW2X4Y6Z8A0B2C4D6E8FG", "digits-all-reduce", spec(digits, {"name": "all_reduce"}), now - 90_500)
    _past(live, 100, 1236)
    _past(done, 1200, done.rounds)
    _past(failed, 3800, 340)
    _past(stopped, 85_990, 611)
    stopped.end("STOPPED", (stopped.started or 0) + 40, "Stopped by request.")
    _past(plain, 90_400, plain.rounds)
    _past(on_group, 1480, on_group.rounds)
    return [live, done, on_group, failed, queued, stopped, plain, _piped(spec(digits, PIPED, 8), now - 5400)]


def _piped(asked: dict[str, Any], created: float) -> FakeJob:
    """A job whose replicas are pipelines."""
    job = FakeJob("01JD8PZ0A1B2C3D4E5F6G7H8JK", "digits-pipeline", asked, created)
    schedule, cost = facts(PIPED, asked["workers"])
    _past(job, time.time() - created - 60, job.rounds)
    first, last = job.started or created, job.finished or created
    job.event(first + 1, "schedule", "a step under 1f1b took 43 ms; by its table 27.3% of the time is waiting", **schedule)
    job.event(last, "costs", "a step sends 27.7 MB (27.7 MB by formula)", **cost)
    return job


def _past(job: FakeJob, seconds_ago: float, rounds: int) -> None:
    """Play the first rounds of a job as if they had been some time ago."""
    begin = time.time() - seconds_ago
    job.start(begin)
    for i in range(rounds):
        if job.status == "RUNNING":
            job.step(begin + i * 0.08)

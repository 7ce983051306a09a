"""Elastic jobs under random faults, in step, with a bound and asynchronous, on threads: `make soak` does so on Ray.

The jobs are those of the soak, with its workload and its checks of what a job left.
"""

import random
import threading
import time

import pytest
from leased_work import SECONDS
from rayps_chaos.compare_results import check_slots
from rayps_chaos.history import HistoryBounds, JobHistory, check_history
from rayps_chaos.ledger_work import LedgerWork
from rayps_chaos.soak import KINDS
from small_work import Watched

from rayps.cluster.local import until
from rayps.core.strategy.elastic import ElasticWorkers
from rayps.runtime.driver.driver import Driver
from rayps.runtime.driver.workload_job import WorkloadJob
from rayps.runtime.records.journal import Journal
from rayps.strategies.catalogue import parse
from rayps.strategies.job import JobSpec

ELASTIC = [kind for kind in KINDS if kind.most > kind.least]
FAULTS = ("worker", "server", "all workers", "grow", "shrink")


def test_the_soak_has_all_three_modes():
    staleness = [kind.strategy.get("staleness", 0) for kind in ELASTIC]
    assert {0, None} < set(staleness) and len(set(staleness)) == 3


class Soaked:
    """A job of the soak on threads, and the faults that it meets."""

    def __init__(self, kind, seed, folder):
        fields = kind.fields(seed, 12.0)
        self.kind, self.random = kind, random.Random(seed)
        params = fields["params"] | {"pause": 0.002}
        work = LedgerWork()
        for name, value in params.items():
            setattr(work, name, value)
        elastic = ElasticWorkers.of({"most": kind.most, **(fields["elastic"] or {}), "cooldown": 0.0})
        self.spec = JobSpec(
            "rayps_chaos.ledger_work:LedgerWork", "", kind.least, epochs=1, elastic=elastic, checkpoint_every=40,
            max_failures=1000, seed=seed, params=params,
        )  # fmt: skip
        self.cluster, self.journal = Watched(), Journal(folder)
        phases = parse(kind.strategy)
        options = {"phases": phases, "checkpoints": folder / "checkpoints", "capture": False}
        self.driver = Driver(WorkloadJob(work, self.spec, self.journal, **options))
        self.rounds = params["steps"]

    def run(self):
        """Run the job, and carry out a fault after each few rounds."""
        begun, due, faults, found = time.time(), 5, list(FAULTS), []
        self.random.shuffle(faults)
        thread = threading.Thread(target=lambda: found.append(self.driver.run(self.cluster)), daemon=True)
        thread.start()
        while faults:
            assert until(lambda due=due: found or self.reached >= due, SECONDS), self.journal.events
            due = self.reached + self.random.randrange(self.rounds // 12, self.rounds // 9)
            self.disturb(faults.pop())
        thread.join(SECONDS)
        self.journal.close()
        self.cluster.close()
        [outcome] = found
        return outcome, JobHistory(
            "job", str(outcome.status), self.journal.events, self.journal.points, outcome.to_dict(), self.rounds,
            begun, time.time(), outcome.message,
        )  # fmt: skip

    @property
    def reached(self):
        return max((point["round"] for point in list(self.journal.points)), default=0)

    def disturb(self, fault):
        group = self.driver.job._started
        victims = {"worker": group.workers, "all workers": group.workers, "server": group.shards}.get(fault, [])
        if fault in ("grow", "shrink"):
            self.driver.allow(self.kind.most if fault == "grow" else self.kind.least, "the test")
        for member in victims if fault == "all workers" else self.random.sample(victims, min(1, len(victims))):
            self.cluster.kill(member.handle)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", ELASTIC, ids=lambda kind: str(kind.strategy.get("staleness", "in step")))
def test_an_elastic_job_survives_random_faults(kind, seed, tmp_path):
    """Each row counts once, each round is there once, and no schedule is asked for a step beyond the last."""
    outcome, history = Soaked(kind, seed, tmp_path).run()
    checks = check_history(history, HistoryBounds(600.0, 300.0, frozenset(["job"])))
    checks.append(check_slots({"slots": outcome.snapshot.params}, 1))
    assert [check for check in checks if not check.good] == []
    assert any(event["kind"] == "resized" for event in history.events)

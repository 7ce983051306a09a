"""Elastic jobs whose workers are not in step: workers join, leave and die, and the servers apply each row once."""

import itertools
import threading
import time

import pytest
import torch
from leased_work import HOOKS, LOG, SECONDS, Counted, Counting, Job, rounds_of, worker_rank

import rayps
from rayps.cluster.local import until
from rayps.core.errors import ConfigError
from rayps.core.job_status import Status

SSP, ASP = Counting(shards=2, staleness=2), Counting(shards=2, staleness=None)


@pytest.fixture
def tag(request):
    yield request.node.name
    LOG[:] = [entry for entry in LOG if entry[0] != request.node.name]
    HOOKS.pop(request.node.name, None)


@pytest.mark.parametrize("strategy", [SSP, ASP], ids=["ssp", "asp"])
def test_a_job_grows_and_shrinks_while_its_workers_train(tag, strategy):
    """A newcomer's model is complete only after the old workers have trained on: nobody waits for it."""
    job = Job(Slow(n=1200, tag=tag), strategy, epochs=1)
    job.wait(lambda: rounds_of(tag, 0, 1) > 10)
    before = rounds_of(tag)
    job.driver.allow(4, "the test")
    job.wait(lambda: rounds_of(tag, 2) and rounds_of(tag, 3))
    first = {rank: next(i for i, each in enumerate(LOG) if each[:2] == (tag, rank)) for rank in (2, 3)}
    assert sum(1 for each in LOG[: min(first.values())] if each[0] == tag) >= before + 10
    job.driver.allow(2, "the test")
    job.wait(lambda: len(job.resized()) == 4)
    assert job.resized() == [(2, 3), (3, 4), (4, 3), (3, 2)]
    left = len(LOG)
    job.wait(lambda: rounds_of(tag) > left + 10)
    assert {rank for each, rank, _ in LOG[left:] if each == tag} == {0, 1}
    assert job.counts() == [1] * 1200
    assert job.outcome.status is Status.SUCCEEDED and job.journal.events[-1]["kind"] == "finished"


class Slow(Counted):
    """The model of a newcomer is complete after the other workers have computed ten more batches."""

    def model(self):
        if threading.current_thread().name.startswith("newcomer"):
            import importlib

            work = importlib.import_module("leased_work")
            before = work.rounds_of(self.tag)
            assert until(lambda: work.rounds_of(self.tag) >= before + 10, SECONDS)
        return super().model()

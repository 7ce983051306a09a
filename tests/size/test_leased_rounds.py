"""The rounds of elastic jobs whose workers are not in step: history, schedules and checkpoints count them alike.

A push's identity (its rank and its step) says nothing about the run's progress: a newcomer continues the steps of a
worker that died, and a fast worker pushes more than a slow one. A round is as many pushes as the job has workers at
least.
"""

import importlib
import threading
import time
from pathlib import Path

import covers
import pytest
from leased_work import HOOKS, LOG, Counted, Job, rounds_of
from rayps_client.errors import ConfigError

from rayps.core.job.job_status import Status
from rayps.core.metrics import make_history
from rayps.core.strategy.elastic import ElasticWorkers
from rayps.core.strategy.elastic_support import check_phases, takes_leases
from rayps.strategies.catalogue import CATALOGUE, parse
from rayps.tensors.checkpoints import checkpoint

TICKS = {}  # by tag: the steps that the servers have asked the schedule for

FORMS = [
    {},
    *[{"staleness": staleness, "shards": 2} for staleness in (None, 1, 3)],
    {"staleness": None, "shards": 2, "compression": "int8"},
    {"staleness": 2, "shards": 2, "replicas": 1},
    {"staleness": None, "shards": 2, "replay_mb": 8.0},
    {"staleness": None, "backup": 1},
]


def leased(name, form):
    """Whether the workers of an elastic job with this strategy get their rows by leases."""
    try:
        phases = parse({"name": name, **form})
        check_phases(phases, ElasticWorkers(3))
    except (ConfigError, TypeError):
        return False
    return takes_leases(phases)


FAMILIES = [(name, form) for name in CATALOGUE for form in FORMS if leased(name, form)]


def test_the_families_are_found():
    assert ("parameter_server", {"staleness": None, "shards": 2}) in FAMILIES and len(FAMILIES) >= 6


class Scheduled(Counted):
    """Rows that servers count, and a linear decay that records for which steps servers ask it."""

    def __init__(self, n=120, batch=2, pause=0.002, tag="counted", total=60):
        super().__init__(n, batch, pause, tag)
        self.total = total

    def schedule(self, optimizer):
        asked, total = importlib.import_module("test_leased_rounds").TICKS.setdefault(self.tag, []), self.total

        def factor(step):
            asked.append(step)
            return 1 - step / total

        return factor


@pytest.fixture
def tag(request):
    yield request.node.name
    LOG[:] = [entry for entry in LOG if entry[0] != request.node.name]
    HOOKS.pop(request.node.name, None)
    TICKS.pop(request.node.name, None)


def uneven(tag):
    """Let worker 0 be slower than the others, and all be slow near the end until the scenario is over."""
    over = threading.Event()

    def hook(rank):
        if not over.is_set() and rounds_of(tag) > 350:
            over.wait(0.3)
        elif rank == 0:
            time.sleep(0.002)

    HOOKS[tag] = hook
    return over


def killed(job, rank):
    for member in [each for each in job.group.workers if each.rank == rank]:
        job.cluster.kill(member.handle)


def check_rounds(job, tag, blocks, least):
    """Every round is in the history once; the schedule is asked for each step and none beyond; checkpoints agree."""
    outcome, end = job.end(), -(-blocks // least)
    assert outcome.status is Status.SUCCEEDED, (outcome, job.journal.events)
    points = [point for point in job.journal.points if point["kind"] == "round"]
    rounds = make_history(points).column("round").to_pylist()
    assert rounds == list(range(end))
    if not any(event["kind"] in ("restarted", "replaced") for event in job.journal.events):
        assert [point["round"] for point in points] == rounds  # in this order, and none of them twice
    asked = set(TICKS[tag]) if tag in TICKS else set()
    assert asked in (set(), set(range(end))), (min(asked), max(asked), len(asked), end)
    assert outcome.snapshot.round == end
    saved = [event["round"] for event in job.journal.events if event["kind"] == "checkpoint"]
    assert saved and saved[-1] == end and all(0 < each <= end for each in saved)
    return saved


def grows(job, tag):
    job.wait(lambda: rounds_of(tag) > 20)
    job.driver.allow(4, "the test")
    job.wait(lambda: rounds_of(tag, 2) > 3 and rounds_of(tag, 3) > 3)
    job.driver.allow(2, "the test")


def gives_leases_back(job, tag):
    """A worker leaves, and one dies, with long leases; newcomers take their places, again and again."""
    job.driver.allow(3, "the test")
    for victim in (2, 1):
        job.wait(lambda victim=victim: rounds_of(tag, victim) > 25)
        seen = rounds_of(tag, victim)
        killed(job, victim)
        job.wait(lambda victim=victim, seen=seen: rounds_of(tag, victim) > seen + 5)
    job.driver.allow(2, "the test")


def loses_a_server(job, tag):
    job.driver.allow(3, "the test")
    job.wait(lambda: rounds_of(tag, 2) > 20)
    name = next(name for name in job.cluster.actors if name[0] in ("ServerActor", "ShardActor"))
    job.cluster.kill(job.cluster.actors[name])
    seen = rounds_of(tag)
    job.wait(lambda: rounds_of(tag) > seen + 20)
    killed(job, 1)


def loses_all(job, tag):
    """All members start again from the newest checkpoint."""
    job.wait(lambda: rounds_of(tag) > 150)
    for rank in (0, 1):
        killed(job, rank)


@covers.by(
    lambda name, form, scenario: (name, str(form)),
    lambda name, form, scenario: (name, scenario),
    lambda name, form, scenario: (form.get("staleness", 0) is None, scenario),
)
@pytest.mark.parametrize(
    "scenario", [grows, gives_leases_back, loses_a_server, loses_all], ids=lambda each: each.__name__
)
@pytest.mark.parametrize(("name", "form"), FAMILIES, ids=lambda each: each if isinstance(each, str) else str(each))
def test_each_round_is_counted_once(tag, tmp_path, name, form, scenario):
    over = uneven(tag)
    blocks = 2 * 301
    work = Scheduled(n=602, pause=0.0, tag=tag, total=blocks // 2)
    job = Job(
        work,
        {"name": name, **form},
        workers=(2, 4),
        epochs=2,
        folder=tmp_path,
        start=2,
        max_failures=9,
        checkpoint_every=50,
    )
    try:
        scenario(job, tag)
    finally:
        over.set()
    saved = check_rounds(job, tag, blocks, 2)
    if "restarted" not in [event["kind"] for event in job.journal.events]:
        assert len(saved) >= 2 and saved == sorted(saved)
    for event in [each for each in job.journal.events if each["kind"] == "checkpoint"][-2:]:
        meta = checkpoint.meta_of(Path(event["path"]))
        assert meta["schedule"]["tick"] == max(0, event["round"] - 1)

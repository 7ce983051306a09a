"""How many workers elastic jobs may have: the plan beside an exhaustive search, and histories in closed loop."""

import itertools
import random
from dataclasses import replace

import pytest

from rayps.service.elastic_plan import Allotment, Allow, ElasticJob, WaitingJob, add_up_reserved, allot

FREE = "resources are free that no waiting job could use"


def job(name, allowed, **facts):
    given = {"least": 1, "most": 4, "each": {"cpu": 1.0}, "members": allowed} | facts
    return ElasticJob(name, f"job-{name}", allowed=allowed, **given)


def waits(cpus, name="z"):
    return WaitingJob(name, f"job-{name}", {"cpu": float(cpus), "gpu": 0.0})


def room(cpus):
    return {"cpu": float(cpus), "gpu": 0.0}


FOR_Z = "job job-z (z) waits for these resources"


@pytest.mark.parametrize(
    ("jobs", "free", "waiting", "expected", "givers"),
    [
        # growing
        ([job("a", 2)], 3, None, [Allow("a", 4, FREE)], ()),
        ([job("a", 2)], 1, None, [Allow("a", 3, FREE)], ()),
        ([job("a", 2)], 0, None, [], ()),
        ([job("a", 4)], 3, None, [], ()),
        ([job("a", 2, requested=3)], 3, None, [Allow("a", 3, FREE)], ()),
        ([job("a", 2, wanted=2)], 3, None, [], ()),
        ([job("a", 2, wanted=2, requested=3)], 3, None, [Allow("a", 3, FREE)], ()),  # the user decides
        ([job("a", 2, settled=29.0)], 3, None, [], ()),
        ([job("a", 2, settled=30.0)], 1, None, [Allow("a", 3, FREE)], ()),
        ([job("a", 2, grows=False)], 3, None, [], ()),
        ([job("a", 2, each={"cpu": 2.0})], 3, None, [Allow("a", 3, FREE)], ()),
        ([job("a", 2, each={"cpu": 1.0, "gpu": 1.0})], 3, None, [], ()),
        ([job("a", 2, each={})], 0, None, [Allow("a", 4, FREE)], ()),  # its workers reserve nothing
        # the fewest workers first, then the oldest job
        ([job("a", 3), job("b", 1)], 2, None, [Allow("b", 3, FREE)], ()),
        ([job("a", 1), job("b", 1)], 1, None, [Allow("a", 2, FREE)], ()),
        ([job("a", 1), job("b", 1)], 3, None, [Allow("a", 3, FREE), Allow("b", 2, FREE)], ()),
        # members that were to leave take no room when they stay
        ([job("a", 2, members=4)], 0, None, [Allow("a", 4, FREE)], ()),
        # shrinking: what the user or the driver wants
        ([job("a", 4, requested=2)], 0, None, [Allow("a", 2, "at most 2 workers were requested")], ()),
        ([job("a", 4, requested=1)], 0, None, [Allow("a", 1, "at most 1 worker was requested")], ()),
        ([job("a", 4, wanted=3)], 0, None, [Allow("a", 3, "its driver wants no more workers")], ()),
        ([job("a", 4, requested=2, settled=0.0)], 0, None, [Allow("a", 2, "at most 2 workers were requested")], ()),
        ([job("a", 4, requested=2, gives=False)], 0, None, [], ()),
        # shrinking for a waiting job
        ([job("a", 4)], 0, waits(2), [Allow("a", 2, FOR_Z)], ("job-a",)),
        ([job("a", 4, settled=0.0)], 1, waits(2), [Allow("a", 3, FOR_Z)], ("job-a",)),
        ([job("a", 4)], 0, waits(4), [], ()),  # it could not start even then
        ([job("a", 3)], 2, waits(2), [], ()),  # it starts now: nobody grows
        ([job("a", 2)], 1, waits(9), [Allow("a", 3, FREE)], ()),  # nothing helps it: the room is used meanwhile
        ([job("a", 2, members=4)], 0, waits(2), [], ("job-a",)),  # they are leaving
        ([job("a", 4, members=2)], 0, waits(2), [Allow("a", 2, FOR_Z)], ("job-a",)),  # not taken yet
        # the most workers above the least first, then the newest job
        ([job("a", 4), job("b", 3)], 0, waits(1), [Allow("a", 3, FOR_Z)], ("job-a",)),
        ([job("a", 3), job("b", 3)], 0, waits(1), [Allow("b", 2, FOR_Z)], ("job-b",)),
        ([job("a", 4, least=3), job("b", 3)], 0, waits(1), [Allow("b", 2, FOR_Z)], ("job-b",)),
        ([job("a", 4), job("b", 4)], 0, waits(3), [Allow("a", 3, FOR_Z), Allow("b", 2, FOR_Z)], ("job-a", "job-b")),
        ([job("a", 4, gives=False), job("b", 2)], 0, waits(1), [Allow("b", 1, FOR_Z)], ("job-b",)),
        # only workers with what it lacks leave
        ([job("a", 4, each={"gpu": 1.0}), job("b", 2)], 0, waits(1), [Allow("b", 1, FOR_Z)], ("job-b",)),
    ],
)
def test_the_rules(jobs, free, waiting, expected, givers):
    assert allot(jobs, room(free), waiting) == Allotment(expected, givers)


def test_what_stopping_jobs_will_free_is_not_taken_from_others():
    assert allot([job("a", 4)], room(0), waits(2), {"cpu": 2.0}) == Allotment()
    assert allot([job("a", 4)], room(0), waits(3), {"cpu": 2.0}).changes == [Allow("a", 3, FOR_Z)]


def test_rounding_of_resources_does_not_stop_a_job():
    tenth = job("a", 1, each={"cpu": 0.1})
    assert allot([tenth], {"cpu": 0.1 + 0.2 - 0.1}, None).changes == [Allow("a", 3, FREE)]


def evenness(targets, jobs):
    """The larger, the more even are the workers above the least numbers."""
    above = [target - each.least for target, each in zip(targets, jobs, strict=True)]
    return [-each for each in sorted(above, reverse=True)]


def naive(jobs, free, waiting):
    """The targets of jobs with one CPU for each worker, by a search over all of them."""
    first = [min(each.allowed, each.limit) for each in jobs]
    later = free + sum(max(each.members, each.allowed) for each in jobs)
    if waiting is not None:
        fits = [
            targets
            for targets in itertools.product(*[range(each.least, t + 1) for each, t in zip(jobs, first, strict=True)])
            if later - sum(targets) >= waiting
        ]
        if fits:  # the most workers in all; then the least uneven above the least numbers; then the newest job gives
            return max(fits, key=lambda targets: (sum(targets), evenness(targets, jobs), targets))
    able = [each.settled >= each.cooldown and t == each.allowed for each, t in zip(jobs, first, strict=True)]
    choices = [
        range(t, max(t, each.limit) + 1) if may else (t,) for each, t, may in zip(jobs, first, able, strict=True)
    ]
    fits = [
        targets
        for targets in itertools.product(*choices)
        if sum(max(0, t - max(each.members, start)) for t, each, start in zip(targets, jobs, first, strict=True))
        <= free
    ]
    return max(fits, key=lambda targets: (sum(targets), sorted(targets), targets))


def facts():
    """All small facts of one job: least, members, allowed, the limit, whether its cooldown is over."""
    for least, allowed, members, limit in itertools.product((1, 2), (1, 2, 3), (1, 2, 3), (1, 2, 3)):
        if allowed >= least and members >= least and limit >= least:
            for settled in (0.0, 99.0):
                yield {"least": least, "members": members, "requested": limit, "most": 3, "settled": settled}, allowed


def test_the_plan_equals_an_exhaustive_search():
    ones = list(facts())
    checked = 0
    for (first, a), (second, b) in itertools.product(ones, ones):
        jobs = [job("a", a, **first), job("b", b, **second)]
        for free, waiting in ((0, None), (1, None), (3, None), (0, 1), (0, 2), (1, 2), (0, 4)):
            found = allot(jobs, room(free), None if waiting is None else waits(waiting))
            targets = {each.id: each.allowed for each in jobs} | {each.job: each.workers for each in found.changes}
            want = naive(jobs, free, waiting)
            assert tuple(targets.values()) == want, (jobs, free, waiting, found, want)
            checked += 1
    assert checked > 10_000


class Site:
    """A cluster in closed loop: drivers follow what they may have one worker a tick; jobs come and end at random."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.total, self.now, self.number = 12, 0.0, 0
        self.jobs, self.waiting, self.changes = {}, [], []

    def room(self):
        held = sum(max(each.members, each.allowed) for each in self.jobs.values())
        return self.total - held

    def step(self):
        self.now += 1.0
        pick = self.random.random()
        if pick < 0.08:
            self.number += 1
            least = self.random.choice([1, 2, 4])
            most = self.random.choice([least, least + 3, 8])
            self.waiting.append(job(f"{self.number:03}", least, least=least, most=most, cooldown=10.0))
        elif pick < 0.13 and self.jobs:
            self.jobs.pop(self.random.choice(list(self.jobs)))
        elif pick < 0.16 and self.jobs:
            name = self.random.choice(list(self.jobs))
            one = self.jobs[name]
            self.jobs[name] = replace(one, requested=self.random.randint(one.least, one.most))
        while self.waiting and self.waiting[0].least <= self.room():  # first in, first out
            one = self.waiting.pop(0)
            self.jobs[one.id] = one
        head = None if not self.waiting else waits(self.waiting[0].least, self.waiting[0].id)
        found = allot(list(self.jobs.values()), room(self.room()), head)
        assert allot(list(self.jobs.values()), room(self.room()), head) == found
        for each in found.changes:
            before = self.jobs[each.job]
            self.changes.append((self.now, each.job, each.workers - before.allowed, before))
            self.jobs[each.job] = replace(before, allowed=each.workers, settled=0.0)
        for name, one in self.jobs.items():
            toward = (one.allowed > one.members) - (one.allowed < one.members)
            self.jobs[name] = replace(one, members=one.members + toward, settled=one.settled + 1.0)


@pytest.mark.parametrize("seed", range(20))
def test_histories_keep_the_bounds_and_do_not_flap(seed):
    site = Site(seed)
    waited = 0
    for _ in range(600):
        site.step()
        assert site.room() >= 0
        for one in site.jobs.values():
            assert one.least <= one.allowed <= one.most and one.least <= one.members <= one.most
        elastic = sum(max(each.members, each.allowed) - each.least for each in site.jobs.values())
        served = bool(site.waiting) and site.waiting[0].least <= site.room() + elastic
        waited = waited + 1 if served else 0
        assert waited <= 10, "a waiting job starts as soon as members have left"
    last = {}
    for now, name, change, before in site.changes:
        if change > 0:
            assert now - last.get(name, -99.0) >= before.cooldown
        last[name] = now
    assert sum(change > 0 for _, _, change, _ in site.changes) > 5
    assert sum(change < 0 for _, _, change, _ in site.changes) > 5


def test_what_a_job_reserves():
    found = add_up_reserved({"cpu": 2.0, "gpu": 1.0}, {"cpu": 1.0, "memory": 5.0}, 3)
    assert found == {"cpu": 5.0, "gpu": 1.0, "memory": 15.0}

"""What an elastic job knows of its size: allowance, growth that pays or not, newcomers that start and are dropped."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from rayps.cluster.notices import Notice
from rayps.core.strategy.elastic import ElasticWorkers
from rayps.runtime.records.journal import Journal
from rayps.runtime.size import job_size
from rayps.runtime.size.job_size import Allowance, GrowthGain, JobSize


def test_growth_that_pays_sets_no_ceiling() -> None:
    gain = GrowthGain(0.5)
    gain.changed(2, 4, 100.0)
    assert gain.is_open
    assert gain.measure(4, 160.0) is None
    assert (gain.ceiling, gain.is_open) == (None, False)


def test_growth_that_does_not_pay_sets_the_ceiling_until_more_is_allowed() -> None:
    gain = GrowthGain(0.5)
    gain.changed(2, 4, 100.0)
    text = gain.measure(4, 120.0)
    assert text is not None
    assert "each added worker brought 20% of a worker's speed, and elastic.gain is 50%" in text
    gain.allow(4)
    assert gain.ceiling == 4
    gain.allow(5)
    assert gain.ceiling is None


@pytest.mark.parametrize(("before", "after", "speed"), [(4, 2, 100.0), (2, 4, None)])
def test_a_change_that_cannot_be_measured(before: int, after: int, speed: float | None) -> None:
    gain = GrowthGain(0.5)
    gain.changed(before, after, speed)
    assert not gain.is_open
    assert gain.measure(after, 1.0) is None
    assert gain.ceiling is None


def test_a_growth_that_was_undone_is_not_measured() -> None:
    gain = GrowthGain(0.5)
    gain.changed(2, 4, 100.0)
    assert gain.measure(2, 1.0) is None


@dataclass
class FakeNewcomers:
    """Newcomers that the test makes ready."""

    ready: int = 0
    starting: int = 0
    may_start: bool = True
    calls: list[Any] = field(default_factory=list)

    def failures(self) -> list[str]:
        return []

    def end_noticed(self) -> None:
        pass

    def start(self, count: int, number: int) -> None:
        self.starting += count

    def drop(self, count: int) -> None:
        self.calls.append(("drop", count))
        self.ready = self.starting = 0

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [1000.0]
    monkeypatch.setattr(job_size.time, "monotonic", lambda: clock[0])
    return clock


def workers(count: int) -> list[Any]:
    return [SimpleNamespace(place=None, rank=rank, name=f"worker-{rank}") for rank in range(count)]


def test_the_life_of_a_size(now: list[float]) -> None:
    """It grows, does not pay, waits for its cooldown, obeys an order at once, and gives up newcomers."""
    journal, allowance, newcomers = Journal(), Allowance(8), FakeNewcomers()
    room = SimpleNamespace(room=2, start=lambda: None, close=lambda: None)
    size = JobSize(ElasticWorkers(8, cooldown=20.0), 2, journal, allowance)
    size.begin(newcomers, room, tuple)  # type: ignore[arg-type]
    size.decide(workers(2), speed=100.0)
    assert newcomers.starting == 2
    assert not size.decide(workers(2)).regroup  # they are not ready
    newcomers.starting, newcomers.ready = 0, 2
    assert size.decide(workers(2)).joiners == 2
    newcomers.ready = 0
    size.changed(2, 4, 100.0)
    now[0] += 9
    size.decide(workers(4), speed=110.0)
    assert size.wanted is None  # it is too early to measure
    now[0] += 2
    size.decide(workers(4), speed=110.0)
    assert size.wanted == 4
    now[0] += 100
    size.decide(workers(4), speed=110.0)
    assert newcomers.starting == 0
    allowance.set(6, "asked")
    size.decide(workers(4), speed=110.0)
    assert (size.wanted, newcomers.starting) == (None, 2)
    allowance.set(3, "another job waits")
    found = size.decide(workers(4))
    assert (found.regroup, found.leavers, found.reason) == (True, (3,), "another job waits")
    assert newcomers.calls == [("drop", 2)]
    size.close()
    assert newcomers.calls[-1] == "close"
    assert [event["kind"] for event in journal.events] == ["growing", "warning", "growing"]


def test_no_more_join_than_there_are_places(now: list[float]) -> None:
    newcomers, room = FakeNewcomers(), SimpleNamespace(room=5, start=lambda: None, close=lambda: None)
    size = JobSize(ElasticWorkers(8, cooldown=0), 2, Journal(), Allowance(8))
    size.begin(newcomers, room, tuple)  # type: ignore[arg-type]
    size.decide(workers(2), most_more=0)
    assert newcomers.starting == 0
    size.decide(workers(2), useful=False)
    assert newcomers.starting == 0
    size.decide(workers(2), most_more=1)
    assert newcomers.starting == 1


def test_a_replacement_starts_although_no_place_is_free() -> None:
    newcomers, room = FakeNewcomers(), SimpleNamespace(room=0, start=lambda: None, close=lambda: None)
    size = JobSize(ElasticWorkers(2, cooldown=0), 2, Journal(), Allowance(2))
    notice = Notice("", "h", 20.0, "spot")
    size.begin(newcomers, room, lambda: (notice,))  # type: ignore[arg-type]
    both = workers(2)
    both[1].place = SimpleNamespace(notice=lambda notices: notices[0])
    size.decide(both, most_more=0)
    assert newcomers.starting == 1
    assert size.noticed(both) == [both[1]]

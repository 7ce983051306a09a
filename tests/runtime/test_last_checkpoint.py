"""The checkpoint before the end of a run that is stopped while a generation only begins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rayps.runtime.driver.hold_workers import hold_workers
from rayps.runtime.driver.last_checkpoint import LastCheckpoint


class Worker:
    """A worker that answers `hold` with the rounds it has begun, or with None if it has no plan."""

    def __init__(self, begun: int | None) -> None:
        self.begun, self.dead, self.calls = begun, None, list[str]()
        self.handle = self

    def call(self, method: str, *arguments: Any) -> SimpleNamespace:
        self.calls.append(method)
        return SimpleNamespace(result=lambda seconds: self.begun)

    def await_reply(self, reply: object) -> None:
        pass


def test_a_worker_without_a_plan_lets_the_next_state_be_taken() -> None:
    asked = list[int]()
    workers = [Worker(4), Worker(None)]
    group: Any = SimpleNamespace(
        workers=workers, slots=None, snapshot_soon=lambda: asked.append(0), take_at=lambda at: asked.append(at)
    )
    last = LastCheckpoint(group, 3, 10, 5.0)
    assert asked == [0] and all(worker.calls == ["hold", "resume"] for worker in workers)
    assert not last.look(group, 3) and last.look(group, 4)


def test_workers_are_held_only_if_all_have_a_plan() -> None:
    workers: Any = [Worker(4), Worker(None)]
    assert hold_workers(workers) is None
    assert all(worker.calls == ["hold", "resume"] and worker.dead is None for worker in workers)
    assert hold_workers([Worker(4), Worker(6)]) == 6  # type: ignore[list-item]

"""Workers that start while others train: their pauses after failures, and hosts that will end."""

from __future__ import annotations

import importlib
import threading
from concurrent.futures import Future
from typing import Any

import pytest
from rayps_client.errors import ClusterError, NoResources

from rayps.cluster.code_folder import JobCode
from rayps.cluster.local import LocalCluster, until
from rayps.cluster.members import ActorHost, GroupMember
from rayps.cluster.notices import Notice, ending_hosts
from rayps.cluster.reservation import WorkerResources
from rayps.cluster.room import RoomWatch, avoided_hosts
from rayps.runtime.driver.worker_group import WorkerGroup, WorkerLauncher
from rayps.runtime.size.newcomers import BACKOFF_SECONDS, LONGEST_BACKOFF, Newcomers, StartBackoff

SECONDS = 60.0
SPOT = Notice("n1", "alpha", 30.0, "spot")


def pause_after(backoff: StartBackoff, now: float) -> float:
    """The seconds from `now` in which no newcomer starts."""
    return next(seconds for seconds in range(1000) if backoff.over(now + seconds))


def test_the_pause_doubles_once_with_each_attempt_that_fails() -> None:
    backoff, now = StartBackoff(), 100.0
    assert backoff.over(now)
    found = []
    for attempt in range(6):
        for _ in range(3):  # three newcomers of one attempt fail
            backoff.failed(attempt, now, lacked=False)
        found.append(pause_after(backoff, now))
        now += 1000
    assert found == [BACKOFF_SECONDS * each for each in (1, 2, 4, 8, 16, 16)]
    assert found[-1] == LONGEST_BACKOFF
    backoff.started()
    backoff.failed(6, now, lacked=False)
    assert pause_after(backoff, now) == BACKOFF_SECONDS


def test_a_lack_of_resources_does_not_double_the_pause() -> None:
    backoff = StartBackoff()
    for attempt in range(5):
        backoff.failed(attempt, 1000.0 * attempt, lacked=True)
        assert pause_after(backoff, 1000.0 * attempt) == BACKOFF_SECONDS


class Handle:
    """An actor on the host `alpha` of the node n1, which `prepare` lets a test wait."""

    name = "newcomer"

    def __init__(self, prepared: threading.Event) -> None:
        self.prepared, self.preparing = prepared, threading.Event()

    def call(self, method: str, *args: Any) -> Future[Any]:
        reply: Future[Any] = Future()
        if method == "place":
            reply.set_result(ActorHost("alpha", 7, "10.0.0.1:50", "n1"))
        else:
            self.preparing.set()
            assert self.prepared.wait(SECONDS)
            reply.set_result(None)
        return reply


class Starts:
    """What starts newcomers in these tests."""

    def __init__(self, error: Exception | None = None) -> None:
        self.prepared, self.notices, self.ended = threading.Event(), list[Notice](), list[GroupMember]()
        self.handles: list[Handle] = []
        self._error = error
        self.newcomers = Newcomers(
            lambda timeout: WorkerResources(), self.start, self.ended.append, notices=lambda: tuple(self.notices)
        )

    def start(self, number: int, resources: WorkerResources) -> GroupMember:
        if self._error is not None:
            raise self._error
        self.handles.append(Handle(self.prepared))
        return GroupMember(f"worker-{number}", self.handles[-1])

    def settled(self) -> bool:
        return until(lambda: not self.newcomers.starting, SECONDS)


def test_a_newcomer_whose_host_is_under_notice_while_it_starts_does_not_join() -> None:
    starts = Starts()
    starts.newcomers.start(1, 2)
    assert until(lambda: bool(starts.handles), SECONDS)
    assert starts.handles[0].preparing.wait(SECONDS)
    starts.notices.append(SPOT)
    starts.prepared.set()
    assert starts.settled()
    assert until(lambda: len(starts.ended) == 1, SECONDS)
    assert (starts.newcomers.ready, starts.newcomers.may_start) == (0, False)
    assert starts.newcomers.failures() == ["its host or process ends: spot"]


def test_a_newcomer_that_is_ready_and_under_notice_does_not_join() -> None:
    starts = Starts()
    starts.prepared.set()
    starts.newcomers.start(2, 2)
    assert starts.settled()
    starts.newcomers.end_noticed()
    assert starts.newcomers.ready == 2
    starts.notices.append(SPOT)
    starts.newcomers.end_noticed()
    assert (starts.newcomers.ready, len(starts.ended)) == (0, 2)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            NoResources("none", needed=[], free={}),
            "the resources of one more worker are not free on hosts without a notice",
        ),
        (ClusterError("no", reason="it cannot import x"), "it cannot import x"),
    ],
)
def test_why_a_newcomer_did_not_start(error: Exception, text: str) -> None:
    starts = Starts(error)
    starts.newcomers.start(1, 2)
    assert starts.settled()
    assert starts.newcomers.failures() == [text]
    assert not starts.newcomers.may_start


# ---- hosts that will end


NAMES = {"n1": ("alpha", "10.0.0.1"), "n2": ("beta", "10.0.0.2")}


@pytest.mark.parametrize(
    ("notice", "ends"),
    [
        (Notice("n1", "", 5.0, ""), {"n1"}),
        (Notice("n1", "beta", 5.0, ""), {"n1"}),  # its id is known: the name is not compared
        (Notice("", "beta", 5.0, ""), {"n2"}),
        (Notice("", "10.0.0.2", None, ""), {"n2"}),
        (Notice("", "gamma", 5.0, ""), set()),
        (Notice("", "", 5.0, ""), set()),
        (Notice("n1", "", 5.0, "", pid=7), set()),  # one process of the host
    ],
)
def test_which_hosts_end(notice: Notice, ends: set[str]) -> None:
    assert ending_hosts((notice,), NAMES) == ends


class TwoHosts(LocalCluster):
    """Two hosts, of 2 and of 3 free CPUs."""

    def __init__(self) -> None:
        super().__init__()
        self.avoided: list[frozenset[str]] = []

    def hosts(self, free: bool = True) -> dict[str, dict[str, float]]:
        return {"n1": {"cpu": 2.0}, "n2": {"cpu": 3.0}}

    def host_names(self) -> dict[str, tuple[str, ...]]:
        return NAMES

    def reserve(self, bundles: Any, timeout: float, avoid: Any = ()) -> Any:
        self.avoided.append(frozenset(avoid))
        return super().reserve(bundles, timeout)


def room_seen(cluster: LocalCluster) -> int:
    room = RoomWatch(cluster, {"cpu": 1.0}, every=0.01)
    room.start()
    try:
        assert until(lambda: room.room > 0, SECONDS)
        return room.room
    finally:
        room.close()


@pytest.mark.parametrize("notice", [Notice("n2", "", 30.0, "spot"), Notice("", "beta", 30.0, "spot")])
def test_a_host_under_notice_has_no_room_and_gets_no_worker(notice: Notice) -> None:
    cluster = TwoHosts()
    launcher = WorkerLauncher(cluster, b"", {"cpu": 1.0}, b"")
    launcher.reserve_one(1.0)
    assert avoided_hosts(cluster) == frozenset()
    cluster.announce(notice)
    launcher.reserve_one(1.0)
    assert cluster.avoided == [frozenset(), frozenset({"n2"})]
    assert room_seen(cluster) == 2


class InATrial(TwoHosts):
    """A trial of Ray Tune, whose bundles are all that it may use."""

    def held(self) -> list[dict[str, float]]:
        return [{"cpu": 0.0}, {"cpu": 1.0}]


def test_the_room_of_a_trial_is_what_is_free_of_its_bundles() -> None:
    assert room_seen(InATrial()) == 1


# ---- those who leave


CALLS: list[tuple[int, str]] = []  # looked up by import


class Recorder:
    """An actor that records which of its methods are called."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def leave_code(self) -> None:
        importlib.import_module("test_newcomers").CALLS.append((self._rank, "leave_code"))

    def close(self) -> None:
        importlib.import_module("test_newcomers").CALLS.append((self._rank, "close"))


def test_workers_that_leave_remove_their_files_before_they_end() -> None:
    cluster = LocalCluster()
    group = WorkerGroup(cluster, b"", 4, {"cpu": 1.0}, JobCode("", requirements=("six",)), apart=True)
    handles = [cluster.spawn("test_newcomers:Recorder", rank) for rank in range(4)]
    recorders = importlib.import_module("test_newcomers").CALLS
    recorders.clear()
    group.workers = [GroupMember(f"worker-{rank}", handle) for rank, handle in enumerate(handles)]
    group.workers[2].dead = "killed"
    group.change_workers([0, 3], [])
    group.end_leavers()
    assert recorders == [(1, "leave_code"), (1, "close"), (2, "close")]
    assert [worker.name for worker in group.workers] == ["worker-0", "worker-1"]
    group.drop(group.workers[1])
    assert recorders[3:] == [(3, "leave_code"), (3, "close")]
    cluster.close()

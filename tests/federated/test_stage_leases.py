"""Which clients of a secure round are silent, from how often each has renewed its lease."""

from __future__ import annotations

import itertools
import os
import random
from pathlib import Path

import pytest
from rayps_client.secure import lease

from rayps.federated.remote.mailbox import Mailbox
from rayps.federated.remote.stage_leases import MISSED, StageLeases


def test_a_client_is_silent_when_another_has_renewed_often_since() -> None:
    leases = StageLeases()
    assert leases.silent({}) == set()
    found = [leases.silent({0: count, 1: 1, 2: 0}) for count in range(1, MISSED + 3)]
    assert found[: MISSED + 1] == [set()] * (MISSED + 1)
    assert found[MISSED + 1] == {1}  # 2 is of a version that renews nothing: nobody knows whether it is there
    assert leases.silent({0: MISSED + 2, 1: 2, 2: 0}) == set()  # it is back


def test_nobody_is_silent_while_the_service_is() -> None:
    leases = StageLeases()
    counts = {0: 3, 1: 3}
    for _ in range(100):
        assert leases.silent(counts) == set()
    for k in range(1, 50):  # after it is back, both renew in turn
        assert leases.silent({0: 3 + (k + 1) // 2, 1: 3 + k // 2}) == set()


def test_who_renews_at_least_once_while_each_other_does_is_never_silent() -> None:
    """All orders of the renewals of four clients in each period, and looks that miss some of them."""
    made = random.Random(5)
    orders = list(itertools.permutations(range(4)))
    for _ in range(300):
        leases, counts = StageLeases(), dict.fromkeys(range(4), 0)
        for _ in range(3 * MISSED):
            for number in made.choice(orders):
                counts[number] += 1
                if made.random() < 0.7:
                    assert leases.silent(counts) == set()


@pytest.mark.parametrize("dead", [{0}, {1, 2}, {0, 1, 2}])
def test_whoever_dies_is_found_if_another_lives(dead: set[int]) -> None:
    leases, counts = StageLeases(), dict.fromkeys(range(4), 1)
    found = set[int]()
    for _ in range(2 * MISSED):
        for number in counts.keys() - dead:
            counts[number] += 1
        found = leases.silent(counts)
    assert found == dead


def test_a_client_cannot_renew_faster_than_agreed(tmp_path: Path) -> None:
    box = Mailbox(tmp_path / "job" / "clients")
    stages = box.stages(1)
    stages.renew(0)
    assert stages.renewals() == {}  # there is no such round
    box.prepare()
    (box.round_folder(1) / "stages").mkdir(parents=True)
    for _ in range(5):
        stages.renew(0)
        stages.renew(1)
    assert stages.renewals() == {0: 1, 1: 1}
    path = box.round_folder(1) / "stages" / "leases" / "0"
    before = path.stat().st_mtime - lease.RENEW_SECONDS
    os.utime(path, (before, before))
    stages.renew(0)
    assert stages.renewals() == {0: 2, 1: 1}

"""Where a private run's ledger is, and that a run from another folder's checkpoint carries its releases over."""

import dataclasses
import gc
import json
from pathlib import Path

import pytest
from rayps_client.errors import ConfigError

from rayps.core.strategy.strategy import Phase
from rayps.privacy.account import PrivacyAccount
from rayps.privacy.ledger import ReleaseLedger, open_ledger
from rayps.privacy.mechanism import CLIENT, ROW, Mechanism, Spent
from rayps.privacy.options import dp
from rayps.runtime.records.ledger_folder import LedgerFolder, find_ledger_folder
from rayps.strategies.base import Strategy

POISSON, TREE = Mechanism("poisson", 1.1, 0.01), Mechanism("tree", 7.0)


@dataclasses.dataclass(frozen=True)
class Private(Strategy):
    privacy_spec: object = None


ON, OFF = Phase(1, Private(dp(noise_multiplier=1.1))), Phase(None, Private())


def test_the_ledger_is_in_the_job_s_folder_or_beside_the_checkpoints(tmp_path):
    job, checkpoints = tmp_path / "job", tmp_path / "run"
    assert find_ledger_folder([ON], job, job / "checkpoints", None).path == job / "privacy"
    assert find_ledger_folder([ON, ON], None, checkpoints, None).path == checkpoints / "privacy"
    assert find_ledger_folder([OFF], None, checkpoints, None) is None
    assert open_ledger(str(checkpoints / "privacy"), ROW).spent() == {}


def test_without_a_folder_the_ledger_ends_with_the_run():
    found = find_ledger_folder([ON], None, None, None)
    path = found.path
    assert (path / "ledger.jsonl").exists()
    del found
    gc.collect()
    assert not path.exists()


def test_phases_without_privacy_and_urls_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="Give each phase the option privacy, or none"):
        find_ledger_folder([ON, OFF], tmp_path, None, None)
    with pytest.raises(ConfigError, match="give a local folder"):
        find_ledger_folder([ON], None, "s3://bucket/run", None)
    with pytest.raises(ConfigError, match="does not find the ledger"):
        open_ledger(str(tmp_path / "elsewhere"), ROW)


def test_a_shared_ledger_has_one_user_at_a_time(tmp_path):
    first = find_ledger_folder([ON], None, tmp_path / "run", None, tmp_path / "all")
    assert first.path == tmp_path / "all" / "privacy"
    with pytest.raises(ConfigError, match="another run uses the ledger"):
        find_ledger_folder([ON], None, None, None, tmp_path / "all")
    first.release()
    again = find_ledger_folder([ON], None, None, None, tmp_path / "all")
    del again  # a run that did not start
    gc.collect()
    find_ledger_folder([ON], None, None, None, tmp_path / "all").release()


@pytest.mark.parametrize("own", [0, 2])
@pytest.mark.parametrize("place", ["run/step-00000003", "job/checkpoints/best/step-00000003"])
def test_a_checkpoint_of_another_folder_carries_its_releases_over_once(tmp_path, place, own):
    resume = tmp_path / place
    resume.mkdir(parents=True)
    earlier = ReleaseLedger(tmp_path / place.partition("/")[0] / "privacy")
    for round in (0, 1, 1):
        earlier.append(POISSON, round)
    with earlier.path.open("ab") as file:
        file.write(b'{"round": 2, "me')  # a kill cut it
    mine = ReleaseLedger(tmp_path / "new" / "privacy")
    for round in range(own):
        mine.append(POISSON, round)
    found = [LedgerFolder(tmp_path / "new", resume) for _ in range(2)]
    assert [(each.carried, each.unknown) for each in found] == [(4, None), (0, None)]
    assert mine.spent() == {POISSON: Spent(4 + own)}


def test_releases_for_rows_and_for_clients_are_not_added(tmp_path):
    """A line of an earlier version has no unit, and counts for both."""
    ReleaseLedger(tmp_path).append(POISSON, 0)
    ReleaseLedger(tmp_path, ROW).append(POISSON, 1)
    assert json.loads(ReleaseLedger(tmp_path).path.read_text().splitlines()[1])["unit"] == "row"
    assert ReleaseLedger(tmp_path, ROW).spent() == {POISSON: Spent(2)}
    with pytest.raises(ConfigError, match="releases that protect a row, and this run protects a client"):
        ReleaseLedger(tmp_path, CLIENT).spent()


def test_an_account_reads_the_ledger_once(tmp_path, monkeypatch):
    ledger, reads, read = ReleaseLedger(tmp_path), [], Path.read_bytes
    ledger.append(TREE, 0, 4)
    monkeypatch.setattr(Path, "read_bytes", lambda path: reads.append(path) or read(path))
    assert PrivacyAccount(dp(noise_multiplier=7.0, mechanism="tree"), TREE, ledger, restart=2).leaf == (5, 0)
    assert reads == [ledger.path]


def test_trees_that_are_carried_over_stay_apart(tmp_path):
    earlier, mine = ReleaseLedger(tmp_path / "a"), ReleaseLedger(tmp_path / "b")
    for ledger, trees in ((earlier, (0, 0, 1)), (mine, (0,))):
        for tree in trees:
            ledger.append(TREE, 0, tree)
    assert mine.carry_over(tmp_path / "a") == 3
    assert mine.spent() == {TREE: Spent(4, (1, 2, 1))}
    assert [json.loads(line)["tree"] for line in mine.path.read_text().splitlines()] == [0, 1, 1, 2]


def test_a_checkpoint_without_a_ledger_is_said(tmp_path):
    assert "is not part of epsilon" in LedgerFolder(tmp_path / "new", tmp_path / "old" / "step-00000001").unknown

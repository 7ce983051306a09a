"""A disk that is full while a job trains: the job goes on, the older checkpoints stay, and no record is missing."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import threading

import pytest
from rayps_client.errors import CheckpointError, PlaceError
from safetensors import SafetensorError
from small_work import Small, distance, plain

from rayps.cluster.local import LocalCluster, until
from rayps.core.full_disk import reports_full_disk
from rayps.core.job.job_status import Status
from rayps.runtime.driver.driver import Driver
from rayps.runtime.driver.workload_job import WorkloadJob
from rayps.runtime.records import journal, line_file
from rayps.runtime.records.journal import Journal
from rayps.runtime.records.line_file import LineFile
from rayps.runtime.results import snapshots
from rayps.strategies.job import JobSpec
from rayps.tensors.checkpoints import checkpoint
from rayps.tensors.checkpoints.checkpoint import SavedState

RUST = "Error while serializing: I/O error: No space left on device (os error {})"


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (OSError(errno.ENOSPC, "x"), True),
        (OSError(errno.EDQUOT, "x"), True),
        (OSError(errno.EFBIG, "x"), True),
        (OSError(errno.EIO, "x"), False),
        (SafetensorError(RUST.format(28)), True),
        (SafetensorError(RUST.format(5)), False),
        (SafetensorError("no number"), False),
        (RuntimeError(RUST.format(28)), False),
    ],
)
def test_what_reports_a_full_disk(error, full):
    assert reports_full_disk(error) is full


class Disk:
    """Takes `room` bytes, then none; in place of os.write."""

    def __init__(self, monkeypatch):
        self.room, self._write = 1 << 40, os.write
        monkeypatch.setattr(line_file.os, "write", self.write)

    def write(self, descriptor, data):
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = self._write(descriptor, bytes(data[: self.room]))
        self.room -= done
        return done


@pytest.mark.parametrize("room", range(14))
def test_lines_wait_for_room_and_are_written_once_and_in_order(tmp_path, monkeypatch, room):
    disk, path = Disk(monkeypatch), tmp_path / "lines"
    file = LineFile(path)
    file.append(["one"])
    disk.room = room
    file.append(["two", "three"])  # ten bytes with the ends
    assert file.full is (room < 10)
    file.append(["four"])
    disk.room = 1 << 40
    file.append([])
    assert not file.full and path.read_text() == "one\ntwo\nthree\nfour\n"
    file.close()


def test_what_waits_is_bounded_and_the_rest_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(line_file, "MOST_KEPT", 10)
    disk, file = Disk(monkeypatch), LineFile(tmp_path / "lines")
    disk.room = 0
    for word in ("12345", "678", "90", "x"):
        file.append([word])
    assert file.dropped == 2
    disk.room = 1 << 40
    file.close()
    assert (tmp_path / "lines").read_text() == "12345\n678\n"


def test_half_a_line_of_a_killed_writer_is_ended_and_another_error_is_raised(tmp_path, monkeypatch):
    path = tmp_path / "lines"
    path.write_text("a\nhalf")
    file = LineFile(path)
    file.append(["b"])
    assert path.read_text() == "a\nhalf\nb\n"

    def broken(descriptor, data):
        raise OSError(errno.EIO, "x")

    monkeypatch.setattr(line_file.os, "write", broken)
    with pytest.raises(OSError, match="x"):
        file.append(["c"])
    monkeypatch.undo()
    file.close()
    file.close()


def test_a_journal_says_when_the_disk_is_full_and_when_it_is_not_any_more(tmp_path, monkeypatch):
    disk, found = Disk(monkeypatch), Journal(tmp_path / "job")
    found.event("one", "1")
    disk.room = 0
    found.event("two", "2")
    found.add_points([{"kind": "round", "round": 0}])
    assert [event["kind"] for event in found.events] == ["one", "two", "warning"]
    disk.room = 1 << 40
    found.progress({"status": "RUNNING"}, now=True)
    found.flush()
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "job" / "events.jsonl").read_text().splitlines()]
    assert kinds == ["one", "two", "warning", "disk_free"]
    assert (tmp_path / "job" / "metrics.jsonl").read_text() == '{"kind": "round", "round": 0}\n'
    found.close()


def test_an_outcome_waits_for_room_and_not_for_ever(tmp_path, monkeypatch):
    disk, found = Disk(monkeypatch), Journal(tmp_path / "job")
    disk.room = 0
    found.event("one", "1")
    monkeypatch.setattr(journal, "OUTCOME_SECONDS", 0.05)
    with pytest.raises(OSError, match=r"no room for the outcome within 0\.05 s"):
        found.write_outcome({"status": "SUCCEEDED"})
    assert not (tmp_path / "job" / "outcome.json").exists()  # not before the records
    disk.room = 1 << 40
    found.write_outcome({"status": "SUCCEEDED"})
    assert json.loads((tmp_path / "job" / "outcome.json").read_text()) == {"status": "SUCCEEDED"}
    found.close()


def test_a_checkpoint_without_room_is_an_error_of_its_place_and_leaves_no_draft(tmp_path, monkeypatch):
    kept = checkpoint.save(tmp_path, 1, SavedState())

    def fails(number):
        def fsync(handle):
            raise OSError(number, os.strerror(number))

        return fsync

    for number, kind in ((errno.ENOSPC, PlaceError), (errno.EIO, CheckpointError)):
        with monkeypatch.context() as patched, pytest.raises(CheckpointError) as caught:
            patched.setattr(os, "fsync", fails(number))
            checkpoint.save(tmp_path, 2, SavedState())
        assert type(caught.value) is kind
    assert [path.name for path in tmp_path.iterdir()] == [kept.name]


def test_a_run_whose_last_checkpoint_finds_no_room_fails_in_time_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshots, "LAST_SECONDS", 0.0)
    real = checkpoint.save

    def save(place, step, *args, **more):
        if step == 12:  # the last round
            raise PlaceError("cannot write the checkpoint: No space left on device")
        return real(place, step, *args, **more)

    monkeypatch.setattr(checkpoint, "save", save)
    outcome, events = run(tmp_path / "job", Small())
    assert outcome.status is Status.FAILED and "No space left" in outcome.message
    assert "step-00000012" not in [path.name for path in (tmp_path / "job" / "checkpoints").glob("*")]
    assert [event["kind"] for event in events][-1] == "failed"


def run(folder, work, on_event=None):
    found = Journal(folder, on_event=on_event)
    spec = JobSpec("small_work:Small", {"name": "all_reduce"}, workers=2, epochs=2, checkpoint_every=2)
    cluster = LocalCluster()
    try:
        driver = Driver(WorkloadJob(work, spec, found, checkpoints=folder / "checkpoints", capture=False))
        return driver.run(cluster), found.events
    finally:
        cluster.close()
        found.close()


def test_on_a_disk_that_is_really_full_for_a_while_nothing_is_missing(tmp_path):
    disk = tmp_path / "small"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    folder, filler, said = disk / "job", disk / "filler", threading.Event()

    def fill():
        """Fill the disk after the first checkpoint, and remove the file when the job has said that the disk is full."""
        assert until(lambda: (folder / "checkpoints").exists() and any((folder / "checkpoints").iterdir()), 60)
        while not said.wait(0.01):  # a checkpoint that is removed makes room again
            with filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
                while file.write(bytes(512)):
                    pass
        filler.unlink()

    def hear(event):
        if event["kind"] == "warning" and "is full" in event["message"]:
            said.set()

    filling = threading.Thread(target=fill)
    filling.start()
    try:
        try:
            outcome, events = run(folder, Small(n=240, batch=2, pause=0.02), hear)
        finally:
            said.set()
            filling.join()
        assert outcome.status is Status.SUCCEEDED, outcome
        kinds = [event["kind"] for event in events]
        assert "warning" in kinds and "failed" not in kinds and outcome.checkpoint is not None
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        rounds = [point["round"] for point in map(json.loads, lines) if point["kind"] == "round"]
        assert rounds == list(range(120))
        assert [json.loads(line)["kind"] for line in (folder / "events.jsonl").read_text().splitlines()] == kinds
        law, _, _ = plain(Small(n=240, batch=2), 2, epochs=2)
        assert distance(outcome.snapshot.fill(Small().model()), law) < 1e-12
    finally:
        subprocess.run(["umount", "-l", disk], check=True)

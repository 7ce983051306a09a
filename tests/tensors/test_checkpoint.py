"""Checkpoints: what was saved comes back; nothing torn, changed or foreign is ever taken for one."""

import hashlib
import json
import logging
import os
import pickle
import signal
from pathlib import Path

import pytest
import torch
from rayps_client.errors import CheckpointError

from rayps.core import failpoint
from rayps.tensors.checkpoints import checkpoint
from rayps.tensors.checkpoints.checkpoint import SavedState
from rayps.tensors.checkpoints.checkpoint_manifest import hash_manifest


def a_state(value: float = 1.0) -> SavedState:
    flat = torch.full((10,), value)
    return SavedState(
        {
            "model/0.weight": flat[:6].view(2, 3),
            "model/0.bias": flat[6:],
            "model/tied": flat[:6].view(2, 3),
            "buffer/count": torch.tensor(3),
            "optim/0.weight/exp_avg": torch.rand(2, 3).double().t(),
            "optim/half": torch.ones(2, dtype=torch.bfloat16),
            "rng/0": torch.arange(5, dtype=torch.uint8),
            "rng/none": torch.empty(0, 4),
        },
        {"epoch": 2, "step": 17, "strategy": [{"name": "all_reduce"}], "loss": float("inf"), "é": None},
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def same(one: SavedState, other: SavedState) -> bool:
    return (
        one.meta == other.meta
        and one.tensors.keys() == other.tensors.keys()
        and all(
            torch.equal(value, other.tensors[key]) and value.dtype == other.tensors[key].dtype
            for key, value in one.tensors.items()
        )
    )


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    state = a_state()
    path = checkpoint.save(tmp_path / "checkpoints", 171, state)
    assert path.name == "step-00000171" and checkpoint.newest(path.parent) == path
    assert same(checkpoint.load(path), state)
    assert names(path) == [
        "buffer.safetensors",
        "manifest.json",
        "model.safetensors",
        "optim.safetensors",
        "rng.safetensors",
    ]


def test_no_tensors_and_odd_keys_in_meta(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 0, SavedState({}, {"staleness": {10: 1, 2: 3}, "pair": (1, 2)}))
    assert checkpoint.load(path).meta == {"staleness": {"10": 1, "2": 3}, "pair": [1, 2]}


def test_only_the_last_are_kept(tmp_path: Path) -> None:
    (tmp_path / "step-00000001.tmp-dead").mkdir()
    (tmp_path / "events.jsonl").write_text("mine")
    for step in (1, 2, 10, 100):
        checkpoint.save(tmp_path, step, a_state(step), keep=2)
    assert names(tmp_path) == ["events.jsonl", "step-00000010", "step-00000100"]
    checkpoint.save(tmp_path, 50, a_state(50), keep=2)  # the run went back
    assert names(tmp_path) == ["events.jsonl", "step-00000010", "step-00000050"]
    checkpoint.save(tmp_path, 50, a_state(51), keep=2)  # and wrote the same step again
    found = checkpoint.newest(tmp_path)
    assert found is not None and checkpoint.load(found).tensors["model/0.bias"][0] == 51


def test_what_is_saved_while_training_goes_on_is_a_copy(tmp_path: Path) -> None:
    state = a_state(1.0)
    path = checkpoint.save(tmp_path, 1, state)
    loaded = checkpoint.load(path)
    loaded.tensors["model/0.bias"].add_(1)
    assert checkpoint.load(path).tensors["model/0.bias"][0] == 1


FILES = ["manifest.json", "model.safetensors", "optim.safetensors", "rng.safetensors", "buffer.safetensors"]


def tear(path: Path, how: str) -> None:
    good = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "longer":
        path.write_bytes(good + b"\0")
    elif how == "zeroed":
        path.write_bytes(bytes(len(good)))
    elif how == "folder":
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(good[: int(len(good) * float(how))])


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["missing", "empty", "longer", "zeroed", "folder", "0.999", "0.5", "0.01"])
def test_a_torn_file_is_refused_and_passed_over(
    tmp_path: Path, name: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    older = checkpoint.save(tmp_path, 1, a_state(1), keep=5)
    torn = checkpoint.save(tmp_path, 2, a_state(2), keep=5)
    tear(torn / name, how)
    for read in (checkpoint.load, checkpoint.verify):
        with pytest.raises(CheckpointError, match="step-00000002") as caught:
            read(torn)
        assert caught.value.message.count("\n") < 3 and "earlier checkpoint" in caught.value.message
    with caplog.at_level(logging.WARNING):
        assert checkpoint.newest(tmp_path) == older
    assert "step-00000002" in caplog.text
    assert list(checkpoint.scan(tmp_path)[1]) == [torn]


def test_any_flipped_bit_is_seen(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 1, a_state())
    for name in FILES:
        good = (path / name).read_bytes()
        for place in range(0, len(good), max(1, len(good) // 60)):
            bad = bytearray(good)
            bad[place] ^= 1 << place % 8
            (path / name).write_bytes(bytes(bad))
            try:
                loaded = checkpoint.load(path)
            except CheckpointError:
                continue
            assert name == "manifest.json" and same(loaded, a_like(loaded)), (name, place)
        (path / name).write_bytes(good)
    assert checkpoint.newest(tmp_path) == path


def a_like(state: SavedState) -> SavedState:
    """A flip may only pass where it changes nothing, such as one kind of white space into another."""
    first = a_state()
    first.tensors["optim/0.weight/exp_avg"] = state.tensors["optim/0.weight/exp_avg"]
    return first


def file_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def sealed(path: Path, **changes: object) -> None:
    """Change a manifest as an attacker would: with the right hash."""
    body = json.loads((path / "manifest.json").read_text())
    body.update(changes)
    body.pop("sha256")
    (path / "manifest.json").write_text(json.dumps({**body, "sha256": hash_manifest(body)}))


def test_foreign_and_newer_and_crafted_manifests(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 1, a_state())
    manifest = (path / "manifest.json").read_text()
    files = json.loads(manifest)["files"]
    facts = files["model.safetensors"]
    cases: list[tuple[dict[str, object], str]] = [
        ({"version": 2}, "has format 2, and this rayps reads format 1: use the rayps that wrote it"),
        ({"version": None}, "missing fields"),
        ({"finite": None}, "does not state that its tensors are finite"),
        ({"format": "other"}, "not a checkpoint of rayps"),
        ({"files": None}, "missing fields"),
        ({"meta": []}, "missing fields"),
        ({"files": {"model.safetensors": {}}}, "missing fields"),
        ({"files": {"../../secret.safetensors": facts}}, "names the file"),
        ({"files": {"/etc/passwd": facts}}, "names the file"),
        ({"files": {"model.safetensors": {**facts, "tensors": {}}}}, "does not contain the tensors"),
        ({"files": {"model.safetensors": {**facts, "size": 10**12}}}, "bytes"),
        ({"files": {"model.safetensors": {**facts, "sha256": "0" * 64}}}, "SHA-256"),
    ]
    for changes, word in cases:
        (path / "manifest.json").write_text(manifest)
        sealed(path, **changes)
        with pytest.raises(CheckpointError, match=word):
            checkpoint.load(path)
    for text in ("[]", "3", '"x"', "{}", "not json"):
        (path / "manifest.json").write_text(text)
        with pytest.raises(CheckpointError):
            checkpoint.load(path)


class Bomb:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[object, ...]:
        return open, (str(self.canary), "w")


@pytest.mark.parametrize("name", ["model.safetensors", "manifest.json"])
def test_a_pickle_is_never_run(tmp_path: Path, name: str) -> None:
    path = checkpoint.save(tmp_path, 1, a_state())
    (path / name).write_bytes(pickle.dumps(Bomb(tmp_path / "canary")))
    if name != "manifest.json":
        body = json.loads((path / "manifest.json").read_text())["files"]
        body[name] |= {"size": (path / name).stat().st_size, "sha256": file_hash(path / name)}
        sealed(path, files=body)
    with pytest.raises(CheckpointError, match="cannot be"):
        checkpoint.load(path)
    assert not (tmp_path / "canary").exists()


def test_a_wrong_path_says_which_is_right(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        checkpoint.load(tmp_path / "step-00000009")
    assert checkpoint.newest(tmp_path / "nowhere") is None and checkpoint.newest(tmp_path) is None
    path = checkpoint.save(tmp_path, 9, a_state())
    with pytest.raises(CheckpointError, match=rf"give one of them, e.g. {path}"):
        checkpoint.load(tmp_path)


def test_a_failed_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoint.save(tmp_path, 1, a_state())
    for state, word in (
        (SavedState({"weight": torch.ones(1), "../x/y": torch.ones(1)}), "prefix"),
        (SavedState(meta={"a": object()}), "JSON"),
    ):
        with pytest.raises(CheckpointError, match=word):
            checkpoint.save(tmp_path, 2, state)
    with monkeypatch.context() as patched:

        def full(handle: int) -> None:
            raise OSError(28, "No space left on device")

        patched.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match="No space left"):
            checkpoint.save(tmp_path, 2, a_state())
    assert names(tmp_path) == [path.name] and checkpoint.newest(tmp_path) == path


@pytest.mark.filterwarnings("ignore:.*fork")
@pytest.mark.parametrize(
    "place", ["files written, no manifest", "manifest written, draft not renamed", "draft renamed, not synced"]
)
def test_a_writer_killed_at_any_point_leaves_no_half(tmp_path: Path, place: str) -> None:
    older = checkpoint.save(tmp_path, 1, a_state())
    child = os.fork()
    if child == 0:
        failpoint.arm(f"checkpoint: {place}=1")
        checkpoint.save(tmp_path, 2, a_state())
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    newest = older if "not synced" not in place else tmp_path / "step-00000002"
    assert checkpoint.scan(tmp_path) == (newest, {}) and len(names(tmp_path)) == 2
    checkpoint.save(tmp_path, 2, a_state(), keep=1)
    assert names(tmp_path) == ["step-00000002"]


def test_a_damaged_checkpoint_names_the_newest_earlier_one_that_is_valid(tmp_path: Path) -> None:
    for step in (7, 9, 12, 15):
        checkpoint.save(tmp_path, step, a_state(float(step)), keep=10)
    steps = sorted(tmp_path.iterdir())
    for damaged in (steps[1], steps[2]):
        os.truncate(damaged / "model.safetensors", 100)
    with pytest.raises(CheckpointError, match="12 is not valid") as caught:
        checkpoint.load(steps[2])
    assert caught.value.message.splitlines()[1] == f"an earlier checkpoint is valid: {steps[0]}"
    assert caught.value.data["path"] == str(steps[2])
    os.truncate(steps[0] / "model.safetensors", 100)
    with pytest.raises(CheckpointError, match="give an earlier checkpoint"):
        checkpoint.load(steps[2])

"""A damaged newest checkpoint is never loaded: each way to continue takes the one before, and says why."""

import json
import tempfile
from functools import cache

import fsspec
import pytest
import torch
from rayps_client.errors import CheckpointError, PlaceError
from small_work import Small, distance, plain, train

import rayps
from rayps.cluster.local import LocalCluster
from rayps.core.job.job_status import Status
from rayps.core.urls import is_url
from rayps.runtime.driver.driver_actor import DriverActor
from rayps.tensors.checkpoints import checkpoint
from rayps.tensors.checkpoints.checkpoint_place import CheckpointPlace, ObjectStore

PLACES = ["folder", "file://", "memory://"]
LAYOUTS = {"whole": "all_reduce", "in parts": "all_reduce:shard=optimizer"}


def changed(data, at):
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


# each damage: from a checkpoint's files (name -> bytes) to what is left of them
DAMAGES = {
    "a tensor's bit": lambda files: files | {(name := tensors(files)): changed(files[name], len(files[name]) - 3)},
    "a file is cut": lambda files: files | {(name := tensors(files)): files[name][:-5]},
    "a file is empty": lambda files: files | {tensors(files): b""},
    "a file is missing": lambda files: {name: data for name, data in files.items() if name != tensors(files)},
    "the manifest's bit": lambda files: files | {checkpoint.MANIFEST: changed(files[checkpoint.MANIFEST], 40)},
    "the manifest is cut": lambda files: files | {checkpoint.MANIFEST: files[checkpoint.MANIFEST][:-20]},
    "the manifest is missing": lambda files: {k: data for k, data in files.items() if k != checkpoint.MANIFEST},
}


def tensors(files):
    """The largest file of tensors."""
    return max((name for name in files if name.endswith(".safetensors")), key=lambda name: len(files[name]))


def damage(path, how):
    store, root = fsspec.url_to_fs(str(path))
    found = {name: store.cat_file(name) for name in store.find(root)}
    left = DAMAGES[how]({name.rpartition("/")[2]: data for name, data in found.items()})
    for name in found:
        own = name.rpartition("/")[2]
        if own in left:
            store.pipe_file(name, left[own])
        else:
            store.rm_file(name)


@pytest.fixture
def at(tmp_path):
    """The location of a folder for checkpoints, by the kind of its place."""
    yield lambda kind: str(tmp_path / "run") if kind == "folder" else f"{kind}{tmp_path}/run"
    fsspec.filesystem("memory").store.clear()


@cache
def trained(layout, remote):
    """The files of a folder for checkpoints, after two runs of one epoch of two rounds each."""
    folder = "memory://trained" if remote else tempfile.mkdtemp()
    for epochs in (1, 2):
        train(Small(n=12), LAYOUTS[layout], workers=2, epochs=epochs, checkpoint=folder, resume=epochs > 1)
    store, root = fsspec.url_to_fs(folder)
    files = {name.removeprefix(root): store.cat_file(name) for name in store.find(root)}
    store.rm(root, recursive=True)
    return files


def saved_twice(folder, layout="whole"):
    """The checkpoints of two epochs in a folder."""
    store, root = fsspec.url_to_fs(folder)
    for name, data in trained(layout, folder.startswith("memory")).items():
        store.makedirs((root + name).rpartition("/")[0], exist_ok=True)
        store.pipe_file(root + name, data)
    return tuple(CheckpointPlace.of(folder).at(f"step-0000000{step}").location for step in (2, 4))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_one_before_is_taken_whatever_is_damaged(at, place, layout, tmp_path):
    folder = at(place)
    earlier, newest = saved_twice(folder, layout)
    store, root = fsspec.url_to_fs(str(newest))
    whole = {name: store.cat_file(name) for name in store.find(root)}
    assert checkpoint.usable_at(newest) == (newest, [])
    for how in DAMAGES:
        damage(newest, how)
        found, passed = checkpoint.usable_at(newest)
        assert str(found) == str(earlier), how
        assert len(passed) == 1 and passed[0].startswith(f"skipped the checkpoint {newest}: "), how
        assert str(checkpoint.usable(folder)[0]) == str(earlier), how
        for name, data in whole.items():
            store.pipe_file(name, data)
    assert checkpoint.usable_at(newest) == (newest, [])


@pytest.mark.parametrize("place", PLACES)
def test_there_is_no_other_checkpoint_to_take(at, place):
    folder = at(place)
    earlier, newest = saved_twice(folder)
    absent = CheckpointPlace.of(folder).at("step-00000077").location  # not damaged: the name is wrong
    assert checkpoint.usable_at(absent) == (absent, [])
    damage(newest, "a file is cut")
    damage(earlier, "a file is cut")
    for given in (earlier, newest):
        with pytest.raises(CheckpointError, match=f"{given} is not valid"):
            train(Small(n=12), workers=2, epochs=3, resume=given)


def test_a_place_that_does_not_answer_is_no_damage(at, monkeypatch):
    folder = at("memory://")
    _, newest = saved_twice(folder)

    def fill(self, name, offset, into):
        raise PlaceError("the place does not answer", path=name)

    monkeypatch.setattr(ObjectStore, "fill", fill)
    with pytest.raises(PlaceError):
        checkpoint.usable_at(newest)


# ---- each way to continue: it returns the warnings, and the model after two epochs


def by_train(folder, path, layout, **options):
    options = {"workers": 2, "epochs": 2, "resume": path} | options
    result = train(Small(n=12), LAYOUTS[layout], **options)
    return [event["message"] for event in result.events if event["kind"] == "warning"], result.model()


def by_folder(folder, path, layout):
    return by_train(folder, path, layout, checkpoint=folder, resume=True)


def by_start(folder, path, layout):
    return by_train(folder, path, layout, start_from=str(path), resume=False, epochs=1)


TWELVE = """
import small_work

class Twelve(small_work.Small):
    def __init__(self):
        super().__init__(n=12)
"""


def by_service(folder, path, layout, tmp_path):
    """What REST, `rayps submit`, a job file and a sweep lead to: the job's specification has the path."""
    job = tmp_path / "job"
    (tmp_path / "twelve.py").write_text(TWELVE)
    spec = {"workload": "twelve.py:Twelve", "working_dir": str(tmp_path), "strategy": LAYOUTS[layout]}
    spec |= {"workers": 2, "epochs": 2, "resume": str(path)}
    assert DriverActor(spec, str(job), 1).run() == Status.SUCCEEDED, (job / "outcome.json").read_text()
    events = [json.loads(line) for line in (job / "events.jsonl").read_text().splitlines()]
    outcome = json.loads((job / "outcome.json").read_text())
    model, state = Small(n=12).model(), checkpoint.load(outcome["checkpoint"])
    model.load_state_dict({name: state.tensors[f"model/{name}"] for name in model.state_dict()})
    return [event["message"] for event in events if event["kind"] == "warning"], model


WAYS = {"resume=True": by_folder, "resume=PATH": by_train, "start_from=PATH": by_start, "service": by_service}


@pytest.mark.parametrize("how", ["a tensor's bit", "the manifest is missing"])
@pytest.mark.parametrize("place", ["folder", "memory://"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("way", WAYS)
def test_each_way_to_continue_takes_the_one_before(way, layout, place, how, at, tmp_path):
    folder = at(place)
    earlier, newest = saved_twice(folder, layout)
    damage(newest, how)
    more = (tmp_path,) if way == "service" else ()
    warnings, model = WAYS[way](folder, newest, layout, *more)
    skipped = [each for each in warnings if each.startswith("skipped the checkpoint")]
    if not (way == "resume=True" and is_url(folder) and "missing" in how):  # without a manifest it never was one
        assert len(skipped) == 1 and str(newest) in skipped[0]
    whole = by_start(folder, earlier, layout)[1] if way == "start_from=PATH" else plain(Small(n=12), 2, epochs=2)[0]
    assert distance(model, whole) < 1e-12


@pytest.mark.parametrize("how", ["a tensor's bit", "the manifest is missing"])
@pytest.mark.parametrize("named", [False, True], ids=["resume=True", "resume=PATH"])
def test_a_loop_of_ones_own_takes_the_one_before(named, how, tmp_path):
    folder = tmp_path / "states"

    def loop(upto):
        state = rayps.restore()
        step, total = (0, torch.zeros(2)) if state is None else (state["step"], state["total"])
        while step < upto:
            step, total = step + 1, total + step
            rayps.save({"step": step, "total": total})
        return step, total.tolist(), None if state is None else state["step"]

    cluster = LocalCluster()
    options = {"workers": 2, "checkpoint": folder, "cluster": cluster, "progress": False}
    try:
        for upto in (1, 2):
            rayps.run(loop, params={"upto": upto}, resume=upto > 1, **options)
        newest = checkpoint.newest(folder)
        damage(newest, how)
        found = rayps.run(loop, params={"upto": 3}, resume=newest if named else True, **options)
    finally:
        cluster.close()
    assert [each[2] for each in found] == [1, 1] and [each[0] for each in found] == [3, 3]

"""Checkpoints of several processes: equal to the unsharded one under any cut, whole or absent after any death."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from process_cluster import CONTEXT, start_process
from rayps_client.errors import CheckpointError, PlaceError, TrainingError
from safetensors.torch import load_file
from torch import nn
from torch.optim import SGD, Adagrad, Adam, NAdam, RMSprop

from rayps.tensors import optim, state_pieces
from rayps.tensors.checkpoints import background_write, checkpoint, checkpoint_parts
from rayps.tensors.checkpoints.background_write import BackgroundWrite
from rayps.tensors.checkpoints.checkpoint import SavedState
from rayps.tensors.checkpoints.checkpoint_parts import (
    PartFacts,
    PieceReader,
    make_token,
    part_name,
    read_pieces,
    seal,
    verify_share,
    write_part,
)
from rayps.tensors.checkpoints.checkpoint_place import BLOCK, CheckpointPlace, LocalFolder
from rayps.tensors.flat import Layout
from rayps.tensors.snapshot import Snapshot

ROOT = Path(__file__).resolve().parents[2]
MADE = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: Adam(p, lr=0.01, amsgrad=True),
    "adagrad": lambda p: Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
    "rmsprop": lambda p: RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "nadam": lambda p: NAdam(p, lr=0.01),
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
shapes = st.lists(st.lists(st.integers(1, 5), max_size=3).map(tuple), min_size=1, max_size=5)


def a_layout(held: list[tuple[int, ...]], dtype: torch.dtype) -> Layout:
    return Layout.of((f"layer.{i}/w", torch.empty(shape, dtype=dtype)) for i, shape in enumerate(held))


def numbers(layout: Layout, seed: int) -> torch.Tensor:
    return torch.randn(layout.size, generator=torch.Generator().manual_seed(seed)).to(layout.dtype)


def trained(layout: Layout, kind: str) -> optim.SlicedOptimizer:
    """The optimizer of the whole vector after two steps."""
    one = optim.SlicedOptimizer(MADE[kind], layout, numbers(layout, 0), 0, layout.size)
    for step in range(2):
        one.step(numbers(layout, step + 1))
    return one


def held_by(layout: Layout, kind: str, lo: int, hi: int) -> optim.SlicedOptimizer:
    """The optimizer of a process that holds elements lo to hi in the state of `trained`.

    In bfloat16 a step on a slice may have other bits than the step on the whole: the cut is after the steps.
    """
    one = trained(layout, kind)
    part = optim.SlicedOptimizer(MADE[kind], layout, one.params[lo:hi].clone(), lo, hi)
    part.load(optim.join([one.moments()], layout), layout)
    return part


def the_state(layout: Layout, kind: str) -> SavedState:
    """The state of the same training in one process, of whole parameters, with what is not cut."""
    one = trained(layout, kind)
    snapshot = Snapshot(
        layout,
        one.params,
        optim.join([one.moments()], layout),
        buffers={"mean": torch.tensor([1.0, float("inf")])},
        rng={0: torch.arange(7, dtype=torch.uint8), 1: torch.arange(9, dtype=torch.uint8)},
        positions=[3, 3],
        shared={"scale": torch.tensor(2.0)},
    )
    return snapshot.to_state(workload="w")


def write(place: Path | str, layout: Layout, kind: str, cuts: list[int], step: int = 3, keep: int = 2) -> Path | str:
    """Write the same state by as many writers as there are ranges between the cuts."""
    token, parts, held = make_token(), [], []
    bounds = list(zip([0, *cuts], [*cuts, layout.size], strict=True))
    state = the_state(layout, kind)
    for number, (lo, hi) in enumerate(bounds):
        one = held_by(layout, kind, lo, hi)
        vector = torch.zeros(layout.size, dtype=layout.dtype)
        vector[lo:hi] = one.params
        part = state_pieces.pieces_of(layout, [(lo, hi)], vector, one.moments(), empty=number == 0)
        if number < 2:
            part.tensors[f"rng/{number}"] = state.tensors[f"rng/{number}"]
        if number == 0:
            part.tensors |= {k: v for k, v in state.tensors.items() if k.startswith(("buffer/", "shared/"))}
        if number == len(bounds) - 1 < 1:
            part.tensors["rng/1"] = state.tensors["rng/1"]
        name = part_name(number, len(bounds))
        facts = write_part(place, step, token, name, part.tensors, offsets=part.offsets)
        parts.append(PartFacts.from_json(json.loads(json.dumps(facts.to_json()))))
        held.append(part.offsets)
    whole = state_pieces.find_whole_shapes(layout, [key for offsets in held for key in offsets])
    return seal(place, step, token, parts, meta=state.meta, whole=whole, keep=keep)


def same(one: SavedState, other: SavedState) -> None:
    assert one.meta == json.loads(json.dumps(other.meta))
    assert one.tensors.keys() == other.tensors.keys()
    for key, value in one.tensors.items():
        wanted = other.tensors[key]
        assert (value.dtype, value.shape) == (wanted.dtype, wanted.shape), key
        assert torch.equal(value, wanted), key


cases = given(
    shapes,
    st.sampled_from(DTYPES),
    st.sampled_from(sorted(MADE)),
    st.lists(st.floats(0, 1), max_size=4).map(sorted),
    st.lists(st.floats(0, 1), max_size=4).map(sorted),
)


@settings(max_examples=60, deadline=None)
@cases
def test_parts_are_the_unsharded_checkpoint_under_any_cut(
    held: list[tuple[int, ...]], dtype: torch.dtype, kind: str, cut: list[float], other: list[float]
) -> None:
    layout = a_layout(held, dtype)
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "parts", layout, kind, [int(part * layout.size) for part in cut])
        plain = checkpoint.save(Path(folder) / "plain", 3, the_state(layout, kind))
        expected = checkpoint.load(plain)
        same(checkpoint.load(path), expected)
        again = Snapshot.from_state(checkpoint.load(path))
        same(again.to_state(workload="w"), expected)
        # any other cut of either checkpoint is a slice of the state
        bounds = [int(part * layout.size) for part in other]
        for place in (path, plain):
            reader = PieceReader(place)
            for lo, hi in zip([0, *bounds], [*bounds, layout.size], strict=True):
                found = reader.read(state_pieces.list_wanted(layout, [(lo, hi)], reader.contents))
                vector = torch.zeros(layout.size, dtype=layout.dtype)
                state_pieces.fill(layout, found, vector, [(lo, hi)])
                params = vector[lo:hi]
                moments = state_pieces.join_moments(found, reader.meta["optimizer_numbers"])
                assert torch.equal(params, again.params[lo:hi])
                whole = optim.SlicedOptimizer(MADE[kind], layout, again.params[lo:hi].clone(), lo, hi)
                whole.load(again.moments, layout)
                mine = optim.SlicedOptimizer(MADE[kind], layout, params, lo, hi)
                mine.restore(moments)
                equal(mine.moments(), whole.moments())
                for one in (mine, whole):
                    one.step(numbers(layout, 9)[lo:hi])
                assert torch.equal(mine.params, whole.params)


def equal(one: optim.Moments, other: optim.Moments) -> None:
    assert one.keys() == other.keys()
    for name, state in one.items():
        assert state.keys() == other[name].keys()
        for key, value in state.items():
            wanted = other[name][key]
            assert torch.equal(value, wanted) if isinstance(value, torch.Tensor) else value == wanted, (name, key)


LAYOUT = a_layout([(3, 4), (4,), (), (2, 3)], torch.float32)


def test_each_range_of_each_tensor_is_read_from_both_formats(tmp_path: Path) -> None:
    path = write(tmp_path / "parts", LAYOUT, "adam", [5, 13, 17])
    plain = checkpoint.save(tmp_path / "plain", 3, the_state(LAYOUT, "adam"))
    state = checkpoint.load(plain)
    for place in (path, plain):
        for key, value in state.tensors.items():
            flat = value.reshape(-1)
            for lo in range(flat.numel() + 1):
                for hi in range(lo, flat.numel() + 1):
                    assert torch.equal(read_pieces(place, {key: (lo, hi)})[key], flat[lo:hi]), (key, lo, hi)
            assert torch.equal(read_pieces(place, {key: None})[key], value)
        with pytest.raises(CheckpointError, match="has no tensor 'model/x'"):
            read_pieces(place, {"model/x": None})
        for span in ((-1, 2), (0, 13), (3, 2)):
            with pytest.raises(CheckpointError, match=r"are wanted, and .* has 12"):
                read_pieces(place, {"model/layer.0/w": span})


def test_a_parameter_without_elements_is_there(tmp_path: Path) -> None:
    layout = a_layout([(0, 3), (2, 2), (0,)], torch.float32)
    path = write(tmp_path, layout, "sgd", [1, 4])
    same(checkpoint.load(path), the_state(layout, "sgd"))


def test_a_part_is_a_file_of_safetensors(tmp_path: Path) -> None:
    tensors = {
        "buffer/half": torch.arange(5, dtype=torch.bfloat16),
        "buffer/flag": torch.tensor([True, False, True]),
        "buffer/turned": torch.arange(6.0).view(2, 3).t(),
        "buffer/none": torch.empty(0, 4),
        "buffer/count": torch.tensor(3),
        "buffer/phase": torch.tensor([1 + 2j]),
        "buffer/byte": torch.arange(3, dtype=torch.uint8),
        "model/w": torch.arange(BLOCK // 4 + 7, dtype=torch.float32),
        "é/w": torch.ones(1, dtype=torch.float64),
    }
    facts = write_part(tmp_path, 1, "t", part_name(0, 1), tensors)
    file = tmp_path / "step-00000001.tmp-t" / part_name(0, 1)
    held = load_file(file)
    assert held.keys() == tensors.keys() and file.stat().st_size == facts.size
    assert all(torch.equal(held[key], value) and held[key].dtype == value.dtype for key, value in tensors.items())
    assert checkpoint.newest(tmp_path) is None
    path = seal(tmp_path, 1, "t", [facts], meta={}, whole={})
    assert checkpoint.load(path).tensors.keys() == tensors.keys()
    with pytest.raises(CheckpointError, match="safetensors lacks"):
        write_part(tmp_path, 2, "t", part_name(0, 1), {"buffer/s": torch.eye(2).to_sparse()})


def a_part(tmp_path: Path, number: int, lo: int, hi: int, size: int = 10) -> PartFacts:
    flat = torch.arange(float(size))
    return write_part(tmp_path, 1, "t", part_name(number, 2), {"model/w": flat[lo:hi]}, offsets={"model/w": lo})


@pytest.mark.parametrize(
    ("ranges", "word"),
    [
        ([(0, 5), (6, 10)], "elements 5 to 6 of 'model/w' are in no file"),
        ([(0, 5), (4, 10)], "elements 4 to 5 of 'model/w' are twice"),
        ([(0, 5), (5, 9)], "elements 9 to 10 of 'model/w' are in no file"),
        ([(1, 5), (5, 10)], "elements 0 to 1 of 'model/w' are in no file"),
        ([(0, 10), (0, 10)], "are twice"),
    ],
)
def test_pieces_that_do_not_fit_are_refused(tmp_path: Path, ranges: list[tuple[int, int]], word: str) -> None:
    parts = [a_part(tmp_path, number, lo, hi) for number, (lo, hi) in enumerate(ranges)]
    with pytest.raises(CheckpointError, match=word):
        seal(tmp_path, 1, "t", parts, meta={}, whole={"model/w": [10]})
    assert checkpoint.newest(tmp_path) is None


def test_other_parts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    one, two = a_part(tmp_path, 0, 0, 5), a_part(tmp_path, 1, 5, 10)
    plain = write_part(tmp_path, 1, "t", "plain.safetensors", {"rng/0": torch.ones(2)})
    twice = write_part(tmp_path, 1, "t", "twice.safetensors", {"rng/0": torch.ones(2)})
    whole = write_part(tmp_path, 1, "t", "whole.safetensors", {"model/w": torch.ones(10)})
    half = write_part(
        tmp_path, 1, "t", "half.safetensors", {"model/w": torch.ones(5, dtype=torch.half)}, offsets={"model/w": 5}
    )
    for parts, shapes, word in (
        ([one, two], {}, "its whole shape is not given"),
        ([one, two], {"model/w": [9]}, "its shape .9. has 9"),
        ([one, two], {"model/w": [10], "model/x": [1]}, "'model/x' is in no file"),
        ([plain, twice], {}, "'rng/0' is in plain.safetensors and in twice.safetensors"),
        ([one, whole], {"model/w": [10]}, "a piece without an offset"),
        ([one, half], {"model/w": [10]}, "dtypes float32 and float16"),
        ([one, one], {"model/w": [10]}, "two parts"),
    ):
        with pytest.raises(CheckpointError, match=word):
            seal(tmp_path, 1, "t", parts, meta={}, whole=shapes)
    for offsets in ({"model/x": 0}, {"model/w": -1}):
        with pytest.raises(CheckpointError, match="give a flat tensor"):
            write_part(tmp_path, 1, "t", "a.safetensors", {"model/w": torch.ones(5)}, offsets=offsets)
    with pytest.raises(CheckpointError, match="give a flat tensor"):
        write_part(tmp_path, 1, "t", "a.safetensors", {"model/w": torch.ones(5, 1)}, offsets={"model/w": 0})
    seal(tmp_path, 1, "t", [one, two], meta={}, whole={"model/w": [5, 2]})
    assert torch.equal(checkpoint.load(tmp_path / "step-00000001").tensors["model/w"], torch.arange(10.0).view(5, 2))


def test_a_part_on_another_hosts_disk_is_an_error_that_names_the_way_out(tmp_path: Path) -> None:
    parts = [a_part(tmp_path / "here", 0, 0, 5), a_part(tmp_path / "there", 1, 5, 10)]
    with pytest.raises(CheckpointError, match="not shared with the host") as caught:
        seal(tmp_path / "here", 1, "t", parts, meta={}, whole={"model/w": [10]})
    assert caught.value.data["file"] == part_name(1, 2)
    assert checkpoint.newest(tmp_path / "here") is None


def test_a_part_that_was_cut_is_refused(tmp_path: Path) -> None:
    parts = [a_part(tmp_path, 0, 0, 5), a_part(tmp_path, 1, 5, 10)]
    os.truncate(tmp_path / "step-00000001.tmp-t" / part_name(1, 2), 20)
    with pytest.raises(CheckpointError, match="has 20 bytes"):
        seal(tmp_path, 1, "t", parts, meta={}, whole={"model/w": [10]})


@pytest.mark.parametrize("key", ["model/w", "optim/w/exp_avg", "own/1/params", "shared/x"])
def test_a_state_that_is_not_finite_is_not_written(tmp_path: Path, key: str) -> None:
    tensors = {key: torch.tensor([1.0, float("nan")]), "buffer/b": torch.tensor(float("inf"))}
    with pytest.raises(TrainingError, match="is not finite"):
        write_part(tmp_path, 1, "t", part_name(0, 1), tensors)
    assert list(tmp_path.iterdir()) == []


def test_damage_is_found_by_load_and_by_the_share_that_has_the_file(tmp_path: Path) -> None:
    older = write(tmp_path, LAYOUT, "adam", [5, 13], step=1, keep=9)
    path = Path(write(tmp_path, LAYOUT, "adam", [5, 13], step=2, keep=9))
    file = path / part_name(1, 3)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"an earlier checkpoint is valid: {older}"):
        checkpoint.load(path)
    assert checkpoint.scan(tmp_path)[0] == older
    found = []
    for rank in range(2):
        try:
            verify_share(path, rank, 2)
        except CheckpointError as error:
            found.append((rank, error.message))
    assert len(found) == 1 and found[0][0] == 1 and file.name in found[0][1]
    shutil.rmtree(path)
    verify_share(older, 0, 1)


def test_old_ones_are_removed_and_drafts_of_later_steps_stay(tmp_path: Path) -> None:
    for step in (1, 2, 5, 9):
        write(tmp_path, LAYOUT, "sgd", [5], step=step)
    write_part(tmp_path, 4, "dead", part_name(0, 1), {"rng/0": torch.ones(1)})
    write_part(tmp_path, 7, "next", part_name(0, 1), {"rng/0": torch.ones(1)})  # that of the next checkpoint
    write(tmp_path, LAYOUT, "sgd", [5], step=6)  # the run went back
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000005", "step-00000006", "step-00000007.tmp-next"]
    checkpoint_parts.discard(tmp_path, 7, "next")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000005", "step-00000006"]


def test_facts_and_places_survive_pickling(tmp_path: Path) -> None:
    for place in (CheckpointPlace.of(tmp_path), CheckpointPlace.of("s3://bucket/run"), a_part(tmp_path, 0, 0, 5)):
        assert pickle.loads(pickle.dumps(place)) == place
    assert CheckpointPlace.of(f"file://{tmp_path}") == LocalFolder(tmp_path) == CheckpointPlace.of(str(tmp_path))
    with pytest.raises(CheckpointError, match="give the URL as a text"):
        CheckpointPlace.of(Path("s3://bucket/run"))


# ---------------------------------------------------------------------------------------------- in the background


def test_a_write_in_the_background_has_the_lowest_priority_and_its_result(tmp_path: Path) -> None:
    seen: list[int] = []

    def job(stopped: object) -> PartFacts:
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        seen.append(os.sched_getscheduler(0))
        return a_part(tmp_path, 0, 0, 5)

    write = BackgroundWrite(job).start()
    assert write.result(60).tensors["model/w"]["shape"] == [5] and write.done()
    assert seen in ([0, os.SCHED_IDLE], [19, os.SCHED_OTHER])
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == 0


@pytest.mark.parametrize("asked", ["done", "result"])
def test_a_write_that_takes_long_gets_the_ordinary_priority(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    if not background_write._may_return():
        pytest.skip("this system does not let a thread leave the policy SCHED_IDLE")
    monkeypatch.setattr(background_write, "PATIENCE", 0.05)
    begun, go_on, seen = threading.Event(), threading.Event(), list[int]()

    def job(stopped: object) -> int:
        seen.append(os.sched_getscheduler(0))
        begun.set()
        assert go_on.wait(60)
        seen.append(os.sched_getscheduler(0))
        return 1

    write = BackgroundWrite(job).start()
    assert begun.wait(60)
    if asked == "done":
        deadline = time.monotonic() + 60
        while write._idle is not None and time.monotonic() < deadline:
            assert not write.done()
    else:
        with pytest.raises(PlaceError):
            write.result(0.1)
    go_on.set()
    assert write.result(60) == 1
    assert seen == [os.SCHED_IDLE, os.SCHED_OTHER]


def test_a_write_in_the_background_reports_its_error_and_can_be_cancelled(tmp_path: Path) -> None:
    def failing(stopped: object) -> None:
        raise CheckpointError("full")

    with pytest.raises(CheckpointError, match="full"):
        BackgroundWrite(failing).start().result(60)
    begun, go_on = threading.Event(), threading.Event()
    large = {"model/w": torch.zeros(3 * BLOCK // 4)}

    def slow(stopped):
        def asked() -> bool:
            begun.set()
            assert go_on.wait(60)
            return bool(stopped())

        return write_part(tmp_path, 1, "t", part_name(0, 1), large, stopped=asked)

    write = BackgroundWrite(slow, "round 1").start()
    assert begun.wait(60)
    with pytest.raises(PlaceError, match="round 1 was not written after 0 s"):
        write.result(0)
    assert not write.cancel(0) and not write.done()
    go_on.set()
    with pytest.raises(CancelledError):
        write.result(60)
    assert list(tmp_path.rglob("*.safetensors")) == [] and write.cancel()


# ---------------------------------------------------------------------------------------------- killed


def write_two_parts(place: str, elements: int, ready: Event | None = None) -> None:
    """Write a checkpoint of two parts with so many elements each; a process that a test kills does so."""
    if ready is not None:
        ready.set()
    parts = []
    for i in range(2):
        flat = torch.full((elements,), 2.0)
        parts.append(
            write_part(place, 2, "child", part_name(i, 2), {"model/w": flat}, offsets={"model/w": i * elements})
        )
    seal(place, 2, "child", parts, meta={"parameters": []}, whole={"model/w": [2 * elements]}, keep=1)


def exit_code(function: Callable[..., None], *args: object, fail: str = "") -> int | None:
    """Run a function in a process of its own, which dies at the place `fail`; return its exit code."""
    process = start_process(function, *args, failpoints=fail)
    process.join(120)
    return process.exitcode


PLACES = {  # where it is killed: whether the checkpoint is there then
    "part not begun=2": False,
    "a block written=1": False,
    "a block written=4": False,
    "part written, not reported=1": False,
    "part written, not reported=2": False,
    "manifest written, draft not renamed=1": False,
    "draft renamed, not synced=1": True,
    "complete, old ones not removed=1": True,
}


@pytest.mark.parametrize("place", PLACES)
def test_a_writer_killed_anywhere_leaves_a_whole_checkpoint_or_none(tmp_path: Path, place: str) -> None:
    older = checkpoint.save(tmp_path, 1, SavedState({"model/w": torch.ones(3)}, {"parameters": []}))
    before = {path.name: path.read_bytes() for path in older.iterdir()}
    assert exit_code(write_two_parts, str(tmp_path), BLOCK // 4 + 5, fail=f"checkpoint: {place}") == -signal.SIGKILL
    newest, invalid = checkpoint.scan(tmp_path)
    assert not invalid
    assert {path.name: path.read_bytes() for path in older.iterdir()} == before
    if PLACES[place]:
        assert newest == tmp_path / "step-00000002"
        assert torch.equal(checkpoint.load(newest).tensors["model/w"], torch.full((BLOCK // 2 + 10,), 2.0))
    else:
        assert newest == older
    # the next attempt succeeds, and removes what the dead one has left
    assert exit_code(write_two_parts, str(tmp_path), 4) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002"]


@pytest.mark.parametrize("seed", range(3))
def test_a_writer_killed_at_a_random_time_of_a_large_write(tmp_path: Path, seed: int) -> None:
    older = checkpoint.save(tmp_path, 1, SavedState({"model/w": torch.ones(3)}, {"parameters": []}))
    ready = CONTEXT.Event()
    process = start_process(write_two_parts, str(tmp_path), 8 * BLOCK // 4, ready)
    assert ready.wait(120)
    time.sleep(random.Random(seed).uniform(0, 0.5))
    process.kill()
    process.join(120)
    newest, invalid = checkpoint.scan(tmp_path)
    assert not invalid and newest is not None
    if newest != older:
        assert checkpoint.load(newest).tensors["model/w"].numel() == 16 * BLOCK // 4
    else:
        checkpoint.load(older)


def test_a_model_of_parts_is_a_first_point_and_is_exported(tmp_path: Path) -> None:
    from rayps.core.job.warm_start import StartFrom
    from rayps.runtime.results.saved_model import export_checkpoint
    from rayps.tensors.named_tensors import ModelNames, start_point

    model = nn.Linear(3, 2)
    layout = Layout.of(model.named_parameters())
    path = Path(write(tmp_path / "saved", layout, "adam", [4]))
    expected = checkpoint.load(path)
    start = start_point(StartFrom(str(path), strict=False), ModelNames.of(model))
    start.load_into(model)
    assert torch.equal(model.weight, expected.tensors["model/weight"])
    held = load_file(export_checkpoint(path, tmp_path / "out", None) / "model.safetensors")
    assert torch.equal(held["bias"], expected.tensors["model/bias"])
    assert checkpoint.keep(tmp_path / "saved", 3, "best") == tmp_path / "saved" / "best" / path.name
    same(checkpoint.load(tmp_path / "saved" / "best" / path.name), expected)


# ---------------------------------------------------------------------------------------------- memory

MEMORY = """
import resource, sys, torch
from rayps.tensors.checkpoints.checkpoint_parts import part_name, read_pieces, seal, write_part
folder, n = sys.argv[1], 50_000_000

def grown(work):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = work()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1000, found

small = write_part(folder, 1, "t", part_name(0, 1), {"model/w": torch.ones(3)}, offsets={"model/w": 0})
seal(folder, 1, "t", [small], meta={}, whole={"model/w": [3]})
read_pieces(f"{folder}/step-00000001", {"model/w": (0, 2)})
state = torch.ones(n)
written, facts = grown(lambda: write_part(folder, 2, "t", part_name(0, 1), {"model/w": state}, offsets={"model/w": 0}))
seal(folder, 2, "t", [facts], meta={}, whole={"model/w": [n]})
print(written)
"""
READ = """
import resource, sys
from rayps.tensors.checkpoints.checkpoint_parts import read_pieces
place, small = sys.argv[1], sys.argv[2]
read_pieces(small, {"model/w": (0, 2)})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert read_pieces(place, {"model/w": (20_000_000, 21_000_000)})["model/w"].sum() == 1_000_000
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1000)
"""


def test_writing_takes_no_second_copy_and_reading_takes_what_is_wanted(tmp_path: Path) -> None:
    """Of a tensor of 200 MB: the peak of the resident memory, in MB, in processes of their own."""

    def peak(code: str, *given: object) -> float:
        command = [sys.executable, "-c", code, *map(str, given)]
        ran = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300
        )
        assert ran.returncode == 0, ran.stderr
        return float(ran.stdout)

    assert peak(MEMORY, tmp_path) < 3 * BLOCK / 1e6
    newest, small = tmp_path / "step-00000002", tmp_path / "step-00000001"
    assert peak(READ, newest, small) < 4 + 3 * BLOCK / 1e6
    assert peak(READ, f"local://{newest}", f"local://{small}") < 4 + 4 * BLOCK / 1e6

"""Places of checkpoints: a real S3 server behind a proxy that cuts, other file systems, errors with the way out."""

from __future__ import annotations

import datetime
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import fsspec
import pytest
import s3fs
import torch
from process_cluster import start_process
from rayps_client.errors import CheckpointError, PlaceError
from s3_site import S3Site, empty_bucket, s3_site, wait_for

from rayps.tensors.checkpoints import checkpoint, checkpoint_place
from rayps.tensors.checkpoints.checkpoint import SavedState
from rayps.tensors.checkpoints.checkpoint_parts import (
    PartFacts,
    discard,
    make_token,
    part_name,
    read_contents,
    read_pieces,
    seal,
    verify_share,
    write_part,
)
from rayps.tensors.checkpoints.checkpoint_place import (
    BLOCK,
    CheckpointPlace,
    LocalFolder,
    Location,
    ObjectStore,
    abort_unfinished,
    unfinished,
)

ROOT = Path(__file__).resolve().parents[2]
SIZES = (2 * BLOCK // 4 + 100, 1000)  # elements of float32 of the two parts: two blocks and a rest, and less than one
N, ALL = SIZES[0], sum(SIZES)


@pytest.fixture(scope="module")
def server() -> Iterator[S3Site]:
    with s3_site() as site:
        yield site


@pytest.fixture
def site(server: S3Site, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Site]:
    with empty_bucket(server, monkeypatch) as found:
        yield found


def objects() -> list[str]:
    files, path = fsspec.core.url_to_fs("s3://bucket/run", use_listings_cache=False)
    return sorted(name.removeprefix(f"{path}/") for name in files.find(path))


def a_part(place: Location | CheckpointPlace, token: str, number: int, step: int = 1) -> PartFacts:
    first = number * N
    flat = torch.arange(first, first + SIZES[number], dtype=torch.float32)
    tensors = {"model/w": flat, f"rng/{number}": torch.tensor([number])}
    return write_part(place, step, token, part_name(number, 2), tensors, offsets={"model/w": first})


def parts(place: Location | CheckpointPlace, step: int = 1, keep: int = 2) -> Location:
    token = make_token()
    written = [a_part(place, token, number, step) for number in range(2)]
    meta = {"parameters": [], "step": step}
    return seal(place, step, token, written, meta=meta, whole={"model/w": [ALL]}, keep=keep)


def check(path: Location) -> None:
    state = checkpoint.load(path)
    assert torch.equal(state.tensors["model/w"], torch.arange(ALL, dtype=torch.float32))
    assert state.tensors.keys() == {"model/w", "rng/0", "rng/1"}


PLACES = ["s3://bucket/run", "memory://run", "local"]


def place_of(kind: str, tmp_path: Path) -> str:
    if kind == "memory://run":
        fsspec.filesystem("memory").store.clear()
    return f"local://{tmp_path}/run" if kind == "local" else kind  # a file system of fsspec that needs folders


@pytest.mark.parametrize("kind", PLACES)
def test_parts_in_a_place_are_read_as_local_ones(kind: str, site: S3Site, tmp_path: Path) -> None:
    place = place_of(kind, tmp_path)
    path = parts(place)
    assert path == f"{place}/step-00000001" and checkpoint.newest(place) == path
    check(path)
    assert checkpoint.meta_of(path)["step"] == 1 and read_contents(path)["model/w"] == {
        "shape": [ALL],
        "dtype": "float32",
    }
    whole = torch.arange(ALL, dtype=torch.float32)
    for lo, hi in ((0, 3), (N - 5, N + 5), (7, ALL - 1), (N, N)):
        assert torch.equal(read_pieces(path, {"model/w": (lo, hi)})["model/w"], whole[lo:hi])
    assert read_pieces(path, {"rng/1": None})["rng/1"].tolist() == [1]
    for rank in range(2):
        verify_share(path, rank, 2)
    for step in (2, 3):
        parts(place, step)
    assert CheckpointPlace.of(place).steps() == [3, 2]
    with pytest.raises(CheckpointError, match="several checkpoints: give one of them"):
        checkpoint.load(place)
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        checkpoint.load(f"{place}/step-00000077")


@pytest.mark.parametrize("kind", PLACES)
def test_a_whole_state_in_a_place(kind: str, site: S3Site, tmp_path: Path) -> None:
    place = place_of(kind, tmp_path)
    state = SavedState({"model/w": torch.rand(3, 5), "rng/0": torch.arange(4)}, {"parameters": [["w", [3, 5]]]})

    def write_tables(folder: Path) -> list[Path]:
        file = folder / "emb" / "rows-00000.parquet"
        file.parent.mkdir(parents=True)
        file.write_bytes(b"rows" * 1000)
        return [file]

    for step in (1, 2, 3):
        path = checkpoint.save(place, step, state, write_tables=write_tables)
    found = checkpoint.load(path)
    assert found.meta == state.meta and all(torch.equal(found.tensors[k], v) for k, v in state.tensors.items())
    with checkpoint.tables_of(path) as folder:
        assert (folder / "emb" / "rows-00000.parquet").read_bytes() == b"rows" * 1000
    assert CheckpointPlace.of(place).steps() == [3, 2]
    kept = checkpoint.keep(place, 3, "best")
    assert kept == f"{place}/best/step-00000003" == checkpoint.keep(place, 3, "best")
    checkpoint.save(place, 4, state)
    checkpoint.save(place, 5, state)
    assert checkpoint.keep(place, 3, "best") == kept  # it stays where the first one is removed
    assert torch.equal(checkpoint.load(kept).tensors["model/w"], state.tensors["model/w"])
    with checkpoint.tables_of(kept) as folder:
        assert (folder / "emb" / "rows-00000.parquet").exists()
    assert checkpoint.keep(place, 5, "best") == f"{place}/best/step-00000005"
    assert CheckpointPlace.of(f"{place}/best").steps() == [5] and CheckpointPlace.of(place).steps() == [5, 4]
    assert checkpoint.keep(place, 77, "best") is None
    other = checkpoint.keep(place, 77, "other", f"{place}/step-00000004")  # of the run that this one resumes
    assert other == f"{place}/other/step-00000077" == checkpoint.newest(f"{place}/other")


def test_a_newer_attempt_of_a_step_replaces_the_earlier_and_its_files(site: S3Site) -> None:
    parts("s3://bucket/run")
    token = make_token()
    a_part("s3://bucket/run", token, 1)  # an attempt that ends here
    assert len(objects()) == 4
    check("s3://bucket/run/step-00000001")  # the dead attempt has changed nothing
    check(parts("s3://bucket/run"))
    found = objects()
    assert len(found) == 3 and not any(token in name for name in found)
    # a later attempt's files stay until a checkpoint of its step or a later one is complete
    a_part("s3://bucket/run", token, 1, step=9)
    parts("s3://bucket/run", 2)
    assert [name for name in objects() if "step-00000009" in name] and CheckpointPlace.of(
        "s3://bucket/run"
    ).steps() == [2, 1]
    discard("s3://bucket/run", 9, token)
    assert not [name for name in objects() if "step-00000009" in name]


def test_many_small_tensors_are_read_in_few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.filesystem("memory").store.clear()
    tensors = {f"model/{i:03d}": torch.full((40,), float(i)) for i in range(300)}
    path = checkpoint.save("memory://run", 1, SavedState(tensors, {"parameters": []}))
    asked: list[str] = []
    files = type(fsspec.filesystem("memory"))
    read = files.cat_file
    monkeypatch.setattr(files, "cat_file", lambda self, name, **given: asked.append(name) or read(self, name, **given))
    found = checkpoint.load(path).tensors
    assert found.keys() == tensors.keys() and all(torch.equal(found[key], value) for key, value in tensors.items())
    assert len(asked) == 4  # the manifest, the header's length, the header, all tensors
    asked.clear()
    pieces = read_pieces(path, {key: (10, 30) if int(key[-3:]) % 50 == 7 else (0, 40) for key in tensors})
    assert all((pieces[key] == value[0]).all() for key, value in tensors.items())
    assert len(asked) == 3 + 1 + 6 * 2  # a tensor of which a part is wanted ends a read, and is one of its own


# ---------------------------------------------------------------------------------------------- faults of the network


def test_a_connection_that_is_cut_once_is_survived(site: S3Site) -> None:
    site.proxy.cut_up, site.proxy.times = BLOCK // 2, 1
    path = parts("s3://bucket/run")
    assert site.proxy.cuts == 1
    site.proxy.pass_on()
    site.proxy.cut_down, site.proxy.times = BLOCK // 2, 1
    check(path)
    assert site.proxy.cuts == 1


def test_a_write_that_is_cut_in_the_middle_of_a_part_fails_and_leaves_nothing(site: S3Site) -> None:
    place, token = "s3://bucket/run", make_token()
    older = parts(place)
    before = objects()
    site.proxy.cut_up = BLOCK // 2
    with pytest.raises(
        PlaceError, match=rf"cannot write part-00001-of-00002-{token}.safetensors in {place}/step"
    ) as caught:
        a_part(place, token, 0, step=2)
    assert site.proxy.cuts > 1 and "AWS_ENDPOINT_URL" in caught.value.message
    assert caught.value.message.count("\n") == 1 and "uploadId" not in caught.value.message
    assert caught.value.data["place"] == f"{place}/step-00000002"
    assert unfinished(CheckpointPlace.of(place)) == [] and objects() == before and checkpoint.newest(place) == older
    # the whole state of one process: the same
    with pytest.raises(PlaceError, match="cannot write state-"):
        checkpoint.save(place, 2, SavedState({"model/w": torch.zeros(N)}, {"parameters": []}))
    assert unfinished(CheckpointPlace.of(place)) == [] and objects() == before
    site.proxy.pass_on()
    check(parts(place, 2))


def test_a_read_that_is_cut_names_the_place(site: S3Site) -> None:
    path = parts("s3://bucket/run")
    site.proxy.cut_down = BLOCK // 2
    for read in (checkpoint.load, lambda path: read_pieces(path, {"model/w": (0, N)}), checkpoint.verify):
        with pytest.raises(PlaceError, match=rf"cannot read part-.* in {path}"):
            read(path)
    # a place that cannot be read does not make an older checkpoint the newest
    with pytest.raises(PlaceError, match="cannot read"):
        checkpoint.newest("s3://bucket/run")
    site.proxy.pass_on()
    check(path)


def test_a_stalled_connection_meets_the_deadline(site: S3Site) -> None:
    place = CheckpointPlace.of("s3://bucket/run", seconds=3)
    older = parts(place)
    site.proxy.stall_up = BLOCK // 2
    with pytest.raises(PlaceError, match=r"did not answer for 3 s: cannot write part-00001") as caught:
        a_part(place, make_token(), 0, step=2)
    assert caught.value.data["seconds"] == 3 and site.proxy.reached.is_set()
    site.proxy.pass_on()
    assert checkpoint.newest("s3://bucket/run") == older
    wait_for(lambda: unfinished(place) == [], "the abort of the upload")
    check(parts(place, 2))


KILLED = {  # where it is killed: (whether the checkpoint is there then, the number of its unfinished uploads)
    "part not begun=1": (False, 0),
    "a block written=1": (False, 0),
    "a block written=3": (False, 1),
    "part written, not reported=1": (False, 0),
    "part written, not reported=2": (False, 0),
    "complete, old ones not removed=1": (True, 0),
    "old manifest removed, files not=1": (True, 0),
}


def child(fail: str) -> BaseProcess:
    return start_process(parts, "s3://bucket/run", 2, 1, failpoints=fail)


def exit_code(process: BaseProcess) -> int | None:
    process.join(120)
    return process.exitcode


@pytest.mark.parametrize("where", KILLED)
def test_a_writer_killed_anywhere_leaves_a_whole_checkpoint_or_none(where: str, site: S3Site) -> None:
    older = parts("s3://bucket/run")
    place = CheckpointPlace.of("s3://bucket/run")
    assert exit_code(child(f"checkpoint: {where}")) == -signal.SIGKILL
    there, cut = KILLED[where]
    newest, invalid = checkpoint.scan("s3://bucket/run")
    assert not invalid and newest == ("s3://bucket/run/step-00000002" if there else older)
    check(newest)
    assert len(unfinished(place)) == cut
    check(parts(place, 2, keep=1))  # the next attempt succeeds, and removes what the dead one has left
    assert len(objects()) == 3 and place.steps() == [2]


def test_the_upload_of_a_killed_process_is_listed_and_aborted_when_it_is_old(site: S3Site) -> None:
    place = CheckpointPlace.of("s3://bucket/run")
    assert exit_code(child("checkpoint: a block written=3")) == -signal.SIGKILL
    parts("s3://bucket/other")  # uploads of another prefix are not this job's
    (upload,) = unfinished(place)
    assert upload.url.startswith("s3://bucket/run/step-00000002/part-00001-of-00002-") and objects() == []
    assert unfinished(CheckpointPlace.of("s3://bucket/other")) == []
    soon = upload.begun + datetime.timedelta(seconds=3599)  # moto states another time of the begin than the clock's
    assert abort_unfinished(place, older=3600, now=soon) == [] and unfinished(place) == [upload]
    later = upload.begun + datetime.timedelta(seconds=3601)
    assert abort_unfinished(place, older=3600, now=later) == [upload] and unfinished(place) == []
    place.abort(upload)  # type: ignore[attr-defined]  # it has ended: nothing happens


def test_a_writer_killed_while_its_connection_stalls_in_a_part(site: S3Site) -> None:
    older = parts("s3://bucket/run")
    site.proxy.stall_up = BLOCK // 2
    process = child("")
    assert site.proxy.reached.wait(120)
    process.kill()
    process.join(60)
    site.proxy.pass_on()
    assert checkpoint.scan("s3://bucket/run") == (older, {})
    place = CheckpointPlace.of("s3://bucket/run")
    wait_for(lambda: len(unfinished(place)) == 1, "the cut upload in the list")
    assert len(abort_unfinished(place, older=-3600)) == 1
    check(parts(place, 2))


# ---------------------------------------------------------------------------------------------- errors


def test_errors_name_the_way_out(site: S3Site, monkeypatch: pytest.MonkeyPatch) -> None:
    state = SavedState({"model/w": torch.ones(2)}, {"parameters": []})
    with pytest.raises(PlaceError, match="bucket does not exist\nthe bucket or folder is not there: create it"):
        checkpoint.save("s3://nowhere/run", 1, state)
    with pytest.raises(PlaceError, match="create it"):
        ObjectStore("s3://nowhere/run").probe()
    with pytest.raises(PlaceError, match="create it"):
        unfinished(CheckpointPlace.of("s3://nowhere/run"))
    ObjectStore("s3://bucket/run").probe()
    assert objects() == []
    with monkeypatch.context() as patched:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patched.delenv(name)
        patched.setenv("HOME", "/nonexistent")
        s3fs.S3FileSystem.clear_instance_cache()
        with pytest.raises(PlaceError, match="credentials\nset AWS_ACCESS_KEY_ID"):
            checkpoint.save("s3://bucket/run", 1, state)
    with monkeypatch.context() as patched:
        patched.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        s3fs.S3FileSystem.clear_instance_cache()
        with pytest.raises(PlaceError, match=r"did not answer|check the network and the endpoint .AWS_ENDPOINT_URL"):
            checkpoint.save(CheckpointPlace.of("s3://bucket/run", seconds=5), 1, state)
    with pytest.raises(CheckpointError, match="Protocol not known: nope\ngive a folder, or a URL"):
        checkpoint.save("nope://x/run", 1, state)


def test_a_missing_s3fs_names_the_extra() -> None:
    code = """
import sys
sys.modules["s3fs"] = None
from rayps.tensors.checkpoints import checkpoint
checkpoint.newest("s3://bucket/run")
"""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert 's3://bucket/run needs a package that is not installed here: pip install "rayps[s3]"' in ran.stderr


def test_an_access_that_is_refused_names_the_credentials() -> None:
    """What s3fs raises for the answer 403: moto's server allows everything."""
    error = ObjectStore("s3://bucket/run")
    with pytest.raises(PlaceError, match="Access Denied\nset AWS_ACCESS_KEY_ID"):
        error._ask("write x", lambda: (_ for _ in ()).throw(PermissionError("Access Denied")))


def test_large_files_have_at_most_as_many_blocks_as_a_multipart_upload_may_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []
    files = fsspec.filesystem("memory")
    opened = files.open

    def open_file(path: str, mode: str, block_size: int) -> object:
        sizes.append(block_size)
        return opened(path, mode, block_size=block_size)

    monkeypatch.setattr(type(files), "open", lambda self, *args, **kwargs: open_file(*args, **kwargs))
    for size in (1, 10**9, 10**12):
        with ObjectStore("memory://run").writer("x", size) as sink:
            sink.write(memoryview(b"x"))
    assert sizes[:2] == [BLOCK, BLOCK] and sizes[2] > BLOCK
    assert all(-(-size // block) < 10_000 for size, block in zip((1, 10**9, 10**12), sizes, strict=True))


def test_a_failed_write_leaves_no_file_where_there_are_no_uploads() -> None:
    fsspec.filesystem("memory").store.clear()
    place = ObjectStore("memory://run")
    with pytest.raises(ValueError, match="mine"), place.writer("x", 3) as sink:
        sink.write(memoryview(b"abc"))
        raise ValueError("mine")
    assert fsspec.filesystem("memory").find("/run") == []


def test_what_is_a_url() -> None:
    for text, url in (
        ("s3://bucket/run", True),
        ("memory://run", True),
        ("hdfs://host:9000/run", True),
        ("/tmp/run", False),
        ("run", False),
        ("C:\\run", False),
        ("step-00000001", False),
    ):
        assert checkpoint_place.is_url(text) is url, text
        assert isinstance(CheckpointPlace.of(text), ObjectStore if url else LocalFolder)
    assert not checkpoint_place.is_url(Path("s3://bucket"))
    started = time.monotonic()
    assert CheckpointPlace.of("s3://bucket/run/") == ObjectStore("s3://bucket/run")
    assert time.monotonic() >= started

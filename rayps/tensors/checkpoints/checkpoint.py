"""A run's state on disk: tensors as safetensors and JSON data, never pickle. This module does not interpret the names.

    step-00000171/
        model.safetensors  optim.safetensors ...   one file for each prefix of the tensors' names
        tables/NAME/rows-00000.parquet ...         sparse tables, if any: see `rayps.ps.tables.parquet`
        manifest.json                              written last: sizes, SHA-256, shapes, dtypes, meta, its own hash

A checkpoint is in a local folder, or in a place behind a URL of fsspec. `rayps.tensors.checkpoints.checkpoint_place`
says how it becomes complete. In a remote place one file has all tensors. `rayps.tensors.checkpoints.checkpoint_parts`
writes checkpoints of several processes. All of them are read here.

Parameters, optimizer moments, rows of tables and the strategies' own tensors are finite in every checkpoint. The
manifest's entry "finite" states that they were checked before the checkpoint was written. Buffers may hold infinities.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import overload

import safetensors.torch
import torch
from rayps_client.errors import CheckpointError, PlaceError, TrainingError
from rayps_client.values import Json

from rayps.core.failpoint import passing
from rayps.core.urls import Location
from rayps.tensors.checkpoints import checkpoint_manifest, tensor_file
from rayps.tensors.checkpoints.checkpoint_manifest import (
    FORMAT,
    TABLES,
    VERSION,
    FileFacts,
    Manifest,
    Meta,
    check_size,
    describe_tensors,
    digest_of,
    encode_manifest,
    explain_torn,
    explain_unread,
    explain_unwritten,
    files_of,
    manifest_of,
    shapes_of,
    verify_file,
)
from rayps.tensors.checkpoints.checkpoint_place import (
    BLOCK,
    MANIFEST,
    CheckpointPlace,
    LocalFolder,
    ObjectStore,
    name_of,
    step_of,
    sync,
)
from rayps.tensors.checkpoints.tensor_file import FilePlan, StoredRange
from rayps.tensors.finite import Fault, fault_in

__all__ = ["MANIFEST", "TABLES", "Meta", "SavedState"]

FROZEN = "frozen"  # prefix of parameters that the run never changes, and the name of their hash in `meta`

_log = logging.getLogger(__name__)
_PREFIX = re.compile(r"[A-Za-z0-9_]+")
_WHOLE_STATE = "state.safetensors"  # the file of all tensors in a remote place


@dataclass(slots=True)
class SavedState:
    """A job's state: tensors by name ("model/0.weight", "optim/0.weight/exp_avg", "rng/0"), and JSON data."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    meta: Meta = field(default_factory=dict)


# ---------------------------------------------------------------------------------------------- write


@overload
def save(
    folder: Path,
    step: int,
    state: SavedState,
    keep: int = 2,
    *,
    write_tables: Callable[[Path], list[Path]] | None = None,
) -> Path: ...


@overload
def save(
    folder: Location | CheckpointPlace,
    step: int,
    state: SavedState,
    keep: int = 2,
    *,
    write_tables: Callable[[Path], list[Path]] | None = None,
) -> Location: ...


def save(
    folder: Location | CheckpointPlace,
    step: int,
    state: SavedState,
    keep: int = 2,
    *,
    write_tables: Callable[[Path], list[Path]] | None = None,
) -> Location:
    """Write a checkpoint of `step`, then remove all but the newest `keep` checkpoints. Return its path or URL.

    Only one process may write to `folder`, a folder or a URL. After an error or a crash, the earlier checkpoints are
    unchanged. Checkpoints of later steps are removed, because they exist only if the run was restored to an earlier
    step. `write_tables` is called with the path of a folder `tables`. It writes files into this folder and returns
    their paths; the manifest contains their hashes.

    Raises:
        CheckpointError: the checkpoint cannot be written.
        PlaceError: the disk is full, or the remote place cannot be reached or refuses.
        TrainingError: the state is not finite. Nothing is written.
    """
    place, token = CheckpointPlace.of(folder), uuid.uuid4().hex
    must_be_finite(state, f"in the state of round {step}")
    final = place.at(name_of(step))
    try:
        manifest = _write(place, step, token, state, write_tables)
        passing("checkpoint: files written, no manifest")
        place.publish(step, token, encode_manifest(manifest))
    except (OSError, safetensors.SafetensorError) as error:
        place.discard(step, token)
        raise explain_unwritten(error, str(final)) from error
    except BaseException:
        place.discard(step, token)
        raise
    passing("checkpoint: complete, old ones not removed")
    prune(place, step, keep, manifest, drafts_upto=None)
    return final.location


def _write(
    place: CheckpointPlace, step: int, token: str, state: SavedState, write_tables: Callable[[Path], list[Path]] | None
) -> Manifest:
    """Write all files of a checkpoint but its manifest. Return the manifest."""
    body: Manifest = {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "files": {},
        "meta": state.meta,
        "beside": {},
        "finite": True,
    }
    encode_manifest(body)  # so that `meta` that is no JSON data is found before anything is written
    for prefix in {key.partition("/")[0]: key for key in state.tensors}.items():
        _check_prefix(*prefix)
    if isinstance(place, LocalFolder):
        draft = place.draft(step, token).path
        draft.mkdir(parents=True)
        body["files"] = _write_by_prefix(draft, state, [place.path / name_of(other) for other in place.steps()])
        for path in write_tables(draft / TABLES) if write_tables is not None else []:
            sync(path)
            name = str(path.relative_to(draft))
            body["beside"][name] = {"size": path.stat().st_size, "sha256": digest_of(LocalFolder(draft), name)}
        return body
    name = place.stored_name(_WHOLE_STATE, token)
    plan = FilePlan.of(state.tensors)
    draft_place = place.draft(step, token)
    with draft_place.writer(name, plan.size) as sink:
        digest = plan.write(sink)
    body["files"] = {name: {"size": plan.size, "sha256": digest, "tensors": describe_tensors(state.tensors)}}
    if write_tables is not None:
        body["beside"] = _send_tables(draft_place, token, write_tables)
    return {**body, "whole": {}, "token": token}


def _send_tables(
    draft: CheckpointPlace, token: str, write_tables: Callable[[Path], list[Path]]
) -> dict[str, FileFacts]:
    """Write the files of tables into a scratch folder, and send them. Return their facts by name."""
    sent: dict[str, FileFacts] = {}
    with tempfile.TemporaryDirectory(prefix="rayps-tables-") as scratch:
        home = Path(scratch)
        local = LocalFolder(home)
        for path in write_tables(home / TABLES):
            own = str(path.relative_to(home))
            name, size = draft.stored_name(own, token), local.size(own)
            with draft.writer(name, size) as sink, path.open("rb") as file:
                while block := file.read(BLOCK):
                    sink.write(memoryview(block))
            sent[name] = {"size": size, "sha256": digest_of(local, own)}
    return sent


def _write_by_prefix(draft: Path, state: SavedState, earlier: list[Path]) -> dict[str, FileFacts]:
    """Write one file for each prefix of the tensors' names. Return the files' facts by name."""
    files: dict[str, FileFacts] = {}
    for prefix, tensors in sorted(_group_by_prefix(state.tensors).items()):
        path = draft / f"{prefix}.safetensors"
        linked = _link_earlier(path, state, earlier) if prefix == FROZEN else None
        if linked is not None:
            files[path.name] = linked
            continue
        plain = _copy_to_cpu(tensors)
        safetensors.torch.save_file(plain, path)
        sync(path)
        digest = digest_of(LocalFolder(draft), path.name)
        files[path.name] = {"size": path.stat().st_size, "sha256": digest, "tensors": describe_tensors(plain)}
    return files


def _link_earlier(path: Path, state: SavedState, earlier: list[Path]) -> FileFacts | None:
    """Link `path` to the file of an earlier checkpoint with the same frozen parameters. Return None if there is none.

    Both checkpoints are whole: a file exists as long as one of its links does.
    """
    for other in earlier:
        try:
            manifest = manifest_of(LocalFolder(other))
            if manifest["meta"].get(FROZEN) == state.meta.get(FROZEN) and path.name in manifest["files"]:
                os.link(other / path.name, path)
                return manifest["files"][path.name]
        except (CheckpointError, OSError):
            continue
    return None


def _check_prefix(prefix: str, key: str) -> None:
    if not _PREFIX.fullmatch(prefix):
        raise CheckpointError(
            f"the name of tensor {key!r} has no prefix for its file: name it as in 'model/0.weight'", key=key
        )


def _group_by_prefix(tensors: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    groups: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in tensors.items():
        groups.setdefault(key.partition("/")[0], {})[key] = value
    return groups


def _copy_to_cpu(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors on the CPU, each in separate memory, because safetensors refuses views of one vector."""
    seen: set[int] = set()
    plain: dict[str, torch.Tensor] = {}
    for key, value in tensors.items():
        value = value.detach().cpu().contiguous()
        place = value.untyped_storage().data_ptr()
        if place in seen or value.untyped_storage().nbytes() != value.nbytes:
            value = value.clone()
        seen.add(place)
        plain[key] = value
    return plain


def prune(place: CheckpointPlace, step: int, keep: int, manifest: Manifest, *, drafts_upto: int | None) -> None:
    """Remove checkpoints of later steps than `step`, and all but the newest `keep` others.

    Files of incomplete checkpoints are removed too, of steps up to `drafts_upto`, or all if it is None. `manifest` is
    that of the checkpoint of `step`. If something cannot be removed, a warning is logged.
    """
    try:
        present = place.steps()
    except (OSError, PlaceError) as error:
        _log.warning("old checkpoints in %s cannot be removed: %s", place, error)
        return
    own = [other for other in present if other <= step]
    for old in [*own[max(keep, 1) :], *(other for other in present if other > step)]:
        try:
            place.delete(old)
        except (OSError, PlaceError) as error:
            _log.warning("the old checkpoint %s cannot be removed: %s", place.at(name_of(old)), error)
    try:
        place.delete_drafts(drafts_upto, (step, [name for name, _ in files_of(manifest)]))
    except (OSError, PlaceError) as error:
        _log.warning("files of incomplete checkpoints in %s cannot be removed: %s", place, error)


@overload
def keep(folder: Path, step: int, name: str, other: Path | None = None) -> Path | None: ...


@overload
def keep(folder: Location, step: int, name: str, other: Location | None = None) -> Location | None: ...


def keep(folder: Location, step: int, name: str, other: Location | None = None) -> Location | None:
    """Keep the checkpoint of `step` in the subfolder `name`, in place of other checkpoints there. Return its path.

    Its files are linked, or copied where links are not possible, so that it stays when `save` removes old checkpoints.
    In a remote place the store copies them. If `folder` has no checkpoint of this step, the one at `other` is taken.
    Return None if there is none.

    Raises:
        CheckpointError: the checkpoint cannot be linked or copied.
        PlaceError: the place cannot be reached, or refuses.
    """
    place = CheckpointPlace.of(folder)
    if isinstance(place, ObjectStore):
        return _keep_copy(place, step, name, None if other is None else CheckpointPlace.of(other))
    assert isinstance(place, LocalFolder)
    return _keep_links(place.path, step, name, None if other is None else Path(other))


def _keep_links(folder: Path, step: int, name: str, other: Path | None) -> Path | None:
    final = folder / name / name_of(step)
    mine = folder / final.name
    if final.is_dir() and (not mine.is_dir() or (mine / MANIFEST).read_bytes() == (final / MANIFEST).read_bytes()):
        return final
    source = next((path for path in (mine, other) if path is not None and path.is_dir()), None)
    if source is None:
        return None
    draft = folder / name / f"{final.name}.tmp-{uuid.uuid4().hex}"
    try:
        shutil.copytree(source, draft, copy_function=_link)
        if final.exists():
            final.rename(draft.with_name(f"{final.name}.tmp-{uuid.uuid4().hex}"))
        draft.rename(final)
        sync(final.parent)
    except (OSError, shutil.Error) as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise CheckpointError(f"cannot keep the checkpoint {source} as {final}: {error}", path=str(final)) from error
    others = [folder / name / name_of(each) for each in LocalFolder(folder / name).steps() if each != step]
    for path in [*(folder / name).glob("step-*.tmp-*"), *others]:
        shutil.rmtree(path, ignore_errors=True)
    return final


def _keep_copy(place: ObjectStore, step: int, name: str, other: CheckpointPlace | None) -> str | None:
    into = place.at(name)
    mine, final = place.at(name_of(step)), into.at(name_of(step))
    held, kept = _read_manifest_bytes(mine), _read_manifest_bytes(final)
    if kept is not None and held in (None, kept):
        return final.location
    source: CheckpointPlace | None = mine if held is not None else other
    text = held if held is not None else None if other is None else _read_manifest_bytes(other)
    if text is None or not isinstance(source, ObjectStore):
        return None
    manifest = manifest_of(source)
    try:
        for file, _ in files_of(manifest):
            source.copy(file, final, file)
    except FileNotFoundError as error:
        raise CheckpointError(f"cannot keep the checkpoint {source} as {final}: {error}", path=str(final)) from error
    into.publish(step, manifest.get("token", ""), text)
    for each in into.steps():
        if each != step:
            into.delete(each)
    into.delete_drafts(None, (step, [file for file, _ in files_of(manifest)]))
    return final.location


def _read_manifest_bytes(place: CheckpointPlace) -> bytes | None:
    try:
        return place.read(MANIFEST)
    except FileNotFoundError:
        return None


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)
    return target


# ---------------------------------------------------------------------------------------------- read


def load(path: Location | CheckpointPlace) -> SavedState:
    """Verify the hashes of one checkpoint, whole or in parts, at a path or URL. Return its state.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, changed, of a newer format, or not one of rayps. If the
            same folder has a valid earlier checkpoint, the error names the newest one.
        PlaceError: the remote place cannot be reached, or refuses.
    """
    place = CheckpointPlace.of(path)
    try:
        manifest = manifest_of(place)
        for name, facts in manifest.get("beside", {}).items():
            verify_file(place, name, facts)
        state = _read_state(place, manifest)
    except CheckpointError as error:
        earlier = _find_valid_before(place) if "reason" in error.data else None
        if earlier is None:
            raise
        first = error.message.splitlines()[0]
        raise CheckpointError(f"{first}\nan earlier checkpoint is valid: {earlier}", **error.data) from error
    return state


def meta_of(path: Location | CheckpointPlace) -> Meta:
    """Return the JSON data of one checkpoint, whose tensors are not read.

    Raises:
        CheckpointError: the checkpoint is missing, its manifest is damaged, or it is not one of rayps.
        PlaceError: the remote place cannot be reached, or refuses.
    """
    return manifest_of(CheckpointPlace.of(path))["meta"]


def _find_valid_before(place: CheckpointPlace) -> CheckpointPlace | None:
    """Return the newest valid checkpoint of an earlier step in the same folder, or None if there is none."""
    step = step_of(place.name)
    for other in place.parent.steps() if step is not None else []:
        if step is not None and other < step:
            with contextlib.suppress(CheckpointError):
                verify(place.parent.at(name_of(other)))
                return place.parent.at(name_of(other))
    return None


def _read_state(place: CheckpointPlace, manifest: Manifest) -> SavedState:
    """Read all tensors, and compare the files' hashes with the manifest."""
    problem = checkpoint_manifest.find_uncovered(manifest["files"], manifest.get("whole", {}))
    if problem is not None:
        raise explain_torn(place, problem)
    shapes, whole = shapes_of(manifest), manifest.get("whole", {})
    flat: dict[str, torch.Tensor] = {}
    for name, facts in manifest["files"].items():
        offsets = facts.get("offsets", {})

        def target(
            key: str, stored: StoredRange, facts: FileFacts = facts, offsets: dict[str, int] = offsets
        ) -> torch.Tensor:
            size = math.prod(stored.shape)
            if key not in whole:
                flat[key] = torch.empty(size, dtype=stored.dtype)
                return flat[key]
            if describe_tensors({key: stored}) != {key: facts["tensors"].get(key)}:
                raise tensor_file.TensorFileError(f"{key!r} is not as the manifest states")
            if key not in flat:
                flat[key] = torch.empty(math.prod(whole[key]), dtype=stored.dtype)
            return flat[key][offsets[key] : offsets[key] + size]

        try:
            check_size(place, name, facts)
            found, digest = tensor_file.read_all(place, name, target)
        except (OSError, EOFError, tensor_file.TensorFileError) as error:
            raise explain_unread(place, name, error) from error
        if digest != facts["sha256"]:
            raise explain_torn(place, f"{name} was changed after it was written (SHA-256)")
        if describe_tensors(found) != facts["tensors"]:
            raise explain_torn(place, f"{name} does not contain the tensors that the manifest names")
    return SavedState({key: value.view(shapes[key]["shape"]) for key, value in flat.items()}, manifest["meta"])


def verify(path: Location | CheckpointPlace) -> None:
    """Read all bytes of a checkpoint and compare their hashes with its manifest.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, changed, of a newer format, not finite, or not one of
            rayps.
        PlaceError: the remote place cannot be reached, or refuses.
    """
    place = CheckpointPlace.of(path)
    manifest = manifest_of(place)
    for name, facts in files_of(manifest):
        verify_file(place, name, facts)


@contextlib.contextmanager
def tables_of(path: Location) -> Iterator[Path]:
    """Yield a local folder with the files of a checkpoint's tables: its own, or a copy of that of a remote checkpoint.

    Raises:
        CheckpointError: the checkpoint is missing, or a file is damaged.
        PlaceError: the remote place cannot be reached, or refuses.
    """
    place = CheckpointPlace.of(path)
    if isinstance(place, LocalFolder):
        yield place.path / TABLES
        return
    with tempfile.TemporaryDirectory(prefix="rayps-tables-") as scratch:
        manifest = manifest_of(place)
        for name, facts in manifest.get("beside", {}).items():
            own = Path(scratch) / name.replace(f"-{manifest.get('token', '')}.", ".")
            own.parent.mkdir(parents=True, exist_ok=True)
            try:
                check_size(place, name, facts)
                own.write_bytes(place.read(name))
            except OSError as error:
                raise explain_unread(place, name, error) from error
            verify_file(LocalFolder(Path(scratch)), str(own.relative_to(scratch)), facts)
        yield Path(scratch) / TABLES


def fault_of(state: SavedState) -> Fault | None:
    """Return the first parameter, moment or strategy tensor of a state that is not finite, or None."""
    return fault_in(state.tensors, state.meta.get("parameters", ()))


def must_be_finite(state: SavedState, when: str, **data: Json) -> None:
    """Check that a state is finite. `when` ends the message, e.g. "after round 7".

    Raises:
        TrainingError: the state is not finite. The error's data have `parameter`, and `rank` if the value is in the
            state of one worker.
    """
    fault = fault_of(state)
    if fault is None:
        return
    data |= {"parameter": fault.parameter} | ({} if fault.rank is None else {"rank": fault.rank})
    raise TrainingError(
        f"{fault.where} is not finite (NaN or infinite) {when}:\nlower the learning rate, clip the gradient "
        "(clip_norm), or look for bad values in the data",
        **data,
    )


@overload
def newest(folder: Path) -> Path | None: ...


@overload
def newest(folder: Location) -> Location | None: ...


def newest(folder: Location) -> Location | None:
    """Return the newest complete and finite checkpoint in a folder or place, or None if there is none.

    For each newer checkpoint that is skipped, a warning is logged.

    Raises:
        PlaceError: the remote place cannot be reached, or refuses.
    """
    found, invalid = scan(folder)
    for path, reason in invalid.items():
        _log.warning("skipped the checkpoint %s: %s", path, reason)
    return found


@overload
def usable(folder: Path) -> tuple[Path | None, list[str]]: ...


@overload
def usable(folder: Location) -> tuple[Location | None, list[str]]: ...


def usable(folder: Location) -> tuple[Location | None, list[str]]:
    """Return the newest complete and finite checkpoint, and a warning for each newer one that was skipped.

    Raises:
        PlaceError: the remote place cannot be reached, or refuses.
    """
    found, invalid = scan(folder)
    return found, _warn_of_skipped(invalid)


def _warn_of_skipped(invalid: dict[Location, str]) -> list[str]:
    return [f"skipped the checkpoint {path}: {reason}" for path, reason in invalid.items()]


def usable_at(path: Location) -> tuple[Location, list[str]]:
    """Return the checkpoint at a path or URL, or the newest usable one before it in the same folder if it is damaged.

    There is a warning for each checkpoint that was skipped. If no earlier one can be used, or there is no checkpoint at
    the path, return the path itself: `load` then raises the error.

    Raises:
        PlaceError: the remote place cannot be reached, or refuses.
    """
    place = CheckpointPlace.of(path)
    step = step_of(place.name)
    if step is None or not place.is_there():
        return path, []
    try:
        verify(place)
    except PlaceError:
        raise
    except CheckpointError as error:
        found, invalid = scan(place.parent.location, step - 1)
        reason = str(error.data.get("reason", error.message))
        return (path, []) if found is None else (found, _warn_of_skipped({place.location: reason} | invalid))
    return path, []


def scan(folder: Location, last: int | None = None) -> tuple[Location | None, dict[Location, str]]:
    """Return the newest complete and finite checkpoint (or None), and why each newer one cannot be used.

    With `last`, checkpoints of later steps than this do not count.

    Raises:
        PlaceError: the remote place cannot be reached, or refuses. It is not known then which checkpoint is the newest.
    """
    place = CheckpointPlace.of(folder)
    invalid: dict[Location, str] = {}
    for step in place.steps():
        if last is not None and step > last:
            continue
        path = place.at(name_of(step))
        try:
            verify(path)
        except PlaceError:
            raise
        except CheckpointError as error:
            invalid[path.location] = str(error.data.get("reason", error.message))
        else:
            return path.location, invalid
    return None, invalid

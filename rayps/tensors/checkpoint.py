"""A run's state on disk: tensors as safetensors and JSON data, never pickle. This module does not interpret the names.

    step-00000171/
        model.safetensors  optim.safetensors ...   one file for each prefix of the tensors' names
        tables/NAME/rows-00000.parquet ...         sparse tables, if any: see `rayps.ps.tables.parquet`
        manifest.json                              written last: sizes, SHA-256, shapes, dtypes, meta, its own hash

A checkpoint is written under a temporary name with ".tmp-" and then renamed. A folder without ".tmp-" is complete.

Parameters, optimizer moments, rows of tables and the strategies' own tensors are finite in every checkpoint. The
manifest's entry "finite" states that they were checked before the checkpoint was written. If an older version wrote the
checkpoint, the entry is missing, and the tensors are checked when the checkpoint is read. Buffers may hold infinities.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NotRequired, TypeAlias, TypedDict, TypeGuard

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.torch
import torch
from safetensors import SafetensorError

from rayps.core.errors import CheckpointError, TrainingError
from rayps.core.values import Json, JsonObject
from rayps.tensors.finite import Fault, fault_in

FORMAT = "rayps-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
Meta: TypeAlias = dict[str, Any]  # JSON data of a checkpoint: each entry is read by the module that wrote it
TABLES = "tables"
FROZEN = "frozen"  # prefix of parameters that the run never changes, and the name of their hash in `meta`

_log = logging.getLogger(__name__)
_STEP = re.compile(r"step-(\d{8,})")
_PREFIX = re.compile(r"[A-Za-z0-9_]+")
_FILE = re.compile(r"[A-Za-z0-9_]+\.safetensors")
_TABLE_FILE = re.compile(rf"{TABLES}/[A-Za-z0-9_][A-Za-z0-9_.-]*/[A-Za-z0-9_-]+\.parquet")


@dataclass(slots=True)
class SavedState:
    """A job's state: tensors by name ("model/0.weight", "optim/0.weight/exp_avg", "rng/0"), and JSON data."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    meta: Meta = field(default_factory=dict)


class _TensorFacts(TypedDict):
    shape: list[int]
    dtype: str


class _FileFacts(TypedDict):
    """A manifest's entry for one file; only safetensors files have `tensors`."""

    size: int
    sha256: str
    tensors: NotRequired[dict[str, _TensorFacts]]


class _Manifest(TypedDict):
    format: str
    version: int
    step: int
    files: dict[str, _FileFacts]
    meta: Meta
    beside: NotRequired[dict[str, _FileFacts]]  # the files of tables; since version 0.1
    finite: NotRequired[bool]  # whether the tensors were found finite before they were written


# ---------------------------------------------------------------------------------------------- write


def save(
    folder: str | Path,
    step: int,
    state: SavedState,
    keep: int = 2,
    *,
    write_tables: Callable[[Path], list[Path]] | None = None,
) -> Path:
    """Write a checkpoint of `step`, then remove all but the newest `keep` checkpoints. Return the checkpoint's path.

    Only one process may write to `folder`. After an error or a crash, the earlier checkpoints are unchanged.
    Checkpoints of later steps are removed, because they exist only if the run was restored to an earlier step.
    `write_tables` is called with the path of the folder `tables`. It writes files into this folder and returns their
    paths; the manifest contains their hashes.

    Raises:
        CheckpointError: the checkpoint cannot be written, e.g. because the disk is full.
        TrainingError: the state is not finite. Nothing is written.
    """
    folder = Path(folder)
    must_be_finite(state, f"in the state of round {step}")
    final = folder / f"step-{step:08d}"
    draft = folder / f"{final.name}.tmp-{uuid.uuid4().hex}"
    try:
        draft.mkdir(parents=True)
        _write(draft, step, state, write_tables(draft / TABLES) if write_tables is not None else [], _steps(folder))
        if final.exists():
            final.rename(folder / f"{final.name}.tmp-{uuid.uuid4().hex}")
        draft.rename(final)
        _sync(folder)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise CheckpointError(
            f"cannot write the checkpoint {final}: {error.strerror or error}", path=str(final)
        ) from error
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    _prune(folder, step, keep)
    return final


def _write(draft: Path, step: int, state: SavedState, table_files: list[Path], earlier: list[Path]) -> None:
    files: dict[str, _FileFacts] = {}
    for prefix, tensors in sorted(_by_prefix(state.tensors).items()):
        path = draft / f"{prefix}.safetensors"
        linked = _linked(path, state, earlier) if prefix == FROZEN else None
        if linked is not None:
            files[path.name] = linked
            continue
        plain = _plain(tensors)
        safetensors.torch.save_file(plain, path)
        _sync(path)
        files[path.name] = {"size": path.stat().st_size, "sha256": _hash(path), "tensors": _kinds(plain)}
    try:
        meta = json.loads(json.dumps(state.meta))  # meta as it will be read again: with text keys, without tuples
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the checkpoint's `meta` cannot be written as JSON: {error}") from error
    body: _Manifest = {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "files": files,
        "meta": meta,
        "beside": {str(path.relative_to(draft)): _file_facts(path) for path in table_files},
        "finite": True,
    }
    text = json.dumps({**body, "sha256": _manifest_hash(body)}, indent=1)
    with (draft / MANIFEST).open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    _sync(draft)


def _linked(path: Path, state: SavedState, earlier: list[Path]) -> _FileFacts | None:
    """Link `path` to the file of an earlier checkpoint with the same frozen parameters. Return None if there is none.

    Both checkpoints are whole: a file exists as long as one of its links does.
    """
    for other in earlier:
        try:
            manifest = _manifest(other)
            if manifest["meta"].get(FROZEN) == state.meta.get(FROZEN) and path.name in manifest["files"]:
                os.link(other / path.name, path)
                return manifest["files"][path.name]
        except (CheckpointError, OSError):
            continue
    return None


def _file_facts(path: Path) -> _FileFacts:
    _sync(path)
    return {"size": path.stat().st_size, "sha256": _hash(path)}


def _by_prefix(tensors: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    groups: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in tensors.items():
        prefix = key.partition("/")[0]
        if not _PREFIX.fullmatch(prefix):
            raise CheckpointError(
                f"the name of tensor {key!r} has no prefix for its file: name it as in 'model/0.weight'", key=key
            )
        groups.setdefault(prefix, {})[key] = value
    return groups


def _plain(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
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


def _prune(folder: Path, step: int, keep: int) -> None:
    """Remove incomplete checkpoints, checkpoints of later steps than `step`, and all but the newest `keep` others.

    If a checkpoint cannot be removed, a warning is logged.
    """
    own = [path for path in _steps(folder) if _number(path) <= step]
    old = own[max(keep, 1) :] + [path for path in _steps(folder) if _number(path) > step]
    for path in [*old, *folder.glob("step-*.tmp-*")]:
        try:
            shutil.rmtree(path)
        except OSError as error:
            _log.warning("the old checkpoint %s cannot be removed: %s", path, error)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def keep(folder: str | Path, step: int, name: str, other: Path | None = None) -> Path | None:
    """Keep the checkpoint of `step` in the subfolder `name`, in place of other checkpoints there. Return its path.

    Its files are linked, or copied where links are not possible, so that it stays when `save` removes old checkpoints.
    If `folder` has no checkpoint of this step, the one at `other` is taken. Return None if there is none.

    Raises:
        CheckpointError: the checkpoint cannot be linked or copied.
    """
    folder = Path(folder)
    final = folder / name / f"step-{step:08d}"
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
        _sync(final.parent)
    except (OSError, shutil.Error) as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise CheckpointError(f"cannot keep the checkpoint {source} as {final}: {error}", path=str(final)) from error
    for path in [*(folder / name).glob("step-*.tmp-*"), *(path for path in _steps(folder / name) if path != final)]:
        shutil.rmtree(path, ignore_errors=True)
    return final


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)
    return target


# ---------------------------------------------------------------------------------------------- read


def load(path: str | Path) -> SavedState:
    """Verify the hashes of one checkpoint and return its state.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, changed, of a newer format, or not one of rayps. If the
            same folder has a valid earlier checkpoint, the error names the newest one.
    """
    path = Path(path)
    try:
        manifest = _manifest(path)
        _verify_tables(path, manifest)
        for name, facts in _files(path, manifest):
            _verify(path, name, facts)
        state = _state(path, manifest)
        if manifest.get("finite") is not True:
            _verify_finite(path, manifest, state)
    except CheckpointError as error:
        earlier = _valid_before(path) if "reason" in error.data else None
        if earlier is None:
            raise
        first = error.message.splitlines()[0]
        raise CheckpointError(f"{first}\nan earlier checkpoint is valid: {earlier}", **error.data) from error
    return state


def meta_of(path: str | Path) -> Meta:
    """Return the JSON data of one checkpoint, whose tensors are not read.

    Raises:
        CheckpointError: the checkpoint is missing, its manifest is damaged, or it is not one of rayps.
    """
    return _manifest(Path(path))["meta"]


def _valid_before(path: Path) -> Path | None:
    """Return the newest valid checkpoint of an earlier step in the same folder, or None if there is none."""
    for other in _steps(path.parent) if _STEP.fullmatch(path.name) else []:
        if _number(other) < _number(path):
            with contextlib.suppress(CheckpointError):
                verify(other)
                return other
    return None


def _state(path: Path, manifest: _Manifest) -> SavedState:
    state = SavedState(meta=manifest["meta"])
    for name, facts in _files(path, manifest):
        state.tensors.update(_tensors(path, name, facts["tensors"]))
    return state


def verify(path: str | Path) -> None:
    """Read all bytes of a checkpoint and compare their hashes with its manifest.

    If the manifest does not state that the tensors are finite, they are checked too.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, changed, of a newer format, not finite, or not one of
            rayps.
    """
    path = Path(path)
    manifest = _manifest(path)
    _verify_tables(path, manifest)
    for name, facts in _files(path, manifest):
        _verify(path, name, facts)
    if manifest.get("finite") is not True:
        _verify_finite(path, manifest, _state(path, manifest))


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


def newest(folder: str | Path) -> Path | None:
    """Return the newest complete and finite checkpoint in a folder, or None if there is none.

    For each newer checkpoint that is skipped, a warning is logged.
    """
    found, invalid = scan(folder)
    for path, reason in invalid.items():
        _log.warning("skipped the checkpoint %s: %s", path, reason)
    return found


def usable(folder: str | Path) -> tuple[Path | None, list[str]]:
    """Return the newest complete and finite checkpoint, and a warning for each newer one that was skipped."""
    found, invalid = scan(folder)
    return found, [f"skipped the checkpoint {path}: {reason}" for path, reason in invalid.items()]


def scan(folder: str | Path) -> tuple[Path | None, dict[Path, str]]:
    """Return the newest complete and finite checkpoint (or None), and why each newer one cannot be used."""
    invalid: dict[Path, str] = {}
    for path in _steps(Path(folder)):
        try:
            verify(path)
        except CheckpointError as error:
            invalid[path] = str(error.data.get("reason", error.message))
        else:
            return path, invalid
    return None, invalid


def _steps(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, newest first."""
    paths = folder.iterdir() if folder.is_dir() else iter(())
    return sorted((path for path in paths if _STEP.fullmatch(path.name)), key=_number, reverse=True)


def _number(path: Path) -> int:
    return int(path.name[5:])


def _manifest(path: Path) -> _Manifest:
    try:
        text = (path / MANIFEST).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from error
    try:
        manifest = json.loads(text)
    except ValueError as error:
        raise _torn(path, f"its manifest is incomplete: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of rayps: its {MANIFEST} has another format", path=str(path))
    version = manifest.get("version")
    if isinstance(version, int) and version > VERSION:
        raise CheckpointError(
            f"{path} has format {version}, and this rayps reads formats up to {VERSION}: use a newer rayps",
            path=str(path),
            version=version,
        )
    if manifest.pop("sha256", None) != _manifest_hash(manifest):
        raise _torn(path, "its manifest was changed after it was written")
    if not _complete(manifest):
        raise _torn(path, "its manifest has missing fields")
    return manifest


def _complete(manifest: JsonObject) -> TypeGuard[_Manifest]:
    files = manifest.get("files")
    return (
        isinstance(manifest.get("meta"), dict)
        and isinstance(files, dict)
        and all(isinstance(facts, dict) and {"size", "sha256", "tensors"} <= set(facts) for facts in files.values())
    )


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    inside = _steps(path)
    if inside:
        return CheckpointError(
            f"{path} is a folder of several checkpoints: give one of them, e.g. {inside[0]}", path=str(path)
        )
    if not path.exists():
        return CheckpointError(f"no checkpoint at {path}: give a folder such as .../step-00000171", path=str(path))
    return _torn(path, f"its {MANIFEST} cannot be read: {getattr(error, 'strerror', None) or error}")


def _torn(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {path} is not valid: {reason}\ngive an earlier checkpoint", path=str(path), reason=reason
    )


def _files(path: Path, manifest: _Manifest) -> Iterator[tuple[str, _FileFacts]]:
    for name, facts in manifest["files"].items():
        if not _FILE.fullmatch(name):
            raise _torn(path, f"its manifest names the file {name!r}, which is not a file of a checkpoint")
        yield name, facts


def _verify_tables(path: Path, manifest: _Manifest) -> None:
    for name, facts in manifest.get("beside", {}).items():
        if not _TABLE_FILE.fullmatch(name):
            raise _torn(path, f"its manifest names the file {name!r}, which is not a file of a checkpoint")
        _verify(path, name, facts)


def _verify(path: Path, name: str, facts: _FileFacts) -> None:
    try:
        size = (path / name).stat().st_size
        if size != facts["size"]:
            raise _torn(path, f"{name} has {size} bytes, but the manifest states {facts['size']}")
        if _hash(path / name) != facts["sha256"]:
            raise _torn(path, f"{name} was changed after it was written (SHA-256)")
    except OSError as error:
        raise _torn(path, f"{name} cannot be read: {error.strerror or error}") from error


def _verify_finite(path: Path, manifest: _Manifest, state: SavedState) -> None:
    fault = fault_of(state)
    if fault is not None:
        raise _torn(path, f"{fault.where} is not finite (NaN or infinite)")
    for name in manifest.get("beside", {}):
        wrong = rows_fault(path / name)
        if wrong is not None:
            raise _torn(path, f"{wrong} in {name} is not finite (NaN or infinite)")


def rows_fault(path: Path) -> str | None:
    """Return which value of a table's Parquet file is the first that is not finite, or None if all are finite.

    The text names the column (of rows or of optimizer state) and the id, e.g. `'row' of id 17`.
    """
    try:
        file = pq.ParquetFile(path)
        for batch in file.iter_batches():
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                values = column.flatten() if isinstance(column, pa.FixedSizeListArray) else column
                if not pa.types.is_floating(values.type) or not len(values):
                    continue
                wrong = np.flatnonzero(~np.isfinite(values.to_numpy(zero_copy_only=False)))
                if len(wrong):
                    row = int(wrong[0]) // (len(values) // len(column))
                    return f"{name!r} of id {batch.column('id')[row].as_py()}"
    except (OSError, pa.ArrowException) as error:
        raise CheckpointError(f"{path} cannot be read: {error}", path=str(path)) from error
    return None


def _tensors(path: Path, name: str, expected: dict[str, _TensorFacts]) -> dict[str, torch.Tensor]:
    try:
        tensors = safetensors.torch.load_file(path / name)
    except (OSError, SafetensorError) as error:
        raise _torn(path, f"{name} cannot be read: {error}") from error
    if _kinds(tensors) != expected:
        raise _torn(path, f"{name} does not contain the tensors that the manifest names")
    return tensors


def _kinds(tensors: dict[str, torch.Tensor]) -> dict[str, _TensorFacts]:
    return {
        key: {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        for key, value in tensors.items()
    }


def _manifest_hash(body: _Manifest | JsonObject) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

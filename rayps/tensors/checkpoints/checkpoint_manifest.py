"""The manifest of a checkpoint: which files and tensors it has, with sizes and SHA-256, and the JSON data of the run.

A tensor is whole, in one file, or it is of a parameter and in pieces in several files.
Such a tensor's key is in `whole` with its shape, and each file's `offsets` has the piece's first element.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NotRequired, TypeAlias, TypedDict, TypeGuard

from rayps_client.errors import CheckpointError, PlaceError
from rayps_client.values import JsonObject
from torch import Tensor

from rayps.core.full_disk import reports_full_disk
from rayps.tensors.checkpoints.checkpoint_place import BLOCK, MANIFEST, CheckpointPlace, LocalFolder, name_of
from rayps.tensors.checkpoints.tensor_file import StoredRange, name_of_dtype

FORMAT = "rayps-checkpoint"
VERSION = 1  # of the format
TABLES = "tables"
Meta: TypeAlias = dict[str, Any]  # JSON data of a checkpoint: each entry is read by the module that wrote it

_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*\.safetensors")
_TABLE_FILE = re.compile(rf"{TABLES}/[A-Za-z0-9_][A-Za-z0-9_.-]*/[A-Za-z0-9_-]+\.parquet")


class TensorFacts(TypedDict):
    """A tensor's shape and dtype, as in "float32"."""

    shape: list[int]
    dtype: str


class FileFacts(TypedDict):
    """A manifest's entry for one file; only safetensors files have `tensors`, and only those of parts `offsets`."""

    size: int
    sha256: str
    tensors: NotRequired[dict[str, TensorFacts]]
    offsets: NotRequired[dict[str, int]]


class Manifest(TypedDict):
    """The content of a manifest, without its own hash."""

    format: str
    version: int
    step: int
    files: dict[str, FileFacts]
    meta: Meta
    beside: NotRequired[dict[str, FileFacts]]  # the files of tables
    finite: NotRequired[bool]  # whether the tensors were found finite before they were written
    whole: NotRequired[dict[str, list[int]]]  # the shapes of tensors that are in pieces
    token: NotRequired[str]  # of format 2: the attempt that wrote the files; in a remote place a part of their names


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """Where elements `lo` to `hi` of a flat tensor are: in a file of the checkpoint, from its element `first` on."""

    file: str
    lo: int
    hi: int


# ---------------------------------------------------------------------------------------------- write


def describe_tensors(tensors: Mapping[str, Tensor] | Mapping[str, StoredRange]) -> dict[str, TensorFacts]:
    """Return the shape and dtype of each tensor."""
    return {key: {"shape": list(value.shape), "dtype": name_of_dtype(value.dtype)} for key, value in tensors.items()}


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of a manifest, with its own hash.

    Raises:
        CheckpointError: `meta` has values that are no JSON data.
    """
    try:
        # meta as it will be read again: with text keys, without tuples
        meta = json.loads(json.dumps(manifest["meta"]))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the checkpoint's `meta` cannot be written as JSON: {error}") from error
    body: Manifest = {**manifest, "meta": meta}
    return json.dumps({**body, "sha256": hash_manifest(body)}, indent=1).encode()


def hash_manifest(body: Manifest | JsonObject) -> str:
    """Return the SHA-256 of a manifest without its own hash."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


# ---------------------------------------------------------------------------------------------- read


def manifest_of(place: CheckpointPlace) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises:
        CheckpointError: the checkpoint is missing, its manifest is damaged, or it is not one of rayps.
        PlaceError: the place cannot be reached.
    """
    try:
        text = place.read(MANIFEST).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _explain_unreadable(place, error) from error
    try:
        manifest = json.loads(text)
    except ValueError as error:
        raise explain_torn(place, f"its manifest is incomplete: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{place} is not a checkpoint of rayps: its {MANIFEST} has another format", path=str(place)
        )
    version = manifest.get("version")
    if version is not None and version != VERSION:
        raise CheckpointError(
            f"{place} has format {version}, and this rayps reads format {VERSION}: use the rayps that wrote it",
            path=str(place),
            version=version,
        )
    if manifest.pop("sha256", None) != hash_manifest(manifest):
        raise explain_torn(place, "its manifest was changed after it was written")
    if manifest.get("finite") is not True:
        raise explain_torn(place, "its manifest does not state that its tensors are finite")
    if not _complete(manifest):
        raise explain_torn(place, "its manifest has missing fields")
    for name in manifest["files"]:
        if not _FILE.fullmatch(name):
            raise explain_torn(place, f"its manifest names the file {name!r}, which is not a file of a checkpoint")
    for name in manifest.get("beside", {}):
        if not _TABLE_FILE.fullmatch(name):
            raise explain_torn(place, f"its manifest names the file {name!r}, which is not a file of a checkpoint")
    return manifest


def _complete(manifest: JsonObject) -> TypeGuard[Manifest]:
    files = manifest.get("files")
    return (
        manifest.get("version") == VERSION
        and isinstance(manifest.get("meta"), dict)
        and isinstance(files, dict)
        and all(isinstance(facts, dict) and {"size", "sha256", "tensors"} <= set(facts) for facts in files.values())
        and isinstance(manifest.get("whole", {}), dict)
    )


def _explain_unreadable(place: CheckpointPlace, error: Exception) -> CheckpointError:
    inside = place.steps()
    if inside:
        example = place.at(name_of(inside[0]))
        return CheckpointError(
            f"{place} is a folder of several checkpoints: give one of them, e.g. {example}", path=str(place)
        )
    if isinstance(place, LocalFolder) and place.path.exists():
        return explain_torn(place, f"its {MANIFEST} cannot be read: {getattr(error, 'strerror', None) or error}")
    if isinstance(error, FileNotFoundError) or isinstance(place, LocalFolder):
        return CheckpointError(f"no checkpoint at {place}: give a folder such as .../step-00000171", path=str(place))
    return explain_torn(place, f"its {MANIFEST} cannot be read: {error}")


def explain_torn(place: CheckpointPlace, reason: str) -> CheckpointError:
    """Return the error of a checkpoint that is not valid for this reason. Its data have the reason."""
    return CheckpointError(
        f"the checkpoint {place} is not valid: {reason}\ngive an earlier checkpoint, or start a new run",
        path=str(place),
        reason=reason,
    )


def explain_unread(place: CheckpointPlace, name: str, error: Exception) -> CheckpointError:
    """Return the error of a file that cannot be read: `error` itself if its place cannot be reached."""
    if isinstance(error, PlaceError):
        return error
    return explain_torn(place, f"{name} cannot be read: {getattr(error, 'strerror', None) or error}")


def explain_unwritten(error: Exception, checkpoint: str, what: str = "") -> CheckpointError:
    """Return the error of a checkpoint, or of `what` in it, that was not written: a PlaceError if the disk is full."""
    reason = getattr(error, "strerror", None) or error
    message = f"cannot write {f'{what} of ' if what else ''}the checkpoint {checkpoint}: {reason}"
    if reports_full_disk(error):
        return PlaceError(f"{message}\nfree space there", path=checkpoint)
    return CheckpointError(message, path=checkpoint)


def verify_file(place: CheckpointPlace, name: str, facts: FileFacts) -> None:
    """Read all bytes of a file, and compare its size and SHA-256 with the manifest.

    Raises:
        CheckpointError: the file is missing or was changed.
        PlaceError: the place cannot be reached.
    """
    try:
        check_size(place, name, facts)
        if digest_of(place, name) != facts["sha256"]:
            raise explain_torn(place, f"{name} was changed after it was written (SHA-256)")
    except (OSError, EOFError) as error:
        raise explain_unread(place, name, error) from error


def digest_of(place: CheckpointPlace, name: str) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits. One block of the file is in memory at a time.

    Raises:
        EOFError, OSError, PlaceError: the file cannot be read.
    """
    digest, left, at = hashlib.sha256(), place.size(name), 0
    buffer = memoryview(bytearray(min(BLOCK, left)))
    while left:
        block = buffer[: min(BLOCK, left)]
        place.fill(name, at, block)
        digest.update(block)
        at, left = at + len(block), left - len(block)
    return digest.hexdigest()


def check_size(place: CheckpointPlace, name: str, facts: FileFacts) -> None:
    """Compare a file's size with the manifest.

    Raises:
        CheckpointError: the size differs.
        OSError, PlaceError: the size cannot be read.
    """
    size = place.size(name)
    if size != facts["size"]:
        raise explain_torn(place, f"{name} has {size} bytes, but the manifest states {facts['size']}")


def shapes_of(manifest: Manifest) -> dict[str, TensorFacts]:
    """Return the shape and dtype of each whole tensor of a checkpoint, by name."""
    whole = manifest.get("whole", {})
    return {
        key: {"shape": list(whole.get(key, facts["shape"])), "dtype": facts["dtype"]}
        for file in manifest["files"].values()
        for key, facts in file["tensors"].items()
    }


def pieces_of(manifest: Manifest) -> dict[str, list[StoredPiece]]:
    """Return where the elements of each tensor are, by name, in the order of the elements."""
    found: dict[str, list[StoredPiece]] = {}
    for name, facts in manifest["files"].items():
        offsets = facts.get("offsets", {})
        for key, tensor in facts["tensors"].items():
            lo = offsets.get(key, 0)
            found.setdefault(key, []).append(StoredPiece(name, lo, lo + math.prod(tensor["shape"])))
    return {key: sorted(pieces, key=lambda piece: (piece.lo, piece.hi)) for key, pieces in found.items()}


def find_uncovered(files: Mapping[str, FileFacts], whole: Mapping[str, Sequence[int]]) -> str | None:
    """Return which tensor is not exactly covered by its pieces, and how, or None if all are.

    A tensor of a file that has an offset must be in `whole`. One that has none must be in one file only.
    """
    seen: dict[str, list[_Held]] = {}
    for name, facts in files.items():
        offsets = facts.get("offsets", {})
        for key, tensor in facts["tensors"].items():
            lo, size = offsets.get(key, 0), math.prod(tensor["shape"])
            seen.setdefault(key, []).append(_Held(lo, lo + size, name, key in offsets, tensor["dtype"]))
    for key in whole:
        if key not in seen:
            return f"{key!r} is in no file"
    for key, pieces in seen.items():
        problem = _find_gap(key, sorted(pieces), whole.get(key))
        if problem is not None:
            return problem
    return None


class _Held(NamedTuple):
    """Elements `lo` to `hi` of a tensor in a file. `cut`: the file states an offset for them."""

    lo: int
    hi: int
    file: str
    cut: bool
    dtype: str


def _find_gap(key: str, pieces: list[_Held], shape: Sequence[int] | None) -> str | None:
    """Return how the pieces of one tensor, in order, fail to cover it, or None if they cover it."""
    if shape is None:
        if any(piece.cut for piece in pieces):
            return f"{key!r} is in pieces, and its whole shape is not given"
        return f"{key!r} is in {pieces[0].file} and in {pieces[1].file}" if len(pieces) > 1 else None
    at = 0
    for piece in pieces:
        if not piece.cut:
            return f"{key!r} of {piece.file} is a piece without an offset"
        if piece.dtype != pieces[0].dtype:
            return f"{key!r} has the dtypes {pieces[0].dtype} and {piece.dtype}"
        if piece.lo > at:
            return f"elements {at} to {piece.lo} of {key!r} are in no file"
        if piece.lo < at and piece.hi > piece.lo:
            return f"elements {piece.lo} to {min(at, piece.hi)} of {key!r} are twice in the files, once in {piece.file}"
        at = max(at, piece.hi)
    size = math.prod(shape)
    if at < size:
        return f"elements {at} to {size} of {key!r} are in no file"
    return f"{key!r} has {at} elements, and its shape {list(shape)} has {size}" if at > size else None


def files_of(manifest: Manifest) -> Iterator[tuple[str, FileFacts]]:
    """Yield the name and the facts of each file: those with tensors, then those of tables."""
    yield from manifest["files"].items()
    yield from manifest.get("beside", {}).items()

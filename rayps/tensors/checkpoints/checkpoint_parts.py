"""A checkpoint that several processes write, each the part of the state that it holds.

Each process writes one file with `write_part`: tensors as `rayps.tensors.snapshot` names them, of which some may be
pieces, elements lo to hi of a flat tensor. When all have written, one process calls `seal` with the facts of all parts:
it checks them, and writes the manifest last. Until then there is no checkpoint. `rayps.tensors.checkpoints.checkpoint`
reads the result as a whole state, and `read_pieces` reads the elements that a process needs, under any other cut.

An attempt has a token, which the process that seals chooses (`make_token`). The files of two attempts never mix.

Each file's SHA-256 is in the manifest. `load` compares it. `read_pieces` reads ranges of files, of which no hash is
known: before it, the processes of a job verify the files together, each its share (`verify_share`).
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

import torch
from rayps_client.errors import CheckpointError, PlaceError, TrainingError
from rayps_client.values import JsonObject
from torch import Tensor

from rayps.core.failpoint import passing
from rayps.core.urls import Location
from rayps.tensors.checkpoints import tensor_file
from rayps.tensors.checkpoints.checkpoint import prune
from rayps.tensors.checkpoints.checkpoint_manifest import (
    FORMAT,
    VERSION,
    FileFacts,
    Manifest,
    Meta,
    TensorFacts,
    check_size,
    describe_tensors,
    encode_manifest,
    explain_torn,
    explain_unread,
    explain_unwritten,
    files_of,
    find_uncovered,
    manifest_of,
    pieces_of,
    shapes_of,
    verify_file,
)
from rayps.tensors.checkpoints.checkpoint_place import CheckpointPlace, LocalFolder, name_of
from rayps.tensors.checkpoints.tensor_file import FilePlan, StoredRange, header_of
from rayps.tensors.finite import fault_in

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class PartFacts:
    """What a process has written: the file's name, size and SHA-256, its tensors, and the offsets of its pieces.

    `tensors` has the shape and dtype of each tensor by key. `offsets` has, for each key that is a piece, the piece's
    first element in the flat whole tensor.
    """

    file: str
    size: int
    sha256: str
    tensors: dict[str, TensorFacts] = field(default_factory=dict)
    offsets: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> JsonObject:
        """Return the facts as JSON data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> PartFacts:
        """Rebuild the facts from the result of `to_json`."""
        return cls(**data)  # type: ignore[arg-type]


def make_token() -> str:
    """Return the token of a new attempt."""
    return uuid.uuid4().hex


def part_name(number: int, count: int) -> str:
    """Return the name of part `number` of `count`, from 0, e.g. "part-00001-of-00004.safetensors" for the first."""
    return f"part-{number + 1:05d}-of-{count:05d}.safetensors"


def write_part(
    place: CheckpointPlace | Location,
    step: int,
    token: str,
    name: str,
    tensors: Mapping[str, Tensor],
    *,
    offsets: Mapping[str, int] | None = None,
    stopped: Callable[[], bool] = bool,
) -> PartFacts:
    """Write one process's part of the checkpoint of `step`. Return what `seal` needs to know of it.

    `name` is as `part_name` returns it. `tensors` has, by key ("model/0.weight", "optim/0.weight/exp_avg", "rng/1"),
    whole tensors, and pieces: flat tensors [n], which begin at element `offsets[key]` of the flat whole tensor. The
    tensors must not change during the call, and are not copied. Tensors of other devices are copied block by block.
    `stopped` is asked before each block.

    Raises:
        TrainingError: a tensor is not finite. Nothing is written.
        CheckpointError: the file cannot be written.
        PlaceError: the disk is full, or the remote place cannot be reached or refuses.
        CancelledError: `stopped` returned True. No file is left.
    """
    place, offsets = CheckpointPlace.of(place), dict(offsets or {})
    _check_part(name, tensors, offsets)
    plan = FilePlan.of(tensors)
    draft, stored = place.draft(step, token), place.stored_name(name, token)
    passing("checkpoint: part not begun")
    try:
        with draft.writer(stored, plan.size) as sink:
            digest = plan.write(sink, stopped)
    except (PlaceError, CancelledError):
        raise
    except OSError as error:
        raise explain_unwritten(error, str(place.at(name_of(step))), stored) from error
    passing("checkpoint: part written, not reported")
    return PartFacts(stored, plan.size, digest, describe_tensors(tensors), offsets)


def _check_part(name: str, tensors: Mapping[str, Tensor], offsets: Mapping[str, int]) -> None:
    for key, offset in offsets.items():
        if key not in tensors or tensors[key].dim() != 1 or offset < 0:
            shape = list(tensors[key].shape) if key in tensors else None
            raise CheckpointError(
                f"the part {name} has {key!r} of shape {shape} at offset {offset}: give a flat tensor", key=key
            )
    fault = fault_in(tensors, ())
    if fault is not None:
        raise TrainingError(
            f"{fault.where} is not finite (NaN or infinite) in {name} of a checkpoint:\nlower the learning rate, clip "
            "the gradient (clip_norm), or look for bad values in the data",
            parameter=fault.parameter,
            **({} if fault.rank is None else {"rank": fault.rank}),
        )


def seal(
    place: CheckpointPlace | Location,
    step: int,
    token: str,
    parts: Sequence[PartFacts],
    *,
    meta: Meta,
    whole: Mapping[str, Sequence[int]],
    keep: int = 2,
) -> Location:
    """Complete the checkpoint of `step` that the attempt `token` has written. Return its path or URL.

    `parts` are the facts of all parts. `whole` has the shape of each tensor that is in pieces, by key. Then all but
    the newest `keep` checkpoints are removed, those of later steps too, and files of earlier attempts. Only one
    process may seal in a place. After an error or a crash, the earlier checkpoints are unchanged.

    Raises:
        CheckpointError: a part is missing or has another size, or the pieces of a tensor do not cover it exactly once.
        PlaceError: the remote place cannot be reached, or refuses.
    """
    place = CheckpointPlace.of(place)
    final = place.at(name_of(step))
    files: dict[str, FileFacts] = {}
    for part in parts:
        if part.file in files:
            raise CheckpointError(f"two parts of the checkpoint {final} have the name {part.file}", path=str(final))
        files[part.file] = {"size": part.size, "sha256": part.sha256, "tensors": part.tensors, "offsets": part.offsets}
    problem = find_uncovered(files, whole)
    if problem is not None:
        raise CheckpointError(f"the parts of the checkpoint {final} do not fit together: {problem}", path=str(final))
    manifest: Manifest = {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "files": files,
        "meta": meta,
        "beside": {},
        "finite": True,
        "whole": {key: list(shape) for key, shape in whole.items()},
        "token": token,
    }
    draft = place.draft(step, token)
    try:
        for name, facts in files.items():
            _check_there(draft, name, facts)
        place.publish(step, token, encode_manifest(manifest))
    except OSError as error:
        raise explain_unwritten(error, str(final)) from error
    passing("checkpoint: complete, old ones not removed")
    prune(place, step, keep, manifest, drafts_upto=step)
    return final.location


def _check_there(draft: CheckpointPlace, name: str, facts: FileFacts) -> None:
    """Check that a part is where the process that seals looks for it."""
    try:
        check_size(draft, name, facts)
    except FileNotFoundError as error:
        why = (
            "this folder is not shared with the host that wrote the part: give a folder that all hosts share, or an "
            "object store such as s3://bucket/run"
            if isinstance(draft, LocalFolder)
            else "another process removed it: let one job only write to this place"
        )
        raise CheckpointError(f"{name} is not in {draft}:\n{why}", path=str(draft), file=name) from error


def discard(place: CheckpointPlace | Location, step: int, token: str) -> None:
    """Remove the files of an attempt that will not be sealed, as far as that is possible."""
    CheckpointPlace.of(place).discard(step, token)


# ---------------------------------------------------------------------------------------------- read


def read_contents(path: Location | CheckpointPlace) -> dict[str, TensorFacts]:
    """Return the shape and dtype of each whole tensor of a checkpoint, by key. No tensor is read.

    Raises:
        CheckpointError: the checkpoint is missing, its manifest is damaged, or it is not one of rayps.
        PlaceError: the remote place cannot be reached, or refuses.
    """
    return shapes_of(manifest_of(CheckpointPlace.of(path)))


def verify_share(path: Location | CheckpointPlace, rank: int, count: int) -> None:
    """Verify every `count`-th file of a checkpoint, from the file `rank` on: size and SHA-256.

    If all `count` processes do so, every file has been verified once.

    Raises:
        CheckpointError: a file is missing, damaged or was changed.
        PlaceError: the remote place cannot be reached, or refuses.
    """
    place = CheckpointPlace.of(path)
    manifest = manifest_of(place)
    for name, facts in sorted(files_of(manifest))[rank::count]:
        verify_file(place, name, facts)


class PieceReader:
    """Reads some tensors of a checkpoint, and of them only the elements that are wanted.

    The checkpoint may be whole or in parts, under any cut, local or remote. Hashes are not compared: see
    `verify_share`. The manifest and the headers of the files are read once.
    """

    def __init__(self, path: Location | CheckpointPlace) -> None:
        """Read the manifest.

        Raises:
            CheckpointError: the checkpoint is missing, its manifest is damaged, or it is not one of rayps.
            PlaceError: the remote place cannot be reached, or refuses.
        """
        self._place = CheckpointPlace.of(path)
        self._manifest = manifest_of(self._place)
        self._pieces = pieces_of(self._manifest)
        self._headers: dict[str, dict[str, StoredRange]] = {}
        self.contents = shapes_of(self._manifest)

    @property
    def meta(self) -> Meta:
        """The JSON data of the checkpoint."""
        return self._manifest["meta"]

    def read(self, wanted: Mapping[str, Range | None]) -> dict[str, Tensor]:
        """Return tensors by key.

        `wanted` has, by key, the elements (lo, hi) of the flat tensor, which are returned as a tensor [hi - lo], or
        None for the whole tensor with its shape. The memory is that of the result, with one block of a file for a
        remote place.

        Raises:
            CheckpointError: a file is missing or damaged, or there is no such tensor, or it has no such elements.
            PlaceError: the remote place cannot be reached, or refuses.
        """
        found: dict[str, Tensor] = {}
        reads: list[_Read] = []
        for key, span in wanted.items():
            shape = self.contents[key]["shape"] if key in self.contents else None
            if shape is None:
                raise CheckpointError(
                    f"the checkpoint {self._place} has no tensor {key!r}", path=str(self._place), key=key
                )
            lo, hi = (0, math.prod(shape)) if span is None else span
            if not 0 <= lo <= hi <= math.prod(shape):
                raise CheckpointError(
                    f"elements {lo} to {hi} of {key!r} are wanted, and {self._place} has {math.prod(shape)}",
                    path=str(self._place),
                    key=key,
                )
            flat = torch.empty(hi - lo, dtype=getattr(torch, self.contents[key]["dtype"]))
            found[key] = flat if span is not None else flat.view(shape)
            reads += self._plan(key, lo, hi, flat)
        for name in sorted({read.file for read in reads}):
            self._fill(name, [read for read in reads if read.file == name])
        return found

    def _plan(self, key: str, lo: int, hi: int, into: Tensor) -> Iterator[_Read]:
        """Yield what must be read so that `into` has elements lo to hi of a tensor."""
        done = lo
        for piece in self._pieces[key]:
            a, b = max(done, piece.lo), min(hi, piece.hi)
            if a < b:
                if a > done:
                    break
                yield _Read(piece.file, key, a - piece.lo, into[a - lo : b - lo])
                done = b
        if done < hi:
            raise explain_torn(self._place, f"elements {done} to {hi} of {key!r} are in no file")

    def _fill(self, name: str, reads: Sequence[_Read]) -> None:
        try:
            header = self._read_header(name)
            targets: list[tuple[int, memoryview]] = []
            for read in reads:
                stored = header[read.key]
                if stored.dtype != read.into.dtype:
                    raise explain_torn(self._place, f"{read.key!r} has another dtype in {name} than in other files")
                targets.append((stored.lo + read.first * stored.dtype.itemsize, tensor_file.bytes_of(read.into)))
            targets.sort(key=lambda target: target[0])
            tensor_file.fill_all(self._place, name, targets, len)
        except (OSError, EOFError, tensor_file.TensorFileError) as error:
            raise explain_unread(self._place, name, error) from error

    def _read_header(self, name: str) -> dict[str, StoredRange]:
        if name not in self._headers:
            facts = self._manifest["files"][name]
            check_size(self._place, name, facts)
            header = header_of(self._place, name)
            if describe_tensors(header) != facts["tensors"]:
                raise explain_torn(self._place, f"{name} does not contain the tensors that the manifest names")
            self._headers[name] = header
        return self._headers[name]


class _Read(NamedTuple):
    """Elements of a tensor of a file, from its element `first` on, that are read into `into` [n]."""

    file: str
    key: str
    first: int
    into: Tensor


def read_pieces(path: Location | CheckpointPlace, wanted: Mapping[str, Range | None]) -> dict[str, Tensor]:
    """Read some tensors of a checkpoint, and of them only the elements that are wanted: see `PieceReader.read`.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, or has no such tensor or elements.
        PlaceError: the remote place cannot be reached, or refuses.
    """
    return PieceReader(path).read(wanted)

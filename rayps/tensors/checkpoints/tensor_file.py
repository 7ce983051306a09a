"""Write and read a safetensors file in blocks, so that no second copy of its tensors is made.

The library safetensors needs all bytes of a file at once to write it, and a local file to read a part of it. The
format: 8 bytes with the header's length (little endian), the header as JSON, then the tensors' bytes without gaps.
Source: https://huggingface.co/docs/safetensors, "Format".
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass

import torch
from rayps_client.errors import CheckpointError
from torch import Tensor

from rayps.core.failpoint import passing
from rayps.tensors.checkpoints.checkpoint_place import BLOCK, CheckpointPlace, Sink

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_LENGTH = 8  # bytes of the header's length
_MOST_HEADER = 100_000_000  # bytes: the limit of the library safetensors


@dataclass(frozen=True, slots=True)
class StoredRange:
    """One tensor of a file: dtype, shape, and the bytes lo to hi of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    lo: int
    hi: int


class TensorFileError(CheckpointError):
    """A file is not one of safetensors, or a tensor's dtype is not one of the format."""


def name_of_dtype(dtype: torch.dtype) -> str:
    """Return a dtype's name in manifests, e.g. "float32"."""
    return str(dtype).removeprefix("torch.")


# ---------------------------------------------------------------------------------------------- write


@dataclass(frozen=True, slots=True)
class FilePlan:
    """The content of a file that is to be written: its header, and its tensors in order."""

    header: bytes
    tensors: tuple[Tensor, ...]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> FilePlan:
        """Plan a file. Tensors of larger elements come first, so that each is aligned.

        Raises:
            TensorFileError: safetensors has no such dtype, or a tensor is sparse or quantized.
        """
        for key, value in tensors.items():
            if value.dtype not in _NAMES or value.layout is not torch.strided:
                way = ": keep real numbers [..., 2], and use torch.view_as_complex(x)" if value.is_complex() else ""
                raise TensorFileError(
                    f"{key!r} is a tensor of {value.dtype}, {value.layout}, which safetensors lacks{way}"
                )
        order = sorted(tensors, key=lambda key: (-tensors[key].element_size(), key))
        entries, at = dict[str, object](), 0
        for key in order:
            value = tensors[key]
            size = value.numel() * value.element_size()
            entries[key] = {"dtype": _NAMES[value.dtype], "shape": list(value.shape), "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return cls(len(text).to_bytes(_LENGTH, "little") + text, tuple(tensors[key] for key in order))

    @property
    def size(self) -> int:
        """The file's size in bytes."""
        return len(self.header) + sum(value.numel() * value.element_size() for value in self.tensors)

    def blocks(self) -> Iterator[memoryview]:
        """Yield the file's bytes in blocks of at most `BLOCK` bytes.

        A block is a view of its tensor. It is a copy if the tensor is on another device. A tensor that is not
        contiguous is copied whole.
        """
        for lo in range(0, len(self.header), BLOCK):
            yield memoryview(self.header)[lo : lo + BLOCK]
        for value in self.tensors:
            flat = value.detach().reshape(-1).view(torch.uint8)
            for lo in range(0, flat.numel(), BLOCK):
                yield flat[lo : lo + BLOCK].cpu().numpy().data

    def write(self, sink: Sink, stopped: Callable[[], bool] = bool) -> str:
        """Write the file to `sink` and return its SHA-256. Hashing and writing release the GIL.

        `stopped` is asked before each block.

        Raises:
            CancelledError: `stopped` returned True.
        """
        digest = hashlib.sha256()
        for block in self.blocks():
            if stopped():
                raise CancelledError("the write was cancelled")
            digest.update(block)
            sink.write(block)
            passing("checkpoint: a block written")
        return digest.hexdigest()


# ---------------------------------------------------------------------------------------------- read


def header_of(place: CheckpointPlace, name: str) -> dict[str, StoredRange]:
    """Return the tensors of a file by name, in the order of their bytes.

    Raises:
        TensorFileError: the file is not one of safetensors.
        EOFError, OSError, PlaceError: the file cannot be read.
    """
    return _parse(_read_header_bytes(place, name), place.size(name), name)


def _read_header_bytes(place: CheckpointPlace, name: str) -> bytes:
    """Return the length and the header of a file."""
    start = bytearray(_LENGTH)
    place.fill(name, 0, memoryview(start))
    length = int.from_bytes(start, "little")
    if length > _MOST_HEADER:
        raise TensorFileError(f"{name} states a header of {length} bytes")
    text = bytearray(length)
    place.fill(name, _LENGTH, memoryview(text))
    return bytes(start + text)


def _parse(header: bytes, size: int, name: str) -> dict[str, StoredRange]:
    found: dict[str, StoredRange] = {}
    begin = len(header)
    try:
        entries = json.loads(header[_LENGTH:])
        for key, entry in entries.items():
            if key != "__metadata__":
                lo, hi = entry["data_offsets"]
                found[key] = StoredRange(_DTYPES[entry["dtype"]], tuple(entry["shape"]), begin + lo, begin + hi)
        found = dict(sorted(found.items(), key=lambda item: (item[1].lo, item[1].hi)))
        at = begin
        for each in found.values():
            if each.lo != at or each.hi - each.lo != math.prod(each.shape) * each.dtype.itemsize:
                raise ValueError("the positions of its tensors do not fit their shapes")
            at = each.hi
        if at != size:
            raise ValueError(f"its tensors end at byte {at} of {size}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TensorFileError(f"{name} has no valid header of safetensors: {error}") from error
    return found


def bytes_of(flat: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor with one dimension, as bytes."""
    return flat.view(torch.uint8).numpy().data


def fill_all(
    place: CheckpointPlace, name: str, targets: Iterable[tuple[int, memoryview]], seen: Callable[[memoryview], object]
) -> None:
    """Read ranges of a file: for each (offset, memory), the bytes from `offset` on, until the memory is full.

    The targets must be in the order of their offsets. Adjacent small ranges are read together, in blocks of at most
    `BLOCK` bytes, because each read from a remote place is a request. `seen` gets each block.

    Raises:
        EOFError, OSError, PlaceError: the file cannot be read.
    """
    run: list[memoryview] = []
    begin = end = 0
    for offset, memory in targets:
        if run and (offset != end or end + len(memory) - begin > BLOCK):
            _fill_run(place, name, begin, run, seen)
            run = []
        if not run:
            begin = offset
        run.append(memory)
        end = offset + len(memory)
    if run:
        _fill_run(place, name, begin, run, seen)


def _fill_run(
    place: CheckpointPlace, name: str, begin: int, run: list[memoryview], seen: Callable[[memoryview], object]
) -> None:
    """Read adjacent bytes of a file, from `begin` on, into memory after memory."""
    if len(run) == 1:
        for lo in range(0, len(run[0]), BLOCK):
            block = run[0][lo : lo + BLOCK]
            place.fill(name, begin + lo, block)
            seen(block)
        return
    together = memoryview(bytearray(sum(map(len, run))))
    place.fill(name, begin, together)
    seen(together)
    at = 0
    for memory in run:
        memory[:] = together[at : at + len(memory)]
        at += len(memory)


def read_all(
    place: CheckpointPlace, name: str, target: Callable[[str, StoredRange], Tensor]
) -> tuple[dict[str, StoredRange], str]:
    """Read all tensors of a file once, in blocks. Return what the file contains, and its SHA-256.

    The elements of a tensor are read into `target(key, what is stored)` [n], a contiguous CPU tensor.

    Raises:
        TensorFileError: the file is not one of safetensors.
        EOFError, OSError, PlaceError: the file cannot be read.
    """
    header = _read_header_bytes(place, name)
    found = _parse(header, place.size(name), name)
    digest = hashlib.sha256(header)
    targets = ((stored.lo, bytes_of(target(key, stored))) for key, stored in found.items())
    fill_all(place, name, targets, digest.update)
    return found, digest.hexdigest()

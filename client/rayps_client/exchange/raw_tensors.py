"""Tensors as bytes, without torch, and safetensors files of them. Values of every dtype, bfloat16 too, keep their bits.

A safetensors file (https://github.com/huggingface/safetensors) has 8 bytes with the length of its header, the header as
JSON, and the bytes of the tensors. The library checks the files that are read. Its functions that write need arrays of
numpy, which has no bfloat16, or of torch: therefore the writer is here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from numpy.typing import NDArray

from rayps_client.errors import WorkloadError
from rayps_client.values import Buffer

CODES = {  # from a dtype's name, as torch and numpy write it, to its code in safetensors
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_NAMES = {code: name for name, code in CODES.items()}
_LENGTH = 8  # bytes of the length of a header, and the multiple to which a header is filled up


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor: the name of its dtype such as "float32", its shape, and its bytes in C order, little-endian."""

    dtype: str
    shape: tuple[int, ...]
    data: Buffer

    @property
    def elements(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return len(memoryview(self.data).cast("B")) if self.elements else 0

    @property
    def kind(self) -> str:
        """The dtype and the shape as text, such as `float32 (3, 5)`."""
        return f"{self.dtype} {self.shape}"

    def array(self) -> NDArray[Any]:
        """Return the values as a numpy array, which may be the memory of `data`.

        Raises:
            WorkloadError: numpy has no such dtype.
        """
        try:
            kind = np.dtype(self.dtype)
        except TypeError as error:
            raise WorkloadError(
                f"numpy has no dtype {self.dtype}: use a workload of torch, or float32 parameters"
            ) from error
        return np.frombuffer(self.data, dtype=kind).reshape(self.shape)


def raw_of_array(array: NDArray[Any]) -> RawTensor:
    """Return a numpy array as bytes; the result uses the array's memory if that is contiguous.

    Raises:
        WorkloadError: the array has a dtype that safetensors does not have, such as objects.
    """
    if array.dtype.name not in CODES:
        raise WorkloadError(f"arrays of {array.dtype} cannot be sent: use numbers, such as float32")
    plain = np.ascontiguousarray(array)
    if plain.dtype.byteorder == ">":
        plain = plain.astype(plain.dtype.newbyteorder("<"))
    return RawTensor(array.dtype.name, tuple(array.shape), plain.reshape(-1).view(np.uint8).data)


def floats_of(raw: RawTensor) -> NDArray[Any]:
    """Return the values as a numpy array of float64 if that is their dtype, else of float32; bfloat16 too.

    Raises:
        WorkloadError: they are not floating numbers.
    """
    if raw.dtype == "bfloat16":
        high = np.frombuffer(raw.data, dtype="<u2").astype("<u4") << np.uint32(16)
        return np.asarray(high, dtype=np.uint32).view(np.float32).reshape(raw.shape)
    if raw.dtype not in ("float64", "float32", "float16"):
        raise WorkloadError(f"parameters of {raw.dtype} cannot be coded: leave upload and download out of the strategy")
    found = raw.array()
    return found if raw.dtype == "float64" else found.astype(np.float32, copy=False)


def raw_of_floats(values: NDArray[Any], like: RawTensor) -> RawTensor:
    """Return an array of float32 or float64 as bytes, with the dtype of `like`, rounded to nearest."""
    if like.dtype != "bfloat16":
        with np.errstate(over="ignore"):
            return raw_of_array(values.astype(like.dtype, copy=False))
    bits = np.ascontiguousarray(values, dtype="<f4").view("<u4")
    high = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    high = np.where(np.isnan(values), np.uint32(0x7FC0), high)
    return RawTensor("bfloat16", tuple(values.shape), high.astype("<u2").tobytes())


def encode_tensors(tensors: Mapping[str, RawTensor], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes of a safetensors file with these tensors and this metadata."""
    # larger elements first: each tensor then begins at a multiple of its elements' size
    names = sorted(tensors, key=lambda name: (-item_bytes(tensors[name].dtype), name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name in names:
        each = tensors[name]
        header[name] = {"dtype": CODES[each.dtype], "shape": list(each.shape), "data_offsets": [at, at + each.nbytes]}
        at += each.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH)
    return b"".join([len(text).to_bytes(_LENGTH, "little"), text, *(tensors[name].data for name in names)])


def decode_tensors(raw: Buffer) -> dict[str, RawTensor]:
    """Return the tensors of a safetensors file, with memory of their own.

    Raises safetensors.SafetensorError or KeyError if the bytes are not such a file, or a dtype is unknown.
    """
    found = safetensors.deserialize(bytes(raw))  # type: ignore[no-untyped-call]
    return {
        name: RawTensor(_NAMES[facts["dtype"]], tuple(facts["shape"]), memoryview(facts["data"]))
        for name, facts in found
    }


def metadata_of(raw: Buffer) -> dict[str, str]:
    """Return the metadata of a safetensors file. Raises ValueError or KeyError if the file has no metadata."""
    length = int.from_bytes(raw[:_LENGTH], "little")
    if not 0 < length <= len(raw) - _LENGTH:
        raise ValueError("no safetensors")
    return _metadata(bytes(raw[_LENGTH : _LENGTH + length]))


def metadata_of_file(path: Path) -> dict[str, str]:
    """Return the metadata of a safetensors file on disk, without its tensors. Raises the errors of `metadata_of`."""
    with path.open("rb") as file:
        return _metadata(file.read(int.from_bytes(file.read(_LENGTH), "little")))


def _metadata(text: bytes) -> dict[str, str]:
    header = json.loads(text)
    found = header["__metadata__"] if isinstance(header, dict) else None
    if not isinstance(found, dict):
        raise ValueError("no metadata")
    return found


def item_bytes(dtype: str) -> int:
    """Return the number of bytes of an element of a dtype."""
    if dtype.startswith("float8"):
        return 1
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize

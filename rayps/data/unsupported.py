"""Refuse unsupported sources (Ray Data, formats other than Parquet, wildcards), with a text on what to do instead."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

import pyarrow.fs as pafs
from rayps_client.errors import DataError

CONVERT = "convert it to Parquet, or give rayps.data.dataset(...) a torch Dataset that reads it"
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip")
_SOURCES = {  # suffix: the format, and the function of rayps.data that reads it
    ".csv": ("CSV", "csv(FILE, features=...)"),
    ".tsv": ("CSV", "csv(FILE, features=..., delimiter='\\t')"),
    ".json": ("JSON", "json_lines(FILE, features=...), one object per line"),
    ".jsonl": ("JSON", "json_lines(FILE, features=...)"),
    ".ndjson": ("JSON", "json_lines(FILE, features=...)"),
    ".feather": ("Feather", "arrow(FILE, features=...)"),
    ".arrow": ("Arrow", "arrow(FILE, features=...)"),
    ".ipc": ("Arrow", "arrow(FILE, features=...)"),
    ".npy": ("NumPy", "memmap(FILE)"),
    ".txt": ("text", "text(FILE, window=...)"),
}
_READ_ORC = "pyarrow.orc.read_table"
_ARRAYS = {  # suffix: the format, and the function that reads it as an array
    ".npz": ("NumPy", "numpy.load"),
    ".pt": ("torch", "torch.load"),
    ".pth": ("torch", "torch.load"),
    ".safetensors": ("safetensors", "safetensors.torch.load_file"),
}
_OTHERS = {
    ".xlsx": "Excel",
    ".xls": "Excel",
    ".h5": "HDF5",
    ".hdf5": "HDF5",
    ".avro": "Avro",
    ".tfrecord": "TFRecord",
    ".pkl": "pickle",
    ".pickle": "pickle",
    ".tar": "tar",
}


def refuse_ray_data(call: str, *given: Any) -> None:
    """Refuse Ray Data, because its rows cannot be accessed by number and so not be distributed to ranks.

    `given` are the arguments of `rayps.data.<call>`.

    Raises:
        DataError: one of `given` is a Ray Data dataset or iterator.
    """
    for value in given:
        if is_ray_data(value):
            raise DataError(
                f"rayps.data.{call}: a Ray Data {type(value).__name__} cannot be read: {ray_data_way()}",
                kind="ray_data",
            )


def is_ray_data(value: Any) -> bool:
    """Return whether a value is a dataset or iterator of Ray Data. Ray is not imported."""
    return any(f"{kind.__module__}.".startswith("ray.data.") for kind in type(value).__mro__)


def ray_data_way() -> str:
    """Return the text that says how rayps can read the rows of a Ray Data dataset."""
    return (
        "give rayps.data.ray(ds,\nfeatures=...), or write it once with ds.write_parquet(FOLDER), into a folder that "
        "all workers can read, and\ngive rayps.data.parquet(FOLDER, features=...)"
    )


def other_format(path: str) -> str | None:
    """Return how to convert a file whose suffix means a format other than Parquet, or None if the suffix is unknown."""
    suffixes = [suffix for suffix in PurePosixPath(path).suffixes if suffix not in _PACKED]
    suffix = suffixes[-1].lower() if suffixes else ""
    if suffix in _SOURCES:
        what, call = _SOURCES[suffix]
        return f"{what} is not Parquet: give the file to rayps.data.{call}"
    if suffix == ".orc":
        return f"ORC is not read: convert it once by pyarrow.parquet.write_table({_READ_ORC}(FILE), 'rows.parquet')"
    if suffix in _ARRAYS:
        what, reader = _ARRAYS[suffix]
        return f"files of {what} are not read: give rayps.data.tensors(x, y) the result of {reader}(FILE)"
    return f"{_OTHERS[suffix]} is not read: {CONVERT}" if suffix in _OTHERS else None


def is_pattern(path: str) -> bool:
    """Return whether a path has a wildcard: `*`, `?` or `[...]`."""
    return any(mark in path for mark in "*?") or ("[" in path and "]" in path)


def pattern(path: str, filesystem: pafs.FileSystem) -> str:
    """Return why a path with wildcards is refused, and what to give instead."""
    folder = path[: min(path.index(mark) for mark in "*?[" if mark in path)].rpartition("/")[0]
    names = (
        "sorted(str(p) for p in pathlib.Path(FOLDER).glob(PATTERN))"
        if isinstance(filesystem, pafs.LocalFileSystem)
        else "a list of its files"
    )
    return (
        f"{path}: wildcards are not expanded: give the directory ({folder or '/'}), whose files that end in .parquet "
        f"are read\nwith those of its subdirectories, or a list of files: {names}"
    )

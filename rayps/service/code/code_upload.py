"""The code of a job as the client sends it: pack the working directory, and make the job's paths relative to it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rayps_client.errors import ConfigError, ServiceError
from rayps_client.values import Json

from rayps.core.job.code_archive import hash_of, unpack
from rayps.service.code.code_files import PackedCode, pack_code
from rayps.service.code.code_origin import CodeOrigin, origin_of

_OWN = re.compile(r"[\w./~-]+\.py:[^\W\d]\w*")  # "path/file.py:Class" in a strategy's text


@dataclass(frozen=True, slots=True)
class Upload:
    """A packed working directory, where it comes from, and the job's fields that refer to it."""

    packed: PackedCode
    origin: CodeOrigin
    fields: dict[str, Json]


def prepare_upload(folder: Path, fields: Mapping[str, Json], most_bytes: int) -> Upload:
    """Pack `folder` for the job with these fields, each of which becomes as `prepare_value` returns it.

    Raises:
        ConfigError: the folder cannot be packed, or a file of the job is outside of it.
    """
    packed = pack_code(folder, most_bytes)
    found: dict[str, Json] = {name: prepare_value(name, value, folder) for name, value in fields.items()}
    return Upload(packed, origin_of(folder, packed.paths, packed.size), found | {"code": packed.hash})


def prepare_value(name: str, value: Json, folder: Path) -> Json:
    """Return the value of a job's field `name`, as it is sent with the packed `folder`.

    Paths of the workload or the function and of a user's own strategies become relative to the folder. A checkpoint to
    resume from and files with first parameters, which are not packed, get absolute paths.

    Raises:
        ConfigError: a file of the job's code is outside of the folder.
    """
    if name in ("workload", "run") and isinstance(value, str):
        return _make_relative(value, folder)
    if name == "strategy":
        return _make_strategy_relative(value, folder)
    if name in ("resume", "start_from"):
        return _make_absolute(value, folder)
    return value


def _make_absolute(given: Json, folder: Path) -> Json:
    """Return the path of a file or folder as an absolute path if it exists here; it may be a job's id."""
    if isinstance(given, dict):
        return {key: _make_absolute(value, folder) if key == "path" else value for key, value in given.items()}
    if not isinstance(given, str):
        return given
    path = folder / Path(given).expanduser()
    return str(path.resolve()) if os.path.exists(path) else given  # noqa: PTH110  Path.exists raises for a long name


def _make_relative(target: str, folder: Path) -> str:
    """Return `path/file.py:Class` with a path relative to `folder`. Raises ConfigError if it is outside of it."""
    place, colon, name = target.rpartition(":")
    if not colon or not place.endswith(".py"):
        return target
    path = (folder / Path(place).expanduser()).resolve()
    if not path.is_relative_to(folder):
        raise ConfigError(
            f"{place} is outside of the working directory {folder}, which is all that is sent: give a folder that "
            "contains it as working_dir,\nor use the service's machine's own files with upload=False (--no-upload)",
            field="working_dir",
        )
    if not path.exists():
        return target  # the service's error names the file
    return f"{path.relative_to(folder).as_posix()}:{name}"


def _make_strategy_relative(given: Json, folder: Path) -> Json:
    if isinstance(given, str):
        return _OWN.sub(lambda found: _make_relative(found[0], folder), given)
    if isinstance(given, list):
        return [_make_strategy_relative(each, folder) for each in given]
    if isinstance(given, dict):
        return {
            key: _make_strategy_relative(value, folder)
            if key == "strategy"
            else _make_relative(value, folder)
            if key == "name" and isinstance(value, str)
            else value
            for key, value in given.items()
        }
    return given


def write_code(archive: bytes, code: str, folder: Path) -> None:
    """Write the files of a downloaded archive into `folder`, which must be new or empty.

    Raises:
        ServiceError: the archive's SHA-256 is not `code`.
        ConfigError: the folder is not empty, or the archive is refused.
    """
    if hash_of(archive) != code:
        raise ServiceError(f"the service sent an archive whose SHA-256 is not {code}: download it again")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not empty: give a new folder", field="folder")
    folder.mkdir(parents=True, exist_ok=True)
    unpack(archive, folder)

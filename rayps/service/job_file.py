"""A job as a YAML file, read with suspicion: plain data only, bounded, no key twice, no anchors."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from rayps.errors import ConfigError
from rayps.job import JobSpec, misnamed

MOST_BYTES = 1_000_000


def read(path: Path, changes: Sequence[str] = ()) -> dict[str, Any]:
    """The job in a file, with `key=value` changes made to it; a relative working_dir is below the file.

    Raises:
        ConfigError: naming the file, the line or the field.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ConfigError(f"{path} has more than {MOST_BYTES} bytes: that is no job file")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"there is no job file {path}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the job file {path} cannot be read as text: {error}") from error
    data = load(text, str(path))
    if not isinstance(data, dict):
        raise ConfigError(f"{path} should hold fields such as `workload: digits.py:Digits`, one on each line")
    for change in changes:
        _change(data, change)
    for key in data:
        if key not in JobSpec.__dataclass_fields__:
            raise ConfigError(f"{path}: a job has no field {key!r}{_near(str(key))}", field=str(key))
    if "workload" not in data:
        raise ConfigError(f"{path}: a job needs a workload, e.g. `workload: digits.py:Digits`", field="workload")
    if isinstance(data["workload"], str) and (reason := misnamed(data["workload"])) is not None:
        raise ConfigError(f"{path}: {reason}", field="workload")
    if isinstance(data.get("working_dir"), str):
        data["working_dir"] = str((path.parent / data["working_dir"]).resolve())
    return data


def load(text: str, where: str) -> Any:
    """YAML as plain data.

    Raises:
        ConfigError: naming the place.
    """
    try:
        return yaml.load(text, _Loader)  # a SafeLoader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f", line {mark.line + 1}"
        raise ConfigError(f"{where}{line}: {getattr(error, 'problem', None) or error}") from error
    except RecursionError as error:
        raise ConfigError(f"{where}: nested too deeply") from error


def _change(data: dict[str, Any], change: str) -> None:
    key, equals, text = change.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {change!r} should be key=value, e.g. --set workers=4", field="set")
    *path, last = key.split(".")
    for part in path:
        inner = data.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {change!r}: {part!r} has no fields of its own", field="set")
        data = inner
    data[last] = load(text, f"--set {key}")


def _near(key: str) -> str:
    fields = sorted(JobSpec.__dataclass_fields__)
    found = difflib.get_close_matches(key, fields, 1)
    return f": did you mean {found[0]!r}?" if found else f": the fields are {', '.join(fields)}"


class _Loader(yaml.SafeLoader):
    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.constructor.ConstructorError(None, None, "anchors are not used in job files", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key!r} is there twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)

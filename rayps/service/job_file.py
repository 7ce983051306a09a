"""Read a job from a YAML file, strictly.

`read` refuses a file that is not regular or has more than `MOST_BYTES`, and YAML with tags, anchors, repeated keys, or
scalars that YAML 1.1 and 1.2 read differently.
"""

from __future__ import annotations

import copy
import difflib
import os
import re
import stat
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import yaml
from rayps_client.errors import ConfigError
from rayps_client.values import JsonObject, Keywords
from rayps_client.workload_name import misnamed

from rayps.core.job.job_fields import FIELDS
from rayps.core.job.requirements import read_requirements
from rayps.core.job.statement import read_statement
from rayps.core.strategy.elastic import explain_misplaced, workers_of_text

MOST_BYTES = 1_000_000
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
_SEXAGESIMAL = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")
_OCTAL = re.compile(r"[-+]?0[0-9_]+")
_BOOLEANS = re.compile(r"(yes|no|on|off)", re.IGNORECASE)
_DATE = re.compile(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([Tt \t].*)?")
_AMBIGUOUS = (
    (_SEXAGESIMAL, "a number in base 60"),
    (_OCTAL, "a number in base 8"),
    (_BOOLEANS, "true or false"),
    (_DATE, "a date"),
)


def read(path: Path, changes: Sequence[str] = ()) -> Keywords:
    """Read a job from a file and apply `key=value` changes. A relative working_dir is relative to the file's folder.

    Raises:
        ConfigError: the file is not a valid job. The error names the file, and the line or the field.
    """
    data = load(_read_text(path), str(path))
    if not isinstance(data, dict):
        raise ConfigError(f"{path} should hold fields such as `workload: digits.py:Digits`, one on each line")
    for change in changes:
        _apply_change(data, _write_in_full(change))
    for key in data:
        if key not in FIELDS:
            raise ConfigError(f"{path}: {_explain_no_field(key)}", field=str(key))
    if data.get("workload") is None and data.get("run") is None:
        raise ConfigError(
            f"{path}: a job needs a workload, e.g. `workload: digits.py:Digits`, or `run: train.py:train_fn`",
            field="workload",
        )
    if isinstance(data.get("workload"), str) and (reason := misnamed(data["workload"])) is not None:
        raise ConfigError(f"{path}: {reason}", field="workload")
    if isinstance(data.get("workers"), str) and ".." in data["workers"]:
        data["workers"] = workers_of_text(data["workers"])
    if isinstance(data.get("working_dir"), str):
        data["working_dir"] = str((path.parent / data["working_dir"]).resolve())
    if isinstance(data.get("requirements"), str):
        data["requirements"] = read_requirements(path.parent / data["requirements"])
    if isinstance(data.get("statement"), str):
        data["statement"] = read_statement(path.parent / data["statement"])
    return data


def apply_changes(fields: Keywords, changes: Sequence[str]) -> Keywords:
    """Return a job's fields with `key=value` changes applied. Raises ConfigError if a change or a field is wrong."""
    found = copy.deepcopy(fields)
    for change in changes:
        _apply_change(found, _write_in_full(change))
    for key in found:
        if key not in FIELDS:
            raise ConfigError(_explain_no_field(key), field=str(key))
    return found


def of_function(target: str, changes: Sequence[str] = ()) -> Keywords:
    """Return the fields of a job that runs the function `target`, with `key=value` changes.

    Raises:
        ConfigError: a change is invalid, or sets a field that a job does not have.
    """
    return apply_changes({"run": target}, changes)


def _read_text(path: Path) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            kind = os.fstat(descriptor).st_mode  # not of `path`, which may name another file by now
            if not stat.S_ISREG(kind):
                name = next((name for known, name in _KINDS if known(kind)), "no regular file")
                raise ConfigError(f"the job file {path} is {name}: give a regular file")
            with open(descriptor, encoding="utf-8", closefd=False) as file:
                text = file.read(MOST_BYTES + 1)
        finally:
            os.close(descriptor)
    except FileNotFoundError as error:
        way = ""
        if ":" in path.name:
            way = f": to submit this workload, write `workload: {path}` into a YAML file, or use `--run` for a function"
        raise ConfigError(f"there is no job file {path}{way}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the job file {path} cannot be read as text: {error}") from error
    if len(text) > MOST_BYTES:
        raise ConfigError(f"{path} has more than {MOST_BYTES} bytes, the limit of a job file")
    return text


def parse_assignments(changes: Sequence[str], option: str = "--set", example: str = "lr=0.3") -> JsonObject:
    """Return the values that `NAME=VALUE` texts give to names. A value is YAML: 3, 0.1, true, null, [64, 32], or text.

    Errors name the `option` of the command, with an `example` of its value.

    Raises:
        ConfigError: a text is not NAME=VALUE, its value is not valid YAML, or a name occurs twice.
    """
    found: JsonObject = {}
    for change in changes:
        name, equals, text = change.partition("=")
        if not equals or not name:
            raise ConfigError(f"{option} {change!r} should be NAME=VALUE, e.g. {option} {example}", field=option[2:])
        if name in found:
            raise ConfigError(f"{option} {name} was given twice: give one value", field=option[2:])
        found[name] = load(text, f"{option} {name}")
    return found


def load(text: str, where: str) -> Any:
    """Parse YAML into plain data: only what YAML 1.1 and the core schema of YAML 1.2 read in the same way.

    A plain scalar that YAML 1.1 reads differently is refused: `1:30` (90 in base 60), `010` (8 in base 8), `yes`, `no`,
    `on`, `off` (booleans), dates. The exception is `1e-3`, which is a number as in YAML 1.2.

    Raises:
        ConfigError: the text is not valid YAML, or has a refused scalar. The error names `where` and the line.
    """
    try:
        return yaml.load(text, _Loader)  # a SafeLoader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f", line {mark.line + 1}"
        raise ConfigError(f"{where}{line}: {getattr(error, 'problem', None) or error}") from error
    except RecursionError as error:
        raise ConfigError(f"{where}: the YAML is nested too deeply") from error


def _apply_change(data: Keywords, change: str) -> None:
    key, equals, text = change.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {change!r} should be key=value, e.g. --set workers=4", field="set")
    *path, last = key.split(".")
    for part in path:
        inner = data.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {change!r}: {part!r} is one value and has no fields to set", field="set")
        data = inner
    data[last] = load(text, f"--set {key}")


def _write_in_full(change: str) -> str:
    """Return a change of a parameter as `params.NAME=VALUE`. A name that resembles a field of a job stays as it is."""
    name = re.split(r"[.=]", change, maxsplit=1)[0]
    known = not name.isidentifier() or name in FIELDS or difflib.get_close_matches(name, FIELDS, 1)
    return change if known or "=" not in change else f"params.{change}"


def _explain_no_field(key: object) -> str:
    if key == "rounds":
        return "a job has no field 'rounds': a federated job runs one round in each epoch; write epochs"
    fields = sorted(FIELDS)
    found = difflib.get_close_matches(str(key), fields, 1)
    hint = f"did you mean {found[0]!r}, or params.{key}?" if found else f"the fields are {', '.join(fields)}"
    return explain_misplaced(key) or f"a job has no field {key!r}: {hint}"


class _Loader(yaml.SafeLoader):
    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.constructor.ConstructorError(None, None, "anchors are not used in job files", mark)
        node = super().compose_node(parent, index)
        if isinstance(node, yaml.ScalarNode) and not node.style and node.tag != "tag:yaml.org,2002:str":
            for pattern, reading in _AMBIGUOUS:
                if pattern.fullmatch(node.value):
                    raise yaml.constructor.ConstructorError(
                        None,
                        None,
                        f"{node.value} is {reading} in YAML 1.1: write a plain number, true or "
                        f"false, or a text in quotes ({node.value!r})",
                        node.start_mark,
                    )
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} occurs twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)

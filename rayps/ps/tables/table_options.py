"""A table from what a user wrote. Pure."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from rayps.core.errors import ConfigError
from rayps.ps.protocol.space import SparseTable
from rayps.ps.tables.table_segment import check_table

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


def made_table(
    dim: Any, name: Any, seed: Any, init: Any, optimizer: Any, policy: Any, dtype: Any, segments: Any
) -> SparseTable:
    """A `SparseTable` from what a user wrote. Raises ConfigError."""
    for field, value, least in (("dim", dim, 1), ("segments", segments, 1), ("seed", seed, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{field} is {value!r}: give a whole number of at least {least}", field=field)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"table is {name!r}: give a name of letters, digits, '_', '-' and '.', e.g. 'users'", field="table"
        )
    text = str(dtype).removeprefix("torch.")
    if text not in ("float32", "float64"):
        raise ConfigError(
            f"dtype is {text!r}: give float32 or float64 (wire='bf16' halves what travels)", field="dtype"
        )
    if dataclasses.is_dataclass(policy) and not isinstance(policy, type):  # a `rayps.ps.tables.row_lifecycle.RowPolicy`
        fields = dataclasses.fields(policy)
        policy = {f.name: getattr(policy, f.name) for f in fields if getattr(policy, f.name) != f.default}
    if policy is not None and not isinstance(policy, Mapping):
        raise ConfigError(f"policy is {policy!r}: give a dict such as {{'admit': 3, 'ttl': 10000}}", field="policy")
    rule, start = options_of("optimizer", optimizer), options_of("init", init)
    found = SparseTable(name, dim, segments, seed, text, rule, start, dict(policy or {}))
    check_table(found)
    return found


def wire_of(given: Any) -> str | None:
    """How rows travel: as they are (None) or as "bf16". Raises ConfigError."""
    if given in (None, "bf16"):
        return given  # type: ignore[no-any-return]
    raise ConfigError(f"wire is {given!r}: give none (rows travel as they are) or 'bf16'", field="wire")


def options_of(field: str, given: Any) -> dict[str, Any]:
    """A name and its numbers, from {"name": "adagrad", "lr": 0.1} or from "adagrad:lr=0.1". Raises ConfigError."""
    if isinstance(given, Mapping) and isinstance(given.get("name"), str):
        return dict(given)
    if isinstance(given, str):
        name, _, rest = given.partition(":")
        pairs = [piece.partition("=") for piece in rest.split(",") if piece]
        try:
            return {"name": name.strip()} | {key.strip(): float(value) for key, _, value in pairs}
        except ValueError:
            pass
    raise ConfigError(
        f"{field} is {given!r}: give a name and its numbers, such as 'adagrad:lr=0.1' or "
        "{'name': 'adagrad', 'lr': 0.1}",
        field=field,
    )

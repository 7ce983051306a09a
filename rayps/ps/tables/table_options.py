"""Parse a table's options as a user writes them. Pure."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypedDict

from rayps_client.errors import ConfigError
from rayps_client.values import Json

from rayps.ps.protocol.space import SparseTable
from rayps.ps.tables.row_lifecycle import RowPolicy
from rayps.ps.tables.table_segment import check_table

if TYPE_CHECKING:
    import torch

Options = str | Mapping[str, Json]  # "adagrad:lr=0.1" or {"name": "adagrad", "lr": 0.1}


class TableOptions(TypedDict, total=False):
    """The optional arguments of `rayps.Embedding`."""

    seed: int
    init: Options
    optimizer: Options
    policy: RowPolicy | Mapping[str, Json] | None
    dtype: str | torch.dtype
    wire: str | None
    segments: int


_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


def make_table(
    dim: int,
    name: str,
    *,
    seed: int,
    init: Options,
    optimizer: Options,
    policy: RowPolicy | Mapping[str, Json] | None,
    dtype: str | torch.dtype,
    segments: int,
) -> SparseTable:
    """Parse a table's options, and return the table. Raises ConfigError if an option is not valid."""
    for field, value, least in (("dim", dim, 1), ("segments", segments, 1), ("seed", seed, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{field} is {value!r}: give a whole number of at least {least}", field=field)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"table is {name!r}: give a name of letters, digits, '_', '-' and '.', e.g. 'users'", field="table"
        )
    text = str(dtype).removeprefix("torch.")
    if text not in ("float32", "float64"):
        wanted = "float32 or float64 (wire='bf16' halves the bytes sent)"
        raise ConfigError(f"dtype is {text!r}: give {wanted}", field="dtype")
    if isinstance(policy, RowPolicy):
        fields = dataclasses.fields(policy)
        policy = {f.name: getattr(policy, f.name) for f in fields if getattr(policy, f.name) != f.default}
    if policy is not None and not isinstance(policy, Mapping):
        raise ConfigError(f"policy is {policy!r}: give a dict such as {{'admit': 3, 'ttl': 10000}}", field="policy")
    rule, start = options_of("optimizer", optimizer), options_of("init", init)
    found = SparseTable(name, dim, segments, seed, text, rule, start, dict(policy or {}))
    check_table(found)
    return found


def wire_of(given: str | None) -> str | None:
    """Return the dtype in which rows are sent: "bf16", or None for the table's dtype.

    Raises ConfigError if `given` is neither.
    """
    if given in (None, "bf16"):
        return given
    raise ConfigError(f"wire is {given!r}: give None (rows are sent in the table's dtype) or 'bf16'", field="wire")


def options_of(field: str, given: Options) -> dict[str, Json]:
    """Convert the option `field` to a dict of a name and numbers, from such a dict or from text like "sgd:lr=0.1".

    Raises ConfigError if `given` is neither.
    """
    if isinstance(given, Mapping) and isinstance(given.get("name"), str):
        return dict(given)
    if isinstance(given, str):
        name, _, rest = given.partition(":")
        pairs = [piece.partition("=") for piece in rest.split(",") if piece]
        try:
            return {"name": name.strip()} | {key.strip(): float(value) for key, _, value in pairs}
        except ValueError:
            pass
    example = "'adagrad:lr=0.1' or {'name': 'adagrad', 'lr': 0.1}"
    raise ConfigError(f"{field} is {given!r}: give a name and its numbers, such as {example}", field=field)

"""The state that a loop saves, as tensors by name and JSON data, and its place in a checkpoint. No I/O, no pickle.

A state is a dict of tensors, numbers, texts, None, lists, tuples and dicts; an object with `state_dict()`, such as a
module, an optimizer or a scheduler, stands for its state dict. Each rank's part has the state, and what rayps adds: the
states of wrapped optimizers, the number of steps, and torch's random state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias, runtime_checkable

from rayps_client.errors import CheckpointError, ConfigError
from rayps_client.values import Json
from torch import Tensor

from rayps.tensors.checkpoints.checkpoint import SavedState

KIND = "own_loop"  # the key of a checkpoint's `meta` that states that an own loop saved it
Tree: TypeAlias = Any  # JSON data that `encode_value` returned


@runtime_checkable
class HasState(Protocol):
    """A module, an optimizer, a scheduler, or another object whose state is a dict."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""


@dataclass(slots=True)
class SavedPart:
    """One rank's part of a save: tensors by name, and JSON data that refers to them."""

    number: int  # the number of the save in this run, from 1
    steps: int  # optimizer steps that the rank had taken
    tensors: dict[str, Tensor] = field(default_factory=dict)
    tree: Tree = None
    logged: int = -1  # the step of the rank's last logged point; -1 if it has logged none

    def content(self, key: str) -> Any:
        """Return the value of one key of the saved dict."""
        return next(decode_value(item, self.tensors) for name, item in self.tree["dict"] if name == key)


def encode_value(value: Any, tensors: dict[str, Tensor], where: str = "state") -> Tree:
    """Return `value` as JSON data, and add copies of its tensors, on the CPU, to `tensors`.

    Raises:
        ConfigError: the value has an object that is neither plain data nor a tensor, and no `state_dict()`. The error
            names its place.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, Tensor):
        name = f"{len(tensors):05d}/{where}"
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        return {"tensor": name}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, (str, int, float, bool)) and key is not None:
                raise ConfigError(f"{where} has the key {key!r}: rayps.save takes keys that are texts or numbers")
        return {"dict": [[key, encode_value(item, tensors, f"{where}.{key}")] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [encode_value(item, tensors, f"{where}.{i}") for i, item in enumerate(value)]}
    if isinstance(value, HasState):
        return encode_value(value.state_dict(), tensors, where)
    raise ConfigError(
        f"rayps.save cannot save {where}, which is {type(value).__name__}: give tensors, numbers, texts, lists, tuples "
        "and dicts, or an object with state_dict() such as a module or an optimizer",
        field=where,
    )


def decode_value(tree: Tree, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that `encode_value` was given; a `state_dict()` stands in place of its object."""
    if not isinstance(tree, dict):
        return tree
    [(kind, content)] = tree.items()
    match kind:
        case "float":
            return float(content)
        case "tensor":
            return tensors[content].clone()
        case "dict":
            return {key: decode_value(item, tensors) for key, item in content}
        case "list":
            return [decode_value(item, tensors) for item in content]
        case "tuple":
            return tuple(decode_value(item, tensors) for item in content)
    raise CheckpointError(f"the saved state has data of the kind {kind!r}, which this version of rayps cannot read")


def checkpoint_of(parts: Mapping[int, SavedPart]) -> SavedState:
    """Return the checkpoint of one save, from the parts of all ranks."""
    state = SavedState()
    ranks: dict[str, Json] = {}
    for rank, part in sorted(parts.items()):
        state.tensors |= {f"rank_{rank}/{name}": value for name, value in part.tensors.items()}
        ranks[str(rank)] = {"steps": part.steps, "logged": part.logged, "tree": part.tree}
    state.meta = {KIND: {"number": next(iter(parts.values())).number, "ranks": ranks}}
    return state


def parts_of(state: SavedState, workers: int | None, path: str) -> list[SavedPart]:
    """Return the ranks' parts of a checkpoint, which must have been saved by `workers`, unless None.

    Raises:
        CheckpointError: a workload's job saved the checkpoint, or a run with another number of workers did.
    """
    found = state.meta.get(KIND)
    if not isinstance(found, dict):
        raise CheckpointError(
            f"{path} is the checkpoint of a workload, and not of a loop of your own: resume it with rayps.train, or "
            "give a folder that rayps.save wrote",
            path=path,
        )
    ranks = found["ranks"]
    if workers is not None and len(ranks) != workers:
        raise CheckpointError(
            f"{path} was saved by {len(ranks)} workers, and this run has {workers}: resume it with "
            f"workers={len(ranks)}",
            path=path,
        )
    parts = []
    for rank in range(len(ranks)):
        prefix, held = f"rank_{rank}/", ranks[str(rank)]
        tensors = {name.removeprefix(prefix): t for name, t in state.tensors.items() if name.startswith(prefix)}
        number, steps, logged = int(found["number"]), int(held["steps"]), int(held.get("logged", -1))
        parts.append(SavedPart(number, steps, tensors, held["tree"], logged))
    return parts


class PartsBySave:
    """Collects the parts of saves until all ranks have sent theirs. Pure."""

    def __init__(self, size: int, kept: int = 8) -> None:
        """Set the number of ranks. At most `kept` incomplete saves are kept; older ones are dropped."""
        self._size, self._kept = size, kept
        self._parts: dict[int, dict[int, SavedPart]] = {}
        self.counts = [0] * size  # the number of the last save of each rank
        self.complete = 0  # the number of the newest complete save
        # what is added to the numbers of a rank's saves; None: to be found at the next save of a rank that was replaced
        self._shifts: list[int | None] = [0] * size

    def continue_alone(self, rank: int) -> None:
        """Let a rank continue from a saved state while the others go on.

        If it is so far behind that its saves would come too late for those of the others, its next save belongs to the
        newest one that all others have sent.
        """
        self._shifts[rank] = None

    def add(self, rank: int, part: SavedPart) -> dict[int, SavedPart] | None:
        """Add a part. Return all parts of its save if the save is now complete and newer than every other one."""
        self.counts[rank] = part.number
        part = replace(part, number=part.number + self._shift(rank))
        held = self._parts.setdefault(part.number, {})
        held[rank] = part
        if len(held) == self._size and part.number > self.complete:
            self.complete = part.number
            self._parts = {number: parts for number, parts in self._parts.items() if number > part.number}
            return held
        for number in sorted(self._parts)[: -self._kept]:
            del self._parts[number]
        return None

    def _shift(self, rank: int) -> int:
        found = self._shifts[rank]
        if found is None:
            others = [count + (self._shifts[each] or 0) for each, count in enumerate(self.counts) if each != rank]
            late = min(others, default=0) - self.counts[rank]
            found = self._shifts[rank] = late if late >= self._kept else 0
        return found

    def uneven(self) -> str | None:
        """Return why saves are incomplete at the end of a run, or None if they are not.

        Call it when all functions have returned.
        """
        most, least = max(self.counts), min(self.counts)
        if most == least:
            return None
        who, other = self.counts.index(most), self.counts.index(least)
        return (
            f"rayps.save was called {most} times on worker-{who} and {least} times on worker-{other}: a state is kept "
            "only when every worker has saved it; call rayps.save on every worker (of a plain state, rank 0's is kept)"
        )

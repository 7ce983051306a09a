"""The layers of a model that stay with a client: which names match, and the shared part of a vector, as bytes.

A pattern is the name of a parameter, of a buffer or of a module, which stands for all below it ("head", "layers.3"), or
a glob pattern of whole names ("*.bias"). The rest is the shared part: the elements of the vector in their order,
without the private ones. A client sends the shared part alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from rayps_client.errors import ConfigError
from rayps_client.local_trainer import LayoutRow, RawTensors
from rayps_client.raw_tensors import RawTensor, item_bytes

PRIVATE = "private/"  # prefix, in a client's state, of the names of private parameters and buffers
_SHOWN = 6  # the largest number of names in an error


def private_names(
    patterns: Collection[str], parameters: Collection[str], buffers: Collection[str]
) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of the parameters and of the buffers that match `patterns`.

    Raises:
        ConfigError: a pattern matches nothing, or the patterns match all parameters.
    """
    for pattern in patterns:
        if not any(_matches(name, pattern) for name in (*parameters, *buffers)):
            raise ConfigError(
                f"private is {pattern!r}, but no parameter of the model has such a name: it has {_listed(parameters)}. "
                'Give the name of a\nparameter or module ("head"), or a glob pattern ("*.bias")',
                field="private",
            )
    mine = frozenset(name for name in parameters if any(_matches(name, each) for each in patterns))
    if patterns and len(mine) == len(parameters):
        raise ConfigError(
            f"private is {', '.join(patterns)}, which matches all parameters of the model ({_listed(parameters)}), so "
            "that clients would learn nothing\nfrom one another: give fewer names",
            field="private",
        )
    return mine, frozenset(name for name in buffers if any(_matches(name, each) for each in patterns))


@dataclass(frozen=True, slots=True)
class PrivateParts:
    """Which parameters and buffers of one model are private. The methods change nothing if none is."""

    layout: Sequence[LayoutRow]
    parameters: frozenset[str]  # the names of the private parameters
    buffers: frozenset[str]  # the names of the private buffers

    @classmethod
    def of(cls, patterns: Collection[str], layout: Sequence[LayoutRow], buffers: Collection[str]) -> PrivateParts:
        """Find the names that match. Raises ConfigError as `private_names` does."""
        return cls(layout, *private_names(patterns, [name for name, _, _ in layout], buffers))

    def __bool__(self) -> bool:
        """Return whether anything is private."""
        return bool(self.parameters or self.buffers)

    @property
    def shared(self) -> frozenset[str]:
        """The names of the parameters that are not private."""
        return frozenset(name for name, _, _ in self.layout) - self.parameters

    def cut(self, w: RawTensor) -> RawTensor:
        """Return the shared part of the vector `w`: a copy, or `w` itself if no parameter is private."""
        if not self.parameters:
            return w
        data = b"".join(part for name, _, part in self._parts(w) if name not in self.parameters)
        return RawTensor(w.dtype, (len(data) // item_bytes(w.dtype),), data)

    def own_start(self, w: RawTensor, state: Mapping[str, RawTensor]) -> RawTensor:
        """Return the vector `w` with the private parameters of a client's state.

        What the state lacks does not change: a client that has taken no part has the initial values.
        """
        if not self.parameters:
            return w
        stored = {name: state.get(f"{PRIVATE}{name}") for name in self.parameters}
        parts = list[bytes]()
        for name, shape, part in self._parts(w):
            own = stored.get(name)
            parts.append(bytes(own.data) if own is not None and own.shape == tuple(shape) else part)
        return RawTensor(w.dtype, w.shape, b"".join(parts))

    def own_buffers(self, state: Mapping[str, RawTensor]) -> RawTensors:
        """Return the private buffers of a client's state."""
        return {name: state[f"{PRIVATE}{name}"] for name in self.buffers if f"{PRIVATE}{name}" in state}

    def without_private(self, buffers: Mapping[str, RawTensor]) -> RawTensors:
        """Return the buffers that are not private."""
        return {name: raw for name, raw in buffers.items() if name not in self.buffers}

    def state_of(self, w: RawTensor, buffers: Mapping[str, RawTensor]) -> RawTensors:
        """Return copies of the private parameters and buffers, under their names in a client's state."""
        own = {
            name: RawTensor(w.dtype, tuple(shape), part)
            for name, shape, part in self._parts(w)
            if name in self.parameters
        }
        for name, raw in buffers.items():
            if name in self.buffers:
                own[name] = RawTensor(raw.dtype, raw.shape, bytes(raw.data))
        return {f"{PRIVATE}{name}": raw for name, raw in own.items()}

    def _parts(self, w: RawTensor) -> list[tuple[str, list[int], bytes]]:
        """Return the name, shape and bytes of each parameter in the vector `w`."""
        data, size, at = memoryview(w.data).cast("B"), item_bytes(w.dtype), 0
        found = []
        for name, shape, _ in self.layout:
            end = at + math.prod(shape) * size
            found.append((name, shape, bytes(data[at:end])))
            at = end
        return found


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or name.startswith(f"{pattern}.") or fnmatchcase(name, pattern)


def _listed(names: Collection[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(list(names)[:_SHOWN]) + (f" and {more} more" if more > 0 else "")

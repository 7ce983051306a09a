"""The layers of a model that stay with a client: which names match, and where they are in the model's vector.

`PrivateParts` has the names and the positions. `PrivateBytes` cuts bytes by them, and
`rayps.federated.private_layers.PrivateLayers` cuts tensors.

A pattern is the name of a parameter, of a buffer or of a module, which stands for all below it ("head", "layers.3"), or
a glob pattern of whole names ("*.bias"). The rest is the shared part: the elements of the vector in their order,
without the private ones. A client sends the shared part alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple, Self, TypeVar

from rayps_client.errors import ConfigError
from rayps_client.exchange.raw_tensors import RawTensor, item_bytes
from rayps_client.trainers.local_trainer import RawTensors

PRIVATE = "private/"  # prefix, in a client's state, of the names of private parameters and buffers
V = TypeVar("V")  # buffers: bytes or tensors
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


class PrivateParameter(NamedTuple):
    """A private parameter: its name in a client's state, its elements lo to hi of the vector, and its shape."""

    key: str
    lo: int
    hi: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PrivateParts:
    """Which parameters and buffers of one model are private, and which elements of its vector are shared."""

    parameters: frozenset[str]  # the names of the private parameters
    buffers: frozenset[str]  # the names of the private buffers
    shared: frozenset[str]  # the names of the parameters that are not private
    own: tuple[PrivateParameter, ...]  # the private parameters, in the order of the vector
    runs: tuple[tuple[int, int], ...]  # the bounds (lo, hi) of each run of shared elements

    @classmethod
    def of(
        cls, patterns: Collection[str], shapes: Iterable[tuple[str, Sequence[int]]], buffers: Collection[str]
    ) -> Self:
        """Find the names that match. `shapes`: the name and shape of each parameter, in the order of the vector.

        Raises:
            ConfigError: a pattern matches nothing, or the patterns match all parameters.
        """
        entries = [(name, tuple(shape)) for name, shape in shapes]
        parameters, own_buffers = private_names(patterns, [name for name, _ in entries], list(buffers))
        own, runs, lo = list[PrivateParameter](), list[tuple[int, int]](), 0
        for name, shape in entries:
            hi = lo + math.prod(shape)
            if name in parameters:
                own.append(PrivateParameter(_key(name), lo, hi, shape))
            elif runs and runs[-1][1] == lo:
                runs[-1] = (runs[-1][0], hi)
            else:
                runs.append((lo, hi))
            lo = hi
        shared = frozenset(name for name, _ in entries) - parameters
        return cls(parameters, own_buffers, shared, tuple(own), tuple(runs))

    def __bool__(self) -> bool:
        """Return whether anything is private."""
        return bool(self.parameters or self.buffers)

    @property
    def shared_size(self) -> int:
        """The number of elements of the shared part."""
        return sum(hi - lo for lo, hi in self.runs)

    def without_private(self, buffers: Mapping[str, V]) -> dict[str, V]:
        """Return the buffers that are not private."""
        return {name: value for name, value in buffers.items() if name not in self.buffers}

    def own_buffers(self, state: Mapping[str, V]) -> dict[str, V]:
        """Return the private buffers of a client's state, by their names in the model."""
        return {name: state[_key(name)] for name in self.buffers if _key(name) in state}

    def buffers_to_store(self, buffers: Mapping[str, V]) -> dict[str, V]:
        """Return the private ones of a model's buffers, by their names in a client's state."""
        return {_key(name): value for name, value in buffers.items() if name in self.buffers}


class PrivateBytes(PrivateParts):
    """The private layers of a model whose vector is bytes. The methods change nothing if none is private."""

    __slots__ = ()

    def cut(self, w: RawTensor) -> RawTensor:
        """Return the shared part of the vector `w`: a copy, or `w` itself if no parameter is private."""
        if not self.parameters:
            return w
        data, size = memoryview(w.data).cast("B"), item_bytes(w.dtype)
        shared = b"".join(data[lo * size : hi * size] for lo, hi in self.runs)
        return RawTensor(w.dtype, (self.shared_size,), shared)

    def own_start(self, w: RawTensor, state: Mapping[str, RawTensor]) -> RawTensor:
        """Return the vector `w` with the private parameters of a client's state.

        What the state lacks does not change: a client that has taken no part has the initial values.
        """
        if not self.parameters:
            return w
        data, size = bytearray(w.data), item_bytes(w.dtype)
        for key, lo, hi, shape in self.own:
            value = state.get(key)
            if value is not None and value.shape == shape:
                data[lo * size : hi * size] = value.data
        return RawTensor(w.dtype, w.shape, data)

    def state_of(self, w: RawTensor, buffers: Mapping[str, RawTensor]) -> RawTensors:
        """Return copies of the private parameters and buffers, by their names in a client's state."""
        data, size = memoryview(w.data).cast("B"), item_bytes(w.dtype)
        own = {key: RawTensor(w.dtype, shape, bytes(data[lo * size : hi * size])) for key, lo, hi, shape in self.own}
        stored = self.buffers_to_store(buffers).items()
        return own | {key: RawTensor(raw.dtype, raw.shape, bytes(raw.data)) for key, raw in stored}


def _key(name: str) -> str:
    """Return the name, in a client's state, of a private parameter or buffer."""
    return f"{PRIVATE}{name}"


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or name.startswith(f"{pattern}.") or fnmatchcase(name, pattern)


def _listed(names: Collection[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(list(names)[:_SHOWN]) + (f" and {more} more" if more > 0 else "")

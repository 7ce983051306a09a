"""The state of some elements of the vector as named pieces of whole parameters, as a checkpoint in parts has it.

A piece is a flat range of a parameter, or of the optimizer's state of a parameter. Its offset is the number of elements
of the parameter before the piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rayps.tensors.checkpoints.checkpoint_manifest import TensorFacts
from rayps.tensors.flat import Entry, Layout
from rayps.tensors.optim import PER_PARAMETER, Moments, ParamState, is_elementwise, moments_of, split_moments


@dataclass(slots=True)
class StatePieces:
    """Tensors named as in a checkpoint ("model/0.weight", "optim/0.weight/exp_avg"), and the offsets of pieces.

    A tensor without an offset is whole. `numbers` are the numbers in the optimizer's state, by parameter. `frozen` has
    the shapes of the whole frozen parameters of which "frozen/NAME" are pieces, by name.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    offsets: dict[str, int] = field(default_factory=dict)
    numbers: dict[str, ParamState] = field(default_factory=dict)
    frozen: dict[str, tuple[int, ...]] = field(default_factory=dict)


def entries_of(layout: Layout, ranges: Iterable[tuple[int, int]]) -> list[Entry]:
    """Return the pieces of parameters in some ranges of the vector. A parameter must be in one range only."""
    return [piece for lo, hi in ranges for piece in layout.pieces(lo, hi)]


def list_wanted(
    layout: Layout, ranges: Iterable[tuple[int, int]], contents: Mapping[str, TensorFacts]
) -> dict[str, tuple[int, int] | None]:
    """Return what to read of a checkpoint for the elements in `ranges`: see `checkpoint_parts.read_pieces`.

    `contents` has the shapes of the checkpoint's tensors: see `checkpoint_parts.read_contents`.
    """
    whole = {entry.name: entry for entry in layout.entries}
    pieces = {piece.name: piece for piece in entries_of(layout, ranges)}
    found: dict[str, tuple[int, int] | None] = {}
    for key, facts in contents.items():
        piece = pieces.get(parameter_of(key))
        if piece is not None:
            entry = whole[piece.name]
            counts = key.startswith("optim/") and key.rpartition("/")[2] in PER_PARAMETER
            cut = tuple(facts["shape"]) == entry.shape and not counts
            found[key] = (piece.lo - entry.lo, piece.hi - entry.lo) if cut else None
    return found


def parameter_of(key: str) -> str:
    """Return the parameter of a tensor "model/NAME" or "optim/NAME/KEY" of a checkpoint, or "" for another tensor."""
    kind, _, rest = key.partition("/")
    return rest if kind == "model" else rest.rpartition("/")[0] if kind == "optim" else ""


def find_whole_shapes(layout: Layout, keys: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the whole parameters, and of their states, of which the tensors `keys` are pieces."""
    shapes = {entry.name: entry.shape for entry in layout.entries}
    return {key: shapes[parameter_of(key)] for key in keys if parameter_of(key) in shapes}


def pieces_of(
    layout: Layout, ranges: Iterable[tuple[int, int]], vector: Tensor, moments: Moments, *, empty: bool = False
) -> StatePieces:
    """Return the state of the elements in `ranges` as copies on the CPU.

    `moments` is the optimizer's state of these elements, as `SlicedOptimizer.moments` returns it; it is not copied.
    `empty`: also return the parameters that have no elements, which are in no range.
    """
    start = {entry.name: entry.lo for entry in layout.entries}
    tensors, numbers = split_moments(moments)
    found = StatePieces(tensors, {}, numbers)
    for piece in entries_of(layout, ranges):
        offset = piece.lo - start[piece.name]
        found.tensors[f"model/{piece.name}"] = vector[piece.lo : piece.hi].to("cpu", copy=True)
        found.offsets[f"model/{piece.name}"] = offset
        for key, value in moments.get(piece.name, {}).items():
            if is_elementwise(key, value, piece.hi - piece.lo):
                found.offsets[f"optim/{piece.name}/{key}"] = offset
            elif offset:  # the piece at the parameter's begin has this value too
                found.tensors.pop(f"optim/{piece.name}/{key}", None)
    for entry in layout.entries if empty else ():
        if entry.lo == entry.hi:
            found.tensors[f"model/{entry.name}"] = torch.empty(entry.shape, dtype=layout.dtype)
    return found


def fill(layout: Layout, pieces: dict[str, Tensor], vector: Tensor, ranges: Iterable[tuple[int, int]]) -> None:
    """Copy the pieces of parameters, by their names in a checkpoint, into the elements of `vector` in `ranges`."""
    with torch.no_grad():
        for piece in entries_of(layout, ranges):
            vector[piece.lo : piece.hi].copy_(pieces[f"model/{piece.name}"].reshape(-1))


def join_moments(pieces: dict[str, Tensor], numbers: dict[str, ParamState]) -> Moments:
    """Return the optimizer's state of pieces, for `SlicedOptimizer.restore`. `numbers` has those of all parameters."""
    names = {name.removeprefix("model/") for name in pieces if name.startswith("model/")}
    return moments_of(pieces, {name: held for name, held in numbers.items() if name in names})

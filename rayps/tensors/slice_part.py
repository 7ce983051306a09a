"""A slice of the parameter vector, with its optimizer state, as tensors of a checkpoint's part.

A process that holds elements lo to hi of the vector writes `part_of_slice`. A process that is to hold other elements
reads `wanted` of the checkpoint, of one with whole tensors too, and gets its slice from `slice_of`. The names of the
tensors are those of `rayps.tensors.snapshot.Snapshot.to_state`.

A state of one number for each element is cut as its parameter is. Any other state, such as a count of steps, is equal
in all pieces of a parameter: the process with the parameter's first element writes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rayps.tensors.checkpoint_manifest import TensorFacts
from rayps.tensors.flat import Entry, Layout
from rayps.tensors.optim import PER_PARAMETER, Moments, ParamState, elementwise

_MODEL, _OPTIM = "model/", "optim/"


@dataclass(slots=True)
class SlicePart:
    """The part of a slice: `tensors` and `offsets` for `write_part`, and `numbers`, the state that is no tensor.

    The union of all parts' `numbers` is the entry "optimizer_numbers" of the checkpoint's `meta`.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    offsets: dict[str, int] = field(default_factory=dict)
    numbers: dict[str, ParamState] = field(default_factory=dict)


def part_of_slice(layout: Layout, lo: int, hi: int, params: Tensor, moments: Moments) -> SlicePart:
    """Return the part of elements lo to hi, without a copy.

    `params` are these elements [hi - lo], and `moments` is the state of their pieces, as `SlicedOptimizer.moments`
    returns it.
    """
    part, whole = SlicePart(), {entry.name: entry for entry in layout.entries}
    for piece in [*layout.pieces(lo, hi), *_empty(layout, lo, hi)]:
        entry = whole[piece.name]
        part.tensors[f"{_MODEL}{piece.name}"] = params[piece.lo - lo : piece.hi - lo]
        part.offsets[f"{_MODEL}{piece.name}"] = piece.lo - entry.lo
        for key, value in moments.get(piece.name, {}).items():
            name = f"{_OPTIM}{piece.name}/{key}"
            if elementwise(key, value, piece.hi - piece.lo):
                part.tensors[name] = value
                part.offsets[name] = piece.lo - entry.lo
            elif piece.lo != entry.lo:
                continue
            elif isinstance(value, Tensor):
                part.tensors[name] = value
            else:
                part.numbers.setdefault(piece.name, {})[key] = value
    return part


def _empty(layout: Layout, lo: int, hi: int) -> list[Entry]:
    """Return the parameters without elements that belong to a slice."""
    last = hi == layout.size
    return [e for e in layout.entries if e.lo == e.hi and (lo <= e.lo < hi or (last and e.lo == hi))]


def whole_shapes(layout: Layout, offsets: Iterable[Mapping[str, int]]) -> dict[str, Sequence[int]]:
    """Return the shape of each tensor that is in pieces, for `seal`. `offsets` are those of all parts."""
    shapes = {entry.name: entry.shape for entry in layout.entries}
    return {key: shapes[_parameter(key)] for held in offsets for key in held if _parameter(key) in shapes}


def _parameter(key: str) -> str:
    """Return the parameter of a tensor "model/NAME" or "optim/NAME/KEY", or "" for another tensor."""
    if key.startswith(_MODEL):
        return key.removeprefix(_MODEL)
    return key.removeprefix(_OPTIM).rpartition("/")[0] if key.startswith(_OPTIM) else ""


def wanted(layout: Layout, lo: int, hi: int, contents: Mapping[str, TensorFacts]) -> dict[str, tuple[int, int] | None]:
    """Return what `PieceReader.read` must read for elements lo to hi. `contents` is that of the checkpoint."""
    whole = {entry.name: entry for entry in layout.entries}
    pieces = {piece.name: piece for piece in layout.pieces(lo, hi)}
    found: dict[str, tuple[int, int] | None] = {}
    for key, facts in contents.items():
        piece = pieces.get(_parameter(key))
        if piece is not None:
            entry = whole[piece.name]
            counts = key.startswith(_OPTIM) and key.rpartition("/")[2] in PER_PARAMETER
            cut = tuple(facts["shape"]) == entry.shape and not counts
            found[key] = (piece.lo - entry.lo, piece.hi - entry.lo) if cut else None
    return found


def slice_of(
    layout: Layout, lo: int, hi: int, found: Mapping[str, Tensor], numbers: Mapping[str, ParamState]
) -> tuple[Tensor, Moments]:
    """Return elements lo to hi of the vector [hi - lo], and the state of their pieces for `SlicedOptimizer.restore`.

    `found` is what `PieceReader.read` returned for `wanted`, and `numbers` the checkpoint's "optimizer_numbers".
    """
    pieces = layout.pieces(lo, hi)
    held = [found[f"{_MODEL}{piece.name}"] for piece in pieces]
    params = torch.cat(held) if held else torch.empty(0, dtype=layout.dtype)
    names = {piece.name for piece in pieces}
    moments: Moments = {name: dict(state) for name, state in numbers.items() if name in names}
    for key, value in found.items():
        if key.startswith(_OPTIM):
            moments.setdefault(_parameter(key), {})[key.rpartition("/")[2]] = value
    return params, moments

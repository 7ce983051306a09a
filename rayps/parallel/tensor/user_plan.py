"""Parse a user's plan, a text for each layer that describes the split, and find the layers that its names match."""

from __future__ import annotations

import difflib
import fnmatch
import re
from typing import NamedTuple

from rayps_client.errors import ConfigError, WorkloadError
from torch import nn

ALIASES = {"row": "out", "column": "in"}  # the literature's names for a split of W [out, in]
_OPPOSITES = ("rowwise", "colwise", "row-wise", "column-wise", "columnwise")
_TEXT = re.compile(r"(?P<split>out|in|heads|rows|none|row|column)(\*(?P<blocks>[1-9]\d*))?(:(?P<unit>[1-9]\d*))?")
_SUPPORTED = "rayps splits Linear (out, in), Embedding (rows, out) and MultiheadAttention (heads)"


class UserSplit(NamedTuple):
    """How a user wants a layer to be split. `out*3:64` means three blocks, each divided in units of 64 outputs."""

    split: str
    blocks: int = 1
    unit: int = 1


def read(name: str, text: str) -> UserSplit:
    """Parse `text`, the plan's text for the layer `name`.

    The forms are `out`, `in`, `heads`, `rows`, `none`, `out:UNIT`, `out*BLOCKS` and `out*BLOCKS:UNIT`.

    Raises:
        ConfigError: `text` has none of these forms.
    """
    if isinstance(text, str) and text.lower() in _OPPOSITES:
        raise ConfigError(
            f"plan[{name!r}] is {text!r}, which means one thing in papers (rows of W [out, in]) and the opposite in "
            "torch's RowwiseParallel and Megatron's RowParallelLinear: name what is split, 'out' or 'in'",
            field="plan",
        )
    found = _TEXT.fullmatch(text) if isinstance(text, str) else None
    if found is None or (found["blocks"] and found["split"] not in ("out", "row")):
        raise ConfigError(
            f"plan[{name!r}] is {text!r}: give out, in, heads, rows or none. out:64 keeps units of 64 outputs "
            "(e.g. the outputs of a head) together; out*3:64 does so in each of three blocks (packed q, k, v)",
            field="plan",
        )
    split = ALIASES.get(found["split"], found["split"])
    return UserSplit(split, int(found["blocks"] or 1), int(found["unit"] or 1))


def resolve(model: nn.Module, given: dict[str, str]) -> dict[str, UserSplit]:
    """Return a dict from layer names to requested splits.

    A name in the plan `given` may contain `*`. If several names match a layer, an exact name has precedence, then the
    longest name.

    Raises:
        ConfigError: a name matches no layer, or only layers that cannot be split in that way.
        WorkloadError: a named layer cannot be split at all.
    """
    layers = dict(model.named_modules())
    chosen: dict[str, tuple[tuple[bool, int], UserSplit]] = {}
    for pattern, text in given.items():
        request, exact = read(pattern, text), "*" not in pattern
        matches = [pattern] if exact and pattern in layers else fnmatch.filter(layers, pattern)
        if not matches:
            raise _no_such_layer(pattern, layers)
        able = [name for name in matches if request.split == "none" or _can_split(layers[name], request)]
        if not able:
            raise _cannot_split(matches[0] if exact else pattern, layers[matches[0]], request, exact)
        rank = (exact, len(pattern))
        for name in able:
            if name not in chosen or rank > chosen[name][0]:
                chosen[name] = (rank, request)
    return {name: request for name, (_, request) in chosen.items() if request.split != "none"}


def splits(layer: nn.Module) -> tuple[str, ...]:
    """Return the ways in which a layer can be split, or () if it cannot be split.

    A layer with hooks, or of a subclass with its own forward(), cannot be split: the split layer would not run that
    code.
    """
    if type(layer).__name__.startswith("Parametrized") or layer._forward_pre_hooks or layer._forward_hooks:
        return ()
    if isinstance(layer, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return ()  # the output projection of an attention layer, which reads its weights and never calls it
    if isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward:
        return ("out", "in")
    if isinstance(layer, nn.Embedding) and type(layer).forward is nn.Embedding.forward:
        return (
            ()
            if layer.max_norm is not None
            else ("out",)
            if layer.scale_grad_by_freq or layer.sparse
            else ("rows", "out")
        )
    if isinstance(layer, nn.MultiheadAttention) and type(layer).forward is nn.MultiheadAttention.forward:
        return ("heads",)
    return ()


def _can_split(layer: nn.Module, request: UserSplit) -> bool:
    return request.split in splits(layer)


def _no_such_layer(pattern: str, layers: dict[str, nn.Module]) -> ConfigError:
    known = [name for name, layer in layers.items() if splits(layer)]
    near = difflib.get_close_matches(pattern, [name for name in layers if name], 1)
    hint = (
        f"did you mean {near[0]!r}?" if near else f"layers that can be split are {_few(known)}" if known else _SUPPORTED
    )
    return ConfigError(f"plan names {pattern!r}, and the model has no such layer: {hint}", field="plan")


def _cannot_split(name: str, layer: nn.Module, request: UserSplit, exact: bool) -> ConfigError | WorkloadError:
    kind = type(layer).__name__
    can = splits(layer)
    if not exact:
        return ConfigError(
            f"plan[{name!r}] is {request.split!r}, and no layer of that name can be split in this way: {_SUPPORTED}",
            field="plan",
        )
    if can:
        return ConfigError(
            f"plan[{name!r}] is {request.split!r}, and {kind} can be split by {' or '.join(can)}", field="plan"
        )
    inner = [part for part, each in layer.named_modules() if part and splits(each)]
    if inner:
        hint = f"name the layers in it instead: {_few([f'{name}.{part}' for part in inner])}"
    elif isinstance(layer, (nn.Linear, nn.Embedding, nn.MultiheadAttention)):
        hint = "it has its own forward(), hooks or options (max_norm), which the split layer would ignore"
    else:
        hint = _SUPPORTED
    return WorkloadError(f"the layer {name!r} ({kind}) cannot be split: {hint}", layer=name)


def _few(names: list[str]) -> str:
    return ", ".join(repr(name) for name in names[:4]) + (" ..." if len(names) > 4 else "")

"""The blocks of a model: the modules that it repeats, such as the layers of a decoder, or modules chosen by name."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TypeAlias

from rayps_client.errors import ConfigError
from torch import nn

from rayps.core.spelling import near

BlockNames: TypeAlias = bool | str | tuple[str, ...]  # a workload's `checkpoint_activations`


def patterns_of(given: BlockNames, field: str) -> tuple[str, ...] | None:
    """Return the patterns of names that a field of a workload gives: () for True (repeated blocks), None for False.

    Raises:
        ConfigError: `given` is neither a boolean, nor a pattern, nor several patterns.
    """
    if isinstance(given, bool):
        return () if given else None
    patterns: Sequence[str] = (given,) if isinstance(given, str) else given
    if isinstance(patterns, (list, tuple)) and patterns and all(isinstance(one, str) and one for one in patterns):
        return tuple(patterns)
    raise ConfigError(
        f"{field} is {given!r}: give True (the blocks that the model repeats), False, or names of modules such as "
        "'layers.*' or ('encoder.*', 'head')",
        field=field,
    )


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that a model repeats, by name; {} if it repeats none.

    A container (`nn.ModuleList`, `nn.Sequential`) repeats a class if at least two of its children are of this class.
    Of all such classes, the one whose children in one container have the most parameters is chosen; of equal ones, the
    outermost. The blocks are the modules of this class that are children of any container, so that the stages of a
    residual network and the two halves of an encoder-decoder count alike. Layers of torch without modules of their own,
    such as `nn.Linear`, are no blocks.
    """
    best: tuple[int, type[nn.Module] | None] = (0, None)
    parents = [module for module in model.modules() if isinstance(module, (nn.ModuleList, nn.Sequential))]
    for parent in parents:
        children = [child for child in parent._modules.values() if child is not None and not _is_layer(child)]
        for kind in dict.fromkeys(type(child) for child in children):
            same = list({id(child): child for child in children if type(child) is kind}.values())
            elements = _elements(same) if len(same) > 1 else 0
            if elements > best[0]:
                best = (elements, kind)
    if best[1] is None:
        return {}
    chosen = {id(child) for parent in parents for child in parent._modules.values() if type(child) is best[1]}
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():  # outer modules first
        if id(module) in chosen and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    return found


def chosen_blocks(model: nn.Module, given: BlockNames, field: str) -> dict[str, nn.Module]:
    """Return the modules that a field of a workload chooses, by name; {} for False.

    Each part of a pattern between dots matches one part of a name, so that `layers.*` is each child of `layers`.

    Raises:
        ConfigError: `given` is invalid, a pattern matches no module, or it is True and the model repeats no block.
    """
    patterns = patterns_of(given, field)
    if patterns is None:
        return {}
    if not patterns:
        found = repeated_blocks(model)
        if not found:
            raise ConfigError(
                f"{field} is True, and {type(model).__name__} repeats no block, because no nn.ModuleList or "
                "nn.Sequential in it has two children of one class with layers of their own: give names of modules, "
                "such as 'encoder' or 'layers.*'",
                field=field,
            )
        return found
    modules = {name: module for name, module in model.named_modules() if name}
    for pattern in patterns:
        if not any(_matches(name, pattern) for name in modules):
            raise ConfigError(
                f"{field} names {pattern!r}, and {type(model).__name__} has no such module{near(pattern, modules)}: "
                "give names of model.named_modules(); each part between dots may have a *, such as 'layers.*'",
                field=field,
            )
    return {name: each for name, each in modules.items() if any(_matches(name, pattern) for pattern in patterns)}


def named_briefly(names: Sequence[str]) -> str:
    """Return names as short text: all of up to three, or else the first two and the last one."""
    shown = list(names) if len(names) <= 3 else [*names[:2], "...", names[-1]]
    return ", ".join(shown)


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _is_layer(module: nn.Module) -> bool:
    return not module._modules and type(module).__module__.startswith("torch.nn.")


def _elements(modules: Sequence[nn.Module]) -> int:
    return sum({id(p): p.numel() for module in modules for p in module.parameters()}.values())

"""Store the activations at the borders of some modules only, and compute those inside again for backward.

Chen et al., "Training deep nets with sublinear memory cost", 2016, by `torch.utils.checkpoint` without reentrance. A
module is changed in place, and parameters and buffers keep their names. The second forward draws the random numbers of
the first one, and does not move the running statistics of BatchNorm layers again, so that loss, gradients and buffers
have the bits that they have without it.

If the model is compiled, each such module is compiled by itself, and runs compiled both times.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

import torch
from rayps_client.errors import ConfigError, WorkloadError
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from rayps.data.base import Nested
from rayps.workload.compile_model import Compile, compile_model
from rayps.workload.model_blocks import BlockNames, chosen_blocks

FIELD = "checkpoint_activations"  # of a workload


def checkpointed_blocks(model: nn.Module, given: BlockNames) -> dict[str, nn.Module]:
    """Return the modules of `model` whose activations are computed again, by name; {} if `given` is False.

    Raises:
        ConfigError: `given` is invalid, chooses no module, or chooses one with a sparse table.
    """
    found = chosen_blocks(model, given, FIELD)
    for name, block in found.items():
        if any(getattr(module, "rows_in_table", False) for module in block.modules()):
            raise ConfigError(
                f"{FIELD} chooses module {name!r}, which has a sparse table: its rows would be pulled again in "
                "backward; give the names of modules without tables",
                field=FIELD,
            )
    return found


def checkpoint_activations(
    model: nn.Module, given: BlockNames, compiled: Compile = False, device: str | torch.device = "cpu"
) -> list[str]:
    """Change the modules of `model` that `given` chooses in place, and return their names.

    `compiled` is the workload's `compile`: each module is compiled before.

    Raises:
        ConfigError: as `checkpointed_blocks`.
        WorkloadError: there is no C++ compiler, which the default backend needs on a CPU.
    """
    blocks = checkpointed_blocks(model, given)
    for name, block in reversed(blocks.items()):  # a module inside another one first
        compile_model(block, compiled, device)
        block.forward = _recomputed(name, block)
    return list(blocks)


def _recomputed(name: str, block: nn.Module) -> Callable[..., Nested]:
    """Return a `forward` of `block` that stores its inputs only."""
    forward = block.forward
    norms = [each for each in block.modules() if isinstance(each, _NormBase) and each.track_running_stats]
    statistics = {id(value) for each in norms for value in each.buffers(recurse=False)}

    def contexts() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
        return nullcontext(), _Statistics(norms)

    # the wrapper is not compiled, because torch traces neither the context nor the checks: only `forward` is
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @functools.wraps(forward)
    def call(*args: Nested, **kwargs: Nested) -> Nested:
        if not torch.is_grad_enabled():
            plain: Nested = forward(*args, **kwargs)
            return plain
        _refuse_cache(name, [*args, *kwargs.values()])
        before = _versions(block, statistics)
        run = functools.partial(forward, **kwargs)  # a name may be that of an option of `checkpoint`
        found: Nested = checkpoint(run, *args, use_reentrant=False, context_fn=contexts)
        after = _versions(block, statistics)
        if before != after:
            changed = next(key for key, value in after.items() if before.get(key) != value)
            raise WorkloadError(
                f"module {name!r} changes its buffer {changed!r} in forward(), and {FIELD} would change it again in "
                f"backward: leave the module out of {FIELD}, by the names of the others",
                field=FIELD,
            )
        return found

    kept: Callable[..., Nested] = call
    return kept


class _Statistics:
    """A context in which layers write their running statistics into copies. It can be entered again after its end."""

    def __init__(self, norms: Sequence[nn.Module]) -> None:
        self._norms = norms
        self._held: list[dict[str, Tensor | None]] = []

    def __enter__(self) -> None:
        self._held = [dict(norm._buffers) for norm in self._norms]
        for norm in self._norms:
            for key, value in norm._buffers.items():
                norm._buffers[key] = None if value is None else value.clone()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for norm, held in zip(self._norms, self._held, strict=True):
            norm._buffers.update(held)
        self._held = []


def _versions(block: nn.Module, without: set[int]) -> Mapping[str, tuple[int, int]]:
    """Return the identity and the version of each buffer of `block`, except those whose `id` is in `without`."""
    return {key: (id(value), value._version) for key, value in block.named_buffers() if id(value) not in without}


def _refuse_cache(name: str, values: Sequence[object]) -> None:
    for value in values:
        if hasattr(value, "get_seq_length"):  # a cache of transformers
            raise WorkloadError(
                f"module {name!r} receives a cache of keys and values ({type(value).__name__}), to which the second "
                f"forward of {FIELD} would add again: call the model with use_cache=False, or set "
                "model.config.use_cache = False in model()",
                field=FIELD,
            )

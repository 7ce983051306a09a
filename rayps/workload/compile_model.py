"""Compile a worker's model by `torch.compile`, in place: the names of its parameters do not change."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import TypeAlias

import torch
from rayps_client.errors import ConfigError, WorkloadError
from rayps_client.values import Json, Keywords
from torch import nn

from rayps.data.base import Nested

Compile: TypeAlias = bool | str | Mapping[str, Json]  # a workload's `compile`
_ORIGINAL = "_torchdynamo_orig_callable"  # where torch.compile keeps the function that it compiled


def options_of(given: Compile) -> Keywords | None:
    """Return the options of `torch.compile` that a workload's `compile` sets, or None if nothing is compiled.

    Raises ConfigError if `given` is neither a boolean, nor the name of a backend, nor a dict of options.
    """
    if isinstance(given, bool):
        return {} if given else None
    if isinstance(given, str) and given:
        return {"backend": given}
    if isinstance(given, Mapping) and all(isinstance(name, str) for name in given):
        return dict(given)
    raise ConfigError(
        f"compile is {given!r}: give True, False, the name of a backend such as 'inductor', or a dict of options of "
        "torch.compile such as {'mode': 'max-autotune'}",
        field="compile",
    )


def compile_model(model: nn.Module, given: Compile, device: str | torch.device) -> None:
    """Let `torch.compile` compile `model` in place, at its first call.

    Raises:
        ConfigError: `given` is invalid.
        WorkloadError: there is no C++ compiler, which the default backend needs on a CPU.
    """
    options = options_of(given)
    if options is None:
        return
    compiler = os.environ.get("CXX", "g++")
    if (
        options.get("backend", "inductor") == "inductor"
        and torch.device(device).type == "cpu"
        and shutil.which(compiler) is None
    ):
        raise WorkloadError(
            f"compile is {given!r}, but this worker has no C++ compiler {compiler!r}, which torch.compile needs on a "
            "CPU: install g++, name another in the variable CXX, or set compile = False"
        )
    forward = model.forward

    def call(*args: Nested, **kwargs: Nested) -> Nested:
        found: Nested = forward(*args, **kwargs)
        return found

    # torch compiles one code object at most torch._dynamo.config.recompile_limit times in a process; later calls run
    # uncompiled. All functions that this `def` makes share theirs, so each model gets a copy. A process has several
    # models one after another: each phase and each restart builds one.
    call.__code__ = call.__code__.replace()
    # not model.compile(): torch does not compile the call of a container of its own, such as nn.Sequential, unless a
    # function of another package makes it
    model.forward = torch.compile(call, **options)


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Run a model in the block without `torch.compile`, for calls that are too few to compile for.

    This is for the one model. `torch.compiler.set_stance` is for the process, whose other threads may be workers.
    """
    calls = [(layer, layer._compiled_call_impl) for layer in model.modules() if layer._compiled_call_impl is not None]
    forwards = [(layer, vars(layer).get("forward")) for layer in model.modules() if hasattr(layer.forward, _ORIGINAL)]
    try:
        for layer, _ in calls:
            layer._compiled_call_impl = None
        for layer, compiled in forwards:
            original = getattr(layer.forward, _ORIGINAL)
            # `@torch.compile` in the class compiles a function, which is no method of this layer yet
            layer.forward = original if compiled is not None else MethodType(original, layer)
        yield
    finally:
        for layer, compiled in calls:
            layer._compiled_call_impl = compiled
        for layer, compiled in forwards:
            if compiled is None:
                del layer.forward
            else:
                layer.forward = compiled

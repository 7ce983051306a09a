"""Measure what a forward pass of the undivided model stores for backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from rayps.core.job.user_code import user_code
from rayps.core.strategy.traffic import Sizes
from rayps.data.base import Batch
from rayps.workload.base import Workload
from rayps.workload.checkpoint_activations import checkpoint_activations, checkpointed_blocks
from rayps.workload.model import apart, model_of


def measure_stored(workload: Workload, sizes: Sizes, sample: Batch) -> Sizes:
    """Return `sizes` with the bytes per row that the undivided model stores for backward, measured on `sample`.

    If some modules compute their activations again, these are the bytes outside of them, and those of the largest one.

    Raises:
        WorkloadError: the user's code fails on the sample.
        ConfigError: `checkpoint_activations` of the workload chooses no module.
    """
    with apart():
        model = model_of(workload)
        blocks = checkpointed_blocks(model, workload.checkpoint_activations)
        inside = dict.fromkeys(blocks, 0)
        with record_stored(model) as found, _counting(blocks, found, inside), user_code("loss"):
            workload.loss(model, sample)
        if blocks:
            checkpoint_activations(model, workload.checkpoint_activations)
            with record_stored(model) as found, user_code("loss"):
                workload.loss(model, sample)
    bytes = sum(found.values()) + max(inside.values(), default=0)
    return replace(sizes, kept=(bytes / max(sample.size, 1),))


@contextmanager
def _counting(blocks: Mapping[str, nn.Module], found: Mapping[int, int], inside: dict[str, int]) -> Iterator[None]:
    """In the block, write into `inside` for each module the bytes that are added to `found` while it runs forward."""
    before: dict[str, int] = {}
    handles = []

    def begin(name: str) -> None:
        before[name] = sum(found.values())

    def end(name: str) -> None:
        inside[name] = max(inside[name], sum(found.values()) - before[name])

    for name, module in blocks.items():
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: begin(name)))
        handles.append(module.register_forward_hook(lambda *_, name=name: end(name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def record_stored(model: nn.Module) -> Iterator[dict[int, int]]:
    """Inside the block, record what autograd stores for backward: a dict from memory address to number of bytes.

    The memory of parameters and buffers is not counted.
    """
    mine = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
    found: dict[int, int] = {}
    alive: list[Tensor] = []  # references that prevent the reuse of an address

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in mine:
            found[storage.data_ptr()] = storage.nbytes()
            alive.append(t.detach())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield found

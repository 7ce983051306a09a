"""Whether all workers of a run train on the same rows: a digest of the first inputs of a wrapped model.

A loop whose `DataLoader` has no `DistributedSampler` trains each row once on each worker. If the workers' first inputs
in training mode are the same bytes, their rows are the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

CALLS = 2  # of the model, whose inputs are compared
_ELEMENTS = 1 << 16  # of a tensor, which are compared
SAME_ROWS = (
    "all workers train on the same rows, so that each row counts once for each worker: give each its share, by "
    "torch's DistributedSampler(dataset, num_replicas=rayps.world().size, rank=rayps.world().rank) with "
    "set_epoch(), or by rayps.batches(data)"
)


def watch_inputs(model: nn.Module, note: Callable[[str], None]) -> None:
    """Call `note` once, with a digest of the inputs of the model's first calls that compute gradients.

    It is not called if these inputs have sparse or nested tensors, or `torch.compile` has compiled the model.
    """
    digest, calls = hashlib.blake2b(digest_size=16), 0

    def look(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        nonlocal calls
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor) and each.numel()]
        if torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled() and tensors):
            return
        if any(each.layout is not torch.strided or each.is_nested for each in tensors):
            handle.remove()  # a sparse input, such as a graph, is not compared
            return
        for each in tensors:
            some = each.detach().reshape(-1)[:_ELEMENTS].cpu().contiguous()
            digest.update(f"{each.dtype} {list(each.shape)}".encode())
            digest.update(some.view(torch.uint8).numpy().tobytes())
        calls += 1
        if calls == CALLS:
            handle.remove()
            note(digest.hexdigest())

    handle = model.register_forward_pre_hook(look, with_kwargs=True)

"""The dtype in which loss and evaluation are computed: a workload's `precision`, by `torch.autocast`.

Micikevicius et al., "Mixed precision training", ICLR 2018. The parameters stay as the model has them. Under autocast,
torch computes matrix products and convolutions in half precision, and reductions such as losses in float32.
"""

from __future__ import annotations

import contextlib
from typing import Protocol

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class HasPrecision(Protocol):
    """A workload, of which only `precision` is used."""

    precision: str | None


def autocast(workload: HasPrecision, device: str | torch.device) -> contextlib.AbstractContextManager[object]:
    """Return the context in which to compute the workload's loss on `device`. It does nothing without `precision`."""
    if workload.precision is None:
        return contextlib.nullcontext()
    return torch.autocast(torch.device(device).type, DTYPES[workload.precision])

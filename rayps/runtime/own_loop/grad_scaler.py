"""What `torch.amp.GradScaler` states about a gradient when it calls a wrapped optimizer's `step`.

GradScaler calls `step` of an optimizer with `_step_supports_amp_scaling` in any case, also if the gradient is infinite.
It sets `optimizer.found_inf`, and `optimizer.grad_scale` unless the loop has called `unscale_`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer


@dataclass(frozen=True, slots=True)
class Scaled:
    """A scaled gradient: whether an element is infinite or NaN, and the factor by which it is still scaled."""

    found_inf: bool
    scale: Tensor | None
    optimizer: Optimizer

    @torch.no_grad()
    def unscale(self) -> None:
        """Divide the optimizer's gradients by the scale, as `GradScaler.unscale_` does."""
        if self.scale is None or self.found_inf:
            return
        inverse = self.scale.double().reciprocal().float()
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(inverse.to(p.grad.device))


def take_scaled(optimizer: Optimizer) -> Scaled | None:
    """Return what a GradScaler has stated in this call of `step`, or None if none is used.

    The attributes become None, because a fused optimizer would unscale the gradient again.
    """
    found = getattr(optimizer, "found_inf", None)
    if found is None:
        return None
    scaled = Scaled(bool(found), getattr(optimizer, "grad_scale", None), optimizer)
    optimizer.found_inf = optimizer.grad_scale = None  # type: ignore[attr-defined]
    return scaled

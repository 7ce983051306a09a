"""Detect a `.grad` that was changed after the backward that computed it.

A hook records when autograd has added to a parameter's `.grad`; from then on `.grad` must be the same tensor, at the
same version (torch counts in-place writes). Costs a few microseconds per parameter and does not read the elements.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import Tensor

from rayps.tensors.flat import FlatModel

_Versions = dict[int, tuple[Tensor, int]]  # by number of the parameter: the gradient, and its version


class GradWatch:
    """Watches the `.grad` of a flat model's parameters for changes, until `close`."""

    def __init__(self, flat: FlatModel) -> None:
        self._flat = flat
        self._seen: _Versions = {}  # gradients after the last backward of each parameter
        self._kept: _Versions = {}  # gradients as they were at `keep`
        self._hooks = [
            p.register_post_accumulate_grad_hook(_hook(weakref.ref(self), i))  # type: ignore[no-untyped-call]
            for i, p in enumerate(flat.parameters)
        ]

    def changed(self) -> str | None:
        """Return the first parameter whose `.grad` changed since the last backward, or since `keep`.

        None = none changed.
        """
        return self._differing(self._seen)

    def changed_since_keep(self) -> str | None:
        """Return the first parameter whose `.grad` changed since `keep`, even if another backward changed it.

        None = none changed.
        """
        return self._differing(self._kept)

    def replaced(self) -> bool:
        """Return whether there are gradients, and all of them are other tensors than at the call of `keep`."""
        grads = [p.grad for p in self._flat.parameters if p.grad is not None]
        kept = {id(grad) for grad, _ in self._kept.values()}
        return bool(grads) and not any(id(grad) in kept for grad in grads)

    def keep(self) -> None:
        """Record the current gradients, with which later gradients are compared."""
        grads = [(i, p.grad) for i, p in enumerate(self._flat.parameters)]
        self._kept = {i: (grad, grad._version) for i, grad in grads if grad is not None}
        self._seen = dict(self._kept)

    def clear(self) -> None:
        """Forget all recorded gradients; to be called after the optimizer's step."""
        self._seen, self._kept = {}, {}

    def _differing(self, before: _Versions) -> str | None:
        """Compare gradients with `before`; return the first parameter that differs.

        A gradient that is None or all zero was reset, which does not count as a change.
        """
        for i, (grad, version) in before.items():
            now = self._flat.parameters[i].grad
            if now is None or (now is grad and now._version == version) or not now.any():
                continue
            return self._flat.layout.entries[i].name
        return None

    def close(self) -> None:
        """Remove the hooks and forget all recorded gradients."""
        for hook in self._hooks:
            hook.remove()
        self.clear()

    def _take(self, i: int, p: Tensor) -> None:
        if p.grad is not None:
            self._seen[i] = p.grad, p.grad._version


def _hook(watch: weakref.ref[GradWatch], i: int) -> Callable[[Tensor], None]:
    """Return a hook with a weak reference: a model may outlive the loop that watches it."""

    def hook(p: Tensor) -> None:
        found = watch()
        if found is not None:
            found._take(i, p)

    return hook

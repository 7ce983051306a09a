"""Detect a `.grad` that was changed after the backward that computed it.

A hook runs after autograd has added to a parameter's `.grad`, and records the tensor and its version (torch counts the
in-place writes to a tensor). If `.grad` later is another tensor, or the same tensor at another version, it was changed.
The comparison costs a few microseconds per parameter and reads the elements only of a gradient that differs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import Tensor

from rayps.tensors.flat import FlatModel

_Versions = dict[int, tuple[Tensor, int]]  # from a parameter's index to its gradient and the gradient's version


class GradWatch:
    """Watches the `.grad` of a flat model's parameters for changes, until `close`."""

    def __init__(self, flat: FlatModel) -> None:
        self._flat = flat
        self._latest: _Versions = {}  # each gradient after the last backward that added to it, or at `record`
        self._recorded: _Versions = {}  # the gradients at the last call of `record`
        self._hooks = [
            p.register_post_accumulate_grad_hook(_hook(weakref.ref(self), i))  # type: ignore[no-untyped-call]
            for i, p in enumerate(flat.parameters)
        ]

    def changed(self) -> str | None:
        """Return the name of the first parameter whose `.grad` was changed, or None if no `.grad` was.

        Changes are counted since the last backward or the last call of `record`, whichever was later.
        """
        return self._first_changed(self._latest)

    def changed_since_record(self) -> str | None:
        """Return the name of the first parameter whose `.grad` changed since `record`, or None if no `.grad` did.

        Changes by a later backward count too; `changed` ignores them.
        """
        return self._first_changed(self._recorded)

    def replaced(self) -> bool:
        """Return whether there are gradients, and each of them is another tensor than those at the last `record`."""
        grads = [p.grad for p in self._flat.parameters if p.grad is not None]
        recorded = {id(grad) for grad, _ in self._recorded.values()}
        return bool(grads) and not any(id(grad) in recorded for grad in grads)

    def record(self) -> None:
        """Record the current gradients, to compare later gradients with them."""
        grads = [(i, p.grad) for i, p in enumerate(self._flat.parameters)]
        self._recorded = {i: (grad, grad._version) for i, grad in grads if grad is not None}
        self._latest = dict(self._recorded)

    def clear(self) -> None:
        """Forget all recorded gradients. Call it after the optimizer's step."""
        self._latest, self._recorded = {}, {}

    def _first_changed(self, before: _Versions) -> str | None:
        """Return the name of the first parameter whose gradient differs from `before`, or None if none differs.

        A gradient that is None or all zeros was reset, which does not count as a change.
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

    def _record_backward(self, i: int, p: Tensor) -> None:
        if p.grad is not None:
            self._latest[i] = p.grad, p.grad._version


def _hook(watch: weakref.ref[GradWatch], i: int) -> Callable[[Tensor], None]:
    """Return a hook with a weak reference to `watch`, because a model may outlive the loop that watches it."""

    def hook(p: Tensor) -> None:
        found = watch()
        if found is not None:
            found._record_backward(i, p)

    return hook

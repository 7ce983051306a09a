"""Which gradients of a backward are complete, and so which groups of parameters can be sent while backward continues.

Autograd may compute a gradient in several parts. Each gradient is expected in as many parts as in the backward before:
a group (a bucket, a segment of servers) waits for all parts of its gradients, but not for a parameter that is not used.
A part that arrives after its group was sent is *late*: the owner sends it in addition, or refuses it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence

from torch import Tensor
from torch.utils.hooks import RemovableHandle


class GradientArrivals:
    """Counts the parts of each gradient in a backward. A parameter is in one group or in several.

    Call `begin` before each backward, `count` for each part, `sent` for each group that is sent, and `end` after it.
    """

    def __init__(self, parameters: int, groups: Sequence[Sequence[int]], expected: int | None = None) -> None:
        """Prepare `parameters` parameters. `groups` has the indices of each group's parameters.

        `expected` is the number of parts of each gradient in the first backward; if it is None, no group is complete in
        that backward.
        """
        self._groups = groups
        self.groups_of: list[list[int]] = [[] for _ in range(parameters)]
        for group, members in enumerate(groups):
            for i in members:
                self.groups_of[i].append(group)
        self.parts = [0] * parameters  # the number of parts of each gradient in this backward
        self.expected = None if expected is None else [expected] * parameters
        self.order: list[int] = []  # indices of the parameters, in the order in which parts arrived
        self.late: dict[int, Tensor] = {}  # from a parameter to the sum of its late parts
        self._missing: list[int] = []  # for each group, the number of gradients that are not complete
        self._left: set[int] = set()  # the groups that were sent

    def begin(self, *, early: bool = True, pending: Collection[int] = ()) -> None:
        """Begin a backward.

        `early`: whether groups may be complete before its end. A group waits for the parameters `pending` whether they
        are expected or not.
        """
        expected = self.expected if early else None
        self.parts = [0] * len(self.parts)
        self.order.clear()
        self._left.clear()
        if expected is None:
            self._missing = [len(members) + 1 for members in self._groups]  # never complete
        else:
            self._missing = [sum(expected[i] > 0 or i in pending for i in members) for members in self._groups]

    def count(self, i: int) -> list[int]:
        """Count a part of the gradient of parameter `i`; return the groups that it completes."""
        self.parts[i] += 1
        self.order.append(i)
        if not self.is_complete(i):
            return []
        found = []
        for group in self.groups_of[i]:
            self._missing[group] -= 1
            if not self._missing[group]:
                found.append(group)
        return found

    def is_complete(self, i: int) -> bool:
        """Return whether parameter `i` has now exactly the parts that are expected."""
        return self.expected is not None and self.parts[i] == self.expected[i]

    def waits(self, group: int) -> bool:
        """Return whether gradients of a group are missing."""
        return self._missing[group] > 0

    def sent(self, group: int) -> None:
        """Take note that a group is sent: further parts of its gradients are late."""
        self._left.add(group)

    def is_late(self, i: int) -> bool:
        """Return whether a part of the gradient of parameter `i` arrives after one of its groups was sent."""
        return not self._left.isdisjoint(self.groups_of[i])

    def list_unsent(self) -> list[int]:
        """Return the groups that are not sent."""
        return [group for group in range(len(self._groups)) if group not in self._left]

    def add_late(self, i: int, part: Tensor) -> None:
        """Add a late part of the gradient of parameter `i` to the earlier ones."""
        self.late[i] = part if i not in self.late else self.late[i].add_(part)

    def end(self) -> None:
        """End a backward: the next one is expected to compute each gradient in as many parts."""
        self.expected = list(self.parts)


def watch(parameters: Sequence[Tensor], take: Callable[[int, Tensor], None]) -> list[RemovableHandle]:
    """Call the method `take(i, parameter)` when autograd has computed a part of the gradient of parameter number i.

    The hooks hold the method's object weakly, because a model may exist longer than it. Return the hooks.
    """
    method = weakref.WeakMethod(take)

    def hook_of(i: int) -> Callable[[Tensor], None]:
        def hook(p: Tensor) -> None:
            found = method()
            if found is not None:
                found(i, p)

        return hook

    return [
        p.register_post_accumulate_grad_hook(hook_of(i))  # type: ignore[no-untyped-call]
        for i, p in enumerate(parameters)
    ]

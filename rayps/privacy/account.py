"""The account of one job's privacy: what is spent, what the next release costs, and whether the budget allows it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from rayps.privacy import accountant
from rayps.privacy.ledger import ReleaseLedger
from rayps.privacy.mechanism import Mechanism, Spent
from rayps.privacy.options import PrivacySpec


def solve_noise(spec: PrivacySpec, mechanism: Callable[[float], Mechanism], restart: int | None = None) -> Mechanism:
    """Return the mechanism with the given noise multiplier, or with the one that `epsilon` and `rounds` ask for.

    `mechanism` returns the mechanism with a given noise multiplier. `restart` is the rounds of a tree, or None.

    Raises:
        ConfigError: no noise suffices, or the library is not installed.
    """
    if spec.noise_multiplier is not None:
        accountant.require()
        return mechanism(spec.noise_multiplier)
    assert spec.epsilon is not None and spec.rounds is not None, "checked by PrivacySpec"
    return mechanism(accountant.find_noise(mechanism, spec.epsilon, spec.delta, spec.rounds, restart))


class PrivacyAccount:
    """What a job has spent. `charge` is called before each release; then `epsilon` is the value after it.

    `restart` is the rounds of a tree; None without tree noise. With `coarse`, epsilon is that of up to a fraction
    `coarse` more releases than there were, so that it is seldom computed: a release takes less time, and epsilon is
    never too small. The budget is compared with the exact value.
    """

    def __init__(
        self,
        spec: PrivacySpec,
        mechanism: Mechanism,
        ledger: ReleaseLedger,
        restart: int | None = None,
        *,
        coarse: float = 0.0,
    ) -> None:
        """Read the ledger. Raises ConfigError if its releases cannot be added to those of `mechanism`."""
        self.spec, self.mechanism, self.ledger, self.restart = spec, mechanism, ledger, restart
        self._coarse, self._bound = coarse, (0, 0.0)  # the newest bound: a number of releases, and its epsilon
        self._spent, self._tree = ledger.read()
        self._leaf = 0  # a tree of an earlier process is never continued
        self.epsilon = accountant.epsilon(self._spent, spec.delta)
        self._next = self._cost_of_next()

    @property
    def releases(self) -> int:
        """The number of releases so far."""
        return sum(each.releases for each in self._spent.values())

    @property
    def leaf(self) -> tuple[int, int]:
        """The tree and the leaf of the next release, under tree noise."""
        return self._tree, self._leaf

    @property
    def starts_a_tree(self) -> bool:
        """Whether the next release is the first of its tree."""
        return self.restart is not None and self._leaf == 0

    @property
    def exhausted(self) -> str | None:
        """Why no other release is allowed, or None if the budget allows one."""
        budget = self.spec.epsilon
        if budget is None or self._next <= budget * (1 + 1e-9):
            return None
        return (
            f"the privacy budget epsilon={budget:g} is spent: the cost after release {self.releases} is "
            f"{self.epsilon:.4g}, and one more would make it {self._next:.4g}"
        )

    def charge(self, round: int) -> tuple[int, int]:
        """Record the release of round `round` in the ledger, and return its tree and leaf.

        Raises OSError if the record cannot be written. The caller must then not release the sum.
        """
        tree, leaf = self._tree, self._leaf
        self.ledger.append(self.mechanism, round, None if self.restart is None else tree)
        before = self._spent.get(self.mechanism, Spent())
        self._spent[self.mechanism] = self._after_next(before)
        if self.restart is not None:
            self._leaf += 1
            if self._leaf >= self.restart:
                self._tree, self._leaf = tree + 1, 0
        self.epsilon = self._next
        self._next = self._cost_of_next()
        return tree, leaf

    def _after_next(self, before: Spent) -> Spent:
        trees = before.trees
        if self.restart is not None:
            trees = (*trees[:-1], trees[-1] + 1) if self._leaf and trees else (*trees, 1)
        return dataclasses.replace(before, releases=before.releases + 1, trees=trees)

    def _cost_of_next(self) -> float:
        after = self._after_next(self._spent.get(self.mechanism, Spent()))
        if self._coarse and self.restart is None:
            apart = max(1, int(after.releases * self._coarse))
            number = -(-after.releases // apart) * apart
            if not after.releases <= self._bound[0] <= number:
                self._bound = number, self._cost(dataclasses.replace(after, releases=number))
            if self.spec.epsilon is None or self._bound[1] <= self.spec.epsilon:
                return max(self._bound[1], self.epsilon)
        found = self._cost(after)
        return max(found, self.epsilon) if math.isfinite(found) else found

    def _cost(self, after: Spent) -> float:
        return accountant.epsilon({**self._spent, self.mechanism: after}, self.spec.delta)

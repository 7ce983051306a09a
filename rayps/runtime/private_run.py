"""What a run with private rows spends: the plan of each generation, and the events at its start and end."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from rayps.core.phase_rounds import OPEN, PhaseSpan
from rayps.core.values import JsonObject
from rayps.privacy import accountant
from rayps.privacy.claim import Setting, claim
from rayps.privacy.ledger import ReleaseLedger
from rayps.privacy.mechanism import Spent
from rayps.privacy.row_level import RowPrivacy
from rayps.runtime.journal import Journal
from rayps.runtime.ledger_folder import LedgerFolder


class PrivateRun:
    """The privacy of the rows of one run, by phase. It only reads the ledger, to which rank 0 appends."""

    def __init__(
        self, phases: Sequence[RowPrivacy], ledger: LedgerFolder, journal: Journal, *, started_from: bool, servers: bool
    ) -> None:
        """Prepare. `started_from`: whether the first parameters are given. `servers`: whether servers get the sums."""
        self._phases, self._ledger, self._journal = phases, ledger, journal
        self._setting = Setting("row", phases[0].rows, divided=True, started_from=started_from, servers=servers)

    def plan(self, number: int, start: int) -> RowPrivacy:
        """Return what the workers of a generation of phase `number` must know, which begins after round `start`.

        Raises ConfigError if the releases in the ledger cannot be added to those of the phase.
        """
        found, spent = self._phases[number], self._spent()
        releases = sum(each.releases for each in spent.values())
        budget, delta = found.spec.epsilon, found.spec.delta
        if budget is None:
            return dataclasses.replace(found, releases=releases)
        left = accountant.releases_within(found.mechanism, budget, delta, spent=spent)
        spends = accountant.epsilon(_after(spent, found, left), delta)
        more = accountant.epsilon(_after(spent, found, left + 1), delta)
        reason = (
            f"the privacy budget epsilon={budget:g} is spent: {releases + left} releases cost {spends:.4g}, and one "
            f"more would make it {more:.4g}"
        )
        return dataclasses.replace(found, releases=releases, end=start + left, reason=reason)

    def report_start(self, number: int, span: PhaseSpan, at: int) -> None:
        """Report what the phase's steps will spend."""
        plan = self.plan(number, at)
        mechanism, spec = plan.mechanism, plan.spec
        facts: JsonObject = {"noise_multiplier": mechanism.noise_multiplier, "probability": mechanism.probability}
        text = (
            f"each of {plan.rows} rows is drawn with probability {mechanism.probability:.4g} in each step; its "
            f"gradient is clipped to {plan.clip:g}, and the noise has the standard deviation {plan.std:.4g} "
            f"(noise_multiplier {mechanism.noise_multiplier:.4g})"
        )
        if span.end < OPEN:
            steps = span.end - at
            spends = accountant.epsilon(_after(self._spent(), plan, steps), spec.delta)
            facts |= {"steps": steps, "epsilon": spends}
            text += f"; {steps} steps spend epsilon {spends:.4g} at delta {spec.delta:g}"
        if plan.end is not None:
            facts |= {"budget": spec.epsilon, "allowed": plan.end - at}
            text += f"; the budget epsilon={spec.epsilon:g} allows {plan.end - at} steps"
        self._journal.event("privacy", text, round=at, **facts, assumes=self._claim(number)["assumes"])

    def report_end(self, number: int) -> None:
        """Report the claim: what all releases together disclose at most."""
        found = self._claim(number)
        self._journal.event("privacy", str(found["claim"]), claim=found)

    def _claim(self, number: int) -> JsonObject:
        phase, spent = self._phases[number], self._spent()
        spends = accountant.epsilon(spent, phase.spec.delta)
        releases = sum(each.releases for each in spent.values())
        return claim(phase.spec, phase.mechanism, self._setting, spends if spends < math.inf else math.inf, releases)

    def _spent(self) -> dict[object, Spent]:
        ledger = ReleaseLedger(self._ledger.path)
        try:
            return ledger.spent()
        finally:
            ledger.close()

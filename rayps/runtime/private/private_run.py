"""What a run with private rows spends: the plan of each generation, and the events at its start and end."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from rayps_client.errors import ConfigError
from rayps_client.values import JsonObject

from rayps.core.rows.phase_rounds import OPEN, PhaseSpan
from rayps.core.strategy.strategy import Phase
from rayps.core.strategy.topology import servers_of
from rayps.privacy import accountant
from rayps.privacy.budget import must_allow_one
from rayps.privacy.claim import Setting, claim, delta_too_large, own_strategy, void, with_releases
from rayps.privacy.mechanism import ROW, Mechanism, Spent
from rayps.privacy.row_level import RowPrivacy
from rayps.runtime.records.journal import Journal
from rayps.runtime.records.ledger_folder import LedgerFolder
from rayps.worker.plan import Orders, PrivatePlan

_MOST_STEPS = 10_000_000  # for which a budget is computed


class PrivateRun:
    """The privacy of the rows of one run, by phase. It only reads the ledger, to which rank 0 appends."""

    def __init__(self, phases: Sequence[RowPrivacy], ledger: LedgerFolder, journal: Journal, setting: Setting) -> None:
        self._phases, self._ledger, self._journal, self._setting = phases, ledger, journal, setting

    def plan(self, number: int, start: int, end: int) -> RowPrivacy:
        """Return what the workers of a generation of phase `number` must know, which has the rounds `start` to `end`.

        Raises ConfigError if the releases in the ledger cannot be added to those of the phase.
        """
        found, spent = self._phases[number], self._read_spent()
        releases = sum(each.releases for each in spent.values())
        budget, delta = found.spec.epsilon, found.spec.delta
        if budget is None:
            return dataclasses.replace(found, releases=releases)
        most = min(end - start, _MOST_STEPS)
        left = accountant.releases_within(found.mechanism, budget, delta, spent=spent, most=most)
        if left >= most:
            return dataclasses.replace(found, releases=releases)
        spends = accountant.epsilon(_add_releases(spent, found, left), delta)
        more = accountant.epsilon(_add_releases(spent, found, left + 1), delta)
        reason = (
            f"the privacy budget epsilon={budget:g} is spent: the cost after release {releases + left} is "
            f"{spends:.4g}, and one more would make it {more:.4g}"
        )
        return dataclasses.replace(found, releases=releases, end=start + left, reason=reason)

    def must_allow_a_step(self) -> None:
        """Raise ConfigError if the budget allows no step of the first phase beside what the ledger has."""
        must_allow_one(self._phases[0].spec, self._phases[0].mechanism, spent=self._read_spent())

    def limited(self, orders: Orders, number: int, start: int) -> Orders:
        """Return the orders of a generation of phase `number`, which ends with the last step that the budget allows."""
        privacy = self.plan(number, start, orders.end)
        orders = dataclasses.replace(orders, private=PrivatePlan(str(self._ledger.path), privacy))
        if privacy.end is None or privacy.end >= orders.end:
            return orders
        boundary = dataclasses.replace(orders.snapshots.boundary, end=privacy.end)
        snapshots = dataclasses.replace(orders.snapshots, boundary=boundary)
        return dataclasses.replace(orders, end=privacy.end, snapshots=snapshots)

    def report_start(self, number: int, span: PhaseSpan, at: int) -> None:
        """Report what the phase's steps will spend."""
        plan = self.plan(number, at, span.end)
        mechanism, spec = plan.mechanism, plan.spec
        facts: JsonObject = {}
        drawn = f"drawn with probability {p:.4g} in" if (p := mechanism.probability) < 1 else "used in"
        text = (
            f"each of {plan.rows} rows is {drawn} each step; its "
            f"gradient is clipped to {plan.clip:g}, and the noise has the standard deviation {plan.std:.4g} "
            f"(noise_multiplier {mechanism.noise_multiplier:.4g})"
        )
        if span.end < OPEN:
            steps = span.end - at
            spends = accountant.epsilon(_add_releases(self._read_spent(), plan, steps), spec.delta)
            facts |= {"planned_steps": steps, "planned_epsilon": spends}
            text += f"; {steps} steps spend epsilon {spends:.4g} at delta {spec.delta:g}"
        if plan.end is not None:
            facts |= {"allowed_steps": plan.end - at}
            text += f"; the budget epsilon={spec.epsilon:g} ends the run after step {plan.end}"
        self._journal.event("privacy", text, round=at, **facts, **self._claim(number))

    def report_end(self, at: int, spans: Sequence[PhaseSpan]) -> None:
        """Report the claim after round `at`: what all releases together disclose at most."""
        number = max((i for i, span in enumerate(spans) if span.begin < at), default=0)
        try:
            spent = self._read_spent()
            spends = accountant.epsilon(spent, self._phases[number].spec.delta)
        except ConfigError as error:  # the run has ended, and its outcome is not changed by this
            self._journal.event("warning", f"the claim of privacy cannot be stated: {error}")
            return
        releases = sum(each.releases for each in spent.values())
        found = with_releases(self._claim(number), spends, releases)
        self._journal.event("privacy", str(found["claim"]), **found)

    def _claim(self, number: int) -> JsonObject:
        phase = self._phases[number]
        return claim(phase.spec, phase.mechanism, self._setting)

    def _read_spent(self) -> dict[Mechanism, Spent]:
        return self._ledger.spent(ROW)


def make_private_run(
    found: Sequence[RowPrivacy], phases: Sequence[Phase], ledger: LedgerFolder, journal: Journal, *, started_from: bool
) -> PrivateRun:
    """Return what a run whose rows are private spends, and warn of a delta that is too large.

    Raises:
        ConfigError: in another phase clients are private: the two claims cannot be added.
    """
    if len(found) < len(phases):
        raise ConfigError(
            "rows are private in one phase, and clients in another: the two claims cannot be added; give all phases "
            "the same kind of strategy",
            field="privacy",
        )
    strategies = [phase.strategy for phase in phases]
    for each, strategy in zip(found, strategies, strict=True):
        why = own_strategy(strategy) or delta_too_large(each.spec.delta, each.rows, ROW)
        if why is not None:
            journal.event("warning", f"this run will prove nothing: {why}")
    servers = any(servers_of(strategy) is not None for strategy in strategies)
    reasons = (void(each.spec, strategy) for each, strategy in zip(found, strategies, strict=True))
    why = next(filter(None, reasons), None)
    setting = Setting(ROW, found[0].rows, divided=True, started_from=started_from, servers=servers, void=why)
    return PrivateRun(found, ledger, journal, setting)


def _add_releases(spent: Mapping[Mechanism, Spent], plan: RowPrivacy, releases: int) -> dict[Mechanism, Spent]:
    """Return what is spent after so many more releases of a phase."""
    return {**spent, plan.mechanism: spent.get(plan.mechanism, Spent()).plus(releases)}

"""What a run with private clients spends: whether the budget allows a round, and the event at its end."""

from __future__ import annotations

from collections.abc import Sequence

from rayps_client.errors import ConfigError

from rayps.federated.check import ClientPrivacy
from rayps.privacy import accountant
from rayps.privacy.budget import must_allow_one
from rayps.privacy.claim import claim, claim_of_run, with_releases
from rayps.privacy.mechanism import CLIENT
from rayps.runtime.records.journal import Journal
from rayps.runtime.records.ledger_folder import LedgerFolder


class PrivateClientRun:
    """The privacy of the clients of one run, by phase. It only reads the ledger, to which rank 0 appends."""

    def __init__(self, phases: Sequence[ClientPrivacy], ledger: LedgerFolder, journal: Journal) -> None:
        self._phases, self._ledger, self._journal = phases, ledger, journal

    def must_allow_a_round(self) -> None:
        """Raise ConfigError if the budget allows no round of the first phase beside what the ledger has."""
        job, mechanism = self._phases[0]
        must_allow_one(job.spec, mechanism, tree=job.restart is not None, spent=self._ledger.spent(CLIENT))

    def report_end(self) -> None:
        """Report the claim: what all releases in the ledger together disclose at most.

        The rounds of a run do not show all releases: an evaluation on clients' rows is one too, and so is a round that
        was charged before its worker died. A run that resumed after its last round has no rounds of its own.
        """
        job, mechanism = self._phases[-1]
        found = claim_of_run(self._journal.events, self._journal.points)
        if found is None:
            found = with_releases(claim(job.spec, mechanism, job.setting), 0.0, 0)
        why = next((each.void for each, _ in self._phases if each.void is not None), None)
        found |= {} if why is None else {"proves": False, "not_proven": why}
        try:
            spent = self._ledger.spent(CLIENT)
            epsilon = max(accountant.epsilon(spent, float(str(found["delta"]))), float(str(found["epsilon"])))
        except ConfigError as error:  # the run has ended, and its outcome is not changed by this
            self._journal.event("warning", f"the claim of privacy cannot be stated: {error}")
            return
        releases = max(sum(each.releases for each in spent.values()), int(str(found["releases"])))
        found = with_releases(found, epsilon, releases)
        self._journal.event("privacy", str(found["claim"]), **found)

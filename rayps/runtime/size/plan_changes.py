"""Choose the calendar of a job, and what changes its workers, from what its preflight has found."""

from __future__ import annotations

from collections.abc import Sequence

from rayps.core.rows.phase_rounds import Calendar
from rayps.core.strategy.strategy import Phase
from rayps.core.strategy.topology import compression_in
from rayps.runtime.checks.preflight import PreflightFindings
from rayps.runtime.records.journal import Journal
from rayps.runtime.size.elastic_run import ElasticRun
from rayps.runtime.size.job_size import Allowance
from rayps.runtime.size.leased_run import LeasedRun, LeaseTerms
from rayps.runtime.size.membership import Membership
from rayps.runtime.size.worker_changes import WorkerChanges
from rayps.strategies.job import JobSpec


def plan_changes(
    spec: JobSpec, phases: Sequence[Phase], found: PreflightFindings, journal: Journal, allowance: Allowance
) -> tuple[Calendar, WorkerChanges]:
    """Return the rounds of the phases, and what changes the job's workers."""
    elastic, least = spec.elastic, spec.workers
    if elastic is not None and found.blocks is not None:
        # the rounds of an epoch follow from the workers that there will be; `steps` are those of the least number
        last = None if spec.steps is None else divmod(spec.steps * least, found.blocks)
        epochs = spec.epochs if last is None else last[0] + bool(last[1])
        calendar = Calendar(phases, found.steps, elastic.most, epochs=epochs, rounds=None)
        compresses = compression_in(phases[0].strategy) is not None
        terms = LeaseTerms(found.blocks, last or (calendar.epochs, 0), least, compresses)
        return calendar, LeasedRun(elastic, terms, calendar, journal, allowance)
    calendar = Calendar(phases, found.steps, least, epochs=spec.epochs, rounds=spec.steps)
    if elastic is None or found.rows is None:
        return calendar, WorkerChanges(calendar, journal)
    membership = Membership(elastic, *found.rows, least, drop_last=found.drop_last)
    return calendar, ElasticRun(elastic, least, membership, calendar, journal, allowance, timeout=spec.timeout)

"""Prepare the run of a workload's job before any worker starts: its plan, what privacy spends, and a trial batch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from rayps_client import parameters
from rayps_client.values import JsonObject

from rayps.core.job.user_code import await_call
from rayps.core.job.user_module import pack
from rayps.core.job.warm_start import StartFrom
from rayps.core.strategy.strategy import Phase
from rayps.core.strategy.strategy_families import has_remote_clients, learns_by_client
from rayps.core.strategy.topology import is_private
from rayps.federated.remote_replies import create_mailbox
from rayps.runtime.checks.preflight import PreflightFindings, preflight
from rayps.runtime.checks.trial import TrialFacts
from rayps.runtime.checks.tried_batch import TrialRequest
from rayps.runtime.driver.driven_job import JobRun
from rayps.runtime.driver.phases import RunPlan
from rayps.runtime.private.private_client_run import PrivateClientRun
from rayps.runtime.private.private_run import PrivateRun, make_private_run
from rayps.runtime.records.journal import Journal
from rayps.runtime.records.ledger_folder import LedgerFolder, find_ledger_folder
from rayps.runtime.results.snapshots import Checkpointer
from rayps.runtime.size.job_size import Allowance
from rayps.runtime.size.plan_changes import plan_changes
from rayps.strategies.job import JobSpec
from rayps.tensors.learning_rate import ScheduleRecord, recipe_of
from rayps.workload.base import Workload


def prepare_run(
    workload: Workload,
    phases: list[Phase],
    run: JobRun,
    checkpoints: Checkpointer,
    allowance: Allowance,
    params: JsonObject | None,
) -> tuple[PreflightFindings, RunPlan] | None:
    """Check a workload, and return what was found and the plan of its run; None if a stop is requested before the end.

    `params` are the workload's parameters, to report those that are not the default; None if that was done before.

    Raises:
        DataError, WorkloadError, ConfigError: the user's code or an option is wrong; the text says how to fix it.
    """
    spec, journal = run.spec, run.journal
    remote = any(has_remote_clients(phase.strategy) for phase in phases)
    mailbox = create_mailbox(journal.folder) if remote else None
    given = spec.start_from if checkpoints.resume is None else None
    begin = None if given is None else StartFrom.parse(given)
    find = partial(preflight, workload, phases, spec, begin)
    found = await_call(find, spec.timeout, where="driver", stopped=run.stopping.is_set)
    if found is None:
        return None
    anew = checkpoints.resume is None
    ledger = _open_ledger(phases, journal, checkpoints)
    private = None if ledger is None else _plan_private_rows(found, phases, journal, ledger, anew=anew)
    private_clients = None if ledger is None else _plan_private_clients(found, journal, ledger, anew=anew)
    for warning in found.warnings:
        journal.event("warning", warning)
    if params is not None and (own := parameters.differing(workload, Workload)):
        text = ", ".join(f"{name} = {parameters.shown(value)}" for name, value in own.items())
        journal.event("parameters", text, params=params)
    calendar, changes = plan_changes(spec, phases, found, journal, allowance)
    schedule = ScheduleRecord(recipe_of(workload))
    return found, RunPlan(
        phases,
        calendar,
        found.divisions,
        found.tables,
        schedule,
        changes,
        mailbox,
        found.start,
        ledger,
        private,
        private_clients,
    )


def _open_ledger(phases: Sequence[Phase], journal: Journal, checkpoints: Checkpointer) -> LedgerFolder | None:
    """Return the folder of the ledger of private releases; None without privacy."""
    found = find_ledger_folder(phases, journal.folder, checkpoints.folder, checkpoints.resume, journal.shared_ledger)
    if found is not None and found.unknown is not None:
        journal.event("warning", found.unknown)
    if found is not None and found.carried:
        journal.event("ledger", f"{found.carried} releases of an earlier run are charged to this run, too")
    return found


def _plan_private_rows(
    found: PreflightFindings, phases: Sequence[Phase], journal: Journal, ledger: LedgerFolder, *, anew: bool
) -> PrivateRun | None:
    """Return what a run with private rows spends; None if its rows are not private.

    Raises ConfigError if the budget allows no step of a run that starts `anew`.
    """
    if not found.private:
        return None
    started_from = found.start is not None or ledger.unknown is not None
    with ledger.released_on_error():
        spent = make_private_run(found.private, phases, ledger, journal, started_from=started_from)
        if anew:
            spent.must_allow_a_step()
    return spent


def _plan_private_clients(
    found: PreflightFindings, journal: Journal, ledger: LedgerFolder, *, anew: bool
) -> PrivateClientRun | None:
    """Return what a run with private clients spends; None if its clients are not private.

    Raises ConfigError if the budget allows no round of a run that starts `anew`.
    """
    if not found.private_clients:
        return None
    spent = PrivateClientRun(found.private_clients, ledger, journal)
    if anew:
        with ledger.released_on_error():
            spent.must_allow_a_round()
    return spent


def trial_of(
    workload: Workload, phases: Sequence[Phase], spec: JobSpec, found: PreflightFindings, *, watched: bool
) -> tuple[TrialFacts, TrialRequest]:
    """Return the trial of one batch in a child process. `watched`: a callback watches a metric other than the loss."""
    strategies, packed = [phase.strategy for phase in phases], pack(workload)
    model, data = found.sizes
    facts = TrialFacts(
        all(map(has_remote_clients, strategies)),
        any(division is not None for division in found.divisions),
        spec.resources.get("gpu", 0.0),
        model,
        len(packed),
        data,
    )
    first = strategies[0]
    by_client, private = learns_by_client(first), any(map(is_private, strategies))
    where = spec.working_dir, tuple(sys.path), tuple(sys.argv)
    size = first.grid(spec.workers).data
    return facts, TrialRequest(packed, size, spec.seed, by_client, private, watched, *where)

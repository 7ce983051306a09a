"""Make the group of workers of a workload's job, with its space on servers."""

from __future__ import annotations

from rayps.cluster.local import Cluster
from rayps.core.job.user_module import pack
from rayps.runtime.driver.job_servers import space_of
from rayps.runtime.driver.phases import RunPlan
from rayps.runtime.driver.worker_group import WorkerGroup, WorkerProcess
from rayps.strategies.job import JobSpec
from rayps.tensors.learning_rate import recipe_of
from rayps.workload.base import Workload


def make_group(
    cluster: Cluster,
    workload: Workload,
    spec: JobSpec,
    plan: RunPlan,
    process: WorkerProcess,
    name: str,
    *,
    again: bool,
) -> WorkerGroup:
    """Return the workers of a job, which have not started yet, and start the servers of its group if it has one.

    `name` is that of the job's space on a server group, and `again`: an earlier driver of the job has died, whose space
    this one takes over.
    """
    strategies, slots = [phase.strategy for phase in plan.phases], plan.changes.slots
    space = space_of(cluster, spec, strategies, name, lambda: recipe_of(workload), plan.tables, ranks=slots)
    if space is not None and again and not space.own:
        space.take_over()
    return WorkerGroup(
        cluster,
        pack(workload),
        spec.workers,
        {"cpu": 1.0} | spec.resources,
        process.code,
        capture=process.capture,
        space=space,
        apart=plan.changes.apart,
        slots=slots,
    )

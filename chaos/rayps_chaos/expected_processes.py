"""The processes that a job of a service of its own will have, by its specification; nothing is started. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rayps.core.strategy.strategy import ServerHalf
from rayps.core.strategy.topology import group_of, servers_of
from rayps.strategies.job import JobSpec
from rayps_chaos.faults import FaultOn, FaultRole
from rayps_chaos.plan import ChaosFacts

_ALWAYS = (FaultRole.DRIVER, FaultRole.SERVICE, FaultRole.RAYLET, FaultRole.GCS, FaultRole.MACHINE)
_OF_SERVERS = (FaultRole.SERVER, FaultRole.MANAGER)


def expected_facts(spec: JobSpec, strategies: Sequence[ServerHalf], cannot: Mapping[FaultOn, str]) -> ChaosFacts:
    """Return what there will be to disturb when the job trains.

    `strategies`: those of the job's phases. `cannot`: why this machine cannot inject a fault. The job of a workload
    with sparse tables may have more servers, and a manager of them, because the workload is not imported.

    Raises:
        ConfigError: the workers are not a whole number of replicas.
    """
    groups = [group_of(each.topology) for each in strategies if each.topology.group_size]
    if spec.server_group is not None:
        servers, manager = 1, 1  # at least; the group's size is not in the specification
    elif groups:
        count, replicas = (max(column) for column in zip(*groups, strict=True))
        servers, manager = max(count, replicas + 1), 1
    else:
        fixed = [found.shards(found.grid(spec.workers).columns) for found in map(servers_of, strategies) if found]
        servers, manager = max(fixed, default=0), 0
    counts = dict.fromkeys(_ALWAYS, 1)
    counts |= {FaultRole.WORKER: spec.workers, FaultRole.SERVER: servers, FaultRole.MANAGER: manager}
    return ChaosFacts(counts, spec.server_group is not None, cannot)


def possible_facts(spec: JobSpec, facts: ChaosFacts) -> ChaosFacts:
    """Return the facts with one process of each role that the specification does not exclude.

    A loop of the user's own may open servers; servers may have a manager, if the workload has sparse tables.
    """
    if spec.run is None and not facts.counts[FaultRole.SERVER]:
        return facts
    least = {role: max(1, facts.counts[role]) for role in _OF_SERVERS}
    return ChaosFacts({**facts.counts, **least}, facts.shared_group, facts.cannot)

"""Check a federated job before any worker starts."""

from __future__ import annotations

import math
from typing import NamedTuple

from rayps_client.errors import ConfigError

from rayps.core.job.user_code import user_code
from rayps.core.refusals.table import refuse
from rayps.data.base import Data
from rayps.data.clients import Clients
from rayps.federated.client import is_plain
from rayps.federated.population.attack_spec import skew
from rayps.federated.population.cohort import cohort_size
from rayps.federated.private_job import PrivateJob, private_job
from rayps.federated.private_layers import PrivateLayers
from rayps.federated.rules.aggregation_options import Aggregation
from rayps.federated.simulated_rounds import events_of
from rayps.federated.simulated_rows import used_rows
from rayps.federated.strategy_interface import ClientSide, FederatedView, Federation
from rayps.privacy.budget import must_allow_one
from rayps.privacy.claim import delta_too_large, own_strategy
from rayps.privacy.mechanism import CLIENT, Mechanism
from rayps.tensors import optim
from rayps.tensors.flat import Layout
from rayps.tensors.learning_rate import recipe_of
from rayps.workload.base import Workload
from rayps.workload.model import apart, model_of
from rayps.workload.norm_by_row import mixing_layer, norm_by_row
from rayps.workload.statistics_workload import StatisticsWorkload

_HIDES = 5.0  # noise that is larger than this, relative to the largest mean update, is warned of
_LABELS = 1000  # with more labels, the skew of clients' labels is not computed


class ClientPrivacy(NamedTuple):
    """The privacy of a job's clients: its public facts, and the mechanism of a round, with the noise that was found."""

    job: PrivateJob
    mechanism: Mechanism


class FederatedFindings(NamedTuple):
    """The result of `federated`: warnings for the user, and the clients' privacy, if the job is private."""

    warnings: list[str]
    private: ClientPrivacy | None = None


def federated(strategy: FederatedView, workload: Workload, data: Data, seed: int) -> FederatedFindings:
    """Check a federated strategy with a workload and its data.

    Raises:
        ConfigError, DataError: the data has no clients, or the strategy's options do not fit them.
        WorkloadError: a query needs a column that the data does not have.
    """
    name, given = strategy.name, strategy.federation
    side = given.client_side
    if isinstance(workload, StatisticsWorkload) != side.answers:
        raise ConfigError(
            f"the strategy is {name}, and the workload is {'not ' if side.answers else ''}a StatisticsWorkload: "
            "the strategy statistics and a rayps.StatisticsWorkload belong together",
            field="strategy",
        )
    if side.plain:
        _check_plain_sgd(name, workload)
    if side.private:
        _check_private(name, side, workload)
    aggregation, population, fraction, joining = given.aggregation, given.population, given.fraction, given.joining
    if joining is not None:
        _check_smallest_round(aggregation, joining.least, cohort_size(joining.least, fraction))
        alone = _check_privacy(strategy, workload, private_job(strategy, None, _size(given, workload)))
        return alone._replace(warnings=[*filter(None, [side.note]), *alone.warnings])
    if isinstance(workload, StatisticsWorkload):
        workload.check_columns(data)
    clients = data.clients  # without clients, this raises an error that says how to define them
    events_of(given, used_rows(given.local, data), seed, data.batch_size, workload.accumulate)
    rule, attack = aggregation.chosen_rule, population.attackers
    cohort = cohort_size(clients.count, fraction)
    if given.buffered is None:
        aggregation.check_min_replies(aggregation.count_asked(cohort, clients.count), clients.count)
        rule.check(cohort, attack)
    if attack is not None:
        attack.check(clients.count)
        attack.with_classes(clients.label_names)
    found = _check_privacy(strategy, workload, private_job(strategy, clients.count, 0))
    warnings = [
        side.note,
        rule.warn_of_few_replies(cohort, cohort * (1 - population.dropout)),
        rule.warning(_skew(clients)),
        _warn_of_no_metrics(name, side, workload),
        _warn_of_loaders(name, data),
        *found.warnings,
    ]
    return found._replace(warnings=[warning for warning in warnings if warning])


def _check_privacy(strategy: FederatedView, workload: Workload, job: PrivateJob | None) -> FederatedFindings:
    """Check the noise, the budget and the model of a private job.

    Raises ConfigError if the budget allows no round, or if the model has buffers whose change is not clipped.
    """
    if job is None:
        return FederatedFindings([])
    spec, mechanism, side = job.spec, job.solved(), strategy.federation.client_side
    must_allow_one(spec, mechanism, tree=job.restart is not None)
    with apart():
        model = model_of(workload)
    if not side.keeps_buffers:
        names = [name for name, value in model.named_buffers() if value.is_floating_point()]
        if names:
            also = ", or give buffers=keep (each client has its own)" if job.real else ""
            layer = mixing_layer(model)
            way = "use layers without running statistics"
            if layer is not None:
                way = f"replace layer {layer[0]!r}, a {type(layer[1]).__name__}, by {norm_by_row(layer[1])}"
            raise ConfigError(
                f"the model has buffers that clients change and that no clip bounds ({names[0]}), so privacy cannot be "
                f"proven: {way}{also}",
                field="privacy",
            )
    warnings = []
    if (why := own_strategy(strategy) or delta_too_large(spec.delta, job.clients, CLIENT)) is not None:
        warnings.append(f"this run will prove nothing: {why}")
    layers = PrivateLayers.of_model(side.private, model)
    size = layers.shared_size
    share = mechanism.noise_multiplier * math.sqrt(size) / job.divisor  # norm of the noise in the mean / clip
    if share > _HIDES and isinstance(workload, StatisticsWorkload):
        queries = f"{(count := len(workload.queries))} quer{'y' if count == 1 else 'ies'} ({size} numbers)"
        warnings.append(
            f"the noise is about {share:.2g} times as large as the clients' largest mean vector, so the answers will "
            f"hardly say anything: for {queries}, {job.expected:.0f} clients are few. Ask more clients, fewer queries "
            "or ones with fewer bins, or add less noise"
        )
    elif share > _HIDES:
        warnings.append(
            f"the noise of each round is about {share:.2g} times as large as the largest mean update, so the model "
            f"will hardly learn: with {size}{' shared' if layers else ''} parameters, {job.expected:.0f} clients a "
            "round are few. Ask more clients, train fewer parameters, or add less noise"
        )
    return FederatedFindings(warnings, ClientPrivacy(job, mechanism))


def _size(given: Federation, workload: Workload) -> int:
    """Return the number of elements of an update if the clients' noise depends on it, and 0 otherwise."""
    spec = given.privacy
    if spec is None or not spec.by_clients:
        return 0
    with apart():
        return PrivateLayers.of_model(given.client_side.private, model_of(workload)).shared_size


def _check_plain_sgd(name: str, workload: Workload) -> None:
    with apart():
        model = model_of(workload)
    layout = Layout.of((key, p) for key, p in model.named_parameters() if p.requires_grad)
    if not is_plain(optim.build(recipe_of(workload), layout)):
        raise ConfigError(
            f"{name} assumes steps of plain SGD, but the workload's optimizer() returns another optimizer: return "
            "torch.optim.SGD(params, lr=...) without momentum and weight decay",
            field="strategy",
        )
    if workload.clip_norm is not None:
        refuse({"clip_norm": workload.clip_norm, "steps of plain SGD": True, "strategy": name})


def _check_private(name: str, side: ClientSide, workload: Workload) -> None:
    """Check that a strategy may have private layers, and that the model has such layers.

    Raises:
        ConfigError: the strategy sends further vectors or has personal models; or the names do not fit the model.
    """
    if side.sums or side.model:
        what = (
            f"sends further vectors ({', '.join(side.sums)})"
            if side.sums
            else f"has a model of each client ({side.model})"
        )
        refuse({"private": True, "vectors of the whole model": what, "strategy": name})
    with apart():
        PrivateLayers.of_model(side.private, model_of(workload))


def _check_smallest_round(aggregation: Aggregation, least: int, asked: int) -> None:
    """Check the options for the smallest round of real clients, which asks `asked` of `least` connected clients.

    Raises ConfigError if this round can have too few replies for `min_replies` or for the rule.
    """
    if aggregation.min_replies > asked:
        raise ConfigError(
            f"min_replies is {aggregation.min_replies}, but a round may start with {least} clients and then asks "
            f"{asked}: raise `least`\nin clients=remote(least=...), or lower min_replies",
            field="min_replies",
        )
    aggregation.chosen_rule.check(asked)


def _warn_of_no_metrics(name: str, side: ClientSide, workload: Workload) -> str | None:
    """Return a warning if clients have personal models whose metrics cannot be computed, or None if they have not."""
    if not (side.model or side.finetune or side.private):
        return None
    with user_code("evaluation_data"):
        data = workload.evaluation_data()
    if getattr(data, "divided", False):
        return None
    what = f"finetune={side.finetune}" if side.finetune else name
    return (
        f"{what} evaluates each client's personal model on that client's rows of the evaluation data, but "
        "evaluation_data() is not divided into clients: no personal_* metrics are computed. Give client= there "
        "too, or return evaluation_data().with_clients(data().clients.alike(labels))"
        + (". The other metrics use the initial private layers" if side.private else "")
    )


def _warn_of_loaders(name: str, data: Data) -> str | None:
    """Return a warning if the data is to be read ahead, which federated strategies do not do."""
    if data.ahead is None:
        return None
    return (
        f"loaded_by has no effect under {name}, which reads each client's rows when the client is trained: leave it "
        "out, keep the rows in memory (rayps.data.tensors), or use more workers"
    )


def _skew(clients: Clients) -> float | None:
    """Return how much the clients' label distributions differ, from 0 to 1, or None if the labels are not classes."""
    if clients.labels is None or len(clients.labels[0]) > _LABELS:
        return None
    return skew(clients.labels[1].tolist())

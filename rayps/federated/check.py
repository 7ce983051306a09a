"""What is wrong with a federated job is found before any worker starts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rayps.core.errors import ConfigError
from rayps.core.user_code import user_code
from rayps.data import Data
from rayps.federated import rule_spec
from rayps.federated.client import is_plain
from rayps.federated.population.cohort import cohort_size
from rayps.federated.population.events import events_of
from rayps.federated.remote.join_options import joining_of
from rayps.strategies.job import JobSpec
from rayps.tensors import optim
from rayps.workload.base import Workload

_LABELS = 1000  # with more of them, how far clients' labels lie apart is not told


def federated(strategy: Any, workload: Workload, data: Data, spec: JobSpec) -> list[str]:
    """Try a federated strategy on a workload; warnings for the user.

    Raises:
        ConfigError, DataError: the data has no clients, or the options do not fit them.
    """
    if strategy.plain and not is_plain(optim.made(workload.optimizer, [nn.Parameter(torch.zeros(2, 2))])):
        raise ConfigError(
            f"{strategy.name} counts with steps of plain SGD, and the workload's optimizer is another: return "
            "torch.optim.SGD(params, lr=...) without momentum and weight decay",
            field="strategy",
        )
    if strategy.plain and workload.clip_norm is not None:
        raise ConfigError(
            f"{strategy.name} counts with steps of plain SGD, and the workload has clip_norm {workload.clip_norm:g}: "
            "leave it out",
            field="strategy",
        )
    if strategy.remote:
        _of_the_least(strategy)
        return []
    clients = data.clients  # says how to give clients, where there are none
    events_of(strategy, clients.sizes, spec.seed, data.batch_size)
    rule, attack = rule_spec.rule_of(strategy.rule), rule_spec.attack_of(strategy.attack)
    cohort = cohort_size(clients.count, strategy.fraction)
    if not strategy.asynchronous:
        asked = min(clients.count, int(cohort * (1 + strategy.over_selection) + 0.5))
        if strategy.min_replies > asked:
            raise ConfigError(
                f"min_replies is {strategy.min_replies}, and a round asks {asked} of {clients.count} clients: no round "
                "would ever count; lower it, or raise fraction",
                field="min_replies",
            )
        rule.check(cohort, attack)
    if attack is not None:
        attack.check(clients.count)
        attack.settled(clients.label_names)
    warnings = [
        rule.doubt(cohort, cohort * (1 - strategy.dropout)),
        rule.warning(_skew(clients)),
        _unmeasured(strategy, workload),
    ]
    return [said for said in warnings if said]


def _of_the_least(strategy: Any) -> None:
    """Refuse what could do nothing with as many real clients as a round begins with."""
    joining = joining_of(strategy.clients)
    assert joining is not None, "its clients are remote"
    asked = cohort_size(joining.least, strategy.fraction)
    if strategy.min_replies > asked:
        raise ConfigError(
            f"min_replies is {strategy.min_replies}, and a round begins once {joining.least} clients are there, and "
            f"asks {asked}: raise least\nin clients=remote(least=...), or lower min_replies",
            field="min_replies",
        )
    rule_spec.rule_of(strategy.rule).check(asked)


def _unmeasured(strategy: Any, workload: Workload) -> str | None:
    """A warning where clients have models of their own that nothing would measure."""
    if not (strategy.personal or strategy.finetune):
        return None
    with user_code("evaluation_data"):
        data = workload.evaluation_data()
    if getattr(data, "divided", False):
        return None
    what = f"finetune={strategy.finetune}" if strategy.finetune else strategy.name
    return (
        f"{what} measures each client's own model on its own rows of the evaluation data, which has no clients: no "
        "personal_* metrics will come; give client= there too, or return "
        "evaluation_data().with_clients(data().clients.alike(labels))"
    )


def _skew(clients: Any) -> float | None:
    """How far the clients' labels lie apart; None where labels are not classes."""
    if clients.labels is None or len(clients.labels[0]) > _LABELS:
        return None
    return rule_spec.skew(clients.labels[1].tolist())

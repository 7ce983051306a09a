"""The features of a job that its federated strategy declares, as `rayps.core.refusals` names them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields

from rayps_client.exchange.coding_names import TOP_K, upload_name
from rayps_client.values import Json

from rayps.core.strategy.text import write_nested
from rayps.federated.rules.robust_rules import AggregationRule
from rayps.federated.strategy_interface import ClientSide, Federation
from rayps.privacy.options import ALL, POISSON, TREE, PrivacySpec, features_of_privacy


def features_of_federation(
    name: str, given: Federation, weigh: Callable[[int, int], float] = lambda n, staleness: n
) -> dict[str, Json]:
    """Return the features that the federated strategy of this name declares.

    `weigh` returns the weight of a reply of n samples whose client started `staleness` rounds ago.
    """
    side, real, aggregation = given.client_side, given.real, given.aggregation
    upload = upload_name(real.upload)
    found: dict[str, Json] = {
        "strategy": name,
        "simulated clients": real.clients is None or None,
        "real clients": real.clients is not None or None,
        "local_epochs": given.local.local_epochs,
        "local_steps": given.local.local_steps,
        "rule": None if aggregation.rule == "mean" else _written(aggregation.rule),
        "clip": aggregation.clip,
        "min_replies": None if aggregation.min_replies == 1 else aggregation.min_replies,
        "enough": aggregation.enough,
        "over_selection": aggregation.over_selection or None,
        "finetune": side.finetune,
        "report": given.report,
        "client_evaluation": real.client_evaluation or None,
        "secure": _written(real.secure),
        "no secure": real.secure is None or None,
        "upload": real.upload,
        "download": real.download,
        "uploads by top_k": (upload is not None and upload[0] == TOP_K) or None,
        "asynchronous rounds": given.buffered is not None or None,
        "sums without a bound": ", ".join(side.sums) or None,
    }
    if real.secure is not None and given.buffered is None:
        found["weights other than samples"] = weigh(7, 0) not in (1, 7) or None
    for option in fields(given.population):
        value = getattr(given.population, option.name)
        found[option.name] = None if value == option.default else value
    if real.metric_bound != 1.0:
        found["metric_bound"] = real.metric_bound
        bounded = real.client_evaluation and (real.secure is not None or given.privacy is not None)
        found["metrics in the clear"] = not bounded or None
    if given.privacy is not None:
        found |= _features_of_privacy(name, given.privacy, side, simulated=given.joining is None)
    return {name: value for name, value in found.items() if value is not None}


def _written(option: Json | AggregationRule) -> Json:
    """Return an option as the text that a user writes, if it is in wire form."""
    if isinstance(option, AggregationRule):
        return str(option)
    return write_nested(dict(option)) if isinstance(option, Mapping) else option


def _features_of_privacy(name: str, spec: PrivacySpec, side: ClientSide, *, simulated: bool) -> dict[str, Json]:
    found: dict[str, Json] = features_of_privacy(spec) | {"privacy of clients": True}
    if simulated and side.private:
        found["private layers of simulated clients"] = f"private={','.join(side.private)}"
    elif simulated and side.keeps_buffers:
        found["buffers of simulated clients"] = "buffers=keep"
    elif simulated and side.stateful:
        found["states of simulated clients"] = name
    kind = TREE if spec.mechanism == TREE else spec.sampling or POISSON
    if simulated and kind != ALL:
        found["a claim for samples"] = kind
    return found

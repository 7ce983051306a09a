"""Refuse what would void the claim of a private federated job. Pure."""

from __future__ import annotations

from rayps_client.errors import ConfigError

from rayps.core.strategy.text import quoted
from rayps.federated.strategy_interface import ClientSide, Federation
from rayps.privacy.options import ALL, FIXED, POISSON, TREE, PrivacySpec


def check_private(name: str, given: Federation, spec: PrivacySpec) -> None:
    """Check the options of the federated strategy of this name with those of its `privacy`, `spec`.

    Raises:
        ConfigError: an option would void the claim; the text says why, and what to do instead.
    """
    _refuse_algorithm(name, given)
    _refuse_options(name, given, spec)
    if spec.by_clients and given.secure is None:
        raise ConfigError(
            "privacy has noise_by=clients, but a client's share of the noise does not protect it: only the sum under "
            "masks has enough. Give secure=secagg(clip=...,max_weight=1) and clients=remote too, or leave noise_by out",
            field="privacy",
        )
    if given.joining is not None:
        if spec.sampling in (POISSON, FIXED):
            raise ConfigError(
                f"privacy has sampling={spec.sampling}, but real clients come and go as they like, so no round is a "
                "random sample of them: give mechanism=tree (noise for clients that cannot be sampled), or "
                "sampling=all (no amplification)",
                field="privacy",
            )
        return
    kind = TREE if spec.mechanism == TREE else spec.sampling or POISSON
    if kind != ALL:
        for option, value in (("available", given.population.available), ("deadline", given.population.deadline)):
            if value is not None:
                raise ConfigError(
                    f"{option} is {value!r}: clients that come and go, or are late, are no random sample, which "
                    f"privacy with {kind} assumes; leave {option} out, or give privacy sampling=all",
                    field=option,
                )


def _refuse_algorithm(name: str, given: Federation) -> None:
    side = given.client_side
    if given.buffered is not None:
        raise ConfigError(
            f"privacy cannot be proven under {name}: how old updates are, and how often a client takes part, depends "
            "on the clients' speeds; use fedavg, fedprox or a server optimizer (fedavgm, fedadam, ...)",
            field="privacy",
        )
    if side.sums:
        raise ConfigError(
            f"privacy cannot be proven under {name}: its clients also send {', '.join(side.sums)}, which has no clip; "
            "use fedavg, fedprox or a server optimizer (fedavgm, fedadam, ...)",
            field="privacy",
        )
    if side.stateful and given.joining is None:
        _refuse_states(name, side)
    if side.finetune is not None:
        raise ConfigError(
            "finetune measures models on the clients' rows without noise, which would void the claim of privacy: leave "
            "finetune out, and fine-tune where the rows are",
            field="finetune",
        )


def _refuse_states(name: str, side: ClientSide) -> None:
    """Refuse what simulated clients store between rounds: it is in checkpoints, without noise. Raises ConfigError."""
    if side.private:
        what, field, way = f"private={','.join(side.private)}", "private", "leave private out"
    elif side.keeps_buffers:
        what, field, way = (
            "buffers=keep",
            "buffers",
            "leave buffers out, and use no BatchNorm, but layers that normalize each row alone",
        )
    else:
        what, field, way = name, "privacy", "use fedavg, fedprox or a server optimizer (fedavgm, fedadam, ...)"
    raise ConfigError(
        f"{what} stores a state of each client. The checkpoints of simulated clients have these states without noise, "
        f"and thereby say who took part, so privacy cannot be proven: {way}; or let real clients keep their states "
        "(clients=remote)",
        field=field,
    )


def _refuse_options(name: str, given: Federation, spec: PrivacySpec) -> None:
    aggregation = given.aggregation
    if aggregation.rule != "mean":
        raise ConfigError(
            f"rule is {quoted(aggregation.rule)}, "
            "but privacy adds noise to a sum, and a robust rule is none: how much one "
            "client changes its result is not known. Leave rule out: the clip already bounds each client",
            field="rule",
        )
    if aggregation.clip is not None:
        raise ConfigError(
            f"clip is {aggregation.clip:g} beside privacy, which has a clip of its own: write "
            f"privacy=dp(clip={aggregation.clip:g},...) and leave clip out",
            field="clip",
        )
    if given.real.client_evaluation and spec.mechanism == TREE:
        raise ConfigError(
            "client_evaluation=true asks clients in each evaluation, but tree noise assumes that each takes part once "
            "in a tree: leave it out, and evaluate where the rows are (rayps personal), or give sampling=all",
            field="client_evaluation",
        )
    for option, value, unset in (
        ("min_replies", aggregation.min_replies, 1),
        ("enough", aggregation.enough, None),
        ("over_selection", aggregation.over_selection, 0.0),
        ("attack", given.population.attack, None),
        ("report", given.report, None),
    ):
        if value != unset:
            raise ConfigError(
                f"{option} is {value!r}: what a private round does or says must not depend on how many clients reply, "
                f"or on what single clients send; leave {option} out",
                field=option,
            )
    if spec.physical_batch is not None:
        raise ConfigError(
            f"privacy has physical_batch={spec.physical_batch}, which is for the privacy of rows (all_reduce, "
            f"parameter_server); {name} protects clients: leave it out",
            field="privacy",
        )

"""The clients' halves of the federated strategies that a light client knows, for torch and for numpy.

`c` is the client's turn, in the symbols of the papers: `c.w` is the model as one vector, which a step changes, `c.w_t`
the round's model, `c.grad(b)` the gradient of the loss on the batch b at `c.w`, `c.step(g)` a step of the client's
optimizer, `c.state` what the client stores between rounds, `c.shared` the server's state, `c.reply` the vectors that
are sent beside the model. `c.private` and `c.shared_names` name the parameters that stay with the
client and those that are sent. `c.sign` is -1 if the optimizer maximizes, else 1.

McMahan et al. 2017 (FedAvg), Reddi et al. 2021 and Nguyen et al. 2022 (server optimizers and FedBuff, whose clients
train as in FedAvg), Li et al. 2020 (FedProx), Karimireddy et al. 2020 (SCAFFOLD, option II), Li et al. 2021 (Ditto),
Arivazhagan et al. 2019 (FedPer, whose clients train as in FedAvg), Collins et al. 2021 (FedRep).
`rayps.strategies` has both halves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rayps_client.errors import ConfigError
from rayps_client.trainers.client_turn import ClientSteps
from rayps_client.values import JsonObject

Half = Callable[[ClientSteps[Any], JsonObject], None]


def fedavg(c: ClientSteps[Any], options: JsonObject) -> None:
    """Train by w_k <- w_k - eta grad(w_k; b)."""
    for b in c.batches():
        c.step(c.grad(b))


def fedprox(c: ClientSteps[Any], options: JsonObject) -> None:
    """Train by w_k <- w_k - eta (grad(w_k; b) + mu (w_k - w_t))."""
    mu = _number(options, "mu")
    for b in c.batches():
        c.step(c.grad(b) + c.sign * mu * (c.w - c.w_t))


def scaffold(c: ClientSteps[Any], options: JsonObject) -> None:
    """Train by y <- y - eta (grad(y; b) - c_i + c); then c_i+ <- c_i - c + (w - y) / (L eta)."""
    c_i, c_t = c.state.get("c", 0.0), c.shared.get("c", 0.0)
    for b in c.batches():
        c.step(c.grad(b) - c_i + c_t)
    if c.lr:
        c.state["c"] = c_i - c_t + (c.w_t - c.w) * c.sign / (c.steps * c.lr)
    else:
        c.state["c"] = c.w * 0 + c_i
    c.reply["c"] = c.state["c"] - c_i


def ditto_personal(c: ClientSteps[Any], options: JsonObject) -> None:
    """Train the personal model by v_k <- v_k - eta (grad(v_k; b) + lam (v_k - w_t)), on the same batches."""
    lam = _number(options, "lam")
    c.w[:] = c.state.get("v", c.w_t)
    for b in c.batches():
        c.step(c.grad(b) + c.sign * lam * (c.w - c.w_t))
    c.state["v"] = c.copy(c.w)


def statistics(c: ClientSteps[Any], options: JsonObject) -> None:
    """Add to w the mean of the rows' vectors times a_k, for a `rayps.StatisticsWorkload`: see `rayps.strategies`."""
    share, most = 1.0, options.get("rows_per_client")
    if options.get("by") == "rows":
        share = min(c.n, most) / most if isinstance(most, int) else float(c.n)
    for b in c.batches(1):
        c.w -= c.grad(b) * (share * sum(each.size for each in b) / c.n)


def fedrep(c: ClientSteps[Any], options: JsonObject) -> None:
    """Train the head h_i with phi fixed, then phi_i with the head fixed."""
    h, phi = c.private, c.shared_names
    if h:
        for b in c.batches(_whole(options, "head_epochs")):
            c.step(c.grad(b, h))
    for b in c.batches():
        c.step(c.grad(b, phi))


HALVES: Mapping[str, Half] = {
    "fedavg": fedavg,
    "fedavgm": fedavg,
    "fedadagrad": fedavg,
    "fedadam": fedavg,
    "fedyogi": fedavg,
    "fedbuff": fedavg,
    "fedprox": fedprox,
    "scaffold": scaffold,
    "ditto": fedavg,
    "fedper": fedavg,
    "fedrep": fedrep,
    "statistics": statistics,
}
OWN_MODEL: Mapping[str, str] = {"ditto": "v"}  # the name, in a client's state, of its personal model
PERSONAL: Mapping[str, Half] = {"ditto": ditto_personal}  # what a client trains beside its reply


def half_of(options: JsonObject) -> Half:
    """Return the client's half of the strategy with these options. Raises ConfigError if it is not known here."""
    name = str(options.get("name"))
    if name not in HALVES:
        raise ConfigError(
            f"the job's strategy is {name}, and the light client knows {', '.join(HALVES)}: install rayps on this "
            "machine, and run `rayps client`",
            field="strategy",
        )
    return HALVES[name]


def _whole(options: JsonObject, name: str) -> int:
    value = options[name]
    assert isinstance(value, int), "the service has checked the options"
    return value


def _number(options: JsonObject, name: str) -> float:
    value = options[name]
    assert isinstance(value, (int, float)), "the service has checked the options"
    return value

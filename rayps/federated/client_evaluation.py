"""Real clients evaluate the model on their own rows, and send sums: metrics `client_*` and `personal_*`.

At each evaluation, all connected clients get an order with the parameters. Each evaluates them, and its personal model
if the strategy has such, on the rows of its own `evaluation_data()`. Its rows, labels and personal model stay with it.
Without `secure` the service sees each client's sums and row counts, adds them, and deletes them. With `secure` they go
through the same protocol as updates: the service learns one sum over the clients, of which each counts with
min(its rows, max_weight), and its metrics with values from -metric_bound to metric_bound. Only means are summed so, and
only those that the job's own evaluation has too, whose names are public. `client_replies` is how many clients are in
the sums.

With `privacy`, each evaluation is one more release of the job's mechanism, and is charged in the ledger. It asks as
many clients as a round. Each counts once, with a vector of the norm metric_bound sqrt(elements) at most, to whose sum
the server or the clients add noise of noise_multiplier times this norm. The noised sum is divided by the number of
asked clients, so a client that does not reply counts as zeros. An evaluation that the budget does not allow is left
out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
from rayps_client.errors import DataError
from rayps_client.exchange.signed_orders import OrderFacts
from rayps_client.secure.quantise import EXTRAS, ClientNumbers, Quantiser
from rayps_client.secure.secure_facts import MOST_BITS
from rayps_client.secure.take_part import quantiser_of
from rayps_client.trainers.own_metrics import (
    OwnMetrics,
    OwnTotals,
    Vector,
    VectorLayout,
    decode_metrics,
    totals_of_sum,
    vector_of,
)

from rayps.core.metrics import Total, Totals, add_totals
from rayps.federated.private_rounds import PrivateRounds
from rayps.federated.remote.mailbox import Mailbox, RoundOrder
from rayps.federated.remote.secure_options import LEAST, SecureOptions
from rayps.federated.secure_rounds import SecureRounds
from rayps.federated.strategy_interface import Federation

MOST_SECONDS = 300.0  # the longest deadline: the driver waits 600 s for the evaluation at the end of a phase
REPLIES = "client_replies"
_MOST_BYTES = 1 << 20  # largest size of a client's metrics in clear

Waiting = tuple[Callable[[str], None], Callable[[RoundOrder], None]]


class ClientEvaluation:
    """One evaluation by the clients of a job."""

    def __init__(
        self, mailbox: Mailbox, given: Federation, deadline: float, private: PrivateRounds | None = None
    ) -> None:
        """`deadline`: seconds for which the evaluation waits for the clients. `private`: the noise, or None."""
        self._mailbox, self._deadline, self._bound = mailbox, deadline, given.real.metric_bound
        self._secure, self._private = given.secure, private

    def run(
        self, facts: OrderFacts, asked: dict[int, str], parameters: bytes, of_job: Totals, waiting: Waiting
    ) -> tuple[Totals, str]:
        """Return the totals of the clients' metrics, and why there are none, or "".

        `waiting`: the functions that pause with a text of what is waited for, and that wait for an order's replies.
        """
        pause, wait_for = waiting
        if self._secure is None and self._private is None:
            used = self._in_clear(facts, asked, parameters, wait_for)
            return (summed(used), "") if used else ({}, "no client has sent any")
        names = sorted(name for name, total in of_job.items() if total.how == "mean")
        layout = VectorLayout(names, self._bound, facts["personal"])
        options = self._secure or SecureOptions(clip=self._bound, bits=MOST_BITS, max_weight=1)
        sums = SecureRounds(
            self._mailbox,
            dataclasses.replace(options, clip=self._bound * math.sqrt(layout.size)),
            LEAST,
            layout.size,
            private=self._private,
        )
        if not names or (self._secure is not None and len(asked) < LEAST):
            return {}, "a sum needs metrics of the job's own evaluation data, and under masks two connected clients"
        shares = None if self._private is None else self._private.shares
        if shares is not None and layout.size > shares.size:
            return {}, f"the clients' noise is for {shares.size} elements, and there are {layout.size} metrics"
        own: OrderFacts = {**facts, "metrics": {"names": names, "bound": self._bound}}
        if self._secure is None:
            used = self._in_clear(own, asked, parameters, wait_for)
            found = _added(used, layout, quantiser_of(sums.facts(len(asked))))
            return self._noised(found, layout, facts), ""
        total, _ = sums.sum_of(own, asked, self._deadline, parameters, pause)
        if total.numbers is None:
            return {}, str(total.void) if self._private is None else "too few clients have sent theirs"
        if self._private is not None:
            return self._noised(total.numbers.update, layout, facts), ""
        parts = totals_of_sum(total.numbers.update, total.numbers.weight, layout)
        return _named(*parts) | {REPLIES: Total(len(total.survivors), 0.0, "sum")}, ""

    def _in_clear(
        self, facts: OrderFacts, asked: dict[int, str], parameters: bytes, wait_for: Callable[[RoundOrder], None]
    ) -> list[OwnMetrics]:
        """Return the metrics of the clients that have sent usable ones."""
        order = self._mailbox.open_round(facts, asked, self._deadline, _MOST_BYTES, parameters)
        wait_for(order)
        files = self._mailbox.close_round(order.serial)
        replies = [decode_metrics(path.read_bytes()) for path in files.values()]
        if files:
            self._mailbox.write_verdicts(order.serial, {})
        return [reply for reply in replies if not isinstance(reply, str) and reply.rows]

    def _noised(self, total: Vector, layout: VectorLayout, facts: OrderFacts) -> Totals:
        """Return the metrics of a private job: the noised sum, divided by the fixed number of asked clients."""
        private = self._private
        assert private is not None, "only a private job has noise"
        norm, at = self._bound * math.sqrt(layout.size), facts["phase"] + facts["round"]
        noised = private.release_metrics(total, norm, at)
        count = private.job.drawn
        found = {f"client_{name}": Total(float(noised[k]), count) for k, name in enumerate(layout.names)}
        if layout.personal:
            more = noised[len(layout.names) :]
            found |= {f"personal_{name}": Total(float(more[k]), count) for k, name in enumerate(layout.names)}
        return found


def _added(replies: list[OwnMetrics], layout: VectorLayout, quantiser: Quantiser) -> Vector:
    """Return the sum of these clients' vectors, each rounded and limited as under masks, with equal weight."""
    total = np.zeros(layout.size)
    for reply in replies:
        try:
            vector = vector_of(reply, layout)
        except DataError:  # its workload has other metrics: it counts as one that adds zeros
            continue
        total += quantiser.integers(ClientNumbers(vector, 1, 0.0, 0))[:-EXTRAS] * quantiser.step
    return total


def summed(replies: list[OwnMetrics]) -> Totals:
    """Return the totals over these clients, as metrics `client_*` and `personal_*`."""
    found: Totals = {}
    for reply in replies:
        add_totals(found, _named(reply.shared, reply.personal))
    return found | {REPLIES: Total(len(replies), 0.0, "sum")}


def _named(shared: OwnTotals, personal: OwnTotals) -> Totals:
    parts = (("client", shared), ("personal", personal))
    return {f"{prefix}_{name}": Total(*total) for prefix, part in parts for name, total in part.items()}


def cut_metrics(of_job: Totals, found: Totals, bound: float) -> str:
    """Return which metrics of clients are limited to `bound` although the job's own value is larger; "" if none is.

    The job's own evaluation is public, and stands for what the clients would have without the limit.
    """
    own = {name: total.value / total.weight for name, total in of_job.items() if total.how == "mean" and total.weight}
    large = {name: value for name, value in own.items() if abs(value) > bound and f"client_{name}" in found}
    if not large:
        return ""
    names = ", ".join(f"client_{name} (the job's own {name} is {value:.3g})" for name, value in large.items())
    return (
        f"each client's metrics are limited to values from {-bound:g} to {bound:g}, which cuts {names}: give a "
        "metric_bound that is larger than the clients' values"
    )

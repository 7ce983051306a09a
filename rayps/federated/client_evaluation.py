"""Real clients evaluate the model on their own rows, and send sums: metrics `client_*` and `personal_*`.

At each evaluation, all connected clients get an order with the parameters. Each evaluates them, and its personal model
if the strategy has such, on the rows of its own `evaluation_data()`. Its rows, labels and personal model stay with it.
Without `secure` the service sees each client's sums and row counts, adds them, and deletes them. With `secure` they go
through the same protocol as updates: the service learns one sum over the clients, of which each counts with
min(its rows, max_weight), and its metrics with values from -metric_bound to metric_bound. Only means are summed so, and
only those that the job's own evaluation has too, whose names are public. `client_replies` is how many clients are in
the sums.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable

from rayps_client.own_metrics import OwnMetrics, OwnTotals, decode_metrics, totals_of_sum, vector_length

from rayps.core.metrics import Total, Totals, add_totals
from rayps.federated.remote.mailbox import Mailbox, RoundOrder
from rayps.federated.remote.secure_options import LEAST, SecureOptions, secure_of
from rayps.federated.remote.signed_orders import OrderFacts
from rayps.federated.secure_rounds import SecureRounds
from rayps.federated.strategy_interface import FederatedView

MOST_SECONDS = 300.0  # the longest deadline: the driver waits 600 s for the evaluation at the end of a phase
REPLIES = "client_replies"
_MOST_BYTES = 1 << 20  # largest size of a client's metrics in clear

Waiting = tuple[Callable[[str], None], Callable[[RoundOrder], None]]


class ClientEvaluation:
    """One evaluation by the clients of a job."""

    def __init__(self, mailbox: Mailbox, strategy: FederatedView, deadline: float) -> None:
        """`deadline`: seconds for which the evaluation waits for the clients."""
        self._mailbox, self._deadline, self._bound = mailbox, deadline, strategy.metric_bound
        self._secure = secure_of(strategy.secure)

    def run(
        self, facts: OrderFacts, asked: dict[int, str], parameters: bytes, of_job: Totals, waiting: Waiting
    ) -> tuple[Totals, str]:
        """Return the totals of the clients' metrics, and why there are none, or "".

        `waiting`: the functions that pause with a text of what is waited for, and that wait for an order's replies.
        """
        pause, wait_for = waiting
        if self._secure is not None:
            return self._under_masks(self._secure, facts, asked, (parameters, of_job), pause)
        order = self._mailbox.open_round(facts, asked, self._deadline, _MOST_BYTES, parameters)
        wait_for(order)
        files = self._mailbox.close_round(order.serial)
        replies = {number: decode_metrics(path.read_bytes()) for number, path in files.items()}
        if files:
            self._mailbox.write_verdicts(order.serial, {})
        used = [reply for reply in replies.values() if not isinstance(reply, str) and reply.rows]
        return (summed(used), "") if used else ({}, "no client has sent any")

    def _under_masks(
        self,
        options: SecureOptions,
        facts: OrderFacts,
        asked: dict[int, str],
        given: tuple[bytes, Totals],
        pause: Callable[[str], None],
    ) -> tuple[Totals, str]:
        parameters, of_job = given
        names = sorted(name for name, total in of_job.items() if total.how == "mean")
        if not names or len(asked) < LEAST:
            return {}, "a sum under masks needs two connected clients, and metrics of the job's own evaluation data"
        personal = facts["personal"]
        size = vector_length(names, personal)
        rounds = SecureRounds(
            self._mailbox, dataclasses.replace(options, clip=self._bound * math.sqrt(size)), LEAST, size
        )
        own: OrderFacts = {
            **facts,
            "secure": rounds.facts(len(asked)),
            "metrics": {"names": names, "bound": self._bound},
        }
        total = rounds.stored(own, hashlib.sha256(parameters).hexdigest())
        if total is None:
            most = rounds.most_bytes(own["secure"])
            order = self._mailbox.open_round(own, asked, self._deadline, most, parameters)
            total = rounds.run(order, pause)
            self._mailbox.close_round(order.serial)
        if total.numbers is None:
            return {}, str(total.void)
        parts = totals_of_sum(total.numbers.update, total.numbers.weight, names, self._bound, personal)
        return _named(*parts) | {REPLIES: Total(len(total.survivors), 0.0, "sum")}, ""


def summed(replies: list[OwnMetrics]) -> Totals:
    """Return the totals over these clients, as metrics `client_*` and `personal_*`."""
    found: Totals = {}
    for reply in replies:
        add_totals(found, _named(reply.shared, reply.personal))
    return found | {REPLIES: Total(len(replies), 0.0, "sum")}


def _named(shared: OwnTotals, personal: OwnTotals) -> Totals:
    parts = (("client", shared), ("personal", personal))
    return {f"{prefix}_{name}": Total(*total) for prefix, part in parts for name, total in part.items()}

"""Get the replies of real clients in asynchronous rounds (FedBuff): each client has an order of its own.

Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", AISTATS 2022, algorithm 1. Up to
`concurrency` connected clients train at once, each from the parameters at the moment of its order. A client that has
replied gets a new order at once, also in the middle of a round. A round ends when `buffer` updates have arrived, and
does not wait for the other clients: their updates count in a later round. `rayps.federated.remote.async_steps` decides;
this module does what it has decided.

The parameters from which a client has started are read from its order, which has them until its update has counted.
Nothing of an order is in the worker's memory alone: a worker that replaces a lost one continues with the orders of the
mailbox, and takes the updates that have arrived. An update that is rejected (its form is wrong, or it is not finite)
is one of the `buffer` updates of the round, as in a simulation, so that a round ends whatever clients send.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rayps_client.exchange.signed_orders import ROUND, OrderFacts
from rayps_client.exchange.update_codec import decode_start
from rayps_client.trainers.torch_tensors import tensor_of
from torch import Tensor

from rayps.federated.client import ClientReply
from rayps.federated.population.async_events import STALE
from rayps.federated.remote.async_steps import AsyncRules, AsyncStep, ClientStatus, Look, RunningOrder, decide
from rayps.federated.remote.client_orders import ClientOrders, client_of
from rayps.federated.remote.mailbox import RoundOrder
from rayps.federated.remote_codec import layout_rows
from rayps.federated.remote_replies import RemoteReplies
from rayps.federated.reply_source import AGAIN, Round, TrainingTask
from rayps.federated.rules.exact_sum import NOT_FINITE
from rayps.federated.secure_rounds import listed
from rayps.tensors.finite import is_finite

if TYPE_CHECKING:
    from rayps.federated.engine import FederatedEngine

RESTORED = "restored"  # the reason for dropping an update of a round after the checkpoint to which the job has returned
ENDED = "ended"  # the reason for dropping an update that has arrived with the last updates of the last round
_LOOK_SECONDS = 1.0  # pause between two readings of the clients that have joined


@dataclass(slots=True)
class _AsyncRound:
    """An asynchronous round whose updates are being collected."""

    number: int
    w_t: Tensor  # the parameters at its start
    facts: OrderFacts  # of the orders that start in this round
    most_bytes: int  # largest size of an update
    begun: float = field(default_factory=time.time)
    running: dict[int, RoundOrder] = field(default_factory=dict)  # by serial number: neither counted nor lost
    counted: dict[int, RoundOrder] = field(default_factory=dict)  # by serial number: its update counts in this round
    refused: dict[int, str] = field(default_factory=dict)  # by serial number: why a counted update cannot be used
    dropped: list[tuple[int, str]] = field(default_factory=list)  # (client, reason)
    late: set[int] = field(default_factory=set)  # clients that were dropped because they did not reply
    started: set[int] = field(default_factory=set)  # clients that have started in this round
    looked: float = -math.inf  # when the clients that have joined were read last, by the monotonic clock
    base: tuple[int, Tensor] | None = None  # the round and the parameters that were read last

    def usable(self) -> list[RoundOrder]:
        """Return the orders whose updates can be used, by the round in which they started and serial number."""
        found = [order for serial, order in self.counted.items() if serial not in self.refused]
        return sorted(found, key=lambda order: (order.round, order.serial))


class BufferedReplies(RemoteReplies):
    """The real clients of an asynchronous job, for its worker."""

    def __init__(self, engine: FederatedEngine) -> None:
        """Open the mailbox. Raises ConfigError as `RemoteReplies` does."""
        super().__init__(engine)
        self._orders, options = ClientOrders(self._mailbox), self._given.buffered
        assert options is not None, "the rounds are asynchronous"
        self._rules = AsyncRules(
            options.size,
            options.concurrency,
            options.max_staleness,
            self._given.fraction,
            self._joining.least,
            engine.w.plan.seed,
        )
        self._now: _AsyncRound | None = None

    # ---- a round

    def round(self, t: int, w_t: Tensor, shared: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> Round:
        """Keep clients training until `buffer` updates of round `t` have arrived.

        Raises:
            TrainingError: too few clients were connected for `wait` seconds.
        """
        now = self._begin(t, w_t, shared, buffers)
        waiting: float | None = None
        while True:
            look = self._look(now)
            step = decide(look, self._rules)
            if not step.missing:
                self._report_clients()
            self._follow(now, step)
            if len(now.counted) >= self._rules.size and self._take(now):
                break
            if step.missing:
                waiting = waiting or time.monotonic()
                there = {client_of(order) for order in now.running.values()}
                there |= {number for number, status in look.clients.items() if status == "here"}
                self._wait_for_more(t, sorted(there), waiting)
            else:
                waiting = None
                self._wait_for_updates(now)
        self._mailbox.write_waits(None)
        if self._engine.w.position + 1 >= self._engine.w.plan.end:
            self._end(now)
        self.refused = [(client_of(now.counted[serial]), why) for serial, why in now.refused.items()]
        usable = now.usable()
        return Round(
            sorted(now.started),
            now.dropped,
            now.begun,
            time.time(),
            [client_of(order) for order in usable],
            dict(sorted(Counter(t - order.round for order in usable).items())),
        )

    def base(self, version: int, w_t: Tensor) -> Tensor:
        """Return the parameters at the start of round `version`; `w_t`: those of the current round."""
        now = self._now
        assert now is not None, "a round has begun"
        return (
            w_t
            if version == now.number
            else self._start_of(now, next(order for order in now.usable() if order.round == version))
        )

    def replies(self) -> Iterator[tuple[int | TrainingTask, ClientReply]]:
        """Yield the usable replies. Only one reply is in memory at a time."""
        now = self._now
        assert now is not None, "a round has begun"
        for order in now.usable():
            reply = self._reply(now, order)
            assert isinstance(reply, ClientReply), "the update was checked when it arrived"
            yield TrainingTask(client_of(order), order.round, now.number - order.round), reply

    def report_rejected(self, rejected: list[tuple[int, str]]) -> None:
        """Write the reason for each rejected client into the mailbox, then delete all updates of the round.

        Of a client with several updates in the round, the reason is written for the newest.
        """
        now, known = self._now, set(self.refused)
        assert now is not None, "a round has begun"
        reasons = dict(each for each in rejected if each not in known)
        for order in reversed(now.usable()):
            self._orders.settle(order, reasons.pop(client_of(order), None))

    def _begin(self, t: int, w_t: Tensor, shared: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> _AsyncRound:
        """Begin round `t` with the orders that are live."""
        raw, most_bytes = self._prepare(w_t, shared, buffers)
        facts = self._facts(ROUND, t, self._mailbox.known_starts())
        facts["parameters"] = self._orders.publish(raw)
        now = _AsyncRound(t, w_t, facts, most_bytes)
        now.running = {} if self._now is None else self._now.running
        if self._first:
            kept, refused = self._orders.resume(facts)
            now.running = {order.serial: order for order in kept}
            now.dropped += [(client_of(order), RESTORED) for order in refused]
            first = min((order.serial for order in now.running.values() if order.round == t), default=None)
            facts["starts"] = self._mailbox.starts(self._engine.w.position, True, first)
        self._first, self._now = False, now
        return now

    def _look(self, now: _AsyncRound) -> Look:
        if time.monotonic() - now.looked >= _LOOK_SECONDS:
            now.looked = time.monotonic()
            self._members = self._mailbox.members()
        running = [
            RunningOrder(
                order.serial,
                client_of(order),
                order.round,
                order.begun + order.deadline,
                self._orders.has_update(order),
            )
            for order in now.running.values()
        ]
        statuses = {member.number: self._status(member.number) for member in self._members}
        counted = [(client_of(order), order.round) for order in now.counted.values()]
        return Look(now.number, time.time(), running, statuses, counted, now.late)

    def _follow(self, now: _AsyncRound, step: AsyncStep) -> None:
        """Do what `step` says. Verdicts are written before new orders, with which clients ask for them."""
        for serial, reason in step.lost:
            self._drop(now, now.running[serial], reason)
        if step.counts:
            self._members = self._mailbox.members()  # a client may have joined again with other rows
        for serial in step.counts:
            order = now.running.pop(serial)
            reply = self._reply(now, order)
            if reply is None:  # withdrawn in the meantime
                now.running[serial] = order
                continue
            now.counted[serial] = order
            why = reply if isinstance(reply, str) else "" if _is_finite(reply) else NOT_FINITE
            if why:
                now.refused[serial] = why
                self._orders.close(order)
                self._orders.settle(order, why)
        for client, again in step.starts:
            self._start(now, client, again)

    def _drop(self, now: _AsyncRound, order: RoundOrder, reason: str) -> None:
        """End an order whose update does not count, unless the update has arrived in the meantime."""
        if self._orders.close(order) and reason != STALE:
            return  # the next look sees the update
        verdict = None
        if reason == STALE:
            verdict = (
                f"its training began {now.number - order.round} rounds ago, and max_staleness is "
                f"{self._rules.max_staleness}"
            )
        else:
            now.late.add(client_of(order))
        del now.running[order.serial]
        now.dropped.append((client_of(order), reason))
        self._orders.settle(order, verdict)

    def _start(self, now: _AsyncRound, client: int, again: int) -> None:
        """Give a client an order. `again`: how often it has replied from the same parameters."""
        facts: OrderFacts = {**now.facts, "seed": now.facts["seed"] + AGAIN * again}
        order = self._orders.open(facts, (client, self._members[client].name), self._given.deadline, now.most_bytes)
        now.running[order.serial] = order
        now.started.add(client)

    def _take(self, now: _AsyncRound) -> bool:
        """Close the orders that count. Return whether none of their updates was withdrawn in the meantime."""
        whole = True
        for order in now.usable():
            if not self._orders.close(order):
                whole = False
                del now.counted[order.serial]
                now.dropped.append((client_of(order), "left"))
                self._orders.settle(order)
        return whole

    def _end(self, now: _AsyncRound) -> None:
        """End the orders that no later round of this phase counts."""
        for order in now.running.values():
            verdict = None
            if self._orders.close(order):
                now.dropped.append((client_of(order), ENDED))
                verdict = "the job's last round ended before this update could count"
            self._orders.settle(order, verdict)
        now.running = {}
        self._orders.retract()

    def _reply(self, now: _AsyncRound, order: RoundOrder) -> ClientReply | str | None:
        """Decode the update of an order. Return the reason if it cannot be used, or None if there is no update."""
        raw = self._orders.update(order)
        if raw is None:
            return None
        return self._decode(order, client_of(order), raw, self._engine.private_layers.cut(self._start_of(now, order)))

    def _start_of(self, now: _AsyncRound, order: RoundOrder) -> Tensor:
        """Return the parameters from which the client of a live order has started."""
        if order.round == now.number:
            return now.w_t
        if now.base is None or now.base[0] != order.round:
            start = decode_start(self._orders.parameters(order), layout_rows(self._engine.w.flat.layout))
            now.base = order.round, tensor_of(start.w)
        return now.base[1]

    def _status(self, number: int) -> ClientStatus:
        state = self._mailbox.state(number)
        if state != "away":
            return state
        return "away" if self._mailbox.is_away(number) else "silent"

    def _wait_for_updates(self, now: _AsyncRound) -> None:
        names = listed(self.names(sorted({client_of(order) for order in now.running.values()})))
        self._wait_with(
            f"round {now.number} waits for updates: {len(now.counted)} of {self._rules.size} have arrived; training: "
            f"{names or 'none'}; each has {self._given.deadline:g} s from its order"
        )


def _is_finite(reply: ClientReply) -> bool:
    return is_finite(reply.w) and all(map(is_finite, reply.buffers.values()))

"""The orders of asynchronous rounds in a job's mailbox: each asks one client, and many are open at a time.

An order is *live* from its creation until it is settled: it is open, or it is closed and its update is to be counted. A
live order has its parameters, from which the worker computes the client's update. The layout is in
`rayps.federated.remote.mailbox`.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from pathlib import Path

from rayps_client.exchange.signed_orders import OrderedParameters, OrderFacts

from rayps.federated.remote.mailbox import PARAMETERS, Mailbox, RoundOrder, write_json

_PUBLISHED = "parameters-*.safetensors"


class ClientOrders:
    """The live orders of one job, for its worker."""

    def __init__(self, mailbox: Mailbox) -> None:
        """`mailbox`: the job's mailbox."""
        self._mailbox = mailbox
        self._newest = mailbox.folder / _PUBLISHED.replace("*", secrets.token_hex(4))

    def publish(self, parameters: bytes) -> OrderedParameters:
        """Write the parameters with which the next orders start. Return their checksum and size."""
        self._newest.unlink(missing_ok=True)  # orders have links to the earlier parameters
        self._newest.write_bytes(parameters)
        return {"sha256": hashlib.sha256(parameters).hexdigest(), "bytes": len(parameters)}

    def open(self, facts: OrderFacts, client: tuple[int, str], deadline: float, most_bytes: int) -> RoundOrder:
        """Open an order for one client, given as (number, name), with the parameters that were published last."""
        order = self._mailbox.create(
            facts, dict([client]), deadline, most_bytes, lambda path: os.link(self._newest, path)
        )
        self.show(order)
        return order

    def show(self, order: RoundOrder) -> None:
        """Make an order the one that its client receives when it asks for work."""
        write_json(self._mailbox.folder / "asked" / f"{client_of(order)}.json", {"serial": order.serial})

    def live(self) -> list[RoundOrder]:
        """Return all live orders, by serial number. An open order of a synchronous round is one of them."""
        mailbox = self._mailbox
        held = [serial for serial in mailbox.serials() if (mailbox.round_folder(serial) / PARAMETERS).exists()]
        return [order for order in map(mailbox.order, held) if order is not None]

    def has_update(self, order: RoundOrder) -> bool:
        """Return whether the update of a live order has arrived."""
        return self._mailbox.update_bytes(order.serial, client_of(order)) > 0

    def update(self, order: RoundOrder) -> bytes | None:
        """Return the update of a live order, or None if there is none, for example because it was withdrawn."""
        for name in ("inbox", "taken"):
            try:
                return (self._folder(order) / name / str(client_of(order))).read_bytes() or None
            except FileNotFoundError:
                continue
        return None

    def parameters(self, order: RoundOrder) -> bytes:
        """Return the parameters with which a live order started."""
        return (self._folder(order) / PARAMETERS).read_bytes()

    def close(self, order: RoundOrder) -> bool:
        """Close an order: an update that arrives later is refused. Return whether one has arrived before."""
        folder = self._folder(order)
        if self._mailbox.is_open(order.serial):
            (folder / "inbox").rename(folder / "taken")
        return self.has_update(order)

    def settle(self, order: RoundOrder, verdict: str | None = None) -> None:
        """End a closed order: delete its update and its parameters. `verdict`: why the update did not count."""
        self._mailbox.write_verdicts(order.serial, {} if verdict is None else {client_of(order): verdict})
        (self._folder(order) / PARAMETERS).unlink(missing_ok=True)

    def resume(self, facts: OrderFacts) -> tuple[list[RoundOrder], list[RoundOrder]]:
        """Continue, at the start of a round, with the live orders that an earlier worker has left.

        `facts`: those of the orders that start in this round. The job may have returned to a checkpoint: orders of
        later rounds are then ended, and so are those of this round if they have other parameters.

        The parameters that an earlier worker has published are deleted, so that it can open no more orders.

        Returns:
            The orders that continue, and those whose updates had arrived but are refused.
        """
        for path in self._mailbox.folder.glob(_PUBLISHED):
            if path != self._newest:
                path.unlink(missing_ok=True)
        kept, refused = list[RoundOrder](), list[RoundOrder]()
        for order in self.live():
            arrived, was_open = self.has_update(order), self._mailbox.is_open(order.serial)
            if _continues(order.facts, facts) and (arrived or was_open):
                kept.append(order)
                if was_open and not arrived:
                    self.show(order)
            elif self.close(order):
                refused.append(order)
                self.settle(order, "the job has returned to a checkpoint before the update's round")
            else:
                self.settle(order)
        return kept, refused

    def retract(self) -> None:
        """Delete the published parameters, after the last order."""
        self._newest.unlink(missing_ok=True)

    def _folder(self, order: RoundOrder) -> Path:
        return self._mailbox.round_folder(order.serial)


def client_of(order: RoundOrder) -> int:
    """Return the number of the client that an asynchronous order asks."""
    (number,) = order.sampled
    return number


def _continues(order: OrderFacts, now: OrderFacts) -> bool:
    """Return whether the update of an order may count in the round of `now` or a later one."""
    ours, theirs = json.loads(json.dumps(now)), json.loads(json.dumps(order))
    same = all(ours[key] == theirs[key] for key in ("phase", "strategy"))
    if order["round"] == now["round"]:
        return bool(same and ours["parameters"] == theirs["parameters"])
    return bool(same and order["round"] < now["round"])

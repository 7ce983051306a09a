"""The names by which clients and the service know that a sum was asked for before.

Two sums of the same numbers over different clients show, by their difference, one client's number. So:

- the service releases one sum of updates and one of evaluations from the same parameters (`name_sum`); whenever it
  comes back to these parameters, after a void round or from a checkpoint, it uses the stored sum again;
- a client sends one evaluation of the same parameters, and one update of a round from the same parameters
  (`name_vector`). It cannot know whether an earlier round was void, so an update of another round is another vector.

Both follow from the order alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayps_client.exchange.signed_orders import EVALUATION


def name_sum(kind: str, parameters: str) -> str:
    """Return the name of a sum: `kind` of order, and the SHA-256 hash of the parameters that clients start from."""
    return f"{kind} of {parameters}"


def name_vector(order: Mapping[str, Any]) -> str:
    """Return the name of the numbers that a client sends for an order: it sends them once."""
    parameters = order["parameters"]["sha256"]
    if order["kind"] == EVALUATION:
        return name_sum(EVALUATION, parameters)
    return f"{order['kind']} {int(order['phase']) + int(order['round'])} from {parameters} with seed {order['seed']}"

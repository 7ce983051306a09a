"""The option `clients`, which sets how a job waits for real clients: `clients=remote(least=3,wait=600)`.

    least=1     the number of clients that must be connected before a round starts
    wait=600    seconds for which the job waits for these clients in each round; after this the job fails
    members=false   with true, clients need a certificate of the federation (`rayps serve --members-ca`)

With real clients, the strategy's `deadline` is in real seconds, 600 by default: an update that arrives later does not
count in the round. In asynchronous rounds (fedbuff) each client has this time from its own order, and the job waits
whenever fewer than `least` clients are connected or train. The options of simulated clients (speed, available, dropout,
attack, enough, over_selection) are refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rayps_client.errors import ConfigError
from rayps_client.exchange.signed_orders import DEADLINE as DEADLINE
from rayps_client.values import Json, Keywords

from rayps.core.strategy.text import form, quote
from rayps.federated.population.options import PopulationSpec

REMOTE = "remote"


@dataclass(frozen=True, slots=True)
class JoinOptions:
    """The options of `clients=remote`."""

    least: int = 1  # number of connected clients for which a round waits
    wait: float = 600.0  # seconds for which a round waits
    members: bool = False  # whether clients need a certificate of the federation


def joining_of(given: Json) -> JoinOptions | None:
    """Parse the option `clients`. Return None for None, which means simulated clients.

    Raises:
        ConfigError: the text is not of the form `remote(least=3,wait=600)`.
    """
    if given is None:
        return None
    facts = form(given) if isinstance(given, str) else given
    if not isinstance(facts, Mapping) or facts.get("name") != REMOTE:
        raise ConfigError(
            f"clients is {quote(given)}: "
            "give remote, or remote(least=3,wait=600), for clients that are separate processes\n"
            "(`rayps client`); leave clients out to simulate the clients of the data (client=... of rayps.data)",
            field="clients",
        )
    options: Keywords = {key: value for key, value in facts.items() if key != "name"}
    for key in options:
        if key not in JoinOptions.__dataclass_fields__:
            raise ConfigError(
                f"clients: remote has no option {key!r}: its options are least, wait and members", field="clients"
            )
    found = JoinOptions(**options)
    if isinstance(found.least, bool) or not isinstance(found.least, int) or found.least < 1:
        raise ConfigError(f"clients: least is {found.least!r}: give a whole number of at least 1", field="clients")
    if isinstance(found.wait, bool) or not isinstance(found.wait, (int, float)) or not 0 < found.wait < math.inf:
        raise ConfigError(f"clients: wait is {found.wait!r}: give a finite number of seconds above 0", field="clients")
    if not isinstance(found.members, bool):
        raise ConfigError(f"clients: members is {found.members!r}: give true or false", field="clients")
    return found


def round_seconds(population: PopulationSpec) -> float:
    """Return the deadline of a round of real clients, in seconds."""
    return DEADLINE if population.deadline is None else population.deadline

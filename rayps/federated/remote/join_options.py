"""How a job waits for real clients: `clients=remote`, or `remote(least=3,wait=600)`. Pure.

    least=1     the number of clients that must be connected before a round starts
    wait=600    seconds that the job waits for these clients in each round; then the job fails and names those connected

`deadline` of the strategy is then in real seconds, 600 by default: an update that arrives later does not count in the
round. Options of simulated clients (speed, available, dropout, attack, enough, over_selection) do not apply to real
ones, and are refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rayps.core.errors import ConfigError
from rayps.core.text import form
from rayps.core.values import Json, Keywords
from rayps.federated.population.options import PopulationSpec

DEADLINE = 600.0  # default seconds of a round
REMOTE = "remote"


@dataclass(frozen=True, slots=True)
class JoinOptions:
    """The options of `clients=remote`: the number of clients for which a round waits, and for how long."""

    least: int = 1
    wait: float = 600.0


def joining_of(given: Json) -> JoinOptions | None:
    """Parse the option `clients`. None: the clients are those of the data, simulated on the workers.

    Raises:
        ConfigError: the text is not of the form `remote(least=3,wait=600)`.
    """
    if given is None:
        return None
    facts = form(given) if isinstance(given, str) else given
    if not isinstance(facts, Mapping) or facts.get("name") != REMOTE:
        raise ConfigError(
            f"clients is {given!r}: give remote, or remote(least=3,wait=600), for clients that are processes of their "
            "own\n(`rayps client`); leave it out where the data has the clients (client=... of rayps.data)",
            field="clients",
        )
    options: Keywords = {key: value for key, value in facts.items() if key != "name"}
    for key in options:
        if key not in JoinOptions.__dataclass_fields__:
            raise ConfigError(f"clients: remote has no option {key!r}: it has least and wait", field="clients")
    found = JoinOptions(**options)
    if isinstance(found.least, bool) or not isinstance(found.least, int) or found.least < 1:
        raise ConfigError(f"clients: least is {found.least!r}: give a whole number of at least 1", field="clients")
    if isinstance(found.wait, bool) or not isinstance(found.wait, (int, float)) or not 0 < found.wait < math.inf:
        raise ConfigError(f"clients: wait is {found.wait!r}: give seconds above 0", field="clients")
    return found


def round_seconds(population: PopulationSpec) -> float:
    """Return the deadline of a round of real clients, in seconds."""
    return DEADLINE if population.deadline is None else population.deadline

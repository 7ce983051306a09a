"""The rows of simulated clients. Those of attackers that flip labels have false labels."""

from __future__ import annotations

from rayps.data.base import Data
from rayps.data.clients import Clients
from rayps.federated.client import ClientRows
from rayps.federated.local_training import LocalTraining
from rayps.federated.strategy_interface import Federation


class SimulatedRows:
    """The rows of each client of a data set, as a client of this job trains on them."""

    def __init__(self, given: Federation, data: Data, clients: Clients, seed: int) -> None:
        """Draw the attackers, if the job simulates some. `clients` are those of `data`."""
        self._data, self._clients = data, clients
        attack = given.population.attackers
        self._attack = attack if attack is None else attack.with_classes(clients.label_names)
        flips = attack is not None and attack.flips_labels
        self._flippers = attack.attackers(seed, clients.count) if attack is not None and flips else frozenset[int]()

    def of(self, client: int) -> ClientRows:
        """Return the rows of the client with this number."""
        data, clients = self._data, self._clients
        relabel = self._attack.labels if self._attack is not None and client in self._flippers else None
        shuffle = getattr(data, "shuffle", True)
        return ClientRows(clients.rows(client), clients.batch, data.batch_size, shuffle, relabel, data.drop_last)


def used_rows(local: LocalTraining, data: Data) -> list[int]:
    """Return how many rows an epoch uses of each client of `data`.

    Raises:
        DataError: a client has fewer rows than a batch, and `drop_last` of `data` is True.
    """
    return [
        local.used(rows, data.batch_size, drop_last=data.drop_last, who=f"client {name!r}")
        for name, rows in zip(data.clients.names, data.clients.sizes.tolist(), strict=True)
    ]

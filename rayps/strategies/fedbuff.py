"""FedBuff: buffered, asynchronous federated learning, which does not wait for slow clients.

Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba, "Federated Learning with Buffered Asynchronous Aggregation",
AISTATS 2022, algorithm 1. M clients (`concurrency`) train at any time, each from the server's parameters at its start.
The server has made tau steps since an arriving update D started; D has the weight s(tau) = (1 + tau)^-1/2. After K
updates (`buffer`),

    server:   w <- w + server_lr * (sum of s(tau) D) / K

which is one round. An update whose tau is above `max_staleness` is dropped and counted. Clients really train, but in
virtual time: a client's speed and availability determine the end of its training
(`rayps.federated.population.async_events`). A run therefore has the same bits under any load, and with any number of
workers. Old parameters are stored as long as a client trains from them. `decay` is the exponent (1/2 above); with 0 all
updates have equal weight. With K = M = all clients, the method is FedAvg with equal weights for all clients.

With `clients=remote`, time is real (`rayps.federated.buffered_replies`): updates come when real clients send them, and
`deadline` is the time that each client has from its order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rayps.core.refusals.table import refuse
from rayps.core.strategy import options
from rayps.federated.strategy_interface import Buffered
from rayps.strategies.federated import Federated
from rayps.strategies.federated_features import features_of_federation

if TYPE_CHECKING:
    from rayps.federated.engine import FederatedServer

_LEAST = 2.0**-1000  # the least weight of a reply, so that weights are above 0 for any decay


@dataclass(frozen=True, init=False)
class FedBuff(Federated):
    """Clients train without waiting for each other. The server makes a step after every K updates that arrive.

    Example:
        rayps.train(clients, strategy=rayps.FedBuff(buffer=2), workers=2)
    """

    buffer: int = 10
    concurrency: int | None = None  # None means `fraction` of the clients
    server_lr: float = 1.0
    max_staleness: int | None = None
    decay: float = 0.5
    name: ClassVar[str] = "fedbuff"

    def __post_init__(self) -> None:
        super().__post_init__()
        for field, least, free in (("buffer", 1, False), ("concurrency", 1, True), ("max_staleness", 0, True)):
            options.whole(self, field, least, none=free)
        options.number(self, "server_lr", above=0)
        options.number(self, "decay", least=0)
        refuse(features_of_federation(self.name, self.federation, self.weight) | {"fedbuff": self.buffer})

    @property
    def buffered(self) -> Buffered:
        """The options of the asynchronous buffer: a round ends after `buffer` updates."""
        return Buffered(self.buffer, self.concurrency, self.max_staleness)

    def weight(self, n: int, staleness: int) -> float:
        """Return s(tau), the weight of an update during whose training the server has made `staleness` steps."""
        return max(float((1.0 + staleness) ** -self.decay), _LEAST)

    def server(self, s: FederatedServer) -> None:
        """Apply w <- w + server_lr * (sum of s(tau) D) / K."""
        s.w.add_(s.delta, alpha=self.server_lr * s.weight / self.buffer)

"""Federated averaging: clients train separately, the server averages their parameters.

McMahan, Moore, Ramage, Hampson, Aguera y Arcas, "Communication-Efficient Learning of Deep Networks from Decentralized
Data", AISTATS 2017, algorithm 1. In round t, for each client k of the cohort S:
    client k: w_k <- w_t;  for each batch b of its n_k samples, E times over:  w_k <- w_k - eta grad(w_k; b)
    server:   w_(t+1) <- sum_S n_k w_k / sum_S n_k, over the clients that replied
FedSGD is local_epochs=1, batch_size=0 (all rows at once), fraction=1.
Common options are in `rayps.strategies.federated`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rayps.strategies.federated import Federated

if TYPE_CHECKING:
    from rayps.federated.client import ClientTurn
    from rayps.federated.engine import FederatedServer


@dataclass(frozen=True, init=False)
class FedAvg(Federated):
    """Clients train separately from the same model. The mean of their models, by samples, is the next model.

    Example:
        rayps.train(clients, strategy=rayps.FedAvg(fraction=0.5, local_epochs=2), workers=2)  # data with clients
    """

    name: ClassVar[str] = "fedavg"

    def client(self, c: ClientTurn) -> None:
        """Train the client on its own batches, with its own optimizer."""
        for b in c.batches():
            c.step(c.grad(b))

    def server(self, s: FederatedServer) -> None:
        """Set w to the mean of the clients' models."""
        assert s.mean is not None, "a synchronous round has a mean"
        s.w.copy_(s.mean)

"""FedProx: a proximal term keeps the clients' models near the model with which the round starts.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous Networks", MLSys 2020,
algorithm 2.
Client k minimizes its own loss plus (mu/2) ||w - w_t||^2:
    w_k <- w_k - eta (grad(w_k; b) + mu (w_k - w_t))
and the server averages as in FedAvg, weighted by samples. (The paper draws clients with probabilities in proportion to
their samples and averages with equal weights, which is the same in expectation.) mu = 0 is FedAvg. The larger mu is,
the less a client's model can change. eta * mu must stay below 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rayps.core.strategy import options
from rayps.strategies.fedavg import FedAvg

if TYPE_CHECKING:
    from rayps.federated.client import ClientTurn


@dataclass(frozen=True, init=False)
class FedProx(FedAvg):
    """FedAvg with a penalty on a client's distance from the round's model: for clients with different data or speed.

    Example:
        rayps.train(clients, strategy=rayps.FedProx(mu=0.01), workers=2)
    """

    mu: float = 0.01
    name: ClassVar[str] = "fedprox"

    def __post_init__(self) -> None:
        super().__post_init__()
        options.number(self, "mu", least=0)

    def client(self, c: ClientTurn) -> None:
        """Train the client on its own batches, with mu (w_k - w_t) added to each gradient."""
        for b in c.batches():
            c.step(c.grad(b) + c.sign * self.mu * (c.w - c.w_t))

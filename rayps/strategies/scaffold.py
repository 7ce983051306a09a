"""SCAFFOLD: each client corrects its steps by the difference between its own gradients and the mean over clients.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
ICML 2020, algorithm 1, option II. The server stores w and c, client i of N stores c_i; c and all c_i start as 0. In
round t, with the cohort S:
    client i: y <- w;  L times:  y <- y - eta (grad(y; b) - c_i + c)
              c_i+ <- c_i - c + (w - y) / (L eta);   replies y - w and c_i+ - c_i
    server:   w <- w + server_lr * mean_S(y_i - w);   c <- c + (1/N) sum_S (c_i+ - c_i)
The factor is 1/N, not 1/|S|, so that c is the mean of all c_i even if only some clients take part. With a robust
`rule`, the sum over S is replaced by |S| times the rule's result for the c_i+ - c_i. Attackers can then change c only
within the rule's bound. As in the paper, all clients have equal weight, whatever their samples. The clients' optimizer
must be plain SGD with the rate eta. If eta is 0, c_i does not change. With `maximize`, the steps have the opposite
sign, and c_i+ is c_i - c + (y - w) / (L eta). All c_i are stored on disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rayps.core.strategy import options
from rayps.strategies.federated import Federated

if TYPE_CHECKING:
    from rayps.federated.client import ClientTurn
    from rayps.federated.engine import FederatedServer


@dataclass(frozen=True, init=False)
class Scaffold(Federated):
    """FedAvg with a correction of each client's gradients: for clients with different data, whose models drift apart.

    Example:
        rayps.train(clients, strategy=rayps.Scaffold(fraction=0.5), workers=2)
    """

    server_lr: float = 1.0
    name: ClassVar[str] = "scaffold"
    sums: ClassVar[tuple[str, ...]] = ("c",)
    state: ClassVar[tuple[str, ...]] = ("c",)
    plain: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        options.number(self, "server_lr", above=0)

    def weight(self, n: int, staleness: int) -> float:
        """Return 1: all clients have equal weight."""
        return 1

    def client(self, c: ClientTurn) -> None:
        """Train the client with corrected gradients, then compute its new control variate c_i."""
        c_i, c_t = c.state.get("c", 0.0), c.shared.get("c", 0.0)
        for b in c.batches():
            c.step(c.grad(b) - c_i + c_t)
        if c.lr:
            c.state["c"] = c_i - c_t + (c.w_t - c.w) * c.sign / (c.steps * c.lr)
        else:
            c.state["c"] = c.w * 0 + c_i
        c.reply["c"] = c.state["c"] - c_i

    def server(self, s: FederatedServer) -> None:
        """Add server_lr times the mean of the y_i - w to w, and 1/N of the sum of the c_i+ - c_i to c."""
        s.w.add_(s.delta, alpha=self.server_lr)
        s.memory["c"] = s.memory.get("c", 0.0) + s.sums["c"] / s.clients

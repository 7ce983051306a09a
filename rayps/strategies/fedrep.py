"""FedRep: private heads that are trained first, then the shared representation.

Collins, Hassani, Mokhtari, Shakkottai, "Exploiting Shared Representations for Personalized Federated Learning", ICML
2021, algorithm 1. The model consists of the representation phi and of the head h. In round t, for each client i of the
cohort I_t:
    client i: phi_i <- phi_t;  tau_h epochs over:  h_i <- h_i - eta grad_h f_i(h_i, phi_t; b)
              then once over:                      phi_i <- phi_i - eta grad_phi f_i(h_i, phi_i; b)
              keeps h_i, and replies with phi_i
    server:   phi_(t+1) <- sum n_i phi_i / sum n_i, over the clients that replied
`head_epochs` is tau_h. The representation is trained for `local_epochs` or `local_steps`, 1 epoch by default as in the
paper. Each of the two parts starts with a new optimizer. The paper's mean weights the clients equally, because its
clients have equally many samples.

h_i starts as the head of the initial model, and is stored between rounds. `private` names h: see
`rayps.strategies.fedper`, also for which metrics say something. Without `private` this is FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rayps.core.strategy import options
from rayps.strategies.fedper import FedPer

if TYPE_CHECKING:
    from rayps.federated.client import ClientTurn


@dataclass(frozen=True, init=False)
class FedRep(FedPer):
    """FedPer in which a client trains its head alone first, then the shared layers: for many clients with little data.

    Example:
        rayps.train(clients, strategy=rayps.FedRep(private="2", head_epochs=5), workers=2)  # of an nn.Sequential
    """

    head_epochs: int = 5
    name: ClassVar[str] = "fedrep"

    def __post_init__(self) -> None:
        super().__post_init__()
        options.whole(self, "head_epochs")

    def client(self, c: ClientTurn) -> None:
        """Train the head h_i with phi fixed, then phi_i with the head fixed."""
        h, phi = c.private, c.shared_names
        if h:
            for b in c.batches(self.head_epochs):
                c.step(c.grad(b, h))
        for b in c.batches():
            c.step(c.grad(b, phi))

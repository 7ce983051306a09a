"""FedPer: private layers. Clients share some layers of the model, and each keeps the others for itself.

Arivazhagan, Aggarwal, Singh, Choudhary, "Federated Learning with Personalization Layers", 2019 (arXiv:1912.00818),
algorithms 1 and 2. The model consists of the base layers W_B and of the personalization layers W_P. In round t, for
each client j of the cohort S, with n_j samples:
    client j: (W_B,j, W_P,j) <- (W_B, W_P,j);  trains all layers as in FedAvg;  keeps W_P,j, and replies with W_B,j
    server:   W_B <- sum_S n_j W_B,j / sum_S n_j, over the clients that replied
W_P,j starts as W_P of the initial model, which is the same for all clients, and is stored between rounds.

`private` names W_P: parameters, modules or glob patterns of names (`rayps.federated.private_layers`). With BatchNorm
among these layers, its statistics are private too. The server holds the initial W_P and never changes it: so metrics
without the prefix `personal_` are those of the trained W_B under the initial W_P, and say little. The metrics
`personal_*` evaluate (W_B, W_P,j) on client j's rows of the evaluation data. Without `private` this is FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from rayps_client.trainers.private_patterns import private_patterns
from rayps_client.values import Json

from rayps.federated.strategy_interface import ClientSide
from rayps.strategies.federated import Federated

if TYPE_CHECKING:
    from rayps.federated.client import ClientTurn
    from rayps.federated.engine import FederatedServer


@dataclass(frozen=True, init=False)
class FedPer(Federated):
    """FedAvg in which layers named private stay with each client: for clients whose labels mean different things.

    Example:
        rayps.train(clients, strategy=rayps.FedPer(private="2"), workers=2)  # layer 2 of an nn.Sequential
    """

    private: Json = None
    name: ClassVar[str] = "fedper"

    def __post_init__(self) -> None:
        super().__post_init__()
        private_patterns(self.private)

    @property
    def client_side(self) -> ClientSide:
        """What a client stores: the private layers."""
        patterns = private_patterns(self.private)
        note = (
            f"private= names no layer, so {self.name} is fedavg: give private=LAYER for layers that stay with clients"
        )
        return replace(super().client_side, private=patterns, note=None if patterns else note)

    def client(self, c: ClientTurn) -> None:
        """Train W_B and W_P,j together."""
        for b in c.batches():
            c.step(c.grad(b))

    def server(self, s: FederatedServer) -> None:
        """Set W_B to the mean of the clients' W_B,j."""
        assert s.mean is not None, "a synchronous round has a mean"
        s.w.copy_(s.mean)

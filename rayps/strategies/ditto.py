"""Ditto: each client also trains a personal model, with a penalty on its distance from the global model.

Li, Hu, Beirami, Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021, algorithm 1.
w is trained as in FedAvg. Client k, whenever it takes part, also trains v_k on the same batches:
    v_k <- v_k - eta (grad(v_k; b) + lam (v_k - w_t))
v_k starts as the w_t of the first round in which client k takes part, with the model's buffers. Later, v_k has its own
BatchNorm statistics. With lam = 0, v_k is trained on the client's data alone. The larger lam is, the nearer v_k stays
to w (eta * lam must be below 2). The metrics `personal_*` evaluate v_k on client k's rows of the evaluation data, or w
if client k has not taken part yet. All v_k are stored on disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rayps.core.refusals.table import refuse
from rayps.core.strategy import options
from rayps.strategies.fedavg import FedAvg

if TYPE_CHECKING:
    from rayps.federated.client import ClientTurn


@dataclass(frozen=True, init=False)
class Ditto(FedAvg):
    """FedAvg in which each client also trains a personal model: for clients with different data.

    Example:
        rayps.train(clients, strategy=rayps.Ditto(lam=0.1), workers=2)
    """

    lam: float = 0.1
    name: ClassVar[str] = "ditto"
    state: ClassVar[tuple[str, ...]] = ("v",)
    personal: ClassVar[str | None] = "v"

    def __post_init__(self) -> None:
        super().__post_init__()
        options.number(self, "lam", least=0)
        if self.finetune is not None:
            refuse({"finetune": self.finetune, "ditto": True})

    def beside(self, c: ClientTurn) -> None:
        """Train the client's personal model v_k, after its reply w_k."""
        c.w.copy_(c.state.get("v", c.w_t))
        for b in c.batches():
            c.step(c.grad(b) + c.sign * self.lam * (c.w - c.w_t))
        c.state["v"] = c.w.clone()

"""Server optimizers: the server treats the mean update as a gradient and steps by it.

Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan, "Adaptive Federated Optimization", ICLR 2021,
algorithm 2; FedAvgM: Hsu, Qi, Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification", 2019. Clients train as in FedAvg. With D = sum_S n_k (w_k - w) / sum_S n_k:
    FedAvgM:     v <- beta v + D;                    w <- w + server_lr v
    others:      m <- beta1 m + (1 - beta1) D;       w <- w + server_lr m / (sqrt(v) + tau)
    FedAdagrad:  v <- v + D^2
    FedAdam:     v <- beta2 v + (1 - beta2) D^2
    FedYogi:     v <- v - (1 - beta2) D^2 sign(v - D^2)
m starts as 0, and v starts as tau^2 (in FedAvgM as 0). As in the paper there is no bias correction. D is weighted by
samples, as in FedAvg. The paper's algorithm gives all clients of a cohort equal weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rayps.core.strategy import options
from rayps.core.strategy.strategy import Vector
from rayps.strategies.fedavg import FedAvg

if TYPE_CHECKING:
    from rayps.federated.engine import FederatedServer


@dataclass(frozen=True, init=False)
class FedAvgM(FedAvg):
    """FedAvg with momentum on the server: each round steps by a running sum of the mean updates.

    Example:
        rayps.train(clients, strategy=rayps.FedAvgM(beta=0.9, server_lr=0.3), workers=2)
    """

    server_lr: float = 1.0
    beta: float = 0.9
    name: ClassVar[str] = "fedavgm"

    def __post_init__(self) -> None:
        super().__post_init__()
        options.number(self, "server_lr", above=0)
        options.number(self, "beta", least=0, below=1)

    def server(self, s: FederatedServer) -> None:
        """Apply v <- beta v + D;  w <- w + server_lr v."""
        v = s.memory["v"] = s.delta + self.beta * s.memory.get("v", 0.0)
        s.w.add_(v, alpha=self.server_lr)


@dataclass(frozen=True, init=False)
class FedAdagrad(FedAvg):
    """Adagrad on the server: a learning rate for each parameter, from all updates so far.

    Example:
        rayps.train(clients, strategy=rayps.FedAdagrad(server_lr=0.1), workers=2)
    """

    server_lr: float = 0.1
    beta1: float = 0.0
    tau: float = 1e-3
    name: ClassVar[str] = "fedadagrad"

    def __post_init__(self) -> None:
        super().__post_init__()
        options.number(self, "server_lr", above=0)
        options.number(self, "tau", above=0)
        options.number(self, "beta1", least=0, below=1)

    def second(self, v: Vector | float, d2: Vector) -> Vector:
        """Return the next second moment from the current one `v` and D^2."""
        return v + d2

    def server(self, s: FederatedServer) -> None:
        """Apply m <- beta1 m + (1 - beta1) D;  w <- w + server_lr m / (sqrt(v) + tau)."""
        m = s.memory["m"] = (1 - self.beta1) * s.delta + self.beta1 * s.memory.get("m", 0.0)
        before: Vector | float = s.memory["v"] if "v" in s.memory else self.tau**2
        v = s.memory["v"] = self.second(before, s.delta * s.delta)
        s.w.add_(m / (v.sqrt() + self.tau), alpha=self.server_lr)


@dataclass(frozen=True, init=False)
class FedAdam(FedAdagrad):
    """Adam on the server, without bias correction.

    Example:
        rayps.train(clients, strategy=rayps.FedAdam(server_lr=0.1), workers=2)
    """

    server_lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    name: ClassVar[str] = "fedadam"

    def __post_init__(self) -> None:
        super().__post_init__()
        options.number(self, "beta2", least=0, below=1)

    def second(self, v: Vector | float, d2: Vector) -> Vector:
        """Return the next second moment, beta2 v + (1 - beta2) D^2."""
        return self.beta2 * v + (1 - self.beta2) * d2


@dataclass(frozen=True, init=False)
class FedYogi(FedAdam):
    """FedAdam whose second moment v changes by at most (1 - beta2) D^2 a round, so that it decreases slowly.

    Example:
        rayps.train(clients, strategy=rayps.FedYogi(server_lr=0.1), workers=2)
    """

    name: ClassVar[str] = "fedyogi"

    def second(self, v: Vector | float, d2: Vector) -> Vector:
        """Return the next second moment, v - (1 - beta2) D^2 sign(v - D^2)."""
        return v - (1 - self.beta2) * d2 * (v - d2).sign()

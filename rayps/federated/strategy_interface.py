"""The interface of a federated strategy, which the engine, the simulation and real clients use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from rayps.core.strategy.strategy import StrategyView
from rayps.core.strategy.strategy_families import has_remote_clients
from rayps.federated.local_training import LocalTraining
from rayps.federated.population.options import PopulationSpec
from rayps.federated.remote.client_options import RealClients
from rayps.federated.remote.join_options import JoinOptions, round_seconds
from rayps.federated.remote.secure_options import SecureOptions
from rayps.federated.rules.aggregation_options import Aggregation
from rayps.privacy.options import PrivacySpec

if TYPE_CHECKING:
    from rayps.federated.client import ClientTurn
    from rayps.federated.engine import FederatedServer


@dataclass(frozen=True, slots=True)
class Buffered:
    """The options of asynchronous rounds."""

    size: int  # updates after which a round ends
    concurrency: int | None = None  # clients that train at once; None means the fraction `fraction` of the clients
    max_staleness: int | None = None  # an update that started more rounds ago is dropped; None means no limit


@dataclass(frozen=True, slots=True)
class ClientSide:
    """What a client stores, what it sends in addition to its update, and which optimizer it must have."""

    sums: tuple[str, ...] = ()  # names of vectors in `c.reply`, each as long as w, summed over clients without weights
    state: tuple[str, ...] = ()  # names of vectors in `c.state`, stored between rounds
    model: str | None = None  # the name in `state` of the client's personal model
    keeps_buffers: bool = False  # whether each client has its own BatchNorm statistics; if not, they are averaged
    finetune: int | None = None  # epochs for which a copy of w is trained before it is evaluated on the client's rows
    plain: bool = False  # whether the optimizer must be SGD without momentum and weight decay
    # names or patterns of parameters and buffers that never leave the client: see `rayps.federated.private_layers`
    private: tuple[str, ...] = ()
    answers: bool = False  # whether it sends answers of queries, and no model is trained
    note: str | None = None  # what the user is told once about options that are legal and hardly meant so

    @property
    def stateful(self) -> bool:
        """Whether a state of each client is stored between rounds."""
        return bool(self.state or self.private) or self.keeps_buffers

    @property
    def measured(self) -> bool:
        """Whether each client has a personal model: one of its own, a tuned copy, private layers or own buffers."""
        return bool(self.finetune or self.model or self.private or self.keeps_buffers)


@dataclass(frozen=True, slots=True)
class Federation:
    """What a federated strategy declares to those that run its rounds: plain values."""

    fraction: float  # of the clients that a round asks
    local: LocalTraining  # how long a client trains in a round
    aggregation: Aggregation  # how the replies of a round are combined into one update
    population: PopulationSpec  # the simulated clients
    client_side: ClientSide
    real: RealClients  # the options for real clients, of which `joining` and `secure` are parsed
    joining: JoinOptions | None = None  # how the job waits for real clients; None: its clients are simulated
    secure: SecureOptions | None = None  # how updates are summed under masks; None: the service sees each update
    privacy: PrivacySpec | None = None  # client-level differential privacy; None: the job is not private
    report: str | None = None  # "clients" if each round reports how single clients' updates differ
    buffered: Buffered | None = None  # asynchronous rounds; None: all clients of a round start together

    @property
    def deadline(self) -> float:
        """The deadline of a round of real clients, in seconds."""
        return round_seconds(self.population)


@runtime_checkable
class FederatedView(StrategyView, Protocol):
    """A federated strategy: what it declares, and the paper's algorithm in the methods `client` and `server`."""

    @property
    def federation(self) -> Federation:
        """What the strategy declares."""

    def client(self, c: ClientTurn) -> None:
        """Train a client on `c.w`, which is w_t at the start."""

    def beside(self, c: ClientTurn) -> None:
        """After the training of w_k, do work that is not part of the reply, such as training a personal model."""

    def weight(self, n: int, staleness: int) -> float:
        """Return the weight in `s.delta` of a reply of `n` samples whose training started `staleness` rounds ago."""

    def server(self, s: FederatedServer) -> None:
        """Change the server's parameters `s.w` from w_t to w_(t+1), using the combined replies."""


def state_owner(strategy: StrategyView) -> str | None:
    """Return the strategy's name if the workers store a state of each client, or None if they do not."""
    if not isinstance(strategy, FederatedView) or has_remote_clients(strategy):
        return None  # real clients store their states themselves
    return strategy.name if strategy.federation.client_side.stateful else None

"""The interface of a federated strategy that the engine, the population and real clients use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from rayps.core.families import has_remote_clients
from rayps.core.strategy import StrategyView
from rayps.core.values import Json
from rayps.federated.aggregation import Aggregation
from rayps.federated.local_training import LocalTraining
from rayps.federated.population.attack_spec import AttackSpec
from rayps.federated.population.options import PopulationSpec
from rayps.federated.remote.join_options import JoinOptions, joining_of, round_seconds

if TYPE_CHECKING:
    from rayps.federated.client import ClientTurn
    from rayps.federated.engine import FederatedServer


@dataclass(frozen=True, slots=True)
class Buffered:
    """The options of asynchronous rounds. A round ends after `size` updates; `concurrency` clients train at once."""

    size: int
    concurrency: int | None = None  # None = the share `fraction` of the clients
    max_staleness: int | None = None  # in versions; an older update is dropped; None = no update is dropped


@dataclass(frozen=True, slots=True)
class ClientSide:
    """The client's half of a strategy: what a client stores and sends besides its update, and its kind of optimizer."""

    sums: tuple[str, ...] = ()  # names in `c.reply`, summed unweighted, each as long as w
    state: tuple[str, ...] = ()  # names in `c.state`, stored between rounds
    model: str | None = None  # the name in `state` of the client's own model
    keeps_buffers: bool = False  # BatchNorm statistics stay with each client; otherwise they are averaged
    finetune: int | None = None  # epochs of training of a copy of w before its evaluation on the client's rows
    plain: bool = False  # the optimizer must be SGD without momentum or weight decay

    @property
    def stateful(self) -> bool:
        """Whether a state of each client is stored between rounds."""
        return bool(self.state) or self.keeps_buffers

    @property
    def measured(self) -> bool:
        """Whether each client is evaluated with a model or buffers of its own."""
        return bool(self.finetune or self.model or self.keeps_buffers)


@runtime_checkable
class FederatedView(StrategyView, Protocol):
    """A federated strategy: the options that it declares, and the paper's two halves, `client` and `server`."""

    @property
    def fraction(self) -> float:
        """The share of the clients that a round asks."""

    @property
    def local(self) -> LocalTraining:
        """How long a client trains in a round."""

    @property
    def aggregation(self) -> Aggregation:
        """The options with which the replies of a round become one update."""

    @property
    def population(self) -> PopulationSpec:
        """The options of the simulated clients."""

    @property
    def buffered(self) -> Buffered | None:
        """The options of asynchronous rounds; None = all clients of a round start together."""

    @property
    def clients(self) -> Json:
        """How the job waits for real clients, see `rayps.federated.remote.join_options`; None = they are simulated."""

    @property
    def client_side(self) -> ClientSide:
        """What a client stores, and what it sends besides its update."""

    def client(self, c: ClientTurn) -> None:
        """Train a client on `c.w`, which is w_t at the start."""

    def beside(self, c: ClientTurn) -> None:
        """Run the client's work that is not part of its reply, after the reply; for example, train its own model."""

    def weight(self, n: int, staleness: int) -> float:
        """Return the weight in `s.delta` of a reply of n samples whose training started `staleness` rounds ago."""

    def server(self, s: FederatedServer) -> None:
        """Update the server from the replies: `s.w` is w_t at the start, and must be w_(t+1) at the end."""


def attackers_of(strategy: FederatedView) -> AttackSpec | None:
    """Return the attack that a strategy simulates; None if it simulates none."""
    return strategy.population.attackers


def is_buffered(strategy: FederatedView) -> bool:
    """Return whether replies may have started from older parameters."""
    return strategy.buffered is not None


def deadline_of(strategy: FederatedView) -> float:
    """Return the deadline of a round of real clients, in seconds."""
    return round_seconds(strategy.population)


def joining_under(strategy: FederatedView) -> JoinOptions | None:
    """Return how a job waits for real clients; None if its clients are simulated."""
    return joining_of(strategy.clients)


def keeper_of(strategy: StrategyView) -> str | None:
    """Return the strategy's name if it stores states of clients on the workers; None otherwise."""
    if not isinstance(strategy, FederatedView) or has_remote_clients(strategy):
        return None  # real clients store their own
    side = strategy.client_side
    return strategy.name if side.stateful else None

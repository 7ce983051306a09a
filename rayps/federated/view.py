"""A federated strategy, as the engine, the population and real clients use it."""

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
    """Asynchronous rounds: one ends after `size` updates, of `concurrency` clients that train at any time."""

    size: int
    concurrency: int | None = None  # None = the share `fraction` of the clients
    max_staleness: int | None = None  # versions; an older update is dropped; None = none is


@dataclass(frozen=True, slots=True)
class ClientSide:
    """What a client stores, what it sends besides its update, and what its optimizer must be."""

    sums: tuple[str, ...] = ()  # names in `c.reply`, summed unweighted, each as long as w
    state: tuple[str, ...] = ()  # names in `c.state`, stored between rounds
    model: str | None = None  # which of these is the client's own model
    keeps_buffers: bool = False  # BatchNorm statistics stay with each client; otherwise they are averaged
    finetune: int | None = None  # epochs of training of a copy of w before its evaluation on the client's rows
    plain: bool = False  # the optimizer must be SGD without momentum or weight decay

    @property
    def stateful(self) -> bool:
        """Whether a state of each client is stored between rounds."""
        return bool(self.state) or self.keeps_buffers

    @property
    def measured(self) -> bool:
        """Whether each client is evaluated with a model, or buffers, of its own."""
        return bool(self.finetune or self.model or self.keeps_buffers)


@runtime_checkable
class FederatedView(StrategyView, Protocol):
    """What a federated strategy declares, and the paper's halves: `client` and `server`."""

    @property
    def fraction(self) -> float:
        """The share of the clients that a round asks."""

    @property
    def local(self) -> LocalTraining:
        """How long a client trains in a round."""

    @property
    def aggregation(self) -> Aggregation:
        """How a round makes one update of its replies."""

    @property
    def population(self) -> PopulationSpec:
        """The simulated world of the clients."""

    @property
    def buffered(self) -> Buffered | None:
        """How updates are buffered where replies may have started from older parameters; None = rounds are in step."""

    @property
    def clients(self) -> Json:
        """How the job waits for real clients, see `rayps.federated.remote.join_options`; None = they are simulated."""

    @property
    def client_side(self) -> ClientSide:
        """What a client stores, and what it sends besides its update."""

    def client(self, c: ClientTurn) -> None:
        """Train a client on `c.w`, which is w_t at the start."""

    def beside(self, c: ClientTurn) -> None:
        """Run the client's own work after its reply."""

    def weight(self, n: int, staleness: int) -> float:
        """Return the weight of one reply in `s.delta`, of n samples, started so many rounds ago."""

    def server(self, s: FederatedServer) -> None:
        """Update the server by the replies: `s.w` is w_t, and w_(t+1) afterwards."""


def attackers_of(strategy: FederatedView) -> AttackSpec | None:
    """The attack that is simulated under a strategy; None = there is none."""
    return strategy.population.attackers


def is_buffered(strategy: FederatedView) -> bool:
    """Whether replies may have begun from older parameters."""
    return strategy.buffered is not None


def deadline_of(strategy: FederatedView) -> float:
    """Seconds of a round of real clients."""
    return round_seconds(strategy.population)


def joining_under(strategy: FederatedView) -> JoinOptions | None:
    """How a job waits for real clients; None = they are simulated."""
    return joining_of(strategy.clients)


def keeper_of(strategy: StrategyView) -> str | None:
    """Return the name of a strategy that stores states of clients on the workers; None = it stores none."""
    if not isinstance(strategy, FederatedView) or has_remote_clients(strategy):
        return None  # real clients store their own
    side = strategy.client_side
    return strategy.name if side.stateful else None

"""The base class of federated strategies: many clients with their own data, few workers.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017, algorithm 1.
There are N clients; client k has n_k samples. In round t

    a cohort of max(1, fraction * N) clients is drawn from the seed; clients that drop out or are late do not count
    each trains from w_t on its own data, `local_epochs` (E) or `local_steps` (L) of `batch_size` (B): hook `client`
    updates that are not finite are dropped and named; `clip` clips updates; `rule` makes one update of all w_k - w_t
    the server applies it: hook `server`, which every worker computes with the same result, so nothing is sent for it

A client is not a process: each worker holds one model, trains its part of the cohort in turn, and the workers exchange
once a round. Sums are exact, so a run has the same bits for any number of workers and any order of replies; a single
reply is used unchanged. With fewer than `min_replies` the model is unchanged. An epoch of such a job is one round. The
workload's optimizer is the client's; each client starts a round with a fresh one, at the workload's rate.

For speed, availability, `deadline` and the other options of simulated clients see `rayps.federated.population.options`:
time is virtual. A workload's `clip_norm` clips the gradient of each step of a client; option `clip` clips its update.

`buffers`: BatchNorm statistics are averaged like parameters ("mean"; a robust `rule` is applied to them too, see
`rayps.federated.aggregate`), or stay with each client ("keep"), whose next training starts with them; they are then
evaluated for that client only. `finetune`: at each evaluation every client with rows in the evaluation data trains a
copy of w for this number of epochs, and is evaluated on its own rows: metrics `personal_*`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from rayps.core import options, traffic
from rayps.core.errors import ConfigError
from rayps.core.families import FEDERATED_ROUNDS, ByClient, Rows
from rayps.core.grid import Grid
from rayps.core.nested_options import NESTED, FlatOptions
from rayps.core.strategy import WorkerView
from rayps.core.traffic import Sizes, TrafficCost
from rayps.core.values import Json
from rayps.federated.aggregation import Aggregation
from rayps.federated.local_training import LocalTraining
from rayps.federated.population.options import PopulationSpec, check_fraction
from rayps.federated.remote.join_options import joining_of
from rayps.federated.view import Buffered, ClientSide
from rayps.strategies.base import Strategy

if TYPE_CHECKING:
    from rayps.federated.client import ClientTurn
    from rayps.federated.engine import FederatedServer


@dataclass(frozen=True, init=False)
class Federated(FlatOptions, Strategy):
    """Clients with their own data train separately; a server combines their updates.

    Options of the nested values are given flat: `FedAvg(local_epochs=2, rule="median", dropout=0.1)`.
    """

    fraction: float = 1.0
    local: LocalTraining = field(default_factory=LocalTraining, metadata=NESTED)
    aggregation: Aggregation = field(default_factory=Aggregation, metadata=NESTED)
    population: PopulationSpec = field(default_factory=PopulationSpec, metadata=NESTED)
    evaluate_every: int = 1
    buffers: str = "mean"
    finetune: int | None = None
    clients: Json = None
    loop: ClassVar[str] = FEDERATED_ROUNDS
    sums: ClassVar[tuple[str, ...]] = ()  # names of vectors in `c.reply`, each as long as w, that are summed unweighted
    state: ClassVar[tuple[str, ...]] = ()  # names of vectors in `c.state`, which are stored for each client
    personal: ClassVar[str | None] = None  # the name in `state` of the client's own model, if it has one
    plain: ClassVar[bool] = False  # the client's optimizer must be SGD without momentum or weight decay

    def __post_init__(self) -> None:
        check_fraction(self.fraction)
        options.whole(self, "finetune", none=True)
        options.whole(self, "evaluate_every")
        if self.buffers not in ("mean", "keep"):
            raise ConfigError(
                f"buffers is {self.buffers!r}: give mean (averaged by samples) or keep (they stay with each client)",
                field="buffers",
            )
        if joining_of(self.clients) is not None:
            self._must_suit_real_clients()

    def _must_suit_real_clients(self) -> None:
        self.population.must_be_unset()
        for name, value, unset in (
            ("enough", self.aggregation.enough, None),
            ("over_selection", self.aggregation.over_selection, 0.0),
            ("finetune", self.finetune, None),
        ):
            if value != unset:
                raise ConfigError(
                    f"{name} is {value!r}, and clients is remote: {name} describes simulated clients; leave it out",
                    field=name,
                )
        if self.buffered is not None:
            raise ConfigError(
                f"clients is remote, and {self.name} is asynchronous: real clients take part in rounds; use fedavg, "
                "fedprox, scaffold, ditto or a server optimizer",
                field="clients",
            )

    @property
    def buffered(self) -> Buffered | None:
        """The buffer of updates, if replies may have started from older parameters; None = rounds are in step."""
        return None

    @property
    def remote(self) -> bool:
        """Whether clients are processes outside of the cluster, which hold the data."""
        return self.clients is not None

    @property
    def rows(self) -> Rows:
        """How rows are distributed to workers: each client has its own rows."""
        return ByClient(self.remote)

    def grid(self, workers: int) -> Grid:
        """Return the layout of `workers`.

        Raises:
            ConfigError: the clients are remote and there is more than one worker.
        """
        if self.remote and workers > 1:
            raise ConfigError(
                f"workers is {workers}, and the clients are remote: one worker sums their replies; give 1",
                field="workers",
            )
        return super().grid(workers)

    def cost(self, grid: Grid, sizes: Sizes) -> list[TrafficCost]:
        """Return the cost of a round's exchange: of sums of the clients' replies, or of all replies."""
        if grid.data == 1 or self.remote:
            return [TrafficCost("replies between workers", "0: there is one worker", 0, 0, 0)]
        if self.aggregation.rule != "mean":
            what = f"replies gathered by {grid.data} workers"
            return [TrafficCost(what, "V of each reply to each other worker", None, None)]
        return [traffic.summed_replies(grid, sizes, len(self.sums))]

    @property
    def client_side(self) -> ClientSide:
        """The names of the vectors that a client stores, and of those that it sends besides its update."""
        keeps = self.buffers == "keep"
        return ClientSide(self.sums, self.state, self.personal, keeps, self.finetune, self.plain)

    def client(self, c: ClientTurn) -> None:
        """Train a client on `c.w`, which is w_t at the start."""
        for batch in c.batches():
            c.step(c.grad(batch))

    def beside(self, c: ClientTurn) -> None:
        """Run the client's own work after its reply.

        By then the server does not read `c.w` and the buffers any more.
        """

    def weight(self, n: int, staleness: int) -> float:
        """Return the weight in `s.delta` of one reply of `n` samples, whose client started `staleness` rounds ago."""
        return n

    def server(self, s: FederatedServer) -> None:
        """Update the server by the clients' replies: change `s.w` from w_t to w_(t+1)."""
        raise TypeError(f"{type(self).__name__} does not define what the server does: define server(self, s)")

    def round(self, w: WorkerView) -> None:
        """Train this worker's part of the cohort, then combine the replies."""
        w.clients.round()

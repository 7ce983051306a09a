"""The base class of federated strategies: many clients with their own data, few workers.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017, algorithm 1.
There are N clients; client k has n_k samples. In round t:

    a cohort of max(1, fraction * N) clients is drawn by the seed; clients that drop out or are late do not count;
    each client trains from w_t on its own data, for `local_epochs` (E) or `local_steps` (L) with batches of
      `batch_size` (B): method `client`;
    updates that are not finite are dropped and reported; `clip` clips updates; `rule` computes one update from all
      w_k - w_t;
    the server applies that update: method `server`. Every worker runs this method with the same result, so that the new
      parameters need not be sent.

A client is not a process: each worker has one model and trains its part of the cohort, one client after another. The
workers exchange their results once a round. Sums are exact: a run has the same bits for any number of workers and any
order of replies. A single reply is used unchanged. With fewer than `min_replies` replies the model does not change. An
epoch of a federated job is one round. Clients use the workload's optimizer: each client starts a round with a new
optimizer, at the workload's rate.

`rayps.federated.population.options` describes the options of simulated clients (speed, availability, `deadline` and
others), whose time is virtual. A workload's `clip_norm` clips the gradient of each step of a client. The option `clip`
clips a client's update.

`buffers`: with "mean", BatchNorm statistics are averaged like parameters (a robust `rule` is also applied to them, see
`rayps.federated.combine_replies`). With "keep", each client has its own statistics. The client's next training starts
with them, and only that client is evaluated with them. `finetune`: at each evaluation, every client with rows in the
evaluation data trains a copy of w for this number of epochs. The copy is evaluated on the client's rows, for the
metrics `personal_*`.

`client_evaluation`: at each evaluation, connected real clients evaluate the model, and their personal models, on their
own rows, for the metrics `client_*` and `personal_*` (`rayps.federated.client_evaluation`). Under `secure` the service
sees one sum of them, of metrics limited to [-metric_bound, metric_bound].

`secure`: the updates of real clients are summed under masks, so that no update is seen
(`rayps.federated.remote.secure_options`).

`upload`, `download`: in how few bytes parameters travel between the job and real clients
(`rayps.federated.remote.client_options`).

`report`: with "clients", each round reports how single clients' updates differ (`rayps.federated.rules.client_scores`),
for `Result.client_report` and `rayps report JOB --clients`.

`privacy`: with `dp(...)`, a client's data is protected by noise (`rayps.privacy.options`,
`rayps.federated.private_rounds`). Clients then have equal weights, and what depends on single clients is not reported:
not the training loss, nor who or how many took part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from rayps_client.errors import ConfigError
from rayps_client.values import Json

from rayps.core.grid import Grid
from rayps.core.refusals.table import refuse
from rayps.core.strategy import options, traffic
from rayps.core.strategy.nested_options import NESTED, FlatOptions
from rayps.core.strategy.strategy import WorkerView
from rayps.core.strategy.strategy_families import FEDERATED_ROUNDS, ByClient, Rows
from rayps.core.strategy.text import quote
from rayps.core.strategy.traffic import Sizes, TrafficCost
from rayps.federated.local_training import LocalTraining
from rayps.federated.population.cohort_size import cohort_size
from rayps.federated.population.options import PopulationSpec, check_fraction
from rayps.federated.remote.client_options import RealClients
from rayps.federated.remote.join_options import joining_of
from rayps.federated.remote.secure_options import LEAST, SecureOptions, secure_of
from rayps.federated.rules.aggregation_options import Aggregation
from rayps.federated.strategy_interface import Buffered, ClientSide, Federation
from rayps.privacy.options import PrivacySpec, privacy_of
from rayps.strategies.base import Strategy
from rayps.strategies.federated_features import features_of_federation

if TYPE_CHECKING:
    from rayps.federated.client import ClientTurn
    from rayps.federated.engine import FederatedServer


@dataclass(frozen=True, init=False)
class Federated(FlatOptions, Strategy):
    """Clients with their own data train separately. A server combines their updates.

    The options of `local`, `aggregation`, `population` and `real` are written as options of the strategy:
    `FedAvg(local_epochs=2, rule="median", dropout=0.1)`.
    """

    fraction: float = 1.0
    local: LocalTraining = field(default_factory=LocalTraining, metadata=NESTED)
    aggregation: Aggregation = field(default_factory=Aggregation, metadata=NESTED)
    population: PopulationSpec = field(default_factory=PopulationSpec, metadata=NESTED)
    evaluate_every: int = 1
    buffers: str = "mean"
    finetune: int | None = None
    privacy: Json | PrivacySpec = None
    report: str | None = None
    real: RealClients = field(default_factory=RealClients, metadata=NESTED)
    loop: ClassVar[str] = FEDERATED_ROUNDS
    # names of vectors in `c.reply`, each as long as w, which are summed over clients without weights
    sums: ClassVar[tuple[str, ...]] = ()
    state: ClassVar[tuple[str, ...]] = ()  # names of vectors in `c.state`, which are stored for each client
    personal: ClassVar[str | None] = None  # the name in `state` of the client's personal model, if it has one
    plain: ClassVar[bool] = False  # whether the client's optimizer must be SGD without momentum and weight decay

    def __post_init__(self) -> None:
        check_fraction(self.fraction)
        options.whole(self, "finetune", none=True)
        options.whole(self, "evaluate_every")
        if self.report is not None:
            options.choice(self, "report", ("clients",))
        if self.buffers not in ("mean", "keep"):
            raise ConfigError(
                f"buffers is {self.buffers!r}: give mean (averaged over clients, by samples) or keep (each client has "
                "its own)",
                field="buffers",
            )
        object.__setattr__(self, "privacy", privacy_of(self.privacy))
        refuse(features_of_federation(self.name, self.federation, self.weight))
        secure = secure_of(self.real.secure)
        if secure is not None:
            self._check_for_secure_sums(secure)

    def _check_for_secure_sums(self, secure: SecureOptions) -> None:
        """Check that the numbers of secure sums suit those of the other options."""
        real = self.real
        private, weight = self.privacy_spec, self.weight(7, 0)
        ways = [(weight == 1 and secure.max_weight != 1, "all clients have equal weight: give secagg(max_weight=1)")]
        if private is not None:
            ways += [
                (private.clip != secure.clip, f"privacy has clip={private.clip}: give both the same number"),
                (secure.max_weight != 1, "under privacy all clients have equal weight: give secagg(max_weight=1)"),
            ]
        joining = joining_of(real.clients)
        if joining is not None:
            needed = max(LEAST, math.ceil(round((LEAST - 0.5) / self.fraction, 6)))  # so that a round asks two clients
            part = "" if self.fraction == 1 else f" and fraction={self.fraction:g}"
            why = f"with least={joining.least}{part} a round may ask one client, and is void: the sum is its update"
            ways.append((joining.least < needed, f"{why}; give clients=remote(least={needed}) or more"))
            ways.append(secure.too_few_neighbours(cohort_size(joining.least, self.fraction)))
        for wrong, why in ways:
            if wrong:
                raise ConfigError(f"secure is {quote(real.secure)}, but {why}", field="secure")

    @property
    def privacy_spec(self) -> PrivacySpec | None:
        """The options of client-level differential privacy; None if the job is not private."""
        return privacy_of(self.privacy)

    @property
    def buffered(self) -> Buffered | None:
        """The options of an asynchronous buffer of updates; None if rounds are synchronous."""
        return None

    @property
    def remote(self) -> bool:
        """Whether clients are processes outside of the cluster, which hold the data."""
        return self.real.clients is not None

    @property
    def rows(self) -> Rows:
        """How rows are distributed to workers: each client has its own rows."""
        return ByClient(self.remote)

    def grid(self, workers: int) -> Grid:
        """Return how `workers` workers are arranged in replicas.

        Raises:
            ConfigError: the clients are remote and there is more than one worker.
        """
        if self.remote and workers > 1:
            raise ConfigError(
                f"workers is {workers}, but the clients are remote, and one worker sums their replies: give workers=1",
                field="workers",
            )
        return super().grid(workers)

    def cost(self, grid: Grid, sizes: Sizes) -> list[TrafficCost]:
        """Return the cost of a round's exchange between workers: sums of replies, or all replies with a robust rule."""
        if grid.data == 1 or self.remote:
            return [TrafficCost("replies between workers", "0: there is one worker", 0, 0, 0)]
        if self.aggregation.rule != "mean":
            what = f"replies gathered by {grid.data} workers"
            return [TrafficCost(what, "V of each reply to each other worker", None, None)]
        return [traffic.summed_replies(grid, sizes, len(self.sums))]

    @property
    def federation(self) -> Federation:
        """What the strategy declares to those that run its rounds."""
        return Federation(
            self.fraction,
            self.local,
            self.aggregation,
            self.population,
            self.client_side,
            self.real,
            joining=joining_of(self.real.clients),
            secure=secure_of(self.real.secure),
            privacy=self.privacy_spec,
            report=self.report,
            buffered=self.buffered,
        )

    @property
    def client_side(self) -> ClientSide:
        """The vectors that a client stores, and the vectors that it sends in addition to its update."""
        keeps = self.buffers == "keep"
        return ClientSide(self.sums, self.state, self.personal, keeps, self.finetune, self.plain)

    def client(self, c: ClientTurn) -> None:
        """Train a client on `c.w`, which is w_t at the start."""
        for batch in c.batches():
            c.step(c.grad(batch))

    def beside(self, c: ClientTurn) -> None:
        """Do other work for the client after its reply has been computed. May change `c.w` and the buffers."""

    def weight(self, n: int, staleness: int) -> float:
        """Return the weight in `s.delta` of a reply of `n` samples whose client started `staleness` rounds ago."""
        return n

    def server(self, s: FederatedServer) -> None:
        """Change the server's parameters `s.w` from w_t to w_(t+1), using the combined replies."""
        raise TypeError(f"strategy {type(self).__name__} does not define what the server does: define server(self, s)")

    def round(self, w: WorkerView) -> None:
        """Train this worker's part of the cohort, then combine the replies."""
        w.clients.round()

"""Federated statistics: one round, in which each client sends a bounded vector that is computed from its rows.

Client k has n_k rows x with the encoded vectors v(x) of norm at most 1 (`rayps_client.stats`). It sends
    a_k [1, mean of v(x) over its rows] / sqrt(queries + 1),   so that the norm is at most a_k
and the answer follows from the ratio of the sums over clients of both parts, S / N. The weight a_k:
    by=clients   a_k = 1: the mean over clients of the clients' means
    by=rows      a_k = min(n_k, R) / R with R = rows_per_client: each client counts as at most R rows. If no client has
                 more, this is the mean over all rows. Without privacy R may be left out: a_k = n_k
With privacy, noise N(0, z^2) is added to the sum of these vectors, which have a norm of at most 1 (the Gaussian
mechanism; Dwork and Roth, "The Algorithmic Foundations of Differential Privacy", 2014, appendix A). All queries are one
release, and the count N is noised as well, so that nothing depends on how many clients really replied.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from rayps_client.values import Json

from rayps.core.refusals.table import refuse
from rayps.core.strategy import options
from rayps.core.strategy.strategy import WorkerView
from rayps.federated.strategy_interface import ClientSide
from rayps.strategies.federated import Federated
from rayps.strategies.federated_features import features_of_federation

if TYPE_CHECKING:
    from rayps.federated.client import ClientTurn
    from rayps.federated.engine import FederatedServer

CLIENTS, ROWS = "clients", "rows"
_DONE = "statistics.done"  # name, in the server's memory, of whether a round has counted


@dataclass(frozen=True, init=False)
class Statistics(Federated):
    """Means, histograms and quantiles of the clients' rows, by one round, for a `rayps.StatisticsWorkload`.

    Example:
        class Rows(rayps.StatisticsWorkload):
            queries = {"x": rayps.stats.mean(low=-3, high=3)}
            columns = ("x", "other", "third")

            def data(self):
                return rayps.data.tensors(torch.randn(60, 3), batch_size=10, client=rayps.data.iid(6))

        result = rayps.train(Rows(), strategy=rayps.Statistics(by="rows"))
        result.metrics["x"]
    """

    name: ClassVar[str] = "statistics"
    by: str = CLIENTS
    rows_per_client: int | None = None

    def __post_init__(self) -> None:
        """Check the options. Raises ConfigError."""
        super().__post_init__()
        options.choice(self, "by", (CLIENTS, ROWS))
        options.whole(self, "rows_per_client", none=True)
        found: dict[str, Json] = {
            "statistics": True,
            "buffers": None if self.buffers == "mean" else self.buffers,
            "rows_per_client": self.rows_per_client,
            "no rows_per_client": self.rows_per_client is None or None,
            "answers of clients": self.by == CLIENTS or None,
        }
        if (spec := self.privacy_spec) is not None:
            found["a clip of privacy"] = None if spec.clip == 1.0 else spec.clip
            found["private answers of rows"] = self.by == ROWS or None
        given = features_of_federation(self.name, self.federation, self.weight)
        refuse(given | {name: value for name, value in found.items() if value is not None})

    @property
    def client_side(self) -> ClientSide:
        """A client sends answers of queries."""
        return replace(super().client_side, answers=True)

    def share(self, n: int) -> float:
        """Return a_k, the weight of a client with `n` rows."""
        if self.by == CLIENTS:
            return 1.0
        return float(n) if self.rows_per_client is None else min(n, self.rows_per_client) / self.rows_per_client

    def client(self, c: ClientTurn) -> None:
        """Add to w the mean of the rows' vectors, times a_k: minus the gradient of the workload's linear loss."""
        for b in c.batches(1):
            c.w.sub_(c.grad(b).vector * (self.share(c.n) * b.size / c.n))

    def weight(self, n: int, staleness: int) -> float:
        """Return 1: the client's vector has its weight already."""
        return 1.0

    def server(self, s: FederatedServer) -> None:
        """Set w to the mean of the clients' vectors, and its last element to the noise's standard deviation."""
        assert s.mean is not None, "a synchronous round has a mean"
        s.w.copy_(s.mean)
        s.w[-1] = s.noise
        s.memory[_DONE] = s.w.new_ones(1)

    def round(self, w: WorkerView) -> None:
        """Run the round, unless one has counted. The job ends after the first round that counts."""
        if _DONE not in w.shared:
            w.clients.round()
        if _DONE in w.shared and not w.done:
            w.done, w.reason = True, "the statistics are complete"

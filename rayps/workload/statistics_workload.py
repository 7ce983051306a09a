"""A workload that computes statistics instead of learning: the federated rounds of training sum its vectors.

The "model" has one vector for each query, and a number for the count. The loss of a batch is linear in them:

    loss = - s (count + sum over queries of <vector, mean of the rows' encoded values>),   s = 1 / sqrt(queries + 1)

so that its gradient is minus the mean of the rows' vectors, scaled to a norm of at most 1. Under the strategy
`statistics` a client's update is that mean, and the server's mean of updates is the answer. All that holds for updates
holds for statistics: simulated and real clients, the clip, noise and its account, sums that hide single updates.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch
from rayps_client.statistic_columns import COUNT, NOISE, StatisticColumns, parameter_names, parameter_sizes, scale_of
from rayps_client.stats import Floats, Query, QueryAnswer
from torch import Tensor, nn

from rayps.data.base import Batch, Data
from rayps.data.memory import tensors
from rayps.workload.base import Workload
from rayps.workload.metric_values import Metric


class Accumulators(nn.Module):
    """The vectors of the queries, float64, between the count and the standard deviation of the noise.

    The names of the parameters contain the queries, so that a client with other queries than the job's is refused.
    """

    def __init__(self, queries: Mapping[str, Query]) -> None:
        super().__init__()
        self.queries = dict(queries)
        self._names = parameter_names(queries)
        for name, size in parameter_sizes(queries).items():
            self.register_parameter(name, nn.Parameter(torch.zeros(size, dtype=torch.float64)))

    @property
    def scale(self) -> float:
        """The factor by which a client's vector has a norm of at most `WITHIN`."""
        return scale_of(self.queries)

    def vector(self, name: str) -> Tensor:
        """Return the vector of a query."""
        return self.get_parameter(self._names[name])

    def forward(self, means: Mapping[str, Tensor]) -> Tensor:
        """Return s (count + sum of <vector, mean of the encoded values>), from the means of each query."""
        total = self.get_parameter(COUNT).sum()
        for name in self.queries:
            total = total + self.vector(name) @ means[name]
        return total * self.scale

    def answers(self) -> dict[str, QueryAnswer]:
        """Return the answers, or {} if no client has replied, or if the noise exceeds the count."""
        count, noise = float(self.get_parameter(COUNT).detach()), float(self.get_parameter(NOISE).detach())
        if count <= 0:
            return {}
        found: dict[str, QueryAnswer] = {}
        for name, query in self.queries.items():
            mean: Floats = self.vector(name).detach().cpu().numpy() / count
            found[name] = query.decode(mean, noise / count)
        return found

    @property
    def weight(self) -> float:
        """The sum of the clients' weights, divided by the number of clients (under noise: by its expectation)."""
        return float(self.get_parameter(COUNT).detach()) / self.scale


class StatisticsWorkload(StatisticColumns, Workload):
    """Queries of the rows of `data()`, for the strategy `statistics`.

    `queries` is a dict from a name to a query of `rayps.stats`. `columns` names the columns of `Batch.x` [n, columns];
    None: they are those of the queries, in order, which must be the features of the data if these have names. A class
    of your own may define `values(batch)` instead.

    Example:
        class Patients(rayps.StatisticsWorkload):
            queries = {"age": rayps.stats.mean(low=0, high=110), "bmi": rayps.stats.histogram((10, 18.5, 25, 30, 60))}

            def data(self):
                age_and_bmi = torch.tensor([[34.0, 21.5], [71.0, 28.1], [50.0, 24.9]])
                return rayps.data.tensors(age_and_bmi, batch_size=3, client=["hospital-a", "hospital-a", "hospital-b"])

        rayps.train(Patients(), strategy="statistics").metrics["age"]
    """

    @abstractmethod
    def data(self) -> Data:
        """Return the rows."""

    def check_columns(self, data: Data) -> None:
        """Check, before a worker starts, that the queries' columns are those of `data`, as far as its names are known.

        Raises:
            WorkloadError: a column is missing, or the columns are in another order than the features.
        """
        self.check_features(data.feature_names)

    def model(self) -> nn.Module:
        """Return vectors of zeros. Raises ConfigError if `queries` has no queries."""
        self.check_queries()
        return Accumulators(self.queries)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor | tuple[Tensor, float]:
        """Return minus the linear function of the module's text; with weight 0 for rows without values.

        Raises WorkloadError if a column is missing, or a value is not finite.
        """
        assert isinstance(model, Accumulators), "made by `model`"
        if batch.x is None or (isinstance(batch.x, Tensor) and not batch.x.numel()):
            return model.get_parameter(COUNT).sum() * 0.0, 0.0
        device = model.get_parameter(COUNT).device
        means = {name: torch.from_numpy(mean).to(device) for name, mean in self.means(batch).items()}
        loss: Tensor = -model(means)
        return loss

    def evaluation_data(self) -> Data:
        """Return one row without values: the answers depend on the released vectors alone."""
        return tensors(torch.zeros(1, 0), batch_size=1)

    def evaluate(self, model: nn.Module, batch: Batch) -> Mapping[str, Metric]:
        """Return the answers as metrics: `NAME` or `NAME_LABEL`, and the noise's standard deviation as `..._error`."""
        assert isinstance(model, Accumulators), "made by `model`"
        found: dict[str, Metric] = {}
        for name, answer in model.answers().items():
            for label, value, error in zip(answer.labels, answer.values, answer.errors, strict=True):
                key = f"{name}_{label}" if label else name
                found |= {key: float(value), f"{key}_error": float(error)}
        return found

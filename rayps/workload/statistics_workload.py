"""A workload that computes statistics instead of learning: the federated rounds of training sum its vectors.

The "model" has one vector for each query, and a number for the count. The loss of a batch is linear in them:

    loss = - s (count + sum over queries of <vector, mean of the rows' encoded values>),   s = 1 / sqrt(queries + 1)

so that its gradient is minus the mean of the rows' vectors, scaled to a norm of at most 1. Under the strategy
`statistics` a client's update is that mean, and the server's mean of updates is the answer. All that holds for updates
holds for statistics: simulated and real clients, the clip, noise and its account, sums that hide single updates.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from rayps.core.errors import ConfigError, WorkloadError
from rayps.core.spelling import near
from rayps.data.base import Batch, Data
from rayps.data.memory import tensors
from rayps.workload.base import Workload
from rayps.workload.metric_values import Metric
from rayps.workload.stats import Floats, Query, QueryAnswer

WITHIN = 1 - 1e-5  # the largest norm of a client's vector, below the clip of 1 by more than its rounding errors
_COUNT, _NOISE = "count", "noise"


class Accumulators(nn.Module):
    """The vectors of the queries, float64, between the count and the standard deviation of the noise.

    The names of the parameters contain the queries, so that a client with other queries than the job's is refused.
    """

    def __init__(self, queries: Mapping[str, Query]) -> None:
        super().__init__()
        self.queries = dict(queries)
        self._names = {name: f"{name} {query.text}".replace(".", "_") for name, query in queries.items()}
        sizes = {_COUNT: 1, **{self._names[name]: query.size for name, query in queries.items()}, _NOISE: 1}
        for name, size in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(size, dtype=torch.float64)))

    @property
    def scale(self) -> float:
        """The factor by which a client's vector has a norm of at most `WITHIN`."""
        return WITHIN / math.sqrt(len(self.queries) + 1)

    def vector(self, name: str) -> Tensor:
        """Return the vector of a query."""
        return self.get_parameter(self._names[name])

    def forward(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return s (count + sum of <vector, mean of the encoded values>) for the values [n] of each query."""
        total = self.get_parameter(_COUNT).sum()
        for name, query in self.queries.items():
            total = total + self.vector(name) @ query.encode(values[name]).mean(dim=0)
        return total * self.scale

    def answers(self) -> dict[str, QueryAnswer]:
        """Return the answers, or {} if no client has replied, or if the noise exceeds the count."""
        count, noise = float(self.get_parameter(_COUNT).detach()), float(self.get_parameter(_NOISE).detach())
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
        return float(self.get_parameter(_COUNT).detach()) / self.scale


class StatisticsWorkload(Workload):
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

    queries: Mapping[str, Query] = {}
    columns: Sequence[str] | None = None

    @abstractmethod
    def data(self) -> Data:
        """Return the rows."""

    def values(self, batch: Batch) -> Mapping[str, Tensor]:
        """Return the values [n] of each column of a batch, by the column's name.

        Raises:
            WorkloadError: the batch has another number of columns than `columns`.
        """
        if isinstance(batch.x, Mapping):
            return batch.x
        names = self._names
        x = batch.x.reshape(batch.size, -1)
        if x.shape[1] != len(names):
            raise WorkloadError(
                f"data() has rows of {x.shape[1]} values, but {len(names)} columns are named ({', '.join(names)}): set "
                "`columns` to the names of all features, in order"
            )
        return dict(zip(names, x.unbind(dim=1), strict=True))

    @property
    def computes_columns(self) -> bool:
        """Whether `values` is the class's own, so that the columns are functions of the rows."""
        return type(self).values is not StatisticsWorkload.values

    def check_columns(self, data: Data) -> None:
        """Check, before a worker starts, that the queries' columns are those of `data`, as far as its names are known.

        Raises:
            WorkloadError: a column is missing, or the columns are in another order than the features.
        """
        features = data.feature_names
        if self.computes_columns or (features is None and self.columns is None):
            return
        known = features if self.columns is None else self.columns
        assert known is not None, "one of them is known"
        for name in self.queries:
            self._must_have(name, known)
        if self.columns is None and self._names != features:
            raise WorkloadError(
                f"the data has the features {', '.join(known)}, and the queries name {', '.join(self._names)} in this "
                f"order: set `columns` to {tuple(known)!r}"
            )

    @property
    def _names(self) -> tuple[str, ...]:
        """The names of the columns of `Batch.x`."""
        if self.columns is not None:
            return tuple(self.columns)
        return tuple(dict.fromkeys(self._column(name) for name in self.queries))

    def _column(self, name: str) -> str:
        return self.queries[name].column or name

    def _must_have(self, name: str, columns: Iterable[str]) -> None:
        column, known = self._column(name), list(columns)
        if column not in known:
            raise WorkloadError(
                f"the query {name!r} needs the column {column!r}, and the rows have {', '.join(known)}"
                f"{near(column, known)}: name one of them with column="
            )

    def model(self) -> nn.Module:
        """Return vectors of zeros. Raises ConfigError if `queries` has no queries."""
        if not self.queries or not all(isinstance(query, Query) for query in self.queries.values()):
            raise ConfigError(
                f"queries of {type(self).__name__} is {self.queries!r}: give a dict from a name to a query, such as "
                '{"age": rayps.stats.mean(low=0, high=110)}',
                field="queries",
            )
        return Accumulators(self.queries)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor | tuple[Tensor, float]:
        """Return minus the linear function of the module's text; with weight 0 for rows without values.

        Raises WorkloadError if a column is missing, or a value is not finite.
        """
        assert isinstance(model, Accumulators), "made by `model`"
        if batch.x is None or (isinstance(batch.x, Tensor) and not batch.x.numel()):
            return model.get_parameter(_COUNT).sum() * 0.0, 0.0
        columns, found = self.values(batch), dict[str, Tensor]()
        for name in self.queries:
            self._must_have(name, columns)
            column = self._column(name)
            value = columns[column].reshape(-1).to(torch.float64).contiguous()
            if not torch.isfinite(value).all():
                raise WorkloadError(f"the column {column!r} has values that are not finite: remove these rows")
            found[name] = value
        loss: Tensor = -model(found)
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

"""The `rayps.StatisticsWorkload` of the light client: federated statistics in numpy, without torch.

The parameters and the gradient are those of `rayps.workload.statistics_workload`, bit for bit. Only a client's half is
here: the answers follow from the sum, which the job has.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np

from rayps_client.rows import Batch
from rayps_client.statistic_columns import COUNT, NOISE, StatisticColumns, parameter_names, parameter_sizes, scale_of
from rayps_client.workload import Arrays, NumpyWorkload


class StatisticsWorkload(StatisticColumns, NumpyWorkload):
    """Queries of the rows of `data()`, for the strategy `statistics`: see `rayps.StatisticsWorkload`.

    `values(batch)` of a class of your own gets arrays of numpy.
    """

    @abstractmethod
    def data(self) -> Any:
        """Return this client's rows."""

    def parameters(self) -> Arrays:
        """Return vectors of zeros. Raises ConfigError if `queries` has no queries."""
        self.check_queries()
        return {name: np.zeros(size) for name, size in parameter_sizes(self.queries).items()}

    def loss_and_gradient(self, parameters: Arrays, batch: Batch) -> tuple[float, Arrays]:
        """Return minus s (count + sum over queries of <vector, mean of the encoded values>), and its gradient."""
        means, names, scale = self.means(batch), parameter_names(self.queries), scale_of(self.queries)
        total = float(parameters[COUNT].sum())
        gradient = {COUNT: np.full(1, -scale), NOISE: np.zeros(1)}
        for name, mean in means.items():
            total += float(parameters[names[name]] @ mean)
            gradient[names[name]] = -scale * mean
        return -total * scale, gradient

    def evaluate(self, parameters: Arrays, batch: Batch) -> Mapping[str, float]:
        """Return no metrics: the answers are those of all clients together."""
        return {}

"""The queries of a statistic and the columns of a client's rows: the common part of both `StatisticsWorkload`.

A client's vector is the mean, over a batch's rows, of each query's encoded values. Numpy computes it with rayps and
without, so that both send the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rayps_client.errors import ConfigError, WorkloadError
from rayps_client.spelling import near
from rayps_client.stats import Floats, Query

WITHIN = 1 - 1e-5  # the largest norm of a client's vector, below the clip of 1 by more than its rounding errors
COUNT, NOISE = "count", "noise"  # names of parameters beside those of the queries


class StatisticColumns:
    """Queries, and the columns that they are about: the base of `StatisticsWorkload`."""

    queries: Mapping[str, Query] = {}
    columns: Sequence[str] | None = None

    def values(self, batch: Any) -> Mapping[str, Any]:
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
        return {name: x[:, k] for k, name in enumerate(names)}

    def means(self, batch: Any) -> dict[str, Floats]:
        """Return, for each query, the mean over a batch's rows of the encoded values.

        Raises WorkloadError if a column is missing, or a value is not finite.
        """
        columns, found = self.values(batch), dict[str, Floats]()
        for name, query in self.queries.items():
            self._must_have(name, columns)
            column = self._column(name)
            value = _array(columns[column])
            if not np.isfinite(value).all():
                raise WorkloadError(f"the column {column!r} has values that are not finite: remove these rows")
            found[name] = query.encode(value).mean(axis=0)
        return found

    @property
    def computes_columns(self) -> bool:
        """Whether `values` is the class's own, so that the columns are functions of the rows."""
        return type(self).values is not StatisticColumns.values

    def check_features(self, features: Sequence[str] | None) -> None:
        """Check, before anything starts, that the queries' columns are `features`, as far as these are known.

        Raises:
            WorkloadError: a column is missing, or the columns are in another order than the features.
        """
        if self.computes_columns or (features is None and self.columns is None):
            return
        known = features if self.columns is None else self.columns
        assert known is not None, "one of them is known"
        for name in self.queries:
            self._must_have(name, known)
        if self.columns is None and self._names != tuple(known):
            raise WorkloadError(
                f"the data has the features {', '.join(known)}, and the queries name {', '.join(self._names)} in this "
                f"order: set `columns` to {tuple(known)!r}"
            )

    def check_queries(self) -> None:
        """Raise ConfigError if `queries` has no queries."""
        if not self.queries or not all(isinstance(query, Query) for query in self.queries.values()):
            raise ConfigError(
                f"queries of {type(self).__name__} is {self.queries!r}: give a dict from a name to a query, such as "
                '{"age": rayps.stats.mean(low=0, high=110)}',
                field="queries",
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


def parameter_names(queries: Mapping[str, Query]) -> dict[str, str]:
    """Return, by query, the name of its vector among the parameters: a client with other queries has other names."""
    return {name: f"{name} {query.text}".replace(".", "_") for name, query in queries.items()}


def parameter_sizes(queries: Mapping[str, Query]) -> dict[str, int]:
    """Return the sizes of the parameters, in order: the count, the queries' vectors, the noise."""
    names = parameter_names(queries)
    return {COUNT: 1, **{names[name]: query.size for name, query in queries.items()}, NOISE: 1}


def scale_of(queries: Mapping[str, Query]) -> float:
    """Return the factor by which a client's vector has a norm of at most `WITHIN`."""
    return WITHIN / math.sqrt(len(queries) + 1)


def _array(values: Any) -> Floats:
    """Return values of torch or numpy as an array [n]."""
    plain = values.detach().cpu() if hasattr(values, "detach") else values
    found: Floats = np.ascontiguousarray(np.asarray(plain).reshape(-1), dtype=np.float64)
    return found

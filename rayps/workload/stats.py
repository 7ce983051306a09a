"""The queries of a federated statistic, as the module `rayps.stats`: those of `rayps_client.stats`."""

from __future__ import annotations

from rayps_client.stats import (
    Floats,
    HistogramQuery,
    MeanQuery,
    QuantileQuery,
    Query,
    QueryAnswer,
    histogram,
    mean,
    quantile,
)

__all__ = [
    "Floats",
    "HistogramQuery",
    "MeanQuery",
    "QuantileQuery",
    "Query",
    "QueryAnswer",
    "histogram",
    "mean",
    "quantile",
]

"""The queries of a federated statistic, as the module `rayps.stats`: those of `rayps_client.stats`.

Example:
    rayps.stats.mean(low=0, high=110)
    rayps.stats.histogram(edges=(0, 18.5, 25, 30, 60), column="bmi")
    rayps.stats.quantile((0.25, 0.5, 0.75), low=0, high=10, bins=64)
"""

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

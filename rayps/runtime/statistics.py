"""`rayps.statistics`: means, histograms and quantiles of clients' rows in one call, with noise if privacy is asked for.

The call is a federated job with one round: the strategy `statistics` (`rayps.strategies.statistics`) for a
`StatisticsWorkload`. For clients that are processes of their own, submit such a workload to the service instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rayps_client.errors import CheckpointError, ConfigError
from rayps_client.stats import Query, QueryAnswer
from rayps_client.values import Json, JsonObject, Keywords
from torch import Tensor

from rayps.core.job.user_code import user_code
from rayps.data.base import Batch, Data
from rayps.privacy.options import PrivacySpec
from rayps.runtime.training import Result, train
from rayps.strategies.statistics import CLIENTS, Statistics
from rayps.workload.base import Workload
from rayps.workload.statistics_workload import Accumulators, StatisticsWorkload


@dataclass(slots=True, repr=False)
class StatisticsResult:
    """The answers of `rayps.statistics`.

    `answers` is a dict from a query's name to its `QueryAnswer`, with labels, values and the standard deviations of the
    noise. `privacy` is the claim, as in `Result.privacy`; None without privacy. `run` is the job's result.
    """

    answers: dict[str, QueryAnswer]
    privacy: JsonObject | None
    run: Result

    def __getitem__(self, name: str) -> QueryAnswer:
        """Return the answer of a query."""
        return self.answers[name]

    @property
    def values(self) -> dict[str, float | list[float]]:
        """The answers as numbers: one number, or a list for a histogram or several quantiles."""
        return {name: _unwrap_single(answer.values.tolist()) for name, answer in self.answers.items()}

    @property
    def errors(self) -> dict[str, float | list[float]]:
        """The standard deviations of the noise in `values`; 0 without privacy."""
        return {name: _unwrap_single(answer.errors.tolist()) for name, answer in self.answers.items()}

    def __repr__(self) -> str:
        lines = []
        for name, answer in self.answers.items():
            for label, value, error in zip(answer.labels, answer.values, answer.errors, strict=True):
                noise = f" +- {error:.3g}" if error else ""
                lines.append(f"{name} {label}".strip() + f": {value:.6g}{noise}")
        if self.privacy is not None:
            lines.append(str(self.privacy["claim"]))
        return "\n".join(lines)


class _StatisticsOfRows(StatisticsWorkload):
    """The statistics of a data set, or of the data of another workload."""

    def __init__(self, source: Workload | Data, queries: Mapping[str, Query], columns: Sequence[str] | None) -> None:
        self.source, self.queries, self.columns = source, dict(queries), columns

    def data(self) -> Data:
        """Return the rows of the source."""
        return self.source.data() if isinstance(self.source, Workload) else self.source

    @property
    def computes_columns(self) -> bool:
        """Whether the source has a method `statistics`."""
        return hasattr(self.source, "statistics")

    def values(self, batch: Batch) -> Mapping[str, Tensor]:
        """Return the values of the source's method `statistics`, if it has one; otherwise the columns of `Batch.x`."""
        own = getattr(self.source, "statistics", None)
        if own is None:
            return super().values(batch)
        with user_code("statistics"):
            found: Mapping[str, Tensor] = own(batch)
        return found


def statistics(
    source: Workload | Data,
    queries: Mapping[str, Query],
    *,
    privacy: Json | PrivacySpec = None,
    by: str = CLIENTS,
    rows_per_client: int | None = None,
    columns: Sequence[str] | None = None,
    fraction: float = 1.0,
    **options: Any,
) -> StatisticsResult:
    """Compute statistics of the rows of simulated clients, by the same rounds as federated training.

    `source` is a data set whose rows are divided into clients, or a workload with such data. `queries` is a dict from a
    name to a query: `rayps.stats.mean`, `histogram` or `quantile`. A query is about the column with its name, or about
    `column=`. The columns are the features of the data, whose names are `columns`; None: those that the data has
    (`rayps.data.parquet`), or else those of the queries, in order. If the workload has a method `statistics(batch)`,
    the columns are those that it returns: a dict from a name to values [n].

    `by` is "clients" (the mean over clients of the clients' statistics) or "rows" (each client counts by its rows, at
    most `rows_per_client`). `fraction` is the fraction of the clients that is asked. With `privacy=rayps.dp(...)` the
    answers are noised, together as one release. Give calls about the same rows the same `ledger`, a folder: each is
    charged for the releases of all, and is refused if its budget does not allow another. `options` are those of
    `rayps.train`, such as `workers`, `seed`, `ledger` and `checkpoint`: with `checkpoint=FOLDER` and `resume=True`, a
    call that has ended returns its answers again, and releases nothing.

    Raises:
        ConfigError: an option is not allowed, the budget allows no release, or the noise exceeds the number of
            clients, so that there is no answer.
        CheckpointError: the folder for checkpoints has the answers of another call.
        WorkloadError, DataError: the workload or the data fails, or a column is missing.

    Example:
        rows = torch.tensor([[34.0, 21.5], [71.0, 28.1], [50.0, 24.9]])
        data = rayps.data.tensors(rows, batch_size=3, client=["hospital-a", "hospital-a", "hospital-b"])
        queries = {"age": rayps.stats.mean(low=0, high=110), "bmi": rayps.stats.quantile(0.5, low=10, high=60)}
        found = rayps.statistics(data, queries)
        found.values["age"], found.errors["age"]
    """
    given: Keywords = {"by": by, "rows_per_client": rows_per_client, "fraction": fraction, "privacy": privacy}
    if columns is None and isinstance(source, Data):
        columns = source.feature_names
    try:
        run = train(_StatisticsOfRows(source, queries, columns), strategy=Statistics(**given), epochs=1, **options)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}\na folder for checkpoints has the answers of one call: give other queries another checkpoint=, "
            "and calls that share a budget the same ledger="
        ) from error
    model = run.model()
    assert isinstance(model, Accumulators), "made by StatisticsWorkload.model"
    answers = model.answers()
    if not answers:
        raise ConfigError(
            "there is no answer: no client replied, or the noise exceeds the number of clients; give less noise "
            "(a larger epsilon), or ask more clients",
            field="privacy",
        )
    return StatisticsResult(answers, run.privacy, run)


def _unwrap_single(values: list[float]) -> float | list[float]:
    return values[0] if len(values) == 1 else values

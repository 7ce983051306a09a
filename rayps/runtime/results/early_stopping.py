"""Stop a run that does not improve any more, and compare the values of a metric."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from rayps_client.errors import ConfigError
from rayps_client.spelling import near
from rayps_client.values import JsonObject, Keywords

from rayps.core.metric_direction import choose_direction
from rayps.workload.callback import Callback, RunView


class MetricWatch:
    """The best value of one metric so far. A value is better if it differs by more than `min_delta`.

    `mode` is "min" if the lowest value is the best, "max" if it is the highest, or "auto", which asks the words of the
    metric's name: see `rayps.core.metric_direction`.
    """

    def __init__(self, metric: str, mode: str = "auto", min_delta: float = 0.0, *, owner: str = "a callback") -> None:
        """Prepare; `owner` is the name of the callback, for errors.

        Raises ConfigError if an argument is refused, or the name of the metric does not say the mode.
        """
        if not isinstance(metric, str) or not metric:
            raise ConfigError(f"metric is {metric!r}: give the name of a metric, such as 'loss'", field="metric")
        if isinstance(min_delta, bool) or not isinstance(min_delta, (int, float)) or not 0 <= min_delta < math.inf:
            raise ConfigError(f"min_delta is {min_delta!r}: give a finite number of at least 0", field="min_delta")
        self.metric, self.min_delta, self._owner = metric, min_delta, owner
        try:
            self.grows = choose_direction(metric, mode) == "max"
        except ConfigError as error:
            raise ConfigError(f"{owner}: {error}", **error.data) from None
        self.best: float | None = None
        self.round = 0  # the round of the best value
        self._reported = False  # whether an evaluation without a value was reported

    def consider(self, run: RunView, metrics: Mapping[str, float]) -> bool | None:
        """Return what `look` does for an evaluation of a run. The first one without a value is a warning of the job."""
        found = self.look(metrics, run.round, run.no_value)
        if found is None and not self._reported:
            self._reported = True
            run.warn(
                f"the evaluation after round {run.round} has no value of {self.metric!r}, whose weights sum to 0: a "
                "callback ignores such evaluations"
            )
        return found

    def look(self, metrics: Mapping[str, float], round: int, no_value: Collection[str] = ()) -> bool | None:
        """Consider an evaluation after `round` rounds. Return whether its value is the best so far; NaN never is.

        Return None if the metric is one of `no_value`, which this evaluation has without a value. Raises ConfigError if
        there is no such metric.
        """
        if self.metric not in metrics and self.metric in no_value:
            return None
        self.check([*metrics, *no_value])
        value = float(metrics[self.metric])
        if math.isnan(value):
            return False
        if self.best is not None:
            gain = value - self.best if self.grows else self.best - value
            if not gain > self.min_delta:
                return False
        self.best, self.round = value, round
        return True

    def check_soon(self, metrics: Collection[str]) -> str | None:
        """Look for the metric among those of one batch, before the first evaluation. Return a warning if it is missing.

        The evaluation of other batches may have more metrics. Raises ConfigError if one of `metrics` has a similar
        name.
        """
        if self.metric in metrics:
            return None
        if near(self.metric, metrics):
            self.check(metrics)
        return (
            f"{self._owner}: metric is {self.metric!r}, and the evaluation of the batch that was tried has none of "
            f"this name: its metrics are {', '.join(metrics)}; the run fails if its first evaluation has none either"
        )

    def check(self, metrics: Collection[str]) -> None:
        """Raise ConfigError if the metric is not among these names of an evaluation's metrics."""
        if self.metric not in metrics:
            raise ConfigError(
                f"{self._owner}: metric is {self.metric!r}{near(self.metric, metrics)}, and the evaluation has no such "
                "metric: the metrics are "
                f"{', '.join(metrics) or 'none'}; evaluate(model, batch) returns others",
                field="metric",
            )

    def state(self) -> JsonObject:
        """Return the best value and its round as JSON-ready data."""
        return {"best": self.best, "round": self.round}

    def load(self, state: Keywords) -> None:
        """Restore what `state` returned."""
        self.best, self.round = state["best"], state["round"]


class EarlyStopping(Callback):
    """Ends a run when a metric of its evaluations has not improved for `patience` evaluations in a row.

    `mode` is "min", "max" or "auto": the lowest value is the best of a metric whose name has a word of a loss or an
    error (loss, error, nll, mse, ...), and else the highest of one with a word such as accuracy, f1 or score. Any other
    name needs "min" or "max". An improvement is larger than `min_delta`. The run ends with status SUCCEEDED, with the
    metrics and the parameters of its last state. An evaluation without a value of the metric (a mean whose weights sum
    to 0) does not count. The count continues in a run that resumes.

    Example:
        rayps.train(work, epochs=100, callbacks=[rayps.EarlyStopping("loss", patience=3)])
    """

    def __init__(self, metric: str = "loss", patience: int = 3, mode: str = "auto", min_delta: float = 0.0) -> None:
        """Prepare. Raises ConfigError if an argument is refused."""
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
            raise ConfigError(f"patience is {patience!r}: give a number of evaluations of at least 1", field="patience")
        self.watch, self.patience = MetricWatch(metric, mode, min_delta, owner="EarlyStopping"), patience
        self.waited = 0  # evaluations since the best one

    def on_evaluation(self, run: RunView, metrics: Mapping[str, float]) -> None:
        """Stop the run if the metric has not improved for too long."""
        best = self.watch.consider(run, metrics)
        if best is None:
            return
        self.waited = 0 if best else self.waited + 1
        if self.waited >= self.patience:
            value = "it was never a number" if self.watch.best is None else f"{self.watch.best:.6g}"
            run.stop(
                f"{self.watch.metric} has not improved for {self.waited} evaluations (best: {value}, after round "
                f"{self.watch.round})"
            )

    def state_dict(self) -> JsonObject:
        """Return the best value and the count."""
        return {"watch": self.watch.state(), "waited": self.waited}

    def load_state_dict(self, state: Keywords) -> None:
        """Restore the best value and the count."""
        self.watch.load(state["watch"])
        self.waited = state["waited"]

"""Whether the best value of a metric is its lowest or its highest, by the words of its name. Pure."""

from __future__ import annotations

import itertools
import re
from typing import Literal, TypeAlias

from rayps_client.errors import ConfigError

Direction: TypeAlias = Literal["min", "max"]

MODES = ("min", "max", "auto")
_BREAKS = re.compile(r"[^A-Za-z0-9]+")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_LOW = re.compile(
    r"(loss(es)?|err(or)?s?|inaccuracy|nll|perplexity|ppl|crossentropy|bce|mse|rmse|mae|mape|smape|msle|rmsle|logloss"
    r"|kld?|fid|kid|bpc|bpb|wer|cer|eer|ece|brier|regret)\d*"
)
_HIGH = re.compile(
    r"(acc(uracy)?|(roc)?auc|auroc|auprc|f1|fbeta|precision|recall|sensitivity|specificity|scores?|n?dcg|dice|jaccard"
    r"|m?iou|m?ap|mrr|mcc|kappa|ssim|psnr|bleu|rouge|meteor|cider|chrf|r2|correlation|pearson|spearman|likelihood"
    r"|hits?|success|rewards?|returns?|elbo)\d*|top\d+"
)
_NEGATED = frozenset(["neg", "negative", "negated", "minus"])


def direction_of(metric: str) -> Direction | None:
    """Return which value of a metric is the best, the lowest or the highest; None if the name does not say it.

    The name is divided into words at characters other than letters and digits and at capital letters, such as
    `val/MeanError` and `top_5_accuracy`. A number may follow a word (`rouge1`, `recall@10`). A word of a loss or an
    error (loss, error, nll, mse, ...) counts more than a word of a metric that grows (accuracy, f1, score, ...). A name
    with a word such as `neg` says nothing, because it may be a loss whose sign was changed.
    """
    words = _split_words(metric)
    if words & _NEGATED:
        return None
    if any(map(_LOW.fullmatch, words)) or words >= {"cross", "entropy"}:
        return "min"
    return "max" if any(map(_HIGH.fullmatch, words)) else None


def lowest_is_best(metric: str) -> bool | None:
    """Return whether the best value of a metric is the lowest, by its name; None if the name does not say it."""
    found = direction_of(metric)
    return None if found is None else found == "min"


def choose_direction(metric: str, mode: str = "auto") -> Direction:
    """Return which value of a metric is the best by `mode`: "min", "max", or "auto", which asks the metric's name.

    Raises:
        ConfigError: the mode is none of these, or it is "auto" and the name does not say it.
    """
    if mode not in MODES:
        raise ConfigError(f"mode is {mode!r}: give one of {', '.join(MODES)}", field="mode")
    if mode != "auto":
        return "min" if mode == "min" else "max"
    found = direction_of(metric)
    if found is None:
        raise ConfigError(
            f"the name of the metric {metric!r} does not say whether its lowest or its highest value is the best: "
            'correct the name if it is misspelled, else give mode="min" or mode="max"',
            field="mode",
        )
    return found


def _split_words(metric: str) -> set[str]:
    """Return the words of a name in lower case."""
    whole = [word for word in _BREAKS.split(metric) if word]
    parts = [part for word in whole for part in _CAMEL.split(word)]
    numbered = [a + b for a, b in itertools.pairwise(parts) if b.isdigit()]  # top-5, R_2
    return {word.lower() for word in (*whole, *parts, *numbered)}  # whole: mAP, IoU

"""Which value of a metric is the best: one rule for callbacks, sweeps, the command line and the page."""

import pytest
from rayps_client.errors import ConfigError

import rayps
from rayps.core.metric_direction import choose_direction, direction_of
from rayps.runtime.results.early_stopping import MetricWatch

LOW = [
    *("loss", "val_loss", "batch loss", "trainLoss", "loss2", "error", "val/MeanSquaredError", "err", "nll", "ppl"),
    *("perplexity", "mse", "val_rmse", "MAE", "kl", "fid", "bpc", "wer", "cer", "cross_entropy", "CrossEntropyLoss"),
    *("accumulated_loss", "precision_loss", "score_error", "inaccuracy", "top-5_error", "fid_score", "regret"),
]
HIGH = [
    *("accuracy", "valAcc", "eval/acc", "AUC", "f1", "F1Score", "r2", "R_2", "precision", "recall@10", "score", "ndcg"),
    *("ndcg@10", "dice", "IoU", "mIoU", "mAP", "map50", "mrr", "ssim", "psnr", "bleu", "rouge1", "ROUGE-L", "hit_rate"),
    *("hits@10", "top1", "top_5", "top-5_accuracy", "reward", "return", "elbo", "log-likelihood"),
]
UNKNOWN = [
    *("constant", "accumulated", "msec", "mapping", "occurrences", "stop", "skill", "neg_mean_squared_error", "", "5")
]


@pytest.mark.parametrize(
    ("metric", "direction"), [*((n, "min") for n in LOW), *((n, "max") for n in HIGH), *((n, None) for n in UNKNOWN)]
)
def test_the_words_of_a_name_say_which_value_is_the_best(metric, direction):
    assert direction_of(metric) == direction


def test_a_mode_counts_more_than_the_name():
    assert choose_direction("loss", "max") == "max" and choose_direction("constant", "min") == "min"
    assert choose_direction("accuracy") == "max"
    with pytest.raises(ConfigError, match=r"'constant' does not say .*: correct the name .* give mode="):
        choose_direction("constant")
    with pytest.raises(ConfigError, match="mode is 'most': give one of min, max, auto"):
        choose_direction("loss", "most")


@pytest.mark.parametrize("metric", LOW)
def test_callbacks_minimize_losses_and_errors(metric):
    assert not MetricWatch(metric).grows


@pytest.mark.parametrize("metric", HIGH)
def test_callbacks_maximize_what_grows(metric):
    assert MetricWatch(metric).grows


@pytest.mark.parametrize("callback", [rayps.EarlyStopping, rayps.BestCheckpoint])
def test_callbacks_refuse_a_name_that_does_not_say_it(callback):
    with pytest.raises(ConfigError, match=r"'msec' .* give mode=\"min\" or mode=\"max\""):
        callback("msec")
    assert not callback("msec", mode="min").watch.grows and callback("msec", mode="max").watch.grows

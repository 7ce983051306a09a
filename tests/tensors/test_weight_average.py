"""Averages of the weights: the law is torch's AveragedModel on plain torch, and a resume changes no bit."""

import pytest
import torch
from rayps_client.errors import ConfigError
from small_work import Small, plain, train
from test_precision import LOUD, Half, cast
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

import rayps
from rayps.tensors import weight_average
from rayps.tensors.checkpoints import checkpoint
from rayps.tensors.snapshot import Snapshot


class Averaged(Small):
    def __init__(self, average, **options):
        super().__init__(**options)
        self.average = average


def vector(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def law(work, average, steps, workers=1):
    """Plain torch with an AveragedModel, whose update is called after each step that is due."""
    kind = get_ema_multi_avg_fn(average.decay) if isinstance(average, rayps.EMA) else get_swa_multi_avg_fn()
    averaged = None
    for step in range(1, steps + 1):
        model = plain(work, workers, steps=step)[0]
        averaged = averaged or AveragedModel(model, multi_avg_fn=kind)
        if average.due(step):
            averaged.update_parameters(model)
    return vector(averaged.module)


AVERAGES = [rayps.EMA(0.9), rayps.SWA(start=5, every=3)]


@pytest.mark.parametrize("average", AVERAGES, ids=str)
@pytest.mark.parametrize(
    ("strategy", "workers"),
    [("all_reduce", 1), ("all_reduce", 2), ("parameter_server:shards=2", 2), ("local_sgd:period=1", 2)],
)
def test_an_average_is_that_of_plain_torch(strategy, workers, average):
    work = Averaged(average, optimizer="sgd")
    result = train(work, strategy, workers=workers, steps=14)
    expected = law(Small(optimizer="sgd"), average, 14, workers)
    # torch's weight 1 / (n + 1) of SWA is a float32
    rounding = 1e-12 if isinstance(average, rayps.EMA) else 1e-6
    torch.testing.assert_close(vector(result.model(average=True)), expected, rtol=rounding, atol=rounding)
    final = plain(Small(optimizer="sgd"), workers, steps=14)[0]
    torch.testing.assert_close(vector(result.model()), vector(final), rtol=1e-12, atol=1e-12)


def test_local_sgd_averages_the_mean_of_the_workers(tmp_path):
    """The law: the EMA of the mean of the workers' parameters after each step, from checkpoints of each step."""
    average = rayps.EMA(0.8)
    held = Averaged(average)
    result = train(held, "local_sgd:period=4", workers=2, steps=8)
    seen = []

    class Each(rayps.Callback):
        checkpoint_each_evaluation = True

        def on_checkpoint(self, run, path):
            seen.append((run.round, Snapshot.from_state(checkpoint.load(path)).params))

    options = {"checkpoint": tmp_path, "callbacks": [Each()], "evaluate_every": 1}
    again = train(held, "local_sgd:period=4", workers=2, steps=8, **options)
    assert [round for round, _ in seen] == list(range(1, 9))
    expected = seen[0][1].clone()
    for _, params in seen[1:]:
        expected.lerp_(params, 1 - 0.8)
    torch.testing.assert_close(vector(result.model(average=True)), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(vector(again.model(average=True)), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("strategy", ["all_reduce", "parameter_server", "local_sgd:period=4", "diloco:period=4"])
@pytest.mark.parametrize("average", AVERAGES, ids=str)
def test_an_average_survives_a_resume_to_the_bit(strategy, average, tmp_path):
    work = Averaged(average, optimizer="momentum")
    options = {
        "checkpoint": tmp_path,
        "evaluate_every": 7,
        "keep_checkpoints": 9,
        "callbacks": [rayps.BestCheckpoint()],
    }
    whole = train(work, strategy, workers=2, steps=16, **options)
    middle = tmp_path / "step-00000007"
    resumed = train(work, strategy, workers=2, steps=16, resume=middle)
    assert torch.equal(vector(whole.model(average=True)), vector(resumed.model(average=True)))
    assert torch.equal(vector(whole.model()), vector(resumed.model()))


class AveragedHalf(Half):
    """In fp16, with batches whose gradients overflow until the scale is small."""

    def __init__(self, average, **options):
        super().__init__("fp16", LOUD, **options)
        self.average = average


def scaled_law(work, average, steps):
    """Plain torch with a GradScaler on one worker; the average sees the parameters only after a step was taken."""
    torch.manual_seed(0)
    model = work.model()
    optimizer, scaler = work.optimizer(list(model.parameters())), torch.amp.GradScaler("cpu")
    kind = get_ema_multi_avg_fn(average.decay) if isinstance(average, rayps.EMA) else get_swa_multi_avg_fn()
    averaged, taken, k = AveragedModel(model, multi_avg_fn=kind), 0, work.accumulate
    data = work.data()
    for epoch in range(9):
        batches = list(data.batches(rank=0, size=1, seed=0, epoch=epoch))
        for at in range(0, len(batches), k):
            if not steps:
                return vector(averaged.module), model, taken
            steps -= 1
            optimizer.zero_grad()
            group = batches[at : at + k]
            for batch in group:
                with cast(work):
                    loss = work.loss(model, batch)
                scaler.scale(loss * batch.size / sum(b.size for b in group)).backward()
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() == before:
                taken += 1
                if average.due(taken):
                    averaged.update_parameters(model)
    raise AssertionError("more epochs are needed")


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("average", [rayps.EMA(0.8), rayps.SWA(start=4, every=2)], ids=str)
@pytest.mark.parametrize("strategy", ["all_reduce", "parameter_server:shards=2", "local_sgd:period=3"])
def test_a_skipped_step_is_not_in_the_average(strategy, average, accumulate, tmp_path):
    work = AveragedHalf(average, accumulate=accumulate)
    expected, _, taken = scaled_law(work, average, 16)
    assert taken < 16 - 2
    options = {"callbacks": [rayps.BestCheckpoint()], "evaluate_every": 5, "keep_checkpoints": 9}
    result = train(work, strategy, steps=16, checkpoint=tmp_path, **options)
    torch.testing.assert_close(vector(result.model(average=True)), expected, rtol=1e-6, atol=1e-7)
    resumed = train(work, strategy, steps=16, resume=tmp_path / "step-00000005")
    assert torch.equal(vector(resumed.model(average=True)), vector(result.model(average=True)))


@pytest.mark.parametrize("strategy", ["all_reduce", "all_reduce:compression=fp16", "local_sgd:warmup=99"])
def test_workers_that_skip_together_have_the_average_of_the_steps_they_took(strategy, tmp_path):
    """The law: the parameters after each round, from checkpoints; a skipped round has left them as they were."""
    average, seen = rayps.EMA(0.8), []
    work = AveragedHalf(average)

    class Each(rayps.Callback):
        checkpoint_each_evaluation = True

        def on_checkpoint(self, run, path):
            seen.append(Snapshot.from_state(checkpoint.load(path)).params)

    result = train(work, strategy, workers=2, steps=12, checkpoint=tmp_path, callbacks=[Each()], evaluate_every=1)
    taken = [b for a, b in zip([None, *seen], seen, strict=False) if a is None or not torch.equal(a, b)]
    torch.manual_seed(0)
    if torch.equal(vector(work.model()), taken[0]):  # the first round was skipped
        taken = taken[1:]
    assert len(taken) == 12 - sum(n or 0 for n in result.history["skipped"].to_pylist()) < 12
    expected = taken[0].clone()
    for params in taken[1:]:
        expected.lerp_(params, 1 - 0.8)
    torch.testing.assert_close(vector(result.model(average=True)), expected, rtol=1e-6, atol=1e-7)


def test_local_sgd_in_fp16_averages_the_mean_of_the_workers(tmp_path):
    """A worker that skips alone stays where it is, and the others move: each round counts."""
    average, seen = rayps.EMA(0.8), []
    work = AveragedHalf(average)

    class Each(rayps.Callback):
        checkpoint_each_evaluation = True

        def on_checkpoint(self, run, path):
            own = Snapshot.from_state(checkpoint.load(path)).own
            seen.append(torch.stack([state.params for state in own.values()]).mean(0))

    options = {"checkpoint": tmp_path, "callbacks": [Each()], "evaluate_every": 1}
    result = train(work, "local_sgd:period=4", workers=2, steps=8, **options)
    assert sum(n or 0 for n in result.history["skipped"].to_pylist())
    expected = seen[0].clone()
    for params in seen[1:]:
        expected.lerp_(params, 1 - 0.8)
    torch.testing.assert_close(vector(result.model(average=True)), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("precision", [None, "fp16"])
@pytest.mark.parametrize("first", ["all_reduce", "parameter_server:shards=2", "local_sgd:period=2"])
@pytest.mark.parametrize("second", ["all_reduce", "parameter_server:shards=2", "local_sgd:period=3"])
def test_each_step_is_in_the_average_once_over_phases(first, second, precision):
    work = AveragedHalf(rayps.SWA()) if precision else Averaged(rayps.SWA(), n=24, batch=2)
    result = train(work, [(1, first), second], steps=20)
    expected = scaled_law(work, work.average, 20)[0] if precision else law(Small(n=24, batch=2), work.average, 20)
    torch.testing.assert_close(vector(result.model(average=True)), expected, rtol=1e-5, atol=1e-6)


def test_evaluations_are_of_the_average():
    work = Averaged(rayps.EMA(0.95))
    result = train(work, workers=2, epochs=3)
    model = result.model(average=True)
    batches = list(work.evaluation_data().batches(rank=0, size=1, seed=0, epoch=0))
    with torch.no_grad():
        sums = [(work.loss(model, batch).item() * batch.size, batch.size) for batch in batches]
    loss = sum(total for total, _ in sums) / sum(size for _, size in sums)
    assert result.metrics["loss"] == pytest.approx(loss, rel=1e-12)
    column = [value for value in result.history.column("evaluation_loss").to_pylist() if value is not None]
    trained = [v for v in train(Small(), workers=2, epochs=3).history["evaluation_loss"].to_pylist() if v is not None]
    assert len(column) == len(trained) == 3
    assert column != trained


def test_a_change_of_strategy_keeps_the_average():
    work = Averaged(rayps.SWA())
    phases = [(1, rayps.AllReduce()), rayps.LocalSGD(period=3)]
    result = train(work, phases, workers=2, epochs=2)
    assert int(result.snapshot.shared[weight_average.COUNT]) == result.snapshot.round


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("hogwild", "change the parameters"),
        ("downpour", "copies"),
        ("admm", "agree only at the end"),
        ("all_reduce:replica=pipeline(stages=2,micro_batches=1)", "parts of the model"),
    ],
)
def test_where_weights_cannot_be_averaged(strategy, words):
    with pytest.raises(ConfigError, match=words) as caught:
        train(Averaged(rayps.EMA()), strategy, workers=2, steps=3)
    assert "leave average out" in str(caught.value)


@pytest.mark.parametrize(
    "make", [lambda: rayps.EMA(1.0), lambda: rayps.EMA(-0.1), lambda: rayps.SWA(0), lambda: rayps.SWA(1, 0)]
)
def test_numbers_that_are_refused(make):
    with pytest.raises(ConfigError):
        make()


def test_what_is_no_average():
    with pytest.raises(ConfigError, match=r"rayps.EMA"):
        train(Averaged(0.99), steps=1)
    with pytest.raises(ConfigError, match="there is no average"):
        train(Small(), steps=1).model(average=True)


def test_parameters_may_be_on_another_device_than_the_average():
    """With the meta device for a GPU: evaluations take the servers' parameters, which are on the CPU."""
    state = {}
    weight_average.update(rayps.EMA(0.9), state, torch.ones(3, device="meta"), {}, 1)
    vector, _ = weight_average.read_average(rayps.EMA(0.9), state, torch.ones(3), {}, 2)
    assert vector.is_meta

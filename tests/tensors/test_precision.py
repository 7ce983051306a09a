"""Precision: bf16 is plain torch under autocast, and fp16 is a plain loop with `torch.amp.GradScaler`."""

import copy
import importlib
import time

import pytest
import torch
from rayps_client.errors import ConfigError, TrainingError
from small_work import OPTIMIZERS, Small, Watched, distance, rows, train, vector
from torch import nn

import rayps
from rayps import AllReduce, DiLoCo, Downpour, FedAvg, Hogwild, LocalSGD, ParallelSGD, ParameterServer
from rayps.cluster.local import LocalCluster
from rayps.ps.client.client import GroupServer
from rayps.ps.group import start
from rayps.tensors.checkpoints import checkpoint
from rayps.tensors.loss_scale import INTERVAL, LossScale

LOUD = (3, 4, 9)  # rows in the data whose losses are so large that gradients overflow in fp16 at a scale above 2^7


class Half(Small):
    """A network in float32. A batch with a loud row has an overflow, until the scale is small."""

    def __init__(self, precision="bf16", loud=(), accumulate=1, every=None, **options):
        super().__init__(**{"n": 24, "batch": 2, **options})
        self.precision, self.loud, self.accumulate, self.every = precision, loud, accumulate, every

    def model(self):
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))

    def data(self):
        x, y = rows(self.n)
        marks = torch.zeros(self.n, 1)
        marks[list(self.loud)] = 1
        return rayps.data.tensors(x.float(), torch.cat([y.float(), marks], 1), batch_size=self.batch)

    def loss(self, model, batch):
        errors = model(batch.x).float() - batch.y[:, :1]
        return (errors**2).mean() * (1 + 300 * batch.y[:, 1].max())

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=1e-3, momentum=0.9) if self.loud else OPTIMIZERS[self.kind](params)

    def evaluate(self, model, batch):
        return {"error": (model(batch.x) - batch.y[:, :1]).abs().mean()}


class Paced(Half):
    def schedule(self, optimizer):
        return lambda step: 0.8**step


class MeanOfGradients(rayps.Strategy):
    """The example of `rayps.Strategy`: `grad` and `ring.mean` in place of `mean_grad`."""

    def round(self, w):
        w.step(w.ring.mean(w.grad(w.batch())))


def dealt(work, workers, epochs):
    """For each step: the workers' batches."""
    data = work.data()
    for epoch in range(epochs):
        yield from zip(*(data.batches(rank=r, size=workers, seed=0, epoch=epoch) for r in range(workers)), strict=True)


def cast(work, device="cpu"):
    return torch.autocast(device, {"bf16": torch.bfloat16, "fp16": torch.float16}[work.precision])


def scaled_loop(work, epochs=1, schedule=None, device="cpu"):
    """Plain torch on one worker with a GradScaler; return the model and the number of skipped steps."""
    torch.manual_seed(0)
    model = work.model().to(device)
    optimizer, scaler = work.optimizer(list(model.parameters())), torch.amp.GradScaler(device)
    paced = None if schedule is None else torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    skipped = 0
    for (batch,) in dealt(work, 1, epochs):
        optimizer.zero_grad()
        with cast(work, device):
            loss = work.loss(model, batch.to(device))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if work.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), work.clip_norm)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < before:
            skipped += 1
        elif paced is not None:
            paced.step()
    return model, skipped


def grads_of(work, model, batch, scale):
    """The unscaled gradient of one batch, and whether it has overflowed."""
    model.zero_grad()
    with cast(work):
        loss = work.loss(model, batch)
    (loss * scale).backward()
    grad = torch.cat([p.grad.reshape(-1) for p in model.parameters()]) / scale
    return grad, not bool(torch.isfinite(grad).all())


def step_by(model, optimizer, grad):
    at = 0
    for p in model.parameters():
        p.grad = grad[at : at + p.numel()].view(p.shape).clone()
        at += p.numel()
    optimizer.step()


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize("strategy", [AllReduce(), ParameterServer(), LocalSGD(period=4)], ids=str)
def test_bf16_on_one_worker_has_the_bits_of_autocast(strategy, optimizer):
    work = Half(optimizer=optimizer)
    torch.manual_seed(0)
    model = work.model()
    made = work.optimizer(list(model.parameters()))
    for (batch,) in dealt(work, 1, 2):
        made.zero_grad()
        with cast(work):
            loss = work.loss(model, batch)
        loss.backward()
        made.step()
    result = train(work, strategy, epochs=2)
    assert distance(result.model(), model) == 0
    whole = Half(precision=None, optimizer=optimizer)
    assert distance(train(whole, strategy, epochs=2).model(), model) > 1e-5  # autocast changes something


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize(
    "strategy",
    [AllReduce(), AllReduce(bucket_mb=0), ParameterServer(), Downpour(), LocalSGD(period=4), Hogwild()],
    ids=str,
)
def test_fp16_on_one_worker_is_a_grad_scaler(strategy, clip):
    work = Half("fp16", loud=LOUD)
    work.clip_norm = clip
    model, skipped = scaled_loop(work, epochs=2)
    assert skipped >= 3
    result = train(work, strategy, epochs=2)
    assert distance(result.model(), model) < 1e-7
    assert sum(result.history["skipped"].to_pylist()) == skipped
    assert result.history["loss_scale"][-1].as_py() == 2.0 ** (16 - skipped)
    assert [event["kind"] for event in result.events].count("skipped") == 1


@pytest.mark.parametrize(
    "strategy",
    [AllReduce(), AllReduce(bucket_mb=1e-4), AllReduce(compression="top_k:1.0"), MeanOfGradients()],
    ids=lambda strategy: strategy.name,
)
def test_fp16_in_step_skips_on_all_workers(strategy):
    """Worker by worker in plain torch, with one scale for all: a gradient that overflows anywhere skips the step."""
    work = Half("fp16", loud=LOUD)
    torch.manual_seed(0)
    model = work.model()
    optimizer, scale, skipped = work.optimizer(list(model.parameters())), 2.0**16, 0
    for parts in dealt(work, 3, 2):
        found = [(batch.size, *grads_of(work, model, batch, scale)) for batch in parts if batch.size]
        if any(overflow for *_, overflow in found):
            scale, skipped = scale / 2, skipped + 1
            continue
        step_by(model, optimizer, sum(n * grad for n, grad, _ in found) / sum(n for n, *_ in found))
    assert skipped >= 3
    result = train(work, strategy, workers=3, epochs=2)
    assert distance(result.model(), model) < 1e-6
    assert sum(n or 0 for n in result.history["skipped"].to_pylist()) == skipped


@pytest.mark.parametrize(
    ("loud", "strategy", "period"),
    [
        ((3,), LocalSGD(period=3), 3),
        (tuple(range(24)), LocalSGD(period=3), 3),  # in the first periods all workers skip all steps
        (LOUD, LocalSGD(period=1), 1),
        (tuple(range(24)), LocalSGD(period=3, compression="fp16"), 3),
        (tuple(range(24)), DiLoCo(period=3, outer_lr=1.0, outer_momentum=0.0), 3),
        (tuple(range(24)), ParallelSGD(rounds=2), 3),
    ],
    ids=str,
)
def test_fp16_apart_has_a_scale_for_each_worker(loud, strategy, period):
    work = Half("fp16", loud=loud)
    torch.manual_seed(0)
    first = work.model()
    models = [copy.deepcopy(first) for _ in range(2)]
    optimizers = [work.optimizer(list(model.parameters())) for model in models]
    scales, counts, skipped = [2.0**16] * 2, [0, 0], [0, 0]
    plan = list(dealt(work, 2, 1))
    for done, parts in enumerate(plan, 1):
        for k, batch in enumerate(parts):
            grad, overflow = grads_of(work, models[k], batch, scales[k])
            if overflow:
                scales[k] /= 2
                skipped[k] += 1
            else:
                counts[k] += batch.size
                step_by(models[k], optimizers[k], grad)
        if (done % period == 0 or done == len(plan)) and sum(counts):
            mean = sum(n * vector(m) for n, m in zip(counts, models, strict=True)) / sum(counts)
            for model in models:
                nn.utils.vector_to_parameters(mean.detach().clone(), model.parameters())
            counts = [0, 0]
    assert sum(skipped)
    result = train(work, strategy, workers=2)
    assert distance(result.model(), models[0]) < (1e-6 if getattr(strategy, "compression", None) is None else 1e-3)
    assert sum(result.history["skipped"].to_pylist()) == sum(skipped)


def test_a_server_ignores_a_skipped_push():
    """In the mean of a round, a gradient that has overflowed has weight 0; each worker has its own scale."""
    work = Half("fp16", loud=LOUD)
    torch.manual_seed(0)
    model = work.model()
    optimizer, scales = work.optimizer(list(model.parameters())), [2.0**16] * 2
    for parts in dealt(work, 2, 2):
        total, weight = 0.0, 0
        for k, batch in enumerate(parts):
            grad, overflow = grads_of(work, model, batch, scales[k])
            if overflow:
                scales[k] /= 2
            else:
                total, weight = total + batch.size * grad, weight + batch.size
        if weight:
            step_by(model, optimizer, total / weight)
    result = train(work, ParameterServer(shards=2), workers=2, epochs=2)
    assert distance(result.model(), model) < 1e-6


@pytest.mark.parametrize("compression", [None, "top_k:0.2", "fp16"])
@pytest.mark.parametrize("staleness", [0, 3, None])
def test_each_worker_of_a_server_skips_its_own_pushes(monkeypatch, staleness, compression):
    """A skipped push has no samples, changes no error feedback, and is counted; nothing that is sent is infinite."""
    pushes = []
    plainly = GroupServer.push

    def push(self, value, *args, **kwargs):
        before = None if self.feedback is None else self.feedback.residual.clone()
        plainly(self, value, *args, **kwargs)
        after = None if before is None else self.feedback.residual.clone()
        pushes.append((id(self), value.samples, value.vector.clone(), before, after))

    monkeypatch.setattr(GroupServer, "push", push)
    work = Half("fp16", loud=range(2, 24, 3), n=48)
    work.clip_norm = 0.5  # clipped gradients are no numbers of fp16, so that its error feedback has a sense
    torch.manual_seed(0)
    first = work.model()
    strategy = ParameterServer(shards=2, staleness=staleness, compression=compression)
    result = train(work, strategy, workers=3, epochs=3)
    assert len(pushes) == 3 * 24 and len({worker for worker, *_ in pushes}) == 3
    skipped = [samples for _, samples, *_ in pushes].count(0)
    assert 9 <= skipped < 3 * 24, "a scale of 2^16 is halved at least 9 times before the loud rows fit"
    assert sum(result.history["skipped"].to_pylist()) == skipped
    firsts = [event["message"] for event in result.events if event["kind"] == "skipped"]
    assert len(firsts) == len({worker for worker, samples, *_ in pushes if not samples})
    for _, samples, vector_sent, before, after in pushes:
        assert torch.isfinite(vector_sent).all() and bool(vector_sent.any()) == bool(samples)
        if after is not None:
            assert torch.isfinite(after).all()
            assert samples or torch.equal(before, after)
    if compression is not None:
        assert any(bool(after.any()) for *_, after in pushes)
    assert torch.isfinite(vector(result.model())).all()
    momentum = [state["momentum_buffer"] for state in result.snapshot.moments.values()]
    assert momentum and all(torch.isfinite(each).all() for each in momentum)
    assert distance(result.model(), first) > 1e-3


SERVERS = [
    ParameterServer(),
    ParameterServer(shards=2),
    ParameterServer(shards=2, replicas=1),
    ParameterServer(staleness=3),
    ParameterServer(shards=2, staleness=None, compression="top_k:1.0"),
    ParameterServer(shards=2, staleness=None),
    ParameterServer(shards=2, staleness=None, replicas=1),
    Downpour(),
    Downpour(shards=2),
]


@pytest.mark.parametrize(
    "strategy",
    [
        AllReduce(),
        LocalSGD(period=4),
        Hogwild(),
        *SERVERS,
        [(1, ParameterServer(staleness=3)), AllReduce()],
        [(1, AllReduce()), Downpour()],
        [(1, LocalSGD(period=4)), ParameterServer(shards=2)],
    ],
    ids=str,
)
def test_a_skip_steps_no_schedule(strategy):
    work = Paced("fp16", loud=LOUD)
    model, skipped = scaled_loop(work, 2, lambda step: 0.8**step)
    assert skipped
    assert distance(train(work, strategy, epochs=2).model(), model) < 1e-7


@pytest.mark.parametrize("strategy", [AllReduce(), *SERVERS], ids=str)
def test_a_resume_continues_the_schedule_without_the_skipped_steps(strategy, tmp_path):
    work = Paced("fp16", loud=LOUD)
    model, _ = scaled_loop(work, 2, lambda step: 0.8**step)
    half = train(work, strategy, steps=15, checkpoint=tmp_path)
    skipped = sum(half.history["skipped"].to_pylist())
    assert skipped >= 2
    recorded = checkpoint.load(tmp_path / "step-00000015").meta["schedule"]
    assert recorded["tick"] == 14 - skipped and recorded["groups"] == [{"lr": 1e-3 * 0.8 ** (14 - skipped)}]
    resumed = train(work, strategy, steps=24, checkpoint=tmp_path, resume=True)
    assert not any("was saved with the schedule" in event["message"] for event in resumed.events)
    assert distance(resumed.model(), model) < 1e-7


class Slow(Paced):
    """Its losses are counted, so that a test can end an actor after some of them."""

    def loss(self, model, batch):
        importlib.import_module("small_work").SEEN[self.tag] += 1
        time.sleep(0.005)
        return super().loss(model, batch)


@pytest.mark.parametrize(
    "strategy", [ParameterServer(shards=2), ParameterServer(shards=2, staleness=None), Downpour(shards=2)], ids=str
)
def test_a_server_that_is_replaced_counts_the_skipped_steps_again(strategy):
    work = Slow("fp16", loud=LOUD, tag=f"fp16-death-{strategy}")
    model, skipped = scaled_loop(Paced("fp16", loud=LOUD), 3, lambda step: 0.8**step)
    cluster = Watched()
    try:
        killer = cluster.kill_when(work.tag, 22, ("ShardActor", 1))
        result = train(work, strategy, cluster, epochs=3, checkpoint_every=4)
        killer.join(60)
    finally:
        cluster.close()
    assert skipped and not killer.is_alive()
    assert {"replaced", "restarted"} & {event["kind"] for event in result.events}
    assert distance(result.model(), model) < 1e-7


class ByEpoch(Paced):
    schedule_every = "epoch"


@pytest.mark.parametrize("strategy", [AllReduce(), ParameterServer(), Downpour()], ids=str)
def test_a_schedule_of_epochs_does_not_concern_skips(strategy):
    work = ByEpoch("fp16", loud=LOUD)
    model, skipped = scaled_loop(work, 1)
    assert skipped
    assert distance(train(work, strategy, epochs=1).model(), model) < 1e-7
    assert distance(train(work, strategy, epochs=2).model(), train(work, AllReduce(), epochs=2).model()) < 1e-7


def test_a_round_that_one_worker_skips_is_a_step_of_the_schedule_and_one_that_all_skip_is_none():
    work = Paced("fp16", loud=tuple(range(0, 24, 3)))
    torch.manual_seed(0)
    model = work.model()
    optimizer, scales, ticks, kinds = work.optimizer(list(model.parameters())), [2.0**16] * 2, 0, set()
    for parts in dealt(work, 2, 2):
        total, weight, overflows = 0.0, 0, 0
        for k, batch in enumerate(parts):
            grad, overflow = grads_of(work, model, batch, scales[k])
            overflows += overflow
            if overflow:
                scales[k] /= 2
            else:
                total, weight = total + batch.size * grad, weight + batch.size
        kinds.add(overflows)
        if weight:
            optimizer.param_groups[0]["lr"] = 1e-3 * 0.8**ticks
            step_by(model, optimizer, total / weight)
            ticks += 1
    assert kinds == {0, 1, 2}
    for strategy in (ParameterServer(shards=2), ParameterServer(shards=2, replicas=1)):
        assert distance(train(work, strategy, workers=2, epochs=2).model(), model) < 1e-6


class Decayed(Paced):
    def optimizer(self, params):
        return torch.optim.SGD(params, lr=1e-3, weight_decay=3.0)


@pytest.mark.parametrize("server_group", [False, True])
@pytest.mark.parametrize("n", [1, 3, 5, 24])
def test_a_push_of_several_gradients_decays_the_weights_once_for_each_that_was_not_skipped(n, server_group):
    work = Decayed("fp16", loud=LOUD)
    torch.manual_seed(0)
    model, scale, total, count, ticks = work.model(), 2.0**16, 0.0, 0, 0
    optimizer = work.optimizer(list(model.parameters()))
    own = copy.deepcopy(model)  # the worker's copy, with the schedule of its own steps
    stepper = work.optimizer(list(own.parameters()))
    batches = [batch for (batch,) in dealt(work, 1, 2)]
    for done, batch in enumerate(batches, 1):
        grad, overflow = grads_of(work, own, batch, scale)
        if overflow:
            scale /= 2
        else:
            stepper.param_groups[0]["lr"] = 1e-3 * 0.8**ticks
            step_by(own, stepper, grad)
            total, count, ticks = total + grad, count + 1, ticks + 1
        if done % n == 0 or done == len(batches):
            if count:
                optimizer.param_groups[0] |= {"lr": 1e-3 * 0.8 ** (ticks - 1), "weight_decay": 3.0 * count}
                step_by(model, optimizer, total)
            own.load_state_dict(model.state_dict())
            total, count = 0.0, 0
    assert ticks < len(batches)
    strategy = Downpour(n_push=n, n_fetch=n, shards=2)
    if server_group:
        cluster = LocalCluster()
        with start(cluster, "common", servers=2, replicas=1, detached=False):
            result = train(work, strategy, cluster, epochs=2, server_group="common")
        cluster.close()
    else:
        result = train(work, strategy, epochs=2)
    assert distance(result.model(), model) < 1e-7


@pytest.mark.parametrize("strategy", [AllReduce(), LocalSGD(period=3)], ids=str)
def test_the_scale_is_in_checkpoints(strategy, tmp_path):
    work = Half("fp16", loud=LOUD)
    through = train(work, strategy, workers=2, epochs=3)
    train(work, strategy, workers=2, epochs=1, checkpoint=tmp_path)
    newest = max(path for path in tmp_path.iterdir() if path.name.startswith("step-"))
    resumed = train(work, strategy, workers=2, epochs=3, resume=newest)
    assert distance(resumed.model(), through.model()) == 0


class Root(Half):
    """A loss with an infinite derivative."""

    def loss(self, model, batch):
        return super().loss(model, batch) + (model[0].weight * 0).abs().sum().sqrt()


@pytest.mark.parametrize("strategy", [AllReduce(), ParameterServer(), LocalSGD()], ids=str)
def test_a_gradient_that_no_scale_helps_is_an_error(strategy):
    with pytest.raises(
        TrainingError, match=r"gradient of parameter '0.weight' is not finite .* but the loss is finite"
    ):
        train(Root("fp16"), strategy, workers=2, epochs=5)


class Broken(Half):
    def loss(self, model, batch):
        return super().loss(model, batch) * float("nan")


def test_a_loss_that_is_not_finite_is_an_error():
    with pytest.raises(TrainingError, match="the loss became nan"):
        train(Broken("fp16"), AllReduce())


@pytest.mark.parametrize("value", ["half", "float16", 16, True])
def test_precision_is_checked(value):
    with pytest.raises(ConfigError, match=r"precision of Half is .* give 'bf16', 'fp16', or None"):
        train(Half(value))


def test_what_is_refused_says_what_to_do():
    class Fed(Half):
        def data(self):
            return super().data().with_clients(rayps.data.iid(3))

    with pytest.raises(ConfigError, match="set precision to 'bf16'"):
        train(Fed("fp16"), FedAvg(fraction=1.0))
    pipeline = AllReduce(replica=rayps.Pipeline(stages=2, micro_batches=2))
    with pytest.raises(ConfigError, match="set precision to 'bf16'"):
        train(Half("fp16"), pipeline, workers=2)
    with pytest.raises(ConfigError, match=r"model\.bfloat16\(\)"):
        train(Half(), AllReduce(replica=rayps.TensorParallel(2)), workers=2)
    with pytest.raises(ConfigError, match="multiply batch_size and the pipeline's micro_batches by 3"):
        train(Half(None, accumulate=3), pipeline, workers=2)


def test_the_scale_follows_the_rule_of_torch():
    """Against torch's own update, step by step, with overflows at some steps."""
    ours, scale, steps = LossScale(), torch.tensor(2.0**16), torch.tensor(0, dtype=torch.int32)
    for step in range(3 * INTERVAL):
        overflow = step in (5, 6, 2500)
        torch._amp_update_scale_(scale, steps, torch.tensor(float(overflow)), 2.0, 0.5, INTERVAL)
        ours.update(overflow)
        assert ours.scale == scale.item()
    again = LossScale()
    again.load(ours.state())
    assert (again.scale, again.skipped, again.state().tolist()) == (ours.scale, 3, ours.state().tolist())

"""On a machine with a CUDA device: what is trained there, on threads and on Ray. Elsewhere skipped, saying so.

More laws run there with RAYPS_TEST_DEVICE=cuda: see `small_work.train`. Workers that communicate inside a backward
pass (tensor parallel, synchronized BatchNorm) need a process each: torch runs all backward passes of a process on one
thread for each device, where such workers would wait for each other.
"""

import importlib.util
import json

import pytest
import torch
from process_cluster import ProcessCluster
from rayps_client.errors import ConfigError
from small_work import Small, distance, plain
from test_own_loop import Fixed
from test_precision import LOUD, Half, scaled_loop
from torch import nn

import rayps
from rayps.cluster.local import LocalCluster

pytestmark = pytest.mark.gpu

CLOSE = 1e-9  # float64; another order of additions
GPU = {"cpu": 1, "gpu": 0.5}  # two workers share a device


@pytest.fixture
def cuda():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")


@pytest.fixture
def threads(cuda):
    """A cluster of threads whose workers may use the device."""
    cluster = LocalCluster(gpus=64.0)
    yield cluster
    cluster.close()


@pytest.fixture
def gpu_ray(cuda, ray_cluster):
    """The shared local Ray, which has found the device."""
    return ray_cluster


def train(work, strategy, cluster, **options):
    options = {"workers": 2, "epochs": 2, "resources": GPU, "progress": False} | options
    return rayps.train(work, strategy=strategy, cluster=cluster, **options)


class OnDevice(rayps.Workload):
    """Fails unless it is computed on its device."""

    def __init__(self, device="cuda"):
        self.device = device

    def model(self):
        return nn.Linear(4, 2)

    def data(self):
        x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
        return rayps.data.tensors(x, (x.sum(1) > 0).long(), batch_size=8)

    def loss(self, model, batch):
        assert batch.x.device.type == next(model.parameters()).device.type == self.device
        return nn.functional.cross_entropy(model(batch.x), batch.y)

    def evaluate(self, model, batch):
        assert batch.x.device.type == self.device
        return {"accuracy": (model(batch.x).argmax(1) == batch.y).float().mean()}


class Normed(OnDevice):
    sync_batchnorm = True

    def model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


class InBf16(OnDevice):
    precision = "bf16"


class InFp16(OnDevice):
    precision = "fp16"


class CompiledOnDevice(OnDevice):
    compile = True


class Loaded(OnDevice):
    def data(self):
        return super().data().loaded_by(1)


def check(work, strategy, cluster):
    """The result is that of the same job on CPUs, up to rounding; without a fixed order, it has learned."""
    found = train(work(), strategy, cluster, timeout=120.0)
    assert not any(p.is_cuda for p in found.model().parameters())
    law = train(work("cpu"), strategy, LocalCluster(), resources={"cpu": 1})
    assert len(found.history) == len(law.history)
    if strategy == "parameter_server:staleness=none":
        assert found.metrics["loss"] < found.history["loss"][0].as_py()
    else:
        close = 1e-5 if work.precision is None and "compression" not in strategy else 1e-2
        assert distance(found.model(), law.model()) < close
        assert found.metrics == pytest.approx(law.metrics, abs=5 * close)


@pytest.mark.ray
@pytest.mark.parametrize(
    ("work", "strategy"),
    [
        (OnDevice, "all_reduce"),
        (OnDevice, "parameter_server"),
        (OnDevice, "parameter_server:staleness=none"),
        (OnDevice, "all_reduce:compression=int8"),
        (OnDevice, "parameter_server:compression=fp16"),
        (OnDevice, "local_sgd:period=2"),
        (Normed, "all_reduce"),
        (InBf16, "all_reduce"),
        (InFp16, "all_reduce"),
        (InFp16, "parameter_server"),
        (CompiledOnDevice, "all_reduce"),
        (Loaded, "all_reduce"),
    ],
)
def test_a_worker_that_asks_for_a_gpu_trains_on_it(gpu_ray, work, strategy):
    check(work, strategy, gpu_ray)


@pytest.mark.ray
def test_a_loop_of_ones_own_on_ray(gpu_ray):
    def train_fn():
        model = nn.Linear(4, 2).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        rayps.wrap(model, optimizer)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(8, 4, device="cuda")).square().mean().backward()
            optimizer.step()
        rayps.save({"model": model, "optimizer": optimizer})
        return [p.detach().cpu() for p in model.parameters()]

    a, b = rayps.run(train_fn, workers=2, resources=GPU, cluster=gpu_ray, progress=False, timeout=120.0)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("work", [OnDevice, InBf16, InFp16, Loaded])
@pytest.mark.parametrize("strategy", ["all_reduce", "parameter_server", "local_sgd:period=2"])
def test_it_trains_on_threads(threads, work, strategy):
    check(work, strategy, threads)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("strategy", ["all_reduce", "parameter_server", "local_sgd:period=4", "downpour"])
def test_fp16_is_torchs_grad_scaler(threads, strategy, clip):
    """The scale halves with the overflows of the device, and comes back with them in the record."""
    work = Half("fp16", loud=LOUD)
    work.clip_norm = clip
    model, skipped = scaled_loop(work, epochs=2, device="cuda")
    assert skipped >= 3
    found = train(work, strategy, threads, workers=1)
    assert distance(found.model(), model.cpu()) < 1e-6
    assert sum(found.history["skipped"].to_pylist()) == skipped
    assert found.history["loss_scale"][-1].as_py() == 2.0 ** (16 - skipped)


@pytest.mark.parametrize("strategy", ["all_reduce", "parameter_server:shards=2", "local_sgd:warmup=1000"])
def test_the_default_backend_compiles_for_it(threads, strategy):
    class Compiled(Half):
        compile = True

    found = train(Compiled(None), strategy, threads)
    assert distance(found.model(), train(Half(None), strategy, threads).model()) < 1e-5


@pytest.mark.parametrize("strategy", ["all_reduce", "parameter_server", "all_reduce:compression=top_k:1.0"])
def test_a_loop_of_ones_own(threads, strategy):
    work = Fixed()

    def train_fn():
        here, model = rayps.world(), work.model().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rayps.wrap(model, optimizer, strategy)
        for batch in work.data().batches(rank=here.rank, size=here.size, seed=0, epoch=0):
            optimizer.zero_grad()
            optimizer.samples = batch.size
            loss = ((model(batch.x.cuda()) - batch.y.cuda()) ** 2).mean()
            loss.backward()
            rayps.log(loss=loss)
            optimizer.step()
        return model.cpu()

    found = rayps.run(train_fn, workers=2, resources=GPU, cluster=threads, progress=False, timeout=60.0)
    close = 1e-6 if "compression" in strategy else CLOSE  # values travel as float32
    assert all(distance(model, plain(work, 2)[0]) < close for model in found)


@pytest.mark.parametrize("strategy", ["all_reduce", "parameter_server", "local_sgd:period=2"])
def test_an_average_of_the_weights(threads, strategy):
    class Averaged(Small):
        average = rayps.EMA(0.9)

    found = train(Averaged(), strategy, threads)
    assert distance(found.model(), train(Averaged(), strategy, LocalCluster(), resources={"cpu": 1}).model()) < CLOSE


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}], ids=str)
def test_an_optimizer_of_the_device_continues_from_a_checkpoint(threads, options, tmp_path):
    class Adam(Small):
        def optimizer(self, params):
            return torch.optim.AdamW(params, lr=0.01, **options)

    whole = train(Adam(), "all_reduce", threads)
    train(Adam(), "all_reduce", threads, epochs=1, checkpoint=tmp_path)
    found = train(Adam(), "all_reduce", threads, checkpoint=tmp_path, resume=True)
    assert distance(found.model(), whole.model()) < CLOSE


def test_hogwild_is_refused_before_it_trains(threads):
    with pytest.raises(ConfigError, match="the model is on cuda: this strategy needs it on the CPU"):
        train(OnDevice(), "hogwild", threads)


@pytest.mark.ray
@pytest.mark.parametrize("replica", [rayps.Pipeline(stages=2, micro_batches=3), rayps.TensorParallel(size=2)], ids=str)
def test_a_model_on_two_workers(gpu_ray, replica):
    work = Small()
    found = train(work, rayps.AllReduce(replica=replica), gpu_ray, timeout=120.0)
    assert distance(found.model(), plain(work, epochs=2)[0]) < CLOSE


def test_a_trace_has_the_devices_kernels(threads, tmp_path):
    train(Small(), "all_reduce", threads, workers=1, profile=tmp_path)
    events = json.loads((tmp_path / "rank-0.json").read_text())["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
def test_a_language_model(threads, precision):
    class Lm(rayps.Workload):
        def model(self):
            from transformers import GPT2Config, GPT2LMHeadModel

            config = GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=32, bos_token_id=0)
            return GPT2LMHeadModel(config)

        def data(self):
            text = torch.arange(64).repeat(40)
            return rayps.data.tensors(text.unfold(0, 16, 8), batch_size=8)

        def loss(self, model, batch):
            return model(batch.x, labels=batch.x).loss

        def optimizer(self, params):
            return torch.optim.AdamW(params, lr=1e-3)

    Lm.precision = precision
    losses = train(Lm(), "all_reduce", threads, epochs=4).history["loss"].to_pylist()
    assert losses[-1] < losses[0] - 0.5


def test_a_run_continues_on_it_from_a_checkpoint_of_the_cpu(threads, tmp_path):
    work = Small(optimizer="adam")
    whole = train(work, "all_reduce", threads)
    train(work, "all_reduce", threads, epochs=1, resources={"cpu": 1}, checkpoint=tmp_path)
    found = train(work, "all_reduce", threads, checkpoint=tmp_path, resume=True)
    assert distance(found.model(), whole.model()) < CLOSE


@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
@pytest.mark.parametrize("options", [{}, {"slice_backup": True}], ids=["plain", "copies"])
def test_workers_with_slices_of_the_state(cuda, tmp_path, shard, options):
    """Two processes on one device: the state of a run on the CPU, its checkpoint, and its resume."""

    def run(strategy, **more):
        cluster = ProcessCluster(gpus=2.0)
        try:
            return train(Small(optimizer="adam"), strategy, cluster, **more)
        finally:
            cluster.close()

    law = run("all_reduce", resources={"cpu": 1})
    sharded = rayps.AllReduce(shard=shard, **options)
    assert distance(run(sharded, checkpoint=tmp_path).model(), law.model()) < CLOSE
    more = run(sharded, epochs=3, checkpoint=tmp_path, resume=True)
    assert distance(more.model(), run("all_reduce", resources={"cpu": 1}, epochs=3).model()) < CLOSE

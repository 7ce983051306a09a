"""Shards on a device, on the CPU's twin and on a GPU where there is one.

The law: the parameters, the optimizer's state and the states for checkpoints are those of shards on the CPU. On the
twin they are equal bit for bit. The delayed twin runs each copy as late as it may.
"""

import functools

import pytest
import torch
from rayps_client.errors import ConfigError, NoResources
from small_work import Small, distance, train
from static_servers import Served, vector_layout
from test_device_server import CLOSE, KINDS, equal, house, made

import rayps
from rayps.cluster.local import LocalCluster
from rayps.core.strategy.topology import shard_bundles
from rayps.ps.protocol.rows import ShardRows
from rayps.ps.server import shard_actor
from rayps.ps.server.dense_segment import DenseSegment, state_of
from rayps.ps.server.device_optimizer import DeviceOptimizer
from rayps.service.plan import needs
from rayps.strategies.catalogue import parse, wire
from rayps.strategies.job import JobSpec
from rayps.tensors.checkpoints.uploads import BLOCK_BYTES, Uploads

SHARED = "shard_resources=(gpu=0.25)"


@pytest.fixture(params=KINDS)
def device(request):
    return made(request.param)


@pytest.fixture
def on_device(device, monkeypatch):
    """Shards that ask for a GPU are on the device."""
    optimizer = functools.partial(DeviceOptimizer, device=device)
    monkeypatch.setattr(shard_actor, "find_optimizer_type", lambda name: None if name == "cpu" else optimizer)
    return device


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "adamw_groups"])
@pytest.mark.parametrize("staleness", ["0", "none"])
def test_a_job_trains_as_with_shards_on_the_cpu(on_device, staleness, optimizer):
    workers = 2 if staleness == "0" else 1
    strategy = f"parameter_server:shards=3,staleness={staleness}"
    work = Small(optimizer=optimizer)
    found = train(work, f"{strategy},{SHARED}", LocalCluster(gpus=1.0), workers=workers, epochs=2)
    assert equal(on_device, found, train(work, strategy, workers=workers, epochs=2))


def test_a_schedule_and_downpours_adagrad(on_device):
    class Paced(Small):
        def schedule(self, optimizer):
            return lambda step: 0.9**step

    found = train(Paced(optimizer="adam"), f"parameter_server:shards=2,{SHARED}", LocalCluster(gpus=1.0), workers=2)
    assert equal(on_device, found, train(Paced(optimizer="adam"), "parameter_server:shards=2", workers=2))


@pytest.mark.parametrize(("first", "second"), [(SHARED, ""), ("", SHARED)], ids=["to-cpu", "to-device"])
def test_a_checkpoint_of_one_resumes_the_other(on_device, first, second, tmp_path):
    work, plain = Small(optimizer="adam"), "parameter_server:shards=2"
    law = train(work, plain, workers=2, epochs=2)
    with_options = [f"{plain},{each}" if each else plain for each in (first, second)]
    train(work, with_options[0], LocalCluster(gpus=1.0), workers=2, epochs=1, checkpoint=tmp_path)
    found = train(work, with_options[1], LocalCluster(gpus=1.0), workers=2, epochs=2, checkpoint=tmp_path, resume=True)
    assert equal(on_device, found, law)


def test_the_place_of_shards_may_change_between_phases(on_device):
    strategy = f"1*parameter_server:shards=2,{SHARED} > 1*parameter_server:shards=2 > parameter_server:{SHARED}"
    found = train(Small(optimizer="adam"), strategy, LocalCluster(gpus=1.0), workers=2, epochs=3)
    law = train(Small(optimizer="adam"), "parameter_server", workers=2, epochs=3)
    assert distance(found.model(), law.model()) < CLOSE


# ---- one segment


OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1),
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": functools.partial(torch.optim.Adam, lr=0.1),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.1),
    "asgd": functools.partial(torch.optim.ASGD, lr=0.1),
}


# on a GPU, torch computes the rate `eta` of ASGD in float32, and on the CPU in float64
APART = {"asgd": 1e-6}


def pair(device, optimizer, size=30, shared=True):
    """The same segment on the device and on the CPU."""
    here = house(vector_layout(size), 1, 1, None)
    try:
        space = here.space
    finally:
        here.close()
    found = []
    for made_by in (functools.partial(DeviceOptimizer, device=device), None):
        segment = DenseSegment(space, 0, OPTIMIZERS[optimizer], optimizer=made_by)
        if shared:
            segment.share()
        start = torch.arange(float(size)).to(space.layout.dtype)
        segment.load(state_of(start, space.layout, 0, marks=[0]))
        found.append(segment)
    return found


def same(device, one, other, close=CLOSE):
    """The states are equal on the twin, and differ by at most `close` on a GPU."""
    a, b = one.shard.state(), other.shard.state()
    close = close if device.kind == "cuda" else 0.0
    assert a.params.device.type == "cpu"
    assert torch.allclose(a.params, b.params, rtol=0.0, atol=close)
    assert a.moments.keys() == b.moments.keys()
    for name, state in a.moments.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                assert value.device.type == "cpu"
                assert torch.allclose(value, b.moments[name][key], rtol=0.0, atol=close), key
    assert one.nbytes == other.nbytes


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "private"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_whole_pushes_ranges_and_rows(device, optimizer, shared):
    one, other = pair(device, optimizer, shared=shared)
    rows = ShardRows(0, 0, 3, torch.tensor([1, 4, 9]))
    generator = torch.Generator().manual_seed(0)
    for step in range(6):
        for segment in (one, other):
            generator.manual_seed(step)
            shard = segment.shard
            if step % 3 == 2:
                shard.push(0, step, torch.randn(9, generator=generator, dtype=torch.float64), 1.0, rows=rows)
            elif step % 3 == 1:
                shard.push(0, step, torch.randn(11, generator=generator, dtype=torch.float64), 1.0, 7)
            else:
                shard.push(0, step, torch.randn(30, generator=generator, dtype=torch.float64), 1.0)
            assert segment.shard.slice.words[0] == 2 * (step + 1)  # an even number: workers may read
        same(device, one, other, APART.get(optimizer, CLOSE))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_state_restores_either(device, optimizer):
    one, other = pair(device, optimizer)
    for segment in (one, other):
        segment.shard.push(0, 0, torch.ones(30, dtype=torch.float64), 1.0)
    states = one.dump(), other.dump()
    if device.kind == "cpu":
        assert states[0] == states[1]
    one.load(states[1])
    other.load(states[0])
    for segment in (one, other):
        segment.shard.push(0, 1, torch.full((30,), 2.0, dtype=torch.float64), 1.0)
    same(device, one, other, APART.get(optimizer, CLOSE))


def test_a_branch_of_a_segment_on_a_device(device):
    one, other = pair(device, "adam")
    branches = [segment.branch() for segment in (one, other)]
    for segment in (one, other):
        segment.push(0, 0, 1.0, memoryview(bytearray(torch.ones(30, dtype=torch.float64).numpy().tobytes())))
    assert torch.equal(branches[0].shard.params, torch.arange(30.0, dtype=torch.float64))
    assert isinstance(branches[0].shard.optimizer, DeviceOptimizer)
    same(device, *branches)
    same(device, one, other)


def test_memory_that_the_system_does_not_pin(device, monkeypatch):
    monkeypatch.setattr(type(device), "pin", lambda self, memory, read_only=False: False)
    one, other = pair(device, "adam")
    for segment in (one, other):
        segment.shard.push(0, 0, torch.ones(30, dtype=torch.float64), 1.0)
    same(device, one, other)


@pytest.mark.parametrize("blocks", [0, 0.5, 1, 2, 3.5])
def test_an_upload_of_any_size(device, blocks):
    """The source may change after the call: the blocks are used in turn, and not before they are read."""
    source = torch.arange(int(blocks * BLOCK_BYTES / 4), dtype=torch.float32)
    uploads, law = Uploads(device, torch.float32), source.clone()
    for _ in range(3):
        found = uploads.copy(source)
        source.zero_()
        assert torch.equal(found.cpu(), law)
        source.copy_(law)


def test_the_shard_of_a_house(on_device, monkeypatch):
    """A shard that is told to be on a device serves its parameters through the host's memory."""
    layout = vector_layout(12)
    monkeypatch.setattr(Served, "device", "cuda", raising=False)
    here = house(layout, 2, 1, 0)
    try:
        server = here.join(0)
        server.push(torch.ones(12, dtype=torch.float64))
        assert torch.allclose(server.pull(), here.start - 0.1)
    finally:
        here.close()


# ---- options and resources


@pytest.mark.parametrize(
    "given", [{}, {"gpu": 0}, {"gpu": 2}, {"gpu": True}, {"gpu": "x"}, {"cpu": 1}, {"gpu": 0.5, "cpu": 1}, 0.5, "gpu"]
)
def test_what_is_not_valid_is_refused(given):
    with pytest.raises(ConfigError, match=r"shard_resources is .*: give the part of a GPU of each shard"):
        rayps.ParameterServer(shard_resources=given)


def test_servers_of_a_group_are_refused():
    with pytest.raises(ConfigError, match="leave out shard_resources, or replicas"):
        rayps.ParameterServer(shards=2, replicas=1, shard_resources={"gpu": 0.5})
    with pytest.raises(ConfigError, match="leave out shard_resources, or server_group"):
        train(Small(), f"parameter_server:{SHARED}", LocalCluster(gpus=1.0), server_group="prod")


def test_a_loop_of_ones_own_is_refused():
    with pytest.raises(ConfigError, match="the servers of a loop of your own are on the CPU"):
        rayps.strategies.catalogue.parse_for_loop(f"parameter_server:{SHARED}")


def test_the_text_form_is_the_wire_form():
    [phase] = parse(f"parameter_server:shards=2,{SHARED}")
    assert phase.strategy == rayps.ParameterServer(shards=2, shard_resources={"gpu": 0.25})
    assert wire([phase])["shard_resources"] == {"gpu": 0.25}
    assert parse(wire([phase])) == [phase]
    assert phase.strategy.topology.gpus == 0.25
    assert "shard_resources" not in wire(parse("parameter_server"))


@pytest.mark.parametrize(
    ("text", "law"),
    [
        ("all_reduce", []),
        ("parameter_server:shards=3", []),
        (f"parameter_server:shards=3,{SHARED}", [0.25] * 3),
        (f"1*parameter_server:shards=3,{SHARED} > parameter_server:shard_resources=(gpu=0.5)", [0.5, 0.25, 0.25]),
        (f"1*all_reduce > parameter_server:{SHARED},replica=tensor_parallel(size=2)", [0.25, 0.25]),
    ],
)
def test_the_resources_of_servers(text, law):
    bundles = shard_bundles([phase.strategy for phase in parse(text)], 4)
    assert [bundle["gpu"] for bundle in bundles] == law
    spec = JobSpec("module:Work", text, workers=4, resources={"cpu": 1, "gpu": 0.5})
    assert needs(spec) == {"cpu": 4, "gpu": 2.0 + sum(law)}


def test_a_cluster_without_the_gpus_is_refused():
    with pytest.raises(NoResources, match=r"the job needs 0\.5 GPUs and the cluster has 0 in total"):
        train(Small(), f"parameter_server:shards=2,{SHARED}", LocalCluster(), resources={"cpu": 1})

"""The device module, on the CPU's twin and on a GPU where there is one: streams, events, copies, shared memory."""

import multiprocessing
import random

import pytest
import torch
from rayps_client.errors import ConfigError, LinkError

from rayps.tensors.device import CpuDevice, Device


@pytest.fixture(params=["cpu", "delayed", "cuda"])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")
    return CpuDevice(delayed=True) if request.param == "delayed" else Device.of(request.param)


def test_a_copy_there_and_back(device):
    stream, n = device.stream(), 1000
    host, back = device.pinned(n, torch.float32), device.pinned(n, torch.float32)
    host.copy_(torch.arange(float(n)))
    there = torch.zeros(n, device=device.place)
    stream.after(device.current().record())
    stream.copy(there, host)
    stream.run(lambda: there.mul_(2))
    event = stream.copy(back, there)
    event.wait()
    assert event.done
    assert back.tolist() == [2 * i for i in range(n)]


def test_a_stream_waits_for_anothers_event(device):
    a, b = device.stream(), device.stream()
    x, out = torch.zeros(1 << 16, device=device.place), torch.zeros(1 << 16, device=device.place)
    a.after(device.current().record())
    for _ in range(20):
        event = a.run(lambda: x.add_(1))
    b.after(event)
    b.copy(out, x)
    b.wait()
    assert (out == 20).all()


def test_polling_ends(device):
    stream = device.stream()
    event = [stream.run(lambda: torch.ones(10, device=device.place)) for _ in range(5)][-1]
    while not event.done:
        pass


def test_the_current_stream_waits_for_a_copy(device):
    side, x = device.stream(), torch.zeros(1 << 20, device=device.place)
    host = device.pinned(1 << 20, torch.float32).fill_(3.0)
    side.after(device.current().record())
    device.current().after(side.copy(x, host))
    assert (x * 2 == 6).all()


def pipeline(device, data, buffers, waits):
    """Copy chunks through `buffers` pinned buffers, of which each is used again after the event of its last copy."""
    out, stream = torch.zeros_like(data), device.stream()
    hosts = [device.pinned(1, torch.float64) for _ in range(buffers)]
    events = [stream.record() for _ in range(buffers)]
    for i in range(len(data)):
        at = i % buffers
        if waits:
            events[at].wait()
        hosts[at].copy_(data[i : i + 1])
        events[at] = stream.copy(out[i : i + 1], hosts[at])
    for event in events:
        event.wait()
    return out


@pytest.mark.parametrize("seed", range(20))
def test_a_missing_wait_is_wrong_data_on_the_delayed_twin(seed):
    """With all waits both twins give the law. If a buffer is filled too early, the delayed one does not."""
    rng = random.Random(seed)
    buffers = rng.randint(1, 4)
    data = torch.arange(1.0, 2 + buffers + rng.randint(0, 10), dtype=torch.float64)
    for device in (CpuDevice(), CpuDevice(delayed=True)):
        assert torch.equal(pipeline(device, data, buffers, waits=True), data)
    assert torch.equal(pipeline(CpuDevice(), data, buffers, waits=False), data)
    assert not torch.equal(pipeline(CpuDevice(delayed=True), data, buffers, waits=False), data)


@pytest.mark.parametrize("seed", range(20))
def test_each_wait_between_streams_is_needed(seed):
    """A chain of additions over random streams: without any one of its waits the delayed twin gives another number."""
    rng = random.Random(seed)
    places = [rng.randrange(3) for _ in range(8)]
    crossings = [i for i in range(1, 8) if places[i] != places[i - 1]]

    def run(omitted):
        device = CpuDevice(delayed=True)
        streams = [device.stream() for _ in range(3)]
        x, event = torch.zeros(1, dtype=torch.float64), None
        for i, place in enumerate(places):
            if event is not None and i != omitted:
                streams[place].after(event)
            event = streams[place].run(lambda i=i: x.mul_(3).add_(i + 1))
        event.wait()
        return x.item()

    law = 0.0
    for i in range(8):
        law = 3 * law + i + 1
    assert run(None) == law
    for i in crossings:
        assert run(i) != law


def test_the_host_reads_old_data_without_a_wait():
    device = CpuDevice(delayed=True)
    x, stream = torch.zeros(1), device.stream()
    event = stream.copy(x, torch.ones(1))
    assert x.item() == 0
    event.wait()
    assert x.item() == 1


def other(name, offers, pipe):
    device = Device.of(name)
    vectors = [device.open(offer, 8, torch.float32) for offer in offers]
    vectors[0].add_(1)
    device.current().wait()
    pipe.send([each.tolist() for each in vectors])
    pipe.recv()
    del vectors
    pipe.send("freed")


def share(device, pipe_of):
    mine = [device.zeros_to_share(8, torch.float32) for _ in range(2)]
    mine[1].fill_(5)
    device.current().wait()
    process, pipe = pipe_of(device.kind, [device.offer(each) for each in mine])
    assert pipe.recv() == [[1.0] * 8, [5.0] * 8]
    assert mine[0].tolist() == [1.0] * 8
    pipe.send("free")
    assert pipe.recv() == "freed"
    process.join(60)


@pytest.fixture
def pipe_of():
    started = []

    def start(name, offers):
        context = multiprocessing.get_context("spawn")
        pipe, theirs = context.Pipe()
        process = context.Process(target=other, args=(name, offers, theirs), daemon=True)
        process.start()
        theirs.close()
        started.append(process)
        return process, pipe

    yield start
    for process in started:
        process.kill()


def test_two_processes_share_memory(device, pipe_of):
    share(device, pipe_of)


def test_memory_that_was_freed_or_is_not_shared(device):
    if device.kind == "cuda":
        pytest.skip("torch's allocator keeps the memory of a GPU")
    x = device.zeros_to_share(4, torch.float32)
    offer = device.offer(x)
    del x
    with pytest.raises(LinkError, match="cannot open a peer's memory"):
        device.open(offer, 4, torch.float32)
    with pytest.raises(LinkError, match="zeros_to_share"):
        device.offer(torch.zeros(3))


def test_facts(device):
    facts = device.memory()
    assert 0 < facts.free <= facts.total
    assert Device.of(device.place).identity == device.identity


def test_no_such_device():
    with pytest.raises(ConfigError, match="there is no device meta"):
        Device.of("meta")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="there is no CUDA device on this machine"):
            Device.of("cuda")

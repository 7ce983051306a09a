"""The laws of a ring between devices: each transport gives what the naive computation gives, on cpu and on cuda.

On cpu the devices are the delayed twin, so that a missing wait is wrong data, and the group library is gloo. No test
needs Ray.
"""

import itertools
import math
import time

import covers
import pytest
import torch
from device_ranks import Ranks, later
from rayps_client.errors import ConfigError
from small_work import Small
from torch import nn

from benchmarks.gpu.device_step import make_worker_steps
from rayps.comm.link import Listener
from rayps.comm.ring import Ring
from rayps.comm.ring.bucket_scatter import make_bucket_scatter
from rayps.comm.ring.bucketed_mean import DeviceMean, bucket_mean
from rayps.comm.ring.device.choose_gpu_transport import NAMES, GpuFacts, choose_gpu_transport
from rayps.comm.ring.device.device_group import GroupTransport
from rayps.comm.ring.owned_slices import OwnedSlices
from rayps.core.partition import cut_slices
from rayps.tensors.device import Device
from rayps.tensors.flat import Gradient, Layout

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
SIZES = [0, 1, 3, 1001, 60_001]  # the last one has several parts under every transport
GROUPS = [(n, transport) for n in (2, 4) for transport in NAMES]


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")
    return request.param


def must_have(device, n, transport):
    if device == "cuda" and transport == "nccl" and torch.cuda.device_count() < n:
        pytest.skip(f"NCCL between {n} ranks needs {n} GPUs")


@pytest.fixture(scope="module", params=GROUPS, ids=lambda group: f"{group[0]}-{group[1]}")
def ranks(request, device):
    n, transport = request.param
    if device == "cpu" and (n, transport) == (4, "nccl"):
        pytest.skip("gloo is only the twin of NCCL: two ranks are enough")
    must_have(device, n, transport)
    made = Ranks(n, device, transport, delayed=device == "cpu", timeout=10.0)
    yield made
    made.close()


def values(number, n, dtype, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + number)
    if dtype.is_floating_point:
        return torch.randn(n, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 20, (n,), generator=generator).to(dtype)


def parts_of(rank, n, dtype, seed=0):
    return [values(r, n, dtype, seed) for r in range(rank.size)]


def close_to(got, want, parts):
    """Within N x eps x the sum of magnitudes; equal for whole numbers."""
    if not got.dtype.is_floating_point:
        return torch.equal(got, want.to(got.dtype))
    bound = len(parts) * torch.finfo(got.dtype).eps * sum(p.double().abs() for p in parts)
    return bool(((got.double() - want.double()).abs() <= bound).all())


def naive_sum(parts):
    wide = [p.double() if p.dtype.is_floating_point else p.long() for p in parts]
    return sum(wide[1:], wide[0])


def sums(rank, dtype):
    found = []
    for n in SIZES:
        parts = parts_of(rank, n, dtype)
        x = parts[rank.number].clone().to(rank.place)
        got = rank.ring.sum(x)
        assert got is x
        assert close_to(got.cpu(), naive_sum(parts), parts), n
        found.append(got.cpu().to(torch.float64).tolist())
    return found


@covers.by(lambda ranks, device, dtype: (ranks[1], device, dtype), lambda ranks, device, dtype: (ranks, device))
@pytest.mark.parametrize("dtype", FLOATS + INTS, ids=str)
def test_sum_is_the_naive_sum_and_equal_on_all_ranks(ranks, dtype):
    found = ranks(sums, dtype)
    assert all(each == found[0] for each in found)


def shapes(rank):
    whole = [values(r, 40, torch.float32).view(5, 8) for r in range(rank.size)]
    law = naive_sum(whole).float()
    x = whole[rank.number].clone().to(rank.place).t()
    rank.ring.sum(x)
    assert torch.allclose(x.cpu(), law.t())
    some = [torch.full((3,), 1.0, device=rank.place), torch.full((2, 2), rank.number, device=rank.place)]
    rank.ring.sum(some)
    assert some[0].tolist() == [rank.size] * 3
    assert some[1].flatten().tolist() == [sum(range(rank.size))] * 4
    handle = rank.ring.sum_async(torch.ones(7, device=rank.place))
    assert handle.wait().tolist() == [rank.size] * 7


def test_shapes_lists_and_background_sums(ranks):
    ranks(shapes)


def on_the_cpu(rank):
    x = torch.full((9,), float(rank.number))
    assert rank.ring.sum(x).tolist() == [sum(range(rank.size))] * 9
    assert rank.ring.max(torch.tensor([rank.number])).tolist() == [rank.size - 1]
    rank.ring.barrier()


def test_tensors_of_the_cpu_keep_the_rings_own_way(ranks):
    ranks(on_the_cpu)


def maxima(rank, dtype):
    for n in SIZES:
        parts = parts_of(rank, n, dtype)
        got = rank.ring.max(parts[rank.number].clone().to(rank.place)).cpu()
        assert torch.equal(got, torch.stack(parts).amax(0) if n else got)
    if dtype.is_floating_point:
        x = torch.full((rank.size,), float(rank.number), dtype=dtype, device=rank.place)
        x[rank.number] = math.nan
        assert rank.ring.max(x).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.uint8], ids=str)
def test_max(ranks, dtype):
    ranks(maxima, dtype)


def weighted(parts, samples):
    total = sum(samples)
    some = [p.double() * (s / total) for p, s in zip(parts, samples, strict=True) if s]
    return sum(some[1:], some[0]) if some else torch.zeros_like(parts[0]).double()


def means(rank, dtype, kind):
    ring, n = rank.ring, 30_011
    eps = torch.finfo(dtype).eps
    packed = ring.buffer(n + 1, dtype) if kind == "resident" else torch.zeros(n + 1, dtype=dtype, device=rank.place)
    assert packed.device == rank.place
    for seed, samples in enumerate(([3, 1, 2, 5], [0, 4, 0, 1], [1, 0, 0, 0])):
        samples = samples[: rank.size]
        parts = parts_of(rank, n, dtype, seed)
        packed[:-1].copy_(parts[rank.number])
        if not samples[rank.number]:
            packed[:-1].fill_(math.nan)
        got = ring.mean(Gradient(packed, samples[rank.number]))
        assert got.data_ptr() == packed.data_ptr()
        assert (got.double().cpu() - weighted(parts, samples)).abs().max() < 20 * eps
    parts = parts_of(rank, n, dtype)
    packed[:-1].copy_(parts[rank.number])
    found = ring.mean(packed[:-1], in_place=False)
    assert (found.double().cpu() - naive_sum(parts) / rank.size).abs().max() < 20 * eps
    packed[:-1].copy_(parts[rank.number])
    assert close_to(ring.total(packed[:-1]).cpu(), naive_sum(parts), parts)
    packed[:-1].copy_(parts[rank.number])
    ring.sum(packed[100:700])
    assert close_to(packed[100:700].cpu(), naive_sum(parts)[100:700], [p[100:700] for p in parts])
    assert torch.equal(packed[700:-1].cpu(), parts[rank.number][700:])
    assert ring.mean(Gradient(packed, 0)).abs().max().item() == 0


@pytest.mark.parametrize("kind", ["resident", "plain"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_means_over_samples(ranks, dtype, kind):
    ranks(means, dtype, kind)


def bucketed(rank):
    ring, n = rank.ring, 30_011
    vector = ring.buffer(n + 1, torch.float32)[:-1]
    mean = bucket_mean(ring, vector, [slice(20_000, n), slice(0, 20_000)], 4)
    assert isinstance(mean, DeviceMean)
    for seed, samples in enumerate(([3, 1, 2, 5], [0, 4, 0, 1])):
        parts, mine = parts_of(rank, n, torch.float32, seed), samples[rank.number]
        mean.begin(mine)
        vector.copy_(parts[rank.number])
        if not mine:
            vector.fill_(math.nan)
        mean.submit(0)
        mean.submit(1)
        marks = torch.zeros(4, dtype=torch.uint8)
        marks[rank.number] = 1
        got = mean.finish(marks)
        assert mean.fault is None
        assert marks.tolist() == [int(r < rank.size) for r in range(4)]
        assert (got.double().cpu() - weighted(parts, samples[: rank.size])).abs().max() < 1e-5
    for faulty, at in ((1, 7), (0, 29_999)):
        mean.begin(1)
        vector.fill_(1.0)
        if rank.number == faulty:
            vector[at] = math.inf
        mean.submit(0)
        mean.submit(1)
        mean.finish(torch.zeros(4, dtype=torch.uint8))
        assert mean.fault == (faulty, at)
    mean.begin(1)
    vector.fill_(torch.finfo(torch.float32).max)
    mean.finish(torch.zeros(4, dtype=torch.uint8))
    assert mean.fault in ((-1, 0), None)  # a weighted mean may not overflow where a sum does


def test_the_bucketed_mean_and_whose_vector_is_not_finite(ranks):
    ranks(bucketed)


def others(rank):
    ring = rank.ring
    for dtype, n in itertools.product((torch.float32, torch.bfloat16, torch.int64), SIZES):
        parts = parts_of(rank, n, dtype)
        for root in range(rank.size):
            x = parts[rank.number].clone().to(rank.place)
            assert torch.equal(ring.broadcast(x, root).cpu(), parts[root])
        got = ring.all_gather(parts[rank.number].clone().to(rank.place))
        assert got.device == rank.place
        assert torch.equal(got.cpu(), torch.stack(parts))
        mine = parts[rank.number].clone().to(rank.place)
        kept = mine.clone()
        got, own = ring.reduce_scatter(mine), cut_slices(n, rank.size)[rank.number]
        assert got.device == rank.place
        assert got.dtype == dtype
        assert close_to(got.cpu(), naive_sum(parts)[own], [p[own] for p in parts])
        assert torch.equal(mine, kept)


def test_broadcast_all_gather_and_reduce_scatter(ranks):
    ranks(others)


def pairs(rank):
    """Each even rank sends to the next one, and gets it back with 1 added."""
    ring, dtypes = rank.ring, (torch.float32, torch.bfloat16, torch.uint8)
    for dtype, n in itertools.product(dtypes, SIZES):
        x = values(rank.number // 2, n, dtype)
        if rank.number % 2 == 0:
            there = x.clone().to(rank.place)
            ring.send(there, rank.number + 1, tag=3)
            there.zero_()
            back = torch.zeros(n, dtype=dtype, device=rank.place)
            assert torch.equal(ring.recv(back, rank.number + 1, tag=4).cpu(), x + 1)
        else:
            got = torch.zeros(n, dtype=dtype, device=rank.place)
            ring.recv(got, rank.number - 1, tag=3)
            ring.send(got + 1, rank.number - 1, tag=4)
    for i in range(20):
        if rank.number % 2 == 0:
            ring.send(torch.full((5,), float(i), device=rank.place), rank.number + 1, tag=1)
        else:
            assert ring.recv(torch.zeros(5, device=rank.place), rank.number - 1, tag=1).tolist() == [i] * 5


def test_pairs_send_and_receive(ranks):
    ranks(pairs)


def by_tag(rank):
    if rank.number == 0:
        for tag in (1, 2):
            rank.ring.send(torch.full((4,), float(tag), device=rank.place), 1, tag=tag)
    elif rank.number == 1:
        return [rank.ring.recv(torch.zeros(4, device=rank.place), 0, tag=tag).tolist() for tag in (2, 1)]
    return None


@pytest.mark.parametrize("transport", ["ipc", "staging"])
def test_tags_may_be_received_in_another_order(device, transport):
    ranks = Ranks(2, device, transport)
    try:
        assert ranks(by_tag)[1] == [[2.0] * 4, [1.0] * 4]
    finally:
        ranks.close()


class Trained(Small):
    """A regression with a layer that no rank uses."""

    def model(self):
        model = super().model()
        model.append(nn.Linear(1, 1).double())
        return model

    def loss(self, model, batch):
        return ((model[:3](batch.x) - batch.y) ** 2).mean()


def trains(rank, kind):
    torch.manual_seed(0)
    loop, turn = make_worker_steps(Trained(n=40, batch=3, optimizer=kind), rank.ring, str(rank.place))
    turn(10)
    assert loop.w.params.device == rank.place
    return loop.w.params.cpu().tolist()


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adam"])
def test_a_worker_trains_as_plain_torch_on_the_union_of_the_batches(ranks, kind):
    found = ranks(trains, kind)
    assert all(each == found[0] for each in found)
    work = Trained(n=40, batch=3, optimizer=kind)
    torch.manual_seed(0)
    model = work.model()
    optimizer = work.optimizer(list(model.parameters()))
    size = len(found)
    steps = len(list(work.data().batches(rank=0, size=size, seed=0, epoch=0)))
    for step in range(10):
        if step % steps == 0:
            loaders = [iter(work.data().batches(rank=r, size=size, seed=0, epoch=step // steps)) for r in range(size)]
        some = [next(loader) for loader in loaders]
        optimizer.zero_grad()
        x, y = torch.cat([b.x for b in some]), torch.cat([b.y for b in some])
        ((model[:3](x) - y) ** 2).mean().backward()
        optimizer.step()
    law = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    assert (torch.tensor(found[0], dtype=torch.float64) - law).abs().max() < 1e-9


# Failures


def waits(rank, absent, how):
    """All ranks but `absent` wait in a collective; that one ends the ring from another thread, or does nothing."""
    x = torch.ones(1000, device=rank.place)
    rank.ring.sum(x)
    if rank.number == absent:
        if how == "abort":
            rank.ring.abort()
            return
        time.sleep(600)
    if how == "abort by a thread" and rank.number == 0:
        later(0.5, rank.ring.abort)
    rank.ring.sum(x)


def start(ranks, *args):
    for i in ranks.alive:
        ranks.pipes[i].send(("run", waits, args))


def is_one_again(rank):
    assert rank.ring.sum(torch.ones(5000, device=rank.place)).tolist() == [rank.size] * 5000
    return rank.ring.choices["device"]["transport"]


@pytest.mark.parametrize("transport", NAMES)
def test_an_abort_reaches_who_waits_and_the_next_generation_works(device, transport):
    must_have(device, 2, transport)
    ranks = Ranks(2, device, transport)
    try:
        for absent in (0, 1):
            found = ranks.errors(waits, absent, "abort")
            assert found[absent] is None
            name, text, peer = found[1 - absent]
            assert (name, peer) == ("PeerLost", f"rank {absent}"), text
            ranks.form()
            assert ranks(is_one_again) == [transport] * 2
    finally:
        ranks.close()


@pytest.mark.parametrize("transport", NAMES)
def test_another_thread_may_abort_what_this_one_waits_for(device, transport):
    must_have(device, 2, transport)
    ranks = Ranks(2, device, transport)
    try:
        start(ranks, 1, "abort by a thread")
        good, (name, text, peer) = ranks.answer(0)
        assert not good
        assert (name, peer) == ("PeerLost", "rank 0"), text
        ranks.kill(1)
        ranks.form()
        assert ranks(waits, None, "") == [None]
    finally:
        ranks.close()


@pytest.mark.parametrize(("n", "transport"), [(2, "nccl"), (3, "ipc"), (3, "staging")])
def test_a_killed_process_is_named_and_the_others_form_a_ring_again(device, n, transport):
    must_have(device, n, transport)
    ranks = Ranks(n, device, transport)
    try:
        start(ranks, n - 1, "nothing")
        time.sleep(1.0)
        ranks.kill(n - 1)
        for i in ranks.alive:
            good, (name, text, peer) = ranks.answer(i)
            assert not good
            assert (name, peer) == ("PeerLost", f"rank {n - 1}"), text
        ranks.form()
        if n > 2:
            assert ranks(is_one_again) == [transport] * 2
    finally:
        ranks.close()


@pytest.mark.parametrize("transport", NAMES)
def test_a_rank_that_stays_away_is_named_after_the_timeout(device, transport):
    must_have(device, 2, transport)
    ranks = Ranks(2, device, transport, timeout=4.0)
    try:
        start(ranks, 1, "nothing")
        good, (name, text, peer) = ranks.answer(0)
        assert not good
        assert (name, peer) == ("PeerTimeout", "rank 1"), text
        ranks.kill(1)
    finally:
        ranks.close()


def other_sizes(rank):
    rank.ring.sum(torch.ones(100 + rank.number, device=rank.place))


def test_ranks_that_make_different_calls_are_told(device):
    ranks = Ranks(2, device, "ipc")
    try:
        found = ranks.errors(other_sizes)
        assert any("all ranks must make the same calls" in each[1] for each in found)
    finally:
        ranks.close()


def test_nccl_refuses_tensors_out_of_order(device):
    must_have(device, 2, "nccl")
    ranks = Ranks(2, device, "nccl")
    try:
        assert "receive tensors in the order of sending" in ranks.errors(by_tag)[1][1]
    finally:
        ranks.close()


def owner_frees(rank):
    """Rank 0 drops its vector and its ring; rank 1 still reads it."""
    transport = rank.ring.collectives.device
    with rank.ring.collectives.collective():
        shared = transport.share(1000, torch.float32)
    shared[rank.number].fill_(rank.number + 1.0)
    rank.device.current().wait()
    rank.ring.barrier()
    if rank.number == 0:
        del shared
        again = [torch.zeros(1000, device=rank.place) for _ in range(8)]
        rank.device.current().wait()
        rank.ring.barrier()
        return len(again)
    rank.ring.barrier()
    return shared[0].tolist() == [1.0] * 1000


def test_memory_stays_until_its_readers_have_closed_it(device):
    ranks = Ranks(2, device, "ipc")
    try:
        assert ranks(owner_frees)[1] is True
    finally:
        ranks.close()


def test_a_group_of_one_rank_is_aborted_and_made_again(device):
    """What a single GPU can show of NCCL: the group's operations, its end, and a new group in the same process."""
    there = Device.of(device)
    for generation in range(2):
        with Listener("rank", b"g" * 32, generation) as listener:
            ring = Ring.form(
                0, [listener.address], listener, secret=b"g" * 32, generation=generation, timeout=60.0, streams=1
            )
        ring.collectives.mesh.begin()
        group = GroupTransport(ring.collectives.mesh, there, "127.0.0.1")
        assert group.probe() == ""
        x = torch.arange(5.0, device=there.place)
        group.fold(x, "add")
        group.fold(x, "max")
        group.broadcast(x, 0)
        assert x.tolist() == [0, 1, 2, 3, 4]
        out = torch.zeros(1, 5, device=there.place)
        group.all_gather(x, out)
        assert out[0].tolist() == group.reduce_scatter(x).tolist() == x.tolist()
        assert group.reduce_scatter(x.bfloat16()).dtype == torch.bfloat16
        ring.abort() if generation == 0 else ring.close()


# The choice


def test_what_the_ranks_choose_by_themselves(device):
    if device == "cpu":
        pytest.skip("on a CPU the ring chooses no transport for devices")
    ranks = Ranks(2, device, None)
    try:
        expected = "ipc" if torch.cuda.device_count() == 1 else "ipc or nccl"
        assert ranks(is_one_again)[0] in expected
    finally:
        ranks.close()


def told(rank):
    return rank.ring.choice


def test_the_choice_is_among_the_rings_choices(device):
    ranks = Ranks(2, device, "staging")
    try:
        assert all(each.endswith("tensors on devices by staging: as device_transport says") for each in ranks(told))
    finally:
        ranks.close()


FACTS = [
    GpuFacts(gpu, process, nccl, expandable, common)
    for gpu in ("a", "b")
    for process in ("p", "q")
    for nccl in ("", "2.20", "2.21")
    for expandable in (False, True)
    for common in (False, True)
]


def law_of_choice(facts):
    """The transports that are possible, in the order of preference."""
    different = len({each.device for each in facts}) == len(facts)
    same = len({each.device for each in facts}) == 1
    one_nccl = len({each.nccl for each in facts}) == 1 and facts[0].nccl != ""
    alone = len({each.process for each in facts}) == len(facts)
    found = ["nccl"] if different and one_nccl else []
    if same and alone and all(each.common and not each.expandable for each in facts):
        found.append("ipc")
    return [*found, "staging"]


def test_every_pair_of_facts():
    for facts in itertools.product(FACTS, repeat=2):
        possible = law_of_choice(facts)
        choice, why = choose_gpu_transport(facts)
        assert choice == possible[0]
        assert why
        for asked in NAMES:
            if asked in possible:
                assert choose_gpu_transport(facts, asked)[0] == asked
            else:
                with pytest.raises(ConfigError, match=f"the transport {asked} is not possible"):
                    choose_gpu_transport(facts, asked)


def test_three_ranks_of_which_two_share_a_gpu():
    facts = [GpuFacts(gpu, process, "2.20") for gpu, process in (("a", "p"), ("b", "q"), ("a", "r"))]
    choice, why = choose_gpu_transport(facts)
    assert choice == "staging"
    assert why == "no nccl: ranks 0, 2 share a GPU; no ipc: the ranks use several GPUs"


def test_reasons():
    def why(*facts):
        return choose_gpu_transport(facts)[1]

    a, b = GpuFacts("a", "p", expandable=True), GpuFacts("a", "q")
    assert "rank 0 cannot share expandable segments: remove expandable_segments:True from" in why(a, b)
    assert "ranks 0, 1 are threads of one process" in why(b, b)
    assert "torch has no NCCL on ranks 0, 1" in why(b, b)
    one, two = GpuFacts("a", "p", "2.20"), GpuFacts("b", "q", "2.21")
    assert "several versions of NCCL (2.20, 2.21)" in why(one, two)
    with pytest.raises(ConfigError, match="there is no transport 'rdma' for devices: use nccl, ipc, staging"):
        choose_gpu_transport([one, two], "rdma")
    assert GpuFacts.unpacked(a.packed()) == a


def scattered(rank, dtype):
    """Slices of a mean gradient, and the parameters that their owners send to all ranks."""
    layout = Layout.of((f"p{i}", torch.empty(size, dtype=dtype)) for i, size in enumerate([(700,), (30, 9), (), (1,)]))
    cuts = [slice(271, 972), slice(0, 271)]
    owned = OwnedSlices(rank.ring, cuts)
    scatter = make_bucket_scatter(rank.ring, owned, dtype, several=True)
    parts = [values(r, layout.size, dtype).to(rank.place) for r in range(rank.size)]
    weights = [float(r + 1) for r in range(rank.size)]
    law = sum(w * p.double() for w, p in zip(weights, parts, strict=True)) / sum(weights)
    scatter.begin_step()
    scatter.begin(weights[rank.number])
    for bucket, span in enumerate(cuts):
        scatter.memory(bucket).copy_(parts[rank.number][span])
        scatter.send(bucket)
    mine = scatter.finish()
    expected = torch.cat([law[lo:hi] for lo, hi in owned.ranges()])
    torch.testing.assert_close(mine.double(), expected, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-3)
    vector = torch.zeros(layout.size, dtype=dtype, device=rank.place)
    for lo, hi in owned.ranges():
        vector[lo:hi] = rank.number + 1
    owned.gather(vector)
    for other in range(rank.size):
        for lo, hi in owned.ranges(other):
            assert (vector[lo:hi] == other + 1).all()
    return True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_slices_of_gradients_and_parameters(ranks, dtype):
    assert all(ranks(scattered, dtype))

import contextlib
import gc
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from rayps_client.errors import ConfigError, LinkError, PeerLost, PeerTimeout

from rayps.cluster.local import rendezvous
from rayps.comm.link import Listener, parse_address
from rayps.comm.ring import Ring
from rayps.comm.ring.mesh import Mesh
from rayps.comm.ring.rendezvous import find_ranks

SECRET = b"r" * 32
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


def form(n, timeout=60.0, generation=0, listeners=None, **options):
    """The rings of n ranks, formed at once by threads."""
    options.setdefault("streams", 1)  # to measure how many fill the line takes time, and is a test of its own
    with contextlib.ExitStack() as stack:
        if listeners is None:
            listeners = [stack.enter_context(Listener(f"worker-{i}", SECRET, generation)) for i in range(n)]
        addresses = [listener.address for listener in listeners]
        with ThreadPoolExecutor(n) as pool:
            calls = [
                pool.submit(
                    Ring.form, i, addresses, listener, secret=SECRET, generation=generation, timeout=timeout, **options
                )
                for i, listener in enumerate(listeners)
            ]
            return [call.result() for call in calls]


def every(rings, work):
    """`work(ring)` on all ranks at once: results in the order of ranks."""
    with ThreadPoolExecutor(len(rings)) as pool:
        return [call.result() for call in [pool.submit(work, ring) for ring in rings]]


def errors(rings, work):
    with ThreadPoolExecutor(len(rings)) as pool:
        return [call.exception(60) for call in [pool.submit(work, ring) for ring in rings]]


GROUPS = [(1, "shm"), (2, "shm"), (2, "tcp"), (3, "tcp"), (4, "shm")]
ALGORITHMS = ["ring", "tree", "one_shot", "two_shot", "star", "hierarchical"]


@pytest.fixture(scope="module", params=GROUPS, ids=lambda group: f"{group[0]}-{group[1]}")
def rings(request):
    n, transport = request.param
    made = form(n, prefer=transport)
    yield made
    for ring in made:
        ring.close()


def values(rank, n, dtype, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_floating_point:
        return torch.randn(n, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 20, (n,), generator=generator).to(dtype)


def law(parts):
    """The naive sum: gather, and add in the order of ranks (half precision in float32)."""
    wide = [p.float() if p.dtype in (torch.float16, torch.bfloat16) else p for p in parts]
    total = wide[0].clone()
    for part in wide[1:]:
        total += part
    return total.to(parts[0].dtype)


def close_enough(got, parts):
    """Within N x eps x the sum of magnitudes; equal for whole numbers."""
    want = law(parts)
    if not got.dtype.is_floating_point:
        return torch.equal(got, want)
    magnitude = sum(p.double().abs() for p in parts)
    bound = len(parts) * torch.finfo(got.dtype).eps * magnitude
    return bool(((got.double() - want.double()).abs() <= bound).all())


def sizes(n):
    return sorted({0, 1, n - 1, n, n + 1, 1001})


@pytest.mark.parametrize("dtype", FLOATS + INTS, ids=str)
def test_sum_is_the_naive_sum_on_all_ranks(rings, dtype):
    for size in sizes(len(rings)):
        parts = [values(r, size, dtype) for r in range(len(rings))]
        got = every(rings, lambda ring, parts=parts: ring.sum(parts[ring.rank].clone()))
        assert all(torch.equal(other, got[0]) for other in got)
        assert close_enough(got[0], parts)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_whole_numbers_add_exactly_in_every_float(rings, dtype):
    parts = [values(r, 257, torch.int64).to(dtype) for r in range(len(rings))]
    for got in every(rings, lambda ring: ring.sum(parts[ring.rank].clone())):
        assert torch.equal(got, law(parts))


def test_large_sums_do_not_deadlock(rings):
    size = 3_000_001
    parts = [torch.full((size,), r + 1.0) for r in range(len(rings))]
    for got, part in zip(every(rings, lambda ring: ring.sum(parts[ring.rank])), parts, strict=True):
        assert got is part
        assert torch.equal(got, torch.full((size,), sum(range(1, len(rings) + 1)) + 0.0))


@pytest.mark.parametrize(
    ("n", "transport"),
    [(1, "shm"), (2, "tcp"), (3, "shm"), (4, "tcp"), (5, "tcp"), (6, "shm"), (7, "tcp"), (8, "shm")],
    ids=str,
)
def test_every_algorithm_equals_the_star(n, transport):
    rings = form(n, prefer=transport, algorithm="star", streams=2)
    cases = [(dtype, size) for dtype in FLOATS + INTS for size in sizes(n)] + [(torch.float32, 1_000_003)]
    parts = {case: [values(rank, case[1], case[0]) for rank in range(n)] for case in cases}

    def work(ring, algorithm, kind):
        return [getattr(ring, kind)(parts[case][ring.rank].clone(), algorithm=algorithm) for case in cases]

    for algorithm in ALGORITHMS:
        for kind in ("sum", "max"):
            got = every(rings, lambda ring, a=algorithm, k=kind: work(ring, a, k))
            for i, case in enumerate(cases):
                assert all(torch.equal(other[i], got[0][i]) for other in got)
                if kind == "max":
                    assert torch.equal(got[0][i], torch.stack(parts[case]).max(0).values)
                elif algorithm in ("star", "one_shot", "two_shot"):
                    assert torch.equal(got[0][i], law(parts[case]))
                else:
                    assert close_enough(got[0][i], parts[case])
        for dtype in FLOATS:  # whole numbers have one sum, in whatever order
            whole = [values(rank, 257, torch.int64).to(dtype) for rank in range(n)]
            for got in every(rings, lambda ring, a=algorithm, w=whole: ring.sum(w[ring.rank].clone(), algorithm=a)):
                assert torch.equal(got, law(whole))
    for ring in rings:
        ring.close()


def test_lists_of_tensors_of_several_dtypes(rings):
    n = len(rings)

    def work(ring):
        items = [torch.ones(2, 3), torch.ones((), dtype=torch.int64), torch.ones(4), torch.ones(0)]
        items.append(torch.ones(3).double())
        assert ring.sum(items) is items
        return items

    for items in every(rings, work):
        assert [t.shape for t in items] == [(2, 3), (), (4,), (0,), (3,)]
        assert all(bool((t == n).all()) for t in items)


def test_background_sums_come_in_order_and_mix_with_others(rings):
    n = len(rings)

    def work(ring):
        many = [torch.full((50_000,), float(i)) for i in range(5)]
        handles = [ring.sum_async(t) for t in many]
        now = ring.sum(torch.ones(1)).item()
        assert all(h.done for h in handles)
        assert [h.wait() is t for h, t in zip(handles, many, strict=True)] == [True] * 5
        return now, [t[0].item() for t in many]

    assert every(rings, work) == [(n, [0.0, n, 2.0 * n, 3.0 * n, 4.0 * n])] * n


@pytest.mark.parametrize("dtype", FLOATS + INTS[:1], ids=str)
def test_a_buffer_is_summed_where_it_lies(rings, dtype):
    n, size = len(rings), 100_003
    parts = [values(r, size, dtype, seed=7) for r in range(n)]

    def work(ring):
        x = ring.buffer(size, dtype)
        assert x.dtype == dtype and not x.any()
        x.copy_(parts[ring.rank])
        total = ring.total(x).clone()
        x.copy_(parts[ring.rank])
        part = ring.sum(x[10:20]).clone()
        x.copy_(parts[ring.rank])
        return total, part, ring.sum(x) is x, x.clone()

    for total, part, same, whole in every(rings, work):
        assert same
        assert close_enough(total, parts) and close_enough(whole, parts)
        assert close_enough(part, [p[10:20] for p in parts])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_weighted_mean_of_a_buffer(rings, dtype):
    n, size = len(rings), 40_001
    counts = [3 * r + 1 for r in range(n)]
    counts[-1] = 0 if n > 1 else 5
    parts = [values(r, size, dtype) for r in range(n)]
    if n > 1:
        parts[-1] = torch.full((size,), float("nan"), dtype=dtype)  # what a mean over no samples gives

    def work(ring, in_place):
        packed = ring.buffer(size + 1, dtype)
        packed[:-1].copy_(parts[ring.rank])
        got = ring.mean(Packed(packed, counts[ring.rank]), in_place=in_place)
        return got.double().clone()

    want = sum(c * p.double() for c, p in zip(counts, parts, strict=True) if c) / sum(counts)
    eps = 4 * torch.finfo(dtype).eps
    for in_place in (True, False):
        for got in every(rings, lambda ring, i=in_place: work(ring, i)):
            assert torch.allclose(got, want, rtol=8 * eps, atol=eps)


def test_choices_say_what_and_why_and_can_be_given_back(rings):
    ring = rings[-1]
    assert ring.choices["ranks"] == len(rings)
    if len(rings) == 1:
        return
    assert all(r.choices["table"] == ring.choices["table"] for r in rings)
    assert "measured" in ring.choices["why"]
    again = form(len(rings), table=ring.choices)
    assert again[0].choices["table"] == ring.choices["table"] and again[0].choices["why"] == "given"
    assert every(again, lambda r: r.sum(torch.ones(9)).sum().item()) == [9.0 * len(rings)] * len(rings)
    for each in again:
        each.close()
    with pytest.raises(ConfigError, match="no algorithm 'magic': use one of auto, ring"):
        rings[0].sum(torch.ones(3), algorithm="magic")


def test_several_streams_share_what_is_large():
    rings = form(3, prefer="tcp", streams=3, algorithm="two_shot")
    assert [ring.choices["streams"] for ring in rings] == [3] * 3
    before = [[link.bytes_sent for link in ring.collectives.mesh._links.values()] for ring in rings]
    assert [len(some) for some in before] == [6] * 3
    for algorithm in ("two_shot", "ring"):
        for got in every(rings, lambda ring, a=algorithm: ring.sum(torch.ones(3_000_000), algorithm=a)):
            assert torch.equal(got, torch.full((3_000_000,), 3.0))
    for ring, some in zip(rings, before, strict=True):
        assert all(link.bytes_sent > b for link, b in zip(ring.collectives.mesh._links.values(), some, strict=True))
    rings[1].close()
    for error in errors([rings[0], rings[2]], lambda ring: ring.sum(torch.ones(3_000_000))):
        assert isinstance(error, PeerLost) and error.data["peer"] == "rank 1"
    for ring in rings:
        ring.close()


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_relay_ends_with_its_last_bytes_whatever_may_be_queued(transport, monkeypatch):
    monkeypatch.setattr("rayps.comm.ring.mesh._AHEAD_BYTES", 1)
    rings = form(2, prefer=transport, algorithm="ring", timeout=60.0)
    pieces = [torch.full((size,), 7, dtype=torch.uint8) for size in (20_000_000, 20_000_000, 10)]
    taken = [torch.zeros_like(piece) for piece in pieces]

    def work(ring):
        ring.collectives.mesh.begin()
        give = [memoryview(piece.numpy()) for piece in pieces] if ring.rank == 0 else []
        take = [(memoryview(piece.numpy()), lambda: None) for piece in taken] if ring.rank == 1 else []
        ring.collectives.mesh.relay(1 - ring.rank, 1 - ring.rank, give, take)

    assert errors(rings, work) == [None, None]
    assert all(torch.equal(*pair) for pair in zip(pieces, taken, strict=True))
    for ring in rings:
        ring.close()


def test_how_many_streams_fill_the_line_is_measured_and_the_others_are_closed():
    rings = form(2, prefer="tcp", streams=0)
    for ring in rings:
        count = ring.choices["streams"]
        assert count in ring.choices["streams_seconds"] and min(ring.choices["streams_seconds"]) == 1
        assert ring.choices == rings[0].choices
        assert len(ring.collectives.mesh._links) == count == ring.collectives.mesh.streams
    again = form(2, prefer="tcp", streams=0, table=rings[0].choices)
    assert again[0].choices["streams"] == rings[0].choices["streams"]
    assert "streams_seconds" not in again[0].choices
    for ring in (*rings, *again):
        ring.close()
    with pytest.raises(ConfigError, match="streams is 99: give a number from 1 to 16"):
        form(2, streams=99)


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 1, 0, 1, 1], [0, 1, 1]], ids=str)
def test_hierarchical_adds_inside_hosts_then_between_them(hosts):
    """Two hosts are made by closing the unix socket to the ranks of the other one."""
    n = len(hosts)
    found = [Listener(f"worker-{i}", SECRET) for i in range(n)]
    tables = [
        [d.address if hosts[i] == host else d.address.rsplit("/", 1)[0] + "/" for i, d in enumerate(found)]
        for host in hosts
    ]
    with ThreadPoolExecutor(n) as pool:
        calls = [
            pool.submit(Ring.form, i, tables[i], found[i], secret=SECRET, generation=0, timeout=60, streams=1)
            for i in range(n)
        ]
        rings = [call.result() for call in calls]
    assert rings[0].choices["hosts"] == [[i for i in range(n) if hosts[i] == h] for h in (0, 1)]
    assert "hierarchical" in rings[0].choices["table"][0]["seconds"]
    for dtype in (torch.float64, torch.bfloat16, torch.int32):
        for size in (0, 1, n, 300_001):
            parts = [values(r, size, dtype) for r in range(n)]
            got = every(rings, lambda r, p=parts: r.sum(p[r.rank].clone(), algorithm="hierarchical"))
            assert all(torch.equal(other, got[0]) for other in got)
            assert close_enough(got[0], parts)
    rings[1].close()
    for error in errors([r for r in rings if r.rank != 1], lambda r: r.sum(torch.ones(9), algorithm="hierarchical")):
        assert isinstance(error, PeerLost)
    for thing in (*rings, *found):
        thing.close()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["own", "gloo"])
def test_means_of_half_precision_are_those_of_float32_rounded_once(backend, dtype):
    """Neither the sum of the ranks' values nor their samples fit into the dtype; the mean does."""
    rings = form(3, backend=backend)
    parts = [torch.tensor([60_000.0, 1.0, rank / 7, 257.0], dtype=dtype) for rank in range(3)]
    wide = [part.double() for part in parts]
    for got in every(rings, lambda ring: ring.mean(parts[ring.rank].clone())):
        assert torch.equal(got, (sum(wide) / 3).to(dtype))
    weights = [70_000, 90_001, 1]
    law = sum(n * part for n, part in zip(weights, wide, strict=True)) / sum(weights)
    for got in every(rings, lambda ring: ring.mean(Plain(parts[ring.rank].clone(), weights[ring.rank]))):
        assert got.dtype == dtype and torch.allclose(got.double(), law, rtol=torch.finfo(dtype).eps, atol=0)
    small = [torch.tensor([256.0 if rank == 0 else 0.75], dtype=torch.bfloat16) for rank in range(3)]
    for got in every(rings, lambda ring: ring.sum(small[ring.rank].clone())):
        assert got.item() == 258.0, "256.75 is no bfloat16, 257.5 is rounded once"
    for ring in rings:
        ring.close()


def test_gloo_gives_the_same_and_leaves_nothing():
    before = threading.active_count()
    rings = form(3, backend="gloo")
    parts = [values(r, 1001, torch.float32) for r in range(3)]
    for got in every(rings, lambda ring: ring.sum(parts[ring.rank].clone())):
        assert close_enough(got, parts)
    assert rings[0].choices["algorithm"] == "gloo"
    assert every(rings, lambda ring: ring.mean(Plain(torch.ones(3), ring.rank)).tolist()) == [[1.0] * 3] * 3
    for ring in rings:
        ring.close()
    del rings, ring
    assert threading.active_count() == before
    with pytest.raises(ConfigError, match="no backend 'mpi'"):
        form(1, backend="mpi")


def test_a_sum_keeps_its_place_and_shape(rings):
    grid = torch.arange(12.0).view(3, 4)

    def work(ring):
        whole = grid.clone()
        columns = whole.t()[1:3]
        assert not columns.is_contiguous()
        assert ring.sum(columns) is columns
        return whole

    want = grid.clone()
    want[:, 1:3] *= len(rings)
    for got in every(rings, work):
        assert torch.equal(got, want)


def test_a_parameter_can_be_summed(rings):
    for got in every(rings, lambda ring: ring.sum(torch.nn.Parameter(torch.ones(3)))):
        assert got.detach().tolist() == [len(rings)] * 3


def test_max_and_mean(rings):
    n = len(rings)
    parts = [values(r, 33, torch.float64) for r in range(n)]
    for got in every(rings, lambda ring: ring.max(parts[ring.rank].clone())):
        assert torch.equal(got, torch.stack(parts).max(0).values)
    for got in every(rings, lambda ring: ring.mean(parts[ring.rank].clone())):
        assert torch.allclose(got, torch.stack(parts).mean(0), rtol=1e-12)
    for got in every(rings, lambda ring: ring.max(torch.tensor([float("nan"), 1.0]) * (ring.rank == 0))):
        assert got.isnan().tolist() == [True, False]


@dataclass
class Packed:
    packed: torch.Tensor
    samples: int

    @property
    def vector(self):
        return self.packed[:-1]


@dataclass
class Plain:
    vector: torch.Tensor
    samples: int


@pytest.mark.parametrize("kind", [Packed, Plain])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_mean_of_gradients_is_over_the_union_of_samples(rings, kind, dtype):
    n = len(rings)
    counts = [3 * r + 1 for r in range(n)]
    counts[-1] = 0 if n > 1 else 7
    parts = [values(r, 50, dtype) for r in range(n)]

    def work(ring):
        vector = parts[ring.rank].clone()
        held = torch.cat([vector, vector.new_zeros(1)]) if kind is Packed else vector
        return ring.mean(kind(held, counts[ring.rank]))

    want = sum(c * p.double() for c, p in zip(counts, parts, strict=True)) / sum(counts)
    for got in every(rings, work):
        assert got.dtype == dtype
        eps = torch.finfo(dtype).eps
        assert torch.allclose(got.double(), want, rtol=8 * eps, atol=eps)


def test_a_mean_over_no_samples_is_finite(rings):
    for got in every(rings, lambda ring: ring.mean(Plain(torch.ones(4), 0))):
        assert got.isfinite().all()


def test_broadcast_from_every_root(rings):
    for root in range(len(rings)):
        for size in (0, 1, 5000):
            got = every(
                rings,
                lambda ring, root=root, size=size: ring.broadcast(
                    torch.full((size,), ring.rank, dtype=torch.int64), root
                ),
            )
            assert all(torch.equal(t, torch.full((size,), root)) for t in got)


def test_all_gather_and_reduce_scatter(rings):
    n = len(rings)
    for size in sizes(n):
        parts = [values(r, size, torch.float32) for r in range(n)]
        for got in every(rings, lambda ring, parts=parts: ring.all_gather(parts[ring.rank])):
            assert torch.equal(got, torch.stack(parts))
        got = every(rings, lambda ring, parts=parts: ring.reduce_scatter(parts[ring.rank]))
        assert torch.equal(torch.cat(got), law(parts))
    shaped = every(rings, lambda ring: ring.all_gather(torch.ones(2, 3, dtype=torch.bool)))
    assert shaped[0].shape == (n, 2, 3) and shaped[0].all()


def test_pairs_talk_in_the_order_of_sending_and_by_tag(rings):
    n = len(rings)
    if n == 1:
        with pytest.raises(ConfigError, match="rank 0 cannot send to itself"):
            rings[0].send(torch.zeros(1), 0)
        return

    def work(ring):
        right, left = (ring.rank + 1) % n, (ring.rank - 1) % n
        big = 500_000
        for k in range(3):
            ring.send(torch.full((big,), ring.rank * 10.0 + k), right, tag=k % 2)
        ring.barrier()
        odd = ring.recv(torch.empty(big), left, tag=1)[0].item()
        even = [ring.recv(torch.empty(big), left)[0].item() for _ in range(2)]
        return odd - 10 * left, [e - 10 * left for e in even]

    assert every(rings, work) == [(1.0, [0.0, 2.0])] * n


def test_repeats_bit_for_bit(rings):
    parts = [values(r, 999, torch.float32) for r in range(len(rings))]
    first = every(rings, lambda ring: ring.sum(parts[ring.rank].clone()))
    again = every(rings, lambda ring: ring.sum(parts[ring.rank].clone()))
    assert torch.equal(first[0], again[0])


def test_bad_arguments_are_refused_and_the_ring_lives_on(rings):
    ring = rings[0]
    with pytest.raises(ConfigError, match=r"cannot add torch.bool: convert the tensor to one of float32"):
        ring.sum(torch.ones(2, dtype=torch.bool))
    with pytest.raises(ConfigError, match=r"mean of torch.int64"):
        ring.mean(torch.ones(2, dtype=torch.int64))
    with pytest.raises(ConfigError, match=r"no rank 99 in a ring of"):
        ring.broadcast(torch.ones(2), root=99)
    assert every(rings, lambda r: r.sum(torch.ones(1)).item()) == [len(rings)] * len(rings)


def test_facts_are_kept(rings):
    before = [ring.bytes_sent for ring in rings]
    every(rings, lambda ring: ring.sum(torch.ones(100_000), algorithm="two_shot"))
    for ring, sent in zip(rings, before, strict=True):
        n = ring.size
        assert ring.bytes_sent - sent == pytest.approx(2 * (n - 1) / n * 400_000, abs=5000)
        assert ring.seconds_moving >= 0 and ring.seconds_waiting >= 0


# Failures


@pytest.mark.parametrize("algorithm", ["ring", "tree", "star", "one_shot", "two_shot"])
def test_a_rank_that_stays_away_is_named_by_everyone(algorithm):
    """And has no sum when it comes at last: with one barrier only, all the others look as if they were there."""
    rings = form(4, timeout=1.0)
    found = errors(rings[:3], lambda ring: ring.sum(torch.ones(10), algorithm=algorithm))
    for error in found:
        assert isinstance(error, PeerTimeout)
        assert error.data["peer"] == "rank 3" and "rank 3 did not take part within 1 s" in error.message
    late = errors(rings[3:], lambda ring: ring.sum(torch.ones(10), algorithm=algorithm))[0]
    assert isinstance(late, LinkError)
    for ring in rings:
        ring.close()


@pytest.mark.parametrize("victim", [0, 1, 3])
@pytest.mark.parametrize("algorithm", ["ring", "tree", "star"])
def test_a_rank_that_dies_in_a_collective_is_named_by_everyone(victim, algorithm, monkeypatch):
    rings = form(4, timeout=300.0, algorithm=algorithm)  # a rank that waits for it fails the test
    steps = [0] * 4
    finish = Mesh.finish

    def fail(mesh, *args, **kwargs):
        steps[mesh.rank] += 1
        if mesh.rank == victim and steps[victim] == 2:
            for link in mesh._links.values():
                link.close()  # as a killed process does
            raise SystemExit
        finish(mesh, *args, **kwargs)

    monkeypatch.setattr(Mesh, "finish", fail)

    def work(ring):
        assert torch.equal(ring.sum(torch.ones(1000)), torch.full((1000,), 4.0))  # whole, or none
        ring.barrier()

    found = errors(rings, work)
    for rank, error in enumerate(found):
        if rank != victim:
            assert isinstance(error, PeerLost) and error.data["peer"] == f"rank {victim}"
    monkeypatch.undo()
    for ring in rings:
        if ring.rank != victim:
            with pytest.raises(PeerLost, match=f"rank {victim}"):
                ring.barrier()
        ring.close()


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("victim", [2, 4, 6])
def test_no_rank_returns_a_sum_that_lacks_the_leaves_below_a_dead_node(victim, step, monkeypatch):
    rings = form(8, timeout=60.0, algorithm="tree")
    steps = [0] * 8
    finish = Mesh.finish

    def fail(mesh, *args, **kwargs):
        steps[mesh.rank] += 1
        if mesh.rank == victim and steps[victim] == step:
            for link in mesh._links.values():
                link.close()
            raise SystemExit
        finish(mesh, *args, **kwargs)

    monkeypatch.setattr(Mesh, "finish", fail)
    sums = [torch.full((1000,), 2.0**rank) for rank in range(8)]
    found = errors(rings, lambda ring: ring.sum(sums[ring.rank]))
    if step == 1:
        assert found[0] is not None  # the root cannot have what the victim kept
    for rank, error in enumerate(found):
        if error is None:
            assert torch.equal(sums[rank], torch.full((1000,), 255.0))
        elif rank != victim:
            assert isinstance(error, PeerLost) and error.data["peer"] == f"rank {victim}"
            with pytest.raises(PeerLost):  # what is half added cannot be added to
                rings[rank].sum(sums[rank])
    monkeypatch.undo()
    for ring in rings:
        ring.close()


def test_what_was_cut_off_in_shared_memory_is_never_used_again():
    listeners = [Listener(f"worker-{i}", SECRET) for i in range(3)]
    rings = form(3, listeners=listeners)
    buffers = every(rings, lambda ring: ring.buffer(500_000).fill_(1.0))
    assert every(rings, lambda ring: ring.total(buffers[ring.rank])[0].item()) == [3.0] * 3

    def work(ring):
        if ring.rank == 1:
            time.sleep(0.1)
            ring.abort()
        return ring.total(buffers[ring.rank])

    for error in errors(rings, work):
        assert isinstance(error, PeerLost) and error.data["peer"] == "rank 1"
    for error in errors(rings, lambda ring: ring.total(buffers[ring.rank])):
        assert isinstance(error, PeerLost)
    again = form(3, generation=1, listeners=listeners)
    fresh = every(again, lambda ring: ring.buffer(500_000).fill_(2.0))
    buffers[1].fill_(1e9)  # a rank of the dead generation that wakes up late
    for total in every(again, lambda ring: ring.total(fresh[ring.rank])):
        assert torch.equal(total, torch.full((500_000,), 6.0))
    for thing in (*rings, *again, *listeners):
        thing.close()


def test_an_abort_reaches_everyone_and_the_next_generation_starts_clean():
    listeners = [Listener(f"worker-{i}", SECRET) for i in range(4)]
    rings = form(4, listeners=listeners)

    def work(ring):
        if ring.rank == 2:
            time.sleep(0.05)
            ring.abort()
        ring.sum(torch.ones(100))

    for error in errors(rings, work):
        assert isinstance(error, PeerLost) and error.data["peer"] == "rank 2"
    again = form(4, generation=1, listeners=listeners)
    assert every(again, lambda ring: ring.sum(torch.ones(1)).item()) == [4] * 4
    for thing in (*rings, *again, *listeners):
        thing.close()


@pytest.mark.parametrize("size", [10, 100_000], ids=["one barrier", "many"])
def test_an_abort_by_another_thread_closes_nothing_under_the_one_that_is_inside(size):
    rng = random.Random(7)
    for generation in range(40):
        rings = form(3, generation=generation)

        def work(ring):
            while True:
                ring.sum(torch.ones(size))

        pause, victim = rng.uniform(0, 0.02), rng.choice(rings)
        timer = threading.Timer(pause, victim.abort)
        timer.start()
        for error in errors(rings, work):
            assert isinstance(error, PeerLost) and error.data["peer"] == f"rank {victim.rank}", error
        timer.join()
        for ring in rings:
            ring.close()


def test_ranks_that_make_different_calls_are_told():
    rings = form(3)
    found = errors(rings, lambda ring: ring.sum(torch.ones(30 + 30 * (ring.rank == 1))))
    assert all("all ranks must make the same calls with the same sizes" in str(error) for error in found)
    for ring in rings:
        ring.close()


def test_a_closed_ring_says_so():
    rings = form(2)
    rings[0].close()
    with pytest.raises(LinkError, match="closed on this rank"):
        rings[0].barrier()
    with pytest.raises(PeerLost, match="rank 0"):
        rings[1].barrier()
    rings[1].close()


def test_where_writes_may_be_seen_out_of_order_bells_do_it_all(monkeypatch):
    monkeypatch.setattr("rayps.comm.ring.barrier.ORDERED", False)
    rings = form(4, prefer="shm")
    for n in (1, 1000, 400_000):
        x = [values(rank, n, torch.int64) for rank in range(4)]
        expected = sum(x)
        for algorithm in ("one_shot", "two_shot"):
            got = every(rings, lambda ring, a=algorithm: ring.sum(x[ring.rank].clone(), algorithm=a))  # noqa: B023
            assert all(torch.equal(each, expected) for each in got)
    rings[2].close()
    for error in errors([rings[0], rings[1], rings[3]], lambda ring: ring.sum(torch.ones(100_000))):
        assert isinstance(error, PeerLost) and error.data["peer"] == "rank 2"
    for ring in rings:
        ring.close()
    rings = form(3, prefer="shm", timeout=0.5)
    for part in (rings[:2], rings[2:]):
        found = errors(part, lambda ring: ring.sum(torch.ones(10), algorithm="one_shot"))
        assert all(isinstance(error, LinkError) for error in found)
    for ring in rings:
        ring.close()


@pytest.mark.parametrize("prefer", ["shm", "tcp"])
def test_a_rank_may_leave_when_it_has_given_all(prefer):
    for i in range(10):
        rings = form(4, prefer=prefer, algorithm="two_shot")

        def work(ring, late=i % 4):
            ring.sum(torch.ones(1000))
            if ring.rank == late:
                time.sleep(0.01)
            ring.barrier()
            ring.sum(torch.ones(40_000))
            ring.close()

        assert errors(rings, work) == [None] * 4


@pytest.mark.parametrize("prefer", ["shm", "tcp"])
def test_a_rank_that_left_too_early_is_named(prefer):
    rings = form(3, prefer=prefer, algorithm="two_shot")
    rings[1].close()
    for error in errors([rings[0], rings[2]], lambda ring: ring.sum(torch.ones(100_000))):
        assert isinstance(error, PeerLost) and error.data["peer"] == "rank 1"
    for ring in rings:
        ring.close()


def test_missing_ranks_are_named_when_forming():
    listeners = [Listener(f"worker-{i}", SECRET) for i in range(3)]
    addresses = [listener.address for listener in listeners]
    with pytest.raises(PeerTimeout, match=r"ring 'ring': ranks 1, 2 did not join within 0.1 s"):
        Ring.form(0, addresses, listeners[0], secret=SECRET, generation=0, timeout=0.1)
    with pytest.raises(PeerTimeout, match="'worker-0'"):
        Ring.form(2, addresses, listeners[2], secret=SECRET, generation=0, timeout=0.1)
    with pytest.raises(ConfigError, match="rank 3 is not one of 3 ranks"):
        Ring.form(3, addresses, listeners[2], secret=SECRET, generation=0, timeout=0.1)
    for listener in listeners:
        listener.close()


# Processes


def _process(rank, addresses, name, out, prefer):  # `out` is its own: a frozen process may hold a queue's lock
    with Listener(name, SECRET) as listener:
        out.put((rank, listener.address))
        table = addresses.get(timeout=60)
        ring = Ring.form(rank, table, listener, secret=SECRET, generation=0, timeout=3.0, prefer=prefer)
        try:
            total = 0.0
            for step in range(10_000_000):
                total = ring.sum(torch.full((10_000,), 1.0))[0].item()
                if step == 20:
                    out.put((rank, total))
        except LinkError as error:
            out.put((rank, (type(error).__name__, error.data["peer"])))


@pytest.mark.parametrize("prefer", ["shm", "tcp"])
@pytest.mark.parametrize(("sign", "kind"), [(signal.SIGKILL, "PeerLost"), (signal.SIGSTOP, "PeerTimeout")])
def test_a_killed_or_frozen_process_is_named_by_everyone(sign, kind, prefer):
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch", "rayps.comm.ring", __name__])  # imported once, not by each child
    n = 3
    outs, tables = ([context.Queue() for _ in range(n)] for _ in range(2))
    children = [
        context.Process(target=_process, args=(r, tables[r], f"worker-{r}", outs[r], prefer), daemon=True)
        for r in range(n)
    ]
    for child in children:
        child.start()
    try:
        found = dict(out.get(timeout=60) for out in outs)
        for table in tables:
            table.put([found[r] for r in range(n)])
        assert dict(out.get(timeout=60) for out in outs) == dict.fromkeys(range(n), 3.0)
        os.kill(children[1].pid, sign)
        assert dict(out.get(timeout=60) for out in (outs[0], outs[2])) == dict.fromkeys((0, 2), (kind, "rank 1"))
    finally:
        for child in children:
            child.kill()
            child.join()


# Joining by name


def join(name, n, timeout=60.0, ranks=None, **options):
    with ThreadPoolExecutor(n) as pool:
        calls = [pool.submit(Ring.join, name, r, n, timeout=timeout, **options) for r in ranks or range(n)]
        return [call.exception() or call.result() for call in calls]


def test_join_meets_by_name_and_leaves_no_key():
    for n in (1, 2, 4):
        rings = join("meet", n)
        assert every(rings, lambda ring: ring.sum(torch.ones(1)).item()) == [n] * n
        for ring in rings:
            ring.close()
    assert rendezvous().get("rayps/comm/ring/meet") is None


def test_join_survives_the_key_of_a_dead_group():
    with Listener("rank 0", SECRET) as dead:
        rendezvous().put("rayps/comm/ring/stale", f"{dead.address}\n0\n{SECRET.hex()}".encode())
    with ThreadPoolExecutor(2) as pool:
        late = pool.submit(Ring.join, "stale", 1, 2, timeout=60)
        time.sleep(0.2)
        first = pool.submit(Ring.join, "stale", 0, 2, timeout=60)
        rings = [first.result(), late.result()]
    assert every(rings, lambda ring: ring.sum(torch.ones(1)).item()) == [2, 2]
    for ring in rings:
        ring.close()


def test_join_names_who_is_missing():
    for error in join("partial", 4, timeout=0.5, ranks=[0, 1]):
        assert isinstance(error, PeerTimeout)
        assert "ring 'partial': ranks 2, 3 did not join within 0.5 s" in str(error)
    (error,) = join("headless", 2, timeout=0.2, ranks=[1])
    assert "ring 'headless': rank 0 did not join within 0.2 s" in str(error)
    with pytest.raises(ConfigError, match="rank 2 is not one of 2 ranks"):
        Ring.join("x", 2, 2)


def test_a_rank_may_join_later_than_the_later_waits_last():
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(Ring.join, "later", 0, 2, timeout=5.0, join_timeout=60.0)
        with pytest.raises(PeerTimeout, match=r"did not join within 0\.1 s"):
            Ring.join("later-alone", 0, 2, timeout=60.0, join_timeout=0.1)
        second = pool.submit(Ring.join, "later", 1, 2, timeout=5.0, join_timeout=60.0)
        rings = [first.result(), second.result()]
    assert every(rings, lambda ring: ring.sum(torch.ones(1)).item()) == [2, 2]
    for ring in rings:
        ring.close()


def test_a_ring_that_meets_by_name_listens_at_the_clusters_address(monkeypatch):
    monkeypatch.setattr("rayps.comm.ring.rendezvous.host_address", lambda: "127.0.0.2")
    with ThreadPoolExecutor(2) as pool:
        met = [call.result() for call in [pool.submit(find_ranks, "where", r, 2, 20.0, None) for r in range(2)]]
    for listener, _, _, addresses in met:
        assert [parse_address(address).host for address in addresses] == ["127.0.0.2"] * 2
        listener.close()


def test_two_hundred_groups_leave_no_descriptor_no_thread_and_no_memory():
    def cycle(i):
        rings = join(f"cycle-{i % 3}", 2 + i % 2, algorithm="two_shot")
        every(rings, lambda ring: ring.sum(torch.ones(10)))
        if i % 4 == 0:
            every(rings, lambda ring: ring.total(ring.buffer(100_000)))
        for ring in random.Random(i).sample(rings, len(rings)):
            ring.abort() if i % 5 == 0 else ring.close()

    def held():
        gc.collect()
        maps = Path("/proc/self/maps").read_text()
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count(), maps.count("memfd:rayps")

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    for i in range(20):
        cycle(i)
    before, bytes_before = held(), resident()
    for i in range(200):
        cycle(i)
    after = held()
    assert all(now <= then for now, then in zip(after, before, strict=True)), (before, after)
    assert resident() - bytes_before < 8 << 20  # 200 boards would be 1,600 MB

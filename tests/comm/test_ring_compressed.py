"""The compressed ring: its slow twin is one process that encodes, adds and encodes again."""

import time

import covers
import pytest
import torch
from small_work import Small, distance, plain, train
from test_ring import every, form

import rayps
from rayps import AllReduce
from rayps.comm.compress import ErrorFeedback, find_codec
from rayps.comm.ring.compressed_mean import CompressedRing, choose_compressed_ring
from rayps.core.partition import cut_slices
from rayps.tensors.flat import Gradient

NAMES = ["fp16", "bf16", "int8", "top_k:0.1"]


class Twin:
    """What N ranks hold after each mean, computed in one place."""

    def __init__(self, name, ranks, n, dtype):
        self.cuts = cut_slices(n, ranks)
        self.sent = [ErrorFeedback(find_codec(name), n, dtype) for _ in range(ranks)]
        self.folded = [ErrorFeedback(find_codec(name), cut.stop - cut.start, dtype) for cut in self.cuts]

    def mean(self, vectors, samples):
        total, out = sum(samples), torch.zeros_like(vectors[0])
        if not total:
            return out
        for cut, folder in zip(self.cuts, self.folded, strict=True):
            mean = torch.zeros_like(folder.residual)
            for memory, vector, count in zip(self.sent, vectors, samples, strict=True):
                if count:
                    data = memory.encode(vector[cut], cut.start)
                    mean += memory.codec.decode(data, mean.numel(), mean.dtype) * (count / total)
            out[cut] = folder.codec.decode(folder.encode(mean), mean.numel(), out.dtype)
        return out


def gradient(vector, samples):
    packed = torch.empty(vector.numel() + 1, dtype=vector.dtype)
    packed[:-1] = vector
    return Gradient(packed, samples)


@pytest.fixture(scope="module", params=[(1, "shm"), (2, "shm"), (3, "tcp"), (4, "shm")], ids=str)
def rings(request):
    made = form(request.param[0], prefer=request.param[1])
    yield made
    for ring in made:
        ring.close()


@covers.pairs
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [1, 3, 5, 1000, 9001])
@pytest.mark.parametrize("name", NAMES)
def test_all_ranks_hold_the_bits_of_the_twin(rings, name, n, dtype):
    size = len(rings)
    twin, wrapped = Twin(name, size, n, dtype), {ring.rank: CompressedRing(ring, find_codec(name)) for ring in rings}
    for turn in range(4):
        vectors = [torch.randn(n, dtype=torch.float64).to(dtype) for _ in rings]
        samples = [(3 * rank + turn) % 4 * 8 for rank in range(size)] if turn < 3 else [0] * size
        held = every(
            rings, lambda ring, v=vectors, s=samples: wrapped[ring.rank].mean(gradient(v[ring.rank], s[ring.rank]))
        )
        expected = twin.mean(vectors, samples) if size > 1 else vectors[0]
        for found in held:
            assert torch.equal(found, expected)
    if size > 1:
        for rank, ring in wrapped.items():
            assert torch.equal(ring._sent.residual, twin.sent[rank].residual)


def test_what_all_ranks_heard_adds_up_to_what_they_meant(rings):
    """With equal batches the means telescope: nothing is lost but what is remembered now."""
    n, size = 2000, len(rings)
    wrapped = {ring.rank: CompressedRing(ring, find_codec("top_k:0.02")) for ring in rings}
    meant, heard = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    for _ in range(20):
        vectors = [torch.randn(n, dtype=torch.float64) for _ in rings]
        meant += sum(vectors) / size
        held = every(rings, lambda ring, v=vectors: wrapped[ring.rank].mean(gradient(v[ring.rank], 8)))
        heard += held[0]
    if size > 1:
        rest = sum(ring._sent.residual for ring in wrapped.values()) / size
        rest += torch.cat([wrapped[rank]._folded.residual for rank in range(size)])
        assert torch.allclose(heard, meant - rest, rtol=0, atol=1e-4)


def test_what_is_not_finite_reaches_everyone_and_is_gone_the_next_time(rings):
    wrapped = {ring.rank: CompressedRing(ring, find_codec("int8")) for ring in rings}
    for bad in (float("nan"), float("inf"), 0.5):
        vectors = [torch.ones(100) for _ in rings]
        vectors[0][7] = bad
        held = every(rings, lambda ring, v=vectors: wrapped[ring.rank].mean(gradient(v[ring.rank], 1)).clone())
        assert all(found.isfinite().all() == (bad == 0.5) for found in held)


def test_means_of_plain_tensors_are_exact(rings):
    wrapped = {ring.rank: CompressedRing(ring, find_codec("int8")) for ring in rings}
    held = every(rings, lambda ring: wrapped[ring.rank].mean(torch.full((10,), 0.1 + ring.rank, dtype=torch.float64)))
    assert torch.allclose(held[0], torch.full((10,), 0.1 + (len(rings) - 1) / 2, dtype=torch.float64), atol=1e-12)
    assert wrapped[0].size == len(rings)


@pytest.mark.parametrize(("name", "less"), [("fp16", 2), ("bf16", 2), ("int8", 3.9), ("top_k:0.01", 40)])
def test_fewer_bytes_travel(name, less):
    n, counts = 100_000, []
    rings = form(4, prefer="tcp", algorithm="ring")
    wrapped = {ring.rank: CompressedRing(ring, find_codec(name)) for ring in rings}
    for mean in (lambda ring, x: ring.mean(x), lambda ring, x: wrapped[ring.rank].mean(x)):
        before = [ring.bytes_sent for ring in rings]
        every(rings, lambda ring, mean=mean: mean(ring, gradient(torch.randn(n), 1)))
        counts.append([ring.bytes_sent - was for ring, was in zip(rings, before, strict=True)])
    for ring in rings:
        ring.close()
    assert min(counts[0]) >= 1.5 * 4 * n  # 2(N-1)/N
    assert max(counts[1]) * less <= min(counts[0]) + 4000


def test_auto_says_what_it_measured_and_all_ranks_agree():
    rings = form(3)
    chosen = every(rings, lambda ring: choose_compressed_ring(ring, "auto", Gradient(ring.buffer(50_001), 0)))
    for ring in rings:
        ring.close()
    facts = [found[1] for found in chosen]
    assert facts[0] == facts[1] == facts[2]
    assert facts[0]["compression"] in ("off", "fp16", "int8")
    assert set(facts[0]["seconds"]) == {"off", "fp16", "int8"}
    assert "50000 elements" in facts[0]["message"]
    assert all(isinstance(found, CompressedRing) == (facts[0]["compression"] != "off") for found, _ in chosen)


class SlowLine:
    """A ring whose plain mean takes its time."""

    def __init__(self, ring):
        self._slow = ring

    def mean(self, x, *, in_place=True):
        time.sleep(0.3)
        return self._slow.mean(x, in_place=in_place)

    def __getattr__(self, name):
        return getattr(self._slow, name)


def test_auto_compresses_where_the_line_is_slow():
    rings = form(2)
    chosen = every(rings, lambda ring: choose_compressed_ring(SlowLine(ring), "auto", Gradient(ring.buffer(1001), 0)))
    for ring in rings:
        ring.close()
    for found, facts in chosen:
        assert isinstance(found, CompressedRing)
        assert facts["compression"] in ("fp16", "int8")
        assert facts["seconds"]["off"] >= 0.3


@pytest.mark.parametrize("name", ["fp16", "bf16", "int8", "top_k:0.2"])
def test_training_stays_near_the_law(name):
    work = Small(n=96, batch=4)
    result = train(work, AllReduce(compression=name), workers=3, epochs=6)
    model, _, evaluations = plain(work, 3, epochs=6)
    assert result.metrics["loss"] == pytest.approx(evaluations[-1], rel=0.05)
    assert 0 < distance(result.model(), model) < 0.2


def test_one_worker_sends_nothing_and_is_plain_torch():
    work = Small(n=20)
    result = train(work, AllReduce(compression="int8"), workers=1, epochs=2)
    assert distance(result.model(), plain(work, epochs=2)[0]) < 1e-12


def test_the_choice_is_among_the_events():
    result = train(Small(), AllReduce(compression="auto"), workers=2)
    chosen = [event for event in result.events if "compression" in event]
    assert len(chosen) == 1
    assert chosen[0]["compression"] in ("off", "fp16", "int8")
    assert "ms uncompressed" in chosen[0]["message"]
    assert not [event for event in train(Small(), AllReduce(), workers=2).events if "compression" in event]


def test_a_training_moves_fewer_bytes():
    moved = {
        name: sum(train(Wide(), AllReduce(compression=name), workers=2).history.column("bytes").to_pylist())
        for name in (None, "int8", "top_k")
    }
    assert moved["int8"] * 6 < moved[None]  # float64
    assert moved["top_k"] * 20 < moved[None]


class Wide(Small):
    """With enough parameters for headers not to count."""

    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(5, 3000), torch.nn.Tanh(), torch.nn.Linear(3000, 1)).double()


def test_data_that_does_not_divide_evenly():
    """The last round of an epoch has ranks with few samples, and with none."""
    work = Small(n=37, batch=3, optimizer="momentum")
    result = train(work, AllReduce(compression="fp16"), workers=4, epochs=3)
    assert distance(result.model(), plain(work, 4, epochs=3)[0]) < 1e-3


def test_compression_changes_with_the_phase():
    result = train(Small(), "1*all_reduce:compression=int8 > all_reduce", workers=2, epochs=2)
    assert [e["compression"] for e in result.events if "compression" in e] == ["int8"]
    assert isinstance(result, rayps.Result)

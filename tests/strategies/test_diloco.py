"""DiLoCo against N models in plain torch, and torch's own SGD as the outer optimizer."""

import pytest
import torch
from local_work import Halves, Loop, Normed
from rayps_client.errors import ConfigError
from small_work import Small, distance, train, vector
from torch import nn

from rayps.strategies.all_reduce import AllReduce
from rayps.strategies.catalogue import parse, wire
from rayps.strategies.diloco import DiLoCo
from rayps.strategies.local_sgd import LocalSGD

EXACT = 1e-12


def law(work, workers, strategy, epochs=1):
    """Algorithm 1; with an overlap the outer step comes late, and each keeps what it did meanwhile."""
    loop = Loop(work, workers, epochs)
    theta = nn.Parameter(vector(loop.models[0]))
    mu = strategy.outer_momentum
    outer = torch.optim.SGD([theta], lr=strategy.outer_lr, momentum=mu, nesterov=mu > 0)
    pending = None

    def leave():
        found = loop.vectors()
        d = loop.mean([theta.detach() - each for each in found])
        loop.meet(strategy.momentum, strategy.buffers, average=False)
        return d, found

    def arrive(d, left):
        theta.grad = d
        outer.step()
        for k, (now, then) in enumerate(zip(loop.vectors(), left, strict=True)):
            loop.put(k, theta.detach() + (now - then))

    while loop.done < loop.total:
        loop.turn()
        last = loop.done == loop.total
        if pending and (last or loop.done % strategy.period == strategy.overlap):
            arrive(*pending)
            pending = None
        if last or loop.done % strategy.period == 0:
            pending = leave()
            if last or not strategy.overlap:
                arrive(*pending)
                pending = None
    return loop


@pytest.mark.parametrize(
    ("workers", "strategy", "optimizer", "n"),
    [
        (1, DiLoCo(period=4), "adam", 30),
        (2, DiLoCo(period=4), "adam", 44),
        (3, DiLoCo(period=5, outer_lr=0.3, outer_momentum=0.5, momentum="average"), "momentum", 50),
        (3, DiLoCo(period=7, momentum="reset", outer_momentum=0.0), "adam", 50),
        (2, DiLoCo(period=4, overlap=1), "momentum", 44),
        (3, DiLoCo(period=5, overlap=4), "adam", 50),
        (2, DiLoCo(period=100, overlap=7), "sgd", 44),
        (2, DiLoCo(period=1), "sgd", 44),
    ],
    ids=str,
)
def test_it_is_the_loop(workers, strategy, optimizer, n):
    work = Small(n=n, optimizer=optimizer)
    loop = law(work, workers, strategy, epochs=2)
    result = train(work, strategy, workers=workers, epochs=2)
    assert distance(result.model(), loop.models[0]) < EXACT
    assert result.history.column("loss").to_pylist() == pytest.approx(loop.losses, abs=EXACT)


@pytest.mark.parametrize("buffers", ["average", "keep"])
def test_buffers(buffers):
    work, strategy = Normed(n=66, optimizer="momentum"), DiLoCo(period=4, overlap=2, buffers=buffers)
    loop, found = law(work, 2, strategy), train(work, strategy, workers=2, epochs=1).model()
    assert distance(found, loop.models[0]) < EXACT
    for name, value in loop.models[0].named_buffers():
        assert torch.allclose(dict(found.named_buffers())[name], value, rtol=0, atol=EXACT), name


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("period", [3, 8, 1000])
def test_an_outer_rate_of_one_without_momentum_is_local_sgd(optimizer, period):
    work = Small(n=50, optimizer=optimizer)
    local = train(work, LocalSGD(period=period), workers=3, epochs=2)
    for buckets in (1, 4):
        plain = train(work, DiLoCo(period, outer_lr=1.0, outer_momentum=0.0, buckets=buckets), workers=3, epochs=2)
        assert distance(plain.model(), local.model()) < EXACT


@pytest.mark.parametrize("overlap", [0, 3])
@pytest.mark.parametrize("buckets", [2, 3, 50, 1000])
def test_any_number_of_buckets_is_one(buckets, overlap):
    work = Small(n=50, optimizer="adam")
    one = train(work, DiLoCo(period=4, overlap=overlap), workers=3, epochs=2)
    several = train(work, DiLoCo(period=4, overlap=overlap, buckets=buckets), workers=3, epochs=2)
    assert distance(one.model(), several.model()) < EXACT


def test_workers_that_see_the_same_are_one():
    """Two that see the same are one that meets nobody; the outer step is there all the same."""
    two = train(Halves(n=30, optimizer="adam"), DiLoCo(period=4, overlap=1), workers=2, epochs=2)
    loop = law(Halves(n=30, optimizer="adam"), 2, DiLoCo(period=4, overlap=1), epochs=2)
    assert distance(two.model(), loop.models[0]) < EXACT and distance(*loop.models) < EXACT


@pytest.mark.parametrize(("compression", "most"), [("int8", 0.01), ("fp16", 0.01), ("top_k:1", 1e-5)])
@pytest.mark.parametrize("overlap", [0, 1])
def test_a_compressed_meeting(compression, most, overlap):
    """Near the plain one, as nothing is lost for good; each bucket has a memory of its own of what was left out."""
    work = Small(n=60)
    plain = train(work, DiLoCo(period=2, overlap=overlap), workers=2, epochs=2)
    for buckets in (1, 3):
        strategy = DiLoCo(period=2, overlap=overlap, compression=compression, buckets=buckets)
        assert 0 < distance(plain.model(), train(work, strategy, workers=2, epochs=2).model()) < most


def test_bytes_are_those_of_the_meetings():
    work = Small(n=60)
    size = 8 * (sum(p.numel() for p in work.model().parameters()) + 1)
    result = train(work, DiLoCo(period=6), workers=2, epochs=2)
    wanted = [2 * size if t % 6 == 0 or t == 20 else 0 for t in range(1, 21)]
    assert result.history.column("bytes").to_pylist() == wanted
    late = train(work, DiLoCo(period=6, overlap=2), workers=2, epochs=2)
    assert sum(late.history.column("bytes").to_pylist()) == sum(wanted)


def test_after_a_phase_in_step():
    work = Small(n=60, optimizer="adam")
    result = train(work, [(1, AllReduce()), DiLoCo(period=4)], workers=2, epochs=3)
    again = train(work, [(1, AllReduce()), DiLoCo(period=4)], workers=2, epochs=3)
    assert distance(result.model(), again.model()) == 0
    met = [i for i, said in enumerate(result.history.column("met").to_pylist(), 1) if said]
    assert met == [14, 18, 22, 26, 30]


def test_it_is_read_and_written():
    found = parse("diloco:period=500,outer_lr=0.5,overlap=3,compression=int8,buckets=4")[0].strategy
    assert found == DiLoCo(500, 0.5, overlap=3, compression="int8", buckets=4)
    assert parse(wire(parse("diloco:period=7")))[0].strategy == DiLoCo(7)


@pytest.mark.parametrize(
    "given",
    [
        "period=0",
        "period=none",
        "outer_lr=0",
        "outer_lr=nan",
        "outer_momentum=1",
        "outer_momentum=-0.1",
        "overlap=50",
        "overlap=true",
        "buckets=0",
        "compression=gz",
        "momentum=none",
        "buffers=average,outer_lr=x",
    ],
)
def test_bad_options(given):
    with pytest.raises(ConfigError) as caught:
        parse(f"diloco:{given}")
    assert given.rpartition(",")[2].partition("=")[0] in str(caught.value)

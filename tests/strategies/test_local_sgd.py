"""Local SGD against N models in plain torch."""

import pytest
import torch
from local_work import Halves, Loop, Normed
from rayps_client.errors import ConfigError
from small_work import Small, distance, plain, train, vector
from torch import nn

from rayps.comm.compress import BlockQuantized, ErrorFeedback
from rayps.core.partition import cut_slices
from rayps.core.strategy.costs import estimate_costs
from rayps.core.strategy.traffic import Sizes
from rayps.strategies.all_reduce import AllReduce
from rayps.strategies.catalogue import parse, wire
from rayps.strategies.diloco import DiLoCo
from rayps.strategies.local_sgd import LocalSGD
from rayps.strategies.parallel_sgd import ParallelSGD

EXACT = 1e-12


def law(work, workers, strategy, epochs=1):
    """The paper's loop."""
    loop = Loop(work, workers, epochs)
    while loop.done < loop.total:
        loop.turn()
        if (loop.done - strategy.warmup) % strategy.period == 0 or loop.done == loop.total:
            loop.meet(strategy.momentum, strategy.buffers)
    return loop


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_period_of_one_step_of_plain_sgd_is_all_reduce(workers):
    work = Small(n=50)  # neither rows nor batches come out even
    model, losses, _ = plain(work, workers, epochs=2)
    result = train(work, LocalSGD(period=1), workers=workers, epochs=2)
    assert distance(result.model(), model) < EXACT
    apart = result.history.column("loss").to_pylist()  # each worker's before its step, as all_reduce's
    assert apart == pytest.approx(losses, abs=EXACT)


@pytest.mark.parametrize("momentum", ["keep", "reset", "average"])
@pytest.mark.parametrize(
    ("optimizer", "workers", "period", "n"),
    [("momentum", 2, 4, 44), ("adam", 3, 5, 50), ("momentum", 4, 3, 41), ("adam", 2, 100, 44), ("sgd", 3, 4, 44)],
)
def test_it_is_the_loop(workers, period, n, optimizer, momentum):
    """44 rows in 3s: one worker runs out of rows a step before the others; 41 with 4: 11, 10, 10, 10."""
    work = Small(n=n, optimizer=optimizer)
    strategy = LocalSGD(period=period, momentum=momentum)
    loop = law(work, workers, strategy, epochs=2)
    result = train(work, strategy, workers=workers, epochs=2)
    assert distance(result.model(), loop.models[0]) < EXACT
    assert result.history.column("loss").to_pylist() == pytest.approx(loop.losses, abs=EXACT)


def test_what_happens_to_momentum_is_seen():
    """The three policies differ from one another, and not by rounding."""
    found = [
        train(Small(n=60, optimizer="momentum"), LocalSGD(period=3, momentum=policy), workers=2, epochs=1).model()
        for policy in ("keep", "reset", "average")
    ]
    assert min(distance(found[i], found[j]) for i, j in ((0, 1), (0, 2), (1, 2))) > 1e-5


@pytest.mark.parametrize("buffers", ["average", "keep"])
@pytest.mark.parametrize("momentum", ["keep", "average"])
def test_buffers_are_averaged_or_kept(buffers, momentum):
    work = Normed(n=66, optimizer="momentum")
    strategy = LocalSGD(period=4, buffers=buffers, momentum=momentum)
    loop = law(work, 2, strategy)
    found, wanted = train(work, strategy, workers=2, epochs=1).model(), loop.models[0]
    assert distance(found, wanted) < EXACT
    for name, value in wanted.named_buffers():
        assert torch.allclose(dict(found.named_buffers())[name], value, rtol=0, atol=EXACT), name
    statistics = [dict(model.named_buffers())["1.running_mean"] for model in loop.models]
    assert torch.equal(*statistics) == (buffers == "average")


@pytest.mark.parametrize("workers", [2, 3])
def test_a_period_as_long_as_the_phase_is_one_average_at_the_end(workers):
    work = Small(n=50)
    once = train(work, LocalSGD(period=10_000), workers=workers, epochs=2)
    other = train(work, ParallelSGD(rounds=1), workers=workers, epochs=2)
    loop = Loop(work, workers, 2)
    while loop.done < loop.total:
        loop.turn()
    assert distance(once.model(), loop.mean(loop.vectors())) < EXACT
    assert distance(once.model(), other.model()) == 0


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_workers_that_see_the_same_are_one_run(optimizer):
    work = Halves(n=30, optimizer=optimizer)
    found = train(work, LocalSGD(period=4), workers=2, epochs=2)
    torch.manual_seed(0)
    model = work.model()
    steps = work.optimizer(list(model.parameters()))
    x, y = Small.data(work).x, Small.data(work).y
    for _ in range(2):
        for at in range(0, 30, 3):
            steps.zero_grad()
            ((model(x[at : at + 3]) - y[at : at + 3]) ** 2).mean().backward()
            steps.step()
    assert distance(found.model(), model) < EXACT


@pytest.mark.parametrize("warmup", [1, 7, 20])
def test_post_local_sgd_begins_in_step(warmup):
    """So many steps of all_reduce, and then periods."""
    work = Small(n=60)  # 10 rounds an epoch
    result = train(work, LocalSGD(period=4, warmup=warmup), workers=2, epochs=3)
    loop = Loop(work, 2, 3)
    while loop.done < loop.total:
        loop.turn()
        if loop.done <= warmup or (loop.done - warmup) % 4 == 0 or loop.done == loop.total:
            loop.meet()
    assert distance(result.model(), loop.models[0]) < EXACT
    met = [i for i, said in enumerate(result.history.column("met").to_pylist(), 1) if said]
    assert met == sorted({*range(warmup + 4, 31, 4), 30})


def test_after_a_phase_in_step():
    work = Small(n=60)
    phases = [(1, AllReduce()), LocalSGD(period=8)]
    result = train(work, phases, workers=2, epochs=3)
    assert distance(result.model(), train(work, LocalSGD(period=8, warmup=10), workers=2, epochs=3).model()) < EXACT
    back = train(work, [(1, LocalSGD(period=3)), (1, AllReduce()), (1, LocalSGD(period=7))], workers=2)
    loop = Loop(work, 2, 3)
    while loop.done < loop.total:
        loop.turn()
        if loop.done in (3, 6, 9, 10, 27, 30) or 10 < loop.done <= 20:
            loop.meet()
    assert distance(back.model(), loop.models[0]) < EXACT


@pytest.mark.parametrize(("period", "momentum", "vectors"), [(4, "keep", 1), (4, "average", 2), (7, "keep", 1)])
def test_bytes_are_those_of_the_meetings(period, momentum, vectors):
    """51 or 50 parameters and a count of samples, all from each to each: that is how so few travel."""
    work = Small(n=60, optimizer="momentum")
    result = train(work, LocalSGD(period=period, momentum=momentum), workers=2, epochs=2)
    size = 8 * (sum(p.numel() for p in work.model().parameters()) + 1)
    moved = result.history.column("bytes").to_pylist()
    meeting = 2 * size * vectors + (2 * 8 if momentum == "average" else 0)  # how much state there is, an int64
    assert moved == [meeting if t % period == 0 or t == 20 else 0 for t in range(1, 21)]


@pytest.mark.parametrize(
    ("strategy", "vectors"),
    [(LocalSGD(8), 1), (LocalSGD(8, momentum="average"), 3), (LocalSGD(8, compression="fp16"), 0.5), (DiLoCo(8), 1)],
)
def test_what_it_costs_by_formula(strategy, vectors):
    """Of all_reduce's 2(N-1)V a step, 1/H; Adam has two numbers for each parameter."""
    sizes = Sizes(1_000_000, states=2.0)
    found = estimate_costs(strategy, 4, sizes)
    assert found.bytes == estimate_costs(AllReduce(), 4, sizes).bytes * vectors / 8 == 2 * 3 * 4_000_000 * vectors / 8
    assert "8 steps" in found.traffic[0].what and estimate_costs(strategy, 1, sizes).bytes == 0
    assert estimate_costs(ParallelSGD(3), 4, sizes).bytes is None


def test_the_formula_is_what_is_measured():
    work = Small(n=64, batch=4, optimizer="adam")
    work.model = lambda: nn.Sequential(nn.Linear(5, 6000), nn.Tanh(), nn.Linear(6000, 1)).double()  # not a small one
    result = train(work, LocalSGD(period=4), workers=2, epochs=2)
    event = next(event for event in result.events if event["kind"] == "costs")
    wanted = estimate_costs(LocalSGD(period=4), 2, Sizes(42001, 8)).bytes
    assert event["formula"]["bytes"] == wanted
    assert sum(result.history.column("bytes").to_pylist()) / 16 == pytest.approx(wanted, rel=1e-4)  # and the samples


def test_a_worker_without_a_row_counts_nothing():
    work = Small(n=4, optimizer="adam")  # three workers: 2, 1 and 1 rows; one row a batch
    work.batch = 1
    for momentum in ("keep", "average", "reset"):
        strategy = LocalSGD(period=2, momentum=momentum)
        loop = law(work, 3, strategy, epochs=3)
        assert distance(train(work, strategy, workers=3, epochs=3).model(), loop.models[0]) < EXACT
    alone = Small(n=1, optimizer="momentum")  # the second worker never sees one
    strategy = LocalSGD(period=2, momentum="average")
    model, _, _ = plain(alone, 1, epochs=5)
    assert distance(train(alone, strategy, workers=2, epochs=5).model(), model) < EXACT


def test_a_parameter_that_a_batch_does_not_use_is_not_stepped():
    """As in plain torch, where it has no gradient: momentum and decay rest too."""

    class Either(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Linear(5, 1).double(), nn.Linear(5, 1).double()

        def forward(self, x):
            return self.one(x) if x.sum() > 0 else self.other(x)

    work = Small(n=48, optimizer="momentum")
    work.model = Either
    strategy = LocalSGD(period=4)
    assert distance(train(work, strategy, workers=2, epochs=2).model(), law(work, 2, strategy, 2).models[0]) < EXACT


def test_compressed_meetings_carry_error_feedback():
    """x <- x + decode(encode(mean of decode(encode(w_k - x)))), rank k folding slice k."""
    work, period = Small(n=60), 3
    result = train(work, LocalSGD(period=period, compression="int8"), workers=2, epochs=2)
    loop, codec = Loop(work, 2, 2), BlockQuantized()
    x = vector(loop.models[0])
    cuts = cut_slices(len(x), 2)
    sent = [ErrorFeedback(codec, len(x), x.dtype) for _ in range(2)]
    folded = [ErrorFeedback(codec, cut.stop - cut.start, x.dtype) for cut in cuts]

    def decoded(memory, values, lo=0):
        return codec.decode(memory.encode(values, lo), len(values), values.dtype)

    while loop.done < loop.total:
        loop.turn()
        if loop.done % period == 0 or loop.done == loop.total:
            step = torch.empty_like(x)
            for j, cut in enumerate(cuts):
                heard = [decoded(sent[k], (loop.vectors()[k] - x)[cut], cut.start) for k in range(2)]
                step[cut] = decoded(folded[j], loop.mean(heard))
            x = x + step
            for k in range(2):
                loop.put(k, x)
            loop.n = [0, 0]
    assert distance(result.model(), x) < EXACT
    whole = train(work, LocalSGD(period=period), workers=2, epochs=2)
    assert 0 < distance(result.model(), whole.model()) < 0.01
    # of 7 meetings: two ways from each of two, a header, a count, 25 bytes and a scale
    assert sum(result.history.column("bytes").to_pylist()) == 7 * 2 * 2 * (64 + 8 + 25 + 4)


def test_it_is_read_and_written():
    found = parse("local_sgd:period=4,warmup=10,momentum=average,buffers=keep,compression=int8")[0].strategy
    assert found == LocalSGD(4, 10, "average", "keep", "int8")
    assert parse(wire(parse("1*all_reduce > local_sgd:period=4"))) == parse([(1, AllReduce()), LocalSGD(period=4)])


@pytest.mark.parametrize(
    "given",
    [
        "period=0",
        "period=1.5",
        "period=true",
        "warmup=-1",
        "momentum=mean",
        "buffers=reset",
        "compression=zip",
        "replica=pipeline(stages=2)",
        "perid=3",
    ],
)
def test_bad_options(given):
    with pytest.raises(ConfigError) as caught:
        parse(f"local_sgd:{given}")
    assert given.partition("=")[0] in str(caught.value)

"""Classic parallel SGD against N models in plain torch."""

import pytest
import torch
from local_work import Halves, Loop, Normed
from rayps_client.errors import ConfigError
from small_work import Small, distance, rows, train

import rayps
from rayps.core.strategy.strategy_families import Fixed
from rayps.strategies.catalogue import parse, wire
from rayps.strategies.parallel_sgd import ParallelSGD

EXACT = 1e-12


class Sorted(Small):
    """Rows in the order of their labels, of four clients: each has a run of them."""

    def data(self):
        x, y = rows(self.n)
        order = y.flatten().argsort()
        owners = [f"client-{4 * i // self.n}" for i in range(self.n)]
        return rayps.data.tensors(x[order], y[order], batch_size=self.batch, client=owners)


def ends(total, parts):
    return {-(-total * (i + 1) // parts) for i in range(parts)}


def loss_of(work, model):
    data = work.evaluation_data()
    model.eval()
    with torch.no_grad():
        found = ((model(data.x) - data.y) ** 2).mean().item()
    model.train()
    return found


def law(work, workers, strategy, epochs):
    loop, chosen = Loop(work, workers, epochs, strategy.rows == Fixed()), []
    while loop.done < loop.total:
        loop.turn()
        if loop.done in ends(loop.total, strategy.rounds):
            weights = None
            if strategy.merge == "best":
                losses = [loss_of(work, model) for model in loop.models]
                chosen.append(losses.index(min(losses)))
                weights = [float(k == chosen[-1]) for k in range(workers)]
            loop.meet(strategy.momentum, strategy.buffers, weights)
    return loop, chosen


@pytest.mark.parametrize(
    ("rounds", "merge", "workers", "optimizer", "momentum"),
    [
        (1, "mean", 3, "sgd", "keep"),
        (3, "mean", 2, "momentum", "keep"),
        (4, "mean", 3, "adam", "average"),
        (1000, "mean", 2, "momentum", "reset"),
        (1, "best", 3, "momentum", "keep"),
        (4, "best", 3, "adam", "average"),
        (3, "best", 2, "momentum", "reset"),
    ],
)
def test_it_is_the_loop(rounds, merge, workers, optimizer, momentum):
    work = Small(n=50, optimizer=optimizer)
    strategy = ParallelSGD(rounds=rounds, merge=merge, momentum=momentum)
    result = train(work, strategy, workers=workers, epochs=2)
    loop, chosen = law(work, workers, strategy, 2)
    assert distance(result.model(), loop.models[0]) < EXACT
    assert result.history.column("loss").to_pylist() == pytest.approx(loop.losses, abs=EXACT)
    met = [i for i, said in enumerate(result.history.column("met").to_pylist(), 1) if said]
    assert met == sorted(ends(loop.total, rounds))[-len(met) :] and len(met) == min(rounds, loop.total)
    if merge == "best":
        assert [b for b in result.history.column("best").to_pylist() if b is not None] == chosen


@pytest.mark.parametrize("merge", ["mean", "best"])
def test_buffers_come_along(merge):
    work = Normed(n=54)  # no batch of one row
    strategy = ParallelSGD(rounds=3, merge=merge)
    found, (loop, _) = train(work, strategy, workers=3, epochs=2).model(), law(work, 3, strategy, 2)
    assert distance(found, loop.models[0]) < EXACT
    for name, value in loop.models[0].named_buffers():
        if value.is_floating_point():
            assert torch.allclose(dict(found.named_buffers())[name], value, rtol=0, atol=EXACT), name


def test_workers_that_see_the_same_are_one_run():
    work = Halves(n=30, optimizer="momentum")
    several = train(work, ParallelSGD(rounds=2), workers=2, epochs=2)
    alone = Small(n=30, optimizer="momentum")
    alone.data = lambda: rayps.data.tensors(*rows(30), batch_size=3, shuffle=False)
    assert distance(several.model(), train(alone, ParallelSGD(), workers=1, epochs=2).model()) < EXACT


def test_the_average_of_workers_apart_varies_less():
    """About 1/M of one worker's variance, on a convex problem."""

    class Line(Small):
        def model(self):
            model = torch.nn.Linear(5, 1).double()
            torch.nn.init.zeros_(model.weight)
            torch.nn.init.zeros_(model.bias)
            return model

    def variance(workers):
        work = Line(n=24 * workers, batch=1)
        found = [train(work, ParallelSGD(), workers=workers, epochs=1, seed=seed) for seed in range(6)]
        return torch.stack([result.snapshot.params for result in found]).var(0).sum().item()

    one, eight = variance(1), variance(8)
    print(f"variance of one {one:.4f}, of the mean of eight {eight:.4f}")
    assert eight < one / 3


@pytest.mark.parametrize("workers", [2, 4])
def test_without_a_shuffle_workers_keep_their_rows(workers):
    work = Sorted(n=48, optimizer="momentum")
    strategy = ParallelSGD(rounds=3, shuffle=False)
    loop, _ = law(work, workers, strategy, 3)
    assert distance(train(work, strategy, workers=workers, epochs=3).model(), loop.models[0]) < EXACT
    for batches in loop.batches:  # the same rows in every epoch, and not in the same order
        epochs = [torch.cat([b.y for b in batches[e * loop.steps : (e + 1) * loop.steps]]).flatten() for e in range(3)]
        assert torch.equal(epochs[0].sort().values, epochs[2].sort().values)
        assert not torch.equal(epochs[0], epochs[1])
    first = torch.cat([b.y for b in loop.batches[0]])
    last = torch.cat([b.y for b in loop.batches[-1]])
    assert first.max() <= last.min()  # shards by label
    dealt = train(work, ParallelSGD(rounds=3), workers=workers, epochs=3)
    assert distance(dealt.model(), loop.models[0]) > 1e-3


def test_what_getting_batches_takes_is_told():
    history = train(Small(n=60), ParallelSGD(rounds=2), workers=2, epochs=2).history
    seconds = history.column("data").to_pylist()
    assert all(0 < s <= whole for s, whole in zip(seconds, history.column("seconds").to_pylist(), strict=True))


def test_the_middle_of_a_part_is_evaluated_at_what_a_merge_would_give():
    for merge in ("mean", "best"):
        work = Small(n=60, optimizer="momentum")
        result = train(work, ParallelSGD(rounds=1, merge=merge), workers=2, epochs=3)
        short = train(work, ParallelSGD(rounds=1, merge=merge), workers=2, epochs=1)
        evaluated = [v for v in result.history.column("evaluation_loss").to_pylist() if v is not None]
        assert len(evaluated) == 3
        assert evaluated[0] == pytest.approx(short.metrics["loss"], abs=EXACT)


def test_it_is_read_and_written():
    found = parse("parallel_sgd:rounds=3,merge=best,shuffle=false")[0].strategy
    assert found == ParallelSGD(3, "best", shuffle=False) and found.rows == Fixed()
    assert parse(wire([*parse("parallel_sgd")]))[0].strategy == ParallelSGD()


@pytest.mark.parametrize(
    "given",
    [
        "rounds=0",
        "rounds=none",
        "merge=median",
        "shuffle=1",
        "momentum=drop",
        "buffers=x",
        "compression=zip",
        "merge=best,compression=int8",
    ],
)
def test_bad_options(given):
    with pytest.raises(ConfigError) as caught:
        parse(f"parallel_sgd:{given}")
    assert given.rpartition(",")[2].partition("=")[0] in str(caught.value)

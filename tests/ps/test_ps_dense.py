"""A dense segment as primary and as copy: the same to the bit, whatever comes in whatever order."""

import random

import numpy as np
import pytest
import torch
from ps_site import space
from rayps_client.errors import CheckpointError, ConfigError
from torch.optim import SGD, Adagrad, Adam

from rayps.core.job.repeated_pushes import WINDOW, Ledger
from rayps.core.strategy.topology import ASP, PerPush, PerRound, Servers
from rayps.ps.server.dense_segment import MEAN, PUSHED, VALUES, DenseSegment, find_kind_of_change, part_of, state_of
from rayps.strategies.base import Strategy
from rayps.strategies.parameter_server import ParameterServer
from rayps.tensors.flat import Layout
from rayps.tensors.optim import SlicedOptimizer

SIZE, WORKERS = 14, 3
FACTORIES = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: Adam(p, lr=0.01),
    "adagrad": lambda p: Adagrad(p, lr=0.1),
}


class Median(Strategy):
    """Gathers, and wants every value."""

    topology = Servers()

    def on_round(self, shard, values, weights):
        shard.step(torch.stack(values).median(0).values)


class Both(Strategy):
    """Does something at each push and at the end of a round."""

    topology = Servers(update=PerRound(listens=True))

    def on_push(self, shard, value, weight):
        shard.step(value, 0.5)

    def on_round(self, shard, values, weights):
        shard.step(sum(values), -0.25)


class InPlace(Strategy):
    """Writes into what it is given."""

    topology = Servers(consistency=ASP(), update=PerPush())

    def on_push(self, shard, value, weight):
        value.mul_(weight)
        shard.step(value)


STRATEGIES = {
    "bsp": ParameterServer(staleness=0),
    "ssp": ParameterServer(staleness=2),
    "asp": ParameterServer(staleness=None),
    "median": Median(),
    "both": Both(),
    "in place": InPlace(),
}


def made(strategy="asp", optimizer="sgd", workers=WORKERS, index=1):
    one = space(SIZE, 2, workers, strategy=STRATEGIES[strategy], factory=FACTORIES[optimizer])
    return DenseSegment(one, index, FACTORIES[optimizer])


def data(rank, step, size=SIZE // 2):
    values = torch.randn(size, generator=torch.Generator().manual_seed(1000 * step + rank)).numpy()
    return memoryview(bytearray(values.tobytes()))


def test_a_push_without_samples_is_not_read():
    """The mean over no sample is NaN."""
    law, one = loaded(made("bsp")), loaded(made("bsp"))
    for segment, nothing in ((law, 0.0), (one, np.nan)):
        for rank, weight in ((0, 0.0), (1, 2.0), (2, 0.0)):
            values = np.full(SIZE // 2, nothing, np.float32)
            segment.push(rank, 0, weight, data(rank, 0) if weight else memoryview(bytearray(values.tobytes())))
    assert bits(one) == bits(law) and np.isfinite(np.frombuffer(bits(one), np.float32)).all()


def loaded(segment, seed=5):
    vector = torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))
    lo, hi = segment.extent.lo, segment.extent.hi
    segment.load(state_of(vector[lo:hi], segment.extent.layout, lo, marks=[0] * segment.space.workers))
    return segment


def bits(segment):
    return bytes(segment.read())


def same(one, other):
    assert one.dump() == other.dump()


def schedule(rng, rounds, ahead):
    """Pushes in a random order that workers could make: each rank's own in order mostly, some twice, some swapped."""
    left = {rank: list(range(rounds)) for rank in range(WORKERS)}
    out = []
    while any(left.values()):
        slowest = min((steps[0] for steps in left.values() if steps), default=0)
        rank = rng.choice([r for r, steps in left.items() if steps and steps[0] <= slowest + ahead])
        steps = left[rank]
        at = 1 if len(steps) > 1 and rng.random() < 0.2 and steps[1] <= slowest + ahead else 0
        out.append((rank, steps.pop(at)))
        if rng.random() < 0.2:
            out.append(rng.choice(out))
    return out


@pytest.mark.parametrize("optimizer", FACTORIES)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("seed", range(4))
def test_a_copy_from_any_moment_is_the_same_to_the_bit(strategy, optimizer, seed):
    rng = random.Random(f"{seed} {strategy} {optimizer}")
    primary = loaded(made(strategy, optimizer))
    copies = []
    pushes = schedule(rng, 8, ahead=2)
    for rank, step in pushes:
        if rng.random() < 0.15 or (rank, step) == pushes[len(pushes) // 2]:
            copy = made(strategy, optimizer)
            copy.load(primary.dump())
            same(primary, copy)
            copies.append(copy)
        weight = float(rng.choice([0, 1, 3])) if strategy != "both" else 1.0
        piece = data(rank, step) if rng.random() < 0.9 else memoryview(b"")
        before = primary.seq
        changes = primary.push(rank, step, weight, piece)
        assert primary.seq == before + len(changes)
        for copy in copies:
            for change in changes:
                copy.replay(memoryview(change))
            assert (copy.seq, copy.version, bits(copy)) == (primary.seq, primary.version, bits(primary))
    assert set(primary.marks().values()) == {8}
    assert primary.version > 0
    for copy in copies:
        assert copy.shard.optimizer.moments().keys() == primary.shard.optimizer.moments().keys()
        same(primary, copy)


@pytest.mark.parametrize("strategy", ["bsp", "asp", "median"])
def test_a_promoted_copy_goes_on_as_the_primary_would_have(strategy):
    """Pushes that were not durable are said again to the copy; the result is that of the primary alone."""
    for seed in range(10):
        rng = random.Random(seed)
        alone, primary, copy = (loaded(made(strategy, "momentum")) for _ in range(3))
        copy.load(primary.dump())
        pushes = schedule(rng, 6, ahead=1)
        for rank, step in pushes:
            alone.push(rank, step, 1.0, data(rank, step))
        dies, held = rng.randrange(len(pushes)), []
        for rank, step in pushes[:dies]:
            if rng.random() < 0.2:
                copy.load(primary.dump())
            for change in primary.push(rank, step, 1.0, data(rank, step)):
                copy.replay(memoryview(change))
            held.append((rank, step))
        copy.promoted()
        durable = {rank: copy.durable(rank) for rank in range(WORKERS)}
        for rank, step in [push for push in held if push[1] >= durable[push[0]]] + pushes[dies:]:
            copy.push(rank, step, 1.0, data(rank, step))
        assert copy.marks() == alone.marks()
        if strategy != "asp" or dies == 0:
            assert bits(copy) == bits(alone)
        assert copy.version == alone.version


def test_a_round_that_the_state_knew_whole_is_closed_by_the_promotion():
    """Ranks ahead of an open round: the primary closes two at once, and dies between the two changes."""
    primary, copy, alone = (loaded(made("bsp")) for _ in range(3))
    early = [(0, 0), (1, 0), (0, 1), (1, 1), (2, 1)]
    for rank, step in early:
        assert primary.push(rank, step, 1.0, data(rank, step)) == []
        alone.push(rank, step, 1.0, data(rank, step))
    copy.load(primary.dump())
    changes = primary.push(2, 0, 1.0, data(2, 0))
    assert len(changes) == 2
    copy.replay(memoryview(changes[0]))
    assert copy.version == 1
    copy.promoted()
    assert copy.version == 2
    assert bits(copy) == bits(primary)


def test_what_a_change_is():
    assert [find_kind_of_change(STRATEGIES[name]) for name in STRATEGIES] == [
        MEAN,
        PUSHED,
        PUSHED,
        VALUES,
        PUSHED,
        PUSHED,
    ]
    mean, values = made("bsp"), made("median")
    for rank in range(WORKERS):
        small = mean.push(rank, 0, 1.0, data(rank, 0))
        large = values.push(rank, 0, 1.0, data(rank, 0))
    assert 4 * 7 <= len(small[0]) < 2 * 4 * 7 + 32  # one vector, however many workers there are
    assert len(large[0]) >= 4 * 7 * WORKERS


def test_without_copies_nothing_is_written_down():
    for strategy in STRATEGIES:
        one, other = loaded(made(strategy)), loaded(made(strategy))
        one.copied = False
        for step in range(3):
            for rank in range(WORKERS):
                silent, said = (s.push(rank, step, 1.0, data(rank, step)) for s in (one, other))
                assert len(silent) == len(said)
                assert not any(silent)
        same(one, other)


def test_the_mean_is_what_the_shard_alone_makes():
    """Naive: one optimizer on the whole vector, and the weighted mean added up in the order of ranks."""
    segment = loaded(made("bsp", "adam"))
    law = SlicedOptimizer(
        FACTORIES["adam"],
        segment.extent.layout,
        torch.frombuffer(bytearray(bits(segment)), dtype=torch.float32),
        segment.extent.lo,
        segment.extent.hi,
    )
    for step in range(5):
        values = [torch.frombuffer(data(r, step), dtype=torch.float32) for r in range(WORKERS)]
        law.step_mean(values, [1.0, 2.0, 3.0])
        for rank in (2, 0, 1):
            segment.push(rank, step, rank + 1.0, data(rank, step))
    assert bits(segment) == law.params.numpy().tobytes()


def test_a_mean_is_over_those_who_had_samples():
    """Not over those who might have: a rank without samples does not pull the mean towards zero."""
    segment, law = loaded(made("bsp")), loaded(made("bsp"))
    before = bits(segment)
    for rank in range(WORKERS):
        segment.push(rank, 0, 0.0, data(rank, 0))
    assert bits(segment) == before
    assert segment.version == 0
    assert segment.durable(0) == 1
    for rank, weight in enumerate([4.0, 0.0, 4.0]):
        segment.push(rank, 1, weight, data(rank, 1))
    values = [np.frombuffer(data(rank, 1), np.float32) for rank in (0, 2)]
    expected = np.frombuffer(bits(law), np.float32) - 0.1 * (values[0] + values[1]) / 2
    assert np.allclose(np.frombuffer(bits(segment), np.float32), expected, atol=1e-6)


def test_the_optimizers_state_travels_with_the_segment():
    """Momentum that stayed behind would be seen in the next step (as would Adam's count of steps)."""
    for optimizer in ("momentum", "adam"):
        segment = loaded(made("asp", optimizer))
        for step in range(4):
            segment.push(0, step, 1.0, data(0, step))
        moved, amnesiac = made("asp", optimizer), made("asp", optimizer)
        moved.load(segment.dump())
        amnesiac.load(state_of(segment.shard.params, segment.extent.layout, segment.extent.lo, marks=Ledger([4, 0, 0])))
        for each in (segment, moved, amnesiac):
            each.push(0, 4, 1.0, data(0, 4))
        assert bits(moved) == bits(segment) != bits(amnesiac)


def test_a_state_made_by_a_client():
    """From whole parameters' moments, as a snapshot has them; and back."""
    whole = DenseSegment(space(SIZE, 1, WORKERS, factory=FACTORIES["momentum"]), 0, FACTORIES["momentum"])
    parts = [made("asp", "momentum", index=i) for i in range(2)]
    for step in range(3):
        piece = data(0, step, SIZE)
        whole.push(0, step, 1.0, piece)
    moments = whole.shard.optimizer.moments()
    for part in parts:
        piece = whole.shard.params[part.extent.lo : part.extent.hi]
        part.load(state_of(piece, part.extent.layout, part.extent.lo, moments=moments, marks=[3, 0, 0], version=3))
    piece = data(0, 3, SIZE)
    whole.push(0, 3, 1.0, piece)
    for part in parts:
        part.push(0, 3, 1.0, piece[4 * part.extent.lo : 4 * part.extent.hi])
    assert b"".join(bits(part) for part in parts) == bits(whole)
    assert parts[0].version == 4
    again = part_of(parts[1].dump(), 3, parts[1].extent.lo)
    assert again.ledger.marks == {0: 4, 1: 0, 2: 0}
    assert torch.equal(again.params, parts[1].shard.params)
    assert again.moments["b"]["momentum_buffer"].shape == (7,)


def test_a_checkpoint_in_the_middle_of_a_round_does_not_count_the_open_pushes():
    """A segment that begins with it accepts these pushes again, and ends where the first one ends."""
    segment, again = loaded(made("bsp", "momentum")), made("bsp", "momentum")
    for step in range(3):
        for rank in range(WORKERS):
            segment.push(rank, step, 1.0, data(rank, step))
    for rank in (0, 2):
        segment.push(rank, 3, 1.0, data(rank, 3))
    part = part_of(segment.dump(), 3, segment.extent.lo)
    assert part.done == {0: 3, 1: 3, 2: 3}
    again.load(state_of(part.params, segment.extent.layout, segment.extent.lo, moments=part.moments, marks=part.ledger))
    for rank in range(WORKERS):
        again.push(rank, 3, 1.0, data(rank, 3))
    segment.push(1, 3, 1.0, data(1, 3))
    assert bits(again) == bits(segment)


def test_kept_states_are_of_their_round_and_travel():
    segment = loaded(made("bsp", "momentum"))
    segment.keep([2, 3])
    seen = {}
    for step in range(5):
        for rank in range(WORKERS):
            segment.push(rank, step, 1.0, data(rank, step))
        seen[step + 1] = bits(segment)
    other = made("bsp", "momentum")
    other.load(segment.dump())
    for one in (segment, other):
        assert one.part(1) is None
        for rounds in (2, 3):
            back = made("bsp", "momentum")
            back.load(one.part(rounds))
            assert bits(back) == seen[rounds]
            assert back.marks() == dict.fromkeys(range(WORKERS), rounds)


def test_what_cannot_be_pushed_changes_nothing():
    segment = loaded(made("asp"))
    before = segment.dump()
    piece = data(0, 0)
    for rank, step, weight, given, why in [
        (0, 0, 1.0, piece[:-4], "bytes"),
        (3, 0, 1.0, piece, "rank 3"),
        (0, WINDOW, 1.0, piece, "may be skipped"),
        (0, 0, float("nan"), piece, "weight"),
        (-1, 0, 1.0, piece, "rank -1"),
    ]:
        for call in (segment.check, segment.push):
            with pytest.raises(ValueError, match=why):
                call(rank, step, weight, given)
    assert segment.dump() == before
    for wrong in (b"", b"\0" * 64, before[:40], state_of(torch.zeros(3), segment.extent.layout, 0, marks=[0, 0, 0])):
        with pytest.raises(CheckpointError):
            segment.load(wrong)
    with pytest.raises(CheckpointError, match="2 workers"):
        segment.load(state_of(torch.zeros(7), segment.extent.layout, 7, marks=[0, 0]))
    assert segment.dump() == before
    with pytest.raises(ConfigError, match="no dense vector"):
        DenseSegment(space(SIZE, 2).__class__("x", 1, 1, ParameterServer()), 0, FACTORIES["sgd"])


@pytest.mark.parametrize("who", ["parent", "branch"])
def test_a_branch_costs_nothing_until_one_of_the_two_steps(who):
    parent = loaded(made("asp", "momentum"))
    for step in range(2):
        parent.push(0, step, 1.0, data(0, step))
    branch = parent.branch()
    twig = branch.branch()
    assert branch.nbytes == twig.nbytes == 0
    assert bits(branch) == bits(parent)
    assert branch.read().obj is parent.read().obj  # the same memory
    assert branch.marks() == dict.fromkeys(range(WORKERS), 0)
    assert branch.may_pull(1)
    values = bits(parent)
    (parent if who == "parent" else branch).push(0, 2 if who == "parent" else 0, 1.0, data(0, 2))
    assert branch.nbytes == parent.nbytes == 2 * 4 * 7
    assert bits(parent if who == "branch" else branch) == values != bits(parent if who == "parent" else branch)
    if who == "branch":
        assert twig.nbytes == 0
    assert bits(twig) == values
    other = made("asp", "momentum")  # momentum came along: the next step is what the parent's would have been
    twig.push(1, 0, 1.0, data(1, 9))
    assert other.version == 0
    assert bits(twig) != values


def test_a_branch_begins_with_the_parents_momentum_and_outlives_it():
    parent, law = loaded(made("asp", "momentum")), loaded(made("asp", "momentum"))
    for step in range(3):
        parent.push(0, step, 1.0, data(0, step))
        law.push(0, step, 1.0, data(0, step))
    branch = parent.branch()
    parent.close()
    del parent
    assert branch.nbytes > 0
    branch.push(0, 0, 1.0, data(0, 3))
    law.push(0, 3, 1.0, data(0, 3))
    assert bits(branch) == bits(law)


def test_a_branch_dumps_what_it_shares():
    parent = loaded(made("bsp", "adam"))
    for rank in range(WORKERS):
        parent.push(rank, 0, 1.0, data(rank, 0))
    branch, copy = parent.branch(), made("bsp", "adam")
    copy.load(branch.dump())
    assert branch.nbytes == 0
    for rank in range(WORKERS):
        for change in branch.push(rank, 0, 1.0, data(rank, 1)):
            copy.replay(memoryview(change))
    same(branch, copy)


def test_an_empty_segment_takes_pushes():
    layout = Layout.of([("a", torch.empty(2))])
    one = space(SIZE, 2, 1, staleness=0).__class__("e", 1, 1, ParameterServer(), layout, ((0, 2), (2, 2)), b"")
    segment = DenseSegment(one, 1, FACTORIES["sgd"])
    assert len(segment.push(0, 0, 1.0, memoryview(b""))) == 1
    assert bytes(segment.pull(0)[0]) == b""
    assert segment.durable(0) == 1


def test_laggards_and_leads():
    segment = loaded(made("ssp"))
    for step in range(3):
        assert segment.may_pull(0)
        segment.push(0, step, 1.0, data(0, step))
    assert not segment.may_pull(0)
    assert segment.laggards() == [1, 2]
    assert segment.pull(1)[1] == 0
    segment.push(1, 0, 1.0, data(1, 0))
    segment.push(2, 0, 1.0, data(2, 0))
    assert segment.may_pull(0)
    assert segment.pull(0)[1] == 2
    assert np.frombuffer(segment.pull(0)[0], np.float32).shape == (7,)

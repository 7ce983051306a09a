import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import SGD, Adam

from rayps.core.job.repeated_pushes import WINDOW
from rayps.core.rows.phase_rounds import Boundary
from rayps.ps.protocol.pieces import Extent
from rayps.ps.server.dense_segment import Shard, part_of
from rayps.strategies.parameter_server import ParameterServer
from rayps.tensors.flat import Layout

N = 10
LAYOUT = Layout.of([("a", torch.empty(2, 3, dtype=torch.float64)), ("b", torch.empty(N - 6, dtype=torch.float64))])
FACTORIES = {
    "sgd": lambda p: SGD(p, lr=0.5),
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: Adam(p, lr=0.1),
}


def shard(staleness=0, workers=2, factory="sgd", boundary=None, lo=0, hi=N, start=None, backup=None):
    params = torch.arange(float(N), dtype=torch.float64)[lo:hi]
    return Shard(
        Extent(LAYOUT, lo, hi),
        ParameterServer(staleness=staleness, backup=backup),
        FACTORIES[factory],
        params,
        start or [0] * workers,
        boundary=boundary or Boundary(0, -1),
    )


def grad(seed, n=N):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_in_step_the_mean_is_weighted_and_taken_once():
    one = shard()
    start = one.params.clone()
    assert one.push(1, 0, grad(1), 3.0)
    assert torch.equal(one.params, start)
    assert one.version == 0
    assert one.push(0, 0, grad(0), 1.0)
    assert torch.allclose(one.params, start - 0.5 * (grad(0) + 3 * grad(1)) / 4, atol=1e-15)
    assert one.version == 1


def test_in_step_the_order_of_arrival_changes_no_bit():
    results = []
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        one = shard(workers=3, factory="adam")
        for step in range(4):
            for rank in order:
                one.push(rank, step, grad(10 * step + rank), rank + 1.0)
        results.append(one.params)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("members", [(0, 1), (0, 2), (1, 2)], ids=str)
def test_with_backup_workers_a_round_closes_with_the_pushes_of_its_members(members):
    one, law = shard(workers=3, backup=1, boundary=Boundary(1, 0)), shard(workers=2)
    for step in range(3):
        for at, rank in enumerate(members):
            assert one.closed == step
            one.push(rank, step, grad(10 * step + rank), rank + 1.0)
            law.push(at, step, grad(10 * step + rank), rank + 1.0)
        assert torch.equal(one.params, law.params) and one.version == step + 1
        assert one.ledger.marks == dict.fromkeys(range(3), step + 1)  # the round is over for the late rank too
        late = ({0, 1, 2} - set(members)).pop()
        assert one.push(late, step, grad(99), 9.0) is False and torch.equal(one.params, law.params)
        assert one.clock.may_pull(late, step + 1)
    assert part_of(one.retained[3], 3, 0).done == dict.fromkeys(range(3), 3)


@pytest.mark.parametrize("staleness", [2, None])
def test_out_of_step_each_push_is_applied_at_once_scaled_by_the_number_of_workers(staleness):
    one = shard(staleness)
    start = one.params.clone()
    one.push(1, 0, grad(1), 3.0)
    assert torch.allclose(one.params, start - 0.5 * grad(1) / 2, atol=1e-15)
    assert one.version == 1


def test_nobody_with_samples_means_no_step():
    for one in (shard(), shard(None)):
        start = one.params.clone()
        one.push(0, 0, grad(0), 0.0)
        one.push(1, 0, grad(1), 0.0)
        assert torch.equal(one.params, start)
        assert one.clock.done == {0: 1, 1: 1}
        assert one.version == 0


@pytest.mark.parametrize("part", [slice(None), slice(2, 7)], ids=["whole", "range"])
def test_a_push_without_samples_is_not_read(part):
    """The mean over no sample is NaN."""
    law, one, count = shard(workers=3), shard(workers=3), len(range(N)[part])
    for each, nothing in ((law, 0.0), (one, float("nan"))):
        for rank, weight in ((0, 0.0), (1, 2.0), (2, 0.0)):
            value = grad(rank, count) if weight else torch.full((count,), nothing, dtype=torch.float64)
            each.push(rank, 0, value, weight, offset=part.start or 0)
    assert torch.equal(one.params, law.params) and one.params.isfinite().all() and one.version == 1


PUSH = st.tuples(st.integers(0, 2), st.integers(0, 4))


@settings(deadline=None, max_examples=60)
@given(staleness=st.sampled_from([0, 2, None]), repeats=st.lists(PUSH, max_size=30))
def test_what_is_pushed_again_has_no_effect(staleness, repeats):
    """Any repetition of pushes, at any time and in any order, leaves the same parameters as each push once."""
    law, one = shard(staleness, 3, "momentum"), shard(staleness, 3, "momentum")
    seen = set()
    for rank, step in [*repeats, *((r, s) for s in range(5) for r in range(3))]:
        assert one.push(rank, step, grad(10 * step + rank), 1.0) is ((rank, step) not in seen)
        if (rank, step) not in seen:
            law.push(rank, step, grad(10 * step + rank), 1.0)
        seen.add((rank, step))
    assert torch.equal(one.params, law.params)
    assert one.version == law.version
    assert one.clock.done == {0: 5, 1: 5, 2: 5}


@pytest.mark.parametrize(
    ("rank", "step", "size", "offset", "words"),
    [
        (0, WINDOW, N, 0, f"step {WINDOW} before step 0"),
        (2, 0, N, 0, "rank 2"),
        (-1, 0, N, 0, "rank -1"),
        (0, 0, N + 1, 0, "does not fit"),
        (0, 0, 4, 7, "does not fit"),
        (0, 0, 1, -1, "does not fit"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(rank, step, size, offset, words):
    one = shard()
    start = one.params.clone()
    with pytest.raises(ValueError, match=words):
        one.push(rank, step, torch.ones(size, dtype=torch.float64), 1.0, offset)
    assert torch.equal(one.params, start)
    assert one.clock.done == {0: 0, 1: 0}


@pytest.mark.parametrize("staleness", [0, None])
@pytest.mark.parametrize("factory", FACTORIES)
@settings(deadline=None, max_examples=40)
@given(lo=st.integers(0, N), length=st.integers(0, N))
def test_a_range_leaves_all_else_as_it_was(staleness, factory, lo, length):
    """Elements and optimizer state outside the range keep their bits; within, they move as a whole push would."""
    hi = min(N, lo + length)
    one, law = shard(staleness, 1, factory), shard(staleness, 1, factory)
    for both in (one, law):
        both.push(0, 0, grad(0), 1.0)
    before, state = one.params.clone(), flat_state(one)
    one.push(0, 1, grad(1)[lo:hi], 1.0, lo)
    law.push(0, 1, grad(1), 1.0)
    assert torch.equal(one.params[lo:hi], law.params[lo:hi])
    assert torch.equal(one.params[:lo], before[:lo])
    assert torch.equal(one.params[hi:], before[hi:])
    for key, values in flat_state(one).items():
        assert torch.equal(values[:lo], state[key][:lo])
        assert torch.equal(values[hi:], state[key][hi:])
        assert torch.equal(values[lo:hi], flat_state(law)[key][lo:hi] if lo < hi else values[:0])


def parts(one):
    """What is kept of a shard's states, by round."""
    return {rounds: part_of(state, rounds, one.extent.lo) for rounds, state in sorted(one.retained.items())}


def flat_state(one):
    """The elementwise optimizer state as vectors over the shard."""
    found = {}
    for state in one.optimizer.moments().values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                found.setdefault(key, []).append(value)
    return {key: torch.cat(parts) for key, parts in found.items()}


def test_the_first_range_makes_its_own_state_only():
    one = shard(None, 1, "momentum")
    one.push(0, 0, torch.ones(3, dtype=torch.float64), 1.0, 2)
    state = flat_state(one)["momentum_buffer"]
    assert (state[2:5] != 0).all()
    assert state[:2].abs().sum() == state[5:].abs().sum() == 0


def test_in_step_ranges_of_several_workers_are_one_round():
    one = shard(0, 2, "sgd")
    start = one.params.clone()
    one.push(0, 0, torch.ones(2, dtype=torch.float64), 1.0, 1)
    one.push(1, 0, torch.ones(2, dtype=torch.float64), 1.0, 6)
    moved = start - one.params
    assert torch.equal(moved, torch.tensor([0, 0.25, 0.25, 0, 0, 0, 0.25, 0.25, 0, 0], dtype=torch.float64))
    assert one.version == 1


def test_an_empty_range_counts_as_a_step():
    one = shard(0, 2)
    start = one.params.clone()
    one.push(0, 0, torch.empty(0, dtype=torch.float64), 1.0)
    one.push(1, 0, torch.empty(0, dtype=torch.float64), 1.0)
    assert one.clock.done == {0: 1, 1: 1}
    assert torch.equal(one.params, start)


def test_pulls_are_counted_by_their_lead():
    one = shard(2, 2)
    assert [one.pulled(0), one.pulled(0)] == [0, 0]
    one.push(0, 0, grad(0), 1.0)
    one.push(0, 1, grad(0), 1.0)
    assert one.clock.may_pull(0)
    assert one.pulled(0) == 2
    one.push(0, 2, grad(0), 1.0)
    assert not one.clock.may_pull(0)
    assert one.facts(0).staleness == {0: 2, 2: 1}
    assert one.facts(0).laggards == [1]


def test_a_boundary():
    assert [r for r in range(12) if r in Boundary(5, 11)] == [0, 5, 10, 11]
    assert [r for r in range(12) if r in Boundary(0, 3)] == [3]


def test_snapshots_are_of_the_boundary_although_others_went_on():
    one = shard(0, 2, "adam", Boundary(2, 5))
    kept = {}
    for step in range(5):
        one.push(0, step, grad(step), 1.0)
        one.push(1, step, grad(50 + step), 1.0)
        kept[step + 1] = (one.params.clone(), one.optimizer.moments())
    assert sorted(parts(one)) == [4, 5]
    for rounds, part in parts(one).items():
        assert part.round == rounds
        assert part.done == {0: rounds, 1: rounds}
        assert torch.equal(part.params, kept[rounds][0])
        assert torch.equal(part.moments["a"]["exp_avg"], kept[rounds][1]["a"]["exp_avg"])


def test_out_of_step_a_snapshot_tells_how_far_everyone_was():
    one = shard(None, 2, "sgd", Boundary(2, 9))
    for step in range(7):
        one.push(0, step, grad(step), 1.0)
    assert parts(one) == {}
    one.push(1, 0, grad(9), 1.0)
    one.push(1, 1, grad(9), 1.0)
    assert {r: p.done for r, p in parts(one).items()} == {2: {0: 7, 1: 2}}


def test_a_shard_that_begins_later_goes_on_counting():
    one = shard(0, 2, start=[4, 4], boundary=Boundary(2, 6))
    assert one.push(0, 3, grad(0), 1.0) is False
    for step in (4, 5):
        one.push(0, step, grad(0), 1.0)
        one.push(1, step, grad(0), 1.0)
    assert sorted(parts(one)) == [6]

"""Which groups of gradients are complete, against the definition: every order of parts, for every expectation."""

import gc
import itertools

import pytest
import torch

from rayps.worker.exchange.arrivals import GradientArrivals, watch

GROUPS = {
    "buckets": [[2], [1, 0]],  # each parameter in one group
    "segments": [[0, 1], [1, 2]],  # a parameter in two
    "one": [[0, 1, 2]],
}


def complete(members, seen, expected, pending):
    """The definition: all parts of each awaited gradient have arrived, and no more."""
    awaited = [i for i in members if expected[i] or i in pending]
    return bool(awaited) and all(expected[i] and seen.count(i) >= expected[i] for i in awaited)


@pytest.mark.parametrize("pending", [(), (1,), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("kind", GROUPS)
def test_a_group_is_complete_with_the_last_part_that_is_expected(kind, pending):
    groups = GROUPS[kind]
    for expected in itertools.product(range(3), repeat=3):
        for arriving in itertools.product(range(3), repeat=4):
            arrivals = GradientArrivals(3, groups)
            arrivals.expected = list(expected)
            arrivals.begin(pending=pending)
            done = []
            for at, i in enumerate(arriving):
                seen = arriving[: at + 1]
                found = arrivals.count(i)
                law = [g for g, members in enumerate(groups) if complete(members, seen, expected, pending)]
                new = [g for g in law if g not in done and i in groups[g]]
                assert found == new, (expected, seen)
                assert arrivals.is_complete(i) == (seen.count(i) == expected[i])
                for group in found:
                    assert not arrivals.waits(group)
                    arrivals.sent(group)
                done += found
                assert arrivals.list_unsent() == [g for g in range(len(groups)) if g not in done]
                assert [arrivals.is_late(j) for j in range(3)] == [any(j in groups[g] for g in done) for j in range(3)]
            arrivals.end()
            assert arrivals.expected == [arriving.count(i) for i in range(3)] and arrivals.order == list(arriving)


def test_nothing_is_complete_in_the_first_backward_and_if_nothing_leaves_early():
    first = GradientArrivals(2, [[0], [1]])
    first.begin()
    assert [first.count(i) for i in (0, 1, 0)] == [[], [], []] and first.list_unsent() == [0, 1]
    first.end()
    first.begin(early=False)
    assert [first.count(i) for i in (0, 0, 1)] == [[], [], []]
    told = GradientArrivals(2, [[0], [1]], expected=1)
    told.begin()
    assert [told.count(i) for i in (1, 0)] == [[1], [0]]


def test_late_parts_are_added():
    arrivals = GradientArrivals(2, [[0], [1]])
    arrivals.add_late(1, torch.ones(2))
    arrivals.add_late(1, torch.ones(2))
    assert arrivals.late.keys() == {1} and arrivals.late[1].tolist() == [2, 2]


class Taker:
    def __init__(self, parameters):
        self.taken = []
        self.hooks = watch(parameters, self.take)

    def take(self, i, p):
        self.taken.append((i, p.grad.item()))


def test_gradients_are_taken_when_they_are_computed_and_by_a_living_owner_alone():
    parameters = [torch.nn.Parameter(torch.tensor(float(i))) for i in range(3)]
    first = Taker(parameters)
    (parameters[0] + 2 * parameters[2]).backward()
    assert sorted(first.taken) == [(0, 1.0), (2, 2.0)]
    second = Taker(parameters)
    for hook in second.hooks:
        hook.remove()
    taken = first.taken
    del first
    gc.collect()
    parameters[1].backward()
    assert len(taken) == 2 and not second.taken

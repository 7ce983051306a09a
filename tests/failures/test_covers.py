"""Covers of grids of cases: every value and every pair is in `make test`, and the rest of a grid in `make soak`."""

import itertools
from types import SimpleNamespace

import covers
import pytest


class Item:
    """A case of a test, as pytest collects it."""

    def __init__(self, name, mark, **params):
        self.nodeid, self.marks = f"test_x.py::{name}[{'-'.join(map(str, params.values()))}]", {"cover": mark}
        self.callspec = SimpleNamespace(params=params)

    def get_closest_marker(self, name):
        return self.marks.get(name)

    def add_marker(self, name):
        self.marks[name] = name


def grid(mark, sizes):
    mark = getattr(mark, "mark", mark)
    cases = itertools.product(*map(range, sizes))
    return [Item("test_a", mark, **{f"p{at}": value for at, value in enumerate(case)}) for case in cases]


def kept(items):
    covers.mark_for_soak(items)
    left = covers.left_for_soak(items, "")
    return [tuple(item.callspec.params.values()) for item in items if item not in left]


@pytest.mark.parametrize("sizes", [(1, 1), (2, 3), (2, 4, 3), (5, 2, 3), (3, 3, 3, 2), (30, 4, 4)])
def test_every_pair_of_values_is_in_a_small_part_of_a_product(sizes):
    found = kept(grid(covers.pairs, sizes))
    for a, b in itertools.combinations(range(len(sizes)), 2):
        assert {(case[a], case[b]) for case in found} == set(itertools.product(range(sizes[a]), range(sizes[b])))
    largest = sorted(sizes)[-2:]
    assert len(found) <= 1.5 * largest[0] * largest[1]


@pytest.mark.parametrize("sizes", [(1, 1), (2, 3), (6, 4), (3, 3, 3, 2)])
def test_every_value_is_in_as_many_cases_as_the_longest_parameter_has_values_or_a_few_more(sizes):
    found = kept(grid(covers.values, sizes))
    for number, size in enumerate(sizes):
        assert {case[number] for case in found} == set(range(size))
    assert len(found) <= max(sizes) + 2


def test_every_value_of_every_key_is_in_the_cover_and_it_is_the_same_each_time():
    keys = (lambda p0, p1: (p0, p1 % 5)), (lambda p0, p1: p1)
    found = kept(grid(covers.by(*keys), (20, 30)))
    assert found == kept(grid(covers.by(*keys), (20, 30)))
    assert {(a, b % 5) for a, b in found} == set(itertools.product(range(20), range(5)))
    used = [b for _, b in found]
    assert set(used) == set(range(30)) and len(found) == 20 * 5
    assert max(map(used.count, used)) <= 12  # it does not lean to the first ones
    one = covers.by(lambda p0, p1: p0)
    assert len(kept(grid(one, (20, 30)))) == 20


def test_functions_are_covered_each_alone_and_one_case_that_is_named_runs():
    mark = covers.values.mark
    items = [Item(name, mark, a=a, b=b) for name in ("test_a", "test_b") for a in range(2) for b in range(2)]
    assert len(kept(items)) == 4
    assert kept([Item("test_a", mark, a=1, b=0)]) == [(1, 0)]
    assert kept([Item("test_a", None, a=a) for a in range(3)]) == [(0,), (1,), (2,)]


@pytest.mark.parametrize(("expression", "left"), [("", 1), ("not ray", 1), ("soak", 0), ("not ray and soak", 0)])
def test_what_is_for_soak_runs_where_it_is_asked_for(expression, left):
    items = grid(covers.values, (2,))
    items[1].add_marker("soak")
    assert covers.left_for_soak(items, expression) == items[2 - left :]

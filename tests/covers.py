"""Grids of cases: `make test` runs a cover of a grid, and `make soak` the whole.

A grid (source x strategy x option) has many cases that fail together. Its cover is few of them, chosen the same way in
each process, which have every value of every key: every strategy, every pair (source, strategy), every (source, family
of strategies). A defect that a value or a pair brings fails a case of the cover; one that only a single combination of
three has is found by `make soak`. A case that is named on the command line runs.

    @covers.values              each value of each parameter
    @covers.pairs               each pair of values of two parameters
    @covers.by(key, ...)        each value of each key: a function of the parameters, which are given by name
"""

import heapq
import itertools
import zlib
from collections import defaultdict

import pytest

values = pytest.mark.cover(1)
pairs = pytest.mark.cover(2)
MIXER = 0x9E3779B9


def by(*keys):
    """Return the marker of a test whose cover has each value of each key."""
    return pytest.mark.cover.with_args(*keys)


def cover(cases, keys):
    """Return the positions of few cases that have every value of every key, in order; a key is a function of a case."""
    has = [{(number, key(case)) for number, key in enumerate(keys)} for case in cases]
    # among cases with equally many new values the place is drawn: the cover does not lean to the first ones
    heap = [(-len(each), zlib.crc32(f"{place}".encode(), MIXER), place) for place, each in enumerate(has)]
    heapq.heapify(heap)
    seen, chosen = set(), []
    while heap:
        gain, draw, place = heapq.heappop(heap)
        new = len(has[place] - seen)
        if new == -gain:
            chosen.append(place)
            seen |= has[place]
        elif new:
            heapq.heappush(heap, (-new, draw, place))
    return sorted(chosen)


def keys_of(strength, names):
    """Return a key for each group of so many parameters: their values, each known by its object."""
    groups = itertools.combinations(sorted(names), strength)
    return [lambda case, group=group: tuple(id(case[name]) for name in group) for group in groups]


def cover_of(cases, given):
    """Return the positions of the cover of cases, which are values by parameter; `given` is what the marker has."""
    if given[0] in (1, 2):
        return cover(cases, keys_of(given[0], cases[0]))
    return cover(cases, [lambda case, key=key: key(**case) for key in given])


def mark_for_soak(items):
    """Give the marker `soak` to each case of a grid that is outside of its cover."""
    grids = defaultdict(list)
    for item in items:
        if item.get_closest_marker("cover") is not None:
            grids[item.nodeid.partition("[")[0]].append(item)
    for cases in grids.values():
        kept = set(cover_of([item.callspec.params for item in cases], cases[0].get_closest_marker("cover").args))
        for place, item in enumerate(cases):
            if place not in kept:
                item.add_marker("soak")


def left_for_soak(items, expression):
    """Return the items that do not run, because the expression of `-m` does not name `soak`."""
    return [] if "soak" in expression else [item for item in items if item.get_closest_marker("soak")]

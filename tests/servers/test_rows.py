"""Rows by id: what is cut, sent, gathered and stepped equals the same said of the whole table."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rayps_client.errors import ConfigError
from torch.optim import SGD, Adagrad, Adam

from rayps.core.partition import cut_slices
from rayps.ps.protocol.rows import (
    KEPT_LISTS,
    IdLists,
    Ids,
    ShardRows,
    TableInVector,
    cut_shards,
    find_rows_here,
    step_rows,
    table_of,
    take_piece,
    unite_rows,
)
from rayps.tensors.flat import Layout
from rayps.tensors.optim import SlicedOptimizer

F64 = torch.float64
LAYOUT = Layout.of(
    [("head", torch.empty(4, dtype=F64)), ("table", torch.empty(10, 3, dtype=F64)), ("tail", torch.empty(5, dtype=F64))]
)
TABLE = table_of(LAYOUT)
ID_LISTS = st.lists(st.integers(0, 9), max_size=15)


def test_the_only_table_needs_no_name():
    assert TABLE == table_of(LAYOUT, "table") == TableInVector("table", 1, 4, 10, 3)
    deep = Layout.of([("a", torch.empty(2, 3, 4)), ("b", torch.empty(5, 6))])
    assert table_of(deep, "a") == TableInVector("a", 0, 0, 2, 12)
    for layout, name, words in (
        (deep, None, "without table=.*'a', 'b'"),
        (deep, "c", "no table 'c'.*'a', 'b'"),
        (Layout.of([("v", torch.empty(3))]), None, "none: a table is"),
        (LAYOUT, "head", "no table 'head'"),
    ):
        with pytest.raises(ConfigError, match=words):
            table_of(layout, name)


@given(ID_LISTS)
def test_ids_are_sorted_and_unique_once_and_duplicates_summed(given_ids):
    ids = Ids(torch.tensor(given_ids, dtype=torch.int64), TABLE)
    assert ids.unique.tolist() == sorted(set(given_ids))
    rows = torch.randn(len(given_ids), 3, dtype=F64)
    whole, law = torch.zeros(10, 3, dtype=F64), torch.zeros(10, 3, dtype=F64)
    half = len(ids.unique) // 2
    summed, room = ids.summed(rows), torch.empty(60, dtype=F64)
    whole[ids.unique] = torch.cat([take_piece(summed, 0, half), take_piece(summed, half, len(ids.unique), room)]).view(
        -1, 3
    )
    for place, row in zip(given_ids, rows, strict=True):
        law[place] += row
    assert torch.allclose(whole, law, atol=1e-14)
    assert torch.equal(ids.spread(whole[ids.unique]), whole[torch.tensor(given_ids, dtype=torch.int64)])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (torch.tensor([1.0]), "whole numbers"),
        (torch.tensor([[1]]), r"shape \(1, 1\)"),
        (torch.tensor([True]), "bool"),
        (torch.tensor([3, 10]), "no row 10 .* 0 to 9"),
        (torch.tensor([3, -1, 2]), "no row -1"),
    ],
)
def test_ids_that_are_none(wrong, words):
    with pytest.raises(ConfigError, match=words):
        Ids(wrong, TABLE)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_any_whole_numbers_will_do(dtype):
    assert Ids(torch.tensor([4, 2], dtype=dtype), TABLE).unique.tolist() == [2, 4]


@given(ID_LISTS, st.lists(st.integers(0, 10), max_size=4))
def test_each_shard_gets_the_rows_it_holds(given_ids, bounds):
    cuts = [0, *(4 + 3 * b for b in sorted(bounds)), LAYOUT.size]
    ranges = list(itertools.pairwise(cuts))
    ids, vector = Ids(torch.tensor(given_ids, dtype=torch.int64), TABLE), torch.arange(float(LAYOUT.size), dtype=F64)
    found = []
    for (lo, hi), (first, last) in zip(ranges, ids.cut(ranges), strict=True):
        if first < last:
            found.append(find_rows_here(LAYOUT, lo, hi, 1, ids.unique[first:last]).of(vector[lo:hi]))
    law = vector[4:34].view(10, 3)[ids.unique]
    assert torch.equal(torch.cat([*found, torch.empty(0, 3, dtype=F64)]), law)


@given(st.integers(1, 4), st.integers(1, 12), st.integers(1, 60), st.integers(1, 9))
def test_cuts_leave_small_rows_whole_and_shards_equal(shards, width, rows, before):
    layout = Layout.of([("head", torch.empty(before)), ("table", torch.empty(rows, width))])
    found = cut_shards(layout, shards)
    assert [lo for lo, _ in found] == [0, *(hi for _, hi in found[:-1])] and found[-1][1] == layout.size
    for (lo, hi), law in zip(found, cut_slices(layout.size, shards), strict=True):
        assert lo <= hi and law.start - width < lo <= law.start and law.stop - width < hi <= law.stop
        if width <= layout.size // shards // 16:
            table_of(layout).part(lo, hi)


def test_a_row_that_is_cut_between_servers_is_refused():
    with pytest.raises(ConfigError, match="rows of 'table' have 3 elements and are cut"):
        Ids(torch.tensor([1]), TABLE).cut([(0, 5), (5, 39)])


@pytest.mark.parametrize("ids", [[2, 1], [1, 1], [0], [9], [-1, 5]])
def test_a_shard_refuses_ids_that_are_not_sorted_or_not_its_own(ids):
    with pytest.raises(ValueError, match="sorted, unique and among the rows 1 to 5"):
        find_rows_here(LAYOUT, 7, 22, 1, torch.tensor(ids))
    with pytest.raises((ValueError, ConfigError), match=r"no parameter|no table"):
        find_rows_here(LAYOUT, 7, 22, len(ids) + 2, torch.tensor(ids))


def test_a_list_that_comes_again_is_found_and_the_oldest_makes_room():
    lists = IdLists(LAYOUT, [(0, 7), (7, 39)])

    def found(ids):
        listed = lists.find(ids, None)
        return listed.number, listed.new

    for i in range(KEPT_LISTS):
        assert found(torch.tensor([i, 5])) == (i, True)
    listed = lists.find(torch.tensor([0, 5]))
    assert (listed.number, listed.new, listed.cuts) == (0, False, [(0, 1), (1, 2)])
    assert [(i, rows.start, rows.ids.tolist()) for i, rows in listed.parts] == [(0, 4, [0]), (1, 0, [4])]
    given_ids = torch.tensor([9])
    assert found(given_ids) == (0, True)
    given_ids[0] = 8  # the caller's own memory may change
    assert found(given_ids) == (1, True)
    assert found(torch.tensor([9])) == (0, False)


@given(ID_LISTS.filter(bool), ID_LISTS.filter(bool))
def test_a_union_has_both(one, other):
    a, b = (ShardRows(1, 4, 3, torch.tensor(sorted(set(ids)))) for ids in (one, other))
    both = unite_rows([a, b])
    assert both.ids.tolist() == sorted({*one, *other})
    values = torch.randn(LAYOUT.size, dtype=F64)
    assert torch.equal(a.within(both).of(both.of(values).view(-1)), a.of(values))


FACTORIES = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "adagrad": lambda p: Adagrad(p, lr=0.1),
    "adagrad from 1": lambda p: Adagrad(p, lr=0.1, initial_accumulator_value=1.0),
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "decay": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adam": lambda p: Adam(p, lr=0.1, amsgrad=True),
    "groups": lambda p: SGD([{"params": p[:1], "lr": 9.0}, {"params": p[1:]}], lr=0.1, momentum=0.5),
}


def sliced(factory, lo=0, hi=LAYOUT.size):
    start = torch.randn(LAYOUT.size, dtype=F64, generator=torch.Generator().manual_seed(1))[lo:hi].clone()
    return SlicedOptimizer(FACTORIES[factory], LAYOUT, start, lo, hi)


@pytest.mark.parametrize("factory", ["sgd", "adagrad", "adagrad from 1"])
@settings(deadline=None, max_examples=30)
@given(st.lists(ID_LISTS, min_size=1, max_size=4))
def test_without_memory_of_its_own_a_step_of_rows_is_a_dense_step_with_zeros_elsewhere(factory, batches):
    one, law = sliced(factory), sliced(factory)
    for ids in batches:
        rows = find_rows_here(LAYOUT, 0, LAYOUT.size, 1, torch.tensor(sorted(set(ids)), dtype=torch.int64))
        grad = torch.randn(len(rows.ids), 3, dtype=F64)
        step_rows(one, rows, grad, 0.5)
        law.step(dense_of(rows, grad), 0.5)
    assert torch.equal(one.params, law.params)
    assert torch.equal(table_state(one).get("sum", torch.empty(0)), table_state(law).get("sum", torch.empty(0)))


@pytest.mark.parametrize("factory", FACTORIES)
@settings(deadline=None, max_examples=30)
@given(st.lists(ID_LISTS.filter(bool), min_size=1, max_size=4))
def test_a_step_of_rows_moves_them_as_a_dense_step_does_and_nothing_else(factory, batches):
    """The law by brute force: a dense step, after which everything but the rows is put back."""
    one, law = sliced(factory), sliced(factory)
    law.step(torch.ones(LAYOUT.size, dtype=F64))
    one.step(torch.ones(LAYOUT.size, dtype=F64))
    for ids in batches:
        rows = find_rows_here(LAYOUT, 0, LAYOUT.size, 1, torch.tensor(sorted(set(ids)), dtype=torch.int64))
        grad = torch.randn(len(rows.ids), 3, dtype=F64)
        step_rows(one, rows, grad)
        put_back(law, rows, grad)
        assert torch.equal(one.params, law.params)
        mine, theirs = table_state(one), table_state(law)
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            assert torch.equal(value, theirs[key]), key


@pytest.mark.parametrize("factory", FACTORIES)
def test_the_first_step_of_rows_makes_state_for_them_alone(factory):
    one = sliced(factory)
    rows = find_rows_here(LAYOUT, 0, LAYOUT.size, 1, torch.tensor([2, 7]))
    before = table_state(one).get("sum", torch.zeros(30, dtype=F64)).view(10, 3).clone()
    step_rows(one, rows, torch.ones(2, 3, dtype=F64))
    others = [i for i in range(10) if i not in (2, 7)]
    for key, value in table_state(one).items():
        if value.dim():
            assert torch.equal(value.view(10, 3)[others], before[others]), key
            assert (value.view(10, 3)[[2, 7]] != 0).all(), key


def dense_of(rows, grad):
    dense = torch.zeros(LAYOUT.size, dtype=F64)
    rows.put(dense, grad)
    return dense


def table_state(one):
    return {k: v for k, v in one.moments()["table"].items() if isinstance(v, torch.Tensor)}


def put_back(one, rows, grad):
    params, state = one.params.clone(), one.moments()
    one.step(dense_of(rows, grad))
    after, local = one.moments(), ShardRows(1, 0, 3, rows.ids)
    rows.put(params, rows.of(one.params))
    one.params.copy_(params)
    for key, now in after["table"].items():
        if isinstance(now, torch.Tensor) and now.dim():
            local.put(state["table"][key], local.of(now))
        else:
            state["table"][key] = now
    for entry in LAYOUT.entries:
        state[entry.name] = {
            k: v.view(entry.shape) if isinstance(v, torch.Tensor) and v.dim() else v
            for k, v in state[entry.name].items()
        }
    one.load(state, LAYOUT)

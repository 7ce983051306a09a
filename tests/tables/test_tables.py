"""Tables: pieces as they travel, the index, first values, the life of a row, Parquet, deltas."""

import dataclasses
import hashlib
import os
import subprocess
import sys
import threading
import warnings

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from rayps_client.errors import CheckpointError, ConfigError, DataError

from rayps.ps.protocol.space import SparseTable
from rayps.ps.tables import parquet, wire_format
from rayps.ps.tables.delta import Served, encode_delta, read_delta
from rayps.ps.tables.hash_index import ABSENT, FIRST, HashIndex
from rayps.ps.tables.initial_rows import draw_initial, quantile
from rayps.ps.tables.lookup import lookup_of
from rayps.ps.tables.pages import ROWS
from rayps.ps.tables.table_segment import TableSegment, check_table
from rayps.strategies.parameter_server import ParameterServer

TABLE = SparseTable("users", 4, 3, optimizer={"name": "adagrad", "lr": 0.1})
ASYNC = ParameterServer(staleness=None)


def ids(*values):
    return np.array(values, np.int64)


def one(table, workers=1, strategy=ASYNC, index=0):
    return TableSegment(table, index, strategy, workers)


def say(segment, step, batch, rank=0):
    """Push gradients of ones: id -> count."""
    keys = sorted(batch)
    rows = torch.ones(len(keys), segment.table.dim)
    counts = np.array([batch[k] for k in keys], np.uint32)
    return segment.push(rank, step, 1.0, wire_format.encode_push(ids(*keys), rows, counts))


def rows_of(segment, keys):
    return segment.store.read(keys, segment.store.find(keys))


def stored(segment):
    return segment.store.export().ids.tolist()


# wire


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("n", [0, 1, 7])
@pytest.mark.parametrize("read_only", [False, True])
def test_pieces_come_back(half, n, read_only):
    keys, rows = np.arange(n) * 3, torch.randn(n, 4)
    counts = np.arange(n, dtype=np.uint32) + 1
    piece = wire_format.encode_push(keys, rows, counts, half=half)
    assert len(piece) % 8 == 0
    sent = bytes(piece) if read_only else memoryview(piece)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        push = wire_format.decode_push(sent, TABLE)
    assert push.ids.tolist() == keys.tolist() and push.counts.tolist() == counts.tolist()
    assert torch.equal(push.rows, rows.to(torch.bfloat16).float() if half else rows)
    asked = wire_format.decode_pull(bytes(wire_format.encode_pull(keys, counts, half=half)), TABLE)
    assert asked.ids.tolist() == keys.tolist() and asked.half == half
    answer = wire_format.encode_rows(rows.numpy(), half)
    assert torch.equal(wire_format.decode_rows(bytes(answer), n, TABLE, half), push.rows)
    assert all(
        wire_format.decode_push(each, TABLE).ids.tolist() == [] for each in (b"", wire_format.encode_empty_push(TABLE))
    )


def test_a_push_is_cut_by_segments_and_nothing_is_lost():
    keys = np.unique(np.random.default_rng(3).integers(0, 2**63 - 1, 5000))
    rows = torch.randn(len(keys), 4)
    order, bounds = wire_format.split(keys, 3)
    found = {}
    for index in range(3):
        part = order[bounds[index] : bounds[index + 1]]
        push = wire_format.decode_push(wire_format.encode_push(keys[part], rows[part]), TABLE)
        assert (wire_format.bucket(push.ids, 3) == index).all()
        found |= zip(push.ids.tolist(), push.rows, strict=True)
    assert sorted(found) == keys.tolist()
    assert all(torch.equal(found[key], row) for key, row in zip(keys.tolist(), rows, strict=True))


def looked_up_by_torch(given, table):
    """The slow twin of `lookup_of`: torch.unique, then a stable split by segment."""
    unique, inverse, counts = torch.unique(given, sorted=True, return_inverse=True, return_counts=True)
    order, bounds = wire_format.split(unique.numpy(), table.segments)
    place = torch.empty(len(order), dtype=torch.int64)
    place[torch.from_numpy(order)] = torch.arange(len(order))
    return unique.numpy()[order], counts.numpy()[order], bounds, place[inverse], inverse, place


@pytest.mark.parametrize("segments", [1, 2, 5, 16])
@pytest.mark.parametrize("largest", [1, 3, 1000, 2**40, 2**63 - 1])  # the last does not fit beside a position
def test_a_lookup_equals_torch_unique(largest, segments):
    table = SparseTable("t", 4, segments)
    for seed, shape in enumerate([(0,), (1,), (7,), (3, 0, 2), (50, 4), (300,)]):
        given = torch.randint(0, largest, shape, generator=torch.Generator().manual_seed(seed))
        given = given.T if given.dim() == 2 else given  # not contiguous
        found = lookup_of(given, table)
        keys, counts, bounds, inverse, numbers, order = looked_up_by_torch(given, table)
        assert (found.ids.tolist(), found.counts.tolist()) == (keys.tolist(), counts.tolist())
        assert found.bounds == bounds
        assert torch.equal(found.inverse, inverse) and torch.equal(found.numbers, numbers)
        assert found.order is None if segments == 1 else torch.equal(found.order, order)


def test_buckets_are_even_whatever_the_ids():
    for keys in (np.arange(40_000), np.arange(40_000) * 4096, np.arange(40_000) + 2**62):
        held = np.bincount(wire_format.bucket(keys, 16), minlength=16)
        assert held.min() > 2500 * 0.88 and held.max() < 2500 * 1.12


def pieces_that_cannot_be():
    good = wire_format.encode_push(ids(1, 2), torch.ones(2, 4))
    nan = torch.ones(2, 4)
    nan[1, 2] = float("nan")
    yield "negative", wire_format.encode_push(ids(-5, 2), torch.ones(2, 4)), "id -5 is negative"
    yield "unsorted", wire_format.encode_push(ids(9, 2), torch.ones(2, 4)), "id 2 follows 9"
    yield "twice", wire_format.encode_push(ids(2, 2), torch.ones(2, 4)), "strictly ascending"
    yield "dim", wire_format.encode_push(ids(1, 2), torch.ones(2, 5)), "have 5 elements; the table's dim is 4"
    yield "nan", wire_format.encode_push(ids(1, 2), nan), "the gradient of id 2 is not finite"
    yield "torn", good[:40], "too short|expected"
    yield "short", good[:10], "at least 24"
    yield "pull", wire_format.encode_pull(ids(1, 2)), "expected a push, which has rows"
    yield "half", wire_format.encode_push(ids(1, 2), nan, half=True), "not finite"


@pytest.mark.parametrize("name, piece, said", [pytest.param(*each, id=each[0]) for each in pieces_that_cannot_be()])
def test_bad_pieces_are_refused_and_change_nothing(name, piece, said):
    segment = one(TABLE)
    say(segment, 0, {1: 1})
    before = segment.dump()
    for call in (segment.check, segment.push):
        with pytest.raises(ConfigError, match=said) as found:
            call(0, 1, 1.0, bytes(piece))
        assert "'users'" in str(found.value)
    assert segment.dump() == before
    with pytest.raises(ConfigError, match="id -1 is negative"):
        segment.pull(0, wire_format.encode_pull(ids(-1)))
    assert segment.dump() == before


@pytest.mark.parametrize(
    "change, said",
    [
        ({"dim": 0}, "dim is 0"),
        ({"dtype": "int8"}, "give float32 or float64"),
        ({"optimizer": {"name": "lamb"}}, "sgd, adagrad or adam"),
        ({"optimizer": {"name": "sgd", "rate": 1}}, "options are lr"),
        ({"optimizer": {"name": "adam", "betas": [1, 2]}}, "betas"),
        ({"optimizer": {"name": "sgd", "lr": float("nan")}}, "at least 0"),
        ({"init": {"name": "xavier"}}, "init is"),
        ({"policy": {"evict": "random", "capacity": 1 << 20}}, "give lru or lfu"),
        ({"policy": {"evict": "lru"}}, "give capacity"),
        ({"policy": {"capacity": 10}}, "bytes a row"),
        ({"policy": {"capacity": 1 << 12, "floor": 10_000}}, "floor 10000 rows"),
        ({"policy": {"size": 10}}, "options are admit"),
        ({"policy": {"probability": 0}}, "above 0"),
        ({"policy": {"ttl": 0}}, "ttl is 0"),
    ],
)
def test_what_a_table_cannot_be_is_said(change, said):
    check_table(TABLE)
    with pytest.raises(ConfigError, match=said) as found:
        check_table(dataclasses.replace(TABLE, **change))
    assert "'users'" in str(found.value)


# index


@pytest.mark.parametrize("seed", range(4))
def test_the_index_is_a_dict(seed):
    chance = np.random.default_rng(seed)
    index, twin = HashIndex(), {}
    for turn in range(60):
        keys = np.unique(chance.integers(0, 3000, chance.integers(1, 400)))
        slots = index.find(keys)
        assert [slot if slot != ABSENT else None for slot in slots.tolist()] == [twin.get(k) for k in keys.tolist()]
        if chance.random() < 0.6:
            new = keys[slots == ABSENT]
            given = index.insert(new)
            assert given.min(initial=FIRST) >= FIRST
            twin |= zip(new.tolist(), given.tolist(), strict=True)
        else:
            gone = keys[slots != ABSENT]
            index.delete(gone)
            for key in gone.tolist():
                del twin[key]
        assert len(index) == len(twin) == len(set(twin.values())) == len(index.slots())
        if turn == 30:
            other, before = index.branch(), dict(twin)
    assert index.top < 3000 + FIRST  # slots are given again
    assert {k: s for k, s in zip(range(3000), other.find(np.arange(3000)).tolist(), strict=True) if s} == before


# first values


def test_first_values_depend_on_nothing_but_seed_and_id():
    everyone = np.arange(10_000)
    whole = draw_initial(TABLE, everyone)
    some = np.random.default_rng(0).permutation(everyone)
    assert np.array_equal(draw_initial(TABLE, some), whole[some])
    assert not np.array_equal(draw_initial(dataclasses.replace(TABLE, seed=1), everyone), whole)
    assert np.array_equal(draw_initial(dataclasses.replace(TABLE, name="b", segments=9), everyone), whole)
    assert np.array_equal(draw_initial(dataclasses.replace(TABLE, dim=3), everyone), whole[:, :3])


def test_first_values_are_these_bits_on_every_machine():
    kinds = [{"name": "normal", "scale": 0.01}, {"name": "uniform", "scale": 0.05}, {"name": "constant", "value": 2}]
    said = [
        hashlib.sha256(
            draw_initial(dataclasses.replace(TABLE, init=kind, dim=5), np.arange(5000)).tobytes()
        ).hexdigest()
        for kind in kinds
    ]
    assert [each[:12] for each in said] == BITS


BITS = ["ffdd400c7b13", "ccbf6b428669", "45b8359b1c1c"]


def test_normal_and_uniform_are_what_they_say():
    table = dataclasses.replace(TABLE, dim=16, dtype="float64", init={"name": "normal", "scale": 2.0})
    values = draw_initial(table, np.arange(40_000)).reshape(-1) / 2
    assert abs(values.mean()) < 0.005 and abs(values.std() - 1) < 0.005
    assert abs((values**4).mean() - 3) < 0.05 and abs((values < -1).mean() - 0.158655) < 0.002
    rows = values.reshape(-1, 16)
    assert np.abs(np.corrcoef(rows.T) - np.eye(16)).max() < 0.025 and abs((rows[1:] * rows[:-1]).mean()) < 0.005
    p = (np.arange(1 << 15) + 0.5) / (1 << 16)
    assert np.allclose(quantile(p), torch.special.ndtri(torch.from_numpy(p)).numpy(), atol=1e-8)
    uniform = draw_initial(dataclasses.replace(table, init={"name": "uniform", "scale": 3.0}), np.arange(40_000))
    assert abs(uniform.mean()) < 0.01 and abs(uniform.std() - 3**0.5) < 0.01 and np.abs(uniform).max() < 3


# the life of a row


def test_a_row_is_let_in_at_its_third_use_and_duplicates_are_uses():
    table = dataclasses.replace(TABLE, policy={"admit": 3})
    segment = one(table)
    first = draw_initial(table, ids(5))
    say(segment, 0, {5: 1, 6: 3})
    say(segment, 1, {5: 1})
    assert stored(segment) == [6] and segment.life.candidates == 1
    assert np.array_equal(rows_of(segment, ids(5)), first)  # its gradients were dropped
    say(segment, 2, {5: 2})
    assert stored(segment) == [5, 6] and segment.life.candidates == 0
    assert not np.array_equal(rows_of(segment, ids(5)), first)
    assert segment.store.export().life[:, 0].tolist() == [4, 3]  # those before it was let in too


def test_chance_lets_in_the_same_rows_everywhere():
    table = dataclasses.replace(TABLE, policy={"probability": 0.25})
    at_once, slowly = one(table), one(table)
    say(at_once, 0, dict.fromkeys(range(4000), 1))
    for step in range(4):
        say(slowly, step, dict.fromkeys(range(3999 - step, -1, -4), 1))
    assert stored(at_once) == stored(slowly)
    assert abs(len(stored(at_once)) - 1000) < 120
    other = one(dataclasses.replace(table, seed=1))
    say(other, 0, dict.fromkeys(range(4000), 1))
    assert stored(other) != stored(at_once)


def limited(rows, **policy):
    segment = one(dataclasses.replace(TABLE, segments=1))
    return one(dataclasses.replace(TABLE, segments=1, policy={"capacity": rows * segment.store.row_bytes, **policy}))


def test_the_least_used_row_goes_by_raw_counts():
    """A row that comes five times in one batch is used more than one that comes once in each of three batches."""
    segment = limited(2, evict="lfu")
    say(segment, 0, {1: 5, 2: 1})
    say(segment, 1, {2: 1})
    say(segment, 2, {2: 1})
    say(segment, 3, {3: 4})
    assert stored(segment) == [1, 3] and segment.life.evicted == 1
    assert [(version, gone.tolist()) for version, gone in segment.life.log] == [(4, [2])]
    assert np.array_equal(rows_of(segment, ids(2)), draw_initial(segment.table, ids(2)))  # it begins anew


def test_the_row_used_longest_ago_goes():
    segment = limited(2, evict="lru")
    say(segment, 0, {1: 5, 2: 1})
    say(segment, 1, {2: 1})
    say(segment, 2, {3: 1})
    assert stored(segment) == [2, 3]
    say(segment, 3, {})
    segment.pull(0, wire_format.encode_pull(ids(2), np.ones(1, np.uint32)))  # with counts: a use
    segment.pull(0, wire_format.encode_pull(ids(3)))
    say(segment, 4, {4: 1})
    assert stored(segment) == [2, 4]


def test_time_to_live_keeps_the_floor():
    """However old all rows are, a floor of them stays: the ones used last. Also where all grow old at once."""
    for floor, left, together in ((0, [9], False), (3, [4, 5, 9], False), (3, [4, 5, 9], True)):
        segment = one(dataclasses.replace(TABLE, segments=1, policy={"ttl": 8, "floor": floor}))
        for step in range(5):
            keys = [step + 1] if not together else range(1, 6) if step == 0 else []
            say(segment, step, dict.fromkeys(keys, 1))
        for step in range(5, 40):
            say(segment, step, {9: 1})
        assert stored(segment) == left


def test_a_step_of_the_time_to_live_is_a_step_of_every_worker():
    segment = TableSegment(dataclasses.replace(TABLE, policy={"ttl": 10}), 0, ASYNC, 4)
    say(segment, 0, {1: 1})
    for turn in range(1, 39):
        say(segment, turn // 4, {}, rank=turn % 4)
    assert stored(segment) == [1]
    for turn in range(39, 52):
        say(segment, turn // 4, {}, rank=turn % 4)
    assert stored(segment) == []


@pytest.mark.parametrize(
    "policy",
    [{"evict": "lfu", "admit": 2}, {"evict": "lru", "ttl": 12, "floor": 5}, {"probability": 0.5, "evict": "lfu"}],
)
@pytest.mark.parametrize("memory", [None, 1])
def test_copies_decide_the_same(policy, memory):
    """Whatever lies on disk here, and in memory there."""
    chance = np.random.default_rng(7)
    segment, copy = limited(150, **policy), limited(150, **policy, memory=memory)
    batches = [
        {int(k): int(c) for k, c in zip(chance.zipf(1.1, 30) % 900, chance.integers(1, 5, 30), strict=True)}
        for _ in range(151)
    ]
    for step, batch in enumerate(batches[:-1]):
        segment.pull(0, wire_format.encode_pull(ids(*sorted(batches[step + 1]))))  # ahead: what it finds may be evicted
        changes = say(segment, step, batch)
        if step % 3 == 0:
            changes += segment.pull(0, wire_format.encode_pull(ids(*sorted(batch)), np.ones(len(batch), np.uint32)))[2]
        if step == 70:
            copy = limited(150, **policy, memory=memory)
            copy.load(segment.dump())
        else:
            for change in changes:
                copy.replay(change)
    assert copy.dump() == segment.dump()
    assert segment.life.evicted > 0 and segment.rows <= 150


# memory that branches share


def test_a_branch_shares_pages_until_it_writes():
    table = dataclasses.replace(TABLE, segments=1)
    segment = one(table)
    say(segment, 0, dict.fromkeys(range(ROWS * 40), 1))
    alone = segment.nbytes
    branch, before = segment.branch(), segment.dump()
    given = branch.store._pages
    used = given._top
    say(branch, 0, {3: 1, 4: 1})
    assert given._top == used + 1  # one page was copied
    assert segment.dump() == before
    assert segment.nbytes < alone
    other = segment.branch()
    say(segment, 1, {70: 1})
    assert other.dump() != segment.dump() and rows_of(other, ids(70)).tolist() != rows_of(segment, ids(70)).tolist()
    del other
    segment.store.delete(np.arange(ROWS * 40))
    assert stored(branch) == list(range(ROWS * 40))
    del segment
    assert (given.users[: given._top] <= 1).all()
    del branch
    assert not given.users.any()


# on disk


def test_rows_on_disk_come_back_and_branches_have_their_own():
    table = dataclasses.replace(TABLE, segments=1)
    small = dataclasses.replace(table, policy={"memory": 100 * one(table).store.row_bytes})
    plain, segment = one(table), one(small)
    chance = np.random.default_rng(11)
    for step in range(60):
        batch = {int(k): 1 for k in chance.integers(0, 1000, 50)}
        for each in (plain, segment):
            say(each, step, batch)
    assert segment.store.rows_on_disk > segment.rows * 0.8
    assert segment.dump() == plain.dump()
    everyone = wire_format.encode_pull(np.arange(1000))
    assert bytes(segment.pull(0, everyone)[0]) == bytes(plain.pull(0, everyone)[0]) == bytes(segment.read(everyone))
    branch = segment.branch()
    say(branch, 0, dict.fromkeys(range(1000), 1))
    assert segment.dump() == plain.dump()
    again = one(small)
    again.load(plain.dump())
    assert again.dump() == plain.dump() and again.store.rows_on_disk
    with pytest.raises(ConfigError, match="another `folder`"):
        say(one(dataclasses.replace(small, policy={"memory": 1, "folder": "/nowhere"})), 0, dict.fromkeys(range(99), 1))


LARGE = """
import resource, sys
import numpy as np, torch
from rayps.ps.protocol.space import SparseTable
from rayps.strategies.parameter_server import ParameterServer
from rayps.ps.tables import wire_format
from rayps.ps.tables.table_segment import TableSegment
table = SparseTable("large", 256, 1, policy={"memory": 8 << 20} if sys.argv[1] == "disk" else {})
segment = TableSegment(table, 0, ParameterServer(staleness=None), 1)
said = dict(line.split(":", 1) for line in open("/proc/self/status"))
held = int(said["VmData"].split()[0]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (held + (72 << 20),) * 2)
try:
    for step in range(60):
        ids = np.arange(step * 1000, step * 1000 + 1000)
        segment.push(0, step, 1.0, wire_format.encode_push(ids, np.ones((1000, 256), np.float32)))
except (MemoryError, OSError):
    print("no memory after", step)
else:
    row = segment.read(wire_format.encode_pull(np.array([7])))
    print(segment.rows, segment.store.rows_on_disk > 50_000, wire_format.decode_rows(row, 1, table).mean() < -0.05)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a limit of the memory that may be written to")
def test_a_table_is_larger_than_memory():
    """125 MB of rows where 72 may be had: in 8 of them it goes on, and without the disk it does not."""
    for where, wanted in (("disk", "60000 True tensor(True)"), ("memory", "no memory after")):
        run = subprocess.run(
            [sys.executable, "-c", LARGE, where],
            capture_output=True,
            text=True,
            timeout=100,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert run.stdout.startswith(wanted), run.stdout + run.stderr


def test_branches_are_served_by_threads_of_their_own():
    """They share memory, which grows and is copied under the other's feet."""
    table = dataclasses.replace(TABLE, segments=1)
    first = one(table)
    say(first, 0, dict.fromkeys(range(0, 3000, 3), 1))
    several, alone = [first.branch() for _ in range(3)], [first.branch() for _ in range(3)]
    alone = [again(table, each) for each in alone]

    def work(segment, seed):
        chance = np.random.default_rng(seed)
        for step in range(60):
            batch = {int(k): 1 for k in chance.integers(0, 6000, 200)}
            segment.pull(0, wire_format.encode_pull(ids(*sorted(batch))))
            say(segment, step, batch)

    threads = [threading.Thread(target=work, args=(each, seed)) for seed, each in enumerate(several)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, each in enumerate(alone):
        work(each, seed)
    assert [each.dump() for each in several] == [each.dump() for each in alone]


def again(table, segment):
    """The same with memory of its own."""
    found = one(table)
    found.load(segment.dump())
    return found


# Parquet


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize("segments", [1, 3, 5])
def test_parquet_loads_on_any_number_of_segments(tmp_path, optimizer, segments):
    table = dataclasses.replace(TABLE, optimizer={"name": optimizer}, policy={"admit": 2})
    held = [one(table, workers=2, index=index) for index in range(3)]
    counts = {k: 1 + k % 3 for k in range(500)}
    for index, segment in enumerate(held):
        say(segment, 0, {k: c for k, c in counts.items() if wire_format.bucket(ids(k), 3)[0] == index})
    parquet.write(tmp_path, table, (segment.dump() for segment in held))
    again = dataclasses.replace(table, segments=segments)
    loaded = {index: TableSegment(again, index, ASYNC, 2) for index in range(segments)}
    for index, state in parquet.read(tmp_path, again, workers=2):
        loaded[index].load(state)
    everyone = np.arange(500)
    for old, new in ((held, 3), (list(loaded.values()), segments)):
        where = wire_format.bucket(everyone, new)
        for index, segment in enumerate(old):
            say(segment, 1, dict.fromkeys(everyone[where == index].tolist(), 1))
    rows = [
        {
            k: (r.tolist(), u)
            for s in several
            for c in [s.store.export()]
            for k, r, u in zip(c.ids.tolist(), c.rows, c.life[:, 0].tolist(), strict=True)
        }
        for several in (held, loaded.values())
    ]
    assert rows[0] == rows[1] and len(rows[0]) == 500
    if segments == 3:
        assert [s.dump() for s in loaded.values()] == [s.dump() for s in held]
    assert all(s.marks() == {0: 2 if segments == 3 else 1, 1: 0} or segments != 3 for s in loaded.values())


def test_parquet_is_read_by_anybody_and_refused_where_it_does_not_fit(tmp_path):
    segment = one(dataclasses.replace(TABLE, segments=1))
    say(segment, 0, {7: 2, 9: 1})
    parquet.write(tmp_path, segment.table, [segment.dump()])
    found = pq.read_table(tmp_path / "rows-00000.parquet")
    assert found["id"].to_pylist() == [7, 9] and found["uses"].to_pylist() == [2, 1]
    assert np.allclose(found["sum"].to_pylist(), 1.0)
    assert found["row"].to_pylist()[0] == rows_of(segment, ids(7))[0].tolist()
    for wrong in ({"dim": 5}, {"optimizer": {"name": "adam"}}):
        with pytest.raises(CheckpointError, match="expected"):
            list(parquet.read(tmp_path, dataclasses.replace(segment.table, **wrong), 1))
    with pytest.raises(CheckpointError, match="no files"):
        list(parquet.read(tmp_path / "nowhere", segment.table, 1))
    with pytest.raises(CheckpointError, match=r"cannot (read|decode)"):
        segment.load(segment.dump()[:60])


# deltas


def test_a_serving_system_follows_by_deltas():
    chance = np.random.default_rng(5)
    segment, served = limited(30, evict="lru"), Served()
    for step in range(200):
        say(segment, step, {int(k): 1 for k in chance.integers(0, 80, 6)})
        if step % 7 == 0:
            served.apply(encode_delta(segment, served.versions.get(0, 0)))
            columns = segment.store.export()
            assert sorted(served.rows[0]) == columns.ids.tolist()
            for key, row in zip(columns.ids.tolist(), columns.rows, strict=True):
                assert np.array_equal(served.rows[0][key], row)
    small = read_delta(encode_delta(segment, segment.version - 1))
    assert len(small.ids) <= 6 and not small.whole
    assert len(read_delta(encode_delta(segment, segment.version)).ids) == 0
    segment.life.log.clear()
    segment.life.known_from = segment.version - 1  # what was evicted before is forgotten
    assert read_delta(encode_delta(segment, segment.version - 5)).whole
    with pytest.raises(DataError, match="request a delta since version"):
        Served().apply(encode_delta(segment, segment.version))
    with pytest.raises(DataError, match=r"cannot (read|decode)"):
        read_delta(b"nonsense")

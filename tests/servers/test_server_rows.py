"""Rows by id over real links: equal to the same pushed densely, whatever the shards, the way and the order."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from rayps_client.errors import ConfigError
from torch.optim import SGD, Adagrad

import rayps
from rayps.cluster.local import LocalCluster
from rayps.ps.protocol.pieces import Extent, KnownRows, make_rows_piece
from rayps.ps.protocol.rows import ShardRows
from rayps.tensors.flat import Layout

ROWS, WIDTH = 64, 3
F64 = torch.float64
OPTIMIZERS = {"sgd": lambda p: SGD(p, lr=0.1), "adagrad": lambda p: Adagrad(p, lr=0.1)}


SERVERS = {"fixed": {}, "group": {"replicas": 0}, "copies": {"replicas": 1}}  # which servers, as options


def group(servers="fixed", **options):
    if servers == "copies":
        options["shards"] = options.get("shards", 1) + 1
    chance = torch.Generator().manual_seed(5)
    params = {
        "head": torch.zeros(5, dtype=F64),
        "table": torch.randn(ROWS, WIDTH, dtype=F64, generator=chance),
        "tail": torch.zeros(4, dtype=F64),
    }
    return rayps.ServerGroup(params, cluster=LocalCluster(), timeout=60.0, **SERVERS[servers], **options)


def batch(seed, n=20):
    chance = random.Random(seed)
    ids = torch.tensor([chance.randrange(ROWS) for _ in range(n)])
    return ids, torch.randn(n, WIDTH, dtype=F64, generator=torch.Generator().manual_seed(seed))


def dense(ids, rows):
    table = torch.zeros(ROWS, WIDTH, dtype=F64).index_add_(0, ids, rows)
    return {"head": torch.zeros(5, dtype=F64), "table": table, "tail": torch.zeros(4, dtype=F64)}


def every(work, count):
    with ThreadPoolExecutor(count) as pool:
        return [call.result(60) for call in [pool.submit(work, rank) for rank in range(count)]]


@pytest.mark.parametrize(
    ("servers", "resident"), [("fixed", True), ("fixed", False), ("group", True), ("copies", True)]
)
@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rows_are_what_a_dense_push_of_them_gives(shards, servers, resident, optimizer):
    factory = OPTIMIZERS[optimizer]
    with group(servers, shards=shards, staleness=None, optimizer=factory) as shared, group(optimizer=factory) as law:
        one, slow = shared.join(0, resident=resident), law.join(0)
        for seed in (1, 2, 1, 3, 1):  # some ids come again
            ids, rows = batch(seed)
            one.push(ids, rows)
            slow.push(dense(ids, rows))
            whole = slow.pull()
            assert torch.allclose(one.pull(ids), whole["table"][ids], atol=1e-12)
            out = torch.empty(len(ids), WIDTH, dtype=F64)
            assert one.pull(ids, out=out).data_ptr() == out.data_ptr()
            assert torch.equal(out, one.pull(ids))
        assert one.step == 5
        for name, value in one.pull().items():
            assert torch.allclose(value, whole[name], atol=1e-12), name


@pytest.mark.parametrize("servers", SERVERS)
@pytest.mark.parametrize("staleness", [0, 1, None])
@pytest.mark.parametrize("mixed", [False, True])
def test_several_workers(servers, staleness, mixed):
    """Each pushes rows of its own, and one of them perhaps all parameters; in step the mean is weighted."""
    steps, weights = 6, [1.0, 2.0, 3.0]

    def pushed(rank, step):
        ids, rows = batch(10 * step + rank, n=rank * 9)  # the first one has no rows at all
        return ids.to(torch.int64), rows

    def work(rank):
        one = shared.join(rank)
        for step in range(steps):
            ids, rows = pushed(rank, step)
            if mixed and rank == 2 and step % 2:
                one.push(dense(ids, rows), weight=weights[rank])
            else:
                one.push(ids, rows, weight=weights[rank])
            one.pull(ids)
        return one.pull() if staleness == 0 else None

    with group(servers, shards=2, staleness=staleness, workers=3, optimizer=OPTIMIZERS["sgd"]) as shared:
        start = shared.join(0).read()
        every(work, 3)
        final = shared.join(0).read()
    share = [w / sum(weights) for w in weights] if staleness == 0 else [1 / 3] * 3
    for name, value in final.items():
        law = start[name] - 0.1 * sum(share[r] * dense(*pushed(r, s))[name] for s in range(steps) for r in range(3))
        assert torch.allclose(value, law, atol=1e-12), name


@pytest.mark.parametrize("servers", SERVERS)
def test_push_pull_of_rows(servers):
    with group(servers, shards=2, optimizer=OPTIMIZERS["sgd"]) as shared:
        one = shared.join(0)
        ids, rows = batch(3)
        before = one.pull()["table"]
        assert torch.allclose(one.push_pull(ids, rows), (before - 0.1 * dense(ids, rows)["table"])[ids], atol=1e-12)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda one: one.pull(torch.tensor([ROWS])), f"no row {ROWS}"),
        (lambda one: one.push(torch.tensor([-1]), torch.ones(1, WIDTH)), "no row -1"),
        (lambda one: one.push(torch.tensor([1]), torch.ones(1, WIDTH + 1)), rf"\[1, {WIDTH}\]"),
        (lambda one: one.push(torch.tensor([1, 2]), torch.ones(1, WIDTH)), rf"\[2, {WIDTH}\]"),
        (lambda one: one.pull(torch.tensor([1]), table="head"), "no table 'head'.*'table'"),
        (lambda one: one.pull(torch.tensor([1.0])), "whole numbers"),
        (lambda one: one.pull(torch.tensor([1]), out=torch.empty(WIDTH)), "out is torch.float32"),
    ],
)
@pytest.mark.parametrize("servers", ["fixed", "group"])
def test_what_cannot_be_is_refused_and_changes_nothing(call, words, servers):
    with group(servers, shards=2) as shared:
        one = shared.join(0)
        before = one.read()
        with pytest.raises(ConfigError, match=words):
            call(one)
        assert one.step == 0
        for name, value in one.read().items():
            assert torch.equal(value, before[name])


@pytest.mark.parametrize("servers", SERVERS)
def test_a_row_that_would_be_cut_between_servers_is_refused(servers):
    words = "rows of '' have 9 elements and are cut between servers"
    with (
        rayps.ServerGroup(torch.zeros(2, 9), shards=4, cluster=LocalCluster(), **SERVERS[servers]) as shared,
        pytest.raises(ConfigError, match=words),
    ):
        shared.join(0).pull(torch.tensor([0]))


def test_rows_go_through_shared_memory_and_give_the_bits_that_messages_give():
    """Between processes of one host neither ids nor rows are sent as messages, and what is pulled is the same."""
    seen, sent = [], []
    for resident in (True, False):
        with group(shards=2, staleness=None, optimizer=OPTIMIZERS["adagrad"]) as shared:
            one = shared.join(0, resident=resident)
            one.pull(batch(1)[0], table="table")
            lines = list(one._server.session._connections.open.values())
            before = sum(line.link.bytes_sent + line.link.bytes_received for line in lines)
            for seed in (1, 2, 1, 3, 4, 5, 6, 1):
                ids, rows = batch(seed)
                one.push(ids, rows, table="table")
                seen.append(one.pull(ids.flip(0), table="table").clone())
            sent.append(sum(line.link.bytes_sent + line.link.bytes_received for line in lines) - before)
            seen.append(one.pull()["table"].clone())
            one.close()
    half = len(seen) // 2
    assert all(torch.equal(a, b) for a, b in zip(seen[:half], seen[half:], strict=True))
    offers = 2000  # of memory, once
    assert sent[0] < offers < sent[1]


def test_ids_that_come_again_are_compared_and_not_checked_again():
    layout = Layout.of([("head", torch.empty(2)), ("table", torch.empty(100, 2))])
    extent, known, chance = Extent(layout, 2, 202), KnownRows(3), random.Random(3)
    lists = [sorted(chance.sample(range(100), 8)) for _ in range(4)]
    lists.append([*lists[0][:1], *range(50, 53), *lists[0][4:]])  # may differ in few places only
    lists[-1] = sorted(set(lists[-1]))

    def read(ids, seen):
        return extent.read_pull(memoryview(make_rows_piece(ShardRows(1, 0, 2, torch.tensor(ids)), 800)), seen)

    for _ in range(200):
        ids = chance.choice(lists)
        assert torch.equal(read(ids, known).ids, read(ids, None).ids)
    assert read(lists[0], known) is read(lists[0], known)
    for other in lists[1:4]:
        again = read(lists[0], known)
        read(other, known)
    assert read(lists[0], known) is again  # it was used between the others
    for wrong in ([5, 4], [4, 4], [99, 100], [-1, 3]):
        for _ in range(2):
            with pytest.raises(ValueError, match="sorted, unique"):
                read(wrong, known)

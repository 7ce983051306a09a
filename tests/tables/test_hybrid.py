"""The hybrid: what workers with tables learn is what one process learns; what a prefetch may and may not change."""

import importlib
import threading
import time

import numpy as np
import pytest
import torch
from rayps_client.errors import ConfigError, LinkError
from small_work import SEEN, Watched, kinds
from torch import nn

import rayps
from rayps.cluster.local import LocalCluster
from rayps.comm.link.socket_link import as_bytes
from rayps.core.strategy.topology import servers_of
from rayps.ps.client.session import SegmentReplies
from rayps.ps.protocol.messages import GroupMessage
from rayps.ps.protocol.space import Space
from rayps.ps.tables import embedding
from rayps.ps.tables.embedding import Embedding, EmbeddingBag
from rayps.ps.tables.table_segment import TableSegment
from rayps.strategies.catalogue import parse, wire
from rayps.strategies.hybrid import Hybrid
from rayps.strategies.parameter_server import ParameterServer

ROWS = 60


# ---------------------------------------------------------------------------------------------- the strategy


def test_the_parts_of_a_hybrid():
    found = Hybrid(servers=3, staleness=2, replicas=1, compression="bf16", bucket_mb=1)
    assert found.tables == ParameterServer(shards=3, staleness=2, replicas=1)
    assert found.ring == rayps.AllReduce(compression="bf16", bucket_mb=1)
    assert servers_of(found) is None and found.topology.in_step  # its dense part is
    assert Hybrid().tables.staleness is None
    both = Hybrid(dense=rayps.AllReduce(bucket_mb=1), sparse=ParameterServer(shards=3, staleness=2), servers=5)
    assert both == Hybrid(servers=3, staleness=2, bucket_mb=1)
    assert Hybrid(sparse=ParameterServer(staleness=None)) == Hybrid()


def test_its_text_and_wire_forms():
    (phase,) = parse("hybrid:servers=3,staleness=2,replicas=1,prefetch=false")
    assert phase.strategy == Hybrid(servers=3, staleness=2, replicas=1, prefetch=False)
    assert parse(wire([phase]))[0].strategy == phase.strategy
    assert parse(wire(parse(Hybrid())))[0].strategy == Hybrid()
    assert rayps.AllReduce().tables is None


@pytest.mark.parametrize(
    "options, text",
    [
        ({"servers": 0}, "servers is 0"),
        ({"servers": True}, "servers is True"),
        ({"staleness": -1}, "staleness is -1"),
        ({"replicas": 2}, "replicas is 2"),
        ({"prefetch": 3}, "prefetch is 3"),
        ({"compression": "zip"}, "compression"),
        ({"dense": ParameterServer()}, "dense is ParameterServer"),
        ({"sparse": rayps.AllReduce()}, "sparse is AllReduce"),
    ],
)
def test_options_that_cannot_be(options, text):
    with pytest.raises(ConfigError, match=text):
        Hybrid(**options)


# ---------------------------------------------------------------------------------------------- servers of this process


class Servers:
    """The segments of a space, for several threads; each worker's session is `session(rank)`."""

    def __init__(self, tables, workers, staleness):
        self.space = Space("job", 1, workers, ParameterServer(staleness=staleness), tables=tables)
        self.changed = threading.Condition()
        self.segments = [
            TableSegment(*self.space.table_of(index), self.space.strategy, workers)
            for index in range(self.space.segments)
        ]

    def session(self, rank):
        return TalkOf(self, rank)

    @property
    def rows(self):
        return sum(segment.rows for segment in self.segments)


class TalkOf:
    timeout = 10.0

    def __init__(self, servers, rank):
        self.servers, self.rank, self.asked, self.readers, self.slow = servers, rank, [], [], 0.0
        self.broken, self.gate = None, threading.Event()
        self.gate.set()

    def reader(self):
        self.readers.append(TalkOf(self.servers, self.rank))
        self.readers[-1].slow, self.readers[-1].broken = self.slow, self.broken
        return self.readers[-1]

    def allocate(self, size):
        return np.empty(size, np.uint8)

    def exchange(self, kind, pieces, *, step=0, weight=0.0, outputs=None):
        self.asked.append((kind, sorted(pieces)))
        time.sleep(self.slow)
        assert self.gate.wait(self.timeout)
        if self.broken:
            raise self.broken
        segments, found = self.servers.segments, {}
        with self.servers.changed:
            for index, piece in pieces.items():
                view = memoryview(as_bytes(piece))
                if kind is GroupMessage.PUSH:
                    segments[index].push(self.rank, step, weight, view)
                    self.servers.changed.notify_all()
                    continue
                if kind is GroupMessage.PULL:
                    may = self.servers.changed.wait_for(lambda i=index: segments[i].may_pull(self.rank), self.timeout)
                    assert may, f"rank {self.rank} waits for {segments[index].laggards()}"
                value = segments[index].read(view)
                if outputs is not None and index in outputs:
                    as_bytes(outputs[index])[:] = as_bytes(value)
                else:
                    found[index] = value
        return SegmentReplies(found, 0, 0, 0)

    def hang_up(self):
        pass

    def close(self):
        pass


class Model(nn.Module):
    def __init__(self, segments=4, dtype="float64", rule="adagrad:lr=0.1"):
        super().__init__()
        options = {"optimizer": rule, "dtype": dtype, "segments": segments}
        self.users = Embedding(5, "users", seed=1, **options)
        self.films = Embedding(5, "films", seed=2, **options)
        self.genres = EmbeddingBag(5, "genres", mode="mean", **options)

    def forward(self, x):
        return (self.users(x[:, 0]) * (self.films(x[:, 1]) + self.genres(x[:, 2:]))).sum(1)


def lookups(batch):
    return {"users": batch.x[:, 0], "films": batch.x[:, 1], "genres": batch.x[:, 2:]}


def batches(count, size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        rayps.data.Batch(
            torch.randint(0, ROWS, (size, 5), generator=generator),
            torch.randn(size, generator=generator, dtype=torch.float64),
            size,
        )
        for _ in range(count)
    ]


def loss(model, batch):
    return ((model(batch.x) - batch.y) ** 2).mean()


def values(model):
    x = torch.arange(ROWS)
    with torch.no_grad():
        return torch.cat([model.users(x), model.films(x), model.genres(x[:, None])])


def alone(given, **options):
    """The law: one process, a table of its own."""
    model = Model(**options)
    embedding.local(model)
    for batch in given:
        loss(model, batch).backward()
        embedding.step(model)
    return model


def work(servers, rank, given, told=None, **options):
    """One worker's rounds, as `Worker` runs them; its model, still bound."""
    model = Model(**options)
    session = servers.session(rank)
    tables = embedding.bind(model, session, servers.space, told)
    for step, batch in enumerate(given):
        tables.begin(step)
        if step == 0:
            tables.ahead(batch)
        tables.ahead(given[step + 1] if step + 1 < len(given) else None)
        if batch.size:
            loss(model, batch).backward()
        tables.push(step, float(batch.size))
    tables.settle()
    tables.close()
    return model, tables


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("staleness", [0, 2, None])
@pytest.mark.parametrize("rule", ["sgd:lr=0.3", "adagrad:lr=0.1", "adam:lr=0.01"])
def test_one_worker_is_one_process_to_the_bit(rule, staleness, dtype):
    given = [rayps.data.Batch(b.x, b.y.to(getattr(torch, dtype)), b.size) for b in batches(6, 8)]
    options = {"rule": rule, "dtype": dtype}
    servers = Servers(embedding.tables_of(Model(**options)), 1, staleness)
    model, _ = work(servers, 0, given, **options)
    assert torch.equal(values(model), values(alone(given, **options)))


@pytest.mark.parametrize("told", [None, lookups], ids=["plain", "prefetch"])
def test_workers_in_step_are_the_union_of_their_batches(told):
    sizes = [5, 3, 0]  # of the ranks; means are weighted by them, and one has run out of rows
    whole = batches(5, sum(sizes))
    parts = [[], [], []]
    for batch in whole:
        for rank, (x, y) in enumerate(zip(batch.x.split(sizes), batch.y.split(sizes), strict=True)):
            parts[rank].append(rayps.data.Batch(x, y, len(x)))
    servers = Servers(embedding.tables_of(Model()), 3, 0)
    found = {}
    threads = [
        threading.Thread(target=lambda r=r: found.update({r: work(servers, r, parts[r], told)[0]}), daemon=True)
        for r in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    law = values(alone(whole))
    for rank in range(3):
        assert (values(found[rank]) - law).abs().max() < 1e-12
    assert torch.equal(values(found[0]), values(found[2]))


# ---------------------------------------------------------------------------------------------- prefetch


def test_in_step_a_prefetch_changes_nothing_and_pulls_all_tables_at_once():
    given = batches(6, 8)
    servers = Servers(embedding.tables_of(Model()), 1, 0)
    model, tables = work(servers, 0, given, lookups)
    assert torch.equal(values(model), values(alone(given)))
    pulls = [segments for kind, segments in tables.session.asked if kind is GroupMessage.PULL]
    assert len(pulls) == 6 + 3  # one for each round, and three of `values`
    assert not tables.session.readers


def test_what_was_pulled_ahead_is_one_round_older():
    given = batches(6, 8)
    servers = Servers(embedding.tables_of(Model(rule="sgd:lr=0.3")), 1, None)
    model = Model(rule="sgd:lr=0.3")
    tables = embedding.bind(model, servers.session(0), servers.space, lookups)
    tables.ahead(given[0])
    for step, batch in enumerate(given):
        tables.begin(step)
        tables.ahead(given[step + 1] if step + 1 < len(given) else None)
        loss(model, batch).backward()
        tables.push(step, 8.0)
    tables.settle()
    tables.close()
    assert not any(kind is GroupMessage.PULL for kind, _ in tables.session.asked)
    assert torch.allclose(values(model), delayed(given), rtol=0, atol=1e-12)
    assert not torch.allclose(values(model), values(alone(given, rule="sgd:lr=0.3")), rtol=0, atol=1e-6)


def delayed(given):
    """Gradients at the rows of the round before: w[t+1] = w[t] - lr g(w[t-1]), written out."""
    now = values(Model(rule="sgd:lr=0.3"))
    before = now.clone()
    for batch in given:
        rows = before.clone().requires_grad_()
        x = batch.x
        found = (rows[x[:, 0]] * (rows[ROWS + x[:, 1]] + rows[2 * ROWS + x[:, 2:]].mean(1))).sum(1)
        ((found - batch.y) ** 2).mean().backward()
        before, now = now, now - 0.3 * rows.grad
    return now


def test_what_was_not_foretold_is_pulled_now():
    given = batches(4, 8)
    servers = Servers(embedding.tables_of(Model()), 1, 0)
    model, _ = work(servers, 0, given, lambda batch: {"users": batch.x[:4, 0], "films": batch.x[:, [1, 0]]})
    assert torch.equal(values(model), values(alone(given)))


class Shifted(Model):
    """Writes to its batch before it looks it up."""

    def forward(self, x):
        x += 1
        return super().forward(x)


def test_ids_that_change_after_they_were_told_are_looked_up_as_they_are():
    given = batches(3, 8)
    servers = Servers(embedding.tables_of(Model()), 1, 0)
    model = Shifted()
    tables = embedding.bind(model, servers.session(0), servers.space, lookups)
    law, x = Model(), given[0].x
    embedding.local(law)
    for step in range(3):  # the same memory again and again
        tables.begin(step)
        tables.ahead(given[0])
        before = x.clone()
        model(x).sum().backward()
        tables.push(step, 8.0)
        law(before + 1).sum().backward()
        embedding.step(law)
    tables.close()
    assert torch.equal(values(model), values(law))


def test_strings_may_be_told():
    work = Servers(embedding.tables_of(Embedding(3, "planes")), 1, 0)
    module = Embedding(3, "planes")
    tables = embedding.bind(module, work.session(0), work.space, lambda batch: {"planes": batch.x})
    tables.begin(0)
    tables.ahead(rayps.data.Batch(["N1", "N2", "N1"], None, 3))
    assert torch.equal(module(["N1", "N2", "N1"]), Embedding(3, "planes")(["N1", "N2", "N1"]))
    assert tables._ahead._coming[0].rows["planes"].shape == (2, 3)
    tables.close()


def test_how_much_of_the_pull_is_hidden_is_measured():
    given = batches(2, 8)
    servers = Servers(embedding.tables_of(Model()), 1, None)
    session = servers.session(0)
    session.slow = 0.05
    model = Model()
    tables = embedding.bind(model, session, servers.space, lookups)
    tables.ahead(given[0])
    tables._ahead._coming[0].call.done.wait(10)
    tables.begin(0)
    loss(model, given[0])
    point = tables.point()
    assert point["pull"] >= 0.05 and point["pull_hidden"] >= 0.9 * 0.05
    assert tables.point() == pytest.approx({"pull": 0.0, "pull_hidden": 0.0}, abs=1e-9)
    tables.begin(1)
    loss(model, given[1])  # was not told: nothing is hidden
    point = tables.point()
    assert point["pull"] >= 3 * 0.05 and point["pull_hidden"] == pytest.approx(0.0, abs=1e-9)
    tables.close()


def test_what_a_prefetch_meets_is_said_where_the_rows_are_needed():
    servers = Servers(embedding.tables_of(Model()), 1, None)
    session = servers.session(0)
    session.broken = LinkError("server-1 is gone", peer="server-1")
    model, batch = Model(), batches(1, 4)[0]
    tables = embedding.bind(model, session, servers.space, lookups)
    tables.ahead(batch)
    tables.begin(0)
    with pytest.raises(LinkError, match="server-1 is gone"):
        loss(model, batch)
    tables.close()


def test_a_push_leaves_while_the_worker_goes_on_and_what_it_meets_is_said_by_the_next():
    given = batches(3, 4)
    servers = Servers(embedding.tables_of(Model()), 1, None)
    session = servers.session(0)
    model = Model()
    tables = embedding.bind(model, session, servers.space, lookups)
    tables.begin(0)
    tables.ahead(given[0])
    loss(model, given[0]).backward()
    session.gate.clear()
    tables.push(0, 4.0)
    assert not tables._sent.done.is_set()
    session.gate.set()
    assert torch.equal(values(model), values(alone(given[:1])))  # whoever asks now waits for it
    session.broken = LinkError("server-1 is gone", peer="server-1")
    tables.begin(1)
    tables.ahead(given[1])
    loss(model, given[1]).backward()
    tables.push(1, 4.0)
    with pytest.raises(LinkError, match="server-1 is gone"):
        tables.settle()
    tables.close()


def test_a_push_names_every_segment():
    servers = Servers(embedding.tables_of(Model()), 1, 0)
    model, tables = work(servers, 0, batches(1, 1))
    assert tables.session.asked[-1] == (GroupMessage.PUSH, list(range(12)))
    assert all(segment.version == 1 for segment in servers.segments)
    before = servers.rows
    values(model)
    assert servers.rows == before  # an evaluation makes none


def test_a_space_with_other_tables_is_refused():
    servers = Servers(embedding.tables_of(Model()), 1, 0)
    with pytest.raises(ConfigError, match="table 'users' has optimizer"):
        embedding.bind(Model(rule="sgd"), servers.session(0), servers.space)
    with pytest.raises(ConfigError, match="there is no table 'cities'"):
        embedding.bind(Embedding(2, "cities"), servers.session(0), servers.space)


# ---------------------------------------------------------------------------------------------- whole runs


class Net(nn.Module):
    """A dense part over the tables' rows, and a weight of its own."""

    def __init__(self, rule):
        super().__init__()
        self.tables = Model(rule=rule)
        self.dense = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).double()

    def forward(self, x):
        return self.tables(x) + self.dense(self.tables.users(x[:, 0]))[:, 0]


class Films(rayps.Workload):
    def __init__(self, told=False, rule="adagrad:lr=0.1", n=50, batch=4, net=Net):
        self.told, self.rule, self.n, self.batch, self.net = told, rule, n, batch, net

    def model(self):
        return self.net(self.rule)

    def data(self):
        generator = torch.Generator().manual_seed(3)
        x = torch.randint(0, ROWS, (self.n, 5), generator=generator)
        return rayps.data.tensors(x, torch.sin(x[:, 0].double()) + torch.cos(x[:, 1].double()), batch_size=self.batch)

    def loss(self, model, batch):
        return ((model(batch.x) - batch.y) ** 2).mean()

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.05, momentum=0.9)

    def lookups(self, batch):
        return lookups(batch) if self.told else {}


def both(model):
    return torch.cat([values(model.tables).reshape(-1), *(p.detach().reshape(-1) for p in model.dense.parameters())])


def plain(workload, workers=1, epochs=2):
    """One process, no platform, the union of everyone's batches."""
    torch.manual_seed(0)
    model = workload.model()
    embedding.local(model)
    optimizer = workload.optimizer(list(model.parameters()))
    data, losses = workload.data(), []
    for epoch in range(epochs):
        dealt = [list(data.batches(rank=r, size=workers, seed=0, epoch=epoch)) for r in range(workers)]
        for parts in zip(*dealt, strict=True):
            whole = [batch for batch in parts if batch.size]
            union = rayps.data.Batch(
                torch.cat([b.x for b in whole]), torch.cat([b.y for b in whole]), sum(b.size for b in whole)
            )
            optimizer.zero_grad()
            loss = workload.loss(model, union)
            loss.backward()
            optimizer.step()
            embedding.step(model)
            losses.append(loss.item())
    return model, losses


def run(workload, strategy, workers, **options):
    cluster = LocalCluster()
    try:
        return rayps.train(
            workload,
            strategy=strategy,
            workers=workers,
            cluster=cluster,
            progress=False,
            timeout=60,
            **{"epochs": 2, **options},
        )
    finally:
        cluster.close()


SERVED = [
    "hybrid:servers=2,staleness=0",
    "hybrid:servers=2,staleness=0,replicas=1",
    "parameter_server:shards=2,staleness=0,replicas=1",
]


@pytest.mark.parametrize("told", [False, True], ids=["plain", "prefetch"])
@pytest.mark.parametrize("strategy", SERVED)
def test_a_run_of_one_worker_is_one_process_to_the_bit(strategy, told):
    result = run(Films(told), strategy, 1)
    model, losses = plain(Films(told))
    assert result.history["loss"].to_pylist() == losses
    assert torch.equal(both(result.model()), both(model))


@pytest.mark.parametrize("strategy", SERVED)
def test_a_run_in_step_is_the_union_of_the_batches(strategy):
    result = run(Films(told=True), strategy, 3)
    model, losses = plain(Films(), 3)
    assert (both(result.model()) - both(model)).abs().max() < 1e-12
    assert result.history["loss"].to_pylist() == pytest.approx(losses, abs=1e-12)
    with torch.no_grad():  # what was evaluated is the model of the end
        data = Films().data()
        assert result.metrics["loss"] == pytest.approx(Films().loss(model, data).item(), abs=1e-12)


def uses_of(result):
    """How often the users' rows were learnt, by their own counts."""
    client = result.model().tables.users._client()
    return int(client.session.segments[client.first].store.export().life[:, 0].sum())


@pytest.mark.parametrize(
    "strategy",
    [
        "hybrid:servers=2",
        "hybrid:servers=2,staleness=2,prefetch=false",
        "parameter_server:shards=2,staleness=none,replicas=0",
    ],
)
def test_a_run_out_of_step_learns_and_applies_each_push_once(strategy):
    result = run(Films(told=True, n=300, batch=10), strategy, 3, epochs=6)
    losses = result.history["loss"].to_pylist()
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
    assert uses_of(result) == 6 * 300 * 2  # twice for each row of the data
    assert "rayps-ahead" not in [thread.name for thread in threading.enumerate()]
    if strategy == "hybrid:servers=2":
        assert {"pull", "pull_hidden"} <= set(result.history.column_names)


class Slow(Films):
    def loss(self, model, batch):
        importlib.import_module("small_work").SEEN["films"] += 1
        time.sleep(0.004)
        return super().loss(model, batch)


@pytest.mark.parametrize("victim", [("ServerActor", "server-1"), ("WorkerActor", 1)], ids=["server", "worker"])
def test_a_death_amid_prefetches_costs_no_push_and_adds_none(victim):
    SEEN.clear()
    cluster = Watched()
    try:
        cluster.kill_when("films", 40, victim)
        result = rayps.train(
            Slow(told=True, n=200),
            strategy="hybrid:servers=3,replicas=1",
            workers=2,
            epochs=3,
            cluster=cluster,
            progress=False,
            timeout=60,
        )
    finally:
        cluster.close()
    assert uses_of(result) == 3 * 200 * 2
    assert ("restarted" in kinds(result)) == (victim[0] == "WorkerActor")


def test_all_reduce_has_no_place_for_tables():
    with pytest.raises(ConfigError, match=r"sparse tables.*hybrid|sparse tables.*Hybrid"):
        run(Films(), "all_reduce", 2)


class Wrong(nn.Module):
    def __init__(self, rule):
        super().__init__()
        self.a, self.b, self.out = Embedding(4, "users"), Embedding(8, "users"), nn.Linear(4, 1)


def test_a_table_of_two_dims_is_found_before_training():
    with pytest.raises(ConfigError, match="table 'users' has dim 4 in one module and 8"):
        run(Films(net=Wrong), "hybrid", 2)

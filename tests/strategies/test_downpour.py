"""Downpour against a plain loop of the paper's client and server, its pushes counted under deaths, its warm start."""

import importlib
import random
import threading
import time
from contextlib import closing

import pytest
import static_servers
import torch
from process_cluster import ProcessCluster
from rayps_client.errors import ConfigError, PeerTimeout
from small_work import OPTIMIZERS, Small, Watched, distance, kinds, plain, train
from test_exactly_once import Tally, died
from torch import nn

import rayps
from rayps import AllReduce, Downpour, ParameterServer, Pipeline, TensorParallel
from rayps.core.job.repeated_pushes import Ledger
from rayps.core.metrics import Rounds
from rayps.core.strategy.strategy import Phase
from rayps.ps.group import start
from rayps.runtime.checks.preflight import preflight
from rayps.strategies.catalogue import parse
from rayps.strategies.job import JobSpec

EXACT = 1e-12
ORDER: list[int] = []  # rows in the order in which they were learnt, by `Ordered`


def appendix(work, n_push, n_fetch, adagrad=None, epochs=1):
    """The appendix's algorithm for one replica, as plain torch: what the servers hold at the end."""
    torch.manual_seed(0)
    server, client = work.model(), work.model()
    stepper = OPTIMIZERS[work.kind](list(server.parameters()))
    if adagrad is not None:
        stepper = torch.optim.Adagrad(server.parameters(), lr=adagrad)
    local = OPTIMIZERS[work.kind](list(client.parameters()))
    accrued = [torch.zeros_like(p) for p in server.parameters()]
    batches = [b for epoch in range(epochs) for b in work.data().batches(rank=0, size=1, seed=0, epoch=epoch)]
    for step, batch in enumerate(batches):
        if step % n_fetch == 0:
            client.load_state_dict(server.state_dict())
        local.zero_grad()
        ((client(batch.x) - batch.y) ** 2).mean().backward()
        for a, p in zip(accrued, client.parameters(), strict=True):
            a += p.grad
        if (step + 1) % n_push == 0 or step + 1 == len(batches):
            for a, p in zip(accrued, server.parameters(), strict=True):
                p.grad = a.clone()
                a.zero_()
            decays = [group.get("weight_decay", 0) for group in stepper.param_groups]
            for group, decay in zip(stepper.param_groups, decays, strict=True):
                if not group.get("decoupled_weight_decay"):  # a is the sum of so many gradients
                    group["weight_decay"] = decay * (step % n_push + 1)
            stepper.step()
            for group, decay in zip(stepper.param_groups, decays, strict=True):
                group["weight_decay"] = decay
        if (step + 1) % n_fetch:  # the next fetch takes the place of what is not stepped here
            local.step()
    return server


@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_replica_that_pushes_and_fetches_each_step_is_serial(shards, optimizer):
    work = Small(n=40, optimizer=optimizer)
    result = train(work, Downpour(shards=shards), workers=1, epochs=2)
    model, losses, _ = plain(work, epochs=2)
    assert distance(result.model(), model) < (EXACT if optimizer != "sgd" else 1e-300)
    assert result.history.column("loss").to_pylist() == pytest.approx(losses, abs=EXACT)


@pytest.mark.parametrize("n", [2, 3, 7, 50])
@pytest.mark.parametrize("shards", [1, 3])
def test_one_replica_of_plain_sgd_is_serial_also_where_it_talks_seldom(n, shards):
    work = Small(n=60)  # 20 rounds an epoch: no multiple of 3, 7 or 50
    model, losses, _ = plain(work, epochs=2)
    for strategy in (Downpour(n_push=n, n_fetch=n, shards=shards), Downpour(n_push=1, n_fetch=n, shards=shards)):
        result = train(work, strategy, workers=1, epochs=2)
        assert distance(result.model(), model) < EXACT
        assert result.history.column("loss").to_pylist() == pytest.approx(losses, abs=EXACT)


@pytest.mark.parametrize(
    ("n_push", "n_fetch", "shards"), [(1, 1, 5), (3, 1, 1), (1, 4, 2), (2, 3, 5), (5, 2, 2), (4, 4, 1)]
)
@pytest.mark.parametrize(("optimizer", "adagrad"), [("momentum", None), ("adam", None), ("sgd", 0.1), ("adam", 0.05)])
def test_one_replica_is_the_appendix_step_by_step(shards, n_push, n_fetch, optimizer, adagrad):
    work = Small(n=51, optimizer=optimizer)
    strategy = Downpour(n_push=n_push, n_fetch=n_fetch, shards=shards, adagrad=adagrad)
    result = train(work, strategy, workers=1, epochs=2)
    assert distance(result.model(), appendix(work, n_push, n_fetch, adagrad, epochs=2)) < EXACT


SPLITS = [
    (Pipeline(stages=2, micro_batches=1), 2),
    (Pipeline(stages=3, micro_batches=2), 3),
    (TensorParallel(size=2), 2),
    (Pipeline(stages=2, micro_batches=2, stage=TensorParallel(size=2)), 4),
]


@pytest.mark.parametrize(
    ("replica", "workers", "shards"),
    [(*split, shards) for split, shards in zip(SPLITS, (2, 5, 1, 2), strict=True)],
    ids=lambda given: getattr(given, "name", given),
)
def test_one_replica_is_serial_however_it_is_split(replica, workers, shards):
    work = Small(n=33)
    result = train(work, Downpour(shards=shards, replica=replica), workers=workers, epochs=2)
    model, losses, _ = plain(work, epochs=2)
    assert distance(result.model(), model) < EXACT
    assert result.history.column("loss").to_pylist() == pytest.approx(losses, abs=EXACT)
    seldom = Downpour(n_push=2, n_fetch=3, adagrad=0.1, shards=shards, replica=replica)
    result = train(work, seldom, workers=workers, epochs=2)
    assert distance(result.model(), appendix(work, 2, 3, 0.1, epochs=2)) < EXACT


def test_replicas_of_several_workers_go_on_after_a_death():
    """All ranks of a replica begin at one position, whatever each part's shards have heard."""
    work = Small(n=160, pause=0.003, tag="downpour-replica-death")
    cluster = Watched()
    cluster.kill_when(work.tag, 60, ("WorkerActor", 1))
    strategy = Downpour(shards=2, n_push=3, n_fetch=2, replica=Pipeline(stages=2, micro_batches=1))
    result = train(work, strategy, cluster, workers=4, epochs=2, checkpoint_every=4)
    assert died(result)
    assert result.snapshot.round == result.history.num_rows == 54


def test_several_replicas_learn():
    work = Small(n=96, batch=4)
    for strategy in (Downpour(), Downpour(n_push=3, n_fetch=2, shards=2, adagrad=0.1, warm_start=4)):
        result = train(work, strategy, workers=3, epochs=6)
        assert result.metrics["loss"] == pytest.approx(plain(work, 3, epochs=6)[2][-1], rel=0.5)
        assert sum(result.history.column("samples").to_pylist()) == 6 * 96


def test_adagrad_alone_steps_on_the_servers():
    """Rate and sum are Adagrad's whatever the workload's optimizer is; its state does not confuse the next phase."""
    work = Small(n=30, optimizer="adam")
    result = train(work, Downpour(adagrad=0.05, shards=2), workers=1, epochs=1)
    assert {frozenset(state) for state in result.snapshot.moments.values()} == {frozenset(("step", "sum"))}
    own = [AllReduce(), ParameterServer(shards=2)]
    for after in own:
        phases = [(1, after), (1, Downpour(adagrad=0.05, shards=3)), (1, after)]
        result = train(work, phases, workers=1)
        assert all("exp_avg" in state for state in result.snapshot.moments.values())
    result = train(work, [(1, Downpour(adagrad=0.05)), (1, Downpour(adagrad=0.05, shards=4))], workers=1)
    assert distance(result.model(), appendix(work, 1, 1, 0.05, epochs=2)) < EXACT


@pytest.mark.parametrize(("n_push", "n_fetch"), [(1, 1), (3, 1), (1, 4), (4, 6)])
def test_the_bytes_are_the_formula(n_push, n_fetch):
    work = Small(n=36)  # 12 rounds
    result = train(work, Downpour(n_push=n_push, n_fetch=n_fetch), workers=1, epochs=1)
    size = 8 * sum(p.numel() for p in work.model().parameters())
    assert sum(result.history.column("bytes").to_pylist()) == size * (12 // n_push + 12 // n_fetch)


# ------------------------------------------------------------------------------------------- each push once


def tally(strategy, arm, epochs=2, every=3):
    cluster = ProcessCluster(arm)
    try:
        result = rayps.train(
            Tally(1),
            strategy=strategy,
            workers=3,
            epochs=epochs,
            cluster=cluster,
            checkpoint_every=every,
            progress=False,
            timeout=60.0,
            max_failures=9,
        )
    finally:
        cluster.close()
    return result, result.snapshot.params


@pytest.mark.parametrize("every", [1, 3, 5])
@pytest.mark.parametrize(("n_push", "n_fetch"), [(1, 1), (2, 3), (5, 2), (100, 100)])
def test_every_gradient_is_in_a_push_once(n_push, n_fetch, every):
    work = Tally(1)
    result = train(
        work, Downpour(n_push=n_push, n_fetch=n_fetch, shards=2), workers=3, epochs=2, checkpoint_every=every
    )
    assert torch.equal(result.snapshot.params, torch.full_like(result.snapshot.params, 2.0))
    assert result.snapshot.positions == [24, 24, 24]


PLACES = [
    (kind, place)
    for kind, places in {
        "ShardActor": [
            "host: applied, not forwarded",
            "host: acknowledged, not saved",
            "host: state kept, not collected",
        ],
        "WorkerActor": ["session: between servers", "session: sent, not answered", "session: acknowledged"],
    }.items()
    for place in places
]


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("kind", "place", "n_push"), [*((*each, 3) for each in PLACES), (*PLACES[0], 1), (*PLACES[-1], 1)]
)
def test_a_death_leaves_every_gradient_in_once(kind, place, n_push):
    """A worker's replacement repeats the steps that were not pushed; a shard's hears the pushes again."""
    visit = 2 if "kept, not collected" in place else 5
    result, slots = tally(Downpour(n_push=n_push, n_fetch=2, shards=2), {(kind, 1): f"{place}={visit}"})
    assert [event["lost"] for event in died(result)] == [[f"{kind[:-5].lower()}-1"]]
    assert "restarted" not in kinds(result)
    assert torch.equal(slots, torch.full_like(slots, 2.0)), slots
    # what the dead one had not told of is not counted; what its replacement makes again is not counted twice
    assert 60 <= sum(result.history.column("samples").to_pylist()) <= 72
    assert not [event for event in result.events if event["kind"] == "lost"]


@pytest.mark.chaos
@pytest.mark.parametrize("round_", range(3))
def test_several_deaths(round_):
    seed = random.getrandbits(32)
    print("seed", seed)
    chance = random.Random(seed)
    arm = {
        (kind, i): f"{place}={chance.randint(2, 9)}"
        for kind, i, place in (
            ("ShardActor", 0, "host: applied, not forwarded"),
            ("ShardActor", 1, "host: acknowledged, not saved"),
            ("WorkerActor", chance.randrange(3), "session: sent, not answered"),
        )
    }
    result, slots = tally(Downpour(n_push=chance.choice([1, 2, 3]), n_fetch=chance.choice([1, 2]), shards=2), arm)
    assert len(died(result)) >= 2, (arm, result.events)
    lost = sum(event["pushes"] for event in result.events if event["kind"] == "lost")
    assert slots.max() <= 2, arm
    assert (2 - slots).sum() <= lost, (arm, result.events)


def test_the_others_go_on_while_a_dead_replica_is_replaced():
    work = Small(n=120, pause=0.004, tag="downpour-death")
    cluster = Watched()
    cluster.kill_when(work.tag, 40, ("WorkerActor", 1))
    result = train(work, Downpour(n_push=4, n_fetch=3, shards=2), cluster, workers=3, epochs=2)
    assert "restarted" not in kinds(result)
    assert [e["lost"] for e in result.events if e["kind"] == "replaced"] == [["worker-1"]]
    assert cluster.spawned["WorkerActor", 1] == 2 and cluster.spawned["WorkerActor", 0] == 1
    assert 200 < sum(result.history.column("samples").to_pylist()) <= 240  # rounds made again count once


@pytest.mark.parametrize("at", [7, 9])
def test_a_resumed_run_goes_on_whatever_was_pushed_last(tmp_path, at):
    work = Small(n=60)
    whole = train(work, Downpour(n_push=3, n_fetch=3, shards=2), workers=1, steps=20)
    train(work, Downpour(n_push=3, n_fetch=3, shards=2), workers=1, steps=at, checkpoint=tmp_path)
    resumed = train(work, Downpour(n_push=4, n_fetch=4), workers=1, steps=20, checkpoint=tmp_path, resume=True)
    assert distance(resumed.model(), whole.model()) < EXACT


def test_a_round_that_is_made_again_is_not_reported_again():
    rounds = Rounds(2, 1, "downpour")
    point = {
        "kind": "round",
        "epoch": 0,
        "loss": 1.0,
        "samples": 3,
        "seconds": 0.1,
        "compute": 0.1,
        "wait": 0.0,
        "move": 0.0,
        "bytes": 8,
        "lead": 0,
    }
    points = [{**point, "round": r, "rank": k} for r, k in [(0, 0), (0, 1), (1, 0), (1, 1), (2, 1)]]
    assert [p["samples"] for p in rounds.add(points)] == [6, 6]
    again = [{**point, "round": r, "rank": 1} for r in (1, 2, 3)]
    assert rounds.add(again) == []
    assert [(p["round"], p["samples"]) for p in rounds.add([{**point, "round": 2, "rank": 0}])] == [(2, 6)]
    assert [p["round"] for p in rounds.flush()] == [3]


def test_a_push_that_stands_for_several_steps():
    ledger = Ledger([0, 4])
    assert ledger.fill(0, 2) and ledger.marks == {0: 3, 1: 4}
    assert not ledger.fill(0, 2) and not ledger.fill(1, 3)
    assert ledger.fill(0, 5000) and ledger.marks[0] == 5001
    assert Ledger.from_json(ledger.to_json()) == ledger


# ------------------------------------------------------------------------------------ on a server group


class GroupTally(Small):
    """Each gradient, of one row of the data, adds one to that row's slot; several segments' slots, and servers'."""

    def model(self):
        return Slots()

    def data(self):
        return rayps.data.tensors(torch.arange(60), torch.zeros(60), batch_size=1)

    def loss(self, model, batch):
        importlib.import_module("small_work").SEEN[self.tag] += 1
        time.sleep(self.pause)
        return -model.slots[batch.x].sum()

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=1.0)

    def evaluate(self, model, batch):
        return {}


class Slots(nn.Module):
    def __init__(self):
        super().__init__()
        self.slots = nn.Parameter(torch.zeros(60, dtype=torch.float64))


@pytest.fixture
def site():
    cluster = Watched()
    with start(cluster, "common", servers=3, replicas=1, detached=False) as group:
        yield cluster, group
    cluster.close()


@pytest.mark.parametrize(("n_push", "n_fetch", "adagrad"), [(1, 1, None), (2, 3, None), (4, 4, 0.1)])
def test_on_a_server_group_one_replica_is_the_appendix_to_the_bit_of_fixed_servers(site, n_push, n_fetch, adagrad):
    work, strategy = Small(n=51, optimizer="adam"), Downpour(n_push=n_push, n_fetch=n_fetch, adagrad=adagrad)
    fixed = train(work, strategy, workers=1, epochs=2)
    found = train(work, strategy, site[0], workers=1, epochs=2, server_group="common", checkpoint_every=3)
    assert distance(found.model(), fixed.model()) == 0.0
    assert distance(found.model(), appendix(work, n_push, n_fetch, adagrad, epochs=2)) < EXACT


@pytest.mark.parametrize(("replica", "workers"), SPLITS, ids=lambda given: getattr(given, "name", given))
def test_on_a_server_group_one_replica_is_that_of_fixed_servers_however_it_is_split(site, replica, workers):
    cluster, group = site
    work = Small(n=33)
    for options in ({}, {"n_push": 2, "n_fetch": 3, "adagrad": 0.1}):
        strategy = Downpour(replica=replica, **options)
        fixed = train(work, strategy, workers=workers, epochs=2)
        found = train(work, strategy, cluster, workers=workers, epochs=2, server_group="common", checkpoint_every=5)
        assert torch.equal(found.snapshot.params, fixed.snapshot.params)
        assert found.history.column("round").to_pylist() == fixed.history.column("round").to_pylist()
    assert group.facts()["spaces"] == []


@pytest.mark.parametrize(("n_push", "n_fetch", "every"), [(1, 1, 5), (3, 2, 1), (3, 2, 5), (100, 100, 1)])
def test_on_a_server_group_every_gradient_is_in_a_push_once_whoever_dies(site, n_push, n_fetch, every):
    cluster, _ = site
    work = GroupTally(pause=0.01, tag=f"downpour-group-{n_push}-{n_fetch}-{every}")
    cluster.kill_when(work.tag, 20, ("ServerActor", "server-1"))
    cluster.kill_when(work.tag, 60, ("WorkerActor", 1))
    strategy = Downpour(n_push=n_push, n_fetch=n_fetch)
    result = train(work, strategy, cluster, workers=3, epochs=6, server_group="common", checkpoint_every=every)
    assert torch.equal(result.snapshot.params, torch.full((60,), 6.0, dtype=torch.float64))
    assert {"server_lost", "replaced"} <= set(kinds(result)) and "restarted" not in kinds(result)


def test_on_a_server_group_without_copies_pushes_of_several_rounds_are_said_again():
    cluster = Watched()
    with start(cluster, "common", servers=2, replicas=0, detached=False):
        work = GroupTally(pause=0.01, tag="downpour-group-lost")
        cluster.kill_when(work.tag, 120, ("ServerActor", "server-1"))
        strategy = Downpour(n_push=3, n_fetch=2)
        result = train(work, strategy, cluster, workers=3, epochs=6, server_group="common", checkpoint_every=5)
    cluster.close()
    assert torch.equal(result.snapshot.params, torch.full((60,), 6.0, dtype=torch.float64))
    assert "restored" in kinds(result)


def test_on_a_server_group_a_warm_start_is_one_replica_alone(site):
    ORDER.clear()
    work = Ordered(n=72, batch=1, jitter=0.002, tag="downpour-group-warm")
    train(work, Downpour(warm_start=5, n_push=2), site[0], workers=3, epochs=1, server_group="common")
    first = {int((b.x * 72).round()) for b in work.data().batches(rank=0, size=3, seed=0, epoch=0)}
    alone = next(i for i, row in enumerate(ORDER) if row not in first)
    assert sorted(ORDER) == list(range(72))
    assert 6 <= alone < 24


# ------------------------------------------------------------------------------------------- warm start


class Ordered(Small):
    """Says which rows it learns, in the order of learning."""

    def model(self):
        return nn.Linear(1, 1).double()

    def data(self):
        return rayps.data.tensors(
            torch.arange(self.n, dtype=torch.float64)[:, None] / self.n,
            torch.zeros(self.n, 1, dtype=torch.float64),
            batch_size=self.batch,
        )

    def loss(self, model, batch):
        if torch.is_grad_enabled():
            order = importlib.import_module("test_downpour").ORDER
            order.extend((batch.x * self.n).round().long().flatten().tolist())
        return super().loss(model, batch)


@pytest.mark.parametrize(("warm", "n_push"), [(0, 1), (5, 1), (6, 4), (24, 1), (1000, 3)])
def test_a_warm_start_is_one_replica_alone(warm, n_push):
    ORDER.clear()
    work = Ordered(n=72, batch=1, jitter=0.002, tag="downpour-warm")
    train(work, Downpour(warm_start=warm, n_push=n_push), workers=3, epochs=1, timeout=10)
    first = {int((b.x * 72).round()) for b in work.data().batches(rank=0, size=3, seed=0, epoch=0)}
    alone = next((i for i, row in enumerate(ORDER) if row not in first), len(ORDER))
    pushed = -(-min(warm, 24) // n_push) * n_push
    assert sorted(ORDER) == list(range(72))
    assert alone >= min(pushed, 24)
    if warm < 10:
        assert alone < 24  # and then the others too


def test_a_warm_start_whose_replica_dies_goes_on():
    work = Small(n=90, batch=1, pause=0.004, tag="downpour-warm-death")
    cluster = Watched()
    cluster.kill_when(work.tag, 8, ("WorkerActor", 0))
    result = train(work, Downpour(warm_start=15, n_push=2), cluster, workers=3, epochs=1)
    assert [e["lost"] for e in result.events if e["kind"] == "replaced"] == [["worker-0"]]
    assert sum(result.history.column("samples").to_pylist()) <= 90
    assert result.snapshot.positions == [30, 30, 30]


def test_who_waits_for_a_silent_replica_says_whom():
    layout = static_servers.vector_layout(6)
    with closing(
        static_servers.House(
            layout,
            torch.zeros(6, dtype=torch.float64),
            1,
            2,
            Downpour(warm_start=4),
            lambda p: torch.optim.SGD(p, lr=1.0),
        )
    ) as house:
        servers = [house.join(rank, timeout=0.3) for rank in range(2)]
        done = []
        waiter = threading.Thread(target=lambda: (servers[1].wait(0, 4), done.append(servers[1].pull())))
        waiter.start()
        for rounds in (1, 2, 1):  # slower than the deadline in all, faster in each
            time.sleep(0.2)
            assert not done
            servers[0].push(torch.ones(6, dtype=torch.float64), 3.0, rounds=rounds)
        waiter.join(60)
        assert torch.equal(done[0], torch.full((6,), -3.0, dtype=torch.float64))
        with pytest.raises(PeerTimeout, match=r"worker-0 has pushed 4 of the 9 rounds.*timeout") as caught:
            servers[1].wait(0, 9)
        assert caught.value.data["peer"] == "worker-0"


# ------------------------------------------------------------------------------------------- what is refused or said

BAD = [
    "n_push=0",
    "n_fetch=0",
    "n_push=1.5",
    "n_fetch=true",
    "shards=0",
    "warm_start=-1",
    "warm_start=none",
    "adagrad=0",
    "adagrad=-1",
    "adagrad=nan",
    "adagrad=x",
    "replay_mb=-1",
    "replica=x",
    "staleness=2",
]


@pytest.mark.parametrize("given", BAD)
def test_bad_options(given):
    with pytest.raises(ConfigError) as caught:
        parse(f"downpour:{given}")
    assert given.partition("=")[0] in str(caught.value)


def test_its_text_is_read_and_it_is_out_of_step():
    found = parse("downpour:n_push=4,n_fetch=2,adagrad=0.01,warm_start=100")[0].strategy
    assert found == Downpour(n_push=4, n_fetch=2, adagrad=0.01, warm_start=100)
    assert not found.topology.in_step and found.topology.staleness is None


@pytest.mark.parametrize(
    ("optimizer", "strategy", "words"),
    [
        ("adam", Downpour(n_push=4), "sum of 4 gradients"),
        ("adam", Downpour(), None),
        ("sgd", Downpour(n_push=4), None),
        ("adam", Downpour(n_push=4, adagrad=0.1), None),
        ("adam", ParameterServer(staleness=None), "scaled by 1/N"),
    ],
)
def test_an_optimizer_that_ignores_the_size_of_a_gradient_is_warned_of(optimizer, strategy, words):
    warnings = preflight(Small(optimizer=optimizer), [Phase(None, strategy)], JobSpec("x:Small", workers=2)).warnings
    assert len(warnings) == (words is not None)
    assert words is None or words in warnings[0]

"""What a federated job remembers: clients' states, the server's, the clock; over checkpoints, deaths, any workers."""

import gc
import importlib
import random
import resource
from pathlib import Path

import pytest
import torch
from federated_work import Dropping, Fed, Normed, cohorts
from rayps_client.errors import CheckpointError
from small_work import Watched, kinds, train
from torch import nn

import rayps
from rayps import Ditto, FedAdam, FedAvg, FedAvgM, FedBuff, FedYogi, Scaffold
from rayps.federated import client_states as states_module
from rayps.federated.client_states import ClientStates
from rayps.federated.client_states_backup import ClientStatesBackup

# ------------------------------------------------------------------------------------- resuming in the middle

STATEFUL = [
    (Fed, Scaffold(fraction=0.5, local_epochs=2)),
    (Fed, Ditto(fraction=0.5)),
    (Fed, FedYogi(fraction=0.5)),
    (Fed, FedAvgM(dropout=0.3)),
    (Normed, FedAvg(buffers="keep", fraction=0.5)),
    (Fed, FedBuff(buffer=3, concurrency=6, speed="lognormal(sigma=1)")),
    (Fed, FedAvg(rule="centered_clipping(tau=0.1)", speed="lognormal(sigma=1)", deadline=0.01)),
    (Dropping, FedAdam(fraction=0.5)),
]


@pytest.mark.parametrize(("kind", "strategy"), STATEFUL, ids=lambda given: getattr(given, "name", None))
def test_a_job_resumed_in_the_middle_goes_on_to_the_bit(kind, strategy, tmp_path):
    work = kind()
    same = 1 if kind is Dropping else 2  # threads share torch's random numbers
    whole = train(work, strategy, workers=same, epochs=6)
    assert sum(name.startswith("version/") for name in whole.snapshot.shared) <= 4  # older ones that nobody needs
    for before, after in ((2, 1), (1, 3)) if same > 1 else ((1, 1),):
        folder = tmp_path / str(before)
        train(work, strategy, workers=before, epochs=3, checkpoint=folder)
        resumed = train(work, strategy, workers=after, epochs=6, checkpoint=folder, resume=True)
        assert torch.equal(resumed.snapshot.params, whole.snapshot.params)
        assert resumed.snapshot.shared.keys() == whole.snapshot.shared.keys()
        for name, value in whole.snapshot.shared.items():
            assert torch.equal(resumed.snapshot.shared[name], value), name
        assert [e["trained"] for e in cohorts(resumed)] == [e["trained"] for e in cohorts(whole)[3:]]
        assert resumed.metrics == pytest.approx(whole.metrics, abs=1e-12)


def test_states_of_a_large_job_travel_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(states_module, "CHUNK", 1000)  # about one state
    work, strategy = Fed(n=120, clients=30), Scaffold(fraction=0.7)
    whole = train(work, strategy, workers=2, epochs=4)
    train(work, strategy, workers=3, epochs=2, checkpoint=tmp_path)
    resumed = train(work, strategy, workers=2, epochs=4, checkpoint=tmp_path, resume=True)
    assert torch.equal(resumed.snapshot.params, whole.snapshot.params)


def test_a_checkpoint_of_other_clients_is_refused(tmp_path):
    train(Fed(clients=9), Scaffold(), workers=2, epochs=2, checkpoint=tmp_path)
    with pytest.raises(CheckpointError, match="state of client 8, but the data has 4"):
        train(Fed(clients=4), Scaffold(), workers=2, epochs=4, checkpoint=tmp_path, resume=True)


def test_another_strategy_begins_without_those_states():
    work = Fed()
    both = train(work, [(2, Ditto()), (2, FedAvg()), Scaffold()], workers=2, epochs=6)
    other = train(work, [(2, FedAvg()), (2, FedAvg(evaluate_every=2)), Scaffold()], workers=1, epochs=6)
    assert torch.equal(both.snapshot.params, other.snapshot.params)  # Ditto's w is FedAvg's


def test_a_round_that_does_not_count_leaves_clients_as_they_were():
    work, lacking = Fed(n=40, clients=4), {"speed": [0.001, 1.0], "deadline": 0.1, "min_replies": 3}
    results = [
        train(work, [(2, first), Scaffold()], workers=2, epochs=4) for first in (Scaffold(**lacking), FedAvg(**lacking))
    ]
    assert all(event["skipped"] for result in results for event in cohorts(result)[:2])
    assert torch.equal(*(result.snapshot.params for result in results))


# ------------------------------------------------------------------------------------- deaths


class Counted(Fed):
    """Says how often it computed a loss, and takes its time."""


@pytest.mark.parametrize(
    "strategy", [Scaffold(fraction=0.7), FedAdam(fraction=0.7), Ditto(fraction=0.7)], ids=lambda given: given.name
)
@pytest.mark.parametrize("every", [1, 3])
def test_a_death_goes_back_to_the_snapshots_round(strategy, every):
    tag = f"federated-death-{strategy.name}-{every}"
    work = Counted(n=63, pause=0.001, tag=tag)
    whole = train(Counted(n=63), strategy, workers=3, epochs=8, checkpoint_every=every)
    seed = random.getrandbits(32)
    print("seed", seed)
    cluster = Watched()
    cluster.kill_when(tag, random.Random(seed).randint(40, 100), ("WorkerActor", random.Random(seed).randrange(3)))
    result = train(work, strategy, cluster, workers=3, epochs=8, checkpoint_every=every)
    assert "restarted" in kinds(result)
    assert torch.equal(result.snapshot.params, whole.snapshot.params)
    assert result.history.num_rows == 8
    assert result.metrics == pytest.approx(whole.metrics, abs=1e-12)


# ------------------------------------------------------------------------------------- the store


def state(value):
    return {"c": torch.full((4,), float(value)), "n": torch.tensor(value)}


def test_a_store_keeps_a_rounds_states_or_none():
    store = ClientStates()
    assert store.get(7) == {} and len(store) == 0
    store.put(7, state(1), 1)
    store.commit()
    store.put(7, state(2), 2)
    store.put(8, state(3), 2)
    assert torch.equal(store.get(7)["c"], torch.full((4,), 2.0))
    store.commit(keep=False)
    assert store.get(7)["n"] == 1 and store.get(8) == {}
    store.commit()
    store.close()


def test_a_store_can_go_back_to_the_snapshot_and_keeps_little_more():
    store, seed = ClientStates(), random.getrandbits(32)
    print("seed", seed)
    chance, told, kept = random.Random(seed), {}, [0]
    for round in range(1, 41):
        for client in chance.sample(range(6), 3):
            store.put(client, state(100 * round + client), round)
            told.setdefault(client, {})[round] = 100 * round + client
            marks = [store.saved, round, *(at for at in kept if at > store.saved)]
            needed = {max((r for r in told[client] if r <= at), default=0) for at in marks} - {0}
            assert {at for who, at in held(store) if who == client} == needed
        store.commit()
        if chance.random() < 0.3:
            store.kept = round
            kept.append(round)
        if round % 5 == 0:
            before, store.saved = store.saved, chance.choice([at for at in kept if at >= store.saved])
            since = chance.randint(0, before)
            rows = store.rows(since, store.saved)
            found = {client: at for client, at, _ in rows}
            want = {c: max((r for r in rounds if r <= store.saved), default=0) for c, rounds in told.items()}
            assert found == {c: r for c, r in want.items() if r > since}
    store.delete_after(store.saved)
    for client, rounds in told.items():
        newest = [r for r in rounds if r <= store.saved]
        assert (store.get(client)["n"].item() if newest else 0) == (rounds[max(newest)] if newest else 0)
    store.close()


def held(store):
    return store._db.execute("select client, round from states order by client, round").fetchall()


def test_between_two_snapshots_only_the_newest_state_is_kept():
    store = ClientStates()
    for round in range(1, 9):
        store.put(7, state(round), round)
        store.commit()
        if round in (3, 6):
            store.kept = round
    assert held(store) == [(7, 3), (7, 6), (7, 8)]
    store.saved = 6
    store.put(7, state(9), 9)
    store.commit(keep=False)  # what it would have taken the place of is there again
    assert held(store) == [(7, 3), (7, 6), (7, 8)]
    store.put(7, state(9), 9)
    store.commit()
    assert held(store) == [(7, 6), (7, 9)] and store.get(7)["n"] == 9
    store.close()


class Member:
    """A worker with states, as a backup asks it."""

    def __init__(self, store=None):
        self.handle, self.store, self.dies = self, store or ClientStates(), False

    def call(self, name, *given):
        self.answer = lambda: getattr(self, name)(*given)
        return self

    def result(self, timeout):
        if self.dies:
            raise TimeoutError("gone")
        return self.answer()

    def companion(self, target, method, *given):
        assert target == states_module.WORKER_STATES
        return getattr(self, method)(*given)

    def clients(self):
        return torch.arange(1, 101).numpy(), tuple(f"c{k}" for k in range(100))

    def load_states(self, rows, round):
        if rows is None:
            self.store = ClientStates()
        self.store.add_rows(rows or ())
        self.store.commit()

    def changed_states(self, since, upto, after):
        return self.store.rows(since, upto, after)


def test_a_worker_lost_while_it_tells_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(states_module, "CHUNK", 400)
    backup, members = ClientStatesBackup(), [Member(), Member()]
    backup.send_states(members, "scaffold", 0, 1.0)
    for at, member in enumerate(members):
        for client in range(at, 100, 2):
            member.store.put(client, state(client), 1)
        member.store.commit()
    assert backup.fetch_states(members, 1, 1.0)
    for at, member in enumerate(members):
        for client in range(at, 100, 2):
            member.store.put(client, state(1000 + client), 2)
        member.store.commit()
    members[1].dies = True
    assert not backup.fetch_states(members, 2, 1.0)
    assert {at for _, at, _ in backup._states.rows(-1, 9)} == {1}
    fresh = [Member(), Member(), Member()]
    backup.send_states(fresh, "scaffold", 1, 1.0)
    assert sorted(client for each in fresh for client, _, _ in all_of(each.store)) == list(range(100))
    (tmp_path / "tables").mkdir()
    assert [path.name for path in backup.write(tmp_path / "tables")] == ["states.parquet"]
    other = ClientStatesBackup()
    other.read(tmp_path / "tables", 1)
    single = [Member()]
    other.send_states(single, "scaffold", 1, 1.0)
    assert {client: single[0].store.get(client)["n"].item() for client in range(100)} == {k: k for k in range(100)}
    other.send_states(single, "ditto", 1, 1.0)
    assert len(single[0].store) == 0
    other.send_states(single, None, 1, 1.0)
    assert other.writer is None and other.fetch_states(single, 2, 1.0)


def all_of(store):
    found, after = [], -1
    while rows := store.rows(-1, 99, after):
        found += rows
        after = rows[-1][0]
    return found


# ------------------------------------------------------------------------------------- memory, many clients


class Tiny(rayps.Workload):
    """10,000 clients of two rows, a model of three numbers."""

    def __init__(self, clients=10_000):
        self.clients = clients

    def model(self):
        return nn.Linear(2, 1)

    def data(self):
        x = torch.arange(4.0 * self.clients).view(-1, 2) % 7
        ids = torch.arange(2 * self.clients).numpy() // 2
        return rayps.data.tensors(x, x.sum(dim=1, keepdim=True), batch_size=2, client=ids)

    def evaluation_data(self):
        return rayps.data.tensors(torch.ones(4, 2), torch.full((4, 1), 2.0))

    def loss(self, model, batch):
        work = importlib.import_module("test_federated_state")
        work.MEMORY.append(resident())
        return ((model(batch.x) - batch.y) ** 2).mean()


MEMORY: list[int] = []


def resident():
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()


@pytest.mark.parametrize(
    "strategy", [FedAvg(fraction=0.1), Scaffold(fraction=0.1, local_steps=1)], ids=lambda given: given.name
)
def test_memory_stays_flat_over_rounds_of_many_clients(strategy):
    MEMORY.clear()
    gc.collect()
    result = train(Tiny(), strategy, workers=1, epochs=4, checkpoint_every=2)
    assert result.history.column("replied").to_pylist() == [1000] * 4
    half = len(MEMORY) // 2
    assert max(MEMORY[half:]) - max(MEMORY[:half]) < 6e6, (max(MEMORY[:half]), max(MEMORY[half:]))

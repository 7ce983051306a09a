"""What a worker keeps of its state, who keeps it for others, and from which round a broken grid goes on."""

import itertools
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rayps_client.errors import StaleGeneration

from rayps.cluster.local import until
from rayps.core.grid import Grid
from rayps.core.job.continuation import Source
from rayps.recovery.backup_assignment import BackupAssignment, HeldRounds, choose_backup_holders, plan_rebuild
from rayps.recovery.peer_replication import BackupConnection, PeerReplication, fetch_missing_part, fetch_state
from rayps.recovery.state_slots import StateSlots, pack, parse, read_state
from rayps.recovery.worker_backup import WorkerBackup
from rayps.tensors.training_state import TrainingState

SECRET = b"s" * 32
CONTEXT = multiprocessing.get_context("spawn")


def state(rounds, size=5, extra=0):
    """Something of every kind that a worker has."""
    generator = torch.Generator().manual_seed(rounds)
    params = torch.randn(size, generator=generator, dtype=torch.float64)
    moments = {
        "a.weight": {"exp_avg": torch.randn(2, 3, generator=generator).bfloat16(), "step": torch.tensor(1.0 * rounds)},
        "b": {"lr": 0.1 * rounds, "nothing": None, "flag": torch.tensor(True)},
    }
    moments |= {f"more-{i}": {"m": torch.full((7,), float(rounds))} for i in range(extra)}
    buffers = {"bn.count": torch.tensor(rounds), "empty": torch.empty(0, 3)}
    tensors, numbers = TrainingState(params, moments, buffers, rng=torch.get_rng_state()).named()
    return tensors, {"numbers": numbers, "points": [{"kind": "round", "loss": 0.1 * rounds}]}


def same(found, rounds, **how):
    tensors, facts = state(rounds, **how)
    assert found.round == rounds
    assert found.facts == facts
    assert found.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found.tensors[name], tensor), name
        assert found.tensors[name].dtype == tensor.dtype


def filled(upto, slots=2):
    slots = StateSlots(slots)
    slots.open(1, upto, 7)
    for rounds in range(upto + 1):
        slots.commit(7, rounds, *state(rounds))
    return slots


def test_state_slots_have_the_newest_states_bit_for_bit():
    slots = StateSlots()
    slots.open(1, 0, 7)
    for rounds in range(5):
        how = {"extra": 300 * (rounds > 0)}  # the optimizer's state comes with the first step: the slots grow
        assert slots.commit(7, rounds, *state(rounds, **how))
        assert slots.rounds() == [max(0, rounds - 1), rounds][rounds == 0 :]
        same(slots.read(rounds), rounds, **how)
    assert slots.read(2) is None
    assert slots.commit(7, 4, *state(3))  # it is here already
    same(slots.read(4), 4, extra=300)
    assert slots.rounds() == [3, 4]
    assert slots.bytes == len(slots.blob(4))
    slots.close()


def test_who_has_been_ended_writes_no_more_and_what_is_above_the_round_is_forgotten():
    slots = filled(5)
    slots.refuse_commits()
    assert not slots.commit(7, 6, *state(6))
    slots.open(1, 4, 8)
    assert slots.rounds() == [4]
    assert not slots.commit(7, 5, *state(5))
    assert slots.commit(8, 5, *state(5))
    assert slots.rounds() == [4, 5]
    slots.open(2, 5, 9)  # from a snapshot again
    assert slots.rounds() == []
    slots.close()


def test_a_packed_state_is_the_state_or_what_a_counterpart_lacks():
    slots = filled(3)
    whole = slots.read(3)
    same(parse(pack(whole)), 3)
    part = parse(pack(whole, ("buffer/", "rng")))
    assert set(part.tensors) == {"buffer/bn.count", "buffer/empty", "rng"}
    assert not part.whole and whole.whole
    assert part.buffers["bn.count"] == 3
    assert part.facts == {"points": [{"kind": "round", "loss": 0.1 * 3}]}
    assert whole.state.moments["b"]["nothing"] is None
    assert torch.equal(whole.state.moments["a.weight"]["step"], torch.tensor(3.0))
    slots.close()


def _commit_for_ever(pipe, address):
    replication = PeerReplication(1, SECRET)
    connection = BackupConnection(replication, address, SECRET, timeout=60.0)
    connection.slots.open(1, 0, 7)
    pipe.send(os.getpid())
    for rounds in itertools.count():
        tensors, facts = state(rounds)
        tensors["params"] = torch.full((1 << 18,), rounds, dtype=torch.int64)
        connection.slots.commit(7, rounds, tensors, facts)


@pytest.mark.parametrize("after", [0.01, 0.013, 0.031])
def test_whoever_is_killed_while_it_writes_leaves_whole_states(after):
    holder = PeerReplication(0, SECRET)
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=_commit_for_ever, args=(theirs, holder.address), daemon=True)
    process.start()
    pid = ours.recv()
    assert until(lambda: max(holder.held_rounds(1)[1].rounds, default=0) > 2, 60)
    time.sleep(after)
    os.kill(pid, signal.SIGKILL)
    process.join(60)
    held = holder.held_rounds(1)[1]
    assert held.whole
    assert 1 <= len(held.rounds) <= 2
    for rounds in held.rounds:
        found = holder.state(1, 1, rounds)
        assert torch.equal(found.tensors["params"], torch.full((1 << 18,), rounds, dtype=torch.int64))
    assert max(held.rounds) > 0
    holder.close()


@pytest.fixture
def pair():
    """Two workers; the second holds a backup of the first."""
    made = [PeerReplication(0, SECRET), PeerReplication(1, SECRET)]
    yield made
    for holder in made:
        holder.close()


def test_a_thread_of_an_ended_generation_ends_no_commits_of_the_next_one():
    workers = [WorkerBackup(rank, SECRET, "127.0.0.1") for rank in range(2)]
    assignment = BackupAssignment(1, tuple(each.backup_address() for each in workers), 1, False)
    old, new = (
        SimpleNamespace(rank=0, generation=number, start=0, timeout=60.0, backup_assignment=assignment)
        for number in (7, 8)
    )
    part = SimpleNamespace(module=torch.nn.Identity(), beside={})
    try:
        committer = workers[0].begin_commits(new, lambda: False)
        with pytest.raises(StaleGeneration):  # it built its model while the next generation began
            workers[0].begin_commits(old, lambda: True)
        for rounds in (1, 2):
            committer.commit(SimpleNamespace(position=rounds, part=part, committed_state=lambda: (torch.ones(3), {})))
        assert workers[0].held_rounds(1)[0].rounds == (1, 2) == workers[1].held_rounds(1)[0].rounds
        assert workers[0].cost is not None
    finally:
        for each in workers:
            each.close()


@pytest.mark.parametrize("prefer", ["auto", "tcp"])
@pytest.mark.parametrize("counterpart", [False, True])
def test_a_neighbour_gives_back_what_it_kept(pair, prefer, counterpart):
    mine, other = pair
    connection = BackupConnection(mine, other.address, SECRET, timeout=60.0, has_counterpart=counterpart, prefer=prefer)
    assert connection.same_host == (prefer == "auto")
    connection.slots.open(1, 0, 7)
    for rounds in range(6):
        connection.slots.commit(7, rounds, *state(rounds))
        connection.send_committed(rounds)
    assert until(lambda: {4, 5} <= set(other.held_rounds(1)[0].rounds), 60)
    assert not connection.loss
    held = other.held_rounds(1)[0]
    assert held.whole == (connection.same_host or not counterpart)
    connection.close()
    mine.close()
    addresses = ["", other.address]
    if held.whole:
        for rounds in (4, 5):
            same(fetch_state(Source(1, 0), addresses, SECRET, 1, rounds, 10.0), rounds)
    rest = fetch_missing_part(Source(1, 1, 1), 0, addresses, SECRET, 1, 5, 10.0)
    assert set(rest.tensors) == {"buffer/bn.count", "buffer/empty", "rng"}
    assert rest.buffers["bn.count"] == 5
    assert not connection.same_host or connection.bytes == 0
    other.drop_states(1, 4)
    assert max(other.held_rounds(1)[0].rounds) == (
        5 if connection.same_host else 4
    )  # descriptors: the owner itself forgets
    assert other.held_rounds(2)[0].rounds == ()


def test_no_round_is_left_out_when_two_are_committed_before_the_first_is_sent(pair):
    mine, other = pair
    connection = BackupConnection(mine, other.address, SECRET, timeout=60.0, prefer="tcp")
    connection.slots.open(1, 0, 7)
    with connection._changed:  # the thread that sends waits for this lock until the second call waits for it
        for rounds in range(2):
            connection.slots.commit(7, rounds, *state(rounds))
            connection.send_committed(rounds)
    assert until(lambda: other.held_rounds(1)[0].rounds == (0, 1), 60)
    connection.close()


def test_the_bytes_of_a_round_have_arrived_before_the_next_round_but_one_begins(pair):
    mine, other = pair
    connection = BackupConnection(mine, other.address, SECRET, timeout=60.0, prefer="tcp")
    connection.slots.open(1, 0, 7)
    assert len(connection.slots.descriptors) == 3
    for rounds in range(40):
        connection.slots.commit(7, rounds, *state(rounds, size=100_000))
        connection.send_committed(rounds)
        if rounds:
            assert max(other.held_rounds(1)[0].rounds) >= rounds - 1
    connection.close()


def test_without_its_backup_a_worker_goes_on(pair):
    mine, other = pair
    connection = BackupConnection(mine, other.address, SECRET, timeout=60.0, prefer="tcp")
    connection.slots.open(1, 0, 7)
    connection.slots.commit(7, 0, *state(0))
    connection.send_committed(0)
    other.close()
    for rounds in range(1, 4):
        connection.slots.commit(7, rounds, *state(rounds))
        connection.send_committed(rounds)
    assert until(lambda: connection.loss, 60)
    connection.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("backup-of-worker-")]


def test_descriptors_of_a_replaced_worker_take_the_place_of_the_old_ones(pair):
    mine, other = pair
    before = len(list(Path("/proc/self/fd").iterdir()))
    for line in range(5):
        connection = BackupConnection(mine, other.address, SECRET, timeout=60.0)
        connection.slots.open(line, 0, line + 1)
        connection.slots.commit(line + 1, 0, *state(0))
        connection.close()
        assert other.held_rounds(line)[0].rounds == (0,)
    assert len(list(Path("/proc/self/fd").iterdir())) < before + 12


# ------------------------------------------------------------------------------------------- who keeps whom


GRIDS = [Grid(1, 4), Grid(1, 1, 3), Grid(2, 2, 2), Grid(3, 2), Grid(4), Grid(1, 2, 2)]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("hosts", ["a", "ab", "abc"])
def test_a_holder_is_a_counterpart_or_a_neighbour_and_on_another_host_where_there_is_one(grid, hosts):
    where = [hosts[rank % len(hosts)] for rank in range(grid.size)]
    for rank, holder in enumerate(choose_backup_holders(grid, where)):
        circle = grid.along("data", rank) if grid.data > 1 else grid.replica(0)
        assert holder in circle
        assert holder != rank
        if len({where[other] for other in circle}) > 1:
            assert where[holder] != where[rank]


def test_a_worker_alone_has_no_holder():
    assert choose_backup_holders(Grid(1), ["a"]) == [None]


def test_everyone_goes_back_to_a_round_that_all_have():
    grid = Grid(1, 3)
    held = {0: {0: HeldRounds((4, 5)), 2: HeldRounds((3, 4))}, 2: {2: HeldRounds((3, 4)), 1: HeldRounds((4, 5))}}
    found = plan_rebuild(grid, held)
    assert found.round == 4
    assert found.sources == {1: Source(2, 1)}
    assert not found.sources[1].counterpart
    held[2][1] = HeldRounds((5, 6))
    assert plan_rebuild(grid, held) is None
    held[2][1] = HeldRounds((4, 5), whole=False)  # only what a counterpart lacks, and there is no counterpart
    assert plan_rebuild(grid, held) is None
    del held[2][1]
    assert plan_rebuild(grid, held) is None
    assert plan_rebuild(grid, {}) is None


def test_a_counterpart_is_asked_before_a_backup_which_adds_what_the_twin_lacks():
    grid = Grid(2, 2)
    held = {
        0: {0: HeldRounds((4, 5))},
        2: {2: HeldRounds((4, 5)), 0: HeldRounds((4, 5))},
        3: {3: HeldRounds((4, 5)), 1: HeldRounds((4, 5), False)},
    }
    found = plan_rebuild(grid, held)
    assert found.round == 5
    assert found.sources == {1: Source(3, 3, 3)}
    assert found.sources[1].counterpart
    held[3][1] = HeldRounds((3, 4), False)  # it died before it had committed what its counterpart has
    assert plan_rebuild(grid, held).round == 4
    assert plan_rebuild(grid, held).sources == {1: Source(3, 3, 3)}
    del held[3][1]
    assert plan_rebuild(grid, held).round == 5
    assert plan_rebuild(grid, held).sources == {1: Source(3, 3, None)}
    held[3][3] = HeldRounds((5, 6))
    assert plan_rebuild(grid, held).round == 5


def test_a_worker_and_its_counterpart_and_its_backup_gone_together():
    grid = Grid(2, 2)
    held = {0: {0: HeldRounds((4, 5))}, 2: {2: HeldRounds((4, 5))}}
    assert plan_rebuild(grid, held) is None
    held[0][3] = HeldRounds((4,))  # a backup that has outlived both
    assert plan_rebuild(grid, held) is None
    held[0][1] = HeldRounds((4, 5))
    assert plan_rebuild(grid, held).round == 4
    assert plan_rebuild(grid, held).sources == {1: Source(0, 1), 3: Source(0, 3)}


def test_with_nobody_lost_everyone_only_goes_back():
    assert plan_rebuild(Grid(1, 2), {0: {0: HeldRounds((4, 5))}, 1: {1: HeldRounds((5, 6))}}).round == 5


def test_a_segment_that_is_not_sealed_is_nothing():
    slots = filled(1)
    fds = slots.descriptors
    assert {read_state(fd).round for fd in fds} == {0, 1}
    slots.open(2, 0, 7)
    assert [read_state(fd) for fd in fds] == [None, None]
    slots.close()

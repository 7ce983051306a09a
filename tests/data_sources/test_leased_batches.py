"""Batches by leases: each block has the rows of the epoch's permutation, and random numbers depend on the block."""

import threading

import pytest
import torch
from rayps_client.errors import ConfigError, PeerTimeout
from torch.utils.data import Dataset

import rayps
from rayps.core.rows.leases import BlockRange, RowLease
from rayps.core.rows.phase_rounds import Boundary
from rayps.worker.plan import EvaluationPlan, PeerAddresses, SnapshotPlan, WorkerPlan
from rayps.worker.rows.batches import BatchStream
from rayps.worker.rows.lease_book import LeaseBook
from rayps.worker.rows.make_stream import make_jumping_reader, make_stream

ROWS, SIZE = 22, 4


def data(**more):
    return rayps.data.tensors(torch.arange(ROWS), batch_size=SIZE, **more)


def stream(source=None, accumulate=1, timeout=60.0):
    source, leases = source or data(), LeaseBook(1, timeout)
    reader = make_jumping_reader(source, 7, accumulate)
    one = BatchStream(source, leases, reader, (1, 3), 7, -(-ROWS // (SIZE * accumulate)), accumulate=accumulate)
    one.leases = leases
    return one


def wait(one, stopped=lambda: False):
    """Wait for the next block as a worker does, and return whether there is one."""
    step = one.leases.wait(one.position, stopped)
    one.position = one.position if step is None else step
    return step is not None


def lease(first, epoch, lo, hi):
    return RowLease(first, BlockRange(epoch, lo, hi))


def rows(batch):
    return torch.cat([part.x for part in batch.parts]).tolist() if batch.parts else batch.x.tolist()


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("loads", [False, True])
def test_blocks_are_cut_from_the_permutation(accumulate, loads):
    source = data().loaded_by(0) if loads else data()
    one = stream(source, accumulate)
    each = SIZE * accumulate
    blocks = [(0, 1), (0, 2), (1, 0), (1, 1), (0, 0)]
    for step, (epoch, block) in enumerate(blocks):
        one.leases.extend([lease(step, epoch, block, block + 1)])
    try:
        for epoch, block in blocks:
            law = source.order(7, epoch)[block * each : (block + 1) * each].tolist()
            assert rows(one.take(1 << 40)) == law and one.weight == len(law)
    finally:
        one.close()


def test_an_epoch_of_blocks_has_each_row_once():
    one = stream()
    one.leases.extend([lease(0, 0, 0, 6)])
    assert sorted(row for _ in range(6) for row in rows(one.take(6))) == list(range(ROWS))
    assert one.position == 6 and not one.leases.in_hand(one.position)


def test_a_worker_waits_for_a_lease_and_continues_at_its_first_step():
    one, answers = stream(), []
    thread = threading.Thread(target=lambda: answers.append(wait(one)))
    thread.start()
    while one.leases.waits_at is None:
        pass
    assert one.leases.waits_at == 0
    one.leases.extend([lease(5, 0, 2, 4)], 5)
    thread.join(60)
    assert answers == [True] and (one.position, one.leases.waits_at, one.epoch_of(5)) == (5, None, (0, 2))
    one.take(9)
    one.leases.end()  # a leaver ends after its step, although it has another block
    assert one.leases.in_hand(one.position) and not wait(one)


def test_a_worker_that_waits_again_does_not_go_back():
    one = stream()
    one.leases.extend([lease(0, 0, 0, 1)], 0)
    assert wait(one)
    one.take(9)
    one.leases.extend([lease(1, 0, 1, 2)])
    assert wait(one) and one.position == 1


def test_a_driver_that_does_not_poll_is_named():
    one = stream(timeout=0.0)
    with pytest.raises(PeerTimeout, match="the driver has not polled it") as found:
        wait(one)
    assert found.value.data["peer"] == "driver"
    assert not wait(one, lambda: True)


class Noisy(Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, row):
        return torch.rand(1) + row


def test_random_numbers_depend_on_the_block_only():
    """Also if the next batch is read in advance, and whichever worker has the block."""
    found = []
    for ahead, leases in ((False, [lease(0, 0, 0, 3)]), (True, [lease(0, 0, 0, 3)]), (False, [lease(9, 0, 1, 3)])):
        one = stream(rayps.data.dataset(Noisy(), batch_size=SIZE))
        one.ahead = (lambda batch: None) if ahead else None
        one.leases.extend(leases, leases[0].first)
        assert wait(one)
        torch.manual_seed(len(found))
        found.append(
            [(one.take(99).x.flatten().tolist(), torch.rand(2).tolist()) for _ in range(len(leases[0].blocks))]
        )
    assert found[0] == found[1] and found[0][1:] == found[2]
    assert len({str(each) for each in found[0]}) == 3


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(3))


def test_data_without_row_numbers_is_refused():
    class Streamed(rayps.Workload):
        def model(self):
            return torch.nn.Linear(1, 1)

        def data(self):
            return rayps.data.iterable(Stream(), batch_size=2)

        def loss(self, model, batch):
            return model(batch.x).mean()

    strategy, snapshots = rayps.ParameterServer(staleness=1), SnapshotPlan(Boundary(0, -1))
    plan = WorkerPlan(1, 0, 2, strategy, PeerAddresses(), 0, 0, 9, snapshots, EvaluationPlan(0), 1.0, leased=True)
    with pytest.raises(ConfigError, match="cannot be taken by number"):
        make_stream(Streamed(), plan)

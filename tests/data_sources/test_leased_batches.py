"""Batches by leases: each block has the rows of the epoch's permutation, and random numbers depend on the block."""

import threading

import pytest
import torch
from rayps_client.errors import ConfigError, PeerTimeout
from torch.utils.data import Dataset

import rayps
from rayps.core.rows.leases import BlockRange, RowLease
from rayps.worker.rows.leased_batches import LeasedBatches

ROWS, SIZE = 22, 4


def data(**more):
    return rayps.data.tensors(torch.arange(ROWS), batch_size=SIZE, **more)


def stream(source=None, accumulate=1, timeout=60.0):
    source = source or data()
    return LeasedBatches(source, (1, 3), 7, -(-ROWS // (SIZE * accumulate)), accumulate=accumulate, timeout=timeout)


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
        one.extend([lease(step, epoch, block, block + 1)])
    try:
        for epoch, block in blocks:
            law = source.order(7, epoch)[block * each : (block + 1) * each].tolist()
            assert rows(one.take(1 << 40)) == law and one.weight == len(law)
    finally:
        one.close()


def test_an_epoch_of_blocks_has_each_row_once():
    one = stream()
    one.extend([lease(0, 0, 0, 6)])
    assert sorted(row for _ in range(6) for row in rows(one.take(6))) == list(range(ROWS))
    assert one.position == 6 and not one.in_hand


def test_a_worker_waits_for_a_lease_and_continues_at_its_first_step():
    one, answers = stream(), []
    thread = threading.Thread(target=lambda: answers.append(one.await_lease(lambda: False)))
    thread.start()
    while one.waits_at is None:
        pass
    assert one.waits_at == 0
    one.extend([lease(5, 0, 2, 4)], 5)
    thread.join(60)
    assert answers == [True] and (one.position, one.waits_at, one.epoch_of(5)) == (5, None, (0, 2))
    one.take(9)
    one.end()  # a leaver ends after its step, although it has another block
    assert one.in_hand and not one.await_lease(lambda: False)


def test_a_worker_that_waits_again_does_not_go_back():
    one = stream()
    one.extend([lease(0, 0, 0, 1)], 0)
    assert one.await_lease(lambda: False)
    one.take(9)
    one.extend([lease(1, 0, 1, 2)])
    assert one.await_lease(lambda: False) and one.position == 1


def test_a_driver_that_does_not_poll_is_named():
    one = stream(timeout=0.0)
    with pytest.raises(PeerTimeout, match="the driver has not polled it") as found:
        one.await_lease(lambda: False)
    assert found.value.data["peer"] == "driver"
    assert not one.await_lease(lambda: True)


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
        one.extend(leases, leases[0].first)
        assert one.await_lease(lambda: False)
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
    with pytest.raises(ConfigError, match="cannot be taken by number"):
        stream(rayps.data.iterable(Stream(), batch_size=2))

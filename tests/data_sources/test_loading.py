"""Loader processes: the batches are those without, whatever dies, and nothing is left behind."""

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from rayps_client.errors import ConfigError, DataError, WorkloadError
from small_work import Small, distance, kinds, rows, train

import rayps
from rayps.core.time.data_wait import ROUNDS, SKIPPED, DataWait
from rayps.data.base import Place
from rayps.data.loader import MOST_DEATHS, Loader


class Items(torch.utils.data.Dataset):
    """Map-style items of several dtypes, one of which cannot be read."""

    def __init__(self, n=23, bad=None):
        self.n, self.bad = n, bad

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        if i == self.bad:
            raise KeyError(f"no file for {i}")
        return {"a": torch.full((2, 3), float(i)), "b": torch.tensor(i, dtype=torch.bfloat16)}, i % 2 == 0


class Passes(torch.utils.data.IterableDataset):
    """Items that depend on the epoch; the shard's if `own`."""

    def __init__(self, n=23, own=False, bad=None):
        self.n, self.own, self.bad, self.epoch = n, own, bad, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        here = rayps.data.shard() if self.own else (0, 1)
        for i in range(here[0], self.n, here[1]):
            if i == self.bad:
                raise ValueError(f"line {i} is broken")
            yield torch.tensor([float(i), float(self.epoch)])


def equal(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    return a == b


def same(found, wanted):
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert a.size == b.size
        assert equal(a.x, b.x)
        assert equal(a.y, b.y)


def read(loader, place, start=0, position=None):
    return [batch for batch, _ in loader.read(place, start, position)]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def loader_processes(folder):
    """The loader processes that have left a file with their pid: not the driver, which reads one row."""
    found = []
    for path in folder.iterdir():
        command = Path("/proc", path.name, "cmdline")
        if command.exists() and b"loader_process" in command.read_bytes():
            found.append(int(path.name))
    return found


def gone(pids, seconds=20.0):
    end = time.monotonic() + seconds
    while any(alive(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(alive(pid) for pid in pids)


def parquet(folder):
    x, y = rows(40)
    columns = {f"x{i}": x[:, i].numpy() for i in range(5)} | {"y": y[:, 0].numpy()}
    pq.write_table(pa.table(columns), folder / "rows.parquet", row_group_size=7)
    return rayps.data.parquet(
        folder / "rows.parquet", features=[f"x{i}" for i in range(5)], label="y", batch_size=3, window_mb=0.0001
    )


SOURCES = {
    "tensors": lambda folder: rayps.data.tensors(*rows(31), batch_size=4),
    "dataset": lambda folder: rayps.data.dataset(Items(), batch_size=4),
    "parquet": parquet,
    "iterable": lambda folder: rayps.data.iterable(Passes(), batch_size=4),
}


@pytest.mark.parametrize(
    ("kind", "workers"),
    [*itertools.product(SOURCES, (0, 2)), ("tensors", 1), ("iterable", 3)],  # others: below
)
def test_batches_equal_those_without_processes(kind, workers, tmp_path):
    data = SOURCES[kind](tmp_path)
    loader = Loader(data.loaded_by(workers, prefetch=2))
    try:
        for epoch in range(2):
            for start in (0, 2):
                plain = list(data.batches(rank=1, size=2, seed=5, epoch=epoch, start=start))
                same(read(loader, Place(1, 2, 5, epoch), start), plain)
    finally:
        pids = loader.pids
        loader.close()
    assert gone(pids)


def test_own_shards_equal_torch_data_loader():
    """With shard="own", W processes of a rank are W readers, in the order of torch's DataLoader."""
    data = rayps.data.iterable(Passes(25, own=True), batch_size=2, shard="own")
    loader = Loader(data.loaded_by(3))
    try:
        for start in (0, 5):
            readers = [
                list(rayps.data.iterable(Passes(25, own=True), batch_size=2, shard="own").part(Place(1, 2, 0, 0, p, 3)))
                for p in range(3)
            ]
            wanted = [reader[k][0] for k in range(max(map(len, readers))) for reader in readers if k < len(reader)]
            found = read(loader, Place(1, 2, 0, 0), start)
            same(found, wanted[start:])
            if not start:
                mine = sorted(float(v) for batch in found for v in batch.x[:, 0])
                assert mine == [i for i in range(25) if i % 6 >= 3]
    finally:
        loader.close()


def test_a_pass_that_is_left_early_does_not_reach_the_next():
    data = rayps.data.dataset(Items(60), batch_size=2)
    loader = Loader(data.loaded_by(2, prefetch=1))
    try:
        first = loader.read(Place(0, 1, 0, 0))
        next(first)
        same(read(loader, Place(0, 1, 0, 1)), list(data.batches(rank=0, size=1, seed=0, epoch=1)))
    finally:
        loader.close()


def test_a_killed_process_is_started_again_at_its_batch():
    x = torch.arange(120.0).repeat(20_000, 1).T  # a batch does not fit into the buffer of a pipe
    data = rayps.data.tensors(x, batch_size=2)
    loader = Loader(data.loaded_by(2, prefetch=1))
    try:
        found, before = [], None
        for number, (batch, _) in enumerate(loader.read(Place(0, 1, 0, 0))):
            found.append(batch)
            if number == 4:
                before = loader.pids
                os.kill(before[1], signal.SIGKILL)
        same(found, list(data.batches(rank=0, size=1, seed=0, epoch=0)))
        [event] = loader.take_events()
        assert event["kind"] == "loader_restarted"
        assert "SIGKILL" in event["message"]
        assert loader.pids[0] == before[0]
        assert loader.pids[1] != before[1]
    finally:
        loader.close()


class Deadly(Items):
    """The process that reads item 7 dies."""

    def __getitem__(self, i):
        if i == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(i)


def test_a_process_that_always_dies_ends_with_the_reason():
    loader = Loader(rayps.data.dataset(Deadly(), batch_size=1, shuffle=False).loaded_by(1))
    try:
        with pytest.raises(DataError, match=rf"died {MOST_DEATHS + 1} times, last by signal SIGKILL"):
            read(loader, Place(0, 1, 0, 0))
    finally:
        loader.close()


class Poison:
    """A value that only the process that made it can read."""

    def __reduce__(self):
        return _in_process, (os.getpid(),)


def _in_process(pid):
    if os.getpid() != pid:
        raise RuntimeError("not in this process")
    return Poison()


def poisoned(items):
    return Poison()


def test_an_answer_that_cannot_be_read_ends_with_the_reason():
    loader = Loader(rayps.data.dataset(Items(), batch_size=4, collate=poisoned).loaded_by(1))
    try:
        with pytest.raises(
            DataError, match=r"died 4 times, last because its answer could not be read: RuntimeError: no"
        ):
            read(loader, Place(0, 1, 0, 0))
    finally:
        loader.close()


def test_a_process_that_only_closes_its_pipe_is_ended(monkeypatch):
    monkeypatch.setattr(rayps.data.loader, "JOIN_SECONDS", 0.1)
    loader = Loader(rayps.data.dataset(Items(), batch_size=4).loaded_by(1))
    try:
        read(loader, Place(0, 1, 0, 0))
        [lane] = loader._lanes
        assert lane.reason() == "after it had closed its pipe"
        assert gone(loader.pids)
    finally:
        loader.close()


LITTLE = """
import sys, torch, rayps
from rayps.data.base import Place
from rayps.data.loader import Loader
loader = Loader(rayps.data.tensors(torch.arange(8.0).repeat(4_000_000, 1).T, batch_size=2).loaded_by(2))
print(*[float(batch.x[:, 0].sum()) for batch, _ in loader.read(Place(0, 1, 0, 0))])
loader.close()
"""


def test_batches_larger_than_shared_memory_are_loaded():
    """/dev/shm of 1 MB, in a mount namespace of its own."""
    mount = "mount -t tmpfs -o size=1m tmpfs /dev/shm && exec"
    probe = subprocess.run(["unshare", "-m", "sh", "-c", f"{mount} true"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip("no mount namespace can be made here")
    command = ["unshare", "-m", "sh", "-c", f'{mount} "$0" -c "$1"', sys.executable, LITTLE]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert sum(map(float, found.stdout.split())) == sum(range(8))


def test_shared_memory_is_not_used():
    loader = Loader(rayps.data.tensors(torch.zeros(8, 2_000_000), batch_size=2).loaded_by(2))
    try:
        for _ in loader.read(Place(0, 1, 0, 0)):
            assert not any("/dev/shm" in Path(f"/proc/{pid}/maps").read_text() for pid in loader.pids)
    finally:
        loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_errors_keep_their_type_and_name_the_item(workers):
    for data, words in (
        (rayps.data.dataset(Items(bad=5), batch_size=4), "item 5 of 23 cannot be read: KeyError: 'no file for 5'"),
        (rayps.data.iterable(Passes(bad=5), batch_size=4), "item 5 .* cannot be read: ValueError: line 5 is broken"),
    ):
        loader = Loader(data.loaded_by(workers))
        try:
            with pytest.raises(DataError, match=words):
                read(loader, Place(0, 1, 0, 0))
        finally:
            loader.close()


class Noisy(Items):
    def __getitem__(self, i):
        return torch.tensor([random.random(), np.random.rand(), float(torch.rand(()))])


def test_random_transforms_do_not_depend_on_the_number_of_processes():
    def found(workers):
        loader = Loader(rayps.data.dataset(Noisy(), batch_size=4).loaded_by(workers))
        try:
            return read(loader, Place(0, 1, 3, 1))
        finally:
            loader.close()

    one = found(1)
    same(found(2), one)
    assert len({float(batch.x[0, 2]) for batch in one}) == len(one)


class Shuffled(torch.utils.data.IterableDataset):
    """Rows in a random order, with random transforms, all from the global generators. `how`: what draws the order."""

    def __init__(self, how="torch", state=False):
        self.how, self.at = how, 0
        if not state:
            self.state_dict = self.load_state_dict = None

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]

    def __iter__(self):
        order = list(range(40))
        if self.how == "seeded":
            torch.manual_seed(7)
        if self.how in ("torch", "seeded"):
            order = torch.randperm(40).tolist()
        elif self.how == "numpy":
            np.random.shuffle(order)
        for number in range(40):
            self.at = number + 1
            i = order.pop(random.randrange(len(order))) if self.how == "random" else order[number]
            yield torch.tensor([i, float(torch.rand(())), np.random.rand(), random.random()])


@pytest.mark.parametrize("how", ["torch", "numpy", "random", "seeded"])
@pytest.mark.parametrize("state", [False, True])
def test_readers_of_a_set_that_shuffles_draw_the_same_order(how, state):
    data = rayps.data.iterable(Shuffled(how, state), batch_size=2)
    orders = []
    for epoch in range(2):
        found = []
        for rank in range(2):
            for process in range(3):
                torch.manual_seed(100 * rank + process)
                np.random.seed(100 * rank + process)
                random.seed(100 * rank + process)
                before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
                found += [b.x for b, _ in data.part(Place(rank, 2, 5, epoch, process, 3))]
                assert torch.equal(torch.get_rng_state(), before[0])
                assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]
        assert sorted(torch.cat(found)[:, 0].tolist()) == list(range(40))
        orders.append(torch.cat(found)[:, 0])
    assert torch.equal(orders[0], orders[1]) == (how == "seeded")


def test_random_transforms_of_an_iterable_set_are_the_same_for_any_number_of_processes():
    """Also if a pass begins in the middle, and after the death of a process."""
    for state in (False, True):
        data = rayps.data.iterable(Shuffled(state=state), batch_size=2)
        plain = list(data.batches(rank=1, size=2, seed=3, epoch=1))
        for workers, start, kill in ((0, 0, False), (1, 4, False), (3, 5, True)):
            loader = Loader(data.loaded_by(workers, prefetch=1))
            try:
                found = []
                for batch, _ in loader.read(Place(1, 2, 3, 1), start):
                    found.append(batch)
                    if kill and len(found) == 3:
                        os.kill(loader.pids[1], signal.SIGKILL)
                same(found, plain[start:])
            finally:
                loader.close()


class Collates:
    """Adds random numbers to a batch."""

    def __call__(self, items):
        return torch.stack(items) + torch.rand(())


def test_random_numbers_of_collate_depend_on_the_batch_only():
    data = rayps.data.iterable(Passes(), batch_size=2, collate=Collates())
    found = []
    for workers, starts in ((1, (0,)), (2, (0, 4))):
        loader = Loader(data.loaded_by(workers))
        try:
            found += [read(loader, Place(0, 1, 3, 1), start) for start in starts]
        finally:
            loader.close()
    same(found[1], found[0])
    same(found[2], found[0][4:])


PARENT = """
import sys, time, torch, rayps
from rayps.core.time.data_wait import ROUNDS, SKIPPED, DataWait
from rayps.data.base import Place
from rayps.data.loader import Loader
loader = Loader(rayps.data.tensors(torch.zeros(100, 2), batch_size=1).loaded_by(2))
next(loader.read(Place(0, 1, 0, 0)))
print(*loader.pids, flush=True)
time.sleep(600)
"""


def test_processes_end_with_their_parent():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    try:
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        assert all(alive(pid) for pid in pids)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    assert gone(pids)


class Slow(Small):
    """Map-style items in loader processes; the pid of each process is in a file."""

    def __init__(self, folder=None, workers=2, **options):
        super().__init__(**options)
        self.folder, self.processes = folder, workers

    def data(self):
        x, y = rows(self.n)
        data = rayps.data.dataset(Marked(x, y, self.folder), batch_size=self.batch)
        return data.loaded_by(self.processes) if self.processes is not None else data

    def evaluation_data(self):
        return rayps.data.tensors(*rows(self.n), batch_size=self.batch)


class Marked(torch.utils.data.Dataset):
    """Rows; each process that reads one leaves a file with its pid."""

    def __init__(self, x, y, folder):
        self.x, self.y, self.folder = x, y, folder

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        if self.folder is not None:
            Path(self.folder, str(os.getpid())).touch()
            time.sleep(0.01)
        return self.x[i], self.y[i]


def test_training_with_loader_processes_equals_training_without(tmp_path):
    plain = train(Slow(workers=None), workers=2, epochs=2)
    for workers in (0, 2):
        found = train(Slow(tmp_path, workers=workers), workers=2, epochs=2)
        assert distance(found.model(), plain.model()) == 0
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len([pid for pid in pids if pid != os.getpid()]) == 4
    assert gone([pid for pid in pids if pid != os.getpid()])


def test_nothing_is_left_after_an_error(tmp_path):
    class Broken(Slow):
        def loss(self, model, batch):
            loss = super().loss(model, batch)
            if any(Path(self.folder).iterdir()):
                raise RuntimeError("the loss fails")
            return loss

    with pytest.raises(WorkloadError, match="the loss fails"):
        train(Broken(tmp_path), workers=2)
    pids = [int(path.name) for path in tmp_path.iterdir() if int(path.name) != os.getpid()]
    assert pids
    assert gone(pids)


def test_options_are_checked():
    data = rayps.data.tensors(torch.zeros(4, 1))
    for options, words in (((-1,), "workers is -1"), ((1.5,), "workers is 1.5"), ((True,), "workers is True")):
        with pytest.raises(ConfigError, match=words):
            data.loaded_by(*options)
    with pytest.raises(ConfigError, match="prefetch is 0"):
        data.loaded_by(1, prefetch=0)
    assert data.ahead is None


@pytest.mark.ray
def test_kill_of_a_loader_process_on_ray(ray_cluster, tmp_path):
    import threading

    plain = train(Slow(workers=None, n=120), workers=2, epochs=2)
    killed = []

    def kill():
        end = time.monotonic() + 120
        while not killed and time.monotonic() < end:
            for pid in loader_processes(tmp_path)[:1]:
                time.sleep(0.3)
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
            time.sleep(0.02)

    killer = threading.Thread(target=kill)
    killer.start()
    found = train(Slow(tmp_path, n=120), workers=2, epochs=2, cluster=ray_cluster)
    killer.join()
    assert killed
    assert "loader_restarted" in kinds(found)
    assert distance(found.model(), plain.model()) == 0
    assert gone(loader_processes(tmp_path))


def test_the_share_of_time_spent_waiting_for_data_is_a_metric_with_one_warning():
    wait = DataWait()
    warnings = [wait.add({"data": 0.05, "seconds": 0.1}) for _ in range(100)]
    [found] = [each for each in warnings if each is not None]
    assert warnings.index(found) == SKIPPED + ROUNDS - 1
    assert "50%" in found
    assert "loaded_by(2)" in found
    for data, seconds in ((0.01, 0.1), (0.001, 0.002)):  # a small share; waits too short to matter
        quiet = DataWait()
        assert not any(quiet.add({"data": data, "seconds": seconds}) for _ in range(100))
    history = train(Small(), workers=2).history
    shares = [a / b for a, b in zip(history["data"].to_pylist(), history["seconds"].to_pylist(), strict=True)]
    assert history["data_share"].to_pylist() == shares


class Late(Small):
    """Rows that take a while to read."""

    def data(self):
        return rayps.data.dataset(LateRows(*rows(self.n)), batch_size=self.batch, shuffle=False)


class LateRows(torch.utils.data.TensorDataset):
    def __getitem__(self, i):
        time.sleep(0.02)
        return super().__getitem__(i)


def test_a_run_that_waits_for_data_says_so_once():
    found = train(Late(n=120), workers=1)
    assert [event["message"] for event in found.events if "waited for data" in event["message"]]
    assert sum("waited for data" in event["message"] for event in found.events) == 1

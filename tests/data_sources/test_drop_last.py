"""`drop_last`: every source leaves out each rank's last batch if it is smaller, and all ranks take equal steps."""

import importlib
import inspect

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from rayps_client.errors import ConfigError, DataError, WorkloadError
from rayps_client.row_order import parts
from rayps_client.rows import tensors as light_tensors
from small_work import SEEN, Small, distance, plain, rows, train
from test_data_sources import COLUMNS, OPTIONS, table
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from rayps import data
from rayps.core.rows.row_shares import RowShares
from rayps.data.dealt_rows import DealtRows

N = 23  # rows of the sources below


def parquet(folder, **options):
    pq.write_table(table().slice(0, N), folder / "few.parquet", row_group_size=5)
    return data.parquet(str(folder / "few.parquet"), **{"features": ["a", "b"], "label": "y"} | options)


def images(folder, **options):
    for number in range(N):
        (folder / "kind").mkdir(exist_ok=True)
        Image.fromarray(np.full((2, 2, 3), number, dtype=np.uint8)).save(folder / "kind" / f"{number}.png")
    return data.images(folder, **options)


def text(folder, **options):
    (folder / "a.txt").write_text("a whole text of some words to cut into windows" * N)
    return data.text(folder / "a.txt", window=16, **options)


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(float(N)))


SOURCES = {  # from a folder and options to the source
    **{name: lambda folder, made=made, **o: made(folder, **OPTIONS | o) for name, made in COLUMNS.items()},
    "memmap": lambda _, **o: data.memmap(np.arange(N)[:, None], **o),
    "parquet": parquet,
    "windows": lambda folder, **o: parquet(folder, window_mb=1e-5, **o),
    "tensors": lambda _, **o: data.tensors(torch.arange(N), **o),
    "dataset": lambda _, **o: data.dataset(TensorDataset(torch.arange(N), torch.arange(N)), **o),
    "hugging face rows": lambda _, **o: data.huggingface(__import__("datasets").Dataset(table().slice(0, N)), **o),
    "images": images,
    "text": text,
    "iterable": lambda _, **o: data.iterable(Numbers(), **{k: v for k, v in o.items() if k != "shuffle"}),
}
del SOURCES["light parquet"]  # it has no ranks


def drawn(source, rank, size):
    return [batch for batch in source.batches(rank=rank, size=size, seed=3, epoch=1) if batch.size]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("batch", [3, 4])
@pytest.mark.parametrize("kind", SOURCES)
def test_every_source_leaves_out_the_last_batch_of_each_rank(kind, batch, size, tmp_path):
    options = {"batch_size": batch, "shuffle": kind != "windows"}
    every = SOURCES[kind](tmp_path, **options)
    whole = SOURCES[kind](tmp_path, drop_last=True, **options)
    counts = set()
    for rank in range(size):
        expected = [each for each in drawn(every, rank, size) if each.size == batch]
        found = drawn(whole, rank, size)
        assert len(found) == len(expected)
        for ours, theirs in zip(found, expected, strict=True):
            assert str(ours.x) == str(theirs.x) and str(ours.y) == str(theirs.y)
        if whole.has_length:
            counts.add(len(list(whole.batches(rank=rank, size=size, seed=3, epoch=1))))
    assert not whole.has_length or counts == {whole.steps(size)}, "all ranks take equal steps"


def test_every_function_that_makes_batches_has_the_option():
    options = {}
    for name in data.__all__:
        made = getattr(data, name)
        if inspect.isfunction(made):
            options[name] = str(inspect.signature(made))
    sources = {name for name, given in options.items() if "batch_size" in given or "ColumnOptions" in given}
    assert {"tensors", "parquet", "iterable", "csv", "ray"} <= sources
    assert all("drop_last" in options[name] or "ColumnOptions" in options[name] for name in sources)


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_other_values_are_refused(value):
    for make in (data.tensors, light_tensors):
        with pytest.raises((ConfigError, Exception), match=r"drop_last is .*: give True or False"):
            make(torch.zeros(4, 1), drop_last=value)


def test_rows_that_are_fewer_than_a_batch_are_refused():
    with pytest.raises(DataError, match=r"each of 3 workers has at most 2 rows, fewer than batch_size=4.*drop_last"):
        data.tensors(torch.zeros(5, 1), batch_size=4, drop_last=True).steps(3)


@pytest.mark.parametrize("shares", [(3, 3, 3), (2, 4), (5,)])
@pytest.mark.parametrize("total", [18, 23, 25])
def test_shares_leave_out_a_smaller_last_round_also_after_a_change(total, shares):
    source = data.tensors(torch.arange(total), batch_size=3, drop_last=True)
    dealt = RowShares(0, 0, 0, shares, drop_last=True)
    block, changed = sum(shares), dealt.followed_by(1, (4, 4), total)
    assert RowShares.from_json(changed.to_json()) == changed
    now = DealtRows(source, dealt)
    taken = [
        int(row)
        for rank in range(len(shares))
        for batch in now.batches(rank=rank, size=len(shares), seed=3, epoch=0)
        for row in batch.x
    ]
    assert sorted(taken) == sorted(source.order(3, 0)[: total // block * block].tolist())
    left = (total - block) // 8
    assert changed.rounds_left(total) == left and changed.after(1 + left, total) == (1, 0)
    start = changed.origin(total)[0]
    bounds = [changed.bounds(0, at - start, total) for at in range(1, 1 + left)]
    assert bounds == [(block + 8 * at, block + 8 * at + 8) for at in range(left)]


class Dropped(Small):
    """Rows of which a last batch is smaller on every worker, or on some."""

    accumulate = 1

    def __init__(self, n=35, batch=3, accumulate=1, clients=0, **options):
        super().__init__(n=n, batch=batch, **options)
        self.accumulate, self.clients = accumulate, clients

    def data(self):
        client = data.iid(self.clients) if self.clients else None
        return data.tensors(*rows(self.n), batch_size=self.batch, drop_last=True, client=client)

    def evaluation_data(self):
        return data.tensors(*rows(self.n), batch_size=self.batch)

    def loss(self, model, batch):
        if model.training:
            importlib.import_module("small_work").SEEN[self.tag, batch.size] += 1
        return super().loss(model, batch)


def sizes(tag):
    return {key[1]: count for key, count in SEEN.items() if isinstance(key, tuple) and key[0] == tag}


@pytest.mark.parametrize(("n", "workers"), [(35, 3), (37, 2), (16, 1)])
def test_training_is_that_of_the_whole_batches(n, workers):
    found = train(Dropped(n), workers=workers, epochs=3)
    model, losses, _ = plain(Dropped(n), workers, epochs=3)
    assert distance(found.snapshot.params, model) < 1e-12
    assert found.snapshot.round == len(losses)


CASES = {
    "all_reduce": {},
    "all_reduce:shard=optimizer": {},
    "local_sgd:period=2": {},
    "parallel_sgd": {},
    "admm": {},
    "parameter_server": {},
    "parameter_server:staleness=2": {},
    "fedavg:local_epochs=2": {"clients": 3},
    "fedavg:local_steps=9": {"clients": 3},
    "fedavg": {"clients": 3, "accumulate": 2},
    "all_reduce with accumulate": {"accumulate": 2},
    "all_reduce on shares": {"workers": (2, 3), "elastic": {"replay": [[2, 3], [5, 2]]}},
    "parallel_sgd on leases": {"workers": (2, 3)},
}


@pytest.mark.parametrize("case", CASES)
def test_no_smaller_batch_reaches_a_loss(case):
    options = dict(CASES[case])
    fields = {name: options.pop(name) for name in ("clients", "accumulate") if name in options}
    work = Dropped(n=35, tag=f"drop {case}", **fields)
    kind = case.partition(" with")[0].partition(" on")[0]
    train(work, strategy=kind, **{"workers": 2, "epochs": 3} | options)
    seen = sizes(work.tag)
    seen.pop(8, None)  # the rows on which a batch was tried before the start
    assert set(seen) == {3} and seen[3] >= 9


def test_a_client_of_fewer_rows_than_a_batch_is_named_before_the_start():
    with pytest.raises(DataError, match=r"client '0' has \d rows, fewer than batch_size=6, and drop_last is True"):
        train(Dropped(n=10, batch=6, clients=2), strategy="fedavg", epochs=1)


def test_an_epoch_of_a_client_is_its_whole_batches():
    used = [len(part) for part in parts(0, 0, 11, 3, round=0, epochs=2, steps=None, used=9)]
    assert used == [9, 9]


# ------------------------------------------------------------------------------------------------ a batch of one row


class Normed(Small):
    """A network with a BatchNorm layer."""

    def __init__(self, layer="BatchNorm1d", drop_last=False, clients=None, **options):
        super().__init__(**options)
        self.layer, self.drop_last, self.clients = layer, drop_last, clients

    def model(self):
        norm = {"BatchNorm1d": nn.BatchNorm1d(7), "GroupNorm": nn.GroupNorm(1, 7)}.get(self.layer)
        if self.layer == "frozen":
            norm = nn.BatchNorm1d(7).eval()
        if self.layer == "BatchNorm2d":  # has several values of each channel in one row
            norm = nn.Sequential(nn.Unflatten(1, (7, 1, 1)), nn.Upsample(2), nn.BatchNorm2d(7), nn.MaxPool2d(2))
            norm.append(nn.Flatten())
        return nn.Sequential(nn.Linear(5, 7), norm, nn.Tanh(), nn.Linear(7, 1)).double()

    def data(self):
        clients = None if self.clients is None else np.repeat(np.arange(len(self.clients)), self.clients)
        return data.tensors(*rows(self.n), batch_size=self.batch, drop_last=self.drop_last, client=clients)

    def evaluation_data(self):
        return data.tensors(*rows(self.n), batch_size=self.batch)


WAYS = r"\ngive the data drop_last=True.*, or another batch_size, or use GroupNorm"
ONE_ROW = {  # options of the workload and of the run, and what the error says
    "worker": ({"n": 10, "batch": 3}, {"workers": 1}, "10 rows on 1 worker in batches of 3 give a batch of one row"),
    "ranks": ({"n": 14, "batch": 5}, {"workers": 2}, None),
    "some rank": ({"n": 13, "batch": 3}, {"workers": 2}, "13 rows on 2 workers in batches of 3"),
    "fixed rows": ({"n": 7, "batch": 6}, {"strategy": "parallel_sgd"}, "7 rows on 1 worker"),
    "batches of one": ({"n": 6, "batch": 1, "drop_last": True}, {}, "6 rows on 1 worker in batches of 1"),
    "shares": ({"n": 26, "batch": 4}, {"workers": (2, 3), "elastic": {"replay": []}}, "26 rows on 2 workers"),
    "client": (
        {"n": 31, "batch": 10, "clients": [20, 11]},
        {"strategy": "fedavg", "workers": 2},
        "client '1' has 11 rows, of which the last batch of 10 has one row",
    ),
    "client with a batch size": (
        {"n": 31, "batch": 7, "clients": [21, 10]},
        {"strategy": "fedavg:batch_size=3"},
        "client '1' has 10 rows, of which the last batch of 3 has one row",
    ),
    "fewer steps": ({"n": 10, "batch": 3}, {"steps": 3, "epochs": None}, None),
    "as many steps": ({"n": 10, "batch": 3}, {"steps": 4, "epochs": None}, "10 rows on 1 worker in batches of 3"),
    "several rows": ({"n": 11, "batch": 3}, {}, None),
    "dropped": ({"n": 10, "batch": 3, "drop_last": True}, {}, None),
    "dropped of a client": (
        {"n": 31, "batch": 10, "clients": [20, 11], "drop_last": True},
        {"strategy": "fedavg"},
        None,
    ),
    "group norm": ({"n": 10, "batch": 3, "layer": "GroupNorm"}, {}, None),
    "several values": ({"n": 10, "batch": 3, "layer": "BatchNorm2d"}, {}, None),
    "frozen": ({"n": 10, "batch": 3, "layer": "frozen"}, {}, None),
}


@pytest.mark.parametrize("case", ONE_ROW)
def test_a_batch_of_one_row_is_known_before_the_start_if_batchnorm_refuses_it(case):
    fields, options, words = ONE_ROW[case]
    work = Normed(tag=f"one row {case}", **fields)
    options = {"workers": 1, "epochs": 1} | options
    if words is None:
        train(work, **options)
        return
    with pytest.raises(WorkloadError, match=words + ".*layer such as '1'.*" + WAYS):
        train(work, **options)
    assert SEEN[work.tag] == 1, "only the row was tried"

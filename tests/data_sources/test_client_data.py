"""Data divided into clients: each row exactly once, the same everywhere, tables and pictures, errors before a start."""

import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from itertools import chain
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rayps_client.errors import ConfigError, DataError, UserError

from rayps import data
from rayps.cli import main as cli
from rayps.cluster.scratch import SharedScratch, sweep
from rayps.data import Clients, Data
from rayps.data.clients import entropy
from rayps.data.partition_rules import apportion

ROOT = Path(__file__).resolve().parents[2]


def covered(clients: Clients, rows: int) -> None:
    """Every row has one client, no client has none, and what is said of them is so."""
    parts = [clients.rows(k) for k in range(clients.count)]
    assert sorted(np.concatenate(parts).tolist()) == list(range(rows))
    assert [len(part) for part in parts] == clients.sizes.tolist()
    assert clients.sizes.min() >= 1 and clients.sizes.dtype == np.int64
    for part in parts:
        assert part.dtype == np.int64 and (np.diff(part) > 0).all()
    assert len(set(clients.names)) == clients.count
    assert [clients.find(name) for name in clients.names] == list(range(clients.count))


def labelled(y: list[int], client: object) -> Data:
    """Row i has x = i."""
    return data.tensors(torch.arange(len(y)), torch.tensor(y), client=client)


RULES = st.one_of(
    st.builds(lambda n, s: data.iid(n, seed=s), st.integers(1, 9), st.integers(0, 5)),
    st.builds(
        lambda k, n, s: data.shards(k, clients=n, seed=s), st.integers(1, 4), st.integers(1, 9), st.integers(0, 5)
    ),
    st.builds(
        lambda a, n, b, s: data.dirichlet(a, clients=n, balanced=b, seed=s),
        st.sampled_from([1e-4, 0.01, 0.5, 100.0]),
        st.integers(1, 9),
        st.booleans(),
        st.integers(0, 5),
    ),
    st.builds(
        lambda n, law, p: data.by_quantity(n, law=law, spread=p),
        st.integers(1, 9),
        st.sampled_from(["lognormal", "zipf"]),
        st.sampled_from([0.1, 1.0, 4.0]),
    ),
)


@given(rule=RULES, y=st.lists(st.integers(-2, 6), min_size=36, max_size=80))
@settings(max_examples=150, deadline=None)
def test_every_rule_gives_each_row_to_one_client(rule: data.Rule, y: list[int]) -> None:
    clients = labelled(y, rule).clients
    covered(clients, len(y))
    assert clients.digest == labelled(y, rule).clients.digest
    again = pickle.loads(pickle.dumps(labelled(y, rule)))
    assert again.clients.digest == clients.digest


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: data.iid(5, seed=seed),
        lambda seed: data.shards(2, clients=5, seed=seed),
        lambda seed: data.dirichlet(0.5, clients=5, seed=seed),
        lambda seed: data.by_quantity(5, seed=seed),
        lambda seed: data.dirichlet(0.5, clients=5, balanced=False, seed=seed),
    ],
)
def test_the_seed_and_nothing_else_decides(make: object) -> None:
    y = [i % 10 for i in range(200)]
    np.random.seed(3)
    torch.manual_seed(3)
    first = labelled(y, make(1)).clients.digest  # type: ignore[operator]
    np.random.seed(4)
    torch.manual_seed(4)
    assert labelled(y, make(1)).clients.digest == first  # type: ignore[operator]
    assert labelled(y, make(2)).clients.digest != first  # type: ignore[operator]


def test_what_other_hosts_compute() -> None:
    """Written down once: a division that changes with a version would mix up the states that clients keep."""
    y = [i % 3 for i in range(12)]
    assert [
        labelled(y, rule).clients.rows(0).tolist()
        for rule in (data.iid(4), data.shards(1, clients=4), data.dirichlet(0.1, clients=4), data.by_quantity(4))
    ] == WRITTEN


WRITTEN = [[0, 6, 9], [2, 7, 10], [5, 7, 8], [0, 3, 6]]


# ------------------------------------------------------------------------------------------------ by hand


def test_shards_by_hand() -> None:
    """Rows by label are 1 3 5 | 0 2 4 | ...: shards of neighbours there, `per_client` for each client."""
    y = [1, 0, 1, 0, 1, 0, 2, 2, 2, 3, 3, 3]
    in_order = [1, 3, 5, 0, 2, 4, 6, 7, 8, 9, 10, 11]
    shards = [sorted(in_order[i : i + 3]) for i in range(0, 12, 3)]
    clients = labelled(y, data.shards(2, clients=2)).clients
    for k in range(2):
        mine = clients.rows(k).tolist()
        assert mine in [sorted(a + b) for i, a in enumerate(shards) for b in shards[i + 1 :]]
    ones = labelled(y, data.shards(1, clients=4)).clients
    assert sorted(ones.rows(k).tolist() for k in range(4)) == sorted(shards)


def test_shards_of_uneven_labels() -> None:
    """As McMahan's: equal shards, so one may lie over the end of a label; pure ones never do."""
    y = [0] * 7 + [1] * 5
    plain = labelled(y, data.shards(1, clients=4)).clients
    assert plain.sizes.tolist() == [3, 3, 3, 3]
    assert sorted(plain.statistics()["labels"].to_pylist()) == [1, 1, 1, 2]
    pure = labelled(y, data.shards(1, clients=4, pure=True)).clients
    covered(pure, 12)
    assert pure.statistics()["labels"].to_pylist() == [1, 1, 1, 1]
    assert sorted(pure.sizes.tolist()) == [2, 3, 3, 4]


@given(y=st.lists(st.integers(0, 4), min_size=40, max_size=80), k=st.integers(1, 3), n=st.integers(5, 9))
@settings(max_examples=60, deadline=None)
def test_pure_shards_keep_labels_apart(y: list[int], k: int, n: int) -> None:
    try:
        clients = labelled(y, data.shards(k, clients=n, pure=True)).clients
    except ConfigError as error:  # a rare label would need more shards than it has rows
        assert "cannot be cut" in str(error)
        return
    covered(clients, len(y))
    assert max(clients.statistics()["labels"].to_pylist()) <= k


def test_iid_and_quantities() -> None:
    y = [0] * 103
    assert sorted(labelled(y, data.iid(10)).clients.sizes.tolist()) == [10] * 7 + [11] * 3
    assert labelled(y, data.by_quantity([3, 90, 10])).clients.sizes.tolist() == [3, 90, 10]
    zipf = np.sort(labelled(y, data.by_quantity(3, law="zipf", spread=1.0)).clients.sizes)
    assert zipf.tolist() == (1 + np.array([18, 27, 55])).tolist()  # 100 in the ratio 1 : 1/2 : 1/3
    even = labelled(y, data.by_quantity(10, spread=1e-9)).clients.sizes
    assert set(even.tolist()) <= {10, 11}
    assert apportion(10, np.array([0.55, 0.25, 0.2])).tolist() == [6, 2, 2]


def test_alpha_moves_between_one_label_and_all() -> None:
    y = [i % 10 for i in range(2000)]
    found = [
        float(np.mean(labelled(y, data.dirichlet(alpha, clients=20)).clients.statistics()["entropy"].to_numpy()))
        for alpha in (0.001, 1.0, 10.0, 10_000.0)
    ]
    assert found == sorted(found) and found[0] < 1.0 and found[-1] > 3.2
    sizes = labelled(y, data.dirichlet(0.05, clients=20)).clients.sizes
    assert set(sizes.tolist()) == {100}  # as Hsu's, whatever the labels
    free = labelled(y, data.dirichlet(0.01, clients=300, balanced=False)).clients
    covered(free, 2000)
    assert free.sizes.min() == 1 and free.sizes.max() > 50  # who would be empty has a row of the largest


@pytest.mark.parametrize(
    "rule",
    [
        data.iid(5),
        data.iid(5, seed=3),
        data.shards(2, clients=10),
        data.shards(1, clients=3, pure=True, seed=1),
        data.dirichlet(0.123456789, clients=7),
        data.dirichlet(2, clients=7, balanced=False),
        data.by_quantity(5),
        data.by_quantity(5, law="zipf", spread=0.3),
        data.by_quantity([4, 5, 6]),
        data.by_quantity([4]),
    ],
    ids=str,
)
def test_what_a_rule_says_is_read_again(rule: data.Rule) -> None:
    assert data.rule(str(rule)) == rule


def test_ids_and_their_names() -> None:
    by_text = labelled([0] * 5, np.array(["b", "a", "b", "c", "a"])).clients
    assert by_text.names == ("a", "b", "c") and by_text.sizes.tolist() == [2, 2, 1]
    assert [by_text.rows(k).tolist() for k in range(3)] == [[1, 4], [0, 2], [3]]
    by_number = labelled([0] * 5, torch.tensor([10, 9, 10, 9, 11])).clients
    assert by_number.names == ("9", "10", "11")  # by value, not as text
    assert by_number.rows(1).tolist() == [0, 2]
    coded = pa.chunked_array([pa.array(["x", "y"]).dictionary_encode(), pa.array(["z", "x", "y"]).dictionary_encode()])
    assert labelled([0] * 5, coded).clients.sizes.tolist() == [2, 2, 1]
    assert labelled([0] * 2, [True, False]).clients.names == ("0", "1")
    assert by_text.find("d") is None


def test_batches_of_clients() -> None:
    y = [3, 1, 2, 0]
    clients = labelled(y, [7, 8, 7, 8]).clients
    batch = clients.batch(np.array([2, 0]))
    assert batch.x.tolist() == [2, 0] and batch.y.tolist() == [2, 3] and batch.size == 2
    assert clients.batch(clients.rows(1)).y.tolist() == [1, 0]
    assert clients.batch(clients.rows(1)[::-1]).y.tolist() == [0, 1]
    assert len(clients.batch(clients.rows(1)[:0])) == 0
    torch_set = torch.utils.data.TensorDataset(torch.arange(4), torch.tensor(y))
    other = data.dataset(torch_set, client=data.shards(1, clients=2)).clients
    assert sorted(other.rows(0).tolist() + other.rows(1).tolist()) == [0, 1, 2, 3]
    assert {tuple(sorted(other.batch(other.rows(k)).y.tolist())) for k in range(2)} == {(0, 1), (2, 3)}


def test_other_rows_dealt_alike() -> None:
    train = labelled([0] * 30 + [1] * 10, [0] * 15 + [1] * 15 + [1] * 10).clients
    names = train.alike(torch.tensor([0, 1, 0, 1, 0, 0]))
    assert isinstance(names, np.ndarray)
    assert sorted(names[[0, 2, 4, 5]]) == ["0", "0", "1", "1"] and set(names[[1, 3]]) == {"1"}
    assert labelled([0] * 6, names).clients.names == ("0", "1")
    with pytest.raises(DataError, match="no client has rows of label 5"):
        train.alike([0, 5])


# ------------------------------------------------------------------------------------------------ other strategies


def test_other_strategies_do_not_look_at_it() -> None:
    y = [i % 4 for i in range(50)]
    with_, without = labelled(y, data.shards(1, clients=5)), labelled(y, None)
    for rank in range(3):
        both = [[b.x.tolist() for b in each.batches(rank=rank, size=3, seed=1, epoch=2)] for each in (with_, without)]
        assert both[0] == both[1]
    assert with_.divided and not without.divided
    assert with_.with_clients(None).divided is False and with_.divided


@pytest.mark.parametrize("client", [None, data.iid(4)])
def test_ranks_may_keep_their_rows(client: object) -> None:
    source = labelled([0] * 22, client)
    plain = [
        [sorted(i for b in source.batches(rank=r, size=4, seed=3, epoch=e) for i in b.x.tolist()) for r in range(4)]
        for e in range(2)
    ]
    source.keeps_rows = True
    seen = [
        [[i for b in source.batches(rank=r, size=4, seed=3, epoch=e) for i in b.x.tolist()] for r in range(4)]
        for e in range(2)
    ]
    rows = [[sorted(mine) for mine in ranks] for ranks in seen]
    assert plain[0] != plain[1] and rows[0] == rows[1] and seen[0] != seen[1]
    assert sorted(chain(*rows[0])) == list(range(22))
    assert [len(mine) for mine in rows[0]] == [source.share(r, 4) for r in range(4)] == [6, 6, 5, 5]
    if client is None:
        assert rows[0] == plain[0]


def test_a_worker_keeps_one_client_each() -> None:
    source = labelled([0, 1, 2, 3] * 5, data.shards(1, clients=4))
    source.keeps_rows = True
    for rank in range(4):
        mine = [b.y.unique().tolist() for b in source.batches(rank=rank, size=4, seed=0, epoch=1)]
        assert len(set(map(str, mine))) == 1 and len(mine[0]) == 1


# ------------------------------------------------------------------------------------------------ Parquet


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of 600 and 400 rows; x is the row number, twice; writers of every sort of size."""
    folder = tmp_path_factory.mktemp("writers")
    n = 1000
    writer = np.random.default_rng(0).zipf(1.5, n) % 40
    table = pa.table(
        {
            "x": pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(np.arange(n, dtype=np.float32), 2)), 2),
            "y": np.arange(n) % 7,
            "writer": writer,
            "name": pa.array([f"w{w}" for w in writer]).dictionary_encode(),
            "maybe": pa.array([None if i == 612 else i % 3 for i in range(n)]),
            "share": writer / 3,
            "gap": pa.array([None if i % 100 == 5 else float(i) for i in range(n)]),
        }
    )
    pq.write_table(table.slice(0, 600), folder / "a.parquet", row_group_size=130)
    pq.write_table(table.slice(600), folder / "b.parquet", row_group_size=130)
    return folder


def parquet(folder: Path, client: object, **more: object) -> Data:
    return data.parquet(folder, **{"features": "x", "label": "y", **more}, client=client)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "client", ["writer", "name", data.shards(2, clients=20), data.dirichlet(0.2, clients=30), list(np.arange(1000) % 9)]
)
def test_parquet_is_divided_alike_in_memory_and_on_disk(written: Path, client: object) -> None:
    small, large = (parquet(written, client, window_mb=mb, scale=2.0).clients for mb in (64, 0.001))
    covered(small, 1000)
    covered(large, 1000)
    assert small.digest == large.digest and small.statistics() == large.statistics()
    assert small.summary() == large.summary()
    for clients in (small, large):
        for k in (0, clients.count - 1):
            rows = clients.rows(k)[::-1]
            batch = clients.batch(rows)
            wanted = torch.tensor(rows.tolist())
            assert torch.equal(batch.x, 2.0 * wanted.float()[:, None].expand(-1, 2))
            assert torch.equal(batch.y, wanted % 7) and batch.size == len(rows)


def test_a_column_by_hand(written: Path) -> None:
    writers = pq.read_table(written, columns=["writer"])["writer"].to_numpy()
    clients = parquet(written, "writer").clients
    assert clients.names == tuple(map(str, np.unique(writers))) and clients.rule == "column writer"
    for k, name in enumerate(clients.names):
        assert clients.rows(k).tolist() == np.flatnonzero(writers == int(name)).tolist()


@pytest.mark.parametrize("mb", [64, 0.001])
def test_rows_that_are_left_out_are_nobodys(written: Path, mb: float) -> None:
    source = parquet(written, "writer", features=["gap"], on_invalid="drop", window_mb=mb)
    rows = np.concatenate([source.clients.rows(k) for k in range(source.clients.count)])
    assert sorted(rows.tolist()) == [i for i in range(1000) if i % 100 != 5]
    assert all(
        source.clients.batch(source.clients.rows(k)).size == source.clients.sizes[k]
        for k in range(source.clients.count)
    )


def test_large_files_may_keep_rows_too(written: Path) -> None:
    for client in (None, "writer"):
        source = parquet(written, client, window_mb=0.001, batch_size=7)
        source.keeps_rows = True
        mine = [
            [
                sorted(int(v) for b in source.batches(rank=r, size=3, seed=0, epoch=e) for v in b.x[:, 0].tolist())
                for r in range(3)
            ]
            for e in range(2)
        ]
        assert mine[0] == mine[1] and sorted(chain(*mine[0])) == list(range(1000))
        assert [len(part) for part in mine[0]] == [source.share(r, 3) for r in range(3)]


def _report(folder: str, temp: str, out: multiprocessing.SimpleQueue, both: Barrier) -> None:  # type: ignore[type-arg]
    os.environ["TMPDIR"] = tempfile.tempdir = temp  # torch imports dill, where it is installed, which asks for it early
    source = parquet(Path(folder), "writer", window_mb=0.001)
    clients = source.clients
    found = clients.batch(clients.rows(0)).x.sum().item()
    both.wait()  # until the other process has the folder open too
    out.put((clients.digest, found, sorted(p.name for p in Path(temp).iterdir())))


def test_processes_of_a_host_share_the_sorted_rows(written: Path) -> None:
    """Two processes at once: one folder, and none when all have ended."""
    with tempfile.TemporaryDirectory(prefix="c", dir="/tmp") as temp:  # a short one: see scratch.py
        context = multiprocessing.get_context("spawn")
        out, both = context.SimpleQueue(), context.Barrier(2, timeout=300)
        running = [context.Process(target=_report, args=(str(written), temp, out, both)) for _ in range(2)]
        for process in running:
            process.start()
        for process in running:
            process.join(300)
        found = [out.get() for _ in running]
        assert [process.exitcode for process in running] == [0, 0]
        assert found[0][:2] == found[1][:2]
        assert {len(names) for *_, names in found} == {1} and found[0][2] == found[1][2]
        assert list(Path(temp).iterdir()) == []
    assert found[0][0] == parquet(written, "writer").clients.digest


def test_a_shared_folder(tmp_path: Path) -> None:
    filled: list[Path] = []

    def fill(folder: Path) -> None:
        filled.append(folder)
        (folder / "x").write_text("x")

    one = SharedScratch("key", fill, what="filling", parent=tmp_path)
    two = SharedScratch("key", fill, what="filling", parent=tmp_path)
    assert filled == [one.path] and two.path == one.path
    one.close()
    one.close()
    assert sweep(tmp_path) == []
    assert (two.path / "x").read_text() == "x"
    two.close()
    assert list(tmp_path.iterdir()) == []

    def broken(folder: Path) -> None:
        raise DataError("no")

    with pytest.raises(DataError, match="no"):
        SharedScratch("key", broken, what="filling", parent=tmp_path)
    assert list(tmp_path.iterdir()) == []

    def slow(folder: Path) -> None:  # while it fills, another waits: not for ever
        with pytest.raises(DataError, match=f"process {os.getpid()} is still filling"):
            SharedScratch("key", fill, what="filling", timeout=0.1, parent=tmp_path)

    left = SharedScratch("key", slow, what="filling", parent=tmp_path)
    os.close(left._lock)  # as when its process is killed
    assert sweep(tmp_path) == [left.path] and not left.path.exists()


def test_a_changed_file_is_sorted_anew(written: Path, tmp_path: Path) -> None:
    table = pq.read_table(written)
    pq.write_table(table, tmp_path / "x.parquet")
    first = parquet(tmp_path, "writer", window_mb=0.001)
    before = first.clients.digest
    pq.write_table(table.set_column(2, "writer", [table["writer"].to_numpy() % 5]), tmp_path / "x.parquet")
    second = parquet(tmp_path, "writer", window_mb=0.001)
    assert second.clients.digest != before and second.clients.count == 5


def test_little_memory_is_needed_for_large_files(tmp_path: Path) -> None:
    """Rows that the process has looked at are the system's, not its own."""
    n, width = 40_000, 256
    pixels = np.random.default_rng(0).integers(0, 255, n * width).astype(np.uint8)
    pq.write_table(
        pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(pixels), width), "k": np.arange(n) % 100}),
        tmp_path / "x.parquet",
        row_group_size=4000,
    )
    script = f"""
import numpy as np, resource
from rayps import data
source = data.parquet({str(tmp_path)!r}, features="x", client="k", window_mb=1)
clients = source.clients
def own():
    fields = dict(l.split(":") for l in open("/proc/self/smaps_rollup").read().splitlines()[1:])
    return int(fields["Anonymous"].split()[0]) / 1024
before = own()
for k in range(100):
    assert clients.batch(clients.rows(k)).size == 400
print(own() - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=90, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 4.0  # all rows are 10 MB, and 40 as floats


# ------------------------------------------------------------------------------------------------ tables, pictures


def test_statistics_by_hand() -> None:
    clients = labelled([0, 0, 1, 1, 2, 2, 2, 2], ["a"] * 4 + ["b"] * 4).clients
    assert clients.statistics().to_pylist() == [
        {"client": "a", "rows": 4, "labels": 2, "entropy": 1.0, "label 0": 2, "label 1": 2, "label 2": 0},
        {"client": "b", "rows": 4, "labels": 1, "entropy": 0.0, "label 0": 0, "label 1": 0, "label 2": 4},
    ]
    assert clients.summary() == {
        "clients": 2,
        "rows": 8,
        "rule": "an id for each row",
        "names": ["a", "b"],
        "sizes": [4, 4],
        "labels": ["0", "1", "2"],
        "counts": [[2, 2, 0], [0, 0, 4]],
        "smallest": 4,
        "median": 4.0,
        "largest": 4,
    }
    assert entropy(np.array([[1, 1, 1, 1], [0, 0, 0, 0], [3, 1, 0, 0]])).tolist() == pytest.approx(
        [2.0, 0.0, 0.8112781]
    )
    floats = data.tensors(torch.zeros(4, 1), torch.rand(4), client=data.iid(2)).clients
    assert floats.statistics().column_names == ["client", "rows"]
    assert floats.summary()["labels"] == floats.summary()["counts"] == []


def test_a_summary_is_small() -> None:
    y = list(range(50)) * 400
    clients = labelled(y, data.by_quantity(2000, spread=2.0)).clients
    found = clients.summary()
    assert found["clients"] == 2000 and found["rows"] == 20_000
    assert len(found["names"]) == len(found["sizes"]) == len(found["counts"]) == 60
    assert found["sizes"] == sorted(found["sizes"], reverse=True)
    assert found["sizes"][0] == found["largest"] and found["sizes"][-1] == found["smallest"]
    assert len(found["labels"]) == 20 and found["labels"][-1] == "other"
    assert [sum(row) for row in found["counts"]] == found["sizes"]
    assert len(json.dumps(found)) < 20_000
    assert "label 49" in clients.statistics().column_names
    many = labelled(list(range(300)), data.iid(3)).clients.statistics()
    assert many.column_names == ["client", "rows", "labels", "entropy"]


def test_a_picture() -> None:
    clients = labelled([0, 0, 1, 1], ["<a>", "<a>", "b&", "b&"]).clients
    drawn = ElementTree.fromstring(clients.svg())
    space = "{http://www.w3.org/2000/svg}"
    kinds = [each.get("class") for each in drawn.iter(f"{space}rect")]
    assert kinds.count("bar") == 2 and kinds.count("cell") == 2 and kinds.count("empty") == 2
    assert "client <a>, label 0: 2" in [each.text for each in drawn.iter(f"{space}title")]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(ROOT / "examples" / "digits.py") + ":Digits"
    rule = "shards(per_client=2,clients=20)"
    code = cli.main(["clients", target, "--client", rule, "--picture", str(tmp_path / "p.svg")])
    out, err = capsys.readouterr()
    assert code == 0 and len(out.splitlines()) == 21 and "10000 rows are divided among 20 clients" in err
    ElementTree.parse(tmp_path / "p.svg")
    assert cli.main(["clients", target, "--client", rule, "--json", "--evaluation"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == 2000 and len(found["statistics"]) == 20
    for wrong, says in (
        ([], "client="),
        (["--client", "digits"], "did you mean 'digit'"),
        (["--client", "shard(clients=2)"], "no rule 'shard'"),
        (["--client", "iid()"], "clients"),
        (["--client", "shards(per_client=2,client=3)"], "client"),
        (["--client", rule, "--picture", "/nowhere/p.svg"], "cannot be written"),
    ):
        assert cli.main(["clients", target, *wrong]) == 2
        err = capsys.readouterr().err
        assert says in err and len(err.splitlines()) <= 3, err


def test_the_command_sets_parameters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "import rayps, torch\nclass Few(rayps.Workload):\n    clients: int = 3\n    model = loss = None\n"
    text += "    def data(self):\n        divided = rayps.data.iid(self.clients)\n"
    text += "        return rayps.data.tensors(torch.ones(40, 1), torch.ones(40), batch_size=4, client=divided)\n"
    (tmp_path / "few.py").write_text(text)
    for changes, count in (([], 3), (["--set", "clients=7"], 7)):
        assert cli.main(["clients", str(tmp_path / "few.py") + ":Few", *changes, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["clients"] == count


# ------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: data.iid(0), "clients is 0"),
        (lambda: data.iid(2.5), "clients is 2.5"),
        (lambda: data.iid(True), "clients is True"),
        (lambda: data.iid(3, seed="x"), "seed is 'x'"),
        (lambda: data.shards(0, clients=3), "per_client is 0"),
        (lambda: data.shards(1, clients=3, pure=1), "pure is 1"),
        (lambda: data.dirichlet(0, clients=3), "alpha is 0"),
        (lambda: data.dirichlet(float("inf"), clients=3), "alpha is inf"),
        (lambda: data.dirichlet(1, clients=3, balanced="no"), "balanced is 'no'"),
        (lambda: data.by_quantity(3, law="pareto"), "law is 'pareto'"),
        (lambda: data.by_quantity(3, spread=-1), "spread is -1"),
        (lambda: data.by_quantity([4, 0, 4]), "client 1 would have 0 rows: a client with no samples"),
        (lambda: data.by_quantity([]), "empty"),
        (lambda: data.rule("iid"), "iid needs the number of clients: iid(20)"),
        (lambda: data.rule("iid(n=3)"), "iid has no option 'n'; it has clients, seed"),
        (lambda: data.rule("shards(2, client=3)"), "did you mean 'clients'?"),
        (lambda: data.rule("iid(5, 3)"), "only the first option, clients,"),
        (lambda: data.rule("dirichlett(alpha=1,clients=3)"), "did you mean 'dirichlet'?"),
        (lambda: labelled([0] * 12, data.iid(6)).clients.rows(99), "no client 99: their numbers are 0 to 5"),
        (lambda: labelled([0] * 12, data.iid(6)).clients.rows(-1), "no client -1: their numbers are 0 to 5"),
        (lambda: labelled([0, 1], "writer"), "have no columns"),
        (lambda: labelled([0, 1], 3), "client is 3"),
        (lambda: labelled([0] * 4, data.iid(5)).clients, "5 clients cannot share 4 rows"),
        (lambda: labelled([0] * 4, data.by_quantity(5)).clients, "5 clients cannot share 4 rows"),
        (lambda: labelled([0] * 4, data.by_quantity([1, 2])).clients, "add up to 3, and there are 4 rows"),
        (lambda: labelled([0, 1] * 2, data.dirichlet(1, clients=5)).clients, "5 clients cannot share 4 rows"),
        (lambda: labelled([0, 1] * 4, data.shards(3, clients=3)).clients, "9 shards cannot be cut from 8 rows"),
        (lambda: labelled([0, 1, 2, 3], data.shards(1, clients=3, pure=True)).clients, "cannot hold 4 labels"),
        (lambda: labelled([0] * 50 + [1], data.shards(2, clients=2, pure=True)).with_clients(None).clients, "client="),
        (lambda: data.tensors(torch.zeros(4), client=data.shards(1, clients=2)).clients, "has none"),
        (lambda: data.tensors(torch.zeros(4), torch.rand(4), client=data.shards(1, clients=2)).clients, "fractions"),
        (
            lambda: (
                data.tensors(
                    torch.zeros(4), torch.zeros(4, 2, dtype=torch.int64), client=data.dirichlet(1, clients=2)
                ).clients
            ),
            "one whole number",
        ),
        (lambda: labelled([0] * 3, [1, 2]).clients, "has 2 ids for 3 rows"),
        (lambda: labelled([0] * 3, ["a", None, "b"]).clients, "null in row 1"),
        (lambda: labelled([0] * 3, np.array([1.0, np.nan, 2.0])).clients, "null in row 1"),
        (lambda: labelled([0] * 3, np.array([1.0, 1.5, 2.0])).clients, "whole numbers or text"),
        (lambda: labelled([0] * 3, np.zeros((3, 2))).clients, "one for each row"),
        (lambda: labelled([0] * 3, [1, "a", 2]).clients, "one for each row"),
    ],
)
def test_bad_input(make: object, says: str) -> None:
    with pytest.raises(UserError) as caught:
        make()  # type: ignore[operator]
    assert says in str(caught.value) and len(str(caught.value).splitlines()) <= 3
    pickle.loads(pickle.dumps(caught.value))


@pytest.mark.parametrize(
    ("client", "more", "says"),
    [
        ("wirter", {}, "did you mean 'writer'"),
        ("maybe", {}, "maybe is null in row 612"),
        ("share", {}, "whole numbers or text"),
        (data.shards(1, clients=3), {"label": None}, "has none"),
        (data.shards(1, clients=3), {"label": "gap", "on_invalid": "drop"}, "fractions"),
        (data.iid(1001), {}, "1001 clients cannot share 1000 rows"),
    ],
)
@pytest.mark.parametrize("mb", [64, 0.001])
def test_bad_columns(written: Path, client: object, more: dict[str, object], says: str, mb: float) -> None:
    with pytest.raises(UserError) as caught:
        source = parquet(written, client, window_mb=mb, **more)
        source.check()
        _ = source.clients
    assert says in str(caught.value)


def test_data_of_a_users_own() -> None:
    class Own(Data):
        batch_size = 2

        def check(self) -> None:
            pass

        def rows(self) -> int:
            return 4

        def batches(self, **how: object) -> object:  # type: ignore[override]
            return iter([])

    assert Own().divided is False and Own().share(1, 3) == 1
    for source, says in ((Own(), "give client="), (Own().with_clients(data.iid(2)), "Own cannot be divided")):
        with pytest.raises(ConfigError, match=says):
            _ = source.clients

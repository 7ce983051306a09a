"""Data: every row once per epoch, as many batches on every rank, flat memory, errors that say where."""

import json
import os
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
import small_work
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rayps_client.errors import ConfigError, DataError

from rayps import data
from rayps.data import Batch, Data


def epoch(source: Data, size: int, *, seed: int = 0, number: int = 0) -> list[list[Batch]]:
    return [list(source.batches(rank=rank, size=size, seed=seed, epoch=number)) for rank in range(size)]


def ids(batches: list[Batch]) -> list[int]:
    return [int(value) for batch in batches for value in batch.y]


def all_ids(ranks: Iterable[list[Batch]]) -> list[int]:
    return sorted(value for batches in ranks for value in ids(batches))


def laws(source: Data, rows: int, size: int, start: int) -> None:
    """The laws of every data set whose labels are its row numbers."""
    ranks = epoch(source, size)
    assert all_ids(ranks) == list(range(rows))
    assert {len(batches) for batches in ranks} == {source.steps(size)}
    assert {len(ids(batches)) for batches in ranks} <= {rows // size, rows // size + 1}
    for rank, batches in enumerate(ranks):
        assert all(batch.size == len(batch.y) == len(batch.x) == len(batch) for batch in batches)
        assert all(batch.size == source.batch_size for batch in batches[:-2])
        later = list(source.batches(rank=rank, size=size, seed=0, epoch=0, start=start))
        assert [ids([batch]) for batch in later] == [ids([batch]) for batch in batches[start:]]
        assert {batch.x.dtype for batch in batches} == {batches[0].x.dtype}
        assert {batch.x.shape[1:] for batch in batches} == {batches[0].x.shape[1:]}


@given(
    rows=st.integers(1, 200),
    size=st.integers(1, 7),
    batch=st.integers(1, 40),
    start=st.integers(0, 9),
    shuffle=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_tensors_keep_the_laws(rows: int, size: int, batch: int, start: int, shuffle: bool) -> None:
    x = torch.arange(rows).reshape(-1, 1).double()
    laws(data.tensors(x, torch.arange(rows), batch_size=batch, shuffle=shuffle), rows, size, start)


@given(rows=st.integers(1, 60), size=st.integers(1, 5), batch=st.integers(1, 20), start=st.integers(0, 5))
@settings(max_examples=30, deadline=None)
def test_a_dataset_keeps_the_laws(rows: int, size: int, batch: int, start: int) -> None:
    source = torch.utils.data.TensorDataset(torch.rand(rows, 2), torch.arange(rows))
    laws(data.dataset(source, batch_size=batch), rows, size, start)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three files, 1,000 rows, row groups of 90 rows; y is the row number."""
    root = tmp_path_factory.mktemp("rows")
    first = 0
    for number, rows in enumerate((500, 1, 499)):
        write(root / f"{number}.parquet", first, rows, group=90)
        first += rows
    return root


def write(path: Path, first: int, rows: int, *, group: int = 1000, width: int = 3) -> None:
    y = np.arange(first, first + rows)
    x = np.repeat(y.astype(np.float32)[:, None], width, axis=1)
    table = pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), width), "y": y})
    pq.write_table(table, path, row_group_size=group, write_page_checksum=True)


@given(
    size=st.integers(1, 7),
    batch=st.integers(1, 70),
    start=st.integers(0, 30),
    shuffle=st.booleans(),
    window=st.sampled_from([64.0, 0.005, 0.001, 0.0001]),
)
@settings(max_examples=40, deadline=None)
def test_parquet_keeps_the_laws(folder: Path, size: int, batch: int, start: int, shuffle: bool, window: float) -> None:
    source = data.parquet(folder, features="x", label="y", batch_size=batch, shuffle=shuffle, window_mb=window)
    laws(source, 1000, size, start)
    for batches in epoch(source, size):
        assert all((batch.x == batch.y[:, None]).all() for batch in batches)


@pytest.mark.parametrize("window", [64, 0.005])
def test_parquet_depends_on_seed_and_epoch_and_nothing_else(folder: Path, window: float) -> None:
    def one(**how: int) -> list[list[int]]:
        source = data.parquet(folder, features="x", label="y", window_mb=window)
        return [ids(batches) for batches in epoch(pickle.loads(pickle.dumps(source)), 3, **how)]

    assert one(seed=1, number=2) == one(seed=1, number=2)
    assert one(seed=1, number=2) != one(seed=1, number=3)
    assert one(seed=1, number=2) != one(seed=2, number=2)
    assert one(seed=-1) == one(seed=-1)


def test_a_small_set_is_dealt_from_one_permutation(folder: Path) -> None:
    small = data.parquet(folder, features="x", label="y", batch_size=8)
    alone = data.tensors(torch.zeros(1000, 1), torch.arange(1000), batch_size=32)
    for step, whole in zip(zip(*epoch(small, 4), strict=True), epoch(alone, 1)[0], strict=True):
        assert all_ids([list(step)]) == sorted(ids([whole]))


def test_a_streamed_set_is_shuffled(folder: Path) -> None:
    source = data.parquet(folder, features="x", label="y", window_mb=0.005)
    seen = np.array(ids(epoch(source, 1)[0]))
    assert (np.abs(np.diff(seen)) > 1).mean() > 0.9


def test_only_the_needed_row_groups_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    real = pq.ParquetFile.iter_batches

    def spy(self: pq.ParquetFile, *args: object, **more: object) -> object:
        opened.extend(more["row_groups"])  # type: ignore[arg-type]
        return real(self, *args, **more)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", spy)
    source = data.parquet(folder, features="x", label="y", batch_size=10, window_mb=0.001)
    total = sum(1 for _ in source.batches(rank=0, size=4, seed=0, epoch=0))
    assert len(opened) <= 6 and total == 25  # 250 of 1,000 rows lie in 4 to 6 of 13 groups
    opened.clear()
    assert sum(1 for _ in source.batches(rank=0, size=4, seed=0, epoch=0, start=22)) == 3
    assert len(opened) <= 2


def test_parquet_pickles_small(folder: Path) -> None:
    source = data.parquet(folder, features="x", label="y")
    source.check()
    list(source.batches(rank=0, size=1, seed=0, epoch=0))
    assert len(pickle.dumps(source)) < 2000


FLAT = """
    import resource, sys, torch
    from rayps import data
    def rows(path, number):
        source = data.parquet(path, features="x", label="y", batch_size=256, window_mb=8)
        return sum(batch.size for batch in source.batches(rank=0, size=2, seed=0, epoch=number))
    rows(sys.argv[2], 0)  # a small set, so that what every process needs is there
    limit = int(open("/proc/self/statm").read().split()[0]) * 4096 + 64 * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        torch.ones(80 * 2**20, dtype=torch.uint8)
    except RuntimeError:  # the limit holds
        print(rows(sys.argv[1], 0), rows(sys.argv[1], 1))
"""


# memory that is asked for is memory that is used: no pools of Arrow's, no arenas for threads
OLD_PYARROW = int(pa.__version__.split(".")[0]) < 26
HONEST = {"ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc to set a limit on memory")
def test_a_set_four_times_the_memory_limit_streams(tmp_path: Path) -> None:
    path, small = tmp_path / "big.parquet", tmp_path / "small.parquet"
    width, rows = 1024, 16384
    values = np.random.default_rng(0).integers(0, 1000, size=(rows, width)).astype(np.float32)
    schema = pa.schema({"x": pa.list_(pa.float32(), width), "y": pa.int64()})
    with pq.ParquetWriter(path, schema) as writer:  # 4 x 64 MiB, in row groups of 16 MiB
        for first in range(0, 4 * rows, 4096):
            part = values[first % rows : first % rows + 4096]
            writer.write_table(
                pa.table(
                    [pa.FixedSizeListArray.from_arrays(part.ravel(), width), np.arange(first, first + 4096)],
                    schema=schema,
                )
            )
    write(small, 0, 50, group=10, width=width)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FLAT), str(path), str(small)],
        text=True,
        capture_output=True,
        env={**os.environ, **HONEST},
    )
    assert done.stdout.split() == [str(2 * rows), str(2 * rows)], done.stderr


# ------------------------------------------------------------------------------------------ kinds of columns


def one_batch(path: Path, **how: object) -> Batch:
    return next(
        data.parquet(path, batch_size=100, shuffle=False, **how).batches(rank=0, size=1, seed=0, epoch=0)  # type: ignore[arg-type]
    )


def test_columns_of_numbers_are_stacked(tmp_path: Path) -> None:
    path = tmp_path / "flat.parquet"
    pq.write_table(
        pa.table(
            {
                "a": pa.array([1, 2, 3], pa.int16()),
                "late": [True, False, True],
                "b": [0.5, 1.5, 2.5],
                "d": pa.array([1, 2, 3]).cast(pa.decimal128(22, 2)),
                "k": pa.array([7, 7, 9]).dictionary_encode(),
            }
        ),
        path,
    )
    batch = one_batch(path, features=["b", "a", "late", "d", "k"], label="late")
    assert batch.x.dtype == torch.float32 and batch.y.dtype == torch.int64
    assert batch.x.tolist() == [[0.5, 1, 1, 1, 7], [1.5, 2, 0, 2, 7], [2.5, 3, 1, 3, 9]]
    assert batch.y.tolist() == [1, 0, 1]
    assert one_batch(path, features="a", label="b").y.dtype == torch.float32
    assert one_batch(path, features="a", label="a", label_dtype="float32").y.dtype == torch.float32
    assert one_batch(path, features="a").y is None
    assert one_batch(path, features=["a", "k"], dtype="int64").x.dtype == torch.int64


@pytest.mark.parametrize("kind", [pa.list_(pa.uint8()), pa.large_list(pa.uint8()), pa.list_(pa.uint8(), 2)])
def test_lists_of_pixels(tmp_path: Path, kind: pa.DataType) -> None:
    path = tmp_path / "pixels.parquet"
    pq.write_table(pa.table({"pixels": pa.array([[0, 255], [51, 102]], kind), "digit": [3, 4]}), path)
    assert one_batch(path, features="pixels", label="digit").x.tolist() == [[0, 255], [51, 102]]
    scaled = one_batch(path, features="pixels", label="digit", scale=1 / 255).x
    torch.testing.assert_close(scaled, torch.tensor([[0, 1], [0.2, 0.4]]))
    assert one_batch(path, features="pixels", dtype="uint8").x.dtype == torch.uint8


def test_any_file_system(tmp_path: Path) -> None:
    import fsspec

    write(tmp_path / "rows.parquet", 0, 10)
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/bucket/rows.parquet", (tmp_path / "rows.parquet").read_bytes())
    below = pafs.SubTreeFileSystem(str(tmp_path), pafs.LocalFileSystem())
    for source in (
        data.parquet("rows.parquet", filesystem=below, features="x", label="y"),
        data.parquet("/bucket", filesystem=memory, features="x", label="y"),
        data.parquet((tmp_path / "rows.parquet").as_uri(), features="x", label="y"),
    ):
        source.check()
        laws(source, 10, 2, 0)


def test_a_relative_path_keeps_its_meaning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "rows.parquet", 0, 10)
    monkeypatch.chdir(tmp_path)
    source = data.parquet("rows.parquet", features="x")
    monkeypatch.chdir("/")
    assert source.rows() == 10


# ------------------------------------------------------------------------------------------ bad input


def refused(path: Path | str, *words: str, features: object = "x", label: str | None = "y", **how: object) -> DataError:
    with pytest.raises(DataError) as caught:
        source = data.parquet(path, features=features, label=label, **how)  # type: ignore[arg-type]
        source.check()
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert message.count("\n") < 3
    return caught.value


def test_a_missing_column_is_named_with_those_there_are(folder: Path) -> None:
    error = refused(folder, "0.parquet", "'digit'", "x, y", label="digit")
    assert error.data["column"] == "digit" and error.data["columns"] == ["x", "y"]
    refused(folder, "did you mean 'x'", features="xx")


def damaged(good: bytes) -> dict[str, tuple[bytes, str]]:
    footer = int.from_bytes(good[-8:-4], "little")
    middle = bytearray(good)
    middle[len(good) // 3] ^= 0x40
    return {
        "empty": (b"", "empty"),
        "magic only": (b"PAR1", "not a Parquet file"),
        "text": (b"pixels,digit\n1,2\n3,4\n", "not a Parquet file"),
        "no footer": (good[:-100], "not a Parquet file"),
        "half": (good[: len(good) // 2], "not a Parquet file"),
        "footer length": (good[:-8] + (2**31 - 1).to_bytes(4, "little") + b"PAR1", "footer"),
        "footer zeroed": (good[:-60] + bytes(52) + good[-8:], "footer is damaged"),
        "footer's front zeroed": (good[: -8 - footer] + bytes(40) + good[40 - 8 - footer :], "cannot be read"),
        "front missing": (good[:4] + good[2000:], ""),
        "encrypted": (good[:-4] + b"PARE", "encrypted"),
        "bit flip": (bytes(middle), "row group"),
    }


@pytest.mark.parametrize("case", damaged(bytes(9999)))
def test_a_damaged_file_is_named(tmp_path: Path, case: str) -> None:
    write(tmp_path / "a.parquet", 0, 2000)
    content, word = damaged((tmp_path / "a.parquet").read_bytes())[case]
    (tmp_path / "b.parquet").write_bytes(content)
    assert refused(tmp_path, "b.parquet", word).data["file"] == str(tmp_path / "b.parquet")


def test_what_is_not_there(tmp_path: Path) -> None:
    refused(tmp_path, "no file that ends in .parquet", "it is empty")
    (tmp_path / "train.csv").write_text("a,b")
    refused(tmp_path, "it has train.csv")
    write(tmp_path / "train.parquet", 0, 3)
    refused(tmp_path / "trains.parquet", "no such file", "did you mean 'train.parquet'")
    refused(tmp_path / "nowhere" / "deep.parquet", "no such file")
    refused("nosuch://bucket/file.parquet", "nosuch")
    with pytest.raises(DataError, match="list of paths is empty"):
        data.parquet([], features="x")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("rows.csv", ["CSV", "rayps.data.csv(FILE, features=...)"]),
        ("rows.csv.gz", ["CSV", "rayps.data.csv"]),
        ("rows.TSV", ["CSV", "rayps.data.csv(FILE, features=..., delimiter='\\t')"]),
        ("rows.json", ["JSON", "rayps.data.json_lines(FILE, features=...), one object per line"]),
        ("rows.jsonl", ["JSON", "rayps.data.json_lines"]),
        ("rows.feather", ["Feather", "rayps.data.arrow(FILE, features=...)"]),
        ("rows.arrow", ["Arrow", "rayps.data.arrow"]),
        ("rows.npy", ["NumPy", "rayps.data.memmap(FILE)"]),
        ("rows.npz", ["NumPy", "rayps.data.tensors(x, y)"]),
        ("rows.txt", ["text", "rayps.data.text(FILE, window=...)"]),
        ("rows.orc", ["ORC is not read", "pyarrow.orc.read_table(FILE)"]),
        ("rows.xlsx", ["Excel", "rayps.data.dataset"]),
    ],
)
def test_a_file_of_another_format_is_refused_at_once(tmp_path: Path, name: str, words: list[str]) -> None:
    (tmp_path / name).write_text("x,y\n1,2\n3,4\n")
    for path in (tmp_path / name, [tmp_path / name], str(tmp_path / name)):
        with pytest.raises(DataError) as caught:
            data.parquet(path, features="x")  # not only by check()
        assert all(word in str(caught.value) for word in ["not a Parquet file", *words])
        assert "cut off" not in str(caught.value) and str(caught.value).count("\n") < 3
    refused(tmp_path, "no file that ends in .parquet", f"it has {name}", words[0])


def test_a_file_is_known_by_what_is_in_it(tmp_path: Path) -> None:
    write(tmp_path / "train.parquet", 0, 9)
    (tmp_path / "train.parquet").rename(tmp_path / "train.csv")
    data.parquet(tmp_path / "train.csv", features="x", label="y").check()
    (tmp_path / "rows").write_text("x,y\n1,2\n3,4\n")
    assert "cut off" not in str(refused(tmp_path / "rows", "not a Parquet file", "rayps.data.dataset"))
    (tmp_path / "short.parquet").write_bytes((tmp_path / "train.csv").read_bytes()[:-9])
    refused(tmp_path / "short.parquet", "whose end is cut off", "write it again")


@pytest.mark.parametrize("name", ["*.parquet", "part-?.parquet", "part-[01].parquet", "**/*.parquet"])
def test_a_pattern_is_refused_at_once(tmp_path: Path, name: str) -> None:
    write(tmp_path / "part-0.parquet", 0, 3)
    for path in (f"{tmp_path}/{name}", [f"{tmp_path}/part-0.parquet", f"{tmp_path}/{name}"]):
        with pytest.raises(DataError) as caught:
            data.parquet(path, features="x")
        said = str(caught.value)
        assert f"give the directory ({tmp_path})" in said and "glob(PATTERN)" in said and "did you mean" not in said
    write(tmp_path / "part-[0].parquet", 0, 5)  # a name like any other, where there is such a file
    assert data.parquet(tmp_path / "part-[0].parquet", features="x", label="y").rows() == 5


class RayData:
    """As `ray.data.Dataset`, which is made by a running Ray only: it has `__len__`, and calling it raises."""

    __module__ = "ray.data.dataset"

    def __len__(self) -> int:
        raise AttributeError("Use `ds.count()` to compute the length of a distributed Dataset.")


@pytest.mark.parametrize(
    "make",
    [
        data.dataset,
        data.tensors,
        lambda given: data.tensors(torch.zeros(3, 1), given),
        lambda given: data.parquet(given, features="x"),
    ],
)
def test_ray_data_is_refused_at_once(make: Callable[[object], object]) -> None:
    with pytest.raises(DataError, match=r"Ray Data RayData cannot be read: give rayps.data.ray\(ds,\nfeatures"):
        make(type("RayData", (RayData,), {"__module__": "tests"})())


def test_ray_data_as_a_workloads_data_is_refused_with_the_way_out() -> None:
    class Work(small_work.Small):
        def data(self) -> object:  # type: ignore[override]
            return RayData()

    with pytest.raises(
        ConfigError, match=r"data\(\) returned a Ray Data RayData: give rayps.data.ray\(ds,\nfeatures=...\), or write"
    ):
        small_work.train(Work())


def test_no_rows_and_no_columns(tmp_path: Path) -> None:
    write(tmp_path / "none.parquet", 0, 0)
    refused(tmp_path / "none.parquet", "no rows")
    pq.write_table(pa.table({}), tmp_path / "bare.parquet")
    refused(tmp_path / "bare.parquet", "none at all")


def test_schemas_that_differ(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1.0], "y": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"y": [1], "more": [0], "x": [1.0]}), tmp_path / "b.parquet")
    data.parquet(tmp_path, features="x", label="y").check()
    pq.write_table(pa.table({"x": [1.0], "y": [1.0]}), tmp_path / "c.parquet")
    assert refused(tmp_path, "c.parquet", "'y'", "double", "int64").data["column"] == "y"


@pytest.mark.parametrize(
    ("column", "word"),
    [
        (pa.array(["cat", "dog"]), "factorize"),
        (pa.array(["a", "b"]).dictionary_encode(), "factorize"),
        (pa.array([0, 1], pa.timestamp("s")), "convert"),
        (pa.nulls(2), "convert"),
        (pa.array([{"a": 1}, {"a": 2}]), "numbers"),
        (pa.array([[[1]], [[2]]]), "numbers"),
    ],
)
def test_columns_that_are_no_numbers(tmp_path: Path, column: pa.Array, word: str) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"x": column, "y": [0, 1]}), path)
    refused(path, "'x'", word)
    refused(path, "'x'", features="y", label="x")


@pytest.mark.parametrize(
    ("column", "row", "reason"),
    [
        (pa.array([1.0, float("nan"), None]), 1, "is NaN"),
        (pa.array([1.0, 2.0, None]), 2, "is null"),
        (pa.array([1.0, float("-inf"), 1.0]), 1, "-inf"),
        (pa.array([1.0, 1.0, 1e300]), 2, "not finite"),
        (pa.array([1, None, 1]), 1, "is null"),
        (pa.array([True, None, True]), 1, "is null"),
        (pa.array([[1.0, 2.0], [1.0, 2.0], [float("nan"), 1.0]]), 2, "is NaN at index 0"),
        (pa.array([[1, 2], [1, None], [1, 2]]), 1, "is null at index 1"),
        (pa.array([[1.0, 2.0], None, [1.0, 2.0]]), 1, "is null"),
        pytest.param(
            *(pa.array([[1, 2], None, [1, 2]], pa.list_(pa.uint8(), 2)), 1, "is null"),
            marks=pytest.mark.skipif(OLD_PYARROW, reason="pyarrow before 26 cannot read a null list of fixed size"),
        ),
        (pa.array([[1.0, 2.0], [1.0, 2.0], [1.0]]), 2, "has 1 values where others have 2"),
    ],
)
def test_a_bad_value_is_named(tmp_path: Path, column: pa.Array, row: int, reason: str) -> None:
    path = tmp_path / "rows.parquet"
    count = 2000
    before = pa.concat_arrays([column.slice(0, 1)] * count)
    whole = pa.chunked_array([before, column])
    pq.write_table(pa.table({"x": whole, "y": np.arange(count + 3)}), path, row_group_size=700)
    error = refused(path, str(path), "'x'", reason, f"row {count + row}", "on_invalid")
    assert (error.data["file"], error.data["column"], error.data["row"]) == (str(path), "x", count + row)
    streamed = data.parquet(path, features="x", label="y", window_mb=0.001)
    with pytest.raises(DataError, match=f"row {count + row}"):
        epoch(streamed, 3)
    dropped = data.parquet(path, features="x", label="y", on_invalid="drop", batch_size=10)
    dropped.check()
    ranks = epoch(dropped, 3)
    assert {len(batches) for batches in ranks} == {dropped.steps(3)}
    left = all_ids(ranks)
    assert set(range(count)) <= set(left) and count + row not in left
    if column.type not in (pa.list_(pa.float64()), pa.list_(pa.int64()), pa.list_(pa.uint8(), 2)):
        refused(path, "'x'", reason, f"row {count + row}", features="y", label="x")


@pytest.mark.skipif(not OLD_PYARROW, reason="pyarrow from 26 on reads a null list of fixed size")
def test_a_null_list_of_fixed_size_is_named_by_an_older_pyarrow(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"x": pa.array([[1, 2], None], pa.list_(pa.uint8(), 2)), "y": [0, 1]}), path)
    refused(path, str(path), "row group 0", "install pyarrow 26", "lists of any length")


def test_nulls_in_a_large_set_are_found_before_training(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"x": [1.0] * 999 + [None], "y": np.arange(1000)}), path, row_group_size=100)
    refused(path, "row 999", window_mb=0.0001)


def test_a_set_that_changes_or_goes_while_in_use(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    write(path, 0, 1000, group=100)
    source = data.parquet(path, features="x", label="y", window_mb=0.001)
    source.check()
    write(path, 0, 1001, group=100)
    with pytest.raises(DataError, match="changed while it was in use"):
        epoch(source, 2)
    path.unlink()
    with pytest.raises(DataError, match="cannot be read"):
        epoch(source, 2)


def test_a_footer_that_lies_about_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    write(path, 0, 300)
    good = path.read_bytes()
    count = b"\x16\xd8\x04"  # Thrift: an i64 field, zigzag 300
    assert good.count(count) >= 2
    path.write_bytes(good.replace(count, b"\x16\xd8\x64"))
    refused(path, "rows.parquet")


@pytest.mark.parametrize("name", ["arrow.py_extension_type", "ray.data.arrow_tensor"])
@pytest.mark.parametrize("column", ["x", "other"])
def test_extension_types_never_run_code(tmp_path: Path, name: str, column: str) -> None:
    canary = tmp_path / "canary"
    payload = b"cbuiltins\nopen\n(S'" + str(canary).encode() + b"'\nS'w'\ntR."
    fields = [
        pa.field(
            key,
            pa.float64(),
            metadata={b"ARROW:extension:name": name.encode(), b"ARROW:extension:metadata": payload}
            if key == column
            else None,
        )
        for key in ("x", "y", "other")
    ]
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table([[1.0], [1.0], [1.0]], schema=pa.schema(fields)), path)
    refused(path, "rows.parquet", "extension types")
    assert not canary.exists()


def test_an_option_that_cannot_be(folder: Path) -> None:
    for how in (
        {"batch_size": 0},
        {"batch_size": True},
        {"on_invalid": "fill"},
        {"window_mb": 0},
        {"dtype": "str"},
        {"label_dtype": "int3"},
        {"features": []},
        {"dtype": "int64", "scale": 2.0},
    ):
        with pytest.raises(ConfigError):
            data.parquet(folder, **{"features": "x", **how})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="rank 2 of 2"):
        list(data.parquet(folder, features="x").batches(rank=2, size=2, seed=0, epoch=0))
    refused(folder, "whole numbers", dtype="int64")


def test_values_that_do_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"x": [1, 300], "y": pa.array([1, 2**64 - 1], pa.uint64())}), path)
    refused(path, "rows.parquet", "does not fit")
    refused(path, "rows.parquet", "does not fit", dtype="uint8", label=None)


def test_tensors_that_cannot_be() -> None:
    for x, y, word in (
        (torch.zeros(0, 2), None, "no rows"),
        (torch.zeros(3), torch.zeros(2), "3 rows"),
        (torch.tensor([[0.0], [float("nan")]]), None, "row 1"),
        (torch.zeros(2), torch.tensor([1.0, float("inf")]), "y has NaN or infinity in row 1"),
    ):
        with pytest.raises(DataError, match=word):
            data.tensors(x, y).check()
    with pytest.raises(DataError, match="is list"):
        data.tensors([1, 2])
    source = data.tensors(np.ones((3, 2)), np.arange(3))
    source.check()
    assert epoch(source, 1)[0][0].x.dtype == torch.float64


class Broken(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, row: int) -> int:
        if row == 3:
            raise KeyError("three")
        return row


class Endless(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_datasets_that_cannot_be() -> None:
    with pytest.raises(DataError, match=r"item 3 of 5 cannot be read: KeyError: 'three'"):
        epoch(data.dataset(Broken()), 1)
    with pytest.raises(DataError, match="map-style"):
        data.dataset(Endless()).check()
    with pytest.raises(DataError, match="no rows"):
        data.dataset([]).check()
    with pytest.raises(DataError, match="items cannot be collated into a batch"):
        epoch(data.dataset([torch.zeros(1), torch.zeros(2)]), 1)


def test_a_dataset_of_dicts_and_its_empty_batch() -> None:
    source = data.dataset([{"a": torch.ones(2)}] * 3, batch_size=1)
    ranks = epoch(source, 2)
    assert ranks[0][0].x["a"].shape == (1, 2) and ranks[0][0].y is None
    assert ranks[1][1].size == 0 and ranks[1][1].x["a"].shape == (0, 2)


def test_a_batch_moves_to_a_device() -> None:
    batch = Batch({"a": [torch.ones(2)], "b": (torch.zeros(1), "text")}, None, 2).to("meta")
    assert batch.x["a"][0].device.type == batch.x["b"][0].device.type == "meta"
    assert batch.x["b"][1] == "text" and batch.y is None and len(batch) == 2


def test_errors_are_data() -> None:
    error = DataError("bad", file="f", column="c", row=3)
    assert json.dumps(pickle.loads(pickle.dumps(error)).data) == '{"file": "f", "column": "c", "row": 3}'


def test_an_empty_batch_of_a_collate_that_returns_a_number() -> None:
    rows_of_one = torch.utils.data.TensorDataset(torch.ones(1, 3))

    def collate(items: list[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.stack([x for (x,) in items]), torch.tensor(len(items))

    found = next(data.dataset(rows_of_one, collate=collate).batches(rank=1, size=2, seed=0, epoch=0))
    assert found.size == 0 and found.x.shape == (0, 3) and found.y.shape == ()

"""Every source of rows equals the same rows given as tensors, travels small, and refuses bad input with the way out."""

import gzip
import json
import pickle
from inspect import signature
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.dataset as pads
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import torch
from conftest import missing
from rayps_client.errors import ConfigError, DataError
from rayps_client.parquet_rows import parquet as light_parquet
from rayps_client.rows import tensors as light_tensors
from small_work import train
from torch import nn

import rayps
from rayps import data
from rayps.data.local_files import local_files
from rayps.data.tabular.table_rows import ChunkedTable

ROWS = 103
OPTIONS = {"features": ["a", "b"], "label": "y", "batch_size": 7}


def package(name):
    """Import a package of an extra; skip where it is not installed, or fail where everything is required."""
    try:
        return __import__(name)
    except ImportError:
        return missing(name)


def table():
    random = np.random.default_rng(0)
    a, b = random.normal(size=(2, ROWS)).astype(np.float32)
    who = [f"k{row * row % 5}" for row in range(ROWS)]
    return pa.table({"more": np.zeros(ROWS), "a": a, "y": np.arange(ROWS) % 10, "b": b, "who": who})


def rows_as_tensors(**more):
    rows = table()
    x = np.stack([rows["a"].to_numpy(), rows["b"].to_numpy()], axis=1)
    return data.tensors(x, rows["y"].to_numpy().copy(), batch_size=7, **more)


def write_feather(path, rows, compression):
    feather.write_feather(rows, str(path), compression=compression, chunksize=17)
    return path


def write_stream(path):
    with pa.ipc.new_stream(str(path), table().schema) as writer:
        writer.write_table(table(), max_chunksize=20)
    return path


def write_json(path, opener=open):
    with opener(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in table().to_pylist())
    return path


def csv_files(folder):
    pacsv.write_csv(table().slice(0, 60), folder / "0.csv")
    with gzip.open(folder / "1.csv.gz", "wb") as file:
        pacsv.write_csv(table().slice(60), file)
    return folder


def dataset_of(folder):
    pq.write_table(table(), folder / "rows.parquet", row_group_size=30)
    return pads.dataset(folder / "rows.parquet")


def hugging(folder):
    package("datasets").Dataset(table()).save_to_disk(str(folder / "hf"))
    return package("datasets").load_from_disk(str(folder / "hf"))


TABLES = {  # sources with columns: from a folder and options to the source
    "table": lambda folder, **o: data.arrow(table(), **o),
    "batch": lambda folder, **o: data.arrow(table().combine_chunks().to_batches()[0], **o),
    "arrow files": lambda folder, **o: data.arrow(
        [
            write_feather(folder / "0.arrow", table().slice(0, 50), "uncompressed"),
            write_feather(folder / "1.arrow", table().slice(50), "uncompressed"),
        ],
        **o,
    ),
    "compressed": lambda folder, **o: data.arrow(write_feather(folder / "0.feather", table(), "lz4"), **o),
    "stream": lambda folder, **o: data.arrow(write_stream(folder / "0.arrow"), **o),
    "dataset": lambda folder, **o: data.arrow(dataset_of(folder), **o),
    "pandas": lambda folder, **o: data.pandas(package("pandas") and table().to_pandas(), **o),
    "polars": lambda folder, **o: data.polars(package("polars").from_arrow(table()), **o),
    "csv": lambda folder, **o: data.csv(csv_files(folder), **o),
    "json lines": lambda folder, **o: data.json_lines(write_json(folder / "0.jsonl"), **o),
    "packed json lines": lambda folder, **o: data.json_lines(write_json(folder / "0.jsonl.gz", gzip.open), **o),
    "hugging face": lambda folder, **o: data.huggingface(hugging(folder), **o),
}
FILES = {"arrow files", "compressed", "stream", "csv", "json lines", "packed json lines", "hugging face"}


def same(source, law, size=3, seed=5):
    """Both give the same batches, from several starts, on all ranks, and the source has travelled."""
    source.check()
    source = pickle.loads(pickle.dumps(source))
    assert source.rows() == law.rows() and source.steps(size) == law.steps(size)
    for epoch, start in ((0, 0), (2, 3)):
        for rank in range(size):
            place = {"rank": rank, "size": size, "seed": seed, "epoch": epoch, "start": start}
            for ours, theirs in zip(source.batches(**place), law.batches(**place), strict=True):
                assert ours.size == theirs.size
                assert torch.equal(ours.x, theirs.x.to(ours.x.dtype))
                assert (ours.y is None and theirs.y is None) or torch.equal(ours.y, theirs.y.to(ours.y.dtype))


@pytest.mark.parametrize("window", [64, 0.0001], ids=["held", "by row"])
@pytest.mark.parametrize("kind", TABLES)
def test_rows_of_a_table_are_those_of_tensors(kind, window, tmp_path):
    same(TABLES[kind](tmp_path, window_mb=window, **OPTIONS), rows_as_tensors())
    same(TABLES[kind](tmp_path, window_mb=window, shuffle=False, **OPTIONS), rows_as_tensors(shuffle=False), size=40)


@pytest.mark.parametrize("window", [64, 0.0001], ids=["held", "by row"])
@pytest.mark.parametrize("kind", TABLES)
def test_rows_of_a_table_are_divided_as_those_of_tensors(kind, window, tmp_path):
    for given, law in (
        ("who", rows_as_tensors(client=table()["who"])),
        (data.dirichlet(0.5, clients=4), rows_as_tensors(client=data.dirichlet(0.5, clients=4))),
    ):
        source = TABLES[kind](tmp_path, window_mb=window, client=given, **OPTIONS)
        source.check()
        ours, theirs = source.clients, law.clients
        assert (ours.names, ours.sizes.tolist(), ours.digest) == (theirs.names, theirs.sizes.tolist(), theirs.digest)
        assert torch.equal(ours.batch(ours.rows(1)).x, theirs.batch(theirs.rows(1)).x)
        source.keeps_rows = law.keeps_rows = True
        same(source, law)


@pytest.mark.parametrize("kind", sorted(FILES))
def test_files_travel_as_paths(kind, tmp_path, monkeypatch):
    source = TABLES[kind](tmp_path, **OPTIONS)
    source.check()
    next(source.batches(rank=0, size=1, seed=0, epoch=0))
    assert len(pickle.dumps(source)) < 4000


def test_frames_travel_with_the_used_columns_only():
    rows = table().append_column("large", pa.array(np.zeros((ROWS, 1000)).tolist()))
    assert len(pickle.dumps(data.arrow(rows, **OPTIONS))) < 10_000


def test_converted_files_are_removed_with_the_last_user(tmp_path, monkeypatch):
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("rayps.cluster.scratch._short_temp", lambda: folder)
    pacsv.write_csv(table(), tmp_path / "rows.csv")
    one, two = (data.csv(tmp_path / "rows.csv", **OPTIONS) for _ in range(2))
    assert one.rows() == two.rows() == ROWS and len(list(folder.iterdir())) == 1  # they share it
    del one
    assert len(list(folder.iterdir())) == 1
    del two
    assert list(folder.iterdir()) == []
    changed = data.csv(tmp_path / "rows.csv", **OPTIONS)
    assert changed.rows() == ROWS
    pacsv.write_csv(table().slice(1), tmp_path / "rows.csv")
    assert data.csv(tmp_path / "rows.csv", **OPTIONS).rows() == ROWS - 1


def test_relative_paths_are_those_of_the_process_that_gives_them(tmp_path, monkeypatch):
    pacsv.write_csv(table(), tmp_path / "rows.csv")
    monkeypatch.chdir(tmp_path)
    source = data.csv("rows.csv", **OPTIONS)
    monkeypatch.chdir("/")
    assert pickle.loads(pickle.dumps(source)).rows() == ROWS


# ------------------------------------------------------------------------------------------------ values


@pytest.mark.parametrize("window", [64, 0.0001], ids=["held", "by row"])
def test_invalid_rows_are_left_out_or_named(window, tmp_path):
    lines = "a,b,y\n" + "".join(f"{row},{'' if row % 10 == 3 else row},{row}\n" for row in range(40))
    (tmp_path / "rows.csv").write_text(lines)
    source = data.csv(tmp_path / "rows.csv", window_mb=window, **OPTIONS)
    with pytest.raises(DataError, match=r"column 'b' is null in row \d+ of .*rows.csv\n.*on_invalid=\"drop\"") as error:
        source.check()
        list(source.batches(rank=0, size=1, seed=0, epoch=0))
    assert error.value.data["row"] % 10 == 3
    dropped = data.csv(tmp_path / "rows.csv", window_mb=window, on_invalid="drop", client=data.iid(3), **OPTIONS)
    seen = [int(y) for batch in dropped.batches(rank=0, size=1, seed=0, epoch=0) for y in batch.y]
    assert sorted(seen) == [row for row in range(40) if row % 10 != 3]
    assert dropped.clients.sizes.sum() == 36


@pytest.mark.parametrize("kind", ["table", "pandas", "polars"])
@pytest.mark.parametrize(
    ("column", "values", "words"),
    [
        ("text", ["a", "b"], "'text' is .*string.*\n?.*text needs a number for each value"),
        ("day", pa.array([0, 1], pa.date32()), "'day' is .*: convert it to a number first"),
        ("some", [1.0, None], "'some' is null in row 1"),
        ("nan", [float("nan"), 0.5], "'nan' is (NaN|null) in row 0"),
        ("kind", pa.array(["a", "b"]).dictionary_encode(), "'kind' is .*: text needs a number for each value"),
        ("lists", [[1.0], [1.0, 2.0]], "'lists' has 2 values where others have 1 in row 1"),
    ],
)
def test_columns_that_are_no_numbers(kind, column, values, words):
    rows = pa.table({column: values})
    if kind == "pandas":
        package("pandas")
    made = {
        "table": lambda: data.arrow(rows, features=column),
        "pandas": lambda: data.pandas(rows.to_pandas(), features=column),
        "polars": lambda: data.polars(package("polars").from_arrow(rows), features=column),
    }[kind]
    with pytest.raises(DataError, match=words) as error:
        source = made()
        source.check()
    assert error.value.data["column"] == column


def test_lists_scale_and_dtypes():
    rows = pa.table({"x": [[0, 255], [51, 102]], "y": [1.5, 2.5]})
    batch = next(
        data.arrow(rows, features="x", label="y", scale=1 / 255, shuffle=False).batches(rank=0, size=1, seed=0, epoch=0)
    )
    assert torch.allclose(batch.x, torch.tensor([[0, 1], [0.2, 0.4]])) and batch.y.tolist() == [1.5, 2.5]
    tokens = data.arrow(rows, features="x", dtype="int64", shuffle=False)
    assert next(tokens.batches(rank=0, size=1, seed=0, epoch=0)).x.tolist() == [[0, 255], [51, 102]]
    with pytest.raises(ConfigError, match=r"scale=0.5 needs float features"):
        data.arrow(rows, features="x", dtype="int64", scale=0.5)


def test_rows_of_a_chunked_table_in_any_order():
    rows = pa.concat_tables([table().slice(first, 10) for first in range(0, ROWS, 10)])
    which = np.random.default_rng(1).integers(0, ROWS, 500)
    taken = ChunkedTable(rows).take(["y", "who"], which)
    assert taken.to_pylist() == table().select(["y", "who"]).take(which).to_pylist()


def refused(make, *words, error=DataError):
    with pytest.raises(error) as said:
        made = make()
        made.check()
        list(made.batches(rank=0, size=1, seed=0, epoch=0))
    assert all(word in str(said.value) for word in words), str(said.value)
    assert len(str(said.value).splitlines()) <= 3


def test_bad_tables(tmp_path):
    refused(lambda: data.arrow(table(), features="c"), "there is no column 'c'")
    refused(lambda: data.arrow(table().slice(0, 0), features="a"), "no rows")
    refused(lambda: data.arrow(table(), features=[]), "features is empty", error=ConfigError)
    refused(lambda: data.arrow(table(), features="a", client="whom"), "there is no column 'whom'", "'who'")
    refused(lambda: data.arrow(5, features="a"), "int is not a path")
    refused(lambda: data.pandas(table(), features="a"), "give a pandas.DataFrame")
    refused(lambda: data.polars(5, features="a"), "give a polars.DataFrame")
    (tmp_path / "x.arrow").write_bytes(b"no Arrow file at all")
    refused(lambda: data.arrow(tmp_path / "x.arrow", features="a"), "x.arrow: cannot be read as an Arrow file")
    whole = write_feather(tmp_path / "y.arrow", table(), "uncompressed").read_bytes()
    (tmp_path / "x.arrow").write_bytes(whole[: len(whole) // 2])
    refused(lambda: data.arrow(tmp_path / "x.arrow", features="a"), "x.arrow: cannot be read as an Arrow file")
    ids = pa.array([b"0" * 16] * 3, pa.binary(16))
    typed = pa.table({"a": pa.ExtensionArray.from_storage(pa.uuid(), ids)})
    write_feather(tmp_path / "z.arrow", typed, "uncompressed")
    refused(lambda: data.arrow(tmp_path / "z.arrow", features="a"), "extension types")
    write_feather(tmp_path / "w.arrow", pa.table({"a": [1]}), "uncompressed")
    refused(lambda: data.arrow([tmp_path / "y.arrow", tmp_path / "w.arrow"], features="a"), "w.arrow", "int64", "float")
    filtered = dataset_of(tmp_path).filter(pads.field("a") > 0)
    refused(lambda: data.arrow(filtered, features="a"), "cannot be sent to workers", "dataset.to_table()")
    union = pads.dataset([dataset_of(tmp_path), dataset_of(tmp_path)])
    assert data.arrow(union, features="a").rows() == 2 * dataset_of(tmp_path).count_rows()
    filtered = union.filter(pads.field("a") > 0)
    refused(lambda: data.arrow(filtered, features="a"), "cannot be sent to workers", "dataset.to_table()")


def test_bad_frames():
    pandas = package("pandas")
    refused(lambda: data.pandas(pandas.DataFrame({"a": [1, "x"]}), features="a"), "'a'", "pandas.to_numeric")
    refused(lambda: data.pandas(pandas.DataFrame({"a": [1]}), features="b"), "there is no column 'b'")
    refused(lambda: data.pandas(pandas.DataFrame([[1, 2]], columns=["a", "a"]), features="a"), "occurs twice")
    polars = package("polars")
    refused(lambda: data.polars(polars.LazyFrame({"a": [1]}), features="a"), "give frame.collect()")
    refused(lambda: data.polars(polars.DataFrame({"a": [1]}), features="b"), "there is no column 'b'")


def test_bad_paths(tmp_path):
    (tmp_path / "rows.csv").write_text("a\n1\n")
    for call in (data.csv, data.json_lines, data.arrow):
        refused(lambda call=call: call(tmp_path / "row.csv", features="a"), "no such file", "did you mean 'rows.csv'")
        refused(lambda call=call: call([], features="a"), "list of paths is empty")
        refused(lambda call=call: call("s3://bucket/rows", features="a"), "not on this host's file system")
        refused(lambda call=call: call(f"{tmp_path}/*.zzz", features="a"), "no file matches")
        (tmp_path / "empty").mkdir(exist_ok=True)
        refused(lambda call=call: call(tmp_path / "empty", features="a"), "no file that ends in")
    (tmp_path / "more" / "_hidden").mkdir(parents=True)
    (tmp_path / "more" / "_hidden" / "x.csv").write_text("a\n1\n")
    (tmp_path / "more" / "y.csv").write_text("a\n1\n")
    assert [Path(file).name for file in local_files("csv", tmp_path / "more", (".csv",)).list()] == ["y.csv"]


# ------------------------------------------------------------------------------------------------ whole numbers

EXACT = 2**24  # up to which float32 holds all whole numbers
COLUMNS = {
    **TABLES,
    "parquet": lambda folder, **o: data.parquet(str(write_parquet(folder)), **o),
    "light parquet": lambda folder, **o: light_parquet(write_parquet(folder), **o),
    "memmap": lambda folder, **o: data.memmap(
        table()["a"].to_numpy()[:, None], dtype=o.get("dtype", "float32"), shuffle=o["shuffle"]
    ),
}


def write_parquet(folder):
    pq.write_table(table(), folder / "rows.parquet", row_group_size=30)
    return folder / "rows.parquet"


def first_of_all_rows(source):
    source.check()
    return np.asarray(source.take(np.arange(source.rows())).x)[:, 0].astype(np.float64)


@pytest.mark.parametrize("window", [64, 0.0001], ids=["held", "by row"])
@pytest.mark.parametrize("kind", COLUMNS)
def test_whole_numbers_that_the_dtype_does_not_hold_are_refused(kind, window, tmp_path, monkeypatch):
    plain = table()

    def rows(value, of="int64", **more):
        """Column a is whole, with `value` in row 70."""
        a = np.arange(ROWS).astype(of)
        a[70] = value
        large = plain.set_column(1, "a", pa.array(a))
        monkeypatch.setitem(globals(), "table", lambda: large)
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        return first_of_all_rows(
            COLUMNS[kind](folder, features=["a", "b"], window_mb=window, shuffle=False, batch_size=7, **more)
        )

    for value, of, more in (
        (EXACT + 1, "int64", {}),
        (-EXACT - 1, "int64", {"on_invalid": "drop"}),
        (EXACT + 1, "int32", {}),
        (2**62 + 1, "uint64", {}),
        (2**53 + 1, "int64", {"dtype": "float64"}),
    ):
        with pytest.raises(DataError, match=f"that {more.get('dtype', 'float32')} does not hold exactly") as said:
            rows(value, of, **more)
        assert said.value.data["row"] == 70 and said.value.data["column"] == ("x" if kind == "memmap" else "a")
        assert f'dtype="{"float64" if abs(value) < 2**53 else "int64"}"' in str(said.value)
    for value in (EXACT, -EXACT, 2**40):
        assert rows(value)[70] == value
    assert rows(EXACT + 1, dtype="float64")[70] == EXACT + 1


def test_whole_numbers_in_lists_and_beside_nulls(tmp_path):
    lists = pa.table({"x": [[1, 2], None, [3, EXACT + 3]]})
    refused(lambda: data.arrow(lists, features="x", on_invalid="drop"), f"is {EXACT + 3} at index 1", "in row 2")
    (tmp_path / "rows.jsonl").write_text(f'{{"x": [1, 2]}}\n{{"x": [{EXACT + 1}, 2]}}\n')
    refused(lambda: data.json_lines(tmp_path / "rows.jsonl", features="x"), f"is {EXACT + 1} at index 0", "row 1 of")
    codes = pa.table({"x": pa.array([1, EXACT + 1, None]).dictionary_encode()})
    refused(lambda: data.arrow(codes, features="x"), f"'x' is {EXACT + 1}", "in row 1")
    (tmp_path / "rows.csv").write_text(f"x,y\n1,2\n{EXACT}.5,2\n1e9,2\n")  # a number with a fraction is rounded
    assert first_of_all_rows(data.csv(tmp_path / "rows.csv", features="x", shuffle=False))[2] == 1e9
    refused(lambda: data.memmap(np.array([[300]]), dtype="uint8"), "x has 300 in row 0", "uint8 does not hold")


def test_every_source_with_columns_is_among_them():
    takes = {name for name in data.__all__ if "options" in signature(getattr(data, name)).parameters}
    assert takes == {"arrow", "pandas", "polars", "csv", "json_lines", "huggingface", "ray"}, "add it to TABLES"


# ------------------------------------------------------------------------------------------------ no rows, names twice


def source_of(kind, rows, folder, monkeypatch, **options):
    """Return the source of a kind with `rows` in place of `table()`."""
    monkeypatch.setitem(globals(), "table", lambda: rows)
    return COLUMNS[kind](folder, **{"features": ["a", "b"], "label": "y", "batch_size": 7, "shuffle": False} | options)


# a table without rows has no batch, and `datasets` does not load a folder without rows
@pytest.mark.parametrize("kind", sorted(COLUMNS.keys() - {"batch", "hugging face"}))
def test_a_source_without_rows_says_so(kind, tmp_path, monkeypatch):
    refused(lambda: source_of(kind, table().slice(0, 0), tmp_path, monkeypatch), "no rows", "nothing to train on")


# a frame of polars, a data set and an object of JSON cannot have a name twice: those who make them refuse it
ONE_NAME_EACH = {"polars", "dataset", "hugging face", "memmap", "json lines", "packed json lines"}


@pytest.mark.parametrize("kind", sorted(COLUMNS.keys() - ONE_NAME_EACH))
def test_a_column_that_occurs_twice_is_refused_where_it_is_used(kind, tmp_path, monkeypatch):
    plain = table()
    for name in ("a", "y"):
        twice = plain.append_column(name, pa.array(np.ones(ROWS)))
        (tmp_path / name).mkdir()
        refused(
            lambda twice=twice, name=name: source_of(kind, twice, tmp_path / name, monkeypatch),
            f"column {name!r} occurs twice: rename it",
        )
    (tmp_path / "more").mkdir()
    unused = plain.append_column("more", pa.array(np.ones(ROWS)))
    found = first_of_all_rows(source_of(kind, unused, tmp_path / "more", monkeypatch))
    assert np.array_equal(found.astype(np.float32), plain["a"].to_numpy())


@pytest.mark.parametrize("kind", sorted(COLUMNS.keys() - {"memmap"}))
def test_a_feature_that_is_named_twice_is_refused(kind, tmp_path, monkeypatch):
    rows = table()
    refused(
        lambda: source_of(kind, rows, tmp_path, monkeypatch, features=["a", "b", "a"]),
        "features has 'a' twice",
        error=ConfigError,
    )


def test_a_key_that_occurs_twice_in_an_object_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("rayps.data.texts.text_tables._BLOCK", 64)
    file = tmp_path / "rows.jsonl"
    for before in (0, 99):
        file.write_text('{"a": 1}\n' * before + '{"a": 1, "a": 2}\n')
        refused(lambda: data.json_lines(file, features="a"), "rows.jsonl: after row", "'a' occurs twice", "rename it")


# ------------------------------------------------------------------------------------------------ byte order


def test_arrays_of_the_other_byte_order_are_converted(tmp_path):
    x, y = np.stack([table()["a"], table()["b"]], axis=1), np.arange(ROWS) % 10
    other_x, other_y = x.astype(">f4"), y.astype(">i8")
    law = data.tensors(x, y, batch_size=7, shuffle=False)
    np.save(tmp_path / "x.npy", other_x)
    raw = np.memmap(tmp_path / "x.raw", dtype=">f4", mode="w+", shape=x.shape)
    raw[:] = x
    options = {"batch_size": 7, "shuffle": False}
    frame = package("pandas").DataFrame({"a": other_x[:, 0], "b": other_x[:, 1], "y": other_y})
    light = light_tensors(other_x, other_y, **options)
    assert light.x.dtype.isnative and np.array_equal(light.x, x) and np.array_equal(light.y, y)
    for source in (
        data.tensors(other_x, other_y, **options),
        data.memmap(tmp_path / "x.npy", other_y, **options),
        data.memmap(raw, other_y, **options),
        data.memmap(other_x, other_y, dtype="float32", **options),
        data.pandas(frame, features=["a", "b"], label="y", **options),
    ):
        same(source, law)
    ids = np.arange(ROWS) % 5
    given = data.tensors(x, y, client=ids.astype(">i4")).clients
    assert given.digest == data.tensors(x, y, client=ids.astype("<i4")).clients.digest
    pairs = list(zip(other_x, other_y, strict=True))
    refused(lambda: data.dataset(pairs), "cannot be collated", "x.astype(x.dtype.newbyteorder")


# ------------------------------------------------------------------------------------------------ CSV and JSON lines


def test_files_without_rows_beside_files_with_rows(tmp_path, monkeypatch):
    for name, text in (("rows", "a,y\n1.5,2\n"), ("header", "a,y\n"), ("cut", "a,y"), ("blank", "\n"), ("none", "")):
        (tmp_path / f"{name}.csv").write_text(text)
    rows, *others = (tmp_path / f"{name}.csv" for name in ("rows", "header", "cut", "blank", "none"))
    (tmp_path / "rows.jsonl").write_text('{"a": 1.5, "y": 2}')
    (tmp_path / "none.jsonl").write_text("\n")
    sources = [data.csv(files, features="a", label="y") for file in others for files in ([file, rows], [rows, file])]
    sources += [data.csv([*others, rows], features="a", label="y")]
    sources += [data.json_lines([tmp_path / "none.jsonl", tmp_path / "rows.jsonl"], features="a", label="y")]
    for source in sources:
        source.check()
        batch = source.take(np.arange(1))
        assert source.rows() == 1 and batch.x.tolist() == [[1.5]] and batch.y.tolist() == [2]
    for files in ([file] for file in others):
        refused(lambda files=files: data.csv(files, features="a", label="y"), "no rows")
    refused(lambda: data.csv(others, features="a", label="y"), "no rows")
    refused(lambda: data.csv([rows, others[0]], features="a", names=["b", "c"]), "there is no column 'a'")


TEXTS = {  # sources of text: how a row is written, and the source
    "csv": ("größe,y,who\n", "{0},{1},{2}\n", data.csv),
    "json lines": ("", '{{"größe": {0}, "y": {1}, "who": "{2}"}}\n', data.json_lines),
}


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1", "cp1252", "utf-16", "utf-16-le", "utf-32"])
@pytest.mark.parametrize("kind", TEXTS)
def test_text_in_any_encoding_is_the_same_rows(kind, encoding, packed, tmp_path, monkeypatch):
    monkeypatch.setattr("rayps.data.texts.text_tables._BLOCK", 64)
    header, row, call = TEXTS[kind]
    names = ["Müller", "Groß", "Ångström"]
    text = header + "".join(row.format(n / 4, n, names[n % 3]) for n in range(ROWS))
    file = tmp_path / f"rows.{'csv' if kind == 'csv' else 'jsonl'}{'.gz' if packed else ''}"
    file.write_bytes(gzip.compress(text.encode(encoding)) if packed else text.encode(encoding))
    source = call(file, features="größe", label="y", client="who", encoding=encoding, shuffle=False, batch_size=7)
    same(
        source,
        data.tensors(np.arange(ROWS, dtype=np.float32)[:, None] / 4, np.arange(ROWS), shuffle=False, batch_size=7),
    )
    assert source.clients.names == tuple(sorted(names, key=str.encode))


@pytest.mark.parametrize("kind", TEXTS)
def test_another_encoding_is_refused_with_the_byte(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("rayps.data.texts.text_tables._BLOCK", 64)
    header, row, call = (part.replace("größe", "size") if isinstance(part, str) else part for part in TEXTS[kind])
    text = header + "".join(row.format(n, n, "M") for n in range(60)) + row.format(60, 60, "Müller")
    file, options = tmp_path / "rows", {"features": "size", "label": "y"}
    file.write_bytes(text.encode("latin-1"))
    line = text[: text.index("ü")].count("\n") + 1
    refused(
        lambda: call(file, **options),
        f"line {line}: byte {text.index('ü')} is 0xfc, which is not utf-8",
        "give the encoding of the file, e.g. encoding='latin-1'",
    )
    refused(lambda: call(file, encoding="ascii", **options), f"byte {text.index('ü')} is 0xfc", "encoding='utf-8'")
    refused(lambda: call(file, encoding="utf-16", **options), "UTF-16", "encoding='utf-8'")
    file.write_bytes(text.encode("utf-16"))
    refused(lambda: call(file, **options), "line 1: byte 0 is 0xff", "encoding='utf-16'")
    for encoding in ("latin-15x", "hex", None):
        refused(lambda encoding=encoding: call(file, encoding=encoding, **options), "encoding", error=ConfigError)


def test_numbers_that_become_fractions_after_the_first_block(tmp_path, monkeypatch):
    monkeypatch.setattr("rayps.data.texts.text_tables._BLOCK", 64)
    (tmp_path / "rows.csv").write_text(
        "a,y\n" + "".join(f"{row if row < 50 else row + 0.5},{row}\n" for row in range(99))
    )
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"a": row if row < 50 else row + 0.5, "y": row}) + "\n" for row in range(99))
    )
    for source in (
        data.csv(tmp_path / "rows.csv", features="a", label="y", shuffle=False),
        data.json_lines(tmp_path / "rows.jsonl", features="a", label="y", shuffle=False),
    ):
        found = torch.cat([batch.x[:, 0] for batch in source.batches(rank=0, size=1, seed=0, epoch=0)])
        assert found.tolist() == [row if row < 50 else row + 0.5 for row in range(99)]


def test_bad_csv(tmp_path, monkeypatch):
    monkeypatch.setattr("rayps.data.texts.text_tables._BLOCK", 64)
    file = tmp_path / "rows.csv"
    file.write_text("a,y\n" + "1,2\n" * 99 + "x,2\n")
    refused(lambda: data.csv(file, features="a", label="y"), "rows.csv: column 'a'", "invalid value 'x'", "types=")
    refused(lambda: data.csv(file, features="b"), "there is no column 'b'")
    refused(lambda: data.csv(file, features="a", types={"a": "number"}), "name of an Arrow type", error=ConfigError)
    refused(lambda: data.csv(file, features="a", delimiter="::"), "delimiter", error=ConfigError)
    file.write_text("a,y\n")
    refused(lambda: data.csv(file, features="b", label="y"), "there is no column 'b'")
    file.write_text("a,y\n1,2\n1\n")
    refused(lambda: data.csv(file, features="a"), "rows.csv", "cannot be read")
    file.write_text("1;2\n3;4\n")
    named = data.csv(file, features="a", label="y", names=["a", "y"], delimiter=";", shuffle=False)
    assert next(named.batches(rank=0, size=1, seed=0, epoch=0)).y.tolist() == [2, 4]


def test_bad_json(tmp_path, monkeypatch):
    monkeypatch.setattr("rayps.data.texts.text_tables._BLOCK", 64)
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": 1}\n' * 99 + '{"a": "x"}\n')
    refused(lambda: data.json_lines(file, features="a"), "rows.jsonl: after row", "types=")
    file.write_text('{"a": 1}\n{"a": \n')
    refused(lambda: data.json_lines(file, features="a"), "rows.jsonl", "JSON")
    file.write_text("")
    refused(lambda: data.json_lines(file, features="a"), "no rows")
    file.write_text('{"b": 1}\n')
    refused(lambda: data.json_lines(file, features="a"), "there is no column 'a'")
    file.write_text('{"a": 1}\n' * 99 + '{"b": 1}\n')
    refused(lambda: data.json_lines(file, features="a"), "'a' is null in row 99 of")


# ------------------------------------------------------------------------------------------------ Hugging Face


def test_hugging_face_rows_in_their_own_format():
    datasets = package("datasets")
    rows = datasets.Dataset.from_dict({"ids": [[row, row + 1] for row in range(9)], "label": list(range(9))})
    source = data.huggingface(rows, label="label", batch_size=4, shuffle=False)
    source.check()
    batches = list(source.batches(rank=0, size=1, seed=0, epoch=0))
    assert batches[0].x["ids"].tolist() == [[0, 1], [1, 2], [2, 3], [3, 4]] and batches[0].y.tolist() == [0, 1, 2, 3]
    whole = next(data.huggingface(rows, shuffle=False).batches(rank=0, size=1, seed=0, epoch=0))
    assert set(whole.x) == {"ids", "label"} and whole.y is None
    chosen = data.huggingface(rows.select([5, 3]), features="ids", dtype="int64", label="label", shuffle=False)
    assert next(chosen.batches(rank=0, size=1, seed=0, epoch=0)).y.tolist() == [5, 3]  # of the selection
    refused(lambda: data.huggingface(rows, scale=2.0), "scale needs features", error=ConfigError)
    refused(lambda: data.huggingface(rows, label="no"), "there is no column 'no'")
    refused(lambda: data.huggingface(datasets.DatasetDict({"train": rows})), "ds[SPLIT]", "'train'")
    refused(lambda: data.huggingface(rows.to_iterable_dataset()), "rayps.data.iterable(ds)")
    refused(lambda: data.huggingface(5), "give a datasets.Dataset")


# ------------------------------------------------------------------------------------------------ arrays


def test_mapped_arrays_are_those_of_tensors(tmp_path):
    random = np.random.default_rng(0)
    x, y = random.normal(size=(ROWS, 2, 3)).astype(np.float32), np.arange(ROWS) % 10
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    law = data.tensors(x, y, batch_size=7)
    same(data.memmap(tmp_path / "x.npy", tmp_path / "y.npy", batch_size=7), law)
    same(data.memmap(tmp_path / "x.npy", y, batch_size=7), law)
    raw = np.memmap(tmp_path / "x.raw", dtype=np.float32, mode="w+", shape=(ROWS + 3, 2, 3), offset=8)
    raw[3:] = x
    source = data.memmap(raw[3:], tmp_path / "y.npy", batch_size=7)  # a part of a file
    assert len(pickle.dumps(source)) < 2000
    same(source, law)
    same(data.memmap(np.load(tmp_path / "x.npy", mmap_mode="r") * 1, y, batch_size=7), law)  # no file has these values
    same(data.memmap(raw[3:][::-1], y, batch_size=7), data.tensors(x[::-1].copy(), y, batch_size=7))
    divided = data.memmap(tmp_path / "x.npy", tmp_path / "y.npy", batch_size=7, client=data.shards(2, clients=5))
    assert divided.clients.digest == data.tensors(x, y, client=data.shards(2, clients=5)).clients.digest
    small = (np.arange(12) % 255).astype(np.uint8).reshape(6, 2)
    batch = next(data.memmap(small, dtype="float32", scale=1 / 255).batches(rank=0, size=1, seed=0, epoch=0))
    assert batch.x.dtype == torch.float32 and batch.x.max() < 0.05


def test_bad_arrays(tmp_path):
    np.save(tmp_path / "x.npy", np.array([[1.0], [np.nan]]))
    refused(lambda: data.memmap(tmp_path / "x.npy"), "NaN or infinity in row 1")
    refused(lambda: data.memmap(tmp_path / "none.npy"), "cannot be mapped", "none.npy")
    np.savez(tmp_path / "x.npz", a=np.zeros(3))
    refused(lambda: data.memmap(tmp_path / "x.npz"), "several arrays")
    np.save(tmp_path / "o.npy", np.array([{}], dtype=object), allow_pickle=True)
    refused(lambda: data.memmap(tmp_path / "o.npy"), "cannot be mapped")
    refused(lambda: data.memmap(np.zeros((3, 1)), np.zeros(2)), "x has 3 rows, y has 2")
    refused(lambda: data.memmap(np.zeros((0, 1))), "no rows")
    refused(lambda: data.memmap(np.array(["a"])), "give numbers")
    refused(lambda: data.memmap([1]), "x is list")
    refused(lambda: data.memmap(np.zeros(3), scale=2.0), 'give dtype="float32"', error=ConfigError)


# ------------------------------------------------------------------------------------------------ images


def write_images(folder, shape=(6, 5, 3)):
    image = package("PIL.Image").Image
    random = np.random.default_rng(0)
    found = []
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(6):
            pixels = random.integers(0, 256, shape, dtype=np.uint8)
            image.fromarray(pixels).save(folder / name / f"{number}.png")
            found.append(pixels)
    return np.stack(found)


def test_images_are_those_of_tensors(tmp_path):
    pixels = write_images(tmp_path)
    x = torch.from_numpy(pixels.transpose(0, 3, 1, 2).astype(np.float32) / np.float32(255))
    source = data.images(tmp_path, batch_size=5)
    same(source, data.tensors(x, torch.arange(12) // 6, batch_size=5))
    assert source.classes == ("cat", "dog") and len(pickle.dumps(source)) < 1500
    gray = next(data.images(tmp_path, size=(4, 3), grayscale=True).batches(rank=0, size=1, seed=0, epoch=0))
    assert gray.x.shape == (12, 1, 4, 3)
    flat = data.images(tmp_path, transform=lambda image: torch.tensor(image.size))
    assert next(flat.batches(rank=0, size=1, seed=0, epoch=0)).x[0].tolist() == [5, 6]  # width, height
    assert data.images(tmp_path, client=data.shards(1, clients=2)).clients.sizes.tolist() == [6, 6]


def test_bad_images(tmp_path, monkeypatch):
    write_images(tmp_path / "good")
    (tmp_path / "good" / "dog" / "3.png").write_bytes(b"not an image")
    refused(lambda: data.images(tmp_path / "good"), "dog/3.png: the image cannot be decoded")
    write_images(tmp_path / "other")
    package("PIL.Image").Image.new("RGB", (9, 9)).save(tmp_path / "other" / "dog" / "9.png")
    refused(lambda: data.images(tmp_path / "other"), "give size=(HEIGHT, WIDTH)")
    refused(lambda: data.images(tmp_path / "none"), "no such directory")
    (tmp_path / "empty" / "cat").mkdir(parents=True)
    refused(lambda: data.images(tmp_path / "empty"), "the class has no image")
    refused(lambda: data.images(tmp_path / "good", size=0), "size is 0", error=ConfigError)
    refused(lambda: data.images(tmp_path / "other", transform=lambda image: 1 / 0), "transform failed")
    monkeypatch.setitem(__import__("sys").modules, "PIL.Image", None)
    refused(lambda: data.images(tmp_path / "good"), "pip install 'rayps[images]'", error=ConfigError)


# ------------------------------------------------------------------------------------------------ text


def windows(tokens, window):
    count = (len(tokens) - 1) // window
    return [tokens[k * window : (k + 1) * window + 1] for k in range(count)]


def test_windows_of_text_are_those_of_tensors(tmp_path):
    texts = ["the quick brown fox\njumps over the lazy dog\n" * 9, "", "é" * 40, "short"]
    for number, one in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(one, encoding="utf-8")
    rows = torch.tensor([w for one in texts for w in windows(list(one.encode()), 8)])
    law = data.tensors(rows[:, :-1], rows[:, 1:], batch_size=7)
    same(data.text(tmp_path, window=8, batch_size=7), law)
    by_character = torch.tensor([w for one in texts for w in windows(list(map(ord, one)), 8)])
    source = data.text(tmp_path, window=8, batch_size=7, tokenizer=characters)
    same(source, data.tensors(by_character[:, :-1], by_character[:, 1:], batch_size=7))
    assert len(pickle.dumps(source)) < 1500
    clients = data.text(tmp_path, window=8, client="file").clients
    assert [Path(name).name for name in clients.names] == ["0.txt", "2.txt"]


def characters(text):
    return [ord(one) for one in text]


def test_a_tokenizer_of_hugging_face(tmp_path):
    tokenizers = package("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    (tmp_path / "x.txt").write_text("a b\n" * 50 + "b c")
    batch = next(data.text(tmp_path, window=101, tokenizer=words).batches(rank=0, size=1, seed=0, epoch=0))
    assert batch.y[0].tolist() == ([0, 1] * 50 + [1, 2])[1:102]


def test_text_larger_than_a_piece(tmp_path, monkeypatch):
    monkeypatch.setattr("rayps.data.texts.text_windows._PIECE", 7)
    monkeypatch.setattr("rayps.data.texts.text_windows._LONGEST", 20)
    text = "ab\ncé" * 30 + "x" * 100
    (tmp_path / "x.txt").write_text(text, encoding="utf-8")
    source = data.text(tmp_path / "x.txt", window=5, tokenizer=characters, shuffle=False, batch_size=1000)
    found = next(source.batches(rank=0, size=1, seed=0, epoch=0))
    assert found.x.tolist() == [w[:-1] for w in windows(characters(text), 5)]


def test_bad_text(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"abc\xff\xfe" * 10)
    refused(lambda: data.text(tmp_path / "x.txt", window=4, tokenizer=characters), "x.txt: it is not UTF-8 at about")
    refused(lambda: data.text(tmp_path / "x.txt", window=50), "the longest of 1 has 50 tokens", "smaller window")
    refused(lambda: data.text(tmp_path / "x.txt", window=0), "window is 0", error=ConfigError)
    refused(lambda: data.text(tmp_path / "x.txt", window=4, client="who"), 'give "file"', error=ConfigError)
    refused(lambda: data.text(tmp_path / "x.txt", window=4, tokenizer=5), "tokenizer is int", error=ConfigError)
    (tmp_path / "x.txt").write_text("text")
    refused(
        lambda: data.text(tmp_path / "x.txt", window=1, tokenizer=lambda text: 1 / 0), "x.txt: the tokenizer failed"
    )
    refused(lambda: data.text(tmp_path / "x.txt", window=1, tokenizer=lambda text: [-1]), "return a list of whole")


# ------------------------------------------------------------------------------------------------ runs


class Sourced(rayps.Workload):
    """A linear model on rows of any source."""

    def __init__(self, rows):
        self.rows = rows

    def data(self):
        return self.rows

    def model(self):
        return nn.Linear(2, 10)

    def loss(self, model, batch):
        return torch.nn.functional.cross_entropy(model(batch.x), batch.y)


def test_a_run_on_a_table_is_one_on_tensors(tmp_path):
    losses = [
        train(Sourced(rows), "all_reduce", workers=2, epochs=2).history.column("loss").to_pylist()
        for rows in (rows_as_tensors(), data.csv(csv_files(tmp_path), **OPTIONS))
    ]
    assert losses[0] == losses[1]


@pytest.mark.ray
def test_ray_data_is_read_on_a_real_ray(ray_cluster, tmp_path):
    """Blocks of a dataset that Ray executes, on workers that are processes; a tensor column becomes lists."""
    import ray
    import ray.data

    pq.write_table(table(), tmp_path / "rows.parquet", row_group_size=20)
    made = ray.data.read_parquet(str(tmp_path / "rows.parquet"), override_num_blocks=5)
    source = data.ray(made, **OPTIONS)
    same(source, rows_as_tensors())
    stacked = made.map_batches(lambda rows: {"x": np.stack([rows["a"], rows["b"]], axis=1), "y": rows["y"]})
    tensors = data.ray(stacked, features="x", label="y", batch_size=7)
    same(tensors, rows_as_tensors())
    losses = [
        train(Sourced(rows), "all_reduce", ray_cluster, workers=2, epochs=2).history.column("loss").to_pylist()
        for rows in (rows_as_tensors(), source)
    ]
    assert losses[0] == losses[1]
    refused(lambda: data.ray(made, features="c"), "there is no column 'c'")
    refused(lambda: data.ray(table(), features="a"), "give a ray.data.Dataset")

    @ray.remote
    class Other:  # a process that has no file yet, as one on another host
        def rows(self, packed):
            from rayps.cluster.ray_cluster import fetch_objects

            return sum(block.num_rows for block in fetch_objects(packed, 60.0))

        def refused(self):
            try:
                data.ray(ray.data.range(3), features="id")
            except DataError as error:
                return str(error)

    other = Other.remote()
    from rayps.cluster.ray_cluster import pack_objects

    packed = pack_objects(made.materialize().to_arrow_refs())
    assert ray.get(other.rows.remote(packed), timeout=120) == ROWS
    assert "this process is a worker of Ray" in ray.get(other.refused.remote(), timeout=120)
    ray.kill(other)

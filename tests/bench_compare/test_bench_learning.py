"""`python -m benchmarks learning`, and what it is about: clients with two labels learn ten together, and not alone."""

import gzip
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from rayps_client.errors import ConfigError

from benchmarks.__main__ import main as benchmarks_main
from benchmarks.algorithms import learning
from benchmarks.algorithms.learning import Digits, Images, bench_learning, choose_held_out, load
from rayps import data

LOCAL = "fraction=0.5,local_epochs=5,batch_size=10"


def drawn(n: int, seed: int, noise: float = 1.8) -> tuple[torch.Tensor, torch.Tensor]:
    """Ten patterns of 64 pixels in noise."""
    patterns = torch.randn(10, 64, generator=torch.Generator().manual_seed(99))
    random = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 10, (n,), generator=random)
    return patterns[y] + noise * torch.randn(n, 64, generator=random), y


def generated(n: int = 600) -> Images:
    return Images(*drawn(n, 1), *drawn(1000, 2))


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_clients_of_two_labels_learn_ten_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "load", lambda folder: generated())
    monkeypatch.setitem(learning._STRATEGIES, "shards", [(f"fedavg:{LOCAL}", 12), (f"fedavg:{LOCAL},dropout=0.5", 14)])
    monkeypatch.setattr(learning, "_LONE", 4)
    told: list[learning.LearningRow] = []
    rows = bench_learning(["shards"], hidden=32, lr=0.1, report=told.append)
    assert told == rows and [row.way for row in rows][:2] == ["alone", "in one place"]
    alone, central, federated, dropping = rows
    print(rows)
    assert alone.last <= 0.45 and alone.best <= alone.last  # the best of all clients
    assert central.best >= 0.9
    assert federated.best >= 0.88 and dropping.best >= 0.85
    assert federated.best >= central.best - 0.05
    assert federated.reached is None or federated.reached <= 12


def test_writers_have_models_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Half of the writers call a pattern by its neighbour's name: only a model of one's own can know."""
    images = Images(*drawn(300, 1, 1.0), *drawn(200, 2, 1.0))
    who = np.arange(300) % 6
    odd = torch.from_numpy(who % 2 == 1)
    images.y[odd] = (images.y[odd] + 1) % 10
    np.savez(tmp_path / "w.npz", train_writer=who.astype(np.int16))
    monkeypatch.setattr(learning, "load", lambda folder: images)
    rows = bench_learning(
        ["writers"],
        writers=tmp_path / "w.npz",
        hidden=32,
        rounds=5,
        strategies=[f"fedavg:{LOCAL}", f"ditto:{LOCAL},lam=0.01"],
    )
    for row in rows:
        assert row.personal is not None and row.personal > row.best + 0.05, row
        assert row.others is not None and 0 <= row.others <= 1


def test_what_is_held_out() -> None:
    who = np.array([7, 7, 3, 7, 7, 3, 7, 7, 3, 3, 3, 7, 7, 7, 7])
    assert np.flatnonzero(choose_held_out(who)).tolist() == [
        6,
        10,
        14,
    ]  # the fifth of 7, the fifth of 3, the tenth of 7
    assert choose_held_out(np.repeat(np.arange(4), 11)).sum() == 8


def test_files(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 784)).astype(np.uint8)
    digits = np.array([3, 1, 4, 1, 5, 9], dtype=np.uint8)
    (tmp_path / "idx").mkdir()
    for part in ("train", "t10k"):
        for kind, head, values in (("images-idx3", 16, pixels), ("labels-idx1", 8, digits)):
            with gzip.open(tmp_path / "idx" / f"{part}-{kind}-ubyte.gz", "wb") as file:
                file.write(bytes(head) + values.tobytes())
    (tmp_path / "parquet").mkdir()
    for name in ("digits", "digits_test"):
        column = pa.FixedSizeListArray.from_arrays(pa.array(pixels.ravel()), 784)
        pq.write_table(pa.table({"pixels": column, "digit": digits}), tmp_path / "parquet" / f"{name}.parquet")
    for folder in ("idx", "parquet"):
        found = load(str(tmp_path / folder))
        assert found.y.tolist() == found.test_y.tolist() == digits.tolist()
        assert torch.equal(found.x, (torch.from_numpy(pixels).float() / 255 - 0.13) / 0.31)
        assert torch.equal(found.test_x, found.x) and found.y.dtype == torch.int64


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, says in (
        ({"scenes": ["shard"]}, "no scene 'shard'"),
        ({"scenes": ["writers"]}, "--writers"),
        ({"folder": tmp_path}, "--data"),
    ):
        with pytest.raises(ConfigError, match=says):
            bench_learning(**options)
    assert benchmarks_main(["learning", "--scenes", "none"]) == 2
    assert "no scene 'none'" in capsys.readouterr().err
    assert benchmarks_main(["learning", "--seeds", "x"]) == 2


def test_the_workload() -> None:
    images = generated(50)
    work = Digits(images.x, images.y, (images.test_x, images.test_y, None), data.iid(5), 8, 0.1)
    assert [tuple(p.shape) for p in work.model().parameters()] == [(8, 64), (8,), (10, 8), (10,)]
    assert work.data().clients.count == 5 and work.evaluation_data().rows() == 1000

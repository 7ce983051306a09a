"""Compare federated learning on real digits with training in one place and with each client alone.

Scenes: `shards` (20 clients with two shards by label each), `one_label` (20 clients with one label each), `iid` (20
clients with random rows), and `writers` (the images of MNIST divided by their writer: 539 clients with 19 to 131
images; a fifth of each writer's images is held out to evaluate personal models). The model has one hidden layer. The
results are the best accuracy on test images, and the first round that reached 90%. No Ray is used, because a federated
run has the same result, bit for bit, with any number of workers.
"""

from __future__ import annotations

import functools
import gzip
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from rayps_client.errors import ConfigError
from torch import Tensor, nn
from torch.nn import functional

from rayps.bench.table import BenchRow, ImagesFolder, Opt
from rayps.cli.show import format_number
from rayps.cluster.local import LocalCluster
from rayps.data import Batch, Data, iid, parquet, shards, tensors
from rayps.runtime.training import Result, train
from rayps.workload.base import Workload

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "data"
SCENES = ("shards", "iid", "one_label", "writers")
CLIENTS, BATCH, TARGET = 20, 10, 0.9
_LOCAL = "fraction=0.5,local_epochs=5,batch_size=10"
_STRATEGIES: dict[str, list[tuple[str, int]]] = {  # for each scene: strategies and their numbers of rounds
    "shards": [(f"fedavg:{_LOCAL}", 30), (f"fedavg:{_LOCAL},dropout=0.5", 45)],
    "iid": [(f"fedavg:{_LOCAL}", 15)],
    "one_label": [
        (f"fedavg:{_LOCAL}", 20),
        (f"fedprox:{_LOCAL},mu=1", 20),
        *(
            (f"{name},local_steps=5,batch_size=10", 100)
            for name in ("fedavg:fraction=0.5", "fedavg:fraction=1", "scaffold:fraction=0.5")
        ),
    ],
    "writers": [
        ("fedavgm:fraction=0.1,local_epochs=2,batch_size=10,beta=0.9,server_lr=0.3", 80),
        ("ditto:fraction=0.1,local_epochs=1,batch_size=10,lam=0.5", 60),
        ("fedper:private=2,fraction=0.1,local_epochs=2,batch_size=10", 80),
        ("fedrep:private=2,fraction=0.1,local_epochs=1,head_epochs=5,batch_size=10", 80),
    ],
}
_ALONE = "fedavg:local_epochs=5,batch_size=10"  # with one client, this is plain SGD, bit for bit
_WHOLE = "fedavg:local_epochs=1,batch_size=10"  # for one client that has all rows: plain SGD, evaluated every epoch
_LONE = 20  # number of clients that train alone
_PERSONAL = ("ditto", "fedper", "fedrep")  # have personal models of their own
_TUNED = 5  # epochs for which a writer trains the final model further, to make its personal model


@dataclass(frozen=True, slots=True)
class LearningRow(BenchRow):
    """One run. Accuracies are shares of images."""

    columns: ClassVar[str] = (
        "scene | seed | rounds | best | reached: 90% in round | last: last (alone: best client) | "
        "others: other writers | personal | seconds | way"
    )

    scene: str
    way: str  # the strategy, or "in one place" (one client has all rows), or "alone" (each client trains alone)
    seed: int
    rounds: int  # rounds of the strategy; epochs for the ways "in one place" and "alone"
    best: float  # the best accuracy of all rounds; for "alone" the mean over the clients
    reached: int | None  # the first round that reached 90%
    last: float  # the accuracy after the last round; for "alone" the best client's best
    others: float | None  # in `writers`: the final accuracy on images of writers who are not clients
    personal: float | None  # in `writers`: the final accuracy of personal models on each writer's held-out images
    seconds: float

    @property
    def note(self) -> str:
        """The row in a line."""
        return (
            f"{self.scene}, seed {self.seed}, {self.way}: best accuracy {self.best:.3f}, 90% reached in round "
            f"{self.reached}, last accuracy {self.last:.3f}, on images of other writers "
            f"{format_number(self.others)}, of "
            f"personal models {format_number(self.personal)} ({self.seconds:.0f} s)"
        )


class Digits(Workload):
    """A workload: classify images of digits with one hidden layer of ReLU and SGD without momentum."""

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        test: tuple[Tensor, Tensor, Any],
        client: Any,
        hidden: int,
        lr: float,
        batch: int = BATCH,
    ) -> None:
        self.rows, self.test, self.client = (x, y), test, client
        self.hidden, self.lr, self.batch = hidden, lr, batch

    def model(self) -> nn.Module:
        """Return a network with the widths: pixels, hidden, 10."""
        return nn.Sequential(nn.Linear(self.rows[0].shape[1], self.hidden), nn.ReLU(), nn.Linear(self.hidden, 10))

    def data(self) -> Data:
        """Return the clients' images."""
        return tensors(*self.rows, batch_size=self.batch, client=self.client)

    def evaluation_data(self) -> Data:
        """Return the test images, which are not used for training."""
        return tensors(*self.test[:2], batch_size=2000, client=self.test[2])

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the cross-entropy."""
        return functional.cross_entropy(model(batch.x), batch.y)

    def optimizer(self, params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """Return plain SGD."""
        return torch.optim.SGD(params, lr=self.lr)

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, float | Tensor]:
        """Return the share of images that are classified correctly."""
        return {"accuracy": (model(batch.x).argmax(dim=1) == batch.y).float().mean()}


def bench_learning(
    scenes: Annotated[Sequence[str], Opt("Scenes to measure: shards, iid, one_label, writers.")] = (
        "shards",
        "iid",
        "one_label",
    ),
    *,
    folder: ImagesFolder = None,
    writers: Annotated[Path | None, Opt("An npz file with the writer of each image of MNIST.")] = None,
    seeds: Annotated[Sequence[int], Opt("Seeds, e.g. 0,1,2.")] = (0,),
    hidden: Annotated[int, Opt("Width of the network's hidden layer.")] = 64,
    lr: Annotated[float, Opt("The clients' learning rate.")] = 0.1,
    rounds: Annotated[int | None, Opt("Rounds of each strategy, instead of those of the scene.")] = None,
    strategies: Annotated[
        Sequence[str],
        Opt(
            "Measure only this strategy, instead of those of the scene; repeat the option for more.",
            "--strategy",
            split="",
        ),
    ] = (),
    report: Callable[[LearningRow], None] = lambda row: None,
) -> list[LearningRow]:
    """Measure each way to learn in each scene; return a row for each. `report(row)` is called after each measurement.

    `folder` has digits.parquet and digits_test.parquet, or MNIST's four idx.gz files. `writers` is the npz file with
    the writer of each image of MNIST. `strategies` and `rounds` replace those of the scene.

    Raises:
        ConfigError: there is no such scene, or a file is missing.
    """
    for scene in scenes:
        if scene not in SCENES:
            raise ConfigError(f"no scene {scene!r}; use some of {', '.join(SCENES)}", field="scenes")
    if "writers" in scenes and (writers is None or not writers.is_file()):
        raise ConfigError(
            "the scene writers needs the writer of each image: give the npz file with --writers", field="writers"
        )
    images = load(str(folder or FOLDER))
    found = []
    for scene in scenes:
        for seed in seeds:
            measured = _Scene(scene, seed, images, writers, hidden, lr)
            own = [(text, rounds or 30) for text in strategies] or [
                (text, rounds or count) for text, count in _STRATEGIES[scene]
            ]
            for row in measured.run(own, compared=not strategies):
                found.append(row)
                report(row)
    return found


@dataclass(frozen=True, slots=True)
class Images:
    """Training and test images: pixels `x` [n, 784], scaled to about mean 0 and variance 1, and digits `y` [n]."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


@functools.lru_cache(maxsize=2)
def load(folder: str) -> Images:
    """Read the images in a folder, from Parquet or from MNIST's files. Raises ConfigError if it has neither."""
    root = Path(folder)
    if (root / "digits.parquet").is_file():
        both = [_read_parquet(root / name) for name in ("digits.parquet", "digits_test.parquet")]
    elif (root / "train-images-idx3-ubyte.gz").is_file():
        both = [
            (
                _read_idx(root / f"{part}-images-idx3-ubyte.gz", 16).reshape(-1, 784),
                _read_idx(root / f"{part}-labels-idx1-ubyte.gz", 8),
            )
            for part in ("train", "t10k")
        ]
    else:
        raise ConfigError(
            f"there is neither digits.parquet nor train-images-idx3-ubyte.gz in {folder}: give the folder with --data",
            field="data",
        )
    (x, y), (test_x, test_y) = [((x.float() / 255 - 0.13) / 0.31, y.long()) for x, y in both]
    return Images(x, y, test_x, test_y)


def _read_parquet(path: Path) -> tuple[Tensor, Tensor]:
    data = parquet(path, features="pixels", label="digit", dtype="uint8", batch_size=100_000, shuffle=False)
    batch = next(data.batches(rank=0, size=1, seed=0, epoch=0))
    return batch.x, batch.y


def _read_idx(path: Path, head: int) -> Tensor:
    with gzip.open(path) as file:
        return torch.from_numpy(np.frombuffer(file.read(), np.uint8, offset=head).copy())


class _Scene:
    """One scene with one seed: makes its workload and measures the ways to learn it."""

    def __init__(self, scene: str, seed: int, images: Images, writers: Path | None, hidden: int, lr: float) -> None:
        self.scene, self.seed, self.images = scene, seed, images
        x, y, test, client = images.x, images.y, (images.test_x, images.test_y, None), None
        if scene == "writers":
            assert writers is not None
            who = np.load(writers)["train_writer"].astype(np.int64)
            held = choose_held_out(who)
            x, y = images.x[torch.from_numpy(~held)], images.y[torch.from_numpy(~held)]
            test = (images.x[torch.from_numpy(held)], images.y[torch.from_numpy(held)], who[held])
            client = who[~held]
        else:
            client = {
                "iid": iid(CLIENTS, seed=seed),
                "shards": shards(2, clients=CLIENTS, seed=seed),
                "one_label": shards(1, clients=CLIENTS, pure=True, seed=seed),
            }[scene]
        self.make = functools.partial(Digits, test=test, hidden=hidden, lr=lr)
        self.workload = self.make(x, y, client=client)

    def run(self, strategies: Sequence[tuple[str, int]], compared: bool) -> Iterator[LearningRow]:
        """Measure the strategies one after another. If `compared`, measure "alone" and "in one place" first."""
        if compared:
            yield self._train_alone()
            yield self._measure_strategy("in one place", _WHOLE, 10 if self.scene == "writers" else 5, iid(1))
        for text, rounds in strategies:
            if self.scene == "writers":
                tuned = "" if text.startswith(_PERSONAL) else f",finetune={_TUNED}"
                text += f",evaluate_every={rounds}{tuned}"
            yield self._measure_strategy(text, text, rounds)

    def _measure_strategy(self, way: str, strategy: str, rounds: int, client: Any = None) -> LearningRow:
        began = time.monotonic()
        workload = self.workload if client is None else self.make(*self.workload.rows, client=client)
        result = _train(workload, strategy, rounds, self.seed)
        curve = _read_curve(result)
        reached = next((i + 1 for i, value in enumerate(curve) if value >= TARGET), None)
        others = self._evaluate_others(result) if self.scene == "writers" else None
        return LearningRow(
            self.scene,
            way,
            self.seed,
            rounds,
            max(curve),
            reached if len(curve) == rounds else None,
            curve[-1],
            others,
            result.metrics.get("personal_accuracy"),
            time.monotonic() - began,
        )

    def _train_alone(self, epochs: int = 20) -> LearningRow:
        """Train `_LONE` of the clients alone, and evaluate each of them after every 5 epochs."""
        began = time.monotonic()
        clients, found = self.workload.data().clients, []
        for k in np.linspace(0, clients.count - 1, _LONE).astype(int).tolist():
            rows = clients.batch(clients.rows(k))
            lone = self.make(rows.x, rows.y, client=iid(1))
            if self.scene == "writers":
                lone.test = (self.images.test_x, self.images.test_y, None)
            found.append(max(_read_curve(_train(lone, _ALONE, epochs // 5, self.seed))))
        others = statistics.mean(found) if self.scene == "writers" else None
        return LearningRow(
            self.scene,
            "alone",
            self.seed,
            epochs,
            statistics.mean(found),
            None,
            max(found),
            others,
            None,
            time.monotonic() - began,
        )

    def _evaluate_others(self, result: Result) -> float:
        with torch.no_grad():
            predicted = result.model()(self.images.test_x).argmax(dim=1)
        return float((predicted == self.images.test_y).float().mean())


def _read_curve(result: Result) -> list[float]:
    """Return the accuracy after each evaluation of a run."""
    return [value for value in result.history["evaluation_accuracy"].to_pylist() if value is not None]


def choose_held_out(who: Any) -> Any:
    """Return a mask of the images that are held out: every fifth image of each writer. `who`: each image's writer."""
    order = np.argsort(who, kind="stable")
    first = np.searchsorted(who[order], who[order])  # the position of the first image of each image's writer
    mask = np.zeros(len(who), dtype=np.bool_)
    mask[order] = (np.arange(len(who)) - first) % 5 == 4
    return mask


def _train(workload: Workload, strategy: str, epochs: int, seed: int) -> Result:
    cluster = LocalCluster()
    try:
        return train(workload, strategy=strategy, epochs=epochs, seed=seed, progress=False, cluster=cluster)
    finally:
        cluster.close()

"""Measure robust aggregation rules: accuracy with attackers, and their cost without attackers.

The model of handwritten digits is a network 784-64-10, trained by plain SGD. Every round trains all clients. Scenes:

- `iid`: rows are divided at random, and there are no attackers. The accuracy of the rule `mean` in it is the reference.
- `attack`: rows are divided at random, and some clients attack.
- `shards`: each client has two shards of the rows sorted by label, and there are no attackers.

The result is the best accuracy of all rounds on test images, because in `shards` the accuracy varies from round to
round. For the attack `false_buffers` the network has BatchNorm in every scene. For `false_c` the strategy is SCAFFOLD.
"""

from __future__ import annotations

import gzip
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from rayps_client.errors import ConfigError
from torch import Tensor, nn
from torch.nn import functional

import rayps
from rayps.bench.table import BenchRow, ImagesFolder, Opt
from rayps.cluster.local import Cluster
from rayps.data import Batch, Data
from rayps.federated.population.attack_spec import attack_of
from rayps.federated.rules.robust_rules import rule_of
from rayps.runtime.training import train
from rayps.strategies.fedavg import FedAvg
from rayps.strategies.federated import Federated
from rayps.strategies.scaffold import Scaffold
from rayps.workload.base import Workload

SCENES = ("iid", "attack", "shards")
RULES = (
    "mean",
    "krum(f=4)",
    "multi_krum(f=4)",
    "trimmed_mean(f=4)",
    "median",
    "geometric_median",
    "bulyan(f=4)",
    "centered_clipping(tau=1)",
)
FOLDER = Path(rayps.__file__).resolve().parent.parent / "examples" / "data"
_FILES = {  # True: training, False: test. The files are MNIST's images and labels, and a Parquet file of examples/data
    True: ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz", "digits.parquet"),
    False: ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz", "digits_test.parquet"),
}


@dataclass(frozen=True, slots=True)
class RobustRow(BenchRow):
    """One rule in one scene. Figures are means over the seeds."""

    columns: ClassVar[str] = (
        "scene | attack | rule | best: best accuracy | last: at the end | below: points below | "
        "rejected: rejected a round | warned | seconds"
    )

    scene: str
    rule: str
    attack: str
    clients: int
    rounds: int
    seeds: int
    best: float  # the best accuracy of all rounds
    last: float  # the accuracy after the last round
    below: float | None  # percentage points by which `best` is below the reference; None if that was not measured
    rejected: float  # number of replies per round that the rule rejected
    warned: bool  # whether an event warned that the rule costs accuracy on this data
    seconds: float  # seconds of a run


class RobustDigits(Workload):
    """A workload: classify images of digits that are divided among clients."""

    def __init__(
        self, folder: Path, scene: str, clients: int, rows: int, batch: int, lr: float, *, normed: bool = False
    ) -> None:
        self.folder, self.scene, self.clients, self.count = folder, scene, clients, rows
        self.batch, self.lr, self.normed = batch, lr, normed

    def model(self) -> nn.Module:
        """Return a network of 50,890 parameters, or with BatchNorm of 51,018 parameters, and buffers."""
        norm = [nn.BatchNorm1d(64)] if self.normed else []
        return nn.Sequential(nn.Linear(784, 64), *norm, nn.ReLU(), nn.Linear(64, 10))

    def data(self) -> Data:
        """Return the first `count` training images, divided among the clients."""
        x, y = read_digits(self.folder, learnt=True, rows=self.count)
        rule = rayps.data.shards(2, clients=self.clients) if self.scene == "shards" else rayps.data.iid(self.clients)
        return rayps.data.tensors(x, y, batch_size=self.batch, client=rule)

    def evaluation_data(self) -> Data:
        """Return at most 5,000 test images."""
        return rayps.data.tensors(*read_digits(self.folder, learnt=False, rows=5000), batch_size=1000)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the cross-entropy."""
        return functional.cross_entropy(model(batch.x), batch.y)

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        """Return plain SGD."""
        return torch.optim.SGD(params, lr=self.lr)

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, float | Tensor]:
        """Return the share of images that are classified correctly."""
        return {"accuracy": (model(batch.x).argmax(1) == batch.y).float().mean()}


def read_digits(folder: Path, *, learnt: bool, rows: int) -> tuple[Tensor, Tensor]:
    """Return the first `rows` images [rows, 784], with pixels from 0 to 1, and their digits.

    `learnt` selects the training images instead of the test images. The folder has MNIST's files, or the files of
    `examples/data`.

    Raises:
        ConfigError: the folder has none of these files.
    """
    images, labels, parquet = _FILES[learnt]
    if (folder / images).is_file():
        x = _read_idx(folder / images, 16).reshape(-1, 784)[:rows]
        y = _read_idx(folder / labels, 8)[:rows]
    elif (folder / parquet).is_file():
        table = pq.read_table(folder / parquet, columns=["pixels", "digit"]).slice(0, rows)
        x = table["pixels"].combine_chunks().flatten().to_numpy().reshape(-1, 784)
        y = table["digit"].to_numpy()
    else:
        raise ConfigError(
            f"there is neither {images} nor {parquet} in {folder}: give the folder with --data", field="data"
        )
    return torch.from_numpy(x.astype(np.float32) / 255), torch.from_numpy(y.astype(np.int64))


def _read_idx(path: Path, head: int) -> NDArray[np.uint8]:
    return np.frombuffer(gzip.decompress(path.read_bytes()), dtype=np.uint8, offset=head)


def bench_robust(
    cluster: Cluster,
    workers: Annotated[int, Opt("Workers; their number changes only the time, not the accuracy.")] = 2,
    rules: Annotated[
        Sequence[str], Opt("Aggregation rules to measure, with mean first.", read=read_rules, text=",".join(RULES))
    ] = RULES,
    scenes: Annotated[Sequence[str], Opt("Scenes to measure: iid, attack, shards.")] = SCENES,
    *,
    attack: Annotated[
        str, Opt("The attack of the scene `attack`, with its number of attackers.")
    ] = "sign_flip(clients=4,scale=5)",
    clients: Annotated[int, Opt("Clients; each round trains all of them.")] = 20,
    rounds: Annotated[int, Opt("Rounds.")] = 15,
    rows: Annotated[int, Opt("Images to learn from.")] = 6000,
    epochs: Annotated[int, Opt("Local epochs.")] = 1,
    batch: Annotated[int, Opt("Rows of a local batch.")] = 10,
    lr: Annotated[float, Opt("The clients' learning rate.")] = 0.1,
    seeds: Annotated[int, Opt("Runs of each rule and scene, with seeds 0, 1, ...")] = 1,
    folder: ImagesFolder = None,
) -> list[RobustRow]:
    """Measure each rule in each scene; return a row for each.

    Raises:
        ConfigError: there is no such scene or rule, a rule does not tolerate so many attackers, or there are no digits.
    """
    folder = FOLDER if folder is None else folder
    unknown = [scene for scene in scenes if scene not in SCENES]
    if unknown or rounds < 1 or seeds < 1:
        raise ConfigError(
            f"unknown scenes {unknown}, rounds is {rounds}, seeds is {seeds}: give scenes of {', '.join(SCENES)}, and "
            "at least 1 round and 1 seed",
            field="scenes",
        )
    attack_spec = attack_of(attack)
    for rule in rules:
        rule_of(rule).check(clients, attack_spec if "attack" in scenes else None)
    learn: type[FedAvg | Scaffold] = Scaffold if attack_spec is not None and attack_spec.name == "false_c" else FedAvg
    normed = attack_spec is not None and attack_spec.name == "false_buffers"
    read_digits(folder, learnt=False, rows=1)
    found: list[RobustRow] = []
    reference: float | None = None
    for scene in [scene for scene in SCENES if scene in scenes]:
        for rule in rules:
            work = RobustDigits(folder, scene, clients, rows, batch, lr, normed=normed)
            strategy = learn(rule=rule, local_epochs=epochs, attack=attack if scene == "attack" else None)
            runs = [_run(cluster, workers, work, strategy, rounds, seed) for seed in range(seeds)]
            best = sum(max(accuracies) for accuracies, *_ in runs) / seeds
            reference = best if (scene, rule) == ("iid", "mean") else reference
            found.append(
                RobustRow(
                    scene,
                    rule,
                    strategy.attack or "none",
                    clients,
                    rounds,
                    seeds,
                    best,
                    sum(accuracies[-1] for accuracies, *_ in runs) / seeds,
                    None if reference is None else 100 * (reference - best),
                    sum(run[1] for run in runs) / seeds,
                    any(run[2] for run in runs),
                    sum(run[3] for run in runs) / seeds,
                )
            )
    return found


def _run(
    cluster: Cluster, workers: int, work: RobustDigits, strategy: Federated, rounds: int, seed: int
) -> tuple[list[float], float, bool, float]:
    """Train once; return each round's accuracy, rejected replies per round, whether an event warned, and seconds."""
    began = time.perf_counter()
    result = train(work, strategy=strategy, workers=workers, epochs=rounds, seed=seed, cluster=cluster, progress=False)
    accuracies = (
        [each for each in result.history["evaluation_accuracy"].to_pylist() if each is not None]
        if ("evaluation_accuracy" in result.history.column_names)
        else []
    )
    rejected = sum(len(event["rejected"]) for event in result.events if event["kind"] == "cohort") / rounds
    warned = any("costs accuracy" in str(event.get("message")) for event in result.events)
    return [*accuracies, result.metrics["accuracy"]], rejected, warned, time.perf_counter() - began


def read_rules(text: str, _: str) -> list[str]:
    """Return the rules of a list that is separated by commas; a rule may have options in parentheses."""
    return re.split(r",(?![^(]*\))", text)

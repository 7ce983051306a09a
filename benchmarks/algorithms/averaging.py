"""Measure infrequent synchronization: a language model's loss and the bytes sent, after equal numbers of samples.

A small transformer predicts the next character. Under each strategy it learns the first nine tenths of a text, from
the same seed and in the same number of steps. The rest of the text is evaluated after every epoch. The bytes are those
that all workers send for training, without evaluations and checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

import torch
from rayps_client.errors import ConfigError
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.picture import Chart, ChartLine, draw_page
from rayps import data
from rayps.bench.table import BenchRow, Opt, Strategies, Workers
from rayps.cluster.local import Cluster
from rayps.data import Batch, Data
from rayps.runtime.training import Result, train
from rayps.strategies.catalogue import parse
from rayps.workload.base import Workload

STRATEGIES = (
    "all_reduce",
    "local_sgd:period=4",
    "local_sgd:period=16",
    "local_sgd:period=16,compression=int8",
    "diloco:period=16,compression=int8",
    "diloco:period=16,overlap=4,compression=int8",
)
LENGTH = 64  # number of characters from which the model predicts the next one


class _CharacterAndPosition(nn.Module):
    """The sum of an embedding of each character and an embedding of its position."""

    def __init__(self, characters: int, width: int) -> None:
        super().__init__()
        self.character = nn.Embedding(characters, width)
        self.place = nn.Parameter(torch.zeros(LENGTH, width))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.character(x) + self.place[: x.shape[1]]
        return found


class _CausalBlock(nn.TransformerEncoderLayer):
    """A transformer layer with a causal mask."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return super().forward(x, src_mask=mask, is_causal=True)


class NextCharacter(Workload):
    """A workload: predict the next character of a text."""

    def __init__(self, text: str, blocks: int, width: int, rate: float, batch: int) -> None:
        self.text, self.blocks, self.width, self.rate, self.batch = text, blocks, width, rate, batch

    def model(self) -> nn.Module:
        """Return a causal transformer over the text's characters."""
        characters, width = len(set(self.text)), self.width
        blocks = [
            _CausalBlock(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(self.blocks)
        ]
        return nn.Sequential(
            _CharacterAndPosition(characters, width), *blocks, nn.LayerNorm(width), nn.Linear(width, characters)
        )

    def _cut_windows(self, lo: int, hi: int) -> Data:
        numbers = {character: i for i, character in enumerate(sorted(set(self.text)))}
        text = torch.tensor([numbers[character] for character in self.text[lo:hi]])
        starts = torch.arange(0, len(text) - LENGTH, LENGTH)[:, None] + torch.arange(LENGTH)
        return data.tensors(text[starts], text[starts + 1], batch_size=self.batch)

    def data(self) -> Data:
        """Return the first nine tenths of the text, cut into windows of `LENGTH` characters."""
        return self._cut_windows(0, len(self.text) * 9 // 10)

    def evaluation_data(self) -> Data:
        """Return the last tenth of the text, cut into windows of `LENGTH` characters."""
        return self._cut_windows(len(self.text) * 9 // 10, len(self.text))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the cross-entropy, as the mean over all characters."""
        return functional.cross_entropy(model(batch.x).flatten(0, 1), batch.y.flatten())

    def optimizer(self, params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(params, lr=self.rate)


@dataclass(frozen=True, slots=True)
class AveragingRow(BenchRow):
    """One strategy. `curve` has, for each epoch, the bytes sent so far and the loss on the last tenth of the text."""

    columns: ClassVar[str] = "strategy | steps | samples | bytes: bytes moved | fewer: times fewer | loss | worse"

    strategy: str
    workers: int
    steps: int
    samples: int
    bytes: int
    fewer: float  # the first strategy's bytes / bytes
    loss: float  # after the last epoch
    worse: float  # loss / the first strategy's loss - 1
    curve: list[tuple[int, float]] = field(default_factory=list)


def bench_averaging(
    cluster: Cluster,
    text: Annotated[Path, Opt("A text to learn, such as examples/data/hamlet.txt.", argument=True)],
    workers: Workers = 2,
    strategies: Strategies = STRATEGIES,
    *,
    epochs: Annotated[int, Opt("Epochs of each strategy.")] = 6,
    blocks: Annotated[int, Opt("Layers of the transformer.")] = 2,
    width: int = 64,
    rate: Annotated[float, Opt("Learning rate of AdamW.")] = 3e-3,
    batch: Annotated[int, Opt("Rows of a worker's batch.")] = 16,
    seed: Annotated[int, Opt("Seed of the parameters and of the order of rows.")] = 0,
    picture: Annotated[Path | None, Opt("Draw the loss as a function of the bytes into this SVG file.")] = None,
) -> list[AveragingRow]:
    """Measure the strategies in this order, and compare all others with the first.

    Raises:
        ConfigError: the text cannot be read or is too short, or a strategy cannot be read.
    """
    for strategy in strategies:
        parse(strategy)
    try:
        words = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the text {text} cannot be read: {error}", field="text") from error
    if len(words) < 20 * LENGTH * batch:
        raise ConfigError(
            f"the text {text} has {len(words)} characters: give a text of {20 * LENGTH * batch} or more", field="text"
        )
    work, rows = NextCharacter(words, blocks, width, rate, batch), list[AveragingRow]()
    for strategy in strategies:
        result = train(
            work, strategy=strategy, workers=workers, epochs=epochs, seed=seed, cluster=cluster, progress=False
        )
        rows.append(_make_row(strategy, workers, result, rows[0] if rows else None))
    if picture is not None:
        picture.write_text(draw(rows), encoding="utf-8")
    return rows


def _make_row(strategy: str, workers: int, result: Result, first: AveragingRow | None) -> AveragingRow:
    table, moved, curve = result.history, 0, list[tuple[int, float]]()
    losses = table.column("evaluation_loss").to_pylist()
    for count, loss in zip(table.column("bytes").to_pylist(), losses, strict=True):
        moved += count
        if loss is not None:
            curve.append((moved, loss))
    loss = result.metrics["loss"]
    samples = sum(table.column("samples").to_pylist())
    fewer = 1.0 if first is None else first.bytes / max(1, moved)
    worse = 0.0 if first is None else loss / first.loss - 1
    return AveragingRow(strategy, workers, table.num_rows, samples, moved, fewer, loss, worse, curve)


def draw(rows: Sequence[AveragingRow]) -> str:
    """Return a chart of the curves as SVG: the loss as a function of the bytes sent (10^6, logarithmic axis)."""
    lines = []
    for row in rows:
        points = [(moved / 1e6, loss) for moved, loss in row.curve if moved]
        lines.append(ChartLine(_shorten(row.strategy), points, points))
    chart = Chart("the next character: loss after each epoch", "10^6 bytes moved", "loss", lines, even=True)
    return draw_page([chart], columns=1)


def _shorten(strategy: str) -> str:
    name, _, options = strategy.partition(":")
    known = dict(part.split("=") for part in options.split(",") if part)
    words = [name, known.pop("period", ""), known.pop("compression", ""), *(f"{k} {v}" for k, v in known.items())]
    return " ".join(word for word in words if word)

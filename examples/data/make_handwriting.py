"""Makes the images of synthetic writers from digits.parquet: examples/handwriting.py runs it when they are missing.

    python make_handwriting.py FOLDER

FOLDER gets base.parquet (4,000 unchanged images), writers.parquet and writers_test.parquet (40 writers, 100 and 40
images each, with the writer's name in `writer`). A writer changes every image by a slant, a turn, a size and a pen of
its own. Two writers of three have a habit: what others write for a 1 is their 7 and the reverse, or so with 4 and 9, or
with 3 and 8. Writers and habits are drawn from a seed, so the rows are the same each time. The images stay under the
licence of digits.parquet (README.md).
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor
from torch.nn import functional

HERE = Path(__file__).resolve().parent
SIDE, BASE, WRITERS, LEARN, TEST = 28, 4_000, 40, 100, 40
HABITS = ((1, 7), (4, 9), (3, 8))  # digits that some writers write the one like the other


@dataclass(frozen=True)
class Writer:
    """How a writer writes: a slant, a turn in radians, a size (1: unchanged), a pen from -1 (thin) to 1 (thick)."""

    name: str
    slant: float
    turn: float
    size: float
    pen: float
    habit: tuple[int, int] | None  # two digits that the writer writes the one like the other

    def images(self, pixels: Tensor) -> Tensor:
        """Return images [n, 784] from 0 to 1 as this writer writes them."""
        cos, sin = math.cos(self.turn) / self.size, math.sin(self.turn) / self.size
        matrix = torch.tensor([[cos, self.slant * cos - sin, 0.0], [sin, self.slant * sin + cos, 0.0]])
        images = pixels.view(-1, 1, SIDE, SIDE)
        grid = functional.affine_grid(matrix.expand(len(images), 2, 3), list(images.shape), align_corners=False)
        moved = functional.grid_sample(images, grid, align_corners=False)
        thick = functional.max_pool2d(moved, 3, stride=1, padding=1)
        thin = -functional.max_pool2d(-moved, 3, stride=1, padding=1)
        other = thick if self.pen > 0 else thin
        return (moved + abs(self.pen) * (other - moved)).clamp(0, 1).view(-1, SIDE * SIDE)

    def digits(self, shown: Tensor) -> Tensor:
        """Return which digits this writer means by images that show the digits `shown` to others."""
        if self.habit is None:
            return shown
        one, other = self.habit
        return torch.where(shown == one, other, torch.where(shown == other, one, shown))


def writers(seed: int = 0) -> list[Writer]:
    """Draw the writers."""
    draw = np.random.default_rng(seed)
    found = []
    for number in range(WRITERS):
        slant, turn, size, pen = (
            float(draw.uniform(*r)) for r in ((-0.5, 0.5), (-0.35, 0.35), (0.7, 1.1), (-0.7, 0.9))
        )
        habit = None if number % 3 == 0 else HABITS[int(draw.integers(len(HABITS)))]
        found.append(Writer(f"writer-{number:02}", slant, turn, size, pen, habit))
    return found


def table(pixels: Tensor, digits: Tensor, names: list[str]) -> pa.Table:
    """Return images from 0 to 1 as a table of bytes, with their digits and writers."""
    flat = (pixels * 255).round().to(torch.uint8).numpy().ravel()
    return pa.table(
        {
            "pixels": pa.FixedSizeListArray.from_arrays(pa.array(flat), SIDE * SIDE),
            "digit": digits.numpy(),
            "writer": names,
        }
    )


def read(name: str) -> tuple[Tensor, Tensor]:
    """Return the images [n, 784], from 0 to 1, and the digits of a file beside this one."""
    found = pq.read_table(HERE / name)
    flat = found["pixels"].combine_chunks().flatten().to_numpy()
    pixels = torch.from_numpy(flat.reshape(-1, SIDE * SIDE).astype(np.float32) / 255)
    return pixels, torch.from_numpy(found["digit"].to_numpy().astype(np.int64))


def written(people: list[Writer], pixels: Tensor, digits: Tensor, each: int) -> pa.Table:
    """Return a table in which every writer has `each` of these images, written its own way."""
    parts = [(pixels[at : at + each], digits[at : at + each]) for at in range(0, len(people) * each, each)]
    return table(
        torch.cat([who.images(x) for who, (x, _) in zip(people, parts, strict=True)]),
        torch.cat([who.digits(y) for who, (_, y) in zip(people, parts, strict=True)]),
        [who.name for who in people for _ in range(each)],
    )


def make(folder: Path) -> None:
    """Write the three files."""
    folder.mkdir(parents=True, exist_ok=True)
    (x, y), (tx, ty), people = read("digits.parquet"), read("digits_test.parquet"), writers()
    pq.write_table(table(x[:BASE], y[:BASE], ["nobody"] * BASE), folder / "base.parquet")
    pq.write_table(written(people, x[BASE:], y[BASE:], LEARN), folder / "writers.parquet")
    pq.write_table(written(people, tx, ty, TEST), folder / "writers_test.parquet")


if __name__ == "__main__":
    make(Path(sys.argv[1]))

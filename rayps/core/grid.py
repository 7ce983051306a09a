"""The layout of workers: ranks on a grid of data x stage x tensor. Pure.

A *replica* is one whole copy of the model, on `stage * tensor` workers; a *column* is the workers of all replicas that
hold the same part of the model. The tensor index varies fastest, then the stage, so that a replica's ranks are
consecutive, and can be placed together on one host. If a replica is one worker, there is one column: all workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from rayps_client.errors import ConfigError

AXES = ("data", "stage", "tensor")


class Point(NamedTuple):
    """A rank's coordinates on the grid."""

    data: int
    stage: int
    tensor: int

    def line(self, axis: str) -> str:
        """Return the name of the line of ranks through this point along `axis`.

        A line has all ranks whose coordinates differ on that axis only: `stage:0:1` is the line of all stages of
        replica 0 with the tensor index 1.
        """
        return ":".join([axis, *(str(at) for name, at in zip(AXES, self, strict=True) if name != axis)])


@dataclass(frozen=True, slots=True)
class Grid:
    """`data` replicas of `stage * tensor` workers each."""

    data: int
    stage: int = 1
    tensor: int = 1

    @classmethod
    def of(cls, workers: int, stages: int = 1, tensor: int = 1) -> Grid:
        """Return the grid of `workers` workers. Raises ConfigError if they are not a whole number of replicas."""
        size = stages * tensor
        if workers % size:
            parts = f"{stages} stages x {tensor} tensor ranks = {size} workers"
            near = max(size, workers // size * size)
            raise ConfigError(
                f"workers is {workers}, and a replica takes {parts}: give a multiple of {size}, such as {near}",
                field="workers",
            )
        return cls(workers // size, stages, tensor)

    @property
    def size(self) -> int:
        """The number of workers."""
        return self.data * self.columns

    @property
    def columns(self) -> int:
        """The number of parts of the model, which is the number of workers of one replica."""
        return self.stage * self.tensor

    def at(self, rank: int) -> Point:
        """Return a rank's coordinates."""
        replica, column = divmod(rank, self.columns)
        return Point(replica, *divmod(column, self.tensor))

    def rank(self, data: int, stage: int = 0, tensor: int = 0) -> int:
        """Return the rank at these coordinates."""
        return (data * self.stage + stage) * self.tensor + tensor

    def column(self, rank: int) -> int:
        """Return which part of the model a rank holds."""
        return rank % self.columns

    def words(self, rank: int) -> str:
        """Format a rank's coordinates on the axes with more than one index, such as `replica 1, stage 0`."""
        lengths, here = (self.data, self.stage, self.tensor), self.at(rank)
        names = ("replica", "stage", "tensor rank")
        return ", ".join(f"{name} {i}" for name, i, n in zip(names, here, lengths, strict=True) if n > 1)

    def along(self, axis: str, rank: int) -> list[int]:
        """Return `rank` and the ranks whose coordinates differ from those of `rank` on `axis` only, in rising order."""
        here, at = self.at(rank), AXES.index(axis)
        length = (self.data, self.stage, self.tensor)[at]
        return [self.rank(*(i if j == at else place for j, place in enumerate(here))) for i in range(length)]

    def replica(self, data: int) -> list[int]:
        """Return the ranks of one copy of the model."""
        return list(range(data * self.columns, (data + 1) * self.columns))

"""What `ServerGroup.join` gives: pull and push of parameters as their owner gave them, over a `GroupServer`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rayps.core.errors import ConfigError
from rayps.ps.client.client import GroupServer
from rayps.tensors.flat import Gradient, Layout


class SharedParameters:
    """One worker's view: pull and push, as a tensor or a state dict as it was given, whole, by range or by row."""

    def __init__(self, server: GroupServer, layout: Layout, as_dict: bool) -> None:
        self._server, self._layout, self._as_dict = server, layout, as_dict
        self._as_vector = not as_dict and len(layout.entries[0].shape) == 1

    @property
    def step(self) -> int:
        """The number of this worker's next push."""
        return self._server.step

    def pull(
        self,
        lo: int | Tensor | None = None,
        hi: int | None = None,
        *,
        table: str | None = None,
        out: Tensor | None = None,
        consistent: bool | None = None,
    ) -> Any:
        """The parameters as they were given; with `lo` and `hi`, those elements of the flat vector.

        `pull(ids)`, with a tensor of whole numbers, gives those rows of a table, [len(ids), width]: a table is a
        parameter of two or more dimensions, `table` its name where there are several. What is pulled lands in `out`, a
        contiguous CPU tensor of as many elements, else in new memory. `consistent` reads all servers as of one moment,
        which is the default unless the group is asynchronous (`staleness=None`).
        """
        if isinstance(lo, Tensor):
            return self._server.pull_rows(lo, table, out=out, consistent=consistent)
        if lo is not None or hi is not None:
            return self._server.pull(lo or 0, hi, out=out, consistent=consistent)
        return self._shaped(self._server.pull(out=out, consistent=consistent))

    def push(
        self,
        value: Any,
        rows: Tensor | None = None,
        *,
        weight: float = 1.0,
        lo: int | None = None,
        table: str | None = None,
    ) -> None:
        """Push a gradient of the parameters' shape, or a flat range of it that begins at element `lo`.

        `push(ids, rows)` pushes the gradient of those rows of a table, [len(ids), width], those of the same id added
        up: the optimizer steps these rows alone. `weight` is its number of samples: the synchronous mean is weighted
        by it. Each call is one step.
        """
        self._post(value, rows, weight, lo, table)
        self._server.settle()

    def push_pull(
        self,
        value: Any,
        rows: Tensor | None = None,
        *,
        weight: float = 1.0,
        table: str | None = None,
        out: Tensor | None = None,
    ) -> Any:
        """Push, then pull the same, all parameters in one turn."""
        self._post(value, rows, weight, None, table)
        return self._shaped(self._server.pull(out=out)) if rows is None else self.pull(value, table=table, out=out)

    def _post(self, value: Any, rows: Tensor | None, weight: float, lo: int | None, table: str | None) -> None:
        if rows is not None:
            self._server.push_rows(value, rows, weight, table)
        else:
            self._server.push(self._checked(value) if lo is None else value, weight, lo or 0)

    def buffer(self) -> Tensor:
        """A flat tensor, all zero, as long as the parameters: a gradient written into it is pushed without a copy.

        The shards read it where it lies: it may change again when `push` or `push_pull` has returned.
        """
        return self._server.buffer(self._layout.size, self._layout.dtype)

    def read(self) -> Any:
        """The parameters as they are now, outside the clock."""
        return self._shaped(self._server.read())

    def flush(self) -> None:
        """Return once every push is durable: with the copies of an elastic group, whatever server dies then.

        In step that is once the others have pushed as much. Without copies acknowledged is all there is.
        """
        self._server.flush()

    def close(self) -> None:
        """Leave."""
        self._server.close()

    def _checked(self, value: Any) -> Tensor | Gradient:
        if isinstance(value, dict):
            value = self._one_vector(value)
        if not isinstance(value, Gradient) and value.numel() != self._layout.size:
            raise ConfigError(
                f"a push has {value.numel()} elements and there are {self._layout.size} parameters: "
                "push all of them, or a range with lo="
            )
        found: Tensor | Gradient = value
        return found

    def _one_vector(self, named: dict[str, Tensor]) -> Tensor:
        shapes = {entry.name: entry.shape for entry in self._layout.entries}
        for name in sorted(shapes.keys() | named.keys()):
            found = tuple(named[name].shape) if name in named else None
            if found != shapes.get(name):
                raise ConfigError(f"a push has {name!r} of shape {found}; in the parameters it is {shapes.get(name)}")
        return torch.cat([named[name].detach().reshape(-1).cpu() for name in shapes])

    def _shaped(self, vector: Tensor) -> Any:
        if self._as_vector:
            return vector
        named = {e.name: vector[e.lo : e.hi].view(e.shape) for e in self._layout.entries}
        return named if self._as_dict else named[""]

"""How one layer is split, as plain data. The driver computes this data once and sends it to every worker."""

from __future__ import annotations

from dataclasses import dataclass

from rayps.core.partition import find_bounds

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class LayerSplit:
    """How a layer is split.

    `split` is out, in, heads, rows, or dropout (a dropout layer whose input is a slice). `width` is the number of
    outputs, inputs, features or rows that are divided, in units of `unit` elements (for example, the elements of a
    head). The layer may consist of `blocks` equal blocks (3 for packed q, k, v); each block is divided. `kept`: data
    between this layer and its partner stays in slices, so the output of an `out` layer is not gathered, and the input
    of an `in` layer arrives as a slice. Layers with the same `region` enclose code of a user's own forward() that runs
    on slices.
    """

    split: str
    width: int
    unit: int = 1
    blocks: int = 1
    kept: bool = False
    region: str = ""

    @property
    def units(self) -> int:
        """The number of units of a block. At most this many workers can have a part of the layer."""
        return self.width // self.blocks // self.unit

    def ranges(self, size: int, index: int) -> tuple[Range, ...]:
        """Return the part of the width that worker `index` of `size` has: one range (lo, hi) in each block."""
        lo, hi = find_bounds(self.units, size, index)
        block = self.width // self.blocks
        return tuple((b * block + lo * self.unit, b * block + hi * self.unit) for b in range(self.blocks))

    def widths(self, size: int) -> tuple[int, ...]:
        """Return the widths of all workers' parts, in the order of workers."""
        return tuple(sum(hi - lo for lo, hi in self.ranges(size, i)) for i in range(size))


Plan = dict[str, LayerSplit]  # from layer names to splits; other layers stay whole

"""How one layer is split, as plain data: computed once by the driver, equal on every worker."""

from __future__ import annotations

from dataclasses import dataclass

from rayps.core.partition import part

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class LayerSplit:
    """How a layer is split.

    `split` is out, in, heads, rows, or dropout (a layer without parameters that drops elements of slices). `width`
    elements are divided in units of `unit` elements (a head); a layer may consist of `blocks` blocks, each of which is
    divided (a packed q, k, v). With `kept`, the wide side stays in slices: an `out` layer's output is not gathered, an
    `in` layer's input arrives in slices. `region` names the layers between which a user's own forward runs.
    """

    split: str
    width: int
    unit: int = 1
    blocks: int = 1
    kept: bool = False
    region: str = ""

    @property
    def units(self) -> int:
        """The largest number of workers that can each have a part."""
        return self.width // self.blocks // self.unit

    def ranges(self, size: int, index: int) -> tuple[Range, ...]:
        """Return the part of the width that worker `index` of `size` holds: one range in each block."""
        lo, hi = part(self.units, size, index)
        block = self.width // self.blocks
        return tuple((b * block + lo * self.unit, b * block + hi * self.unit) for b in range(self.blocks))

    def widths(self, size: int) -> tuple[int, ...]:
        """Return the widths of all workers' parts, in the order of workers."""
        return tuple(sum(hi - lo for lo, hi in self.ranges(size, i)) for i in range(size))


Plan = dict[str, LayerSplit]  # by a layer's name; other layers stay whole

"""Tensor parallelism: every layer of a replica is shared by `size` workers.

Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019, part 3.
A linear layer y = x W^T + b with W [out, in] is split by its output (each worker makes a slice of y) or by its input
(each takes a slice of x, and the partial sums are added). The two in turn, "out" and then "in", exchange nothing at the
wide layer between them. Papers call the split of W's rows row-wise, libraries that write y = x A call the same one
column-wise: names here say what is split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rayps.core.errors import ConfigError
from rayps.strategies.base import Replica

SPLITS = ("out", "in", "heads", "rows", "none")


@dataclass(frozen=True)
class TensorParallel(Replica):
    """Workers that share each layer: for layers too wide for one, and machines close together.

    `plan` says by a layer's name how it is split: out, in, heads (attention), rows (an embedding's), none; a name may
    end in *. Left out, the plan is made automatically; layers that a given plan does not name stay whole.
    """

    size: int = 2
    plan: dict[str, str] | None = None
    name: ClassVar[str] = "tensor_parallel"

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 1:
            raise ConfigError(f"size is {self.size!r}: give the number of workers that share a layer", field="size")
        plan: object = self.plan
        if plan is not None and not (isinstance(plan, dict) and all(_is_split(each) for each in plan.values())):
            raise ConfigError(
                f"plan is {plan!r}: give a split for each layer's name, one of {', '.join(SPLITS)} (row is out, column "
                "is in; out*3:64 is three blocks, cut at multiples of 64)",
                field="plan",
            )

    @property
    def tensor(self) -> int:  # type: ignore[override]
        """See Replica."""
        return self.size


def _is_split(given: object) -> bool:
    """Whether it is a split: a name, `name:UNIT`, or `out*BLOCKS:UNIT`."""
    if not isinstance(given, str):
        return False
    whole, colon, unit = given.partition(":")
    name, star, blocks = whole.partition("*")
    if name in ("out", "row", "in", "column"):
        return unit.isdigit() == bool(colon) and blocks.isdigit() == bool(star) and not (star and name[0] in "ic")
    return given in SPLITS

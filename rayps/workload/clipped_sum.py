"""The sum of the clipped gradients of single rows, for DP-SGD.

    sum_i g_i min(1, C / |g_i|)

g_i is the gradient of the workload's loss on a batch of row i alone. `torch.func` computes the g_i of a batch together
(`vmap` over `grad`); each row then has random numbers of its own, such as those of dropout. A loss that `vmap` cannot
run (it calls item(), or its control flow depends on values) is computed row by row, which is slow and has the same
result.

A row adds at most C, whatever its values: if its gradient is not finite, it adds nothing. In fp16 a row's loss is
multiplied by the largest of `_SCALES` for which its gradient is finite, and the gradient is divided by it before it is
clipped. No other row depends on this, so that the sum discloses no more about a row than its clipped gradient.

On a CPU, few rows at once are faster than many: their gradients stay in the cache, and the allocator keeps their memory
instead of asking the system for it each time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from rayps.core.errors import UserError, WorkloadError, first_line
from rayps.core.user_code import lacks_memory, user_code
from rayps.data.base import Batch, map_tensors
from rayps.tensors.flat import dense
from rayps.tensors.user_loss import checked_loss
from rayps.workload.base import Workload
from rayps.workload.model_part import ModelPart
from rayps.workload.precision import autocast

_SCALES = (2.0**16, 2.0**8, 1.0)  # factors of a row's loss in fp16
_PREFIX = "model."
_CPU_BYTES = 16 * 2**20  # gradients of rows that are computed together on a CPU; the fastest of 2 to 256 MiB measured
_CPU_ROWS = 4  # and at least so many rows


class ClippedSum:
    """Adds the clipped gradients of rows. `slow` is why rows are computed one by one, or None if they are not."""

    def __init__(self, workload: Workload, part: ModelPart, clip: float) -> None:
        """Prepare for the parameters of `part`, the whole model. `clip` is C."""
        self.slow: str | None = None
        self._loss, self._part, self._clip = _LossModule(workload, part.module), part, clip
        self._names = [_PREFIX + name for name in part.layout.names]
        self._workload, self._known = workload, False  # `_known`: whether a batch was computed
        self._scales = _SCALES if workload.precision == "fp16" else (1.0,)
        self._most = _most_rows(part)

    def add(self, batch: Batch, total: Tensor) -> None:
        """Add the clipped gradients of the rows of `batch` to `total` [size]. At most all are in memory at once.

        Raises WorkloadError if the user's loss fails, returns no mean, or changes the model.
        """
        if not batch.size:
            return
        before = self._versions()
        with user_code("loss"):
            for rows in _in_parts(batch, self._most):
                if self.slow is None:
                    self._add_together(rows, total)
                else:
                    self._add_each(rows, total)
        if self._versions() != before:
            changed = next(name for name, version in self._versions().items() if before[name] != version)
            raise WorkloadError(
                f"loss(model, batch) changed {changed!r} of the model: its value would disclose rows without noise\n"
                "use layers without running statistics (GroupNorm in place of BatchNorm), or leave out privacy"
            )

    def _add_together(self, batch: Batch, total: Tensor) -> None:
        try:
            rows = self._gradients(batch, self._scales[0])
        except UserError:
            raise
        except Exception as error:
            if self._known or lacks_memory(error):
                raise
            self.slow = f"{type(error).__name__}: {first_line(error)}"
            self._add_each(batch, total)
            return
        self._known = True
        finite = self._clip_and_add(rows, total)
        for scale in self._scales[1:]:
            if finite.all():
                return
            batch = _rows_of(batch, ~finite)
            finite = self._clip_and_add(self._gradients(batch, scale), total)

    def _add_each(self, batch: Batch, total: Tensor) -> None:
        """Compute the gradients row by row."""
        for row in range(batch.size):
            one = _rows_of(batch, slice(row, row + 1))
            for scale in self._scales:
                found = torch.autograd.grad(self._loss(one) * scale, self._part.parameters, allow_unused=True)
                pairs = zip(found, self._part.parameters, strict=True)
                rows = [(torch.zeros_like(p) if g is None else dense(g) / scale)[None] for g, p in pairs]
                if self._clip_and_add(rows, total).all():
                    break

    def _gradients(self, batch: Batch, scale: float) -> list[Tensor]:
        """Return the gradients of each row by each parameter, [rows, *shape]."""
        leaves: list[Tensor] = []
        for value in (batch.x, batch.y):
            map_tensors(value, lambda leaf: leaves.append(leaf) if _has_rows(leaf, batch.size) else None)

        def loss(params: dict[str, Tensor], row: list[Tensor]) -> Tensor:
            found: Tensor = torch.func.functional_call(self._loss, params, (_one_row(batch, iter(row)),))
            return found if scale == 1 else found * scale

        params = {name: p.detach() for name, p in zip(self._names, self._part.parameters, strict=True)}
        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0), randomness="different")
        found: Mapping[str, Tensor] = each(params, leaves)
        return [found[name] / scale if scale != 1 else found[name] for name in self._names]

    def _clip_and_add(self, gradients: list[Tensor], total: Tensor) -> Tensor:
        """Add each row's gradient, clipped, to `total`. Return which rows have a finite gradient: only these add."""
        norm = _norms(gradients, torch.promote_types(gradients[0].dtype, torch.float32))
        if not torch.isfinite(norm).all():  # a square may have overflowed
            norm = _norms(gradients, torch.float64)
        finite = torch.isfinite(norm)
        factor = torch.where(finite, (self._clip / norm).clamp(max=1.0), 0.0)
        every = bool(finite.all())
        for gradient, entry in zip(gradients, self._part.layout.entries, strict=True):
            flat = _flat(gradient)
            if not every:  # 0 * inf is not 0
                flat = torch.where(finite[:, None], flat, 0.0)
            total[entry.lo : entry.hi] += factor.to(flat.dtype) @ flat
        return finite

    def _versions(self) -> dict[str, int]:
        """Return how often each tensor of the model was changed, by name."""
        module = self._part.module
        tensors: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        return {name: each._version for name, each in tensors.items()}


class _LossModule(nn.Module):
    """The loss as a module, so that the parameters can be replaced while the user's loss calls the model."""

    def __init__(self, workload: Workload, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._compute: Callable[[Batch], Tensor] = lambda batch: mean_loss(workload, model, batch)

    def forward(self, batch: Batch) -> Tensor:
        """Return the loss of a batch."""
        return self._compute(batch)


def mean_loss(workload: Workload, model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean loss of a batch. Raises WorkloadError if `loss` returns a pair, or no loss."""
    with autocast(workload, next(model.parameters()).device):
        given: object = workload.loss(model, batch)
    if isinstance(given, Mapping) and "loss" in given:
        given = given["loss"]
    if isinstance(given, tuple):
        raise WorkloadError(
            "loss(model, batch) returned a pair (sum, weight), and privacy needs the loss of single rows: return the "
            "mean over the rows of the batch"
        )
    return checked_loss(given, trains=False)


def _norms(gradients: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the norm of each row's whole gradient [rows], float64. The squares are added in `dtype`."""
    norms = torch.stack([torch.linalg.vector_norm(_flat(g), dim=1, dtype=dtype) for g in gradients])
    found: Tensor = torch.linalg.vector_norm(norms, dim=0, dtype=torch.float64)
    return found


def _most_rows(part: ModelPart) -> int | None:
    """Return how many rows are computed together at most; None if as many as there are."""
    vector = part.parameters[0]
    if vector.device.type != "cpu":
        return None
    return max(_CPU_ROWS, _CPU_BYTES // (part.layout.size * vector.element_size()))


def _in_parts(batch: Batch, most: int | None) -> Iterator[Batch]:
    """Yield a batch in parts of about equal size, of at most `most` rows."""
    parts = 1 if most is None else -(-batch.size // most)
    if parts == 1:
        yield batch
        return
    cuts = [batch.size * at // parts for at in range(parts + 1)]
    for lo, hi in itertools.pairwise(cuts):
        yield _rows_of(batch, slice(lo, hi))


def _flat(gradient: Tensor) -> Tensor:
    return gradient.reshape(gradient.shape[0], -1)


def _has_rows(leaf: Tensor, rows: int) -> bool:
    return leaf.dim() > 0 and leaf.shape[0] == rows


def _one_row(batch: Batch, row: Iterator[Tensor]) -> Batch:
    """Return a batch of one row, whose tensors are those of `row`, in the order of the tensors of `batch`."""

    def change(leaf: Tensor) -> Tensor:
        return next(row).unsqueeze(0) if _has_rows(leaf, batch.size) else leaf

    return Batch(map_tensors(batch.x, change), map_tensors(batch.y, change), 1)


def _rows_of(batch: Batch, rows: slice | Tensor) -> Batch:
    """Return some rows of a batch."""

    def change(leaf: Tensor) -> Tensor:
        return leaf[rows] if _has_rows(leaf, batch.size) else leaf

    size = rows.stop - rows.start if isinstance(rows, slice) else int(rows.sum())
    return Batch(map_tensors(batch.x, change), map_tensors(batch.y, change), size)

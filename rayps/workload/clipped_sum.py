"""The sum of the clipped gradients of single rows, for DP-SGD.

    sum_i g_i min(1, C / |g_i|)

g_i is the gradient of the workload's loss on a batch of row i alone. `torch.func` computes the g_i of a stack together
(`vmap` over `grad`); each row then has random numbers of its own, such as those of dropout. A loss that `vmap` cannot
run (it calls item(), or its control flow depends on values) is computed row by row, which is slow and has the same
result.

Gradients are scaled in float32 at least, whatever the dtype of the parameters, and their sum is float64. In bfloat16 a
clipped row would have up to 0.4% more than its norm, and a sum of 1,000 rows would be rounded by more than one row
adds; in float32 the sum of 4,000 rows would still be rounded by 1e-4 of it.

A row adds at most C, whatever its values: if its gradient is not finite, it adds nothing. In fp16 a row's loss is
multiplied by the largest of `_SCALES` for which its gradient is finite, and the gradient is divided by it before it is
clipped. No other row depends on this, so that the sum discloses no more about a row than its clipped gradient.

On a CPU, few rows at once are faster than many: their gradients stay in the cache, and the allocator keeps their memory
instead of asking the system for it each time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from rayps_client.errors import UserError, WorkloadError, first_line
from torch import Tensor, nn

from rayps.core.job.user_code import lacks_memory, user_code
from rayps.data.base import Batch
from rayps.data.single_rows import row_of, rows_of, tensors_of, with_tensors
from rayps.tensors.flat import make_dense
from rayps.tensors.user_loss import check_loss
from rayps.workload.base import Workload
from rayps.workload.model_part import ModelPart
from rayps.workload.precision import autocast

_SCALES = (2.0**16, 2.0**8, 1.0)  # factors of a row's loss in fp16
_PREFIX = "model."
_CPU_BYTES = 16 * 2**20  # gradients of rows that are computed together on a CPU; the fastest of 2 to 256 MiB measured
_CPU_ROWS = 4  # and at least so many rows
_SQUARES = 1024  # squares that are added in float32: a sum of 10^7 would be wrong by up to 1%
_ROWS = 32  # rows that are added in float32


class ClippedSum:
    """Adds the clipped gradients of rows. `slow` is why rows are computed one by one, or None if they are not."""

    def __init__(self, workload: Workload, part: ModelPart, clip: float) -> None:
        """Prepare for the parameters of `part`, the whole model. `clip` is C."""
        self.slow: str | None = None
        self._loss, self._part, self._clip = _LossModule(workload, part.module), part, clip
        self._names = [_PREFIX + name for name in part.layout.names]
        self._workload, self._known = workload, False  # `_known`: whether a batch was computed
        self._scales = _SCALES if workload.precision == "fp16" else (1.0,)
        self._most, self._total = _most_rows(part), _RowSum(part)

    def of(self, stacks: Iterable[Batch]) -> Tensor:
        """Return the sum of the clipped gradients of the rows of `stacks`, [size], float64, until the next call.

        `stacks` are those of `rayps.data.single_rows`. The gradients of at most one of them are in memory at once.

        Raises WorkloadError if the user's loss fails, returns no mean, or changes the model.
        """
        total = self._total
        total.clear()
        before, copies = self._tensors(), {name: value.clone() for name, value in self._part.module.named_buffers()}
        try:
            with user_code("loss"):
                for rows in itertools.chain.from_iterable(_in_parts(stack, self._most) for stack in stacks):
                    if self.slow is None:
                        self._add_together(rows, total)
                    else:
                        self._add_each(rows, total)
        finally:
            self._refuse_changes(before, copies)
        return total.value

    def _tensors(self) -> dict[str, tuple[Tensor, int]]:
        """Return the model's parameters and buffers by name, and how often each was changed."""
        module = self._part.module
        return {name: (each, each._version) for name, each in (*module.named_parameters(), *module.named_buffers())}

    def _refuse_changes(self, before: Mapping[str, tuple[Tensor, int]], copies: Mapping[str, Tensor]) -> None:
        """Raise WorkloadError if a tensor of the model has changed; `copies` are its buffers as they were."""
        for name, (value, version) in self._tensors().items():
            # a write through `.data` counts no version, and is seen in the bytes
            held, earlier = before.get(name, (None, 0))
            if held is not value or version != earlier or not _same(copies.get(name, value), value):
                raise WorkloadError(
                    f"loss(model, batch) changed {name!r} of the model: its value would disclose rows without noise\n"
                    "use layers without running statistics (LayerNorm or GroupNorm), or leave out privacy"
                )

    def _add_together(self, stack: Batch, total: _RowSum) -> None:
        try:
            rows = self._gradients(stack, self._scales[0])
        except UserError:
            raise
        except Exception as error:
            if self._known or lacks_memory(error):
                raise
            self.slow = f"{type(error).__name__}: {first_line(error)}"
            self._add_each(stack, total)
            return
        self._known = True
        finite = self._clip_and_add(rows, total)
        for scale in self._scales[1:]:
            if finite.all():
                return
            stack = rows_of(stack, ~finite)
            finite = self._clip_and_add(self._gradients(stack, scale), total)

    def _add_each(self, stack: Batch, total: _RowSum) -> None:
        """Compute the gradients row by row."""
        for row in range(stack.size):
            one = row_of(stack, row)
            for scale in self._scales:
                found = torch.autograd.grad(self._loss(one) * scale, self._part.parameters, allow_unused=True)
                pairs = zip(found, self._part.parameters, strict=True)
                rows = [(torch.zeros_like(p) if g is None else make_dense(g) / scale)[None] for g, p in pairs]
                if self._clip_and_add(rows, total).all():
                    break

    def _gradients(self, stack: Batch, scale: float) -> list[Tensor]:
        """Return the gradients of each row by each parameter, [rows, *shape]."""

        def loss(params: dict[str, Tensor], row: list[Tensor]) -> Tensor:
            found: Tensor = torch.func.functional_call(self._loss, params, (with_tensors(stack, iter(row), 1),))
            return found if scale == 1 else found * scale

        params = {name: p.detach() for name, p in zip(self._names, self._part.parameters, strict=True)}
        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0), randomness="different")
        found: Mapping[str, Tensor] = each(params, tensors_of(stack))
        return [found[name] / scale if scale != 1 else found[name] for name in self._names]

    def _clip_and_add(self, gradients: list[Tensor], total: _RowSum) -> Tensor:
        """Add each row's gradient, clipped, to `total`. Return which rows have a finite gradient: only these add."""
        norm = _norms(gradients, total.wide)
        if not torch.isfinite(norm).all():  # a square may have overflowed
            norm = _norms(gradients, torch.float64)
        finite = torch.isfinite(norm)
        total.add(gradients, torch.where(finite, (self._clip / norm).clamp(max=1.0), 0.0), finite)
        return finite


class _RowSum:
    """A sum of rows of gradients [size], float64. Up to `_ROWS` rows after one another are added in float32 at least.

    Adding all rows in float32 would round a sum of 4,000 equal rows by 1e-4 of a row; adding each in float64 is slow.
    """

    def __init__(self, part: ModelPart) -> None:
        self._layout, device = part.layout, part.parameters[0].device
        self.wide = torch.promote_types(part.layout.dtype, torch.float32)
        self._sum = torch.zeros(part.layout.size, dtype=torch.float64, device=device)
        self._newest, self._count = torch.zeros(part.layout.size, dtype=self.wide, device=device), 0

    def clear(self) -> None:
        """Set the sum to zero."""
        self._sum.zero_()
        self._newest.zero_()
        self._count = 0

    def add(self, gradients: list[Tensor], factor: Tensor, finite: Tensor) -> None:
        """Add the `finite` rows of the gradients by each parameter, times their `factor` [rows]."""
        every, factor, lo = bool(finite.all()), factor.to(self.wide), 0
        while lo < len(factor):
            hi = min(len(factor), lo + _ROWS - self._count)
            for gradient, entry in zip(gradients, self._layout.entries, strict=True):
                flat = _flat(gradient[lo:hi]).to(self.wide)
                if not every:  # 0 * inf is not 0
                    flat = torch.where(finite[lo:hi, None], flat, 0.0)
                self._newest[entry.lo : entry.hi].addmv_(flat.t(), factor[lo:hi])
            self._count, lo = self._count + hi - lo, hi
            if self._count == _ROWS:
                self._settle()

    @property
    def value(self) -> Tensor:
        """The sum of all rows so far."""
        self._settle()
        return self._sum

    def _settle(self) -> None:
        self._sum += self._newest
        self._newest.zero_()
        self._count = 0


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
    return check_loss(given, trains=False)


def _norms(gradients: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the norm of each row's whole gradient [rows], float64. Short sums of squares are added in `dtype`."""
    parts = [part for gradient in gradients for part in _short(_flat(gradient))]
    norms = torch.cat([torch.linalg.vector_norm(part, dim=2, dtype=dtype) for part in parts], dim=1)
    found: Tensor = torch.linalg.vector_norm(norms, dim=1, dtype=torch.float64)
    return found


def _short(flat: Tensor) -> Iterator[Tensor]:
    """Yield the elements of `flat` [rows, n] as [rows, pieces, elements of a piece], with short pieces."""
    rows, size = flat.shape
    whole = size // _SQUARES * _SQUARES
    if whole:
        yield flat[:, :whole].view(rows, -1, _SQUARES)
    if whole < size:
        yield flat[:, None, whole:]


def _same(before: Tensor, now: Tensor) -> bool:
    """Return whether two tensors of one shape and dtype have the same bytes."""
    return before is now or torch.equal(before.reshape(-1).view(torch.uint8), now.reshape(-1).view(torch.uint8))


def _most_rows(part: ModelPart) -> int | None:
    """Return how many rows are computed together at most; None if as many as there are."""
    vector = part.parameters[0]
    if vector.device.type != "cpu":
        return None
    return max(_CPU_ROWS, _CPU_BYTES // (part.layout.size * vector.element_size()))


def _in_parts(stack: Batch, most: int | None) -> Iterator[Batch]:
    """Yield a stack in parts of about equal size, of at most `most` rows."""
    parts = 1 if most is None else -(-stack.size // most)
    if parts == 1:
        yield stack
        return
    cuts = [stack.size * at // parts for at in range(parts + 1)]
    for lo, hi in itertools.pairwise(cuts):
        yield rows_of(stack, slice(lo, hi))


def _flat(gradient: Tensor) -> Tensor:
    return gradient.reshape(gradient.shape[0], -1)

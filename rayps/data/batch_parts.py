"""Cut a batch into parts by rows: micro-batches, or a few rows on which a model is tried."""

from __future__ import annotations

from rayps_client.errors import WorkloadError
from torch import Tensor

from rayps.core.partition import cut_slices
from rayps.data.base import Batch, Nested, map_tensors

SAMPLE_ROWS = 8  # rows of the batch on which a cut is checked and layers are timed


def cut_batch(batch: Batch, micro_batches: int) -> list[Batch]:
    """Cut the batch into `micro_batches` parts, whose sizes differ by at most one row. Some are empty if rows are few.

    Raises:
        WorkloadError: a tensor of the batch does not have one entry per row.
    """
    cuts = list(cut_slices(batch.size, micro_batches))
    return [
        Batch(_rows(batch.x, batch.size, cut), _rows(batch.y, batch.size, cut), cut.stop - cut.start) for cut in cuts
    ]


def sample_of(batch: Batch) -> Batch:
    """Return the first rows of a batch, at most `SAMPLE_ROWS`."""
    if batch.size <= SAMPLE_ROWS:
        return batch
    return cut_batch(batch, -(-batch.size // SAMPLE_ROWS))[0]


def _rows(value: Nested, size: int, cut: slice) -> Nested:
    if isinstance(value, (list, tuple)) and len(value) == size and not any(isinstance(v, Tensor) for v in value):
        return value[cut]
    return map_tensors(value, lambda t: _tensor_rows(t, size, cut))


def _tensor_rows(t: Tensor, size: int, cut: slice) -> Tensor:
    if t.dim() == 0:
        return t
    if t.shape[0] != size:
        raise WorkloadError(
            f"a batch of {size} rows contains a tensor of shape {tuple(t.shape)}: to cut it into micro-batches, the "
            f"first dimension of every tensor must be {size} (pad ragged tensors)"
        )
    return t[cut]

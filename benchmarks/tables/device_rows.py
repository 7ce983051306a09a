"""Measure the lookup of a table's rows on a device, beside torch's EmbeddingBag and a plain copy of the rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from rayps_client.errors import ConfigError
from torch import nn

from benchmarks.gpu.device_server import measure_median
from rayps.bench.table import BenchRow
from rayps.ps.tables.embedding import EmbeddingBag
from rayps.tensors.checkpoints.uploads import Uploads
from rayps.tensors.device import Device


@dataclass(frozen=True, slots=True)
class DeviceRowsRow(BenchRow):
    """One way to look up `ids` rows of `dim` elements in a forward pass. Times are medians in milliseconds."""

    columns: ClassVar[str] = "device | lookup | ids | dim | ms | of_torch: of torch"

    device: str
    lookup: str
    ids: int
    dim: int
    ms: float
    of_torch: float  # ms / ms of torch


def bench_device_rows(
    device: str = "cuda", *, ids: int = 65_536, dim: int = 64, vocabulary: int = 1_000_000, repeats: int = 9
) -> list[DeviceRowsRow]:
    """Measure the forward pass of an EmbeddingBag over `ids` distinct ids, whose rows are stored in this process.

    The rows are torch's EmbeddingBag, whose weight is on the device; rayps' EmbeddingBag, which finds the rows on the
    CPU and copies them to the device; and this copy alone.

    Raises:
        ConfigError: there is no such device, or the vocabulary has fewer than `ids` ids.
    """
    if vocabulary < ids:
        raise ConfigError(f"vocabulary is {vocabulary}: give at least ids={ids}")
    place = Device.of(device)
    given = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(0))[:ids].view(-1, 1).to(place.place)
    known = nn.EmbeddingBag(vocabulary, dim, mode="sum", device=place.place)
    ours = EmbeddingBag(dim, table="bench", mode="sum")
    ours(given).sum().backward()
    ours.step()  # stores the rows: the initial value of a row that is not stored is computed at each lookup
    rows, uploads = torch.randn(ids, dim), Uploads(place, torch.float32)

    def waited(work: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            work()
            place.current().record().wait()

        return run

    found = {
        "torch": measure_median(waited(lambda: known(given)), repeats),
        "rayps": measure_median(waited(lambda: ours(given)), repeats),
        "copy of the rows": measure_median(waited(lambda: uploads.copy(rows)), repeats),
    }
    return [DeviceRowsRow(device, name, ids, dim, ms, ms / found["torch"]) for name, ms in found.items()]

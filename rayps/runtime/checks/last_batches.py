"""Batches of one row, of which BatchNorm layers in training mode have no statistics: known before any worker trains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from rayps_client.error_hints import NO_STATISTICS, ONE_ROW_WAY
from rayps_client.errors import RaypsError, WorkloadError
from rayps_client.trainers.local_work import counted
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from rayps.core.job.user_code import user_code
from rayps.core.rows.row_shares import RowShares, deal_places
from rayps.core.strategy.replica import Pipeline
from rayps.core.strategy.strategy import Phase
from rayps.core.strategy.strategy_families import has_remote_clients, learns_by_client
from rayps.core.strategy.topology import backup_in, replica_of
from rayps.data.base import Data
from rayps.data.batch_parts import cut_batch
from rayps.federated.strategy_interface import FederatedView
from rayps.privacy.options import privacy_in
from rayps.workload.base import Workload
from rayps.workload.model import apart, model_of
from rayps.workload.precision import autocast

MOST_BYTES = 256 << 20  # a larger model is not built for one row: a worker then gives the error, with the same hint


def check_last_batches(
    workload: Workload,
    phases: Sequence[Phase],
    workers: int,
    data: Data,
    model: nn.Module,
    *,
    shares: RowShares | None = None,
    most: int | None = None,
) -> None:
    """Try the loss on one row if the job has batches of one row, and `model` has BatchNorm layers in training mode.

    `shares` is how the rows are dealt to workers in step whose number may change; None for other workers. `most` is
    the number of batches that each worker takes, if the job does not end with an epoch. Other errors of the loss are
    left to the trial, which has a batch of more rows.

    Raises:
        WorkloadError: a BatchNorm layer refuses one row. The text says which batch has one row, and the ways out.
    """
    found = (each for phase in phases for each in _of_one_row(workload, phase, workers, data, shares, most))
    who = next(found, None)
    layer = next((name for name, each in model.named_modules() if isinstance(each, _BatchNorm) and each.training), None)
    if who is None or layer is None or sum(p.nbytes for p in model.parameters()) > MOST_BYTES:
        return
    try:
        with apart(), user_code("loss"), torch.no_grad(), autocast(workload, "cpu"):
            batch = next(each for each in data.batches(rank=0, size=1, seed=0, epoch=0) if each.size)
            workload.loss(model_of(workload), cut_batch(batch, batch.size)[0])
    except RaypsError as error:
        if NO_STATISTICS in error.message:
            raise WorkloadError(
                f"{who}, and a BatchNorm layer such as {layer!r} has no statistics of one row:\n{ONE_ROW_WAY}",
                layer=layer,
            ) from error


def _of_one_row(
    workload: Workload, phase: Phase, workers: int, data: Data, shares: RowShares | None, most: int | None
) -> Iterator[str]:
    """Yield which batches of a phase have one row, in words."""
    strategy = phase.strategy
    if has_remote_clients(strategy) or not data.has_length:
        return
    if isinstance(strategy, FederatedView) and learns_by_client(strategy):
        for name, rows in zip(data.clients.names, data.clients.sizes.tolist(), strict=True):
            size = strategy.federation.local.rows(rows, data.batch_size)
            if 1 in _sizes(rows, size, drop_last=data.drop_last):
                yield f"client {name!r} has {counted(rows)}, of which the last batch of {size} has one row"
        return
    if privacy_in(strategy) is not None:
        return  # private rows refuse the layer, and name what takes its place
    replica, replicas = replica_of(strategy), phase.grid(workers).data - backup_in(strategy)
    micro = replica.micro_batches if isinstance(replica, Pipeline) else 1
    if shares is None:
        counts = [len(range(rank, data.rows(), replicas)) for rank in range(replicas)]
        batches = [
            _sizes(rows, data.batch_size, drop_last=data.drop_last or _ends_before(most, rows, data.batch_size))
            for rows in counts
        ]
    else:
        batches = [_shared_sizes(shares, rank, data) for rank in range(len(shares.shares))]
    if workload.sync_batchnorm and len(batches) > 1:
        return  # statistics are of all workers' rows
    if any(0 < size < 2 * micro for sizes in batches for size in sizes):
        cut = f", in {micro} micro-batches" if micro > 1 else ""
        yield (
            f"{counted(data.rows())} on {replicas} worker{'' if replicas == 1 else 's'} in batches of "
            f"{data.batch_size}{cut} give a batch of one row"
        )


def _ends_before(most: int | None, rows: int, size: int) -> bool:
    """Return whether a worker of at most so many batches does not come to the last one of `rows` rows."""
    return most is not None and most <= rows // size


def _sizes(rows: int, size: int, *, drop_last: bool) -> set[int]:
    """Return the numbers of rows of the batches of `size` into which one pass over `rows` rows is cut."""
    return ({size} if rows >= size else set()) | (set() if drop_last else {rows % size})


def _shared_sizes(shares: RowShares, rank: int, data: Data) -> set[int]:
    """Return the same of a rank in an epoch's first round, and in its last one if that has fewer rows."""
    own = shares.shares[rank]
    most = max(1, -(-own // max(1, -(-own // data.batch_size))))
    left = 0 if shares.drop_last else data.rows() % shares.block
    last = sum(place < left for place in deal_places(shares.shares, rank))
    return _sizes(own, most, drop_last=False) | _sizes(last, most, drop_last=False)

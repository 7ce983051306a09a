"""What a strategy will cost a workload, by formula, from what one small batch shows. Nothing is started."""

from __future__ import annotations

import logging
from contextlib import suppress

import torch
from torch import nn

from rayps.core.costs import Costs, costs
from rayps.core.strategy import StrategyView
from rayps.core.traffic import Sizes
from rayps.core.user_code import user_code
from rayps.data import Batch
from rayps.parallel.division.build import blank
from rayps.parallel.division.divide import sample_of
from rayps.parallel.division.division import Division
from rayps.parallel.pipeline import loss_proxy
from rayps.parallel.pipeline.cut import layers, measure, spans
from rayps.parallel.pipeline.probe import plain, probe, whole
from rayps.ps.tables.embedding import tables_of
from rayps.runtime.cost_report import CostReport
from rayps.tensors import optim
from rayps.tensors.flat import Layout
from rayps.workload.base import Workload
from rayps.workload.model import apart, model_of

log = logging.getLogger(__name__)
_SMALL = 3  # elements along each dimension of the stand-ins on which an optimizer is tried


def expected(
    workload: Workload,
    strategy: StrategyView,
    workers: int,
    division: Division | None = None,
    batch: int | None = None,
    *,
    activations: bool = False,
) -> Costs:
    """The costs of a step. `batch` are a replica's rows; left out, as many as the workload's data gives.

    `activations` also of a model that is on one worker, which takes a forward pass. What the user's code does not show
    (it fails on a few rows) is left unknown: a plan is no reason to fail.
    """
    found = sizes(workload, strategy, workers, division, batch)
    if activations and division is None and not tables_of(blank(workload)):
        with suppress(Exception):  # as in sizes()
            found = whole(workload, found, sample_of(first(workload, strategy.grid(workers).data)))
    return costs(strategy, workers, found)


def tally_of(
    workload: Workload, strategy: StrategyView, workers: int, division: Division | None, layout: Layout
) -> CostReport:
    """What hears a phase's points. A model on one worker is not looked at again."""

    def formula() -> Costs:
        if division is not None:
            try:
                return expected(workload, strategy, workers, division)
            except Exception:  # the user's model, once more: a run that went well does not fail for its formulas
                log.exception("what a step costs by formula is known in part only")
        return costs(strategy, workers, Sizes(layout.size, layout.dtype.itemsize))

    return CostReport(strategy, workers, formula)


def seconds(workload: Workload, division: Division, replicas: int, micro_batches: int) -> list[float]:
    """Of each chunk, forward and backward of a micro-batch, measured here. Raises DataError, WorkloadError."""
    found = layers(model_of(workload))
    micro = loss_proxy.parts(first(workload, replicas), micro_batches)[0]
    args, kwargs = loss_proxy.inputs(workload, micro)
    took = measure(found, args, kwargs)
    return [sum(took[lo:hi]) for lo, hi in spans(division.boundaries, len(found))]


def sizes(
    workload: Workload, strategy: StrategyView, workers: int, division: Division | None = None, batch: int | None = None
) -> Sizes:
    """What the costs depend on; see `expected`."""
    with apart():
        model = blank(workload)
        layout = Layout.of((name, p) for name, p in model.named_parameters() if p.requires_grad)
        found = Sizes(layout.size, layout.dtype.itemsize)
        try:
            found = Sizes(layout.size, layout.dtype.itemsize, states=states(workload, layout))
            sample = first(workload, strategy.grid(workers).data)
            rows = sample.size if batch is None else batch
            found = Sizes(found.parameters, found.width, states=found.states, batch=rows)
            if division is not None:
                return probe(workload, division, found, sample_of(sample))
        except Exception as error:  # the user's code on a few rows, or memory: what it shows is left out
            log.info("what passes between the parts of the model is not known: %s", error)
    return found if division is None else plain(division, found)


def first(workload: Workload, replicas: int) -> Batch:
    """The first batch of the first replica. Raises DataError, WorkloadError."""
    with user_code("data"):
        return next(iter(workload.data().batches(rank=0, size=replicas, seed=0, epoch=0)))


def states(workload: Workload, layout: Layout) -> float:
    """How many numbers the workload's optimizer keeps for each parameter element, tried on small ones.

    Raises:
        WorkloadError: the optimizer cannot step.
    """
    params = [nn.Parameter(torch.zeros([min(n, _SMALL) for n in entry.shape])) for entry in layout.entries]
    optimizer = optim.made(workload.optimizer, params)
    for p in params:
        p.grad = torch.zeros_like(p)
    with user_code("optimizer.step"):
        optimizer.step()
    kept = sum(
        value.numel()
        for p in params
        for key, value in optimizer.state[p].items()
        if isinstance(value, torch.Tensor) and value.shape == p.shape and key != "step"
    )
    return kept / max(1, sum(p.numel() for p in params))

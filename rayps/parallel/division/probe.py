"""Measure, in one process and on a few rows, what the parts of a divided model send and how much memory they need.

The memory is that of the activations which a forward pass stores for backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from rayps.core.job.user_code import user_code
from rayps.core.strategy.traffic import Crossing, Sizes
from rayps.data.base import Batch, Nested, map_tensors
from rayps.parallel.pipeline import loss_proxy
from rayps.parallel.pipeline.cut import layers, measure, spans
from rayps.parallel.pipeline.skip import stash_in
from rayps.parallel.tensor import TensorCommunicator, split
from rayps.tensors.division import Division
from rayps.workload.base import Workload
from rayps.workload.loss_result import loss_result
from rayps.workload.model import apart, model_of
from rayps.workload.stored_activations import record_stored


class _SingleProcessGroup(TensorCommunicator):
    """A tensor group simulated in one process. It counts the exchanges, and replaces the other workers' data."""

    def __init__(self, size: int) -> None:
        super().__init__(None)
        self.size, self.summed, self.gathered = size, 0, 0

    def add(self, t: Tensor) -> Tensor:
        """Count a sum over the workers; return `t` as the result."""
        self.collectives += 1
        self.summed += t.nbytes
        return t

    def gather(self, t: Tensor, dim: int, widths: Sequence[int]) -> Tensor:
        """Count a gather; return a tensor of the result's shape, filled with the mean of `t` along `dim`."""
        self.collectives += 1
        shape = list(t.shape)
        shape[dim] = sum(widths)
        self.gathered += t.element_size() * torch.Size(shape).numel()
        return t.mean(dim, keepdim=True).expand(shape).contiguous()


def probe(workload: Workload, division: Division, sizes: Sizes, sample: Batch) -> Sizes:
    """Return `division.count_elements(sizes)` with measurements, per row, of one forward and backward pass on `sample`.

    The pass is that of tensor rank 0.

    Raises:
        WorkloadError: the user's code fails on the sample.
    """
    sizes, rows = division.count_elements(sizes), max(sample.size, 1)
    with apart():
        model, communicator = model_of(workload), _SingleProcessGroup(division.tensor)
        if division.tensor > 1:
            model = split(model, division.plan, 0, division.tensor, communicator)
        if division.boundaries:
            return _stages(workload, division, model, communicator, sizes, sample)
        with record_stored(model) as found, user_code("loss"):
            loss = loss_result(workload.loss(model, sample), sample.size).total
        with user_code("loss"):
            loss.backward()  # type: ignore[no-untyped-call]
    return replace(
        sizes,
        kept=(sum(found.values()) / rows,),
        summed=(communicator.summed / rows,),
        gathered=(communicator.gathered / rows,),
        exchanges=(communicator.collectives,),
    )


def time_chunks(workload: Workload, division: Division, micro: Batch) -> list[float]:
    """Return, for each chunk, the seconds that its forward and backward pass over `micro` take in this process.

    Raises WorkloadError if the user's code fails.
    """
    found = layers(model_of(workload))
    args, kwargs = loss_proxy.inputs(workload, micro)
    took = measure(found, args, kwargs)
    return [sum(took[lo:hi]) for lo, hi in spans(division.boundaries, len(found))]


def _stages(
    workload: Workload,
    division: Division,
    model: nn.Module,
    communicator: _SingleProcessGroup,
    sizes: Sizes,
    sample: Batch,
) -> Sizes:
    """Return the measurements of `probe`, from a run of each chunk of the pipeline separately."""
    found, rows, p = layers(model), max(sample.size, 1), division.stages
    exchanged = [[0, 0, 0] for _ in range(p)]  # per stage: bytes summed, bytes gathered, exchanges
    kept, crossings, values = [], list[Crossing](), dict[str, Nested]()
    args, kwargs = loss_proxy.inputs(workload, sample)
    chunks = spans(division.boundaries, len(found))
    done: list[tuple[int, Nested, Nested]] = []  # per chunk: its input, its output
    for chunk, (lo, hi) in enumerate(chunks):
        given = None if chunk == 0 else map_tensors(done[-1][2], _leaf)
        values = {name: map_tensors(value, _leaf) for name, value in values.items()}
        with record_stored(model) as saved, stash_in(values), _count_exchanges(communicator, exchanged[chunk % p]):
            value: Nested = given
            for number in range(lo, hi):
                layer = found[number].module
                with user_code(f"layer {found[number].name}"):
                    value = layer(*args, **kwargs) if number == 0 else layer(value)
        kept.append(sum(saved.values()) / rows)
        done.append((chunk, given, value))
        if chunk + 1 < len(chunks):
            crossings.append(Crossing(chunk, chunk + 1, *_bytes(value, rows)))
        crossings += [
            Crossing(chunk, route.target, *_bytes(values[route.name], rows))
            for route in division.routes
            if route.source == chunk and route.target % p != chunk % p and route.name in values
        ]
    _run_backward(workload, sample, done, communicator, exchanged)
    return replace(
        sizes,
        kept=tuple(kept),
        crossings=tuple(cut for cut in crossings if cut.source % p != cut.target % p),
        summed=tuple(each[0] / rows for each in exchanged),
        gathered=tuple(each[1] / rows for each in exchanged),
        exchanges=tuple(each[2] for each in exchanged),
    )


def _run_backward(
    workload: Workload,
    sample: Batch,
    done: list[tuple[int, Nested, Nested]],
    communicator: _SingleProcessGroup,
    exchanged: list[list[int]],
) -> None:
    """Run the chunks' backward passes, from the last chunk to the first, to count the tensor ranks' exchanges."""
    if communicator.size == 1:
        return
    grads: list[Tensor] = []
    for chunk, given, value in reversed(done):
        with _count_exchanges(communicator, exchanged[chunk % len(exchanged)]):
            if chunk == done[-1][0]:
                loss_proxy.loss(workload, sample, value).total.backward()  # type: ignore[no-untyped-call]
            else:
                outputs = [t for t in _tensors(value) if t.requires_grad]
                torch.autograd.backward(outputs, grads[: len(outputs)])
        leaves = [t for t in _tensors(given) if t.requires_grad] if given is not None else []
        grads = [torch.zeros_like(t) if t.grad is None else t.grad for t in leaves]


@contextmanager
def _count_exchanges(communicator: _SingleProcessGroup, into: list[int]) -> Iterator[None]:
    before = (communicator.summed, communicator.gathered, communicator.collectives)
    yield
    for i, (now, then) in enumerate(
        zip((communicator.summed, communicator.gathered, communicator.collectives), before, strict=True)
    ):
        into[i] += now - then


def _bytes(value: Nested, rows: int) -> tuple[float, float]:
    """Return the bytes per row of `value` (sent forward) and of its gradient (sent backward)."""
    every = _tensors(value)
    return sum(t.nbytes for t in every) / rows, sum(t.nbytes for t in every if t.requires_grad) / rows


def _tensors(value: Nested) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(value, lambda t: found.append(t))
    return found


def _leaf(t: Tensor) -> Tensor:
    return t.detach().requires_grad_(t.requires_grad)

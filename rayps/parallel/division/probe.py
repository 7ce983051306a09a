"""Measure, in one process and on a few rows, what the parts of a divided model send and how much memory they need.

The memory is that of the activations which a forward pass stores for backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from rayps.core.job.user_code import user_code
from rayps.core.strategy.traffic import Crossing, Sizes
from rayps.data.base import Batch, Nested, map_tensors
from rayps.parallel.division.division import Division
from rayps.parallel.pipeline import loss_proxy
from rayps.parallel.pipeline.cut import layers, spans
from rayps.parallel.pipeline.skip import stash_in
from rayps.parallel.tensor import TensorCommunicator, split
from rayps.workload.base import Workload
from rayps.workload.checkpoint_activations import checkpoint_activations, checkpointed_blocks
from rayps.workload.loss_result import loss_result
from rayps.workload.model import apart, model_of


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


def plain(division: Division, sizes: Sizes) -> Sizes:
    """Return `sizes` with the numbers of elements that columns own and borrow, which need no measurement."""
    borrowed = [each for column in division.columns for each in column.borrowed]
    return replace(
        sizes,
        owned=tuple(column.layout.size for column in division.columns),
        held=tuple(column.held for column in division.columns),
        tied=sum(each.piece.size for each in borrowed if each.tied),
        shared=sum(each.piece.size for each in borrowed if not each.tied),
    )


def whole(workload: Workload, sizes: Sizes, sample: Batch) -> Sizes:
    """Return `sizes` with the bytes per row that the undivided model stores for backward, measured on `sample`.

    If some modules compute their activations again, these are the bytes outside of them, and those of the largest one.

    Raises:
        WorkloadError: the user's code fails on the sample.
        ConfigError: `checkpoint_activations` of the workload chooses no module.
    """
    with apart():
        model = model_of(workload)
        blocks = checkpointed_blocks(model, workload.checkpoint_activations)
        inside = dict.fromkeys(blocks, 0)
        with _record_stored(model) as found, _counting(blocks, found, inside), user_code("loss"):
            workload.loss(model, sample)
        if blocks:
            checkpoint_activations(model, workload.checkpoint_activations)
            with _record_stored(model) as found, user_code("loss"):
                workload.loss(model, sample)
    bytes = sum(found.values()) + max(inside.values(), default=0)
    return replace(sizes, kept=(bytes / max(sample.size, 1),))


def probe(workload: Workload, division: Division, sizes: Sizes, sample: Batch) -> Sizes:
    """Return `plain(...)` with measurements, per row, of one forward and backward pass of tensor rank 0 over `sample`.

    Raises:
        WorkloadError: the user's code fails on the sample.
    """
    sizes, rows = plain(division, sizes), max(sample.size, 1)
    with apart():
        model, communicator = model_of(workload), _SingleProcessGroup(division.tensor)
        if division.tensor > 1:
            model = split(model, division.plan, 0, division.tensor, communicator)
        if division.boundaries:
            return _stages(workload, division, model, communicator, sizes, sample)
        with _record_stored(model) as found, user_code("loss"):
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
        with _record_stored(model) as saved, stash_in(values), _count_exchanges(communicator, exchanged[chunk % p]):
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


@contextmanager
def _counting(blocks: Mapping[str, nn.Module], found: Mapping[int, int], inside: dict[str, int]) -> Iterator[None]:
    """In the block, write into `inside` for each module the bytes that are added to `found` while it runs forward."""
    before: dict[str, int] = {}
    handles = []

    def begin(name: str) -> None:
        before[name] = sum(found.values())

    def end(name: str) -> None:
        inside[name] = max(inside[name], sum(found.values()) - before[name])

    for name, module in blocks.items():
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: begin(name)))
        handles.append(module.register_forward_hook(lambda *_, name=name: end(name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _record_stored(model: nn.Module) -> Iterator[dict[int, int]]:
    """Inside the block, record what autograd stores for backward: a dict from memory address to number of bytes.

    The memory of parameters and buffers is not counted.
    """
    mine = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
    found: dict[int, int] = {}
    alive: list[Tensor] = []  # references that prevent the reuse of an address

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in mine:
            found[storage.data_ptr()] = storage.nbytes()
            alive.append(t.detach())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield found


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

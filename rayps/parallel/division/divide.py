"""Divide a model among the workers of one replica. The driver decides the division once, before workers start."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rayps_client.errors import ConfigError, WorkloadError
from torch import nn

from rayps.core.strategy.replica import Pipeline, Replica, TensorParallel
from rayps.data.base import Batch
from rayps.parallel.pipeline import cut, loss_proxy
from rayps.parallel.pipeline.skip import routes
from rayps.parallel.tensor import Plan, pieces, plan
from rayps.tensors.division import Borrowed, Column, Division, Route, TensorSlice
from rayps.tensors.flat import Layout, find_outside_vector
from rayps.workload.base import Workload

Ranges = tuple[int, tuple[tuple[int, int], ...]]  # (dim, the ranges (lo, hi) along it)


def divide(workload: Workload, replica: Replica, model: nn.Module, sample: Batch | None = None) -> Division:
    """Decide which worker owns which part of the model.

    `model` has real parameters, not meta ones. If `sample` is given, the model runs on it, to check that a cut does not
    change the model's results, and to time the layers.

    Raises:
        ConfigError: the model cannot be divided among so many workers; the error names the number to change.
        WorkloadError: the model cannot be cut into stages, or a layer cannot be split.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    layout = Layout.of(named)
    tensor, given = replica.tensor, _user_plan(replica)
    split: Plan | None = plan(model, tensor, given) if tensor > 1 else None
    if split is not None and not split:
        raise ConfigError(
            f"no layer of the model would be split among {tensor} tensor ranks: "
            "give plan={layer name: 'out' or 'in', ...}, or use no tensor parallelism",
            field="plan",
        )
    slices: list[Mapping[str, Ranges]] = [{} for _ in range(tensor)]
    if split is not None:
        slices = [pieces(model, split, tensor, rank) for rank in range(tensor)]
    found: list[cut.Layer] = []
    boundaries: tuple[int, ...] = ()
    skips: Sequence[Route] = ()
    users = _all_on_stage_0(model)
    if isinstance(replica, Pipeline) and replica.stages > 1:
        found = cut.layers(model)
        boundaries = _boundaries(replica, found, model, workload, sample)
        users = _users(model, found, _by_stage(replica, boundaries, len(found)))
        skips = routes([layer.module for layer in found], boundaries)
    columns = [
        _column(model, layout, slices, users, (stage, rank), _spans(replica, boundaries, len(found), stage))
        for stage in range(replica.stages)
        for rank in range(tensor)
    ]
    return Division(replica, layout, tuple(columns), boundaries, split or {}, tuple(skips))


def _user_plan(replica: Replica) -> dict[str, str] | None:
    """Return the user's plan of how layers are split, or None if rayps chooses the splits."""
    found = replica.stage if isinstance(replica, Pipeline) else replica
    return found.plan if isinstance(found, TensorParallel) else None


def _all_on_stage_0(model: nn.Module) -> dict[str, list[int]]:
    """Return stage 0 as the user of each parameter and buffer, for a replica without stages."""
    return {name: [0] for name, _ in [*model.named_parameters(), *model.named_buffers()]}


def _users(model: nn.Module, layers: Sequence[cut.Layer], stage_of: Callable[[int], int]) -> dict[str, list[int]]:
    """Return the stages that use each parameter and buffer, in the order of their first use."""
    names = {id(value): name for name, value in [*model.named_parameters(), *model.named_buffers()]}
    users: dict[str, list[int]] = {}
    for i, layer in enumerate(layers):
        for value in [*layer.module.parameters(), *layer.module.buffers()]:
            if id(value) not in names:
                raise WorkloadError(
                    f"layer {layer.name!r} has a parameter that is not among model.parameters(): layers() must return "
                    "modules that are attributes of the model"
                )
            stages = users.setdefault(names[id(value)], [])
            if stage_of(i) not in stages:
                stages.append(stage_of(i))
    for name in names.values():
        if name not in users:
            raise WorkloadError(
                f"{name!r} is in none of the model's layers, so no stage would have it: "
                "put this parameter or buffer into a layer"
            )
    return users


def _boundaries(
    replica: Pipeline, layers: Sequence[cut.Layer], model: nn.Module, workload: Workload, sample: Batch | None
) -> tuple[int, ...]:
    """Return the number of the first layer of each chunk, except the first chunk's.

    Raises:
        ConfigError: the model has fewer layers than `replica` has chunks or boundaries.
        WorkloadError: a cut would change the model's result on `sample`, or the user's code fails.
    """
    parts = replica.stages * replica.chunks
    if parts > len(layers):
        chunks = f" with {replica.chunks} chunks each" if replica.chunks > 1 else ""
        raise ConfigError(
            f"stages is {replica.stages}{chunks}, but the model has {len(layers)} layers: give at most "
            f"{len(layers) // replica.chunks} stages",
            field="stages",
        )
    if replica.boundaries is not None and replica.boundaries[-1] >= len(layers):
        raise ConfigError(
            f"boundaries is {replica.boundaries!r}, but the model has only {len(layers)} layers, 0 to "
            f"{len(layers) - 1}: each boundary must be the number of the layer with which a new part begins",
            field="boundaries",
        )
    call: loss_proxy.Call | None = None
    if sample is not None and sample.size:
        call = loss_proxy.inputs(workload, sample)
        cut.check(model, layers, *call)
    if replica.boundaries is not None:
        return replica.boundaries
    if replica.balance == "time" and call is not None:
        costs = list(cut.measure(layers, *call))
    else:
        costs = [float(sum(p.numel() for p in layer.module.parameters())) for layer in layers]
    return tuple(cut.shares(costs, parts))


def _by_stage(replica: Pipeline, boundaries: Sequence[int], count: int) -> Callable[[int], int]:
    """Return a function from the number of a layer to the layer's stage."""
    stages = [0] * count
    for chunk, (lo, hi) in enumerate(cut.spans(boundaries, count)):
        stages[lo:hi] = [chunk % replica.stages] * (hi - lo)
    return stages.__getitem__


def _spans(replica: Replica, boundaries: Sequence[int], count: int, stage: int) -> tuple[tuple[int, int], ...]:
    if not boundaries:
        return ()
    return tuple(cut.spans(boundaries, count)[stage :: replica.stages])


def _column(
    model: nn.Module,
    layout: Layout,
    slices: Sequence[Mapping[str, Ranges]],
    users: Mapping[str, list[int]],
    place: tuple[int, int],
    spans: tuple[tuple[int, int], ...],
) -> Column:
    """Return the column at `place` = (stage, tensor rank): the parts of the model that it owns and borrows."""
    (stage, rank), tensor = place, len(slices)
    owned, borrowed = [], []
    for entry in layout.entries:
        if stage not in users[entry.name]:
            continue
        owner, split = users[entry.name][0], entry.name in slices[0]
        piece = _piece(entry.name, entry.shape, slices[rank])
        if split or rank == 0:
            if stage == owner:
                owned.append(piece)
            else:
                borrowed.append(Borrowed(piece, owner * tensor + rank, True))
        else:
            borrowed.append(Borrowed(piece, stage * tensor, False))
    here = [
        _piece(name, tuple(value.shape), slices[rank])
        for name, value in find_outside_vector(model).items()
        if stage in users[name]
    ]
    return Column(tuple(owned), tuple(borrowed), tuple(here), spans, layout.dtype)


def _piece(name: str, shape: tuple[int, ...], slices: Mapping[str, Ranges]) -> TensorSlice:
    if name not in slices:
        return TensorSlice(name, shape)
    dim, ranges = slices[name]
    return TensorSlice(name, shape, dim, tuple((int(lo), int(hi)) for lo, hi in ranges))

"""A model whose parameters, gradients and optimizer state are divided among processes, by torch's FSDP2.

Zhao et al., "PyTorch FSDP: Experiences on scaling fully sharded data parallel", VLDB 2023; Rajbhandari et al., "ZeRO:
Memory optimizations toward training trillion parameter models", SC 2020, stage 3. Each parameter is cut along its first
dimension: of d rows, process r of N holds the rows r c to min((r + 1) c, d), with c = ceil(d / N). These are a flat
range of the parameter in row-major order, which may be empty. The model's repeated blocks are units: a unit is whole on
a process only while it computes.

The first values are drawn from (seed, name) one tensor at a time (`rayps.workload.deferred_init`), and no process ever
holds the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from rayps_client.error_hints import READ_OUTSIDE_WAY
from rayps_client.errors import WorkloadError
from rayps_client.trainers.moved_weight import drawn_like
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from rayps.tensors import optim
from rayps.tensors.finite import is_finite
from rayps.tensors.flat import Layout, find_untrained, refuse_frozen, refuse_thawed, square_of, square_quickly
from rayps.tensors.learning_rate import Ticks, pace_of, recipe_of
from rayps.tensors.named_parameters import NamedParameters
from rayps.tensors.optim import EDITS, PER_PARAMETER, Moments
from rayps.tensors.state_pieces import StatePieces
from rayps.worker.loops.divisible_parameters import check_divisible
from rayps.workload.base import Workload
from rayps.workload.checkpoint_activations import checkpoint_activations
from rayps.workload.deferred_init import DeferredModel, deferred
from rayps.workload.model_blocks import repeated_blocks

Range = tuple[int, int]


def units_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that are whole on a process only while they compute, by name, without the model itself.

    These are the blocks that the model repeats, without those that share a parameter with a module outside.
    """
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for p in module.parameters(recurse=False):
            owners.setdefault(id(p), set()).add(id(module))
    found = {}
    for name, block in repeated_blocks(model).items():
        inside = {id(module) for module in block.modules()}
        if all(owners[id(p)] <= inside for p in block.parameters()):
            found[name] = block
    return found


def rows_of(rows: int, rank: int, size: int) -> Range:
    """Return the first row that process `rank` of `size` holds of a parameter of so many rows, and the last + 1."""
    most = -(-rows // size)
    return min(rank * most, rows), min((rank + 1) * most, rows)


class ShardedModel:
    """One process's shards of a model, its optimizer, and the arithmetic of a step on them.

    All processes of the mesh must run forward and backward passes equally often and in the same order.
    """

    def __init__(
        self, workload: Workload, seed: int, mesh: DeviceMesh, ticks: Ticks | None = None, lr_factor: float = 1.0
    ) -> None:
        """Build the model, divided, with memory for this process's shards. Call `draw` or `load` next.

        All learning rates are multiplied by `lr_factor`.

        Raises:
            WorkloadError: the user's code failed, or `model()` cannot be recorded or divided.
            ConfigError: the model or a field of the workload is refused.
        """
        self._initial: DeferredModel | None = deferred(workload, seed)
        self.module, self.mesh = self._initial.module, mesh
        self.rank, self.size = mesh.get_local_rank(), mesh.size()
        check_divisible(self.module)
        checkpoint_activations(self.module, workload.checkpoint_activations)
        for unit in [*units_of(self.module).values(), self.module]:
            fully_shard(unit, mesh=mesh, reshard_after_forward=True)
        for each in self.module.modules():
            if isinstance(each, FSDPModule):  # the loss is weighted before: sum the gradients, by sums that gloo has
                each.set_force_sum_reduction_for_comms(True)
                each.set_gradient_divide_factor(1.0)
        for module in self.module.modules():
            if not _has_memory(module):
                module.to_empty(device="cpu", recurse=False)
        trained = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        self.layout = Layout.of(trained)
        self._untrained = find_untrained(self.module)
        self.parameters = NamedParameters((p for _, p in trained), (name for name, _ in trained))
        factory = recipe_of(workload, lr_factor)
        self.optimizer = optim.made(factory, self.parameters)
        self._pace = pace_of(factory, self.layout, self.optimizer, ticks or Ticks())

    # ---- position of the shards

    def ranges(self, *, frozen: bool = False) -> dict[str, Range]:
        """Return the elements that this process holds of each trained, or each frozen, parameter, by name."""
        found = {}
        for name, p in self.module.named_parameters():
            if p.requires_grad is not frozen:
                lo, hi = rows_of(p.shape[0], self.rank, self.size)
                row = p.numel() // max(p.shape[0], 1)
                found[name] = (lo * row, hi * row)
        return found

    def local(self, name: str) -> Tensor:
        """Return this process's shard of a parameter, flat, without a copy."""
        return _take_local(self.module.get_parameter(name).detach()).view(-1)

    def refuse_read_outside(self, given: object) -> None:
        """Refuse a loss, or a metric, that was computed from shards: a forward pass makes plain tensors of them.

        Raises:
            WorkloadError: the text names the parameters, if the value has a gradient.
        """
        values = [*given.values()] if isinstance(given, Mapping) else [given]
        parts = [part for value in values for part in (value if isinstance(value, tuple) else (value,))]
        found = [part for part in parts if isinstance(part, DTensor)]
        if found:
            read = {id(leaf) for value in found for leaf in _find_leaves(value)}
            names = [repr(name) for name, p in self.module.named_parameters() if id(p) in read]
            raise WorkloadError(
                f"loss(model, batch) read {', '.join(names[:4]) or 'a parameter'} outside of its module's forward:\n"
                f"{READ_OUTSIDE_WAY}",
                parameters=names,
            )

    # ---- values

    def draw(self) -> None:
        """Set all shards and buffers to their first values, and forget how they are drawn."""
        initial = self._initial
        assert initial is not None, "values are drawn once"
        for name, (lo, _) in (self.ranges() | self.ranges(frozen=True)).items():
            initial.copy_piece(name, lo, self.local(name))
        for name, value in self.module.named_buffers():
            value.copy_(initial.materialize(name))
        initial.fill_attributes(self.module)
        self._initial = None

    def fill(self, pieces: Mapping[str, Tensor]) -> None:
        """Copy pieces of parameters into the shards. A piece has the elements that `ranges` says, by name."""
        for name, piece in pieces.items():
            self.local(name).copy_(piece.reshape(-1))

    def pieces(self) -> StatePieces:
        """Return the shards of all parameters and of the optimizer's state, as copies.

        A value of the optimizer that is no number for each element, such as a count of steps, is in the piece of the
        process that holds the parameter's first element.
        """
        found = StatePieces()
        held = optim.copy_moments(self.optimizer, self.layout, self.parameters)
        for name, (lo, hi) in self.ranges().items():
            if lo == hi:
                continue
            found.tensors[f"model/{name}"] = self.local(name).clone()
            found.offsets[f"model/{name}"] = lo
            for key, value in held[name].items():
                if isinstance(value, DTensor):
                    found.tensors[f"optim/{name}/{key}"] = value.to_local().reshape(-1)
                    found.offsets[f"optim/{name}/{key}"] = lo
                elif not isinstance(value, Tensor):
                    found.numbers.setdefault(name, {})[key] = value
                elif not lo:
                    found.tensors[f"optim/{name}/{key}"] = value
        for name, (lo, hi) in self.ranges(frozen=True).items():
            found.frozen[name] = tuple(self.module.get_parameter(name).shape)
            if lo < hi:
                found.tensors[f"frozen/{name}"] = self.local(name).clone()
                found.offsets[f"frozen/{name}"] = lo
        return found

    def load_moments(self, moments: Moments) -> None:
        """Restore the optimizer's state. Values of one number for each element are of this process's shard, flat.

        The state of an optimizer of another kind is dropped.
        """
        state: Moments = {}
        shards = dict(zip(self.parameters.names, self.parameters, strict=True))
        for name, held in optim.select_fitting(moments, self.optimizer).items():
            if name in shards:
                state[name] = {key: self._divide(key, value, shards[name]) for key, value in held.items()}
        optim.load(self.optimizer, state, self.layout, self.parameters)

    def load_whole(self, params: Tensor, moments: Moments) -> None:
        """Take this process's part of a whole state: the vector of all parameters, and moments of whole parameters."""
        self.fill({e.name: params[e.lo : e.hi][slice(*self.ranges()[e.name])] for e in self.layout.entries})
        shapes, ranges = {e.name: e.shape for e in self.layout.entries}, self.ranges()
        cut: Moments = {}
        for name, held in moments.items():
            cut[name] = {}
            for key, value in held.items():
                each = isinstance(value, Tensor) and tuple(value.shape) == shapes.get(name) and key not in PER_PARAMETER
                cut[name][key] = value.reshape(-1)[slice(*ranges[name])] if each else value
        self.load_moments(cut)

    def _divide(self, key: str, value: Any, p: nn.Parameter) -> Any:
        shard = _take_local(p)
        if key == EDITS or not isinstance(value, Tensor) or key in PER_PARAMETER or value.dim() == 0:
            return value
        if value.numel() != shard.numel():
            return value
        local = value.detach().reshape(shard.shape).clone()
        return DTensor.from_local(local, self.mesh, [Shard(0)], run_check=False, shape=p.shape, stride=p.stride())

    @contextmanager
    def other_values(self, number: int) -> Iterator[None]:
        """Replace the shards by random values inside the block, unless `number` is 0, and restore buffers after it.

        All processes enter and leave the block together.
        """
        kept = {name: self.local(name).clone() for name in (self.layout.names if number else ())}
        buffers = [(value, value.clone()) for value in self.module.buffers()]
        drawn = {name: drawn_like(value, number, index) for index, (name, value) in enumerate(kept.items())}
        self._fill_again(drawn)
        try:
            yield
        finally:
            self._fill_again(kept)
            for value, before in buffers:
                value.copy_(before)

    def _fill_again(self, pieces: Mapping[str, Tensor]) -> None:
        """Copy pieces into the shards, and let each unit get its parameters again before it computes."""
        self.fill(pieces)
        for each in self.module.modules():
            if isinstance(each, FSDPModule):
                each.reshard()

    # ---- a step

    def refuse_other_parameters(self) -> None:
        """Raise WorkloadError if other parameters need a gradient than those that needed one at the start."""
        refuse_thawed(self._untrained)
        refuse_frozen(self.parameters.pairs(), "shard='parameters'")

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for p in self.parameters:
            p.grad = None

    def scale_gradients(self, factor: float) -> None:
        """Multiply all gradients by a number."""
        if factor != 1:
            for p in self.parameters:
                if p.grad is not None:
                    _take_local(p.grad).mul_(factor)

    def fault(self) -> int:
        """Return the number of the first parameter whose gradient is not finite in this process's shard, or -1."""
        for number, p in enumerate(self.parameters):
            if p.grad is not None and not is_finite(_take_local(p.grad)):
                return number
        return -1

    def square(self) -> Tensor:
        """Return the squared norm of this process's shards of the gradients, as a float64 number."""
        found = torch.zeros((), dtype=torch.float64)
        for p in self.parameters:
            if p.grad is not None:
                found += square_of(_take_local(p.grad))
        return found

    def quick_square(self) -> float:
        """Return the squared norm of this process's shards of the gradients, with the accuracy of their dtype."""
        return sum(square_quickly(_take_local(p.grad)) for p in self.parameters if p.grad is not None)

    def at(self, round: int) -> None:
        """Set the learning rates of round `round` by the schedule. Raises WorkloadError if the schedule fails."""
        if self._pace is not None:
            self._pace.at(round)


def _take_local(t: Tensor) -> Tensor:
    return t.to_local() if isinstance(t, DTensor) else t


def _has_memory(module: nn.Module) -> bool:
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return not any(value.is_meta for value in own)


def _find_leaves(value: Tensor) -> Iterator[DTensor]:
    """Yield the divided parameters from which a value was computed, as far as its gradient reaches them."""
    nodes, seen = [value.grad_fn], set[int]()
    while nodes:
        node = nodes.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, DTensor):
            yield leaf
        nodes += [each for each, _ in node.next_functions]

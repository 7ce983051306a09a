"""Apply a torch optimizer to slices of the parameter vector, and convert its state to named tensors.

Only an elementwise optimizer has the same result slice by slice. SGD, Adam and Adagrad are elementwise; Adafactor, Muon
and L-BFGS are not. `check_elementwise` tests an optimizer by a trial, not by its name.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from rayps_client.errors import WorkloadError
from rayps_client.values import Json, JsonObject
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

from rayps.core.job.user_code import user_code
from rayps.tensors.flat import Entry, Layout
from rayps.tensors.named_parameters import NamedParameters
from rayps.tensors.torch_compat import spare_compiler
from rayps.tensors.user_loss import OWN_LOOP_WAY

Factory = Callable[[list[nn.Parameter]], Optimizer]
# keys whose value is one number for each parameter, also if the parameter has one element: counts of torch's optimizers
PER_PARAMETER = frozenset({"step", "mu_product", "eta", "mu"})
_STATE = "optim/"  # prefix of the names of an optimizer's tensors in a checkpoint
_Value = TypeVar("_Value")
Group = dict[str, Any]  # a parameter group, as torch types it
ParamState = dict[str, Any]  # an optimizer's state of one parameter, as torch types it: tensors and numbers by key
Moments = dict[str, ParamState]  # the state of each parameter by name; its tensors are of whole parameters or of slices
StateValue: TypeAlias = Tensor | Json
_BLOCK = 1 << 17  # elements of a gradient summed at a time: they stay in the processor's cache
EDITS = "group edits"  # the key in a parameter's state under which its group's changed values are stored: see `edits`

spare_compiler()


class SlicedOptimizer:
    """The user's optimizer over elements lo to hi of the vector, or over several ranges, with its parameter groups.

    A *leaf* is one parameter of this optimizer. Adjacent pieces of one group with compatible states are merged into one
    leaf, because the time of a step grows with the number of leaves. The result of an elementwise optimizer is the
    same.
    """

    def __init__(
        self,
        factory: Factory,
        layout: Layout,
        params: Tensor,
        lo: int,
        hi: int,
        ranges: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """Build the user's optimizer. `params` are the elements lo to hi, which a step changes.

        `ranges` are the bounds of the elements to be stepped, ascending and between lo and hi; None means all of them.
        A parameter may have elements in one range only.

        Raises:
            WorkloadError: the user's code failed, or did not return an optimizer.
        """
        self.params = params
        self._ranges = ((lo, hi),) if ranges is None else tuple(ranges)
        self._pieces = [piece for a, b in self._ranges for piece in layout.pieces(a, b)]
        self._lo = lo
        self._compact: dict[str, int] = {}  # from a parameter to the place of its piece if all ranges are joined
        at = 0
        for piece in self._pieces:
            self._compact[piece.name] = at
            at += piece.hi - piece.lo
        self._alone: frozenset[str] = frozenset()  # names of parameters that are not merged with others: see `step`
        self.optimizer, self._members, state = _retarget(build(factory, layout), layout, self._pieces)
        # only for torch's own optimizers is it known how to divide a merged leaf's state into pieces again
        self._merges = type(self.optimizer).__module__.startswith("torch.optim")
        self._made_by = factory, layout
        self._decays_alone: bool | None = None  # see `decays_alone`; determined at the first step that needs it
        self._sgd = type(self.optimizer) is SGD and "step" not in vars(self.optimizer)
        self._scratch: Tensor | None = None
        self._leaves: list[_Leaf] = []
        self._arrange(state)

    def step_used(self, grad: Tensor, unused: Collection[str]) -> None:
        """Take a step with the gradient `grad`: of all `params`, or of the joined ranges only.

        The parameters named in `unused` have no gradient, and the optimizer skips them. The optimizer may change the
        elements of `grad` in the ranges. Raises WorkloadError if the optimizer's step fails.
        """
        whole = grad.numel() == self.params.numel()
        missing = frozenset(unused) - self._alone
        if missing:  # their states may differ from their neighbours' from now on
            self._alone |= missing
            self._arrange(self._copy_states())
        skipped = self._alone & frozenset(unused)
        for leaf in self._leaves:
            first = leaf.pieces[0].name
            at = self._compact[first]
            cut = leaf.cut if whole else slice(at, at + leaf.size)
            leaf.param.grad = None if first in skipped else grad[cut]
        with user_code("optimizer.step"):
            self.optimizer.step()
        for leaf in self._leaves:
            leaf.param.grad = None

    def step(self, grad: Tensor, scale: float = 1.0, decays: float | None = None) -> None:
        """Take a step with `scale` times the gradient slice `grad`, [len(params)], which does not change.

        `decays` is the number of whole steps for which this step counts, the factor of the weight decay. If it is None,
        it is |`scale`|. See `decaying`.
        """
        if self._step_plainly(grad, scale):
            return
        if scale != 1.0:
            grad = torch.mul(grad, scale, out=self._lend_scratch())
        for leaf in self._leaves:
            leaf.param.grad = grad[leaf.cut]
        with self.decaying(abs(scale) if decays is None else decays), user_code("optimizer.step"):
            self.optimizer.step()
        for leaf in self._leaves:
            leaf.param.grad = None  # do not keep the caller's memory

    @contextlib.contextmanager
    def decaying(self, times: float) -> Iterator[None]:
        """Multiply the `weight_decay` of each group by `times`, for the steps inside the block.

        N pushes scaled by 1/N then decay the parameters as one step does, and a push of the sum of n gradients as n
        steps do. The regularised optimum therefore does not change. The decay is not scaled if `decays_alone` returns
        True for the optimizer.
        """
        groups = [] if times == 1 else [group for group in self.optimizer.param_groups if _decays_inside(group)]
        if groups and self._decays_alone is None:
            self._decays_alone = not self._merges and decays_alone(*self._made_by)
        if not groups or self._decays_alone:
            yield
            return
        whole = [group["weight_decay"] for group in groups]
        for group, decay in zip(groups, whole, strict=True):
            group["weight_decay"] = decay * times
        try:
            yield
        finally:
            for group, decay in zip(groups, whole, strict=True):
                group["weight_decay"] = decay

    def step_mean(self, values: Sequence[Tensor], weights: Sequence[float]) -> None:
        """Take a step with sum(w_i v_i) / sum(w_i), summed in the order given. The sum of weights must not be 0."""
        self.step(self.mean(values, weights))

    def mean(self, values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """Return the mean with which `step_mean` takes a step; it is valid until the next call of this optimizer.

        On the CPU the sum is computed in blocks that fit into the cache. Half precision is summed in float32 and
        rounded once. A value of weight 0 is not read, because it may be NaN.
        """
        total, spare = sum(weights), self._lend_scratch()
        shares = [(value, weight / total) for value, weight in zip(values, weights, strict=True) if weight]
        if len(shares) == 1 and self._is_plain:
            return shares[0][0]  # its share is 1; another optimizer may change the gradient that it is given
        half = spare.dtype in (torch.float16, torch.bfloat16)
        size = _BLOCK if spare.is_cpu else max(1, spare.numel())
        for at in range(0, spare.numel(), size):
            block = slice(at, at + size)
            first, share = shares[0]
            mean = first[block].float().mul_(share) if half else torch.mul(first[block], share, out=spare[block])
            for value, share in shares[1:]:
                mean.add_(value[block].float() if half else value[block], alpha=share)
            if half:
                spare[block].copy_(mean)
        return spare

    def _lend_scratch(self) -> Tensor:
        """Return memory for one gradient slice; each call returns the same memory."""
        if self._scratch is None:
            self._scratch = torch.empty_like(self.params)
        return self._scratch

    def plain_rate(self, leaf: nn.Parameter) -> float | None:
        """Return r if a step of this leaf only computes `p += r * grad`, else None."""
        if not self._sgd or self._hooked:
            return None
        group = next(group for group in self.optimizer.param_groups if any(p is leaf for p in group["params"]))
        return (group["lr"] if group["maximize"] else -group["lr"]) if is_plain_group(group) else None

    @property
    def _hooked(self) -> bool:
        return bool(self.optimizer._optimizer_step_pre_hooks or self.optimizer._optimizer_step_post_hooks)

    @property
    def _is_plain(self) -> bool:
        """Whether a step only computes `p -= lr * grad`, for all parameters."""
        return self._sgd and not self._hooked and all(is_plain_group(group) for group in self.optimizer.param_groups)

    def _step_plainly(self, grad: Tensor, scale: float) -> bool:
        """Take a step of plain SGD (see `is_plain_group`) in one operation, with the same bits as torch's own loop.

        Return whether the step was taken; if the optimizer is not plain SGD, it is not.
        """
        if not self._is_plain:
            return False
        groups = self.optimizer.param_groups
        single = len(self._leaves) == 1 and grad.numel() == self._leaves[0].size
        for leaf in self._leaves:
            group = groups[leaf.group]
            lr = group["lr"] * scale
            leaf.value.add_(grad if single else grad[leaf.cut], alpha=lr if group["maximize"] else -lr)
        return True

    def leaves(self) -> list[tuple[nn.Parameter, slice]]:
        """Return each parameter of the optimizer with its range in `params`."""
        return [(leaf.param, leaf.cut) for leaf in self._leaves]

    def moments(self) -> Moments:
        """Return the state of each parameter's piece, by the parameter's name. Tensors are copies.

        The state includes the `edits` of the parameter's group.
        """
        found, edited = self._copy_states(), edits(self.optimizer)
        for leaf in self._leaves:
            if edited[leaf.group]:
                for piece in leaf.pieces:
                    found[piece.name][EDITS] = edited[leaf.group]
        return found

    def _copy_states(self) -> Moments:
        found: Moments = {}
        for leaf in self._leaves:
            state = self.optimizer.state.get(leaf.param, {})
            for piece in leaf.pieces:
                a = piece.lo - leaf.pieces[0].lo
                found[piece.name] = {
                    key: _copy(value[a : a + piece.hi - piece.lo] if is_elementwise(key, value, leaf.size) else value)
                    for key, value in state.items()
                }
        return found

    def load(self, moments: Moments, layout: Layout) -> None:
        """Load the state of whole parameters; each piece gets its slice of the parameter's state."""
        found: Moments = {}
        for lo, hi in self._ranges:
            found |= cut(moments, layout, lo, hi)
        self.restore(found)

    def restore(self, moments: Moments) -> None:
        """Restore the state that `moments` returned for the same elements.

        The optimizer uses the tensors without a copy and changes them.
        """
        for number, members in enumerate(self._members):
            edit(self.optimizer.param_groups[number], (moments.get(self._pieces[i].name, {}) for i in members))
        plain = {name: {key: state[key] for key in state if key != EDITS} for name, state in moments.items()}
        self._arrange(self._copy_states() | plain)

    def _arrange(self, state: Moments) -> None:
        """Rebuild the leaves from the pieces, as few as possible. `state` is the state of each piece by name."""
        self._leaves = []
        self.optimizer.state.clear()
        for number, (group, members) in enumerate(zip(self.optimizer.param_groups, self._members, strict=True)):
            group["params"] = []
            for run in self._runs(members, state):
                cut = slice(run[0].lo - self._lo, run[-1].hi - self._lo)
                leaf = _Leaf(nn.Parameter(self.params[cut]), self.params[cut], cut, number, run)
                group["params"].append(leaf.param)
                self._leaves.append(leaf)
                held = [state.get(piece.name, {}) for piece in run]
                if held[0]:
                    self.optimizer.state[leaf.param] = _place(_merge(held, run), leaf.param, group)

    def _runs(self, members: list[int], state: Moments) -> list[list[Entry]]:
        runs: list[list[Entry]] = []
        for i in members:
            piece = self._pieces[i]
            last = runs[-1][-1] if runs else None
            alone = last is not None and not self._alone.isdisjoint((last.name, piece.name))
            if (
                last is not None
                and self._merges
                and last.hi == piece.lo
                and not alone
                and _are_alike(last, piece, state)
            ):
                runs[-1].append(piece)
            else:
                runs.append([piece])
        return runs


@dataclass(slots=True)
class _Leaf:
    """One parameter of a `SlicedOptimizer`: adjacent pieces of the model's parameters."""

    param: nn.Parameter
    value: Tensor  # the parameter's memory
    cut: slice  # the leaf's range within the shard's slice
    group: int
    pieces: list[Entry]

    @property
    def size(self) -> int:
        return self.cut.stop - self.cut.start  # type: ignore[no-any-return]


def is_plain_group(group: Group) -> bool:
    """Return whether this group of an SGD steps by `p -= lr * grad` and nothing else."""
    return (
        type(group["lr"]) is float
        and not group["momentum"]
        and not group["weight_decay"]
        and not (group["foreach"] or group["fused"] or group["differentiable"])
    )


def _decays_inside(group: Group) -> bool:
    """Return whether this group adds its weight decay to the gradient, unlike AdamW, whose decay is decoupled."""
    return bool(group.get("weight_decay")) and not group.get("decoupled_weight_decay")


def is_elementwise(key: str, value: StateValue, size: int) -> bool:
    """Return whether `value` has one number for each of a leaf's `size` elements; a count of steps does not."""
    return isinstance(value, Tensor) and value.dim() == 1 and len(value) == size and key not in PER_PARAMETER


def _are_alike(last: Entry, piece: Entry, state: Moments) -> bool:
    """Return whether the states of two adjacent pieces can be merged.

    They can if they have the same keys, and equal values wherever a value is not one number for each element.
    """
    a, b = state.get(last.name, {}), state.get(piece.name, {})
    if a.keys() != b.keys():
        return False
    for key in a:
        ours = is_elementwise(key, a[key], last.hi - last.lo), is_elementwise(key, b[key], piece.hi - piece.lo)
        if ours == (False, False):
            if isinstance(a[key], Tensor) != isinstance(b[key], Tensor):
                return False
            if not (torch.equal(a[key], b[key]) if isinstance(a[key], Tensor) else a[key] == b[key]):
                return False
        elif ours != (True, True):
            return False
    return True


def _merge(held: list[ParamState], run: list[Entry]) -> ParamState:
    size = run[0].hi - run[0].lo
    return {
        key: torch.cat([state[key] for state in held]) if is_elementwise(key, first, size) else first
        for key, first in held[0].items()
    }


def _place(state: ParamState, param: nn.Parameter, group: Group) -> ParamState:
    """Return a parameter's state on the parameter's device, by the rule of `torch.optim.Optimizer.load_state_dict`.

    On the CPU the tensors are not copied.
    """
    if param.is_cpu:
        return state
    counts = param.device if group.get("fused") or group.get("capturable") else torch.device("cpu")
    return {
        key: value.to(counts if key == "step" else param.device) if isinstance(value, Tensor) else value
        for key, value in state.items()
    }


def made(factory: Factory, params: list[nn.Parameter]) -> Optimizer:
    """Call `factory` with `params` and check the result; return the user's optimizer.

    Raises:
        WorkloadError: the user's code failed, or did not return an optimizer of `params`.
    """
    with user_code("optimizer"):
        optimizer = factory(params)
    if not isinstance(optimizer, Optimizer):
        held = optimizer.values() if isinstance(optimizer, Mapping) else optimizer
        several = isinstance(held, Iterable) and any(isinstance(one, Optimizer) for one in held)
        raise WorkloadError(
            f"optimizer(params) returned {type(optimizer).__name__}: return a torch.optim.Optimizer over params"
            + (f"\n{OWN_LOOP_WAY}" if several else "")
        )
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        raise WorkloadError(
            "optimizer(params) made a learning-rate scheduler, which rayps does not step: return it from the "
            "workload's method schedule(self, optimizer); every process that steps then uses it (under rayps.wrap: "
            "the argument `schedule`)"
        )
    optimizer.rayps_made = [select_plain_values(group) for group in optimizer.param_groups]  # type: ignore[attr-defined]
    known = {id(p) for p in params}
    for group in optimizer.param_groups:
        if any(id(p) not in known for p in group["params"]):
            raise WorkloadError(
                "optimizer(params) has other parameters than `params`: build it from `params`, "
                "e.g. torch.optim.SGD(params, lr=0.1)"
            )
    return optimizer


def build(factory: Factory, layout: Layout) -> Optimizer:
    """Return the user's optimizer over placeholders, which have the parameters' shapes and take no memory.

    Raises:
        WorkloadError: the user's code failed, or did not return an optimizer.
    """
    stand_ins = [nn.Parameter(torch.zeros((), dtype=layout.dtype).expand(entry.shape)) for entry in layout.entries]
    optimizer = made(factory, NamedParameters(stand_ins, layout.names))
    optimizer.rayps_order = {id(p): i for i, p in enumerate(stand_ins)}  # type: ignore[attr-defined]
    return optimizer


def _retarget(optimizer: Optimizer, layout: Layout, pieces: list[Entry]) -> tuple[Optimizer, list[list[int]], Moments]:
    """Return the optimizer, the indices of each group's pieces, and the state that the optimizer's constructor created.

    The state is that of the pieces, by parameter name.
    """
    order: dict[int, int] = optimizer.rayps_order  # type: ignore[attr-defined]
    here = {piece.name: i for i, piece in enumerate(pieces)}
    members: list[list[int]] = []
    state: Moments = {}
    for group in optimizer.param_groups:
        group.pop("param_names", None)
        entries = [(stand_in, layout.entries[order[id(stand_in)]]) for stand_in in group["params"]]
        members.append([here[entry.name] for _, entry in entries if entry.name in here])
        for stand_in, entry in entries:
            if entry.name in here and stand_in in optimizer.state:  # Adagrad creates its state at once
                state[entry.name] = _cut_all(optimizer.state[stand_in], entry, pieces[here[entry.name]])
    return optimizer, members, state


def cut(moments: Moments, layout: Layout, lo: int, hi: int) -> Moments:
    """Cut the state of elements lo to hi out of the state of whole parameters. Tensors are copies."""
    whole = {entry.name: entry for entry in layout.entries}
    return {
        piece.name: _cut_all(moments[piece.name], whole[piece.name], piece)
        for piece in layout.pieces(lo, hi)
        if moments.get(piece.name)
    }


def _cut_all(state: ParamState, entry: Entry, piece: Entry) -> ParamState:
    return {key: _cut(value, entry, piece, counts=key in PER_PARAMETER) for key, value in state.items()}


def _cut(value: StateValue, entry: Entry, piece: Entry, *, counts: bool) -> StateValue:
    if not isinstance(value, Tensor):
        return value
    if tuple(value.shape) == entry.shape and not counts:  # the slice is a vector, also that of a scalar parameter
        return value.reshape(-1)[piece.lo - entry.lo : piece.hi - entry.lo].clone()
    return value.clone()


def _copy(value: StateValue, device: torch.device | str = "cpu") -> StateValue:
    return value.detach().to(device, copy=True) if isinstance(value, Tensor) else value


def copy_moments(optimizer: Optimizer, layout: Layout, params: list[nn.Parameter]) -> Moments:
    """Return an optimizer's state by parameter name, with the groups' `edits`. Tensors are copies on the CPU."""
    held: Moments = {
        entry.name: {key: _copy(value) for key, value in optimizer.state.get(p, {}).items()}
        for entry, p in zip(layout.entries, params, strict=True)
    }
    return with_edits(held, optimizer, layout, params)


def with_edits(held: Moments, optimizer: Optimizer, layout: Layout, params: list[nn.Parameter]) -> Moments:
    """Add the `edits` of each parameter's group to the parameters' states `held`; return the states."""
    edited = edits(optimizer)
    if any(edited):
        of = {id(p): edited[number] for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
        for entry, p in zip(layout.entries, params, strict=True):
            if of.get(id(p)):
                held[entry.name] = {**held[entry.name], EDITS: of[id(p)]}
    return held


def edits(optimizer: Optimizer) -> list[list[list[Json]]]:
    """Return, for each group, the values that changed since `made` created it.

    Each is [name, value at creation, value now], e.g. a rate that a step hook changes. A resume, a change of phase and
    a recovery restore these values.
    """
    known: list[JsonObject] = getattr(optimizer, "rayps_made", [])
    return [
        [[key, first, now] for key, now in select_plain_values(group).items() if (first := made.get(key)) != now]
        for made, group in zip(known, optimizer.param_groups, strict=False)
    ] + [[] for _ in optimizer.param_groups[len(known) :]]


def edit(group: Group, states: Iterable[ParamState]) -> None:
    """Change the values of a group by the `edits` in `states`, the states of the group's parameters.

    A value does not change if the workload's `optimizer` now creates it differently than when the edits were recorded.
    """
    found: list[tuple[str, Json, Json]] = next((state[EDITS] for state in states if EDITS in state), [])
    mine = select_plain_values(group)
    for key, first, now in found:
        if key not in group or mine.get(key) == first:
            value = tuple(now) if isinstance(now, list) else now
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)
            else:
                group[key] = value


def select_plain_values(group: Group) -> JsonObject:
    """Return those values of a group that JSON can represent, by name."""
    found: JsonObject = {}
    for key, value in group.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            found[key] = value.item()
        elif isinstance(value, (tuple, list)) and key != "params":
            if all(isinstance(each, (int, float)) for each in value):
                found[key] = list(value)
        elif isinstance(value, (int, float, str, bool, type(None))):
            found[key] = value
    return found


def load(optimizer: Optimizer, state: Moments, layout: Layout, params: list[nn.Parameter]) -> None:
    """Load a state by parameter name into an optimizer of whole parameters."""
    names = {id(p): entry.name for entry, p in zip(layout.entries, params, strict=True)}
    counted_there = set[int]()  # parameters whose group has its counts of steps on the device, by id
    for group in optimizer.param_groups:
        edit(group, (state.get(names[id(p)], {}) for p in group["params"] if id(p) in names))
        if group.get("fused") or group.get("capturable"):
            counted_there |= {id(p) for p in group["params"]}
    for entry, p in zip(layout.entries, params, strict=True):
        held = {key: value for key, value in state.get(entry.name, {}).items() if key != EDITS}
        if held:
            # the rule of torch.optim.Optimizer.load_state_dict
            count = p.device if id(p) in counted_there else "cpu"
            optimizer.state[p] = {k: _copy(v, count if k == "step" else p.device) for k, v in held.items()}


def join(parts: list[Moments], layout: Layout) -> Moments:
    """Join the states of consecutive slices of the vector to the state of whole parameters."""
    whole: Moments = {}
    for entry in layout.entries:
        held = [part[entry.name] for part in parts if part.get(entry.name)]
        if held:
            whole[entry.name] = {key: _join([piece[key] for piece in held], entry) for key in held[0] if key != EDITS}
            edited = [piece[EDITS] for piece in held if EDITS in piece]  # they may differ if shards are at other rounds
            whole[entry.name] |= {EDITS: edited[0]} if edited else {}
    return whole


def _join(values: list[_Value], entry: Entry) -> _Value | Tensor:
    first = values[0]
    tensors = [value for value in values if isinstance(value, Tensor)]
    if isinstance(first, Tensor) and first.dim() > 0 and sum(v.numel() for v in tensors) == entry.hi - entry.lo:
        return torch.cat([v.reshape(-1) for v in tensors]).reshape(entry.shape)
    return first


def check_step(optimizer: Optimizer, *, keeps_sparse: bool) -> None:
    """Check that an optimizer steps by one dense gradient. `keeps_sparse`: it may have sparse gradients only.

    Raises:
        WorkloadError: it does not. The error names optimizers to use instead.
    """
    name = type(optimizer).__name__
    _, *given = inspect.signature(type(optimizer).step).parameters.values()  # schedulers replace the object's own step
    needed = [
        p.name
        for p in given
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if needed:  # step() may evaluate a closure several times, but a round of several workers has one gradient
        raise WorkloadError(
            f"the step() of the optimizer {name} needs {', '.join(needed)}: under every strategy a round computes one "
            "gradient, and a closure could not compute another\n"
            "use an optimizer whose step() needs no closure, such as SGD, Adam or Adagrad"
        )
    if isinstance(optimizer, SparseAdam) and not keeps_sparse:
        raise WorkloadError(
            f"the optimizer {name} steps sparse gradients only, and those of nn.Embedding(sparse=True) become dense "
            "where gradients of workers are added\nuse torch.optim.Adam, or rayps.Embedding, whose rows are on servers"
        )


def check_elementwise(factory: Factory, layout: Layout) -> None:
    """Check that an optimizer's steps on flat slices equal its step on whole parameters.

    The trial uses small parameters: as many as those of the layout, each with the same number of dimensions.

    Raises:
        WorkloadError: the results differ. The error names optimizers and a strategy to use instead.
    """
    layout = _probe(layout)
    generator = torch.Generator().manual_seed(17)
    start = torch.randn(layout.size, generator=generator)
    grads = [torch.randn(layout.size, generator=generator) for _ in range(3)]
    name = type(build(factory, layout)).__name__
    widest = max(layout.entries, key=lambda entry: (len(entry.shape) > 1, entry.hi - entry.lo))
    cut = widest.lo + (widest.hi - widest.lo) // 3  # a cut within a parameter, and within a row of the parameter
    try:
        whole = _step_whole(factory, layout, start, grads)
        bounds = ((0, cut), (cut, layout.size))
        sliced = torch.cat([_step_slice(factory, layout, start, grads, lo, hi) for lo, hi in bounds])
        same = torch.equal(whole, sliced)
    except Exception as error:  # the user's optimizer may raise anything
        raise WorkloadError(
            f"{name} cannot step flat slices, as servers and sharded state require: "
            f"{str(error).partition(chr(10))[0]}\n"
            "use an elementwise optimizer such as SGD, Adam or Adagrad, or the strategy all_reduce without shard"
        ) from error
    if not same:
        raise WorkloadError(
            f"{name} is not elementwise: its steps on slices of the parameters differ from its step on the whole.\n"
            "use an elementwise optimizer such as SGD, Adam or Adagrad, or the strategy all_reduce without shard"
        )


def _probe(layout: Layout) -> Layout:
    return Layout.of((e.name, torch.empty([min(extent, 5) for extent in e.shape])) for e in layout.entries)


def _step_whole(factory: Factory, layout: Layout, start: Tensor, grads: list[Tensor]) -> Tensor:
    vector = start.clone()
    params = [nn.Parameter(vector[e.lo : e.hi].view(e.shape)) for e in layout.entries]
    optimizer = factory(NamedParameters(params, layout.names))
    for grad in grads:
        for p, e in zip(params, layout.entries, strict=True):
            p.grad = grad[e.lo : e.hi].view(e.shape).clone()
        optimizer.step()
    return vector


def _step_slice(factory: Factory, layout: Layout, start: Tensor, grads: list[Tensor], lo: int, hi: int) -> Tensor:
    sliced = SlicedOptimizer(factory, layout, start[lo:hi].clone(), lo, hi)
    for grad in grads:
        sliced.step(grad[lo:hi].clone())
    return sliced.params


def ignores_scale(factory: Factory, layout: Layout) -> bool:
    """Return whether an optimizer's first step hardly depends on the gradient's scale, as with Adam.

    With such an optimizer, a push scaled by 1/N changes the parameters as much as an unscaled push.
    """
    layout = _probe(layout)
    grad = torch.randn(layout.size, generator=torch.Generator().manual_seed(17))
    moved: list[float] = []
    for scale in (1.0, 0.25):
        sliced = SlicedOptimizer(factory, layout, torch.zeros(layout.size), 0, layout.size)
        sliced.step(grad * scale)
        moved.append(sliced.params.norm().item())
    return moved[0] > 0 and moved[1] / moved[0] > 0.5


def decays_alone(factory: Factory, layout: Layout) -> bool:
    """Return whether weight decay must not be scaled in a step that counts as a fraction of a step, or as several.

    True if the decay is decoupled and the step ignores the gradient's scale, as in AdamW (Loshchilov, Hutter,
    "Decoupled Weight Decay Regularization", ICLR 2019). Each push is then a full step of the optimizer, and must apply
    the full decay too. False if the decay is a part of the gradient (SGD, Adagrad, Adam), or if the step is
    proportional to the gradient.
    """
    groups = build(factory, layout).param_groups
    if any("decoupled_weight_decay" in group for group in groups):  # torch's own optimizers declare it
        return all(group.get("decoupled_weight_decay", False) for group in groups)
    if not ignores_scale(factory, layout):
        return False
    layout = _probe(layout)
    moved: list[float] = []
    for scale in (1.0, 0.25):
        sliced = SlicedOptimizer(factory, layout, torch.ones(layout.size), 0, layout.size)
        for group in sliced.optimizer.param_groups:
            group["weight_decay"] = 0.1 * scale
        sliced.step(torch.zeros(layout.size))
        moved.append((sliced.params - 1).norm().item())
    return moved[0] > 0 and moved[1] / moved[0] < 0.5


def select_fitting(moments: Moments, optimizer: Optimizer) -> Moments:
    """Return the part of a state that an optimizer can use. Only Adagrad can use Adagrad's state, and no other."""
    mine = isinstance(optimizer, Adagrad)
    return {name: held for name, held in moments.items() if (held.keys() - {EDITS} == {"step", "sum"}) == mine}


def split_moments(moments: Moments) -> tuple[dict[str, Tensor], dict[str, ParamState]]:
    """Split an optimizer's state into tensors by name and numbers by parameter. No tensor is copied."""
    tensors, numbers = dict[str, Tensor](), dict[str, ParamState]()
    for name, state in moments.items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"{_STATE}{name}/{key}"] = value
            else:
                numbers.setdefault(name, {})[key] = value
    return tensors, numbers


def moments_of(tensors: Mapping[str, Tensor], numbers: Mapping[str, ParamState]) -> Moments:
    """Rebuild the state that `split_moments` split; `tensors` may contain other tensors too."""
    found: Moments = {name: dict(values) for name, values in numbers.items()}
    for name, tensor in tensors.items():
        if name.startswith(_STATE):
            parameter, _, key = name.removeprefix(_STATE).rpartition("/")
            found.setdefault(parameter, {})[key] = tensor
    return found

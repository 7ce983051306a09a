"""Initial parameters without memory for the whole model: `model()` is recorded, and replayed for one tensor at a time.

The user's `model()` runs on the meta device. Each operation that writes into a tensor is recorded with what it reads.
Tensors are told apart by their storage, so that views and tied weights need no special case. To make a tensor, the
operations that it depends on run on the CPU, in their order. The idea is that of `torchdistx.deferred_init`.

Random operations draw from a generator of their own for each tensor that they write into, seeded by the job's seed and
the tensor's name. Therefore every process makes the same values, whichever tensors it makes. They are other values
than those of `torch.manual_seed(seed)` and `model()`, of the same distribution. Memory of `torch.empty` that nothing
fills is 0.
"""

from __future__ import annotations

import hashlib
import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from rayps_client.errors import WorkloadError
from rayps_client.values import Keywords
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from rayps.core.strategy.costs import format_bytes
from rayps.workload.base import Workload
from rayps.workload.model import model_of

_REPLACING = threading.RLock()  # held while a function of torch is replaced
MOST_DATA = 64 << 20  # the most bytes of data, as opposed to random numbers and formulas, in a recorded model
_TOO_MUCH = (
    f"it makes tensors from more than {format_bytes(MOST_DATA)} of data, such as of files, which every process would "
    "hold as "
    "a whole"
)
_META, _CPU = torch.device("meta"), torch.device("cpu")
_START_FROM = (
    "if model() loads weights from files, build the model without them, such as from its configuration, and give the "
    "files as start_from="
)
_FROM_DATA = (torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy, torch.Tensor.new_tensor)
_READS = (torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)
# what a recorded tensor says about itself: libraries leave tensors on the meta device uninitialized
_SAID = {
    getattr(torch.Tensor, name).__get__: said for name, said in (("device", _CPU), ("is_meta", False), ("is_cpu", True))
}
_UNFILLED = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted")
_LIKE = {"rand_like": "uniform_", "randn_like": "normal_"}  # random operations that take no generator
# operations that change arguments which their schemas do not mark: the positions of these arguments
_UNMARKED = {"native_batch_norm": (3, 4), "cudnn_batch_norm": (3, 4), "miopen_batch_norm": (3, 4)}
_DEPENDENT = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)

Operation: TypeAlias = Any  # an operation of torch's dispatcher, with its schema and tags
Tree: TypeAlias = Any  # arguments of an operation: tensors, numbers, and lists of these


@dataclass(frozen=True, slots=True)
class _StorageView:
    """A tensor on the meta device, by its storage: the number of the storage, and where the tensor is in it."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, memory: torch.UntypedStorage) -> Tensor:
        """Return this tensor in `memory`, which holds the storage's values."""
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        return empty.set_(memory, self.offset, self.size, self.stride)


@dataclass(slots=True)
class _Recorded:
    """One recorded operation. Tensors in `args` and `kwargs` are views; `made` are the new ones of its result."""

    run: Operation
    args: Tree
    kwargs: Keywords
    reads: set[int]  # storages
    writes: set[int]
    made: dict[int, _StorageView]  # by position in the flat result
    draws: int | None = None  # the storage into which a random operation without a generator draws
    state: Tensor | None = None  # the state of the generator that the user gave


@dataclass(slots=True)
class _GivenData:
    """A storage whose values were given as data."""

    value: Tensor
    view: _StorageView
    reads: set[int] = field(default_factory=set)
    draws: int | None = None

    @property
    def writes(self) -> set[int]:
        """The storage with these values."""
        return {self.view.storage}


class _Recording:
    """What was recorded, and the replay."""

    def __init__(self, seed: int) -> None:
        self._seed, self.is_paused = seed, False
        self.data_bytes = 0  # of tensors that were given as data
        self._steps: list[_Recorded | _GivenData] = []
        self._writers: dict[int, list[int]] = defaultdict(list)  # from a storage to the steps that write into it
        self._storages: list[torch.UntypedStorage] = []  # keeps them alive, so that no identity is used again
        self._numbers: dict[int, int] = {}  # from the identity of a storage to its number
        self.names: dict[int, str] = {}  # from the number of a storage to the first name of a tensor in it

    # ---- recording

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing inside the block."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def number(self, t: Tensor) -> int:
        """Return the number of a tensor's storage."""
        storage = t.untyped_storage()
        if id(storage) not in self._numbers:
            self._numbers[id(storage)] = len(self._storages)
            self._storages.append(storage)
        return self._numbers[id(storage)]

    def view(self, t: Tensor) -> _StorageView:
        """Return a tensor as it is now."""
        return _StorageView(self.number(t), t.dtype, tuple(t.size()), tuple(t.stride()), int(t.storage_offset()))

    def add(self, step: _Recorded | _GivenData) -> None:
        """Append a step."""
        for storage in step.writes:
            self._writers[storage].append(len(self._steps))
        self._steps.append(step)

    def constant(self, value: Tensor) -> Tensor:
        """Record data, and return a tensor on the meta device that stands for it."""
        value = value.detach()
        self.data_bytes += value.nbytes
        if self.data_bytes > MOST_DATA:
            raise _refusal(_TOO_MUCH)
        found = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=_META)
        self.add(_GivenData(value.clone(), self.view(found)))
        return found

    # ---- replay

    def slice_of(self, storage: int) -> list[int]:
        """Return the steps, in order, on which the present values of a storage depend."""
        found: set[int] = set()
        bounds: dict[int, int] = {}  # from a storage to the step before which its writers are in `found`
        wanted = [(storage, len(self._steps))]
        while wanted:
            each, before = wanted.pop()
            known = bounds.get(each, 0)
            if before <= known:
                continue
            bounds[each] = before
            writers = self._writers[each]
            for at in writers[bisect_left(writers, known) : bisect_left(writers, before)]:
                found.add(at)
                step = self._steps[at]
                wanted += [(read, at) for read in step.reads]
                wanted += [(other, at) for other in step.writes if other != each]
        return sorted(found)

    def random(self, storage: int) -> bool:
        """Return whether the values of a storage depend on random numbers of the job."""
        return any(self._steps[at].draws is not None for at in self.slice_of(storage))

    def check(self, storage: int, name: str) -> None:
        """Raise WorkloadError if the storage of tensor `name` depends on a random operation without a generator."""
        for at in self.slice_of(storage):
            step = self._steps[at]
            if isinstance(step, _Recorded) and step.draws is not None and _seedable(step.run) is None:
                raise _refusal(f"tensor {name!r} depends on {_name(step.run)}, which takes no generator")

    def values(self, view: _StorageView) -> Tensor:
        """Return a tensor's values, by a replay. The result is a view of new memory on the CPU."""
        steps = self.slice_of(view.storage)
        last = {each: at for at in steps for each in (*self._steps[at].reads, *self._steps[at].writes)}
        memory: dict[int, torch.UntypedStorage] = {}
        generators: dict[int, torch.Generator] = {}
        for at in steps:
            step = self._steps[at]
            if isinstance(step, _GivenData):
                memory[step.view.storage] = step.value.clone().untyped_storage()
            else:
                self._run(step, memory, generators)
            for each in (*step.reads, *step.writes):
                if last[each] == at and each != view.storage:
                    memory.pop(each, None)
        return view.of(memory[view.storage])

    def _run(
        self, step: _Recorded, memory: dict[int, torch.UntypedStorage], generators: dict[int, torch.Generator]
    ) -> None:
        args, kwargs = tree_map(lambda each: _in(memory, each), (step.args, step.kwargs), is_leaf=_is_view)
        if step.kwargs.get("device") is not None:
            kwargs["device"] = _CPU
        run = step.run
        if step.state is not None:
            kwargs["generator"] = torch.Generator(_CPU)
            kwargs["generator"].set_state(step.state)
        elif step.draws is not None:
            if step.draws not in generators:
                generators[step.draws] = self._generator(step.draws)
            run, kwargs["generator"] = _seedable(step.run), generators[step.draws]
        flat = tree_flatten(run(*args, **kwargs))[0]
        for position, view in step.made.items():
            made: Tensor = flat[position]
            if _name(step.run) in _UNFILLED:
                made.zero_()
            same = tuple(made.stride()) == view.stride and made.storage_offset() == view.offset
            if not same or made.dtype != view.dtype:  # the kernel of the CPU has another layout than that of meta
                laid = torch.empty_strided(view.size, view.stride, dtype=view.dtype, device=_CPU)
                made = laid.copy_(made)
            memory[view.storage] = made.untyped_storage()

    def _generator(self, storage: int) -> torch.Generator:
        return seeded(self._seed, self.names.get(storage, f"#{storage}"))


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operations on the meta device, and records those that write."""

    def __init__(self, trace: _Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = trace

    def __torch_dispatch__(
        self, func: Operation, types: Sequence[type], args: Tree = (), kwargs: Keywords | None = None
    ) -> Tree:
        if self.trace.is_paused:
            return func(*args, **(kwargs or {}))
        with self.trace.paused():
            return self._record(func, args, dict(kwargs or {}))

    def _record(self, func: Operation, args: Tree, kwargs: Keywords) -> Tree:
        names = [each.name for each in func._schema.arguments]
        tensors = _tensors_in((args, kwargs))
        if "device" in names and (kwargs.get("device") is not None or not tensors):
            kwargs["device"] = _META
        kwargs.pop("pin_memory", None)
        if any(tag in func.tags for tag in _DEPENDENT) or _name(func) == "_local_scalar_dense":
            return self._from_values(func, args, kwargs)
        args, kwargs = tree_map(self._on_meta, (args, kwargs))
        tensors = _tensors_in((args, kwargs))
        before = {id(t.untyped_storage()) for t in tensors}
        written = [self.trace.number(t) for t in _written(func, args, kwargs)]
        reads = {self.trace.number(t) for t in tensors}
        tree = tree_map(lambda each: self.trace.view(each) if isinstance(each, Tensor) else each, (args, kwargs))
        generator = tree[1].pop("generator", None)
        state = None
        if generator is not None:
            state = generator.get_state()
            _on_zeros(func, args, kwargs)  # so that the generator moves on
            kwargs["generator"] = None
        try:
            found = func(*args, **kwargs)
        except NotImplementedError as error:  # not passed on: libraries catch it, and initialize in another way
            if written:
                raise _refusal(f"the operation {_name(func)} has no kernel for the meta device") from error
            found = _shaped(func, args, kwargs)
        made = {
            at: self.trace.view(t)
            for at, t in enumerate(tree_flatten(found)[0])
            if isinstance(t, Tensor) and id(t.untyped_storage()) not in before
        }
        writes = {*written, *(view.storage for view in made.values())}
        if writes:
            step = _Recorded(func, tree[0], tree[1], reads, writes, made, state=state)
            if state is None and torch.Tag.nondeterministic_seeded in func.tags:
                step.draws = min(writes)
            self.trace.add(step)
        return found

    def _on_meta(self, each: Any) -> Any:
        """Return a tensor that has memory as one that stands for it; everything else unchanged."""
        if not isinstance(each, Tensor) or each.is_meta:
            return each
        return self.trace.constant(each)

    def _from_values(self, func: Operation, args: Tree, kwargs: Keywords) -> Tree:
        args, kwargs = tree_map(lambda each: read(self.trace, each, _name(func)), (args, kwargs))
        if "device" in kwargs:
            kwargs["device"] = _CPU
        found = func(*args, **kwargs)
        return tree_map(lambda each: self.trace.constant(each) if isinstance(each, Tensor) else each, found)


class _DataCalls(TorchFunctionMode):
    """Records tensors that are made from data, and gives values to what reads them."""

    def __init__(self, trace: _Recording) -> None:
        super().__init__()
        self.trace = trace

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Tree = (), kwargs: Keywords | None = None
    ) -> Tree:
        kwargs = dict(kwargs or {})
        if self.trace.is_paused:
            return func(*args, **kwargs)
        if func in _SAID:
            return _SAID[func]
        tensors = _tensors_in((args, kwargs))
        if func in _READS:
            with self.trace.paused():
                return func(*tree_map(lambda each: read(self.trace, each, func.__name__), args), **kwargs)
        data = args[1:] if func is torch.Tensor.new_tensor else args
        if func in _FROM_DATA and not _tensors_in((data, kwargs)):
            return self._from_data(func, data, kwargs, tensors)
        return func(*args, **kwargs)

    def _from_data(self, func: Callable[..., Any], data: Tree, kwargs: Keywords, like: Sequence[Tensor]) -> Tensor:
        kwargs.pop("pin_memory", None)
        if func is torch.Tensor.new_tensor:
            func, kwargs = torch.tensor, {"dtype": like[0].dtype, **kwargs}
        if func is not torch.from_numpy:
            kwargs["device"] = _CPU
        with self.trace.paused():
            made: Tensor = func(*data, **kwargs)
            return self.trace.constant(made).requires_grad_(made.requires_grad)


def read(trace: _Recording, given: Any, what: str) -> Any:
    """Return a tensor's values, and everything else unchanged. Raise WorkloadError if the values are random."""
    if not isinstance(given, Tensor) or not given.is_meta:
        return given
    view = trace.view(given)
    if trace.random(view.storage):
        shown = "a value of a tensor (.item(), float(), `if`)" if what == "_local_scalar_dense" else what
        raise _refusal(f"{shown} is read, and depends on values that are drawn at random")
    return trace.values(view)


@contextmanager
def _whole_calls(trace: _Recording) -> Iterator[None]:
    """Inside the block, record a call of `nn.init.trunc_normal_` as one operation, because it looks at what it draws.

    torch's function is replaced for all threads, and the replacement passes the calls of other threads on.
    """
    with _REPLACING:
        draw, thread = nn.init._no_grad_trunc_normal_, threading.get_ident()

        def trunc_normal_(
            tensor: Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
        ) -> Tensor:
            if threading.get_ident() != thread or trace.is_paused:
                return draw(tensor, mean, std, a, b, generator)
            with trace.paused():
                number, state = trace.number(tensor), None
                args = (trace.view(tensor), mean, std, a, b)
                if generator is not None:
                    state = generator.get_state()
                    draw(torch.zeros_like(tensor, device=_CPU), *args[1:], generator)
                draws = number if generator is None else None
                trace.add(_Recorded(draw, args, {}, {number}, {number}, {}, draws=draws, state=state))
            return tensor

        nn.init._no_grad_trunc_normal_ = trunc_normal_
        try:
            yield
        finally:
            nn.init._no_grad_trunc_normal_ = draw


class DeferredModel:
    """A model on the meta device, `module`, whose initial tensors are made one at a time.

    Example:
        model = deferred(workload, seed=0)
        model.materialize("layers.0.weight")     # the whole tensor
        model.piece("layers.0.weight", 0, 100)   # its first 100 elements
    """

    def __init__(self, module: nn.Module, trace: _Recording) -> None:
        self.module, self._trace = module, trace
        self._views: dict[str, _StorageView | Tensor] = {}
        for name, value in named_tensors(module):
            self._views[name] = trace.view(value) if value.is_meta else value.detach()
            if value.is_meta:
                trace.names.setdefault(trace.number(value), name)
        given = {id(value): value.nbytes for _, value in named_tensors(module) if not value.is_meta}
        if trace.data_bytes + sum(given.values()) > MOST_DATA:
            raise _refusal(_TOO_MUCH)
        for name, view in self._views.items():
            if isinstance(view, _StorageView):
                trace.check(view.storage, name)

    @property
    def names(self) -> list[str]:
        """The names of all parameters and buffers. A tied tensor has each of its names."""
        return list(self._views)

    def materialize(self, name: str, device: str | torch.device = "cpu") -> Tensor:
        """Return the initial values of the parameter or buffer `name`, as a new tensor without a gradient.

        They are computed on the CPU, so that they do not depend on `device`.

        Raises:
            WorkloadError: the model has no such tensor.
        """
        view = self._views.get(name)
        if view is None:
            raise WorkloadError(f"the model has no parameter or buffer {name!r}", parameter=name)
        if isinstance(view, Tensor):
            return view.clone().to(device)
        made = self._trace.values(view)
        return made.to(device) if made.untyped_storage().nbytes() == made.nbytes else made.clone().to(device)

    def piece(self, name: str, lo: int, hi: int, device: str | torch.device = "cpu") -> Tensor:
        """Return elements lo to hi of a tensor, flat and in row-major order. The whole tensor is drawn and dropped.

        Raises:
            WorkloadError: the model has no such tensor.
        """
        return self.materialize(name).reshape(-1)[lo:hi].clone().to(device)

    def copy_piece(self, name: str, lo: int, into: Tensor) -> None:
        """Write the elements of a tensor from element lo on into the flat tensor `into`: see `piece`.

        If the memory of all pieces is allocated before, that of the drawn tensors is used again for the next ones, and
        the most that is used is all pieces and the largest tensor.
        """
        into.copy_(self.materialize(name).reshape(-1)[lo : lo + into.numel()])

    def fill(self, module: nn.Module) -> None:
        """Copy the initial values into all tensors of `module` that have memory, and have the names of the model's.

        `module` has the tensors of the model or a part of them, each as a whole. Its attributes that are neither
        parameters nor buffers are replaced, if they are tensors of the recorded model.

        Raises:
            WorkloadError: a tensor has another shape than in the model, or a name that the model lacks.
        """
        done: set[int] = set()
        for name, value in named_tensors(module):
            if value.is_meta or id(value) in done:
                continue
            done.add(id(value))
            made = self.materialize(name)
            if made.shape != value.shape:
                raise WorkloadError(
                    f"tensor {name!r} has shape {tuple(value.shape)} here and {tuple(made.shape)} in model(): only "
                    "whole tensors can be filled",
                    parameter=name,
                )
            with torch.no_grad():
                value.copy_(made)
        self.fill_attributes(module)

    def fill_attributes(self, module: nn.Module, device: str | torch.device = "cpu") -> None:
        """Give memory and values to tensors that are plain attributes of modules, neither parameters nor buffers."""
        for owner in module.modules():
            for key, value in attributes_of(owner):
                vars(owner)[key] = self._trace.values(self._trace.view(value)).clone().to(device)


def deferred(workload: Workload, seed: int) -> DeferredModel:
    """Return the model of a workload, recorded on the meta device. No memory is allocated for its tensors.

    Raises:
        WorkloadError: `model()` fails, or it needs the values of random tensors or an operation that cannot be
            recorded. The text says which, and what to do.
    """
    trace = _Recording(seed)
    try:
        with _whole_calls(trace), _Operations(trace), torch.device("meta"), _DataCalls(trace):
            module = model_of(workload)
    except WorkloadError as error:
        if error.data.get("recorded") is False:
            raise
        raise WorkloadError(
            f"{error.message}\nhere model() runs without memory, on the meta device: {_START_FROM}", **error.data
        ) from error
    for name, owner in module.named_modules():
        for key, value in _hidden(owner):
            raise _refusal(f"module {name!r} has a tensor {list(value.shape)} inside its attribute {key!r}")
    return DeferredModel(module, trace)


def seeded(seed: int, name: str) -> torch.Generator:
    """Return the generator of the tensor `name` in a job with this seed."""
    words = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(words, "little", signed=True))


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of a module with each of their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def attributes_of(owner: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the tensors on the meta device that are plain attributes of one module, by name."""
    return [(key, value) for key, value in vars(owner).items() if isinstance(value, Tensor) and value.is_meta]


def _hidden(owner: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors on the meta device in lists and dicts of a module, except parameters, which are registered too."""
    for key, value in vars(owner).items():
        if key in ("_parameters", "_buffers", "_modules") or isinstance(value, Tensor):
            continue
        for each in tree_flatten(value)[0] if isinstance(value, (list, tuple, dict)) else ():
            if isinstance(each, Tensor) and each.is_meta and not isinstance(each, nn.Parameter):
                yield key, each


def _refusal(what: str) -> WorkloadError:
    return WorkloadError(
        f"model() cannot be recorded: {what}\nregister tensors as parameters or buffers, and initialize them without "
        f"looking at drawn values; {_START_FROM}",
        recorded=False,
    )


def _name(func: Operation) -> str:
    return str(func.overloadpacket.__name__) if isinstance(func, OpOverload) else str(func.__name__)


def _is_view(each: Any) -> bool:
    return isinstance(each, _StorageView)


def _in(memory: Mapping[int, torch.UntypedStorage], each: Any) -> Any:
    if isinstance(each, _StorageView):
        return each.of(memory[each.storage])
    return _CPU if each == _META else each


def _tensors_in(tree: Tree) -> list[Tensor]:
    return [each for each in tree_flatten(tree)[0] if isinstance(each, Tensor)]


def _written(func: Operation, args: Tree, kwargs: Keywords) -> list[Tensor]:
    """Return the tensors that an operation changes."""
    unmarked = _UNMARKED.get(_name(func), ())
    found: list[Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        marked = argument.alias_info is not None and argument.alias_info.is_write
        if marked or position in unmarked:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            found += _tensors_in(given)
    return found


def _seedable(func: Operation) -> Callable[..., Any] | None:
    """Return an operation that does the same with the keyword `generator`, or None if there is none."""
    if not isinstance(func, OpOverload):  # a function that was recorded as a whole
        whole: Callable[..., Any] = func
        return whole
    packet = func.overloadpacket
    if any(each.name == "generator" for each in func._schema.arguments):
        found: Callable[..., Any] = func
        return found
    overload = func._overloadname
    for name in ("generator" if overload == "default" else f"{overload}_generator", f"{overload}_with_generator"):
        if name in packet.overloads():
            other: Callable[..., Any] = getattr(packet, name)
            return other
    fill = _LIKE.get(_name(func))
    if fill is None:
        return None

    def like(t: Tensor, *, generator: torch.Generator, **options: Any) -> Tensor:
        drawn: Tensor = getattr(torch.empty_like(t, **options), fill)(generator=generator)
        return drawn

    return like


def _shaped(func: Operation, args: Tree, kwargs: Keywords) -> Tree:
    """Return tensors on the meta device like the results of an operation that has no kernel there.

    It is run on zeros. Raises WorkloadError if it fails.
    """
    try:
        found = _on_zeros(func, args, kwargs)
    except RuntimeError as error:
        raise _refusal(f"the operation {_name(func)} has no kernel for the meta device") from error

    def like(each: Any) -> Any:
        if not isinstance(each, Tensor):
            return each
        return torch.empty_strided(each.size(), each.stride(), dtype=each.dtype, device=_META)

    return tree_map(like, found)


def _on_zeros(func: Operation, args: Tree, kwargs: Keywords) -> Tree:
    """Return the result of an operation on zeros instead of its tensors."""
    args, kwargs = tree_map(
        lambda each: torch.zeros_like(each, device=_CPU) if isinstance(each, Tensor) else each, (args, kwargs)
    )
    if "device" in kwargs:
        kwargs["device"] = _CPU
    return func(*args, **kwargs)

"""Cut a model into layers, and the layers into parts.

A model can be cut if it is a chain of layers, each called on the output of the previous layer: an nn.Sequential (nested
ones are flattened), or a model whose method `layers()` lists its layers. A model with a list of blocks that its forward
calls in turn, such as a Hugging Face decoder, is cut by `rayps.parallel.pipeline.decoder_stack`.
"""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from statistics import median
from typing import NamedTuple

import torch
from rayps_client.errors import ConfigError, WorkloadError
from rayps_client.trainers.module_modes import evaluating
from torch import Tensor, nn

from rayps.core.job.user_code import user_code
from rayps.data.base import Nested, map_tensors
from rayps.parallel.pipeline.decoder_stack import StackLayer, stack_layers
from rayps.parallel.pipeline.skip import skip_layers, stash_in

_REMEDY = (
    "make it an nn.Sequential, or give it a method layers() that returns its modules in order, each of which is called "
    "on the output of the previous one, or keep its blocks in one nn.ModuleList that forward calls in turn"
)
_REPEATS = 3


class Layer(NamedTuple):
    """A layer, and its name in the model."""

    name: str
    module: nn.Module


def layers(model: nn.Module) -> list[Layer]:
    """Return the layers of a model, in order.

    Raises:
        WorkloadError: the model cannot be cut, or its skip connections are inconsistent.
    """
    listed = getattr(model, "layers", None)
    if inspect.ismethod(listed):
        found = _declared_layers(model, listed)
    elif _is_plain(model):
        found = list(_flattened(model, ""))
    elif stack := stack_layers(model):
        found = [Layer(name, module) for name, module in stack]
    else:
        own = " and has a forward() of its own" if isinstance(model, nn.Sequential) else ""
        raise WorkloadError(f"a pipeline cannot cut {_kind(model)}{own}: {_REMEDY}", model=_kind(model))
    if not found:
        raise WorkloadError(f"a pipeline cannot cut {_kind(model)}: it has no layers", model=_kind(model))
    skip_layers([layer.module for layer in found])
    return found


def _declared_layers(model: nn.Module, method: Callable[[], Sequence[nn.Module]]) -> list[Layer]:
    with user_code("model.layers"):
        given = method()
    names = {id(module): name for name, module in model.named_modules()}
    if not isinstance(given, (list, tuple, nn.ModuleList)) or not all(isinstance(m, nn.Module) for m in given):
        raise WorkloadError(f"layers() of {_kind(model)} must return a list of modules", model=_kind(model))
    foreign = [i for i, module in enumerate(given) if id(module) not in names]
    if foreign:
        raise WorkloadError(
            f"layers() of {_kind(model)} returns a {_kind(given[foreign[0]])} as number {foreign[0]}, not a part of "
            "the model: make that module an attribute of the model in __init__",
            model=_kind(model),
        )
    return [part for module in given for part in _flattened(module, names[id(module)])]


def _flattened(module: nn.Module, name: str) -> list[Layer]:
    if not _is_plain(module):
        return [Layer(name, module)]
    return [
        part
        for key, child in module._modules.items()
        if child is not None
        for part in _flattened(child, f"{name}.{key}" if name else key)
    ]


def _is_plain(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _kind(module: nn.Module) -> str:
    return type(module).__name__


# ---------------------------------------------------------------------------------------------- into parts


def spans(boundaries: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Return, for each part of a model of `count` layers, its first layer and its last + 1.

    Raises:
        ConfigError: `boundaries` are not increasing, or not between 1 and `count` - 1.
    """
    at = [0, *boundaries, count]
    if any(low >= high for low, high in pairwise(at)):
        raise ConfigError(
            f"boundaries is {tuple(boundaries)}: give increasing numbers from 1 to {count - 1} for a model of "
            f"{count} layers; each is the number of the layer with which a new part begins",
            field="boundaries",
        )
    return list(pairwise(at))


def shares(costs: Sequence[float], parts: int) -> tuple[int, ...]:
    """Cut layers into `parts` contiguous, nonempty parts so that the cost of the most expensive part is minimal.

    `costs` has one number for each layer. Return the boundaries: the first layer of each part except the first. Of
    several such cuts, return the one with the least sum of squared costs, which makes the other parts similar too.

    Raises:
        ConfigError: there are more parts than layers.
    """
    n = len(costs)
    if not 1 <= parts <= n:
        raise ConfigError(
            f"the model has {n} layer{'s' if n != 1 else ''} and cannot be cut into {parts} parts (stages x chunks): "
            f"give at most {n} parts, or a model of more layers",
            field="stages",
            layers=n,
            parts=parts,
        )
    sums = list(accumulate(costs, initial=0.0))
    # best[k]: the least (largest cost, sum of squares) of the first k layers in j parts; began[k]: its last boundary
    best: list[tuple[float, float]] = [(sums[k], sums[k] ** 2) for k in range(n + 1)]
    begins: list[list[int]] = []
    for j in range(2, parts + 1):
        now, began = [(float("inf"), float("inf"))] * (n + 1), [0] * (n + 1)
        for k in range(j, n + 1):
            for i in range(k - 1, j - 2, -1):
                last = sums[k] - sums[i]
                if last > now[k][0]:
                    break
                found = (max(best[i][0], last), best[i][1] + last**2)
                if found < now[k]:
                    now[k], began[k] = found, i
        best = now
        begins.append(began)
    cuts, end = [], n
    for began in reversed(begins):
        end = began[end]
        cuts.append(end)
    return tuple(reversed(cuts))


# ---------------------------------------------------------------------------------------------- on a sample


def measure(found: Sequence[Layer], args: Sequence[Nested], kwargs: Mapping[str, Nested] | None = None) -> list[float]:
    """Return, for each layer, the median seconds of a forward and a backward pass together.

    `args` and `kwargs` are arguments of the model for a few samples.

    Raises:
        WorkloadError: a layer fails on the output of the previous layer.
    """
    seconds: list[list[float]] = [[] for _ in found]
    state = torch.get_rng_state()
    with stash_in({}):
        for _ in range(_REPEATS):
            value: Nested = None
            for number, layer in enumerate(found):
                value, stashed = _leaves(value), None
                start = time.perf_counter()
                with user_code(f"layer {layer.name}"):
                    value = layer.module(*args, **(kwargs or {})) if number == 0 else layer.module(value)
                    stashed = [t for t in _tensors(value) if t.requires_grad]
                    if stashed:
                        torch.autograd.backward(stashed, [torch.ones_like(t) for t in stashed], retain_graph=True)
                seconds[number].append(time.perf_counter() - start)
                for p in layer.module.parameters():
                    p.grad = None
    torch.set_rng_state(state)
    return [median(each) for each in seconds]


def check(
    model: nn.Module, found: Sequence[Layer], args: Sequence[Nested], kwargs: Mapping[str, Nested] | None = None
) -> None:
    """Check that copies of the layers, called one after another, return what the model returns.

    `args` and `kwargs` are arguments of the model for a few samples.

    Raises:
        WorkloadError: a cut would change the model's result, e.g. because of a skip connection or an attribute that two
        layers share. The error names the first such layer.
    """
    state = torch.get_rng_state()
    try:
        with evaluating(model), torch.no_grad(), stash_in({}):
            if isinstance(found[0].module, StackLayer):
                _compare_stack(model, found, args, kwargs or {})
            else:
                _compare(model, found, args, kwargs or {})
    finally:
        torch.set_rng_state(state)


def _compare(model: nn.Module, found: Sequence[Layer], args: Sequence[Nested], kwargs: Mapping[str, Nested]) -> None:
    # copy the layers before the model runs, because the run may change them
    apart = [copy.deepcopy(layer.module) for layer in found]
    whole, calls = _run_recorded(model, found, args, kwargs)
    order = [number for number, _ in calls]
    modules = [layer.module for layer in found]
    for number, layer in enumerate(found):
        same = next(i for i, module in enumerate(modules) if module is layer.module)
        times, listed = order.count(same), sum(module is layer.module for module in modules)
        if times != listed:
            raise _cut_error(layer.name, f"the model calls it {times} times, but it is among the layers {listed} times")
        if order[number] != same:
            raise _cut_error(layer.name, f"the model calls {found[order[number]].name!r} in its place")
    value: Nested = None
    for number, layer in enumerate(found):
        given = calls[number][1]
        if number and not _equal(given, value):
            before = found[number - 1].name
            raise _cut_error(layer.name, f"the model does not call it on the output of the previous layer, {before!r}")
        alone = apart[number]
        try:
            value = alone(*args, **kwargs) if number == 0 else alone(value)
        except Exception as error:  # the user's code may raise anything
            raise _cut_error(
                layer.name, f"called apart from the other layers, it raises {type(error).__name__}: {error}"
            ) from error
    if not _equal(whole, value):
        last = found[-1].name
        raise _cut_error(last, "the model's result is not the output of its last layer")


def _compare_stack(
    model: nn.Module, found: Sequence[Layer], args: Sequence[Nested], kwargs: Mapping[str, Nested]
) -> None:
    """Check that front, blocks and head of a decoder stack, one after another, return the model's result."""
    with user_code("model"):
        whole = model(*args, **kwargs)
    value: Nested = None
    for number, layer in enumerate(found):
        try:
            value = layer.module(*args, **kwargs) if number == 0 else layer.module(value)
        except WorkloadError:
            raise
        except Exception as error:  # the user's code may raise anything
            raise _cut_error(
                layer.name, f"called apart from the other layers, it raises {type(error).__name__}: {error}"
            ) from error
    if not _equal(_without_cached(whole), _without_cached(value)):
        raise _cut_error("head", "the result of front, blocks and head is not the model's")


def _without_cached(output: Nested) -> Nested:
    """Return a model's output without its cache of keys and values, which is not computed in a pipeline."""
    return {k: v for k, v in output.items() if k != "past_key_values"} if isinstance(output, dict) else output


def _run_recorded(
    model: nn.Module, found: Sequence[Layer], args: Sequence[Nested], kwargs: Mapping[str, Nested]
) -> tuple[Nested, list[tuple[int, Nested]]]:
    """Run the model; return its output, and the (number, input) of each call of a layer, in the order of the calls."""
    calls: list[tuple[int, Nested]] = []
    first = {id(layer.module): number for number, layer in reversed(list(enumerate(found)))}

    def note(module: nn.Module, given: tuple[Nested, ...]) -> None:
        calls.append((first[id(module)], map_tensors(given[0] if len(given) == 1 else given, torch.clone)))

    hooks = [module.register_forward_pre_hook(note) for module in {id(x.module): x.module for x in found}.values()]
    try:
        with user_code("model"):
            return model(*args, **kwargs), calls
    finally:
        for hook in hooks:
            hook.remove()


def _cut_error(name: str, why: str) -> WorkloadError:
    return WorkloadError(
        f"a cut at layer {name!r} would break the model: {why}\n"
        "call each layer only on the output of the previous one (a tensor, or a tuple of several), join layers with "
        "shared state into one module, or use rayps.parallel.pipeline.skip.Stash and Unstash for a skip connection",
        layer=name,
    )


def _equal(a: Nested, b: Nested) -> bool:
    one, two = _tensors(a), _tensors(b)
    return len(one) == len(two) and all(
        s.shape == t.shape
        and s.dtype == t.dtype
        and (torch.allclose(s, t, rtol=1e-4, atol=1e-6, equal_nan=True) if s.is_floating_point() else torch.equal(s, t))
        for s, t in zip(one, two, strict=True)
    )


def _tensors(value: Nested) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(value, found.append)
    return found


def _leaves(value: Nested) -> Nested:
    return map_tensors(value, lambda t: t.detach().requires_grad_(t.is_floating_point()))

"""A wrapped optimizer whose steps servers take: what a loop may not do with it, because the servers would not do it.

Hooks before a step run on the worker, where they change this worker's gradient before its push. All else is refused by
name: hooks after a step, a step of one's own, and the state, which is on the servers.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, MutableMapping
from typing import NoReturn

from rayps_client.errors import WorkloadError
from torch import Tensor
from torch.optim import Optimizer, lr_scheduler
from torch.optim import optimizer as torch_optimizer

from rayps.tensors.optim import ParamState


class StateOnServers(MutableMapping[Tensor, ParamState]):
    """The `state` of an optimizer whose state servers hold: each access is an error that names a parameter."""

    def __init__(self, names: dict[int, str]) -> None:
        """Set the parameters' names by the ids of the parameters."""
        self._names = names

    def _refuse(self, p: Tensor | None = None) -> NoReturn:
        name = self._names.get(id(p), next(iter(self._names.values())))
        raise WorkloadError(
            f"optimizer.state was read or changed after rayps.wrap, but servers hold the optimizer's state of {name!r} "
            "and of the other parameters:\nread it by optimizer.state_dict(), change it before wrap, or use all_reduce "
            "(the workers hold the state)",
            parameter=name,
        )

    def __getitem__(self, p: Tensor) -> ParamState:
        self._refuse(p)

    def __setitem__(self, p: Tensor, state: ParamState) -> None:
        self._refuse(p)

    def __delitem__(self, p: Tensor) -> None:
        self._refuse(p)

    def __iter__(self) -> Iterator[Tensor]:
        self._refuse()

    def __len__(self) -> int:
        self._refuse()


@contextlib.contextmanager
def hide_state(optimizer: Optimizer) -> Iterator[None]:
    """Give an optimizer an empty state, and its own again after the block."""
    held = vars(optimizer)["state"]
    optimizer.state = defaultdict(dict)
    try:
        yield
    finally:
        vars(optimizer)["state"] = held


class StateMarks:
    """Finds changes of an optimizer's state. A write through `.data` is not found."""

    def __init__(self, optimizer: Optimizer, names: dict[int, str]) -> None:
        """Record the state as it is. `names` are the parameters' names by the ids of the parameters."""
        self._optimizer, self._names = optimizer, names
        self.record()

    def record(self) -> None:
        """Record the state as it is, after a step of the optimizer itself."""
        self._state, self._marks = self._optimizer.state, self._find_marks()

    def check(self) -> None:
        """Raise WorkloadError if the state was replaced or changed since `record`. The error names a parameter."""
        now = {}
        if self._read_state() is self._state:
            now = self._find_marks()
            if now == self._marks:
                return
        changed = [key for key in self._marks.keys() | now.keys() if self._marks.get(key) != now.get(key)]
        name = next((name for key, name in self._names.items() if key in changed), next(iter(self._names.values())))
        raise WorkloadError(
            f"optimizer.state was changed after rayps.wrap, but servers step {name!r} and the other parameters, with a "
            "state of their own:\nchange it before wrap, or use all_reduce, whose workers hold the state",
            parameter=name,
        )

    def _find_marks(self) -> dict[int, list[tuple[object, ...]]]:
        """Return marks of each parameter's state: its keys, and the tensors with torch's numbers of writes to them."""
        if isinstance(self._read_state(), StateOnServers):
            return {}
        return {
            id(p): [
                (key, id(value), value._version) if isinstance(value, Tensor) else (key, value) for key, value in each
            ]
            for p, each in ((p, state.items()) for p, state in self._optimizer.state.items())
        }

    def _read_state(self) -> object:
        return vars(self._optimizer).get("state")


def refuse_own_step(optimizer: Optimizer, strategy: str) -> None:
    """Refuse an optimizer whose `step` was replaced on the object, because servers do not have it.

    Raises:
        WorkloadError: the error names the function. A scheduler's replacement, which only counts, is no error.
    """
    step = vars(optimizer).get("step")
    while getattr(step, "__globals__", {}).get("__name__") == lr_scheduler.__name__:
        step = getattr(step, "__wrapped__", None)
    if step is None or getattr(step, "__func__", step) is type(optimizer).step:
        return
    raise WorkloadError(
        f"optimizer.step was replaced by {_name_function(step)} before rayps.wrap, but under {strategy} servers take "
        "the "
        "steps, by the optimizer's class:\noverride step in a class of your own, do the change before or after "
        "optimizer.step() in the loop, or use all_reduce, whose workers take the steps"
    )


def refuse_hooks(optimizer: Optimizer, strategy: str, *, takes_pre_hooks: bool) -> None:
    """Refuse hooks of an optimizer's step that servers would not run.

    Raises:
        WorkloadError: the error names the hook. torch's own hooks, which measure, are no error.
    """
    kinds = [
        ("register_step_post_hook", _find_hooks(optimizer, "_optimizer_step_post_hooks")),
        ("torch's register_optimizer_step_post_hook", _find_hooks(torch_optimizer, "_global_optimizer_post_hooks")),
        ("torch's register_optimizer_step_pre_hook", _find_hooks(torch_optimizer, "_global_optimizer_pre_hooks")),
    ]
    if not takes_pre_hooks:
        kinds.append(("register_step_pre_hook", _find_hooks(optimizer, "_optimizer_step_pre_hooks")))
    for kind, hooks in kinds:
        if hooks:
            way = (
                "change .grad in the loop before optimizer.step()"
                if "pre" in kind
                else "compute with the changed values in forward, e.g. by torch.nn.utils.parametrize"
            )
            raise WorkloadError(
                f"the hook {_name_function(hooks[0])} was given to the optimizer by {kind}, but under {strategy} "
                "servers take "
                f"the steps, and do not run it:\n{way}; or use all_reduce, whose workers run it"
            )


def run_pre_hooks(optimizer: Optimizer) -> bool:
    """Run the hooks of `register_step_pre_hook`, and return whether there were any.

    A worker without a gradient runs none: they change `.grad`.
    """
    hooks = _find_hooks(optimizer, "_optimizer_step_pre_hooks")
    if not hooks or not any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
        return False
    for hook in hooks:
        hook(optimizer, (optimizer,), {})
    return True


def _find_hooks(owner: object, name: str) -> list[Callable[..., object]]:
    """Return the hooks that user code has registered: `owner` is an optimizer, or torch's module of optimizers."""
    found: Collection[Callable[..., object]] = getattr(owner, name, {}).values()
    return [hook for hook in found if not str(getattr(hook, "__module__", "")).startswith("torch.")]


def _name_function(function: object) -> str:
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)

"""The base class of workloads (what to learn), and `load`, which finds a workload by its name.

The name is "module:Class" or "path/file.py:Class". `rayps.core.user_module` sends a workload to another process. A
workload knows no machines, ranks or strategies.
"""

from __future__ import annotations

import difflib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rayps.core.errors import ConfigError, UserError, WorkloadError
from rayps.core.user_module import Finder, broken
from rayps.core.workload_name import misnamed
from rayps.data.base import Batch, Data


def _none(method: Any) -> Any:
    """Mark a default method that does nothing, to know whether the user's class defines its own."""
    method.is_none = True
    return method


class Workload(ABC):
    """What to learn: a model, a loss, data, an optimizer and its schedule.

    An instance is created once, and then sent to every worker.

    `clip_norm` is the largest Euclidean norm of a gradient, a number above 0; None means that nothing is clipped. A
    gradient with a larger norm is scaled down, as by `torch.nn.utils.clip_grad_norm_`. The strategy decides which
    gradient is clipped:

    - all_reduce: the mean over all workers.
    - Strategies with servers: each worker's push, by the norm of its dense part and its rows of tables together.
    - Strategies whose workers or clients step separately (hogwild, local_sgd, parallel_sgd, diloco, admm, the federated
      ones): the gradient of each step, but not the values that they exchange.
    - downpour: the gradient of each step on a worker's copy, and each push.

    The workers of one replica count as one worker. hybrid with sparse tables refuses `clip_norm`.

    Example:
        class Line(rayps.Workload):
            def model(self):
                return torch.nn.Linear(3, 1)

            def data(self):
                x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
                return rayps.data.tensors(x, x.sum(1, keepdim=True), batch_size=10)

            def loss(self, model, batch):
                return torch.nn.functional.mse_loss(model(batch.x), batch.y)

        rayps.train(Line(), workers=2)
    """

    clip_norm: float | None = None
    schedule_every: str = "step"  # the unit of `schedule`: "step" or "epoch"

    @abstractmethod
    def model(self) -> torch.nn.Module:
        """Return a new model. rayps seeds torch before this call, and every worker starts from the same parameters."""

    @abstractmethod
    def data(self) -> Data:
        """Return the training data."""

    @abstractmethod
    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Return the mean loss over the batch, as a scalar with a gradient. The batch is never empty."""

    def optimizer(self, params: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer of `params`, which are `list(model.parameters())`."""
        return torch.optim.SGD(params, lr=0.01)

    @_none
    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        """Return the learning-rate schedule of `optimizer`, or None if the rates are constant.

        A schedule is a scheduler of `torch.optim.lr_scheduler`, or a function from a step to the factor of the rates.

            def schedule(self, optimizer):
                return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=1000)

            def schedule(self, optimizer):
                return lambda step: min(1.0, (step + 1) / 100)     # a warm-up

        The schedule is stepped once per step, or once per epoch (`schedule_every = "epoch"`). Steps are counted from
        the start of the job, and a resumed run and a later phase continue the count. A step is a round of the worker,
        also if servers apply it. A server applies a push at the rate of the round in which the push was computed,
        however late the push arrives (under downpour, the round of its last gradient). Workers that train separately
        count their own steps. A federated job counts its rounds, and its clients train at the rate of the round
        (`server_lr` is constant).

        `optimizer` does not take the steps. It has the groups of `self.optimizer(params)`, with placeholders for the
        parameters. Each process has such an optimizer and evaluates the schedule on it. Therefore a schedule must
        always return the same values. For a sparse table, `optimizer` is torch's optimizer of the same kind, with one
        group whose "table" is the table's name. The values that a scheduler changes (rates, and with OneCycleLR also
        momentum) are set before each step. ReduceLROnPlateau is refused, because its steps need a metric.
        """
        return None

    def evaluate(self, model: torch.nn.Module, batch: Batch) -> dict[str, float | torch.Tensor]:
        """Return named means over the batch, e.g. {"accuracy": 0.9}. rayps weights them by the size of the batch."""
        return {}

    def evaluation_data(self) -> Data:
        """Return the data on which the model is evaluated. The default is the result of `data()`."""
        return self.data()

    def lookups(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        """Return a dict from a table's name to the ids that `loss` will look up, e.g. {"users": batch.x[:, 0]}.

        With these ids, the rows of all tables are pulled while the previous batch is computed. The default is {}: the
        ids are not known, and rows are pulled when `loss` looks them up.
        """
        return {}


def check_clip_norm(workload: Workload) -> None:
    """Refuse an invalid `clip_norm`.

    Raises:
        ConfigError: `clip_norm` is neither None nor a finite number above 0.
    """
    given = workload.clip_norm
    if given is None:
        return
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 < given < float("inf"):
        raise ConfigError(
            f"clip_norm of {type(workload).__name__} is {given!r}: give the largest norm of the gradient, a finite "
            "number above 0, or None to clip nothing",
            field="clip_norm",
        )


def misspelt(workload: Workload) -> list[str]:
    """Return a warning for each method of the user's classes whose name is similar to that of a Workload method."""
    ours = [name for name in vars(Workload) if not name.startswith("_")]
    kinds = [kind for kind in type(workload).__mro__ if issubclass(kind, Workload) and kind is not Workload]
    found = []
    for kind in kinds:
        missing = [name for name in ours if name not in vars(kind)]
        for name in sorted(set(vars(kind)) - set(ours)):
            near = difflib.get_close_matches(name, missing, 1, cutoff=0.84)
            if near and not name.startswith("_"):
                found.append(f"{kind.__name__} defines {name!r} and not {near[0]!r}: is the name misspelt?")
    return found


# ---------------------------------------------------------------------------------------------- by name

FINDER = Finder("workload", "workloads", "rayps.Workload")


def load(target: str, working_dir: str | None = None) -> Workload:
    """Return the workload that `target` names: "module:Class" or "path/file.py:Class", relative to `working_dir`.

    The user's files are read again at each call, and a process never uses an older version of a file.

    Raises:
        WorkloadError: the class cannot be found or created. The text names the line of the user's file that failed.
    """
    if (reason := misnamed(target)) is not None:
        raise WorkloadError(reason, target=target)
    FINDER.forget()
    return _instance(FINDER.find(target, working_dir, Workload), target)


def _instance(kind: type[Workload], target: str) -> Workload:
    missing = ", ".join(f"{name}()" for name in sorted(getattr(kind, "__abstractmethods__", ())))
    if missing:
        raise WorkloadError(f"{target} lacks {missing}: define it in the class", target=target)
    try:
        inspect.signature(kind).bind()
    except TypeError as error:
        raise WorkloadError(
            f"{target} is created without arguments, but its __init__ needs some ({error}):\ngive them defaults",
            target=target,
        ) from error
    try:
        made = kind()
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise broken(f"{target}()", error) from error
    check_clip_norm(made)
    return made

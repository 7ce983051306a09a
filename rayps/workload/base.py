"""The base class of workloads (what to learn), and `load`, which finds a workload by its name.

The name is "module:Class" or "path/file.py:Class". `rayps.core.job.user_module` sends a workload to another process. A
workload knows no machines, ranks or strategies.
"""

from __future__ import annotations

import difflib
import inspect
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from rayps_client import parameters
from rayps_client.errors import ConfigError, UserError, WorkloadError
from rayps_client.values import Json
from rayps_client.workload import Workload as LightWorkload
from rayps_client.workload_name import misnamed

from rayps.core.job.user_module import Finder, broken
from rayps.data.base import Batch, Data
from rayps.tensors.weight_average import Average, check_average
from rayps.workload.callback import Callback
from rayps.workload.compile_model import Compile, options_of
from rayps.workload.light_workload import LIGHT, adapted
from rayps.workload.metric_values import Metric
from rayps.workload.model_blocks import BlockNames, patterns_of
from rayps.workload.precision import DTYPES

Loss: TypeAlias = torch.Tensor | tuple[torch.Tensor, float | torch.Tensor]  # a mean, or a sum and its weight


def _none(method: Any) -> Any:
    """Mark a default method that does nothing, to know whether the user's class defines its own."""
    method.is_none = True
    return method


class TotalSteps:
    """The attribute `total_steps` of a workload. A class or object that has an attribute of this name keeps its own."""

    def __get__(self, workload: Workload | None, kind: type[Workload] | None = None) -> int | None:
        found = None if workload is None else vars(workload).get(_PLANNED)
        return found if isinstance(found, int) else None


_PLANNED = "_planned_steps"  # the attribute of a workload that has its `total_steps`


def plan_steps(workload: Workload, steps: int | None) -> None:
    """Set the `total_steps` of a workload, before it is sent to workers; None if the number is not known."""
    vars(workload)[_PLANNED] = steps


class Workload(LightWorkload):
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

    `accumulate` is the number k of micro-batches in a step, a whole number of at least 1. A step takes k batches of
    `data()` on each worker, and nothing is sent before the last of them. The last step of an epoch may take fewer.
    Rounds, schedules and checkpoints count steps.

    `precision` "bf16" or "fp16" computes `loss` and `evaluate` under `torch.autocast`. The parameters keep their dtype.
    With "fp16" the loss is multiplied by a scale for backward, as by `torch.amp.GradScaler`, and a step is skipped if
    its gradient is not finite.

    `evaluation_batches` is the most batches that each worker reads in an evaluation; None means all of its share.

    `compile` True compiles the model on each worker by `torch.compile`, in place: parameters keep their names. A string
    is the name of a backend, and a dict has options of `torch.compile`.

    `checkpoint_activations` True stores only the inputs of the blocks that the model repeats, such as the layers of a
    decoder, and computes their activations again for backward. Names such as "layers.*", or several, choose modules
    instead. Loss and gradients do not change.

    `total_steps` is the planned number of steps of the whole job, with all its epochs, phases and workers, which
    `schedule` and `optimizer` may use: `OneCycleLR(optimizer, 0.1, total_steps=self.total_steps)`. Under federated
    strategies these are rounds. It does not change if workers join or leave (without
    `global_batch` a job with more workers than planned takes fewer), or if the job ends early. It is None
    before the job is checked, if the data has no length and the job ends with epochs, where rows are leased, and on
    real clients. An attribute `total_steps` of your class is not changed.

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
    average: Average | None = None  # an average of the weights: rayps.EMA(decay) or rayps.SWA(start, every)
    accumulate: int = 1  # micro-batches in a step
    precision: str | None = None  # of loss and evaluation: None (as the model is), "bf16" or "fp16"
    compile: Compile = False  # True, a backend's name, or a dict of options of torch.compile
    checkpoint_activations: BlockNames = False  # True (repeated blocks), or names of modules such as "layers.*"
    total_steps = TotalSteps()  # the planned steps of the job; None if they are not known
    schedule_every: str = "step"  # the unit of `schedule`: "step" or "epoch"
    evaluation_batches: int | None = None  # the most batches of each worker in an evaluation; None: all of its share
    sync_batchnorm: bool = False  # whether BatchNorm layers use the union of the workers' batches (all_reduce, hybrid)

    @abstractmethod
    def model(self) -> torch.nn.Module:
        """Return a new model. rayps seeds torch before this call, and every worker starts from the same parameters."""

    @abstractmethod
    def data(self) -> Data:
        """Return the training data."""

    @abstractmethod
    def loss(self, model: torch.nn.Module, batch: Batch) -> Loss | Mapping[str, Loss | Metric]:
        """Return the mean loss over the batch, as a scalar with a gradient. The batch is never empty.

        If the loss is a mean over something else than rows, such as tokens, return the pair (sum, weight): the sum of
        the tokens' losses and the number of tokens. A step's gradient is then the gradient of all sums of the step,
        over micro-batches and workers, divided by the sum of all weights. A batch of weight 0 has no effect. The second
        value of a pair is always the weight: return a metric beside a mean loss in a dict, as below.

        To add metrics of the training to each round, return a dict with the loss as "loss":

            return {"loss": loss, "accuracy": accuracy, "errors": rayps.Sum(errors)}
        """

    def optimizer(self, params: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer of `params`, which are `list(model.parameters())` without those that need no gradient.

        If the argument is called `named_parameters`, it is a list of (name, parameter) instead. Parameter groups can
        then be chosen by name, under every strategy:

            def optimizer(self, named_parameters):
                decay = [p for name, p in named_parameters if not name.endswith("bias")]
                rest = [p for name, p in named_parameters if name.endswith("bias")]
                return torch.optim.AdamW([{"params": decay}, {"params": rest, "weight_decay": 0.0}], lr=3e-4)
        """
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

    def evaluate(self, model: torch.nn.Module, batch: Batch) -> Mapping[str, Metric]:
        """Return metrics of the batch by name, e.g. {"accuracy": 0.9}.

        A number is a mean over the batch, weighted by the number of rows. Other reductions: `rayps.Mean(value, weight)`
        for another weight, `rayps.Sum(value)`, `rayps.Max(value)` and `rayps.Min(value)`.
        """
        return {}

    def evaluation_data(self) -> Data:
        """Return the data on which the model is evaluated. The default is the result of `data()`.

        If that has no length and may be endless, set `evaluation_batches`: see `docs/loading.md`.
        """
        return self.data()

    def callbacks(self) -> Sequence[Callback]:
        """Return the job's callbacks, which are called in the driver's process: see `rayps.Callback`."""
        return ()

    def lookups(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        """Return a dict from a table's name to the ids that `loss` will look up, e.g. {"users": batch.x[:, 0]}.

        With these ids, the rows of all tables are pulled while the previous batch is computed. The default is {}: the
        ids are not known, and rows are pulled when `loss` looks them up.
        """
        return {}


def evaluates_training_data(workload: Workload) -> bool:
    """Return whether a workload has no `evaluation_data` of its own, so that its training data is evaluated."""
    return getattr(workload.evaluation_data, "__func__", None) is Workload.evaluation_data


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


def check_fields(workload: Workload) -> None:
    """Refuse an invalid `clip_norm`, `accumulate`, `precision`, `compile`, or another invalid field.

    Raises:
        ConfigError: a field has a value that it cannot have.
    """
    check_clip_norm(workload)
    options_of(workload.compile)
    patterns_of(workload.checkpoint_activations, "checkpoint_activations")
    name, k, precision = type(workload).__name__, workload.accumulate, workload.precision
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ConfigError(
            f"accumulate of {name} is {k!r}: give the number of micro-batches in a step, a whole number of at least 1",
            field="accumulate",
        )
    most = workload.evaluation_batches
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
        raise ConfigError(
            f"evaluation_batches of {name} is {most!r}: give the most batches that each worker reads in an evaluation, "
            "a whole number of at least 1, or None to read all of its share",
            field="evaluation_batches",
        )
    if precision is not None and precision not in DTYPES:
        raise ConfigError(
            f"precision of {name} is {precision!r}: give 'bf16', 'fp16', or None to compute as the model is",
            field="precision",
        )


def misspelt(workload: Workload) -> list[str]:
    """Return a warning for each name of the user's that is similar to that of a method or attribute of Workload.

    The names are those of the user's classes, and those that the constructor gives to the workload.
    """
    ours = [name for name in vars(Workload) if not name.startswith("_")]
    kinds = [kind for kind in type(workload).__mro__ if issubclass(kind, Workload) and kind is not Workload]
    in_classes = {name for kind in kinds for name in vars(kind)}
    places = [(kind.__name__, set(vars(kind)), set(vars(kind))) for kind in kinds]
    own = set(vars(workload)) - in_classes
    places.append((f"an object of {type(workload).__name__}", own, own | in_classes))
    found = []
    for place, names, known in places:
        missing = [name for name in ours if name not in known]
        for name in sorted(names - set(ours)):
            near = difflib.get_close_matches(name, missing, 1, cutoff=0.84)
            if near and not name.startswith("_"):
                found.append(f"{place} defines {name!r} and not {near[0]!r}: is the name misspelt?")
    return found


# ---------------------------------------------------------------------------------------------- by name

FINDER = Finder("workload", "workloads", "rayps.Workload")


def load(target: str, working_dir: str | None = None, params: Mapping[str, Json] | None = None) -> Workload:
    """Return the workload that `target` names: "module:Class" or "path/file.py:Class", relative to `working_dir`.

    `params` are values of the class's parameters (`rayps_client.parameters`), by name. The user's files are read
    again at each call, and a process never uses an older version of a file.

    Raises:
        WorkloadError: the class cannot be found or created. The text names the line of the user's file that failed.
        ConfigError: a parameter is unknown, or its value does not have the parameter's type.
    """
    if (reason := misnamed(target)) is not None:
        raise WorkloadError(reason, target=target)
    FINDER.forget()
    kind = adapted(FINDER.find(target, working_dir, (Workload, *LIGHT)), Workload)
    FINDER.remember(kind, target)
    return _instance(kind, target, params or {})


def is_workload(kind: type) -> bool:
    """Return whether instances of a class are workloads, of rayps or of the light client."""
    return issubclass(kind, (Workload, *LIGHT))


def workload_of(kind: type[Workload], params: Mapping[str, Json]) -> Workload:
    """Return a workload of a class, with these values of its parameters.

    Raises:
        WorkloadError: it cannot be created.
        ConfigError: a parameter is unknown, or its value does not have the parameter's type.
    """
    return _instance(adapted(kind, Workload), kind.__qualname__, params)


def as_workload(given: Any) -> Any:
    """Return a workload of the light client as a `rayps.Workload` with the same attributes; another object as it is."""
    if not isinstance(given, LIGHT) or isinstance(given, Workload):
        return given
    found: Any = object.__new__(adapted(type(given), Workload))
    vars(found).update(vars(given))
    return found


def load_trained(
    target: str, working_dir: str | None, recorded: Mapping[str, Json], params: Mapping[str, Json]
) -> Workload:
    """Return the workload as `load` does, for a model that was trained with the parameters `recorded`.

    `params` replace recorded ones. A recorded parameter that the class refuses, because it is not the class that was
    trained, or computes the value itself, is left out.

    Raises:
        WorkloadError, ConfigError: as `load`.
    """
    held = {**recorded, **params}
    while True:
        try:
            return load(target, working_dir, held)
        except ConfigError as error:
            name = str(error.data.get("field", "")).removeprefix("params.")
            if name not in held or name in params:
                raise
            del held[name]


def _instance(kind: type[Workload], target: str, params: Mapping[str, Json]) -> Workload:
    missing = ", ".join(f"{name}()" for name in sorted(getattr(kind, "__abstractmethods__", ())))
    if missing:
        raise WorkloadError(f"{target} lacks {missing}: define it in the class", target=target)
    try:
        needed = inspect.signature(kind)
        needed.bind(**{name: None for name in params if name in needed.parameters})
    except TypeError as error:
        raise WorkloadError(
            f"{target} is created without arguments except parameters, but its __init__ needs more ({error}):\n"
            "give them defaults",
            target=target,
        ) from error
    try:
        made = parameters.create(kind, params)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise broken(f"{target}()", error) from error
    check_fields(made)
    check_average(made.average)
    return made

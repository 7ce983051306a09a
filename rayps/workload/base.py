"""What to learn, and how to find it by name. A workload knows nothing about machines, ranks or strategies.

`load` turns "module:Class" or "path/file.py:Class" into an instance; `pack` and `unpack` carry one to another
process. The user's own modules travel by value, so the other process needs none of the user's files to unpack
it (an import inside a function runs only when called, and does need its file).
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import linecache
import pickle
import site
import sys
import sysconfig
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import torch

from rayps.core.errors import ConfigError, UserError, WorkloadError
from rayps.core.job import misnamed
from rayps.data.base import Batch, Data


def _none(method: Any) -> Any:
    """Mark the method that stands where a workload has none of its own."""
    method.is_none = True
    return method


class Workload(ABC):
    """What to learn: a model, a loss, data, an optimizer and its schedule. Created once, then sent to every worker.

    `clip_norm`, a number above 0 or None (never), is the Euclidean norm to which a gradient is shortened where it is
    longer, as `torch.nn.utils.clip_grad_norm_` does. Which gradient depends on the strategy: under all_reduce the mean
    over all workers; under servers what each worker pushes, dense part and rows of tables together; where workers (or
    clients) step by themselves (hogwild, local_sgd, parallel_sgd, diloco, admm, the federated ones) the gradient of
    each of their steps, not what they exchange; under downpour both a copy's steps and the pushes, each once. The
    workers of one replica count as one. hybrid with sparse tables refuses it.

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
    schedule_every: str = "step"  # what `schedule` counts: "step" or "epoch"

    @abstractmethod
    def model(self) -> torch.nn.Module:
        """A new model; the platform seeds torch before, so every worker starts from the same parameters."""

    @abstractmethod
    def data(self) -> Data:
        """The rows to learn from."""

    @abstractmethod
    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """The mean loss over the batch: a scalar with a gradient. Never called with an empty batch."""

    def optimizer(self, params: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of `params`, which are `list(model.parameters())`."""
        return torch.optim.SGD(params, lr=0.01)

    @_none
    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        """The learning-rate schedule of `optimizer`: a scheduler of `torch.optim.lr_scheduler`, a function that gives
        the factor of the rates at a step, or None (they stay as they are).

            def schedule(self, optimizer):
                return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=1000)

            def schedule(self, optimizer):
                return lambda step: min(1.0, (step + 1) / 100)     # a warm-up

        It is stepped once a step, or once an epoch (`schedule_every = "epoch"`), from step 0 of the job on: a resumed
        run and a later phase go on counting. A step is a round: of the worker, wherever the step is taken. A server
        applies the rate of the round that a push is of, however late the push is (Downpour: that of its last gradient);
        workers that learn apart count their own steps across meetings; a federated job counts its rounds, and its
        clients train at the rate of the round (`server_lr` stays as the strategy says).

        `optimizer` is a skeleton: the groups of `self.optimizer(params)` over stand-ins, on which the schedule is
        evaluated in each process; it must give the same values each time. For a sparse table it is torch's optimizer
        of the same kind, with one group whose "table" is the table's name. What a scheduler moves (rates; OneCycleLR
        also momentum) is set before each step. ReduceLROnPlateau is refused: its steps need a metric.
        """
        return None

    def evaluate(self, model: torch.nn.Module, batch: Batch) -> dict[str, float | torch.Tensor]:
        """Named means over the batch, e.g. {"accuracy": 0.9}; the platform weights them by batch size."""
        return {}

    def evaluation_data(self) -> Data:
        """The rows to evaluate on; those of `data()` unless you say otherwise."""
        return self.data()

    def lookups(self, batch: Batch) -> Mapping[str, Any]:
        """The ids that `loss` will look up for the batch, by table, e.g. {"users": batch.x[:, 0]}; {} = not known.

        Where they are known, rows are pulled while the batch before is computed, all tables' together.
        """
        return {}


def check_clip_norm(workload: Workload) -> None:
    """Refuse a `clip_norm` that is no norm.

    Raises:
        ConfigError: it is neither None nor a finite number above 0.
    """
    given: Any = workload.clip_norm
    if given is None:
        return
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 < given < float("inf"):
        raise ConfigError(
            f"clip_norm of {type(workload).__name__} is {given!r}: give a finite number above 0, to which the norm of "
            "the gradient is shortened, or None (never)",
            field="clip_norm",
        )


def misspelt(workload: Workload) -> list[str]:
    """A warning for each name of the user's classes that is nearly one of Workload's, which then stays as it was."""
    ours = [name for name in vars(Workload) if not name.startswith("_")]
    kinds = [kind for kind in type(workload).__mro__ if issubclass(kind, Workload) and kind is not Workload]
    found = []
    for kind in kinds:
        missing = [name for name in ours if name not in vars(kind)]
        for name in sorted(set(vars(kind)) - set(ours)):
            near = difflib.get_close_matches(name, missing, 1, cutoff=0.84)
            if near and not name.startswith("_"):
                found.append(f"{kind.__name__} has {name!r} and no {near[0]!r} of its own: is it misspelt?")
    return found


# ---------------------------------------------------------------------------------------------- by name

_ours: list[str] = []  # modules that the last load() brought in
_our_path: list[str] = []  # what it put on sys.path


def load(target: str, working_dir: str | None = None) -> Workload:
    """The workload that `target` names: "module:Class" or "path/file.py:Class", seen from `working_dir`.

    The user's files are read again at each call: a warm process never keeps an older version of them.

    Raises:
        WorkloadError: saying what was tried, and where in the user's file it went wrong.
    """
    if (reason := misnamed(target)) is not None:
        raise WorkloadError(reason, target=target)
    place, _, name = target.rpartition(":")
    root = Path(working_dir or ".").absolute()
    if not root.is_dir():
        raise WorkloadError(f"the working directory {root} does not exist: give --working-dir", target=target)
    _forget()
    before = set(sys.modules)
    try:
        module = _from_file(root, place) if place.endswith(".py") else _from_name(root, place)
    finally:
        _ours.extend(key for key in set(sys.modules) - before if _is_users(sys.modules[key]))
    return _instance(_class(module, name, target), target)


def _forget() -> None:
    for key in _ours:
        sys.modules.pop(key, None)
    for entry in _our_path:
        if entry in sys.path:
            sys.path.remove(entry)
    _ours.clear()
    _our_path.clear()
    linecache.checkcache()
    importlib.invalidate_caches()


def _add_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
        _our_path.append(str(folder))


def _from_name(root: Path, place: str) -> ModuleType:
    _add_path(root)
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not (place == error.name or place.startswith(error.name + ".")):
            raise _broken(place, error) from error
        near = difflib.get_close_matches(place, [path.stem for path in root.glob("*.py")], n=1)
        hint = f"did you mean {near[0]!r}?" if near else "give --working-dir, or a file: 'path/file.py:Class'"
        raise WorkloadError(
            f"there is no module {place!r} in {root} or among the installed packages: {hint}", module=place
        ) from error
    except (Exception, SystemExit) as error:
        raise _broken(place, error) from error


def _from_file(root: Path, place: str) -> ModuleType:
    path = (root / Path(place).expanduser()).resolve()
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [item.name for item in path.parent.glob("*.py")], n=1)
        hint = f": did you mean {near[0]!r}?" if near else ": give a path from the working directory"
        raise WorkloadError(f"there is no file {path}{hint}", file=str(path))
    _add_path(path.parent)
    known = sys.modules.get(path.stem)
    if known is not None and _file(known) == path:
        return known
    name = path.stem
    if known is not None or name in sys.stdlib_module_names or not name.isidentifier():
        name = f"workload_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"  # its own would hide another
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise WorkloadError(f"{path} is not a Python file", file=str(path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        sys.modules.pop(name, None)
        raise _broken(place, error) from error
    return module


def _broken(what: str, error: BaseException) -> WorkloadError:
    """The user's own last line, and where it is."""
    last = traceback.format_exception_only(error)[-1].strip().splitlines()[0][:300]
    return WorkloadError(f"{what} does not work: {last}{_where(error)}", module=what)


def _where(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"\nin {error.filename}:{error.lineno}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen") and Path(frame.filename) != Path(__file__)
    ]
    mine = [frame for frame in frames if _users_file(Path(frame.filename))] or frames
    return f"\nin {mine[-1].filename}:{mine[-1].lineno}: {mine[-1].line}" if mine else ""


def _class(module: ModuleType, name: str, target: str) -> type[Workload]:
    found = getattr(module, name, None)
    classes = {key: value for key, value in vars(module).items() if isinstance(value, type)}
    workloads = [key for key, kind in classes.items() if issubclass(kind, Workload) and kind is not Workload]
    if found is None:
        near = difflib.get_close_matches(name, classes, n=3, cutoff=0.5) or workloads
        hint = f"did you mean {', '.join(near)}?" if near else "no class there derives from rayps.Workload"
        raise WorkloadError(f"{module.__file__} has no class {name!r}: {hint}", target=target)
    if not isinstance(found, type) or not issubclass(found, Workload):
        hint = f"; the workloads there are {', '.join(workloads)}" if workloads else ""
        raise WorkloadError(
            f"{name} in {module.__file__} is not a workload: derive it from rayps.Workload{hint}", target=target
        )
    return found


def _instance(kind: type[Workload], target: str) -> Workload:
    missing = ", ".join(f"{name}()" for name in sorted(getattr(kind, "__abstractmethods__", ())))
    if missing:
        raise WorkloadError(f"{target} lacks {missing}: write it in the class", target=target)
    try:
        inspect.signature(kind).bind()
    except TypeError as error:
        raise WorkloadError(
            f"{target} is created without arguments, but its __init__ says: {error}\ngive its arguments defaults",
            target=target,
        ) from error
    try:
        made = kind()
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise _broken(f"{target}()", error) from error
    check_clip_norm(made)
    return made


# ---------------------------------------------------------------------------------------------- by value


_packing = threading.Lock()  # what is pickled by value is said to all of the process


def pack(workload: Any) -> bytes:
    """A workload or a training function as bytes, with the user's modules in them.

    Raises:
        WorkloadError: if something in it cannot be sent, such as an open file or a lock.
    """
    with _packing:
        known = cloudpickle.list_registry_pickle_by_value()
        keys = [key for key in list(sys.modules) if key not in known and _is_users(sys.modules[key])]
        for key in keys:
            cloudpickle.register_pickle_by_value(sys.modules[key])
        try:
            return bytes(cloudpickle.dumps(workload))
        except (Exception, SystemExit) as error:
            raise WorkloadError(
                f"{_name(workload)} cannot be sent to workers: {type(error).__name__}: {error}\n"
                "create such things inside model(), data() or loss(), not in __init__"
            ) from error
        finally:
            for key in keys:
                cloudpickle.unregister_pickle_by_value(sys.modules[key])


def unpack(packed: bytes) -> Any:
    """What `pack` packed. It runs the user's code, so only ever give it bytes from a driver of one's own job.

    Raises:
        WorkloadError: if a package that it needs is not installed here.
    """
    try:
        return pickle.loads(packed)
    except (Exception, SystemExit) as error:
        raise WorkloadError(
            f"the workload cannot be unpacked here: {type(error).__name__}: {error}\n"
            "install the package it needs on every machine of the cluster"
        ) from error


def _name(workload: Any) -> str:
    return getattr(workload, "__qualname__", type(workload).__qualname__)


def _file(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    return _resolved(file) if isinstance(file, str) else None


@functools.cache
def _resolved(file: str) -> Path:
    return Path(file).resolve()


def _is_users(module: ModuleType | None) -> bool:
    """Whether a module is the user's own, and not installed, Python's or ours."""
    if not isinstance(module, ModuleType):
        return False
    if module.__name__.partition(".")[0] in ("__main__", "rayps", "rayps_api"):
        return False
    if sys.modules.get(module.__name__) is not module:
        return False  # an alias: cloudpickle knows modules by their own name only
    file = _file(module)
    return file is not None and _users_file(file)


@functools.cache  # asked of every module that is loaded, at each pack()
def _users_file(file: Path) -> bool:
    if file.suffix != ".py" or {"site-packages", "dist-packages"} & set(file.parts):
        return False
    return not any(file.is_relative_to(folder) for folder in _INSTALLED)


def _installed() -> tuple[Path, ...]:
    paths = [sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += [*site.getsitepackages(), site.getusersitepackages(), str(Path(__file__).parents[1])]
    return tuple({Path(path).resolve() for path in paths if path})


_INSTALLED = _installed()

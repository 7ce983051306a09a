"""A module under the name `rayps`, for workload files while rayps is not installed: the names that a client needs.

`import rayps` and `from rayps import Workload` then work in a file that was written for a cluster. A name that only the
job's worker uses, such as a callback, can be named here, and does nothing. Every other name raises an error.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from rayps_client import stats
from rayps_client.errors import RaypsError, WorkloadError
from rayps_client.rows import Batch, Rows, tensors
from rayps_client.statistics_workload import StatisticsWorkload
from rayps_client.workload import NumpyWorkload, Workload

NAME = "rayps"
WAY_OUT = "install rayps on this machine, and run `rayps client`"


class OnlyOnTheCluster:
    """What only the job's worker or a simulation uses: a callback, an average of weights, a division into clients."""

    def __init__(self, *_: object, **__: object) -> None:
        """Accept every argument."""


class ReducedMetric:
    """A metric that `loss` returns beside its loss, such as `rayps.Sum(errors)`: a client does not send it."""

    def __init__(self, value: object, weight: object = None) -> None:
        self.value, self.weight = value, weight


def _parquet(*arguments: Any, **options: Any) -> Rows:
    from rayps_client import parquet  # needs pyarrow

    return parquet(*arguments, **options)


_METRICS = ("Max", "Mean", "Min", "Sum")
_CLUSTER = ("BestCheckpoint", "Callback", "EMA", "EarlyStopping", "SWA")
_DIVISIONS = ("by_quantity", "dirichlet", "iid", "rule", "shards")  # of `rayps.data`


class Twin(ModuleType):
    """A module with some of the names of one of rayps's modules."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # Python asks modules for such names
        raise WorkloadError(f"the light client has no {self.__name__}.{name}: {WAY_OUT}", name=name)


class _Refusing:
    """Refuses the import of a module of rayps, such as `rayps.loggers`."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Raise WorkloadError for a module of rayps that has no twin; return None for every other module."""
        if name.startswith(f"{NAME}.") and isinstance(sys.modules.get(NAME), Twin):
            raise WorkloadError(f"the light client has no module {name}: {WAY_OUT}", name=name)
        return None


def is_installed() -> bool:
    """Return whether rayps itself can be imported. A folder of that name without a package does not count."""
    known = sys.modules.get(NAME)
    if known is not None:
        return not isinstance(known, Twin)
    found = importlib.util.find_spec(NAME)
    return found is not None and found.origin is not None


def register() -> None:
    """Let `import rayps` import the twin, if rayps is not installed."""
    if is_installed() or NAME in sys.modules:
        return
    data = _module(f"{NAME}.data", {"Batch": Batch, "Data": Rows, "parquet": _parquet, "tensors": tensors})
    for name in _DIVISIONS:
        setattr(data, name, OnlyOnTheCluster)
    queries = _module(f"{NAME}.stats", {name: getattr(stats, name) for name in stats.__all__})
    names: dict[str, object] = {
        "NumpyWorkload": NumpyWorkload,
        "RaypsError": RaypsError,
        "StatisticsWorkload": StatisticsWorkload,
        "Workload": Workload,
    }
    twin = _module(NAME, {**names, "data": data, "stats": queries})
    twin.__path__ = []  # a package: `import rayps.data` imports the twin of that name
    for name in _METRICS:
        setattr(twin, name, ReducedMetric)
    for name in _CLUSTER:
        setattr(twin, name, OnlyOnTheCluster)
    sys.modules[NAME], sys.modules[data.__name__] = twin, data
    sys.meta_path.insert(0, _Refusing)


def remove() -> None:
    """Undo `register`."""
    if isinstance(sys.modules.get(NAME), Twin):
        for name in (NAME, f"{NAME}.data"):
            sys.modules.pop(name, None)
        sys.meta_path.remove(_Refusing)


def _module(name: str, names: dict[str, object | Callable[..., Any]]) -> Twin:
    made = Twin(name, f"The light client's twin of {name}: see rayps_client.twin.")
    for key, value in names.items():
        setattr(made, key, value)
    return made

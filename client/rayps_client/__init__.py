"""The light client of rayps: takes part in federated jobs with data that stays on this machine. No Ray, no FastAPI.

`rayps` depends on this package at the same version. Nothing here imports `rayps`, and torch is imported only by the
modules that train torch models.

    from rayps_client import NumpyWorkload, Workload, parquet, tensors

Names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {  # public name: the module where it is found
    "Batch": "rayps_client.rows",
    "NumpyWorkload": "rayps_client.workload",
    "RaypsError": "rayps_client.errors",
    "Workload": "rayps_client.workload",
    "parquet": "rayps_client.parquet_rows",
    "tensors": "rayps_client.rows",
}

__all__ = ["Batch", "NumpyWorkload", "RaypsError", "Workload", "__version__", "parquet", "tensors"]

if TYPE_CHECKING:
    from rayps_client.errors import RaypsError as RaypsError
    from rayps_client.parquet_rows import parquet as parquet
    from rayps_client.rows import Batch as Batch
    from rayps_client.rows import tensors as tensors
    from rayps_client.workload import NumpyWorkload as NumpyWorkload
    from rayps_client.workload import Workload as Workload


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rayps_client' has no attribute {name!r}")
    found = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__

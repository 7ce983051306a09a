"""Load the workload that a command names, and choose what trains it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence

from rayps_client import parameters, twin
from rayps_client.client_options import ClientOptions
from rayps_client.errors import ConfigError, DataError, UserError, WorkloadError
from rayps_client.machine.loading import without_collection
from rayps_client.machine.user_files import Finder, broken
from rayps_client.trainers.local_trainer import LocalTrainer
from rayps_client.user_errors import users_code
from rayps_client.values import Json
from rayps_client.workload import NumpyWorkload, Workload
from rayps_client.workload_name import misnamed

_FINDER = Finder("workload", "workloads", "rayps_client.Workload")


def load(target: str, params: Mapping[str, Json]) -> Workload | NumpyWorkload:
    """Return the workload that `target` names: "module:Class" or "path/file.py:Class".

    While rayps is not installed, `import rayps` in the file imports its twin.

    Raises:
        WorkloadError: the class cannot be found or created. The text names the line of the user's file that failed.
        ConfigError: a parameter is unknown, or its value does not have the parameter's type.
    """
    if (reason := misnamed(target)) is not None:
        raise WorkloadError(reason, target=target)
    twin.register()
    kind = _FINDER.find(target, None, (Workload, NumpyWorkload))
    missing = ", ".join(f"{name}()" for name in sorted(getattr(kind, "__abstractmethods__", ())))
    if missing:
        raise WorkloadError(f"{target} lacks {missing}: define it in the class", target=target)
    try:
        inspect.signature(kind).bind(**{name: None for name in params if name in inspect.signature(kind).parameters})
    except TypeError as error:
        raise WorkloadError(
            f"{target} is created without arguments except parameters, but its __init__ needs more ({error}):\n"
            "give them defaults",
            target=target,
        ) from error
    try:
        found: Workload | NumpyWorkload = parameters.create(kind, params)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise broken(f"{target}()", error) from error
    return found


def trainer_of(options: ClientOptions) -> LocalTrainer:
    """Return the trainer of the command's workload and rows. Imports torch only if the workload's model is of torch.

    Raises:
        ConfigError, WorkloadError, DataError: the workload or its rows cannot be trained here.
    """
    with without_collection():  # the user's file imports torch
        workload = load(options.target, options.params)
    with users_code("data"):
        rows = workload.data()
    if options.data is not None:
        rows = _with_paths(rows, [options.data])
    if isinstance(workload, NumpyWorkload):
        if options.device != "cpu":
            raise ConfigError(
                f"--device is {options.device!r}, but {options.target} computes with numpy, which uses the processor "
                "alone: leave --device out",
                field="device",
            )
        from rayps_client.trainers.numpy_trainer import numpy_trainer

        return numpy_trainer(workload, rows)
    with users_code("model"), without_collection():  # torch may be missing
        from rayps_client.trainers.torch_trainer import torch_trainer

    return torch_trainer(workload, rows, options.device)


def _with_paths(rows: object, paths: Sequence[str]) -> object:
    change = getattr(rows, "with_paths", None)
    if change is None:
        raise DataError(
            f"the rows cannot be read from {paths[0]!r}, because the workload's data() is not Parquet: let data() "
            "itself read this client's\nrows and omit --data, or let data() return rayps_client.parquet(...)"
        )
    return change(paths)

"""A user's script of `python -m benchmarks start`: a process that opens a Ray or calls `rayps.train`, and notes times.

    python -m benchmarks.runs.start_script CONFIG OUT

CONFIG is JSON: {"scene", "workers", "folder", "address"}. OUT is the file for the result: {"began", "parts"} with the
wall clock at the call, and from each part's name to its seconds; or {"skipped"} with the reason.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.runs.first_steps import STEPS, FirstSteps
from benchmarks.runs.ray_train_start import train_by_ray_train

# parts of a call of `rayps.train`: name, module, class, method; each is timed at its first call
PARTS = (
    ("preflight", "rayps.runtime.driver.driver", "Driver", "preflight"),
    ("ray", "rayps.cluster.ray_cluster", "RayCluster", "local"),
    ("ray", "rayps.cluster.ray_cluster", "RayCluster", "join"),
    ("processes", "rayps.runtime.driver.worker_group", "WorkerGroup", "start"),
    ("state", "rayps.runtime.driver.worker_group", "WorkerGroup", "initial"),
    ("generation", "rayps.runtime.driver.worker_group", "WorkerGroup", "begin"),
)


def train(config: dict[str, Any]) -> dict[str, Any]:
    """Call `rayps.train`; return the wall clock at the call, and the seconds of its parts."""
    rayps = importlib.import_module("rayps")
    work = FirstSteps()
    work.folder = config["folder"]
    parts: dict[str, float] = {}
    began = time.time()
    call = rayps.train  # loads the modules of training
    parts["imports"] = time.time() - began
    at = time.time()
    importlib.import_module("rayps.cluster.ray_cluster")
    parts["import ray"] = time.time() - at
    for part, module, kind, method in PARTS:
        _time_first(parts, part, getattr(importlib.import_module(module), kind), method)
    call(work, workers=config["workers"], steps=STEPS, address=config["address"], progress=False)
    return {"began": began, "parts": parts}


def _time_first(parts: dict[str, float], part: str, kind: type, method: str) -> None:
    """Replace a method by one that stores the seconds of its first call in `parts`."""
    inner = vars(kind)[method]
    call: Callable[..., Any] = inner.__func__ if isinstance(inner, classmethod) else inner

    def timed(*args: Any, **kwargs: Any) -> Any:
        at = time.time()
        try:
            return call(*args, **kwargs)
        finally:
            parts.setdefault(part, time.time() - at)

    setattr(kind, method, classmethod(timed) if isinstance(inner, classmethod) else timed)


def open_ray(config: dict[str, Any]) -> dict[str, Any]:
    """Start a private Ray and end it; return the seconds of the import of ray and of `ray.init`."""
    began = time.time()
    module = importlib.import_module("rayps.cluster.ray_cluster")
    imported = time.time()
    cluster = module.RayCluster.local(cpus=config["workers"])
    parts = {"import ray": imported - began, "ray": time.time() - imported}
    cluster.close()
    return {"began": began, "parts": parts}


def main() -> None:
    """Run the scene that the command line names."""
    config = json.loads(sys.argv[1])
    scenes: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {"ray": open_ray, "ray_train": train_by_ray_train}
    found = scenes.get(config["scene"], train)(config)
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()

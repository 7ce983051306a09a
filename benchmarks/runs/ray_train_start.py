"""Ray Train as a peer of `python -m benchmarks start`: the first steps of `FirstSteps` in workers of a TorchTrainer.

It needs `pip install 'rayps[bench]'`.
"""

from __future__ import annotations

import importlib
import time
from typing import Any

from benchmarks.runs.first_steps import STEPS, FirstSteps


def train_by_ray_train(config: dict[str, Any]) -> dict[str, Any]:
    """Start a private Ray and train on it with Ray Train; return the wall clock at the call, and seconds of parts.

    `config` has "workers" and "folder", as for `benchmarks.runs.start_script`. If Ray Train is not installed, the
    result is {"skipped": reason}.
    """
    began = time.time()
    cluster_module = importlib.import_module("rayps.cluster.ray_cluster")
    imported = time.time()
    try:
        # not imported at the top of the file: it is installed only for this benchmark, and rayps does not need it
        train, torch_train = (importlib.import_module(f"ray.train{part}") for part in ("", ".torch"))
    except ImportError as error:
        return {"skipped": f"it needs Ray Train: pip install 'rayps[bench]' ({error})"}
    parts = {"import ray": imported - began, "import ray.train": time.time() - imported}
    at = time.time()
    cluster = cluster_module.RayCluster.local(cpus=config["workers"])
    parts["ray"] = time.time() - at
    try:
        trainer = torch_train.TorchTrainer(
            train_first_steps,
            train_loop_config={"folder": config["folder"]},
            scaling_config=train.ScalingConfig(num_workers=config["workers"], resources_per_worker={"CPU": 1}),
            run_config=train.RunConfig(storage_path=f"{config['folder']}-results"),
        )
        trainer.fit()
    finally:
        cluster.close()
    return {"began": began, "parts": parts}


def train_first_steps(config: dict[str, Any]) -> None:
    """Run one worker of the trainer: `STEPS` steps in DistributedDataParallel, which record their times."""
    context = importlib.import_module("ray.train").get_context()
    prepare = importlib.import_module("ray.train.torch").prepare_model
    make_steps(config["folder"], context.get_world_rank(), context.get_world_size(), prepare)


def make_steps(folder: str, rank: int, size: int, prepare: Any) -> None:
    """Make the first `STEPS` steps of `FirstSteps` on the batches of `rank`, with the model that `prepare` returns."""
    work = FirstSteps()
    work.folder = folder
    model = prepare(work.model())
    optimizer = work.optimizer(list(model.parameters()))
    batches = work.data().batches(rank=rank, size=size, seed=0, epoch=0)
    for _, batch in zip(range(STEPS), batches, strict=False):
        optimizer.zero_grad()
        work.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

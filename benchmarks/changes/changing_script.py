"""One contender of `python -m benchmarks elastic`: a cluster, a job on it, and two changes of the cluster.

    python -m benchmarks.changes.changing_script CONFIG

CONFIG is JSON, as `benchmarks.changes.changing_workers` writes it. The times of the notices are written to
`notices.json` in its folder.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.changes.changing_workers import RAY_TRAIN, find_new_group, read_steps
from rayps.cluster.local import until
from rayps.data.base import Batch, Data
from rayps.workload.base import Workload

WIDTH = 256
ROWS, BATCH = 1 << 20, 8
TRAINED = 30  # steps before each change
WAIT_SECONDS = 120.0  # seconds to wait for a change


def layers_of(megabytes: float) -> int:
    """Return the number of square layers of `WIDTH` that have so many 10^6 bytes of parameters."""
    return max(1, round(megabytes * 1e6 / 4 / WIDTH**2))


def record(folder: str, number: int) -> None:
    """Record that this process begins the step with this number."""
    with (Path(folder) / f"steps-{os.getpid()}").open("a", encoding="utf-8") as file:
        file.write(f"{time.time()} {number}\n")


class ChangingWorkload(Workload):
    """A model of square layers, whose loss sleeps and records the step by the number of its first row."""

    folder = ""
    step_seconds = 0.0
    layers = 1

    def model(self) -> nn.Module:
        """Return the layers."""
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(self.layers)))

    def data(self) -> Data:
        """Return rows that are one number each; an epoch has more of them than are trained."""
        data: Data = importlib.import_module("rayps").data.tensors(torch.arange(ROWS), batch_size=BATCH, shuffle=False)
        return data

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Record the step, sleep, and return the loss of a row of ones."""
        if model.training:
            record(self.folder, int(batch.x[0]))
            time.sleep(self.step_seconds)
        loss: Tensor = model(torch.ones(1, WIDTH)).square().mean()
        return loss

    def evaluation_data(self) -> Data:
        """Return one row."""
        data: Data = importlib.import_module("rayps").data.tensors(torch.arange(1), batch_size=1)
        return data


def train_by_rayps(config: dict[str, Any], address: str) -> None:
    """Train with rayps; `main` ends the process."""
    work = ChangingWorkload()
    work.folder, work.step_seconds = config["folder"], config["step_seconds"]
    work.layers = layers_of(config["megabytes"])
    importlib.import_module("rayps").train(
        work,
        strategy=config["strategy"],
        workers=(2, 4),
        epochs=1,
        elastic={"cooldown": 0, "gain": 0},
        address=address,
        progress=False,
    )


def train_by_ray_train(config: dict[str, Any], address: str) -> None:
    """Train with Ray Train's elastic trainer, with its options for changes and preemptions; `main` ends the process."""
    importlib.import_module("ray").init(address=address, log_to_driver=False)
    train, torch_train = (importlib.import_module(f"ray.train{part}") for part in ("", ".torch"))
    trainer = torch_train.TorchTrainer(
        ray_train_loop,
        train_loop_config=config,
        scaling_config=train.ScalingConfig(
            num_workers=(2, 4), resources_per_worker={"CPU": 1}, elastic_resize_monitor_interval_s=1.0
        ),
        run_config=train.RunConfig(
            storage_path=f"{config['folder']}/results",
            failure_config=train.FailureConfig(
                max_failures=-1, relax_collectives_on_preemption=True, preemption_grace_s=0.0
            ),
        ),
    )
    trainer.fit()


def ray_train_loop(config: dict[str, Any]) -> None:
    """Train in one worker of Ray Train, as its documentation shows for preemptible nodes.

    A checkpoint is saved every 20 steps, and at a notice.
    """
    train, torch_train = (importlib.import_module(f"ray.train{part}") for part in ("", ".torch"))
    context = train.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    work = ChangingWorkload()
    work.layers = layers_of(config["megabytes"])
    model = torch_train.prepare_model(work.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    first, kept = 0, train.get_checkpoint()
    if kept is not None:
        with kept.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt", weights_only=True)
        model.module.load_state_dict(state["model"])
        first = state["step"]
    heard = False
    for step in range(first, 1_000_000):
        record(config["folder"], step * 8 + rank)
        time.sleep(config["step_seconds"])
        optimizer.zero_grad()
        model(torch.ones(1, WIDTH)).square().mean().backward()
        optimizer.step()
        notice = train.get_preemption_info() is not None
        if (notice and not heard) or (step + 1) % 20 == 0:
            with tempfile.TemporaryDirectory() as folder:
                saved = None
                if rank == 0:
                    torch.save({"model": model.module.state_dict(), "step": step + 1}, Path(folder) / "state.pt")
                    saved = train.Checkpoint.from_directory(folder)
                train.report({"size": size}, checkpoint=saved)
        heard = heard or notice


def change_nodes(cluster: Any, config: dict[str, Any]) -> list[tuple[str, float, int]]:
    """Let a node join the cluster and drain it again, while the job trains; return the times of the two notices."""
    folder, notices = Path(config["folder"]), []

    def trains(size: int, after: float) -> bool:
        steps = [step for step in read_steps(folder) if step.at > after]
        found = find_new_group(steps, size)
        return found is not None and sum(step.at >= found[0] for step in steps) >= TRAINED * size

    if not until(lambda: trains(2, 0.0), WAIT_SECONDS, 0.1):
        raise SystemExit("the job has not begun to train with 2 workers")
    at = time.time()
    node = cluster.add_node(num_cpus=2)
    notices.append(("2 to 4", at, 4))
    if not until(lambda: trains(4, at), WAIT_SECONDS, 0.1):
        raise SystemExit("the job has not grown to 4 workers")
    at = time.time()
    ray_command = Path(sys.executable).parent / "ray"
    words = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
    subprocess.run(
        [
            str(ray_command),
            "drain-node",
            "--address",
            cluster.address,
            "--node-id",
            node.node_id,
            "--deadline-remaining-seconds",
            str(int(config["deadline"])),
            *words,
        ],
        check=True,
    )
    at = time.time()
    notices.append(("4 to 2", at, 2))
    until(lambda: time.time() > at + config["deadline"] or trains(2, at), config["deadline"] + 1, 0.1)
    until(lambda: time.time() > at + config["deadline"], config["deadline"] + 1, 0.1)
    cluster.remove_node(node, allow_graceful=False)
    until(lambda: trains(2, at), WAIT_SECONDS, 0.1)
    return notices


def main() -> None:
    """Run the contender that the command line names, and end this process."""
    config = json.loads(sys.argv[1])
    os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
    cluster = importlib.import_module("ray.cluster_utils").Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False}
    )
    try:
        train = train_by_ray_train if config["contender"] == RAY_TRAIN else train_by_rayps
        threading.Thread(target=train, args=(config, cluster.address), daemon=True, name="job").start()
        notices = change_nodes(cluster, config)
        Path(config["folder"], "notices.json").write_text(json.dumps(notices))
    finally:
        with contextlib.suppress(Exception):  # the job still uses the cluster
            importlib.import_module("ray").shutdown()
        with contextlib.suppress(Exception):
            cluster.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # the job's threads still run


if __name__ == "__main__":
    main()

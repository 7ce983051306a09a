"""Measure a training step: AllReduce in the real Worker, torch's DDP, and workers without communication.

Contenders alternate in one run. In the same Ray actors: `own` (AllReduce), `one_bucket` (AllReduce without overlap of
communication and backward), `ddp` (DistributedDataParallel on gloo) and `alone` (without communication). In their own
processes: `ddp_plain` (DDP in plain processes, while Ray is idle) and `ray_train` (TorchTrainer, which wraps the model
in DDP). The functions return rows and print nothing.
"""

from __future__ import annotations

import os
import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.distributed as dist
from rayps_client.errors import ConfigError
from torch import nn

from rayps.bench.contender import plain_steps, workload
from rayps.bench.parallel_calls import call_all
from rayps.bench.peer import peer
from rayps.bench.plain_processes import PlainActor
from rayps.bench.table import BenchRow, Opt, Workers
from rayps.bench.worker_steps import worker_steps
from rayps.cluster.local import ActorHandle, Cluster
from rayps.comm.ring import Ring

CONTENDERS = ("own", "one_bucket", "alone", "ddp", "ddp_plain", "ray_train")
DEFAULT = "own,one_bucket,alone,ddp"


@dataclass(frozen=True, slots=True)
class StepRow(BenchRow):
    """One contender. Figures are medians. `rate` is in steps per second; all times are in milliseconds per step."""

    columns: ClassVar[str] = (
        "contender | rate: steps/s | step: ms a step | cpu: cpu ms | compute | data: batches | waiting | "
        "moving | times_ddp: x ddp | of_alone: of alone | load"
    )

    contender: str
    workers: int
    parameters: int
    repeats: int
    rate: float
    step: float  # the whole step
    cpu: float  # CPU time of the worker's process, without waits
    compute: float | None  # forward, backward and the optimizer, from the worker's metric points
    data: float | None  # loading batches
    waiting: float | None  # waiting for other ranks, beyond `compute`
    moving: float | None  # sending and receiving gradients, beyond `compute`
    times_ddp: float | None  # rate / rate of ddp (without ddp: of ddp_plain, else of ray_train)
    of_alone: float | None  # rate / rate of alone
    load: float  # the system's load average over a minute, before the measurement


class StepBench:
    """One worker of the benchmark, as an actor. It runs all contenders that need no processes of their own, in turn."""

    def __init__(self, rank: int, size: int, hidden: int | None, model: str = "mlp") -> None:
        torch.set_num_threads(1)
        self._rank, self._size, self._work = rank, size, workload(model, hidden, size)
        self._turns: dict[str, Callable[[int], dict[str, float]]] = {}
        self._rings: list[Ring] = []

    def port(self) -> int:
        """Open the store by which DDP's ranks find each other; return its port."""
        self._store = dist.TCPStore("127.0.0.1", 0, self._size, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        return int(self._store.port)

    def prepare(self, name: str, contenders: list[str], port: int) -> None:
        """Make the model and the connections of each contender that runs in this actor."""
        for contender in contenders:
            if contender == "ddp":
                self._turns[contender] = self._ddp(port)
            elif contender == "alone":
                self._turns[contender] = plain_steps(self._work, self._work.model())
            elif contender not in ("ray_train", "ddp_plain"):
                self._turns[contender] = self._own(f"{name}-{contender}", 0 if contender == "one_bucket" else None)

    def turn(self, contender: str, steps: int) -> dict[str, float]:
        """Make `steps` steps of one contender; return milliseconds per step, as the total and for each part."""
        start = time.process_time()
        found = self._turns[contender](steps)
        return found | {"cpu": 1000 * (time.process_time() - start) / steps}

    def close(self) -> None:
        """Close the rings and DDP's group."""
        for ring in self._rings:
            ring.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _ddp(self, port: int) -> Callable[[int], dict[str, float]]:
        store = self._store if self._rank == 0 else dist.TCPStore("127.0.0.1", port, self._size)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=self._rank, world_size=self._size)
        return plain_steps(self._work, nn.parallel.DistributedDataParallel(self._work.model()))

    def _own(self, name: str, bucket_mb: float | None) -> Callable[[int], dict[str, float]]:
        self._rings.append(Ring.join(name, self._rank, self._size))
        return worker_steps(self._work, self._rings[-1], bucket_mb)


def bench_step(
    cluster: Cluster,
    workers: Workers = 2,
    contenders: Annotated[
        Sequence[str],
        Opt(
            "Contenders: own (AllReduce), one_bucket (AllReduce without overlap), alone (no communication), "
            "ddp, ddp_plain (DDP in plain processes), ray_train."
        ),
    ] = ("own", "one_bucket", "alone", "ddp"),
    *,
    model: Annotated[str, Opt("mlp, or lm (a small GPT-2: many parameters of many sizes).")] = "mlp",
    hidden: Annotated[
        int | None, Opt("Width of the layers: 2048 (4.3 million parameters) for mlp, 256 (4.7 million) for lm.")
    ] = None,
    steps: int = 20,
    repeats: Annotated[int, Opt("Number of measurements for each contender, of 20 steps each.")] = 9,
    timeout: float = 120.0,
) -> list[StepRow]:
    """Measure training steps with one thread per worker: a row for each contender.

    `model` is "mlp" (64-hidden-hidden-10, SGD, batch 32) or "lm" (a GPT-2 of 4 layers, AdamW, 4 sequences of 64
    words). Each contender makes `repeats` turns of `steps` steps. The order of the contenders changes with each turn.

    Raises:
        ConfigError: there is no such contender or model.
        ClusterError: an actor died.
        LinkError: a worker did not answer the others.
    """
    for contender in contenders:
        if contender not in CONTENDERS:
            raise ConfigError(f"no contender {contender!r}; use some of {', '.join(CONTENDERS)}", contender=contender)
    load, name, names = os.getloadavg()[0], f"step-{secrets.token_hex(4)}", list(contenders)
    actors: list[ActorHandle] = []
    plain: list[PlainActor] = []
    found: dict[str, list[dict[str, float]]] = {contender: [] for contender in names}
    parameters = sum(p.numel() for p in workload(model, hidden, 1).model().parameters())
    train = peer("ray_train:RayTrain", workers, model, hidden, timeout) if "ray_train" in names else None
    try:
        actors += [cluster.spawn("rayps.bench.step:StepBench", rank, workers, hidden, model) for rank in range(workers)]
        port = actors[0].call("port").result(timeout)
        call_all(actors, "prepare", name, names, port, timeout=timeout)
        if "ddp_plain" in names:
            plain += [PlainActor(StepBench, rank, workers, hidden, model) for rank in range(workers)]
            port = plain[0].call("port").result(timeout)
            call_all(plain, "prepare", name, ["ddp"], port, timeout=timeout)
        for turn in range(repeats + 1):
            for contender in names[turn % len(names) :] + names[: turn % len(names)]:
                if contender == "ray_train":
                    assert train is not None
                    parts = train.turn(steps)
                elif contender == "ddp_plain":
                    parts = call_all(plain, "turn", "ddp", steps, timeout=timeout)
                else:
                    parts = call_all(actors, "turn", contender, steps, timeout=timeout)
                if turn:  # turn 0 is the warm-up: it touches new pages and learns the order of gradients in backward
                    found[contender].append(max(parts, key=lambda part: part["step"]))
        call_all(actors, "close", timeout=timeout)
        call_all(plain, "close", timeout=timeout)
    finally:
        if train is not None:
            train.close()
        for actor in actors:
            cluster.kill(actor)
        for process in plain:
            process.kill()
    return _rows(found, workers, parameters, repeats, load)


def _rows(
    found: dict[str, list[dict[str, float]]], workers: int, parameters: int, repeats: int, load: float
) -> list[StepRow]:
    medians = {name: statistics.median(turn["step"] for turn in turns) for name, turns in found.items()}
    ddp = next((medians[name] for name in ("ddp", "ddp_plain", "ray_train") if name in medians), None)
    alone = medians.get("alone")

    def part(name: str, key: str) -> float | None:
        return statistics.median(turn[key] for turn in found[name]) if key in found[name][0] else None

    return [
        StepRow(
            name,
            workers,
            parameters,
            repeats,
            1000 / step,
            step,
            part(name, "cpu") or 0.0,
            part(name, "compute"),
            part(name, "data"),
            part(name, "wait"),
            part(name, "move"),
            ddp / step if ddp else None,
            alone / step if alone else None,
            load,
        )
        for name, step in medians.items()
    ]

"""Steps of `AllReduce` in the real worker, for the benchmarks of training steps."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

from rayps.comm.ring import Ring
from rayps.core.job.records import Point
from rayps.core.rows.phase_rounds import Boundary
from rayps.strategies.all_reduce import AllReduce
from rayps.tensors.flat import FlatModel
from rayps.tensors.snapshot import Snapshot
from rayps.worker.connections import WorkerConnections
from rayps.worker.loops.sync_gradients import SyncGradients
from rayps.worker.plan import EvaluationPlan, PeerAddresses, SnapshotPlan, WorkerPlan
from rayps.worker.run import PlanRun
from rayps.workload.base import Workload


def worker_loop(work: Workload, ring: Ring, bucket_mb: float | None = None, device: str = "cpu") -> SyncGradients:
    """Build the worker of `AllReduce` over a ring, at round 0. `bucket_mb` is that of `AllReduce`."""
    flat = FlatModel(work.model())
    plan = WorkerPlan(
        generation=0,
        rank=ring.rank,
        size=ring.size,
        strategy=AllReduce(bucket_mb=bucket_mb),
        peers=PeerAddresses(),
        seed=0,
        start=0,
        end=0,
        snapshots=SnapshotPlan(Boundary(0, -1)),
        evaluation=EvaluationPlan(done=1 << 62),
        timeout=60.0,
    )
    peers = WorkerConnections(None)
    peers.ring = ring
    loop = SyncGradients(work, plan, peers, device)
    loop.load_state_dict(Snapshot(flat.layout, flat.vector))
    return loop


def run_steps(loop: SyncGradients, steps: int, report: Callable[[Point], bool]) -> None:
    """Make a number of steps, without checkpoints. `report` receives the points, and returns True."""
    loop.w.plan = dataclasses.replace(loop.w.plan, end=loop.w.position + steps)
    PlanRun(loop, report, lambda part, pin: None, lambda: loop.w.position >= loop.w.plan.end).run()


def worker_steps(work: Workload, ring: Ring, bucket_mb: float | None) -> Callable[[int], dict[str, float]]:
    """Return a function that makes a number of steps over `ring`, and returns milliseconds per step.

    The result of that function has "step" (the total), "compute", "data", "wait" and "move". All ranks must make the
    same calls. `bucket_mb` is that of `AllReduce`.
    """
    loop = worker_loop(work, ring, bucket_mb)

    def turn(steps: int) -> dict[str, float]:
        points: list[Point] = []

        def report(point: Point) -> bool:
            points.append(point)
            return True

        start = time.perf_counter()
        run_steps(loop, steps, report)
        step = 1000 * (time.perf_counter() - start) / steps
        rounds = [p for p in points if p["kind"] == "round"]
        parts = {key: 1000 * statistics.mean(p[key] for p in rounds) for key in ("compute", "data", "wait", "move")}
        return {"step": step} | parts

    return turn

"""Compare a job's result with that of a run without faults: equal bits where the strategy promises them, else close.

A strategy whose workers run in step repeats lost rounds with the same rows and random numbers. Its result after any
death is that of the run without it. The result of an asynchronous strategy depends on the order in which pushes arrive,
also without faults; its final metrics must be close to those of the run without faults.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from rayps_client.errors import ConfigError

from rayps.core.strategy.topology import runs_in_step
from rayps.core.urls import Location
from rayps.strategies.catalogue import parse
from rayps.strategies.job import JobSpec
from rayps.tensors.checkpoints import checkpoint
from rayps_chaos.history import HistoryCheck

ROUNDING = 1e-5  # the largest relative difference that counts as another order of the same sums
CLOSE = 0.1  # the largest relative difference of a metric, of a strategy that promises no bits
_MODEL = "model/"


def promises_bits(spec: JobSpec) -> bool:
    """Return whether all strategies of a job run in step; False for a user's own strategy or loop."""
    if spec.run is not None:
        return False
    try:
        return all(runs_in_step(phase.strategy) for phase in parse(spec.strategy))
    except ConfigError:  # a strategy in the user's file, which is not imported here
        return False


def final_parameters(path: Location) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a checkpoint by name. Raises CheckpointError if it cannot be read."""
    tensors = checkpoint.load(path).tensors
    return {name: tensor for name, tensor in tensors.items() if name.startswith(_MODEL)}


def compare_parameters(found: Mapping[str, torch.Tensor], law: Mapping[str, torch.Tensor]) -> HistoryCheck:
    """Compare the parameters of a job in step with those of the run without faults."""
    name = "result of the law"
    if found.keys() != law.keys():
        return HistoryCheck(name, False, f"other parameters: {sorted(found.keys() ^ law.keys())[:3]}")
    if all(torch.equal(found[key], law[key]) for key in law):
        return HistoryCheck(name, True, f"{len(law)} tensors have the bits of the run without faults")
    worst = max(_difference(found[key], law[key]) for key in law)
    words = f"the largest relative difference from the run without faults is {worst:.2g}"
    return HistoryCheck(name, worst <= ROUNDING, f"{words} (at most {ROUNDING:g}: another order of sums)")


def _difference(found: torch.Tensor, law: torch.Tensor) -> float:
    if found.shape != law.shape:
        return float("inf")
    scale = max(float(law.double().abs().max()), 1e-30) if law.numel() else 1.0
    return float((found.double() - law.double()).abs().max()) / scale if law.numel() else 0.0


def compare_metrics(found: Mapping[str, float] | None, law: Mapping[str, float] | None) -> HistoryCheck:
    """Compare the final metrics of a job out of step with those of the run without faults."""
    name, ours, theirs = "result of the law", found or {}, law or {}
    if not theirs or ours.keys() != theirs.keys():
        return HistoryCheck(name, not theirs and not ours, f"metrics {sorted(ours)}, without faults {sorted(theirs)}")
    worst = max(theirs, key=lambda key: _relative(ours[key], theirs[key]))
    words = f"{worst} is {ours[worst]:.4g}, without faults {theirs[worst]:.4g} (bound: {CLOSE:.0%})"
    return HistoryCheck(name, _relative(ours[worst], theirs[worst]) <= CLOSE, words)


def _relative(found: float, law: float) -> float:
    return abs(found - law) / max(abs(law), 1e-12)


def check_slots(found: Mapping[str, torch.Tensor], epochs: int) -> HistoryCheck:
    """Check the slots of `rayps_chaos.ledger_work`: each row's push was applied once in each epoch."""
    slots = torch.cat([tensor.reshape(-1) for tensor in found.values()])
    twice, missing = int((slots > epochs).sum()), int((slots < epochs).sum())
    words = f"{slots.numel()} slots of {epochs} pushes each: {missing} have fewer, {twice} have more"
    return HistoryCheck("each push once", not twice and not missing, words)

"""Workloads of the training step benchmark, by name, and the plain torch training loop of its other contenders."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from rayps_client.errors import ConfigError
from torch import nn

from rayps.bench.gpt import Gpt
from rayps.bench.mlp import Mlp
from rayps.data.base import Batch
from rayps.workload.base import Workload
from rayps.workload.loss_result import loss_result

MODELS = {"mlp": (Mlp, 2048), "lm": (Gpt, 256)}  # workload, and its default width


def workload(model: str, hidden: int | None, workers: int) -> Workload:
    """Make the workload `model` for `workers` workers. If `hidden` is None, its width is 2048 (mlp) or 256 (lm).

    Raises:
        ConfigError: there is no such model.
    """
    if model not in MODELS:
        raise ConfigError(f"no model {model!r}; use one of {', '.join(MODELS)}", model=model)
    kind, width = MODELS[model]
    return kind(hidden or width, workers)


def plain_steps(work: Workload, model: nn.Module) -> Callable[[int], dict[str, float]]:
    """Return a plain torch training loop: a function that makes a number of steps and returns milliseconds per step.

    The result of that function has "step" (the total) and "data" (the time to load batches).
    """
    optimizer = work.optimizer(list(model.parameters()))
    batches = _endless(work)

    def turn(steps: int) -> dict[str, float]:
        start, data = time.perf_counter(), 0.0
        for _ in range(steps):
            began = time.perf_counter()
            batch = next(batches)
            data += time.perf_counter() - began
            optimizer.zero_grad()
            loss = loss_result(work.loss(model, batch), batch.size).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            loss.item()
        return {"step": 1000 * (time.perf_counter() - start) / steps, "data": 1000 * data / steps}

    return turn


def _endless(work: Workload) -> Iterator[Batch]:
    rows = work.data()
    while True:
        yield from rows.batches(rank=0, size=1, seed=0, epoch=0)

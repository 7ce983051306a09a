"""What a trial's process does: one batch through the user's model, loss, backward and evaluate. See `trial`."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rayps.core.errors import RaypsError, WorkloadError
from rayps.core.user_code import user_code
from rayps.data.base import Batch, Data
from rayps.parallel.pipeline.loss_proxy import parts
from rayps.tensors.optim import made
from rayps.workload.base import Workload, unpack
from rayps.workload.model import model_of
from rayps.workload.part import Whole, number

FEW_ROWS = 8  # of a batch, at first
_NO_VERDICT = (OSError, ImportError, MemoryError, KeyboardInterrupt)  # of a process that is not a worker's
_DEVICES = ("CUDA", "NVIDIA", "cuda")  # in the message of an error that is one of the device


@dataclass(frozen=True, slots=True)
class TrialRequest:
    """What the process is given: the packed workload, and what makes its first batch that of worker 0."""

    packed: bytes
    workers: int
    seed: int
    federated: bool = False
    working_dir: str | None = None
    path: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """`error`: the job fails. `skipped`: why there is none, although it was tried."""

    error: RaypsError | None = None
    skipped: str | None = None


def main() -> None:
    """Read a Request from stdin, write a Verdict to stdout, and leave."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what the user's code prints is printed by the workers
    request: TrialRequest = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    with contextlib.suppress(OSError):  # where memory is short this process is the one to be ended
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    sys.path[:] = request.path
    torch.set_num_threads(1)
    verdict = judged(request)
    try:
        text = pickle.dumps(verdict)
    except Exception as error:  # whatever the user's objects in an error's data raise
        text = pickle.dumps(Verdict(skipped=f"its answer cannot be sent: {type(error).__name__}: {error}"))
    answers.write(text)
    answers.flush()
    os._exit(0)  # threads of the user's own are not waited for


def _leave_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def judged(request: TrialRequest) -> Verdict:
    """Try the request's first batch. Never raises."""
    try:
        return Verdict(skipped=_tried(unpack(request.packed), request))
    except RaypsError as error:
        cause = error.__cause__
        said = error.message.splitlines()[0]
        if isinstance(cause, _NO_VERDICT) or _of_ray(cause):
            return Verdict(skipped=said)
        if error.data.get("memory") or any(word in said for word in _DEVICES):
            return Verdict(skipped=said)
        return Verdict(error=error)
    except BaseException as error:  # no verdict on the job
        return Verdict(skipped=f"{type(error).__name__}: {error}")


def _of_ray(error: BaseException | None) -> bool:
    """Whether an error was raised inside Ray: the user's code asks for a Ray, and only the workers are in one."""
    file = getattr(sys.modules.get("ray"), "__file__", None)
    if error is None or file is None:
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).is_relative_to(Path(file).parent)


def _tried(workload: Workload, request: TrialRequest) -> str | None:
    """Why no batch could be tried; None: one was. In a worker's order. Raises WorkloadError, DataError."""
    try:
        with user_code("data"):
            data = workload.data()
        torch.manual_seed(request.seed)
        held = Whole(workload, model_of(workload))
        made(workload.optimizer, held.parameters)
        with user_code("evaluation_data"):
            evaluation = workload.evaluation_data()
    except RaypsError as error:  # in the driver they could be made
        return error.message.splitlines()[0]
    batch = _first(data, request)
    if batch is None:
        return "worker-0 has no row"
    _with_few(batch, lambda some: _learn(held, some))
    with user_code("evaluation_data"):
        judged_on = next(iter(evaluation.batches(rank=0, size=request.workers, seed=request.seed, epoch=0)), None)
    if judged_on is not None and judged_on.size:
        _with_few(judged_on, lambda some: _evaluate(held, some))
    return None


def _first(data: Data, request: TrialRequest) -> Batch | None:
    """The first batch of worker 0, or of the first client."""
    with user_code("data"):
        if request.federated:
            clients = data.clients
            first = next((k for k in range(clients.count) if len(clients.rows(k))), None)
            return None if first is None else clients.batch(clients.rows(first)[: data.batch_size])
        found = next(iter(data.batches(rank=0, size=request.workers, seed=request.seed, epoch=0)), None)
    return found if found is not None and found.size else None


def _with_few(batch: Batch, run: Callable[[Batch], None]) -> None:
    """Run on a few rows; what fails with these must fail with the whole batch too."""
    few = batch
    if batch.size > FEW_ROWS:
        with contextlib.suppress(WorkloadError):  # it cannot be cut
            few = parts(batch, batch.size // FEW_ROWS)[0]
    try:
        run(few)
    except RaypsError:
        if few is batch:
            raise
        run(batch)


def _learn(held: Whole, batch: Batch) -> None:
    held.module.train()
    with _given(batch):
        held.backward(batch, 0, scalar)


def _evaluate(held: Whole, batch: Batch) -> None:
    held.module.eval()
    with _given(batch), torch.no_grad(), user_code("evaluate"):
        for name, mean in held.evaluate(batch).items():
            number(name, mean)


def scalar(loss: Any) -> float:
    """A loss as a number. Raises WorkloadError: it is none."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise WorkloadError(f"loss(model, batch) gave {shape}: return one number as a tensor, the mean over the batch")
    return float(loss.item())


@contextlib.contextmanager
def _given(batch: Batch) -> Iterator[None]:
    """Errors say what the batch was."""
    try:
        yield
    except WorkloadError as error:
        told = WorkloadError(f"{error.message}\ngiven a batch with {words(batch)}", **error.data)
        raise told from error.__cause__


def words(batch: Batch) -> str:
    """What a batch holds: `x float32[8, 5], y int64[8]`."""
    return f"x {_words(batch.x)}, y {_words(batch.y)}"


def _words(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_words(item)}" for key, item in list(value.items())[:8]) + "}"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(_words(item) for item in _some(value)) + ")"
    return type(value).__name__


def _some(values: Sequence[Any]) -> Sequence[Any]:
    return values[:4]

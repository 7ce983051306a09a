"""Train and evaluate one small batch, in a child process of the driver, and say whether it works.

The child has its own random numbers, and its results are dropped. Therefore the job's results are the same with and
without a child. A failure of the child alone (it exits, hangs, lacks memory or a file) does not end the job.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rayps_client.errors import RaypsError, WorkloadError
from rayps_client.trainers.module_modes import evaluating
from torch import Tensor

from rayps.core.job.user_code import user_code
from rayps.core.job.user_module import unpack
from rayps.data.base import Batch, Data, Nested
from rayps.data.batch_parts import cut_batch
from rayps.data.single_rows import stacks_of
from rayps.tensors.learning_rate import recipe_of
from rayps.tensors.named_parameters import NamedParameters
from rayps.tensors.optim import made
from rayps.tensors.user_loss import check_loss
from rayps.workload.base import Workload
from rayps.workload.checkpoint_activations import checkpoint_activations
from rayps.workload.model import model_of
from rayps.workload.model_part import Whole
from rayps.workload.single_row_loss import check_single_rows

FEW_ROWS = 8  # the number of rows with which a batch is tried first
SINGLE_ROWS = 32  # the number of private rows whose losses are compared with that of their batch
# causes of errors in the child process that need not occur in a worker
_NOT_OF_THE_JOB = (OSError, ImportError, MemoryError, KeyboardInterrupt)
_DEVICES = ("CUDA", "NVIDIA", "cuda")  # words in the messages of device errors


@dataclass(frozen=True, slots=True)
class TrialRequest:
    """The input of the child process: the packed workload, and the values that select the first batch of worker 0."""

    packed: bytes
    workers: int
    seed: int
    federated: bool = False
    private: bool = False  # whether the gradients of single rows are learned
    watched: bool = False  # whether a callback watches a metric other than the loss
    working_dir: str | None = None
    path: tuple[str, ...] = ()
    argv: tuple[str, ...] = ("",)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of the child process: the `error` with which the job fails, or why the trial says nothing (`skipped`).

    Both are None if the batch was tried without an error. `warning` is for the user; None if there is none. `metrics`
    are the names that evaluations have; empty if the request asks for none, or two batches have other names.
    """

    error: RaypsError | None = None
    skipped: str | None = None
    warning: str | None = None
    metrics: tuple[str, ...] = ()


def main() -> None:
    """Read a TrialRequest from stdin, write a Verdict to stdout, and exit."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # drop what the user's code prints, because the workers print it too
    request: TrialRequest = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    with contextlib.suppress(OSError):  # if memory runs out, the kernel should end this process
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    sys.path[:], sys.argv[:] = request.path, request.argv
    torch.set_num_threads(1)
    verdict = try_batch(request)
    try:
        text = pickle.dumps(verdict)
    except Exception as error:  # an error's data may have objects of the user, which may raise any exception
        text = pickle.dumps(Verdict(skipped=f"its result cannot be sent: {type(error).__name__}: {error}"))
    answers.write(text)
    answers.flush()
    os._exit(0)  # do not wait for the user's threads


def _exit_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def try_batch(request: TrialRequest) -> Verdict:
    """Try the first batch that the request selects, and return the verdict. No exception is raised."""
    try:
        return _train_and_evaluate(unpack(request.packed, shared=True), request)
    except RaypsError as error:
        cause = error.__cause__
        first_line = error.message.splitlines()[0]
        if isinstance(cause, _NOT_OF_THE_JOB) or _of_ray(cause):
            return Verdict(skipped=first_line)
        if error.data.get("memory") or any(word in first_line for word in _DEVICES):
            return Verdict(skipped=first_line)
        return Verdict(error=error)
    except BaseException as error:  # such an error says nothing about the job
        return Verdict(skipped=f"{type(error).__name__}: {error}")


def _of_ray(error: BaseException | None) -> bool:
    """Return whether an error was raised inside Ray. The user's code may call Ray, which only workers have joined."""
    file = getattr(sys.modules.get("ray"), "__file__", None)
    if error is None or file is None:
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).is_relative_to(Path(file).parent)


def _train_and_evaluate(workload: Workload, request: TrialRequest) -> Verdict:
    """Call the user's methods with one batch, in the order in which a worker calls them.

    Raises WorkloadError or DataError if the user's code fails, or its loss does not suit private rows.
    """
    try:
        with user_code("data"):
            data = workload.data()
        torch.manual_seed(request.seed)
        held = Whole(workload, model_of(workload))
        checkpoint_activations(held.module, workload.checkpoint_activations)
        made(recipe_of(workload), NamedParameters(held.parameters, held.layout.names))
        with user_code("evaluation_data"):
            evaluation = workload.evaluation_data()
    except RaypsError as error:  # not an error of the job, because the driver's process could call these methods
        return Verdict(skipped=error.message.splitlines()[0])
    batch = _first(data, request)
    if batch is None:
        return Verdict(skipped="worker-0 has no row")
    held.check_weight.is_checked = True  # the whole batch says more than a few rows
    _with_few(batch, lambda some: _train(held, some))
    held.check_weight.of_pairs(batch)
    with user_code("evaluation_data"):
        evaluation_batch = next(
            iter(evaluation.batches(rank=0, size=request.workers, seed=request.seed, epoch=0)), None
        )
    names: list[tuple[str, ...]] = []
    if evaluation_batch is not None and evaluation_batch.size:
        _with_few(evaluation_batch, lambda some: names.append(_evaluate(held, some)))
        if request.watched:
            names.append(_evaluate(held, evaluation_batch))
    warning = _warn_of_rows(workload, held, data, request.seed) if request.private else None
    return Verdict(warning=warning, metrics=names[0] if request.watched and len(set(names)) == 1 else ())


def _warn_of_rows(workload: Workload, held: Whole, data: Data, seed: int) -> str | None:
    """Return what `check_single_rows` says of some rows of the data. Raises the errors of this function."""
    with user_code("data"):
        stacks = stacks_of(data, data.order(seed, 0)[:SINGLE_ROWS], SINGLE_ROWS)
    return check_single_rows(workload, held, stacks)


def _first(data: Data, request: TrialRequest) -> Batch | None:
    """Return the first batch of worker 0, or of the first client that has rows; None if there are no rows."""
    with user_code("data"):
        if request.federated:
            clients = data.clients
            first = next((k for k in range(clients.count) if len(clients.rows(k))), None)
            return None if first is None else clients.batch(clients.rows(first)[: data.batch_size])
        found = next(iter(data.batches(rank=0, size=request.workers, seed=request.seed, epoch=0)), None)
    return found if found is not None and found.size else None


def _with_few(batch: Batch, run: Callable[[Batch], None]) -> None:
    """Call `run` with a few rows of the batch. If that fails, call it with the whole batch."""
    few = batch
    if batch.size > FEW_ROWS:
        with contextlib.suppress(WorkloadError):  # the batch cannot be cut
            few = cut_batch(batch, batch.size // FEW_ROWS)[0]
    try:
        run(few)
    except RaypsError:
        if few is batch:
            raise
        run(batch)


def _train(held: Whole, batch: Batch) -> None:
    with _batch_in_errors(batch):
        held.backward(batch, 0, scalar)


def _evaluate(held: Whole, batch: Batch) -> tuple[str, ...]:
    """Evaluate a batch, and return the names of its metrics."""
    with _batch_in_errors(batch), evaluating(held.module), torch.no_grad(), user_code("evaluate"):
        return tuple(held.evaluate(batch))


def scalar(loss: Nested) -> float:
    """Return a training loss as a number. Raises WorkloadError if `check_loss` refuses it."""
    return float(check_loss(loss).item())


@contextlib.contextmanager
def _batch_in_errors(batch: Batch) -> Iterator[None]:
    """Add a description of the batch to errors that are raised inside the block."""
    try:
        yield
    except WorkloadError as error:
        described = WorkloadError(f"{error.message}\ngiven a batch with {words(batch)}", **error.data)
        raise described from error.__cause__


def words(batch: Batch) -> str:
    """Describe a batch: `x float32[8, 5], y int64[8]`."""
    return f"x {_words(batch.x)}, y {_words(batch.y)}"


def _words(value: Nested) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_words(item)}" for key, item in list(value.items())[:8]) + "}"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(_words(item) for item in value[:4]) + ")"
    return type(value).__name__


# the most bytes of parameters, of a packed workload, or of data in memory, because the child has a copy of each

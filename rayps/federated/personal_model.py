"""Make the personal model of one client: the same bits at an evaluation, for a result and on a real client."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from rayps_client.trainers.module_modes import evaluating
from torch import Tensor, nn

from rayps.core.job.user_code import user_code
from rayps.core.metrics import Totals, add_totals, values_of
from rayps.data.base import Batch
from rayps.data.partition_rules import Ints
from rayps.federated.client import ClientRows, Task, Tensors, Trainer, personal_buffers
from rayps.federated.strategy_interface import ClientSide, Federation
from rayps.tensors.flat import FlatModel
from rayps.workload.base import Workload
from rayps.workload.model import apart, model_of
from rayps.workload.model_part import Whole

ROWS = 1024  # rows of a client that are evaluated at once
_BUFFERS = "buffers/"  # prefix, in a client's state, of its own buffers


@dataclass(frozen=True, slots=True)
class GlobalState:
    """The state of a job after some rounds, from which the personal models of its clients are made."""

    federation: Federation  # what the job's strategy declares
    seed: int
    round: int  # the number of rounds in the strategy's phase: that of the next round
    tick: int  # step of the workload's schedule in that round
    w: Tensor  # the parameters as one vector
    buffers: Mapping[str, Tensor]  # the buffers, and parameters that need no gradient, by name
    shared: Mapping[str, Tensor]  # the server's state

    def global_model(self, workload: Workload) -> nn.Module:
        """Return the model of all clients, in evaluation mode, on the CPU.

        Raises WorkloadError if the workload's model cannot be made.
        """
        with apart():
            flat = FlatModel(model_of(workload))
            flat.vector.copy_(self.w)
            flat.model.load_state_dict(dict(self.buffers), strict=False)
        return flat.model.eval()

    def task(self, client: int, state: Tensors, buffers: Mapping[str, Tensor]) -> Task:
        """Return the training of a client in the next round. `buffers` are those of the global model."""
        here = dict(buffers)
        return with_own_buffers(Task(self.seed, self.round, client, self.w, self.shared, state, here, self.tick))


def with_own_buffers(task: Task) -> Task:
    """Return a task that starts from the client's own buffers where its state has such."""
    own = {name.removeprefix(_BUFFERS): value for name, value in task.state.items() if name.startswith(_BUFFERS)}
    return replace(task, buffers={**task.buffers, **own})


def load_personal(trainer: Trainer, given: Federation, task: Task, rows: Callable[[], ClientRows]) -> None:
    """Set the trainer's model to a client's personal model at the start of the round of `task`.

    With `finetune` this is w_t after training on the client's rows; otherwise the model in the client's state, or w_t
    with the client's private layers and buffers. A client without a state has w_t. `rows` is called only to train.

    Raises:
        WorkloadError, DataError: the user's code or data failed.
    """
    side = given.client_side
    if side.finetune:
        trainer.finetune(given, task, rows(), side.finetune)
    elif side.model is not None and side.model in task.state:
        trainer.load(task.state[side.model], task.buffers | personal_buffers(task.state))
    else:
        trainer.load_start(side, task)


def has_personal(side: ClientSide, stored: bool) -> bool:
    """Return whether a client has a personal model. `stored`: whether a state of the client is stored."""
    return bool(side.finetune) or (side.measured and stored)


def personal_model(
    workload: Workload, given: GlobalState, client: int, state: Tensors, rows: Callable[[], ClientRows]
) -> nn.Module:
    """Return the personal model of the client with this number, in evaluation mode, on the CPU.

    `state` is the client's stored state. Torch's random state does not change.

    Raises:
        WorkloadError, DataError: the user's code or data failed.
    """
    with apart(), torch.enable_grad():
        model = model_of(workload)
        model.load_state_dict(dict(given.buffers), strict=False)
        trainer = Trainer(FlatModel(model), workload)
        here = {name: given.buffers[name] for name in trainer.buffers if name in given.buffers}
        load_personal(trainer, given.federation, given.task(client, state, here), rows)
        found = model_of(workload)
        tensors = {e.name: trainer.flat.vector[e.lo : e.hi].view(e.shape) for e in trainer.flat.layout.entries}
        found.load_state_dict({**given.buffers, **tensors, **trainer.copy_buffers()}, strict=False)
    return found.eval()


def evaluated_on(workload: Workload, model: nn.Module, rows: Ints, take: Callable[[Ints], Batch]) -> dict[str, float]:
    """Return the metrics of a model on the rows with these numbers, which `take` reads.

    Raises WorkloadError or DataError if the user's code or data failed.
    """
    return values_of(totals_on(workload, model, rows, take))


def totals_on(workload: Workload, model: nn.Module, rows: Ints, take: Callable[[Ints], Batch]) -> Totals:
    """Return the totals of a model's metrics on these rows, as `evaluated_on`. The model is in evaluation mode then."""
    part, totals = Whole(workload, model), Totals()
    with evaluating(model), torch.no_grad(), user_code("evaluate"):
        for lo in range(0, len(rows), ROWS):
            add_totals(totals, part.evaluate(take(rows[lo : lo + ROWS])))
    return totals


@contextmanager
def threads_of_torch(count: int) -> Iterator[None]:
    """Use `count` threads of torch in this block, because other numbers of threads round differently."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)

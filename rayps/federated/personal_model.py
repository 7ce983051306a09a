"""Set a model to the personal model of one client: the same bits at an evaluation, for a result and on a real client."""

from __future__ import annotations

from collections.abc import Callable

from rayps.federated.client import ClientRows, Task, Trainer, personal_buffers
from rayps.federated.strategy_interface import ClientSide, FederatedView


def load_personal(trainer: Trainer, strategy: FederatedView, task: Task, rows: Callable[[], ClientRows]) -> None:
    """Set the trainer's model to a client's personal model at the start of the round of `task`.

    With `finetune` this is w_t after training on the client's rows; otherwise the model in the client's state, or w_t
    with the client's private layers and buffers. A client without a state has w_t. `rows` is called only to train.

    Raises:
        WorkloadError, DataError: the user's code or data failed.
    """
    side = strategy.client_side
    if side.finetune:
        trainer.finetune(strategy, task, rows(), side.finetune)
    elif side.model is not None and side.model in task.state:
        trainer.load(task.state[side.model], task.buffers | personal_buffers(task.state))
    else:
        trainer.load_start(strategy, task)


def has_personal(side: ClientSide, stored: bool) -> bool:
    """Return whether a client has a personal model. `stored`: whether a state of the client is stored."""
    return bool(side.finetune) or (side.measured and stored)

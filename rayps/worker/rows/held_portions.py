"""What a worker with backup workers does with its portions: check that a step is over, save them, restore them."""

from __future__ import annotations

from rayps_client.errors import ConfigError
from torch import Tensor, tensor

from rayps.core.rows.step_rows import ByPortion
from rayps.tensors.snapshot import Snapshot
from rayps.worker.rows.batches import BatchStream

STATE = "portions"  # the key of the state in the values that are equal on all workers


def portions_of(stream: BatchStream) -> ByPortion:
    """Return the portions of a worker in step with backup workers."""
    assert isinstance(stream.blocks, ByPortion), "a worker with backup workers takes portions"
    return stream.blocks


def must_be_over(portions: ByPortion, position: int, name: str) -> None:
    """Raise ConfigError if the strategy's round has not computed a gradient with the batch. `name`: how it must."""
    if portions.walk.step != position:
        raise ConfigError(
            f"with backup workers a strategy's round calls {name}(batch) once, and no other exchange, because a "
            f"late worker takes part in none: call w.{name}, or leave out backup",
            field="backup",
        )


def restore_portions(portions: ByPortion, position: int, snapshot: Snapshot, shared: dict[str, Tensor]) -> None:
    """Continue after a snapshot at `position`, and remove the state of the portions from `shared`.

    The state has the snapshot's round, then what `PortionsWalk.state` returned after it.
    """
    held = shared.pop(STATE, None)
    state = None if held is None else held.tolist()
    known = state is not None and state[0] == snapshot.round == position
    portions.begin_at(position, state[1:] if state is not None and known else None)


def save_portions(portions: ByPortion, shared: dict[str, Tensor]) -> None:
    """Add the state of the portions to the values of a checkpoint that are equal on all workers."""
    state = portions.walk.state
    if state is None:
        shared.pop(STATE, None)
    else:
        shared[STATE] = tensor([portions.walk.step, *state])

"""Continue a run from the memory of its workers, after some of them were lost or others have joined.

The workers in step hold equal parameters after each round. A worker whose state is of the newest complete round is a
*holder*. If other workers lack this state, the first holder sends it to all over their new ring.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TypedDict

import torch
from rayps_client.errors import PeerLost
from torch import Tensor

from rayps.comm.ring import Ring
from rayps.core.job.continuation import Continuation
from rayps.tensors.checkpoints.checkpoint import Meta, SavedState
from rayps.tensors.snapshot import Snapshot
from rayps.tensors.training_state import TrainingState


class _Head(TypedDict):
    """What is sent before the tensors."""

    meta: Meta
    tensors: list[tuple[str, str, list[int]]]  # name, dtype and shape of each


_SMALL = 1 << 20  # tensors below so many bytes are sent together


@dataclass(frozen=True, slots=True)
class HeldState:
    """A worker's state after its newest complete round, as copies on the CPU.

    Its buffers have the frozen parameters that were changed, and no other ones; its memory is equal on all workers.
    """

    round: int
    state: TrainingState

    def on(self, base: Snapshot) -> Snapshot:
        """Return this state, with the frozen parameters of `base`."""
        found = replace(base.after(self.round, self.state), shared=self.state.memory)
        found.thaw(self.state.buffers)
        return found


def hand_over(plan: Continuation, rank: int, base: Snapshot, held: HeldState | None, ring: Ring) -> Snapshot:
    """Return the state from which this worker continues; send it to the workers that lack it, or receive it.

    All ranks call this function together. `held` is this worker's own state, or None.

    Raises:
        PeerLost: this worker does not hold the state that the driver expects of it.
        LinkError: a connection fails.
    """
    mine = held if held is not None and held.round == plan.round and rank in plan.holders else None
    if rank in plan.holders and mine is None:
        has = "none" if held is None else f"that of round {held.round}"
        raise PeerLost(f"worker-{rank} no longer has its state after round {plan.round}: it has {has}", peer="")
    if not plan.lacking(ring.size):
        assert mine is not None, "every rank is a holder"
        return mine.on(base)
    root = plan.holders[0]
    state = None if rank != root else _state_of(mine.on(base)) if mine is not None else None
    received = _broadcast(ring, root, state)
    return mine.on(base) if mine is not None else _read_received(received, base)


def _state_of(snapshot: Snapshot) -> SavedState:
    """Return the state without frozen parameters, which every worker has."""
    return snapshot.without_frozen().to_state()


def _read_received(state: SavedState, base: Snapshot) -> Snapshot:
    found = Snapshot.from_state(state)
    changed = found.buffers
    found.buffers, found.frozen, found.frozen_hash = base.buffers | changed, base.frozen, base.frozen_hash
    found.thaw(changed)
    return found


def _broadcast(ring: Ring, root: int, state: SavedState | None) -> SavedState:
    """Send named tensors and JSON data from rank `root` to all ranks, and return them. `state` is None elsewhere."""
    head = b""
    if state is not None:
        kinds = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in state.tensors.items()]
        head = json.dumps({"meta": state.meta, "tensors": kinds}).encode()
    length = ring.broadcast(torch.tensor([len(head)], dtype=torch.int64), root)
    text = torch.empty(int(length.item()), dtype=torch.uint8)
    if state is not None:
        text.copy_(torch.frombuffer(bytearray(head), dtype=torch.uint8))
    facts: _Head = json.loads(bytes(ring.broadcast(text, root).numpy()))
    tensors: dict[str, Tensor] = {}
    small: list[str] = []
    for name, dtype, shape in facts["tensors"]:
        given = None if state is None else state.tensors[name].detach().cpu().contiguous()
        tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype)) if given is None else given
        if tensors[name].nbytes < _SMALL:
            small.append(name)
        else:
            ring.broadcast(_as_bytes(tensors[name]), root)
    packed = torch.cat([torch.empty(0, dtype=torch.uint8), *(_as_bytes(tensors[name]) for name in small)])
    if packed.numel():
        ring.broadcast(packed, root)
    at = 0
    for name in small:
        part = _as_bytes(tensors[name])
        if state is None:
            part.copy_(packed[at : at + part.numel()])
        at += part.numel()
    return SavedState(tensors, facts["meta"])


def _as_bytes(t: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as a vector of bytes."""
    return t.reshape(-1).view(torch.uint8)

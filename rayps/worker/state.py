"""A worker's state as its share of a checkpoint, and taken over from one; its evaluation; what a meeting does to it."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rayps.comm.ring.compressed_mean import CompressedRing
from rayps.core.families import LOCAL_UPDATES
from rayps.core.user_code import user_code
from rayps.tensors import optim
from rayps.tensors.flat import Gradient
from rayps.tensors.local_state import LocalState, below
from rayps.tensors.snapshot import Snapshot
from rayps.worker.plan import WorkerPart
from rayps.workload.part import number

if TYPE_CHECKING:
    from rayps.worker.core import Worker

_FEEDBACK = "ring/"  # how the names of what a compressed ring has left out begin, in a worker's memory


class BackgroundMeans:
    """Means over the workers of vectors that a strategy sends now and then, compressed where it asks for it."""

    def __init__(self, ring: Any, sent: Any) -> None:
        """`sent` is the ring that compresses, or `ring` itself."""
        self._ring = ring
        self._slots: dict[int, CompressedRing] | None = {0: sent} if isinstance(sent, CompressedRing) else None

    def mean(self, vector: Tensor, samples: float = 1.0, *, exact: bool = False) -> Tensor:
        """See `WorkerView.mean`. Raises LinkError."""
        sent: Any = self._ring if exact or self._slots is None else self._slots[0]
        found: Tensor = sent.mean(Gradient(_packed(vector), samples))  # type: ignore[arg-type]
        return found

    def mean_later(self, vector: Tensor, samples: float, slot: int) -> Tensor:
        """See `WorkerView.mean_later`: the sum comes to lie in the parcel, with the sum of weights behind it.

        The parcel of a half-precision vector is float32: neither a sum weighted by samples nor their count fits into
        half precision.
        """
        if self._slots is not None:
            parcel = _packed(vector)
            self._slot(slot).mean_async(Gradient(parcel, samples))  # type: ignore[arg-type]
        else:
            parcel = _packed(vector, torch.promote_types(vector.dtype, torch.float32))
            parcel[:-1].mul_(samples) if samples else parcel.zero_()
            parcel[-1] = samples
            self._ring.sum_async(parcel)
        return parcel

    def _slot(self, slot: int) -> CompressedRing:
        assert self._slots is not None
        return self._slots.setdefault(slot, self._slots[0].another())

    def arrived(self, parcel: Tensor) -> Tensor:
        """See `WorkerView.arrived`; in the parcel's dtype. Raises LinkError."""
        self.settle()
        count = parcel[-1].item()
        return parcel[:-1] / count if count else torch.zeros_like(parcel[:-1])

    def settle(self) -> None:
        """Wait for what is under way. Raises LinkError."""
        self._ring.settle()

    def feedback(self) -> dict[str, Tensor]:
        """What compression has left out so far, by name."""
        slots = self._slots or {}
        return {
            f"{_FEEDBACK}{slot}/{name}": left for slot, sent in slots.items() for name, left in sent.feedback().items()
        }

    def restore(self, memory: dict[str, Tensor]) -> None:
        """Take that back out of a worker's memory."""
        held = below(_FEEDBACK, memory)
        for name in held:
            del memory[f"{_FEEDBACK}{name}"]
        for slot in {name.partition("/")[0] for name in held} if self._slots is not None else ():
            self._slot(int(slot)).restore(below(f"{slot}/", held))


def _packed(vector: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    packed = torch.empty(vector.numel() + 1, dtype=dtype or vector.dtype, device=vector.device)
    packed[:-1].copy_(vector)
    return packed


# ---- checkpoints


def share(w: Worker, *, together: bool) -> WorkerPart:
    """The worker's share of a checkpoint, as copies. What it has pushed is there.

    `together`: all workers do so at this round, and it has what they agree on.
    """
    if w.tables is not None:
        w.tables.settle()
    lead, own, params = w.rank == 0 and w.server is None, None, None
    if w.strategy.loop == LOCAL_UPDATES:
        w.means.settle()
        memory = {name: _tensor(value) for name, value in w.memory.items() if isinstance(value, (Tensor, int, float))}
        memory |= w.means.feedback()
        own = LocalState(w.flat.vector.cpu().clone(), _moments(w), w.buffers(), memory)
    if w.server is None and (together or own is None):
        found = agreed(w) if together else None
        params = (w.flat.vector if found is None else found).cpu().clone() if lead else None
    return WorkerPart(
        w.position,
        params,
        (_moments(w) if own is None else own.moments) if lead else {},
        w.buffers() if w.rank == 0 else {},
        torch.get_rng_state(),
        own,
        {name: value.cpu().clone() for name, value in w.shared.items()} if w.rank == 0 else {},
        w.done,
    )


def agreed(w: Worker) -> Tensor | None:
    """What the workers agree on at this round (`Strategy.consensus`): asked for once, although it is saved and
    evaluated.
    """
    if w.agreement is None:
        w.agreement = (w.strategy.consensus(w),)
    return w.agreement[0]


def _tensor(value: Tensor | float) -> Tensor:
    return value.cpu().clone() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)


def _moments(w: Worker) -> optim.Moments:
    return optim.moments(w.optimizer, w.flat.layout, w.flat.parameters)


def take_over(w: Worker, snapshot: Snapshot) -> None:
    """Take over parameters, optimizer state, buffers and this rank's random state; where workers learn apart, its own.

    Raises:
        CheckpointError: it is of another model.
    """
    snapshot.check(w.flat.layout)
    own = snapshot.own.get(w.rank) if w.strategy.loop == LOCAL_UPDATES else None
    w.params = snapshot.params if own is None else own.params
    buffers = snapshot.buffers if own is None else own.buffers
    with torch.no_grad():
        for name, value in w.held.beside.items():
            if name in buffers:
                value.copy_(buffers[name])
    if w.optimizer is not None and w.server is None:
        moments = optim.fitting(snapshot.moments if own is None else own.moments, w.optimizer)
        optim.load(w.optimizer, moments, w.flat.layout, w.flat.parameters)
    w.shared = {name: value.clone().to(w.device) for name, value in snapshot.shared.items()}
    if own is not None:
        w.memory = {name: value.clone().to(w.device) for name, value in own.memory.items()}
        w.means.restore(w.memory)
    if w.plan.rank in snapshot.rng:
        torch.set_rng_state(snapshot.rng[w.plan.rank])
    else:  # the ranks that share a layer draw the same numbers
        torch.manual_seed(w.plan.seed * 1_000_003 + w.plan.rank - w.place.tensor)


# ---- evaluations


def evaluate_epoch(w: Worker, report: Callable[[dict[str, Any]], None]) -> None:
    """After epochs, but for the last, whose evaluation the driver asks for; what was heard is not said again."""
    at, (epoch, index) = w.position, w.epoch_of(w.position)
    if w.done or index or not w.plan.evaluated < at < w.plan.end or epoch % w.strategy.evaluate_every:
        return
    held = _served(w) if w.server is not None else agreed(w)
    own = w.params.clone() if (w.optimizer is not None if w.server is not None else held is not None) else None
    report({"kind": "evaluation", "round": at, "sums": evaluated(w, held)})
    if own is not None:
        w.params = own  # what this worker has learnt since it last pulled, or met the others


def _served(w: Worker) -> Tensor:
    """What to evaluate where the servers hold it: in step, only once everyone's pushes of the round are in."""
    vector: Tensor = w.server.pull() if w.strategy.topology.in_step else w.server.read()
    return vector


def evaluated(w: Worker, vector: Tensor | None = None, *, whole: bool = False) -> dict[str, tuple[float, int]]:
    """Sums and sample counts of every metric over this worker's share of the evaluation data, or the `whole` of it.

    Means over all workers are the sums divided by the counts. `vector` replaces the parameters first.
    """
    rank, size = (0, 1) if whole else (w.rank, w.size)
    if vector is not None:
        w.params = vector
    model, sums = w.flat.model, dict[str, tuple[float, int]]()
    w.held.refresh()
    model.eval()
    with torch.no_grad(), user_code("evaluate"):
        data = w.workload.evaluation_data()
        for batch in data.batches(rank=rank, size=size, seed=w.plan.seed, epoch=0):
            if batch.size:
                with user_code("evaluate"):  # each batch is a sign of life
                    found = w.held.evaluate(batch.to(w.device))
                for name, mean in found.items():
                    total, count = sums.get(name, (0.0, 0))
                    sums[name] = (total + number(name, mean) * batch.size, count + batch.size)
    model.train()
    return sums | (w.clients.evaluate() if w.clients is not None else {})


# ---- meetings


def together(w: Worker, samples: float, *, momentum: str, buffers: str) -> None:
    """What a meeting does to the optimizer's moments and to the model's buffers.

    Moments: "keep" (each worker its own), "reset" (begin anew), "average" (weighted by `samples`; counts of steps are
    rounded). Buffers: "keep", or "average", of those that are not whole numbers. They are averaged in float32, or in
    float64 where one of them is float64. Raises LinkError.
    """
    if momentum == "reset":
        w.optimizer.state.clear()
    held = _momenta(w) if momentum == "average" else []
    if momentum == "average":
        most = torch.tensor([sum(each.numel() for each in held)], dtype=torch.int64)
        if w.ring.max(most).item() and not held:  # no step yet here, as without a row
            _make_moments(w)
            held = _momenta(w)
    if buffers == "average":
        held += [value for value in dict(w.flat.model.named_buffers()).values() if value.is_floating_point()]
    if not held:
        return
    dtype = reduce(torch.promote_types, (each.dtype for each in held), torch.float32)
    wide = torch.cat([each.detach().reshape(-1).to(w.flat.vector.device, dtype) for each in held])
    mean = w.means.mean(wide, samples, exact=True)
    with torch.no_grad():
        for each, part in zip(held, torch.split_with_sizes(mean, [each.numel() for each in held]), strict=True):
            each.copy_(part.view(each.shape).round() if each.dim() == 0 else part.view(each.shape))


def _momenta(w: Worker) -> list[Tensor]:
    """The optimizer's tensors, in an order that is the same on all workers."""
    states = [w.optimizer.state.get(p, {}) for p in w.flat.parameters]
    return [state[key] for state in states for key in sorted(state) if isinstance(state[key], Tensor)]


def _make_moments(w: Worker) -> None:
    """Let the optimizer make its state, at zero, and leave the parameters as they are."""
    before = w.flat.vector.clone()
    w.flat.zero_grad()
    with user_code("optimizer.step"):
        w.optimizer.step()
    w.params = before
    for each in _momenta(w):
        each.zero_()

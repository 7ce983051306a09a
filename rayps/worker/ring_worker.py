"""A worker on a ring, which computes means over workers: of gradients, of a strategy's vectors, of model buffers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import reduce

import torch
from torch import Tensor

from rayps.comm.ring import Ring
from rayps.comm.ring.compressed_mean import CompressedRing, choose_compressed_ring
from rayps.core.job.records import Event
from rayps.core.strategy.strategy import RoundMemory
from rayps.core.strategy.topology import compression_in
from rayps.data.base import Batch
from rayps.tensors.device import Device
from rayps.tensors.flat import Gradient
from rayps.tensors.training_state import below
from rayps.worker.connections import WorkerConnections
from rayps.worker.core import Memory, VectorMemory, Worker, traffic_of
from rayps.worker.exchange.step_flags import COUNT, OVERFLOW, StepFlags, with_flags
from rayps.worker.members import other_exchange
from rayps.worker.plan import WorkerPlan
from rayps.worker.privacy import Privacy
from rayps.workload.base import Workload

_FEEDBACK = "ring/"  # prefix of a compressed ring's error feedback, in a worker's memory


class BackgroundMeans:
    """Computes means of a strategy's vectors over workers, at once or in the background.

    If the strategy has compression, the vectors are sent compressed.
    """

    def __init__(self, ring: Ring, sent: Ring | CompressedRing) -> None:
        """Set the rings. `sent` is the ring that compresses vectors, or `ring` itself."""
        self._ring, self.sent = ring, sent
        self.exact_ring = ring  # the ring without compression
        self._slots: dict[int, CompressedRing] | None = {0: sent} if isinstance(sent, CompressedRing) else None

    def mean(self, vector: Tensor, samples: float = 1.0, *, exact: bool = False) -> Tensor:
        """Return the mean of a vector over workers: see `WorkerView.mean`. Raises LinkError if a connection fails."""
        if not exact and self._slots is not None:
            return self._slots[0].mean(Gradient(_pack(vector), samples))
        wide = torch.promote_types(vector.dtype, torch.float32)  # half precision cannot represent a number of samples
        parcel = _pack(vector, wide)
        self._ring.mean(Gradient(parcel, samples))
        if not parcel[-1].item():  # no worker has samples, such as if all have skipped their steps
            parcel = _pack(vector, wide)
            self._ring.mean(parcel[:-1])
        return parcel[:-1].to(vector.dtype)

    def mean_later(self, vector: Tensor, samples: float, slot: int) -> Tensor:
        """Start a mean in the background: see `WorkerView.mean_later`.

        Return a tensor [n + 1] for a vector [n]. It receives the weighted sum, and in its last element the sum of the
        weights. For half-precision vectors its dtype is float32, because half precision can represent neither a sum
        weighted by samples nor the number of samples.
        """
        if self._slots is not None:
            parcel = _pack(vector)
            self._open_slot(slot).mean_async(Gradient(parcel, samples))
        else:
            parcel = _pack(vector, torch.promote_types(vector.dtype, torch.float32))
            parcel[:-1].mul_(samples) if samples else parcel.zero_()
            parcel[-1] = samples
            self._ring.sum_async(parcel)
        return parcel

    def _open_slot(self, slot: int) -> CompressedRing:
        assert self._slots is not None
        return self._slots.setdefault(slot, self._slots[0].another())

    def arrived(self, parcel: Tensor) -> Tensor:
        """Return the mean that `mean_later` started, in the dtype of `parcel`: see `WorkerView.arrived`.

        Raises LinkError if a connection fails.
        """
        self.settle()
        count = parcel[-1].item()
        return parcel[:-1] / count if count else torch.zeros_like(parcel[:-1])

    def settle(self) -> None:
        """Wait for all started means. Raises LinkError if a connection fails."""
        self._ring.settle()

    def feedback(self) -> dict[str, Tensor]:
        """Return a dict from a name to the error feedback of the compression."""
        slots = self._slots or {}
        return {
            f"{_FEEDBACK}{slot}/{name}": left for slot, sent in slots.items() for name, left in sent.feedback().items()
        }

    def restore(self, memory: RoundMemory) -> None:
        """Restore the error feedback from a worker's memory."""
        held = below(_FEEDBACK, memory)
        for name in held:
            del memory[f"{_FEEDBACK}{name}"]
        for slot in {name.partition("/")[0] for name in held} if self._slots is not None else ():
            self._open_slot(int(slot)).restore(below(f"{slot}/", held))


class RingWorker(Worker):
    """A worker whose peers are on a ring, with the strategy's compression."""

    def __init__(
        self,
        workload: Workload,
        plan: WorkerPlan,
        peers: WorkerConnections,
        device: str = "cpu",
        *,
        vectors: VectorMemory | None = None,
    ) -> None:
        """Build the worker, and the ring that compresses if the strategy has compression. See `Worker`."""
        super().__init__(workload, plan, peers, device, vectors=vectors)
        ring = peers.ring
        assert ring is not None, "a family without servers uses a ring"
        self.meter.sources.append(traffic_of(ring))
        self.log.choices += list_ring_choices(plan, peers)
        sent: Ring | CompressedRing = ring
        compression = compression_in(plan.strategy)
        if compression is not None:
            sent, choice = choose_compressed_ring(ring, compression, Gradient(self.flat.packed, 0))
            self.log.choices += [choice] if plan.rank == 0 else []
        self.means = BackgroundMeans(ring, sent)
        self.flags = StepFlags()  # exchanged by `mean_grad`

    def batch(self) -> Batch:
        """Return the next batch as `Worker.batch` does, and state in this step's flags whether there is another."""
        batch = super().batch()
        self.batches.state(self.flags)
        return batch

    def exchange_flags(self) -> None:
        """Exchange the flags of this step without a gradient. Raises LinkError if a connection fails."""
        if not self.flags.fresh:
            self.flags.receive(self.means.exact_ring.max(with_flags([], self.flags)))

    def grad(self, batch: Batch) -> Gradient:
        """Return the gradient as `Worker.grad` does. Raises ConfigError if it may not count.

        The next `step` skips the parameters to which backward gave no gradient. A step with a gradient of zeros would
        move these parameters by momentum and, in shared memory, overwrite other workers' writes.
        """
        self._refuse_other_exchange()
        gradient, used = self._compute_gradient(batch)
        self._skip(_find_unmarked(used))
        return self._settle(gradient)

    def mean_grad(self, batch: Batch) -> Tensor:
        """Return `ring.mean(grad(batch))`, read-only. The next `step` skips the parameters that no rank used.

        Under privacy it is the noised sum of the clipped gradients of rows, divided by the logical batch. With members,
        only their gradients count. Raises the errors of `grad` or of `Privacy.part`, and LinkError if a connection
        fails.
        """
        if self.members is None:
            return self._average_gradients(batch)
        mean = self.members.exchange(batch, self._send)
        assert mean is not None, "workers on a ring have the mean"
        return mean

    def _send(self, batch: Batch | None) -> Tensor:
        """Return the mean gradient of all workers. None: this worker takes part without a gradient."""
        return self._average_gradients(Batch(None, None, 0) if batch is None else batch)

    def _average_gradients(self, batch: Batch) -> Tensor:
        """Return the mean gradient of all workers: see `mean_grad`."""
        if self.privacy is not None:
            return self._average_private(batch, self.privacy)
        gradient, own = self.compute_marked(batch)
        if self.scaling.scale is not None:  # before the mean, because a compressed mean of a skipped step has no sense
            self.receive_marks(self.ring.max(own))
            if self.scaling.skips:
                return gradient.vector.zero_()
            mean: Tensor = self.ring.mean(gradient)
        else:
            mean = self.ring.mean(gradient)
            self.receive_marks(self.ring.max(own))
        self.clip.mean = mean
        return mean

    def compute_marked(self, batch: Batch) -> tuple[Gradient, Tensor]:
        """Return this worker's gradient as `Worker.grad` does, and its marks, whose maximum all workers must receive.

        The marks (uint8) are: for each parameter whether backward has computed a gradient, then the flags of the step.
        """
        gradient, used = self._compute_gradient(batch)
        if self.scaling.overflow:
            self.flags.state(OVERFLOW)
        return gradient, with_flags(used, self.flags)

    def receive_marks(self, marks: Tensor) -> None:
        """Receive the maximum of the marks over workers. It decides what the next `step` skips."""
        self.flags.receive(marks[-COUNT:])
        if self.scaling.scale is not None:
            self._decide(self.flags.stated(OVERFLOW), all_ranks=True)
        self._skip(_find_unmarked(marks[:-COUNT].tolist()))

    def _average_private(self, batch: Batch, privacy: Privacy) -> Tensor:
        total = privacy.part(batch)
        self.means.exact_ring.sum(total)
        self._skip(())
        mean = self.clip.mean = (total / privacy.batch).to(self.flat.vector.dtype)
        return mean

    def mean(self, vector: Tensor, samples: float = 1.0, *, exact: bool = False) -> Tensor:
        """Return the mean of a vector over workers: see `WorkerView.mean`. Raises LinkError if a connection fails."""
        self._refuse_other_exchange()
        self.flags.due = True
        return self.means.mean(vector, samples, exact=exact)

    def mean_later(self, vector: Tensor, samples: float = 1.0, *, slot: int = 0) -> Tensor:
        """Start a mean in the background: see `WorkerView.mean_later`."""
        self._refuse_other_exchange()
        return self.means.mean_later(vector, samples, slot)

    def arrived(self, parcel: Tensor) -> Tensor:
        """Wait for a mean that `mean_later` started, and return the mean: see `WorkerView.arrived`.

        Raises LinkError if a connection fails.
        """
        return self.means.arrived(parcel)

    def sync_optimizer_and_buffers(self, samples: float, *, momentum: str, buffers: str) -> None:
        """Synchronize the optimizer's state and the model's buffers over the workers.

        `momentum` is for the optimizer's state: "keep" changes nothing, "reset" drops it, and "average" computes the
        mean weighted by `samples` (step counts are rounded). `buffers`: "keep" changes nothing, and "average" computes
        the mean of floating-point buffers. Means are computed in float32, or in float64 if one of the tensors is
        float64. Raises LinkError if a connection fails.
        """
        self._refuse_other_exchange()
        local = self.local
        assert local is not None, "on a ring each worker has an optimizer"
        self.flags.due = True
        if momentum == "reset":
            local.reset()
        held = local.tensors() if momentum == "average" else []
        if momentum == "average":
            most = torch.tensor([sum(each.numel() for each in held)], dtype=torch.int64)
            if self.ring.max(most).item() and not held:  # this worker has taken no step yet, e.g. because it has no row
                local.make_state()
                held = local.tensors()
        if buffers == "average":
            held += [value for value in dict(self.flat.model.named_buffers()).values() if value.is_floating_point()]
        if not held:
            return
        dtype = reduce(torch.promote_types, (each.dtype for each in held), torch.float32)
        wide = torch.cat([each.detach().reshape(-1).to(self.flat.vector.device, dtype) for each in held])
        mean = self.means.mean(wide, samples, exact=True)
        with torch.no_grad():
            for each, part in zip(held, torch.split_with_sizes(mean, [each.numel() for each in held]), strict=True):
                each.copy_(part.view(each.shape).round() if each.dim() == 0 else part.view(each.shape))

    def _refuse_other_exchange(self) -> None:
        """Raise ConfigError if `mean_grad` decides whose gradients count: a late worker takes part in nothing else."""
        if self.members is not None:
            raise other_exchange("mean_grad")

    def _skip(self, unused: Collection[int], mean: Tensor | None = None) -> None:
        """Set the indices of the parameters that the next step skips.

        `mean` is the gradient of that step if it is in shared memory; else None.
        """
        assert self.local is not None, "on a ring each worker has an optimizer"
        self.local.unused, self.local.mean = unused, mean


def of_first_rank(ring: Ring, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of rank 0's tensors, by name. All ranks call it with tensors of equal names and shapes.

    Raises LinkError if a connection fails.
    """
    return {name: ring.broadcast(value.detach().clone()) for name, value in tensors.items()}


def find_gradient_memory(ring: Ring, device: str) -> Memory | None:
    """Return what allocates a gradient vector in memory of the ring, or None if the ring has no memory on `device`."""
    return ring.memory(Device.of(device).place)


def list_ring_choices(plan: WorkerPlan, peers: WorkerConnections) -> list[Event]:
    """Return events with the algorithms that this worker's rings have chosen.

    Only the first rank of a ring returns them.
    """
    if plan.division is None:
        ring = peers.ring
        if ring is None or plan.rank or plan.size == 1:
            return []
        return [{"kind": "choice", "message": ring.choice, "ring": ring.choices}]
    known = {"data": peers.ring, "tensor": peers.rings.get("tensor")}
    mine = {axis: ring for axis, ring in known.items() if ring is not None and ring.size > 1 and ring.rank == 0}
    line = plan.place.line
    tables = {line(axis): ring.choices for axis, ring in mine.items()}
    events = [{"kind": "choice", "message": f"{line(axis)}: {ring.choice}"} for axis, ring in mine.items()]
    return ([{"kind": "rings", "rings": tables}] if tables else []) + (events if plan.rank == 0 else [])


def _pack(vector: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    packed = torch.empty(vector.numel() + 1, dtype=dtype or vector.dtype, device=vector.device)
    packed[:-1].copy_(vector)
    return packed


def _find_unmarked(marks: Sequence[int]) -> list[int]:
    return [i for i, marked in enumerate(marks) if not marked]

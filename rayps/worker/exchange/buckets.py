"""Compute the mean gradient of a model over a ring, in buckets that are sent while backward continues.

Li et al., "PyTorch distributed: experiences on accelerating data parallel training", VLDB 2020. The gradient vector is
cut between parameters, from the last parameter to the first. A bucket is sent when all its gradients are complete, by
the parts of the round before (`rayps.worker.exchange.arrivals`). A second mean adds the parts that arrive after their
buckets were sent.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from rayps.comm.ring import Ring
from rayps.comm.ring.bucketed_mean import SentBuckets, bucket_mean, scatter_mean
from rayps.comm.ring.choose_algorithm import speed_of
from rayps.comm.ring.owned_slices import OwnedSlices
from rayps.core.job.records import Event
from rayps.core.strategy.topology import AUTO_BUCKET_MB
from rayps.tensors.finite import is_finite
from rayps.tensors.flat import FlatModel, Gradient, Layout, make_dense
from rayps.worker.exchange.arrivals import GradientArrivals, watch
from rayps.worker.exchange.step_flags import COUNT, StepFlags, with_flags

_ON_DEVICE = "the host waits for a device once in a step, when backward has ended"
HELD_ELEMENTS = 1 << 14  # gradients with fewer elements are copied, because this is faster than a call for each


class Buckets:
    """Computes the mean over a ring of the gradients that backward computes.

    Call `begin`, then backward, then `finish`. All ranks must call the methods in the same order. During backward, each
    gradient is taken from `.grad` as soon as autograd has computed it.
    """

    def __init__(
        self,
        flat: FlatModel,
        ring: Ring,
        bucket_mb: float | None = None,
        flags: StepFlags | None = None,
        *,
        hooked: bool = True,
        slices: OwnedSlices | None = None,
    ) -> None:
        """Prepare buckets of `bucket_mb` times 10^6 bytes. `flags` are exchanged by `finish`.

        If `bucket_mb` is 0, there is one bucket, which is sent after backward. If it is None, `choose_size` decides.
        `hooked`: gradients are taken when autograd has computed them; if False, the caller calls `take`. `slices`: the
        elements of which this rank needs the mean, in buckets of the same size; None means all elements.
        """
        self._flat, self._ring = flat, ring
        self._flags = StepFlags() if flags is None else flags
        size, self._why = (bucket_mb, "as bucket_mb says") if bucket_mb is not None else choose_size(flat, ring)
        if slices is not None:
            self._why = "each bucket is sent to the owners of its slices"
        if size and flat.packed.device.type != "cpu" and len(ring.choices.get("hosts", ())) < 2:
            size, self._why = 0.0, _ON_DEVICE
        self.early = size > 0
        self._buckets = cut(flat.layout, 1e6 * size or math.inf)
        entries, vector = flat.layout.entries, flat.packed[:-1]
        marks = len(entries) + 1 + COUNT
        if slices is None:
            self._pieces = bucket_mean(ring, vector, find_spans(flat.layout, self._buckets), marks)
        else:
            self._pieces = scatter_mean(ring, vector, slices, marks)
        self._active, self._adds, self._samples, self._factor = False, False, 0.0, 1.0
        self._arrivals = GradientArrivals(len(entries), self._buckets)
        # a gradient that is not finite: its rank (-1 if only the sum over ranks is not finite), its parameter's name
        self.fault: tuple[int, str] | None = None
        self._ordered = not (self.early and len(self) > 1 and isinstance(self._pieces, SentBuckets))
        if hooked:
            watch(flat.parameters, self._add_gradient)

    def __len__(self) -> int:
        return len(self._buckets)

    @property
    def members(self) -> list[list[int]]:
        """The indices of each bucket's parameters, from the last parameter to the first."""
        return self._buckets

    @property
    def choice(self) -> Event:
        """An event that says how the gradients are sent."""
        when = "while backward continues" if self.early else "after backward"
        size = self._flat.layout.size * self._flat.layout.dtype.itemsize / 1e6
        message = (
            f"{size:.3g} MB of gradients are sent {when}, in {len(self)} bucket{'s'[: len(self) != 1]}: {self._why}"
        )
        return {"kind": "choice", "message": message, "buckets": len(self)}

    @property
    def seconds(self) -> float:
        """The total number of seconds that the caller's thread has spent on communication."""
        return self._pieces.seconds

    def begin(self, samples: float, factor: float = 1.0, *, adds: bool = False, drop: bool = True) -> None:
        """Start a mean. `samples` is the number of this rank's samples, or the weight of its gradient.

        Call it before the last backward of the step. If `adds`, `.grad` has the gradients of earlier backwards, which
        are sent together with those of the last; else they are dropped, unless `drop` is false. Each gradient is
        multiplied by `factor`.
        """
        self._adds = adds
        if drop and not adds:
            self._flat.drop_grad()
        self._active, self._samples, self._factor = True, samples, factor
        self.fault = None
        self._arrivals.late.clear()
        # a gradient that only an earlier backward has computed is sent at the end
        pending = {i for i, p in enumerate(self._flat.parameters) if p.grad is not None} if adds else ()
        self._arrivals.begin(early=self.early, pending=pending)
        self._pieces.begin(samples)

    def finish(self) -> tuple[Tensor, Collection[int]]:
        """Return the mean gradient over all ranks' samples, and the indices of the parameters that no rank has used.

        The mean is in the ring's memory, read-only, and valid until the next `begin`. Raises LinkError if a connection
        fails.
        """
        for i, p in enumerate(self._flat.parameters if self._adds else ()):
            self._add_gradient(i, p)
        self._active = False
        for b in self._arrivals.list_unsent():
            self._send_bucket(b)
        marks = with_flags([*(parts > 0 for parts in self._arrivals.parts), bool(self._arrivals.late)], self._flags)
        mean = self._pieces.finish(marks)
        self._flags.receive(marks[-COUNT:])
        marks = marks[:-COUNT]
        if self._pieces.fault is not None:
            rank, at = self._pieces.fault
            self.fault = rank, next(e.name for e in self._flat.layout.entries if e.lo <= at < e.hi)
        if marks[-1]:
            mean = self._with_late(mean)
        if self._samples:
            self._arrivals.end()
        if not self._ordered:
            self._agree_on_order()
        unused = [i for i, used in enumerate(marks[:-1].tolist()) if not used]
        return mean, unused

    def take(self, i: int) -> None:
        """Take a part of the gradient of parameter `i` from its `.grad`, which becomes None."""
        self._add_gradient(i, self._flat.parameters[i])

    def _add_gradient(self, i: int, p: Tensor) -> None:
        """Take a part of the gradient of parameter `i` from `.grad`. Autograd calls this as a hook."""
        if not self._active or p.grad is None:
            return
        grad, p.grad = make_dense(p.grad), None
        if self._factor != 1:
            grad = grad.mul_(self._factor)
        arrivals = self._arrivals
        (bucket,), late = arrivals.groups_of[i], arrivals.is_late(i)
        if (late or not self._pieces.checks) and self.fault is None and not is_finite(grad):
            self.fault = self._ring.rank, self._flat.layout.entries[i].name
        complete = arrivals.count(i)
        with torch.no_grad():
            if late:
                arrivals.add_late(i, grad)
            elif arrivals.parts[i] > 1:
                self._pieces.copy_held(bucket)
                self._flat.views[i].add_(grad)
            else:
                self._copy_gradient(i, bucket, grad)
        for each in complete:
            self._send_bucket(each)

    def _copy_gradient(self, i: int, bucket: int, grad: Tensor) -> None:
        """Copy a gradient to its range of the vector. A large part that only this rank reads is not copied."""
        entry, mine = self._flat.layout.entries[i], self._pieces.mine(bucket)
        lo, hi = max(entry.lo, mine.start), min(entry.hi, mine.stop)
        if hi - lo < HELD_ELEMENTS or not grad.is_contiguous():
            self._flat.views[i].copy_(grad)
            return
        vector, flat = self._flat.packed, grad.view(-1)
        vector[entry.lo : lo].copy_(flat[: lo - entry.lo])
        vector[hi : entry.hi].copy_(flat[hi - entry.lo :])
        self._pieces.hold(bucket, lo, flat[lo - entry.lo : hi - entry.lo])

    def _send_bucket(self, bucket: int) -> None:
        for i in self._buckets[bucket]:
            if not self._arrivals.parts[i]:
                self._flat.views[i].zero_()
        self._arrivals.sent(bucket)
        self._pieces.submit(bucket)

    def _with_late(self, mean: Tensor) -> Tensor:
        late = torch.zeros_like(self._flat.packed)
        for i, part in self._arrivals.late.items():
            entry = self._flat.layout.entries[i]
            late[entry.lo : entry.hi].view(entry.shape).copy_(part)
        return mean + self._ring.mean(Gradient(late, self._samples))

    def _agree_on_order(self) -> None:
        """Set the order of sending to that in which rank 0's first backward has completed the buckets."""
        order = self._arrivals.order
        last = {group: at for at, i in enumerate(order) for group in self._arrivals.groups_of[i]}
        buckets = torch.tensor(sorted(range(len(self)), key=lambda b: last.get(b, len(order) + b)))
        self._pieces.reorder(self._ring.broadcast(buckets).tolist())
        self._ordered = True


def choose_size(flat: FlatModel, ring: Ring) -> tuple[float, str]:
    """Return the size of buckets in 10^6 bytes, and the reason. The size 0 means one bucket, sent after backward."""
    if "hosts" not in ring.choices:
        return 0.0, "a torch process group sums the gradients"
    if len(ring.choices["hosts"]) > 1:
        speed = speed_of(ring.choices)
        if speed is None:
            return AUTO_BUCKET_MB, "the transfer between hosts takes longer than starting a thread to send"
        seconds, rate = speed
        size = find_best_size(flat.layout.size * flat.layout.dtype.itemsize, seconds, rate) / 1e6
        why = f"between hosts a bucket costs {1000 * seconds:.2g} ms, and {rate / 1e6:.3g} MB are sent in a second"
        return size, f"{why}, so buckets of {size:.2g} MB are the best"
    if flat.packed.device.type == "cpu":
        return AUTO_BUCKET_MB, "ranks of one host read the buckets in shared memory, without a thread"
    return 0.0, _ON_DEVICE


def find_spans(layout: Layout, buckets: Sequence[Sequence[int]]) -> list[slice]:
    """Return the range of the vector of each bucket, for the indices of each bucket's parameters."""
    entries = layout.entries
    return [slice(entries[members[-1]].lo, entries[members[0]].hi) for members in buckets]


def find_best_size(size: int, seconds: float, rate: float) -> float:
    """Return the bytes of a bucket for which the least of the transfer of `size` bytes follows backward.

    A bucket costs `seconds` beside its bytes, of which `rate` are sent in a second. With buckets of s bytes, that is
    size / s * seconds in all, and the last bucket follows backward for s / rate. Their sum is least at
    s = sqrt(size * seconds * rate).
    """
    return math.sqrt(size * seconds * rate)


def cut(layout: Layout, size: float) -> list[list[int]]:
    """Group parameters into buckets of at least `size` bytes, from the last parameter to the first.

    Return the indices of each bucket's parameters.
    """
    width = layout.dtype.itemsize
    buckets: list[list[int]] = [[]]
    held = 0
    for i in reversed(range(len(layout.entries))):
        entry = layout.entries[i]
        if held >= size:
            buckets.append([])
            held = 0
        buckets[-1].append(i)
        held += width * (entry.hi - entry.lo)
    return buckets

"""The mean over samples of a vector (a gradient) that is still being computed, bucket by bucket.

The result is that of `Ring.mean` over the whole vector. Between ranks of one host, each call of `submit` adds the
buckets that all ranks have submitted, without a thread, and the result has the same bits as that of `Ring.mean`.
Otherwise the ring's background thread sends the buckets one after another, in the same order on all ranks. With three
or more ranks, the order of additions and therefore the last digit of the result then depend on the cuts into buckets.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rayps.comm.link.memory import ORDERED
from rayps.comm.ring.algorithms import add, ring_reduce_scatter, ring_slice
from rayps.comm.ring.collectives import HALF, CollectiveHandle, flatten_on_cpu
from rayps.comm.ring.owned_slices import OwnedSlices
from rayps.comm.ring.ring import Ring
from rayps.comm.ring.shared_memory import Bytes, SharedMemoryFold, Weights, fold_parts, tensor_of
from rayps.core.partition import find_bounds
from rayps.tensors.finite import find_not_finite, is_finite

_KIND = 6  # the number that identifies this collective in `SharedMemoryFold.announce`


class BucketedMean(Protocol):
    """Repeated means of one vector. All ranks must construct it and call `begin` and `finish` in the same order."""

    seconds: float  # seconds that the caller has spent in these methods
    checks: bool  # whether `finish` sets `fault`; if not, each rank must check its own vector
    # None if the last mean is finite. Otherwise the rank whose vector is not finite (-1 if all vectors are finite, but
    # their sum is not), and the index of the first element that is not finite
    fault: tuple[int, int] | None

    def begin(self, samples: float) -> None:
        """Start a mean; this rank's vector is the mean over `samples` samples."""

    def mine(self, i: int) -> slice:
        """Return the range of bucket `i` for which `hold` may be called. No other rank reads it in this vector."""

    def hold(self, i: int, lo: int, data: Tensor) -> None:
        """Use `data` (flat) instead of the vector's elements from index `lo` on, which must all be in `mine(i)`.

        `data` is not copied, and must not change until bucket `i` has been added.
        """

    def copy_held(self, i: int) -> None:
        """Copy the data passed to `hold` for bucket `i` into the vector. Call it before the bucket is submitted."""

    def submit(self, i: int) -> None:
        """Submit bucket `i` of this rank's vector, which must not change afterwards."""

    def finish(self, marks: Tensor) -> Tensor:
        """Return the mean. Call it after this rank has submitted all buckets.

        The result is read-only and valid until the next `begin`. Every element of `marks` (uint8, of the length given
        to `bucket_mean`) is replaced by its maximum over ranks.

        Raises:
            LinkError: another rank died, failed or does not answer.
        """

    def reorder(self, order: Sequence[int]) -> None:
        """Send the buckets in this order from the next mean on. All ranks must make the same call between two means."""


def bucket_mean(ring: Ring, vector: Tensor, cuts: Sequence[slice], marks: int) -> BucketedMean:
    """Return a `BucketedMean` of `vector` over a ring. `cuts` are the ranges of the buckets.

    `marks` is the number of bytes of which `finish` computes the maximum. All ranks must call `bucket_mean` with the
    same arguments.
    """
    if ring.size == 1 and vector.device.type == "cpu":
        return SingleRank(vector)
    transport = ring.collectives.transport(vector)
    several_hosts = len(ring.choices.get("hosts", ())) > 1
    if ring.size == 1 or (transport is not None and not (transport.name == "staging" and several_hosts)):
        return DeviceMean(ring, vector)
    shared_memory = ring.collectives.shared_memory
    where = shared_memory.find(vector) if shared_memory is not None and shared_memory.has_buffers else None
    if shared_memory is None or where is None:
        return SentBuckets(ring, vector, cuts)
    return SharedMemoryMean(ring, shared_memory, vector, where, cuts, marks)


def scatter_mean(ring: Ring, vector: Tensor, slices: OwnedSlices, marks: int) -> BucketedMean:
    """Return what `bucket_mean` returns for the buckets of `slices`; the mean is computed only where this rank owns it.

    The other elements of the result of `finish` are undefined.
    """
    found = bucket_mean(ring, vector, slices.cuts, marks)
    if isinstance(found, SharedMemoryMean):
        found.is_read = False
    return ScatteredBuckets(ring, vector, slices) if isinstance(found, SentBuckets) else found


class _Whole:
    """The base class of means that read every element from the vector. `hold` cannot be used with them."""

    checks = False
    fault: tuple[int, int] | None = None

    def mine(self, i: int) -> slice:
        """Return an empty slice, because `hold` may be called for no element."""
        return slice(0, 0)

    def hold(self, i: int, lo: int, data: Tensor) -> None:
        """Raise AssertionError, because `mine` allows no element."""
        raise AssertionError("this mean reads all elements from the vector")

    def copy_held(self, i: int) -> None:
        """Do nothing: no data is held."""


class SingleRank(_Whole):
    """The mean in a ring of one rank: that rank's vector, unchanged."""

    def __init__(self, vector: Tensor) -> None:
        self.seconds = 0.0
        self._vector, self._samples = vector, 0.0

    def begin(self, samples: float) -> None:
        """Start a mean; the vector is the mean over `samples` samples."""
        self._samples = samples

    def submit(self, i: int) -> None:
        """Do nothing: there is no other rank to which bucket `i` could be sent."""

    def finish(self, marks: Tensor) -> Tensor:
        """Return the vector itself, or zeros if it has no samples. `marks` stay unchanged."""
        return self._vector if self._samples else self._vector.zero_()

    def reorder(self, order: Sequence[int]) -> None:
        """Do nothing: no bucket is sent."""


class DeviceMean(_Whole):
    """A mean of vectors on devices, computed after all buckets have been submitted.

    The host waits for the device once, at the end, when it checks whether the mean is finite. If the mean is not, the
    ranks determine whose vector is at fault.
    """

    checks = True

    def __init__(self, ring: Ring, vector: Tensor) -> None:
        self.seconds = 0.0
        self._ring, self._vector, self._samples = ring, vector, 0.0

    def begin(self, samples: float) -> None:
        """Start a mean; the vector is the mean over `samples` samples."""
        self._samples, self.fault = float(samples), None

    def submit(self, i: int) -> None:
        """Do nothing: the buckets are sent together."""

    def finish(self, marks: Tensor) -> Tensor:
        """Return the mean. It is in the vector, or in memory that all ranks read."""
        start, alone = time.perf_counter(), self._ring.size == 1
        own = self._vector  # read once more if the mean is not finite
        if alone:
            mean = self._vector if self._samples else self._vector.zero_()
        else:
            self._ring.max(marks)
            kept = self._ring.collectives.resident(self._vector, self._samples)
            if kept is None:
                own = self._vector.sum(dtype=torch.float64)  # stays on the device; the mean replaces the vector
            mean = self._average_in_place() if kept is None else kept
        if not is_finite(mean):
            faulty = torch.tensor([self._samples > 0 and not is_finite(own)], dtype=torch.uint8)
            by_rank = (faulty if alone else self._ring.all_gather(faulty)).view(-1).tolist()
            self.fault = by_rank.index(1) if 1 in by_rank else -1, find_not_finite(mean)
        self.seconds += time.perf_counter() - start
        return mean

    def reorder(self, order: Sequence[int]) -> None:
        """Do nothing: the buckets are sent together."""

    def _average_in_place(self) -> Tensor:
        """Compute the mean by the same operations as `Ring.mean`."""
        vector = self._vector
        total = self._ring.sum(torch.tensor([self._samples], dtype=torch.float64)).item()
        wide = vector.float() if vector.dtype in HALF else vector
        if self._samples:
            wide.mul_(self._samples)
        else:
            wide.zero_()  # a mean over no samples is 0, although a vector may hold NaN
        self._ring.sum(wide)
        if total:
            wide.div_(total)
        return wide if wide is vector else vector.copy_(wide)


class SharedMemoryMean:
    """A mean whose buckets are in shared memory of one host. Each rank adds 1/N of every bucket, for all ranks.

    Each rank also checks whether the sums that it has computed are finite, while they are in the cache. If one is not,
    the rank determines whose vector is not finite, and writes this to shared memory. All ranks read it after the last
    barrier of the mean.
    """

    checks = True

    def __init__(
        self,
        ring: Ring,
        shared_memory: SharedMemoryFold,
        vector: Tensor,
        where: tuple[int, int],
        cuts: Sequence[slice],
        marks: int,
    ) -> None:
        self.seconds = 0.0
        self.is_read = True  # whether each rank reads the parts of the mean that other ranks have computed
        self._ring, self._shared_memory, self._where = ring, shared_memory, where
        self._dtype, self._size, self._cuts = vector.dtype, vector.nbytes, cuts
        number, offset = where
        self._resident = shared_memory.residents[number]
        self._mean = tensor_of(self._resident.out[offset : offset + self._size], vector.dtype)
        width = vector.element_size()
        own = [self.mine(i) for i in range(len(cuts))]
        self._own = [slice(offset + each.start * width, offset + each.stop * width) for each in own]
        head = 8 * (1 + len(cuts))
        with ring.collectives.collective():
            shared_memory.buffer(head + 16 + marks)  # for each rank: samples, submitted buckets, fault, marks
        parts = shared_memory.residents[-1].parts
        self._samples = [each[:8].view(np.float64) for each in parts]
        self._submitted = [each[8:head].view(np.int64) for each in parts]  # for each bucket: the last mean's number
        self._faults = [each[head : head + 16].view(np.int64) for each in parts]  # 1 + element (0: no fault), rank
        self._marks = [each[head + 16 :] for each in parts]
        self.fault: tuple[int, int] | None = None
        self._turn = 0
        self._open: list[int] = []
        # from a bucket to the data passed to `hold`: the offset in the resident vector, and the bytes
        self._held: dict[int, list[tuple[int, Bytes]]] = {}

    def begin(self, samples: float) -> None:
        """Start a mean; this rank's vector is the mean over `samples` samples."""
        self._turn += 1
        self.fault = None
        self._samples[self._ring.rank][0] = samples
        self._open = list(range(len(self._cuts)))
        self._held.clear()

    def mine(self, i: int) -> slice:
        """Return the range of bucket `i` that this rank adds. No other rank reads it from this rank's vector."""
        cut = self._cuts[i]
        lo, hi = find_bounds(cut.stop - cut.start, self._ring.size, self._ring.rank)
        return slice(cut.start + lo, cut.start + hi)

    def hold(self, i: int, lo: int, data: Tensor) -> None:
        """Record `data` (flat), which `_add` reads instead of the vector's elements from index `lo` on."""
        at = self._where[1] + lo * self._dtype.itemsize
        self._held.setdefault(i, []).append((at, data.view(torch.uint8).numpy()))

    def copy_held(self, i: int) -> None:
        """Copy the data passed to `hold` for bucket `i` into the vector. Call it before the bucket is submitted."""
        for at, data in self._held.pop(i, []):
            self._resident.parts[self._ring.rank][at : at + len(data)] = data

    def submit(self, i: int) -> None:
        """Submit bucket `i`, then add this rank's elements of all buckets that every rank has submitted."""
        start = time.perf_counter()
        self._submitted[self._ring.rank][i] = self._turn
        if ORDERED:  # on a processor that does not order writes, other ranks' buckets can be read only after a barrier
            for piece in [p for p in self._open if all(each[p] == self._turn for each in self._submitted)]:
                self._add(piece)
        self._add_seconds(start)

    def finish(self, marks: Tensor) -> Tensor:
        """Add the remaining buckets and set `fault` and `marks`; return the mean, which is in shared memory."""
        start, rank = time.perf_counter(), self._ring.rank
        self._marks[rank][:] = marks.numpy()
        shared_memory = self._shared_memory
        with self._ring.collectives.collective():
            parity = shared_memory.parity
            shared_memory.announce(_KIND, self._size, self._where)
            shared_memory.barrier()
            shared_memory.agree(parity)
            for piece in list(self._open):
                self._add(piece)
            self._faults[rank][:] = (0, 0) if self.fault is None else (1 + self.fault[1], self.fault[0])
            np.maximum.reduce(self._marks, out=marks.numpy())
            moved = shared_memory.bytes_by_two_shot(self._size)
            shared_memory.bytes_shared += moved if self.is_read else moved // 2
            shared_memory.barrier()
        found = [(int(at) - 1, int(rank)) for at, rank in self._faults if at]
        self.fault = min(found)[::-1] if found else None  # the result is the same on all ranks
        self.seconds += time.perf_counter() - start
        return self._mean

    def reorder(self, order: Sequence[int]) -> None:
        """Ignore the order: a bucket is added as soon as all ranks have submitted it."""

    def _add(self, piece: int) -> None:
        """Add this rank's elements of bucket `piece`, from the vectors and from the data passed to `hold`."""
        at, own = self._own[piece].start, self._own[piece]
        weights = np.concatenate(self._samples)
        held = sorted(self._held.pop(piece, []), key=lambda held: held[0])
        for lo, data in held:
            self._fold(slice(at, lo), weights)
            self._fold(slice(lo, lo + len(data)), weights, data)
            at = lo + len(data)
        self._fold(slice(at, own.stop), weights)
        self._open.remove(piece)
        if self.fault is None and own.start < own.stop:
            total = tensor_of(self._resident.out[own], self._dtype)
            if not is_finite(total):
                self._set_fault(own.start + find_not_finite(total) * self._dtype.itemsize, held)

    def _set_fault(self, at: int, held: list[tuple[int, Bytes]]) -> None:
        """Set `fault` to the element at byte `at` and the first rank whose summand there is not finite.

        The rank is -1 if all summands are finite, and only their sum is not.
        """
        width, faulty = self._dtype.itemsize, -1
        for rank, vector in enumerate(self._resident.parts):
            data = vector[at : at + width]
            if rank == self._ring.rank:
                data = next((own[at - lo : at - lo + width] for lo, own in held if lo <= at < lo + len(own)), data)
            if self._samples[rank][0] and faulty < 0 and not is_finite(tensor_of(data.copy(), self._dtype)):
                faulty = rank
        self.fault = faulty, (at - self._where[1]) // width

    def _fold(self, where: slice, weights: Weights | None, own: Bytes | None = None) -> None:
        if where.start == where.stop:
            return
        sources = [each[where] for each in self._resident.parts]
        if own is not None:
            sources[self._ring.rank] = own
        fold_parts(sources, self._resident.out[where], self._dtype, "add", weights)

    def _add_seconds(self, start: float) -> None:
        spent = time.perf_counter() - start
        self.seconds += spent
        self._ring.collectives.seconds += spent


class SentBuckets(_Whole):
    """A mean in which the ring's background thread sends the buckets, in the same order on all ranks."""

    def __init__(self, ring: Ring, vector: Tensor, cuts: Sequence[slice]) -> None:
        self.seconds = 0.0
        self._ring, self._vector, self._cuts = ring, vector, cuts
        self._order: Sequence[int] = range(len(cuts))
        self._ready: set[int] = set()
        self._under_way: list[CollectiveHandle[Tensor] | CollectiveHandle[None]] = []
        self._samples, self._total = 0.0, torch.zeros(1, dtype=torch.float64)

    def begin(self, samples: float) -> None:
        """Start a mean. The ranks' numbers of samples are summed before any bucket is sent."""
        self._samples, self._total = samples, torch.tensor([float(samples)], dtype=torch.float64)
        self._ready.clear()
        total = self._total
        self._under_way = [
            self._ring.collectives.background.start(lambda: self._ring.collectives.fold_now(total, "add", None))
        ]

    def submit(self, i: int) -> None:
        """Submit bucket `i`. It is sent after all buckets that precede it in the order."""
        self._ready.add(i)
        while (at := len(self._under_way) - 1) < len(self._order) and self._order[at] in self._ready:
            part = self._vector[self._cuts[self._order[at]]]
            self._under_way.append(self._ring.collectives.background.start(partial(self._average, part)))

    def finish(self, marks: Tensor) -> Tensor:
        """Wait for the background sums; return the vector, which now contains the mean."""
        start = time.perf_counter()
        for handle in self._under_way:
            handle.wait()
        self._ring.max(marks)
        self.seconds += time.perf_counter() - start
        return self._vector

    def reorder(self, order: Sequence[int]) -> None:
        """Send the buckets in this order from the next mean on. All ranks must make the same call between two means."""
        self._order = list(order)

    def _average(self, part: Tensor) -> None:
        """Compute sum(n_i g_i) / sum(n_i) over ranks i with n_i samples, by the same operations as `Ring.mean`."""
        wide = part.float() if part.dtype in HALF else part
        if self._samples:
            wide.mul_(self._samples)
        else:
            wide.zero_()  # a mean over no samples is 0, although a vector may hold NaN
        self._ring.collectives.fold_now(wide, "add", None)
        total = self._total.item()
        if total:
            wide.div_(total)
        if wide is not part:
            part.copy_(wide)


class ScatteredBuckets(SentBuckets):
    """A mean of which each rank computes the elements that it owns, by the reduce-scatter of the ring algorithm.

    These elements have the bits that `SentBuckets` computes by the algorithm `ring`. A rank sends half as many bytes.
    """

    def __init__(self, ring: Ring, vector: Tensor, slices: OwnedSlices) -> None:
        super().__init__(ring, vector, slices.cuts)
        self._slices = slices

    def _average(self, part: Tensor) -> None:
        ring = self._ring
        own = ring_slice(part.numel(), ring.size, ring.rank)
        with flatten_on_cpu(part) as flat:
            wide = flat.float() if flat.dtype in HALF else flat
            if self._samples:
                wide.mul_(self._samples)
            else:
                wide.zero_()  # a mean over no samples is 0, although a vector may hold NaN
            with ring.collectives.collective():
                ring_reduce_scatter(ring.collectives.mesh, wide, add)
            total = self._total.item()
            if total:
                wide[own].div_(total)
            if wide is not flat:
                flat[own].copy_(wide[own])

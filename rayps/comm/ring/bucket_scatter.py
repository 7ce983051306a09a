"""The mean over samples of gradients, of which each rank gets its slice, and no rank holds a whole gradient.

The buckets of `OwnedSlices` are sent one after another, in the order of their numbers, on all ranks. A rank writes its
gradient of a bucket into `memory(bucket)`, and `send` adds the mean over ranks to the slices of their owners. With one
micro-batch in a step, the result has the bits that `rayps.comm.ring.bucketed_mean` computes for the same buckets.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from rayps.comm.ring.algorithms import add, ring_reduce_scatter
from rayps.comm.ring.collectives import HALF, CollectiveHandle
from rayps.comm.ring.owned_slices import OwnedSlices
from rayps.comm.ring.ring import Ring

_BUFFERS = 2  # buckets that are written or sent at a time


class BucketScatter(Protocol):
    """Means of which each rank gets its slice. All ranks must make the same calls."""

    seconds: float  # seconds that the caller has spent in these methods

    def begin_step(self) -> None:
        """Start a step: the slice becomes zero."""

    def begin(self, weight: float) -> None:
        """Start a micro-batch; this rank's gradient of it is a mean with this weight."""

    def memory(self, bucket: int) -> Tensor:
        """Return the vector into which the gradient of the next bucket is written.

        Raises LinkError if a connection fails.
        """

    def send(self, bucket: int) -> None:
        """Send the next bucket, which must not be changed until `memory` returns its memory again.

        Raises LinkError if a connection fails.
        """

    def finish(self) -> Tensor:
        """Return this rank's slice of the mean: the owned ranges, ascending and joined. It is valid until `begin_step`.

        Raises LinkError if a connection fails.
        """


def make_bucket_scatter(ring: Ring, slices: OwnedSlices, dtype: torch.dtype, *, several: bool) -> BucketScatter:
    """Return a `BucketScatter`. `several`: a step may have several micro-batches. All ranks must make the same call."""
    if ring.collectives.device is not None:
        return DeviceScatter(ring, slices, dtype)
    if ring.size > 1 and ring.collectives.shared_memory is not None:
        return SharedScatter(ring, slices, dtype, several=several)
    return SentScatter(ring, slices, dtype, several=several)


class _Slice:
    """The slice of a vector that this rank owns: where the part of each bucket is in it, and the sum so far."""

    def __init__(self, ring: Ring, slices: OwnedSlices, dtype: torch.dtype, device: torch.device | None = None) -> None:
        self.longest = max((cut.stop - cut.start for cut in slices.cuts), default=0)
        starts, at = dict[int, int](), 0
        for lo, hi in slices.ranges():
            starts[lo] = at
            at += hi - lo
        self._parts: list[tuple[slice, slice]] = []
        for bucket, cut in enumerate(slices.cuts):
            own = slices.owned(bucket)
            begin = starts.get(own.start, 0)
            self._parts.append(
                (slice(own.start - cut.start, own.stop - cut.start), slice(begin, begin + own.stop - own.start))
            )
        self.dtype = dtype
        wide = torch.promote_types(dtype, torch.float32)  # half precision is added wide
        self.values = torch.zeros(at, dtype=wide, device=device)

    def within(self, bucket: int) -> slice:
        """Return the range of a bucket that this rank owns, counted from the bucket's begin."""
        return self._parts[bucket][0]

    def mean(self, total: float) -> Tensor:
        """Divide the sum by `total`, unless it is 0, and return the slice in the vector's dtype."""
        if total:
            self.values.div_(total)
        return self.values.to(self.dtype)

    def of(self, bucket: int) -> Tensor:
        """Return the part of the slice that is in a bucket, without a copy."""
        return self.values[self._parts[bucket][1]]


class SharedScatter:
    """Ranks of one host: each rank adds its slice of a bucket from the memory of all ranks."""

    def __init__(self, ring: Ring, slices: OwnedSlices, dtype: torch.dtype, *, several: bool) -> None:
        self.seconds = 0.0
        self._ring, self._several = ring, several
        shared_memory = ring.collectives.shared_memory
        assert shared_memory is not None, "the ranks are on one host"
        self._shared_memory = shared_memory
        self._slice = _Slice(ring, slices, dtype)
        self._sizes = [cut.stop - cut.start for cut in slices.cuts]
        self._memory = ring.buffer(self._slice.longest, dtype)
        self._weight = self._total = self._all = 0.0

    def begin_step(self) -> None:
        """Start a step: see `BucketScatter`."""
        self._slice.values.zero_()
        self._all = 0.0

    def begin(self, weight: float) -> None:
        """Start a micro-batch: see `BucketScatter`. Raises LinkError if a connection fails."""
        self._weight = weight
        if self._several:
            began = time.perf_counter()
            self._total = float(self._ring.sum(torch.tensor([weight], dtype=torch.float64)))
            self._all += self._total
            self.seconds += time.perf_counter() - began

    def memory(self, bucket: int) -> Tensor:
        """Return the memory of the next bucket: see `BucketScatter`."""
        return self._memory[: self._sizes[bucket]]

    def send(self, bucket: int) -> None:
        """Send the next bucket: see `BucketScatter`."""
        began = time.perf_counter()
        mean = self._ring.collectives.resident(self.memory(bucket), self._weight)
        assert mean is not None, "the memory is that of a buffer"
        self._shared_memory.bytes_shared -= self._shared_memory.bytes_by_two_shot(mean.nbytes) // 2  # no rank reads all
        own = mean[self._slice.within(bucket)]
        if self._several:
            self._slice.of(bucket).add_(own, alpha=self._total)
        else:
            self._slice.of(bucket).copy_(own)
        self.seconds += time.perf_counter() - began

    def finish(self) -> Tensor:
        """Return this rank's slice of the mean: see `BucketScatter`."""
        return self._slice.mean(self._all if self._several else 0.0)


class DeviceScatter:
    """Ranks whose gradients are on devices: each bucket is summed there, and each rank keeps its slice."""

    def __init__(self, ring: Ring, slices: OwnedSlices, dtype: torch.dtype) -> None:
        transport = ring.collectives.device
        assert transport is not None, "the ring has a device"
        place = transport.device.place
        self.seconds = 0.0
        self._ring = ring
        self._slice = _Slice(ring, slices, dtype, place)
        self._sizes = [cut.stop - cut.start for cut in slices.cuts]
        self._memory = torch.zeros(self._slice.longest, dtype=dtype, device=place)
        self._weight = self._all = 0.0

    def begin_step(self) -> None:
        """Start a step: see `BucketScatter`."""
        self._slice.values.zero_()
        self._all = 0.0

    def begin(self, weight: float) -> None:
        """Start a micro-batch: see `BucketScatter`. Raises LinkError if a connection fails."""
        began = time.perf_counter()
        self._weight = weight
        self._all += float(self._ring.sum(torch.tensor([weight], dtype=torch.float64)))
        self.seconds += time.perf_counter() - began

    def memory(self, bucket: int) -> Tensor:
        """Return the memory of the next bucket, on the device: see `BucketScatter`."""
        return self._memory[: self._sizes[bucket]]

    def send(self, bucket: int) -> None:
        """Send the next bucket: see `BucketScatter`."""
        began = time.perf_counter()
        values = self.memory(bucket)
        wide = values.float() if values.dtype in HALF else values
        if self._weight:
            wide.mul_(self._weight)
        else:
            wide.zero_()
        self._ring.sum(wide)
        self._slice.of(bucket).add_(wide[self._slice.within(bucket)])
        self.seconds += time.perf_counter() - began

    def finish(self) -> Tensor:
        """Return this rank's slice of the mean, on the device: see `BucketScatter`."""
        return self._slice.mean(self._all)


class SentScatter:
    """Ranks of several hosts: the ring's background thread sends the buckets while the next ones are written."""

    def __init__(self, ring: Ring, slices: OwnedSlices, dtype: torch.dtype, *, several: bool) -> None:
        self.seconds = 0.0
        self._ring, self._several = ring, several
        self._slice = _Slice(ring, slices, dtype)
        self._sizes = [cut.stop - cut.start for cut in slices.cuts]
        buffers = min(_BUFFERS, len(self._sizes)) if ring.size > 1 else 1
        self._buffers = [torch.zeros(self._slice.longest, dtype=dtype) for _ in range(buffers)]
        self._under_way: list[CollectiveHandle[None] | None] = [None] * buffers
        self._turn = 0  # the number of buckets sent so far; bucket t is in buffer t mod the number of buffers
        self._weight = 0.0
        self._total = torch.zeros(1, dtype=torch.float64)
        self._totals: list[Tensor] = []

    def begin_step(self) -> None:
        """Start a step: see `BucketScatter`."""
        self._settle()
        self._slice.values.zero_()
        self._totals = []

    def begin(self, weight: float) -> None:
        """Start a micro-batch: see `BucketScatter`. The ranks' weights are summed in the background."""
        self._weight = weight
        self._total = total = torch.tensor([weight], dtype=torch.float64)
        self._totals.append(total)
        if self._ring.size > 1:
            self._start(lambda: self._sum(total))

    def memory(self, bucket: int) -> Tensor:
        """Return the memory of the next bucket: see `BucketScatter`."""
        number = self._turn % len(self._buffers)
        handle = self._under_way[number]
        if handle is not None:
            began = time.perf_counter()
            handle.wait()
            self._under_way[number] = None
            self.seconds += time.perf_counter() - began
        return self._buffers[number][: self._sizes[bucket]]

    def send(self, bucket: int) -> None:
        """Send the next bucket: see `BucketScatter`."""
        number = self._turn % len(self._buffers)
        values = self._buffers[number][: self._sizes[bucket]]
        weight, total, self._turn = self._weight, self._total, self._turn + 1
        if self._ring.size == 1:
            self._slice.of(bucket).add_(values, alpha=weight if self._several else float(weight > 0))
        else:
            self._under_way[number] = self._start(lambda: self._add(bucket, values, weight, total))

    def finish(self) -> Tensor:
        """Return this rank's slice of the mean: see `BucketScatter`."""
        began = time.perf_counter()
        self._settle()
        plain = self._ring.size == 1 and not self._several  # the sum is the only gradient, unweighted
        mean = self._slice.mean(0.0 if plain else sum(float(each) for each in self._totals))
        self.seconds += time.perf_counter() - began
        return mean

    def _settle(self) -> None:
        for number, handle in enumerate(self._under_way):
            if handle is not None:
                handle.wait()
                self._under_way[number] = None
        self._ring.settle()

    def _sum(self, total: Tensor) -> None:
        self._ring.collectives.fold_now(total, "add", None)

    def _start(self, work: Callable[[], None]) -> CollectiveHandle[None]:
        return self._ring.collectives.background.start(work)

    def _add(self, bucket: int, values: Tensor, weight: float, total: Tensor) -> None:
        """Add the sum over ranks of a bucket, weighted, to this rank's slice. Runs in the background."""
        wide = values.float() if values.dtype in HALF else values
        if weight:
            wide.mul_(weight)
        else:
            wide.zero_()
        collectives = self._ring.collectives
        with collectives.collective():
            ring_reduce_scatter(collectives.mesh, wide, add)
        self._slice.of(bucket).add_(wide[self._slice.within(bucket)])

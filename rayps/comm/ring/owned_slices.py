"""A vector of which each rank owns a slice of every bucket: who owns what, and how all ranks get the whole vector.

A rank alone computes the values of the elements that it owns, e.g. by a step of the optimizer with its slice of the
mean gradient. `OwnedSlices.gather` then copies them to all ranks. On one host, ranks read each other's vectors in
shared memory. Between hosts, each bucket is sent around the ring: N-1 messages of 1/N of the bucket from each of N
ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rayps.comm.ring.algorithms import ring_all_gather, ring_slice
from rayps.comm.ring.collectives import flatten_on_cpu
from rayps.comm.ring.device.device_transport import DeviceTransport
from rayps.comm.ring.ring import Ring
from rayps.comm.ring.shared_memory import tensor_of

_PIECE = 1 << 24  # elements of one rank that are gathered at a time on a device
_KIND = 7  # the number that identifies this collective in `SharedMemoryFold.announce`


class OwnedSlices:
    """The slices of a vector that each rank of a ring owns. All ranks must construct it with the same `cuts`.

    `cuts` are the ranges of the buckets, which cover the vector. A rank owns about 1/N of each bucket: the part of
    which a reduce-scatter around the ring leaves the sum on this rank. Owners do not depend on the hosts of the ranks.
    """

    def __init__(self, ring: Ring, cuts: Sequence[slice]) -> None:
        self.cuts = tuple(cuts)
        self._ring = ring
        self._exposed: list[Tensor] | None = None  # the vectors of all ranks, if they are in shared memory of one host

    def owned(self, bucket: int, rank: int | None = None) -> slice:
        """Return the range of the vector that a rank owns in a bucket. `rank` is this rank by default."""
        cut = self.cuts[bucket]
        own = ring_slice(cut.stop - cut.start, self._ring.size, self._ring.rank if rank is None else rank)
        return slice(cut.start + own.start, cut.start + own.stop)

    def ranges(self, rank: int | None = None) -> list[tuple[int, int]]:
        """Return the bounds of the elements that a rank owns, ascending, without empty ranges."""
        found = [self.owned(bucket, rank) for bucket in range(len(self.cuts))]
        return sorted((each.start, each.stop) for each in found if each.start < each.stop)

    def allocate(self, n: int, dtype: torch.dtype) -> Tensor:
        """Return the vector, `n` zeros: on one host in shared memory that the other ranks read in `gather`.

        All ranks must make the same call. Raises LinkError if a connection fails.
        """
        shared_memory = self._ring.collectives.shared_memory
        if shared_memory is None or self._ring.size == 1 or n == 0:
            return torch.zeros(n, dtype=dtype)
        with self._ring.collectives.collective():
            parts = shared_memory.exposed(n * dtype.itemsize)
        self._exposed = [tensor_of(each, dtype) for each in parts]
        return self._exposed[self._ring.rank]

    def gather(self, vector: Tensor) -> None:
        """Copy the elements that each rank owns into `vector` on all ranks. Raises LinkError if a connection fails."""
        ring = self._ring
        if ring.size == 1:
            return
        ring.settle()
        with torch.no_grad(), ring.collectives.collective():
            exposed = self._exposed
            if exposed is not None and vector.data_ptr() == exposed[ring.rank].data_ptr():
                self._read(vector, exposed)
                return
            device = ring.collectives.transport(vector)
            if device is not None:
                self._gather_on(device, vector)
                return
            with flatten_on_cpu(vector) as flat:
                for cut in self.cuts:
                    ring.collectives.mesh.begin()  # ranks may have sent different numbers of segments before
                    ring_all_gather(ring.collectives.mesh, flat[cut])

    def _gather_on(self, device: DeviceTransport, vector: Tensor) -> None:
        """Gather a vector on a device, in pieces of at most `_PIECE` elements from each rank."""
        size, mesh = self._ring.size, self._ring.collectives.mesh
        for bucket in range(len(self.cuts)):
            owned = [self.owned(bucket, rank) for rank in range(size)]
            longest = max(each.stop - each.start for each in owned)
            for at in range(0, longest, _PIECE):
                spans = [slice(min(o.start + at, o.stop), min(o.start + at + _PIECE, o.stop)) for o in owned]
                n = max(span.stop - span.start for span in spans)
                mine, out = vector.new_zeros(n), vector.new_empty(size, n)
                own = spans[self._ring.rank]
                mine[: own.stop - own.start] = vector[own]
                mesh.begin()
                device.all_gather(mine, out)
                for rank, span in enumerate(spans):
                    vector[span] = out[rank, : span.stop - span.start]

    def _read(self, vector: Tensor, exposed: list[Tensor]) -> None:
        shared_memory = self._ring.collectives.shared_memory
        assert shared_memory is not None, "the vectors are in shared memory"
        parity = shared_memory.parity
        shared_memory.announce(_KIND, vector.nbytes)
        shared_memory.barrier()
        shared_memory.agree(parity)
        for rank, other in enumerate(exposed):
            if rank != self._ring.rank:
                for lo, hi in self.ranges(rank):
                    vector[lo:hi] = other[lo:hi]
        shared_memory.barrier()  # the user's code may change the parameters, which the other ranks have read now
        mine = sum(hi - lo for lo, hi in self.ranges())
        shared_memory.bytes_shared += (self._ring.size - 1) * mine * vector.element_size()

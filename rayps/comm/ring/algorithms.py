"""Collective algorithms: one function for each, over a mesh and a flat vector. N is the number of ranks.

The result of every algorithm has the same bits on all ranks and in every run, because the order of additions depends
only on the vector's size and N. `star`, `one_shot` and `two_shot` add in the order of ranks; their results therefore
have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from rayps_client.values import Buffer
from torch import Tensor

from rayps.comm.ring.mesh import Mesh
from rayps.comm.ring.messages import Arrival, Piece
from rayps.core.partition import cut_slices

SEGMENT_BYTES = 512 << 10  # bytes of a segment in a ring; one segment is sent while another is added
Fold = Callable[[Tensor, Tensor], Tensor]  # reduces two tensors into the first


class Subgroup:
    """Some ranks of a mesh, renumbered from 0, for algorithms that run between these ranks only."""

    def __init__(self, mesh: Mesh, members: list[int]) -> None:
        self._mesh = mesh
        self._members = members
        self.rank = members.index(mesh.rank)
        self.size = len(members)

    def exchange(self, sends: Sequence[Piece], receives: Sequence[Piece]) -> None:
        """Send and receive as `Mesh.exchange` does, with ranks numbered within the subgroup."""
        self._mesh.exchange(
            [(self._members[peer], buffer) for peer, buffer in sends],
            [(self._members[peer], buffer) for peer, buffer in receives],
        )

    def relay(self, right: int, left: int, first: Iterable[Buffer], arrivals: Iterable[Arrival]) -> None:
        """Receive and pass on as `Mesh.relay` does, with ranks numbered within the subgroup."""
        self._mesh.relay(self._members[right], self._members[left], first, arrivals)


def add(into: Tensor, other: Tensor) -> Tensor:
    """Add `other` to `into`, in place."""
    return into.add_(other)


def take_largest(into: Tensor, other: Tensor) -> Tensor:
    """Write the elementwise maximum of both tensors into `into`. It is NaN where either tensor is NaN."""
    return torch.maximum(into, other, out=into)


def view_bytes(flat: Tensor) -> memoryview:
    """Return the bytes of a contiguous one-dimensional CPU tensor, without a copy."""
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _list_others(mesh: Mesh | Subgroup) -> list[int]:
    return [peer for peer in range(mesh.size) if peer != mesh.rank]


def ring(mesh: Mesh | Subgroup, x: Tensor, fold: Fold) -> None:
    """Reduce by a reduce-scatter and an all-gather around a ring. In each of 2(N-1) steps a rank sends 1/N of the data.

    Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009.
    """
    ring_with_work(mesh, x, fold, lambda segment: None, lambda segment: None)


Work = Callable[[Tensor], None]  # changes a segment of the vector in place


def ring_with_work(mesh: Mesh | Subgroup | Idle, x: Tensor, fold: Fold, before: Work, after: Work) -> None:
    """Reduce as `ring` does, and call a function with each segment of the vector before and after.

    `before` is called before a segment is used first, `after` as soon as the segment contains the sum. The order of
    these calls depends only on the vector's size, N and the rank.
    """
    n, me = mesh.size, mesh.rank
    cuts = cut_slices(x.numel(), n)
    scratch = torch.empty(min(SEGMENT_BYTES // x.element_size(), -(-x.numel() // n)), dtype=x.dtype)

    def first() -> Iterator[Buffer]:
        for segment in _cut_segments(x[cuts[me]]):
            before(segment)
            yield view_bytes(segment)

    def adding(segment: Tensor, arrived: Tensor, last: bool) -> Callable[[], Buffer | None]:
        def work() -> Buffer | None:
            before(segment)
            fold(segment, arrived)
            if last:
                after(segment)
            return view_bytes(segment)

        return work

    def sharing(segment: Tensor, last: bool) -> Callable[[], Buffer | None]:
        def work() -> Buffer | None:
            after(segment)
            return None if last else view_bytes(segment)

        return work

    def arrivals() -> Iterator[Arrival]:
        for step in range(n - 1):
            for segment in _cut_segments(x[cuts[(me - step - 1) % n]]):
                arrived = scratch[: segment.numel()]
                yield view_bytes(arrived), adding(segment, arrived, step == n - 2)
        for step in range(n - 1):
            for segment in _cut_segments(x[cuts[(me - step) % n]]):
                yield view_bytes(segment), sharing(segment, step == n - 2)

    mesh.relay((me + 1) % n, (me - 1) % n, first(), arrivals())


def ring_slice(n: int, ranks: int, rank: int) -> slice:
    """Return the range of `n` elements of which `ring_reduce_scatter` leaves the sum on `rank`, one of `ranks`."""
    return cut_slices(n, ranks)[(rank + 1) % ranks]


def ring_reduce_scatter(mesh: Mesh | Subgroup, x: Tensor, fold: Fold) -> None:
    """Run the reduce-scatter of `ring`, which is its first half, in place.

    Afterwards `ring_slice` of `x` has the same bits as after `ring`. The other elements are undefined.
    """
    n, me = mesh.size, mesh.rank
    if n == 1:
        return
    cuts = cut_slices(x.numel(), n)
    scratch = torch.empty(min(SEGMENT_BYTES // x.element_size(), -(-x.numel() // n)), dtype=x.dtype)

    def adding(segment: Tensor, arrived: Tensor, last: bool) -> Callable[[], Buffer | None]:
        def work() -> Buffer | None:
            fold(segment, arrived)
            return None if last else view_bytes(segment)

        return work

    def arrivals() -> Iterator[Arrival]:
        for step in range(n - 1):
            for segment in _cut_segments(x[cuts[(me - step - 1) % n]]):
                arrived = scratch[: segment.numel()]
                yield view_bytes(arrived), adding(segment, arrived, step == n - 2)

    mesh.relay((me + 1) % n, (me - 1) % n, map(view_bytes, _cut_segments(x[cuts[me]])), arrivals())


def ring_all_gather(mesh: Mesh | Subgroup, x: Tensor) -> None:
    """Run the all-gather of `ring`, which is its second half, in place.

    Each rank has valid elements in its `ring_slice` of `x`. Afterwards all ranks have the valid elements of all ranks.
    """
    n, me = mesh.size, mesh.rank
    if n == 1:
        return
    cuts = cut_slices(x.numel(), n)

    def passing(segment: Tensor, last: bool) -> Callable[[], Buffer | None]:
        return lambda: None if last else view_bytes(segment)

    def arrivals() -> Iterator[Arrival]:
        for step in range(n - 1):
            for segment in _cut_segments(x[cuts[(me - step) % n]]):
                yield view_bytes(segment), passing(segment, step == n - 2)

    mesh.relay((me + 1) % n, (me - 1) % n, map(view_bytes, _cut_segments(x[cuts[(me + 1) % n]])), arrivals())


def _cut_segments(chunk: Tensor) -> list[Tensor]:
    """Cut a chunk into segments of at most `SEGMENT_BYTES`; an empty chunk gives one empty segment."""
    return list(torch.split(chunk, SEGMENT_BYTES // chunk.element_size())) if chunk.numel() else [chunk]


class Idle:
    """Replaces the `Mesh` on a rank that runs only `before` and `after` in `ring_with_work`, and does not communicate.

    In the hierarchical algorithm, one rank of each host is in the ring between hosts. The other ranks use this class.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def relay(self, right: int, left: int, first: Iterable[Buffer], arrivals: Iterable[Arrival]) -> None:
        """Call the functions of `first` and `arrivals` in order, but send and receive nothing."""
        for _ in first:
            pass
        for _, work in arrivals:
            work()


def keep_first(into: Tensor, other: Tensor) -> Tensor:
    """Return `into` unchanged. This is the reduction of a rank that receives no data (`Idle`)."""
    return into


def star(mesh: Mesh | Subgroup, x: Tensor, fold: Fold) -> None:
    """Send all vectors to rank 0, which reduces them in the order of ranks and sends the result back.

    This algorithm is slow and simple. Tests compare the other algorithms with it.
    """
    others = list(range(1, mesh.size))
    if mesh.rank != 0:
        mesh.exchange([(0, view_bytes(x))], [])
        mesh.exchange([], [(0, view_bytes(x))])
        return
    parts = torch.empty(len(others), x.numel(), dtype=x.dtype)
    mesh.exchange([], [(peer, view_bytes(parts[peer - 1])) for peer in others])
    for part in parts:
        fold(x, part)
    mesh.exchange([(peer, view_bytes(x)) for peer in others], [])


def tree(mesh: Mesh | Subgroup, x: Tensor, fold: Fold) -> None:
    """Reduce up a binomial tree to rank 0, and broadcast the result down: 2 log2(N) steps, each with a whole vector."""
    n, me = mesh.size, mesh.rank
    scratch = torch.empty_like(x)
    span = 1
    while span < n:
        if me % (2 * span) == span:
            mesh.exchange([(me - span, view_bytes(x))], [])
        elif me % (2 * span) == 0 and me + span < n:
            mesh.exchange([], [(me + span, view_bytes(scratch))])
            fold(x, scratch)
        else:
            mesh.exchange([], [])
        span *= 2
    broadcast(mesh, x, 0)


def one_shot(mesh: Mesh | Subgroup, x: Tensor, fold: Fold) -> None:
    """Send the whole vector to every other rank, and reduce all vectors in the order of ranks: one step.

    `fold` must be commutative: the first two ranks reduce each other's vector into their own.
    """
    others = _list_others(mesh)
    parts = torch.empty(len(others), x.numel(), dtype=x.dtype)
    mesh.exchange(
        [(peer, view_bytes(x)) for peer in others],
        [(peer, view_bytes(part)) for peer, part in zip(others, parts, strict=True)],
    )
    if mesh.rank < 2:
        for part in parts:
            fold(x, part)
        return
    total = parts[0]
    for part in (*parts[1 : mesh.rank], x, *parts[mesh.rank :]):
        fold(total, part)
    x.copy_(total)


def two_shot(mesh: Mesh | Subgroup, x: Tensor, fold: Fold) -> None:
    """Reduce by a reduce-scatter and an all-gather. In each of the two steps, a rank sends 1/N to every other rank."""
    cuts = cut_slices(x.numel(), mesh.size)
    mine = view_bytes(reduce_scatter(mesh, x, fold))
    x[cuts[mesh.rank]].view(torch.uint8).numpy()[:] = mine
    others = _list_others(mesh)
    mesh.exchange([(peer, mine) for peer in others], [(peer, view_bytes(x[cuts[peer]])) for peer in others])


ALGORITHMS: dict[str, Callable[[Mesh | Subgroup, Tensor, Fold], None]] = {
    "ring": ring,
    "tree": tree,
    "one_shot": one_shot,
    "two_shot": two_shot,
    "star": star,
}


def reduce_scatter(mesh: Mesh | Subgroup, x: Tensor, fold: Fold) -> Tensor:
    """Return this rank's 1/N of the sum (or maximum) of all vectors, in the order of ranks. `x` does not change."""
    cuts = cut_slices(x.numel(), mesh.size)
    mine = x[cuts[mesh.rank]]
    others = _list_others(mesh)
    parts = torch.empty(mesh.size, mine.numel(), dtype=x.dtype)
    parts[mesh.rank] = mine
    mesh.exchange(
        [(peer, view_bytes(x[cuts[peer]])) for peer in others], [(peer, view_bytes(parts[peer])) for peer in others]
    )
    for part in parts[1:]:
        fold(parts[0], part)
    return parts[0]


def all_gather(mesh: Mesh | Subgroup, x: Tensor, out: Tensor) -> None:
    """Collect the ranks' vectors of n elements in `out` [N, n], on every rank."""
    others = _list_others(mesh)
    out[mesh.rank] = x
    mesh.exchange([(peer, view_bytes(x)) for peer in others], [(peer, view_bytes(out[peer])) for peer in others])


def broadcast(mesh: Mesh | Subgroup, x: Tensor, root: int) -> None:
    """Send the vector of rank `root` down a binomial tree: log2(N) steps."""
    n = mesh.size
    place = (mesh.rank - root) % n
    span = 1
    while span < n:
        if place < span and place + span < n:
            mesh.exchange([((mesh.rank + span) % n, view_bytes(x))], [])
        elif span <= place < 2 * span:
            mesh.exchange([], [((mesh.rank - span) % n, view_bytes(x))])
        else:
            mesh.exchange([], [])
        span *= 2

"""Ranks that share one GPU read each other's vectors on it (CUDA IPC). No byte crosses the CPU.

As in `rayps.comm.ring.shared_memory`, each rank writes only its own memory and its part of the result, and memory that
is used in turn has two halves. A rank waits for its own work on the device before it enters a barrier of the host.
Behind the barrier all ranks' data is therefore complete, and no rank ever waits on the device for another rank: a rank
that dies is noticed in the barrier, which has a timeout.

Memory that other ranks read is freed only when all of them have closed it. On a GPU, torch counts the readers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rayps_client.errors import LinkError, first_line
from torch import Tensor

from rayps.comm.ring.device.device_transport import Fold
from rayps.comm.ring.mesh import Mesh
from rayps.comm.ring.messages import RingMessage
from rayps.comm.ring.shared_memory import SharedMemoryFold, Weights
from rayps.core.partition import cut_slices, find_bounds
from rayps.tensors.device import Device

# The largest part of a vector that is copied at once to memory which other ranks read. Each part costs a wait for
# the device and for all ranks, and the work of processes that share a GPU does not overlap. A rank holds two such
# parts, and rank 0 also two of the result.
MOST_SLOT_BYTES = 128 << 20
LEAST_SLOT_BYTES = 32 << 20  # as MOST_SLOT_BYTES, on a device with little memory
SLOTS_OF_MEMORY = 256  # a part has at most 1/256 of the device's memory, but may have `LEAST_SLOT_BYTES`
UNREAD_BYTES = 256 << 20  # a rank that has sent more bytes to another, which that one has not read, waits
_FOLD, _MEAN, _SPREAD, _GATHER, _SCATTER = range(7, 12)  # numbers in `SharedMemoryFold.announce`
_OFFER_BYTES = 2048  # length of a message that offers memory to another rank, padded with spaces
_READ = -1 << 40  # added to a message's tag: the tag of its acknowledgement
_PROBE = 1000  # elements of the vectors with which the ranks try to read each other's memory
_HALF = (torch.float16, torch.bfloat16)


@dataclass(slots=True)
class DeviceResident:
    """A buffer: one vector on the device for each rank, and the memory of their sum or mean."""

    parts: list[Tensor]  # the vectors of all ranks, in the order of ranks
    out: Tensor


class IpcTransport:
    """A `DeviceTransport` between processes that share one device. `shared` is the memory of their host."""

    name = "ipc"

    def __init__(self, mesh: Mesh, shared: SharedMemoryFold, device: Device) -> None:
        self.device = device
        self._mesh, self._shared = mesh, shared
        self._others = [peer for peer in range(mesh.size) if peer != mesh.rank]
        self._residents: list[DeviceResident] = []
        self._slots: list[list[Tensor]] = []  # for each half: the memory of all ranks
        self._out: list[Tensor] = []  # for each half: the memory of the result
        # all ranks share the device, and therefore find the same number
        most = min(MOST_SLOT_BYTES, max(LEAST_SLOT_BYTES, device.memory().total // SLOTS_OF_MEMORY))
        self._most = 1 << (most.bit_length() - 1)  # bytes of the largest part that is copied to a slot
        self._turn = 0  # the number of parts that were copied to slots
        # for each receiver: the tag and the memory of each vector that it has not read
        self._unread: dict[int, deque[tuple[int, Tensor]]] = {}
        self._opened: dict[int, Tensor] = {}  # for each sender: its last message; keeps the memory mapped for the next
        mesh.at_end(self._close)

    def probe(self) -> str:
        """Read a small vector of each rank; return the problem as text, or an empty text.

        All ranks make the same steps, even if some of them cannot share memory.
        """
        try:
            shared = self.share(_PROBE, torch.float32)
            shared[self._mesh.rank].fill_(self._mesh.rank + 1.0)
            self.device.current().wait()
        except (LinkError, RuntimeError) as error:
            if self._mesh.dead is not None:
                raise
            shared, problem = [], first_line(error)
        else:
            problem = ""
        self._mesh.barrier()
        for rank, vector in enumerate(shared):
            if vector.tolist() != [rank + 1.0] * _PROBE:
                problem = f"memory of rank {rank} has other values than that rank has written"
        self._mesh.barrier()  # no rank frees its vector before the others have read it
        return problem

    # Sharing memory

    def share(self, n: int, dtype: torch.dtype, owner: int | None = None) -> list[Tensor]:
        """Allocate `n` elements on each rank; return the memory of all ranks, in their order.

        With `owner`, only that rank allocates, and the list has one element. The call returns when all ranks have
        opened the memory. Raises LinkError if a rank cannot share its memory with this one.
        """
        me, found = self._mesh.rank, dict[int, Tensor]()
        owners = range(self._mesh.size) if owner is None else [owner]
        problem: LinkError | None = None
        offers: dict[int, bytes] = {}
        if me in owners:
            try:
                found[me] = self.device.zeros_to_share(n, dtype)
                self.device.current().wait()
                offers = {peer: self.device.offer(found[me]) for peer in self._others}
            except LinkError as error:
                problem = error
        arrived = {peer: bytearray(_OFFER_BYTES) for peer in self._others if peer in owners}
        self._mesh.exchange(
            [(peer, _pad(offers.get(peer, b""))) for peer in self._others if me in owners],
            [(peer, memoryview(offer)) for peer, offer in arrived.items()],
        )
        for peer, offer in arrived.items():
            try:
                found[peer] = self._open(peer, offer, n, dtype)
            except LinkError as error:
                problem = problem or error
        self._mesh.barrier()  # no rank frees its memory before the others have opened it
        if problem is not None:
            raise problem
        return [found[rank] for rank in owners]

    def _open(self, rank: int, offer: bytes | bytearray, n: int, dtype: torch.dtype) -> Tensor:
        text = bytes(offer).rstrip()
        if not text:
            raise LinkError(f"rank {rank} cannot share memory of its device", peer=f"rank {rank}")
        try:
            return self.device.open(text, n, dtype)
        except LinkError as error:
            raise LinkError(f"memory of rank {rank}: {error.message}", peer=f"rank {rank}") from error

    def buffer(self, n: int, dtype: torch.dtype) -> Tensor:
        """Return a vector of `n` zeros that the other ranks read."""
        parts = self.share(n, dtype)
        self._residents.append(DeviceResident(parts, self.share(n, dtype, owner=0)[0]))
        return parts[self._mesh.rank]

    def _prepare(self, size: int) -> int:
        """Make sure that there are slots; return how many bytes of a vector of `size` bytes fit into one."""
        need = min(self._most, max(1 << 16, 1 << (size - 1).bit_length()))
        if not self._slots or self._slots[0][0].nbytes < need:
            self._slots, self._out = [], []
            for _ in range(2):
                self._slots.append(self.share(need, torch.uint8))
                self._out.append(self.share(need, torch.uint8, owner=0)[0])
        return self._slots[0][0].nbytes

    # Reducing

    def fold(self, x: Tensor, kind: Fold) -> None:
        """Reduce a vector over the ranks in place, in parts: each rank adds 1/N of a part, then reads the others'."""
        pieces = self._cut_pieces(x)
        for i, piece in enumerate(pieces):
            if i == 0:
                self._put(piece, x, _FOLD)
            half = self._half
            lo, hi = find_bounds(piece.numel(), self._mesh.size, self._mesh.rank)
            fold_tensors(
                [each[lo:hi] for each in self._make_views(half, piece)], _view_like(self._out[half], piece)[lo:hi], kind
            )
            if i + 1 < len(pieces):
                self._put(pieces[i + 1], x, _FOLD)
            else:
                self._meet(_FOLD, x)
            piece.copy_(_view_like(self._out[half], piece))
        self._count(2 * x.nbytes // self._mesh.size)

    def resident(self, x: Tensor, weight: float | None) -> Tensor | None:
        """Return the sum, or the weighted mean, of a part of a vector of `buffer`, in memory that all ranks read."""
        where = self._find(x)
        if where is None:
            return None
        number, at = where
        held, kind = self._residents[number], _FOLD if weight is None else _MEAN
        weights = self._meet(kind, x, (number, at), weight)
        lo, hi = find_bounds(x.numel(), self._mesh.size, self._mesh.rank)
        own = slice(at + lo, at + hi)
        fold_tensors([each[own] for each in held.parts], held.out[own], "add", weights if weight is not None else None)
        self._meet(kind, x)
        self._count(2 * x.nbytes // self._mesh.size)
        return held.out[at : at + x.numel()].view(x.shape)

    def _find(self, x: Tensor) -> tuple[int, int] | None:
        for i, held in enumerate(self._residents):
            mine = held.parts[self._mesh.rank]
            offset = x.data_ptr() - mine.data_ptr()
            if x.dtype == mine.dtype and offset >= 0 and offset + x.nbytes <= mine.nbytes:
                return (i, offset // x.element_size()) if x.numel() else None
        return None

    # Other collectives

    def broadcast(self, x: Tensor, root: int) -> None:
        """Copy the vector of rank `root` to all ranks."""
        for piece in self._cut_pieces(x):
            self._put(piece if self._mesh.rank == root else None, x, _SPREAD)
            if self._mesh.rank != root:
                piece.copy_(_view_like(self._slots[self._half][root], piece))
        if self._mesh.rank == root:
            self._count(x.nbytes)

    def all_gather(self, x: Tensor, out: Tensor) -> None:
        """Collect all ranks' vectors in `out`."""
        at = 0
        for piece in self._cut_pieces(x):
            self._put(piece, x, _GATHER)
            for rank, theirs in enumerate(self._make_views(self._half, piece)):
                out[rank, at : at + piece.numel()].copy_(theirs)
            at += piece.numel()
        self._count(x.nbytes)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return this rank's slice of the sum; each rank adds only its own slice."""
        own = cut_slices(x.numel(), self._mesh.size)[self._mesh.rank]
        out, at = torch.empty_like(x[own]), 0
        for piece in self._cut_pieces(x):
            self._put(piece, x, _SCATTER)
            lo, hi = max(own.start, at), min(own.stop, at + piece.numel())
            if lo < hi:
                some = [each[lo - at : hi - at] for each in self._make_views(self._half, piece)]
                fold_tensors(some, out[lo - own.start : hi - own.start], "add")
            at += piece.numel()
        self._count(x.nbytes // self._mesh.size)
        return out

    # Point to point

    def send(self, x: Tensor, to: int, tag: int) -> None:
        """Copy a vector into memory of its own, and offer this to rank `to`. It is kept until that rank has read it."""
        unread = self._unread.setdefault(to, deque())
        with self._mesh.guarded():
            while unread and self._mesh.arrived(to, (RingMessage.POINT, unread[0][0] + _READ, 0, bytearray(1))):
                unread.popleft()
        while unread and sum(each.nbytes for _, each in unread) > UNREAD_BYTES:
            self._mesh.recv(to, unread[0][0] + _READ, bytearray(1))
            unread.popleft()
        memory = self.device.zeros_to_share(x.numel(), x.dtype)
        memory.copy_(x)
        self.device.current().wait()
        self._mesh.send(to, tag, _pad(self.device.offer(memory) if x.numel() else b""))
        if x.numel():
            unread.append((tag, memory))
            self._shared.bytes_shared += x.nbytes

    def recv(self, x: Tensor, frm: int, tag: int) -> None:
        """Read the memory that rank `frm` offers under `tag`, and acknowledge it."""
        offer = bytearray(_OFFER_BYTES)
        self._mesh.recv(frm, tag, offer)
        if not x.numel():
            return
        theirs = self._open(frm, offer, x.numel(), x.dtype)
        x.copy_(theirs)
        self.device.current().wait()
        self._opened[frm] = theirs
        self._mesh.send(frm, tag + _READ, b"\0")

    # Parts

    @property
    def _half(self) -> int:
        """The half of the slots that was filled last."""
        return (self._turn - 1) & 1

    def _cut_pieces(self, x: Tensor) -> Sequence[Tensor]:
        return torch.split(x, self._prepare(x.nbytes) // x.element_size()) if x.numel() else []

    def _put(self, piece: Tensor | None, x: Tensor, kind: int) -> None:
        """Copy a part of `x` to this rank's slot, and wait until all ranks have done so."""
        self._turn += 1
        if piece is not None:
            _view_like(self._slots[self._half][self._mesh.rank], piece).copy_(piece)
        self._meet(kind, x)

    def _meet(self, kind: int, x: Tensor, where: tuple[int, int] = (-1, 0), weight: float | None = None) -> Weights:
        """Wait for this rank's work, then for all ranks; return their weights. All ranks must agree on the rest."""
        self.device.current().wait()
        return self._shared.meet(kind, x.nbytes, where, 1.0 if weight is None else weight)

    def _make_views(self, half: int, piece: Tensor) -> list[Tensor]:
        return [_view_like(each, piece) for each in self._slots[half]]

    def _count(self, size: int) -> None:
        self._shared.bytes_shared += size * len(self._others)

    def _close(self) -> None:
        self._residents.clear()
        self._opened.clear()
        self._unread.clear()
        self._slots, self._out = [], []


def fold_tensors(parts: list[Tensor], out: Tensor, kind: Fold, weights: Weights | None = None) -> None:
    """Reduce `parts`, in the order of ranks, into `out`; with `weights`, to the weighted mean.

    Half precision is reduced in float32, and rounded once. A rank of weight 0 does not count, even if it has NaN.
    """
    wide = torch.empty(out.shape, dtype=torch.float32, device=out.device) if out.dtype in _HALF else out
    if weights is not None:
        total = float(weights.sum())
        shares = [(each, float(w) / total) for each, w in zip(parts, weights, strict=True) if w]
        if not shares:
            out.zero_()
            return
        torch.mul(shares[0][0], shares[0][1], out=wide) if wide is out else wide.copy_(shares[0][0]).mul_(shares[0][1])
        for each, share in shares[1:]:
            wide.add_(each, alpha=share)
    else:
        first, *rest = parts
        if wide is out and rest:
            (torch.add if kind == "add" else torch.maximum)(first, rest.pop(0), out=wide)
        else:
            wide.copy_(first)
        for each in rest:
            wide.add_(each) if kind == "add" else torch.maximum(wide, each, out=wide)
    if wide is not out:
        out.copy_(wide)


def _view_like(memory: Tensor, piece: Tensor) -> Tensor:
    """Return the start of some bytes with the size and the dtype of `piece`."""
    return memory[: piece.nbytes].view(piece.dtype)


def _pad(offer: bytes) -> bytes:
    return offer.ljust(_OFFER_BYTES)

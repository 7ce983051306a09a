"""The mean of gradients in fewer bytes: an encoded reduce-scatter, then an encoded all-gather.

Rank j of N reduces slice j (`partition.cut_slices`) of all vectors, in the order of ranks, in float32 or wider. Both
steps have error feedback. The error of encoding a gradient is added to the same rank's next gradient. The error of
encoding a slice of the mean is added to the same slice of the next mean. A rank sends 2(N-1)/N of an encoded vector.
All ranks get the same bits, because every rank decodes the same bytes, even for its own slice.

Tang et al., "DoubleSqueeze: parallel stochastic gradient descent with double-pass error-compensated compression", ICML
2019.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rayps_client.values import JsonObject
from torch import Tensor

from rayps.comm.compress import CANDIDATES, MARGIN, Codec, ErrorFeedback, describe_choice, find_codec
from rayps.comm.ring.algorithms import view_bytes
from rayps.comm.ring.mesh import Mesh
from rayps.comm.ring.ring import Ring
from rayps.core.partition import cut_slices
from rayps.tensors.flat import Gradient

PROBE_ELEMENTS = 1 << 20
_TRIES = 3
_COUNT = 8  # bytes of the header of an encoded slice: the sender's number of samples as float64


class CompressedRing:
    """A ring that computes the mean of gradients from encoded gradients.

    All other collectives, including the mean of a plain tensor, are those of `ring`, without encoding. The error
    feedback is zero at first, and is stored on the device of the gradients.
    """

    def __init__(self, ring: Ring, codec: Codec) -> None:
        self._ring, self._codec = ring, codec
        self._sent: ErrorFeedback | None = None  # error feedback of this rank's gradients
        self._folded: ErrorFeedback | None = None  # error feedback of this rank's slice of the means

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ring, name)

    def mean(self, x: Tensor | Gradient, *, in_place: bool = True) -> Tensor:
        """Compute the mean as `Ring.mean` does. The mean of a gradient is always computed in place.

        The error feedback is added to the gradient before the gradient is weighted by its number of samples. A rank
        without samples keeps its error feedback for a later mean. If no rank has samples, the mean is zero.
        """
        if isinstance(x, Tensor):
            return self._ring.mean(x, in_place=in_place)
        vector: Tensor = x.vector
        if self._ring.size > 1:
            self._ring.collectives.background.settle()
            with self._ring.collectives.collective():
                self._fold(self._ring.collectives.mesh, vector, x.samples)
        return vector

    def mean_async(self, x: Gradient) -> None:
        """Compute the mean of a gradient in place as `mean` does, in the background.

        The last element of `x.packed` becomes 1. `x` must not be read or changed until `settle` has returned, which
        waits for the mean.
        """
        self._ring.collectives.mesh.check()

        def work() -> None:
            x.packed[-1] = 1
            if self._ring.size > 1:
                with self._ring.collectives.collective():
                    self._fold(self._ring.collectives.mesh, x.vector, x.samples)

        self._ring.collectives.background.start(work)

    def another(self) -> CompressedRing:
        """Return a compressed ring with the same codec and new error feedback, for the gradients of another vector."""
        return CompressedRing(self._ring, self._codec)

    def feedback(self) -> dict[str, Tensor]:
        """Return copies of the error feedback by name ("sent", "folded"), or {} before the first mean."""
        held = {"sent": self._sent, "folded": self._folded}
        return {name: memory.residual.cpu().clone() for name, memory in held.items() if memory is not None}

    def restore(self, held: dict[str, Tensor]) -> None:
        """Restore error feedback that `feedback` returned for the same rank of a ring of the same size."""
        self._sent, self._folded = (self._make_memory(held[name]) for name in ("sent", "folded"))

    def _make_memory(self, residual: Tensor) -> ErrorFeedback:
        memory = ErrorFeedback(self._codec, residual.numel(), residual.dtype, residual.device)
        memory.residual.copy_(residual)
        return memory

    def _fold(self, mesh: Mesh, vector: Tensor, samples: float) -> None:
        cuts, me = cut_slices(vector.numel(), mesh.size), mesh.rank
        if self._sent is None or self._folded is None or self._sent.residual.numel() != vector.numel():
            self._sent = ErrorFeedback(self._codec, vector.numel(), vector.dtype, vector.device)
            self._folded = ErrorFeedback(self._codec, cuts[me].stop - cuts[me].start, vector.dtype, vector.device)
        shares = [_make_share(samples, self._encode(self._sent, vector[cut], cut.start, samples)) for cut in cuts]
        received = _exchange(mesh, shares, [shares[me].numel()] * mesh.size)
        total = sum(_read_samples(share) for share in received)
        mean = torch.zeros_like(self._folded.residual)
        for share in received:
            if weight := _read_samples(share):
                mean += self._decode(share, mean) * (weight / total)
        mine = _make_share(total, self._encode(self._folded, mean, 0, total))
        sizes = [_COUNT + self._codec.size(cut.stop - cut.start) for cut in cuts]
        for share, cut in zip(_exchange(mesh, [mine] * mesh.size, sizes), cuts, strict=True):
            vector[cut] = self._decode(share, vector[cut]) if total else 0

    def _encode(self, memory: ErrorFeedback, x: Tensor, lo: int, samples: float) -> Tensor:
        if not samples:
            return torch.zeros(self._codec.size(x.numel()), dtype=torch.uint8)
        return memory.encode(x, lo).cpu()

    def _decode(self, share: Tensor, like: Tensor) -> Tensor:
        return self._codec.decode(share[_COUNT:].to(like.device), like.numel(), like.dtype)


def choose_compressed_ring(
    ring: Ring, compression: str, gradient: Gradient
) -> tuple[Ring | CompressedRing, JsonObject]:
    """Return the ring for the option `compression`, and an event that reports the choice.

    The ring is `ring` itself or a `CompressedRing` over `ring`. Under `auto`, the mean of up to 2^20 elements of
    `gradient` is measured without compression and with each candidate; this overwrites `gradient`. All ranks must call
    `choose_compressed_ring` with the same arguments.
    """
    if compression != "auto":
        return CompressedRing(ring, find_codec(compression)), describe_choice("ring", compression, "given")
    seconds = _measure(ring, gradient.packed[: PROBE_ELEMENTS + 1])
    best = min(CANDIDATES, key=lambda name: seconds[name])
    pays = seconds[best] < MARGIN * seconds["off"]
    found = CompressedRing(ring, find_codec(best)) if pays else ring
    what = f"means of {min(PROBE_ELEMENTS, gradient.vector.numel())} elements"
    return found, describe_choice("ring", best if pays else "off", what, seconds)


def _measure(ring: Ring, packed: Tensor) -> dict[str, float]:
    """Return the seconds of a mean without compression ("off") and with each candidate.

    Each is the median of a rank's runs; of the ranks' medians, it is the largest.
    """
    gradient = Gradient(packed, samples=1)
    ways: dict[str, Callable[[], Tensor]] = {"off": lambda: ring.mean(gradient)}
    for name in CANDIDATES:
        trial = CompressedRing(ring, find_codec(name))
        ways[name] = partial(trial.mean, gradient)
    times = torch.tensor([_time(ring, packed, way) for way in ways.values()], dtype=torch.float64)
    ring.max(times)
    packed.zero_()
    return dict(zip(ways, times.tolist(), strict=True))


def _time(ring: Ring, packed: Tensor, way: Callable[[], Tensor]) -> float:
    found = []
    for _ in range(_TRIES + 1):
        packed.fill_(1.0)
        ring.barrier()
        began = time.perf_counter()
        way()
        found.append(time.perf_counter() - began)
    return statistics.median(found[1:])  # the first run does not count, because it uses new pages


def _make_share(samples: float, data: Tensor) -> Tensor:
    return torch.cat([torch.tensor([samples], dtype=torch.float64).view(torch.uint8), data])


def _read_samples(share: Tensor) -> float:
    return float(share[:_COUNT].view(torch.float64))


def _exchange(mesh: Mesh, shares: list[Tensor], sizes: list[int]) -> list[Tensor]:
    """Send shares[i] to rank i; return the shares for this rank in the order of ranks, including its own share.

    sizes[i] is the number of bytes of the share that rank i sends.
    """
    received = [shares[i] if i == mesh.rank else torch.empty(size, dtype=torch.uint8) for i, size in enumerate(sizes)]
    others = [peer for peer in range(mesh.size) if peer != mesh.rank]
    mesh.exchange(
        [(peer, view_bytes(shares[peer])) for peer in others], [(peer, view_bytes(received[peer])) for peer in others]
    )
    return received

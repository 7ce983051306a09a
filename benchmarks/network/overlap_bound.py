"""The least time of a step whose gradients are sent in buckets while backward continues. Pure.

A step consists of forward, backward, and the time after backward (mostly the optimizer's). Bucket k is ready at r_k
seconds after the step's start, and occupies the line for l_k seconds. The line carries one bucket at a time:
e_k = max(e_(k-1), r_k) + l_k. The step cannot end before e_K + the time after backward.

If the layers are equal and backward takes as long as the line, this is forward + max(backward, line) + the line's time
for the last bucket + the time after backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PAYLOAD_BYTES, FRAME_BYTES = 1448, 1514  # of a full TCP packet on Ethernet: 20 + 32 bytes of IP and TCP, 14 of Ethernet


def compute_line_seconds(size: float, hosts: int, rate: float) -> float:
    """Return the least seconds for an all-reduce of `size` bytes on links of `rate` bits per second.

    Each host sends 2(H-1)/H of the bytes, in packets with headers.
    """
    return 2 * (hosts - 1) / hosts * size * FRAME_BYTES / PAYLOAD_BYTES / (rate / 8)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """A step without communication, in seconds after its start."""

    ready: tuple[float, ...]  # when each parameter's gradient is ready, in the order of the parameters
    backward: tuple[float, float]  # when backward starts and ends
    step: float  # when the step ends

    @property
    def after(self) -> float:
        """Seconds after backward."""
        return self.step - self.backward[1]


def find_slowest(steps: Sequence[StepTimes]) -> StepTimes:
    """Return the times at which everything has happened on all ranks."""
    ready = tuple(max(times) for times in zip(*(each.ready for each in steps), strict=True))
    starts, ends = zip(*(each.backward for each in steps), strict=True)
    return StepTimes(ready, (max(starts), max(ends)), max(each.step for each in steps))


def compute_bound(
    times: StepTimes, buckets: Sequence[Sequence[int]], lines: Sequence[float], *, early: bool = True
) -> float:
    """Return the least seconds of a step.

    `buckets` are the indices of each bucket's parameters, in the order of sending; `lines` are the seconds for which
    each bucket occupies the line. If not `early`, all buckets are sent after backward.
    """
    end = 0.0
    for members, line in zip(buckets, lines, strict=True):
        ready = max(times.ready[i] for i in members) if early else times.backward[1]
        end = max(end, ready) + line
    return max(end, times.backward[1]) + times.after


def compute_hidden(step: float, alone: float, line: float) -> float:
    """Return the share of the line's time that does not lengthen the step: 1 if the step takes `alone` seconds."""
    return min(1.0, max(0.0, 1 - (step - alone) / line))


def scale_rows(rows: int, seconds: float, wanted: float) -> int:
    """Return the number of rows whose backward takes `wanted` seconds, if `rows` rows took `seconds`. At least 1."""
    return max(1, round(rows * wanted / seconds))

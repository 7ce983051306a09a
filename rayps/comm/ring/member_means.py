"""The mean gradient of the members of each step, with backup workers.

On every rank a thread takes part in the agreement on the members and in the sum, whether or not the rank's own
gradient is complete. A rank that is no member adds zeros. The rank's main thread takes the means in order, at any later
time: it applies the same means as every other rank, and no rank waits for it. If it has not taken `MOST_MISSED` means,
the thread waits for it, and with it all ranks.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

import torch
from rayps_client.errors import LinkError, PeerTimeout
from torch import Tensor

from rayps.comm.ring.agree_members import MemberAgreement
from rayps.comm.ring.ring import Ring
from rayps.core.rows.backup_portions import PortionsWalk
from rayps.core.rows.step_members import Members

MOST_MISSED = 16  # means that a rank's main thread has not taken


@dataclass(slots=True)
class MemberMean:
    """The result of one step: its members, and the mean of their gradients (a vector, on the CPU).

    `marks` (uint8) is the maximum of the members' marks.
    """

    step: int
    members: Members
    mean: Tensor
    marks: Tensor


@dataclass(slots=True)
class _Offer:
    """The gradient of this rank for a step, with its weight and marks. It does not change until the step ends."""

    step: int
    vector: Tensor
    samples: float
    marks: Tensor


class MemberMeans:
    """One rank's part in the steps of a ring with backup workers, from `walk.step` to `end`.

    After `start`, the thread of this object is the only one that uses the ring.
    """

    def __init__(self, ring: Ring, size: int, dtype: torch.dtype, marks: int, timeout: float) -> None:
        """Prepare means of `size` elements, with `marks` marks. All ranks call this together.

        `timeout` limits, in seconds, the wait for a mean.
        """
        self._ring, self._size, self._dtype, self._marks, self._timeout = ring, size, dtype, marks, timeout
        wide = torch.promote_types(dtype, torch.float32)  # half precision cannot represent a number of samples
        on_host = ring.memory(torch.device("cpu"))
        self._sum = torch.zeros(size + 1, dtype=wide) if on_host is None else on_host(size + 1, wide)
        self._offer: _Offer | None = None
        self._decided: tuple[int, Members] = (-1, ())  # the newest step whose members are known
        self._results: deque[MemberMean] = deque()
        self._spare: list[Tensor] = []  # vectors of means that were taken
        self._error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._agreement: MemberAgreement | None = None
        self._thread: threading.Thread | None = None

    def start(self, walk: PortionsWalk, end: int) -> None:
        """Start the thread. `walk` is this object's own from now on."""
        self._agreement = MemberAgreement(self._ring.collectives.mesh, walk.step)
        self._decided = walk.step - 1, ()
        self._thread = threading.Thread(target=self._run, args=(walk, end), daemon=True, name="rayps-members")
        self._thread.start()

    def is_late(self, step: int) -> bool:
        """Return whether the members of a step are known, and this rank is none of them."""
        decided, members = self._decided
        return step < decided or (step == decided and self._ring.rank not in members)

    def offer(self, step: int, vector: Tensor, samples: float, marks: Tensor) -> None:
        """Offer this rank's gradient of a step. The rank arrives, and is late if the members are known already.

        `vector` must not change until `take` has returned.
        """
        with self._changed:
            self._offer = _Offer(step, vector, samples, marks)
        if self._agreement is not None:
            self._agreement.wake()

    def take(self, step: int, *, limited: bool) -> MemberMean:
        """Wait for the result of a step, and return it. Results are taken in the order of steps.

        The mean is valid until the next call. `limited`: whether this rank has arrived, so that others may be late.
        Raises LinkError if a rank is lost or too late.
        """
        with self._changed:
            most = 2 * self._timeout + 5 if limited else None  # the agreement and the sum name the rank at fault before
            if not self._changed.wait_for(lambda: self._results or self._error, most):
                raise PeerTimeout(
                    f"the mean of step {step} was not computed within {most:g} s (the knob is `timeout`)",
                    peer="worker-0",
                    seconds=most,
                )
            if not self._results:
                raise self._copy_error()
            found = self._results.popleft()
            self._spare.append(found.mean)
            self._changed.notify_all()
        assert found.step == step, "means are taken in the order of steps"
        return found

    def close(self) -> None:
        """End the thread: at once if it waits for this rank, else when the ring ends."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._agreement is not None:
            self._agreement.wake()

    def join(self, timeout: float) -> None:
        """Wait at most `timeout` seconds for the end of the thread."""
        if self._thread is not None:
            self._thread.join(timeout)

    # ---- the thread

    def _run(self, walk: PortionsWalk, end: int) -> None:
        assert self._agreement is not None, "start() sets it"
        try:
            while walk.step < end and not self._closed:
                self._run_step(walk, self._agreement)
        except BaseException as error:  # raised in the main thread, when it asks for a mean
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            self._agreement.close()

    def _run_step(self, walk: PortionsWalk, agreement: MemberAgreement) -> None:
        step, mine = walk.step, self._ring.rank in walk.now.holders

        def ready() -> bool:
            if self._closed:
                raise LinkError("this rank has ended its steps", peer=f"worker-{self._ring.rank}")
            return mine and self._offer is not None and self._offer.step == step

        members = agreement.agree(step, walk.now.needed, ready)
        self._decided = step, members
        walk.advance(members)
        marks = torch.zeros(self._marks, dtype=torch.uint8)
        if self._ring.rank in members:
            offer = self._offer
            assert offer is not None, "a member has offered its gradient"
            torch.mul(offer.vector, offer.samples, out=self._sum[:-1]) if offer.samples else self._sum.zero_()
            self._sum[-1] = offer.samples
            marks.copy_(offer.marks)
        else:
            self._sum.zero_()
        total = self._ring.total(self._sum)
        mean = self._vector()
        count = total[-1].item()
        torch.div(total[:-1], count, out=mean) if count else mean.zero_()
        self._add_result(MemberMean(step, members, mean, self._ring.max(marks)))

    def _vector(self) -> Tensor:
        """Return a vector for the next mean. The newest that was taken may still be in use."""
        with self._changed:
            if len(self._spare) > 1:
                return self._spare.pop(0)
        return torch.empty(self._size, dtype=self._sum.dtype)

    def _add_result(self, found: MemberMean) -> None:
        with self._changed:
            self._results.append(found)
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(self._results) < MOST_MISSED or self._closed)

    def _copy_error(self) -> BaseException:
        error = self._error
        assert error is not None, "the thread has failed"
        return type(error)(error.message, **error.data) if isinstance(error, LinkError) else error

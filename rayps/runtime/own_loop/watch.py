"""What the workers of a run produce, as it arrives, and the errors that it explains."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from queue import Full, Queue

from rayps_client.errors import ActorDied, ClusterError, PeerTimeout, WorkloadError

from rayps.cluster.local import ActorHandle, until
from rayps.runtime.own_loop.actor import LoopOutput

WAIT_SECONDS = 1.0  # the longest time, in seconds, that a call waits in a worker for a line
END_SECONDS = 10.0  # seconds to wait for the last output of workers whose function has returned


class LoopWatch:
    """Collects the output of the workers of a `run`.

    For each worker, one thread calls the worker's `output`, which waits until there is a line. A line therefore arrives
    before the process ends, unless it is printed immediately before a kill. The driver takes the outputs as it polls.
    """

    def __init__(self, handles: Sequence[ActorHandle]) -> None:
        # a worker is not asked for more before the driver has taken what it has produced
        self._arrived: Queue[tuple[int, LoopOutput]] = Queue(len(handles))
        self._ended, self._compared = False, False
        # the newest output of each rank; replaced as a whole, so that a reader in another thread sees one state
        self.latest: Mapping[int, LoopOutput] = {}
        self._lock = threading.Lock()
        self._threads = [self._started(rank, handle) for rank, handle in enumerate(handles)]

    def _started(self, rank: int, handle: ActorHandle) -> threading.Thread:
        """Return a thread that follows a worker."""
        thread = threading.Thread(target=self._follow, args=(rank, handle), daemon=True, name=f"rayps-watch-{rank}")
        thread.start()
        return thread

    def replace(self, rank: int, handle: ActorHandle) -> None:
        """Follow the new process of a worker, whose old process has died."""
        with self._lock:
            self.latest = {each: output for each, output in self.latest.items() if each != rank}
        self._threads[rank] = self._started(rank, handle)

    def take(self) -> list[tuple[int, LoopOutput]]:
        """Return the outputs that have arrived since the last call, each with the rank of its worker."""
        return [self._arrived.get() for _ in range(self._arrived.qsize())]

    def same_rows(self) -> bool:
        """Return once whether all workers train on the same rows, as soon as that is known."""
        found = {output.inputs for output in self.latest.values()}
        if self._compared or None in found or len(self.latest) < len(self._threads):
            return False
        self._compared = True
        return len(found) == 1 and len(self._threads) > 1

    def finish(self, ranks: Sequence[int], take: Callable[[], None]) -> None:
        """Wait for the last output of the workers `ranks`, whose function has returned or which have died.

        `take` takes over what arrives meanwhile.
        """

        def is_over() -> bool:
            take()
            return not any(self._threads[rank].is_alive() for rank in ranks)

        until(is_over, END_SECONDS)
        take()

    def close(self) -> None:
        """Receive nothing more, because the workers are killed."""
        self._ended = True

    def _follow(self, rank: int, handle: ActorHandle) -> None:
        while not self._ended:
            try:
                output: LoopOutput = handle.call(
                    "output", WAIT_SECONDS
                ).result()  # a worker answers late while it starts
            except ClusterError:  # the worker has ended; the wait for its result raises the reason
                return
            if self._ended:
                return
            with self._lock:
                self.latest = {**self.latest, rank: output}
            while not self._ended:
                try:
                    self._arrived.put((rank, output), timeout=WAIT_SECONDS)
                    break
                except Full:  # the driver writes a state
                    continue
            if output.over:
                return


def explain_death(rank: int, steps: int | None, reason: str, last_output: str = "") -> ActorDied:
    """Return the error of a run whose worker died and is not replaced: the worker, its last step, and what to do.

    `last_output`: what the worker wrote last; "" if it is not known.
    """
    at = " before it reported its first optimizer step"
    if steps:
        at = f" after {steps} optimizer step{'s'[: steps != 1]}"
    return ActorDied(
        f"worker-{rank} of the run died{at} ({reason}): "
        "save checkpoints with rayps.save, and give max_failures (and checkpoint=FOLDER): then the run starts its "
        "workers again and continues\n"
        f"find the cause in the last output of worker-{rank}, or in its memory (`rayps doctor`)"
        + (f"\nthe last output of worker-{rank}:\n{last_output}" if last_output else ""),
        rank=rank,
        steps=steps,
        reason=reason,
    )


def explain_uneven_steps(latest: Mapping[int, LoopOutput]) -> WorkloadError | None:
    """Return the error of a run in which one worker's function returned, and another waits in a later or the same step.

    In the same step it has called backward more often. Return None if no worker has come so far, or if one that has
    taken as many steps is in code of the user's, such as a validation after the last step.
    """
    left = [(rank, output.steps) for rank, output in sorted(latest.items()) if output.returned]
    on = [(rank, output.steps) for rank, output in sorted(latest.items()) if not output.returned]
    if not left or not on or left[0][1] > on[0][1] + 1:
        return None
    activity = latest[on[0][0]].activity
    if left[0][1] == on[0][1] and activity is not None and not activity.waits:
        return None
    (rank, steps), (other, done) = left[0], on[0]
    if steps == done + 1:
        return WorkloadError(
            f"the loop's function returned on worker-{rank} after {steps} optimizer step{'s'[: steps != 1]}, while "
            f"worker-{other} had called backward in its step {steps} and waited for the others once more:\nbefore "
            "optimizer.step() all workers must call backward equally often; put all but the last call of a step into "
            "`with optimizer.no_sync():`",
            rank=rank,
            steps=steps,
        )
    return WorkloadError(
        f"the loop's function returned on worker-{rank} after {steps} optimizer step{'s'[: steps != 1]}, while "
        f"worker-{other} was in its step {done + 1}:\nevery worker must call optimizer.step() equally often; give "
        "each rank as many batches as the rank with the fewest has",
        rank=rank,
        steps=steps,
    )


def with_activities(error: PeerTimeout, latest: Mapping[int, LoopOutput]) -> PeerTimeout:
    """Return the error of a worker that has waited in vain, with what the others were doing.

    These are the workers whose line of user code has not called rayps, such as one that validates.
    """
    busy = {rank: (output, at) for rank, output in sorted(latest.items()) if (at := output.activity) and not at.waits}
    lines = [
        f"worker-{rank} is in {at.where}, {at.seconds:.0f} s after "
        + (f"its optimizer step {output.steps}" if output.steps else "it has begun")
        for rank, (output, at) in busy.items()
    ]
    if not lines:
        return error
    way = "raise timeout (seconds) if the other workers shall wait longer for this"
    return PeerTimeout("\n".join([error.message, *lines, way]), **error.data)

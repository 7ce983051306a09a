"""What the caller of a `run` sees of its workers while they work: the lines they print, and how one of them died.

Each worker is asked by a thread of its own, whose question waits in the worker until there is a line: a line is here
before the process can end, but for what was printed in the last moment of one that is killed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rayps.cluster.local import ActorHandle
from rayps.core.errors import ActorDied, ClusterError, WorkloadError

WAIT_SECONDS = 1.0  # that a question waits in a worker for a line
END_SECONDS = 10.0  # for the last lines of workers whose function has returned

Line = tuple[float, str, str]  # time, who, text


@dataclass(frozen=True, slots=True)
class Said:
    """What a worker printed since it was last asked, and how far it is."""

    lines: list[tuple[float, str]]
    steps: int  # of its wrapped optimizers
    returned: bool  # whether its function has returned without an error
    over: bool  # whether this is all


class LoopWatch:
    """Follows the workers of a run, by rank. `show` is given their lines; it is called by one thread at a time."""

    def __init__(self, handles: Sequence[ActorHandle], show: Callable[[list[Line]], None]) -> None:
        self._show, self._showing = show, threading.Lock()
        self._said: dict[int, Said] = {}
        self._threads = [
            threading.Thread(target=self._follow, args=(rank, handle), daemon=True, name=f"rayps-watch-{rank}")
            for rank, handle in enumerate(handles)
        ]
        for thread in self._threads:
            thread.start()

    def finish(self, ranks: Sequence[int]) -> None:
        """Wait for the last lines of workers whose function has returned, or that have died."""
        deadline = time.monotonic() + END_SECONDS
        for rank in ranks:
            self._threads[rank].join(max(0.0, deadline - time.monotonic()))

    def died(self, rank: int, error: ActorDied) -> ActorDied:
        """The error of a run whose worker died: who, where, why, and the way out."""
        reason = str(error.data.get("reason", error))
        steps = self._said[rank].steps if rank in self._said else None
        at = " before its first optimizer step was heard of"
        if steps:
            at = f" after {steps} optimizer step{'s'[: steps != 1]}"
        return ActorDied(
            f"worker-{rank} of the run died{at} ({reason}):\n"
            "rayps.run replaces no worker: save checkpoints in your loop, begin from the newest, and call run again\n"
            f"find the cause in what worker-{rank} printed last, or in its memory (`rayps doctor`); rayps.train "
            "replaces workers and goes on after a death",
            **error.data | {"rank": rank, "steps": steps},
        )

    def uneven(self) -> WorkloadError | None:
        """The error of a run in which a worker's function returned while another one takes more steps, if it is one."""
        left = [(rank, said.steps) for rank, said in sorted(self._said.items()) if said.returned]
        on = [(rank, said.steps) for rank, said in sorted(self._said.items()) if not said.returned]
        if not left or not on or left[0][1] > on[0][1]:
            return None
        (rank, steps), (other, done) = left[0], on[0]
        return WorkloadError(
            f"train_fn() returned on worker-{rank} after {steps} optimizer step{'s'[: steps != 1]}, while "
            f"worker-{other} was in its step {done + 1}:\nevery worker must call optimizer.step() equally often; give "
            "each rank as many batches as the rank with the fewest has",
            rank=rank,
            steps=steps,
        )

    def _follow(self, rank: int, handle: ActorHandle) -> None:
        while True:
            try:
                said: Said = handle.call("said", WAIT_SECONDS).result()  # a worker that starts answers late
            except ClusterError:  # it is gone; who waits for its result is told why
                return
            self._said[rank] = said
            if said.lines:
                with self._showing:
                    self._show([(at, f"worker-{rank}", text) for at, text in said.lines])
            if said.over:
                return

"""Read batches ahead: by loader processes of one worker, or by a thread of it.

Each *lane* is a process or a thread, and reads a part of the batches (`Data.part`). The loader takes one batch of each
lane in turn, and leaves out lanes that have ended. If a process dies, the loader starts another one at the first batch
that was not delivered.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from rayps_client.errors import DataError

from rayps.core.job.records import Event
from rayps.core.job.user_module import pack
from rayps.data.base import Batch, Data, Place, Position
from rayps.data.loader_process import Answer, ReadOrder, Setup, read_frame, write_frame

MOST_DEATHS = 3  # how often one loader process is started again
JOIN_SECONDS = 5.0
_LOOK_SECONDS = 0.2
_MAIN = "from rayps.data.loader_process import main; main()"


class Loader:
    """The lanes of one worker. `read` yields the batches of a pass, and `close` ends all lanes."""

    def __init__(self, data: Data) -> None:
        """Prepare the lanes; processes start with the first pass."""
        assert data.ahead is not None, "the data is read ahead"
        self._ahead, self._data = data.ahead, data
        self._processes = data.parts(data.ahead.workers) if data.ahead.workers else 0
        self._lanes: list[Lane] = []
        self._number = 0  # of the current pass
        self._events: list[Event] = []

    @property
    def processes(self) -> int:
        """The number of loader processes; 0 if a thread reads ahead."""
        return self._processes

    @property
    def pids(self) -> list[int]:
        """The process ids of the loader processes."""
        return [lane.pid for lane in self._lanes if isinstance(lane, ProcessLane)]

    def read(
        self, place: Place, start: int = 0, position: Position | None = None
    ) -> Iterator[tuple[Batch, Position | None]]:
        """Yield the batches of a pass and the positions after them: see `Data.part`.

        Raises:
            DataError: a loader process died more than `MOST_DEATHS` times.
        """
        self._number += 1
        lanes = self._made()
        turns = _Turns(self._processes, place, start, position, independent=self._data.independent)
        for each, lane in enumerate(lanes):
            lane.begin(turns.order(each, self._number))
        while (turn := turns.next) is not None:
            answer = self._answer(lanes, turn, turns)
            if answer.error is not None:
                raise answer.error
            ready = turns.add(turn, answer)
            if answer.batch is not None and ready:
                yield answer.batch, turns.position()

    def take_events(self) -> list[Event]:
        """Return and remove the events since the last call."""
        taken, self._events = self._events, []
        return taken

    def close(self) -> None:
        """End the processes and threads."""
        lanes, self._lanes = self._lanes, []
        for lane in lanes:
            lane.end()
        for lane in lanes:
            lane.join()

    def _made(self) -> list[Lane]:
        if not self._lanes:
            if self._processes:
                packed = pack(_plain(self._data))
                self._lanes = [ProcessLane(packed, self._ahead.prefetch) for _ in range(self._processes)]
            else:
                self._lanes = [ThreadLane(self._data, self._ahead.prefetch)]
        return self._lanes

    def _answer(self, lanes: list[Lane], each: int, turns: _Turns) -> Answer:
        """Return the next answer of a lane. A process that has died is started again at its next batch."""
        while True:
            answer = lanes[each].take(self._number)
            if answer is not None:
                return answer
            lane = lanes[each]
            assert isinstance(lane, ProcessLane), "a thread of a pass answers at its end"
            why = lane.reason()
            if lane.deaths >= MOST_DEATHS:
                raise DataError(
                    f"loader process {each} of worker-{turns.place.rank} died {lane.deaths + 1} times, last {why}:\n"
                    "give loaded_by fewer workers or a smaller prefetch if memory is short; loaded_by(0) reads in the "
                    "worker and shows the reason"
                )
            lane.restart()
            order = turns.order(each, self._number)
            lane.begin(order)
            self._events.append(
                {
                    "kind": "loader_restarted",
                    "message": f"loader process {each} of worker-{turns.place.rank} died ({why}) and was started again "
                    f"at its batch {order.start}",
                    "rank": turns.place.rank,
                    "process": each,
                }
            )


def _plain(data: Data) -> Data:
    """Return a copy of the data that reads its batches itself."""
    other = data.loaded_by(0)
    other.ahead = None
    return other


class _Turns:
    """Whose turn it is in a pass, and how many batches each lane has delivered."""

    def __init__(
        self, processes: int, place: Place, start: int, position: Position | None, *, independent: bool
    ) -> None:
        """Begin at batch `start` of the rank.

        `independent`: whether each lane has an end of its own, so that the order of lanes depends on their lengths.
        """
        lanes = max(1, processes)
        self.place = place
        self.next: int | None = 0  # None if all lanes have ended
        self._lanes, self._ended = lanes, [False] * lanes
        self._known: list[tuple[int, Position] | None] = [None] * lanes  # (batches, position) of each lane
        if position is not None:
            self._restore(position)
        elif independent or lanes == 1:
            self._counts, self._done = [0] * lanes, 0
            if lanes == 1:
                self._counts, self._done = [start], start
        else:
            self._counts = [(start - lane + lanes - 1) // lanes for lane in range(lanes)]
            self._done, self.next = start, start % lanes
        self._start = start

    def _restore(self, position: Position) -> None:
        counts, known = list(position["counts"]), list(position["known"])
        self._counts, self._ended = counts, list(position["ended"])
        self._done, self.next = int(position["done"]), position["next"]
        self._known = [None if each is None else (int(each[0]), each[1]) for each in known]

    def order(self, lane: int, number: int) -> ReadOrder:
        """Return the order for the rest of a lane's part."""
        place = Place(self.place.rank, self.place.size, self.place.seed, self.place.epoch, lane, self._lanes)
        known = self._known[lane]
        return ReadOrder(number, place, self._counts[lane], None if known is None else known[1])

    def add(self, lane: int, answer: Answer) -> bool:
        """Add a lane's answer, and pass the turn on. Return whether its batch is at or after the first one wanted."""
        if answer.batch is None:
            self._ended[lane] = True
        else:
            self._counts[lane] += 1
            self._done += 1
            if answer.position is not None:
                self._known[lane] = self._counts[lane], answer.position
        others = [(lane + step) % self._lanes for step in range(1, self._lanes + 1)]
        self.next = next((other for other in others if not self._ended[other]), None)
        return self._done > self._start

    def position(self) -> Position | None:
        """Return the position after the batches so far, or None if no lane has one."""
        if not any(self._known):
            return None
        known = [None if each is None else [each[0], each[1]] for each in self._known]
        return {
            "counts": list(self._counts),
            "ended": list(self._ended),
            "done": self._done,
            "next": self.next,
            "known": known,
        }


# ---- lanes


class Lane:
    """Reads one part of a pass ahead, with up to `prefetch` answers ready."""

    def __init__(self, prefetch: int) -> None:
        self._ready: queue.Queue[Answer] = queue.Queue(prefetch)
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, order: ReadOrder) -> None:
        """Start to read a pass."""
        raise NotImplementedError

    def take(self, number: int) -> Answer | None:
        """Return the next answer of the pass with this number, or None if the lane has died.

        The wait ends with the limit on calls of the user's code: see `rayps.core.job.user_code`.
        """
        while True:
            try:
                answer = self._ready.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                if (self._thread is None or not self._thread.is_alive()) and self._ready.empty():
                    return None
                continue
            if answer.number in (number, 0):
                return answer

    def end(self) -> None:
        """End the lane, and return at once."""
        self._closed.set()

    def join(self) -> None:
        """Wait until the lane has ended."""
        if self._thread is not None:
            self._thread.join(JOIN_SECONDS)

    def _put(self, answer: Answer) -> bool:
        """Make an answer ready. Return False if the lane is closed."""
        while not self._closed.is_set():
            with contextlib.suppress(queue.Full):
                self._ready.put(answer, timeout=_LOOK_SECONDS)
                return True
        return False


class ThreadLane(Lane):
    """A thread that reads ahead. Each pass has a thread of its own."""

    def __init__(self, data: Data, prefetch: int) -> None:
        super().__init__(prefetch)
        self._data, self._prefetch = data, prefetch

    def begin(self, order: ReadOrder) -> None:
        """Start to read a pass, and end the previous one."""
        self.end()
        self.join()
        self._ready, self._closed = queue.Queue(self._prefetch), threading.Event()
        self._thread = threading.Thread(target=self._read, args=(order,), daemon=True, name="rayps-read-ahead")
        self._thread.start()

    def _read(self, order: ReadOrder) -> None:
        try:
            for batch, position in self._data.part(order.place, order.start, order.position):
                if not self._put(Answer(order.number, batch, position)):
                    return
        except Exception as error:
            self._put(Answer(order.number, error=error))
            return
        self._put(Answer(order.number))


class ProcessLane(Lane):
    """A loader process, and a thread that receives its batches."""

    def __init__(self, packed: bytes, prefetch: int) -> None:
        super().__init__(prefetch)
        self.deaths = 0
        self._fault: Exception | None = None  # why an answer could not be read
        self._packed, self._prefetch = packed, prefetch
        self._process = self._started()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def begin(self, order: ReadOrder) -> None:
        """Send an order, which replaces an earlier one."""
        self._send(order)

    def restart(self) -> None:
        """Start another process after the process has died."""
        self.deaths += 1
        self._fault = None
        self._close_pipes()
        self._ready = queue.Queue(self._prefetch)
        self._process = self._started()

    def reason(self) -> str:
        """Return how the process has ended.

        A process that has closed its pipe, or whose answers cannot be read, may still run, and is killed.
        """
        if self._fault is not None:
            self._process.kill()
            self._process.wait()
            return f"because its answer could not be read: {type(self._fault).__name__}: {self._fault}"
        try:
            code = self._process.wait(JOIN_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return "after it had closed its pipe"
        if code < 0:
            return f"by signal {signal.Signals(-code).name}" + (", perhaps for lack of memory" if code == -9 else "")
        return f"with exit code {code}"

    def end(self) -> None:
        """Kill the process."""
        super().end()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def join(self) -> None:
        """Wait until the process and its thread have ended."""
        self._process.wait()
        super().join()
        self._close_pipes()

    def _started(self) -> subprocess.Popen[bytes]:
        more = {
            "PYTHONPATH": os.pathsep.join(sys.path),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "RAY_ENABLE_AUTO_CONNECT": "0",
        }
        process = subprocess.Popen(
            [sys.executable, "-c", _MAIN],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | more,
            cwd=Path.cwd(),
            bufsize=0,
            start_new_session=True,  # Ctrl-C in the terminal ends the worker first
        )
        assert process.stdout is not None
        self._process = process
        self._thread = threading.Thread(target=self._receive, args=(process.stdout,), daemon=True, name="rayps-loader")
        self._thread.start()
        self._send(Setup(self._packed, tuple(sys.path), tuple(sys.argv)))
        return process

    def _send(self, value: Setup | ReadOrder) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the process has died: `take` finds out
            write_frame(self._process.stdin, value)

    def _receive(self, taken: IO[bytes]) -> None:
        """Receive answers until the pipe is closed, or an answer cannot be read: `take` and `reason` find out."""
        try:
            while self._put(read_frame(taken)):
                pass
        except (EOFError, OSError):
            pass
        except Exception as error:  # such as a class of the user that cannot be imported here
            if not self._closed.is_set():
                self._fault = error

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

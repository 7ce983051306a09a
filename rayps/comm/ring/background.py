"""Background collectives: one thread per ring, one collective after the other, in the order of the calls."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class CollectiveHandle(Generic[T]):
    """A collective that was started in the background."""

    def __init__(self, future: Future[T]) -> None:
        self._future = future

    @property
    def done(self) -> bool:
        """Whether the collective has ended, with a result or an error."""
        return self._future.done()

    def wait(self) -> T:
        """Return the result, or raise the error. The ring's `timeout` bounds the wait."""
        return self._future.result()


class BackgroundThread:
    """Run a ring's background collectives; the thread starts with the first one."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._last: Future[Any] | None = None

    def start(self, work: Callable[[], T]) -> CollectiveHandle[T]:
        """Run `work` after everything that was started before."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="rayps-ring")
        future = self._thread.submit(work)
        self._last = future
        return CollectiveHandle(future)

    def settle(self) -> None:
        """Wait until no collective is running, so that the caller's own thread may start one."""
        if self._last is not None:
            wait([self._last])
            self._last = None

    def close(self, abort: Callable[[], None]) -> None:
        """End the thread; a running collective is aborted."""
        if self._thread is None:
            return
        if self._last is not None and not self._last.done():
            abort()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._thread, self._last = None, None

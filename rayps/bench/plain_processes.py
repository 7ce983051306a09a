"""Actors of a benchmark as plain processes of this host, for contenders without Ray."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from rayps_client.errors import ClusterError

_CONTEXT = multiprocessing.get_context("spawn")


class PlainActor:
    """An object in its own process. Its calls run one after the other, and each returns a `Future`."""

    def __init__(self, make: Callable[..., Any], *args: Any) -> None:
        """Start the process and make the object in it with `make(*args)`. `make` and `args` must be picklable."""
        self._pipe, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_serve, args=(theirs, make, args), daemon=True)
        self._process.start()
        theirs.close()
        self._thread = ThreadPoolExecutor(1)

    def call(self, method: str, *args: Any) -> Future[Any]:
        """Call a method of the object. The future's `result` raises ClusterError if the process has died."""
        return self._thread.submit(self._ask, method, args)

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.join()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _ask(self, method: str, args: tuple[Any, ...]) -> Any:
        try:
            self._pipe.send((method, args))
            good, found = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise ClusterError(
                f"a process of the benchmark died in {method}: exit code {self._process.exitcode}"
            ) from error
        if not good:
            raise ClusterError(f"a process of the benchmark failed in {method}: {found}")
        return found


def _serve(pipe: Connection, make: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    actor = make(*args)
    while True:
        try:
            method, given = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, getattr(actor, method)(*given)))
        except Exception as error:
            pipe.send((False, f"{type(error).__name__}: {error}"))

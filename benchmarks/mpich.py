"""MPICH as a contender of `rayps bench ring`: plain processes under `mpiexec`, which alternate with the others.

It needs `pip install 'rayps[bench]'`, which installs mpi4py and MPICH.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rayps_client.errors import ClusterError, ConfigError

from benchmarks import mpich_rank

_START_SECONDS = 60.0


class Mpich:
    """The contender MPICH: `ranks` processes on this host, with the niceness of the other contenders' processes."""

    def __init__(self, ranks: int, timeout: float, niceness: int = 0) -> None:
        beside = Path(sys.executable).parent / "mpiexec"
        found = str(beside) if beside.exists() else shutil.which("mpiexec")
        if found is None or importlib.util.find_spec("mpi4py") is None:
            raise ConfigError("mpich needs mpi4py and MPICH: pip install 'rayps[bench]'", algorithm="mpich")
        self._timeout, self._pipes = timeout, list[Connection]()
        self._folder = Path(tempfile.mkdtemp(prefix="rayps-bench-"))
        with socket.socket(socket.AF_UNIX) as listener:  # the socket is in a folder that only this user can enter
            listener.bind(str(self._folder / "listener"))
            listener.listen(ranks)
            listener.settimeout(1.0)
            rank_command = [sys.executable, mpich_rank.__file__, listener.getsockname(), str(niceness)]
            command = [found, "-n", str(ranks), *rank_command]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
            try:
                self._accept_ranks(listener, ranks)
            except BaseException:
                self.close()
                raise

    def _accept_ranks(self, listener: socket.socket, ranks: int) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while len(self._pipes) < ranks:
            if self._process.poll() is not None:
                raise ClusterError(f"MPICH did not start {ranks} ranks: mpiexec ended with {self._process.poll()}")
            if time.monotonic() > deadline:
                raise ClusterError(f"MPICH did not start {ranks} ranks within {_START_SECONDS:g} s")
            with contextlib.suppress(TimeoutError):
                self._pipes.append(Connection(listener.accept()[0].detach()))
        for pipe in self._pipes:
            _, self.version = self._answer(pipe)

    def turn(self, size: int, calls: int) -> float:
        """Return the seconds of one all-reduce of `size` bytes on the slowest rank, as the mean of `calls` calls."""
        for pipe in self._pipes:
            pipe.send((size, calls))
        return max(float(self._answer(pipe)) for pipe in self._pipes)

    def _answer(self, pipe: Connection) -> Any:
        try:
            if pipe.poll(self._timeout):
                return pipe.recv()
        except (EOFError, OSError) as error:
            raise ClusterError("a rank of MPICH has died") from error
        raise ClusterError(f"MPICH did not answer within {self._timeout:g} s", seconds=self._timeout)

    def close(self) -> None:
        """Stop the ranks."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
            pipe.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.terminate()  # mpiexec ends its ranks
            self._process.wait(5.0)
        shutil.rmtree(self._folder, ignore_errors=True)

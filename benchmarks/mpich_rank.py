"""One rank of MPICH's all-reduce, started by `mpiexec` and controlled by `benchmarks.mpich`.

This script imports nothing from rayps. It waits for requests on a pipe, because waits in MPI keep a core busy.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np


def main(address: str, niceness: str) -> None:
    """Answer each request (bytes, calls) with the mean seconds of an all-reduce, until the request is None."""
    os.nice(int(niceness) - os.nice(0))
    mpi: Any = importlib.import_module("mpi4py.MPI")  # installed for this measurement only
    world = mpi.COMM_WORLD
    caller = socket.socket(socket.AF_UNIX)
    caller.connect(address)
    with Connection(caller.detach()) as pipe:
        pipe.send((world.Get_rank(), str(mpi.Get_library_version()).split("\n")[0]))
        x = np.zeros(0, np.float32)
        while (request := pipe.recv()) is not None:
            size, calls = request
            if x.nbytes != size:
                x = np.zeros(size // 4, np.float32)
            world.Allreduce(mpi.IN_PLACE, x)
            world.Barrier()
            start = time.perf_counter()
            for _ in range(calls):
                world.Allreduce(mpi.IN_PLACE, x)
            pipe.send((time.perf_counter() - start) / calls)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Load modules without the garbage collector.

Loading torch and rayps makes a million objects that stay. The collector would visit all of them several times, which
takes 0.2 to 0.4 s of the start of each process.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collection(*, freeze: bool = False) -> Iterator[None]:
    """Inside the block the cyclic garbage collector is off. Afterwards it is as before.

    `freeze`: the collector never visits the objects that exist then. It is for a process whose modules stay to its end.
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if freeze:
            gc.freeze()
        if before:
            gc.enable()

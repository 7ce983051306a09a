"""Where the user's own code is called: whatever it raises becomes an error that names the method and the line."""

from __future__ import annotations

import errno
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rayps.errors import RaypsError, WorkloadError

_PACKAGE = str(Path(__file__).parent)
_NO_MEMORY = ("allocate memory", "out of memory", "not enough memory", "bad_alloc", "bad allocation")  # torch's words


@contextmanager
def user_code(method: str) -> Iterator[None]:
    """Turn an exception of the user's `method` into a WorkloadError; our own errors pass."""
    try:
        yield
    except RaypsError:
        raise
    except Exception as error:  # the user's code: whatever it raises is the reason
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_PACKAGE)]
        own = [f for f in frames if "/site-packages/" not in f.filename] or frames
        where = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
        if lacks_memory(error):
            raise too_large(f"{method}(){where}", error) from error
        said = (str(error).strip().splitlines() or [""])[0]
        raise WorkloadError(
            f"{method}() raised {type(error).__name__}: {said}{where}", traceback=traceback.format_exc()
        ) from error


def lacks_memory(error: BaseException) -> bool:
    """Whether an error says that there is no memory left, of the process or of a device."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


def too_large(who: str, error: BaseException) -> WorkloadError:
    """The error of `who` has no memory for the model, and the ways out."""
    said = (str(error).strip().splitlines() or [type(error).__name__])[0].rpartition("DefaultCPUAllocator: ")[2]
    return WorkloadError(
        f"{who} ran out of memory ({said}):\n"
        "the model, its gradients and the optimizer's state do not fit on one worker: divide it among several "
        "(pipeline:stages=2, tensor_parallel:size=2, or more),\n"
        "give fewer rows a batch or more micro_batches, or give each worker more memory",
        memory=True,
        traceback="".join(traceback.format_exception(error)),
    )

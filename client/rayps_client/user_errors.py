"""Convert exceptions of the user's own code into errors that name the method and the line."""

from __future__ import annotations

import errno
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from rayps_client.error_hints import hint
from rayps_client.errors import RaypsError, WorkloadError
from rayps_client.machine.file_owner import is_ours, is_users_code, place_in

_NO_MEMORY = (
    "allocate memory",
    "out of memory",
    "not enough memory",
    "bad_alloc",
    "bad allocation",
)  # text of torch's error


@contextmanager
def users_code(method: str) -> Iterator[None]:
    """Convert an exception of the user's `method` into a WorkloadError. Errors of rayps pass unchanged.

    In the main thread KeyboardInterrupt passes, because there it is Ctrl-C.
    """
    try:
        yield
    except RaypsError:
        raise
    except KeyboardInterrupt as error:
        if threading.current_thread() is threading.main_thread():
            raise
        raise raised(method, error) from error
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise raised(method, error) from error


def raised(method: str, error: BaseException) -> WorkloadError:
    """Return the error that the user's `method` raised `error`, with the line and a way out."""
    where = place_of(error)
    if lacks_memory(error):
        return too_large(f"{method}(){where}", error)
    reason = (str(error).strip().splitlines() or [""])[0]
    ends = isinstance(error, (SystemExit, KeyboardInterrupt))
    way_out = "do not end the process of a worker: return, or raise an error with the reason" if ends else hint(error)
    return WorkloadError(
        f"{method}() raised {type(error).__name__}{': ' if reason else ''}{reason}{where}"
        + (f"\n{way_out}" if way_out else ""),
        traceback="".join(traceback.format_exception(error)),
        raised=type(error).__name__,
    )


def place_of(error: BaseException) -> str:
    """Return the innermost line of user code in an error's traceback as ` (file:line)`, or "" if there is none.

    A file below the current directory is named from there: a job's code is in a folder that is removed at its end.
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not is_ours(frame.filename)]
    own = [frame for frame in frames if is_users_code(frame.filename)] or frames
    return f" ({place_in(own[-1].filename, own[-1].lineno or 0)})" if own else ""


def lacks_memory(error: BaseException) -> bool:
    """Return whether an error means that the process or a device is out of memory."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


def too_large(who: str, error: BaseException) -> WorkloadError:
    """Return the error that process `who` has too little memory for the model, with ways to fix it."""
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rpartition("DefaultCPUAllocator: ")[2]
    return WorkloadError(
        f"{who} ran out of memory ({reason}):\n"
        "the model, its gradients and the optimizer's state do not fit on one worker: divide it among several "
        "(pipeline:stages=2, tensor_parallel:size=2, or more),\n"
        "use smaller batches or more micro_batches, or give each worker more memory",
        memory=True,
        traceback="".join(traceback.format_exception(error)),
    )

"""Call the user's own code: an exception becomes an error that names the method and the line.

Another thread can ask how long the current call has been running.
"""

from __future__ import annotations

import errno
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rayps.core.errors import RaypsError, WorkloadError

_PACKAGE = str(Path(__file__).parents[1])
_NO_MEMORY = (
    "allocate memory",
    "out of memory",
    "not enough memory",
    "bad_alloc",
    "bad allocation",
)  # text of torch's error


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the user's code that has not returned. `first`: the first one of this method in its thread."""

    method: str
    seconds: float  # since it started, or since a call within it returned
    first: bool


@dataclass(slots=True)
class _Open:
    method: str
    since: float  # as time.monotonic
    first: bool


_calls: dict[int, _Open] = {}  # the innermost call of each thread, by its ident
_known = threading.local()  # the methods that a thread has called


def under_way(thread: int | None) -> Call | None:
    """Return the current call of the user's code in the thread with this ident; None if there is none."""
    found = None if thread is None else _calls.get(thread)
    return None if found is None else Call(found.method, time.monotonic() - found.since, found.first)


@contextmanager
def peers_awaited() -> Iterator[None]:
    """Stop the clock of the current call of user code while this thread waits for peers.

    Waiting for peers has a deadline of its own. The call's seconds start at zero again afterwards.
    """
    thread = threading.get_ident()
    outer = _calls.pop(thread, None)
    try:
        yield
    finally:
        _resume(thread, outer)


@contextmanager
def user_code(method: str) -> Iterator[None]:
    """Turn what the user's `method` raises into a WorkloadError; rayps's own errors pass.

    SystemExit (`sys.exit()`) and KeyboardInterrupt are turned too: they would end a thread without a message. Only in
    the main thread KeyboardInterrupt passes: there it is Ctrl-C.
    """
    thread = threading.get_ident()
    outer, first = _calls.get(thread), method not in _methods()
    _calls[thread] = _Open(method, time.monotonic(), first)
    try:
        yield
    except RaypsError:
        raise
    except KeyboardInterrupt as error:
        if threading.current_thread() is threading.main_thread():
            raise
        raise _raised(method, error) from error
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise _raised(method, error) from error
    finally:
        _known.methods.add(method)
        _resume(thread, outer)


def _methods() -> set[str]:
    if not hasattr(_known, "methods"):
        _known.methods = set()
    found: set[str] = _known.methods
    return found


def _resume(thread: int, outer: _Open | None) -> None:
    if outer is None:
        _calls.pop(thread, None)
    else:
        outer.since = time.monotonic()
        _calls[thread] = outer


def _raised(method: str, error: BaseException) -> WorkloadError:
    where = place_of(error)
    if lacks_memory(error):
        return too_large(f"{method}(){where}", error)
    said = (str(error).strip().splitlines() or [""])[0]
    ends = isinstance(error, (SystemExit, KeyboardInterrupt))
    hint = "\ndo not end the process of a worker: return, or raise an error with the reason" if ends else ""
    return WorkloadError(
        f"{method}() raised {type(error).__name__}: {said}{where}{hint}",
        traceback="".join(traceback.format_exception(error)),
        raised=type(error).__name__,
    )


def place_of(error: BaseException) -> str:
    """Return the last line of the user's own code in a traceback, as ` (file:line)`; "" if there is none."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_PACKAGE)]
    own = [f for f in frames if "/site-packages/" not in f.filename] or frames
    return f" ({own[-1].filename}:{own[-1].lineno})" if own else ""


def placed(message: str, where: str) -> str:
    """Return an error's message with the place where it was raised in its first line."""
    first, end, rest = message.partition("\n")
    return f"{first.removesuffix(':')} {where}{':' if first.endswith(':') else ''}{end}{rest}"


def lacks_memory(error: BaseException) -> bool:
    """Return whether an error means out of memory, of the process or of a device."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


def too_large(who: str, error: BaseException) -> WorkloadError:
    """Return the error that `who` has no memory for the model, with ways to fix it."""
    said = (str(error).strip().splitlines() or [type(error).__name__])[0].rpartition("DefaultCPUAllocator: ")[2]
    return WorkloadError(
        f"{who} ran out of memory ({said}):\n"
        "the model, its gradients and the optimizer's state do not fit on one worker: divide it among several "
        "(pipeline:stages=2, tensor_parallel:size=2, or more),\n"
        "use smaller batches or more micro_batches, or give each worker more memory",
        memory=True,
        traceback="".join(traceback.format_exception(error)),
    )

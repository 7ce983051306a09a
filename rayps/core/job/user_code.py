"""Call the user's own code: an exception becomes an error that names the method and the line.

Another thread can ask how long the current call has been running, and whether the call has exceeded its time limit. An
uncaught exception in a thread that the user started ends only that thread, as in plain Python. This module records the
exception as text, so that a job that waits for the thread can name the reason.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from rayps_client.errors import WorkloadError
from rayps_client.user_errors import lacks_memory as lacks_memory
from rayps_client.user_errors import place_of as place_of
from rayps_client.user_errors import too_large as too_large
from rayps_client.user_errors import users_code

START_SECONDS = 180.0  # seconds for a process to start and import torch, and for the first call of a method
_LOOK_SECONDS = 0.1
_MOST_ENDS = 1000  # most exceptions of ended threads that a process records


@dataclass(frozen=True, slots=True)
class Call:
    """A running call of the user's code."""

    method: str
    seconds: float  # seconds since the call started, or since a call within it returned
    first: bool  # whether this is the first call of the method in its thread


@dataclass(slots=True)
class _Open:
    method: str
    since: float  # as time.monotonic
    first: bool


_calls: dict[int, _Open] = {}  # from a thread's ident to its innermost call
_known = threading.local()  # the methods that a thread has called


def find_call(thread: int | None) -> Call | None:
    """Return the current call of the user's code in the thread with this ident, or None if there is no call."""
    found = None if thread is None else _calls.get(thread)
    return None if found is None else Call(found.method, time.monotonic() - found.since, found.first)


@contextmanager
def pause_clock() -> Iterator[None]:
    """Stop the clock of the current call of user code while this thread waits for peers.

    Waiting for peers has its own deadline. After the wait the call's seconds start at zero again.
    """
    thread = threading.get_ident()
    outer = _calls.pop(thread, None)
    try:
        yield
    finally:
        _resume(thread, outer)


@contextmanager
def user_code(method: str) -> Iterator[None]:
    """Convert an exception of the user's `method` into a WorkloadError. Errors of rayps pass unchanged.

    SystemExit (`sys.exit()`) and KeyboardInterrupt are converted too, because they would end a thread without a
    message. In the main thread KeyboardInterrupt passes, because there it is Ctrl-C.
    """
    thread = threading.get_ident()
    outer, first = _calls.get(thread), method not in _find_methods()
    _calls[thread] = _Open(method, time.monotonic(), first)
    try:
        with users_code(method):
            yield
    finally:
        _known.methods.add(method)
        _resume(thread, outer)


def _find_methods() -> set[str]:
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


def add_place(message: str, where: str) -> str:
    """Append `where`, such as "on worker-1 at round 3", to the first line of an error's message."""
    first, end, rest = message.partition("\n")
    return f"{first.removesuffix(':')} {where}{':' if first.endswith(':') else ''}{end}{rest}"


# ---- the time limit of a call

_Found = TypeVar("_Found")


def limit_seconds(call: Call, timeout: float) -> float:
    """Return the seconds that a call may take: `timeout`, or more for the first call of a method.

    The first call may load data or compile code.
    """
    return max(timeout, START_SECONDS) if call.first else timeout


def explain_overdue(call: Call | None, timeout: float, round: int | None, ends: Sequence[str] = ()) -> str | None:
    """Return why a member counts as dead while its thread is in `call`, or None if `call` is within its limit.

    `round` is the member's current round, if known. `ends` has the texts of `list_ended_threads` from the member's
    process.
    """
    if call is None or call.seconds <= limit_seconds(call, timeout):
        return None
    at = "" if round is None else f" at round {round}"
    least = f", at least {START_SECONDS:g} s for a first call" if call.first else ""
    knob = f"timeout {timeout:g} s{least}: raise it if one call needs longer"
    return "; ".join([f"{call.method}(){at} has not returned for {call.seconds:.0f} s ({knob})", *ends[-1:]])


def await_call(run: Callable[[], _Found], timeout: float, *, where: str, stopped: Callable[[], bool]) -> _Found | None:
    """Call `run` in a thread. Return its result, or raise its exception. Return None as soon as `stopped()` is true.

    Raises:
        WorkloadError: a call of the user's code did not return within its limit. The thread continues to run.
    """
    found: list[tuple[_Found | None, BaseException | None]] = []

    def work() -> None:
        try:
            found.append((run(), None))
        except BaseException as error:  # any exception is raised again in the waiting thread
            found.append((None, error))

    thread = threading.Thread(target=work, daemon=True, name=f"rayps-{where}")
    thread.start()
    while thread.is_alive():
        thread.join(_LOOK_SECONDS)
        if stopped():
            return None
        call = find_call(thread.ident)
        if call is not None and call.seconds > (most := max(timeout, START_SECONDS)):
            raise WorkloadError(
                f"{call.method}() has not returned for {call.seconds:.0f} s in the {where} (the limit is {most:g} s):\n"
                "raise timeout if the call needs longer, or find out what it waits for"
            )
    value, error = found[0]
    if error is not None:
        raise error
    return value


# ---- threads that have ended by an exception

_lock = threading.Lock()
_ends: list[str] = []
_hooked = False


def record_thread_ends() -> None:
    """Start to record uncaught exceptions of threads. The previous `threading.excepthook` is still called."""
    global _hooked
    with _lock:
        if _hooked:
            return
        _hooked, before = True, threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        _record_end(args)
        before(args)

    threading.excepthook = hook


def list_ended_threads(since: int = 0) -> list[str]:
    """Return the texts of the exceptions that ended threads, in order, from number `since` on."""
    with _lock:
        return _ends[since:]


def _record_end(args: threading.ExceptHookArgs) -> None:
    name = "a thread" if args.thread is None else f"thread {args.thread.name!r}"
    reason = "" if args.exc_value is None else (str(args.exc_value).strip().splitlines() or [""])[0]
    where = "" if args.exc_value is None else place_of(args.exc_value)
    with _lock:
        if len(_ends) < _MOST_ENDS:
            _ends.append(f"{name} ended by an uncaught {args.exc_type.__name__}: {reason}{where}")

"""The time limit of a call of the user's code."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from rayps.core.errors import WorkloadError
from rayps.core.user_code import Call, under_way

START_SECONDS = 180.0  # seconds for a process to start and import torch, and for the first call of a method
_LOOK_SECONDS = 0.1

_Found = TypeVar("_Found")


def allowed(call: Call, timeout: float) -> float:
    """Return the seconds that a call may take: `timeout`, or more for the first call of a method.

    The first call may load or compile.
    """
    return max(timeout, START_SECONDS) if call.first else timeout


def overdue(call: Call | None, timeout: float, round: int | None, ends: Sequence[str] = ()) -> str | None:
    """Return why a member whose thread is in this call counts as dead; None if it does not.

    `round` is the current one, where known. `ends` are the exceptions that ended threads of its process.
    """
    if call is None or call.seconds <= allowed(call, timeout):
        return None
    at = "" if round is None else f" at round {round}"
    knob = f"timeout {timeout:g} s: raise it if one call needs longer"
    return "; ".join([f"{call.method}(){at} has not returned for {call.seconds:.0f} s ({knob})", *ends[-1:]])


def awaited(run: Callable[[], _Found], timeout: float, *, where: str, stopped: Callable[[], bool]) -> _Found | None:
    """Call `run` in a thread; return its result, or raise its exception. None once `stopped()`.

    Raises:
        WorkloadError: a call of the user's code did not return in time. Its thread continues.
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
        call = under_way(thread.ident)
        if call is not None and call.seconds > (most := max(timeout, START_SECONDS)):
            raise WorkloadError(
                f"{call.method}() has not returned for {call.seconds:.0f} s in the {where} (the limit is {most:g} s):\n"
                "raise timeout if it needs longer, or find out what it waits for"
            )
    value, error = found[0]
    if error is not None:
        raise error
    return value

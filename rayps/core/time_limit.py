"""How long a call of the user's code may take, and the end of the wait for one that takes longer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from rayps.core.errors import WorkloadError
from rayps.core.user_code import Call, under_way

START_SECONDS = 180.0  # for a process to start and to import torch, and for the first call of a method
_LOOK_SECONDS = 0.1

_Found = TypeVar("_Found")


def allowed(call: Call, timeout: float) -> float:
    """Seconds that a call may take: `timeout`, as for any silence; the first call of a method may load or compile."""
    return max(timeout, START_SECONDS) if call.first else timeout


def overdue(call: Call | None, timeout: float, round: int | None, ends: Sequence[str] = ()) -> str | None:
    """Why a member whose thread is in this call counts as dead; None while it does not.

    `round` is the one that it is in, where known. `ends` are what threads of its process ended by.
    """
    if call is None or call.seconds <= allowed(call, timeout):
        return None
    at = "" if round is None else f" at round {round}"
    knob = f"timeout {timeout:g} s: raise it where one call takes longer"
    return "; ".join([f"{call.method}(){at} has not returned for {call.seconds:.0f} s ({knob})", *ends[-1:]])


def awaited(run: Callable[[], _Found], timeout: float, *, where: str, stopped: Callable[[], bool]) -> _Found | None:
    """Call `run` in a thread and give back what it gave, or raise what it raised; None once `stopped()`.

    Raises:
        WorkloadError: a call of the user's code did not return in time. Its thread is left behind.
    """
    found: list[tuple[_Found | None, BaseException | None]] = []

    def work() -> None:
        try:
            found.append((run(), None))
        except BaseException as error:  # raised again by who waits, whatever it is
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
                f"{call.method}() has not returned for {call.seconds:.0f} s in the {where} ({most:g} s are allowed):\n"
                "raise timeout where it takes longer, or look for what it waits for"
            )
    value, error = found[0]
    if error is not None:
        raise error
    return value

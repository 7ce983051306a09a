"""Uncaught exceptions of this process's threads, as text: what a thread of the user's own ended by.

Such an exception ends its thread alone, as in plain Python; the process goes on. Whoever waits for that thread can be
told why it is not there any more.
"""

from __future__ import annotations

import threading
from typing import Any

from rayps.core.user_code import place_of

MOST = 1000  # of a process that are kept

_lock = threading.Lock()
_ends: list[str] = []
_hooked = False


def listen() -> None:
    """Keep what threads end by from now on; the hook that was there before is called too."""
    global _hooked
    with _lock:
        if _hooked:
            return
        _hooked, before = True, threading.excepthook

    def hook(args: Any) -> None:
        _keep(args)
        before(args)

    threading.excepthook = hook


def ended(since: int = 0) -> list[str]:
    """What threads ended by, in order, but for the first `since` of them."""
    with _lock:
        return _ends[since:]


def _keep(args: Any) -> None:
    name = "a thread" if args.thread is None else f"thread {args.thread.name!r}"
    said = "" if args.exc_value is None else (str(args.exc_value).strip().splitlines() or [""])[0]
    where = "" if args.exc_value is None else place_of(args.exc_value)
    with _lock:
        if len(_ends) < MOST:
            _ends.append(f"{name} ended by an uncaught {args.exc_type.__name__}: {said}{where}")

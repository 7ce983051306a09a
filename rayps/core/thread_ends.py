"""Record the uncaught exceptions of this process's threads, as text.

Such an exception ends only its thread, as in plain Python. The records explain why a user's thread has ended.
"""

from __future__ import annotations

import threading

from rayps.core.user_code import place_of

MOST = 1000  # records of a process

_lock = threading.Lock()
_ends: list[str] = []
_hooked = False


def listen() -> None:
    """Start to record uncaught exceptions; the previous hook is called too."""
    global _hooked
    with _lock:
        if _hooked:
            return
        _hooked, before = True, threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        _keep(args)
        before(args)

    threading.excepthook = hook


def ended(since: int = 0) -> list[str]:
    """Return the recorded exceptions, in order, from number `since` on."""
    with _lock:
        return _ends[since:]


def _keep(args: threading.ExceptHookArgs) -> None:
    name = "a thread" if args.thread is None else f"thread {args.thread.name!r}"
    said = "" if args.exc_value is None else (str(args.exc_value).strip().splitlines() or [""])[0]
    where = "" if args.exc_value is None else place_of(args.exc_value)
    with _lock:
        if len(_ends) < MOST:
            _ends.append(f"{name} ended by an uncaught {args.exc_type.__name__}: {said}{where}")

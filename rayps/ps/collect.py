"""Fetches a space's states after rounds that are to come, for checkpoints, in a thread of its own.

A server answers a PART once the round is closed there, so that the question must be asked before. The one under way is
given up when another round is wanted.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from rayps.core.errors import LinkError, RaypsError
from rayps.core.retained_parts import RetainedParts
from rayps.ps.client.session import Session
from rayps.ps.protocol.messages import GroupMessage

log = logging.getLogger(__name__)

AGAIN_SECONDS = 0.2  # after a connection was lost


class Collector:
    """One generation's. `meet` makes a talk of rank -1 about the space; `segments` are the ones to fetch."""

    def __init__(self, meet: Callable[[], Session], segments: list[int]) -> None:
        self._meet, self._segments = meet, segments
        self._states: RetainedParts[dict[int, Any]] = RetainedParts()
        self._asking = 0  # the round that the thread is asking for
        self._missed = 0  # the newest round that was asked for too late
        self._saved: list[int] = []
        self._talk: Session | None = None
        self._ended = False
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True, name="collector")
        self._thread.start()

    def want(self, rounds: int) -> None:
        """Fetch the states after `rounds`; what was wanted before and is not there is given up."""
        with self._news:
            changed = rounds != self._states.wanted
            self._states.wanted = rounds
            late = self._talk if changed and self._asking not in (0, rounds) else None
            self._news.notify_all()
        if late is not None:
            late.hang_up()

    def saved(self, rounds: int) -> None:
        """Tell the servers that this state is kept elsewhere."""
        with self._news:
            self._saved.append(rounds)
            self._news.notify_all()

    def held(self, slowest: int) -> tuple[int, list[int]]:
        """How far the space has come, as far as it matters to who collects, and the rounds that are here."""
        with self._news:
            wanted, held = self._states.wanted, sorted(self._states)
            if wanted and wanted not in held:
                # nobody is past it as long as the question is open
                return (max(slowest, wanted + 1) if self._missed == wanted else min(slowest, wanted)), held
            return slowest, held

    def states(self, rounds: int) -> dict[int, Any] | None:
        """The states after `rounds`, by segment, if they are here."""
        with self._news:
            return self._states.get(rounds)

    def close(self) -> None:
        """End the thread and its links."""
        with self._news:
            self._ended = True
            talk = self._talk
            self._news.notify_all()
        if talk is not None:
            talk.hang_up()
        self._thread.join(10.0)

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except Exception:  # a fault of ours: without checkpoints the run still goes on
            log.exception("the thread that collects checkpoints failed")
        finally:
            if self._talk is not None:
                self._talk.close()

    def _turn(self) -> bool:
        """Do the next thing that is to be done; False once it is over."""
        with self._news:
            self._news.wait_for(lambda: self._ended or self._saved or self._next())
            if self._ended:
                return False
            saved, self._saved = self._saved, []
            self._asking = rounds = 0 if saved else self._next()
        try:
            if self._talk is None:
                self._talk = self._meet()
                self._talk.join()
            for each in saved:
                self._talk.tell(GroupMessage.SAVED, each)
            if rounds:
                self._fetch(self._talk, rounds)
        except LinkError as error:
            log.debug("a checkpoint's states did not come: %s", error)
            if self._talk is not None:
                self._talk.close()
            with self._news:
                self._talk = None
                self._saved = saved + self._saved
                if not self._ended and rounds in (0, self._states.wanted):
                    self._news.wait(AGAIN_SECONDS)
        finally:
            self._asking = 0
        return True

    def _next(self) -> int:
        wanted = self._states.wanted
        return 0 if wanted in self._states or wanted == self._missed else wanted

    def _fetch(self, talk: Session, rounds: int) -> None:
        try:
            answers = talk.exchange(GroupMessage.PART, dict.fromkeys(self._segments, b""), step=rounds)
        except LinkError:
            raise
        except RaypsError as error:  # the round was over before the question came
            log.debug("%s", error)
            with self._news:
                self._missed = rounds
            return
        with self._news:
            self._states.keep(rounds, answers.pieces)

"""Where ranks of one host meet: everyone says in shared memory that it is here, and wakes only those who sleep.

Whoever comes to a barrier counts its turn up in memory that all can see; whoever waits long enough to sleep says that,
too, and the last one to come rings the sleepers' bells (counters in the kernel, eventfd). Where writes may be seen out
of order, bells do it all: every rank rings everyone's, one for even and one for odd barriers, so that a rank ahead is
not counted twice. A rank that gives up takes its turn back: whoever comes after that must not take it for here.
"""

from __future__ import annotations

import contextlib
import os
import time

import numpy as np
from numpy.typing import NDArray

from rayps.comm.link.memory import ORDERED, Fence
from rayps.comm.ring.mesh import Mesh

WORDS = 2  # int64 a rank in the shared memory
_YIELDS = 4  # times that a rank lets others have its core before it sleeps: mostly they come in that time


class Barrier:
    """The barrier of ranks `group` on one host.

    `words` are shared, `WORDS` int64 a rank, all zero at first; `bells` are this rank's two, and `theirs` for each of
    the two the ones of the other ranks, in order. All are closed by `close`.
    """

    def __init__(
        self, mesh: Mesh, group: list[int], words: NDArray[np.int64], bells: list[int], theirs: list[list[int]]
    ) -> None:
        self.turn = 0  # barriers that this rank has come to
        self._mesh = mesh
        self._group = group
        self._place = group.index(mesh.rank)
        self._elsewhere = [place for place, rank in enumerate(group) if rank != mesh.rank]
        self._turns, self._asleep = words[: len(group)], words[len(group) : 2 * len(group)]
        self._bells = bells
        self._theirs = theirs
        self._fence = Fence()

    def meet(self) -> None:
        """Return once every rank of the group is here; what each wrote before is visible to all. Raises LinkError."""
        with self._mesh.hold:  # nobody closes the bells meanwhile
            self._mesh.check()
            self.turn += 1
            self._turns[self._place] = self.turn
            try:
                self._meet_by_words() if ORDERED else self._meet_by_bells()
            except BaseException:
                self._turns[self._place] = self.turn - 1
                raise

    def _meet_by_words(self) -> None:
        self._fence()
        if self._all_here():
            for place, bell in zip(self._elsewhere, self._theirs[0], strict=True):
                if self._asleep[place]:
                    os.eventfd_write(bell, 1)
            return
        start = time.perf_counter()
        for _ in range(_YIELDS):
            os.sched_yield()
            if self._all_here():
                break
        self._mesh.seconds_waiting += time.perf_counter() - start
        while not self._all_here():
            self._sleep()

    def _sleep(self) -> None:
        """Wait for the bell; says so first, and then looks once more."""
        self._asleep[self._place] = 1
        self._fence()
        if not self._all_here():
            self._mesh.await_bell(self._bells[0], self._absent)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._bells[0])
        self._asleep[self._place] = 0

    def _meet_by_bells(self) -> None:
        parity = (self.turn - 1) & 1
        for bell in self._theirs[parity]:
            os.eventfd_write(bell, 1)
        mine, missing = self._bells[parity], len(self._elsewhere)
        while missing:
            self._mesh.await_bell(mine, self._absent)
            missing -= os.eventfd_read(mine)
        while not self._all_here():  # one rang and then gave up: its last words are under way
            self._mesh.await_bell(mine, self._absent)

    def _all_here(self) -> bool:
        return bool(min(self._turns.tolist()) >= self.turn)

    def _absent(self) -> set[int]:
        """The ranks that have not come to this rank's latest barrier."""
        return {rank for rank, turn in zip(self._group, self._turns.tolist(), strict=True) if turn < self.turn}

    def close(self) -> None:
        """Close the bells."""
        for bell in [*self._bells, *self._theirs[0], *self._theirs[1]]:
            os.close(bell)
        self._bells, self._theirs = [], [[], []]

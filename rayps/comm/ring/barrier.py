"""A barrier between ranks of one host, by counters in shared memory. Only sleeping and waking need system calls.

A rank that enters the barrier increments its counter, which all ranks can read. A rank that has waited for some time
sets a flag and sleeps. The last rank to enter wakes the sleeping ranks through their file descriptors (eventfd).

On a processor that makes another process's writes visible out of order, ranks signal only by descriptors: every rank
signals every other rank. Even and odd barriers have separate descriptors; otherwise a rank that has already entered the
next barrier would count twice. A rank that gives up decrements its counter, so that other ranks do not count it.
"""

from __future__ import annotations

import contextlib
import os
import time

import numpy as np
from numpy.typing import NDArray

from rayps.comm.link.memory import ORDERED, Fence
from rayps.comm.ring.mesh import Mesh

WORDS = 4  # number of int64 values per rank in the shared memory
_YIELDS = 4  # how often a rank yields its core before it sleeps; usually the other ranks enter during that time


class Barrier:
    """A barrier of the ranks `group`, which are on one host.

    `words` is shared memory of `WORDS` int64 per rank, all zero at first. `wakeups` are this rank's two eventfds, for
    even and for odd barriers. `peer_wakeups` are the corresponding two lists of the other ranks' eventfds, in the order
    of ranks. `close` closes all these eventfds.
    """

    def __init__(
        self, mesh: Mesh, group: list[int], words: NDArray[np.int64], wakeups: list[int], peer_wakeups: list[list[int]]
    ) -> None:
        self.turn = 0  # number of barriers that this rank has entered
        self._mesh = mesh
        self._group = group
        self._place = group.index(mesh.rank)
        self._elsewhere = [place for place, rank in enumerate(group) if rank != mesh.rank]
        self._entered, self._asleep = words[: len(group)], words[len(group) : 2 * len(group)]
        # the time of each rank's entry, in nanoseconds of the host's clock, into even and odd barriers: no rank enters
        # the second barrier after this one before all ranks have left this one
        self._arrived = [words[at * len(group) : (at + 1) * len(group)] for at in (2, 3)]
        self._wakeups = wakeups
        self._peer_wakeups = peer_wakeups
        self._fence = Fence()

    def wait(self) -> None:
        """Wait until every rank of the group has entered; each rank's earlier writes are then visible to all ranks.

        Raises LinkError if another rank dies, gives up or does not enter within the mesh's timeout.
        """
        with self._mesh.hold:  # the descriptors are not closed while this lock is held
            self._mesh.check()
            self.turn += 1
            began = time.monotonic_ns()
            self._arrived[self.turn & 1][self._place] = began
            self._entered[self._place] = self.turn
            try:
                waited = self._wait_by_counters() if ORDERED else self._wait_by_eventfds()
            except BaseException:
                self._entered[self._place] = self.turn - 1
                raise
            if waited:
                self._count_wait(began)

    def _count_wait(self, began: int) -> None:
        """Count the time since `began` as a wait for the rank that entered last, if this is another rank."""
        arrived = self._arrived[self.turn & 1].tolist()
        last = max(arrived)
        if last > began:
            self._mesh.waits[self._group[arrived.index(last)]] += (time.monotonic_ns() - began) / 1e9

    def _wait_by_counters(self) -> bool:
        """Wait until all ranks have entered. Return whether this rank was not the last one."""
        self._fence()
        if self._have_all_entered():
            for place, wakeup in zip(self._elsewhere, self._peer_wakeups[0], strict=True):
                if self._asleep[place]:
                    os.eventfd_write(wakeup, 1)
            return False
        start = time.perf_counter()
        for _ in range(_YIELDS):
            os.sched_yield()
            if self._have_all_entered():
                break
        self._mesh.seconds_waiting += time.perf_counter() - start
        while not self._have_all_entered():
            self._sleep()
        return True

    def _sleep(self) -> None:
        """Set the sleep flag, check the counters once more, then sleep until this rank's eventfd is signalled."""
        self._asleep[self._place] = 1
        self._fence()
        if not self._have_all_entered():
            self._mesh.await_wakeup(self._wakeups[0], self._find_absent)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wakeups[0])
        self._asleep[self._place] = 0

    def _wait_by_eventfds(self) -> bool:
        """Wait until all ranks have entered and signalled. Return True."""
        parity = (self.turn - 1) & 1
        for wakeup in self._peer_wakeups[parity]:
            os.eventfd_write(wakeup, 1)
        mine, missing = self._wakeups[parity], len(self._elsewhere)
        while missing:
            self._mesh.await_wakeup(mine, self._find_absent)
            missing -= os.eventfd_read(mine)
        while not self._have_all_entered():  # a rank has signalled and then given up: wait for its ABORT
            self._mesh.await_wakeup(mine, self._find_absent)
        return True

    def _have_all_entered(self) -> bool:
        return bool(min(self._entered.tolist()) >= self.turn)

    def _find_absent(self) -> set[int]:
        """Return the ranks that have not entered this rank's latest barrier."""
        return {rank for rank, turn in zip(self._group, self._entered.tolist(), strict=True) if turn < self.turn}

    def close(self) -> None:
        """Close this rank's eventfds, and its copies of the other ranks' eventfds."""
        for wakeup in [*self._wakeups, *self._peer_wakeups[0], *self._peer_wakeups[1]]:
            os.close(wakeup)
        self._wakeups, self._peer_wakeups = [], [[], []]

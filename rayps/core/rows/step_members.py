"""Which ranks are the members of a step with backup workers: the first that arrive. Pure; no clock, no I/O.

Chen et al., "Revisiting distributed synchronous SGD", ICLR 2016 workshop. Of N + b workers, the gradients of the first
N count in each step. A rank *arrives* when its gradient of the step is complete. When enough ranks have arrived, the
members of the step are decided, once and for all ranks. A rank that arrives later is *late*: it learns the members of
the step, and its gradient does not count.

One process decides: rank 0 of a ring, or the server of the first segment. It keeps a decision until every rank has
learned it.
"""

from __future__ import annotations

Members = tuple[int, ...]  # the members of a step, in the order of ranks


class StepMembers:
    """Decides the members of one step after the other, for `size` ranks. `step` is the step that is not decided yet."""

    def __init__(self, size: int, first: int = 0) -> None:
        """Begin with step number `first`."""
        self.size, self.step = size, first
        self._needed: int | None = None  # the number of members of this step, by its first arrival
        self._arrived: set[int] = set()
        self._decided: dict[int, Members] = {}
        self._learned = dict.fromkeys(range(size), first)  # for each rank, the first step that it may ask about again

    @property
    def arrived(self) -> Members:
        """The ranks that have arrived at this step."""
        return tuple(sorted(self._arrived))

    def arrive(self, rank: int, step: int, needed: int) -> bool:
        """Record that a rank's gradient of `step` is complete; return whether this has decided the step's members.

        `needed`, the number of members, is equal on all ranks. A repeated arrival has no effect, and an arrival at a
        step that was decided before has none either: the rank is late, unless it is a member already.

        Raises:
            ValueError: there is no such rank, `step` is not decided and not this step, or `needed` is another number
                than that of the ranks before.
        """
        self._check(rank)
        if step < self.step:
            return False
        if step > self.step:
            raise ValueError(f"rank {rank} arrived at step {step}, and the members of step {self.step} are not known")
        if not 1 <= needed <= self.size or self._needed not in (None, needed):
            raise ValueError(
                f"rank {rank} arrived at step {step} of {needed} members; expected "
                f"{self._needed if self._needed is not None else f'1 to {self.size}'}"
            )
        self._needed = needed
        self._arrived.add(rank)
        if len(self._arrived) < needed:
            return False
        self._decided[step] = self.arrived
        self._arrived, self._needed = set(), None
        self.step += 1
        return True

    def since(self, rank: int, step: int) -> list[Members]:
        """Return the members of `step` and of all later steps that are decided, in order.

        The rank knows the members of all earlier steps, and does not ask about these again: when no rank does, they are
        dropped. Raises ValueError if there is no such rank, or if the members of `step` were dropped.
        """
        self._check(rank)
        if step < self._learned[rank]:
            raise ValueError(f"rank {rank} asks for the members of step {step}, and has learned them before")
        self._learned[rank] = step
        least = min(self._learned.values())
        for known in [known for known in self._decided if known < least]:
            del self._decided[known]
        return [self._decided[at] for at in range(step, self.step)]

    def missing(self) -> Members:
        """Return the ranks that have not arrived at this step."""
        return tuple(rank for rank in range(self.size) if rank not in self._arrived)

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} does not exist: {self.size} workers have the ranks 0 to {self.size - 1}")

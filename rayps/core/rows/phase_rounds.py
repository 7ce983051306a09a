"""The rounds of each phase and epoch of a run, and the rounds after which a snapshot is taken. Pure.

A round is one batch of every replica. An epoch's number of rounds depends on the number of replicas of its phase.

If the data has no length, its end is known only when it happens. An epoch then has `OPEN` rounds in these plans, and
the workers end it earlier, by agreement. A phase of open epochs ends as by a stop rule: see `Calendar.cut`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from rayps_client.errors import ConfigError

from rayps.core.grid import Grid

OPEN = 1 << 40  # the planned rounds of an epoch whose length is not known: more than any run has


class Planned(Protocol):
    """The facts of a phase on which its length depends."""

    @property
    def epochs(self) -> int | None:
        """The number of epochs of the phase; None if the phase lasts until the run ends."""

    def grid(self, workers: int) -> Grid:
        """The layout of `workers` in this phase."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """The rounds after which a snapshot is taken: `end`, and `origin` plus each multiple of `every` if `every` > 0.

    The state after round `also` is retained too, if it is not None.
    """

    every: int
    end: int
    origin: int = 0
    also: int | None = None

    def __contains__(self, rounds: int) -> bool:
        if rounds in (self.end, self.also):
            return True
        return self.every > 0 and (rounds - self.origin) % self.every == 0

    def following(self, rounds: int) -> int:
        """Return the first round, from `rounds` on and at most `end`, after which a snapshot is taken."""
        if self.every <= 0:
            return self.end
        return min(self.end, self.origin - (self.origin - rounds) // self.every * self.every)


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """The rounds of one phase, `begin` to `end` - 1, counted from the start of the run."""

    begin: int
    end: int
    epoch: int  # number of the phase's first epoch
    steps: int  # rounds in an epoch
    replicas: int
    columns: int  # workers of a replica

    @property
    def origin(self) -> tuple[int, int]:
        """The numbers of the round and of the epoch with which the phase begins."""
        return self.begin, self.epoch

    def epoch_of(self, done: int) -> int:
        """Return the number of complete epochs of the run after `done` rounds, in this phase."""
        return self.epoch + (done - self.begin) // self.steps


@dataclass(frozen=True, slots=True)
class EarlyEnd:
    """Why a run ends before its planned end: a stop rule was met, or a callback has stopped it."""

    reason: str
    planned: int | None  # the round with which the run would have ended; None if that was not known

    def message(self, at: int) -> str:
        """Return what is reported of a run that ends after round `at`."""
        return f"ended early after round {at}{'' if self.planned is None else f' of {self.planned}'}: {self.reason}"


class Calendar:
    """The rounds and epochs of all phases of one run, in order."""

    def __init__(
        self, phases: Sequence[Planned], steps: Sequence[int], workers: int, *, epochs: int | None, rounds: int | None
    ) -> None:
        """Compute the phases' spans. `steps` has the number of rounds of an epoch for each phase.

        The job lasts `epochs` epochs or, if `epochs` is None, `rounds` rounds.

        Raises:
            ConfigError: the phases' epochs and the job's epochs or rounds contradict each other.
        """
        self.open = max(steps) >= OPEN  # whether the length of epochs is not known before they end
        if self.open and rounds is not None and len(phases) > 1:
            raise ConfigError(
                f"steps is {rounds}, and the data has no length: the rounds of the phases before the last are not "
                "known; give epochs instead of steps",
                field="steps",
            )
        if len(set(steps)) == 1:
            ends = phase_ends(phases, steps[0], epochs=epochs, steps=rounds)
        else:
            ends = _find_ends(phases, steps, epochs, rounds)
        self.spans: list[PhaseSpan] = []
        begin = epoch = 0
        for phase, end, count in zip(phases, ends, steps, strict=True):
            grid = phase.grid(workers)
            self.spans.append(PhaseSpan(begin, end, epoch, count, grid.data, grid.columns))
            begin, epoch = end, epoch + (phase.epochs or 0)
        self.early: EarlyEnd | None = None
        self._planned_rounds = rounds
        self._planned_epochs, self._by_rounds = self._count_epochs(), self.open and rounds is not None

    @property
    def rounds(self) -> int:
        """The total number of rounds; at least `OPEN` if it is not known."""
        return self.spans[-1].end

    @property
    def known_rounds(self) -> int | None:
        """The total number of rounds, or None if it is not known before the data ends."""
        return None if self.rounds >= OPEN else self.rounds

    @property
    def epochs(self) -> int:
        """The total number of epochs; the last may be incomplete."""
        return self._planned_epochs if self.open else self._count_epochs()

    @property
    def known_epochs(self) -> int | None:
        """The total number of epochs, or None if the run has a number of rounds and its epochs have no known length."""
        return None if self._by_rounds else self.epochs

    def _count_epochs(self) -> int:
        last = self.spans[-1]
        return last.epoch - (last.begin - last.end) // last.steps

    def at(self, done: int) -> PhaseSpan:
        """Return the phase of the next round after `done` rounds, or the last phase if the run has ended."""
        return next((span for span in self.spans if done < span.end), self.spans[-1])

    def epoch_of(self, number: int) -> int:
        """Return the epoch of the round with this number."""
        return self.at(number).epoch_of(number)

    def cut(self, planned: int, at: int) -> bool:
        """Move the end of the phase that ends at round `planned` to the earlier round `at`.

        All later phases move by the same number of rounds. Return False, without a change, if no phase ends at
        `planned`.
        """
        number = next((i for i, span in enumerate(self.spans) if span.end == planned and span.begin <= at), None)
        if number is None:
            return False
        self.spans[number] = replace(self.spans[number], end=at)
        for i in range(number + 1, len(self.spans)):
            span = self.spans[i]
            self.spans[i] = replace(span, begin=span.begin - planned + at, end=span.end - planned + at)
        return True

    def recount(self, at: int, origin: tuple[int, int], steps: int, replicas: int) -> None:
        """Count epochs of `steps` rounds, from `origin` = (round, epoch) on, in all rounds after `at`.

        `replicas` is the new number of replicas. Phases keep their numbers of epochs, and a run that ends with a round
        keeps this round. The rounds of epochs must have been known.
        """
        number = self.spans.index(self.at(at))
        before = self.spans[number]
        if steps == before.steps and origin[0] - origin[1] * steps == before.begin - before.epoch * steps:
            self.spans[number:] = [replace(span, replicas=replicas) for span in self.spans[number:]]
            return  # the rounds are counted as before, and an end that a stop rule has moved does not change
        begin = end = 0
        for i in range(number, len(self.spans)):
            span = self.spans[i]
            epochs = -((span.begin - span.end) // span.steps)
            if i == number:
                begin, epoch = origin
                end = begin + (before.epoch + epochs - epoch) * steps
            else:
                begin, epoch = end, span.epoch
                end = begin + epochs * steps
            if self._planned_rounds is not None and i == len(self.spans) - 1:
                end = span.end
            self.spans[i] = replace(span, begin=begin, end=end, epoch=epoch, steps=steps, replicas=replicas)

    def ends_early(self, reason: str) -> EarlyEnd:
        """Record why the run ends before its planned end, and return it. A reason that was recorded before holds.

        Call this before the planned end moves (`cut`, `end_at`).
        """
        if self.early is None:
            self.early = EarlyEnd(reason, self.known_rounds)
        return self.early

    def end_at(self, at: int) -> None:
        """End the run after round `at`: later rounds are dropped from all phases."""
        self.spans = [replace(span, begin=min(span.begin, at), end=min(span.end, at)) for span in self.spans]

    def after(self, epochs: int) -> int:
        """Return the number of rounds after which the run has completed `epochs` epochs."""
        span = next((span for span in reversed(self.spans) if span.epoch <= epochs), self.spans[0])
        return span.begin + (epochs - span.epoch) * span.steps


def phase_ends(phases: Sequence[Planned], steps_per_epoch: int, *, epochs: int | None, steps: int | None) -> list[int]:
    """Return for each phase the number of rounds, from the start of the run, after which the phase ends.

    Raises:
        ConfigError: the phases' epochs and the job's epochs or steps contradict each other.
    """
    before = sum(phase.epochs or 0 for phase in phases[:-1])
    if steps is not None and phases[-1].epochs is not None:
        raise ConfigError(
            f"the last phase has {phases[-1].epochs} epochs and steps is {steps}: give only one of the two",
            field="steps",
        )
    total = steps
    if total is None:
        last = phases[-1].epochs
        if epochs is None:
            epochs = before + (last if last is not None else 1)
        if last is not None and epochs != before + last:
            raise ConfigError(
                f"the phases have {before + last} epochs in all and epochs is {epochs}: leave out epochs",
                field="epochs",
            )
        total = epochs * steps_per_epoch
    ends, at = [], 0
    for phase in phases[:-1]:
        at += (phase.epochs or 0) * steps_per_epoch
        ends.append(at)
    if ends and ends[-1] >= total:
        raise ConfigError(
            f"the phases before the last take {before} epochs = {ends[-1]} rounds, and the job has only {total}: "
            "raise epochs",
            field="epochs",
        )
    return [*ends, total]


def _find_ends(phases: Sequence[Planned], steps: Sequence[int], epochs: int | None, rounds: int | None) -> list[int]:
    """Return what `phase_ends` returns, if the phases differ in rounds per epoch."""
    by_epoch = phase_ends(phases, 1, epochs=epochs, steps=None) if rounds is None else []
    found, at, before = [], 0, 0
    for i, phase in enumerate(phases):
        if i < len(phases) - 1:
            at += (phase.epochs or 0) * steps[i]
            before += phase.epochs or 0
        else:
            at = rounds if rounds is not None else at + (by_epoch[-1] - before) * steps[i]
        found.append(at)
    if len(found) > 1 and found[-2] >= found[-1]:
        raise ConfigError(
            f"the phases before the last take {before} epochs = {found[-2]} rounds, and the job has only {found[-1]}: "
            "raise steps",
            field="steps",
        )
    return found

"""Collect, for each round, how single clients' updates differ: the option `report=clients` of federated strategies.

Each worker holds the updates of its clients one after another, and keeps of each the norm and a sketch: the update is
multiplied by random signs, and every `WIDTH`-th element is added up (Charikar, Chen, Farach-Colton, "Finding frequent
items in data streams", ICALP 2002, with one row). A sketch is linear, so that the sketch of a mean is the mean of the
sketches, and the inner product of two sketches is that of the vectors, with a standard deviation of at most about
|u| |v| sqrt(2 / WIDTH): 0.09 in a cosine. A vector of at most `WIDTH` elements is its own sketch.

Once a round the workers exchange these numbers, and rank 0 writes what `rayps.federated.rules.client_scores` computes
from them as an event. Everything over rounds is computed from the events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
import torch
from rayps_client.values import Json
from torch import Tensor

from rayps.comm.ring.ring import Ring
from rayps.federated.rules.client_scores import FEWEST, KIND, RoundFacts, comparable, fact_deviations, round_numbers
from rayps.federated.rules.gather_replies import Gathering

WIDTH = 251  # numbers of a sketch; a prime, so that rows of a layer do not end at the same number
SHOWN = 1000  # clients in an event: those with the largest deviations
_DIGITS = 6  # of a number in an event
_ROW = "row"


class EventWriter(Protocol):
    """Where events are written."""

    def __call__(self, kind: str, message: str, **facts: Json) -> None:
        """Add an event to the job's journal."""


class Sketch:
    """Sketches of vectors of `size` elements. The same seed gives the same sketches."""

    def __init__(self, size: int, dtype: torch.dtype, seed: int) -> None:
        self.size, self.width = size, min(size, WIDTH)
        self._signs: Tensor | None = None
        if size > WIDTH:
            made = torch.Generator().manual_seed(seed)
            bits = torch.randint(0, 2, (size,), generator=made, dtype=torch.int8)
            self._signs = (2 * bits - 1).to(dtype)

    def of(self, vector: Tensor, *, in_place: bool = False) -> Tensor:
        """Return the sketch [width], float64, of a vector [size]. With `in_place` the vector is overwritten."""
        if self._signs is None:
            return vector.to(torch.float64)
        signed = vector.mul_(self._signs) if in_place else vector * self._signs
        whole = self.size - self.size % self.width
        found = signed[:whole].view(-1, self.width).sum(dim=0)  # in the dtype of the model, which costs a third
        found[: self.size - whole] += signed[whole:]
        return found.to(torch.float64)


class UpdateReports:
    """What one worker knows of its clients' updates in a round. All workers make the same calls of `write`."""

    def __init__(self, size: int, dtype: torch.dtype, seed: int) -> None:
        self._sketch, self._update = Sketch(size, dtype, seed), torch.empty(size, dtype=dtype)
        self._gathering = Gathering({_ROW: (2 + self._sketch.width, torch.float64)})
        self._place: dict[int, int] = {}
        self._last: tuple[float, Tensor] | None = None  # weight and row of the last update

    def begin(self, cohort: Sequence[int]) -> None:
        """Start a round with these clients."""
        self._place = {client: place for place, client in enumerate(dict.fromkeys(map(int, cohort)))}
        self._gathering.clear()

    def see(self, reply: Tensor, base: Tensor, weight: float) -> None:
        """Take the update `reply` - `base` of a reply, which may still be rejected."""
        update = torch.sub(reply, base, out=self._update)  # one memory for all updates: new memory costs more than this
        row = torch.zeros(2 + self._sketch.width, dtype=torch.float64)
        row[0] = torch.linalg.vector_norm(update)
        row[2:] = self._sketch.of(update, in_place=True)
        self._last = weight, row

    def accept(self, client: int, loss: float) -> None:
        """Keep the last update that was seen: it is part of the round, and this was the loss of its training."""
        assert self._last is not None, "an accepted reply was seen"
        (weight, row), self._last = self._last, None
        row[1] = loss
        self._gathering.add(self._place[client], weight, {_ROW: row})

    def write(
        self, ring: Ring, round: int, names: Callable[[Iterable[int]], list[str]], event: EventWriter | None
    ) -> None:
        """Exchange what the workers know, and write the event of the round. `event` is None on all ranks but 0."""
        replies = self._gathering.gather(ring, list(self._place))
        if event is None or not replies.clients:
            return
        rows = replies.rows[_ROW].astype(np.float64, copy=False)
        weights, clients = np.asarray(replies.weights, dtype=np.float64), names(replies.clients)
        numbers = round_numbers(RoundFacts(weights, rows[:, 0], rows[:, 1], rows[:, 2:]))
        most = np.abs(list(fact_deviations(comparable(numbers)).values())).max(axis=0)
        shown = np.sort(np.argsort(-most, kind="stable")[:SHOWN]).tolist()
        first = int(np.argmax(most))
        deviates = f"{clients[first]} deviates most, by {most[first]:.1f} times the spread of the others"
        event(
            KIND,
            f"round {round}: {len(most)} clients; "
            + (deviates if len(most) >= FEWEST else f"none is named, because fewer than {FEWEST} replied"),
            round=round,
            client=[clients[at] for at in shown],
            **{name: [float(f"{value[at]:.{_DIGITS}g}") for at in shown] for name, value in numbers.items()},
        )

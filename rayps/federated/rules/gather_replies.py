"""Exchange the replies of a round, so that every worker has all of them, as matrices with one row for each reply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rayps.comm.ring.ring import Ring
from rayps.federated.rules.rule_arithmetic import Matrix


@dataclass(slots=True)
class Replies:
    """All replies of a round, in the order of the cohort."""

    rows: dict[str, Matrix]  # from the name of a part of a reply to a matrix with one row for each reply
    weights: list[float]  # of each reply
    clients: list[int]  # number of the client that sent each reply


class Gathering:
    """Stores the replies of the clients that one worker trains in a round, until the workers exchange their replies."""

    def __init__(self, kinds: Mapping[str, tuple[int, torch.dtype]]) -> None:
        """Prepare to store replies. `kinds` is a dict from the name of a part of a reply to its length and dtype.

        Parts in half precision are exchanged as float32.
        """
        self._kinds = {
            name: (size, torch.float64 if dtype == torch.float64 else torch.float32)
            for name, (size, dtype) in kinds.items()
        }
        self._mine: list[tuple[int, float, Mapping[str, Tensor]]] = []

    def clear(self) -> None:
        """Drop all stored replies, to start a round."""
        self._mine = []

    def add(self, place: int, weight: float, sent: Mapping[str, Tensor]) -> None:
        """Store the reply of the client at position `place` of the cohort. The reply's tensors are not copied."""
        self._mine.append((place, weight, sent))

    def gather(self, ring: Ring, cohort: list[int]) -> Replies:
        """Exchange the stored replies, and return the replies of all workers. Every worker must call this method.

        `cohort` lists the clients of the round in the order of their positions.
        """
        most = int(ring.max(torch.tensor([len(self._mine)])))
        head = torch.full((most, 2), -1.0, dtype=torch.float64)
        for at, (place, weight, _) in enumerate(self._mine):
            head[at] = torch.tensor([place, weight], dtype=torch.float64)
        heads = ring.all_gather(head).view(-1, 2)
        places = heads[:, 0].tolist()
        order = sorted((at for at, place in enumerate(places) if place >= 0), key=lambda at: places[at])
        rows: dict[str, Matrix] = {}
        for name, (size, dtype) in self._kinds.items():
            mine = torch.zeros(most, size, dtype=dtype)
            for at, (_, _, sent) in enumerate(self._mine):
                mine[at] = sent[name]
            rows[name] = ring.all_gather(mine).view(-1, size)[order].numpy()
        self._mine = []
        return Replies(rows, heads[order, 1].tolist(), [cohort[int(places[at])] for at in order])

"""Exchange borrowed parameters between the columns of one replica: values before a step, gradients after it.

A parameter has one owner column, and is only in the owner's vector, which a strategy updates, clips and saves. Before
each use the owner sends the current values to the columns that borrow them: along the stages one message per pair of
stages, then along the tensor ranks one broadcast. After backward a stage returns the gradient of a tied weight, and the
owner adds it, in the order of stages. Parameters that all tensor ranks hold whole have the same gradient on each of
them, so these gradients are not returned. Copies cannot diverge: only the owner changes a parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from rayps.comm.ring import Ring
from rayps.parallel.division.division import Division

TAG = 1 << 40  # tag of these messages between stages; activations have other tags
Pair = tuple[int, int]  # owner, borrower


class Share:
    """One worker's part of the exchange. All workers of a replica construct it and call it in the same order."""

    def __init__(
        self, division: Division, column: int, parameters: Mapping[str, nn.Parameter], rings: Mapping[str, Ring]
    ) -> None:
        """Prepare; `parameters` are this worker's, by name in the whole model; `rings` are this worker's, by axis."""
        stage, rank = division.place(column)
        names: dict[Pair, list[str]] = {}
        for other, each in enumerate(division.columns):
            there = division.place(other)
            for lent in each.borrowed:
                owner = division.place(lent.owner)
                if lent.tied and there[1] == rank and stage in (owner[0], there[0]):
                    names.setdefault((owner[0], there[0]), []).append(lent.piece.name)
        # all workers use one order, so that no two workers wait for each other
        self._pairs = [(pair, [parameters[name] for name in names[pair]]) for pair in sorted(names)]
        whole = {
            lent.piece.name
            for i, each in enumerate(division.columns)
            if division.place(i)[0] == stage
            for lent in each.borrowed
            if not lent.tied
        }
        self.whole = [(entry.name, parameters[entry.name]) for entry in division.layout.entries if entry.name in whole]
        self._whole = [p for _, p in self.whole]  # parameters that each tensor rank of this stage holds whole
        self._stage, self._rank = stage, rank
        self._rings = rings

    @torch.no_grad()
    def refresh(self) -> None:
        """Receive the owners' current values. Raises LinkError."""
        for (owner, borrower), params in self._pairs:
            if owner == self._stage:
                self._rings["stage"].send(_packed(params), borrower, TAG)
            else:
                _unpack(self._rings["stage"].recv(_room(params), owner, TAG), params)
        if self._whole:
            packed = _packed(self._whole) if self._rank == 0 else _room(self._whole)
            self._rings["tensor"].broadcast(packed)
            if self._rank != 0:
                _unpack(packed, self._whole)

    @torch.no_grad()
    def give_back(self) -> None:
        """Add the gradients of tied weights to their owners'; a gradient that no stage computed stays None.

        Raises LinkError.
        """
        for (owner, borrower), params in self._pairs:
            marks = torch.tensor([p.grad is not None for p in params]).to(params[0])
            if borrower == self._stage:
                grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
                self._rings["stage"].send(torch.cat([_packed(grads), marks]), owner, TAG)
                for p in params:
                    p.grad = None
                continue
            packed = self._rings["stage"].recv(torch.cat([_room(params), marks]), borrower, TAG)
            grads = [torch.empty_like(p) for p in params]
            _unpack(packed[: -len(params)], grads)
            for p, grad, mark in zip(params, grads, packed[-len(params) :].tolist(), strict=True):
                if mark:
                    p.grad = grad if p.grad is None else p.grad + grad


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([each.detach().reshape(-1) for each in tensors])


def _room(tensors: Sequence[Tensor]) -> Tensor:
    return torch.empty(sum(each.numel() for each in tensors), dtype=tensors[0].dtype, device=tensors[0].device)


def _unpack(packed: Tensor, into: Sequence[Tensor]) -> None:
    parts = torch.split_with_sizes(packed, [each.numel() for each in into])
    for each, part in zip(into, parts, strict=True):
        each.copy_(part.view(each.shape))

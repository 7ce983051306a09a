"""Exchange borrowed parameters between the columns of one replica: values before a step, gradients after it.

Each parameter is owned by one column: only the owner's vector contains it, and a strategy updates, clips and saves that
vector. Before each use, the owner sends the current values to the columns that borrow the parameter: along the stages
one message per pair of stages, then along the tensor ranks one broadcast. After backward, a stage sends the gradient of
a tied weight to the owner, which adds these gradients in the order of stages. A parameter that every tensor rank uses
whole has the same gradient on all of them, so that gradient is not sent. Copies cannot diverge, as only the owner
changes a parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from rayps.comm.ring import Ring
from rayps.parallel.division.division import Division

TAG = 1 << 40  # tag of messages with parameters between stages; activations have other tags
Pair = tuple[int, int]  # (stage of the owner, stage of the borrower)


class Share:
    """Exchanges the borrowed parameters of one worker. All workers of a replica must make the same calls in order."""

    def __init__(
        self, division: Division, column: int, parameters: Mapping[str, nn.Parameter], rings: Mapping[str, Ring]
    ) -> None:
        """Prepare the exchanges of the worker in `column`.

        `parameters` are the worker's parameters, by their names in the whole model; `rings` are its rings, by axis.
        """
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
        self._whole = [p for _, p in self.whole]  # parameters that are not split among this stage's tensor ranks
        self._stage, self._rank = stage, rank
        self._rings = rings

    @torch.no_grad()
    def refresh(self) -> None:
        """Send the current values of owned parameters, and receive those of borrowed ones. Raises LinkError."""
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
        """Send the gradients of borrowed tied weights to their owners, which add them to their own gradients.

        A gradient that no stage has computed stays None. Raises LinkError.
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

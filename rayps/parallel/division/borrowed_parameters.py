"""Exchange borrowed parameters between the columns of one replica: values before a step, gradients after it.

Each parameter is owned by one column. Only the owner's vector contains the parameter, and a strategy updates, clips and
saves that vector. Before each use, the owner sends the current values to the columns that borrow the parameter: one
message for each pair of stages, then one broadcast among the tensor ranks of a stage. After backward, a stage sends the
gradient of a tied weight to the owner, which adds these gradients in the order of stages. A parameter that every tensor
rank uses whole has the same gradient on all tensor ranks, so that gradient is not sent. Copies cannot diverge, because
only the owner changes a parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from rayps.comm.ring import Ring
from rayps.tensors.division import Division

TAG = 1 << 40  # tag of messages with parameters between stages; activations have other tags
Pair = tuple[int, int]  # (stage of the owner, stage of the borrower)


class BorrowedParameters:
    """Exchanges the borrowed parameters of one worker.

    All workers of a replica must make the same calls in the same order.
    """

    def __init__(
        self, division: Division, column: int, parameters: Mapping[str, nn.Parameter], rings: Mapping[str, Ring]
    ) -> None:
        """Prepare the exchanges of the worker in `column`.

        `parameters` maps names in the whole model to the worker's parameters. `rings` maps the axes "stage" and
        "tensor" to the worker's rings.
        """
        stage, rank = division.place(column)
        names: dict[Pair, list[str]] = {}
        for other, each in enumerate(division.columns):
            there = division.place(other)
            for borrowed in each.borrowed:
                owner = division.place(borrowed.owner)
                if borrowed.tied and there[1] == rank and stage in (owner[0], there[0]):
                    names.setdefault((owner[0], there[0]), []).append(borrowed.piece.name)
        # all workers use one order, so that no two workers wait for each other
        self._pairs = [(pair, [parameters[name] for name in names[pair]]) for pair in sorted(names)]
        whole = {
            borrowed.piece.name
            for i, each in enumerate(division.columns)
            if division.place(i)[0] == stage
            for borrowed in each.borrowed
            if not borrowed.tied
        }
        self.whole = [(entry.name, parameters[entry.name]) for entry in division.layout.entries if entry.name in whole]
        self._whole = [p for _, p in self.whole]  # parameters that are not split among this stage's tensor ranks
        self._stage, self._rank = stage, rank
        self._rings = rings

    @torch.no_grad()
    def refresh(self) -> None:
        """Send the current values of owned parameters, and receive the values of borrowed parameters.

        Raises LinkError if another worker of the replica is lost or does not answer.
        """
        for (owner, borrower), params in self._pairs:
            if owner == self._stage:
                self._rings["stage"].send(_flattened(params), borrower, TAG)
            else:
                _copy_parts(self._rings["stage"].recv(_empty_vector(params), owner, TAG), params)
        if self._whole:
            packed = _flattened(self._whole) if self._rank == 0 else _empty_vector(self._whole)
            self._rings["tensor"].broadcast(packed)
            if self._rank != 0:
                _copy_parts(packed, self._whole)

    @torch.no_grad()
    def return_gradients(self) -> None:
        """Send the gradients of borrowed tied weights to their owners, which add them to their own gradients.

        A gradient that no stage has computed stays None. Raises LinkError if another worker of the replica is lost or
        does not answer.
        """
        for (owner, borrower), params in self._pairs:
            marks = torch.tensor([p.grad is not None for p in params]).to(params[0])
            if borrower == self._stage:
                grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
                self._rings["stage"].send(torch.cat([_flattened(grads), marks]), owner, TAG)
                for p in params:
                    p.grad = None
                continue
            packed = self._rings["stage"].recv(torch.cat([_empty_vector(params), marks]), borrower, TAG)
            grads = [torch.empty_like(p) for p in params]
            _copy_parts(packed[: -len(params)], grads)
            for p, grad, mark in zip(params, grads, packed[-len(params) :].tolist(), strict=True):
                if mark:
                    p.grad = grad if p.grad is None else p.grad + grad


def _flattened(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([each.detach().reshape(-1) for each in tensors])


def _empty_vector(tensors: Sequence[Tensor]) -> Tensor:
    return torch.empty(sum(each.numel() for each in tensors), dtype=tensors[0].dtype, device=tensors[0].device)


def _copy_parts(packed: Tensor, into: Sequence[Tensor]) -> None:
    parts = torch.split_with_sizes(packed, [each.numel() for each in into])
    for each, part in zip(into, parts, strict=True):
        each.copy_(part.view(each.shape))

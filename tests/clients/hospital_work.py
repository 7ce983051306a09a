"""A regression whose rows are those of hospitals: what the server knows, and what each hospital has."""

from __future__ import annotations

import time

import numpy as np
import torch
from rayps_client.trainers.local_work import tried_sizes

import rayps

SIZES = (20, 25, 30)


def rows(k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of hospital k."""
    made = torch.Generator().manual_seed(100 + k)
    x = torch.randn(SIZES[k % 3], 5, generator=made, dtype=torch.float64)
    return x, torch.sin(x.sum(dim=1, keepdim=True)) + 0.3 * k


class Server(rayps.Workload):
    """A regression whose rows are elsewhere."""

    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)).double()

    def data(self):
        raise RuntimeError("the server has no training data")

    def evaluation_data(self):
        return rayps.data.tensors(*rows(9), batch_size=8)

    def loss(self, model, batch):
        return ((model(batch.x) - batch.y) ** 2).mean()

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.05)

    def evaluate(self, model, batch):
        return {"error": (model(batch.x) - batch.y).abs().mean()}


class Own(Server):
    """The same where the rows of one hospital are."""

    def __init__(self, k=0, pause=0.0, gate=None):
        self.k, self.pause, self.gate, self.calls = k, pause, gate, 0
        self.tries = len(tried_sizes(len(rows(k)[0]), 8, drop_last=False))  # it is tried out before it joins

    def data(self):
        return rayps.data.tensors(*rows(self.k), batch_size=8)

    def loss(self, model, batch):
        self.calls += 1
        if self.calls <= self.tries:
            return super().loss(model, batch)
        time.sleep(self.pause)
        if self.gate is not None:
            self.gate.wait(60)
        return super().loss(model, batch)


class All(Server):
    """The same with everyone's rows here: simulated clients."""

    def __init__(self, clients):
        self.clients = clients

    def data(self):
        parts = [rows(k) for k in range(self.clients)]
        who = np.concatenate([np.full(len(x), k) for k, (x, _) in enumerate(parts)])
        x, y = (torch.cat(each) for each in zip(*parts, strict=True))
        return rayps.data.tensors(x, y, batch_size=8, client=who)

"""Small federated workloads in float64 for the tests, and the plain torch loop that is their law."""

import copy

import numpy as np
import torch
from small_work import OPTIMIZERS, Small, rows
from torch import nn

import rayps
from rayps.data.base import random_of
from rayps.federated.population.cohort import cohort


class Fed(Small):
    """A regression by a small network, whose rows belong to clients."""

    def __init__(self, clients=9, rule="iid", **options):
        super().__init__(**options)
        self.clients, self.rule = clients, rule

    def data(self):
        x, y = rows(self.n)
        if self.rule == "uneven":  # client k has about k shares
            who = np.repeat(np.arange(self.clients), np.arange(1, self.clients + 1))
            return rayps.data.tensors(x, y, batch_size=self.batch, client=who[np.arange(self.n) % len(who)])
        return rayps.data.tensors(x, y, batch_size=self.batch, client=rayps.data.iid(self.clients))


class Dropping(Fed):
    """Draws random numbers while it trains."""

    def model(self):
        return nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.4), nn.Tanh(), nn.Linear(7, 1)).double()


class Normed(Fed):
    """Has buffers: floats and a count."""

    def __init__(self, **options):
        super().__init__(**options | {"n": 90, "batch": 4})  # no batch of one row

    def model(self):
        return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 1)).double()


class Rated(Fed):
    """Plain SGD at a rate of one's own."""

    def __init__(self, lr, **options):
        super().__init__(**options)
        self.lr = lr

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=self.lr)


class Quadratics(rayps.Workload):
    """Two clients with f_k(w) = a_k / 2 (w - c_k)^2: a = (1, 10), c = (0, 1). The optimum of their mean is 10/11."""

    def __init__(self, lr=0.05, start=3.0):
        self.lr, self.start = lr, start

    def model(self):
        found = nn.Linear(1, 1, bias=False).double()
        nn.init.constant_(found.weight, self.start)
        return found

    def data(self):
        x = torch.tensor([[1.0], [10.0]], dtype=torch.float64)
        y = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
        return rayps.data.tensors(x, y, batch_size=1, client=["mild", "steep"])

    def loss(self, model, batch):
        return (batch.x / 2 * (model.weight - batch.y) ** 2).mean()

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=self.lr)


def batches_of(data, seed, t, k, *, epochs=1, steps=None, batch=None):
    """What client k goes through in round t, written out."""
    rows_k = data.clients.rows(k)
    size = data.batch_size if batch is None else batch or len(rows_k)
    each = -(-len(rows_k) // size)
    count = epochs * each if steps is None else steps
    for number in range(t * count, (t + 1) * count):
        epoch, index = divmod(number, each)
        order = random_of(seed, epoch, k).permutation(len(rows_k))
        some = rows_k[order[index * size : (index + 1) * size]]
        yield data.x[torch.from_numpy(some)], data.y[torch.from_numpy(some)]


def trained(work, model, data, seed, t, k, adjust=None, **options):
    """A copy of the model, trained by client k in round t; `adjust(parameters, w_t)` changes gradients."""
    model = copy.deepcopy(model)
    begin = [p.detach().clone() for p in model.parameters()]
    optimizer = OPTIMIZERS[work.kind](list(model.parameters()))
    for x, y in batches_of(data, seed, t, k, **options):
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        if adjust is not None:
            adjust(list(model.parameters()), begin)
        optimizer.step()
    return model


def fedavg(work, rounds, *, fraction=1.0, seed=0, adjust=None, **options):
    """Algorithm 1 of McMahan et al. 2017 in plain torch: the model, and who took part in each round."""
    model, data, taken = drawn(work, seed), work.data(), []
    clients = data.clients
    for t in range(rounds):
        chosen = cohort(seed, t, clients.count, fraction).tolist()
        taken.append(chosen)
        replies = [trained(work, model, data, seed, t, k, adjust, **options) for k in chosen]
        total = sum(int(clients.sizes[k]) for k in chosen)
        with torch.no_grad():
            for parts in zip(model.parameters(), *(each.parameters() for each in replies), strict=True):
                mean = sum(int(clients.sizes[k]) * p for k, p in zip(chosen, parts[1:], strict=True)) / total
                parts[0].copy_(mean)
    return model, taken


def drawn(work, seed=0):
    """The model that a job begins with."""
    torch.manual_seed(seed)
    return work.model()


def cohorts(result):
    return [event for event in result.events if event["kind"] == "cohort"]

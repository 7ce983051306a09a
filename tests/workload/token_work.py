"""Workloads whose losses are sums over tokens, and the plain torch loops that are their laws."""

import copy

import torch
from small_work import OPTIMIZERS, rows
from torch import nn

import rayps
from rayps.data.base import Batch

LENGTH = 5


class Tokens(rayps.Workload):
    """A regression per token: a row has LENGTH tokens, of which the first y[:, 0] count. Some rows have none."""

    def __init__(self, n=37, batch=3, optimizer="momentum", accumulate=1, precision=None, clients=0, pairs=True):
        self.n, self.batch, self.kind = n, batch, optimizer
        self.accumulate, self.precision, self.clients, self.pairs = accumulate, precision, clients, pairs

    def model(self):
        made = nn.Sequential(nn.Linear(1, 7), nn.Tanh(), nn.Linear(7, 1))
        return made if self.precision else made.double()

    def data(self):
        x, _ = rows(self.n, width=LENGTH)
        y = torch.arange(self.n) * 7 % (LENGTH + 1)
        x = x.float() if self.precision else x
        client = rayps.data.iid(self.clients) if self.clients else None
        return rayps.data.tensors(x, y, batch_size=self.batch, client=client)

    def errors(self, model, batch):
        """The squared error of each token [rows, LENGTH], 0 for those that do not count; and the number that do."""
        counts = torch.arange(LENGTH, device=batch.y.device) < batch.y[:, None]
        found = (
            (model(batch.x[..., None])[..., 0] - torch.sin(3 * batch.x)).float() ** 2
            if self.precision
            else (model(batch.x[..., None])[..., 0] - torch.sin(3 * batch.x)) ** 2
        )
        return found * counts, counts.sum()

    def loss(self, model, batch):
        errors, count = self.errors(model, batch)
        return (errors.sum(), count) if self.pairs else errors.sum(1).mean()

    def optimizer(self, params):
        return OPTIMIZERS[self.kind](params)

    def evaluate(self, model, batch):
        errors, count = self.errors(model, batch)
        mean = errors.sum() / count.clamp(min=1)
        return {"token": rayps.Mean(mean, count), "tokens": rayps.Sum(count), "worst": rayps.Max(errors.max())}


def joined(parts):
    """One padded batch of all rows."""
    held = [part for part in parts if part.size]
    return Batch(torch.cat([b.x for b in held]), torch.cat([b.y for b in held]), sum(b.size for b in held))


def mean_loss(work, model, batch):
    """The loss of one padded batch, as plain torch computes it: the mean over its tokens (or its rows)."""
    with torch.autocast("cpu", torch.bfloat16, enabled=work.precision == "bf16"):
        given = work.loss(model, batch)
    return given[0] / given[1] if work.pairs else given


def steps_of(work, workers, epoch, seed=0, keeps_rows=False):
    """For each step of an epoch: for each worker, its micro-batches."""
    data = work.data()
    data.keeps_rows = keeps_rows
    dealt = [list(data.batches(rank=r, size=workers, seed=seed, epoch=epoch)) for r in range(workers)]
    k = work.accumulate
    return [[batches[at : at + k] for batches in dealt] for at in range(0, len(dealt[0]), k)]


def law(work, workers=1, epochs=2, mean_of_means=False):
    """Plain torch in step: each step takes one padded batch of all micro-batches of all workers; model and losses."""
    torch.manual_seed(0)
    model = work.model()
    optimizer, losses = work.optimizer(list(model.parameters())), []
    for epoch in range(epochs):
        for step in steps_of(work, workers, epoch):
            optimizer.zero_grad()
            parts = [part for own in step for part in own if part.size]
            if not weight_of(work, parts):  # no token: no step
                losses.append(None)
                continue
            if mean_of_means:  # the mistake: every micro-batch counts the same
                parts = [part for part in parts if part.y.sum()]
                loss = sum(mean_loss(work, model, part) for part in parts) / len(parts)
            else:
                loss = mean_loss(work, model, joined(parts))
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
    return model, losses


def apart(work, workers, epochs=2, period=1):
    """Plain torch apart: each worker steps by its own padded batches, and every `period` steps they average."""
    torch.manual_seed(0)
    first = work.model()
    models = [copy.deepcopy(first) for _ in range(workers)]
    optimizers = [work.optimizer(list(model.parameters())) for model in models]
    weights = [0.0] * workers
    plan = [step for epoch in range(epochs) for step in steps_of(work, workers, epoch)]
    for done, step in enumerate(plan, 1):
        for r, own in enumerate(step):
            weight = weight_of(work, own)
            if weight:
                optimizers[r].zero_grad()
                mean_loss(work, models[r], joined(own)).backward()
                optimizers[r].step()
            weights[r] += weight
        if (done % period == 0 or done == len(plan)) and sum(weights):
            mean = sum(w * nn.utils.parameters_to_vector(m.parameters()) for w, m in zip(weights, models, strict=True))
            for model in models:
                nn.utils.vector_to_parameters((mean / sum(weights)).detach(), model.parameters())
            weights = [0.0] * workers
    return models[0]


def weight_of(work, parts):
    held = [part for part in parts if part.size]
    return sum(int(part.y.sum()) if work.pairs else part.size for part in held)

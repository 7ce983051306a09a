"""The law of strategies whose workers learn apart: N models in plain torch, stepped in turn, and a meeting."""

import copy

import torch
from small_work import Small, vector
from torch import nn

import rayps


class Normed(Small):
    """With buffers: running statistics, and a whole number."""

    def model(self):
        return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 1)).double()


class Halves(Small):
    """The second half of the rows repeats the first, and is dealt in order: two workers see the same."""

    def data(self):
        x, y = super().data().x, super().data().y
        twice = torch.arange(2 * len(x)) // 2
        return rayps.data.tensors(x[twice], y[twice], batch_size=self.batch, shuffle=False)


class Loop:
    """Worker k's model, optimizer and batches; `n` and `t` count samples and steps since the last meeting."""

    def __init__(self, work, workers, epochs, keeps_rows=False, seed=0):
        torch.manual_seed(seed)
        first = work.model()
        self.models = [copy.deepcopy(first) for _ in range(workers)]
        self.optimizers = [work.optimizer([p for p in m.parameters() if p.requires_grad]) for m in self.models]
        data = work.data()
        data.keeps_rows = keeps_rows
        self.steps = data.steps(workers)
        self.batches = [
            [batch for epoch in range(epochs) for batch in data.batches(rank=k, size=workers, seed=seed, epoch=epoch)]
            for k in range(workers)
        ]
        self.total = len(self.batches[0])
        self.done, self.n, self.losses, self.pending = 0, [0] * workers, [], None

    def step(self, k, batch):
        self.optimizers[k].zero_grad()
        loss = ((self.models[k](batch.x) - batch.y) ** 2).mean()
        loss.backward()
        self.optimizers[k].step()
        self.n[k] += batch.size
        return loss.item()

    def turn(self):
        """One step of each."""
        found = []
        for k, batches in enumerate(self.batches):
            batch = batches[self.done]
            if batch.size:
                found.append((self.step(k, batch), batch.size))
        self.done += 1
        self.losses.append(sum(loss * n for loss, n in found) / sum(n for _, n in found))

    def mean(self, values, weights=None):
        weights = self.n if weights is None else weights
        return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)

    def vectors(self):
        return [vector(model) for model in self.models]

    def put(self, k, values):
        with torch.no_grad():
            nn.utils.vector_to_parameters(values.clone(), self.models[k].parameters())

    def meet(self, momentum="keep", buffers="average", weights=None, average=True):
        """Average parameters, and what is asked for of the rest; count anew."""
        weights = self.n if weights is None else weights
        if average:
            agreed = self.mean(self.vectors(), weights)
            for k in range(len(self.models)):
                self.put(k, agreed)
        if momentum == "reset":
            for optimizer in self.optimizers:
                optimizer.state.clear()
        elif momentum == "average":
            self._average_moments(weights)
        if buffers == "average":
            for several in zip(*(model.buffers() for model in self.models), strict=True):
                if several[0].is_floating_point():
                    mean = self.mean([b.clone() for b in several], weights)
                    for each in several:
                        each.copy_(mean)
        self.n = [0] * len(self.models)

    def _average_moments(self, weights):
        having = [k for k, o in enumerate(self.optimizers) if o.state]
        if not having:
            return
        for i in range(len(list(self.models[0].parameters()))):
            held = {k: self.optimizers[k].state[list(self.models[k].parameters())[i]] for k in having}
            for key in held[having[0]]:
                if isinstance(held[having[0]][key], torch.Tensor):
                    values = [held[k][key].clone() if k in held else 0 for k in range(len(self.models))]
                    mean = self.mean(values, weights)
                    mean = mean.round() if mean.dim() == 0 else mean  # counts of steps
                    for optimizer, model in zip(self.optimizers, self.models, strict=True):
                        optimizer.state[list(model.parameters())[i]][key] = mean.clone()

"""The workload `ratings` of the examples in docstrings."""

import torch

import rayps


class Ratings(rayps.Workload):
    """Rows of a sparse table, and a dense layer."""

    def model(self):
        return torch.nn.Sequential(rayps.Embedding(4, table="users"), torch.nn.Linear(4, 1))

    def data(self):
        x = torch.arange(40) % 7
        return rayps.data.tensors(x, torch.cos(x.float())[:, None], batch_size=8)

    def loss(self, model, batch):
        return torch.nn.functional.mse_loss(model(batch.x), batch.y)


WORKLOADS = {"ratings": Ratings()}

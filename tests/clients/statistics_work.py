"""Rows of several hospitals, and the workload that computes their statistics, for the tests."""

import numpy as np
import torch

import rayps

EDGES = (10, 18.5, 25, 30, 60)
QUERIES = {
    "age": rayps.stats.mean(0, 110),
    "bmi": rayps.stats.histogram(EDGES),
    "dose": rayps.stats.quantile((0.25, 0.5), 0, 10, bins=16),
}
CLIENTS = 7
FILE = """
import statistics_work

class Elsewhere(statistics_work.Hospital):  # the service knows the queries, and has no rows
    pass
"""


def rows(seed=0, count=200):
    """The rows [count, 3], many of them out of the queries' bounds, and the client of each."""
    made = np.random.default_rng(seed)
    columns = made.normal(50, 40, count), made.normal(26, 9, count), made.gamma(2, 2, count)
    return np.column_stack(columns), made.integers(0, CLIENTS, count)


def data(x, who=None):
    return rayps.data.tensors(torch.from_numpy(x), batch_size=16, client=who)


class Hospital(rayps.StatisticsWorkload):
    """The statistics of one hospital's rows; with k=None there are no rows here."""

    queries = QUERIES

    def __init__(self, k=None, queries=QUERIES):
        self.k, self.queries = k, queries

    def data(self):
        if self.k is None:
            raise RuntimeError("the rows are elsewhere")
        x, who = rows()
        return data(x[who == self.k])


class Pooled(Hospital):
    """The rows of several hospitals here."""

    def __init__(self, x, who):
        super().__init__()
        self.x, self.who = x, who

    def data(self):
        return data(self.x, self.who)

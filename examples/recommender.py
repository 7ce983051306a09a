"""Late departures: which flight will be late, from ids alone? A wide and deep model with a sparse table.

    python examples/recommender.py --strategy hybrid:servers=2
    python examples/recommender.py --strategy hybrid:servers=2,staleness=0
    python examples/recommender.py --strategy parameter_server:shards=2,replicas=1,staleness=3
    python examples/recommender.py --generated 10000000

100,000 flights, each nine ids: plane, flight number, carrier, airports, hour, date, and two crossings of these. A row
of the table is a bias and a vector. What to expect after one epoch, on 20,000 other flights (of the same days): AUC
0.779, as in a single process; with biases alone AUC 0.770. Guessing gives 0.5. The last line above shows the size: it
makes a table of ten million rows of 16 numbers; expect about 170 bytes for each, 1.7 GB in all.
"""
# room: tables

import argparse
import time
from itertools import islice
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import rayps

FOLDER = Path(__file__).resolve().parent / "data"
COLUMNS = ["plane", "flight", "carrier", "origin", "destination", "hour", "date"]
FIELDS, DIM = len(COLUMNS) + 2, 8


def crossed(x):
    """The ids of flights [n, 7], and those of (date, hour) and (date, origin): [n, 9]."""
    pairs = [x[:, [6]] * 31 + x[:, [5]], x[:, [6]] * 37 + x[:, [3]]]  # int64 arithmetic wraps around
    return torch.cat([x, *pairs], 1) & (2**63 - 1)


class WideAndDeep(nn.Module):
    """The sum of the ids' biases, and a small network over their vectors."""

    def __init__(self, deep):
        super().__init__()
        self.rows = rayps.Embedding(1 + DIM * deep, table="ids", optimizer="adagrad:lr=0.05")
        self.bias = nn.Parameter(torch.zeros(()))
        self.net = nn.Sequential(nn.Linear(FIELDS * DIM, 32), nn.ReLU(), nn.Linear(32, 1)) if deep else None

    def forward(self, x):
        """The log-odds of being late [n]."""
        rows = self.rows(crossed(x))  # [n, 9, 1 + DIM]
        wide = rows[..., 0].sum(1) + self.bias
        return wide if self.net is None else wide + self.net(rows[..., 1:].flatten(1))[:, 0]


class LateDeparture(rayps.Workload):
    """Whether a flight arrives more than 15 minutes late, from what is known before it leaves."""

    def __init__(self, deep=True):
        self.folder, self.deep = FOLDER, deep  # kept with the workload, which travels to the workers without this file

    def model(self):
        """One sparse table; 2,400 dense weights."""
        return WideAndDeep(self.deep)

    def data(self):
        """Flights of 2013, in batches of 128 on each worker."""
        return rayps.data.parquet(
            self.folder / "departures.parquet",
            features=COLUMNS,
            label="late",
            dtype="int64",
            label_dtype="float32",
            batch_size=128,
        )

    def evaluation_data(self):
        """Flights that are not learned from."""
        return rayps.data.parquet(
            self.folder / "departures_test.parquet",
            features=COLUMNS,
            label="late",
            dtype="int64",
            label_dtype="float32",
            batch_size=1000,
        )

    def lookups(self, batch):
        """The ids of a batch, so that their rows are pulled while the batch before is computed."""
        return {"ids": crossed(batch.x)}

    def loss(self, model, batch):
        """Log loss."""
        return functional.binary_cross_entropy_with_logits(model(batch.x), batch.y)

    def optimizer(self, params):
        """Of the dense part; the table has its own."""
        return torch.optim.Adam(params, lr=0.002)


class Numbers(torch.utils.data.Dataset):
    """Every id below `count` once: items of 10,000, made as they are asked for."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return -(-self.count // 10_000)

    def __getitem__(self, item):
        return torch.arange(item * 10_000, min((item + 1) * 10_000, self.count))


class Generated(rayps.Workload):
    """As many rows as are asked for, each seen once."""

    def __init__(self, count):
        self.count = count

    def model(self):
        """Rows of 16 numbers, and a weight."""
        return nn.ModuleDict({"rows": rayps.Embedding(16, table="generated"), "out": nn.Linear(16, 1)})

    def data(self):
        """Batches of 10,000 ids."""
        return rayps.data.dataset(Numbers(self.count), batch_size=1, collate=lambda items: items[0])

    def evaluation_data(self):
        """As good as none."""
        return rayps.data.dataset(Numbers(1), batch_size=1, collate=lambda items: items[0])

    def lookups(self, batch):
        """All ids of a batch."""
        return {"generated": batch.x}

    def loss(self, model, batch):
        """Whatever: it is the size that counts."""
        return (model["out"](model["rows"](batch.x)) - 1).pow(2).mean()


def size(count, strategy, workers):
    """Make a table of so many rows, and say how large it is and how fast it was made."""
    seen = {}
    began = time.perf_counter()
    result = rayps.train(
        Generated(count),
        strategy=strategy,
        workers=workers,
        progress=lambda facts: seen.update(facts.get("server_group") or {}),
    )
    seconds = float(torch.tensor(result.history["seconds"].to_numpy()).sum())
    print(
        f"{seen.get('rows'):,} rows, {(seen.get('bytes') or 0) / 1e9:.2f} GB, {count / seconds:,.0f} new rows/s in "
        f"{seconds:.0f} s of training ({time.perf_counter() - began:.0f} s in all)"
    )


@torch.no_grad()
def auc(workload, model):
    """The chance that a late flight gets a higher score than one in time."""
    batches = list(workload.evaluation_data().batches(rank=0, size=1, seed=0, epoch=0))
    late = torch.cat([batch.y for batch in batches]) > 0
    rank = torch.cat([model(batch.x) for batch in batches]).double().argsort().argsort() + 1
    n = int(late.sum())
    return float(rank[late].sum() - n * (n + 1) / 2) / (n * (len(late) - n))


def single(workload, epochs, batches=None):
    """What one process learns in a loop of plain torch: a table of its own, stepped after the dense optimizer."""
    torch.manual_seed(0)
    model = workload.model()
    optimizer = workload.optimizer(list(model.parameters()))
    for epoch in range(epochs):
        for batch in islice(workload.data().batches(rank=0, size=1, seed=0, epoch=epoch), batches):
            optimizer.zero_grad()
            workload.loss(model, batch).backward()
            optimizer.step()
            model.rows.step()
    return model


def main():
    """Train under the strategy that is asked for, and say what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="hybrid:servers=2")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--generated", type=int, metavar="ROWS", help="make a table of so many rows instead")
    asked = parser.parse_args()
    if asked.generated:
        return size(asked.generated, asked.strategy, asked.workers)
    work, biases = LateDeparture(), LateDeparture(deep=False)
    result = rayps.train(work, strategy=asked.strategy, workers=asked.workers, epochs=asked.epochs)
    print(
        f"AUC {auc(work, result.model()):.3f} with {asked.workers} workers, "
        f"{auc(work, single(work, asked.epochs)):.3f} in a single process, "
        f"{auc(biases, single(biases, asked.epochs)):.3f} with biases alone (expect 0.779, 0.779 and 0.770)"
    )


if __name__ == "__main__":
    main()

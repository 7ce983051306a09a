"""A training loop of one's own under any strategy: the lines that differ from one process are marked.

    python examples/own_loop.py --strategy parameter_server:staleness=3

What to expect after 3 epochs with 4 workers: accuracy 0.95 or more on the 2,000 test images.
"""

import argparse
from functools import partial

import torch
from digits import Digits

import rayps


def train(strategy, epochs):
    """What every worker does; gives back the accuracy."""
    torch.manual_seed(0)
    here = rayps.world()  # 1: who am I
    workload = Digits()
    model = workload.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model, optimizer = rayps.wrap(model, optimizer, strategy)  # 2: how we learn together
    for epoch in range(epochs):
        for batch in workload.data().batches(rank=here.rank, size=here.size, seed=0, epoch=epoch):  # 3: my rows
            optimizer.zero_grad()
            optimizer.samples = batch.size  # 4: what my gradient weighs
            if batch.size:
                workload.loss(model, batch).backward()
            optimizer.step()
    return accuracy(workload, model)


@torch.no_grad()
def accuracy(workload, model):
    """The share of test images whose digit is found."""
    batches = workload.evaluation_data().batches(rank=0, size=1, seed=0, epoch=0)
    right = [(workload.scores(model, batch).argmax(dim=1) == batch.y).sum() for batch in batches]
    return float(sum(right)) / workload.evaluation_data().rows()


def main():
    """Run the loop on every worker."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="all_reduce")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=3)
    asked = parser.parse_args()
    found = rayps.run(partial(train, asked.strategy, asked.epochs), workers=asked.workers)
    print("accuracy by worker:", ", ".join(f"{value:.3f}" for value in found), " (expect 0.95 or more)")


if __name__ == "__main__":
    main()

"""Federated averaging on handwritten digits: 20 clients that know two digits each learn all ten (McMahan et al. 2017).

    python examples/fedavg.py
    python examples/fedavg.py --rounds 30 --strategy fedavg:fraction=0.5,local_epochs=5,batch_size=10,dropout=0.5
    python examples/fedavg.py --strategy ditto:fraction=0.5,local_epochs=5,batch_size=10,lam=0.1

What to expect after 20 rounds: the best accuracy is 0.95 or more, where one client alone learns only its own digits and
gets 0.29. Every run has the same bits, with any number of workers.
"""

import argparse
import random

import torch
from digits import Digits

import rayps


class Shards(Digits):
    """The digits, sorted by label and dealt to 20 clients in two shards each."""

    def data(self):
        """500 images for each client."""
        return rayps.data.parquet(
            self.folder / "digits.parquet",
            features="pixels",
            label="digit",
            scale=1 / 255,
            client=rayps.data.shards(2, clients=20),
        )

    def optimizer(self, params):
        """A client's; each begins a round with a fresh one."""
        return torch.optim.SGD(params, lr=0.05)


def alone(work, client, epochs=10, batch_size=10):
    """The model that one client learns from its own data."""
    torch.manual_seed(0)
    model, clients = work.model(), work.data().clients
    optimizer, rows = work.optimizer(list(model.parameters())), clients.rows(client).tolist()
    for epoch in range(epochs):
        random.Random(epoch).shuffle(rows)
        for at in range(0, len(rows), batch_size):
            optimizer.zero_grad()
            work.loss(model, clients.batch(rows[at : at + batch_size])).backward()
            optimizer.step()
    return model


@torch.no_grad()
def accuracy(work, model):
    """On images of all digits."""
    found = [
        (work.evaluate(model, b)["accuracy"], b.size)
        for b in work.evaluation_data().batches(rank=0, size=1, seed=0, epoch=0)
    ]
    return sum(float(share) * n for share, n in found) / sum(n for _, n in found)


def main():
    """Train with everyone and with one, and say what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="fedavg:fraction=0.5,local_epochs=5,batch_size=10")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    asked = parser.parse_args()
    work = Shards()
    result = rayps.train(work, strategy=asked.strategy, workers=asked.workers, epochs=asked.rounds)
    best = max(each for each in result.history["evaluation_accuracy"].to_pylist() if each is not None)
    print(
        f"accuracy: best {best:.3f}, last {result.metrics['accuracy']:.3f}; client 0 alone "
        f"{accuracy(work, alone(work, 0)):.3f}  (expect 0.95, 0.95 and 0.29 after 20 rounds)"
    )


if __name__ == "__main__":
    main()

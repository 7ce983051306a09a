"""The digits by a network with BatchNorm, whose statistics are those of all workers' batches together.

    python examples/convnet.py --strategy all_reduce
    python examples/convnet.py --strategy all_reduce --own-statistics
    python examples/convnet.py --strategy parameter_server --own-statistics

What to expect after 3 epochs with 4 workers: accuracy 0.97 or more on the 2,000 test images.
"""

import argparse

from digits import Digits
from torch import nn

import rayps


class NormedDigits(Digits):
    """The digits, with BatchNorm after each convolution."""

    sync_batchnorm = True

    def model(self):
        """Two convolutions, each with BatchNorm and a pool, and a linear layer."""
        return nn.Sequential(
            nn.Unflatten(1, (1, 28, 28)),
            nn.Conv2d(1, 16, 5, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 5, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(512, 10),
        )


def main():
    """Train under the strategy that is asked for, and say what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="all_reduce")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--own-statistics", action="store_true", help="each worker's statistics are of its own batches")
    asked = parser.parse_args()
    work = NormedDigits()
    work.sync_batchnorm = not asked.own_statistics
    result = rayps.train(work, strategy=asked.strategy, workers=asked.workers, epochs=asked.epochs)
    print(f"accuracy {result.metrics['accuracy']:.3f}  (expect 0.97)")


if __name__ == "__main__":
    main()

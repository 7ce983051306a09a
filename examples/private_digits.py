"""The digits under differential privacy: no image can be recognized in the model, as far as epsilon says.

    python examples/private_digits.py
    python examples/private_digits.py --epsilon 3
    python examples/private_digits.py --strategy parameter_server

Each of the 10,000 images is protected (DP-SGD). The noise is found for the number of steps, so that they spend epsilon.
What to expect with 2 workers: at epsilon 8, accuracy 0.85 or more on the 2,000 test images, which count as public.
Without privacy it is 0.97.
"""

import argparse

import torch
from digits import Digits

import rayps

BATCH, STEPS = 500, 100  # rows that are drawn in a step on average, over all workers


class PrivateDigits(Digits):
    """The digits, for noisy steps."""

    lr: float = 0.5

    def __init__(self, batch):
        super().__init__()
        self.batch = batch

    def data(self):
        """The same images; the batch of each worker is its part of the logical batch."""
        return rayps.data.parquet(
            self.folder / "digits.parquet", features="pixels", label="digit", scale=1 / 255, batch_size=self.batch
        )

    def optimizer(self, params):
        """Large steps: the gradients are clipped, and the mean of a batch is short."""
        return torch.optim.SGD(params, lr=self.lr)


def main():
    """Train privately, and say what the model discloses at most."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="all_reduce")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epsilon", type=float, default=8.0)
    asked = parser.parse_args()
    privacy = f"dp(epsilon={asked.epsilon},rounds={STEPS},clip=1.0,delta=1e-5)"
    result = rayps.train(
        PrivateDigits(BATCH // asked.workers),
        strategy=f"{asked.strategy}:privacy={privacy}",
        workers=asked.workers,
        steps=STEPS,
    )
    print(result.privacy["claim"])
    for line in result.privacy["assumes"]:
        print(f"- {line}")
    print(f"accuracy {result.metrics['accuracy']:.3f}  (expect 0.85 or more at epsilon 8)")


if __name__ == "__main__":
    main()

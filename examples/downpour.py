"""Downpour SGD on handwritten digits: four replicas that use the servers only every few steps (Dean et al. 2012).

    python examples/downpour.py
    python examples/downpour.py --n-push 1 --n-fetch 1

What to expect after 3 epochs: accuracy 0.96, with a quarter of the bytes that pushing and fetching every step moves.
Servers step by Adagrad, as in the paper: with the digits' own SGD with momentum, four full pushes at once are too much.
"""

import argparse

from digits import Digits

import rayps


def main():
    """Train, and say what came out and what it moved."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n-push", type=int, default=4)
    parser.add_argument("--n-fetch", type=int, default=4)
    asked = parser.parse_args()
    strategy = rayps.Downpour(n_push=asked.n_push, n_fetch=asked.n_fetch, shards=2, adagrad=0.01)
    result = rayps.train(Digits(), strategy=strategy, workers=4, epochs=3)
    moved = sum(result.history["bytes"].to_pylist()) / 1e6
    print(f"accuracy {result.metrics['accuracy']:.3f}  moved {moved:,.0f} MB  (expect 0.96 after 3 epochs)")


if __name__ == "__main__":
    main()

"""Statistics of patients that stay in their hospitals: exact, and with differential privacy for each hospital.

    python examples/federated_statistics.py
    python examples/federated_statistics.py --clients 1000 --epsilon 0.5

What to expect with 300 hospitals and epsilon 1: the noise of the mean age has a standard deviation of about 1.1 years
and that of a fraction about 0.02, so that the noised answers are close to the exact ones; of 10 hospitals nothing
useful could be said.
"""

import argparse

import numpy as np
import torch

import rayps

QUERIES = {
    "age": rayps.stats.mean(low=0, high=110),
    "bmi": rayps.stats.histogram(edges=(10, 18.5, 25, 30, 60)),
    "dose": rayps.stats.quantile((0.5, 0.9), low=0, high=20),
}


def patients(clients):
    """About 40 patients for each hospital; older ones in hospitals with higher numbers."""
    made = np.random.default_rng(0)
    hospital = made.integers(0, clients, 40 * clients)
    age = made.normal(45 + 10 * hospital / clients, 18)
    rows = np.column_stack([age, made.normal(26, 5, len(age)), made.gamma(2, 2, len(age))])
    return rayps.data.tensors(torch.from_numpy(rows), batch_size=100, client=hospital)


def main():
    """Compute the statistics twice, and print both."""
    parser = argparse.ArgumentParser(description="Federated statistics, exact and with privacy.")
    parser.add_argument("--clients", type=int, default=300)
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args()
    data = patients(given.clients)
    print("exact\n-----")
    print(rayps.statistics(data, QUERIES, workers=given.workers, progress=False))
    privacy = rayps.dp(epsilon=given.epsilon, rounds=1, delta=0.1 / given.clients)
    print("\nwith privacy\n------------")
    print(rayps.statistics(data, QUERIES, privacy=privacy, workers=given.workers, progress=False))


if __name__ == "__main__":
    main()

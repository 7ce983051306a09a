"""Ridge and lasso by consensus ADMM (Boyd et al. 2011): four workers that keep their rows, beside scikit-learn.

    python examples/admm.py
    python examples/admm.py --relaxation 1 --participation 0.5

What to expect: scikit-learn's coefficients to 1e-8, and the lasso's zeros are exact, after 27 and 30 meetings, each of
which moves one vector of 30 numbers for a worker, and no row. With workers absent half of the time it takes some more.
"""

import argparse

import torch

import rayps

RIDGE, LASSO = 0.1, 0.2  # g(w) = RIDGE / 2 |w|^2, or LASSO sum |w_j|, beside half the mean square


class Line(rayps.Workload):
    """Half the mean square of y - w x, over 400 rows with 30 features of which 6 count."""

    def rows(self):
        """The rows, the same in every process."""
        g = torch.Generator().manual_seed(0)
        x = torch.randn(400, 30, generator=g, dtype=torch.float64)
        w = torch.tensor([3.0, -2.0, 1.5, 1.0, -1.0, 0.5] + 24 * [0.0], dtype=torch.float64)
        return x, x @ w + torch.randn(400, generator=g, dtype=torch.float64)

    def model(self):
        """One linear layer without a bias: the regularizer would shrink it too."""
        return torch.nn.Linear(30, 1, bias=False, dtype=torch.float64)

    def data(self):
        """All rows of a worker in one batch: each step is then on the whole f_i."""
        x, y = self.rows()
        return rayps.data.tensors(x, y, batch_size=400)

    def loss(self, model, batch):
        """f_i."""
        return 0.5 * ((model(batch.x).squeeze(1) - batch.y) ** 2).mean()

    def optimizer(self, params):
        """A rate below 2 / (the largest curvature of any f_i + penalty), here 2 / 3.4."""
        return torch.optim.SGD(params, lr=0.4)


def solve(regularizer, cluster=None, **options):
    """The coefficients, and how many meetings they took."""
    strategy = rayps.ADMM(penalty=1.0, local_steps=3, regularizer=regularizer, eps_abs=1e-10, eps_rel=1e-10, **options)
    result = rayps.train(Line(), strategy=strategy, workers=4, steps=5000, cluster=cluster, progress=False)
    return result.model().weight.detach().flatten(), sum(met or 0 for met in result.history["met"].to_pylist())


def main():
    """Solve both, and say how far from scikit-learn's they are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--relaxation", type=float, default=1.6)
    parser.add_argument("--participation", type=float, default=1.0)
    asked = parser.parse_args()
    try:
        from sklearn.linear_model import Lasso, Ridge
    except ImportError:
        raise SystemExit("this example compares with scikit-learn: pip install scikit-learn") from None
    x, y = (each.numpy() for each in Line().rows())
    for name, regularizer, peer in (
        ("ridge", f"l2({RIDGE})", Ridge(alpha=RIDGE * len(x), fit_intercept=False, tol=1e-14)),
        ("lasso", f"l1({LASSO})", Lasso(alpha=LASSO, fit_intercept=False, tol=1e-14, max_iter=100_000)),
    ):
        found, meetings = solve(regularizer, relaxation=asked.relaxation, participation=asked.participation)
        furthest = abs(found.numpy() - peer.fit(x, y).coef_).max()
        print(
            f"{name}: {meetings} meetings, {(found == 0).sum()} coefficients are 0, at most {furthest:.1e} from "
            "scikit-learn's  (expect 1e-8 or less)"
        )


if __name__ == "__main__":
    main()

"""Elastic averaging SGD (Zhang, Choromanska, LeCun, "Deep learning with elastic averaging SGD", NeurIPS 2015)."""

from dataclasses import dataclass

import rayps


@dataclass(frozen=True)
class EASGD(rayps.Strategy):
    """Workers explore around a center that follows their mean: algorithm 1 with all workers in step."""

    period: int = 4  # tau: steps between two exchanges with the center
    beta: float = 0.9  # N alpha: how far the center moves towards the mean of the workers
    loop = "local_updates"  # workers step by themselves and exchange now and then

    def __post_init__(self):
        if self.period < 1 or not 0 < self.beta <= 1:
            raise ValueError(f"period is {self.period} and beta is {self.beta}: give period >= 1, 0 < beta <= 1")

    def begin(self, w):
        w.shared.setdefault("center", w.params.clone())  # the same on all workers; it comes back after a restart

    def round(self, w):
        if w.position % self.period == 0:
            center, alpha = w.shared["center"], self.beta / w.size
            away = w.params - center
            w.params = w.params - alpha * away  # x_k <- x_k - alpha (x_k - center)
            w.shared["center"] = center + self.beta * w.mean(away)  # center <- center + alpha sum(x_k - center)
        w.step(w.grad(w.batch()))  # x_k <- x_k - step(g_k)

    def consensus(self, w):
        return w.shared["center"]  # what is evaluated and saved

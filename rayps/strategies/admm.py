"""Consensus ADMM: workers train separately, and multipliers make their parameters agree.

Boyd, Parikh, Chu, Peleato, Eckstein, "Distributed Optimization and Statistical Learning via the Alternating Direction
Method of Multipliers", FnTML 2011: section 7.1 (global consensus, scaled form), 3.3 (the stop rule), 3.4.1 (residual
balancing), 3.4.3 (over-relaxation). The objective is the mean loss over all rows, plus g:

    sum_i (n_i / n) f_i(x) + g(x)

f_i is the mean of `loss` over the n_i rows of worker i (fixed for the whole run), n = sum n_i, and g is the
`regularizer` (none, l1(weight=...), l2(weight=...), of all parameters in the vector). Between two averages worker i
takes `local_steps` steps of the workload's optimizer, each on its next batch. The steps start at x_i and minimize

    f_i(x) + penalty/2 |x - z + u_i|^2

An average computes, with alpha = `relaxation` (the paper's problem with f_i and the penalty times n_i / n):

    v_i <- alpha x_i + (1 - alpha) z + u_i
    z <- prox_{g / penalty}(sum_i (n_i / n) v_i);  u_i <- v_i - z

Checkpoints and evaluations use z. x_i and u_i belong to worker i, and checkpoints save them for each rank. With N
workers, the primal residual is r^2 = N sum_i (n_i / n) |x_i - z|^2, and the dual residual is s^2 = N penalty^2
|z - z_old|^2.

- `balance`: if r > 10 s, the penalty is doubled and u_i halved; if s > 10 r, the penalty is halved and u_i doubled.
  Choose the optimizer's rate for the curvature of f_i plus `penalty`. When balancing has raised the penalty by d, each
  group of the optimizer steps at the rate lr / (1 + lr d), which is stable for the higher penalty. This rate also
  scales the weight decay. With SGD (any momentum) or Adam with L2, the decay is part of the gradient, and weight_decay
  = c has the solution of `l2(weight=c)` with or without balancing. A decoupled decay (AdamW) has another solution than
  l2, as in torch.
- `eps_abs`, `eps_rel`: if both are none, there is no stop rule; otherwise training ends once r and s are within the
  bounds of section 3.3.
- `participation` p: a worker takes part in a period with probability p, drawn from the seed; the x_i of an absent
  worker does not change, and its last v_i is used (a randomised ADMM: Iutzeler et al., CDC 2013).
- `momentum`: what an average does to the states of the workers' optimizers: keep, reset or average them.
- `buffers`: what an average does to buffers such as BatchNorm's statistics, which have no multipliers: average or keep
  them.

An optimizer with `maximize` ascends f_i(x) - penalty/2 |x - z + u_i|^2. All its groups must then have `maximize`. A
workload's `clip_norm` clips the gradient of a local step, including the penalty's gradient. If a batch has fewer rows
than the worker, the method is stochastic: z then converges to a neighbourhood of the solution whose size grows with the
rate, and to the solution only if the rate falls to 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rayps.core.grid import Grid
from rayps.core.maximize import find_direction
from rayps.core.rows.draw_participants import takes_part
from rayps.core.strategy import options, traffic
from rayps.core.strategy.proximal import prox, write_canonical
from rayps.core.strategy.strategy import Vector, WorkerView
from rayps.core.strategy.strategy_families import LOCAL_UPDATES, Fixed, Rows
from rayps.core.strategy.traffic import Sizes, TrafficCost
from rayps.strategies.averaging import check_averaging
from rayps.strategies.base import Strategy


@dataclass(frozen=True)
class ADMM(Strategy):
    """Workers with fixed rows that average seldom, and for a convex model still reach the optimum over all rows.

    Example:
        rayps.train(work, strategy=rayps.ADMM(penalty=1.0, local_steps=2), workers=2)
    """

    penalty: float = 1.0
    local_steps: int = 20
    relaxation: float = 1.0
    balance: bool = True
    regularizer: str | None = None
    eps_abs: float | None = None
    eps_rel: float | None = None
    participation: float = 1.0
    momentum: str = "keep"
    buffers: str = "average"
    name: ClassVar[str] = "admm"
    loop: ClassVar[str] = LOCAL_UPDATES
    rows: ClassVar[Rows] = Fixed()

    def __post_init__(self) -> None:
        options.whole(self, "local_steps")
        options.number(self, "penalty", above=0)
        options.number(self, "relaxation", above=0, below=2)
        options.number(self, "eps_abs", least=0, none=True)
        options.number(self, "eps_rel", least=0, none=True)
        options.number(self, "participation", above=0, most=1)
        options.flag(self, "balance")
        check_averaging(self)
        object.__setattr__(self, "regularizer", write_canonical(self.regularizer))

    def cost(self, grid: Grid, sizes: Sizes) -> list[TrafficCost]:
        """Return the cost per step of the mean of the parameters at each average."""
        return traffic.periodic_mean(grid, sizes, None, self.local_steps, moments=self.momentum == "average")

    def begin(self, w: WorkerView) -> None:
        """Start with z = the initial parameters, equal on all workers, and the multipliers u_i = 0."""
        if "z" not in w.shared:
            w.shared |= {"z": w.params.clone(), "penalty": w.params.new_tensor(self.penalty).double()}
        if "u" not in w.memory:
            w.memory |= {"u": w.params * 0, "calm": w.params.new_tensor(0.0)}

    def consensus(self, w: WorkerView) -> Vector | None:
        """Return z, the parameters on which the workers agree."""
        return w.shared["z"]

    def round(self, w: WorkerView) -> None:
        """Take one step of x_i <- argmin f_i(x) + penalty/2 |x - z + u_i|^2. At the end of a period, average."""
        batch = w.batch()
        here = takes_part(w.plan.seed, (w.position - 1) // self.local_steps, w.rank, self.participation)
        if here and len(batch):
            g, penalty = w.grad(batch).vector, float(w.shared["penalty"])
            g.add_(w.params - w.shared["z"] + w.memory["u"], alpha=find_direction(w.optimizer.param_groups) * penalty)
            _step(w, g, penalty - self.penalty)
        if w.position % self.local_steps == 0 or w.position == w.plan.end:
            self._average(w, here)

    def _average(self, w: WorkerView, here: bool) -> None:
        """Update v_i, z and u_i, compute the residuals, apply the stop rule, and balance the penalty.

        `here` is whether this worker takes part in the period.
        """
        x, u, z_old, penalty = w.params, w.memory["u"], w.shared["z"], float(w.shared["penalty"])
        share = w.rows / w.all_rows
        alpha = self.relaxation if here else 0.0  # for an absent worker v = z + u, which is its last v
        v = u.add_(x, alpha=alpha).add_(z_old, alpha=1 - alpha)
        z = w.shared["z"] = prox(self.regularizer, w.mean(v, w.rows, exact=True), 1 / penalty)
        u = v.sub_(z)
        w.sync_optimizer_and_buffers(w.rows, momentum=self.momentum, buffers=self.buffers)

        calm = here or bool(w.memory["calm"])
        norms = w.ring.sum(_doubles(x, _square(x - z) * share, _square(x) * share, _square(u) * share, calm, here))
        primal, x_norm, u_norm = ((w.size * square) ** 0.5 for square in norms[:3].tolist())
        root = w.size**0.5
        dual = penalty * root * _square(z - z_old) ** 0.5
        absolute = (w.size * len(z)) ** 0.5 * (self.eps_abs or 0.0)
        primal_stop = absolute + (self.eps_rel or 0.0) * max(x_norm, root * _square(z) ** 0.5)
        dual_stop = absolute + (self.eps_rel or 0.0) * penalty * u_norm
        facts = {"met": 1, "primal": primal, "dual": dual, "penalty": penalty, "present": int(norms[4])}
        has_rule = self.eps_abs is not None or self.eps_rel is not None
        w.say(**facts, **({"primal_stop": primal_stop, "dual_stop": dual_stop} if has_rule else {}))
        if has_rule:
            stops = primal <= primal_stop and dual <= dual_stop
            w.memory["calm"].fill_(stops and calm)
            if stops and norms[3] == w.size:  # every worker has taken part since r and s came within their bounds
                w.done = True
                w.reason = f"primal residual {primal:.3g} <= {primal_stop:.3g} and dual {dual:.3g} <= {dual_stop:.3g}"
                return
        factor = 2.0 if primal > 10 * dual else 0.5 if dual > 10 * primal else 1.0
        if self.balance and factor != 1:
            w.shared["penalty"].mul_(factor)
            u.div_(factor)


def _step(w: WorkerView, g: Vector, risen: float) -> None:
    """Step by `g` at each group's rate lr / (1 + lr `risen`). `risen` is how much balancing has raised the penalty."""
    groups = [group for group in w.optimizer.param_groups if "lr" in group and risen > 0]
    rates = [group["lr"] for group in groups]
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate / (1 + rate * risen)
    try:
        w.step(g)
    finally:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate


def _square(v: Vector) -> float:
    """Return |v|^2."""
    return float(v.double().square().sum())


def _doubles(like: Vector, *numbers: float) -> Vector:
    found = like.new_empty(len(numbers)).double()
    for i, number in enumerate(numbers):
        found[i] = number
    return found

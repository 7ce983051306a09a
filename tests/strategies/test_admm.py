"""Consensus ADMM against a plain loop of Boyd et al. 2011, section 7.1, and against closed forms."""

import time

import pytest
import torch
from rayps_client.errors import ConfigError
from small_work import Small, train
from torch import nn

import rayps
from rayps import ADMM
from rayps.core.rows.draw_participants import takes_part
from rayps.core.strategy.proximal import prox, shrink, soft_threshold, write_canonical
from rayps.core.strategy.text import write_strategy
from rayps.strategies.catalogue import parse, wire

F64 = torch.float64
RIDGE = 5.0  # on 8 workers' sums of squares; /8 where the mean over the workers is minimised
LASSO = 60.0


# ------------------------------------------------------------------------------------------- problems


def regression(seed=0, workers=8, rows=40, features=50, true=None):
    """Rows of each worker: A [workers, rows, features], b [workers, rows]."""
    g = torch.Generator().manual_seed(seed)
    a = torch.randn(workers, rows, features, generator=g, dtype=F64)
    x = torch.randn(features, generator=g, dtype=F64)
    if true is not None:
        x[true:] = 0
    return a, a @ x + 0.1 * torch.randn(workers, rows, generator=g, dtype=F64)


class OfRanks(rayps.data.Data):
    """Each rank's own rows, which need not be as many on each; in batches in order, again and again in an epoch.

    `awaits` (a step and a folder): that step's batch comes once the folder is there.
    """

    def __init__(self, parts, batch_size=10_000, again=1000, awaits=(-1, None)):
        self.parts, self.batch_size, self.again, self.awaits = parts, batch_size, again, awaits

    def check(self):
        pass

    def rows(self):
        return sum(len(x) for x, _ in self.parts)

    def share(self, rank, size):
        return len(self.parts[rank % len(self.parts)][0])

    def once(self):
        return -(-max(len(x) for x, _ in self.parts) // self.batch_size)

    def steps(self, size):
        return self.once() * self.again

    def batches(self, *, rank, size, seed, epoch, start=0):
        x, y = self.parts[rank % len(self.parts)]
        for step in range(start, self.steps(size)):
            for _ in range(2000 if step == self.awaits[0] else 0):
                if self.awaits[1].is_dir():
                    break
                time.sleep(0.01)
            place = step % self.once() * self.batch_size
            cut = slice(place, place + self.batch_size)
            yield rayps.data.Batch(x[cut], y[cut], len(x[cut]))


class Newton(torch.optim.Optimizer):
    """x <- x - (H + penalty I)^-1 grad with H of the rows that the loss has seen: the exact x-step of least squares."""

    def __init__(self, params, work):
        super().__init__(params, {})
        self.work = work

    def step(self, closure=None):
        (p,) = self.param_groups[0]["params"]
        h = self.work.curvature(p.detach().reshape(-1))
        grad = p.grad.reshape(-1)
        moved = torch.linalg.solve(h + self.work.penalty * torch.eye(len(h), dtype=F64, device=h.device), grad)
        p.data.sub_(moved.view_as(p))


class Squares(rayps.Workload):
    """f_i(x) = 1/2 |A_i x - b_i|^2, a sum over the worker's rows, as the mean of `scale` times the squares.

    `rate` None = each step solves the x-step.
    """

    def __init__(self, parts, penalty=None, rate=None, scale=40.0, momentum=0.0, batch_size=10_000):
        self.parts, self.penalty, self.rate, self.scale = parts, penalty, rate, scale
        self.momentum, self.batch_size = momentum, batch_size
        self.features = parts[0][0].shape[1]
        self.seen, self.awaits = None, (-1, None)

    def model(self):
        model = nn.Linear(self.features, 1, bias=False).double()
        nn.init.zeros_(model.weight)
        return model

    def data(self):
        return OfRanks(self.parts, self.batch_size, awaits=self.awaits)

    def evaluation_data(self):
        return OfRanks([(x[:1], y[:1]) for x, y in self.parts], again=1)

    def loss(self, model, batch):
        if torch.is_grad_enabled():
            self.seen = batch.x
        return 0.5 * self.scale * ((model(batch.x).squeeze(1) - batch.y) ** 2).mean()

    def curvature(self, x):
        return self.scale * self.seen.T @ self.seen / len(self.seen)

    def optimizer(self, params):
        if self.rate is None:
            return Newton(params, self)
        return torch.optim.SGD(params, lr=self.rate, momentum=self.momentum)


class Logistic(Squares):
    """f_i = the sum of the worker's logistic losses; labels are 0 and 1. A step is one of Newton's."""

    def loss(self, model, batch):
        if torch.is_grad_enabled():
            self.seen = batch.x
        return self.scale * nn.functional.binary_cross_entropy_with_logits(model(batch.x).squeeze(1), batch.y)

    def curvature(self, x):
        p = torch.sigmoid(self.seen @ x)
        return self.scale * (self.seen.T * (p * (1 - p))) @ self.seen / len(self.seen)


def parts_of(a, b):
    return list(zip(a, b, strict=True))


def solution(result):
    return result.model().weight.detach().reshape(-1)


def said(result, name):
    """What each meeting said, in order."""
    return [value for value in result.history[name].to_pylist() if value is not None]


def ridge(a, b, weight=RIDGE):
    x, y = a.reshape(-1, a.shape[-1]), b.reshape(-1)
    return torch.linalg.solve(x.T @ x + weight * torch.eye(x.shape[1], dtype=F64), x.T @ y)


def largest(v):
    return v.abs().max().item()


# ------------------------------------------------------------------------------------------- the law


def plain(
    parts,
    *,
    penalty,
    steps,
    local_steps=1,
    relaxation=1.0,
    balance=False,
    regularizer=None,
    participation=1.0,
    rate=None,
    scale=40.0,
    seed=0,
    eps=None,
):
    """Section 7.1 with the means over rows, by numbers of its own: z, penalties, (primal, dual) of each meeting."""
    n, size = sum(len(x) for x, _ in parts), len(parts)
    d = parts[0][0].shape[1]
    z, penalties, residuals = torch.zeros(d, dtype=F64), [], []
    xs, us = [z.clone() for _ in parts], [z.clone() for _ in parts]
    first = penalty
    for step in range(steps):
        shorter = rate and rate / (1 + rate * max(0.0, penalty - first))
        meeting = step // local_steps
        here = [takes_part(seed, meeting, rank, participation) for rank in range(size)]
        for i, (a, b) in enumerate(parts):
            if here[i]:
                g = scale * a.T @ (a @ xs[i] - b) / len(a) + penalty * (xs[i] - z + us[i])
                h = scale * a.T @ a / len(a) + penalty * torch.eye(d, dtype=F64)
                xs[i] = xs[i] - (torch.linalg.solve(h, g) if rate is None else shorter * g)
        if (step + 1) % local_steps and step + 1 < steps:
            continue
        words = [
            relaxation * x + (1 - relaxation) * z + u if there else z + u
            for x, u, there in zip(xs, us, here, strict=True)
        ]
        old, z = z, sum(len(a) / n * v for (a, _), v in zip(parts, words, strict=True))
        kind, weight = regularizer or ("l2", 0.0)
        t = weight / penalty
        z = z / (1 + t) if kind == "l2" else z.sign() * (z.abs() - t).clamp(min=0)
        us = [v - z for v in words]
        weights = [size * len(a) / n for a, _ in parts]
        r = sum(w * (x - z).square().sum().item() for w, x in zip(weights, xs, strict=True)) ** 0.5
        s = penalty * size**0.5 * (z - old).norm().item()
        penalties.append(penalty)
        residuals.append((r, s))
        if eps is not None and r <= eps and s <= eps:
            break
        factor = 2 if r > 10 * s else 0.5 if s > 10 * r else 1
        if balance:
            penalty *= factor
            us = [u / factor for u in us]
    return z, penalties, residuals


UNEVEN = [(0, 3), (3, 30), (30, 41), (41, 80)]


def uneven():
    a, b = regression(seed=3, workers=1, rows=80, features=6)
    return [(a[0, lo:hi], b[0, lo:hi]) for lo, hi in UNEVEN]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"relaxation": 1.6},
        {"local_steps": 5},
        {"local_steps": 7, "relaxation": 1.5, "regularizer": ("l2", 0.7)},
        {"regularizer": ("l1", 8.0)},
        {"participation": 0.5},
        {"participation": 0.5, "relaxation": 1.7, "local_steps": 3},
        {"balance": True, "penalty": 0.05},
        {"balance": True, "penalty": 500.0, "participation": 0.7, "local_steps": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "parts", [parts_of(*regression(workers=3, rows=9, features=4)), uneven()], ids=["even", "uneven"]
)
def test_it_is_the_plain_loop(parts, options):
    """Gradient steps, a number of them that ends within a period, uneven rows, absence: all as the paper's loop."""
    options = {"penalty": 20.0, "local_steps": 1, "balance": False} | options
    rate = 0.5 / (40 * max(torch.linalg.matrix_norm(a, 2).item() ** 2 / len(a) for a, _ in parts) + 1000)
    z, penalties, residuals = plain(parts, steps=32, rate=rate, **options)
    form = options.pop("regularizer", None)
    strategy = ADMM(regularizer=form and f"{form[0]}({form[1]})", **options)
    result = train(Squares(parts, rate=rate), strategy, workers=len(parts), steps=32)
    assert solution(result) == pytest.approx(z, abs=1e-12)
    assert said(result, "penalty") == penalties
    assert said(result, "primal") == pytest.approx([r for r, _ in residuals], rel=1e-9)
    assert said(result, "dual") == pytest.approx([s for _, s in residuals], rel=1e-9)
    assert not options["balance"] or len(set(penalties)) > 1


# ------------------------------------------------------------------------------------------- closed forms


def solved(parts, *, steps, eps=1e-10, weight=None, workload=Squares, **options):
    """With x-steps that are exact, and the stop rule."""
    options = {"penalty": 40.0, "local_steps": 1, "balance": False, "eps_abs": eps, "eps_rel": eps} | options
    work = workload(parts, options["penalty"]) if "rate" not in options else workload(parts, rate=options.pop("rate"))
    return train(work, ADMM(regularizer=weight, **options), workers=len(parts), steps=steps)


@pytest.mark.parametrize(
    ("options", "meetings"),
    [
        ({"penalty": 40.0}, 81),
        ({"penalty": 40.0, "relaxation": 1.6}, 48),
        ({"penalty": 100.0}, 130),
        ({"penalty": 40.0, "participation": 0.5}, 181),
    ],
    ids=str,
)
def test_ridge_reaches_its_closed_form(options, meetings):
    a, b = regression()
    result = solved(parts_of(a, b), steps=400, eps=1e-11, weight=f"l2({RIDGE / 8})", **options)
    best = ridge(a, b)
    assert largest(solution(result) - best) < 1e-10
    primal, dual = said(result, "primal"), said(result, "dual")
    bound = 1e-10 * (8 * 50) ** 0.5 + 1e-10 * 8**0.5 * best.norm().item()
    within = next(k for k, pair in enumerate(zip(primal, dual, strict=True), 1) if max(pair) < bound)
    assert within == pytest.approx(meetings, rel=0.15)
    assert len(primal) < 400 and any("primal residual" in event["message"] for event in result.events)


def test_the_penalty_decides_the_speed_and_balancing_mends_a_bad_one():
    """Pure loops: 1 is far too small here, and still not there when 40 has long converged; balanced, it is."""
    parts, best = parts_of(*regression()), ridge(*regression())
    form = ("l2", RIDGE / 8)
    _, _, bad = plain(parts, penalty=1.0, steps=400, regularizer=form)
    z, penalties, good = plain(parts, penalty=1.0, steps=400, regularizer=form, balance=True, eps=4e-9)
    assert max(bad[-1]) > 1e-4 and len(good) == pytest.approx(325, rel=0.1) and max(penalties) > 1
    assert largest(z - best) < 1e-9


@pytest.mark.parametrize("local_steps", [1, 5, 20])
def test_an_inexact_x_step_has_the_same_solution(local_steps):
    """Gradient steps that go on from where x_i was: fewer of them cost more meetings, not exactness."""
    a, b = regression(workers=4, features=10)
    result = solved(
        parts_of(a, b),
        steps=150 * local_steps,
        eps=1e-11,
        weight=f"l2({RIDGE / 4})",
        rate=1 / 120,
        local_steps=local_steps,
    )
    assert largest(solution(result) - ridge(a, b)) < 1e-10
    assert result.history.num_rows < 150 * local_steps


@pytest.mark.parametrize("options", [{}, {"relaxation": 1.6}, {"participation": 0.5}], ids=str)
def test_the_lasso_satisfies_its_kkt_conditions_with_exact_zeros(options):
    a, b = regression(true=8)
    result = solved(parts_of(a, b), steps=500, eps=1e-11, weight=f"l1({LASSO / 8})", **options)
    z = solution(result)
    x, y = a.reshape(-1, 50), b.reshape(-1)
    slope = x.T @ (x @ z - y)  # -slope is in LASSO * sign(z), and within +-LASSO where z is 0
    on = z != 0
    assert on.sum() == 8
    assert largest(slope[on] + LASSO * z[on].sign()) < 1e-8
    assert largest(slope[~on]) <= LASSO + 1e-8


class Decayed(Squares):
    """The optimizer has a weight decay of its own."""

    def __init__(self, parts, kind, **options):
        super().__init__(parts, **options)
        self.kind = kind

    def optimizer(self, params):
        if self.kind == "adam":
            return torch.optim.Adam(params, lr=0.003, betas=(0.5, 0.9), weight_decay=2.0)
        momentum = {"sgd": 0.0, "momentum": 0.8}[self.kind]
        return torch.optim.SGD(params, lr=0.01, momentum=momentum, weight_decay=2.0)


@pytest.mark.parametrize(("kind", "most"), [("sgd", 1e-9), ("momentum", 1e-9), ("adam", 2e-2)])
def test_a_weight_decay_is_l2_also_where_balancing_raises_the_penalty(kind, most):
    """The first penalty is far too small. A step that shortens the gradient alone misses the closed form by 2e-3."""
    a, b = regression(workers=2, features=5)
    law = ridge(a, b, 2 * 2.0)
    strategy = ADMM(penalty=0.5, local_steps=3, balance=True)
    result = train(Decayed(parts_of(a, b), kind), strategy, workers=2, steps=1500)
    assert max(said(result, "penalty")) >= 4, "the test shows nothing"
    assert largest(solution(result) - law) < most < largest(ridge(a, b, 0.0) - law)


class Climbs(Squares):
    """The loss with the other sign, maximized."""

    def loss(self, model, batch):
        return -super().loss(model, batch)

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=self.rate, maximize=True)


@pytest.mark.parametrize("balance", [False, True])
def test_with_maximize_it_climbs_as_it_would_descend(balance):
    parts = parts_of(*regression(workers=2, features=5))
    strategy = ADMM(penalty=0.5, local_steps=3, balance=balance)
    found = [solution(train(kind(parts, rate=0.005), strategy, workers=2, steps=60)) for kind in (Squares, Climbs)]
    assert torch.equal(*found)
    assert found[0].abs().max() > 0.1


def newton(x, y, weight):
    w = torch.zeros(x.shape[1], dtype=F64)
    for _ in range(50):
        p = torch.sigmoid(x @ w)
        h = (x.T * (p * (1 - p))) @ x + weight * torch.eye(len(w), dtype=F64)
        w -= torch.linalg.solve(h, x.T @ (p - y) + weight * w)
    return w


def test_logistic_regression_is_that_of_all_rows_in_one_place():
    a, b = regression(seed=5, workers=4, rows=60, features=10)
    y = (torch.sigmoid(b) > torch.rand(b.shape, generator=torch.Generator().manual_seed(1), dtype=F64)).to(F64)
    work = Logistic(parts_of(a, y), penalty=2.0, scale=60.0)
    strategy = ADMM(penalty=2.0, local_steps=2, balance=False, regularizer="l2(0.25)", eps_abs=1e-11, eps_rel=1e-11)
    result = train(work, strategy, workers=4, steps=400)
    assert largest(solution(result) - newton(a.reshape(-1, 10), y.reshape(-1), 1.0)) < 1e-8
    assert len(said(result, "primal")) < 200


def test_one_worker_is_the_proximal_point_method_and_uneven_rows_count_as_many_as_they_are():
    for parts in (uneven(), uneven()[3:]):
        result = solved(parts, steps=400, eps=1e-12, penalty=1.0, workload=PerRow)
        x, y = (torch.cat(column) for column in zip(*parts, strict=True))
        assert largest(solution(result) - ridge(x, y, 0.0)) < 1e-9  # all rows alike, however they are spread
        assert result.history.num_rows < 400


class PerRow(Squares):
    """f_i = the mean over the worker's rows."""

    def __init__(self, parts, penalty=None, **options):
        super().__init__(parts, penalty, scale=1.0, **options)


def test_a_worker_without_rows_holds_nobody_up():
    parts = [*uneven()[:2], (torch.zeros(0, 6, dtype=F64), torch.zeros(0, dtype=F64))]
    result = solved(parts, steps=400, eps=1e-12, penalty=1.0, workload=PerRow)
    x, y = (torch.cat(column) for column in zip(*parts, strict=True))
    assert largest(solution(result) - ridge(x, y, 0.0)) < 1e-9


# ------------------------------------------------------------------------------------------- the stop rule


def test_it_stops_by_the_bounds_of_section_3_3():
    a, b = regression(workers=4, features=10)
    parts = parts_of(a, b)
    result = solved(parts, steps=300, eps=1e-6, weight="l2(1)")
    last = {name: said(result, name)[-1] for name in ("primal", "dual", "primal_stop", "dual_stop", "met")}
    assert last["primal"] <= last["primal_stop"] and last["dual"] <= last["dual_stop"] and last["met"] == 1
    before = {name: said(result, name)[-2] for name in ("primal", "dual", "primal_stop", "dual_stop")}
    assert before["primal"] > before["primal_stop"] or before["dual"] > before["dual_stop"]
    z = solution(result)
    assert last["primal_stop"] == pytest.approx(40**0.5 * 1e-6 + 1e-6 * 2 * z.norm().item(), rel=1e-4)
    forever = solved(parts, steps=30, eps_abs=None, eps_rel=None, weight="l2(1)")
    assert forever.history.num_rows == 30 and "primal_stop" not in forever.history.column_names


def test_nobody_stops_while_some_have_not_been_asked():
    """A meeting at which all are absent moves nothing, and says nothing about the optimum."""
    a, b = regression(workers=2, features=4)
    result = solved(parts_of(a, b), steps=400, eps=1e-9, participation=0.3)
    assert 0 in said(result, "present") and min(said(result, "dual")) == 0
    assert largest(solution(result) - ridge(a, b, 0.0)) < 1e-7
    assert result.history.num_rows < 400


# ------------------------------------------------------------------------------------------- batches, buffers, resume


def test_small_batches_reach_an_error_that_falls_with_the_rate():
    a, b = regression(workers=4, features=5)
    errors = []
    for rate in (0.04, 0.01):
        work = PerRow(parts_of(a, b), rate=rate, batch_size=10)
        strategy = ADMM(penalty=1.0, local_steps=20, balance=False)
        result = train(work, strategy, workers=4, steps=1200)
        errors.append(largest(solution(result) - ridge(a, b, 0.0)))
    assert 1e-8 < errors[1] < errors[0] / 2 and errors[0] < 0.02


class Normed(Small):
    """With a BatchNorm, whose statistics are no parameters."""

    def model(self):
        return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 1)).double()


def test_buffers_have_no_multipliers_they_are_averaged_or_kept():
    found = {}
    for buffers in ("average", "keep"):
        result = train(Normed(n=48, batch=6), ADMM(local_steps=4, buffers=buffers), workers=3, steps=8)
        found[buffers] = result.model()[1]
        assert result.model()[1].num_batches_tracked == 8
    assert torch.isfinite(found["average"].running_mean).all() and (found["average"].running_var > 0).all()
    assert (found["average"].running_mean - found["keep"].running_mean).abs().max() > 1e-6


@pytest.mark.parametrize("at", [21, 25, 38])
def test_resume_in_the_middle_is_bit_equal(tmp_path, at):
    """x, u, z, the penalty, momentum and who has been there: all comes back."""
    strategy = ADMM(penalty=0.3, local_steps=5, relaxation=1.6, regularizer="l1(0.01)", participation=0.7, eps_rel=0)
    work = PerRow(uneven(), rate=0.05, momentum=0.9)
    middle = tmp_path / f"step-{at:08}"
    work.awaits = at, middle
    whole = train(work, strategy, workers=4, steps=40, checkpoint=tmp_path, checkpoint_every=at)
    resumed = train(work, strategy, workers=4, steps=40, resume=middle)
    assert torch.equal(solution(resumed), solution(whole)) and resumed.history.num_rows == 40 - at
    for name in ("primal", "dual", "penalty", "present"):
        assert said(resumed, name) == said(whole, name)[at // 5 :]
    assert len(set(said(whole, "penalty"))) > 1 and min(said(whole, "present")) < 4


def test_with_another_number_of_workers_the_consensus_goes_on(tmp_path):
    a, b = regression(workers=4, features=6)
    strategy = ADMM(penalty=40.0, local_steps=1, balance=False, eps_abs=1e-10, eps_rel=1e-10)
    first = train(Divided(parts_of(a, b), 40.0), strategy, workers=4, steps=2, checkpoint=tmp_path)
    again = train(Divided(parts_of(a, b), 40.0), strategy, workers=2, steps=300, resume=tmp_path / "step-00000002")
    assert largest(solution(again) - ridge(a, b, 0.0)) < 1e-8 < largest(solution(first) - ridge(a, b, 0.0))


class Divided(Squares):
    """Two or four workers: the parts are dealt out in turn."""

    def data(self):
        x, y = (torch.cat(column) for column in zip(*self.parts, strict=True))
        return rayps.data.tensors(x, y, batch_size=10_000, shuffle=False)


# ------------------------------------------------------------------------------------------- operators, options


@pytest.mark.parametrize(
    ("name", "value"), [("l1", lambda z: z.abs()), ("l2", lambda z: z.square() / 2), (None, lambda z: 0 * z)]
)
@pytest.mark.parametrize("t", [0.1, 1.0, 7.0])
def test_proximal_operators_are_the_smallest_of_their_definition(name, value, t):
    weight = 0.3
    grid = torch.linspace(-3, 3, 60_001, dtype=F64)
    for v in (-2.5, -0.2, 0.0, 0.031, 1.0):
        best = grid[(weight * value(grid) + (grid - v) ** 2 / (2 * t)).argmin()]
        given = torch.tensor([v], dtype=F64)
        found = prox(name and f"{name}(weight={weight})", given, t)
        assert found.data_ptr() == given.data_ptr() and abs((found - best).item()) < 2e-4


def test_a_soft_threshold_makes_exact_zeros():
    v = torch.tensor([[0.3, -0.3, 0.30001], [-4.0, 0.0, 0.1]])
    assert torch.equal(soft_threshold(v.clone(), 0.3) == 0, v.abs() <= 0.3)
    assert torch.equal(soft_threshold(v.clone(), 0.0), v) and torch.equal(shrink(v.clone(), 0.0), v)


def test_who_attends_is_drawn_from_the_seed():
    drawn = [[takes_part(7, meeting, rank, 0.3) for rank in range(5)] for meeting in range(2000)]
    assert drawn == [[takes_part(7, meeting, rank, 0.3) for rank in range(5)] for meeting in range(2000)]
    share = torch.tensor(drawn, dtype=F64)
    assert (share.mean(0) - 0.3).abs().max() < 0.05 and torch.corrcoef(share.T).fill_diagonal_(0).abs().max() < 0.1
    assert [takes_part(8, meeting, 0, 0.3) for meeting in range(2000)] != [row[0] for row in drawn]
    assert all(takes_part(7, meeting, 0, 1.0) for meeting in range(100))


BAD = [
    "penalty=0",
    "penalty=-1",
    "penalty=inf",
    "penalty=x",
    "penalty=true",
    "local_steps=0",
    "local_steps=2.5",
    "relaxation=0",
    "relaxation=2",
    "balance=2",
    "balance=maybe",
    "regularizer=l3(weight=1)",
    "regularizer=0.1",
    "regularizer=l1(weight=-1)",
    "regularizer=l1(weight=x)",
    "regularizer=l2(rate=1)",
    "regularizer=l1",
    "eps_abs=-1",
    "eps_rel=x",
    "participation=0",
    "participation=1.1",
    "momentum=drop",
    "buffers=both",
]


@pytest.mark.parametrize("given", BAD)
def test_bad_options(given):
    with pytest.raises(ConfigError) as caught:
        parse(f"admm:{given}")
    field, _, value = given.partition("=")
    assert caught.value.data["field"] == field and field in str(caught.value)
    assert value.partition("(")[0].strip("0-1.") in str(caught.value).lower()


def test_a_regularizer_has_one_text():
    forms = ["l1(0.1)", "l1(weight=0.1)", " l1 ( 0.1 ) ".replace(" ", ""), {"name": "l1", "weight": 0.1}]
    assert {write_canonical(given) for given in forms} == {"l1(weight=0.1)"} and write_canonical(None) is None
    strategy = ADMM(regularizer="l2(3)", eps_abs=1e-6, balance=False)
    assert parse(wire(parse(strategy)))[0].strategy == strategy
    assert parse(write_strategy(wire(parse(strategy))))[0].strategy == strategy

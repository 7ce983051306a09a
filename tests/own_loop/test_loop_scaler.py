"""The law of `torch.amp.GradScaler` in a wrapped loop: torch's documented recipe is that of plain torch.

Where all workers end a step together, it is that of one process on the union of the batches; elsewhere it is that of
the same loop without a scaler. A step whose gradient overflows is skipped: by all in step, else by the worker alone.
"""

import contextlib
import math
import warnings

import pytest
import torch
from rayps_client.errors import ConfigError
from test_loop import Fixed, run
from torch import nn
from user_code_table import STRATEGIES, wraps

import rayps
from rayps.core.strategy.strategy_families import LOCAL_UPDATES
from rayps.core.strategy.topology import compression_in, runs_in_step, servers_of
from rayps.strategies.catalogue import parse_for_loop

MOST = 0.3
OVERFLOWS = 2  # the step in which the loss of rank 0 is infinite
WRAPPED = [text for text in STRATEGIES if wraps(text)]
WRAPPED += ["local_sgd:period=2,warmup=4", "all_reduce:compression=top_k:1.0"]
WORK = Fixed(n=36, batch=3)


def work_of(strategy):
    """The pushes of downpour decay the weights once for each step that was not skipped, which only a scaler tells."""
    return Fixed(n=36, batch=3, optimizer="sgd" if "downpour" in strategy else "momentum")


class Recipe:
    """torch's documented loop with a GradScaler; without one if `scale` is None."""

    def __init__(self, scale, *, clips, overflows, quiet=False):
        self.scale, self.clips, self.overflows, self.quiet = scale, clips, overflows, quiet

    def loss(self, model, batch, rank, step):
        loss = ((model(batch.x) - batch.y) ** 2).mean()
        return loss * math.inf if self.overflows and rank == 0 and step == OVERFLOWS else loss

    def __call__(self, model, optimizer, rank, size):
        if self.scale is not None:
            scaler = torch.amp.GradScaler("cpu", init_scale=float(self.scale))
        for step, batch in enumerate(dealt(rank, size)):
            optimizer.zero_grad()
            if self.scale is None:
                optimizer.samples = 0 if self.overflows and rank == 0 and step == OVERFLOWS else 1
                ((model(batch.x) - batch.y) ** 2).mean().backward()
                if self.clips:
                    nn.utils.clip_grad_norm_(model.parameters(), MOST)
                optimizer.step()
                continue
            with optimizer.no_sync() if self.quiet else contextlib.nullcontext():
                scaler.scale(self.loss(model, batch, rank, step)).backward()
            if self.clips:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), MOST)
            scaler.step(optimizer)
            scaler.update()
        return None if self.scale is None else scaler.get_scale()


def dealt(rank, size):
    return [b for epoch in range(2) for b in WORK.data().batches(rank=rank, size=size, seed=0, epoch=epoch)]


def plain(recipe, strategy, size, *, each):
    """Plain torch on the union of the batches. `each`: the gradient of each worker is clipped, not the mean."""
    model = WORK.model()
    params = list(model.parameters())
    optimizer = work_of(strategy).optimizer(params)
    for step, batches in enumerate(zip(*(dealt(rank, size) for rank in range(size)), strict=True)):
        if recipe.overflows and step == OVERFLOWS:
            continue
        found = []
        for rank, batch in enumerate(batches):
            optimizer.zero_grad()
            recipe.loss(model, batch, rank, step).backward()
            if each and recipe.clips:
                nn.utils.clip_grad_norm_(params, MOST)
            found.append([p.grad.clone() for p in params])
        for p, *grads in zip(params, *found, strict=True):
            p.grad = sum(grads) / size
        if recipe.clips and not each:
            nn.utils.clip_grad_norm_(params, MOST)
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in params])


def looped(recipe, strategy, size):
    """Return the parameters and the last scale of each rank."""

    def train_fn():
        here = rayps.world()
        model = WORK.model()
        optimizer = work_of(strategy).optimizer(list(model.parameters()))
        rayps.wrap(model, optimizer, strategy, steps=len(dealt(here.rank, here.size)))
        scale = recipe(model, optimizer, here.rank, here.size)
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()]), scale

    return run(train_fn, workers=size)


@pytest.mark.parametrize("overflows", [False, True])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("scale", [8, 1024])
@pytest.mark.parametrize("strategy", WRAPPED)
def test_the_recipe_is_that_of_plain_torch(strategy, scale, clips, overflows):
    chosen = parse_for_loop(strategy)
    compression = compression_in(chosen)
    if overflows and compression == "int8":
        overflows = False  # another scale rounds the error feedback otherwise
    recipe = Recipe(scale, clips=clips, overflows=overflows)
    in_step = runs_in_step(chosen) and chosen.loop != LOCAL_UPDATES
    size = 2 if in_step or chosen.loop == LOCAL_UPDATES else 1  # pushes of several workers have no order
    found = looped(recipe, strategy, size)
    if in_step and compression != "int8":
        expected = [plain(recipe, strategy, size, each=servers_of(chosen) is not None)] * size
    elif "warmup" in strategy and overflows:
        return  # judged by the next test
    else:
        expected = [vector for vector, _ in looped(Recipe(None, clips=clips, overflows=overflows), strategy, size)]
    near = 1e-9 if compression is None else 1e-5
    for (vector, _), law in zip(found, expected, strict=True):
        assert (vector - law).abs().max() < near
    if overflows:
        together = in_step and servers_of(chosen) is None
        assert [at for _, at in found] == [scale / 2, *([scale / 2 if together else scale] * (size - 1))]


def test_in_a_warm_up_all_workers_skip_together():
    """The steps before the first period are those of all_reduce; afterwards there is one average, of equal vectors."""
    recipe = Recipe(8, clips=True, overflows=True)
    strategy = "local_sgd:period=2,warmup=100"
    for vector, scale in looped(recipe, strategy, 2):
        assert (vector - plain(recipe, strategy, 2, each=False)).abs().max() < 1e-9
        assert scale == 4


@pytest.mark.parametrize("strategy", ["all_reduce", "hybrid"])
def test_a_scaler_that_has_not_seen_the_mean_is_refused(strategy):
    with pytest.raises(ConfigError, match=r"GradScaler has checked this worker's own gradient.*no_sync"):
        looped(Recipe(8, clips=True, overflows=False, quiet=True), strategy, 2)


def test_a_scaler_that_has_seen_the_mean_before_a_further_backward_is_refused():
    def train_fn():
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        rayps.wrap(model, optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(model(torch.ones(1, 3)).sum()).backward()
        with optimizer.no_sync():
            scaler.scale(model(torch.ones(1, 3)).sum()).backward()
        scaler.step(optimizer)

    with pytest.raises(ConfigError, match=r"GradScaler has checked this worker's own gradient"):
        run(train_fn)


def test_a_fused_optimizer_unscales_once():
    def train_fn():
        model = nn.Linear(3, 1)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)
        rayps.wrap(model, optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(model(torch.ones(1, 3)).sum()).backward()
        scaler.step(optimizer)
        return model.weight.tolist()

    assert run(train_fn) == [[[0.5] * 3]] * 2


@pytest.mark.parametrize("strategy", ["all_reduce", "local_sgd:period=2", "parameter_server"])
@pytest.mark.parametrize("first", [True, False])
def test_a_scheduler_warns_of_nothing(strategy, first):
    def train_fn():
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if first:
                scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
            rayps.wrap(model, optimizer, strategy, steps=2)
            if not first:
                scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.ones(1, 3)).sum().backward()
                optimizer.step()
                scheduler.step()
        return [str(each.message) for each in caught]

    assert run(train_fn, workers=1) == [[]]

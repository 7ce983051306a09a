"""The law of clipping in a loop of one's own: `optimizer.clip_grad_norm_` clips what plain torch would."""

import math

import pytest
import torch
from test_loop import EXACT, Fixed, run
from torch import nn

import rayps
from rayps import AllReduce, Hybrid, ParameterServer
from rayps.core.errors import ConfigError
from rayps.core.topology import servers_of

MOST = 0.3
RINGS = [AllReduce(), Hybrid()]
SERVERS = [
    ParameterServer(),
    ParameterServer(shards=2),
    ParameterServer(shards=2, replicas=0),
    ParameterServer(shards=2, replicas=1),
]


def batches(work, world, epochs=2):
    for epoch in range(epochs):
        yield from work.data().batches(rank=world.rank, size=world.size, seed=0, epoch=epoch)


def backward(model, batch):
    loss = ((model(batch.x) - batch.y) ** 2).mean()
    loss.backward()


def loop(work, strategy, body):
    """`body(world, model, optimizer)` on wrapped ones; gives the parameters and what it returned."""

    def train_fn():
        world = rayps.world()
        model = work.model()
        optimizer = work.optimizer(list(model.parameters()))
        rayps.wrap(model, optimizer, strategy)
        result = body(world, model, optimizer)
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()]), result

    return train_fn


def law(work, workers, *, each=False, epochs=2, skip=lambda step: False, parts=1):
    """Plain torch: the parameters and the norms (by worker where `each` is clipped); `parts` backwards for a step."""
    model = work.model()
    params = list(model.parameters())
    optimizer, norms = work.optimizer(params), []
    dealt = [
        [b for e in range(epochs) for b in work.data().batches(rank=r, size=workers, seed=0, epoch=e)]
        for r in range(workers)
    ]
    for step in range(len(dealt[0]) // parts):
        grads, told = [], []
        for mine in dealt:
            optimizer.zero_grad()
            for batch in mine[step * parts : (step + 1) * parts]:
                backward(model, batch)
            if each:
                told.append(nn.utils.clip_grad_norm_(params, MOST).item())
            grads.append([p.grad.clone() for p in params])
        for p, *found in zip(params, *grads, strict=True):
            p.grad = sum(found) / workers
        norms.append(told if each else [nn.utils.clip_grad_norm_(params, MOST).item()] * workers)
        if not skip(step):
            optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in params]), norms


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("strategy", [*RINGS, *SERVERS], ids=str)
def test_it_clips_the_mean_or_the_push_and_returns_the_norm(strategy, optimizer):
    work = Fixed(n=36, batch=3, optimizer=optimizer)

    def body(world, model, optimizer):
        norms = []
        for batch in batches(work, world):
            optimizer.zero_grad()
            backward(model, batch)
            norms.append(optimizer.clip_grad_norm_(MOST).item())
            optimizer.step()
        return norms

    expected, norms = law(work, 3, each=servers_of(strategy) is not None)
    for rank, (found, told) in enumerate(run(loop(work, strategy, body), workers=3)):
        assert told == pytest.approx([each[rank] for each in norms], abs=EXACT)
        assert (found - expected).abs().max() < EXACT
    assert max(max(each) for each in norms) > MOST


def test_a_weight_of_two_workers_steps_by_the_clipped_mean():
    """Gradients 3 and -1: the mean is 1, and clipped to 1 the step is -1; each clipped alone they would cancel."""

    def body(world, model, optimizer):
        model.weight.grad = None
        (model.weight.sum() * (3.0 if world.rank == 0 else -1.0)).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()

    class One(Fixed):
        def model(self):
            model = nn.Linear(1, 1, bias=False).double()
            nn.init.zeros_(model.weight)
            return model

        def optimizer(self, params):
            return torch.optim.SGD(params, lr=1.0)

    for found, _ in run(loop(One(), AllReduce(), body)):
        assert found.item() == pytest.approx(-1.0, abs=1e-5)


@pytest.mark.parametrize("strategy", RINGS + SERVERS[1:3], ids=str)
def test_backwards_that_add_up_are_clipped_together(strategy):
    work = Fixed(n=36, batch=3)

    def body(world, model, optimizer):
        norms, optimizer.samples = [], 1
        for number, batch in enumerate(batches(work, world)):
            if number % 2 == 0:
                optimizer.zero_grad(set_to_none=number % 4 == 0)
            backward(model, batch)
            if number % 2:
                norms.append(optimizer.clip_grad_norm_(MOST).item())
                optimizer.step()
        return norms

    _, norms = law(work, 2, each=servers_of(strategy) is not None, parts=2)
    for rank, (_, told) in enumerate(run(loop(work, strategy, body))):
        assert told == pytest.approx([each[rank] for each in norms], abs=EXACT)


@pytest.mark.parametrize("strategy", RINGS, ids=str)
def test_a_step_may_be_left_out_after_a_look_at_the_norm(strategy):
    work = Fixed(n=36, batch=3, optimizer="momentum")

    def body(world, model, optimizer):
        for step, batch in enumerate(batches(work, world)):
            optimizer.zero_grad()
            backward(model, batch)
            norm = optimizer.clip_grad_norm_(MOST)
            assert norm == optimizer.clip_grad_norm_(math.inf) or norm > MOST  # again: no other exchange
            if step % 3 != 1:
                optimizer.step()

    expected, _ = law(work, 2, skip=lambda step: step % 3 == 1)
    for found, _ in run(loop(work, strategy, body)):
        assert (found - expected).abs().max() < 1e-6  # clipped twice it is shorter by torch's 1e-6


def in_place(model, optimizer):
    nn.utils.clip_grad_norm_(model.parameters(), MOST)


def halved(model, optimizer):
    for p in model.parameters():
        p.grad = p.grad * 0.5


def one_element(model, optimizer):
    model[2].bias.grad[0] += 1.0


def after_clipping(model, optimizer):
    optimizer.clip_grad_norm_(MOST)
    model[0].weight.grad.mul_(0.5)


@pytest.mark.parametrize("change", [in_place, halved, one_element, after_clipping])
@pytest.mark.parametrize("strategy", [RINGS[0], SERVERS[1], SERVERS[2]], ids=str)
def test_a_gradient_that_was_changed_is_an_error_that_names_the_way_out(strategy, change):
    work = Fixed(n=36, batch=3)

    def body(world, model, optimizer):
        for batch in batches(work, world):
            optimizer.zero_grad()
            backward(model, batch)
            change(model, optimizer)
            optimizer.step()

    with pytest.raises(ConfigError, match=r"optimizer\.clip_grad_norm_\(max_norm\)") as caught:
        run(loop(work, strategy, body))
    assert "parameter" in caught.value.data


def test_a_backward_after_clipping_is_an_error():
    work = Fixed(n=36, batch=3)

    def body(world, model, optimizer):
        for batch in batches(work, world):
            backward(model, batch)
            optimizer.clip_grad_norm_(MOST)
            backward(model, batch)
            optimizer.step()

    with pytest.raises(ConfigError, match="after the last backward"):
        run(loop(work, AllReduce(), body))


def test_gradients_that_no_backward_made_and_zeroed_ones_are_taken():
    def body(world, model, optimizer):
        for p in model.parameters():
            p.grad = torch.full_like(p, world.rank + 1.0)
        optimizer.step()
        model.zero_grad(set_to_none=False)
        backward(model, next(iter(batches(Fixed(), world))))
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()

    start = torch.cat([p.detach().reshape(-1) for p in Fixed().model().parameters()])
    for found, _ in run(loop(Fixed(), AllReduce(), body)):
        assert (found - (start - 0.1 * 1.5)).abs().max() < EXACT


@pytest.mark.parametrize("value", [0, -1.0, True, "1", None, math.nan])
def test_what_is_no_norm_is_refused(value):
    with pytest.raises(ConfigError, match="max_norm is"):
        run(loop(Fixed(), AllReduce(), lambda world, model, optimizer: optimizer.clip_grad_norm_(value)), workers=1)

"""The law of clipping in a loop of one's own: `optimizer.clip_grad_norm_` clips what plain torch would."""

import contextlib
import math

import pytest
import torch
from rayps_client.errors import ConfigError, WorkloadError
from test_loop import EXACT, Fixed, run
from torch import nn
from torch.utils.checkpoint import checkpoint

import rayps
from rayps import AllReduce, Hybrid, ParameterServer
from rayps.core.strategy.topology import compression_in, servers_of
from rayps.runtime.own_loop.mean_gradient import MeanGradient

MOST = 0.3
RINGS = [AllReduce(), Hybrid()]
SERVERS = [
    ParameterServer(),
    ParameterServer(shards=2),
    ParameterServer(shards=2, replicas=0),
    ParameterServer(shards=2, replicas=1),
]


def near(strategy):
    """Codecs send float32."""
    return EXACT if compression_in(strategy) is None else 1e-6


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


def torchs_clip(params):
    nn.utils.clip_grad_norm_(params, MOST)


def by_value(params):
    nn.utils.clip_grad_value_(params, 0.01)


def another_tensor(params):
    for p in params:
        p.grad = p.grad * 0.5


def one_element(params):
    params[-1].grad[0] += 1.0


def without_a_version(params):
    for p in params:
        p.grad.data.mul_(0.5)


def by_numpy(params):
    for p in params:
        p.grad.numpy()[...] *= 2.0


def removed(params):
    params[0].grad = None


@pytest.mark.parametrize(
    "change", [torchs_clip, by_value, another_tensor, one_element, without_a_version, by_numpy, removed]
)
@pytest.mark.parametrize("strategy", [*RINGS, AllReduce(bucket_mb=0), *SERVERS[1:3]], ids=str)
def test_what_a_loop_does_with_the_gradient_it_does_with_the_mean_or_the_push(strategy, change):
    work = Fixed(n=36, batch=3, optimizer="momentum")

    def body(world, model, optimizer):
        for batch in batches(work, world):
            optimizer.zero_grad()
            backward(model, batch)
            change(list(model.parameters()))
            optimizer.step()

    each = servers_of(strategy) is not None
    model = work.model()
    params = list(model.parameters())
    optimizer = work.optimizer(params)
    dealt = [[b for e in range(2) for b in work.data().batches(rank=r, size=2, seed=0, epoch=e)] for r in range(2)]
    for parts in zip(*dealt, strict=True):
        grads = []
        for batch in parts:
            optimizer.zero_grad()
            backward(model, batch)
            if each:
                change(params)
            grads.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in params])
        for p, *found in zip(params, *grads, strict=True):
            p.grad = sum(found) / 2
        if not each:
            change(params)
        optimizer.step()
    for found, _ in run(loop(work, strategy, body)):
        assert (found - torch.cat([p.detach().reshape(-1) for p in params])).abs().max() < EXACT


@pytest.mark.parametrize("strategy", [*RINGS, AllReduce(compression="top_k:1.0"), *SERVERS[1:3]], ids=str)
def test_a_backward_after_clipping_or_after_a_step_adds_to_the_gradient(strategy):
    work = Fixed(n=36, batch=3)

    def body(world, model, optimizer):
        for batch in batches(work, world):
            backward(model, batch)
            for p in model.parameters():
                p.grad *= 0.5
            backward(model, batch)
            optimizer.step()

    model, data = work.model(), work.data()
    optimizer = work.optimizer(list(model.parameters()))
    dealt = [[b for e in range(2) for b in data.batches(rank=r, size=2, seed=0, epoch=e)] for r in range(2)]
    for parts in zip(*dealt, strict=True):
        for _ in range(2):
            for batch in parts:
                (((model(batch.x) - batch.y) ** 2).mean() / 2).backward()
            if _ == 0:
                for p in model.parameters():
                    p.grad *= 0.5
        optimizer.step()
    for found, _ in run(loop(work, strategy, body)):
        assert (found - torch.cat([p.detach().reshape(-1) for p in model.parameters()])).abs().max() < near(strategy)


def test_samples_that_change_after_backward_are_an_error():
    def body(world, model, optimizer):
        backward(model, next(iter(batches(Fixed(), world))))
        optimizer.samples = 7
        optimizer.step()

    with pytest.raises(ConfigError, match="set samples before the last backward"):
        run(loop(Fixed(), AllReduce(), body))


def test_unequal_numbers_of_backwards_are_an_error():
    def body(world, model, optimizer):
        for batch in batches(Fixed(), world):
            for _ in range(1 + world.rank):
                backward(model, batch)
            optimizer.step()

    with pytest.raises(WorkloadError, match=r"backward unequally often.*\n.*no_sync"):
        run(loop(Fixed(), AllReduce(), body))


@pytest.mark.parametrize(
    "strategy", [AllReduce(bucket_mb=0.0001), AllReduce(), AllReduce(compression="top_k:1.0")], ids=str
)
def test_nested_backwards_end_together(strategy, monkeypatch):
    """A segment that `checkpoint` computes again runs a backward of its own inside of the loop's; there is one mean."""
    average, means = MeanGradient.average, []

    def counted(self, samples):
        means.append(self)
        average(self, samples)

    monkeypatch.setattr(MeanGradient, "average", counted)

    def loss(model, batch):
        def inner(x):
            return checkpoint(model[1], model[0](x), use_reentrant=True)

        x = checkpoint(inner, batch.x.requires_grad_(), use_reentrant=True)
        return ((checkpoint(model[2], x, use_reentrant=True) - batch.y) ** 2).mean()

    def body(world, model, optimizer):
        norms = []
        for batch in batches(Fixed(n=36, batch=3), world):
            optimizer.zero_grad()
            loss(model, batch).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), MOST).item())
            optimizer.step()
        return norms

    expected, norms = law(Fixed(n=36, batch=3), 2)
    for rank, (found, told) in enumerate(run(loop(Fixed(n=36, batch=3), strategy, body))):
        assert told == pytest.approx([each[rank] for each in norms], abs=near(strategy))
        assert (found - expected).abs().max() < near(strategy)
    assert len(means) == 2 * len(norms)


def test_a_backward_that_has_failed_cannot_be_repeated():
    """A part of its gradient is under way to the other workers."""

    def body(world, model, optimizer):
        def fail(grad):
            raise KeyError("a mistake")

        for step, batch in enumerate(batches(Fixed(), world)):
            hidden = model[1](model[0](batch.x))
            if step == 1:
                hidden.register_hook(fail)
            with contextlib.suppress(KeyError):
                (model[2](hidden) - batch.y).square().mean().backward()
            optimizer.zero_grad()

    with pytest.raises(WorkloadError, match=r"a backward has ended with an error.*no_sync"):
        run(loop(Fixed(), AllReduce(), body))


def test_the_error_of_another_rank_arrives_from_backward_as_it_is():
    seen = []

    def body(world, model, optimizer):
        for step, batch in enumerate(batches(Fixed(n=36, batch=3), world)):
            if step == 2 and world.rank:
                raise KeyError("a mistake")
            try:
                backward(model, batch)
            except BaseException as error:
                seen.append(type(error).__name__)
                raise
            optimizer.step()

    with pytest.raises(WorkloadError, match="a mistake"):
        run(loop(Fixed(n=36, batch=3), AllReduce(), body))
    assert seen in (["PeerLost"], [])  # the loop's function is a copy, whose list is another one


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

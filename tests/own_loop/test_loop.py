"""A loop of one's own under a strategy, on a cluster of threads."""

import pytest
import torch
from rayps_client.errors import ConfigError, WorkloadError
from small_work import OPTIMIZERS, Small, distance, plain, vector

import rayps
from rayps import AllReduce, ParameterServer
from rayps.cluster.local import LocalCluster

EXACT = 1e-12
IN_STEP = [AllReduce(), ParameterServer(), ParameterServer(shards=3)]


def run(function, workers=2, **options):
    return rayps.run(function, workers=workers, cluster=LocalCluster(), timeout=options.pop("timeout", 20.0), **options)


def loop(work, strategy, epochs=2, seed=0, change=lambda model: None, schedule=None):
    """A plain torch loop with two more lines: world and wrap."""

    def train_fn():
        world = rayps.world()
        torch.manual_seed(seed + 17 * world.rank)  # everyone begins elsewhere, and then at rank 0's place
        model = work.model()
        change(model)
        optimizer = work.optimizer([p for p in model.parameters() if p.requires_grad])
        rayps.wrap(model, optimizer, strategy)
        later = schedule(optimizer) if schedule else None
        losses = []
        for epoch in range(epochs):
            for batch in work.data().batches(rank=world.rank, size=world.size, seed=0, epoch=epoch):
                optimizer.zero_grad()
                optimizer.samples = batch.size
                if batch.size:
                    loss = ((model(batch.x) - batch.y) ** 2).mean()
                    loss.backward()
                    losses.append((loss.item(), batch.size))
                optimizer.step()
            if later is not None:
                later.step()
        return vector(model), losses

    return train_fn


def law(work, workers, epochs=2):
    return plain(work, workers, epochs=epochs)[0]


class Fixed(Small):
    """Its first parameters depend on nothing that threads share."""

    def model(self):
        model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)).double()
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / 3)
        return model


@pytest.mark.parametrize("strategy", IN_STEP, ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_loop_of_ones_own_equals_one_process(strategy, optimizer):
    work = Fixed(n=31, batch=4, optimizer=optimizer)
    for found, _ in run(loop(work, strategy), workers=3):
        assert distance(found, law(work, 3)) < EXACT


def test_on_an_elastic_group_too():
    work = Fixed(n=31, batch=4, optimizer="adam")
    for found, _ in run(loop(work, ParameterServer(shards=2, replicas=1)), workers=3):
        assert distance(found, law(work, 3)) < EXACT


@pytest.mark.parametrize("compression", ["fp16", "int8", "top_k:0.5"])
def test_compressed_it_stays_near_one_process(compression):
    work = Fixed(n=31, batch=4)
    found = [params for params, _ in run(loop(work, AllReduce(compression=compression)), workers=3)]
    assert all(torch.equal(params, found[0]) for params in found)
    assert 0 < distance(found[0], law(work, 3)) < 0.1


@pytest.mark.parametrize("strategy", [*IN_STEP, ParameterServer(staleness=None)], ids=str)
def test_one_worker_is_plain_torch(strategy):
    work = Fixed(optimizer="adam")
    [(found, losses)] = run(loop(work, strategy), workers=1)
    model, expected, _ = plain(work, epochs=2)
    assert distance(found, model) < EXACT
    assert [loss for loss, _ in losses] == pytest.approx(expected, abs=EXACT)


def test_everyone_begins_at_rank_0():
    def nudge(model):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(rayps.world().rank)

    work = Fixed(n=24)
    for found, _ in run(loop(work, AllReduce(), change=nudge), workers=3):
        assert distance(found, law(work, 3)) < EXACT


def test_frozen_parameters_and_buffers_begin_at_rank_0_too():
    def train_fn():
        rank = rayps.world().rank
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        model[0].weight.requires_grad_(False)
        with torch.no_grad():
            model[0].weight.fill_(rank)
            model[1].running_mean.fill_(rank)
        rayps.wrap(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
        return model[0].weight.sum().item(), model[1].running_mean.sum().item()

    assert run(train_fn, workers=3) == [(0.0, 0.0)] * 3


@pytest.mark.parametrize("staleness", [2, None])
def test_out_of_step_it_learns(staleness):
    work = Fixed(n=120, batch=4, optimizer="momentum")
    results = run(loop(work, ParameterServer(shards=2, staleness=staleness), epochs=12), workers=3)
    # a worker that starts late finds trained parameters: the begin is that of the worker that started first
    first = max(sum(loss for loss, _ in losses[:5]) for _, losses in results)
    for _, losses in results:
        assert sum(loss for loss, _ in losses[-5:]) < first


def test_a_schedule_of_the_learning_rate_works_in_all_reduce():
    work = Fixed(optimizer="sgd")

    def schedule(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)

    results = run(loop(work, AllReduce(), schedule=schedule), workers=2)
    plain_results = run(loop(work, AllReduce()), workers=2)
    assert distance(results[0][0], plain_results[0][0]) > 1e-4
    assert distance(results[0][0], results[1][0]) == 0


def paced(work, strategy, schedule, steps=12, own=None):
    """A loop whose schedule is given to wrap, or stepped in it (`own`)."""

    def train_fn():
        world = rayps.world()
        model = work.model()
        optimizer = work.optimizer(list(model.parameters()))
        rayps.wrap(model, optimizer, strategy, schedule=schedule)
        later = own(optimizer) if own else None
        for batch in work.data().batches(rank=world.rank, size=world.size, seed=0, epoch=0):
            optimizer.zero_grad()
            ((model(batch.x) - batch.y) ** 2).mean().backward()
            optimizer.step()
            if later is not None:
                later.step()
        return vector(model)

    return train_fn


def once(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20)


@pytest.mark.parametrize("strategy", [*IN_STEP, ParameterServer(shards=2, replicas=1)], ids=str)
@pytest.mark.parametrize("optimizer", ["momentum", "adamw_groups"])
def test_a_schedule_that_wrap_is_given_is_torchs_under_every_strategy(strategy, optimizer):
    work = Fixed(optimizer=optimizer)
    work.schedule = once
    expected = law(work, 2, epochs=1)
    for found in run(paced(Fixed(optimizer=optimizer), strategy, once), workers=2):
        assert distance(found, expected) < EXACT
    for found in run(paced(Fixed(optimizer=optimizer), AllReduce(), None, own=once), workers=2):
        assert distance(found, expected) < EXACT


@pytest.mark.parametrize("strategy", [ParameterServer(), ParameterServer(shards=2, replicas=0)], ids=str)
def test_a_schedulers_own_step_under_servers_is_an_error_that_says_what_to_do(strategy):
    with pytest.raises(ConfigError, match=r"(?s)lr of the optimizer was changed .*schedule=lambda optimizer"):
        run(paced(Fixed(), strategy, None, own=lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5)), workers=1)


def test_a_closure_is_called_once():
    calls = []

    def train_fn():
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rayps.wrap(model, optimizer)

        def closure():
            calls.append(rayps.world().rank)
            optimizer.zero_grad()
            loss = model(torch.ones(1, 1)).sum()
            loss.backward()
            return loss

        return optimizer.step(closure).item(), len(calls)

    assert all(n == 1 or n == 2 for _, n in run(train_fn, workers=2))


@pytest.mark.parametrize("strategy", IN_STEP, ids=str)
def test_several_backwards_add_up_to_one_step(strategy):
    work = Fixed(n=48, batch=4, optimizer="momentum")

    def train_fn():
        world = rayps.world()
        model = work.model()
        optimizer = work.optimizer(list(model.parameters()))
        rayps.wrap(model, optimizer, strategy)
        for batch in work.data().batches(rank=world.rank, size=world.size, seed=0, epoch=0):
            optimizer.zero_grad()
            for half in (slice(0, 2), slice(2, 4)):  # two means over two samples, of which the mean is taken
                (((model(batch.x[half]) - batch.y[half]) ** 2).mean() / 2).backward()
            optimizer.step()
        return vector(model)

    for found in run(train_fn, workers=2):
        assert distance(found, law(work, 2, epochs=1)) < EXACT


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize("to_none", [True, False])
def test_what_no_rank_has_used_is_skipped_as_in_plain_torch(optimizer, to_none):
    def steps(model, optimizer, parts):
        for turn in range(4):
            optimizer.zero_grad(set_to_none=to_none)
            for rank in parts:
                x = torch.full((2, 5), 0.3 + rank + turn, dtype=torch.float64)
                used = [model[0], model[2]] if (rank + turn) % 3 else [model[0], model.switched, model[2]]
                for layer in used:
                    x = layer(x)
                (x.square().mean() / len(parts)).backward()
            optimizer.step()
        return vector(model)

    def make():
        model = Fixed().model()
        generator = torch.Generator().manual_seed(5)
        for name, shape in (("switched", (7, 7)), ("spare", (2, 2))):
            layer = torch.nn.Linear(*shape).double()
            with torch.no_grad():
                for p in layer.parameters():
                    p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / 3)
            model.add_module(name, layer)
        return model, OPTIMIZERS[optimizer](list(model.parameters()))

    def train_fn():
        model, own = make()
        rayps.wrap(model, own)
        return steps(model, own, [rayps.world().rank])

    expected = steps(*make(), [0, 1])
    for found in run(train_fn, workers=2):
        assert distance(found, expected) < EXACT


def test_two_models_wrapped_in_one_run():
    def train_fn():
        models = [torch.nn.Linear(2, 1) for _ in range(2)]
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
        rayps.wrap(models[0], optimizers[0], AllReduce())
        rayps.wrap(models[1], optimizers[1], ParameterServer(shards=2))
        for _ in range(3):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                model(torch.full((1, 2), 1.0 + rayps.world().rank)).sum().backward()
                optimizer.step()
        return torch.cat([vector(m) for m in models])

    found = run(train_fn, workers=3)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_results_come_by_rank():
    assert run(lambda: (rayps.world().rank, rayps.world().size), workers=4) == [(r, 4) for r in range(4)]


@pytest.mark.parametrize("strategy", IN_STEP, ids=str)
@pytest.mark.parametrize("who", [0, 1, 2])
def test_a_failing_rank_is_the_reason_and_nobody_waits(strategy, who):
    work = Fixed(n=60)

    def train_fn():
        world = rayps.world()
        model = work.model()
        optimizer = work.optimizer(list(model.parameters()))
        rayps.wrap(model, optimizer, strategy)
        for step, batch in enumerate(work.data().batches(rank=world.rank, size=world.size, seed=0, epoch=0)):
            optimizer.zero_grad()
            ((model(batch.x) - batch.y) ** 2).mean().backward()
            optimizer.step()
            if world.rank == who and step == 2:
                raise ValueError("my own mistake")

    with pytest.raises(WorkloadError, match=r"train_fn\(\) raised ValueError: my own mistake .*test_loop.py:"):
        run(train_fn, workers=3)


def test_outside_a_run_there_is_no_world():
    for call in (rayps.world, lambda: rayps.wrap(torch.nn.Linear(1, 1), torch.optim.SGD([torch.ones(1)], lr=1))):
        with pytest.raises(ConfigError, match=r"rayps\.run"):
            call()


@pytest.mark.parametrize("workers", [0, -1, 1.5, True, "2", None])
def test_bad_numbers_of_workers(workers):
    with pytest.raises(ConfigError, match="workers"):
        rayps.run(lambda: 0, workers=workers, cluster=LocalCluster())


def test_bad_strategies_are_named():
    def train_fn(strategy):
        model = torch.nn.Linear(1, 1)
        rayps.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)

    for strategy, words in [("allreduce", "did you mean"), ([(1, "all_reduce"), "all_reduce"], "one strategy")]:
        with pytest.raises(ConfigError, match=words):
            run(lambda strategy=strategy: train_fn(strategy))


def test_an_optimizer_that_is_not_elementwise_is_refused():
    def train_fn():
        model = torch.nn.Linear(3, 3)
        rayps.wrap(model, torch.optim.Adafactor(model.parameters()), "parameter_server")

    with pytest.raises(WorkloadError, match="not elementwise"):
        run(train_fn)

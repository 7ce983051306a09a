"""Learning rates and gradient norms in the history: of what is applied, under every strategy that knows it."""

import pytest
import torch
from federated_work import Fed
from newborn_site import GIVEN
from sharded_site import Words, loop_on, results, rounds
from small_work import SCHEDULES, Paced, Small, distance, rows, train, vector
from torch import nn

import rayps
from rayps.core.metrics import Rounds
from rayps.strategies.catalogue import CATALOGUE
from rayps.strategies.federated import Federated

ROUNDS = 6
# where all workers take one step together
IN_STEP = [
    "all_reduce",
    "all_reduce:bucket_mb=0",
    "all_reduce:compression=fp16",
    "all_reduce:shard=optimizer",
    "all_reduce:shard=gradients",
    "hybrid",
    "local_sgd:warmup=100",
]
FORMS = [
    *IN_STEP,
    "all_reduce:backup=1 of 3",
    "parameter_server:staleness=2",
    "parameter_server:backup=1 of 3",
    "downpour:n_push=2",
    "diloco:period=2",
]
NO_NORM = ("parameter_server", "downpour")  # the servers step: no worker knows what they apply


class PacedFed(Fed):
    """A schedule by rounds of clients."""

    def schedule(self, optimizer):
        return SCHEDULES["cosine"](optimizer)


def trained(work, text, **options):
    """Train under a strategy given as "TEXT of WORKERS", by default 2."""
    strategy, _, workers = text.partition(" of ")
    return train(work, strategy, workers=int(workers or 2), **options)


def numbers(result, name):
    return result.history.column(name).to_pylist()


def union_norms(work, workers, clip=None):
    """The norm of the gradient over the union of the workers' batches, and the rates, in each step of plain torch."""
    torch.manual_seed(0)
    model, data = work.model(), work.data()
    optimizer = work.optimizer(list(model.parameters()))
    scheduler = work.schedule(optimizer)
    dealt = [list(data.batches(rank=r, size=workers, seed=0, epoch=0)) for r in range(workers)]
    norms, rates = [], []
    for parts in list(zip(*dealt, strict=True))[:ROUNDS]:
        optimizer.zero_grad()
        x, y = torch.cat([b.x for b in parts]), torch.cat([b.y for b in parts])
        ((model(x) - y) ** 2).mean().backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip or torch.inf).item())
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return norms, rates


@pytest.mark.parametrize("clip", [None, 0.5], ids=["whole", "clipped"])
@pytest.mark.parametrize("strategy", IN_STEP)
def test_the_norm_is_that_of_the_union_where_workers_are_in_step(strategy, clip):
    class Clipped(Paced):
        clip_norm = clip

    work = Clipped(optimizer="momentum")
    result = trained(work, strategy, steps=ROUNDS)
    norms, rates = union_norms(work, 1 if strategy.endswith("of 1") else 2, clip)
    assert numbers(result, "lr") == pytest.approx(rates, rel=1e-12)
    assert numbers(result, "grad_norm") == pytest.approx(norms, rel=1e-3 if "fp16" in strategy else 1e-9)


@pytest.mark.parametrize(
    "strategy", [*(GIVEN.get(name, name) for name in sorted({*CATALOGUE, *FORMS} - {"statistics"}))]
)
def test_the_rate_is_that_of_the_schedule_under_every_strategy(strategy):
    federated = issubclass(CATALOGUE[strategy.partition(":")[0]], Federated)
    work = PacedFed(optimizer="sgd") if federated else Paced(optimizer="sgd")
    result = trained(work, strategy, steps=ROUNDS)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler, rates = work.schedule(optimizer), []
    for _ in range(result.history.num_rows):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert numbers(result, "lr") == pytest.approx(rates, rel=1e-12)
    knows = not strategy.startswith(NO_NORM)
    assert ("grad_norm" in result.history.column_names) is knows
    if knows:
        assert all(norm > 0 for norm in numbers(result, "grad_norm"))


@pytest.mark.parametrize(
    "strategy", [*IN_STEP, "all_reduce:backup=1 of 3", "local_sgd of 1", "hogwild of 1", "private"]
)
def test_the_norm_is_of_what_is_applied(strategy):
    """One step of plain SGD moves the parameters by the rate times the gradient, noise and compression included."""
    work = Small()
    torch.manual_seed(0)
    first = work.model()
    if strategy == "private":
        privacy = rayps.dp(noise_multiplier=1.0, clip=1.0, delta=1e-5)
        result = train(Public(), rayps.AllReduce(privacy=privacy), workers=2, steps=1)
    else:
        result = trained(work, strategy, steps=1)
    moved = (vector(result.model()) - vector(first)).norm().item()
    assert numbers(result, "grad_norm") == pytest.approx([moved / 0.1], rel=1e-9)


def test_rates_of_groups_that_differ():
    result = train(Small(optimizer="adamw_groups"), "all_reduce", workers=2, steps=2)
    assert numbers(result, "lr") == numbers(result, "lr_0") == [0.01] * 2 and numbers(result, "lr_1") == [0.03] * 2
    served = train(Small(optimizer="adamw_groups"), "parameter_server", workers=2, steps=2)
    assert numbers(served, "lr_1") == [0.03] * 2


class Public(Small):
    """Evaluates on other rows than those that are private."""

    def evaluation_data(self):
        return rayps.data.tensors(*rows(8, seed=1))


class Own(Small):
    """Reports metrics of the same names."""

    def loss(self, model, batch):
        return {"loss": super().loss(model, batch), "lr": 7.0, "grad_norm": 9.0}


def test_a_users_number_of_the_same_name_stays():
    result = train(Own(), "all_reduce", workers=2, steps=2)
    assert numbers(result, "lr") == [7.0] * 2 and numbers(result, "grad_norm") == [9.0] * 2


def test_a_share_that_is_missing_gives_no_norm():
    point = {"kind": "round", "round": 0, "epoch": 0, "loss": 1.0, "samples": 1, "lead": None, "rank": 0}
    rounds = Rounds(2, 0, "all_reduce")
    rounds.add([point | {"step": {"lr": 0.1, "grad_square": 4.0}}])
    (merged,) = rounds.flush()
    assert merged["lr"] == 0.1 and "grad_norm" not in merged
    whole = Rounds(2, 0, "all_reduce").add(
        [point | {"rank": rank, "step": {"lr": 0.1, "grad_square": 8.0}} for rank in range(2)]
    )
    assert whole[0]["grad_norm"] == 4.0


def test_a_model_of_several_workers_is_measured_once():
    whole = train(Small(n=48, batch=6), "all_reduce", workers=2, steps=3)
    cut = train(Small(n=48, batch=6), "pipeline:stages=2,micro_batches=3", workers=4, steps=3)
    assert numbers(cut, "grad_norm") == pytest.approx(numbers(whole, "grad_norm"), rel=1e-9)
    assert distance(cut.model(), whole.model()) < 1e-9


class ShardedSteps:
    """What one worker of `shard="parameters"` reports of each step, and the square by which its shards have moved."""

    def __init__(self, clip):
        self.clip = clip

    def __call__(self, rank, size, addresses, listener):
        work = Words(optimizer="sgd", clip_norm=self.clip)
        loop, peers = loop_on(rank, size, addresses, listener, work, 3)
        model, found = loop.w.model, []
        for _ in range(3):
            before = {name: model.local(name).clone() for name in model.ranges()}
            rounds(loop, 1)
            moved = sum(((model.local(name) - held) ** 2).sum().item() for name, held in before.items())
            found.append((loop.point()["step"], moved))
        loop.close()
        peers.close()
        return found


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("clip", [None, 0.05], ids=["whole", "clipped"])
def test_the_norm_of_divided_parameters(clip, size):
    for ranks in zip(*results(ShardedSteps(clip), size), strict=True):
        steps, moved = [step for step, _ in ranks], sum(square for _, square in ranks) ** 0.5
        rate = steps[0]["lr"]
        if clip is None:
            assert sum(step["grad_square"] for step in steps) ** 0.5 == pytest.approx(moved / rate, rel=1e-9)
        else:
            norm = steps[0]["grad_norm"]
            assert norm > clip and moved / rate == pytest.approx(clip, rel=1e-3)
            assert all(step["grad_norm"] == norm for step in steps)


class Planned(Small):
    """A rate that says how many steps are planned."""

    def schedule(self, optimizer):
        return lambda step: self.total_steps * (1.0 - step / self.total_steps)


PLANS = [  # strategy, options of train, fields of the workload, planned steps; 36 rows in batches of 3
    ("all_reduce", {"epochs": 3, "workers": 2}, {}, 18),
    ("all_reduce", {"epochs": 3, "workers": 2}, {"accumulate": 4}, 6),
    ("all_reduce", {"steps": 5, "workers": 3}, {}, 5),
    ("all_reduce", {"epochs": 2, "workers": (1, 2), "global_batch": 6}, {}, 12),
    ("all_reduce:backup=1", {"epochs": 2, "workers": 3}, {}, 12),
    ("parameter_server:staleness=2", {"epochs": 2, "workers": 2}, {}, 12),
    ([(1, "all_reduce"), (2, "local_sgd:period=2")], {"workers": 2}, {}, 18),
    ("pipeline:stages=2,micro_batches=3", {"epochs": 2, "workers": 4}, {}, 12),
]


@pytest.mark.parametrize(("strategy", "options", "fields", "planned"), PLANS)
def test_the_planned_steps_are_known_to_the_schedule(strategy, options, fields, planned):
    work = Planned()
    vars(work).update(fields)
    assert work.total_steps is None
    for _ in range(2):  # a workload is used again, with the plan of its own run
        rates = numbers(train(work, strategy, **options), "lr")
        assert rates == pytest.approx([0.1 * (planned - step) for step in range(planned)], rel=1e-12)
        assert len(rates) == planned


def test_a_users_own_number_of_steps_stays():
    class Fixed(Planned):
        total_steps: int = 50

    class Made(Planned):
        def __init__(self):
            super().__init__()
            self.total_steps = 50

    for work in (Fixed(), Made()):
        assert numbers(train(work, "all_reduce", workers=2, steps=2), "lr") == pytest.approx([5.0, 4.9])
        assert work.total_steps == 50


def test_rounds_of_clients_are_the_planned_steps_of_a_federated_job():
    class PlannedFed(Planned, Fed):
        pass

    rates = numbers(train(PlannedFed(), "fedavg", workers=2, epochs=3), "lr")
    assert rates == pytest.approx([0.3, 0.2, 0.1])

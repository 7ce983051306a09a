"""The laws: whatever the strategy, the result is that of one plain torch loop on the union of the batches."""

import covers
import pytest
import torch
from small_work import OPTIMIZERS, Small, distance, plain, rows, train
from torch import nn

import rayps
from rayps import AllReduce, Downpour, Hogwild, ParameterServer

EXACT = 1e-12
IN_STEP = [AllReduce(), ParameterServer(shards=1), ParameterServer(shards=2), ParameterServer(shards=5)]


def name_of(strategy):
    return f"{strategy.name}{getattr(strategy, 'shards', '') or ''}"


def losses(result):
    return result.history.column("loss").to_pylist()


@pytest.mark.parametrize("strategy", IN_STEP, ids=name_of)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_in_step_equals_one_process_on_the_union_batch(strategy, optimizer):
    work = Small(optimizer=optimizer)
    result = train(work, strategy, workers=3, epochs=3, seed=5)
    model, expected, _ = plain(work, 3, epochs=3, seed=5)
    assert distance(result.model(), model) < EXACT
    assert losses(result) == pytest.approx(expected, abs=EXACT)


@pytest.mark.parametrize("strategy", IN_STEP, ids=name_of)
@pytest.mark.parametrize(
    ("n", "batch", "workers"), [(37, 3, 4), (10, 4, 3), (5, 2, 4), (3, 8, 4), (1, 1, 3), (13, 50, 2)]
)
def test_ragged_data_is_weighted_by_samples(strategy, n, batch, workers):
    work = Small(n=n, batch=batch, optimizer="momentum")
    result = train(work, strategy, workers=workers, epochs=3)
    model, expected, _ = plain(work, workers, epochs=3)
    assert distance(result.model(), model) < EXACT
    assert losses(result) == pytest.approx(expected, abs=EXACT)
    assert sum(result.history.column("samples").to_pylist()) == 3 * n


@pytest.mark.parametrize(
    "strategy",
    [*IN_STEP, ParameterServer(shards=2, staleness=2), ParameterServer(staleness=None), Downpour(shards=2), Hogwild()],
    ids=str,
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_worker_is_plain_torch(strategy, optimizer):
    work = Small(n=20, optimizer=optimizer)
    result = train(work, strategy, workers=1, epochs=2)
    model, expected, _ = plain(work, epochs=2)
    assert distance(result.model(), model) < EXACT
    assert losses(result) == pytest.approx(expected, abs=EXACT)


@pytest.mark.parametrize("strategy", IN_STEP, ids=name_of)
def test_evaluations_after_every_epoch_are_those_of_that_moment(strategy):
    work = Small(jitter=0.002)
    result = train(work, strategy, workers=3, epochs=3)
    _, _, expected = plain(work, 3, epochs=3)
    rounds = [v for v in result.history.column("evaluation_loss").to_pylist() if v is not None]
    assert rounds == pytest.approx(expected, abs=EXACT)
    assert result.metrics["loss"] == pytest.approx(expected[-1], abs=EXACT)


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("shards", [1, 2])
def test_staleness_never_exceeds_its_bound(staleness, shards):
    work = Small(n=240, batch=2, jitter=0.004)
    result = train(work, ParameterServer(shards=shards, staleness=staleness), workers=4, epochs=1)
    leads = result.history.column("staleness").to_pylist()
    assert len(leads) == 30
    assert max(leads) <= staleness
    if staleness:
        assert max(leads) > 0  # the histogram is in rounds and was really measured


def test_asynchronous_leads_can_exceed_any_bound_but_all_rounds_are_made():
    work = Small(n=240, batch=2, jitter=0.004)
    result = train(work, ParameterServer(shards=2, staleness=None), workers=4, epochs=2)
    assert result.history.num_rows == 60
    assert sum(result.history.column("samples").to_pylist()) == 480


@pytest.mark.parametrize("loose", [ParameterServer(staleness=2), ParameterServer(shards=2, staleness=None)], ids=str)
def test_loose_strategies_follow_the_law_from_afar(loose):
    work = Small(n=96, batch=4)
    result = train(work, loose, workers=3, epochs=6)
    rounds = [v for v in result.history.column("evaluation_loss").to_pylist() if v is not None]
    assert result.metrics["loss"] == rounds[-1]
    assert rounds == pytest.approx(plain(work, 3, epochs=6)[2], rel=0.25)


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize("first", [ParameterServer(), ParameterServer(shards=3)], ids=name_of)
def test_a_change_of_strategy_changes_nothing_in_step(optimizer, first):
    work = Small(optimizer=optimizer)
    changed = train(work, [(1, first), AllReduce()], workers=2, epochs=3)
    back = train(work, [(1, AllReduce()), (1, first), AllReduce()], workers=2, epochs=3)
    model, expected, _ = plain(work, 2, epochs=3)
    for result in (changed, back):
        assert distance(result.model(), model) < EXACT
        assert losses(result) == pytest.approx(expected, abs=EXACT)
    names = changed.history.column("strategy").to_pylist()
    assert names == ["parameter_server"] * 6 + ["all_reduce"] * 12


def test_asynchronous_first_then_in_step():
    work = Small(n=48, jitter=0.002)
    result = train(work, [(2, ParameterServer(shards=2, staleness=None)), (1, AllReduce())], workers=3)
    assert result.history.column("round").to_pylist() == list(range(18))
    assert result.snapshot.positions == [18, 18, 18]


CHECKPOINTED = [AllReduce(), ParameterServer(), ParameterServer(shards=3)]


@covers.by(
    lambda strategy, optimizer, at: (type(strategy), optimizer),
    lambda strategy, optimizer, at: (optimizer, at),
    lambda strategy, optimizer, at: strategy,
)
@pytest.mark.parametrize("strategy", CHECKPOINTED, ids=name_of)
@pytest.mark.parametrize(
    ("optimizer", "at"), [("momentum", 6), ("adam", 12), ("adamw_groups", 4), ("momentum", 9), ("adam", 9)]
)
def test_a_resumed_run_is_the_unbroken_one(tmp_path, strategy, optimizer, at):
    work = Small(optimizer=optimizer)  # 6 rounds an epoch with two workers
    whole = train(work, strategy, workers=2, steps=18)
    train(work, strategy, workers=2, steps=at, checkpoint=tmp_path)
    resumed = train(work, strategy, workers=2, steps=18, checkpoint=tmp_path, resume=True)
    assert distance(resumed.model(), whole.model()) < EXACT
    assert losses(resumed) == pytest.approx(losses(whole)[at:], abs=EXACT)
    assert resumed.history.column("round").to_pylist() == list(range(at, 18))


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_a_checkpoint_is_of_no_strategy_and_of_no_number_of_shards(tmp_path, optimizer):
    work = Small(optimizer=optimizer)
    whole, expected, _ = plain(work, 2, steps=20)
    order = [ParameterServer(shards=2), ParameterServer(shards=5), AllReduce(), ParameterServer(shards=1)]
    for i, strategy in enumerate(order):
        result = train(work, strategy, workers=2, steps=5 * (i + 1), checkpoint=tmp_path, resume=i > 0)
        assert losses(result) == pytest.approx(expected[5 * i : 5 * i + 5], abs=EXACT)
    assert distance(result.model(), whole) < EXACT


def test_resume_with_other_workers_from_an_epochs_end_only(tmp_path):
    work = Small()
    train(work, workers=2, epochs=1, checkpoint=tmp_path / "end")
    result = train(work, workers=3, epochs=2, checkpoint=tmp_path / "end", resume=True)
    assert result.history.column("round").to_pylist() == [4, 5, 6, 7]  # 4 rounds an epoch with three workers
    train(work, workers=2, steps=3, checkpoint=tmp_path / "middle")
    with pytest.raises(rayps.RaypsError, match="middle of an epoch"):
        train(work, workers=3, epochs=2, checkpoint=tmp_path / "middle", resume=True)


class Shows(Small):
    """Learns nothing, so that its result is its beginning."""

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.0)


def test_the_seed_alone_decides_the_beginning():
    torch.manual_seed(3)
    expected = Shows().model()
    found = [
        train(Shows(n=8), strategy, workers=workers, steps=1, seed=3).model()
        for strategy in [
            *IN_STEP,
            ParameterServer(staleness=1),
            ParameterServer(staleness=None),
            Downpour(n_push=2),
            Hogwild(),
        ]
        for workers in (1, 2, 4)
    ]
    assert all(distance(model, expected) == 0 for model in found)
    assert distance(train(Shows(n=8), workers=2, steps=1, seed=4).model(), expected) > 0


class Normed(Small):
    """The norm comes first, so that its statistics depend on the batches alone."""

    def model(self):
        return nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 1)).double()


@pytest.mark.parametrize("strategy", [*IN_STEP, ParameterServer(staleness=1)], ids=name_of)
def test_buffers_are_those_of_rank_0(strategy):
    work = Normed(n=48, batch=4)
    result = train(work, strategy, workers=3, epochs=2)
    law = nn.BatchNorm1d(5).double()
    for epoch in range(2):
        for batch in work.data().batches(rank=0, size=3, seed=0, epoch=epoch):
            law(batch.x)
    mine = result.model()[0]
    assert mine.num_batches_tracked == law.num_batches_tracked == 8
    assert torch.allclose(mine.running_mean, law.running_mean, atol=EXACT, rtol=0)
    assert torch.allclose(mine.running_var, law.running_var, atol=EXACT, rtol=0)


@pytest.mark.parametrize("strategy", CHECKPOINTED, ids=name_of)
def test_buffers_survive_a_resume(tmp_path, strategy):
    work = Normed(n=48, batch=4)
    whole = train(work, strategy, workers=1, steps=20)
    train(work, strategy, workers=1, steps=7, checkpoint=tmp_path)
    resumed = train(work, strategy, workers=1, steps=20, checkpoint=tmp_path, resume=True)
    assert distance(resumed.model(), whole.model()) < EXACT
    assert torch.allclose(resumed.model()[0].running_var, whole.model()[0].running_var, atol=EXACT, rtol=0)


class Frozen(Small):
    """The first layer is random and does not learn."""

    def model(self):
        model = super().model()
        model[0].weight.requires_grad_(False)
        return model


@pytest.mark.parametrize(
    "strategy", [*IN_STEP, ParameterServer(staleness=None), Downpour(n_push=3, n_fetch=3)], ids=str
)
def test_frozen_parameters_are_the_same_everywhere_and_stay(strategy):
    workers = 3 if strategy.topology.in_step else 1
    result = train(Frozen(), strategy, workers=workers, epochs=2, seed=9)
    model, expected, evaluations = plain(Frozen(), workers, epochs=2, seed=9)
    assert losses(result) == pytest.approx(expected, abs=EXACT)
    assert result.metrics["loss"] == pytest.approx(evaluations[-1], abs=EXACT)
    assert distance(result.model(), model) < EXACT


def test_frozen_parameters_survive_a_resume(tmp_path):
    whole = train(Frozen(), workers=2, steps=9)
    train(Frozen(), workers=2, steps=4, checkpoint=tmp_path)
    resumed = train(Frozen(), workers=2, steps=9, checkpoint=tmp_path, resume=True)
    assert distance(resumed.model(), whole.model()) < EXACT


class Tied(Small):
    """Two layers share one weight."""

    def model(self):
        model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 1)).double()
        model[2].weight = model[0].weight
        return model


@pytest.mark.parametrize("strategy", IN_STEP, ids=name_of)
def test_tied_weights_stay_tied(strategy):
    result = train(Tied(optimizer="adam"), strategy, workers=2, epochs=2)
    model, expected, _ = plain(Tied(optimizer="adam"), 2, epochs=2)
    assert losses(result) == pytest.approx(expected, abs=EXACT)
    assert distance(result.model(), model) < EXACT
    assert result.model()[2].weight is result.model()[0].weight or torch.equal(
        result.model()[2].weight, result.model()[0].weight
    )


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(5, 1)
        self.scale, self.shift = nn.Parameter(torch.tensor(0.3)), nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.line(x) * self.scale + self.shift


class WithNumber(Small):
    """One parameter is a number without a dimension."""

    def model(self):
        return Scaled().double()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_parameter_may_be_a_number(tmp_path, optimizer):
    work = WithNumber(optimizer=optimizer)
    law, expected, _ = plain(work, 2, steps=20)
    order = [ParameterServer(shards=3), AllReduce(), ParameterServer(shards=8), ParameterServer(shards=1)]
    for i, strategy in enumerate(order):
        result = train(work, strategy, workers=2, steps=5 * (i + 1), checkpoint=tmp_path, resume=i > 0)
        assert losses(result) == pytest.approx(expected[5 * i : 5 * i + 5], abs=EXACT)
    assert distance(result.model(), law) < EXACT


class Unused(Small):
    """One layer takes no part in the loss, so its gradient is never made."""

    def model(self):
        model = super().model()
        model.spare = nn.Linear(2, 2).double()
        model.forward = lambda x: model[2](model[1](model[0](x)))
        return model


@pytest.mark.parametrize("strategy", IN_STEP, ids=name_of)
def test_a_parameter_without_gradient_counts_as_zero(strategy):
    result = train(Unused(), strategy, workers=2, epochs=1)
    torch.manual_seed(0)
    start = Unused().model()
    assert torch.equal(result.snapshot.state_dict()["spare.weight"], start.spare.weight)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "strategy",
    [
        AllReduce(),
        ParameterServer(shards=2),
        ParameterServer(shards=2, replicas=0),
        ParameterServer(shards=2, replicas=1),
    ],
    ids=name_of,
)
def test_half_precision_pushes_are_added_in_float32_and_rounded_once(strategy, dtype):
    """Added in the dtype one after another, the small gradients are lost beside the large one."""
    small = 0.8 if dtype == torch.bfloat16 else 0.1
    x = torch.tensor([256.0, small, small, small]).to(dtype)[:, None]

    class Narrow(rayps.Workload):
        def model(self):
            model = nn.Linear(1, 3, bias=False).to(dtype)
            nn.init.zeros_(model.weight)
            return model

        def data(self):
            return rayps.data.tensors(x, torch.zeros(4), batch_size=1, shuffle=False)

        def loss(self, model, batch):
            return model(batch.x).sum()

        def optimizer(self, params):
            return torch.optim.SGD(params, lr=1.0)

    law, one_by_one = (x.float().sum() / 4).to(dtype), x[0, 0] * 0
    for each in x[:, 0]:
        one_by_one = one_by_one + each * 0.25
    assert law != one_by_one, "the test shows nothing"
    result = train(Narrow(), strategy, workers=4, steps=1)
    assert result.snapshot.params.tolist() == [-law.item()] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("strategy", [AllReduce(), ParameterServer(shards=2)], ids=name_of)
def test_other_precisions_train(strategy, dtype):
    class Narrow(Small):
        def model(self):
            return super().model().to(dtype)

        def data(self):
            x, y = rows(self.n)
            return rayps.data.tensors(x.to(dtype), y.to(dtype), batch_size=self.batch)

    result = train(Narrow(), strategy, workers=2, epochs=3)
    assert result.snapshot.params.dtype == dtype
    assert losses(result)[-1] < losses(result)[0]

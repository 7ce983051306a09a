import pytest
import torch
from rayps_client.errors import CheckpointError
from torch import nn

from rayps.core.job.repeated_pushes import Ledger
from rayps.core.rows.phase_rounds import Calendar
from rayps.core.strategy.strategy import Phase
from rayps.strategies.all_reduce import AllReduce
from rayps.tensors import optim
from rayps.tensors.checkpoints import checkpoint
from rayps.tensors.flat import FlatModel, find_outside_vector
from rayps.tensors.loss_scale import KEY, LossScale, count_skipped
from rayps.tensors.snapshot import Snapshot


def made(steps=3, positions=(6, 6)):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[2].bias.requires_grad_(False)
    flat = FlatModel(model)
    optimizer = torch.optim.Adam(flat.parameters, lr=0.1)
    for _ in range(steps):
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
    buffers = {name: value.clone() for name, value in find_outside_vector(model).items()}
    return model, Snapshot(
        flat.layout,
        flat.vector.clone(),
        optim.copy_moments(optimizer, flat.layout, flat.parameters),
        buffers,
        {0: torch.get_rng_state(), 1: torch.get_rng_state()},
        list(positions),
        3,
    )


def test_it_survives_the_disk_with_every_bit(tmp_path):
    _, snapshot = made()
    path = checkpoint.save(tmp_path, 6, snapshot.to_state(strategy="all_reduce"))
    back = Snapshot.from_state(checkpoint.load(path))
    assert back.layout == snapshot.layout
    assert torch.equal(back.params, snapshot.params)
    assert back.positions == [6, 6]
    assert back.steps_per_epoch == 3
    assert back.buffers.keys() == snapshot.buffers.keys()
    assert all(torch.equal(back.buffers[k], v) for k, v in snapshot.buffers.items())
    assert all(torch.equal(back.rng[k], v) for k, v in snapshot.rng.items())
    assert back.moments.keys() == snapshot.moments.keys()
    for name, state in snapshot.moments.items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(back.moments[name][key]), torch.as_tensor(value))


def test_numbers_in_the_optimizers_state_survive(tmp_path):
    _, snapshot = made()
    more = {"count": 7, "rate": 0.25, "buffer": None}
    snapshot.moments["0.bias"] |= more
    back = Snapshot.from_state(checkpoint.load(checkpoint.save(tmp_path, 6, snapshot.to_state())))
    assert {key: back.moments["0.bias"][key] for key in more} == more


def test_it_fills_a_model_of_the_same_kind():
    model, snapshot = made()
    other = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    snapshot.fill(other)
    for (name, a), b in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    snapshot.state_dict()["0.weight"].zero_()
    assert snapshot.params.abs().min() > 0  # a copy


@pytest.mark.parametrize(
    ("other", "words"),
    [(nn.Sequential(nn.Linear(3, 5)), ["0.bias", "(4,)", "(5,)"]), (nn.Linear(3, 4), ["0.bias", "None"])],
)
def test_another_model_is_refused(other, words):
    _, snapshot = made()
    with pytest.raises(CheckpointError) as caught:
        snapshot.check(FlatModel(other).layout)
    for word in ["another model", *words]:
        assert word in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 3


def run(workers, steps):
    """Five epochs of so many rounds."""
    return Calendar([Phase(None, AllReduce())], [steps], workers, epochs=5, rounds=None)


def test_another_number_of_workers_only_between_epochs():
    _, snapshot = made(positions=(6, 6))
    snapshot.resume(run(3, 2))
    assert (snapshot.positions, snapshot.steps_per_epoch, snapshot.rng) == ([4, 4, 4], 2, {})
    for positions in ((5, 5), (6, 9), (6, 7)):
        _, snapshot = made(positions=positions)
        snapshot.resume(run(2, 3))  # the same: nothing to do
        assert snapshot.positions == list(positions)
        with pytest.raises(CheckpointError, match="2 workers"):
            snapshot.resume(run(3, 2))


def test_its_round_is_the_slowest_ones():
    assert made(positions=(7, 5))[1].round == 5
    assert made(positions=())[1].round == 0


def test_it_remembers_which_pushes_each_range_holds(tmp_path):
    _, snapshot = made(positions=(6, 6))
    half = snapshot.layout.size // 2
    ahead, behind = Ledger([7, 6], {0: [9]}), Ledger([6, 6], {1: [8]})
    snapshot.ledgers = [(0, half, ahead), (half, snapshot.layout.size, behind)]
    checkpoint.save(tmp_path, 6, snapshot.to_state())
    back = Snapshot.from_state(checkpoint.load(checkpoint.newest(tmp_path)))
    assert back.ledger(0, half) == ahead and back.ledger(half, snapshot.layout.size) == behind
    both = back.ledger(0, snapshot.layout.size)  # by one shard now: nothing may be added twice to any part
    assert both == Ledger([7, 6], {0: [9], 1: [8]})
    back.align()
    assert back.ledger(0, half) == Ledger([6, 6])
    assert made(positions=(3, 5))[1].ledger(0, 1) == Ledger([3, 5])


def scaled(skipped):
    scale = LossScale()
    for _ in range(skipped):
        scale.update(True)
    return {KEY: scale.state()}


def test_it_has_the_number_of_rounds_that_are_no_step_of_a_schedule():
    """In fp16, what the servers have counted, or without servers the count of worker 0."""
    _, snapshot = made(positions=(8, 6))
    size = snapshot.layout.size
    assert (snapshot.skipped, snapshot.ledger(0, size).skipped) == (0, None)
    snapshot.shared = scaled(4)
    assert (snapshot.skipped, snapshot.ledger(0, size).skipped) == (4, {0: 4, 1: 4})
    snapshot.ledgers = [(0, 9, Ledger([8, 6])), (9, size, Ledger([8, 6]))]  # servers without a schedule
    assert (snapshot.skipped, snapshot.ledger(0, size).skipped) == (4, {0: 4, 1: 4})
    snapshot.ledgers = [(0, 9, Ledger([8, 6], skipped={0: 3, 1: 1})), (9, size, Ledger([8, 7], skipped={0: 3, 1: 2}))]
    assert (snapshot.skipped, snapshot.ledger(0, 9).skipped) == (2, {0: 3, 1: 1})


@pytest.mark.parametrize("without", ["align", "workers", "strategy", "rounds"])
def test_what_servers_have_counted_is_used_without_servers_too(without):
    _, snapshot = made(positions=(6, 6))
    snapshot.strategy, before = "parameter_server", scaled(4)
    snapshot.shared = dict(before)
    snapshot.ledgers = [(0, snapshot.layout.size, Ledger([6, 6], skipped={0: 1, 1: 1}))]
    match without:
        case "align":
            snapshot.align()
        case "workers":
            snapshot.enter_phase(run(3, 3).spans[0])
        case "strategy":
            snapshot.enter_strategy("all_reduce", 2)
        case "rounds":
            snapshot.resume(run(2, 2))
    assert snapshot.skipped == count_skipped(snapshot.shared) == 1
    assert set(snapshot.ledger(0, 1).skipped.values()) == {1}
    assert snapshot.shared[KEY].tolist()[:2] == before[KEY].tolist()[:2]  # the scale itself does not change
    assert count_skipped(before) == 4

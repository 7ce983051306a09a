import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rayps_client.errors import WorkloadError
from torch import nn

from rayps.tensors.flat import FlatModel, Gradient, Layout, find_outside_vector


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def test_parameters_and_gradients_are_views_of_two_vectors():
    model = net()
    before = [p.detach().clone() for p in model.parameters()]
    flat = FlatModel(model)
    assert flat.layout.size == flat.vector.numel() == sum(p.numel() for p in before)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    flat.vector.fill_(7.0)
    assert all((p == 7).all() for p in model.parameters())
    model(torch.ones(5, 3)).sum().backward()
    assert torch.equal(flat.packed[:-1], torch.cat([p.grad.reshape(-1) for p in model.parameters()]))
    assert flat.packed[-1] == 0


def test_gradients_are_found_again_after_they_were_replaced_or_dropped():
    model = net()
    flat = FlatModel(model)
    first, second, *_ = flat.parameters
    first.grad = torch.full_like(first, 3.0)
    second.grad = None
    vector = flat.collect_grad()
    assert (vector[:12] == 3).all()
    assert (vector[12:16] == 0).all()
    first.grad.fill_(5.0)
    assert (flat.packed[:12] == 5).all()
    flat.zero_grad()
    assert flat.packed.abs().sum() == 0
    assert first.grad.abs().sum() == 0


def test_a_given_vector_becomes_the_gradient():
    flat = FlatModel(net())
    flat.load_grad(torch.arange(flat.layout.size, dtype=torch.float32))
    assert torch.equal(torch.cat([p.grad.reshape(-1) for p in flat.parameters]), torch.arange(float(flat.layout.size)))
    flat.load_grad(Gradient(flat.packed, 1).vector)  # its own: nothing to do
    assert flat.packed[1] == 1


def test_the_layout_is_in_the_models_order_and_plain_data():
    layout = FlatModel(net()).layout
    assert [e.name for e in layout.entries] == ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"]
    assert [(e.lo, e.hi) for e in layout.entries] == [(0, 12), (12, 16), (16, 20), (20, 24), (24, 32), (32, 34)]
    assert layout.entries[0].shape == (4, 3)
    assert layout == Layout.of(net().named_parameters())
    hash(layout)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.data())
def test_pieces_cover_a_range_exactly(sizes, data):
    layout = Layout.of((f"p{i}", torch.empty(n)) for i, n in enumerate(sizes))
    lo = data.draw(st.integers(0, layout.size))
    hi = data.draw(st.integers(lo, layout.size))
    pieces = layout.pieces(lo, hi)
    covered = [i for piece in pieces for i in range(piece.lo, piece.hi)]
    assert covered == list(range(lo, hi))
    for piece in pieces:
        whole = next(e for e in layout.entries if e.name == piece.name)
        assert whole.lo <= piece.lo < piece.hi <= whole.hi
        assert piece.shape == (piece.hi - piece.lo,)


def test_frozen_parameters_stand_beside_the_vector():
    model = net()
    model[0].weight.requires_grad_(False)
    flat = FlatModel(model)
    assert "0.weight" not in [e.name for e in flat.layout.entries]
    assert set(find_outside_vector(model)) == {"0.weight", "1.running_mean", "1.running_var", "1.num_batches_tracked"}


def test_tied_parameters_stand_once():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    flat = FlatModel(model)
    assert flat.layout.size == 9 + 3 + 3
    flat.vector[0] = 42.0
    assert model[1].weight[0, 0] == 42


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Tanh(), ["no parameter", "gradient"]),
        (nn.Linear(2, 2).requires_grad_(False), ["no parameter", "gradient"]),
        (
            nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()),
            ["float32 (0.weight)", "float64 (1.weight)", "float()"],
        ),
    ],
)
def test_models_that_cannot_be_one_vector(model, words):
    with pytest.raises(WorkloadError) as caught:
        FlatModel(model)
    for word in words:
        assert word in str(caught.value)


def test_a_channels_last_parameter_keeps_its_values():
    model = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    before = model.weight.detach().clone()
    flat = FlatModel(model)
    assert torch.equal(model.weight, before)
    model(torch.ones(1, 3, 4, 4)).sum().backward()
    grad = model.weight.grad.clone()
    assert torch.equal(flat.collect_grad()[:48].view(4, 3, 2, 2), grad)

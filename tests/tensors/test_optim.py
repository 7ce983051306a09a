import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rayps_client.errors import WorkloadError
from small_work import OPTIMIZERS
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop

from rayps.tensors import optim
from rayps.tensors.flat import Layout

SHAPES = {"a.weight": (4, 3), "a.bias": (4,), "scale": (), "b.weight": (2, 2, 2), "b.bias": (1,)}
LAYOUT = Layout.of((name, torch.empty(shape, dtype=torch.float64)) for name, shape in SHAPES.items())
EVERY = OPTIMIZERS | {
    "adagrad": lambda p: Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
    "rmsprop": lambda p: RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "amsgrad": lambda p: Adam(p, lr=0.01, amsgrad=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
}


def numbers(seed, n=LAYOUT.size):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def whole(factory, steps, start=0, moments=None, params=None):
    vector = numbers(0) if params is None else params.clone()
    leaves = [nn.Parameter(vector[e.lo : e.hi].view(e.shape)) for e in LAYOUT.entries]
    optimizer = factory(leaves)
    if moments:
        optim.load(optimizer, moments, LAYOUT, leaves)
    for step in range(start, steps):
        grad = numbers(step + 1)
        for leaf, e in zip(leaves, LAYOUT.entries, strict=True):
            leaf.grad = grad[e.lo : e.hi].view(e.shape)
        optimizer.step()
    return vector, optim.copy_moments(optimizer, LAYOUT, leaves)


def sliced(factory, cuts, steps, start=0, moments=None, params=None):
    vector = numbers(0) if params is None else params
    parts, states = [], []
    for lo, hi in zip([0, *cuts], [*cuts, LAYOUT.size], strict=True):
        one = optim.SlicedOptimizer(factory, LAYOUT, vector[lo:hi].clone(), lo, hi)
        if moments:
            one.load(moments, LAYOUT)
        for step in range(start, steps):
            one.step(numbers(step + 1)[lo:hi])
        parts.append(one.params)
        states.append(one.moments())
    return torch.cat(parts), optim.join(states, LAYOUT)


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].keys() == b[name].keys()
        for key, value in a[name].items():
            other = b[name][key]
            assert torch.as_tensor(value).shape == torch.as_tensor(other).shape, (name, key)
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other)), (name, key)


@pytest.mark.parametrize("name", EVERY)
@settings(max_examples=15, deadline=None)
@given(cuts=st.lists(st.integers(0, LAYOUT.size), max_size=5).map(sorted))
def test_slices_make_the_steps_of_the_whole(name, cuts):
    params, moments = whole(EVERY[name], 4)
    others, joined = sliced(EVERY[name], cuts, 4)
    assert torch.equal(params, others)
    same({k: v for k, v in moments.items() if v}, joined)


@pytest.mark.parametrize("name", EVERY)
def test_a_state_moves_between_whole_and_slices_and_other_slices(name):
    factory = EVERY[name]
    law, state = whole(factory, 9)
    params, moments = whole(factory, 3)
    params, moments = sliced(factory, [5, 13], 6, 3, moments, params)
    params, moments = sliced(factory, [1, 12, 17, 20], 8, 6, moments, params)
    params, moments = whole(factory, 9, 8, moments, params)
    assert torch.equal(params, law)
    same(state, moments)


def test_parameter_groups_survive_the_slicing():
    def factory(params):
        return AdamW(
            [
                {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.3, "lr": 0.5},
                {"params": [p for p in params if p.dim() <= 1], "betas": (0.5, 0.6)},
            ],
            lr=0.1,
            weight_decay=0.0,
        )

    for lo, hi, sizes in [(0, 6, [1, 0]), (10, 18, [2, 1]), (0, LAYOUT.size, [2, 2])]:  # neighbours are one leaf
        groups = optim.SlicedOptimizer(factory, LAYOUT, numbers(0)[lo:hi].clone(), lo, hi).optimizer.param_groups
        assert [len(g["params"]) for g in groups] == sizes
        options = [(g["weight_decay"], g["lr"], g["betas"]) for g in groups]
        assert options == [(0.3, 0.5, (0.9, 0.999)), (0, 0.1, (0.5, 0.6))]
    assert torch.equal(whole(factory, 5)[0], sliced(factory, [2, 9, 16], 5)[0])


def test_moments_are_copies():
    one = optim.SlicedOptimizer(OPTIMIZERS["adam"], LAYOUT, numbers(0), 0, LAYOUT.size)
    one.step(numbers(1))
    kept = one.moments()
    before = kept["a.weight"]["exp_avg"].clone()
    one.step(numbers(2))
    assert torch.equal(kept["a.weight"]["exp_avg"], before)


@pytest.mark.parametrize("options", [{}, {"capturable": True}, {"fused": True}], ids=str)
def test_a_loaded_state_is_on_the_devices_that_torch_loads_it_to(options):
    """With the meta device for a GPU: the count of steps stays on the CPU unless the optimizer needs it there."""

    def made(device):
        model = nn.Module()
        model.matrix = nn.Parameter(torch.ones(2, 3, device=device))
        model.number = nn.Parameter(torch.ones((), device=device))
        return model, AdamW(model.parameters(), lr=0.1, **({} if device == "cpu" else options))

    (one, before), (other, after), (_, law) = made("cpu"), made("meta"), made("meta")
    for p in one.parameters():
        p.grad = torch.ones_like(p)
    before.step()
    layout = Layout.of(one.named_parameters())
    optim.load(after, optim.copy_moments(before, layout, list(one.parameters())), layout, list(other.parameters()))
    state = before.state_dict()
    law.load_state_dict({"state": state["state"], "param_groups": law.state_dict()["param_groups"]})
    found, expected = ([{k: v.device for k, v in each.items()} for each in o.state.values()] for o in (after, law))
    assert found == expected and len(found) == 2


def test_an_empty_slice_is_a_slice():
    one = optim.SlicedOptimizer(OPTIMIZERS["adam"], LAYOUT, numbers(0)[5:5].clone(), 5, 5)
    one.step(torch.empty(0, dtype=torch.float64))
    assert one.moments() == {}


def test_building_takes_no_memory():
    big = Layout.of([("huge", torch.empty(1, dtype=torch.float32).expand(10**7, 10**4))])
    assert len(optim.build(lambda p: SGD(p, lr=0.1), big).param_groups) == 1


def normed(params):
    class Normed(SGD):
        """Its step depends on the norm of a whole parameter, as LARS' does."""

        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad = p.grad / p.grad.norm()
            super().step()

    return Normed(params, lr=0.1)


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (normed, ["Normed", "not elementwise", "SGD, Adam", "all_reduce"]),
        (lambda p: torch.optim.Adafactor(p), ["Adafactor", "not elementwise", "all_reduce"]),
        (lambda p: torch.optim.LBFGS(p), ["LBFGS", "all_reduce"]),
        (lambda p: torch.optim.SparseAdam(p), ["SparseAdam", "all_reduce"]),
        (lambda p: 1 / 0, ["optimizer() raised ZeroDivisionError", "test_optim.py:"]),
        (lambda p: None, ["returned NoneType"]),
        (lambda p: SGD([nn.Parameter(torch.ones(1))], lr=1), ["other parameters", "params"]),
    ],
)
def test_what_a_server_cannot_run(factory, words):
    with pytest.raises(WorkloadError) as caught:
        optim.check_elementwise(factory, LAYOUT)
    for word in words:
        assert word in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 3


@pytest.mark.parametrize("name", EVERY)
def test_what_a_server_can_run(name):
    optim.check_elementwise(EVERY[name], LAYOUT)


@pytest.mark.parametrize(
    ("name", "ignores"),
    [("sgd", False), ("momentum", False), ("adam", True), ("adamw_groups", True), ("nadam", True), ("asgd", False)],
)
def test_who_ignores_the_scale(name, ignores):
    assert optim.ignores_scale(EVERY[name], LAYOUT) is ignores


SWIFT = EVERY | {
    "plain": lambda p: SGD(p, lr=0.1),
    "maximize": lambda p: SGD(p, lr=0.1, maximize=True),
    "decay": lambda p: SGD(p, lr=0.1, weight_decay=0.1),
    "nesterov": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "tensor_lr": lambda p: SGD(p, lr=torch.tensor(0.1)),
    "foreach": lambda p: SGD(p, lr=0.1, foreach=True),
    "two_groups": lambda p: SGD([{"params": p[:2], "lr": 0.3}, {"params": p[2:], "momentum": 0.5}], lr=0.1),
    "crossed_groups": lambda p: SGD([{"params": p[::2], "lr": 0.3}, {"params": p[1::2][::-1]}], lr=0.1),
    "adamw": lambda p: AdamW(p, lr=0.1, weight_decay=0.2),
}


@pytest.mark.parametrize("name", SWIFT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_swift_steps_are_torchs_own_bit_for_bit(name, dtype):
    """The slow twin is the user's optimizer over whole parameters, leaf by leaf, by its own step."""
    layout = Layout.of((name, torch.empty(shape, dtype=dtype)) for name, shape in SHAPES.items())
    vector = numbers(0).to(dtype)
    leaves = [nn.Parameter(vector[e.lo : e.hi].view(e.shape)) for e in layout.entries]
    slow = SWIFT[name](leaves)
    swift = optim.SlicedOptimizer(SWIFT[name], layout, vector.clone(), 0, layout.size)
    for step in range(6):
        grad = numbers(step + 1).to(dtype)
        for leaf, e in zip(leaves, layout.entries, strict=True):
            leaf.grad = grad[e.lo : e.hi].view(e.shape).clone()
        slow.step()
        kept = grad.clone()
        swift.step(grad)
        assert torch.equal(vector, swift.params)
        assert torch.equal(grad, kept)  # it may be a worker's own memory
        if step == 2:
            for group in [*slow.param_groups, *swift.optimizer.param_groups]:
                group["lr"] = group["lr"] * 0.5
    found = optim.join([swift.moments()], layout)
    halved = [[key, first, now] for key, first, now in found["a.bias"].pop(optim.EDITS) if key == "lr"]
    assert halved and all(now == first * 0.5 for _, first, now in halved)
    found = {name: {k: v for k, v in state.items() if k != optim.EDITS} for name, state in found.items()}
    same(
        {k: v for k, v in optim.copy_moments(slow, layout, leaves).items() if v}, {k: v for k, v in found.items() if v}
    )


def test_neighbours_are_one_leaf_and_plain_sgd_calls_no_optimizer(monkeypatch):
    swift = optim.SlicedOptimizer(lambda p: SGD(p, lr=0.1), LAYOUT, numbers(0), 0, LAYOUT.size)
    assert [cut for _, cut in swift.leaves()] == [slice(0, LAYOUT.size)]
    monkeypatch.setattr(swift.optimizer, "step", lambda: pytest.fail("the optimizer's own step was called"))
    swift.step(numbers(1))


@pytest.mark.parametrize("change", ["lr", "momentum", "weight_decay"])
def test_what_changes_a_group_later_is_honoured(change):
    swift = optim.SlicedOptimizer(lambda p: SGD(p, lr=0.1), LAYOUT, numbers(0), 0, LAYOUT.size)
    law = nn.Parameter(numbers(0))
    slow = SGD([law], lr=0.1)
    for step in range(5):
        if step == 2:
            for optimizer in (slow, swift.optimizer):
                optimizer.param_groups[0][change] = 0.25
        law.grad = numbers(step + 1)
        slow.step()
        swift.step(numbers(step + 1))
        assert torch.equal(law.detach(), swift.params)


class Own(SGD):
    """Its step is its own, whatever its class is called."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad, alpha=8.0)


def test_an_optimizer_of_the_users_keeps_its_own_step_and_its_own_leaves():
    own = optim.SlicedOptimizer(lambda p: Own(p, lr=0.1), LAYOUT, numbers(0), 0, LAYOUT.size)
    own.step(numbers(1))
    assert torch.equal(own.params, numbers(0) - 8 * numbers(1))
    assert len(own.leaves()) == len(SHAPES)


def test_hooks_of_the_users_are_called():
    seen = []

    def factory(params):
        optimizer = SGD(params, lr=0.1)
        optimizer.register_step_pre_hook(lambda *_: seen.append(1))
        return optimizer

    swift = optim.SlicedOptimizer(factory, LAYOUT, numbers(0), 0, LAYOUT.size)
    swift.step(numbers(1))
    assert seen == [1]


def test_states_that_differ_keep_their_leaves_apart():
    """A parameter that missed some steps (unused under all_reduce) goes on from its own count."""
    _, moments = whole(OPTIMIZERS["adam"], 3)
    moments["scale"]["step"] = torch.tensor(1.0)
    one = optim.SlicedOptimizer(OPTIMIZERS["adam"], LAYOUT, numbers(0), 0, LAYOUT.size)
    one.load(moments, LAYOUT)
    assert [cut for _, cut in one.leaves()] == [slice(0, 16), slice(16, 17), slice(17, LAYOUT.size)]
    one.step(numbers(1))
    assert one.moments()["scale"]["step"].item() == 2
    assert one.moments()["a.bias"]["step"].item() == 4


@pytest.mark.parametrize("name", ["plain", "momentum", "adam"])
@pytest.mark.parametrize("scale", [0.25, 1 / 3])
def test_a_scaled_step_is_the_step_of_the_scaled_gradient_and_decay(name, scale):
    one, law = (optim.SlicedOptimizer(SWIFT[name], LAYOUT, numbers(0), 0, LAYOUT.size) for _ in range(2))
    for step in range(4):
        grad = numbers(step + 1)
        one.step(grad, scale)
        law.step(grad * scale, decays=scale)
        assert torch.equal(grad, numbers(step + 1))
        assert torch.allclose(one.params, law.params, atol=1e-15, rtol=1e-14)


@pytest.mark.parametrize("weights", [[1.0], [3.0, 1.0], [1.0, 0.0, 2.5]])
def test_a_step_by_the_mean(weights, monkeypatch):
    monkeypatch.setattr(optim, "_BLOCK", 7)  # several blocks, the last one short
    one, law = (optim.SlicedOptimizer(SWIFT["momentum"], LAYOUT, numbers(0), 0, LAYOUT.size) for _ in range(2))
    values = [numbers(10 + i) for i in range(len(weights))]
    one.step_mean(values, weights)
    law.step(sum(w * v for v, w in zip(values, weights, strict=True)) / sum(weights))
    assert torch.allclose(one.params, law.params, atol=1e-14, rtol=1e-14)


@pytest.mark.parametrize("name", ["nadam", "asgd"])
def test_a_number_of_a_parameter_stays_one_number_where_parameters_are_numbers(name):
    layout = Layout.of((n, torch.empty((), dtype=torch.float64)) for n in "ab")
    one = optim.SlicedOptimizer(EVERY[name], layout, numbers(0, 2), 0, 2)
    one.step(numbers(1, 2))
    again = optim.SlicedOptimizer(EVERY[name], layout, one.params.clone(), 0, 2)
    again.load(optim.join([one.moments()], layout), layout)
    for each in (one, again):
        each.step(numbers(2, 2))
    assert torch.equal(one.params, again.params)

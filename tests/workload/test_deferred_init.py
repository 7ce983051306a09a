"""Deferred initialization: the distributions of plain torch, the same values on every process, and little memory."""

import copy
import json
import os
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from folders import FOLDERS, TESTS
from rayps_client.errors import WorkloadError
from torch import nn
from torch.nn.utils import parametrizations

import rayps
from rayps.workload import deferred_init
from rayps.workload.deferred_init import deferred, named_tensors, seeded


class Made(rayps.Workload):
    def __init__(self, make):
        self.model = make

    def model(self):
        raise NotImplementedError

    def data(self):
        return rayps.data.tensors(torch.zeros(4, 1), torch.zeros(4, 1), batch_size=2)

    def loss(self, model, batch):
        raise NotImplementedError


def recorded(make, seed=0):
    return deferred(Made(make), seed)


def distance(one, two):
    """Kolmogorov and Smirnov's statistic of two samples, times sqrt(n m / (n + m)): above 1.95 with p = 0.001."""
    one, two = one.double().flatten().sort().values, two.double().flatten().sort().values
    both = torch.cat([one, two])
    below = [torch.searchsorted(each, both, right=True) / len(each) for each in (one, two)]
    return float((below[0] - below[1]).abs().max() * (len(one) * len(two) / (len(one) + len(two))) ** 0.5)


class Positions(nn.Module):
    """Formulas, data, views, ties, an attribute that is no buffer, and old-style parameters."""

    def __init__(self):
        super().__init__()
        at, rates = torch.arange(50).unsqueeze(1), torch.exp(torch.arange(0, 8, 2) * -2.3)
        table = torch.zeros(50, 8)
        table[:, 0::2], table[:, 1::2] = torch.sin(at * rates), torch.cos(at * rates)
        self.register_buffer("table", table)
        self.register_buffer("mask", torch.tril(torch.ones(8, 8)).bool())
        self.register_buffer("hits", torch.nonzero(self.mask).float())
        self.register_buffer("array", torch.from_numpy(at.double().numpy() * 2))
        self.given = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.old = nn.Parameter(torch.Tensor(20, 30))
        nn.init.kaiming_uniform_(self.old)
        with torch.no_grad():
            self.old[0].zero_()
            self.old.data[1] = 7.0
        self.own = nn.Parameter(torch.randn(50, generator=torch.Generator().manual_seed(3)))
        self.order = nn.Parameter(torch.randperm(30).float())
        self.likes = nn.Parameter(torch.rand_like(self.own) + torch.rand(50))
        self.onto = nn.Parameter(torch.zeros(3, device="cpu", pin_memory=False))
        self.words, self.head = nn.Embedding(40, 6), nn.Linear(6, 40)
        self.head.weight = self.words.weight
        self.steps = torch.arange(4.0)
        self.drops = [each.item() for each in torch.linspace(0, 0.1, 4)] + torch.linspace(0, 1, 3).tolist()


def truncated():
    layer = nn.Linear(40, 50)
    nn.init.trunc_normal_(layer.weight, std=0.3)
    nn.init.trunc_normal_(layer.bias, std=0.5, generator=torch.Generator().manual_seed(1))
    return layer


def orthogonal():
    layer = nn.Linear(40, 30)
    nn.init.orthogonal_(layer.weight)
    return layer


def encoder():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 3)


MODELS = {
    "linear": lambda: nn.Linear(30, 40),
    "conv": lambda: nn.Conv2d(3, 16, 3),
    "embedding": lambda: nn.Embedding(100, 16, padding_idx=0),
    "layer_norm": lambda: nn.LayerNorm(16),
    "batch_norm": lambda: nn.BatchNorm1d(16),
    "lstm": lambda: nn.LSTM(16, 32, 2),
    "encoder_layer": lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True),
    "encoder": encoder,
    "half": lambda: nn.Linear(30, 40).bfloat16(),
    "orthogonal": orthogonal,
    "truncated": truncated,
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(30, 40)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(30, 40)),
    "orthogonal_map": lambda: parametrizations.orthogonal(nn.Linear(30, 40)),
    "positions": Positions,
}


def hugging_face(name):
    transformers = pytest.importorskip("transformers")
    tiny = {"vocab_size": 200, "bos_token_id": 0, "eos_token_id": 0}
    if name == "gpt2":
        config = transformers.GPT2Config(**tiny, n_positions=64, n_embd=32, n_layer=3, n_head=2)
        return lambda: transformers.GPT2LMHeadModel(config)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**tiny, **sizes, num_key_value_heads=2))


@pytest.mark.parametrize("name", [*MODELS, "gpt2", "llama"])
def test_distributions_are_those_of_plain_torch(name):
    make = MODELS.get(name) or hugging_face(name)
    model = recorded(make)
    torch.manual_seed(1)
    plain = make()
    assert [key for key, _ in named_tensors(model.module)] == [key for key, _ in named_tensors(plain)] == model.names
    for key, value in named_tensors(plain):
        made, value = model.materialize(key), value.detach()
        assert (made.shape, made.dtype, made.device) == (value.shape, value.dtype, value.device), key
        assert made.is_contiguous() == value.is_contiguous() and not made.requires_grad
        if value.double().unique().numel() > 8 and key not in ("own", "array"):
            assert distance(made, value) < 1.95, key
        elif value.numel() > 8 or not value.is_floating_point():
            assert torch.equal(made, value), key  # constants: ones, zeros, counts
    for one, two in zip(model.module.parameters(), plain.parameters(), strict=True):
        assert one.requires_grad == two.requires_grad and one.is_meta


def test_formulas_data_and_ties():
    model, plain = recorded(Positions), Positions()
    for key in ("table", "mask", "hits", "array"):
        assert torch.equal(model.materialize(key), plain.get_buffer(key)), key
    for key in ("given", "own", "onto"):
        assert torch.equal(model.materialize(key), plain.get_parameter(key).detach()), key
    old = model.materialize("old")
    assert (old[0] == 0).all() and (old[1] == 7).all() and old[2:].std() > 0
    assert sorted(model.materialize("order").tolist()) == list(range(30))
    assert model.module.head.weight is model.module.words.weight
    assert torch.equal(model.materialize("head.weight"), model.materialize("words.weight"))
    assert model.module.drops == plain.drops


def test_copies_stay_equal_and_other_layers_differ():
    model = recorded(encoder)
    first, last = (model.materialize(f"layers.{i}.linear1.weight") for i in (0, 2))
    assert torch.equal(first, last), "nn.TransformerEncoder copies its layer"
    stack = recorded(lambda: nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)))
    assert not torch.equal(stack.materialize("0.weight"), stack.materialize("1.weight"))

    def teacher():
        student = nn.Linear(4, 4)
        return nn.ModuleDict({"student": student, "teacher": copy.deepcopy(student).requires_grad_(False)})

    both = recorded(teacher)
    assert torch.equal(both.materialize("teacher.weight"), both.materialize("student.weight"))
    rows = recorded(orthogonal).materialize("weight")
    assert torch.allclose(rows @ rows.T, torch.eye(30), atol=1e-5)
    cut = recorded(truncated)
    assert cut.materialize("weight").abs().max() <= 2 and 0.25 < cut.materialize("weight").std() < 0.35
    torch.manual_seed(5)
    assert torch.equal(cut.materialize("bias"), truncated().bias.detach()), "the user's generator decides"


def test_values_depend_on_seed_and_name_only():
    make = MODELS["encoder_layer"]
    one, two = recorded(make), recorded(make)
    before = torch.get_rng_state()
    names = one.names
    forward = {name: one.materialize(name) for name in names}
    backward = {name: two.materialize(name) for name in reversed(names)}
    assert all(torch.equal(forward[name], backward[name]) for name in names)
    assert torch.equal(torch.get_rng_state(), before), "no number of the global generator is drawn"
    other = recorded(make, seed=1)
    assert not torch.equal(other.materialize("linear1.weight"), forward["linear1.weight"])
    deeper = recorded(lambda: nn.ModuleDict({"more": nn.Linear(3, 3), "linear1": nn.Linear(32, 64)}))
    assert torch.equal(deeper.materialize("linear1.weight"), forward["linear1.weight"]), "other tensors do not matter"
    assert torch.equal(torch.rand(3, generator=seeded(0, "a")), torch.rand(3, generator=seeded(0, "a")))


def test_any_cut_has_the_same_values():
    model = recorded(MODELS["linear"])
    whole = model.materialize("weight").flatten()
    for bounds in ([0, 1200], [0, 1, 1200], [0, 400, 800, 1200], [0, 401, 999, 1200]):
        pieces = [model.piece("weight", lo, hi) for lo, hi in pairwise(bounds)]
        assert torch.equal(torch.cat(pieces), whole)
        assert all(piece.untyped_storage().nbytes() == piece.nbytes for piece in pieces)
        for lo, piece in zip(bounds, pieces, strict=False):
            into = torch.zeros_like(piece)
            model.copy_piece("weight", lo, into)
            assert torch.equal(into, piece)


def child(text):
    """Run a script in a process of its own, and return the JSON that it prints."""
    path = [*FOLDERS, str(TESTS.parent), *sys.path]
    code = f"import json, sys\nsys.path[:0] = {path!r}\nimport torch\nfrom test_deferred_init import *\n{text}"
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=env, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_another_process_makes_the_same_values():
    text = """
torch.manual_seed(99); torch.randn(7)
model = recorded(MODELS["encoder_layer"])
print(json.dumps({name: model.materialize(name).double().sum().item() for name in model.names}))
"""
    model = recorded(MODELS["encoder_layer"])
    torch.manual_seed(3)
    assert child(text) == {name: model.materialize(name).double().sum().item() for name in model.names}


def high_water():
    """The most bytes that this process has had in memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) << 10
    raise AssertionError("no VmHWM")


def wide(layers, width):
    return lambda: nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])


def fill_a_quarter(layers, width):
    """Make each second quarter of each tensor; return the bytes of the model, and those that this took at most."""
    recorded(wide(2, 8)).materialize("0.weight")  # what torch allocates once
    before = high_water()
    model = recorded(wide(layers, width))
    sizes = {name: p.numel() for name, p in model.module.named_parameters()}
    held = {name: torch.zeros(size // 2 - size // 4) for name, size in sizes.items()}
    for name, size in sizes.items():
        model.copy_piece(name, size // 4, held[name])
    return sum(p.nbytes for p in model.module.parameters()), high_water() - before


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_memory_is_that_of_the_pieces_and_the_largest_tensor():
    whole, used = child("print(json.dumps(fill_a_quarter(12, 3000)))")
    largest, rounding = 3000 * 3000 * 4, 12 * (2 << 20)  # the system gives memory in pages of up to 2 MiB
    assert whole > 400 << 20
    assert used < whole / 4 + 2 * largest + rounding + (16 << 20) < whole / 1.8


def test_fill_and_attributes():
    model = recorded(Positions)
    target = copy.deepcopy(Positions())
    with torch.no_grad():
        for _, value in named_tensors(target):
            value.zero_()
    model.fill(target)
    for name, value in named_tensors(target):
        assert torch.equal(value, model.materialize(name)), name
    assert target.head.weight is target.words.weight
    model.module.to_empty(device="cpu")
    model.fill(model.module)
    assert torch.equal(model.module.steps, torch.arange(4.0))
    assert torch.equal(model.module.old, model.materialize("old"))
    part = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(WorkloadError, match=r"no parameter or buffer '0\.weight'"):
        model.fill(part)
    with pytest.raises(WorkloadError, match="only whole tensors can be filled"):
        recorded(wide(1, 3)).fill(part)


def test_two_threads_record_apart():
    found = {}

    def run(name):
        found[name] = recorded(truncated).materialize("weight")

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert len(found) == 4 and all(torch.equal(found[0], each) for each in found.values())
    assert nn.init._no_grad_trunc_normal_.__module__ == "torch.nn.init"


def looks():
    layer = nn.Linear(3, 3)
    if layer.weight.sum() > 0:
        nn.init.zeros_(layer.weight)
    return layer


def hides():
    layer = nn.Linear(3, 3)
    layer.tables = [torch.zeros(3)]
    return layer


def draws():
    layer = nn.Linear(3, 3)
    layer.mask = nn.Parameter(torch.randint_like(torch.ones(3), 1, 5))
    torch.randint_like(torch.ones(3), 1, 5)  # no tensor of the model depends on this
    return layer


def loads(folder):
    def make():
        layer = nn.Linear(3, 3)
        layer.load_state_dict(torch.load(folder / "layer.pt"))
        return layer

    return make


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (looks, "is read, and depends on values that are drawn at random"),
        (
            lambda: nn.ParameterList([torch.from_numpy(torch.randn(3).numpy())]),
            "numpy is read, and depends on values that are drawn",
        ),
        (hides, r"module '' has a tensor \[3\] inside its attribute 'tables'"),
        (lambda: nn.Linear(3, "a"), r"model\(\) raised TypeError"),
    ],
    ids=["item", "numpy", "list", "error"],
)
def test_what_cannot_be_recorded_says_what_and_what_to_do(make, text):
    with pytest.raises(WorkloadError, match=text) as raised:
        recorded(make)
    assert "start_from=" in raised.value.message


def test_weights_of_files(tmp_path, monkeypatch):
    torch.save(nn.Linear(3, 3).state_dict(), tmp_path / "layer.pt")
    with pytest.raises(WorkloadError, match="give the files as start_from="):
        recorded(loads(tmp_path))
    transformers = pytest.importorskip("transformers")
    plain = hugging_face("gpt2")()
    plain.save_pretrained(tmp_path)

    def pretrained():
        return transformers.GPT2LMHeadModel.from_pretrained(tmp_path)

    small = recorded(pretrained)
    for name, value in named_tensors(plain):
        assert torch.equal(small.materialize(name), value), name
    monkeypatch.setattr(deferred_init, "MOST_DATA", 1000)
    for make in (pretrained, lambda: nn.ParameterList([torch.tensor([1.0] * 1000)])):
        with pytest.raises(WorkloadError, match=r"of data, such as of files.*\n.*start_from="):
            recorded(make)


def test_a_random_operation_without_a_generator_is_refused_only_if_it_matters():
    def unused():
        torch.randint_like(torch.ones(3), 1, 5)
        return nn.Linear(3, 3)

    assert recorded(unused).names == ["weight", "bias"]
    with pytest.raises(WorkloadError, match=r"tensor 'mask' depends on .*which takes no generator"):
        recorded(draws)


def test_a_lazy_layer_gets_its_shape():
    def make():
        model = nn.Sequential(nn.LazyLinear(4), nn.Dropout(0.5), nn.LazyBatchNorm1d())
        model(torch.zeros(2, 3))
        return model

    model = recorded(make)
    assert model.materialize("0.weight").shape == (4, 3)
    assert int(model.materialize("2.num_batches_tracked")) == 1

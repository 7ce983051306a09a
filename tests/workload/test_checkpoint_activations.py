"""`checkpoint_activations`: the same bits as without it, with fewer bytes stored for backward."""

import copy
import json
import shutil

import pytest
import torch
from rayps_client.errors import ConfigError, RaypsError, WorkloadError
from small_work import Small, rows, train
from torch import nn

import rayps
from rayps import AllReduce, FedAvg, LocalSGD, ParameterServer
from rayps.cli import main as cli
from rayps.core.job.user_module import pack
from rayps.runtime.checks.tried_batch import TrialRequest, try_batch
from rayps.runtime.results.cost_report import predict_costs
from rayps.workload.checkpoint_activations import checkpoint_activations
from rayps.workload.model_blocks import chosen_blocks, named_briefly, repeated_blocks

WIDE = 6


class Block(nn.Module):
    """A residual block with dropout and BatchNorm."""

    def __init__(self, wide=WIDE, norm=True):
        super().__init__()
        self.norm = nn.BatchNorm1d(wide) if norm else nn.LayerNorm(wide)
        self.up, self.drop, self.down = nn.Linear(wide, 4 * wide), nn.Dropout(0.3), nn.Linear(4 * wide, wide)

    def forward(self, x, scale=None):
        x = x + self.down(self.drop(torch.tanh(self.up(self.norm(x)))))
        return x if scale is None else x * scale


class Stack(nn.Module):
    def __init__(self, depth=3, norm=True):
        super().__init__()
        self.first, self.layers, self.head = nn.Linear(5, WIDE), nn.ModuleList(), nn.Linear(WIDE, 1)
        self.layers.extend(Block(norm=norm) for _ in range(depth))
        self.scale = nn.Parameter(torch.tensor(0.9))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, scale=self.scale)  # a gradient goes to a keyword too
        return self.head(x)


class Deep(Small):
    checkpoint_activations = True

    def __init__(self, again=True, norm=True, **options):
        super().__init__(**{"n": 24, "batch": 4, **options})
        self.checkpoint_activations, self.norm = again, norm

    def model(self):
        return Stack(norm=self.norm).double()


def stored(run):
    """The bytes that autograd stores outside of recomputed modules, whose own hooks replace these inside."""
    held = []

    def pack(t):
        held.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run()
    return sum(t.nbytes for t in held)


def step(model, x, seed=0):
    torch.manual_seed(seed)
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), grads, torch.get_rng_state()


def equal(one, two):
    assert torch.equal(one[0], two[0]) and torch.equal(one[2], two[2]) and one[1].keys() == two[1].keys()
    assert all(torch.equal(value, two[1][name]) for name, value in one[1].items())


MODELS = {
    "batchnorm": (lambda: Stack(), True),
    "layernorm": (lambda: Stack(norm=False), True),
    "some": (lambda: Stack(), ("layers.0", "layers.2.*")),
    "nested": (lambda: Stack(), ("layers.*", "layers.1.up")),
    "sequential": (
        lambda: nn.Sequential(nn.Linear(5, WIDE), nn.Sequential(Block(), Block()), nn.Linear(WIDE, 1)),
        True,
    ),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_loss_gradients_buffers_and_random_numbers_have_the_same_bits(name, training):
    make, given = MODELS[name]
    torch.manual_seed(3)
    plain = make().train(training)
    again = copy.deepcopy(plain)
    names = list(again.state_dict())
    assert checkpoint_activations(again, given)
    assert list(again.state_dict()) == names
    for seed in range(3):
        x = torch.randn(8, 5, generator=torch.Generator().manual_seed(seed))
        equal(step(plain, x, seed), step(again, x, seed))
        for key, value in plain.state_dict().items():
            assert torch.equal(value, again.state_dict()[key]), key
    assert training is (int(again.state_dict().get("layers.0.norm.num_batches_tracked", 3 * training)) == 3)


def test_running_statistics_move_once_also_if_backward_runs_twice():
    torch.manual_seed(0)
    plain = Stack()
    again = copy.deepcopy(plain)
    checkpoint_activations(again, True)
    x = torch.randn(8, 5)
    for model in (plain, again):
        torch.manual_seed(1)
        loss = model(x).mean()
        loss.backward(retain_graph=True)
        loss.backward()
    for key, value in plain.state_dict().items():
        assert torch.equal(value, again.state_dict()[key]), key
    for one, two in zip(plain.parameters(), again.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)


def test_fewer_bytes_are_stored():
    """Depth 12: all activations of 12 blocks, against the inputs of 12 blocks and those of one block."""
    torch.manual_seed(0)
    plain = Stack(depth=12)
    again = copy.deepcopy(plain)
    blocks = chosen_blocks(again, True, "field")
    checkpoint_activations(again, True)
    assert list(blocks) == [f"layers.{i}" for i in range(12)]
    x = torch.randn(64, 5)
    outside = stored(lambda: again(x).mean().backward())
    one = stored(lambda: plain.layers[0](torch.randn(64, WIDE), scale=plain.scale).mean().backward())
    whole = stored(lambda: plain(x).mean().backward())
    assert outside + one < whole / 4
    assert outside < 14 * 64 * WIDE * 4 + 64 * 8 * 4  # the inputs of 12 blocks and of two layers


def test_what_a_plan_counts():
    whole = predict_costs(Deep(False), AllReduce(), 2, activations=True).memory[0]["activations"]
    again = predict_costs(Deep(True), AllReduce(), 2, activations=True).memory[0]["activations"]
    first = predict_costs(Deep("first"), AllReduce(), 2, activations=True).memory[0]["activations"]
    assert again < 0.6 * whole and again < first


FILE = """
import rayps, torch
from torch import nn

class Work(rayps.Workload):
    def model(self):
        block = lambda: nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 5))
        return nn.Sequential(*[block() for _ in range(4)], nn.Linear(5, 1))
    def data(self):
        return rayps.data.tensors(torch.ones(24, 5), torch.ones(24, 1), batch_size=4)
    def loss(self, model, batch):
        return ((model(batch.x) - batch.y) ** 2).mean()
"""


def test_a_plan_and_a_run_name_the_modules(tmp_path, capsys):
    (tmp_path / "work.py").write_text(FILE)
    target = f"{tmp_path / 'work.py'}:Work"
    found = {}
    for given in ("true", "false", "'0'"):
        assert cli.main(["plan", target, "--set", f"checkpoint_activations={given}", "--json"]) == 0
        found[given] = json.loads(capsys.readouterr().out)
    assert [found[given]["recomputed"] for given in found] == [["0", "1", "2", "3"], [], ["0"]]
    held = [found[given]["costs"]["memory"][0]["activations"] for given in found]
    assert held[0] < held[1] <= held[2]  # one block of four: what is stored outside of it is as before
    assert cli.main(["plan", target, "--set", "checkpoint_activations=true"]) == 0
    assert "activations  of 4 modules (0, 1, ..., 3) are computed again" in capsys.readouterr().out
    result = train(target, workers=2, params={"checkpoint_activations": ["1", "2"]})
    [event] = [event for event in result.events if event.get("blocks")]
    assert event["blocks"] == ["1", "2"]
    assert event["message"] == "the activations of 2 modules (1, 2) are computed again"
    assert result.params["checkpoint_activations"] == ["1", "2"]


@pytest.mark.parametrize("strategy", [AllReduce(), ParameterServer(), LocalSGD(period=2)], ids=str)
def test_a_run_has_the_same_bits(strategy):
    """With dropout on one worker; several workers on threads share torch's generator, and have none."""
    for workers, again, norm in ((1, True, True), (2, ("layers.*",), False)):
        work = [Deep(given, norm, optimizer="adam") for given in (again, False)]
        if workers > 1:
            for each in work:
                each.model = lambda: _without_dropout(Stack(norm=False).double())
        one, two = (train(each, strategy, workers=workers, epochs=2).model().state_dict() for each in work)
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in one)


def _without_dropout(model):
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"precision": "bf16"}, {"clip_norm": 0.1}], ids=str)
def test_with_other_fields_of_a_workload(options):
    found = []
    for given in (True, False):
        work = Deep(given, n=12, batch=3)
        if "precision" in options:
            work.model = lambda: Stack()
            work.data = lambda: rayps.data.tensors(*(each.float() for each in rows(12)), batch_size=3)
        for name, value in options.items():
            setattr(work, name, value)
        found.append(train(work, workers=1, epochs=2).model().state_dict())
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_clients_compute_again():
    found = []
    for given in (True, False):
        work = Deep(given, norm=False)
        work.model = lambda: _without_dropout(Stack(norm=False).double())
        work.data = lambda: rayps.data.tensors(*rows(24), batch_size=4).with_clients(rayps.data.iid(3))
        found.append(train(work, FedAvg(fraction=1.0)).model().state_dict())
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_compiled_blocks_run_compiled_in_both_passes():
    graphs = []

    def counting(graph, example):
        def run(*args):
            graphs.append(graph)
            return graph.forward(*args)

        return run

    torch.manual_seed(0)
    plain = Stack()
    again = copy.deepcopy(plain)
    checkpoint_activations(again, True, {"backend": counting})
    x = torch.randn(8, 5)
    equal(step(plain, x), step(again, x))
    assert len(graphs) >= 2 * 3  # each of the blocks ran twice in graphs of the backend
    for key, value in plain.state_dict().items():
        assert torch.equal(value, again.state_dict()[key]), key


@pytest.mark.skipif(shutil.which("g++") is None, reason="the default backend needs g++")
def test_the_default_backend():
    found = []
    for given in (True, False):
        work = Deep(given, n=8, batch=4)
        work.model = lambda: _without_dropout(Stack(depth=2).double())
        work.compile = given  # the law is neither compiled nor computed again
        found.append(train(work, workers=1, timeout=300).model().state_dict())
    for name, value in found[0].items():
        assert torch.allclose(value, found[1][name], atol=1e-12), name


# ---- which modules


def test_repeated_blocks():
    residual = nn.Module()
    residual.stem = nn.Sequential(nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 50))
    residual.one = nn.Sequential(*[Block(4) for _ in range(2)])
    residual.two = nn.Sequential(*[Block(8) for _ in range(3)])
    assert list(repeated_blocks(residual)) == ["one.0", "one.1", "two.0", "two.1", "two.2"]
    inner = nn.Sequential(nn.Linear(5, 5), nn.Sequential(Block(), Block()), nn.Linear(5, 1))
    assert list(repeated_blocks(inner)) == ["1.0", "1.1"]
    experts = nn.ModuleList(nn.Sequential(nn.ModuleList(Block() for _ in range(4))) for _ in range(2))
    assert list(repeated_blocks(experts)) == ["0", "1"], "the outermost of equal ones"
    assert repeated_blocks(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))) == {}
    shared = Block()
    tied = nn.ModuleList([shared, shared, Block(), Block()])
    assert list(repeated_blocks(tied)) == ["0", "2", "3"]
    assert named_briefly(list("abcd")) == "a, b, ..., d" and named_briefly(list("abc")) == "a, b, c"


def test_a_hugging_face_model():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=3, n_head=2)
    torch.manual_seed(0)
    plain = transformers.GPT2LMHeadModel(config)
    again = copy.deepcopy(plain)
    assert checkpoint_activations(again, True) == [f"transformer.h.{i}" for i in range(3)]
    ids = torch.randint(40, (2, 16))
    found = []
    for model in (plain, again):
        torch.manual_seed(1)
        loss = model.train()(ids, labels=ids, use_cache=False).loss
        loss.backward()
        found.append((loss.detach(), [p.grad for p in model.parameters()]))
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(one, two) for one, two in zip(found[0][1], found[1][1], strict=True))
    with pytest.raises(WorkloadError, match=r"cache of keys and values \(DynamicCache\).*use_cache=False"):
        again(ids, labels=ids)


# ---- what is refused


@pytest.mark.parametrize("given", [None, 1, "", (), ("a", 3), {"a": 1}], ids=repr)
def test_the_field_is_checked(given):
    with pytest.raises(ConfigError, match="the blocks that the model repeats") as raised:
        train(Deep(given))
    assert raised.value.data["field"] == "checkpoint_activations"


@pytest.mark.parametrize(
    ("work", "options", "text"),
    [
        (Deep("layer.*"), {}, r"names 'layer.\*'.*has no such module.*named_modules"),
        (Small(), {}, "repeats no block"),
        (Deep(), {"strategy": rayps.TensorParallel(size=2), "workers": 2}, "cannot compute activations again"),
        (Deep(), {"strategy": AllReduce(replica=rayps.Pipeline(stages=2)), "workers": 2}, "raise micro_batches"),
    ],
    ids=["misspelt", "no block", "tensor", "pipeline"],
)
def test_what_is_refused_says_what_to_do(work, options, text):
    work.checkpoint_activations = getattr(work, "checkpoint_activations", True) or True
    with pytest.raises(ConfigError, match=text):
        train(work, **options)


def test_synchronized_batchnorm_is_refused():
    work = Deep()
    work.sync_batchnorm = True
    with pytest.raises(ConfigError, match="set one of them to False"):
        train(work, workers=2)


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.layer(x) / self.calls


def test_a_module_that_changes_a_buffer_is_refused():
    model = nn.Sequential(Counts(), Counts())
    checkpoint_activations(model, True)
    with pytest.raises(WorkloadError, match=r"module '0' changes its buffer 'calls' in forward\(\)"):
        model(torch.randn(3, 5))


def test_a_module_that_changes_its_input_fails_and_is_never_silently_wrong():
    class Changes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 5)

        def forward(self, x):
            return self.layer(x.mul_(2))

    model = nn.Sequential(nn.Linear(5, 5), Changes(), Changes())
    checkpoint_activations(model, ("1", "2"))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(torch.randn(3, 5)).sum().backward()


def test_the_trial_runs_what_a_worker_runs():
    work = Deep()
    work.model = lambda: nn.Sequential(Counts(), Counts(), nn.Linear(5, 1)).double()
    verdict = try_batch(TrialRequest(pack(work), 1, 0))
    assert isinstance(verdict.error, RaypsError) and "changes its buffer" in verdict.error.message
    assert try_batch(TrialRequest(pack(Deep()), 1, 0)).error is None

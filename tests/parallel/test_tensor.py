"""Split layers are the unsplit layer: outputs, gradients, ten steps; and what they exchange is what they should."""

import copy
import itertools
import re

import pytest
import torch
from rayps_client.errors import ConfigError, RaypsError, WorkloadError
from test_ring import errors, every, form
from torch import nn
from torch.nn import functional as F

from rayps.core.partition import find_bounds
from rayps.parallel.tensor import LayerSplit, TensorCommunicator, Volume, agree, functions, pieces, plan, split, volume

DTYPES = [(torch.float64, 1e-12), (torch.float32, 1e-6)]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Ranks are threads here: torch's own threads would only stand in their way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def groups():
    made = {}

    def group(n):
        if n not in made:
            made[n] = form(n, label=f"tensor-{n}")
        return made[n]

    yield group
    for rings in made.values():
        for ring in rings:
            ring.close()


def distance(got, want):
    """The largest difference, against the largest element."""
    assert got.shape == want.shape, (got.shape, want.shape)
    scale = want.abs().max().item() if want.numel() else 0.0
    return (got - want).abs().max().item() / max(scale, 1.0) if want.numel() else 0.0


def whole_of(parts, cut, shape):
    """The whole tensor from everyone's parts, by what `pieces` says they are."""
    if cut[0] is None:
        for other in parts[1:]:
            assert distance(other, parts[0]) == 0.0  # replicated: the same bits
        return parts[0]
    whole = torch.full(shape, torch.nan, dtype=parts[0].dtype)
    for mine, (dim, ranges) in zip(parts, cut[1], strict=True):
        at = 0
        for lo, hi in ranges:
            whole.narrow(dim, lo, hi - lo).copy_(mine.narrow(dim, at, hi - lo))
            at += hi - lo
        assert at == mine.shape[dim]
    return whole


def run(model, args, kwargs, optimizer, steps):
    """Output and input gradients of the first step, weight gradients of the first, parameters after the last."""
    args = [each.detach().clone().requires_grad_(each.is_floating_point()) for each in args]
    stepper = optimizer(model.parameters())
    first = None
    for _ in range(steps):
        stepper.zero_grad()
        out = model(*args, **kwargs)
        out = [each for each in (out if isinstance(out, tuple) else (out,)) if each is not None]
        weights = [torch.linspace(-1, 1, each.numel(), dtype=each.dtype).view(each.shape) for each in out]
        sum((each - w).square().mean() for each, w in zip(out, weights, strict=True)).backward()
        if first is None:
            first = (
                [each.detach().clone() for each in out],
                [each.grad.clone() for each in args if each.requires_grad],
                {name: p.grad.clone() for name, p in model.named_parameters()},
            )
        stepper.step()
    return *first, {name: p.detach().clone() for name, p in model.named_parameters()}


def law(rings, model, args, given=None, kwargs=None, tolerance=1e-12, steps=10, optimizer=None):
    """The model split among the rings does what the whole model does. Returns the communicators."""
    optimizer = optimizer or (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9))
    kwargs = kwargs or {}
    size = len(rings)
    ways = plan(model, size, given)
    want = run(copy.deepcopy(model), args, kwargs, optimizer, steps)
    used = [TensorCommunicator(ring) for ring in rings]
    mine = [split(copy.deepcopy(model), ways, i, size, group) for i, group in enumerate(used)]
    names = [name for name, _ in model.named_parameters()]
    assert all([name for name, _ in each.named_parameters()] == names for each in mine)
    got = every(rings, lambda ring: run(mine[ring.rank], args, kwargs, optimizer, steps))
    for outputs, inputs, _, _ in got:
        for a, b in itertools.chain(zip(outputs, want[0], strict=True), zip(inputs, want[1], strict=True)):
            assert distance(a, b) <= tolerance
    cuts = [pieces(model, ways, size, i) for i in range(size)]
    for place in (2, 3):
        for name, p in model.named_parameters():
            cut = (0, [each[name] for each in cuts]) if name in cuts[0] else (None, None)
            whole = whole_of([each[place][name] for each in got], cut, p.shape)
            assert distance(whole, want[place][name]) <= tolerance, (place, name)
    assert len({(group.collectives, group.bytes) for group in used}) == 1
    return used


def randn(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def seeded(make, dtype=torch.float64):
    torch.manual_seed(7)
    model = make().to(dtype)
    with torch.no_grad():
        for p in model.parameters():  # attention's biases begin as zeros, which would hide mistakes
            p.add_(torch.randn_like(p) * 0.05)
    return model


# Linear


class One(nn.Module):
    def __init__(self, a, b, bias=True):
        super().__init__()
        self.layer = nn.Linear(a, b, bias=bias)

    def forward(self, x):
        return self.layer(x)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES, ids=str)
@pytest.mark.parametrize("way", ["out", "in", "row", "column"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_split_either_way_is_the_whole_one(groups, n, dtype, tolerance, way, bias):
    model = seeded(lambda: One(10, 7, bias), dtype)  # neither divides by 3 or 4
    for shape in [(5, 10), (2, 3, 10), (10,)]:
        used = law(groups(n), model, [randn(*shape, dtype=dtype)], {"layer": way}, tolerance=tolerance)
        assert used[0].collectives == (0 if n == 1 else 20)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES, ids=str)
def test_the_alternating_pair_exchanges_nothing_at_the_wide_layer(groups, n, dtype, tolerance):
    d, b = 6, 5
    model = seeded(lambda: nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d)), dtype)
    used = law(groups(n), model, [randn(b, d, dtype=dtype)], tolerance=tolerance)
    width = torch.empty((), dtype=dtype).element_size()
    for group in used:  # a step: b*d forwards, b*d backwards
        assert (group.collectives, group.bytes) == ((0, 0) if n == 1 else (20, 10 * 2 * b * d * width))


def test_the_first_layer_sums_no_gradient_that_nobody_wants(groups):
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 6)))
    used = [TensorCommunicator(ring) for ring in groups(2)]
    nets = [split(copy.deepcopy(model), plan(model, 2), i, 2, group) for i, group in enumerate(used)]
    every(groups(2), lambda ring: nets[ring.rank](randn(5, 6)).sum().backward())
    assert [(group.collectives, group.bytes) for group in used] == [(1, 5 * 6 * 8)] * 2
    every(groups(2), lambda ring: torch.no_grad()(nets[ring.rank])(randn(5, 6).requires_grad_()))
    assert used[0].collectives == 2


@pytest.mark.parametrize("n", [2, 3, 4])
def test_bytes_of_single_layers_are_the_formulas(groups, n):
    b, a, o = 5, 10, 7
    for way, elements in [("out", b * o + b * a), ("in", b * o + b * a)]:  # gather y, sum dx; sum y, gather dx
        used = law(groups(n), seeded(lambda: One(a, o)), [randn(b, a)], {"layer": way}, steps=1)
        assert (used[0].collectives, used[0].bytes) == (2, 8 * elements)


@pytest.mark.parametrize("n", [2, 3])
def test_a_long_mlp_pairs_up(groups, n):
    make = lambda: nn.Sequential(  # noqa: E731
        nn.Sequential(nn.Linear(5, 11), nn.ReLU()),
        nn.Linear(11, 4),
        nn.LayerNorm(4),
        nn.Linear(4, 9),
        nn.Tanh(),
        nn.Dropout(0.0),
        nn.Linear(9, 8),
        nn.ReLU(),
        nn.Linear(8, 3),
    )
    model = seeded(make)
    ways = plan(model, n)
    assert {name: way.split for name, way in ways.items()} == {"0.0": "out", "1": "in", "3": "out", "6": "in"}
    assert all(way.kept for way in ways.values())
    law(groups(n), model, [randn(6, 5)], optimizer=lambda p: torch.optim.Adam(p, lr=1e-2))


@pytest.mark.parametrize("n", [2, 3])
def test_what_needs_the_whole_width_gets_it(groups, n):
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 11), nn.LayerNorm(11), nn.Linear(11, 6)))
    given = {"0": "out", "2": "in"}
    assert not any(way.kept for way in plan(model, n, given).values())
    used = law(groups(n), model, [randn(5, 6)], given, steps=1)
    assert (used[0].collectives, used[0].bytes) == (4, 8 * 5 * (11 + 6 + 11 + 6))
    with pytest.raises(WorkloadError):
        plan(model, n)


def test_half_precision_adds_in_float32(groups):
    model = seeded(lambda: nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)), torch.float32)
    x = randn(4, 8, dtype=torch.float32)
    want = model(x)
    for dtype, tolerance in [(torch.bfloat16, 0.05), (torch.float16, 0.01)]:
        halves = copy.deepcopy(model).to(dtype)
        nets = [split(copy.deepcopy(halves), plan(model, 3), i, 3, ring) for i, ring in enumerate(groups(3))]
        for got in every(groups(3), lambda ring, nets=nets, dtype=dtype: nets[ring.rank](x.to(dtype))):
            assert got.dtype == dtype
            assert distance(got.float(), want) < tolerance


# Functions


def gradients(rings, work, x):
    """`work(x, group, rank)` on all ranks: outputs, and gradients of x under a gradient that all have."""

    def one(ring):
        mine = x[ring.rank].clone().requires_grad_()
        out = work(mine, TensorCommunicator(ring), ring.rank)
        (out * torch.linspace(1, 2, out.numel(), dtype=out.dtype).view(out.shape)).sum().backward()
        return out.detach(), mine.grad

    return every(rings, one)


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_functions_are_what_their_table_says(groups, n, dim):
    whole = 7
    widths = [hi - lo for lo, hi in (find_bounds(whole, n, i) for i in range(n))]
    shape = [5, 6, 4]
    shape[dim] = whole
    x = [randn(*shape, seed=i) for i in range(n)]
    ramp = torch.linspace(1, 2, x[0].numel(), dtype=torch.float64).view(shape)
    for out, grad in gradients(groups(n), lambda t, group, _: functions.total(t, group), x):
        assert distance(out, sum(x)) < 1e-15
        assert torch.equal(grad, ramp)
    for rank, (out, grad) in enumerate(gradients(groups(n), lambda t, group, _: functions.spread(t, group), x)):
        assert torch.equal(out, x[rank])
        assert distance(grad, n * ramp) < 1e-15
    mine = [each.split(widths, dim)[i] for i, each in enumerate(x)]
    for i, (out, grad) in enumerate(
        gradients(groups(n), lambda t, group, rank: functions.gather(t, group, dim, widths, rank), mine)
    ):
        assert torch.equal(out, torch.cat(mine, dim))
        assert torch.equal(grad, ramp.split(widths, dim)[i])
    same = [x[0]] * n
    slopes = [
        torch.linspace(1, 2, each.numel(), dtype=torch.float64).view(each.shape) for each in x[0].split(widths, dim)
    ]
    own = gradients(groups(n), lambda t, group, rank: functions.own_slice(t, group, dim, widths, rank), same)
    for i, (out, grad) in enumerate(own):
        assert distance(out, x[0].split(widths, dim)[i]) < 1e-15
        assert torch.equal(grad, torch.cat(slopes, dim))


def test_functions_leave_what_they_are_given(groups):
    x = [randn(4, 3, seed=i) for i in range(2)]
    before = [each.clone() for each in x]

    def work(ring):
        group, mine = TensorCommunicator(ring), x[ring.rank].requires_grad_()
        out = functions.total(mine, group) + functions.spread(mine, group)
        grad = torch.ones_like(out)
        out.backward(grad)
        return grad

    for grad in every(groups(2), work):
        assert torch.equal(grad, torch.ones(4, 3, dtype=torch.float64))
    assert all(torch.equal(a, b) for a, b in zip(x, before, strict=True))


# Embeddings


class Words(nn.Module):
    def __init__(self, rows, dim, **options):
        super().__init__()
        self.words = nn.Embedding(rows, dim, **options)
        self.head = nn.Linear(dim, 3)

    def forward(self, ids):
        return self.head(self.words(ids))


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("way", ["rows", "out"])
@pytest.mark.parametrize("padding", [None, 0, 6])
def test_an_embedding_split_either_way_is_the_whole_one(groups, n, way, padding):
    ids = torch.tensor([[0, 1, 5, 6], [6, 6, 2, 10]])
    model = seeded(lambda: Words(11, 5, padding_idx=padding))
    for dtype, tolerance in DTYPES:
        used = law(groups(n), model.to(dtype), [ids], {"words": way}, tolerance=tolerance)
        assert used[0].collectives == (0 if n == 1 else 10)  # forwards only
    if n > 1:
        assert used[0].bytes == 10 * 8 * 5 * 4
        net = split(copy.deepcopy(model), plan(model, n, {"words": way}), 0, n, None)
        with pytest.raises(IndexError):
            net(torch.tensor([11]))


class Tied(nn.Module):
    def __init__(self, rows=11, dim=5):
        super().__init__()
        self.words = nn.Embedding(rows, dim)
        self.head = nn.Linear(dim, rows, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.words(ids)))


@pytest.mark.parametrize("n", [2, 3])
def test_tied_weights_are_split_together_or_not_at_all(groups, n):
    model = seeded(Tied)
    law(groups(n), model, [torch.tensor([[0, 10, 3]])], {"words": "rows", "head": "out"})
    for given in [{"words": "rows"}, {"head": "out"}, {"words": "out", "head": "out"}]:
        with pytest.raises(WorkloadError, match=r"words\.weight and head\.weight are one tensor"):
            plan(model, n, given)
    with torch.device("meta"):
        big = Tied(1 << 16, 32)
    assert {name: way.split for name, way in plan(big, n).items()} == {"words": "rows", "head": "out"}


# Attention


class Attends(nn.Module):
    def __init__(self, d, heads, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(d, heads, **options)

    def forward(self, *args, **kwargs):
        return self.attention(*args, **kwargs)


SHAPES = {True: [(2, 5, 12), (2, 7, 12)], False: [(5, 2, 12), (7, 2, 12)]}


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"bias": False}, {"kdim": 10, "vdim": 9}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str
)
def test_attention_split_by_heads_is_the_whole_one(groups, n, batch_first, options):
    model = seeded(lambda: Attends(12, 4, batch_first=batch_first, **options))  # four heads of three
    target, source = SHAPES[batch_first]
    query = randn(*target)
    key = randn(*source[:2], options.get("kdim", 12), seed=1)
    value = randn(*source[:2], options.get("vdim", 12), seed=2)
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[0, 5:] = True
    mask = torch.triu(torch.ones(5, 7, dtype=torch.bool), 3)
    heads = randn(8, 5, 7, seed=4)
    for kwargs in [
        {"need_weights": False},
        {},
        {"average_attn_weights": False},
        {"need_weights": False, "attn_mask": mask, "key_padding_mask": padding},
        {"attn_mask": heads, "key_padding_mask": padding.double() * -3},
    ]:
        law(groups(n), model, [query, key, value], kwargs=kwargs, steps=3)
    if not options.get("kdim"):
        lone = [randn(5, 12), *[randn(7, 12, seed=3)] * 2]
        law(groups(n), model, lone, kwargs={"attn_mask": mask, "key_padding_mask": padding[0]}, steps=2)


@pytest.mark.parametrize("n", [2, 3])
def test_self_attention_exchanges_once_each_way(groups, n):
    class Self(Attends):
        def forward(self, x):
            return self.attention(x, x, x, need_weights=False)[0]

    used = law(groups(n), seeded(lambda: Self(12, 3, batch_first=True)), [randn(2, 5, 12)], steps=1)
    assert (used[0].collectives, used[0].bytes) == (2, 2 * 8 * 2 * 5 * 12)


class Mine(nn.Module):
    """Attention of a user's own: -1 for the heads."""

    def __init__(self, d=12, head=3, fewer=1):
        super().__init__()
        self.head = head
        self.q, self.k, self.v = nn.Linear(d, d), nn.Linear(d, d // fewer), nn.Linear(d, d // fewer)
        self.o = nn.Linear(d, d)

    def forward(self, x):
        q, k, v = (each(x).view(*x.shape[:2], -1, self.head).transpose(1, 2) for each in (self.q, self.k, self.v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.o(seen.transpose(1, 2).flatten(2))


class Packed(nn.Module):
    def __init__(self, d=12, head=3):
        super().__init__()
        self.head, self.qkv, self.o = head, nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x):
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (each.reshape(*x.shape[:2], -1, self.head).transpose(1, 2) for each in parts)
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_users_own_attention_is_split_by_names(groups, n):
    x = randn(2, 5, 12)
    given = {"q": "out:3", "k": "out:3", "v": "out:3", "o": "in"}
    used = law(groups(n), seeded(Mine), [x], given, steps=1)
    assert used[0].collectives == 2  # q, k and v share the sum of their input's gradient
    blocks = lambda: nn.ModuleDict({"blocks": nn.Sequential(Mine(), Mine())})  # noqa: E731
    model = seeded(blocks)
    ways = plan(model, n, {"blocks.*.q": "out:3", "blocks.*.k": "out:3", "*.v": "out:3", "*.o": "in"})
    assert len(ways) == 8
    law(
        groups(n),
        seeded(lambda: nn.Sequential(Mine(), Mine())),
        [x],
        {f"*.{name}": words for name, words in given.items()},
        steps=3,
    )
    law(groups(n), seeded(Packed), [x], {"qkv": "out*3:3", "o": "in"})
    if n == 2:
        law(groups(n), seeded(lambda: Mine(fewer=2)), [x], given)
    with pytest.raises(ConfigError, match=r"'out\*3'"):
        plan(Packed(), n, {"qkv": "out", "o": "in"})


class Normed(Mine):
    """As many users do: q and k are normed head by head, on slices."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(3)

    def forward(self, x):
        q, k, v = (each(x).view(*x.shape[:2], -1, 3).transpose(1, 2) for each in (self.q, self.k, self.v))
        return x + self.o(F.scaled_dot_product_attention(self.norm(q), k, v).transpose(1, 2).flatten(2))


def test_a_layer_that_learns_on_slices_is_found(groups):
    given = {"q": "out:3", "k": "out:3", "v": "out:3", "o": "in"}

    def work(ring, model, named):
        net = split(copy.deepcopy(model), plan(model, 2, given), ring.rank, 2, ring)
        net(randn(2, 5, 12)).square().mean().backward()
        agree([(name, p) for name, p in net.named_parameters() if name in named], ring)

    fine, model = seeded(Mine), seeded(Normed)
    every(groups(2), lambda ring: work(ring, fine, {"o.bias"}))
    for error in errors(groups(2), lambda ring: work(ring, model, {"o.bias", "norm.weight"})):
        assert isinstance(error, WorkloadError)
        assert "'norm.weight' is not the same on all tensor ranks" in str(error)


# Transformers


def encoder(norm_first=False, batch_first=True, activation="relu", layers=2):
    layer = nn.TransformerEncoderLayer(
        12, 4, 30, dropout=0.0, norm_first=norm_first, batch_first=batch_first, activation=activation
    )
    return nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(12), enable_nested_tensor=not norm_first)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize(("norm_first", "batch_first"), [(False, True), (True, False)])
def test_encoder_layers_are_the_whole_ones(groups, n, norm_first, batch_first):
    model = seeded(lambda: encoder(norm_first, batch_first, "gelu" if norm_first else "relu"))
    mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    x = randn(*((2, 5, 12) if batch_first else (5, 2, 12)))
    used = law(groups(n), model, [x], kwargs={"mask": mask, "is_causal": True})
    assert used[0].collectives == (0 if n == 1 else 10 * 2 * 4)  # a step and layer: two forwards, two backwards
    assert used[0].bytes == (0 if n == 1 else 10 * 2 * 4 * 8 * 2 * 5 * 12)
    law(groups(n), model, [x], steps=1)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("given", [None, {"*.linear1": "out", "*.linear2": "in"}, {"*.self_attn": "heads"}], ids=str)
def test_evaluation_does_not_pass_by_the_split(groups, given):
    model = seeded(encoder).eval()
    x, padding = randn(2, 5, 12), torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    with torch.no_grad():
        want = model(x, src_key_padding_mask=padding)
    assert torch.equal(want[1, 3], want[1, 4])  # torch took its fused path, which fills with zeros
    nets = [split(copy.deepcopy(model), plan(model, 2, given), i, 2, ring) for i, ring in enumerate(groups(2))]

    def work(ring):
        with torch.no_grad():
            return nets[ring.rank](x, src_key_padding_mask=padding)

    for got in every(groups(2), work):
        assert distance(got[~padding], want[~padding]) < 1e-12


def test_decoder_layers_are_the_whole_ones(groups):
    model = seeded(lambda: nn.TransformerDecoderLayer(12, 3, 20, dropout=0.0, batch_first=True))
    assert set(plan(model, 2)) == {"self_attn", "multihead_attn", "linear1", "linear2"}
    law(groups(2), model, [randn(2, 5, 12), randn(2, 7, 12, seed=1)], steps=5)


class Characters(nn.Module):
    """A small character transformer, its head tied to its embedding."""

    def __init__(self, letters=27, d=12, length=6):
        super().__init__()
        self.words, self.places = nn.Embedding(letters, d), nn.Embedding(length, d)
        self.blocks, self.norm = encoder(norm_first=True), nn.LayerNorm(d)
        self.head = nn.Linear(d, letters, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=self.norm.weight.dtype)
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        return self.head(self.norm(self.blocks(x, mask=mask, is_causal=True)))


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_character_transformer_is_the_whole_one(groups, n):
    ids = torch.randint(0, 27, (3, 6), generator=torch.Generator().manual_seed(1))
    law(groups(n), seeded(Characters), [ids])
    law(groups(n), seeded(Characters, torch.float32), [ids], tolerance=1e-6, steps=1)
    every_layer = {"words": "rows", "head": "out", "*.self_attn": "heads", "*.linear1": "out", "*.linear2": "in"}
    law(groups(n), seeded(Characters), [ids], every_layer)


# Plans


@pytest.mark.parametrize(
    ("make", "given", "want"),
    [
        (lambda: nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 12)), None, Volume(12, 12, 1, 1)),
        (lambda: One(12, 9), {"layer": "out"}, Volume(9, 12, 1, 1)),
        (lambda: One(12, 9), {"layer": "in"}, Volume(9, 12, 1, 1)),
        (lambda: encoder(layers=3), None, Volume(6 * 12, 6 * 12, 6, 6)),
        (Mine, {"q": "out:3", "k": "out:3", "v": "out:3", "o": "in"}, Volume(12, 12, 1, 1)),
    ],
    ids=["mlp", "out", "in", "encoder", "own attention"],
)
def test_the_volume_is_what_is_exchanged(groups, make, given, want):
    model = seeded(make)
    assert volume(model, plan(model, 3, given)) == want
    (group, *_) = law(groups(3), model, [randn(2, 5, 12)], given, steps=1)
    assert group.collectives == want.forward_collectives + want.backward_collectives
    assert group.bytes == 8 * 2 * 5 * (want.forward + want.backward)


def test_pieces_cover_every_parameter_once_and_need_no_memory():
    with torch.device("meta"):
        model = Characters(d=24)
        whole = {name: p.shape for name, p in model.named_parameters()}
        for size in (2, 3, 4):
            ways = plan(model, size)
            held = {name: torch.zeros(shape, device="cpu") for name, shape in whole.items()}
            for index in range(size):
                mine = pieces(model, ways, size, index)
                made = split(copy.deepcopy(model), ways, index, size, None)
                for name, p in made.named_parameters():
                    assert p.is_meta
                    shape = list(whole[name])
                    if name in mine:
                        dim, ranges = mine[name]
                        shape[dim] = sum(hi - lo for lo, hi in ranges)
                        for lo, hi in ranges:
                            held[name].narrow(dim, lo, hi - lo).add_(1)
                    assert list(p.shape) == shape
            for name, count in held.items():
                assert bool((count == (1 if name in mine else 0)).all()), name
    assert plan(model, 1) == {}
    assert split(model, {}, 0, 1, None) is model


def test_a_part_of_the_model_is_split_by_the_whole_plan():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), nn.Linear(4, 2))
    ways = plan(model, 2)
    model[2] = nn.Identity()
    assert set(pieces(model, ways, 2, 1)) == {"0.weight", "0.bias"}
    split(model, ways, 1, 2, None)
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias", "3.weight", "3.bias"]
    assert model[0].weight.shape == (4, 4)


def test_one_layer_alone_and_one_at_two_places():
    lone = nn.Linear(4, 6)
    assert split(lone, plan(lone, 2, {"": "out"}), 0, 2, None).weight.shape == (3, 4)
    twice = nn.Linear(4, 4)
    model = nn.Sequential(twice, nn.ReLU(), twice)
    with pytest.raises(WorkloadError, match="no layer can be split among 2 workers automatically"):
        plan(model, 2)
    split(model, plan(model, 2, {"0": "out"}), 0, 2, None)
    assert model[0] is model[2]


def model_of_all():
    return nn.ModuleDict(
        {
            "conv": nn.Conv2d(3, 8, 3),
            "fc": nn.Linear(6, 3),
            "attn": nn.MultiheadAttention(6, 3),
            "words": nn.Embedding(5, 4),
            "sharp": nn.Embedding(9, 4, max_norm=1.0),
            "block": encoder(layers=1),
            "normed": nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        }
    )


@pytest.mark.parametrize(
    ("given", "size", "words"),
    [
        ({"fcc": "out"}, 2, "plan names 'fcc', and the model has no such layer: did you mean 'fc'?"),
        (
            {"zzzzzz.*": "out"},
            2,
            "no such layer: layers that can be split are 'fc', 'attn', 'words', 'block.layers.0.self_attn' ...",
        ),
        ({"conv": "out"}, 2, "the layer 'conv' (Conv2d) cannot be split: rayps splits Linear (out, in), Embedding "),
        ({"block": "heads"}, 2, "'block' (TransformerEncoder) cannot be split: name the layers in it instead: 'b"),
        ({"fc": "heads"}, 2, "plan['fc'] is 'heads', and Linear can be split by out or in"),
        ({"conv*": "out"}, 2, "plan['conv*'] is 'out', and no layer of that name can be split in this way"),
        (
            {"sharp": "rows"},
            2,
            "'sharp' (Embedding) cannot be split: it has its own forward(), hooks or options (max_norm)",
        ),
        ({"normed": "out"}, 2, "cannot be split: it has its own forward(), hooks"),
        ({"fc": "rowwise"}, 2, "which means one thing in papers"),
        ({"fc": "sideways"}, 2, "give out, in, heads, rows or none"),
        ({"fc": "in*2"}, 2, "give out, in, heads, rows or none"),
        (
            {"fc": "out:2"},
            2,
            "plan splits layer 'fc' as out:2 (in units of 2 outputs): its number of outputs must be a multiple of 2, "
            "and it is 3. Change the unit",
        ),
        (
            {"fc": "out*2:3"},
            2,
            "plan splits layer 'fc' as out*2:3 (2 blocks, in units of 3 outputs): its number of outputs must be a "
            "multiple of 2 * 3 = 6, and it is 3. Change the blocks or the unit",
        ),
        ({"fc": "out"}, 4, "size is 4, but the layer 'fc' (Linear) has 3 outputs: every worker needs at least one"),
        ({"fc": "in:3"}, 3, "size is 3, but the layer 'fc' (Linear) has 2 units of 3 inputs"),
        ({"attn": "heads"}, 4, "size is 4, but the layer 'attn' (MultiheadAttention) has 3 heads"),
        ({"words": "rows"}, 6, "size is 6, but the layer 'words' (Embedding) has 5 rows"),
    ],
    ids=str,
)
def test_bad_plans_say_the_way_out(given, size, words):
    with pytest.raises(RaypsError, match=re.escape(words)):
        plan(model_of_all(), size, given)


def test_names_with_stars_and_their_order():
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    ways = plan(model, 2, {"*": "out", "2": "none", "3": "in"})
    assert ways == {"0": LayerSplit("out", 8), "1": LayerSplit("out", 8), "3": LayerSplit("in", 8)}
    assert plan(model, 2, {"[01]*": "none", "3": "in"}) == {"3": LayerSplit("in", 8)}


def test_split_layers_without_a_ring_say_so():
    net = split(One(4, 4), {"layer": LayerSplit("out", 4)}, 0, 2, None)
    with pytest.raises(ConfigError, match="pass a ring to split\\(\\)"):
        net(torch.zeros(1, 4))


def test_a_model_that_cannot_be_split_by_itself_is_told_a_layer_of_its_own():
    tied = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))
    tied[1].weight = tied[0].weight
    with pytest.raises(WorkloadError, match=r"share weights are left whole\).*plan=\{'0': 'out'\}"):
        plan(tied, 2)
    with pytest.raises(WorkloadError, match="use a pipeline instead"):
        plan(nn.Sequential(nn.Conv2d(1, 2, 3)), 2)

"""Embeddings over tables: the same numbers as torch's own modules, to the bit; ids, strings, bags, errors."""

import copy
import gc
import hashlib

import numpy as np
import pytest
import torch
from rayps_client.errors import CheckpointError, ConfigError, DataError, WorkloadError
from torch import nn
from torch.nn import functional

import rayps
from rayps.ps.tables import embedding
from rayps.ps.tables.embedding import Embedding, EmbeddingBag, hash_ids, ids_of, tables_of
from rayps.ps.tables.row_lifecycle import RowPolicy
from rayps.ps.tables.table_segment import TableSegment
from rayps.ps.tables.wire_format import bucket
from rayps.strategies.parameter_server import ParameterServer

ROWS, DIM = 40, 6
RULES = {
    "sgd:lr=0.3": lambda params: torch.optim.SGD(params, lr=0.3),
    "adagrad:lr=0.1": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "adam:lr=0.01": lambda params: torch.optim.SparseAdam(params, lr=0.01),
}


def twin(module, kind=nn.Embedding, **options):
    """torch's own module with the same weights."""
    found = kind(ROWS, module.dim, dtype=getattr(torch, module.table.dtype), **options)
    with torch.no_grad():
        found.weight.copy_(weights(module))
    return found


def weights(module):
    with torch.no_grad():
        if isinstance(module, EmbeddingBag):
            return module(torch.arange(ROWS)[:, None])
        return module(torch.arange(ROWS))


def stored(module):
    """Ids and true counts of the rows that the module's table has stored."""
    client = module._client()
    segment = client.session.segments[client.first]
    columns = segment.store.export()
    return dict(zip(columns.ids.tolist(), columns.life[:, 0].tolist(), strict=True))


def batches(seed, count=5, shape=(7, 3)):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, ROWS, shape, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rule", RULES)
def test_steps_equal_those_of_torch_to_the_bit(rule, dtype):
    mine = Embedding(DIM, "users", seed=3, optimizer=rule, dtype=dtype)
    other = twin(mine, sparse=rule.startswith("adam"))
    assert other.weight.abs().min() > 0 or dtype == "float32"
    optimizer = RULES[rule](other.parameters())
    # torch's dense optimizers step all rows; those without a gradient stay where they are under these rules
    for ids in batches(1):
        weight = torch.rand(*ids.shape, DIM, dtype=other.weight.dtype)
        for module in (mine, other):
            ((module(ids) * weight).sum() ** 2).backward()
        embedding.step(mine)
        optimizer.step()
        optimizer.zero_grad()
        if rule.startswith("adam"):  # ours counts the steps of each row: see the test of the rules
            break
        assert torch.equal(weights(mine), other.weight)
    assert torch.equal(weights(mine), other.weight)


@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (2, 3, 4), (0,), (2, 0)])
def test_any_shape_of_ids(shape):
    module = Embedding(DIM, "users")
    ids = torch.randint(0, ROWS, shape)
    assert torch.equal(module(ids), twin(module)(ids))
    assert module(ids).shape == (*shape, DIM)


def test_several_lookups_of_a_step_are_one_push():
    mine = Embedding(DIM, "users", optimizer="adagrad:lr=0.1")
    other = twin(mine)
    optimizer = torch.optim.Adagrad(other.parameters(), lr=0.1)
    a, b = torch.tensor([1, 2, 2]), torch.tensor([[2, 9], [1, 30]])
    for module in (mine, other):
        loss = (module(a).sum(0) * module(b).sum((0, 1))).sum() + module(a).pow(2).sum()
        loss.backward()
    embedding.step(mine)
    optimizer.step()
    assert torch.allclose(weights(mine), other.weight, rtol=0, atol=1e-7)  # another order of adding up
    assert stored(mine) == {1: 3, 2: 5, 9: 1, 30: 1}  # raw counts, duplicates counted


def test_two_backwards_add_up_and_a_forward_alone_leaves_nothing():
    module = Embedding(DIM, "users", optimizer="sgd:lr=1")
    before, ids = weights(module), torch.tensor([4])
    module(ids).sum().backward()
    module(ids).sum().backward()
    module(torch.tensor([8]))  # no backward
    gc.collect()
    embedding.step(module)
    assert torch.equal(weights(module)[4], before[4] - 2)
    assert stored(module) == {4: 2}
    embedding.step(module)  # nothing is left
    assert torch.equal(weights(module)[4], before[4] - 2)


def test_evaluation_makes_no_rows():
    module = Embedding(DIM, "users")
    with torch.no_grad():
        assert not module(torch.tensor([1, 2])).requires_grad
    assert stored(module) == {}


def test_a_row_begins_alike_everywhere():
    ids = torch.tensor([7, 2**62, 0])
    one, other = Embedding(DIM, "users", seed=5), Embedding(DIM, "users", seed=5, optimizer="sgd", segments=3)
    assert torch.equal(one(ids), other(ids)) and torch.equal(one(ids[:1]), other(ids)[:1])
    assert not torch.equal(one(ids), Embedding(DIM, "users", seed=6)(ids))


# ---------------------------------------------------------------------------------------------- bags


BAGS = [
    (torch.tensor([[1, 2, 2], [3, 3, 3]]), None),
    (torch.tensor([1, 2, 2, 3, 4]), torch.tensor([0, 3])),
    (torch.tensor([1, 2, 2, 3, 4]), torch.tensor([0, 0, 3, 5, 5])),  # empty ones: in front, amid, at the end
    (torch.tensor([], dtype=torch.int64), torch.tensor([0, 0])),
]


@pytest.mark.parametrize("case", range(len(BAGS)))
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_equal_those_of_torch(mode, case):
    ids, offsets = BAGS[case]
    mine = EmbeddingBag(DIM, "genres", mode=mode, optimizer="sgd:lr=0.5")
    other = twin(mine, nn.EmbeddingBag, mode=mode)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.5)
    found, expected = mine(ids, offsets), other(ids, offsets)
    assert torch.equal(found, expected)
    if ids.numel():
        for out in (found, expected):
            (out**2).sum().backward()
        embedding.step(mine)
        optimizer.step()
    assert torch.equal(weights(mine), other.weight)


def test_weights_of_samples():
    ids, weight = torch.tensor([[1, 2], [2, 3]]), torch.tensor([[0.5, 2.0], [1.0, -1.0]])
    module = EmbeddingBag(DIM, "genres", mode="sum")
    expected = functional.embedding_bag(ids, weights(module), mode="sum", per_sample_weights=weight)
    assert torch.equal(module(ids, per_sample_weights=weight), expected)


@pytest.mark.parametrize(
    "ids, offsets", [(torch.tensor([1, 2]), None), (torch.tensor([[1]]), torch.tensor([0])), (torch.tensor(3), None)]
)
def test_bags_say_what_shape_they_want(ids, offsets):
    with pytest.raises(WorkloadError, match="'genres' got ids of shape"):
        EmbeddingBag(DIM, "genres")(ids, offsets)


# ---------------------------------------------------------------------------------------------- ids


def test_strings_are_the_low_63_bits_of_their_blake2b():
    digest = hashlib.blake2b(b"N14228", digest_size=8).digest()
    assert hash_ids(["N14228"]).tolist() == [int.from_bytes(digest, "little") % 2**63]
    assert torch.equal(ids_of([["a", "b"], ["b", "ü"]]), hash_ids(np.array([["a", "b"], ["b", "ü"]])))
    assert hash_ids([b"a"]).tolist() == hash_ids(["a"]).tolist()
    module = Embedding(DIM, "users")
    assert torch.equal(module(["a", "b", "a"])[0], module(np.array(["a"]))[0])
    assert len(set(hash_ids([str(i) for i in range(10_000)]).tolist())) == 10_000


@pytest.mark.parametrize("ids", [[3, 5], np.array([3, 5], np.int32), torch.tensor([3, 5], dtype=torch.int32)])
def test_whole_numbers_in_any_wrapping(ids):
    module = Embedding(DIM, "users")
    assert torch.equal(module(ids), module(torch.tensor([3, 5])))


@pytest.mark.parametrize(
    "ids, error, text",
    [
        (torch.tensor([1.0, 2.0]), WorkloadError, "table 'users' have dtype float32"),
        ([1.5], WorkloadError, "float64"),
        (torch.tensor([True]), WorkloadError, "bool"),
        (["a", None], WorkloadError, "None among strings"),
        (torch.tensor([3, -1]), DataError, "id -1 of table 'users' is negative"),
    ],
)
def test_ids_that_cannot_be(ids, error, text):
    with pytest.raises(error, match=text):
        Embedding(DIM, "users")(ids)


# ---------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    "options, field",
    [
        ({"dim": 0}, "dim"),
        ({"dim": 2.5}, "dim"),
        ({"table": "a/b"}, "table"),
        ({"table": ""}, "table"),
        ({"seed": -1}, "seed"),
        ({"init": "nothing"}, "init"),
        ({"init": {"scale": 1}}, "init"),
        ({"optimizer": "lion"}, "optimizer"),
        ({"optimizer": "sgd:lr=x"}, "optimizer"),
        ({"optimizer": "sgd:b=1"}, "optimizer"),
        ({"policy": {"admit": 0}}, "policy"),
        ({"policy": "lru"}, "policy"),
        ({"dtype": "int64"}, "dtype"),
        ({"wire": "int8"}, "wire"),
        ({"segments": 0}, "segments"),
    ],
)
def test_arguments_that_cannot_be(options, field):
    with pytest.raises(ConfigError) as caught:
        Embedding(**{"dim": 4, "table": "users", **options})
    assert caught.value.data["field"] == field


def test_mode_that_cannot_be():
    with pytest.raises(ConfigError, match="mode is 'max': give one of sum, mean"):
        EmbeddingBag(4, "users", mode="max")


def test_a_policy_may_be_an_object():
    assert Embedding(4, "users", policy=RowPolicy(admit=3)).table.policy == {"admit": 3}


class Two(nn.Module):
    def __init__(self, **other):
        super().__init__()
        self.a = Embedding(4, "users")
        self.b = EmbeddingBag(**{"dim": 4, "table": "users", **other})
        self.c = Embedding(2, "films")


def test_modules_of_one_name_share_one_table():
    model = Two()
    assert [table.name for table in tables_of(model)] == ["users", "films"]
    assert tables_of(nn.Linear(1, 1)) == ()
    tables = embedding.local(model)
    model.a(torch.tensor([1])).sum().backward()
    model.b(torch.tensor([[1]])).sum().backward()
    embedding.step(model)
    assert tables.step == 1
    with torch.no_grad():
        assert torch.equal(model.a(torch.tensor([1])), model.b(torch.tensor([[1]])))
    assert stored(model.a) == {1: 2}


@pytest.mark.parametrize(
    "other, field",
    [({"dim": 8}, "dim"), ({"seed": 1}, "seed"), ({"optimizer": "sgd"}, "optimizer"), ({"wire": "bf16"}, "wire")],
)
def test_modules_of_one_name_must_agree(other, field):
    with pytest.raises(ConfigError, match=f"table 'users' has {field}"):
        tables_of(Two(**other))


def test_a_copy_has_rows_of_its_own():
    module = Embedding(DIM, "users", optimizer="sgd:lr=1")
    module(torch.tensor([1])).sum().backward()
    embedding.step(module)
    assert stored(module) == {1: 1} and stored(copy.deepcopy(module)) == {}


def test_half_of_what_travels():
    module = Embedding(DIM, "users", wire="bf16")
    exact = Embedding(DIM, "users")
    ids = torch.arange(5)
    assert torch.equal(module(ids), exact(ids).to(torch.bfloat16).float())
    module(ids).sum().backward()
    embedding.step(module)
    assert module(ids).dtype is torch.float32 and stored(module) == dict.fromkeys(range(5), 1)


# ---------------------------------------------------------------------------------------------- before training


class Users(rayps.Workload):
    """Whatever is wrong with its ids."""

    def __init__(self, x, lookups=None):
        self.x, self.told = x, lookups

    def model(self):
        return nn.ModuleDict({"users": Embedding(4, "users"), "out": nn.Linear(4, 1)})

    def data(self):
        return rayps.data.tensors(self.x, batch_size=4)

    def loss(self, model, batch):
        return model["out"](model["users"](batch.x)).mean()

    def lookups(self, batch):
        return {"users": batch.x} if self.told is None else self.told


def test_a_workload_that_is_right():
    work = Users(torch.arange(8))
    model = work.model()
    embedding.try_out(work, model)
    assert stored(model["users"]) == {}


@pytest.mark.parametrize(
    "work, text",
    [
        (Users(torch.arange(8.0)), "have dtype float32"),
        (Users(torch.arange(8) - 9), "is negative"),
        (Users(torch.arange(8), {"films": 1}), "of table 'films', but the model's tables are: users"),
        (Users(torch.arange(8), 3), "lookups.* returned int"),
        (Users(torch.arange(8), {"users": torch.ones(2)}), "have dtype float32"),
    ],
)
def test_what_is_wrong_is_said_before_training(work, text):
    with pytest.raises(rayps.RaypsError, match=text):
        embedding.try_out(work, work.model())


# ---------------------------------------------------------------------------------------------- on disk


def trained(seed=0):
    model = Two()
    embedding.local(model)
    for ids in batches(seed, 3):
        (model.a(ids).sum() + model.c(ids + 1).pow(2).sum()).backward()
        embedding.step(model)
    return model


def test_a_model_is_saved_and_goes_on_alike(tmp_path):
    model = trained()
    embedding.save(model, tmp_path)
    again = embedding.load(Two(), tmp_path)
    for each in (model, again):
        (each.a(torch.arange(9)).sum() ** 2 + each.c(torch.arange(9)).sum() ** 2).backward()
        embedding.step(each)
    assert torch.equal(weights(model.a), weights(again.a)) and torch.equal(weights(model.c), weights(again.c))
    assert stored(model.a) == stored(again.a)


def test_states_of_several_segments_are_one_table():
    model = trained()
    table = model.a.table
    cut = [TableSegment(table, index, ParameterServer(staleness=0), 1) for index in range(table.segments)]
    segment = model.a._client().session.segments[0]
    columns = segment.store.export()
    for index, part in enumerate(cut):
        part.store.load(columns.take(np.flatnonzero(bucket(columns.ids, table.segments) == index)))
    again = embedding.load_states(Two(), {"users": [part.dump() for part in cut]})
    assert torch.equal(weights(model.a), weights(again.a)) and stored(model.a) == stored(again.a)


def test_what_is_not_there_cannot_be_loaded(tmp_path):
    with pytest.raises(CheckpointError):
        embedding.load(Two(), tmp_path / "none")


def test_words_among_numbers_are_refused():
    table = Embedding(2, "words")
    for given in (["a", 1], [["a", "b"], ["c", 2]]):
        with pytest.raises(WorkloadError, match="among strings: give only strings"):
            table(given)
    assert torch.equal(table(["a", "b"]), table(np.array(["a", "b"])))


@pytest.mark.parametrize("offsets", [[1, 2], [0, 3, 2], [0, 5], [[0, 1]], [0.0, 1.0]])
def test_offsets_that_cannot_be_say_what_can(offsets):
    bag = EmbeddingBag(2, "bags")
    with pytest.raises(WorkloadError, match=r"'bags' got offsets \[.* for 4 ids: .* of which the first is 0 and none"):
        bag(torch.arange(4), torch.tensor(offsets))
    assert bag(torch.arange(4), torch.tensor([0, 2, 2, 4])).shape == (4, 2)

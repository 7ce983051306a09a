"""How a model is divided among workers, what each of them holds, and what is refused before anything starts."""

import pickle
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from rayps_client.errors import ConfigError, RaypsError, TrainingError, WorkloadError
from small_work import Small, distance, kinds, rows, train
from torch import nn

import rayps
from rayps import AllReduce, ParameterServer
from rayps.cluster.local import LocalCluster
from rayps.core.grid import Grid
from rayps.core.job.repeated_pushes import Ledger
from rayps.core.strategy.replica import Pipeline, TensorParallel
from rayps.parallel.division.build import keep_only
from rayps.parallel.division.divide import divide
from rayps.runtime.records.status import add_replicas
from rayps.tensors import optim
from rayps.tensors.division import TensorSlice, divide_servers
from rayps.tensors.flat import FlatModel, find_outside_vector
from rayps.tensors.snapshot import Snapshot
from rayps.tensors.subset_optimizer import of_some
from rayps.workload.blank_model import blank
from rayps.workload.model import drawn, drawn_apart


class Deep(Small):
    """Three layers that learn, one norm, one weight that does not."""

    def __init__(self, batch=8, **options):
        super().__init__(batch=batch, **options)

    def model(self):
        model = nn.Sequential(
            nn.BatchNorm1d(5), nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6), nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 1)
        ).double()
        model[3].bias.requires_grad_(False)
        return model


REPLICAS = [
    Pipeline(stages=2),
    Pipeline(stages=3),
    Pipeline(stages=2, chunks=2, schedule="interleaved"),
    TensorParallel(size=2),
    TensorParallel(size=3),
    Pipeline(stages=2, stage=TensorParallel(size=2)),
]


def division_of(work, replica):
    torch.manual_seed(0)
    return divide(work, replica, work.model())


def state(work):
    """A whole state with moments, buffers and ledgers."""
    torch.manual_seed(4)
    model = work.model()
    flat = FlatModel(model)
    optimizer = torch.optim.Adam(flat.parameters, lr=0.1)
    for _ in range(3):
        model(torch.randn(6, 5, dtype=torch.float64)).square().sum().backward()
        optimizer.step()
    buffers = {name: value.clone() for name, value in find_outside_vector(model).items()}
    moments = optim.copy_moments(optimizer, flat.layout, flat.parameters)
    return Snapshot(flat.layout, flat.vector.clone(), moments, buffers, {}, [6, 6], 3)


@pytest.mark.parametrize(
    ("piece", "local"),
    [
        (TensorSlice("w", (4, 3)), (4, 3)),
        (TensorSlice("w", (4, 3), 0, ((1, 3),)), (2, 3)),
        (TensorSlice("w", (4, 6), 1, ((0, 1), (4, 6))), (4, 3)),
        (TensorSlice("w", (5,), 0, ((4, 5), (0, 2))), (3,)),
        (TensorSlice("w", (), None), ()),
    ],
)
def test_a_piece_is_taken_and_put_back(piece, local):
    whole = torch.arange(torch.Size(piece.shape).numel(), dtype=torch.float64).view(piece.shape)
    part = piece.take(whole)
    assert tuple(part.shape) == piece.local == local
    assert piece.size == part.numel()
    other = torch.full_like(whole, -1.0)
    piece.put(part, other)
    assert torch.equal(other[other >= 0].sort().values, part.reshape(-1).sort().values)
    assert torch.equal(torch.where(other < 0, whole, other), whole)


@pytest.mark.parametrize("replica", REPLICAS, ids=str)
def test_the_columns_own_everything_once(replica):
    division = division_of(Deep(), replica)
    assert len(division.columns) == replica.stages * replica.tensor
    assert sum(column.layout.size for column in division.columns) == division.layout.size
    assert {piece.name for column in division.columns for piece in column.owned} == {
        entry.name for entry in division.layout.entries
    }
    for number, column in enumerate(division.columns):
        for lent in column.borrowed:
            owner = division.columns[lent.owner]
            held = [*owner.owned, *(other.piece for other in owner.borrowed)]
            assert lent.owner != number and lent.piece in held
    assert pickle.loads(pickle.dumps(division)).key == division.key


@pytest.mark.parametrize("replica", REPLICAS, ids=str)
def test_a_state_is_cut_and_joined_again(replica):
    work = Deep()
    division, snapshot = division_of(work, replica), state(work)
    snapshot.rng = {0: torch.get_rng_state()}
    parts = [division.cut(snapshot, column) for column in range(len(division.columns))]
    back = division.join(parts, snapshot)
    assert torch.equal(back.params, snapshot.params)
    assert list(back.moments) == list(snapshot.moments)
    for name, moments in snapshot.moments.items():
        assert all(torch.equal(back.moments[name][key], value) for key, value in moments.items()), name
    assert back.buffers.keys() == snapshot.buffers.keys()
    assert all(torch.equal(back.buffers[name], value) for name, value in snapshot.buffers.items())
    assert (back.positions, back.steps_per_epoch, list(back.rng)) == ([6, 6], 3, [0])


def test_ledgers_stay_with_their_columns_and_are_never_read_as_anothers():
    work = Deep()
    snapshot = state(work)
    two, three = division_of(work, REPLICAS[0]), division_of(work, REPLICAS[1])
    ahead, behind = Ledger([7, 6], {0: [9]}), Ledger([6, 8])
    parts = [two.cut(snapshot, 0), two.cut(snapshot, 1)]
    parts[0].ledgers = [(0, parts[0].layout.size, ahead)]
    parts[1].ledgers = [(0, 3, behind), (3, parts[1].layout.size, ahead)]
    whole = two.join(parts, snapshot)
    assert two.cut(whole, 0).ledgers == parts[0].ledgers
    assert two.cut(whole, 1).ledgers == parts[1].ledgers
    for one in (three.cut(whole, 0), three.cut(whole, 1), three.cut(whole, 2)):  # nothing may be added twice
        assert one.ledger(0, one.layout.size) == Ledger([7, 8], {0: [9]})


def test_positions_of_a_replica_are_those_of_its_slowest_part():
    work = Deep()
    snapshot, division = state(work), division_of(work, REPLICAS[0])
    parts = [division.cut(snapshot, 0), division.cut(snapshot, 1)]
    parts[0].positions, parts[1].positions = [5, 7], [6, 6]
    assert division.join(parts, snapshot).positions == [5, 6]


@pytest.mark.parametrize(
    ("count", "sizes", "found"),
    [
        (3, [10, 10, 10], [1, 1, 1]),
        (5, [10, 30], [2, 3]),
        (4, [10, 30], [1, 3]),
        (2, [1, 1000], [1, 1]),
        (6, [20, 0, 20], [3, 1, 2]),
    ],
)
def test_servers_go_where_the_parameters_are(count, sizes, found):
    assert divide_servers(count, sizes) == found


# ---- what a worker holds


def held(module):
    """Elements of parameters that take memory, each once."""
    return sum(p.numel() for p in {id(p): p for p in module.parameters()}.values() if not p.is_meta)


@pytest.mark.parametrize("replica", [Pipeline(stages=2), Pipeline(stages=3)], ids=str)
def test_a_worker_has_no_memory_for_others_parameters(replica):
    work = Deep()
    division = division_of(work, replica)
    for column in division.columns:
        model = blank(work)
        names = {piece.name for piece in (*column.owned, *column.untrained)}
        kept = {id(v) for n, v in [*model.named_parameters(), *model.named_buffers()] if n in names}
        keep_only(model, kept)
        frozen = sum(piece.size for piece in column.untrained if piece.name.endswith("3.bias"))
        assert held(model) == column.held + frozen < division.layout.size


class Reads(Deep):
    """Its model reads a number while it is built."""

    def model(self):
        model = super().model()
        model.scale = float(torch.ones(1).sum())
        return model


class Keeps(Deep):
    """A tensor of its model is no buffer."""

    def model(self):
        model = super().model()
        model.table = [torch.arange(3)]
        return model


@pytest.mark.parametrize(("kind", "meta"), [(Deep, True), (Reads, False), (Keeps, False)])
def test_a_model_that_cannot_be_built_without_memory_is_built_with_it(kind, meta):
    assert all(p.is_meta == meta for p in blank(kind()).parameters())


@pytest.mark.parametrize("kind", [Deep, Reads, Keeps])
def test_each_of_them_trains(kind):
    strategy = AllReduce(replica=Pipeline(stages=2, micro_batches=1))
    result = train(kind(n=32), strategy, workers=2, epochs=2)
    alone = train(kind(n=32), workers=1, epochs=2)
    assert distance(result.model(), alone.model()) < 1e-12


def test_ties_and_lists_of_parameters_survive():
    model = nn.Sequential(nn.Embedding(7, 4), nn.LSTM(4, 4), nn.Linear(4, 7, bias=False))
    model[2].weight = model[0].weight
    keep_only(model, {id(model[0].weight), *map(id, model[1].parameters())}, "cpu")
    assert model[2].weight is model[0].weight
    keep_only(model, {id(p) for p in model[1].parameters()})
    assert model[2].weight is model[0].weight and model[0].weight.is_meta
    with torch.device("meta"):
        other = nn.LSTM(4, 4)
    keep_only(other, {id(p) for p in other.parameters()})
    for p in other.parameters():
        nn.init.ones_(p)
    assert other(torch.ones(2, 3, 4))[0].shape == (2, 3, 4)


def test_the_beginning_is_drawn_without_touching_the_users_random_numbers():
    torch.manual_seed(8)
    before = torch.get_rng_state()
    apart = drawn_apart(Small(), 3)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(apart.params, drawn(Small(), 3).params)


def test_an_optimizer_of_some_knows_the_groups_of_all():
    layout = FlatModel(Small().model()).layout
    mine = [nn.Parameter(torch.ones(e.shape, dtype=layout.dtype)) for e in layout.entries[1:3]]

    def factory(params):
        assert [tuple(p.shape) for p in params] == [e.shape for e in layout.entries]
        return torch.optim.Adagrad([{"params": params[:2], "lr": 0.5}, {"params": params[2:], "lr": 0.25}])

    made = optim.made(of_some(factory, layout, [e.name for e in layout.entries[1:3]]), mine)
    assert [(group["lr"], group["params"]) for group in made.param_groups] == [(0.5, mine[:1]), (0.25, mine[1:])]
    assert set(made.state) == set(mine)
    with pytest.raises(WorkloadError, match="return a torch"):
        optim.made(of_some(lambda params: 3, layout, [e.name for e in layout.entries[1:3]]), mine)


def test_what_everyone_holds_is_told():
    result = train(Deep(n=32), AllReduce(replica=Pipeline(stages=2, micro_batches=1)), workers=2)
    event = next(event for event in result.events if event["kind"] == "divided")
    assert sum(column["owned"] for column in event["columns"]) == result.snapshot.layout.size
    for word in ("stage 0: layers 0 to", "stage 1: layers", "parameters", "MB", "2 workers"):
        assert word in event["message"]
    assert division_of(Deep(), REPLICAS[5]).describe().count("tensor rank 1") == 2


# ---- what is refused


class Watch(LocalCluster):
    """Nothing may be started on it."""

    def reserve(self, *args, **options):
        raise AssertionError("something was started")

    spawn = reserve


class Plain(Small):
    """A model that cannot be cut."""

    def model(self):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.line = nn.Linear(5, 1)

            def forward(self, x):
                return self.line(x)

        return Net().double()


class Skips(Small):
    """A skip connection that a cut breaks."""

    def model(self):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b, self.c = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 1)

            def layers(self):
                return [self.a, self.b, self.c]

            def forward(self, x):
                y = self.a(x)
                return self.c(self.b(y) + y)

        return Net().double()


class Many(Small):
    """One layer with few outputs."""

    def model(self):
        return nn.Sequential(nn.Linear(5, 2), nn.Linear(2, 1)).double()


REFUSED = [
    (Deep(), AllReduce(replica=Pipeline(stages=2)), 3, ["workers is 3", "multiple of 2", "such as 2"]),
    (Deep(), ParameterServer(replica=TensorParallel(size=2)), 1, ["workers is 1", "2 workers"]),
    (Deep(), AllReduce(replica=Pipeline(stages=9)), 9, ["stages is 9", "7 layers", "at most 7"]),
    (Deep(), AllReduce(replica=Pipeline(stages=4, chunks=2, schedule="interleaved")), 4, ["7 layers", "at most 3"]),
    (Deep(), AllReduce(replica=Pipeline(stages=2, boundaries=[7])), 2, ["boundaries", "7 layers"]),
    (Deep(batch=3), AllReduce(replica=Pipeline(stages=2)), 2, ["micro_batches is 4", "batch_size is 3"]),
    (Plain(batch=4), AllReduce(replica=Pipeline(stages=2)), 2, ["cannot cut Net", "Sequential", "layers()"]),
    (Skips(batch=4), AllReduce(replica=Pipeline(stages=2)), 2, ["'c'", "would break the model"]),
    (Many(), AllReduce(replica=TensorParallel(size=3, plan={"0": "out"})), 3, ["'0'"]),
    (Deep(), AllReduce(replica=TensorParallel(size=2, plan={"nothing": "out"})), 2, ["nothing"]),
]


@pytest.mark.parametrize(("work", "strategy", "workers", "said"), REFUSED, ids=lambda given: None)
def test_what_cannot_be_divided_is_refused_before_anything_starts(work, strategy, workers, said):
    with pytest.raises(RaypsError) as caught:
        train(work, strategy, cluster=Watch(), workers=workers)
    assert isinstance(caught.value, (ConfigError, WorkloadError))
    for word in said:
        assert word in str(caught.value), caught.value


def test_an_optimizer_that_is_not_elementwise_cannot_step_parts_of_a_layer():
    class Whole(Deep):
        def optimizer(self, params):
            return torch.optim.Adafactor(params, lr=0.01)

    with pytest.raises(WorkloadError, match=r"elementwise|sliced|slices"):
        train(Whole(), AllReduce(replica=TensorParallel(size=2)), cluster=Watch(), workers=2)
    train(Whole(n=16), AllReduce(replica=Pipeline(stages=2, micro_batches=2)), workers=2)


@pytest.mark.parametrize("replicas", [None, 1])
def test_no_replica_of_several_workers_with_tables(replicas):
    class Tables(Small):
        def model(self):
            return nn.Sequential(rayps.Embedding(4, "ids"), nn.Linear(4, 1))

        def data(self):
            _, y = rows(16)
            return rayps.data.tensors(torch.arange(16) % 9, y.float(), batch_size=4)

    strategy = ParameterServer(shards=2, replicas=replicas, replica=Pipeline(stages=2))
    with pytest.raises(ConfigError, match="sparse tables") as caught:
        train(Tables(), strategy, cluster=Watch(), workers=2)
    for word in ("pipeline", "'ids'", "leave out replica", "dense embedding"):
        assert word in str(caught.value)
    assert caught.value.data["field"] == "replica"


def test_a_step_that_is_not_finite_says_who_and_where():
    class Bad(Deep):
        def loss(self, model, batch):
            return super().loss(model, batch) * float("nan")

    with pytest.raises(TrainingError, match="the loss became nan on worker-1 at round 0"):
        train(Bad(n=32), AllReduce(replica=Pipeline(stages=2)), workers=2)


def test_a_mistake_of_the_users_on_one_stage_is_what_is_said():
    class Wrong(Deep):
        def evaluate(self, model, batch):
            return {"error": model(batch.x).abs().mean(), "odd": "text"}

    with pytest.raises(WorkloadError, match="odd"):
        train(Wrong(n=16), AllReduce(replica=Pipeline(stages=2)), workers=2)


def test_the_same_bits_after_a_resume(tmp_path):
    work = Deep(n=64, optimizer="adam")
    strategy = AllReduce(replica=Pipeline(stages=2, micro_batches=2, stage=TensorParallel(size=2)))
    whole = train(work, strategy, workers=4, steps=12, checkpoint=tmp_path / "whole", checkpoint_every=6)
    train(work, strategy, workers=4, steps=6, checkpoint=tmp_path / "parts")
    result = train(work, strategy, workers=4, steps=12, checkpoint=tmp_path / "parts", resume=True)
    assert result.snapshot.ring is None or set(result.snapshot.ring) == {"tensor:0:0", "tensor:0:1"}
    assert distance(result.model(), whole.model()) < 1e-14
    assert "resumed" in kinds(result)


def test_a_rank_is_called_by_the_axes_that_there_are():
    assert [Grid(2, 2).words(rank) for rank in range(4)] == [
        "replica 0, stage 0",
        "replica 0, stage 1",
        "replica 1, stage 0",
        "replica 1, stage 1",
    ]
    assert Grid(1, 2, 2).words(3) == "stage 1, tensor rank 1"
    assert Grid(3).words(1) == "replica 1" and Grid(1).words(0) == ""


def test_every_worker_of_a_replica_has_its_rate():
    lines = [
        {"rank": 0, "wait": 0.5, "samples_per_second": 0.0},
        {"rank": 1, "wait": 0.1, "samples_per_second": 80.0},
        {"rank": 2, "wait": 0.5, "samples_per_second": 0.0},
        {"rank": 3},
    ]
    found = add_replicas(lines, Grid(2, 2))
    assert [line.get("samples_per_second") for line in found] == [80.0, 80.0, 0.0, None]
    assert found[1]["part"] == "replica 0, stage 1" and add_replicas(lines, Grid(4)) is lines


class Slowly(rayps.Workload):
    def model(self):
        layers = []
        for _ in range(20):
            layers.append(torch.nn.Linear(3, 3))
            time.sleep(0.001)  # lets another thread draw
        return torch.nn.Sequential(*layers)

    def data(self):
        return rayps.data.tensors(torch.zeros(2, 3))

    def loss(self, model, batch):
        return model(batch.x).sum()


def test_threads_that_draw_at_once_draw_what_each_draws_alone():
    alone = [drawn(Slowly(), seed).params for seed in range(4)]
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(way, Slowly(), seed) for seed in range(4) for way in (drawn, drawn_apart)]
    for i, call in enumerate(calls):
        assert torch.equal(call.result().params, alone[i // 2])

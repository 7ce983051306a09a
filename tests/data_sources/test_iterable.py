"""Iterable data sets: no row twice, uneven ends by agreement, and a resume in the middle, each against plain torch."""

import importlib
import itertools
import pickle
import threading
from dataclasses import replace

import pytest
import torch
from rayps_client.errors import CheckpointError, ConfigError, DataError, WorkloadError
from small_work import SEEN, Small, Watched, distance, kinds, rows, train

import rayps
from rayps.core.rows.phase_rounds import OPEN, Calendar
from rayps.core.strategy.replica import Pipeline
from rayps.core.strategy.strategy import Phase
from rayps.data.position import from_json, to_json
from rayps.strategies.all_reduce import AllReduce
from rayps.worker.rows import evaluation_batches
from rayps.worker.rows.evaluation_batches import FEWEST, EvaluationFacts, count_most_batches


class Stream(torch.utils.data.IterableDataset):
    """Rows of several lengths: reader k of its shard has `lengths[k]` rows, others than in the epoch before."""

    def __init__(self, lengths, state=False, torchs=False):
        self.lengths, self.torchs, self.epoch, self.at = lengths, torchs, 0, 0
        if not state:
            self.state_dict = self.load_state_dict = None

    def set_epoch(self, epoch):
        self.epoch, self.at = epoch, 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        importlib.import_module("test_iterable").SEEN["loaded"] += state["at"] > 0  # 0 is the start of a pass
        self.at = state["at"]

    def __iter__(self):
        if self.torchs:
            info = torch.utils.data.get_worker_info()
            rank = info.id if info is not None else 0
        else:
            rank = rayps.data.shard().rank
        x, y = rows(self.lengths[rank], seed=100 * self.epoch + rank)
        for i in range(self.at, self.lengths[rank]):
            self.at = i + 1
            importlib.import_module("test_iterable").SEEN["items"] += 1
            yield x[i], y[i]


class Streamed(Small):
    """The small regression on streams of unequal lengths."""

    def __init__(self, lengths=(17, 9), ends="first", state=False, workers=None, torchs=False, shard="own", **options):
        self.accumulate = options.pop("accumulate", 1)
        super().__init__(**options)
        self.lengths, self.ends, self.state, self.workers = lengths, ends, state, workers
        self.torchs, self.shard = torchs, shard

    def data(self):
        found = rayps.data.iterable(
            Stream(self.lengths, self.state, self.torchs), batch_size=self.batch, ends=self.ends, shard=self.shard
        )
        return found if self.workers is None else found.loaded_by(self.workers)

    def evaluation_data(self):
        return rayps.data.tensors(*rows(12), batch_size=4)


def dealt(lengths, batch, epoch, accumulate=1):
    """The batches of each rank in an epoch. Micro-batches are one batch of as many rows: see test_accumulate."""
    batch *= accumulate
    found = []
    for rank, n in enumerate(lengths):
        x, y = rows(n, seed=100 * epoch + rank)
        found.append([(x[i : i + batch], y[i : i + batch]) for i in range(0, n, batch)])
    return found


def rounds_of(lengths, batch, epoch, ends, accumulate=1):
    """For each round of an epoch, the batches of the ranks that have one."""
    each = dealt(lengths, batch, epoch, accumulate)
    count = (min if ends == "first" else max)(map(len, each))
    return [[batches[k] if k < len(batches) else None for batches in each] for k in range(count)]


def plain(work, *, epochs):
    """The law of all_reduce: one process that takes the union of the ranks' batches."""
    torch.manual_seed(0)
    model = work.model()
    optimizer = work.optimizer(list(model.parameters()))
    samples = []
    for epoch in range(epochs):
        for parts in rounds_of(work.lengths, work.batch, epoch, work.ends, work.accumulate):
            there = [part for part in parts if part is not None]
            x, y = torch.cat([x for x, _ in there]), torch.cat([y for _, y in there])
            optimizer.zero_grad()
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
            samples.append(len(x))
    return model, samples


@pytest.mark.parametrize("ends", ["first", "last"])
@pytest.mark.parametrize("lengths", [(17, 9), (4, 20, 11), (12, 12), (7,)])
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_uneven_ranks_under_all_reduce_equal_plain_torch(ends, lengths, optimizer):
    work = Streamed(lengths, ends, optimizer=optimizer)
    model, samples = plain(work, epochs=3)
    found = train(work, workers=len(lengths), epochs=3)
    assert distance(found.model(), model) < 1e-12
    assert found.history.column("samples").to_pylist() == samples
    counts = [len(rounds_of(lengths, work.batch, epoch, ends)) for epoch in range(3)]
    assert found.history.column("epoch").to_pylist() == [e for e in range(3) for _ in range(counts[e])]
    evaluated = [v is not None for v in found.history.column("evaluation_loss").to_pylist()]
    assert [i + 1 for i, there in enumerate(evaluated) if there] == list(itertools.accumulate(counts))


@pytest.mark.parametrize("ends", ["first", "last"])
@pytest.mark.parametrize(("accumulate", "lengths"), [(2, (17, 9)), (3, (4, 20, 11)), (4, (12, 12)), (8, (7, 16))])
@pytest.mark.parametrize("strategy", ["all_reduce", "all_reduce:bucket_mb=0.0001", "all_reduce:compression=fp16"])
def test_micro_batches_of_uneven_ranks_are_one_batch(ends, accumulate, lengths, strategy):
    work = Streamed(lengths, ends, accumulate=accumulate, batch=2, optimizer="momentum")
    model, samples = plain(work, epochs=3)
    found = train(work, strategy, workers=len(lengths), epochs=3)
    assert distance(found.model(), model) < (1e-12 if "compression" not in strategy else 1e-2)
    assert found.history.column("samples").to_pylist() == samples


@pytest.mark.parametrize("ends", ["first", "last"])
def test_local_sgd_ends_an_epoch_of_micro_batches_with_an_average(ends):
    work = Streamed((35, 19, 26), ends, batch=2, accumulate=2)
    model, count = local(work, epochs=2, period=3)
    found = train(work, "local_sgd:period=3,buffers=keep", workers=3, epochs=2)
    assert found.history.num_rows == count
    assert distance(found.model(), model) < 1e-12


def test_servers_take_steps_of_micro_batches():
    work = Streamed((7, 12), "last", accumulate=2)
    found = train(work, "parameter_server:staleness=2", workers=2, steps=12)
    passes = [[len(x) for e in range(12) for x, _ in dealt(work.lengths, 3, e, 2)[r]][:12] for r in range(2)]
    assert found.history.column("samples").to_pylist() == [a + b for a, b in zip(*passes, strict=True)]


@pytest.mark.parametrize(
    ("state", "strategy", "workers", "at"),  # 7: in the first pass, after a rank's short last step; 17: in the second
    [
        (False, "all_reduce", None, 7),
        (True, "all_reduce", 0, 17),
        (True, "local_sgd:period=2", None, 7),
        (True, "local_sgd:period=2", 0, 17),
        (True, "all_reduce", 2, 7),
    ],
)
def test_a_resumed_run_of_micro_batches_equals_one_that_was_not_interrupted(tmp_path, state, workers, strategy, at):
    lengths = (55, 21) if workers != 2 else (31, 24, 11, 10)
    work = Streamed(lengths, "last", state=state, workers=workers, batch=1, accumulate=5, optimizer="momentum")
    SEEN["loaded"] = 0
    each = {"callbacks": [rayps.BestCheckpoint()], "evaluate_every": at, "keep_checkpoints": 9}
    whole = train(work, strategy, workers=2, epochs=2, checkpoint=tmp_path, **each)
    assert not SEEN["loaded"]
    resumed = train(work, strategy, workers=2, epochs=2, resume=tmp_path / f"step-{at:08}")
    assert distance(resumed.model(), whole.model()) == 0
    assert resumed.history.column("samples").to_pylist() == whole.history.column("samples").to_pylist()[at:]
    assert resumed.history.column("epoch").to_pylist() == whole.history.column("epoch").to_pylist()[at:]
    if workers != 2:  # the processes count elsewhere
        assert bool(SEEN["loaded"]) == state


@pytest.mark.parametrize("strategy", ["all_reduce", AllReduce(replica=Pipeline(stages=2))], ids=["whole", "pipeline"])
@pytest.mark.parametrize("lengths", [(13, 0), (9, 0, 4)])
def test_a_rank_without_any_batch_takes_part_with_empty_ones(strategy, lengths):
    work = Streamed(lengths, "last", optimizer="momentum", batch=4)
    model, samples = plain(work, epochs=2)
    workers = len(lengths) * (1 if strategy == "all_reduce" else 2)
    found = train(work, strategy, workers=workers, epochs=2)
    assert found.history.column("samples").to_pylist() == samples
    assert distance(found.model(), model) < 1e-12


def test_torchs_worker_info_names_the_shard():
    found = train(Streamed(torchs=True), workers=2)
    assert distance(found.model(), train(Streamed(), workers=2).model()) == 0


def test_compression_and_own_strategies_end_together():
    class Mean(rayps.Strategy):
        def round(self, w):
            w.step(w.ring.mean(w.grad(w.batch())))

    for strategy in (Mean(), "all_reduce:compression=fp16", "local_sgd:period=4,warmup=3"):
        found = train(Streamed((17, 9), "last"), strategy, workers=2, epochs=2)
        assert sum(found.history.column("samples").to_pylist()) == 2 * (17 + 9)


def local(work, *, epochs, period):
    """The law of local SGD: an epoch may end only with an average. A worker without a batch waits for it."""
    torch.manual_seed(0)
    models = [work.model() for _ in work.lengths]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    optimizers = [work.optimizer(list(model.parameters())) for model in models]
    t, weights = 0, [0] * len(models)
    for epoch in range(epochs):
        each = dealt(work.lengths, work.batch, epoch, work.accumulate)
        for k in itertools.count():
            for i, batches in enumerate(each):
                if k < len(batches):
                    x, y = batches[k]
                    optimizers[i].zero_grad()
                    ((models[i](x) - y) ** 2).mean().backward()
                    optimizers[i].step()
                    weights[i] += len(x)
            t += 1
            if t % period:
                continue
            total = sum(weights)
            with torch.no_grad():
                for several in zip(*(model.parameters() for model in models), strict=True):
                    mean = sum(p * n for p, n in zip(several, weights, strict=True)) / total
                    for p in several:
                        p.copy_(mean)
            weights = [0] * len(models)
            ended = [k + 1 >= len(batches) for batches in each]
            if (any if work.ends == "first" else all)(ended):
                break
    return models[0], t


@pytest.mark.parametrize("ends", ["first", "last"])
def test_local_sgd_ends_an_epoch_with_an_average(ends):
    work = Streamed((17, 9, 13), ends, batch=2)
    model, count = local(work, epochs=2, period=3)
    found = train(work, "local_sgd:period=3,buffers=keep", workers=3, epochs=2)
    assert found.history.num_rows == count
    assert distance(found.model(), model) < 1e-12


def test_servers_take_a_number_of_steps_and_each_worker_starts_its_next_pass_alone():
    work = Streamed((7, 12), "last")
    found = train(work, "parameter_server:staleness=2", workers=2, steps=12)
    assert found.history.num_rows == 12
    passes = [[len(x) for e in range(12) for x, _ in dealt(work.lengths, 3, e)[r]][:12] for r in range(2)]
    assert found.history.column("samples").to_pylist() == [a + b for a, b in zip(*passes, strict=True)]
    with pytest.raises(ConfigError, match=r"the data has no length, and parameter_server .* give steps="):
        train(work, "parameter_server", workers=2, epochs=2)


def test_steps_end_a_run_in_any_epoch():
    work = Streamed((9, 9))
    found = train(work, workers=2, steps=7)
    assert found.history.column("epoch").to_pylist() == [0, 0, 0, 1, 1, 1, 2]


def test_phases_follow_each_other_when_the_data_ends():
    work = Streamed((9, 12))
    found = train(work, [(2, "all_reduce"), (1, "local_sgd:period=2")], workers=2)
    assert found.history.column("strategy").to_pylist() == ["all_reduce"] * 6 + ["local_sgd"] * 4
    assert found.history.column("epoch").to_pylist() == [0] * 3 + [1] * 3 + [2] * 4


@pytest.mark.parametrize(
    ("state", "workers"),
    [(False, None), (True, None), (False, 0), (True, 0), (False, 2)],  # with state and processes: of micro-batches
)
def test_a_resumed_run_equals_one_that_was_not_interrupted(tmp_path, state, workers):
    lengths = (60, 45) if workers != 2 else (60, 45, 50, 40)
    work = Streamed(lengths, "last", state=state, workers=workers, batch=2)
    whole = train(work, workers=2, epochs=2)
    SEEN["loaded"] = 0
    train(work, workers=2, steps=45, checkpoint=tmp_path)
    assert not SEEN["loaded"]
    SEEN["items"] = 0
    resumed = train(work, workers=2, epochs=2, checkpoint=tmp_path, resume=True)
    assert distance(resumed.model(), whole.model()) == 0
    assert resumed.history.column("round").to_pylist()[0] == 45
    assert resumed.history.column("epoch").to_pylist() == whole.history.column("epoch").to_pylist()[45:]
    if workers != 2:  # the processes count elsewhere
        assert bool(SEEN["loaded"]) == state


def test_a_run_goes_on_after_its_last_epoch_with_more_epochs(tmp_path):
    work = Streamed()
    whole = train(work, workers=2, epochs=3)
    train(work, workers=2, epochs=2, checkpoint=tmp_path)
    again = train(work, workers=2, epochs=2, checkpoint=tmp_path, resume=True)
    assert again.history.num_rows == 0
    more = train(work, workers=2, epochs=3, checkpoint=tmp_path, resume=True)
    assert distance(more.model(), whole.model()) == 0


def test_resume_on_another_number_of_workers_or_processes_is_refused(tmp_path):
    work = Streamed((20, 20, 20, 20), workers=1)
    train(work, workers=2, steps=4, checkpoint=tmp_path)
    with pytest.raises(CheckpointError, match=r"written by 2 workers on data without a length[^$]*resume with 2 work"):
        train(work, workers=1, epochs=1, checkpoint=tmp_path, resume=True)
    work.workers = 2
    with pytest.raises(CheckpointError, match=r"with 1 loader processes .*\ngive loaded_by\(1\)"):
        train(work, workers=2, epochs=1, checkpoint=tmp_path, resume=True)


class Stride(torch.utils.data.IterableDataset):
    """Every n-th row, from a row that the state names."""

    at = None

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]

    def __iter__(self):
        here, (x, y) = rayps.data.shard(), rows(105)
        for i in range(here.rank if self.at is None else self.at, 105, here.size):
            self.at = i + here.size
            yield x[i], y[i]


class Strides(Small):
    def data(self):
        return rayps.data.iterable(Stride(), batch_size=2, ends="last", shard="own")

    def evaluation_data(self):
        return rayps.data.tensors(*rows(12), batch_size=4)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("pipeline:stages=2,micro_batches=2", 4), ("all_reduce", 2)),
        (("all_reduce", 2), ("pipeline:stages=2,micro_batches=2", 4)),
        (("all_reduce", 2), ("tensor_parallel:size=2", 4)),
    ],
)
def test_a_run_resumes_with_another_number_of_workers_in_each_replica(tmp_path, before, after):
    work = Strides()
    whole = train(work, workers=2, epochs=2)
    train(work, before[0], workers=before[1], steps=37, checkpoint=tmp_path)
    found = train(work, after[0], workers=after[1], epochs=2, checkpoint=tmp_path, resume=True)
    assert found.history.column("samples").to_pylist() == whole.history.column("samples").to_pylist()[37:]
    assert found.history.column("epoch").to_pylist() == whole.history.column("epoch").to_pylist()[37:]
    assert distance(found.model(), whole.model()) < 1e-10


def test_workers_in_different_passes_cannot_end_them_together(tmp_path):
    work = Streamed((21, 30))
    train(work, "parameter_server", workers=2, steps=9, checkpoint=tmp_path)  # 7 and 10 batches in a pass
    with pytest.raises(CheckpointError, match=r"are in different passes: all_reduce .*\nresume with the strategy"):
        train(work, workers=2, epochs=3, checkpoint=tmp_path, resume=True)
    found = train(work, "parameter_server", workers=2, steps=12, checkpoint=tmp_path, resume=True)
    assert found.history.num_rows == 3
    even = tmp_path / "even"
    work = Streamed((21, 21))
    train(work, "parameter_server", workers=2, steps=9, checkpoint=even)
    found = train(work, workers=2, epochs=3, checkpoint=even, resume=True)
    assert found.history.column("epoch").to_pylist() == [1] * 5 + [2] * 7


@pytest.mark.parametrize("strategy", ["all_reduce", "local_sgd:period=2"])
def test_after_a_death_the_run_gives_the_same_result(strategy):
    work = Streamed((40, 31), "last", tag=f"dies-{strategy}", pause=0.005)
    whole = train(work, strategy, workers=2, epochs=3)
    SEEN[work.tag] = 0
    cluster = Watched()
    try:
        cluster.kill_when(work.tag, 30, ("WorkerActor", 1))
        found = train(work, strategy, cluster, workers=2, epochs=3, checkpoint_every=4)
    finally:
        cluster.close()
    assert "restarted" in kinds(found)
    assert distance(found.model(), whole.model()) == 0


class Whole(torch.utils.data.IterableDataset):
    """All rows, without a shard."""

    def __iter__(self):
        return iter(zip(*rows(20), strict=True))


def test_every_row_goes_to_one_worker():
    data = rayps.data.iterable(Whole(), batch_size=3)
    found = [list(data.batches(rank=r, size=3, seed=0, epoch=0)) for r in range(3)]
    x, _ = rows(20)
    for rank in range(3):
        assert torch.equal(torch.cat([b.x for b in found[rank]]), x[rank::3])
    assert [b.size for b in found[0]] == [3, 3, 1]
    last = rayps.data.iterable(Whole(), batch_size=3, drop_last=True)
    assert [b.size for b in last.batches(rank=0, size=3, seed=0, epoch=0)] == [3, 3]


class Continues(torch.utils.data.IterableDataset):
    """A set that goes on where it stopped, also in a new pass."""

    def __init__(self, n=12):
        self.n, self.place, self.epoch = n, {"at": 0}, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def state_dict(self):
        return {"place": dict(self.place), "epoch": self.epoch}

    def load_state_dict(self, state):
        self.place, self.epoch = dict(state["place"]), state["epoch"]

    def __iter__(self):
        while self.place["at"] < self.n:
            self.place["at"] += 1
            yield torch.tensor(float(self.place["at"])), torch.tensor(float(self.epoch))


@pytest.mark.parametrize("ends", ["first", "last"])
def test_each_pass_over_a_set_that_continues_begins_at_its_first_state(ends):
    data = rayps.data.iterable(Continues(), batch_size=2, ends=ends)
    data.check()
    assert data.source.place == {"at": 0}
    for epoch in range(3):
        found = list(data.batches(rank=0, size=1, seed=0, epoch=epoch))
        assert torch.cat([b.x for b in found]).tolist() == [float(i) for i in range(1, 13)]
        assert {y for b in found for y in b.y.tolist()} == {float(epoch)}
        reads = data.batches(rank=0, size=1, seed=0, epoch=epoch)  # abandoned, as by a worker that another one ends
        assert next(reads).x.tolist() == [1.0, 2.0]
        other = rayps.data.iterable(data.source, batch_size=3)  # as an evaluation in the middle of the pass
        assert [b.size for b in other.batches(rank=0, size=1, seed=0, epoch=0)] == [3, 3, 3, 3]
        assert next(reads).x.tolist() == [3.0, 4.0]
        reads.close()
    sent = pickle.loads(pickle.dumps(data))
    assert [b.size for b in sent.batches(rank=0, size=1, seed=0, epoch=0)] == [2] * 6


class OneSet(Small):
    """A workload that keeps one data set, which training and evaluation read."""

    def __init__(self, ends):
        super().__init__()
        self.stream, self.ends = Continues(), ends

    def model(self):
        return torch.nn.Linear(1, 1)

    def data(self):
        return rayps.data.iterable(self.stream, batch_size=2, ends=self.ends)

    def loss(self, model, batch):
        return ((model(batch.x[:, None])[:, 0] - batch.y) ** 2).mean() * 0 + batch.x.mean()

    def evaluate(self, model, batch):
        return {}


@pytest.mark.parametrize("ends", ["first", "last"])
@pytest.mark.parametrize("ahead", [None, 1])
def test_training_and_evaluation_of_one_set_that_continues_see_every_row(ends, ahead):
    work = OneSet(ends)
    if ahead is not None:
        work.data = lambda: rayps.data.iterable(work.stream, batch_size=2, ends=ends).loaded_by(ahead)
    found = train(work, workers=2, epochs=3, evaluate_every=1)
    assert found.history.column("samples").to_pylist() == [4] * 9
    assert found.metrics["loss"] == pytest.approx(6.5)
    losses = found.history.column("loss").to_pylist()
    assert losses == pytest.approx([2.5, 6.5, 10.5] * 3)


class Once(torch.utils.data.IterableDataset):
    """A data set whose second pass yields nothing, unless it is new."""

    def __init__(self):
        self.used = 0

    def __iter__(self):
        self.used += 1
        return iter(zip(*rows(8), strict=True)) if self.used <= 2 else iter(())


class Wrong(Small):
    """A workload with a given data set."""

    def __init__(self, make, **options):
        super().__init__()
        self.make, self.options = make, options

    def data(self):
        return rayps.data.iterable(self.make(), batch_size=2, **self.options)

    def evaluation_data(self):
        return rayps.data.tensors(*rows(4), batch_size=4)


class Empty(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(())


class Fails(Whole):
    def __iter__(self):
        yield from itertools.islice(super().__iter__(), 9)
        raise OSError("the line is dead")


def test_mistakes_end_with_what_to_do():
    for make, options, words in (
        (Empty, {}, "yields no item"),
        (lambda: iter([1]), {}, "can be read only once"),
        (lambda: 3, {}, "int has no __iter__"),
        (Whole, {"shard": "own"}, 'shard="own", and the data set did not ask'),
        (Fails, {}, "item 9 .* OSError: the line is dead"),
        (Once, {}, r"no batch for worker-\d in epoch 3 .*\neach epoch is a new pass"),
        (Once, {"ends": "last"}, r"no batch on any worker in epoch 3 .*\neach epoch is a new pass"),
    ):
        with pytest.raises(DataError, match=words):
            train(Wrong(make, **options), workers=2, epochs=3)
    with pytest.raises(DataError, match=r"no batch for worker-\d+ in epoch 1 .*\nuse fewer workers"):
        train(Streamed((5, 0)), workers=2)
    with pytest.raises(DataError, match=r"rayps\.data\.iterable"):
        rayps.data.dataset(Whole()).check()
    with pytest.raises(ConfigError, match="shard is 'mine'"):
        rayps.data.iterable(Whole(), shard="mine")
    with pytest.raises(ConfigError, match="ends is 'both'"):
        rayps.data.iterable(Whole(), ends="both")


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("admm", "same rows in every epoch"),
        ("parallel_sgd", "give steps="),
        ("diloco:period=4,overlap=1", "give steps="),
        ("hogwild", "give steps="),
        ("downpour", "give steps="),
        ("fedavg", "divide numbered rows into clients"),
    ],
)
def test_strategies_that_need_a_length_are_refused(strategy, words):
    with pytest.raises(ConfigError, match=words):
        train(Streamed(), strategy, workers=2, epochs=1)


@pytest.mark.parametrize("strategy", ["parallel_sgd", "diloco:period=4,overlap=1", "hogwild", "downpour:n_push=2"])
def test_strategies_that_need_a_length_take_steps(strategy):
    found = train(Streamed((12, 9)), strategy, workers=2, steps=8)
    assert found.history.num_rows == 8


class Endless(torch.utils.data.IterableDataset):
    """Rows without an end; the number of rows that were read is counted."""

    def __iter__(self):
        x, y = rows(60)
        for i in itertools.count():
            importlib.import_module("test_iterable").SEEN["endless"] += 1
            yield x[i % 60], y[i % 60]


class Forever(Small):
    """Training on an endless set, which is also the evaluation data."""

    def data(self):
        return rayps.data.iterable(Endless(), batch_size=3)


class EvaluatesForever(Small):
    """Evaluation data of its own that is endless."""

    def evaluation_data(self):
        return rayps.data.iterable(Endless(), batch_size=3)


@pytest.mark.parametrize("strategy", ["all_reduce", "local_sgd:period=2", "parameter_server:staleness=2", "hogwild"])
def test_an_endless_set_is_evaluated_on_as_many_batches_as_were_trained(strategy):
    SEEN["endless"] = 0
    found = train(Forever(), strategy, workers=2, steps=6)
    assert found.metrics["loss"] > 0
    assert SEEN["endless"] < 2 * 2 * 3 * (FEWEST + 20) + 100
    [warning] = [e["message"] for e in found.events if e["kind"] == "warning" and "evaluation_batches" in e["message"]]
    assert "has no length and is also evaluated" in warning


def test_evaluation_batches_bounds_every_evaluation():
    work = Forever()
    work.evaluation_batches = 2
    found = train(work, workers=2, steps=4, evaluate_every=2)
    x, y = (each[:12] for each in rows(60))
    with torch.no_grad():
        assert found.metrics["loss"] == pytest.approx(((found.model()(x) - y) ** 2).mean().item())
    assert not any("no length" in event["message"] for event in found.events)
    small = Small()
    small.evaluation_batches = 1
    whole = train(small, workers=1)
    batch = next(small.data().batches(rank=0, size=1, seed=0, epoch=0))
    with torch.no_grad():
        assert whole.metrics["loss"] == pytest.approx(((whole.model()(batch.x) - batch.y) ** 2).mean().item())
    small.evaluation_batches = 0
    with pytest.raises(ConfigError, match="evaluation_batches of Small is 0: give the most batches"):
        train(small, workers=1)


def test_endless_evaluation_data_ends_with_what_to_do(monkeypatch):
    monkeypatch.setattr(evaluation_batches, "SECONDS", 0.05)
    for options in ({"steps": 4}, {"epochs": 1}):
        with pytest.raises(WorkloadError, match=r"has not ended after \d+ batches .*\nset evaluation_batches"):
            train(EvaluatesForever(), workers=2, timeout=1.0, **options)


def test_which_batches_an_evaluation_reads():
    known = EvaluationFacts(None, has_length=False, is_default=True, by_rounds=True, ended=False, trained=7)
    assert count_most_batches(known) == FEWEST
    assert count_most_batches(replace(known, trained=4 * FEWEST)) == 4 * FEWEST
    assert count_most_batches(replace(known, limit=3)) == 3
    for whole in ({"ended": True}, {"by_rounds": False}, {"is_default": False}, {"has_length": True}):
        assert count_most_batches(replace(known, **whole)) is None


def test_progress_has_no_total():
    seen = []
    train(Streamed((60, 60), pause=0.01), workers=2, epochs=2, progress=seen.append)
    running = [each for each in seen if each["status"] == "RUNNING" and each["round"]]
    assert running
    assert {each["rounds"] for each in running} == {None}
    assert {each["epochs"] for each in running} == {2}
    assert seen[-1]["rounds"] == 40


def test_calendar_of_open_epochs():

    phases = [Phase(2, AllReduce()), Phase(None, AllReduce())]
    found = Calendar(phases, [OPEN, OPEN], 2, epochs=3, rounds=None)
    assert (found.known_rounds, found.epochs, found.known_epochs) == (None, 3, 3)
    assert found.cut(2 * OPEN, 11)
    assert [(span.begin, span.end, span.epoch) for span in found.spans] == [(0, 11, 0), (11, 11 + OPEN, 2)]
    assert found.cut(11 + OPEN, 15)
    assert (found.known_rounds, found.epochs) == (15, 3)
    with pytest.raises(ConfigError, match="give epochs instead of steps"):
        Calendar(phases, [OPEN, OPEN], 2, epochs=None, rounds=100)
    by_rounds = Calendar(phases[1:], [OPEN], 2, epochs=None, rounds=100)
    assert (by_rounds.known_rounds, by_rounds.known_epochs) == (100, None)


def test_states_of_data_sets_are_json():
    import json

    import numpy as np

    given = {"a": [1, (2.5, None)], 3: b"x\0", "t": torch.arange(3), "n": np.float64(2), ("k", 1): {"v": True}}
    back = from_json(json.loads(json.dumps(to_json(given))))
    assert torch.equal(back.pop("t"), given.pop("t"))
    assert back == given
    with pytest.raises(DataError, match="has a lock"):
        to_json({"lock": threading.Lock()})


@pytest.mark.parametrize("ends", ["first", "last"])
def test_pipelines_end_together(ends):
    work = Streamed((13, 7), ends, optimizer="momentum", batch=4)
    model, samples = plain(work, epochs=2)
    found = train(work, AllReduce(replica=Pipeline(stages=2)), workers=4, epochs=2)
    assert found.history.column("samples").to_pylist() == samples
    assert distance(found.model(), model) < 1e-12


@pytest.mark.parametrize(
    ("strategy", "workers", "kind"),
    [(AllReduce(replica=Pipeline(stages=2)), 4, "restarted"), ("parameter_server:staleness=2", 2, "replaced")],
    ids=["pipeline", "servers"],
)
def test_a_worker_that_dies_under_another_recovery_continues_in_its_pass(strategy, workers, kind):
    work = Streamed((40, 31), "last", tag=f"dies-{kind}", pause=0.005, batch=4)
    amount = {"epochs": 3} if workers == 4 else {"steps": 40}
    whole = train(work, strategy, workers=workers, **amount)
    SEEN[work.tag] = 0
    cluster = Watched()
    try:
        cluster.kill_when(work.tag, 30, ("WorkerActor", 1))
        found = train(work, strategy, cluster, workers=workers, checkpoint_every=4, **amount)
    finally:
        cluster.close()
    assert kind in kinds(found)
    # the point of a round that ended just before the death may be lost
    assert found.history.column("samples").to_pylist()[-12:] == whole.history.column("samples").to_pylist()[-12:]
    if kind == "restarted":
        assert distance(found.model(), whole.model()) == 0


PIPELINE = "all_reduce:replica=pipeline(stages=2,micro_batches=1)"


class Level(Streamed):
    """The metric never improves: the first evaluation is the best."""

    def evaluate(self, model, batch):
        return {"constant": 1.0}


@pytest.mark.parametrize(
    ("strategy", "checkpoint_every"),
    [("all_reduce", None), ("all_reduce", 2), ("local_sgd:period=3", 50), ("local_sgd:period=3", 2), (PIPELINE, None)],
)
def test_the_state_of_the_best_evaluation_at_an_epochs_end_is_kept(strategy, checkpoint_every, tmp_path):
    work, workers = Level((36, 36), optimizer="adam"), 4 if strategy == PIPELINE else 2
    keep = rayps.BestCheckpoint("constant", "min")
    options = {"checkpoint_every": checkpoint_every, "keep_checkpoints": 1000}
    found = train(work, strategy, workers=workers, epochs=5, checkpoint=tmp_path, callbacks=[keep], **options)
    evaluated = [i + 1 for i, v in enumerate(found.history["evaluation_constant"].to_pylist()) if v is not None]
    assert evaluated == [12, 24, 36, 48, 60]
    assert found.best == tmp_path / "best" / "step-00000012"
    saved = [event["round"] for event in found.events if event["kind"] == "checkpoint"]
    assert set(evaluated) <= set(saved) and saved == sorted(saved)
    one = train(work, strategy, workers=workers, epochs=1)
    again = train(work, strategy, workers=workers, steps=12, resume=found.best)
    assert distance(again.model(), one.model()) == 0
    assert "warning" not in kinds(found)


def test_the_best_checkpoint_after_a_death_on_data_without_a_length(tmp_path):
    """The evaluation of round 12 is in the journal when a worker dies: its state is saved when it is computed again."""
    work = Level((36, 36), tag="dies-best", pause=0.005)
    SEEN[work.tag] = 0
    cluster, keep = Watched(), rayps.BestCheckpoint("constant", "min")
    try:
        cluster.kill_when(work.tag, 24, ("WorkerActor", 1))
        found = train(work, "all_reduce", cluster, workers=2, epochs=4, checkpoint=tmp_path, callbacks=[keep])
    finally:
        cluster.close()
    assert "restarted" in kinds(found)
    assert found.best == tmp_path / "best" / "step-00000012"


def test_checkpoint_every_counts_beside_the_best_on_data_without_a_length(tmp_path):
    work = Level((240, 240), pause=0.02)
    keep = rayps.BestCheckpoint("constant", "min")
    found = train(work, workers=2, epochs=1, checkpoint=tmp_path, callbacks=[keep], checkpoint_every=5)
    saved = [event["round"] for event in found.events if event["kind"] == "checkpoint"]
    assert len(saved) > 1 and saved[-1] == 80 and all(round % 5 == 0 for round in saved)
    options = {"checkpoint": tmp_path / "servers", "callbacks": [rayps.BestCheckpoint("constant", "min")]}
    alone = train(work, "parameter_server", workers=2, steps=60, checkpoint_every=5, **options)
    saved = [event["round"] for event in alone.events if event["kind"] == "checkpoint"]
    assert len(saved) > 1 and saved[-1] == 60


def test_a_schedule_by_epoch_is_refused_and_one_by_step_is_not():
    class Scheduled(Streamed):
        def schedule(self, optimizer):
            return lambda step: 0.9**step

    work = Scheduled((9, 9))
    assert train(work, workers=2, epochs=2).history.num_rows == 6
    work.schedule_every = "epoch"
    with pytest.raises(ConfigError, match="schedule_every is 'epoch'"):
        train(work, workers=2, epochs=2)

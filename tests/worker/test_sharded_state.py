"""Workers that hold slices of the optimizer's state, or also of the gradient: to the bit what whole workers compute.

The law is the same job under all_reduce. Bits may differ where the order of sums does: the norm for `clip_norm` is a
sum of the workers' sums, and with `accumulate` each micro-batch is summed over the workers before the micro-batches.
"""

import gc
import os
import random
import shutil
import subprocess
import sys

import covers
import pytest
import torch
from process_cluster import ProcessCluster
from rayps_client.errors import CheckpointError, ConfigError, PlaceError, TrainingError, WorkloadError
from small_work import Paced, Small, distance, kinds, rows, train, vector
from test_replica_deaths import Deep
from test_ring import every, form
from torch import nn
from torch.utils.checkpoint import checkpoint as recompute

import rayps
from rayps import AllReduce
from rayps.comm.ring.bucket_scatter import SentScatter, SharedScatter, make_bucket_scatter
from rayps.comm.ring.bucketed_mean import ScatteredBuckets, SharedMemoryMean, scatter_mean
from rayps.comm.ring.owned_slices import OwnedSlices
from rayps.runtime.records.state_folder import StateFolder, remove_abandoned
from rayps.strategies.catalogue import parse
from rayps.tensors import optim
from rayps.tensors.checkpoints import checkpoint
from rayps.tensors.checkpoints.checkpoint_parts import write_part
from rayps.tensors.flat import FlatModel, Gradient, Layout
from rayps.tensors.snapshot import Snapshot
from rayps.tensors.state_pieces import entries_of, fill, join_moments, parameter_of, pieces_of
from rayps.worker.exchange.buckets import cut, find_spans
from rayps.worker.exchange.scattered_gradients import ScatteredGradients
from rayps.worker.exchange.step_flags import StepFlags

SHARDS = ["optimizer", "gradients"]
EXACT, CLOSE = 0.0, 1e-14


class Options(Small):
    """Small, with any field of a workload."""

    def __init__(self, n=36, batch=3, optimizer="adam", pause=0.0, **fields):
        super().__init__(n, batch, optimizer, pause=pause)
        for name, value in fields.items():
            setattr(self, name, value)


class Floats(Options):
    """In float32."""

    def model(self):
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))

    def data(self):
        x, y = rows(self.n)
        return rayps.data.tensors(x.float(), y.float(), batch_size=self.batch)


class Halves(Floats):
    """Parameters in bfloat16."""

    def model(self):
        return super().model().bfloat16()

    def loss(self, model, batch):
        return ((model(batch.x.bfloat16()) - batch.y.bfloat16()) ** 2).mean()

    def evaluate(self, model, batch):
        return {}


class Norms(Floats):
    def model(self):
        return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 1))


class Frozen(Floats):
    def model(self):
        model = super().model()
        model[0].weight.requires_grad_(False)
        return model


class Sometimes(Floats):
    """A layer that only some steps use, one that only one worker uses, one that none does, and a tied weight."""

    def model(self):
        model = nn.ModuleDict({name: nn.Linear(5, 5) for name in ("a", "b", "some", "one", "none")})
        model["out"] = nn.Linear(5, 1)
        model["b"].weight = model["a"].weight
        return model

    def loss(self, model, batch):
        x = torch.tanh(model["b"](torch.tanh(model["a"](batch.x))))
        if int(batch.x.abs().sum() * 1000) % 3 == 0:
            x = x + model["some"](x)
        if int(batch.x.abs().sum() * 1000) % 7 == 0:
            x = x + model["one"](x)
        return ((model["out"](x) - batch.y) ** 2).mean()

    def evaluate(self, model, batch):
        return {}


class Overflowing(Floats):
    """A gradient that is infinite on one worker in some steps of fp16."""

    def loss(self, model, batch):
        loss = ((model(batch.x) - batch.y) ** 2).mean()
        return loss * 1e5 if int(batch.x.abs().sum() * 1000) % 5 == 0 else loss


class Pairs(Floats):
    """A loss that is a pair (sum, weight), such as that of tokens."""

    def loss(self, model, batch):
        weight = 1 + (batch.x[:, :1] > 0)
        return ((model(batch.x) - batch.y) ** 2 * weight).sum(), weight.sum().item()


class Wobbly(torch.optim.SGD):
    """Not elementwise."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad / p.grad.norm(), alpha=group["lr"])


def strategy(shard, **options):
    return AllReduce(shard=shard, **options)


def same(work, shards, workers, *, most=EXACT, options=None, **run):
    """The job under all_reduce and with a shard, or several: equal parameters, buffers, losses and metrics."""
    run = {"epochs": 2} | run
    law = train(work(), AllReduce(**(options or {})), workers=workers, **run)
    for shard in [shards] if isinstance(shards, str) else shards:
        found = train(work(), strategy(shard, **(options or {})), workers=workers, **run)
        equals(found, law, most)


def equals(found, law, most):
    assert distance(found.model(), law.model()) <= most
    for (name, a), (_, b) in zip(found.model().named_buffers(), law.model().named_buffers(), strict=True):
        assert torch.equal(a, b), name
    assert found.metrics == pytest.approx(law.metrics, abs=max(1e-12, most))
    for column in ("round", "samples"):
        assert found.history.column(column).to_pylist() == law.history.column(column).to_pylist()
    for a, b in zip(found.history.column("loss").to_pylist(), law.history.column("loss").to_pylist(), strict=True):
        assert a == pytest.approx(b, abs=1e-6)


# ------------------------------------------------------------------------- sharded equals unsharded


@covers.pairs
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("kind", ["sgd", "momentum", "adam", "adamw_groups"])
@pytest.mark.parametrize("shard", SHARDS)
def test_the_result_has_the_bits_of_whole_workers(shard, kind, workers):
    same(lambda: Options(optimizer=kind), shard, workers)


CASES = {
    "one bucket": (lambda: Options(), {"options": {"bucket_mb": 0}}),
    "a bucket a parameter": (lambda: Options(), {"options": {"bucket_mb": 1e-6}}),
    "schedule": (lambda: Paced("onecycle", optimizer="adam"), {}),
    "schedule by epoch": (lambda: Paced("cosine", "epoch", optimizer="momentum"), {}),
    "float32": (lambda: Floats(), {}),
    "autocast": (lambda: Floats(precision="bf16"), {}),
    "fp16": (lambda: Floats(precision="fp16"), {}),
    "fp16 that overflows": (lambda: Overflowing(precision="fp16", batch=2), {}),
    "BatchNorm": (lambda: Norms(), {}),
    "frozen": (lambda: Frozen(), {}),
    "unused parameters": (lambda: Sometimes(optimizer="adamw_groups", n=60), {}),
    "pairs": (lambda: Pairs(), {}),
    "uneven shares": (lambda: Options(n=13), {}),
    "more workers than rows": (lambda: Options(n=2, batch=1), {}),
    "evaluations": (lambda: Options(), {"evaluate_every": 3}),
}


@pytest.mark.parametrize("case", CASES)
def test_every_field_of_a_workload_has_the_bits_of_whole_workers(case):
    work, more = CASES[case]
    same(work, SHARDS, 3, **more)


@pytest.mark.parametrize("shard", SHARDS)
def test_parameters_of_half_precision_equal_those_of_whole_workers(shard):
    same(Halves, shard, 2)


def test_fp16_skips_the_same_steps_on_all_workers():
    law = train(Overflowing(precision="fp16", batch=2), "all_reduce", workers=3, epochs=2)
    skipped = [point for point in law.history.column("skipped").to_pylist() if point]
    assert skipped
    for shard in SHARDS:
        found = train(Overflowing(precision="fp16", batch=2), strategy(shard), workers=3, epochs=2)
        assert found.history.column("skipped").to_pylist() == law.history.column("skipped").to_pylist()


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("shard", SHARDS)
def test_a_clipped_gradient_differs_only_by_the_order_of_the_norms_sum(shard, workers):
    same(lambda: Options(clip_norm=0.05), shard, workers, most=CLOSE)


@pytest.mark.parametrize("work", [Options, Pairs])
@pytest.mark.parametrize("n", [36, 13])
def test_micro_batches_that_are_sent_each_differ_only_by_the_order_of_sums(work, n):
    same(lambda: work(n=n, accumulate=3), "optimizer", 3)
    same(lambda: work(n=n, accumulate=3), "gradients", 3, most=1e-6 if work is Pairs else CLOSE)
    same(lambda: work(n=n, accumulate=3), "gradients", 1, most=1e-6 if work is Pairs else CLOSE)


def test_synchronized_batchnorm_and_compression_equal_whole_workers():
    same(lambda: Norms(sync_batchnorm=True), "optimizer", 3)
    for compression in ("int8", "bf16", "top_k"):
        same(Floats, "optimizer", 3, options={"compression": compression})


def test_strategies_in_sequence_pass_the_state_on():
    def run(sharded):
        phases = [(1, f"all_reduce{sharded}"), (1, "parameter_server"), (1, f"all_reduce{sharded}")]
        return train(Options(), phases, workers=2, epochs=3)

    assert distance(run(":shard=gradients").model(), run("").model()) == 0


# ------------------------------------------------------------------------- checkpoints

LAYOUTS = ["all_reduce", "all_reduce:shard=optimizer", "all_reduce:shard=gradients"]


def test_any_layout_resumes_any_other(tmp_path):
    whole = train(Norms(), "all_reduce", workers=2, epochs=4)
    for first in LAYOUTS:
        train(Norms(), first, workers=2, epochs=2, checkpoint=tmp_path / first)
        for second in LAYOUTS:
            folder = shutil.copytree(tmp_path / first, tmp_path / f"{first} {second}")
            found = train(Norms(), second, workers=2, epochs=4, checkpoint=folder, resume=True)
            assert distance(found.model(), whole.model()) == 0, (first, second)
            state = checkpoint.load(found.checkpoint)
            assert torch.equal(Snapshot.from_state(state).params, vector(found.model())), (first, second)


@pytest.mark.parametrize("shard", SHARDS)
def test_another_number_of_workers_resumes_the_state(tmp_path, shard):
    train(Options(), strategy(shard), workers=3, epochs=2, checkpoint=tmp_path / "parts")
    train(Options(), "all_reduce", workers=3, epochs=2, checkpoint=tmp_path / "whole")
    for workers, second in ((2, strategy(shard)), (1, strategy(shard)), (2, "parameter_server:shards=2")):
        for kind in ("parts", "whole"):
            at = tmp_path / kind / "step-00000008"
            train(Options(), second, workers=workers, epochs=4, checkpoint=tmp_path / f"{kind}{workers}", resume=at)
        found = [
            Snapshot.from_state(checkpoint.load(checkpoint.newest(tmp_path / f"{kind}{workers}")))
            for kind in ("parts", "whole")
        ]
        assert torch.equal(found[0].params, found[1].params)
        for name, state in found[1].moments.items():
            for key, value in state.items():
                assert torch.equal(found[0].moments[name][key], value), (name, key)
        for kind in ("parts", "whole"):
            for path in (tmp_path / f"{kind}{workers}").glob("step-*"):
                for file in path.iterdir():
                    file.unlink()
                path.rmdir()


def test_a_checkpoint_has_a_file_of_each_worker_and_no_worker_wrote_what_it_does_not_own(tmp_path):
    result = train(Frozen(), strategy("optimizer"), workers=3, epochs=1, checkpoint=tmp_path)
    files = sorted(path.name for path in result.checkpoint.iterdir())
    assert files == ["manifest.json", *(f"part-0000{i}-of-00003.safetensors" for i in (1, 2, 3)), "rest.safetensors"]
    law = train(Frozen(), "all_reduce", workers=3, epochs=1, checkpoint=tmp_path / "law")
    ours, theirs = checkpoint.load(result.checkpoint), checkpoint.load(law.checkpoint)
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name, value in theirs.tensors.items():
        if name.startswith("rng/"):  # threads share one generator
            continue
        assert torch.equal(ours.tensors[name], value), name
    for key in ("parameters", "positions", "frozen", "optimizer_numbers", "origin", "steps_per_epoch"):
        assert ours.meta[key] == theirs.meta[key], key


class Thawed(Floats):
    """Of two frozen parameters, a step changes one."""

    def model(self):
        model = super().model()
        for p in model[0].parameters():
            p.requires_grad_(False)
        return model

    def loss(self, model, batch):
        with torch.no_grad():
            model[0].bias.add_(0.01)
        return super().loss(model, batch)


@pytest.mark.parametrize("shard", SHARDS)
def test_frozen_parameters_are_saved_if_one_of_them_changes(tmp_path, shard):
    def resumed(chosen, folder):
        train(Thawed(), chosen, workers=1, epochs=1, checkpoint=folder)
        return train(Thawed(), chosen, workers=1, epochs=2, checkpoint=folder, resume=True)

    law, found = resumed("all_reduce", tmp_path / "law"), resumed(strategy(shard), tmp_path / "found")
    for (name, a), (_, b) in zip(found.model().named_parameters(), law.model().named_parameters(), strict=True):
        assert torch.equal(a, b), name
    state = checkpoint.load(found.checkpoint)
    assert {key for key in state.tensors if key.startswith(("frozen/", "buffer/"))} == {
        "frozen/0.weight",
        "buffer/0.bias",
    }


def test_a_run_without_a_folder_leaves_nothing_when_its_result_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = train(Options(), strategy("gradients"), workers=2, epochs=1)
    assert list(tmp_path.glob("rayps-state-*"))
    assert result.checkpoint is None
    result.save(tmp_path / "saved")
    assert distance(rayps.load_state(Options().model(), tmp_path / "saved"), result.model()) == 0
    del result
    gc.collect()  # a test's own references may be in cycles
    assert not list(tmp_path.glob("rayps-state-*"))


def test_the_best_checkpoint_is_that_of_the_evaluation(tmp_path):
    best = rayps.BestCheckpoint("error", mode="min")
    found = train(Options(), strategy("gradients"), workers=2, epochs=3, checkpoint=tmp_path, callbacks=[best])
    law = train(
        Options(),
        "all_reduce",
        workers=2,
        epochs=3,
        checkpoint=tmp_path / "law",
        callbacks=[rayps.BestCheckpoint("error", mode="min")],
    )
    assert found.best.name == law.best.name
    assert torch.equal(*(Snapshot.from_state(checkpoint.load(each.best)).params for each in (found, law)))


def test_a_disk_that_is_full_ends_the_run_with_the_reason(tmp_path, monkeypatch):
    def full(*args, **more):
        raise CheckpointError("cannot write part-00001: No space left on device", path=str(tmp_path))

    monkeypatch.setattr("rayps.worker.part_writer.write_part", full)
    with pytest.raises(CheckpointError, match="No space left"):
        train(Options(), strategy("optimizer"), workers=2, epochs=2, checkpoint=tmp_path)


def test_a_place_that_fails_for_a_while_costs_a_warning_and_no_round(tmp_path, monkeypatch):
    def failing(place, step, *args, **more):
        if step in (4, 8):
            raise PlaceError(f"cannot write step {step}: no answer", place=str(place))
        return write_part(place, step, *args, **more)

    monkeypatch.setattr("rayps.worker.part_writer.write_part", failing)
    options = {"workers": 2, "epochs": 2, "checkpoint": tmp_path, "checkpoint_every": 4}
    found = train(Options(n=72, batch=2, pause=0.05), strategy("optimizer"), **options)
    said = [event["message"] for event in found.events if event["kind"] == "warning"]
    assert said, "a part of a boundary was asked for"
    assert all("was not written: cannot write step" in each and "the run continues" in each for each in said)
    checkpoint.verify(found.checkpoint)
    assert found.checkpoint.name == "step-00000036"


def test_a_place_that_fails_at_the_end_ends_the_run(tmp_path, monkeypatch):
    def failing(*args, **more):
        raise PlaceError("cannot write: no answer", place=str(tmp_path))

    monkeypatch.setattr("rayps.worker.part_writer.write_part", failing)
    with pytest.raises(PlaceError, match="no answer"):
        train(Options(), strategy("gradients"), workers=2, epochs=1, checkpoint=tmp_path)


def test_folders_of_processes_that_were_killed_are_removed_and_others_are_not(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    kept = StateFolder()
    code = "import os; from rayps.runtime.records.state_folder import StateFolder; f = StateFolder(); os._exit(1)"
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"TMPDIR": str(tmp_path)}, check=False, timeout=120)
    (tmp_path / "rayps-state-no-lock").mkdir()
    [abandoned] = set(tmp_path.iterdir()) - {kept.path, tmp_path / "rayps-state-no-lock"}
    assert remove_abandoned() == [abandoned]
    assert kept.path.is_dir()
    assert (tmp_path / "rayps-state-no-lock").is_dir()


# ------------------------------------------------------------------------- deaths

MOMENTS = [(0, "forward=17"), (1, "step=4"), (1, "half a step=4"), (0, "backward=30")]
UNDISTURBED = {}


def run(shard, arm=None, **options):
    cluster = ProcessCluster(arm)
    try:
        return train(Deep(), strategy(shard, **options), cluster, workers=2, epochs=2)
    finally:
        cluster.close()


@pytest.mark.chaos
@covers.by(
    lambda shard, victim, moment, backup: (shard, moment),
    lambda shard, victim, moment, backup: (shard, backup),
    lambda shard, victim, moment, backup: (moment, backup),
)
@pytest.mark.parametrize("backup", [False, True], ids=["restart", "copy"])
@pytest.mark.parametrize(("victim", "moment"), MOMENTS)
@pytest.mark.parametrize("shard", SHARDS)
def test_a_worker_that_is_killed_changes_no_bit(shard, victim, moment, backup):
    if shard not in UNDISTURBED:  # not the result, whose folder would stay
        law = run(shard)
        UNDISTURBED[shard] = vector(law.model()), law.history.column("loss").to_pylist()
    found = run(shard, {("WorkerActor", victim): moment}, slice_backup=backup)
    params, losses = UNDISTURBED[shard]
    assert torch.equal(vector(found.model()), params)
    assert ("mended" in kinds(found), "restarted" in kinds(found)) == (backup, not backup)
    assert found.history.column("loss").to_pylist() == losses


@pytest.mark.chaos
def test_a_worker_that_dies_while_it_writes_leaves_the_checkpoint_before(tmp_path):
    law = run("optimizer")
    cluster = ProcessCluster({("WorkerActor", 1): "checkpoint: part written, not reported=1"})
    try:
        found = train(Deep(), strategy("optimizer"), cluster, workers=2, epochs=2, checkpoint=tmp_path)
    finally:
        cluster.close()
    assert "restarted" in kinds(found)
    assert distance(found.model(), law.model()) == 0
    assert not list(tmp_path.glob("*.tmp-*"))
    checkpoint.verify(found.checkpoint)


# ------------------------------------------------------------------------- what is refused, and says so


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shard": "weights"}, "shard is 'weights': give 'optimizer', 'gradients', 'parameters', or none"),
        ({"slice_backup": True}, "slice_backup is True without shard"),
        ({"shard": "optimizer", "slice_backup": 1}, "slice_backup is 1: give True or False"),
        ({"shard": "gradients", "compression": "int8"}, "use shard='optimizer', or leave out compression"),
        ({"shard": "parameters", "slice_backup": True}, "leave out slice_backup"),
        ({"shard": "optimizer", "replica": rayps.Pipeline(stages=2)}, "leave out one of them"),
    ],
)
def test_options_that_cannot_be_combined_name_the_way_out(options, words):
    with pytest.raises(ConfigError, match=r"shard|slice_backup") as error:
        AllReduce(**options)
    assert words in str(error.value)
    assert error.value.data["field"] in ("shard", "slice_backup")


@pytest.mark.parametrize(
    ("work", "shard", "words"),
    [
        (lambda: Floats(average=rayps.EMA(0.9)), "optimizer", "each worker holds a slice of its state"),
        (lambda: Norms(sync_batchnorm=True), "gradients", "use shard='optimizer', or sync_batchnorm=False"),
    ],
)
def test_fields_that_need_whole_workers_name_the_way_out(work, shard, words):
    with pytest.raises(ConfigError) as error:
        train(work(), strategy(shard), workers=2)
    assert words in str(error.value)


def test_an_optimizer_that_is_not_elementwise_is_refused():
    class Work(Floats):
        def optimizer(self, params):
            return Wobbly(params, lr=0.1)

    with pytest.raises(WorkloadError, match="not elementwise"):
        train(Work(), strategy("optimizer"), workers=2)


def test_a_loop_of_ones_own_refuses_slices():
    from rayps.strategies.catalogue import parse_for_loop

    with pytest.raises(ConfigError, match="all_reduce with shard, because a loop of your own"):
        parse_for_loop("all_reduce:shard=optimizer")


@pytest.mark.parametrize("shard", SHARDS)
def test_a_gradient_that_is_not_finite_names_the_parameter(shard):
    class Work(Floats):
        def loss(self, model, batch):
            return torch.sqrt(model[0].bias.sum() * 0) + ((model(batch.x) - batch.y) ** 2).mean()

    with pytest.raises(TrainingError, match=r"parameter '0.bias' is not finite"):
        train(Work(), strategy(shard), workers=2)


def test_the_text_form_has_the_options():
    [phase] = parse("all_reduce:shard=gradients,slice_backup=true")
    assert phase.strategy == AllReduce(shard="gradients", slice_backup=True)


# ------------------------------------------------------------------------- the parts, over every transport

GROUPS = [(1, "shm"), (2, "shm"), (3, "shm"), (2, "tcp"), (3, "tcp"), (4, "tcp")]


@pytest.fixture(scope="module", params=GROUPS, ids=lambda group: f"{group[0]}-{group[1]}")
def rings(request):
    n, transport = request.param
    made = form(n, prefer=transport)
    yield made
    for ring in made:
        ring.close()


def layout_of(sizes, dtype=torch.float32):
    return Layout.of((f"p{i}", torch.empty(size, dtype=dtype)) for i, size in enumerate(sizes))


SIZES = [(7,), (3, 5), (), (40,), (1,), (6, 6)]
BUCKETS = [0, 1e-6, 1e-4]


def slices_of(ring, layout, mb):
    members = cut(layout, 1e6 * mb or float("inf"))
    return OwnedSlices(ring, find_spans(layout, members)), members


@pytest.mark.parametrize("mb", BUCKETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_owned_slices_cover_the_vector_once_and_are_gathered(rings, mb, dtype):
    layout = layout_of(SIZES, dtype)

    def work(ring):
        slices, _ = slices_of(ring, layout, mb)
        covered = sorted(r for rank in range(ring.size) for r in slices.ranges(rank))
        found = []
        for mine in (slices.allocate(layout.size, dtype), torch.zeros(layout.size, dtype=dtype)):
            for turn in range(3):
                for lo, hi in slices.ranges():
                    mine[lo:hi] = 10 * ring.rank + turn
                slices.gather(mine)
                found.append(mine.clone())
                ring.barrier()  # the others have read what this rank changes next
        return covered, found, [slices.ranges(rank) for rank in range(ring.size)]

    results = every(rings, work)
    for covered, found, ranges in results:
        assert [lo for lo, _ in covered] == [0, *(hi for _, hi in covered[:-1])]
        assert covered[-1][1] == layout.size
        for i, gathered in enumerate(found):
            for rank, owned in enumerate(ranges):
                for lo, hi in owned:
                    assert (gathered[lo:hi] == 10 * rank + i % 3).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mb", BUCKETS)
def test_a_scattered_mean_has_the_bits_of_the_ring_where_a_rank_owns_it(rings, mb, dtype):
    layout = layout_of(SIZES, dtype)

    def work(ring):
        slices, _ = slices_of(ring, layout, mb)
        vector = ring.buffer(layout.size, dtype)
        means = scatter_mean(ring, vector, slices, 4)
        scatter = make_bucket_scatter(ring, slices, dtype, several=False)
        kinds_of = type(means), type(scatter)
        for turn, samples in enumerate((3.0, 0.0 if ring.rank else 2.0, 1.0 + ring.rank)):
            given = torch.randn(layout.size, generator=torch.Generator().manual_seed(10 * turn + ring.rank)).to(dtype)
            law = given.clone()
            for span in slices.cuts:  # the law: each bucket by the ring algorithm
                wide = law[span].float().mul_(samples) if samples else torch.zeros(span.stop - span.start)
                if ring.size > 1:
                    ring.sum(wide, algorithm=None if ring.collectives.shared_memory else "ring")
                total = float(ring.sum(torch.tensor([samples], dtype=torch.float64)))
                law[span] = (wide / total if total else wide).to(dtype)
            vector.copy_(given)
            means.begin(samples)
            for bucket in range(len(slices.cuts)):
                means.submit(bucket)
            mean = means.finish(torch.zeros(4, dtype=torch.uint8)).clone()
            scatter.begin_step()
            scatter.begin(samples)
            for bucket, span in enumerate(slices.cuts):
                scatter.memory(bucket).copy_(given[span])
                scatter.send(bucket)
            own = torch.cat([mean[lo:hi] for lo, hi in slices.ranges()]) if slices.ranges() else mean[:0]
            assert torch.equal(scatter.finish(), own)
            if ring.size > 1 and ring.collectives.shared_memory is None:
                assert torch.equal(own, torch.cat([law[lo:hi] for lo, hi in slices.ranges()]))
            else:
                close = torch.cat([law[lo:hi] for lo, hi in slices.ranges()]) if slices.ranges() else law[:0]
                torch.testing.assert_close(own, close, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-5)
            ring.barrier()
        return kinds_of

    for found in every(rings, work):
        if rings[0].size > 1:
            shared = rings[0].collectives.shared_memory is not None
            assert found == ((SharedMemoryMean, SharedScatter) if shared else (ScatteredBuckets, SentScatter))


class Reentrant(nn.Module):
    """Backward computes the gradient of `first` in two parts, of which one may come after its bucket was sent."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x):
        x = recompute(lambda x: torch.tanh(self.first(x)), x, use_reentrant=True)
        return self.last(torch.tanh(self.first(recompute(self.last, x, use_reentrant=True))))


@pytest.mark.parametrize("mb", [0, 1e-6])
def test_parts_of_a_gradient_that_come_late_are_added(rings, mb):
    def work(ring):
        torch.manual_seed(3)
        model = Reentrant()
        law = Reentrant()
        law.load_state_dict(model.state_dict())
        flat = FlatModel(model, holds_gradient=False)
        slices, members = slices_of(ring, flat.layout, mb)
        scattered = ScatteredGradients(flat, ring, slices, members, StepFlags())
        own = FlatModel(law)
        for turn in range(3):
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(turn * 10 + ring.rank)).requires_grad_()
            own.drop_grad()
            law(x).pow(2).mean().backward()
            own.collect_grad()
            mean = ring.mean(Gradient(own.packed, 4.0)).clone()
            scattered.begin_step()
            scattered.begin(4.0)
            model(x.detach().clone().requires_grad_()).pow(2).mean().backward()
            scattered.end()
            found, unused = scattered.finish()
            expected = torch.cat([mean[lo:hi] for lo, hi in slices.ranges()])
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
            assert not unused
        return True

    assert all(every(rings, work))


def test_any_cut_reads_the_pieces_of_any_other(tmp_path):
    draw = random.Random(7)
    for _ in range(20):
        shapes = [tuple(draw.randint(1, 6) for _ in range(draw.randint(0, 3))) for _ in range(draw.randint(1, 5))]
        layout = layout_of(shapes)
        kind = draw.choice([torch.optim.Adam, torch.optim.Adagrad, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)])
        whole = optim.SlicedOptimizer(
            lambda params, kind=kind: kind(params), layout, torch.randn(layout.size), 0, layout.size
        )
        for _ in range(2):
            whole.step(torch.randn(layout.size))
        ranks = draw.randint(1, 4)
        bounds = sorted(draw.randint(0, layout.size) for _ in range(ranks - 1))
        ranges = [r for r in zip([0, *bounds], [*bounds, layout.size], strict=True) if r[0] < r[1]]
        joined, made = torch.zeros(layout.size), []
        for span in ranges:
            mine = sliced(kind, layout, whole.params.clone(), [span])
            mine.load({name: _shaped(state, layout, name) for name, state in whole.moments().items()}, layout)
            pieces = pieces_of(layout, [span], whole.params, mine.moments())
            names = {entry.name for entry in entries_of(layout, [span])}
            assert {parameter_of(key) for key in pieces.tensors} == names
            fill(layout, pieces.tensors, joined, [span])
            made.append((span, mine, pieces, names))
        assert torch.equal(joined, whole.params)
        common = {key: t.clone() for _, _, p, _ in made for key, t in p.tensors.items() if key not in p.offsets}
        grad = torch.randn(layout.size)
        for span, mine, pieces, names in made:
            again = sliced(kind, layout, whole.params.clone(), [span])
            mine_only = {key: t.clone() for key, t in common.items() if parameter_of(key) in names}
            again.restore(join_moments(mine_only | pieces.tensors, pieces.numbers))
            mine.step_used(grad, ())
            again.step_used(torch.cat([grad[slice(*span)]]), ())
            assert torch.equal(mine.params, again.params)


def sliced(kind, layout, params, ranges):
    return optim.SlicedOptimizer(kind, layout, params, 0, layout.size, ranges)


def _shaped(state, layout, name):
    shape = next(entry.shape for entry in layout.entries if entry.name == name)
    return {
        key: value.reshape(shape) if isinstance(value, torch.Tensor) and value.dim() == 1 else value
        for key, value in state.items()
    }


# ------------------------------------------------------------------------- on Ray


@pytest.mark.ray
@pytest.mark.parametrize("shard", SHARDS)
def test_ray_workers_have_the_bits_of_whole_workers(ray_cluster, tmp_path, shard):
    options = {"workers": 2, "epochs": 2, "cluster": ray_cluster, "progress": False, "timeout": 300.0}
    law = train(Norms(), "all_reduce", workers=2, epochs=2)
    found = rayps.train(Norms(), strategy=strategy(shard, slice_backup=True), checkpoint=tmp_path, **options)
    assert distance(found.model(), law.model()) == 0
    assert found.metrics == pytest.approx(law.metrics, abs=1e-7)
    again = rayps.train(Norms(), strategy=strategy(shard), checkpoint=tmp_path, resume=True, **options | {"epochs": 3})
    three = train(Norms(), "all_reduce", workers=2, epochs=3)
    assert distance(again.model(), three.model()) == 0

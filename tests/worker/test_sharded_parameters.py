"""`shard="parameters"`: the parameters of plain training, from shards that no process ever joins."""

import re
from itertools import pairwise

import pytest
import torch
from process_cluster import ProcessCluster
from rayps_client.errors import ConfigError, WorkloadError
from sharded_site import Net, Words, exit_now, in_processes, loop_on, plain, results, rounds, whole_snapshot
from torch import nn

import rayps
from rayps.cluster.local import LocalCluster
from rayps.runtime.checks.preflight import preflight
from rayps.strategies.catalogue import parse
from rayps.strategies.job import JobSpec
from rayps.worker.loops.divisible_parameters import check_divisible
from rayps.worker.loops.sharded_model import rows_of, units_of
from rayps.workload.deferred_init import deferred

CLOSE = 1e-9


def joined(parts, kind="model"):
    """The whole tensors of all workers' pieces, flat, by name."""
    found = {}
    for tensors, offsets, _ in parts:
        for key, value in tensors.items():
            place, _, name = key.partition("/")
            if place == kind:
                found.setdefault(name, []).append((offsets.get(key, 0), value.reshape(-1)))
    whole = {}
    for name, pieces in found.items():
        pieces.sort(key=lambda piece: piece[0])
        at = 0
        for offset, piece in pieces:
            assert offset == at, name
            at += piece.numel()
        whole[name] = torch.cat([piece for _, piece in pieces])
    return whole


STEPS = 7


def trained(workload, whole, place, generation=1):
    """Train on this process as one of several: its pieces, its point, what it evaluated, its buffers."""
    rank, size, addresses, listener = place
    snapshot = whole_snapshot(workload) if whole else None
    loop, peers = loop_on(rank, size, addresses, listener, workload, STEPS, snapshot, generation=generation)
    try:
        rounds(loop, STEPS)
        pieces = loop.w.model.pieces()
        point, totals, buffers = loop.point(), loop.evaluate(), loop.buffers()
        held = sum(p.to_local().numel() for p in loop.w.model.module.parameters())
        loop.finish()
    finally:
        loop.close()
        peers.close()
    return (pieces.tensors, pieces.offsets, pieces.numbers), point, totals, buffers, held


def all_cases(*place):
    """Every case, each as a generation of its own on the same processes."""
    cases = [*CASES.items(), ("whole", CASES["adam"])]
    return {name: trained(workload, name == "whole", place, number) for number, (name, workload) in enumerate(cases, 1)}


@pytest.fixture(scope="module", params=[1, 2, 3], ids="{} processes".format)
def runs(request):
    """From a case to the results of all processes."""
    found = results(all_cases, request.param)
    return request.param, {name: [each[name] for each in found] for name in found[0]}


def distance(one, two):
    return max(float((one[name] - two[name].reshape(-1)).abs().max()) for name in one)


CASES = {
    "adam": Words(),
    "sgd": Words("sgd"),
    "momentum": Words("momentum"),
    "untied": Words(net={"tied": False, "frozen": False}),
    "accumulate": Words(accumulate=2),
    "pairs": Words(pairs=True, accumulate=2),
    "clip": Words(clip_norm=0.05),
    "activations": Words(checkpoint_activations=True),
    "few rows": Words(rows=5, batch=2),
}


@pytest.mark.parametrize("case", CASES)
def test_parameters_are_those_of_plain_training(runs, case):
    size, found = runs
    workload = CASES[case]
    parts, points, totals, buffers, held = zip(*found[case], strict=True)
    law = plain(workload, size, STEPS)
    model, frozen = joined(parts), joined(parts, "frozen")
    named = dict(workload.model().named_parameters())
    assert model.keys() == {name for name, p in named.items() if p.requires_grad}
    assert frozen.keys() == {name for name, p in named.items() if not p.requires_grad}
    assert distance(model | frozen, law) < CLOSE
    assert all(torch.equal(each["shift"], law["shift"]) for each in buffers)
    assert sum(held) == sum(p.numel() for p in named.values()), "each element is held once"
    assert sum(each["error"].value for each in totals if each) == pytest.approx(evaluated(workload, law), abs=1e-7)
    assert {point["round"] for point in points} == {STEPS - 1}
    moments = joined(parts, "optim")
    if workload.kind == "adam":
        assert {name.rpartition("/")[0] for name in moments} == model.keys()
        assert all(moments[f"{name}/exp_avg"].numel() == value.numel() for name, value in model.items())


def test_a_whole_state_and_drawn_shards_are_the_same_start(runs):
    found = runs[1]
    drawn, given = (joined([each[0] for each in found[name]]) for name in ("adam", "whole"))
    assert distance(drawn, given) == 0


def evaluated(workload, state):
    model = workload.model()
    model.load_state_dict(state)
    batches = workload.data().batches(rank=0, size=1, seed=0, epoch=0)
    return sum(float((model(batch.x) - batch.y).detach().abs().sum()) for batch in batches)


def test_one_process_has_the_bits_of_a_plain_loop(runs):
    size, found = runs
    if size > 1:
        pytest.skip("several processes add in another order")
    workload = CASES["sgd"]
    model = workload.model()
    deferred(workload, 0).fill(model)
    optimizer = workload.optimizer([p for p in model.parameters() if p.requires_grad])
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, workload.schedule(optimizer))
    data = workload.data()
    epochs = [batch for epoch in range(2) for batch in data.batches(rank=0, size=1, seed=0, epoch=epoch)]
    for batch in epochs[:STEPS]:
        optimizer.zero_grad()
        workload.loss(model, batch).backward()
        optimizer.step()
        rates.step()
    law = model.state_dict()
    part = joined([found["sgd"][0][0]])
    assert all(torch.equal(value, law[name].reshape(-1)) for name, value in part.items())


# ---- deaths


def dies(*place):
    """Rank 1 ends after two rounds; the others must get an error that names it."""
    rank, size, addresses, listener = place
    loop, peers = loop_on(rank, size, addresses, listener, Words(), 50, timeout=20.0)
    try:
        rounds(loop, 2)
        if rank == 1:
            exit_now()
        rounds(loop, 3)
    finally:
        loop.close()
        peers.close()


def test_a_dead_process_is_named_to_the_others():
    ended = in_processes(dies, 3)
    assert [each.error for each in ended] == ["PeerLost", "exited", "PeerLost"]
    assert all("worker-1" in each.text or "rank 1" in each.text for each in (ended[0], ended[2]))


def dies_inside(*place):
    """Rank 1 ends inside of a forward pass, when the others wait in a collective of torch."""
    rank, size, addresses, listener = place
    workload = Words()
    loop, peers = loop_on(rank, size, addresses, listener, workload, 50, timeout=20.0)
    try:
        rounds(loop, 1)
        if rank == 1:
            loop.w.model.module.layers[1].register_forward_pre_hook(lambda *_: exit_now())
        rounds(loop, 3)
    finally:
        loop.close()
        peers.close()


def test_a_process_that_dies_inside_a_pass_is_named():
    ended = in_processes(dies_inside, 2)
    assert [each.error for each in ended] == ["PeerLost", "exited"]
    assert "worker-1" in ended[0].text or "rank 1" in ended[0].text


# ---- pure


def test_rows():
    assert [rows_of(7, rank, 3) for rank in range(3)] == [(0, 3), (3, 6), (6, 7)]
    assert [rows_of(1, rank, 3) for rank in range(3)] == [(0, 1), (1, 1), (1, 1)]
    for rows in range(12):
        for size in range(1, 6):
            cut = [rows_of(rows, rank, size) for rank in range(size)]
            assert cut[0][0] == 0 and cut[-1][1] == rows
            assert all(one[1] == two[0] for one, two in pairwise(cut))
            sizes = [len(part) for part in torch.arange(rows).chunk(size)] if rows else [0]
            assert [hi - lo for lo, hi in cut][: len(sizes)] == sizes, "the cut is that of torch.chunk"


def test_units_share_no_parameter_with_other_modules():
    model = Net()
    assert list(units_of(model)) == ["layers.0", "layers.1"]
    model.layers[0].up.bias = model.layers[1].up.bias
    assert list(units_of(model)) == []
    model = Net()
    model.layers[0].down.bias = nn.Parameter(torch.zeros(5))
    model.extra = nn.Linear(16, 5)
    model.extra.weight = model.layers[0].down.weight
    assert list(units_of(model)) == ["layers.1"]
    assert units_of(nn.Linear(3, 3)) == {}


@pytest.mark.parametrize(
    ("field", "value", "way"),
    [
        ("compile", "eager", "set compile to False"),
        ("sync_batchnorm", True, "sync_batchnorm=False"),
        ("average", rayps.EMA(0.9), "leave average out"),
        ("precision", "fp16", "set precision to 'bf16'"),
    ],
)
def test_refused_fields_name_the_way_out(field, value, way):
    def checked(**fields):
        preflight(Words(**fields), parse("all_reduce:shard=parameters"), JobSpec(workers=2))

    with pytest.raises(ConfigError, match=way) as raised:
        checked(**{field: value})
    assert raised.value.data["field"] == field
    checked(precision="bf16", clip_norm=1.0, accumulate=3, checkpoint_activations=True)


def test_refused_models_name_the_way_out():
    scalar = nn.Linear(2, 2)
    scalar.scale = nn.Parameter(torch.tensor(1.0))
    for model, text in (
        (scalar, r"parameter 'scale' is a scalar.*\[1\]"),
        (nn.Sequential(nn.Embedding(3, 2, sparse=True)), "layer '0' has sparse gradients"),
        (nn.Sequential(nn.SyncBatchNorm(3)), "use BatchNorm layers"),
    ):
        with pytest.raises((ConfigError, WorkloadError), match=text):
            check_divisible(model)
    check_divisible(Net())


# ---- jobs

SHARDED = rayps.AllReduce(shard="parameters")


def job(cluster, workload, strategy=SHARDED, **options):
    try:
        return rayps.train(workload, strategy=strategy, cluster=cluster, progress=False, **options)
    finally:
        cluster.close()


def test_a_job_of_two_processes_saves_parts_that_any_layout_resumes(tmp_path):
    workload = Words()
    options = {"workers": 2, "checkpoint": str(tmp_path), "checkpoint_every": 3}
    result = job(ProcessCluster(), workload, steps=5, **options)
    law = plain(workload, 2, 5)
    assert distance({name: value.reshape(-1) for name, value in result.model().state_dict().items()}, law) < CLOSE
    assert result.metrics["error"] == pytest.approx(evaluated(workload, law), abs=1e-7)
    law = plain(workload, 2, 8)
    resumed = job(LocalCluster(), workload, "all_reduce", steps=8, resume=True, **options)
    assert distance({name: value.reshape(-1) for name, value in resumed.model().state_dict().items()}, law) < CLOSE


def test_workers_on_threads_and_refused_fields_end_the_job_with_the_way_out():
    with pytest.raises(ConfigError, match=r"needs a process for each worker[^\n]*\n.*one worker, or shard='gradients'"):
        job(LocalCluster(), Words(), workers=2, steps=2, timeout=30)
    with pytest.raises(ConfigError, match="set compile to False"):
        job(LocalCluster(), Words(compile="eager"), workers=2, steps=2)


# ------------------------------------------------------------------------------------------------ weights in a loss


class Reading(Words):
    """A loss or a metric that reads a weight outside of its module's forward."""

    form = ""

    def loss(self, model, batch):
        found = super().loss(model, batch)
        if self.form == "penalty":
            return found + 0.1 * model.last.weight.square().sum()
        if self.form == "dict":
            return {"loss": found, "norm": model.last.weight.detach().norm()}
        if self.form == "call":
            return found + nn.functional.linear(batch.y.new_ones(2, 7), model.last.weight).square().mean()
        if self.form == "evaluation" and not model.training:
            return found + model.last.weight.square().sum()
        return found

    def evaluate(self, model, batch):
        return {"norm": model.last.weight.norm()} if self.form == "metric" else super().evaluate(model, batch)


READ = {
    "penalty": r"loss\(model, batch\) read 'last.weight' outside of its module's forward:\n",
    "dict": r"loss\(model, batch\) read a parameter outside of its module's forward:\n",
    "call": r"\(.*test_sharded_parameters.py:\d+\)\na parameter was read outside of its module's forward: ",
    "evaluation": r"loss\(model, batch\) read a parameter outside",
    "metric": r"evaluate\(model, batch\) for 'norm' read a parameter outside",
}


def refusals(*place):
    found = {}
    for number, form in enumerate(READ, 1):
        rank, size, addresses, listener = place
        loop, peers = loop_on(rank, size, addresses, listener, Reading(form=form), STEPS, generation=number)
        try:
            rounds(loop, 1)
            loop.evaluate()
        except WorkloadError as error:
            found[form] = error.message
        finally:
            loop.close()
            peers.close()
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_a_weight_that_is_read_outside_of_its_forward_is_refused_by_name(size):
    for found in results(refusals, size):
        for form, words in READ.items():
            assert re.search(words, found[form]), found[form]
            assert "use shard='gradients' or shard='optimizer'" in found[form]

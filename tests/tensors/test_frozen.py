"""Parameters that do not learn: each worker's process gets them once, servers never, and a folder of checkpoints once.

The law is the run of a plain loop, and a resume that equals the run without a stop.
"""

import pytest
import torch
from rayps_client.errors import WorkloadError
from required_module import required
from small_work import Small, Watched, distance, plain, train
from torch import nn

from rayps.runtime.driver import worker_group
from rayps.runtime.driver.worker_actor import WorkerActor
from rayps.tensors.checkpoints import checkpoint
from rayps.tensors.snapshot import Snapshot, hash_of
from rayps.worker.run import GenerationRun
from rayps.workload.adapters import check_adapters


class Based(Small):
    """A frozen layer, one that learns, and running statistics."""

    def model(self):
        model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.BatchNorm1d(6), nn.Linear(6, 1)).double()
        model[0].requires_grad_(False)
        return model


class Teacher(Based):
    """The frozen layer follows in each step: it is a state, and no constant."""

    def loss(self, model, batch):
        found = super().loss(model, batch)
        if model.training:
            with torch.no_grad():
                model[0].weight.mul_(0.9)
        return found


FROZEN = {"0.weight", "0.bias"}


@pytest.fixture
def begun(monkeypatch):
    """The names of the buffers that each call of `begin` brought to a worker."""
    found, begin = [], WorkerActor.begin

    def recorded(self, plan, snapshot, own=None):
        found.append((plan.rank, plan.generation, set(snapshot.buffers)))
        return begin(self, plan, snapshot, own)

    monkeypatch.setattr(WorkerActor, "begin", recorded)
    return found


def two_phases(first, second="all_reduce"):
    return [(1, first), second]


@pytest.mark.parametrize("first", ["all_reduce", "parameter_server:shards=2", "local_sgd:period=2"])
def test_a_worker_gets_frozen_parameters_once(begun, first):
    result = train(Based(), two_phases(first), workers=2, epochs=2)
    by_generation = {generation: names for _, generation, names in begun}
    assert by_generation[1] >= FROZEN
    assert not FROZEN & by_generation[2]
    assert len(begun) == 4
    assert result.model()[0].weight.equal(plain(Based(), 2, epochs=1)[0][0].weight)


def test_the_parts_of_a_checkpoint_have_only_what_changes(monkeypatch):
    parts, part = [], GenerationRun.part
    monkeypatch.setattr(GenerationRun, "part", lambda self, rounds: parts.append(part(self, rounds)) or parts[-1])
    train(Based(), workers=2, epochs=2)
    kept = {name for each in parts if each is not None for name in each.buffers}
    assert kept == {"2.running_mean", "2.running_var", "2.num_batches_tracked"}


def test_a_worker_that_changed_one_gets_them_again(begun):
    whole = train(Teacher(), workers=1, epochs=2)
    begun.clear()
    parts = train(Teacher(), two_phases("all_reduce", "parameter_server"), workers=1, epochs=2)
    assert begun[-1][2] >= FROZEN
    assert distance(parts.model(), whole.model()) < 1e-12


def test_a_worker_without_the_values_says_so_and_gets_them(monkeypatch, begun):
    monkeypatch.setattr(GenerationRun, "frozen_values", lambda self: {})
    result = train(Based(), two_phases("all_reduce"), workers=2, epochs=2)
    assert [names >= FROZEN for _, generation, names in begun if generation == 2] == [False, False, True, True]
    assert distance(result.model(), train(Based(), workers=2, epochs=2).model()) < 1e-12


@pytest.mark.parametrize("kind", [Based, Teacher])
def test_a_resume_continues_with_them(tmp_path, kind):
    whole = train(kind(), workers=1, steps=20)
    train(kind(), workers=1, steps=7, checkpoint=tmp_path)
    resumed = train(kind(), workers=1, steps=20, checkpoint=tmp_path, resume=True)
    assert distance(resumed.model(), whole.model()) < 1e-12
    assert resumed.model()[0].weight.equal(whole.model()[0].weight)


def test_checkpoints_share_one_file_and_each_is_whole(tmp_path):
    train(Based(), workers=2, epochs=1, checkpoint=tmp_path)
    train(Based(), workers=2, epochs=3, checkpoint=tmp_path, resume=True)
    first, second = sorted(tmp_path.glob("step-*"))
    files = [path / "frozen.safetensors" for path in (first, second)]
    assert files[0].stat().st_ino == files[1].stat().st_ino
    for path in first.iterdir():
        path.unlink()
    first.rmdir()
    checkpoint.verify(second)
    snapshot = Snapshot.from_state(checkpoint.load(second))
    assert snapshot.frozen == FROZEN
    assert snapshot.frozen_hash == hash_of({name: snapshot.buffers[name] for name in FROZEN})


def test_the_hash_is_of_names_shapes_kinds_and_bytes():
    one = {"a": torch.arange(6.0), "b": torch.ones(2, dtype=torch.bfloat16)}
    assert hash_of(one) == hash_of(dict(reversed(one.items())))
    others = [
        {"a": one["a"].view(2, 3), "b": one["b"]},
        {"c": one["a"], "b": one["b"]},
        {"a": one["a"] + 1, "b": one["b"]},
        {"a": one["a"].to(torch.int32), "b": one["b"]},
        {"a": one["a"]},
    ]
    assert len({hash_of(one), *map(hash_of, others)}) == 6
    assert hash_of({}) == ""


class Wide(Small):
    """A frozen base of many parameters, and few that learn."""

    def model(self):
        base = nn.Sequential(nn.Linear(5, 4000), nn.Tanh(), nn.Linear(4000, 1)).requires_grad_(False)
        return nn.Sequential(nn.Linear(5, 5), base).double()


@pytest.mark.parametrize("strategy", ["all_reduce", "parameter_server:shards=2"])
def test_rings_and_servers_have_only_what_learns(strategy, monkeypatch):
    learns, shards, assemble = 30, [], worker_group.assemble

    def recorded(base, workers, held):
        shards.append([part.params.numel() for part in held])
        return assemble(base, workers, held)

    monkeypatch.setattr(worker_group, "assemble", recorded)
    result = train(Wide(), strategy, workers=2, epochs=2)
    assert result.snapshot.layout.size == learns
    assert shards
    assert {sum(sizes) for sizes in shards} == ({learns} if "server" in strategy else {0})
    assert all(moved < 16 * learns * 8 for moved in result.history["bytes"].to_pylist())  # the base has 224 000 bytes
    assert result.model()[1][0].weight.shape == (4000, 5)


class Adapted(nn.Module):
    """A layer with an adapter, as peft makes it."""

    def __init__(self, base):
        super().__init__()
        self.base_layer, self.lora = base, nn.Linear(4, 4)


def test_an_adapter_on_a_tied_weight_is_refused():
    words, head = nn.Embedding(4, 4), nn.Linear(4, 4, bias=False)
    head.weight = words.weight
    with pytest.raises(WorkloadError, match=r"(?s)layer '1'.*'0' shares.*target_modules"):
        check_adapters(nn.Sequential(words, Adapted(head)))
    check_adapters(nn.Sequential(nn.Embedding(4, 4), Adapted(nn.Linear(4, 4, bias=False))))


def test_lora_on_a_tied_head_is_refused_before_workers_start():
    transformers = required("transformers")
    peft = required("peft")
    made = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=2))
    with pytest.raises(WorkloadError, match=r"lm_head.*tied"):
        check_adapters(peft.get_peft_model(made, peft.LoraConfig(target_modules=["lm_head"])))

    class Tied(Small):
        def model(self):
            return peft.get_peft_model(made, peft.LoraConfig(target_modules=["lm_head"]))

    cluster = Watched()
    try:
        with pytest.raises(WorkloadError, match=r"lm_head.*tied"):
            train(Tied(), cluster=cluster, workers=2)
    finally:
        cluster.close()
    assert not any(kind == "WorkerActor" for kind, _ in cluster.spawned)

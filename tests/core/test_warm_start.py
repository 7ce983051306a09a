"""`start_from`, `Result.save` and `rayps.load_state`: what is saved is what starts, by name, under every strategy."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from federated_work import Fed
from rayps_client.errors import CheckpointError, ConfigError
from required_module import required
from small_work import Small, distance, kinds, train
from torch import nn

import rayps
from rayps.core.job.warm_start import StartFrom
from rayps.strategies.job import JobSpec


class Tied(Small):
    """A model with a tied pair of weights, a persistent buffer, one that is not, and a frozen parameter."""

    def model(self):
        return TiedNet()


class TiedNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 5).double(), nn.Linear(5, 5).double()
        self.second.weight = self.first.weight
        self.head = nn.Linear(5, 1).double()
        self.scale = nn.Parameter(torch.full((1,), 0.5, dtype=torch.float64), requires_grad=False)
        self.register_buffer("seen", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("mask", torch.ones(5, dtype=torch.float64), persistent=False)

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x * self.mask))))) * self.scale


def listing(folder):
    return sorted(path.name for path in folder.iterdir())


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(model, other):
    assert model.keys() == other.keys()
    for name in model:
        assert torch.equal(model[name], other[name]), name


def other_weights(work=Small, seed=99):
    torch.manual_seed(seed)
    return work().model()


def first_loss(work, start, strategy="all_reduce", **options):
    found = train(work, strategy, start_from=start, steps=1, workers=options.pop("workers", 1), **options)
    return found.history.column("loss")[0].as_py(), found


# ---- save


def test_a_saved_model_is_loaded_with_plain_safetensors(tmp_path):
    result = train(Tied(), workers=2)
    assert result.save(tmp_path / "out") == tmp_path / "out"
    assert listing(tmp_path) == ["out"]
    assert listing(tmp_path / "out") == ["model.safetensors"]
    stored = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert len({"first.weight", "second.weight"} & stored.keys()) == 1
    fresh = TiedNet()
    safetensors.torch.load_model(fresh, tmp_path / "out" / "model.safetensors")
    same(state(fresh), state(result.model()))
    again = rayps.load_state(TiedNet(), tmp_path / "out")
    same(state(again), state(result.model()))
    assert again.first.weight is again.second.weight


def test_nothing_is_overwritten(tmp_path):
    result = train(Small())
    result.save(tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="not empty: nothing is overwritten"):
        result.save(tmp_path / "out")
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="nothing is overwritten"):
        result.save(tmp_path / "file")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    assert listing(tmp_path) == ["file", "out"]
    (tmp_path / "empty").mkdir()
    result.save(tmp_path / "empty")


def test_a_failed_save_leaves_nothing(tmp_path, monkeypatch):
    def full(model, file):
        Path(file).write_bytes(b"some")
        raise OSError(28, "No space left on device")

    result = train(Small())
    monkeypatch.setattr(safetensors.torch, "save_model", full)
    with pytest.raises(CheckpointError, match="No space left"):
        result.save(tmp_path / "out")
    assert listing(tmp_path) == []


class Pretrained(nn.Linear):
    """A model with the method of Hugging Face."""

    def save_pretrained(self, folder):
        safetensors.torch.save_file(dict(self.state_dict()), folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"in": self.in_features}))


class PretrainedWork(Small):
    def model(self):
        return Pretrained(5, 1).double()


def test_save_pretrained_is_used(tmp_path):
    result = train(PretrainedWork())
    result.save(tmp_path / "out")
    assert listing(tmp_path / "out") == ["config.json", "model.safetensors"]
    assert train(PretrainedWork(), start_from=str(tmp_path / "out"), steps=1).history.num_rows == 1


def test_a_hugging_face_model(tmp_path):
    transformers = required("transformers")

    class Causal(rayps.Workload):
        def model(self):
            config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=6)
            return transformers.GPT2LMHeadModel(config)

        def data(self):
            ids = torch.randint(0, 11, (8, 6), generator=torch.Generator().manual_seed(0))
            return rayps.data.tensors(ids, batch_size=2)

        def loss(self, model, batch):
            return model(input_ids=batch.x, labels=batch.x).loss

    result = train(Causal(), workers=2, steps=2)
    result.save(tmp_path / "gpt")
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "gpt")
    same(state(again), state(result.model()))
    assert again.lm_head.weight is again.transformer.wte.weight
    warm = train(Causal(), start_from=str(tmp_path / "gpt"), steps=1, seed=5)
    assert "started_from" in kinds(warm)
    assert distance(warm.model(), result.model()) < 1
    # a checkpoint sharded by Hugging Face
    again.save_pretrained(tmp_path / "sharded", max_shard_size="2KB")
    assert (tmp_path / "sharded" / "model.safetensors.index.json").exists()
    loaded = rayps.load_state(Causal().model(), tmp_path / "sharded")
    same(state(loaded), state(result.model()))
    # the body alone, without the prefix of the model with a head
    again.transformer.save_pretrained(tmp_path / "body")
    with pytest.raises(CheckpointError, match=r"with add_prefix 'transformer\.' more names would fit"):
        rayps.load_state(Causal().model(), tmp_path / "body")
    loaded = rayps.load_state(Causal().model(), tmp_path / "body", add_prefix="transformer.")
    same(state(loaded), state(result.model()))


# ---- start


@pytest.mark.parametrize(
    ("strategy", "workers"),
    [
        ("all_reduce", 2),
        ("parameter_server:shards=2,staleness=0", 2),
        ("local_sgd:period=2", 2),
        ("hogwild", 2),
        ("pipeline:stages=2,micro_batches=1", 2),
        ("fedavg:fraction=1", 2),
    ],
)
def test_each_strategy_starts_with_the_file(tmp_path, strategy, workers):
    base = other_weights(Fed)
    safetensors.torch.save_model(base, str(tmp_path / "base.safetensors"))

    class Frozen(Fed):  # a step of rate 0 leaves the parameters of the file
        def optimizer(self, params):
            return torch.optim.SGD(params, lr=0.0)

    result = train(Frozen(), strategy, workers=workers, steps=2, start_from=tmp_path / "base.safetensors")
    assert distance(result.model(), base) == 0
    assert kinds(result).count("started_from") == 1


def test_the_run_is_that_of_a_plain_loop_from_the_same_weights(tmp_path):
    from small_work import plain

    base = other_weights()
    safetensors.torch.save_model(base, str(tmp_path / "base.safetensors"))

    class FromBase(Small):
        def model(self):
            return base

    warm = train(Small(), workers=2, epochs=2, start_from=tmp_path / "base.safetensors")
    law = plain(FromBase(), 2, epochs=2)[0]
    assert distance(warm.model(), law) < 1e-12


def test_a_checkpoint_gives_parameters_only(tmp_path):
    done = train(Tied(optimizer="adam"), workers=2, epochs=1, checkpoint=tmp_path / "saved")
    warm = train(Tied(optimizer="adam"), workers=3, steps=2, start_from=done.checkpoint)
    assert warm.history.column("round").to_pylist() == [0, 1]
    done.save(tmp_path / "out")
    assert (
        distance(warm.model(), train(Tied(optimizer="adam"), workers=3, steps=2, start_from=tmp_path / "out").model())
        == 0
    )


def test_a_run_that_recovers_starts_from_the_file_once(tmp_path):
    safetensors.torch.save_model(other_weights(), str(tmp_path / "base.safetensors"))
    first = train(Small(), epochs=1, start_from=tmp_path / "base.safetensors", checkpoint=tmp_path / "saved")
    more = train(Small(), epochs=2, resume=True, checkpoint=tmp_path / "saved")
    whole = train(Small(), epochs=2, start_from=tmp_path / "base.safetensors")
    assert distance(more.model(), whole.model()) == 0
    assert first.checkpoint is not None


def test_other_dtypes_are_converted(tmp_path):
    base = other_weights()
    half = {name: value.bfloat16() for name, value in base.state_dict().items()}
    safetensors.torch.save_file(half, tmp_path / "half.safetensors")
    model = rayps.load_state(Small().model(), tmp_path / "half.safetensors")
    same(state(model), {name: value.double() for name, value in half.items()})


# ---- names


def test_names_are_compared_strictly(tmp_path):
    path = tmp_path / "other.safetensors"
    tensors = dict(other_weights().state_dict())
    del tensors["2.bias"]
    tensors |= {"0.weight": torch.zeros(3, 3), "head.weight": torch.zeros(1)}
    safetensors.torch.save_file(tensors, path)
    with pytest.raises(CheckpointError) as caught:
        train(Small(), start_from=path)
    text = str(caught.value)
    assert "1 is missing (2.bias)" in text
    assert "1 is unexpected (head.weight)" in text
    assert "1 is of another shape (0.weight ([3, 3] in the file, [7, 5] in the model))" in text
    assert '"strict": False' in text
    assert len(text.splitlines()) <= 3
    found = train(Small(), start_from={"path": str(path), "strict": False}, steps=1)
    event = next(each for each in found.events if each["kind"] == "started_from")
    assert "2 of 4 tensors" in event["message"]
    assert "the others are drawn from the seed" in event["message"]


def test_a_prefix_is_said_and_not_guessed(tmp_path):
    path = tmp_path / "wrapped.safetensors"
    safetensors.torch.save_file({f"model.{k}": v for k, v in other_weights().state_dict().items()}, path)
    with pytest.raises(CheckpointError, match=r"with remove_prefix 'model\.' more names would fit"):
        train(Small(), start_from=path)
    loss, _ = first_loss(Small(), {"path": str(path), "remove_prefix": "model."})
    plain = tmp_path / "plain.safetensors"
    safetensors.torch.save_model(other_weights(), str(plain))
    assert loss == first_loss(Small(), plain)[0]


def test_a_file_of_which_nothing_fits_is_refused_also_without_strict(tmp_path):
    path = tmp_path / "foreign.safetensors"
    safetensors.torch.save_file({"a": torch.zeros(2)}, path)
    with pytest.raises(CheckpointError, match="4 are missing"):
        train(Small(), start_from={"path": str(path), "strict": False})


def test_a_tied_tensor_may_have_either_name(tmp_path):
    model = TiedNet()
    for kept, dropped in (("first.weight", "second.weight"), ("second.weight", "first.weight")):
        tensors = {name: value for name, value in model.state_dict().items() if name != dropped}
        assert kept in tensors
        safetensors.torch.save_file(tensors, tmp_path / "tied.safetensors")
        same(state(rayps.load_state(TiedNet(), tmp_path / "tied.safetensors")), state(model))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda folder: None, "there is no such file or folder"),
        (lambda folder: folder.mkdir(), "has no model.safetensors, no index and no checkpoint"),
        (lambda folder: (folder.mkdir(), (folder / "pytorch_model.bin").touch()), "a pickle, which could run any code"),
        (lambda folder: folder.write_bytes(b"nonsense"), "cannot be read as safetensors"),
    ],
)
def test_what_cannot_be_read_says_so(tmp_path, make, text):
    make(tmp_path / "given")
    with pytest.raises(CheckpointError, match=text):
        train(Small(), start_from=tmp_path / "given")


def test_an_index_may_not_name_files_elsewhere(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    with pytest.raises(CheckpointError, match="not in its folder"):
        train(Small(), start_from=index)
    index.write_text("[]")
    with pytest.raises(CheckpointError, match="not an index"):
        train(Small(), start_from=index)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (7, "start_from is 7"),
        ({"strict": False}, "start_from is"),
        ({"path": "a", "strikt": False}, "has no field 'strikt'"),
        ({"path": "a", "strict": "no"}, "strict='no'"),
    ],
)
def test_the_option_is_checked(given, text):
    with pytest.raises(ConfigError, match=text):
        StartFrom.parse(given)
    with pytest.raises(ConfigError, match=text):
        JobSpec("a:B", start_from=given).check()


def test_start_from_and_resume_exclude_each_other(tmp_path):
    with pytest.raises(ConfigError, match="start_from and resume"):
        JobSpec("a:B", start_from="x", resume="y").check()
    with pytest.raises(ConfigError, match="start_from and resume"):
        train(Small(), start_from="x", resume=tmp_path / "step-00000001")


# ---- parameters that do not learn


class Based(Small):
    """A frozen layer and one that learns."""

    def model(self):
        model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1)).double()
        model[0].requires_grad_(False)
        return model


def from_file(base):
    """The same workload, whose model has the weights of `base` from the beginning."""

    class FromBase(Based):
        def model(self):
            model = super().model()
            model.load_state_dict(base.state_dict())
            return model

    return FromBase()


@pytest.mark.parametrize(
    "strategy",
    [
        "all_reduce",
        "local_sgd:period=2",
        [(1, "all_reduce"), "parameter_server:shards=2"],
        [(1, "parameter_server"), "all_reduce"],
    ],
    ids=str,
)
def test_workers_train_on_the_frozen_parameters_of_the_file(tmp_path, strategy):
    base = other_weights(Based)
    safetensors.torch.save_model(base, str(tmp_path / "base.safetensors"))
    result = train(Based(), strategy, workers=2, epochs=2, start_from=tmp_path / "base.safetensors")
    law = train(from_file(base), strategy, workers=2, epochs=2)
    assert distance(result.model(), law.model()) < 1e-12
    assert result.model()[0].weight.equal(base[0].weight)
    assert result.history["loss"].to_pylist() == pytest.approx(law.history["loss"].to_pylist(), abs=1e-12)


def test_a_resumed_run_has_the_frozen_parameters_of_the_file(tmp_path):
    base = other_weights(Based)
    safetensors.torch.save_model(base, str(tmp_path / "base.safetensors"))
    options = {"start_from": tmp_path / "base.safetensors"}
    whole = train(Based(), workers=2, epochs=2, **options)
    train(Based(), workers=2, epochs=1, checkpoint=tmp_path / "saved", **options)
    resumed = train(Based(), workers=2, epochs=2, checkpoint=tmp_path / "saved", resume=True)
    assert distance(resumed.model(), whole.model()) == 0
    assert resumed.model()[0].weight.equal(base[0].weight)


def causal(seed):
    transformers = required("transformers")
    torch.manual_seed(seed)
    sizes = {"vocab_size": 11, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))


class Adapters(Small):
    """Adapters on a language model, whose base is `folder` or drawn from a seed."""

    def __init__(self, folder=None):
        super().__init__(n=12, batch=3)
        self.folder = folder

    def model(self):
        peft = required("peft")
        base = causal(5)
        if self.folder is not None:
            base = type(base).from_pretrained(self.folder, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
        torch.manual_seed(7)
        return peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.0))

    def data(self):
        return rayps.data.tensors(torch.arange(self.n * 8).view(self.n, 8) * 7 % 11, batch_size=self.batch)

    def loss(self, model, batch):
        return model(input_ids=batch.x, labels=batch.x).loss

    def evaluate(self, model, batch):
        return {}


def test_adapters_train_on_a_base_from_a_folder(tmp_path):
    """A base that `model()` reads from a folder is that of the checkpoint, with which another base is replaced."""
    causal(11).save_pretrained(tmp_path / "base")
    made = train(Adapters(tmp_path / "base"), workers=2, steps=1, checkpoint=tmp_path / "saved")
    base = causal(11).transformer.wte.weight
    phases = [(1, "all_reduce"), "parameter_server"]
    warm = train(Adapters(), phases, workers=2, epochs=2, start_from=made.checkpoint)
    law = train(Adapters(tmp_path / "base"), phases, workers=2, epochs=2, start_from=made.checkpoint)
    assert distance(warm.model(), law.model()) == 0
    assert frozen(warm.model())["base_model.model.transformer.wte.weight"].equal(base)
    assert not frozen(Adapters().model())["base_model.model.transformer.wte.weight"].equal(base)
    assert warm.history["loss"].to_pylist() == law.history["loss"].to_pylist()


@pytest.mark.parametrize("beside", [{}, {"modules_to_save": ["ln_f"]}])
def test_saved_adapters_are_read_back(tmp_path, beside):
    """`Result.save` writes adapters as peft does; peft, `load_state` and `start_from` read them."""
    peft = required("peft")

    class Saved(Adapters):
        def model(self):
            torch.manual_seed(7)
            config = peft.LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.0, **beside)
            return peft.get_peft_model(causal(5), config)

    work = Saved()
    made = train(work, workers=2, epochs=2)
    folder = made.save(tmp_path / "adapters")
    assert (folder / "adapter_model.safetensors").is_file()
    assert distance(work.model(), made.model()) > 0
    read = rayps.load_state(work.model(), folder)
    assert distance(read, made.model()) == 0
    assert distance(peft.PeftModel.from_pretrained(causal(5), folder), made.model()) == 0
    warm = train(work, workers=2, steps=1, start_from=folder)
    law = train(work, workers=2, steps=1, start_from={"path": str(folder), "strict": True})
    other = train(work, workers=2, steps=1)
    assert distance(warm.model(), law.model()) == 0
    assert distance(warm.model(), other.model()) > 0
    batch = next(work.data().batches(rank=0, size=1, seed=0, epoch=0))
    with torch.no_grad():
        assert work.loss(read.eval(), batch).item() == pytest.approx(work.loss(made.model(), batch).item())
    with pytest.raises(CheckpointError, match=r"has adapters of peft, and the model has none: return get_peft_model"):
        rayps.load_state(causal(5), folder)
    wide = peft.get_peft_model(causal(5), peft.LoraConfig(r=3, target_modules=["c_attn"], **beside))
    with pytest.raises(CheckpointError, match=r"of another shape .*lora_A"):
        rayps.load_state(wide, folder)


def test_adapters_of_several_names_are_read_back(tmp_path):
    peft = required("peft")

    def model(seed):
        torch.manual_seed(seed)
        config = peft.LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False)
        found = peft.get_peft_model(causal(5), config)
        found.add_adapter("other", config)
        return found

    first = model(1)
    first.save_pretrained(tmp_path / "both")
    read = rayps.load_state(model(2), tmp_path / "both")
    assert all(value.equal(first.state_dict()[name]) for name, value in read.state_dict().items())
    alone = rayps.load_state(peft.get_peft_model(causal(5), read.peft_config["default"]), tmp_path / "both" / "other")
    name = "base_model.model.transformer.h.0.attn.c_attn.lora_A.default.weight"
    assert alone.state_dict()[name].equal(first.state_dict()[name.replace("default", "other")])


def frozen(model):
    return {name: p for name, p in model.named_parameters() if not p.requires_grad}

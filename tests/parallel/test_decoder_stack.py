"""Models whose forward calls the blocks of one ModuleList are cut without an adapter: the law is the whole model."""

import pytest
import torch
from rayps_client.errors import ConfigError, WorkloadError
from required_module import required
from small_work import distance, train
from torch import nn
from torch.nn import functional

import rayps
from rayps.parallel.pipeline.cut import check, layers

WORDS, LENGTH, WIDTH = 23, 12, 16


class Block(nn.Module):
    """A block with an argument that all blocks share, and one of its own."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden, mask, *, scale):
        return hidden + torch.tanh(self.inner(hidden)) * mask * scale["by"]


class Stack(nn.Module):
    """Embeddings, blocks, a norm and a tied head; positions come from a buffer that is registered last."""

    def __init__(self, blocks=4):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.places = Places()

    def forward(self, x, mask=None):
        hidden = self.words(x) + self.places(x)
        mask = torch.ones(x.shape[1], 1, dtype=hidden.dtype) if mask is None else mask
        for i, block in enumerate(self.blocks):
            hidden = block(hidden, mask, scale={"by": 1.0 / (i + 1)})
        return {"logits": self.head(self.norm(hidden))}


class Places(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.linspace(0, 1, LENGTH)[:, None])

    def forward(self, x):
        return self.table[: x.shape[1]]


class Skipping(Stack):
    """The head uses what the embedding gave."""

    def forward(self, x, mask=None):
        first = self.words(x)
        return {"logits": super().forward(x, mask)["logits"] + self.head(first)}


class Early(Stack):
    """A norm that runs last and is registered first."""

    def __init__(self):
        nn.Module.__init__(self)
        self.norm = nn.LayerNorm(WIDTH)
        blocks = Stack(3)
        self.words, self.blocks, self.head, self.places = blocks.words, blocks.blocks, blocks.head, blocks.places


class Text(rayps.Workload):
    """The next word of a sequence that is a function of the ones before."""

    def __init__(self, make=Stack):
        self.make = make

    def model(self):
        return self.make().double()

    def data(self):
        generator = torch.Generator().manual_seed(3)
        x = torch.randint(0, WORDS, (30, LENGTH), generator=generator)
        return rayps.data.tensors(x, (x * 7 + x.roll(1, 1)) % WORDS, batch_size=5)

    def loss(self, model, batch):
        return functional.cross_entropy(model(batch.x)["logits"].flatten(0, 1), batch.y.flatten())

    def optimizer(self, params):
        return torch.optim.AdamW(params, lr=0.01)


def from_config(name):
    transformers = required("transformers")
    sizes = {
        "vocab_size": WORDS,
        "hidden_size": WIDTH,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 24,
        "max_position_embeddings": LENGTH,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    made = {
        "gpt2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=WORDS, n_embd=WIDTH, n_layer=3, n_head=4, n_positions=LENGTH,
                bos_token_id=None, eos_token_id=None, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            )
        ),
        "llama": lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**sizes, num_key_value_heads=2, tie_word_embeddings=True)
        ),
        "gemma2": lambda: transformers.Gemma2ForCausalLM(
            transformers.Gemma2Config(**sizes, num_key_value_heads=2, head_dim=4)
        ),
        "qwen3": lambda: transformers.Qwen3ForCausalLM(
            transformers.Qwen3Config(**sizes, num_key_value_heads=2, head_dim=4)
        ),
        "neox": lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**sizes)),
        "opt": lambda: transformers.OPTForCausalLM(
            transformers.OPTConfig(
                vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=3, num_attention_heads=4, ffn_dim=24,
                max_position_embeddings=LENGTH, word_embed_proj_dim=WIDTH,
            )
        ),
    }  # fmt: skip
    torch.manual_seed(1)
    return made[name]()


def sample():
    return torch.randint(0, WORDS, (3, LENGTH), generator=torch.Generator().manual_seed(5))


def test_front_blocks_and_head_are_the_layers():
    found = layers(Stack())
    assert [layer.name for layer in found] == ["front", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"]
    model = Stack()
    of_layers = {id(p) for layer in layers(model) for p in layer.module.parameters()}
    assert of_layers == {id(p) for p in model.parameters()}


def test_the_layers_one_after_another_are_the_model():
    model = Stack()
    check(model, layers(model), (sample(),))
    check(model, layers(model), (sample(),), {"mask": torch.rand(LENGTH, 1)})


@pytest.mark.parametrize("kind", [Skipping, Early])
def test_a_stack_that_is_no_chain_is_refused(kind):
    model = kind()
    with pytest.raises(WorkloadError, match="would break the model"):
        check(model, layers(model), (sample(),))


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "qwen3", "neox"])
def test_a_hugging_face_decoder_is_cut_without_an_adapter(name):
    model = from_config(name)
    found = layers(model)
    assert len(found) == 5
    check(model, found, (sample(),))
    check(model, found, (), {"input_ids": sample(), "labels": sample(), "attention_mask": torch.ones(3, LENGTH)})


def test_a_decoder_whose_last_norm_is_registered_first_is_refused():
    model = from_config("opt")
    with pytest.raises(WorkloadError, match="would break the model"):
        check(model, layers(model), (sample(),))


@pytest.mark.parametrize(
    "strategy",
    [
        "pipeline:stages=2,micro_batches=3",
        "pipeline:stages=3,micro_batches=2,schedule=gpipe",
        "pipeline:stages=2,micro_batches=3,schedule=zero_bubble",
        "pipeline:stages=2,micro_batches=2,schedule=interleaved,chunks=2",
    ],
)
def test_a_pipeline_of_a_stack_learns_what_the_whole_model_learns(strategy):
    stages = int(strategy.split("stages=")[1][0])
    whole = train(Text(), epochs=2)
    parts = train(Text(), strategy, workers=stages, epochs=2)
    assert distance(parts.model(), whole.model()) < 1e-12
    assert parts.metrics["loss"] == pytest.approx(whole.metrics["loss"], abs=1e-12)


class Labelled(Text):
    """The model computes the loss itself, from its labels."""

    def loss(self, model, batch):
        return model(input_ids=batch.x, labels=batch.x).loss


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("kind", [Text, Labelled])
def test_a_pipeline_of_a_hugging_face_decoder_learns_what_the_whole_model_learns(name, kind):
    work = kind(lambda: from_config(name))
    whole = train(work, epochs=1)
    parts = train(work, "pipeline:stages=2,micro_batches=3", workers=2, epochs=1)
    assert distance(parts.model(), whole.model()) < 1e-9


class Half(Text):
    """Matrix products in bf16."""

    precision = "bf16"

    def model(self):
        return self.make()


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble"])
@pytest.mark.parametrize("make", [Stack, lambda: from_config("gpt2")])
def test_a_pipeline_in_bf16_is_the_whole_model_in_bf16(make, schedule):
    """The micro-batches are those of the whole model's accumulation: the sums of a step have another order."""
    work = Half(make)
    whole = Half(make)
    whole.accumulate = 1
    parts = train(work, f"pipeline:stages=2,micro_batches=1,schedule={schedule}", workers=2, epochs=1)
    found = train(whole, epochs=1)
    assert parts.history.column("loss").to_pylist() == pytest.approx(found.history.column("loss").to_pylist(), rel=1e-6)
    assert distance(parts.model(), found.model()) < 1e-5
    work.precision = None
    full = train(work, f"pipeline:stages=2,micro_batches=1,schedule={schedule}", workers=2, epochs=1)
    assert distance(full.model(), parts.model()) > 1e-4


@pytest.mark.parametrize(("precision", "strategy"), [("fp16", "pipeline:stages=2"), ("bf16", "tensor_parallel:size=2")])
def test_other_precisions_of_divided_models_are_refused(precision, strategy):
    work = Half()
    work.precision = precision
    with pytest.raises(ConfigError, match=f"precision is '{precision}', which a replica"):
        train(work, strategy, workers=2)

"""A Hugging Face causal language model on Hamlet, trained as people train: the same numbers as a plain torch loop.

    pip install "transformers>=5,<6"
    python examples/language_model.py --strategy all_reduce --workers 2
    python examples/language_model.py --strategy parameter_server:shards=2 --workers 2
    python examples/language_model.py --strategy pipeline:stages=2,micro_batches=4 --workers 2
    python examples/language_model.py --plain

The model is made from its configuration: nothing is downloaded. Two groups of parameters (weights decay, biases and
norms do not), tied embeddings, two micro-batches in a step, bf16, clipping, warm-up and a cosine. A pipeline cuts one
batch into micro-batches by itself: see `InPipeline`.

What to expect after 3 epochs: a loss of about 2.3 per character on text that was not learned from, whatever the
strategy, and the same by --plain, which takes the batches of all workers in each step; the frequency of the characters
alone gives 3.0.
"""

import argparse
import contextlib
from pathlib import Path

import torch
from torch.nn import functional

import rayps

FOLDER = Path(__file__).resolve().parent / "data"
LENGTH = 64  # characters in a window


class LanguageModel(rayps.Workload):
    """Which character comes next."""

    lr: float = 3e-3
    steps: int = 250  # of the cosine; an epoch of two workers has 77
    batch_size: int = 8  # windows in a micro-batch
    accumulate = 2  # micro-batches in a step
    precision = "bf16"
    clip_norm = 1.0

    def __init__(self):
        text = (FOLDER / "hamlet.txt").read_text(encoding="utf-8")
        self.characters = sorted(set(text))
        numbers = {character: i for i, character in enumerate(self.characters)}
        self.text = torch.tensor([numbers[character] for character in text])

    def model(self):
        """GPT-2 with 4 blocks, from its configuration; its head and its embedding are one tensor."""
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": LENGTH}
        off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
        return GPT2LMHeadModel(GPT2Config(vocab_size=len(self.characters), **sizes, **off))

    def windows(self, lo, hi):
        """Windows of 64 characters, and the characters that follow."""
        text = self.text[lo:hi]
        starts = torch.arange(0, len(text) - LENGTH, LENGTH)[:, None] + torch.arange(LENGTH)
        return rayps.data.tensors(text[starts], text[starts + 1], batch_size=self.batch_size)

    def data(self):
        """The first nine tenths of the play."""
        return self.windows(0, len(self.text) * 9 // 10)

    def evaluation_data(self):
        """The rest."""
        return self.windows(len(self.text) * 9 // 10, len(self.text))

    def loss(self, model, batch):
        """The sum over all characters, and their number: micro-batches then weigh by characters."""
        scores = model(input_ids=batch.x, use_cache=False).logits
        return functional.cross_entropy(scores.flatten(0, 1), batch.y.flatten(), reduction="sum"), batch.y.numel()

    def optimizer(self, named_parameters):
        """AdamW; biases and norms do not decay."""
        decay = [p for _, p in named_parameters if p.dim() > 1]
        rest = [p for _, p in named_parameters if p.dim() <= 1]
        return torch.optim.AdamW(
            [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=self.lr
        )

    def schedule(self, optimizer):
        """A warm-up of 50 steps, then a cosine."""
        rates = torch.optim.lr_scheduler
        warm = rates.LinearLR(optimizer, 0.1, total_iters=50)
        return rates.SequentialLR(optimizer, [warm, rates.CosineAnnealingLR(optimizer, self.steps)], milestones=[50])


class InPipeline(LanguageModel):
    """The same under a pipeline, whose one batch is what two workers with two micro-batches take in a step."""

    batch_size: int = 32
    accumulate = 1


def plain(work, epochs, workers=2, seed=0):
    """The same in plain torch, with the batches of `workers` workers; returns the loss on the evaluation data."""
    torch.manual_seed(seed)
    model = work.model()
    optimizer = work.optimizer(list(model.named_parameters()))
    schedule = work.schedule(optimizer)
    half = torch.autocast("cpu", torch.bfloat16) if work.precision == "bf16" else contextlib.nullcontext()
    for epoch in range(epochs):
        shares = [work.data().batches(rank=r, size=workers, seed=seed, epoch=epoch) for r in range(workers)]
        micro = [batch for together in zip(*shares, strict=True) for batch in together]
        for at in range(0, len(micro), workers * work.accumulate):
            parts = micro[at : at + workers * work.accumulate]
            tokens = sum(batch.y.numel() for batch in parts)
            optimizer.zero_grad()
            for batch in parts:
                with half:
                    total, _ = work.loss(model, batch)
                (total / tokens).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), work.clip_norm)
            optimizer.step()
            schedule.step()
    model.eval()
    with torch.no_grad(), half:
        found = [work.loss(model, b) for b in work.evaluation_data().batches(rank=0, size=1, seed=seed, epoch=0)]
    return float(sum(total for total, _ in found) / sum(count for _, count in found))


def main():
    """Train under the strategy that is asked for, and say what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="all_reduce")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--plain", action="store_true", help="a plain torch loop in this process")
    parser.add_argument("--save", help="a folder for the trained model, as by save_pretrained")
    asked = parser.parse_args()
    work = InPipeline() if asked.strategy.startswith("pipeline") else LanguageModel()
    if asked.plain:
        print(f"loss {plain(work, asked.epochs, asked.workers):.3f} by a plain loop")
        return
    result = rayps.train(work, strategy=asked.strategy, workers=asked.workers, epochs=asked.epochs)
    print(f"loss {result.metrics['loss']:.3f}  (expect 2.3 after 3 epochs)")
    if asked.save:
        result.save(asked.save)


if __name__ == "__main__":
    main()

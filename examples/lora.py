"""Fine-tune a language model with LoRA: only the adapters are sent, kept on servers and averaged.

    pip install "transformers>=5,<6" "peft>=0.18,<1"
    python examples/language_model.py --save base        # makes the weights: nothing is downloaded
    python examples/lora.py --base base --strategy all_reduce
    python examples/lora.py --base base --strategy parameter_server:shards=2

The base learned Hamlet; the adapters learn the same text in capital letters. The frozen base is sent to each worker's
process once. LoRA: Hu et al., "LoRA: low-rank adaptation of large language models", ICLR 2022.

What to expect after 3 epochs: a loss below 2.7 where the base alone has 5.6; 1 of 24 parameters learns.
"""

import argparse

import torch
from language_model import LanguageModel

import rayps


class Capitals(LanguageModel):
    """Which character comes next in a play that shouts."""

    accumulate = 1
    lr: float = 1e-2
    steps: int = 410  # of the cosine; an epoch of two workers has 153

    def __init__(self, base="base"):
        super().__init__()
        self.base = base
        upper = {
            i: self.characters.index(c.upper()) for i, c in enumerate(self.characters) if c.upper() in self.characters
        }
        self.text = torch.tensor([upper.get(i, i) for i in self.text.tolist()])

    def model(self):
        """The trained base, frozen, with adapters on its attention."""
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(self.base, local_files_only=True)
        return get_peft_model(base, LoraConfig(r=4, lora_alpha=16, target_modules=["c_attn", "c_fc"]))


def main():
    """Fine-tune under the strategy that is asked for, and say what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="base")
    parser.add_argument("--strategy", default="all_reduce")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    asked = parser.parse_args()
    result = rayps.train(Capitals(asked.base), strategy=asked.strategy, workers=asked.workers, epochs=asked.epochs)
    print(f"loss {result.metrics['loss']:.3f}  (expect less than 2.7)")


if __name__ == "__main__":
    main()

"""Training and evaluation mode of a torch model: each module keeps the mode that the user's `model()` gave it.

A frozen backbone whose BatchNorm and dropout are in evaluation mode stays so. A model whose root is in evaluation mode,
as `from_pretrained` of Hugging Face returns it, was set so as a whole, and is put into training mode as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


def prepare_to_train(model: nn.Module) -> None:
    """Put a new model into training mode if its root is in evaluation mode. Otherwise its modules keep their modes."""
    if not model.training:
        model.train()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode inside the block, and give each module its own mode back after it.

    A module's own `train` method is called where its mode changes, because it may do more than set the mode.

    Example:
        with evaluating(model), torch.no_grad():
            model(x)
    """
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in before:  # a module comes before the modules in it
            if module.training != mode:
                module.train(mode)
        for module, mode in before:  # a module that is in several others may have been changed once more
            module.training = mode

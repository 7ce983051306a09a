"""torch's compiler is not loaded for an optimizer, and does what it does as soon as somebody has loaded it."""

import subprocess
import sys

import torch
from torch.optim import Optimizer

from rayps.tensors.torch_compat import _METHODS, _find_marking_code

SCRIPT = """
import sys, torch
from rayps.tensors.optim import made
params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
sgd = made(lambda given: torch.optim.SGD([{"params": given[:1]}, {"params": given[1:], "lr": 0.5}], lr=0.1), params)
sgd.zero_grad()
again = made(lambda given: torch.optim.SGD([{"params": [p]} for p in given], lr=0.3), params)
again.load_state_dict(sgd.state_dict())
assert [group["lr"] for group in again.param_groups] == [0.1, 0.5]
for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop):
    other = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    steps = made(lambda given, kind=kind: kind(given, lr=0.1), other)
    hooked = []
    steps.register_step_post_hook(lambda *_: hooked.append(torch.is_grad_enabled()))
    for p in other:
        p.grad = torch.full((3,), 2.0)
    assert torch.is_grad_enabled() and steps.step(lambda: torch.tensor(7.0)) == 7.0 and torch.is_grad_enabled()
    assert hooked == [True] and not other[0].equal(torch.ones(3)) and other[0].requires_grad
assert "torch._dynamo" not in sys.modules

import torch._dynamo
disabled, torch._dynamo.disable = [], lambda method, *a, **o: disabled.append(method.__name__) or method
for _ in range(2):
    torch.optim.SGD(params, lr=0.1).zero_grad()
    again.load_state_dict(sgd.state_dict())
assert sorted(disabled) == ["add_param_group", "load_state_dict", "state_dict", "zero_grad"], disabled
params[0].grad = torch.ones(2)
again.step()
assert abs(params[0][0].item() - 0.9) < 1e-6
"""


def test_the_compiler_is_spared_until_it_is_there():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_torch_has_the_methods():
    """What is spared would be loaded again, unseen, if torch named or wrapped them in another way."""
    assert all(hasattr(vars(Optimizer)[name], "__wrapped__") for name in _METHODS)
    assert _find_marking_code() is not None
    assert getattr(torch.optim.Adam.step, "__wrapped__", None) is not None


def test_a_step_is_torchs_own_step_to_the_bit():
    """The same parameters by a process that has loaded the compiler first, and by one that has not."""
    script = (
        "import sys, torch\n{}\nfrom rayps.tensors.optim import made\ntorch.manual_seed(0)\n"
        "p = torch.nn.Parameter(torch.randn(50))\no = made(lambda given: torch.optim.AdamW(given, lr=0.1), [p])\n"
        "for _ in range(5):\n    p.grad = torch.randn(50)\n    o.step()\n"
        "print('torch._dynamo' in sys.modules, p.tolist())"
    )
    found = [
        subprocess.run(
            [sys.executable, "-c", script.format(first)], capture_output=True, text=True, timeout=120, check=True
        ).stdout
        for first in ("", "import torch._dynamo")
    ]
    assert [text.split()[0] for text in found] == ["False", "True"]
    assert found[0].split()[1:] == found[1].split()[1:]

"""Dropout inside split layers. Ranks are processes: torch has one random state for all threads of a process."""

import contextlib
import copy
import multiprocessing

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rayps.comm.link import Listener
from rayps.comm.ring import Ring
from rayps.parallel.tensor import plan, split

SECRET = b"t" * 32
SEED = 11


class Attends(nn.Module):
    def __init__(self, batch_first, need_weights):
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 3, dropout=0.4, batch_first=batch_first)
        self.need_weights = need_weights
        self.after = nn.Dropout(0.3)

    def forward(self, x):
        out, weights = self.attention(x, x, x, need_weights=self.need_weights)
        return self.after(out if weights is None else out * (1 + weights.mean()))


class Own(nn.Module):
    """A forward of a user's own, which drops out between `out` and `in`."""

    def __init__(self):
        super().__init__()
        self.fc, self.proj, self.after = nn.Linear(6, 15), nn.Linear(15, 6), nn.Dropout(0.5)
        self.masks = []

    def forward(self, x):
        h = self.fc(x)
        self.masks.append(F.dropout(torch.ones_like(h), 0.5, self.training))
        return self.after(self.proj(h * self.masks[-1]))


def transformer(norm_first, batch_first):
    layer = nn.TransformerEncoderLayer(12, 3, 21, dropout=0.3, norm_first=norm_first, batch_first=batch_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def mlp():
    return nn.Sequential(
        nn.Linear(12, 23), nn.ReLU(), nn.Dropout(0.5), nn.Dropout(0.1), nn.Linear(23, 12), nn.Dropout(0.5)
    )


CASES = {
    "mlp": mlp,
    "post-norm": lambda: transformer(False, True),
    "pre-norm": lambda: transformer(True, False),
    "attention": lambda: Attends(True, False),
    "attention, weights": lambda: Attends(False, True),
}


def two_steps(model, x):
    torch.manual_seed(SEED)
    outs = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        outs.append(model(x))
        outs[-1].square().mean().backward()
        optimizer.step()
    return torch.stack(outs).detach(), torch.get_rng_state()


def rank_main(rank, size, pipe):
    torch.set_num_threads(1)
    with Listener(f"worker-{rank}", SECRET, 0) as listener:
        pipe.send(listener.address)
        ring = Ring.form(rank, pipe.recv(), listener, secret=SECRET, generation=0, timeout=60, streams=1)
    report = {}
    with contextlib.closing(ring):
        x = torch.randn(3, 5, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        for name, make in CASES.items():
            torch.manual_seed(3)
            whole = make().double()
            part = split(copy.deepcopy(whole), plan(whole, size), rank, size, ring)
            (want, after), (got, mine) = two_steps(whole, x), two_steps(part, x)
            report[name] = ((want - got).abs().max().item(), torch.equal(after, mine))
        torch.manual_seed(3)
        own = Own().double()
        own = split(own, plan(own, size, {"fc": "out", "proj": "in"}), rank, size, ring)
        out, state = two_steps(own, x[..., :6])
        report["own"] = [
            each.numpy().tobytes() for each in (out, state, torch.cat([mask.flatten()[:40] for mask in own.masks]))
        ]
    pipe.send(report)


@pytest.mark.parametrize("size", [2])
def test_what_is_dropped_is_what_the_whole_layer_drops(size):
    context = multiprocessing.get_context("forkserver")
    pipes = [context.Pipe() for _ in range(size)]
    ranks = [context.Process(target=rank_main, args=(i, size, pipes[i][1]), daemon=True) for i in range(size)]
    try:
        for each in ranks:
            each.start()
        addresses = [answer(near) for near, _ in pipes]
        for near, _ in pipes:
            near.send(addresses)
        reports = [answer(near) for near, _ in pipes]
    finally:
        for each in ranks:
            each.join(60)
            each.kill()
    for report in reports:
        for name in CASES:
            distance, same_state = report[name]
            assert distance <= 1e-12, name
            assert same_state, name
    outs, states, masks = zip(*(report["own"] for report in reports), strict=True)
    for i in range(1, size):
        assert outs[i] == outs[0]  # what is dropped behind the sum is the same everywhere
        assert states[i] == states[0]
        assert masks[i] != masks[0]  # and between, each drops on its own


def answer(pipe):
    assert pipe.poll(200), "a rank did not answer"
    return pipe.recv()

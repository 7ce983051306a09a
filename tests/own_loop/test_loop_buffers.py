"""The law of buffers in a wrapped loop: workers that step together have those of rank 0, as under torch's DDP."""

import pytest
import torch
from rayps_client.errors import WorkloadError
from test_loop import run
from torch import nn
from user_code_table import STRATEGIES, wraps

import rayps
from rayps.core.strategy.strategy_families import LOCAL_UPDATES
from rayps.core.strategy.topology import runs_in_step
from rayps.strategies.catalogue import parse_for_loop


def statistics(strategy, **options):
    """Return each rank's BatchNorm buffers after 4 steps on rows of its own."""

    def train_fn():
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
        generator = torch.Generator().manual_seed(7)  # threads share torch's own
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        rayps.wrap(model, optimizer, strategy, steps=4, **options)
        generator = torch.Generator().manual_seed(rayps.world().rank)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(8, 3, generator=generator, dtype=torch.float64)).square().mean().backward()
            optimizer.step()
        return [model[1].running_mean, model[1].running_var, model[1].num_batches_tracked]

    return run(train_fn)


@pytest.mark.parametrize("strategy", [text for text in STRATEGIES if wraps(text)])
def test_workers_that_step_together_have_the_buffers_of_rank_0(strategy):
    chosen = parse_for_loop(strategy)
    first, second = statistics(strategy)
    same = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    # local strategies average them, the last time in the last step
    assert same == (runs_in_step(chosen) or chosen.loop == LOCAL_UPDATES)
    if runs_in_step(chosen) and chosen.loop != LOCAL_UPDATES:
        own = statistics(strategy, broadcast_buffers=False)
        assert not torch.equal(own[0][0], own[1][0])
        assert torch.equal(own[0][0], first[0]), "rank 0 keeps its own"


def test_an_optimizer_that_needs_a_closure_is_refused():
    def train_fn():
        model = nn.Linear(3, 1)
        rayps.wrap(model, torch.optim.LBFGS(model.parameters()))

    with pytest.raises(WorkloadError, match=r"LBFGS needs closure(.|\n)*Adam"):
        run(train_fn)

"""One loop per family of strategies: the table, a loop of a strategy's own, verbs that a family does not have."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from rayps_client.errors import ConfigError
from small_work import Small, distance, train, vector

from rayps.core.rooms import load
from rayps.strategies.base import Strategy
from rayps.strategies.catalogue import CATALOGUE
from rayps.worker.loops.loop import Loop
from rayps.worker.loops.loop_of_family import FAMILIES, loop_class
from rayps.worker.loops.sync_gradients import SyncGradients, SyncWorker

OF = {
    "all_reduce": "sync_gradients",
    "hybrid": "sync_gradients",
    "parameter_server": "server_steps",
    "downpour": "server_steps",
    "hogwild": "shared_vector",
    "local_sgd": "local_updates",
    "parallel_sgd": "local_updates",
    "diloco": "local_updates",
    "admm": "local_updates",
}


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_family_names_a_loop(name):
    found = load(FAMILIES[name])
    assert issubclass(found, Loop) and found.view.__init__ is not object.__init__


@pytest.mark.parametrize("name", sorted(CATALOGUE))
def test_a_strategy_runs_in_the_loop_class_its_family(name):
    assert loop_class(CATALOGUE[name]()) is load(FAMILIES[OF.get(name, "federated_rounds")])


class VotingWorker(SyncWorker):
    """A worker with a verb of its own: the sign of the sum of everyone's gradient signs."""

    def vote(self, batch):
        return self.ring.sum(torch.sign(self.grad(batch).vector)).sign()


class VotingLoop(SyncGradients):
    """A loop of a strategy's own: it counts its rounds, and evaluates the parameters without the last step."""

    view = VotingWorker

    def run_round(self):
        self.before = self.w.params.clone()
        super().run_round()
        self.w.say(rounds=self.w.memory.setdefault("rounds", 0) + 1)
        self.w.memory["rounds"] += 1

    def evaluation_params(self):
        return self.before


@dataclass(frozen=True)
class Votes(Strategy):
    """Majority vote: Bernstein et al., "signSGD", ICML 2018, algorithm 2."""

    name: ClassVar[str] = "votes"
    loop: ClassVar[object] = VotingLoop

    def round(self, w):
        w.step(w.vote(w.batch()))


def majority(work, workers, epochs, seed=0):
    """The same without the platform: the model, and the loss before the last step of each epoch."""
    torch.manual_seed(seed)
    model = work.model()
    optimizer, data, before = work.optimizer(list(model.parameters())), work.data(), []
    for epoch in range(epochs):
        dealt = [list(data.batches(rank=r, size=workers, seed=seed, epoch=epoch)) for r in range(workers)]
        for batches in zip(*dealt, strict=True):
            votes = [torch.zeros_like(p) for p in model.parameters()]
            for batch in batches:
                optimizer.zero_grad()
                ((model(batch.x) - batch.y) ** 2).mean().backward()
                for vote, p in zip(votes, model.parameters(), strict=True):
                    vote += p.grad.sign()
            with torch.no_grad():
                last = ((model(data.x) - data.y) ** 2).mean().item()
            for vote, p in zip(votes, model.parameters(), strict=True):
                p.grad = vote.sign()
            optimizer.step()
        before.append(last)
    return model, before


@pytest.mark.parametrize("place", [VotingLoop, f"{__name__}:VotingLoop"])
def test_a_strategy_may_bring_a_loop_class_its_own(place, monkeypatch):
    monkeypatch.setattr(Votes, "loop", place)
    result = train(Small(), Votes(), workers=3, epochs=3)
    model, before = majority(Small(), 3, epochs=3)
    assert distance(result.model(), model) < 1e-12
    assert result.history.column("rounds").to_pylist() == list(range(1, 13))
    evaluated = [loss for loss in result.history.column("evaluation_loss").to_pylist() if loss is not None]
    assert evaluated[:2] == pytest.approx(before[:2], rel=1e-12)  # the last evaluation is the driver's
    assert vector(result.model()).isfinite().all()


@pytest.mark.parametrize("given", ["sync", "small_work:Small", "small_work:Nothing", 3, Small])
def test_what_is_no_loop_is_refused(given, monkeypatch):
    monkeypatch.setattr(Votes, "loop", given)
    with pytest.raises(ConfigError, match=r"loop|cannot be loaded"):
        loop_class(Votes())


def test_a_step_where_servers_step_names_the_verb_to_call():
    @dataclass(frozen=True)
    class Steps(CATALOGUE["parameter_server"]):
        def round(self, w):
            w.step(w.grad(w.batch()))

    with pytest.raises(Exception, match=r"w\.server\.push"):
        train(Small(), Steps(), workers=1, steps=2)

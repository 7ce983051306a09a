"""The law of `clip_norm`: what `torch.nn.utils.clip_grad_norm_` does, under every strategy that promises it."""

import math

import pytest
import torch
from federated_work import Fed
from rayps_client.errors import ConfigError
from small_work import Small, distance, plain, train, vector
from torch import nn

import rayps
from rayps import ADMM, AllReduce, DiLoCo, Downpour, FedAvg, Hogwild, LocalSGD, ParallelSGD, ParameterServer

EXACT = 1e-12
MOST = 0.05
SERVED = [ParameterServer(shards=2), ParameterServer(shards=2, replicas=0), ParameterServer(shards=2, replicas=1)]


class Clipped(Small):
    clip_norm = MOST


def law(work, workers=1, *, epochs=2, each=False):
    """Plain torch on the union of the batches; `each`: every worker's part is clipped before they are averaged."""
    torch.manual_seed(0)
    model = work.model()
    params = list(model.parameters())
    optimizer, data = work.optimizer(params), work.data()
    for epoch in range(epochs):
        dealt = [list(data.batches(rank=r, size=workers, seed=0, epoch=epoch)) for r in range(workers)]
        for parts in zip(*dealt, strict=True):
            total = sum(batch.size for batch in parts)
            grads = [torch.zeros_like(p) for p in params]
            for batch in parts:
                if batch.size:
                    optimizer.zero_grad()
                    work.loss(model, batch).backward()
                    if each:
                        nn.utils.clip_grad_norm_(params, work.clip_norm)
                    for grad, p in zip(grads, params, strict=True):
                        grad.add_(p.grad, alpha=batch.size / total)
            for grad, p in zip(grads, params, strict=True):
                p.grad = grad
            if not each:
                nn.utils.clip_grad_norm_(params, work.clip_norm)
            optimizer.step()
    return model


def must_clip(work, model, **options):
    """The law is not met by chance: without the clipping something else comes out."""
    assert distance(plain(work, **options)[0], model) > 1e-3


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("strategy", [AllReduce(), AllReduce(bucket_mb=0), AllReduce(bucket_mb=1e-4)], ids=str)
def test_a_ring_clips_the_mean(strategy, optimizer):
    work = Clipped(n=37, optimizer=optimizer)
    model = law(work, 3)
    assert distance(train(work, strategy, workers=3, epochs=2).model(), model) < EXACT
    if optimizer != "adam":
        must_clip(work, model, workers=3, epochs=2)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("strategy", SERVED, ids=str)
def test_servers_clip_each_push(strategy, optimizer):
    work = Clipped(n=37, optimizer=optimizer)
    model = law(work, 3, each=True)
    assert distance(train(work, strategy, workers=3, epochs=2).model(), model) < EXACT
    assert distance(law(work, 3), model) > 1e-6  # which is not the same as clipping their mean


@pytest.mark.parametrize(
    "strategy",
    [
        *SERVED,
        ParameterServer(shards=2, staleness=2),
        ParameterServer(staleness=None),
        Hogwild(),
        LocalSGD(period=5),
        ParallelSGD(),
        DiLoCo(period=4, outer_lr=1.0, outer_momentum=0.0),
        Downpour(shards=2),
    ],
    ids=str,
)
def test_one_worker_is_plain_torch(strategy):
    work = Clipped(n=20, optimizer="momentum")
    model = law(work)
    assert distance(train(work, strategy, workers=1, epochs=2).model(), model) < EXACT
    must_clip(work, model, epochs=2)


def test_admm_clips_the_step_with_its_penalty():
    work = Clipped(n=12, batch=4)
    torch.manual_seed(0)
    model = work.model()
    start, params = vector(model), list(model.parameters())
    optimizer = work.optimizer(params)
    data = work.data()
    data.keeps_rows = True
    for batch in data.batches(rank=0, size=1, seed=0, epoch=0):
        optimizer.zero_grad()
        (work.loss(model, batch) + 0.5 * (torch.cat([p.reshape(-1) for p in params]) - start).square().sum()).backward()
        nn.utils.clip_grad_norm_(params, MOST)
        optimizer.step()
    result = train(work, ADMM(penalty=1.0, local_steps=3), workers=1, epochs=1)
    assert distance(result.model(), model) < EXACT


def test_a_client_clips_its_own_steps():
    class Clients(Fed):
        clip_norm = MOST

    work = Clients(clients=1, n=12, batch=12)
    result = train(work, FedAvg(fraction=1.0, local_epochs=2), workers=1, steps=1)
    torch.manual_seed(0)
    model = work.model()
    optimizer, data = work.optimizer(list(model.parameters())), work.data()
    for _ in range(2):
        optimizer.zero_grad()
        ((model(data.x) - data.y) ** 2).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), MOST)
        optimizer.step()
    assert distance(result.model(), model) < EXACT


# ---- Downpour: a push is clipped, and a copy's step is clipped once


@pytest.mark.parametrize(("n_push", "n_fetch"), [(1, 1), (3, 3), (3, 1), (1, 3), (2, 3)])
def test_downpour_clips_its_pushes_and_its_steps_once_each(n_push, n_fetch):
    work = Clipped(n=36)
    steps = 12
    torch.manual_seed(0)
    server, copy = work.model(), work.model()
    copy.load_state_dict(server.state_dict())
    theirs, mine = (work.optimizer(list(model.parameters())) for model in (server, copy))
    batches = list(work.data().batches(rank=0, size=1, seed=0, epoch=0))
    gathered = None
    for t, batch in enumerate(batches[:steps]):
        if t % n_fetch == 0:
            copy.load_state_dict(server.state_dict())
        mine.zero_grad()
        work.loss(copy, batch).backward()
        grads = [p.grad.clone() for p in copy.parameters()]
        gathered = grads if gathered is None else [a + g for a, g in zip(gathered, grads, strict=True)]
        if (t + 1) % n_fetch:
            nn.utils.clip_grad_norm_(copy.parameters(), MOST)
            mine.step()
        if (t + 1) % n_push == 0 or t + 1 == steps:
            for p, a in zip(server.parameters(), gathered, strict=True):
                p.grad = a.clone()
            nn.utils.clip_grad_norm_(server.parameters(), MOST)
            theirs.step()
            gathered = None
    result = train(work, Downpour(n_push=n_push, n_fetch=n_fetch), workers=1, steps=steps)
    assert distance(result.model(), server) < EXACT


# ---- rows of tables


class Sparse(Clipped):
    """torch's own sparse gradients, which Hogwild leaves sparse."""

    sparse = True

    def model(self):
        return nn.Sequential(nn.Embedding(9, 4, sparse=self.sparse), nn.Flatten(), nn.Linear(8, 1)).double()

    def data(self):
        generator = torch.Generator().manual_seed(5)
        x = torch.randint(0, 9, (24, 2), generator=generator)
        return rayps.data.tensors(x, torch.sin(x.sum(1, keepdim=True).double()), batch_size=4)


class NotSparse(Sparse):
    sparse = False


def test_hogwild_clips_sparse_gradients_too():
    model = law(NotSparse())
    assert distance(train(Sparse(), Hogwild(), workers=1, epochs=2).model(), model) < EXACT
    assert distance(law(NotSparse(), each=True), plain(NotSparse(), epochs=2)[0]) > 1e-3


# ---- what cannot be


@pytest.mark.parametrize("value", [0, -1, True, False, "1", math.nan, math.inf, [1.0]], ids=repr)
def test_what_is_no_norm_is_refused_at_once(value):
    work = Small()
    work.clip_norm = value
    with pytest.raises(ConfigError, match="clip_norm") as caught:
        train(work, AllReduce(), workers=2, steps=1)
    assert caught.value.data["field"] == "clip_norm"
    assert repr(value) in str(caught.value)


def test_what_is_no_norm_is_refused_where_a_workload_is_loaded_by_name(tmp_path):
    (tmp_path / "bad.py").write_text(
        "import rayps\nclass Bad(rayps.Workload):\n    clip_norm = '1'\n    def model(self): pass\n"
        "    def data(self): pass\n    def loss(self, model, batch): pass\n"
    )
    with pytest.raises(ConfigError, match=r"clip_norm of Bad is '1'"):
        rayps.workload.base.load("bad.py:Bad", str(tmp_path))


@pytest.mark.parametrize("value", [1, 0.5, None])
def test_numbers_and_none_are_taken(value):
    work = Small()
    work.clip_norm = value
    assert train(work, AllReduce(), workers=1, steps=1).snapshot.round == 1

"""Servers of a model on a device, on the CPU's twin and on a GPU where there is one.

The law: a job trains as it does with the plain pushes and pulls of `GroupServer`. On the twin, the results are equal
bit for bit. The delayed twin runs each copy as late as it may: a wait that is missing shows in the values.
"""

import itertools
import threading

import pytest
import torch
from rayps_client.errors import PeerLost, PeerTimeout, TrainingError, WorkloadError
from small_work import Small, distance, train
from static_servers import House, vector_layout
from torch import nn
from torch.utils.checkpoint import checkpoint

import rayps
from rayps.cluster.local import LocalCluster, until
from rayps.core.strategy.staleness_bound import Clock
from rayps.ps.client.device_server import DeviceServer
from rayps.strategies.parameter_server import ParameterServer
from rayps.tensors.device import CpuDevice, Device
from rayps.tensors.flat import FlatModel, Layout
from rayps.worker.exchange.early_push import EarlyPush, find_touched
from rayps.worker.loops import server_steps

KINDS = ["cpu", "delayed", "cuda"]
CLOSE = 1e-9  # between a GPU and the CPU, in float64


def made(kind):
    if kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")
    return CpuDevice(delayed=True) if kind == "delayed" else Device.of(kind)


@pytest.fixture(params=KINDS)
def device(request):
    return made(request.param)


@pytest.fixture
def on_device(device, monkeypatch):
    """A function that trains as `train` does, with workers whose vectors are on the device."""

    def run(work, strategy, **options):
        if device.kind == "cuda":
            options["resources"] = {"cpu": 1, "gpu": 0.5}
            return train(work, strategy, LocalCluster(gpus=64.0), **options)
        with monkeypatch.context() as patch:
            patch.setattr(server_steps, "transfer_device", lambda name: device)
            return train(work, strategy, **options)

    return run


def equal(device, found, law):
    gap = distance(found.model(), law.model())
    return gap < CLOSE if device.kind == "cuda" else gap == 0


class Deep(Small):
    """Some layers, one of which is used in every second step, and one never."""

    def model(self):
        net = nn.ModuleDict(
            {"a": nn.Linear(5, 8), "b": nn.Linear(8, 8), "never": nn.Linear(8, 8), "c": nn.Linear(8, 1)}
        )
        return net.double()

    def loss(self, model, batch):
        found = torch.tanh(model["a"](batch.x))
        if float(batch.x[0, 0]) > 0:
            found = found + torch.tanh(model["b"](found))
        return ((model["c"](found) - batch.y) ** 2).mean()

    def evaluate(self, model, batch):
        return {}


# ---- whole jobs


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_job_in_step_trains_as_without_a_device(device, on_device, shards, optimizer):
    work, strategy = Deep(optimizer=optimizer), f"parameter_server:shards={shards}"
    found = on_device(work, strategy, workers=2, epochs=2)
    law = train(work, strategy, workers=2, epochs=2, resources={"cpu": 1})
    assert equal(device, found, law)
    assert found.history["loss"].to_pylist() == pytest.approx(law.history["loss"].to_pylist(), abs=CLOSE)


@pytest.mark.parametrize("staleness", ["none", "2"])
@pytest.mark.parametrize("shards", [1, 3])
def test_one_worker_without_steps_in_common_trains_as_without_a_device(device, on_device, shards, staleness):
    """With one worker, pushes are applied in one order only: pulls that lack the last push would be seen."""
    work, strategy = Deep(optimizer="adam"), f"parameter_server:shards={shards},staleness={staleness}"
    found = on_device(work, strategy, workers=1, epochs=2)
    assert equal(device, found, train(work, strategy, workers=1, epochs=2, resources={"cpu": 1}))


@pytest.mark.parametrize("staleness", ["0", "none"])
def test_servers_of_a_group_with_backups(device, on_device, staleness):
    """A server has several segments there: while its mailbox has a request, the next one is a message."""
    workers = 2 if staleness == "0" else 1
    work, strategy = Deep(optimizer="adam"), f"parameter_server:shards=3,replicas=1,staleness={staleness}"
    found = on_device(work, strategy, workers=workers)
    law = train(work, f"parameter_server:staleness={staleness}", workers=workers, resources={"cpu": 1})
    assert equal(device, found, law)


@pytest.mark.parametrize("strategy", ["parameter_server:shards=2,staleness=none", "parameter_server:staleness=1"])
def test_several_workers_learn(on_device, strategy):
    found = on_device(Small(), strategy, workers=2, epochs=3)
    losses = found.history["loss"].to_pylist()
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    "options",
    [{"accumulate": 3}, {"clip_norm": 0.1}, {"accumulate": 2, "clip_norm": 0.5}, {"precision": "bf16"}],
    ids=str,
)
def test_with_options_of_the_workload(device, on_device, options):
    work = Small(optimizer="momentum")
    for name, value in options.items():
        setattr(work, name, value)
    found = on_device(work, "parameter_server:shards=3", workers=2)
    law = train(work, "parameter_server:shards=3", workers=2, resources={"cpu": 1})
    if device.kind == "cuda" and "precision" in options:
        assert distance(found.model(), law.model()) < 1e-2
    else:
        assert equal(device, found, law)


@pytest.mark.parametrize("compression", ["fp16", "int8"])
def test_compressed_pushes(device, on_device, compression):
    strategy = f"parameter_server:shards=2,compression={compression}"
    found = on_device(Small(), strategy, workers=2)
    law = train(Small(), strategy, workers=2, resources={"cpu": 1})
    assert distance(found.model(), law.model()) < (1e-2 if device.kind == "cuda" else 1e-300)


class Pairs(Small):
    """A loss of pairs, whose weight is 0 for some batches."""

    def loss(self, model, batch):
        weight = float(batch.x[0, 0] > 0)
        return weight * ((model(batch.x) - batch.y) ** 2).sum(), weight * batch.size


def test_batches_without_weight(device, on_device):
    work = Pairs()
    work.accumulate = 2
    found = on_device(work, "parameter_server:shards=2", workers=2)
    assert equal(device, found, train(work, "parameter_server:shards=2", workers=2, resources={"cpu": 1}))


@pytest.mark.parametrize("strategy", ["downpour:shards=2,n_push=2,n_fetch=3", "downpour"])
def test_downpour(device, on_device, strategy):
    found = on_device(Small(), strategy, workers=1, epochs=2)
    assert equal(device, found, train(Small(), strategy, workers=1, epochs=2, resources={"cpu": 1}))


def test_an_average_of_the_pulled_parameters(device, on_device):
    """It is computed after the round's push: the next pull may have arrived, and must not be in the model yet."""

    class Averaged(Small):
        average = rayps.EMA(0.9)

    found = on_device(Averaged(), "parameter_server:shards=2", workers=2)
    assert equal(device, found, train(Averaged(), "parameter_server:shards=2", workers=2, resources={"cpu": 1}))


class Bad(Deep):
    """A gradient that is not finite, of a loss that is."""

    def loss(self, model, batch):
        found = super().loss(model, batch)
        if batch.x.sum() > 0:
            found = found + (model["a"].weight.sum() * 0).sqrt()
        return found


def test_a_gradient_that_is_not_finite_is_reported_and_does_not_leave(on_device, device):
    with pytest.raises(TrainingError, match=r"the gradient of parameter 'a\.weight' is not finite"):
        on_device(Bad(), "parameter_server:shards=3", workers=2)


class Twice(Small):
    """A checkpoint that computes the gradient of its layer in several parts."""

    reentrant = True
    late = False

    def model(self):
        return nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 1)]).double()

    def loss(self, model, batch):
        x = batch.x.requires_grad_()
        if self.late and float(batch.y[0]) > 0:
            return ((model[1](model[0](x)) - batch.y) ** 2).mean()
        for _ in range(2):
            x = checkpoint(model[0], x, use_reentrant=self.reentrant)
        return ((model[1](x) - batch.y) ** 2).mean()

    def evaluate(self, model, batch):
        return {}


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_in_several_parts(device, on_device, reentrant):
    work = Twice()
    work.reentrant = reentrant
    found = on_device(work, "parameter_server:shards=2", workers=2)
    assert equal(device, found, train(work, "parameter_server:shards=2", workers=2, resources={"cpu": 1}))


# ---- the object itself


def plain_sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def view_of(server, device):
    vector = torch.empty(server.size, dtype=server.dtype, device=device.place)
    return DeviceServer(server, device, vector, lambda: True)


def house(layout, shards, workers, staleness, start=None):
    start = torch.arange(float(layout.size)).to(layout.dtype) if start is None else start
    return House(layout, start, shards, workers, ParameterServer(shards=shards, staleness=staleness), plain_sgd)


@pytest.mark.parametrize("resident", [True, False], ids=["memory", "messages"])
@pytest.mark.parametrize("staleness", [0, None, 1])
@pytest.mark.parametrize("shards", [1, 4])
def test_a_segment_leaves_before_the_rest_is_computed(device, shards, staleness, resident):
    """The servers apply the last segments while the others are not sent, and the model keeps its parameters."""
    layout = vector_layout(40)
    here = house(layout, shards, 1, staleness)
    try:
        server = here.join(0, resident=resident, consistent=staleness is not None)
        view = view_of(server, device)
        law = here.start.clone()
        gradient = torch.zeros(40, dtype=layout.dtype, device=device.place)
        for step in range(3):
            assert torch.allclose(view.pull().cpu(), law, rtol=1e-12)
            pulled = view.vector.cpu()
            view.begin(gradient, 1.0)
            for segment in reversed(range(shards)):
                a, b = view.cuts[segment]
                gradient[a:b] = torch.arange(a, b) + step
                view.send(segment)
                assert until(lambda s=segment, n=step: here.loops[s].shard.version == n + 1, 30.0)
                assert [loop.shard.version for loop in here.loops[:segment]] == [step] * segment
                assert torch.equal(view.vector.cpu(), pulled)
            view.end()
            law = law - 0.1 * (torch.arange(40.0, dtype=layout.dtype) + step)
        assert torch.allclose(view.pull().cpu(), law, rtol=1e-12)
        view.close()
    finally:
        here.close()


def test_workers_that_complete_segments_in_other_orders_do_not_wait_for_each_other(device):
    """In step, a segment's answer waits for all workers' pushes of it: each order of sending must come to an end."""
    layout = vector_layout(12)
    for orders in itertools.product(itertools.permutations(range(3)), repeat=2):
        here = house(layout, 3, 2, 0)
        try:
            views = [view_of(here.join(rank), device) for rank in range(2)]
            gradient = torch.ones(12, dtype=layout.dtype, device=device.place)
            for view, order in zip(views, orders, strict=True):
                view.begin(gradient, 1.0)
                for segment in order:
                    view.send(segment)
                view.end()
            for view in views:
                assert torch.allclose(view.pull().cpu(), here.start - 0.1)
                view.close()
        finally:
            here.close()


@pytest.mark.parametrize("resident", [True, False], ids=["memory", "messages"])
def test_the_hosts_memory_is_not_written_before_the_push_is_acknowledged(device, resident):
    """Without the other worker's push, the answer to the first push is missing: the next one must not begin."""
    layout = vector_layout(12)
    here = house(layout, 2, 2, 0)
    try:
        server = here.join(0, timeout=60.0, resident=resident)
        view = view_of(server, device)
        other = here.join(1)
        view.push(torch.full((12,), 2.0, dtype=layout.dtype, device=device.place))
        begun = threading.Event()

        def again():
            view.begin(torch.full((12,), 7.0, dtype=layout.dtype, device=device.place), 1.0)
            view.send(1)
            begun.set()
            view.send(0)
            view.end()

        thread = threading.Thread(target=again)
        thread.start()
        assert not begun.wait(0.3)
        other.push(torch.full((12,), 4.0, dtype=layout.dtype))
        assert begun.wait(30.0)
        thread.join(30.0)
        other.push(torch.full((12,), 7.0, dtype=layout.dtype))
        other.settle()
        assert torch.allclose(view.pull().cpu(), here.start - 0.1 * 3.0 - 0.1 * 7.0)
        view.close()
    finally:
        here.close()


def test_a_push_that_ends_early_says_so_to_nobody(device):
    """A backward fails after a segment has left: the rest does not leave, and no thread stays."""
    layout = vector_layout(12)
    here = house(layout, 3, 1, None)
    try:
        view = view_of(here.join(0), device)
        view.begin(torch.ones(12, dtype=layout.dtype, device=device.place), 1.0)
        view.send(2)
        view.end(refused=True)
        view.settle()
        assert [loop.shard.version for loop in here.loops[:2]] == [0, 0]
        assert not [each for each in threading.enumerate() if each.name == "rayps-push"]
        view.close()
    finally:
        here.close()


def test_a_push_ends_with_the_connections(device):
    layout = vector_layout(12)
    here = house(layout, 2, 2, 0)
    try:
        server = here.join(0)
        view = view_of(server, device)
        view.push(torch.ones(12, dtype=layout.dtype, device=device.place))
        threading.Timer(0.2, server.hang_up).start()
        with pytest.raises(PeerLost, match="hang_up"):
            view.pull()
        view.close()
    finally:
        here.close()


def test_the_slowest_rank_is_named_after_the_timeout(device):
    layout = vector_layout(12)
    here = house(layout, 2, 2, 0)
    try:
        server = here.join(0, timeout=0.5)
        view = view_of(server, device)
        view.push(torch.ones(12, dtype=layout.dtype, device=device.place))
        with pytest.raises(PeerTimeout, match="rank 1"):
            view.pull()
        view.close()
    finally:
        here.close()


@pytest.mark.parametrize("resident", [True, False], ids=["memory", "messages"])
def test_a_restarted_server_gets_the_pushes_that_it_lacks(device, resident):
    layout = vector_layout(12)
    here = house(layout, 3, 1, None)
    try:
        server = here.join(0, relink=True, keep=1 << 20, resident=resident)
        view = view_of(server, device)
        for step in range(4):
            assert torch.allclose(view.pull().cpu(), here.start - 0.1 * step)
            if step == 2:
                here.restart(1)
            view.push(torch.ones(12, dtype=layout.dtype, device=device.place))
        assert torch.allclose(view.pull().cpu(), here.start - 0.4)
        view.close()
    finally:
        here.close()


def test_a_server_that_dies_during_a_push_is_replaced(device):
    """Its segment has left, and the others have not: the replacement gets the segment again."""
    layout = vector_layout(12)
    here = house(layout, 3, 1, None)
    try:
        view = view_of(here.join(0, relink=True, keep=1 << 20), device)
        view.begin(torch.ones(12, dtype=layout.dtype, device=device.place), 1.0)
        view.send(2)
        assert until(lambda: here.loops[2].shard.version == 1, 30.0)
        here.restart(2)
        view.send(1)
        view.send(0)
        view.end()
        assert torch.allclose(view.pull().cpu(), here.start - 0.1)
        view.push(torch.ones(12, dtype=layout.dtype, device=device.place))
        assert torch.allclose(view.pull().cpu(), here.start - 0.2)
        view.close()
    finally:
        here.close()


def test_a_push_in_progress_ends_with_the_worker(device):
    """Another worker's push is missing, and will not come."""
    layout = vector_layout(12)
    here = house(layout, 2, 2, 0)
    try:
        view = view_of(here.join(0), device)
        view.push(torch.ones(12, dtype=layout.dtype, device=device.place))
        view.close()
        assert not [each for each in threading.enumerate() if each.name == "rayps-push"]
    finally:
        here.close()


def test_each_pull_is_a_new_one(device):
    """A pull that arrived with a push is used once: a second pull sees what another worker has pushed since."""
    layout = vector_layout(12)
    here = house(layout, 3, 2, None)
    try:
        view, other = view_of(here.join(0), device), here.join(1)
        view.push(torch.ones(12, dtype=layout.dtype, device=device.place))
        assert torch.allclose(view.pull().cpu(), here.start - 0.05)
        other.push(torch.ones(12, dtype=layout.dtype))
        other.settle()
        assert torch.allclose(view.pull().cpu(), here.start - 0.1)
        view.close()
    finally:
        here.close()


def test_a_range_and_an_empty_push(device):
    layout = vector_layout(12)
    here = house(layout, 3, 1, None)
    try:
        view = view_of(here.join(0), device)
        view.push(torch.ones(5, dtype=layout.dtype, device=device.place), lo=3)
        law = here.start.clone()
        law[3:8] -= 0.1
        assert torch.allclose(view.pull().cpu(), law)
        view.push(torch.ones(12, dtype=layout.dtype, device=device.place))
        assert torch.allclose(view.read(), law - 0.1)
        assert (view.step, view.lead) == (2, 0)
        view.close()
    finally:
        here.close()


def test_the_memory_of_a_push_that_the_system_does_not_pin(device, monkeypatch):
    monkeypatch.setattr(type(device), "pin", lambda self, memory, read_only=False: False)
    layout = vector_layout(12)
    here = house(layout, 3, 1, 0)
    try:
        view = view_of(here.join(0), device)
        for step in range(3):
            assert torch.allclose(view.pull().cpu(), here.start - 0.1 * step)
            view.push(torch.ones(12, dtype=layout.dtype, device=device.place))
        view.close()
    finally:
        here.close()


# ---- what an early pull may return


def runs(workers, rounds, staleness):
    """Every order in which the clock lets workers push, as lists of ranks: a worker pulls before each push."""
    todo = [((), (0,) * workers)]
    while todo:
        order, done = todo.pop()
        if all(mark == rounds for mark in done):
            yield order
        for rank in range(workers):
            if done[rank] < rounds and Clock(dict(enumerate(done)), staleness).may_pull(rank):
                todo.append(((*order, rank), (*done[:rank], done[rank] + 1, *done[rank + 1 :])))


def state_of_servers(done, staleness):
    """What the parameters contain: the closed rounds in step, and the pushes of each worker otherwise."""
    return min(done) if staleness == 0 else tuple(done)


@pytest.mark.parametrize("staleness", [0, None])
def test_an_early_pull_returns_what_a_later_one_may(staleness):
    """In every run of three workers: the pull that is asked for with a push is served by the clock at some moment
    before the worker's next push, and its state is one that a pull at the beginning of the next round may return."""
    count = 0
    for order in runs(3, 2, staleness):
        states = [(0, 0, 0)]
        for rank in order:
            states.append((*states[-1][:rank], states[-1][rank] + 1, *states[-1][rank + 1 :]))
        for at, rank in enumerate(order, 1):
            until_next = order.index(rank, at) + 1 if rank in order[at:] else len(states)
            served = [
                done
                for done in states[at:until_next]
                if Clock(dict(enumerate(done)), staleness).may_pull(rank, states[at][rank])
            ]
            early = state_of_servers(served[0], staleness)
            later = {state_of_servers(done, staleness) for done in served}
            assert early in later
            if staleness == 0:
                assert later == {states[at][rank]}  # one state, whenever the pull is asked for
            else:
                assert early[rank] == states[at][rank]  # the worker's own push is in it
            count += 1
    assert count == {0: 216, None: 540}[staleness]


def test_an_early_pull_under_a_bound_could_wait_for_a_worker_that_has_stopped():
    """Why it is not asked for early: worker 1 has stopped after round 0, and worker 0 after its push of round 1."""
    assert not Clock({0: 2, 1: 0}, 1).may_pull(0, 2)


# ---- which segments are complete


def test_touched_is_the_overlap():
    """Every cut of ten elements into up to three segments, against the definition."""
    layout = Layout.of([("a", torch.empty(3)), ("b", torch.empty(1)), ("c", torch.empty(6))])
    for inner in itertools.chain(
        [()], itertools.combinations(range(1, 10), 1), itertools.combinations(range(1, 10), 2)
    ):
        bounds = [0, *inner, 10]
        cuts = list(itertools.pairwise(bounds))
        law = [
            [i for i, entry in enumerate(layout.entries) if set(range(a, b)) & set(range(entry.lo, entry.hi))]
            for a, b in cuts
        ]
        assert find_touched(layout, cuts) == law


class Recorder:
    """Stands for a `DeviceServer`: records what is sent, and the values at that moment."""

    def __init__(self, cuts):
        self.cuts, self.sent, self.log = cuts, {}, []

    def begin(self, source, weight):
        self.source, self.sent = source, {}

    def send(self, segment):
        a, b = self.cuts[segment]
        assert segment not in self.sent
        self.sent[segment] = self.source[a:b].clone()
        self.log.append(segment)

    def end(self, *, refused=False):
        self.refused = refused


@pytest.mark.parametrize("factor", [1.0, 0.5])
@pytest.mark.parametrize("adds", [False, True])
def test_each_segment_is_sent_once_and_complete(adds, factor):
    """For every cut of a model's vector into two: the sent values are the gradient, and the last layer leaves first."""
    x = torch.randn(4, 3, dtype=torch.float64)
    for border in range(1, 3 * 3 + 3 + 3 + 1):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)).double()
        flat = FlatModel(model)
        recorder = Recorder([(0, border), (border, flat.layout.size)])
        early = EarlyPush(flat, recorder)
        for step in range(3):
            law = torch.autograd.grad(model(x).sum() * (1 + adds), list(flat.parameters))
            law = torch.cat([each.reshape(-1) for each in law]) * factor
            flat.drop_grad()
            if adds:
                model(x).sum().backward()
            early.begin(4.0, factor)
            loss = model(x).sum()
            left = []
            hook = model[0].weight.register_hook(lambda grad, left=left, of=recorder: left.append(set(of.sent)))
            loss.backward()
            hook.remove()
            early.collect()
            early.end()
            assert torch.allclose(torch.cat([recorder.sent[0], recorder.sent[1]]), law)
            assert torch.equal(torch.cat([recorder.sent[0], recorder.sent[1]]), flat.packed[:-1])
            if step == 0 or border >= 12:  # of the first layer are the first 12 elements
                assert left == [{1} if step else set()]


def test_a_part_that_comes_late_is_an_error():
    model = nn.Linear(2, 1).double()
    flat = FlatModel(model)
    early = EarlyPush(flat, Recorder([(0, 1), (1, 3)]))
    x = torch.ones(1, 2, dtype=torch.float64)
    for parts in (1, 2):
        flat.drop_grad()
        early.begin(1.0)
        for _ in range(parts):
            model(x).sum().backward()
        if parts == 2:
            with pytest.raises(WorkloadError, match="use_reentrant=False"):
                early.collect()
            early.fail()
            assert early._server.refused
        else:
            early.collect()
            early.end()


def test_threads_of_pushes_end(on_device):
    on_device(Small(), "parameter_server:shards=2", workers=2)
    assert not [each for each in threading.enumerate() if each.name == "rayps-push" and each.is_alive()]

"""Laws of the pipeline's engine: whatever the schedule, stages and micro-batches, it is one process on the batch."""

import threading

import pytest
import torch
from pipeline_site import SCHEDULES, Site, alone, apart, deep, mse, one_at_a_time, rows, stages, together
from rayps_client.errors import ConfigError, LinkError, PeerLost, PeerTimeout, WorkloadError
from test_ring import errors
from torch import nn

from rayps.core.pipeline.schedule import compute_peak, make_table
from rayps.core.pipeline.simulate import simulate
from rayps.parallel.pipeline import cut, random_numbers
from rayps.parallel.pipeline.engine import PipelineEngine
from rayps.parallel.pipeline.layer_range import LayerRange
from rayps.parallel.pipeline.random_numbers import LayerRandomState
from rayps.parallel.pipeline.skip import Stash, Unstash


@pytest.fixture(scope="module", params=[2, 3, 4], ids=lambda p: f"p{p}")
def ring_of(request):
    with stages(request.param) as rings:
        yield rings


@pytest.fixture(scope="module")
def three():
    with stages(3) as rings:
        yield rings


def plans(p, schedule, most=16):
    """(micro-batches, chunks) that a schedule may have."""
    if schedule != "interleaved":
        return [(m, 1) for m in range(1, most + 1)]
    return [(m, v) for m in range(p, most + 1, p) for v in (2, 3)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_gradient_is_that_of_one_process(ring_of, schedule):
    x, y = rows(19)
    loss, want = alone(deep(), x, y)
    for m, v in plans(len(ring_of), schedule):
        ran = Site(ring_of, deep, schedule, m, v).step(x, y)
        assert apart(together(ran), want) < 1e-13, (m, v)
        assert ran[-1].loss == pytest.approx(loss, rel=1e-13)
        assert [one.loss for one in ran[:-1]] == [None] * (len(ran) - 1)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ten_steps_are_those_of_one_process(three, schedule):
    model = deep()
    site = Site(three, deep, schedule, 6, 2 if schedule == "interleaved" else 1)
    sgd = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (model, *site.models)]
    for step in range(10):
        x, y = rows(7 + step, seed=step)
        alone(model, x, y)
        ran = site.step(x, y, step)
        for optimizer in sgd:
            optimizer.step()
    got = {}
    for one, mine in zip(ran, site.models, strict=True):
        got |= {name: dict(mine.named_parameters())[name].detach() for name in one.grads}
    assert apart(got, {name: p.detach() for name, p in model.named_parameters()}) < 1e-12


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_counts_are_the_formulas(ring_of, schedule):
    """Each of the chunks' borders is crossed by m outputs one way and m gradients the other."""
    p, width, n = len(ring_of), 5, 24
    x, y = rows(n, width)
    for m, v in plans(p, schedule, 12):
        ran = Site(ring_of, deep, schedule, m, v).step(x, y)
        for rank, one in enumerate(ran):
            chunks = range(rank, p * v, p)
            outs, backs = sum(c < p * v - 1 for c in chunks), sum(c > 0 for c in chunks)
            assert one.engine.last.messages == m * (outs + backs)
            assert one.engine.last.bytes == (outs + backs) * n * width * 8
            assert one.engine.last.peak == compute_peak(schedule, p, m, rank, v)
            if schedule in ("gpipe", "1f1b"):
                assert one.engine.last.peak == (m if schedule == "gpipe" else min(m, p - rank))
        total = sum(one.engine.last.messages for one in ran)
        assert total == 2 * m * (p * v - 1)


class Clock:
    """Virtual time on real stages: each has its own, and what it sends says when; a wait is a later time."""

    def __init__(self, site, seconds):
        self.now, self.busy = [0.0] * len(site.engines), [0.0] * len(site.engines)
        self.sent, self.lock = {}, threading.Lock()
        for rank, engine in enumerate(site.engines):
            self._watch(rank, engine, seconds)

    def _watch(self, rank, engine, seconds):
        post, do = engine._messages, engine._run_action
        give, take = post.send, post.receive

        def gives(chunk, sort, index, micro, parcel):
            self._tick(rank, seconds)
            with self.lock:
                self.sent[sort, index, micro] = self.now[rank]
            give(chunk, sort, index, micro, parcel)

        def takes(chunk, sort, index, micro):
            found = take(chunk, sort, index, micro)
            with self.lock:
                self.now[rank] = max(self.now[rank], self.sent[sort, index, micro])
            return found

        def does(action, *rest):
            self.action[rank] = action
            do(action, *rest)
            self._tick(rank, seconds)

        post.send, post.receive, engine._run_action = gives, takes, does

    action: dict = {}  # noqa: RUF012

    def _tick(self, rank, seconds):
        """The action under way is over: before it sends anything, or when it returns."""
        action = self.action.pop(rank, None)
        if action is not None:
            self.now[rank] += seconds[action.kind]
            self.busy[rank] += seconds[action.kind]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_wait_as_long_as_the_simulator_says(ring_of, schedule):
    """In virtual time, exactly: the engine waits for nothing that the schedule does not need."""
    x, y = rows(24)
    seconds = {"F": 1.0, "B": 1.0, "W": 1.0} if schedule == "zero_bubble" else {"F": 1.0, "B": 2.0}
    for m, v in plans(len(ring_of), schedule, 12):
        site = Site(ring_of, deep, schedule, m, v)
        clock = Clock(site, seconds)
        site.step(x, y)
        said = simulate(site.table, seconds)
        assert max(clock.now) == pytest.approx(said.makespan), (m, v)
        idle = 1 - sum(clock.busy) / (len(ring_of) * max(clock.now))
        assert idle == pytest.approx(float(said.idle))


# ---------------------------------------------------------------------------------------------- batches of any kind


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
def test_fewer_rows_than_micro_batches_and_fewer_micro_batches_than_stages(ring_of, schedule):
    for n, m in ((1, 1), (1, 5), (3, 16), (5, 2), (16, 16)):
        x, y = rows(n)
        ran = Site(ring_of, deep, schedule, m).step(x, y)
        assert apart(together(ran), alone(deep(), x, y)[1]) < 1e-13


def test_a_batch_without_rows_gives_no_gradient(three):
    site = Site(three, deep, "1f1b", 4)
    from_stages = [site.engines[r].backward(0, [0.0] * 4, None, None) for r in range(3)]
    assert from_stages == [None] * 3
    assert all(p.grad is None for model in site.models for p in model.parameters())


def test_shapes_change_from_step_to_step_and_within_one(three):
    """Sequences of other lengths each step; what is no longer said in full is still understood."""

    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4), nn.Tanh(), nn.Linear(4, 5)).double()

    site, model = Site(three, make, "1f1b", 3), make()
    for step, length in enumerate([3, 9, 1, 3, 9, 2, 40]):
        x, y = (torch.randn(7, length, 5, dtype=torch.float64) for _ in range(2))
        assert apart(together(site.step(x, y, step)), alone(model, x, y)[1]) < 1e-13


class Enter(nn.Module):
    """Ids and a mask go along with what is learnt from them."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 5, dtype=torch.float64)

    def forward(self, ids):
        return self.table(ids), ids, {"mask": ids % 2 == 0, "none": None, "words": ["a", 3, 0.5]}


class On(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(5, 5, dtype=torch.float64)

    def forward(self, given):
        x, ids, rest = given
        assert ids.dtype == torch.int64 and rest["mask"].dtype == torch.bool and not ids.requires_grad
        assert rest["none"] is None and rest["words"] == ["a", 3, 0.5]
        return torch.tanh(self.line(x)) * rest["mask"][..., None] + x, ids, rest


class Leave(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 5, dtype=torch.float64)

    def forward(self, given):
        return given[0] + self.table(given[1])


def talker():
    torch.manual_seed(3)
    return nn.Sequential(Enter(), On(), On(), On(), On(), Leave())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_whole_numbers_booleans_and_structures_between_layers(ring_of, schedule):
    x = torch.randint(0, 11, (8, 6), generator=torch.Generator().manual_seed(0))
    y = torch.randn(8, 6, 5, dtype=torch.float64)
    v = 2 if schedule == "interleaved" and len(ring_of) < 4 else 1
    schedule = "gpipe" if schedule == "interleaved" and v == 1 else schedule
    m = 2 * len(ring_of)
    ran = Site(ring_of, talker, schedule, m, v).step(x, y)
    assert apart(together(ran), alone(talker(), x, y)[1]) < 1e-13


class Two(nn.Module):
    """Of two outputs the next layer uses one."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 5, dtype=torch.float64), nn.Linear(5, 5, dtype=torch.float64)

    def forward(self, x):
        x = x[0] if isinstance(x, tuple) else x
        return self.a(x), self.b(x)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_what_is_not_used_has_no_gradient(three, schedule):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(Two(), Two(), Two())

    def loss(output, y):
        return mse(output[0], y)

    x, y = rows(9)
    ran = Site(three, make, schedule, 3, loss=loss).step(x, y)
    want = alone(make(), x, y, loss)[1]
    assert not any(".b." in f".{name}" for name in want)
    assert apart(together(ran), want) < 1e-13


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_no_gradient_is_sent_to_what_does_not_learn(three, schedule):
    def make():
        model = deep()
        for p in model[:8].parameters():
            p.requires_grad_(False)
        return model

    x, y = rows(12)
    ran = Site(three, make, schedule, 4).step(x, y)
    assert apart(together(ran), alone(make(), x, y)[1]) < 1e-13
    assert [one.engine.last.messages for one in ran] == [4, 4, 0]


def test_a_chunk_that_only_passes_on(three):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 5), nn.Identity(), nn.Linear(5, 5)).double()

    x, y = rows(6)
    for schedule in ("gpipe", "zero_bubble"):
        ran = Site(three, make, schedule, 2).step(x, y)
        assert apart(together(ran), alone(make(), x, y)[1]) < 1e-13


class Scaled(nn.Module):
    """It changes its input where it lies, and does not say so."""

    def forward(self, x):
        return x.mul_(1.5)


@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble"])
def test_a_layer_may_change_its_input_in_place_behind_a_cut(three, schedule):
    def make():
        torch.manual_seed(0)
        line = [nn.Linear(5, 5) for _ in range(3)]
        return nn.Sequential(line[0], nn.ReLU(inplace=True), line[1], Scaled(), line[2]).double()

    x, y = rows(6)
    ran = Site(three, make, schedule, 2, boundaries=(1, 3)).step(x, y)
    assert apart(together(ran), alone(make(), x, y)[1]) < 1e-13


def test_outputs_larger_than_the_line_go_both_ways_at_once():
    """Two stages that send each other megabytes while neither reads must not wait for each other."""

    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 200), nn.Tanh(), nn.Linear(200, 5)).double()

    x, y = rows(24_000)
    for transport in ("shm", "tcp"):
        with stages(2, prefer=transport) as rings:
            ran = Site(rings, make, "1f1b", 4, boundaries=(1,)).step(x, y)
    assert apart(together(ran), alone(make(), x, y)[1]) < 1e-13


# ---------------------------------------------------------------------------------------------- skip connections


def skipping():
    torch.manual_seed(5)

    def line(n=5):
        return nn.Linear(n, 5)

    return nn.Sequential(
        line(),
        Stash("far"),
        nn.Tanh(),
        line(),
        nn.Sequential(Stash("near"), nn.Tanh()),
        line(),
        Unstash("near"),
        line(),
        Stash("cat"),
        nn.Tanh(),
        Unstash("far", torch.mul),
        line(),
        Unstash("cat", lambda a, b: torch.cat([a, b], -1)),
        line(10),
    ).double()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_skip_connections_within_and_across_stages(ring_of, schedule):
    x, y = rows(16)
    want = alone(skipping(), x, y)[1]
    p = len(ring_of)
    for v in (2, 3) if schedule == "interleaved" else (1,):
        site = Site(ring_of, skipping, schedule, 2 * p, v)
        for step in range(2):
            ran = site.step(x, y, step)
            assert apart(together(ran), want) < 1e-13
        total = sum(one.engine.last.messages for one in ran)
        routes = site.engines[0]._routes
        assert routes
        crossing = sum((r.target - r.source) % p > 0 for r in routes)
        assert total == 2 * 2 * p * (p * v - 1 + crossing)


def test_tied_weights_leave_each_stage_its_part_of_the_gradient(three):
    """Where a weight is on two stages, each has a copy; the sum of both gradients is the tied one's."""

    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)).double()
        model[4].weight = model[0].weight
        return model

    x, y = rows(6)
    ran = Site(three, make, "1f1b", 3, boundaries=(2, 4)).step(x, y)
    want = alone(make(), x, y)[1]["0.weight"]
    parts = [one.grads["0.weight"] for one in ran if "0.weight" in one.grads]
    assert len(parts) == 2
    assert apart({"w": sum(parts)}, {"w": want}) < 1e-13


# ---------------------------------------------------------------------------------------------- random layers


@pytest.fixture
def serial(monkeypatch):
    """A segment's layers are seeded and run without another thread in between: stages are threads here."""
    forward = LayerRange._forward

    def held(self, *args):
        with one_at_a_time:
            return forward(self, *args)

    def seed(self, *args):
        with one_at_a_time:
            at(self, *args)

    def restore(generator, state):
        with one_at_a_time:
            put_back(generator, state)

    at, put_back = LayerRandomState.seed_layer, random_numbers.restore_state
    monkeypatch.setattr(LayerRange, "_forward", held)
    monkeypatch.setattr(LayerRandomState, "seed_layer", seed)
    monkeypatch.setattr(random_numbers, "restore_state", restore)


def noisy():
    torch.manual_seed(0)
    layers = []
    for _ in range(4):
        layers += [nn.Linear(5, 5), nn.Dropout(0.4), nn.Sequential(nn.Tanh(), nn.Dropout(0.2))]
    return nn.Sequential(*layers).double()


def test_dropout_repeats_whatever_the_stages_and_the_schedule(serial):
    x, y = rows(12)
    found = {}
    for p, schedule, v in (
        (1, "gpipe", 1),
        (2, "1f1b", 1),
        (3, "zero_bubble", 1),
        (4, "gpipe", 1),
        (2, "interleaved", 3),
    ):
        with stages(p) as rings:
            ran = Site(rings, noisy, schedule, 4, v, seed=7).step(x, y, step=3)
            found[p, schedule] = together(ran)
    want = found[1, "gpipe"]
    for got in found.values():
        assert apart(got, want) < 1e-13


def test_dropout_differs_by_seed_step_replica_micro_batch_and_layer(serial):
    x = torch.ones(8, 400, dtype=torch.float64)
    drawn = []

    class Tell(nn.Dropout):
        def forward(self, value):
            drawn.append(super().forward(torch.ones_like(value))[0].tolist())
            return value * torch.nn.functional.relu(self.w if hasattr(self, "w") else value)

    def make():
        return nn.Sequential(nn.Linear(400, 400).double(), Tell(0.5), Tell(0.5))

    for seed, step, data in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)):
        with stages(1) as rings:
            Site(rings, make, "gpipe", 2, seed=seed, data=data, loss=lambda o, y: o.mean()).step(x, x, step)
    assert len(drawn) == 16 and len({tuple(one) for one in drawn}) == 16


def test_the_random_state_is_as_it_was_before():
    x, y = rows(4)
    with stages(1) as rings:
        site = Site(rings, noisy, "gpipe", 2)
        torch.manual_seed(99)
        before = torch.get_rng_state()
        site.step(x, y)
        assert torch.equal(torch.get_rng_state(), before)


# ---------------------------------------------------------------------------------------------- evaluation


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_evaluation_is_the_model_forward_only(three, schedule):
    x, y = rows(13)
    site = Site(three, skipping, schedule, 6, 2 if schedule == "interleaved" else 1)
    for model in site.models:
        model.eval()
    got = site.evaluate(x, y)
    assert torch.allclose(torch.cat([got[i] for i in range(6)]), skipping().eval()(x), rtol=1e-13)
    assert not any(out.requires_grad for out in got.values())
    assert all(p.grad is None for model in site.models for p in model.parameters())
    forward = [engine.last.messages for engine in site.engines]
    site.step(x, y)
    assert sum(engine.last.messages for engine in site.engines) == 2 * sum(forward)
    assert all(engine.last.peak > 0 and not engine._live for engine in site.engines)


# ---------------------------------------------------------------------------------------------- what goes wrong


def test_an_error_in_the_loss_is_the_last_stages_and_the_others_see_it_as_lost():
    def loss(output, y):
        raise ZeroDivisionError("the user's own")

    for schedule in ("gpipe", "1f1b", "zero_bubble"):
        with stages(3) as rings:
            site = Site(rings, deep, schedule, 4, loss=loss)
            found = site.fails(*rows(8))
        assert isinstance(found[2], ZeroDivisionError)
        for error in found[:2]:
            assert isinstance(error, PeerLost) and error.data["peer"] == "rank 2"
        assert not any(engine._live or engine._messages._local for engine in site.engines)


class Breaks(nn.Module):
    def forward(self, x):
        raise ValueError("no such thing")


def test_an_error_in_a_layer_names_the_layer():
    def make():
        return nn.Sequential(nn.Linear(5, 5).double(), nn.Sequential(nn.Tanh(), Breaks()), nn.Linear(5, 5).double())

    with stages(3) as rings:
        found = Site(rings, make, "1f1b", 4, boundaries=(1, 3)).fails(*rows(8))
    assert isinstance(found[1], WorkloadError) and "layer 1.1" in str(found[1]) and "no such thing" in str(found[1])
    for error in (found[0], found[2]):
        assert isinstance(error, PeerLost) and error.data["peer"] == "rank 1"


class Strange(nn.Module):
    def forward(self, x):
        return object() if x is not None else x


def test_what_cannot_travel_names_the_layer():
    with stages(2) as rings:
        found = Site(
            rings, lambda: nn.Sequential(nn.Linear(5, 5).double(), Strange(), nn.Tanh()), "gpipe", 2, boundaries=(2,)
        ).fails(*rows(4))
    assert isinstance(found[0], WorkloadError) and "'1' returns a object" in str(found[0])


def test_a_loss_without_a_gradient_is_refused():
    with stages(2) as rings:
        found = Site(rings, deep, "gpipe", 2, loss=lambda o, y: mse(o.detach(), y)).fails(*rows(4))
    assert isinstance(found[1], WorkloadError) and "no gradient" in str(found[1])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_stage_that_dies_in_the_middle_is_named_by_all(schedule):
    """In any of its actions; the others wait in different places."""
    x, y = rows(8)
    for death in (0, 2, 5):
        with stages(4) as rings:
            site = Site(rings, deep, schedule, 4, 2 if schedule == "interleaved" else 1)
            done = []

            def die(ring, site=site, death=death, done=done):
                if ring.rank == 2:
                    do = site.engines[2]._run_action

                    def count(*args):
                        if len(done) == death:
                            ring.abort()
                        done.append(args)
                        do(*args)

                    site.engines[2]._run_action = count
                return site.one(ring, x, y)

            for rank, error in enumerate(errors(rings, die)):
                if rank == 3 and death == 5 and error is None:
                    continue  # it had all that it needed
                assert isinstance(error, LinkError), (rank, error)
                assert error.data["peer"] == "rank 2"


def test_a_silent_stage_is_named_with_what_was_waited_for():
    x, y = rows(8)
    with stages(3, timeout=0.8) as rings:
        site = Site(rings, deep, "1f1b", 2)
        quiet = threading.Event()
        found = errors(rings, lambda ring: quiet.wait(2.5) if ring.rank == 1 else site.one(ring, x, y))
    for rank in (0, 2):
        assert isinstance(found[rank], PeerTimeout) and "rank 1" in found[rank].data["peer"]
    assert "stage 2 waited for the output of micro-batch 0 of chunk 1 from stage 1" in str(found[2])


def test_a_table_of_another_model():
    model = deep()
    with pytest.raises(ConfigError, match="are not for stage 0"):
        PipelineEngine(cut.layers(model), [], make_table("interleaved", 1, 2, 2)[0], None)
    engine = PipelineEngine(cut.layers(model), [], make_table("gpipe", 1, 4)[0], None)
    with pytest.raises(ConfigError, match="4"):
        engine.backward(0, [0.5, 0.5], None, None)

"""Row-level differential privacy (DP-SGD): the sum equals the naive loop, and nothing leaves without a record."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from folders import PYTHONPATH
from hypothesis import given, settings
from hypothesis import strategies as st
from rayps_client.errors import ConfigError, WorkloadError
from small_work import OPTIMIZERS, Small, Watched, distance, kinds, rows, train
from torch import nn

import rayps
from rayps.core.rows.step_rows import RowBlock
from rayps.data.base import Batch
from rayps.data.single_rows import stacks_of
from rayps.privacy.ledger import ReleaseLedger
from rayps.privacy.mechanism import Mechanism
from rayps.privacy.noise import KeyedNoise, SecretNoise
from rayps.worker.rows.private_rows import RowDraws
from rayps.workload.clipped_sum import ClippedSum
from rayps.workload.model_part import Whole

EXACT = 1e-12
ROWS = 36


class Secret(Small):
    """The small regression, evaluated on rows that are public."""

    def evaluation_data(self):
        return rayps.data.tensors(*rows(20, seed=9), batch_size=20)


class Counting(Secret):
    """The same with a loss that vmap cannot run."""

    def loss(self, model, batch):
        error = ((model(batch.x) - batch.y) ** 2).mean()
        return error if error.item() >= 0 else -error


def dp(**more):
    return rayps.dp(**{"noise_multiplier": 3.0, "clip": 0.4, "delta": 1e-3, "noise": "seeded"} | more)


def naive(work, batch, steps, spec, seed=0):
    """One row at a time: backward, clip, add; then the noise. The law of every strategy and number of workers."""
    torch.manual_seed(seed)
    model = work.model()
    params = list(model.parameters())
    optimizer, source, data = work.optimizer(params), KeyedNoise.of_seed(seed), work.data()
    size = sum(p.numel() for p in params)
    for step in range(steps):
        total = torch.zeros(size, dtype=torch.float64)
        for row in np.flatnonzero(source.uniform(work.n, step) < batch / work.n):
            model.zero_grad()
            ((model(data.x[row : row + 1]) - data.y[row : row + 1]) ** 2).mean().backward()
            gradient = torch.cat([p.grad.reshape(-1) for p in params])
            total += gradient * min(1.0, spec.clip / gradient.norm().item())
        total += torch.from_numpy(source.normal(size, spec.noise_multiplier * spec.clip, step))
        for p, part in zip(params, torch.split(total / batch, [p.numel() for p in params]), strict=True):
            p.grad = part.view(p.shape).clone()
        optimizer.step()
    return model


STRATEGIES = [(rayps.AllReduce, {}), (rayps.ParameterServer, {"shards": 2})]


@pytest.mark.parametrize(("kind", "options"), STRATEGIES, ids=["all_reduce", "parameter_server"])
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_any_number_of_workers_equals_the_naive_loop(kind, options, workers, optimizer):
    work, spec = Secret(n=ROWS, batch=12 // workers, optimizer=optimizer), dp()
    result = train(work, kind(privacy=spec, **options), workers=workers, steps=5, seed=3)
    assert distance(result.model(), naive(work, 12, 5, spec, seed=3)) < EXACT


@pytest.mark.parametrize(("batch", "physical"), [(12, 1), (12, 5), (12, 100), (1, None)])
def test_physical_batches_and_empty_draws_change_nothing(batch, physical):
    work, spec = Secret(n=ROWS, batch=batch), dp(physical_batch=physical)
    result = train(work, rayps.AllReduce(privacy=spec), steps=6)
    assert distance(result.model(), naive(work, batch, 6, spec)) < EXACT
    if batch == 1:  # with this seed some steps draw no row, and are released all the same
        drawn = [(KeyedNoise.of_seed(0).uniform(ROWS, step) < 1 / ROWS).sum() for step in range(6)]
        assert 0 in drawn and result.privacy["releases"] == 6


def test_a_loss_that_vmap_cannot_run_is_computed_row_by_row_and_said():
    spec = dp()
    result = train(Counting(n=ROWS, batch=6), rayps.AllReduce(privacy=spec), workers=2, steps=4)
    assert distance(result.model(), naive(Secret(n=ROWS, batch=6), 12, 4, spec)) < EXACT
    said = [event["message"] for event in result.events if "one by one" in event["message"]]
    assert len(said) == 1 and "item()" in said[0]


def test_without_noise_and_clipping_it_is_sgd_on_poisson_batches():
    work, spec = Secret(n=ROWS, batch=9), dp(noise_multiplier=1e-9, clip=1e3)
    result = train(work, rayps.AllReduce(privacy=spec), steps=5)
    torch.manual_seed(0)
    model, data = work.model(), work.data()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for step in range(5):
        drawn = torch.from_numpy(KeyedNoise.of_seed(0).uniform(ROWS, step) < 9 / ROWS)
        optimizer.zero_grad()
        (((model(data.x[drawn]) - data.y[drawn]) ** 2).sum() / 9).backward()
        optimizer.step()
    assert distance(result.model(), model) < 1e-6


# ---- the sum of clipped gradients


def sum_of(work, model, batch, clip=1.0, slow=False):
    sums = ClippedSum(work, Whole(work, model), clip)
    if slow:
        sums.slow = "the test asks for it"
    held = rayps.data.tensors(batch.x, batch.y)
    return sums.of(stacks_of(held, np.arange(batch.size), 100)), sums


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=6), st.floats(1e-3, 1e3))
def test_one_row_changes_the_sum_by_at_most_the_clip(values, clip):
    torch.manual_seed(1)
    work, model = Secret(), Secret().model()
    x, y = rows(len(values))
    x[:, 0] = torch.tensor(values, dtype=torch.float64)
    whole, _ = sum_of(work, model, Batch(x, y, len(x)), clip)
    assert torch.isfinite(whole).all()
    for row in range(len(x)):
        left = [i for i in range(len(x)) if i != row]
        rest, _ = sum_of(work, model, Batch(x[left], y[left], len(left)), clip)
        assert (whole - rest).norm() <= clip * (1 + 1e-9)


class Words(rayps.Workload):
    """An embedding, dropout and a dict as the loss's result, in float32."""

    precision = None

    def model(self):
        return nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.GroupNorm(2, 12), nn.Dropout(0.5), nn.Linear(12, 3))

    def data(self):
        generator = torch.Generator().manual_seed(2)
        ids, labels = (torch.randint(0, most, size, generator=generator) for most, size in ((9, (30, 3)), (3, (30,))))
        return rayps.data.tensors(ids, labels, batch_size=10)

    evaluation_data = data

    def loss(self, model, batch):
        found = nn.functional.cross_entropy(model(batch.x), batch.y)
        return {"loss": found, "double": 2 * found}


def words(rows=8):
    data = Words().data()
    return Batch(data.x[:rows], data.y[:rows], rows)


@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
def test_rows_together_equal_rows_one_by_one(precision):
    work = Words()
    work.precision = precision
    model = work.model().eval()  # without dropout
    together, sums = sum_of(work, model, words(), 0.5)
    each, _ = sum_of(work, model, words(), 0.5, slow=True)
    assert sums.slow is None and together.norm() > 0.1
    assert torch.allclose(together, each, atol=1e-6 if precision is None else 2e-2)


def test_rows_of_a_large_model_are_computed_in_parts_with_the_same_sum(monkeypatch):
    class Large(Words):
        def model(self):
            torch.manual_seed(3)
            head = nn.Sequential(nn.Linear(1200, 1000), nn.Tanh(), nn.Linear(1000, 3))
            return nn.Sequential(nn.Embedding(9, 400), nn.Flatten(), *head)

    parts, batch = [], words(11)
    together = ClippedSum._add_together

    def counted(self, rows, total):
        parts.append(rows.size)
        together(self, rows, total)

    monkeypatch.setattr(ClippedSum, "_add_together", counted)
    whole, sums = sum_of(Large(), Large().model(), batch, 0.5)
    each, _ = sum_of(Large(), Large().model(), batch, 0.5, slow=True)
    assert sums.slow is None and parts == [3, 4, 4]
    assert torch.allclose(whole, each, atol=1e-6)


def test_dropout_is_drawn_for_each_row():
    work, model = Words(), Words().model()
    same = Batch(words().x[:1].expand(6, -1), words().y[:1].expand(6), 6)
    torch.manual_seed(5)
    one, gradients = sum_of(work, model, same)
    assert gradients.slow is None
    alone = [sum_of(work, model.eval(), Batch(same.x[:1], same.y[:1], 1))[0]]
    assert not torch.allclose(one, 6 * alone[0], atol=1e-4)


def test_in_fp16_a_row_that_overflows_is_computed_with_a_smaller_scale():
    class Steep(Words):
        precision = "fp16"

        def model(self):
            return nn.Linear(2, 1)

        def loss(self, model, batch):
            return (model(batch.x).float() * batch.y).mean()

    work, model = Steep(), nn.Linear(2, 1)
    x = torch.tensor([[1.0, 1.0], [2.0, 1.0]])
    y = torch.tensor([[1e-3], [30.0]])  # 30 * 2^16 is not finite in fp16, 30 * 2^8 is
    for slow in (False, True):
        total, _ = sum_of(work, model, Batch(x, y, 2), 1e4, slow=slow)
        assert torch.allclose(total.float(), torch.tensor([60.0 + 1e-3, 30.0 + 1e-3, 30.0 + 1e-3]), rtol=1e-3)


def test_a_loss_that_changes_a_buffer_is_refused():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(5, 1).double()
            self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

        def forward(self, x):
            self.seen += x.mean().detach()
            return self.linear(x)

    x, y = rows(4)
    with pytest.raises(WorkloadError, match=r"changed 'seen' of the model"):
        sum_of(Secret(), Counter(), Batch(x, y, 4))


def test_a_pair_as_loss_is_refused():
    class Pair(Secret):
        def loss(self, model, batch):
            return super().loss(model, batch) * batch.size, batch.size

    x, y = rows(4)
    with pytest.raises(WorkloadError, match="return the mean over the rows"):
        sum_of(Pair(), Pair().model(), Batch(x, y, 4))


# ---- draws


@pytest.mark.parametrize("source", [SecretNoise(), KeyedNoise.of_seed(1)], ids=["secret", "seeded"])
def test_each_row_is_drawn_by_one_worker_with_the_probability(source):
    draws, counts = RowDraws(200, 0.3, source), np.zeros(200)
    for step in range(300):
        for rank in range(3):
            (drawn,) = draws.places(RowBlock(step, 0, step, rank, 3))
            found = np.array(drawn)
            assert set(found % 3) <= {rank}
            counts[found] += 1
    assert abs(counts.mean() / 300 - 0.3) < 0.02 and counts.min() > 40 and counts.max() < 150


# ---- what is refused


class Normed(Secret):
    def model(self):
        return nn.Sequential(nn.Linear(5, 48), nn.BatchNorm1d(48), nn.Linear(48, 1)).double()


class Loaded(Secret):
    def data(self):
        return super().data().loaded_by(0)


class Clipped(Secret):
    clip_norm = 1.0


class Accumulated(Secret):
    accumulate = 2


class Recomputed(Secret):
    checkpoint_activations = "0"


class Compiled(Secret):
    compile = True


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (Normed(), r"layer '1' is a BatchNorm1d.*torch.nn.LayerNorm\(48\) for features"),
        (Small(), r"define evaluation_data\(\) with rows that are public"),
        (Loaded(), "loaded_by"),
        (Clipped(), "set clip_norm to None"),
        (Accumulated(), "multiply batch_size by it"),
        (Recomputed(), "smaller physical_batch"),
        (Compiled(), "set compile to False"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, rayps.Workload) else "",
)
def test_workloads_are_refused(work, message):
    with pytest.raises(ConfigError, match=message):
        train(work, rayps.AllReduce(privacy=dp()), steps=1)


@pytest.mark.parametrize(
    "text",
    [
        "all_reduce:compression=bf16",
        "all_reduce:shard=optimizer",
        "all_reduce:backup=1",
        "all_reduce:bucket_mb=4",
        "all_reduce:replica=pipeline(stages=2)",
        "parameter_server:staleness=2",
        "parameter_server:staleness=none",
        "parameter_server:staleness=auto",
        "parameter_server:compression=int8",
        "parameter_server:shards=2,replicas=1",
        "parameter_server:backup=1",
    ],
)
def test_options_are_refused_by_name(text):
    option = text.partition(":")[2].split(",")[-1].partition("=")[0]
    with pytest.raises(ConfigError, match=f"privacy cannot be combined with {option} .*leave out {option}, or privacy"):
        train(Secret(), f"{text},privacy=dp(noise_multiplier=1)")


@pytest.mark.parametrize(
    "given", ["clip=adaptive", "mechanism=tree", "sampling=fixed", "sampling=all", "divisor=3", "restart=4"]
)
def test_options_of_clients_are_refused(given):
    with pytest.raises(ConfigError, match="which is for clients"):
        train(Secret(), f"all_reduce:privacy=dp(noise_multiplier=1,{given})")


def test_elastic_workers_dry_runs_and_unprotected_phases_are_refused():
    private = rayps.AllReduce(privacy=dp())
    with pytest.raises(ConfigError, match="each worker draws rows of its own"):
        train(Secret(), private, workers=(1, 2))
    with pytest.raises(ConfigError, match="releases that are in no ledger"):
        train(Secret(), private, dry_run=True)
    with pytest.raises(ConfigError, match="Give each phase the option privacy"):
        train(Secret(), [(1, private), rayps.AllReduce()])


# ---- epsilon, the budget, the ledger


@pytest.mark.parametrize(("kind", "options"), STRATEGIES, ids=["all_reduce", "parameter_server"])
def test_the_budget_ends_the_run_before_a_step_would_exceed_it(kind, options, tmp_path):
    strategy = kind(privacy=dp(noise_multiplier=2.0, epsilon=1.0), **options)
    more = {"workers": 2, "checkpoint": tmp_path / "run"}
    result = train(Secret(n=ROWS, batch=3), strategy, epochs=30, **more)
    steps = result.history.num_rows
    mechanism = Mechanism("poisson", 2.0, 6 / ROWS)
    spent = {mechanism: ReleaseLedger(tmp_path / "run" / "privacy").spent()[mechanism]}
    assert spent[mechanism].releases == steps == result.privacy["releases"]
    assert result.privacy["epsilon"] <= 1.0 and result.privacy["unit"] == "row"
    met = next(event for event in result.events if event["kind"] == "met")
    assert "the privacy budget epsilon=1 is spent" in met["message"] and met["round"] == steps
    epsilons = result.history.column("epsilon").to_pylist()
    assert epsilons == sorted(epsilons) and result.privacy["epsilon"] <= epsilons[-1] <= 1.0
    again = train(Secret(n=ROWS, batch=3), strategy, epochs=30, resume=True, **more)
    assert again.privacy["releases"] == steps and distance(again.model(), result.model()) == 0


def test_a_budget_that_allows_no_step_is_refused():
    strategy = rayps.AllReduce(privacy=dp(noise_multiplier=0.5, epsilon=0.1))
    with pytest.raises(ConfigError, match=r"epsilon=0.1 allows no release.*Give epsilon=.*, or noise_multiplier="):
        train(Secret(n=ROWS, batch=3), strategy, epochs=1)


def test_a_delta_that_proves_nothing_is_said():
    result = train(Secret(n=ROWS, batch=6), rayps.AllReduce(privacy=dp(noise="secret", delta=0.5)), epochs=1)
    warned = [event["message"] for event in result.events if event["kind"] == "warning"]
    assert any(text.startswith(f"this run will prove nothing: delta=0.5 is not below 1 / {ROWS}") for text in warned)
    assert not result.privacy["proves"] and result.privacy["claim"].startswith("This run proves nothing: delta")


def test_functions_of_the_rows_are_not_reported():
    result = train(Secret(n=ROWS, batch=6), rayps.AllReduce(privacy=dp(noise="secret")), workers=2, epochs=2)
    assert set(result.history.column("loss").to_pylist()) == {None}
    assert set(result.history.column("samples").to_pylist()) == {0}
    assert result.metrics.keys() == {"loss", "error"}  # of the public rows
    assert result.privacy["proves"] and "6 noised sums" in result.privacy["claim"]
    starts = [event for event in result.events if event["kind"] == "privacy"]
    assert starts[0]["planned_steps"] == 6 and starts[0]["planned_epsilon"] == result.privacy["epsilon"]


def test_the_noise_is_found_for_a_number_of_rounds(tmp_path):
    spec = rayps.dp(epsilon=2.0, rounds=12, delta=1e-3)
    result = train(Secret(n=ROWS, batch=6), rayps.AllReduce(privacy=spec), epochs=2)
    assert 1.9 < result.privacy["epsilon"] <= 2.0 and result.privacy["releases"] == 12


def test_a_run_from_another_folder_s_checkpoint_is_charged_for_its_releases(tmp_path):
    strategy = rayps.AllReduce(privacy=dp(noise="secret"))
    first = train(Secret(n=ROWS, batch=6), strategy, epochs=1, checkpoint=tmp_path / "a")
    more = train(Secret(n=ROWS, batch=6), strategy, epochs=2, checkpoint=tmp_path / "b", resume=first.checkpoint)
    assert (first.privacy["releases"], more.privacy["releases"]) == (6, 12)
    assert more.privacy["epsilon"] > first.privacy["epsilon"]


def test_a_step_that_is_repeated_after_a_death_is_charged_again(tmp_path):
    cluster = Watched()
    work = Secret(n=ROWS, batch=6, tag="private", pause=0.01)
    strategy = rayps.AllReduce(privacy=dp(noise="secret", epsilon=50.0))
    try:
        killer = cluster.kill_when("private", 14, ("WorkerActor", 1))
        result = train(work, strategy, cluster, workers=2, steps=12, checkpoint=tmp_path, checkpoint_every=6)
        killer.join()
    finally:
        cluster.close()
    charged = ReleaseLedger(tmp_path / "privacy").spent()[Mechanism("poisson", 3.0, 12 / ROWS)].releases
    assert "restarted" in kinds(result) and result.privacy["releases"] == charged > 12
    assert result.history.num_rows == 12


@pytest.mark.chaos
def test_a_kill_at_any_point_of_a_step_never_lowers_epsilon(tmp_path):
    """A process dies in the fourth step, and the run is resumed: each step that may have left is charged."""
    places = ["privacy: nothing recorded", "privacy: recorded, not released", "privacy: noised, not released"]
    code = (
        "import os, sys\n"
        "sys.path[:0] = sys.argv[1].split(':')\n"
        "import rayps, torch; from rayps.core import failpoint\n"
        "from test_private_rows import Secret, dp; from small_work import train\n"
        "for number, place in enumerate(sys.argv[3:]):\n"
        "    if not os.fork():\n"
        "        torch.set_num_threads(1); failpoint.arm(f'{place}=4')\n"
        "        train(Secret(batch=6), rayps.AllReduce(privacy=dp(noise='secret')), steps=6, checkpoint_every=2,\n"
        "            checkpoint=f'{sys.argv[2]}/{number}')\n"
        "        os._exit(0)\n"
        "    print(os.waitstatus_to_exitcode(os.wait()[1]))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, PYTHONPATH, str(tmp_path), *places], capture_output=True, text=True
    )
    assert ran.stdout.split() == ["-9"] * 3, ran.stderr
    for number, recorded in enumerate([3, 4, 4]):
        folder = tmp_path / str(number)
        lines = (folder / "privacy" / "ledger.jsonl").read_text().splitlines()
        assert [json.loads(line)["round"] for line in lines] == list(range(recorded))
        saved = sorted(path.name for path in folder.glob("step-*") if ".tmp-" not in path.name)
        begin = int(saved[-1].removeprefix("step-")) if saved else 0
        result = train(
            Secret(batch=6), rayps.AllReduce(privacy=dp(noise="secret")), steps=6, checkpoint=folder, resume=bool(saved)
        )
        assert result.privacy["releases"] == recorded + 6 - begin >= 6
        assert math.isfinite(result.privacy["epsilon"])
        assert "failed" not in kinds(result)

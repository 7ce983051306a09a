"""`rayps plan`, the formulas of costs behind it, and what a run says beside them."""

import json
import re
import time
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from pipeline_site import to_csv
from rayps_client.errors import ConfigError
from torch import nn

import rayps
from rayps.cli import main as cli
from rayps.cluster.local import LocalCluster
from rayps.core.pipeline.schedule import make_table
from rayps.core.pipeline.simulate import simulate
from rayps.core.pipeline.validate import to_json
from rayps.core.strategy.costs import estimate_costs, estimate_held_bytes, format_bytes
from rayps.core.strategy.traffic import Crossing, Sizes
from rayps.parallel.division.divide import divide
from rayps.parallel.division.probe import probe
from rayps.parallel.pipeline.skip import Stash, Unstash
from rayps.runtime.results.cost_report import (
    CostReport,
    cost_report_of,
    describe_costs,
    measure_sizes,
    measured,
    predict_costs,
)
from rayps.strategies.catalogue import CATALOGUE, parse

WIDE, ROWS = 12, 8


class Deep(rayps.Workload):
    """Four layers of 12 x 12 and two of a block that tensor ranks can share."""

    def model(self):
        layers = [nn.Linear(WIDE, WIDE) for _ in range(4)]
        return nn.Sequential(*layers, nn.Linear(WIDE, 4 * WIDE), nn.ReLU(), nn.Linear(4 * WIDE, WIDE))

    def data(self):
        x = torch.randn(64, WIDE, generator=torch.Generator().manual_seed(1))
        return rayps.data.tensors(x, x.flip(1), batch_size=ROWS)

    def loss(self, model, batch):
        return ((model(batch.x) - batch.y) ** 2).mean()

    def optimizer(self, params):
        return torch.optim.Adam(params)


FILE = """
import dataclasses, rayps, torch
from torch import nn

class Deep(rayps.Workload):
    def model(self):
        return nn.Sequential(*[nn.Linear(12, 12) for _ in range(4)])
    def data(self):
        return rayps.data.tensors(torch.randn(64, 12), torch.randn(64, 12), batch_size=8)
    def loss(self, model, batch):
        return ((model(batch.x) - batch.y) ** 2).mean()

class Round(Deep):
    def model(self):
        class Own(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(12, 12)
            def forward(self, x):
                return x + self.layer(x)
        return Own()

@dataclasses.dataclass(frozen=True)
class Wide(Deep):
    width: int = 4
    def model(self):
        return nn.Sequential(nn.Linear(12, self.width), nn.Linear(self.width, 12))
"""


def of(strategy):
    return parse(strategy)[0].strategy


# ---- formulas


def test_ring_and_servers():
    given = Sizes(1000, width=4)
    for n in range(1, 9):
        ring = estimate_costs(of("all_reduce"), n, given)
        assert ring.bytes == 2 * (n - 1) * 4000
        assert n == 1 or ring.traffic[0].busiest == pytest.approx(2 * (n - 1) / n * 4000)
        served = estimate_costs(of("parameter_server:shards=3"), n, given)
        assert served.bytes == 2 * n * 4000 and served.messages == 2 * 3 * n
    assert "backward" in estimate_costs(of("all_reduce"), 2, given).traffic[0].hidden
    assert estimate_costs(of("all_reduce:bucket_mb=0"), 2, given).traffic[0].hidden == "no"
    assert estimate_costs(of("all_reduce:compression=fp16"), 4, given).bytes == 2 * 3 * 2000
    assert estimate_costs(of("all_reduce:compression=top_k"), 4, given).bytes is None  # the data decides
    downpour = estimate_costs(of("downpour:n_push=5,n_fetch=2,shards=2"), 10, given)
    assert downpour.bytes == pytest.approx(10 * 4000 / 5 + 10 * 4000 / 2)


def test_a_grid_reduces_each_column_alone():
    given = Sizes(1000, width=8, owned=(700, 300), held=(700, 300))
    found = estimate_costs(of("pipeline:stages=2,micro_batches=4"), 6, given)
    assert found.traffic[0].bytes == 2 * 2 * 8000 and found.traffic[0].busiest == pytest.approx(2 * 2 / 3 * 5600)
    assert found.idle == Fraction(1, 5) and found.peaks == [2, 1]
    assert [each["parameters"] for each in found.memory] == [5600, 2400]


def test_activations_between_stages():
    given = Sizes(100, owned=(50, 50), batch=8, crossings=(Crossing(0, 1, 40.0, 40.0), Crossing(0, 1, 8.0, 0.0)))
    found = estimate_costs(of("pipeline:stages=2,micro_batches=4"), 4, given).traffic[1]
    assert found.bytes == 2 * 8 * (40 + 40 + 8)  # two replicas; what has no gradient sends none back
    assert found.messages == 2 * 4 * (2 + 1) and found.busiest == 8 * 48
    few = estimate_costs(of("pipeline:stages=2,micro_batches=4"), 2, Sizes(100, owned=(50, 50), batch=3))
    assert few.traffic[1].messages == 2 * 3  # three rows make three micro-batches


def test_memory_follows_the_schedule():
    given = Sizes(0, batch=8, kept=(100.0, 100.0, 100.0, 100.0))
    m = 4  # two rows each
    assert [estimate_held_bytes(row, given, m, False) for row in make_table("gpipe", 4, m)] == [200.0 * m] * 4
    assert [estimate_held_bytes(row, given, m, False) for row in make_table("1f1b", 4, m)] == [
        200.0 * min(m, 4 - r) for r in range(4)
    ]
    assert [estimate_held_bytes(row, given, m, True) for row in make_table("zero_bubble", 4, m)] == [200.0 * m] * 4


def test_amounts():
    assert [format_bytes(x) for x in (0, 999, 1000, 2_500_000, 3e9)] == [
        "0 bytes",
        "999 bytes",
        "1 KB",
        "2.5 MB",
        "3 GB",
    ]


# ---- what a dry run shows


def test_an_alternating_block_sums_twice_and_nothing_at_its_wide_layer():
    workload, strategy = Deep(), of("tensor_parallel:size=3")
    division = divide(workload, strategy.replica, workload.model())
    found = measure_sizes(workload, strategy, 3, division)
    # three pairs: a sum of bd after each forward, and one before each backward but the first, whose input needs none
    assert found.summed == (5 * WIDE * 4,) and found.gathered == (0,) and found.exchanges == (5,)
    cost = next(cost for cost in estimate_costs(strategy, 3, found).traffic if "sums" in cost.what)
    assert cost.bytes == pytest.approx(3 * (2 * 2 / 3 * 5 * ROWS * WIDE * 4))


def test_a_dry_run_of_stages():
    workload, strategy = Deep(), of("pipeline:stages=3,micro_batches=2,boundaries=(1,2)")
    division = divide(workload, strategy.replica, workload.model())
    found = measure_sizes(workload, strategy, 3, division)
    assert found.crossings == (Crossing(0, 1, WIDE * 4, WIDE * 4), Crossing(1, 2, WIDE * 4, WIDE * 4))
    assert found.states == 2.0 and found.batch == ROWS and sum(found.owned) == found.parameters
    said = predict_costs(workload, strategy, 3, division)
    assert said.traffic[1].bytes == 4 * ROWS * WIDE * 4 and said.traffic[1].messages == 2 * 2 * 2
    both = of("pipeline:stages=2,micro_batches=2,stage=tensor_parallel(size=2)")
    split = measure_sizes(workload, both, 4, divide(workload, both.replica, workload.model()))
    assert sum(split.summed) == 5 * WIDE * 4 and len(split.summed) == 2


class Skipping(Deep):
    """A skip connection that crosses a stage."""

    def model(self):
        first, second, third = (nn.Linear(WIDE, WIDE) for _ in range(3))
        return nn.Sequential(first, Stash("s"), second, nn.ReLU(), third, Unstash("s"))


def test_a_skip_connection_goes_straight():
    workload, strategy = Skipping(), of("pipeline:stages=3,micro_batches=2,boundaries=(2,4)")
    division = divide(workload, strategy.replica, workload.model())
    found = probe(workload, division, Sizes(0), next(iter(workload.data().batches(rank=0, size=1, seed=0, epoch=0))))
    assert sorted((cut.source, cut.target, cut.forward) for cut in found.crossings) == [
        (0, 1, WIDE * 4),
        (0, 2, WIDE * 4),
        (1, 2, WIDE * 4),
    ]


# ---- the command


def run(capsys, *arguments):
    code = cli.main(["plan", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def at(tmp_path, monkeypatch):
    (tmp_path / "deep.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_without_a_workload(capsys):
    code, out, err = run(capsys, "--strategy", "pipeline:stages=4,micro_batches=8")
    assert code in (0, None) and err == ""
    assert "stage 3 │······F0B0──F1B1──" in out and "(p-1)/(m+p-1) = 27.3%" in out and "4, 3, 2, 1" in out
    assert re.search(r"activations between 4 stages\s+48\s", out) and "\x1b[" not in out
    assert all(len(line) <= 100 for line in out.splitlines() if "│" in line)


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_strategy_can_be_planned_without_a_workload(capsys, name):
    code, out, err = run(capsys, "--strategy", name, "--workers", "2")
    assert code in (0, None) and out.startswith(f"{name}\n2 workers: 2 replicas") and not err


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved,chunks=2", "zero_bubble"])
def test_json_has_the_schedule(capsys, schedule):
    code, out, _ = run(capsys, "--strategy", f"pipeline:stages=2,micro_batches=4,schedule={schedule}", "--json")
    found = json.loads(out)
    v = 2 if "chunks" in schedule else 1
    name = schedule.partition(",")[0]
    expected_line = simulate(make_table(name, 2, 4, v))
    assert code in (0, None) and found["schedule"]["idle"] == pytest.approx(float(expected_line.idle))
    assert found["costs"]["idle"] == found["schedule"]["idle"]
    assert [[each[0] for each in row] for row in found["schedule"]["rows"]] == [
        [str(action) for action in row] for row in make_table(name, 2, 4, v)
    ]


def test_of_a_workload(capsys, at):
    code, out, err = run(
        capsys,
        "deep.py:Deep",
        "--strategy",
        "pipeline:stages=2,micro_batches=4",
        "--workers",
        "4",
        "--times",
        "--svg",
        "chart.svg",
        "--memory",
        "1KB",
    )
    assert code in (0, None), err
    assert re.search(r"stage 0\s+0-1\s+312\s+50.0%\s+1.25 KB", out)
    assert "4 workers: 2 replicas of 2 stages" in out and "as measured here" in out
    assert re.search(r"gradients around the ring of 2 in each of 2 columns\s+8\s+4.99 KB\s+1.25 KB", out)
    assert re.search(r"activations between 2 stages\s+16\s+1.54 KB", out)  # 2 replicas x 2 x 8 rows x 12 x 4 bytes
    assert "does not fit: stage 0 needs" in out
    assert Path("chart.svg").read_text().startswith("<svg") and "written to chart.svg" in err


def test_of_one_strategy_after_another(capsys, at):
    phases = "1*all_reduce > parameter_server:shards=2"
    code, out, _ = run(capsys, "deep.py:Deep", "--strategy", phases, "--workers", "2", "-o", "json")
    first, second = json.loads(out)
    assert code in (0, None) and first["costs"]["bytes"] == 2 * 624 * 4 and second["costs"]["bytes"] == 4 * 624 * 4


def test_a_batch_of_another_size(capsys, at):
    given = ["deep.py:Deep", "--strategy", "pipeline:stages=2,micro_batches=16"]
    code, _, err = run(capsys, *given)
    assert code == 2 and "micro_batches is 16 and batch_size is 8" in err
    code, out, _ = run(capsys, *given, "--batch", "32")
    assert code in (0, None) and re.search(r"activations between 2 stages\s+32\s+3.07 KB", out)


def test_parameters_of_the_workload_shape_the_model(capsys, at):
    counts = []
    for given in ([], ["--set", "width=8"], ["--set", "width=8", "--batch", "4"]):
        code, out, err = run(capsys, "deep.py:Wide", *given, "--json")
        assert code in (0, None), err
        counts.append(json.loads(out)["costs"]["memory"][0]["parameters"])
    assert counts == [4 * (2 * 12 * width + width + 12) for width in (4, 8, 8)]


@pytest.mark.parametrize("write", [to_json, to_csv])
def test_a_table_of_ones_own(capsys, at, write):
    rows = make_table("1f1b", 2, 2)
    rows[0] = make_table("gpipe", 2, 2)[0]
    Path("own").write_text(write(rows))
    code, _, err = run(capsys, "--strategy", "pipeline:stages=2,micro_batches=2", "--table", "own")
    assert code in (0, None), err
    code, _, err = run(capsys, "--strategy", "pipeline:stages=2,micro_batches=4", "--table", "own")
    assert code == 2 and "stages=2, micro_batches=2, chunks=1" in err
    rows[0] = list(reversed(rows[0]))
    Path("own").write_text(write(rows))
    code, _, err = run(capsys, "--strategy", "pipeline:stages=2,micro_batches=2", "--table", "own")
    assert code == 2 and "waits before 0B1" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--strategy", "pipelin"], "did you mean"),
        (["--strategy", "pipeline:stages=4", "--workers", "6"], "multiple of 4"),
        (["--strategy", "pipeline:stages=4", "--workers", "0"], "workers is 0"),
        (["--svg", "x.svg"], "--svg draws a pipeline's schedule"),
        (["--times"], "give a workload"),
        (["--memory", "lots"], "512MB"),
        (["--batch", "0"], "batch is 0"),
        (["--parameters", "0.5"], "parameters is 0.5"),
        (["deep.py:Deep", "--parameters", "5"], "omit --parameters"),
        (["deep.py:Wide", "--set", "widht=8"], "did you mean 'width'"),
        (["deep.py:Wide", "--set", "width=eight"], "a whole number"),
        (["--set", "width=8"], "give a workload"),
        (["--table", "none.json"], "needs one strategy with a pipeline"),
        (["--table", "none.json", "--strategy", "pipeline:stages=2"], "cannot be read"),
        (["none.py:Deep"], "no file"),
        (["deep.py:Deep", "--strategy", "pipeline:stages=5"], "the model has 4 layers"),
        (["deep.py:Round", "--strategy", "pipeline:stages=2"], "cut"),
        (["deep.py:Deep", "--strategy", "tensor_parallel:size=99"], "99"),
        (["--strategy", "pipeline:stages=4,schedule=interleaved,chunks=2,micro_batches=6"], "multiple of its 4 stages"),
    ],
)
def test_bad_input(capsys, at, arguments, says):
    code, out, err = run(capsys, *arguments)
    assert code == 2 and says in err and out == "" and err.count("\n") <= 3


def test_it_is_in_the_help(capsys):
    assert cli.main(["--help"]) == 0 or True
    assert re.search(r"^\s+plan\s+Show how a strategy divides", capsys.readouterr().out, re.M)


# ---- after a run


def point(rank, n, **more):
    return {
        "kind": "round",
        "rank": rank,
        "round": n,
        "seconds": 1.0,
        "bytes": 100,
        "loss": None,
        "wait": 0.1,
        "move": 0.1,
        "talk": 0.8,
        **more,
    }


def test_what_is_said_after_a_run():
    strategy = of("pipeline:stages=2,micro_batches=4")
    formula = estimate_costs(strategy, 4, Sizes(100, owned=(50, 50), batch=8, crossings=(Crossing(0, 1, 4.0, 4.0),)))
    report = CostReport(strategy, 4, lambda workers: formula)
    report.add_points(
        [
            point(rank, 0, compute=9.0, busy=9.0, idle=9.0, messages=99, activations=1, stage_bytes=0)
            for rank in range(4)
        ]
    )
    for n in (1, 2, 3):
        report.add_points(
            [
                point(
                    rank,
                    n,
                    compute=0.5,
                    busy=0.4 if rank < 3 else 0.8,
                    idle=0.2,
                    messages=4,
                    stage_bytes=32,
                    activations=2 - rank % 2,
                )
                for rank in range(4)
            ]
        )
    event = report.event()
    found = event["measured"]
    assert found["bytes"] == 400 and found["messages"] == 16  # the first round does not count
    assert found["activations"] == [2, 1] == formula.peaks
    assert found["idle"] == pytest.approx(0.8 / 2.8) and found["idles"] == pytest.approx([1 / 3, 0.25])
    assert found["imbalance"] == pytest.approx(0.8 / 0.5 - 1) and found["slowest"] == 3
    assert event["kind"] == "costs" and event["formula"]["bytes"] == formula.bytes
    assert "stages exchange 128 bytes (128 bytes by formula) of this in 16 messages (16 by formula)" in event["message"]
    assert "stages are idle 28.6% of the time (20.0% by formula)" in event["message"]
    assert "hidden" not in found  # a stage waits for its turn, not for bytes
    assert "at most 2/1 activations (2/1 by formula)" in event["message"]
    json.dumps(event)


def test_how_a_step_went_is_drawn_once_beside_its_table():
    strategy = of("pipeline:stages=2,micro_batches=1")
    report = CostReport(strategy, 4, lambda workers: estimate_costs(strategy, workers, Sizes(10)))
    stages = [
        [("0F0", 5.0, 6.0), ("0B0", 9.0, 11.0)],
        [("1F0", 90.5, 91.0), ("1F0", 91.0, 91.5), ("1B0", 91.5, 93.5)],
    ]  # clocks differ
    first = point(0, 3, compute=1.0, spans=stages[0])
    assert report.add_points([first]) == [] and "spans" not in first  # they go no further
    (event,) = report.add_points([point(1, 3, compute=1.0, spans=stages[1])])
    assert event["kind"] == "schedule" and "50.0%" in event["message"] and "took 6e+03 ms" in event["message"]
    assert event["measured"] == [[["0F0", 0.0, 1.0], ["0B0", 4.0, 6.0]], [["1F0", 1.0, 2.0], ["1B0", 2.0, 4.0]]]
    assert event["theory"] == [[["0F0", 0.0, 1.0], ["0B0", 4.0, 6.0]], [["1F0", 1.0, 2.0], ["1B0", 2.0, 4.0]]]
    assert report.add_points([point(1, 4, compute=1.0, spans=stages[1])]) == []
    json.dumps(event)


def test_formulas_never_fail_a_run():
    class Broken(Deep):
        def model(self):
            raise RuntimeError("not twice")

    workload, strategy = Deep(), of("pipeline:stages=2,micro_batches=4")
    division = divide(workload, strategy.replica, workload.model())
    report = cost_report_of(Broken(), strategy, 2, division, division.layout)
    report.add_points([point(0, 0, compute=1.0), point(1, 0, compute=1.0)])
    assert report.event()["formula"]["activations"] == [2, 1]


def test_nothing_measured_is_no_error():
    formula = estimate_costs(of("all_reduce"), 2, Sizes(10))
    assert measured({}, formula.grid) == {} and describe_costs(formula, {}) == "no step was measured"
    report = CostReport(of("all_reduce"), 2, lambda workers: formula)
    assert report.event() is None
    report.add_points([point(0, 0, compute=0.0)])
    event = report.event()
    assert event["measured"]["bytes"] == 100 and event["measured"]["hidden"] == pytest.approx(0.75)
    assert "75% of the communication overlaps" in event["message"]


def test_servers_are_too_few_for_columns_is_no_error_of_costs():
    with pytest.raises(ConfigError, match="multiple of 2"):
        estimate_costs(of("pipeline:stages=2"), 3, Sizes(10))


# ---- a run, beside its formulas


class _Forth(torch.autograd.Function):
    """Sleeps forward, and as long in the gradient of the input."""

    @staticmethod
    def forward(ctx, x, nap):
        ctx.nap = nap
        time.sleep(nap)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.nap)
        return grad, None


class _Learns(torch.autograd.Function):
    """Sleeps in the gradient of the weights."""

    @staticmethod
    def forward(ctx, weights, nap):
        ctx.nap = nap
        return weights.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.nap)
        return grad, None


class Sleepy(nn.Module):
    """A layer that takes `nap` seconds for each of F, the input's half of B, and the weights' half."""

    def __init__(self, nap):
        super().__init__()
        self.nap, self.weight = nap, nn.Parameter(torch.eye(WIDE))

    def forward(self, x):
        x = x if x.requires_grad else x.detach().requires_grad_()  # the first layer is as slow as the others
        return nn.functional.linear(_Forth.apply(x, self.nap), _Learns.apply(self.weight, self.nap))


class Slow(Deep):
    """Four layers that sleep."""

    nap = 0.04

    def model(self):
        return nn.Sequential(*[Sleepy(self.nap) for _ in range(4)])

    def data(self):
        x = torch.randn(32, WIDE, generator=torch.Generator().manual_seed(1))
        return rayps.data.tensors(x, x, batch_size=ROWS)


@pytest.mark.parametrize(
    ("schedule", "stages", "chunks"), [("gpipe", 4, 1), ("1f1b", 4, 1), ("zero_bubble", 4, 1), ("interleaved", 2, 2)]
)
def test_sleeping_stages_wait_and_send_as_the_formulas_say(schedule, stages, chunks):
    """On actors in threads. What is compared is a share of the time, and sleeping takes no processor."""
    strategy = f"pipeline:stages={stages},micro_batches=4,schedule={schedule},chunks={chunks}"
    cluster = LocalCluster()
    try:
        result = rayps.train(Slow(), strategy=strategy, workers=stages, epochs=1, cluster=cluster, progress=False)
    finally:
        cluster.close()
    (said,) = result.costs
    measured, formula = said["measured"], said["formula"]
    print(said["message"])
    wanted = formula["idle"]
    if schedule == "zero_bubble":  # the first stage has no gradient of an input to make: its B takes no time
        wanted = simulate(
            make_table(schedule, stages, 4), lambda action: float(action.kind != "B" or action.chunk > 0)
        ).idle
    assert abs(measured["idle"] - wanted) < 0.15  # roughly: in virtual time it is exact, see test_pipeline.py
    assert measured["activations"] == formula["activations"]
    between = next(each for each in formula["traffic"] if each["axis"] == "stage")
    assert (measured["stage_bytes"], measured["messages"]) == (between["bytes"], between["messages"])
    (drawn,) = [event for event in result.events if event["kind"] == "schedule"]
    assert [[each[0] for each in row] for row in drawn["measured"]] == [[e[0] for e in row] for row in drawn["theory"]]


def test_after_a_change_of_the_workers_only_steps_of_the_new_number_count():
    strategy = of("all_reduce")
    report = CostReport(strategy, 1, lambda workers: estimate_costs(strategy, workers, Sizes(10)))
    report.add_points([point(0, n, compute=1.0, bytes=0) for n in range(3)])
    report.change_workers(2)
    assert report.event() is None
    report.add_points([point(rank, n, compute=1.0, bytes=40) for n in (3, 4) for rank in (0, 1)])
    report.change_workers(2)
    event = report.event()
    assert event["workers"] == 2 and event["measured"]["bytes"] == event["formula"]["bytes"] == 80

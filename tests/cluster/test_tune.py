"""Runs inside Ray Tune: a trial's placement group holds the workers, and the Ray is the one of the trial."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from required_module import required

from rayps.cluster.placement import within

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import sys
import ray
from ray import tune

ray.init(num_cpus=3, include_dashboard=False, logging_level="ERROR", _temp_dir=sys.argv[1])

def trial(config):
    import ray, torch, rayps

    def train_fn(lr: float = 0.1):
        torch.manual_seed(0)  # both trials start at the same parameters, so that their losses compare
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        rayps.wrap(model, optimizer)
        for step in range(5):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 3)).square().mean()
            loss.backward()
            optimizer.step()
        return loss.item(), ray.get_runtime_context().get_placement_group_id()

    class Line(rayps.Workload):
        def model(self):
            return torch.nn.Linear(3, 1)

        def data(self):
            x = torch.randn(16, 3)
            return rayps.data.tensors(x, x.sum(1, keepdim=True), batch_size=4)

        def loss(self, model, batch):
            assert ray.get_runtime_context().get_placement_group_id() == mine
            return (model(batch.x) - batch.y).square().mean()

        def optimizer(self, params):
            return torch.optim.SGD(params, lr=config["lr"])

    mine = ray.get_runtime_context().get_placement_group_id()
    results = rayps.run(train_fn, workers=2, params=config, address="auto", progress=False)
    report = {"loss": results[0][0], "inside": all(group == mine for _, group in results)}
    if config["lr"] == 0.01:  # one trial does the rest
        tune.report(report)
        return
    rayps.train(Line(), workers=2, epochs=1, progress=False)
    grown = rayps.train(Line(), workers=(1, 2), epochs=2, progress=False, elastic={"replay": [[1, 2]]})
    assert [event["to"] for event in grown.events if event["kind"] == "resized"] == [2], grown.events
    try:
        rayps.run(train_fn, workers=3, progress=False)
    except rayps.RaypsError as error:
        report["refused"] = "PlacementGroupFactory" in str(error)
    tune.report(report)

factory = tune.PlacementGroupFactory([{"CPU": 1}] + [{"CPU": 1}] * 2)
tuner = tune.Tuner(
    tune.with_resources(trial, factory),
    param_space={"lr": tune.grid_search([0.01, 0.1])},
    run_config=tune.RunConfig(storage_path=sys.argv[2], verbose=0),
)
found = {each.config["lr"]: each.metrics for each in tuner.fit()}
assert found[0.1]["loss"] < found[0.01]["loss"], found
assert all(each["inside"] for each in found.values()) and found[0.1]["refused"], found
sys.stdout.write("both trials ran inside their groups")
"""


def test_workers_are_placed_in_the_bundles_of_a_group():
    one = {"cpu": 1.0}
    assert within([{"cpu": 0.0}, one, one], [one, one]) == [1, 2]
    assert within([one, one], [one, one]) == [1, 0]
    assert within([{"cpu": 4.0}], [one] * 3) == [0, 0, 0]
    assert within([{"cpu": 0.0}, one], [one, one]) is None
    assert within([{"cpu": 8.0}], [{"cpu": 1.0, "gpu": 1.0}]) is None


@pytest.mark.ray
def test_a_trial_of_ray_tune_holds_its_workers(tmp_path_factory):
    required("ray.tune")
    short = tmp_path_factory.mktemp("r")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(short), str(short / "results")],
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert "both trials ran inside their groups" in done.stdout, done.stdout + done.stderr

"""Callbacks: each round and evaluation once, stops that succeed, states that survive, the best checkpoint."""

import importlib
import os
import shutil
import time
from collections import Counter

import pytest
from federated_work import Quadratics
from rayps_client.errors import ConfigError, WorkloadError
from small_work import SEEN, Small, Watched, kinds, rows, train

import rayps
from rayps.cluster.local import LocalCluster
from rayps.core.job import user_code
from rayps.core.job.job_status import Status
from rayps.core.job.returned_rounds import SeenRounds
from rayps.runtime.driver.driver import Driver
from rayps.runtime.driver.workload_job import WorkloadJob
from rayps.runtime.records.journal import Journal
from rayps.runtime.results.early_stopping import MetricWatch
from rayps.strategies.job import JobSpec
from rayps.tensors.checkpoints import checkpoint

STRATEGIES = [
    "all_reduce",
    "all_reduce:replica=pipeline(stages=2,micro_batches=1)",
    "parameter_server:shards=2",
    "parameter_server:staleness=2",
    "local_sgd:period=4",
    "downpour:n_push=2,n_fetch=2",
    "hogwild",
    "hybrid",
]


class Records(rayps.Callback):
    """Records every call."""

    def __init__(self):
        self.calls, self.state = [], None

    def of(self, method):
        return [value for name, value in self.calls if name == method]

    def on_start(self, run):
        self.calls.append(("start", run.round))

    def on_round(self, run, point):
        assert run.round >= point["round"] + 1
        self.calls.append(("round", point["round"]))

    def on_evaluation(self, run, metrics):
        self.calls.append(("evaluation", (run.round, metrics["loss"])))

    def on_checkpoint(self, run, path):
        assert path.name == f"step-{run.round:08d}"
        self.calls.append(("checkpoint", run.round))

    def on_end(self, run, outcome):
        self.calls.append(("end", outcome["status"]))

    def state_dict(self):
        return {"seen": len(self.calls)}

    def load_state_dict(self, state):
        self.state = state


class StopsAt(rayps.Callback):
    def __init__(self, round):
        self.round = round

    def on_round(self, run, point):
        if point["round"] + 1 >= self.round:
            run.stop(f"round {self.round} is enough")


# ---- calls


def test_each_method_is_called_and_each_round_once(tmp_path):
    seen = Records()
    result = train(Small(), workers=2, epochs=3, callbacks=[seen], checkpoint=tmp_path)
    assert seen.of("start") == [0]
    assert seen.of("round") == list(range(18))
    assert [round for round, _ in seen.of("evaluation")] == [6, 12, 18]
    assert seen.of("evaluation")[-1][1] == result.metrics["loss"]
    assert seen.of("checkpoint")[-1] == 18
    assert seen.of("end") == ["SUCCEEDED"]
    assert seen.calls[0][0] == "start" and seen.calls[-1][0] == "end"


def test_a_run_has_all_parameters_of_the_workload():
    class Rated(Small):
        lr: float = 0.1
        layers: list[int] = [3]  # noqa: RUF012
        momentum = 0.0

    seen = []
    look = type("Look", (rayps.Callback,), {"on_start": lambda self, run: seen.append(run.params)})
    work = Rated()
    work.lr = 0.3
    result = train(work, steps=1, callbacks=[look()])
    assert {name: seen[0][name] for name in ("lr", "layers", "momentum")} == {"lr": 0.3, "layers": [3], "momentum": 0.0}
    assert seen[0] == result.params


class WithOwn(Small):
    def callbacks(self):
        return [StopsAt(4)]


def test_callbacks_of_the_workload():
    result = train(WithOwn(pause=0.01), workers=2, epochs=50)
    assert "ended_early" in kinds(result)
    said = [event["message"] for event in result.events if event["kind"] in ("ended_early", "finished")]
    end = said[-1]
    assert said == [end, end]  # one message, as an event and as the outcome
    assert result.snapshot.round < 300 and end.startswith(f"ended early after round {result.snapshot.round} of 300: ")


@pytest.mark.parametrize("method", ["on_start", "on_round", "on_evaluation", "on_checkpoint", "on_end", "state_dict"])
def test_an_exception_ends_the_run_with_the_name_of_callback_and_method(method, tmp_path):
    def fails(*arguments):
        raise ZeroDivisionError("by nothing")

    ended = Records()
    bad = type("Bad", (rayps.Callback,), {method: fails})()
    with pytest.raises(WorkloadError, match=rf"Bad\.{method}\(\) raised ZeroDivisionError: by nothing") as caught:
        train(Small(), workers=2, epochs=2, callbacks=[bad, ended], checkpoint=tmp_path)
    assert "test_callbacks.py" in str(caught.value)
    assert ended.of("end") == (["SUCCEEDED"] if method == "on_end" else ["FAILED"])


def test_a_state_that_is_not_json(tmp_path):
    bad = type("Bad", (rayps.Callback,), {"state_dict": lambda self: {"what": object()}})()
    with pytest.raises(WorkloadError, match=r"Bad\.state_dict\(\) cannot be written as JSON"):
        train(Small(), callbacks=[bad], checkpoint=tmp_path)


def test_a_callback_that_does_not_return(monkeypatch):
    monkeypatch.setattr(user_code, "START_SECONDS", 0.3)
    slow = type("Slow", (rayps.Callback,), {"on_evaluation": lambda self, run, metrics: time.sleep(5)})()
    with pytest.raises(WorkloadError, match=r"Slow\.on_evaluation\(\) has not returned"):
        train(Small(), callbacks=[slow], timeout=0.5)


@pytest.mark.parametrize("given", [rayps.Callback, print, 3])
def test_what_is_no_callback(given):
    with pytest.raises(ConfigError, match="callbacks has"):
        train(Small(), callbacks=[given])


class Logs(rayps.Callback):
    def on_start(self, run):
        run.log(begun=1)

    def on_round(self, run, point):
        run.log(half=point["loss"] / 2)

    def on_evaluation(self, run, metrics):
        run.log(twice=metrics["loss"] * 2)


def test_logged_numbers_are_in_the_history():
    result = train(Small(), workers=2, epochs=2, callbacks=[Logs()])
    table = result.history
    assert table["half"].to_pylist() == [loss / 2 for loss in table["loss"].to_pylist()]
    pairs = zip(table["evaluation_loss"].to_pylist(), table["evaluation_twice"].to_pylist(), strict=True)
    assert [twice for loss, twice in pairs if loss is not None and twice != loss * 2] == []
    assert table["begun"].to_pylist() == [1] + [None] * 11


@pytest.mark.parametrize("numbers", [{"loss": 1.0}, {"mine": "text"}])
def test_numbers_that_cannot_be_logged(numbers):
    bad = type("Bad", (rayps.Callback,), {"on_round": lambda self, run, point: run.log(**numbers)})()
    with pytest.raises(ConfigError, match=next(iter(numbers))):
        train(Small(), callbacks=[bad])


def test_rounds_seen():
    seen = SeenRounds()
    assert [seen.add(number) for number in (0, 1, 3, 1, 3, 2, 2, 4)] == [
        True,
        True,
        True,
        False,
        False,
        True,
        False,
        True,
    ]
    assert (seen.below, seen.others) == (5, set())


# ---- stop


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_stop_succeeds_with_a_result_and_a_checkpoint(strategy, tmp_path):
    seen = Records()
    options = {"workers": 2, "epochs": 200, "checkpoint": tmp_path, "checkpoint_every": 500}
    result = train(Small(pause=0.02), strategy, callbacks=[StopsAt(10), seen], **options)
    at = result.snapshot.round
    assert 10 <= at < 500
    assert result.checkpoint == tmp_path / f"step-{at:08d}"
    assert result.history.num_rows == at
    assert seen.of("end") == ["SUCCEEDED"]
    assert seen.of("evaluation")[-1][0] == at
    if "staleness" not in strategy and strategy != "hogwild":  # else each worker evaluates at a moment of its own
        assert seen.of("evaluation")[-1][1] == result.metrics["loss"]
    assert "round 10 is enough" in result.events[-1]["message"]
    again = train(Small(), strategy, workers=2, steps=at + 3, resume=result.checkpoint)
    assert again.snapshot.round == at + 3


def test_a_stop_that_comes_too_late_is_a_warning(monkeypatch):
    poll = WorkloadJob.poll

    def late(self):
        while SEEN["late"] < 12:  # the driver hears nothing until the last round
            time.sleep(0.002)
        return poll(self)

    monkeypatch.setattr(WorkloadJob, "poll", late)
    SEEN["late"] = 0
    result = train(Small(tag="late"), steps=12, callbacks=[StopsAt(3)])
    assert result.snapshot.round == 12
    [warning] = [event["message"] for event in result.events if event["kind"] == "warning"]
    assert "stopped the run at round 3 (round 3 is enough), but the workers had trained to the end, round 12" in warning


def test_a_stop_at_the_last_round_is_no_warning():
    result = train(Small(), steps=6, callbacks=[StopsAt(6)])
    assert "warning" not in kinds(result) and result.snapshot.round == 6


def test_a_stop_under_federated_clients():
    result = train(Quadratics(), "fedavg:local_steps=2,fraction=1.0", workers=2, epochs=4000, callbacks=[StopsAt(5)])
    assert 5 <= result.snapshot.round < 4000


def test_a_stop_ends_all_phases():
    phases = [(50, rayps.AllReduce()), rayps.LocalSGD(period=4)]
    result = train(Small(pause=0.002), phases, workers=2, epochs=100, callbacks=[StopsAt(10)])
    assert 10 <= result.snapshot.round < 300
    assert set(result.history["strategy"].to_pylist()) == {"all_reduce"}


@pytest.mark.parametrize("strategy", ["hogwild", "all_reduce", "local_sgd:period=4"])
def test_a_run_that_resumes_at_its_end_is_evaluated(strategy, tmp_path):
    """Under hogwild this waited for rounds that nobody was to run."""
    first = train(Small(), strategy, workers=2, steps=9, checkpoint=tmp_path)
    again = train(Small(), strategy, workers=2, steps=9, resume=first.checkpoint, timeout=10.0)
    assert again.metrics == pytest.approx(first.metrics)


# ---- early stopping


def test_the_best_value_of_a_metric():
    falls, grows = MetricWatch("loss"), MetricWatch("accuracy", min_delta=0.1)
    assert [falls.look({"loss": value}, 1) for value in (3, 2, 2, 2.5, float("nan"), 1)] == [1, 1, 0, 0, 0, 1]
    assert [grows.look({"accuracy": value}, 1) for value in (0.5, 0.55, 0.7)] == [1, 0, 1]
    assert MetricWatch("f1_score").grows and not MetricWatch("accuracy", "min").grows
    with pytest.raises(ConfigError, match="the metrics are loss, error"):
        falls.metric = "eror"
        falls.look({"loss": 1.0, "error": 2.0}, 3)


@pytest.mark.parametrize("options", [{"metric": ""}, {"patience": 0}, {"mode": "most"}, {"min_delta": -1}])
def test_options_that_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        rayps.EarlyStopping(**options)


def test_an_unknown_metric_ends_the_run_at_the_first_evaluation():
    with pytest.raises(ConfigError, match="the metrics are loss, error"):
        train(Small(), callbacks=[rayps.EarlyStopping("accuracy")])


class Constant(Small):
    """The metric never improves."""

    def evaluate(self, model, batch):
        return {"constant": 1.0}


class Sparse(Small):
    """The metric `quality` is a mean whose weight is 0 in the first and the third evaluation."""

    def evaluate(self, model, batch):
        seen = importlib.import_module("small_work").SEEN
        seen[self.tag + "-evaluated"] += 1  # one batch each
        lacks = seen[self.tag + "-evaluated"] in (1, 3)
        return {"quality": rayps.Mean(1.0, 0 if lacks else 1), "never": rayps.Mean(1.0, 0)}

    def evaluation_data(self):
        return rayps.data.tensors(*rows(4), batch_size=4)


def test_an_evaluation_without_a_value_of_the_metric_is_ignored(tmp_path):
    SEEN["sparse-evaluated"] = 0
    stop, keep = rayps.EarlyStopping("quality", patience=2, mode="max"), rayps.BestCheckpoint("quality", "max")
    beside = rayps.BestCheckpoint("never", "max", name="never")
    options = {"steps": 100, "evaluate_every": 3, "checkpoint": tmp_path, "keep_checkpoints": 50}
    result = train(Sparse(tag="sparse"), callbacks=[stop, keep, beside], **options)
    values = {i + 1: v for i, v in enumerate(result.history["evaluation_quality"].to_pylist()) if v is not None}
    assert min(values) == 6 and 9 not in values
    assert result.snapshot.round >= 15 and "not improved for 2 evaluations" in result.events[-1]["message"]
    assert "after round 6" in result.events[-1]["message"], "the evaluation after round 9 does not count"
    assert result.best == tmp_path / "best" / "step-00000006" and beside.path is None
    warnings = [event["message"] for event in result.events if event["kind"] == "warning"]
    assert [text for text in warnings if "'quality', whose weights sum to 0" in text] == warnings[:2]
    assert len(warnings) == 3, "one of each callback"
    with pytest.raises(ConfigError, match="no such metric: the metrics are loss, quality, never"):
        train(Sparse(tag="sparse"), callbacks=[rayps.EarlyStopping("other", mode="min")], steps=6)


def test_early_stopping_and_its_patience_after_a_resume(tmp_path):
    """One evaluation is the best, and the patience of 5 counts over both runs."""
    stop, seen = rayps.EarlyStopping("constant", patience=5, mode="min"), Records()
    options = {"workers": 2, "evaluate_every": 4, "checkpoint": tmp_path}
    keeps = [rayps.BestCheckpoint("constant", "min")]  # a state is saved at every evaluation
    first = train(Constant(), steps=16, callbacks=[stop, *keeps], **options)
    assert stop.waited == 3
    again = rayps.EarlyStopping("constant", patience=5, mode="min")
    second = train(Constant(), steps=400, callbacks=[again, *keeps, seen], resume=first.checkpoint, **options)
    assert second.snapshot.round == 24
    assert [round for round, _ in seen.of("evaluation")] == [16, 20, 24]  # the end's evaluation came after its state
    assert "not improved for 5 evaluations" in second.events[-1]["message"]


# ---- recovery


@pytest.mark.parametrize("strategy", ["all_reduce", "parameter_server:shards=2", "local_sgd:period=4"])
def test_rounds_that_are_repeated_after_a_death_are_seen_once(strategy, request):
    seen, tag = Records(), request.node.name
    cluster = Watched()
    killer = cluster.kill_when(tag, 70, ("WorkerActor", 1))
    work = Small(n=60, pause=0.003, tag=tag)
    options = {"steps": 60, "checkpoint_every": 20, "evaluate_every": 3}
    result = train(work, strategy, cluster, workers=2, callbacks=[seen], **options)
    killer.join()
    assert "restarted" in kinds(result)
    assert Counter(seen.of("round")) == Counter(range(60))
    assert [round for round, _ in seen.of("evaluation")] == list(range(3, 61, 3))
    undisturbed = Records()
    train(Small(n=60), strategy, workers=2, callbacks=[undisturbed], **options)
    for (_, found), (_, expected) in zip(seen.of("evaluation"), undisturbed.of("evaluation"), strict=True):
        assert found == pytest.approx(expected, rel=1e-9)


class Copies(rayps.Callback):
    """Copies the job's folder in the middle of the run: what a driver that dies at this moment leaves."""

    def __init__(self, folder, target, at):
        self.folder, self.target, self.at = folder, target, at

    def on_round(self, run, point):
        if run.round >= self.at and not self.target.exists():
            shutil.copytree(self.folder, self.target)


def run_driver(folder, callbacks, *, again=False, **options):
    spec = JobSpec("small_work:Small", workers=2, evaluate_every=4, checkpoint_every=4, **options).check()
    resume = checkpoint.newest(folder / "checkpoints") if again else None
    journal = Journal(folder)
    try:
        driver = Driver(
            WorkloadJob(
                Small(pause=0.01),
                spec,
                journal,
                checkpoints=folder / "checkpoints",
                resume=resume,
                callbacks=callbacks,
                again=again,
                capture=False,
            )
        )
        cluster = LocalCluster()
        try:
            return driver.run(cluster), journal
        finally:
            cluster.close()
    finally:
        journal.close()


@pytest.mark.parametrize("at", [9, 21, 40])
def test_a_new_driver_continues_with_what_its_callbacks_have_seen(at, tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    run_driver(old, [Records(), Copies(old, new, at)], steps=60)
    seen = Records()
    outcome, journal = run_driver(new, [seen], again=True, steps=60)
    assert outcome.status is Status.SUCCEEDED
    restored = seen.state["seen"] if seen.state else 0
    assert restored > 0 or at == 9
    rounds = seen.of("round")
    assert rounds == list(range(rounds[0], 60))  # each once, from what the restored state has seen
    evaluated = [round for round, _ in seen.of("evaluation")]
    assert evaluated == list(range(evaluated[0], 61, 4))
    assert evaluated[0] <= rounds[0] + 4
    written = [point["round"] for point in journal.earlier_points() if point["kind"] == "evaluation"]
    assert written == list(range(4, 61, 4))  # none lost, none doubled


def test_a_driver_that_died_after_a_stop_ends_early_too(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"

    class Late(rayps.Callback):
        """Copies the folder at the first checkpoint after the stop."""

        def on_checkpoint(self, run, path):
            if run.round >= 10 and not new.exists():
                shutil.copytree(old, new)

    outcome, _ = run_driver(old, [StopsAt(10), Late()], steps=400)
    assert outcome.status is Status.SUCCEEDED and new.exists()
    again, _ = run_driver(new, [StopsAt(1000), Late()], again=True, steps=400)
    assert again.status is Status.SUCCEEDED
    assert "round 10 is enough" in again.message


# ---- the best checkpoint


@pytest.mark.parametrize("strategy", ["all_reduce", "parameter_server:shards=2", "local_sgd:period=4"])
def test_the_best_checkpoint_is_that_of_the_best_evaluation(strategy, tmp_path):
    seen = Records()
    keep = rayps.BestCheckpoint("error")
    options = {"workers": 2, "steps": 60, "evaluate_every": 2, "checkpoint": tmp_path, "callbacks": [keep, seen]}
    result = train(Small(optimizer="adam"), strategy, **options)
    values = [(value, row) for row, value in enumerate(result.history["evaluation_error"].to_pylist()) if value]
    best, at = min(values)
    assert len(values) == 30
    assert result.best == tmp_path / "best" / f"step-{at + 1:08d}"
    assert keep.watch.best == best
    again = train(Small(optimizer="adam"), strategy, workers=2, steps=at + 1, resume=result.best)
    assert again.metrics["error"] == pytest.approx(best, rel=1e-12)


def test_the_best_checkpoint_stays(tmp_path):
    class Best(rayps.Callback):
        checkpoint_each_evaluation = True

        def on_checkpoint(self, run, path):
            if run.round == 4:
                run.keep(4, "mine")

    result = train(Small(), steps=40, checkpoint=tmp_path, evaluate_every=4, callbacks=[Best()], keep_checkpoints=3)
    assert result.best == tmp_path / "mine" / "step-00000004"
    checkpoint.verify(result.best)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [
        "mine",
        "step-00000032",
        "step-00000036",
        "step-00000040",
    ]
    train(Small(), steps=6, checkpoint=tmp_path, resume=result.best)  # removes the checkpoints of later rounds
    checkpoint.verify(result.best)


def test_a_resume_into_another_folder_takes_the_best_along(tmp_path):
    first = train(
        Constant(),
        steps=8,
        checkpoint=tmp_path / "a",
        callbacks=[rayps.BestCheckpoint("constant", "min")],
        evaluate_every=2,
    )
    assert first.best == tmp_path / "a" / "best" / "step-00000002"
    options = {"checkpoint": tmp_path / "b", "resume": first.checkpoint, "evaluate_every": 2}
    second = train(Constant(), steps=12, callbacks=[rayps.BestCheckpoint("constant", "min")], **options)
    assert second.best == tmp_path / "b" / "best" / "step-00000002"
    checkpoint.verify(second.best)


class KeepsOwn(Small):
    def callbacks(self):
        return [rayps.BestCheckpoint("loss")]


class LogsSteps(rayps.Callback):
    def on_evaluation(self, run, metrics):
        run.log(steps=run.round)


def test_two_best_checkpoints_of_one_name_are_refused(tmp_path):
    seen = Records()
    with pytest.raises(ConfigError, match=r"2 BestCheckpoints of the name 'best'.* name=") as caught:
        train(KeepsOwn(), checkpoint=tmp_path, callbacks=[seen, rayps.BestCheckpoint("error")])
    assert caught.value.data["field"] == "callbacks" and seen.calls == []


@pytest.mark.parametrize("first", [0, 1])
def test_two_best_checkpoints_of_different_names(first, tmp_path):
    low, high = rayps.BestCheckpoint("constant", "min"), rayps.BestCheckpoint("steps", "max", name="best-steps")
    keeps = [low, high] if first == 0 else [high, low]
    options = {"workers": 2, "steps": 12, "evaluate_every": 3, "keep_checkpoints": 1, "checkpoint": tmp_path}
    result = train(Constant(), callbacks=[LogsSteps(), *keeps], **options)
    assert low.path == tmp_path / "best" / "step-00000003"
    assert high.path == tmp_path / "best-steps" / "step-00000012"
    assert result.best == keeps[0].path
    for path in (low.path, high.path):
        checkpoint.verify(path)


def test_where_there_is_nothing_to_keep(tmp_path):
    with pytest.raises(ConfigError, match="checkpoint=FOLDER"):
        train(Small(), callbacks=[rayps.BestCheckpoint()])
    with pytest.raises(ConfigError, match="name of a folder"):
        rayps.BestCheckpoint(name="../up")
    assert checkpoint.keep(tmp_path, 7, "best") is None


def test_a_checkpoint_is_copied_where_links_are_not_possible(tmp_path, monkeypatch):
    result = train(Small(), steps=4, checkpoint=tmp_path)

    def refuse(*arguments):
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    kept = checkpoint.keep(tmp_path, 4, "best")
    assert (
        kept is not None
        and (kept / "manifest.json").stat().st_ino != (result.checkpoint / "manifest.json").stat().st_ino
    )
    checkpoint.verify(kept)


# ---- evaluations


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_evaluations_every_few_rounds(strategy):
    seen = Records()
    train(Small(), strategy, workers=2, steps=17, evaluate_every=5, callbacks=[seen])
    assert [round for round, _ in seen.of("evaluation")] == [5, 10, 15, 17]


def test_evaluations_every_few_rounds_of_clients():
    seen = Records()
    train(Quadratics(), "fedavg:local_steps=2,fraction=1.0", workers=2, epochs=7, evaluate_every=3, callbacks=[seen])
    assert [round for round, _ in seen.of("evaluation")] == [3, 6, 7]


@pytest.mark.parametrize("field", ["evaluate_every", "keep_checkpoints"])
def test_numbers_below_one(field):
    with pytest.raises(ConfigError, match=field):
        train(Small(), **{field: 0})


# ---- on Ray


@pytest.mark.ray
def test_stop_early_keep_the_best_and_resume(ray_cluster, tmp_path):
    seen = Records()
    callbacks = [rayps.EarlyStopping("constant", patience=2, mode="min"), rayps.BestCheckpoint("error"), seen]
    options = {"workers": 2, "cluster": ray_cluster, "progress": False, "evaluate_every": 4, "checkpoint": tmp_path}
    result = rayps.train(Both(), epochs=100, callbacks=callbacks, **options)
    assert result.snapshot.round == 12
    assert result.best is not None and result.best.parent == tmp_path / "best"
    error = result.history["evaluation_error"].to_pylist()
    at = int(result.best.name.removeprefix("step-"))
    assert error[at - 1] == min(value for value in error if value is not None)
    resumed = rayps.train(Both(), steps=at, resume=result.best, **(options | {"checkpoint": tmp_path / "again"}))
    assert resumed.metrics["error"] == pytest.approx(error[at - 1], rel=1e-12)


class Both(Small):
    def evaluate(self, model, batch):
        return {"constant": 1.0, **super().evaluate(model, batch)}

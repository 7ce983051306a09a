"""`dry_run=True`: a few rounds of everything, a report, and nothing left behind."""

import dataclasses
import threading

import pytest
from federated_work import Fed
from rayps_client.errors import ConfigError, WorkloadError
from small_work import SEEN, Paced, Small, kinds, train

import rayps


@pytest.mark.parametrize(
    ("strategy", "workers"),
    [("all_reduce", 2), ("parameter_server:shards=2", 2), ("local_sgd:period=2", 2), ("pipeline:stages=2", 2)],
)
def test_a_few_rounds_of_everything(tmp_path, monkeypatch, strategy, workers):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "temporary").mkdir()
    SEEN.pop("dry", None)
    threads = threading.active_count()
    result = train(
        Paced(n=360, batch=4, tag="dry"),
        strategy,
        workers=workers,
        epochs=100,
        dry_run=True,
        checkpoint=tmp_path / "saved",
    )
    assert "dry_run" in kinds(result)
    report = result.events[-1]
    [phase] = report["phases"]
    replicas = 1 if "pipeline" in strategy else workers
    assert phase["epoch"] == 90 // replicas
    assert phase["rounds"] == 100 * 90 // replicas
    assert phase["seconds"] > 0
    assert phase["checkpoint"] > 100
    assert phase["memory"]["all"] > 0
    assert f"the run has {phase['rounds']} rounds in 100 epochs" in report["message"]
    assert "nothing was kept" in report["message"]
    assert result.checkpoint is None
    if "pipeline" not in strategy:  # a pipeline calls loss for each micro-batch
        assert 0 <= SEEN["dry"] - workers * (4 + 2 * 3) <= 2  # the formula of memory calls loss once or twice
    assert sorted(path.name for path in tmp_path.iterdir()) == ["temporary"]
    left = [path.name for path in (tmp_path / "temporary").iterdir()]
    assert [name for name in left if not name.startswith("torchinductor")] == []  # a cache that torch makes
    assert threading.active_count() <= threads + 1


def test_each_phase_is_tried():
    strategies = [(1, "all_reduce"), (2, "parameter_server:shards=2")]
    result = train(Small(n=72), strategies, workers=2, dry_run=True)
    first, second = result.events[-1]["phases"]
    assert (first["strategy"], first["rounds"], first["epoch"]) == ("all_reduce", 12, 12)
    assert (second["strategy"], second["rounds"], second["epoch"]) == ("parameter_server", 24, 12)


def test_a_federated_run():
    result = train(Fed(), "fedavg", workers=2, steps=50, dry_run=True)
    assert result.events[-1]["phases"][0]["rounds"] == 50


class BreaksAtEnd(Small):
    def evaluate(self, model, batch):
        raise KeyError("accuracy")


class BreaksSchedule(Small):
    def schedule(self, optimizer):
        return lambda step: 1.0 if step < 2 else 1 / 0


@pytest.mark.parametrize(("work", "text"), [(BreaksAtEnd, "evaluate"), (BreaksSchedule, "schedule")])
def test_a_mistake_is_found_and_leaves_nothing(tmp_path, monkeypatch, work, text):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(WorkloadError, match=text):
        train(work(n=3600), workers=2, epochs=100, dry_run=True)
    assert list(tmp_path.iterdir()) == []


class Calls(rayps.Callback):
    """Records which of its methods were called, and ends the run at the first round."""

    checkpoint_each_evaluation = True

    def _called(self, *given):
        self.called = [*getattr(self, "called", []), given]

    on_start = on_evaluation = on_checkpoint = on_end = load_state_dict = _called

    def on_round(self, run, point):
        self._called(run, point)
        run.stop("at once")

    def state_dict(self):
        self._called()
        return {}


class WithCallbacks(Small):
    def __init__(self, *callbacks, **options):
        super().__init__(**options)
        self.own = callbacks

    def callbacks(self):
        return self.own


def test_no_callback_is_called(tmp_path):
    own, given = Calls(), Calls()
    phases = [(1, "all_reduce"), (1, "local_sgd")]
    work = WithCallbacks(own, rayps.EarlyStopping("error"), n=72)
    result = train(work, phases, workers=2, dry_run=True, callbacks=[given], checkpoint=tmp_path / "saved")
    assert not hasattr(own, "called") and not hasattr(given, "called")
    report = result.events[-1]
    assert [phase["rounds"] for phase in report["phases"]] == [12, 12]
    assert report["message"].splitlines()[-1] == "callbacks were checked, and not called: Calls, Calls-2, EarlyStopping"
    assert list(tmp_path.iterdir()) == []
    assert "callbacks" not in train(Small(), dry_run=True).events[-1]["message"]


class LogsSlope(rayps.Callback):
    def on_evaluation(self, run, metrics):
        run.log(slope=1.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: {"workload": WithCallbacks(3)},
        lambda folder: {"callbacks": [rayps.EarlyStopping]},
        lambda folder: {"callbacks": [rayps.EarlyStopping("acuracy", mode="max")]},
        lambda folder: {
            "workload": WithCallbacks(rayps.BestCheckpoint("acuracy", mode="max")),
            "checkpoint": folder / "saved",
        },
        lambda folder: {"callbacks": [rayps.BestCheckpoint()]},
    ],
)
def test_callbacks_are_refused_as_by_the_run(tmp_path, make):
    check_refused_as_by_the_run(tmp_path, make)


def check_refused_as_by_the_run(tmp_path, make):
    errors = []
    for dry_run in (False, True):
        options = {"workload": Small(), **make(tmp_path / str(dry_run))}
        with pytest.raises(ConfigError) as caught:
            train(options.pop("workload"), workers=2, steps=2, dry_run=dry_run, **options)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]
    assert not (tmp_path / "True").exists()


def test_a_metric_that_an_earlier_callback_may_log_is_not_refused():
    watching = [LogsSlope(), rayps.EarlyStopping("slope", mode="min")]
    assert train(Small(), workers=2, steps=2, callbacks=watching).metrics
    assert train(Small(), workers=2, steps=2, callbacks=watching, dry_run=True).metrics
    with pytest.raises(ConfigError, match="slope"):
        train(Small(), workers=2, steps=2, callbacks=watching[::-1], dry_run=True)


@dataclasses.dataclass(frozen=True)
class Frozen(Small):
    n: int = 360
    batch: int = 4
    kind: str = "sgd"
    pause: float = 0.0
    jitter: float = 0.0
    tag: str = "dry-frozen"


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots(Frozen):
    tag: str = "dry-slots"


@pytest.mark.parametrize("kind", [Frozen, FrozenSlots])
def test_a_frozen_dataclass(kind):
    work = kind()
    SEEN.pop(work.tag, None)
    result = train(work, workers=2, epochs=100, dry_run=True)
    assert result.events[-1]["phases"][0]["rounds"] == 4500
    assert 0 <= SEEN[work.tag] - 2 * (4 + 2 * 3) <= 2  # 3 batches in each of the two evaluations


@pytest.mark.parametrize(
    ("strategy", "work"),
    [
        ("downpour:warm_start=10", Small),
        ("downpour:n_push=10,n_fetch=10", Small),
        ("local_sgd:period=8,warmup=20", Small),
        ("diloco:period=50,overlap=5", Small),
        ("parallel_sgd:rounds=5", Small),
        ("parameter_server:staleness=50,shards=2", Small),
        ("parameter_server:staleness=none", Small),
        ("pipeline:stages=2,micro_batches=3,schedule=gpipe", Small),
        ("admm:local_steps=50", Small),
        ("fedavg:fraction=0.3,local_steps=5", Fed),
        ("fedbuff:buffer=20", Fed),
    ],
)
def test_options_for_long_runs(strategy, work):
    result = train(work(n=360), strategy, workers=2, steps=100, dry_run=True, timeout=10)
    assert result.events[-1]["phases"][0]["rounds"] == 100


def test_it_starts_at_round_0(tmp_path):
    with pytest.raises(ConfigError, match="dry_run and resume"):
        train(Small(), dry_run=True, resume=tmp_path / "step-00000001")

"""One batch is tried while workers start: mistakes are answered before any worker is there; nothing else changes."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from process_cluster import ProcessCluster
from rayps_client.errors import ConfigError, WorkloadError
from small_work import Small
from torch import nn
from torch.nn import functional

import rayps
from rayps.cluster.local import LocalCluster, until
from rayps.core.job.job_status import Status
from rayps.runtime.checks.preflight import bytes_of
from rayps.runtime.checks.trial import MOST_BYTES, TrialFacts, reason_not_to_try
from rayps.runtime.driver.driver import Driver
from rayps.runtime.driver.workload_job import WorkloadJob
from rayps.runtime.records.journal import Journal
from rayps.strategies.catalogue import parse, wire
from rayps.strategies.job import JobSpec

PATIENCE = 240.0  # for a process to start on a machine however busy
HERE = Path(__file__).name


class Waits:
    """A cluster on which workers start once the trial has its verdict, as it is where their start takes long."""

    driver, patience = None, PATIENCE

    def reserve(self, bundles, timeout, avoid=()):
        self.driver.job.trial.wait(self.patience)
        return super().reserve(bundles, timeout, avoid)

    def spawn(self, target, *args, **options):
        self.spawned = [*getattr(self, "spawned", []), target]
        return super().spawn(target, *args, **options)

    @property
    def workers(self):
        return sum("WorkerActor" in target for target in getattr(self, "spawned", []))


class OnThreads(Waits, LocalCluster):
    pass


class OnProcesses(Waits, ProcessCluster):
    pass


def drive(work, strategy="all_reduce", *, tries=True, cluster=None, workers=2, epochs=2, checkpoints=None, **options):
    """Outcome, events, cluster."""
    journal, cluster = Journal(), cluster or OnThreads()
    spec = JobSpec("x:Work", wire(parse(strategy)), workers, epochs=epochs, **options)
    cluster.driver = Driver(WorkloadJob(work, spec, journal, checkpoints=checkpoints, capture=False, tries=tries))
    outcome = cluster.driver.run(cluster)
    assert cluster.driver.job.trial._process is None
    return outcome, journal, cluster


class Mistaken(rayps.Workload):
    """Ten rows of five features in three classes, and one mistake."""

    def __init__(self, mistake, rows=20, batch=10):
        self.mistake, self.rows, self.batch = mistake, rows, batch

    def model(self):
        return nn.Linear(4 if self.mistake == "width" else 5, 3)

    def data(self):
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(self.rows, 5, generator=generator)
        y = torch.randint(0, 3, (self.rows,), generator=generator)
        if self.mistake == "label":
            y[:] = 7
        if self.mistake == "label dtype":
            y = y.float()
        return rayps.data.tensors(x.double() if self.mistake == "dtype" else x, y, batch_size=self.batch)

    def loss(self, model, batch):
        loss = functional.cross_entropy(
            model(batch.x), batch.y, reduction="none" if self.mistake == "no scalar" else "mean"
        )
        return loss.detach() if self.mistake == "detached" else loss

    def evaluate(self, model, batch):
        if self.mistake == "evaluate":
            return {"accuracy": model(batch.x).argmax(dim=5)}
        if self.mistake == "no number":
            return {"accuracy": "high"}
        return {}


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("width", "mat1 and mat2"),
        ("label", "Target 7 is out of bounds"),
        ("label dtype", "Long"),
        ("dtype", "dtype"),
        ("no scalar", "return one number"),
        ("detached", "a number without a gradient"),
        ("evaluate", "Dimension out of range"),
        ("no number", "return one number"),
    ],
)
def test_a_mistake_is_answered_before_any_worker_starts(mistake, words):
    found, journal, cluster = drive(Mistaken(mistake))
    late, _, _ = drive(Mistaken(mistake), tries=False)
    assert found.status is late.status is Status.FAILED
    assert cluster.workers == 0
    assert type(found.error) is type(late.error) is WorkloadError
    assert late.message.splitlines()[0].startswith(found.message.splitlines()[0] + " on worker-")
    assert words in found.message
    if mistake not in ("no scalar", "no number", "detached"):  # found in no line of the user's
        assert f"{HERE}:" in found.message.splitlines()[0]
    assert "\ngiven a batch with x float" in found.message
    assert "[10, 5], y " in found.message
    assert [event["kind"] for event in journal.events] == ["failed"]


class Noisy(Small):
    """Draws random numbers while it learns."""

    def model(self):
        return nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.4), nn.Linear(7, 1)).double()


@pytest.mark.parametrize("strategy", ["all_reduce", "parameter_server:shards=2", "parameter_server:replicas=0"])
def test_the_bits_are_the_same_with_and_without_it(strategy):
    outcomes, losses = [], []
    for tries in (True, False):
        with contextlib.closing(OnProcesses()) as cluster:  # threads would share their random numbers
            outcome, journal, _ = drive(Noisy(optimizer="adam"), strategy, tries=tries, cluster=cluster)
        assert outcome.status is Status.SUCCEEDED, outcome.message
        assert not [event for event in journal.events if "no batch was tried" in event["message"]]
        outcomes.append(outcome)
        losses.append([point["loss"] for point in journal.points if point["kind"] == "round"])
    assert torch.equal(outcomes[0].snapshot.params, outcomes[1].snapshot.params)
    assert losses[0] == losses[1]


class OnlyThere(Small):
    """What goes wrong in the trial's process only, whose calls are in its main thread."""

    def __init__(self, how, **options):
        super().__init__(**options)
        self.how = how

    def loss(self, model, batch):
        if threading.current_thread() is threading.main_thread():
            self.how()
        return super().loss(model, batch)


def raises(error):
    def how():
        raise error

    return how


def reason(journal):
    [event] = [event for event in journal.events if "no batch was tried" in event["message"]]
    assert event["kind"] == "choice"
    return event["message"]


def asks_ray():
    import ray

    return ray.get_runtime_context().gcs_address  # in a process that is in no Ray this starts one, unless told not to


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (asks_ray, "Ray has not been started"),
        (lambda: os._exit(5), "exit code 5"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "exit code -9"),
        (raises(FileNotFoundError("/only/on/workers")), "FileNotFoundError"),
        (raises(MemoryError()), "out of memory"),
        (raises(ImportError("no such package here")), "ImportError"),
        (raises(RuntimeError("Found no NVIDIA driver on your system")), "NVIDIA"),
    ],
    ids=["ray", "_exit", "killed", "file", "memory", "import", "device"],
)
def test_what_is_wrong_with_its_process_only_is_no_verdict(how, words):
    outcome, journal, _ = drive(OnlyThere(how))
    assert outcome.status is Status.SUCCEEDED, outcome.message
    assert words in reason(journal)


def test_a_sys_exit_is_the_error_at_once():
    outcome, journal, cluster = drive(OnlyThere(lambda: sys.exit(5)))
    assert outcome.status is Status.FAILED
    assert "loss() raised SystemExit: 5" in outcome.message, outcome.message
    assert not [event for event in journal.events if "no batch was tried" in event["message"]]
    assert cluster.workers == 0


def test_one_that_hangs_ends_once_the_workers_are_there():
    cluster = OnThreads()
    cluster.patience = 1.0
    outcome, journal, _ = drive(OnlyThere(lambda: threading.Event().wait()), cluster=cluster)
    assert outcome.status is Status.SUCCEEDED, outcome.message
    assert "the workers started first" in reason(journal)


class Many(Small):
    """Takes whole batches only."""

    def loss(self, model, batch):
        assert batch.size == 12, "twelve rows"
        return super().loss(model, batch)


def test_what_fails_with_a_few_rows_is_tried_with_the_whole_batch():
    outcome, journal, _ = drive(Many(n=48, batch=12))
    assert outcome.status is Status.SUCCEEDED, outcome.message
    assert not [event for event in journal.events if "no batch was tried" in event["message"]]


def test_a_federated_batch_is_a_clients():
    class Federated(Mistaken):
        def data(self):
            return super().data().with_clients(rayps.data.iid(4))

    outcome, _, cluster = drive(Federated("width"), "fedavg:fraction=0.5")
    assert "given a batch with x float32[5, 5]" in outcome.message, outcome.message
    assert cluster.workers == 0


class Watched(Small):
    """Evaluations with a few metrics; of `late`, only those of whole batches have a quality."""

    def __init__(self, *callbacks, late=False):
        super().__init__(n=40, batch=20)
        self.own, self.late = callbacks, late

    def evaluate(self, model, batch):
        more = {"quality": 1.0} if not self.late or batch.size > 10 else {}
        return more | {"error": (model(batch.x) - batch.y).abs().mean()}

    def callbacks(self):
        return self.own


class Logs(rayps.Callback):
    def on_evaluation(self, run, metrics):
        run.log(eror=1.0)


KINDS = [rayps.EarlyStopping, rayps.BestCheckpoint]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("metric", "meant"), [("eror", "error"), ("val_loss", "loss"), ("qualty", "quality")])
def test_a_misspelt_metric_of_a_callback_is_answered_before_any_worker_starts(kind, metric, meant, tmp_path):
    outcome, _, cluster = drive(Watched(kind(metric, mode="min")), checkpoints=tmp_path)
    assert outcome.status is Status.FAILED
    assert type(outcome.error) is ConfigError
    assert f"metric is '{metric}' (did you mean '{meant}'?)" in outcome.message
    assert "the metrics are loss, quality, error" in outcome.message
    assert cluster.workers == 0


def test_a_metric_of_an_unlike_name_is_a_warning_and_then_the_error_of_the_first_evaluation():
    outcome, journal, cluster = drive(Watched(rayps.EarlyStopping("bleu", mode="max")))
    assert outcome.status is Status.FAILED
    assert "no such metric: the metrics are loss, quality, error" in outcome.message
    assert cluster.workers == 2
    [warning] = [event["message"] for event in journal.events if event["kind"] == "warning"]
    assert "the batch that was tried has none of this name: its metrics are loss, quality, error" in warning


@pytest.mark.parametrize(
    "work",
    [
        Watched(rayps.EarlyStopping("quality", mode="max")),
        Watched(Logs(), rayps.EarlyStopping("eror", mode="min")),  # run.log adds it
        Watched(rayps.EarlyStopping("quality", mode="max"), late=True),  # some batches have it
    ],
    ids=["there", "logged", "later"],
)
def test_a_metric_that_evaluations_will_have_is_not_refused(work):
    outcome, _, _ = drive(work)
    assert outcome.status is Status.SUCCEEDED, outcome.message


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (TrialFacts(), None),
        (TrialFacts(model=MOST_BYTES, packed=MOST_BYTES, data=MOST_BYTES), None),
        (TrialFacts(remote=True), "real clients have the data, and the driver has none"),
        (TrialFacts(divided=True), "divided among workers"),
        (TrialFacts(gpus=0.5), "GPUs"),
        (TrialFacts(model=MOST_BYTES + 1), "the model takes 256 MiB"),
        (TrialFacts(packed=2 * MOST_BYTES), "the workload takes 512 MiB"),
        (TrialFacts(data=2 * MOST_BYTES), "the data in memory takes 512 MiB"),
    ],
)
def test_reasons_to_leave_it_out(facts, words):
    found = reason_not_to_try(facts)
    assert found is None if words is None else words in found


def test_the_bytes_of_models_and_data():
    assert bytes_of(nn.Linear(3, 2)) == 4 * 8
    assert bytes_of(rayps.data.tensors(torch.zeros(5, 2), torch.zeros(5).double())) == 40 + 40
    assert bytes_of({"a": [torch.zeros(2)], "b": "text"}) == 8


def test_a_divided_model_says_so():
    class Stages(Small):
        def model(self):
            return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()

    outcome, journal, _ = drive(Stages(), "pipeline:stages=2,micro_batches=2")
    assert outcome.status is Status.SUCCEEDED, outcome.message
    assert "the model is divided among workers" in reason(journal)


def test_it_ends_with_its_driver(tmp_path):
    code = f"""
import os, sys, time
sys.path[:] = {sys.path!r}
from rayps.runtime.checks.trial import Trial, TrialFacts
from rayps.runtime.checks.tried_batch import TrialRequest
from rayps.core.job.user_module import pack
from test_trial import OnlyThere
trial = Trial()
trial.begin(TrialFacts(), TrialRequest(pack(OnlyThere(lambda: time.sleep(3600))), 1, 0, path=tuple(sys.path)))
print(trial._process.pid, flush=True)
os._exit(0)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE)
    pid = int(found.stdout)

    def gone():
        try:
            return "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True

    assert until(gone, PATIENCE)


@pytest.mark.ray
def test_on_ray_too_it_answers_before_any_worker(ray_cluster):
    class OnRay(Waits, type(ray_cluster)):
        def __init__(self):
            super().__init__(holds=False)  # the fixture's cluster ends that Ray

    outcome, _, cluster = drive(Mistaken("width"), cluster=OnRay())
    assert outcome.status is Status.FAILED
    assert "given a batch with x float32[10, 5]" in outcome.message
    assert cluster.workers == 0
    outcome, _, cluster = drive(Mistaken(None), cluster=OnRay())
    assert outcome.status is Status.SUCCEEDED, outcome.message
    assert cluster.workers == 2

"""Loggers: real TensorBoard event files, a real MLflow server, an offline run of Weights & Biases."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import missing
from rayps_client.errors import ConfigError
from small_work import Small, train
from test_dry_run import check_refused_as_by_the_run

import rayps
from rayps.cluster.local import until
from rayps.loggers import ml_flow
from rayps.loggers.background import Background
from rayps.loggers.logger import Logger, needed, numbers_of


def have(*modules):
    """Import modules of an extra; skip, or fail where everything is required."""
    for name in modules:
        try:
            __import__(name)
        except ImportError:
            missing(name)


class Sized(Small):
    """Two evaluations more than epochs; a job with an event of its own."""

    lr: float = 0.1
    layers: list[int] = [3, 4]  # noqa: RUF012

    def callbacks(self):
        return [type("Warns", (rayps.Callback,), {"on_start": lambda self, run: run.warn("the weather is bad")})()]


# ---- the base


def rated():
    """A workload whose parameter was set on the object, not by `params`."""
    work = Sized()
    work.lr = 0.3
    return work


class Broken(Logger):
    def __init__(self, fails):
        super().__init__()
        self.fails, self.sent = fails, []

    def write_numbers(self, numbers, round):
        if round in self.fails:
            raise ConnectionError(f"lost at {round}")
        self.sent.append(round)

    def write_event(self, event, round):
        """Nothing."""

    def close(self, outcome):
        """Nothing."""


def test_a_callback_beside_a_logger_is_refused_as_by_the_run(tmp_path):
    def make(folder):
        return {"callbacks": [rayps.loggers.TensorBoard(folder / "runs"), rayps.EarlyStopping("acuracy", mode="max")]}

    check_refused_as_by_the_run(tmp_path, make)


def test_a_lost_connection_is_one_warning_for_each_outage():
    log = Broken({3, 4, 9})
    result = train(Small(), workers=2, steps=12, callbacks=[log])
    warnings = [e["message"] for e in result.events if e["kind"] == "warning" and "Broken" in e["message"]]
    assert warnings == [f"Broken cannot log (ConnectionError: lost at {at})" for at in (3, 9)]
    assert [at for at in log.sent if log.sent.count(at) == 1] == [1, 2, 5, 7, 8, 10, 11]  # 6 and 12 are evaluated too


def test_numbers_of_a_point():
    point = {"kind": "round", "round": 3, "loss": 0.5, "epoch": 1, "strategy": "x", "bad": float("nan"), "none": None}
    assert numbers_of(point | {"staleness": {"2": 3, "0": 1}}) == {"loss": 0.5, "epoch": 1.0, "staleness": 2.0}


def test_calls_in_the_background_are_in_order_and_their_errors_are_kept():
    seen = []

    def fails():
        raise OSError("no line")

    background = Background("test")
    for number in range(100):
        background.add(lambda number=number: seen.append(number))
    background.close(30)
    assert seen == list(range(100))
    again = Background("test")
    again.add(fails)
    with pytest.raises(OSError, match="no line"):
        again.close(30)
    late = Background("test")
    late.add(lambda: time.sleep(1))
    with pytest.raises(TimeoutError, match="not sent"):
        late.close(0.05)


def test_a_package_that_is_missing():
    with pytest.raises(ConfigError, match=r"pip install 'rayps\[mlflow\]'"):
        needed("no_such_package_of_loggers", "mlflow")


@pytest.mark.parametrize("every", [0, True, 1.5])
def test_every_is_a_number_of_rounds(every):
    with pytest.raises(ConfigError, match="every"):
        Broken.__mro__[1].__init__(Broken(()), every)


# ---- TensorBoard


def read_events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return found


def test_tensorboard_reads_what_was_logged_also_of_a_run_that_resumes(tmp_path):
    have("tensorboard")
    options = {"workers": 2, "checkpoint": tmp_path / "ckpt"}
    logger = rayps.loggers.TensorBoard(tmp_path / "runs", name="first")
    first = train(rated(), epochs=2, callbacks=[logger], **options)
    logger = rayps.loggers.TensorBoard(tmp_path / "runs", name="first")
    second = train(Sized(), epochs=3, callbacks=[logger], resume=first.checkpoint, **options)
    events = read_events(tmp_path / "runs" / "first")
    losses = [(each.step, each.value) for each in events.Scalars("train/loss")]
    expected = first.history["loss"].to_pylist() + second.history["loss"].to_pylist()
    assert [step for step, _ in losses] == list(range(1, 19))
    assert [value for _, value in losses] == pytest.approx(expected, rel=1e-6)
    assert events.Scalars("evaluation/error")[-1].value == pytest.approx(second.metrics["error"], rel=1e-6)
    tags = events.Tags()["tensors"]
    assert {"events/warning/text_summary", "outcome/text_summary", "params/job/strategy/text_summary"} <= set(tags)
    params = {
        name: events.Tensors(f"params/{name}/text_summary")[0].tensor_proto.string_val for name in ("lr", "layers")
    }
    assert params == {"lr": [b"0.3"], "layers": [b"[3, 4]"]}


# ---- Weights & Biases


def records_of(data):
    """The records of a file in the format of LevelDB's log, after a header of 7 bytes: blocks of 32 KB with chunks."""
    at, parts = 7, []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # the end of a block has no room for a chunk
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts.append(data[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):  # whole, or the last chunk
            yield b"".join(parts)
            parts = []


def test_an_offline_run_of_wandb_has_the_numbers(tmp_path, monkeypatch):
    have("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = rayps.loggers.WandB("project", mode="offline", folder=tmp_path)
    result = train(rated(), workers=2, epochs=2, callbacks=[logger])
    assert not [e for e in result.events if e["kind"] == "warning" and "WandB" in e["message"]]
    [file] = tmp_path.glob("wandb/offline-run-*/run-*.wandb")

    config = {}

    def read_losses():
        losses = {}
        for data in records_of(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "run":
                config.update({item.key: item.value_json for item in record.run.config.update})
            if record.WhichOneof("record_type") == "history":
                row = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                if "train/loss" in row:
                    losses[int(row["round"])] = float(row["train/loss"])
        return losses

    expected = result.history["loss"].to_pylist()
    until(lambda: len(read_losses()) == len(expected), 60)  # W&B's process writes the file after the run has ended
    assert read_losses() == pytest.approx(dict(enumerate(expected, 1)))
    assert config["lr"] == "0.3" and config["layers"] == '"[3, 4]"'


# ---- MLflow


@pytest.fixture(scope="module")
def mlflow_server(tmp_path_factory):
    """A real MLflow server. RAYPS_MLFLOW may name a Python that has all of MLflow; else it is this one."""
    have("mlflow.tracking")
    python = os.environ.get("RAYPS_MLFLOW", sys.executable)
    if subprocess.run(
        [python, "-c", "import mlflow.server, flask, sqlalchemy, uvicorn, pandas"], check=False, capture_output=True
    ).returncode:
        missing("MLflow server (the package mlflow; mlflow-skinny is the client only)")
    folder = tmp_path_factory.mktemp("mlflow")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += [
        "--backend-store-uri",
        f"sqlite:///{folder}/mlflow.db",
        "--artifacts-destination",
        str(folder / "files"),
    ]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"  # ten processes that nothing here needs
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env=environment, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 180
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
                time.sleep(0.2)
        yield url
    finally:
        os.killpg(server.pid, 15)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, 9)


def test_an_mlflow_server_has_params_metrics_tags_and_checkpoints_also_of_a_run_that_resumes(mlflow_server, tmp_path):
    from mlflow.tracking import MlflowClient

    options = {"workers": 2, "checkpoint": tmp_path}
    logger = rayps.loggers.MLflow(mlflow_server, "tests", artifacts=True)
    # the state of a run of one evaluation is in the checkpoint of a later one
    work = rated()
    work.pause = 0.02
    first = train(work, epochs=6, callbacks=[logger, rayps.BestCheckpoint()], **options)
    assert not [e for e in first.events if e["kind"] == "warning" and "MLflow" in e["message"]]
    client = MlflowClient(tracking_uri=mlflow_server)
    run = client.get_run(logger.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["job/strategy"] == "all_reduce" and run.data.params["job/workers"] == "2"
    assert run.data.params["lr"] == "0.3" and run.data.params["layers"] == "[3, 4]"
    assert run.data.tags["rayps.warning"].endswith("the weather is bad")
    assert run.data.tags["rayps.best"] == str(first.best)
    files = {
        Path(each.path).name for each in client.list_artifacts(logger.run_id, f"checkpoints/{first.checkpoint.name}")
    }
    assert files == {path.name for path in first.checkpoint.iterdir()}
    again = rayps.loggers.MLflow(mlflow_server, "tests")
    second = train(Sized(), epochs=7, callbacks=[again, rayps.BestCheckpoint()], resume=first.checkpoint, **options)
    assert again.run_id == logger.run_id
    losses = client.get_metric_history(logger.run_id, "train/loss")
    expected = first.history["loss"].to_pylist() + second.history["loss"].to_pylist()
    assert [each.step for each in sorted(losses, key=lambda each: each.step)] == list(range(1, 43))
    assert [each.value for each in sorted(losses, key=lambda each: each.step)] == pytest.approx(expected)


def test_a_job_goes_on_without_its_mlflow_server():
    have("mlflow.tracking")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        result = train(Small(), steps=9, callbacks=[rayps.loggers.MLflow(f"http://127.0.0.1:{port}", "none")])
    assert result.snapshot.round == 9
    assert [e for e in result.events if e["kind"] == "warning" and "MLflow cannot log" in e["message"]]


class LateServer:
    """Stands for MLflow's client: calls named in `fails` fail so often, then all succeed."""

    def __init__(self, **fails):
        self.fails, self.calls = fails, []
        self.metrics, self.params, self.tags, self.status, self.made = [], {}, {}, None, 0

    def __call__(self, tracking_uri):
        return self

    def _called(self, name):
        self.calls.append(name)
        if self.fails.get(name, 0) > 0:
            self.fails[name] -= 1
            raise ConnectionError(f"{name}: the server is starting")

    def _run(self):
        return SimpleNamespace(info=SimpleNamespace(run_id="one"), data=SimpleNamespace(params=self.params))

    def get_experiment_by_name(self, name):
        self._called("get_experiment_by_name")
        return SimpleNamespace(experiment_id="1")

    def search_runs(self, experiments, query):
        return [self._run()] if self.made else []

    def update_run(self, run_id, status):
        assert run_id == "one" and self.made

    def create_run(self, experiment, tags, run_name):
        self.made += 1
        return self._run()

    def log_batch(self, run_id, metrics=(), params=()):
        self._called("log_params" if params else "log_metrics")
        self.metrics += [(each.key, each.step) for each in metrics]
        self.params |= {each.key: each.value for each in params}

    def set_tag(self, run_id, key, value):
        self.tags[key] = value

    def set_terminated(self, run_id, status):
        self.status = status


def mlflow_to(server, monkeypatch):
    have("mlflow.tracking")
    monkeypatch.setattr(ml_flow, "FIRST_RETRY_SECONDS", 0.01)
    logger = rayps.loggers.MLflow("http://127.0.0.1:1", "late")
    logger._tracking = SimpleNamespace(MlflowClient=server)
    return logger


def warnings_of(result):
    return [e["message"] for e in result.events if e["kind"] == "warning" and "MLflow" in e["message"]]


@pytest.mark.parametrize("fails", [{"get_experiment_by_name": 3}, {"log_params": 2}])
def test_an_mlflow_server_that_comes_up_later_gets_everything(fails, monkeypatch):
    server = LateServer(**fails)
    result = train(Sized(pause=0.01), steps=30, callbacks=[mlflow_to(server, monkeypatch)])
    assert len(warnings_of(result)) == 1 and "the server is starting" in warnings_of(result)[0]
    assert [step for name, step in server.metrics if name == "train/loss"] == list(range(1, 31))
    assert server.made == 1 and server.status == "FINISHED" and server.params["lr"] == "0.1"
    assert server.tags["rayps.warning"] and server.tags["rayps.message"]


def test_an_mlflow_server_that_never_comes_up_is_one_warning(monkeypatch):
    server = LateServer(get_experiment_by_name=10**6)
    result = train(Sized(pause=0.01), steps=30, callbacks=[mlflow_to(server, monkeypatch)])
    assert len(warnings_of(result)) == 1
    assert 2 <= len(server.calls) <= 30, "not with every entry"
    assert result.snapshot.round == 30


def test_the_attempts_to_create_an_mlflow_run_become_rare():
    assert [ml_flow.retry_seconds(failures) for failures in (0, 1, 2, 5, 6, 10_000)] == [1, 2, 4, 32, 60, 60]

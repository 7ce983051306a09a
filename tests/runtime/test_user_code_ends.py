"""However user code ends, its job ends or recovers, and says which worker, which method and which round it was."""

import contextlib
import importlib
import os
import sys
import threading
from pathlib import Path

import pytest
import torch
from process_cluster import ProcessCluster
from rayps_client.errors import RaypsError, TrainingError, WorkloadError
from small_work import GATES, Small, distance, kinds, plain, train

import rayps
from rayps import AllReduce, ParameterServer
from rayps.cluster.local import LocalCluster
from rayps.core.job import user_code
from rayps.core.job.job_status import Status
from rayps.runtime.driver.driver import Driver
from rayps.runtime.driver.workload_job import WorkloadJob
from rayps.runtime.records.journal import Journal
from rayps.strategies.catalogue import parse, wire
from rayps.strategies.job import JobSpec

pytestmark = pytest.mark.chaos

SERVERS = [AllReduce(), ParameterServer(shards=2), ParameterServer(shards=2, replicas=0), ParameterServer(staleness=2)]
LIMIT = 240.0  # of the whole job, on a machine however busy; what hangs does so for ever


def within(run):
    """What `run` gives or raises; it must not hang."""
    found = []

    def work():
        try:
            found.append((run(), None))
        except BaseException as error:
            found.append((None, error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(LIMIT)
    assert not thread.is_alive(), "the job hangs"
    value, error = found[0]
    if error is not None:
        raise error
    return value


def sys_exit():
    sys.exit(3)


def interrupted():
    raise KeyboardInterrupt


def os_exit():
    os._exit(3)


def hang():
    importlib.import_module("small_work").GATES.setdefault("hang", threading.Event()).wait()


@pytest.fixture(autouse=True)
def gate():
    """Threads that hang end with their test: one may hold what the next test needs."""
    GATES["hang"] = threading.Event()
    yield
    GATES.pop("hang").set()


class Exits(torch.optim.SGD):
    def __init__(self, params, work):
        super().__init__(params, lr=0.1)
        self.work, self.steps = work, 0

    def step(self, closure=None):
        self.steps += 1
        if self.steps == 5:
            self.work.end()
        return super().step(closure)


class Ends(Small):
    """Ends in one of its methods, while it learns at the fourth call on rank 1; once only, where `flag` is a file."""

    def __init__(self, where, end, flag=None, **options):
        super().__init__(**options)
        self.where, self.how, self.flag, self.calls = where, end, flag, 0

    def end(self):
        if self.flag is not None:
            try:
                os.close(os.open(self.flag, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
        self.how()

    def mine(self):
        self.calls += threading.current_thread().name == "worker-1"
        return self.calls == 4

    def model(self):
        if self.where == "model":
            self.end()
        return super().model()

    def data(self):
        data = super().data()
        if self.where == "data":
            self.end()
        if self.where == "batches":
            data.batches = self.batches(data.batches)
        return data

    def batches(self, real):
        def give(**options):
            for number, batch in enumerate(real(**options)):
                if number == 3 and options["rank"] == 1:
                    self.end()
                yield batch

        return give

    def loss(self, model, batch):
        if self.where == "loss" and model.training and self.mine():
            self.end()
        return super().loss(model, batch)

    def evaluate(self, model, batch):
        if self.where == "evaluate":
            self.end()
        return super().evaluate(model, batch)

    def optimizer(self, params):
        if self.where == "optimizer":
            self.end()
        return Exits(params, self) if self.where == "step" else super().optimizer(params)


@pytest.mark.parametrize("strategy", SERVERS, ids=str)
@pytest.mark.parametrize("end", [sys_exit, interrupted])
@pytest.mark.parametrize("where", ["model", "data", "batches", "loss", "optimizer", "step", "evaluate"])
def test_what_ends_its_thread_ends_the_job_with_the_reason(where, end, strategy):
    with pytest.raises(WorkloadError) as caught:
        within(lambda: train(Ends(where, end), strategy, workers=2, epochs=2, timeout=30.0))
    message = str(caught.value)
    assert {"step": "optimizer.step", "batches": "data"}.get(where, where) + "()" in message
    assert {sys_exit: "SystemExit: 3", interrupted: "KeyboardInterrupt"}[end] in message
    assert f"{Path(__file__).name}:" in message
    if where in ("loss", "batches"):
        assert "on worker-1 at round 3" in message
        assert (caught.value.data["rank"], caught.value.data["round"]) == (1, 3)


@pytest.mark.parametrize("end", [sys_exit, interrupted])
def test_a_loop_of_ones_own_ends_with_the_reason(end):
    def train_fn():
        if rayps.world().rank == 1:
            end()
        rayps.wrap(model := torch.nn.Linear(1, 1), torch.optim.SGD(model.parameters(), lr=0.1))

    with pytest.raises(WorkloadError, match=r"train_fn\(\) raised (SystemExit: 3|KeyboardInterrupt)"):
        within(lambda: rayps.run(train_fn, workers=2, cluster=LocalCluster(), timeout=30.0))


# ---------------------------------------------------------------------------- what does not come back


def told(result):
    return " | ".join(event["message"] for event in result.events if event["kind"] in ("restarted", "replaced"))


@pytest.mark.parametrize("strategy", SERVERS, ids=str)
def test_a_loader_that_does_not_return_is_silence(tmp_path, strategy):
    work = Ends("batches", hang, str(tmp_path / "flag"), n=36)
    result = within(lambda: train(work, strategy, workers=2, epochs=2, timeout=3.0))
    assert "data() at round 3 has not returned" in told(result)
    assert "worker-1 died" in told(result)
    if strategy.topology.in_step:
        assert distance(result.model(), plain(work, 2, epochs=2)[0]) < 1e-12


@pytest.mark.parametrize("where", ["loss", "step"])
def test_without_any_peer_that_waits_it_is_silence_too(where):
    class Alone(Ends):
        def mine(self):
            self.calls += 1
            return self.calls == 4

    with pytest.raises(TrainingError) as caught:
        within(lambda: train(Alone(where, hang), workers=1, timeout=4.0, max_failures=0))
    method, at = {"loss": ("loss", 3), "step": ("optimizer.step", 4)}[where]
    assert f"{method}() at round {at} has not returned" in str(caught.value)
    assert all(word in str(caught.value) for word in ("worker-0", "timeout 4 s", "max_failures"))


def test_an_evaluation_after_the_last_round_that_does_not_return(monkeypatch, tmp_path):
    monkeypatch.setattr(user_code, "START_SECONDS", 6.0)
    work = Ends("evaluate", hang, str(tmp_path / "flag"), n=36)
    result = within(lambda: train(work, workers=2, timeout=4.0))
    assert "evaluate() at round 6 has not returned" in told(result)
    assert result.metrics["error"] > 0


@pytest.mark.parametrize("where", ["model", "data", "optimizer"])
def test_in_the_driver_it_is_an_error(monkeypatch, where):
    monkeypatch.setattr(user_code, "START_SECONDS", 4.0)
    with pytest.raises(WorkloadError, match=rf"(?s){where}\(\) has not returned.* in the driver.*timeout"):
        within(lambda: train(Ends(where, hang), workers=2, timeout=3.0))


def test_a_job_whose_driver_waits_for_user_code_can_be_stopped():
    spec = JobSpec("x:Ends", wire(parse("all_reduce")), 2)
    driver = Driver(WorkloadJob(Ends("model", hang), spec, Journal(), capture=False))
    threading.Timer(0.5, driver.stop).start()
    assert within(lambda: driver.run(LocalCluster())).status is Status.STOPPED


class Fed(Small):
    """Its loss waits for a thread of its own, which ends at the third batch on rank 1: by an error, or by an exit."""

    def __init__(self, error, waits, **options):
        super().__init__(**options)
        self.error, self.waits, self.calls = error, waits, 0

    def loss(self, model, batch):
        self.calls += model.training and threading.current_thread().name == "worker-1"
        if self.calls == 3:
            self.calls = 4
            fed = threading.Event()
            feeder = threading.Thread(target=self.feed, args=(fed,), name="feeder")
            feeder.start()
            feeder.join()
            if self.waits:
                fed.wait()
        return super().loss(model, batch)

    def feed(self, fed):
        raise self.error


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [ValueError("the feed broke"), SystemExit(4)], ids=["error", "exit"])
def test_what_a_thread_of_the_users_ended_by_is_named_where_it_is_waited_for(error):
    with pytest.raises(TrainingError) as caught:
        within(lambda: train(Fed(error, waits=True), workers=2, timeout=4.0, max_failures=0))
    assert "loss() at round 2 has not returned" in str(caught.value)
    assert f"thread 'feeder' ended by an uncaught {type(error).__name__}: {error}" in str(caught.value)
    assert f"{Path(__file__).name}:" in str(caught.value)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_it_so_the_job_goes_on_as_a_plain_loop_does():
    result = within(lambda: train(Fed(ValueError("nobody needs it"), waits=False), workers=2))
    warnings = [event["message"] for event in result.events if event["kind"] == "warning"]
    assert any("thread 'feeder' ended by an uncaught ValueError: nobody needs it" in text for text in warnings)
    assert not {"restarted", "replaced"} & set(kinds(result))


# ------------------------------------------------------------------------------------- on processes


@pytest.fixture
def processes():
    with contextlib.closing(ProcessCluster()) as cluster:
        yield cluster


@pytest.mark.parametrize("strategy", SERVERS[:3], ids=str)
@pytest.mark.parametrize("where", ["batches", "loss"])
def test_a_process_that_user_code_ends_once_is_replaced(processes, tmp_path, where, strategy):
    work = Ends(where, os_exit, str(tmp_path / "flag"), n=36)
    result = within(lambda: train(work, strategy, processes, workers=2, epochs=2, timeout=30.0))
    assert "worker-1 died after it had reported round" in told(result)
    assert distance(result.model(), plain(work, 2, epochs=2)[0]) < 1e-12


def test_a_process_that_user_code_always_ends_is_the_reason(processes):
    with pytest.raises(TrainingError) as caught:
        within(lambda: train(Ends("loss", os_exit), AllReduce(), processes, workers=2, timeout=30.0, max_failures=1))
    assert "worker-1 died" in str(caught.value)
    assert "failure 2, and max_failures is 1" in str(caught.value)


def test_a_server_whose_optimizer_ends_it_is_replaced(processes, tmp_path):
    work = Ends("step", os_exit, str(tmp_path / "flag"), n=36)
    result = within(lambda: train(work, ParameterServer(shards=2), processes, workers=2, epochs=2, timeout=30.0))
    assert "shard-" in told(result)
    assert distance(result.model(), plain(work, 2, epochs=2)[0]) < 1e-12


@pytest.mark.parametrize("end", [sys_exit, interrupted])
def test_in_a_process_too_the_job_ends_with_the_reason(processes, end):
    with pytest.raises(WorkloadError, match=r"(?s)loss\(\) raised .* on worker-1 at round 3|on worker-1 at round 3"):
        within(lambda: train(Ends("loss", end), AllReduce(), processes, workers=2, timeout=30.0))


# ------------------------------------------------------------------------------------------ on Ray


@pytest.mark.ray
@pytest.mark.parametrize("end", [sys_exit, interrupted, os_exit, hang])
def test_on_ray(ray_cluster, tmp_path, end):
    lasts = end in (os_exit, hang)
    work = Ends("loss", end, str(tmp_path / "flag") if lasts else None, n=36)

    def run():
        return rayps.train(work, workers=2, epochs=2, timeout=10.0, cluster=ray_cluster, progress=False)

    if lasts:
        result = run()
        assert "worker-1 died after it had reported round" in told(result)
        assert distance(result.model(), plain(work, 2, epochs=2)[0]) < 1e-12
    else:
        with pytest.raises(RaypsError, match=r"(?s)loss\(\) raised .*on worker-1 at round 3"):
            run()

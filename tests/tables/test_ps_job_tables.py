"""Jobs with sparse tables on an elastic group: checkpoints, resumes on other cuts, and deaths, counted push by push."""

import importlib
import threading
import time

import covers
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from rayps_client.errors import ConfigError
from small_work import SEEN, Watched, kinds
from torch import nn

import rayps
from rayps import Embedding, Hybrid, ParameterServer
from rayps.cluster.local import until
from rayps.ps.group import start
from rayps.tensors.checkpoints import checkpoint

ROWS = 80


@pytest.fixture
def cluster():
    SEEN.clear()
    found = Watched()
    yield found
    found.close()


class Net(nn.Module):
    def __init__(self, segments):
        super().__init__()
        self.rows = Embedding(2, "rows", init="zeros", optimizer="sgd:lr=1.0", dtype="float64", segments=segments)
        self.dense = nn.Linear(2, 1, bias=False).double()

    def forward(self, ids):
        return self.rows(ids)


class Tally(rayps.Workload):
    """Each push takes one off the row that it names: a row says how often it was pushed."""

    def __init__(self, pause=0.0, segments=24, tag="tally"):  # enough that every server has some
        self.pause, self.segments, self.tag = pause, segments, tag

    def model(self):
        return Net(self.segments)

    def data(self):
        return rayps.data.tensors(torch.arange(ROWS), torch.zeros(ROWS), batch_size=1)

    def loss(self, model, batch):
        if model.training:
            importlib.import_module("small_work").SEEN[self.tag] += 1
            time.sleep(self.pause)
        return model(batch.x).sum() + 0 * model.dense.weight.sum()

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.1)


class Learns(Tally):
    """The dense part and the rows depend on each other."""

    def loss(self, model, batch):
        super().loss(model, batch)
        return ((model.dense(model(batch.x) + 1) - batch.x.double().sin()) ** 2).mean()


def train(work, strategy, cluster, **options):
    options = {"workers": 2, "epochs": 2, "progress": False, "timeout": 30.0} | options
    return rayps.train(work, strategy=strategy, cluster=cluster, **options)


def values(model):
    with torch.no_grad():
        return model(torch.arange(ROWS))


def counted(result, workers=2):
    """How often each row was pushed."""
    return (values(result.model()) * -workers).round().long()


def told(result):
    return "\n".join(f"{event['kind']}: {event['message']}" for event in result.events)


def folder_of(result):
    return result.checkpoint / "tables" / "rows"


LOOSE = [
    Hybrid(servers=3, replicas=1),
    ParameterServer(shards=3, replicas=1, staleness=None),
    ParameterServer(shards=3, replicas=1, staleness=2),
]


@pytest.mark.chaos
@pytest.mark.parametrize("strategy", LOOSE, ids=str)
@pytest.mark.parametrize("victim", [("ServerActor", "server-1"), ("WorkerActor", 1)], ids=["server", "worker"])
def test_whoever_dies_each_push_is_in_its_row_once(cluster, strategy, victim):
    killer = cluster.kill_when("tally", 60, victim)
    result = train(Tally(pause=0.006), strategy, cluster, epochs=3)
    killer.join()
    assert torch.equal(counted(result), torch.full((ROWS, 2), 3)), counted(result)
    if victim[0] == "ServerActor":
        assert not {"restarted", "replaced"} & set(kinds(result))
        assert "server_lost" in kinds(result)
    else:
        assert cluster.spawned[victim] == 2


@pytest.mark.parametrize("victim", [("ServerActor", "server-1"), ("WorkerActor", 1)], ids=["server", "worker"])
def test_in_step_with_tables_a_worker_is_replaced_while_the_others_wait(cluster, victim):
    cluster.kill_when("tally", 60, victim)
    result = train(Tally(pause=0.003), ParameterServer(shards=3, replicas=1), cluster)
    assert "restarted" not in kinds(result)
    # a mean over two workers of one row each: each takes half
    assert torch.equal(counted(result), torch.full((ROWS, 2), 2)), counted(result)


@covers.values
@pytest.mark.parametrize("folder", [True, False])
@pytest.mark.parametrize("strategy", ["hybrid:servers=3", "parameter_server:shards=3,replicas=0,staleness=none"])
def test_without_copies_rows_come_back_from_the_checkpoint_and_the_workers(cluster, tmp_path, strategy, folder):
    cluster.kill_when("tally", 110, ("ServerActor", "server-1"))
    more = {"checkpoint": tmp_path} if folder else {}
    result = train(Tally(pause=0.006), strategy, cluster, epochs=4, checkpoint_every=5, **more)
    restored = [event for event in result.events if event["kind"] == "restored"]
    assert restored and all(event["pushes"] == 0 for event in restored), told(result)
    assert ("start empty" in restored[0]["message"]) is not folder
    assert torch.equal(counted(result), torch.full((ROWS, 2), 4)), counted(result)


def test_what_workers_kept_no_more_is_counted_as_lost_and_nothing_waits_for_it(cluster):
    cluster.kill_when("tally", 120, ("ServerActor", "server-1"))
    strategy = ParameterServer(shards=3, replicas=0, staleness=None, replay_mb=0.001)
    result = train(Tally(pause=0.006), strategy, cluster, epochs=4, checkpoint_every=1000)
    restored = [event for event in result.events if event["kind"] == "restored"]
    lost, pushed = sum(event["pushes"] for event in restored), counted(result)
    assert lost > 0
    assert pushed.max() <= 4  # nothing is applied twice
    assert 0 < (4 - pushed[:, 0]).sum() <= lost


@pytest.mark.parametrize("strategy", [Hybrid(servers=2), ParameterServer(shards=2, replicas=0)], ids=str)
def test_a_checkpoint_holds_the_tables_as_parquet_and_goes_on_with_other_servers_and_segments(
    cluster, tmp_path, strategy
):
    options = {"workers": 1}
    whole = train(Learns(), strategy, cluster, epochs=3, **options)
    first = train(Learns(segments=4), strategy, cluster, epochs=1, checkpoint=tmp_path, **options)
    found = pq.read_table(folder_of(first))
    assert sorted(found["id"].to_pylist()) == list(range(ROWS))
    assert np.allclose(np.array(found.sort_by("id")["row"].to_pylist()), values(first.model()).numpy())
    more = {"servers": 3} if isinstance(strategy, Hybrid) else {"shards": 3, "replicas": 1}
    wider = type(strategy)(**more)
    second = train(Learns(segments=6), wider, cluster, epochs=3, checkpoint=tmp_path, resume=True, **options)
    assert "resumed" in kinds(second)
    assert torch.equal(values(second.model()), values(whole.model()))
    assert torch.equal(second.snapshot.params, whole.snapshot.params)


def test_a_torn_table_is_passed_over(cluster, tmp_path):
    first = train(Tally(), Hybrid(servers=1), cluster, epochs=2, checkpoint=tmp_path)
    file = sorted(folder_of(first).glob("rows-*.parquet"))[0]
    file.write_bytes(file.read_bytes()[:-7])
    second = train(Tally(), Hybrid(servers=1), cluster, epochs=3, checkpoint=tmp_path, resume=True)
    assert [event["round"] for event in second.events if event["kind"] == "resumed"] == [ROWS // 2]
    assert torch.equal(counted(second), torch.full((ROWS, 2), 3))


def test_two_strategies_one_after_the_other_keep_the_rows(cluster):
    phases = [(1, Hybrid(servers=2)), (1, ParameterServer(shards=2, staleness=None)), (1, Hybrid(servers=2))]
    result = train(Tally(), phases, cluster, epochs=None)
    assert torch.equal(counted(result), torch.full((ROWS, 2), 3))


def test_a_job_without_a_folder_gives_its_rows_back_and_leaves_nothing(cluster):
    result = train(Tally(), Hybrid(servers=2), cluster, epochs=1)
    assert torch.equal(counted(result), torch.ones(ROWS, 2).long())
    assert until(lambda: not [t for t in threading.enumerate() if t.name.startswith(("looker", "collector"))], 60)


def test_rows_beyond_the_quota_end_the_job_with_the_knob_and_its_checkpoint_stays(cluster, tmp_path):
    with start(cluster, "main", servers=2, replicas=1, detached=False) as group:
        seen = []
        train(Tally(pause=0.02), Hybrid(), cluster, server_group="main", progress=seen.append)
        most = max(progress["server_group"]["bytes"] or 0 for progress in seen if "server_group" in progress)
        with pytest.raises(ConfigError, match=r"quota\.bytes"):
            train(
                Tally(pause=0.02),
                Hybrid(),
                cluster,
                server_group="main",
                quota={"bytes": 0.8 * most},
                name="job",
                checkpoint=tmp_path,
                checkpoint_every=2,
            )
        assert group.facts()["spaces"] == []
    kept = checkpoint.newest(tmp_path)
    assert kept is not None and len(pq.read_table(kept / "tables" / "rows")) > 0
    result = train(Tally(), Hybrid(), cluster, checkpoint=tmp_path, resume=True)
    assert torch.equal(counted(result), torch.full((ROWS, 2), 2))

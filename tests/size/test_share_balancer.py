"""Shares of rows by speed in jobs: the same rows and the same training, whatever the shares."""

import importlib
from collections import defaultdict

import pytest
import torch
from rayps_client.errors import ActorDied, ConfigError
from small_work import Small, distance, kinds, plain, rows, train

import rayps
from rayps.core.rows.balanced_shares import WINDOW
from rayps.core.rows.row_shares import RowShares
from rayps.core.rows.step_rows import ByRank
from rayps.core.time.slow_ranks import INTERVALS
from rayps.core.time.slow_ranks import WINDOW as SLOW_WINDOW
from rayps.data.dealt_rows import DealtRows
from rayps.runtime.records.journal import Journal
from rayps.runtime.size import share_balancer
from rayps.runtime.size.membership import Membership
from rayps.runtime.size.share_balancer import ShareBalancer
from rayps.strategies.job import JobSpec
from rayps.worker.exchange.round_gate import RoundGate
from rayps.worker.rows.batches import BatchStream
from rayps.worker.rows.block_readers import SequenceReader
from rayps.worker.rows.make_stream import deal_shares

EXACT = 1e-12
BATCHES: defaultdict = defaultdict(list)  # tag -> the inputs of each batch that was learned


class Numbered(Small):
    """A regression whose workers record the rows that they learn."""

    def loss(self, model, batch):
        if torch.is_grad_enabled():  # otherwise it is an evaluation
            importlib.import_module("test_share_balancer").BATCHES[self.tag].append(batch.x.clone())
        return super().loss(model, batch)


@pytest.fixture
def tag(request):
    BATCHES.clear()
    return request.node.nodeid


def decide(monkeypatch, *decisions):
    """Let the shares be `decisions`, one after each window; None changes nothing."""
    waiting = list(decisions)
    monkeypatch.setattr(share_balancer, "balance_shares", lambda shares, seconds: waiting.pop(0) if waiting else None)


def learned(tag, n, width=5):
    """How often each row of the data was learned."""
    x, _ = rows(n, width=width)
    seen = torch.cat(BATCHES[tag])
    return [int((seen == row).all(dim=1).sum()) for row in x]


# ---- jobs


def test_without_a_change_the_bits_are_those_of_a_job_without_balance(monkeypatch):
    decide(monkeypatch)
    work = Small(n=90, optimizer="adam")
    plainly = train(work, workers=3, epochs=2)
    balanced = train(work, workers=3, epochs=2, balance=True)
    assert distance(plainly.model(), balanced.model()) == 0
    losses = plainly.history.column("loss").to_pylist()  # summed over the ranks in the order of their reports
    assert balanced.history.column("loss").to_pylist() == pytest.approx(losses, rel=EXACT)
    assert "shares" not in kinds(balanced)


@pytest.mark.parametrize(
    "strategy, accumulate", [("all_reduce", 1), ("all_reduce", 2), ("parameter_server:shards=2", 1)]
)
def test_a_run_with_changing_shares_is_plain_training_on_the_same_global_batches(
    monkeypatch, tag, strategy, accumulate
):
    each = 4 * accumulate
    decide(monkeypatch, (1, each, 2 * each - 1), (each, each, each), (2 * each - 2, 1, each + 1))
    work = Numbered(n=48 * each, batch=4, optimizer="momentum", pause=0.002, tag=tag)
    work.accumulate = accumulate
    result = train(work, strategy, workers=3, epochs=4, balance=True)
    changes = [event for event in result.events if event["kind"] == "shares"]
    assert len(changes) >= 2
    assert [event["shares"] for event in changes][:2] == [[1, each, 2 * each - 1], [each] * 3]
    assert learned(tag, work.n) == [4] * work.n  # each row once in each epoch
    law = Small(n=work.n, batch=each, optimizer="momentum")
    model, losses, _ = plain(law, 3, epochs=4)
    assert distance(result.model(), model) < EXACT
    assert result.history.column("loss").to_pylist() == pytest.approx(losses, abs=EXACT)
    assert result.history.column("samples").to_pylist() == [3 * each] * (4 * work.n // (3 * each))


def test_a_job_resumes_behind_the_rows_that_other_shares_have_consumed(monkeypatch, tmp_path, tag):
    decide(monkeypatch, (1, 4, 7))
    work = Numbered(n=240, batch=4, optimizer="adam", pause=0.002, tag=tag)
    train(work, workers=3, steps=27, balance=True, checkpoint=tmp_path)
    result = train(work, workers=3, epochs=2, balance=True, checkpoint=tmp_path, resume=True)
    assert learned(tag, work.n) == [2] * work.n
    assert distance(result.model(), plain(Small(n=240, batch=4, optimizer="adam"), 3, epochs=2)[0]) < EXACT


def test_the_event_says_what_was_measured(monkeypatch):
    decide(monkeypatch, (1, 5))
    result = train(Small(n=240, pause=0.001), workers=2, epochs=1, balance=True)
    [event] = [event for event in result.events if event["kind"] == "shares"]
    assert event["before"] == [3, 3] and event["shares"] == [1, 5]
    assert event["round"] >= WINDOW and len(event["seconds_per_row"]) == 2
    assert event["message"].startswith(f"from round {event['round']} on, rows are dealt by speed, so that a round ")
    assert "worker-0 1 (" in event["message"] and " rows/s), worker-1 5 (" in event["message"]


# ---- the parts


class Reply:
    def __init__(self, value):
        self.value = value

    def result(self, timeout):
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


class FakeWorker:
    """A worker that answers `hold`, and records its calls."""

    def __init__(self, name, begun):
        self.name, self.begun, self.calls, self.dead, self.handle = name, begun, [], "", self

    def call(self, method, *args):
        self.calls.append((method, *args))
        return Reply(self.begun if method == "hold" else None)

    def await_reply(self, reply):
        reply.result(0)


class FixedDealing:
    """Rows are dealt evenly to two ranks."""

    def __init__(self):
        self.current = RowShares(0, 0, 0, (10, 10))

    def deal(self, at, shares):
        self.current = RowShares(at, 0, 20 * at, shares)
        return self.current


def points(round, seconds, samples=10):
    return [
        {"kind": "round", "rank": rank, "round": round, "compute": each / 2, "data": each / 2, "samples": samples}
        for rank, each in enumerate(seconds)
    ]


def test_all_workers_continue_from_the_round_that_the_fastest_has_begun():
    balancer, dealing = ShareBalancer(Journal(), balances=True), FixedDealing()
    balancer.begin(2)
    workers = [FakeWorker("worker-0", 13), FakeWorker("worker-1", 14)]
    for round in range(WINDOW + 1):
        balancer.add(points(round, (3.0, 1.0)))
        balancer.balance(workers, dealing)
        assert dealing.current.shares == ((5, 15) if round == WINDOW else (10, 10))
    for worker in workers:
        assert worker.calls == [("hold",), ("deal", 14, RowShares(14, 0, 280, (5, 15)))]
    for round in range(WINDOW + 1, 3 * WINDOW):  # rounds with the old shares are not measured, and the window is longer
        balancer.add(points(round, (1.0, 9.0)))
        balancer.balance(workers, dealing)
    assert dealing.current.shares == (5, 15)


def test_if_a_worker_has_died_the_others_continue_with_their_shares():
    balancer, dealing = ShareBalancer(Journal(), balances=True), FixedDealing()
    balancer.begin(2)
    workers = [FakeWorker("worker-0", 13), FakeWorker("worker-1", ActorDied("it is dead", actor="worker-1"))]
    for round in range(WINDOW + 1):
        balancer.add(points(round, (3.0, 1.0)))
    balancer.balance(workers, dealing)
    assert dealing.current.shares == (10, 10)
    assert workers[0].calls == [("hold",), ("resume",)]
    assert workers[1].dead and workers[1].calls == [("hold",)]


def test_without_balance_no_worker_is_held():
    balancer, dealing = ShareBalancer(Journal(), balances=False), FixedDealing()
    balancer.begin(2)
    workers = [FakeWorker("worker-0", 13), FakeWorker("worker-1", 14)]
    for round in range(3 * WINDOW):
        balancer.add(points(round, (3.0, 1.0)))
        balancer.balance(workers, dealing)
    assert [worker.calls for worker in workers] == [[], []]


@pytest.mark.parametrize("balances, way", [(False, "give balance=True"), (True, "its share of the rows is at its")])
def test_a_worker_that_is_slow_for_long_is_reported_by_name(balances, way):
    journal = Journal()
    balancer = ShareBalancer(journal, balances=balances)
    balancer.begin(3)
    for round in range(INTERVALS * SLOW_WINDOW):
        balancer.add([*points(round, (1.0, 1.0, 4.0)), {"kind": "evaluation", "rank": 0, "round": round}])
    [event] = journal.events
    assert event["kind"] == "slow_worker" and event["rank"] == 2
    assert (event["seconds"], event["others"], event["rows"]) == (4.0, 1.0, 10)
    assert event["message"].startswith(
        "worker-2 is slow: its own work takes 4 s a round of 10 rows, 4 times as long as that of the other workers (1 s"
    )
    assert way in event["message"]


def test_a_gate_deals_once_from_the_agreed_round_on():
    gate, new = RoundGate(0), RowShares(5, 0, 0, (1, 3))
    assert gate.begin(3, lambda: False)
    assert gate.hold() == 4
    gate.deal(5, new)
    assert gate.begin(4, lambda: False) and gate.dealt(4) is None
    assert gate.begin(5, lambda: False) and gate.dealt(5) is new
    assert gate.dealt(6) is None


def test_a_membership_deals_the_same_blocks_by_other_shares():
    spec = JobSpec.from_dict({"workload": "a:B", "workers": 2, "elastic": {"most": 2, "balance": True}})
    membership = Membership(spec.elastic, rows=100, each=5, least=2)
    assert membership.deal(4, (7, 3)) == RowShares(4, 0, 40, (7, 3))
    assert membership.deal(13, (2, 8)) == RowShares(13, 1, 30, (2, 8))
    assert membership.change(6, 2) == RowShares(6, 0, 60, (5, 5))  # a failure has undone the later change
    with pytest.raises(AssertionError):
        membership.deal(7, (7, 4))


@pytest.mark.parametrize("processes", [None, 0])
def test_a_stream_takes_its_new_share_from_the_next_batch_on(processes):
    data = rayps.data.tensors(torch.arange(60.0), torch.arange(60.0), batch_size=5)
    if processes is not None:
        data = data.loaded_by(processes, prefetch=3)  # batches of the old share have been read ahead
    even = DealtRows(data, RowShares(0, 0, 0, (5, 5)))
    streams = [BatchStream(even, ByRank(rank, 2, 6), SequenceReader(even, 0, 1), (rank, 2), 0, 6) for rank in range(2)]
    seen = [stream.take(6).x for _ in range(2) for stream in streams]
    for stream in streams:
        deal_shares(stream, RowShares(2, 0, 20, (2, 8)))
    later = [stream.take(6) for _ in range(4) for stream in streams]
    assert [batch.size for batch in later] == [2, 8] * 4
    seen += [part.x for batch in later for part in (batch.parts or [batch])]
    assert sorted(torch.cat(seen).tolist()) == list(range(60))
    for stream in streams:
        stream.close()


# ---- options


def test_balance_in_its_forms():
    spec = JobSpec.from_dict({"workload": "a:B", "workers": [2, 4], "elastic": {"balance": True}})
    assert spec.elastic.balance and spec.elastic.most == 4
    assert JobSpec.from_dict(spec.to_dict()) == spec
    assert "balance" not in JobSpec.from_dict({"workload": "a:B", "workers": [2, 4]}).to_dict()["elastic"]


@pytest.mark.parametrize(
    "elastic, text",
    [({"balance": 1}, "balance is 1: give True or False"), ({"balance": True, "replay": [[3, 4]]}, "with replay")],
)
def test_wrong_options_are_refused(elastic, text):
    with pytest.raises(ConfigError, match=text):
        JobSpec.from_dict({"workload": "a:B", "workers": [2, 4], "elastic": elastic})


def test_a_strategy_whose_rows_are_not_dealt_is_refused():
    for strategy in ("local_sgd", "all_reduce:shard=gradients", "diloco"):
        with pytest.raises(ConfigError, match="do not average the gradients of one batch in each round: leave it out"):
            train(Small(), strategy, workers=2, balance=True)
    with pytest.raises(ConfigError, match="workers are not in step"):
        train(Small(), "parameter_server:staleness=auto", workers=2, balance=True)

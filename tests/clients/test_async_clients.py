"""Asynchronous rounds of real clients (FedBuff): the decisions, the orders in the mailbox, and jobs with clients."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from client_site import Clinic, Hospital, Own, Server, cohorts, rows, until
from rayps_client.errors import Conflict
from rayps_client.process import ClientProcess
from small_work import train

import rayps
from rayps.clients.workload_trainer import WorkloadTrainer
from rayps.federated import buffered_replies
from rayps.federated.population.cohort import hashes
from rayps.federated.remote import mailbox
from rayps.federated.remote.async_steps import AsyncRules, AsyncStep, Look, RunningOrder, decide
from rayps.federated.remote.client_orders import ClientOrders
from rayps.federated.remote.mailbox import Mailbox, RoundOrder

RULES = AsyncRules(size=2, concurrency=2, max_staleness=1, fraction=1.0, least=1, seed=0)


# ---- decisions


def order(serial: int, client: int, version: int = 0, *, arrived: bool = False, ends: float = 100.0) -> RunningOrder:
    return RunningOrder(serial, client, version, ends, arrived)


def test_a_round_takes_the_first_updates_and_starts_nobody_when_it_is_full() -> None:
    look = Look(0, 0.0, [order(k, k, arrived=k != 2) for k in (4, 3, 2, 1)], dict.fromkeys(range(6), "here"))
    assert decide(look, RULES) == AsyncStep(counts=[1, 3])
    look = dataclasses.replace(look, counted=[(5, 0)])
    assert decide(look, RULES) == AsyncStep(counts=[1])


@pytest.mark.parametrize(
    ("version", "arrived", "status", "ends", "lost"),
    [
        (3, True, "left", 0.0, None),  # what has arrived counts, whatever has become of the client
        (2, True, "here", 9.0, None),
        (1, True, "here", 9.0, "stale"),
        (1, False, "here", 9.0, None),  # only an update that has arrived is refused for its age
        (3, False, "here", 5.0, "deadline"),
        (3, False, "silent", 5.0, "offline"),
        (3, False, "silent", 9.0, None),  # a client that trains sends no request
        (3, False, "away", 9.0, "offline"),
        (3, False, "left", 9.0, "left"),
        (3, False, "revoked", 0.0, "revoked"),
    ],
)
def test_why_an_update_does_not_count(version: int, arrived: bool, status: Any, ends: float, lost: str | None) -> None:
    step = decide(Look(3, 5.0, [order(7, 0, version, arrived=arrived, ends=ends)], {0: status}), RULES)
    assert step.lost == ([] if lost is None else [(7, lost)])
    assert step.counts == ([7] if arrived and lost is None else [])


def test_who_starts() -> None:
    rules = dataclasses.replace(RULES, size=9, concurrency=3)
    look = Look(0, 0.0, [], dict.fromkeys(range(5), "here"))
    drawn = [int(k) for k in np.argsort(hashes(0, "cohort", np.arange(5), 0))]
    assert decide(look, rules).starts == [(k, 0) for k in drawn[:3]]  # the round's random order
    replied = dataclasses.replace(look, counted=[(drawn[0], 0), (drawn[0], 0), (drawn[1], 0)])
    assert decide(replied, dataclasses.replace(rules, concurrency=5)).starts == [
        *((k, 0) for k in drawn[2:]),
        (drawn[1], 1),  # another training from the same parameters, with other batches
        (drawn[0], 2),
    ]
    late = dataclasses.replace(look, running=[order(1, drawn[0], ends=0.0)])
    assert decide(late, dataclasses.replace(rules, concurrency=1)).starts == [
        (drawn[1], 0)
    ]  # its place goes to another
    alone = Look(0, 0.0, [order(1, 0, ends=0.0)], {0: "here"})
    assert decide(alone, rules).starts == [(0, 0)]
    half = dataclasses.replace(rules, concurrency=None, fraction=0.4)
    assert len(decide(look, half).starts) == 2


def test_with_too_few_clients_nobody_starts_but_updates_count() -> None:
    rules = dataclasses.replace(RULES, least=3)
    look = Look(0, 0.0, [order(1, 0), order(2, 1, arrived=True)], {0: "silent", 1: "here", 2: "left"})
    assert decide(look, rules) == AsyncStep(counts=[2], missing=1)


def test_every_small_case_keeps_the_promises() -> None:
    statuses = ("here", "silent", "away", "left")
    kinds = [(arrived, version, ends) for arrived in (False, True) for version in (0, 2) for ends in (0.0, 9.0)]
    seen = 0
    for first, second, a, b, c in itertools.product(kinds, [None, *kinds], statuses, statuses, statuses):
        made = [(0, first), (1, second)]
        running = [order(k, k, kind[1], arrived=kind[0], ends=kind[2]) for k, kind in made if kind is not None]
        for concurrency, counted in ((1, []), (2, [(2, 2)]), (None, [(2, 1)])):
            rules = dataclasses.replace(RULES, concurrency=concurrency, least=2)
            look = Look(2, 5.0, running, {0: a, 1: b, 2: c}, counted)
            step, here = decide(look, rules), {k for k, status in look.clients.items() if status == "here"}
            gone = {*step.counts, *(serial for serial, _ in step.lost)}
            assert len(gone) == len(step.counts) + len(step.lost)  # an update counts or is lost, never both
            stay = [each for each in running if each.serial not in gone]
            assert {each.serial for each in running if each.arrived} - gone == set() or len(counted) == 1
            starting = {client for client, _ in step.starts}
            assert starting <= here - {each.client for each in stay}  # one order at a time for a client
            full = len(counted) + len(step.counts) >= rules.size
            assert not (full or step.missing) or not starting
            assert len(starting) + len(stay) <= max(len(stay), 3 if concurrency is None else concurrency)
            seen += 1
    assert seen == 8 * 9 * 64 * 3


# ---- orders in the mailbox


@pytest.fixture
def box(tmp_path: Path) -> Mailbox:
    made = Mailbox(tmp_path / "clients")
    made.prepare()
    for name in ("a", "b", "c"):
        made.join(name, name * 20, "t", 5)
    return made


FACTS: dict[str, Any] = {"kind": "round", "phase": 0, "seed": 5, "strategy": {"name": "fedbuff"}, "starts": []}


def opened(box: Mailbox, round: int, *clients: int) -> list[RoundOrder]:
    orders = ClientOrders(box)
    facts = {**FACTS, "round": round, "parameters": orders.publish(b"model %d" % round)}
    return [orders.open(facts, (k, "abc"[k]), 60.0, 100) for k in clients]  # type: ignore[arg-type]


def deliver(box: Mailbox, serial: int, client: int, raw: bytes = b"update") -> bool:
    part = box.part(serial, client, hashlib.sha256(raw).hexdigest())
    part.write_bytes(raw)
    return box.deliver(serial, client, part)


def test_each_order_is_closed_on_its_own_and_an_update_counts_once(box: Mailbox) -> None:
    orders, (a, b) = ClientOrders(box), opened(box, 0, 0, 1)
    assert [box.newest_for(k) for k in (0, 1, 2)] == [a, b, None]
    assert deliver(box, a.serial, 0) and not deliver(box, a.serial, 0, b"another")
    assert orders.close(a) and orders.update(a) == b"update"
    (again,) = opened(box, 0, 0)
    assert box.newest_for(0) == again and again.serial > b.serial and box.is_open(b.serial)
    with pytest.raises(Conflict, match="too late"):
        box.parameters(a.serial)
    orders.settle(a, "its training began 4 rounds ago")
    assert box.verdict(a.serial, 0) == "its training began 4 rounds ago" and orders.update(a) is None
    assert not orders.close(b)  # the deadline: nothing has arrived, and what arrives now is late
    with pytest.raises(Conflict, match="too late"):
        deliver(box, b.serial, 1)
    orders.settle(b)
    assert orders.live() == [again] and box.verdict(b.serial, 1) is None


def test_parameters_stay_as_long_as_an_order_refers_to_them(box: Mailbox) -> None:
    orders, (a, b) = ClientOrders(box), opened(box, 0, 0, 1)
    (published,) = box.folder.glob("parameters-*")
    one, other = (box.parameters(each.serial).stat() for each in (a, b))
    assert (one.st_ino, one.st_nlink) == (other.st_ino, 3)  # one file for both, and for the next orders
    published.unlink()
    for round in range(1, 30):  # old orders are deleted, but not those that are live
        (each,) = opened(box, round, 2)
        orders.close(each)
        orders.settle(each)
    assert orders.parameters(a) == orders.parameters(b) == b"model 0" and len(box.serials()) < 25
    assert box.parameters(a.serial).stat().st_nlink == 2
    orders.close(a)
    orders.settle(a)
    assert box.parameters(b.serial).stat().st_nlink == 1 and orders.live() == [b]


def test_what_a_client_has_sent_does_not_count_once_its_token_is_revoked(box: Mailbox) -> None:
    orders, (a, b) = ClientOrders(box), opened(box, 0, 0, 1)
    assert deliver(box, a.serial, 0) and deliver(box, b.serial, 1)
    opened(box, 0, 0)
    box.withdraw(0, "token")
    assert not orders.close(a) and orders.close(b)


def test_a_job_that_returns_to_a_checkpoint_refuses_what_came_after_it(box: Mailbox) -> None:
    (old,), (a, b) = opened(box, 0, 2), opened(box, 1, 0, 1)
    assert deliver(box, a.serial, 0)
    (later,) = opened(box, 2, 0)
    assert deliver(box, later.serial, 0)
    (open_later,) = opened(box, 2, 0)
    (box.folder / "asked" / "1.json").unlink()  # the worker was killed before it had written this
    orders = ClientOrders(box)
    facts: Any = {**FACTS, "round": 1, "parameters": orders.publish(b"model 1")}
    assert orders.resume(facts) == ([old, a, b], [later])
    assert "returned to a checkpoint" in str(box.verdict(later.serial, 0))
    with pytest.raises(Conflict, match="too late"):
        deliver(box, open_later.serial, 0)
    assert box.newest_for(1) == b and box.newest_for(2) == old and orders.update(a) == b"update"
    assert orders.resume(facts) == ([old, a, b], [])  # another restart finds the same
    orders.close(a)  # the worker is killed when it has closed some orders of the round
    assert orders.resume(facts) == ([old, a, b], [])
    orders.settle(a)  # and here before the checkpoint: the round is repeated without this update
    assert orders.resume(facts) == ([old, b], [])
    facts["parameters"] = orders.publish(b"another model")
    assert orders.resume(facts) == ([old], [])  # no order of this round continues
    assert orders.resume({**facts, "strategy": {"name": "fedbuff", "buffer": 3}}) == ([], [])
    assert len(list(box.folder.glob("parameters-*"))) == 1  # those of this worker
    orders.retract()
    assert not list(box.folder.glob("parameters-*"))


def test_a_synchronous_phase_ends_the_orders_of_an_asynchronous_one(box: Mailbox) -> None:
    orders = opened(box, 0, 0, 1)
    box.open_round({"round": 1, "strategy": {}}, {0: "a"}, 60.0, 100, b"model")
    assert not any(box.is_open(each.serial) for each in orders)
    assert box.newest_for(1) == orders[1] and box.newest_for(0).round == 1  # type: ignore[union-attr]


# ---- jobs


class Turnstile(threading.Event):
    """A gate that lets trainings of one step through, as many as `let` says."""

    def __init__(self) -> None:
        super().__init__()
        self._permits = threading.Semaphore(0)

    def let(self, count: int = 1) -> None:
        self._permits.release(count)

    def wait(self, timeout: float | None = None) -> bool:
        return self._permits.acquire(timeout=timeout)


class Ward:
    """A job whose clients take one full-batch step in each training, when the test lets them."""

    def __init__(self, clinic: Clinic, options: str, rounds: int, count: int = 2, first: int = 2) -> None:
        self.clinic, self.gates = clinic, [Turnstile() for _ in range(count)]
        text = f"fedbuff:local_steps=1,batch_size=0,clients=remote(least={count},wait=100),{options}"
        self.job = clinic.job(text, rounds, seed=3)
        self.clients = [clinic.hospital(self.job, k, gate=gate).begin() for k, gate in enumerate(self.gates)]
        self.box = clinic.service.mailbox(self.job.id)
        until(lambda: self.orders(first))

    def orders(self, count: int) -> bool:
        """Whether the job has given so many orders."""
        return max(self.box.serials(), default=0) == count

    def start(self) -> torch.Tensor:
        return safetensors.torch.load_file(self.box.parameters(1))["w"]

    def rounds(self) -> list[dict[str, Any]]:
        return cohorts(self.job)

    def trained(self) -> torch.Tensor:
        try:
            return self.clinic.trained(self.job)
        finally:
            for gate in self.gates:
                gate.let(100)


def update(w: torch.Tensor, k: int) -> torch.Tensor:
    """The update of hospital k from the parameters w, in plain torch."""
    work = Server()
    model = work.model()
    torch.nn.utils.vector_to_parameters(w.clone(), model.parameters())
    x, y = rows(k)
    ((model(x) - y) ** 2).mean().backward()
    return torch.cat([-0.05 * p.grad.reshape(-1) for p in model.parameters()])  # type: ignore[union-attr]


def drawn() -> torch.Tensor:
    """The parameters with which a job of seed 3 begins."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return torch.nn.utils.parameters_to_vector(Server().model().parameters()).detach()


class Even(Server):
    """Three clients with 20 rows each, simulated."""

    def data(self):  # type: ignore[no-untyped-def]
        x, y = (torch.cat(each) for each in zip(*(rows(k) for k in (0, 3, 6)), strict=True))
        return rayps.data.tensors(x, y, batch_size=8, client=np.repeat(np.arange(3), 20))


def test_clients_that_reply_in_step_learn_what_fedavg_learns(clinic: Clinic, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_step(look: Look, rules: AsyncRules) -> AsyncStep:
        together = all(each.arrived for each in look.running)
        running = [dataclasses.replace(each, arrived=together) for each in look.running]
        return decide(dataclasses.replace(look, running=running), rules)

    monkeypatch.setattr(buffered_replies, "decide", in_step)
    job = clinic.job("fedbuff:buffer=3,local_epochs=2,clients=remote(least=3,wait=100)", seed=5)
    hospitals = [clinic.hospital(job, k).begin() for k in (0, 3, 6)]
    learnt = clinic.trained(job)
    assert torch.equal(learnt, train(Even(), "fedbuff:buffer=3,local_epochs=2", epochs=3, seed=5).snapshot.params)
    synchronous = train(Even(), "fedavg:local_epochs=2", epochs=3, seed=5).snapshot.params
    assert (learnt - synchronous).abs().max() < 1e-12
    assert [hospital.over().ended.rounds for hospital in hospitals] == [3, 3, 3]
    events = cohorts(job)
    assert [(e["sampled"], e["replied"], e["staleness"]) for e in events] == [(3, 3, {"0": 3})] * 3


def test_one_client_replies_twice_while_another_is_late(clinic: Clinic) -> None:
    ward = Ward(clinic, "buffer=2", rounds=2)
    a, b = ward.gates
    w = ward.start()
    a.let(2)  # A gets its second order in the middle of the round
    until(lambda: ward.orders(4))  # and its third order with the next round
    b.let()
    until(lambda: ward.orders(5))
    again = [serial for serial in range(1, 6) if ward.box.order(serial).facts["seed"] != 3]  # type: ignore[union-attr]
    assert again == [3]  # only A's second training from the same parameters has other batches
    a.let()
    learnt = ward.trained()
    assert not list(ward.box.folder.rglob("parameters*"))  # no order is left, and so no parameters
    w1 = w + (update(w, 0) + update(w, 0)) / 2
    assert (learnt - (w1 + (2**-0.5 * update(w, 1) + update(w1, 0)) / 2)).abs().max() < 1e-12
    told = [(event["trained"], event["staleness"], event["replied"]) for event in ward.rounds()]
    assert told == [(["h0", "h0"], {"0": 2}, 2), (["h1", "h0"], {"0": 1, "1": 1}, 2)]
    assert {client["state"] for client in clinic.joined(ward.job).values()} <= {"ended", "left"}


def test_a_worker_that_dies_in_a_round_loses_no_update_and_counts_none_twice(clinic: Clinic) -> None:
    ward = Ward(clinic, "buffer=2", rounds=2)
    (a, b), w = ward.gates, ward.start()
    a.let()
    until(lambda: ward.orders(3))
    b.let()
    until(lambda: ward.orders(4))  # round 1: A trains from w, and B from w1
    until(lambda: any(event["kind"] == "checkpoint" for event in ward.job.events()))
    a.let()
    until(lambda: ward.orders(5))  # the update of A has arrived
    until(lambda: "1 of 2 have arrived; training: h0, h1" in (ward.box.standing() or ""))
    assert clinic.joined(ward.job)["h1"]["doing"] == "works on round 1"
    clinic.kill_workers()
    until(lambda: any(event["kind"] == "restarted" for event in ward.job.events()))
    b.let()
    learnt = ward.trained()
    w1 = w + (update(w, 0) + update(w, 1)) / 2
    assert (learnt - (w1 + (2**-0.5 * update(w, 0) + update(w1, 1)) / 2)).abs().max() < 1e-12
    assert ward.rounds()[-1]["staleness"] == {"0": 1, "1": 1} and ward.orders(5)  # nobody was asked again


def test_the_events_of_a_job_whose_worker_dies_give_its_model(clinic: Clinic, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three clients that train as fast as they can, in any order: the law over the events, in plain torch."""
    monkeypatch.setattr(mailbox, "_KEPT_ROUNDS", 1000)  # all orders can be counted at the end
    job = clinic.job("fedbuff:buffer=2,local_steps=1,batch_size=0,clients=remote(least=3,wait=100)", 6, seed=3)
    clients = [clinic.hospital(job, k, pause=0.03) for k in range(3)]
    box = clinic.service.mailbox(job.id)
    for client in clients[:2]:
        client.begin()
    until(lambda: "waits for 1 more of 3" in (box.standing() or ""))
    clients[2].begin()

    def counted() -> dict[int, dict[str, Any]]:
        return {event["round"]: event for event in job.events() if event["kind"] == "cohort"}  # a repeat is the last

    for round in (1, 3):
        until(lambda round=round: max(counted(), default=-1) >= round)
        clinic.kill_workers()
    learnt = clinic.trained(job)
    assert any(event["kind"] == "restarted" for event in job.events())
    w, used = [drawn()], Counter[tuple[int, int]]()
    for round, event in sorted(counted().items()):
        ages = [int(age) for age, n in sorted(event["staleness"].items(), key=lambda e: -int(e[0])) for _ in range(n)]
        updates = [(int(name[1:]), round - age) for name, age in zip(event["trained"], ages, strict=True)]
        used.update(updates)
        w.append(w[-1] + sum((1 + round - v) ** -0.5 * update(w[v], k) for k, v in updates) / 2)
    assert len(w) == 7 and (learnt - w[-1]).abs().max() < 1e-12
    orders = [box.order(serial) for serial in box.serials()]
    asked = Counter((k, order.round) for order in orders if order is not None for k in order.sampled)
    assert used <= asked  # no update counts twice


NORMED = """
import client_site, torch

class Normed(client_site.Server):
    def model(self):
        return torch.nn.Sequential(torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1)).double()
"""


def test_an_update_that_is_too_old_is_refused_and_its_state_is_dropped(clinic: Clinic) -> None:
    (clinic.path / "normed.py").write_text(NORMED)

    class Normed(Own):
        def model(self):  # type: ignore[no-untyped-def]
            return torch.nn.Sequential(torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1)).double()

    strategy = "fedbuff:buffer=1,concurrency=2,max_staleness=0,local_steps=1,batch_size=0,buffers=keep"
    job = clinic.user.submit(
        "normed.py:Normed", working_dir=clinic.path, strategy=f"{strategy},clients=remote(least=2,wait=100)", epochs=2
    )
    gates, clients = (Turnstile(), Turnstile()), list[Hospital]()
    for k, gate in enumerate(gates):
        client = clinic.hospital(job, k)
        client.outside = ClientProcess(
            WorkloadTrainer(Normed(k, gate=gate), Own(k).data()),
            client.outside.token,
            job.id,
            client.connection,
            client.folder,
            name=f"h{k}",
            report=client.said.append,
        )
        clients.append(client.begin())
    box = clinic.service.mailbox(job.id)
    until(lambda: max(box.serials(), default=0) == 2)
    # 25 rows in batches of 8, but this job trains on all rows at once
    assert any("the last batch of 8 has one row" in text for text in clients[1].said)
    gates[0].let()
    until(lambda: max(box.serials(), default=0) == 3)  # the next round has begun
    gates[1].let()
    said = "round 0: the update was rejected: its training began 1 rounds ago, and max_staleness is 0"
    until(lambda: said in clients[1].said)
    assert not list(clients[1].folder.folder.glob("state-*")) and list(clients[0].folder.folder.glob("state-*"))
    gates[0].let()
    job.wait(60)
    for gate in gates:
        gate.let(100)
    assert [event["dropped"] for event in cohorts(job)] == [[], [["h1", "stale"]]]
    assert clients[1].over().ended.rounds == 0


def test_who_does_not_reply_in_time_gives_its_place_to_another(clinic: Clinic) -> None:
    ward = Ward(clinic, "buffer=1,concurrency=1,deadline=1", rounds=1, first=1)
    (slow,) = ward.box.order(1).sampled  # type: ignore[union-attr]
    until(lambda: ward.orders(2))
    assert list(ward.box.order(2).sampled) == [1 - slow]  # type: ignore[union-attr]
    ward.gates[1 - slow].let()
    ward.trained()
    (event,) = ward.rounds()
    assert (event["trained"], event["dropped"]) == ([f"h{1 - slow}"], [[f"h{slow}", "deadline"]])
    assert ward.clients[slow].over().ended.rounds == 0
    assert any("too late and not counted" in text for text in ward.clients[slow].said)


def test_an_asynchronous_job_says_whom_it_waits_for_and_gives_up_with_words(clinic: Clinic) -> None:
    job = clinic.job("fedbuff:buffer=1,clients=remote(least=2,wait=5)", 1)
    clinic.hospital(job, 0).begin()
    until(lambda: "round 0 waits for 1 more of 2 clients; connected: h0" in clinic.reason(job))
    job.wait(30)
    assert job.data["status"] == "FAILED" and "has waited 5 s" in job.data["reason"]


def test_an_update_that_is_not_finite_is_one_of_the_round(clinic: Clinic) -> None:
    class Broken(Own):
        def loss(self, model, batch):  # type: ignore[no-untyped-def]
            return super().loss(model, batch) * (float("inf") if self.calls >= self.tries else 1.0)

    job = clinic.job("fedbuff:buffer=1,local_steps=1,clients=remote(wait=100)", 1)
    client = clinic.hospital(job, 0)
    client.outside.trainer = WorkloadTrainer(Broken(0), Own(0).data())
    client.begin()
    job.wait(60)
    (event,) = cohorts(job)
    assert event["rejected"][0][0] == "h0" and event["skipped"]

"""What one secure job releases over its whole life: no two numbers differ by one client's number.

The job's decisions are the real ones (`SecureRounds`, `ClientEvaluation`), and so are the clients (`ClientProcess`,
with its folder); between them is the mailbox without HTTP. Hypothesis draws who is asked, who dies in which stage,
rounds of the rate 0, and returns to checkpoints. Every released number is a sum over the survivors of a number of each.
The law compares these numbers as sets: of two released sums, the clients' numbers differ in none or in more than one.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from rayps_client.errors import Conflict
from rayps_client.exchange.raw_tensors import RawTensor
from rayps_client.exchange.signed_orders import EVALUATION, ROUND, ClientToken, Key
from rayps_client.machine.client_folder import ClientFolder
from rayps_client.process import ClientProcess
from rayps_client.secure import secure_replies
from rayps_client.secure.protocol import Stage
from rayps_client.secure.quantise import EXTRAS
from rayps_client.secure.service_stages import answer_text
from rayps_client.secure.take_part import quantiser_of
from rayps_client.trainers.local_trainer import LocalReply, LocalTask
from rayps_client.trainers.own_metrics import OwnMetrics, OwnTotal

from rayps.core.metrics import Total
from rayps.federated.client_evaluation import ClientEvaluation
from rayps.federated.remote.mailbox import Mailbox
from rayps.federated.remote_codec import encode_parameters, layout_rows
from rayps.federated.secure_rounds import SecureRounds, secure_rounds
from rayps.strategies.catalogue import parse
from rayps.tensors.flat import FlatModel

JOB, CLIENTS = "0" * 26, 5
FLAT = FlatModel(torch.nn.Linear(2, 1).double())
NAMES = {"loss": Total(1.0, 1.0)}  # the metrics of the job's own evaluation
DIES = (None, None, None, Stage.ADVERTISE, Stage.SHARE, Stage.MASK, Stage.UNMASK)


class Dead(Exception):
    """A client was killed."""


def number(*what: object) -> float:
    """A number in [-1, 1] that only `what` determines."""
    raw = hashlib.sha256(repr(what).encode()).digest()
    return int.from_bytes(raw[:6], "little") / 2**47 - 1


class Rows:
    """The training of one client on all its rows at once: what it finds depends on the parameters alone."""

    def __init__(self, client: int) -> None:
        self.client, self.samples = client, 5 + client

    def layout(self) -> Any:
        return layout_rows(FLAT.layout)

    def train(self, task: LocalTask) -> LocalReply:
        w, rate = task.start.w.array(), 0.0 if task.tick else 1.0  # a schedule may have steps of the rate 0
        update = [number("update", self.client, w.tobytes(), j) for j in range(3)]
        state = {}
        if task.strategy["name"] == "ditto":
            v = np.array([number("own", self.client, w.tobytes(), task.round)])
            state = {"v": RawTensor("float64", (1,), v.tobytes())}
        moved = RawTensor("float64", (3,), (w + rate * np.array(update)).tobytes())
        return LocalReply(moved, {}, {}, state, n=self.samples, steps=1, samples=self.samples, loss=self._loss(w))

    def evaluate(self, task: LocalTask, name: str) -> OwnMetrics:
        """On the training's rows: the default of `evaluation_data()`."""
        own = {}
        if "v" in task.state:  # the metric of the personal model depends on that model alone
            own = {"loss": OwnTotal(number(self.client, task.state["v"].array().tobytes()), 1.0)}
        return OwnMetrics(self.samples, {"loss": OwnTotal(self._loss(task.start.w.array()), 1.0)}, own)

    def _loss(self, w: Any) -> float:
        return number("loss", self.client, w.tobytes())


class Line:
    """A client's connection: the mailbox. The client dies when it sends its message of the stage `dies`."""

    def __init__(self, mailbox: Mailbox, key: Key, client: int, dies: Stage | None) -> None:
        self._mailbox, self._key, self._client, self._dies = mailbox, key, client, dies

    def _stages(self, path: str) -> Any:
        return self._mailbox.stages(int(path.split("/rounds/")[1].split("/")[0]))

    def call(self, method: str, path: str, **options: Any) -> Any:
        stages = self._stages(path)
        if path.endswith("/withdraw"):
            return stages.withdraw(self._client, options["json"]["reason"])
        if path.endswith("/update"):
            raise Conflict("the round has ended", code="late")
        stage, serial = Stage(path.rsplit("/")[-1]), int(path.split("/rounds/")[1].split("/")[0])
        found = stages.answer(stage, self._client)
        if found is None:
            time.sleep(0.005)
            return SimpleNamespace(json=lambda: {"kind": "wait"})
        text = answer_text(JOB, self._client, serial, stage, found)
        return SimpleNamespace(json=lambda: {"kind": "answer", "answer": text, "signature": self._key.sign(text)})

    def upload(self, path: str, raw: bytes, headers: Any, *, begun: bool = False, ask: str = "") -> None:
        stage, stages = Stage(path.rsplit("/")[-1]), self._stages(path)
        if stage is self._dies:
            self._mailbox.leave(self._client)
            raise Dead
        part = stages.part(stage, self._client, hashlib.sha256(raw).hexdigest())
        try:
            part.write_bytes(raw)
        except FileNotFoundError:  # the stage was closed in the meantime
            raise Conflict("late", code="late") from None
        stages.deliver(stage, self._client, part)

    def try_once(self, *given: Any, **options: Any) -> None:
        """Renew a lease, which no stage needs here."""

    def download(self, path: str, headers: Any) -> bytes:
        return self._mailbox.parameters(int(path.split("/rounds/")[1].split("/")[0])).read_bytes()


@dataclass(frozen=True)
class Step:
    """One step of a job: the asked clients, who dies where in the round and in the evaluation, and whether it returns.

    `rate`: whether the round trains. `back`: how many rounds the job then returns, to a checkpoint.
    """

    asked: frozenset[int]
    dies: tuple[Stage | None, ...]
    dies_evaluating: tuple[Stage | None, ...]
    rate: bool = True
    back: int = 0


class Job:
    """A secure job with five clients, and every sum that it releases."""

    def __init__(self, folder: Path, strategy: str, max_weight: int, evaluates: bool) -> None:
        told = f"{strategy}:batch_size=0,client_evaluation={str(evaluates).lower()},clients=remote(least=2)"
        (phase,) = parse(f"{told},secure=secagg(clip=4,bits=24,max_weight={max_weight})")
        self.strategy, self.given, self.folder = phase.strategy, phase.strategy.federation, folder
        self.mailbox = Mailbox(folder / JOB / "clients")
        self.mailbox.prepare()
        self.key = Key(Ed25519PrivateKey.generate())
        for client in range(CLIENTS):
            self.mailbox.join(f"c{client}", "k" * 20, "token", 0)
        self.position, self.checkpoints = 0, [np.zeros(3)]
        self.released: list[tuple[str, dict[str, frozenset[object]]]] = []
        self.sent: dict[tuple[int, int], tuple[Any, dict[str, object]]] = {}  # by order and client
        self.rounds: SecureRounds = secure_rounds(self.given, self.mailbox, 3)

    def run(self, step: Step) -> None:
        at, w = self.position, self.checkpoints[self.position]
        facts = self._facts(ROUND, at, 0 if step.rate else 1)
        raw = self._raw(w)
        with self._alive(sorted(step.asked), step.dies) as pause:
            asked = {k: f"c{k}" for k in sorted(step.asked)}
            total, order = self.rounds.sum_of(facts, asked, 60, raw, pause)
        self._keep(ROUND, total, order)
        self.checkpoints[at + 1 :] = [w if total.numbers is None else w + total.numbers.mean]
        self.position += 1
        if self.given.real.client_evaluation:
            self._evaluate(step.dies_evaluating)
        self.position = max(0, self.position - step.back)

    def _evaluate(self, dies: tuple[Stage | None, ...]) -> None:
        evaluation = ClientEvaluation(self.mailbox, self.given, 60)
        everyone, kept = {k: f"c{k}" for k in range(CLIENTS)}, SecureRounds.sum_of

        def keep(sums: SecureRounds, *rest: Any) -> Any:
            total, order = kept(sums, *rest)
            self._keep(EVALUATION, total, order)
            return total, order

        facts, raw = self._facts(EVALUATION, self.position, 0), self._raw(self.checkpoints[self.position])
        with pytest.MonkeyPatch.context() as patch, self._alive(list(everyone), dies) as pause:
            patch.setattr(SecureRounds, "sum_of", keep)
            evaluation.run(facts, everyone, raw, NAMES, (pause, lambda order: None))

    def _facts(self, kind: str, at: int, tick: int) -> Any:
        return {
            "kind": kind,
            "round": at,
            "phase": 0,
            "seed": 7,
            "strategy": self.strategy.to_wire(),
            "since": max(0, at - 3),
            "starts": [],
            "personal": self.given.client_side.measured,
            "tick": tick,
        }

    def _raw(self, w: Any) -> bytes:
        return encode_parameters(torch.from_numpy(w.copy()), FLAT.layout, {}, {})

    @contextmanager
    def _alive(self, asked: list[int], dies: tuple[Stage | None, ...]) -> Iterator[Any]:
        """The clients, each started again from its folder. They follow the order that appears in the mailbox."""
        for client in asked:
            self.mailbox.join(f"c{client}", "k" * 20, "token", 0)  # it is there again
        before, threads = self.mailbox.newest(), list[threading.Thread]()

        def pause(waits: str) -> None:
            order = self.mailbox.newest()
            if not threads and order is not None and (before is None or order.serial > before.serial):
                threads.extend(threading.Thread(target=self._follow, args=(order, k, dies[k])) for k in order.sampled)
                for each in threads:
                    each.start()
            time.sleep(0.005)

        yield pause
        for each in threads:
            each.join(20)
            assert not each.is_alive()

    def _follow(self, order: Any, client: int, dies: Stage | None) -> None:
        folder = ClientFolder(self.folder / f"client-{client}")
        line: Any = Line(self.mailbox, self.key, client, dies)
        process = ClientProcess(
            Rows(client),  # type: ignore[arg-type]
            ClientToken.create(JOB, self.key),
            JOB,
            line,
            folder,
            name=f"c{client}",
            report=lambda text: None,
        )
        process._number, process._public_key = client, self.key.public
        facts = {**order.facts, "job": JOB, "client": client, "name": f"c{client}", "seconds": 60.0}
        try:
            process._settled({"kind": "wait"})
            (process.train_round if order.facts["kind"] == ROUND else process.evaluate_model)(facts)
        except Dead:
            pass
        finally:
            folder.close()

    def take(self, client: Any, serial: int, facts: Any, trained: Any, exchange: Any) -> None:
        """What `take_part` gets: remember the numbers that this client adds to the sum."""
        numbers, integers = trained[0], quantiser_of(facts).integers(trained[0])
        found: dict[str, object] = {}
        for j in np.flatnonzero(integers[:-EXTRAS]).tolist():
            found[f"element {j}"] = (client.number, float(numbers.update[j]))
        if integers[-2]:
            found["loss"] = (client.number, numbers.loss)
        if integers[-1] and facts["max_weight"] == 1:  # else like the sums of weights, which are not secret
            found["samples"] = (client.number, numbers.samples)
        self.sent[serial, client.number] = integers, found

    def _keep(self, kind: str, total: Any, order: Any) -> None:
        if order is None or total.numbers is None:
            return
        sent = [self.sent[order.serial, number] for number in total.survivors]
        summed = np.sum([integers for integers, _ in sent], axis=0)
        step = quantiser_of(order.facts["secure"]).step
        assert np.array_equal(total.numbers.update, summed[:-EXTRAS] * step) and total.numbers.weight == summed[-EXTRAS]
        columns = {name for _, found in sent for name in found}
        parts = {name: frozenset(found[name] for _, found in sent if name in found) for name in columns}
        if kind == EVALUATION and self.given.client_side.measured:
            parts.pop("element 2", None)  # whether a client has a personal model, which is known
        self.released.append((f"order {order.serial}, {kind}", parts))

    def check(self) -> None:
        """The law."""
        for what, parts in self.released:
            for name, found in parts.items():
                assert len(found) > 1, f"{what}: {name} is the number of one client: {found}"
        for (one, left), (other, right) in itertools.combinations(self.released, 2):
            for a, b in itertools.product(left, right):
                assert len(left[a] ^ right[b]) != 1, (
                    f"{one}: {a}, and {other}: {b} differ by the number of one client: {left[a] ^ right[b]}"
                )


@contextmanager
def job(strategy: str, max_weight: int, evaluates: bool = True) -> Iterator[Job]:
    take_part = secure_replies.take_part
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        found = Job(Path(folder), strategy, max_weight, evaluates)

        def kept(*given: Any) -> None:
            found.take(*given)
            take_part(*given)

        patch.setattr(secure_replies, "take_part", kept)
        patch.setattr(os, "fsync", lambda file: None)  # no machine loses its power here
        yield found


fates = st.tuples(*[st.sampled_from(DIES)] * CLIENTS)
steps = st.builds(
    Step,
    st.frozensets(st.integers(0, CLIENTS - 1), min_size=2),
    fates,
    fates,
    st.sampled_from([True, True, True, False]),
    st.sampled_from([0, 0, 0, 1, 2]),
)
NOBODY: tuple[Stage | None, ...] = (None,) * CLIENTS


def dying(stage: Stage, *clients: int) -> tuple[Stage | None, ...]:
    return tuple(stage if k in clients else None for k in range(CLIENTS))


EVERYONE = frozenset(range(CLIENTS))
VOID = dying(Stage.MASK, 0, 1, 2)
# a void round, after which the same parameters are evaluated by one client less
AGAIN = [Step(EVERYONE, VOID, NOBODY), Step(EVERYONE, VOID, dying(Stage.MASK, 3))]
# a round that is void before anybody has sent an update, the next one with a sum, and a return to before both
RETURN = [
    Step(EVERYONE, dying(Stage.ADVERTISE, 0, 1, 2, 3), VOID),
    Step(EVERYONE, NOBODY, VOID, back=2),
    Step(EVERYONE, dying(Stage.MASK, 3), VOID),
]
# two rounds of the rate 0 from the same parameters
STILL = [Step(EVERYONE, NOBODY, VOID, rate=False), Step(EVERYONE, dying(Stage.MASK, 3), VOID, rate=False)]
# rounds that train two clients; only the others are evaluated
OTHERS = [
    Step(EVERYONE, NOBODY, dying(Stage.MASK, 0, 1)),
    Step(frozenset({0, 1}), NOBODY, dying(Stage.MASK, 0, 1)),
    Step(frozenset({0, 1}), NOBODY, dying(Stage.MASK, 0)),
    Step(frozenset({0, 1}), NOBODY, NOBODY),
]
# two clients have a personal model, of which one is evaluated
FEW = [Step(frozenset({0, 1}), NOBODY, dying(Stage.MASK, 0))]
# one client less in the second round, from the parameters that all have evaluated
LESS = [Step(EVERYONE, NOBODY, NOBODY), Step(EVERYONE, dying(Stage.MASK, 3), NOBODY)]


@pytest.mark.parametrize(
    ("strategy", "max_weight", "evaluates"),
    [("fedavg", 1, True), ("fedavg", 1, False), ("fedavg", 100, True), ("ditto", 1, True)],
)
@settings(max_examples=5, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@example(history=AGAIN)
@example(history=RETURN)
@example(history=STILL)
@example(history=OTHERS)
@example(history=FEW)
@example(history=LESS)
@given(history=st.lists(steps, min_size=2, max_size=6))
def test_no_two_released_numbers_differ_by_one_clients_number(
    strategy: str, max_weight: int, evaluates: bool, history: list[Step]
) -> None:
    with job(strategy, max_weight, evaluates) as found:
        for step in history:
            found.run(step)
        found.check()


def test_the_histories_above_release_sums() -> None:
    """Otherwise the law says nothing."""
    with job("ditto", 1) as found:
        for step in OTHERS:
            found.run(step)
    kinds = [what.rpartition(" ")[2] for what, _ in found.released]
    assert kinds.count(ROUND) == 4 and kinds.count(EVALUATION) >= 2

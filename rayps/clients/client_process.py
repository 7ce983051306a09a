"""A real federated client: a process outside of the cluster that trains on its own data. It uses outgoing HTTP only.

Guarantees: the client sends only parameters, counts and the loss. Rows, labels and the strategy's state of this client
never leave this machine. An order is executed only if the service that made the token has signed the order, if the
order is for this job and client, and if it is newer than all orders that are done. The process can be killed at any
moment and started again.

The process joins a job, polls for work (long polls), trains, and sends the update. If the service does not answer, it
retries with exponential pauses.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypedDict

import httpx2
import numpy as np
import torch
from rayps_client.secure.pinned_keys import PinnedKeys
from rayps_client.secure.quantise import ClientNumbers
from rayps_client.secure.secure_replies import JoinedAs, SecureReplies
from torch import Tensor

from rayps.clients.client_folder import ClientFolder
from rayps.core.errors import ConfigError, Conflict, NotFound, RaypsError, Unauthorized, Unreachable, WorkloadError
from rayps.core.job_status import Status
from rayps.core.user_code import user_code
from rayps.data.base import Data
from rayps.data.other_files import with_other_files
from rayps.federated import remote_codec
from rayps.federated.client import ClientReply, ClientRows, Task, Trainer
from rayps.federated.remote.signed_orders import ClientToken, OrderFacts, verified
from rayps.federated.strategy_interface import FederatedView, deadline_of
from rayps.service.client import checked
from rayps.strategies.catalogue import parse
from rayps.strategies.fedavg import FedAvg
from rayps.tensors.flat import FlatModel
from rayps.workload.base import Workload
from rayps.workload.model import apart, model_of

log = logging.getLogger(__name__)

LONG_POLL_SECONDS = 20.0  # how long the service may wait for work before it answers
MOST_PAUSE_SECONDS = 30.0  # longest pause between two attempts
_CALL_SECONDS = 60.0  # time-out of one HTTP call
_TRANSIT_SECONDS = 0.5  # an order may have been in transit for this time, so its deadline counts as this much earlier
_LEAVE_SECONDS = 3.0  # time-out of the call that leaves the job
_BUFFERS = "buffers/"  # prefix of a client's own buffers in its state


@dataclass(frozen=True, slots=True)
class Ended:
    """How a job ended, as its client reports it."""

    status: Status
    reason: str
    rounds: int  # number of rounds in which this client's update was accepted


class WorkAnswer(TypedDict, total=False):
    """The service's answer to a client that asks for work."""

    kind: str  # round, wait or end
    status: str
    reason: str | None
    verdict: str | None  # why the newest update was rejected
    order: str
    signature: str


class ServiceConnection:
    """The HTTP connection of a client. A request is repeated until the service answers, for at most `patience` s."""

    def __init__(
        self,
        url: str,
        token: str,
        patience: float,
        report: Callable[[str], None],
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        self.url, self.patience, self._report = url, patience, report
        self._http = httpx2.Client(
            base_url=url,
            timeout=httpx2.Timeout(_CALL_SECONDS, connect=10.0),
            trust_env=True,
            transport=transport,
            headers={"Authorization": f"Bearer {token}", "User-Agent": "rayps-client"},
        )

    def call(self, method: str, path: str, **options: Any) -> httpx2.Response:
        """Send a request until the service answers; return the answer.

        Raises:
            Unreachable: there was no answer for `patience` seconds.
            Unauthorized, NotFound, Conflict, ConfigError, ServiceError: the service refused the request.
        """
        since, attempt, reported = time.monotonic(), 0, False
        while True:
            cause = ""
            try:
                answer = self._http.request(method, path, **options)
                if answer.status_code < 500 and answer.status_code != 429:
                    if reported:
                        self._report("the service answers again")
                    if not answer.is_success:
                        checked(answer)
                    return answer
                cause = f"HTTP status {answer.status_code}"
            except httpx2.TransportError as error:
                cause = str(error) or type(error).__name__
            silent = time.monotonic() - since
            if silent > self.patience:
                raise Unreachable(
                    f"no rayps service has answered at {self.url} for {silent:.0f} s ({cause}): run the command again "
                    "later to continue,\nor raise --patience SECONDS",
                    url=self.url,
                )
            if not reported and attempt > 1:
                self._report(
                    f"no answer from {self.url} ({cause}): retrying for up to {self.patience:.0f} s (--patience)"
                )
                reported = True
            attempt += 1
            time.sleep(_pause(attempt))

    def try_once(self, method: str, path: str, seconds: float, **options: Any) -> None:
        """Send a request once and ignore a failure."""
        with contextlib.suppress(Exception):
            self._http.request(method, path, timeout=seconds, **options)

    def close(self) -> None:
        """Close the connection."""
        self._http.close()


class ClientProcess:
    """A client that takes part in one job, from joining until the job has ended."""

    def __init__(
        self,
        workload: Workload,
        data: Data,
        token: ClientToken,
        job: str,
        connection: ServiceConnection,
        folder: ClientFolder,
        name: str | None = None,
        report: Callable[[str], None] = log.info,
        device: str = "cpu",
        pinned: PinnedKeys | None = None,
    ) -> None:
        """`pinned`: the keys by which clients check each other in secure rounds; None trusts the service for it."""
        self.workload, self.token, self.job, self.name = workload, token, job, name
        self._connection, self._folder, self._report = connection, folder, report
        _check_device(device)
        self._rows = rows_of(data)
        with apart():
            model = model_of(workload).to(device)
        model.train()
        self._trainer = Trainer(FlatModel(model), workload, device)
        self._number, self._public_key, self._rounds = -1, "", 0
        self._last_reason = ""
        self._samples: int | None = len(self._rows.numbers)  # sent at joining; None in a secure job
        self._secure = SecureReplies(connection, folder.folder, pinned)

    def run(self) -> Ended:
        """Take part until the job has ended.

        After an error or Ctrl-C the client leaves the job, so no round waits for it.

        Raises:
            Unauthorized: the token is revoked, or an order is unsigned, replayed or for another job.
            Unreachable: the service did not answer for too long.
            WorkloadError, DataError: the workload cannot be trained here.
        """
        self.check_workload()
        key = self._connection.call("GET", "/api/v1/client/key", params={"job": self.job}).json()
        self.token.check(key["public_key"])
        if self._secure.asked_for(key):
            self._samples = None
        try:
            self.join()
            return self._run_rounds()
        except BaseException:  # Ctrl-C too
            if self._number >= 0:
                self._connection.try_once("POST", "/api/v1/client/leave", _LEAVE_SECONDS, headers=self._headers())
            raise

    def check_workload(self) -> None:
        """Train on one batch to find errors before the client joins; then restore the model and its buffers.

        Raises:
            WorkloadError, DataError: the user's code or data failed.
        """
        rows, trainer = self._rows, self._trainer
        few = ClientRows(rows.numbers[: rows.batch_size], rows.take, rows.batch_size, False)
        w, buffers = trainer.flat.vector.clone(), trainer.copy_buffers()
        with apart():
            trainer.train(FedAvg(local_steps=1), Task(0, 0, 0, w, {}), few)
        trainer.load(w, buffers)
        for parameter in trainer.parameters:
            parameter.grad = None

    def _run_rounds(self) -> Ended:
        while True:
            work = self._request_work()
            if work.get("verdict"):
                self._discard_rejected_state(str(work["verdict"]))
            if work["kind"] == "end":
                return Ended(Status(work["status"]), str(work.get("reason") or ""), self._rounds)
            if work["kind"] == "round":
                self._last_reason = ""
                self.train_round(self.verified_order(work))
            elif (why := str(work.get("reason") or "waits")) != self._last_reason:
                self._last_reason = why
                self._report(f"job {self.job} ({work.get('status')}): {why}")

    def join(self) -> None:
        """Join the job and receive this client's number. A client that joins again receives the same number."""
        body = {"name": self.name, "key": self._folder.key, "samples": self._samples, "job": self.job}
        found = self._connection.call("POST", "/api/v1/client/join", json=body).json()
        self._number, self._public_key, self.name = int(found["number"]), found["public_key"], found["name"]
        self.token.check(self._public_key)
        samples = f"{len(self._rows.numbers)} samples" + (" that stay secret" if self._samples is None else "")
        self._report(f"joined job {self.job} as {self.name}, client {self._number}, with {samples}")

    def _headers(self, **more: str) -> dict[str, str]:
        return {"Rayps-Client": f"{self.job}:{self._number}:{self._folder.key}", **more}

    def _request_work(self) -> WorkAnswer:
        params = {"after": self._folder.finished, "wait": LONG_POLL_SECONDS}
        found: WorkAnswer = self._connection.call(
            "GET", "/api/v1/client/work", params=params, headers=self._headers()
        ).json()
        return found

    def verified_order(self, work: WorkAnswer) -> OrderFacts:
        """Return the order, after checking its signature, job, client and serial number.

        Raises:
            Unauthorized: a check failed. No part of the order is executed.
        """
        order = verified(str(work.get("order")), str(work.get("signature")), self._public_key, self.token.fingerprint)
        mine = {"kind": "round", "job": self.job, "client": self._number, "name": self.name}
        for key, value in mine.items():
            if order.get(key) != value:
                raise _refusal(f"the {key} of the order is {order.get(key)!r}, but that of this client is {value!r}")
        serial = order["serial"]
        if serial <= self._folder.finished or serial < self._folder.started:
            newest = max(self._folder.finished, self._folder.started)
            raise _refusal(f"order {serial} is a replay: order {newest} was received before")
        return order

    def train_round(self, order: OrderFacts) -> None:
        """Execute an order: receive the parameters, train, and send the update."""
        serial, round, asked = order["serial"], order["round"], time.monotonic()
        strategy = _strategy_of(order)
        self._folder.start_order(serial)
        try:
            raw = self._connection.call(
                "GET", f"/api/v1/client/rounds/{serial}/parameters", headers=self._headers()
            ).content
        except (Conflict, NotFound) as error:
            self._update_not_counted(order, error)
            return
        if hashlib.sha256(raw).hexdigest() != order["parameters"]["sha256"]:
            raise _refusal("the received parameters do not have the SHA-256 hash in the signed order")
        w, shared, buffers = remote_codec.decode_parameters(raw, self._trainer.flat.layout)
        at, name = order["phase"] + round, strategy.name
        state = self._folder.load_state(at, name, order["starts"])
        began = time.monotonic()
        own = {key.removeprefix(_BUFFERS): value for key, value in state.items() if key.startswith(_BUFFERS)}
        task = Task(order["seed"], round, self._number, w, shared, state, buffers | own, order.get("tick", at))
        reply = self._trainer.train(strategy, task, self._rows)
        if strategy.client_side.keeps_buffers:  # the buffers stay on this machine
            reply.state |= {f"{_BUFFERS}{key}": value for key, value in reply.buffers.items()}
            reply.buffers = {}
        seconds = time.monotonic() - began
        order |= {"trained": seconds, "ends": asked + float(order["seconds"]) - _TRANSIT_SECONDS}
        sent = self._send_masked(order, reply, w) if self._secure.expects(order) else self._send(order, reply)
        if sent:
            if reply.state:
                self._folder.save_state(at, serial, name, reply.state, order["since"])
            self._folder.finish_order(serial, at)
            self._rounds += 1
            self._report(f"round {round}: {reply.n} samples, loss {reply.loss:.4g}, {seconds:.1f} s; sent")

    def _send(self, order: OrderFacts, reply: ClientReply) -> bool:
        raw = remote_codec.encode_update(reply)
        headers = self._headers(
            **{"Rayps-Sha256": hashlib.sha256(raw).hexdigest(), "Content-Type": "application/octet-stream"}
        )
        try:
            self._connection.call(
                "PUT", f"/api/v1/client/rounds/{order['serial']}/update", content=raw, headers=headers
            )
        except (Conflict, NotFound) as error:
            self._update_not_counted(order, error)
            return False
        return True

    def _send_masked(self, order: OrderFacts, reply: ClientReply, w_t: Tensor) -> bool:
        update = (reply.w.double() - w_t.to(reply.w.device).double()).cpu().numpy()
        numbers = ClientNumbers(update, reply.n, reply.loss, reply.samples)
        joined = JoinedAs(self.job, self._number, self.name or "", self._headers())
        why = self._secure.send(order, numbers, joined, self._verified_text)
        if why is not None:
            self._folder.finish_order(order["serial"], None)
            self._report(f"round {order['round']}: {why}")
        return why is None

    def _verified_text(self, text: str, signature: str) -> OrderFacts:
        return verified(text, signature, self._public_key, self.token.fingerprint)

    def _update_not_counted(self, order: OrderFacts, error: RaypsError) -> None:
        if error.data.get("code") not in ("late", "no_order", "not_asked"):
            raise error
        self._folder.finish_order(order["serial"], None)
        if "trained" not in order or time.monotonic() < order["ends"]:  # not late: e.g. the job was restored
            self._report(f"round {order['round']}: {error}")
            return
        strategy = _strategy_of(order)
        deadline = deadline_of(strategy)
        self._report(
            f"round {order['round']}: the update was too late and not counted: training took {order['trained']:.1f} s, "
            f"and {order['seconds']:.1f} s were left of the round's deadline of {deadline:g} s. In the job's strategy, "
            "raise deadline, or lower local_epochs or local_steps"
        )

    def _discard_rejected_state(self, verdict: str) -> None:
        """Delete the state after the newest update, because the job rejected that update.

        The next round uses the state from before the update.
        """
        if self._folder.last is not None:
            self._report(f"round {self._folder.last}: the update was rejected: {verdict}")
            self._folder.delete_state(self._folder.last)
            self._folder.finish_order(self._folder.finished, None)
            self._rounds -= 1


def _strategy_of(order: OrderFacts) -> FederatedView:
    strategy = parse(order["strategy"])[0].strategy
    assert isinstance(strategy, FederatedView), "the service sends clients only orders of federated strategies"
    return strategy


def rows_of(data: Data) -> ClientRows:
    """Return all rows of a data set, as the rows of this one client.

    Raises:
        DataError: there are no rows, or a value cannot be used.
    """
    with user_code("data"):
        data.check()
        count = data.rows()
        mine = data.with_clients(np.zeros(count, dtype=np.int64)).clients
    return ClientRows(mine.rows(0), mine.batch, data.batch_size, getattr(data, "shuffle", True))


def own_data(workload: Workload, path: str | None) -> Data:
    """Return the workload's data; with `path`, the same columns from that Parquet file or folder.

    Raises:
        WorkloadError: data() does not return a data source.
        DataError: `path` is given, and the workload's data does not come from Parquet files.
    """
    with user_code("data"):
        data = workload.data()
    if not isinstance(data, Data):
        raise WorkloadError(f"data() returned {type(data).__name__}: return one of rayps.data, e.g. parquet(...)")
    return data if path is None else with_other_files(data, path)


def _check_device(device: str) -> None:
    """Check that torch can use the device. Raises ConfigError if it cannot."""
    try:
        torch.zeros(1, device=device)
    except Exception as error:  # each kind of device fails in its own way
        cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"device {device!r} cannot be used on this machine: {cause}. Give --device cpu", field="device"
        ) from error


def _refusal(why: str) -> Unauthorized:
    return Unauthorized(
        f"this client refused an order of the service and executed no part of it: {why}", code="refused"
    )


def _pause(attempt: int) -> float:
    return float(np.random.uniform(0.5, 1.0)) * min(MOST_PAUSE_SECONDS, 0.1 * 2.0 ** min(attempt, 20))

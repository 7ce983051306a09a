"""A real federated client: a process outside of the cluster that trains on its own data. It uses outgoing HTTP only.

Guarantees: the client sends only parameters, counts and the loss. Rows, labels and the strategy's state of this client
never leave this machine. An order is executed only if the service that made the token has signed the order, if the
order is for this job and client, and if it is newer than all orders that are done. The process can be killed at any
moment and started again.

The process joins a job, polls for work (long polls), trains, and sends the update. If the service does not answer, it
retries with exponential pauses. What trains is a `LocalTrainer`, and whether the client takes part now is decided by
its `Conditions`: outside of its hours it stays joined, and tells the service that no round should wait for it.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypedDict

import numpy as np

from rayps_client.errors import Conflict, DataError, NotFound, RaypsError, Unauthorized, Unreachable, WorkloadError
from rayps_client.exchange.connection import ServiceConnection
from rayps_client.exchange.global_model import fetch_global
from rayps_client.exchange.raw_tensors import RawTensor
from rayps_client.exchange.signed_orders import DEADLINE, EVALUATION, ROUND, ClientToken, OrderFacts, verified
from rayps_client.exchange.update_codec import decode_start, encode_update
from rayps_client.exchange.upload_coding import UploadCoder, bytes_of_round, without_rest
from rayps_client.machine.client_folder import ClientFolder
from rayps_client.members.consent import Consent
from rayps_client.secure import lease
from rayps_client.secure.lease import LeaseThread
from rayps_client.secure.pinned_keys import PeerKeys
from rayps_client.secure.quantise import ClientNumbers
from rayps_client.secure.secure_replies import JoinedAs, SecureReplies
from rayps_client.secure.service_stages import lease_path
from rayps_client.trainers.local_trainer import LocalReply, LocalTask, LocalTrainer, RoundStart, layout_bytes
from rayps_client.trainers.own_metrics import OwnMetrics, VectorLayout, encode_metrics, vector_of

log = logging.getLogger(__name__)

LONG_POLL_SECONDS = 20.0  # how long the service may wait for work before it answers
_TRANSIT_SECONDS = 0.5  # an order may have been in transit for this time, so its deadline counts as this much earlier
_LEAVE_SECONDS = 3.0  # time-out of the call that leaves the job
_BUFFERS = "buffers/"  # prefix of a client's own buffers in its state
_ENDED = "SUCCEEDED"  # the status of a job that has ended well


@dataclass(frozen=True, slots=True)
class Ended:
    """How a job ended, as its client reports it."""

    status: str
    reason: str
    rounds: int  # updates that this process has sent and that the service has not reported as rejected

    @property
    def succeeded(self) -> bool:
        """Whether the job ended well."""
        return self.status == _ENDED


class WorkAnswer(TypedDict, total=False):
    """The service's answer to a client that asks for work."""

    kind: str  # round, wait or end
    status: str
    reason: str | None
    verdict: str | None  # why the newest update was rejected
    order: str
    signature: str


class Conditions(Protocol):
    """Decides whether the client takes part now."""

    def away(self) -> str | None:
        """Return why the client does not take part now, or None if it does."""

    def pause(self) -> None:
        """Wait, while the client is away, until it is worth looking again."""

    def admit(self, bytes_of_parameters: int, bytes_of_round: int | None = None) -> str | None:
        """Return why the client cannot take part in a round with parameters of this size today, or None.

        `bytes_of_round`: what it receives and sends; None: not known yet. Raises ConfigError if it never can.
        """

    def trained(self) -> str | None:
        """Return a warning after a training, such as that it took more memory than allowed, or None."""


class Always:
    """The conditions of a client that always takes part."""

    def away(self) -> str | None:
        """Return None."""
        return None

    def pause(self) -> None:
        """Do nothing: the client is never away."""

    def admit(self, bytes_of_parameters: int, bytes_of_round: int | None = None) -> str | None:
        """Return None."""
        return None

    def trained(self) -> str | None:
        """Return None."""
        return None


class ClientProcess:
    """A client that takes part in one job, from joining until the job has ended."""

    def __init__(
        self,
        trainer: LocalTrainer,
        token: ClientToken,
        job: str,
        connection: ServiceConnection,
        folder: ClientFolder,
        *,
        name: str | None = None,
        report: Callable[[str], None] = log.info,
        conditions: Conditions | None = None,
        pinned: PeerKeys | None = None,
        consent: Consent | None = None,
    ) -> None:
        """`pinned`: the keys by which clients check each other in secure rounds; None trusts the service for it.

        `consent`: to the job's data-use statement; None refuses jobs that have one.
        """
        self.trainer, self.token, self.job, self.name = trainer, token, job, name
        self._connection, self._folder, self._report = connection, folder, report
        self._conditions = conditions or Always()
        self._number, self._public_key, self._rounds = -1, "", 0
        self._last_reason, self._personal = "", False  # whether the job's clients have personal models
        self._consent = consent or Consent(folder.folder, connection)
        self._secure = SecureReplies(connection, folder.folder, pinned, self._record_consent)

    def run(self) -> Ended:
        """Take part until the job has ended.

        After an error, Ctrl-C or SIGTERM the client leaves the job, so no round waits for it. If the job has ended
        before, this returns how, as it does for a client that has taken part until then.

        Raises:
            Unauthorized: the token is revoked, or an order is unsigned, replayed or for another job.
            Unreachable: the service did not answer for too long.
            WorkloadError, DataError: the workload cannot be trained here.
            ConfigError: the client's limits do not allow its training.
        """
        notice = self.trainer.try_out()
        if notice is not None:
            self._report(notice)
        self._conditions.admit(layout_bytes(self.trainer.layout()))  # raises an error if no round can be trained here
        self._warn()
        key = self._connection.call("GET", "/api/v1/client/key", params={"job": self.job}).json()
        self.token.check(key["public_key"])
        self._secure.read_key(key)
        self._consent.check(key.get("statement"))
        self._consent.keep_text(self.job)
        try:
            over = self._join_unless_over()
            return self._run_rounds() if over is None else over
        except BaseException:  # Ctrl-C and SIGTERM too
            if self._number >= 0:
                self._connection.try_once("POST", "/api/v1/client/leave", _LEAVE_SECONDS, headers=self._headers())
            raise

    def _run_rounds(self) -> Ended:
        while True:
            away = self._conditions.away()
            work = self._request_work(away is not None)
            if work.get("verdict"):
                self._discard_rejected_state(str(work["verdict"]))
            if away is None and self._settled(work):
                continue
            if work["kind"] == "end":
                if self._personal:
                    self._keep_parameters()
                return Ended(work["status"], str(work.get("reason") or ""), self._rounds)
            if away is not None:
                self._report_once(f"away: {away}")
                self._conditions.pause()
            elif work["kind"] == "round":
                self._last_reason = ""
                self._follow(self.verified_order(work))
            else:
                self._report_once(f"job {self.job} ({work.get('status')}): {work.get('reason') or 'waits'}")

    def _settled(self, work: WorkAnswer) -> bool:
        """Find out whether an update has arrived that was being sent when this client ended.

        Return whether this changed what the client has done. If the service still asks for this update, it has not
        arrived, and the round is trained again.
        """
        if self._folder.sending is None:
            return False
        serial, at = self._folder.sending
        if work["kind"] == "round" and self.verified_order(work)["serial"] == serial:
            return False
        headers = self._headers(**{"Rayps-Sha256": "0" * 64})
        try:
            self._connection.call("GET", f"/api/v1/client/rounds/{serial}/update", headers=headers)
        except (Conflict, NotFound):  # the round has ended without it
            self._folder.finish_order(serial, None)
            return True
        self._folder.finish_order(serial, at)
        self._rounds += 1
        return True

    def _follow(self, order: OrderFacts) -> None:
        """Execute an order, unless today's limits do not allow it."""
        layout = self.trainer.layout()
        traffic = received = order["parameters"]["bytes"]
        if order["kind"] == ROUND:
            traffic = bytes_of_round(received, layout, order["strategy"])
        refused = self._conditions.admit(layout_bytes(layout), traffic)
        if refused is not None:
            self._report_once(f"round {order['round']}: left out: {refused}")
            return
        with LeaseThread(partial(self._say_present, order["serial"]), lease.PRESENT_SECONDS):
            if order["kind"] == EVALUATION:
                self.evaluate_model(order)
            else:
                self.train_round(order)
        self._warn()

    def _say_present(self, serial: int) -> None:
        """Tell the service, once, that this client works on an order. A failure is ignored."""
        self._connection.try_once("POST", lease_path(serial), lease.RENEW_SECONDS, headers=self._headers())

    def _warn(self) -> None:
        warning = self._conditions.trained()
        if warning is not None:
            self._report(warning)

    def _report_once(self, text: str) -> None:
        if text != self._last_reason:
            self._last_reason = text
            self._report(text)

    def _join_unless_over(self) -> Ended | None:
        """Join the job. Return how it has ended, if it has."""
        try:
            self.join()
        except Conflict as error:
            ended = error.data.get("ended")
            if error.data.get("code") != "ended" or not isinstance(ended, dict):
                raise
            return Ended(str(ended.get("status")), str(ended.get("reason")), 0)
        return None

    def join(self) -> None:
        """Join the job and receive this client's number. A client that joins again receives the same number."""
        samples = f"{self.trainer.samples} samples" + (", which are not sent" if self._secure.required else "")
        sent = None if self._secure.required else self.trainer.samples
        body = {"name": self.name, "key": self._folder.key, "samples": sent, "job": self.job}
        found = self._connection.call("POST", "/api/v1/client/join", json=body).json()
        self._number, self._public_key, self.name = int(found["number"]), found["public_key"], found["name"]
        self.token.check(self._public_key)
        self._folder.record_number(self._number)
        self._report(f"joined job {self.job} as {self.name}, client {self._number}, with {samples}")

    def _headers(self, **more: str) -> dict[str, str]:
        return {"Rayps-Client": f"{self.job}:{self._number}:{self._folder.key}", **more}

    def _request_work(self, away: bool) -> WorkAnswer:
        params: dict[str, str | int | float] = {"after": self._folder.finished, "wait": LONG_POLL_SECONDS}
        if away:
            params = {"after": self._folder.finished, "wait": 0, "away": "true"}
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
        mine = {"job": self.job, "client": self._number, "name": self.name}
        if order.get("kind") not in (ROUND, EVALUATION):
            raise _refusal(f"the kind of the order is {order.get('kind')!r}")
        for key, value in mine.items():
            if order.get(key) != value:
                raise _refusal(f"the {key} of the order is {order.get(key)!r}, but that of this client is {value!r}")
        serial = order["serial"]
        if serial <= self._folder.finished or serial < self._folder.started:
            newest = max(self._folder.finished, self._folder.started)
            raise _refusal(f"order {serial} is a replay: order {newest} was received before")
        self._consent.check(order.get("statement"))
        return order

    def train_round(self, order: OrderFacts) -> None:
        """Execute an order: receive the parameters, train, and send the update."""
        serial, round, asked = order["serial"], order["round"], time.monotonic()
        self._personal = order.get("personal", False)
        secure = self._secure.expects(order)
        self._folder.start_order(serial)
        kept = None if secure else self._folder.kept_update(serial)
        if kept is not None:
            self._send_rest(order, kept)
            return
        start = self._start_of(order)
        if start is None:
            return
        at, name = order["phase"] + round, str(order["strategy"]["name"])
        state = self._folder.load_state(at, name, order["starts"])
        coder = UploadCoder.of(order["strategy"], order["seed"], at, self._number, state=state)
        own = {key.removeprefix(_BUFFERS): value for key, value in state.items() if key.startswith(_BUFFERS)}
        start = RoundStart(start.w, start.shared, {**start.buffers, **own})
        task = LocalTask(
            order["strategy"], order["seed"], round, self._number, order.get("tick", at), start=start, state=state
        )
        began = time.monotonic()
        reply = self.trainer.train(task)
        coded = coder.coded(reply, reply.start or start.w)
        if order["strategy"].get("buffers") == "keep":  # the buffers stay on this machine
            reply.state |= {f"{_BUFFERS}{key}": value for key, value in reply.buffers.items()}
            reply.buffers = {}
        seconds = time.monotonic() - began
        order |= {"trained": seconds, "ends": asked + float(order["seconds"]) - _TRANSIT_SECONDS}
        self._folder.start_sending(serial, at)
        if reply.state:  # stored before the update is sent, so that both count or neither does
            self._folder.save_state(at, serial, name, reply.state, order["since"])
        if secure:
            counts = self._add_to_sum(order, reply, reply.start or start.w)
        else:
            raw = encode_update(reply, coded)
            self._folder.keep_update(serial, raw)
            counts = self._send(order, raw)
        if counts:
            self._folder.finish_order(serial, at)
            self._rounds += 1
            self._report(f"round {round}: {reply.n} samples, loss {reply.loss:.4g}, {seconds:.1f} s; sent")

    def evaluate_model(self, order: OrderFacts) -> None:
        """Execute an order to evaluate: receive the parameters, evaluate, and send sums of metrics."""
        serial, at, name = order["serial"], order["phase"] + order["round"], str(order["strategy"]["name"])
        self._personal, why = order.get("personal", False), ""
        secure = self._secure.expects(order)
        self._folder.start_order(serial)
        start = self._start_of(order)
        if start is None:
            return
        state = without_rest(self._folder.load_state(at, name, order["starts"]))
        task = LocalTask(
            order["strategy"], order["seed"], order["round"], self._number, order.get("tick", at), start, state
        )
        try:
            found = self.trainer.evaluate(task, self.name or "")
            if secure:
                why = self._add_metrics(order, found) or ""
        except (WorkloadError, DataError) as error:  # a client may lack evaluation data, and still train
            found, why = OwnMetrics(0, {}), error.message
            if secure:  # the reason stays here: it may name rows and values
                self._secure.withdraw(order, self._joined(), "its evaluation failed, and the client says why")
        if not secure:
            try:
                raw = encode_metrics(found)
                self._record_consent(order, raw)
                self._connection.upload(f"/api/v1/client/rounds/{serial}/update", raw, self._headers())
            except (Conflict, NotFound) as error:
                if error.data.get("code") not in ("late", "no_order", "not_asked"):
                    raise
                why = why or error.message
        self._folder.finish_order(serial, None)
        text = f"round {order['round']}: evaluated on {found.rows} rows; sent"
        self._report(f"round {order['round']}: no metrics of this client count: {why}" if why else text)

    def _add_metrics(self, order: OrderFacts, found: OwnMetrics) -> str | None:
        """Take part in the sum of the clients' metrics. Return None, or why this client's are not in it.

        The metrics of its personal model are sent once for each personal model, also if the job's model has changed
        since, and a client that has none takes no part: a sum over the others would show who has what. In a private
        job the noise hides it.

        Raises:
            DataError: it cannot take part.
        """
        facts, has_personal = order["metrics"], order.get("personal", False)
        if has_personal and order["strategy"].get("privacy") is None:
            own = np.array([found.personal[name].mean for name in sorted(found.personal)])
            if not found.personal or not self._secure.is_first(own.tobytes()):
                raise DataError(
                    "this client has trained no personal model since its last evaluation, and a sum with it could show "
                    "that of another client"
                )
        vector = vector_of(found, VectorLayout(facts["names"], facts["bound"], has_personal))
        numbers = ClientNumbers(vector, found.rows, 0.0, 0)
        return self._secure.send(order, numbers, self._joined(), self._verified_text)

    def _joined(self) -> JoinedAs:
        return JoinedAs(self.job, self._number, self.name or "", self._headers())

    def _start_of(self, order: OrderFacts) -> RoundStart | None:
        """Receive what an order's round starts from. Return None if the round has ended."""
        path = f"/api/v1/client/rounds/{order['serial']}/parameters"
        try:
            raw = self._connection.download(path, self._headers())
        except (Conflict, NotFound) as error:
            self._update_not_counted(order, error)
            return None
        if hashlib.sha256(raw).hexdigest() != order["parameters"]["sha256"]:
            raise _refusal("the received parameters do not have the SHA-256 hash in the signed order")
        return decode_start(raw, self.trainer.layout())

    def _send_rest(self, order: OrderFacts, raw: bytes) -> None:
        """Send the rest of an update that was being sent when this client ended. Its state is stored already."""
        if self._send(order, raw, begun=True):
            self._folder.finish_order(order["serial"], order["phase"] + order["round"])
            self._rounds += 1
            self._report(f"round {order['round']}: the update from before this client's restart is sent")

    def _send(self, order: OrderFacts, raw: bytes, begun: bool = False) -> bool:
        """Send an update; return whether it was in time. `begun`: a part of it may have been sent before."""
        path = f"/api/v1/client/rounds/{order['serial']}/update"
        try:
            self._record_consent(order, raw)
            self._connection.upload(path, raw, self._headers(), begun=begun)
        except (Conflict, NotFound) as error:
            self._update_not_counted(order, error)
            return False
        return True

    def _add_to_sum(self, order: OrderFacts, reply: LocalReply, start: RawTensor) -> bool:
        """Take part in the sum of a secure round; return whether this client's update is in it.

        `start`: the parameters from which it has trained, as far as it shares them.
        """
        update = reply.w.array().astype(np.float64) - start.array()
        numbers = ClientNumbers(update, reply.n, reply.loss, reply.samples)
        why = self._secure.send(order, numbers, self._joined(), self._verified_text)
        if why is not None:
            self._folder.finish_order(order["serial"], None)
            self._report(f"round {order['round']}: this client's update is not in the sum: {why}")
        return why is None

    def _record_consent(self, order: Mapping[str, Any], sent: bytes) -> None:
        self._consent.record(order, sent, self._headers(), self._verified_text)

    def _verified_text(self, text: str, signature: str) -> OrderFacts:
        return verified(text, signature, self._public_key, self.token.fingerprint)

    def _update_not_counted(self, order: OrderFacts, error: RaypsError) -> None:
        if error.data.get("code") not in ("late", "no_order", "not_asked"):
            raise error
        self._folder.finish_order(order["serial"], None)
        if "trained" not in order or time.monotonic() < order["ends"]:  # not late: e.g. the job was restored
            self._report(f"round {order['round']}: {error}")
            return
        deadline = order["strategy"].get("deadline", DEADLINE)
        self._report(
            f"round {order['round']}: the update was too late and not counted: training took {order['trained']:.1f} s, "
            f"and {order['seconds']:.1f} s were left of the round's deadline of {deadline:g} s. In the job's strategy, "
            "raise deadline, or lower local_epochs or local_steps"
        )

    def _keep_parameters(self) -> None:
        """Store the job's last parameters, from which this client's personal model is made."""
        try:
            facts = fetch_global(self._connection, self.token, self._headers(), self._folder.folder)
        except (NotFound, Unreachable) as error:  # the job has no checkpoint, or the service has ended too
            self._report(f"the job's parameters were not fetched: {error.message}")
            return
        self._report(
            f"the job's parameters after {facts['round']} rounds are stored with this client's state: `rayps personal` "
            "makes and evaluates its personal model"
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


def _refusal(why: str) -> Unauthorized:
    return Unauthorized(
        f"this client refused an order of the service and executed no part of it: {why}", code="refused"
    )

"""The folder through which the service and a job's worker exchange files. Real clients call the service only.

    door.json                    written by the driver; a machine that cannot read this file does not have the folder
    members/NUMBER.json          each client that has joined; written by the service
    seen/NUMBER                  the time of a client's last request; by the service
    left/NUMBER                  each client that has left; by the service
    revoked/NUMBER               each client whose token or certificate was revoked; by the service
    excluded/NUMBER.json         each client that is asked no more, why, and the tokens that this is for; by the worker
    void_counts.json             for how many void rounds clients are blamed; by the worker
    away/NUMBER                  each client that has said that it takes part in no round now; by the service
    starts.json                  each start of the job: its first round and its first order; by the worker
    standing.json                the clients for which the job waits, as text; by the worker
    summed                       exists when a secure round of training has a sum; by the worker
    void.json                    why the last void round of training is void; by the worker
    rounds/SERIAL/order.json     the round's clients, facts and deadline; by the worker
    rounds/SERIAL/parameters.safetensors   the parameters with which the clients start; by the worker
    rounds/SERIAL/.NUMBER-HASH   the part of an update that has arrived, and the whole update's hash; by the service
    rounds/SERIAL/inbox/NUMBER   each client's update; by the service
    rounds/SERIAL/taken/NUMBER   the updates after the worker has closed the round and renamed `inbox` to `taken`
    rounds/SERIAL/verdicts.json  why updates of the round did not count; by the worker
    rounds/SERIAL/accepted/      NUMBER-HASH for each update whose client has signed the data-use statement
    acceptances/NUMBER.jsonl     what each client has signed (`rayps_client.members.acceptance_file`); by the service
    rounds/SERIAL/stages/        the messages of a secure round (`rayps.federated.remote.stage_folder`)
    rounds/SERIAL/outcome.json   how a secure round has ended: why it is void, and who has dropped out; by the worker
    parameters-ID.safetensors    the newest parameters of asynchronous rounds, to which orders link; by the worker ID
    asked/NUMBER.json            the newest order of one client in asynchronous rounds; by the worker

Every file is created complete, by rename or link. The rename of a round's inbox closes the round: an update is either
in the inbox or late, never both, and two workers cannot both take the update. A serial number is used once. If a worker
is lost and the job returns to a checkpoint, the repeated round has a new serial, and updates for the old serial are
refused.

In synchronous rounds one order is open, for all clients of the round. In asynchronous rounds many are open, each for
one client, in a folder of the same form (`rayps.federated.remote.client_orders`). So the guarantees above hold for each
order alone: its inbox has one update at most, and its rename closes this order only. `parameters.safetensors` is then a
hard link, so that the parameters of a round stay on the disk as long as one order refers to them. The worker deletes
the link when the update has counted, or is refused: an order with parameters is open, or has an update to be counted.
After a restart the worker finds these orders, so an update that has arrived still counts, also one whose order the lost
worker had closed: the driver uses the results of one worker only. The new worker closes, with a verdict, the orders of
rounds after the checkpoint to which the job has returned.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rayps_client.errors import Conflict, NotFound, Unauthorized
from rayps_client.exchange.signed_orders import OrderFacts
from rayps_client.secure.protocol import Stage
from rayps_client.values import Keywords

from rayps.core.job.records import read_json
from rayps.federated.remote.blamed_clients import VoidCounts
from rayps.federated.remote.client_state import GONE, ClientState
from rayps.federated.remote.stage_folder import StageFolder

FOLDER = "clients"  # name of the mailbox folder, in the job's folder
AWAY_SECONDS = 20.0  # a client that has sent no request for this many seconds is not asked
PARAMETERS = "parameters.safetensors"
_KEPT_ROUNDS = 20  # the folders of older closed rounds are deleted


@dataclass(frozen=True, slots=True)
class JoinedClient:
    """A client that has joined. `key` is the hash of its secret, and `token` is the id of the token that it used."""

    number: int
    name: str
    key: str
    token: str
    joined_at: float
    samples: int


@dataclass(frozen=True, slots=True)
class RoundOrder:
    """The order of a round: the clients that the worker asks, and the facts that the service signs for each of them."""

    serial: int
    round: int
    sampled: dict[int, str]  # names of the asked clients, by number
    begun: float  # seconds since the epoch
    deadline: float  # seconds after `begun`
    most_bytes: int  # largest size of an update, in bytes
    facts: OrderFacts


@dataclass(frozen=True, slots=True)
class SecureOutcome:
    """How a secure round has ended: why it is void (None: it is not), and why clients have dropped out, by number."""

    void: str | None
    dropped: dict[int, str]


class Mailbox:
    """The mailbox folder of one job. The methods for the service come first, then those for the driver and worker."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._rounds = folder / "rounds"

    # ---- members

    def join(self, name: str, key: str, token: str, samples: int) -> JoinedClient:
        """Add a client and return it. A client that joined before with the same name and key gets the same number.

        Raises:
            Conflict: another client has that name.
        """
        hashed = hashlib.sha256(key.encode()).hexdigest()
        while True:
            known = self.members()
            for member in known:
                if member.name == name:
                    if not secrets.compare_digest(member.key, hashed):
                        raise Conflict(
                            f"another client has joined as {name!r}: give this client another --name, or, if it is the "
                            "same client, its earlier folder (--state)",
                            status=409,
                            code="name_taken",
                        )
                    back = JoinedClient(**(asdict(member) | {"token": token, "samples": samples}))
                    write_json(self._member(member.number), asdict(back))
                    for name in ("left", "away", "revoked"):
                        (self.folder / name / str(member.number)).unlink(missing_ok=True)
                    self.record_request(member.number)
                    return back
            number = max((member.number for member in known), default=-1) + 1
            made = JoinedClient(number, name, hashed, token, time.time(), samples)
            if write_json(self._member(number), asdict(made), new=True):
                self.record_request(number)
                return made

    def members(self) -> list[JoinedClient]:
        """Return all clients that have ever joined, in the order of their numbers."""
        found = [read_json(path) for path in sorted((self.folder / "members").glob("*.json"))]
        return [JoinedClient(**facts) for facts in found if facts is not None]

    def member(self, number: int, key: str) -> JoinedClient:
        """Return the client with this number. Raises Unauthorized if there is none, or if it has another key."""
        facts = read_json(self._member(number))
        hashed = hashlib.sha256(key.encode()).hexdigest()
        if facts is None or not secrets.compare_digest(str(facts["key"]), hashed):
            raise Unauthorized(
                f"no client with number {number} and the given key has joined this job: join first", status=401
            )
        return JoinedClient(**facts)

    def record_request(self, number: int) -> None:
        """Record that a client has sent a request now."""
        _touch(self.folder / "seen" / str(number))

    def leave(self, number: int) -> None:
        """Record that a client has left. The client may join again."""
        _touch(self.folder / "left" / str(number))

    def set_away(self, number: int, away: bool) -> None:
        """Record whether a client says that it takes part in no round now, for example outside of its hours."""
        path = self.folder / "away" / str(number)
        if away:
            _touch(path)
        else:
            path.unlink(missing_ok=True)

    def is_away(self, number: int) -> bool:
        """Return whether a client has said that it takes part in no round now."""
        return (self.folder / "away" / str(number)).exists()

    def takes_no_part(self, number: int) -> bool:
        """Return whether a client has left, was revoked, or has said that it takes part in no round now."""
        return self.state(number) in GONE or self.is_away(number)

    def last_seen(self, number: int) -> float:
        """Return the seconds since the client's last request, or infinity if there was none."""
        try:
            return max(0.0, time.time() - (self.folder / "seen" / str(number)).stat().st_mtime)
        except OSError:
            return float("inf")

    def state(self, number: int) -> ClientState:
        """Return whether a client is connected ("here"), is silent or says so ("away"), or why it is asked no more.

        Only clients that are connected are asked.
        """
        if (self.folder / "revoked" / str(number)).exists():
            return "revoked"
        if (self.folder / "left" / str(number)).exists():
            return "left"
        if self.exclusion(number) is not None:
            return "excluded"
        return "here" if self.last_seen(number) < AWAY_SECONDS and not self.is_away(number) else "away"

    def exclude(self, number: int, why: str) -> None:
        """Ask a client no more, until it joins with another token or certificate. By the worker."""
        path = self.folder / "excluded" / f"{number}.json"
        tokens = (read_json(path) or {}).get("tokens", [])
        member = read_json(self._member(number)) or {}
        write_json(path, {"why": why, "tokens": [*tokens, member.get("token")]})

    def exclusion(self, number: int) -> str | None:
        """Return why a client is asked no more, or None if it is not excluded with its present token."""
        found = read_json(self.folder / "excluded" / f"{number}.json")
        if found is None:
            return None
        token = (read_json(self._member(number)) or {}).get("token")
        return str(found["why"]) if token in found["tokens"] else None

    def _member(self, number: int) -> Path:
        return self.folder / "members" / f"{number:08}.json"

    # ---- rounds, for the service

    def order(self, serial: int) -> RoundOrder | None:
        """Return the order with this serial number, open or closed, or None if there is none."""
        facts = read_json(self.round_folder(serial) / "order.json")
        return None if facts is None else _order(facts)

    def newest_for(self, number: int) -> RoundOrder | None:
        """Return the newest order, open or closed, that asks this client, or None if there is none."""
        found = self.newest()
        if found is not None and number in found.sampled:
            return found
        asked = read_json(self.folder / "asked" / f"{number}.json")
        return None if asked is None else self.order(int(asked["serial"]))

    def newest(self) -> RoundOrder | None:
        """Return the order of the newest round, open or closed, or None before the first round."""
        serials = self.serials()
        return self.order(serials[-1]) if serials else None

    def is_open(self, serial: int) -> bool:
        """Return whether the round still accepts updates."""
        return (self.round_folder(serial) / "inbox").is_dir()

    def has_update(self, serial: int, number: int) -> bool:
        """Return whether the client's update for the round has been received."""
        folder = self.round_folder(serial)
        return (folder / "inbox" / str(number)).exists() or (folder / "taken" / str(number)).exists()

    def parameters(self, serial: int) -> Path:
        """Return the path of the parameters of an open round. Raises Conflict if the round is closed."""
        path = self.round_folder(serial) / PARAMETERS
        if not self.is_open(serial) or not path.is_file():
            raise self._too_late(serial)
        return path

    def part(self, serial: int, number: int, digest: str) -> Path:
        """Return the path of the file into which the service writes an update before it calls `deliver`.

        `digest` is the SHA-256 of the whole update. Parts of other updates of this client are deleted. Raises Conflict
        if the round is closed.
        """
        if not self.is_open(serial):
            raise self._too_late(serial)
        found = self.round_folder(serial) / f".{number}-{digest}"
        for other in self.round_folder(serial).glob(f".{number}-*"):
            if other != found:
                other.unlink(missing_ok=True)
        return found

    def record_acceptance(self, serial: int, number: int, digest: str) -> None:
        """Record that a client has signed the job's data-use statement for an update with this SHA-256.

        Raises:
            Conflict: the round is closed.
        """
        if not self.is_open(serial):
            raise self._too_late(serial)
        _touch(self.round_folder(serial) / "accepted" / f"{number}-{digest}")

    def has_acceptance(self, serial: int, number: int, digest: str) -> bool:
        """Return whether a client has signed the job's data-use statement for an update with this SHA-256."""
        return (self.round_folder(serial) / "accepted" / f"{number}-{digest}").exists()

    def update_bytes(self, serial: int, number: int) -> int:
        """Return the size of the client's update in the round; 0 if there is none, or if its bytes were deleted."""
        for name in ("inbox", "taken"):
            try:
                return (self.round_folder(serial) / name / str(number)).stat().st_size
            except FileNotFoundError:
                continue
        return 0

    def deliver(self, serial: int, number: int, part: Path) -> bool:
        """Move a complete update from the file `part` into the round.

        Return False if the round already has an update of this client. The earlier update then counts, and `part` is
        deleted.

        Raises:
            Conflict: the round is closed.
        """
        try:
            os.link(part, self.round_folder(serial) / "inbox" / str(number))
        except FileExistsError:
            return False
        except FileNotFoundError:
            if self.has_update(serial, number):
                return False
            raise self._too_late(serial) from None
        finally:
            part.unlink(missing_ok=True)
        return True

    def verdict(self, serial: int, number: int) -> str | None:
        """Return the reason why a client's update of a closed round did not count.

        Return None if the update counted, or if the verdicts are not written yet or are deleted.
        """
        found = (read_json(self.round_folder(serial) / "verdicts.json") or {}).get(str(number))
        return None if found is None else str(found)

    def outcome(self, serial: int) -> SecureOutcome | None:
        """Return how a secure round has ended, or None if it has not, or was broken off."""
        found = read_json(self.round_folder(serial) / "outcome.json")
        if found is None:
            return None
        return SecureOutcome(found["void"], {int(number): str(why) for number, why in found["dropped"].items()})

    def withdraw(self, number: int, what: str) -> None:
        """Exclude a client: do not ask it again, and delete its updates of open orders.

        `what` was revoked: its token, or its certificate.
        """
        _touch(self.folder / "revoked" / str(number))
        for serial in self.serials():
            (self.round_folder(serial) / "inbox" / str(number)).unlink(missing_ok=True)
        order = self.newest()
        if order is not None:
            self.stages(order.serial).revoke(number, what)

    def void(self, order: RoundOrder, number: int) -> Conflict | None:
        """Return the refusal of a client's message of a secure round that is void; None if the round is not.

        A client that has dropped out before is refused for that reason, which its stage knows.
        """
        outcome = self.outcome(order.serial)
        if outcome is None or outcome.void is None or number in outcome.dropped:
            return None
        return Conflict(f"round {order.round} is void: {outcome.void}", status=409, code="late")

    def _too_late(self, serial: int) -> Exception:
        if self.round_folder(serial).is_dir():
            return Conflict(
                f"order {serial} is closed (its deadline has passed, or the job returned to a checkpoint): this "
                "update is too late and does not count",
                status=409,
                code="late",
            )
        return NotFound(f"there is no order {serial}", status=404, code="no_order")

    def standing(self) -> str | None:
        """Return as text which clients the job waits for, or None if the job waits for no client."""
        found = read_json(self.folder / "standing.json") or {}
        return str(found["waits"]) if found.get("waits") else None

    # ---- for the driver and the worker

    def record_secure_round(self, void: str | None, refused: str = "") -> None:
        """Record that a secure round of training has a sum, or why it is void, and which clients refused which."""
        if void is None:
            _touch(self.folder / "summed")
        else:
            write_json(self.folder / "void.json", {"why": void, "refused": refused})

    def void_counts(self) -> VoidCounts:
        """Return for how many void rounds clients are blamed so far."""
        return VoidCounts.read(read_json(self.folder / "void_counts.json"))

    def write_void_counts(self, counts: VoidCounts) -> None:
        """Store for how many void rounds clients are blamed."""
        write_json(self.folder / "void_counts.json", counts.facts())

    def never_summed(self) -> tuple[str, str] | None:
        """Return why the last secure round of training is void, and which clients refused which in it ("": none did).

        Return None if a round has a sum, or if none ran.
        """
        if (self.folder / "summed").exists():
            return None
        found = read_json(self.folder / "void.json")
        return None if found is None else (str(found["why"]), str(found.get("refused", "")))

    def prepare(self) -> None:
        """Create the folder and its subfolders. The driver calls this before the worker starts."""
        for name in ("members", "seen", "left", "rounds"):
            (self.folder / name).mkdir(parents=True, exist_ok=True, mode=0o700)
        write_json(self.folder / "door.json", {"host": os.uname().nodename})

    def reachable(self) -> bool:
        """Return whether this machine has the folder, and this process may write into it."""
        return (self.folder / "door.json").is_file() and os.access(self._rounds, os.W_OK)

    def write_waits(self, waits: str | None) -> None:
        """Write, as text, which clients the job waits for. None means that the job waits for no client."""
        if waits != self.standing():
            write_json(self.folder / "standing.json", {"waits": waits, "time": time.time()})

    def starts(self, round: int, first: bool, serial: int | None = None) -> list[list[int]]:
        """Return each start of the job as (its first round, the serial of its first order).

        With `first`, the job has just started at `round`: add this start, with the serial that its first order gets, or
        with `serial`, the first order of `round` that continues.
        """
        known = self.known_starts()
        if first:
            before = self.newest()
            is_open = before is not None and self.is_open(before.serial)
            following = max(self.serials(), default=0) + (0 if is_open else 1)
            known = [*known, [round, following if serial is None else serial]]
            write_json(self.folder / "starts.json", {"starts": known})
        return known

    def known_starts(self) -> list[list[int]]:
        """Return each start of the job so far, as `starts` does."""
        found: list[list[int]] = (read_json(self.folder / "starts.json") or {}).get("starts", [])
        return found

    def open_round(
        self, facts: OrderFacts, sampled: dict[int, str], deadline: float, most_bytes: int, parameters: bytes
    ) -> RoundOrder:
        """Open a new round, and return its order.

        If the newest round is open and has the same facts and parameters, bit for bit, return its order instead. The
        updates that this round has received still count.
        """
        digest = hashlib.sha256(parameters).hexdigest()
        facts = {**facts, "parameters": {"sha256": digest, "bytes": len(parameters)}}
        before = self.newest()
        if before is not None and self.is_open(before.serial) and _same(before.facts, facts):
            return before
        for serial in self.serials():
            if self.is_open(serial):
                self.close_round(serial)
        if before is not None:
            self.stages(before.serial).delete()
        return self.create(facts, sampled, deadline, most_bytes, lambda path: path.write_bytes(parameters))

    def create(
        self,
        facts: OrderFacts,
        sampled: dict[int, str],
        deadline: float,
        most_bytes: int,
        write: Callable[[Path], object],
    ) -> RoundOrder:
        """Create an open order with the next serial number, and return it. `write` makes the file of the parameters."""
        serial = max(self.serials(), default=0) + 1
        order = RoundOrder(
            serial, int(facts["round"]), sampled, time.time(), deadline, most_bytes, {**facts, "serial": serial}
        )
        making = self._rounds / f".{serial}-{secrets.token_hex(4)}"
        (making / "inbox").mkdir(parents=True, mode=0o700)
        if "secure" in facts:
            StageFolder(making).open(Stage.ADVERTISE)  # open before any client can have the order
        write(making / PARAMETERS)
        write_json(making / "order.json", asdict(order))
        making.rename(self.round_folder(serial))
        self._delete_old_rounds(serial)
        return order

    def arrived(self, serial: int) -> set[int]:
        """Return the numbers of the clients whose updates are in the round's inbox."""
        try:
            return {int(path.name) for path in (self.round_folder(serial) / "inbox").iterdir()}
        except FileNotFoundError:
            return set()

    def close_round(self, serial: int) -> dict[int, Path]:
        """Close a round. Return a dict from client to the file of its update, or {} if another worker has closed it."""
        folder = self.round_folder(serial)
        try:
            (folder / "inbox").rename(folder / "taken")
        except FileNotFoundError:
            return {}
        (folder / PARAMETERS).unlink(missing_ok=True)
        return {int(path.name): path for path in sorted((folder / "taken").iterdir())}

    def write_verdicts(self, serial: int, verdicts: Mapping[int, str]) -> None:
        """Write for each client in `verdicts` why its update did not count. Delete all updates of the round."""
        folder = self.round_folder(serial)
        if verdicts:
            write_json(folder / "verdicts.json", {str(number): reason for number, reason in verdicts.items()})
        for path in (folder / "taken").iterdir():
            path.write_bytes(b"")  # the empty file shows that the client's update was received
        for path in folder.glob(".*-*"):
            path.unlink(missing_ok=True)  # an incomplete update, of which no more will arrive

    def write_outcome(self, serial: int, outcome: SecureOutcome) -> None:
        """Write how a secure round has ended, before its messages are deleted."""
        write_json(self.round_folder(serial) / "outcome.json", asdict(outcome))

    def _delete_old_rounds(self, serial: int) -> None:
        for old in self.serials():
            if old <= serial - _KEPT_ROUNDS and not (self.round_folder(old) / PARAMETERS).exists():
                for path in sorted(self.round_folder(old).rglob("*"), reverse=True):
                    path.rmdir() if path.is_dir() else path.unlink()
                self.round_folder(old).rmdir()

    def serials(self) -> list[int]:
        """Return the serial numbers of the stored orders, open and closed, in ascending order."""
        try:
            return sorted(int(path.name) for path in self._rounds.iterdir() if path.name.isdigit())
        except FileNotFoundError:
            return []

    @property
    def job(self) -> str:
        """The job's id, which is the name of the job's folder."""
        return self.folder.parent.name

    def stages(self, serial: int) -> StageFolder:
        """Return the stages of a secure round."""
        return StageFolder(self.round_folder(serial))

    def round_folder(self, serial: int) -> Path:
        """Return the folder of the order with this serial number."""
        return self._rounds / str(serial)


def _same(one: OrderFacts, other: OrderFacts) -> bool:
    """Return whether two orders are equal, including the checksum of their parameters."""
    plain = [
        json.loads(json.dumps({k: v for k, v in each.items() if k not in ("serial", "starts")}))
        for each in (one, other)
    ]
    return bool(plain[0] == plain[1])


def _order(facts: Keywords) -> RoundOrder:
    return RoundOrder(**(facts | {"sampled": {int(number): name for number, name in facts["sampled"].items()}}))


def write_json(path: Path, value: Keywords, new: bool = False) -> bool:
    """Write `value` to a JSON file, atomically. Return whether the file was written.

    With `new`, the file is written only if it does not exist.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with part.open("w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    if not new:
        part.replace(path)
        return True
    try:
        os.link(part, path)
    except FileExistsError:
        return False
    finally:
        part.unlink()
    return True


def _touch(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.touch()

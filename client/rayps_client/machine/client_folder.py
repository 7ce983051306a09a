"""The folder of a real federated client on its own disk. A client that is killed at any moment can continue from it.

    identity.json              the client's key (created by `ClientFolder`, mode 0600) progress.json              the
    newest order that was started, and the newest order that is done; the client's number traffic.json               the
    bytes sent and received today (`rayps_client.machine.limits`) state-ROUND.safetensors    the strategy's state of
    this client (SCAFFOLD's c_i, Ditto's model) after a round update-ORDER               the update that is being sent,
    after its SHA-256 hash: a restarted client sends the rest global.safetensors         the job's parameters, from
    which a personal model is made (`rayps_client.exchange.global_model`)

A state never leaves this machine. The folder has the states of all rounds to which the job may return. A repeated round
therefore starts with the same state as at first.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from rayps_client.errors import ConfigError, Conflict
from rayps_client.exchange.raw_tensors import decode_tensors, encode_tensors, metadata_of, metadata_of_file
from rayps_client.machine.private_file import private_write
from rayps_client.trainers.local_trainer import RawTensors
from rayps_client.values import Json, Keywords

_DIGEST = hashlib.sha256().digest_size
Starts = Sequence[
    Sequence[int]
]  # for each start and restart of the job: (its first round, the number of its first order)


class ClientFolder:
    """The folder of one client in one job. Only the process that has locked the folder may use it."""

    def __init__(self, folder: Path) -> None:
        """Open and lock the folder. Raises Conflict if another process of this machine uses the folder."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.folder = folder
        self._lock: IO[str] = (folder / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise Conflict(
                f"another `rayps client` uses {folder}: it is the same client of the same job. Let that process "
                "continue, or give another --name or --state"
            ) from error
        identity = _read_json(folder / "identity.json")
        self.key = str(identity.get("key") or "")
        if not self.key:
            self.key = secrets.token_urlsafe(32)
            private_write(folder / "identity.json", json.dumps({"key": self.key}))
        progress = _read_json(folder / "progress.json")
        self.started, self.finished = int(progress.get("begun", 0)), int(progress.get("settled", 0))
        self.last: int | None = progress.get("round")  # the round of the newest accepted update
        self.number: int | None = progress.get("number")  # this client's number in the job; None before it has joined
        # the serial and the round of an update of which this client does not know yet whether it has arrived
        self.sending: tuple[int, int] | None = tuple(progress["sending"]) if progress.get("sending") else None

    def record_number(self, number: int) -> None:
        """Record the number that this client has in the job."""
        if number != self.number:
            self.number = number
            self._save_progress()

    def start_order(self, serial: int) -> None:
        """Record that the client starts order `serial`. From now on, the client refuses older orders."""
        self.started = serial
        self._save_progress()

    def start_sending(self, serial: int, round: int) -> None:
        """Record that the update of order `serial` is about to be sent. The new state is stored after this call."""
        self.sending = (serial, round)
        self._save_progress()

    def finish_order(self, serial: int, round: int | None) -> None:
        """Record that order `serial` is done. `round`: its round; None if its update was not accepted.

        If the update was not accepted, delete the state that was stored when it was sent.
        """
        if round is None and self.sending is not None:
            self.delete_state(self.sending[1])
        self.finished, self.last, self.sending = serial, round, None
        self._save_progress()
        self._drop_updates()

    def keep_update(self, serial: int, raw: bytes) -> None:
        """Store the update of order `serial` until the order is done, if there is room for it. Call it before sending.

        The update has left nothing out that the client stores: its new state was stored before.
        """
        self._drop_updates()
        path = self.folder / f"update-{serial}"
        part = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
        try:
            with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(hashlib.sha256(raw).digest())
                file.write(raw)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except OSError:  # such as a full disk: after a restart the client trains again
            part.unlink(missing_ok=True)

    def kept_update(self, serial: int) -> bytes | None:
        """Return the update of order `serial` that was being sent when this client ended, or None."""
        try:
            found = (self.folder / f"update-{serial}").read_bytes()
        except OSError:
            return None
        digest, raw = found[:_DIGEST], found[_DIGEST:]
        return raw if hashlib.sha256(raw).digest() == digest else None

    def _drop_updates(self) -> None:
        for path in (*self.folder.glob("update-*"), *self.folder.glob(".update-*")):
            path.unlink(missing_ok=True)

    def load_state(self, round: int, strategy: str, starts: Starts) -> RawTensors:
        """Return the strategy's state of this client before round `round`, or {} if there is none."""
        self._delete_invalid(starts)
        return newest_state(self.folder, round, strategy, starts)

    def save_state(self, round: int, serial: int, strategy: str, state: RawTensors, since: int) -> None:
        """Store the state after round `round`, which order `serial` asked for.

        Of the states before round `since`, to which the job never returns, keep only the newest.
        """
        part = self.folder / f".state-{secrets.token_hex(4)}"
        with part.open("wb") as file:
            file.write(encode_tensors(state, {"strategy": strategy, "serial": str(serial)}))
            file.flush()
            os.fsync(file.fileno())
        part.replace(self._state_path(round))
        for at in [at for at in self._rounds() if at < since][:-1]:
            self._state_path(at).unlink()

    def _delete_invalid(self, starts: Starts) -> None:
        """Delete each invalid state: after it was stored, the job restarted at the state's round or an earlier one."""
        for at in self._rounds():
            if _is_invalid(at, metadata_of_file(self._state_path(at)), starts):
                self._state_path(at).unlink()

    def delete_state(self, round: int) -> None:
        """Delete the state after a round whose update was rejected."""
        self._state_path(round).unlink(missing_ok=True)

    def read_facts(self, name: str) -> Keywords:
        """Return the facts in the JSON file `name` of this folder, or {} if there is no such file."""
        return _read_json(self.folder / name)

    def write_facts(self, name: str, facts: Mapping[str, Json]) -> None:
        """Write facts into the JSON file `name` of this folder, atomically."""
        private_write(self.folder / name, json.dumps(facts))

    def close(self) -> None:
        """Unlock the folder."""
        self._lock.close()

    def _save_progress(self) -> None:
        facts = {
            "begun": self.started,
            "settled": self.finished,
            "round": self.last,
            "number": self.number,
            "sending": self.sending,
        }
        private_write(self.folder / "progress.json", json.dumps(facts))

    def _rounds(self) -> list[int]:
        return _rounds_in(self.folder)

    def _state_path(self, round: int) -> Path:
        return self.folder / f"state-{round}.safetensors"


def newest_state(folder: Path, round: int, strategy: str, starts: Starts) -> RawTensors:
    """Return a client's state before round `round`, from its folder, which may be locked; {} if there is none."""
    for at in reversed(_rounds_in(folder)):
        if at < round:
            raw = (folder / f"state-{at}.safetensors").read_bytes()
            facts = metadata_of(raw)
            if not _is_invalid(at, facts, starts):
                return decode_tensors(raw) if facts.get("strategy") == strategy else {}
    return {}


def identity_of(folder: Path) -> tuple[int, str]:
    """Return a client's number and key from its folder, which may be locked.

    Raises ConfigError if no client has joined a job from this folder.
    """
    key, number = _read_json(folder / "identity.json").get("key"), _read_json(folder / "progress.json").get("number")
    if not isinstance(key, str) or not isinstance(number, int):
        raise ConfigError(
            f"{folder} is not the folder of a client that has joined: check --state, --job and --name, or join with "
            "`rayps client`",
            field="state",
        )
    return number, key


def _rounds_in(folder: Path) -> list[int]:
    return sorted(int(path.stem.partition("-")[2]) for path in folder.glob("state-*.safetensors"))


def _is_invalid(at: int, facts: Mapping[str, str], starts: Starts) -> bool:
    """Return whether the job restarted at round `at` or an earlier one after the state of `facts` was stored."""
    serial = int(facts.get("serial", 0))
    return any(began <= at and serial < first for began, first in starts)


def _read_json(path: Path) -> Keywords:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}

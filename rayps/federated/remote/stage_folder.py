"""The files of the stages of a secure round, in the round's folder of the mailbox.

    stages/STAGE/inbox/NUMBER     each client's message; by the service
    stages/STAGE/parts/           NUMBER-HASH: what has arrived of a message with that hash; until the stage is closed
    stages/STAGE/taken/NUMBER     the messages after the worker has closed the stage and renamed `inbox` to `taken`
    stages/STAGE/answers/NUMBER   the worker's answer to each client that takes part in the next stage
    stages/withdrawn/NUMBER       why a client takes no further part; by the service
    stages/refused/NUMBER         the clients of which a message failed a check of this client; by the service

    stages/leases/NUMBER          a byte for each time that a client has renewed its lease; by the service

A stage is closed by the rename of its inbox, as a round is: a message is either in time or late, never both. Who has
sent nothing by then has dropped out: it gets no answer, and its later messages are refused before they are read. The
answers of a stage appear at once, by the rename of their folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rayps_client.errors import Conflict
from rayps_client.secure.lease import RENEW_SECONDS
from rayps_client.secure.protocol import Answer, Stage

_ORDER = tuple(Stage)
_SOONEST = 0.75  # the part of `RENEW_SECONDS` after which a client may renew its lease again


class StageFolder:
    """The stages of one round. The methods for the service come first, then those for the worker."""

    def __init__(self, round: Path) -> None:
        """`round`: the round's folder in the mailbox."""
        self._folder = round / "stages"

    # ---- for the service

    def part(self, stage: Stage, number: int, digest: str) -> Path:
        """Return the path of the file into which the service writes a message before it calls `deliver`.

        `digest` is the SHA-256 of the whole message. Parts of other messages of this client are deleted. The folder of
        the parts is deleted when the stage is closed: then nothing more can be written.

        Raises:
            Conflict: the stage is not open, or this client has dropped out.
        """
        inbox, parts = self._folder / stage / "inbox", self._folder / stage / "parts"
        if not self._takes_part(stage, number) or not inbox.is_dir():
            raise self._too_late(stage)
        with contextlib.suppress(FileNotFoundError):
            parts.mkdir(exist_ok=True, mode=0o700)
        if not inbox.is_dir():  # closed in the meantime
            shutil.rmtree(parts, ignore_errors=True)
            raise self._too_late(stage)
        found = parts / f"{number}-{digest}"
        try:
            others = [other for other in parts.glob(f"{number}-*") if other != found]
        except FileNotFoundError:  # closed in the meantime
            raise self._too_late(stage) from None
        for other in others:
            other.unlink(missing_ok=True)
        return found

    def has_message(self, stage: Stage, number: int) -> bool:
        """Return whether a client's message of a stage has been received."""
        return self.message_bytes(stage, number) is not None

    def message_bytes(self, stage: Stage, number: int) -> int | None:
        """Return the size of a client's message of a stage, or None if it has not been received."""
        for name in ("inbox", "taken"):
            with contextlib.suppress(FileNotFoundError):
                return (self._folder / stage / name / str(number)).stat().st_size
        return None

    def deliver(self, stage: Stage, number: int, part: Path) -> bool:
        """Move a complete message from the file `part` into the stage.

        Return False if there is one of this client: the earlier one counts. `part` is deleted.

        Raises:
            Conflict: the stage was closed in the meantime.
        """
        try:
            os.link(part, self._folder / stage / "inbox" / str(number))
        except FileExistsError:
            return False
        except FileNotFoundError:
            if self.has_message(stage, number):
                return False
            raise self._too_late(stage) from None
        finally:
            part.unlink(missing_ok=True)
        return True

    def answer(self, stage: Stage, number: int) -> Answer | None:
        """Return the answer to a client, or None if the stage has no answers yet.

        Raises:
            Conflict: the client has dropped out, or the round has ended.
        """
        answers = self._folder / stage / "answers"
        published = answers.is_dir()  # asked before: the answers may be published during this call
        try:
            found: Answer = json.loads((answers / str(number)).read_bytes())
        except FileNotFoundError:
            if published or not self._folder.is_dir():
                raise self._too_late(stage) from None
            return None
        return found

    def withdraw(self, number: int, reason: str, refused: Sequence[int] = ()) -> None:
        """Record why a client takes no further part, so that no stage waits for it, and which clients it refuses."""
        if self._folder.is_dir():
            if refused:  # first: a stage may be closed as soon as the client has withdrawn
                _write(self._folder / "refused" / str(number), json.dumps(sorted(refused)).encode())
            _write(self._folder / "withdrawn" / str(number), reason.encode())

    def renew(self, number: int) -> None:
        """Record that a client is in the stages of the round now. A renewal soon after another one does not count."""
        path = self._folder / "leases" / str(number)
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime < RENEW_SECONDS * _SOONEST:
                return
        with contextlib.suppress(FileNotFoundError):  # the round has ended
            path.parent.mkdir(exist_ok=True, mode=0o700)
            with path.open("ab") as file:
                file.write(b".")

    def revoke(self, number: int, what: str) -> None:
        """Let a client take no further part, because `what` was revoked, and delete its messages of an open stage."""
        self.withdraw(number, f"its {what} was revoked")
        for stage in Stage:
            (self._folder / stage / "inbox" / str(number)).unlink(missing_ok=True)
            for part in (self._folder / stage / "parts").glob(f"{number}-*"):
                part.unlink(missing_ok=True)

    def _takes_part(self, stage: Stage, number: int) -> bool:
        """Return whether the client has an answer of an earlier stage, as each stage but the first requires."""
        before = _ORDER[: _ORDER.index(stage)]
        given = [each for each in before if (self._folder / each / "answers").is_dir()]
        if not before:
            return True
        return bool(given) and (self._folder / given[-1] / "answers" / str(number)).exists()

    def _too_late(self, stage: Stage) -> Conflict:
        return Conflict(
            f"the stage {stage} of this round is closed, and goes on without this client: its update does not count",
            status=409,
            code="late",
        )

    # ---- for the worker

    def open(self, stage: Stage) -> None:
        """Let clients send messages of a stage, unless it was closed before."""
        if not (self._folder / stage / "taken").exists():
            (self._folder / stage / "inbox").mkdir(parents=True, exist_ok=True, mode=0o700)

    def has_begun(self, stage: Stage) -> bool:
        """Return whether a stage was opened, closed since or not."""
        return (self._folder / stage).is_dir()

    def arrived(self, stage: Stage) -> set[int]:
        """Return the numbers of the clients whose messages of a stage have arrived."""
        for name in ("taken", "inbox"):
            try:
                return {int(path.name) for path in (self._folder / stage / name).iterdir()}
            except FileNotFoundError:
                continue
        return set()

    def is_closed(self, stage: Stage) -> bool:
        """Return whether a stage was closed."""
        return (self._folder / stage / "taken").is_dir()

    def close(self, stage: Stage) -> dict[int, Path]:
        """Close a stage, and delete the parts of messages. A stage may be closed again.

        Return a dict from client to the file of its message.
        """
        folder = self._folder / stage
        if not self.is_closed(stage):
            (folder / "inbox").rename(folder / "taken")
        shutil.rmtree(folder / "parts", ignore_errors=True)
        return {int(path.name): path for path in sorted((folder / "taken").iterdir(), key=lambda path: int(path.name))}

    def publish(self, stage: Stage, answers: Mapping[int, Answer]) -> None:
        """Write the answers of a stage, all at once, unless a worker has written them before."""
        folder = self._folder / stage
        if (folder / "answers").is_dir():
            return
        making = folder / f".answers-{secrets.token_hex(4)}"
        making.mkdir(mode=0o700)
        for number, answer in answers.items():
            (making / str(number)).write_bytes(json.dumps(answer).encode())
        making.rename(folder / "answers")

    def withdrawn(self) -> dict[int, str]:
        """Return why clients take no further part."""
        try:
            return {int(path.name): path.read_text() for path in (self._folder / "withdrawn").iterdir() if _is(path)}
        except FileNotFoundError:
            return {}

    def renewals(self) -> dict[int, int]:
        """Return how often clients have renewed their leases."""
        try:
            return {int(path.name): path.stat().st_size for path in (self._folder / "leases").iterdir()}
        except FileNotFoundError:
            return {}

    def refused(self) -> dict[int, frozenset[int]]:
        """Return, for clients that take no further part, which clients they refuse."""
        try:
            paths = [path for path in (self._folder / "refused").iterdir() if _is(path)]
        except FileNotFoundError:
            return {}
        return {int(path.name): frozenset(json.loads(path.read_bytes())) for path in paths}

    def delete(self) -> None:
        """Delete all messages and answers."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _is(path: Path) -> bool:
    return path.name.isdigit()


def _write(path: Path, value: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    part = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    part.write_bytes(value)
    part.replace(path)

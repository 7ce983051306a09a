"""The ledger of a job's releases: which noised sums may have left the workers. It is append-only and outlives the job.

    ledger.jsonl    one line for each release: the mechanism, the round, the tree, and the unit that is protected (a
                    client or a row). Written, and flushed to the disk, before the release.
    noise.key       the secret key of tree noise (mode 0600); only with tree noise

The ledger is not part of checkpoints: a job that returns to an earlier round keeps the lines of the rounds that it
repeats, and each repetition is charged as another release. A line that was written only in part (a crash) counts as a
release, because nothing excludes that the sum left. Epsilon therefore never falls, whatever ends a process at whatever
moment.

Several runs may share a ledger: each is charged for the releases of all. Releases that protect rows and releases that
protect clients cannot be added, so a run refuses a ledger with the other unit. Lines of earlier versions have no unit,
and are taken for the run's own.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from pathlib import Path
from typing import NamedTuple

from rayps_client.errors import ConfigError
from rayps_client.values import Keywords

from rayps.core.failpoint import passing
from rayps.privacy.mechanism import Mechanism, Spent

FOLDER = "privacy"  # name of the ledger's folder, in the folder of the job or of its checkpoints
LEDGER, KEY = "ledger.jsonl", "noise.key"


class Recorded(NamedTuple):
    """What a ledger has: what all releases have spent, by mechanism, and the number of the next tree."""

    spent: dict[Mechanism, Spent]
    new_tree: int  # one more than that of any recorded release


class ReleaseLedger:
    """The ledger in one folder. Several processes may append to it; each line is written in one call."""

    def __init__(self, folder: Path, unit: str | None = None) -> None:
        """Open or create the ledger of releases that protect a `unit`: "client" or "row"; None if it is only read.

        Raises ConfigError if the folder cannot be written, or has a foreign ledger.
        """
        self.folder, self.path, self.unit = folder, folder / LEDGER, unit
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            _sync(folder)
        except OSError as error:
            raise ConfigError(
                f"the ledger of private releases cannot be written in {folder}: {error.strerror}. Run the job where "
                "this folder is, or put it on a file system that all machines share",
                field="privacy",
            ) from error

    def append(self, mechanism: Mechanism, round: int, tree: int | None = None) -> None:
        """Record a release of round `round`, in tree number `tree`, and wait until the disk has the record.

        Raises OSError if the disk refuses it. The caller must then not release the sum.
        """
        unit = {} if self.unit is None else {"unit": self.unit}
        facts = {"round": round, "tree": tree, "time": time.time(), **unit, "mechanism": mechanism.to_wire()}
        passing("privacy: nothing recorded")
        line = (json.dumps(facts) + "\n").encode()
        self._write(line if self._ends_with_a_line() else b"\n" + line)
        passing("privacy: recorded, not released")

    def spent(self) -> dict[Mechanism, Spent]:
        """Return what all recorded releases have spent, by mechanism: see `read`."""
        return self.read().spent

    def read(self) -> Recorded:
        """Read the ledger once. A damaged line counts as a release.

        Raises ConfigError if a damaged line has no intact one beside it, from which its mechanism would be known; or if
        a release protects another unit than this ledger's.
        """
        found: dict[Mechanism, list[int | None]] = {}
        damaged, last, newest = 0, None, -1
        for line in self._lines():
            try:
                facts: Keywords = json.loads(line)
                tree = facts.get("tree")
                newest = max(newest, -1 if tree is None else int(tree))
                last = Mechanism.from_wire(facts["mechanism"])
                found.setdefault(last, []).append(tree)
            except (ValueError, KeyError, TypeError):
                damaged += 1
                continue
            self._check_unit(facts.get("unit"))
        if damaged and last is None:
            raise ConfigError(
                f"the ledger {self.path} has {damaged} damaged lines and no other: what was released cannot be known. "
                "Start the job anew in another folder",
                field="privacy",
            )
        if damaged and last is not None:
            found[last] += [max((tree for tree in found[last] if tree is not None), default=None)] * damaged
        return Recorded({mechanism: _spent(trees) for mechanism, trees in found.items()}, newest + 1)

    def key(self) -> bytes:
        """Return the secret key of the tree noise, 32 bytes; it is drawn at the first call."""
        path = self.folder / KEY
        if not path.exists():
            part = self.folder / f".{KEY}-{os.getpid()}"
            with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(os.urandom(32))
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):
                os.link(part, path)
            part.unlink()
            _sync(self.folder)
        return path.read_bytes()

    def carry_over(self, earlier: Path) -> int:
        """Append the releases of the ledger in the folder `earlier` that this ledger has not; return their number.

        Its trees get new numbers, since none of them is continued. A second call has no effect.

        Raises OSError if the earlier ledger cannot be read, or this one not be written.
        """
        known = {_identity(line) for line in self._lines()}
        added = [line for line in (earlier / LEDGER).read_bytes().split(b"\n") if line and _identity(line) not in known]
        if added:
            first = max((tree for tree in map(_tree, self._lines()) if tree is not None), default=-1) + 1
            text = b"\n".join(_in_tree(line, first) for line in added) + b"\n"
            self._write(text if self._ends_with_a_line() else b"\n" + text)
        return len(added)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _check_unit(self, unit: object) -> None:
        if self.unit is not None and unit not in (None, self.unit):
            raise ConfigError(
                f"the ledger {self.path} has releases that protect a {unit}, and this run protects a {self.unit}: the "
                f"two claims cannot be added. Give each its own folder (ledger=, checkpoint=)",
                field="privacy",
            )

    def _lines(self) -> list[bytes]:
        return [line for line in self.path.read_bytes().split(b"\n") if line]

    def _write(self, text: bytes) -> None:
        written = os.write(self._file, text)
        os.fsync(self._file)
        if written != len(text):
            raise OSError(f"{self.path}: only {written} of {len(text)} bytes were written")

    def _ends_with_a_line(self) -> bool:
        size = os.fstat(self._file).st_size
        return size == 0 or os.pread(self._file, 1, size - 1) == b"\n"


def open_ledger(folder: str | None, unit: str) -> ReleaseLedger:
    """Open the ledger in `folder`, which the job's driver has created: see `rayps.runtime.records.ledger_folder`.

    `unit` is what the releases of the caller protect.

    Raises ConfigError if this machine has no such ledger, or cannot write it.
    """
    if folder is None or not (Path(folder) / LEDGER).exists():
        raise ConfigError(
            f"the worker on {socket.gethostname()} does not find the ledger of private releases, which the job's "
            f"driver keeps in {folder}: run the worker on the driver's machine, or give a folder for checkpoints "
            "(of the service: --state-dir) on a file system that all machines share",
            field="privacy",
        )
    return ReleaseLedger(Path(folder), unit)


def _identity(line: bytes) -> object:
    """Return what tells the release of a line from all others: its time and its round; of a damaged line its text."""
    try:
        facts = json.loads(line)
        return facts["time"], facts["round"]
    except (ValueError, TypeError, KeyError):
        return line


def _tree(line: bytes) -> int | None:
    """Return the tree of a line; None if it has none or is damaged."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        return int(json.loads(line)["tree"])
    return None


def _in_tree(line: bytes, first: int) -> bytes:
    """Return a line whose tree has the number that it had plus `first`."""
    try:
        facts = json.loads(line)
        if facts["tree"] is None:
            return line
        return json.dumps(facts | {"tree": facts["tree"] + first}).encode()
    except (ValueError, TypeError, KeyError):
        return line


def _spent(trees: list[int | None]) -> Spent:
    numbers = [tree for tree in trees if tree is not None]
    return Spent(len(trees), tuple(numbers.count(tree) for tree in sorted(set(numbers))))


def _sync(folder: Path) -> None:
    """Flush a folder's entries to the disk."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)

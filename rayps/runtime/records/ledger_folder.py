"""Where the ledger of a private job's releases is: see `rayps.privacy.ledger`.

    a job of the service          the job's folder / "privacy"
    `rayps.train(ledger=...)`     that folder / "privacy"; several runs share it, one after another
    `rayps.train(checkpoint=...)` the folder for checkpoints / "privacy"
    none of these                 a temporary folder, which is removed with the run

A run that starts from a checkpoint of another folder carries over the releases in the ledger beside that checkpoint,
before its first own release: what was learned from the rows before is in its parameters.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

from rayps_client.errors import ConfigError

from rayps.core.refusals.table import refuse
from rayps.core.strategy.strategy import Phase
from rayps.core.urls import Location, is_url
from rayps.privacy.ledger import FOLDER, LEDGER, ReleaseLedger
from rayps.privacy.mechanism import Mechanism, Spent
from rayps.privacy.options import privacy_in
from rayps.runtime.records.state_folder import StateFolder

LOCK = "lock"  # name of the file that the run which uses a shared ledger has locked


class LedgerFolder:
    """The folder of one run's ledger. A temporary one is removed when no object refers to this object any more.

    `carried` is the number of releases of earlier runs that the ledger got now. `unknown` is a warning if a checkpoint
    has no ledger beside it, and None otherwise.
    """

    def __init__(self, home: Path | None, resume: Location | None, *, shared: bool = False) -> None:
        """Create the ledger in `home`, or in a temporary folder if that is None. Carry over the ledger of `resume`.

        `shared`: whether other runs use the ledger too. Until `release` no other run of this machine gets it then, so
        that each run is charged for the releases of all others.

        Raises ConfigError if the folder cannot be written, the earlier ledger not be read, or another run uses it.
        """
        self._scratch: StateFolder | None = None
        self._unlock: weakref.finalize[[int], LedgerFolder] | None = None
        if home is None:
            self._scratch = StateFolder()
            home = self._scratch.path
        self.path = home.absolute() / FOLDER
        self.carried, self.unknown = 0, None if resume is None else _warn_of_unknown(resume)
        ledger = ReleaseLedger(self.path)
        if shared:
            self._unlock = weakref.finalize(self, os.close, _lock(self.path))
            if ledger.path.stat().st_size:
                self.unknown = None  # the run that made the checkpoint is one of those that share the ledger
        try:
            for earlier in () if resume is None or is_url(resume) else _find_beside(Path(resume)):
                if earlier.resolve() != self.path.resolve():
                    self.carried += ledger.carry_over(earlier)
        except OSError as error:
            raise ConfigError(
                f"the ledger of private releases beside {resume} cannot be copied: {error.strerror or error}. Make it "
                "readable, or start without the checkpoint",
                field="privacy",
            ) from error
        finally:
            ledger.close()

    def spent(self, unit: str) -> dict[Mechanism, Spent]:
        """Return what all releases in the ledger have spent. Raises ConfigError if they protect another unit."""
        ledger = ReleaseLedger(self.path, unit)
        try:
            return ledger.spent()
        finally:
            ledger.close()

    @contextlib.contextmanager
    def released_on_error(self) -> Iterator[None]:
        """Let other runs use the ledger if the block raises, because this run then does not start."""
        try:
            yield
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Let other runs use the ledger, if it is shared."""
        if self._unlock is not None:
            self._unlock()  # a second call has no effect


def find_ledger_folder(
    phases: Sequence[Phase],
    job: Path | None,
    checkpoints: Location | None,
    resume: Location | None,
    shared: Path | None = None,
) -> LedgerFolder | None:
    """Return the folder of the ledger; None if no phase has the option `privacy`.

    `job` is the folder of a job of the service, `checkpoints` the folder for checkpoints, `resume` the checkpoint to
    start from, and `shared` the folder of a ledger that several runs share. None means that there is none.

    Raises:
        ConfigError: only some phases are private, `shared` is given and none is, another run uses that ledger, or
            checkpoints are behind a URL, where nothing can be appended.
    """
    private = [privacy_in(phase.strategy) is not None for phase in phases]
    if not any(private):
        if shared is not None:
            refuse({"ledger": str(shared), "no privacy": True})
        return None
    if not all(private):
        open_phase = phases[private.index(False)]
        raise ConfigError(
            f"phase {private.index(False) + 1} ({open_phase.strategy.name}) has no privacy and another phase has: it "
            "would learn from the same rows without noise. Give each phase the option privacy, or none",
            field="privacy",
        )
    if shared is not None:
        return LedgerFolder(shared, resume, shared=True)
    if job is None and checkpoints is not None and is_url(checkpoints):
        refuse({"privacy of any kind": True, "checkpoints behind a URL": str(checkpoints)})
    return LedgerFolder(job if job is not None else None if checkpoints is None else Path(checkpoints), resume)


def _lock(folder: Path) -> int:
    """Lock a shared ledger, until the file is closed or the process ends. Raises ConfigError if it is locked."""
    file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        why = (
            f"another run uses the ledger of private releases in {folder}: wait until it has ended, because each run "
            "is charged for the releases of all others"
            if isinstance(error, BlockingIOError)
            else f"the ledger of private releases in {folder} cannot be locked ({error.strerror}): give a folder on a "
            "file system that has locks"
        )
        raise ConfigError(why, field="ledger") from error
    return file


def _find_beside(checkpoint: Path) -> list[Path]:
    """Return the folder with the ledger of a checkpoint, in a list: beside it, or further up as in a job's folder."""
    places = checkpoint.absolute().parents[:3]  # a job's best checkpoint is JOB/checkpoints/best/step-N
    return [place / FOLDER for place in places if (place / FOLDER / LEDGER).exists()][:1]


def _warn_of_unknown(resume: Location) -> str | None:
    if not is_url(resume) and _find_beside(Path(resume)):
        return None
    return (
        f"{resume} has no ledger of private releases beside it: what its parameters disclose of the rows is not part "
        "of epsilon. If a private job made it, copy that job's folder 'privacy' beside it"
    )

"""Where the ledger of a private job's releases is: see `rayps.privacy.ledger`.

    a job of the service          the job's folder / "privacy"
    `rayps.train(checkpoint=...)` the folder for checkpoints / "privacy"
    neither                       a temporary folder, which is removed with the run

A run that starts from a checkpoint of another folder carries over the releases in the ledger beside that checkpoint,
before its first own release: what was learned from the rows before is in its parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rayps.core.errors import ConfigError
from rayps.core.strategy import Phase
from rayps.core.urls import Location, is_url
from rayps.privacy.ledger import FOLDER, LEDGER, ReleaseLedger
from rayps.privacy.options import privacy_in
from rayps.runtime.state_folder import StateFolder


class LedgerFolder:
    """The folder of one run's ledger. A temporary one is removed when no object refers to this object any more.

    `carried` is the number of releases of earlier runs that the ledger got now. `unknown` is a warning if a checkpoint
    has no ledger beside it, and None otherwise.
    """

    def __init__(self, home: Path | None, resume: Location | None) -> None:
        """Create the ledger in `home`, or in a temporary folder if that is None. Carry over the ledger of `resume`.

        Raises ConfigError if the folder cannot be written, or the earlier ledger not be read.
        """
        self._scratch: StateFolder | None = None
        if home is None:
            self._scratch = StateFolder()
            home = self._scratch.path
        self.path = home.absolute() / FOLDER
        self.carried, self.unknown = 0, None if resume is None else _unknown(resume)
        ledger = ReleaseLedger(self.path)
        try:
            for earlier in () if resume is None or is_url(resume) else _beside(Path(resume)):
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


def ledger_folder(
    phases: Sequence[Phase], job: Path | None, checkpoints: Location | None, resume: Location | None
) -> LedgerFolder | None:
    """Return the folder of the ledger; None if no phase has the option `privacy`.

    `job` is the folder of a job of the service, `checkpoints` the folder for checkpoints, and `resume` the checkpoint
    to start from. None means that there is none.

    Raises:
        ConfigError: only some phases are private, or checkpoints are behind a URL, where nothing can be appended.
    """
    private = [privacy_in(phase.strategy) is not None for phase in phases]
    if not any(private):
        return None
    if not all(private):
        open_phase = phases[private.index(False)]
        raise ConfigError(
            f"phase {private.index(False) + 1} ({open_phase.strategy.name}) has no privacy and another phase has: it "
            "would learn from the same rows without noise. Give each phase the option privacy, or none",
            field="privacy",
        )
    if job is None and checkpoints is not None and is_url(checkpoints):
        raise ConfigError(
            f"checkpoint is {str(checkpoints)!r}, and the ledger of private releases cannot be appended to there: give "
            "a local folder (checkpoint=DIR, --checkpoint DIR), or start the job by the service, which has a folder",
            field="checkpoint",
        )
    return LedgerFolder(job if job is not None else None if checkpoints is None else Path(checkpoints), resume)


def _beside(checkpoint: Path) -> list[Path]:
    """Return the folder with the ledger of a checkpoint, in a list: beside it, or further up as in a job's folder."""
    places = checkpoint.absolute().parents[:3]  # a job's best checkpoint is JOB/checkpoints/best/step-N
    return [place / FOLDER for place in places if (place / FOLDER / LEDGER).exists()][:1]


def _unknown(resume: Location) -> str | None:
    if not is_url(resume) and _beside(Path(resume)):
        return None
    return (
        f"{resume} has no ledger of private releases beside it: what its parameters disclose of the rows is not part "
        "of epsilon. If a private job made it, copy that job's folder 'privacy' beside it"
    )

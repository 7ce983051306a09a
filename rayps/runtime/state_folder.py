"""A folder for the parts of a run's state, if the run has no folder for checkpoints."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path


class StateFolder:
    """A new temporary folder, which is removed when no object refers to it any more, or when the process ends."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="rayps-state-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

"""The folder of a run's traces: FOLDER/rank-N.json, one for each worker."""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, runtime_checkable

from rayps_client.errors import ConfigError

from rayps.cluster.members import GroupMember
from rayps.runtime.records.journal import Journal


@runtime_checkable
class TracedFacts(Protocol):
    """The facts of a worker that may deliver a trace."""

    trace: bytes | None  # compressed; removed when it is written


class TraceFolder:
    """Writes the traces that workers deliver. A worker whose trace is there is not traced again."""

    def __init__(self, folder: Path, journal: Journal) -> None:
        self.folder, self._journal = folder, journal

    def must_be_empty(self) -> None:
        """Create the folder. Raises ConfigError if it has traces of an earlier run, or cannot be written."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            held = sorted(path.name for path in self.folder.glob("rank-*.json"))
        except OSError as error:
            raise ConfigError(
                f"profile is {str(self.folder)!r}, which cannot be written: {error.strerror or error}", field="profile"
            ) from error
        if held:
            raise ConfigError(
                f"{self.folder} has traces of an earlier run ({held[0]}): give another folder", field="profile"
            )

    def ranks_to_trace(self, workers: int) -> frozenset[int]:
        """Return the ranks whose trace is not there yet."""
        return frozenset(rank for rank in range(workers) if not self._name_path(rank).exists())

    def collect(self, workers: Iterable[GroupMember]) -> None:
        """Write the traces in the workers' newest facts, and report each as an event."""
        for rank, facts in ((each.rank, each.facts) for each in workers):
            if not isinstance(facts, TracedFacts) or facts.trace is None:
                continue
            trace, facts.trace = facts.trace, None
            path = self._name_path(rank)
            draft = path.with_name(f".{path.name}.{os.getpid()}")
            try:
                draft.write_bytes(gzip.decompress(trace))
                draft.replace(path)
            except OSError as error:
                draft.unlink(missing_ok=True)
                self._journal.event("warning", f"the trace {path} cannot be written: {error.strerror or error}")
                continue
            self._journal.event(
                "profiled", f"worker-{rank} has a trace: open {path} in https://ui.perfetto.dev", path=str(path)
            )

    def _name_path(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.json"

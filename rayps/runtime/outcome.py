"""How a run ended."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rayps.core.job import Status
from rayps.tensors.snapshot import Snapshot


@dataclass(slots=True)
class Outcome:
    """How a run ended."""

    status: Status
    message: str
    metrics: dict[str, float] = field(default_factory=dict)
    snapshot: Snapshot | None = None
    checkpoint: Path | None = None
    error: Exception | None = None
    tables: dict[str, list[Any]] = field(default_factory=dict)  # where there is no checkpoint: states of their segments

    def to_dict(self) -> dict[str, Any]:
        """What `outcome.json` says."""
        return {
            "status": self.status,
            "message": self.message,
            "metrics": self.metrics,
            "finished_at": time.time(),
            "checkpoint": str(self.checkpoint) if self.checkpoint else None,
            "error": type(self.error).__name__ if self.error else None,
        }

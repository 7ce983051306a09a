"""Where an actor runs, and in which folder."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ActorHost:
    """Where an actor runs."""

    host: str
    pid: int
    address: str


def enter(working_dir: str | None) -> None:
    """Work where the user does, if that folder is here, so that relative paths and imports mean the same."""
    if working_dir and Path(working_dir).is_dir() and Path.cwd() != Path(working_dir):
        os.chdir(working_dir)
        sys.path.insert(0, working_dir)

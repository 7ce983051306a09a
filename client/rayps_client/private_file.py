"""Write files that only their owner can read."""

from __future__ import annotations

import os
from pathlib import Path


def private_write(path: Path, text: str) -> None:
    """Write a file atomically, readable by its owner only."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    part.replace(path)
